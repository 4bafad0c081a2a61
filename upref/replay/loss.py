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

from upref.aggregation import AGGREGATIONS, KEPT_MEAN
from upref.definition import Objective
from upref.errors import InputError
from upref.replay.findings import Checked, ReplayFinding, Severity, note
from upref.replay.normalizer import Normalizer, normalizer
from upref.replay.schema import SEVERAL_LOSSES, RecordedBatch, expect_batch
from upref.replay.terms import (
    EXTRA_TERMS,
    OR_ELSE,
    USUAL_MULTIPLES,
    StepTerms,
    join_names,
    objective_as_run,
    terms_of,
)

# A float32 mean over n terms is off by a few units of 6e-8 times the mean |term|; one
# in bfloat16 would be off by 4e-3 and name nothing. Seven digits are what frameworks
# log.
ROUNDING = 5e-6
NEGATED = -1.0  # times the loss: the wrong sign
LARGEST_TOLERANCE = (
    1e-4  # of the sum of |terms|: with fewer digits another sum may agree by chance
)
# causes of a failure that the recorded gradient shows by itself
GRADIENT_FAILURES = (
    "gradient_multiple",
    "gradient_of_another",
    "gradient_other_sum",
    "gradient_sign",
)


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
        return any(f.cause in GRADIENT_FAILURES for f in self.failures)


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
        simple multiple of theirs, and where the gradient is. With
        grad, the number alone proves nothing.

    Raises:
        InputError: a column, the number, or the file of a rank is missing.
    """
    expect_batch(batch, "the check of the loss")
    resolved = objective_as_run(objective, hp)
    logged = _number_to_check(batch, logged)
    step = terms_of(batch, resolved, hp)
    gradient = None if batch.grad is None else normalizer(batch, resolved, **hp)
    comparison = _LoggedNumber.of(batch, step, logged, digits)
    findings: list[ReplayFinding] = []
    if batch.now is None:
        findings.append(note("loss", "needs_now"))
    found, number_findings = _judge_number(batch, comparison, gradient)
    findings += number_findings
    fits = [*comparison.accepted]
    fits += [name for name, _ in comparison.others]
    fits += [_multiple_name(factor) for factor in comparison.multiples]
    # the terms whose loss the number is; the objective's where it is another sum's
    exercised = dict(_objective_steps(batch, step)).get(found, step)
    judged = LoggedLoss(
        objective=resolved.name,
        logged=logged,
        value=comparison.value,
        expected=comparison.expected,
        found=found,
        divisor=comparison.divisor,
        fits=tuple(fits),
        unused=tuple(_unused_hyperparameters(exercised)),
        findings=tuple(findings),
    )
    if gradient is None:
        return judged
    findings += [_without_accusation(f, found) for f in gradient.findings]
    return replace(
        judged,
        gradient=gradient.found,
        gradient_factor=gradient.factor,
        gradient_tolerance=gradient.tolerance,
        findings=tuple(findings),
    )


def _number_to_check(batch: RecordedBatch, logged: float | None) -> float:
    """Return the logged loss that is given, or else that of the file.

    Raises:
        InputError: there is none, the files of the step have several, or it is not
            finite.
    """
    if logged is None:
        logged = batch.logged.get("loss")
    if logged is None and SEVERAL_LOSSES in batch.meta:
        raise InputError(
            f"the files of step {batch.step} log different numbers ({batch.meta[SEVERAL_LOSSES]}), "
            "and none is known to be the step's: give the loss of the step, --loss NUMBER."
        )
    if logged is None:
        raise InputError(
            "the check of the loss needs the number that the run logged: --loss, or `logged` of the file."
        )
    if not math.isfinite(logged):
        raise InputError(
            f"the loss that the run logged is {logged}: replay a step that has a number."
        )
    return logged


@dataclass(frozen=True)
class _LoggedNumber:
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
        multiples: those of USUAL_MULTIPLES, and NEGATED, by which the loss is the
            logged number.
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
    ) -> "_LoggedNumber":
        """Compute every sum of the objective's terms, and compare it with the number.

        A sum is the number where they differ by at most `digits` plus rounding.

        Args:
            batch: the recorded step.
            step: the objective's terms on it.
            logged: the number.
            digits: half a unit of its last printed digit.
        """
        expected, own_terms = next(step.by_counts())
        value = own_terms.loss()
        size = float(step.total(step.terms.abs()))
        tolerance = digits + ROUNDING * max(size, abs(value))
        accepted: list[tuple[str, float]] = []
        for name, counted in _objective_steps(batch, step):
            loss_of_sum = counted.loss()
            if abs(loss_of_sum - logged) <= tolerance:
                accepted.append((name, loss_of_sum))
        if accepted:
            expected, value = accepted[0]
        others: list[tuple[str, float]] = []
        for name, loss_of_sum in _other_losses(batch, step):
            if abs(loss_of_sum - logged) <= tolerance:
                others.append((name, loss_of_sum))
        count, unit = own_terms.count
        return cls(
            objective=step.objective.name,
            logged=logged,
            tolerance=tolerance,
            size=size,
            expected=expected,
            value=value,
            accepted=[name for name, _ in accepted],
            others=others,
            multiples=_find_multiples(value, logged, tolerance),
            count=count,
            unit=unit,
            by_prompt=step.objective.agg == "group-token-mean",
        )

    @property
    def cancels(self) -> bool:
        """Whether the objective's sum is 0 to rounding."""
        return abs(self.value) <= 10 * self.tolerance

    @property
    def divisor(self) -> float | None:
        """The divisor that gives the logged number in place of `count`, with as many
        digits as the number has; None where none can be told.
        """
        if self.by_prompt or self.cancels or abs(self.logged) <= 10 * self.tolerance:
            return None
        digits = int(math.log10(abs(self.logged) / self.tolerance))
        if not self.may_be_count:
            digits += 1
        return float(f"{self.count * self.value / self.logged:.{digits}g}")

    @property
    def may_be_count(self) -> bool:
        """Whether a whole number in place of `count` gives the logged number, to its
        tolerance. `logged` must not be 0.
        """
        divisor = self.count * self.value / self.logged
        error = divisor * self.tolerance / abs(self.logged)
        return abs(divisor - round(divisor)) <= error

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers that every finding about it needs."""
        return {
            "logged": self.logged,
            "expected": self.expected,
            "objective": self.objective,
            "value": self.value,
        }


def _find_multiples(value: float, logged: float, tolerance: float) -> list[float]:
    """Return those of USUAL_MULTIPLES, and NEGATED, by which `value` is the logged
    number; [] where one of the two numbers is near 0.
    """
    # a quotient of two numbers near 0 is any multiple
    if min(abs(value), abs(logged)) <= 100 * tolerance:
        return []
    found = []
    for multiple in (*USUAL_MULTIPLES, NEGATED):
        if abs(logged - multiple * value) <= 2 * tolerance * abs(multiple):
            found.append(multiple)
    return found


def _judge_number(
    batch: RecordedBatch, number: _LoggedNumber, gradient: Normalizer | None
) -> tuple[str, list[ReplayFinding]]:
    """Judge the logged loss. The first of these that applies is the answer: it is the
    objective's; it has other terms; it is another sum, a usual multiple, or the loss
    with the other sign; the terms cancel; it is an unknown multiple.

    Args:
        batch: the recorded step.
        number: the logged loss beside the sums of the objective's terms.
        gradient: the verdict on the recorded gradient, if there is one. Unless it fails
            too or says nothing, another sum or a multiple is no failure.

    Returns:
        The name of the sum that the number is, of several all, joined with OR_ELSE, ""
        if none; and at most one finding.
    """
    numbers = number.numbers
    if number.accepted and not number.cancels:
        return number.expected, []
    if number.accepted:
        # + 0.0 makes 0 of -0, which would be printed with its sign
        uninformative = note("loss", "uninformative", value=number.value + 0.0)
        return number.expected, [uninformative]
    if batch.meta.get(EXTRA_TERMS):
        return "", [
            note("loss", "extra_terms", extra=batch.meta[EXTRA_TERMS], **numbers)
        ]
    is_precise = number.tolerance < LARGEST_TOLERANCE * number.size
    if is_precise and _number_may_fail(gradient):
        found, finding = _find_other_sum(number, gradient)
        if finding is not None:
            return found, [finding]
    if is_precise and NEGATED in number.multiples:
        # where the recorded gradient has the right sign, the number alone is negated
        may_fail = _number_may_fail(gradient) or _is_gradient_negated(gradient)
        severity: Severity = "failure" if may_fail else "note"
        return "", [ReplayFinding("loss", severity, "negated", numbers)]
    if number.cancels:
        return "", [note("loss", "beside_zero", **numbers)]
    return "", [_note_on_factor(number)]


def _find_other_sum(
    number: _LoggedNumber, gradient: Normalizer | None
) -> tuple[str, ReplayFinding | None]:
    """Find whether the logged loss is another sum of the terms, or else a usual
    multiple.

    Args:
        number: the logged loss beside the sums of the objective's terms.
        gradient: the verdict on the recorded gradient, if there is one.

    Returns:
        The names of the sums that it is, "" if none or if the logged loss is 0 and the
        gradient does not fail too; and the finding, None where it is no such number.
    """
    numbers = number.numbers
    noise = 10 * number.tolerance
    other_sums = [
        name for name, value in number.others if abs(value - number.value) > noise
    ]
    if other_sums:
        numbers["found"] = join_names(other_sums)
        if abs(number.logged) <= noise and not _gradient_fails_too(gradient):
            return "", note("loss", "logged_zero", **numbers)
        failure = ReplayFinding("loss", "failure", "other_sum", numbers)
        return numbers["found"], failure
    if number.multiples and NEGATED not in number.multiples:
        numbers["factor"] = number.multiples[0]
        return "", ReplayFinding("loss", "failure", "multiple", numbers)
    return "", None


def _note_on_factor(number: _LoggedNumber) -> ReplayFinding:
    """Return the note on a logged loss that is no known sum and no usual multiple of the
    objective's: by which divisor it would be, or which multiple it is. Near 0, neither
    can be told.

    Args:
        number: the logged loss beside the sums of the objective's terms.
    """
    numbers = number.numbers
    if abs(number.logged) <= 10 * number.tolerance:
        return note("loss", "unexplained", **numbers)
    numbers["factor"] = number.logged / number.value
    if numbers["factor"] < 0:
        return note("loss", "other_sign", **numbers)
    if number.divisor is None:
        return note("loss", "times", **numbers)
    numbers |= {
        "divisor": number.divisor,
        "count": number.count,
        "unit": number.unit,
        "remark": "" if number.may_be_count else " (no whole number)",
    }
    return note("loss", "divided", **numbers)


def _without_accusation(finding: ReplayFinding, found: str) -> ReplayFinding:
    """Return the finding "gradient_sign" as a note where the logged loss is right: then
    the column grad may hold dJ/dlp. Any other finding is returned as it is.

    Args:
        finding: on the gradient.
        found: the objective's sum that the logged number is; "" if none.
    """
    if found and finding.cause == "gradient_sign":
        return replace(finding, severity="note")
    return finding


def _is_gradient_negated(gradient: Normalizer | None) -> bool:
    """Return whether the recorded gradient is -1 times the objective's; False where
    none is recorded.
    """
    if gradient is None or gradient.factor is None:
        return False
    return abs(gradient.factor - NEGATED) <= gradient.tolerance


def _gradient_fails_too(gradient: Normalizer | None) -> bool:
    """Return whether a gradient is recorded, and is that of another sum or a multiple."""
    return gradient is not None and bool(gradient.failures)


def _multiple_name(factor: float) -> str:
    """Return the name of a multiple of the objective's loss, for example "2 times"."""
    return f"{factor:g} times"


