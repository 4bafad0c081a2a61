# SPDX-License-Identifier: Apache-2.0
"""A fourth set, of the forms of wrong.py, right.py, boxes.py and estimators.py.

Written in one go from the papers' equations and from what trainers do, before the
checker ran on any of them; two boxes that another set has were dropped after it. NEAR
was written after that: losses of which a cause of `identify` is true on ordinary inputs
alone. One file: rows of one form, each read by itself.
"""
# ruff: noqa: E501 - a case is one row

import math

import torch
import torch.nn.functional as F

from .bodies import (
    Backward,
    clipped,
    corrected,
    dual,
    even,
    gspo,
    k3,
    last_turn,
    loss,
    mean,
    ratio,
    seq,
    span,
    tok,
    turns,
    up,
)
from .boxes import vespo
from .estimators import by_group, norm, normed, std


def neighbors(d, m):
    """Each token's log-ratio averaged with that of the slot before."""
    return (d + F.pad(d, (1, 0))[:, :-1]) / (1 + F.pad(m, (1, 0))[:, :-1] * m)


def per_turn(d, A, m):
    n = turns(m)
    same = ((n[:, :, None] == n[:, None, :]) & m[:, :, None] & m[:, None, :]).to(d)
    return clipped((same @ d[..., None])[..., 0] / same.sum(2).clamp(min=1), A)


def longest_turn(m):
    n = turns(m)
    size = ((n[:, :, None] == n[:, None, :]) & m[:, None, :]).sum(2) * m
    return m & (size == size.max(1, keepdim=True).values)


def packed_left(old, m):
    """Return the old log-probabilities as an engine gives them that leaves out masked
    slots: packed to the left in the span of the response, 0 elsewhere.
    """
    at = (m.cumsum(1) - 1).clamp(min=0)
    dense = torch.zeros_like(old).scatter_add(1, at, torch.where(m, old, 0))
    return torch.where(span(m), dense.roll(0, 1), 0)


def median(d, m):
    return torch.where(m, d, float("nan")).nanmedian(1).values


def kept_tokens(J, m):
    J = J * m
    return -J.sum() / (J != 0).sum().clamp(min=1)


