# SPDX-License-Identifier: Apache-2.0
"""Drafts of issues for the maintainers, and which blaming entries have neither a thread
nor words of the framework: `python -m docs.drafts`.

An entry of a ledger that blames is to have beside it a thread that discusses it, or
the framework's own words. Where neither is known, upstream/issues.toml has a draft of
an issue. The command counts all three, and lists the entries that have none. With
--write it writes the drafts of each framework, with version, line and script, into
upstream/FRAMEWORK/ISSUES.md.
"""

import argparse
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from upref.files import write_atomically
from upref_frameworks.audits import framework
from upref_frameworks.ledger import Entry, read

FOLDER = Path(__file__).parents[1] / "upstream"
TEXTS = FOLDER / "issues.toml"
THREAD = "a thread upstream"
WORDS = "the framework's own words"
DRAFT = "a draft of an issue"
NONE = "none"
BLAMING = ("bug", "surprising default")


def texts() -> dict[str, Any]:
    """Return upstream/issues.toml: `head` of a page and `draft` of an issue, to be filled
    in; `names` of frameworks; and `issue`, a list of texts with the entries they serve.
    """
    return tomllib.loads(TEXTS.read_text(encoding="utf-8"))


def blaming() -> list[Entry]:
    """Return the entries of all ledgers that are a bug or a surprising default."""
    return [entry for entry in read() if entry.status in BLAMING]


def views(entries: list[Entry]) -> dict[str, str]:
    """Return by key of an entry what stands for its maintainers' view: THREAD, WORDS,
    DRAFT or NONE.
    """
    drafted = {key for issue in texts()["issue"] for key in issue["entries"]}
    kinds = {}
    for entry in entries:
        if entry.thread:
            kinds[entry.key] = THREAD
        elif entry.words:
            kinds[entry.key] = WORDS
        else:
            kinds[entry.key] = DRAFT if entry.key in drafted else NONE
    return kinds


def summary(entries: list[Entry]) -> str:
    """Return how many entries have each kind of view, and the entries that have none, a
    line each.
    """
    kind_of = views(entries)
    count = Counter(kind_of.values())
    counts = ", ".join(f"{count[kind]} {kind}" for kind in (THREAD, WORDS, DRAFT, NONE))
    lines = [f"{len(kind_of)} entries blame a framework; beside them: {counts}."]
    for entry in entries:
        if kind_of[entry.key] == NONE:
            lines.append(f"none: {entry.key}: {entry.reason}")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Return the page of drafts of each framework that has any, by its file."""
    record = texts()
    known = {entry.key: entry for entry in read()}
    drafts_of: dict[str, list[str]] = {}
    for issue in record["issue"]:
        for key in issue["entries"]:
            name = known[key].framework
            filled = _fields(known[key], issue, record["names"][name])
            draft = record["draft"].format(**filled)
            drafts_of.setdefault(name, []).append(draft)
    pages = {}
    for name, drafts in drafts_of.items():
        head = record["head"].format(name=record["names"][name], framework=name)
        pages[FOLDER / name / "ISSUES.md"] = "\n".join([head, *drafts])
    return pages


def _fields(entry: Entry, issue: dict[str, Any], name: str) -> dict[str, str]:
    """Return what an issue is made of: its text, and what the ledger records of the
    entry.
    """
    pin = framework(entry.framework).pin
    day = f" of {pin.date}" if pin and pin.date else ""
    return {
        "key": entry.key,
        "title": issue["title"],
        "name": name,
        "text": issue["text"].strip(),
        "version": entry.version + day,
        "line": entry.at,
        "script": entry.proof.strip(),
        "prints": " ".join(entry.prints.split()),
    }


def main() -> None:
    """Print the summary; with --write, write the pages of drafts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="write upstream/FRAMEWORK/ISSUES.md"
    )
    if parser.parse_args().write:
        for file, text in pages().items():
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, text)
    print(summary(blaming()))


if __name__ == "__main__":
    main()
