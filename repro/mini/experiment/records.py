# SPDX-License-Identifier: Apache-2.0
"""From run folders to results/runs.jsonl, one line a run, small enough to commit,
enough for every figure and verdict.

A line: name, settings, status, provenance (done.json: commit, versions, machine class,
seconds), `steps` (columns, each number the mean of BIN steps; of grad_norm_max the
maximum) and `evals` ("SET/DECODING" -> columns). status is "done", or "stopped at step
N: why" where the numbers ended being finite: a result too, never repeated.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from repro.mini import files
from repro.mini.experiment.questions import (
    BIN,
    EVAL_METRICS,
    STEP_METRICS,
    RunRecord,
)
from repro.mini.train.settings import Settings
from upref.errors import InputError

MANIFEST = "manifest.json"
OF_STALE = Path(__file__).parents[1] / "stale" / "results"
NEEDED = ("name", "status", "settings", "provenance", "steps", "evals")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file that is perhaps being written: an unfinished
    last line is left out. [] if it is not there.

    Raises:
        InputError: a line is no JSON object.
    """
    content = path.read_bytes() if path.exists() else b""
    whole = content.rpartition(b"\n")[0]
    return _objects(path, whole, "remove its folder and run again")


def _objects(path: Path, content: bytes, how: str) -> list[dict[str, Any]]:
    """Return one JSON object a line.

    Args:
        path: of the file, for the message.
        content: of the file.
        how: how to restore it, for the message.

    Raises:
        InputError: a line is no JSON object.
    """
    found = []
    for n, line in enumerate(content.splitlines(), 1):
        try:
            row = json.loads(line)
            wrong = "" if isinstance(row, dict) else f"line {n} is no JSON object"
        except (ValueError, RecursionError) as error:  # of the encoding, too
            wrong = f"line {n}: {error}"
        if wrong:
            raise InputError(f"{path} is corrupt ({wrong}): {how}.")
        found.append(row)
    return found


# ---- a run's folder ------------------------------------------------------------------
def status(folder: Path) -> str:
    """Return "done", "stopped at step N: why", or "" for a run that is not there or not
    finished.

    Raises:
        InputError: failed.json cannot be read.
    """
    if (folder / "done.json").exists():
        return "done"
    failed = folder / "failed.json"
    with _whole(folder):
        if not failed.exists():
            return ""
        return str(json.loads(failed.read_text())["status"])


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Turn the errors of reading a folder whose files are not what a run writes into
    one sentence, an InputError.
    """
    try:
        yield
    except InputError:
        raise
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as e:
        raise InputError(
            f"{folder} holds no whole run ({type(e).__name__}: {e}): remove it and run again."
        ) from e


def record(folder: Path) -> RunRecord:
    """Return the record of a finished run: its line of runs.jsonl, from its folder.

    Raises:
        InputError: one of its files is not what it was when the run ended.
    """
    with _whole(folder):
        facts = _facts(folder)
        for name, digest in facts.pop("sha256", {}).items():
            file = folder / name
            if not file.exists() or files.sha256(file) != digest:
                raise InputError(
                    f"{file} is not what it was when the run ended: remove the folder and run again."
                )
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        evaluated = read_lines(folder / "evals.jsonl")
        return {
            "name": folder.name,
            "status": status(folder),
            "settings": settings,
            "provenance": facts,
            "steps": _bins(read_lines(folder / "steps.jsonl")),
            "evals": _evals(evaluated),
        } | _at_the_end(evaluated)


def _facts(folder: Path) -> dict[str, Any]:
    """Return what done.json says, without its own digest; {} for a run that stopped.

    Raises:
        InputError: its digest is another one. Older files have none.
    """
    done = folder / "done.json"
    if not done.exists():
        return {}
    facts: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    is_now = files.facts_digest(facts)
    if facts.pop("digest", is_now) != is_now:
        raise InputError(
            f"{done} is not what it was when the run ended: remove the folder and run again."
        )
    return facts


def _bins(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the columns of steps.jsonl, BIN steps in one number: their mean, or their
    largest for grad_norm_max. `step` is the first of each BIN.

    NaN where a line lacks the metric, or has no number there.
    """
    if not lines:
        return {}
    starts = range(0, len(lines), BIN)
    columns: dict[str, list[float]] = {"step": [lines[i]["step"] for i in starts]}
    for key in STEP_METRICS:
        values = np.array([_number(line.get(key)) for line in lines])
        reduce = np.max if key == "grad_norm_max" else np.mean
        columns[key] = [_short(float(reduce(values[i : i + BIN]))) for i in starts]
    return columns


