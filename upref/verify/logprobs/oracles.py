# SPDX-License-Identifier: Apache-2.0
"""The oracles of log-probability functions, and the search for why one is wrong.

One file: a catalogue is read as one.
"""

import contextlib
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from upref.errors import InputError
from upref.user_code.logprobs import Kernel, KernelOutcome, Problem
from upref.verify.faults import first_fitting, known
from upref.verify.faults.logprobs import (
    PLAIN as ANYWHERE,
    RIGHT,
    LogprobFault,
    Stages,
    is_same,
    solved,
    states,
)
from upref.verify.faults.measured import WEIGHT_OF_EARLIER_CALL
from upref.verify.finding import NO_CAUSE, Cause, Example, Number, number_pair
from upref.verify.logprobs import problems, ranks as distributed
from upref.verify.oracle import Oracle, oracle, untouched
from upref.verify.report import Finding, fail, note

# the tolerances of functions that compute in float64, float32 and half precision
DOUBLE_TOL = 1e-8
SINGLE_TOL = 1e-4
HALF_TOL = 0.06
# errors of dW in bfloat16, in errors of rounding the exact dW once: a larger one is a
# note, and then a failure
ONE_ROUNDING = 2.0
MANY = 5.0
VALUES = {"log-prob", "entropy"}  # the numbers that are no gradients
# how far a factor that all numbers share may be from 1: a temperature that is rounded
# to bfloat16 is off by up to 0.002
FACTOR_TOL = 3e-3
# of which numbers: one of dW is a sum, which rounding may shrink
SCALED = {"log-prob", "gradient of hidden", "gradient of logits"}


