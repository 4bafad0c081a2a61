# SPDX-License-Identifier: Apache-2.0
"""The records of the experiment on stale data, for README and docs/findings.md: effects that
were registered, and others that nobody registered.

An effect that nobody registered has a plain 95 % interval over the seeds, and decides
nothing. repro/mini/stale/post_hoc.toml has most of them.

A number, like "best/t_1", a group, like "s16" (16 rollouts stale), and an effect are those
of repro/mini/experiment; a method is one of its arms.
"""

from collections.abc import Iterable
from functools import cache

import numpy as np

from repro.mini.experiment import effects, plan, records
from repro.mini.experiment.effects import Effect, Places, Runs
from repro.mini.experiment.plan import Plan
from repro.mini.experiment.questions import (
    Numbers,
    Question,
    RunRecord,
    difference,
    term_of,
)

DRAWS = 10_000  # of the bootstrap over seeds
PATH = "test/top_p_0.7"  # the decoding that is evaluated along training


@cache
def _plan() -> Plan:
    """Return the plan of the experiment."""
    return plan.load("stale")


@cache
def _known() -> dict[str, records.RunRecord]:
    """Return the records of the experiment, by name."""
    return records.load(_plan().results)


@cache
def runs() -> Runs:
    """Return the runs of the experiment proper, by arm, group, base and seed."""
    return _plan().runs(_known())


def bases() -> list[str]:
    """Return the two bases, that of the higher Best@32 first."""
    found: list[str] = _plan().groups[0]["bases"]
    return found


@cache
def seeds() -> list[int]:
    """Return the seeds of which every method, staleness and base has a run."""
    by_cell: dict[tuple[str, str, str], set[int]] = {}
    for arm, group, base, seed in runs():
        by_cell.setdefault((arm, group, base), set()).add(seed)
    return sorted(set.intersection(*by_cell.values()))


@cache
def registered() -> dict[tuple[str, str, str, str], Effect]:
    """Return the effects by the registered rule: (family, number, other, group)."""
    found = {}
    for family, of_family in _plan().by_family(_plan().effects(_known())):
        for e in of_family:
            q = e.question
            found[family.name, q.name, q.other, q.group] = e
    return found


# ---- what nobody registered ----------------------------------------------------------
@cache
def ask(question: Question) -> Effect:
    """Return the effect of a question, with a plain 95 % interval."""
    asked = list(question.bases) or bases()
    return effects.plain(question, runs(), seeds(), asked)


def minus(number: str, first: str, other: str) -> Effect:
    """Return the effect of one method minus another, 16 rollouts stale.

    Args:
        number: METRIC, METRIC/DECODING or METRIC@AT.
        first: a method.
        other: the method that is subtracted.
    """
    return ask(difference(number, first, other, "s16"))


def change(number: str, before: str, arm: str) -> Effect:
    """Return the effect of one number of a method minus another of it, 16 rollouts
    stale.

    Args:
        number: METRIC, METRIC/DECODING or METRIC@AT.
        before: the number that is subtracted.
        arm: the method.
    """
    terms = (term_of(number, arm, "s16"), term_of(before, arm, "s16", -1.0))
    return ask(Question(number, terms))


def runs_of(arm: str) -> list[RunRecord]:
    """Return the runs of a method, 16 rollouts stale."""
    return [
        run
        for (name, group, _, _), run in runs().items()
        if (name, group) == (arm, "s16")
    ]


def largest_norm(of_runs: Iterable[RunRecord]) -> float:
    """Return the largest norm of a gradient, before it is clipped, in any of the runs of
    any experiment.
    """
    return max(max(run["steps"]["grad_norm_max"]) for run in of_runs)


def level(number: str, arm: str, group: str = "s16") -> Effect:
    """Return a number of a method as an effect, not compared with anything."""
    return ask(Question(number, (term_of(number, arm, group),)))


def between(number: str, arm: str, group: str, other_arm: str, other: str) -> Effect:
    """Return the effect of a number of a method in one group minus that of another
    method in another group.
    """
    terms = (term_of(number, arm, group), term_of(number, other_arm, other, -1.0))
    return ask(Question(number, terms))


def exchange_rate() -> float:
    """Return how many points of Best@32 DAPO gains by T = 1 for each of Avg@32 that
    this decoding costs it, 16 rollouts stale.
    """
    best, avg = (change(f"{m}/t_1", m, "dapo").mean for m in ("best", "avg"))
    return -best / avg


def weighed(rate: float, first: str, other: str, decoding: str) -> Effect:
    """Return one method minus another in Best@32 + rate · Avg@32, 16 rollouts stale."""
    terms = []
    for arm, sign in ((first, 1.0), (other, -1.0)):
        terms.append(term_of(f"best/{decoding}", arm, "s16", sign))
        terms.append(term_of(f"avg/{decoding}", arm, "s16", sign * rate))
    return ask(Question("best", tuple(terms)))


def _dapo_paths(metric: str) -> Numbers:
    """Return a metric of DAPO along training, the mean over the bases, 16 rollouts
    stale: [seeds, evaluations].
    """
    found = []
    for seed in seeds():
        columns = [
            runs()["dapo", "s16", base, seed]["evals"][PATH][metric] for base in bases()
        ]
        found.append(np.mean(columns, axis=0))
    return 100 * np.array(found)


@cache
def at_equal_average() -> tuple[float, float, float]:
    """Return UP-DAPO's Best@32 at the end minus DAPO's at the moment of training at
    which it had the same Avg@32, 16 rollouts stale, in points; and the ends of its 95 %
    interval.

    DAPO's path is the mean over seeds, with straight lines between evaluations. The
    interval: percentiles of a bootstrap over seeds.
    """
    up_avg = np.array(level("avg", "up_dapo").values)
    up_best = np.array(level("best", "up_dapo").values)
    dapo_avg, dapo_best = _dapo_paths("avg"), _dapo_paths("best")

    def gain(rows: Places | slice) -> float:
        """Return the difference in points, of the seeds at these indices."""
        avg, best = dapo_avg[rows].mean(0), dapo_best[rows].mean(0)
        order = np.argsort(avg)
        dapo_there = np.interp(up_avg[rows].mean(), avg[order], best[order])
        return float(up_best[rows].mean() - dapo_there)

    rng, n = np.random.default_rng(0), len(seeds())
    drawn = [gain(rng.integers(n, size=n)) for _ in range(DRAWS)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return gain(slice(None)), float(low), float(high)


def entropy_and_best() -> tuple[float, int]:
    """Return the correlation over cells of the final entropy and Best@32 (means over
    bases and seeds), and how many cells there are.
    """
    cells = _plan().cells()
    entropy = [level("entropy", *cell).mean for cell in cells]
    best = [level("best", *cell).mean for cell in cells]
    return float(np.corrcoef(entropy, best)[0, 1]), len(cells)
