# SPDX-License-Identifier: Apache-2.0
"""Coverage: how many right answers keep their share of the right mass while training
makes right answers common.

The share of right answer a is q_a = π_a / Σ_right π. Two closed forms, for small steps
on a table:

* Importance sampling without a clip follows the gradient of the expected reward,
  whatever π_old is: dz_a/dt = π_a (R_a - P), P the mass of right answers. With x = e^z
  and Z = Σ x that is d(1/x_a)/dt = -(1 - P)/Z for every right answer and +P/Z for every
  wrong one. So 1/x_a falls by the same c for all right answers, and 1/x_w rises by the
  same d for all wrong ones: the common ones win, and in the limit only the most common
  one is left. d follows from c because Σ z stays. Every objective here does the same as
  long as the data are on-policy.
* UP with many updates from one π_old ends at π_old A+ (fixed_points): q stays as it is
  in π_old, and all are kept.

DAPO lies between these: its clip ends the push of whichever right answer has gone 1.28
π_old, most common ones first.
"""

import torch
from torch import Tensor

from repro.exact import draw
from repro.exact.experiments.entropy import ADV, AIM, DOSES, MU, SHOWN, G, K, reached
from repro.exact.result import FAILS, HOLDS, PART, Finding, Result, Table
from repro.exact.task import F64

ARMS = ["is_pg", "dapo", "up_dapo", "dapo_no_upper_clip", "cispo", "gppo"]
# right answers; the part of its share that counts as kept; Best@32
N, KEPT, TRIES = 5, 0.5, 32
AT = DOSES[::2]


def run(arms) -> Result:
    start = torch.tensor(MU, dtype=F64)
    q0 = start[:N] / start[:N].sum()
    found = {
        n: reached(o, start.expand(len(AT), -1), AT, hp)[0][:, :N] for n, o, hp in arms
    }
    limit = importance_sampling(start)
    doses = [f"{d:g}" for d in AT]
    tables = [
        Table(
            f"How many of {N} right answers keep at least {KEPT:.0%} of their share, when {AIM:.0%} of the mass is "
            "right, by lr k",
            ["objective", *doses],
            [
                *(
                    [n, *[None if v != v else int(v) for v in count(q, q0).tolist()]]
                    for n, q in found.items()
                ),
                [
                    "importance sampling, closed form",
                    *[int(count(limit, q0))] * len(AT),
                ],
                ["UP, k → ∞, closed form", *[N] * len(AT)],
            ],
        ),
        Table(
            f"Effective number of right answers there, 1 / Σ q² ({effective(q0):.3g} before training)",
            ["objective", *doses],
            [
                *(
                    [n, *[None if v != v else v for v in effective(q).tolist()]]
                    for n, q in found.items()
                ),
                [
                    "importance sampling, closed form",
                    *[float(effective(limit))] * len(AT),
                ],
                ["UP, k → ∞, closed form", *[float(effective(q0))] * len(AT)],
            ],
        ),
        Table(
            f"Different right answers found in {TRIES} tries there, expected "
            f"({distinct(start[:N]):.3g} before training)",
            ["objective", *doses],
            [
                [n, *[None if v != v else v for v in distinct(AIM * q).tolist()]]
                for n, q in found.items()
            ],
        ),
    ]
    names = list(found)
    with draw.panels(2, "Right answers that keep their share", names) as (
        fig,
        (left, right),
    ):
        colour, at = draw.colours(names), int((AT == SHOWN).nonzero()[0])
        for n in names:
            draw.line(left, AT, effective(found[n]), n, colour)
            draw.line(right, q0, found[n][at] / q0, n, colour, marker="o", ms=3)
        left.axhline(float(effective(q0)), color="#888888", lw=0.8, ls=(0, (4, 3)))
        left.axhline(float(effective(limit)), color="#888888", lw=0.8, ls=(0, (1, 2)))
        right.plot(q0, limit / q0, color="#888888", lw=0.8, ls=(0, (1, 2)))
        right.axhline(1, color="#888888", lw=0.8, ls=(0, (4, 3)))
        left.set(
            xscale="log",
            xlabel=f"lr k, k = {K}",
            ylabel="effective number",
            ylim=(1, None),
        )
        right.set(
            xscale="log",
            xlabel="share of the right mass before training",
            ylabel="share after / before",
        )
        draw.heading(left, f"at {AIM:.0%} right, by dose")
        draw.heading(right, f"each right answer, lr k = {SHOWN:g}")
    setting = (
        f"Seven arms, π_old = {MU} at the start, the first five right; infinite batch of groups of {G}, k = {K} "
        f"updates from one π_old, advantage {ADV} for every arm. Closed forms: dashed, UP with k → ∞; dotted, "
        "importance sampling."
    )
    return Result(
        "coverage",
        "Who keeps the other right answers.",
        setting,
        tables,
        fig,
        findings(found, limit, q0),
    )


