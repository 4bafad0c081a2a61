# SPDX-License-Identifier: Apache-2.0
"""A sentence about the cause: losses of which it is true, and losses that look alike,
of which it is not.
"""

import math

import torch

from . import ACCEPTED, REJECTED, Case
from .bodies import calm, clipped


def J(lp, old, A, low=0.2, high=0.28):
    """Return DAPO's terms; low and high are the distances of the bounds from 1."""
    return clipped(lp - old, A, 1 - low, 1 + high)


def dapo(change=J, total=lambda x, m: -torch.where(m, x, 0).sum() / m.sum()):
    """Return a loss: total(change(lp, old, A), mask). By default that is DAPO's."""
    return lambda log_prob, old_log_prob, advantages, mask: total(
        change(*calm(mask, log_prob, old_log_prob, advantages)), mask
    )


def unmasked(total):
    """Return a loss of DAPO's terms, with what masked slots hold left in; `total` gets
    the mask.
    """
    return lambda log_prob, old_log_prob, advantages, mask: total(
        J(log_prob, old_log_prob, advantages), mask
    )


def up_dapo(ids):
    """Return UP-DAPO's loss, with ids(group, number of rows) in place of the group ids."""

    def loss(log_prob, old_log_prob, advantages, mask, group):
        """Return the mean of each prompt's token mean, with UP where A > 0 and PPO's
        lower clip elsewhere.
        """
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        r = torch.where(A > 0, lp - lp.detach(), lp - old).exp()
        x = torch.where(A > 0, r * A, torch.minimum(r * A, r.clamp(min=0.8) * A))
        g = ids(group, len(mask))
        each = [
            torch.where(mask, x, 0)[g == i].sum() / mask[g == i].sum()
            for i in g.unique()
        ]
        return -torch.stack(each).mean()

    return loss


def by_row(log_prob, old_log_prob, advantages, mask, group):
    """Return UP-DAPO's loss with the advantages of row i scaled by 1 + i/10."""
    weight = 1 + torch.arange(len(mask), dtype=log_prob.dtype)[:, None] / 10
    return up_dapo(lambda g, n: g)(
        log_prob, old_log_prob, weight * advantages, mask, group
    )


def counted(n):
    """Return a total: minus the sum of the terms, divided by n(lengths, number of
    rows).
    """
    return lambda x, m: -torch.where(m, x, 0).sum() / n(m.sum(1), len(m))


def stateful():
    """Return a surrogate that grows by 0.1 % with each call."""
    calls = [0]

    def change(lp, old, A):
        """Return DAPO's terms times 1 + (the number of the call)/1000."""
        calls[0] += 1
        return J(lp, old, A) * (1 + calls[0] / 1000)

    return change


def entropy(of):
    """Return a loss with of(DAPO's terms, entropies) in place of the terms."""

    def loss(log_prob, old_log_prob, advantages, mask, entropy):
        """Return minus the mean over tokens of the terms."""
        lp, old, A, H = calm(mask, log_prob, old_log_prob, advantages, entropy)
        return -torch.where(mask, of(J(lp, old, A), H), 0).sum() / mask.sum()

    return loss


def micro(n):
    """Return a loss of the sum over a micro-batch, divided by n(mask, totals), where
    totals are the mini-batch's.
    """

    def loss(log_prob, old_log_prob, advantages, mask, totals):
        x = J(*calm(mask, log_prob, old_log_prob, advantages))
        return -torch.where(mask, x, 0).sum() / n(mask, totals)

    return loss


def quotient(lp, old, A):
    r = lp.exp() / old.exp()
    return torch.minimum(r * A, r.clamp(0.8, 1.28) * A)


def ranked(by):
    """Return a loss of the sum over a micro-batch, times by(number of ranks, mask),
    over the mini-batch's tokens.
    """

    def loss(log_prob, old_log_prob, advantages, mask, totals, num_ranks=1):
        x = J(*calm(mask, log_prob, old_log_prob, advantages))
        return -torch.where(mask, x, 0).sum() * by(num_ranks, mask) / totals.tokens

    return loss


