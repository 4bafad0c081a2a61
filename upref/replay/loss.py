# SPDX-License-Identifier: Apache-2.0
"""Whether the logged loss is the objective's, which other sum of its terms it is, or
what it was divided by.

The terms of the tokens are computed once. Every aggregation is one weight per response,
so each candidate is a sum of them. Frameworks take the mean over the tokens of a step
where a paper's formula takes it within each prompt: that is the default of the
comparison.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from upref.aggregation import AGGREGATIONS
from upref.definition import Objective
from upref.errors import InputError
from upref.replay.findings import Checked, ReplayFinding, note
from upref.replay.normalizer import Normalizer, normalizer
from upref.replay.schema import RecordedBatch, expect_batch
from upref.replay.terms import (
    EXTRA,
    FACTORS,
    OR_ELSE,
    StepTerms,
    as_run,
    or_else,
    terms_of,
)

# A float32 mean over n terms is off by a few units of 6e-8 times the mean |term|; one
# in bfloat16 would be off by 4e-3 and name nothing. Seven digits are what frameworks
# log.
ROUNDING = 5e-6
SHARP = 1e-4  # of the sum of |terms|: with fewer digits another sum may agree by chance


@dataclass(frozen=True, kw_only=True)
class LoggedLoss(Checked):
    """The logged loss beside the objective's.

    Args:
        objective: its name.
        logged: the number that the run logged.
        value: the objective's loss, aggregated as `expected` says.
        expected: name of that aggregation.
        found: the sum of the terms that the logged number is; "" if none.
        divisor: the number that would give the logged loss in the place of the
            objective's divisor, a count of tokens or of responses; None where none can
            be told.
        fits: names of all sums and multiples that are the logged number.
        gradient: the sum of the terms whose gradient is the recorded dL/dlp; "" if
            none, or nothing was recorded.
        gradient_factor: the recorded gradient over that of the sum that it was compared
            with, where one number.
        gradient_tolerance: relative error up to which it is that gradient.
        unused: hyperparameters that may be doubled without another loss: this step does
            not exercise them.
    """

    objective: str
    logged: float
    value: float
    expected: str
    found: str
    divisor: float | None
    fits: tuple[str, ...] = ()
    gradient: str = ""
    gradient_factor: float | None = None
    gradient_tolerance: float = 0.0
    unused: tuple[str, ...] = ()

    @property
    def gradient_failed(self) -> bool:
        """Whether dL/dlp is that of another sum, or a multiple."""
        return any(f.cause.startswith("gradient") for f in self.failures)


def loss(
    batch: RecordedBatch,
    objective: Objective | str,
    logged: float | None = None,
    *,
    digits: float = 0.0,
    **hp: Any,
) -> LoggedLoss:
    """Compare the logged loss with the objective's on the recorded tokens, and dL/dlp
    with its gradient.

    Where the file states the counts by which its framework divides (`schema.LOGGED`),
    the loss may have them or those of the tokens that are there.

    Args:
        batch: with the columns adv and old; with now, off the first optimizer step too.
            With grad, the gradient is compared as well (`upref.replay.normalizer`).
        objective: what ran. A name is compared as frameworks run it, with a token mean
            in place of group-token-mean; an Objective as it is.
        logged: the number; None: `logged["loss"]` of the file.
        digits: half a unit of the number's last printed digit.
        **hp: hyperparameters of the objective.

    Returns:
        The answer. It is false where the number is another sum of the same terms, or a
        simple multiple of theirs, and where the gradient has another normalizer. With
        grad, the number alone proves nothing.

    Raises:
        InputError: a column, the number, or the file of a rank is missing.
    """
    expect_batch(batch, "the check of the loss")
    o = as_run(objective, hp)
    if logged is None:
        logged = batch.logged.get("loss")
    if logged is None:
        raise InputError(
            "the check of the loss needs the number that the run logged: --loss, or `logged` of the file."
        )
    if not math.isfinite(logged):
        raise InputError(
            f"the loss that the run logged is {logged}: replay a step that has a number."
        )
    step = terms_of(batch, o, hp)
    gradient = None if batch.grad is None else normalizer(batch, o, **hp)
    number = _Number.of(batch, step, logged, digits)
    findings = [] if batch.now is not None else [note("loss", "needs_now")]
    found, judged = _judged(batch, number, gradient)
    findings += judged
    if gradient is not None:
        findings += gradient.findings
    return LoggedLoss(
        objective=o.name,
        logged=logged,
        value=number.value,
        expected=number.expected,
        found=found,
        divisor=number.divisor,
        fits=tuple(number.accepted + [name for name, _ in number.others])
        + tuple(_times(f) for f in number.multiples),
        gradient="" if gradient is None else gradient.found,
        gradient_factor=None if gradient is None else gradient.factor,
        gradient_tolerance=0.0 if gradient is None else gradient.tolerance,
        unused=tuple(_unused(step)),
        findings=tuple(findings),
    )


@dataclass(frozen=True)
class _Number:
    """A logged loss beside the sums of an objective's terms.

    Args:
        objective: its name.
        logged: the number.
        tolerance: how far rounding, and the digits that it has, may move it.
        size: the objective's sum of |terms|.
        expected, value: the objective's sum and the loss that it gives; of several that
            are the objective's, the one that is the logged number.
        accepted: names of those that are the objective's and the logged number.
        others: (name, loss) of the other sums that are the logged number.
        multiples: those of FACTORS by which the loss is the logged number.
        count, unit: the objective's divisor.
        by_prompt: whether each prompt's sum has a divisor of its own.
    """

    objective: str
    logged: float
    tolerance: float
    size: float
    expected: str
    value: float
    accepted: list[str]
    others: list[tuple[str, float]]
    multiples: list[float]
    count: float
    unit: str
    by_prompt: bool

    @classmethod
    def of(
        cls, batch: RecordedBatch, step: StepTerms, logged: float, digits: float
    ) -> "_Number":
        """Compute every sum and compare it with the number."""
        expected, first = next(step.by_counts())
        value = first.loss()
        size = float(step.total(step.terms.abs()))
        tolerance = digits + ROUNDING * max(size, abs(value))
        accepted = [(n, v) for n, v in _accepted(step) if abs(v - logged) <= tolerance]
        if accepted:
            expected, value = accepted[0]
        others = [
            (n, v) for n, v in _candidates(batch, step) if abs(v - logged) <= tolerance
        ]
        multiples = []
        if min(abs(value), abs(logged)) > 100 * tolerance:
            multiples = [
                f for f in FACTORS if abs(logged - f * value) <= 2 * tolerance * f
            ]
        count, unit = first.count
        by_prompt = step.o.agg == "group-token-mean"
        names = [n for n, _ in accepted]
        return cls(
            step.o.name,
            logged,
            tolerance,
            size,
            expected,
            value,
            names,
            others,
            multiples,
            count,
            unit,
            by_prompt,
        )

    @property
    def cancels(self) -> bool:
        """Whether the objective's sum is 0 to rounding."""
        return abs(self.value) <= 10 * self.tolerance

    @property
    def divisor(self) -> float | None:
        """What gives the logged number in the place of the count, with the digits that
        the number has."""
        if self.by_prompt or self.cancels or abs(self.logged) <= 10 * self.tolerance:
            return None
        digits = int(math.log10(abs(self.logged) / self.tolerance))
        return float(f"{self.count * self.value / self.logged:.{digits}g}")

    @property
    def numbers(self) -> dict[str, Any]:
        """What every finding says of it."""
        return {
            "logged": self.logged,
            "expected": self.expected,
            "objective": self.objective,
            "value": self.value,
        }


