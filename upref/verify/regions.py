# SPDX-License-Identifier: Apache-2.0
"""Where a loss is wrong, as intervals of the ratio: `A > 0, r > 1.28`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.finding import Interval, TokenPlace
from upref.verify.measure import LossCase
from upref.verify.shrink import cut
from upref.weights.batches import MU, single_token_responses
from upref.weights.black_box import single_token_batch


@dataclass(frozen=True)
class Region:
    """Tokens of one sign of A that differ.

    Args:
        place: these tokens as data, without the one that is shown.
        sign: of their A: 1, -1 or 0.
        tokens: [B, T], those of the batch that lie in it.
        ends: the bounds of the ratio that were found, in ascending order.
    """

    place: TokenPlace
    sign: float
    tokens: Tensor
    ends: tuple[float, ...] = ()

    def contains(self, r: Tensor) -> Tensor:
        """Tell which ratios lie in its intervals; all do where it has none.

        Args:
            r: ratios, of any shape.

        Returns:
            Bools of this shape.
        """
        if not self.place.intervals:
            return torch.ones_like(r, dtype=torch.bool)
        inside = torch.zeros_like(r, dtype=torch.bool)
        for interval in self.place.intervals:
            low = 0.0 if interval.low is None else interval.low * (1 - ROUNDING)
            high = math.inf if interval.high is None else interval.high * (1 + ROUNDING)
            inside |= (low <= r) & (r <= high)
        return inside


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
    """Yield each interval of ratios on which this sign of A fails, ascending; known
    bounds of the objective are named as they are. Nothing is yielded if no token fails.

    One region without an interval is yielded where the ratio does not decide: "ρ" for an
    objective that corrects for its sampler; "others" where failing tokens are right
    alone; "scattered" where there are more than MOST_INTERVALS, or where one failing
    ratio between right ones is right alone; "|A|" or "π_old" where single tokens of the
    failing ratios are right for some value of it.

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
    tokens_of_sign = batch.mask & ~ties & (A.sign() == sign)
    if not (failing & tokens_of_sign).any():
        return
    by_ratio = r[tokens_of_sign].argsort()
    ratios = r[tokens_of_sign][by_ratio].tolist()
    is_wrong = failing[tokens_of_sign][by_ratio].tolist()
    if all(is_wrong):
        any_ratio = Interval(symbol=case.objective.ratio_symbol)
        yield Region(TokenPlace(sign, (any_ratio,)), sign, tokens_of_sign)
        return
    groups = _merge_equal_ratios(ratios, is_wrong)
    runs = _runs_of_true([group.is_wrong for group in groups])
    # several intervals with a sampler: ρ decides which tokens fail
    if case.objective.sampler is not None and len(runs) > 1:
        yield Region(TokenPlace(sign, decided_by="ρ"), sign, tokens_of_sign)
        return
    # where A = 0 no bound of the objective explains an interval
    decided_elsewhere = len(runs) > 1 or sign == 0
    if decided_elsewhere and _are_right_alone(case, batch, failing & tokens_of_sign):
        yield Region(TokenPlace(sign, decided_by="others"), sign, tokens_of_sign)
        return
    # runs of one ratio with right ones on either side
    single_ratios = [
        groups[first].lowest
        for first, last in runs
        if 0 < first == last < len(groups) - 1
    ]
    if len(runs) > MOST_INTERVALS or any(
        not _is_wrong_at(case, sign, ratio) for ratio in single_ratios
    ):
        yield Region(TokenPlace(sign, decided_by="scattered"), sign, tokens_of_sign)
        return
    parts: list[Region] = []
    ends: list[float] = []
    symbol: Literal["", "|A|", "π_old"] = ""
    for first, last in runs:
        lowest = groups[first].lowest
        highest = groups[last].highest
        # a bound of None: the run begins or ends with the ratios of the batch
        low_bound = None
        high_bound = None
        if first > 0:
            right_below = groups[first - 1].highest
            low_bound = _bound_between(case, sign, bounds, right_below, lowest)
        if last + 1 < len(groups):
            right_above = groups[last + 1].lowest
            high_bound = _bound_between(case, sign, bounds, right_above, highest)
        is_in_run = (r >= lowest * (1 - ROUNDING)) & (r <= highest * (1 + ROUNDING))
        tokens = tokens_of_sign & is_in_run
        interval = Interval(low_bound, high_bound, case.objective.ratio_symbol)
        of_run = tuple(end for end in (low_bound, high_bound) if end is not None)
        ends += of_run
        parts.append(Region(TokenPlace(sign, (interval,)), sign, tokens, of_run))
        if not symbol and (tokens & ~failing).any():
            symbol = _decided_by(case, sign, low_bound or lowest, high_bound or highest)
    if symbol:
        place = TokenPlace(sign, decided_by=symbol)
        yield Region(place, sign, tokens_of_sign, tuple(ends))
        return
    yield from parts


ROUNDING = 1e-12  # relative, of a ratio
MOST_INTERVALS = 3  # of one sign of A that are named
MOST_SINGLE_TOKENS = 8  # failing tokens that are measured by themselves


SIZES_OF_A = (0.5, 1.0, 2.0)
RATIOS_INSIDE = 5  # between two bounds
LIKELIEST = 0.95  # π_θ of a single token


