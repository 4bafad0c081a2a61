# SPDX-License-Identifier: Apache-2.0
"""Entropy along the flow: which right answers survive training, and at which dose UP
keeps more of them.

Several right answers of equal reward and different probability. Without drift every
objective here is the same flow, in which the common ones win (d log p_a/p_b = A (p_a -
p_b)). With k -> ∞ updates from one π_old UP ends at π_old A+, that is at π_old
restricted to the right answers: nothing is lost among them. What happens between is the
question.
"""

from itertools import islice

import torch
from torch import Tensor

from repro.exact import draw
from repro.exact.experiments import SURROGATES
from repro.exact.flow import path
from repro.exact.result import FAILS, HOLDS, PART, Finding, Result, Table
from repro.exact.task import F64, bandit
from upref.registry import Objective

ARMS = SURROGATES
MU = [0.2, 0.1, 0.05, 0.02, 0.01, 0.4, 0.22]
RIGHT = [1.0, 1, 1, 1, 1, 0, 0]
AGAIN = [2.0, 8.0, 32.0, 64.0]
K, G, ADV, AIM, MOST = 16, 8, "group_norm", 0.95, 1500
# beyond, one update alone takes all
DOSES = 2.0 ** torch.arange(0, 7.1, 0.5, dtype=F64)
ADAM = 2.0 ** torch.arange(-3, 3, dtype=F64)
SHOWN = 16.0  # the dose of the right panel


def run(arms) -> Result:
    starts = torch.tensor([MU], dtype=F64).expand(len(DOSES), -1)
    found = {n: kept(o, starts, DOSES, hp) for n, o, hp in arms}
    names = [n for n, *_ in arms]
    start = entropy(torch.tensor(MU[:5], dtype=F64) / sum(MU[:5]))
    tables = [
        Table(
            f"Entropy among the right answers when they have {AIM:.0%} of the mass, nats, by lr k "
            f"(before training, and UP's limit: {start:.3g})",
            ["objective", *[f"{d:g}" for d in DOSES[::2]]],
            [
                [n, *[None if v != v else v for v in found[n][0][::2].tolist()]]
                for n in names
            ],
        )
    ]
    adam = {
        n: kept(o, starts[: len(ADAM)], ADAM, hp, adam=True)[0] for n, o, hp in arms
    }
    columns = ["objective", *[f"{d:g}" for d in ADAM]]
    tables.append(
        Table(
            "The same with Adam", columns, [[n, *h.tolist()] for n, h in adam.items()]
        )
    )
    of = {n: (o, hp) for n, o, hp in arms}
    wins = {
        n: ensemble(of["up_dapo"], of[n])
        for n in names
        if "up_dapo" in of and n != "up_dapo"
    }
    if wins:
        title = f"Of {len(other_starts())} other starts, up_dapo keeps more entropy than this : less, by lr k"
        tables.append(
            Table(
                title,
                ["objective", *map(str, AGAIN)],
                [[n, *w] for n, w in wins.items()],
            )
        )
    with draw.panels(2, "Entropy kept among five right answers", names) as (
        fig,
        (left, right),
    ):
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
    return Result(
        "entropy",
        "What is left of the other right answers.",
        setting,
        tables,
        fig,
        findings(found, adam, wins),
    )


def entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-300).log()).sum(-1)


def kept(
    o: Objective,
    starts: Tensor,
    doses: Tensor,
    hp: dict,
    aim: float = AIM,
    most: int = MOST,
    k: int = K,
    adam: bool = False,
):
    """From each start [S, 7] at its dose [S]: the entropy among the right arms at the
    first update at which they have `aim` [S], NaN if in `most` updates they have not;
    along the path, the share of right answers and the entropy of the whole policy,
    [updates, S]."""
    q, shares, whole = reached(o, starts, doses, hp, aim, most, k, adam)
    return entropy(q), shares, whole


