# SPDX-License-Identifier: Apache-2.0
"""Right losses in unusual forms, written before the checker ran on them: (form,
objective, hyperparameters, loss).

Bodies of the first table are as in bodies.py. One file: the functions after it have
arguments, names and ways to answer of their own, which is what they are here for.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .bodies import clipped, even, gspo, k3, loss, mean, ratio, seq, tok


def sapo_tanh(d, A, m):
    tau = torch.where(A > 0, 1.0, 1.05).to(d.dtype)
    return seq((1 + torch.tanh(tau * (d.exp() - 1) / 2)) * 2 / tau * A, m)


def up_sums(d, A, m, lp, ref_log_prob):
    """Return UP's loss with a KL term of 0.02, as one weighted sum over all slots."""
    w = (m / m.sum(1, keepdim=True) / len(m)).to(d.dtype)
    J = (
        A.clamp(min=0) * lp
        + A.clamp(max=0) * d.clamp(min=math.log(0.8)).exp()
        - 0.02 * k3(lp, ref_log_prob, m)
    )
    return -(J * w).sum()


def up_gspo(d, A, m, lp):
    """Return UP-GSPO's loss by means as einsum."""

    def mean(x):
        return torch.einsum("bt,bt->b", x, m.to(d.dtype) / m.sum(1, keepdim=True))

    return -torch.where(
        mean(A) > 0, mean(A) * mean(lp), mean(A) * mean(d).exp().clamp(min=1 - 3e-4)
    ).mean()


def gppo(d, A, m):
    """Return GPPO's loss: a token beyond a bound has the value of the bound and the
    gradient of log π_θ.
    """
    r = d.exp()
    bound = torch.where(
        r < 0.8, 0.8 / r.detach() * r, torch.where(r > 1.28, 1.28 / r.detach() * r, r)
    )
    return -tok(torch.maximum(-A * r, -A * bound), m)


def m2po(d, A, m):
    among, x = m & (d * A > 0), (d.detach() ** 2).double()
    v = x[among].sort().values
    over = (v.cumsum(0) / torch.arange(1, len(v) + 1) > 0.04).nonzero()
    return tok(d.exp() * A * (~(among & (x >= v[over[0, 0]])) if len(over) else m), m)


def groups(d, A, m, lp, group):
    """Return CISPO's loss with a denominator for each prompt, by index_add."""
    ids, g = group.unique(return_inverse=True)
    x, zero = (
        d.exp().clamp(max=5).detach() * A * lp,
        torch.zeros(len(ids), dtype=d.dtype),
    )
    return -(
        zero.index_add(0, g, x.sum(1)) / zero.index_add(0, g, m.sum(1).to(d.dtype))
    ).mean()


def tpo(A, m, lp, old, group):
    """Return TPO's loss as the paper's sketch has it (kaddour2026target): for each
    prompt the cross-entropy to the target, weighted by its responses.
    """
    total = lp.sum() * 0
    for i in (group == g for g in group.unique()):
        q = F.softmax(F.log_softmax(old[i].sum(1).double(), -1) + mean(A, m)[i], -1)
        total = total - i.sum() * (q * F.log_softmax(lp[i].sum(1).double(), -1)).sum()
    return total / len(lp)


def aspo(d, A, m, lp):
    r = d.detach().exp()
    flipped = torch.where(r > 1.2, 0, r.reciprocal().clamp(max=3))
    w = torch.where(A > 0, flipped, torch.where(r < 0.8, 0, r.clamp(max=3)))
    return tok(w * A * lp, m)


