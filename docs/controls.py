# SPDX-License-Identifier: Apache-2.0
"""What the registered experiment on UP's controls has found so far, for docs/findings.md.

A control is DAPO with a simpler change than UP; a method is an arm of the experiment,
and its runs here are those at 16 rollouts of staleness ("s16") unless a group is named.
The words of the pages are typed, the numbers computed; an AssertionError says that the
records no longer support the words.
"""

from functools import cache

import numpy as np

from docs import stale
from repro.mini.experiment import answer, plan, records
from repro.mini.experiment.effects import Effect
from repro.mini.experiment.questions import RunRecord, curve, number, term_of
from repro.mini.experiment.words import by_base, rounded, shown
from upref.markdown import table

NAMES = {
    "dapo": "DAPO",
    "dapo_bonus": "DAPO with a searched entropy bonus",
    "dapo_clip_0_5": "DAPO with ε_high = 0.5",
    "dapo_clip_1": "DAPO with ε_high = 1",
    "dapo_clip_3": "DAPO with ε_high = 3",
    "dapo_no_upper_clip": "DAPO without its upper clip",
    "up_above_clip": "DAPO with UP's weight where r > 1 + ε_high",
    "up_below_one": "DAPO with UP's weight where r < 1",
    "up_both_sides": "DAPO with UP's weight in both regions",
}
LEVELS = ("equal_avg/t_1", "equal_avg/top_p_0.9")
AT_LEVELS = ("at the Avg@32 of T = 1", "at the Avg@32 of top-p 0.9")
FIXED = ("best/top_p_0.7", "avg/top_p_0.7")
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
    "undecided": "leave it undecided whether UP gives anything beyond a searched entropy bonus",
    "nothing more": "find that UP gives no more than the margins beyond a searched entropy bonus",
    "less": "find that UP gives less than a searched entropy bonus",
    "more": "find that UP gives more than the entropy bonus that the search chose",
    "a trade": "find that UP gains on a searched entropy bonus at one level of Avg@32 and loses at another",
}


def bonus_words() -> str:
    """Return what the experiment has found about a searched entropy bonus, as the end of a
    sentence.
    """
    registered, _, effects = _load()
    return BONUS_WORDS[answer.against(registered, effects, "dapo_bonus")]


def at_equal_average(at_one_rate: str) -> str:
    """Return README's sentence on UP-DAPO at equal Avg@32.

    Args:
        at_one_rate: UP-DAPO minus DAPO without its upper clip at one learning rate, in
            words, of another experiment.
    """
    registered, _, effects = _load()
    assert answer.against(registered, effects, "dapo_no_upper_clip") == "nothing more"
    dapo, without_clip = (
        shown(_effect("equal_avg/t_1", other))
        for other in ("dapo", "dapo_no_upper_clip")
    )
    assert _rate("dapo_no_upper_clip") == 5.5e-5 and _rate("up_dapo") == 1e-4
    return (
        "Stale, at [equal average](repro/mini/controls/README.md) (of T = 1), UP's "
        f"Best@32 minus DAPO's: {dapo}; minus that without upper clip, "
        f"{without_clip} at half UP's rate, {at_one_rate}."
    )


def _rate(arm: str) -> float:
    """Return the learning rate of a method in the experiment proper."""
    return _main_runs()[arm][0]["settings"]["lr"]


def _at_slopes() -> list[Effect]:
    """Return what UP-DAPO gives beyond DAPO without its upper clip, both at one learning
    rate: in points of Best@32 at equal Avg@32, from the records on stale data, by two
    slopes.

    These records have no curves of decodings. At T = 1 each method has its own Avg@32;
    at the level half-way between the two, the difference is estimated as that of
    Best@32 plus x / 2 times that of Avg@32, both at T = 1. x is the slope at which
    UP-DAPO exchanges one for the other there. There are two values of it: that near T =
    1 in the records of the controls, and the one by which the search compared.
    """
    registered, _, _ = _load()
    points = np.mean([curve(r)[-1] for r in _main_runs()["up_dapo"]], axis=0)
    (avg_below, best_below), (avg_t_1, best_t_1) = points[-2:]
    at_t_1 = -(best_t_1 - best_below) / (avg_t_1 - avg_below)
    slopes = at_t_1, registered.search.exchange
    found = [
        stale.weighed(slope / 2, "up_dapo", "dapo_no_upper_clip", "t_1")
        for slope in slopes
    ]
    assert all(e.low > 0 for e in found)
    return found