# where the number tells nothing of the sum
UNINFORMATIVE_CAUSES = ("uninformative", "beside_zero", "extra_terms", "logged_zero")


def settle(losses: Sequence[LoggedLoss]) -> list[LoggedLoss]:
    """Withdraw the failures that one step of a run has alone, or that not all wrong steps
    have.

    A step with wrong hyperparameters equals some other sum by chance once in a few
    hundred; a fault of the code is there at each step from some step on. Where dL/dlp is
    that of another sum too, one step is enough.

    Args:
        losses: of the steps of one run.

    Returns:
        The same, with a note in the place of each failure that is of some steps alone.
    """
    informative = []
    for step_loss in losses:
        causes = {finding.cause for finding in step_loss.findings}
        if causes.isdisjoint(UNINFORMATIVE_CAUSES):
            informative.append(step_loss)
    settled = []
    for step_loss in losses:
        others = [other for other in informative if other is not step_loss]
        settled.append(_settle_one(step_loss, others))
    return settled


def _settle_one(
    step_loss: LoggedLoss, other_losses: Sequence[LoggedLoss]
) -> LoggedLoss:
    """Keep or withdraw the failures of one step.

    A failure stays if one of the sums that it names is also a sum that is the logged
    number at each other wrong step, or, where no other step is wrong, at each other
    step; or if the gradient of its step fails. Otherwise the note "only_here" replaces
    it, and `found` is "".

    Args:
        step_loss: the step.
        other_losses: the informative ones of the other steps.
    """
    kept: list[ReplayFinding] = []
    found = step_loss.found
    wrong = [other for other in other_losses if other.found != other.expected]
    if wrong:
        other_losses = wrong
    for finding in step_loss.findings:
        names = _sum_names(finding)
        fits_all_steps = any(
            all(name in other.fits for other in other_losses) for name in names
        )
        if not names or fits_all_steps or step_loss.gradient_failed:
            kept.append(finding)
            continue
        found = ""
        numbers = finding.numbers | {"what": " or ".join(names)}
        kept.append(note("loss", "only_here", **numbers))
    return replace(step_loss, found=found, findings=tuple(kept))


