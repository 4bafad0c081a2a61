# SPDX-License-Identifier: Apache-2.0
"""The oracle of state: whether a loss gives one answer for one batch, and at which call
that changed.
"""

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from upref.errors import Gone, InputError
from upref.rollouts import Rollouts
from upref.user_code.guard import stopped
from upref.user_code.shapes import probe
from upref.verify.measure import LossCase
from upref.verify.oracle import oracle
from upref.verify.report import Finding, fail
from upref.verify.shrink import make_example, shrink

STATE = "it keeps state between calls, or reads a clock or a random generator"

# times that a small batch is asked: a counter of a shorter period shows, at whatever
# call it began
TWICE = 32
# calls of a check that failed which are asked again: the first and the last
AGAIN = 100, 200
# times that a batch is asked which has changed: whether it changes once more
LONG = 128


@oracle("determinism", 0)
def determinism(case: LossCase) -> list[Finding]:
    """A loss that gets a batch twice has the same value and gradient twice.

    It gets the grid four times, and then a small batch often enough that a counter
    of a short period shows. `state` asks for the first batch once more, at the end.

    Args:
        case: the loss and its objective.

    Returns:
        A failure that says whether it draws random numbers or keeps state, and since
            when.
    """
    b = case.grid(thin=5)
    log = case.loss.log
    first = len(log)
    answers = [case.value_and_gradient(b) for _ in range(4)]
    if all(_all_same(answers[0], more) for more in answers):
        b = case.ready(probe())
        first = len(log)
        answers = [case.value_and_gradient(b) for _ in range(TWICE)]
        if all(_all_same(answers[0], more) for more in answers):
            return []
    drawn = _drawn(case, b, _all_same)
    before = list(log)
    small = shrink(b, lambda c: not torch.equal(case.gradient(c), case.gradient(c)))
    batch = make_example(small, reads=case.loss.reads)
    why = "it draws random numbers"
    if not drawn:
        repeats = [case.gradient(small) for _ in range(LONG)]
        how = _in_a_row(repeats, "this batch") or _since(before, first)
        why = f"{STATE}: {how}"
    return [
        fail(
            "determinism",
            "the same batch twice",
            "the same numbers",
            "other numbers",
            batch,
            why,
        )
    ]


def _drawn(case: LossCase, b: Rollouts, same: Callable[[Any, Any], bool]) -> bool:
    """Whether the seed decides the answer, in an order of seeds that no counter has."""

    answers = [
        (seed, case.loss.ask("seeded", b, seed))
        for seed in (0, 1, 1, 0, 1, 0, 0, 0, 1, 1)
    ]
    return all(same(x, y) == (i == j) for i, x in answers for j, y in answers)


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return torch.equal(x.nan_to_num(nan=12345.0), y.nan_to_num(nan=12345.0))


def _all_same(x: Any, y: Any) -> bool:
    """Whether the tensors of two answers are the same."""
    return all(map(_same, x, y))


def _gradient(answer: Any) -> Tensor | None:
    answer = answer[1] if isinstance(answer, tuple) else answer
    return answer if isinstance(answer, Tensor) else None


def _again(at: tuple[Any, ...]) -> Tensor | None:
    """The gradient that this call of the log has now; None where it has none."""
    with contextlib.suppress(InputError):
        return _gradient(at[0].ask(at[1], *at[2]))
    return None


def _changed(at: tuple[Any, ...], call: int) -> bool:
    """Whether the call of the log has another gradient now.

    Raises:
        Gone: it raises now. That tells of files, threads or memory that have run out
            meanwhile, or of an error of the loss, and not of another formula.
    """
    loss, what, inputs, answer = at
    try:
        return not _same(_gradient(answer), _gradient(loss.ask(what, *inputs)))
    except InputError as e:
        raise stopped(
            Gone(
                f"{loss.name} answered call {call}; on the same inputs it then raised: it has no one answer. {e}"
            )
        ) from e


def state(case: LossCase) -> list[Finding]:
    """The first batch once more, after all others; after a failure, the batches of
    other calls too. A loss that has changed meanwhile was not judged by one answer.

    Args:
        case: the loss and its objective, after all oracles.

    Returns:
        A failure of the oracle determinism, or nothing.

    Raises:
        Gone: a batch that the loss has answered makes it raise now.
    """
    log = case.loss.log
    asked = [n for n, at in enumerate(log) if at]
    for n in (
        [*asked[: AGAIN[0]], *asked[AGAIN[0] :][-AGAIN[1] :]]
        if case.failed
        else asked[:1]
    ):
        if _changed(log[n], n + 1):
            others = len(log) - n - 2
            text = f"a batch of the check, asked again after {others} other calls"
            why = f"{STATE}: {_since(log[: len(log) - 1], n)}"
            return [
                fail(
                    "determinism", text, "the same numbers", "other numbers", cause=why
                )
            ]
    return []


def _tells(gradient: Tensor | None) -> bool:
    """Whether a factor would change the gradient: 0, NaN and infinity stay."""
    if gradient is None:
        return False
    return bool(gradient.nan_to_num(0.0, 0.0, 0.0).any())


def _in_a_row(repeats: Sequence[Tensor | None], which: str) -> str:
    """How a batch that was asked again and again is answered, in words; "" where all
    answers are one.

    Args:
        repeats: its gradients.
        which: the batch, in words.
    """
    changes = sum(not _same(x, y) for x, y in pairwise(repeats))
    if not changes:
        return ""
    if changes == len(repeats) - 1:
        return f"asked twice in a row with {which}, it gives two gradients"
    kinds: list[Tensor | None] = []
    for x in repeats:
        if not any(_same(x, y) for y in kinds):
            kinds.append(x)
    return (
        f"asked {len(repeats)} times in a row with {which}, it gives {len(kinds)} "
        "different gradients"
    )


def _since(log: list[Any], n: int) -> str:
    """When the answers changed, in words that can be tried in a new process; the batch
    of call n has had two.

    Where it still changes, how often the batch must be asked. Else at which call of the
    log, which has all calls of the process: each call is asked again now, and one that
    had another answer was made in another state. Of a call without a gradient nothing
    is known.
    """
    repeats = [_again(log[n]) for _ in range(LONG)]
    if words := _in_a_row(repeats, "one batch"):
        return words
    # calls, and whether they were made in another state
    known: list[tuple[int, bool]] = []
    for call, at in enumerate(log, 1):
        if at is not None:
            now = _again(at)
            moved = not _same(_gradient(at[3]), now)
            if moved or _tells(now):
                known.append((call, moved))
    return (
        f"its gradient on one batch changes {_describe_turn(known, n + 1)}, counted "
        "from its first call in a process"
    )


def _describe_turn(known: list[tuple[int, bool]], turn: int) -> str:
    """Say at which call the state changed for good.

    Args:
        known: calls, and whether each was made in another state.
        turn: the call that is named where `known` does not tell.

    Returns:
        Such as "at call 7", "after call 7" or "at one of the calls 5 to 7".
    """
    turns = [(x + 1, y) for (x, was), (y, now) in pairwise(known) if was != now]
    # all calls up to one of them
    often = sum(moved for _, moved in known) > 2 + len(known) / LONG
    if often and not known[0][1]:  # not all batches show it
        return f"after call {max(call for call, moved in known if moved)}"
    first, last = (turns or [(turn, turn)])[-1 if often else 0]
    return (
        f"at call {last}" if first == last else f"at one of the calls {first} to {last}"
    )