@dataclass
class KernelCase:
    """A log-probability function: what the oracles read.

    Attributes:
        kernel: the function.
        tol: the tolerance of each number, by its name.
        ranks: the number of ranks over which the vocabulary is split.
        failed: the names of the oracles that failed so far.
        done: the plain problems that the function has solved, by the name of the
            oracle.
    """

    kernel: Kernel
    tol: dict[str, float]
    ranks: int = 1
    failed: set[str] = field(default_factory=set)
    done: dict[str, list[tuple[Problem, KernelOutcome]]] = field(default_factory=dict)

    @property
    def largest_tolerance(self) -> float:
        """The largest tolerance of a number."""
        return max(self.tol.values())

    def plain(self, name: str) -> list[tuple[Problem, KernelOutcome]]:
        """Return the plain problems of an oracle with the function's outcomes. The
        function solves each once.
        """
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
    ) -> tuple[float, str, tuple[int, ...], float, float]:
        """Return the number that differs most, in tolerances.

        Args:
            problem: the problem.
            done: the function's outcome.
            want: the right outcome.
            least: the tolerance of a number is at least this.

        Returns:
            The error in tolerances, the name of the number, its index, and the expected
            and the found number. The error is 0 where all are equal.
        """
        worst: tuple[float, str, tuple[int, ...], float, float] = (
            0.0,
            "",
            (),
            0.0,
            0.0,
        )
        for name, found in done.numbers.items():
            expected = want.numbers[name]
            if problem.keep is not None and name in VALUES:
                found = torch.where(problem.keep, found, 0)
                expected = torch.where(problem.keep, expected, 0)
            # errors are relative to the largest number, if that is above this
            least_size = 1.0 if name in VALUES else 1e-3
            finite_sizes = expected[expected.isfinite()].abs()
            size = max([least_size, *finite_sizes.sort().values[-1:].tolist()])
            is_same = (found == expected) | (found.isnan() & expected.isnan())
            errors = torch.where(is_same, 0, (found - expected).abs())
            errors = errors.nan_to_num(nan=math.inf)
            in_tolerances = errors.max().item() / size / max(self.tol[name], least)
            if in_tolerances > worst[0]:
                index = tuple(
                    int(i) for i in torch.unravel_index(errors.argmax(), expected.shape)
                )
                worst = (
                    in_tolerances,
                    name,
                    index,
                    expected[index].item(),
                    found[index].item(),
                )
        return worst

    def is_reproduced(
        self,
        stages: Stages,
        problem: Problem,
        done: KernelOutcome,
        names: set[str],
        most: float = 3.0,
    ) -> bool:
        """Return whether the reference with changed stages gives the numbers found. It
        does not where the problem lacks a stage that is changed.

        Args:
            stages: the changed stages.
            problem: the problem.
            done: the function's outcome.
            names: the numbers that are compared.
            most: the error, in tolerances, that is allowed.
        """
        if stages.inner:
            if names != {"log-prob"}:
                return False
            # the change is known on inner columns alone
            columns = torch.arange(problem.tokens.shape[-1]).expand_as(problem.tokens)
            is_inner = (columns > 0) & (columns < columns.max())
            problem = replace(problem, keep=is_inner)
        part = KernelOutcome({k: v for k, v in done.numbers.items() if k in names})
        try:
            return self.worst_number(problem, part, solved(problem, stages))[0] <= most
        except (RuntimeError, IndexError):  # the problem lacks a stage that is changed
            return False

    def cause(
        self, problem: Problem, done: KernelOutcome, also: Iterable[Problem]
    ) -> Cause:
        """Return the first known fault that gives all numbers of the problem and of the
        plain problems. Else one that gives a single wrong number; for a gradient, with
        the values that it belongs to. Else no cause.

        Args:
            problem: a problem on which the function is wrong.
            done: the function's outcome.
            also: further problems that the fault must reproduce.
        """
        errors = {
            name: self.worst_number(
                problem, KernelOutcome({name: numbers}), solved(problem)
            )[0]
            for name, numbers in done.numbers.items()
        }
        others = [
            plain_problem
            for name in problems.plain(self.kernel)
            for plain_problem in self.plain(name)
        ]
        others += [(other, self.kernel(other)) for other in also]

        def fits_all(fault: LogprobFault, names: set[str], most: float) -> bool:
            """Return whether a fault gives the numbers of these names of every problem.

            Args:
                fault: the fault.
                names: of the numbers.
                most: the error that is allowed on the problem that was compared.
            """
            if not self.is_reproduced(fault.change, problem, done, names, most):
                return False
            return all(self._fits(fault, *other, names) for other in others)

        # the names to compare, by the one number that is explained; "" explains all
        names_for = {"": set(errors)}
        for name, error in errors.items():
            if error > 1:
                names_for[name] = {name} if name in VALUES else {name, *VALUES}
        for name, names in names_for.items():
            error = errors[name] if name else max(errors.values())
            fits = partial(fits_all, names=names, most=min(3.0, error / 3))
            fault = first_fitting(known("logprobs", problem), fits)
            if fault is not None:
                words = fault.words
                if name and len(errors) > 1:
                    words = f"{words} (by the {name} alone)"
                return Cause(words, (fault.id,))
        return NO_CAUSE

    def _fits(
        self,
        fault: LogprobFault,
        problem: Problem,
        done: KernelOutcome,
        names: set[str],
    ) -> bool:
        """Return whether a fault gives the numbers of a plain problem. A fault that may
        act on large sizes alone, as some code cuts tiles there alone, fits too where
        the reference or an equivalent fault does.
        """
        if fault in ANYWHERE:
            return self.is_reproduced(fault.change, problem, done, names)
        equivalent = (
            candidate.change
            for candidate in known("logprobs", problem)
            if is_same(fault, candidate)
        )
        return any(
            self.is_reproduced(stages, problem, done, names)
            for stages in (RIGHT, next(equivalent, RIGHT))
        )

    def compare(
        self,
        name: str,
        words: str,
        problem: Problem,
        done: KernelOutcome,
        least: float = 0.0,
        also: Iterable[Problem] | None = (),
    ) -> list[Finding]:
        """Return a failure with the number that differs most, or nothing.

        Args:
            name: the name of the oracle.
            words: the words for the problem.
            problem: the problem.
            done: the function's outcome.
            least: the tolerance of a number is at least this.
            also: further problems that a cause must reproduce; None: no cause is
                searched, because each candidate would take its time on this problem.
        """
        in_tolerances, number, index, expected, found = self.worst_number(
            problem, done, solved(problem), least
        )
        if in_tolerances <= 1:
            return []
        why = NO_CAUSE
        if also is not None:
            with contextlib.suppress(InputError):
                why = self.cause(problem, done, also)
        if why == NO_CAUSE and name not in PLAIN and problem.temperature != 1:
            at_1 = solved(replace(problem, temperature=1.0))
            if self.worst_number(problem, done, at_1, least)[0] <= 1:
                why = TEMPERATURE_LEFT_OUT
        return [
            fail(
                name,
                words,
                *number_pair(f"{number}{list(index)}", expected, found),
                shown(problem),
                why,
            )
        ]


