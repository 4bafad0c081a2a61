# SPDX-License-Identifier: Apache-2.0
"""DAPO with one half of UP's weight, controls of repro/mini: which half of UP does what UP does?

UP gives each token with A > 0 the weight A. DAPO gives it r A up to the upper clip and 0 above. These objectives take
the weight A in one region of r, or in two, and DAPO's weight in the others. For A <= 0 all of them are DAPO.
"""

from dataclasses import replace
from typing import Any

import upref
from repro.mini.train import mirror
from upref.ops import exp, where

DAPO = upref.get("dapo")


def up_above_clip(lp: Any, lp_old: Any, A: Any, *, eps_low: Any = 0.2, eps_high: Any = 0.28, c: Any = None) -> Any:
    """J with the weight A where r > 1 + ε_high: bounded there, not 0 as in DAPO."""
    r = exp(lp - lp_old)
    return where((A > 0) & (r > 1 + eps_high), A * lp, DAPO.fn(lp, lp_old, A, eps_low=eps_low, eps_high=eps_high, c=c))


def up_above_clip_weight(r: Any, A: Any, *, eps_low: Any, eps_high: Any, c: Any) -> Any:
    dapo = DAPO.closed_form(r, A, eps_low=eps_low, eps_high=eps_high, c=c)
    return where((A > 0) & (r > 1 + eps_high), A, dapo)


def up_below_one(lp: Any, lp_old: Any, A: Any, *, eps_low: Any = 0.2, eps_high: Any = 0.28, c: Any = None) -> Any:
    """J with the weight A where r < 1: more than DAPO's r A."""
    r = exp(lp - lp_old)
    return where((A > 0) & (r < 1), A * lp, DAPO.fn(lp, lp_old, A, eps_low=eps_low, eps_high=eps_high, c=c))


def up_below_one_weight(r: Any, A: Any, *, eps_low: Any, eps_high: Any, c: Any) -> Any:
    dapo = DAPO.closed_form(r, A, eps_low=eps_low, eps_high=eps_high, c=c)
    return where((A > 0) & (r < 1), A, dapo)


def up_both_sides(lp: Any, lp_old: Any, A: Any, *, eps_low: Any = 0.2, eps_high: Any = 0.28, c: Any = None) -> Any:
    """J with the weight A where r < 1 and where r > 1 + ε_high; it differs from UP only between the two."""
    r = exp(lp - lp_old)
    outside = (r < 1) | (r > 1 + eps_high)
    return where((A > 0) & outside, A * lp, DAPO.fn(lp, lp_old, A, eps_low=eps_low, eps_high=eps_high, c=c))


def up_both_sides_weight(r: Any, A: Any, *, eps_low: Any, eps_high: Any, c: Any) -> Any:
    outside = (r < 1) | (r > 1 + eps_high)
    dapo = DAPO.closed_form(r, A, eps_low=eps_low, eps_high=eps_high, c=c)
    return where((A > 0) & outside, A, dapo)


OBJECTIVES = {
    fn.__name__: replace(DAPO, name=fn.__name__, fn=fn, closed_form=weight, note="a control of repro/mini")
    for fn, weight in (
        (up_above_clip, up_above_clip_weight),
        (up_below_one, up_below_one_weight),
        (up_both_sides, up_both_sides_weight),
    )
}


def get(name: str) -> upref.Objective:
    """A half of UP, or whatever mirror.py knows."""
    return OBJECTIVES[name] if name in OBJECTIVES else mirror.get(name)