class Passed(torch.autograd.Function):
    """A backward pass that makes something of its own of grad_output."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.by(g), None


def passed(by):
    return dapo(
        total=lambda x, m: Passed.apply(-torch.where(m, x, 0).sum() / m.sum(), by)
    )


def eps_high(acts):
    """Return DAPO's loss, whose argument eps_high is used only if acts(log r, mask),
    and is 0.28 otherwise.
    """

    def loss(log_prob, old_log_prob, advantages, mask, eps_high=0.28):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        return (
            -torch.where(
                mask, J(lp, old, A, 0.2, eps_high if acts(lp - old, mask) else 0.28), 0
            ).sum()
            / mask.sum()
        )

    return loss


def by_length(where):
    """Return DAPO's loss averaged over responses first if where(mask), and over all
    tokens otherwise.
    """

    def mean(x, m):
        return (
            (x.sum(1) / m.sum(1).clamp(min=1)).mean() if where(m) else x.sum() / m.sum()
        )

    return dapo(total=lambda x, m: -mean(torch.where(m, x, 0), m))


def bonus(of):
    """Return a loss with of(entropies, log r) added to DAPO's terms."""

    def loss(log_prob, old_log_prob, advantages, mask, entropy):
        lp, old, A, H = calm(mask, log_prob, old_log_prob, advantages, entropy)
        return -torch.where(mask, J(lp, old, A) + of(H, lp - old), 0).sum() / mask.sum()

    return loss


def up_nan(where):
    """Return UP's loss with NaN terms where where(log π, log r, A) is true. Its ratio
    stops at e^60, so that nothing else overflows.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        """Return UP-DAPO's loss as a token mean, with NaN as the weight of the tokens
        that `where` picks.
        """
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        r = (lp - old).clamp(max=60).exp()
        x = torch.where(A > 0, lp * A, torch.minimum(r * A, r.clamp(min=0.8) * A))
        return (
            -torch.where(
                mask, x * torch.where(where(lp, lp - old, A), math.nan, 1.0), 0
            ).sum()
            / mask.sum()
        )

    return loss


def up_where(log_prob, old_log_prob, advantages, mask):
    """Return UP's loss as nearly everybody writes it: with both branches computed, so
    that the one not taken may overflow.
    """
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    r = (lp - old).exp()
    x = torch.where(
        A > 0, (lp - lp.detach()).exp() * A, torch.minimum(r * A, r.clamp(min=0.8) * A)
    )
    return -torch.where(mask, x, 0).sum() / mask.sum()


def rare(below, times=math.nan):
    """Return DAPO's loss with terms times `times` (NaN by default) for tokens with log
    π_θ below `below` and |log r| < 1.
    """

    def hit(lp, old):
        return (lp < below) & ((lp - old).abs() < 1)

    return dapo(
        lambda lp, old, A: J(lp, old, A) * torch.where(hit(lp, old), times, 1.0)
    )


def whitened(where=lambda m: True, eps=1e-8):
    """Return DAPO's loss with advantages whitened over the batch if where(mask).

    As in verl, the variance divides by the number of tokens, and eps is under its root.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        mean, var = A[mask].mean(), A[mask].var(correction=0)
        A = (A - mean) * torch.rsqrt(var + eps) if where(mask) else A
        return -torch.where(mask, J(lp, old, A), 0).sum() / mask.sum()

    return loss


def cut(columns, where=lambda m: True):
    """Return DAPO's loss over some columns alone if where(mask): in the numerator and
    in the denominator.
    """

    def mean(x, m):
        return -torch.where(m, x, 0).sum() / m.sum().clamp(min=1)

    return dapo(
        total=lambda x, m: (
            mean(x[:, columns], m[:, columns]) if where(m) else mean(x, m)
        )
    )


def half_stopped(x, at):
    """Stop half of the gradient where |x| is above `at`."""
    return torch.where(x.abs() > at, 0.5 * x + 0.5 * x.detach(), x)


def near(name, says, true, *others, on="dapo", verdict=REJECTED, **hp):
    """Yield a case whose cause is the sentence `says`, and cases of losses that look
    alike, whose cause must be another.
    """
    yield Case(true, on, hp, name=f"{name}: true", verdict=verdict, says=says)
    yield from (
        Case(fn, on, hp, name=f"{name}: near", verdict=verdict, says=f"-{says}")
        for fn in others
    )


def fails(name, oracle, says, true, other, on="dapo"):
    """Yield two cases that fail the same oracle: one whose cause is the sentence
    `says`, and one whose cause must be another.
    """
    yield Case(true, on, name=f"{name}: true", oracles={oracle}, says=says)
    yield Case(other, on, name=f"{name}: another", oracles={oracle}, says=f"-{says}")


