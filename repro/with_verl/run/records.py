# SPDX-License-Identifier: Apache-2.0
"""What verl logged: one {"step", "data"} a line, in a file of its own for each start of
a run, read as one.

verl's file logger empties its file when it starts, so every start of a run has its own,
steps-TIME.jsonl, and steps.jsonl is what they make together: a run that goes on from a
checkpoint logs some steps again, and the last counts.
"""

import json
import time
from pathlib import Path

from upref.files import write_atomically

PATH = "VERL_FILE_LOGGER_PATH"  # where verl's file logger writes
# in the rows of training; a validation before it logs a row too
STEP = "training/global_step"


def new_part(folder: Path) -> Path:
    """Return the path of the file that the next start logs to. Its name has the time,
    so that later ones sort behind it.
    """
    return folder / f"steps-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"


def read(file: Path) -> list[dict]:
    """Return the rows of a file of JSON lines; a line that is not complete yet is left
    out. Return [] if there is no file.
    """
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [json.loads(x) for x in lines if x.endswith("\n")]


def merged(folder: Path) -> list[dict]:
    """Return all rows of all starts, by step. Where a later start logged a step again,
    its metrics replace the earlier ones. A folder without files of starts has its rows
    in steps.jsonl.
    """
    parts = sorted(folder.glob("steps-*.jsonl")) or [folder / "steps.jsonl"]
    rows: dict[int, dict] = {}
    for part in parts:
        for row in read(part):
            step = int(row["step"])
            before = rows.get(step, {"step": step, "data": {}})
            rows[step] = {"step": step, "data": before["data"] | row["data"]}
    return [rows[step] for step in sorted(rows)]


def training(rows: list[dict]) -> list[dict]:
    """Return the rows that have a training step; a validation before training logs a
    row too.
    """
    return [r for r in rows if STEP in r["data"]]


def collect(folder: Path) -> Path:
    """Write steps.jsonl anew from the files of all starts, whole or not at all, and
    return its path.
    """
    path = folder / "steps.jsonl"
    write_atomically(path, "".join(json.dumps(r) + "\n" for r in merged(folder)))
    return path
