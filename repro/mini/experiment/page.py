# SPDX-License-Identifier: Apache-2.0
"""What the runs of a plan say, on one page: report.md and its figures. It runs nothing.

A plan names the sections of its page: page = ["answer", "plane", ...], SECTIONS below.
Each section is a function of the plan, the records by name, the effects of the whole
plan and the folder of the page. It returns Markdown, or "" where it has nothing to say.
"""

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from figures.make import save
from repro.mini import files
from repro.mini.experiment import (
    answer,
    curves,
    frozen,
    records,
    registration,
    words,
)
from repro.mini.experiment.effects import Effect
from repro.mini.experiment.plan import Cell, Plan
from repro.mini.experiment.questions import RunRecord
from upref.markdown import table

ANSWERS = {
    "yes": "**Yes**: the first arm gains against each control.",
    "no": "**No**: against one control at least the first arm gives nothing more than the margins, or less.",
    "undecided": "**Undecided**: the intervals allow both.",
    "not finished": "**Not finished**: too few seeds for the first look.",
}
NOT_REGISTERED = """Nobody registered what is on this page: it was chosen after the runs were seen. An effect is the
mean over the bases, paired by seed, with a plain 95 % interval: no correction for many comparisons, and no verdict.
"""
Known = dict[str, RunRecord]  # name of a run -> record


def write(plan: Plan, known: Known, folder: Path) -> None:
    """Write the page and its figures into the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    found = plan.effects(known)
    parts = [f"# {plan.question}\n", head(plan, known)]
    for name in plan.page:
        text = SECTIONS[name](plan, known, found, folder)
        if text:
            parts.append(text)
    text = "\n".join(parts) + "\n"
    files.write_atomically(folder / plan.page_name, text.encode())


def head(plan: Plan, known: Known) -> str:
    """Return the first paragraphs: who wrote the page, the registration, and what is
    finished. A plan that reads other plans' runs was not registered, and the text says
    so.
    """
    written = f"Written by `{plan.command} --collect`."
    if plan.others:
        return f"{written} {NOT_REGISTERED}"
    hours = records.hours(plan.own_records(known))
    commit = registration.load(plan.results.parent).get("commit", "none yet")
    note = f"{plan.note.strip()}\n\n" if plan.note else ""
    return f"""{written} Rule, arms, rates, seeds, stopping and margins were registered in
commit `{commit}`, before any run.

{note}{plan.progress(known)}

The finished runs took {hours:.2f} hours of one core. Effects are means over the bases, with simultaneous intervals
(95 % for each family). The words follow from the intervals.
"""


# ---- sections ------------------------------------------------------------------------
def answered(plan: Plan, known: Known, found: Sequence[Effect], folder: Path) -> str:
    """Return the plan's own verdict, and the word against each control."""
    if not plan.answer:
        return ""
    lines = [f"## The answer\n\n{ANSWERS[answer.answer(plan, found)]}\n"]
    for control in plan.answer["controls"]:
        effects = answer.of_control(plan, found, control)
        first = effects[0].question.first
        word = answer.against(plan, found, control)
        if word == "not finished":
            lines.append(f"* {first} against {control}: not finished.")
            continue
        sizes = "; ".join(
            f"{words.shown(e)} {words.compared_at(e.question)}, margin {e.question.margin:g}"
            for e in effects
        )
        lines.append(f"* {first} against {control}: {word} ({sizes}).")
    return "\n".join(lines) + "\n"


def all_effects(plan: Plan, known: Known, found: Sequence[Effect], folder: Path) -> str:
    """Return a table of the effects of each family that has a finished seed."""
    text = "## Every effect\n\n"
    for family, effects in plan.by_family(found):
        there = [e for e in effects if e.n]
        if there:
            text += f"### {family.title}\n\n{_effects(plan, there)}\n\n"
    if "###" not in text:
        text += "No run of the experiment proper has finished on both sides of a comparison.\n"
    return text


def _effects(plan: Plan, effects: Sequence[Effect]) -> str:
    """Return a table with a row for each effect; its word only where the plan has
    looks, since a plain interval decides nothing.
    """
    columns = ["metric", "minus", "group", "seeds", "effect", "on each base"]
    if plan.stopping:
        columns.append("")
    rows = []
    for e in effects:
        q = e.question
        row = [
            q.says or q.name,
            q.other,
            q.group or "slope",
            e.n,
            words.shown(e),
            words.by_base(e),
        ]
        if plan.stopping:
            row.append(e.word)
        rows.append(row)
    return table(columns, rows)


def choices(plan: Plan, known: Known, found: Sequence[Effect], folder: Path) -> str:
    """Return a table of the rate and coefficient of each cell, "not yet" where it is
    not known, and the scores that were compared; "" without a search.
    """
    if not plan.search:
        return ""
    rows = []
    for cell in plan.cells():
        searched = plan.searched(cell, known)
        scores = searched.scores.items()
        told = ", ".join(f"{tried}: {x:.4g}" for tried, x in scores if x is not None)
        rows.append([cell.arm, cell.group, searched.choice or "not yet", told])
    columns = ["arm", "group", "chosen", "scores"]
    return f"## Rates and coefficients\n\n{table(columns, rows)}\n"


def limits(plan: Plan, known: Known, found: Sequence[Effect], folder: Path) -> str:
    """Return what the experiment cannot say, as the plan has it."""
    return f"## Limits\n\n{plan.limits}" if plan.limits else ""


