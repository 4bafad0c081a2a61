# SPDX-License-Identifier: Apache-2.0
"""A user's function compared with a formula: numbers for each slot of a batch of named
tensors, known faults as other formulas, the smallest batch that shows a difference.

Advantages of tokens, distillation losses and value losses are compared by it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.user_code.function import Called
from upref.user_code.named import NamedFunction
from upref.verify.faults import Fault, first_fitting, measured
from upref.verify.finding import NO_CAUSE, Cause, Example, number_pair
from upref.verify.report import Finding, fail

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, Any]
# numbers that are compared, the same shape for the formula and the function
Formula = Callable[[Inputs, Settings], Tensor]
FLOAT64_TOL = 1e-6  # relative: a guard of 1e-8 in a denominator is below it
FLOAT32_TOL = 1e-4
LEAST_FACTOR = 1e-9  # a smaller common factor is a missing gradient
CLAMPS = (1.0, 2.0, 5.0, 10.0)  # usual bounds of values, log-ratios and losses
# causes that an oracle has without a search
WRITES = "it writes into a tensor that it was given: let it write into a copy"
STATE = "it keeps state from call to call, or draws random numbers"
MOST_ENTRIES = 60  # numbers of an example that is printed with its results


@dataclass(frozen=True)
class Problem:
    """A batch on which a function is compared.

    Attributes:
        words: what is special about it.
        inputs: tensors by role. The first dimension of each is the responses; the
            second of those with two or more is the slots.
    """

    words: str
    inputs: Inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of responses, of slots and, beside logits, of tokens of the
        vocabulary.
        """
        return max((tuple(x.shape) for x in self.inputs.values()), key=len)

    def take(self, *kept: Sequence[int]) -> "Problem":
        """Return the batch with these parts alone.

        Args:
            *kept: indices of responses, of slots and of tokens of the vocabulary.
        """
        taken = {}
        for role, x in self.inputs.items():
            for axis, indices in enumerate(kept[: x.ndim]):
                x = x.index_select(axis, torch.tensor(list(indices)))
            taken[role] = x
        return replace(self, inputs=taken)

    def but(self, words: str, **inputs: Tensor) -> "Problem":
        """Return the batch with other inputs.

        Args:
            words: what is special about it.
            **inputs: by role.
        """
        return Problem(words, {**self.inputs, **inputs})