def _sum_names(finding: ReplayFinding) -> list[str]:
    """Return the names of the sums, or of the multiple, that a failure of the logged
    number names, in the order of its text; [] for any other finding.
    """
    if finding.cause == "other_sum":
        names: list[str] = finding.numbers["found"].split(OR_ELSE)
        return names
    if finding.cause == "negated" and finding.severity == "failure":
        return [_multiple_name(NEGATED)]
    if finding.cause == "multiple":
        return [_multiple_name(finding.numbers["factor"])]
    return []


def _unused_hyperparameters(step: StepTerms) -> Iterator[str]:
    """Yield the hyperparameters that may be doubled without changing the loss by one
    bit, except those that are 0, None or infinite, or may not be doubled.
    """
    value = step.loss()
    for name, number in step.objective.resolve(step.hp).items():
        if not number or not math.isfinite(number):
            continue  # a term or a bound that is switched off
        try:
            doubled = replace(step, hp=step.hp | {name: 2 * number}).loss()
        except InputError:
            continue  # no such hyperparameter may be twice as large
        if doubled == value:
            yield name


def _number_may_fail(gradient: Normalizer | None) -> bool:
    """Return whether the logged number alone may be called another sum: dL/dlp is not
    recorded or is that of another sum too, or the objective has no gradient here.

    With few tokens at r = 1 a mean over some of them can equal another sum of all of
    them by chance.
    """
    if gradient is None or gradient.failures:
        return True
    return [f.cause for f in gradient.findings] == ["no_gradient"]


