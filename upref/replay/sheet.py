# SPDX-License-Identifier: Apache-2.0
"""The sheet of a replay, as `.svg` or `.html`: the report, panels, and what the words
mean. It shows a run's numbers, and tokens' texts where a tokenizer was given.
"""

import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from upref.errors import InputError
from upref.files import write_atomically
from upref.replay.lines import heading
from upref.replay.report import Replay
from upref.replay.schema import RecordedBatch
from upref.weights.plots import DOWN, GREY, PALETTE, STYLE, UP, need_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 4000  # of a scatter: more are a black square and a large file
NOTHING = 1e-10  # nats: a gap that float32 makes
FEW_POINTS = 400  # up to which they are drawn larger
SUFFIXES = (".svg", ".html")
WORDS = {
    "π_θ, π_old, μ": "the policy that trains, the same before the update, and the sampler's",
    "ρ": "π_old/μ of a token. Its mean E[ρ] is 1 where both are whole distributions over the same tokens",
    "r": "π_θ/π_old of a token",
    "A, w": "the advantage of a token, and its weight dJ/dlp in the gradient",
    "effective (sampler)": "share of the tokens that counts under the weights ρ",
    "dead A>0, dead A<0": "share of the tokens with A > 0 (A < 0) that have no gradient",
    "effective": "(Σ|w|)²/Σw²: how many tokens of equal weight would be as even",
    "top 1 %": "share of Σ|w| on the heaviest 1 % of the tokens",
    "longest": "share of Σ|w| on the longest quarter of the responses, over their share of the tokens",
    "cosine": "between the gradient, as a vector over tokens, and that of the objective that ran",
    "the two engines": "a point is a token; on the line both agree",
    "who carries the gradient": "Σ|w| of the heaviest tokens; a curve ends where the tokens without a gradient begin",
}
STYLE_SHEET = (
    "body{font:14px sans-serif;margin:2em auto;max-width:72em;padding:0 1em}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere}svg{max-width:100%}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.3em 1.5em}dd{margin:0}"
)


def check_suffix(path: str | Path) -> None:
    """Raise InputError unless matplotlib is installed and the name ends in .svg or
    .html.

    Args:
        path: where the sheet is to be written.
    """
    need_matplotlib()
    if Path(path).suffix not in SUFFIXES:
        raise InputError(
            f"a sheet is written as {' or '.join(SUFFIXES)}, not as {str(path)!r}."
        )


def write_sheet(path: str | Path, found: Replay) -> None:
    """Write the sheet of a replay.

    Args:
        path: ends in .svg (the panels) or .html (the report and the panels).
        found: the replay.

    Raises:
        InputError: the name ends in something else.
    """
    check_suffix(path)
    svg = _svg_of(draw(found))
    if Path(path).suffix == ".svg":
        write_atomically(path, svg)
        return
    body = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>upref replay</title>'
        f"<style>{STYLE_SHEET}</style>"
        f"<h1>{html.escape(heading(found))}</h1><pre>{html.escape(found.text())}</pre>"
        f"{svg[svg.index('<svg') :]}{_words_as_html()}</html>"
    )
    write_atomically(path, body)


def _words_as_html() -> str:
    """Return the list of words of the report and the panels, and a note on whose data the
    page shows, as HTML.
    """
    rows = [
        f"<dt>{html.escape(word)}</dt><dd>{html.escape(meaning)}</dd>"
        for word, meaning in WORDS.items()
    ]
    return (
        f"<h2>Words</h2><dl>{''.join(rows)}</dl>"
        "<p>This page shows tokens of users' texts. Keep it as you keep the data of the run.</p>"
    )


def draw(found: Replay) -> "Figure":
    """Draw the panels: of a run, the gap over the steps; the two engines, the weight of the
    heaviest tokens, weight against log r.

    Args:
        found: the result.

    Returns:
        The figure: a row of three panels, below a wide one for a run.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        is_run = found.series is not None
        figure = Figure(figsize=(11, 6.4 if is_run else 3.4), layout="constrained")
        rows = figure.add_gridspec(2 if is_run else 1, 3)
        if is_run:
            _draw_over_steps(figure.add_subplot(rows[0, :]), found)
        engines, concentration, against_ratio = (
            figure.add_subplot(rows[-1, column]) for column in range(3)
        )
        _draw_engines(engines, found.widest, _of_step(found, found.widest))
        where = _of_step(found, found.exercised)
        _draw_concentration(concentration, found, found.exercised, where)
        _draw_against_ratio(against_ratio, found, found.exercised, where)
    return figure


def _of_step(found: Replay, batch: RecordedBatch) -> str:
    """Return ", step 7" for the title of a panel of one step; "" where the replay has
    one step, or the step has no number.
    """
    if len(found.steps) < 2 or batch.step is None:
        return ""
    return f", step {batch.step}"


def _draw_engines(ax: Any, batch: RecordedBatch, where: str) -> None:
    """Draw the probability by the sampler against that by the trainer, of at most
    MOST_POINTS tokens; words where a column is missing.
    """
    ax.set(
        xlabel="probability by the trainer",
        ylabel="probability by the sampler",
        title="the two engines" + where,
    )
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    if batch.sampler is None or (batch.old is None and batch.now is None):
        _write_words(ax, "no sampler's column")
        return
    inside = batch.mask & batch.sampler.isfinite()
    x = batch.beside_sampler()[inside].exp().numpy()
    y = batch.sampler[inside].exp().clamp(max=1).numpy()
    shown = np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).astype(int)
    area = _point_area(len(shown))
    ax.scatter(x[shown], y[shown], s=area, color=DOWN, alpha=0.4, linewidths=0)


def _write_words(ax: Any, words: str) -> None:
    """Write words in a panel that has nothing to draw, or beside what it has."""
    ax.text(0.5, 0.5, words, ha="center", color="#666666", transform=ax.transAxes)


def _why_empty(batch: RecordedBatch) -> str:
    """Return in words why no objective's weights are drawn."""
    if batch.adv is None:
        return "no advantages are recorded"
    return "no objective could be computed"


