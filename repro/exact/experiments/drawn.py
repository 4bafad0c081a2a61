# SPDX-License-Identifier: Apache-2.0
"""What one group does to the policy in k epochs, over every group that can be drawn.

A mini-batch is one group of G, the policy a table of four arms, two of them right, one
of those rare. Every multiset of G answers is trained on, alone, and weighted by its
probability. What is measured: the gradient before each epoch, how far the policy has
gone, KL(π_old ‖ π), and what it costs in reward.
"""

import torch
from torch import Tensor

from repro.exact import draw
from repro.exact.expected import all_groups, group_probability
from repro.exact.flow import drawn
from repro.exact.result import FAILS, HOLDS, PART, Finding, Result, Table
from repro.exact.task import F64, Task, bandit
from upref.registry import Objective

ARMS = [
    "dapo",
    "dapo_no_upper_clip",
    "up_dapo",
    "reinforce_off_policy",
    "cispo",
    "dppo_tv",
    "sapo",
]
MU = [0.01, 0.19, 0.6, 0.2]  # rare right, common right, wrong, wrong
RIGHT, K, G, ADV = [1.0, 1, 0, 0], 16, 6, "group_norm"
DOSES = 2.0 ** torch.arange(-2, 10.1, dtype=F64)
RARE, STEEP, FINE = [0.1, 0.01, 0.001, 0.0001], 16.0, 128
SEEN = ["KL", "worst KL", "gradient", "reward", "rare"]


def run(arms) -> Result:
    found = {
        n: torch.tensor([measure(o, float(d), hp) for d in DOSES]) for n, o, hp in arms
    }
    names = [n for n, *_ in arms]
    columns = ["objective", *[f"{d:g}" for d in DOSES[::2]]]
    table = lambda title, i: Table(
        title, columns, [[n, *found[n][::2, i].tolist()] for n in names]
    )
    tables = [
        table("Expected KL(π_old ‖ π) after one rollout, nats, by lr k", 0),
        table("Largest norm of a gradient, over all groups and epochs, by lr k", 2),
        table("Expected reward after one rollout, by lr k", 3),
        Table(
            f"Largest norm of a gradient at lr k = {STEEP:g}, k = {FINE}, by π_old of the rare right token",
            ["objective", *map(str, RARE)],
            [[n, *[steepest(o, mu, hp) for mu in RARE]] for n, o, hp in arms],
        ),
    ]
    with draw.panels(
        3, "One group, k epochs: all groups, by their probability", names
    ) as (fig, axes):
        colour = draw.colours(names)
        for n in names:
            kl, _, norm, reward, _ = found[n].T
            draw.line(axes[0], DOSES, kl, n, colour)
            draw.line(axes[1], DOSES, norm, n, colour)
            draw.line(axes[2], kl, reward, n, colour)
        for ax, text in zip(
            axes,
            ("expected KL, nats", "largest gradient norm", "expected reward"),
            strict=True,
        ):
            ax.set(xscale="log", xlabel=f"lr k, k = {K}", yscale="log")
            draw.heading(ax, text)
        axes[2].set(xlabel="expected KL, nats", yscale="linear", xlim=(1e-3, 30))
        axes[2].axhline(
            sum(m * r for m, r in zip(MU, RIGHT, strict=True)),
            color="#888888",
            lw=0.8,
            ls=(0, (4, 3)),
        )
    setting = (
        f"Four arms, π_old = {MU}, the first two right, G = {G}, all {len(all_groups(4, G))} groups, k = {K} epochs "
        f"on one group, advantage {ADV} for every arm. Dashed: the reward before."
    )
    return Result(
        "drawn",
        "What the luck of one draw can do.",
        setting,
        tables,
        fig,
        findings(found),
    )


