# SPDX-License-Identifier: Apache-2.0
"""Entropy along the flow: which right answers survive training, and at which dose UP keeps more of them.

Several right answers of equal reward and different probability. Without drift every objective here is the same flow, in
which the common ones win (d log p_a/p_b = A (p_a - p_b)). With k -> ∞ updates from one π_old UP ends at π_old A+, that
is at π_old restricted to the right answers: nothing is lost among them. What happens between is the question.
"""

from itertools import islice

import torch
from torch import Tensor

from repro.exact import draw
from repro.exact.flow import path
from repro.exact.result import FAILS, HOLDS, PART, Finding, Result, Table
from repro.exact.task import F64, bandit
from upref.registry import Objective

ARMS = ["dapo", "dapo_no_upper_clip", "up_dapo", "reinforce_off_policy", "cispo", "gppo", "sapo", "dppo_tv", "aspo"]
MU = [0.2, 0.1, 0.05, 0.02, 0.01, 0.4, 0.22]
RIGHT = [1.0, 1, 1, 1, 1, 0, 0]
K, G, ADV, AIM, MOST = 16, 8, "group_norm", 0.95, 1500
DOSES = 2.0 ** torch.arange(0, 9.1, 0.5, dtype=F64)
SHOWN = 16.0  # the dose of the right panel


def run(arms) -> Result:
    found = {n: kept(o, DOSES, hp) for n, o, hp in arms}
    names = [n for n, *_ in arms]
    start = entropy(torch.tensor(MU[:5], dtype=F64) / sum(MU[:5]))
    tables = [
        Table(
            f"Entropy among the right answers when they have {AIM:.0%} of the mass, nats, by lr k "
            f"(before training, and UP's limit: {start:.3g})",
            ["objective", *[f"{d:g}" for d in DOSES[::2]]],
            [[n, *[None if v != v else v for v in found[n][0][::2].tolist()]] for n in names],
        )
    ]
    with draw.panels(2, "Entropy kept among five right answers", names) as (fig, (left, right)):
        colour = draw.colours(names)
        at = int((DOSES == SHOWN).nonzero()[0])
        for n in names:
            draw.line(left, DOSES, found[n][0], n, colour)
            P, H = (x[:, at] for x in found[n][1:])
            draw.line(right, P, H, n, colour)
        left.axhline(start, color="#888888", lw=0.8, ls=(0, (4, 3)))
        left.set(xscale="log", xlabel=f"lr k, k = {K}", ylabel="nats", ylim=(0, None))
        right.set(xlabel="share of right answers", xlim=(0.35, 1), ylim=(0, None))
        draw.heading(left, f"at {AIM:.0%} right, by dose; dashed: before training")
        draw.heading(right, f"of the whole policy along the path, lr k = {SHOWN:g}")
    setting = (
        f"Seven arms, π_old = {MU} at the start, the first five right; infinite batch of groups of {G}, k = {K}, "
        f"advantage {ADV} for every arm."
    )
    return Result("entropy", "What is left of the other right answers.", setting, tables, fig, findings(found))


def entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-300).log()).sum(-1)


def kept(o: Objective, doses: Tensor, hp: dict, mu=None, aim: float = AIM, most: int = MOST, k: int = K):
    """Entropy among the right arms at the first update with share >= aim [doses], NaN if in `most` updates there is
    none; and along the path the share of right answers and the entropy of the whole policy, [updates, doses]."""
    task = bandit(RIGHT)
    theta = task.start([mu or MU]).expand(len(doses), -1, -1)
    H = torch.full((len(doses),), float("nan"), dtype=F64)
    shares, whole = [], []
    for s in islice(path(task, o, theta, lr=doses / k, k=k, G=G, adv=ADV, **hp), most):
        P = s.pi @ task.reward
        q = s.pi * task.reward / P[:, None]
        H = torch.where((P >= aim) & H.isnan(), entropy(q), H)
        shares.append(P)
        whole.append(entropy(s.pi))
        if not H.isnan().any():
            break
    return H, torch.stack(shares), torch.stack(whole)


def findings(found) -> list[Finding]:
    if not {"dapo", "up_dapo", "dapo_no_upper_clip"} <= set(found):
        return []
    up, dapo, bare = (found[n][0] for n in ("up_dapo", "dapo", "dapo_no_upper_clip"))
    less, more = DOSES[up < dapo * 0.99], DOSES[up > dapo * 1.01]
    span = lambda d: f"lr k = {d.min():.3g} to {d.max():.3g}" if len(d) else "no dose"
    verdict = HOLDS if not len(less) else PART if len(more) else FAILS
    start = entropy(torch.tensor(MU[:5], dtype=F64) / sum(MU[:5]))
    rising = (found["up_dapo"][2][-1] > found["up_dapo"][2][0]).any()
    return [
        Finding(
            "UP keeps more entropy than DAPO", "Sec. 5.2", verdict,
            f"more at {span(more)}, less at {span(less)} (down to {(up / dapo).min():.2g} of it): there the clip stops "
            "the common right answers first, and that keeps the rare ones",
        ),
        Finding(
            "UP keeps more entropy than importance sampling without a clip", "Sec. 5.3",
            HOLDS if (up > bare).all() else PART,
            f"at every dose, {(up / bare).min():.3g} to {(up / bare).max():.3g} times: weight 1 where the other has "
            "r, so that who leads is not fed more" if (up > bare).all() else "not at every dose",
        ),
        Finding(
            "UP's entropy rises throughout training", "Sec. 5.4", PART if rising else FAILS,
            f"at {AIM:.0%} right it is above its start at {'some' if rising else 'no'} dose; the most that can be kept "
            f"among the right answers is what was there ({start:.3g} nats)",
        ),
    ]  # fmt: skip
