# SPDX-License-Identifier: Apache-2.0
"""How every registered claim stands, both rounds, as JSON for a program: `python -m repro.mini.standing`. Runs nothing.
The first round is closed: what its rule said is results/standing.json.

EXPERIMENT/CLAIM -> word and why of the round's own rule; refuted: whether that says that the opposite is shown; shown:
effects with intervals; seeds, of; needed: the seeds it would take for power 0.8 at 0.05 / claims of the experiment. Of
the second round these are for the registered effect: those that it registered (power.py), or, where all have run and it
is still open, at the spread that was seen; of the first for the effect that was seen. null: more than 200, or the
effect that was seen is on the other side.
"""

import json
import sys

from repro.mini.round2 import power, report as report_2, rule, tables
from repro.mini.study import plan, results
from upref.errors import InputError
from upref.paper.claims import words

MOST = 200


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


def worst(needed: list[int]) -> int | None:
    return None if not needed or max(needed) >= MOST else max(needed)


def main() -> int:
    try:
        one, two = results.load(), results.load(results.folder_of(2))
        frozen = json.loads((results.FOLDER / "standing.json").read_text(encoding="utf-8"))
    except InputError as e:
        print(f"standing: {e}", file=sys.stderr)
        return 2
    print(json.dumps(frozen | second(two, one), ensure_ascii=False))  # the last line: libraries print where they load
    return 0


if __name__ == "__main__":
    sys.exit(main())
