# SPDX-License-Identifier: Apache-2.0
"""Does entropy that is kept become exploration? Over all runs of the second round, a
description and no test.

    python -m repro.mini.round2.explore       how often the base solves each held-out problem in 1,000 tries (minutes)

Then, of every run: entropy at the end over that at the start; Best@32 at the end over
that of the base; and the share that it solves at the end, at T = 1 in 32, of the
problems that the base solves at most RARE times in 1,000. What the base never solves
was to be asked (`base_never`), and there is nothing: it solves every problem of these
sets.
"""

import json
import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

from repro.mini import files, tasks
from repro.mini.policy import bases, evals, models
from repro.mini.round2 import doses
from repro.mini.study import curves
from repro.mini.study.plan import Contrast
from repro.mini.study.results import Record, value
from upref.weights.plots import STYLE

TRIES, PROBLEMS, SETS = 1000, 256, ("test", "one_step", "two_steps", "three_steps")
RARE, ASKED = 10, 32  # of TRIES; samples of a problem at the end of a run
FILE = Path(__file__).with_name("base_tries.json")
LEAST = 8  # runs, for a correlation
Tries = dict[str, list[int]]


def bits(text: str) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8)).astype(bool)


def base_tries() -> Tries:
    """Of the held-out sets of Countdown, how often base `walk` solves each problem in
    TRIES samples at T = 1.
    """
    models.deterministic()
    task, model, found = tasks.get("countdown"), bases.load("walk", "countdown"), {}
    for name in SETS:
        problems = task.problems(name, PROBLEMS, seed=0)
        times = torch.zeros(PROBLEMS, dtype=torch.long)
        for part in range(TRIES // 40):
            times += evals.tables(
                model, task, problems, 40, 1.0, tasks.generator("unsolved", name, part)
            )[0].sum(1)
        found[name] = times.tolist()
        print(f"{name}: {sum(t > 0 for t in found[name])} of {PROBLEMS}", flush=True)
    return found


def base() -> Tries:
    return json.loads(FILE.read_text(encoding="utf-8"))["solved"]


def rare(tries: Tries) -> dict[str, np.ndarray]:
    return {name: np.array(times) <= RARE for name, times in tries.items()}


def solved(r: Record, which: dict[str, np.ndarray]) -> float:
    """The share of these problems that the run solves at its end."""
    return float(
        np.concatenate(
            [bits(r["solved"][f"{name}/t_1"])[which[name]] for name in SETS]
        ).mean()
    )


def expected(tries: Tries, which: dict[str, np.ndarray]) -> float:
    """The same of the base, from how often it solved them: 1 − (1 − p)^ASKED."""
    p = np.concatenate([np.array(tries[name])[which[name]] for name in SETS]) / TRIES
    return float((1 - (1 - p) ** ASKED).mean())


def comparable(records: dict[str, Record]) -> list[Record]:
    """Runs from base `walk` that finished and say what they solve."""
    there = [
        r
        for r in records.values()
        if r["status"] == "done" and r["settings"]["base"] == "walk" and "solved" in r
    ]
    return [
        r
        for r in there
        if isfinite(entropy_kept(r)) and r["evals"]["test/top_p_0.7"]["best"][0] > 0
    ]


def best_kept(r: Record) -> float:
    curve = r["evals"]["test/top_p_0.7"]["best"]
    return curve[-1] / curve[0]


def learned(r: Record) -> bool:
    return value(r, Contrast(("",), "reward", "gain", more_than=0)) > 0


def entropy_kept(r: Record) -> float:
    H = np.array(r["steps"]["entropy"])
    n = max(1, len(H) // 5)
    before = float(H[:n].mean())
    return float(H[-n:].mean()) / before if before else float("nan")


# ---- in words ------------------------------------------------------------------------
def sentence(records: dict[str, Record]) -> list[str]:
    """A line of the page."""
    there = comparable(records)
    if len(there) < LEAST:
        return []
    kept, best = [entropy_kept(r) for r in there], [best_kept(r) for r in there]
    return [
        f"* Entropy kept and Best@32 kept over all {len(there)} runs (described, not tested): "
        f"{correlations(there, kept, best)}.",
        f"* {rarely(records)} The base solves every held-out problem at least once, so problems that it "
        "never solves cannot be tested. [More](#does-entropy-become-exploration).",
    ]


def section(records: dict[str, Record]) -> str:
    there = comparable(records)
    if len(there) < LEAST:
        return ""
    tries = base()
    which = rare(tries)
    never = sum(t == 0 for times in tries.values() for t in times)
    kept, best = [entropy_kept(r) for r in there], [best_kept(r) for r in there]
    found = [solved(r, which) for r in there]
    lines = [
        "## Does entropy become exploration?\n",
        f"{len(there)} runs, described and not tested.\n",
    ]
    lines += [
        f"* Entropy kept and Best@32 kept, end over base: {correlations(there, kept, best)}."
    ]
    lines += [
        f"* Entropy kept and the share of rarely solved problems that is solved at the end: "
        f"{correlations(there, kept, found)}."
    ]
    lines += [f"* {rarely(records)} Problems that it never solves: {never or 'none'}."]
    lines += [
        "* Methods differ in more than their entropy: the correlation over all runs is not one of cause.\n"
    ]
    return "\n".join(lines)


def rarely(records: dict[str, Record]) -> str:
    tries = base()
    which = rare(tries)
    n, share = sum(int(w.sum()) for w in which.values()), expected(tries, which)
    return (
        f"Of {len(SETS) * PROBLEMS} held-out problems the base solves {n} at most {RARE} times in {TRIES} tries at "
        f"T = 1; in {ASKED} tries it is expected to solve {100 * share:.0f} % of them. Trained policies at the end, "
        f"means over the seeds: {of_arms(records, which) or 'none yet'}."
    )


def of_arms(records: dict[str, Record], which: dict[str, np.ndarray]) -> str:
    said = []
    for name in doses.NAMES:
        seeds, keys = doses.runs(name)
        shares = []
        for arm in ("dapo", "up_dapo"):
            there = comparable(
                {keys[arm, s]: r for s in seeds if (r := records.get(keys[arm, s]))}
            )
            shares += (
                [f"{arm} {100 * np.mean([solved(r, which) for r in there]):.0f} %"]
                if there
                else []
            )
        said += [f"{doses.short(name)} {', '.join(shares)}"] if shares else []
    return "; ".join(said)


def correlations(there: Sequence[Record], x: list[float], y: list[float]) -> str:
    """Spearman's, in three ways, each with the number of runs."""
    up = [i for i, r in enumerate(there) if learned(r)]
    among = rho([x[i] for i in up], [y[i] for i in up])
    return (
        f"rank correlation {rho(x, y)} over all runs, {among} over the {len(up)} whose reward rose, "
        f"{within(there, x, y)} among the seeds of one method and dose"
    )


def rho(x: Sequence[float], y: Sequence[float]) -> str:
    if len(x) < LEAST or len(set(x)) == 1 or len(set(y)) == 1:
        return "none (too few, or all equal)"
    return f"{spearmanr(x, y).statistic:+.2f}"


def within(there: Sequence[Record], x: list[float], y: list[float]) -> str:
    """The rank correlation of what differs from the mean of the runs that are equal but
    for the seed.
    """
    kinds: dict[str, list[int]] = {}
    for i, r in enumerate(there):
        kinds.setdefault(
            json.dumps(r["settings"] | {"seed": 0}, sort_keys=True), []
        ).append(i)
    a, b = np.array(x), np.array(y)
    for z in (a, b):
        for rows in kinds.values():
            z[rows] -= z[rows].mean()
    return rho(list(a), list(b))


def figure(records: dict[str, Record]):
    """A matplotlib Figure, every run a dot; None while there are too few."""
    there = comparable(records)
    if len(there) < LEAST:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    which = rare(base())
    named = [
        n for n in curves.COLOURS if any(r["settings"]["objective"] == n for r in there)
    ]
    named = [
        n for n in named if n.startswith(("dapo", "up_dapo", "is_pg", "reinforce"))
    ]
    y = {
        "Best@32 kept, end over base": best_kept,
        "rarely solved problems solved at the end, %": None,
    }
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(11.5, 3.9), layout="constrained")
        fig.suptitle(
            "Entropy that is kept, and what is still found: every run",
            fontsize=11,
            fontweight="bold",
        )
        for ax, (label, of) in zip(fig.subplots(1, 2), y.items(), strict=True):
            for name in ["other objectives", *named]:
                mine = [r for r in there if called(r, named) == name]
                points = [
                    (entropy_kept(r), of(r) if of else 100 * solved(r, which))
                    for r in mine
                ]
                if points:
                    colour = curves.COLOURS.get(name, "#999999")
                    ax.plot(
                        *zip(*points, strict=True),
                        "o",
                        ms=4,
                        color=colour,
                        alpha=0.6,
                        mew=0,
                        label=name,
                    )
            ax.axvline(1, color="#888888", lw=0.8, zorder=0)
            if not of:
                ax.axhline(
                    100 * expected(base(), which),
                    color="#888888",
                    lw=1.2,
                    ls="--",
                    label="base, expected",
                )
            ax.set_xlabel("entropy kept, last fifth over first fifth")
            ax.set_title(label, loc="left", fontsize=9)
            ax.spines[["top", "right"]].set_visible(False)
        handles, labels = fig.axes[0].get_legend_handles_labels()
        fig.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=len(labels),
            frameon=False,
            fontsize=8,
        )
    return fig


def called(r: Record, named: Sequence[str]) -> str:
    name = r["settings"]["objective"]
    return name if name in named else "other objectives"


if __name__ == "__main__":
    files.write_atomically(
        FILE, (json.dumps({"tries": TRIES, "solved": base_tries()}) + "\n").encode()
    )
    sys.exit(0)
