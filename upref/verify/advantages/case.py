# SPDX-License-Identifier: Apache-2.0
"""A user's advantage function compared with an estimator: what is expected, what
differs, the smallest batch.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import Any

from upref.errors import InputError
from upref.verify.advantages.function import Function
from upref.verify.exact import (
    DIVIDED_BY_STD,
    EVEN_GROUPS,
    GRADED_REWARDS,
    UNEVEN_GROUPS,
    UNGROUPED,
    Denominator,
    RewardBatch,
    advantage,
    fit_denominator,
    nearly_equal,
    numerators_and_variances,
)
from upref.verify.faults import Fault, fitting, known, measured
from upref.verify.faults.advantages import AdvantageChange, Floats
from upref.verify.finding import NO_CAUSE, Cause, Example, number_pair
from upref.verify.report import Finding, fail

UNCOUPLED = ("reward", "signed")  # estimators that subtract no baseline
DOUBLE_TOL = 1e-9  # relative, of what is computed in float64
SINGLE_TOL = 1e-4  # of what is computed in float32
SMALL_EPS = 1e-3  # an eps that a fault may come with
ROWS_AT_ONCE = 16  # a longer batch is compared last: exact numbers of it are slow
# Rewards of several sizes. eps does not grow with them, which shows the denominator.
SCALES = [EVEN_GROUPS.times(Fraction(8, 2**n)) for n in (0, 3, 13, 23, 33, 43)]


@dataclass
class AdvantageCase:
    """A function beside the estimator that it should be: what the oracles read.

    Attributes:
        function: the function.
        name: the name of the estimator.
        hp: the settings ddof and eps that the user gave.
        denominator: what the advantages are divided by, as measured. Its smallest std
            is infinite where none was found.
        failed: the names of the oracles that failed so far.
    """

    function: Function
    name: str
    hp: Mapping[str, Any]
    denominator: Denominator
    failed: set[str] = field(default_factory=set)

    @property
    def denominator_is_known(self) -> bool:
        """Whether the values are right and their denominator was found."""
        return (
            self.name in DIVIDED_BY_STD
            and not self.wrong
            and self.denominator.smallest_std < math.inf
        )

    @property
    def wrong(self) -> bool:
        """Whether the values are wrong. Oracles do not report what follows from that."""
        return bool(self.failed & {"values", "uneven-groups"})

    def batch(self, b: RewardBatch) -> RewardBatch:
        """Return the batch with rewards that this estimator can read.

        Args:
            b: any rewards.

        Returns:
            The batch; for `signed` each reward is 1 above 1/2, else 0.
        """
        if self.name == "signed":
            return replace(b, R=tuple(Fraction(x > Fraction(1, 2)) for x in b.R))
        return b

    def expected(self, batch: RewardBatch) -> list[float]:
        """Return the advantages of the estimator, computed in exact fractions.

        Args:
            batch: the rewards and their groups.

        Returns:
            One advantage per response.
        """
        return advantage(self.name, batch, self.denominator)

    def differs(self, batch: RewardBatch) -> int | None:
        """Return the row whose advantage differs most, if it differs beyond the
        tolerance.

        Args:
            batch: the rewards and their groups.

        Returns:
            The index of the row; None where all agree.

        Raises:
            InputError: the function refuses this batch.
        """
        expected = self.expected(batch)
        found = self.function(batch)
        # an advantage near 0 is compared on the scale of the largest
        least_scale = 1e-3 * (max(map(abs, expected)) or 1.0)
        errors = [
            abs(right - a) / max(abs(right), abs(a), least_scale)
            if math.isfinite(a)
            else math.inf
            for right, a in zip(expected, found, strict=True)
        ]
        row = max(range(len(errors)), key=errors.__getitem__)
        return row if errors[row] > self.function.tol else None

    def fails(self, batch: RewardBatch) -> bool:
        """Tell whether some advantage differs. A batch that the function refuses is no
        failure.

        Args:
            batch: the rewards and their groups.
        """
        try:
            return self.differs(batch) is not None
        except InputError:
            return False

    def compare(
        self, oracle: str, regime: str, batch: RewardBatch, why: str | Cause = ""
    ) -> Iterator[Finding]:
        """Yield a failure if the function differs on a batch, with a smaller batch that
        shows it.

        Args:
            oracle: the name of the oracle that asks.
            regime: what is special about the batch, in words.
            batch: the rewards and their groups.
            why: the cause, where the oracle knows it; "" searches the known faults.

        Yields:
            One failure, or nothing.

        Raises:
            InputError: the function cannot be called on the batch.
        """
        batch = self.batch(batch)
        try:
            if self.differs(batch) is None:
                return
        except InputError as e:
            raise InputError(f"{e}, on {regime}") from e
        small = self._shrunk(batch)
        row = self.differs(small)
        if row is None:
            return  # it draws random numbers, which `determinism` reports
        numbers = number_pair("A", self.expected(small)[row], self.function(small)[row])
        peers = small.group.count(small.group[row])
        size = len(small.R)
        shown = f"of {size} in the batch"
        if size < len(batch.R):
            shown = f"of the {size} below, which show it alone"
        text = f"{regime}: response {row}, one of {peers} to its prompt, {shown}"
        if not why:
            usual = [self.batch(EVEN_GROUPS), self.batch(UNEVEN_GROUPS)]
            if len(batch.R) <= ROWS_AT_ONCE:
                why = self._cause([batch, *usual])
            else:
                why = self._cause([small, *usual, batch])
        yield fail(oracle, text, *numbers, self.example(small), why)

    def _cause(self, batches: Sequence[RewardBatch]) -> Cause:
        """Return the first fault of this estimator that gives the advantages found on
        every batch, or no cause. A fault with a large eps comes after all others.
        """
        answers: list[tuple[RewardBatch, Floats, Floats]] = []
        for b in batches:
            with contextlib.suppress(InputError):  # the function refuses the batch
                answers.append((b, self.expected(b), self.function(b)))
        batches, expected, found = zip(*answers, strict=True)
        if any(
            self.function.outcome(b.R, b.group).differs_within_response for b in batches
        ):
            return measured.ADVANTAGES_OF_TOKENS_DIFFER.cause()
        all_expected = [a for numbers in expected for a in numbers]
        all_found = [a for numbers in found for a in numbers]
        if any(not math.isfinite(a) for a in all_found):
            return _not_finite(batches, found)
        if self.name == "signed":
            cause = _advantages_of_two_rewards(batches, found)
            if cause:
                return cause

        def fit(fault: Fault[AdvantageChange]) -> tuple[float, float] | None:
            """Return the factor, 0.0 of a fault without one, and the eps with which a fault
            fits every batch; None where it does not, or where the right advantages fit
            as well.
            """
            change = fault.change
            k = change.k(all_expected, all_found) if change.k else 0.0
            tol = self.function.tol
            # most faults do not fit the first batch
            eps = _fitting_eps(change, batches[:1], expected, found[:1], k, tol)
            if eps is not None and len(batches) > 1:
                eps = _fitting_eps(change, batches, expected, found, k, tol)
            if eps is None:
                return None
            # the right advantages fit with another small eps: something else is wrong,
            # such as rounding, for which this eps makes up
            right_eps = _fitting_eps(change, batches, expected, expected, k, tol)
            if right_eps is not None and max(eps, right_eps) <= SMALL_EPS:
                return None
            return k, eps

        likely = NO_CAUSE
        own = (
            fault
            for fault in known("advantages")
            if not fault.applies_to or self.name in fault.applies_to
        )
        for fault, (k, eps) in fitting(own, fit):
            words = fault.words.format(k=k)
            if eps <= SMALL_EPS:
                return Cause(words, (fault.id,))
            if not likely:
                likely = Cause(f"{words}, eps = {eps:.3g}", (fault.id,))
        return likely

    def _shrunk(self, batch: RewardBatch) -> RewardBatch:
        """Return the batch without the rows that the failure does not need. Only whole
        prompts are dropped where the function takes groups of one size.
        """

        def still_fails(rows: list[int]) -> bool:
            """Return whether these rows fail, and no response has lost its last peer."""
            fewer = batch.take(rows)
            has_new_lone_response = any(
                fewer.group.count(group_id) == 1 and batch.group.count(group_id) > 1
                for group_id in fewer.group
            )
            return not has_new_lone_response and self.fails(fewer)

        rows = list(range(len(batch.R)))
        # whole groups are tried first, then runs of rows from the end, ever shorter
        drops = [batch.rows_of(group_id) for group_id in dict.fromkeys(batch.group)]
        if not self.function.groups_are_contiguous:
            drops += [
                rows[i : i + k]
                for k in (64, 16, 4, 1)
                for i in reversed(range(0, len(rows), k))
            ]
        for drop in drops:
            fewer_rows = [i for i in rows if i not in drop]
            if fewer_rows and fewer_rows != rows and still_fails(fewer_rows):
                rows = fewer_rows
        return batch.take(rows)

    def example(self, batch: RewardBatch) -> Example:
        """Make the batch with the advantages of the estimator and those of the function.

        Args:
            batch: the rewards and their groups.

        Returns:
            The example; its `found` is None where the function refuses the batch.
        """
        found = None
        with contextlib.suppress(InputError):  # the function refuses the batch
            found = [float(a) for a in self.function(batch)]
        inputs = {
            "rewards": [float(reward) for reward in batch.R],
            "group": list(batch.group),
        }
        if self.function.takes_tokens or "mask" in self.function.reads:
            inputs["lengths"] = list(batch.lengths)
        return Example(
            inputs, expected=[float(a) for a in self.expected(batch)], found=found
        )


def _not_finite(batches: Sequence[RewardBatch], found: Sequence[Floats]) -> Cause:
    """Return the cause that a std of 0 is divided by, if the numbers that are not finite
    are exactly those of prompts with one response, or equal rewards; else no cause.
    """
    for b, numbers in zip(batches, found, strict=True):
        groups_without_spread = {
            group_id
            for group_id in b.group
            if len({b.R[i] for i in b.rows_of(group_id)}) == 1
        }
        for group_id, a in zip(b.group, numbers, strict=True):
            has_spread = group_id not in groups_without_spread
            if has_spread != math.isfinite(a):
                return NO_CAUSE
    return measured.STD_OF_EQUAL_REWARDS.cause()


SIGNED_ADVANTAGES = {Fraction(0): -1.0, Fraction(1): 1.0}  # by the reward


def _advantages_of_two_rewards(
    batches: Sequence[RewardBatch], found: Sequence[Floats]
) -> Cause:
    """Return the cause that a function checked as `signed` gives the rewards 0 and 1
    other advantages than -1 and 1. No cause is returned where a reward has several
    advantages: then the batch decides too.

    Two numbers alone tell such a function from others, so the words name these and no
    formula.
    """
    advantages_of: dict[Fraction, set[float]] = {}
    for b, numbers in zip(batches, found, strict=True):
        for reward, a in zip(b.R, numbers, strict=True):
            advantages_of.setdefault(reward, set()).add(round(a, 6))
    if any(len(several) > 1 for several in advantages_of.values()):
        return NO_CAUSE
    of_failure, of_success = (advantages_of[reward] for reward in SIGNED_ADVANTAGES)
    if {-a for a in of_failure} == of_success:
        return NO_CAUSE  # only a factor or the sign differs, and other faults name it
    words = [
        f"a response with reward {reward} has the advantage {a:g}, not {SIGNED_ADVANTAGES[reward]:g}"
        for reward, (a,) in sorted(advantages_of.items())
        if a != SIGNED_ADVANTAGES[reward]
    ]
    return measured.ADVANTAGES_OF_TWO_REWARDS.cause(each="; ".join(words))


def choose_inputs(
    function: Function, name: str, hp: Mapping[str, Any]
) -> AdvantageCase:
    """Choose the kind of input and the tolerance with which a function is compared: the
    first kind on which it is right, in float64 or else in float32; else the first kind
    that it accepts.

    Args:
        function: the function.
        name: the name of the estimator that it is compared with.
        hp: ddof and eps of that estimator.

    Returns:
        The case.

    Raises:
        InputError: the function refuses every kind of input.
    """
    mask_kinds = (False, True) if "row_mask" in function.reads else (False,)
    first_accepted: AdvantageCase | None = None
    errors: list[InputError] = []
    unknown = Denominator(hp.get("ddof", 1), hp.get("eps", 0.0), smallest_std=math.inf)
    # a function that computes in float64 may still cast to float32 on the way
    for tol in (DOUBLE_TOL, SINGLE_TOL):
        for kind, mask_of_numbers in product(function.kinds, mask_kinds):
            of_kind = replace(
                function, kind=kind, tol=tol, mask_of_numbers=mask_of_numbers
            )
            case = AdvantageCase(of_kind, name, hp, unknown)
            try:
                batch = case.batch(EVEN_GROUPS)
                if of_kind.outcome(batch.R, batch.group).in_float32:
                    case = _with_tolerance(case, SINGLE_TOL)
                has_denominator = True
                if name in DIVIDED_BY_STD:
                    denominator = _measured_denominator(case)
                    has_denominator = denominator is not None
                    case = replace(case, denominator=denominator or unknown)
                is_right = has_denominator and case.differs(batch) is None
                if is_right and not _takes_ids_for_objects(case, batch):
                    return _with_measured_tolerance(case)
            except InputError as e:
                errors.append(e)
                continue
            if first_accepted is None:
                first_accepted = _with_tolerance(case, SINGLE_TOL)
    if first_accepted is None:
        raise errors[0]
    return first_accepted


def _takes_ids_for_objects(case: AdvantageCase, batch: RewardBatch) -> bool:
    """Return whether a function agrees with an estimator that reads no prompts only
    because each id of a tensor is an object of its own. A dictionary by such ids has one
    response for each prompt; by strings its numbers are others.

    Args:
        case: the function, which agrees on this batch.
        batch: of several responses to a prompt.
    """
    function = case.function
    if function.kind != "tensor" or case.name not in UNGROUPED:
        return False
    # beside strings too the rewards are a tensor
    with_strings = replace(case, function=replace(function, kind="strings"))
    with contextlib.suppress(InputError):
        return with_strings.differs(batch) is not None
    return False


def _with_tolerance(case: AdvantageCase, tol: float) -> AdvantageCase:
    """Return the case whose function is compared to this relative tolerance."""
    return replace(case, function=replace(case.function, tol=tol))


def _with_measured_tolerance(case: AdvantageCase) -> AdvantageCase:
    """Return the case with the tolerance of float32 if the function is right to that
    precision alone; else the case that is given. Graded rewards show it: the rewards of
    EVEN_GROUPS are exact in float32 too.
    """
    batch = case.batch(GRADED_REWARDS)
    in_float32 = _with_tolerance(case, SINGLE_TOL)
    with contextlib.suppress(InputError):
        if (
            case.function.tol < SINGLE_TOL
            and case.differs(batch) is not None
            and in_float32.differs(batch) is None
        ):
            return in_float32
    return case


def _measured_denominator(case: AdvantageCase) -> Denominator | None:
    """Return the denominator that the function divides by, measured at rewards of
    several sizes, or None where none fits. If it does not fit at the smallest rewards,
    its smallest std says down to where it does.
    """
    found = [case.function(b) for b in SCALES[:2]]
    with contextlib.suppress(InputError):  # it may refuse rewards that hardly differ
        found += [case.function(b) for b in SCALES[2:]]
    possible_ddofs = [case.hp["ddof"]] if "ddof" in case.hp else [1, 0]
    # on all batches, then without the smallest rewards, down to the first two batches
    for count in range(len(found), 1, -1):
        for ddof in possible_ddofs:
            denominator = _denominator_on(case, SCALES[:count], found[:count], ddof)
            if denominator is None:
                continue
            if count == len(SCALES):
                return replace(denominator, smallest_std=0.0)
            return denominator
    return None


def _denominator_on(
    case: AdvantageCase,
    batches: Sequence[RewardBatch],
    found: Sequence[Floats],
    ddof: int,
) -> Denominator | None:
    """Return the denominator that gives the advantages found on all of these batches, with
    the smallest std above 0 that they have; None where none fits.
    """
    numerators: list[Fraction] = []
    variances: list[Fraction] = []
    for batch in batches:
        of_batch = numerators_and_variances(case.name, batch, ddof)
        numerators += of_batch[0]
        variances += of_batch[1]
    advantages = [advantage for numbers in found for advantage in numbers]
    eps = case.hp.get("eps")
    denominator = fit_denominator(
        numerators, variances, advantages, case.function.tol, ddof, eps
    )
    if denominator is None:
        return None
    smallest_variance = min(variance for variance in variances if variance)
    return replace(denominator, smallest_std=math.sqrt(smallest_variance))


def _fitting_eps(
    change: AdvantageChange,
    batches: Sequence[RewardBatch],
    expected: Sequence[Floats],
    found: Sequence[Floats],
    k: float,
    tol: float,
) -> float | None:
    """Return the eps with which a change gives the advantages found.

    Args:
        change: the change of the estimator.
        batches: the batches.
        expected: the right advantages of each batch; more batches may follow.
        found: the advantages found on each batch.
        k: the number that the change takes.
        tol: the relative error that is allowed.

    Returns:
        eps; 0 where the change divides by nothing; None where no eps up to 1 fits.
    """
    changed = [
        change.numbers(b, right, k) for b, right in zip(batches, expected, strict=False)
    ]
    numerators = [numerator for numbers in changed for numerator in numbers]
    all_found = [a for numbers in found for a in numbers]
    if change.variance is None:
        is_same = nearly_equal(list(map(float, numerators)), all_found, tol)
        return 0.0 if is_same else None
    if any(
        numerator * a < 0 for numerator, a in zip(numerators, all_found, strict=True)
    ):
        return None  # no denominator changes a sign
    variances = [
        variance
        for b, numbers in zip(batches, changed, strict=True)
        for variance in change.variance(b, numbers)  # type: ignore[arg-type]
    ]
    for numerator, variance, a in zip(numerators, variances, all_found, strict=True):
        # where the variance alone is 0, the advantage may be of any size
        has_one_answer = variance or not numerator
        if has_one_answer and bool(numerator) != (abs(a) > tol):
            return None
    denominator = fit_denominator(numerators, variances, all_found, tol)  # type: ignore[arg-type]
    if denominator is None:
        return None
    # One variance fits with some eps whatever the function does: a large eps shows
    # nothing then.
    has_several_variances = len({variance for variance in variances if variance}) > 1
    largest_eps = 1.0 if has_several_variances else SMALL_EPS
    return denominator.eps if denominator.eps <= largest_eps else None