TEMPERATURE_LEFT_OUT = Cause(
    "the temperature is left out on these inputs alone", ("temperature-missing",)
)
MOST_NUMBERS = 40  # of a problem that is printed


def shown(problem: Problem) -> Example | None:
    """Return the problem as an example, or None where it is too large to read."""
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
    """Make the oracle of the plain problems of this name.

    Args:
        name: the name of the oracle.
        why: why it does not run on a function that has no such problems.
    """

    def find(case: KernelCase) -> list[Finding]:
        """Return the first difference on these problems."""
        all_words = problems.plain(case.kernel)[name]
        for words, (problem, outcome) in zip(all_words, case.plain(name), strict=True):
            if findings := case.compare(name, words, problem, outcome):
                return findings
        return []

    return Oracle(
        name,
        find,
        lambda case: "" if name in problems.plain(case.kernel) else why,
        needed=True,
    )


def _shortened(words: object) -> str:
    """Return words on one line, without the end of many, which "..." stands for."""
    return textwrap.shorten(str(words), 200, placeholder=" ...")


def compared(
    name: str,
    make_problems: Callable[[Kernel], dict[str, Problem]],
    least: Callable[[KernelCase], float] = lambda case: 0.0,
    also: Callable[[Kernel], Iterable[Problem]] = lambda k: (),
    not_run: Callable[[KernelCase], str] = wrong,
    refused: str | None = None,
) -> Oracle:
    """Make an oracle that reports the first of some problems on which a function is
    wrong.

    Args:
        name: the name of the oracle.
        make_problems: from a function to its problems, by the words for each.
        least: the tolerance of a number is at least this.
        also: further problems that a cause must reproduce.
        not_run: why the oracle does not run; "" where it does.
        refused: the words that a note adds for a problem that the function refuses;
            None lets the error through.
    """

    def find(case: KernelCase) -> Iterator[Finding]:
        """Yield a note for the first refusal, one for the first NaN beside logits of -inf,
        and the first failure.
        """
        has_refused = False
        has_noted_nan = False
        for words, problem in make_problems(case.kernel).items():
            try:
                outcome = case.kernel(problem)
            except InputError as e:
                if refused is None:
                    raise
                if not has_refused:
                    yield note(name, f"refused: {words}{refused} ({_shortened(e)})")
                has_refused = True
                continue
            with_nan = sorted(k for k, v in outcome.numbers.items() if v.isnan().any())
            if name == "forbidden" and with_nan and "log-prob" not in with_nan:
                if not has_noted_nan:
                    text = f"{words}: NaN in the {', '.join(with_nan)}"
                    yield note(name, text, cause="0 times -inf")
                has_noted_nan = True
                outcome = KernelOutcome(
                    {k: v for k, v in outcome.numbers.items() if k not in with_nan}
                )
            findings = case.compare(
                name, words, problem, outcome, least(case), also(case.kernel)
            )
            if findings:
                yield from findings
                return

    return Oracle(name, find, not_run)


@oracle("repeated-backward", not_run=wrong)
def repeated_backward(case: KernelCase) -> Iterator[Finding]:
    """Report a second backward pass that has other gradients, as a failure, or that raises,
    as a note.
    """
    temperature = problems.low_temperature(case.kernel)
    problem = problems.random_problem(case.kernel, temperature=temperature)
    outcome = case.kernel(problem, twice=True)
    difference = outcome.second_backward
    if difference == "different numbers":
        why = "the backward changes a buffer that it reads"
        yield fail(
            "repeated-backward",
            "the backward, twice",
            "the same gradients",
            "different gradients",
            cause=why,
        )
    elif difference:
        words = f"a second backward is refused ({_shortened(difference)})"
        yield note("repeated-backward", words)