def _judged(
    batch: RecordedBatch, number: _Number, gradient: Normalizer | None
) -> tuple[str, list[ReplayFinding]]:
    """(the sum that the logged number is, "" if none; what is to be said of it)."""
    numbers = number.numbers
    if number.accepted:
        blind = [note("loss", "uninformative", value=number.value)]
        return number.expected, blind if number.cancels else []
    if batch.meta.get(EXTRA):
        return "", [note("loss", "extra_terms", extra=batch.meta[EXTRA], **numbers)]
    if number.tolerance < SHARP * number.size and _may_accuse(gradient):
        apart = 10 * number.tolerance
        equal = [n for n, v in number.others if abs(v - number.value) > apart]
        if equal:
            numbers["found"] = or_else(equal)
            if abs(number.logged) <= apart and not _bears_out(gradient):
                return "", [note("loss", "logged_zero", **numbers)]
            failure = ReplayFinding("loss", "failure", "other_sum", numbers)
            return numbers["found"], [failure]
        if number.multiples:
            numbers["factor"] = number.multiples[0]
            return "", [ReplayFinding("loss", "failure", "multiple", numbers)]
    if number.cancels:
        return "", [note("loss", "beside_zero", **numbers)]
    divisor = number.divisor
    if divisor is not None and divisor > 0:
        numbers |= {"divisor": divisor, "count": number.count, "unit": number.unit}
        return "", [note("loss", "divided", **numbers)]
    return "", [note("loss", "unexplained", **numbers)]


def _bears_out(gradient: Normalizer | None) -> bool:
    """Whether dL/dlp is another sum's too."""
    return gradient is not None and bool(gradient.failures)


def _times(factor: float) -> str:
    """The name of a multiple of the objective's loss."""
    return f"{factor:g} times"


