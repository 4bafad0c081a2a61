# SPDX-License-Identifier: Apache-2.0
"""Do the losses of an installed framework compute what their names promise? One table,
every difference accounted for.

A difference must have a reason that leaves none (compare.py), and an entry of the
ledger, NAME.toml, that records it with these very numbers: a deviation that appears,
changes or disappears fails the audit. A framework with a pin runs in a folder of
packages and a process of its own (isolated/).

A *comparison* is one loss of the framework (its *mode* and the fields of its config)
beside the objective that its name *promises*. Its *reasons* are known faults, which
should account for the difference. A *component*, or part, is a function beside the
losses, such as an advantage estimator. The *typical batch* is the one on which the size
of a fault is measured. The gradient is also computed in *micro-batches*, parts of the
batch whose gradients a trainer adds up.
"""

import datetime
import importlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from upref.errors import InputError
from upref.result import Result
from upref_frameworks import names
from upref_frameworks.audits import components, isolated, losses
from upref_frameworks.audits.case import MICRO, Comparison
from upref_frameworks.audits.compare import ComparisonRow, Example
from upref_frameworks.audits.framework import Framework
from upref_frameworks.audits.ledger import as_toml_value, changed_defaults, check_ledger
from upref_frameworks.ledger import Entry, read, read_tables, summary

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Audit(Result):
    """The rows; true when each agrees or is explained, and the ledger says so."""

    json_indent = 2  # as the committed records of docs/ have it

    framework: str
    version: str
    rows: list[ComparisonRow]
    nan_in_padding: list[str]  # losses that are NaN when a masked slot holds NaN
    unaudited: list[str]  # losses this version has and this audit does not know
    out_of_scope: dict[str, str]
    against_ledger: list[str]  # a sentence for each deviation that is not as recorded
    remarks: list[str]
    entries: list[Entry] = field(repr=False)
    # by loss, as its config has them
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    date: str = ""

    def __bool__(self) -> bool:
        return self.explained and not self.against_ledger

    @property
    def failures(self) -> list[str]:
        """Return the unexplained differences and the disagreements with the ledger.

        Returns:
            One sentence each; empty if and only if the audit is true.
        """
        return [
            f"{r.label}: {r.verdict}; {r.spot}" for r in self.rows if not r.ok
        ] + self.against_ledger

    @property
    def notes(self) -> list[str]:
        """Return the remarks on the audited version; they change no verdict."""
        return self.remarks

    @property
    def explained(self) -> bool:
        """Return whether each row agrees, or differs for reasons that leave no
        difference.
        """
        return all(row.ok for row in self.rows)

    def data(self) -> dict[str, Any]:
        """Return the rows and, of each entry of the ledger, how it is recorded.

        Returns:
            What `upref audit --json` prints.
        """
        rows = [asdict(r) | {"verdict": r.verdict, "ok": r.ok} for r in self.rows]
        entries = [
            {
                "key": e.key,
                "status": e.status,
                "severity": e.severity,
                "change": e.change,
            }
            for e in self.entries
        ]
        return asdict(self) | {"rows": rows, "ok": bool(self), "entries": entries}

    def text(self, verbose: bool = False) -> str:
        """Return the table and the sentences behind it, in 160 columns.

        Args:
            verbose: not read: all is printed.

        Returns:
            Lines, without a line break at the end.
        """
        from rich.console import Console

        console = Console(width=160, no_color=True)
        with console.capture() as text:
            console.print(*self.lines(), sep="\n")
        return text.get().rstrip("\n")

    def lines(self, verbose: bool = False) -> "Iterator[Table | str]":
        """Yield the table and the sentences behind it, for rich.

        Args:
            verbose: not read: all is printed.

        Yields:
            The table, then sentences.
        """
        from rich.markup import escape
        from rich.table import Table

        title = f"{self.framework} {self.version} against the reference"
        table = Table(title=title, title_justify="left", show_lines=True)
        for column in (
            self.framework,
            "compared with",
            "verdict",
            "why [ledger], and where: weight with that repaired -> found",
        ):
            table.add_column(escape(column), overflow="fold")
        table.add_column("then remains")
        for r in self.rows:
            because = [self._because(r, reason, spot) for reason, spot in r.reasons]
            if not (r.agrees or r.ok):
                because = [f"largest difference; {r.spot}", *because]
            loss = r.label
            if r.micro_batches > 1:
                loss += f", in {r.micro_batches} micro-batches"
            remains = "" if r.agrees else f"{r.remains:.1e}"
            table.add_row(
                *map(escape, (loss, r.promise, r.verdict, "\n".join(because), remains))
            )
        yield table
        yield f"Each loss, with the smallest batch that shows it: upref check {self.framework}:LOSS --as OBJECTIVE"
        yield escape(
            f"What [ledger] records, paper, code and links: upref audit {self.framework} --ledger"
        )
        yield f"Split into {MICRO} micro-batches the gradient is the same, except where a row says otherwise."
        if self.nan_in_padding:
            yield f"The loss is NaN when a masked slot holds NaN: {', '.join(self.nan_in_padding)}."
        yield from self.remarks
        for mode, reason in self.out_of_scope.items():
            yield f"Not audited: {mode} ({reason})."
        if self.unaudited:
            yield f"Not audited, unknown to this version of upref: {', '.join(self.unaudited)}."
        yield from (escape(f"LEDGER: {line}") for line in self.against_ledger)
        yield escape(self.sentence)

    @property
    def sentence(self) -> str:
        """Return one sentence that counts the recorded deviations and names the worst."""
        return summary(f"{self.framework} {self.version}", self.entries)

    def entry(self, row: ComparisonRow, reason: str) -> Entry | None:
        """Find the entry of the ledger that records one reason of a row.

        Args:
            row: a row of this audit.
            reason: the words of one of its reasons.

        Returns:
            The first entry with this reason and with the row among its evidence; None
            where the deviation is not recorded.
        """
        key = (row.label, row.promise, row.micro_batches)
        for entry in self.entries:
            recorded = {
                (x.loss, x.held_against, x.micro_batches) for x in entry.evidence
            }
            if entry.reason == reason and key in recorded:
                return entry
        return None

    def _because(self, row: ComparisonRow, reason: str, spot: Example) -> str:
        """Return a reason in words; with the example that shows it, unless it changes
        no token, and with the status and the key of the ledger's entry, where there is
        one.
        """
        entry = self.entry(row, reason)
        tag = f" [{entry.status}: {entry.key}]" if entry else ""
        return (f"{reason}; {spot}" if spot.difference else reason) + tag


