# SPDX-License-Identifier: Apache-2.0
"""Logged scalars out of CSV, JSON, JSONL and TensorBoard's event files."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from upref.errors import InputError, describe_kind
from upref.logs.digits import Numbers, Written, half_digits, is_unrounded
from upref.logs.names import STEPS, bare

LARGEST = 2**28  # bytes of a file
EVENTS = "tfevents"  # in the name of each event file of TensorBoard
MOST_SCALARS = 10**6  # that TensorBoard's reader keeps of a column
OF_SWIFT = "global_step/max_steps"  # ms-swift writes the step as "10/438"
OF_EXPORT = "_"  # before the columns that Weights & Biases adds, as _timestamp
Row = dict[str, float]
Steps = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class Run:
    """The scalars of one run.

    Args:
        name: of the run, where the file has several; else "".
        file: where it was read.
        steps: [N], the step of each row. A step has several rows where its numbers
            differ: of mini-batches, of a resumed run.
        columns: name -> numbers [N]; NaN where the row has none.
        half_digit: name -> half a unit of the last digit that is known to be written of
            each number, [N]; NaN where the row has none.
        shown: the same, and infinite where the column does not show whether that number
            is rounded.
        hinted: the same, and infinite only where nothing in the column hints at it.
        unrounded: [N], whether some number of the row has so many digits that nobody
            rounded it.
        not_finite: name -> steps at which NaN or infinity was logged.
        repeated: name -> steps that have two different numbers in that column.
        further: how many rows there are beyond one for each step.
    """

    name: str
    file: str
    steps: tuple[float, ...]
    columns: Mapping[str, Numbers]
    half_digit: Mapping[str, Numbers]
    shown: Mapping[str, Numbers]
    hinted: Mapping[str, Numbers]
    unrounded: Steps
    not_finite: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    repeated: Mapping[str, Sequence[float]] = field(default_factory=dict)
    further: int = 0


def read(file: str | Path) -> list[Run]:
    """Read the runs of a file.

    Args:
        file: a .csv, .tsv, .jsonl or .json file, an event file of TensorBoard, or a
            folder of event files.

    Returns:
        One run for each prefix "NAME - " of the columns, as Weights & Biases exports
        them, or for each folder with event files; else one run.

    Raises:
        InputError: the file is missing, too large, or no such log.
    """
    path = Path(file)
    if path.is_dir():
        return _read_events(path)
    if not path.is_file():
        raise InputError(f"There is no file {str(file)!r}.")
    if path.stat().st_size > LARGEST:
        raise InputError(
            f"{file} has {path.stat().st_size / 2**20:,.0f} MiB, more than {LARGEST / 2**20:,.0f} MiB: cut it."
        )
    if EVENTS in path.name:
        return _read_events(path)
    readers = {
        ".csv": _rows_of_table,
        ".tsv": _rows_of_table,
        ".jsonl": _rows_of_lines,
        ".ndjson": _rows_of_lines,
        ".json": _rows_of_json,
    }
    if path.suffix not in readers:
        raise InputError(
            f"{file} is no log that upref reads: give a .csv, .tsv, .jsonl or .json file, or TensorBoard's event files."
        )
    try:
        rows = list(readers[path.suffix](path))
    except UnicodeDecodeError:
        raise InputError(f"{file} is not text in UTF-8: export the log anew.") from None
    runs = [
        make_run(own, file=str(file), name=name)
        for name, own in _split_runs(rows).items()
    ]
    if not any(run.columns for run in runs):
        raise InputError(
            f"{file} has no number: it needs a column for each scalar and a row for each step."
        )
    return runs


# ---- rows of each format -------------------------------------------------------------
def _rows_of_table(path: Path) -> Iterator[Row]:
    """Yield the numbers of each row of a table with a line of names."""
    with path.open(newline="", encoding="utf-8-sig") as f:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        try:
            for row in csv.DictReader(f, delimiter=delimiter):
                row.pop(None, None)  # what is beyond the names
                yield dict(_numbers_of(row))
        except csv.Error as e:
            raise InputError(f"{path} is no table ({e}).") from None


def _rows_of_lines(path: Path) -> Iterator[Row]:
    """Yield the numbers of each line, a JSON object; an empty line is skipped."""
    with path.open(encoding="utf-8-sig") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                yield _row_of(_loads(line, path, f"line {number}"), path)


def _rows_of_json(path: Path) -> Iterator[Row]:
    """Yield the numbers of each step of a list of objects, of an object with such a
    list, as log_history of a trainer's state, or of an object of lists of numbers.

    Raises:
        InputError: it is none of these.
    """
    whole = _loads(path.read_text(encoding="utf-8-sig"), path, "the file")
    steps = _find_list_of_steps(whole)
    if steps is None:
        raise InputError(
            f"{path} holds no list of steps: it needs a list of objects, one for each step."
        )
    for row in steps:
        yield _row_of(row, path)


def _find_list_of_steps(whole: Any) -> list[Any] | None:
    """Return the list of steps in what a JSON file holds; None where there is none. The
    lists of numbers of an object are columns, of which step i has the i-th numbers.
    """
    if isinstance(whole, list):
        return whole
    if not isinstance(whole, dict):
        return None
    lists = {name: value for name, value in whole.items() if isinstance(value, list)}
    if "log_history" in lists:
        return lists["log_history"]
    of_objects = [v for v in lists.values() if v and isinstance(v[0], dict)]
    if len(of_objects) == 1:
        return of_objects[0]
    if not lists:
        return None
    steps: list[Any] = []
    for i in range(max(map(len, lists.values()))):
        steps.append({name: v[i] for name, v in lists.items() if i < len(v)})
    return steps


def _loads(text: str, path: Path, where: str) -> Any:
    """Return what JSON text stands for; InputError where it is none, with `where`."""
    try:
        return json.loads(text, parse_float=Written)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}, {where}: no JSON ({e}).") from None


def _row_of(row: Any, path: Path) -> Row:
    """Return the numbers of a step by name, with those in verl's `data`; InputError
    where the row is no JSON object.
    """
    if not isinstance(row, dict):
        raise InputError(
            f"{path}: each step must be a JSON object of numbers by name, and one is {describe_kind(row)}."
        )
    data = row.get("data")
    if isinstance(data, dict):  # verl's file logger: {"step": 1, "data": {...}}
        row = {key: value for key, value in row.items() if key != "data"} | data
    return dict(_numbers_of(row))


def _numbers_of(
    row: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by their names; those of an object inside by
    NAME/INNER. Text that is a number counts; other values and true and false are
    skipped.
    """
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            if len(name) < 200:  # as deep as a name is long
                yield from _numbers_of(value, f"{name}/")
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int | float | str):
            if name == OF_SWIFT and isinstance(value, str):
                value = value.partition("/")[0]
            try:
                float(value)
            except (ValueError, OverflowError):
                continue
            yield name, value if isinstance(value, float) else Written(str(value))


