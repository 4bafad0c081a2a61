# SPDX-License-Identifier: Apache-2.0
"""The pictures of the course, drawn by the functions that train:
`python -m docs.course.draw [NAME...]`.

A function below is a picture; NN_name is written to pictures/NN-name.svg. Look at what
you have drawn.
"""

import math
import re
import sys
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import upref
from docs import record
from docs.course import runs
from figures.make import save
from repro.exact.flow import path
from repro.exact.task import bandit
from upref import advantages, kl
from upref.aggregation import Totals, row_weights
from upref.step import TorchModel
from upref.step.compare.case import (
    FLOAT32_BOUND,
    build_case,
    compare,
    make_goal,
    perturbed,
    run_step,
)
from upref.verify import kl as verify_kl
from upref.weights.batches import LOG_R
from upref.weights.plots import DOWN, GREY, INK, PALETTE, STYLE, UP
from upref_course.lessons.around_the_loss import step
from upref_course.lessons.reading_a_run import KEY

FOLDER = Path(__file__).parent / "pictures"


def axes(n: int, width=3.2, height=2.6):
    """A figure, and its n axes side by side."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width * n, height), layout="constrained")
    fig.get_layout_engine().set(wspace=0.08)
    panels = list(fig.subplots(1, n, squeeze=False)[0])
    for ax in panels:
        ax.spines[["top", "right"]].set_visible(False)
    return fig, panels


def title(ax, text):
    ax.set_title(text, loc="left", fontsize=9.5, fontweight="bold")


# ---- the pictures --------------------------------------------------------------------
def l00_loop():
    """One turn of the training loop, as seven boxes in a ring."""
    boxes = [
        "prompts",
        "sample G responses\nto each prompt",
        "verify each:\nreward 1 or 0",
        "advantage:\nbetter than its group?",
        "split into\nmini-batches",
        "loss, gradient,\none update each",
        "sample the next turn\nfrom the new policy",
    ]
    places = [(0, 1), (1, 1), (2, 1), (3, 1), (3, 0), (2, 0), (1, 0)]
    fig, (ax,) = axes(1, 9, 2.8)
    ax.set(xlim=(-0.5, 3.5), ylim=(-0.45, 1.45), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    frame = {
        "boxstyle": "round,pad=0.5",
        "facecolor": "white",
        "edgecolor": GREY,
        "linewidth": 1.5,
    }
    drawn = [
        ax.text(
            x, y, text, ha="center", va="center", fontsize=9.5, color=INK, bbox=frame
        )
        for text, (x, y) in zip(boxes, places, strict=True)
    ]
    arrow = {
        "arrowstyle": "-|>",
        "color": INK,
        "linewidth": 1.5,
        "shrinkA": 2,
        "shrinkB": 2,
    }
    followers = [*pairwise(drawn), (drawn[-1], drawn[1])]
    for start, end in followers:
        ax.annotate(
            "",
            end.get_position(),
            start.get_position(),
            arrowprops=arrow
            | {"patchA": start.get_bbox_patch(), "patchB": end.get_bbox_patch()},
        )
    note = "every mini-batch of the turn,\nwhile the policy moves away\nfrom the one that sampled"
    ax.text(
        2.5,
        0.5,
        note,
        ha="center",
        va="center",
        fontsize=8.5,
        style="italic",
        color=INK,
    )
    return fig


def l00_memory():
    """Where the memory of log-probabilities goes, and how it grows:
    benchmarks/hidden.json.
    """
    file = Path(__file__).parents[2] / "benchmarks/hidden.json"
    text = "\n".join(record.rows(file)).split("; log-probs alone")[0]
    lines = re.findall(r"^(\S.*?) +(\d+) +(\d+) +\d+ +(\d+) ", text, re.M)
    rows = [Measured(name, int(N), int(V), int(MB)) for name, N, V, MB in lines]
    largest = max(row.V for row in rows)
    full = [row for row in rows if row.V == largest]
    grown = [row for row in rows if row.V != largest]
    fig, (left, right) = axes(2, 4.2, 2.6)
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


class Measured(NamedTuple):
    """A line of benchmarks/hidden.json: N tokens, V ids, and MB beyond dh and dW."""

    name: str
    N: int
    V: int
    MB: int


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
        upref.get("reinforce").surrogate(
            leaf.log_softmax(0)[drawn], leaf.log_softmax(0)[drawn].detach(), R
        ).backward()
        push = leaf.grad
        ax.bar(range(3), push, color=[UP if g > 0 else DOWN for g in push], width=0.6)
        for i, g in enumerate(push):
            ax.text(
                i,
                g + (0.05 if g > 0 else -0.05),
                f"{g:+.2f}".replace("-", "−"),
                ha="center",
                fontsize=8,
                va="bottom" if g > 0 else "top",
            )
        ax.axhline(0, color="#666666", lw=0.6)
        ax.set(ylim=(-1.15, 1.15), yticks=[-1, 0, 1], xticks=range(3))
        ax.set_xticklabels(
            [f"{n}\nπ = {p:.2f}" for n, p in zip("ABC", pi, strict=True)]
        )
        title(ax, text)
    panels[0].set_ylabel("push on the logit")
    return fig


def l02_advantage():
    """The advantage of a right and of a wrong answer, by how many of 8 are right."""
    G = 8
    k = range(1, G)
    right, wrong = [], []
    for n in k:
        A = advantages.group_norm(
            (torch.arange(G) < n).double(), torch.zeros(G, dtype=torch.int64)
        )
        right.append(float(A[0]))
        wrong.append(float(A[-1]))
    fig, (ax,) = axes(1, 5.6, 2.9)
    ax.bar([n - 0.18 for n in k], right, 0.34, color=UP, label="a right answer")
    ax.bar([n + 0.18 for n in k], wrong, 0.34, color=DOWN, label="a wrong answer")
    for n in (0, G):
        ax.text(n, 0.12, "nothing", ha="center", fontsize=8, color="#555555")
        ax.plot([n - 0.3, n + 0.3], [0, 0], color=INK, lw=2.5)
    ax.axhline(0, color="#666666", lw=0.6)
    ax.set(
        xlabel=f"right answers among the {G} to one prompt",
        ylabel="advantage A",
        xticks=range(G + 1),
    )
    ax.legend(frameon=False, loc="upper right", fontsize=8.5)
    return fig


def l02_maximizes():
    """By what factor the gradient of the mean reward is multiplied on average, by pass
    rate: rewards of 0 or 1, and responses of one length.
    """
    p = np.linspace(0.005, 0.995, 199)
    fig, (ax,) = axes(1, 5.6, 2.9)
    lines = [("leave_one_out", 4, "RLOO", GREY, "-")]
    lines += [("group_mean", 4, "Dr. GRPO, group of 4", INK, "--")]
    lines += [
        ("group_norm", G, f"GRPO, group of {G}", UP, f) for G, f in GROUPS.items()
    ]
    for estimator, G, label, color, style in lines:
        factor = factor_of_gradient(advantages.get(estimator), p, G)
        ax.plot(p, factor, color=color, ls=style, lw=1.8, label=label)
    ax.set(
        xlabel="pass rate of the prompt",
        ylabel="factor of the gradient",
        xlim=(0, 1),
        ylim=(0, 8),
    )
    ax.legend(frameon=False, loc="upper center", fontsize=8.5)
    return fig


GROUPS = {4: ":", 8: "--", 64: "-"}  # size of a group -> the style of its line


def factor_of_gradient(estimator, p, G: int):
    """E[A | right] - E[A | wrong] of one of G responses: the expected gradient over that
    of the mean reward. Of a response that is right with probability p, the mean of
    ∇log π is ∇p / p, and of one that is wrong -∇p / (1 - p).

    Args:
        estimator: of advantages, from rewards and groups.
        p: pass rates.
        G: the size of the group.
    """
    one_group = torch.zeros(G, dtype=torch.int64)
    factor = np.zeros_like(p)
    for k in range(G):  # right ones among the others
        others = [1.0] * k + [0.0] * (G - 1 - k)
        right, wrong = (
            float(estimator(torch.tensor([own, *others]).double(), one_group)[0])
            for own in (1.0, 0.0)
        )
        chance = math.comb(G - 1, k) * p**k * (1 - p) ** (G - 1 - k)
        factor += chance * (right - wrong)
    return factor


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
        left.text(
            i,
            max(old[i], new[i]) + 0.02,
            f"r = {r[i]:.3g}",
            ha="center",
            fontsize=8.5,
            fontweight="bold",
        )
    left.set(xticks=x, ylim=(0, 0.85), ylabel="probability")
    left.set_xticklabels(list("ABC"))
    left.legend(frameon=False, fontsize=8, loc="upper right")
    title(left, "each sample counts r times")
    p = torch.linspace(0.01, 0.98, 200, dtype=torch.float64)
    for mu, c in ((0.3, PALETTE[0]), (0.1, PALETTE[4]), (0.01, PALETTE[1])):
        spread = (p**2 / mu + (1 - p) ** 2 / (1 - mu) - 1).sqrt()
        right.plot(p, spread, color=c, lw=1.8)
        right.text(
            0.99,
            float(spread[-1]),
            rf"$\pi_\mathrm{{old}}$ = {mu:g}",
            color=c,
            fontsize=8.5,
            va="center",
        )
        right.plot([mu], [0], "o", color=c, ms=4, clip_on=False)
    right.set(
        xlim=(0, 1),
        ylim=(0, None),
        xlabel=r"$\pi_\theta$ of that token now",
        ylabel="standard deviation of r",
    )
    title(right, "the price: r spreads")
    return fig


def l04_clip():
    """DAPO's weight against r, for a good and a bad token."""
    fig, (left, right) = axes(2, 3.7, 2.8)
    _weight_of_dapo(left, A=1.0, bound=1.28, dead=(1.28, 2.5))
    left.text(1.9, 0.12, "clipped:\nno push", ha="center", fontsize=8.5, va="bottom")
    note = {"color": "#777777", "fontsize": 8.5, "va": "center"}
    left.text(0.15, 1.6, "not clipped\non this side", ha="left", **note)
    left.set(ylim=(-0.15, 2.5), ylabel="weight of ∇log π")
    title(left, "A = +1, a good token")
    _weight_of_dapo(right, A=-1.0, bound=0.8, dead=(0, 0.8))
    right.text(0.4, -1.3, "clipped:\nno push", ha="center", fontsize=8.5, va="top")
    right.text(1.95, -0.6, "not clipped\non this side", ha="center", **note)
    right.set(ylim=(-2.5, 0.15))
    title(right, "A = −1, a bad token")
    return fig