def top_half(A, m):
    """Return the mask without the responses of the lower half of |A|; ties stay."""
    size = mean(A, m).abs()
    return (
        m & (size >= size.sort(descending=True).values[(len(size) - 1) // 2])[:, None]
    )


def relu_kl(x):
    return F.relu(x - 0.05)


def tapered(lp, d, A, m, low=0.0):
    """Return TOPR's loss, the weight of a bad response at least `low`."""
    return (
        -(
            torch.where(
                A >= 0, 1.0, d.sum(1, keepdim=True).exp().clamp(low, 1).detach()
            )
            * A
            * lp
            * m
        )
        .sum(1)
        .mean()
    )


def previous(memory, lp, old):
    """Return the log-probabilities of the call before, where they had this shape, else
    `old`; keep those of this call.
    """
    last, memory["lp"] = memory.get("lp", old), lp.detach().clone()
    return last if last.shape == lp.shape else old


def m2po_rows(d, A, m):
    """Return M2PO's loss with the mean of (log r)² bounded in each response, not over
    the batch.
    """
    beyond, x = m & (d * A > 0), d.detach() ** 2
    v, at = torch.where(beyond, x, float("inf")).sort(1)
    fine = (
        torch.where(v.isfinite(), v, 0).cumsum(1) / torch.arange(1, v.shape[1] + 1)
        <= 0.04
    )
    keep = torch.zeros_like(m).scatter(1, at, fine.cummin(1).values & v.isfinite())
    return tok(d.exp() * A * (keep | ~beyond), m)


def js(lp, ref, m):
    x = torch.where(m, ref - lp, 0)
    return F.softplus(x) - math.log(2) - x / 2


WRONG = [
    # the ratio
    ("soft clip", "dapo", {}, "the ratio is bounded by a tanh", lambda d, A, m: tok(torch.minimum((r := d.exp()) * A, (1 + 0.28 * torch.tanh((r - 1) / 0.28)) * A), m)),
    ("smoothed", "dapo", {}, "log r is averaged with the slot before", lambda d, A, m: tok(clipped(neighbors(d, m), A), m)),
    ("prefix product", "dapo", {}, "per-decision importance sampling: the product of ratios up to the token", lambda d, A, m: tok(clipped(d.cumsum(1).clamp(-30, 30), A), m)),
    ("prefix mean", "grpo", {}, "the geometric mean of the ratios up to the token", lambda d, A, m: seq(even(d.cumsum(1) / m.cumsum(1).clamp(min=1), A), m)),
    ("by turns", "dapo", {}, "the ratio is of the turn", lambda d, A, m: tok(per_turn(d, A, m), m)),
    ("ratio centered", "dapo", {}, "the batch's mean log-ratio is subtracted", lambda d, A, m: tok(clipped(d - (d.sum() / m.sum()).detach(), A), m)),
    ("ratio of responses and tokens", "grpo", {}, "the smaller of the token's and the response's ratio", lambda d, A, m: seq(even(torch.minimum(d, mean(d, m)[:, None]), A), m)),
    ("old floor", "dapo", {}, "π_old is at least 1e-6 in the ratio", lambda A, m, lp, old: tok(clipped(lp - old.exp().clamp(min=1e-6).log(), A), m)),
    ("old in bfloat16", "dapo", {}, "old log-probabilities are stored in bfloat16", lambda A, m, lp, old: tok(clipped(lp - old.bfloat16().to(lp), A), m)),
    ("old in float16", "cispo", {}, "old log-probabilities are stored in float16", lambda A, m, lp, old: tok((lp - old.half().to(lp)).exp().clamp(max=5).detach() * A * lp, m)),
    ("ratio mixed", "ppo_clip", {}, "the ratio is to a mixture of π_old and π_θ, 0.9 and 0.1", lambda A, m, lp, old: tok(even(lp - torch.logaddexp(old + math.log(0.9), lp.detach() + math.log(0.1)), A), m)),
    ("Taylor", "ppo_clip", {}, "the ratio to second order, 1 + log r + log² r / 2", lambda d, A, m: tok(torch.minimum((r := 1 + d + d * d / 2) * A, r.clamp(0.8, 1.2) * A), m)),
    # the clip
    ("of the response's sums", "grpo", {}, "the minimum is of the response's means, not of its tokens", lambda d, A, m: -torch.minimum(mean(d.exp() * A, m), mean(d.exp().clamp(0.8, 1.2) * A, m)).mean()),
    ("of the batch's means", "dapo", {}, "the minimum is of the two means over the batch", lambda d, A, m: torch.maximum(tok(d.exp() * A, m), tok(d.exp().clamp(0.8, 1.28) * A, m))),
    ("upper mask for both", "dapo", {}, "tokens above 1.28 are dropped where A < 0 too", lambda d, A, m: tok(clipped(d, A) * ((A > 0) | (d.exp() <= 1.28)), m)),
    ("strong losers unclipped", "dapo", {}, "no lower clip where A < -1", lambda d, A, m: tok(torch.where(A < -1, d.exp() * A, clipped(d, A)), m)),
    ("clip by length", "grpo", {}, "the clip narrows with the length, 0.2 / √|o|", lambda d, A, m: seq(torch.minimum((r := d.exp()) * A, torch.minimum(torch.maximum(r, 1 - (e := 0.2 / m.sum(1, keepdim=True).sqrt())), 1 + e) * A), m)),
    ("clip by |A|", "dapo", {}, "the clip widens with |A|", lambda d, A, m: tok(torch.minimum((r := d.exp()) * A, torch.minimum(torch.maximum(r, 1 - 0.2 * A.abs()), 1 + 0.28 * A.abs()) * A), m)),
    ("clip by entropy", "dapo", {}, "the clip is twice as wide where the entropy is above 1", lambda d, A, m, entropy: tok(torch.where(entropy > 1, clipped(d, A, 0.6, 1.56), clipped(d, A)), m)),
    ("reverts", "dapo", {}, "clipped tokens fall back to A log π", lambda d, A, m, lp: tok(torch.where(torch.where(A > 0, d > math.log(1.28), d < math.log(0.8)), A * lp, d.exp() * A), m)),
    ("clipped tokens uncounted", "dapo", {}, "tokens without a term leave the denominator", lambda d, A, m: kept_tokens(clipped(d, A) * torch.where(A > 0, d.exp() <= 1.28, d.exp() >= 0.8), m)),
    ("response dropped", "grpo", {}, "one token beyond r = 10 drops its response", lambda d, A, m: seq(even(d, A), m, m & (d <= math.log(10)).all(1, keepdim=True))),
    ("batch stops", "ppo_clip", {}, "a batch with a ratio above 20 is skipped", lambda d, A, m: tok(even(d, A), m) * float(d.max() <= math.log(20))),
    ("dual clip in logs", "dapo", {"c": 3.0}, "the dual clip compares log r, not r, with c", lambda d, A, m: tok(clipped(d, A) * ~((A < 0) & (d > 3)), m)),
    ("dual clip of responses", "grpo", {"c": 3.0}, "the dual clip takes the response's mean ratio", lambda d, A, m: seq(even(d, A) * ~((A < 0) & (mean(d.exp(), m)[:, None] > 3)), m)),
    ("dual clip unscaled", "ppo_clip", {"c": 3.0}, "the dual clip bounds r A at -3, whatever A", lambda d, A, m: tok(torch.where(A < 0, even(d, A).clamp(min=-3.0), even(d, A)), m)),
    ("token loss clamped", "dapo", {}, "each token's term is clamped at 10", lambda d, A, m: tok(clipped(d, A).clamp(-10, 10), m)),
    ("half the overshoot", "dapo", {}, "beyond the clip half of the slope stays (a leaky clip)", lambda d, A, m: tok(0.5 * d.exp() * A + 0.5 * clipped(d, A), m)),
    ("PPO with a penalty", "ppo_clip", {}, "a quadratic penalty on log r beside the clip", lambda d, A, m: tok(even(d, A) - 0.05 * d * d, m)),
    ("clip moves at r = 1", "dapo", {}, "only tokens that moved away from 1 keep a gradient, back steps are dropped", lambda d, A, m: tok(clipped(d, A) * (d * A >= 0), m)),
    ("backward beyond", "dapo", {}, "a backward that keeps tokens until r = 1.28² where A > 0", lambda d, A, m: tok(Backward.apply(d, A, lambda r, A: torch.where(A > 0, r <= 1.6384, r >= 0.8), True), m)),
    # advantages inside the loss
    ("entropy-shaped", "dapo", {}, "A + min(0.4 H, |A| / 2)", lambda d, A, m, entropy: tok(clipped(d, A + torch.minimum(0.4 * entropy.detach(), A.abs() / 2)), m)),
    ("sampled entropy", "dapo", {}, "an entropy bonus of the sampled token, -0.01 log π", lambda d, A, m, lp: tok(clipped(d, A) - 0.01 * lp, m)),
    ("winsorized", "dapo", {}, "advantages are cut at their own 5 and 95 percent", lambda d, A, m: tok(clipped(d, A.clamp(*torch.quantile(A[m].double(), torch.tensor([0.05, 0.95]).double()).to(A))), m)),
    ("centered by prompt", "grpo", {}, "the prompt's mean advantage is subtracted again", lambda d, A, m, group: seq(even(d, (A - by_group(mean(A, m), group, lambda a: a.mean().expand(len(a)))[:, None]) * m), m)),
    ("later tokens", "grpo", {}, "tokens weigh by their position, t / |o|", lambda d, A, m: seq(even(d, A) * m.cumsum(1) / m.sum(1, keepdim=True), m)),
    ("discount to the end", "dapo", {}, "the reward is discounted from the end, 0.995^(|o| - t)", lambda d, A, m: tok(clipped(d, A * 0.995 ** (m.sum(1, keepdim=True) - m.cumsum(1)).clamp(min=0)), m)),
    ("by turns' number", "dapo", {}, "A is divided by the number of turns", lambda d, A, m: tok(clipped(d, A / turns(m).amax(1, keepdim=True).clamp(min=1)), m)),
    ("winners capped", "dapo", {}, "winners count 1 at most", lambda d, A, m: tok(clipped(d, A.clamp(max=1)), m)),
    ("square root", "grpo", {}, "√|A| with the sign of A", lambda d, A, m: seq(even(d, A.sign() * A.abs().sqrt()), m)),
    ("long winners", "grpo", {}, "winners of more than 64 tokens weigh less, 64 / |o|", lambda d, A, m: seq(even(d, torch.where(A > 0, A * (64 / m.sum(1, keepdim=True)).clamp(max=1), A)), m)),
    ("sure winners", "grpo", {}, "winners weigh 1 - π_old", lambda d, A, m, old: seq(even(d, torch.where(A > 0, A * -torch.expm1(old), A)), m)),
    ("top half", "grpo", {}, "only the half of the responses with the largest |A| trains", lambda d, A, m: seq(even(d, A), m, top_half(A, m))),
    ("unit norm", "dapo", {}, "advantages are divided by their root mean square", lambda d, A, m: tok(clipped(d, A / (A[m] ** 2).mean().sqrt().clamp(min=1e-8)), m)),
    # masks
    ("even turns", "dapo", {}, "every second turn is dropped", lambda d, A, m: tok(clipped(d, A), m, m & (turns(m) % 2 == 1))),
    ("longest turn", "grpo", {}, "only the longest turn trains", lambda d, A, m: seq(even(d, A), m, longest_turn(m))),
    ("shifted past holes", "dapo", {}, "old log-probabilities are laid down without the holes", lambda A, m, lp, old: tok(clipped(torch.where(m, lp - packed_left(old, m), 0), A), m)),
    ("eroded", "dapo", {}, "tokens beside a hole are dropped on both sides", lambda d, A, m: tok(clipped(d, A), m, m & (F.pad(m, (1, 0), value=True)[:, :-1] | ~span(m).roll(1, 1)) & (F.pad(m, (0, 1), value=True)[:, 1:] | ~span(m).roll(-1, 1)))),
    ("last turn's length", "grpo", {}, "divided by the tokens of the last turn alone", lambda d, A, m: -((even(d, A) * m).sum(1) / (m & last_turn(m)).sum(1)).mean()),
    ("GSPO of the last turn", "gspo", {}, "the ratio is of the last turn's tokens", lambda d, A, m: gspo(mean(d, m & last_turn(m)), mean(A, m))),
    ("first five", "dapo", {}, "the first five tokens of a response are dropped where it has more than ten", lambda d, A, m: tok(clipped(d, A), m, m & ((m.cumsum(1) > 5) | (m.sum(1, keepdim=True) <= 10)))),
    ("last token twice", "grpo", {}, "the last token counts twice (an end token that is appended)", lambda d, A, m: seq(even(d, A) * (1 + (m.cumsum(1) == m.sum(1, keepdim=True))), m)),
    # denominators
    ("at least 64", "dapo", {}, "the number of tokens in the denominator is at least 64", lambda d, A, m: -(clipped(d, A) * m).sum() / m.sum().clamp(min=64)),
    ("multiple of 8", "dapo", {}, "the number of tokens is rounded up to a multiple of 8", lambda d, A, m: -(clipped(d, A) * m).sum() / ((m.sum() + 7) // 8 * 8)),
    ("even rows", "grpo", {}, "the last response of an odd number is dropped", lambda d, A, m: -mean(even(d, A), m)[: len(m) // 2 * 2 or 1].sum() / len(m)),
    ("two tokens at least", "grpo", {}, "the mean is over responses of two tokens or more", lambda d, A, m: -(mean(even(d, A), m) * (m.sum(1) > 1)).sum() / (m.sum(1) > 1).sum().clamp(min=1)),
    ("mean length", "dr_grpo", {}, "divided by the mean length", lambda d, A, m: -(even(d, A) * m).sum(1).mean() / m.sum(1).double().mean()),
    ("prompts by size", "dapo", {}, "prompts are averaged, weighed by their number of responses", lambda d, A, m, group: sum(tok(clipped(d[group == k], A[group == k]), m[group == k]) * (group == k).sum() / len(m) for k in group.unique())),
    ("winners and losers apart", "grpo", {}, "winners are a token mean, losers a mean over responses", lambda d, A, m: tok(torch.where(A > 0, even(d, A), 0), m) + seq(torch.where(A > 0, 0, even(d, A)), m)),
    ("log of the length", "grpo", {}, "divided by 1 + log |o|", lambda d, A, m: -((even(d, A) * m).sum(1) / (1 + m.sum(1).log())).mean()),
    # the KL term
    ("KL hinge", "grpo", {"beta": 0.04}, "the KL term counts above 0.05 alone", lambda d, A, m, lp, ref_log_prob: seq(even(d, A) - 0.04 * relu_kl(k3(lp, ref_log_prob, m)), m)),
    ("KL inside the clip", "grpo", {"beta": 0.04}, "A - β k3 is inside the minimum", lambda d, A, m, lp, ref_log_prob: seq(even(d, A - 0.04 * k3(lp, ref_log_prob, m)), m)),
    ("KL summed", "grpo", {"beta": 0.04}, "the KL term is summed over the response", lambda d, A, m, lp, ref_log_prob: seq(even(d, A), m) + 0.04 * k3(lp, ref_log_prob, m).sum(1).mean()),
    ("KL by the width", "grpo", {"beta": 0.04}, "the KL term is a mean over the padded batch", lambda d, A, m, lp, ref_log_prob: seq(even(d, A), m) + 0.04 * (k3(lp, ref_log_prob, m) * m).mean()),
    ("KL shifted", "grpo", {"beta": 0.04}, "reference log-probabilities are shifted by one", lambda d, A, m, lp, ref_log_prob: seq(even(d, A) - 0.04 * k3(lp, torch.where(m, ref_log_prob, 0).roll(1, 1), m), m)),
    ("Jensen-Shannon", "grpo", {"beta": 0.04}, "a Jensen-Shannon term in the place of k3", lambda d, A, m, lp, ref_log_prob: seq(even(d, A) - 0.04 * js(lp, ref_log_prob, m), m)),
    ("KL by probabilities", "up_grpo", {"beta": 0.04}, "(π - π_ref)² in the place of k3", lambda d, A, m, lp, ref_log_prob: seq(up(lp, d, A, 1e9) - 0.04 * (lp.exp() - torch.where(m, ref_log_prob, 0).exp()) ** 2, m)),
    ("KL inside the window", "grpo", {"beta": 0.04}, "the KL term only where the clip leaves a gradient", lambda d, A, m, lp, ref_log_prob: seq(even(d, A) - 0.04 * k3(lp, ref_log_prob, m) * torch.where(A > 0, d.exp() <= 1.2, d.exp() >= 0.8), m)),
    ("KL truncated ratio", "grpo", {"beta": 0.04}, "the KL term times the truncated ratio, a constant", lambda d, A, m, lp, ref_log_prob: seq(even(d, A) - 0.04 * k3(lp, ref_log_prob, m) * d.exp().clamp(max=2).detach(), m)),
    ("KL half", "grpo", {"beta": 0.04}, "β is half", lambda d, A, m, lp, ref_log_prob: seq(even(d, A) - 0.02 * k3(lp, ref_log_prob, m), m)),
    ("KL of the response", "grpo", {"beta": 0.04}, "k3 of the response's mean log-ratio", lambda d, A, m, lp, ref_log_prob: seq(even(d, A), m) + 0.04 * ((x := mean(torch.where(m, ref_log_prob - lp, 0), m)).exp() - 1 - x).mean()),
    ("KL to a mixture", "up_grpo", {"beta": 0.04}, "the anchor is the mean of log π_ref and log π_old", lambda d, A, m, lp, old, ref_log_prob: seq(up(lp, d, A, 1e9) - 0.04 * k3(lp, (ref_log_prob + old) / 2, m), m)),
    ("KL warms up", "grpo", {"beta": 0.04}, "state: β grows over the first ten calls", lambda d, A, m, lp, ref_log_prob, call: seq(even(d, A) - 0.04 * min(call / 10, 1) * k3(lp, ref_log_prob, m), m)),
    # state
    ("annealed slowly", "dapo", {}, "state: the upper clip shrinks by a thousandth of itself at each call", lambda d, A, m, call: tok(clipped(d, A, 0.8, 1 + 0.28 * (1 - call / 1000)), m)),
    ("by calls", "ppo_clip", {}, "state: divided by the number of calls", lambda d, A, m, call: tok(even(d, A), m) / call),
    ("largest so far", "dapo", {}, "state: A is divided by the largest |A| so far", lambda d, A, m, memory: tok(clipped(d, A / memory.setdefault("x", max(memory.pop("x", 1.0), float(A.abs().max())))), m)),
    ("last policy", "ppo_clip", {}, "state: the ratio is to the policy of the call before, where the shapes agree", lambda A, m, lp, old, memory: tok(even(lp - previous(memory, lp, old), A), m)),
    ("alternates", "grpo", {}, "state: a token mean and a mean over responses by turns", lambda d, A, m, call: (tok if call % 2 else seq)(even(d, A), m)),
    ("jitter", "up_dapo", {}, "noise of a thousandth on the advantages", lambda d, A, m, lp: tok(up(lp, d, A * (1 + 1e-3 * torch.randn(A.shape).to(A))), m)),
    # sequences
    ("GSPO median", "gspo", {}, "the median log-ratio", lambda d, A, m: gspo(median(d, m), mean(A, m))),
    ("GSPO largest", "gspo", {}, "the largest log-ratio", lambda d, A, m: gspo(torch.where(m, d, -9e9).amax(1), mean(A, m))),
    ("GSPO root", "gspo", {}, "the sum over √|o|", lambda d, A, m: gspo(d.sum(1) / m.sum(1).sqrt(), mean(A, m))),
    ("GSPO long", "gspo", {}, "lengths count 128 at most", lambda d, A, m: gspo(d.sum(1) / m.sum(1).clamp(max=128), mean(A, m))),
    ("GSPO token anchored on old", "gspo", {}, "s, a constant, times the token's own ratio", lambda d, A, m: seq(torch.minimum((s := mean(d, m)[:, None].exp().detach() * d.exp()) * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A), m)),
    ("GSPO dual clip", "gspo", {}, "a dual clip of 3 that GSPO does not have", lambda d, A, m: -dual(torch.minimum((s := mean(d, m).exp()) * (a := mean(A, m)), s.clamp(1 - 3e-4, 1 + 4e-4) * a), a, 3).mean()),
    ("GMPO alive", "gmpo", {}, "the geometric mean is over the tokens inside the clip", lambda d, A, m: -((d * (k := m & (d * A.sign() <= 0.4))).sum(1).div(k.sum(1).clamp(min=1)).exp() * mean(A, m)).mean()),
    ("TOPR floor", "topr", {}, "the taper is at least 0.1", lambda d, A, m, lp: tapered(lp, d, A, m, 0.1)),
    ("VESPO mean", "vespo", {}, "the response's ratio is the geometric mean", lambda d, A, m, lp: vespo(mean(d, m)[:, None] * m / m.sum(1, keepdim=True), A, m, lp)),
    ("LUSPO width", "luspo", {}, "weighed by the padded width", lambda d, A, m: gspo(mean(d, m), mean(A, m) * m.shape[1], 2e-3, 2.5e-3)),
    ("UP-GSPO sums", "up_gspo", {}, "winners are summed over tokens, not averaged", lambda d, A, m, lp: -torch.where((a := mean(A, m)) > 0, a * (lp * m).sum(1), a * mean(d, m).exp().clamp(1 - 3e-4)).mean()),
    # other objectives
    ("SAPO by the ratio's side", "sapo", {"tau_neg": 1.5}, "the temperature depends on r > 1, not on A > 0", lambda d, A, m: seq(torch.sigmoid((t := torch.where(d > 0, 1.0, 1.5).to(d)) * (d.exp() - 1)) * 4 / t * A, m)),
    ("SAPO detached", "sapo", {}, "the gate is a constant on the ratio", lambda d, A, m: seq(torch.sigmoid((t := torch.where(A > 0, 1.0, 1.05).to(d)) * (d.exp() - 1)).detach() * 2 / t * d.exp() * A, m)),
    ("CISPO in logs", "cispo", {}, "the cap is e^4", lambda d, A, m, lp: tok(d.clamp(max=4).exp().detach() * A * lp, m)),
    ("CISPO normalized", "cispo", {}, "the weights are divided by their mean", lambda d, A, m, lp: tok((w := d.exp().clamp(max=5).detach()) / (w * m).sum() * m.sum() * A * lp, m)),
    ("CISPO floor for losers", "cispo", {}, "losers' weights are at least 0.2", lambda d, A, m, lp: tok(torch.where(A < 0, d.exp().clamp(0.2, 5), d.exp().clamp(max=5)).detach() * A * lp, m)),
    ("M2PO rows", "m2po", {}, "the budget is of each response", m2po_rows),
    ("CFPO unscaled", "cfpo", {}, "the penalty does not scale with |A|", lambda d, A, m: seq(d.exp() * A - d.expm1() ** 2 / 0.4, m)),
    ("DRO twice", "dro", {}, "τ in the place of τ / 2", lambda d, A, m, lp: tok(A * lp - 0.1 * d * d, m)),
    ("RIPO current", "ripo", {}, "the bound is of the current probability", lambda d, A, m, lp: tok(clipped(d, A, 1 - (e := (0.05 / lp.detach().exp()).sqrt()), 1 + e), m)),
    ("DPPO by r", "dppo_tv", {}, "the side is that of r, not of A", lambda d, A, m, lp, old: -(d.exp() * A * ((lp.exp() - old.exp()) * d.sign() <= 0.15) * m).sum(1).mean()),
    ("CE-GPPO exchanged", "ce_gppo", {}, "the two shares are exchanged", lambda d, A, m, lp: tok(torch.where(A > 0, torch.where((r := d.exp().detach()) > 1.2, 0.75 * 1.2, r), torch.where(r < 0.8, 0.8, r)) * A * lp, m)),
    ("GPPO half", "gppo", {}, "beyond the upper bound half of the weight", lambda d, A, m, lp: tok(torch.where(A > 0, torch.where((r := d.exp().detach()) > 1.28, 0.64, r), r.clamp(min=0.8)) * A * lp, m)),
    ("ASPO uncapped", "aspo", {}, "losers are not capped", lambda d, A, m, lp: tok(torch.where(A > 0, (1 / (r := d.exp().detach())).clamp(max=3) * (r <= 1.2), r * (r >= 0.8)) * A * lp, m)),
    ("WAPO losers", "wapo", {}, "losers train too", lambda d, A, m: -(torch.where(A > 0, d.exp().clamp(max=10), d.exp()) * A).sum(1).mean()),
    ("KL-Cov everywhere", "kl_cov", {}, "every token is penalized", lambda d, A, m: tok(d.exp() * A - d.abs(), m)),
    ("Reinforce by p", "reinforce", {}, "π in the place of its logarithm", lambda A, m, lp: -(lp.exp() * A * m).sum(1).mean()),
    ("Reinforce floor", "reinforce_off_policy", {}, "log π is floored at -10", lambda A, m, lp: tok(A * lp.clamp(min=-10), m)),
    ("product rule", "is_pg", {}, "r A log π with r not detached", lambda d, A, m, lp: -(d.exp() * A * lp * m).sum(1).mean()),
    # UP
    ("UP focal", "up_dapo", {}, "winners weigh 1 - π", lambda d, A, m, lp: tok(torch.where(A > 0, -torch.expm1(lp.detach()) * A * lp, clipped(d, A)), m)),
    ("UP floor", "up_dapo", {}, "winners' log π is floored at log 1e-4", lambda d, A, m, lp: tok(up(lp.clamp(min=math.log(1e-4)), d, A), m)),
    ("UP above the mean", "up_dapo", {}, "winners are those above the batch's mean advantage", lambda d, A, m, lp: tok(torch.where(A > A[m].mean(), A * lp, clipped(d, A)), m)),
    ("UP threshold", "up_grpo", {}, "winners are those with A > 0.01", lambda d, A, m, lp: seq(torch.where(A > 0.01, A * lp, clipped(d, A, 0.8, 1.2)), m)),
    ("UP behind r = 1", "up_dapo", {}, "winners below r = 1 keep the ratio", lambda d, A, m, lp: tok(torch.where((A > 0) & (d > 0), A * lp, clipped(d, A)), m)),
    ("UP anchored on both", "up_grpo", {}, "winners have the mean of UP's and the unclipped weight", lambda d, A, m, lp: seq(torch.where(A > 0, A * (lp + d.exp()) / 2, clipped(d, A)), m)),
    # the sampler
    ("MIS without weight", "mis(dapo)", {}, "kept tokens weigh 1", lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, (ratio(m, old, rollout_log_probs) <= 2).to(d))),
    ("IcePop uncounted", "icepop(grpo)", {}, "masked tokens leave the length", lambda d, A, m, old, rollout_log_probs: -((even(d, A) * (x := ratio(m, old, rollout_log_probs)) * (k := m & (x >= 0.5) & (x <= 5))).sum(1) / k.sum(1).clamp(min=1)).mean()),
    ("halfway", "decoupled(ppo_clip)", {}, "the proximal policy is halfway between μ and π_old", lambda A, m, lp, old, rollout_log_probs: tok(even(torch.where(m, lp - (p := (old + rollout_log_probs) / 2), 0), A) * ratio(m, p, rollout_log_probs), m)),
    ("behavior capped", "decoupled(ppo_clip)", {}, "the behavior's weight is capped at 5", lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, ratio(m, old, rollout_log_probs).clamp(max=5), even)),
    ("TIS two-sided", "tis(dapo)", {}, "the correction has a floor of 0.5", lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, ratio(m, old, rollout_log_probs).clamp(0.5, 2))),
    ("TIS of winners", "tis(grpo)", {}, "losers are not corrected", lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, torch.where(A > 0, ratio(m, old, rollout_log_probs).clamp(max=2), 1), even, seq)),
    ("TIS inside the clip", "tis(dapo)", {}, "the correction is inside the clip", lambda d, A, m, old, rollout_log_probs: tok(torch.minimum((r := d.exp() * ratio(m, old, rollout_log_probs).clamp(max=2)) * A, r.clamp(0.8, 1.28) * A), m)),
    ("sequence mask by tokens", "seq_mask(grpo)", {}, "one token outside 0.5 to 2 drops the response", lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, ((x := ratio(m, old, rollout_log_probs)) >= 0.5).logical_and(x <= 2).all(1, keepdim=True).to(d), even, seq)),
    ("MIS of the mean", "mis_seq(grpo)", {}, "S is the geometric mean", lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, (x := mean(ratio(m, old, rollout_log_probs).log(), m)[:, None].exp()) * (x <= 3), even, seq)),
    ("TIS with no mask", "tis_seq(grpo)", {}, "the correction is of π_θ, with its gradient", lambda d, A, m, lp, rollout_log_probs: corrected(d, A, m, torch.where(m, lp - rollout_log_probs, 0).sum(1, keepdim=True).exp().clamp(max=2), even, seq)),
]  # fmt: skip


