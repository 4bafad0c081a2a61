# SPDX-License-Identifier: Apache-2.0
"""Every registered objective for two steps of verl's own trainer on the CPU, one after
another in one run.

    python -m repro.with_verl.trials.every [OBJECTIVE...]

The start of verl and vLLM takes longer than two steps, so it is made once: the loss
changes to the next objective every two steps (turns.py), and the policy trains on,
slowly enough that every objective finds something to learn. Writes results/every.json
and goes on where it was stopped, or behind an objective that failed. Exit status 1
where one did.
"""

import json
import os
import sys
import time

import upref
from repro.with_verl.cpu import smoke
from repro.with_verl.place import RESULTS, ROOT
from repro.with_verl.run import advice, watch
from upref.files import write_atomically

TABLE = RESULTS / "every.json"
STEPS = 2
NEEDS = {name: upref.get(name).needs for name in upref.names()}
LEFT_OUT = {
    name: f"it needs {words[0]}, which verl does not hand to a loss"
    for name, words in NEEDS.items()
    if words
}
LOGGED = {
    "score": smoke.SCORE,
    "grad_norm": "actor/grad_norm",
    "pg_loss": "actor/pg_loss",
    "alive": "actor/upref/alive",
    "parity_max_abs": smoke.PARITY,
    "parity_of_bound": "actor/upref/parity_of_bound",
}


def rows_of(names: list[str], rows: list[dict]) -> dict[str, dict]:
    """What was logged, by objective: each metric once a step; `wrong` holds a sentence
    for what is not as it should.
    """
    found: dict[str, dict] = {}
    for i, name in enumerate(names):
        mine = [r["data"] for r in rows if r["data"].get("actor/upref/turn") == i]
        if not mine:
            break
        row = {k: [float(f"{d[key]:.3g}") for d in mine] for k, key in LOGGED.items()}
        wrong = [f"{len(mine)} of {STEPS} steps"] if len(mine) < STEPS else []
        if not all(g > 0 for g in row["grad_norm"]):
            wrong.append("no gradient")
        if not all(0 < x <= 1 for x in row["parity_of_bound"]):
            wrong.append("parity beyond its bound")
        found[name] = {"steps": len(mine), **row, "wrong": wrong}
    return found


def train(names: list[str]) -> dict[str, dict]:
    """One run; it may end early, at an objective that verl or the plug-in refuses."""
    out = ROOT / "repro" / "out" / "every" / time.strftime("%H%M%S")
    os.environ |= {
        "UPREF_TURNS": " ".join(names),
        "UPREF_TURN": str(STEPS * smoke.PROMPTS // smoke.MINI),
    }
    settings = [
        "actor_rollout_ref.actor.policy_loss.loss_mode=upref/turns",
        "+actor_rollout_ref.actor.policy_loss.upref={parity: {first: 8}}",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "trainer.save_freq=-1",
    ]
    status = smoke.main(
        names[0],
        STEPS * len(names),
        out,
        settings,
        modules=("repro.with_verl.trials.turns",),
    )
    logs = sorted(out.glob("steps-*.jsonl"))
    found = rows_of(names, watch.steps(logs[-1]) if logs else [])
    if status and (
        late := [n for n in names if found.get(n, {}).get("steps", 0) < STEPS]
    ):
        said = advice.error_in(sorted(out.glob("trainer-*.log"))[-1])
        found[late[0]] = found.get(late[0], {"steps": 0}) | {"wrong": [said]}
    return found


def main(names: list[str]) -> int:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    table |= {name: {"not run": why} for name, why in LEFT_OUT.items()}
    left = names or [
        n
        for n in upref.names()
        if n not in LEFT_OUT and table.get(n, {}).get("wrong") != []
    ]
    left.sort(key=lambda n: n in table)  # what failed before comes last
    while left:
        found = train(left)
        table |= found
        lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table.items()))
        write_atomically(TABLE, "{\n" + ",\n".join(lines) + "\n}\n")
        left = (
            [n for n in left if n not in found]
            if any(row["steps"] for row in found.values())
            else []
        )
    return int(
        any(
            table.get(n, {}).get("wrong", ["not run"])
            for n in upref.names()
            if n not in LEFT_OUT
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
