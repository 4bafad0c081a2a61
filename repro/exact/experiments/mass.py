# SPDX-License-Identifier: Apache-2.0
"""Where the mass of clipped tokens goes: many updates from one π_old, and whose
gradient moved which token.

    d log p_a = Σ_b (δ_ab - p_b) dz_b

is linear in the gradient, and the gradient is a sum over the rows of the batch, so what
happens to log p of one token is a sum of three pushes: by its own rows, by other right
tokens' rows, by wrong tokens' rows. They add up to the change itself but for the second
order of the step.
"""

from itertools import islice

import torch
from torch import Tensor

from repro.exact import draw
from repro.exact.flow import drawn, gradient, path
from repro.exact.result import FAILS, HOLDS, PART, Finding, Result, Table
from repro.exact.task import F64, bandit
from upref.registry import Objective, get

ARMS = ["dapo", "up_dapo", "dapo_no_upper_clip", "dppo_tv"]
NAMES = ["rare right", "common right", "wrong 1", "wrong 2", "wrong 3"]
MU, RIGHT = [0.01, 0.24, 0.45, 0.2, 0.1], [1.0, 1, 0, 0, 0]
OTHERS = [  # the same question from other starts: the first two are right
    [0.05, 0.1, 0.45, 0.3, 0.1],
    [0.01, 0.05, 0.5, 0.3, 0.14],
    [0.01, 0.7, 0.1, 0.1, 0.09],
    [0.002, 0.02, 0.5, 0.3, 0.178],
]
LR_ADAM, UPDATES_ADAM = 0.01, 600
LR, UPDATES, G, ADV = 0.1, 1200, 8, "group_norm"


def run(arms) -> Result:
    found = {n: pushes(o, hp) for n, o, hp in arms}
    rows, parts = [], []
    for n, (log_ratio, own, right, wrong) in found.items():
        r = log_ratio.exp()
        rows.append([n, *r[-1].tolist(), float(r.max())])
        gap = float(log_ratio[-1, 0] - own[-1] - right[-1] - wrong[-1])
        parts.append(
            [
                n,
                *(float(x[-1]) for x in (own, right, wrong)),
                gap,
                float(log_ratio[-1, 0]),
            ]
        )
    tables = [
        Table(
            f"π/π_old after {UPDATES} updates of lr {LR} from one π_old",
            ["objective", *NAMES, "largest"],
            rows,
        ),
        Table(
            "What moved log π of the rare right token",
            [
                "objective",
                "its own gradient",
                "the common right one's",
                "the wrong ones'",
                "second order",
                "sum",
            ],
            parts,
        ),
    ]
    again = [
        [str(mu), "Adam" if adam else "plain", n, *passing(o, hp, mu, adam)]
        for mu in [MU, *OTHERS]
        for adam in (False, True)
        for n, o, hp in arms
        if n in ("dapo", "up_dapo")
    ]
    columns = [
        "π_old",
        "steps",
        "objective",
        "rare past 1.28 at update",
        "common past 1.28",
    ]
    columns += ["rare, least", "rare, end", "common, end"]
    title = f"Other starts, and Adam's steps: π/π_old of the right tokens, {UPDATES} updates of lr {LR}"
    tables.append(Table(f"{title} (Adam {UPDATES_ADAM} of {LR_ADAM})", columns, again))
    title = "Many updates from one π_old: where every token ends"
    with draw.panels(len(found), title, width=3.3) as (fig, axes):
        shades = ["#D55E00", "#E69F00", "#08304F", "#3A86B7", "#7FB6D6"]
        for ax, (n, (log_ratio, *_)) in zip(axes, found.items(), strict=True):
            x = LR * torch.arange(len(log_ratio))
            for a, (name, c) in enumerate(zip(NAMES, shades, strict=True)):
                ax.plot(
                    x,
                    log_ratio[:, a].exp(),
                    color=c,
                    lw=2.2 if a == 0 else 1.4,
                    label=f"{name}, {MU[a]:g}",
                )
            for bound in (0.8, 1.28):
                ax.axhline(bound, color="#888888", lw=0.7, ls=(0, (4, 3)))
            ax.set(
                xlabel="lr × updates",
                yscale="log",
                ylim=(0.25, 5),
                yticks=[0.5, 0.8, 1.28, 2, 4],
            )
            ax.set_yticklabels(["0.5", "0.8", "1.28", "2", "4"])
            ax.minorticks_off()
            draw.heading(ax, n)
        axes[0].set_ylabel("π/π_old")
        handles, labels = axes[0].get_legend_handles_labels()
        fig.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=5,
            frameon=False,
            fontsize=8,
        )
    setting = (
        f"Five arms, π_old = {MU}, the first two right; one π_old for all updates, an infinite batch of groups of {G}, "
        f"advantage {ADV}. Dashed: DAPO's bounds."
    )
    return Result(
        "mass",
        "Where the mass of clipped tokens goes.",
        setting,
        tables,
        fig,
        findings(found, again),
    )