# ---- right, in unusual forms ---------------------------------------------------------
def softmax_mean(J, m):
    """Return minus the mean over tokens, as an expectation under a uniform
    distribution.
    """
    p = torch.zeros_like(J).masked_fill(~m, -math.inf).flatten().softmax(0)
    return -torch.where(m, J, 0).flatten() @ p


def rows_of(x, m):
    """The tokens of each response, in a list."""
    return x[m].split(m.sum(1).tolist())


def packed_grpo(d, A, m):
    """Return GRPO's loss of packed tokens, each divided by the length of its response."""
    row = torch.arange(len(m))[:, None].expand_as(m)[m]
    n = torch.bincount(row, minlength=len(m)).to(d)
    r, a = d[m].exp(), A[m]
    J = torch.where(a >= 0, r.clamp_max(1.2), r.clamp_min(0.8)) * a
    return -torch.zeros(len(m)).to(d).scatter_add(0, row, J / n[row]).mean()


def cumulative_gspo(d, A, m):
    s = (d.cumsum(1)[:, -1] / m.sum(1)).exp()
    a = A.gather(1, m.int().argmax(1, keepdim=True))[:, 0]
    return -torch.minimum(s * a, torch.clip(s, 1 - 3e-4, 1 + 4e-4) * a).sum() / len(s)


