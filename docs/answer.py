# SPDX-License-Identifier: Apache-2.0
"""README's answer to "Does UP help?", from the records of the experiment on stale data: its
best-powered evidence.

Each function writes a part of README or of docs/findings.md. Its words are typed, its
numbers computed; an AssertionError says that the records no longer support the words.
s0, s4 and s16 are the groups of 0, 4 and 16 rollouts of staleness.
"""

import re

from docs import controls, stale, without_lag
from repro.mini.experiment.words import shown
from upref.markdown import table

RESULTS = "repro/mini/stale/results"
METRICS = {
    "best": "Best@32: right at least once in 32",
    "avg": "Avg@32: right on average",
    "maj": "Maj@32: the most frequent is right",
}


def text() -> str:
    """Return README's section: at most 120 words and one figure.

    Raises:
        AssertionError: the records do not support it, or it is longer.
    """
    test, n = stale.registered(), len(stale.seeds())
    gains = [test["dapo", "best", "dapo", s] for s in ("s16", "s4", "s0")]
    anchor = test["neighbours", "best", "dapo_no_upper_clip", "s16"]
    average = test["dapo", "avg", "dapo", "s16"]
    at_t_1 = {m: stale.minus(f"{m}/t_1", "up_dapo", "dapo") for m in ("best", "avg")}
    again = test["recomputed", "best", "dapo", "recomputed"]
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
        for (_, group, _, _), r in stale.runs().items()
        if group == "s0"
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
        f"{controls.at_equal_average()} [Evidence](docs/findings.md)."
    )
    count = len(re.sub(r"\]\([^)]*\)", "]", words).split())
    assert count <= 120, f"README's answer has {count} words"
    shows = "Training paths of Avg@32 and Best@32: on stale data UP's Best@32 is above DAPO's"
    return f"{words}\n\n![{shows}]({RESULTS}/paths.svg)"


def paths() -> str:
    """Return the sentences of docs/findings.md below the picture of the paths."""
    high, low = stale.level("best@first", "up_dapo").by_base
    up_high, up_low = stale.level("best", "up_dapo").by_base
    dapo_high, dapo_low = stale.level("best", "dapo").by_base
    lost = stale.between("avg", "up_dapo", "s16", "dapo", "s0")
    assert high > up_high > dapo_high and low < dapo_low < up_low and lost.high < 0
    return (
        f"The picture shows means over two bases, which differ. At 16 rollouts, from the base at {high:.0f} % Best@32 "
        f"falls to {up_high:.0f} % under UP and to {dapo_high:.0f} % under DAPO; from the base at {low:.0f} % it rises "
        f"to {up_low:.0f} % and to {dapo_low:.0f} %. UP is above DAPO on both "
        "([each base apart](../repro/mini/stale/results/unregistered.md#each-base-apart)). "
        f"Stale data has its price under either method: at 16 rollouts UP's Avg@32 is {shown(lost)} points (not "
        "registered) from that of DAPO on fresh data."
    )


def numbers() -> str:
    """Return the table of docs/findings.md: UP-DAPO minus DAPO under two decodings, and
    with lp_old recomputed.
    """
    test, n = stale.registered(), len(stale.seeds())
    again = [test["recomputed", m, "dapo", "recomputed"] for m in ("best", "avg")]
    sampled = {m: stale.minus(f"{m}/t_1", "up_dapo", "dapo") for m in METRICS}
    majority = stale.minus("maj", "up_dapo", "dapo")
    both = "dapo", "up_dapo"
    lost = [stale.between("avg", arm, "recomputed", arm, "s16") for arm in both]
    ends = [f"{stale.level('best', arm, 'recomputed').mean:.0f}" for arm in both]
    assert {e.word for e in again} == {"no difference"} and all(
        e.high < 0 for e in lost
    )
    assert all(e.low < 0 < e.high for e in (majority, sampled["maj"]))
    below = sum(value < 0 for value in sampled["avg"].values)
    sampled_avg = f"{shown(sampled['avg'])}; {below} of {n} seeds below 0"
    best, avg = (shown(test["dapo", m, "dapo", "s16"]) for m in ("best", "avg"))
    columns = ["", "top-p 0.7, registered", "T = 1, not registered"]
    rows = [
        [METRICS["best"], best, shown(sampled["best"])],
        [METRICS["avg"], avg, sampled_avg],
        [METRICS["maj"], f"{shown(majority)}, not registered", shown(sampled["maj"])],
    ]
    return "\n".join(
        [
            "UP-DAPO minus DAPO, 16 rollouts stale, in points:",
            "",
            table(columns, rows),
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
    test = stale.registered()
    gain = test["dapo", "best", "dapo", "s16"]
    beyond_clip = test["neighbours", "best", "dapo_no_upper_clip", "s16"]
    decoding = {m: shown(stale.change(f"{m}/t_1", m, "dapo")) for m in ("best", "avg")}
    at_t_1 = shown(stale.minus("best/t_1", "up_dapo", "dapo"))
    mean, low, high = stale.at_equal_average()
    equal = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
    r, cells = stale.entropy_and_best()
    r_of_controls, methods = controls.entropy_and_best()
    peak = stale.minus("best@highest", "up_dapo", "dapo")
    rate = stale.exchange_rate()
    at_top_p_0_7, worth_at_t_1 = (
        stale.weighed(rate, "up_dapo", "dapo", d) for d in ("top_p_0.7", "t_1")
    )
    assert worth_at_t_1.low < 0 < at_top_p_0_7.low
    assert 0 < peak.mean < gain.mean / 2
    n, better_base = len(stale.seeds()), stale.bases()[0]
    base = stale.level("best@first", "up_dapo").by_base[0]
    paths = [
        stale.runs()["up_dapo", "s16", better_base, seed] for seed in stale.seeds()
    ]
    best_of = [r["evals"][stale.PATH]["best"] for r in paths]
    # runs whose best evaluation is the first, before training
    untrained = sum(max(best) == best[0] for best in best_of)
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
            f"From top-p 0.7 to T = 1, DAPO gains {rate:.1f} points of Best@32 for each point of "
            f"Avg@32 that it loses. In the sum of Best@32 and {rate:.1f} times Avg@32, UP-DAPO minus "
            f"DAPO is {shown(at_top_p_0_7)} at top-p 0.7 and {shown(worth_at_t_1)} at T = 1 (not "
            "registered)",
            "by this straight line all of the gain at T = 1, and not at top-p 0.7; the "
            "[registered controls](#the-controls) compare curves, which bend, and leave "
            f"{controls.over_dapo()}",
        ),
        (
            "stopping at the best moment",
            f"The highest of a run's evaluations, UP-DAPO minus DAPO (not registered): {shown(peak)}",
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
    columns = ["explanation", "the records, 16 rollouts stale, Best@32", "so it is"]
    return table(columns, rows)
