# SPDX-License-Identifier: Apache-2.0
"""Losses whose cause is a denominator, a sampler's correction, a floor or a target, and
losses that look alike.
"""

import torch
from torch.nn.functional import pad

from . import ACCEPTED, REJECTED, Case
from .bodies import clipped, even, gspo, loss, mean, ratio, seq, tok, up


def two_means(J, A, m, share=1.0):
    """Return minus the means of the terms of A > 0 and of those of A <= 0, each over
    their own tokens, times `share`.
    """
    parts = [m & (A > 0), m & (A <= 0)]
    return -share * sum((J * p).sum() / p.sum().clamp(min=1) for p in parts)


def halves(J, m, size=lambda B: B // 2):
    """Return the mean of the means of two parts of the batch; size(B) is the rows of
    the first.
    """
    h = size(len(m))
    return tok(J, m) if h == 0 else (tok(J[:h], m[:h]) + tok(J[h:], m[h:])) / 2


def in_runs(lp, d, A, m, group):
    """Return UP-DAPO's loss with a new prompt wherever the id changes from one row to
    the next.
    """
    run = pad((group[1:] != group[:-1]).cumsum(0), (1, 0))
    J = up(lp, d, A, torch.inf)
    return -torch.stack(
        [(J * m)[run == i].sum() / m[run == i].sum() for i in run.unique()]
    ).mean()


def tpo(lp, old, A, m, group, eta=1.0, by=lambda n: n):
    """Return TPO's loss: for each prompt the cross-entropy of its responses to the
    target softmax(log π_old + A / eta), times by(number of responses), over all
    responses.
    """
    policy, start, a = (lp * m).sum(1), (old * m).sum(1), mean(A, m)
    out = 0
    for i in group.unique():
        rows = (group == i).nonzero()[:, 0]
        target = (start[rows] + a[rows] / eta).softmax(0).detach()
        out = out - (target * policy[rows].log_softmax(0)).sum() * by(len(rows))
    return out / len(m)


def topr(lp, d, A, m):
    """Return TOPR's loss without its truncation."""
    a, S = mean(A, m), (d * m).sum(1).exp().detach()
    return -(torch.where(a > 0, a, S * a) * (lp * m).sum(1)).mean()


def luspo(d, A, m, times):
    a, s = mean(A, m), mean(d, m).exp()
    return -(times * torch.minimum(s * a, s.clamp(1 - 2e-3, 1 + 2.5e-3) * a)).mean()


def by_product(d, A, m):
    """Return GSPO's loss, clipped where the product of the ratios leaves the bounds."""
    a, S = mean(A, m), (d * m).sum(1).exp()
    inside = torch.where(a > 0, S <= 1 + 4e-4, S >= 1 - 3e-4)
    return -torch.where(inside, mean(d, m).exp() * a, 0).mean()


def lengths(change):
    """GRPO with another number for each length."""
    return lambda d, A, m: -((even(d, A) * m).sum(1) / change(m.sum(1))).mean()


def tis(factor, clip=clipped):
    return lambda d, A, m, old, rollout_log_probs: tok(
        clip(d, A) * factor(ratio(m, old, rollout_log_probs), A), m
    )


def half_detached(d, A):
    r = d.exp()
    return torch.minimum(r * A, (r.clamp(0.8, 1.28) * A).detach())


FLOOR = -12
# name, objective, words of the cause, body; words after a "-" must not be said
CASES = [
    ("|o| + 1", "grpo", "1 is added to each length", lengths(lambda n: n + 1)),
    ("|o| + 3", "grpo", "3 is added to each length", lengths(lambda n: n + 3)),
    ("|o| + 1 of short ones", "grpo", "-added to each length", lengths(lambda n: n + (n < 9))),
    ("|o| at least 4", "grpo", "counts as at least 4", lengths(lambda n: n.clamp(min=4))),
    ("|o| at least 4, at most 100", "grpo", "-counts as at least", lengths(lambda n: n.clamp(4, 100))),
    ("|o| + 1, at most 100", "grpo", "-added to each length", lengths(lambda n: (n + 1).clamp(max=100))),
    ("3 for |o| = 2", "grpo", "-counts as at least", lengths(lambda n: torch.where(n == 2, 3, n))),
    ("N + 5", "dapo", "5 is added to the number of tokens",
     lambda d, A, m: tok(clipped(d, A), m) * m.sum() / (m.sum() + 5)),
    ("T for |o|", "luspo", "the padded width T is a factor", lambda d, A, m: luspo(d, A, m, m.shape[1])),
    ("T + 1 for |o|", "luspo", "-the padded width T is a factor", lambda d, A, m: luspo(d, A, m, m.shape[1] + 1)),
    ("two means", "dapo", "averaged over their own tokens; the two means are added",
     lambda d, A, m: two_means(clipped(d, A), A, m)),
    ("two halved means", "dapo", "averaged over their own tokens; the two means are averaged",
     lambda d, A, m: two_means(clipped(d, A), A, m, 0.5)),
    ("two means, one third", "dapo", "-averaged over their own tokens",
     lambda d, A, m: two_means(clipped(d, A), A, m, 1 / 3)),
    ("sequence means of A > 0", "dapo",
     "the terms of A > 0 have another aggregation than the rest: seq-mean-token-mean",
     lambda d, A, m: tok(clipped(d, A) * (A <= 0), m) + seq(clipped(d, A) * (A > 0), m)),
    ("two halves", "dapo", "cut into 2 parts", lambda d, A, m: halves(clipped(d, A), m)),
    ("a third and the rest", "dapo", "-cut into 2 parts", lambda d, A, m: halves(clipped(d, A), m, lambda B: B // 3)),
    ("neighbors", "up_dapo", "only where they are next to each other", in_runs),
    ("half detached", "dapo", "the clipped term of the minimum is detached",
     lambda d, A, m: tok(half_detached(d, A), m)),
    ("half detached where A > 0", "dapo", "-the clipped term of the minimum is detached",
     lambda d, A, m: tok(torch.where(A > 0, half_detached(d, A), clipped(d, A)), m)),
    ("bounds on the product", "gspo", "the bounds act on the product", by_product),
    ("floored", "dapo", "log-probabilities below -12 are set to it",
     lambda lp, old, A, m: tok(clipped(lp.clamp(min=FLOOR) - old.clamp(min=FLOOR), A), m)),
    ("floored, of long ones", "dapo", "-are set to it",
     lambda lp, d, A, m: tok(clipped(torch.where((lp < FLOOR) & (m.sum(1) > 3)[:, None], d.detach(), d), A), m)),
    ("first column", "gspo", "is read from the first column", lambda d, A, m: gspo(mean(d, m), A[:, 0])),
    ("C = 5", "tis(dapo)", "is_max is 5, not 2", tis(lambda w, A: w.clamp(max=5))),
    ("C by the sign", "tis(dapo)", "ρ, at most 5 where A > 0; ρ, at most 2 where A < 0",
     tis(lambda w, A: torch.where(A > 0, w.clamp(max=5), w.clamp(max=2)))),
    ("A > 0 alone", "tis(dapo)", "ρ, at most 2 where A > 0; 1 where A < 0",
     tis(lambda w, A: torch.where(A > 0, w.clamp(max=2), 1))),
    ("a plain mask", "icepop(dapo)", "1, 0 below 0.5, 0 above 5", tis(lambda w, A: ((w >= 0.5) & (w <= 5)).to(w))),
    ("a floor of ρ", "tis(dapo)", "ρ, at least 0.5, at most 2", tis(lambda w, A: w.clamp(0.5, 2))),
    ("C = 5 beside a wrong clip", "tis(dapo)", "-is_max is 5",
     tis(lambda w, A: w.clamp(max=5), lambda d, A: clipped(d, A, 0.7))),
    ("η = 2", "tpo", "eta is 2, not 1", lambda lp, old, A, m, group: tpo(lp, old, A, m, group, 2.0)),
    ("no G", "tpo", "not multiplied by the number of responses",
     lambda lp, old, A, m, group: tpo(lp, old, A, m, group, by=lambda n: 1)),
    ("untruncated", "topr", "no bound has an effect", topr),
]  # fmt: skip
# beside a sample
BY_DAY = {"C = 5", "η = 2", "two means", "half detached", "T for |o|", "TPO in float32"}
ROWS = [
    Case(loss(body), on, file="denominators", name=name, verdict=REJECTED, says=says)
    for name, on, says, body in CASES
]
# its weight is a difference of two shares of a group: rounding of the other responses
# moves it too
ROWS.append(
    Case(
        loss(
            lambda lp, old, A, m, group: tpo(
                lp.float(), old.float(), A.float(), m, group
            )
        ),
        "tpo",
        file="denominators",
        name="TPO in float32",
        verdict=ACCEPTED,
    )
)
