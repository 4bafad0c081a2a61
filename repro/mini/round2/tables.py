# SPDX-License-Identifier: Apache-2.0
"""Verdicts and effects in words short enough for a table."""

from collections.abc import Iterable
from dataclasses import replace
from math import exp, sqrt

from scipy.stats import t

from paper.claims import words
from repro.mini.round2 import rule
from repro.mini.round2.rule import Found, Verdict
from repro.mini.study.plan import EVAL_METRICS, Contrast, Experiment
from repro.mini.study.stats import holm, levels

POINTS = {"reward", *EVAL_METRICS}
MOST = 200  # seeds: rule.seeds_for looks no further
FINAL = ("reproduced", "holds", "refuted", "in part", "undecided")


def decisive(verdicts: list[Verdict]) -> list[Verdict]:
    """The same verdicts, each with its intervals at the level at which it was decided.

    That is Holm's level for the claim, or against it, where that was shown; where
    neither was, the strictest, 0.05 over the claims of the family: these intervals hold
    for all of the family at once.
    """
    found = []
    for v in verdicts:
        family = [w for w in verdicts if w.claim.source == v.claim.source and w.found]
        if not v.found or v.n < 2:
            found.append(v)
            continue
        k, at = len(v.found), next(i for i, w in enumerate(family) if w is v)
        against = [
            min(1.0, len(w.found) * min(f.p_against for f in w.found)) for w in family
        ]
        level = rule.ALPHA / len(family)
        if v.word in ("reproduced", "holds"):
            level = levels([max(f.p_for for f in w.found) for w in family])[at]
        elif v.word == "refuted":
            level = levels(against)[at] / k
        found.append(replace(v, found=tuple(at_level(f, level) for f in v.found)))
    return found


def at_level(f: Found, level: float) -> Found:
    half = (
        float(t.ppf(1 - level / 2, f.n - 1)) * f.sd / sqrt(f.n)
        if f.n > 1
        else float("inf")
    )
    return replace(f, low=f.mean - half, high=f.mean + half)


def verdict(v: Verdict) -> str:
    """The word of the common vocabulary."""
    return words.of_rule(v.word, v.why, any(map(excluded, v.found)))


def limit(v: Verdict) -> str:
    """Of an excluded effect: above or below what."""
    f = next(filter(excluded, v.found))
    end = f.shown(f.high if f.contrast.side > 0 else f.low)
    return f"{words.EXCLUDED} {'above' if f.contrast.side > 0 else 'below'} {number(f.contrast, end)}"


def verdicts(
    experiments: Iterable[Experiment], judged: dict[str, list[Verdict]], source: str
) -> str:
    rows = [
        "| | claim | verdict | effect [interval that decides] | seeds | p | power | seeds for 0.8 |",
        "|---" * 8 + "|",
    ]
    for e in experiments:
        for v in judged[e.name]:
            if v.claim.source == source:
                rows.append(row(e, v))
    rows += [
        "\np is Holm's over the experiment's claims of this kind. The interval has the level at which Holm's",
        "procedure decides the claim; where nothing is shown, at the strictest, 0.05 over the claims of the family.",
        "Power and seeds for 0.8 are for the registered effect at the spread seen and the strictest level.\n",
    ]
    return "\n".join(rows)


def row(e: Experiment, v: Verdict) -> str:
    beyond = v.word == "refuted" and any(
        f.contrast.bound not in (0, 1) and f.contrast.within is None for f in v.found
    )
    why = (
        assumed(v)
        if v.word == "undecided"
        else "the bound is shown not to be reached"
        if beyond
        else v.why
    )
    word = limit(v) if verdict(v) == words.EXCLUDED else verdict(v)
    cells = [
        f"{e.name}<br>{v.claim.figure}",
        v.claim.says,
        f"**{word}**" + (f"<br>{why}" if why else ""),
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


def lacks(v: Verdict) -> str:
    """Why a claim is undecided, for a table: the seeds that it would take, or too close
    to call.
    """
    return "too close to call" if enough(v) else f"{seeds(v)} seeds for 0.8"


def assumed(v: Verdict) -> str:
    """Which budget could not decide: its seeds, and the effect that they were counted
    for.
    """
    parts = []
    for f in v.found:
        c = f.contrast
        effect = (
            f"no difference, within ×{c.within:g}"
            if c.within
            else number(c, c.effect or c.bound)
        )
        parts.append(effect)
    return f"its {v.of} seeds were counted for {'; '.join(parts)}"


def excluded(f: Found) -> bool:
    """Whether the interval ends short of the effect that was registered."""
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
    bound = c.bound * (100 if c.metric in POINTS and not c.ratio else 1)
    claimed = (
        f"within ×{c.within:g}"
        if c.within
        else f"{'>' if c.more_than is not None else '<'} {bound:g}"
    )
    return f"{c.metric}{where} {c.at} {arms} {claimed}"


def show(f: Found) -> str:
    """The mean and its interval: points of 100 for shares, ×-factors for ratios."""
    if not f.n:
        return "no run"
    c, of = f.contrast, lambda x: exp(min(x, 700)) if f.contrast.ratio else x
    ends = (
        f" [{number(c, of(f.low), '')}, {number(c, of(f.high), '')}]" if f.n > 1 else ""
    )
    return number(c, of(f.mean)) + ends


def number(c: Contrast, x: float, times: str = "×") -> str:
    factor = ".3f" if 0.1 <= x < 10 else ".3g"
    k, form = (
        (1, factor) if c.ratio else (100, "+.1f") if c.metric in POINTS else (1, "+.3f")
    )
    return f"{times if c.ratio else ''}{k * x:{form}}"
