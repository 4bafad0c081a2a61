# SPDX-License-Identifier: Apache-2.0
"""What a second reader made of hard verdicts, of verdicts drawn at random, of blaming
entries, and of what is said of other people's steps: `python -m docs.second_reader`
prints each judgment.

The entries were drawn by `draw` from the bugs and surprising defaults of all ledgers,
twice. An entry that came after a draw is in no draw: it is read by itself, and stands
in a reading without a seed. The judgments are in docs/second_reader.toml.
"""

import random
import tomllib
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from upref_frameworks.ledger import Entry

FILE = Path(__file__).parent / "second_reader.toml"
HARD = ("false as written", "contradicted", "not seen here", "excluded")
BLAMING = ("bug", "surprising default")
SOURCES = ("differences", "expected_failures", "refusals", "bugs", "claims")
JUDGMENTS = {
    "holds": "neither false nor overstated",
    "softened": "was overstated, and has a softer word now",
    "strengthened": "was too weak, and has a firmer word now",
    "reworded": "its word, condition or reading did not cover it, and does now",
    "completed": "held, and lacked a fact in favor of the authors, which it has now",
    "corrected": "had a false remark, which is gone",
}


def judged() -> dict[str, Any]:
    """Return the record: by id of a verdict the judgment and why; `drawn`, the same of
    verdicts drawn at random; and `reading`, a list of readings, each with its date, the
    same by key of an entry, and its seed where the entries were drawn; and `sources`,
    the same by case, by sentence and by bug.
    """
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def came_after(date: str) -> set[str]:
    """Return the keys of the entries that were read because they were new, after a day.

    Args:
        date: the day, as `2026-11-25`.
    """
    later = [r for r in judged()["reading"] if "seed" not in r and r["date"] > date]
    return {key for one in later for key in one["entries"]}


def draw(
    entries: list[Entry], seed: int, many: int = 30, later: Collection[str] = ()
) -> list[str]:
    """Return the keys of so many blaming entries, drawn at random.

    Args:
        entries: those of all ledgers, in their order.
        seed: of Python's generator.
        many: how many.
        later: keys of entries that were not there when the draw was made.
    """
    keys = [e.key for e in entries if e.status in BLAMING and e.key not in later]
    return random.Random(seed).sample(keys, many)


def text() -> str:
    """Return each judgment, a line each, and how many there are of each kind."""
    record = judged()
    drawn = record["drawn"]
    head = f"of {drawn['of']} verdicts, drawn with seed {drawn['seed']}, read on {drawn['date']}"
    parts = [
        (f"verdicts, read on {record['date']}", record["verdicts"]),
        (head, drawn["verdicts"]),
    ]
    for reading in record["reading"]:
        how = f"drawn with seed {reading['seed']}" if "seed" in reading else "all new"
        head = f"entries, {how}, read on {reading['date']}"
        parts.append((head, reading["entries"]))
    sources = record["sources"]
    for kind in SOURCES:
        parts.append((f"{kind}, read on {sources['date']}", sources[kind]))
    out = []
    for head, judgments in parts:
        count = Counter(word for word, _ in judgments.values())
        counts = ", ".join(
            f"{count[word]} {word} ({meaning})"
            for word, meaning in JUDGMENTS.items()
            if count[word]
        )
        out += [f"{len(judgments)} {head}: {counts}.", ""]
        out += [f"  {key}: {word}. {why}." for key, (word, why) in judgments.items()]
        out.append("")
    return "\n".join(out).rstrip()


if __name__ == "__main__":
    print(text())
