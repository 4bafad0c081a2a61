# SPDX-License-Identifier: Apache-2.0
"""What the registered experiment on UP's controls has found so far, for
docs/findings.md.
"""

from functools import cache

import numpy as np

from repro.mini.registered import plan, report, rule
from repro.mini.registered.rule import Effect
from repro.mini.study import results, suite
from repro.mini.study.results import Record

FOLDER = suite.ROOT / "repro/mini/controls"
NAMES = {
    "dapo": "DAPO",
    "dapo_bonus": "DAPO with a tuned entropy bonus",
    "dapo_clip_0_5": "DAPO with ε_high = 0.5",
    "dapo_clip_1": "DAPO with ε_high = 1",
    "dapo_clip_3": "DAPO with ε_high = 3",
    "dapo_no_upper_clip": "DAPO without its upper clip",
    "up_above_clip": "DAPO with UP's weight where r > 1 + ε_high",
    "up_below_one": "DAPO with UP's weight where r < 1",
    "up_both_sides": "DAPO with UP's weight in both regions",
}
ELSEWHERE = {
    "s0": "fresh data",
    "chain_s16": "chain, 16 rollouts stale",
}
ANSWERS = {
    "yes": "UP-DAPO gives more than each control",
    "no": "no, at least one control has all that UP-DAPO gives, up to the margins",
    "undecided": "undecided, the intervals allow both answers",
}


BONUS_WORDS = {
    "not finished": "leave it open: they had no look yet",
    "undecided": "leave it undecided whether UP gives anything beyond a tuned entropy bonus",
    "nothing more": "find that UP gives no more than the margins beyond a tuned entropy bonus",
    "less": "find that UP gives less than a tuned entropy bonus",
    "more": "find that UP gives more than the entropy bonus that the search chose",
    "a trade": "find that UP gains on a tuned entropy bonus at one level of Avg@32 and loses at another",
}


def bonus_words() -> str:
    """Return what the experiment has found about a tuned entropy bonus, as the end of a
    sentence.
    """
    registered, _, effects = _load()
    return BONUS_WORDS[rule.against(effects, registered, "dapo_bonus")]


def at_equal_average() -> str:
    """Return README's sentence on UP-DAPO at equal Avg@32."""
    registered, _, effects = _load()
    assert rule.against(effects, registered, "dapo_no_upper_clip") == "nothing more"
    bonus = _main_runs()["dapo_bonus"][0]["settings"]["entropy_bonus"]
    dapo, with_bonus, without_clip = (
        report.shown(_effect("equal_avg/t_1", other))
        for other in ("dapo", "dapo_bonus", "dapo_no_upper_clip")
    )
    return (
        "16 rollouts stale, at [equal average](repro/mini/controls/README.md) (level of "
        f"T = 1), Best@32 of UP minus DAPO: {dapo}; minus DAPO with an entropy bonus "
        f"({bonus:g}): {with_bonus}; minus DAPO without its upper clip: {without_clip}."
    )


def share_of_the_clip(metric: str) -> float:
    """Return the share of UP's gain over DAPO that DAPO has by dropping its upper clip.

    Args:
        metric: of Best@32, as in the plan of the experiment.
    """
    beyond_no_clip = _effect(metric, "dapo_no_upper_clip").mean
    return 1 - beyond_no_clip / _effect(metric, "dapo").mean


def over_dapo() -> str:
    """Return UP-DAPO minus DAPO at the level of T = 1, as words."""
    return f"{report.shown(_effect('equal_avg/t_1', 'dapo'))} at the Avg@32 of T = 1"


def beyond_no_clip() -> str:
    """Return the effects beyond DAPO without its upper clip, at both levels, as words."""
    t_1, top_p = (
        report.shown(_effect(metric, "dapo_no_upper_clip"))
        for metric in ("equal_avg/t_1", "equal_avg/top_p_0.9")
    )
    return f"{t_1} at the Avg@32 of T = 1 and {top_p} at that of top-p 0.9"


