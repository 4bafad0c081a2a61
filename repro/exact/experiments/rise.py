# SPDX-License-Identifier: Apache-2.0
"""How many rollouts a rare right token needs to reach probability 1/2, on an infinite
batch and on one group a rollout.

Infinite batch: one right arm of four, the path of the expected update. The right token
is in the batch in its share mu.

One group a rollout, k epochs on it: two arms, one right. With two arms the policy is
one number and a group is its count K of right answers, so training is a Markov chain, p
-> f_K(p) with probability Binomial(K; G, p), and its mean time T(p) to 1/2 solves T(p)
= 1 + Σ_K P(K) T(f_K(p)): a linear system, on a grid of log-odds. All of the sampling
noise is in it, and none of it is sampled.
"""

from itertools import islice

import torch
from torch import Tensor

from repro.exact import draw
from repro.exact.expected import all_groups, binomial
from repro.exact.experiments import SURROGATES
from repro.exact.flow import drawn, path
from repro.exact.result import FAILS, HOLDS, PART, Finding, Result, Table
from repro.exact.task import F64, bandit
from upref.registry import Objective

ARMS = SURROGATES
MU, K, G = 0.01, 16, 8
DOSES = 2.0 ** torch.arange(0, 11, dtype=F64)  # lr k: how far θ can go in one rollout
# Adam's step is about lr, whatever the gradient
ADAM = 2.0 ** torch.arange(-3, 4, dtype=F64)
DRAWN = 2.0 ** torch.arange(-4, 6.1, 0.5, dtype=F64)
ADV = "group_norm"  # for every arm, so that only the surrogate differs
MOST = 4000  # updates


def run(arms) -> Result:
    batch = {name: on_a_batch(o, DOSES, hp) for name, o, hp in arms}
    adam = {name: on_a_batch(o, ADAM, hp, adam=True) for name, o, hp in arms}
    alone = {
        name: [on_a_group(o, float(d), hp=hp) for d in DRAWN] for name, o, hp in arms
    }
    tables = [
        Table(
            f"Rollouts of infinitely many groups until the right token is at 1/2, from {MU}, by lr k",
            ["objective", *[f"{d:g}" for d in DOSES]],
            [[n, *map(number, t)] for n, t in batch.items()],
        ),
        Table(
            "The same with Adam",
            ["objective", *[f"{d:g}" for d in ADAM]],
            [[n, *map(number, t)] for n, t in adam.items()],
        ),
        Table(
            f"Expected rollouts of one group of {G} until it is at 1/2, from {MU}, by lr k",
            ["objective", *[f"{d:.3g}" for d in DRAWN[::2]]],
            [[n, *map(number, t[::2])] for n, t in alone.items()],
        ),
    ]
    names = [n for n, *_ in arms]
    with draw.panels(2, f"A right token of probability {MU} rises to 1/2", names) as (
        fig,
        (left, right),
    ):
        colour = draw.colours(names)
        for n in names:
            draw.line(left, DOSES, batch[n], n, colour)
            draw.line(right, DRAWN, alone[n], n, colour)
        for ax, text in (
            (left, "infinite batch"),
            (right, f"one group of {G} a rollout, sampling noise included"),
        ):
            ax.set(
                xscale="log",
                yscale="log",
                xlabel=f"lr k, with k = {K} updates a rollout",
            )
            draw.heading(ax, text)
        left.set_ylabel("rollouts, expected")
        right.set_yticks([15, 30, 60, 120, 240])
    setting = (
        f"mu = {MU}, G = {G}, k = {K}, advantage {ADV} for every arm. Infinite batch: four arms, one right, advantages "
        "averaged over all groups of 8 (by counts). One group: two arms, one right, exact up to the grid of log-odds."
    )
    return Result(
        "rise",
        "How long a rare right token takes.",
        setting,
        tables,
        fig,
        findings(batch, adam, alone),
    )


def number(t) -> float | None:
    return None if not t < float("inf") else float(t)


