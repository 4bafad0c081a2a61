# SPDX-License-Identifier: Apache-2.0
"""A ledger entry as a bug report for upstream; the scripts of the ledger, run; what a new ledger has to record."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from upref.audits import isolated
from upref.audits.child import scripts
from upref.audits.framework import Framework
from upref.audits.ledger import Entry, as_evidence, read, recorded
from upref.errors import InputError


def ledger(name: str, as_json: bool) -> str:
    """All that is recorded; runs nothing."""
    entries = read(name)
    said = [asdict(e) for e in entries]
    return json.dumps(said, indent=1, ensure_ascii=False) if as_json else "\n\n".join(map(str, entries))


def report(name: str, key: str) -> str:
    """The text of a bug report; InputError where the ledger has no such entry."""
    entries = {e.key: e for e in read(name)}
    if key not in entries:
        raise InputError(f"the ledger of {name} has no {key!r}: choose {', '.join(entries) or 'nothing, it is empty'}.")
    e = entries[key]
    lines = [f"# {name} {e.version}, {e.code.partition(':')[0]}: {e.reason}", ""]
    lines += [f"**Promised** ({e.bib}): {e.paper}.", "", f"**Found**: {e.code}.", ""]
    lines += [f"**Status**: {e.status}" + (f'; upstream says: "{e.words}"' if e.words else "") + "."]
    lines += [f"**Thread**: {e.link or 'none known'}", ""]
    if e.proof:
        lines += ["A script that needs the framework and torch alone:", "", "```python", e.proof.strip(), "```", ""]
        lines += ["It prints", "", "```text", e.prints.strip(), "```", ""]
    lines += ["By `upref audit " + name + "`, the gradient weight of a token (or the number itself):", ""]
    lines += ["| what | held against | where: expected -> found |", "|---|---|---|"]
    lines += [f"| `{x.loss}` | `{x.held_against}` | {x} |" for x in e.evidence]
    lines += ["", f"**A fix**: {e.fix}."] if e.fix else []
    return "\n".join(lines)


@dataclass(frozen=True)
class Proofs:
    """What the scripts of a ledger print now; true where it is what is recorded."""

    said: list[tuple[Entry, str]]

    def __bool__(self) -> bool:
        return all(now.split() == e.prints.split() for e, now in self.said)

    def json(self) -> str:
        return json.dumps([{"key": e.key, "recorded": e.prints, "prints": now} for e, now in self.said], indent=1)

    def text(self, verbose: bool = False) -> str:
        out = []
        for e, now in self.said:
            same, told = now.split() == e.prints.split(), " ".join(now.split())
            out.append(f"{'as recorded' if same else 'OTHERWISE  '}  {e.key}: {told}")
            out += [f"{'':11}  recorded: {' '.join(e.prints.split())}"] * (not same)
        return "\n".join(out)

    __str__ = text


def proofs(f: Framework, version: str = "", source: str = "", loud: bool = False) -> Proofs:
    """Runs each script of the ledger where the framework is: in its own process, or here."""
    entries = [e for e in read(f.name) if e.proof]
    texts = [e.proof for e in entries]
    if f.pin is None and (version or source):
        raise InputError(f"{f.name} is audited as it is installed: leave --version and --source out.")
    f.version()  # InputError where it is not installed
    apart = lambda pin: isolated.run("scripts", f.name, pin, version, source, loud, texts=texts)
    said = apart(f.pin) if f.pin else scripts(f.name, texts)
    return Proofs(list(zip(entries, said, strict=True)))


def draft(a: Any) -> str:
    """What NAME.toml lacks, as TOML to be finished by hand: the defaults, and every deviation that is not recorded."""
    lines = []
    if not recorded(a.framework).get("defaults"):
        each = list(a.defaults.values())
        shared = {k: v for k, v in each[0].items() if all(d.get(k) == v for d in each)} if each else {}
        own = {m: {k: v for k, v in d.items() if k not in shared} for m, d in a.defaults.items()}
        for mode, fields in ({"every": shared} | own).items():
            lines += [f"[defaults.{mode}]", *(f"{k} = {_toml(v)}" for k, v in fields.items()), ""] * bool(fields)
    known = {(e.reason, x) for e in a.entries.values() for x in e.evidence}
    new: dict[str, list[str]] = {}
    for r in a.rows:
        for words, spot in r.reasons:
            if (words, x := as_evidence(r, spot)) not in known:
                pairs = {"loss": x.loss, "held_against": x.held_against, "where": x.where}
                pairs |= {"expected": x.expected, "found": x.found}
                more = f", micro_batches = {x.micro_batches}" if x.micro_batches > 1 else ""
                said = ", ".join(f"{k} = {_toml(v)}" for k, v in pairs.items() if v)
                new.setdefault(words, []).append(f"    {{ {said}{more} }},")
    for words, evidence in new.items():
        lines += ["[[deviation]]", f'key = "{a.framework}-?"', f'version = "{a.version}"', 'status = "?"']
        lines += [f"reason = {_toml(words)}", 'bib = "?"', 'paper = "?"', 'code = "?"', 'link = ""', 'fix = "?"']
        lines += ["evidence = [", *evidence, "]", "proof = '''\n'''", 'prints = "expected ?\\nfound ?"', ""]
    return "\n".join(lines)


def _toml(v: Any) -> str:
    if isinstance(v, bool):
        return str(v).lower()
    return repr(v) if isinstance(v, int | float) else '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"'
