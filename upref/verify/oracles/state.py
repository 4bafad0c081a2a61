# SPDX-License-Identifier: Apache-2.0
"""The oracle of state: whether a loss gives one gradient for one batch, and at which call
that changed.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from upref.errors import Gone, InputError
from upref.rollouts import Rollouts
from upref.user_code.counters import counters
from upref.user_code.guard import stopped
from upref.user_code.loss import Question
from upref.user_code.shapes import probe
from upref.verify.finding import number_pair
from upref.verify.measure import LossCase
from upref.verify.oracle import oracle
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import make_example, shrink

KEEPS_STATE = "it keeps state between calls, or reads a clock or a random generator"

CALLS_ON_GRID = 4
# calls on one small batch: a counter of a shorter period shows, whatever call it began at
CALLS_ON_SMALL_BATCH = 32
# calls of a check that failed which are repeated at its end: the first and the last ones
FIRST_REPEATED = 100
LAST_REPEATED = 200
# calls on a batch whose answer has changed, to find whether it changes once more
CALLS_ON_CHANGED_BATCH = 128


@oracle("determinism", 0, needed=True)
def determinism(case: LossCase) -> list[Finding]:
    """Report a loss that has two gradients, or two values, for one batch.

    The loss gets the grid four times, and then a small batch so often that a counter of
    a short period shows. `state` repeats the first batch at the end of the check.

    Args:
        case: the loss and its objective. Its `value_tol` is set where the value changes.

    Returns:
        A failure where the gradient changes, which says whether the loss draws random
        numbers or keeps state, and since when; a note where the value alone changes.
    """
    log = case.loss.log
    grid = case.grid(thin=5)
    batch = grid
    first_call = len(log)
    of_grid = _answers(case, grid, CALLS_ON_GRID)
    if _have_one_gradient(of_grid):
        batch = case.ready(probe())
        first_call = len(log)
        of_small = _answers(case, batch, CALLS_ON_SMALL_BATCH)
        if _have_one_gradient(of_small):
            notes = _notes_of_values(case, (of_grid, of_small))
            return notes + _with_counter_ahead(case, grid)
    is_random = _seed_decides(case, batch)
    log_before_shrinking = list(log)

    def has_two_gradients(smaller: Rollouts) -> bool:
        """Return whether two calls on this batch have different gradients."""
        return not torch.equal(case.gradient(smaller), case.gradient(smaller))

    small = shrink(batch, has_two_gradients)
    shown = make_example(small, reads=case.loss.reads)
    if is_random:
        why = "it draws random numbers"
    else:
        repeats = [case.gradient(small) for _ in range(CALLS_ON_CHANGED_BATCH)]
        how = _words_for_repeats(repeats, "this batch")
        how = how or _words_for_change(log_before_shrinking, first_call)
        why = f"{KEEPS_STATE}: {how}"
    return [
        fail(
            "determinism",
            "the same batch twice",
            "the same numbers",
            "different numbers",
            shown,
            why,
        )
    ]


# what a counter of calls is set to, one less: it may change a loss there, or from there on
COUNTS = sorted({*(2**n for n in range(6, 21)), *(10**n for n in range(2, 7))})
MOST_LINES = 100_000  # of Python in such a call: the counter may be that of a loop


def _with_counter_ahead(case: LossCase, batch: Rollouts) -> list[Finding]:
    """Return a failure where the loss counts its calls and has another gradient at a
    call that a check does not reach.
    """
    found = counters(case.loss.call, lambda: case.gradient(batch))
    if not found:
        return []
    ahead = replace(case, loss=replace(case.loss, lines=MOST_LINES))
    numbers = [place.read() for place in found]
    number_of_next_call = len(case.loss.log) + 1
    gradient = case.gradient(batch)
    steps = {place.read() - n for place, n in zip(found, numbers, strict=True)}
    # one number, or several that are equal, which grow by 1 with each call
    counts_calls = len({*numbers}) == 1 and steps == {1}

    def differs(number: int) -> bool:
        """Set the counters to this number, and return whether the gradient is another one
        there.
        """
        for place in found:
            place.write(number)
        return not _same(ahead.gradient(batch), gradient)

    def words_for(turn: tuple[int, int]) -> str:
        """Return in words where the gradient changes: at which call, if the numbers count
        calls.

        Args:
            turn: as `_turn_between` returns it.
        """
        # the calls that the counter has not counted
        before = number_of_next_call - int(numbers[0])
        if counts_calls and min(turn) + before > 0:
            calls = _words_for_turn(turn[0] + before, turn[1] + before)
            return f"{calls}, counted from its first call in a process"
        return f"where a number that it counts up is {max(turn)}"

    numbers_to_try: list[int] = []
    for count in COUNTS:
        numbers_to_try += [count - 1, count]
    same = int(numbers[0])  # the last number at which the gradient was the same
    try:
        for number in numbers_to_try:
            with contextlib.suppress(InputError):  # the number is no counter
                if differs(number):
                    turn = _turn_between(differs, same, number)
                    return [_failure_of_counter(case, batch, words_for(turn))]
                same = number
    finally:
        for place, original in zip(found, numbers, strict=True):
            place.write(original)
    return []


def _turn_between(
    differs: Callable[[int], bool], same: int, other: int
) -> tuple[int, int]:
    """Return the numbers, the first and the last, at one of which a gradient changes.

    Args:
        differs: whether the gradient of a number is another one.
        same: a number at which it is not.
        other: a number at which it is.

    Returns:
        The number twice where each between them can be asked.
    """
    while abs(other - same) > 1:
        middle = (same + other) // 2
        try:
            if differs(middle):
                other = middle
            else:
                same = middle
        except InputError:
            break
    first, last = sorted((same, other))
    return first + 1, last


def _failure_of_counter(case: LossCase, batch: Rollouts, how: str) -> Finding:
    """Return the failure of a loss that has another gradient where its counter is
    larger.

    Args:
        case: the loss and its objective.
        batch: whose gradient changes.
        how: at which call, in words.
    """
    return fail(
        "determinism",
        "the same batch, after more calls",
        "the same numbers",
        "different numbers",
        make_example(batch, reads=case.loss.reads),
        f"it keeps state between calls: its gradient on one batch changes {how}",
    )


Answer = tuple[Tensor, Tensor]  # the value of the loss, and its gradient


def _answers(case: LossCase, batch: Rollouts, calls: int) -> list[Answer]:
    """Return the values and the gradients of so many calls on this batch."""
    return [case.value_and_gradient(batch) for _ in range(calls)]


def _have_one_gradient(answers: Sequence[Answer]) -> bool:
    """Return whether all calls have the gradient of the first one."""
    return all(_same(answers[0][1], gradient) for _, gradient in answers)


def _notes_of_values(
    case: LossCase, repeated: Sequence[Sequence[Answer]]
) -> list[Finding]:
    """Set `value_tol` of the case where repeated calls have one gradient and several
    values, and return a note where rounding does not explain the values.

    Args:
        case: the loss and its objective.
        repeated: the answers of the calls on each batch.
    """
    for answers in repeated:
        values = [value for value, _ in answers]
        case.allow_values(values)
        if case.value_tol < math.inf:
            continue
        distances = (torch.stack(values) - values[0]).abs().nan_to_num(nan=math.inf)
        furthest = values[int(distances.argmax())]
        return [
            note(
                "determinism",
                "the same batch again: the value differs, the gradient does not",
                *number_pair("value", values[0].item(), furthest.item()),
                "training uses only the gradient; a logger shows the value",
            )
        ]
    return []


# an order of two seeds that no counter has
SEEDS = (0, 1, 1, 0, 1, 0, 0, 0, 1, 1)


def _seed_decides(case: LossCase, batch: Rollouts) -> bool:
    """Return whether two calls have the same gradient exactly where they have the same
    seed. Then the loss draws random numbers, and its gradient depends on no state.
    """
    gradients = [
        (seed, _gradient_of(case.loss.ask("seeded", batch, seed))) for seed in SEEDS
    ]
    return all(
        _same(gradient, other) == (seed == other_seed)
        for seed, gradient in gradients
        for other_seed, other in gradients
    )


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    """Return whether two tensors are equal, NaN included, or both are None."""
    if x is None or y is None:
        return x is y
    return torch.equal(x.nan_to_num(nan=12345.0), y.nan_to_num(nan=12345.0))


def _gradient_of(answer: Any) -> Tensor | None:
    """Return the gradient in an answer of the loss, or None where it has none."""
    if isinstance(answer, tuple):
        answer = answer[1]
    return answer if isinstance(answer, Tensor) else None


def _gradient_now(question: Question) -> Tensor | None:
    """Return the gradient that a call of the log has now, or None where it has none."""
    with contextlib.suppress(InputError):
        return _gradient_of(question.loss.ask(question.method, *question.inputs))
    return None


def _has_changed(question: Question, call: int) -> bool:
    """Return whether a call of the log has another gradient now.

    Args:
        question: the call.
        call: its number.

    Raises:
        Gone: the loss raises now. Files, threads or memory may have run out meanwhile,
            or the loss has an error; its formula is not wrong for that.
    """
    loss = question.loss
    try:
        answer_now = loss.ask(question.method, *question.inputs)
        return not _same(_gradient_of(question.answer), _gradient_of(answer_now))
    except InputError as e:
        raise stopped(
            Gone(
                f"{loss.name} answered call {call}; on the same inputs it then raised: it has no one answer. {e}"
            )
        ) from e


def state(case: LossCase) -> list[Finding]:
    """Repeat the first batch at the end of a check; after a failure, the batches of
    other calls too. If the loss has changed meanwhile, its answers are not of one loss.

    Args:
        case: the loss and its objective, after all oracles.

    Returns:
        A failure of the oracle determinism, or nothing.

    Raises:
        Gone: the loss raises now on a batch that it has answered.
    """
    log = case.loss.log
    answered = [number for number, question in enumerate(log) if question]
    if case.failed:
        first_calls = answered[:FIRST_REPEATED]
        calls = first_calls + answered[FIRST_REPEATED:][-LAST_REPEATED:]
        # a batch that was asked often is asked once more
        first_asked: dict[Any, int] = {}
        for number in calls:
            first_asked.setdefault(_asked(log[number]), number)
        repeated = list(first_asked.values())
    else:
        repeated = answered[:1]
    for number in repeated:
        if _has_changed(log[number], number + 1):
            others = len(log) - number - 2
            text = f"a batch of the check, asked again after {others} other calls"
            why = f"{KEEPS_STATE}: {_words_for_change(log[: len(log) - 1], number)}"
            return [
                fail(
                    "determinism",
                    text,
                    "the same numbers",
                    "different numbers",
                    cause=why,
                )
            ]
    return []


def _asked(question: Question) -> Any:
    """Return a key of what a call of the log was asked, equal for equal calls on one batch
    object. A call that measures no gradient has a key of its own.
    """
    if question.method != "measured":
        return id(question)
    batch, ranks, wanting, overrides = question.inputs
    return batch, ranks, wanting, *overrides.items()


def _shows_factor(gradient: Tensor | None) -> bool:
    """Return whether a factor would change the gradient: it has a number that is
    neither 0, NaN nor infinite.
    """
    if gradient is None:
        return False
    return bool(gradient.nan_to_num(0.0, 0.0, 0.0).any())


def _words_for_repeats(repeats: Sequence[Tensor | None], which: str) -> str:
    """Return the words for the gradients of repeated calls on one batch, or "" where
    all are the same.

    Args:
        repeats: the gradients.
        which: the words for the batch.
    """
    changes = sum(not _same(x, y) for x, y in pairwise(repeats))
    if not changes:
        return ""
    if changes == len(repeats) - 1:
        return f"asked twice in a row with {which}, it gives two gradients"
    distinct: list[Tensor | None] = []
    for gradient in repeats:
        if not any(_same(gradient, other) for other in distinct):
            distinct.append(gradient)
    return (
        f"asked {len(repeats)} times in a row with {which}, it gives {len(distinct)} "
        "different gradients"
    )


def _words_for_change(log: list[Any], number: int) -> str:
    """Return the words for when the answers of the loss changed, so that a user can try
    it in a new process.

    If repeated calls still change, the words say how often. Else they say at which call
    of the process the state changed: each call of the log is repeated, and one that has
    another gradient now was made in another state. A call without a gradient shows
    nothing.

    Args:
        log: all calls of the process so far.
        number: the place in it of a call that has had two answers.
    """
    repeats = [_gradient_now(log[number]) for _ in range(CALLS_ON_CHANGED_BATCH)]
    if words := _words_for_repeats(repeats, "one batch"):
        return words
    # calls, and whether they were made in another state
    known: list[tuple[int, bool]] = []
    for call, question in enumerate(log, 1):
        if question is None:
            continue
        gradient_now = _gradient_now(question)
        in_other_state = not _same(_gradient_of(question.answer), gradient_now)
        if in_other_state or _shows_factor(gradient_now):
            known.append((call, in_other_state))
    if not any(in_other_state for _, in_other_state in known):
        return "its gradient on one batch has changed between two calls"
    return (
        f"its gradient on one batch changes {_describe_turn(known)}, counted "
        "from its first call in a process"
    )


def _describe_turn(known: list[tuple[int, bool]]) -> str:
    """Return the words for the call at which the state changed for good.

    Args:
        known: calls, and whether each was made in another state, as one of them was.

    Returns:
        Such as "at call 7", "after call 7" or "at one of the calls 5 to 7".
    """
    in_other_state = [call for call, moved in known if moved]
    has_moved_often = len(in_other_state) > 2 + len(known) / CALLS_ON_CHANGED_BATCH
    if has_moved_often and not known[0][1]:  # not all batches show it
        return f"after call {max(in_other_state)}"
    turns = [
        (call_before + 1, call)
        for (call_before, moved_before), (call, moved) in pairwise(known)
        if moved_before != moved
    ]
    if not turns:  # all of them were
        return f"after call {max(in_other_state)}"
    first, last = turns[-1] if has_moved_often else turns[0]
    return _words_for_turn(first, last)


def _words_for_turn(first: int, last: int) -> str:
    """Return the words for a change at one of these calls."""
    if first == last:
        return f"at call {last}"
    return f"at one of the calls {first} to {last}"
