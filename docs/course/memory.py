# SPDX-License-Identifier: Apache-2.0
"""The picture of docs/course/log-probs.md, from benchmarks/hidden.json: where the memory
of log-probabilities goes, and how it grows. `python -m docs.course.memory` draws it
again after a new record.
"""

import re
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs import record
from figures.make import save
from upref.weights.plots import DOWN, STYLE, UP

FILE = Path(__file__).parent / "pictures/00-memory.svg"
MEASURED = Path(__file__).parents[2] / "benchmarks/hidden.json"


class Measured(NamedTuple):
    """A line of the record: N tokens, V ids, and MB beyond dh and dW."""

    name: str
    N: int
    V: int
    MB: int


def title(ax: Axes, text: str) -> None:
    """Set the title of a panel."""
    ax.set_title(text, loc="left", fontsize=9.5, fontweight="bold")


def picture() -> Figure:
    """Draw two panels: memory by function at the largest vocabulary, and memory by
    tokens at a smaller one.
    """
    text = "\n".join(record.rows(MEASURED)).split("; log-probs alone")[0]
    lines = re.findall(r"^(\S.*?) +(\d+) +(\d+) +\d+ +(\d+) ", text, re.M)
    rows = [Measured(name, int(N), int(V), int(MB)) for name, N, V, MB in lines]
    largest = max(row.V for row in rows)
    full = [row for row in rows if row.V == largest]
    grown = [row for row in rows if row.V != largest]
    fig = Figure(figsize=(8.4, 2.6), layout="constrained")
    fig.get_layout_engine().set(wspace=0.08)
    left, right = fig.subplots(1, 2)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    for i, row in enumerate(full):
        left.barh(i, row.MB, color=UP if row.name.startswith("upref") else DOWN)
        left.text(row.MB, i, f" {row.MB:,} MB", va="center", fontsize=8.5)
    left.set(
        yticks=range(len(full)),
        yticklabels=[row.name for row in full],
        xlim=(0, 1.25 * max(row.MB for row in full)),
    )
    left.set(xlabel="MB beyond the inputs, dh and dW")
    left.invert_yaxis()
    title(left, f"{full[0].N:,} tokens, vocabulary {largest:,}")
    for name, c in (("naive", DOWN), ("upref.hidden", UP)):
        N = [row.N for row in grown if row.name == name]
        MB = [row.MB for row in grown if row.name == name]
        right.plot(N, MB, "o-", color=c, lw=2)
        right.annotate(
            f"{name}  ",
            (N[-1], MB[-1]),
            (0, 4),
            textcoords="offset points",
            color=c,
            fontsize=9,
            ha="right",
            va="bottom",
        )
    right.set(xlabel="tokens", ylabel="MB beyond the inputs, dh and dW", ylim=(0, None))
    title(right, f"vocabulary {grown[0].V:,}")
    return fig


def main(file: Path = FILE) -> None:
    """Draw the picture into a file."""
    with matplotlib.rc_context(STYLE):
        save(picture(), file)


if __name__ == "__main__":
    main()
