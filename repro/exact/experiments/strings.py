# SPDX-License-Identifier: Apache-2.0
"""Responses of three tokens, the rare one in the middle: what token ratios, sequence
ratios and their clips make of it.

A vocabulary of three, all 27 responses, a table of 13 prefixes. One response is right;
its first and last token are common, its middle one is rare. Bounds are the same for
all, so that only the granularity differs.
"""

from itertools import islice

import torch
from torch import Tensor

from repro.exact import draw
from repro.exact.flow import path
from repro.exact.result import FAILS, HOLDS, PART, Finding, Result, Table
from repro.exact.task import F64, Task, strings
from upref.registry import Objective

WIDE = "eps_low=0.2,eps_high=0.28"
ARMS = [
    "dapo",
    "up_dapo",
    f"gspo:{WIDE}",
    "up_gspo:eps_low=0.2",
    "gmpo",
    "up(gmpo)",
    "gspo",
]
MU, K, G, ADV, MOST = 0.02, 16, 8, "group_norm", 3000
DOSES = 2.0 ** torch.arange(2, 11, dtype=F64)


def run(arms) -> Result:
    found = {n: rise(o, DOSES, hp) for n, o, hp in arms}
    names = [n for n, *_ in arms]
    number = lambda t: None if t == float("inf") else t
    tables = [
        Table(
            f"Rollouts until the right response is at 1/2, by lr k (its middle token starts at {MU})",
            ["objective", *[f"{d:g}" for d in DOSES]],
            [[n, *map(number, found[n].tolist())] for n in names],
        )
    ]
    with draw.panels(
        1, "A right response of three tokens, the middle one rare", names, width=6.4
    ) as (fig, (ax,)):
        colour = draw.colours(names)
        for n in names:
            draw.line(ax, DOSES, found[n], n, colour)
        ax.set(
            xscale="log",
            yscale="log",
            xlabel=f"lr k, k = {K}",
            ylabel="rollouts until it is at 1/2",
        )
    setting = (
        f"Three tokens, vocabulary of three, one right response of 27, infinite batch of groups of {G}, k = {K}, "
        f"advantage {ADV}. A line ends where {MOST} updates do not reach 1/2."
    )
    return Result(
        "strings",
        "Tokens, sequences and their clips.",
        setting,
        tables,
        fig,
        findings(found),
    )


def task() -> tuple[Task, Tensor]:
    """The task, and the start: middle token rare after the right first one, first and
    last common.
    """
    t = strings(3, 3, {(0, 1, 2)})
    probs = torch.full((len(t.features), 3), 1 / 3, dtype=F64)
    right = int((t.reward == 1).nonzero()[0, 0])
    for at, row in zip(
        t.contexts[right],
        ([0.8, 0.1, 0.1], [(1 - MU) / 2, MU, (1 - MU) / 2], [0.1, 0.1, 0.8]),
        strict=True,
    ):
        probs[at] = torch.tensor(row, dtype=F64)
    return t, t.start(probs)


def rise(o: Objective, doses: Tensor, hp: dict, most: int = MOST) -> Tensor:
    t, theta = task()
    when = torch.full((len(doses),), float("inf"), dtype=F64)
    theta = theta.expand(len(doses), -1, -1)
    for s in islice(path(t, o, theta, lr=doses / K, k=K, G=G, adv=ADV, **hp), most):
        there = (t.right(s.pi)[:, 0] >= 0.5) & when.isinf()
        when = torch.where(there, s.update / K, when)
        if when.isfinite().all():
            break
    return when


def findings(found) -> list[Finding]:
    wide = f"gspo:{WIDE}"
    if not {"dapo", "up_dapo", wide, "up_gspo:eps_low=0.2", "gspo"} <= set(found):
        return []
    same = found["up_dapo"] / found["up_gspo:eps_low=0.2"]
    seq = found[wide] / found["dapo"]
    none = int(found["gspo"].isinf().sum())
    gain = found[wide] / found["up_gspo:eps_low=0.2"]
    dapo = found["dapo"] / found["up_dapo"]
    return [
        Finding(
            'UP "extends across optimization granularities"',
            "Sec. 4.2",
            HOLDS
            if gain.max() > 1.2 and dapo.max() > 1.2
            else PART
            if gain.max() > 1.2
            else FAILS,
            f"GSPO with DAPO's bounds takes up to {gain.max():.2g} times the rollouts of UP-GSPO, DAPO up to "
            f"{dapo.max():.2g} times those of UP-DAPO; between UP-DAPO and UP-GSPO the ratio is {same.min():.3g} to "
            f"{same.max():.3g}: what is left of the granularity is the clip of wrong answers",
        ),
        Finding(
            "A sequence ratio gives the rare token of a right answer more room than token ratios",
            "",
            HOLDS if seq.max() < 1 else PART if seq.min() < 1 else FAILS,
            f"at equal bounds GSPO takes {seq.min():.2g} to {seq.max():.2g} times DAPO's rollouts: one token of T may "
            f"use the whole (1+ε)^T; at its own bounds (4e-4) it does not arrive at {none} of {len(DOSES)} doses",
        ),
    ]
