# SPDX-License-Identifier: Apache-2.0
"""Where a loss is wrong, as intervals of the ratio: `A > 0, r > 1.28`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.finding import Interval, TokenPlace
from upref.verify.measure import LossCase
from upref.verify.shrink import cut
from upref.weights.batches import single_token_responses


@dataclass(frozen=True)
class Region:
    """Tokens of one sign of A that differ.

    Args:
        place: these tokens as data, without the one that is shown.
        sign: of their A: 1, -1 or 0.
        tokens: [B, T], those of the batch that lie in it.
    """

    place: TokenPlace
    sign: float
    tokens: Tensor

    @property
    def ends(self) -> list[float]:
        """The ratios between which it lies."""
        bounds = [
            bound
            for interval in self.place.intervals
            for bound in (interval.low, interval.high)
        ]
        return [bound for bound in bounds if bound is not None]


def regions(
    case: LossCase,
    batch: Rollouts,
    sign: float,
    A: Tensor,
    ties: Tensor,
    failing: Tensor,
    r: Tensor,
    bounds: list[float],
) -> Iterator[Region]:
    """Each interval of ratios on which this sign of A fails; known bounds of the
    objective are named as they are.

    Args:
        case: the loss and its objective.
        batch: the grid, [B, T].
        sign: of A: 1, -1 or 0.
        A: of each token, [B, T].
        ties: tokens on a bound, [B, T].
        failing: tokens whose weight is wrong, [B, T].
        r: the ratio of each token, [B, T].
        bounds: ratios at which the objective's weight jumps.
    """
    side = batch.mask & ~ties & (A.sign() == sign)
    if not (failing & side).any():
        return
    order = r[side].argsort()
    xs = r[side][order].tolist()
    bad = failing[side][order].tolist()
    if all(bad):
        yield Region(TokenPlace(sign, (Interval(),)), sign, side)
        return
    groups = _groups(xs, bad)
    runs = _runs([fails for *_, fails in groups])
    # which tokens fail, their ρ decides
    if case.objective.sampler is not None and len(runs) > 1:
        yield Region(TokenPlace(sign, decided_by="ρ"), sign, side)
        return
    # where A = 0 no bound of the objective explains an interval
    decided_elsewhere = len(runs) > 1 or sign == 0
    if decided_elsewhere and _are_right_alone(case, batch, failing & side):
        yield Region(TokenPlace(sign, decided_by="others"), sign, side)
        return
    single = [
        groups[first][0] for first, last in runs if 0 < first == last < len(groups) - 1
    ]
    if len(runs) > MOST_INTERVALS or any(
        not _is_wrong_at(case, sign, ratio) for ratio in single
    ):
        yield Region(TokenPlace(sign, decided_by="scattered"), sign, side)
        return
    for first, last in runs:
        if first:
            low_bound = _end(case, sign, bounds, groups[first - 1][1], groups[first][0])
        else:
            low_bound = None
        if last + 1 < len(groups):
            high_bound = _end(case, sign, bounds, groups[last + 1][0], groups[last][1])
        else:
            high_bound = None
        tokens = (
            side
            & (r >= groups[first][0] * (1 - 1e-12))
            & (r <= groups[last][1] * (1 + 1e-12))
        )
        yield Region(TokenPlace(sign, (Interval(low_bound, high_bound),)), sign, tokens)


MOST_INTERVALS = 3  # of one sign of A that are named
ASKED_ALONE = 8  # tokens that differ


def _is_wrong_at(case: LossCase, sign: float, ratio: float) -> bool:
    """Whether a response of one token of this ratio differs."""
    batch = case.ready(single_token_responses(sign, np.array([ratio])))
    return bool((case.weight_error(batch) > case.tol).any())


def _are_right_alone(case: LossCase, batch: Rollouts, failing: Tensor) -> bool:
    """Whether tokens that differ, [B, T], are right in a batch of their own, where
    their ratio is the same.
    """
    tokens = failing.nonzero().tolist()
    for i, t in tokens[:: -(-len(tokens) // ASKED_ALONE)]:
        alone = cut(replace(batch, group=None), [i], [t])
        try:
            if alone is None or case.weight_error(case.ready(alone)).max() > case.tol:
                return False
        except InputError:  # it refuses a single token
            return False
    return True


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
    ends = [
        i
        for i, f in enumerate(flags)
        if f and (i + 1 == len(flags) or not flags[i + 1])
    ]
    return list(zip(starts, ends, strict=True))


def _end(
    case: LossCase, sign: float, known: list[float], good: float, bad: float
) -> float:
    """The bound between a ratio that agrees and one that does not: the objective's own,
    or found by asking the loss.
    """
    lo = min(good, bad)
    hi = max(good, bad)
    for k in known:
        if lo * (1 - 1e-12) <= k <= hi * (1 + 1e-12):
            return k
    if case.objective.level == "custom" or case.objective.reads_mu:
        return float(bad)
    for _ in range(6):
        xs = np.exp(np.linspace(math.log(good), math.log(bad), 33))
        wrongs = (
            (case.weight_error(case.ready(single_token_responses(sign, xs))) > case.tol)
            .any(1)
            .tolist()
        )
        if True not in wrongs or not wrongs.index(True):
            return float(bad)
        good = xs[wrongs.index(True) - 1]
        bad = xs[wrongs.index(True)]
    return float(bad)
