# SPDX-License-Identifier: Apache-2.0
"""Known faults of sampler corrections: the factor of ρ = π_old/μ that a loss multiplies
by, read off the loss.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.ops import mean_t, sum_t
from upref.rollouts import Rollouts
from upref.verify.faults import hyperparameter_id
from upref.verify.faults.batch_reading import bisected
from upref.verify.faults.losses import LossFault, fault
from upref.verify.measure import LossCase, kl_slope, unit_weights

LOG_RHO = np.linspace(-14, 14, 57)
BOUNDS = ("is_min", "is_max")  # the hyperparameters of a correction
SIGNS = {1.0: "A > 0", -1.0: "A < 0"}
# of log ρ of each token, and the mask
LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of each token": lambda x, m: x,
    "of the response, multiplied over its tokens": lambda x, m: sum_t(x, m)[
        :, None
    ].expand_as(x),
    "of the response, the geometric mean over its tokens": lambda x, m: mean_t(x, m)[
        :, None
    ].expand_as(x),
}


@dataclass(frozen=True)
class Correction:
    """A factor of ρ: ρ or 1 inside of bounds, and beyond each bound the value there, or
    0.

    Attributes:
        inside: whether the factor is ρ there; else it is 1.
        low: below this ρ the factor is another; 0 where there is no bound.
        high: above this ρ the factor is another; inf where there is no bound.
        cut_low: whether the factor is 0 below `low`; else it stays what it is at `low`.
        cut_high: the same above `high`.
    """

    inside: bool
    low: float
    high: float
    cut_low: bool
    cut_high: bool

    def __call__(self, log_rho: Tensor) -> Tensor:
        rho = log_rho.exp()
        w = rho.clamp(self.low, self.high) if self.inside else torch.ones_like(rho)
        gone = (self.cut_low & (rho < self.low)) | (self.cut_high & (rho > self.high))
        return w.masked_fill(gone, 0)

    def __str__(self) -> str:
        out = ["ρ" if self.inside else "1"]
        if self.low > 0:
            start = "0 below" if self.cut_low else "at least"
            out.append(f"{start} {self.low:.6g}")
        if self.high < math.inf:
            start = "0 above" if self.cut_high else "at most"
            out.append(f"{start} {self.high:.6g}")
        return ", ".join(out)


def retuned(case: LossCase) -> Iterator[LossFault]:
    """The objective's own correction with the bounds that the loss shows.

    Args:
        case: the loss and its objective.

    Yields:
        One fault, or none.
    """
    seen = _of_both_signs(case)
    if not seen or seen[1.0] != seen[-1.0]:
        return
    numbers = dict(zip(BOUNDS, (seen[1.0].low, seen[1.0].high), strict=True))
    numbers_of_case = {
        k: v for k, v in numbers.items() if k in case.hp and 0 < v < math.inf
    }
    if changed := {
        k: v for k, v in numbers_of_case.items() if abs(v - case.hp[k]) > 1e-6
    }:
        words = "; ".join(
            f"{k} is {v:.6g}, not {case.hp[k]:.6g}" for k, v in changed.items()
        )
        yield fault(words, "hyperparameter", id=hyperparameter_id(*changed), hp=changed)


def corrected(case: LossCase) -> Iterator[LossFault]:
    """The correction that the loss shows on responses of one token, of each level.

    Args:
        case: the loss and its objective.

    Yields:
        A fault for each level, token or response; none where the loss shows no
            correction.
    """
    if not (seen := _of_both_signs(case)):
        return
    good, bad = seen.values()
    if good == bad:
        said = str(good)
    else:
        said = "; ".join(
            f"{words_of_sign} where {SIGNS[A]}" for A, words_of_sign in seen.items()
        )
    for level, of in LEVELS.items():
        words = f"the sampler's correction is another function of ρ = π_old/μ {level}: {said}"
        yield fault(
            words,
            "ratio",
            id="other-sampler-correction",
            weigh=partial(_weights, case, seen, of),
        )


def _of_both_signs(case: LossCase) -> dict[float, Correction]:
    """By the sign of A; empty if one of them has no such function."""
    if case.objective.sampler is None:
        return {}
    seen: dict[float, Correction] = {}
    with contextlib.suppress(InputError):  # it refuses such a batch
        for A in SIGNS:
            if (found_factor := _seen(case, A)) is None:
                return {}
            seen[A] = found_factor
    return seen if len(seen) == len(SIGNS) else {}


def _weights(
    case: LossCase,
    seen: dict[float, Correction],
    of: Callable[[Tensor, Tensor], Tensor],
    batch: Rollouts,
) -> Tensor:
    """The objective's weights under another correction of its sampler, its KL term
    beside them.
    """
    base = unit_weights(
        replace(case.objective, sampler=None), batch, _uncorrected(case)
    )
    assert batch.logp_sampler is not None
    x = of(torch.where(batch.mask, batch.logp_old - batch.logp_sampler, 0), batch.mask)
    w = base * torch.where(batch.adv.expand_as(x) > 0, seen[1.0](x), seen[-1.0](x))
    return w - (
        case.hp["beta"] * kl_slope(case.objective.kl, batch)
        if case.hp.get("beta")
        else 0
    )


def _seen(case: LossCase, A: float) -> Correction | None:
    """Read off responses of one token at r = 1; None where it is no such function."""
    factor = partial(_factor, case, A)
    y = factor(LOG_RHO)
    rho = np.exp(LOG_RHO)
    at_1 = len(LOG_RHO) // 2
    inside = any(np.isclose(y[k], rho[k], 1e-6) for k in (at_1 + 1, at_1 - 1))
    same = np.isclose(y, rho if inside else 1.0, 1e-6)
    if not same.any() or not np.isfinite(y).all():
        return None
    first = int(same.argmax())
    last = len(same) - 1 - int(same[::-1].argmax())
    low, cut_low = _end(factor, y, first, first - 1) or (0.0, False)
    high, cut_high = _end(factor, y, last, last + 1) or (math.inf, False)
    return Correction(inside, low, high, cut_low, cut_high)


def _end(
    factor: Callable[[np.ndarray], np.ndarray], y: np.ndarray, n: int, beside: int
) -> tuple[float, bool] | None:
    """The bound between these two places of LOG_RHO, and whether the factor is 0 beyond
    it; None at the last place.
    """
    if not 0 <= beside < len(y):
        return None
    if y[beside] != 0:
        return _round(float(y[beside])), False

    def is_cut(log_rho: float) -> bool:
        return bool(factor(np.array([log_rho]))[0] == 0)

    return _round(math.exp(bisected(is_cut, LOG_RHO[n], LOG_RHO[beside]))), True


def _factor(case: LossCase, A: float, log_rho: np.ndarray) -> np.ndarray:
    """The weight of single tokens of ratio 1, over the objective's without a
    correction.
    """
    ones = torch.ones(len(log_rho), 1, dtype=torch.float64)
    old = -15 * ones
    mu = old - torch.as_tensor(log_rho)[:, None]
    batch = Rollouts(
        old, old, A * ones, ones.bool(), logp_ref=old, entropy=ones, logp_sampler=mu
    )
    batch = case.loss.visible_batch(batch)
    base = unit_weights(
        replace(case.objective, sampler=None), batch, _uncorrected(case)
    )
    return (case.weights(batch) / base)[:, 0].numpy()


def _uncorrected(case: LossCase) -> dict[str, Any]:
    """The hyperparameters of the objective without those of its correction and of its
    KL term.
    """
    return {
        k: v
        for k, v in case.plain_hp.items()
        if k in case.objective.hyperparameters and k not in BOUNDS
    }


def _round(x: float) -> float:
    """5 for what a bisection, or a product, left of it."""
    short = float(f"{x:.6g}")
    return short if abs(short - x) <= 1e-9 * x else x
