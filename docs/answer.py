# SPDX-License-Identifier: Apache-2.0
"""README's answer to "Does UP help?", from the records of the experiment on stale data: its
best-powered evidence.

Each function writes a part of README or of docs/findings.md. Its words are typed, its
numbers computed; an AssertionError says that the records no longer support the words.
s0, s4 and s16 are the groups of 0, 4 and 16 rollouts of staleness.
"""

import re

from docs import controls, language_model, second_controls, stale, without_lag
from repro.mini.experiment.effects import Effect
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
    registered = stale.registered()
    gain = registered["dapo", "best", "dapo", "s16"]
    average = registered["dapo", "avg", "dapo", "s16"]
    _assert_effects(registered)
    _assert_half_by_the_clip(registered)
    _assert_fresh_data()
    at_16 = without_lag.row_of(16, 3e-4)
    at_16_later = second_controls.on_fresh_data()
    words = (
        "**In tiny transformers, on stale data, UP beats DAPO at Best@32 (right at least "
        "once in 32), not on average. Dropping DAPO's upper clip gives about half of "
        f"that.** Number puzzles, {len(stale.seeds())} "
        f"[seeds](docs/glossary.md#results), [preregistered]({RESULTS}/report.md). "
        "16 [rollouts](docs/glossary.md#a-token-and-its-gradient) stale, "
        "[top-p 0.7](docs/findings.md#the-words): Best@32 "
        f"{shown(gain)} points, average {shown(average)}. Fresh data, Best@32: no gain "
        f"shown at 8 updates a rollout; at 16, {at_16.registered} at "
        f"[rate 3e-4](docs/findings.md#without-a-lag), {shown(at_16_later)} at "
        f"[1e-4]({second_controls.PAGE}). "
        f"{controls.at_equal_average(second_controls.at_one_rate())} "
        f"**{language_model.undecided()}** "
        "[Evidence](docs/findings.md)."
    )
    count = len(re.sub(r"\]\([^)]*\)", "]", words).split())
    assert count <= 120, f"README's answer has {count} words"
    shows = "Training paths of Avg@32 and Best@32: on stale data UP's Best@32 is above DAPO's"
    return f"{words}\n\n![{shows}]({RESULTS}/paths.svg)"


Registered = dict[tuple[str, str, str, str], Effect]  # what stale.registered returns


def _assert_effects(registered: Registered) -> None:
    """Raise AssertionError unless UP gains Best@32 on stale data, also beyond DAPO
    without its upper clip, and neither on fresh data nor with lp_old recomputed nor on
    average.
    """
    best_of_dapo = [registered["dapo", "best", "dapo", s] for s in ("s16", "s4", "s0")]
    assert [e.word for e in best_of_dapo] == ["gains", "gains", "no difference"]
    average = registered["dapo", "avg", "dapo", "s16"]
    assert average.word == "no difference"
    beyond_clip = registered["neighbours", "best", "dapo_no_upper_clip", "s16"]
    recomputed = registered["recomputed", "best", "dapo", "recomputed"]
    assert beyond_clip.word == "gains" and recomputed.word == "no difference"
    best_at_t_1 = stale.minus("best/t_1", "up_dapo", "dapo")
    average_at_t_1 = stale.minus("avg/t_1", "up_dapo", "dapo")
    assert best_at_t_1.low > 0 > average_at_t_1.high


def _assert_half_by_the_clip(registered: Registered) -> None:
    """Raise AssertionError unless the records support "about half" of what
    dropping the upper clip gives.
    """
    gain = registered["dapo", "best", "dapo", "s16"]
    beyond_clip = registered["neighbours", "best", "dapo_no_upper_clip", "s16"]
    assert 0.45 < 1 - beyond_clip.mean / gain.mean < 0.55
    assert 0.62 < controls.share_of_the_clip("best/top_p_0.7") < 0.72
    assert 0.53 < second_controls.share_of_the_clip() < 0.63
    assert 0.85 < controls.share_of_the_clip("equal_avg/t_1") < 1


def _assert_fresh_data() -> None:
    """Raise AssertionError unless the fresh data had 8 updates a rollout, and UP gains
    at 16 wherever these were run.
    """
    updates = {
        run["settings"]["minibatches"]
        for (_, group, _, _), run in stale.runs().items()
        if group == "s0"
    }
    assert updates == {8}
    assert all(row.best.low > 0 for row in without_lag.rows() if row.updates == 16)


