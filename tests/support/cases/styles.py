# SPDX-License-Identifier: Apache-2.0
"""Losses in several styles, right and wrong. A row is (name, function, objective,
hyperparameters, if any); one of WRONG, each meant to be DAPO, (what its author did,
function, oracle, words of the regime, words of the cause).
"""

from functools import partial

import torch

import upref
from upref.ops import sg

from .bodies import calm


# ---- right, in several styles --------------------------------------------------------
def plain(log_prob, old_log_prob, advantages, mask, eps_low=0.2, eps_high=0.28, c=None):
    """Return DAPO's loss, with a dual clip if c is given."""
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    r = (lp - old).clamp(-20, 20).exp()
    J = torch.min(r * A, r.clamp(1 - eps_low, 1 + eps_high) * A)
    if c is not None:
        J = torch.where(A < 0, torch.max(J, c * A), J)
    return -J.sum() / (mask.sum() + 1e-8)


def trl(per_token_logps, old_per_token_logps, advantages, completion_mask, eps=0.2):
    """Return GRPO's loss in TRL's style, one advantage per response."""
    r = torch.exp(
        (per_token_logps - old_per_token_logps).masked_fill(~completion_mask, 0)
    )
    A = advantages.unsqueeze(1)
    loss = -torch.min(r * A, r.clamp(1 - eps, 1 + eps) * A)
    return (
        (loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)
    ).mean()


def unreduced(log_prob, old_log_prob, advantages, mask, eps_low=0.2):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    r = torch.where(A > 0, 0, lp - old).exp()
    return -torch.where(A > 0, A * lp, torch.min(r * A, r.clamp(min=1 - eps_low) * A))


def float_mask(lp, old_lp, adv, mask, eps_low=3e-4, eps_high=4e-4):
    """Return GSPO's loss with a mask of numbers, beside a metric."""
    lp, old, A = calm(mask > 0, lp, old_lp, adv)
    one = 1 - (1 - mask)
    s = (((lp - old) * one).sum(1) / one.sum(1)).exp()
    A = A.sum(1) / mask.sum(1)
    return -torch.minimum(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).mean(), {
        "ratio": s.mean()
    }


def packed(log_prob, old_log_prob, advantages, mask, totals, eps_low=0.2, eps_high=0.2):
    lp, old, A = log_prob[mask], old_log_prob[mask], advantages[mask]
    weight = (lp - old).exp().clamp(1 - eps_low, 1 + eps_high).detach()
    return -(weight * A * lp).sum() / totals.tokens


