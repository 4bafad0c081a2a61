# SPDX-License-Identifier: Apache-2.0
"""From runs to effects: paired differences, and the intervals by which many are judged.

D_k is the mean over the bases of d(k, base). With n seeds, mean D ± t_{n-1}
sd(D) / √n, with t at level α / m, is one of m simultaneous intervals of a family
(Bonferroni). There are up to two looks; at the second an interval is the intersection of
both, or the second alone if they do not meet.

    gains, loses      the interval lies above 0, below 0 ("by less than the margin" where
                      it lies within it)
    no difference     not these, and the interval lies within the margin
    undecided         the interval holds 0 and reaches beyond the margin
    out of reach      of a difference at equal Avg@32: no such point on a curve
    not finished      fewer seeds than the first look needs
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log, nan, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import nct, t

from repro.mini.experiment import questions
from repro.mini.experiment.questions import (
    EQUAL,
    Numbers,
    Question,
    RunRecord,
    answers,
    number,
)

# (arm, group, base, seed) -> record
Runs = dict[tuple[str, str, str, int], RunRecord]
Places = NDArray[np.int_]  # of seeds


@dataclass(frozen=True)
class Look:
    """A moment at which effects are judged: once so many seeds are finished.

    Attributes:
        seeds: how many.
        level: of the intervals, over a family.
    """

    seeds: int
    level: float


@dataclass(frozen=True)
class Effect:
    """What the seeds say of a question, on the scale of d.

    Attributes:
        n: seeds.
        low: end of the interval; infinite before the first look.
        high: the other end.
        by_base: the mean over the seeds on each base.
        values: D of each seed.
        reached: False where a curve has no point at equal Avg@32.
    """

    question: Question
    n: int = 0
    mean: float = nan
    low: float = -inf
    high: float = inf
    sd: float = nan
    by_base: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    reached: bool = True

    @property
    def word(self) -> str:
        """What the interval says."""
        if not self.reached:
            return "out of reach"
        if not np.isfinite([self.low, self.high]).all():
            return "not finished"
        margin = self.question.margin
        within = -margin < self.low and self.high < margin
        if self.low > 0 or self.high < 0:
            word = "gains" if self.low > 0 else "loses"
            return f"{word} by less than {margin:g}" if within else word
        return "no difference" if within else "undecided"

    @property
    def decided(self) -> bool:
        """Whether the word says something of the effect."""
        return self.word not in ("not finished", "undecided", "out of reach")


# ---- differences ---------------------------------------------------------------------
def finished(
    question: Question, runs: Runs, seeds: Sequence[int], bases: Sequence[str]
) -> list[int]:
    """The seeds of which every run of the question is there and has its numbers."""
    return [seed for seed in seeds if _complete(question, runs, seed, bases)]


def _complete(question: Question, runs: Runs, seed: int, bases: Sequence[str]) -> bool:
    """The same for one seed."""
    for term in question.terms:
        for base in bases:
            run = runs.get((term.arm, term.group, base, seed))
            if run is None:
                return False
            if question.metric != EQUAL and not answers(run, term, question.ratio):
                return False
    return True


def differences(
    question: Question, runs: Runs, seeds: Sequence[int], bases: Sequence[str]
) -> Numbers:
    """d[seed, base].

    Args:
        question: what is compared.
        runs: all runs that it needs.
        seeds: finished ones.
        bases: of all its groups.

    Returns:
        Numbers [seeds, bases]; of a difference at equal Avg@32 the jackknife's
        pseudo-values, which are NaN where a curve does not reach.
    """
    if question.metric == EQUAL:
        columns = [_pseudo_values(question, runs, seeds, base) for base in bases]
        return np.stack(columns, 1)
    found = np.zeros((len(seeds), len(bases)))
    for term in question.terms:
        for i, seed in enumerate(seeds):
            for j, base in enumerate(bases):
                x = number(runs[term.arm, term.group, base, seed], term)
                found[i, j] += term.weight * (log(x) if question.ratio else x)
    return found


# ---- the distance of two curves at equal Avg@32 ----------------------------------------
def frontier(points: Numbers, level: float) -> float:
    """The highest Best@32 on a segment between two points with Avg@32 of the level.

    Who answers some problems by one decoding and the rest by another gets the point
    between, and who asks for less Avg@32 may get more.

    Args:
        points: (Avg@32, Best@32), [n, 2].
        level: of Avg@32.

    Returns:
        Best@32; NaN beyond the greatest Avg@32.
    """
    reach = points[:, 0] >= level
    if not reach.any():
        return nan
    above = points[reach]
    below = points[~reach]
    highest = float(above[:, 1].max())
    if not len(below):
        return highest
    share = (level - below[:, None, 0]) / (above[None, :, 0] - below[:, None, 0])
    between = below[:, None, 1] + share * (above[None, :, 1] - below[:, None, 1])
    return max(highest, float(between.max()))


def at_equal_avg(first: Numbers, other: Numbers, decoding: int) -> float:
    """The distance of two arms' frontiers, half-way between what both have by a
    decoding at the end.

    Args:
        first: curves [seeds, steps, decodings, 2].
        other: likewise.
        decoding: its place.
    """
    mine = first.mean(0)
    others = other.mean(0)
    level = float(mine[-1, decoding, 0] + others[-1, decoding, 0]) / 2
    of_first = frontier(mine.reshape(-1, 2), level)
    return of_first - frontier(others.reshape(-1, 2), level)


def jackknife(statistic: Callable[[Places], float], n: int) -> Numbers:
    """The pseudo-values n θ - (n-1) θ_(-k) of a statistic of which seeds are there.

    Args:
        statistic: of the places of the seeds.
        n: how many seeds.
    """
    every = np.arange(n)
    without = np.array([statistic(np.delete(every, k)) for k in every])
    return n * statistic(every) - (n - 1) * without


def _pseudo_values(
    question: Question, runs: Runs, seeds: Sequence[int], base: str
) -> Numbers:
    """Of the distance of two arms on one base."""
    first, other = (
        np.stack(
            [questions.curve(runs[term.arm, term.group, base, seed]) for seed in seeds]
        )
        for term in question.terms
    )
    term = question.terms[0]
    some_run = runs[term.arm, term.group, base, seeds[0]]
    decodings = some_run["settings"]["decodings"]
    names = [questions.decoding_name(top_p) for top_p in decodings]
    at = names.index(question.decoding)

    def distance(kept: Places) -> float:
        return at_equal_avg(first[kept], other[kept], at)

    return jackknife(distance, len(seeds))


# ---- intervals -----------------------------------------------------------------------
def interval(D: Numbers, level: float) -> tuple[float, float]:
    """mean ± t_{n-1} sd / √n, at this level."""
    n = len(D)
    half = float(t.ppf(1 - level / 2, n - 1)) * float(D.std(ddof=1)) / sqrt(n)
    return float(D.mean()) - half, float(D.mean()) + half


def described(
    question: Question, d: Numbers, low: float = -inf, high: float = inf
) -> Effect:
    """The effect of these d[seed, base], with this interval."""
    if not len(d):
        return Effect(question)
    if not np.isfinite(d).all():
        return Effect(question, n=len(d), reached=False)
    D = d.mean(1)
    return Effect(
        question,
        n=len(D),
        mean=float(D.mean()),
        low=low,
        high=high,
        sd=float(D.std(ddof=1)) if len(D) > 1 else nan,
        by_base=tuple(float(x) for x in d.mean(0)),
        values=tuple(float(x) for x in D),
    )


def plain(
    question: Question,
    runs: Runs,
    seeds: Sequence[int],
    bases: Sequence[str],
    level: float = 0.05,
) -> Effect:
    """The effect over all finished seeds, with an interval that is corrected for nothing.

    Args:
        question: what is compared.
        runs: (arm, group, base, seed) -> record.
        seeds: those that are asked about.
        bases: of all its groups.
        level: of the interval.
    """
    d = differences(question, runs, finished(question, runs, seeds, bases), bases)
    if len(d) < 2:
        return described(question, d)
    d = np.round(d, 9)  # a tie is 0, and not the rounding error of its two sums
    return described(question, d, *interval(d.mean(1), level))


def at_looks(
    question: Question,
    runs: Runs,
    seeds: Sequence[int],
    bases: Sequence[str],
    looks: tuple[Look, Look],
    size: int,
) -> Effect:
    """The effect with its simultaneous interval at the looks that are due.

    Seeds count from the first on, without gaps.

    Args:
        question: what is compared.
        runs: (arm, group, base, seed) -> record.
        seeds: all of the plan.
        bases: of all its groups.
        looks: the second one with the seeds that are due.
        size: how many questions the family has.
    """
    first, final = looks
    n = _without_gaps(question, runs, seeds, bases)
    if n < first.seeds:
        if n == 0 or question.metric == EQUAL:
            return Effect(question)
        return described(question, differences(question, runs, seeds[:n], bases))
    early = differences(question, runs, seeds[: first.seeds], bases)
    low, high = interval(early.mean(1), first.level / size)
    if n < final.seeds:
        return described(question, early, low, high)
    late = differences(question, runs, seeds[: final.seeds], bases)
    low_now, high_now = interval(late.mean(1), final.level / size)
    both = max(low, low_now), min(high, high_now)
    if both[0] < both[1]:
        return described(question, late, *both)
    return described(question, late, low_now, high_now)


def _without_gaps(
    question: Question, runs: Runs, seeds: Sequence[int], bases: Sequence[str]
) -> int:
    """How many seeds are finished from the first one on."""
    there = set(finished(question, runs, seeds, bases))
    return next((i for i, seed in enumerate(seeds) if seed not in there), len(seeds))


# ---- power ---------------------------------------------------------------------------
def power(effect: float, sd: float, n: int, level: float) -> float:
    """Of the two-sided t-test: the probability that the interval at this level lies on
    the effect's side of 0.
    """
    if not sd:
        return 1.0
    far = effect * sqrt(n) / sd
    return float(nct.sf(t.ppf(1 - level / 2, n - 1), n - 1, far))


def fewest(power_of: Callable[[int], float], wanted: float, most: int) -> int:
    """The fewest seeds with the power wanted; `most` if none of fewer has it."""
    return next((n for n in range(2, most) if power_of(n) >= wanted), most)


def seeds_due(
    asked: Sequence[tuple[Question, Numbers]],
    planned: int,
    most: int,
    level: float,
    wanted: float,
) -> int:
    """The final number of seeds, by the spread at the first look.

    Args:
        asked: each question of the primary families, with d[seed, base] at the first
            look.
        planned: the least.
        most: no more than these.
        level: of one interval at the final look.
        wanted: the power for the margin.
    """
    due = planned
    for margin, variances in _spreads(asked).items():
        sd = sqrt(float(np.mean(variances)))
        enough = fewest(lambda n: power(margin[1], sd, n, level), wanted, most)  # noqa: B023
        due = max(due, enough)
    return due


def _spreads(
    asked: Sequence[tuple[Question, Numbers]],
) -> dict[tuple[str, float], list[float]]:
    """(name, margin) -> the variance of D of each question."""
    found: dict[tuple[str, float], list[float]] = {}
    for question, d in asked:
        variance = float(d.mean(1).var(ddof=1))
        found.setdefault((question.name, question.margin), []).append(variance)
    return found
