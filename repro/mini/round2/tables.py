# SPDX-License-Identifier: Apache-2.0
"""Verdicts and effects in words short enough for a table."""

from collections.abc import Iterable
from math import exp

from repro.mini.round2 import rule
from repro.mini.round2.rule import Found, Verdict
from repro.mini.study.plan import EVAL_METRICS, Contrast, Experiment
from repro.mini.study.stats import holm

POINTS = {"reward", *EVAL_METRICS}
MOST = 200  # seeds: rule.seeds_for looks no further
FINAL = ("reproduced", "holds", "refuted", "in part", "undecided")


def verdicts(experiments: Iterable[Experiment], judged: dict[str, list[Verdict]], source: str) -> str:
    rows = ["| | claim | verdict | effect [95 %] | seeds | p | power | seeds for 0.8 |", "|---" * 8 + "|"]
    for e in experiments:
        for v in judged[e.name]:
            if v.claim.source == source:
                rows.append(row(e, v))
    rows.append(
        "\np is Holm's over the experiment's claims of this kind. Power and seeds for 0.8 are for the registered effect"
    )
    rows.append("at the spread seen and the strictest level of the correction.\n")
    return "\n".join(rows)


def row(e: Experiment, v: Verdict) -> str:
    beyond = v.word == "refuted" and any(f.contrast.bound not in (0, 1) and f.contrast.within is None for f in v.found)
    why = assumed(v) if v.word == "undecided" else "a bound is shown not to be reached" if beyond else v.why
    cells = [
        f"{e.name}<br>{v.claim.figure}",
        v.claim.says,
        f"**{v.word}**" + (f"<br>{why}" if why else ""),
        effects(v),
        f"{v.n} of {v.of}" if v.of else "",
        f"{v.p_for:.2g}" if v.word in FINAL else "",
        f"{v.power:.2f}" if v.power == v.power else "",
        seeds(v),
    ]
    return f"| {' | '.join(cells)} |"


def seeds(v: Verdict) -> str:
    """How many have power 0.8 for the registered effect."""
    n = v.seeds_needed
    return "" if not n else f"over {MOST}" if n >= MOST else str(n)


def enough(v: Verdict) -> bool:
    """Whether the seeds had power 0.8 at the spread that was seen."""
    return v.power >= 0.8


LESS, SHORT, CLOSE = "less than was registered", "seeds", "too close to call"


def kind(v: Verdict) -> str:
    """Why a claim is undecided: the interval leaves out what was registered, seeds lack, or neither."""
    return LESS if any(map(excluded, v.found)) else CLOSE if enough(v) else SHORT


def lacks(v: Verdict) -> str:
    """The same for a table, and how many seeds."""
    return f"{seeds(v)} seeds for 0.8" if kind(v) == SHORT else kind(v)


def assumed(v: Verdict) -> str:
    """Which budget could not decide: its seeds, the effect that they were counted for, and whether that is left out."""
    parts = []
    for f in v.found:
        c = f.contrast
        effect = f"no difference, within ×{c.within:g}" if c.within else number(c, c.effect or c.bound)
        parts.append(effect + ", which the interval leaves out" * excluded(f))
    return f"its {v.of} seeds were counted for {'; '.join(parts)}"


def excluded(f: Found) -> bool:
    """Whether the 95 % interval ends short of the effect that was registered."""
    c = f.contrast
    if c.effect is None or not f.n:
        return False
    low, high = f.shown(f.low), f.shown(f.high)
    return high < c.effect if c.side > 0 else low > c.effect


def effects(v: Verdict) -> str:
    found = [f for f in v.found if f.n]
    if len(found) > 3:
        worst = max(found, key=lambda f: (f.p_for, -f.p_against))
        held = sum(p < rule.ALPHA for p in holm([f.p_for for f in found]))
        return f"{held} of {len(found)} hold; weakest: {one(worst)}"
    return "<br>".join(one(f) for f in found)


def one(f: Found) -> str:
    return f"{show(f)}: {what(f.contrast)}"


def what(c: Contrast) -> str:
    arms = (" / " if c.ratio else " − ").join(c.arms)
    where = f" ({c.set})" if c.set != "test" else ""
    claimed = f"within ×{c.within:g}" if c.within else f"{'>' if c.more_than is not None else '<'} {c.bound:g}"
    return f"{c.metric}{where} {c.at} {arms} {claimed}"


def show(f: Found) -> str:
    """The mean and its interval: points of 100 for shares, ×-factors for ratios."""
    if not f.n:
        return "no run"
    c, of = f.contrast, lambda x: exp(min(x, 700)) if f.contrast.ratio else x
    ends = f" [{number(c, of(f.low), '')}, {number(c, of(f.high), '')}]" if f.n > 1 else ""
    return number(c, of(f.mean)) + ends


def number(c: Contrast, x: float, times: str = "×") -> str:
    factor = ".3f" if 0.1 <= x < 10 else ".3g"
    k, form = (1, factor) if c.ratio else (100, "+.1f") if c.metric in POINTS else (1, "+.3f")
    return f"{times * c.ratio}{k * x:{form}}"
