# SPDX-License-Identifier: Apache-2.0
"""What is recorded of the frameworks: the entries of NAME/ledger.toml, read and put in
words. It imports no torch.

Its table [ledger] has once what holds of all entries: version, source (where the lines
stand), searched (which documents, comments and warnings were read before anything was
called a bug), twice (the bugs and surprising defaults that a second reader held against
the sources), prelude (what the scripts begin with).
What holds of several frameworks stands once in facts.toml: an entry that names a `fact`
has its fields, unless it has its own. `effect` is [severity, change], as the audit
computes both. audits/ledger.py holds the entries against an audit.
"""

import ast
import functools
import math
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from upref.errors import InputError
from upref.result import Result

STATUS = {
    "bug": "its behavior contradicts its name, documentation or other settings, and no text mentions that",
    "surprising default": "the name alone does not give the paper's objective; not every "
    "framework with it says so, or none says that the paper's objective is another",
    "documented choice": "documentation, help, a comment or a warning of the framework states it",
    "numerical": "a guard or a rounding that training hardly meets",
}
SEVERITY = {
    "breaks": "the gradient of a typical batch points elsewhere (cosine at most 0.5), or is gone",
    "weakens": "its direction changes, or that of a part of it",
    "rescales": "mostly its length changes, which a learning rate can undo",
    "cosmetic": "less than 2 % of the gradient changes",
}

WARNED = "warned: "  # begins what a framework warns while a script of its ledger runs


@dataclass(frozen=True)
class Evidence:
    """One row of the audit: the loss, what it is compared with, and the weight of one
    token; empty where none moves. The size of an entry is not that of a row whose
    settings are `beside_defaults`.
    """

    loss: str
    held_against: str
    where: str = ""
    expected: str = ""
    found: str = ""
    micro_batches: int = 1
    # an audit's own row, with which this one is compared, does not say it
    beside_defaults: bool = field(default=False, compare=False)

    @property
    def command(self) -> str:
        """Return the arguments of `upref check`: `LOSS --as OBJECTIVE --hp KEY=VALUE`."""
        objective, *hp = self.held_against.split(", ")
        return f"{self.loss} --as {objective}" + "".join(f" --hp {x}" for x in hp)

    def __str__(self) -> str:
        if self.where:
            return f"{self.where}: {self.expected} -> {self.found}"
        return "no token of the grid"


@dataclass(frozen=True)
class Entry:
    """A deviation: what the paper says, what the code does, and the evidence.

    The comments below say what a field holds whose name does not; `bib` is the key of the
    paper in papers.bib, and `fix` what upstream could do.
    """

    key: str
    framework: str
    version: str
    status: str  # a key of STATUS
    reason: str  # as the audit words it
    bib: str
    paper: str
    code: str
    evidence: list[Evidence]
    # a key of SEVERITY, as the audit computes it from the largest effect of a row of
    # the evidence
    severity: str = ""
    change: float = 0.0  # |v - w| / |w| of that effect
    line: str = ""  # the line of code: PATH#LNUMBER below `source`
    words: str = ""  # where the framework says so, in its own words
    link: str = ""  # where these words stand
    thread: str = ""  # upstream's issue or pull request
    fixed: str = ""  # the version or commit that repaired it
    fix: str = ""
    proof: str = ""  # a script that needs the framework, and nothing of upref
    prints: str = ""  # what it prints: expected and found
    # for the table to read first: what one asks for, what one gets, what to do
    ask: str = ""
    get: str = ""
    do: str = ""
    also: str = ""  # the other frameworks of which ask, get and do are true
    source: str = ""
    searched: str = ""
    twice: bool = False  # whether a second reader held it against the sources

    @property
    def at(self) -> str:
        """Return the URL of the line of code; "" where none is recorded."""
        anchor = "#line." if "inspector.pypi.io" in self.source else "#L"
        return self.source + self.line.replace("#L", anchor) if self.line else ""

    def __str__(self) -> str:
        """Return the entry as paragraphs: what the paper and the code have, where it
        was told, and each recorded check.
        """
        lines = [
            f"{self.key} ({self.status}; {self.framework} {self.version}): {self.reason}"
        ]
        lines += [f"    paper  {self.bib}: {self.paper}", f"    code   {self.code}"]
        said = {
            "line": self.at,
            "told": self.words and f'"{self.words}" ({self.link})',
            "thread": self.thread,
            "fixed": self.fixed,
            "size": self.severity and f"{self.severity}: {self.size}",
        }
        lines += [f"    {k:6} {v}" for k, v in said.items() if v]
        for e in self.evidence:
            parts = (
                f" (in {e.micro_batches} micro-batches)" if e.micro_batches > 1 else ""
            )
            lines += [
                f"    shown  upref check {self.framework}:{e.command}{parts}",
                f"           {e}",
            ]
        return "\n".join(lines)

    @property
    def size(self) -> str:
        """Return in words how much of a typical batch's gradient changes."""
        return share(self.change)


