# SPDX-License-Identifier: Apache-2.0
"""Pictures of what an objective does to a token: its Cap map, its gradient weight, and all objectives on one page.

Every figure is drawn from the functions that train. matplotlib is imported on the first call; no backend is touched:
`fig.savefig("x.svg")` works anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from upref.cap import capacity
from upref.curve import Curve, obstacle, of, of_all
from upref.jumps import GRID
from upref.registry import Objective, get, names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UP, DOWN, GREY, INK = "#D55E00", "#0072B2", "#B8B8B8", "#222222"  # A > 0, A < 0, reference, text (Okabe-Ito)
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F"]
GREEK = {
    "eps": "ε", "eps_low": r"ε$_\mathrm{low}$", "eps_high": r"ε$_\mathrm{high}$", "delta": "δ", "lam": "λ",
    "tau": "τ", "tau_pos": "τ$_+$", "tau_neg": "τ$_-$",
}  # fmt: skip
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "mathtext.fontset": "dejavusans", "hatch.linewidth": 0.5,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": "#666666", "axes.linewidth": 0.6,
    "xtick.color": "#444444", "xtick.major.width": 0.6, "xtick.major.size": 2.5,
    "ytick.color": "#444444", "ytick.major.width": 0.6, "ytick.major.size": 2.5,
}  # fmt: skip
WIDE = float(np.log(6))  # half-width of a ratio axis in log r, unless the objective's window is much narrower
ATLAS_MU = np.r_[np.logspace(-4, -0.3, 30), 1 - np.logspace(-0.32, -7, 24)]
MINUS = str.maketrans("-", "−")


# ---- Cap maps (the paper's Fig. 1) -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Panel:
    """One square of a Cap map."""

    title: str
    objective: str | Objective | Callable | Curve
    adv: float = 1.0
    hp: dict[str, Any] = field(default_factory=dict)
    subtitle: str = ""


def cap_map(*objectives: str | Objective | Callable, adv: float = 1.0, **hp) -> "Figure":
    """Cap(π_θ, π_old) of each objective or loss over the unit square, dead regions hatched. See `upref.capacity`.

    adv   advantage, one sign for all panels;    hp   each goes to the objectives and losses that have it
    Raises InputError where no objective has a hyperparameter, and whatever `capacity` raises.
    """
    sign = "A > 0" if adv > 0 else "A < 0" if adv < 0 else "A = 0"
    curves = of_all(objectives, hp)
    return cap_panels([Panel(c.name, c, adv, subtitle=", ".join([sign, *_settings(c)])) for c in curves])


def cap_panels(panels: list[Panel], n: int = 400) -> "Figure":
    """The panels side by side on one colour bar; each is computed on n x n cells."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    ramp = LinearSegmentedColormap.from_list("cap", ["#F4F8FB", "#C3DCEC", "#7FB6D6", "#3A86B7", "#0F5587", "#08304F"])
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(2.75 * len(panels) + 0.85, 3.3), layout="compressed")
        axes = np.atleast_1d(fig.subplots(1, len(panels), sharex=True, sharey=True))
        for ax, panel in zip(axes, panels, strict=True):
            image = _cap_square(ax, panel, n, ramp)
        axes[0].set_ylabel(r"$\pi_\theta$", fontsize=12, rotation=0, labelpad=10, va="center")
        bar = fig.colorbar(image, ax=list(axes), aspect=22, pad=0.02, ticks=[0, 0.25, 0.5, 0.75, 1])
        bar.set_label("Cap")
        bar.ax.set_yticklabels(["0", "¼", "½", "¾", "1"])
        bar.outline.set_linewidth(0.6)
    return fig


def _cap_square(ax, panel: Panel, n: int, ramp):
    x = (np.arange(n) + 0.5) / n
    mu, p = np.meshgrid(x, x)
    cap = capacity(panel.objective, p, mu, panel.adv, **panel.hp)
    dead = cap == 0
    square = {"extent": (0, 1, 0, 1), "origin": "lower", "interpolation": "nearest"}
    image = ax.imshow(np.ma.masked_array(cap, dead), cmap=ramp, vmin=0, vmax=1, **square)
    if dead.any():
        grey = ax.contourf(mu, p, dead, levels=[0.5, 1.5], colors=["#EDEDED"], hatches=["////"])
        grey.set(edgecolor="#B5B5B5", linewidth=0)
    down = panel.adv < 0
    regions = {"Upper Clip": panel.adv > 0, "Lower Clip": down & (p < mu), "Dual Clip": down & (p > mu)}
    for label, region in regions.items():
        if at := _room(dead & region):
            box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
            ax.text(*at, label, ha="center", va="center", fontsize=9, bbox=box)
    if ax.get_subplotspec().is_first_col():
        ax.text(0.6, 0.57, "on-policy", rotation=45, rotation_mode="anchor", ha="center", va="top", fontsize=8)
    ax.plot([0, 1], [0, 1], color=INK, lw=0.7, dashes=(4, 3), alpha=0.65)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    ax.set_yticks([0, 0.5, 1], ["0", "½", "1"])
    ax.set_xlabel(r"$\pi_\mathrm{old}$", fontsize=12, labelpad=1)
    ax.set_title(f"{panel.title}\n", fontsize=10.5, fontweight="bold", pad=5, linespacing=1.35)
    ax.text(0.5, 1.03, panel.subtitle, transform=ax.transAxes, ha="center", va="bottom", fontsize=8.5, color="#555555")
    return image


