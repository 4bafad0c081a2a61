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
STYLE_OF_COURSE = STYLE | {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def axes(n: int, width: float, height: float):
    """A figure, and its n axes side by side, each of this size in inches."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width * n, height), layout="constrained")
    fig.get_layout_engine().set(wspace=0.08)
    return fig, list(fig.subplots(1, n, squeeze=False)[0])


def bars(ax, places, series):
    """Draw two or three bars side by side at each place.

    Args:
        ax: the panel.
        places: x of the middle of each group of bars.
        series: (heights at the places, label, color) of each bar of a group.
    """
    width = {2: 0.34, 3: 0.24}[len(series)]
    middle = (len(series) - 1) / 2
    for i, (heights, label, color) in enumerate(series):
        x = np.asarray(places) + (i - middle) * (width + 0.02)
        ax.bar(x, heights, width, color=color, label=label)


def zero_line(ax):
    """Draw the horizontal line at 0."""
    ax.axhline(0, color="#666666", lw=0.6)


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
    centered = {"ha": "center", "va": "center", "color": INK}
    drawn = [
        ax.text(x, y, text, fontsize=9.5, bbox=frame, **centered)
        for text, (x, y) in zip(boxes, places, strict=True)
    ]
    # the last box leads back to the second one
    for start, end in [*pairwise(drawn), (drawn[-1], drawn[1])]:
        arrow = {
            "arrowstyle": "-|>",
            "color": INK,
            "linewidth": 1.5,
            "shrinkA": 2,
            "shrinkB": 2,
            "patchA": start.get_bbox_patch(),
            "patchB": end.get_bbox_patch(),
        }
        ax.annotate("", end.get_position(), start.get_position(), arrowprops=arrow)
    note = "every mini-batch of the turn,\nwhile the policy moves away\nfrom the one that sampled"
    ax.text(2.5, 0.5, note, fontsize=8.5, style="italic", **centered)
    return fig


class Measured(NamedTuple):
    """A line of benchmarks/hidden.json.

    Attributes:
        name: of the function.
        tokens: how many there are.
        words: how many ids the vocabulary has.
        megabytes: of memory beyond the inputs, dh and dW.
    """

    name: str
    tokens: int
    words: int
    megabytes: int


def measured_memory() -> list[Measured]:
    """Return the lines of benchmarks/hidden.json on the memory of log-probabilities with
    their entropy; those of log-probabilities alone come after them in the file.
    """
    file = Path(__file__).parents[2] / "benchmarks/hidden.json"
    text = "\n".join(record.rows(file)).partition("; log-probs alone")[0]
    # name, tokens, ids, megabytes in all, megabytes beyond dh and dW
    line = r"^(\S.*?) +(\d+) +(\d+) +\d+ +(\d+) "
    return [
        Measured(name, *map(int, numbers))
        for name, *numbers in re.findall(line, text, re.M)
    ]


def l00_memory():
    """Where the memory of log-probabilities goes, and how it grows:
    benchmarks/hidden.json.
    """
    rows = measured_memory()
    words = max(row.words for row in rows)
    fig, (left, right) = axes(2, 4.2, 2.6)
    _memory_of_each(left, [row for row in rows if row.words == words])
    _growth_of_memory(right, [row for row in rows if row.words != words])
    return fig


def _memory_of_each(ax, rows: list[Measured]):
    """The memory of each function at one size, as bars."""
    for i, row in enumerate(rows):
        color = UP if row.name.startswith("upref") else DOWN
        ax.barh(i, row.megabytes, color=color)
        ax.text(row.megabytes, i, f" {row.megabytes:,} MB", va="center", fontsize=8.5)
    ax.set(
        yticks=range(len(rows)),
        yticklabels=[row.name for row in rows],
        xlim=(0, 1.25 * max(row.megabytes for row in rows)),
        xlabel="MB beyond the inputs, dh and dW",
        title=f"{rows[0].tokens:,} tokens, vocabulary {rows[0].words:,}",
    )
    ax.invert_yaxis()


def _growth_of_memory(ax, rows: list[Measured]):
    """The memory of two functions by the number of tokens."""
    for name, color in (("naive", DOWN), ("upref.hidden", UP)):
        of_name = [row for row in rows if row.name == name]
        tokens = [row.tokens for row in of_name]
        megabytes = [row.megabytes for row in of_name]
        ax.plot(tokens, megabytes, "o-", color=color, lw=2)
        ax.annotate(
            f"{name}  ",
            (tokens[-1], megabytes[-1]),
            (0, 4),
            textcoords="offset points",
            color=color,
            fontsize=9,
            ha="right",
            va="bottom",
        )
    ax.set(
        xlabel="tokens",
        ylabel="MB beyond the inputs, dh and dW",
        ylim=(0, None),
        title=f"vocabulary {rows[0].words:,}",
    )


def l01_push():
    """What one sample does to the three logits."""
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    pi = logits.softmax(0)
    names = [f"{name}\nπ = {p:.2f}" for name, p in zip("ABC", pi, strict=True)]
    fig, panels = axes(3, 2.5, 2.5)
    cases = (
        ("A was drawn, reward +1", 0, 1.0),
        ("C was drawn, reward +1", 2, 1.0),
        ("A was drawn, reward −1", 0, -1.0),
    )
    for ax, (title, drawn, reward) in zip(panels, cases, strict=True):
        _bars_of_push(ax, _push(logits, drawn, reward))
        zero_line(ax)
        ax.set(ylim=(-1.15, 1.15), yticks=[-1, 0, 1], xticks=range(3))
        ax.set(xticklabels=names, title=title)
    panels[0].set_ylabel("push on the logit")
    return fig


def _push(logits, drawn: int, reward: float):
    """REINFORCE's gradient by the logits, of one answer that was drawn."""
    leaf = logits.clone().requires_grad_()
    lp = leaf.log_softmax(0)[drawn]
    upref.get("reinforce").surrogate(lp, lp.detach(), reward).backward()
    return leaf.grad


def _bars_of_push(ax, push):
    """A bar for each logit with its number, above 0 or below."""
    ax.bar(range(3), push, color=[UP if g > 0 else DOWN for g in push], width=0.6)
    for i, g in enumerate(push):
        number = f"{g:+.2f}".replace("-", "−")
        if g > 0:
            ax.text(i, g + 0.05, number, ha="center", fontsize=8, va="bottom")
        else:
            ax.text(i, g - 0.05, number, ha="center", fontsize=8, va="top")


def l02_advantage():
    """The advantage of a right and of a wrong answer, by how many of 8 are right."""
    G = 8
    one_group = torch.zeros(G, dtype=torch.int64)
    right, wrong = [], []
    for number in range(1, G):
        rewards = (torch.arange(G) < number).double()  # the first ones are right
        A = advantages.group_norm(rewards, one_group)
        right.append(float(A[0]))
        wrong.append(float(A[-1]))
    fig, (ax,) = axes(1, 5.6, 2.9)
    both = ((right, "a right answer", UP), (wrong, "a wrong answer", DOWN))
    bars(ax, range(1, G), both)
    for all_or_none in (0, G):
        ax.text(all_or_none, 0.12, "nothing", ha="center", fontsize=8, color="#555555")
        ax.plot([all_or_none - 0.3, all_or_none + 0.3], [0, 0], color=INK, lw=2.5)
    zero_line(ax)
    ax.set(
        xlabel=f"right answers among the {G} to one prompt",
        ylabel="advantage A",
        xticks=range(G + 1),
    )
    ax.legend(loc="upper right")
    return fig


def l02_maximizes():
    """By what factor the gradient of the mean reward is multiplied on average, by pass
    rate: rewards of 0 or 1, and responses of one length.
    """
    p = np.linspace(0.005, 0.995, 199)
    fig, (ax,) = axes(1, 5.6, 2.9)
    lines = [
        ("leave_one_out", 4, "RLOO", GREY, "-"),
        ("group_mean", 4, "Dr. GRPO, group of 4", INK, "--"),
        ("group_norm", 4, "GRPO, group of 4", UP, ":"),
        ("group_norm", 8, "GRPO, group of 8", UP, "--"),
        ("group_norm", 64, "GRPO, group of 64", UP, "-"),
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
    ax.legend(loc="upper center")
    return fig


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
    for right in range(G):  # ones among the others
        wrong = G - 1 - right
        others = [1.0] * right + [0.0] * wrong
        A_if_right, A_if_wrong = (
            float(estimator(torch.tensor([own, *others]).double(), one_group)[0])
            for own in (1.0, 0.0)
        )
        chance = math.comb(G - 1, right) * p**right * (1 - p) ** wrong
        factor += chance * (A_if_right - A_if_wrong)
    return factor


def l03_ratio():
    """What importance sampling does to three samples' weights, and what it costs."""
    fig, (left, right) = axes(2, 3.7, 2.8)
    _three_ratios(left)
    _spread_of_a_ratio(right)
    return fig


def _three_ratios(ax):
    """The old and the new probability of three samples, and their ratios."""
    old = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    new = torch.tensor([0.35, 0.25, 0.4], dtype=torch.float64)
    r = new / old
    both = (
        (old, r"$\pi_\mathrm{old}$ drew them", GREY),
        (new, r"$\pi_\theta$, now", PALETTE[0]),
    )
    bars(ax, range(3), both)
    bold = {"ha": "center", "fontsize": 8.5, "fontweight": "bold"}
    for i in range(3):
        ax.text(i, max(old[i], new[i]) + 0.02, f"r = {r[i]:.3g}", **bold)
    ax.set(xticks=range(3), xticklabels="ABC", ylim=(0, 0.85), ylabel="probability")
    ax.set_title("each sample counts r times")
    ax.legend(fontsize=8, loc="upper right")


def _spread_of_a_ratio(ax):
    """The standard deviation of r against π_θ of a token, at three values of π_old: a
    sample is either this token or not.
    """
    p = torch.linspace(0.01, 0.98, 200, dtype=torch.float64)
    for mu, color in ((0.3, PALETTE[0]), (0.1, PALETTE[4]), (0.01, PALETTE[1])):
        mean_of_r_squared = p**2 / mu + (1 - p) ** 2 / (1 - mu)
        spread = (mean_of_r_squared - 1).sqrt()  # the mean of r is 1
        label = rf"$\pi_\mathrm{{old}}$ = {mu:g}"
        ax.plot(p, spread, color=color, lw=1.8)
        ax.text(0.99, float(spread[-1]), label, color=color, fontsize=8.5, va="center")
        ax.plot([mu], [0], "o", color=color, ms=4, clip_on=False)
    ax.set(
        xlim=(0, 1),
        ylim=(0, None),
        xlabel=r"$\pi_\theta$ of that token now",
        ylabel="standard deviation of r",
        title="the price: r spreads",
    )


def l04_clip():
    """DAPO's weight against r, for a good and a bad token."""
    fig, (left, right) = axes(2, 3.7, 2.8)
    _weight_of_dapo(left, A=1.0, bound=1.28, dead=(1.28, 2.5))
    left.text(1.9, 0.12, "clipped:\nno push", ha="center", fontsize=8.5, va="bottom")
    note = {"color": "#777777", "fontsize": 8.5, "va": "center"}
    left.text(0.15, 1.6, "not clipped\non this side", ha="left", **note)
    left.set(ylim=(-0.15, 2.5), ylabel="weight of ∇log π", title="A = +1, a good token")
    _weight_of_dapo(right, A=-1.0, bound=0.8, dead=(0, 0.8))
    right.text(0.4, -1.3, "clipped:\nno push", ha="center", fontsize=8.5, va="top")
    right.text(1.95, -0.6, "not clipped\non this side", ha="center", **note)
    right.set(ylim=(-2.5, 0.15), title="A = −1, a bad token")
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
    zero_line(ax)
    ax.set(xlim=(0, 2.5), xticks=[0, 0.8, 1, 1.28, 2], xlabel="ratio r")
    ax.set(xticklabels=["0", "0.8", "1", "1.28", "2"])


def l05_cap():
    """Cap against π_old, and a token that goes on beyond its own."""
    fig, (left, right) = axes(2, 3.8, 2.9)
    _cap_of_three(left)
    _beyond_its_cap(right)
    return fig


def _cap_of_three(ax):
    """Cap of three objectives against π_old."""
    mu = np.geomspace(1e-4, 0.99, 200)
    for name, color, text in (
        ("dapo", PALETTE[0], "DAPO"),
        ("dppo_tv", PALETTE[2], "DPPO"),
        ("up_dapo", UP, "UP-DAPO"),
    ):
        room = upref.capacity(name, mu, mu)
        ax.plot(mu, room, color=color, lw=2)
        # beside the line of DAPO, which falls to the left, and above the other two
        place = (4e-3, 3e-4) if name == "dapo" else (1.3e-4, room[0] * 1.25)
        ax.text(*place, text, color=color, fontsize=9, va="bottom")
    ax.set(
        xscale="log",
        yscale="log",
        ylim=(1e-5, 3),
        xlabel=r"$\pi_\mathrm{old}$ of a token that has not moved",
        ylabel="Cap, A > 0",
        title="the room of its own gradient",
    )


def _beyond_its_cap(ax):
    """The ratio of a token whose own gradient ends, by updates under DAPO."""
    r, own = _one_right_answer()
    x = np.arange(len(r))
    ax.plot(x, r, color=GREY, lw=2)
    ax.plot(x[own], r[own], color=PALETTE[0], lw=2.6)
    ax.axhline(1.28, color="#888888", lw=0.8, ls=(0, (4, 3)))
    ax.text(x[-1], 1.22, "its bound, 1.28", ha="right", va="top", fontsize=8.5)
    ax.annotate(
        "its own gradient\nends here",
        (x[own][-1], r[own][-1]),
        (12, 2.3),
        fontsize=8.5,
        arrowprops={"arrowstyle": "-", "color": "#777777", "lw": 0.7},
    )
    note = {"color": "#666666", "fontsize": 8.5, "ha": "right"}
    ax.text(148, 4, "carried on by\nthe others' gradients", **note)
    ax.set(
        xlabel=r"updates from one $\pi_\mathrm{old}$",
        ylabel="ratio r of a good token",
        ylim=(0.9, 5.2),
        title="how far a token went under DAPO",
    )


def _one_right_answer():
    """(r of the one right answer after 0 to 200 updates under DAPO, whether its own
    gradient is alive).
    """
    dapo, task = upref.get("dapo"), bandit([1.0, 0.0, 0.0])
    states = islice(path(task, dapo, task.start([[0.05, 0.5, 0.45]]), lr=0.5, k=0), 201)
    r = torch.stack([(s.lp - s.lp_old).exp()[0, 0, 0] for s in states])
    return r.numpy(), (dapo.weight(r, torch.ones_like(r)) != 0).numpy()


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
        xticklabels=["0", "1", "1.28", "2"],
        ylim=(-0.1, 2.6),
        xlabel="ratio r",
        ylabel="weight, A = +1",
        title="the push on a good token",
    )
    ax.legend(loc="upper left")


def _where_weights_lead(ax):
    """The probabilities of three answers before training, and after 300 updates by each
    weight.
    """
    start = [0.5, 0.3, 0.2]
    low = {"color": "#666666", "fontsize": 8, "rotation": 90, "ha": "center"}
    for i, (name, _, color) in enumerate(THREE):
        last = _after_300_updates(upref.get(name), start)
        x = np.arange(3) + 0.2 * i - 0.1
        ax.bar(x, last, 0.18, color=color)
        for answer, p in enumerate(last):
            if p < 0.02:  # too low for a bar
                ax.text(x[answer], 0.015, f"{p:.3f}", **low)
    white = {"color": "white", "edgecolor": "#444444", "lw": 0.8}
    label = r"$\pi_\mathrm{old}$"
    ax.bar(np.arange(3) - 0.3, start, 0.18, label=label, **white)
    ax.set(xticks=range(3), xticklabels=["A = 1", "A = 2", "A = 4"])
    ax.set(ylim=(0, 1.08), ylabel="probability")
    ax.set_title("after 300 updates from one batch")
    ax.legend(loc="upper left")


def _after_300_updates(o: upref.Objective, start: list[float]):
    """The probabilities of three answers with the advantages 1, 2 and 4 after exact
    updates from one batch.

    Args:
        o: the objective.
        start: the probabilities before.
    """
    task = bandit([1.0, 2.0, 4.0])
    first = task.start([start])
    updates = path(task, o, first, lr=0.5, k=0, G=None, adv="reward")
    *_, last = (state.pi[0] for state in islice(updates, 301))
    return last


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
    for color, text, logarithms in (
        (GREY, "S, the product", sums),
        (PALETTE[0], "r, one token", one_token),
        (PALETTE[3], "s, the geometric mean", means),
    ):
        ends = [np.quantile(x.exp(), (0.05, 0.95)) for x in logarithms]
        low, high = np.array(ends).T
        ax.fill_between(lengths, low, high, color=color, alpha=0.3, lw=0)
        ax.plot(lengths, high, color=color, lw=1.6, label=text)
        ax.plot(lengths, low, color=color, lw=1.6)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="tokens in the response",
        ylabel="ratio, 90 % of responses",
        title="which ratio spreads",
    )
    ax.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
    ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    ax.legend(loc="upper left")


