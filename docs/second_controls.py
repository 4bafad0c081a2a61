# SPDX-License-Identifier: Apache-2.0
"""What the second registered experiment on UP's controls found, for docs/findings.md and
README.

It compares UP-DAPO with DAPO without its upper clip at one learning rate, and with DAPO
with smaller entropy bonuses than the one that `controls` searched; on fresh data, with
DAPO. Each seed has its own problems. The words are typed, the numbers computed; an
AssertionError says that the records no longer support the words.
"""

from functools import cache

import numpy as np

from docs import stale
from docs.controls import (
    ANSWERS,
    AT_LEVELS,
    LEVELS,
    effect_of,
    norms_of_three,
    with_word,
)
from repro.mini.experiment import effects as engine, plan, records
from repro.mini.experiment.answer import answer
from repro.mini.experiment.effects import Effect
from repro.mini.experiment.plan import Cell
from repro.mini.experiment.questions import curve, decoding_name, difference
from repro.mini.experiment.search import Choice
from repro.mini.experiment.words import by_base, shown
from upref.markdown import table

GROUP = "s16"  # 16 rollouts stale
NAMES = {
    "up_dapo": "UP-DAPO",
    "up_dapo_slow": "UP-DAPO at 5.5e-5",
    "dapo": "DAPO",
    "dapo_no_upper_clip": "DAPO without its upper clip",
    "dapo_no_upper_clip_slow": "DAPO without its upper clip, at 5.5e-5",
    "dapo_bonus_0_003": "DAPO with an entropy bonus of 0.003",
    "dapo_bonus_0_01": "DAPO with an entropy bonus of 0.01",
}
BONUSES = ("dapo_bonus_0_003", "dapo_bonus_0_01")
PAGE = "docs/findings.md#the-second-controls"
AT_EQUAL_AVERAGE = ("clip", "clip_rates", "clip_slow", "bonus")  # families
FIXED = {  # the numbers at the two fixed decodings
    "best/top_p_0.7": "Best@32, top-p 0.7",
    "avg/top_p_0.7": "Avg@32, top-p 0.7",
    "best/t_1": "Best@32, T = 1",
    "avg/t_1": "Avg@32, T = 1",
}


def text() -> str:
    """Return the registered answer of the final look, and its effects as tables."""
    registered, effects, progress = _load()
    at_equal = [e for name in AT_EQUAL_AVERAGE for e in effects[name]]
    every = [e for of_family in effects.values() for e in of_family]
    verdict = ANSWERS[answer(registered, every)]
    return "\n".join(
        [
            f"The registered answer at the final look, with {len(_seeds())} seeds: "
            f"**{verdict}**. It rests on the first two rows, the primary family; the "
            f"other rows are secondary. {progress}",
            "",
            _what_is_undecided(),
            "",
            "Best@32 at equal Avg@32, 16 rollouts stale, in points. Where no rate is named "
            "it is 1e-4. The margins are 1 and 1.8, half of UP-DAPO's gain on DAPO in the "
            f"first controls. {_of_two_looks()}",
            "",
            _equal_table(at_equal),
            "",
            "Where an end is printed as +0.0, the word beside it says on which side of 0 "
            "it is. "
            f"{_by_the_first_look(at_equal)}",
            "",
            _bonuses(),
            "",
            "At the two fixed decodings, 16 rollouts stale, in points. The margins are 4 for Best@32 and 2 for Avg@32. A "
            "method may gain here in Best@32 what it loses in Avg@32:",
            "",
            _fixed_table(effects["fixed"]),
            "",
            _norms(),
            "",
            _fresh(effects["fresh"], effects["fresh_fixed"]),
        ]
    )


def _seeds() -> list[int]:
    """Return the seeds of the final look."""
    registered, _, _ = _load()
    return list(registered.main["seeds"])


