# SPDX-License-Identifier: Apache-2.0
"""Records: what was measured, computed or read once, and of what it was made.

Every JSON file of results in docs, benchmarks, paper, tests and repro is a list of them:

    [{"command": ..., "commit": ..., "date": ..., "machine": ..., "seeds": [...], "rows": ...}]

`rows` is a table by name, or a list. What is recorded again takes the place of the rows of
the same name, wherever these were; a list takes the place of all. `commit` is the one that
was checked out, with " and changes" if files differed from it. Records that are older than
this format have the commit and the day that brought them, and the machine "not recorded".

    python -m docs.record FILE COMMAND...    run a command, and record what it prints: JSON, or lines
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from upref.errors import InputError
from upref.files import write_atomically

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Record:
    """Rows, and of what they were made.

    Attributes:
        command: that made them.
        commit: that was checked out.
        date: YYYY-MM-DD, in UTC.
        machine: its kind.
        seeds: that it was given; () if it draws nothing or has its own.
        rows: by name, or a list.
    """

    command: str
    commit: str
    date: str
    machine: str
    seeds: Sequence[int]
    rows: Any


def read(file: Path) -> list[Record]:
    """Return the records of a file; [] if it is not there.

    Raises:
        InputError: it holds something else.
    """
    if not file.exists():
        return []
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return [Record(**one) for one in data]
    except (ValueError, TypeError) as error:
        how = "`python -m docs.record FILE COMMAND` makes one of what a command prints"
        raise InputError(f"{file} holds no records ({error}): {how}.") from error


def rows(file: Path) -> Any:
    """Return the rows of all records of a file: one table, or the list of the first
    record; {} without a record.
    """
    found = [record.rows for record in read(file)]
    if found and isinstance(found[0], list):
        return found[0]
    return {name: row for table in found for name, row in table.items()}


def add(file: Path, command: str, rows: Any, seeds: Sequence[int] = ()) -> Record:
    """Record rows that were made now, in place of those of the same name.

    Args:
        file: of the records.
        command: that made the rows.
        rows: by name, or a list.
        seeds: that the command was given.

    Returns:
        The record.
    """
    day = datetime.now(UTC).date().isoformat()
    new = Record(command, commit(), day, machine(), list(seeds), rows)
    write(file, [*without(read(file), rows), new])
    return new


def without(records: list[Record], rows: Any) -> list[Record]:
    """Return the records without the rows of these names; [] where rows are a list. A
    record without a row left is gone.

    Args:
        records: of a file.
        rows: a table by name, or only its names; or a list.
    """
    if isinstance(rows, list):
        return []
    kept = []
    for record in records:
        left = {name: row for name, row in record.rows.items() if name not in rows}
        if left:
            kept.append(replace(record, rows=left))
    return kept


def write(file: Path, records: list[Record]) -> None:
    """Write a file of records, in place of what is there."""
    data = [asdict(record) for record in records]
    write_atomically(file, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def commit() -> str:
    """Return the commit that is checked out, with " and changes" if tracked files
    differ from it; "not of git" outside git.
    """
    if not (head := _git("rev-parse", "--short=10", "HEAD")):
        return "not of git"
    return f"{head} and changes" if _git("status", "--porcelain", "-uno") else head


def _git(*words: str) -> str:
    """Return what git prints; "" where it fails. It takes no lock, since others may use
    git too.
    """
    git = ["git", "--no-optional-locks", *words]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine() -> str:
    """Return the kind of machine and the versions; nothing that names one machine."""
    cores = f"{platform.machine()}, {os.cpu_count()} cores"
    found = f"{cores}, Python {platform.python_version()}"
    with suppress(metadata.PackageNotFoundError):
        found += f", torch {metadata.version('torch')}"
    return found


def main(words: list[str]) -> int:
    """Run a command and record what it prints; return its exit status, or 2 without a
    command.

    What it prints is recorded even if it fails.
    """
    if len(words) < 2:
        said = "Give a FILE and a COMMAND: python -m docs.record FILE COMMAND..."
        print(said, file=sys.stderr)
        return 2
    file, program, *rest = words
    done = subprocess.run(words[1:], stdout=subprocess.PIPE, text=True, check=False)
    if done.stdout:
        try:
            rows = json.loads(done.stdout)
        except json.JSONDecodeError:
            rows = done.stdout.splitlines()
        add(Path(file), shlex.join([Path(program).name, *rest]), rows, _seeds(rest))
    return done.returncode


def _seeds(words: list[str]) -> list[int]:
    """Return the numbers after --seed or --seeds among the words of a command."""
    given = shlex.join(words)
    found = re.findall(r"--seeds?[ =]((?:\d+[ ,]?)+)", given)
    return [int(number) for numbers in found for number in re.findall(r"\d+", numbers)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
