# SPDX-License-Identifier: Apache-2.0
"""How every registered claim stands, as JSON for a program:
`python -m repro.mini.standing`. Runs nothing. The first round is closed: what its rule
said is results/standing.json. Of the experiment on stale data these are the effects
that bear on a statement of the paper: stale/METRIC_OTHER_STALENESS, UP-DAPO above that
other method. Of the experiment on UP's controls these are the effects that have
a margin, on Best@32 at equal Avg@32: controls/LEVEL_OTHER_GROUP, UP-DAPO above that
control.

EXPERIMENT/CLAIM -> word and why of the round's own rule; refuted: whether that says
that the opposite is shown; shown: effects with intervals; bounds_alone: as the function
below; seeds, of; needed: the seeds it would take for power 0.8 at 0.05 / claims of the
experiment. Of the second round these are for the registered effect: those that it
registered (power.py), or, where all have run and it is still open, at the spread that
was seen; of the other experiments for the effect that was seen. null: more than 200, or
the effect that was seen is on the other side. decides: true where a learning rate was
searched for each method, and the size of the effect registered.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from paper.claims import words
from repro.mini.registered import plan as plan_4, report as report_4, rule as rule_4
from repro.mini.round2 import power, report as report_2, rule, tables
from repro.mini.stale import design, report as report_3, rule as rule_3
from repro.mini.study import plan, results
from upref.errors import InputError

MOST = 200


def bounds_alone(key: str) -> bool:
    """Whether a registered claim is of bounds alone, so that a test against it shows no
    opposite.

    A bound is of one arm's own quantity, or of a difference or a ratio that the claim
    names a size of. The opposite of a claim is a difference between two arms on the
    other side of none.

    Args:
        key: EXPERIMENT/CLAIM, as in the table.
    """
    experiment, _, claim = key.partition("/")
    if experiment in ("stale", "controls"):
        return False
    (mine,) = (c for c in plan.load(experiment).claims if c.id == claim)
    return all(
        len(c.arms) == 1 or c.bound != (1 if c.ratio else 0) for c in mine.contrasts
    )


def second(
    records: dict[str, results.Record], first_round: dict[str, results.Record]
) -> dict[str, dict]:
    found = {}
    for e in map(plan.load, plan.names(round=2)):
        for v in tables.decisive(report_2.judge(e, records)):
            family = [c for c in e.claims if c.source == v.claim.source and c.contrasts]
            spread = lambda c: power.spread(c, first_round)
            needed = [
                rule.seeds_for(c, spread(c), rule.ALPHA / len(family), most=MOST)
                for c in v.claim.contrasts
            ]
            # all have run: at the spread that was seen, not that was expected
            if v.word in ("undecided", "in part"):
                needed = [v.seeds_needed or MOST]
            found[f"{e.name}/{v.claim.id}"] = {
                "says": v.claim.says,
                "word": v.word,
                "why": v.why,
                "refuted": v.word == "refuted",
                "shown": tables.effects(v),
                "verdict": tables.verdict(v),
                "limit": tables.limit(v) if tables.verdict(v) == words.EXCLUDED else "",
                "seeds": v.n,
                "of": v.of,
                "needed": worst(needed),
                "decides": bool(e.rates_from),
            }
    return found


# of the experiment on stale data, and the methods, of which the paper speaks
FAMILIES = (*report_3.PRIMARY, "entropy")
OTHERS = ("dapo", "dapo_no_upper_clip")
STALE_WORDS = {
    "gains": words.REPRODUCED,
    "loses": words.CONTRADICTED,
    # of the effect of interest, for which the seeds were counted
    "no difference": words.EXCLUDED,
    "undecided": words.UNDECIDED,
    "not finished": words.UNDECIDED,
}


def stale(records: dict[str, results.Record]) -> dict[str, dict]:
    """Of the reading that UP-DAPO ends higher than another method, by the rule of the
    experiment on stale data.
    """
    d, found = design.load(), {}
    effects = rule_3.effects(d, records)
    sizes = Counter(e.family for e in effects)
    for e in effects:
        if e.family not in FAMILIES or e.other not in OTHERS:
            continue
        word = e.word.partition(" by less than ")[0]
        unit = "nats" if e.metric == "entropy" else "points"
        told = f"{e.metric} up_dapo − {e.other} > 0, {e.staleness} rollouts stale"
        found[f"stale/{e.metric}_{e.other}_{e.staleness}"] = {
            "says": f"UP-DAPO's {report_3.TITLES[e.metric]} is above that of {e.other}, {e.staleness} rollouts stale.",
            "word": e.word,
            "why": "",
            "refuted": word == "loses",
            "shown": f"{report_3.shown(e)} {unit}: {told}",
            "verdict": STALE_WORDS[word],
            "limit": f"{words.EXCLUDED} above {report_3.rounded(e, e.high)}"
            if word == "no difference"
            else "",
            "seeds": e.n,
            "of": rule_3.seeds_due(d, records),
            # a rate is searched for each method; entropy has no margin
            "decides": e.margin > 0,
            "needed": seeds_for(
                e, d.stopping["final"]["level"] / sizes[e.family], d.stopping["power"]
            ),
        }
    return found


CONTROLS = Path(__file__).parent / "controls"
CONTROLS_WORDS = {
    "gains": words.REPRODUCED,
    "loses": words.CONTRADICTED,
    "no difference": words.EXCLUDED,
    "undecided": words.UNDECIDED,
    "not finished": words.UNDECIDED,
    "out of reach": words.UNDECIDED,
}


def controls(records: dict[str, results.Record]) -> dict[str, dict]:
    """Of the reading that UP-DAPO's Best@32 is above a control's at equal Avg@32, by
    the rule of the experiment on UP's controls.

    An undecided effect whose interval ends below the margin is excluded, as in
    `rule.against`: UP-DAPO then gives nothing more.
    """
    registered = plan_4.load(CONTROLS / "plan.toml")
    found = {}
    effects = rule_4.effects(registered, records)
    sizes = Counter(e.family for e in effects)
    for e in effects:
        if e.family not in ("equal", "elsewhere"):
            continue
        word = e.word.partition(" by less than ")[0]
        verdict = CONTROLS_WORDS[word]
        if word == "undecided" and e.high < e.margin:
            verdict = words.EXCLUDED
        level = report_4.level(e)
        key = f"controls/{e.metric.partition('/')[2]}_{e.other}_{e.group}"
        found[key] = {
            "says": f"At the Avg@32 of {level}, UP-DAPO's Best@32 is above that of {e.other}, group {e.group}.",
            "word": e.word,
            "why": "",
            "refuted": word == "loses",
            "shown": f"{report_4.shown(e)} points: best up_dapo − {e.other} > 0 at the avg of {level}, {e.group}",
            "verdict": verdict,
            "limit": f"{words.EXCLUDED} above {report_4.rounded(e, e.high)}"
            if verdict == words.EXCLUDED
            else "",
            "seeds": e.n,
            "of": rule_4.seeds_due(registered, records),
            "decides": e.margin > 0,
            "needed": seeds_for(
                e,
                registered.stopping["final"]["level"] / sizes[e.family],
                registered.stopping["power"],
            ),
        }
    return found


def seeds_for(
    e: rule_3.Effect | rule_4.Effect, level: float, wanted: float
) -> int | None:
    """For that power, if the effect and the spread that were seen are the true ones."""
    if not e.mean > 0:
        return None
    return next(
        (
            n
            for n in range(2, MOST + 1)
            if rule_3.power(e.mean, e.sd, n, level) >= wanted
        ),
        None,
    )


def worst(needed: list[int]) -> int | None:
    return None if not needed or max(needed) >= MOST else max(needed)


def main() -> int:
    try:
        one, two, three, four = (
            results.load(),
            results.load(results.folder_of(2)),
            results.load(design.RESULTS),
            results.load(CONTROLS / "results"),
        )
        frozen = json.loads(
            (results.FOLDER / "standing.json").read_text(encoding="utf-8")
        )
    except InputError as e:
        print(f"standing: {e}", file=sys.stderr)
        return 2
    every = frozen | second(two, one) | stale(three) | controls(four)
    told = {key: s | {"bounds_alone": bounds_alone(key)} for key, s in every.items()}
    # the last line: libraries print where they load
    print(json.dumps(told, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