@oracle("padding", not_run=wrong)
def padding(case: KernelCase) -> Iterator[Finding]:
    """Report NaN in the states of a masked token that reaches other numbers: of other
    tokens' values a failure, of the weight's gradient a note. A refusal is a note too.
    """
    temperature = problems.low_temperature(case.kernel)
    problem = problems.random_problem(case.kernel, 6, 9, 3, 12, temperature=temperature)
    problem = problems.masked(problem, [[1, 1, 1], [1, 0, 0]])
    assert problem.keep is not None
    states_with_nan = torch.where(problem.keep[..., None], problem.x, math.nan)
    try:
        outcome = case.kernel(replace(problem, x=states_with_nan))
    except InputError as e:
        yield note(
            "padding", f"refused: NaN in the states of a masked token ({_shortened(e)})"
        )
        return
    values = KernelOutcome({k: v for k, v in outcome.numbers.items() if k in VALUES})
    in_tolerances, number, *_ = case.worst_number(problem, values, solved(problem))
    if in_tolerances > 1:
        yield fail(
            "padding",
            "NaN in the states of a masked token",
            f"{number} of other tokens unchanged",
            "it changes",
        )
    gradient = outcome.numbers.get("gradient of weight")
    if gradient is not None and gradient.isnan().any():
        why = "NaN in the states of a masked token reaches the gradient of the weight"
        yield note("padding", why, cause="0 times NaN")


@oracle(
    "ignored-ids",
    not_run=lambda case: wrong(case) or (LOSES_GPU if case.kernel.on_gpu else ""),
)
def ignored_ids(case: KernelCase) -> Iterator[Finding]:
    """Compare where masked tokens have the id -100. Wrong numbers of other tokens are a
    failure. A refusal is a note, and so is a log-probability of the id that is 100 from
    the end of the vocabulary.
    """
    problem = problems.ignored(case.kernel)
    assert problem.keep is not None
    V = states(problem).shape[-1]
    words = f"masked tokens with an id of -100, of {V} ids"
    try:
        outcome = case.kernel(problem)
    except InputError as e:
        yield note(
            "ignored-ids",
            f"refused: {words}: give padding any valid id ({_shortened(e)})",
        )
        return
    yield from case.compare("ignored-ids", words, problem, outcome)
    counted_from_end = torch.where(problem.keep, problem.tokens, V - 100)
    of_last_ids = solved(replace(problem, tokens=counted_from_end))
    found, from_end = (
        numbers["log-prob"][~problem.keep]
        for numbers in (outcome.numbers, of_last_ids.numbers)
    )
    tolerance = case.tol["log-prob"] * from_end.abs().max()
    if ((found - from_end).abs() <= tolerance).all():
        yield note(
            "ignored-ids",
            f"{words}, get the log-prob of id {V - 100}",
            cause="a negative id counts from the end: mask these log-probs, or give padding any valid id",
        )


@oracle("determinism")
def determinism(case: KernelCase) -> Iterator[Finding]:
    """Report that the same logits, or hidden states, get other numbers the second time."""
    first_numbers, second_numbers = (
        case.kernel(problems.random_problem(case.kernel)).numbers for _ in range(2)
    )
    if any(
        not torch.equal(v.nan_to_num(), second_numbers[k].nan_to_num())
        for k, v in first_numbers.items()
    ):
        yield fail(
            "determinism",
            "the same tokens twice",
            "the same numbers",
            "different numbers",
        )


@oracle(
    "weight-in-place",
    not_run=lambda case: (
        wrong(case) or ("" if case.kernel.kind == "hidden" else "it takes no weight")
    ),
)
def weight_in_place(case: KernelCase) -> Iterator[Finding]:
    """Report that a weight whose numbers change in place between two calls, as an
    optimizer changes them, keeps an effect of its earlier numbers.
    """
    temperature = problems.low_temperature(case.kernel)
    exact = problems.random_problem(case.kernel, temperature=temperature)
    words = "the weight is changed in place between two calls, as an optimizer does"
    # a function that keeps weight.double() keeps no copy of a weight in float64
    for problem, least in ((exact, 0.0), (exact.to(torch.bfloat16), HALF_TOL)):
        assert problem.weight is not None
        earlier = problem.weight.flip(0)
        try:
            outcome = case.kernel(problem, before=earlier)
        except InputError:  # it refuses bfloat16, which is another oracle's finding
            continue
        findings = case.compare("weight-in-place", words, problem, outcome, least)
        if findings:
            values = {k: v for k, v in outcome.numbers.items() if k in VALUES}
            of_earlier = solved(replace(problem, weight=earlier))
            error, *_ = case.worst_number(
                problem, KernelOutcome(values), of_earlier, least
            )
            why = WEIGHT_OF_EARLIER_CALL.cause() if error <= 1 else NO_CAUSE
            yield replace(findings[0], cause=why.words, fault_ids=why.ids)
            return


