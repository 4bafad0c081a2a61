# SPDX-License-Identifier: Apache-2.0
"""How many seeds the second round has, and why: `python -m repro.mini.round2.power`
writes power.md and pilot.md.

The spread (sd of differences paired by seed) is round one's, pooled over its pairs of
arms from {dapo, up_dapo, dapo_no_upper_clip, is_pg} in the standard regime, five seeds
each; for one arm's own number, over those arms.
"""

import sys
from itertools import combinations
from math import sqrt
from pathlib import Path

import numpy as np

from repro.mini import files
from repro.mini.round2 import rule
from repro.mini.study import plan, results
from repro.mini.study.plan import EVAL_METRICS, Contrast

HERE = Path(__file__).parent
ARMS = ("dapo", "up_dapo", "dapo_no_upper_clip", "is_pg")
REGIME = "ablations_standard"
HEAD = """\
Effects and spreads are in points of 100 for answers and reward, else in the metric's unit or as a ratio. Power is at
level 0.05 / claims of the family, the strictest that Holm's correction asks.
"""
PILOT = """\
DAPO alone, one seed, 30 or 50 steps: how much each regime clips, and whether DAPO learns in it. Chosen: the first
round's regime, and two epochs at 3e-4 and at 6e-4, where DAPO itself breaks: claims there have the gate.
"""


def spread(c: Contrast, records: dict[str, results.Record]) -> float:
    """Of the contrast's d, from round one."""
    e = plan.load(REGIME)
    known = {
        (arm, seed): records.get(e.run(arm, seed).key)
        for arm in ARMS
        for seed in e.seeds
    }
    if (
        c.metric in EVAL_METRICS and c.set == "average"
    ):  # only the family was evaluated so: a looser regime, three seeds
        e = plan.load("family")
        known = {
            (arm, seed): records.get(e.run(arm, seed).key)
            for arm in ("grpo", "up_grpo", "sapo", "cispo")
            for seed in e.seeds
        }
    arms = sorted({arm for arm, _ in known})
    pairs = (
        list(combinations(arms, 2)) if len(c.arms) == 2 else [(arm,) for arm in arms]
    )
    again = lambda pair: Contrast(
        pair,
        c.metric,
        c.at,
        c.set,
        c.decoding,
        more_than=1 if c.ratio else 0,
        ratio=c.ratio,
    )
    found = [rule.measure(again(pair), known, e.seeds) for pair in pairs]
    return sqrt(float(np.mean([f.sd**2 for f in found])))


def table(records: dict[str, results.Record]) -> str:
    rows = [
        "# Power of the second round\n",
        str(__doc__).split("\n\n", 1)[1].strip() + "\n",
        HEAD,
        "| experiment | claim | contrast | effect assumed | sd | n | power | n for 0.8 |",
        "|---" * 8 + "|",
    ]
    for name in plan.names(round=2):
        e = plan.load(name)
        for source in ("paper", "ours"):
            family = [c for c in e.claims if c.source == source and c.contrasts]
            rows += [row(e, claim, 0.05 / len(family), records) for claim in family]
    return "\n".join(rows) + "\n"


def row(
    e: plan.Experiment,
    claim: plan.Claim,
    level: float,
    records: dict[str, results.Record],
) -> str:
    """Of the contrast with the least power."""
    n = len(e.seeds)
    c = min(claim.contrasts, key=lambda c: rule.power(c, spread(c, records), n, level))
    sd = spread(c, records)
    k = 100 if c.metric in EVAL_METRICS or c.metric == "reward" else 1
    effect = (
        f"within ×{c.within}"
        if c.within
        else f"{'×' if c.ratio else ''}{k * (c.effect or 0):g}"
    )
    more = f" and {len(claim.contrasts) - 1} more" if len(claim.contrasts) > 1 else ""
    what = f"{c.metric} {c.at} {', '.join(c.arms)}{more}"
    numbers = f"{k * sd:.3g} | {n} | {rule.power(c, sd, n, level):.2f} | {rule.seeds_for(c, sd, level)}"
    return f"| {e.name} | {claim.id} | {what} | {effect} | {numbers} |"


def pilot() -> str:
    rows = [
        "# The pilot\n",
        PILOT,
        "| minibatches | epochs | learning rate | steps | positive tokens clipped, % | reward, first → last fifth, % |",
        "|---" * 6 + "|",
    ]
    for r in sorted(
        results.read_lines(HERE / "pilot.jsonl"),
        key=lambda r: np.mean(r["steps"]["clip_pos_high"]),
    ):
        s, reward = r["settings"], np.array(r["steps"]["reward"])
        n = max(1, len(reward) // 5)
        clipped = 100 * float(np.mean(r["steps"]["clip_pos_high"]))
        rows.append(
            f"| {s['minibatches']} | {s['epochs']} | {s['lr']:g} | {s['steps']} | {clipped:.1f} "
            f"| {100 * reward[:n].mean():.1f} → {100 * reward[-n:].mean():.1f} |"
        )
    return "\n".join(rows) + "\n"


def main() -> int:
    for name, text in (("power.md", table(results.load())), ("pilot.md", pilot())):
        files.write_atomically(HERE / name, text.encode())
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