def _room(region, width=0.28, height=0.09) -> tuple[float, float] | None:
    """Centre of the largest box, of a label's proportions, inside the region; None if a label does not fit."""
    n = len(region)
    area = np.pad(region, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    for scale in np.arange(3, 0.999, -0.05):
        h, w = round(height * scale * n), round(width * scale * n)
        if h > n or w > n:
            continue
        full = area[h:, w:] - area[:-h, w:] - area[h:, :-w] + area[:-h, :-w] == h * w
        if full.any():
            y, x = np.argwhere(full).mean(0)
            return (x + w / 2) / n, (y + h / 2) / n
    return None


# ---- gradient weights ------------------------------------------------------------------------------------------------
def weights(*objectives: str | Objective | Callable, mu: float = 0.1, **hp) -> "Figure":
    """dJ/dlp against the ratio r (s for sequence level), for A = +1 and A = -1, one labelled line per objective.

    mu   π_old(o_t), for those whose weight depends on it (r then ends at 1/mu)
    hp   each goes to the objectives and losses that have it
    The weight is that of a response of one token, alone in its batch. Raises InputError for objectives whose weight
    depends on the batch, and whatever `capacity` raises.
    """
    import matplotlib
    from matplotlib.figure import Figure

    chosen = of_all(objectives, hp)
    colors = [PALETTE[i % len(PALETTE)] for i in range(len(chosen))]
    reach = max(_reach(c, mu) for c in chosen)
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(9.6, 3.5))
        for i, A in enumerate((1.0, -1.0)):
            ax = fig.add_axes((0.075 + 0.485 * i, 0.15, 0.295, 0.73))
            lines = [_line(c, A, mu, reach) for c in chosen]
            same = [[j for j, (_, v) in enumerate(lines) if np.array_equal(v, w)] for _, w in lines]
            ends = []
            for j, (c, color, (r, w)) in enumerate(zip(chosen, colors, lines, strict=True)):
                turn, of = same[j].index(j), len(same[j])  # equal curves take turns in dashes
                dash = "-" if of == 1 else (6 * turn, (6, 6 * (of - 1)))
                ax.plot(r, w, color=color, lw=1.8, ls=dash, dash_capstyle="butt")
                ends.append((w[-1], c.name, color))
            _ratio_axis(ax, reach)
            low, high = min(0, *(e[0] for e in ends)), max(0, *(e[0] for e in ends))
            bound = np.clip(max(abs(low), abs(high)), 1.25, 5) * 1.08
            ax.set_ylim(*((-0.06 * bound, bound) if A > 0 else (-bound, 0.06 * bound)))
            ax.axhline(0, color="#666666", lw=0.6, zorder=0)
            ax.set_title(f"A = {A:+.0f}".translate(MINUS), loc="left", fontsize=10, fontweight="bold", color=INK)
            unit = "s" if all(c.level == "sequence" for c in chosen) else "r"
            note = f"  (mu = {mu:g})" if any(c.reads_mu for c in chosen) else ""
            ax.set_xlabel((f"ratio {unit}" if reach == WIDE else f"({unit} − 1) · 10$^4$") + note)
            _label_ends(ax, ends)
        fig.axes[0].set_ylabel("gradient weight  dJ/dlp")
    return fig


def _label_ends(ax, ends):
    """Names to the right of the axes, in their line's colour, moved apart where they would touch."""
    (low, high), step = ax.get_ylim(), 0.062
    at = [float(np.clip((y - low) / (high - low), 0, 1)) for y, *_ in ends]
    order = sorted(range(len(ends)), key=lambda i: (at[i], -i))
    spread = np.array([at[i] for i in order])
    for _ in range(200):
        for a in range(len(spread) - 1):
            if (lack := step - (spread[a + 1] - spread[a])) > 1e-9:
                spread[a : a + 2] += (-lack / 2, lack / 2)
        spread -= max(spread[-1] - 1, 0)
        spread += max(-spread[0], 0)
    for i, y in zip(order, spread, strict=True):
        _, name, color = ends[i]
        ax.plot([1, 1.045], [at[i], y], transform=ax.transAxes, color=color, lw=0.8, clip_on=False)
        ax.text(1.06, y, name, transform=ax.transAxes, color=color, va="center", fontsize=9)


