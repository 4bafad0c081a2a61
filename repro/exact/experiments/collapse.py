# SPDX-License-Identifier: Apache-2.0
"""The basin of collapse: one layer shared by three prompts, over all angles between
them, as a function of drift.

logits of prompt q = x_q θ with x_q in the plane, so three prompts of three arms share
two features and what one learns moves the others. The angles of x_2 and x_3 to x_1 are
on a grid, θ starts at 0 (uniform), and each prompt has one right arm. A prompt whose
mass is on a wrong arm gives no group with two rewards, hence no gradient: it stays
there. Collapsed is a task that ends more than 0.1 below the best reward it had had at
the start of a rollout.
"""

from itertools import islice
from math import pi

import torch
from torch import Tensor

from repro.exact import draw
from repro.exact.flow import path
from repro.exact.result import FAILS, HOLDS, PART, Finding, Result, Table
from repro.exact.task import F64, Task, bandit
from upref.registry import Objective

ARMS = [
    "dapo",
    "dapo_no_upper_clip",
    "up_dapo",
    "reinforce_off_policy",
    "topr",
    "dppo_tv",
]
# all three right arms differ; two agree
RIGHT = [[1.0, 0, 0, 0, 1, 0, 0, 0, 1], [1.0, 0, 0, 1, 0, 0, 0, 1, 0]]
ANGLES, K, ROLLOUTS, G, ADV, DROP = 8, 16, 40, 8, "group_norm", 0.1
DOSES = 2.0 ** torch.arange(2, 11, dtype=F64)
ADAM = 2.0 ** torch.arange(-1, 6, dtype=F64)


def run(arms) -> Result:
    found = {n: grid(o, hp) for n, o, hp in arms}
    names = [n for n, *_ in arms]
    columns = ["objective", *[f"{d:g}" for d in DOSES]]
    share = {
        n: (best - end > DROP).to(F64).flatten(0, -2).mean(0)
        for n, (end, best) in found.items()
    }
    reward = {n: end.flatten(0, -2).mean(0) for n, (end, _) in found.items()}
    with_adam = {n: grid(o, hp, doses=ADAM, adam=True) for n, o, hp in arms}
    adam = {
        n: (best - end > DROP).to(F64).flatten(0, -2).mean(0)
        for n, (end, best) in with_adam.items()
    }
    count = ANGLES**2 * len(RIGHT)
    tables = [
        Table(
            f"Share of {count} tasks that collapsed, by lr k",
            columns,
            [[n, *share[n].tolist()] for n in names],
        ),
        Table(
            f"Mean reward after {ROLLOUTS} rollouts, by lr k",
            columns,
            [[n, *reward[n].tolist()] for n in names],
        ),
        Table(
            "Share that collapsed with Adam, by lr k",
            ["objective", *[f"{d:g}" for d in ADAM]],
            [[n, *adam[n].tolist()] for n in names],
        ),
    ]
    with draw.panels(
        2, "One layer, three prompts: which drift destroys what was learned", names
    ) as (fig, axes):
        colour = draw.colours(names)
        for ax, values, text in zip(
            axes,
            (share, reward),
            ("share of tasks collapsed", "mean reward at the end"),
            strict=True,
        ):
            for n in names:
                draw.line(ax, DOSES, values[n], n, colour, marker=".", ms=4)
            ax.set(xscale="log", xlabel=f"lr k, k = {K}")
            draw.heading(ax, text)
        axes[0].set_ylim(-0.01, None)
    setting = (
        f"{ANGLES} x {ANGLES} angles, {len(RIGHT)} placements of the right arms, θ = 0 at the start, infinite batch of "
        f"groups of {G}, {ROLLOUTS} rollouts of k = {K} updates, advantage {ADV} for every arm. Collapsed: more than "
        f"{DROP:g} below the best reward before."
    )
    return Result(
        "collapse",
        "The basin of collapse.",
        setting,
        tables,
        fig,
        findings(share, adam),
    )


def tasks(
    right: list[float], angles: int, doses: Tensor
) -> tuple[Task, Tensor, tuple[int, ...]]:
    """All angles x doses as one batch of policies: the task, the dose of each, the
    shape to fold them back into.
    """
    angle = (torch.arange(angles, dtype=F64) + 0.5) * 2 * pi / angles
    a, b, dose = torch.meshgrid(angle, angle, doses, indexing="ij")
    shape, (a, b, dose) = a.shape, (x.reshape(-1) for x in (a, b, dose))
    at = lambda angle: torch.stack([angle.cos(), angle.sin()], -1)
    features = torch.stack([at(torch.zeros_like(a)), at(a), at(b)], 1)
    return bandit(right, prompts=3, features=features), dose, shape


def grid(
    o: Objective,
    hp: dict,
    angles: int = ANGLES,
    doses: Tensor = DOSES,
    rollouts: int = ROLLOUTS,
    adam: bool = False,
):
    """Reward at the end and the best at the start of a rollout: two of [placements,
    angles, angles, doses].
    """
    ends, bests = [], []
    for right in RIGHT:
        task, dose, shape = tasks(right, angles, doses)
        theta = torch.zeros(len(dose), 2, 3, dtype=F64)
        best = torch.zeros(len(dose), dtype=F64)
        for s in islice(
            path(task, o, theta, lr=dose / K, k=K, G=G, adv=ADV, adam=adam, **hp),
            rollouts * K + 1,
        ):
            if s.update % K == 0:
                end = task.right(s.pi).mean(1)
                best = torch.maximum(best, end)
        ends.append(end.reshape(shape))
        bests.append(best.reshape(shape))
    return torch.stack(ends), torch.stack(bests)


def findings(share, adam) -> list[Finding]:
    if not {"dapo", "up_dapo", "dapo_no_upper_clip", "reinforce_off_policy"} <= set(
        share
    ):
        return []
    first = {
        n: next((float(d) for d, s in zip(DOSES, v, strict=True) if s > 0), None)
        for n, v in share.items()
    }
    at = lambda n: (
        f"from lr k = {first[n]:g} (at most {share[n].max():.0%} of the tasks)"
        if first[n]
        else "at no dose"
    )
    inf = float("inf")
    symmetric = (first["reinforce_off_policy"] or inf) < (first["up_dapo"] or inf)
    bare = (first["dapo_no_upper_clip"] or inf) < (first["up_dapo"] or inf)
    return [
        Finding(
            "Without the clip of wrong answers training collapses",
            "Sec. 5.3",
            (HOLDS if share["reinforce_off_policy"].max() > 0.5 else PART)
            if symmetric
            else FAILS,
            f"off-policy REINFORCE collapses {at('reinforce_off_policy')}, UP {at('up_dapo')}; with Adam in up to "
            f"{adam['reinforce_off_policy'].max():.0%} and {adam['up_dapo'].max():.0%}",
        ),
        Finding(
            "Without the upper clip importance sampling collapses where UP does not",
            "Sec. 5.3",
            HOLDS if bare else FAILS,
            f"without the upper clip {at('dapo_no_upper_clip')}, UP {at('up_dapo')}; with Adam in up to "
            f"{adam['dapo_no_upper_clip'].max():.0%} and {adam['up_dapo'].max():.0%}: in expectation r costs nothing, "
            "E_old[r A ∇log π] is bounded",
        ),
        Finding(
            "The upper clip protects from collapse",
            "",
            HOLDS if share["dapo"].max() < share["up_dapo"].max() else FAILS,
            f"DAPO collapses {at('dapo')}: a clip stops the small step after the large one, never the large one itself",
        ),
    ]