# ---- TensorBoard ---------------------------------------------------------------------
def _read_events(path: Path) -> list[Run]:
    """Read one run of each folder with event files, by TensorBoard's own reader.

    Raises:
        InputError: tensorboard is not installed, a file is damaged, or there is no
            scalar.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import (
            EventAccumulator,
        )
    except ImportError:
        raise InputError(
            f"{path}: reading TensorBoard's event files needs tensorboard: pip install tensorboard."
        ) from None
    folders = [path]
    if path.is_dir():
        folders = sorted({f.parent for f in path.rglob(f"*{EVENTS}*") if f.is_file()})
    if not folders:
        raise InputError(f"{path} holds no event file of TensorBoard.")
    runs = []
    for folder in folders:
        accumulator = EventAccumulator(str(folder), {"scalars": MOST_SCALARS})
        try:
            accumulator.Reload()
            tags = accumulator.Tags()["scalars"]
        except Exception as e:  # whatever a broken file raises there
            raise InputError(
                f"{folder} is no event file that TensorBoard reads ({e})."
            ) from None
        events = []
        for tag in tags:
            if bare(tag) in STEPS:
                continue
            for event in accumulator.Scalars(tag):
                row = {"step": float(event.step), tag: float(event.value)}
                events.append((event.wall_time, row))
        # in the order of writing, so that a resumed run begins rows of its own
        events.sort(key=lambda timed: timed[0])
        rows = [row for _, row in events]
        name = str(folder.relative_to(path)) if len(folders) > 1 else ""
        runs.append(make_run(rows, file=str(folder), name=name))
    if not any(run.columns for run in runs):
        raise InputError(f"{path} has no scalar.")
    return runs


# ---- runs ----------------------------------------------------------------------------
def _split_runs(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of each run by its name; {"": rows} for a log of one run.

    Weights & Biases names a column "RUN - SCALAR", and adds two columns with __MIN and
    __MAX, which are left out. A column without " - ", as the step, is of each run.
    """
    names = {name for row in rows for name in row}
    exported = [n.removesuffix("__MIN") for n in names if n.endswith("__MIN")]
    runs = sorted({n.split(" - ", 1)[0] for n in exported if " - " in n})
    if not runs:
        return {"": rows}
    return {run: [_numbers_of_run(row, run) for row in rows] for run in runs}


def _numbers_of_run(row: Row, run: str) -> Row:
    """Return what a row of Weights & Biases says of one of its runs."""
    head = f"{run} - "
    numbers = {}
    for name, value in row.items():
        is_of_run = name.startswith(head) or " - " not in name
        if is_of_run and not name.endswith(("__MIN", "__MAX")):
            numbers[name.removeprefix(head)] = value
    return numbers