def _weight_of_dapo(ax, A: float, bound: float, dead: tuple[float, float]):
    """DAPO's weight against r, and the weight without a clip.

    Args:
        ax: the panel.
        A: the advantage.
        bound: at which the weight jumps to 0.
        dead: where it is 0.
    """
    r = np.linspace(0.01, 2.5, 500)
    w = upref.get("dapo").weight(r, np.full_like(r, A))
    ax.plot(r, A * r, color=GREY, lw=1.2, ls=(0, (4, 3)))
    for part in (r < bound, r > bound):
        ax.plot(r[part], w[part], color=PALETTE[0], lw=2.4)
    ax.axvspan(*dead, color="#EDEDED", zorder=0)
    ax.axvline(1, color="#888888", lw=0.7, ls=":")
    ax.axhline(0, color="#666666", lw=0.6)
    ax.set(xlim=(0, 2.5), xticks=[0, 0.8, 1, 1.28, 2], xlabel="ratio r")
    ax.set_xticklabels(["0", "0.8", "1", "1.28", "2"])


def l05_cap():
    """Cap against π_old, and a token that goes on beyond its own."""
    fig, (left, right) = axes(2, 3.8, 2.9)
    mu = np.geomspace(1e-4, 0.99, 200)
    for name, c, text in (
        ("dapo", PALETTE[0], "DAPO"),
        ("dppo_tv", PALETTE[2], "DPPO"),
        ("up_dapo", UP, "UP-DAPO"),
    ):
        room = upref.capacity(name, mu, mu)
        left.plot(mu, room, color=c, lw=2)
        at = (4e-3, 3e-4) if name == "dapo" else (1.3e-4, room[0] * 1.25)
        left.text(*at, text, color=c, fontsize=9, va="bottom")
    left.set(
        xscale="log",
        yscale="log",
        ylim=(1e-5, 3),
        xlabel=r"$\pi_\mathrm{old}$ of a token that has not moved",
        ylabel="Cap, A > 0",
    )
    title(left, "the room of its own gradient")
    x, ratios, own = _alone()
    right.plot(x, ratios, color=GREY, lw=2)
    right.plot(x[own], ratios[own], color=PALETTE[0], lw=2.6)
    right.axhline(1.28, color="#888888", lw=0.8, ls=(0, (4, 3)))
    right.text(x[-1], 1.22, "its bound, 1.28", ha="right", va="top", fontsize=8.5)
    right.annotate(
        "its own gradient\nends here",
        (x[own][-1], ratios[own][-1]),
        (12, 2.3),
        fontsize=8.5,
        arrowprops={"arrowstyle": "-", "color": "#777777", "lw": 0.7},
    )
    right.text(
        148,
        4,
        "carried on by\nthe others' gradients",
        color="#666666",
        fontsize=8.5,
        ha="right",
    )
    right.set(
        xlabel="updates from one π_old".replace("π_old", r"$\pi_\mathrm{old}$"),
        ylabel="ratio r of a good token",
        ylim=(0.9, 5.2),
    )
    title(right, "how far a token went under DAPO")
    return fig