class Constant(torch.autograd.Function):
    """w log π, whose weight has no gradient."""

    @staticmethod
    def forward(ctx, lp, w):
        ctx.save_for_backward(w)
        return w * lp

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class GSPO(torch.autograd.Function):
    @staticmethod
    def forward(ctx, d, a, m):
        """Return GSPO's terms [B], and save their gradient by log r [B, T]."""
        s = ((d * m).sum(1) / m.sum(1)).exp()
        alive = torch.where(a > 0, s <= 1 + 4e-4, s >= 1 - 3e-4)
        ctx.save_for_backward(
            torch.where(alive, s * a, 0)[:, None] * m / m.sum(1, keepdim=True)
        )
        return torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a)

    @staticmethod
    def backward(ctx, g):
        return g[:, None] * ctx.saved_tensors[0], None, None


def in_place(d, A, m):
    """Return DAPO's loss by writes into a tensor of zeros."""
    r = d.exp()
    J = torch.zeros_like(r)
    J[A > 0] = (r.clamp(max=1.28) * A)[A > 0]
    J[A < 0] = (r.clamp(min=0.8) * A)[A < 0]
    return -J.mul_(m).sum().div_(m.sum())


def put(d, A, m):
    at = m.nonzero(as_tuple=True)
    J = torch.zeros_like(d).index_put(at, clipped(d[at], A[at]))
    return -J.sum() / len(at[0])