def share(change: float) -> str:
    """Write in words how much of a typical batch's gradient changes.

    Args:
        change: |v - w| / |w|, the relative distance of the two gradients.

    Returns:
        A clause, without a period.
    """
    if change == math.inf:
        return "there is a gradient where none should be"
    return f"{100 * change:.3g} % of a typical batch's gradient changes"


FRAMEWORKS = Path(__file__).parent
FACTS = FRAMEWORKS / "facts.toml"


def read_tables(name: str) -> dict[str, Any]:
    """Read the ledger of a framework as TOML.

    Args:
        name: the framework.

    Returns:
        The tables of NAME/ledger.toml: [ledger], [defaults], [recipe] and
        [[deviation]]; {} where there is no file.

    Raises:
        InputError: it is no TOML.
    """
    file = FRAMEWORKS / name / "ledger.toml"
    return _tables(file.read_text(encoding="utf-8")) if file.exists() else {}


def _tables(text: str) -> dict[str, Any]:
    """Parse TOML. Raise InputError where it is none."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the ledger cannot be read: {error}") from error


def read(name: str = "", text: str | None = None) -> list[Entry]:
    """Read the entries of a ledger.

    Args:
        name: the framework; "": all frameworks.
        text: TOML to read in place of the framework's file; ignored without a name.

    Returns:
        The entries in the order of the file, with what [ledger] and facts.toml say of
        them.

    Raises:
        InputError: an entry lacks a field or has a wrong one.
    """
    if not name:
        of_all: list[Entry] = []
        for file in sorted(FRAMEWORKS.glob("*/ledger.toml")):
            of_all += read(file.parent.name)
        return of_all
    tables = read_tables(name) if text is None else _tables(text)
    shared = {"framework": name} | tables.get("ledger", {})
    prelude = shared.pop("prelude", "").strip()
    facts = _tables(FACTS.read_text(encoding="utf-8"))
    twice = shared.pop("twice", "").split()
    entries: list[Entry] = []
    try:
        for table in tables.get("deviation", []):
            fields = shared | facts.get(table.pop("fact", ""), {}) | table
            short_key = fields["key"].removeprefix(f"{name}-".replace("_", "-"))
            fields["twice"] = short_key in twice
            fields["severity"], fields["change"] = fields.pop("effect")
            if fields.get("proof"):
                fields["proof"] = _script(prelude, fields["proof"].strip())
            fields["evidence"] = [Evidence(**e) for e in fields.get("evidence", [])]
            entries.append(Entry(**fields))
    except (AttributeError, KeyError, SyntaxError, TypeError, ValueError) as error:
        raise InputError(f"the ledger of {name} cannot be read: {error}") from error
    for e in entries:
        has_words = e.status in STATUS and e.severity in ("", *SEVERITY)
        if not has_words or not e.evidence:
            raise InputError(
                f"ledger entry {e.key}: status is one of {', '.join(STATUS)}, severity one of {', '.join(SEVERITY)}, "
                "and evidence is not empty."
            )
    return entries


def entry(name: str, key: str) -> Entry:
    """Find an entry of a ledger by its key.

    Args:
        name: a framework.
        key: as the ledger has it.

    Returns:
        The entry.

    Raises:
        InputError: the ledger of the framework has no such entry.
    """
    entries = {e.key: e for e in read(name)}
    if key not in entries:
        raise InputError(
            f"the ledger of {name} has no {key!r}: choose {', '.join(entries) or 'nothing, it is empty'}."
        )
    return entries[key]


@functools.cache
def _script(prelude: str, proof: str) -> str:
    """Return a script: the proof behind those statements of the prelude that it needs.
    A statement is needed if the proof, or a later statement that is needed, uses a name
    that it defines; or if it replaces an attribute of a module.
    """
    lines = prelude.splitlines()
    used = _names_in(ast.parse(proof))
    kept_lines: list[str] = []
    for statement in reversed(ast.parse(prelude).body):
        # what replaces a part of a module acts without being named again
        is_patch = isinstance(statement, ast.Assign) and isinstance(
            statement.targets[0], ast.Attribute
        )
        if is_patch or used & _names_defined_by(statement):
            used |= _names_in(statement)
            kept_lines[:0] = lines[statement.lineno - 1 : statement.end_lineno]
    modules = []
    other_lines = []
    for line in kept_lines:
        if line.startswith("import "):
            modules.append(line.removeprefix("import "))
        else:
            other_lines.append(line)
    imports = [f"import {', '.join(modules)}"] if modules else []
    return "\n".join([*imports, *other_lines, proof])


def _names_defined_by(statement: ast.stmt) -> set[str]:
    """Return the names that a statement imports or assigns, and that of its function or
    class; "" is among them.
    """
    # an import has `names`; a function or a class has a `name`
    defined = {getattr(statement, "name", "")}
    for alias in getattr(statement, "names", []):
        defined.add(alias.asname or alias.name.partition(".")[0])
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return defined


def _names_in(tree: ast.AST) -> set[str]:
    """Return the names that a piece of code reads or sets."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def sort_by_severity(entries: list[Entry]) -> list[Entry]:
    """Sort entries: the most severe first.

    Args:
        entries: in any order.

    Returns:
        Of one severity bugs go first, then surprising defaults, then what is
        documented; of one status, the largest change.
    """
    severe = [*SEVERITY, ""]
    return sorted(
        entries,
        key=lambda e: (severe.index(e.severity), [*STATUS].index(e.status), -e.change),
    )