def _pushes_on_a_response(ax):
    """The weights of eight tokens, two of which are far, under DAPO and GSPO."""
    log_r = torch.tensor(
        [[0.1, -0.2, 0.05, float(np.log(3)), -0.1, -0.1, 0.05, -0.9]],
        dtype=torch.float64,
    )
    lp = torch.full_like(log_r, -1.2)
    A = torch.ones(1, 1, dtype=torch.float64)
    b = upref.Rollouts(lp, lp - log_r, A, torch.ones(1, 8, dtype=torch.bool))
    of_dapo = upref.get("dapo").token_weights(b)[0]
    of_gspo = upref.get("gspo").token_weights(b)[0] * 8  # its mean is over 8 tokens
    x = np.arange(8)
    both = (
        (of_dapo, "DAPO: each token its own r", PALETTE[0]),
        (of_gspo, "GSPO: one s for all", PALETTE[3]),
    )
    bars(ax, x, both)
    upright = {"fontsize": 8, "rotation": 90, "ha": "center"}
    for token in (of_dapo == 0).nonzero()[:, 0].tolist():
        ax.text(x[token] - 0.18, 0.03, "0: clipped", color=PALETTE[0], **upright)
    ax.set(
        xticks=x,
        ylim=(0, 1.75),
        xlabel="r of the eight tokens",
        ylabel="weight, A = +1",
        title="which tokens are pushed",
    )
    ax.set_xticklabels([f"{r:.2f}" for r in log_r[0].exp()], fontsize=8)
    ax.legend(loc="upper left")


