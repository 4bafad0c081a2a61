# SPDX-License-Identifier: Apache-2.0
"""Cap maps and gradient weights, drawn from the functions that train; matplotlib is
imported on the first call.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from upref.errors import InputError
from upref.files import write_atomically
from upref.registry import Objective
from upref.weights.capacity import capacity
from upref.weights.curve import (
    Curve,
    common_ratio_symbol,
    make_curves,
    words_for_one_token,
)
from upref.weights.jumps import GRID

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A > 0, A < 0, reference, text (Okabe-Ito)
UP = "#D55E00"
DOWN = "#0072B2"
GREY = "#B8B8B8"
INK = "#222222"
PALETTE = [
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6D1F",
]
RAMP = ["#F4F8FB", "#C3DCEC", "#7FB6D6", "#3A86B7", "#0F5587", "#08304F"]  # Cap 0 to 1
DEAD = ["#EDEDED", "#B5B5B5"]  # where Cap is 0: ground and hatching
GREEK = {
    "eps": "ε",
    "eps_low": r"ε$_\mathrm{low}$",
    "eps_high": r"ε$_\mathrm{high}$",
    "delta": "δ",
    "lam": "λ",
    "tau": "τ",
    "tau_pos": "τ$_+$",
    "tau_neg": "τ$_-$",
    "c1_pos": "c$_{1+}$",
    "c2_pos": "c$_{2+}$",
    "c1_neg": "c$_{1-}$",
    "c2_neg": "c$_{2-}$",
}
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "mathtext.fontset": "dejavusans",
    "hatch.linewidth": 0.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#666666",
    "axes.linewidth": 0.6,
    "xtick.color": "#444444",
    "xtick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.color": "#444444",
    "ytick.major.width": 0.6,
    "ytick.major.size": 2.5,
}
# half-width of a ratio axis in log r, unless the objective's window is much narrower
WIDE = float(np.log(6))
STEEPEST = 6.0  # the largest weight on a y axis: that of A r where the ratio axis ends
LEAST = 1e-4  # the lowest probability of a logarithmic Cap map
TICKS = ([0, 0.25, 0.5, 0.75, 1], ["0", "¼", "½", "¾", "1"])
LOG_TICKS = ([1e-4, 1e-3, 1e-2, 1e-1, 1], ["10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "1"])
MINUS = str.maketrans("-", "−")


# ---- Cap maps (the paper's Fig. 1) ---------------------------------------------------
@dataclass(frozen=True)
class Panel:
    """One square of a Cap map."""

    title: str
    objective: str | Objective | Callable[..., Any] | Curve
    adv: float = 1.0
    hp: dict[str, Any] = field(default_factory=dict)
    subtitle: str = ""


def cap_map(
    *objectives: str | Objective | Callable[..., Any],
    adv: float = 1.0,
    log: bool = False,
    **hp: Any,
) -> "Figure":
    """Draw Cap(π_θ, π_old) of each objective or loss over the unit square, with dead
    regions hatched.

    Args:
        *objectives: names, objectives or losses, as for `upref.capacity`; one panel
            each.
        adv: advantage, the same for all panels.
        log: draw probabilities and Cap on logarithmic scales from 1e-4 to 1.
        **hp: hyperparameters; each goes to the objectives and losses that have it.

    Returns:
        A matplotlib figure.

    Raises:
        InputError: matplotlib is missing, adv is no finite number, no objective has a
            hyperparameter of this name, or `capacity` raises it.
    """
    if not isinstance(adv, int | float | np.number) or not abs(adv) < np.inf:
        raise InputError(f"adv is an advantage, a number: got {repr(adv)[:60]}.")
    sign = "A > 0" if adv > 0 else "A < 0" if adv < 0 else "A = 0"
    curves = make_curves(objectives, hp)
    panels = [
        Panel(c.name, c, adv, subtitle=", ".join([sign, *_settings(c)])) for c in curves
    ]
    figure = cap_panels(panels, log=log)
    if measured := words_for_one_token(curves):
        figure.supxlabel(measured, fontsize=8, wrap=True)
    return figure


def need_matplotlib() -> None:
    """Raise InputError unless matplotlib is installed: only pictures need it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise InputError(
            "a picture needs matplotlib: pip install matplotlib, or upref-rl with its extra plot."
        ) from None


