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
    # the reasons are written by hand
    reasons = {row["id"]: row.get("reason", "") for row in survivors()}
    bad = [row for row in rows if misjudged(row)]
    lines = ["\t".join(COLUMNS)]
    for row in sorted(bad, key=lambda row: (row["config"], row["id"])):
        row |= {"kind": misjudged(row), "reason": reasons.get(row["id"], "")}
        # a cell has no tab and no end of a line
        cells = [" ".join(str(row[column]).split()) for column in COLUMNS]
        lines.append("\t".join(cells))
    SURVIVORS.write_text("\n".join(lines) + "\n")


def habit(row: dict[str, Any]) -> bool:
    """Return whether a loss differs only by a habit that the checker is to accept.

    These are an overflow of exp(log r), and log r clamped to [-10, 10] in an objective
    whose ratio is a mean over the response.
    """
    if row.get("overflow"):
        return True
    if row.get("operator") != "clamp" or row["truth"] != "differs":
        return False
    if not row["what"].endswith("-> torch.clamp((lp) - (old), -10, 10)"):
        return False
    return upref.get(row["objective"]).level == "sequence_mean"


def misjudged(row: dict[str, Any]) -> str:
    """Return "missed" (a wrong loss was accepted), "alarm" (a right one was rejected),
    or "".

    A rewriting that changed the meaning is never misjudged. A loss that differs by a
    habit is an alarm if it was rejected.
    """
    if row.get("operator") == "rewriting" and row["truth"] == "differs":
        return ""
    if habit(row):
        return "" if row["quick"] else "alarm"
    return wrong(row)


def survivors() -> list[dict[str, str]]:
    """Read survivors.tsv as rows by column name; return [] if there is no such file."""
    if not SURVIVORS.exists():
        return []
    head, *lines = SURVIVORS.read_text().splitlines()
    columns = head.split("\t")
    return [dict(zip(columns, line.split("\t"), strict=False)) for line in lines]


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
    new = [r for r in rows if r.get("operator") == "rewriting"]
    old = [r for r in rows if r.get("operator") != "rewriting"]
    habits = [r for r in rows if habit(r)]
    differ = [r for r in of_truth(old, "differs") if r not in habits]
    same = of_truth(new, "equal")
    named = list(store_of(plan.scratch, "named").known.values())
    reported = [r for r in rows if "accepted" in r]
    rejected = [r for r in reported if not r["accepted"]]
    # the causes that are a change of the objective
    caused = [r for r in rejected if r["true"]]
    counted = [
        *_counts_of_verdicts(old, same, differ, habits),
        *_counts_of_causes(rejected, caused),
        *_counts_of_names(named),
        *_counts_of_reports(reported),
    ]
    if name == "figure.md":
        ending = "`--write`"
        title = "# How often the checker is right"
        misjudged_words = "What was misjudged, each with its reason, is in [survivors.tsv](survivors.tsv)."
        sample = []
    else:
        ending = f"`--write --page {name}`"
        title = "# How often the checker is right, on a sample of mutants"
        misjudged_words = "What was misjudged is listed first."
        sample = [r for r in rows if misjudged(r)]
    verdicts = collections.Counter(r["library"] for r in rows if "library" in r)
    judges = ", ".join(f"{k} ({v:,} verdicts)" for k, v in verdicts.most_common())
    which = "named above" if len(verdicts) == 1 else "that judged most"
    goes_on = len(rows) < plan.mutants + plan.rewritings
    dropped = len(of_truth(new, "differs")) + len(of_truth(new, "stillborn"))
    compiled = sum("compiled" in r["what"] for r in same)
    by_inductor = sum("inductor" in r["what"] for r in same)
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
        f"The objectives are those of the library {which}.",
        f"{len(rows):,} losses have an answer{'; the same command goes on.' if goes_on else '.'}",
        "",
        f"Not judged: {len(of_truth(old, 'stillborn'))} mutants that run on no batch, {len(of_truth(rows, 'unclear'))} between the two",
        f"tolerances (2e-6 and 2e-5), {len(of_truth(old, 'unsearched'))} that {run.FIRST} small batches do not tell apart and that were",
        f"not drawn for the whole search. {_what_was_searched(old)}{_what_is_not_written(old)}",
        f"{dropped} rewritings were dropped because they do not keep the meaning.",
        f"Of those accepted or not, {compiled} run under torch.compile: {by_inductor} by inductor, which takes half a minute of CPU for one, the others by aot_eager.",
        "The other words that are printed, as that every weight is twice what it should be, say what the numbers are, of the batch shown.",
        "",
        markdown.table(["slip", "rejected"], _rejections_by_slip(differ)),
        "",
        f"{misjudged_words} What was named wrongly, or had a false cause:",
        "",
        *(f"* {misjudged(r)}: {_loss(r)}: {r['said']}" for r in sample),
        *(f"* identify: {_loss(r)}: {r['said']}" for r in named if not r["right"]),
        *(f"* cause: {_loss(r)}: {r['cause']}" for r in caused if r["true"] == "no"),
        "",
    ])  # fmt: skip