def l08_aggregation():
    """What a token counts under three aggregations, and what becomes of it in two
    micro-batches.
    """
    lengths = torch.tensor([2, 2, 8, 8])
    mask = torch.arange(8) < lengths[:, None]
    fig, (left, right) = axes(2, 3.8, 2.9)
    _weights_by_length(left, mask)
    _weights_in_two_parts(right, mask)
    return fig


def _weights_by_length(ax, mask):
    """The weight of a token of the first response, which is short, and of the third,
    which is long, under three aggregations.
    """
    looks = (
        ("token-mean", "token mean (DAPO)", PALETTE[0]),
        ("seq-mean-token-mean", "mean of means (GRPO)", PALETTE[4]),
        ("seq-mean-token-sum-norm", "sum / L, L = 8 (Dr. GRPO)", PALETTE[2]),
    )
    series = []
    for name, text, color in looks:
        weights = torch.as_tensor(row_weights(name, mask, Totals.of(mask), 8)).expand(4)
        series.append((weights[[0, 2]], text, color))
    bars(ax, range(2), series)
    ax.set(xticks=[0, 1], xticklabels=["of a response of 2", "of a response of 8"])
    ax.set(ylabel="weight of one token", title="the weight of a token")
    ax.legend()


def _weights_in_two_parts(ax, mask):
    """The weight of a token under the token mean: divided by all tokens of the
    mini-batch, and by those of its micro-batch.
    """
    whole = float(row_weights("token-mean", mask, Totals.of(mask)))
    parts = [
        float(row_weights("token-mean", part, Totals.of(part))) / 2
        for part in (mask[:2], mask[2:])
    ]
    both = (
        ([whole, whole], "by the mini-batch's tokens", PALETTE[0]),
        (parts, "by the tokens of each part", GREY),
    )
    bars(ax, range(2), both)
    ax.set(xticks=[0, 1], xticklabels=["part 1: two short", "part 2: two long"])
    ax.set(ylim=(0, 0.17), ylabel="weight of one token")
    ax.set_title("token mean, in two parts")
    ax.legend()