@oracle("mutation")
def mutation(case: KernelCase) -> Iterator[Finding]:
    """Report what the function changes or prints, at temperature 1 and below: a function
    may divide by the temperature, and so make a copy, only where it is not 1.
    """
    usual = {"": problems.random_problem(case.kernel)}
    for problem in problems.at_both_temperatures(case.kernel, usual).values():
        findings = list(untouched(case.kernel(problem)))
        if findings:
            yield from findings
            return


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
    name: str, largest: dict[str, float], least: float, words: str
) -> list[Finding]:
    """Note the log-probabilities and entropies that rounding moves.

    Args:
        name: the name of the oracle.
        largest: the largest difference of each number, by its name.
        least: differences up to this are not noted.
        words: the words for the inputs.

    Returns:
        One note, or none.
    """
    differences = [
        f"{number} off by {difference:.1e}"
        for number, difference in largest.items()
        if number in VALUES and difference > least
    ]
    if not differences:
        return []
    return [note(name, f"{', '.join(differences)} {words}", cause="rounding")]


@oracle(
    "large-vocabulary",
    not_run=lambda case: (
        wrong(case) or ("wrong on tiles already" if "tiles" in case.failed else "")
    ),
)
def large(case: KernelCase) -> Iterator[Finding]:
    """Compare on the vocabularies of two real models, the larger one with gradients and
    only if the smaller one is right. What rounding moves, and a refusal of the larger one,
    are notes.
    """
    largest = dict.fromkeys(VALUES, 0.0)
    is_right = True
    for words, problem in problems.large(case.kernel).items():
        outcome = case.kernel(problem)
        findings = case.compare("large-vocabulary", words, problem, outcome, least=0.05)
        yield from findings
        is_right = is_right and not findings
        if problem.temperature != 1:
            continue
        for number, difference in gaps(outcome, solved(problem)).items():
            largest[number] = max(largest[number], difference)
    yield from rounded(
        "large-vocabulary", largest, 2e-5, "in float32 with one peak at V = 151,936"
    )
    if not is_right:
        return
    for words, problem in problems.largest(case.kernel).items():
        try:
            outcome = case.kernel(problem)
        except InputError as e:
            yield note("large-vocabulary", f"{words} are refused ({_shortened(e)})")
            return
        findings = case.compare(
            "large-vocabulary", words, problem, outcome, least=0.05, also=None
        )
        for finding in findings:
            if finding.cause:
                yield finding
            else:
                why = "with 151,936 ids it is right"
                yield replace(finding, cause=why, cause_kind="pattern")
        if findings:
            return


