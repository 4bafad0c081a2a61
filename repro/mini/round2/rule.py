# SPDX-License-Identifier: Apache-2.0
"""The decision rule of the second round, registered with the claims before any run of it.

Every effect is paired by seed: d_s = x(first arm, seed s) - x(second arm, seed s), or an arm's own number. Quantities
that are always positive (KL, gradient norms) may be compared as ratios, d_s = log x - log y; all others, which can be
0, are compared as differences. t-tests with n - 1 degrees of freedom, every finished seed counted:

    claimed d > b      p_for = P(T >= (mean - b) / se) · 2, at most 1       p_against the same, turned around
    claimed |d| < w    "comparable" is an equivalence test, two one-sided tests: p_for = 2 · the larger of
                       P(T >= (mean + w) / se) and P(T <= (mean - w) / se); p_against = that |d| > w, on the nearer side
    several contrasts  all must hold: p_for is the largest, p_against k times the smallest of k
    families           Holm's correction over the claims of one experiment and one source: what the paper claims and
                       what we ask are two families; p_for and p_against are each corrected

    reproduced         corrected p_for < 0.05 ("holds" for what we ask)
    refuted            corrected p_against < 0.05: the opposite, or a difference that is not comparable, is shown
    in part            not these, but of several contrasts some hold (Holm within the claim) and some do not
    undecided          none of these: this is the finding, and how many seeds it would take is said
    not testable here  the gate failed: in that regime DAPO's own reward does not rise (the mean over the finished seeds
                       of last fifth minus first fifth is not above 0), or the miniature has nothing that corresponds
    not finished       seeds are still to run; what they say so far is shown, and it is no verdict

A run that stopped because its numbers were no longer finite counts as 0 in every evaluation that it did not reach.
Power is that of the corrected test at its strictest, level 0.05 / claims of the family, for the effect that the claim
registered (distance of the assumed effect to the bound; for "comparable", of 0 to both bounds).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import exp, inf, log, sqrt

import numpy as np
from scipy.stats import nct, rankdata, t

from repro.mini.study.plan import POSITIVE, Claim, Contrast, Experiment
from repro.mini.study.results import Record, value
from repro.mini.study.stats import holm
from upref.errors import InputError

ALPHA = 0.05
Runs = dict[tuple[str, int], Record | None]


@dataclass(frozen=True)
class Found:
    """What the seeds say of one contrast, on the scale of d: logarithms where it is a ratio."""

    contrast: Contrast
    values: tuple[float, ...]
    mean: float = float("nan")
    low: float = -inf
    high: float = inf
    sd: float = float("nan")
    p_for: float = 1.0
    p_against: float = 1.0

    @property
    def n(self) -> int:
        return len(self.values)

    def shown(self, x: float) -> float:
        return (exp(x) if x < 700 else inf) if self.contrast.ratio else x


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    word: str
    why: str
    found: tuple[Found, ...] = ()
    p_for: float = 1.0  # both corrected over the family
    p_against: float = 1.0
    n: int = 0
    of: int = 0
    power: float = float("nan")  # at the spread that was seen and the seeds that finished
    seeds_needed: int | None = None  # for power 0.8 at that spread


def judge(e: Experiment, records: dict[str, Record]) -> list[Verdict]:
    """A verdict for each claim of an experiment of the second round."""
    keys = {(arm, seed): s.key for arm, seed, s in e.runs()}
    runs: Runs = {(arm, seed): records.get(keys.get((arm, seed), "")) for arm in e.arms for seed in e.seeds}
    open_claims = [c for c in e.claims if not c.not_testable]
    found = {c.id: tuple(measure(x, runs, e.seeds) for x in c.contrasts) for c in open_claims}
    families = [[c for c in open_claims if c.source == source] for source in ("paper", "ours")]
    p_for: dict[str, float] = {}
    p_against: dict[str, float] = {}
    for family in families:
        raw = [found[c.id] for c in family]
        p_for |= dict(zip((c.id for c in family), holm([max(f.p_for for f in fs) for fs in raw]), strict=True))
        turned = [min(1.0, len(fs) * min(f.p_against for f in fs)) for fs in raw]
        p_against |= dict(zip((c.id for c in family), holm(turned), strict=True))
    size = {c.id: len(family) for family in families for c in family}
    verdicts = []
    for c in e.claims:
        if c.not_testable:
            verdicts.append(Verdict(c, "not testable here", c.not_testable))
            continue
        v = Verdict(c, "", "", found[c.id], p_for[c.id], p_against[c.id], min(f.n for f in found[c.id]), len(e.seeds))
        level = ALPHA / size[c.id]
        if v.n > 1:
            powers = [power(f.contrast, f.sd, f.n, level) for f in v.found]
            v = replace(v, power=min(powers), seeds_needed=max(seeds_for(f.contrast, f.sd, level) for f in v.found))
        word, why = decide(v, gate(c, runs, e.seeds))
        verdicts.append(replace(v, word=word, why=why))
    return verdicts


def gate(c: Claim, runs: Runs, seeds: Sequence[int]) -> float | None:
    """By how much the reward of the claim's gate rises, the mean over the seeds that finished; None without one."""
    if not c.gate:
        return None
    gain = Contrast((c.gate,), "reward", "gain", more_than=0)
    gains = [value(r, gain) for seed in seeds if (r := runs[c.gate, seed])]
    return float(np.mean(gains)) if gains else None


