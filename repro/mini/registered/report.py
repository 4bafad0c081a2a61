# SPDX-License-Identifier: Apache-2.0
"""What the finished runs of a plan say, on one page: report.md and its figure. It runs
nothing.
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from figures.make import save
from repro.mini import files
from repro.mini.registered import rule
from repro.mini.registered.plan import Cell, Choice, Plan
from repro.mini.registered.rule import Effect
from repro.mini.stale import design as stale
from repro.mini.study import curves, registration, results
from repro.mini.study.results import Record
from upref.weights.plots import STYLE

ANSWERS = {
    "yes": "**Yes**: the first arm gains against each control.",
    "no": "**No**: against one control at least the first arm gives nothing more than the margins, or less.",
    "undecided": "**Undecided**: the intervals allow both.",
    "not finished": "**Not finished**: too few seeds for the first look.",
}


def progress(plan: Plan, records: dict[str, Record]) -> str:
    """What is finished, what comes next, and how long that takes."""
    todo, done = (
        plan.todo(records),
        sum(run.key in records for run in plan.reachable(records)),
    )
    finished = f"{done} of {plan.expected(records)} runs are finished."
    if not todo:
        return finished
    searching = todo[0].settings.seed in plan.search["seeds"]
    stage = "of the search" if searching else "of the experiment proper"
    # before the first run, by those of the experiment on stale data
    timed = records or results.load(stale.RESULTS)
    hours = results.forecast([run.settings for run in todo], timed) / 3600
    return f"{finished} Next are {len(todo)} runs {stage}, about {hours:.1f} hours of one core: `{plan.command}`."


def write(plan: Plan, records: dict[str, Record], folder: Path) -> None:
    """Write report.md and curves.svg into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = rule.effects(plan, records)
    parts = [f"# {plan.question}\n", head(plan, records)]
    if plan.answer:
        parts += ["## The answer\n", answer(plan, found)]
    if drawn := plane(plan, records):
        save(drawn, folder / "curves.svg")
        parts.append(
            "![Best@32 against Avg@32](curves.svg)\n\n*One line per arm: the decodings at the end, from top-p 0.7 to "
            "T = 1; means over the seeds.*\n"
        )
    parts += [
        "## Every effect\n",
        tables(plan, found),
        "## Rates and coefficients\n",
        choices(plan, records),
    ]
    if plan.limits:
        parts += ["## Limits\n", plan.limits]
    files.write_atomically(folder / "report.md", ("\n".join(parts) + "\n").encode())


def head(plan: Plan, records: dict[str, Record]) -> str:
    """The registration, and what is finished."""
    commit = registration.load(plan.folder).get("commit", "none yet")
    hours = (
        sum(
            r["provenance"]["seconds"]["all"]
            for r in records.values()
            if r["provenance"]
        )
        / 3600
    )
    return f"""Written by `{plan.command} --collect`. Rule, arms, rates, seeds, stopping and margins were registered in
commit `{commit}`, before any run.

{plan.note}
{progress(plan, records)}

The finished runs took {hours:.2f} hours of one core. Effects are means over the bases, with simultaneous intervals
(95 % for each family). The words follow from the intervals.
"""


def answer(plan: Plan, found: list[Effect]) -> str:
    """The plan's own verdict, and that against each control."""
    lines = [ANSWERS[rule.answer(found, plan)] + "\n"]
    for control in plan.answer["controls"]:
        of_control = [
            e for e in found if (e.family, e.other) == (plan.answer["family"], control)
        ]
        sizes = "; ".join(
            f"{shown(e)} at the level of {level(e)}, margin {e.margin:g}"
            for e in of_control
        )
        lines.append(
            f"* {of_control[0].first} against {control}: {rule.against(found, plan, control)} ({sizes})."
        )
    return "\n".join(lines) + "\n"


def level(e: Effect) -> str:
    """The decoding that sets the level of Avg@32."""
    return (
        e.metric.partition("/")[2].replace("top_p_", "top-p ").replace("t_1", "T = 1")
    )


def shown(e: Effect) -> str:
    """The effect with its interval, or why there is none."""
    if e.word in ("not finished", "out of reach"):
        return e.word
    return f"{rounded(e, e.mean)} [{rounded(e, e.low)}, {rounded(e, e.high)}]"


