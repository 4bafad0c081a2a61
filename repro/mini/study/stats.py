# SPDX-License-Identifier: Apache-2.0
"""Differences paired by seed, their t-interval, and Holm's correction.

    d_s        difference of two arms at seed s (or one arm's own number); of logarithms where a ratio is asked
    mean d ± t_{n-1, 0.975} · sd(d) / √n                             95 % interval, sd with n - 1
    p = min(1, 2 P(T_{n-1} >= ±(mean d - bound) / (sd(d) / √n)))     + where d > bound is claimed, - where d < bound

p < 0.05 exactly where the whole interval lies on the claimed side of the bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, log, sqrt

import numpy as np
from scipy.stats import t

from upref.errors import InputError


@dataclass(frozen=True)
class Effect:
    """What n seeds say: the mean, its 95 % interval, and p of the claim. A ratio is a geometric mean, its bound too."""

    mean: float
    low: float
    high: float
    n: int
    p: float
    seeds_for: int  # seeds whose own difference lies on the claimed side


def effect(values: Sequence[float], bound: float = 0.0, side: int = 1, ratio: bool = False) -> Effect:
    """Effect of the values of the seeds (differences, or ratios > 0 if `ratio`), claimed to lie above the bound
    (side=1) or below it (-1).

    One seed has no interval: (-inf, inf) and p = 1. Raises InputError on no value, on one that is not finite, on ratios
    and bounds of ratios that are not positive.
    """
    if side not in (1, -1):
        raise InputError(f"side must be 1 (above the bound) or -1 (below it), got {side!r}.")
    if not len(values) or not all(isfinite(v) for v in [*values, bound]):
        raise InputError(f"an effect needs finite numbers, one per seed, got {list(values)} and the bound {bound}.")
    if ratio and min(*values, bound) <= 0:
        raise InputError(f"ratios and their bound must be positive, got {list(values)} and {bound}.")
    d, at = np.asarray(values, float), bound
    if ratio:
        d, at = np.log(d), log(bound)
    n, mean, count = len(d), float(d.mean()), int((side * (d - at) > 0).sum())
    if n == 1:
        low, high, p = -inf, inf, 1.0
    else:
        se = float(d.std(ddof=1)) / sqrt(n)
        half = float(t.ppf(0.975, n - 1)) * se
        low, high = mean - half, mean + half
        far = side * (mean - at)
        p = min(1.0, 2 * float(t.sf(far / se, n - 1))) if se > 0 else float(far <= 0)
    if ratio:
        mean, low, high = exp(mean), exp(low), exp(high) if high < 700 else inf
    return Effect(mean, low, high, n, p, count)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order: p_(i) -> max_{j <= i} min(1, (m - j + 1) p_(j)) (Holm 1979)."""
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted


def levels(ps: Sequence[float], alpha: float = 0.05) -> list[float]:
    """The level at which Holm's procedure tests each: alpha / (m - j + 1), j its rank or that of the first that fails.

    An interval at 1 - level leaves out the bound exactly where the adjusted p is below alpha: it is what decides.
    """
    order, m = sorted(range(len(ps)), key=lambda i: ps[i]), len(ps)
    stop = next((j for j, i in enumerate(order) if ps[i] >= alpha / (m - j)), m - 1)
    found = [0.0] * m
    for j, i in enumerate(order):
        found[i] = alpha / (m - min(j, stop))
    return found


def at_level(e: Effect, level: float, ratio: bool = False) -> Effect:
    """The same effect with its interval at 1 - level."""
    if e.n < 2:
        return e
    to, back = (log, exp) if ratio else (float, float)
    half = (to(e.mean) - to(e.low)) * float(t.ppf(1 - level / 2, e.n - 1) / t.ppf(0.975, e.n - 1))
    return replace(e, low=back(to(e.mean) - half), high=back(min(to(e.mean) + half, 700)))