def _objective_steps(
    batch: RecordedBatch, step: StepTerms
) -> Iterator[tuple[str, StepTerms]]:
    """Yield the terms whose sum is the objective's loss: divided by the framework's
    counts, and by the counts of the recorded tokens. Without the column old, and with
    now, also with the sampler's log-probabilities as π_old.

    Yields:
        The name of the sum, and the terms.
    """
    yield from step.by_counts()
    if batch.old is None and batch.now is not None:
        # the engine's numbers may be the π_old of such a run
        yield from _with_sampler_as_old(batch, step)


def _other_losses(batch: RecordedBatch, step: StepTerms) -> Iterator[tuple[str, float]]:
    """Yield the loss by every other sum of the objective's terms: with other counts,
    under other aggregations, as a mean or a sum over micro-batches or ranks, without
    the KL term, and with the sampler's column as π_old.

    Yields:
        The name of the sum, and the loss.
    """
    objective = step.objective
    hp = step.hp
    for name, counted in step.by_other_counts():
        yield name, counted.loss()
    own = step.by_recorded_counts()
    beta = objective.resolve(hp).get("beta")
    for agg in AGGREGATIONS:
        if agg in (objective.agg, "seq-mean-token-sum-norm"):
            continue
        if "seq-mean" in (agg, objective.agg):
            continue  # one has a term for each response, the other for each token
        if agg == "group-token-mean" and step.rollouts.group is None:
            continue  # it is the token mean
        if agg == KEPT_MEAN:
            if objective.rejects:
                whole = replace(own, rollouts=own.rollouts.but(totals=None))
                yield agg, whole.under(agg).loss()
            continue
        yield agg, own.under(agg).loss()
    for words, _, parts in own.parts():
        values = [part.loss() for part in parts]
        yield (
            f"mean over {words} of their own {objective.agg}",
            sum(values) / len(values),
        )
        yield f"sum over {words} of their own {objective.agg}", sum(values)
    if beta:
        yield (
            f"{objective.agg} without the KL term",
            replace(step, hp=hp | {"beta": 0.0}).loss(),
        )
    may_lack_kl_term = objective.kl and not beta and step.rollouts.logp_ref is not None
    if batch.old is not None and not may_lack_kl_term:
        for name, with_sampler in _with_sampler_as_old(batch, step):
            yield name, with_sampler.loss()


def _with_sampler_as_old(
    batch: RecordedBatch, step: StepTerms
) -> Iterator[tuple[str, StepTerms]]:
    """Yield the objective's terms with the sampler's log-probabilities as π_old, where
    they are recorded and the objective, one of tokens, does not take them itself; else
    nothing.
    """
    takes_sampler = step.rollouts.logp_sampler is not None
    if batch.sampler is None or takes_sampler or step.objective.level != "token":
        return
    try:
        rollouts = batch.rollouts(sampler=True)
    except InputError:
        return  # the sampler's column holds no log-probabilities
    assert rollouts.logp_sampler is not None
    with_sampler = step.rollouts.but(logp_old=rollouts.logp_sampler)
    yield (
        f"{step.objective.agg} with the sampler's column as π_old",
        replace(step, rollouts=with_sampler),
    )