def on_fresh_data() -> str:
    """Return the paragraph of docs/findings.md on fresh data."""
    registered = stale.registered()
    at_8 = registered["dapo", "best", "dapo", "s0"]
    assert at_8.word == "no difference"
    at_3e_4, at_1e_4 = (without_lag.row_of(16, rate) for rate in (3e-4, 1e-4))
    later = second_controls.on_fresh_data()
    assert later.low < at_1e_4.best.high and at_1e_4.best.low < later.high
    return (
        "On fresh data the evidence is mixed. At 8 updates a rollout the registered "
        f"verdict is *no difference*: Best@32 {shown(at_8)}, within a margin of "
        f"{at_8.question.margin:g}. At 16, the number of mini-batches in the paper's Table "
        "A1, UP's is [higher](#without-a-lag) in runs of 100 steps from one base: "
        f"{at_3e_4.registered} at the learning rate {at_3e_4.rate:g} (registered), and "
        f"{shown(at_1e_4.best)} at {at_1e_4.rate:g} (not registered). In runs of 400 steps "
        "from two bases at 0.0001, the [second controls](#the-second-controls) find "
        f"*{later.word}* in a secondary family, within a margin of "
        f"{later.question.margin:g}: {shown(later)}. The intervals overlap; base, steps "
        "and prompts differ. "
        f"{second_controls.at_equal_average_on_fresh_data()}"
    )


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
    registered = stale.registered()
    best = registered["dapo", "best", "dapo", "s16"]
    average = registered["dapo", "avg", "dapo", "s16"]
    majority = stale.minus("maj", "up_dapo", "dapo")
    at_t_1 = {m: stale.minus(f"{m}/t_1", "up_dapo", "dapo") for m in METRICS}
    assert all(e.low < 0 < e.high for e in (majority, at_t_1["maj"]))
    below = sum(value < 0 for value in at_t_1["avg"].values)
    seeds_below = f"{below} of {len(stale.seeds())} seeds below 0"
    columns = ["", "top-p 0.7, registered", "T = 1, not registered"]
    rows = [
        [METRICS["best"], shown(best), shown(at_t_1["best"])],
        [METRICS["avg"], shown(average), f"{shown(at_t_1['avg'])}; {seeds_below}"],
        [METRICS["maj"], f"{shown(majority)}, not registered", shown(at_t_1["maj"])],
    ]
    return "\n".join(
        [
            "UP-DAPO minus DAPO, 16 rollouts stale, in points:",
            "",
            table(columns, rows),
            "",
            _where_lp_old_is_recomputed(),
        ]
    )


def _where_lp_old_is_recomputed() -> str:
    """Return sentences on the runs whose trainer computes lp_old again, beside those
    with the sampler's, 16 rollouts stale.
    """
    registered = stale.registered()
    gain = registered["recomputed", "best", "dapo", "recomputed"]
    average = registered["recomputed", "avg", "dapo", "recomputed"]
    assert gain.word == "no difference" and average.word == "no difference"
    both = "dapo", "up_dapo"
    lost = [stale.between("avg", arm, "recomputed", arm, "s16") for arm in both]
    assert all(e.high < 0 for e in lost)
    mean_loss = -sum(e.mean for e in lost) / 2
    of_dapo, of_up = (stale.level("best", arm, "recomputed").mean for arm in both)
    return (
        f"Where the trainer recomputes lp_old, UP gains {shown(gain)} of Best@32: both "
        f"methods end at {of_dapo:.0f} to {of_up:.0f} %. Their Avg@32 is then "
        f"{mean_loss:.0f} points lower than with the sampler's lp_old."
    )


def explanations() -> str:
    """Return the table of docs/findings.md: other explanations of UP's gain on stale
    data, and what the records have on each.
    """
    registered = stale.registered()
    gain = registered["dapo", "best", "dapo", "s16"]
    beyond_clip = registered["neighbours", "best", "dapo_no_upper_clip", "s16"]
    decoding = {m: shown(stale.change(f"{m}/t_1", m, "dapo")) for m in ("best", "avg")}
    at_t_1 = shown(stale.minus("best/t_1", "up_dapo", "dapo"))
    mean, low, high = stale.at_equal_average()
    equal = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
    correlation, cells = stale.entropy_and_best()
    correlation_of_controls, methods = controls.entropy_and_best()
    peak = stale.minus("best@highest", "up_dapo", "dapo")
    assert 0 < peak.mean < gain.mean / 2
    rate = stale.exchange_rate()
    worth_at_top_p, worth_at_t_1 = (
        stale.weighed(rate, "up_dapo", "dapo", d) for d in ("top_p_0.7", "t_1")
    )
    assert worth_at_t_1.low < 0 < worth_at_top_p.low
    base = stale.level("best@first", "up_dapo").by_base[0]
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
            f"DAPO is {shown(worth_at_top_p)} at top-p 0.7 and {shown(worth_at_t_1)} at T = 1 (not "
            "registered)",
            "by this straight line all of the gain at T = 1, and not at top-p 0.7; the "
            "[registered controls](#the-controls) compare curves, which bend, and leave "
            f"{controls.over_dapo()}",
        ),
        (
            "stopping at the best moment",
            f"The highest of a run's evaluations, UP-DAPO minus DAPO (not registered): {shown(peak)}",
            f"most of the gain; but from the base at {base:.0f} % the best moment is "
            f"before training in {_untrained()} of {len(stale.seeds())} runs of UP-DAPO, so this tells nothing "
            "of training there",
        ),
        (
            "less learning: Best@32 falls late in training",
            "UP-DAPO at its end minus DAPO at the moment of its training when its Avg@32 was "
            f"the same as UP-DAPO's at the end (not registered): {equal}",
            "ruled out at top-p 0.7",
        ),
        (
            "different learning rates",
            "one rule chose the learning rate of each method, and chose the same for both",
            "ruled out",
        ),
        (
            "more entropy, by any means",
            f"Over {cells} settings (method, staleness, source of lp_old), the final entropy and Best@32 have the "
            f"correlation {correlation:.3f}. Over the {methods} methods of the controls it is "
            f"{correlation_of_controls:.2f}",
            f"the [registered controls](#the-controls) {controls.bonus_words()}",
        ),
    ]
    columns = ["explanation", "the records, 16 rollouts stale, Best@32", "so it is"]
    return table(columns, rows)


def _untrained() -> int:
    """Return how many runs of UP-DAPO from the better base, 16 rollouts stale, have
    their best evaluation before training.
    """
    better_base = stale.bases()[0]
    number = 0
    for seed in stale.seeds():
        run = stale.runs()["up_dapo", "s16", better_base, seed]
        best = run["evals"][stale.PATH]["best"]
        number += max(best) == best[0]
    return number
