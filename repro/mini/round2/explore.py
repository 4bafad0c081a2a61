# SPDX-License-Identifier: Apache-2.0
"""Does entropy that is kept become exploration? Over all runs of the second round, a description and no test.

    python -m repro.mini.round2.explore       which held-out problems the base solves in 1,000 tries (minutes; once)

Then, of every run: entropy at the end over that at the start; Best@32 at the end over that of the base; and how many of
the problems that the base never solved in 1,000 tries were solved at the end, at T = 1, in 32.
"""

import json
import sys

import numpy as np
import torch

from repro.mini import files, tasks
from repro.mini.policy import bases, evals, models
from repro.mini.round2 import rule
from repro.mini.study import results
from repro.mini.study.results import Record

TRIES, PROBLEMS, SETS = 1000, 256, ("test", "one_step", "two_steps", "three_steps")
FILE = results.folder_of(2) / "base_solves.json"


def bits(text: str) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8)).astype(bool)


def base_solves() -> dict[str, str]:
    """Of the held-out sets of Countdown, which problems base `walk` solves at least once at T = 1."""
    models.deterministic()
    task, model, found = tasks.get("countdown"), bases.load("walk", "countdown"), {}
    for name in SETS:
        problems = task.problems(name, PROBLEMS, seed=0)
        once = torch.zeros(PROBLEMS, dtype=torch.bool)
        for part in range(TRIES // 40):
            once |= evals.tables(model, task, problems, 40, 1.0, tasks.generator("unsolved", name, part))[0].any(1)
        found[name] = evals.bits(once)
        print(f"{name}: {int(once.sum())} of {PROBLEMS}", flush=True)
    return found


def new(r: Record, base: dict[str, str]) -> int:
    """Problems that this run solves at its end and the base never did."""
    return sum(int((bits(r["solved"][f"{name}/t_1"]) & ~bits(base[name])).sum()) for name in SETS)


def section(records: dict[str, Record]) -> str:
    there = [r for r in records.values() if r["status"] == "done" and r["settings"]["base"] == "walk" and "solved" in r]
    if not FILE.exists() or len(there) < 8:
        return ""
    base = json.loads(FILE.read_text(encoding="utf-8"))["solved"]
    kept = [entropy_kept(r) for r in there]
    best = [r["evals"]["test/top_p_0.7"]["best"] for r in there]
    lines = [f"## Does entropy become exploration? ({len(there)} runs, described and not tested)\n"]
    never = {name: int((~bits(base[name])).sum()) for name in SETS}
    asked = {"Best@32 kept, end over base": [curve[-1] / curve[0] for curve in best]}
    if any(never.values()):
        asked["problems solved that the base never solved in 1,000 tries"] = [float(new(r, base)) for r in there]
    for what, y in asked.items():
        rho, inside = rule.ranks(kept, y)[0], within(there, kept, y)
        lines.append(f"* Entropy kept and {what}: rank correlation over all runs {rho:+.2f}; among the seeds")
        lines.append(f"  of one method and dose {inside:+.2f}.")
    missing = ", ".join(f"{name} {n}" for name, n in never.items())
    lines.append(
        f"* Problems of {PROBLEMS} a set that the base does not solve at T = 1 in {TRIES} tries: {missing}. Methods"
    )
    lines.append("  differ in more than their entropy, so the correlation over all runs is not one of cause.")
    if not any(never.values()):
        lines.append("* So whether training solves what the base never does cannot be asked of these problems.")
    lines.append("")
    return "\n".join(lines)


def entropy_kept(r: Record) -> float:
    H = np.array(r["steps"]["entropy"])
    n = max(1, len(H) // 5)
    return float(H[-n:].mean() / H[:n].mean())


def within(there: list[Record], x: list[float], y: list[float]) -> float:
    """The rank correlation of what differs from the mean of the runs that are equal but for the seed."""
    kinds: dict[str, list[int]] = {}
    for i, r in enumerate(there):
        kinds.setdefault(json.dumps(r["settings"] | {"seed": 0}, sort_keys=True), []).append(i)
    a, b = np.array(x), np.array(y)
    for z in (a, b):
        for rows in kinds.values():
            z[rows] -= z[rows].mean()
    return rule.ranks(list(a), list(b))[0]


if __name__ == "__main__":
    text = json.dumps({"tries": TRIES, "solved": base_solves()}, indent=1) + "\n"
    files.write_atomically(FILE, text.encode())
    sys.exit(0)