def on_a_batch(
    o: Objective,
    doses: Tensor,
    hp: dict,
    mu: float = MU,
    k: int = K,
    most: int = MOST,
    adam: bool = False,
) -> list[float]:
    """Rollouts (updates / k, interpolated in log-odds) until the right arm of four is
    at 1/2; inf if not in `most`.
    """
    task = bandit([1.0, 0, 0, 0])
    theta = task.start([[mu, *[(1 - mu) / 3] * 3]]).expand(len(doses), -1, -1)
    when = torch.full((len(doses),), float("inf"), dtype=F64)
    before = None
    for s in islice(
        path(task, o, theta, lr=doses / k, k=k, G=G, adv=ADV, adam=adam, **hp), most
    ):
        x = torch.logit(s.pi[:, 0], eps=1e-15)
        if before is not None:
            part = -before / (x - before)
            when = torch.where((x >= 0) & when.isinf(), (s.update - 1 + part) / k, when)
        before = x
        if when.isfinite().all():
            break
    return when.tolist()


def on_a_group(
    o: Objective,
    dose: float,
    mu: float = MU,
    k: int = K,
    size: int = G,
    points: int = 160,
    hp: dict | None = None,
) -> float:
    """E[rollouts] until p >= 1/2 of the chain above, from p = mu."""
    x = torch.linspace(
        float(torch.logit(torch.tensor(mu, dtype=F64))), -1e-9, points, dtype=F64
    )
    f = after(o, x, dose / k, k, size, hp or {})
    P = binomial(size, x.sigmoid())
    M = torch.zeros(points, points, dtype=F64)
    for K_right in range(size + 1):
        y = f[:, K_right].clamp(min=float(x[0]))
        inside = (y < 0).to(F64)
        at = ((y - x[0]) / (x[1] - x[0])).clamp(max=points - 1)
        low = at.floor().long().clamp(max=points - 2)
        part = (at - low).clamp(max=1)
        M.scatter_add_(1, low[:, None], (P[:, K_right] * inside * (1 - part))[:, None])
        M.scatter_add_(1, low[:, None] + 1, (P[:, K_right] * inside * part)[:, None])
    try:
        T = torch.linalg.solve(
            torch.eye(points, dtype=F64) - M, torch.ones(points, dtype=F64)
        )
    except RuntimeError:
        return float("inf")  # some state is never left
    return float(T[0]) if T[0] > 0 and T[0] < 1e12 else float("inf")


def after(o: Objective, x: Tensor, lr: float, k: int, size: int, hp: dict) -> Tensor:
    """Log-odds of the right arm after k epochs on a group with 0..G right answers, from
    log-odds x: [points, G + 1].
    """
    task = bandit([1.0, 0.0])
    groups = all_groups(2, size).flip(0)  # by the number of right answers: none ... all
    both = groups.repeat(len(x), 1)
    theta = torch.stack([x / 2, -x / 2], -1)[:, None].repeat_interleave(len(groups), 0)
    done = drawn_from(task, o, theta, both, lr, k, hp)
    return (done[:, 0, 0] - done[:, 0, 1]).reshape(len(x), -1)


def drawn_from(task, o, theta, groups, lr, k, hp):
    return drawn(task, o, theta, groups, lr=lr, k=k, adv=ADV, **hp)


def findings(batch, adam, alone) -> list[Finding]:
    if not {"dapo", "up_dapo", "dapo_no_upper_clip"} <= set(batch):
        return []
    ratio = lambda t: (
        torch.tensor(t["dapo"], dtype=F64) / torch.tensor(t["up_dapo"], dtype=F64)
    )
    a, b, c = ratio(batch), ratio(alone), ratio(adam)
    slow = torch.tensor(batch["up_dapo"], dtype=F64) / torch.tensor(
        batch["dapo_no_upper_clip"], dtype=F64
    )
    first = next((float(d) for d, q in zip(DRAWN, b, strict=True) if q > 1.1), None)
    out = [
        Finding(
            "The upper clip stifles rare right tokens",
            "Sec. 3.3",
            PART if b.max() > 1.5 else FAILS,
            f"one group a rollout: DAPO takes up to {b.max():.2g} times UP's rollouts, and more than 1.1 times only "
            f"from lr k = {first:.3g}; infinite batch: {a.min():.2g} to {a.max():.2g} times, with Adam "
            f"{c.min():.2g} to {c.max():.2g} times"
            if first
            else f"DAPO takes at most {b.max():.3g} times UP's rollouts",
        ),
        Finding(
            'UP "substantially amplifies" the signal of rare tokens',
            "Sec. 4.1",
            FAILS if slow.max() > 1 else HOLDS,
            f"importance sampling without the clip needs fewer rollouts at every dose: UP takes {slow.min():.2g} to "
            f"{slow.max():.2g} times its number, because its weight is 1 where that one's is r > 1",
        ),
    ]
    return out