def _rates_of_parts(part: str) -> str:
    """Return the rate that each part of the search would have chosen by itself for DAPO
    without its upper clip, 16 rollouts stale, as text.

    Args:
        part: "seed" or "base".
    """
    registered, _, _ = _load()
    runs = _search_runs("dapo_no_upper_clip")
    rates = sorted({run["settings"]["lr"] for run in runs})
    chosen = []
    for value in sorted({run["settings"][part] for run in runs}):
        scores = {}
        for rate in rates:
            of_rate = [
                run
                for run in runs
                if run["settings"][part] == value and run["settings"]["lr"] == rate
            ]
            scores[rate] = registered.search.score_of(of_rate)
        best = max(scores, key=scores.__getitem__)
        chosen.append(f"{best:g}")
    return " and ".join(chosen)


def _search_runs(objective: str) -> list[RunRecord]:
    """Return the runs by which the search chose the rate of a method, 16 rollouts
    stale.
    """
    registered, known, _ = _load()
    found = []
    for run in known.values():
        settings = run["settings"]
        is_of_method = (
            settings["objective"] == objective and settings["staleness"] == 16
        )
        if is_of_method and settings["seed"] in registered.search.seeds:
            found.append(run)
    return found


def clip_words() -> str:
    """Return the paragraph of docs/findings.md on DAPO without its upper clip."""
    rates = {
        run["settings"]["lr"]
        for arm in ("up_dapo", "dapo_no_upper_clip", "dapo")
        for run in stale.runs_of(arm)
    }
    assert rates == {_rate("up_dapo")}
    best = shown(stale.minus("best/t_1", "up_dapo", "dapo_no_upper_clip"))
    avg = shown(stale.minus("avg/t_1", "up_dapo", "dapo_no_upper_clip"))
    least, most = sorted(_at_slopes(), key=lambda e: e.mean)
    # the same in every run of an experiment
    problems = _main_runs()["dapo"][0]["settings"]["eval_problems"]
    any_stale_run = next(iter(stale.runs().values()))
    stale_problems = any_stale_run["settings"]["eval_problems"]
    return (
        "**At which learning rate?** In this experiment the search chose "
        f"{_rate('dapo_no_upper_clip'):g} for DAPO without its upper clip and "
        f"{_rate('up_dapo'):g} for UP-DAPO. Its two seeds by themselves choose "
        f"{_rates_of_parts('seed')} for DAPO without its upper clip, its two bases "
        f"{_rates_of_parts('base')}. In the records on stale data both have "
        f"{_rate('up_dapo'):g}, on {stale_problems} other problems in place of "
        f"{problems}. There UP-DAPO minus DAPO without its upper clip is {best} of "
        f"Best@32 and {avg} of Avg@32 at T = 1, which is {shown(least)} to {shown(most)} at equal "
        "Avg@32, by the slope at which one is exchanged for the other (none of it "
        "registered). So *nothing more* is shown of DAPO without its upper clip at half of "
        "UP's rate, and not at UP's rate. [The second controls](#the-second-controls) "
        f"registered the question at UP's rate.\n\n{_stability()}"
    )


def _stability() -> str:
    """Return the largest norms of gradients: of this experiment, and of the records on
    stale data.
    """
    norms = {arm: stale.largest_norm(of_arm) for arm, of_arm in _main_runs().items()}
    of_stale = {
        arm: stale.largest_norm(stale.runs_of(arm))
        for arm in ("dapo_no_upper_clip", "up_dapo", "dapo")
    }
    assert norms["dapo_no_upper_clip"] < norms["dapo"]
    return (
        "**Stability.** The paper's argument for the self-anchor is that its run without "
        "the upper clip explodes beyond 80 steps (Fig. 5). In this experiment no full run "
        "without it does: the largest norm of a gradient is "
        f"{norms_of_three(norms)}. The arm without the upper clip trains at half of "
        "their rate. With a wider clip the largest norm is "
        f"{norms['dapo_clip_1']:.0f} (ε_high = 1, at {_rate('dapo_clip_1'):g}) and "
        f"{norms['dapo_clip_0_5']:.0f} (ε_high = 0.5, at {_rate('dapo_clip_0_5'):g}). In "
        "the records on stale data, where the three methods have one rate, it is "
        f"{norms_of_three(of_stale)}."
    )