def l09_kl():
    """The three estimators, and whose gradient each has as a loss."""
    fig, (left, right) = axes(2, 3.8, 2.9)
    _estimates_of_kl(left)
    _gradients_of_kl(right)
    return fig


COLORS_OF_KL = {"k1": PALETTE[4], "k2": PALETTE[2], "k3": PALETTE[0]}


def _estimates_of_kl(ax):
    """The estimates from one token against its difference d of log-probabilities."""
    d = torch.linspace(-2.5, 2, 200, dtype=torch.float64)
    for name, color in COLORS_OF_KL.items():
        estimate = kl.ESTIMATORS[name](-d, torch.zeros_like(d))
        ax.plot(d, estimate, color=color, lw=2, label=name)
    zero_line(ax)
    ax.set(
        xlabel=r"d = log $\pi_\mathrm{ref}$ − log $\pi_\theta$",
        ylabel="estimate from one token",
        ylim=(-2, 4.5),
        title="one token's estimate",
    )
    ax.legend(loc="upper center")


def _gradients_of_kl(ax):
    """The mean gradient of each estimator as a loss by the logits of five tokens, with
    marks at that of the divergence on the bars of k2 and k3.
    """
    series = []
    for name, color in COLORS_OF_KL.items():
        label = "k1, as a loss: 0" if name == "k1" else name
        gradient = verify_kl.expectation(kl.ESTIMATORS[name])[1]
        series.append((gradient, label, color))
    x = np.arange(5)
    bars(ax, x, series)
    goals = verify_kl.divergences()
    mark = {"color": INK, "ms": 11, "mew": 1.6}
    label = "that of the divergence itself"
    ax.plot(x, goals["reverse"][1], "_", label=label, **mark)
    ax.plot(x + 0.26, goals["forward"][1], "_", **mark)
    zero_line(ax)
    ax.set(
        xticks=x,
        xticklabels="ABCDE",
        xlabel="logit of five tokens",
        ylabel="mean gradient",
        ylim=(-0.26, 0.66),
        title="and its mean gradient",
    )
    ax.legend(loc="upper right")