@dataclass
class FormulaCase:
    """A function beside the formula that it should be: what the oracles read.

    Attributes:
        name: of what the function is compared with.
        function: the function.
        formula: what is right.
        measure: the function's numbers of a batch: (outcome of a call, inputs) ->
            a tensor of the shape of the formula's.
        settings: the settings at which both are compared.
        problems: the batches on which a cause must hold.
        faults: other formulas, in the order in which they are tried.
        unit: of the numbers.
        gradient_of: the input by which gradients are taken; "" where values are
            compared.
        shown: the inputs that the formula reads, which an example shows.
        absent: the inputs that are 0 on every batch, for the function does not take
            them.
        least_scale: of a batch, the size below which a number counts as 0; None: a
            thousandth of the largest number alone decides.
        derive: adds the inputs that are computed of others, such as log-probabilities
            of logits: (inputs, settings) -> inputs.
        failed: the names of the oracles that failed so far.
    """

    name: str
    function: NamedFunction
    formula: Formula
    measure: Callable[[Called, Inputs], Tensor]
    settings: Settings
    problems: Sequence[Problem]
    faults: Sequence[Fault[Formula]]
    unit: str
    gradient_of: str = ""
    shown: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    derive: Callable[[Inputs, Settings], Inputs] | None = None
    least_scale: Callable[[Inputs], float] | None = None
    tol: float = FLOAT64_TOL
    failed: set[str] = field(default_factory=set)

    @property
    def has_mask(self) -> bool:
        """Whether the function takes a mask."""
        return bool({"mask", "labels"} & self.function.reads)

    @property
    def wrong(self) -> bool:
        """Whether an oracle has failed: what follows from that is not said again."""
        return bool(self.failed)

    def inputs(self, problem: Problem) -> Inputs:
        """Return the inputs of a batch, with zeros for those of `absent`.

        Args:
            problem: the batch.
        """
        zeros = {role: torch.zeros_like(problem.inputs[role]) for role in self.absent}
        return {**problem.inputs, **zeros}

    def call(
        self, problem: Problem, settings: Settings | None = None
    ) -> tuple[Called, Inputs]:
        """Call the function on a batch.

        Args:
            problem: the batch.
            settings: other settings than those of the case.

        Returns:
            The outcome, and the inputs, of which one requires a gradient if gradients
            are compared.

        Raises:
            InputError: the function refuses it.
        """
        settings = settings or self.settings
        inputs = dict(self.inputs(problem))
        if self.gradient_of:
            leaf = inputs[self.gradient_of].detach().clone().requires_grad_()
            inputs[self.gradient_of] = leaf
        if self.derive is not None:
            inputs = dict(self.derive(inputs, settings))
        return self.function(inputs, settings), inputs

    def found(self, problem: Problem, settings: Settings | None = None) -> Tensor:
        """Return the function's numbers of a batch.

        Args:
            problem: the batch.
            settings: other settings than those of the case.

        Raises:
            InputError: the function refuses it, or returns something else.
        """
        outcome, inputs = self.call(problem, settings)
        return self.measure(outcome, inputs)

    def expected(self, problem: Problem, settings: Settings | None = None) -> Tensor:
        """Return the right numbers of a batch.

        Args:
            problem: the batch.
            settings: other settings than those of the case.
        """
        return self.formula(self.inputs(problem), settings or self.settings)

    def agrees(self, problem: Problem, settings: Settings | None = None) -> bool:
        """Tell whether the function has the right numbers. A batch that it refuses is
        no agreement.

        Args:
            problem: the batch.
            settings: other settings than those of the case.
        """
        try:
            found = self.found(problem, settings)
        except InputError:
            return False
        return self.alike(problem, self.expected(problem, settings), found)

    def alike(self, problem: Problem, expected: Tensor, found: Tensor) -> bool:
        """Tell whether numbers of a batch agree.

        Args:
            problem: the batch.
            expected, found: the numbers.
        """
        least = self.least_scale(problem.inputs) if self.least_scale else 0.0
        return alike(expected, found, self.tol, least)

    def differs(self, problem: Problem, settings: Settings | None = None) -> bool:
        """Tell whether the function has other numbers. A batch that it refuses is no
        difference.

        Args:
            problem: the batch.
            settings: other settings than those of the case.
        """
        try:
            found = self.found(problem, settings)
        except InputError:
            return False
        return not self.alike(problem, self.expected(problem, settings), found)

    def compare(
        self,
        oracle: str,
        problem: Problem,
        settings: Settings | None = None,
        why: str | Cause = "",
    ) -> Iterator[Finding]:
        """Yield a failure if the function differs on a batch, with a smaller batch that
        shows it, at the number that differs most there. Its cause is the first known
        fault that fits, else a common factor, else none.

        Args:
            oracle: the name of the oracle.
            problem: the batch.
            settings: other settings than those of the case.
            why: the cause, where the oracle has it; "" searches the known faults.

        Raises:
            InputError: the function cannot be called on the batch.
        """
        case = replace(self, settings=settings) if settings else self
        try:
            found = case.found(problem)
        except InputError as e:
            raise InputError(f"{e}, on {problem.words}") from e
        if case.alike(problem, case.expected(problem), found):
            return
        fault = None if why else case.fault(problem)
        why = why or (fault.cause if fault else case.common_factor(problem))
        small = case.shrunk(problem, fault)
        expected, found = case.expected(small), case.found(small)
        index = worst(expected, found)
        place = f"{problem.words}: response {index[0]}, slot {index[1]}"
        if len(index) > 2:
            place += f", token {index[2]} of the vocabulary"
        numbers = number_pair(case.unit, expected[index].item(), found[index].item())
        yield fail(oracle, place, *numbers, case.example(small), why)

    def fault(self, problem: Problem) -> Fault[Formula] | None:
        """Return the first known fault that gives the numbers found on a batch and on all
        problems, but for those on which the function has NaN: they tell no fault from
        another. None where these are half of them.

        Args:
            problem: a batch on which the function differs.
        """
        every = self._answers(problem)
        answers = [
            (one, found)
            for one, found in every
            if one is problem or not found.isnan().any()
        ]
        if len(answers) <= len(every) / 2:
            return None

        def fits(fault: Fault[Formula]) -> bool:
            """Return whether a fault has the numbers of every batch."""
            return all(self._has_fault(fault, one, found) for one, found in answers)

        return first_fitting(self.faults, fits)

    def _answers(self, problem: Problem) -> list[tuple[Problem, Tensor]]:
        """Return the function's numbers of a batch and of all problems, but for those
        that it refuses.
        """
        answers = []
        for one in (problem, *self.problems):
            with contextlib.suppress(InputError):
                answers.append((one, self.found(one)))
        return answers

    def _has_fault(self, fault: Fault[Formula], one: Problem, found: Tensor) -> bool:
        """Return whether the formula with this fault has the numbers found."""
        with contextlib.suppress(InputError):
            change = fault.change(self.inputs(one), self.settings)
            return self.alike(one, change, found)
        return False

    def cause(self, problem: Problem) -> Cause:
        """Return the cause of the first fault that fits; else a common factor; else no
        cause.

        Args:
            problem: a batch on which the function differs.
        """
        fault = self.fault(problem)
        return fault.cause if fault else self.common_factor(problem)

    def common_factor(self, problem: Problem) -> Cause:
        """Return the cause that all numbers are one factor of the right ones, if that
        holds on a batch and on all problems.

        Args:
            problem: a batch on which the function differs.
        """
        factors = []
        for one, found in self._answers(problem):
            expected = self.expected(one)
            square = (expected * expected).sum()
            if not square or not found.isfinite().all():
                return NO_CAUSE
            factor = ((expected * found).sum() / square).item()
            if not self.alike(one, factor * expected, found):
                return NO_CAUSE
            factors.append(factor)
        k = factors[0]
        is_one_factor = all(abs(f - k) <= 10 * self.tol * abs(k) for f in factors)
        if not is_one_factor or abs(k) < LEAST_FACTOR:
            return NO_CAUSE
        return measured.NUMBERS_SCALED.cause(factor=k)

    def shrunk(self, problem: Problem, fault: Fault[Formula] | None) -> Problem:
        """Return the batch without the responses and slots that the difference does not
        need. What is left shows the same difference: the fault gives its numbers too,
        and they are finite if all of the batch are.

        Args:
            problem: a batch on which the function differs.
            fault: a known fault that gives the numbers found; None: none does.
        """
        is_finite = bool(self.found(problem).isfinite().all())

        def shows_the_same(small: Problem) -> bool:
            """Return whether a part of the batch shows this difference."""
            if not self.differs(small):
                return False
            found = self.found(small)
            if is_finite and not found.isfinite().all():
                return False
            return fault is None or self._has_fault(fault, small, found)

        kept = [list(range(size)) for size in problem.shape]
        for axis, size in enumerate(problem.shape):
            for index in reversed(range(size)):
                fewer = [list(one) for one in kept]
                fewer[axis].remove(index)
                if not fewer[axis]:
                    continue
                small = problem.take(*fewer)
                if small.inputs["mask"].any() and shows_the_same(small):
                    kept = fewer
        return problem.take(*kept)

    def example(self, problem: Problem) -> Example:
        """Make the batch with the right numbers and those of the function. It has the
        inputs that both the formula and the function read, and no numbers where these are
        more than MOST_ENTRIES.

        Args:
            problem: the batch.

        Raises:
            InputError: the function refuses the batch.
        """
        wanted = self.shown or tuple(problem.inputs)
        inputs = {
            role: x.tolist()
            for role, x in problem.inputs.items()
            if role in wanted and role in self.function.reads
        }
        expected = self.expected(problem)
        if expected.numel() > MOST_ENTRIES:
            return Example(inputs)
        found = self.found(problem)
        return Example(inputs, expected=expected.tolist(), found=found.tolist())