def cap_panels(panels: list[Panel], n: int = 400, log: bool = False) -> "Figure":
    """Draw panels side by side with one color bar; each is computed on n x n cells.

    Args:
        panels: what is drawn, from left to right.
        n: cells on each side.
        log: logarithmic axes.

    Returns:
        A matplotlib figure.
    """
    need_matplotlib()
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
    from matplotlib.figure import Figure

    ramp = LinearSegmentedColormap.from_list("cap", RAMP)
    norm = LogNorm(LEAST, 1) if log else Normalize(0, 1)
    ticks, labels = LOG_TICKS if log else TICKS
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(2.75 * len(panels) + 0.85, 3.3), layout="compressed")
        axes = np.atleast_1d(fig.subplots(1, len(panels), sharex=True, sharey=True))
        for ax, panel in zip(axes, panels, strict=True):
            image = _cap_square(ax, panel, n, {"cmap": ramp, "norm": norm}, log)
        axes[0].set_ylabel(
            r"$\pi_\theta$", fontsize=12, rotation=0, labelpad=10, va="center"
        )
        bar = fig.colorbar(image, ax=list(axes), aspect=22, pad=0.02, ticks=ticks)
        bar.set_label("Cap")
        bar.ax.set_yticklabels(labels)
        bar.ax.minorticks_off()
        bar.outline.set_linewidth(0.6)
    return fig


def _cap_square(
    ax: Any, panel: Panel, n: int, colors: dict[str, Any], log: bool
) -> Any:
    """Draw the Cap as colors over (mu, pi), and name the regions in which it is 0.

    Args:
        ax: matplotlib's axes.
        panel: what is drawn.
        n: cells on each side.
        colors: keywords cmap and norm of `imshow`.
        log: logarithmic axes.

    Returns:
        The image, for a color bar.
    """
    x = (np.arange(n) + 0.5) / n  # of the square; of a probability too, unless log
    mu, p = np.meshgrid(x, x)
    pi = (LEAST ** (1 - p), LEAST ** (1 - mu)) if log else (p, mu)
    cap = capacity(panel.objective, *pi, panel.adv, **panel.hp)
    dead = cap == 0
    square = {"extent": (0, 1, 0, 1), "origin": "lower", "interpolation": "nearest"}
    image = ax.imshow(np.ma.masked_array(cap, dead), **colors, **square)
    if dead.any():
        grey = ax.contourf(
            mu, p, dead, levels=[0.5, 1.5], colors=DEAD[:1], hatches=["////"]
        )
        grey.set(edgecolor=DEAD[1], linewidth=0)
    _name_regions_without_cap(ax, dead, panel.adv, p > mu)
    if ax.get_subplotspec().is_first_col():
        ax.text(
            0.6,
            0.57,
            "on-policy",
            rotation=45,
            rotation_mode="anchor",
            ha="center",
            va="top",
            fontsize=8,
        )
    ax.plot([0, 1], [0, 1], color=INK, lw=0.7, dashes=(4, 3), alpha=0.65)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks([0, 0.5, 1], (LOG_TICKS if log else TICKS)[1][::2])
    ax.set_xlabel(r"$\pi_\mathrm{old}$", fontsize=12, labelpad=1)
    ax.set_title(
        f"{panel.title}\n", fontsize=10.5, fontweight="bold", pad=5, linespacing=1.35
    )
    ax.text(
        0.5,
        1.03,
        panel.subtitle,
        transform=ax.transAxes,
        ha="center",
        va="bottom",
        fontsize=8.5,
        color="#555555",
    )
    return image


