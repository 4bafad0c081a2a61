# SPDX-License-Identifier: Apache-2.0
"""Logged scalars out of CSV, JSON, JSONL and TensorBoard's event files."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from upref.errors import InputError, describe_kind
from upref.logs.names import STEPS, bare

LARGEST = 2**28  # bytes of a file
EVENTS = "tfevents"  # in the name of each event file of TensorBoard
MOST_SCALARS = 10**6  # that TensorBoard's reader keeps of a column
OF_SWIFT = "global_step/max_steps"  # ms-swift writes the step as "10/438"
Row = dict[str, float]
Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class Run:
    """The scalars of one run.

    Args:
        name: of the run, where the file has several; else "".
        file: where it was read.
        steps: [N], the step of each row.
        columns: name -> numbers [N]; NaN where the row has none.
        half_digit: name -> half a unit of the last digit that was written.
        digits: name -> the most significant digits that any of its numbers has.
        not_finite: name -> steps at which NaN or infinity was logged.
        repeated: name -> steps that have two different numbers in that column.
    """

    name: str
    file: str
    steps: tuple[float, ...]
    columns: Mapping[str, Numbers]
    half_digit: Mapping[str, float]
    digits: Mapping[str, int] = field(default_factory=dict)
    not_finite: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    repeated: Mapping[str, Sequence[float]] = field(default_factory=dict)


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
        return json.loads(text)
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
                yield name, float(value)
            except (ValueError, OverflowError):
                continue


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
        rows = []
        for tag in tags:
            if bare(tag) in STEPS:
                continue
            for event in accumulator.Scalars(tag):
                rows.append({"step": float(event.step), tag: float(event.value)})
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
        count the steps. Of two numbers for one step, the last one counts, and
        `repeated` has the step. Columns of STEPS are left out. NaN and infinity become
        NaN, and `not_finite` has their steps.
    """
    joined, repeated = _join_rows(rows)
    if len({axis for axis, _ in joined}) == 1:
        joined = dict(sorted(joined.items()))
    steps = tuple(step for _, step in joined)
    numbers_of_steps = list(joined.values())
    names = dict.fromkeys(key for numbers in numbers_of_steps for key in numbers)
    columns, half_digit, digits, not_finite = {}, {}, {}, {}
    for key in names:
        if bare(key) in STEPS:
            continue
        values = np.array([numbers.get(key, math.nan) for numbers in numbers_of_steps])
        bad = []
        for step, numbers in zip(steps, numbers_of_steps, strict=True):
            if key in numbers and not math.isfinite(numbers[key]):
                bad.append(step)
        if bad:
            not_finite[key] = tuple(bad)
        values[~np.isfinite(values)] = math.nan
        if not np.isnan(values).all():
            columns[key] = values
            half_digit[key] = _half_digit(values)
            digits[key] = _significant_digits(values)
        elif bad:
            columns[key] = values
            half_digit[key] = 0.0
    return Run(name, file, steps, columns, half_digit, digits, not_finite, repeated)


# (column that counts the steps, step) -> its numbers by name
Joined = dict[tuple[str, float], dict[str, float]]


def _join_rows(
    rows: Iterable[Mapping[str, float]],
) -> tuple[Joined, dict[str, list[float]]]:
    """Join the rows of each step; a later number of a scalar replaces an earlier one.

    Returns:
        The steps, in the order of their first rows; and of each scalar the steps that
        have several different numbers of it, NaN left out.
    """
    joined: Joined = {}
    repeated: dict[str, list[float]] = {}
    for number, row in enumerate(rows):
        axis, step = _step_of(row, number)
        numbers = joined.setdefault((axis, step), {})
        for key, value in row.items():
            before = numbers.get(key, value)
            are_numbers = not (math.isnan(before) or math.isnan(value))
            if before != value and are_numbers:
                repeated.setdefault(key, []).append(step)
            numbers[key] = value
    return joined, repeated


def _step_of(row: Mapping[str, float], number: int) -> tuple[str, float]:
    """Return the row's own name of the first column of STEPS in which it has a finite
    number, such as train/global_step, and that number; ("", the number of the row) where
    it has none.
    """
    by_bare = {bare(key): key for key in row}
    for name in STEPS:
        if name in by_bare and math.isfinite(row[by_bare[name]]):
            return by_bare[name], row[by_bare[name]]
    return "", float(number)


def _half_digit(values: Numbers) -> float:
    """Return half a unit of the last decimal place that any of the finite numbers has:
    0.5 for whole numbers.
    """
    places = [last for _, last in _places(values)]
    return 0.5 * 10.0 ** min(places, default=0)


def _significant_digits(values: Numbers) -> int:
    """Return how many digits the number with the most of them has, from its first one
    that is not 0: 4 of 1000 and of 0.001234; 0 where all numbers are 0.
    """
    return max((first - last + 1 for first, last in _places(values)), default=0)


def _places(values: Numbers) -> Iterator[tuple[int, int]]:
    """Yield the exponents of 10 of the first and of the last digit of each finite
    number that is not 0. That of the last one is at most 0.
    """
    for value in values[np.isfinite(values) & (values != 0)]:
        number = Decimal(repr(float(value))).normalize()
        exponent = number.as_tuple().exponent
        assert isinstance(exponent, int)
        yield number.adjusted(), min(exponent, 0)