def l10_runs():
    """What six runs logged."""
    fig, panels = axes(4, 2.5, 2.7)
    keys = (
        ("reward", "reward"),
        ("pass@8", "pass@8"),
        ("entropy", "entropy, nats"),
        ("clipped", "clipped, share"),
    )
    for ax, (key, title) in zip(panels, keys, strict=True):
        for name, color in zip(KEY, PALETTE, strict=False):
            y = [logged[key] for logged in runs.run(name)]
            style = (0, (3, 3)) if name == "E" else "-"  # D is under it at 0
            ax.plot(y, color=color, lw=1.8, label=name, ls=style)
        below = -0.03 * ax.get_ylim()[1]  # a line at 0 stays visible
        ax.set(xlabel="batch", xlim=(0, runs.BATCHES - 1), ylim=(below, None))
        ax.set_title(title)
    lines, names = panels[0].get_legend_handles_labels()
    fig.legend(lines, names, loc="outside lower center", ncols=6, fontsize=9)
    return fig


def l11_around():
    """The error that five bugs make in the gradient of a step, in a lazy case and in
    one that varies everything.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(48, 16), torch.nn.Linear(16, 48))
    fig, panels = axes(2, 4.4, 2.8)
    constant = ["lengths", "ratio", "holes", "temperature"]  # in the lazy case
    cases = (
        ("one length, T = 1, r = 1, all tokens train", constant, 1.0),
        ("lengths differ, T = 0.7, r ≠ 1, tool tokens", [], 0.7),
    )
    for ax, (title, without, T) in zip(panels, cases, strict=True):
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
            title=title,
        )
        ax.set_yticklabels(list(BUGS) if ax is panels[0] else [])
        ax.invert_yaxis()
        ax.axvline(FLOAT32_BOUND, color=INK, lw=0.8, ls=":")
        label = f" bound {FLOAT32_BOUND:g}"
        ax.text(FLOAT32_BOUND, len(BUGS) - 0.6, label, fontsize=8.5, va="center")
    return fig


def l12_every():
    """A weight that differs from DAPO's where no test looks, and the cuts that find it."""
    low, high = CUTS[:2]
    fig, (left, right) = axes(2, 4.1, 2.8)
    _both_weights(left)
    tested = np.exp(LOG_R)
    tested = tested[(tested > 0.9) & (tested < 1.45)]
    at_tested = upref.get("dapo").weight(tested, np.ones_like(tested))
    left.plot(tested, at_tested, "o", color=INK, ms=4)
    left.set(ylabel="weight of ∇log π, A = 1")
    left.set(title=f"{len(tested)} ratios: equal at each")
    _both_weights(right)
    for cut in CUTS:
        right.axvline(cut, color=GREY, lw=1, ls=":")
    right.axvspan(low, high, color="#EDEDED", zorder=0)
    for x, text in (
        (1.02, "r = r"),
        (1.17, "r ≠ r/2"),
        (1.24, "r = r"),
        (1.37, "0 = 0"),
    ):
        right.text(x, 1.5, text, ha="center", va="center", fontsize=8.5)
    right.set(title="four intervals: one formula in each")
    return fig


