# SPDX-License-Identifier: Apache-2.0
"""What the frameworks compute, as pages: `python -m docs.framework_pages NAME...`
audits these and writes NAME.json, as `upref audit NAME --json` prints it, into
docs/frameworks. docs.make makes the tables of docs/frameworks.md from these files and
the ledgers, and docs.site a page for each framework.
"""

import json
import sys
from pathlib import Path
from typing import Any

from docs import logprobs
from upref.catalog import TRAINERS
from upref.files import write_atomically
from upref.registry import get, names
from upref.verify.faults.losses import GROUPS
from upref_frameworks.audits import framework, frameworks
from upref_frameworks.audits.compare import FaultEffect
from upref_frameworks.audits.recipe import covered_objectives, no_kl, recipe
from upref_frameworks.ledger import (
    SEVERITY,
    STATUS,
    Entry,
    count_documented,
    read,
    read_tables,
    sort_by_severity,
)

FOLDER = Path(__file__).parent / "frameworks"
TRAINERS_HEAD = (
    "# SPDX-License-Identifier: Apache-2.0",
    "# Objective -> the frameworks whose audits compare a loss with it: `python -m docs.framework_pages` writes this.",
)
AT = {"default": "its defaults", "paper": "the paper's settings"}


def audits() -> list[dict[str, Any]]:
    """All that was committed, by name."""
    return [
        json.loads(f.read_text(encoding="utf-8")) for f in sorted(FOLDER.glob("*.json"))
    ]


def snapshot(a: dict[str, Any]) -> str:
    """The version; of a commit its date too."""
    pin = framework(a["framework"]).pin
    return (
        f"{a['version']} of {pin.date}"
        if pin and pin.date and pin.version == a["version"]
        else a["version"]
    )


# ---- a page a framework --------------------------------------------------------------
def pages() -> dict[str, str]:
    """The page of each framework, by its name in the site."""
    return {
        f"frameworks/{a['framework']}": page(a, read(a["framework"])) for a in audits()
    }


def page(a: dict[str, Any], entries: list[Entry]) -> str:
    name = a["framework"]
    out = [
        f"# {name} {snapshot(a)}",
        "",
        f"`upref audit {name}` called the losses of {name}, unmodified, with each setting in the",
        "first column, and compared their gradients with an objective's. The last column has the",
        "causes of a difference, and in brackets where it is largest: the sign of the advantage A,",
        "the ratio r or s, and the expected and the found weight.",
        f"On {a['date']} it ended with exit status {int(not a['ok'])}"
        f"{': each difference has a known cause' if a['ok'] else ''}.",
        "[What to set](../recipes.md), and [what the words mean](../frameworks.md#all-of-them).",
        "",
    ]
    out += [
        "| what | compared with | verdict | what differs [where: weight expected -> found] |",
        "|---|---|---|---|",
    ]
    for r in a["rows"]:
        why = "; ".join(
            _because(r, words, spot, entries) for words, spot in r["reasons"]
        )
        parts = (
            f", in {r['micro_batches']} micro-batches" if r["micro_batches"] > 1 else ""
        )
        out.append(
            f"| {_code(r['label'])}{parts} | {r['promise']} | {r['verdict']} | {why} |"
        )
    out += [""]
    out += [f"* {line}" for line in a["remarks"]]
    out += [
        f"* Not audited: `{mode}`: {why}." for mode, why in a["out_of_scope"].items()
    ]
    if a["unaudited"]:
        out.append(f"* Unknown to this audit: {', '.join(a['unaudited'])}.")
    nan = ", ".join(map(_code, a["nan_in_padding"]))
    if nan:
        out.append(f"* The loss is NaN where a masked slot holds NaN: {nan}.")
    if name in logprobs.found():
        out += [
            "",
            "## Log-probabilities",
            "",
            f"`upref audit {name} --logprobs`:",
            "",
            logprobs.field_logprobs(name),
        ]
    out += ["", "## What differs", ""] if entries else ["", "Nothing differs.", ""]
    out += (
        [f"Searched before anything was called a bug: {entries[0].searched}.", ""]
        if entries
        else []
    )
    for e in sort_by_severity(entries):
        out += _entry(name, e)
    return "\n".join(out).rstrip() + "\n"


def _because(
    r: dict[str, Any], words: str, spot: dict[str, Any], entries: list[Entry]
) -> str:
    seen = f" [{_moved(spot)}]" if spot["difference"] else ""
    e = entry(r, words, entries)
    return (
        f"{words}{seen} ({f'[{e.status}](#{e.key})' if e else 'not recorded'})".replace(
            "|", "\\|"
        )
    )