def count_documented(entries: list[Entry]) -> int:
    """Count the surprising defaults that this framework itself documents.

    Args:
        entries: of one framework.

    Returns:
        Such a default still counts as surprising: another framework with the same fact
        does not document it.
    """
    return sum(e.status == "surprising default" and bool(e.words) for e in entries)


def _many(n: int, one: str) -> str:
    """Return a number with its noun, such as `1 bug` or `2 bugs`."""
    return f"{n} {one}" + ("" if n == 1 else "s")


def summary(name: str, entries: list[Entry]) -> str:
    """Write one sentence on a ledger: how many entries of each status, and the worst.

    Args:
        name: the framework with its version, as the sentence begins.
        entries: of its ledger. Numerical ones are not counted.

    Returns:
        A sentence. The worst is a bug or a surprising default; where there is neither,
        none is named.
    """

    def count(status: str) -> int:
        """Return how many entries have this status."""
        return sum(e.status == status for e in entries)

    words = {}
    for status in STATUS:
        if status != "numerical":
            words[status] = _many(count(status), status)
    if told := count_documented(entries):
        words["surprising default"] += f" ({told} of them documented)"
    said = f"{name}: {', '.join(list(words.values())[:-1])} and {words['documented choice']}"
    for e in sort_by_severity(entries):
        if e.status in ("bug", "surprising default"):
            return f"{said}; the worst is {e.key}: {e.reason} ({e.severity})."
    return f"{said}."


@dataclass(frozen=True)
class Ledger(Result):
    """What is recorded of a framework. It is no verdict: always true."""

    entries: list[Entry]
    head_style = ""

    def text(self, verbose: bool = False) -> str:
        """Return the entries as paragraphs.

        Args:
            verbose: not read: all is printed.

        Returns:
            Lines.
        """
        return "\n\n".join(map(str, self.entries))

    def data(self) -> list[dict[str, Any]]:
        """Return the entries as data.

        Returns:
            The fields of each.
        """
        return [asdict(e) for e in self.entries]