# where the number tells nothing of the sum
BLIND = ("uninformative", "beside_zero", "extra_terms", "logged_zero")


def settle(losses: Sequence[LoggedLoss]) -> list[LoggedLoss]:
    """Call nothing another sum that only some steps of a run are.

    A step with wrong hyperparameters equals some other sum by chance once in a few
    hundred; a fault of the code is there at each step. Where dL/dlp is that of another
    sum too, one step is enough.

    Args:
        losses: of the steps of one run.

    Returns:
        The same, with a note in the place of each failure that is of some steps alone.
    """
    telling = [x for x in losses if not any(f.cause in BLIND for f in x.findings)]
    return [_settled(x, [y for y in telling if y is not x]) for x in losses]


def _settled(one: LoggedLoss, others: Sequence[LoggedLoss]) -> LoggedLoss:
    """One step of `settle`: a failure of it stays with the sums that every other step
    may be, too.
    """
    kept: list[ReplayFinding] = []
    found = one.found
    for f in one.findings:
        names = _names(f)
        everywhere = set(names).intersection(*(other.fits for other in others))
        if not names or everywhere or one.gradient_failed:
            kept.append(f)
            continue
        found = ""
        kept.append(
            note("loss", "only_here", **f.numbers | {"what": " or ".join(names)})
        )
    return replace(one, found=found, findings=tuple(kept))


def _names(finding: ReplayFinding) -> list[str]:
    """The names of the sums that a failure of the number is, in the order of the text;
    none of another finding.
    """
    if finding.cause == "other_sum":
        names: list[str] = finding.numbers["found"].split(OR_ELSE)
        return names
    if finding.cause == "multiple":
        return [_times(finding.numbers["factor"])]
    return []


def _unused(step: StepTerms) -> Iterator[str]:
    """The hyperparameters that may be doubled without another loss."""
    value = step.loss()
    for name, number in step.o.resolve(step.hp).items():
        if not number or not math.isfinite(number):
            continue  # a bound that is not there
        try:
            doubled = replace(step, hp=step.hp | {name: 2 * number}).loss()
        except InputError:
            continue  # no such hyperparameter may be twice as large
        if doubled == value:
            yield name


def _may_accuse(gradient: Normalizer | None) -> bool:
    """Whether one number may be called another sum: dL/dlp is not recorded, has nothing
    to say, or is another sum too.

    With few tokens at r = 1 a mean over some of them can equal another sum of all of
    them by chance.
    """
    if gradient is None or gradient.failures:
        return True
    return [f.cause for f in gradient.findings] == ["no_gradient"]


def _accepted(step: StepTerms) -> Iterator[tuple[str, float]]:
    """(what it is, the loss): the objective's, by the framework's counts and by those
    of the tokens that are there.
    """
    for name, counted in step.by_counts():
        yield name, counted.loss()


def _candidates(batch: RecordedBatch, step: StepTerms) -> Iterator[tuple[str, float]]:
    """(what it is, the loss) of every other sum of the same terms."""
    o = step.o
    hp = step.hp
    for name, counted in step.by_other_counts():
        yield name, counted.loss()
    own = step.own()
    beta = o.resolve(hp).get("beta")
    for agg in AGGREGATIONS:
        if agg in (o.agg, "seq-mean-token-sum-norm") or (agg == "seq-mean") != (
            o.agg == "seq-mean"
        ):
            continue
        if agg == "group-token-mean" and step.b.group is None:
            continue  # it is the token mean
        yield agg, own.under(agg).loss()
    for words, _, parts in own.parts():
        values = [part.loss() for part in parts]
        yield f"mean over {words} of their own {o.agg}", sum(values) / len(values)
        yield f"sum over {words} of their own {o.agg}", sum(values)
    if beta:
        yield (
            f"{o.agg} without the KL term",
            replace(step, hp=hp | {"beta": 0.0}).loss(),
        )
    if o.kl and not beta and step.b.logp_ref is not None:
        return
    if (
        step.b.logp_sampler is None
        and batch.sampler is not None
        and batch.old is not None
        and o.level == "token"
    ):
        yield from _with_sampler_as_old(batch, step)


def _with_sampler_as_old(
    batch: RecordedBatch, step: StepTerms
) -> Iterator[tuple[str, float]]:
    """The same objective with the sampler's log-probabilities in the place of π_old."""
    try:
        b = batch.rollouts(sampler=True)
    except InputError:
        return  # the sampler's column holds no log-probabilities
    assert b.logp_sampler is not None
    swapped = step.b.but(logp_old=b.logp_sampler)
    yield (
        f"{step.o.agg} with the sampler's column as π_old",
        replace(step, b=swapped).loss(),
    )
