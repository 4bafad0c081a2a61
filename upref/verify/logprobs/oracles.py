# SPDX-License-Identifier: Apache-2.0
"""What is asked of a log-probability function, an oracle each, and why it is wrong
where it is.

One file: a catalogue is read as one.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.user_code.logprobs import Kernel, KernelOutcome, Problem
from upref.verify.faults import known
from upref.verify.faults.logprobs import (
    PLAIN as ANYWHERE,
    RIGHT,
    LogprobFault,
    Stages,
    is_same,
    solved,
    states,
)
from upref.verify.finding import NO_CAUSE, Cause, Example, Number, number_pair
from upref.verify.logprobs import problems, ranks as distributed
from upref.verify.oracle import Oracle, oracle, untouched
from upref.verify.report import Finding, fail, note

# how near is equal, for what computes in float64, float32 and half precision
DOUBLE = 1e-8
SINGLE = 1e-4
HALF = 0.06
# of dW in bfloat16, in errors of rounding the exact one once: a note, a failure
ONE_ROUNDING = 2.0
MANY = 5.0
VALUES = {"log-prob", "entropy"}
# how far a factor that all numbers share may be from 1: a temperature that is rounded
# to bfloat16 is off by up to 0.002
FACTOR = 3e-3
# of which numbers: one of dW is a sum, which rounding may shrink
SCALED = {"log-prob", "gradient of hidden", "gradient of logits"}


@dataclass
class KernelCase:
    """What the oracles read. tol: by the name of a number."""

    kernel: Kernel
    tol: dict[str, float]
    ranks: int = 1
    failed: set[str] = field(default_factory=set)
    done: dict[str, list[tuple[Problem, KernelOutcome]]] = field(default_factory=dict)

    @property
    def rough(self) -> float:
        return max(self.tol.values())

    def plain(self, name: str) -> list[tuple[Problem, KernelOutcome]]:
        """The plain problems of this oracle, and what the function said, asked once."""
        if name not in self.done:
            self.done[name] = [
                (p, self.kernel(p)) for p in problems.plain(self.kernel)[name].values()
            ]
        return self.done[name]

    def worst_number(
        self,
        problem: Problem,
        done: KernelOutcome,
        want: KernelOutcome,
        least: float = 0.0,
    ) -> Any:
        """(how often the tolerance, name of the number, where, expected, found) of the
        worst number.

        Args:
            problem: the problem.
            done: what the function answered.
            want: what it should answer.
            least: the tolerance, where that of a number is smaller.
        """
        worst: tuple[float, str, tuple[int, ...], float, float] = (
            0.0,
            "",
            (),
            0.0,
            0.0,
        )
        for key, found in done.numbers.items():
            y = want.numbers[key]
            if problem.keep is not None and key in VALUES:
                found, y = (torch.where(problem.keep, v, 0) for v in (found, y))
            size = max(
                [
                    1.0 if key in VALUES else 1e-3,
                    *y[y.isfinite()].abs().sort().values[-1:].tolist(),
                ]
            )
            gap = torch.where(
                (found == y) | (found.isnan() & y.isnan()), 0, (found - y).abs()
            ).nan_to_num(nan=math.inf)
            times = gap.max().item() / size / max(self.tol[key], least)
            if times > worst[0]:
                index = tuple(
                    int(i) for i in torch.unravel_index(gap.argmax(), y.shape)
                )
                worst = (times, key, index, y[index].item(), found[index].item())
        return worst

    def does(
        self,
        f: Stages,
        problem: Problem,
        done: KernelOutcome,
        keys: set[str],
        most: float = 3.0,
    ) -> bool:
        """Whether the reference with this change gives these numbers, within a
        multiple of their tolerance.
        """
        if f.inner:
            rows = torch.arange(problem.tokens.shape[-1]).expand_as(problem.tokens)
            problem = replace(problem, keep=(rows > 0) & (rows < rows.max()))
        try:
            part = KernelOutcome({k: v for k, v in done.numbers.items() if k in keys})
            return (
                not (f.inner and keys != {"log-prob"})
                and self.worst_number(problem, part, solved(problem, f))[0] <= most
            )
        except (RuntimeError, IndexError):  # a stage that this problem has not
            return False

    def cause(
        self, problem: Problem, done: KernelOutcome, also: Iterable[Problem]
    ) -> Cause:
        """The first known fault that gives the numbers of the problem and of the plain problems,
        which the reference does not: all of them, else those of one name that is off, a
        gradient with the values that it belongs to."""
        errors = {
            k: self.worst_number(problem, KernelOutcome({k: v}), solved(problem))[0]
            for k, v in done.numbers.items()
        }
        asked = [
            plain_problem
            for name in problems.plain(self.kernel)
            for plain_problem in self.plain(name)
        ]
        asked += [(q, self.kernel(q)) for q in also]
        names = {"": set(errors)} | {
            k: {k} if k in VALUES else {k, *VALUES} for k, x in errors.items() if x > 1
        }
        for name, keys in names.items():
            most = min(3.0, errors[name] / 3 if name else max(errors.values()) / 3)
            for f in known("logprobs", problem):
                if self.does(f.change, problem, done, keys, most) and all(
                    self._same(f, *plain_problem, keys) for plain_problem in asked
                ):
                    alone = name and len(errors) > 1
                    words = f"{f.words} (by the {name} alone)" if alone else f.words
                    return Cause(words, (f.id,))
        return NO_CAUSE

    def _same(
        self, f: LogprobFault, problem: Problem, done: KernelOutcome, keys: set[str]
    ) -> bool:
        """Whether this fault gives the numbers of a plain problem. Where it may act on
        large sizes alone, the reference or a fault that is the same may give them.
        """
        # some code cuts tiles above a size alone
        changes = [f.change]
        if f not in ANYWHERE:
            same = (
                candidate.change
                for candidate in known("logprobs", problem)
                if is_same(f, candidate)
            )
            changes = [RIGHT, next(same, RIGHT)]
        return any(self.does(candidate, problem, done, keys) for candidate in changes)

    def compare(
        self,
        name: str,
        words: str,
        problem: Problem,
        done: KernelOutcome,
        least: float = 0.0,
        also: Iterable[Problem] = (),
    ) -> list[Finding]:
        """A failure with the number that differs most, or nothing."""
        times, key, index, want, found = self.worst_number(
            problem, done, solved(problem), least
        )
        why = NO_CAUSE
        with contextlib.suppress(InputError):
            why = self.cause(problem, done, also) if times > 1 else why
        if times <= 1:
            return []
        return [
            fail(
                name,
                words,
                *number_pair(f"{key}{list(index)}", want, found),
                shown(problem),
                why,
            )
        ]


MOST_NUMBERS = 40  # of a problem that is printed


def shown(problem: Problem) -> Example | None:
    """The problem as an example, or None where it is too large to read."""
    if sum(v.numel() for v in problem.leaves.values()) > MOST_NUMBERS:
        return None
    tensors = problem.leaves | {
        "tokens": problem.tokens,
        "bias": problem.bias,
        "upstream": problem.g,
        "upstream_entropy": problem.g_H,
    }
    inputs = {name: v.tolist() for name, v in tensors.items() if v is not None}
    return Example(inputs | {"temperature": problem.temperature})


# ---- what is compared on problems ----------------------------------------------------
def wrong(case: KernelCase) -> str:
    """Say why an oracle of unusual problems does not run.

    Args:
        case: the function and what was found so far.

    Returns:
        The reason; "" where plain problems are right.
    """
    return "wrong on plain batches already" if case.failed & set(PLAIN) else ""


def plain(name: str, why: str = "it returns no entropy") -> Oracle:
    """The oracle of the plain problems of this name."""

    def look(case: KernelCase) -> list[Finding]:
        """The first difference on these problems."""
        asked = zip(problems.plain(case.kernel)[name], case.plain(name), strict=True)
        return next(
            (
                found
                for words, problem_and_outcome in asked
                if (found := case.compare(name, words, *problem_and_outcome))
            ),
            [],
        )

    return Oracle(
        name, look, lambda case: "" if name in problems.plain(case.kernel) else why
    )


def compared(
    name: str,
    asked: Callable[[Kernel], dict[str, Problem]],
    least: Callable[[KernelCase], float] = lambda case: 0.0,
    also: Callable[[Kernel], Iterable[Problem]] = lambda k: (),
    not_run: Callable[[KernelCase], str] = wrong,
    refused: str | None = None,
) -> Oracle:
    """The first of these problems on which it is wrong. refused: what a note adds where
    it refuses one.
    """

    def look(case: KernelCase) -> Iterator[Finding]:
        """What each problem shows: a difference, NaN, or a refusal."""
        told = False
        for words, p in asked(case.kernel).items():
            try:
                outcome = case.kernel(p)
            except InputError as e:
                if refused is None:
                    raise
                if not told:
                    yield note(name, f"refused: {words}{refused} ({str(e)[:120]})")
                told = True
                continue
            loud = sorted(k for k, v in outcome.numbers.items() if v.isnan().any())
            if name == "forbidden" and loud and "log-prob" not in loud:
                yield note(
                    name, f"{words}: NaN in the {', '.join(loud)}", cause="0 times -inf"
                )
                outcome = KernelOutcome(
                    {k: v for k, v in outcome.numbers.items() if k not in loud}
                )
            if found := case.compare(
                name, words, p, outcome, least(case), also(case.kernel)
            ):
                yield from found
                return

    return Oracle(name, look, not_run)


@oracle("repeated-backward", not_run=wrong)
def repeated(case: KernelCase) -> Iterator[Finding]:
    """The backward pass, twice."""
    again = case.kernel(problems.random_problem(case.kernel), twice=True).again
    if again == "other numbers":
        why = "the backward changes a buffer that it reads"
        yield fail(
            "repeated-backward",
            "the backward, twice",
            "the same gradients",
            "other gradients",
            cause=why,
        )
    elif again:
        yield note("repeated-backward", f"a second backward is refused ({again[:120]})")


@oracle("padding", not_run=wrong)
def padding(case: KernelCase) -> Iterator[Finding]:
    """NaN in the states of masked tokens reaches nothing."""
    p = problems.masked(
        problems.random_problem(case.kernel, 6, 9, 3, 12), [[1, 1, 1], [1, 0, 0]]
    )
    assert p.keep is not None
    try:
        outcome = case.kernel(
            replace(p, x=torch.where(p.keep[..., None], p.x, math.nan))
        )
    except InputError as e:
        yield note(
            "padding", f"refused: NaN in the states of a masked token ({str(e)[:120]})"
        )
        return
    times, key, *_ = case.worst_number(
        p,
        KernelOutcome({k: v for k, v in outcome.numbers.items() if k in VALUES}),
        solved(p),
    )
    if times > 1:
        yield fail(
            "padding",
            "NaN in the states of a masked token",
            f"{key} of other tokens unchanged",
            "it changes",
        )
    if (
        "gradient of weight" in outcome.numbers
        and outcome.numbers["gradient of weight"].isnan().any()
    ):
        why = "NaN in the states of a masked token reaches the gradient of the weight"
        yield note("padding", why, cause="0 times NaN")


@oracle("determinism")
def determinism(case: KernelCase) -> Iterator[Finding]:
    """The same logits, or hidden states, get the same numbers twice."""
    first_numbers, second_numbers = (
        case.kernel(problems.random_problem(case.kernel)).numbers for _ in range(2)
    )
    if any(
        not torch.equal(v.nan_to_num(), second_numbers[k].nan_to_num())
        for k, v in first_numbers.items()
    ):
        yield fail(
            "determinism", "the same tokens twice", "the same numbers", "other numbers"
        )


@oracle("mutation")
def mutation(case: KernelCase) -> Iterator[Finding]:
    """The inputs are left as they were."""
    yield from untouched(
        case.kernel(
            problems.random_problem(
                case.kernel, temperature=problems.low_temperature(case.kernel)
            )
        )
    )


# ---- precision -----------------------------------------------------------------------
def gaps(done: KernelOutcome, want: KernelOutcome) -> dict[str, float]:
    """Measure how far each number of an answer is from the right one.

    Args:
        done: what the function answered.
        want: what it should answer.

    Returns:
        The largest absolute difference, by the name of the number.
    """
    return {
        k: (v - want.numbers[k]).abs().max().item() for k, v in done.numbers.items()
    }


def rounded(
    name: str, off: dict[str, float], least: float, words: str
) -> list[Finding]:
    """Note the log-probabilities and entropies that rounding moves.

    Args:
        name: of the oracle.
        off: the largest difference of each number, by its name.
        least: differences up to this are not noted.
        words: on which inputs.

    Returns:
        One note, or none.
    """
    said = [f"{k} off by {v:.1e}" for k, v in off.items() if k in VALUES and v > least]
    return [note(name, f"{', '.join(said)} {words}", cause="rounding")] if said else []


@oracle(
    "large-vocabulary",
    not_run=lambda case: (
        wrong(case) or ("wrong on tiles already" if "tiles" in case.failed else "")
    ),
)
def large(case: KernelCase) -> Iterator[Finding]:
    """A vocabulary of a real model."""
    worst = dict.fromkeys(VALUES, 0.0)
    for words, p in problems.large(case.kernel).items():
        outcome = case.kernel(p)
        yield from case.compare("large-vocabulary", words, p, outcome, least=0.05)
        worst |= {k: max(worst[k], v) for k, v in gaps(outcome, solved(p)).items()}
    yield from rounded(
        "large-vocabulary", worst, 2e-5, "in float32 with one peak at V = 151,936"
    )


@oracle("bfloat16", not_run=wrong)
def bfloat16(case: KernelCase) -> Iterator[Finding]:
    """Inputs in bfloat16, and how the results are added up."""
    p = problems.random_problem(case.kernel, 8191, 7, 8, 13)
    p = replace(p, g=torch.ones_like(p.tokens).double(), g_H=None).to(torch.bfloat16)
    try:
        outcome = case.kernel(p)
    except InputError as e:
        yield note("bfloat16", f"bfloat16 is refused ({str(e)[:120]})")
        return
    want = solved(p)
    gaps_found = gaps(outcome, want)
    size = want.numbers["log-prob"].abs().max().item()
    if max(gaps_found["log-prob"], gaps_found.get("entropy", 0.0)) / size <= HALF:
        yield from rounded("bfloat16", gaps_found, 1e-4, "for bfloat16 inputs")
    else:
        yield from case.compare(
            "bfloat16", "hidden states and weight in bfloat16", p, outcome, least=HALF
        )
    yield from _scaled(outcome, want)
    if "gradient of weight" in gaps_found:
        exact = want.numbers["gradient of weight"]
        times = (
            gaps_found["gradient of weight"]
            / (exact.bfloat16().double() - exact).abs().max().item()
        )
        if not times <= MANY:
            words = "8,191 tokens: the error of dW, over that of rounding the exact one once"
            yield fail(
                "bfloat16",
                words,
                Number(MANY, "at most"),
                Number(times),
                cause=_summed(p, outcome, exact),
            )
        elif times > ONE_ROUNDING:
            words = f"8,191 tokens: dW is off by {times:.1f} times what rounding the exact one once costs"
            yield note("bfloat16", words, cause="rounding")


def _scaled(done: KernelOutcome, want: KernelOutcome) -> Iterator[Finding]:
    """The first number whose values share a factor, beyond what chance explains.

    Rounding goes up as often as down, so over many tokens it leaves none. A temperature
    that is a few percent off does.
    """
    for key, found in done.numbers.items():
        if key not in SCALED:
            continue
        right = want.numbers[key]
        size = right.square().sum()
        k = (found * right).sum() / size
        # the standard error of k, from what is left beside the factor
        error = ((found - k * right) * right).square().sum().sqrt() / size
        if (k - 1).abs() <= FACTOR + 4 * error:
            continue
        regime = f"8,191 tokens in bfloat16: the factor that every {key} has in common"
        yield fail(
            "bfloat16", regime, Number(1.0, "factor"), Number(k.item(), "factor")
        )
        return


def _summed(problem: Problem, done: KernelOutcome, exact: Tensor) -> str:
    """Whether adding dW up in bfloat16, n tokens at a time, gives these numbers."""
    q = problem.to(torch.float64)
    x = q.x.flatten(0, 1)
    dx = torch.nn.functional.one_hot(problem.tokens.flatten()) - states(q).softmax(
        -1
    ).flatten(0, 1)
    found = done.numbers["gradient of weight"]
    distances = {}
    for n in (2**k for k in range(11)):
        total = torch.zeros_like(exact, dtype=torch.bfloat16)
        for u, v in zip(dx.split(n), x.split(n), strict=True):
            total += (u.T @ v).bfloat16()
        distances[n] = (found - total.double()).abs().max().item()
    n = min(distances, key=distances.__getitem__)
    like = distances[n] <= 0.35 * (found - exact).abs().max()
    if like:
        return f"dW is added up in bfloat16, {n} token{'s' if n > 1 else ''} at a time"
    return ""


@oracle(
    "ranks",
    not_run=lambda case: wrong(case) or ("on one rank" if case.ranks == 1 else ""),
)
def ranks(case: KernelCase) -> Iterator[Finding]:
    p = problems.random_problem(case.kernel, 6, 4 * case.ranks, 3, 14)
    yield from distributed.compared(case.kernel, p, case.ranks, case.worst_number)


NO_TEMPERATURE = "no temperature among its arguments"
# a GPU reads outside of its memory there, or answers nothing more in this process
LOSES_GPU = "on a GPU an id that is out of range may end the process"
PLAIN = ("values", "temperature", "gradient", "entropy-gradient", "gradients")
ORACLES: tuple[Oracle, ...] = (
    determinism,
    plain("values"),
    plain("temperature", NO_TEMPERATURE),
    *map(plain, PLAIN[2:]),
    # 131,075 columns
    compared(
        "tiles",
        problems.tiles,
        lambda case: 0.0 if case.rough == DOUBLE else 20 * SINGLE,
        lambda k: [problems.random_problem(k, 4099, 4, 2, 10)],
    ),
    compared(
        "temperatures",
        problems.temperatures,
        not_run=lambda case: (
            wrong(case)
            or ("" if "temperature" in case.kernel.settings else NO_TEMPERATURE)
        ),
    ),
    compared("peak", problems.peaks),
    compared(
        "offset",
        problems.offset,
        lambda case: 0.05 if case.rough > DOUBLE else 1e-6,
        lambda k: problems.offset(k).values(),
        not_run=lambda case: (
            wrong(case)
            or ("it computes in half precision" if case.rough >= HALF else "")
        ),
    ),
    compared(
        "forbidden",
        problems.forbidden,
        not_run=lambda case: (
            wrong(case)
            or ("" if problems.forbidden(case.kernel) else "no logit can be -inf")
        ),
    ),
    compared(
        "ignored-ids",
        problems.ignored,
        refused=": give padding any valid id",
        not_run=lambda case: wrong(case) or (LOSES_GPU if case.kernel.on_gpu else ""),
    ),
    compared("layout", problems.layout, refused=""),
    repeated,
    compared(
        "frozen",
        problems.frozen,
        not_run=lambda case: (
            wrong(case) or ("one input" if case.kernel.kind == "logits" else "")
        ),
    ),
    padding,
    mutation,
    large,
    bfloat16,
    ranks,
)