def _name_regions_without_cap(
    ax: Any, dead: np.ndarray, adv: float, is_above: np.ndarray
) -> None:
    """Write the name of its clip on each region in which the Cap is 0.

    Args:
        ax: matplotlib's axes.
        dead: [n, n], the cells whose Cap is 0.
        adv: the advantage.
        is_above: [n, n], the cells with pi > mu.
    """
    regions = {
        "Upper Clip": np.full_like(dead, adv > 0),
        "Lower Clip": ~is_above & (adv < 0),
        "Dual Clip": is_above & (adv < 0),
    }
    box = {
        "boxstyle": "round,pad=0.25",
        "facecolor": "white",
        "edgecolor": "none",
        "alpha": 0.9,
    }
    for label, region in regions.items():
        if place := _place_for_label(dead & region):
            ax.text(*place, label, ha="center", va="center", fontsize=9, bbox=box)


def _place_for_label(
    region: np.ndarray, width: float = 0.28, height: float = 0.09
) -> tuple[float, float] | None:
    """Return the center of a label in the largest size that fits into the region; None
    where none fits. It is the mean of all places where the label fits, or the place
    nearest to the mean if the label does not fit there.

    Args:
        region: the cells that the label may cover, [n, n].
        width, height: of the smallest label, as parts of n.
    """
    n = len(region)
    cells_before = np.pad(region, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    for scale in np.arange(3, 0.999, -0.05):
        h = round(height * scale * n)
        w = round(width * scale * n)
        if not (0 < h <= n and 0 < w <= n):
            continue
        # the cells of the region in each box of h x w: all of them where it fits
        is_inside = (
            cells_before[h:, w:]
            - cells_before[:-h, w:]
            - cells_before[h:, :-w]
            + cells_before[:-h, :-w]
            == h * w
        )
        if is_inside.any():
            places = np.argwhere(is_inside)
            y, x = places.mean(0)
            if not is_inside[round(y), round(x)]:
                y, x = places[np.abs(places - (y, x)).sum(1).argmin()]
            return (x + w / 2) / n, (y + h / 2) / n
    return None


# ---- gradient weights ----------------------------------------------------------------
def weights(
    *objectives: str | Objective | Callable[..., Any], mu: float = 0.1, **hp: Any
) -> "Figure":
    """Draw dJ/dlp against the ratio (r of a token, s or S of a response), for A = +1 and
    A = -1, one labelled line per objective.

    The weight is that of a response of one token, alone in its batch; the figure says so
    of a weight that depends on the other tokens of its response. mu is π_old(o_t),
    for objectives whose weight depends on it. Raises InputError for objectives whose
    weight depends on the batch, and as `cap_map`.

    Args:
        *objectives: names, Objectives or losses.
        mu: π_old(o_t).
        **hp: hyperparameters; each gets those that it has.

    Returns:
        A matplotlib figure.
    """
    need_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    if (
        isinstance(mu, bool)
        or not isinstance(mu, int | float | np.number)
        or not 0 < mu <= 1
    ):
        raise InputError(f"mu is a probability in (0, 1], got {repr(mu)[:60]}.")
    chosen = make_curves(objectives, hp)
    reach = max(half_width(c, mu) for c in chosen)
    unit = common_ratio_symbol(chosen)
    note = f"  (mu = {mu:g})" if any(c.reads_mu for c in chosen) else ""
    x_words = f"ratio {unit}" if reach == WIDE else f"({unit} − 1) · 10$^4$"
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(9.6, 3.5))
        for i, A in enumerate((1.0, -1.0)):
            ax = fig.add_axes((0.075 + 0.485 * i, 0.15, 0.295, 0.73))
            lines = [line(c, A, mu, reach) for c in chosen]
            colors = [PALETTE[j % len(PALETTE)] for j in range(len(chosen))]
            for (r, w), color, dash in zip(lines, colors, _dashes(lines), strict=True):
                ax.plot(r, w, color=color, lw=1.8, ls=dash, dash_capstyle="butt")
            format_ratio_axis(ax, reach)
            ax.set_ylim(*_weight_limits(A, [w for _, w in lines]))
            ax.axhline(0, color="#666666", lw=0.6, zorder=0)
            ax.set_title(
                f"A = {A:+.0f}".translate(MINUS),
                loc="left",
                fontsize=10,
                fontweight="bold",
                color=INK,
            )
            ax.set_xlabel(x_words + note)
            ends = [
                (w[-1], c.name, color)
                for c, color, (_, w) in zip(chosen, colors, lines, strict=True)
            ]
            _label_ends(ax, ends)
        fig.axes[0].set_ylabel("gradient weight  dJ/dlp")
        if measured := words_for_one_token(chosen, unit):
            fig.text(0.075, 0.97, measured, fontsize=8, va="center", wrap=True)
    return fig


