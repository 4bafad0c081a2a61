# SPDX-License-Identifier: Apache-2.0
"""Holm's correction for several tests."""

from collections.abc import Sequence


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order: p_(i) -> max_{j <= i} min(1, (m - j
    + 1) p_(j)) (Holm 1979).
    """
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted


def levels(ps: Sequence[float], alpha: float = 0.05) -> list[float]:
    """The level at which Holm's procedure tests each: alpha / (m - j + 1), j its rank
    or that of the first that fails.

    An interval at 1 - level leaves out the bound exactly where the adjusted p is below
    alpha: it is what decides.
    """
    order, m = sorted(range(len(ps)), key=lambda i: ps[i]), len(ps)
    stop = next((j for j, i in enumerate(order) if ps[i] >= alpha / (m - j)), m - 1)
    found = [0.0] * m
    for j, i in enumerate(order):
        found[i] = alpha / (m - min(j, stop))
    return found
