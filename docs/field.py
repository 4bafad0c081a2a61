# SPDX-License-Identifier: Apache-2.0
"""The state of the field as one table: frameworks by what was compared, each cell a
status with a link. Version and date stand under the framework's name, and in the cells
where they are others.

It is made of records that are there: the audits (docs/frameworks), the ledgers, the
steps of whole trainers (docs/steps), the sampler corrections
(docs/sampler-corrections.md), and the known failures of the conformance suite
(tests/conformance) with the cases that an adapter skips, because the framework has no
such setting (docs/steps/suite). Cases of several ranks are not counted: no list of known
failures is of them.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from docs import framework_pages, proved, record, samplers, steps
from upref import markdown
from upref.conformance import cases
from upref.conformance.results import read_expected_failures
from upref_frameworks.audits.compare import MASKED
from upref_frameworks.ledger import STATUS, Entry, read, read_tables, sort_by_severity
from upref_frameworks.steps import settings

ROOT = Path(__file__).parents[1]
ADAPTERS = ("openrlhf", "trl", "verl")
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
        """Return the cell in Markdown: up to three lines."""
        status = f"[{self.status}]({self.link})" if self.link else self.status
        date = f"*{self.version}, {self.date}*" if self.date else ""
        lines = [status + self.more, self.suite, date]
        return "<br>".join(line for line in lines if line)


# ---- of the audits and their ledgers -------------------------------------------------
ORDER = list(STATUS)  # the worst first


def status_of(e: Entry) -> str:
    """Return the status of an entry in the table.

    What a framework documents itself is a documented choice, whatever others with the
    same fact do.
    """
    if e.words and e.status == "surprising default":
        return "documented choice"
    return e.status


def worst(entries: list[Entry]) -> tuple[str, str, str]:
    """Return what the cell shows of these entries: the status of the worst, how severe
    it is with how many others there are, and its key. Where none is more than
    numerical: "agrees", "", "".

    A cosmetic entry comes after all that are not; then status counts, then severity.
    """
    blamed = [e for e in entries if e.status != "numerical"]
    if not blamed:
        return "agrees", "", ""
    first = min(
        sort_by_severity(blamed),
        key=lambda e: (e.severity == "cosmetic", ORDER.index(status_of(e))),
    )
    others = f", {len(blamed) - 1} more" if len(blamed) > 1 else ""
    return status_of(first), f" ({first.severity}){others}", first.key


def column_of(e: Entry) -> str:
    """Return the column that an entry belongs to, by the rows of the audit that show
    it: "loss" unless all of them are of another column.
    """
    kinds = {x.loss.partition(":")[0] for x in e.evidence}
    if kinds <= {"advantages", "token_advantages"}:
        return "advantages"
    if kinds <= {"value"}:
        return "critic"
    if kinds <= {"kl", "distillation"}:
        return "KL"
    if all("beta=" in x.held_against for x in e.evidence):
        return "KL"
    if kinds <= {"aggregation"}:
        return "masks"
    if all(x.where == MASKED for x in e.evidence):
        return "masks"
    if all(x.micro_batches > 1 for x in e.evidence):
        return "micro-batches"
    return "loss"


def shows(row: dict[str, Any], column: str) -> bool:
    """Return whether a row of an audit tests what a column is of."""
    kind = row["kind"]
    if column == "KL":
        is_loss = kind == "loss" and "beta=" in row["promise"]
        return kind in ("kl", "distillation") or is_loss
    if column == "advantages":
        return kind in ("advantages", "token_advantages")
    if column == "critic":
        return kind == "value"
    # the audit splits its batch at the papers' settings alone
    if column == "micro-batches":
        return kind == "loss" and row["setting"] == "paper"
    return kind == "loss"


def audited(a: dict[str, Any], column: str) -> Cell:
    """Return the cell of an audit: agrees, or the worst entry; not tested where the
    audit has no such row.
    """
    if not any(shows(row, column) for row in a["rows"]):
        return Cell()
    name = a["framework"]
    status, more, key = worst([e for e in read(name) if column_of(e) == column])
    link = f"frameworks/{name}.json" + (f"#{key}" if key else "")
    return Cell(status, more, link, a["version"], a["date"])


# ---- of other records ----------------------------------------------------------------
def recorded_steps(name: str) -> list[dict[str, Any]]:
    """Return the recorded steps of a trainer, one for each setting."""
    return list(record.rows(_file_of_steps(name)))


def _file_of_steps(name: str) -> Path:
    """Return the file of the recorded steps of a trainer."""
    return steps.HERE / f"{name}.json"


def stepped(name: str, rows: list[dict[str, Any]]) -> Cell:
    """Return the cell of a trainer's whole step: how many settings agree of those that
    run, and the worst status of the notes on those that differ.

    Args:
        name: the trainer.
        rows: its recorded steps that are of the column; "not tested" without one.
    """
    if not rows:
        return Cell()
    compared = [row for row in rows if row["error"] is not None]
    differ = [row for row in compared if row["cause"]]
    status = "agrees"
    if differ:
        notes = filter(None, [steps.note_of(name, row) for row in differ])
        status = min((note["status"] for note in notes), key=ORDER.index)
    agree = len(compared) - len(differ)
    not_run = ""
    if len(compared) < len(rows):
        not_run = f", {len(rows) - len(compared)} do not run"
    return Cell(
        status,
        f": {agree} of {len(compared)} settings agree{not_run}",
        "steps.md",
        read_tables(name)["ledger"]["version"],
        record.read(_file_of_steps(name))[0].date,
    )


def several_ranks(name: str) -> Cell:
    """Return the cell of a trainer's step on several ranks."""
    make_settings = getattr(settings, name, None)
    if make_settings is None:
        return Cell()
    names = {s.name for s in make_settings() if s.fields.get("ranks", 1) > 1}
    rows = [row for row in recorded_steps(name) if row["setting"] in names]
    return stepped(name, rows)


