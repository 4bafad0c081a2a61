# SPDX-License-Identifier: Apache-2.0
"""What the frameworks compute, as pages: `python -m docs.framework_pages NAME...` audits these
and writes NAME.json, as `upref audit NAME --json` prints it, into docs/frameworks.
docs.make makes the tables of docs/frameworks.md from these files and the ledgers, and
docs.site a page for each framework.

An audit is one of these files. Each of its `rows` compares one function of the framework
with what it should be:

    label, setting, mode   the function and its setting in print; "default", "paper" or another
    kind                   "loss", "advantages", "kl", "value", ...
    objective, promise     what it is compared with; with its hyperparameters
    micro_batches          into how many the batch was split
    difference, tol        the largest difference of a gradient, and what rounding allows
    reasons                a cause in words, and the token ("spot") where it differs most
    effects                of each reason, how much of the gradient changes
    ok                     whether every difference has a known cause

The ledger of a framework has an entry for each reason, with status and severity.
"""

import json
import sys
from pathlib import Path
from typing import Any

from docs import logprobs, record
from upref import markdown
from upref.catalog import TRAINERS
from upref.files import write_atomically
from upref.registry import get, names
from upref.verify.faults.losses import GROUPS
from upref_frameworks import names as frameworks
from upref_frameworks.audits import framework
from upref_frameworks.audits.compare import FaultEffect
from upref_frameworks.audits.recipe import Recipe, covered_objectives, no_kl, recipe
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


def audits() -> list[dict[str, Any]]:
    """Return the committed audits, sorted by the name of the framework."""
    return [record.rows(file) for file in sorted(FOLDER.glob("*.json"))]


def snapshot(audit: dict[str, Any]) -> str:
    """Return the version that was audited; of a commit its date too."""
    pin = framework(audit["framework"]).pin
    version = audit["version"]
    if pin and pin.date and pin.version == version:
        return f"{version} of {pin.date}"
    return version


# ---- a page a framework --------------------------------------------------------------
def pages() -> dict[str, str]:
    """Return the page of each framework, by its name in the site."""
    return {
        f"frameworks/{audit['framework']}": page(audit, read(audit["framework"]))
        for audit in audits()
    }


def page(audit: dict[str, Any], entries: list[Entry]) -> str:
    """Return the page of a framework, in Markdown.

    Args:
        audit: the committed audit.
        entries: the ledger of the framework.
    """
    name = audit["framework"]
    out = [*_introduction(audit), *_rows(audit, entries), "", *_remarks(audit)]
    if name in record.rows(logprobs.FILE):
        out += [
            "",
            "## Log-probabilities",
            "",
            f"`upref audit {name} --logprobs`:",
            "",
            logprobs.field_logprobs(name),
        ]
    if not entries:
        return "\n".join([*out, "", "Nothing differs."]) + "\n"
    searched = f"Searched before anything was called a bug: {entries[0].searched}."
    out += ["", "## What differs", "", searched, ""]
    for e in sort_by_severity(entries):
        out += _entry(name, e)
    return "\n".join(out).rstrip() + "\n"


def _introduction(audit: dict[str, Any]) -> list[str]:
    """Return the heading, and what was done."""
    name = audit["framework"]
    known = ": each difference has a known cause" if audit["ok"] else ""
    return [
        f"# {name} {snapshot(audit)}",
        "",
        f"`upref audit {name}` called the losses of {name}, unmodified, with each setting in the",
        "first column, and compared their gradients with an objective's. The last column has the",
        "causes of a difference, and in brackets where it is largest: the sign of the advantage A,",
        "the ratio r or s, and the expected and the found weight.",
        f"On {audit['date']} it ended with exit status {int(not audit['ok'])}{known}.",
        "[What to set](../recipes.md), and [what the words mean](../frameworks.md#all-of-them).",
        "",
    ]


