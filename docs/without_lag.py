# SPDX-License-Identifier: Apache-2.0
"""UP-DAPO minus DAPO where no rollout is stale, by the number of updates on a rollout:
from the records of the second round.
"""

from functools import cache
from typing import NamedTuple

from repro.mini.round2 import report, rule, tables
from repro.mini.round2.rule import Found
from repro.mini.study import plan, results
from repro.mini.study.plan import Contrast, Experiment

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
    best: Found
    avg: Found
    registered: str


@cache
def rows() -> tuple[Row, ...]:
    """Return the rows, few updates first."""
    records = results.load(results.folder_of(2))
    found = []
    for name, pairs in PAIRS.items():
        experiment = plan.load(name)
        registered = _registered(experiment, records) if name in REGISTERED else ""
        for pair in pairs:
            runs: rule.Runs = {
                (arm, seed): records[experiment.run(arm, seed).key]
                for arm in pair
                for seed in experiment.seeds
            }
            settings = runs[pair[0], experiment.seeds[0]]["settings"]
            best, avg = (
                rule.measure(
                    Contrast(pair, metric, "last", more_than=0.0),
                    runs,
                    experiment.seeds,
                )
                for metric in ("best", "avg")
            )
            updates = settings["minibatches"] * settings["epochs"]
            found.append(Row(updates, settings["lr"], best, avg, registered))
    return tuple(sorted(found, key=lambda row: (row.updates, -row.rate)))


def _registered(experiment: Experiment, records: dict[str, results.Record]) -> str:
    """Return the registered effect on Best@32 at the end, with its interval."""
    (verdict,) = (
        v
        for v in tables.decisive(report.judge(experiment, records))
        if v.claim.id == "best"
    )
    return tables.effects(verdict).partition(":")[0]


def gain(updates: int) -> tuple[float, float]:
    """Return the least and the greatest effect on Best@32 at this number of updates."""
    means = [100 * row.best.mean for row in rows() if row.updates == updates]
    return min(means), max(means)


def text() -> str:
    """Return the table of docs/findings.md."""
    lines = [
        "| updates on a rollout | learning rate | Best@32 | Avg@32 | seeds |",
        "|---|---|---|---|---|",
    ]
    for row in rows():
        best = tables.show(row.best)
        if row.registered:
            best += f"; registered: {row.registered}"
        cells = [
            row.updates,
            f"{row.rate:g}",
            best,
            tables.show(row.avg),
            row.best.n,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
