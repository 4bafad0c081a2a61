# SPDX-License-Identifier: Apache-2.0
"""What UP does at each dose of drift, and its two parts: the missing upper clip, and
the self-anchor.
"""

from functools import cache
from math import exp
from typing import NamedTuple

import numpy as np

from repro.mini.round2 import rule
from repro.mini.round2.rule import Found
from repro.mini.study import plan
from repro.mini.study.plan import Contrast
from repro.mini.study.results import Record
from upref.weights.plots import PALETTE, STYLE

NAMES = ("dose_low", "dose_middle", "dose_high")
# of the first three pairs: UP's, that of no upper clip, the rest
COLOURS = (PALETTE[1], "#7B3294", PALETTE[2])
UP, CLIP, ANCHOR = (
    ("up_dapo", "dapo"),
    ("dapo_no_upper_clip", "dapo"),
    ("up_dapo", "dapo_no_upper_clip"),
)
PAIRS = {
    "UP-DAPO − DAPO": UP,
    "of this, no upper clip": CLIP,
    "of this, self-anchor": ANCHOR,
    "IS without any clip − DAPO": ("is_pg", "dapo"),
    "REINFORCE off-policy − DAPO": ("reinforce_off_policy", "dapo"),
}


class Row(NamedTuple):
    name: str
    metric: str
    at: str
    ratio: bool = False
    drawn: bool = False


ROWS = (
    Row("entropy, nats, mean of training", "entropy", "mean", drawn=True),
    Row("Avg@32, points, end", "avg", "last", drawn=True),
    Row("Avg@32, points, area", "avg", "area"),
    Row("Avg@32, points, peak", "avg", "peak"),
    Row("Maj@32, points, end", "maj", "last"),
    Row("Best@32, points, end", "best", "last", drawn=True),
    Row("training reward, points, end", "reward", "last"),
    Row("KL to the base, ratio, end", "kl_base", "last", ratio=True, drawn=True),
    Row("gradient norm, ratio, mean", "grad_norm", "mean", ratio=True),
    Row("largest gradient norm, ratio", "grad_norm_max", "max", ratio=True),
)


def asked() -> list[Contrast]:
    """All that the table, the page and the figure ask of a run."""
    of = lambda arms, row: Contrast(
        arms, row.metric, row.at, more_than=1.0 if row.ratio else 0.0, ratio=row.ratio
    )
    return [of(arms, row) for arms in PAIRS.values() for row in ROWS]


def found(
    name: str, records: dict[str, Record], arms: tuple[str, ...], row: Row
) -> Found:
    seeds, keys = runs(name)
    known: rule.Runs = {run: records.get(key) for run, key in keys.items()}
    c = Contrast(
        arms, row.metric, row.at, more_than=1.0 if row.ratio else 0.0, ratio=row.ratio
    )
    return rule.measure(c, known, seeds)


@cache  # an experiment is read once, not for every cell
def runs(name: str) -> tuple[list[int], dict[tuple[str, int], str]]:
    e = plan.load(name)
    return e.seeds, {(arm, seed): s.key for arm, seed, s in e.runs()}


def clipped(name: str, records: dict[str, Record]) -> Found:
    return found(name, records, ("dapo",), Row("", "clip_pos_high", "mean"))


def pairs(name: str, records: dict[str, Record]) -> int:
    return found(name, records, UP, ROWS[0]).n


def table(records: dict[str, Record]) -> str:
    """Effects with 95 % intervals, as they stand."""
    shown = [name for name in NAMES if clipped(name, records).n]
    if not shown:
        return "No run has finished.\n"
    share = lambda name: f"{100 * clipped(name, records).mean:.1f} % clipped"
    heads = [f"{short(n)}: {share(n)}, {n_seeds(pairs(n, records))}" for n in shown]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(shown) + 1) + "|"]
    for title, arms in PAIRS.items():
        if not any(found(name, records, arms, ROWS[0]).n for name in shown):
            continue
        lines.append(f"| **{title}** |" + " |" * len(shown))
        for row in ROWS:
            cells = [cell(found(name, records, arms, row), row) for name in shown]
            lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return (
        "\n".join(lines)
        + "\n\nMeans and 95 % intervals. An interval without 0 (or without 1) is no verdict.\n"
    )


