# SPDX-License-Identifier: Apache-2.0
"""How every registered claim stands, and every effect that bears on one, for the ledger of
claims: `python -m repro.mini.experiment --standing`.

PLAN/CLAIM -> says; word and why of the plan's own rule; refuted: whether that says that the
opposite is shown; shown: effects with intervals; verdict: of the common vocabulary; limit:
of an excluded effect; seeds, of; needed: the seeds that it would take (null: more than MOST,
or the effect that was seen is on the other side); decides: true where a learning rate was
searched for each method, and the size of the effect registered; bounds_alone: whether the
claim is of bounds alone, so that a test against it shows no opposite.

Which effects of a plan bear on a claim, and in which words, is in its standing.toml:
families, others, and the templates key, says and shown; excluded_below_margin: an undecided
effect whose interval ends below the margin is excluded. Two rounds are closed: what their
rules said is in results/standing.json.
"""

from typing import Any

from docs import record
from paper.claims import words as verdicts
from repro.mini.experiment import effects, words
from repro.mini.experiment.effects import Effect
from repro.mini.experiment.plan import Plan, load, paths
from repro.mini.experiment.records import load as load_records

MOST = 200  # seeds: no more are looked for


def everything() -> dict[str, dict[str, Any]]:
    """Return PLAN/CLAIM -> how it stands, of all plans."""
    found: dict[str, dict[str, Any]] = {}
    for plan in map(load, paths()):
        found |= of_plan(plan)
    return found


def of_plan(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return PLAN/CLAIM -> how it stands, of one plan: as results/standing.json has it
    for a closed round, computed by standing.toml for another; {} where there is
    neither.
    """
    if plan.claims:
        every = record.rows(plan.results / "standing.json").items()
        return {name: s for name, s in every if name.startswith(f"{plan.name}/")}
    return _of_effects(plan) if plan.standing else {}


# the word of an effect, without its size -> the verdict
OF_INTERVAL = {
    "gains": verdicts.REPRODUCED,
    "loses": verdicts.CONTRADICTED,
    # an effect of the margin is excluded: the seeds were counted for it
    "no difference": verdicts.EXCLUDED,
    "undecided": verdicts.UNDECIDED,
    "not finished": verdicts.UNDECIDED,
    "out of reach": verdicts.UNDECIDED,
}


def _of_effects(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return how the effects of a plan stand that its standing.toml names, read as the
    claim that the first arm has more than another.
    """
    known = load_records(plan.results)
    rule = plan.standing
    due = plan.seeds_due(known)
    found = {}
    for family, of_family in plan.by_family(plan.effects(known)):
        if family.name not in rule["families"]:
            continue
        for e in of_family:
            if e.question.other in rule.get("others", [e.question.other]):
                key = rule["key"].format(**_names(e, plan))
                level = plan.stopping["final"]["level"] / len(of_family)
                found[f"{plan.name}/{key}"] = _of_effect(e, plan, due, level)
    return found


def _of_effect(e: Effect, plan: Plan, due: int, level: float) -> dict[str, Any]:
    """Return how one effect stands, by the keys at the top of this file.

    Args:
        e: the effect.
        plan: it has a standing.toml.
        due: the final number of its seeds.
        level: of an interval of the effect's family at the final look.
    """
    rule = plan.standing
    names = _names(e, plan)
    word = e.word.partition(" by less than ")[0]
    verdict = OF_INTERVAL[word]
    is_below = word == "undecided" and e.high < e.question.margin
    if rule.get("excluded_below_margin") and is_below:
        verdict = verdicts.EXCLUDED
    limit = ""
    if verdict == verdicts.EXCLUDED:
        limit = f"{verdict} above {words.rounded(e.question, e.high)}"
    return {
        "says": rule["says"].format(**names),
        "word": e.word,
        "why": "",
        "refuted": word == "loses",
        "shown": f"{words.shown(e)} {rule['shown'].format(**names)}",
        "verdict": verdict,
        "limit": limit,
        "seeds": e.n,
        "of": due,
        "needed": _seeds_for(e, level, plan.stopping["power"]),
        "decides": e.question.margin > 0,
        "bounds_alone": False,
    }


def _names(e: Effect, plan: Plan) -> dict[str, Any]:
    """Return the values for the braces of the templates in a plan's standing.toml."""
    q = e.question
    return {
        "metric": q.metric,
        "title": words.TITLES.get(q.metric, q.metric),
        "unit": words.unit(q),
        "decoding": q.decoding,
        "level": words.level(q),
        "other": q.other,
        "group": q.group,
        "staleness": plan.group(q.group)["settings"].get("staleness"),
    }


def _seeds_for(e: Effect, level: float, wanted: float) -> int | None:
    """Return the fewest seeds with this power, if the effect and the spread that were
    found are the true ones; None if they are more than MOST, or the effect is not above
    0.

    Args:
        e: the effect.
        level: of its interval.
        wanted: the power.
    """
    if not e.mean > 0:
        return None

    def power_of(n: int) -> float:
        return effects.power(e.mean, e.sd, n, level)

    found = effects.fewest(power_of, wanted, MOST + 1)
    return found if found <= MOST else None
