# SPDX-License-Identifier: Apache-2.0
"""From runs to effects: paired differences, and the intervals by which many are judged.

d[seed, base] is the value of a question (questions.py) for one seed and one base, and
D[seed] is its mean over the bases. With n seeds, mean D ± t_{n-1} sd(D) / √n, with t at
level α / m, is one of m simultaneous intervals of a family (Bonferroni). There are up to
two looks; at the second an interval is the intersection of both, or the second alone if
they do not meet.

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
    Term,
    answers,
    number,
)

# (arm, group, base, seed) -> record
Runs = dict[tuple[str, str, str, int], RunRecord]
Places = NDArray[np.int_]  # indices of seeds
PLAIN_LEVEL = 0.05  # of an interval that is corrected for nothing: 95 %


@dataclass(frozen=True)
class Look:
    """A moment at which effects are judged: once so many seeds are finished.

    Attributes:
        seeds: how many.
        level: the probability, at most, that an interval of a family misses its true
            value.
    """

    seeds: int
    level: float


@dataclass(frozen=True)
class Effect:
    """The estimate of a question, on the scale of d.

    Attributes:
        n: seeds.
        mean: of `values`.
        low: end of the interval; infinite before the first look.
        high: the other end.
        sd: standard deviation of `values`, with n - 1; nan for one seed.
        by_base: the mean over the seeds on each base.
        values: D of each seed.
        reached: False where a curve has no point at equal Avg@32; then `mean`, the
            interval and `values` are missing.
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
        """What the interval shows: one of the words at the top of this file, with the
        margin as a number.
        """
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


# ---- differences ---------------------------------------------------------------------
def finished(
    question: Question, runs: Runs, seeds: Sequence[int], bases: Sequence[str]
) -> list[int]:
    """Return the seeds, in order, of which every run of the question is there and has
    its numbers.
    """
    return [seed for seed in seeds if _complete(question, runs, seed, bases)]


def _complete(question: Question, runs: Runs, seed: int, bases: Sequence[str]) -> bool:
    """Return whether, for one seed, every run of the question is there and has its
    numbers.
    """
    for term in question.terms:
        for base in bases:
            run = runs.get((term.arm, term.group, base, seed))
            if run is None:
                return False
            # a curve has its numbers always: 0 where a stopped run did not get
            if question.metric != EQUAL and not answers(run, term, question.ratio):
                return False
    return True


def differences(
    question: Question, runs: Runs, seeds: Sequence[int], bases: Sequence[str]
) -> Numbers:
    """Return d[seed, base]: the weighted sum of the question's numbers, or of their
    logarithms if it is a ratio.

    Args:
        question: what is compared.
        runs: all runs that it needs.
        seeds: finished ones.
        bases: of all its groups.

    Returns:
        Numbers [seeds, bases]; of a difference at equal Avg@32 the jackknife's
        pseudo-values, which are NaN where a curve does not reach.

    Raises:
        KeyError: a run is missing.
        InputError: a run lacks a number.
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
    """Return the highest Best@32 that is to be had with Avg@32 of the level or more.

    The candidates are the points with at least this Avg@32, and the segments between
    such a point and one below the level: who answers some problems by one decoding and
    the rest by another gets a point between.

    Args:
        points: (Avg@32, Best@32), [n, 2].
        level: of Avg@32.

    Returns:
        Best@32; NaN if no point has this Avg@32.
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
    """Return the first arm's frontier minus the other's, in Best@32, at one Avg@32:
    half-way between what both have by a decoding at the last evaluation.

    Args:
        first: curves [seeds, steps, decodings, 2], of Avg@32 and Best@32; they are
            averaged over the seeds.
        other: likewise.
        decoding: its index.

    Returns:
        Points of Best@32; NaN if an arm does not reach this Avg@32.
    """
    mine = first.mean(0)
    others = other.mean(0)
    level = float(mine[-1, decoding, 0] + others[-1, decoding, 0]) / 2
    of_first = frontier(mine.reshape(-1, 2), level)
    return of_first - frontier(others.reshape(-1, 2), level)


def jackknife(statistic: Callable[[Places], float], n: int) -> Numbers:
    """Return the pseudo-values n θ - (n-1) θ_(-k) of a statistic, one for each seed k:
    θ is of all seeds, θ_(-k) of all but k.

    Args:
        statistic: takes the indices of the seeds that it is computed of.
        n: how many seeds, at least 2.
    """
    every = np.arange(n)
    without = np.array([statistic(np.delete(every, k)) for k in every])
    return n * statistic(every) - (n - 1) * without


def _pseudo_values(
    question: Question, runs: Runs, seeds: Sequence[int], base: str
) -> Numbers:
    """Return the jackknife's pseudo-values of the distance of two arms at equal Avg@32,
    on one base, [seeds].
    """

    def curves(term: Term) -> Numbers:
        """Return the curve of each seed, [seeds, steps, decodings, 2]."""
        of_term = [runs[term.arm, term.group, base, seed] for seed in seeds]
        return np.stack([questions.curve(run) for run in of_term])

    first, other = map(curves, question.terms)
    term = question.terms[0]
    some_run = runs[term.arm, term.group, base, seeds[0]]
    decodings = some_run["settings"]["decodings"]
    names = [questions.decoding_name(top_p) for top_p in decodings]
    at = names.index(question.decoding)

    def distance(kept: Places) -> float:
        """Return the distance of the two arms, by the seeds at these indices."""
        return at_equal_avg(first[kept], other[kept], at)

    return jackknife(distance, len(seeds))