def entry(r: dict[str, Any], words: str, entries: list[Entry]) -> Entry | None:
    """The entry that records this reason of this row."""
    at = (r["label"], r["promise"], r["micro_batches"])
    mine = (e for e in entries if e.reason == words)
    return next(
        (
            e
            for e in mine
            if at in {(x.loss, x.held_against, x.micro_batches) for x in e.evidence}
        ),
        None,
    )


def _moved(spot: dict[str, Any]) -> str:
    # "nan" is a string
    return (
        f"{spot['where']}: {float(spot['expected']):.4g} -> {float(spot['found']):.4g}"
    )


def _code(label: str) -> str:
    return f"`{label}`"


def _entry(name: str, e: Entry) -> list[str]:
    out = [
        f"### {e.key}",
        "",
        f"*{e.status}*, {e.severity} ({e.size}): {e.reason}.",
        "",
    ]
    found = f"* Found: {e.code}."
    if e.line:
        found += f" [The line]({e.at})"
    out += [f"* Promised ({e.bib}): {e.paper}.", found]
    if e.words:
        out.append(f'* Told: "{e.words}" ([here]({e.link})).')
    if e.thread:
        out.append(f"* Thread: {e.thread}")
    if e.fixed:
        out.append(f"* Fixed in: {e.fixed}.")
    if e.fix:
        out.append(f"* A fix: {e.fix}.")
    out += [f"* As an issue: `upref audit {name} --report {e.key}`", ""]
    if e.proof:
        out += [
            "```text",
            e.proof.strip(),
            "",
            f"# prints: {' '.join(e.prints.split())}",
            "```",
            "",
        ]
    return out


# ---- the tables of all ---------------------------------------------------------------
def first() -> str:
    """The entries that a user should read first, the most severe first."""
    every = read()
    out = [
        "| framework | you ask for | you get | do this | thread | fixed in |",
        "|---|---|---|---|---|---|",
    ]
    for e in sort_by_severity([e for e in every if e.ask]):
        same = of_row(e, every)
        threads = dict.fromkeys(x.thread for x in same if x.thread)
        reported = ", ".join(f"[{_short(thread)}]({thread})" for thread in threads)
        fixed = "; ".join(
            dict.fromkeys(f"{x.framework}: {x.fixed}" for x in same if x.fixed)
        )
        cells = [
            ", ".join(link(x.framework) for x in same),
            e.ask,
            f"{e.get} ({_status(same)})",
            e.do,
        ]
        cells += [reported or "no thread known", fixed or "no repair known"]
        out.append("| " + " | ".join(cells).replace("\n", " ") + " |")
    return "\n".join(out)


def of_row(e: Entry, every: list[Entry]) -> list[Entry]:
    """The entries of whose frameworks a row of `first` speaks: this one, and those that
    it names.
    """
    frameworks = {e.framework, *e.also.split()}
    return [x for x in every if x.reason == e.reason and x.framework in frameworks]


def _status(same: list[Entry]) -> str:
    """The severity and the status of a row, and which frameworks document it where not
    all do.
    """
    words = f"**{same[0].severity}**, {same[0].status}"
    told = [x.framework for x in same if x.words]
    return (
        f"{words}; documented by {', '.join(told)}"
        if told and len(told) < len(same)
        else words
    )


def link(name: str) -> str:
    return f"[{name}](frameworks/{name}.json)"  # in the site, its page


def _short(thread: str) -> str:
    owner, repo, _, number = thread.removeprefix("https://github.com/").split("/")[:4]
    return f"{owner}/{repo}#{number}"