def columns(d, A, m):
    return -sum(
        even(x, a).sum(1) for x, a in zip(d.chunk(3, 1), A.chunk(3, 1), strict=True)
    ).mean()


def dppo_tv(d, A, m, old):
    far = old.exp() * torch.expm1(d.detach()) * A.sign() > 0.15
    return -torch.where(far, 0, d.exp() * A).sum(1).mean()


def m2po_loop(d, A, m):
    """Return M2PO's loss by a loop over the tokens that moved in the direction of A,
    the smallest (log r)² first. A token is dropped where the running mean of these
    exceeds 0.04.
    """
    beyond = m & (d.detach() * A > 0)
    total, drop = 0.0, torch.zeros_like(m)
    for k, i in enumerate(
        (torch.where(beyond, d.detach().double() ** 2, math.inf))
        .flatten()
        .argsort()[: int(beyond.sum())]
        .tolist()
    ):
        total += float(d.detach().double().flatten()[i]) ** 2
        if total / (k + 1) > 0.04:
            drop.view(-1)[i] = True
    return tok(d.exp() * A * ~drop, m)


def ce_gppo(d, A, m, lp):
    """Return CE-GPPO's loss with bounds of 1 ± 0.2, and shares of 1 above and 0.75
    below.
    """
    r = d.detach().exp()
    w = r.clone()
    w[(A > 0) & (r > 1.2)] = 1.2
    w[(A < 0) & (r < 0.8)] = 0.75 * 0.8
    return tok(Constant.apply(lp, w * A), m)


def bandpo(d, A, m, old):
    """Return BandPO's loss by total variation with delta = 0.05."""
    mu = old.exp()
    r = d.exp()
    low = F.relu(1 - 0.05 / mu)
    high = (
        torch.clamp_max(1 + 0.05 / mu, 1 / mu)
        if mu.ndim == 0
        else torch.minimum(1 + 0.05 / mu, 1 / mu)
    )
    return seq(torch.where(A > 0, torch.minimum(r, high), torch.maximum(r, low)) * A, m)


def by_halves(d, A, m):
    """Return DAPO's loss as one sum over positive and one over negative advantages."""
    positive, negative = A.clamp(min=0), A.clamp(max=0)
    r = d.exp()
    return (
        -(
            (r.clamp(max=1.28) * positive)[m].sum()
            + (r.clamp(min=0.8) * negative)[m].sum()
        )
        / m.sum()
    )


