# SPDX-License-Identifier: Apache-2.0
"""The sheet of a replay, as `.svg` or `.html`: the report, and four panels. It shows a
run's numbers, and tokens' texts where a tokenizer was given."""

import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from upref.errors import InputError
from upref.files import write_atomically
from upref.replay.report import Replay
from upref.replay.schema import RecordedBatch
from upref.weights.plots import DOWN, GREY, PALETTE, STYLE, UP, need_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 4000  # of a scatter: more are a black square and a large file
SUFFIXES = (".svg", ".html")


def check_suffix(path: str | Path) -> None:
    """Raise InputError unless a sheet can be drawn, and written under this name.

    Args:
        path: where the sheet is to be written.
    """
    need_matplotlib()
    if Path(path).suffix not in SUFFIXES:
        raise InputError(
            f"a sheet is written as {' or '.join(SUFFIXES)}, not as {str(path)!r}."
        )


def write_sheet(path: str | Path, found: Replay, batch: RecordedBatch) -> None:
    """Write the sheet of a replay.

    Args:
        path: ends in .svg (the panels) or .html (the report and the panels).
        found: the replay.
        batch: its last step.

    Raises:
        InputError: the name ends in something else.
    """
    check_suffix(path)
    svg = _svg(draw(found, batch))
    if Path(path).suffix == ".svg":
        write_atomically(path, svg)
        return
    body = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>upref replay</title>'
        "<style>body{font:14px sans-serif;margin:2em auto;max-width:64em}pre{overflow-x:auto}"
        "svg{max-width:100%}</style>"
        f"<h1>{'Nothing failed' if found else 'A check failed'}</h1><pre>{html.escape(found.text())}</pre>"
        f"{svg[svg.index('<svg') :]}</html>"
    )
    write_atomically(path, body)


def draw(found: Replay, batch: RecordedBatch) -> "Figure":
    """The panels: the two engines, the weight of the heaviest tokens, weight against
    log r, the gap over the steps.

    Args:
        found: the result.
        batch: the step that is drawn.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(11, 3.4 if found.series is None else 6.4), layout="constrained"
        )
        axes = list(np.ravel(figure.subplots(1 if found.series is None else 2, 3)))
        _engines(axes[0], batch)
        _concentration(axes[1], found)
        _against_ratio(axes[2], found, batch)
        for ax in axes[4:]:
            ax.set_axis_off()
        if found.series is not None:
            _over_steps(axes[3], found)
    return figure


def _engines(ax: Any, batch: RecordedBatch) -> None:
    ax.set(
        xlabel="probability by the trainer",
        ylabel="probability by the sampler",
        title="the two engines",
    )
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    if batch.sampler is None or (batch.old is None and batch.now is None):
        ax.text(0.5, 0.5, "no sampler's column", ha="center", color="#666666")
        return
    inside = batch.mask & batch.sampler.isfinite()
    x, y = (
        batch.trainer()[inside].exp().numpy(),
        batch.sampler[inside].exp().clamp(max=1).numpy(),
    )
    some = np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).astype(int)
    ax.scatter(
        x[some], y[some], s=2, color=DOWN, alpha=0.4, linewidths=0, rasterized=False
    )


def _concentration(ax: Any, found: Replay) -> None:
    ax.set(
        xlabel="heaviest tokens, share",
        ylabel="share of Σ|w|",
        title="who carries the gradient",
        xscale="log",
    )
    for number, row in enumerate(found.table.rows if found.table is not None else ()):
        size = np.sort(row.gradient.abs()[row.gradient != 0].numpy())[::-1]
        if len(size):
            at = np.unique(np.geomspace(1, len(size), 60).astype(int))
            color = PALETTE[number % len(PALETTE)]
            ax.plot(
                at / len(size),
                size.cumsum()[at - 1] / size.sum(),
                label=row.name,
                color=color,
                linewidth=1,
            )
    if ax.lines:
        ax.legend(fontsize=6, frameon=False)


def _against_ratio(ax: Any, found: Replay, batch: RecordedBatch) -> None:
    ax.set(xlabel="log r", ylabel="weight dJ/dlp", title="weight against log r")
    if found.table is None or not found.table.rows or batch.adv is None:
        return
    row = found.table.rows[0]
    now = batch.now if batch.now is not None else batch.trainer()
    log_r = (now - batch.trainer())[batch.mask].numpy()
    w, A = row.gradient[batch.mask].numpy(), batch.adv[batch.mask].numpy()
    some = np.linspace(0, len(w) - 1, min(len(w), MOST_POINTS)).astype(int)
    ax.scatter(
        log_r[some],
        w[some],
        s=2,
        c=np.where(A[some] > 0, UP, DOWN),
        alpha=0.5,
        linewidths=0,
    )
    ax.set_title(f"weight of {row.name} against log r")


def _over_steps(ax: Any, found: Replay) -> None:
    assert found.series is not None
    steps = found.series.steps
    ax.plot(
        [s.step for s in steps],
        [max(s.size, 1e-12) for s in steps],
        color=DOWN,
        marker="o",
        markersize=3,
    )
    ax.set(
        xlabel="step",
        ylabel="KL(μ ‖ π_old) by capped k2, nats",
        title="the gap over the steps",
        yscale="log",
    )


def _svg(figure: "Figure") -> str:
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "upref", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