def _point_area(points: int) -> float:
    """Return the area of a point in points², larger where there are few points."""
    return 12.0 if points <= FEW_POINTS else 2.0


def _draw_concentration(
    ax: Any, found: Replay, batch: RecordedBatch, where: str
) -> None:
    """Draw the share of Σ|w| on the heaviest tokens, a curve for each objective of the
    table; words where there is none.
    """
    ax.set(
        xlabel="heaviest tokens, share of all that train",
        ylabel="share of Σ|w|",
        title="who carries the gradient" + where,
        xscale="log",
    )
    for number, row in enumerate(found.table.rows if found.table is not None else ()):
        sorted_weights = np.sort(row.gradient.abs()[row.gradient != 0].numpy())[::-1]
        if len(sorted_weights):
            counts = np.unique(np.geomspace(1, len(sorted_weights), 60).astype(int))
            color = PALETTE[number % len(PALETTE)]
            ax.plot(
                counts / batch.tokens,
                sorted_weights.cumsum()[counts - 1] / sorted_weights.sum(),
                label=row.name,
                color=color,
                linewidth=1,
            )
    if ax.lines:
        ax.legend(fontsize=6, frameon=False)
    else:
        _write_words(ax, _why_empty(batch))


def _draw_against_ratio(
    ax: Any, found: Replay, batch: RecordedBatch, where: str
) -> None:
    """Draw the weight of each token against its log r under the first objective of the
    table, of at most MOST_POINTS tokens; words where there is none.
    """
    ax.set(xlabel="log r", ylabel="weight dJ/dlp", title="weight against log r" + where)
    if found.table is None or not found.table.rows or batch.adv is None:
        _write_words(ax, _why_empty(batch))
        return
    row = found.table.rows[0]
    now = batch.now if batch.now is not None else batch.trainer()
    log_r = (now - batch.trainer())[batch.mask].numpy()
    w = row.gradient[batch.mask].numpy()
    A = batch.adv[batch.mask].numpy()
    shown = np.linspace(0, len(w) - 1, min(len(w), MOST_POINTS)).astype(int)
    for sign, color, label in ((1, UP, "A > 0"), (-1, DOWN, "A < 0")):
        shown_of_sign = shown[np.sign(A[shown]) == sign]
        ax.scatter(
            log_r[shown_of_sign],
            w[shown_of_sign],
            s=_point_area(len(shown)),
            color=color,
            label=label,
            alpha=0.5,
            linewidths=0,
        )
    ax.legend(fontsize=6, frameon=False)
    ax.set_title(f"weight of {row.name} against log r{where}")


def _draw_over_steps(ax: Any, found: Replay) -> None:
    """Draw the gap of each step, with a mark on those that have a finding; on a
    logarithmic axis if no gap is 0.
    """
    assert found.series is not None
    steps = found.series.steps
    sizes = [s.size for s in steps]
    ax.plot([s.step for s in steps], sizes, color=DOWN, marker="o", markersize=3)
    _mark_findings(ax, found)
    ax.set(
        xlabel="step",
        ylabel="KL(μ ‖ π_old) by capped k2, nats",
        title="the gap over the steps",
    )
    ax.xaxis.get_major_locator().set_params(integer=True)
    if min(sizes) > 0:
        ax.set_yscale("log")
    if max(sizes) < NOTHING:
        _write_words(ax, "rounding: no gap")


def _mark_findings(ax: Any, found: Replay) -> None:
    """Draw a line at each step that has a failure, and a dotted one at a step that has
    only notes.
    """
    labelled = set()
    for s in found.steps:
        severities = {f.severity for f in s.findings}
        if not severities:
            continue
        if "failure" in severities:
            worst, color, linestyle = "failure", UP, "-"
        else:
            worst, color, linestyle = "note", GREY, ":"
        # the legend has one entry for all lines of a kind
        label = None if worst in labelled else f"a {worst} at this step"
        labelled.add(worst)
        ax.axvline(
            s.step,
            color=color,
            linewidth=1.2,
            linestyle=linestyle,
            label=label,
            zorder=0,
        )
    if labelled:
        ax.legend(fontsize=6, frameon=False)


def _svg_of(figure: "Figure") -> str:
    """Return the figure as SVG; the same figure gives the same text."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "upref", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
