# SPDX-License-Identifier: Apache-2.0
"""Draws what runs logged: panels of mean curves over seeds, each seed thin behind, in
the paper's layout.

A panel is a table of the plan: metric, label (its title), and optional log (True: the
vertical axis is logarithmic), set and decoding (of an evaluation).
"""

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from repro.mini.experiment.plan import Plan
from repro.mini.experiment.questions import (
    EVAL_METRICS,
    Numbers,
    RunRecord,
    curve as points,
)
from upref.weights.plots import PALETTE, STYLE

COLORS = {  # by arm, so that an objective looks the same in every figure
    "dapo": PALETTE[0],
    "grpo": PALETTE[0],
    "gspo": PALETTE[0],
    "up_dapo": PALETTE[1],
    "up_grpo": PALETTE[1],
    "up_gspo": PALETTE[1],
    "dapo_no_upper_clip": "#7B3294",
    "reinforce_off_policy": "#00A6A6",
    "is_pg": "#8C6D1F",
}
# for arms without a color of their own, in the order in which they are taken
OTHERS = [
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6D1F",
    "#7B3294",
    "#00A6A6",
    "#B22222",
    "#7F7F7F",
    "#6B8E23",
    "#1B1B8F",
]
# endings of the name of an arm that is another form of the same method
FORMS = ("_code", "_clipped")
Curve = tuple[Numbers, Numbers]  # steps, values
Series = dict[str, list[Curve]]  # arm -> the curve of each seed
BOLD, PLAIN = 2.4, 1.6  # width of a line in points


class LineStyle(NamedTuple):
    """How the lines of an arm are drawn, in matplotlib's words."""

    color: str
    dash: str


def series(plan: Plan, records: dict[str, RunRecord], panel: dict[str, Any]) -> Series:
    """Return the curves of a panel's metric: arm -> one for each run that is there, of
    every group, base and seed of the plan.
    """
    found: Series = {}
    for (arm, _, _, _), run in plan.runs(records).items():
        found.setdefault(arm, []).append(curve(run, panel))
    return found


def curve(r: RunRecord, panel: dict[str, Any]) -> Curve:
    """Return steps and values of a panel's metric in one run.

    A metric of the evaluations is in points of 100, by default on the test set at top-p
    0.7; any other is as it was logged.
    """
    metric = panel["metric"]
    if metric in EVAL_METRICS:
        columns = r["evals"][
            f"{panel.get('set', 'test')}/{panel.get('decoding', 'top_p_0.7')}"
        ]
        return np.array(columns["step"]), 100 * np.array(columns[metric])
    return np.array(r["steps"]["step"]), np.array(r["steps"][metric])


def draw(
    panels: Sequence[dict[str, Any]],
    found: Sequence[Series],
    title: str,
    highlight: str = "",
    each: str = "seed",
) -> Figure:
    """Draw one panel for each metric, with one color for each arm.

    Args:
        panels: at most 3 side by side; more in two rows.
        found: of each panel its curves.
        title: of the figure.
        highlight: the arm whose mean is drawn bold and on top; "": none.
        each: what the legend counts.
    """
    arms = list(dict.fromkeys(arm for s in found for arm in s))
    style_of = line_styles(arms)
    columns = len(panels) if len(panels) < 4 else ceil(len(panels) / 2)
    rows = ceil(len(panels) / columns)
    fitting = {1: 2, 2: 4}.get(columns, 5)  # legend entries in the width
    beside = min(len(arms), fitting)
    keys = ceil(len(arms) / beside)  # rows of the legend
    with matplotlib.rc_context(STYLE):
        fig = Figure(
            figsize=(4.1 * columns, 2.9 * rows + 0.35 + 0.2 * keys),
            layout="constrained",
        )
        fig.suptitle(title, fontsize=11, fontweight="bold")
        axes = np.ravel(fig.subplots(rows, columns, squeeze=False))
        for ax in axes[len(panels) :]:
            ax.set_visible(False)
        for ax, panel, s in zip(axes, panels, found, strict=False):
            _draw_panel(ax, panel, s, style_of, highlight)
        legend = {}
        for arm in arms:
            width = BOLD if arm == highlight else PLAIN
            color, dash = style_of[arm]
            most = max(len(s.get(arm, [])) for s in found)
            label = f"{arm}, {most} {each}{'s' if most > 1 else ''}"
            legend[label] = Line2D([], [], color=color, lw=width, ls=dash)
        _draw_legend(fig, legend, beside)
    return fig


def _draw_legend(fig: Figure, lines: dict[str, Line2D], columns: int) -> None:
    """Draw the legend below the figure: label -> line, in so many columns."""
    fig.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
    )