def _counts_of_verdicts(
    old: list[dict[str, Any]],
    same: list[dict[str, Any]],
    differ: list[dict[str, Any]],
    habits: list[dict[str, Any]],
) -> list[list[str]]:
    """Return rows [words, "count of all"]: how many losses are judged as they should be.

    Args:
        old: the mutants.
        same: the rewritings that keep the meaning.
        differ: the mutants that differ, without habits.
        habits: the losses that differ by a habit alone.
    """
    equal = of_truth(old, "equal")
    noted = f"mutants that differ by a habit that the table notes alone ({HABIT})"
    return [
        ["mutants that differ, rejected", f"{count(differ, False)} of {len(differ)}"],
        [f"{noted}, accepted", f"{count(habits, True)} of {len(habits)}"],
        ["mutants that do not, accepted", f"{count(equal, True)} of {len(equal)}"],
        ["rewritings, accepted", f"{count(same, True)} of {len(same)}"],
    ]


def _counts_of_causes(
    rejected: list[dict[str, Any]], caused: list[dict[str, Any]]
) -> list[list[str]]:
    """Return rows [words, "count of all"]: how many reports print a cause, and how many
    of these causes are true.

    Args:
        rejected: the losses that the whole report rejects.
        caused: those of them whose cause is a change of the objective.
    """
    causes = [r["cause"] for r in rejected]
    printed = [cause for cause in causes if cause and not cause.startswith(UNKNOWN)]
    true = [r for r in caused if r["true"] == "yes"]
    return [
        [
            "rejections with the whole report (every tenth mutant) that print more than that no known cause fits",
            f"{len(printed)} of {len(rejected)}",
        ],
        [
            "of these, causes that are a change of the objective; put into it, they have the loss's gradient on the search's batches",
            f"{len(true)} of {len(caused)}",
        ],
    ]


def _counts_of_names(named: list[dict[str, Any]]) -> list[list[str]]:
    """Return rows [words, "count of all"]: how many answers of identify are right."""
    equal, differ = of_truth(named, "equal"), of_truth(named, "differs")
    return [
        [
            "identify, of rewritings: the objective is named, or one of the same gradient",
            f"{sum(r['right'] for r in equal)} of {len(equal)}",
        ],
        [
            "identify, of mutants that differ: not the objective's name, and a name that is given holds in check",
            f"{sum(r['right'] for r in differ)} of {len(differ)}",
        ],
    ]


def _counts_of_reports(reported: list[dict[str, Any]]) -> list[list[str]]:
    """Return rows [words, number] of the losses with a whole report: how often it has
    the quick verdict, and its CPU seconds.
    """
    agree = sum(r["accepted"] == r["quick"] for r in reported)
    seconds = sorted(r["seconds"] for r in reported) or [0.0]
    return [
        [
            "verdict up to the first failure the same as the whole report's",
            f"{agree} of {len(reported)}",
        ],
        [
            "CPU seconds of a whole report: median, slowest",
            f"{statistics.median(seconds):.2f}, {seconds[-1]:.2f}",
        ],
    ]


def _rejections_by_slip(differ: list[dict[str, Any]]) -> list[list[str]]:
    """Return rows [kind of slip, "rejected of all"] of the mutants that differ."""
    out = []
    for kind in sorted({r["operator"] for r in differ}):
        of_kind = [r for r in differ if r["operator"] == kind]
        out.append([kind, f"{count(of_kind, False)} of {len(of_kind)}"])
    return out


def _what_was_searched(old: list[dict[str, Any]]) -> str:
    """Return the sentence that says how long the search is after which a mutant counts
    as equal.
    """
    tokens = max((r.get("tokens", 0) for r in of_truth(old, "equal")), default=0)
    if not tokens:
        return "The whole search has not been reached: the mutants that do not differ are of estimators."
    return f"A mutant is called equal to its objective only after the whole search, of up to {tokens:,} tokens."


def _what_is_not_written(old: list[dict[str, Any]]) -> str:
    """Return the sentence that names the objectives of which no mutant ran, or ""."""
    not_run = ("stillborn", "unsearched")
    ran = {r["objective"] for r in old if r["truth"] not in not_run}
    every = {r["objective"] for r in old if "objective" in r}
    silent = ", ".join(sorted(every - ran))
    if not silent:
        return ""
    return (
        f" No mutant of {silent} ran: no style writes a weight that depends on a group."
    )


def _loss(row: dict[str, Any]) -> str:
    """Return the words that identify the row's loss on the page."""
    return f"{row['config']} as {row['style']}, `{row['what']}`"