BODIES = [
    ("an expectation", "dapo", {}, lambda d, A, m: softmax_mean(clipped(d, A), m)),
    ("hardtanh", "dapo", {}, lambda d, A, m: tok(torch.minimum((r := d.exp()) * A, F.hardtanh(r, 0.8, 1.28) * A), m)),
    ("einsum of three", "dapo", {}, lambda d, A, m: -torch.einsum("bt,bt,bt->", torch.where(A > 0, d.exp().clamp(max=1.28), d.exp().clamp(min=0.8)), A, m.to(A)) / m.sum()),
    ("by halves", "dapo", {}, by_halves),
    ("written in place", "dapo", {}, in_place),
    ("put into zeros", "dapo", {}, put),
    ("masked_select", "dapo", {}, lambda d, A, m: -torch.masked_select(clipped(d, A), m).mean()),
    ("double where", "dapo", {}, lambda d, A, m: -torch.where(m, clipped(torch.where(m, d, 0), A), 0).sum() / m.count_nonzero()),
    ("nanmean", "dapo", {}, lambda d, A, m: -torch.where(m, clipped(d, A), math.nan).nanmean()),
    ("upcast and back", "dapo", {}, lambda d, A, m: tok(clipped(d.to(torch.float64), A.to(torch.float64)), m).to(d)),
    ("addcmul", "dapo", {}, lambda d, A, m: -torch.addcmul(torch.zeros_like(d), clipped(d, A), m.to(d)).sum() / m.sum()),
    ("lerp of the branches", "dapo", {}, lambda d, A, m: tok(torch.lerp(d.clamp(min=math.log(0.8)).exp() * A, d.clamp(max=math.log(1.28)).exp() * A, (A > 0).to(d)), m)),
    ("packed, scattered", "grpo", {}, packed_grpo),
    ("split into responses", "grpo", {}, lambda d, A, m: -torch.stack([even(x, a).mean() for x, a in zip(rows_of(d, m), rows_of(A, m), strict=True)]).mean()),
    ("a bmm", "grpo", {}, lambda d, A, m: -(torch.bmm(even(d, A)[:, None], m[:, :, None].to(d))[:, 0, 0] / m.sum(1)).mean()),
    ("cosh form of k3 and k3", "grpo", {"beta": 0.1}, lambda d, A, m, lp, ref_log_prob: seq(even(d, A), m) + 0.1 * mean(torch.expm1(x := torch.where(m, ref_log_prob - lp, 0)).sub(x), m).mean()),
    ("GSPO by a cumulative sum", "gspo", {}, cumulative_gspo),
    ("GSPO with its own backward", "gspo", {}, lambda d, A, m: -GSPO.apply(d, mean(A, m), m).mean()),
    ("GSPO by packed tokens", "gspo", {}, lambda d, A, m: gspo(torch.stack([x.mean() for x in rows_of(d, m)]), torch.stack([x[0] for x in rows_of(A, m)]))),
    ("Dr. GRPO by columns", "dr_grpo", {}, columns),
    ("CISPO, its own backward", "cispo", {}, lambda d, A, m, lp: tok(Constant.apply(lp, d.exp().clamp(max=5) * A), m)),
    ("CISPO anchored", "cispo", {}, lambda d, A, m, lp: tok(d.detach().clamp(max=math.log(5)).exp() * (lp - lp.detach()).exp() * A, m)),
    ("UP by two relus", "up_dapo", {}, lambda d, A, m, lp: tok(F.relu(A) * lp - F.relu(-A) * torch.maximum(d.exp(), torch.tensor(0.8).to(d)), m)),
    ("UP as a negative likelihood", "up_grpo", {}, lambda d, A, m, lp: ((-lp * A * (A > 0)).sum(1) / m.sum(1) - (d.clamp(min=math.log(0.8)).exp() * A * (A < 0)).sum(1) / m.sum(1)).mean()),
    ("UP-GSPO in the token form", "up_gspo", {}, lambda d, A, m, lp: seq(torch.where(A > 0, (lp - lp.detach()).exp() * A, A * ((mean(d, m)[:, None]).detach() + lp - lp.detach()).exp().clamp(min=1 - 3e-4)), m)),
    ("SAPO by 1 / (1 + e)", "sapo", {}, lambda d, A, m: seq(4 * A / (t := torch.where(A > 0, 1.0, 1.05).to(d)) / (1 + torch.exp(-t * (d.exp() - 1))), m)),
    ("GMPO by an einsum", "gmpo", {}, lambda d, A, m: -(torch.einsum("bt,bt->b", torch.where(A > 0, -F.relu(0.4 - d) + 0.4, F.relu(d + 0.4) - 0.4), m / m.sum(1, keepdim=True).to(d)).exp() * mean(A, m)).mean()),
    ("TOPR by a relu", "topr", {}, lambda d, A, m, lp: -((1 - F.relu(1 - d.sum(1).exp()) * (mean(A, m) < 0)).detach() * mean(A, m) * lp.sum(1)).mean()),
    ("DPPO by expm1", "dppo_tv", {}, dppo_tv),
    ("M2PO by a loop", "m2po", {}, m2po_loop),
    ("CE-GPPO by indices", "ce_gppo", {}, ce_gppo),
    ("BandPO by relu", "bandpo_tv", {}, bandpo),
    ("CFPO expanded", "cfpo", {}, lambda d, A, m: seq(A * (r := d.exp()) - A.abs() * 2.5 * (r * r - 2 * r + 1), m)),
    ("DRO expanded", "dro", {}, lambda d, A, m, lp, old: tok(A * lp - 0.05 * (lp * lp - 2 * lp * old), m)),
    ("WAPO by a relu", "wapo", {}, lambda d, A, m: -torch.sum(F.relu(A) * d.exp().clamp(max=10)) / len(m)),
    ("RLOO of sums", "rloo", {}, lambda A, m, lp: -torch.dot(mean(A, m), lp.sum(1)) / len(m)),
    ("REINFORCE++ by rows", "reinforce_pp", {}, lambda d, A, m: sum(-even(d[i][m[i]], A[i][m[i]]).mean() for i in range(len(m))) / len(m)),
    ("W-REINFORCE by factors", "w_reinforce", {}, lambda A, m, lp: -((0.1 + 0.9 * (A < 0)) * A * lp).sum(1).mean()),
    ("decoupled in one ratio", "decoupled(ppo_clip)", {}, lambda d, A, m, lp, old, rollout_log_probs: tok(torch.minimum(torch.where(m, lp - rollout_log_probs, 0).exp() * A, ratio(m, old, rollout_log_probs) * d.exp().clamp(0.8, 1.2) * A), m)),
    ("TIS of responses in logs", "tis_seq(grpo)", {}, lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, torch.where(m, old - rollout_log_probs, 0).sum(1, keepdim=True).clamp(max=math.log(2)).exp(), even, seq)),
    ("IcePop by nested wheres", "icepop(grpo)", {}, lambda d, A, m, old, rollout_log_probs: seq(torch.where((x := ratio(m, old, rollout_log_probs)) > 5, 0, torch.where(x < 0.5, 0, x * even(d, A))), m)),
    ("UP with TIS", "tis(up_dapo)", {}, lambda d, A, m, lp, old, rollout_log_probs: tok(torch.where(A > 0, A * lp, clipped(d, A)) * torch.where((x := ratio(m, old, rollout_log_probs)) > 2, 2, x), m)),
]  # fmt: skip
RIGHT = [(name, objective, hp, loss(body)) for name, objective, hp, body in BODIES]


def actor_names(
    actor_log_probs, behavior_log_probs, A, loss_mask, clip_low=0.2, clip_high=0.28
):
    """Return DAPO's loss, with the names of an actor and a behavior policy."""
    keep = loss_mask.bool()
    ratio = torch.where(keep, actor_log_probs - behavior_log_probs, 0.0).exp()
    A = A.expand_as(ratio)
    live = (
        torch.where(A > 0, ratio <= 1 + clip_high, ratio >= 1 - clip_low).detach()
        & keep
    )
    return -(ratio * torch.where(live, A, 0)).sum() / keep.sum()


def only_keywords(*, curr_logps, prev_logps, advs, response_mask, eps=0.2):
    """Return GRPO's loss by a loop over rows, with keyword-only arguments."""
    valid = response_mask.bool()
    pieces = []
    for lp, old, a, keep in zip(curr_logps, prev_logps, advs, valid, strict=True):
        r = (lp[keep] - old[keep]).exp()
        a = a.expand_as(keep)[keep]
        pieces.append(
            torch.min(torch.stack([r * a, r.clamp(1 - eps, 1 + eps) * a]), 0)[0].mean()
        )
    return torch.stack(pieces).mean().neg()


class Loss:
    """A loss with settings, as trainers build them."""

    def __init__(self, low=0.2, high=0.28):
        self.bounds = 1 - low, 1 + high

    def per_token(self, r, A):
        return torch.max(-A * r, -A * r.clamp(*self.bounds))

    def __call__(self, log_probs, old_log_probs, advantages, action_mask):
        r = torch.exp((log_probs - old_log_probs).masked_fill(action_mask == 0, 0))
        A = advantages.expand_as(r).masked_fill(action_mask == 0, 0)
        return self.per_token(r, A).sum() / action_mask.sum()


RIGHT += [
    ("actor and behavior", "dapo", {}, actor_names),
    ("keywords and rows", "grpo", {}, only_keywords),
    ("an object", "dapo", {}, Loss()),
]


