# SPDX-License-Identifier: Apache-2.0
"""How hard the problems are for each base, and how many seeds:
`python -m repro.mini.stale.power`, before registration.

Writes difficulty.json, power.md and runs.sha256 from the bases, design.toml and
pilot.jsonl. With --take FOLDER the finished runs in that folder become pilot.jsonl
first.
"""

import json
import sys
from math import sqrt
from pathlib import Path

import numpy as np
from scipy.stats import t

from repro.mini import files, tasks
from repro.mini.policy import bases, evals, models
from repro.mini.stale import design, rule
from repro.mini.study import plan, results

TRIES, RARE = 1000, 0.01
HEAD = """# Power of the experiment on stale data

Effects and spreads are in points of 100. D is the mean over the two bases of UP minus another method at one staleness.
Its spread is that of one arm's own number over seeds, because arms and bases are independent: sd(D)² = 2 sd² / 2. The
pilot is DAPO and UP-DAPO, 16 rollouts stale, {seeds} seeds a base, {steps} steps at the rate {lr:g}. The second
round's runs at 1e-4 (family_tuned, 13 seeds, 100 steps of 64 prompts) are the second opinion. The larger family has {m}
intervals, at level {first:g} / {m} at the first look and {final:g} / {m} at the final one. Longer runs may spread more:
after the first look the number of seeds is calculated again from what is seen.

| metric | sd from | sd(D) | effect of interest | seeds | half an interval | power |
|---|---|---|---|---|---|---|
"""


def difficulty(names: list[str]) -> dict[str, dict[str, float]]:
    """Of 256 training problems: the mean share of right tries; the share solved in
    under 1 % of tries, and never.
    """
    found, task = {}, tasks.get("countdown")
    for name in names:
        model, problems = (
            bases.load(name, "countdown"),
            task.problems("train", 20_000, seed=0)[:256],
        )
        right, _ = evals.tables(
            model, task, problems, TRIES, 1.0, tasks.generator("difficulty", name)
        )
        p = right.double().mean(1)
        shares = {
            "solved": p.mean(),
            "under_1_percent": (p < RARE).double().mean(),
            "never": (p == 0).double().mean(),
        }
        found[name] = {"tries": TRIES} | {
            k: round(x.item(), 4) for k, x in shares.items()
        }
    return found


def spread(records: list[results.Record], metric: str) -> float:
    """Of one arm's own number over seeds, pooled over arms and bases."""
    groups: dict[tuple[str, str], list[float]] = {}
    for r in records:
        groups.setdefault(
            (r["settings"]["objective"], r["settings"]["base"]), []
        ).append(rule.number(r, metric))
    groups = {at: x for at, x in groups.items() if len(x) > 1}
    squares = sum(float(np.var(x, ddof=1)) * (len(x) - 1) for x in groups.values())
    return sqrt(squares / sum(len(x) - 1 for x in groups.values()))


def table(d: design.Design, pilot: list[results.Record]) -> str:
    m, first, final = rule.largest(d), d.stopping["first"], d.stopping["final"]
    seeds, s = len({r["settings"]["seed"] for r in pilot}), pilot[0]["settings"]
    levels = {"first": first["level"], "final": final["level"]}
    text = HEAD.format(seeds=seeds, steps=s["steps"], lr=s["lr"], m=m, **levels)
    second, e = results.load(results.folder_of(2)), plan.load("family_tuned")
    tuned = [second[run.key] for _, _, run in e.runs() if run.lr == 1e-4]
    for metric, effect in d.interest.items():
        for name, records in (("pilot", pilot), ("second round", tuned)):
            sd = spread(records, metric)
            for n in (first["seeds"], final["seeds"], final["most"]):
                level = (first if n == first["seeds"] else final)["level"] / m
                half = float(t.ppf(1 - level / 2, n - 1)) * sd / sqrt(n)
                found = f"{half:.2f} | {rule.power(effect, sd, n, level):.2f}"
                text += (
                    f"| {metric} | {name} | {sd:.2f} | {effect:g} | {n} | {found} |\n"
                )
    return text


def main() -> int:
    models.deterministic()
    d, here = design.load(), design.HERE
    if sys.argv[1:2] == ["--take"]:
        runs = [
            results.record(folder)
            for folder in sorted(Path(sys.argv[2]).iterdir())
            if results.status(folder)
        ]
        files.write_atomically(
            here / "pilot.jsonl", "".join(json.dumps(r) + "\n" for r in runs).encode()
        )
    text = json.dumps(difficulty(d.bases), indent=1) + "\n"
    files.write_atomically(here / "difficulty.json", text.encode())
    files.write_atomically(here / "runs.sha256", (d.digest() + "\n").encode())
    files.write_atomically(
        here / "power.md", table(d, results.read_lines(here / "pilot.jsonl")).encode()
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
