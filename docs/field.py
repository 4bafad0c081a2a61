# SPDX-License-Identifier: Apache-2.0
"""What the frameworks compute, as pages: `python -m docs.field NAME...` audits these and writes NAME.json, as
`upref audit NAME --json` prints it, into docs/frameworks, and NAME.md from that and the ledger. docs.make makes the
tables of all of them.

`python -m docs.field --pages` writes the pages again from the JSON there is, and runs no framework.
"""

import json
import sys
from pathlib import Path
from typing import Any

from upref.audits.ledger import STATUS, Entry, read
from upref.registry import names
from upref.verify.faults import GROUPS

FOLDER = Path(__file__).parent / "frameworks"
ORDER = ("advantages", "kl", "logprobs", "aggregation")
AT = {"default": "its defaults", "paper": "the paper's settings"}


def audits() -> list[dict[str, Any]]:
    """All that was committed, by name."""
    return [json.loads(f.read_text(encoding="utf-8")) for f in sorted(FOLDER.glob("*.json"))]


# ---- a page a framework ----------------------------------------------------------------------------------------------
def page(a: dict[str, Any], entries: list[Entry]) -> str:
    name = a["framework"]
    tag = {e.reason: f"[{e.status}](#{e.key})" for e in entries}
    out = [
        f"# {name} {a['version']}",
        "",
        f"Audited on {a['date']}: `upref audit {name}`, exit status {int(not a['ok'])}.",
    ]
    out += [
        f"Written by `python -m docs.field {name}` from [{name}.json]({name}.json). [All of them](../frameworks.md).",
        "",
    ]
    out += ["| what | held against | verdict | why, and where: expected -> found |", "|---|---|---|---|"]
    for r in a["rows"]:
        why = "; ".join(_because(words, spot, tag) for words, spot in r["reasons"])
        parts = f", in {r['micro_batches']} micro-batches" if r["micro_batches"] > 1 else ""
        out.append(f"| {_code(r['label'])}{parts} | {r['promise']} | {r['verdict']} | {why} |")
    out += [""]
    out += [f"* {line}" for line in a["remarks"]]
    out += [f"* Not audited: `{mode}`: {why}." for mode, why in a["out_of_scope"].items()]
    out += [f"* Unknown to this audit: {', '.join(a['unaudited'])}."] * bool(a["unaudited"])
    nan = ", ".join(map(_code, a["nan_in_padding"]))
    out += [f"* The loss is NaN where a masked slot holds NaN: {nan}."] * bool(nan)
    out += ["", "## What differs", ""] if entries else ["", "Nothing differs.", ""]
    for e in entries:
        out += _entry(name, e)
    return "\n".join(out).rstrip() + "\n"


def _because(words: str, spot: dict[str, Any], tag: dict[str, str]) -> str:
    seen = f" [{_moved(spot)}]" if spot["difference"] else ""
    return f"{words}{seen} ({tag.get(words, 'not recorded')})".replace("|", "\\|")


def _moved(spot: dict[str, Any]) -> str:
    return f"{spot['where']}: {float(spot['expected']):.4g} -> {float(spot['found']):.4g}"  # "nan" is a string


def _code(label: str) -> str:
    return f"`{label}`"


def _entry(name: str, e: Entry) -> list[str]:
    out = [f"### {e.key}", "", f"*{e.status}*: {e.reason}.", ""]
    out += [f"* Promised ({e.bib}): {e.paper}.", f"* Found: {e.code}."]
    out += [f'* Upstream: "{e.words}"'] * bool(e.words) + [f"* Thread: {e.link}"] * bool(e.link)
    out += [f"* A fix: {e.fix}."] * bool(e.fix) + [f"* As a report: `upref audit {name} --report {e.key}`", ""]
    if e.proof:
        out += ["```text", e.proof.strip(), "", f"# prints: {' '.join(e.prints.split())}", "```", ""]
    return out


