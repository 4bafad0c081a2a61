# SPDX-License-Identifier: Apache-2.0
"""Writes the figures that README and docs/objectives.md show:
`python figures/make.py [FOLDER]`.

Equal library versions give equal bytes.
"""

import argparse
import io
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from upref import interrupt
from upref.files import write_atomically
from upref.weights.atlas import atlas
from upref.weights.capacity import capacity
from upref.weights.plots import PALETTE, STYLE, Panel, cap_panels


def cap(eps_low=0.2, eps_high=0.28, c=3.0):
    """Draw the paper's Fig. 1, with its bounds of Table A1 and verl's default c, which
    the paper leaves open.
    """
    low = rf"ε$_\mathrm{{low}}$ = {eps_low:g}"
    high = rf"ε$_\mathrm{{high}}$ = {eps_high:g}"
    bounds = {"eps_low": eps_low, "c": c}
    return cap_panels(
        [
            Panel("(a) DAPO, A > 0", "dapo", 1, bounds | {"eps_high": eps_high}, high),
            Panel(
                "(b) UP-DAPO, A > 0",
                "up_dapo",
                1,
                bounds,
                r"no clip: Cap = 1 − $\pi_\theta$",
            ),
            Panel(
                "(c) DAPO and UP-DAPO, A < 0",
                "up_dapo",
                -1,
                bounds,
                f"{low}, dual clip at c = {c:g}",
            ),
        ]
    )


def rare():
    """Draw the Cap maps of objectives whose bound widens for rare tokens: RIPO, DPPO
    and UP at their papers' defaults, A > 0.
    """
    return cap_panels(
        [
            Panel(
                "(a) RIPO, A > 0",
                "ripo",
                1,
                {},
                r"$\pi_\theta \leq \pi_\mathrm{old}$ + √(0.05 $\pi_\mathrm{old}$)",
            ),
            Panel(
                "(b) DPPO-TV, A > 0",
                "dppo_tv",
                1,
                {},
                r"$\pi_\theta \leq \pi_\mathrm{old} + 0.15$",
            ),
            Panel(
                "(c) UP-DAPO, A > 0",
                "up_dapo",
                1,
                {},
                r"no clip: Cap = 1 − $\pi_\theta$",
            ),
        ]
    )


def rare_lines():
    """Draw the Cap of a token at π_θ = π_old against π_old, A > 0: the slope shows how
    a bound treats rare tokens.
    """
    objectives = (
        "dapo",
        "cfpo",
        "wapo",
        "ripo",
        "bandpo_chi2",
        "bandpo_kl",
        "dppo_tv",
        "up_dapo",
    )
    mu = np.logspace(-6, np.log10(0.5), 60)
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(6.4, 3.8), layout="constrained")
        ax = fig.add_subplot()
        for name, color in zip(objectives, PALETTE, strict=True):
            ax.loglog(
                mu,
                capacity(name, mu, mu),
                color=color,
                lw=1.5,
                label=name,
                ls="--" if name == "cfpo" else "-",
            )
        ax.set(xlabel=r"$\pi_\mathrm{old}(o_t)$", ylabel="Cap, A > 0", ylim=(1e-7, 2))
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    return fig


def save(fig, path):
    """Write a figure as SVG without date, random ids or font dependence, so that equal
    figures are equal files; coordinates are rounded to 0.01 pt.

    Args:
        fig: of matplotlib.
        path: of the file, in a folder that exists.
    """
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "upref", "svg.fonttype": "path"}):
        fig.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r'<!--.*?-->|(?<=<g) id="[^"]*"', "", text.getvalue())
    # not in scale(...)
    svg = re.sub(r'\b[xyd]="[^"]*"', with_short_numbers, svg)
    lines = [line.strip() for line in svg.splitlines()]
    write_atomically(path, "\n".join(line for line in lines if line) + "\n")


LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")


def with_short_numbers(match):
    """Return the text of a match, with two digits after the point of each number."""
    return LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}", match[0])


def main(folder=Path(__file__).parent):
    """Write the four figures into the folder."""
    save(cap(), Path(folder) / "cap.svg")
    save(atlas(), Path(folder) / "atlas.svg")
    save(rare(), Path(folder) / "rare.svg")
    save(rare_lines(), Path(folder) / "rare_lines.svg")


def command(arguments):
    """Parse the command line, and write the figures.

    Raises:
        SystemExit: wrong arguments, or no such folder.
    """
    parser = argparse.ArgumentParser(
        prog="python figures/make.py",
        description="Write the figures that README and docs/objectives.md show.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(__file__).parent,
        metavar="FOLDER",
        help="where they are written, an existing folder (default: figures/)",
    )
    folder = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.error(f"there is no folder {folder}")
    main(folder)


if __name__ == "__main__":
    interrupt.handled("figures/make.py")
    command(sys.argv[1:])