def _rows(audit: dict[str, Any], entries: list[Entry]) -> list[str]:
    """Return the table of the losses, with the reasons of each difference."""
    columns = ["what", "compared with", "verdict"]
    columns.append("what differs [where: weight expected -> found]")
    rows = []
    for row in audit["rows"]:
        reasons = "; ".join(
            _reason(row, words, spot, entries) for words, spot in row["reasons"]
        )
        what = _code(row["label"])
        if row["micro_batches"] > 1:
            what += f", in {row['micro_batches']} micro-batches"
        rows.append([what, row["promise"], row["verdict"], reasons])
    return [markdown.table(columns, rows)]


def _remarks(audit: dict[str, Any]) -> list[str]:
    """Return what the audit says beside the rows."""
    out = [f"* {line}" for line in audit["remarks"]]
    for mode, why in audit["out_of_scope"].items():
        out.append(f"* Not audited: `{mode}`: {why}.")
    if audit["unaudited"]:
        out.append(f"* Unknown to this audit: {', '.join(audit['unaudited'])}.")
    if audit["nan_in_padding"]:
        labels = ", ".join(map(_code, audit["nan_in_padding"]))
        out.append(f"* The loss is NaN where a masked slot holds NaN: {labels}.")
    return out


def _reason(
    row: dict[str, Any], words: str, spot: dict[str, Any], entries: list[Entry]
) -> str:
    """Return one reason of a row: in words, where its difference is largest, and a link
    to the entry that records it.

    Args:
        row: the row of the audit.
        words: the reason.
        spot: the token with the largest difference of this reason.
        entries: the ledger of the framework.
    """
    text = words
    if spot["difference"]:
        text += f" [{_largest_difference(spot)}]"
    e = entry(row, words, entries)
    text += f" ([{e.status}](#{e.key}))" if e else " (not recorded)"
    return text.replace("|", "\\|")


def entry(row: dict[str, Any], words: str, entries: list[Entry]) -> Entry | None:
    """Return the entry of the ledger that records this reason of this row, None if
    there is none.

    Args:
        row: of an audit.
        words: the reason.
        entries: the ledger of the framework.
    """
    key = (row["label"], row["promise"], row["micro_batches"])
    for e in entries:
        keys = {(x.loss, x.held_against, x.micro_batches) for x in e.evidence}
        if e.reason == words and key in keys:
            return e
    return None


def _largest_difference(spot: dict[str, Any]) -> str:
    """Return where it is, and the expected and the found weight."""
    # JSON has no NaN: it is the text "nan"
    expected, measured = float(spot["expected"]), float(spot["found"])
    return f"{spot['where']}: {expected:.4g} -> {measured:.4g}"


def _code(label: str) -> str:
    """Return it as code in Markdown."""
    return f"`{label}`"


def _entry(name: str, e: Entry) -> list[str]:
    """Return the lines of one entry of the ledger.

    Args:
        name: the framework.
        e: the entry.
    """
    out = [
        f"### {e.key}",
        "",
        f"*{e.status}*, {e.severity} ({e.size}): {e.reason}.",
        "",
    ]
    code = f"* Found: {e.code}."
    if e.line:
        code += f" [The line]({e.at})"
    out += [f"* Promised ({e.bib}): {e.paper}.", code]
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
    """Return the table of the entries that a user should read first (those with `ask`),
    the most severe first.
    """
    every = read()
    rows = []
    for e in sort_by_severity([e for e in every if e.ask]):
        same = of_row(e, every)
        threads, repairs = _threads_and_repairs(same)
        cells = [
            ", ".join(link(x.framework) for x in same),
            e.ask,
            f"{e.get} ({_status(same)})",
            e.do,
            ", ".join(threads) or "no thread known",
            "; ".join(repairs) or "no repair known",
        ]
        rows.append([cell.replace("\n", " ") for cell in cells])
    columns = ["framework", "you ask for", "you get", "do this", "thread", "fixed in"]
    return markdown.table(columns, rows)


