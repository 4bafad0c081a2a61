# SPDX-License-Identifier: Apache-2.0
"""Are two functions equal for every value? All paths of both, and what the solver says of
each difference.

Both functions run on one point, the *witness* of a path (upref.proof.trace). The path
that they took holds for more points than this one, and so do their formulas. For each
branch of the path, the solver looks for a point that takes the other side; then both
run there. When no side is left, the paths cover every point. On each path, the formulas
of two functions are equal, or the solver looks for a point at which they differ.

A *pattern* is what is fixed of the batch, such as its mask (upref.proof.domain).

Nothing of this is believed unseen. A path counts only if its conditions hold at a point
where both functions ran, and if the solver finds them free of contradictions. Formulas
count only if they give the numbers that the functions gave, at that point and at
six others of the path. A difference counts only if the functions differ where they run.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from upref.errors import Gone, InputError
from upref.proof.domain import Domain
from upref.proof.solver import STEPS, Answer, Question, ask, cpu_seconds
from upref.proof.trace import DECOYS, NoProof, Step, Trace, tracing
from upref.proof.values import TooHard, Values
from upref.rollouts import Rollouts

MOST_PATHS = 64  # of one pattern
AGREES = 1e-7  # of formulas and functions, relative to the largest number
ROUNDED = 2e-3  # the same where a part is in less than float64
CHECKED = {
    "near": 1,
    "rare": 1,
    "far": 2,
    "extreme": 2,
}  # points of a path beside the witness
NEARBY = 3e-7  # relative: a constant in float32 is off by 6e-8
RUN = 12  # of them, those at which both functions run
WITHIN = 8  # points within the bounds of a counterexample
BESIDE_OTHERS = 3  # points that show whether one token alone differs
ORDINARY = 5  # points that show whether functions differ almost everywhere
TINY_ADVANTAGE = 1e-3  # the solver likes small ones
MOST_LOG = 700.0  # of which a float holds the exponential
TRIED = 60  # points near the one that the solver gives
# of a batch and of the factor by which the loss is multiplied
Outputs = Callable[[Rollouts, Tensor], Tensor]


@dataclass(frozen=True)
class Limits:
    """How much work a search may be.

    Attributes:
        paths: of one pattern.
        operators: of one call of a function.
        solver: z3's count of its steps for one question.
        reference_points: of a path, at which the numbers of the reference are compared
            with its formulas. Those of the function are at all points.
    """

    paths: int = MOST_PATHS
    operators: int = 100_000
    solver: int = STEPS
    reference_points: int = sum(CHECKED.values()) + 1


@dataclass(frozen=True)
class Counterexample:
    """A batch on which two functions differ.

    Attributes:
        batch: in float64.
        expected, found: what the reference and the function give.
        point: the numbers of the variables.
        bounds: what of the point makes the difference, as (variable, "<" or ">", number);
            empty where the functions differ almost everywhere.
        bounds_decide: they differ at all points that were tried within the bounds of the
            token that differs most; else these bounds are some of the conditions.
    """

    batch: Rollouts
    expected: Tensor
    found: Tensor
    point: dict[str, float]
    bounds: tuple[tuple[str, str, float], ...] = ()
    bounds_decide: bool = True


class Differs(Exception):
    """Two functions differ at a point where they run, whatever their formulas are."""

    def __init__(self, counterexample: Counterexample) -> None:
        super().__init__()
        self.counterexample = counterexample


@dataclass(frozen=True)
class Path:
    """One path of both functions, and their formulas on it.

    Attributes:
        point: the witness.
        steps: the branches.
        found, expected: ids.
    """

    point: dict[str, float]
    steps: tuple[Step, ...]
    found: Tensor
    expected: Tensor


@dataclass
class Outcome:
    """What became of one pattern.

    Attributes:
        reason: why there is no proof; "" where there is one, or a counterexample.
        counterexample: None where there is none.
        paths: how many there are.
        traces: of all calls.
        questions: that decide whether the functions differ.
        meant: the path that each question is about, and what it asks.
    """

    reason: str = ""
    counterexample: Counterexample | None = None
    paths: list[Path] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    meant: list[tuple[Path, str]] = field(default_factory=list)


@dataclass
class Search:
    """Compares two functions on one domain.

    Attributes:
        domain: the batch.
        function, reference: what is compared.
        differs: whether two outputs differ by more than rounding.
        deadline: of cpu_seconds.
        limits: how much work it may be.
        number: of the domain among others.
    """

    domain: Domain
    function: Outputs
    reference: Outputs
    differs: Callable[[Tensor, Tensor, Rollouts], bool]
    deadline: float
    limits: Limits = Limits()
    number: int = 0
    thin: dict[str, float] | None = None  # where they differ next to a bound alone

    @property
    def values(self) -> Values:
        return self.domain.values

    def explore(self) -> Outcome:
        """Find every path, and the questions that decide whether the functions differ.

        Returns:
            The Outcome. Where the search ended early, it has a reason or a
            counterexample.
        """
        outcome = Outcome()
        with self._reasons(outcome):
            self._explore(outcome)
            self._collect(outcome)
        return outcome

    def conclude(self, outcome: Outcome, answers: list[Answer]) -> None:
        """Read the answers to an outcome's questions.

        Args:
            outcome: of `explore`; a counterexample or a reason is added.
            answers: one for each question.
        """
        with self._reasons(outcome):
            self._conclude(outcome, answers)

    @contextmanager
    def _reasons(self, outcome: Outcome) -> Iterator[None]:
        """Inside, make of what ends the search the outcome's reason or counterexample.
        An end of the user's process that no stopped trace explains is raised.
        """
        try:
            yield
        except (NoProof, TooHard) as error:
            outcome.reason = str(error)
        except Differs as found:
            outcome.counterexample = found.counterexample
        except RecursionError:
            outcome.reason = "its formulas are too deep"
        except (InputError, Gone) as error:
            stopped = [trace.stopped for trace in outcome.traces if trace.stopped]
            if isinstance(error, Gone) and not stopped:
                raise  # the user's code ended, and not for what it was given
            outcome.reason = stopped[0] if stopped else str(error)

    def is_repeated(self, path: Path) -> bool:
        """Tell whether both functions have the same formulas when they are called again. A
        reference that is compared at one point alone is known to keep no state.

        Args:
            path: an earlier path.
        """
        compared = [(self.function, path.found)]
        if self.limits.reference_points > 1:
            compared.append((self.reference, path.expected))
        trace = self._trace_at(path.point, Outcome())
        try:
            return all(torch.equal(self._formulas(f, trace), x) for f, x in compared)
        except (NoProof, TooHard, InputError):
            return False

    # ---- the paths -------------------------------------------------------------------
    def _explore(self, outcome: Outcome) -> None:
        """Add every path to the outcome; raise NoProof where there are more than the
        limit.
        """
        # a point, and how many of its first steps have no other side left to visit
        todo: list[tuple[dict[str, float], int]] = [(self.domain.draw(0), 0)]
        while todo:
            sides: list[tuple[Path, int]] = []
            for point, fixed in todo:
                if len(outcome.paths) >= self.limits.paths:
                    raise NoProof(
                        f"it has more than {self.limits.paths} paths at {self.domain.pattern}: "
                        "use torch.where in place of `if`, or prove fewer --rows or --columns"
                    )
                path = self._run_at(point, outcome)
                self._must_agree(path, outcome.traces[-1])
                outcome.paths.append(path)
                sides += [(path, n) for n in range(fixed, len(path.steps))]
            todo = self._other_sides(sides)

    def _other_sides(
        self, sides: list[tuple[Path, int]]
    ) -> list[tuple[dict[str, float], int]]:
        """Return a point on the other side of each branch, if there is one.

        Args:
            sides: a path, and the number of a step of it.

        Returns:
            Each point, and the number of the step behind that branch.

        Raises:
            NoProof: the solver gives no answer, or no point near its own is on that
                side.
        """
        wanted = [
            [*facts(self.values, path.steps[:n]), self._other(path.steps[n])]
            for path, n in sides
        ]
        answers = self._ask([self._question(conditions) for conditions in wanted])
        todo = []
        for (path, n), conditions, answer in zip(sides, wanted, answers, strict=True):
            if answer.outcome == "impossible":
                continue
            point = self._real_point(path.point, conditions, answer)
            if point is None:
                line = path.steps[n].line
                raise NoProof(
                    f"{line} branches, and no point was found for the other side"
                )
            todo.append((point, n + 1))
        return todo

    def _other(self, step: Step) -> int:
        """Return the condition of the side that was not taken."""
        return self.values.negation(step.condition) if step.holds else step.condition

    def _real_point(
        self, base: dict[str, float], conditions: list[int], answer: Answer
    ) -> dict[str, float] | None:
        """Return a point at which conditions hold, as floats compute them; None where
        the solver's has no such point near it.
        """
        if answer.outcome != "point":
            return None
        # the point itself comes last: the solver likes points at which others tie
        for number in (*range(1, TRIED), 0):
            for found in _points_of_answer(answer):
                point = self.domain.complete(base, self._moved(found, number))
                if self._holds(conditions, point):
                    return point
        return None

    def _moved(self, point: dict[str, float], number: int) -> dict[str, float]:
        """Return a point near another one; number 0 is the point itself."""
        if number == 0:
            return dict(point)
        share = 10.0 ** -(1 + number % 8)  # from 1e-1 down to 1e-8, in turn
        moved = {}
        for i, (name, x) in enumerate(sorted(point.items())):
            part = share * math.sin(number + 7 * i)
            moved[name] = x * (1 + part) if x else part
        return moved

    def _holds(self, conditions: list[int], point: dict[str, float]) -> bool:
        """Tell whether conditions hold at a point, and the domain's too."""
        if not self.domain.is_inside(point):
            return False
        known: dict[int, float] = {}
        try:
            return all(
                self.values.evaluate(c, point, known)
                for c in (*conditions, *self.domain.assumptions(set(point)))
            )
        except (ArithmeticError, ValueError):
            return False

    def _run_at(self, point: dict[str, float], outcome: Outcome) -> Path:
        """Run both functions at a point, with formulas."""
        trace = self._trace_at(point, outcome)
        found = self._formulas(self.function, trace)
        expected = self._formulas(self.reference, trace)
        return Path(point, tuple(trace.path), found, expected)

    def _trace_at(self, point: dict[str, float], outcome: Outcome) -> Trace:
        """Make the trace of the calls at a point, the next one of an outcome."""
        decoys = DECOYS[(self.number + len(outcome.traces)) % len(DECOYS)]
        trace = Trace(self.values, point, self.limits.operators, decoys)
        pattern = self.domain.pattern
        trace.sizes.with_floats = pattern.is_free
        trace.sizes.tokens = math.prod(pattern.shape)
        trace.sizes.ids = frozenset(pattern.group)
        outcome.traces.append(trace)
        return trace

    def _formulas(self, of: Outputs, trace: Trace) -> Tensor:
        """Return the ids of a function's outputs, in their shape.

        Raises:
            NoProof: the time is over, the trace was stopped, or the function wrote to
                memory without torch.
        """
        if cpu_seconds() > self.deadline:
            raise NoProof("the time is over (--timeout)")
        batch = self.domain.batch(trace.point)
        self.domain.introduce(trace, batch)
        scale = _scale(trace.point)
        trace.introduce(scale, torch.tensor(self.domain.scale))
        with tracing(trace):
            outputs = of(batch, scale)
        if trace.stopped:
            raise NoProof(trace.stopped)
        if not trace.is_intact():
            raise NoProof("it writes to the memory of a tensor without torch")
        return trace.ids(outputs.detach())

    def _must_agree(self, path: Path, trace: Trace) -> None:
        """Raise NoProof unless the formulas give the numbers of the functions, at the
        witness and at other points of the path. Raise Differs where the reference alone
        is finite at the witness, if numbers of the domain cannot overflow.
        """
        tolerance = ROUNDED if trace.is_rounded else AGREES
        conditions = list(facts(self.values, path.steps))
        if not self._holds(conditions, path.point):
            raise NoProof("a branch is decided by rounding")
        for number, point in enumerate(self._points_of(conditions, path.point)):
            batch = self.domain.batch(point)
            compared = [(self.function, path.found, "its result")]
            if number < self.limits.reference_points:
                reference = (self.reference, path.expected, "the reference's result")
                compared.append(reference)
            for of, ids, whose in compared:
                numbers = of(batch, _scale(point))
                formulas = self._numbers(ids, point)
                if not numbers.isfinite().all():
                    self._refuse_infinite(path, point, whose)
                self._must_be_near(numbers, formulas, batch, tolerance)

    def _must_be_near(
        self, numbers: Tensor, formulas: Tensor, batch: Rollouts, tolerance: float
    ) -> None:
        """Raise NoProof unless the numbers of formulas are those of a function, up to a
        tolerance relative to them. Where a float overflows in a formula, nothing is
        compared.

        Args:
            numbers: finite ones, as the function computed them.
            formulas: the same, as the formulas give them.
            batch: on which both were computed.
            tolerance: relative.
        """
        if not formulas.isfinite().all():
            return
        gap = (numbers.double() - formulas).abs().max().item()
        size = max(formulas.abs().max().item(), self.domain.magnitude(batch))
        if not gap <= tolerance * size:
            raise NoProof(
                "its numbers do not follow from its inputs alone, as where it keeps a state, "
                "draws random numbers, or takes a value out of torch"
            )

    def _refuse_infinite(
        self, path: Path, point: dict[str, float], whose: str
    ) -> NoReturn:
        """Raise NoProof for a result that is not finite; Differs where that of the
        reference is finite at the witness, if numbers of the domain cannot overflow.

        Args:
            path: that of the point.
            point: at which the function was run.
            whose: the result, in words.
        """
        if point is path.point and self.domain.is_moderate:
            batch, scale = self.domain.batch(point), _scale(point)
            expected, found = self.reference(batch, scale), self.function(batch, scale)
            if expected.isfinite().all() and not found.isfinite().all():
                raise Differs(Counterexample(batch, expected, found, point))
        at = self.domain.describe(point)
        raise NoProof(f"{whose} is not finite where it was run ({at})")

    def _points_of(
        self, conditions: list[int], witness: dict[str, float]
    ) -> Iterator[dict[str, float]]:
        """Yield points of a path, the witness first."""
        seen = [witness]
        yield witness
        for where, most in CHECKED.items():
            points = (self.domain.draw(seed, where) for seed in range(1, 9))
            on_path = (point for point in points if self._holds(conditions, point))
            for point in itertools.islice(on_path, most):
                if point not in seen:
                    seen.append(point)
                    yield point

    def _numbers(self, ids: Tensor, point: dict[str, float]) -> Tensor:
        """Return the numbers of formulas at a point."""
        known: dict[int, float] = {}
        flat = []
        for x in ids.reshape(-1).tolist():
            try:
                flat.append(self.values.evaluate(x, point, known))
            except (ArithmeticError, ValueError):
                flat.append(math.nan)
        return torch.tensor(flat, dtype=torch.float64).view(ids.shape)

    # ---- the differences -------------------------------------------------------------
    def _collect(self, outcome: Outcome) -> None:
        """Collect a question for each place at which the functions may differ."""

        def add(
            path: Path,
            kind: str,
            conditions: tuple[int, ...],
            pair: tuple[int, ...] = (),
        ) -> None:
            """Add a question about a path; `kind` says what it asks."""
            outcome.questions.append(self._question(conditions, pair))
            outcome.meant.append((path, kind))

        for path in outcome.paths:
            given = facts(self.values, path.steps)
            # has the path a point at all?
            add(path, "model", given)
            for conditions, pair in self._unequal(path):
                add(path, "difference", (*given, *conditions), pair)
            for obligation, words in self.values.obligations.items():
                if self._is_of_pattern(obligation):
                    add(path, words, (*given, self.values.negation(obligation)))

    def _is_of_pattern(self, condition: int) -> bool:
        """Tell whether a condition is about variables of this batch alone."""
        names = self.values.variables(self.domain.ids_of_all)
        return self.values.variables((condition,)) <= names

    def _conclude(self, outcome: Outcome, answers: list[Answer]) -> None:
        """Read the solver's answers. The first confirmed counterexample ends it; else the
        first reason why nothing is proved is kept.
        """
        reason = ""
        for (path, kind), question, answer in zip(
            outcome.meant, outcome.questions, answers, strict=True
        ):
            if kind == "model":
                if answer.outcome == "unknown":
                    reason = reason or _undecided(path)
                if answer.outcome == "impossible":
                    reason = reason or "the solver found no model of the assumptions"
                continue
            if answer.outcome == "impossible":
                continue
            outcome.counterexample = self._confirm(path, question, answer)
            if outcome.counterexample:
                return
            reason = reason or self._describe_open(path, kind, answer)
        outcome.reason = reason

    def _unequal(self, path: Path) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
        """Yield conditions and two formulas that differ there, of the function and of
        the reference; equal pairs are compared once. Raise NoProof where one is
        infinite or NaN.
        """
        all_found = path.found.reshape(-1).tolist()
        all_expected = path.expected.reshape(-1).tolist()
        pairs = dict.fromkeys(zip(all_found, all_expected, strict=True))
        for found, expected in pairs:
            for step in path.steps:
                found = self.values.given(found, step.condition, step.holds)
                expected = self.values.given(expected, step.condition, step.holds)
            if self.values.special(found) or self.values.special(expected):
                raise NoProof("a gradient is infinite or not a number")
            for conditions, x, y in self.values.cases(found, expected):
                yield conditions, (x, y)

    def _describe_open(self, path: Path, kind: str, answer: Answer) -> str:
        """Say why an answer leaves a path open, neither proved nor disproved."""
        if answer.outcome == "unknown":
            return _undecided(path)
        if kind == "difference":
            if self.thin:
                return (
                    "they differ only within a relative 3e-7 of a bound, as where a "
                    f"constant is in float32 ({self.domain.describe(self.thin)})"
                )
            return (
                "their formulas differ, and no input was found at which their numbers "
                "differ by more than the tolerance of `upref check`"
            )
        return f"it has {kind}, and that may not be harmless"

    def _confirm(
        self, path: Path, question: Question, answer: Answer
    ) -> Counterexample | None:
        """Return a counterexample near the solver's point, if both functions differ where
        they run.
        """
        conditions = list(question.conditions)
        names = self.values.variables((*conditions, *question.unequal))
        within = (
            p for p in self._candidates(path, answer) if self._holds(conditions, p)
        )
        for point in itertools.islice(within, RUN):
            if not all(self._holds(conditions, p) for p in _beside(point, names)):
                self.thin = self.thin or point
                continue
            batch = self.domain.batch(point)
            # a factor of 1 is easier to read
            for plain in (point | {"scale": 1.0}, point):
                scale = _scale(plain)
                expected = self.reference(batch, scale)
                found = self.function(batch, scale)
                if not self.differs(expected, found, batch):
                    continue
                bounds = tuple(bounds_in(self.values, conditions))
                # bounds of one token explain nothing where others matter too
                if self._differs_at_ordinary_points() or not self._is_of_one_token(
                    expected, found, plain
                ):
                    bounds = ()
                decide = self._differs_within(bounds, expected, found, plain)
                return Counterexample(batch, expected, found, plain, bounds, decide)
        return None

    def _differs_at_ordinary_points(self) -> bool:
        """Tell whether the functions differ at each of some ordinary points: then no bound
        of the point that the solver found makes the difference.
        """
        for seed in range(ORDINARY):
            point = self.domain.draw(seed)
            batch, scale = self.domain.batch(point), _scale(point)
            expected, found = self.reference(batch, scale), self.function(batch, scale)
            if not self.differs(expected, found, batch):
                return False
        return True

    def _is_of_one_token(
        self, expected: Tensor, found: Tensor, point: dict[str, float]
    ) -> bool:
        """Tell whether the token that differs most differs as well beside ordinary tokens:
        else the difference is due to another token, or to how tokens are tied.

        Args:
            expected, found: outputs at the point.
            point: of a counterexample.
        """
        if not self.domain.pattern.is_free:
            return False
        own = self._of_worst_token(expected, found, point)
        return all(
            self._differs_at_worst_token(expected, found, own, 50 + seed)
            for seed in range(BESIDE_OTHERS)
        )

    def _differs_within(
        self,
        bounds: tuple[tuple[str, str, float], ...],
        expected: Tensor,
        found: Tensor,
        point: dict[str, float],
    ) -> bool:
        """Tell whether the token that differs most differs too where its variables have
        other numbers within their bounds, and the variables without bounds any number.

        Args:
            bounds: of a counterexample.
            expected, found: outputs at the point.
            point: of the counterexample.
        """
        own = self._of_worst_token(expected, found, point)
        ends_of: dict[str, list[float]] = {}
        for name in own:
            low = [bound for x, sign, bound in bounds if x == name and sign == ">"]
            high = [bound for x, sign, bound in bounds if x == name and sign == "<"]
            tightest = [max(low)] if low else []
            tightest += [min(high)] if high else []
            if tightest:
                ends_of[name] = tightest
        for seed in range(WITHIN):
            chance = random.Random(seed)
            moved = {}
            for name, ends in ends_of.items():
                # towards one of two bounds, or in both directions from the only one
                farthest = 1.0 if len(ends) == 1 else 0.0
                end = chance.choice(ends)
                share = math.exp(chance.uniform(-2.0, farthest))
                moved[name] = end + (point[name] - end) * share
            other = self.domain.complete(self.domain.draw(80 + seed), moved)
            if not self._holds([], other):
                continue
            if not self._differs_at_worst_token(expected, found, moved, 80 + seed):
                return False
        return True

    def _worst_token(self, expected: Tensor, found: Tensor) -> int:
        """Return the place of the token that differs most, in the flat outputs."""
        return int((expected - found).abs().nan_to_num(math.inf).argmax())

    def _of_worst_token(
        self, expected: Tensor, found: Tensor, point: dict[str, float]
    ) -> dict[str, float]:
        """Return the variables of the token that differs most, and of its response, with
        their numbers.

        Args:
            expected, found: outputs at the point.
            point: a number for each variable.
        """
        rows, columns = self.domain.pattern.shape
        index = self._worst_token(expected, found) % (rows * columns)
        row, column = divmod(index, columns)
        # variables are named by a letter, a row and a column: r0_1, or A0 of a response
        own_places = (f"{row}", f"{row}_{column}")
        own = {}
        for name, number in point.items():
            letters = name.rstrip("0123456789_")
            if name.removeprefix(letters) in own_places:
                own[name] = number
        return own

    def _differs_at_worst_token(
        self, expected: Tensor, found: Tensor, own: dict[str, float], seed: int
    ) -> bool:
        """Tell whether the functions differ at the token that differs most, where it has
        these numbers and all other variables are drawn.

        Args:
            expected, found: outputs at a counterexample.
            own: numbers of variables.
            seed: of the draw.
        """
        index = self._worst_token(expected, found)
        moved = self.domain.complete(self.domain.draw(seed), own) | {"scale": 1.0}
        batch, scale = self.domain.batch(moved), _scale(moved)
        right, answer = self.reference(batch, scale), self.function(batch, scale)
        alone = right.clone()
        alone.view(-1)[index] = answer.reshape(-1)[index]
        return self.differs(right, alone, batch)

    def _candidates(self, path: Path, answer: Answer) -> Iterator[dict[str, float]]:
        """Yield the solver's point, if it has one, points near it, and points at random."""
        for number in range(TRIED):
            for found in _points_of_answer(answer):
                yield self.domain.complete(path.point, self._moved(found, number))
            yield self.domain.draw(100 + number)

    # ---- questions -------------------------------------------------------------------
    def _question(
        self, conditions: "tuple[int, ...] | list[int]", pair: tuple[int, ...] = ()
    ) -> Question:
        """Return a question under the assumptions of the domain."""
        names = self.values.variables((*conditions, *pair))
        return Question((*self.domain.assumptions(names), *conditions), pair)

    def _ask(self, questions: list[Question]) -> list[Answer]:
        """Return the solver's answers in the time that is left; raise NoProof where
        none is.
        """
        left = self.deadline - cpu_seconds()
        if left <= 0:
            raise NoProof("the time is over (--timeout)")
        return ask(self.values, questions, left, self.limits.solver)