# ---- intervals -----------------------------------------------------------------------
def interval(D: Numbers, level: float) -> tuple[float, float]:
    """Return the ends of mean ± t_{n-1} sd / √n: Student's interval of the mean.

    Args:
        D: one number a seed, at least 2.
        level: 0.05 for a 95 % interval.
    """
    n = len(D)
    half = float(t.ppf(1 - level / 2, n - 1)) * float(D.std(ddof=1)) / sqrt(n)
    return float(D.mean()) - half, float(D.mean()) + half


def described(
    question: Question, d: Numbers, low: float = -inf, high: float = inf
) -> Effect:
    """Return the effect of these d[seed, base], with this interval.

    Args:
        question: what was compared.
        d: without a row the effect has no number; with a value that is not finite it
            has the number of seeds alone, and is out of reach.
        low: end of the interval.
        high: the other end.
    """
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
) -> Effect:
    """Return the effect over all finished seeds, with an interval that is corrected for
    nothing; without one, and so "not finished", below two seeds.

    Args:
        question: what is compared.
        runs: (arm, group, base, seed) -> record.
        seeds: of which the finished ones count.
        bases: of all its groups.
    """
    d = differences(question, runs, finished(question, runs, seeds, bases), bases)
    if len(d) < 2:
        return described(question, d)
    # equal numbers differ by 0, and not by the rounding error of their sums
    d = np.round(d, 9)
    return described(question, d, *interval(d.mean(1), PLAIN_LEVEL))


def at_looks(
    question: Question,
    runs: Runs,
    seeds: Sequence[int],
    bases: Sequence[str],
    looks: tuple[Look, Look],
    size: int,
) -> Effect:
    """Return the effect with its simultaneous interval at the last look that is due.

    Only the seeds count that are finished from the first one on, without a gap. Before
    the first look there is no interval; between the looks the effect is that of the
    first.

    Args:
        question: what is compared.
        runs: (arm, group, base, seed) -> record.
        seeds: all of the plan, in order.
        bases: of all its groups.
        looks: the first; the final one, with the seeds that are due.
        size: how many questions the family has.
    """
    first, final = looks
    n = _without_gaps(question, runs, seeds, bases)
    if n < first.seeds:
        # the jackknife of few seeds would show nothing
        if n == 0 or question.metric == EQUAL:
            return Effect(question)
        return described(question, differences(question, runs, seeds[:n], bases))
    early = differences(question, runs, seeds[: first.seeds], bases)
    low, high = interval(early.mean(1), first.level / size)
    if n < final.seeds:
        return described(question, early, low, high)
    late = differences(question, runs, seeds[: final.seeds], bases)
    low_now, high_now = interval(late.mean(1), final.level / size)
    low_of_both = max(low, low_now)
    high_of_both = min(high, high_now)
    if low_of_both < high_of_both:
        return described(question, late, low_of_both, high_of_both)
    return described(question, late, low_now, high_now)


def _without_gaps(
    question: Question, runs: Runs, seeds: Sequence[int], bases: Sequence[str]
) -> int:
    """Return how many seeds are finished from the first one on, without a gap."""
    there = set(finished(question, runs, seeds, bases))
    return next((i for i, seed in enumerate(seeds) if seed not in there), len(seeds))


# ---- power ---------------------------------------------------------------------------
def power(effect: float, sd: float, n: int, level: float) -> float:
    """Return the probability that Student's interval at this level lies on the effect's
    side of 0: the power of the two-sided t-test, where a rejection on the other side
    does not count.

    Args:
        effect: its true size, above 0.
        sd: of one seed; for 0 the power is 1.
        n: seeds, at least 2.
        level: 0.05 for a 95 % interval.
    """
    if not sd:
        return 1.0
    far = effect * sqrt(n) / sd  # the noncentrality
    return float(nct.sf(t.ppf(1 - level / 2, n - 1), n - 1, far))


def fewest(power_of: Callable[[int], float], wanted: float, most: int) -> int:
    """Return the fewest seeds, from 2 on, with the power wanted; `most` if none of
    fewer has it.
    """
    return next((n for n in range(2, most) if power_of(n) >= wanted), most)


def seeds_due(
    asked: Sequence[tuple[Question, Numbers]],
    planned: int,
    most: int,
    level: float,
    wanted: float,
) -> int:
    """Return the final number of seeds: enough for each number's margin, by the spread
    at the first look.

    The spread of a number is pooled over all questions with this number and margin.

    Args:
        asked: each question of the primary families, with d[seed, base] at the first
            look.
        planned: the least.
        most: no more than these.
        level: of one interval at the final look.
        wanted: the power for a true difference of the margin.
    """
    due = planned
    for (_, margin), variances in _spreads(asked).items():
        sd = sqrt(float(np.mean(variances)))
        enough = fewest(lambda n: power(margin, sd, n, level), wanted, most)  # noqa: B023
        due = max(due, enough)
    return due


def _spreads(
    asked: Sequence[tuple[Question, Numbers]],
) -> dict[tuple[str, float], list[float]]:
    """Return (name, margin) -> the variances of D over the seeds, one for each
    question.
    """
    found: dict[tuple[str, float], list[float]] = {}
    for question, d in asked:
        variance = float(d.mean(1).var(ddof=1))
        found.setdefault((question.name, question.margin), []).append(variance)
    return found
