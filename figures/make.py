# SPDX-License-Identifier: Apache-2.0
"""Writes the figures that README shows: `python figures/make.py [folder]`. Equal library versions give equal bytes."""

import io
import re
import sys
from pathlib import Path

import matplotlib

from upref.weights.atlas import atlas
from upref.weights.plots import Panel, cap_panels


def cap(eps_low=0.2, eps_high=0.28, c=3.0):
    """The paper's Fig. 1, with its bounds of Table A1 and verl's default c, which the paper leaves open."""
    low, high, dual = rf"ε$_\mathrm{{low}}$ = {eps_low:g}", rf"ε$_\mathrm{{high}}$ = {eps_high:g}", f"c = {c:g}"
    bounds = {"eps_low": eps_low, "c": c}
    return cap_panels([
        Panel("(a) DAPO, A > 0", "dapo", 1, bounds | {"eps_high": eps_high}, high),
        Panel("(b) UP-DAPO, A > 0", "up_dapo", 1, bounds, r"no clip: Cap = 1 − $\pi_\theta$"),
        Panel("(c) DAPO and UP-DAPO, A < 0", "up_dapo", -1, bounds, f"{low}, {dual}"),
    ])  # fmt: skip


def save(fig, path):
    """SVG without date, random ids or font dependence; coordinates to 0.01 pt."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "upref", "svg.fonttype": "path"}):
        fig.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    short = lambda m: f"{float(m[0]):.2f}"
    number = re.compile(r"-?\d+\.\d{3,}")
    svg = re.sub(r'<!--.*?-->|(?<=<g) id="[^"]*"', "", text.getvalue())
    svg = re.sub(r'\b[xyd]="[^"]*"', lambda m: number.sub(short, m[0]), svg)  # not in scale(...)
    Path(path).write_text("\n".join(s.strip() for s in svg.splitlines() if s.strip()) + "\n")


def main(folder=Path(__file__).parent):
    save(cap(), Path(folder) / "cap.svg")
    save(atlas(), Path(folder) / "atlas.svg")


if __name__ == "__main__":
    main(*sys.argv[1:2])
