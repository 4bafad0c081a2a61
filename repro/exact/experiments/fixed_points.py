# SPDX-License-Identifier: Apache-2.0
"""Where each objective comes to rest if π_old stays: three arms, so that the policy is
a point of a triangle.

UP's rest point for A > 0 is π_old A+, normalized (derivations/fixed_point.py proves
it); with binary rewards that is π_old given that the answer is right, what rejection
sampling would be trained on. Importance sampling rests only in a corner; a clip has no
rest point but a region, and where one stops in it depends on the way.
"""

from itertools import islice

import torch
from torch import Tensor

from repro.exact import draw
from repro.exact.flow import path
from repro.exact.result import FAILS, HOLDS, Finding, Result, Table
from repro.exact.task import F64, bandit
from upref.registry import Objective

ARMS = ["dapo", "dapo_no_upper_clip", "up_dapo", "cispo", "sapo", "aspo"]
CASES = {  # title -> (π_old, reward, advantage, G)
    "all right, graded: A = 1, 2, 4": (
        [0.5, 0.3, 0.2],
        [1.0, 2.0, 4.0],
        "reward",
        None,
    ),
    "two right, one wrong": ([0.3, 0.15, 0.55], [1.0, 1.0, 0.0], "group_norm", 8),
}
LR, UPDATES = 0.25, 3000


def run(arms) -> Result:
    paths = {case: {n: trajectory(o, case, hp) for n, o, hp in arms} for case in CASES}
    tables = []
    for case, found in paths.items():
        star = target(case)
        rows = [
            [n, *p[-1].tolist(), float(0.5 * (p[-1] - star).abs().sum()), float(g)]
            for n, (p, g) in found.items()
        ]
        title = f"{case}: after {UPDATES} updates of lr {LR:g}; π_old A+ is ({', '.join(f'{x:.3g}' for x in star)})"
        tables.append(
            Table(
                title,
                [
                    "objective",
                    "π 1",
                    "π 2",
                    "π 3",
                    "distance to π_old A+",
                    "gradient left",
                ],
                rows,
            )
        )
    names = [n for n, *_ in arms]
    with draw.panels(len(CASES), "Many updates from one π_old", names, height=3.6) as (
        fig,
        axes,
    ):
        colour = draw.colours(names)
        for ax, (case, found) in zip(axes, paths.items(), strict=True):
            triangle(ax, case)
            for n, (p, _) in found.items():
                x, y = corner_xy(p)
                draw.line(ax, x, y, n, colour, alpha=0.8)
                ax.plot(
                    x[-1],
                    y[-1],
                    "o",
                    color=colour[n],
                    ms=6 if n.startswith("up") else 4,
                    zorder=4,
                )
    setting = (
        "One π_old for all updates. Left rewards are the advantages; right, groups of 8, by counts. Dot: where the "
        f"path is after {UPDATES} updates; cross: π_old; ring: π_old A+, normalized. Distance: total variation."
    )
    return Result(
        "fixed_points",
        "Where each objective comes to rest.",
        setting,
        tables,
        fig,
        findings(paths),
    )


def target(case: str) -> Tensor:
    """π_old A+, normalized."""
    mu, reward, *_ = (torch.tensor(x, dtype=F64) for x in CASES[case][:2])
    goal = mu * reward
    return goal / goal.sum()


def trajectory(
    o: Objective, case: str, hp: dict, updates: int = UPDATES, lr: float = LR
) -> tuple[Tensor, Tensor]:
    """π after 0, 1, ... updates [updates + 1, 3], and the norm of the last gradient."""
    mu, reward, adv, G = CASES[case]
    task = bandit(reward)
    states = [
        (s.pi[0], s.gradient.norm())
        for s in islice(
            path(task, o, task.start([mu]), lr=lr, k=0, G=G, adv=adv, **hp), updates + 1
        )
    ]
    return torch.stack([p for p, _ in states]), states[-1][1]


def corner_xy(p: Tensor) -> tuple[Tensor, Tensor]:
    """Arm 1 left, arm 2 right, arm 3 on top."""
    return p[..., 1] + p[..., 2] / 2, p[..., 2] * 3**0.5 / 2


def triangle(ax, case: str) -> None:
    ax.plot([0, 1, 0.5, 0], [0, 0, 3**0.5 / 2, 0], color="#666666", lw=0.7)
    ax.set(aspect="equal", xlim=(-0.12, 1.12), ylim=(-0.1, 0.97), xticks=[], yticks=[])
    ax.spines[["left", "bottom"]].set_visible(False)
    reward = CASES[case][1]
    for (x, y, ha), a in zip(
        ((-0.02, -0.06, "center"), (1.02, -0.06, "center"), (0.5, 0.89, "center")),
        range(3),
        strict=True,
    ):
        ax.text(
            x, y, f"arm {a + 1}, R = {reward[a]:g}", ha=ha, fontsize=8, color="#444444"
        )
    ax.plot(
        *corner_xy(torch.tensor(CASES[case][0])),
        "x",
        color=draw.OTHERS[2],
        ms=6,
        mew=1.6,
        zorder=5,
    )
    ax.plot(
        *corner_xy(target(case)), "o", mfc="none", mec="#222222", ms=10, mew=1, zorder=5
    )
    draw.heading(ax, case)


def findings(paths) -> list[Finding]:
    if any("up_dapo" not in found for found in paths.values()):
        return []
    end = {case: found["up_dapo"][0][-1] for case, found in paths.items()}
    gap = max(float(0.5 * (p - target(c)).abs().sum()) for c, p in end.items())
    H = lambda p: float(-(p * p.clamp(min=1e-300).log()).sum())
    graded, binary = list(CASES)
    return [
        Finding(
            'UP is "mathematically equivalent to maximizing the REINFORCE objective"',
            "Sec. 4.1",
            HOLDS if H(end[graded]) < 0.1 else FAILS,
            f"its rest point is a mixture of entropy {H(end[graded]):.3g} nats where the reward's maximum is a corner "
            f"(0 nats), and it is π_old A+: distance {gap:.2g}",
        ),
        Finding(
            "With one π_old UP learns what rejection sampling would: π_old given that the answer is right",
            "",
            HOLDS if gap < 0.02 else FAILS,
            f"{binary}: ends at ({', '.join(f'{x:.3g}' for x in end[binary])})",
        ),
    ]