def decide(v: Verdict, gain: float | None) -> tuple[str, str]:
    if gain is not None and gain <= 0:
        why = f"{v.claim.gate} itself does not learn there: its reward changes by {100 * gain:+.1f} points"
        return "not testable here", why
    if v.n < v.of:
        return "not finished", f"{v.n} of {v.of} seeds so far"
    good = "reproduced" if v.claim.source == "paper" else "holds"
    if v.p_for < ALPHA:
        return good, ""
    if v.p_against < ALPHA:
        return "refuted", "the opposite is shown" if v.found[0].contrast.within is None else "the difference is larger"
    held = sum(p < ALPHA for p in holm([f.p_for for f in v.found]))
    if held and len(v.found) > 1:
        return "in part", f"{held} of {len(v.found)} contrasts hold"
    return "undecided", ""


def measure(c: Contrast, runs: Runs, seeds: Sequence[int]) -> Found:
    """The contrast over the seeds of which every arm has finished."""
    if c.ratio and c.metric not in POSITIVE:
        raise InputError(f"{c.metric} can be 0: it is compared by differences, not by ratios.")
    values = []
    for seed in seeds:
        pair = [runs[arm, seed] for arm in c.arms]
        if all(pair):
            x = [value(r, c) for r in pair if r]
            x = [log(y) for y in x] if c.ratio else x
            values.append(x[0] - x[1] if len(x) == 2 else x[0])
    return test(c, values)


def bounds(c: Contrast) -> list[tuple[int, float]]:
    """(side, bound) on the scale of d: what is claimed lies above (1) or below (-1)."""
    scale = log if c.ratio else float
    if c.within is not None:
        return [(1, -scale(c.within)), (-1, scale(c.within))]
    return [(1 if c.more_than is not None else -1, scale(c.bound))]


def test(c: Contrast, values: Sequence[float]) -> Found:
    n, d = len(values), np.asarray(values, float)
    if n == 0:
        return Found(c, ())
    if n == 1:
        return Found(c, tuple(values), float(d[0]))
    mean, sd = float(d.mean()), float(d.std(ddof=1))
    se, half = sd / sqrt(n), float(t.ppf(0.975, n - 1)) * sd / sqrt(n)
    tail = lambda far: min(1.0, 2 * float(t.sf(far / se, n - 1))) if se > 0 else float(far <= 0)
    p_for = max(tail(side * (mean - bound)) for side, bound in bounds(c))
    p_against = min(tail(-side * (mean - bound)) for side, bound in bounds(c))
    return Found(c, tuple(values), mean, mean - half, mean + half, sd, p_for, p_against)


def power(c: Contrast, sd: float, n: int, level: float) -> float:
    """Of the t-test at this level for the registered effect, or for none where "comparable" is claimed."""
    if (c.effect is None and c.within is None) or n < 2:
        return float("nan")
    if sd == 0:
        return 1.0
    true = 0.0 if c.within is not None else (log(c.effect) if c.ratio else float(c.effect))  # type: ignore[arg-type]
    missed = 0.0
    for side, bound in bounds(c):
        far = side * (true - bound) * sqrt(n) / sd
        missed += float(nct.cdf(t.ppf(1 - level / 2, n - 1), n - 1, far))
    return max(0.0, 1.0 - missed)


def ranks(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Spearman's correlation, and the share of orders of y with one at least as far from 0 (all, or 20,000 drawn)."""
    a, b = (rankdata(z) - (len(z) + 1) / 2 for z in (x, y))
    size = sqrt(float((a @ a) * (b @ b)))
    if not size:
        return 0.0, 1.0
    rng = np.random.default_rng(0)
    orders = permutations(b) if len(b) < 9 else (rng.permutation(b) for _ in range(20_000))
    beyond = [abs(float(a @ np.array(z))) >= abs(float(a @ b)) - 1e-9 for z in orders]
    return float(a @ b) / size, float(np.mean(beyond))


def seeds_for(c: Contrast, sd: float, level: float, wanted: float = 0.8, most: int = 200) -> int:
    """The fewest seeds with that power, `most` if that is not enough."""
    return next((n for n in range(2, most) if power(c, sd, n, level) >= wanted), most)