def rounded(e: Effect, x: float) -> str:
    """With as many digits as the metric has."""
    digits = 0 if e.metric == "survival" else 3 if e.metric == "entropy" else 1
    return f"{round(x, digits) + 0.0:+.{digits}f}"


def tables(plan: Plan, found: list[Effect]) -> str:
    """One table a family."""
    text = ""
    for family in plan.families:
        rows = [e for e in found if e.family == family["name"] and e.n]
        if not rows:
            continue
        text += f"### {family['title']}\n\n| metric | minus | group | seeds | effect | on each base | |\n"
        text += f"|{'---|' * 7}\n"
        for e in rows:
            bases = ", ".join(rounded(e, x) for x in e.by_base)
            cells = [
                e.metric,
                e.other,
                e.group or "slope",
                e.n,
                shown(e),
                bases,
                e.word,
            ]
            text += f"| {' | '.join(map(str, cells))} |\n"
        text += "\n"
    return (
        text
        or "No run of the experiment proper has finished on both sides of a comparison.\n"
    )


def choices(plan: Plan, records: dict[str, Record]) -> str:
    """What was chosen, and the scores."""
    rows = ["| arm | group | chosen | scores |", "|---|---|---|---|"]
    for cell in plan.cells():
        chosen = plan.choice(cell, records)
        scores = {
            choice: x
            for choice, x in plan.scores(cell, records).items()
            if x is not None
        }
        told = ", ".join(f"{said(choice)}: {x:.4g}" for choice, x in scores.items())
        rows.append(
            f"| {cell.arm} | {cell.group} | {said(chosen) if chosen else 'not yet'} | {told} |"
        )
    return "\n".join(rows) + "\n"


def said(choice: Choice) -> str:
    """Rate, and coefficient where there is one."""
    return f"{choice.rate:g}" + (
        f" with {choice.coefficient:g}" if choice.coefficient is not None else ""
    )


def plane(plan: Plan, records: dict[str, Record]) -> Figure | None:
    """Avg@32 against Best@32 at the end, one panel a group; None while no run of the
    experiment has finished.
    """
    values = {
        at: r
        for at, r in rule.values_of(plan, records).items()
        if r and r["settings"]["decodings"]
    }
    groups = [
        group["name"]
        for group in plan.groups
        if any(cell[1] == group["name"] for cell, _, _ in values)
    ]
    if not groups:
        return None
    arms = list(dict.fromkeys(arm for group in plan.groups for arm in group["arms"]))
    colour, dashes = curves.looks(arms)
    with matplotlib.rc_context(STYLE):
        columns = 2 * len(groups)  # of the legend; more do not fit into the width
        legend_rows = -(-len(arms) // columns)
        size = (4.5 * len(groups), 3.6 + 0.2 * legend_rows)
        fig = Figure(figsize=size, layout="constrained")
        for ax, name in zip(
            np.ravel(fig.subplots(1, len(groups), squeeze=False)), groups, strict=True
        ):
            seeds = set()
            for arm in plan.group(name)["arms"]:
                runs = [
                    r for (cell, _, _), r in values.items() if cell == Cell(arm, name)
                ]
                seeds |= {r["settings"]["seed"] for r in runs}
                if not runs:
                    continue
                avg, best = np.mean([rule.curve(r)[-1] for r in runs], axis=0).T
                label = arm if name == groups[0] else None
                ax.plot(
                    avg,
                    best,
                    marker="o",
                    ms=3,
                    color=colour[arm],
                    ls=dashes[arm],
                    label=label,
                )
            word = "seed" if len(seeds) == 1 else "seeds"
            title = f"{_title(plan, name)}, {len(seeds)} {word}"
            ax.set(title=title, xlabel="Avg@32, %", ylabel="Best@32, %")
            ax.spines[["top", "right"]].set_visible(False)
        fig.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    return fig


def _title(plan: Plan, name: str) -> str:
    """Return what a group trains on, in words, for the title of its panel."""
    settings = plan.group(name).get("settings", {})
    if "staleness" not in settings:
        return name
    staleness = settings["staleness"]
    words = f"{staleness} rollouts stale" if staleness else "fresh data"
    return f"{settings['task']}, {words}" if "task" in settings else words
