# SPDX-License-Identifier: Apache-2.0
"""Where the mass of clipped tokens goes: many updates from one π_old, and whose gradient moved which token.

    d log p_a = Σ_b (δ_ab - p_b) dz_b

is linear in the gradient, and the gradient is a sum over the rows of the batch, so what happens to log p of one token
is a sum of three pushes: by its own rows, by other right tokens' rows, by wrong tokens' rows. They add up to the change
itself but for the second order of the step.
"""

from itertools import islice

import torch
from torch import Tensor

from repro.exact import draw
from repro.exact.flow import gradient, path
from repro.exact.result import FAILS, HOLDS, PART, Finding, Result, Table
from repro.exact.task import F64, bandit
from upref.registry import Objective

ARMS = ["dapo", "up_dapo", "dapo_no_upper_clip", "dppo_tv"]
NAMES = ["rare right", "common right", "wrong 1", "wrong 2", "wrong 3"]
MU, RIGHT = [0.01, 0.24, 0.45, 0.2, 0.1], [1.0, 1, 0, 0, 0]
LR, UPDATES, G, ADV = 0.1, 1200, 8, "group_norm"


def run(arms) -> Result:
    found = {n: pushes(o, hp) for n, o, hp in arms}
    rows, parts = [], []
    for n, (log_ratio, own, right, wrong) in found.items():
        r = log_ratio.exp()
        rows.append([n, *r[-1].tolist(), float(r.max())])
        gap = float(log_ratio[-1, 0] - own[-1] - right[-1] - wrong[-1])
        parts.append([n, *(float(x[-1]) for x in (own, right, wrong)), gap, float(log_ratio[-1, 0])])
    tables = [
        Table(f"π/π_old after {UPDATES} updates of lr {LR} from one π_old", ["objective", *NAMES, "largest"], rows),
        Table(
            "What moved log π of the rare right token",
            ["objective", "its own gradient", "the common right one's", "the wrong ones'", "second order", "sum"],
            parts,
        ),
    ]  # fmt: skip
    title = "Many updates from one π_old: where every token ends"
    with draw.panels(len(found), title, width=3.3) as (fig, axes):
        shades = ["#D55E00", "#E69F00", "#08304F", "#3A86B7", "#7FB6D6"]
        for ax, (n, (log_ratio, *_)) in zip(axes, found.items(), strict=True):
            x = LR * torch.arange(len(log_ratio))
            for a, (name, c) in enumerate(zip(NAMES, shades, strict=True)):
                ax.plot(x, log_ratio[:, a].exp(), color=c, lw=2.2 if a == 0 else 1.4, label=f"{name}, {MU[a]:g}")
            for bound in (0.8, 1.28):
                ax.axhline(bound, color="#888888", lw=0.7, ls=(0, (4, 3)))
            ax.set(xlabel="lr × updates", yscale="log", ylim=(0.25, 5), yticks=[0.5, 0.8, 1.28, 2, 4])
            ax.set_yticklabels(["0.5", "0.8", "1.28", "2", "4"])
            ax.minorticks_off()
            draw.heading(ax, n)
        axes[0].set_ylabel("π/π_old")
        handles, labels = axes[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    setting = (
        f"Five arms, π_old = {MU}, the first two right; one π_old for all updates, an infinite batch of groups of {G}, "
        f"advantage {ADV}. Dashed: DAPO's bounds."
    )
    return Result("mass", "Where the mass of clipped tokens goes.", setting, tables, fig, findings(found))


def pushes(o: Objective, hp: dict, lr: float = LR, updates: int = UPDATES) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log π/π_old of every arm [updates + 1, 5]; and, added up, what three kinds of rows did to the first arm's."""
    task = bandit(RIGHT)
    reward = task.reward
    log_ratio, moved = [], []
    for s in islice(path(task, o, task.start([MU]), lr=lr, k=0, G=G, adv=ADV, **hp), updates + 1):
        log_ratio.append((s.lp - s.lp_old)[0, :, 0])
        first, right = s.rows.response == 0, reward[s.rows.response] == 1
        kinds = (first, right & ~first, ~right)
        dz = [gradient(task, o, s.theta, s.lp_old, s.rows.only(kind), **hp)[0, 0] for kind in kinds]
        moved.append([float(lr * (g[0] - s.pi[0] @ g)) for g in dz])
    steps = torch.tensor([[0.0] * 3, *moved[:-1]], dtype=F64).cumsum(0)
    return torch.stack(log_ratio), *steps.T


def findings(found) -> list[Finding]:
    if "dapo" not in found:
        return []
    r = found["dapo"][0].exp()
    passed = lambda x: int((x > 1.28).nonzero()[0]) if (x > 1.28).any() else None
    common, rare = passed(r[:, 1]), passed(r[:, 0])
    first = f"the common one at update {common}, the rare one {'never' if rare is None else f'at update {rare}'}"
    out = [
        Finding(
            "Clipped, \"the policy is strictly upper-bounded by π ≤ (1+ε) π_old\"", "Sec. 3.3",
            FAILS if r.max() > 1.29 else HOLDS,
            f"under DAPO the common right token ends at {r[-1, 1]:.3g} π_old: its own gradient ends at 1.28, and the "
            "mass taken from the wrong tokens goes on to those that have most",
        ),
        Finding(
            "It is the rare right token that the upper clip stops", "Sec. 3.3",
            HOLDS if rare is not None and (common is None or rare < common) else FAILS,
            f"on an infinite batch a token's own push is proportional to π_old, so {first}",
        ),
    ]  # fmt: skip
    if "up_dapo" in found:
        up = found["up_dapo"][0][:, 0].exp()
        out.append(Finding(
            "Without the upper clip the rare right token rises more", "Sec. 4.1",
            HOLDS if (up[1:] >= r[1:, 0]).all() else PART if up[-1] > r[-1, 0] else FAILS,
            f"under UP it first falls, to {up.min():.2g} π_old, because the common right token takes the mass, and is "
            f"at {up[-1]:.2g} after {len(up) - 1} updates (DAPO {r[-1, 0]:.3g}); it rests at "
            f"{1 / (MU[0] + MU[1]):.3g}, much later",
        ))  # fmt: skip
    return out