def framework(name: str) -> Framework:
    """Import the audit of a framework and return its tables.

    Args:
        name: a name of `upref_frameworks.names()`.

    Returns:
        The Framework that upref_frameworks/NAME/audit.py defines. The framework itself
        is not imported.

    Raises:
        InputError: there is no audit of that name.
    """
    if not isinstance(name, str) or name not in names():
        raise InputError(
            f"no audit of {repr(name)[:60]}: choose {' or '.join(names())}."
        )
    module = importlib.import_module(f"upref_frameworks.{name}.audit")
    return next(x for x in vars(module).values() if isinstance(x, Framework))


def audit(
    name: str,
    comparisons: tuple[Comparison, ...] | None = None,
    *,
    version: str = "",
    source: str = "",
    loud: bool = False,
) -> Audit:
    """Compare the losses of a framework with the reference, at its defaults and at the
    papers' settings.

    Args:
        name: a framework with a folder in upref_frameworks.
        comparisons: only these; None: all.
        version: another version than the pinned one, or `newest`.
        source: path of a working copy of the framework.
        loud: print the output of the framework's process.

    Returns:
        An Audit. A framework with a pin is installed into a folder of its own and
        audited in its own process.

    Raises:
        InputError: the framework cannot be installed or run, `comparisons` has another
            type, or a version or a source is given for a framework without a pin.
    """
    f = framework(name)
    is_table = isinstance(comparisons, list | tuple) and all(
        isinstance(c, Comparison) for c in comparisons
    )
    if comparisons is not None and not is_table:
        raise InputError(
            "comparisons are a tuple of upref_frameworks.audits.case.Comparison, or None for all of them."
        )
    answer: Audit | None = isolated.run_elsewhere(
        "audit", name, f.pin, version, source, loud
    )
    if answer is not None:
        return answer
    return _audit_in_this_process(name, f, comparisons)


def _audit_in_this_process(
    name: str, f: Framework, comparisons: tuple[Comparison, ...] | None
) -> Audit:
    """Audit a framework that this process can import.

    Args:
        name: of the framework.
        f: its tables.
        comparisons: only these; None: all.
    """
    inside = f.pin and isolated.INSIDE
    if inside:
        version = inside["version"]
        remarks = [*inside["remarks"], *f.remarks]
    else:
        version = f.version()
        remarks = [*f.remarks]
    modes = f.modes()
    asked = f.comparisons if comparisons is None else comparisons
    # losses that the table compares and this version does not have
    gone: tuple[str, ...] = ()
    if f.loss_by_names:
        gone = tuple(dict.fromkeys(c.mode for c in asked if c.mode not in modes))
    compared = [c for c in asked if c.mode not in gone]
    modes_with_defaults = sorted({c.mode for c in compared if c.mode in modes})
    defaults = {mode: f.defaults(mode) for mode in modes_with_defaults}
    rows, nan_in_padding = losses.rows(f, compared, defaults.keys())
    if comparisons is None:
        rows += components.rows(name, f.parts())
    known = {c.mode for c in f.comparisons} | f.out_of_scope.keys()
    entries = read(name)
    recorded_defaults = read_tables(name).get("defaults", {})
    plain_defaults = {}
    for mode, fields in defaults.items():
        plain_defaults[mode] = {k: as_toml_value(v) for k, v in fields.items()}
    against_ledger = []
    for mode in gone:
        there = ", ".join(sorted(modes))
        against_ledger.append(f"the loss {mode} is gone: {name} {version} has {there}")
    against_ledger += changed_defaults(plain_defaults, recorded_defaults, version)
    complete = comparisons is None
    against_ledger += check_ledger(rows, entries, version, complete, gone)
    return Audit(
        framework=name,
        version=version,
        rows=rows,
        nan_in_padding=nan_in_padding,
        unaudited=sorted(m for m in modes if m not in known),
        out_of_scope=f.out_of_scope,
        against_ledger=against_ledger,
        remarks=remarks,
        entries=entries,
        defaults=plain_defaults,
        date=datetime.date.today().isoformat(),
    )