# ---- black boxes ---------------------------------------------------------------------
BOXES = [
    ("dapo ppo_clip", {"eps_low": 0.05, "eps_high": 0.6}, lambda d, A, m: tok(clipped(d, A, 0.95, 1.6), m)),
    ("ppo_clip dapo", {"eps": 0.02}, lambda d, A, m: tok(clipped(d, A, 0.98, 1.02), m)),
    ("dapo", {"eps_low": 0.3, "eps_high": 0.5, "c": 1.8}, lambda d, A, m: tok(dual(clipped(d, A, 0.7, 1.5), A, 1.8), m)),
    ("gspo", {"eps_low": 0.1, "eps_high": 0.2}, lambda d, A, m: gspo(mean(d, m), mean(A, m), 0.1, 0.2)),
    ("cispo", {"eps_high": 0.5}, lambda d, A, m, lp: tok(d.exp().clamp(max=1.5).detach() * A * lp, m)),
    ("cispo_verl", {"eps_low": 0.5, "eps_high": 1.0}, lambda d, A, m, lp: tok(d.exp().clamp(0.5, 2).detach() * A * lp, m)),
    ("up_dapo up_dapo_anchored", {"eps_low": 0.5}, lambda d, A, m, lp: tok(torch.where(A > 0, A * lp, d.exp().clamp(min=0.5) * A), m)),
    ("up_grpo up_grpo_anchored", {"eps": 0.05}, lambda d, A, m, lp: seq(torch.where(A > 0, A * lp, d.exp().clamp(min=0.95) * A), m)),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 0.5}, lambda d, A, m: seq(torch.sigmoid((t := torch.where(A > 0, 2.0, 0.5).to(d)) * (d.exp() - 1)) * 4 / t * A, m)),
    ("gmpo", {"eps": 0.1}, lambda d, A, m: -(mean(torch.where(A > 0, d.clamp(max=0.1), d.clamp(min=-0.1)), m).exp() * mean(A, m)).mean()),
    ("aspo", {"eps": 0.3, "cap": 5.0}, lambda d, A, m, lp: tok(torch.where(A > 0, (1 / (r := d.exp().detach())).clamp(max=5) * (r <= 1.3), r.clamp(max=5) * (r >= 0.7)) * A * lp, m)),
    ("dppo_tv", {"delta": 0.3}, lambda d, A, m, lp, old: -(d.exp() * A * ((lp.exp() - old.exp()) * A.sign() <= 0.3) * m).sum(1).mean()),
    ("w_reinforce", {"lam": 0.7}, lambda A, m, lp: -(torch.where(A > 0, 0.7 * A, A) * lp).sum(1).mean()),
    ("ripo", {"delta": 0.1}, lambda d, A, m, old: tok(clipped(d, A, 1 - (e := (0.1 / old.exp()).sqrt()), 1 + e), m)),
    ("cfpo", {"eps": 0.5}, lambda d, A, m: seq(d.exp() * A - A.abs() * d.expm1() ** 2, m)),
    ("dro", {"tau": 2.0}, lambda d, A, m, lp: tok(A * lp - d**2, m)),
    ("luspo", {"eps_low": 0.05, "eps_high": 0.1}, lambda d, A, m: gspo(mean(d, m), mean(A, m) * m.sum(1), 0.05, 0.1)),
    ("wapo", {"eps": 0.5}, lambda d, A, m: -(d.clamp(max=math.log(1.5)).exp() * A * (A > 0)).sum(1).mean()),
    ("gppo", {"eps_low": 0.5, "eps_high": 1.5}, lambda d, A, m, lp: tok(torch.where(A > 0, (r := d.exp().detach()).clamp(max=2.5), r.clamp(min=0.5)) * A * lp, m)),
    ("grpo", {"eps": 0.3, "beta": 0.5}, lambda d, A, m, lp, ref_log_prob: seq(clipped(d, A, 0.7, 1.3) - 0.5 * k3(lp, ref_log_prob, m), m)),
    # nothing known
    ("", {}, lambda d, A, m: tok(A * d.exp().log1p(), m)),
    ("", {}, lambda d, A, m: tok(A * torch.erf(d.exp() - 1), m)),
    ("", {}, lambda d, A, m: tok(torch.where(A > 0, A * (1 + 0.28 * torch.tanh((d.exp() - 1) / 0.28)), d.exp() * A), m)),
    ("", {}, lambda d, A, m, lp: tok(A * lp * (1 + d.detach() ** 2).reciprocal(), m)),
    ("", {}, lambda d, A, m, lp: seq(A * lp * -torch.expm1(lp.detach()), m)),
    ("", {}, lambda d, A, m: tok(clipped(neighbors(d, m), A), m)),
    ("", {}, lambda d, A, m: gspo(median(d, m), mean(A, m), 0.2, 0.2)),
    ("", {}, lambda d, A, m: tok(torch.minimum(d.exp() * A, (d.exp().clamp(0.8, 1.28) + 0.1 * d) * A), m)),
    ("", {}, lambda d, A, m, old: tok(clipped(d, A) * (1 + old.exp()), m)),
    ("", {}, lambda d, A, m: tok(even(d.cumsum(1) / m.cumsum(1).clamp(min=1), A), m)),
    ("", {}, lambda d, A, m: tok(A.sign() * torch.log1p(A.abs()) * d.exp().clamp(max=3), m)),
    ("", {}, lambda A, m, lp: tok(A * lp / (1 + A.abs()), m)),
]  # fmt: skip


def far(A):
    return A.abs() > 3


def long(m):
    return m.sum(1, keepdim=True) > 64


NEAR = [  # (cause, where it ends, body)
    ("the minimum is missing", "|A|", lambda d, A, m: tok(torch.where(far(A), clipped(d, A), d.exp().clamp(0.8, 1.28) * A), m)),
    ("the ratio is inverted", "|A|", lambda d, A, m: tok(clipped(torch.where(far(A), d, -d), A), m)),
    ("2 times", "|A|", lambda d, A, m: tok(clipped(d, torch.where(far(A), A, 2 * A)), m)),
    ("2 times", "responses of up to", lambda d, A, m: tok(clipped(d, torch.where(long(m), A, 2 * A)), m)),
    ("the sign is flipped", "|A|", lambda d, A, m: tok(clipped(d, A) * torch.where(far(A), 1, -1), m)),
    ("the sign is flipped", "responses of up to", lambda d, A, m: tok(clipped(d, A) * torch.where(long(m), 1, -1), m)),
    ("over the padded width", "", lambda d, A, m: -(clipped(d, A) * m).mean() if m.shape[1] <= 16 else tok(clipped(d, A), m)),
    ("0.05 k3", "|A|", lambda d, A, m, lp, ref_log_prob: tok(clipped(d, A) - 0.05 * k3(lp, ref_log_prob, m) * ~far(A), m)),
    ("0.05 k3", "responses of up to", lambda d, A, m, lp, ref_log_prob: tok(clipped(d, A) - 0.05 * k3(lp, ref_log_prob, m) * ~long(m), m)),
    ("by its sign alone", "|A|", lambda d, A, m: tok(clipped(d, torch.where(far(A), A, A.sign())), m)),
    ("its absolute value", "|A|", lambda d, A, m: tok(clipped(d, torch.where(far(A), A, A.abs())), m)),
    ("differs elsewhere", "|A|", lambda d, A, m: tok(clipped(d, torch.where(A < -3, A, A.clamp(min=0))), m)),
    ("the product r A", "|A|", lambda d, A, m: tok(torch.where(far(A), clipped(d, A), torch.minimum((r := d.exp()) * A, (r * A).clamp(0.8, 1.28))), m)),
    ("is not detached", "responses of up to", lambda d, A, m, lp: tok(d.exp().clamp(max=torch.where(long(m), 9.0, 5.0).to(d)) * A * lp, m)),
    ("without an anchor", "|A|", lambda d, A, m, lp: tok(torch.where(A > 0, A * torch.where(far(A), lp, lp.exp()), clipped(d, A)), m)),
]  # fmt: skip


# ---- estimators of advantages --------------------------------------------------------
def sorted_groups(rewards, group):
    order = group.argsort(stable=True)
    sizes = group.unique(return_counts=True)[1].tolist()
    out = torch.cat([normed(r.double()) for r in rewards[order].split(sizes)])
    return torch.empty_like(out).scatter(0, order, out).to(rewards.dtype)