# ---- the tables of all -----------------------------------------------------------------------------------------------
def summary() -> str:
    """A row a framework."""
    out = ["| framework | version | audited | losses | agree as they are | what differs: open, deliberate, numerical |",
           "|---|---|---|---|---|---|"]  # fmt: skip
    for a in audits():
        rows = [r for r in a["rows"] if r["kind"] == "loss" and r["micro_batches"] == 1]
        first = [r for r in rows if r["setting"] == "default"]
        agree = sum(r["difference"] <= r["tol"] for r in first)
        status = [e.status for e in read(a["framework"])]
        count = ", ".join(str(status.count(s)) for s in ("open", "deliberate", "numerical"))
        modes = len({r["mode"] for r in rows})
        link = f"[{a['framework']}](frameworks/{a['framework']}.md)"
        out.append(f"| {link} | {a['version']} | {a['date']} | {modes} | {agree} of {len(first)} | {count} |")
    return "\n".join(out)


def objectives() -> str:
    """Objective x framework."""
    every = audits()
    known = {r["objective"] for a in every for r in a["rows"] if r["kind"] == "loss"}
    out = [
        "`=` agrees at its defaults, `s` at the paper's settings, not at its defaults, `≠` at neither; empty: absent.",
        "With `≈` but for what is numerical, or for one denominator for the whole batch, which every framework has.",
        "",
    ]
    out += ["| | " + " | ".join(f"[{a['framework']}](frameworks/{a['framework']}.md)" for a in every) + " |"]
    out += ["|---" * (len(every) + 1) + "|"]
    for o in (n for n in names() if n in known):
        out.append(f"| `{o}` | " + " | ".join(_sign(a, _of(a, o)) for a in every) + " |")
    out += [
        "",
        "How, and at which default:",
        "",
        "| objective | framework | at its defaults | at the paper's settings |",
        "|---|---|---|---|",
    ]
    for o in (n for n in names() if n in known):
        for a in every:
            if rows := _of(a, o):
                said = [_said([r for r in rows if r["setting"] == s]) for s in AT]
                out.append(f"| `{o}` | {a['framework']} {a['version']} | {said[0]} | {said[1]} |")
    return "\n".join(out)


def _of(a: dict[str, Any], objective: str) -> list[dict[str, Any]]:
    return [r for r in a["rows"] if r["objective"] == objective and r["kind"] == "loss" and r["micro_batches"] == 1]


def _sign(a: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    minor = {words for words, e in a["entries"].items() if e["status"] == "numerical"} | {GROUPS.words}
    exact = {r["setting"] for r in rows if r["difference"] <= r["tol"]}
    nearly = {r["setting"] for r in rows if r["ok"] and {words for words, _ in r["reasons"]} <= minor}
    signs = (("=", "default" in exact), ("≈", "default" in nearly), ("s", "paper" in exact), ("s ≈", "paper" in nearly))
    return next((sign for sign, holds in signs if holds), "≠" if rows else "")


def _said(rows: list[dict[str, Any]]) -> str:
    say = lambda r: "agrees" if r["difference"] <= r["tol"] else "differs: " + "; ".join(w for w, _ in r["reasons"])
    return "<br>".join(f"{_code(r['label'])} {say(r)}" for r in rows).replace("|", "\\|")


def parts() -> str:
    """KL terms, advantages, log-probabilities, aggregation."""
    out = ["| what | framework | function | held against | |", "|---|---|---|---|---|"]
    rows = [(a, r) for a in audits() for r in a["rows"] if r["kind"] in ORDER]
    for a, r in sorted(rows, key=lambda x: ORDER.index(x[1]["kind"])):
        why = [f"{w}, {_moved(s)}" for w, s in r["reasons"]]
        said = "agrees" if r["difference"] <= r["tol"] else "differs: " + "; ".join(why)
        out.append(f"| {r['kind']} | {a['framework']} | `{r['mode']}` | {r['promise']} | {said} |".replace(" || ", " "))
    return "\n".join(out)


def statuses() -> str:
    return "\n".join(f"* *{status}*: {says}" for status, says in STATUS.items())


def main(*asked: str):
    from upref.audits import audit

    for name in asked if asked != ("--pages",) else [a["framework"] for a in audits()]:
        file = FOLDER / f"{name}.json"
        if asked != ("--pages",):
            file.write_text(audit(name).json() + "\n", encoding="utf-8")
        text = page(json.loads(file.read_text(encoding="utf-8")), read(name))
        file.with_suffix(".md").write_text(text, encoding="utf-8")
        print(f"{file}, and its page")


if __name__ == "__main__":
    main(*sys.argv[1:])