def summary() -> str:
    """A row a framework."""
    out = [
        "| framework | version | audited | losses | bugs | surprising defaults | documented choices | numerical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for a in audits():
        modes = len({r["mode"] for r in a["rows"] if r["kind"] == "loss"})
        entries = read(a["framework"])
        many = {s: str(sum(e.status == s for e in entries)) for s in STATUS}
        if told := count_documented(entries):
            many["surprising default"] += f" ({told} told)"
        count = " | ".join(many.values())
        out.append(
            f"| {link(a['framework'])} | {snapshot(a)} | {a['date']} | {modes} | {count} |"
        )
    return "\n".join(out)


def objectives() -> str:
    """Objective x framework."""
    every = audits()
    known = {r["objective"] for a in every for r in a["rows"] if r["kind"] == "loss"}
    out = [
        "| | " + " | ".join(link(a["framework"]) for a in every) + " |",
        "|---" * (len(every) + 1) + "|",
    ]
    for o in (n for n in names() if n in known):
        out.append(f"| `{o}` | " + " | ".join(sign(a, o) for a in every) + " |")
    return "\n".join(out)


SPLIT = "†"  # in micro-batches more differs


def sign(a: dict[str, Any], objective: str) -> str:
    """ok, set, near, no; empty where it is absent; with SPLIT where micro-batches leave
    more.
    """
    rows = [
        r
        for r in a["rows"]
        if r["objective"] == objective and r["kind"] == "loss" and r["ok"]
    ]
    whole = [r for r in rows if r["micro_batches"] == 1]
    if not whole:
        return ""
    entries, how = read(a["framework"]), read_tables(a["framework"])["recipe"]
    # where a KL term is on by default beside the loss, the recipe switches it off
    shipped = [
        r for r in whole if r["setting"] == "default" and not no_kl(how, r["mode"])
    ]
    least = min(left(r, entries) for r in whole)
    mark = (
        "ok"
        if any(left(r, entries) == 0 for r in shipped)
        else {0: "set", 1: "near", 2: "no"}[least]
    )
    split = any(r["micro_batches"] > 1 and r["promise"] == objective for r in rows)
    return mark + SPLIT if split else mark


def left(r: dict[str, Any], entries: list[Entry]) -> int:
    """What a row leaves: 0 nothing but what is numerical or the batch's denominator, 1
    little or a factor, 2 more.
    """
    most = 0
    for (words, _), effect in zip(r["reasons"], r["effects"], strict=True):
        e = entry(r, words, entries)
        if words == GROUPS.words or (e and e.status == "numerical"):
            continue
        size = FaultEffect(
            *(float(effect[k]) for k in ("change", "cosine", "factor"))
        ).severity
        most = max(most, 1 if size in ("cosmetic", "rescales") else 2)
    return most


def recipes() -> str:
    """For each objective that a framework has, what to set in each framework."""
    out = []
    for o in names():
        each = [recipe(o, n) for n in frameworks() if o in covered_objectives(n, {})]
        if each:
            kind, formula = get(o).adv, each[0].advantages.partition(":")[0]
            out += [
                f"### {o}",
                "",
                f"Advantages: `{kind}`{formula.removeprefix(kind)}.",
                "",
            ]
            out += [
                "| framework | set | advantages | what still differs, and notes |",
                "|---|---|---|---|",
            ]
            for r in each:
                set_ = (
                    "<br>".join(f"`{line}`" for line in r.settings)
                    or "nothing: the defaults"
                )
                advantages = r.advantages.removeprefix(f"{formula}: ")
                differs = "<br>".join(
                    [*(r.differs or ["nothing"]), *(f"*{note}*" for note in r.notes)]
                )
                out.append(
                    f"| {link(r.framework)} {r.version} | {set_} | {advantages} | {differs} |"
                )
            out.append("")
    return "\n".join(out)


def surfaces() -> str:
    """Where the settings of each framework are typed, what has taken them, and its
    parts beside the loss.
    """
    out = [
        "| framework | where to put the lines | the lines | dynamic sampling | overlong shaping |",
        "|---|---|---|---|---|",
    ]
    for n in frameworks():
        how, started = (
            read_tables(n)["recipe"],
            recipe(covered_objectives(n, {})[0], n).started,
        )
        out.append(
            "| "
            + " | ".join([link(n), how["surface"], started, *how["beside"].values()])
            + " |"
        )
    return "\n".join(out)


def statuses() -> str:
    out = [f"* *{status}*: {says}." for status, says in STATUS.items()]
    return "\n".join(
        [*out, "", *(f"* *{severity}*: {says}." for severity, says in SEVERITY.items())]
    )


def trainers() -> str:
    """upref/trainers.toml: for each objective the frameworks whose audits compare a
    loss with it.
    """
    found: dict[str, list[str]] = {}
    for a in audits():
        for objective in {r["objective"] for r in a["rows"] if r["kind"] == "loss"}:
            found.setdefault(objective, []).append(a["framework"])
    rows = [
        f"{objective} = {json.dumps(sorted(found[objective]))}"
        for objective in sorted(found)
    ]
    return "\n".join([*TRAINERS_HEAD, *rows]) + "\n"


def main(*asked: str):
    from upref_frameworks.audits import audit

    for name in asked:
        file = FOLDER / f"{name}.json"
        write_atomically(file, audit(name).json() + "\n")
        print(file)
    write_atomically(TRAINERS, trainers())


if __name__ == "__main__":
    main(*sys.argv[1:])
