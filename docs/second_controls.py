# SPDX-License-Identifier: Apache-2.0
"""What the second registered experiment on UP's controls has found so far, for
docs/findings.md and README.

It compares UP-DAPO with DAPO without its upper clip at one learning rate, and with DAPO
with a smaller entropy bonus than `controls` searched. Each seed has its own problems.
"""

from functools import cache

from docs.controls import AT_LEVELS, FIXED, LEVELS
from repro.mini.experiment import plan, records
from repro.mini.experiment.effects import Effect
from repro.mini.experiment.words import by_base, shown
from upref.markdown import table

NAMES = {
    "up_dapo": "UP-DAPO",
    "up_dapo_slow": "UP-DAPO at 5.5e-5",
    "dapo": "DAPO",
    "dapo_no_upper_clip": "DAPO without its upper clip",
    "dapo_no_upper_clip_slow": "DAPO without its upper clip, at 5.5e-5",
    "dapo_bonus_0_003": "DAPO with an entropy bonus of 0.003",
    "dapo_bonus_0_01": "DAPO with an entropy bonus of 0.01",
}
AT_EQUAL_AVERAGE = ("clip", "clip_rates", "clip_slow", "bonus")  # families
ON_FRESH_DATA = "fresh"  # the family of 16 updates a rollout


def text() -> str:
    """Return the look that was taken, and its effects as tables; before the first look
    only how far the runs are.
    """
    registered, effects, progress = _load()
    looks = registered.stopping
    at_equal = [e for name in AT_EQUAL_AVERAGE for e in effects[name]]
    if any(e.word == "not finished" for e in at_equal):
        seeds = looks["first"]["seeds"]
        return f"{progress} The first look is at {seeds} seeds; before it nothing is known."
    return "\n".join(
        [
            f"{_look(at_equal)} {progress}",
            "",
            "Best@32 at equal Avg@32, 16 rollouts stale, in points. Where no rate is named it is 1e-4. The margins are 1 "
            "and 1.8, half of UP-DAPO's gain on DAPO in the first controls. A first look has wide intervals on purpose: "
            "those of a family miss one of its effects with a probability of at most "
            f"{100 * looks['first']['level']:g} %.",
            "",
            _equal_table(at_equal),
            "",
            _fresh(effects[ON_FRESH_DATA]),
            "",
            "At the fixed decoding top-p 0.7, 16 rollouts stale, in points:",
            "",
            _fixed_table(effects["fixed"]),
            "",
            _norms(),
        ]
    )


def at_one_rate() -> str:
    """Return UP-DAPO minus DAPO without its upper clip, both at 1e-4, as README has it:
    Best@32 at the Avg@32 of T = 1, 16 rollouts stale.
    """
    _, effects, _ = _load()
    effect = _of(effects["clip"], "dapo_no_upper_clip", LEVELS[0])
    assert effect.word == "undecided"
    return f"{shown(effect)} ([first look](docs/findings.md#the-second-controls))"


def _norms() -> str:
    """Return the largest norm of a gradient in any run of three arms, as a sentence."""
    registered, _, _ = _load()
    known = records.load(registered.results)
    largest: dict[str, float] = {}
    for (arm, group, _, _), run in registered.runs(known).items():
        if group == "s16":
            norm = max(run["steps"]["grad_norm_max"])
            largest[arm] = max(norm, largest.get(arm, 0.0))
    assert largest["dapo_no_upper_clip"] < 2 * largest["dapo"]
    return (
        "No run explodes at UP's rate either: the largest norm of a gradient is "
        f"{largest['dapo_no_upper_clip']:.0f} without the upper clip, "
        f"{largest['up_dapo']:.0f} for UP-DAPO and {largest['dapo']:.0f} for DAPO."
    )


def _look(effects: list[Effect]) -> str:
    """Return which look these effects are of, as a sentence."""
    registered, _, _ = _load()
    seeds = min(e.n for e in effects)
    planned = registered.stopping["final"]["seeds"]
    if seeds < planned:
        return f"The first of two looks, at {seeds} of {planned} seeds."
    return f"The final look, at {seeds} seeds."


def _equal_table(effects: list[Effect]) -> str:
    """Return a table with a row for each pair of arms, in the order of the families."""
    rows = []
    for first, other in dict.fromkeys(
        (e.question.first, e.question.other) for e in effects
    ):
        of_pair = [
            e for e in effects if (e.question.first, e.question.other) == (first, other)
        ]
        at_levels = [_of(of_pair, other, level) for level in LEVELS]
        on_bases = "; ".join(map(by_base, at_levels))
        rows.append([NAMES[first], NAMES[other], *map(_with_word, at_levels), on_bases])
    columns = ["", "minus", *AT_LEVELS, "on each base, T = 1; top-p 0.9"]
    return table(columns, rows)


def _fresh(effects: list[Effect]) -> str:
    """Return the effects on fresh data as a table, or that they have no look yet."""
    if any(e.word == "not finished" for e in effects):
        return "On fresh data, with 16 updates a rollout, no look is due yet."
    found = f"On fresh data, with 16 updates a rollout. {_look(effects)}\n\n"
    return found + _equal_table(effects)


def _fixed_table(effects: list[Effect]) -> str:
    """Return a table with a row for each arm that UP-DAPO is compared with."""
    rows = []
    for other in dict.fromkeys(e.question.other for e in effects):
        of_both = [_with_word(_of(effects, other, metric)) for metric in FIXED]
        rows.append([NAMES[other], *of_both])
    return table(["UP-DAPO minus", "Best@32", "Avg@32"], rows)


def _of(effects: list[Effect], other: str, name: str) -> Effect:
    """Return the effect on a number, by its name in the plan, against one arm."""
    (found,) = (
        e for e in effects if (e.question.other, e.question.name) == (other, name)
    )
    return found


def _with_word(e: Effect) -> str:
    """Return an effect and its word; the word alone where there is no interval."""
    return shown(e) if shown(e) == e.word else f"{shown(e)}, {e.word}"


@cache
def _load() -> tuple[plan.Plan, dict[str, list[Effect]], str]:
    """Return the plan, the effects of each family by its name, and a sentence on how
    many runs are finished.
    """
    registered = plan.load("controls2")
    known = records.load(registered.results)
    by_family = registered.by_family(registered.effects(known))
    effects = {family.name: found for family, found in by_family}
    return registered, effects, registered.progress(known)