def n_seeds(n: int) -> str:
    return f"{n} seed{'s' if n != 1 else ''}"


def cell(f: Found, row: Row) -> str:
    if not f.n:
        return ""
    k, form = (
        (1, ".2f")
        if row.ratio
        else (1, "+.3f")
        if row.metric == "entropy"
        else (100, "+.1f")
    )
    number = lambda x: f"{exp(min(x, 700)) if row.ratio else k * x:{form}}"
    return f"{'×' if row.ratio else ''}{number(f.mean)}" + (
        f" [{number(f.low)}, {number(f.high)}]" if f.n > 1 else ""
    )


def short(name: str) -> str:
    return name.removeprefix("dose_")


def heading(name: str, records: dict[str, Record]) -> str:
    """The dose, and whether DAPO itself learns there."""
    dapo = clipped(name, records)
    if not dapo.n:
        return short(name)
    gain = found(name, records, ("dapo",), Row("", "reward", "gain")).mean
    return f"{short(name)}: {100 * dapo.mean:.1f} % clipped, DAPO's reward {100 * gain:+.1f} in training"


def coverage(name: str, records: dict[str, Record]) -> tuple[float, float, float, int]:
    """Best@32, %: before training, DAPO's and UP-DAPO's at the end, means over the
    seeds that have both.
    """
    seeds, keys = runs(name)
    both = [
        [records.get(keys[arm, seed]) for arm in ("dapo", "up_dapo")] for seed in seeds
    ]
    pairs = [
        [r["evals"]["test/top_p_0.7"]["best"] for r in pair if r]
        for pair in both
        if all(pair)
    ]
    if not pairs:
        return 0.0, 0.0, 0.0, 0
    mean = lambda arm, at: 100 * float(np.mean([pair[arm][at] for pair in pairs]))
    return mean(0, 0), mean(0, -1), mean(1, -1), len(pairs)


def figure(records: dict[str, Record]):
    """A matplotlib Figure, every seed a dot; None while there is nothing to draw."""
    shown = [name for name in NAMES if pairs(name, records)]
    if not shown:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [row for row in ROWS if row.drawn]
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(11.5, 3.4), layout="constrained")
        fig.suptitle(
            "UP-DAPO against DAPO by dose: every seed, means, 95 % intervals",
            fontsize=11,
            fontweight="bold",
        )
        for ax, row in zip(np.ravel(fig.subplots(1, len(drawn))), drawn, strict=True):
            for i, (label, arms) in enumerate(list(PAIRS.items())[:3]):
                for x, name in enumerate(shown):
                    f = found(name, records, arms, row)
                    _dots(
                        ax,
                        x + 0.24 * (i - 1),
                        f,
                        row,
                        COLOURS[i],
                        label if x == 0 else "",
                    )
            ax.axhline(1 if row.ratio else 0, color="#888888", lw=0.8, zorder=0)
            ax.set_xticks(
                range(len(shown)),
                [f"{100 * clipped(n, records).mean:.1f} %" for n in shown],
            )
            ax.set_xlim(-0.5, len(shown) - 0.5)
            ax.set_xlabel("positive tokens that DAPO clips")
            ax.set_title(row.name, loc="left", fontsize=9)
            ax.spines[["top", "right"]].set_visible(False)
        handles, labels = fig.axes[0].get_legend_handles_labels()
        fig.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=8,
        )
    return fig


def _dots(ax, x: float, f: Found, row: Row, colour: str, label: str) -> None:
    if not f.n:
        return
    scale = (
        np.exp
        if row.ratio
        else lambda y: (1 if row.metric == "entropy" else 100) * np.asarray(y)
    )
    ax.plot(
        [x] * f.n,
        scale(np.array(f.values)),
        "o",
        ms=3.5,
        color=colour,
        alpha=0.4,
        mew=0,
    )
    ax.plot([x - 0.08, x + 0.08], [scale(f.mean)] * 2, color=colour, lw=2, label=label)
    if f.n > 1:
        ax.plot([x] * 2, scale(np.array([f.low, f.high])), color=colour, lw=1)
