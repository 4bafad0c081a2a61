# SPDX-License-Identifier: Apache-2.0
"""The ledger: known deviations of frameworks from the papers, as strict expected failures.

ledger.toml is reviewed by hand, and every number in it was seen by running the installed framework. `hold` says where
the framework no longer does what is recorded, and where it does what is not.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources

from upref.errors import InputError
from upref.verify.audit.compare import Row, Spot

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

    def __str__(self) -> str:
        lines = [f"{self.key} ({self.status}; {self.framework} {self.version}): {self.reason}"]
        lines += [
            f"    paper  {self.bib}: {self.paper}",
            f"    code   {self.code}",
            f"    link   {self.link or 'no thread known'}",
        ]
        for e in self.evidence:
            parts = f" (in {e.micro_batches} micro-batches)" if e.micro_batches > 1 else ""
            lines += [f"    shown  upref check {self.framework}:{e.command}{parts}", f"           {e}"]
        return "\n".join(lines)


def read(text: str | None = None) -> list[Entry]:
    """The entries of ledger.toml, or of this text; InputError where one is not whole."""
    if text is None:
        text = resources.files("upref.verify.audit").joinpath("ledger.toml").read_text(encoding="utf-8")
    try:
        tables = tomllib.loads(text).get("deviation", [])
        entries = [Entry(**t | {"evidence": [Evidence(**e) for e in t.get("evidence", [])]}) for t in tables]
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise InputError(f"the ledger cannot be read: {error}") from error
    for e in entries:
        if e.status not in STATUS or not e.evidence:
            raise InputError(f"ledger entry {e.key}: status is one of {', '.join(STATUS)}, and evidence is not empty.")
    return entries


def hold(rows: list[Row], entries: list[Entry], version: str, complete: bool) -> list[str]:
    """Sentences: deviations of these rows that the ledger has not, or has otherwise; with complete, also those gone."""
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
        if complete or key[1:] in audited:
            entry, then = known[key]
            said.append(f"{entry.key} is gone: in {version} {then.command} no longer shows it; review the entry")
    return sorted(said)


def as_evidence(r: Row, spot: Spot) -> Evidence:
    """What the ledger has to say of this row's reason."""
    shown = (spot.where, *spot.weights) if spot.difference else ("", "", "")
    return Evidence(r.label, r.promise, *shown, r.micro_batches)