def _threads_and_repairs(same: list[Entry]) -> tuple[list[str], list[str]]:
    """Return the threads of the entries of a row as links, and their repairs in words,
    each once.
    """
    threads: dict[str, None] = {}
    repairs: dict[str, None] = {}
    for entry in same:
        if entry.thread:
            threads[f"[{_short(entry.thread)}]({entry.thread})"] = None
        if entry.fixed:
            repairs[f"{entry.framework}: {entry.fixed}"] = None
    return list(threads), list(repairs)


def of_row(e: Entry, every: list[Entry]) -> list[Entry]:
    """Return the entries that a row of `first` is about: those of this reason of its
    framework and of the frameworks that `also` names.
    """
    frameworks = {e.framework, *e.also.split()}
    return [x for x in every if x.reason == e.reason and x.framework in frameworks]


def _status(same: list[Entry]) -> str:
    """Return the severity and the status of the first entry of a row, and which
    frameworks document it, where some do not or it is a surprise all the same.
    """
    status = f"**{same[0].severity}**, {same[0].status}"
    documented = [x.framework for x in same if x.words]
    is_surprising = same[0].status == "surprising default"
    if documented and (len(documented) < len(same) or is_surprising):
        status += f"; documented by {', '.join(documented)}"
    return status


def link(name: str) -> str:
    """Return a link to the audit of a framework; in the site, to its page."""
    return f"[{name}](frameworks/{name}.json)"


def _short(thread: str) -> str:
    """Return OWNER/REPOSITORY#NUMBER of the address of a thread on GitHub."""
    owner, repo, _, number = thread.removeprefix("https://github.com/").split("/")[:4]
    return f"{owner}/{repo}#{number}"


def summary() -> str:
    """Return a table with one row per framework: how many entries of each status."""
    columns = ["framework", "version", "audited", "losses", "bugs"]
    columns += ["surprising defaults", "documented choices", "numerical"]
    rows = []
    for audit in audits():
        modes = {row["mode"] for row in loss_rows(audit)}
        entries = read(audit["framework"])
        ends = [e.status for e in entries]
        counts = {status: str(ends.count(status)) for status in STATUS}
        if documented := count_documented(entries):
            counts["surprising default"] += f" ({documented} told)"
        cells = [
            link(audit["framework"]),
            snapshot(audit),
            audit["date"],
            len(modes),
            *counts.values(),
        ]
        rows.append(cells)
    return markdown.table(columns, rows)