def second_task() -> str:
    """Return UP-DAPO minus DAPO in Best@32 at top-p 0.7 on the task chain."""
    gain = _effect("best/top_p_0.7", "dapo", "chain_s16")
    assert gain.word == "gains by less than 4"
    return report.rounded(gain, gain.mean)


def entropy_and_best() -> tuple[float, int]:
    """Return the correlation of final entropy and Best@32 at top-p 0.7 over the
    methods, and how many methods there are.
    """
    runs = _main_runs()
    means = [
        [np.mean([rule.number(r, metric) for r in of_arm]) for of_arm in runs.values()]
        for metric in ("entropy", "best/top_p_0.7")
    ]
    return float(np.corrcoef(means)[0, 1]), len(runs)


def _effect(metric: str, other: str, group: str = "s16") -> Effect:
    """Return UP-DAPO minus another method, by its registered family."""
    _, _, effects = _load()
    (found,) = (
        e
        for e in effects
        if (e.first, e.metric, e.other, e.group) == ("up_dapo", metric, other, group)
    )
    return found


def _main_runs() -> dict[str, list[Record]]:
    """Return the runs of each method in the experiment proper, 16 rollouts stale."""
    registered, records, _ = _load()
    runs: dict[str, list[Record]] = {}
    for (cell, _, _), record in rule.values_of(registered, records).items():
        if cell.group == "s16" and record:
            runs.setdefault(cell.arm, []).append(record)
    return runs


@cache
def _load() -> tuple[plan.Plan, dict[str, Record], list[Effect]]:
    """Return the plan, the records of finished runs, and the effects of all families."""
    registered = plan.load(FOLDER / "plan.toml")
    records = results.load(FOLDER / "results")
    return registered, records, rule.effects(registered, records)


def text() -> str:
    """Return the answer, and the effects that docs/findings.md shows, as tables."""
    registered, records, effects = _load()
    answer = rule.answer(effects, registered)
    progress = report.progress(registered, records)
    first = registered.stopping["first"]["seeds"]
    if answer == "not finished":
        return f"{progress} The first look is at {first} seeds; before it nothing is known."
    due = rule.seeds_due(registered, records)
    seeds = min(e.n for e in effects if e.family == "equal")
    look = (
        "The final look" if seeds >= due else f"The first look, {seeds} of {due} seeds"
    )
    against = {
        control: rule.against(effects, registered, control)
        for control in registered.answer["controls"]
    }
    return "\n".join(
        [
            f"{look}: **{ANSWERS[answer]}**. {progress}",
            "",
            "UP-DAPO minus each control, Best@32 at equal Avg@32, 16 rollouts stale, in points. The margins are 2 and 4:",
            "",
            "| control | at the Avg@32 of T = 1 | at the Avg@32 of top-p 0.9 | on each "
            "base, T = 1; top-p 0.9 | so UP-DAPO gives |",
            "|---|---|---|---|---|",
            *_rows(effects, "equal", "equal_avg/t_1", "equal_avg/top_p_0.9", against),
            "",
            _caveats(registered),
            "",
            "At the fixed decoding top-p 0.7, in points. Here a method may gain in Best@32 what it loses in Avg@32:",
            "",
            "| control | Best@32 | Avg@32 |",
            "|---|---|---|",
            *_rows(effects, "fixed", "best/top_p_0.7", "avg/top_p_0.7"),
            "",
            "Which part of UP's weight makes the difference? Best@32 at equal Avg@32, in points:",
            "",
            "| UP-DAPO minus | at the Avg@32 of T = 1 | at the Avg@32 of top-p 0.9 |",
            "|---|---|---|",
            *_rows(effects, "halves", "equal_avg/t_1", "equal_avg/top_p_0.9"),
            "",
            "On fresh data, and on a second task (*chain*). Best@32 at equal Avg@32, in points:",
            "",
            "| where | UP-DAPO minus | at the Avg@32 of T = 1 | at the Avg@32 of top-p 0.9 |",
            "|---|---|---|---|",
            *_rows_elsewhere(effects),
            "",
            _choices(registered, records),
        ]
    )


