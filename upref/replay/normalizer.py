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
from upref.replay.terms import FACTORS, StepTerms, as_run, or_else, terms_of

ROUNDING = 2e-4  # of a token's gradient, computed in float32
HALF = 3e-2  # the same in bfloat16, whose unit roundoff is 4e-3
# nats by which float32 may move log r beside a clip bound, in units of 1 + |log r|
BAND = 1e-5
# a smaller gradient of a token is 0 in the trainer's float32
LEAST = torch.finfo(torch.float32).tiny
OFF = 1e-3  # of the tokens may be off: at a clip bound that the band does not reach


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
        same terms, or a simple multiple.

    Raises:
        InputError: a column or the file of a rank is missing.
    """
    expect_batch(batch, "the check of the normalizer")
    batch.require("grad", purpose="the check of the normalizer")
    step = terms_of(batch, as_run(objective, hp), hp)
    assert batch.grad is not None
    found = _Comparison(
        step, batch.grad[batch.mask.any(1)], HALF if _half(batch) else ROUNDING
    )
    return found.answer()


def _half(batch: RecordedBatch) -> bool:
    """Whether the trainer's log-probabilities are bfloat16 numbers; their gradients
    have the same type.
    """
    now = batch.now
    return now is not None and bool((now.float() == now.bfloat16().float()).all())


class _Comparison:
    """A recorded gradient [B, T] beside that of a step's terms."""

    def __init__(self, step: StepTerms, recorded: Tensor, tolerance: float) -> None:
        self.step = step
        self.recorded = recorded
        self.tolerance = tolerance
        self.expected, first = next(step.by_counts())
        self.reference = first.gradient()
        self.kept = step.b.mask & ~_at_a_bound(first, self.reference)

    def factors(self, reference: Tensor) -> tuple[Tensor, Tensor]:
        """(factor of each response [B], NaN where none is told; tokens that are not
        that multiple [B, T]).
        """
        r = torch.where(self.kept, reference, 0.0)
        g = torch.where(self.kept, self.recorded, 0.0)
        squares = (r * r).sum(1)
        told = r.abs().amax(1) > LEAST
        factor = torch.where(told, (g * r).sum(1) / squares, torch.nan)
        size = r.abs().amax(1, keepdim=True) * factor.abs().nan_to_num()[:, None]
        off = self.kept & (
            (g - factor.nan_to_num()[:, None] * r).abs() > self.tolerance * size
        )
        return factor, off

    def answer(self) -> Normalizer:
        """What the factors say."""
        factor, off = self.factors(self.reference)
        low, high = _range(factor)
        numbers = {
            "expected": self.expected,
            "objective": self.step.o.name,
            "low": low,
            "high": high,
        }
        tokens = int(self.kept.sum())
        one = self._one_number(factor)
        found, findings = self._judge(
            factor, off, one, numbers | {"tokens": int(off.sum()), "trained": tokens}
        )
        for name, counted in self.step.by_counts():
            if name == found:
                factor, _ = self.factors(counted.gradient())
                one = self._one_number(factor)
                low, high = _range(factor)
        right = bool(found) and not findings
        return Normalizer(
            objective=self.step.o.name,
            expected=found if right else self.expected,
            found=found,
            factor=one,
            low=low,
            high=high,
            tokens=tokens,
            tolerance=self.tolerance,
            findings=findings,
        )

    def _judge(
        self, factor: Tensor, off: Tensor, one: float | None, numbers: dict[str, Any]
    ) -> tuple[str, tuple[ReplayFinding, ...]]:
        if off.sum() > OFF * self.kept.sum():
            return "", (note("loss", "gradient_other", **numbers),)
        if factor.isnan().all():
            return "", (note("loss", "no_gradient"),)
        if not self.recorded[self.kept].any():
            return "", (note("loss", "gradient_zero", objective=self.step.o.name),)
        for name, counted in self.step.by_counts():
            if self._is(counted.gradient()):
                return name, ()
        others = [name for name, gradient in self._others() if self._is(gradient)]
        if others:
            name = or_else(others)
            return name, (
                ReplayFinding(
                    "loss", "failure", "gradient_other_sum", numbers | {"found": name}
                ),
            )
        if one is not None:
            return "", (self._multiple(one, numbers),)
        # The ranks first: what is one number in a rank is one in each of its
        # micro-batches too.
        for words, column in (
            ("rank", self.step.rank),
            ("micro-batch", self.step.micro),
        ):
            if column is not None and self._one_in_each(factor, column):
                return "", (note("loss", "gradient_parts", part=words, **numbers),)
        return "", (note("loss", "gradient_rows", **numbers),)

    def _is(self, gradient: Tensor) -> bool:
        """Whether the recorded gradient is this one."""
        factor, _ = self.factors(gradient)
        told = factor[~factor.isnan()]
        return bool(len(told) and (told - 1).abs().max() <= self.tolerance)

    def _one_number(self, factor: Tensor) -> float | None:
        """The number that all these factors are, or None."""
        told = factor[~factor.isnan()]
        if not len(told):
            return None
        mean = float(told.mean())
        same = mean != 0 and bool(
            (told - mean).abs().max() <= self.tolerance * abs(mean)
        )
        return mean if same else None

    def _one_in_each(self, factor: Tensor, column: Tensor) -> bool:
        """Whether the factors are one number in each part."""
        parts = [factor[column == n] for n in column.unique()]
        return all(
            part.isnan().all() or self._one_number(part) is not None for part in parts
        )

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) of other sums of the same terms."""
        step = self.step
        for name, counted in step.by_other_counts():
            yield name, counted.gradient()
        own = step.own()
        others = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
        if step.b.group is not None:  # else it is the token mean
            others.append("group-token-mean")
        if step.o.agg != "seq-mean":
            for agg in others:
                if agg != step.o.agg:
                    yield agg, own.under(agg).gradient()
        for words, column, parts in own.parts():
            total = torch.zeros_like(self.reference)
            for value, part in zip(column.unique(), parts, strict=True):
                total[column == value] = part.gradient()
            yield f"mean over {words} of their own {step.o.agg}", total / len(parts)
            yield f"sum over {words} of their own {step.o.agg}", total

    def _multiple(self, factor: float, numbers: dict[str, Any]) -> ReplayFinding:
        numbers = numbers | {"factor": factor}
        if factor < 0:
            return note("loss", "gradient_sign", **numbers)
        if any(abs(factor / f - 1) <= self.tolerance for f in FACTORS):
            return ReplayFinding("loss", "failure", "gradient_multiple", numbers)
        if self.step.o.agg == "group-token-mean":  # each prompt has its own divisor
            return note("loss", "gradient_coefficient", **numbers)
        count, _ = next(self.step.by_counts())[1].count
        return note(
            "loss", "gradient_scaled", count=count, divisor=count / factor, **numbers
        )


def _at_a_bound(step: StepTerms, reference: Tensor) -> Tensor:
    """Tokens [B, T] that rounding of the log-probabilities may put on either side of a
    clip bound.
    """
    lp = step.b.logp
    old = step.b.logp_old
    band = BAND * (1 + (lp - old).abs())
    alive = reference != 0
    out = torch.zeros_like(alive)
    for moved in (lp + band, lp - band):
        out |= (step.gradient(moved) != 0) != alive
    return out


def _range(factor: Tensor) -> tuple[float, float]:
    told = factor[~factor.isnan()]
    return (float(told.min()), float(told.max())) if len(told) else (math.nan, math.nan)
