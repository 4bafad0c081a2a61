# SPDX-License-Identifier: Apache-2.0
"""The state of the field as one table: frameworks by what was compared, each cell a
status with version, date and link.

It is made of records that are there: the audits (docs/frameworks), the ledgers, the
steps of whole trainers (docs/steps), the sampler corrections
(docs/sampler-corrections.md), and the known failures of the conformance suite
(tests/conformance). `python -m docs.field` writes docs/field.json: the day on which
each record without a date of its own was last committed, and the cases of the suite
that an adapter skips, because the framework has no such setting.
Cases of several ranks are not counted: no list of known failures is of them.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from docs import framework_pages, samplers, steps
from tests.conformance.known_bugs import target
from upref.conformance import cases, load_adapter
from upref.conformance.results import read_expected_failures
from upref.files import write_atomically
from upref_frameworks.audits import framework
from upref_frameworks.audits.compare import MASKED
from upref_frameworks.audits.isolated.pin import place
from upref_frameworks.ledger import STATUS, Entry, read, read_tables, sort_by_severity
from upref_frameworks.steps import settings

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs/field.json"
ADAPTERS = {"openrlhf": "OpenRLHF", "trl": "TRL", "verl": "Verl"}
SUITE = "tests/conformance/{}_xfails.toml"
NONE = "not tested"
SINGLE = 1e-5  # a factor up to 5 that was computed in float32
GROUPS = {  # of the suite's cases, by column
    "loss": ("objective", "clip"),
    "micro-batches": ("micro", "generation"),
    "masks": ("mask",),
    "KL": ("kl",),
    "step": ("family", "temperature", "precision", "entropy"),
}


@dataclass(frozen=True)
class Cell:
    """What is known of one framework in one column."""

    status: str = NONE
    more: str = ""  # how severe, and how many others
    link: str = ""  # to the entry, the case or the record, from docs/
    version: str = ""
    date: str = ""
    suite: str = field(default="", kw_only=True)  # cases of the suite that pass

    def __str__(self) -> str:
        said = f"[{self.status}]({self.link})" if self.link else self.status
        lines = [
            said + self.more,
            self.suite,
            f"*{self.version}, {self.date}*" if self.date else "",
        ]
        return "<br>".join(line for line in lines if line)


@cache
def _record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def dates() -> dict[str, str]:
    """Return the recorded day of each record without a date of its own, by its path."""
    return _record()["dates"]


# ---- of the audits and their ledgers -------------------------------------------------
def worst(entries: list[Entry]) -> tuple[str, str, str]:
    """Return the status of these entries together, how severe with how many others, and
    the key of the entry shown.

    What a framework documents itself is a documented choice, whatever others with the
    same fact do.
    """
    status = lambda e: (
        "documented choice"
        if e.words and e.status == "surprising default"
        else e.status
    )
    blamed = [e for e in entries if e.status != "numerical"]
    if not blamed:
        return "agrees", "", ""
    order = list(STATUS)
    first = min(
        sort_by_severity(blamed),
        key=lambda e: (e.severity == "cosmetic", order.index(status(e))),
    )
    others = f", {len(blamed) - 1} more" if len(blamed) > 1 else ""
    return status(first), f" ({first.severity}){others}", first.key


def column_of(e: Entry) -> str:
    """Return the column that an entry belongs to, by the rows of the audit that show
    it.
    """
    kinds = {x.loss.partition(":")[0] for x in e.evidence}
    if kinds <= {"advantages"}:
        return "advantages"
    if kinds <= {"kl"} or all("beta=" in x.held_against for x in e.evidence):
        return "KL"
    if kinds <= {"aggregation"} or all(x.where == MASKED for x in e.evidence):
        return "masks"
    return "micro-batches" if all(x.micro_batches > 1 for x in e.evidence) else "loss"


def audited(a: dict[str, Any], column: str) -> Cell:
    """Return the cell of an audit: agrees, or the worst entry; not tested where the
    audit has no such row.
    """
    name, kinds = (
        a["framework"],
        {
            "loss": "loss",
            "micro-batches": "loss",
            "masks": "loss",
            "advantages": "advantages",
        },
    )
    rows = [
        r
        for r in a["rows"]
        if r["kind"] == kinds.get(column, "kl")
        or (column == "KL" and "beta=" in r["promise"])
    ]
    # the audit splits its batch at the papers' settings alone
    if column == "micro-batches":
        rows = [r for r in rows if r["setting"] == "paper"]
    if not rows:
        return Cell()
    status, more, key = worst([e for e in read(name) if column_of(e) == column])
    link = f"frameworks/{name}.json" + (f"#{key}" if key else "")
    return Cell(status, more, link, a["version"], a["date"])


# ---- of other records ----------------------------------------------------------------
def stepped(name: str, chosen: Callable[[str], bool]) -> Cell:
    """Return the cell of a trainer's whole step, over the settings whose names are
    chosen.
    """
    file = steps.HERE / f"{name}.json"
    rows = (
        [
            r
            for r in json.loads(file.read_text(encoding="utf-8"))
            if chosen(r["setting"])
        ]
        if file.exists()
        else []
    )
    if not rows:
        return Cell()
    agree = [r for r in rows if r["error"] is not None and not r["cause"]]
    differ = [r for r in rows if r["error"] is not None and r["cause"]]
    notes = [n for r in differ if (n := steps.note_of(name, r))]
    status = (
        min((n["status"] for n in notes), key=list(STATUS).index)
        if differ
        else "agrees"
    )
    more = f": {len(agree)} of {len(rows)} settings agree"
    return Cell(
        status,
        more,
        "steps.md",
        read_tables(name)["ledger"]["version"],
        dates()[f"docs/steps/{name}.json"],
    )


def several_ranks(name: str) -> Cell:
    """Return the cell of a trainer's step on several ranks."""
    every = getattr(settings, name, None)
    many = {s.name for s in every() if s.fields.get("ranks", 1) > 1} if every else set()
    return stepped(name, many.__contains__)