def relative_errors(expected: Tensor, found: Tensor, least: float = 0.0) -> Tensor:
    """Return the errors of numbers, relative to the expected ones or to a thousandth of
    the largest; infinite where a number found is NaN or infinite.

    Args:
        expected: any shape.
        found: of the same shape.
        least: no error is relative to less.
    """
    largest = max(expected.abs().max().item(), 1e-6)
    scale = expected.abs().clamp(min=max(1e-3 * largest, least))
    return ((found - expected).abs() / scale).nan_to_num(nan=math.inf)


def alike(expected: Tensor, found: Tensor, tol: float, least: float = 0.0) -> bool:
    """Tell whether numbers agree.

    Args:
        expected: any shape.
        found: of the same shape.
        tol: the relative error that is allowed.
        least: no error is relative to less.
    """
    if not expected.numel():
        return True
    return bool((relative_errors(expected, found, least) <= tol).all())


def worst(expected: Tensor, found: Tensor) -> tuple[int, ...]:
    """Return the index of the number that differs most, relative as of `relative_errors`.

    Args:
        expected: any shape.
        found: of the same shape.
    """
    flat = int(relative_errors(expected, found).argmax())
    return tuple(
        int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape)
    )


def guessed_settings(
    case: FormulaCase, given: Settings, is_right: bool
) -> tuple[str, ...]:
    """Return the settings at which a wrong function was compared although nobody gave
    them: no usual value makes it right.

    Args:
        case: the case.
        given: settings that the user gave.
        is_right: whether the function is right on the first problem.
    """
    if is_right:
        return ()
    known = {*given, *case.function.takes, "agg"}
    return tuple(key for key in case.settings if key not in known)


