# SPDX-License-Identifier: Apache-2.0
"""What the weights found have in common with those expected, where no known fault
reproduces them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from upref.rollouts import Rollouts
from upref.verify.finding import NO_CAUSE, Cause
from upref.verify.report import NOTHING_FITS, UNKNOWN


@dataclass(frozen=True)
class MeasuredWeights:
    """The weights of a batch.

    Attributes:
        b: the batch.
        found: the weights found, [B, T].
        expected: the weights expected, [B, T].
        r: the ratios on which the objective acts, [B, T].
        symbol: of these ratios: r, or s or S of a response.
        use: the tokens that are compared, [B, T].
    """

    b: Rollouts
    found: Tensor
    expected: Tensor
    r: Tensor
    symbol: str
    use: Tensor

    @property
    def factors(self) -> dict[str, Tensor]:
        """Factors that every weight may have, [B, T] each, by the words that follow a
        number in a report, such as " / r".
        """
        batch = self.b
        r = self.r
        n = batch.mask.sum(-1, keepdim=True).expand_as(r).to(r.dtype)
        return {
            "": torch.ones_like(r),
            f" {self.symbol}": r,
            f" / {self.symbol}": 1 / r,
            " π_θ": batch.logp.exp(),
            " π_old": batch.logp_old.exp(),
            " |o|": n,
            " / |o|": 1 / n,
            " |A|": batch.adv.abs().expand_as(r),
        }


def pattern(
    tested: MeasuredWeights, shown: MeasuredWeights, tol: float, by_token: bool
) -> Cause:
    """Return the relation of found and expected weights that holds on all tokens of two
    batches; if there is none, the words that no known cause fits; no cause where a weight
    found is not finite.

    The first relation that holds is returned, of: no weight at all; one factor of all
    weights; lost gradients beside right weights; one factor for each response; one for
    each column; one number that is added.

    Args:
        tested: the weights of the batch that was compared.
        shown: the weights of the batch that the report shows.
        tol: the relative error that is allowed.
        by_token: whether the tokens of a response may have different weights.
    """
    tol = max(10 * tol, 1e-7)
    found = tested.found
    expected = tested.expected
    use = tested.use
    if not (found[use].isfinite().all() and shown.found[shown.use].isfinite().all()):
        return NO_CAUSE
    x = found[use]
    y = expected[use]
    is_live = y.abs() > 1e-9  # the objective has a weight
    if not x.any():
        return _of("no token of the tested batch has a weight; those of others have")
    if (x[~is_live].abs() <= tol).all() and is_live.any():
        for name, factor in tested.factors.items():
            multiples = (x / (y * factor[use]))[is_live]
            multiple = multiples.mean()
            if _is_constant(multiples, tol) and _has_factor(
                shown, name, float(multiple), tol
            ):
                times = f"{multiple:.5g}{name}"
                if name and abs(multiple - 1) < 1e-6:
                    times = name.strip()
                return _of(
                    f"every weight of the tested batch is {times} times what it should be"
                )
        is_right = (x - y).abs() <= tol * y.abs().clamp(min=0.1)
        is_zero = x == 0
        lost = int((is_zero & ~is_right).sum())
        if lost and (is_right | is_zero).all() and _lacks_gradients(shown, tol):
            verb = "have" if lost > 1 else "has"
            return _of(
                f"{lost} of {is_right.numel()} tokens {verb} no gradient and should "
                "have one; the others are right"
            )
        multiples = torch.where(
            use & (expected.abs() > 1e-9), found / expected, torch.nan
        )
        if by_token and all(_is_constant(row[~row.isnan()], tol) for row in multiples):
            return _of(ONE_FACTOR + _near_1(multiples))
        factors = _factor_of_each_column(multiples, tol) if by_token else {}
        if factors and _has_factors_of_columns(shown, factors, tol):
            named = [f"{x:.5g} in column {t}" for t, x in factors.items()]
            first = named[:COLUMNS_NAMED]
            if len(named) > COLUMNS_NAMED:
                first.append("...")
            return _of(
                "within each column of the tested batch the weights are right up to one "
                f"factor: {', '.join(first)}"
            )
    extra = x - y
    added = float(extra.mean())
    if _is_constant(extra, 1e-6) and abs(added) > 1e-9 and _has_term(shown, added):
        return _of(
            f"{added:+.4g} is added to every weight of the tested batch, whatever A"
        )
    without_advantage = (tested.b.adv.expand_as(found) == 0)[use]
    if without_advantage.any():
        largest = extra[without_advantage].abs().max()
        if largest > tol:
            return replace(
                NOTHING_FITS,
                words=f"{UNKNOWN}; where A = 0 the weight is off by up to {largest:.4g}",
            )
    return NOTHING_FITS


COLUMNS_NAMED = 3
ONE_FACTOR = (
    "within each response of the tested batch the weights are right up to one factor"
)
LARGEST_ROUNDING = 2**-8  # relative, of a number in bfloat16


def _near_1(multiples: Tensor) -> str:
    """Return the words for factors that differ from 1 by no more than rounding; "" where
    one differs by more.

    Args:
        multiples: the factor of each weight, [B, T]; NaN where none is compared.
    """
    factors = multiples[~multiples.isnan()]
    if not len(factors) or (factors - 1).abs().max() > LARGEST_ROUNDING:
        return ""
    return (
        f", from {factors.min():.6g} to {factors.max():.6g}: an error as small as that of "
        "rounding to bfloat16, as of a length or of one over it"
    )


def _factor_of_each_column(multiples: Tensor, tol: float) -> dict[int, float]:
    """Return the factor of each column in which weights are compared; {} where one column
    has several factors, or where no two columns have several weights.

    Args:
        multiples: the factor of each weight, [B, T]; NaN where none is compared.
        tol: the relative error that is allowed.
    """
    columns = {t: x[~x.isnan()] for t, x in enumerate(multiples.T)}
    several = [x for x in columns.values() if len(x) > 1]
    if len(several) < 2 or not all(_is_constant(x, tol) for x in several):
        return {}
    return {t: float(x[0]) for t, x in columns.items() if len(x)}


def _has_factors_of_columns(
    weights: MeasuredWeights, factors: dict[int, float], tol: float
) -> bool:
    """Return whether every weight is the factor of its column times what it should be."""
    width = weights.found.shape[1]
    of_columns = weights.found.new_tensor(
        [factors.get(t, torch.nan) for t in range(width)]
    )
    expected = of_columns * weights.expected
    room = 10 * tol * expected.abs().clamp(min=1e-9)
    is_equal = (weights.found - expected).abs() <= room
    return bool(is_equal[weights.use].all())


def _of(words: str) -> Cause:
    """Return what the weights have in common, which is not why they are wrong."""
    return Cause(words, kind="pattern")


def _has_factor(weights: MeasuredWeights, name: str, k: float, tol: float) -> bool:
    """Return whether every weight is k times this factor times what it should be."""
    expected = k * weights.factors[name] * weights.expected
    room = 10 * tol * expected.abs().clamp(min=1e-9)
    is_equal = (weights.found - expected).abs() <= room
    return bool(is_equal[weights.use].all())


def _lacks_gradients(weights: MeasuredWeights, tol: float) -> bool:
    """Return whether some weights are 0 and should not be, and the others are right."""
    room = tol * weights.expected.abs().clamp(min=0.1)
    is_right = (weights.found - weights.expected).abs() <= room
    is_zero = weights.found == 0
    some_lost = (is_zero & ~is_right)[weights.use].any()
    return bool((is_right | is_zero)[weights.use].all() and some_lost)


def _has_term(weights: MeasuredWeights, added: float) -> bool:
    """Return whether this number is added to every weight."""
    errors = (weights.found - weights.expected - added).abs()
    is_equal = errors <= 1e-6 * abs(added) + 1e-9
    return bool(is_equal[weights.use].all())


def _is_constant(x: Tensor, tol: float) -> bool:
    """Return whether all numbers are finite and equal up to rounding; none are, too."""
    if x.numel() == 0:
        return True
    if not x.isfinite().all():
        return False
    return bool((x - x[0]).abs().max() <= tol * x[0].abs().clamp(min=1e-12))