BODIES = [
    ("four wheres", "dapo", {}, lambda d, A, m: tok(
        torch.where(A > 0, torch.where((r := d.exp()) > 1.28, 1.28, r), torch.where(r < 0.8, 0.8, r)) * A, m)),
    ("a relu of the excess", "dapo", {}, lambda d, A, m: tok(
        (r := d.exp()) * A - F.relu(r - 1.28) * F.relu(A) - F.relu(0.8 - r) * F.relu(-A), m)),
    ("bounds of log r", "dapo", {}, lambda d, A, m: tok(
        torch.where(A > 0, d.clamp(max=math.log(1.28)), d.clamp(min=math.log(0.8))).exp() * A, m)),
    ("a detached weight", "dapo", {}, lambda d, A, m, lp: tok(
        ((r := d.detach().exp()) * torch.where(A > 0, r <= 1.28, r >= 0.8)) * A * lp, m)),
    ("self-anchored", "dapo", {}, lambda d, A, m, lp: tok(
        (r := d.detach().exp()) * torch.where(A > 0, r <= 1.28, r >= 0.8) * (lp - lp.detach()).exp() * A, m)),
    ("in float32", "dapo", {}, lambda d, A, m: tok(clipped(d.float(), A.float()), m)),
    ("in float64", "dapo", {}, lambda d, A, m: tok(clipped(d.double(), A.double()), m).to(d.dtype)),
    ("k3 by expm1", "grpo", {"beta": 0.01}, lambda d, A, m, lp, ref_log_prob: seq(even(d, A), m) - 0.01 * seq(
        torch.expm1(x := torch.where(m, ref_log_prob - lp, 0)) - x, m)),
    ("GSPO in the token form", "gspo", {}, lambda d, A, m, lp: seq(torch.minimum(
        (s := (lp - lp.detach() + mean(d, m)[:, None].detach()).exp()) * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A), m)),
    ("GSPO in logs", "gspo", {}, lambda d, A, m: -(torch.where(
        (a := mean(A, m)) > 0, mean(d, m).clamp(max=math.log1p(4e-4)), mean(d, m).clamp(min=math.log1p(-3e-4))
    ).exp() * a).mean()),
    ("GMPO by signs", "gmpo", {}, lambda d, A, m: -(mean(torch.minimum(
        x := d * A.sign(), x.clamp(-0.4, 0.4)) * A.sign(), m).exp() * mean(A, m)).mean()),
    ("SAPO by tanh", "sapo", {}, sapo_tanh),
    ("UP as nearly everybody writes it", "up_dapo", {}, lambda d, A, m, lp: tok(
        torch.where(A > 0, (lp - lp.detach()).exp() * A, clipped(d, A)), m)),
    ("UP, masked before exp", "up_dapo", {}, lambda d, A, m, lp: tok(
        torch.where(A < 0, torch.where(A < 0, d, 0).exp().clamp(min=0.8) * A, lp * A), m)),
    ("UP in two sums", "up_grpo", {"beta": 0.02}, up_sums),
    ("UP-GSPO by einsum", "up_gspo", {}, up_gspo),
    ("TOPR in logs", "topr", {}, lambda d, A, m, lp: -(
        torch.where((a := mean(A, m)) >= 0, 0, d.sum(1).detach().clamp(max=0)).exp() * a * lp.sum(1)).mean()),
    ("sums of rows", "dr_grpo", {}, lambda d, A, m: -even(d, A).nansum(-1).mean(0)),
    ("an indicator", "dppo_tv", {}, lambda A, m, lp, old: -((p := lp.exp()) / (q := old.exp()) * A * ~(
        (A > 0) & (p > q + 0.15) | (A < 0) & (p < q - 0.15)) * m).sum(1).mean()),
    ("ASPO, detached", "aspo", {}, aspo),
    ("CFPO as a square", "cfpo", {}, lambda d, A, m: seq(-A.abs() / 0.4 * (d.expm1() - 0.2 * A.sign()) ** 2, m)),
    ("GPPO of the README", "gppo", {}, gppo),
    ("the dual clip of verl", "dapo", {"c": 3.0}, lambda d, A, m: -tok(torch.where(
        A < 0, torch.min(-A * 3.0, x := -clipped(d, A)), x), m)),
    ("CISPO by groups", "cispo", {}, groups),
    ("M2PO by sorting", "m2po", {}, m2po),
    ("TPO by cross-entropy", "tpo", {}, tpo),
    ("DRO as a square", "dro", {"tau": 0.1}, lambda d, A, m: -tok(0.05 * (d - A / 0.1) ** 2, m)),
    ("RIPO by the root", "ripo", {}, lambda d, A, m, old: tok(torch.where(
        A > 0, torch.minimum(r := d.exp(), 1 + (e := 0.05**0.5 * (-old / 2).exp())), torch.maximum(r, 1 - e)) * A, m)),
    ("LUSPO expanded", "luspo", {}, lambda d, A, m: gspo(mean(d, m), mean(A, m) * m.sum(1), 2e-3, 2.5e-3)),
    ("TIS", "tis(dapo)", {}, lambda d, A, m, old, rollout_log_probs: tok(
        clipped(d, A) * ratio(m, old, rollout_log_probs).clamp(max=2), m)),
    ("unreduced", "dapo", {}, lambda d, A, m: -clipped(d, A) * m),
    ("in pieces of four rows", "dapo", {}, lambda d, A, m: sum(
        -clipped(x, a).sum() / m.sum() for x, a in zip(d.split(4), A.split(4), strict=True))),
]  # fmt: skip
RIGHT = [(name, objective, hp, loss(body)) for name, objective, hp, body in BODIES]