def _decided_by(
    case: LossCase, sign: float, low: float, high: float
) -> Literal["", "|A|", "π_old"]:
    """Return which number of a token decides whether its weight is wrong between two
    ratios: "|A|" or "π_old" where single tokens of one value of it are right at two
    neighboring ratios at which those of another value are wrong; else "".

    Args:
        case: the loss and its objective.
        sign: of A.
        low, high: ratios between which some tokens of the grid are wrong.
    """
    if case.objective.sampler is not None or case.objective.batch_coupled:
        return ""  # their single tokens differ by more than these numbers
    ratios = np.geomspace(low, high, RATIOS_INSIDE + 2)[1:-1]
    A, mu, r = np.meshgrid(sign * np.array(SIZES_OF_A), MU, ratios, indexing="ij")
    batch = case.ready(single_token_batch(A.ravel(), r.ravel(), mu.ravel()))
    try:
        errors = case.weight_error(batch)
    except InputError:  # it refuses single tokens
        return ""
    is_wrong = (errors > case.tol).any(1).numpy().reshape(A.shape)
    is_possible = mu * r < LIKELIEST
    others: tuple[tuple[Literal["|A|", "π_old"], int], ...] = (("|A|", 1), ("π_old", 0))
    for symbol, other in others:
        # of one value of the number, at each ratio
        any_wrong = (is_wrong & is_possible).any(other)
        all_right = (~is_wrong | ~is_possible).all(other) & is_possible.any(other)
        differ = all_right & any_wrong.any(0)
        if (differ[:, 1:] & differ[:, :-1]).any():
            return symbol
    return ""


def _is_wrong_at(case: LossCase, sign: float, ratio: float) -> bool:
    """Tell whether the weight of a response of one token is wrong at this ratio."""
    batch = case.ready(single_token_responses(sign, np.array([ratio])))
    return bool((case.weight_error(batch) > case.tol).any())


def _are_right_alone(case: LossCase, batch: Rollouts, failing: Tensor) -> bool:
    """Tell whether failing tokens, [B, T], are right in a batch of one token with the
    same ratio. At most MOST_SINGLE_TOKENS of them are measured.
    """
    tokens = failing.nonzero().tolist()
    every_nth = math.ceil(len(tokens) / MOST_SINGLE_TOKENS)
    for i, t in tokens[::every_nth]:
        alone = cut(replace(batch, group=None), [i], [t])
        try:
            if alone is None or case.weight_error(case.ready(alone)).max() > case.tol:
                return False
        except InputError:  # it refuses a single token
            return False
    return True


class EqualRatios(NamedTuple):
    """Tokens of one ratio, up to rounding.

    Attributes:
        lowest, highest: their ratios.
        is_wrong: whether the weight of any is wrong.
    """

    lowest: float
    highest: float
    is_wrong: bool


def _merge_equal_ratios(ratios: list[float], is_wrong: list[bool]) -> list[EqualRatios]:
    """Merge equal neighbors of ascending ratios. One ratio occurs several times, with
    other A and other mu.
    """
    groups: list[EqualRatios] = []
    for ratio, wrong in zip(ratios, is_wrong, strict=True):
        if groups and ratio <= groups[-1].highest * (1 + 1e-10):
            last = groups[-1]
            groups[-1] = EqualRatios(last.lowest, ratio, last.is_wrong or wrong)
        else:
            groups.append(EqualRatios(ratio, ratio, wrong))
    return groups


def _runs_of_true(flags: list[bool]) -> list[tuple[int, int]]:
    """Return the first and the last index of each run of True."""
    first_indices = [
        i for i, flag in enumerate(flags) if flag and (i == 0 or not flags[i - 1])
    ]
    last_indices = [
        i
        for i, flag in enumerate(flags)
        if flag and (i + 1 == len(flags) or not flags[i + 1])
    ]
    return list(zip(first_indices, last_indices, strict=True))


def _bound_between(
    case: LossCase, sign: float, known_bounds: list[float], good: float, bad: float
) -> float:
    """Return the bound between a ratio that agrees and one that does not: a known bound
    of the objective, or one that calls of the loss close in on. Where a single token does
    not show it, or where bounds depend on more than the ratio, return the ratio that does
    not agree.

    Args:
        case: the loss and its objective.
        sign: of A.
        known_bounds: ratios at which the objective's weight jumps.
        good: the ratio that agrees.
        bad: the ratio that does not, above or below it.
    """
    lo = min(good, bad)
    hi = max(good, bad)
    for bound in known_bounds:
        if lo * (1 - ROUNDING) <= bound <= hi * (1 + ROUNDING):
            return bound
    if case.objective.level == "custom" or case.objective.reads_mu:
        return float(bad)
    # each round leaves 1/32 of the interval
    for _ in range(6):
        ratios = np.exp(np.linspace(math.log(good), math.log(bad), 33))
        batch = case.ready(single_token_responses(sign, ratios))
        is_wrong = (case.weight_error(batch) > case.tol).any(1).tolist()
        if True not in is_wrong:
            return float(bad)
        first_wrong = is_wrong.index(True)
        if first_wrong == 0:  # the ratio that agrees is wrong alone
            return float(bad)
        good = ratios[first_wrong - 1]
        bad = ratios[first_wrong]
    return float(bad)
