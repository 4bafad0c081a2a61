# SPDX-License-Identifier: Apache-2.0
"""What the second registered experiment on UP's controls has found so far, for
docs/findings.md and README.

It compares UP-DAPO with DAPO without its upper clip at one learning rate, and with DAPO
with smaller entropy bonuses than the one that `controls` searched. Each seed has its own
problems. The words are typed, the numbers computed; an AssertionError says that the
records no longer support the words.
"""

from functools import cache

import numpy as np
from scipy.stats import t

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
from repro.mini.experiment.questions import curve, decoding_name, difference
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
    """Return the last look that was taken, and its effects as tables; before the first
    look only how far the runs are.
    """
    registered, effects, progress = _load()
    first = registered.stopping["first"]
    at_equal = [e for name in AT_EQUAL_AVERAGE for e in effects[name]]
    if any(e.word == "not finished" for e in at_equal):
        return (
            f"{progress} The first look is at {first['seeds']} seeds; before it nothing "
            "is known."
        )
    every = [e for of_family in effects.values() for e in of_family]
    verdict = ANSWERS[answer(registered, every)]
    return "\n".join(
        [
            f"The registered answer at {_which_look()}: **{verdict}**. It rests on the "
            "first two rows, the primary family; the other rows are "
            f"secondary.{_power()} {progress}{_between_looks()}",
            "",
            "Best@32 at equal Avg@32, 16 rollouts stale, in points. Where no rate is named "
            "it is 1e-4. The margins are 1 and 1.8, half of UP-DAPO's gain on DAPO in the "
            "first controls. The intervals of the first look have "
            f"{_percent('first')} for each family, and those of the final look "
            f"{_percent('final')}; both looks together have 95 %.",
            "",
            _equal_table(at_equal),
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


def _seeds_of_look() -> int:
    """Return how many seeds the last look at stale data has.

    Raises:
        AssertionError: an effect at equal Avg@32 has another number of them.
    """
    registered, effects, _ = _load()
    counts = {e.n for name in AT_EQUAL_AVERAGE for e in effects[name]}
    (seeds,) = counts
    assert seeds in (
        registered.stopping["first"]["seeds"],
        registered.stopping["final"]["seeds"],
    )
    return seeds


def _is_final() -> bool:
    """Return whether the last look at stale data is the final one."""
    registered, _, _ = _load()
    return _seeds_of_look() == registered.stopping["final"]["seeds"]


def _which_look() -> str:
    """Return the name of the last look, with its seeds."""
    registered, _, _ = _load()
    final = registered.stopping["final"]["seeds"]
    if _is_final():
        return f"the final look, with {final} seeds"
    return f"the first of two looks, with {_seeds_of_look()} of {final} seeds"


def _power() -> str:
    """Return a sentence on the power of a first look; "" at the final one."""
    if _is_final():
        return ""
    return (
        " A first look has [little power](../repro/mini/controls2/power.md) for effects "
        "at equal Avg@32 as large as the margins."
    )


def _between_looks() -> str:
    """Return what becomes of runs of later seeds than the first look has; "" at the
    final one.
    """
    if _is_final():
        return ""
    return (
        f" Runs of later seeds than the first {_seeds_of_look()} change nothing here "
        "before the final look: until then every effect is that of the first."
    )


def _percent(look: str) -> str:
    """Return the level of the intervals of a look, "first" or "final", as words."""
    registered, _, _ = _load()
    return f"{100 * (1 - registered.stopping[look]['level']):g} %"


def at_one_rate() -> str:
    """Return the word on UP-DAPO minus DAPO without its upper clip, both at 1e-4, as
    README has it: Best@32 at equal Avg@32, 16 rollouts stale.
    """
    _, effects, _ = _load()
    both = [effect_of(effects["clip"], "dapo_no_upper_clip", level) for level in LEVELS]
    assert {e.word for e in both} == {"undecided"}
    return f"[undecided]({PAGE}) after {_seeds_of_look()} seeds"


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
                registered.main["seeds"][: _seeds_of_look()],
                registered.group(GROUP)["bases"],
            )
            assert effect.low < 0 < effect.high
            of_levels.append(shown(effect))
        parts.append(" and ".join(of_levels))
    return (
        "Neither bonus is shown to improve on DAPO: at the two levels DAPO with a bonus of 0.003 minus DAPO is "
        f"{parts[0]}, and with one of 0.01 {parts[1]} (95 %, not registered). No rate was searched for them, and 0.03 "
        "was not run beside them."
    )


def _norms() -> str:
    """Return the largest norm of a gradient in any run of three arms, as a sentence."""
    registered, _, _ = _load()
    runs = registered.runs(records.load(registered.results))
    seeds = registered.main["seeds"][: _seeds_of_look()]
    norms = {}
    for arm in ("dapo_no_upper_clip", "up_dapo", "dapo"):
        norms[arm] = stale.largest_norm(
            runs[arm, GROUP, base, seed]
            for base in registered.group(GROUP)["bases"]
            for seed in seeds
        )
    assert norms["dapo_no_upper_clip"] < 2 * norms["dapo"]
    return (
        "No run at UP's rate explodes: before it is clipped, the largest norm of a "
        f"gradient is {norms_of_three(norms)}."
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
    """Return the effects on fresh data as tables, or that they have no look yet.

    Args:
        effects: at equal Avg@32.
        fixed: at the two fixed decodings.
    """
    if any(e.word == "not finished" for e in effects):
        return "On fresh data, with 16 updates a rollout, no look is due yet."
    return "\n".join(
        [
            "On fresh data, with 16 updates a rollout, at the first look, "
            f"{effects[0].n} seeds. These families are secondary. Best@32 at equal "
            "Avg@32, in points, with the margins of the first table:",
            "",
            _equal_table(effects),
            "",
            _fragile(effects),
            "",
            _spread(effects),
            "",
            "On fresh data at the two fixed decodings, in points:",
            "",
            _fixed_table(fixed),
        ]
    )


def _fragile(effects: list[Effect]) -> str:
    """Return why the one gain at equal Avg@32 on fresh data is fragile."""
    _, of_family, _ = _load()
    (gain,) = (e for e in effects if e.word == "gains")
    when_stale = effect_of(of_family["clip"], "dapo", LEVELS[0])
    assert effect_of(effects, "dapo", LEVELS[0]) == gain
    assert gain.by_base[0] > gain.by_base[1]
    assert when_stale.by_base[0] < when_stale.by_base[1]
    at_equal = [e for name in AT_EQUAL_AVERAGE for e in of_family[name]] + effects
    others = max(abs(_correction(e)) for e in at_equal if e is not gain)
    assert others < 0.25 < 1 < _correction(gain)
    first, second = _curve_distances(gain)
    distance = (first + second) / 2
    assert distance < (gain.high - gain.low) / 2
    best, average = (
        effect_of(of_family["fresh_fixed"], "dapo", name)
        for name in ("best/t_1", "avg/t_1")
    )
    return (
        "The one gain is fragile. The registered rule averages jackknife values, which "
        f"correct for bias; here the correction is {_correction(gain):+.1f} points, and at "
        f"most {others:.1f} in every other row at equal Avg@32. The distance of the two "
        f"curves themselves is {distance:+.1f} ({first:+.1f} and {second:+.1f} on the two "
        "bases), and an interval of the same width around it holds 0 (not registered). At "
        f"T = 1, where Avg@32 differs by {average.mean:+.1f}, Best@32 differs by "
        f"{shown(best)}. The gain comes almost wholly from one base, and not from the one "
        "with most of the gains on stale data."
    )


def _spread(effects: list[Effect]) -> str:
    """Return how much the effects at equal Avg@32 on fresh data vary over the seeds, and
    what the final look can show of them.
    """
    registered, _, _ = _load()
    final = registered.stopping["final"]
    quantile = t.ppf(1 - final["level"] / len(effects) / 2, final["seeds"] - 1)
    spreads = []
    halves = []  # of the intervals of the final look, with these spreads
    for level in LEVELS:
        of_level = [e for e in effects if e.question.name == level]
        spreads.append(max(e.sd for e in of_level))
        halves.append(quantile * spreads[-1] / np.sqrt(final["seeds"]))
        assert halves[-1] > of_level[0].question.margin
    return (
        "Over seeds these effects vary about twice as much as planned: their standard "
        f"deviations are up to {spreads[0]:.1f} and {spreads[1]:.1f} points at the two "
        "levels, and the plan took [those of the first "
        "controls](../repro/mini/controls2/power.md). If that stays so, half an interval "
        f"is about {halves[0]:.1f} and {halves[1]:.1f} points at the final look, more than "
        "the margins: *no difference* will hardly be possible."
    )


def _curve_distances(e: Effect) -> list[float]:
    """Return the distance of the two curves of an effect at equal Avg@32, on each base,
    without the correction of the jackknife.
    """
    registered, _, _ = _load()
    runs = registered.runs(records.load(registered.results))
    seeds = registered.main["seeds"][: e.n]
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
    """
    registered = plan.load("controls2")
    known = records.load(registered.results)
    by_family = registered.by_family(registered.effects(known))
    effects = {family.name: list(found) for family, found in by_family}
    return registered, effects, registered.progress(known)