def _dashes(lines: list[tuple[np.ndarray, np.ndarray]]) -> list[Any]:
    """Return the style of each line for matplotlib: solid, or dashes in turn where
    several lines have the same weights.
    """
    styles: list[Any] = []
    for number, (_, w) in enumerate(lines):
        same = [j for j, (_, v) in enumerate(lines) if np.array_equal(v, w)]
        n = len(same)
        turn = same.index(number)
        styles.append("-" if n == 1 else (6 * turn, (6, 6 * (n - 1))))
    return styles


def _weight_limits(A: float, weights: list[np.ndarray]) -> tuple[float, float]:
    """Return the y limits that hold all curves, the parts of the wrong sign too.

    A curve above STEEPEST is cut there, so that the others stay readable. The side of
    the sign of A reaches to 1.25 at least.
    """
    with_sign = np.concatenate(weights) * A
    with_sign = with_sign[np.isfinite(with_sign)]
    limit_with_sign = 1.08 * float(np.clip(with_sign.max(initial=0), 1.25, STEEPEST))
    limit_against_sign = 1.08 * float(np.clip(-with_sign.min(initial=0), 0, STEEPEST))
    limit_against_sign = max(limit_against_sign, 0.06 * limit_with_sign)
    if A > 0:
        return -limit_against_sign, limit_with_sign
    return -limit_with_sign, limit_against_sign


def _label_ends(ax: "Axes", ends: list[tuple[float, str, str]]) -> None:
    """Write names to the right of the axes, in the colors of their lines, and move names
    apart where they would touch.

    Args:
        ax: matplotlib's axes.
        ends: of each line: its last weight, its name, and its color.
    """
    low, high = ax.get_ylim()
    step = 0.062  # the height of a name, as a part of the axes
    heights = [float(np.clip((y - low) / (high - low), 0, 1)) for y, *_ in ends]
    order = sorted(range(len(ends)), key=lambda i: (heights[i], -i))
    spread = np.array([heights[i] for i in order])
    for _ in range(200):
        for a in range(len(spread) - 1):
            if (overlap := step - (spread[a + 1] - spread[a])) > 1e-9:
                spread[a : a + 2] += (-overlap / 2, overlap / 2)
        spread -= max(spread[-1] - 1, 0)
        spread += max(-spread[0], 0)
    for i, y in zip(order, spread, strict=True):
        _, name, color = ends[i]
        ax.plot(
            [1, 1.045],
            [heights[i], y],
            transform=ax.transAxes,
            color=color,
            lw=0.8,
            clip_on=False,
        )
        ax.text(
            1.06, y, name, transform=ax.transAxes, color=color, va="center", fontsize=9
        )


