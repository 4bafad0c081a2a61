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
    # 1. scan: which intervals between two ratios hold a jump or an end
    rows = np.arange(len(r))
    weights = weight(r, rows)
    nearby_weights = weight(np.tile([0.5, 1, 2], (len(r), 1)), rows)
    faint_weight = FAINT_SHARE * abs(nearby_weights).max(1, keepdims=True)
    is_alive = (weights != 0) | _is_faded(weights, faint_weight)
    turns = is_alive[:, :-1] != is_alive[:, 1:]
    is_chosen = turns
    if not ends:
        least = _least_change(weights, faint_weight, floor)
        is_chosen = turns | (abs(np.diff(weights)) > least)
    # each interval in which something happens: its row, its ends, the weights there
    row, start = (is_chosen & (r[:, :-1] < r[:, 1:])).nonzero()
    low = r[row, start]
    high = r[row, start + 1]
    below = weights[row, start]
    above = weights[row, start + 1]
    turns = turns[row, start]
    # 2. cut each of them into PARTS again and again, until its ends are neighbors in
    # float64
    is_scan = True
    while (high > np.nextafter(low, np.inf)).any():
        cuts = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, PARTS + 1)
        cuts[:, -1] = high
        values = np.c_[below, weight(cuts[:, 1:-1], row), above]
        change = abs(np.diff(values))
        starts_or_stops = (values[:, 1:] != 0) != (values[:, :-1] != 0)
        part_turns = starts_or_stops & (turns[:, None] | (change > faint_weight[row]))
        if ends:
            score = np.where(part_turns, np.inf, 0)
        else:
            # the change of a smooth weight is spread evenly over the parts
            even_change = change.sum(1, keepdims=True) / 4
            least = _least_change(values, faint_weight[row], floor)
            part_jumps = change > np.maximum(least, even_change)
            score = np.where(part_turns, np.inf, np.where(part_jumps, change, 0))
        is_chosen = score > 0
        # An interval of the first scan may hold several jumps. Each later one is taken to
        # hold one jump, in the part with the highest score.
        if not is_scan:
            is_chosen &= np.arange(PARTS) == score.argmax(1)[:, None]
        interval, part = is_chosen.nonzero()
        row = row[interval]
        low = cuts[interval, part]
        high = cuts[interval, part + 1]
        below = values[interval, part]
        above = values[interval, part + 1]
        turns = part_turns[interval, part]
        is_scan = False
    # 3. judge what is left: neighboring intervals are one jump
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
    table = JumpTable(
        row[is_jump], on_larger_side[is_jump], below[is_jump], above[is_jump]
    )
    return table, is_alive[:, 0]


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