def _alone():
    """(updates, r of the one right answer under DAPO, whether its own gradient is
    alive).
    """
    dapo, task = upref.get("dapo"), bandit([1.0, 0.0, 0.0])
    states = islice(path(task, dapo, task.start([[0.05, 0.5, 0.45]]), lr=0.5, k=0), 201)
    r = torch.stack([(s.lp - s.lp_old).exp()[0, 0, 0] for s in states])
    return np.arange(201), r.numpy(), (dapo.weight(r, torch.ones_like(r)) != 0).numpy()


def l06_up():
    """The three weights of a good token, and where each of them leads."""
    fig, (left, right) = axes(2, 3.8, 2.9)
    _three_weights(left)
    _where_weights_lead(right)
    return fig


THREE = (  # objective, its name in the picture, color
    ("dapo_no_upper_clip", "no clip", GREY),
    ("dapo", "DAPO", PALETTE[0]),
    ("up_dapo", "UP-DAPO", UP),
)


def _three_weights(ax):
    """The weights against the ratio."""
    r = np.linspace(0.01, 2.5, 500)
    for name, text, c in THREE:
        w = upref.get(name).weight(r, np.ones_like(r))
        line = {"lw": 2.6}
        if text == "no clip":
            line = {"ls": (0, (2, 2)), "zorder": 3, "lw": 1.6}
        for part in (r < 1.28, r > 1.28):
            label = text if part[0] else None
            ax.plot(r[part], w[part], color=c, label=label, **line)
    ax.set(
        xlim=(0, 2.5),
        xticks=[0, 1, 1.28, 2],
        ylim=(-0.1, 2.6),
        xlabel="ratio r",
        ylabel="weight, A = +1",
    )
    ax.set_xticklabels(["0", "1", "1.28", "2"])
    ax.legend(frameon=False, fontsize=8.5, loc="upper left")
    title(ax, "the push on a good token")