def welford(rewards, group):
    """Return group_norm's advantages with Welford's running mean and variance; 0 where
    the spread is 1e-9 of the mean or less.
    """
    out = torch.zeros_like(rewards)
    for g in group.unique().tolist():
        n, m, s = 0, 0.0, 0.0
        for x in rewards[group == g].tolist():
            n, d = n + 1, x - m
            m, s = m + d / n, s + d * (x - m - d / n)
        for i in (group == g).nonzero()[:, 0].tolist():
            spread = (s / max(n - 1, 1)) ** 0.5
            out[i] = (
                (rewards[i].item() - m) / (spread + 1e-6)
                if spread > 1e-9 * abs(m)
                else 0.0
            )
    return out


def padded(rewards, group):
    """Return group_mean's advantages by a matrix [prompts, N] that has NaN where a
    response is of another prompt; 0 where all rewards of a prompt are equal.
    """
    ids, g = group.unique(return_inverse=True)
    x = torch.full((len(ids), len(rewards)), math.nan, dtype=torch.float64)
    x[g, torch.arange(len(rewards))] = rewards.double()
    c = x - x.nanmean(1, keepdim=True)
    c = torch.where(
        (x - x.nan_to_num(math.inf).amin(1, keepdim=True))
        .nan_to_num(0)
        .amax(1, keepdim=True)
        == 0,
        0 * c,
        c,
    )
    return c[g, torch.arange(len(rewards))].to(rewards.dtype)


def loo_matrix(rewards, group):
    """Return leave_one_out's advantages by a matrix of peers; 0 where there is none, or
    all rewards of the prompt are equal.
    """
    same = (group[:, None] == group) & ~torch.eye(len(group), dtype=torch.bool)
    others = (same * rewards.double()).sum(1) / same.sum(1).clamp(min=1)
    out = torch.where(same.any(1), rewards.double() - others, 0)
    equal = torch.stack(
        [(rewards[group == g] == r).all() for g, r in zip(group, rewards, strict=True)]
    )
    return torch.where(equal, 0, out).to(rewards.dtype)


def off_by(rewards, group, fn):
    return by_group(rewards, group, lambda r: fn(r) / (std(r) + 1e-6))


ESTIMATORS = [
    ("sorted and split", "group_norm", {}, sorted_groups, ""),
    ("Welford", "group_norm", {}, welford, ""),
    ("a padded matrix", "group_mean", {}, padded, ""),
    ("a matrix without its diagonal", "leave_one_out", {}, loo_matrix, ""),
    ("standardized", "whiten", {}, lambda rewards: ((x := rewards.double()) - x.mean()).div(x.var(correction=0).sqrt() + 1e-8).to(rewards.dtype), ""),
    ("a product of signs", "signed", {}, lambda rewards: (2 * (rewards > 0).to(rewards.dtype) - 1), ""),
    ("a clone", "reward", {}, lambda rewards: rewards + 0, ""),
    ("population, TRL's eps", "group_norm", {"ddof": 0, "eps": 1e-4}, lambda rewards, group: by_group(rewards, group, lambda r: (r - r.mean()) / (std(r, 0) + 1e-4) if r.max() > r.min() else 0 * r), ""),
    ("shrunk", "group_norm", {}, lambda rewards, group: off_by(rewards, group, lambda r: (r - r.mean()) * (1 - 1 / len(r))), "times 1 - 1/G"),
    ("first as baseline", "group_norm", {}, lambda rewards, group: off_by(rewards, group, lambda r: r - r[0]), "the first reward"),
    ("half the range", "group_norm", {}, lambda rewards, group: off_by(rewards, group, lambda r: r - (r.max() + r.min()) / 2), "the middle of the range"),
    ("best of the others", "leave_one_out", {}, lambda rewards, group: by_group(rewards, group, lambda r: torch.stack([r[i] - (torch.cat([r[:i], r[i + 1:]]).max() if len(r) > 1 else r[i]) for i in range(len(r))])), "the largest of the others"),
    ("ranks", "group_norm", {}, lambda rewards, group: by_group(rewards, group, lambda r: normed(r.argsort().argsort().to(r))), "ranks, not rewards"),
    ("tanh", "group_norm", {}, lambda rewards, group: torch.tanh(norm(rewards, group)), "bounded by a tanh"),
    ("winners alone", "group_mean", {}, lambda rewards, group: by_group(rewards, group, lambda r: (r - r.mean()) * (r > 0)), "rewards of 0 and below get 0"),
    ("pairs dropped", "group_norm", {}, lambda rewards, group: by_group(rewards, group, lambda r: normed(r) if len(r) > 2 else 0 * r), "groups of two get 0"),
    ("large groups halved", "group_norm", {}, lambda rewards, group: by_group(rewards, group, lambda r: normed(r) if len(r) <= 8 else torch.cat([normed(r[:8]), normed(r[8:])])), "groups of more than 8 are cut in two"),
    ("global scale", "group_mean", {}, lambda rewards, group: by_group(rewards, group, lambda r: r - r.mean()) / rewards.abs().max().clamp(min=1), "divided by the largest reward"),
    ("batch's median spread", "group_norm", {}, lambda rewards, group: by_group(rewards, group, lambda r: r - r.mean()) / (torch.stack([std(rewards[group == g]) for g in group.unique()]).median() + 1e-6), "the median of the groups' deviations"),
    ("smoothed baseline", "group_mean", {}, lambda rewards, group: by_group(rewards, group, lambda r: r - (r.sum() + rewards.mean()) / (len(r) + 1)), "the baseline is shrunk towards the batch's"),
    ("both halves", "group_mean_whiten", {}, lambda rewards, group: by_group(rewards, group, lambda r: normed(r, 0)), "divided by the group's own deviation"),
    ("unbiased twice", "leave_one_out", {}, lambda rewards, group: by_group(rewards, group, lambda r: (r - r.mean()) * (len(r) / max(len(r) - 1, 1)) ** 2), "G / (G - 1) twice"),
    ("integer ids", "group_norm", {}, lambda rewards, group: norm(rewards, group.to(torch.int16)), "ids wrap at 2^16"),
    ("threshold", "signed", {}, lambda rewards: torch.where(rewards > 0.5, 1.0, 0.0).to(rewards.dtype), "losers get 0"),
]  # fmt: skip
KLS = [  # (name, estimator, function, cause)
    ("k3 by logaddexp", "k3", lambda lp, ref: torch.expm1(ref - lp) + (lp - ref), ""),
    ("k3 from a ratio", "k3", lambda lp, ref: torch.exp(ref - lp) + lp - ref - 1.0, ""),
    ("k2 as a product", "k2", lambda lp, ref: 0.5 * (ref - lp) * (ref - lp), ""),
    ("k1 as a negative", "k1", lambda lp, ref: -(ref - lp), ""),
    ("k3 in base 2", "k3", lambda lp, ref: torch.expm1(ref - lp) - (ref - lp) / math.log(2), "a logarithm in base 2"),
    ("k3 second order", "k3", lambda lp, ref: (x := ref - lp) ** 2 / 2 + x**3 / 6, "a Taylor series of third order"),
    ("k3 half detached", "k3", lambda lp, ref: torch.expm1((ref - lp).detach()) - (ref - lp), "the exponential has no gradient"),
    ("k1 relu", "k1", lambda lp, ref: F.relu(lp - ref), "negative values are 0"),
    ("Huber", "k2", lambda lp, ref: F.huber_loss(lp, ref, reduction="none"), "linear beyond 1"),
    ("k3 of means", "k3", lambda lp, ref: torch.expm1(ref - lp) - (ref - lp).mean(), "the logarithm is averaged over the batch"),
    ("mixture", "k3", lambda lp, ref: 0.9 * (torch.expm1(ref - lp) - (ref - lp)) + 0.1 * (lp - ref), "nine parts k3, one part k1"),
]  # fmt: skip
