# SPDX-License-Identifier: Apache-2.0
"""How every registered claim stands, both rounds, as JSON for a program: `python -m repro.mini.standing`. Runs nothing.

EXPERIMENT/CLAIM -> word and why of the round's own rule; refuted: whether that says that the opposite is shown; shown:
effects with intervals; seeds, of; needed: the seeds it would take for power 0.8 at 0.05 / claims of the experiment. Of
the second round these are for the registered effect: those that it registered (power.py), or, where all have run and it
is still open, at the spread that was seen; of the first for the effect that was seen. null: more than 200, or the
effect that was seen is on the other side.
"""

import json
import sys
from dataclasses import replace
from math import log, sqrt

from scipy.stats import t

from repro.mini.round2 import power, rule, tables
from repro.mini.round2 import report as report_2
from repro.mini.study import plan, report, results, verdicts
from repro.mini.study.plan import Contrast
from repro.mini.study.stats import Effect
from upref.errors import InputError
from upref.paper.claims import words

MOST = 200


def first(records: dict[str, results.Record]) -> dict[str, dict]:
    found = {}
    for e in map(plan.load, plan.names(round=1)):
        level = rule.ALPHA / max(1, sum(bool(c.contrasts) for c in e.claims))
        found_here = verdicts.judge(e, records)
        at = report.decisive(found_here)
        for v in found_here:
            refuted = v.why == "refuted" or "are refuted" in v.why
            needed = [seen(f.contrast, f.effect, level) for f in v.findings if f.effect]
            found[f"{e.name}/{v.claim.id}"] = {
                "says": v.claim.says, "word": v.word, "why": v.why, "refuted": refuted,
                "shown": report.effects(v, at[v.claim.id]), "verdict": words.of_rule(v.word, v.why), "limit": "",
                "seeds": v.seeds, "of": v.of, "needed": worst(needed),
            }  # fmt: skip
    return found


def second(records: dict[str, results.Record], first_round: dict[str, results.Record]) -> dict[str, dict]:
    found = {}
    for e in map(plan.load, plan.names(round=2)):
        for v in tables.decisive(report_2.judge(e, records)):
            family = [c for c in e.claims if c.source == v.claim.source and c.contrasts]
            spread = lambda c: power.spread(c, first_round)
            needed = [rule.seeds_for(c, spread(c), rule.ALPHA / len(family), most=MOST) for c in v.claim.contrasts]
            if v.word in ("undecided", "in part"):  # all have run: at the spread that was seen, not that was expected
                needed = [v.seeds_needed or MOST]
            found[f"{e.name}/{v.claim.id}"] = {
                "says": v.claim.says, "word": v.word, "why": v.why, "refuted": v.word == "refuted",
                "shown": tables.effects(v), "verdict": tables.verdict(v),
                "limit": tables.limit(v) if tables.verdict(v) == words.EXCLUDED else "",
                "seeds": v.n, "of": v.of, "needed": worst(needed),
            }  # fmt: skip
    return found


def seen(c: Contrast, e: Effect, level: float) -> int:
    """Seeds for power 0.8 at this level, were the effect and its spread what they look like."""
    scale = log if c.ratio else float
    if e.n < 2 or c.side * (e.mean - c.bound) <= 0:
        return MOST
    sd = (scale(e.high) - scale(e.mean)) * sqrt(e.n) / float(t.ppf(0.975, e.n - 1))
    return rule.seeds_for(replace(c, effect=e.mean), sd, level, most=MOST)


def worst(needed: list[int]) -> int | None:
    return None if not needed or max(needed) >= MOST else max(needed)


def main() -> int:
    try:
        one, two = results.load(), results.load(results.folder_of(2))
    except InputError as e:
        print(f"standing: {e}", file=sys.stderr)
        return 2
    json.dump(first(one) | second(two, one), sys.stdout, indent=1, ensure_ascii=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