def _where_weights_lead(ax):
    """The probabilities of three answers after 300 updates by each weight."""
    task, start = bandit([1.0, 2.0, 4.0]), [[0.5, 0.3, 0.2]]
    for i, (name, _, c) in enumerate(THREE):
        updates = path(
            task,
            upref.get(name),
            task.start(start),
            lr=0.5,
            k=0,
            G=None,
            adv="reward",
        )
        *_, last = (state.pi[0] for state in islice(updates, 301))
        x = np.arange(3) + 0.2 * i - 0.1
        ax.bar(x, last, 0.18, color=c)
        for answer, p in enumerate(last):
            if p < 0.02:  # too low for a bar
                ax.text(
                    x[answer],
                    0.015,
                    f"{p:.3f}",
                    color="#666666",
                    fontsize=8,
                    rotation=90,
                    ha="center",
                )
    ax.bar(
        np.arange(3) - 0.3,
        start[0],
        0.18,
        color="white",
        edgecolor="#444444",
        lw=0.8,
        label=r"$\pi_\mathrm{old}$",
    )
    ax.set(xticks=range(3), ylim=(0, 1.08), ylabel="probability")
    ax.set_xticklabels(["A = 1", "A = 2", "A = 4"])
    ax.legend(frameon=False, fontsize=8.5, loc="upper left")
    title(ax, "after 300 updates from one batch")


def l07_sequence():
    """How far three ratios spread with length, and what one far token does to the
    pushes on its response.
    """
    fig, (left, right) = axes(2, 3.8, 2.9)
    _spread_of_ratios(left)
    _pushes_on_a_response(right)
    return fig


