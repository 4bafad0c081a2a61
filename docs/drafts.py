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
HEAD = """# Issues to ask about: {name}

These are drafts: nobody has sent them. Each asks about one entry of
[the ledger](../../upref_frameworks/{framework}/ledger.toml). Before one is sent, its script runs again
at the newest version, and the issues of the project are searched once more.
`python -m docs.drafts --write` writes this page.
"""
DRAFTED = """## {key}

**{title}**

Hello, and thank you for {name}.

{text}

What we ran: {name} {version}, [this line]({line}). The script needs {name} and what it depends on, and nothing of ours:

```python
{script}
```

It prints `{prints}`: first what we expect from the paper, then what the code gives.
"""


def texts() -> dict[str, Any]:
    """Return upstream/issues.toml: `names` of frameworks, and `issue`, a list of texts
    with the entries they serve.
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
            draft = _draft(known[key], issue, record["names"][name])
            drafts_of.setdefault(name, []).append(draft)
    pages = {}
    for name, drafts in drafts_of.items():
        head = HEAD.format(name=record["names"][name], framework=name)
        pages[FOLDER / name / "ISSUES.md"] = "\n".join([head, *drafts])
    return pages


def _draft(entry: Entry, issue: dict[str, Any], name: str) -> str:
    """Return one issue: its text, and what the ledger records of the entry."""
    pin = framework(entry.framework).pin
    day = f" of {pin.date}" if pin and pin.date else ""
    return DRAFTED.format(
        key=entry.key,
        title=issue["title"],
        name=name,
        text=issue["text"].strip(),
        version=entry.version + day,
        line=entry.at,
        script=entry.proof.strip(),
        prints=" ".join(entry.prints.split()),
    )


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
