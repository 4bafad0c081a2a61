# SPDX-License-Identifier: Apache-2.0
"""How rates and coefficients are chosen, what is estimated, and what is said of it.

Choice. Each cell (an arm in a group) has its own rate, and coefficient where it has one, by the score of its search:

    "reward"      the mean over bases and seeds of the training reward in the last fifth of the steps
    "exchange"    max over the decodings of Best@32 + exchange · Avg@32 (points; at the end, mean over bases and seeds):
                  what the configuration is worth to someone who takes the best decoding and gives `exchange` points of
                  Best@32 for one of Avg@32

A run that stopped scores 0. The highest score is taken, the lower rate or coefficient where two are equal. If that is
the lowest or highest rate tried, the next one on that side is tried as well, as far as there is one.

Effects. For a metric that is a number of one run, d(b, k) = x(first, base b, seed k) - x(other, base b, seed k).

Equal Avg@32. The points of an arm on a base are (Avg@32, Best@32), means over the seeds, one for each decoding and each
evaluated step. A user who answers some of the problems by one setting and the rest by another gets the point between,
and a user who asks for a smaller Avg@32 may get more. So the arm's frontier is

    F(a) = the highest Best@32 on a segment between two of its points, or at one of them, with Avg@32 of at least a

"equal_avg/D" is F_first(a) - F_other(a), where a is the Avg@32 half-way between those that the two arms have at the end
by decoding D, on this base: neither arm is nearer to a corner of its frontier, which would bend the mean of a noisy
level. Where a is beyond every point of an arm, the effect is out of reach, and nothing is said.
Its d(b, k) are the jackknife's pseudo-values n θ - (n-1) θ_(-k), θ_(-k) being θ without seed k of all arms. Frontiers
of means, not means of frontiers: one run's Avg@32 is uncertain by a point, which may be worth ten of Best@32.

Intervals. D_k is the mean over the bases of d(b, k). With n seeds, mean D ± t_{n-1} sd(D) / √n, with t at level α / m,
is one of m simultaneous intervals of a family (Bonferroni). A run that stopped counts as 0 in every evaluation that it
did not reach. A slope is of D in the staleness, by least squares, per 16 rollouts.

Looks. Two: at the first number of seeds, and at the final one, with the plan's levels, which add up to 0.05. At the
final look an interval is the intersection of both (of the final one alone if they do not meet). The final number is
raised, up to the most, where the spread at the first look asks for it, in the primary families.

    gains, loses      the interval lies above 0, below 0 (followed by "by less than the margin" where it does)
    no difference     not these, and the interval lies within the margin on both sides
    undecided         the interval holds 0 and reaches beyond the margin
    out of reach      equal Avg@32 only
    not finished      fewer seeds than the first look needs

Against one control, over the levels of Avg@32 of the answer's family:

    more              the first arm gains at one level at least, and loses at none
    less              it loses at one level at least, and gains at none
    a trade           it gains at one level and loses at another
    nothing more      none of these, and at every level the interval ends below the margin
    undecided         none of these (a level that is out of reach is undecided)

The answer is "yes" if the first arm is more than every control of the answer, "no" if it is nothing more or less than
one of them at least, and else "undecided". As the intervals are simultaneous, each of the two is wrong in at most 5 %
of repetitions, as far as the intervals hold what they promise: tests/mini/test_mini_registered.py simulates it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, nan, sqrt
from typing import Any

import numpy as np

from repro.mini.stale.rule import choose, interval, last_fifth, pass_at, power, slope, survival
from repro.mini.study.results import Record

__all__ = ["choose"]  # of rates, as registered for the experiment on stale data

DECODING = "top_p_0.7"  # of a metric that names none
EQUAL = "equal_avg"
Values = dict[tuple[Any, str, int], Record | None]  # (cell, base, seed) -> record


# ---- choice ----------------------------------------------------------------------------------------------------------
def score(records: Sequence[Record], search: dict[str, Any]) -> float:
    """Of one rate and coefficient, from all runs of its search."""
    if search["score"] == "reward":
        return float(np.mean([last_fifth(r, "reward") if r["status"] == "done" else 0.0 for r in records]))
    points = np.mean([curve(r)[-1] for r in records], axis=0)
    return float(np.max(points[:, 1] + search["exchange"] * points[:, 0]))


def choose_coefficient(scores: dict[float, float | None]) -> tuple[float | None, list[float]]:
    """The coefficient, or None and those that must be tried before it can be told."""
    tried = sorted(scores)
    missing = [value for value in tried if scores[value] is None]
    if missing:
        return None, missing
    return max(tried, key=lambda value: (scores[value], -value)), []


# ---- one number of one run -------------------------------------------------------------------------------------------
def number(r: Record, metric: str) -> float:
    """METRIC or METRIC/DECODING of one run, in points where it is a share."""
    name, _, decoding = metric.partition("/")
    where = f"test/{decoding or DECODING}"
    if name in ("avg", "best", "maj"):
        return 100 * r["evals"][where][name][-1] if r["status"] == "done" else 0.0
    if name.startswith("pass@"):
        return 100 * pass_at(int(name.removeprefix("pass@")), r["counts"][where]) if r["status"] == "done" else 0.0
    if name == "entropy":
        return last_fifth(r, "entropy")
    if name == "malformed":
        return 100 * (1 - last_fifth(r, "valid"))
    return survival(r)


def curve(r: Record) -> np.ndarray:
    """Avg@32 and Best@32 in points, [evaluated steps, decodings, 2]; 0 where the run did not get."""
    s = r["settings"]
    decodings = [f"test/{name_of(top_p)}" for top_p in s["decodings"]]
    evaluated = sum(1 for step in range(1, s["steps"] + 1) if step % s["eval_every"] == 0 or step == s["steps"])
    found = np.zeros((evaluated, len(decodings), 2))
    for i, decoding in enumerate(decodings):
        for j, metric in enumerate(("avg", "best")):
            column = r["evals"].get(decoding, {}).get(metric, [])
            found[: len(column), i, j] = 100 * np.array(column)
    return found


def name_of(top_p: float) -> str:
    """As in the keys of a record."""
    return "t_1" if top_p == 1 else f"top_p_{top_p:g}"


# ---- equal Avg@32 ----------------------------------------------------------------------------------------------------
def frontier(points: np.ndarray, a: float) -> float:
    """F(a) of points [n, 2] of (Avg@32, Best@32); NaN beyond the greatest Avg@32."""
    reach = points[:, 0] >= a
    if not reach.any():
        return nan
    above, below = points[reach], points[~reach]
    highest = above[:, 1].max()
    if not len(below):
        return float(highest)
    share = (a - below[:, None, 0]) / (above[None, :, 0] - below[:, None, 0])
    between = below[:, None, 1] + share * (above[None, :, 1] - below[:, None, 1])
    return float(max(highest, between.max()))


def at_equal_avg(first: np.ndarray, other: np.ndarray, decoding: int) -> float:
    """F_first(a) - F_other(a) of curves [seeds, steps, decodings, 2], a half-way by the decoding of this index."""
    mine, others = first.mean(0), other.mean(0)
    level = (mine[-1, decoding, 0] + others[-1, decoding, 0]) / 2
    return frontier(mine.reshape(-1, 2), level) - frontier(others.reshape(-1, 2), level)


def jackknife(statistic: Callable[[np.ndarray], float], n: int) -> np.ndarray:
    """The n pseudo-values of a statistic of which seeds are there."""
    every = np.arange(n)
    without = np.array([statistic(np.delete(every, k)) for k in every])
    return n * statistic(every) - (n - 1) * without


# ---- effects ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Effect:
    family: str
    metric: str
    first: str
    other: str
    group: str  # "": a slope over the groups of the family
    margin: float  # 0: none is registered
    n: int = 0
    mean: float = nan
    low: float = -inf
    high: float = inf
    sd: float = nan
    by_base: tuple[float, ...] = ()
    reached: bool = True

    @property
    def word(self) -> str:
        if not self.reached:
            return "out of reach"
        if not np.isfinite([self.low, self.high]).all():
            return "not finished"
        within = -self.margin < self.low and self.high < self.margin
        if self.low > 0 or self.high < 0:
            word = "gains" if self.low > 0 else "loses"
            return f"{word} by less than {self.margin:g}" if within else word
        return "no difference" if within else "undecided"


def effects(plan: Any, records: dict[str, Record]) -> list[Effect]:
    """All families in the order of the plan; an effect whose seeds are too few has an infinite interval."""
    values, due = values_of(plan, records), seeds_due(plan, records)
    found = []
    for family in plan.families:
        asked = asked_of(family)
        for e in asked:
            found.append(looked(e, plan, family, values, len(asked), due))
    return found


def asked_of(family: dict[str, Any]) -> list[Effect]:
    """The effects of a family, without numbers."""
    groups = [""] if family.get("slope") else family["groups"]
    margins = family.get("margins", {})
    return [
        Effect(family["name"], metric, family["first"], other, group, margins.get(metric, 0.0))
        for metric in family["metrics"]
        for group in groups
        for other in family["others"]
    ]


def values_of(plan: Any, records: dict[str, Record]) -> Values:
    """The record of each run of the experiment proper, None where it is missing."""
    runs = plan.main_runs(plan.cells(), plan.main["seeds"], records)
    return {at: records.get(run.key) for at, run in runs.items()}


def per_seed(e: Effect, plan: Any, family: dict[str, Any], values: Values, seeds: Sequence[int]) -> np.ndarray:
    """d(b, k) of the seeds, [seeds, bases]. All runs are there."""
    if e.group:
        return in_group(e, plan, values, seeds, e.group)
    by_group = [in_group(e, plan, values, seeds, name) for name in family["groups"]]
    levels = [plan.group(name)["settings"]["staleness"] for name in family["groups"]]
    slopes = [slope([d[k] for d in by_group], levels) for k in range(len(seeds))]
    return np.array(slopes, float)


def in_group(e: Effect, plan: Any, values: Values, seeds: Sequence[int], group: str) -> np.ndarray:
    """d(b, k) of the seeds in one group, [seeds, bases]."""
    columns = []
    for base in plan.group(group)["bases"]:
        runs = [[values[(arm, group), base, seed] for seed in seeds] for arm in (e.first, e.other)]
        if is_equal(e.metric):
            columns.append(pseudo_values(e.metric.partition("/")[2], runs))
        else:
            first, other = ([number(r, e.metric) for r in of_arm if r] for of_arm in runs)
            columns.append(np.array(first) - np.array(other))
    return np.stack(columns, 1)


def is_equal(metric: str) -> bool:
    """Whether the metric is a difference at equal Avg@32, and no number of one run."""
    return metric.partition("/")[0] == EQUAL


def pseudo_values(decoding: str, runs: Sequence[Sequence[Record | None]]) -> np.ndarray:
    """Of the difference at equal Avg@32, from the runs of the first and the other arm on one base."""
    first, other = (np.stack([curve(r) for r in of_arm if r]) for of_arm in runs)
    names = [name_of(top_p) for r in runs[0][:1] if r for top_p in r["settings"]["decodings"]]
    at = names.index(decoding)
    return jackknife(lambda seeds: at_equal_avg(first[seeds], other[seeds], at), len(first))


def complete(e: Effect, plan: Any, family: dict[str, Any], values: Values) -> int:
    """How many seeds have all runs of the effect: from the first on, without gaps."""
    groups = [e.group] if e.group else family["groups"]
    for n, seed in enumerate(plan.main["seeds"]):
        for group in groups:
            for base in plan.group(group)["bases"]:
                if not all(values.get(((arm, group), base, seed)) for arm in (e.first, e.other)):
                    return n
    return len(plan.main["seeds"])


def looked(e: Effect, plan: Any, family: dict[str, Any], values: Values, m: int, due: int) -> Effect:
    """The effect with its interval at the looks that are due."""
    n = complete(e, plan, family, values)
    first, final, seeds = plan.stopping["first"], plan.stopping["final"], plan.main["seeds"]
    if n < first["seeds"]:
        return (
            e
            if n == 0 or is_equal(e.metric)
            else with_numbers(e, per_seed(e, plan, family, values, seeds[:n]), -inf, inf)
        )
    early = per_seed(e, plan, family, values, seeds[: first["seeds"]])
    low, high = interval(early.mean(1), first["level"] / m)
    if n < due:
        return with_numbers(e, early, low, high)
    late = per_seed(e, plan, family, values, seeds[:due])
    low2, high2 = interval(late.mean(1), final["level"] / m)
    meet = max(low, low2) < min(high, high2)
    return with_numbers(e, late, max(low, low2) if meet else low2, min(high, high2) if meet else high2)


def with_numbers(e: Effect, d: np.ndarray, low: float, high: float) -> Effect:
    """The effect with these d(b, k) and this interval."""
    if not np.isfinite(d).all():
        return replace(e, n=len(d), reached=False)
    D = d.mean(1)
    sd = float(D.std(ddof=1)) if len(D) > 1 else nan
    by_base = tuple(float(x) for x in d.mean(0))
    return replace(e, n=len(D), mean=float(D.mean()), low=low, high=high, sd=sd, by_base=by_base)


# ---- how many seeds --------------------------------------------------------------------------------------------------
def seeds_due(plan: Any, records: dict[str, Record]) -> int:
    """The final number of seeds: as planned until the first look, then by the spread that was seen there."""
    first, final = plan.stopping["first"], plan.stopping["final"]
    primary = [family for family in plan.families if family.get("primary")]
    if final["most"] <= final["seeds"]:
        return int(final["seeds"])
    values = values_of(plan, records)
    asked = [(e, family) for family in primary for e in asked_of(family)]
    if any(complete(e, plan, family, values) < first["seeds"] for e, family in asked):
        return int(final["seeds"])
    level = final["level"] / max(len(asked_of(family)) for family in primary)
    due = final["seeds"]
    margins = {e.metric: e.margin for e, _ in asked}
    for metric, margin in margins.items():
        seeds = plan.main["seeds"][: first["seeds"]]
        spreads = [per_seed(e, plan, f, values, seeds).mean(1).var(ddof=1) for e, f in asked if e.metric == metric]
        sd = sqrt(float(np.mean(spreads)))
        found = (power(margin, sd, n, level) for n in range(2, final["most"]))
        enough = (n for n, p in enumerate(found, 2) if p >= plan.stopping["power"])
        due = max(due, next(enough, final["most"]))
    return int(due)


# ---- the answer ------------------------------------------------------------------------------------------------------
def against(found: Sequence[Effect], plan: Any, control: str) -> str:
    """What the first arm is against one control, over the levels of Avg@32."""
    wanted = plan.answer
    of_control = [e for e in found if (e.family, e.group, e.other) == (wanted["family"], wanted["group"], control)]
    words = [e.word for e in of_control]
    if "not finished" in words:
        return "not finished"
    gains = any(word.startswith("gains") for word in words)
    loses = any(word.startswith("loses") for word in words)
    if gains and loses:
        return "a trade"
    if gains or loses:
        return "more" if gains else "less"
    return "nothing more" if all(e.reached and e.high < e.margin for e in of_control) else "undecided"


def answer(found: Sequence[Effect], plan: Any) -> str:
    """Yes, no, undecided or not finished: is the first arm more than every control?"""
    words = [against(found, plan, control) for control in plan.answer["controls"]]
    if "not finished" in words:
        return "not finished"
    if all(word == "more" for word in words):
        return "yes"
    return "no" if {"nothing more", "less"} & set(words) else "undecided"