def _spread_of_ratios(ax):
    """Where 90 % of three ratios are, by the length of the response."""
    generator = torch.Generator().manual_seed(0)
    log_r = 0.1 * torch.randn(4000, 1024, generator=generator, dtype=torch.float64)
    lengths = 2 ** np.arange(11)
    one_token = [log_r[:, 0] for _ in lengths]
    sums = [log_r[:, :length].sum(1) for length in lengths]
    means = [log_r[:, :length].mean(1) for length in lengths]
    for c, text, logs in (
        (GREY, "S, the product", sums),
        (PALETTE[0], "r, one token", one_token),
        (PALETTE[3], "s, the geometric mean", means),
    ):
        low, high = np.array([np.quantile(x.exp(), (0.05, 0.95)) for x in logs]).T
        ax.fill_between(lengths, low, high, color=c, alpha=0.3, lw=0)
        ax.plot(lengths, high, color=c, lw=1.6, label=text)
        ax.plot(lengths, low, color=c, lw=1.6)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="tokens in the response",
        ylabel="ratio, 90 % of responses",
        yticks=[0.01, 0.1, 1, 10, 100],
    )
    ax.set_yticklabels(["0.01", "0.1", "1", "10", "100"])
    ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    ax.legend(frameon=False, fontsize=8.5, loc="upper left")
    title(ax, "which ratio spreads")


def _pushes_on_a_response(ax):
    """The weights of eight tokens, two of which are far, under DAPO and GSPO."""
    log_r = torch.tensor(
        [[0.1, -0.2, 0.05, float(np.log(3)), -0.1, -0.1, 0.05, -0.9]],
        dtype=torch.float64,
    )
    lp = torch.full_like(log_r, -1.2)
    b = upref.Rollouts(
        lp,
        lp - log_r,
        torch.ones(1, 1, dtype=torch.float64),
        torch.ones(1, 8, dtype=torch.bool),
    )
    for i, (name, text, c, scale) in enumerate(
        (
            ("dapo", "DAPO: each token its own r", PALETTE[0], 1),
            ("gspo", "GSPO: one s for all", PALETTE[3], 8),
        )
    ):
        w = upref.get(name).token_weights(b)[0] * scale
        x = np.arange(8) + 0.36 * i - 0.18
        ax.bar(x, w, 0.34, color=c, label=text)
        for t in (w == 0).nonzero()[:, 0].tolist():
            ax.text(
                x[t],
                0.03,
                "0: clipped",
                color=c,
                fontsize=8,
                rotation=90,
                ha="center",
            )
    ax.set(
        xticks=range(8),
        ylim=(0, 1.75),
        xlabel="r of the eight tokens",
        ylabel="weight, A = +1",
    )
    ax.set_xticklabels([f"{x:.2f}" for x in log_r[0].exp()], fontsize=8)
    ax.legend(frameon=False, fontsize=8.5, loc="upper left")
    title(ax, "which tokens are pushed")


def l08_aggregation():
    """What a token counts under three aggregations, and what becomes of it in two
    micro-batches.
    """
    lengths = torch.tensor([2, 2, 8, 8])
    mask = torch.arange(8) < lengths[:, None]
    fig, (left, right) = axes(2, 3.8, 2.9)
    totals = Totals.of(mask)
    looks = (
        ("token-mean", "token mean (DAPO)", PALETTE[0]),
        ("seq-mean-token-mean", "mean of means (GRPO)", PALETTE[4]),
        ("seq-mean-token-sum-norm", "sum / L, L = 8 (Dr. GRPO)", PALETTE[2]),
    )
    for i, (name, text, c) in enumerate(looks):
        w = torch.as_tensor(row_weights(name, mask, totals, 8)).expand(4)
        left.bar(
            np.arange(2) + 0.26 * i - 0.26, [w[0], w[2]], 0.24, color=c, label=text
        )
    left.set(xticks=[0, 1], ylabel="weight of one token")
    left.set_xticklabels(["of a response of 2", "of a response of 8"])
    left.legend(frameon=False, fontsize=8.5)
    title(left, "the weight of a token")
    whole = torch.as_tensor(row_weights("token-mean", mask, totals)).expand(4)
    parts = [
        row_weights("token-mean", mask[i : i + 2], Totals.of(mask[i : i + 2])) / 2
        for i in (0, 2)
    ]
    for i, (w, text, c) in enumerate(
        (
            ((whole[0], whole[2]), "by the mini-batch's tokens", PALETTE[0]),
            (parts, "by the tokens of each part", GREY),
        )
    ):
        right.bar(
            np.arange(2) + 0.36 * i - 0.18,
            [float(x) for x in w],
            0.34,
            color=c,
            label=text,
        )
    right.set(xticks=[0, 1], ylim=(0, 0.17), ylabel="weight of one token")
    right.set_xticklabels(["part 1: two short", "part 2: two long"])
    right.legend(frameon=False, fontsize=8.5)
    title(right, "token mean, in two parts")
    return fig