def _what_is_undecided() -> str:
    """Return what the registered answer rests on, and what stays possible."""
    _, effects, _ = _load()
    at_t_1, at_top_p = _beyond_clip()
    of_dapo = [effect_of(effects["clip"], "dapo", level) for level in LEVELS]
    assert [e.word for e in of_dapo] == ["gains", "gains"]
    assert at_t_1.low < 0 < at_t_1.high and at_top_p.low < 0 < at_top_p.high
    assert at_t_1.high > at_t_1.question.margin
    return (
        "UP-DAPO gains on DAPO at both levels. Neither level shows a gain on DAPO without "
        f"its upper clip at UP's rate: {shown(at_t_1)} and {shown(at_top_p)}. A gain of "
        f"up to {at_t_1.high:.1f} points at the Avg@32 of T "
        f"= 1, and a loss of up to {-at_top_p.low:.1f} at that of top-p 0.9, stay "
        "possible. The first controls answered another question with *no*: their margins "
        "are wider, 2 and 4, and DAPO without its upper clip had half of UP's rate."
    )


def _beyond_clip() -> list[Effect]:
    """Return UP-DAPO minus DAPO without its upper clip, both at 1e-4, at both levels: in
    Best@32 at equal Avg@32, 16 rollouts stale.
    """
    _, effects, _ = _load()
    return [effect_of(effects["clip"], "dapo_no_upper_clip", level) for level in LEVELS]


def _of_two_looks() -> str:
    """Return how the intervals of two looks make one, as sentences."""
    registered, effects, _ = _load()
    first = registered.stopping["first"]
    return (
        "An interval is what two intervals have in common: that of the first look, with "
        f"{first['seeds']} seeds, has {_percent('first')} for each family, and that of "
        f"the final look {_percent('final')}. Both together have 95 %, within each of "
        f"{len(effects)} families and not over all of them."
    )


def _by_the_first_look(effects: list[Effect]) -> str:
    """Return which effects differ from 0 only by the interval of the first look, as a
    sentence: the interval of the final look alone holds 0.
    """
    rows = []
    for e in effects:
        low, high = _final_alone(e)
        if (e.low > 0 or e.high < 0) and low < 0 < high:
            at = AT_LEVELS[LEVELS.index(e.question.name)]
            pair = f"{NAMES[e.question.first]} minus {NAMES[e.question.other]}"
            rows.append(f"{pair} {at}, [{low:+.1f}, {high:+.1f}]")
    if not rows:
        return "No gain and no loss in this table rests on the interval of the first look alone."
    return (
        "The interval of the final look alone holds 0, and that of the first does not, "
        f"for {'; '.join(rows)}."
    )


def _final_alone(e: Effect) -> tuple[float, float]:
    """Return the interval of an effect by the final look alone."""
    registered, effects, _ = _load()
    (family,) = (of_family for of_family in effects.values() if e in of_family)
    level = registered.stopping["final"]["level"] / len(family)
    return engine.interval(np.array(e.values), level)


def _percent(look: str) -> str:
    """Return the level of the intervals of a look, "first" or "final", as words."""
    registered, _, _ = _load()
    return f"{100 * (1 - registered.stopping[look]['level']):g} %"


def at_one_rate() -> str:
    """Return UP-DAPO minus DAPO without its upper clip, both at 1e-4, as README has it:
    Best@32 at equal Avg@32 at both levels, 16 rollouts stale.
    """
    at_t_1, at_top_p = map(shown, _beyond_clip())
    return f"{at_t_1} [at UP's]({PAGE}) (top-p 0.9: {at_top_p})"


def share_of_the_clip() -> float:
    """Return the share of UP's gain over DAPO in Best@32 at top-p 0.7 that DAPO has by
    dropping its upper clip, all at 1e-4.
    """
    _, effects, _ = _load()
    gain, beyond = (
        effect_of(effects["fixed"], other, "best/top_p_0.7").mean
        for other in ("dapo", "dapo_no_upper_clip")
    )
    return 1 - beyond / gain