@oracle("dtypes", not_run=wrong)
def dtypes(case: KernelCase) -> Iterator[Finding]:
    """Compare on inputs in float32, bfloat16 and float16, each at several temperatures.
    The first wrong problem of each dtype is a failure. A refusal of float32 or float16
    is a note; one of bfloat16 is that of the oracle `bfloat16`.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for words, problem in problems.in_dtype(case.kernel, dtype).items():
            try:
                outcome = case.kernel(problem)
            except InputError as e:
                if dtype != torch.bfloat16:
                    yield note("dtypes", f"refused: {words} ({_shortened(e)})")
                break
            if problem.g_H is None:
                # of large logits: half precision rounds an entropy too much
                numbers = {k: v for k, v in outcome.numbers.items() if k != "entropy"}
                outcome = replace(outcome, numbers=numbers)
            findings = case.compare(
                "dtypes", words, problem, outcome, HALF_TOL, also=None
            )
            if findings:
                yield from findings
                break


@oracle("bfloat16", not_run=wrong)
def bfloat16(case: KernelCase) -> Iterator[Finding]:
    """Compare on inputs in bfloat16: the numbers, a factor that they share, and how dW
    is added up. An error of dW above MANY times that of rounding the exact one once is a
    failure, above ONE_ROUNDING a note. A refusal of bfloat16 is a note.
    """
    problem = problems.random_problem(case.kernel, 8191, 7, 8, 13)
    ones = torch.ones_like(problem.tokens).double()
    problem = replace(problem, g=ones, g_H=None).to(torch.bfloat16)
    try:
        outcome = case.kernel(problem)
    except InputError as e:
        yield note("bfloat16", f"bfloat16 is refused ({_shortened(e)})")
        return
    right = solved(problem)
    differences = gaps(outcome, right)
    size = right.numbers["log-prob"].abs().max().item()
    of_values = max(differences["log-prob"], differences.get("entropy", 0.0))
    if of_values / size <= HALF_TOL:
        yield from rounded("bfloat16", differences, 1e-4, "for bfloat16 inputs")
    else:
        words = "hidden states and weight in bfloat16"
        yield from case.compare("bfloat16", words, problem, outcome, least=HALF_TOL)
    yield from _shared_factor(outcome, right)
    if "gradient of weight" in differences:
        exact = right.numbers["gradient of weight"]
        rounding = (exact.bfloat16().double() - exact).abs().max().item()
        in_roundings = differences["gradient of weight"] / rounding
        if not in_roundings <= MANY:
            words = "8,191 tokens: the error of dW, over that of rounding the exact one once"
            yield fail(
                "bfloat16",
                words,
                Number(MANY, "at most"),
                Number(in_roundings),
                cause=_sum_in_bfloat16(problem, outcome, exact),
            )
        elif in_roundings > ONE_ROUNDING:
            words = f"8,191 tokens: dW is off by {in_roundings:.1f} times what rounding the exact one once costs"
            yield note("bfloat16", words, cause="rounding")


def _shared_factor(done: KernelOutcome, want: KernelOutcome) -> Iterator[Finding]:
    """Yield a failure for the first of SCALED whose values share a factor other than 1,
    beyond what chance explains.

    Rounding goes up as often as down, so over many tokens it leaves no factor. A
    temperature that is a few percent off does.
    """
    for name, found in done.numbers.items():
        if name not in SCALED:
            continue
        right = want.numbers[name]
        size = right.square().sum()
        factor = (found * right).sum() / size
        rest = found - factor * right
        standard_error = (rest * right).square().sum().sqrt() / size
        if (factor - 1).abs() <= FACTOR_TOL + 4 * standard_error:
            continue
        regime = f"8,191 tokens in bfloat16: the factor that every {name} has in common"
        yield fail(
            "bfloat16", regime, Number(1.0, "factor"), Number(factor.item(), "factor")
        )
        return


def _sum_in_bfloat16(problem: Problem, done: KernelOutcome, exact: Tensor) -> str:
    """Return the cause that dW is added up in bfloat16, some tokens at a time, if that
    gives the dW found; else "".

    Args:
        problem: a problem in bfloat16.
        done: the function's outcome.
        exact: the exact dW.
    """
    in_float64 = problem.to(torch.float64)
    hidden = in_float64.x.flatten(0, 1)
    probabilities = states(in_float64).softmax(-1).flatten(0, 1)
    sampled = torch.nn.functional.one_hot(problem.tokens.flatten())
    dlogits = sampled - probabilities
    found = done.numbers["gradient of weight"]
    # tokens added at a time -> how far the dW that this gives is from the one found
    distances = {}
    for count in (2**k for k in range(11)):
        total = torch.zeros_like(exact, dtype=torch.bfloat16)
        for u, v in zip(dlogits.split(count), hidden.split(count), strict=True):
            total += (u.T @ v).bfloat16()
        distances[count] = (found - total.double()).abs().max().item()
    nearest = min(distances, key=distances.__getitem__)
    # a sum that leaves at most this part of the error is taken to explain it
    if distances[nearest] <= 0.35 * (found - exact).abs().max():
        plural = "s" if nearest > 1 else ""
        return f"dW is added up in bfloat16, {nearest} token{plural} at a time"
    return ""


@oracle(
    "ranks",
    not_run=lambda case: wrong(case) or ("on one rank" if case.ranks == 1 else ""),
)
def ranks(case: KernelCase) -> Iterator[Finding]:
    """Compare with the vocabulary split over several ranks."""
    temperature = problems.low_temperature(case.kernel)
    problem = problems.random_problem(
        case.kernel, 6, 4 * case.ranks, 3, 14, temperature=temperature
    )
    yield from distributed.compared(case.kernel, problem, case.ranks, case.worst_number)


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
        lambda case: 0.0 if case.largest_tolerance == DOUBLE_TOL else 20 * SINGLE_TOL,
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
        lambda case: 0.05 if case.largest_tolerance > DOUBLE_TOL else 1e-6,
        lambda k: problems.offset(k).values(),
        not_run=lambda case: (
            wrong(case)
            or (
                "it computes in half precision"
                if case.largest_tolerance >= HALF_TOL
                else ""
            )
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
    ignored_ids,
    weight_in_place,
    compared("layout", problems.layout, refused=""),
    repeated_backward,
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
    dtypes,
    bfloat16,
    ranks,
)