def all_claims(plan: Plan, known: Known, found: Sequence[Effect], folder: Path) -> str:
    """Return a table of each claim of a closed round, by the second round's rule."""
    if not plan.claims:
        return ""
    rows = []
    for claim, v in zip(plan.claims, frozen.verdicts(plan, known), strict=True):
        word = f"**{v.word}**" + (f"<br>{v.why}" if v.why else "")
        seeds = f"{v.n} of {v.of}" if v.of else ""
        row = [claim["figure"], claim["says"], word, seeds, f"{v.p_for:.2g}"]
        rows.append(row)
    columns = ["", "claim", "by the registered rule", "seeds", "p"]
    return f"## The claims\n\n{table(columns, rows)}\n"


def stopped(plan: Plan, known: Known, found: Sequence[Effect], folder: Path) -> str:
    """Return a list of the runs that stopped, because a number was not finite."""
    ended = [r for r in plan.own_records(known) if r["status"] != "done"]
    lines = [f"* {r['name']} {as_text(r['status'])}" for r in ended]
    return "## Runs that stopped\n\n" + "\n".join(lines) + "\n" if lines else ""


def as_text(said: str) -> str:
    """Return a record's words so that Markdown shows them as letters, in one line:
    somebody else may have sent the record, with HTML or links in it.
    """
    plain = html.escape(" ".join(said.split()), quote=False)
    return "".join(f"\\{x}" if x in "\\`|[]" else x for x in plain)


def drawn_curves(
    plan: Plan, known: Known, found: Sequence[Effect], folder: Path
) -> str:
    """Draw the figures of the plan, mean curves over seeds with one panel a metric,
    into the folder; return the Markdown that shows them. A figure without a run is left
    out.
    """
    lines = []
    for figure in plan.figures:
        series = [curves.series(plan, known, panel) for panel in figure["panels"]]
        if any(series):
            highlight = figure.get("highlight", "")
            drawn = curves.draw(figure["panels"], series, figure["title"], highlight)
            save(drawn, folder / f"{figure['name']}.svg")
            lines.append(f"![{figure['title']}]({figure['name']}.svg)\n")
    return "\n".join(lines)


def drawn_plane(plan: Plan, known: Known, found: Sequence[Effect], folder: Path) -> str:
    """Draw Avg@32 against Best@32 at the end, by decoding, as curves.svg; return the
    Markdown that shows it, "" without runs of several decodings.
    """
    by_group = _with_decodings(plan, known)
    if not by_group:
        return ""
    save(_plane(plan, by_group), folder / "curves.svg")
    return (
        "![Best@32 against Avg@32](curves.svg)\n\n*One line per arm: the decodings at the end, from top-p 0.7 to "
        "T = 1; means over the seeds.*\n"
    )


def _with_decodings(plan: Plan, known: Known) -> dict[str, dict[str, list[RunRecord]]]:
    """Return group -> arm -> the runs that were evaluated by several decodings, of the
    seeds that every arm with a run in this group has, on any base.
    """
    runs_of: dict[Cell, list[RunRecord]] = {}
    seeds_of: dict[Cell, list[int]] = {}  # of these runs, in the same order
    for (arm, group, _, seed), run in plan.runs(known).items():
        runs_of.setdefault(Cell(arm, group), []).append(run)
        seeds_of.setdefault(Cell(arm, group), []).append(seed)
    found: dict[str, dict[str, list[RunRecord]]] = {}
    for asked in plan.groups:
        cells = [cell for cell in plan.cells([asked["name"]]) if cell in runs_of]
        for cell in cells:
            runs = []
            for seed, run in zip(seeds_of[cell], runs_of[cell], strict=True):
                if all(seed in seeds_of[other] for other in cells):
                    runs.append(run)
            if runs and runs[0]["settings"].get("decodings"):
                found.setdefault(cell.group, {})[cell.arm] = runs
    return found


def _plane(plan: Plan, by_group: dict[str, dict[str, list[RunRecord]]]) -> Figure:
    """Draw one panel for each group, with the number of seeds in its title."""
    titles = {}
    for name, by_arm in by_group.items():
        seeds = {r["settings"]["seed"] for runs in by_arm.values() for r in runs}
        word = "seed" if len(seeds) == 1 else "seeds"
        titles[name] = f"{_trained_on(plan, name)}, {len(seeds)} {word}"
    arms = list(dict.fromkeys(arm for group in plan.groups for arm in group["arms"]))
    return curves.draw_plane(by_group, titles, arms)


def _trained_on(plan: Plan, name: str) -> str:
    """Return what a group trains on, in words: its staleness and task, or its name
    where no staleness is set.
    """
    settings: dict[str, Any] = plan.group(name).get("settings", {})
    if "staleness" not in settings:
        return name
    staleness = settings["staleness"]
    data = f"{staleness} rollouts stale" if staleness else "fresh data"
    return f"{settings['task']}, {data}" if "task" in settings else data


Section = Callable[[Plan, Known, Sequence[Effect], Path], str]
SECTIONS: dict[str, Section] = {
    "answer": answered,
    "plane": drawn_plane,
    "effects": all_effects,
    "choices": choices,
    "limits": limits,
    "claims": all_claims,
    "curves": drawn_curves,
    "stopped": stopped,
}