def _bonuses() -> str:
    """Return what is known of the bonuses themselves: plain effects against DAPO, which
    nobody registered.
    """
    registered, _, _ = _load()
    known = records.load(registered.results)
    parts = []
    for arm in BONUSES:
        of_levels = []
        for level in LEVELS:
            effect = engine.plain(
                difference(level, arm, "dapo", GROUP),
                registered.runs(known),
                _seeds(),
                registered.group(GROUP)["bases"],
            )
            of_levels.append(shown(effect))
        parts.append(" and ".join(of_levels))
    return (
        "At the two levels DAPO with a bonus of 0.003 minus DAPO is "
        f"{parts[0]}, and with one of 0.01 {parts[1]} (95 %, not registered). No rate was "
        f"searched for 0.003. {_searched_rates()} 0.03 was not run beside them."
    )


def _searched_rates() -> str:
    """Return which rate the first controls' search scored highest for a bonus of 0.01,
    as a sentence.
    """
    first = plan.load("controls")
    known = records.load(first.results)
    cell = Cell("dapo_bonus", GROUP)
    scores = {
        rate: first.score(cell, Choice(rate, 0.01), known)
        for rate in first.rates(cell.arm)
    }
    assert max(scores, key=scores.get) == 1e-4
    return (
        f"For 0.01 the first controls searched {len(scores)} rates, "
        f"{len(first.search.seeds)} seeds a base, and 1e-4 scored highest."
    )


def _norms() -> str:
    """Return the largest norm of a gradient in any run of three arms, as a sentence."""
    registered, _, _ = _load()
    runs = registered.runs(records.load(registered.results))
    norms = {}
    for arm in ("dapo_no_upper_clip", "up_dapo", "dapo"):
        norms[arm] = stale.largest_norm(
            runs[arm, GROUP, base, seed]
            for base in registered.group(GROUP)["bases"]
            for seed in _seeds()
        )
    assert norms["dapo_no_upper_clip"] < 2 * norms["dapo"]
    return (
        "No run of UP-DAPO, of DAPO or of DAPO without its upper clip, all at 1e-4, "
        "explodes: before it is clipped, the largest norm of a gradient is "
        f"{norms_of_three(norms)}."
    )


def _equal_table(effects: list[Effect]) -> str:
    """Return a table with a row for each pair of arms, in the order of the families."""
    by_pair: dict[tuple[str, str], list[Effect]] = {}
    for e in effects:
        by_pair.setdefault((e.question.first, e.question.other), []).append(e)
    rows = []
    for (first, other), of_pair in by_pair.items():
        at_levels = [effect_of(of_pair, other, level) for level in LEVELS]
        on_bases = "; ".join(map(by_base, at_levels))
        rows.append([NAMES[first], NAMES[other], *map(with_word, at_levels), on_bases])
    columns = ["", "minus", *AT_LEVELS, "on each base, T = 1; top-p 0.9"]
    return table(columns, rows)


def _fresh(effects: list[Effect], fixed: list[Effect]) -> str:
    """Return the effects on fresh data as tables.

    Args:
        effects: at equal Avg@32.
        fixed: at the two fixed decodings.
    """
    return "\n".join(
        [
            "On fresh data, with 16 updates a rollout. These families are secondary. "
            "Best@32 at equal Avg@32, in points, with the margins of the first table:",
            "",
            _equal_table(effects),
            "",
            f"{_by_the_first_look(effects)} {_of_one_base(effects)} {_spread(effects)}",
            "",
            "On fresh data at the two fixed decodings, in points:",
            "",
            _fixed_table(fixed),
        ]
    )


def _gain_of_one_base() -> Effect:
    """Return UP-DAPO minus DAPO at the equal Avg@32 of T = 1 on fresh data.

    Raises:
        AssertionError: it is no gain, or not almost wholly of one base, or that base has
            most of the gain on stale data too.
    """
    _, effects, _ = _load()
    gain = effect_of(effects["fresh"], "dapo", LEVELS[0])
    when_stale = effect_of(effects["clip"], "dapo", LEVELS[0])
    assert gain.word == "gains" and gain.by_base[1] < 0.5 < 3 < gain.by_base[0]
    assert when_stale.by_base[0] < when_stale.by_base[1]
    return gain


