# SPDX-License-Identifier: Apache-2.0
"""What docs/steps.md has generated: a table per trainer, from docs/steps/NAME.json, and notes on the differences.

The records are what `upref step NAME --json` printed.
"""

import json
import tomllib
from pathlib import Path

HERE = Path(__file__).parent / "steps"


def _records(trainer: str) -> list[dict]:
    return json.loads((HERE / f"{trainer}.json").read_text(encoding="utf-8"))


def _notes() -> list[dict]:
    return tomllib.loads((HERE / "notes.toml").read_text(encoding="utf-8"))["note"]


def note_of(trainer: str, one: dict) -> dict | None:
    """The note on a difference: of its trainer, with one of its causes in what was found."""
    fits = (n for n in _notes() if n["trainer"] == trainer and any(c in one["cause"] for c in n["causes"]))
    return next(fits, None)


def _differs(one: dict) -> bool:
    return one["error"] is not None and bool(one["cause"])


def table(trainer: str) -> str:
    rows = ["| setting | model | error | |", "|---|---|---|---|"]
    for one in _records(trainer):
        if one["error"] is None:
            word = f"does not run: {one['cause'].split(': ', 2)[-1][:90]}"
        elif one["cause"]:
            note = note_of(trainer, one)
            word = f"**differs**: {one['cause']}" + (f" ({note['status']}, {note['severity']})" if note else "")
        else:
            word = "agrees"
        error = "" if one["error"] is None else f"{one['error']:.1e}"
        rows.append(f"| {one['setting']} | {one['family']} | {error} | {word} |")
    every = _records(trainer)
    agree = [one["error"] for one in every if one["error"] is not None and not one["cause"]]
    wrong, lost = sum(map(_differs, every)), sum(one["error"] is None for one in every)
    single = max(e for e in agree if e < 1e-4)
    head = f"{len(every)} settings: {len(agree)} agree, in float32 to {single:.1e}; {wrong} differ; {lost} do not run."
    return head + "\n\n" + "\n".join(rows)


def notes() -> str:
    """Each difference: what it is, its status and severity, what was searched."""
    out = []
    for n in _notes():
        out += [f"**{n['trainer']}: {n['title']}** ({n['status']}, {n['severity']}). {n['text']}", ""]
        out += ["    " + n["command"], ""]
    return "\n".join(out)
