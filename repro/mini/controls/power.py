# SPDX-License-Identifier: Apache-2.0
"""How many seeds, and how many hours: `python -m repro.mini.controls.power`, before
registration.

Writes power.md and runs.sha256 from plan.toml and the committed records on stale data.
It runs nothing.
"""

import sys
from collections.abc import Iterable
from math import sqrt
from pathlib import Path

import numpy as np
from scipy.stats import t

from repro.mini import files
from repro.mini.registered import plan, rule
from repro.mini.registered.plan import Cell, Plan
from repro.mini.stale import design, rule as stale_rule
from repro.mini.study import results
from repro.mini.study.results import Record

HERE = Path(__file__).parent
NEIGHBOURS = ("dapo", "dapo_no_upper_clip")
DECODINGS = {"top_p_0.7": "test/top_p_0.7", "t_1": "test/t_1"}
SLOPES = (0.0, 1.2, 2.0, 3.4)
LIMIT = 15.0  # core-hours
# the records are evaluated mostly by top-p 0.7, which has fewer distinct answers than T
# = 1 has
EVALUATION = 1.5
# with a bonus each response is computed, also those without an advantage: an update
# costs at most so much
BONUS = 1.5
HEAD = """# Power and cost of the experiment on UP's controls

Written by `python -m repro.mini.controls.power` from the records on stale data, before any run of this experiment.

## Power

At equal Avg@32 an effect is, to first order, a difference of Best@32 + slope · Avg@32, the slope being that of the
curve at this level. D is its mean over the two bases, UP minus another method, 16 rollouts stale. Its spread is seen
in {seeds} seeds, pooled over UP − DAPO and UP − DAPO without its upper clip. The family has {m} intervals, at level
{first:g} / {m} at the first look and {final:g} / {m} at the final one. The answer "yes" needs five controls at once:
it is given less often than one interval leaves out 0.

DAPO's own line from top-p 0.7 to T = 1 has the slope {slope:.1f} ({best:+.1f} points of Best@32 for {avg:+.1f} of
Avg@32): the exchange rate of the search. At T = 1 the curve is flatter: about 1.2, by four unregistered pairs of runs.
The records hold no decoding between the two, so the table has several slopes.

The records' spread is of 256 problems. This experiment evaluates {problems}: half the variance of the sampling of
answers, which the table does not count on.

| level | slope | sd(D) | seeds | half an interval | power for 2 points | power for 4 points |
|---|---|---|---|---|---|---|
"""
COST = """
**What the hours can show:** {answer}

## Cost

Seconds of one core, from the records on stale data (sampling, scores and updates by the step; evaluation by the
problem and decoding). An update with a bonus is counted {bonus:g} times, because no response is left out, and an
evaluation {evaluation:g} times, because most of the recorded ones are by top-p 0.7, which is faster. On chain a step is
counted as on Countdown: there it took {chain:.2f} times as long in the first round.

| stage | group | runs | seconds a run | hours |
|---|---|---|---|---|
"""


def differences(records: dict[str, Record], other: str, decoding: str) -> np.ndarray:
    """UP minus the other method of (Avg@32, Best@32), 16 rollouts stale, mean over the
    bases, [seeds, 2].
    """
    d = design.load()
    runs = stale_rule.values(d, records)
    seeds = d.main["seeds"][: stale_rule.seeds_due(d, records)]

    def end(arm: str, base: str, seed: int) -> np.ndarray:
        r = runs[stale_rule.Cell(arm, 16), base, seed]
        assert r
        return np.array(
            [
                100 * r["evals"][DECODINGS[decoding]][metric][-1]
                for metric in ("avg", "best")
            ]
        )

    return np.array(
        [
            np.mean(
                [
                    end("up_dapo", base, seed) - end(other, base, seed)
                    for base in d.bases
                ],
                axis=0,
            )
            for seed in seeds
        ]
    )


def line(records: dict[str, Record]) -> tuple[float, float]:
    """DAPO's Avg@32 and Best@32 at T = 1 minus those at top-p 0.7, 16 rollouts stale."""
    d = design.load()
    runs = [
        r
        for (cell, _, _), r in stale_rule.values(d, records).items()
        if cell == stale_rule.Cell("dapo", 16) and r
    ]
    gaps = [
        [
            100
            * (
                r["evals"]["test/t_1"][metric][-1]
                - r["evals"]["test/top_p_0.7"][metric][-1]
            )
            for r in runs
        ]
        for metric in ("avg", "best")
    ]
    return float(np.mean(gaps[0])), float(np.mean(gaps[1]))


def spread(records: dict[str, Record], decoding: str, slope: float) -> float:
    """sd(D) of Best@32 + slope · Avg@32."""
    variances = []
    for other in NEIGHBOURS:
        avg, best = differences(records, other, decoding).T
        variances.append((best + slope * avg).var(ddof=1))
    return sqrt(float(np.mean(variances)))


def rows(
    p: Plan, records: dict[str, Record], m: int
) -> Iterable[tuple[str, float, float, int, float, float, float]]:
    """level, slope, sd(D), seeds, half an interval, power for 2 and for 4 points."""
    first, final = p.stopping["first"], p.stopping["final"]
    for decoding in DECODINGS:
        for slope in SLOPES:
            sd = spread(records, decoding, slope)
            for look in (first, final):
                n, level = look["seeds"], look["level"] / m
                half = float(t.ppf(1 - level / 2, n - 1)) * sd / sqrt(n)
                powers = [
                    stale_rule.power(effect, sd, n, level) for effect in (2.0, 4.0)
                ]
                yield decoding, slope, sd, n, half, powers[0], powers[1]