def _of_one_base(effects: list[Effect]) -> str:
    """Return from which base the gain on DAPO at equal Avg@32 comes, and how much the
    jackknife corrects these effects, as sentences.
    """
    largest = max(map(_correction, effects), key=abs)
    return (
        "The gain on DAPO comes almost wholly from one base "
        f"({by_base(_gain_of_one_base())}), and not from the one with most of the gains "
        "on stale data; intervals are over seeds, not over bases. The registered rule "
        "averages jackknife values, which correct for bias: in this table the largest "
        f"correction is {largest:+.1f} points."
    )


def _spread(effects: list[Effect]) -> str:
    """Return how much the effects at equal Avg@32 on fresh data vary over the seeds."""
    spreads = [
        max(e.sd for e in effects if e.question.name == level) for level in LEVELS
    ]
    return (
        "Over seeds these effects vary more than planned: their standard "
        f"deviations are up to {spreads[0]:.1f} and {spreads[1]:.1f} points at the two "
        "levels, and the plan took [those of the first "
        "controls](../repro/mini/controls2/power.md)."
    )


def _curve_distances(e: Effect) -> list[float]:
    """Return the distance of the two curves of an effect at equal Avg@32, on each base,
    without the correction of the jackknife.
    """
    registered, _, _ = _load()
    runs = registered.runs(records.load(registered.results))
    seeds = _seeds()
    q = e.question
    distances = []
    for base in registered.group(q.group)["bases"]:
        first, other = (
            np.stack([curve(runs[arm, q.group, base, seed]) for seed in seeds])
            for arm in (q.first, q.other)
        )
        decodings = runs[q.first, q.group, base, seeds[0]]["settings"]["decodings"]
        at = [decoding_name(top_p) for top_p in decodings].index(q.decoding)
        distances.append(engine.at_equal_avg(first, other, at))
    return distances


def _correction(e: Effect) -> float:
    """Return what the jackknife adds to the distance of the two curves, in points."""
    return float(e.mean - np.mean(_curve_distances(e)))


def at_equal_average_on_fresh_data() -> str:
    """Return what the effects at equal Avg@32 on fresh data are, as sentences."""
    _, effects, _ = _load()
    of_dapo, of_no_clip = (
        [effect_of(effects["fresh"], other, level) for level in LEVELS]
        for other in ("dapo", "dapo_no_upper_clip")
    )
    assert [e.word for e in of_dapo] == ["gains", "undecided"]
    assert [e.word for e in of_no_clip] == ["gains", "undecided"]
    return (
        "At equal Avg@32 they show a gain at the level of T = 1, on DAPO "
        f"{shown(_gain_of_one_base())}, almost wholly from one of the two bases, and on DAPO "
        f"without its upper clip {shown(of_no_clip[0])}; at that of top-p 0.9 both are "
        "undecided."
    )


def on_fresh_data() -> Effect:
    """Return UP-DAPO minus DAPO in Best@32 at top-p 0.7, on fresh data with 16 updates a
    rollout.
    """
    _, effects, _ = _load()
    return effect_of(effects["fresh_fixed"], "dapo", "best/top_p_0.7")


def _fixed_table(effects: list[Effect]) -> str:
    """Return a table with a row for each arm that UP-DAPO is compared with."""
    rows = []
    for other in dict.fromkeys(e.question.other for e in effects):
        of_numbers = [with_word(effect_of(effects, other, name)) for name in FIXED]
        rows.append([NAMES[other], *of_numbers])
    return table(["UP-DAPO minus", *FIXED.values()], rows)


@cache
def _load() -> tuple[plan.Plan, dict[str, list[Effect]], str]:
    """Return the plan, the effects of each family by its name, and a sentence on how
    many runs are finished.

    Raises:
        AssertionError: an effect is not that of the final look.
    """
    registered = plan.load("controls2")
    known = records.load(registered.results)
    by_family = registered.by_family(registered.effects(known))
    effects = {family.name: list(found) for family, found in by_family}
    seeds = registered.stopping["final"]["seeds"]
    every = [e for of_family in effects.values() for e in of_family]
    assert all(e.reached and e.n == seeds for e in every)
    return registered, effects, registered.progress(known)
