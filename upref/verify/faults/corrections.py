# SPDX-License-Identifier: Apache-2.0
"""Known faults of sampler corrections. A correction multiplies a term by a function of
ρ = π_old/μ, which is measured on the loss.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.aggregation import KEPT_MEAN
from upref.errors import InputError
from upref.ops import mean_t, sum_t
from upref.rollouts import Rollouts
from upref.verify.faults import hyperparameter_id
from upref.verify.faults.batch_reading import bisected
from upref.verify.faults.losses import LossFault, fault
from upref.verify.kl_terms import kl_slope
from upref.verify.measure import LossCase, unit_weights

LOG_RHO = np.linspace(-14, 14, 57)  # at which the function is measured
BOUNDS = ("is_min", "is_max")  # the hyperparameters of a correction
SIGNS = {1.0: "A > 0", -1.0: "A < 0"}
# the words for a level -> log ρ at that level, from log ρ of each token and the mask
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
    """A function of ρ. Between two bounds it is ρ or 1. Beyond each bound it is its value
    at the bound, or 0.

    Attributes:
        is_ratio: whether it is ρ between the bounds; if not, it is 1.
        low: the lower bound; 0 where there is none.
        high: the upper bound; inf where there is none.
        cut_low: whether it is 0 below the lower bound; if not, it is its value at it.
        cut_high: the same above the upper bound.
    """

    is_ratio: bool
    low: float
    high: float
    cut_low: bool
    cut_high: bool

    def __call__(self, log_rho: Tensor) -> Tensor:
        """Return the factor at each log ρ."""
        rho = log_rho.exp()
        if self.is_ratio:
            factor = rho.clamp(self.low, self.high)
        else:
            factor = torch.ones_like(rho)
        is_cut = (self.cut_low & (rho < self.low)) | (self.cut_high & (rho > self.high))
        return factor.masked_fill(is_cut, 0)

    def __str__(self) -> str:
        """Return the function in words, as in "ρ, at most 2"."""
        parts = ["ρ" if self.is_ratio else "1"]
        if self.low > 0:
            start = "0 below" if self.cut_low else "at least"
            parts.append(f"{start} {self.low:.6g}")
        if self.high < math.inf:
            start = "0 above" if self.cut_high else "at most"
            parts.append(f"{start} {self.high:.6g}")
        return ", ".join(parts)


def retuned(case: LossCase) -> Iterator[LossFault]:
    """Yield the fault that the loss has the objective's correction with other bounds.
    The bounds are measured.

    Args:
        case: the loss and its objective.

    Yields:
        One fault, or none.
    """
    measured = _measured_by_sign(case)
    if not measured or measured[1.0] != measured[-1.0]:
        return
    bounds = dict(zip(BOUNDS, (measured[1.0].low, measured[1.0].high), strict=True))
    changed = {
        name: bound
        for name, bound in bounds.items()
        if name in case.hp
        and 0 < bound < math.inf
        and abs(bound - case.hp[name]) > 1e-6
    }
    if changed:
        words = "; ".join(
            f"{k} is {v:.6g}, not {case.hp[k]:.6g}" for k, v in changed.items()
        )
        if all(abs(v - math.exp(case.hp[k])) < 1e-6 for k, v in changed.items()):
            words += ": the bound is on log ρ, not on ρ"

        def count_ratio(batch: Rollouts) -> Tensor | float:
            """Return the factor by which the bounds change a kept-mean's divisor."""
            kept = case.objective.kept(batch, **case.hp_without_kl | changed)
            return divisor_ratio(case, batch, kept)

        yield fault(
            words,
            "hyperparameter",
            id=hyperparameter_id(*changed),
            hp=changed,
            scale=count_ratio,
            whole=case.objective.agg == KEPT_MEAN,
        )


def _old_over_updated(batch: Rollouts) -> Tensor:
    """Return the log μ that makes π_θ/π_old of the sampler's ratio."""
    return 2 * batch.logp_old - batch.logp


def _sampler_over_updated(batch: Rollouts) -> Tensor:
    """Return the log μ that makes π_θ/μ of the sampler's ratio."""
    assert batch.logp_sampler is not None
    return batch.logp_old + batch.logp_sampler - batch.logp


# ratios that a correction may bound in the place of π_old/μ, and the log μ of each
OTHER_BANDS: tuple[tuple[str, Callable[[Rollouts], Tensor]], ...] = (
    ("π_θ/π_old", _old_over_updated),
    ("π_θ/μ", _sampler_over_updated),
)
NO_BAND = {"is_min": 0.0, "is_max": math.inf}


