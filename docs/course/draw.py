# SPDX-License-Identifier: Apache-2.0
"""The pictures of the course, drawn by the functions that train: `python -m docs.course.draw [NAME...]`.

A function below is a picture; NN_name is written to pictures/NN-name.svg. Look at what you have drawn.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import upref
from figures.make import save
from upref import advantages
from upref.plots import DOWN, GREY, INK, PALETTE, STYLE, UP

FOLDER = Path(__file__).parent / "pictures"


def axes(n: int, width=3.2, height=2.6):
    """(figure, n axes side by side)."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width * n, height), layout="constrained")
    fig.get_layout_engine().set(wspace=0.08)
    found = list(fig.subplots(1, n, squeeze=False)[0])
    for ax in found:
        ax.spines[["top", "right"]].set_visible(False)
    return fig, found


def title(ax, text):
    ax.set_title(text, loc="left", fontsize=9.5, fontweight="bold")


# ---- the pictures ----------------------------------------------------------------------------------------------------
def l01_push():
    """What one sample does to the three logits."""
    z = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    pi = z.softmax(0)
    fig, panels = axes(3, 2.5, 2.5)
    cases = (
        ("A was drawn, reward +1", 0, 1.0),
        ("C was drawn, reward +1", 2, 1.0),
        ("A was drawn, reward −1", 0, -1.0),
    )
    for ax, (text, drawn, R) in zip(panels, cases, strict=True):
        leaf = z.clone().requires_grad_()
        upref.get("reinforce").surrogate(leaf.log_softmax(0)[drawn], leaf.log_softmax(0)[drawn].detach(), R).backward()
        push = leaf.grad
        ax.bar(range(3), push, color=[UP if g > 0 else DOWN for g in push], width=0.6)
        for i, g in enumerate(push):
            ax.text(i, g + (0.05 if g > 0 else -0.05), f"{g:+.2f}".replace("-", "−"), ha="center", fontsize=8,
                    va="bottom" if g > 0 else "top")  # fmt: skip
        ax.axhline(0, color="#666666", lw=0.6)
        ax.set(ylim=(-1.15, 1.15), yticks=[-1, 0, 1], xticks=range(3))
        ax.set_xticklabels([f"{n}\nπ = {p:.2f}" for n, p in zip("ABC", pi, strict=True)])
        title(ax, text)
    panels[0].set_ylabel("push on the logit")
    return fig


def l02_advantage():
    """The advantage of a right and of a wrong answer, by how many of 8 are right."""
    G = 8
    k = range(1, G)
    right, wrong = [], []
    for n in k:
        A = advantages.group_norm((torch.arange(G) < n).double(), torch.zeros(G, dtype=torch.int64))
        right.append(float(A[0]))
        wrong.append(float(A[-1]))
    fig, (ax,) = axes(1, 5.6, 2.9)
    ax.bar([n - 0.18 for n in k], right, 0.34, color=UP, label="a right answer")
    ax.bar([n + 0.18 for n in k], wrong, 0.34, color=DOWN, label="a wrong answer")
    for n in (0, G):
        ax.text(n, 0.12, "nothing", ha="center", fontsize=8, color="#555555")
        ax.plot([n - 0.3, n + 0.3], [0, 0], color=INK, lw=2.5)
    ax.axhline(0, color="#666666", lw=0.6)
    ax.set(xlabel=f"right answers among the {G} to one prompt", ylabel="advantage A", xticks=range(G + 1))
    ax.legend(frameon=False, loc="upper right", fontsize=8.5)
    return fig


def l03_ratio():
    """What importance sampling does to three samples' weights, and what it costs."""
    old = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    new = torch.tensor([0.35, 0.25, 0.4], dtype=torch.float64)
    r = new / old
    fig, (left, right) = axes(2, 3.7, 2.8)
    x = np.arange(3)
    left.bar(x - 0.18, old, 0.34, color=GREY, label=r"$\pi_\mathrm{old}$ drew them")
    left.bar(x + 0.18, new, 0.34, color=PALETTE[0], label=r"$\pi_\theta$, now")
    for i in range(3):
        left.text(i, max(old[i], new[i]) + 0.02, f"r = {r[i]:.3g}", ha="center", fontsize=8.5, fontweight="bold")
    left.set(xticks=x, ylim=(0, 0.85), ylabel="probability")
    left.set_xticklabels(list("ABC"))
    left.legend(frameon=False, fontsize=8, loc="upper right")
    title(left, "each sample counts r")
    p = torch.linspace(0.01, 0.98, 200, dtype=torch.float64)
    for mu, c in ((0.3, PALETTE[0]), (0.1, PALETTE[4]), (0.01, PALETTE[1])):
        spread = (p**2 / mu + (1 - p) ** 2 / (1 - mu) - 1).sqrt()
        right.plot(p, spread, color=c, lw=1.8)
        right.text(0.99, float(spread[-1]), rf"$\pi_\mathrm{{old}}$ = {mu:g}", color=c, fontsize=8.5, va="center")
        right.plot([mu], [0], "o", color=c, ms=4, clip_on=False)
    right.set(xlim=(0, 1), ylim=(0, None), xlabel=r"$\pi_\theta$ of that token now", ylabel="standard deviation of r")
    title(right, "the price: r spreads")
    return fig


PICTURES = {
    name[1:].replace("_", "-", 1): f
    for name, f in list(globals().items())
    if name.startswith("l") and name[1:3].isdigit()
}


def main(*names: str, folder: Path = FOLDER):
    import matplotlib

    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        if not names or name in names:
            with matplotlib.rc_context(STYLE):
                save(draw(), folder / f"{name}.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
