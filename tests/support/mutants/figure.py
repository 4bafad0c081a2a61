# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""The figure: the results of the run, as a page; and what the checker misjudged (the
*survivors*), as a table that must not grow.
"""

import collections
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

import upref
from upref import markdown
from upref.verify.report import UNKNOWN

from . import run
from .losses import store_of, wrong
from .store import searcher

HERE = Path(__file__).parent
SURVIVORS = HERE / "survivors.tsv"
NAMED = 80  # mutants that identify is asked about, and half as many rewritings
# a row of docs/what-check-sees.md; the search asks |log s| up to 18
HABIT = "log s of a response clamped at 10, or NaN where exp(log r) overflows float64"
COLUMNS = ("id", "kind", "config", "style", "operator", "what", "said", "reason")


def write(plan: run.Draw, name: str = "figure.md") -> None:
    """Write the page of that name; beside figure.md the survivors too.

    Args:
        plan: what the run consists of.
        name: of the file: another one for a sample, which leaves the whole run's.
    """
    rows = list(run.rows(plan, known=True))
    (HERE / name).write_text(page(plan, rows, name))
    if name != "figure.md":
        return
    kept = {row["id"]: row.get("reason", "") for row in survivors()}
    bad = sorted(
        (r for r in rows if misjudged(r)), key=lambda r: (r["config"], r["id"])
    )
    lines = ["\t".join(COLUMNS)]
    for r in bad:
        r |= {"kind": misjudged(r), "reason": kept.get(r["id"], "")}
        cells = [r[k] for k in COLUMNS]
        lines.append("\t".join(" ".join(str(c).split()) for c in cells))
    SURVIVORS.write_text("\n".join(lines) + "\n")


def habit(row: dict[str, Any]) -> bool:
    """Return whether a loss differs only by a habit that the checker is to accept.

    These are an overflow of exp(log r), and log r clamped to [-10, 10] in an objective
    whose ratio is a mean over the response.
    """
    if row.get("overflow"):
        return True
    clamped = row.get("operator") == "clamp" and row["what"].endswith(
        "-> torch.clamp((lp) - (old), -10, 10)"
    )
    return (
        clamped
        and row["truth"] == "differs"
        and upref.get(row["objective"]).level == "sequence_mean"
    )


def misjudged(row: dict[str, Any]) -> str:
    """Return "missed" (a wrong loss was accepted), "alarm" (a right one was rejected),
    or "".

    A rewriting that changed the meaning is never misjudged. A loss that differs by a
    habit is an alarm if it was rejected.
    """
    if row.get("operator") == "rewriting" and row["truth"] == "differs":
        return ""
    return ("" if row["quick"] else "alarm") if habit(row) else wrong(row)


def survivors() -> list[dict[str, str]]:
    """Read survivors.tsv as rows by column name; return [] if there is no such file."""
    if not SURVIVORS.exists():
        return []
    head, *lines = SURVIVORS.read_text().splitlines()
    return [
        dict(zip(head.split("\t"), line.split("\t"), strict=False)) for line in lines
    ]


def of_truth(rows: list[dict[str, Any]], truth: str) -> list[dict[str, Any]]:
    """Return the rows of this truth, such as "equal"."""
    return [row for row in rows if row["truth"] == truth]


def count(rows: list[dict[str, Any]], accepted: bool) -> int:
    """Count the rows that the quick check accepts, or those that it rejects."""
    return sum(row.get("quick") is accepted for row in rows)


def page(plan: run.Draw, rows: list[dict[str, Any]], name: str = "figure.md") -> str:
    """Return the page in markdown: the counts, the slips that were rejected, and what
    was named wrongly.

    Args:
        plan: what the run consists of.
        rows: one for each loss, as `run.rows` yields them.
        name: of the page. On any other than figure.md the losses that were misjudged
            are listed one by one.
    """
    ending = "`--write`" if name == "figure.md" else f"`--write --page {name}`"
    new = [r for r in rows if r.get("operator") == "rewriting"]
    old = [r for r in rows if r.get("operator") != "rewriting"]
    habits = [r for r in rows if habit(r)]
    differ = [r for r in of_truth(old, "differs") if r not in habits]
    equal = of_truth(old, "equal")
    same = of_truth(new, "equal")
    whole = [r for r in rows if "accepted" in r]
    agree = sum(r["accepted"] == r["quick"] for r in whole)
    no = [r for r in whole if not r["accepted"]]
    caused = [r for r in no if r["true"]]
    printed = [r for r in no if r["cause"] and not r["cause"].startswith(UNKNOWN)]
    who = list(store_of(plan.scratch, "named").known.values())
    spent = sorted(r["seconds"] for r in whole) or [0.0]
    kinds = collections.Counter(r["operator"] for r in differ)
    slips = [
        [k, f"{count([r for r in differ if r['operator'] == k], False)} of {c}"]
        for k, c in sorted(kinds.items())
    ]
    ran = {r["objective"] for r in old if r["truth"] not in ("stillborn", "unsearched")}
    named = {r["objective"] for r in old if "objective" in r}
    silent = ", ".join(sorted(named - ran))
    unwritten = (
        f" No mutant of {silent} ran: no style writes a weight that depends on a group."
        if silent
        else ""
    )
    by = collections.Counter(r["library"] for r in rows if "library" in r)
    judges = ", ".join(f"{k} ({v:,} verdicts)" for k, v in by.most_common())
    tokens = max((r.get("tokens", 0) for r in equal), default=0)
    searched = "The whole search has not been reached: the mutants that do not differ are of estimators."
    if tokens:
        searched = f"A mutant is called equal to its objective only after the whole search, of up to {tokens:,} tokens."
    title, sample = "# How often the checker is right", []
    misjudged_words = "What was misjudged, each with its reason, is in [survivors.tsv](survivors.tsv)."
    if name != "figure.md":
        title += ", on a sample of mutants"
        misjudged_words, sample = "What was misjudged is listed first.", rows
    counted = [
        [
            "mutants that differ, rejected",
            f"{count(differ, False)} of {len(differ)}",
        ],
        [
            f"mutants that differ by a habit that the table notes alone ({HABIT}), accepted",
            f"{count(habits, True)} of {len(habits)}",
        ],
        [
            "mutants that do not, accepted",
            f"{count(equal, True)} of {len(equal)}",
        ],
        [
            "rewritings, accepted",
            f"{count(same, True)} of {len(same)}",
        ],
        [
            "rejections with the whole report (every tenth mutant) that print more than that no known cause fits",
            f"{len(printed)} of {len(no)}",
        ],
        [
            "of these, causes that are a change of the objective; put into it, they have the loss's gradient on the search's batches",
            f"{sum(r['true'] == 'yes' for r in caused)} of {len(caused)}",
        ],
        [
            "identify, of rewritings: the objective is named, or one of the same gradient",
            f"{sum(r['right'] for r in of_truth(who, 'equal'))} of {len(of_truth(who, 'equal'))}",
        ],
        [
            "identify, of mutants that differ: not the objective's name, and a name that is given holds in check",
            f"{sum(r['right'] for r in of_truth(who, 'differs'))} of {len(of_truth(who, 'differs'))}",
        ],
        [
            "verdict up to the first failure the same as the whole report's",
            f"{agree} of {len(whole)}",
        ],
        [
            "CPU seconds of a whole report: median, slowest",
            f"{statistics.median(spent):.2f}, {spent[-1]:.2f}",
        ],
    ]
    return "\n".join([
        title,
        "",
        f"`python -m tests.support.mutants --mutants {plan.mutants} --rewritings {plan.rewritings} --seed {plan.seed}`, then",
        f"{ending}. Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread, the machine",
        f"shared with other work; the search {searcher()}; judged by the library",
        f"{judges}; a loss that one version misjudged was given to the next.",
        "",
        markdown.table(["", ""], counted),
        "",
        "The objectives are those of the library named above." if len(by) == 1 else
        "The objectives are those of the library that judged most.",
        f"{len(rows):,} losses have an answer" + ("; the same command goes on." if len(rows) < plan.mutants + plan.rewritings else "."),
        "",
        f"Not judged: {len(of_truth(old, 'stillborn'))} mutants that run on no batch, {len(of_truth(rows, 'unclear'))} between the two",
        f"tolerances (2e-6 and 2e-5), {len(of_truth(old, 'unsearched'))} that {run.FIRST} small batches do not tell apart and that were",
        f"not drawn for the whole search. {searched}{unwritten}",
        f"{len(of_truth(new, 'differs')) + len(of_truth(new, 'stillborn'))} rewritings were dropped because they do not keep the meaning.",
        f"Of those accepted or not, {sum('compiled' in r['what'] for r in same)} run under torch.compile: {sum('inductor' in r['what'] for r in same)} by inductor, which takes half a minute of CPU for one, the others by aot_eager.",
        "The other words that are printed, as that every weight is twice what it should be, say what the numbers are, of the batch shown.",
        "",
        markdown.table(["slip", "rejected"], slips),
        "",
        f"{misjudged_words} What was named wrongly, or had a false cause:",
        "",
        *(f"* {misjudged(r)}: {r['config']} as {r['style']}, `{r['what']}`: {r['said']}" for r in sample if misjudged(r)),
        *(f"* identify: {r['config']} as {r['style']}, `{r['what']}`: {r['said']}" for r in who if not r["right"]),
        *(f"* cause: {r['config']} as {r['style']}, `{r['what']}`: {r['cause']}" for r in caused if r["true"] == "no"),
        "",
    ])  # fmt: skip
