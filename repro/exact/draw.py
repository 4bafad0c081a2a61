# SPDX-License-Identifier: Apache-2.0
"""The look that the figures share."""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

from upref.weights.plots import PALETTE, STYLE

COLOURS = {  # an objective looks the same in every figure
    "dapo": PALETTE[0],
    "up_dapo": PALETTE[1],
    "dapo_no_upper_clip": "#7B3294",
    "reinforce_off_policy": "#00A6A6",
    "is_pg": "#8C6D1F",
    "dppo_tv": PALETTE[2],
    "cispo": PALETTE[3],
    "sapo": PALETTE[4],
    "gppo": PALETTE[5],
    "aspo": "#000000",
    "topr": "#6B8E23",
    "gspo": PALETTE[0],
    "up_gspo": PALETTE[1],
}
OTHERS = ["#B22222", "#1B1B8F", "#7F7F7F", "#009E73", "#CC79A7", "#E69F00"]


def colours(arms: Sequence[str]) -> dict[str, str]:
    free = iter(OTHERS * (len(arms) + 1))
    taken: dict[str, str] = {}
    for a in arms:
        own = COLOURS.get(a)
        taken[a] = (
            own
            if own and own not in taken.values()
            else next(c for c in free if c not in taken.values())
        )
    return taken


@contextmanager
def panels(
    n: int,
    title: str,
    arms: Sequence[str] = (),
    width: float = 4.1,
    height: float = 3.1,
):
    """(figure, axes): n panels side by side under a title, and a legend of the arms
    below.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedFormatter, NullFormatter

    rows = -(-len(arms) // 5)
    with matplotlib.rc_context(STYLE):
        fig = Figure(
            figsize=(width * n, height + 0.35 + 0.2 * rows), layout="constrained"
        )
        fig.suptitle(title, fontsize=11, fontweight="bold")
        axes = list(fig.subplots(1, n, squeeze=False)[0])
        yield fig, axes
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
            for axis in (ax.xaxis, ax.yaxis):
                if axis.get_scale() == "log" and not isinstance(
                    axis.get_major_formatter(), FixedFormatter
                ):
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_formatter(NullFormatter())
        colour = colours(arms)
        lines = [Line2D([], [], color=colour[a], lw=width_of(a)) for a in arms]
        if arms:
            place: Any = {
                "loc": "outside lower center",
                "ncols": min(len(arms), 5),
                "frameon": False,
                "fontsize": 8,
            }
            fig.legend(lines, list(arms), **place)


def width_of(arm: str) -> float:
    return 2.4 if arm.startswith("up") else 1.5


def line(ax, x, y, arm: str, colour: dict[str, str], **more: Any) -> None:
    ax.plot(
        x,
        y,
        color=colour[arm],
        lw=width_of(arm),
        zorder=3 if arm.startswith("up") else 2,
        **more,
    )


def heading(ax, text: str) -> None:
    ax.set_title(text, loc="left", fontsize=9.5)