def make_run(rows: Iterable[Mapping[str, float]], *, file: str, name: str = "") -> Run:
    """Join the rows of each step.

    Args:
        rows: numbers by their names. A row without a column of STEPS is a step of its
            own.
        file: where they were read.
        name: of the run.

    Returns:
        The run, in the order of the steps; in that of the rows where several columns
        count the steps. Where two rows of a step have different numbers of a scalar,
        each stays a row of its own, and `repeated` has the step. Columns of STEPS are
        left out. NaN and infinity become NaN, and `not_finite` has their steps.
    """
    rows_of_steps, repeated = _join_rows(rows)
    names = dict.fromkeys(key for row in rows_of_steps for key in row.numbers)
    order = list(range(len(rows_of_steps)))
    if len({row.axis for row in rows_of_steps}) == 1:
        order.sort(key=lambda i: rows_of_steps[i].step)
    columns, half_digit, shown, hinted, not_finite = {}, {}, {}, {}, {}
    unrounded = np.zeros(len(order), dtype=bool)
    for key in names:
        if bare(key) in STEPS:
            continue
        written = [row.numbers.get(key, math.nan) for row in rows_of_steps]
        bad = []
        for i in order:
            row = rows_of_steps[i]
            if key in row.numbers and not math.isfinite(written[i]):
                bad.append(row.step)
        if bad:
            not_finite[key] = tuple(dict.fromkeys(bad))
        values = np.array(written, dtype=float)
        values[~np.isfinite(values)] = math.nan
        if np.isnan(values).all() and not bad:
            continue
        unrounded |= [is_unrounded(x) for x in written]
        columns[key] = values[order]
        of_key = half_digits(written)
        half_digit[key], shown[key], hinted[key] = (half[order] for half in of_key)
    return Run(
        name,
        file,
        tuple(rows_of_steps[i].step for i in order),
        columns,
        half_digit,
        shown,
        hinted,
        unrounded[order],
        not_finite,
        repeated,
        len(order) - len({(row.axis, row.step) for row in rows_of_steps}),
    )


@dataclass(frozen=True, eq=False)
class RowOfStep:
    """What one row of a step, or several that were joined, have.

    Args:
        axis: the column that counts the steps.
        step: the step.
        numbers: by their names.
    """

    axis: str
    step: float
    numbers: Row


def _join_rows(
    rows: Iterable[Mapping[str, float]],
) -> tuple[list[RowOfStep], dict[str, list[float]]]:
    """Join the rows of each step, as a trainer writes a part of its scalars in one row
    and a part in the next one. From the first row on that has another number of a
    scalar, each row of the step stays alone: no law may compare numbers of two
    mini-batches, epochs or runs.

    Returns:
        The rows, in the order of the file; and of each scalar the steps that have
        several different numbers of it, NaN left out.
    """
    joined: list[RowOfStep] = []
    first: dict[tuple[str, float], RowOfStep] = {}
    several: dict[tuple[str, float], Row] = {}  # the last numbers of such steps
    repeated: dict[str, list[float]] = {}
    for number, row in enumerate(rows):
        axis, step = _step_of(row, number)
        place = axis, step
        if place not in first:
            first[place] = RowOfStep(axis, step, dict(row))
            joined.append(first[place])
            continue
        before = several.get(place, first[place].numbers)
        differing = _differing(before, row)
        for key in differing:
            repeated.setdefault(key, []).append(step)
        if differing and place not in several:
            several[place] = dict(before)
        if place in several:
            joined.append(RowOfStep(axis, step, dict(row)))
            several[place].update(row)
        else:
            first[place].numbers.update(row)
    return joined, repeated


def _differing(before: Row, row: Mapping[str, float]) -> list[str]:
    """Return the scalars of which two rows have different numbers, NaN left out. A count
    of steps and what Weights & Biases adds differ in each row.
    """
    differing = []
    for key, value in row.items():
        if bare(key) in STEPS or key.startswith(OF_EXPORT):
            continue
        first = before.get(key, value)
        are_numbers = not (math.isnan(first) or math.isnan(value))
        if first != value and are_numbers:
            differing.append(key)
    return differing


def _step_of(row: Mapping[str, float], number: int) -> tuple[str, float]:
    """Return the row's own name of the first column of STEPS in which it has a finite
    number, such as train/global_step, and that number; ("", the number of the row) where
    it has none.
    """
    by_bare = {bare(key): key for key in row}
    for name in STEPS:
        if name in by_bare and math.isfinite(row[by_bare[name]]):
            return by_bare[name], float(row[by_bare[name]])
    return "", float(number)
