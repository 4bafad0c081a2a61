# SPDX-License-Identifier: Apache-2.0
"""README's answer to "Does UP help?", from the records of the experiment on stale data:
its best-powered evidence.
"""

import re

from docs import controls, without_lag
from repro.mini.stale import rule, unregistered
from repro.mini.stale.rule import Cell, Effect
from repro.mini.stale.unregistered import (
    METRICS,
    T_1,
    Runs,
    at_end,
    at_peak,
    at_start,
    effect,
    signed,
    worth,
)

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
    """Return README's section: at most 120 words and one figure."""
    runs = unregistered.load()
    test, n = registered(runs), len(runs.seeds)
    up, dapo = Cell("up_dapo", 16), Cell("dapo", 16)
    gains = [test["dapo", "best", "dapo", s] for s in (16, 4, 0)]
    anchor, average = (
        test["neighbours", "best", "dapo_no_upper_clip", 16],
        test["dapo", "avg", "dapo", 16],
    )
    at_t_1 = {
        metric: runs.difference(up, dapo, at_end(metric, T_1))
        for metric in ("best", "avg")
    }
    again = test["recomputed", "best", "dapo", 16]
    assert [e.word for e in gains] == ["gains", "gains", "no difference"]
    assert average.word == "no difference"
    assert anchor.word == "gains" and again.word == "no difference"
    assert at_t_1["best"].low > 0 > at_t_1["avg"].high
    # what "about half, or more" says of the upper clip
    assert 0.45 < 1 - anchor.mean / gains[0].mean < 0.55
    assert 0.62 < controls.share_of_the_clip("best/top_p_0.7") < 0.72
    assert 0.85 < controls.share_of_the_clip("equal_avg/t_1") < 1
    fresh = {
        r["settings"]["minibatches"]
        for (cell, _, _), r in runs.by_place.items()
        if cell.staleness == 0
    }
    assert fresh == {8}
    least, most = without_lag.gain(16)
    assert all(row.best.low > 0 for row in without_lag.rows() if row.updates == 16)
    words = (
        "**On stale data UP beats DAPO at Best@32 (right at least once in 32 tries), not "
        "on average. Dropping DAPO's upper clip gives about half of that, or more.** Tiny "
        f"transformers, number puzzles, {n} [seeds](docs/glossary.md#results), "
        f"[preregistered]({RESULTS}/report.md); no language model. "
        "16 [rollouts](docs/glossary.md#a-token-and-its-gradient) stale, "
        "[top-p 0.7](docs/findings.md#the-words): Best@32 "
        f"{shown(gains[0])}, average {shown(average)}. Fresh data: no gain shown at 8 "
        f"updates a rollout, [{least:+.0f} to {most:+.0f} at 16](docs/findings.md#without-a-lag). "
        f"{controls.at_equal_average()} [All evidence](docs/findings.md)."
    )
    count = len(re.sub(r"\]\([^)]*\)", "]", words).split())
    assert count <= 120, f"README's answer has {count} words"
    shows = "Training paths of Avg@32 and Best@32: on stale data UP's Best@32 is above DAPO's"
    return f"{words}\n\n![{shows}]({RESULTS}/paths.svg)"


def _by_base(runs: Runs) -> list[tuple[float, float, float]]:
    """Best@32 of each base, and of UP-DAPO and DAPO at the end from it, 16 rollouts
    stale.
    """
    up, dapo = Cell("up_dapo", 16), Cell("dapo", 16)
    return [
        (
            runs.on_base(base, up, at_start("best")).mean(),
            runs.on_base(base, up, at_end("best")).mean(),
            runs.on_base(base, dapo, at_end("best")).mean(),
        )
        for base in runs.design.bases
    ]


def paths() -> str:
    """Return the sentences of docs/findings.md below the picture of the paths."""
    runs = unregistered.load()
    (high, up_high, dapo_high), (low, up_low, dapo_low) = _by_base(runs)
    fresh = runs.per_seed(Cell("dapo", 0), at_end("avg"))
    stale = runs.per_seed(Cell("up_dapo", 16), at_end("avg"))
    lost = effect(stale - fresh)
    assert high > up_high > dapo_high and low < dapo_low < up_low and lost.high < 0
    return (
        f"The picture shows means over two bases, which differ. At 16 rollouts, from the base at {high:.0f} % Best@32 "
        f"falls to {up_high:.0f} % under UP and to {dapo_high:.0f} % under DAPO; from the base at {low:.0f} % it rises "
        f"to {up_low:.0f} % and to {dapo_low:.0f} %. UP is above DAPO on both "
        "([each base apart](../repro/mini/stale/results/unregistered.md#each-base-apart)). "
        f"Stale data has its price under either method: at 16 rollouts UP's Avg@32 is {lost} points (not "
        "registered) from that of DAPO on fresh data."
    )