def _evals(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return the columns of evals.jsonl: "SET/DECODING" -> step and EVAL_METRICS, in
    the order of the lines.
    """
    table: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        name = f"{line['set']}/{line['decoding']}"
        columns = table.setdefault(name, {k: [] for k in ["step", *EVAL_METRICS]})
        columns["step"].append(line["step"])
        for key in EVAL_METRICS:
            columns[key].append(_short(_number(line.get(key))))
    return table


def _at_the_end(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what some runs have of each "SET/DECODING" at the end, by these keys:
    "solved", which problems were solved at least once (evals.bits); "counts", how many
    problems were solved how often (evals.counts); "solved_times", how often each was
    solved (evals.times).
    """
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        name = f"{line['set']}/{line['decoding']}"
        for key in ("solved", "counts", "solved_times"):
            if key in line:
                found.setdefault(key, {})[name] = line[key]
    return found


def _number(x: Any) -> float:
    """Return it as a float; NaN for None."""
    return float("nan") if x is None else float(x)


def _short(x: float) -> float:
    """Return the number rounded to five significant digits."""
    return float(f"{x:.5g}")


# ---- the committed file --------------------------------------------------------------
def load(folder: Path) -> dict[str, RunRecord]:
    """Return name -> record of runs.jsonl, each compared with its digest in
    manifest.json; {} if neither file is there.

    Raises:
        InputError: a line is missing, changed, added, there twice or no record.
    """
    if not folder.exists():
        return {}
    with files.locked(folder, write=False):
        return _load(folder)


def _load(folder: Path) -> dict[str, RunRecord]:
    """Do what `load` does, in a folder that is locked."""
    path = folder / "runs.jsonl"
    if not path.exists() and not (folder / MANIFEST).exists():
        return {}
    how = f"collect the runs again into an empty folder; `git checkout -- {folder}` drops lines without a commit"
    try:
        content = path.read_bytes() if path.exists() else b""
        manifest = json.loads((folder / MANIFEST).read_bytes())
        promised = dict(manifest["lines"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as e:
        said = f"{type(e).__name__}: {e}"
        raise InputError(
            f"{folder} does not hold runs.jsonl with its {MANIFEST} ({said}): {how}."
        ) from e
    if content and not content.endswith(b"\n"):
        raise InputError(f"{path} ends in the middle of a line: {how}.")
    rows = _objects(path, content, how)
    found: dict[str, RunRecord] = {}
    digests = {}
    for line, row in zip(content.splitlines(), rows, strict=True):
        name = str(row.get("name"))
        if lacks := [key for key in NEEDED if key not in row]:
            raise InputError(
                f"{path}: the record {name!r} lacks {', '.join(lacks)}: {how}."
            )
        if name in found:
            raise InputError(f"{path} has two records {name!r}: {how}.")
        found[name] = row
        digests[name] = sha256(line).hexdigest()
    # "before": `keep` was killed before it had replaced the lines
    if digests != promised and sha256(content).hexdigest() != manifest.get("before"):
        raise InputError(f"{path} {_difference(digests, promised)}: {how}.")
    return found


def _difference(there: dict[str, str], promised: dict[str, str]) -> str:
    """Return in words how the records differ from their manifest; each argument is name
    -> digest of its line.
    """
    said = f"holds {len(there)} records where {MANIFEST} promises {len(promised)}"
    both = there.keys() & promised.keys()
    changed = sorted(name for name in both if there[name] != promised[name])
    if changed:
        said += f", and {changed[0]!r} is not the one that was promised"
    return said


def collect(out: Path, wanted: set[str], folder: Path) -> dict[str, RunRecord]:
    """Add the finished ones of the wanted runs to runs.jsonl, and return all its
    records by name; lines that are there stay.

    Another process that does the same waits, so that neither drops the other's lines.

    Args:
        out: the folder of the runs' folders.
        wanted: names of runs.
        folder: of runs.jsonl; it is made.

    Raises:
        InputError: a record or a run's folder is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder, write=True):
        known = _load(folder)
        new = {
            name: record(out / name)
            for name in sorted(wanted - known.keys())
            if status(out / name)
        }
        if new:
            keep(known | new, folder)
    return known | new


def keep(records: dict[str, RunRecord], folder: Path) -> None:
    """Write runs.jsonl and manifest.json, sorted by name, in place of what is there.

    The folder must be locked, or no other process write in it. Until both files are
    written, the manifest allows the lines from before as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.jsonl"
    lines = {name: json.dumps(records[name]).encode() for name in sorted(records)}
    digests = {name: sha256(line).hexdigest() for name, line in lines.items()}
    replaced = path.read_bytes() if path.exists() else b""
    before = sha256(replaced).hexdigest()
    _write_manifest(folder, {"lines": digests, "before": before})
    files.write_atomically(path, b"".join(line + b"\n" for line in lines.values()))
    _write_manifest(folder, {"lines": digests})


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json: `lines`, name -> digest, and for a moment `before`."""
    files.write_atomically(folder / MANIFEST, json.dumps(manifest, indent=0) + "\n")


# ---- how long runs take --------------------------------------------------------------
def forecast(todo: Sequence[Settings], known: dict[str, RunRecord]) -> float:
    """Return the seconds of one core that runs will take; nan where no run of a base was
    timed.

    Each step takes as long as in finished runs with the same base, epochs and dynamic
    sampling. Where there is none, it is a rough guess by the epochs.

    Args:
        todo: the settings of the runs.
        known: the finished and stopped runs; where there is none yet, those of the
            experiment on stale data count.
    """
    known = known or load(OF_STALE)
    timed = {r["settings"]["base"] for r in known.values() if r["status"] == "done"}
    if not timed.issuperset(s.base for s in todo):
        return math.nan
    spent: dict[tuple[Any, ...], list[float]] = {}
    for r in known.values():
        if r["status"] == "done":
            a_step = r["provenance"]["seconds"]["all"] / r["settings"]["steps"]
            spent.setdefault(_kind(r["settings"]), []).append(a_step)
    total = 0.0
    for s in todo:
        of_kind = spent.get(_kind(asdict(s)))
        # the guess is in seconds
        a_step = float(np.mean(of_kind)) if of_kind else 0.3 + 0.4 * s.epochs
        total += s.steps * a_step
    return total


def _kind(settings: dict[str, Any]) -> tuple[Any, ...]:
    """Return the settings on which the time of a step depends."""
    return settings["base"], settings["epochs"], settings["dynamic_sampling"]


def hours(runs: Sequence[RunRecord]) -> float:
    """Return the hours of one core that the runs took; those that stopped are not
    counted.
    """
    made = [run["provenance"] for run in runs if run["provenance"]]
    return float(sum(p["seconds"]["all"] for p in made) / 3600)
