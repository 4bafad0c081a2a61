# SPDX-License-Identifier: Apache-2.0
"""What found weights have in common with the expected ones where no hypothesis reproduces them."""

import torch
from torch import Tensor

from upref.rollouts import Rollouts
from upref.verify.report import UNKNOWN


def pattern(b: Rollouts, found: Tensor, expected: Tensor, r: Tensor, use: Tensor, tol: float, by_token: bool) -> str:
    """A relation that holds on every used token, in words; that no known cause fits if none of these does. by_token: a
    response's tokens may have different weights."""
    tol = max(10 * tol, 1e-7)
    if not found[use].isfinite().all():
        return ""
    x, y = found[use], expected[use]
    live = y.abs() > 1e-9
    if not x.any():
        return "no token of this batch has a weight; those of others have"
    if (x[~live].abs() <= tol).all() and live.any():
        factors = {"": torch.ones_like(r), " r": r, " / r": 1 / r, " π_θ": b.logp.exp(), " π_old": b.logp_old.exp()}
        n = b.mask.sum(-1, keepdim=True).expand_as(r).to(r.dtype)
        factors |= {" |o|": n, " / |o|": 1 / n, " |A|": b.adv.abs().expand_as(r)}
        for name, f in factors.items():
            k = (x / (y * f[use]))[live]
            if _constant(k, tol):
                times = name.strip() if name and abs(k.mean() - 1) < 1e-6 else f"{k.mean():.5g}{name}"
                return f"every weight of this batch is {times} times what it should be"
        same, gone = (x - y).abs() <= tol * y.abs().clamp(min=0.1), x == 0
        if (same | gone).all():
            dead = f"{int((gone & ~same).sum())} of {same.numel()} tokens"
            return f"{dead} have no gradient and should have one; the others are right"
        k = torch.where(use & (expected.abs() > 1e-9), found / expected, torch.nan)
        if by_token and all(_constant(row[~row.isnan()], tol) for row in k):
            return "within each response of this batch the weights are right up to one factor"
    extra = x - y
    if _constant(extra, 1e-6) and extra.mean().abs() > 1e-9:
        return f"{extra.mean():+.4g} is added to every weight of this batch, whatever A"
    zero = (b.adv.expand_as(found) == 0)[use]
    if zero.any() and extra[zero].abs().max() > tol:
        return f"{UNKNOWN}; where A = 0 the weight is off by up to {extra[zero].abs().max():.4g}"
    return UNKNOWN


def _constant(k: Tensor, tol: float) -> bool:
    if k.numel() == 0:
        return True
    return bool(k.isfinite().all()) and bool((k - k[0]).abs().max() <= tol * k[0].abs().clamp(min=1e-12))
