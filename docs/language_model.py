# SPDX-License-Identifier: Apache-2.0
"""What the registered experiment on a pretrained language model found, for
docs/findings.md and README.

It compares UP-DAPO with DAPO, DAPO without its upper clip and DAPO with an entropy bonus,
all at one learning rate, on SmolLM2-135M.
"""

from functools import cache
from pathlib import Path

from docs.controls import ANSWERS, effect_of, with_word
from repro.mini.experiment import effects as engine, plan, records
from repro.mini.experiment.answer import answer
from repro.mini.experiment.effects import Effect
from repro.mini.experiment.questions import Question, term_of
from repro.mini.experiment.words import shown
from upref.markdown import table

NAMES = {
    "up_dapo": "UP-DAPO",
    "dapo": "DAPO",
    "dapo_no_upper_clip": "DAPO without its upper clip",
    "dapo_bonus": "DAPO with an entropy bonus of 0.003",
}
NUMBERS = {
    "avg/t_1": "Avg@32, T = 1",
    "best/t_1": "Best@32, T = 1",
    "avg/top_p_0.7": "Avg@32, top-p 0.7",
    "best/top_p_0.7": "Best@32, top-p 0.7",
}
GROUPS = {"s4": "4 rollouts stale", "s0": "fresh data"}
POWER = Path(plan.__file__).parents[1] / "language_model" / "power.md"
FAMILIES = {"s4": "stale", "s0": "fresh"}  # the family of each group


def text() -> str:
    """Return the registered answer, and the effects as tables."""
    _, effects, progress = _load()
    parts = [
        f"{progress} The registered answer: **{ANSWERS[_answer()]}**.",
        _spread(effects),
        _entropy(effects["entropy"]),
    ]
    for group, family in FAMILIES.items():
        margin = effects[family][0].question.margin
        parts += [
            f"UP-DAPO minus each control, {GROUPS[group]}, in points, with a margin of {margin:g}:",
            _differences(effects[family]),
            f"What each trains to, {GROUPS[group]}, in points (plain 95 % intervals over "
            f"{len(_seeds())} seeds):",
            _levels(group),
        ]
    return "\n\n".join(parts)


def undecided() -> str:
    """Return README's sentence on the experiment, which leaves the question open."""
    _, effects, _ = _load()
    assert _answer() == "undecided"
    _assert_undecided(effects)
    assert len(_seeds()) == 6
    return (
        "One language model (SmolLM2-135M, sums, six seeds, unsearched rate): "
        "[undecided](docs/findings.md#a-language-model)."
    )


def _answer() -> str:
    """Return the registered answer, which follows from the effects."""
    registered, effects, _ = _load()
    return answer(registered, [e for family in effects.values() for e in family])


def _assert_undecided(effects: dict[str, list[Effect]]) -> None:
    """Stop where an effect on a score is not undecided, as the words say that it is."""
    for family in FAMILIES.values():
        assert all(e.word == "undecided" for e in effects[family])


def _spread(effects: dict[str, list[Effect]]) -> str:
    """Return sentences that compare the width of the intervals with the planned one."""
    _assert_undecided(effects)
    half = {}
    planned = {}
    for group, family in FAMILIES.items():
        average = effect_of(effects[family], "dapo", "avg/t_1")
        half[group] = (average.high - average.low) / 2
        planned[group] = planned_half_interval(family, "avg/t_1")
        assert half[group] > 5 * planned[group]
    assert f"{planned['s4']:.1f}" == f"{planned['s0']:.1f}"
    return (
        "Every effect on a score is undecided, on stale data (the registered answer) and on "
        "fresh data (a secondary family). The differences vary far more from seed to seed "
        "than planned. Half of the interval of Avg@32 at T = 1, UP-DAPO minus DAPO, is "
        f"{half['s4']:.1f} points on stale data and {half['s0']:.1f} on fresh data; the "
        "[plan](../repro/mini/language_model/power.md) counted on "
        f"{planned['s4']:.1f} for each. It took the spread of tiny transformers, in which "
        "all seeds answer the same problems, each effect is a mean over two bases, and "
        "training has 400 rollouts. Here each seed has 256 problems of its own. No seed may "
        "be added: the rule was registered with six."
    )


def planned_half_interval(family: str, number: str) -> float:
    """Return half of the interval that power.md expects at the final look."""
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in POWER.read_text().splitlines()
        if line.startswith("|")
    ]
    column = rows[0].index("half an interval")
    return float([row for row in rows if row[:2] == [family, number]][-1][column])


def _entropy(of_family: list[Effect]) -> str:
    """Return sentences on the entropy in training, of the registered third family."""
    stale = {e.question.other: e for e in of_family if e.question.group == "s4"}
    assert stale["dapo"].high < 0 and stale["dapo_bonus"].high < 0
    no_clip = stale["dapo_no_upper_clip"]
    assert no_clip.word == "undecided"
    fresh = {e.question.other: e for e in of_family if e.question.group == "s0"}
    assert all(e.word == "undecided" for e in fresh.values())
    return (
        "Near the end of training on stale data, UP-DAPO has less entropy than DAPO, "
        f"{shown(stale['dapo'])} nats, and than DAPO with the bonus, "
        f"{shown(stale['dapo_bonus'])}. Against DAPO without its upper clip it is "
        f"undecided, {shown(no_clip)}. On fresh data all three are undecided; against DAPO "
        f"it is {shown(fresh['dapo'])}. These six are registered, in a secondary family. "
        "They compare runs at equal steps, and not at equal reward."
    )


def _differences(of_family: list[Effect]) -> str:
    """Return a table with a row for each control."""
    rows = []
    for other in list(NAMES)[1:]:
        of_numbers = [effect_of(of_family, other, number) for number in NUMBERS]
        rows.append([NAMES[other], *map(with_word, of_numbers)])
    return table(["UP-DAPO minus", *NUMBERS.values()], rows)


def _levels(group: str) -> str:
    """Return a table with the numbers of each arm at the end, and its entropy."""
    rows = []
    for arm, name in NAMES.items():
        of_numbers = [shown(_level(number, arm, group)) for number in NUMBERS]
        rows.append([name, *of_numbers, shown(_level("entropy", arm, group))])
    columns = ["", *NUMBERS.values(), "entropy in training, nats"]
    return table(columns, [[cell.replace("+", "") for cell in row] for row in rows])


def _level(number: str, arm: str, group: str) -> Effect:
    """Return a number of an arm, not compared with anything."""
    registered, _, _ = _load()
    question = Question(number, (term_of(number, arm, group),))
    runs = registered.runs(records.load(registered.results))
    bases = registered.group(group)["bases"]
    return engine.plain(question, runs, _seeds(), bases)


def _seeds() -> list[int]:
    """Return the seeds of the plan."""
    registered, _, _ = _load()
    return list(registered.main["seeds"])


@cache
def _load() -> tuple[plan.Plan, dict[str, list[Effect]], str]:
    """Return the plan, the effects of each family by its name, and a sentence on how
    many runs are finished.
    """
    registered = plan.load("language_model")
    known = records.load(registered.results)
    by_family = registered.by_family(registered.effects(known))
    effects = {family.name: list(found) for family, found in by_family}
    return registered, effects, registered.progress(known)
