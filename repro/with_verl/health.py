# SPDX-License-Identifier: Apache-2.0
"""Is a run healthy? The page of `--shakedown`, and the first section of every report.

Each line is a measured number, what is normal, and what to change if it is not. Answers
in full come from RUN/answers/STEP.jsonl, which verl writes in a shakedown.
"""

import json
import re
import tomllib
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

from upref import markdown

ALARMS, BOUND, BLIND = (
    f"actor/upref/parity_{k}" for k in ("alarms", "of_bound", "blind")
)
NORMALIZER, FAILURES = (f"actor/upref/{k}" for k in ("normalizer", "failures"))
STEPS = "steps"  # folder of a run with the optimizer steps that differ
ANSWER = re.compile(r"Answer:|\\boxed\{")
SHOWN, LONGEST = 8, 4000  # answers in full; characters of each
Row = dict[str, Any]


def furthest_from_1(numbers: list[float]) -> float:
    """Return the one of the numbers that is farthest from 1.

    Args:
        numbers: one or more.
    """
    return max(numbers, key=lambda x: abs(x - 1))


HOW: dict[str, Callable[[list[float]], float]] = {
    "mean": mean,
    "max": max,
    "min": min,
    "furthest from 1": furthest_from_1,
}


@cache
def table() -> list[Row]:
    """Return the lines of the page from health.toml, whose head lists their keys."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    lines: list[Row] = tomllib.loads(text)["line"]
    return lines


def is_normal(line: Row, value: float) -> bool:
    """Return whether a value is within the line's `below`, `at_most` and `above`, and
    within `from_1` of 1. What the line does not have is no limit.
    """
    return (
        value < line.get("below", inf)
        and value <= line.get("at_most", inf)
        and value > line.get("above", -inf)
        and abs(value - 1) <= line.get("from_1", inf)
    )


def number(x: Any) -> bool:
    """Return whether x is a finite number. A bool is none."""
    # x - x is NaN for an infinity and for NaN
    return isinstance(x, int | float) and not isinstance(x, bool) and x - x == 0


def with_ended(data: Row) -> Row:
    """Return a step's metrics with `ended` added, the share of responses that neither
    were cut at the longest length nor aborted. Return them as they are where the first
    share is not logged.
    """
    cut: Any = data.get("response_length/clip_ratio")
    return (
        data | {"ended": 1 - cut - data.get("response/aborted_ratio", 0)}
        if number(cut)
        else data
    )


def ours(saved: Row) -> bool:
    """Return whether the run's reward is this project's, which reads `Answer:` or a
    box. That of the scale cpu and a user's own need not.
    """
    given = [
        row["override"]
        for row in saved.get("overrides", [])
        if "custom_reward_function.path=" in row["override"]
    ]
    return not given or "repro.with_verl.reward.score" in given[-1]


def logged(rows: list[Row], key: str) -> list[float]:
    """Return the values of a metric in the steps that logged it as a finite number."""
    return [r["data"][key] for r in rows if number(r["data"].get(key))]


def lines(rows: list[Row], saved: Row) -> tuple[list[list[str]], list[str]]:
    """Compare what a run logged with what is normal.

    Args:
        rows: the logged steps.
        saved: overrides.json of the run; its estimate, where it has one, is compared
            too.

    Returns:
        [measure, value, "normal", "LOOK" or ""] for each line that was logged; and what
        to change, a sentence for each line that is not normal.
    """
    found, change = [], []
    rows = [r | {"data": with_ended(r["data"])} for r in rows]
    for line in table():
        values = logged(rows, line["key"])
        if not values:
            continue
        value = float(HOW[line["of"]](values))
        fine = is_normal(line, value)
        word = ""  # the line has no range
        if "cure" in line:
            word = "normal" if fine else "LOOK"
        found.append([line["name"], f"{value:.3g}", word])
        if not fine:
            change.append(line["cure"])
    e = saved.get("estimate", {})
    seconds = logged(rows, "timing_s/step")
    if seconds and e.get("step_seconds"):
        ratio = mean(seconds) / e["step_seconds"]
        word = "normal" if ratio < 1.5 else "LOOK"
        found.append(["seconds a step, of the estimate's", f"{ratio:.2f}", word])
        if ratio >= 1.5:
            dollars = ratio * e.get("dollars", 0)
            change.append(
                f"steps take {ratio:.1f} times the estimate: the run will cost {dollars:,.0f} dollars"
            )
    memory = [r["data"].get("actor/perf/max_memory_allocated_gb", 0) for r in rows]
    if e.get("train_gb") and max(memory, default=0) > e["train_gb"]:
        change.append(
            f"training took {max(memory):.0f} GB, and the estimate was {e['train_gb']:.0f}: longer answers take more"
        )
    return found, change


def answers(run: Path) -> list[Row]:
    """Return the answers of the last step that was written down, each {"input",
    "output", "gts" (the right answer), "score"}; [] where none was.
    """
    files = sorted(
        run.glob("answers/*.jsonl"),
        key=lambda p: int(p.stem) if p.stem.isdecimal() else -1,
    )
    if not files:
        return []
    return [json.loads(x) for x in files[-1].read_text(encoding="utf-8").splitlines()]


def page(run: Path, rows: list[Row], saved: Row) -> str:
    """Return the page as Markdown: the table, what to change, and up to SHOWN answers,
    evenly spaced, where they were kept.
    """
    found, change = lines(rows, saved)
    parts = [markdown.table(["measure", "value", ""], found)]
    told = answers(run)
    if told:
        read = mean(bool(ANSWER.search(a["output"])) for a in told)
        right = mean(a["score"] > 0 for a in told)
        holds = f"{read:.0%} hold `Answer:` or a box, " if ours(saved) else ""
        parts.append(
            f"Of {len(told)} responses that were scored last, {holds}{right:.0%} score above 0."
        )
        if read < 0.5 and ours(saved):
            change.append(
                "most responses contain no answer: compare the prompt with what the reward reads"
            )
    if change:
        each_once = dict.fromkeys(change)
        parts.append("To change:\n\n" + "\n".join(f"* {c}." for c in each_once))
    else:
        parts.append("Nothing to change.")
    spacing = max(1, len(told) // SHOWN)
    for i, a in enumerate(told[::spacing][:SHOWN], 1):
        head = f"Answer {i}, score {a['score']:g}, expected `{a['gts']}`:"
        parts.append(f"{head}\n\n{_fenced(a['output'])}")
    return "\n\n".join(parts)


def _fenced(text: str) -> str:
    """Return a text as a block of Markdown, without its middle if it has more than
    LONGEST characters.
    """
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    # a fence ends where as many tildes follow
    longest = max((len(tildes) for tildes in re.findall(r"~+", text)), default=0)
    fence = "~" * (3 + longest)
    return f"{fence}text\n{text}\n{fence}"