def _repository(name: str) -> str:
    """Return the repository of a framework that docs.samplers compares, or ""."""
    source = read_tables(name)["ledger"]["source"].lower().split("/")
    for row in samplers.settings():
        if row["repository"].partition("/")[2].lower() in source:
            return str(row["repository"])
    return ""


def sampler(name: str) -> Cell:
    """Return the cell of a framework's sampler corrections, which that page compares."""
    repository = _repository(name)
    if not repository:
        return Cell()
    rows = samplers.settings(repository)
    said = [row["difference"] for row in rows]
    differences = [float(x) for x in said if x != samplers.READ]
    if not differences:
        status = "read, not run"
    elif max(differences) < SINGLE:
        status = "agrees"
    else:
        status = "differs"
    on = any(row["transform"] for row in rows if row["default"] == samplers.DEFAULT)
    by_default = "on by default" if on else "none by default"
    number = "1 setting" if len(differences) == 1 else f"{len(differences)} settings"
    return Cell(
        status,
        f": {number}; {by_default}",
        "sampler-corrections.md",
        rows[0]["commit"][:9],
        record.read(samplers.FILE)[0].date,
    )


def tried(name: str, column: str) -> list[str]:
    """Return the cases of one process of this column that the adapter of a framework
    does not skip; [] for a framework without an adapter, or a column without cases.
    """
    if name not in ADAPTERS or column not in GROUPS:
        return []
    results = record.rows(_file_of_suite(name))["cases"]
    found = []
    for case in cases():
        group = case.id.partition("/")[0]
        status = results.get(case.id, {}).get("status")
        if group in GROUPS[column] and status != "skipped":
            found.append(case.id)
    return found


def _file_of_suite(name: str) -> Path:
    """Return the file of what each case of the suite gave."""
    return steps.HERE / f"suite/{name}.json"


def suite(name: str, column: str) -> str:
    """Return how many of these cases pass, with a link to the known failures; "" where
    there are none.
    """
    ids = tried(name, column)
    if not ids:
        return ""
    file = SUITE.format(name)
    failing = read_expected_failures(ROOT / file).keys() & set(ids)
    passing = len(ids) - len(failing)
    day = record.read(_file_of_suite(name))[0].date
    return f"[suite](../{file}): {passing} of {len(ids)} cases, {day}"


# ---- the table -----------------------------------------------------------------------
COLUMNS = (
    "loss",
    "micro-batches",
    "ranks",
    "masks",
    "sampler correction",
    "advantages",
    "critic",
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
        recorded = several_ranks(name)
    elif column == "sampler correction":
        recorded = sampler(name)
    elif column == "step":
        recorded = stepped(name, recorded_steps(name))
    else:
        recorded = audited(a, column)
    return replace(recorded, suite=suite(name, column))


def without_its_date(c: Cell, a: dict[str, Any]) -> Cell:
    """Return a cell that leaves out what the row says once, under the framework's name."""
    same = (c.version, c.date) == (a["version"], a["date"])
    return replace(c, version="", date="") if same else c


def table() -> str:
    """Return the table, a row for each framework."""
    rows = []
    for a in framework_pages.audits():
        link = framework_pages.link(a["framework"])
        name = f"{link}<br>*{a['version']}, {a['date']}*"
        cells = [without_its_date(cell(a, column), a) for column in COLUMNS]
        rows.append([name, *cells, proved.cell(a["framework"])])
    return markdown.table(["framework", *COLUMNS, "proved"], rows)