def count(q: Tensor, q0: Tensor) -> Tensor:
    """How many answers have at least KEPT of the share that they had; NaN where q is."""
    return torch.where(
        q.isnan().any(-1), float("nan"), (q >= KEPT * q0).sum(-1).to(F64)
    )


def effective(q: Tensor) -> Tensor:
    """1 / Σ q²: n for n equal shares, 1 where one answer has all (the inverse of
    Simpson's index).
    """
    return 1 / q.square().sum(-1)


def distinct(p: Tensor) -> Tensor:
    """How many different ones of the answers with these probabilities TRIES independent
    tries find, expected.
    """
    return (1 - (1 - p) ** TRIES).sum(-1)


def importance_sampling(start: Tensor, aim: float = AIM, right: int = N) -> Tensor:
    """The shares of the right answers, in closed form, when they have `aim` of the
    mass: see above.
    """
    inverse = 1 / start
    low, high = torch.zeros((), dtype=F64), inverse[:right].min()
    for _ in range(200):
        c = (low + high) / 2
        x = 1 / (inverse[:right] - c)
        wrong = rise(inverse, (x / start[:right]).log().sum(), right)
        P = x.sum() / (x.sum() + (1 / (inverse[right:] + wrong)).sum())
        low, high = (c, high) if P < aim else (low, c)
    return x / x.sum()


def rise(inverse: Tensor, gained: Tensor, right: int) -> Tensor:
    """The d by which every wrong answer's 1/x has risen once Σ z of the right ones has
    gained so much.
    """
    low, high = torch.zeros((), dtype=F64), inverse[right:].max() * gained.exp()
    for _ in range(200):
        d = (low + high) / 2
        lost = ((inverse[right:] + d) / inverse[right:]).log().sum()
        low, high = (d, high) if lost < gained else (low, d)
    return d


def findings(found: dict[str, Tensor], limit: Tensor, q0: Tensor) -> list[Finding]:
    if not {"is_pg", "dapo", "up_dapo"} <= set(found):
        return []
    IS, dapo, up = (effective(found[n]) for n in ("is_pg", "dapo", "up_dapo"))
    kept = {
        n: [int(x) for x in count(found[n], q0).tolist()]
        for n in ("is_pg", "dapo", "up_dapo")
    }
    said = lambda n: " to ".join(map(str, sorted({min(kept[n]), max(kept[n])})))
    more = up > dapo * 1.01
    at = lambda which: ", ".join(f"{d:g}" for d in AT[which]) or "no dose"
    return [
        Finding(
            "Importance sampling without a clip makes common right answers commoner; UP keeps more of the others",
            "",
            HOLDS if (up > IS).all() else PART if (up > IS).any() else FAILS,
            f"of {N} right answers {said('is_pg')} keeps half of its share with importance sampling (closed form: "
            f"{int(count(limit, q0))}), {said('up_dapo')} with UP, the more the larger the dose; the effective number "
            f"is {float((up / IS).min()):.2f} to {float((up / IS).max()):.2f} times as large, by dose",
        ),
        Finding(
            "UP covers more right answers than DAPO",
            "",
            HOLDS if more.all() else PART if more.any() else FAILS,
            f"the effective number is larger at lr k = {at(more)}, smaller at {at(up < dapo * 0.99)}: there DAPO's "
            f"clip stops the most common ones first; {said('up_dapo')} of {N} keep half of their share with UP, "
            f"{said('dapo')} with DAPO",
        ),
    ]