# ---- common --------------------------------------------------------------------------
def line(
    curve: Curve, A: float, mu: float, reach: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the points of a curve, with both sides of every jump. Where the reach is
    narrow, r - 1 in units of 1e-4 stands for r.

    Args:
        curve: the weight.
        A: the advantage.
        mu: π_old.
        reach: the half-width in log r; WIDE, or a narrow one.

    Returns:
        r and the weight, two arrays of one length, ascending in r.
    """
    r = np.exp(np.linspace(-reach, reach, 61))
    beside_jumps = [
        [jump.r * (1 - 1e-9), jump.r * (1 + 1e-9)]
        for jump in curve.jumps(A, mu, _ratios_within(reach))
    ]
    r = np.sort(np.r_[r, 1, *beside_jumps])
    r = r[r * mu <= 1] if curve.reads_mu else r
    w = curve(r, A, mu)
    # the points inside a flat part need not be drawn
    is_flat = np.r_[False, (w[:-2] == w[1:-1]) & (w[1:-1] == w[2:]), False]
    x = r if reach == WIDE else (r - 1) * 1e4
    return x[~is_flat], w[~is_flat]


def _ratios_within(reach: float) -> np.ndarray:
    """Return the ratios of the grid whose |log r| is below the reach."""
    return GRID[abs(np.log(GRID)) < reach]


def half_width(curve: Curve, mu: float) -> float:
    """Return the half-width of a ratio axis in log r: 2.6 times the largest |log r| at
    which the weight turns to 0 or back, where this is below 2 %, else WIDE.

    Args:
        curve: the weight.
        mu: π_old.

    Returns:
        A number > 0.
    """
    ends = [
        abs(np.log(j.r))
        for A in (1.0, -1.0)
        for j in curve.jumps(A, mu, _ratios_within(WIDE))
        if j.end
    ]
    return 2.6 * max(ends) if ends and max(ends) < 0.02 else WIDE


def format_ratio_axis(ax: "Axes", reach: float) -> None:
    """Set limits and ticks of an x axis that shows the ratio r.

    The axis is logarithmic and shows r from 1/6 to 6. Around bounds closer to 1 than
    2 % it is linear and shows (r - 1) in units of 1e-4, as `line` returns it.

    Args:
        ax: matplotlib's axes.
        reach: the half-width in log r, of `half_width`.
    """
    ax.spines[["top", "right"]].set_visible(False)
    if reach == WIDE:
        _format_logarithmic_axis(ax)
    else:
        _format_narrow_axis(ax, reach)


def _format_logarithmic_axis(ax: "Axes") -> None:
    """Show r from 1/6 to 6, that is exp(-WIDE) to exp(WIDE), on a logarithmic axis."""
    ax.set_xscale("log")
    ax.set_xlim(np.exp(-WIDE), np.exp(WIDE))
    ax.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    ax.minorticks_off()


def _format_narrow_axis(ax: "Axes", reach: float) -> None:
    """Show (r - 1) in 1e-4, with one tick of one digit on either side of 0, at three
    quarters of the axis.
    """
    end = np.expm1(reach) * 1e4
    tick = float(f"{end * 0.75:.0e}")
    ax.set_xlim(-end, end)
    ax.set_xticks([-tick, 0, tick], [f"−{tick:g}", "0", f"{tick:g}"])


def _settings(curve: Curve) -> list[str]:
    """Return the hyperparameters of a curve as text, without beta and those that are
    None.
    """
    return [
        f"{GREEK.get(k, k)} = {v}"
        for k, v in curve.settings.items()
        if v is not None and k != "beta"
    ]


def save(draw: Callable[[], "Figure"], file: str) -> int:
    """Write the figure that `draw` makes, and print the name of the file.

    Args:
        draw: makes the figure.
        file: where it is written.

    Returns:
        Exit status 0.

    Raises:
        InputError: before the figure is drawn, where the name ends in no known format,
            or matplotlib is missing.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if Path(file).suffix.lstrip(".") not in formats:
        raise InputError(
            f"cannot write a figure as {file!r}: end the name in one of .{', .'.join(sorted(formats))}."
        )
    content = io.BytesIO()
    draw().savefig(content, format=Path(file).suffix.lstrip("."))
    write_atomically(file, content.getvalue())
    print(file)
    return 0