def pushes(
    o: Objective, hp: dict, lr: float = LR, updates: int = UPDATES
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log π/π_old of every arm [updates + 1, 5]; and, added up, what three kinds of
    rows did to the first arm's.
    """
    task = bandit(RIGHT)
    reward = task.reward
    log_ratio, moved = [], []
    for s in islice(
        path(task, o, task.start([MU]), lr=lr, k=0, G=G, adv=ADV, **hp), updates + 1
    ):
        log_ratio.append((s.lp - s.lp_old)[0, :, 0])
        first, right = s.rows.response == 0, reward[s.rows.response] == 1
        kinds = (first, right & ~first, ~right)
        dz = [
            gradient(task, o, s.theta, s.lp_old, s.rows.only(kind), **hp)[0, 0]
            for kind in kinds
        ]
        moved.append([float(lr * (g[0] - s.pi[0] @ g)) for g in dz])
    steps = torch.tensor([[0.0] * 3, *moved[:-1]], dtype=F64).cumsum(0)
    return torch.stack(log_ratio), *steps.T


def passing(o: Objective, hp: dict, mu: list[float], adam: bool) -> list:
    """When the rare and the common right token pass 1.28, the least of the rare one,
    and where the two end.
    """
    task, (lr, n) = bandit(RIGHT), (LR_ADAM, UPDATES_ADAM) if adam else (LR, UPDATES)
    states = islice(
        path(task, o, task.start([mu]), lr=lr, k=0, G=G, adv=ADV, adam=adam, **hp),
        n + 1,
    )
    r = torch.stack([s.pi[0, :2] for s in states]) / torch.tensor(mu[:2], dtype=F64)
    when = [int((x > 1.28).nonzero()[0]) if (x > 1.28).any() else None for x in r.T]
    return [*when, float(r[:, 0].min()), *r[-1].tolist()]


def passing_in_one_group(
    mu: list[float], lr: float = 0.02, most: int = 400, bound: float = 1.28
) -> list[float]:
    """Under DAPO, on one group that holds the rare right answer once, the common one
    once and wrong ones: the epochs at which the two pass the bound, inf for never."""
    task = bandit(RIGHT)
    steps: list[Tensor] = []
    theta = task.start([mu])
    group = torch.tensor([[0, 1, *[2 + i % 3 for i in range(G - 2)]]])
    drawn(task, get("dapo"), theta, group, lr=lr, k=most, adv=ADV, watch=steps.append)
    ratio = (
        task.log_probs(theta + lr * torch.cat(steps).cumsum(0)) - task.log_probs(theta)
    )[:, :2, 0].exp()
    return [
        float((x > bound).nonzero()[0]) if (x > bound).any() else float("inf")
        for x in ratio.T
    ]


def findings(found, again) -> list[Finding]:
    if "dapo" not in found:
        return []
    inf = float("inf")
    of = lambda name, steps: [
        row[3:] for row in again if row[2] == name and row[1] == steps
    ]
    dapo, adam = of("dapo", "plain"), of("dapo", "Adam")
    highest = max(max(row[3:]) for row in dapo)
    one = [passing_in_one_group(mu) for mu in [MU, *OTHERS]]
    sooner = sum(rare < common for rare, common in one)
    earlier = lambda rows: sum((row[0] or inf) < (row[1] or inf) for row in rows)
    out = [
        Finding(
            'Clipped, "the policy is strictly upper-bounded by π ≤ (1+ε) π_old"',
            "Sec. 3.3",
            FAILS if highest > 1.29 else HOLDS,
            f"under DAPO a right token ends at up to {highest:.3g} π_old ({max(max(row[3:]) for row in adam):.3g} with "
            "Adam): its own gradient ends at 1.28, and the mass taken from wrong tokens goes on to those that are left",
        ),
        Finding(
            "It is the rare right token that the upper clip stops",
            "Sec. 3.3",
            FAILS if not earlier(dapo) + earlier(adam) + sooner else PART,
            f"the rare one passes 1.28 before the common one in {earlier(dapo)} of {len(dapo)} starts with plain "
            f"steps, in {earlier(adam)} with Adam's: on an infinite batch a token's own push is proportional to π_old, "
            f"Adam's steps are equal. In one group that holds both once it is the first in {sooner} of {len(one)}: "
            "there both have one push, and the normalizer takes more from the common one",
        ),
    ]
    if "up_dapo" in found:
        up, up_adam = of("up_dapo", "plain"), of("up_dapo", "Adam")
        more = lambda a, b: sum(x[3] > y[3] for x, y in zip(a, b, strict=True))
        less = sum(row[2] < 0.99 for row in up)
        wins = more(up, dapo), more(up_adam, adam)
        out.append(
            Finding(
                "Without the upper clip the rare right token rises more",
                "Sec. 4.1",
                HOLDS if wins == (len(up), len(up)) else PART if any(wins) else FAILS,
                f"after equally many updates from one π_old it is higher under UP than under DAPO in {wins[0]} of "
                f"{len(up)} starts with plain steps and in {wins[1]} with Adam's; in {less} UP first lets it fall below "
                "π_old, where the common right token takes the mass",
            )
        )
    return out
