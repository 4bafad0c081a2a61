# SPDX-License-Identifier: Apache-2.0
"""What found weights have in common with the expected ones where no hypothesis
reproduces them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from upref.rollouts import Rollouts
from upref.verify.report import UNKNOWN


@dataclass(frozen=True)
class MeasuredWeights:
    """The weights of a batch: those found, those expected, the ratios, and which tokens
    are looked at; [B, T] each.
    """

    b: Rollouts
    found: Tensor
    expected: Tensor
    r: Tensor
    use: Tensor

    @property
    def factors(self) -> dict[str, Tensor]:
        """What every weight may be multiplied by, by its name.

        Returns:
            [B, T] by the words that follow a number in a report, such as " / r".
        """
        batch = self.b
        r = self.r
        n = batch.mask.sum(-1, keepdim=True).expand_as(r).to(r.dtype)
        return {
            "": torch.ones_like(r),
            " r": r,
            " / r": 1 / r,
            " π_θ": batch.logp.exp(),
            " π_old": batch.logp_old.exp(),
            " |o|": n,
            " / |o|": 1 / n,
            " |A|": batch.adv.abs().expand_as(r),
        }


def pattern(
    tested: MeasuredWeights, shown: MeasuredWeights, tol: float, by_token: bool
) -> str:
    """A relation that holds on every token of the tested batch, and of the one that the
    report shows, in words; that no known cause fits if none does. by_token: a
    response's tokens may have different weights.

    Args:
        tested: the weights of the batch that was compared.
        shown: those of the batch that is printed.
        tol: the relative error that is allowed.
    """
    tol = max(10 * tol, 1e-7)
    found = tested.found
    expected = tested.expected
    use = tested.use
    if not (found[use].isfinite().all() and shown.found[shown.use].isfinite().all()):
        return ""
    x = found[use]
    y = expected[use]
    live = y.abs() > 1e-9
    if not x.any():
        return "no token of the tested batch has a weight; those of others have"
    if (x[~live].abs() <= tol).all() and live.any():
        for name, f in tested.factors.items():
            k = (x / (y * f[use]))[live]
            if _constant(k, tol) and _has_factor(shown, name, float(k.mean()), tol):
                if name and abs(k.mean() - 1) < 1e-6:
                    times = name.strip()
                else:
                    times = f"{k.mean():.5g}{name}"
                return f"every weight of the tested batch is {times} times what it should be"
        same = (x - y).abs() <= tol * y.abs().clamp(min=0.1)
        gone = x == 0
        n = int((gone & ~same).sum())
        if n and (same | gone).all() and _lacks_gradients(shown, tol):
            verb = "have" if n > 1 else "has"
            return f"{n} of {same.numel()} tokens {verb} no gradient and should have one; the others are right"
        k = torch.where(use & (expected.abs() > 1e-9), found / expected, torch.nan)
        if by_token and all(_constant(row[~row.isnan()], tol) for row in k):
            return "within each response of the tested batch the weights are right up to one factor"
    extra = x - y
    added = float(extra.mean())
    if _constant(extra, 1e-6) and abs(added) > 1e-9 and _has_term(shown, added):
        return f"{added:+.4g} is added to every weight of the tested batch, whatever A"
    zero = (tested.b.adv.expand_as(found) == 0)[use]
    if zero.any() and extra[zero].abs().max() > tol:
        return f"{UNKNOWN}; where A = 0 the weight is off by up to {extra[zero].abs().max():.4g}"
    return UNKNOWN


def _has_factor(weights: MeasuredWeights, name: str, k: float, tol: float) -> bool:
    """Whether every weight is k times that factor of what it should be."""
    expected = k * weights.factors[name] * weights.expected
    return bool(
        ((weights.found - expected).abs() <= 10 * tol * expected.abs().clamp(min=1e-9))[
            weights.use
        ].all()
    )


def _lacks_gradients(weights: MeasuredWeights, tol: float) -> bool:
    """Whether some weights are 0 and should not be, and the others are right."""
    same = (
        weights.found - weights.expected
    ).abs() <= tol * weights.expected.abs().clamp(min=0.1)
    gone = weights.found == 0
    return bool((same | gone)[weights.use].all() and (gone & ~same)[weights.use].any())


def _has_term(weights: MeasuredWeights, added: float) -> bool:
    """Whether this number is added to every weight."""
    return bool(
        ((weights.found - weights.expected - added).abs() <= 1e-6 * abs(added) + 1e-9)[
            weights.use
        ].all()
    )


def _constant(k: Tensor, tol: float) -> bool:
    if k.numel() == 0:
        return True
    return bool(k.isfinite().all()) and bool(
        (k - k[0]).abs().max() <= tol * k[0].abs().clamp(min=1e-12)
    )