# ---- cost ----------------------------------------------------------------------------
def seconds(p: Plan, cell: Cell, stage: str, records: dict[str, Record]) -> float:
    """Of one core, for one run of the cell."""
    staleness = p.group(cell.group)["settings"]["staleness"]
    coefficient = p.arms[cell.arm].get("coefficient", {})
    choice = plan.Choice(p.search["rates"][0], coefficient.get("start"))
    s = p.run(stage, cell, p.bases(cell)[0], choice, p.main["seeds"][0]).settings
    mine = [
        r
        for r in records.values()
        if (r["settings"]["staleness"], r["settings"]["old_log_probs"], r["status"])
        == (staleness, "sampler", "done")
    ]
    parts = {
        part: np.mean(
            [r["provenance"]["seconds"][part] / r["settings"]["steps"] for r in mine]
        )
        for part in ("sample", "score", "update")
    }
    if coefficient:
        parts["update"] *= BONUS
    evaluated = rule.curve({"settings": vars(s), "evals": {}}).shape[0] * len(
        s.decodings
    )
    return float(
        s.steps * sum(parts.values())
        + evaluated * s.eval_problems * EVALUATION * evaluation(mine)
    )


def evaluation(records: list[Record]) -> float:
    """Seconds for one problem by one decoding."""
    spent = [
        r["provenance"]["seconds"]["eval"]
        / (
            r["settings"]["eval_problems"]
            * sum(len(columns["step"]) for columns in r["evals"].values())
        )
        for r in records
        if r["settings"]["eval_every"]
    ]
    return float(np.mean(spent))


def chain_factor() -> float:
    """Seconds for a step on chain over those on Countdown, DAPO and UP-DAPO in the
    first round.
    """
    found: dict[str, list[float]] = {}
    for r in results.load().values():
        s, spent = r["settings"], r["provenance"]["seconds"]
        if (
            s["objective"] in ("dapo", "up_dapo")
            and s["epochs"] == 1
            and s["prompts"] == 64
            and r["status"] == "done"
        ):
            found.setdefault(s["task"], []).append(
                (spent["all"] - spent["eval"]) / s["steps"]
            )
    return float(np.mean(found["chain"]) / np.mean(found["countdown"]))


def cost(
    p: Plan, records: dict[str, Record]
) -> list[tuple[str, str, int, float, float]]:
    """stage, group, runs, seconds a run, hours."""
    found = []
    for stage in ("search", "main"):
        for group in p.groups:
            runs, spent = 0, 0.0
            for cell in p.cells([group["name"]]):
                coefficient = p.arms[cell.arm].get("coefficient", {})
                tried = len(p.rates(cell.arm)) + max(
                    0, len(coefficient.get("grid", ())) - 1
                )
                n = (
                    tried * len(p.search["seeds"])
                    if stage == "search"
                    else p.stopping["final"]["seeds"]
                )
                n *= len(p.bases(cell))
                runs += n
                spent += n * seconds(p, cell, stage, records)
            found.append((stage, group["name"], runs, spent / runs, spent / 3600))
    return found


def text(p: Plan) -> str:
    """power.md."""
    records = results.load(design.RESULTS)
    m = max(len(rule.asked_of(f)) for f in p.families if f.get("primary"))
    avg, best = line(records)
    found = HEAD.format(
        seeds=len(differences(records, "dapo", "t_1")),
        m=m,
        first=p.stopping["first"]["level"],
        final=p.stopping["final"]["level"],
        slope=-best / avg,
        best=best,
        avg=avg,
        problems=p.settings["eval_problems"],
    )
    every = list(rows(p, records, m))
    for decoding, slope, sd, n, half, two, four in every:
        found += f"| {decoding} | {slope:g} | {sd:.2f} | {n} | {half:.2f} | {two:.2f} | {four:.2f} |\n"
    final = p.stopping["final"]["seeds"]
    at = {
        (decoding, slope): (two, four)
        for decoding, slope, _, n, _, two, four in every
        if n == final
    }
    flat, middle, steep = at["t_1", 1.2][0], at["t_1", 2.0][0], at["t_1", 3.4][1]
    answer = (
        f"with {final} seeds, 2 points at equal Avg@32 at the level of T = 1 (power\n{flat:.2f} at the slope 1.2, "
        f"{middle:.2f} at 2); 4 points where the slope is 3.4 (power {steep:.2f}), which is about the level of\n"
        "top-p 0.9, and 2 points not there. Hence the two margins. Where the curve is steeper (top-p 0.8 and below),\n"
        "no size of interest can be shown."
    )
    found += COST.format(
        answer=answer, bonus=BONUS, evaluation=EVALUATION, chain=chain_factor()
    )
    costs = cost(p, records)
    for stage, group, runs, each, hours in costs:
        found += f"| {stage} | {group} | {runs} | {each:.0f} | {hours:.1f} |\n"
    total = sum(row[-1] for row in costs)
    runs = sum(row[2] for row in costs)
    edges = max(each for stage, _, _, each, _ in costs if stage == "search") * 4 / 3600
    found += f"| all | | {runs} | | **{total:.1f}** |\n\n"
    found += f"A rate at the edge of the grid costs about {edges:.2f} hours more. The limit is {LIMIT:g} core-hours.\n"
    return found


def main() -> int:
    """Write power.md and runs.sha256."""
    p = plan.load(HERE / "plan.toml")
    files.write_atomically(HERE / "power.md", text(p).encode())
    files.write_atomically(HERE / "runs.sha256", (p.digest() + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
