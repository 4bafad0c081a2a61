# SPDX-License-Identifier: Apache-2.0
"""Do the losses of an installed framework compute what their names promise? One table, every difference accounted for.

A difference must have a reason that leaves none (compare.py), and an entry of ledger.toml that records it with these
very numbers: a deviation that appears, changes or disappears fails the audit.
"""

import importlib
import json
import math
import pkgutil
from dataclasses import asdict, dataclass, field

import torch

from upref.errors import InputError
from upref.regimes import grad
from upref.verify.audit.compare import MICRO, TOL, Comparison, Framework, Row, compare, difference, grid, unit
from upref.verify.audit.ledger import Entry, hold, read
from upref.verify.slips import Slip

OWN = ("compare", "ledger")  # every other file of this folder is a framework


@dataclass(frozen=True)
class Audit:
    """The rows; true when each agrees or is explained, and the ledger says so. Print it with rich, or take .json()."""

    framework: str
    version: str
    rows: list[Row]
    nan_in_padding: list[str]  # losses that are NaN when a masked slot holds NaN
    unaudited: list[str]  # losses this version has and this audit does not know
    out_of_scope: dict[str, str]
    against_ledger: list[str]  # a sentence for each deviation that is not as recorded
    remarks: list[str]
    entries: dict[str, Entry] = field(repr=False)  # by the words of the reason

    def __bool__(self) -> bool:
        return self.explained and not self.against_ledger

    @property
    def explained(self) -> bool:
        """Each row agrees, or differs for reasons that leave no difference."""
        return all(row.ok for row in self.rows)

    def json(self) -> str:
        rows = [asdict(r) | {"verdict": r.verdict, "ok": r.ok} for r in self.rows]
        return json.dumps(asdict(self) | {"rows": rows, "ok": bool(self)}, indent=2, ensure_ascii=False)

    def __rich_console__(self, console, options):
        from rich.markup import escape
        from rich.table import Table

        title = f"{self.framework} {self.version} against the reference"
        table = Table(title=title, title_justify="left", show_lines=True)
        for column in (self.framework, "held against", "verdict", "why [ledger], and where: weight expected -> found"):
            table.add_column(escape(column), overflow="fold")
        table.add_column("then remains")
        for r in self.rows:
            because = [self._because(said, spot) for said, spot in r.reasons]
            because = because if r.agrees or r.ok else [f"largest difference; {r.spot}", *because]
            loss = r.label + (f", in {r.micro_batches} micro-batches" if r.micro_batches > 1 else "")
            remains = "" if r.agrees else f"{r.remains:.1e}"
            table.add_row(*map(escape, (loss, r.promise, r.verdict, "\n".join(because), remains)))
        yield table
        yield f"Each row again, with the smallest batch that shows it: upref check {self.framework}:LOSS --as OBJECTIVE"
        yield escape(f"What [ledger] records, paper, code and links: upref audit {self.framework} --ledger")
        yield f"Split into {MICRO} micro-batches the gradient is the same, except where a row says otherwise."
        if self.nan_in_padding:
            yield f"The loss is NaN when a masked slot holds NaN: {', '.join(self.nan_in_padding)}."
        yield from self.remarks
        for mode, reason in self.out_of_scope.items():
            yield f"Not audited: {mode} ({reason})."
        if self.unaudited:
            yield f"Not audited, unknown to this version of upref: {', '.join(self.unaudited)}."
        yield from (escape(f"LEDGER: {line}") for line in self.against_ledger)

    def _because(self, said: str, spot) -> str:
        entry = self.entries.get(said)
        tag = f" [{entry.status}: {entry.key}]" if entry else ""
        return (f"{said}; {spot}" if spot.difference else said) + tag

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160, no_color=True)
        with console.capture() as text:
            console.print(self)
        return text.get()


def frameworks() -> list[str]:
    """The frameworks that can be audited: a file each in this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in OWN)


def framework(name: str) -> Framework:
    """The tables of that framework; InputError for another name."""
    if not isinstance(name, str) or name not in frameworks():
        raise InputError(f"no audit of {repr(name)[:60]}: choose {' or '.join(frameworks())}.")
    module = importlib.import_module(f"{__name__}.{name}")
    return next(x for x in vars(module).values() if isinstance(x, Framework))


def audit(name: str, comparisons: tuple[Comparison, ...] | None = None) -> Audit:
    """Compare the losses of the installed framework with the reference, at its defaults and at the papers' settings."""
    f = framework(name)
    version, rows, poisoned = f.version(), [], []
    for c in f.comparisons if comparisons is None else comparisons:
        b = grid(c)
        weigh = lambda m, c=c: -grad(lambda x: f.loss(c, x, None), m)
        whole, parts = (torch.cat([weigh(m) for m in b.split(n)]) for n in (1, MICRO))
        rows.append(compare(name, c, b, whole, c.reasons, 1))
        if c.setting == "paper" and difference(parts / unit(c, b), whole / unit(c, b)).max() > TOL:
            why = f.split_reasons.get(c.mode, Slip("no reason known", "term"))
            rows.append(compare(name, c, b, parts, (*c.reasons, why), MICRO))
        if f.loss(c, b, math.nan).isnan():
            words = [v for v in c.config.values() if isinstance(v, str)]
            poisoned.append(c.mode + (f" ({', '.join(words)})" if words else ""))
    known = {c.mode for c in f.comparisons} | f.out_of_scope.keys()
    new = sorted(m for m in f.modes() if m not in known)
    entries = [e for e in read() if e.framework == name]
    against = hold(rows, entries, version, complete=comparisons is None)
    by_words = {e.reason: e for e in entries}
    return Audit(name, version, rows, sorted(set(poisoned)), new, f.out_of_scope, against, f.remarks(), by_words)