def line_styles(arms: Sequence[str]) -> dict[str, LineStyle]:
    """Return the line style of each arm.

    An arm has its own color of COLORS if no other arm has it. An arm without one that
    is UP or another form of a plain arm here has the plain arm's color, dashed. Every
    other arm has the first free color of OTHERS, or its first one when all are taken.
    """
    found: dict[str, LineStyle] = {}
    # plain arms first: the others may take over their colors
    for arm in sorted(arms, key=lambda a: _of(a, arms) is not None):
        taken = {style.color for style in found.values()}
        own = COLORS.get(arm, PALETTE[1] if arm.startswith("up(") else "")
        plain = _of(arm, arms)
        if own and own not in taken:
            found[arm] = LineStyle(own, "-")
        elif plain in found:
            found[arm] = LineStyle(found[plain].color, "--")
        else:
            free = [color for color in OTHERS if color not in taken]
            found[arm] = LineStyle(free[0] if free else OTHERS[0], "-")
    return found


def _of(arm: str, arms: Sequence[str]) -> str | None:
    """Return the arm of `arms` that this one is UP of ("up_dapo": "dapo") or another
    form of ("dapo_code": "dapo"); None if there is none.
    """
    names = [arm.removeprefix("up_"), *(arm.removesuffix(form) for form in FORMS)]
    return next((name for name in names if name != arm and name in arms), None)


def _draw_panel(
    ax: Axes,
    panel: dict[str, Any],
    s: Series,
    style_of: dict[str, LineStyle],
    highlight: str,
) -> None:
    """Draw the curves of every arm thin, their mean over them, and title and axes."""
    alpha = 0.3 if len(s) < 8 else 0.12  # many arms hide each other
    thin: dict[str, Any] = {"lw": 0.6, "ms": 3, "alpha": alpha}
    for arm, curves in s.items():
        color, dash = style_of[arm]
        for x, y in curves:
            ax.plot(x, y, color=color, marker=_marker(x), **thin)
        x, mean = _mean(curves)
        width, order = (BOLD, 3) if arm == highlight else (PLAIN, 2)
        bold: dict[str, Any] = {"ls": dash, "lw": width, "ms": 5, "zorder": order}
        ax.plot(x, mean, color=color, marker=_marker(x), **bold)
    if panel.get("log"):
        ax.set_yscale("log", nonpositive="mask")  # a step without any gradient is a gap
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel("step")
    unit = ", %" if panel["metric"] in EVAL_METRICS else ""
    ax.set_title(panel["label"] + unit, loc="left", fontsize=9.5)


def _marker(x: np.ndarray) -> str:
    """Return "o", a dot, for a curve of one point; else "", no marker."""
    return "o" if len(x) == 1 else ""


def _mean(curves: list[Curve]) -> Curve:
    """Return the mean over the seeds at every step that all of them reached.

    The curves have the same steps, up to where each ends.
    """
    n = min(len(x) for x, _ in curves)
    return curves[0][0][:n], np.mean([y[:n] for _, y in curves], axis=0)


def draw_plane(
    by_group: dict[str, dict[str, list[RunRecord]]],
    titles: dict[str, str],
    arms: Sequence[str],
) -> Figure:
    """Draw Avg@32 against Best@32 at the end, one line an arm through its decodings.

    A point is the mean over the arm's runs. An arm without a run is left out, and keeps
    its color.

    Args:
        by_group: group, one panel each -> arm -> runs.
        titles: of the panels, by group.
        arms: all of them, in the order of their colors.
    """
    style_of = line_styles(arms)
    columns = 2 * len(by_group)  # of the legend; more do not fit into the width
    legend_rows = ceil(len(arms) / columns)
    with matplotlib.rc_context(STYLE):
        size = (4.5 * len(by_group), 3.6 + 0.2 * legend_rows)
        fig = Figure(figsize=size, layout="constrained")
        axes = np.ravel(fig.subplots(1, len(by_group), squeeze=False))
        for ax, (name, by_arm) in zip(axes, by_group.items(), strict=True):
            for arm, runs in by_arm.items():
                avg, best = np.mean([points(run)[-1] for run in runs], axis=0).T
                color, dash = style_of[arm]
                ax.plot(avg, best, marker="o", ms=3, color=color, ls=dash)
            ax.set(title=titles[name], xlabel="Avg@32, %", ylabel="Best@32, %")
            ax.spines[["top", "right"]].set_visible(False)
        legend = {}
        for arm in arms:
            if any(arm in by_arm for by_arm in by_group.values()):
                color, dash = style_of[arm]
                legend[arm] = Line2D([], [], color=color, ls=dash, marker="o", ms=3)
        _draw_legend(fig, legend, columns)
    return fig