def numbers() -> str:
    """Return the table of docs/findings.md: UP-DAPO minus DAPO under two decodings, and
    with lp_old recomputed.
    """
    runs = unregistered.load()
    test, n = registered(runs), len(runs.seeds)
    up, dapo = Cell("up_dapo", 16), Cell("dapo", 16)
    again = [test["recomputed", metric, "dapo", 16] for metric in ("best", "avg")]
    sampled = {
        metric: runs.difference(up, dapo, at_end(metric, T_1)) for metric in METRICS
    }
    majority = runs.difference(up, dapo, at_end("maj"))
    lost = [
        runs.difference(Cell(c.arm, 16, "recomputed"), c, at_end("avg"))
        for c in (dapo, up)
    ]
    ends = [
        f"{runs.mean(Cell(c.arm, 16, 'recomputed'), at_end('best')):.0f}"
        for c in (dapo, up)
    ]
    assert {e.word for e in again} == {"no difference"} and all(
        e.high < 0 for e in lost
    )
    assert all(e.low < 0 < e.high for e in (majority, sampled["maj"]))
    below = f"{sampled['avg'].below} of {n} seeds below 0"
    test_16 = {metric: test["dapo", metric, "dapo", 16] for metric in ("best", "avg")}
    return "\n".join(
        [
            "UP-DAPO minus DAPO, 16 rollouts stale, in points:",
            "",
            "| | top-p 0.7, registered | T = 1, not registered |",
            "|---|---|---|",
            row("best", shown(test_16["best"]), sampled["best"]),
            row("avg", shown(test_16["avg"]), f"{sampled['avg']}; {below}"),
            row("maj", f"{majority}, not registered", sampled["maj"]),
            "",
            f"Where the trainer recomputes lp_old, UP gains {shown(again[0])} of Best@32: both "
            f"methods end at {ends[0]} to {ends[1]} %. Their Avg@32 is then "
            f"{-sum(e.mean for e in lost) / 2:.0f} points lower than with the sampler's lp_old.",
        ]
    )


def explanations() -> str:
    """Return the table of docs/findings.md: other explanations of UP's gain on stale
    data, and what the records have on each.
    """
    runs = unregistered.load()
    test = registered(runs)
    up, dapo = Cell("up_dapo", 16), Cell("dapo", 16)
    gain = test["dapo", "best", "dapo", 16]
    beyond_clip = test["neighbours", "best", "dapo_no_upper_clip", 16]
    decoding = {m: runs.decoding(dapo, m) for m in ("best", "avg")}
    at_t_1 = runs.difference(up, dapo, at_end("best", T_1))
    equal = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*runs.at_equal_average(16))
    r, cells = runs.entropy_and_best()
    r_of_controls, methods = controls.entropy_and_best()
    peak = runs.difference(up, dapo, at_peak("best"))
    assert worth(runs, 16, T_1).low < 0 < worth(runs, 16, unregistered.TOP_P).low
    assert 0 < peak.mean < gain.mean / 2
    n, high = len(runs.seeds), runs.design.bases[0]
    at_the_start = runs.on_base(high, up, at_start("best"))
    base = at_the_start.mean()
    untrained = sum(runs.on_base(high, up, at_peak("best")) == at_the_start)
    rows = [
        (
            "the missing upper clip",
            f"UP-DAPO minus DAPO without its upper clip: {shown(beyond_clip)}, of "
            f"{shown(gain)}. At equal Avg@32, by the [registered controls](#the-controls): "
            f"{controls.beyond_no_clip()}",
            "about half of the gain at top-p 0.7, most of it at equal Avg@32 where its "
            "learning rate is half of UP's",
        ),
        (
            "the decoding",
            f"From top-p 0.7 to T = 1, DAPO's own Best@32 changes by "
            f"{decoding['best']} and its Avg@32 by {decoding['avg']}. UP's gain at T = 1 "
            f"is {at_t_1} (all not registered)",
            "a part of the gain",
        ),
        (
            "a decoding that DAPO could have as well",
            f"From top-p 0.7 to T = 1, DAPO gains {runs.exchange_rate(16):.1f} points of Best@32 for each point of "
            f"Avg@32 that it loses. In the sum of Best@32 and {runs.exchange_rate(16):.1f} times Avg@32, UP-DAPO minus "
            f"DAPO is {worth(runs, 16, unregistered.TOP_P)} at top-p 0.7 and {worth(runs, 16, T_1)} at T = 1 (not "
            "registered)",
            "by this straight line all of the gain at T = 1, and not at top-p 0.7; the "
            "[registered controls](#the-controls) compare curves, which bend, and leave "
            f"{controls.over_dapo()}",
        ),
        (
            "stopping at the best moment",
            f"The highest of a run's evaluations, UP-DAPO minus DAPO (not registered): {peak}",
            f"most of the gain; but from the base at {base:.0f} % the best moment is "
            f"before training in {untrained} of {n} runs of UP-DAPO, so this tells nothing "
            "of training there",
        ),
        (
            "less learning: Best@32 falls late in training",
            "UP-DAPO at its end minus DAPO at the moment of its training when its Avg@32 was "
            f"the same as UP-DAPO's at the end (not registered): {equal}",
            "excluded at top-p 0.7",
        ),
        (
            "different learning rates",
            "one rule chose the learning rate of each method, and chose the same for both",
            "excluded",
        ),
        (
            "more entropy, by any means",
            f"Over {cells} settings (method, staleness, source of lp_old), the final entropy and Best@32 have the "
            f"correlation {r:.3f}. Over the {methods} methods of the controls it is "
            f"{r_of_controls:.2f}",
            f"the [registered controls](#the-controls) {controls.bonus_words()}",
        ),
    ]
    head = [
        "| explanation | the records, 16 rollouts stale, Best@32 | so it is |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *(f"| {a} | {b} | {c} |" for a, b, c in rows)])