def loss_rows(audit: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an audit that are of a loss."""
    return [row for row in audit["rows"] if row["kind"] == "loss"]


def objectives() -> str:
    """Return a table with one row per objective and one column per framework."""
    every = audits()
    audited = {row["objective"] for audit in every for row in loss_rows(audit)}
    rows = []
    for objective in names():
        if objective in audited:
            signs = [sign(audit, objective) for audit in every]
            rows.append([f"`{objective}`", *signs])
    return markdown.table(["", *(link(audit["framework"]) for audit in every)], rows)


SPLIT = "†"  # in micro-batches more differs


def sign(audit: dict[str, Any], objective: str) -> str:
    """Return how close a framework comes to an objective.

    Returns:
        `ok` with the defaults, `set` with settings, `near`, `no`, or nothing where the
        framework has no such loss; with SPLIT where micro-batches leave more.
    """
    rows = [
        row for row in loss_rows(audit) if row["objective"] == objective and row["ok"]
    ]
    whole = [row for row in rows if row["micro_batches"] == 1]
    if not whole:
        return ""
    mark = _sign_of_whole_batch(whole, audit["framework"])
    for row in rows:
        if row["micro_batches"] > 1 and row["promise"] == objective:
            return mark + SPLIT
    return mark


def _sign_of_whole_batch(rows: list[dict[str, Any]], name: str) -> str:
    """Return `ok`, `set`, `near` or `no` for the losses of a framework that are compared
    with one objective, on a batch that is not split.
    """
    entries, settings = read(name), read_tables(name)["recipe"]
    for row in rows:
        # the recipe must switch off a KL term beside the loss: that is a setting
        is_shipped = row["setting"] == "default" and not no_kl(settings, row["mode"])
        if is_shipped and remaining(row, entries) == 0:
            return "ok"
    least = min(remaining(row, entries) for row in rows)
    return {0: "set", 1: "near", 2: "no"}[least]


def remaining(row: dict[str, Any], entries: list[Entry]) -> int:
    """Return how much a row differs from its objective.

    Returns:
        0: by nothing but what is numerical or the batch's denominator; 1: by little or
        by a factor; 2: by more.
    """
    most = 0
    for (words, _), effect in zip(row["reasons"], row["effects"], strict=True):
        e = entry(row, words, entries)
        is_numerical = e is not None and e.status == "numerical"
        if is_numerical or words == GROUPS.words:
            continue
        numbers = (float(effect[key]) for key in ("change", "cosine", "factor"))
        is_small = FaultEffect(*numbers).severity in ("cosmetic", "rescales")
        most = max(most, 1 if is_small else 2)
    return most


def recipes() -> str:
    """Return for each objective that a framework has a table of what to set in each
    framework.
    """
    out = []
    for objective in names():
        each = [
            recipe(objective, name)
            for name in frameworks()
            if objective in covered_objectives(name, {})
        ]
        if each:
            out += [*_recipes_of(objective, each), ""]
    return "\n".join(out)


def _recipes_of(objective: str, each: list[Recipe]) -> list[str]:
    """Return the section of an objective, with a row for the recipe of each framework."""
    kind = get(objective).adv
    formula = each[0].advantages.partition(":")[0]  # it begins with the kind
    out = [
        f"### {objective}",
        "",
        f"Advantages: `{kind}`{formula.removeprefix(kind)}.",
        "",
    ]
    columns = ["framework", "set", "advantages", "what still differs, and notes"]
    rows = []
    for r in each:
        settings = "<br>".join(f"`{line}`" for line in r.settings)
        notes = [f"*{note}*" for note in r.notes]
        cells = (
            f"{link(r.framework)} {r.version}",
            settings or "nothing: the defaults",
            r.advantages.removeprefix(f"{formula}: "),
            "<br>".join([*(r.differs or ["nothing"]), *notes]),
        )
        rows.append(cells)
    return [*out, markdown.table(columns, rows)]


def surfaces() -> str:
    """Return the table of where the settings of each framework are typed, what has
    taken them, and its parts beside the loss.
    """
    columns = ["framework", "where to put the lines", "the lines"]
    columns += ["dynamic sampling", "overlong shaping"]
    rows = []
    for name in frameworks():
        table = read_tables(name)["recipe"]
        started = recipe(covered_objectives(name, {})[0], name).started
        rows.append([link(name), table["surface"], started, *table["beside"].values()])
    return markdown.table(columns, rows)


def statuses() -> str:
    """Return what each status and each severity means."""
    statuses = [f"* *{status}*: {words}." for status, words in STATUS.items()]
    severities = [f"* *{severity}*: {words}." for severity, words in SEVERITY.items()]
    return "\n".join([*statuses, "", *severities])


def trainers() -> str:
    """Return the text of upref/trainers.toml: objective -> the frameworks whose audits
    compare a loss with it.
    """
    trainers_of: dict[str, list[str]] = {}
    for audit in audits():
        for objective in {row["objective"] for row in loss_rows(audit)}:
            trainers_of.setdefault(objective, []).append(audit["framework"])
    rows = [
        f"{objective} = {json.dumps(sorted(trainers_of[objective]))}"
        for objective in sorted(trainers_of)
    ]
    return "\n".join([*TRAINERS_HEAD, *rows]) + "\n"


def main(*frameworks: str) -> None:
    """Audit the frameworks and record the audits; print their files. Then write which
    objectives all committed audits compare with.
    """
    from upref_frameworks.audits import audit

    for name in frameworks:
        file = FOLDER / f"{name}.json"
        record.add(file, f"upref audit {name} --json", json.loads(audit(name).json()))
        print(file)
    write_atomically(TRAINERS, trainers())


if __name__ == "__main__":
    main(*sys.argv[1:])