def _caveats(registered: plan.Plan) -> str:
    """Return what a reader of the table of controls must know, as sentences."""
    runs = _main_runs()
    highest = []
    for metric in ("equal_avg/t_1", "equal_avg/top_p_0.9"):
        effect = _effect(metric, "dapo_no_upper_clip")
        highest.append(report.rounded(effect, effect.high))
    barely = _effect("equal_avg/t_1", "dapo_clip_1")
    clipped = np.mean([r["steps"]["clip_pos_high"] for r in runs["dapo_clip_3"]])
    bonus, plain = (
        rule.score(runs[arm], registered.search) for arm in ("dapo_bonus", "dapo")
    )
    coefficient = runs["dapo_bonus"][0]["settings"]["entropy_bonus"]
    assert clipped < 1e-5 and bonus < plain
    return (
        "*Nothing more* means nothing beyond the margins, which are about as large as "
        "UP-DAPO's whole gain on DAPO. Beyond DAPO without its upper clip the intervals "
        f"leave at most {highest[0]} and {highest[1]} points. DAPO with ε_high = 3 is "
        "nearly the same control: it clips fewer than 1 in 100,000 tokens. Against ε_high "
        "= 1 *more* rests on one level, and on an interval that begins at "
        f"{barely.low:+.2f}. The entropy bonus of {coefficient:g} is the best of four "
        "coefficients in the runs of the search, which have half the length. The search "
        f"compared Best@32 + {registered.search['exchange']:g} Avg@32, each at the "
        "decoding where this is largest. In the full runs it is "
        f"lower with the bonus than for DAPO ({bonus:.1f} and {plain:.1f}); a "
        "smaller bonus was not run in full."
    )


def _rows_elsewhere(effects: list[Effect]) -> list[str]:
    """Return one row per group and control of the family on other data."""
    rows = []
    for group, words in ELSEWHERE.items():
        of_group = [e for e in effects if e.group == group]
        levels = "equal_avg/t_1", "equal_avg/top_p_0.9"
        for row in _rows(of_group, "elsewhere", *levels):
            rows.append(f"| {words} {row}")
    return rows


def _choices(registered: plan.Plan, records: dict[str, Record]) -> str:
    """Return the rates and coefficients that the search chose 16 rollouts stale, and
    the coefficients elsewhere, as sentences.
    """
    rates: dict[float, list[str]] = {}
    coefficients = {}
    for cell in registered.cells():
        choice = registered.choice(cell, records)
        if choice is None:
            continue
        if cell.group == "s16":
            name = NAMES.get(cell.arm, "UP-DAPO")
            rates.setdefault(choice.rate, []).append(name)
        if choice.coefficient is not None:
            words = ELSEWHERE.get(cell.group, "16 rollouts stale")
            coefficients[words] = choice.coefficient
    most_chosen = max(rates, key=lambda rate: len(rates[rate]))
    others = [
        f"{rate:g} for {' and '.join(names)}"
        for rate, names in sorted(rates.items())
        if rate != most_chosen
    ]
    bonus = ", ".join(f"{c:g} ({words})" for words, c in coefficients.items())
    return (
        f"The search chose the learning rate {most_chosen:g} for most methods, 16 rollouts stale; "
        f"{', '.join(others)}. It chose these coefficients of the bonus: {bonus}."
    )


def _rows(
    effects: list[Effect],
    family: str,
    first: str,
    second: str,
    words: dict[str, str] | None = None,
) -> list[str]:
    """Return one row per control of a family, with the effects on two metrics."""
    of_metric = {
        (e.other, e.metric): f"{report.shown(e)}, {e.word}"
        if e.word not in ("not finished", "out of reach")
        else e.word
        for e in effects
        if e.family == family
    }
    bases = {
        (e.other, e.metric): ", ".join(report.rounded(e, x) for x in e.by_base)
        for e in effects
        if e.family == family
    }
    rows = []
    for control in dict.fromkeys(other for other, _ in of_metric):
        cells = [NAMES[control], of_metric[control, first], of_metric[control, second]]
        if words is not None:
            cells.append(
                "; ".join(bases[control, metric] for metric in (first, second))
            )
            cells.append(words.get(control, "DAPO itself is not a control"))
        rows.append(f"| {' | '.join(cells)} |")
    return rows
