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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from repro.mini import files
from repro.mini.study.plan import EVAL_METRICS, STEP_METRICS, Contrast
from repro.mini.train.settings import Settings
from upref.errors import InputError

FOLDER = Path(__file__).parents[1] / "results"
BIN = 5
MANIFEST = "manifest.json"
NEEDED = ("name", "status", "settings", "provenance", "steps", "evals")
Record = dict[str, Any]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file that is perhaps being written: an unfinished last line
    is left out.
    """
    return _objects(
        path,
        path.read_bytes().rpartition(b"\n")[0] if path.exists() else b"",
        "remove its folder and run again",
    )


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


def status(folder: Path) -> str:
    """ "done", "stopped at step N: why", or "" for a run that is not there or not
    finished.
    """
    if (folder / "done.json").exists():
        return "done"
    failed = folder / "failed.json"
    with _whole(folder):
        return json.loads(failed.read_text())["status"] if failed.exists() else ""


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """One sentence for a folder whose files are not what a run writes."""
    try:
        yield
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(
            f"{folder} holds no whole run ({type(e).__name__}: {e}): remove it and run again."
        ) from e


def record(folder: Path) -> Record:
    """The line of a finished run. Raises InputError if one of its files is not what it
    was when the run ended.
    """
    done = folder / "done.json"
    with _whole(folder):
        facts = json.loads(done.read_text(encoding="utf-8")) if done.exists() else {}
        # older ones have none
        if files.facts_digest(facts) != facts.pop("digest", files.facts_digest(facts)):
            raise InputError(
                f"{done} is not what it was when the run ended: remove the folder and run again."
            )
        for name, digest in facts.pop("sha256", {}).items():
            if not (folder / name).exists() or files.sha256(folder / name) != digest:
                wrong = f"{folder / name} is not what it was when the run ended"
                raise InputError(f"{wrong}: remove the folder and run again.")
        return {
            "name": folder.name,
            "status": status(folder),
            "settings": json.loads(
                (folder / "settings.json").read_text(encoding="utf-8")
            ),
            "provenance": facts,
            "steps": _bins(read_lines(folder / "steps.jsonl")),
            "evals": _evals(read_lines(folder / "evals.jsonl")),
        } | _at_the_end(read_lines(folder / "evals.jsonl"))


def _bins(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    if not lines:
        return {}
    starts = range(0, len(lines), BIN)
    columns: dict[str, list[float]] = {"step": [lines[i]["step"] for i in starts]}
    for key in STEP_METRICS:
        values = np.array([_number(line.get(key)) for line in lines])
        reduce = np.max if key == "grad_norm_max" else np.mean
        columns[key] = [_short(reduce(values[i : i + BIN])) for i in starts]
    return columns


def _evals(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    table: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        columns = table.setdefault(
            f"{line['set']}/{line['decoding']}",
            {k: [] for k in ["step", *EVAL_METRICS]},
        )
        for key, column in columns.items():
            column.append(
                line[key] if key == "step" else _short(_number(line.get(key)))
            )
    return table


def _at_the_end(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Where the run has them: which problems were solved at least once; how many
    problems were solved how often.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        for key in ("solved", "counts"):
            if key in line:
                found.setdefault(key, {})[f"{line['set']}/{line['decoding']}"] = line[
                    key
                ]
    return found


def _number(x) -> float:
    """NaN where the line has none."""
    return float("nan") if x is None else float(x)


def _short(x: float) -> float:
    return float(f"{x:.5g}")


# ---- the committed file --------------------------------------------------------------
def folder_of(round: int) -> Path:
    return FOLDER if round == 1 else FOLDER.parent / "round2" / "results"


def load(folder: Path = FOLDER) -> dict[str, Record]:
    """Name -> line of results/runs.jsonl, each held against the digest in
    manifest.json. No file: {}.

    Raises InputError on a line that is missing, changed, too many, twice there or no
    record.
    """
    if not folder.exists():
        return {}
    with files.locked(folder, write=False):
        return _load(folder)


def _load(folder: Path) -> dict[str, Record]:
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
    found, digests = {}, {}
    for line, row in zip(
        content.splitlines(), _objects(path, content, how), strict=True
    ):
        name = str(row.get("name"))
        if lacks := [key for key in NEEDED if key not in row]:
            raise InputError(
                f"{path}: the record {name!r} lacks {', '.join(lacks)}: {how}."
            )
        if name in found:
            raise InputError(f"{path} has two records {name!r}: {how}.")
        found[name], digests[name] = row, _digest(line)
    if digests != promised and _digest(content) != manifest.get("before"):
        changed = sorted(
            n for n in digests.keys() & promised.keys() if digests[n] != promised[n]
        )
        said = f"holds {len(found)} records where {MANIFEST} promises {len(promised)}"
        said += (
            f", and {changed[0]!r} is not the one that was promised" if changed else ""
        )
        raise InputError(f"{path} {said}: {how}.")
    return found


def collect(out: Path, wanted: set[str], folder: Path = FOLDER) -> dict[str, Record]:
    """Add the finished ones of the wanted runs under `out` to results/runs.jsonl; lines
    that are there stay.

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


