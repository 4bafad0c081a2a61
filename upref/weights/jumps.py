# SPDX-License-Identifier: Apache-2.0
"""The one finder of jumps: scan a weight, then cut each interval in which something
happens, to the last bit of r.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# ratios at which a weight is computed first: every 26 % of r, every 2 % in [1e-3, 1e3],
# ever closer towards r = 1
_NEAR = np.logspace(-12, -1, 111)
GRID = np.unique(
    np.r_[np.logspace(-30, 30, 601), np.logspace(-3, 3, 601), 1 - _NEAR, 1, 1 + _NEAR]
)
# Relative to the weight near r = 1. Where a smaller weight turns to 0, it has been
# rounded to 0, and no bound cuts it off.
FAINT_SHARE = 1e-10
PARTS = 16  # into which an interval is cut


class Jump(NamedTuple):
    """A ratio at which the weight jumps, to the last bit: the last ratio on the side of
    the larger |weight|.
    """

    r: float
    below: float  # the weight just below
    above: float

    @property
    def end(self) -> bool:
        """Whether the weight is 0 on one side."""
        return (self.below == 0) != (self.above == 0)


class JumpTable(NamedTuple):
    """Jumps of many rows, ascending in row and r: arrays of one length."""

    row: np.ndarray
    r: np.ndarray
    below: np.ndarray
    above: np.ndarray


class _Intervals(NamedTuple):
    """Intervals of r in which something happens, of many rows, ascending in row and r:
    arrays of one length [m].
    """

    row: np.ndarray
    low: np.ndarray  # the ends
    high: np.ndarray
    below: np.ndarray  # the weight at `low`
    above: np.ndarray  # the weight at `high`
    turns: np.ndarray  # the weight turns to 0 or back


def find_jumps(
    weight: Callable[..., Any],
    r: np.ndarray,
    ends: bool,
    rtol_ratio: float,
    floor: float,
) -> tuple[JumpTable, np.ndarray]:
    """Find the jumps of several weights as functions of r, each on a row of ratios.

    Args:
        weight: (r [m, k], rows [m]) -> the weights of these rows, [m, k].
        r: the ratios at which each weight is looked at first, [n, G].
        ends: find only where the weight turns to 0 or back, which takes a tenth of the
            time; else every jump.
        rtol_ratio: ratios of a smaller relative distance count as one.
        floor: weights of a smaller relative distance count as one.

    Returns:
        The jumps, and whether each weight is other than 0 at its first ratio, [n].
    """
    rows = np.arange(len(r))
    weights = weight(r, rows)
    nearby_weights = weight(np.tile([0.5, 1, 2], (len(r), 1)), rows)
    faint_weight = FAINT_SHARE * abs(nearby_weights).max(1, keepdims=True)
    is_alive = (weights != 0) | _is_faded(weights, faint_weight)
    intervals = _scan(r, weights, is_alive, ends, faint_weight, floor)
    # An interval of the scan may hold several jumps. Each later one is taken to hold one.
    holds_one = False
    # cut them again and again, until the ends of each are neighbors in float64
    while (intervals.high > np.nextafter(intervals.low, np.inf)).any():
        intervals = _cut(weight, intervals, ends, faint_weight, floor, holds_one)
        holds_one = True
    table = _judge(weight, intervals, ends, rtol_ratio, faint_weight, floor)
    return table, is_alive[:, 0]


def _scan(
    r: np.ndarray,
    weights: np.ndarray,
    is_alive: np.ndarray,
    ends: bool,
    faint_weight: np.ndarray,
    floor: float,
) -> _Intervals:
    """Return the intervals between neighboring ratios in which the weight turns to 0 or
    back or, unless `ends`, changes by more than rounding.

    Args:
        r: the ratios, [n, G].
        weights: at these ratios, [n, G].
        is_alive: where the weight is other than 0, or 0 by rounding alone, [n, G].
        ends, floor: as of `find_jumps`.
        faint_weight: a smaller weight may have been rounded to 0, [n, 1].
    """
    turns = is_alive[:, :-1] != is_alive[:, 1:]
    is_chosen = turns
    if not ends:
        least = _least_change(weights, faint_weight, floor)
        is_chosen = turns | (abs(np.diff(weights)) > least)
    row, start = (is_chosen & (r[:, :-1] < r[:, 1:])).nonzero()
    return _Intervals(
        row=row,
        low=r[row, start],
        high=r[row, start + 1],
        below=weights[row, start],
        above=weights[row, start + 1],
        turns=turns[row, start],
    )


def _cut(
    weight: Callable[..., Any],
    intervals: _Intervals,
    ends: bool,
    faint_weight: np.ndarray,
    floor: float,
    holds_one: bool,
) -> _Intervals:
    """Cut each interval into PARTS, and return the parts in which something happens.

    Args:
        weight, ends, floor: as of `find_jumps`.
        intervals: they are cut.
        faint_weight: as of `_scan`.
        holds_one: only the part that most likely holds a jump is kept of each.
    """
    row, low, high, below, above, turns = intervals
    cuts = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, PARTS + 1)
    cuts[:, -1] = high
    values = np.c_[below, weight(cuts[:, 1:-1], row), above]
    change = abs(np.diff(values))
    starts_or_stops = (values[:, 1:] != 0) != (values[:, :-1] != 0)
    part_turns = starts_or_stops & (turns[:, None] | (change > faint_weight[row]))
    # how likely a part holds a jump; 0: it holds none
    if ends:
        score = np.where(part_turns, np.inf, 0)
    else:
        # The change of a smooth weight is spread evenly over the parts: one with more
        # than a quarter of it stands out.
        quarter = change.sum(1, keepdims=True) / 4
        least = _least_change(values, faint_weight[row], floor)
        part_jumps = change > np.maximum(least, quarter)
        score = np.where(part_turns, np.inf, np.where(part_jumps, change, 0))
    is_chosen = score > 0
    if holds_one:
        is_chosen &= np.arange(PARTS) == score.argmax(1)[:, None]
    interval, part = is_chosen.nonzero()
    return _Intervals(
        row=row[interval],
        low=cuts[interval, part],
        high=cuts[interval, part + 1],
        below=values[interval, part],
        above=values[interval, part + 1],
        turns=part_turns[interval, part],
    )


def _judge(
    weight: Callable[..., Any],
    intervals: _Intervals,
    ends: bool,
    rtol_ratio: float,
    faint_weight: np.ndarray,
    floor: float,
) -> JumpTable:
    """Return the jumps among the smallest intervals: neighboring ones are one jump, and
    the weight must differ beside it.

    Args:
        weight, ends, rtol_ratio, floor: as of `find_jumps`.
        intervals: each as small as float64 allows.
        faint_weight: as of `_scan`.
    """
    row, low, high, *_ = intervals
    is_apart = (row[1:] != row[:-1]) | (low[1:] > high[:-1] * (1 + rtol_ratio))
    is_first = np.r_[True, is_apart][: len(row)]
    is_last = np.r_[is_first[1:], True][: len(row)]
    row = row[is_first]
    low = low[is_first]
    high = high[is_last]
    # beside the jump, because the weight on a bound itself may be a third number
    beside = np.c_[low * (1 - rtol_ratio), high * (1 + rtol_ratio)]
    below, above = weight(beside, row).T
    is_jump = (below == 0) != (above == 0)
    if not ends:
        largest = np.maximum(abs(below), abs(above))
        least_jump = np.maximum(floor * largest, faint_weight[row, 0])
        is_jump |= abs(above - below) > least_jump
    on_larger_side = np.where(abs(below) >= abs(above), low, high)
    return JumpTable(
        row[is_jump], on_larger_side[is_jump], below[is_jump], above[is_jump]
    )


def _least_change(w: np.ndarray, faint: np.ndarray, floor: float) -> np.ndarray:
    """Return the least change of a weight w [n, G] from one r to the next that may be a
    jump, [n, G - 1]: floor times the larger of the two, and no less than faint [n, 1].
    """
    return np.maximum(floor * np.maximum(abs(w[:, :-1]), abs(w[:, 1:])), faint)


def _is_faded(w: np.ndarray, faint: np.ndarray) -> np.ndarray:
    """Return which weights of w [n, G] are 0 only by rounding, [n, G]: the nearest
    weight other than 0, on one side, is below faint [n, 1].
    """
    is_faint = (w != 0) & (abs(w) < faint)
    if not is_faint.any():
        return is_faint
    count = w.shape[1]
    # of each place: the last place up to it, and the first from it on, that is not 0
    last_left = np.maximum.accumulate(np.where(w != 0, np.arange(count), 0), 1)
    first_right = np.minimum.accumulate(
        np.where(w != 0, np.arange(count), count - 1)[:, ::-1], 1
    )[:, ::-1]
    is_left_faint = np.take_along_axis(is_faint, last_left, 1)
    is_right_faint = np.take_along_axis(is_faint, first_right, 1)
    return (w == 0) & (is_left_faint | is_right_faint)