def _undecided(path: Path) -> str:
    """Say that the solver did not decide a question about a path, and what may help."""
    lines = [step.line for step in path.steps if step.line]
    after = f" on the path through {lines[-1]}" if lines else ""
    return (
        f"the solver did not decide it within its limits{after}: "
        "try fewer --rows and --columns"
    )


def _points_of_answer(answer: Answer) -> Iterator[dict[str, float]]:
    """Yield the solver's point; and, where it took a number for a logarithm, the point
    at which this number is one. Before each, yield it with tiny advantages replaced by
    1 and -1, which are easy to read.
    """
    # a float holds the exponential of such a number, and 1 over it
    of_logs = {
        name: math.exp(x) for name, x in answer.logs.items() if abs(x) < MOST_LOG
    }
    points = [answer.point]
    if of_logs:
        points.append(answer.point | of_logs)
    for point in points:
        tiny = {
            name: math.copysign(1.0, x)
            for name, x in point.items()
            if name[0] == "A" and abs(x) < TINY_ADVANTAGE
        }
        if tiny:
            yield point | tiny
        yield point


def _scale(point: Mapping[str, float]) -> Tensor:
    """Return the factor by which the loss is multiplied at a point."""
    return torch.tensor(point["scale"], dtype=torch.float64)


def bounds_in(
    values: Values, conditions: list[int]
) -> Iterator[tuple[str, str, float]]:
    """Yield the conditions that bound one variable, as (variable, sign, number).

    Args:
        values: of the conditions.
        conditions: ids.
    """
    for condition in conditions:
        for comparison, holds in values.facts(condition):
            bound = values.bound_of(comparison)
            if bound is not None:
                yield bound[0], ">" if holds else "<", bound[1]


def _beside(
    point: dict[str, float], names: Iterable[str]
) -> Iterator[dict[str, float]]:
    """Yield the points a little below and above, in one variable after the other."""
    for name in names:
        for sign in (1, -1):
            yield point | {name: point[name] * (1 + sign * NEARBY)}


def facts(values: Values, steps: "tuple[Step, ...] | list[Step]") -> tuple[int, ...]:
    """Return the conditions of steps, each as it held.

    Args:
        values: of the conditions.
        steps: of a path.
    """
    return tuple(
        s.condition if s.holds else values.negation(s.condition) for s in steps
    )