def reached(
    o: Objective,
    starts: Tensor,
    doses: Tensor,
    hp: dict,
    aim: float = AIM,
    most: int = MOST,
    k: int = K,
    adam: bool = False,
):
    """Likewise, with the shares of the right answers themselves in place of their
    entropy: [S, 7], NaN likewise.
    """
    task = bandit(RIGHT)
    theta = task.start(starts[:, None])
    at_aim = torch.full_like(starts, float("nan"))
    shares, whole = [], []
    for s in islice(
        path(task, o, theta, lr=doses / k, k=k, G=G, adv=ADV, adam=adam, **hp), most
    ):
        P = s.pi @ task.reward
        q = s.pi * task.reward / P[:, None]
        new = (P >= aim) & at_aim[:, 0].isnan()
        at_aim = torch.where(new[:, None], q, at_aim)
        shares.append(P)
        whole.append(entropy(s.pi))
        if not at_aim.isnan().any():
            break
    return at_aim, torch.stack(shares), torch.stack(whole)


def other_starts() -> Tensor:
    """Right mass x how unequal the right answers are x how unequal the wrong ones: [24,
    7].
    """
    rows = []
    for right in (0.1, 0.3, 0.6):
        for decay in (0.9, 0.7, 0.5, 0.3):
            q = decay ** torch.arange(5, dtype=F64)
            for wrong in (0.5, 0.9):
                rows.append(
                    torch.cat(
                        [
                            right * q / q.sum(),
                            (1 - right) * torch.tensor([wrong, 1 - wrong], dtype=F64),
                        ]
                    )
                )
    return torch.stack(rows)


def ensemble(up: tuple[Objective, dict], base: tuple[Objective, dict]) -> list[str]:
    """In how many of the other starts the first keeps more entropy than the second, and
    in how many less, by dose.

    They are equal where the first update, which is on-policy, already takes all.
    """
    starts = other_starts()
    S, doses = (
        starts.repeat_interleave(len(AGAIN), 0),
        torch.tensor(AGAIN, dtype=F64).repeat(len(starts)),
    )
    a, b = (kept(o, S, doses, hp)[0].reshape(len(starts), -1) for o, hp in (up, base))
    return [
        f"{int(m)} : {int(n)}"
        for m, n in zip((a > b).sum(0), (a < b).sum(0), strict=True)
    ]


def findings(found, adam, wins) -> list[Finding]:
    if not {"dapo", "up_dapo", "dapo_no_upper_clip"} <= set(found):
        return []
    up, dapo, bare = (found[n][0] for n in ("up_dapo", "dapo", "dapo_no_upper_clip"))
    less, more = up < dapo * 0.99, up > dapo * 1.01
    return [
        Finding(
            "UP keeps more entropy than DAPO",
            "Sec. 5.2",
            HOLDS if not less.any() else PART if more.any() else FAILS,
            f"more at lr k = {spans(more)}, less at {spans(less)} (down to {(up / dapo).min():.2g} of it): there the "
            f"clip stops the common right answers first. Of {len(other_starts())} other starts, more : less "
            + listed(wins["dapo"])
            + "; with Adam, whose steps are equal for all right tokens, every objective keeps all of it (UP/DAPO "
            f"{(adam['up_dapo'] / adam['dapo']).min():.3g} to {(adam['up_dapo'] / adam['dapo']).max():.3g})",
        ),
        Finding(
            "UP keeps more entropy than importance sampling without a clip",
            "Sec. 5.3",
            HOLDS if (up > bare).all() else PART,
            f"{(up / bare).min():.2g} to {(up / bare).max():.2g} times, by dose; of the other starts, more : less "
            + listed(wins["dapo_no_upper_clip"]),
        ),
    ]


def listed(wins: list[str]) -> str:
    return ", ".join(f"{w} at {d:g}" for d, w in zip(AGAIN, wins, strict=True))


def spans(at: Tensor) -> str:
    """The doses that are marked, neighbours joined: "1, 32 to 128"."""
    runs: list[list[int]] = []
    for i in at.nonzero()[:, 0].tolist():
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    text = [
        f"{DOSES[a]:.3g}" + (f" to {DOSES[b]:.3g}" if b > a else "") for a, b in runs
    ]
    return ", ".join(text) or "no dose"
