# SPDX-License-Identifier: Apache-2.0
"""The one finder of jumps: scan a weight, then cut each interval in which something
happens, to the last bit of r.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# Where a weight is looked at first: every 26 % of r, every 2 % in [1e-3, 1e3], ever
# closer towards r = 1.
_NEAR = np.logspace(-12, -1, 111)
GRID = np.unique(
    np.r_[np.logspace(-30, 30, 601), np.logspace(-3, 3, 601), 1 - _NEAR, 1, 1 + _NEAR]
)
# of the weight near r = 1; where so little turns to 0, rounding did it and not a cut
FAINT = 1e-10
PARTS = 16  # into which an interval is cut


class Jump(NamedTuple):
    """A ratio at which the weight jumps, to the last bit; the last one on the side of
    the larger |weight|.
    """

    r: float
    below: float  # the weight just below
    above: float

    @property
    def end(self) -> bool:
        """Whether the weight is 0 on one side."""
        return (self.below == 0) != (self.above == 0)


class Found(NamedTuple):
    """Jumps of many rows, ascending in row and r: arrays of one length."""

    row: np.ndarray
    r: np.ndarray
    below: np.ndarray
    above: np.ndarray


def find(
    weight: Callable[..., Any],
    r: np.ndarray,
    ends: bool,
    rtol_ratio: float,
    floor: float,
) -> tuple[Found, np.ndarray]:
    """The jumps of each row of r [n, G], and whether the weight is alive at its first.

    weight      (r [m, k], rows [m]) -> [m, k]
    ends        only where the weight turns to 0 or back, which takes a tenth of the time; else every jump
    rtol_ratio  ratios of a smaller relative distance count as one
    floor       weights of a smaller relative distance count as one
    """
    rows = np.arange(len(r))
    w = weight(r, rows)
    nearby_weights = weight(np.tile([0.5, 1, 2], (len(r), 1)), rows)
    faint = FAINT * abs(nearby_weights).max(1, keepdims=True)
    live = (w != 0) | _faded(w, faint)
    changes = live[:, :-1] != live[:, 1:]
    hit = abs(np.diff(w)) > _least(w, faint, floor)
    i, k = ((changes if ends else changes | hit) & (r[:, :-1] < r[:, 1:])).nonzero()
    lo = r[i, k]
    hi = r[i, k + 1]
    a = w[i, k]
    z = w[i, k + 1]
    changes = changes[i, k]
    first = True
    while (hi > np.nextafter(lo, np.inf)).any():
        x = lo[:, None] + (hi - lo)[:, None] * np.linspace(0, 1, PARTS + 1)
        x[:, -1] = hi
        v = np.c_[a, weight(x[:, 1:-1], i), z]
        change = abs(np.diff(v))
        turns = ((v[:, 1:] != 0) != (v[:, :-1] != 0)) & (
            changes[:, None] | (change > faint[i])
        )
        # a smooth weight's change is spread evenly
        jumps = change > np.maximum(
            _least(v, faint[i], floor), change.sum(1, keepdims=True) / 4
        )
        score = np.where(turns, np.inf, 0 if ends else np.where(jumps, change, 0))
        keep = score > 0
        # an interval of the scan may hold several, one of its parts holds one
        if not first:
            keep &= np.arange(PARTS) == score.argmax(1)[:, None]
        j, k = keep.nonzero()
        i = i[j]
        lo = x[j, k]
        hi = x[j, k + 1]
        a = v[j, k]
        z = v[j, k + 1]
        changes = turns[j, k]
        first = False
    new = np.r_[True, (i[1:] != i[:-1]) | (lo[1:] > hi[:-1] * (1 + rtol_ratio))][
        : len(i)
    ]
    last = np.r_[new[1:], True][: len(i)]
    i = i[new]
    lo = lo[new]
    hi = hi[last]
    # on a bound itself a third value may stand
    a, z = weight(np.c_[lo * (1 - rtol_ratio), hi * (1 + rtol_ratio)], i).T
    keep = (a == 0) != (z == 0)
    if not ends:
        keep |= abs(z - a) > np.maximum(floor * np.maximum(abs(a), abs(z)), faint[i, 0])
    return Found(
        *(x[keep] for x in (i, np.where(abs(a) >= abs(z), lo, hi), a, z))
    ), live[:, 0]


def _least(w: np.ndarray, faint: np.ndarray, floor: float) -> np.ndarray:
    """How much a weight [n, G] must change from one r to the next to be looked at."""
    return np.maximum(floor * np.maximum(abs(w[:, :-1]), abs(w[:, 1:])), faint)


def _faded(w: np.ndarray, faint: np.ndarray) -> np.ndarray:
    """Zeros next to a faint weight."""
    weak = (w != 0) & (abs(w) < faint)
    if not weak.any():
        return weak
    n = w.shape[1]
    last_left = np.maximum.accumulate(np.where(w != 0, np.arange(n), 0), 1)
    first_right = np.minimum.accumulate(
        np.where(w != 0, np.arange(n), n - 1)[:, ::-1], 1
    )[:, ::-1]
    return (w == 0) & (
        np.take_along_axis(weak, last_left, 1)
        | np.take_along_axis(weak, first_right, 1)
    )
