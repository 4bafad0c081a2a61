# SPDX-License-Identifier: Apache-2.0
"""UP-DAPO minus DAPO where no rollout is stale, by the number of updates on a rollout:
from the records of the second round.
"""

from functools import cache
from typing import NamedTuple

from repro.mini.experiment import effects, plan, records, standing
from repro.mini.experiment.effects import Effect
from repro.mini.experiment.plan import Plan
from repro.mini.experiment.questions import difference
from repro.mini.experiment.words import shown
from upref.markdown import table

PAIRS = {  # experiment -> UP-DAPO and DAPO in it
    "papers_settings": (("up_dapo_mb4", "dapo_mb4"), ("up_dapo_mb8", "dapo_mb8")),
    "dose_low": (("up_dapo", "dapo"),),
    "family_tuned": (("up_dapo", "dapo"),),
    "dose_middle": (("up_dapo", "dapo"),),
}
REGISTERED = ("dose_low", "dose_middle")  # of which Best@32 at the end is


class Row(NamedTuple):
    """An effect at one number of updates on a rollout.

    Attributes:
        updates: optimizer steps on the responses of one rollout.
        rate: learning rate.
        best: UP-DAPO minus DAPO, Best@32 at the end, with a plain 95 % interval.
        avg: the same of Avg@32.
        registered: the registered effect with its interval, or "".
    """

    updates: int
    rate: float
    best: Effect
    avg: Effect
    registered: str


@cache
def rows() -> tuple[Row, ...]:
    """Return the rows, few updates first."""
    found = []
    for name, pairs in PAIRS.items():
        experiment = plan.load(name)
        known = records.load(experiment.results)
        runs, seeds = experiment.runs(known), experiment.main["seeds"]
        registered = _registered(experiment) if name in REGISTERED else ""
        for up, dapo in pairs:
            settings = runs[up, name, "", seeds[0]]["settings"]
            best, avg = (
                effects.plain(difference(metric, up, dapo, name), runs, seeds, [""])
                for metric in ("best", "avg")
            )
            updates = settings["minibatches"] * settings["epochs"]
            found.append(Row(updates, settings["lr"], best, avg, registered))
    return tuple(sorted(found, key=lambda row: (row.updates, -row.rate)))


def _registered(experiment: Plan, claim: str = "best") -> str:
    """Return the registered effect of a claim of an experiment, with its interval; by
    default UP-DAPO minus DAPO in Best@32 at the end.
    """
    kept = standing.of_plan(experiment)[f"{experiment.name}/{claim}"]["shown"]
    return str(kept.partition(": ")[0])


def row_of(updates: int, rate: float) -> Row:
    """Return the row of this number of updates on a rollout and this learning rate."""
    (found,) = (row for row in rows() if (row.updates, row.rate) == (updates, rate))
    return found


def text() -> str:
    """Return the table of docs/findings.md, few updates first."""
    columns = ["updates on a rollout", "learning rate", "Best@32", "Avg@32", "seeds"]
    cells = []
    for row in rows():
        best = shown(row.best)
        if row.registered:
            best += f"; registered: {row.registered}"
        rate = f"{row.rate:g}"
        cells.append([row.updates, rate, best, shown(row.avg), row.best.n])
    assert all(row.avg.low < 0 < row.avg.high for row in rows())
    below = f"In every row the interval of Avg@32 holds 0. {_by_the_clip()}"
    return f"{table(columns, cells)}\n\n{below}"


def _by_the_clip() -> str:
    """Return what dropping the upper clip gives DAPO at 16 updates, and what UP-DAPO
    gives beyond it, as a sentence.
    """
    experiment = plan.load("dose_low")
    known = records.load(experiment.results)
    words = {}
    for family, found in experiment.by_family(experiment.effects(known)):
        words[family.name] = [e.word for e in found]
    assert words["clip_best"] == ["gains"] and words["anchor_best"] == ["undecided"]
    row = row_of(16, 3e-4)
    return (
        f"Of the {row.best.mean:+.1f} at 16 updates and the rate {row.rate:g}, DAPO gets "
        f"{_registered(experiment, 'clip_best')} by dropping its upper clip; UP-DAPO minus that is "
        f"{_registered(experiment, 'anchor_best')}, undecided (both registered)."
    )