@cache
def _differences() -> dict[str, list[str]]:
    """By repository, the last cells of the table of docs/sampler-corrections.md."""
    found: dict[str, list[str]] = {}
    row = r"^\| \[[^\]]+\]\(https://github\.com/([^/]+/[^/]+)/.* \| ([^|]+) \|$"
    for repo, last in re.findall(row, samplers.PAGE.read_text(encoding="utf-8"), re.M):
        found.setdefault(repo, []).append(last)
    return found


def sampler(name: str) -> Cell:
    """Return the cell of a framework's sampler corrections, which that page compares."""
    source = read_tables(name)["ledger"]["source"].lower()
    repo = next(
        (
            r
            for r in samplers.COMMITS
            if r.partition("/")[2].lower() in source.split("/")
        ),
        "",
    )
    if not repo:
        return Cell()
    mine = [r for r in samplers.ROWS if r.repo == repo]
    run = [float(x) for x in _differences()[repo] if x != "read"]
    status = (
        "agrees" if run and max(run) < SINGLE else "differs" if run else "read, not run"
    )
    on = any(r.ours for r in mine if r.default == samplers.DEFAULT)
    by_default = "on by default" if on else "none by default"
    where = "docs/sampler-corrections.md"
    many = f"{len(run)} setting" + ("" if len(run) == 1 else "s")
    return Cell(
        status,
        f": {many}; {by_default}",
        "sampler-corrections.md",
        samplers.COMMITS[repo][:9],
        dates()[where],
    )


def tried(name: str, column: str) -> list[str]:
    """Return the cases of one process that the adapter of a framework does not skip, in
    this column.
    """
    skipped = _record()["skipped"].get(name)
    if skipped is None or column not in GROUPS:
        return []
    mine = [case.id for case in cases() if case.id.partition("/")[0] in GROUPS[column]]
    return [case for case in mine if case not in skipped]


def suite(name: str, column: str) -> str:
    """Return how many of these cases pass, where the framework has an adapter."""
    mine = tried(name, column)
    if not mine:
        return ""
    file = SUITE.format(name)
    passing = len(mine) - len(read_expected_failures(ROOT / file).keys() & set(mine))
    return f"[suite](../{file}): {passing} of {len(mine)} cases, {dates()[file]}"


# ---- the table -----------------------------------------------------------------------
COLUMNS = (
    "loss",
    "micro-batches",
    "ranks",
    "masks",
    "sampler correction",
    "advantages",
    "KL",
    "step",
)


def cell(a: dict[str, Any], column: str) -> Cell:
    """Return what is known of a framework in a column.

    Args:
        a: its audit, as docs/frameworks/NAME.json has it.
        column: one of COLUMNS.
    """
    name = a["framework"]
    if column == "ranks":
        found = several_ranks(name)
    elif column == "sampler correction":
        found = sampler(name)
    elif column == "step":
        found = stepped(name, lambda setting: True)
    else:
        found = audited(a, column)
    return Cell(
        found.status,
        found.more,
        found.link,
        found.version,
        found.date,
        suite=suite(name, column),
    )


def table() -> str:
    """Return the table, a row for each framework."""
    out = [
        "| framework | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for a in framework_pages.audits():
        cells = [str(cell(a, column)) for column in COLUMNS]
        out.append(
            f"| {framework_pages.link(a['framework'])} | " + " | ".join(cells) + " |"
        )
    return "\n".join(out)


def _skipped(name: str) -> list[str]:
    """The cases that an adapter skips; OpenRLHF lies in the folder that its audit
    makes.
    """
    pin = framework(name).pin
    sys.path[:0] = place(name, pin).paths if pin else []
    adapter = load_adapter(target(name))
    return [case.id for case in cases() if adapter.supports(case)]


def main() -> None:
    """Write docs/field.json from the history of the records and from the adapters."""
    suites = [ROOT / SUITE.format(name) for name in ADAPTERS]
    named = [steps.HERE / f"{n}.json" for n in ADAPTERS]
    found = {}
    for file in [*named, samplers.PAGE, *suites]:
        path = file.relative_to(ROOT).as_posix()
        git = ["git", "log", "-1", "--format=%cs", "--", path]
        found[path] = subprocess.run(
            git, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    record = {"dates": found, "skipped": {name: _skipped(name) for name in ADAPTERS}}
    write_atomically(RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
