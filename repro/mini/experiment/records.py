# SPDX-License-Identifier: Apache-2.0
"""From run folders to results/runs.jsonl, one line a run, small enough to commit,
enough for every figure and verdict.

A line: name, settings, status, provenance (done.json: commit, versions, machine class,
seconds), `steps` (columns, each number the mean of BIN steps; of grad_norm_max the
maximum) and `evals` ("SET/DECODING" -> columns). status is "done", or "stopped at step
N: why" where the numbers ended being finite: a result too, never repeated.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
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
    """The lines of a JSONL file that is perhaps being written: an unfinished last line
    is left out.
    """
    content = path.read_bytes() if path.exists() else b""
    whole = content.rpartition(b"\n")[0]
    return _objects(path, whole, "remove its folder and run again")


def _objects(path: Path, content: bytes, how: str) -> list[dict[str, Any]]:
    """One JSON object a line. Raises InputError, with how to restore the file."""
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
    """ "done", "stopped at step N: why", or "" for a run that is not there or not
    finished.
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
    """One sentence for a folder whose files are not what a run writes."""
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
    """The line of a finished run. Raises InputError if one of its files is not what it
    was when the run ended.
    """
    with _whole(folder):
        facts = _facts(folder)
        for name, digest in facts.pop("sha256", {}).items():
            if not (folder / name).exists() or files.sha256(folder / name) != digest:
                wrong = f"{folder / name} is not what it was when the run ended"
                raise InputError(f"{wrong}: remove the folder and run again.")
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
        InputError: its digest is another one.
    """
    done = folder / "done.json"
    if not done.exists():
        return {}
    facts: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    is_now = files.facts_digest(facts)
    if facts.pop("digest", is_now) != is_now:  # older ones have none
        raise InputError(
            f"{done} is not what it was when the run ended: remove the folder and run again."
        )
    return facts


def _bins(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Columns of steps.jsonl, BIN steps in one number."""
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
    """Columns of evals.jsonl by set and decoding."""
    table: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        name = f"{line['set']}/{line['decoding']}"
        columns = table.setdefault(name, {k: [] for k in ["step", *EVAL_METRICS]})
        columns["step"].append(line["step"])
        for key in EVAL_METRICS:
            columns[key].append(_short(_number(line.get(key))))
    return table


def _at_the_end(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Where the run has them: which problems were solved at least once; how many
    problems were solved how often; how often each was solved.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        name = f"{line['set']}/{line['decoding']}"
        for key in ("solved", "counts", "solved_times"):
            if key in line:
                found.setdefault(key, {})[name] = line[key]
    return found


def _number(x: Any) -> float:
    """NaN where the line has none."""
    return float("nan") if x is None else float(x)


def _short(x: float) -> float:
    """With five digits."""
    return float(f"{x:.5g}")


# ---- the committed file --------------------------------------------------------------
def load(folder: Path) -> dict[str, RunRecord]:
    """Name -> line of runs.jsonl, each held against the digest in manifest.json.

    No file: {}. Raises InputError on a line that is missing, changed, too many, twice
    there or no record.
    """
    if not folder.exists():
        return {}
    with files.locked(folder, write=False):
        return _load(folder)


def _load(folder: Path) -> dict[str, RunRecord]:
    """The same in a folder that is locked."""
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
        digests[name] = _digest(line)
    if digests != promised and _digest(content) != manifest.get("before"):
        raise InputError(f"{path} {_difference(digests, promised)}: {how}.")
    return found


def _difference(there: dict[str, str], promised: dict[str, str]) -> str:
    """How the records differ from their manifest."""
    said = f"holds {len(there)} records where {MANIFEST} promises {len(promised)}"
    both = there.keys() & promised.keys()
    changed = sorted(name for name in both if there[name] != promised[name])
    if changed:
        said += f", and {changed[0]!r} is not the one that was promised"
    return said


def collect(out: Path, wanted: set[str], folder: Path) -> dict[str, RunRecord]:
    """Add the finished ones of the wanted runs under `out` to runs.jsonl; lines that
    are there stay.

    Another process that does the same waits, so that neither drops the other's lines.
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
    """Write runs.jsonl and manifest.json in a folder that nobody else writes.

    Until both are written, the manifest allows the lines from before as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.jsonl"
    lines = {name: json.dumps(records[name]).encode() for name in sorted(records)}
    digests = {name: _digest(line) for name, line in lines.items()}
    before = _digest(path.read_bytes() if path.exists() else b"")
    _write_manifest(folder, {"lines": digests, "before": before})
    files.write_atomically(path, b"".join(line + b"\n" for line in lines.values()))
    _write_manifest(folder, {"lines": digests})


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    files.write_atomically(folder / MANIFEST, json.dumps(manifest, indent=0) + "\n")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
            seconds = r["provenance"]["seconds"]["all"] / r["settings"]["steps"]
            spent.setdefault(_kind(r["settings"]), []).append(seconds)
    total = 0.0
    for s in todo:
        of_kind = spent.get(_kind(asdict(s)))
        a_step = float(np.mean(of_kind)) if of_kind else 0.3 + 0.4 * s.epochs
        total += s.steps * a_step
    return total


def _kind(settings: dict[str, Any]) -> tuple[Any, ...]:
    """What the time of a step depends on."""
    return settings["base"], settings["epochs"], settings["dynamic_sampling"]


def hours(runs: Sequence[RunRecord]) -> float:
    """Hours of one core that the runs took."""
    made = [run["provenance"] for run in runs if run["provenance"]]
    return float(sum(p["seconds"]["all"] for p in made) / 3600)
