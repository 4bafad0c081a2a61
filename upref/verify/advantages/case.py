# SPDX-License-Identifier: Apache-2.0
"""A user's advantage function compared with an estimator: what is expected, what
differs, the smallest batch.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from upref.errors import InputError
from upref.verify.advantages.function import Function
from upref.verify.exact import (
    EVEN,
    FINE,
    NORMED,
    UNEVEN,
    Denominator,
    RewardBatch,
    advantage,
    fit,
    nearly_equal,
    parts,
)
from upref.verify.faults import known, measured
from upref.verify.faults.advantages import AdvantageChange, Floats
from upref.verify.finding import NO_CAUSE, Cause, Example, number_pair
from upref.verify.report import Finding, fail

UNCOUPLED = ("reward", "signed")  # they subtract nothing
SINGLE_TOL = 1e-4  # of what is computed in float32
SMALL = 1e-3  # an eps that a fault may come with
# eps does not grow with them
SCALES = [EVEN.times(Fraction(8, 2**n)) for n in (0, 3, 13, 23, 33, 43)]


@dataclass
class AdvantageCase:
    """What the oracles read."""

    f: Function
    name: str
    hp: Mapping[str, Any]
    divided: Denominator
    failed: set[str] = field(default_factory=set)

    @property
    def known(self) -> bool:
        """Whether what it divides by was found."""
        return self.name in NORMED and not self.wrong and self.divided.least < math.inf

    @property
    def wrong(self) -> bool:
        """Whether the values are wrong: what follows from that is not said again."""
        return bool(self.failed & {"values", "uneven-groups"})

    def batch(self, b: RewardBatch) -> RewardBatch:
        """As this estimator takes it: correct or not, where rewards are read as that.

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
        return advantage(self.name, batch, self.divided)

    def differs(self, batch: RewardBatch) -> int | None:
        """The row that differs most, if one does beyond the tolerance.

        Args:
            batch: the rewards and their groups.

        Returns:
            The index of the row; None where all agree.

        Raises:
            InputError: the function refuses this batch.
        """
        want = self.expected(batch)
        got = self.f(batch)
        least = 1e-3 * (max(map(abs, want)) or 1.0)
        errors = [
            abs(x - y) / max(abs(x), abs(y), least) if math.isfinite(y) else math.inf
            for x, y in zip(want, got, strict=True)
        ]
        i = max(range(len(errors)), key=errors.__getitem__)
        return i if errors[i] > self.f.tol else None

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
        """
        batch = self.batch(batch)
        try:
            if self.differs(batch) is None:
                return
        except InputError as e:
            yield fail(
                oracle,
                regime,
                "one advantage per response",
                str(e),
                self.example(batch),
            )
            return
        small = self._shrunk(batch)
        i = self.differs(small)
        if i is None:
            return  # it draws random numbers, which `determinism` reports
        want = self.expected(small)[i]
        got = self.f(small)[i]
        peers = small.group.count(small.group[i])
        text = f"{regime}: response {i}, one of {peers} to its prompt, of {len(small.R)} in the batch"
        also = [self.batch(EVEN), self.batch(UNEVEN)]
        # exact numbers of many rows are slow: few faults get beyond the small batch
        first = [batch] if len(batch.R) <= 16 else [small]
        rest = [batch] if len(batch.R) > 16 else []
        why = why or self._cause([*first, *also, *rest])
        yield fail(oracle, text, *number_pair("A", want, got), self.example(small), why)

    def _cause(self, batches: Sequence[RewardBatch]) -> Cause:
        """The first fault of this estimator that gives what was found on every batch;
        "" where none does.
        """
        answers: list[tuple[RewardBatch, Floats, Floats]] = []
        for b in batches:
            with contextlib.suppress(InputError):  # what it refuses
                answers.append((b, self.expected(b), self.f(b)))
        batches, right, found = zip(*answers, strict=True)
        A = [a for x in found for a in x]
        expected = [a for x in right for a in x]
        if any(not math.isfinite(a) for a in A):
            return _not_finite(batches, found)
        if self.name == "signed" and (cause := _of_two_rewards(batches, found)):
            return cause
        likely = NO_CAUSE
        for fault in (f for f in known("advantages") if not f.of or self.name in f.of):
            k = fault.change.k(expected, A) if fault.change.k else 0.0
            # most do not fit the first
            eps = _eps(fault.change, batches[:1], right, found[:1], k, self.f.tol)
            if eps is not None and len(batches) > 1:
                eps = _eps(fault.change, batches, right, found, k, self.f.tol)
            if eps is not None and eps <= SMALL:
                return Cause(fault.words.format(k=k), (fault.id,))
            if eps is not None and not likely:
                words = f"{fault.words.format(k=k)}, eps = {eps:.3g}"
                likely = Cause(words, (fault.id,))
        return likely

    def _shrunk(self, batch: RewardBatch) -> RewardBatch:
        """Rows dropped while it stays wrong, whole prompts where the function wants
        groups of n.
        """

        def still(rows: list[int]) -> bool:
            x = batch.take(rows)
            alone = any(
                x.group.count(group_id) == 1 and batch.group.count(group_id) > 1
                for group_id in x.group
            )
            return not alone and self.fails(x)  # no new response without a peer

        rows = list(range(len(batch.R)))
        drops = [batch.rows_of(gradient) for gradient in dict.fromkeys(batch.group)]
        if not self.f.contiguous:
            drops += [
                rows[i : i + k]
                for k in (64, 16, 4, 1)
                for i in reversed(range(0, len(rows), k))
            ]
        for drop in drops:
            fewer_rows = [i for i in rows if i not in drop]
            if fewer_rows and fewer_rows != rows and still(fewer_rows):
                rows = fewer_rows
        return batch.take(rows)

    def example(self, batch: RewardBatch) -> Example:
        """The batch with the advantages of the estimator and those of the function.

        Args:
            batch: the rewards and their groups.

        Returns:
            The example; its `found` is None where the function refuses the batch.
        """
        found = None
        with contextlib.suppress(InputError):  # what it refuses
            found = [float(a) for a in self.f(batch)]
        inputs = {
            "rewards": [float(reward) for reward in batch.R],
            "group": list(batch.group),
        }
        return Example(
            inputs, expected=[float(a) for a in self.expected(batch)], found=found
        )


def _not_finite(batches: Sequence[RewardBatch], found: Sequence[Floats]) -> Cause:
    """The cause that a division by a std of 0 makes numbers that are not finite, where
    these are of exactly the responses whose prompt has one response, or equal rewards.
    """
    for b, numbers in zip(batches, found, strict=True):
        equal = {
            group_id
            for group_id in b.group
            if len({b.R[i] for i in b.rows_of(group_id)}) == 1
        }
        for group_id, a in zip(b.group, numbers, strict=True):
            if (group_id in equal) == math.isfinite(a):
                return NO_CAUSE
    return measured.STD_OF_EQUAL_REWARDS.cause()


def _of_two_rewards(batches: Sequence[RewardBatch], found: Sequence[Floats]) -> Cause:
    """What the two rewards that `signed` reads are made of, where each has one
    advantage in every batch; an empty cause where the batch decides too.

    A function of two rewards is told from others by two numbers alone, so the words
    name these and no formula.
    """
    answers: dict[Fraction, set[float]] = {}
    for b, numbers in zip(batches, found, strict=True):
        for reward, a in zip(b.R, numbers, strict=True):
            answers.setdefault(reward, set()).add(round(a, 6))
    if any(len(numbers) > 1 for numbers in answers.values()):
        return NO_CAUSE
    right = {Fraction(0): -1.0, Fraction(1): 1.0}
    of_failure, of_success = (answers[reward] for reward in right)
    if {-a for a in of_failure} == of_success:
        return NO_CAUSE  # one factor, or the sign, is all that differs
    told = [
        f"a response with reward {reward} has the advantage {a:g}, not {right[reward]:g}"
        for reward, (a,) in sorted(answers.items())
        if a != right[reward]
    ]
    return measured.ADVANTAGES_OF_TWO_REWARDS.cause(each="; ".join(told))


def choose_inputs(
    function: Function, name: str, hp: Mapping[str, Any]
) -> AdvantageCase:
    """With the first kind of input on which it is right, in float64 or else in float32;
    else the first that runs.

    Args:
        function: the function.
        name: of the estimator that it is compared with.
        hp: ddof and eps of that estimator.

    Returns:
        The case.

    Raises:
        InputError: the function refuses every kind of input.
    """
    first: AdvantageCase | None = None
    errors: list[InputError] = []
    # float64, and whatever goes through float32 on the way
    for tol in (1e-9, SINGLE_TOL):
        for kind in function.kinds:
            unknown = Denominator(hp.get("ddof", 1), hp.get("eps", 0.0), least=math.inf)
            case = AdvantageCase(
                replace(function, kind=kind, tol=tol), name, hp, unknown
            )
            try:
                even_batch = case.batch(EVEN)
                if case.f.outcome(even_batch.R, even_batch.group).single:
                    case = replace(case, f=replace(case.f, tol=SINGLE_TOL))
                divided = _denominator(case) if name in NORMED else case.divided
                case = replace(case, divided=divided or case.divided)
                if divided and case.differs(even_batch) is None:
                    return _as_it_computes(case)
            except InputError as e:
                errors.append(e)
                continue
            first = first or replace(case, f=replace(case.f, tol=SINGLE_TOL))
    if first is None:
        raise errors[0]
    return first


def _as_it_computes(case: AdvantageCase) -> AdvantageCase:
    """Compared to float32's digits where rewards that are no halves show no more: EVEN
    is exact in less.
    """
    fine = case.batch(FINE)
    single = replace(case, f=replace(case.f, tol=SINGLE_TOL))
    with contextlib.suppress(InputError):
        if (
            case.f.tol < SINGLE_TOL
            and case.differs(fine) is not None
            and single.differs(fine) is None
        ):
            return single
    return case


def _denominator(case: AdvantageCase) -> Denominator | None:
    """What it divides by, read off it at rewards of several sizes; None where nothing
    fits.
    """
    A = [case.f(b) for b in SCALES[:2]]
    with contextlib.suppress(InputError):  # it may refuse rewards that hardly differ
        A += [case.f(b) for b in SCALES[2:]]
    for n in range(len(A), 1, -1):
        found = [a for x in A[:n] for a in x]
        for ddof in [case.hp["ddof"]] if "ddof" in case.hp else (1, 0):
            each = [parts(case.name, b, ddof) for b in SCALES[:n]]
            c, var = ([x for part in each for x in part[k]] for k in (0, 1))
            if got := fit(c, var, found, case.f.tol, ddof, case.hp.get("eps")):
                least = 0.0 if n == len(SCALES) else math.sqrt(min(v for v in var if v))
                return replace(got, least=least)
    return None


def _eps(
    change: AdvantageChange,
    batches: Sequence[RewardBatch],
    right: Sequence[Floats],
    found: Sequence[Floats],
    k: float,
    tol: float,
) -> float | None:
    """The eps with which the change gives what was found; 0 where nothing is divided;
    None where none up to 1 fits.
    """
    each = [change.numbers(b, x, k) for b, x in zip(batches, right, strict=False)]
    c = [x for part in each for x in part]
    A = [a for part in found for a in part]
    if change.variance is None:
        return 0.0 if nearly_equal([float(x) for x in c], A, tol) else None
    if any(x * a < 0 for x, a in zip(c, A, strict=True)):
        return None  # whatever it is divided by
    var = [
        v
        for b, part in zip(batches, each, strict=True)
        for v in change.variance(b, part)  # type: ignore[arg-type]
    ]
    if any(
        bool(x) != (abs(a) > tol)
        for x, v, a in zip(c, var, A, strict=True)
        if v or not x
    ):
        return None
    got = fit(c, var, A, tol)  # type: ignore[arg-type]
    if got and got.eps <= (1.0 if len({v for v in var if v}) > 1 else SMALL):
        return got.eps
    return None