def misread_bands(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that the bounds of a correction that rejects act on another ratio
    than π_old/μ; what is kept has the weight of the correction, or the weight 1.

    Args:
        case: the loss and its objective.
    """
    objective = case.objective
    if objective.sampler is None or not objective.rejects:
        return
    own_bounds = {name: case.hp[name] for name in NO_BAND if name in case.hp}
    if not own_bounds:
        return
    without_band = {name: NO_BAND[name] for name in own_bounds}
    without_sampler = replace(objective, sampler=None)

    def weights(
        batch: Rollouts, log_mu: Callable[[Rollouts], Tensor], is_weighed: bool
    ) -> Tensor:
        """Return the weights of the tokens whose other ratio is within the bounds."""
        misread = batch.but(logp_sampler=log_mu(batch))
        factors = objective.factors(misread, **case.hp_without_kl)
        assert factors is not None
        kept = (factors != 0) & batch.mask
        if is_weighed:
            w = unit_weights(objective, batch, case.hp_without_kl | without_band)
        else:
            w = unit_weights(without_sampler, batch, _uncorrected(case))
        w = w * kept * divisor_ratio(case, batch, kept)
        if case.hp.get("beta"):
            w = w - case.hp["beta"] * kl_slope(objective.kl, batch)
        return w

    named = " and ".join(own_bounds)
    act = "act" if len(own_bounds) > 1 else "acts"
    for (ratio, log_mu), is_weighed in product(OTHER_BANDS, (True, False)):
        words = (
            f"{named} {act} on {ratio}: what is rejected depends on that ratio, not on "
            "ρ = π_old/μ"
        )
        if not is_weighed:
            words += "; and what is kept is not weighed by ρ"
        yield fault(
            words,
            "ratio",
            id="sampler-bounds-on-other-ratio",
            weigh=partial(weights, log_mu=log_mu, is_weighed=is_weighed),
            whole=objective.agg == KEPT_MEAN,
        )


def corrected(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that the sampler's correction is another function of ρ. The
    function is measured on responses of one token, where every level has the same ρ.

    Args:
        case: the loss and its objective.

    Yields:
        A fault for each of LEVELS; none where no correction is measured.
    """
    measured = _measured_by_sign(case)
    if not measured:
        return
    if measured[1.0] == measured[-1.0]:
        function = str(measured[1.0])
    else:
        function = "; ".join(
            f"{correction} where {SIGNS[A]}" for A, correction in measured.items()
        )
    for level, log_rho_of in LEVELS.items():
        yield fault(
            f"the sampler's correction is another function of ρ = π_old/μ {level}: {function}",
            "ratio",
            id="other-sampler-correction",
            weigh=partial(_weights, case, measured, log_rho_of),
            whole=case.objective.agg == KEPT_MEAN,
        )
    words = (
        "a whole response is dropped as soon as the sampler's correction is 0 at one of "
        "its tokens; that of a token with the ratio ρ = π_old/μ was measured as"
    )
    yield fault(
        f"{words}: {function}",
        "ratio",
        id="response-dropped-by-one-token",
        weigh=partial(_weights, case, measured, LEVELS["of each token"], drops=True),
        whole=case.objective.agg == KEPT_MEAN,
    )


def divisor_ratio(case: LossCase, batch: Rollouts, kept: Tensor) -> Tensor | float:
    """Return the factor by which other kept tokens change the weights of a mean over kept
    tokens, [B, 1]; 1 for another aggregation.

    Args:
        case: the loss and its objective.
        batch: the batch.
        kept: other tokens that are kept, [B, T].
    """
    if case.objective.agg != KEPT_MEAN:
        return 1.0
    count = (kept & batch.mask).sum().clamp(min=1).double()
    return 1 / count / case.factors(batch)


def _measured_by_sign(case: LossCase) -> dict[float, Correction]:
    """Return the measured correction by the sign of A; {} if none is measured for one of
    the signs.
    """
    if case.objective.sampler is None:
        return {}
    measured: dict[float, Correction] = {}
    for A in SIGNS:
        try:
            correction = _measured(case, A)
        except InputError:  # the loss refuses such a batch
            return {}
        if correction is None:
            return {}
        measured[A] = correction
    return measured


def _weights(
    case: LossCase,
    corrections: dict[float, Correction],
    log_rho_of: Callable[[Tensor, Tensor], Tensor],
    batch: Rollouts,
    drops: bool = False,
) -> Tensor:
    """Return the objective's weights with other corrections of its sampler.

    Args:
        case: the loss and its objective.
        corrections: the correction of each sign of A.
        log_rho_of: a function of LEVELS; its result is what the corrections are given.
        batch: the batch.
        drops: whether one token whose correction is 0 drops its response.
    """
    without_sampler = replace(case.objective, sampler=None)
    uncorrected = unit_weights(without_sampler, batch, _uncorrected(case))
    assert batch.logp_sampler is not None
    log_rho = torch.where(batch.mask, batch.logp_old - batch.logp_sampler, 0)
    log_rho = log_rho_of(log_rho, batch.mask)
    is_positive = batch.adv.expand_as(log_rho) > 0
    factors = torch.where(
        is_positive, corrections[1.0](log_rho), corrections[-1.0](log_rho)
    )
    kept = (factors != 0) & batch.mask
    if drops:
        kept = kept & (kept | ~batch.mask).all(1, keepdim=True)
    w = uncorrected * factors * kept * divisor_ratio(case, batch, kept)
    if case.hp.get("beta"):
        w = w - case.hp["beta"] * kl_slope(case.objective.kl, batch)
    return w


def _measured(case: LossCase, A: float) -> Correction | None:
    """Measure the correction on responses of one token at r = 1; return None if the
    factor is not a Correction.
    """
    factor = partial(_factor, case, A)
    factors = factor(LOG_RHO)
    rho = np.exp(LOG_RHO)
    at_1 = len(LOG_RHO) // 2
    # at ρ = 1 both forms are 1, and a bound may lie on one side of it: ask both sides
    is_ratio = any(np.isclose(factors[n], rho[n], 1e-6) for n in (at_1 + 1, at_1 - 1))
    is_between_bounds = np.isclose(factors, rho if is_ratio else 1.0, 1e-6)
    if not is_between_bounds.any() or not np.isfinite(factors).all():
        return None
    first = int(is_between_bounds.argmax())
    last = len(is_between_bounds) - 1 - int(is_between_bounds[::-1].argmax())
    low, cut_low = _bound(factor, factors, first, first - 1) or (0.0, False)
    high, cut_high = _bound(factor, factors, last, last + 1) or (math.inf, False)
    return Correction(is_ratio, low, high, cut_low, cut_high)


def _bound(
    factor: Callable[[np.ndarray], np.ndarray],
    factors: np.ndarray,
    inside: int,
    beyond: int,
) -> tuple[float, bool] | None:
    """Return the bound between two places of LOG_RHO, and whether the factor is 0
    beyond it; None if there is no place beyond.

    Args:
        factor: the factor, as a function of log ρ.
        factors: the factor at LOG_RHO.
        inside: the last place inside of the bound.
        beyond: the place beside it, beyond the bound.
    """
    if not 0 <= beyond < len(factors):
        return None
    if factors[beyond] != 0:
        return _round(float(factors[beyond])), False

    def is_cut(log_rho: float) -> bool:
        """Return whether the factor is 0."""
        return bool(factor(np.array([log_rho]))[0] == 0)

    log_bound = bisected(is_cut, LOG_RHO[inside], LOG_RHO[beyond])
    return _round(math.exp(log_bound)), True


def _factor(case: LossCase, A: float, log_rho: np.ndarray) -> np.ndarray:
    """Return the loss's weight of a single token at r = 1, divided by the objective's
    weight without a correction, for each log ρ.
    """
    ones = torch.ones(len(log_rho), 1, dtype=torch.float64)
    old = -15 * ones
    mu = old - torch.as_tensor(log_rho)[:, None]
    batch = Rollouts(
        old, old, A * ones, ones.bool(), logp_ref=old, entropy=ones, logp_sampler=mu
    )
    batch = case.loss.visible_batch(batch)
    without_sampler = replace(case.objective, sampler=None)
    uncorrected = unit_weights(without_sampler, batch, _uncorrected(case))
    factors = case.weights(batch) / uncorrected
    if (
        case.objective.agg == KEPT_MEAN
    ):  # whose divisor is the loss's own, not the objective's
        factors = factors / divisor_ratio(case, batch, factors != 0)
    return factors[:, 0].numpy()


def _uncorrected(case: LossCase) -> dict[str, Any]:
    """Return the hyperparameters of the objective without those of its correction and
    of its KL term.
    """
    return {
        k: v
        for k, v in case.hp_without_kl.items()
        if k in case.objective.hyperparameters and k not in BOUNDS
    }


def _round(x: float) -> float:
    """Return x in six digits if the two differ by no more than the rounding of a
    bisection or a product; else x itself.
    """
    short = float(f"{x:.6g}")
    return short if abs(short - x) <= 1e-9 * x else x