def grouped(
    log_prob, old_log_prob, advantages, mask, group, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with a denominator for each prompt."""
    loss, ids = 0.0, group.unique()
    for g in ids:
        m = mask & (group == g)[:, None]
        loss = loss + plain(
            log_prob, old_log_prob, advantages, m, eps_low, eps_high
        ) / len(ids)
    return loss


def single(log_prob, old_log_prob, advantages, mask, eps_low=0.2, eps_high=0.28):
    """Return DAPO's loss, computed in float32."""
    return plain(
        *(x.float() for x in (log_prob, old_log_prob, advantages)),
        mask,
        eps_low,
        eps_high,
    )


def soft(log_prob, old_log_prob, advantages, mask, tau_pos=1.0, tau_neg=1.05):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    r, tau = (lp - old).clamp(-20, 20).exp(), torch.where(A > 0, tau_pos, tau_neg)
    J = 4 / tau * torch.sigmoid(tau * (r - 1)) * A
    return -(torch.where(mask, J, 0).sum(1) / mask.sum(1)).mean()


RIGHT = [
    ("plain", plain, "dapo"), ("plain, c", plain, "dapo", {"c": 3.0}), ("grouped", grouped, "dapo"),
    ("trl", trl, "grpo"), ("unreduced", unreduced, "up_dapo"), ("unreduced, grpo", unreduced, "up_grpo"),
    ("float mask", float_mask, "gspo"),
    ("packed", packed, "cispo_verl"), ("float32", single, "dapo"), ("soft", soft, "sapo"),
    ("plain, bound", partial(plain, eps_high=0.2), "ppo_clip"), ("up(dapo)", upref.up(upref.get("dapo")), "up_dapo"),
]  # fmt: skip


# ---- wrong ---------------------------------------------------------------------------
def wrong(J, agg=lambda x, mask: x.sum() / mask.sum()):
    """Return a loss: minus agg(J(lp, r, A), mask)."""

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        return -agg(torch.where(mask, J(lp, (lp - old).exp(), A), 0), mask)

    return loss


def ppo(r, A, low=0.8, high=1.28):
    return torch.min(r * A, r.clamp(low, high) * A)


def dead(log_prob, old_log_prob, advantages, mask, eps_low=0.3, eps_high=0.28):
    return plain(log_prob, old_log_prob, advantages, mask, 0.2, eps_high)


def accepts_kwargs(log_prob, old_log_prob, advantages, mask, **kwargs):
    return plain(log_prob, old_log_prob, advantages, mask)


def random(log_prob, old_log_prob, advantages, mask):
    return plain(log_prob, old_log_prob, advantages, mask) * (1 + 0.1 * torch.rand(()))


def first_row(log_prob, old_log_prob, advantages, mask):
    return plain(log_prob, old_log_prob, advantages - advantages[0, 0], mask)


def mutates(log_prob, old_log_prob, advantages, mask):
    advantages.masked_fill_(~mask, 0)
    return plain(log_prob, old_log_prob, advantages, mask)


def local(log_prob, old_log_prob, advantages, mask, totals):
    return plain(log_prob, old_log_prob, advantages, mask)


def forgets_the_ranks(log_prob, old_log_prob, advantages, mask, totals, dp_size=1):
    return plain(log_prob, old_log_prob, advantages, mask) * mask.sum() / totals.tokens


def in_words(log_prob, old_log_prob, advantages, mask):
    """Return a loss in upref's own words, with one .detach() that is not among them."""
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    weight = sg((lp - old).exp().clamp(0.8, 1.2)) * (1 + lp - lp.detach())
    return -(weight * A * lp).sum() / mask.sum()


def padded(log_prob, old_log_prob, advantages, mask):
    return plain(log_prob, old_log_prob, advantages, mask) * mask.sum() / mask.numel()


def poisoned(log_prob, old_log_prob, advantages, mask):
    r = (log_prob - old_log_prob).clamp(-20, 20).exp()
    return -(ppo(r, advantages) * mask).sum() / mask.sum()


def by_response(x, m):
    return (x.sum(1) / m.sum(1)).mean()


def one_side(lp, r, A):
    return torch.min(r.log().clamp(-9, 9).exp() * A, r.clamp(0.8, 1.28) * A)


WRONG = [
    ("minus", wrong(lambda lp, r, A: -ppo(r, A)), "gradient", "A > 0", "sign"),
    ("no minimum", wrong(lambda lp, r, A: r.clamp(0.8, 1.28) * A), "gradient", "A > 0, r < 0.8", "minimum is missing"),
    ("eps_high 0.2", wrong(lambda lp, r, A: ppo(r, A, 0.8, 1.2)), "gradient", "A > 0, 1.2 < r < 1.28",
     "eps_high is 0.2, not 0.28: this is the value of eps_low"),
    ("swapped bounds", wrong(lambda lp, r, A: ppo(r, A, 0.72, 1.2)), "gradient", "A > 0", "swapped"),
    ("dual clip", wrong(lambda lp, r, A: torch.where(A < 0, torch.max(ppo(r, A), 3 * A), ppo(r, A))), "gradient",
     "A < 0, r > 3", "c is 3"),
    ("no clip", wrong(lambda lp, r, A: r * A), "gradient", "A > 0, r > 1.28", "not clipped"),
    ("ratio 1", wrong(lambda lp, r, A: ppo(r.detach() * 0 + 1, A) * lp), "gradient", "A < 0", "as where the ratio is 1"),
    ("A log π", wrong(lambda lp, r, A: A * lp + ppo(r, A).detach()), "gradient", "A > 0", ""),
    ("seq-mean-token-mean", wrong(lambda lp, r, A: ppo(r, A), by_response), "aggregation", "ragged",
     "seq-mean-token-mean"),
    ("seq-mean-token-sum", wrong(lambda lp, r, A: ppo(r, A), lambda x, m: x.sum() / len(m)), "aggregation", "ragged",
     "seq-mean-token-sum"),
    ("padded width", padded, "padding", "columns of padding", ""),
    ("A over its std", wrong(lambda lp, r, A: ppo(r, A / A.std())), "scaling", "times 3", ""),
    ("random", random, "determinism", "twice", ""),
    ("minus the first advantage", first_row, "permutation", "another order", ""),
    ("own tokens", local, "micro-batches", "micro-batches", "mini-batch"),
    ("ranks forgotten", forgets_the_ranks, "data-parallel", "averaged", "number of ranks"),
    ("undeclared detach", in_words, "stop-gradient", "finite differences", "not declared"),
    ("advantages masked in place", mutates, "mutation", "advantages", ""),
    ("-0.01 log π", wrong(lambda lp, r, A: ppo(r, A) - 0.01 * lp), "zero-advantage", "A = 0", ""),
    ("log r clamped in one branch", wrong(one_side), "extremes", "log r = 9.5, as of a token",
     "log r is clamped to ±9"),
]  # fmt: skip
