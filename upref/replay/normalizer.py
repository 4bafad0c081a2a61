# SPDX-License-Identifier: Apache-2.0
"""The normalizer of a whole step, from dL/dlp of all its micro-batches and ranks.

A loss divides the sum of an objective's terms. dL/dlp alone shows by which number,
whatever the parallelism, and needs no second model: the recorded gradient of each
response is compared with the objective's in float64. The factors between them are one
number, those of another sum, or others.

The loss may be anybody's. Within the loss of upref's own plug-ins,
`upref_frameworks.parity` compares each micro-batch besides, to what rounding explains.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upref.definition import Objective
from upref.replay.findings import Checked, ReplayFinding, note
from upref.replay.schema import RecordedBatch, expect_batch
from upref.replay.terms import (
    USUAL_MULTIPLES,
    StepTerms,
    join_names,
    objective_as_run,
    terms_of,
)

ROUNDING = 2e-4  # of a token's gradient, computed in float32
BFLOAT16_ROUNDING = 3e-2  # the same in bfloat16, whose unit roundoff is 4e-3
# nats by which float32 may move log r beside a clip bound, in units of 1 + |log r|
BOUND_ROUNDING = 1e-5
# a smaller gradient of a token is 0 in the trainer's float32
LEAST_GRADIENT = torch.finfo(torch.float32).tiny
LARGEST_SHARE_OFF = (
    1e-3  # of the tokens may be off: at a clip bound that the band does not reach
)


@dataclass(frozen=True, kw_only=True)
class Normalizer(Checked):
    """The step's gradient beside the objective's.

    Args:
        objective: its name.
        expected: name of its aggregation.
        found: the sum whose gradient it is; "" if none.
        factor: the recorded gradient over the objective's, where that is one number.
        low, high: the least and the largest of the responses' factors; NaN where no
            response has a gradient.
        tokens: how many were compared.
        tolerance: relative error of a factor, up to which it is the same number.
    """

    objective: str
    expected: str
    found: str
    factor: float | None
    low: float
    high: float
    tokens: int
    tolerance: float


def normalizer(
    batch: RecordedBatch, objective: Objective | str, **hp: Any
) -> Normalizer:
    """Compare the recorded dL/dlp of a whole step with the objective's gradient.

    Args:
        batch: all ranks of a step, with the columns adv, old or now, and grad.
        objective: what ran, as `upref.replay.loss` takes it.
        **hp: hyperparameters of the objective.

    Returns:
        The Normalizer. It is false where the gradient is that of another sum of the
        same terms, or a simple multiple. True does not mean equal: where no sum fits,
        `found` is empty, and a finding of the replay is a note.

    Raises:
        InputError: a column or the file of a rank is missing.
    """
    expect_batch(batch, "the check of the normalizer")
    batch.require("grad", purpose="the check of the normalizer")
    step = terms_of(batch, objective_as_run(objective, hp), hp)
    assert batch.grad is not None
    tolerance = BFLOAT16_ROUNDING if _is_bfloat16(batch) else ROUNDING
    recorded = batch.grad[batch.mask.any(1)]
    return _Comparison(step, recorded, tolerance).judge()


def _is_bfloat16(batch: RecordedBatch) -> bool:
    """Return whether the trainer's log-probabilities are bfloat16 numbers; their
    gradients have the same type.
    """
    now = batch.now
    return now is not None and bool((now.float() == now.bfloat16().float()).all())


class _Comparison:
    """A recorded gradient [B, T] beside that of a step's terms.

    Attributes:
        step, recorded, tolerance: as given; the tolerance is a relative error.
        expected, reference: name of the first of the objective's own sums, by the
            framework's counts where they are known, and its gradient, [B, T].
        is_compared: the trained tokens that no rounding moves across a clip bound, [B,
            T].
    """

    def __init__(self, step: StepTerms, recorded: Tensor, tolerance: float) -> None:
        """Compute the objective's gradient."""
        self.step = step
        self.recorded = recorded
        self.tolerance = tolerance
        self.expected, first = next(step.by_counts())
        self.reference = first.gradient()
        self.is_compared = step.rollouts.mask & ~_is_near_bound(first, self.reference)

    def factors(self, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Divide the recorded gradient by another one, response by response.

        Args:
            reference: the other gradient, [B, T].

        Returns:
            The factor of each response by least squares, [B], NaN where the other
            gradient is 0; and which tokens are not that multiple of it, [B, T]: they
            are off by more than the tolerance, relative to the largest of their
            response.
        """
        right = torch.where(self.is_compared, reference, 0.0)
        recorded = torch.where(self.is_compared, self.recorded, 0.0)
        squares = (right * right).sum(1)
        has_factor = right.abs().amax(1) > LEAST_GRADIENT
        factor = torch.where(has_factor, (recorded * right).sum(1) / squares, torch.nan)
        known_factor = factor.nan_to_num()[:, None]
        largest = right.abs().amax(1, keepdim=True) * known_factor.abs()
        error = (recorded - known_factor * right).abs()
        is_off = self.is_compared & (error > self.tolerance * largest)
        return factor, is_off

    def judge(self) -> Normalizer:
        """Return the Normalizer: which sum of the terms has the recorded gradient, and
        the factors to the objective's own sum.
        """
        factor, is_off = self.factors(self.reference)
        low, high = _factor_range(factor)
        numbers = {
            "expected": self.expected,
            "objective": self.step.objective.name,
            "low": low,
            "high": high,
        }
        tokens = int(self.is_compared.sum())
        factor_of_all = self._common_factor(factor)
        found, findings = self._judge(
            factor,
            is_off,
            factor_of_all,
            numbers | {"tokens": int(is_off.sum()), "trained": tokens},
        )
        # of several sums that are the objective's own, the one that fits
        for name, counted in self.step.by_counts():
            if name == found:
                factor, _ = self.factors(counted.gradient())
                factor_of_all = self._common_factor(factor)
                low, high = _factor_range(factor)
        right = bool(found) and not findings
        return Normalizer(
            objective=self.step.objective.name,
            expected=found if right else self.expected,
            found=found,
            factor=factor_of_all,
            low=low,
            high=high,
            tokens=tokens,
            tolerance=self.tolerance,
            findings=findings,
        )

    def _judge(
        self,
        factor: Tensor,
        is_off: Tensor,
        factor_of_all: float | None,
        numbers: dict[str, Any],
    ) -> tuple[str, tuple[ReplayFinding, ...]]:
        """Judge the factors of the responses. The first of these that applies is the
        answer: no multiple, no gradient of the objective, none in the record, one of
        the objective's own sums, another sum, one factor, one factor in each part, else
        a factor of its own for each response.

        Args:
            factor: of each response, [B].
            is_off: tokens that are not that multiple, [B, T].
            factor_of_all: the factor that all responses share, if they do.
            numbers: of every finding.

        Returns:
            The name of the sum whose gradient it is, of several all, "" if none; and
            the findings: () where it is the objective's own, else one.
        """
        if is_off.sum() > LARGEST_SHARE_OFF * self.is_compared.sum():
            return "", (note("loss", "gradient_other", **numbers),)
        if factor.isnan().all():
            return "", (note("loss", "no_gradient"),)
        if not self.recorded[self.is_compared].any():
            return "", (
                note("loss", "gradient_zero", objective=self.step.objective.name),
            )
        for name, counted in self.step.by_counts():
            if self._is_gradient(counted.gradient()):
                return name, ()
        others = [
            name for name, gradient in self._other_sums() if self._is_gradient(gradient)
        ]
        if others:
            name = join_names(others)
            return name, (
                ReplayFinding(
                    "loss", "failure", "gradient_other_sum", numbers | {"found": name}
                ),
            )
        if factor_of_all is not None:
            return "", (self._multiple_finding(factor_of_all, numbers),)
        # The ranks first: what is one number in a rank is one in each of its
        # micro-batches too.
        for words, column in (
            ("rank", self.step.rank),
            ("micro-batch", self.step.micro),
        ):
            if column is not None and self._is_constant_in_parts(factor, column):
                return "", (note("loss", "gradient_parts", part=words, **numbers),)
        return "", (note("loss", "gradient_rows", **numbers),)

    def _is_gradient(self, gradient: Tensor) -> bool:
        """Return whether the factor of each response against this gradient [B, T] is 1,
        to the tolerance. Tokens within a response are not compared again.
        """
        factor, _ = self.factors(gradient)
        known = factor[~factor.isnan()]
        return bool(len(known) and (known - 1).abs().max() <= self.tolerance)

    def _common_factor(self, factor: Tensor) -> float | None:
        """Return the mean of these factors [B], without NaN, where all are equal to the
        tolerance; None where they differ, are 0, or are all NaN.
        """
        known = factor[~factor.isnan()]
        if not len(known):
            return None
        mean = float(known.mean())
        are_equal = mean != 0 and bool(
            (known - mean).abs().max() <= self.tolerance * abs(mean)
        )
        return mean if are_equal else None

    def _is_constant_in_parts(self, factor: Tensor, column: Tensor) -> bool:
        """Return whether the factors are one number within each part; NaN fits any.

        Args:
            factor: of each response, [B].
            column: the number of each response's part, [B].
        """
        parts = [factor[column == n] for n in column.unique()]
        return all(
            part.isnan().all() or self._common_factor(part) is not None
            for part in parts
        )

    def _other_sums(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the gradient [B, T] of other sums of the same terms: with
        other counts, under other aggregations, and the mean and the sum over
        micro-batches or ranks.
        """
        step = self.step
        for name, counted in step.by_other_counts():
            yield name, counted.gradient()
        own = step.by_recorded_counts()
        others = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
        if step.rollouts.group is not None:  # else it is the token mean
            others.append("group-token-mean")
        if step.objective.agg != "seq-mean":
            for agg in others:
                if agg != step.objective.agg:
                    yield agg, own.under(agg).gradient()
        for words, column, parts in own.parts():
            total = torch.zeros_like(self.reference)
            for value, part in zip(column.unique(), parts, strict=True):
                total[column == value] = part.gradient()
            yield (
                f"mean over {words} of their own {step.objective.agg}",
                total / len(parts),
            )
            yield f"sum over {words} of their own {step.objective.agg}", total

    def _multiple_finding(
        self, factor: float, numbers: dict[str, Any]
    ) -> ReplayFinding:
        """Return the finding on a gradient that is this multiple of the objective's: a
        failure for -1 and for USUAL_MULTIPLES, else a note.
        """
        numbers = numbers | {"factor": factor}
        if abs(factor + 1) <= self.tolerance:
            return ReplayFinding("loss", "failure", "gradient_sign", numbers)
        if factor < 0:
            return note("loss", "gradient_sign", **numbers)
        if any(abs(factor / f - 1) <= self.tolerance for f in USUAL_MULTIPLES):
            return ReplayFinding("loss", "failure", "gradient_multiple", numbers)
        if self.step.objective.agg == "group-token-mean":
            # each prompt has a divisor of its own
            return note("loss", "gradient_coefficient", **numbers)
        count, _ = next(self.step.by_counts())[1].count
        return note(
            "loss", "gradient_scaled", count=count, divisor=count / factor, **numbers
        )


def _is_near_bound(step: StepTerms, reference: Tensor) -> Tensor:
    """Return which tokens rounding may move across a clip bound, [B, T]: those whose
    gradient becomes 0, or other than 0, where log π_θ moves by BOUND_ROUNDING (1 + |log
    r|) either way.

    Args:
        step: the objective's terms.
        reference: their gradient, [B, T].
    """
    logp = step.rollouts.logp
    logp_old = step.rollouts.logp_old
    band = BOUND_ROUNDING * (1 + (logp - logp_old).abs())
    has_gradient = reference != 0
    is_near = torch.zeros_like(has_gradient)
    for shifted_logp in (logp + band, logp - band):
        is_near |= (step.gradient(shifted_logp) != 0) != has_gradient
    return is_near


def _factor_range(factor: Tensor) -> tuple[float, float]:
    """Return the least and the largest factor [B] that is not NaN; NaN where all are."""
    known = factor[~factor.isnan()]
    if not len(known):
        return math.nan, math.nan
    return float(known.min()), float(known.max())
