# SPDX-License-Identifier: Apache-2.0
"""How rates are chosen, what is estimated and what is said of it: registered, with design.toml, before any run.

Rates. The score of a rate for a cell (method, staleness, source of lp_old) is the mean over bases and seeds of the
training reward in the last fifth of the steps, 0 for a run whose numbers ended being finite. The highest score is
taken, the lower rate where two are equal. If that is the lowest or the highest rate tried, the next one on that side is
tried as well, as far as there is one.

Effects. d(b, k) = x(UP, base b, seed k) - x(other, base b, seed k), each at its own rate, both of one staleness. D_k is
the mean over the bases of d(b, k): an effect on these bases together. With n seeds, mean D ± t_{n-1} sd(D) / √n, with t
at level α / m, is one of m simultaneous intervals of a family (Bonferroni). A run that stopped counts as 0 in every
evaluation that it did not reach.

    primary    avg, best (Avg@32, Best@32 at the end, top-p 0.7, points) at each staleness, in two families: UP minus
               DAPO, and UP minus each neighbour
    secondary  entropy (nats; mean of the last fifth), malformed (points; likewise), survival (steps), each a family;
               slope: of D in the staleness, by least squares, per 16 rollouts, avg and best, one family;
               passes: Pass@k, k = 1, 2, 4, ..., 32, at the greatest staleness, one family;
               recomputed: avg and best, UP minus DAPO, lp_old recomputed, one family

Survival is the restricted mean of T: the first step at which the reward (means of five steps) is below half of the
highest so far, or the step at which the run stopped, or all steps if neither happened. The reward is the sampler's.

Looks. Two: at the first number of seeds, and at the final one, with the levels of design.toml, which add up to 0.05.
At the final look an interval is the intersection of both (of the final one alone if they do not meet). The final number
is raised, up to the most, where the spread at the first look asks for it: power for the effects of interest, at the
level of the final look, from the variance of D alone.

    gains, loses      the interval lies above 0, below 0 (followed by "by less than the margin" where it does)
    no difference     not these, and the interval lies within the effect of interest on both sides
    undecided         the interval holds 0 and reaches beyond the margin
    not finished      fewer seeds than the first look needs

Words of the first look stand unless the final interval says otherwise. The bases are two: the effect on each is printed
beside the mean, and no interval for bases in general, which would need more of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, inf, sqrt
from typing import Any

import numpy as np
from scipy.stats import nct, t

from repro.mini.study.results import Record

WHERE = "test/top_p_0.7"
PRIMARY = ("avg", "best")
SECONDARY = ("entropy", "malformed", "survival")
PASSES = (1, 2, 4, 8, 16, 32)
PER = 16  # rollouts: the unit of a slope


@dataclass(frozen=True)
class Cell:
    arm: str
    staleness: int
    old: str = "sampler"

    def __str__(self) -> str:
        return f"{self.arm}, s = {self.staleness}{', recomputed' if self.old == 'recomputed' else ''}"


# ---- rates -----------------------------------------------------------------------------------------------------------
def score(records: Sequence[Record]) -> float:
    return float(np.mean([last_fifth(r, "reward") if r["status"] == "done" else 0.0 for r in records]))


def choose(scores: dict[float, float | None], grid: Sequence[float]) -> tuple[float | None, list[float]]:
    """The rate, or None and the rates that must be tried before it can be told."""
    order = sorted(scores)
    tried = [r for r in order if r in grid]
    while True:
        missing = [r for r in tried if scores[r] is None]
        if missing:
            return None, missing
        best = max(tried, key=lambda r: (scores[r], -r))
        at = order.index(best)
        if best == tried[0] and at > 0:
            tried = [order[at - 1], *tried]
        elif best == tried[-1] and at < len(order) - 1:
            tried = [*tried, order[at + 1]]
        else:
            return best, []


# ---- one number of one run -------------------------------------------------------------------------------------------
def number(r: Record, metric: str) -> float:
    if metric in PRIMARY:
        return 100 * r["evals"][WHERE][metric][-1] if r["status"] == "done" else 0.0
    if metric.startswith("pass@"):
        return 100 * pass_at(int(metric[5:]), r["counts"][WHERE]) if r["status"] == "done" else 0.0
    if metric == "entropy":
        return last_fifth(r, "entropy")
    if metric == "malformed":
        return 100 * (1 - last_fifth(r, "valid"))
    return survival(r)


def last_fifth(r: Record, metric: str) -> float:
    x = np.array(r["steps"][metric])
    x = x[np.isfinite(x)]
    return float(x[-max(1, len(x) // 5) :].mean())


def pass_at(k: int, counts: Sequence[int]) -> float:
    """Of counts[c], the problems of which c samples of n = len(counts) - 1 are right."""
    n = len(counts) - 1
    by_c = [(comb(n, k) - comb(n - c, k)) / comb(n, k) for c in range(n + 1)]
    return float(np.dot(by_c, counts) / sum(counts))


def survival(r: Record) -> float:
    steps, reward = r["steps"]["step"], np.array(r["steps"]["reward"])
    fallen = np.flatnonzero(reward < np.maximum.accumulate(reward) / 2)
    if len(fallen):
        return float(steps[fallen[0]])
    return float(r["settings"]["steps"] if r["status"] == "done" else steps[-1] + 1)


# ---- effects ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Effect:
    family: str
    metric: str
    other: str
    staleness: int | None  # None: a slope
    margin: float  # 0: none is registered
    n: int = 0
    mean: float = float("nan")
    low: float = -inf
    high: float = inf
    sd: float = float("nan")
    by_base: tuple[float, ...] = ()

    @property
    def word(self) -> str:
        if not np.isfinite([self.low, self.high]).all():
            return "not finished"
        within = -self.margin < self.low and self.high < self.margin
        if self.low > 0 or self.high < 0:
            word = "gains" if self.low > 0 else "loses"
            return f"{word} by less than {self.margin:g}" if within else word
        return "no difference" if within else "undecided"


Values = dict[tuple[Cell, str, int], Record | None]  # (cell, base, seed)


def effects(design: Any, records: dict[str, Record]) -> list[Effect]:
    """All families, in order; an effect whose seeds are too few has an infinite interval."""
    seeds, runs = design.main["seeds"], values(design, records)
    up, *others = design.arms
    oldest, levels = max(design.staleness), sorted(design.staleness)
    asked: list[tuple[str, str, str, int | None, str]] = [
        ("dapo" if other == "dapo" else "neighbours", metric, other, s, "sampler")
        for metric in PRIMARY for s in levels for other in others
    ]  # fmt: skip
    asked += [(metric, metric, other, s, "sampler") for metric in SECONDARY for s in levels for other in others]
    asked += [("slope", metric, other, None, "sampler") for metric in PRIMARY for other in others]
    asked += [("passes", f"pass@{k}", other, oldest, "sampler") for k in PASSES for other in others]
    again = design.recomputed
    asked += [("recomputed", metric, other, s, "recomputed")
              for metric in PRIMARY for s in again["staleness"] for other in again["arms"] if other != up]  # fmt: skip
    sizes = {family: sum(a[0] == family for a in asked) for family, *_ in asked}
    due = seeds_due(design, records)
    found = []
    for family, metric, other, s, old in asked:
        margin = design.interest.get(metric, 0.0) if family in ("dapo", "neighbours", "recomputed") else 0.0
        which = levels if s is None else [s]
        at = {x: differences(runs, design.bases, seeds, metric, (up, other), x, old) for x in which}
        per_seed = [slope([at[x][i] for x in at], list(at)) if s is None else at[s][i] for i in range(len(seeds))]
        e = Effect(family, metric, other, s, margin)
        found.append(looked(e, per_seed, sizes[family], design.stopping, due))
    return found


def values(design: Any, records: dict[str, Record]) -> Values:
    return {at: records.get(s.key) for at, s in design.main_runs(design.cells(), design.main["seeds"], records).items()}


def differences(
    runs: Values, bases, seeds, metric: str, arms: tuple[str, str], s: int, old: str
) -> list[np.ndarray | None]:
    """d(·, k) for each seed; None where a run of it is missing."""
    found: list[np.ndarray | None] = []
    for seed in seeds:
        pairs = [[runs.get((Cell(arm, s, old), b, seed)) for arm in arms] for b in bases]
        if all(r for pair in pairs for r in pair):
            found.append(np.array([number(x, metric) - number(y, metric) for x, y in pairs if x and y]))
        else:
            found.append(None)
    return found


def slope(ds: Sequence[np.ndarray | None], levels: Sequence[int]) -> np.ndarray | None:
    there = [d for d in ds if d is not None]
    if len(there) < len(ds):
        return None
    x = np.array(levels, float) - np.mean(levels)
    return PER * (x @ np.stack(there)) / (x @ x)


def looked(e: Effect, per_seed: Sequence[np.ndarray | None], m: int, stopping: dict[str, Any], due: int) -> Effect:
    """The effect with its interval at the looks that are due: seeds count from the first on, without gaps."""
    n = next((i for i, d in enumerate(per_seed) if d is None), len(per_seed))
    first, final = stopping["first"], stopping["final"]
    if n < first["seeds"]:
        there = np.array([d for d in per_seed[:n] if d is not None])
        return with_(e, there, -inf, inf)
    early = np.array(per_seed[: first["seeds"]], float)
    low, high = interval(early.mean(1), first["level"] / m)
    if n < due:
        return with_(e, early, low, high)
    late = np.array(per_seed[:due], float)
    low2, high2 = interval(late.mean(1), final["level"] / m)
    meet = max(low, low2) < min(high, high2)
    return with_(e, late, max(low, low2) if meet else low2, min(high, high2) if meet else high2)


def with_(e: Effect, d: np.ndarray, low: float, high: float) -> Effect:
    if not len(d):
        return e
    D = d.mean(1)
    sd = float(D.std(ddof=1)) if len(D) > 1 else float("nan")
    by_base = tuple(float(x) for x in d.mean(0))
    return Effect(e.family, e.metric, e.other, e.staleness, e.margin, len(D), float(D.mean()), low, high, sd, by_base)


def interval(D: np.ndarray, level: float) -> tuple[float, float]:
    n = len(D)
    half = float(t.ppf(1 - level / 2, n - 1)) * float(D.std(ddof=1)) / sqrt(n)
    return float(D.mean()) - half, float(D.mean()) + half


# ---- how many seeds --------------------------------------------------------------------------------------------------
def power(effect: float, sd: float, n: int, level: float) -> float:
    """Of the two-sided t-test: the probability that the interval at this level lies on the effect's side of 0."""
    return float(nct.sf(t.ppf(1 - level / 2, n - 1), n - 1, effect * sqrt(n) / sd)) if sd else 1.0


def seeds_due(design: Any, records: dict[str, Record]) -> int:
    """The final number of seeds: as planned until the first look, then by the spread that was seen there."""
    first, final = design.stopping["first"], design.stopping["final"]
    seeds, runs, m = design.main["seeds"][: first["seeds"]], values(design, records), largest(design)
    up, *others = design.arms
    due = final["seeds"]
    for metric in PRIMARY:
        variances = []
        for s in design.staleness:
            for other in others:
                d = differences(runs, design.bases, seeds, metric, (up, other), s, "sampler")
                if any(x is None for x in d):
                    return final["seeds"]
                variances.append(np.array(d, float).mean(1).var(ddof=1))
        sd = sqrt(float(np.mean(variances)))
        level = final["level"] / m
        found = (power(design.interest[metric], sd, n, level) for n in range(2, final["most"]))
        enough = (n for n, p in enumerate(found, 2) if p >= design.stopping["power"])
        due = max(due, next(enough, final["most"]))
    return due


def largest(design: Any) -> int:
    """The size of the larger primary family, which has the strictest level."""
    return len(PRIMARY) * len(design.staleness) * (len(design.arms) - 2)
