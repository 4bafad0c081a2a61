# SPDX-License-Identifier: Apache-2.0
"""A table of results, read:

    method,AIME24,AMC23,Average        CSV (or tab, semicolon), markdown or LaTeX; per cent, all decimals
    n,30x32,40,                        optional: how many answers, PROBLEMSxSAMPLES, or several to choose from: 674|675
    GRPO,35.73,75.00,55.37             no number: an empty cell, a dash; left out: lines with # first, all after ±

A column called Average (avg, mean) is the mean of the others.
"""

import csv
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from paper.grim import latex
from upref.errors import InputError

PAPER = Path(__file__).parent / "fan2026up_table1.csv"
AVERAGE = {"average", "avg", "avg.", "mean"}
MOST = 10**9  # answers to one column
BLANK = {"", "-", "--", "---", "–", "—", "n/a"}


@dataclass(frozen=True)
class Count:
    """n answers, `samples` of them to each of n / samples problems."""

    n: int
    samples: int = 1

    def __str__(self):
        return (
            f"{self.n} ({self.n // self.samples} x {self.samples})"
            if self.samples > 1
            else str(self.n)
        )


@dataclass(frozen=True)
class ResultsTable:
    """What was printed; counts: candidates for each column, none where n is unknown."""

    columns: list[str]
    rows: list[str]
    cells: list[list[str | None]]
    counts: list[list[Count]]
    averages: list[str | None] | None


def read_file(file: str | Path | None = None) -> ResultsTable:
    """The table in a file; without one, Table 1 of fan2026up."""
    path = PAPER if file is None else Path(file)
    try:
        return read(path.read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path.name}: this is not UTF-8 text.") from None
    except (InputError, csv.Error) as e:
        raise InputError(f"{path.name}: {e}") from None


def read(text: str) -> ResultsTable:
    """The table in a CSV, markdown or LaTeX text. Raises InputError on what is none."""
    lines = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    markdown = any(line.startswith("|") for line in lines)
    grid = (
        _markdown(lines)
        if markdown
        else latex.rows(lines)
        if latex.is_latex(lines)
        else _csv(lines)
    )
    if len(grid) < 2 or len(grid[0]) < 2:
        raise InputError(
            "this is not a table: give a header, a column of names, and at least one row of percentages."
        )
    head = grid[0]
    for row in grid[1:]:
        if len(row) != len(head):
            raise InputError(
                f"row {row[0]!r} has {len(row)} cells, the header has {len(head)}."
            )
    average = [i for i, name in enumerate(head) if i and name.lower() in AVERAGE]
    if len(average) > 1:
        raise InputError(
            f"two columns are called an average: {head[average[0]]} and {head[average[1]]}."
        )
    at = [i for i in range(1, len(head)) if i not in average]
    said = [row for row in grid[1:] if row[0].lower() == "n"]
    body = [row for row in grid[1:] if row[0].lower() != "n"]
    if len(said) > 1 or not body or not at:
        raise InputError(
            "a table needs one column of numbers, one row of results, and at most one row called n."
        )
    if len({row[0] for row in body}) < len(body):
        raise InputError("two rows have the same name: rename one.")
    counts = [_candidates(said[0][i], head[i]) if said else [] for i in at]
    cells = [[_printed(row[i], row[0], head[i]) for i in at] for row in body]
    values = {Decimal(t) for row in cells for t in row if t}
    if values and max(values) <= 1 and len(values - {Decimal(0), Decimal(1)}) > 1:
        raise InputError(
            "no number is above 1: these look like shares, give percentages."
        )
    averages = (
        [_printed(row[average[0]], row[0], "average") for row in body]
        if average
        else None
    )
    return ResultsTable(
        [head[i] for i in at], [row[0] for row in body], cells, counts, averages
    )


def _markdown(lines: list[str]) -> list[list[str]]:
    rows = [
        line.removeprefix("|").removesuffix("|").split("|")
        for line in lines
        if line.startswith("|")
    ]
    grid = [[c.strip().strip("*_` ").replace("¦", "|") for c in row] for row in rows]
    return [
        row for row in grid if not all(set(c) <= set(":- ") and "-" in c for c in row)
    ]


def _csv(lines: list[str]) -> list[list[str]]:
    comma = next((c for c in ",\t;" if lines and c in lines[0]), ",")
    return [[c.strip() for c in row] for row in csv.reader(lines, delimiter=comma)]


def _candidates(text: str, column: str) -> list[Count]:
    if text.lower() in BLANK | {"?"}:
        return []
    found = []
    for part in text.replace("/", "|").split("|"):
        problems, _, samples = part.strip().lower().replace("×", "x").partition("x")
        if (
            len(part) > 40
            or not problems.strip().isdecimal()
            or not (samples or "1").strip().isdecimal()
        ):
            raise InputError(
                f"n of {column} is {text[:60]!r}: give a whole number, 30x32, or several as 674|675."
            )
        n, s = int(problems), int(samples or 1)
        if not 1 <= n * s <= MOST:
            raise InputError(
                f"n of {column} is {text[:60]!r}: it must be 1 or more, and {MOST:,} at most."
            )
        found.append(Count(n * s, s))
    return found


def _printed(text: str, row: str, column: str) -> str | None:
    text = (
        text.partition("±")[0]
        .strip()
        .strip("*_` ")
        .removesuffix("%")
        .removesuffix("\\")
        .strip()
    )
    if text.lower() in BLANK:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise InputError(f"{row}, {column}: {text!r} is not a number.") from None
    if not text.replace(".", "", 1).isdecimal() or not 0 <= value <= 100:
        raise InputError(
            f"{row}, {column}: {text} is not a percentage from 0 to 100, printed as 12.34."
        )
    return text
