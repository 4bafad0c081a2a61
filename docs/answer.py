# SPDX-License-Identifier: Apache-2.0
"""README's answer to "Does UP help?", from the records of the experiment on stale data: its best-powered evidence."""

from repro.mini.stale import rule, unregistered
from repro.mini.stale.rule import Cell, Effect
from repro.mini.stale.unregistered import METRICS, T_1, Runs, at_end, signed

RESULTS = "repro/mini/stale/results"
MEANINGS = {
    "best": "right at least once in 32",
    "avg": "right on average",
    "maj": "the most frequent is right",
}


def registered(runs: Runs) -> dict[tuple[str, str, str, int | None], Effect]:
    """(family, metric, other method, staleness) -> effect, by the registered rule."""
    found = rule.effects(runs.design, runs.records)
    return {(e.family, e.metric, e.other, e.staleness): e for e in found}


def shown(e: Effect) -> str:
    return f"{signed(e.mean)} [{signed(e.low)}, {signed(e.high)}]"


def row(metric: str, registered_decoding: object, other_decoding: object) -> str:
    return f"| {METRICS[metric]}: {MEANINGS[metric]} | {registered_decoding} | {other_decoding} |"


def text() -> str:
    runs = unregistered.load()
    test, n = registered(runs), len(runs.seeds)
    up, dapo = Cell("up_dapo", 16), Cell("dapo", 16)
    gains = [test["dapo", "best", "dapo", s] for s in (16, 4, 0)]
    anchor, average = test["neighbours", "best", "dapo_no_upper_clip", 16], test["dapo", "avg", "dapo", 16]
    again = [test["recomputed", metric, "dapo", 16] for metric in ("best", "avg")]
    sampled = {metric: runs.difference(up, dapo, at_end(metric, T_1)) for metric in METRICS}
    majority = runs.difference(up, dapo, at_end("maj"))
    lost = [runs.difference(Cell(c.arm, 16, "recomputed"), c, at_end("avg")) for c in (dapo, up)]
    ends = [f"{runs.mean(cell, at_end('best')):.0f} %" for cell in (dapo, up)]
    recomputed = [f"{runs.mean(Cell(c.arm, 16, 'recomputed'), at_end('best')):.0f}" for c in (dapo, up)]
    assert [e.word for e in gains] == ["gains", "gains", "no difference"] and anchor.word == "gains"
    assert 0.45 < anchor.mean / gains[0].mean < 0.55, "half of the gain is the missing clip"
    assert {average.word, *(e.word for e in again)} == {"no difference"}
    assert sampled["avg"].high < 0 and all(e.high < 0 for e in lost)
    assert all(e.low < 0 < e.high for e in (majority, sampled["maj"]))
    below = f"{sampled['avg'].below} of {n} seeds below 0"
    return "\n".join(
        [
            "**On stale data UP solves more puzzles within 32 tries than DAPO, no more than the untrained base, and "
            f"answers no better on average.** Tiny transformers (two bases, {n} seeds) learn number puzzles from "
            "responses of the policy 16 rollouts ago, each method at its own learning rate. UP-DAPO minus DAPO, in "
            "points [95 %]:",
            "",
            f"| | top-p 0.7, [registered]({RESULTS}/report.md) | T = 1, [not registered]({RESULTS}/unregistered.md) |",
            "|---|---|---|",
            row("best", shown(gains[0]), sampled["best"]),
            row("avg", shown(average), f"{sampled['avg']}; {below}"),
            row("maj", f"{majority}, not registered", sampled["maj"]),
            "",
            f"Best@32 (top-p 0.7) is {runs.base('best'):.0f} % before training, {ends[0]} after DAPO, {ends[1]} after "
            f"UP-DAPO. Half of the gain is the missing upper clip: over DAPO without one it is {shown(anchor)}. At 4 "
            f"rollouts UP gains {shown(gains[1])}, on fresh data {shown(gains[2])}. With lp_old recomputed it gains "
            f"{shown(again[0])}: both end at {recomputed[0]} to {recomputed[1]} %, and "
            f"{-sum(e.mean for e in lost) / 2:.0f} points of Avg@32 lower. No GPU run has been made. "
            "[All experiments](docs/verdicts.md).",
            "",
            f"![Training paths: Avg@32 rises, Best@32 falls, less so under UP on stale data]({RESULTS}/paths.svg)",
        ]
    )