def keep(records: dict[str, Record], folder: Path) -> None:
    """Write runs.jsonl and manifest.json in a folder that nobody else writes.

    Until both are written, the manifest allows the lines from before as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.jsonl"
    lines = {name: json.dumps(records[name]).encode() for name in sorted(records)}
    digests = {name: _digest(line) for name, line in lines.items()}
    before = _digest(path.read_bytes() if path.exists() else b"")
    put = lambda manifest: files.write_atomically(
        folder / MANIFEST, json.dumps(manifest, indent=0) + "\n"
    )
    put({"lines": digests, "before": before})
    files.write_atomically(path, b"".join(line + b"\n" for line in lines.values()))
    put({"lines": digests})


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def forecast(todo: Sequence[Settings], known: dict[str, Record]) -> float:
    """Seconds of one core: a run takes as long for each of its steps as finished ones
    of the same epochs and base.
    """
    kind = lambda s: (s["base"], s["epochs"], s["dynamic_sampling"])
    spent: dict[tuple, list[float]] = {}
    for r in known.values():
        if r["status"] == "done":
            spent.setdefault(kind(r["settings"]), []).append(
                r["provenance"]["seconds"]["all"] / r["settings"]["steps"]
            )
    cost = lambda s: (
        np.mean(spent[kind(s)]) if kind(s) in spent else 0.3 + 0.4 * s["epochs"]
    )
    return float(sum(s.steps * cost(asdict(s)) for s in todo))


# ---- one number of one run -----------------------------------------------------------
def value(r: Record, c: Contrast) -> float:
    """The contrast's metric of this run. An evaluation that a stopped run no longer
    reached counts as 0.
    """
    if c.metric in EVAL_METRICS:
        if r["status"] != "done":
            return 0.0
        sets = [
            k
            for k in r["evals"]
            if k.endswith(f"/{c.decoding}") and not k.startswith("test/")
        ]
        picked = sets if c.set == "average" else [f"{c.set}/{c.decoding}"]
        if not picked or not set(picked) <= set(r["evals"]):
            raise InputError(
                f"{r['name']} has no evaluation on {c.set} at {c.decoding}, only {', '.join(r['evals'])}."
            )
        return float(np.mean([_of_curve(r["evals"][k], c) for k in picked]))
    x = np.array(r["steps"][c.metric])
    x = x[np.isfinite(x)]
    if not len(x):
        raise InputError(f"{r['name']} has no finite {c.metric} in its steps.")
    last = x[-max(1, len(x) // 5) :].mean()
    first25 = x[: 25 // BIN]
    first = x[: max(1, len(x) // 5)].mean()
    found = {
        "mean": x.mean(),
        "last": last,
        "max": x.max(),
        "max25": first25.max(),
        "change": last - x[0],
    }
    return float((found | {"gain": last - first})[c.at])


def _of_curve(columns: dict[str, list[float]], c: Contrast) -> float:
    """Peaks are of the trained policy: the best one for Best@k is often the one that
    was not trained at all.
    """
    y, x = np.array(columns[c.metric]), np.array(columns["step"])
    if c.at == "peak":
        return float(y[x > 0].max())
    return (
        float(np.trapezoid(y, x) / (x[-1] - x[0])) if c.at == "area" else float(y[-1])
    )
