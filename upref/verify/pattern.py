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
    if not found[use].any():
        return _of("no token of the tested batch has a weight; those of others have")
    is_due = expected[use].abs() > LEAST_WEIGHT
    # a factor leaves a weight of 0 at 0
    if (found[use][~is_due].abs() <= tol).all() and is_due.any():
        cause = _one_factor(tested, shown, tol)
        if cause is None:
            cause = _lost_gradients(tested, shown, tol)
        if cause is None and by_token:
            cause = _factors_of_rows_or_columns(tested, shown, tol)
        if cause is not None:
            return cause
    extra = found[use] - expected[use]
    added = float(extra.mean())
    is_constant = _is_constant(extra, 1e-6) and abs(added) > LEAST_WEIGHT
    if is_constant and _has_term(shown, added):
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


LEAST_WEIGHT = 1e-9  # of what counts as a weight: smaller ones are rounding
COLUMNS_NAMED = 3


def _one_factor(
    tested: MeasuredWeights, shown: MeasuredWeights, tol: float
) -> Cause | None:
    """Return the one factor that all weights of both batches have; None for none.

    Args:
        tested, shown, tol: as of `pattern`.
    """
    found = tested.found[tested.use]
    expected = tested.expected[tested.use]
    is_due = expected.abs() > LEAST_WEIGHT
    for name, factor in tested.factors.items():
        multiples = (found / (expected * factor[tested.use]))[is_due]
        multiple = multiples.mean()
        if not _is_constant(multiples, tol):
            continue
        if not _has_factor(shown, name, float(multiple), tol):
            continue
        times = f"{multiple:.5g}{name}"
        if name and abs(multiple - 1) < 1e-6:
            times = name.strip()
        return _of(
            f"every weight of the tested batch is {times} times what it should be"
        )
    return None


def _lost_gradients(
    tested: MeasuredWeights, shown: MeasuredWeights, tol: float
) -> Cause | None:
    """Return that some weights are 0 and all others right, in both batches; None where
    this is not so.

    Args:
        tested, shown, tol: as of `pattern`.
    """
    found = tested.found[tested.use]
    expected = tested.expected[tested.use]
    is_right = (found - expected).abs() <= tol * expected.abs().clamp(min=0.1)
    is_zero = found == 0
    lost = int((is_zero & ~is_right).sum())
    if not lost or not (is_right | is_zero).all() or not _lacks_gradients(shown, tol):
        return None
    verb = "have" if lost > 1 else "has"
    return _of(
        f"{lost} of {is_right.numel()} tokens {verb} no gradient and should "
        "have one; the others are right"
    )


def _factors_of_rows_or_columns(
    tested: MeasuredWeights, shown: MeasuredWeights, tol: float
) -> Cause | None:
    """Return that the weights of each response have one factor, or those of each column;
    None where neither is so. The batch that is shown is compared for the columns alone.

    Args:
        tested, shown, tol: as of `pattern`.
    """
    is_due = tested.use & (tested.expected.abs() > LEAST_WEIGHT)
    multiples = torch.where(is_due, tested.found / tested.expected, torch.nan)
    if all(_is_constant(row[~row.isnan()], tol) for row in multiples):
        return _of(ONE_FACTOR + _near_1(multiples))
    factors = _factor_of_each_column(multiples, tol)
    if not factors or not _has_factors_of_columns(shown, factors, tol):
        return None
    named = [f"{factor:.5g} in column {column}" for column, factor in factors.items()]
    first = named[:COLUMNS_NAMED]
    if len(named) > COLUMNS_NAMED:
        first.append("...")
    return _of(
        "within each column of the tested batch the weights are right up to one "
        f"factor: {', '.join(first)}"
    )


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