def norms_of_three(norms: dict[str, float]) -> str:
    """Return the norms of UP-DAPO, DAPO, and DAPO without its upper clip, as words."""
    return (
        f"{norms['dapo_no_upper_clip']:.0f} without the upper clip, "
        f"{norms['up_dapo']:.0f} for UP-DAPO and {norms['dapo']:.0f} for DAPO"
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
    return f"{shown(_effect('equal_avg/t_1', 'dapo'))} at the Avg@32 of T = 1"


def beyond_no_clip() -> str:
    """Return the effects beyond DAPO without its upper clip, at both levels, as words."""
    t_1, top_p = (shown(_effect(metric, "dapo_no_upper_clip")) for metric in LEVELS)
    return f"{t_1} at the Avg@32 of T = 1 and {top_p} at that of top-p 0.9"


def entropy_and_best() -> tuple[float, int]:
    """Return the correlation of final entropy and Best@32 at top-p 0.7 over the
    methods, and how many methods there are.
    """
    every = _main_runs().values()
    entropy = [_mean("entropy", runs) for runs in every]
    best = [_mean("best/top_p_0.7", runs) for runs in every]
    return float(np.corrcoef(entropy, best)[0, 1]), len(every)


def _mean(name: str, runs: list[RunRecord]) -> float:
    """Return the mean of a number over runs."""
    term = term_of(name, "", "")
    return float(np.mean([number(run, term) for run in runs]))


def _effect(metric: str, other: str) -> Effect:
    """Return UP-DAPO minus another method, 16 rollouts stale, as the registered
    experiment has it.

    Args:
        metric: the name of a number.
        other: the method.
    """
    _, _, effects = _load()
    found = []
    for e in effects:
        q = e.question
        if (q.first, q.name, q.other, q.group) == ("up_dapo", metric, other, "s16"):
            found.append(e)
    (effect,) = found
    return effect


def _family(name: str) -> list[Effect]:
    """Return the effects of one registered family."""
    registered, _, effects = _load()
    by_name = {family.name: of for family, of in registered.by_family(effects)}
    return by_name[name]


def _main_runs() -> dict[str, list[RunRecord]]:
    """Return the runs of each method in the experiment proper, 16 rollouts stale."""
    registered, known, _ = _load()
    runs: dict[str, list[RunRecord]] = {}
    for (arm, group, _, _), run in registered.runs(known).items():
        if group == "s16":
            runs.setdefault(arm, []).append(run)
    return runs


@cache
def _load() -> tuple[plan.Plan, dict[str, RunRecord], list[Effect]]:
    """Return the plan, the records of finished runs, and the effects of all families."""
    registered = plan.load("controls")
    known = records.load(registered.results)
    return registered, known, registered.effects(known)


def text() -> str:
    """Return the answer, and the effects that docs/findings.md shows, as tables; before
    the first look only how far the runs are.
    """
    registered, known, effects = _load()
    verdict = answer.answer(registered, effects)
    progress = registered.progress(known)
    first = registered.stopping["first"]["seeds"]
    if verdict == "not finished":
        return f"{progress} The first look is at {first} seeds; before it nothing is known."
    due = registered.seeds_due(known)
    seeds = min(e.n for e in _family("equal"))
    if seeds >= due:
        look = "The final look"
    else:
        look = f"The first look, {seeds} of {due} seeds"
    against = {
        control: answer.against(registered, effects, control)
        for control in registered.answer["controls"]
    }
    return "\n".join(
        [
            f"{look}: **{ANSWERS[verdict]}**. {progress}",
            "",
            "UP-DAPO minus each control, Best@32 at equal Avg@32, 16 rollouts stale, in points. The margins are 2 and 4:",
            "",
            _against_each_control(against),
            "",
            _caveats(registered),
            "",
            clip_words(),
            "",
            "At the fixed decoding top-p 0.7, in points. Here a method may gain in Best@32 what it loses in Avg@32:",
            "",
            table(["control", "Best@32", "Avg@32"], _rows(_family("fixed"), *FIXED)),
            "",
            "Which part of UP's weight makes the difference? Best@32 at equal Avg@32, in points:",
            "",
            table(["UP-DAPO minus", *AT_LEVELS], _rows(_family("halves"), *LEVELS)),
            "",
            "On fresh data, and on a second task (*chain*). Best@32 at equal Avg@32, in points:",
            "",
            table(["where", "UP-DAPO minus", *AT_LEVELS], _rows_elsewhere()),
            "",
            "[The report](../repro/mini/controls/results/report.md#rates-and-coefficients) has "
            "the learning rate and the coefficient that the search chose for each method.",
        ]
    )


def _caveats(registered: plan.Plan) -> str:
    """Return what a reader of the table of controls must know, as sentences."""
    runs = _main_runs()
    highest = []
    for level in LEVELS:
        effect = _effect(level, "dapo_no_upper_clip")
        highest.append(rounded(effect.question, effect.high))
    barely = _effect("equal_avg/t_1", "dapo_clip_1")
    clipped = np.mean([r["steps"]["clip_pos_high"] for r in runs["dapo_clip_3"]])
    bonus = registered.search.score_of(runs["dapo_bonus"])
    plain = registered.search.score_of(runs["dapo"])
    coefficient = runs["dapo_bonus"][0]["settings"]["entropy_bonus"]
    steps = registered.search.settings["steps"]
    early_bonus = _score_at(runs["dapo_bonus"], steps, registered)
    early_plain = _score_at(runs["dapo"], steps, registered)
    assert clipped < 1e-5 and bonus < plain and early_bonus < early_plain
    assert not any(map(_nothing_more_at_half_the_gain, registered.answer["controls"]))
    problems = runs["dapo"][0]["settings"]["eval_problems"]
    return (
        "*Nothing more* means nothing beyond the margins, which are about as large as "
        "UP-DAPO's whole gain on DAPO: with margins of half of this gain no control "
        "would be *nothing more*. Beyond DAPO without its upper clip the intervals "
        f"leave at most {highest[0]} and {highest[1]} points. DAPO with ε_high = 3 is "
        "nearly the same control: it clips fewer than 1 in 100,000 tokens. Against ε_high "
        "= 1 *more* rests on one level, and on an interval that begins at "
        f"{barely.low:+.2f}.\n\nThe entropy bonus of {coefficient:g} was searched, and "
        f"the search has {len(registered.search.seeds)} seeds a base. It compared "
        f"Best@32 + {registered.search.exchange:g} Avg@32, each at the decoding where "
        f"this is largest, after {steps} steps, and {coefficient:g} scored highest of "
        "four coefficients. The full runs, of other seeds and problems, do not confirm "
        f"it: this sum is {early_bonus:.1f} with the bonus and {early_plain:.1f} for "
        f"DAPO at step {steps}, {bonus:.1f} and {plain:.1f} at the end. [The "
        "second controls](#the-second-controls) have two smaller ones.\n\n"
        "Intervals are over seeds. All seeds answer the same "
        f"{problems} problems, and an interval that held for new problems would be "
        "wider. At equal Avg@32 the comparison also lets a method use an earlier evaluation "
        "(step 100, 200 or 300) or a mixture of two settings; the picture shows the last "
        "step alone."
    )


def _score_at(runs: list[RunRecord], step: int, registered: plan.Plan) -> float:
    """Return the score of the search at an evaluated step of full runs, which must be
    one that their settings evaluate.
    """
    every = runs[0]["settings"]["eval_every"]
    points = np.mean([curve(r)[step // every - 1] for r in runs], axis=0)
    return float(np.max(points[:, 1] + registered.search.exchange * points[:, 0]))


def _nothing_more_at_half_the_gain(control: str) -> bool:
    """Return whether UP-DAPO would give nothing more than a control if the margins were
    half of its gain on DAPO.
    """
    for level in LEVELS:
        beyond, margin = _effect(level, control), _effect(level, "dapo").mean / 2
        if beyond.high >= margin or beyond.low > 0:
            return False
    return True


def _against_each_control(against: dict[str, str]) -> str:
    """Return the table of the controls at equal Avg@32, with the words against each."""
    effects = _family("equal")
    rows = []
    for control, row in zip(_others(effects), _rows(effects, *LEVELS), strict=True):
        of_bases = [by_base(effect_of(effects, control, level)) for level in LEVELS]
        gives = against.get(control, "DAPO itself is not a control")
        rows.append([*row, "; ".join(of_bases), gives])
    columns = ["control", *AT_LEVELS, "on each base, T = 1; top-p 0.9"]
    return table([*columns, "so UP-DAPO gives"], rows)


def _rows_elsewhere() -> list[list[str]]:
    """Return one row per group and control of the family on other data."""
    rows = []
    for group, where in ELSEWHERE.items():
        of_group = [e for e in _family("elsewhere") if e.question.group == group]
        rows += [[where, *row] for row in _rows(of_group, *LEVELS)]
    return rows


def _rows(effects: list[Effect], first: str, second: str) -> list[list[str]]:
    """Return one row per control, with the effects on two numbers by their names."""
    rows = []
    for control in _others(effects):
        of_control = [effect_of(effects, control, name) for name in (first, second)]
        rows.append([NAMES[control], *map(with_word, of_control)])
    return rows


def _others(effects: list[Effect]) -> list[str]:
    """Return the arms that are compared with, in order."""
    return list(dict.fromkeys(e.question.other for e in effects))


def effect_of(effects: list[Effect], other: str, name: str) -> Effect:
    """Return the effect on a number, by its name in the plan, against one arm."""
    (found,) = (
        e for e in effects if (e.question.other, e.question.name) == (other, name)
    )
    return found


def with_word(e: Effect) -> str:
    """Return the effect with its word, or why there is none."""
    if e.word in ("not finished", "out of reach"):
        return e.word
    return f"{shown(e)}, {e.word}"