def measure(
    o: Objective,
    dose: float,
    hp: dict,
    task: Task | None = None,
    mu=None,
    k: int = K,
    size: int = G,
):
    """Of k epochs with lr = dose / k: the numbers named in SEEN; "rare" is E[log
    π/π_old] of the first arm.
    """
    task, mu = task or bandit(RIGHT), mu or MU
    theta = task.start([mu])
    groups = all_groups(len(mu), size)
    old = task.responses(task.log_probs(theta))
    P = group_probability(groups, old)[0]
    steps: list[Tensor] = []
    end = drawn(
        task, o, theta, groups, lr=dose / k, k=k, adv=ADV, watch=steps.append, **hp
    )
    pi = task.responses(task.log_probs(end))
    kl = (old * (old.log() - pi.clamp(min=1e-300).log())).sum(1)
    norm = torch.stack(steps).flatten(2).norm(dim=2).max(0).values
    rare = (pi[:, 0] / old[:, 0]).clamp(min=1e-300).log()
    return [
        float(P @ kl),
        float(kl.max()),
        float(norm.max()),
        float(P @ (pi @ task.reward)),
        float(P @ rare),
    ]


def steepest(o: Objective, rare: float, hp: dict) -> float:
    return measure(o, STEEP, hp, mu=[rare, 0.2 - rare, 0.6, 0.2], k=FINE)[2]


def reward_at(kl: Tensor, found: Tensor) -> Tensor:
    """Expected reward where the expected KL is that, interpolated along the doses in
    log KL.
    """
    x, y = found[:, 0].log(), found[:, 3]
    i = torch.searchsorted(x, kl.log()).clamp(1, len(x) - 1)
    return y[i - 1] + (y[i] - y[i - 1]) * (kl.log() - x[i - 1]) / (x[i] - x[i - 1])


def findings(found) -> list[Finding]:
    if not {"dapo", "up_dapo", "dapo_no_upper_clip", "reinforce_off_policy"} <= set(
        found
    ):
        return []
    of = lambda name, i: found[name][:, i]
    ratio = of("dapo_no_upper_clip", 2) / of("up_dapo", 2)
    up, dapo, sym = of("up_dapo", 0), of("dapo", 0), of("reinforce_off_policy", 0)
    far = up / dapo
    at = torch.logspace(-2, 0, 9, dtype=F64)
    level = reward_at(at, found["up_dapo"])
    gain = level - reward_at(at, found["dapo"])
    return [
        Finding(
            "Without the upper clip importance sampling's gradients explode",
            "Secs. 3.2 and 5.3",
            HOLDS if ratio.max() > 10 else FAILS,
            f"on the groups that hold the rare token: its largest gradient is up to {ratio.max():.3g} times UP's, and "
            "it grows as 1/π_old; it is bounded all the same, by A √2/(4 π_old) for one token's term",
        ),
        Finding(
            "UP's KL stays comparable to DAPO's",
            "Sec. 5.2",
            PART if far.min() < 1.25 < far.max() else FAILS,
            f"one rollout of UP moves the policy {far.min():.2g} times as far as DAPO where the clip is not touched "
            f"(lr k = {DOSES[0]:g}) and up to {far.max():.2g} times where it is",
        ),
        Finding(
            "At equal KL a rollout of UP and one of DAPO earn the same; what differs is how far one goes",
            "",
            HOLDS if gain.abs().max() < 0.05 else FAILS,
            f"from {at[0]:g} to {at[-1]:g} nats UP's expected reward differs by {gain.min():+.2g} to "
            f"{gain.max():+.2g}, interpolated between the doses, while the reward itself goes from {level[0]:.2g} to "
            f"{level[-1]:.2g}",
        ),
        Finding(
            "The clip of wrong answers is what holds the policy",
            "Sec. 5.3",
            HOLDS if (sym / up).max() > 2 else FAILS,
            f"off-policy REINFORCE's KL is {(sym / up).min():.2g} to {(sym / up).max():.2g} times UP's: its wrong "
            "tokens are pushed down for ever",
        ),
    ]