def l09_kl():
    """The three estimators, and whose gradient each has as a loss."""
    fig, (left, right) = axes(2, 3.8, 2.9)
    d = torch.linspace(-2.5, 2, 200, dtype=torch.float64)
    colors = {"k1": PALETTE[4], "k2": PALETTE[2], "k3": PALETTE[0]}
    for name, c in colors.items():
        left.plot(
            d, kl.ESTIMATORS[name](-d, torch.zeros_like(d)), color=c, lw=2, label=name
        )
    left.axhline(0, color="#666666", lw=0.6)
    left.set(
        xlabel=r"d = log $\pi_\mathrm{ref}$ − log $\pi_\theta$",
        ylabel="estimate from one token",
        ylim=(-2, 4.5),
    )
    left.legend(frameon=False, fontsize=8.5, loc="upper center")
    title(left, "one token's estimate")
    goals = verify_kl.divergences()
    bars = (
        ("k1, as a loss: 0", colors["k1"], verify_kl.expectation(kl.k1)[1]),
        ("k2", colors["k2"], verify_kl.expectation(kl.k2)[1]),
        ("k3", colors["k3"], verify_kl.expectation(kl.k3)[1]),
    )
    x = np.arange(5)
    for i, (text, c, g) in enumerate(bars):
        right.bar(x + 0.26 * i - 0.26, g, 0.24, color=c, label=text)
    for i, key in ((1, "reverse"), (2, "forward")):
        label = "that of the divergence itself" if i == 1 else None
        right.plot(
            x + 0.26 * i - 0.26,
            goals[key][1],
            "_",
            color=INK,
            ms=11,
            mew=1.6,
            label=label,
        )
    right.axhline(0, color="#666666", lw=0.6)
    right.set(
        xticks=x,
        xlabel="logit of five tokens",
        ylabel="mean gradient",
        ylim=(-0.26, 0.66),
    )
    right.set_xticklabels(list("ABCDE"))
    right.legend(frameon=False, fontsize=8.5, loc="upper right")
    title(right, "and its mean gradient")
    return fig


def l10_runs():
    """What six runs logged."""
    fig, panels = axes(4, 2.5, 2.7)
    keys = (
        ("reward", "reward"),
        ("pass@8", "pass@8"),
        ("entropy", "entropy, nats"),
        ("clipped", "clipped, share"),
    )
    for ax, (key, text) in zip(panels, keys, strict=True):
        for name, c in zip(KEY, PALETTE, strict=False):
            y = [x[key] for x in runs.run(name)]
            # D is under it at 0
            ax.plot(
                y, color=c, lw=1.8, label=name, ls=(0, (3, 3)) if name == "E" else "-"
            )
        # a line at 0 stays visible
        ax.set(
            xlabel="batch", xlim=(0, len(y) - 1), ylim=(-0.03 * ax.get_ylim()[1], None)
        )
        title(ax, text)
    fig.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        frameon=False,
    )
    return fig


