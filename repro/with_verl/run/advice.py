# SPDX-License-Identifier: Apache-2.0
"""What to do about a trainer that died, read off its output: the last line of every log
says it.
"""

import re
import tomllib
from pathlib import Path

TAIL = 400_000  # characters of the output that are searched
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CURES: list[tuple[str, str]] = [(row["says"], row["do"]) for row in _TABLES["cure"]]


def plain(text: str) -> list[str]:
    """Return the lines of an output without Ray's colors and the names of its actors
    and processes.
    """
    prefix = re.compile(r"\x1b\[\d+m|\(\w+ pid=[^)]*\)\s*")
    return [prefix.sub("", x).strip() for x in text.splitlines()]


def cure(output: Path, folder: Path) -> str:
    """Return a clause that says what to do about the first known error, by the order of
    CURES, that an output has; or that it names none.

    Args:
        output: the file; its last TAIL characters are searched. It need not exist.
        folder: of the run, for the clause.
    """
    text = (
        output.read_text(encoding="utf-8", errors="replace")[-TAIL:]
        if output.exists()
        else ""
    )
    lines = plain(text)
    for pattern, words in CURES:
        if found := [m for x in lines if (m := re.search(pattern, x))]:
            line = found[-1].string[found[-1].start() :][:300]
            return words.replace("{folder}", str(folder)).replace("{line}", line)
    return "its output names no error"
