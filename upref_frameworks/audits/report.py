# SPDX-License-Identifier: Apache-2.0
"""A ledger entry as a bug report for upstream; the scripts of the ledger, run; what a
new ledger has to record.
"""

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from upref import markdown
from upref.definition import papers
from upref.result import Result
from upref_frameworks.audits import Audit, framework, isolated
from upref_frameworks.audits.child import scripts
from upref_frameworks.audits.compare import FaultEffect
from upref_frameworks.audits.framework import Framework
from upref_frameworks.audits.isolated.pin import cache
from upref_frameworks.audits.ledger import as_evidence, most_severe
from upref_frameworks.ledger import (
    SEVERITY,
    STATUS,
    WARNED,
    Entry,
    Evidence,
    entry,
    read,
    read_tables,
)


@dataclass(frozen=True)
class Draft(Result):
    """A text that a person finishes or sends: an issue, or entries of a ledger. It is no
    verdict: always true.
    """

    words: str
    head_style = ""

    def text(self, verbose: bool = False) -> str:
        """Return the text itself.

        Args:
            verbose: not read: all is printed.

        Returns:
            Lines.
        """
        return self.words

    def data(self) -> dict[str, str]:
        """Return the text under the key `text`.

        Returns:
            One key.
        """
        return {"text": self.words}


def report(name: str, key: str) -> str:
    """Write an entry of the ledger as an issue for upstream.

    Args:
        name: the framework.
        key: of the entry.

    Returns:
        Markdown, with the code in question where the framework's files are on this
        machine.

    Raises:
        InputError: the ledger has no such entry.
    """
    e = entry(name, key)
    pin = framework(name).pin
    date_words = f" of {pin.date}" if pin and pin.date else ""
    lines = [f"# {_title(e)}", ""]
    lines.append(f"**Version**: {name} {e.version}{date_words}.  ")
    lines += [f"**Paper**: {', '.join(papers().get(e.bib, (e.bib,)))}: {e.paper}.  "]
    lines.append(f"**Code**: {e.code}.  ")
    if e.line:
        lines.append(f"**Line**: {e.at}  ")
    lines += [*_quoted_code(e), ""]
    if e.proof:
        lines += _reproduction(name, e)
    if e.severity:
        lines += [
            f"**Size**: {SEVERITY[e.severity]}; {e.size} (`upref audit {name}` says which batch is typical).",
            "",
        ]
    told = "not in any searched text"
    if e.words:
        told = f'"{e.words}" ({e.link})'
    lines += [f"**Documented**: {told}. Searched: {e.searched}.  "]
    lines.append(f"**Thread**: {e.thread or 'none found'}  ")
    if e.fixed:
        lines.append(f"**Fixed in**: {e.fixed}  ")
    if e.fix:
        lines.append(f"**Proposed fix**: {e.fix}.")
    if e.twice or e.status in ("documented choice", "numerical"):
        readers = ""
    else:
        readers = ", by one reader so far"
    lines += ["", f"Status by upref{readers}: *{e.status}* ({STATUS[e.status]})."]
    lines += ["Gradient weights of a token, with this alone repaired and as it is:", ""]
    rows = [[f"`{x.loss}`", f"`{x.held_against}`", x] for x in e.evidence]
    columns = ["loss", "compared with", "where: repaired -> found"]
    lines.append(markdown.table(columns, rows))
    return "\n".join(lines)


def _title(e: Entry) -> str:
    """Return the title of an issue: what is asked for, else where and why it deviates."""
    if e.get:
        return f"{e.ask}: {e.get}"
    where = e.code.partition(":")[0]
    if " " in where:  # no place in the code
        where = e.evidence[0].held_against.partition(",")[0]
    return f"{where}: {e.reason}"


def _reproduction(name: str, e: Entry) -> list[str]:
    """Return the lines of an issue with the script that reproduces it, and its output."""
    expected, _, found = e.prints.partition(" found ")
    return [
        f"**Reproduce** (needs {name} and torch alone):",
        "",
        "```python",
        e.proof.strip(),
        "```",
        "",
        f"**Expected**: `{expected.removeprefix('expected ')}`  ",
        f"**Found**: `{found}`",
        "",
    ]


def _quoted_code(entry: Entry) -> list[str]:
    """Return two lines of code from the recorded one on as Markdown, where the
    framework's files are on this machine; [] elsewhere.
    """
    path, _, n = entry.line.partition("#L")
    roots = [*cache().glob(f"{entry.framework}-{entry.version}*"), *map(Path, sys.path)]
    file = next((root / path for root in roots if n and (root / path).is_file()), None)
    if file is None:
        return []
    code = file.read_text(encoding="utf-8").splitlines()[int(n) - 1 : int(n) + 1]
    return [
        "",
        "```python",
        *textwrap.dedent("\n".join(code)).rstrip().splitlines(),
        "```",
    ]


