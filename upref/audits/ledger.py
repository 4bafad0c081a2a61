# SPDX-License-Identifier: Apache-2.0
"""The ledger: known deviations of frameworks from the papers, as strict expected failures.

NAME.toml beside NAME.py is reviewed by hand, and every number in it was seen by running the framework. `hold` says
where the framework no longer does what is recorded, and where it does what is not.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upref.audits.compare import Row, Spot
from upref.errors import InputError

STATUS = {
    "deliberate": "the framework documents it, or offers the paper's form as a setting",
    "open": "nothing in the framework tells the user",
    "numerical": "a guard or a rounding that training does not meet",
}


@dataclass(frozen=True)
class Evidence:
    """One row of the audit: the loss, what it is held against, and the weight of one token; empty where none moves."""

    loss: str
    held_against: str
    where: str = ""
    expected: str = ""
    found: str = ""
    micro_batches: int = 1

    @property
    def command(self) -> str:
        objective, *hp = self.held_against.split(", ")
        return f"{self.loss} --as {objective}" + "".join(f" --hp {x}" for x in hp)

    def __str__(self) -> str:
        return f"{self.where}: {self.expected} -> {self.found}" if self.where else "no token of the grid"


@dataclass(frozen=True)
class Entry:
    """A deviation: what the paper says, what the code does, and the evidence."""

    key: str
    framework: str
    version: str
    status: str  # a key of STATUS
    reason: str  # as the audit words it
    bib: str
    paper: str
    code: str
    link: str
    evidence: list[Evidence]
    words: str = ""  # upstream's own, where it is deliberate
    fix: str = ""
    proof: str = ""  # a script that needs the framework and torch alone
    prints: str = ""  # what it prints: expected and found

    def __str__(self) -> str:
        lines = [f"{self.key} ({self.status}; {self.framework} {self.version}): {self.reason}"]
        lines += [
            f"    paper  {self.bib}: {self.paper}",
            f"    code   {self.code}",
            f"    link   {self.link or 'no thread known'}",
        ]
        lines += [f"    words  {self.words}"] * bool(self.words)
        for e in self.evidence:
            parts = f" (in {e.micro_batches} micro-batches)" if e.micro_batches > 1 else ""
            lines += [f"    shown  upref check {self.framework}:{e.command}{parts}", f"           {e}"]
        return "\n".join(lines)


FRAMEWORKS = Path(__file__).parents[1] / "frameworks"


def recorded(name: str) -> dict[str, Any]:
    """NAME.toml: [[deviation]], and what the defaults were, of every loss and of each; {} where there is none."""
    file = FRAMEWORKS / name / "ledger.toml"
    return _tables(file.read_text(encoding="utf-8")) if file.exists() else {}


def _tables(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the ledger cannot be read: {error}") from error


def read(name: str = "", text: str | None = None) -> list[Entry]:
    """The entries of a framework's ledger, of all, or of this text; InputError where one is not whole."""
    if not name:
        return [e for file in sorted(FRAMEWORKS.glob("*/ledger.toml")) for e in read(file.parent.name)]
    tables = recorded(name) if text is None else _tables(text)
    try:
        given = [{"framework": name} | t for t in tables.get("deviation", [])]
        entries = [Entry(**t | {"evidence": [Evidence(**e) for e in t.get("evidence", [])]}) for t in given]
    except TypeError as error:
        raise InputError(f"the ledger of {name} cannot be read: {error}") from error
    for e in entries:
        if e.status not in STATUS or not e.evidence:
            raise InputError(f"ledger entry {e.key}: status is one of {', '.join(STATUS)}, and evidence is not empty.")
    return entries


def moved(name: str, defaults: dict[str, dict[str, Any]], version: str) -> list[str]:
    """Sentences: defaults of the framework's own config that are no longer what is recorded."""
    then = recorded(name).get("defaults", {})
    return [
        f"{mode}: the default of {k} is {now.get(k, 'gone')} in {version}, and was {was.get(k, 'not there')}"
        for mode, now in defaults.items()
        for was in [then.get("every", {}) | then.get(mode, {})] * bool(then)
        for k in sorted({*now, *was})
        if now.get(k) != was.get(k)
    ]


def plainly(x: Any) -> Any:
    """A default as TOML and JSON can hold it."""
    return x if isinstance(x, bool | int | float | str) else str(x)


def hold(rows: list[Row], entries: list[Entry], version: str, complete: bool, gone: tuple[str, ...] = ()) -> list[str]:
    """Sentences: deviations of these rows that the ledger has not, or has otherwise; with complete, also those gone.

    gone: losses that are themselves.
    """
    known = {(e.reason, x.loss, x.held_against, x.micro_batches): (e, x) for e in entries for x in e.evidence}
    said, seen = [], set()
    audited = {(r.label, r.promise, r.micro_batches) for r in rows}
    for r in rows:
        for words, spot in r.reasons:
            key = (words, r.label, r.promise, r.micro_batches)
            seen.add(key)
            now = as_evidence(r, spot)
            if key not in known:
                said.append(f"not recorded: {words} ({now.command}; {now})")
            elif known[key][1] != now:
                entry, then = known[key]
                said.append(f"{entry.key} has changed, {then} in {entry.version}, {now} in {version} ({now.command})")
    for key in known.keys() - seen:
        if (complete or key[1:] in audited) and key[1].partition(",")[0] not in gone:
            entry, then = known[key]
            said.append(f"{entry.key} is gone: in {version} {then.command} no longer shows it; review the entry")
    return sorted(said)


def as_evidence(r: Row, spot: Spot) -> Evidence:
    """What the ledger has to say of this row's reason."""
    shown = (spot.where, *spot.weights) if spot.difference else ("", "", "")
    return Evidence(r.label, r.promise, *shown, r.micro_batches)
