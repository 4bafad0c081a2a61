# SPDX-License-Identifier: Apache-2.0
"""All registered objectives on one page: the gradient weight of each and its Cap."""

import math
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from upref import catalog
from upref.description import RATIO_SYMBOLS
from upref.registry import get
from upref.weights.capacity import capacity
from upref.weights.curve import Curve, make_curve, obstacle
from upref.weights.plots import (
    DOWN,
    GREY,
    INK,
    STYLE,
    UP,
    WIDE,
    format_ratio_axis,
    half_width,
    line,
    need_matplotlib,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MU = np.r_[np.logspace(-4, -0.3, 30), 1 - np.logspace(-0.32, -7, 24)]


def atlas() -> "Figure":
    """Draw every objective of the first tier (upref.catalog) on one page, with its
    default hyperparameters: those with the widest Cap for A > 0 first.

    Left of each pair of pictures is the gradient weight against r (mu = 0.1), right the
    Cap of a token at π_θ = π_old = mu against mu. Objectives with the same weight share
    a pair; those that have no weight of a token by itself are named below.

    Returns:
        A matplotlib figure.
    """
    need_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    pairs, absent = groups(catalog.first_tier())
    dapo = make_curve("dapo")
    reference = [
        (line(dapo, A, 0.1, WIDE), capacity(dapo, MU, MU, A)) for A in (1.0, -1.0)
    ]
    reasons = "; ".join(f"{n} ({why})" for n, why in absent.items())
    left_out = textwrap.wrap(
        f"Not drawn, without a weight of a single token: {reasons}." if absent else "",
        120,
    )
    columns = 3
    rows = math.ceil(len(pairs) / columns)
    # All lengths below are in inches.
    pair_width = 3.5
    pair_height = 2.1
    head = 1.15
    foot = 0.65 + 0.2 * len(left_out)
    width = columns * pair_width + 0.35
    height = head + rows * pair_height + foot
    with matplotlib.rc_context(
        STYLE | {"font.size": 10, "xtick.labelsize": 9.5, "ytick.labelsize": 9.5}
    ):
        fig = Figure(figsize=(width, height))

        def axes_in_inches(x: float, y: float, w: float, h: float) -> "Axes":
            """Add axes at this place and of this size, all in inches."""
            return fig.add_axes((x / width, y / height, w / width, h / height))

        for i, group in enumerate(pairs):
            x = 0.52 + i % columns * pair_width
            y = height - head - (i // columns + 1) * pair_height
            left_axes = axes_in_inches(x, y + 0.42, 1.25, 1.05)
            right_axes = axes_in_inches(x + 1.95, y + 0.42, 1.05, 1.05)
            # DAPO in gray behind the others, where the ratio is that of a token
            comparison = []
            if group[0].name != "dapo" and group[0].level in ("token", "custom"):
                comparison = reference
            _draw_weight(left_axes, group[0], [xy for xy, _ in comparison])
            _draw_cap(right_axes, group[0], [cap for _, cap in comparison])
            if i % columns == 0:
                left_axes.set_ylabel("weight", labelpad=1)
                right_axes.set_ylabel("Cap", labelpad=0)
            _write_heading(fig, group, x / width, (y + 1.54) / height, 0.17 / height)

        def write_words(y: float, words: str, **style: Any) -> None:
            """Write words at the left margin, y inches above the foot of the page."""
            fig.text(0.52 / width, y / height, words, **style)

        write_words(
            height - 0.4,
            "What each objective does to a token",
            fontsize=16,
            fontweight="bold",
        )
        _draw_legend(fig, 0.52 / width, (height - 0.95) / height)
        order = "Widest Cap for A > 0 first; objectives of equal weight share a pair. Default hyperparameters."
        ratios = "r is the ratio of a token; s and S are the geometric mean and the product of a response's ratios."
        for i, sentence in enumerate([order, ratios, *left_out]):
            write_words(foot - 0.2 * (i + 1), sentence, color="#555555")
    return fig


def _draw_legend(fig: "Figure", x: float, y: float) -> None:
    """Draw the legend of both kinds of pictures, in their colors; x, y: its lower left
    corner, as parts of the figure.
    """
    from matplotlib.artist import Artist
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea, VPacker

    rows: list[dict[str, str]] = [
        {
            "Left of each pair: gradient weight dJ/dlp against r at mu = 0.1,": INK,
            "A = +1 (up)": UP,
            "and": INK,
            "A = −1 (down)": DOWN,
        },
        {
            r"Right of each pair: Cap at $\pi_\theta$ = $\pi_\mathrm{old}$ = mu against mu.": INK,
            "Grey: dapo.": "#888888",
        },
    ]
    words: list[list[Artist]] = [
        [TextArea(word, textprops=_style_of_word(c)) for word, c in row.items()]
        for row in rows
    ]
    lines: list[Artist] = [
        HPacker(children=row, align="baseline", pad=0, sep=3.2) for row in words
    ]
    anchor: dict[str, Any] = {
        "bbox_to_anchor": (x, y),
        "bbox_transform": fig.transFigure,
    }
    column = VPacker(children=lines, align="left", pad=0, sep=3)
    fig.add_artist(
        AnchoredOffsetbox(
            "lower left", child=column, pad=0, borderpad=0, frameon=False, **anchor
        )
    )


def _style_of_word(color: str) -> dict[str, Any]:
    """Return the style of a word of the legend: bold where its color has a meaning."""
    return {
        "color": color,
        "fontsize": 10.5,
        "fontweight": "normal" if color == INK else "bold",
    }


def _write_heading(
    fig: "Figure", group: list[Curve], x: float, y: float, line: float
) -> None:
    """Write the first name of a group of objectives that have one curve, and the other
    names below it.

    Args:
        fig: the figure.
        group: the curves; one at least.
        x, y: place of the last line, as parts of the figure.
        line: height of a line, in the same unit.
    """
    names = [c.name for c in group]
    other_names = ""
    for name in names[1:]:
        if not other_names:
            other_names = name
        elif len(other_names.split("\n")[-1]) + len(name) < 40:
            other_names += f"  {name}"
        else:
            other_names += f"\n{name}"
    y_of_first = y + line * len(other_names.split("\n")) if other_names else y
    fig.text(x, y_of_first, names[0], fontsize=11.5, fontweight="bold")
    if other_names:
        fig.text(
            x,
            y,
            other_names,
            fontsize=9.5,
            color="#555555",
            va="baseline",
            linespacing=1.2,
        )


def groups(names: Iterable[str]) -> tuple[list[list[Curve]], dict[str, str]]:
    """Group objectives of equal weight, widest Cap first, and list those that have no
    Cap, with the reason.

    Args:
        names: of objectives.

    Returns:
        Groups of curves, and name -> reason. In a group the name of the fewest words is
        first.
    """
    chosen = list(names)
    absent = {}
    for name in chosen:
        why = obstacle(get(name))
        if why:
            absent[name] = why
    curves_by_weight: dict[tuple[str, bytes], list[Curve]] = {}
    r = np.exp(np.r_[np.linspace(-2, 2, 201), np.linspace(-1e-3, 1e-3, 201)])
    for name in chosen:
        if name in absent:
            continue
        curve = make_curve(name)
        probe = [curve(r, A, mu) for A in (1.0, -1.0) for mu in (0.01, 0.1)]
        unit = "token" if curve.level == "custom" else curve.level
        key = (unit, np.round(probe, 9).tobytes())
        curves_by_weight.setdefault(key, []).append(curve)

    def words_of_name(curve: Curve) -> tuple[int, str]:
        """Return the key that sorts the name of the fewest words first."""
        return curve.name.count("_"), curve.name

    groups_of_curves = [
        sorted(curves, key=words_of_name) for curves in curves_by_weight.values()
    ]
    return sorted(groups_of_curves, key=lambda curves: _sort_key(curves[0])), absent


def _sort_key(curve: Curve) -> tuple[float, float, str, str]:
    """Return the key that sorts the widest Cap first: for A > 0, then for A < 0, at mu =
    0.01.
    """
    up, down = (-round(float(capacity(curve, 0.01, 0.01, A)), 9) for A in (1, -1))
    return up, down, curve.level, curve.name


def _draw_weight(ax: "Axes", curve: Curve, gray_lines: Any) -> None:
    """Draw the weight against r at mu = 0.1, for both signs of A, and behind it lines
    (r, weight) for comparison, in gray.
    """
    reach = half_width(curve, 0.1)
    for xy in gray_lines:
        ax.plot(*xy, color=GREY, lw=0.9, zorder=1)
    for A, color in ((1.0, UP), (-1.0, DOWN)):
        r, w = line(curve, A, 0.1, reach)
        ax.fill_between(r, w, color=color, alpha=0.16, lw=0)
        ax.plot(r, w, color=color, lw=1.3, zorder=2)
    ax.axhline(0, color="#666666", lw=0.5, zorder=0)
    ax.axvline(1 if reach == WIDE else 0, color="#CCCCCC", lw=0.5, zorder=0)
    format_ratio_axis(ax, reach)
    ax.set_ylim(-5.6, 5.6)
    ax.set_yticks([-5, -1, 1, 5], ["−5", "−1", "1", "5"])
    unit = RATIO_SYMBOLS[curve.level]
    ax.set_xlabel(unit if reach == WIDE else f"({unit} − 1) · 10$^4$", labelpad=0.5)


def _draw_cap(ax: "Axes", curve: Curve, gray_caps: Any) -> None:
    """Draw the Cap of a token at π_θ = π_old = mu against mu, for both signs of A, and
    behind it Caps for comparison, in gray.
    """
    for cap in gray_caps:
        ax.loglog(MU, cap, color=GREY, lw=0.9, zorder=1)
    for A, color in ((1.0, UP), (-1.0, DOWN)):
        cap = capacity(curve, MU, MU, A)
        ax.loglog(
            MU, cap, color=color, lw=1.1 if A > 0 else 2, zorder=3 if A > 0 else 2
        )
    ax.set(xlim=(1e-4, 1), ylim=(1e-6, 2))
    ax.set_xticks([1e-4, 1e-2, 1], ["10⁻⁴", "10⁻²", "1"])
    ax.set_yticks([1e-6, 1e-3, 1], ["10⁻⁶", "10⁻³", "1"])
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
    labels = {
        "sequence_mean": "mu, geometric mean",
        "sequence_product": "mu of the response",
    }
    ax.set_xlabel(labels.get(curve.level, "mu"), labelpad=0.5)