def right(name, objective, **hp):
    return lambda f: RIGHT.append((name, objective, hp, f)) or f


@right("only the trained tokens, flat", "dapo")
def flat(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss over the trained tokens alone, flat."""
    lp, old, A = (
        x.expand_as(log_prob)[mask.bool()] for x in (log_prob, old_log_prob, advantages)
    )
    r = (lp - old).exp()
    return torch.max(-r * A, -r.clamp(0.8, 1.28) * A).mean()


@right("a loop over rows", "grpo")
def rows(per_token_logps, old_per_token_logps, advantages, completion_mask):
    """Return GRPO's loss by a loop over rows."""
    out = []
    for i in range(len(per_token_logps)):
        at = completion_mask[i].bool().nonzero()[:, 0]
        r = torch.exp(per_token_logps[i, at] - old_per_token_logps[i, at])
        a = advantages[i].expand(completion_mask.shape[1])[at]
        out.append(torch.stack([r * a, r.clip(0.8, 1.2) * a]).amin(0).sum() / len(at))
    return -sum(out) / len(out)


@right("a dict with metrics", "ppo_clip")
def metrics(logprobs, old_logprobs, advantages, mask, clip_range=0.2):
    """Return PPO's loss in a dict, beside a metric."""
    m = mask.bool()
    d, A = (
        torch.where(m, logprobs - old_logprobs, 0),
        torch.where(m, advantages.expand_as(logprobs), 0),
    )
    return {
        "loss": tok(clipped(d, A, 1 - clip_range, 1 + clip_range), m),
        "approx_kl": -d.sum() / m.sum(),
    }


@right("a tuple, keywords only", "ppo_clip")
def answers(*, log_probs, old_log_probs, adv, mask):
    d = (log_probs - old_log_probs).masked_fill(~mask.bool(), 0.0)
    J = even(d, adv.expand_as(d).masked_fill(~mask.bool(), 0.0))
    return -J.sum() / mask.sum(), d.detach().mean(), d.detach().exp().max()


class Module(torch.nn.Module):
    def __init__(self, eps=0.2):
        super().__init__()
        self.eps = eps

    def forward(self, logps, old_logps, advantages, response_mask):
        """Return GRPO's loss with the module's eps."""
        m = response_mask.bool()
        d, A = (
            torch.where(m, logps - old_logps, 0),
            torch.where(m, advantages.expand_as(logps), 0),
        )
        return seq(clipped(d, A, 1 - self.eps, 1 + self.eps), m)


class Callable:
    def __call__(self, curLogProbs, oldLogProbs, advantages, responseMask):
        return Module()(curLogProbs, oldLogProbs, advantages, responseMask)


def bounded(low, high, log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss with these distances of the bounds from 1."""
    m = mask.bool()
    d, A = (
        torch.where(m, log_prob - old_log_prob, 0),
        torch.where(m, advantages.expand_as(log_prob), 0),
    )
    return tok(clipped(d, A, 1 - low, 1 + high), m)


RIGHT += [
    ("an nn.Module", "grpo", {}, Module()),
    ("an object, camel case", "grpo", {}, Callable()),
    ("a partial", "dapo", {}, functools.partial(bounded, 0.2, 0.28)),
]


@right("short names, k3 inside", "grpo", beta=0.04)
def short(new, old, ref, adv, mask, beta=0.04):
    m = mask.bool()
    d, A = torch.where(m, new - old, 0), torch.where(m, adv.expand_as(new), 0)
    return seq(even(d, A) - beta * k3(new, ref, m), m)


@right("IcePop, inference names", "icepop(grpo)")
def icepop(logprobs, old_logprobs, advantages, loss_mask, inference_logprobs):
    """Return IcePop's loss over GRPO: the ratio to the engine is a weight in [0.5, 5],
    and 0 outside.
    """
    m = loss_mask.bool()
    d, A = (
        torch.where(m, logprobs - old_logprobs, 0),
        torch.where(m, advantages.expand_as(logprobs), 0),
    )
    rho = ratio(m, old_logprobs, inference_logprobs)
    return seq(even(d, A) * rho.masked_fill((rho < 0.5) | (rho > 5.0), 0.0), m)


@right("an absolute cap, as in TRL", "cispo")
def cispo(per_token_logps, old_per_token_logps, advantages, completion_mask):
    """Return CISPO's loss with the cap itself as a number, one advantage per response."""
    m = completion_mask.bool()
    w = (
        torch.where(m, per_token_logps - old_per_token_logps, 0)
        .exp()
        .clamp(max=5.0)
        .detach()
    )
    return -((w * advantages).where(m, 0) * per_token_logps.where(m, 0)).sum() / m.sum()


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lp, old, A, m):
        """Return DAPO's loss, and save its gradient by log r."""
        r = torch.where(m, lp - old, 0).exp()
        ctx.save_for_backward(
            torch.where(torch.where(A > 0, r <= 1.28, r >= 0.8), r * A, 0) * m / m.sum()
        )
        return tok(clipped(r.log(), A), m)

    @staticmethod
    def backward(ctx, g):
        return -g * ctx.saved_tensors[0], None, None, None


@right("a backward by hand", "dapo")
def by_hand(log_prob, old_log_prob, advantages, mask):
    return Function.apply(
        log_prob, old_log_prob, torch.where(mask.bool(), advantages, 0), mask.bool()
    )


@right("recomputed in the backward pass", "dapo")
def recomputed(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss under activation checkpointing."""
    return checkpoint(
        bounded,
        0.2,
        0.28,
        log_prob,
        old_log_prob,
        advantages,
        mask,
        use_reentrant=False,
    )


@right("vmap over rows", "grpo")
def vmapped(log_prob, old_log_prob, advantages, mask):
    """Return GRPO's loss as a vmap over rows."""

    def row(lp, old, A, m):
        return (
            even(torch.where(m, lp - old, 0), torch.where(m, A, 0)) * m
        ).sum() / m.sum()

    return -torch.func.vmap(row)(
        log_prob, old_log_prob, advantages.expand_as(log_prob), mask.bool()
    ).mean()


@right("it calls backward itself", "dapo")
def steps(log_prob, old_log_prob, advantages, mask):
    bounded(0.2, 0.28, log_prob, old_log_prob, advantages, mask).backward()


@right("the mini-batch's totals", "dapo")
def totalled(log_prob, old_log_prob, advantages, mask, totals):
    """Return DAPO's loss of a micro-batch, divided by the mini-batch's tokens."""
    return (
        bounded(0.2, 0.28, log_prob, old_log_prob, advantages, mask)
        * mask.sum()
        / totals.tokens
    )


@right("trainer and inference names", "ppo_clip")
def trainer(trainer_logprobs, inference_logprobs, advantages, loss_mask):
    return bounded(
        0.2, 0.2, trainer_logprobs, inference_logprobs, advantages, loss_mask
    )


@right("no old log-probabilities", "reinforce")
def plain(log_prob, advantages, mask):
    return -torch.where(mask.bool(), log_prob * advantages, 0).sum(1).mean()