# ---- all of them -----------------------------------------------------------------------------------------------------
def atlas() -> "Figure":
    """Every registered objective at its default hyperparameters, from the widest Cap for A > 0 to the narrowest.

    Left of each pair the gradient weight against r (mu = 0.1), right the Cap of a token at π_θ = π_old = mu against mu.
    Objectives with the same weight share a pair; those that have no weight of a token by itself are named below.
    """
    import matplotlib
    from matplotlib.figure import Figure

    groups, absent = _groups()
    dapo = get("dapo")
    reference = [(_line(of(dapo), A, 0.1, WIDE), capacity(dapo, ATLAS_MU, ATLAS_MU, A)) for A in (1.0, -1.0)]
    columns, pair, head, foot = 4, (2.72, 1.62), 0.72, 0.5
    rows = -(-len(groups) // columns)
    width, height = columns * pair[0] + 0.35, head + rows * pair[1] + foot
    with matplotlib.rc_context(STYLE | {"font.size": 8, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5}):
        fig = Figure(figsize=(width, height))
        inch = lambda x, y, w, h: fig.add_axes((x / width, y / height, w / width, h / height))
        for i, group in enumerate(groups):
            x, y = 0.42 + i % columns * pair[0], height - head - (i // columns + 1) * pair[1]
            left, right = inch(x, y + 0.32, 0.98, 0.82), inch(x + 1.5, y + 0.32, 0.82, 0.82)
            compare = reference if group[0] != dapo and group[0].level in ("token", "free") else []
            _atlas_weight(left, group[0], [line for line, _ in compare])
            _atlas_cap(right, group[0], [cap for _, cap in compare])
            if i % columns == 0:
                left.set_ylabel("weight", labelpad=1)
                right.set_ylabel("Cap", labelpad=0)
            _heading(fig, group, x / width, (y + 1.2) / height, 0.135 / height)
        text = lambda y, s, **kw: fig.text(0.42 / width, y / height, s, **kw)
        text(height - 0.36, "What each objective does to a token", fontsize=14, fontweight="bold")
        _legend(fig, 0.42 / width, (height - 0.66) / height)
        reasons = "; ".join(f"{n} ({why})" for n, why in absent.items())
        order = "Widest Cap for A > 0 first; objectives of equal weight share a pair. Default hyperparameters."
        text(0.33, order, color="#555555")
        text(0.14, f"Not drawn, no weight of a token by itself: {reasons}." if absent else "", color="#555555")
    return fig


def _legend(fig, x, y):
    from matplotlib.artist import Artist
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea

    words = {
        "Left of each pair: gradient weight dJ/dlp against r,": INK,
        "A = +1 upward": UP,
        "and": INK,
        "A = −1 downward": DOWN,
        r"(mu = 0.1).  Right: Cap at $\pi_\theta$ = $\pi_\mathrm{old}$ = mu against mu.": INK,
        "Grey: dapo.": "#888888",
    }
    style = lambda color: {"color": color, "fontsize": 9, "fontweight": "normal" if color == INK else "bold"}
    areas: list[Artist] = [TextArea(word, textprops=style(color)) for word, color in words.items()]
    row = HPacker(children=areas, align="baseline", pad=0, sep=3.2)
    at = {"bbox_to_anchor": (x, y), "bbox_transform": fig.transFigure}
    fig.add_artist(AnchoredOffsetbox("lower left", child=row, pad=0, borderpad=0, frameon=False, **at))


def _heading(fig, group, x, y, line):
    names = [o.name for o in group]
    rest = ""
    for name in names[1:]:
        rest += ("  " if rest and len(rest.split("\n")[-1]) + len(name) < 40 else "\n" * bool(rest)) + name
    fig.text(x, y + line * len(rest.split("\n")) * bool(rest), names[0], fontsize=9.5, fontweight="bold")
    if rest:
        fig.text(x, y, rest, fontsize=7.5, color="#555555", va="baseline", linespacing=1.2)


def _groups() -> tuple[list[list[Objective]], dict[str, str]]:
    """Objectives of equal weight, widest Cap first; and those that have no Cap, with the reason."""
    absent = {n: why for n in names() if (why := obstacle(get(n)))}
    known: dict[tuple[str, bytes], list[Objective]] = {}
    r = np.exp(np.r_[np.linspace(-2, 2, 201), np.linspace(-1e-3, 1e-3, 201)])
    for o in (get(n) for n in names() if n not in absent):
        probe = [of(o)(r, A, mu) for A in (1.0, -1.0) for mu in (0.01, 0.1)]
        unit = "token" if o.level == "free" else o.level
        known.setdefault((unit, np.round(probe, 9).tobytes()), []).append(o)
    groups = [sorted(g, key=lambda o: (o.name.count("_"), o.name)) for g in known.values()]
    width = lambda o, A: -round(float(capacity(o, 0.01, 0.01, A)), 9)
    return sorted(groups, key=lambda g: (width(g[0], 1), width(g[0], -1), g[0].level, g[0].name)), absent


def _atlas_weight(ax, o: Objective, grey):
    reach = _reach(of(o), 0.1)
    for line in grey:
        ax.plot(*line, color=GREY, lw=0.9, zorder=1)
    for A, color in ((1.0, UP), (-1.0, DOWN)):
        r, w = _line(of(o), A, 0.1, reach)
        ax.fill_between(r, w, color=color, alpha=0.16, lw=0)
        ax.plot(r, w, color=color, lw=1.3, zorder=2)
    ax.axhline(0, color="#666666", lw=0.5, zorder=0)
    ax.axvline(1 if reach == WIDE else 0, color="#CCCCCC", lw=0.5, zorder=0)
    _ratio_axis(ax, reach)
    ax.set_ylim(-5.6, 5.6)
    ax.set_yticks([-5, -1, 1, 5], ["−5", "−1", "1", "5"])
    unit = {"token": "r", "free": "r", "sequence": "s", "trajectory": "S"}[o.level]
    ax.set_xlabel(unit if reach == WIDE else f"({unit} − 1) · 10$^4$", labelpad=0.5)


def _atlas_cap(ax, o: Objective, grey):
    for cap in grey:
        ax.loglog(ATLAS_MU, cap, color=GREY, lw=0.9, zorder=1)
    for A, color in ((1.0, UP), (-1.0, DOWN)):
        cap = capacity(o, ATLAS_MU, ATLAS_MU, A)
        ax.loglog(ATLAS_MU, cap, color=color, lw=1.1 if A > 0 else 2, zorder=3 if A > 0 else 2)
    ax.set(xlim=(1e-4, 1), ylim=(1e-6, 2))
    ax.set_xticks([1e-4, 1e-2, 1], ["10⁻⁴", "10⁻²", "1"])
    ax.set_yticks([1e-6, 1e-3, 1], ["10⁻⁶", "10⁻³", "1"])
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
    of = {"sequence": "mu, geometric mean", "trajectory": "mu of the response"}
    ax.set_xlabel(of.get(o.level, "mu"), labelpad=0.5)


# ---- common ----------------------------------------------------------------------------------------------------------
def _line(curve: Curve, A: float, mu: float, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """(r, weight), with both sides of every jump; r - 1 in 1e-4 where the reach is narrow."""
    r = np.exp(np.linspace(-reach, reach, 61))
    jumps = np.array([j.r for j in curve.jumps(A, mu, _near(reach))])
    r = np.sort(np.r_[r, 1, jumps * (1 - 1e-9), jumps * (1 + 1e-9)])
    r = r[r * mu <= 1] if curve.reads_mu else r
    w = curve(r, A, mu)
    flat = np.r_[False, (w[:-2] == w[1:-1]) & (w[1:-1] == w[2:]), False]
    return (r if reach == WIDE else (r - 1) * 1e4)[~flat], w[~flat]


def _near(reach: float) -> np.ndarray:
    return GRID[abs(np.log(GRID)) < reach]


def _reach(curve: Curve, mu: float) -> float:
    """Half-width in log r: a few windows where the window is narrow, else a factor of 6."""
    ends = [abs(np.log(j.r)) for A in (1.0, -1.0) for j in curve.jumps(A, mu, _near(WIDE)) if j.end]
    return 2.6 * max(ends) if ends and max(ends) < 0.02 else WIDE


def _ratio_axis(ax, reach):
    ax.spines[["top", "right"]].set_visible(False)
    if reach == WIDE:
        ax.set_xscale("log")
        ax.set_xlim(np.exp(-reach), np.exp(reach))
        ax.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
        ax.minorticks_off()
    else:
        end = np.expm1(reach) * 1e4
        tick = float(f"{end * 0.75:.0e}")
        ax.set_xlim(-end, end)
        ax.set_xticks([-tick, 0, tick], [f"−{tick:g}", "0", f"{tick:g}"])


def _settings(curve: Curve) -> list[str]:
    return [f"{GREEK.get(k, k)} = {v}" for k, v in curve.settings.items() if v is not None and k != "beta"]