def precision_in_words(case: FormulaCase, is_right: bool) -> str:
    """Say to which precision numbers were compared, where it is not float64's.

    Args:
        case: the case.
        is_right: whether the function is right on the first problem.

    Returns:
        A sentence; "" at the precision of float64.
    """
    if case.tol < FLOAT32_TOL:
        return ""
    if is_right:
        return "it is right to the precision of float32 alone: compared to 1e-4"
    return "compared to 1e-4, the precision of float32"


def choose_case(
    function: NamedFunction,
    make: Callable[[NamedFunction, Settings, float], FormulaCase],
    grid: Sequence[Settings],
) -> tuple[FormulaCase, bool]:
    """Choose the way in which inputs are passed, the tolerance and the settings.

    The first with which the function is right on every problem is chosen; else the first
    with which it is right on the first problem; else the first way that it accepts, at
    the first settings with which a known fault explains it.

    Args:
        function: as read.
        make: makes the case of a function, settings and a tolerance.
        grid: settings that are tried, the likeliest first.

    Returns:
        The case, and whether the function is right on the first problem.

    Raises:
        InputError: the function refuses every way.
    """
    accepted: FormulaCase | None = None
    first_error: InputError | None = None
    for way in function.kinds():
        case = make(way, grid[0], FLOAT64_TOL)
        try:
            found = case.found(case.problems[0])
        except InputError as e:
            first_error = first_error or e
            continue
        right_at_first: FormulaCase | None = None
        for tol in (FLOAT64_TOL, FLOAT32_TOL):
            for settings in grid:
                case = make(way, settings, tol)
                first = case.problems[0]
                if not case.alike(first, case.expected(first), found):
                    continue
                if not case.agrees(first):
                    continue
                precise = _with_its_precision(case)
                if all(precise.agrees(problem) for problem in precise.problems):
                    return precise, True
                right_at_first = right_at_first or precise
        if right_at_first is not None:
            return right_at_first, True
        accepted = accepted or _as_with_a_fault(way, make, grid, found)
    if accepted is None:
        assert first_error is not None
        raise first_error
    return accepted, False


def _with_its_precision(case: FormulaCase) -> FormulaCase:
    """Return the case at the tolerance of float32 where the function is right on every
    problem, but on some to that precision alone.
    """
    if all(case.agrees(problem) for problem in case.problems):
        return case
    in_float32 = replace(case, tol=FLOAT32_TOL, failed=set())
    if all(in_float32.agrees(problem) for problem in case.problems):
        return in_float32
    return case


def _as_with_a_fault(
    function: NamedFunction,
    make: Callable[[NamedFunction, Settings, float], FormulaCase],
    grid: Sequence[Settings],
    found: Tensor,
) -> FormulaCase:
    """Return the case of a wrong function at the first settings at which a known fault
    has the numbers found on the first problem; else at the first settings. Its tolerance
    is that of float32.
    """
    for settings in grid:
        case = make(function, settings, FLOAT32_TOL)
        inputs = case.inputs(case.problems[0])
        for fault in case.faults:
            with contextlib.suppress(InputError):
                if alike(fault.change(inputs, settings), found, FLOAT64_TOL):
                    return case
    return make(function, grid[0], FLOAT32_TOL)