CUTS = (
    1.14,
    1.2,
    1.28,
)  # between the first two the weight is r / 2; DAPO clips at 1.28


def _both_weights(ax):
    """DAPO's weight and the one that differs from it, interval by interval."""
    low, high, bound = CUTS
    r = np.linspace(0.9, 1.45, 1101)
    dapo = upref.get("dapo").weight(r, np.ones_like(r))
    differs = (r > low) & (r < high)
    other = np.where(differs, r / 2, dapo)
    for part in (r < low, differs, (r > high) & (r < bound), r > bound):
        ax.plot(r[part], dapo[part], color=PALETTE[0], lw=2.4)
        ax.plot(r[part], other[part], color=UP, lw=1.6, ls=(0, (3, 2)))
    ax.set(xlim=(0.9, 1.45), ylim=(-0.1, 1.6), xlabel="ratio r")


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
            logits = model(ids[None])[0]
            trains, old = torch.tensor(row.trains), torch.tensor(row.old)
            begins = len(row.prompt)
            loss(logits, ids, begins, trains, old, row.adv, tokens, T).backward()

    gradient = run_step(train_step, model, case)[0]
    return compare(goal, case, gradient, FLOAT32_BOUND).error


# 00-loop, 00-memory, ... -> the function l00_loop, l00_memory, ... that draws it
PICTURES = {
    name.removeprefix("l").replace("_", "-", 1): value
    for name, value in list(globals().items())
    if re.match(r"l\d\d_", name)
}


def main(*names: str, folder: Path = FOLDER):
    """Draw the pictures that are named, or all of them, into the folder."""
    import matplotlib

    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        if not names or name in names:
            with matplotlib.rc_context(STYLE_OF_COURSE):
                save(draw(), folder / f"{name}.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