CASES = [
    *near("bonus", "a bonus of", bonus(lambda H, x: 0.01 * H),
        bonus(lambda H, x: 0.01 * H**2), bonus(lambda H, x: 0.01 * H.clamp(max=1.5)),
        bonus(lambda H, x: 0.01 * H * (len(H) > 20)), bonus(lambda H, x: 0.01 * H * x.abs().max().clamp(min=0.5)),
        bonus(lambda H, x: 0.01 * H * (H.shape[1] < 30))),
    *near("dead", "has no effect", eps_high(lambda x, m: False),
        eps_high(lambda x, m: 1 < len(m) < 8), eps_high(lambda x, m: m.shape[1] > 30),
        eps_high(lambda x, m: x.abs().max() < 1), eps_high(lambda x, m: m.sum() == 1), eps_high=0.28),
    Case(eps_high(lambda x, m: len(m) > 60), "dapo", {"eps_high": 0.28}, name="dead: near, in large batches",
         says="-has no effect"),
    *near("micro-batches", "own tokens or responses", micro(lambda m, t: m.sum()),
        micro(lambda m, t: m.sum() if 2 * len(m) >= t.sequences else t.tokens),
        micro(lambda m, t: m.sum() if len(m) == 4 else t.tokens),
        micro(lambda m, t: m.sum() if m.shape[1] == 9 else t.tokens),
        micro(lambda m, t: m.sum() if m.shape[1] < 30 else t.tokens)),
    *near("ranks", "not scaled by the number of ranks", ranked(lambda n, m: 1),
        ranked(lambda n, m: 1 if n == 2 else n), ranked(lambda n, m: 1 if n == 4 else n),
        ranked(lambda n, m: n if m.sum() > 25 else 1), ranked(lambda n, m: n if m.shape[1] > 30 else 1)),
    *near("loss-scale", "leaves out what comes from above", passed(torch.ones_like),
        passed(lambda g: g.clamp(min=1)), passed(torch.sign), passed(lambda g: g.clamp(max=1) * 2 if g < 1 else g)),
    *near("empty row", "counted among the responses", dapo(total=counted(lambda n, B: B * n[n > 0].double().mean())),
        dapo(total=lambda x, m: -torch.where(m, x, 0).sum() / m.sum()
             * ((len(m) - 1) / len(m) if (m.sum(1) == 0).any() and x.abs().max() > 1 else 1)),
        dapo(total=counted(lambda n, B: n.sum() * (55 / 54 if (n == 0).any() else 1)))),
    *near("aggregation", "seq-mean-token-mean", by_length(lambda m: True),
        by_length(lambda m: m.shape[1] == 9), by_length(lambda m: m.sum(1).max() < 10),
        by_length(lambda m: len(m) > 7)),
    *near("blocks", "groups are taken for blocks of", up_dapo(lambda g, n: torch.arange(n) // 4),
        up_dapo(lambda g, n: torch.arange(n) // ((n + 1) // 2)), up_dapo(lambda g, n: torch.arange(n) // 4 % 3),
        on="up_dapo"),
    *near("overflow", "overflows", up_where,
        *(up_nan(lambda lp, x, A, at=at: x > at) for at in (80, 87, 89.5, 95, 700, 712)),
        up_nan(lambda lp, x, A: (x > 88.723) & (A > 0.5)), up_nan(lambda lp, x, A: (x > 88.723) & (lp > -100)),
        on="up_dapo", verdict=ACCEPTED),
    *near("whitened", "whitened again", whitened(),
        whitened(lambda m: len(m) > 7), whitened(lambda m: m.shape[1] < 30), whitened(eps=0.3)),
    *near("power", "the ratio is taken to the power 1.5", dapo(lambda lp, old, A: J(1.5 * lp, 1.5 * old, A)),
        dapo(lambda lp, old, A: 1.5 * J(lp, old, A)), dapo(lambda lp, old, A: 1.5 * J(lp, old, A, 0.2, 0.3)),
        dapo(lambda lp, old, A: J(lp * (k := torch.where(A > 0, 1.5, 1)), old * k, A))),
    *near("first column", "the first column of the batch is not trained, and not counted", cut(slice(1, None)),
        cut(slice(2, None)), cut(slice(1, None), lambda m: len(m) > 7), cut(slice(1, None), lambda m: m.shape[1] < 30)),
    *near("last column", "the last column of the batch is not trained, and not counted", cut(slice(-1)),
        cut(slice(-2)), cut(slice(-1), lambda m: len(m) > 7), cut(slice(-1), lambda m: m.shape[1] < 30)),
    *near("underflow", "underflows", dapo(quotient), rare(-110), rare(-85), rare(-700), rare(-750), verdict=ACCEPTED),
    Case(rare(-80, 0.5), "dapo", name="underflow: half a weight", oracles={"every-value"}, says="-underflows"),
    *fails("padding: leak", "padding", "the mask is ignored",
        unmasked(lambda x, m: -x.mean()),
        unmasked(lambda x, m: -(x * (m | m.roll(1, 1))).sum() / m.sum())),
    *fails("padding: width", "padding", "it divides by the padded width",
        dapo(total=lambda x, m: -torch.where(m, x, 0).mean()),
        dapo(total=lambda x, m: -torch.where(m, x, 0).sum() / (m.sum() + m.shape[1]))),
    *fails("padding: row", "padding", "counted among the responses",
        dapo(total=counted(lambda n, B: B * n[n > 0].double().mean())),
        dapo(total=counted(lambda n, B: n.clamp(min=1).sum()))),
    *fails("padding: slots", "padding", "all slots of the batch",
        dapo(total=lambda x, m: -torch.where(m, x, 0).mean()),
        dapo(total=counted(lambda n, B: B * n[n > 0].double().mean()))),
    *fails("permutation", "permutation", "blocks of",
        up_dapo(lambda g, n: torch.arange(n) // 4), by_row, on="up_dapo"),
    *fails("determinism: drawn", "determinism", "it draws random numbers",
        dapo(lambda lp, old, A: J(lp, old, A) * (1 + torch.rand_like(lp) / 9)), dapo(stateful())),
    *fails("determinism: state", "determinism", "keeps state",
        dapo(stateful()),
        dapo(lambda lp, old, A: J(lp, old, A) * (1 + torch.rand_like(lp) / 9))),
    *fails("scaling: divided", "scaling", "it is divided out",
        dapo(lambda lp, old, A: J(lp, old, A / A.abs().max().clamp(min=1e-9))),
        dapo(lambda lp, old, A: J(lp, old, A.clamp(-1.5, 1.5)))),
    *fails("scaling: squared", "scaling", "A enters squared",
        dapo(lambda lp, old, A: J(lp, old, A * A.abs())),
        dapo(lambda lp, old, A: J(lp, old, A**3))),
    *fails("micro-batches", "micro-batches", "by the micro-batch's own",
        micro(lambda m, t: m.sum()),
        micro(lambda m, t: t.tokens + 0.1 * (t.tokens - m.sum()))),
    *fails("data-parallel: ranks", "data-parallel", "by the rank's own",
        micro(lambda m, t: m.sum()),
        micro(lambda m, t: t.tokens + 0.1 * (t.tokens - m.sum()))),
    *fails("extremes: clamp", "extremes", "log r is clamped to ±10",
        dapo(lambda lp, old, A: J((lp - old).clamp(-10, 10), 0 * old, A)),
        dapo(lambda lp, old, A: J(half_stopped(lp - old, 10), 0 * old, A))),
    *fails("stop-gradient: bonus", "stop-gradient", "a bonus of 0.01 times the entropy",
        entropy(lambda x, H: x + 0.01 * H),
        entropy(lambda x, H: x * (1 + H - H.detach()))),
    *fails("on-policy", "on-policy", "its gradient is 3 times that of dapo",
        dapo(lambda lp, old, A: 3 * J(lp, old, A)),
        dapo(lambda lp, old, A: torch.where(A.abs() > 1, 3, 2) * J(lp, old, A))),
    Case(dapo(total=lambda x, m: -torch.where(m, x, 0).sum() / (m.sum() + 1e-3)), "dapo", nightly=True,
         name="small denominator: true", oracles={"on-policy"}, says="0.001 is added to the number of tokens"),
    Case(dapo(total=lambda x, m: -torch.where(m, x, 0).sum() / (m.sum() + 1e-3 * m.shape[1])), "dapo", nightly=True,
         name="small denominator: by width", oracles={"on-policy"}, says="-is added to the number of tokens"),
    Case(up_dapo(lambda g, n: g.to(torch.int8)), "up_dapo", name="ids in int8",
         oracles={"unusual-inputs"}, regime="group ids beyond 2^40", nightly=True),
]  # fmt: skip
