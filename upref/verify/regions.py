# SPDX-License-Identifier: Apache-2.0
"""Where a loss is wrong, as intervals of the ratio: `A > 0, r > 1.28`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from upref.rollouts import Rollouts
from upref.verify.measure import Case
from upref.weights.batches import interval, single_token_responses

NAMES = {1.0: "A > 0", -1.0: "A < 0", 0.0: "A = 0"}


@dataclass(frozen=True)
class Region:
    words: str
    sign: float
    tokens: Tensor  # [B, T], those of the batch that lie in it
    ends: tuple[float, ...]  # the ratios between which it lies


def regions(case: Case, b: Rollouts, sign: float, A, ties, failing, r, bounds: list[float]) -> Iterator[Region]:
    """Each interval of ratios on which this sign of A fails; known bounds of the objective are named as they are."""
    side = b.mask & ~ties & (A.sign() == sign)
    if not (failing & side).any():
        return
    order = r[side].argsort()
    xs, bad = r[side][order].tolist(), failing[side][order].tolist()
    if all(bad):
        yield Region(f"{NAMES[sign]}, any r", sign, side, ())
        return
    groups = _groups(xs, bad)
    wrong_at = lambda x: bool(
        (case.off(case.ready(single_token_responses(sign, np.array([x])))) > case.tol).any()
    )  # by the ratio
    runs = _runs([f for *_, f in groups])
    if case.o.sampler is not None and len(runs) > 1:  # which tokens fail, their ρ decides
        yield Region(f"{NAMES[sign]}, by ρ = π_old/μ", sign, side, ())
        return
    if len(runs) > 3 or any(0 < lo == hi < len(groups) - 1 and not wrong_at(groups[lo][0]) for lo, hi in runs):
        yield Region(f"{NAMES[sign]}, scattered r", sign, side, ())
        return
    for lo, hi in runs:
        left = _end(case, sign, bounds, groups[lo - 1][1], groups[lo][0]) if lo else None
        right = _end(case, sign, bounds, groups[hi + 1][0], groups[hi][1]) if hi + 1 < len(groups) else None
        text = "any r" if left is None and right is None else interval(left, right, 5)
        text = text.replace("<=", "<")  # a bound itself is a tie
        tokens = side & (r >= groups[lo][0] * (1 - 1e-12)) & (r <= groups[hi][1] * (1 + 1e-12))
        yield Region(f"{NAMES[sign]}, {text}", sign, tokens, tuple(e for e in (left, right) if e is not None))


def _groups(xs: list[float], bad: list[bool]) -> list[tuple[float, float, bool]]:
    """One ratio met several times (other A, other mu) fails if any of them does."""
    groups: list[tuple[float, float, bool]] = []
    for v, f in zip(xs, bad, strict=True):
        if groups and v <= groups[-1][1] * (1 + 1e-10):
            groups[-1] = (groups[-1][0], v, groups[-1][2] or f)
        else:
            groups.append((v, v, f))
    return groups


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    """First and last index of each run of True."""
    starts = [i for i, f in enumerate(flags) if f and (i == 0 or not flags[i - 1])]
    ends = [i for i, f in enumerate(flags) if f and (i + 1 == len(flags) or not flags[i + 1])]
    return list(zip(starts, ends, strict=True))


def _end(case: Case, sign: float, known: list[float], good: float, bad: float) -> float:
    """The bound between a ratio that agrees and one that does not: the objective's own, or found by asking the loss."""
    lo, hi = min(good, bad), max(good, bad)
    for k in known:
        if lo * (1 - 1e-12) <= k <= hi * (1 + 1e-12):
            return k
    if case.o.level == "custom" or case.o.reads_mu:
        return float(bad)
    for _ in range(6):
        xs = np.exp(np.linspace(math.log(good), math.log(bad), 33))
        wrongs = (case.off(case.ready(single_token_responses(sign, xs))) > case.tol).any(1).tolist()
        if True not in wrongs or not wrongs.index(True):
            return float(bad)
        good, bad = xs[wrongs.index(True) - 1], xs[wrongs.index(True)]
    return float(bad)