@dataclass(frozen=True)
class Proofs(Result):
    """What the scripts of a ledger print now; true where it is what is recorded, and no
    bug is warned of.
    """

    said: list[tuple[Entry, str]]

    def __bool__(self) -> bool:
        return all(self._holds(e, now) for e, now in self.said)

    @staticmethod
    def _holds(entry: Entry, now: str) -> bool:
        """Return whether a script prints what is recorded, blanks apart, and warns of
        nothing if the entry is a bug.
        """
        printed, warned, _ = now.partition("\n" + WARNED)
        return printed.split() == entry.prints.split() and not (
            warned and entry.status == "bug"
        )

    def data(self) -> list[dict[str, str]]:
        """Return what each script should print, and what it prints.

        Returns:
            A record for each entry.
        """
        return [
            {"key": e.key, "recorded": e.prints, "prints": now} for e, now in self.said
        ]

    def text(self, verbose: bool = False) -> str:
        """Return a line for each script, and a second one where its output has changed.

        Args:
            verbose: not read: all is printed.

        Returns:
            Lines, without a line break at the end.
        """
        out = []
        for e, now in self.said:
            same = self._holds(e, now)
            told = " ".join(now.split())
            out.append(f"{'as recorded' if same else 'OTHERWISE  '}  {e.key}: {told}")
            if not same:
                out.append(f"{'':11}  recorded: {' '.join(e.prints.split())}")
        return "\n".join(out)


def proofs(
    framework: Framework, version: str = "", source: str = "", loud: bool = False
) -> Proofs:
    """Run each script of a ledger where the framework is: in its own process, or here.

    Args:
        framework: whose ledger.
        version: another version than the pinned one, or `newest`.
        source: path of a working copy of the framework.
        loud: print the output of the framework's process.

    Returns:
        What each script prints now.

    Raises:
        InputError: the framework is not installed, or cannot be run.
    """
    entries = [e for e in read(framework.name) if e.proof]
    texts = [e.proof for e in entries]
    said: list[str] | None = isolated.run_elsewhere(
        "scripts", framework.name, framework.pin, version, source, loud, texts=texts
    )
    if said is None:
        framework.version()  # InputError where it is not installed
        said = scripts(framework.name, texts)
    return Proofs(list(zip(entries, said, strict=True)))


def draft(audit: Audit) -> str:
    """Write what the ledger of a framework lacks, as TOML to be finished by hand.

    Args:
        audit: a whole audit of the framework.

    Returns:
        The defaults, where none are recorded; the table [ledger], where there is none;
        and a [[deviation]] for each reason that is not recorded. `?` is what a person
        must fill in.
    """
    tables = read_tables(audit.framework)
    lines = []
    if not tables.get("ledger"):
        lines += ["[ledger]", f'version = "{audit.version}"']
        lines += ['source = "?"', 'searched = "?"', 'prelude = """', '"""', ""]
    if not tables.get("defaults"):
        lines += _tables_of_defaults(audit.defaults)
    return "\n".join([*lines, *_tables_of_deviations(audit)])


def _tables_of_defaults(
    defaults: dict[str, dict[str, bool | int | float | str]],
) -> list[str]:
    """Return the lines of the tables [defaults.MODE]. What all modes share stands in
    [defaults.every]; an empty table has no lines.
    """
    fields_of_modes = list(defaults.values())
    shared = {}
    if fields_of_modes:
        for field, value in fields_of_modes[0].items():
            if all(fields.get(field) == value for fields in fields_of_modes):
                shared[field] = value
    tables = {"every": shared}
    for mode, fields in defaults.items():
        tables[mode] = {k: v for k, v in fields.items() if k not in shared}
    lines = []
    for mode, fields in tables.items():
        if fields:
            values = [f"{k} = {_toml(v)}" for k, v in fields.items()]
            lines += [f"[defaults.{mode}]", *values, ""]
    return lines


def _tables_of_deviations(audit: Audit) -> list[str]:
    """Return the lines of a table [[deviation]] for each reason of the audit that has
    evidence which is not recorded.
    """
    known = {(e.reason, evidence) for e in audit.entries for evidence in e.evidence}
    new: dict[str, list[str]] = {}  # reason -> lines of its evidence
    sizes: dict[str, list[FaultEffect]] = {}
    for row in audit.rows:
        for (words, spot), effect in zip(row.reasons, row.effects, strict=True):
            sizes.setdefault(words, []).append(effect)
            found = as_evidence(row, spot)
            if (words, found) not in known:
                line = f"    {{ {_line_of_evidence(found)} }},"
                new.setdefault(words, []).append(line)
    lines = []
    for words, evidence in new.items():
        size = most_severe(sizes[words])
        lines += [
            "[[deviation]]",
            f'key = "{audit.framework}-?"',
            'status = "?"',
            f'effect = ["{size.severity}", {float(f"{size.change:.2g}")}]',
            f"reason = {_toml(words)}",
            'bib = "?"',
            'paper = "?"',
            'code = "?"',
            'line = "?"',
            'fix = "?"',
            "evidence = [",
            *evidence,
            "]",
            "proof = '''\n'''",
            'prints = "expected ?\\nfound ?"',
            "",
        ]
    return lines


def _line_of_evidence(x: Evidence) -> str:
    """Return the fields of one piece of evidence as TOML; empty ones are left out."""
    fields = {
        "loss": x.loss,
        "held_against": x.held_against,
        "where": x.where,
        "expected": x.expected,
        "found": x.found,
    }
    line = ", ".join(f"{k} = {_toml(v)}" for k, v in fields.items() if v)
    return f"{line}, micro_batches = {x.micro_batches}" if x.micro_batches > 1 else line


def _toml(v: bool | int | float | str) -> str:
    """Return a bool, a number or a text as TOML writes it."""
    if isinstance(v, bool):
        return str(v).lower()
    if isinstance(v, int | float):
        return repr(v)
    return '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"'