def l11_around():
    """The error that five bugs make in the gradient of a step, in a lazy case and in
    one that varies everything.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(48, 16), torch.nn.Linear(16, 48))
    fig, panels = axes(2, 4.4, 2.8)
    lazy = ["lengths", "ratio", "holes", "temperature"]
    for ax, without, T, text in (
        (panels[0], lazy, 1.0, "one length, T = 1, r = 1, all tokens train"),
        (panels[1], [], 0.7, "lengths differ, T = 0.7, r ≠ 1, tool tokens"),
    ):
        with perturbed(model, True):
            errors = [
                _error_of_step(model, step(**parts), without, T)
                for parts in BUGS.values()
            ]
        colors = [UP if error > FLOAT32_BOUND else GREY for error in errors]
        ax.barh(range(len(BUGS)), errors, color=colors)
        ax.set(
            xscale="log",
            xlim=(1e-8, 10),
            yticks=range(len(BUGS)),
            xlabel="error of the gradient, relative to its norm",
        )
        ax.set_yticklabels(list(BUGS) if ax is panels[0] else [])
        ax.invert_yaxis()
        ax.axvline(FLOAT32_BOUND, color=INK, lw=0.8, ls=":")
        ax.text(
            FLOAT32_BOUND,
            len(BUGS) - 0.6,
            f" bound {FLOAT32_BOUND:g}",
            fontsize=8.5,
            va="center",
        )
        title(ax, text)
    return fig


def l12_every():
    """A weight that differs from DAPO's where no test looks, and the cuts that find it."""
    fig, (left, right) = axes(2, 4.1, 2.8)
    r = np.linspace(0.9, 1.45, 1101)
    low, high = 1.14, 1.2
    dapo = upref.get("dapo").weight(r, np.ones_like(r))
    other = np.where((r > low) & (r < high), r / 2, dapo)
    tested = np.exp(LOG_R)
    tested = tested[(tested > 0.9) & (tested < 1.45)]
    for ax in (left, right):
        for part in (
            r < low,
            (r > low) & (r < high),
            (r > high) & (r < 1.28),
            r > 1.28,
        ):
            ax.plot(r[part], dapo[part], color=PALETTE[0], lw=2.4)
            ax.plot(r[part], other[part], color=UP, lw=1.6, ls=(0, (3, 2)))
        ax.set(xlim=(0.9, 1.45), ylim=(-0.1, 1.6), xlabel="ratio r")
    at_tested = upref.get("dapo").weight(tested, np.ones_like(tested))
    left.plot(tested, at_tested, "o", color=INK, ms=4)
    left.set(ylabel="weight of ∇log π, A = 1")
    title(left, f"{len(tested)} ratios: equal at each")
    for cut in (low, high, 1.28):
        right.axvline(cut, color=GREY, lw=1, ls=":")
    right.axvspan(low, high, color="#EDEDED", zorder=0)
    for x, text in (
        (1.02, "r = r"),
        (1.17, "r ≠ r/2"),
        (1.24, "r = r"),
        (1.37, "0 = 0"),
    ):
        right.text(x, 1.5, text, ha="center", va="center", fontsize=8.5)
    title(right, "four intervals: one formula in each")
    return fig


BUGS = {  # name -> the parts of the lesson's step that have it
    "temperature left out": dict(heat=lambda x, T: x),
    "labels not shifted": dict(shift=0),
    "divided by its own tokens": dict(over=lambda trains, tokens: trains.sum() * 8),
    "tool tokens train": dict(mask=torch.ones_like),
    "old log-probs = current ones": dict(before=lambda old, lp: lp.detach()),
    "no bug": {},
}


def _error_of_step(model, loss, without: list[str], T: float) -> float:
    """The error of the gradient of a step.

    Args:
        model: what is trained.
        loss: the lesson's loss of one response.
        without: what does not vary in the rows.
        T: the temperature.
    """
    goal = make_goal("dapo", {}, T)
    case = build_case(TorchModel(model), goal, None, without)

    def train_step(model, rows):
        tokens = sum(sum(row.trains) for row in rows)
        for row in rows:
            ids = torch.tensor(row.ids)
            loss(
                model(ids[None])[0],
                ids,
                len(row.prompt),
                torch.tensor(row.trains),
                torch.tensor(row.old),
                row.adv,
                tokens,
                T,
            ).backward()

    gradient = run_step(train_step, model, case)[0]
    return compare(goal, case, gradient, FLOAT32_BOUND).error


PICTURES = {
    n[1:].replace("_", "-", 1): f
    for n, f in list(globals().items())
    if n[0] == "l" and n[1:3].isdigit()
}


def main(*names: str, folder: Path = FOLDER):
    """Draw the pictures that are named, or all of them, into the folder."""
    import matplotlib

    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        if not names or name in names:
            with matplotlib.rc_context(STYLE):
                save(draw(), folder / f"{name}.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
