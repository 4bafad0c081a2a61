# SPDX-License-Identifier: Apache-2.0
"""What the runs show and nobody registered: chosen comparisons, paired by seed, 95 %
intervals. No verdict follows.
"""

from typing import NamedTuple

from repro.mini.round2 import rule, tables
from repro.mini.round2.rule import Found
from repro.mini.study import plan
from repro.mini.study.plan import Contrast
from repro.mini.study.results import Record

Arm = tuple[str, str]  # experiment, arm


class Seen(NamedTuple):
    says: str
    arms: tuple[Arm, ...]
    metric: str
    at: str = "last"
    ratio: bool = False


DAPO, DAPO_OWN, UP_OWN = (
    ("dose_low", "dapo"),
    ("family_tuned", "dapo"),
    ("family_tuned", "up_dapo"),
)
SEEN = {
    "rate_best": Seen(
        "Best@32: DAPO at its own learning rate − DAPO at the common one",
        (DAPO_OWN, DAPO),
        "best",
    ),
    "rate_avg": Seen(
        "Avg@32: DAPO at its own learning rate − DAPO at the common one",
        (DAPO_OWN, DAPO),
        "avg",
    ),
    "own_best": Seen(
        "Best@32: UP-DAPO − DAPO, both at their own rate", (UP_OWN, DAPO_OWN), "best"
    ),
    "own_avg": Seen(
        "Avg@32: UP-DAPO − DAPO, both at their own rate", (UP_OWN, DAPO_OWN), "avg"
    ),
    "w_reinforce": Seen(
        "entropy, change in training: W-REINFORCE as its authors train it",
        (("family_tuned", "w_reinforce_code"),),
        "entropy",
        "change",
    ),
    "aspo": Seen(
        "entropy, change in training: ASPO as its authors train it",
        (("family_tuned", "aspo_code"),),
        "entropy",
        "change",
    ),
    "anchor_middle": Seen(
        "largest gradient norm: UP-DAPO / DAPO without its upper clip, middle dose",
        (("dose_middle", "up_dapo"), ("dose_middle", "dapo_no_upper_clip")),
        "grad_norm_max",
        "max",
        ratio=True,
    ),
    "anchor_high": Seen(
        "the same, high dose",
        (("dose_high", "up_dapo"), ("dose_high", "dapo_no_upper_clip")),
        "grad_norm_max",
        "max",
        ratio=True,
    ),
}


def measure(name: str, records: dict[str, Record]) -> Found:
    """Over the seeds that both experiments have."""
    row = SEEN[name]
    experiments = {e: plan.load(e) for e, _ in row.arms}
    seeds = sorted(set.intersection(*(set(e.seeds) for e in experiments.values())))
    arms = tuple(map("/".join, row.arms))
    runs: rule.Runs = {
        ("/".join(of), seed): records.get(experiments[of[0]].run(of[1], seed).key)
        for of in row.arms
        for seed in seeds
    }
    c = Contrast(
        arms, row.metric, row.at, more_than=1.0 if row.ratio else 0.0, ratio=row.ratio
    )
    return rule.measure(c, runs, seeds)


def section(records: dict[str, Record]) -> str:
    """A table for the report; "" while there is nothing."""
    found = {name: measure(name, records) for name in SEEN}
    rows = [
        f"| {SEEN[name].says} | {tables.show(f)} | {f.n} |"
        for name, f in found.items()
        if f.n
    ]
    if not rows:
        return ""
    head = (
        "## Seen and not registered\n\nNo rule was written for these before the runs.\n"
    )
    return "\n".join([head, "| | effect [95 %] | seeds |", "|---|---|---|", *rows, ""])
