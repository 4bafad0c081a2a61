# SPDX-License-Identifier: Apache-2.0
"""Right losses in unusual styles, shapes, precisions and libraries. The decorator of
each names its objective.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from tests.fifth_set.case import right


# ---- DAPO ----------------------------------------------------------------------------
@right("dapo")
def hinge_of_two_bounds(log_prob, old_log_prob, advantages, mask):
    x = torch.where(mask, log_prob - old_log_prob, 0).expm1()
    a = torch.where(mask, advantages, 0)
    gain = torch.where(a > 0, x.clamp(max=0.28), x.clamp(min=-0.2))
    return -(a * (1 + gain)).sum() / mask.sum()


@right("dapo")
def indicator_times_gradient(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's gradient weight, computed without a graph, times log π_θ."""
    with torch.no_grad():
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        a = torch.where(mask, advantages, 0)
        alive = ~((a > 0) & (r > 1.28) | (a < 0) & (r < 0.8))
        w = r * a * alive / mask.sum()
    return -(w * torch.where(mask, log_prob, 0)).sum()


class DapoByHand(torch.autograd.Function):
    """DAPO with a backward pass of its own, on numpy arrays."""

    @staticmethod
    def forward(ctx, lp, old, adv, mask):
        """Return DAPO's loss by numpy, and save its gradient by log_prob."""
        m = mask.numpy()
        x = np.where(m, lp.detach().numpy() - old.numpy(), 0)
        r = np.exp(x)
        a = np.where(m, adv.numpy(), 0)
        value = -np.minimum(r * a, np.clip(r, 0.8, 1.28) * a).sum() / m.sum()
        alive = np.where(a > 0, r <= 1.28, r >= 0.8)
        ctx.save_for_backward(torch.as_tensor(-np.where(alive, r * a, 0) / m.sum()))
        return lp.new_tensor(value)

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g * w, None, None, None


@right("dapo")
def numpy_with_a_backward(log_prob, old_log_prob, advantages, mask):
    return DapoByHand.apply(log_prob, old_log_prob, advantages, mask)


@right("dapo")
def selected_tokens(log_prob, old_log_prob, advantages, mask):
    new, old, a = log_prob[mask], old_log_prob[mask], advantages[mask]
    r = (new - old).exp()
    return torch.stack([-r * a, -r.clamp(0.8, 1.28) * a]).amax(0).mean()


@right("dapo")
def sorted_then_summed(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.minimum(r * a, r.clamp(0.8, 1.28) * a).flatten()
    return -t[t.abs().argsort()].cumsum(0)[-1] / mask.sum()


@right("dapo")
def one_row_at_a_time(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss by a loop over rows."""
    total, n = log_prob.new_zeros(()), 0
    for lp, old, a, m in zip(log_prob, old_log_prob, advantages, mask, strict=True):
        i = m.nonzero().squeeze(1)
        r = (lp.index_select(0, i) - old.index_select(0, i)).exp()
        total = total + torch.minimum(r * a[i], r.clip(0.8, 1.28) * a[i]).sum()
        n += len(i)
    return -total / n


def one_token(lp, old, a, m):
    """Return DAPO's term of one token."""
    r = torch.where(m, lp - old, 0).exp()
    a = torch.where(m, a, 0)
    return torch.minimum(r * a, torch.clamp(r, 0.8, 1.28) * a)


@right("dapo")
def by_vmap(log_prob, old_log_prob, advantages, mask):
    f = torch.func.vmap(torch.func.vmap(one_token))
    return f(log_prob, old_log_prob, advantages, mask).sum().neg() / mask.sum()


class Stats(NamedTuple):
    """What a trainer logs."""

    loss: torch.Tensor
    clip_fraction: float
    approx_kl: float


@right("dapo")
def named_tuple_of_stats(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss in a named tuple, beside two metrics."""
    d = torch.where(mask, log_prob - old_log_prob, 0)
    r, a = d.exp(), torch.where(mask, advantages, 0)
    t = torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
    clipped = (((r > 1.28) | (r < 0.8)) & mask).sum().item() / mask.sum().item()
    return Stats(-t.sum() / mask.sum(), clipped, -d.mean().item())


@dataclass
class ClipConfig:
    """Bounds of a ratio."""

    low: float = 0.2
    high: float = 0.28


class PolicyLoss(torch.nn.Module):
    """A module with its settings in a buffer."""

    def __init__(self, config):
        super().__init__()
        self.register_buffer(
            "band", torch.tensor([1 - config.low, 1 + config.high], dtype=torch.float64)
        )

    def forward(self, logprobs, old_logprobs, advantages, action_mask):
        """Return DAPO's loss in a dict, with bounds from a buffer of the module."""
        keep = action_mask.bool()
        r = torch.where(keep, logprobs - old_logprobs, 0.0).exp()
        a = torch.where(keep, advantages, 0.0)
        low, high = self.band.to(r.dtype)
        s = torch.stack([r * a, torch.maximum(torch.minimum(r, high), low) * a])
        return {"loss": -s.min(0).values.sum() / keep.sum(), "ratio": r.mean().item()}


@right("dapo")
def module_with_buffers(logprobs, old_logprobs, advantages, action_mask):
    return PolicyLoss(ClipConfig())(logprobs, old_logprobs, advantages, action_mask)


@right("dapo")
def padded_with_nan_kept_away(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss of the trained slots alone, by their row and column."""
    i, j = mask.nonzero(as_tuple=True)
    r = (log_prob[i, j] - old_log_prob[i, j]).exp()
    a = advantages[i, j]
    t = torch.where(a >= 0, r.clamp(max=1.28), r.clamp(min=0.8)) * a
    return -t.sum() / len(i)


@right("dapo")
def in_chunks_of_rows(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss by chunks of three rows."""
    n = mask.sum()
    parts = zip(
        *(x.split(3) for x in (log_prob, old_log_prob, advantages, mask)), strict=True
    )
    total = log_prob.new_zeros(())
    for lp, old, a, m in parts:
        r = torch.where(m, lp - old, 0).exp()
        a = torch.where(m, a, 0)
        total = total - torch.minimum(r * a, r.clamp(0.8, 1.28) * a).sum() / n
    return total


@right("dapo")
def by_checkpoint(log_prob, old_log_prob, advantages, mask):
    def mean(lp):
        return one_token(lp, old_log_prob, advantages, mask).sum() / mask.sum()

    return -torch.utils.checkpoint.checkpoint(mean, log_prob, use_reentrant=False)


@right("dapo")
def keyword_only(*, old_per_token_logps, per_token_logps, completion_mask, advantages):
    m = completion_mask != 0
    r = torch.where(m, per_token_logps - old_per_token_logps, 0).exp()
    a = torch.where(m, advantages, 0)
    return -torch.min(r * a, torch.clip(r, 1 - 0.2, 1 + 0.28) * a).sum().div(m.sum())


@right("dapo")
def prompts_by_scatter(log_prob, old_log_prob, advantages, mask, uid):
    """Return DAPO's loss with a denominator for each prompt, by scatter_add."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.minimum(r * a, r.clamp(0.8, 1.28) * a).sum(1)
    _, i = torch.unique(uid, return_inverse=True)
    G = int(i.max()) + 1
    n = torch.zeros(G, dtype=t.dtype).scatter_add(0, i, mask.sum(1).to(t.dtype))
    s = torch.zeros(G, dtype=t.dtype).scatter_add(0, i, t)
    return -(s / n).mean()


@right("dapo")
def prompts_by_one_hot(log_prob, old_log_prob, advantages, mask, group_index):
    """Return DAPO's loss with a denominator for each prompt, by a matrix of equal ids."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
    same = (group_index[:, None] == group_index[None, :]).to(t.dtype)
    tokens = same @ mask.sum(1).to(t.dtype)
    peers = same.sum(1)
    prompts = (1 / peers).sum()
    return -(t.sum(1) / tokens).sum() / prompts


@right("dapo")
def prompts_by_a_dict(log_prob, old_log_prob, advantages, mask, prompt_ids):
    """Return DAPO's loss with a denominator for each prompt, by a dict of rows."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.minimum(r * a, r.clamp(0.8, 1.28) * a).sum(1)
    rows: dict[int, list[int]] = {}
    for i, g in enumerate(prompt_ids.tolist()):
        rows.setdefault(g, []).append(i)
    return -sum(t[i].sum() / mask[i].sum() for i in rows.values()) / len(rows)


@right("dapo", agg="token-mean")
def for_micro_batches(log_prob, old_log_prob, advantages, mask, totals):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
    return -t.sum() / totals.tokens


@right("dapo", agg="token-mean")
def for_ranks(log_prob, old_log_prob, advantages, mask, totals, world_size):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
    return -t.sum() * (world_size / totals.tokens)


@right("dapo")
def float32_inside(log_prob, old_log_prob, advantages, mask):
    new, old, adv = (x.float() for x in (log_prob, old_log_prob, advantages))
    r = torch.where(mask, new - old, 0).exp()
    a = torch.where(mask, adv, 0)
    return -torch.minimum(r * a, r.clamp(0.8, 1.28) * a).sum() / mask.sum()


@right("dapo")
def a_training_step(log_prob, old_log_prob, advantages, mask):
    """Run the backward pass of DAPO's loss, and return its value without a graph."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    loss = -torch.minimum(r * a, r.clamp(0.8, 1.28) * a).sum() / mask.sum()
    loss.backward()
    return loss.detach()


@right("dapo")
def an_unreduced_table(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    return torch.maximum(-r * a, -r.clamp(0.8, 1.28) * a)


@right("dapo", c=3.0)
def dual_clip_as_verl(log_prob, old_log_prob, advantages, mask, clip_ratio_c=3.0):
    """Return DAPO's loss with verl's dual clip."""
    d = torch.where(mask, (log_prob - old_log_prob).clamp(-20, 20), 0)
    r, a = d.exp(), torch.where(mask, advantages, 0)
    one = torch.maximum(-a * r, -a * torch.clamp(r, 1 - 0.2, 1 + 0.28))
    two = torch.min(-a * clip_ratio_c, one)
    return torch.where(a < 0, two, one).sum() / mask.sum()


# ---- GRPO, PPO, Dr. GRPO -------------------------------------------------------------
@right("grpo")
def weighted_rows(log_prob, old_log_prob, advantages, mask):
    w = mask / (mask.sum(1, keepdim=True) * mask.shape[0])
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    return -torch.sum(torch.minimum(r * a, r.clamp(0.8, 1.2) * a) * w)


@right("grpo")
def advantages_of_responses(log_prob, old_log_prob, advantages, mask):
    a = advantages.reshape(len(mask), 1)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    t = torch.where(mask, torch.minimum(r * a, r.clamp(0.8, 1.2) * a), 0)
    return -(t.sum(1) / mask.sum(1)).mean()


@right("grpo", beta=0.04)
def trl_like(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04):
    """Return GRPO's loss with a KL term, in TRL's style."""
    m = mask.to(log_prob.dtype)
    ref, new = (torch.where(mask, x, 0) for x in (ref_log_prob, log_prob))
    kl = torch.exp(ref - new) - (ref - new) - 1
    c1 = torch.exp(new - torch.where(mask, old_log_prob, 0))
    c2 = torch.clamp(c1, 1 - 0.2, 1 + 0.2)
    a = torch.where(mask, advantages, 0)
    t = -torch.min(c1 * a, c2 * a) + beta * kl
    return ((t * m).sum(-1) / m.sum(-1).clamp(min=1.0)).mean()


@right("grpo", beta=0.1)
def kl_by_expm1(log_prob, old_log_prob, advantages, mask, ref_log_prob, kl_coef=0.1):
    """Return GRPO's loss with k3 by expm1."""
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    n = mask.sum(1)
    pg = (torch.minimum(r * a, r.clamp(0.8, 1.2) * a).sum(1) / n).mean()
    return kl_coef * ((torch.expm1(d) - d).sum(1) / n).mean() - pg


@right("grpo")
def packed_segments(log_prob, old_log_prob, advantages, mask):
    """Return GRPO's loss of packed tokens, with sums by index_add."""
    n = mask.sum(1)
    row = torch.repeat_interleave(torch.arange(len(n)), n)
    r = (log_prob[mask] - old_log_prob[mask]).exp()
    a = advantages[mask]
    t = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
    sums = torch.zeros(len(n), dtype=t.dtype).index_add(0, row, t)
    return -(sums / n).mean()


@right("grpo")
def segment_reduced(log_prob, old_log_prob, advantages, mask):
    r = (log_prob[mask] - old_log_prob[mask]).exp()
    a = advantages[mask]
    t = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
    return -torch.segment_reduce(t, "mean", lengths=mask.sum(1)).mean()


@right("grpo")
def means_of_nan(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
    return -torch.where(mask, t, math.nan).nanmean(1).mean()


@right("grpo", eps=0.1)
def a_partial(log_prob, old_log_prob, advantages, mask, clip_eps=0.1):
    bounded = functools.partial(torch.clamp, min=1 - clip_eps, max=1 + clip_eps)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    return -(torch.minimum(r * a, bounded(r) * a).sum(1) / mask.sum(1)).mean()


@right("ppo_clip")
def sums_by_einsum_of_floats(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
    return -torch.einsum("bt,bt->", t, mask.to(t)) / mask.count_nonzero()


@right("ppo_clip")
def ratio_by_power_of_two(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0) / math.log(2)
    r, a = torch.exp2(d), torch.where(mask, advantages, 0)
    return -torch.minimum(r * a, r.clamp(0.8, 1.2) * a).sum() / mask.sum()


@right("ppo_clip")
def clip_by_relu(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = r * a - a.clamp(min=0) * F.relu(r - 1.2) + a.clamp(max=0) * F.relu(0.8 - r)
    return -t.sum() / mask.sum()


@right("ppo_clip")
def a_dictionary_batch(log_prob, old_log_prob, advantages, mask):
    """Return PPO's loss of a batch that is a dict, with a mask of integers."""
    batch = dict(
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        mask=mask.int(),
    )
    new, old = batch["log_prob"], batch["old_log_prob"]
    m = batch["mask"].bool()
    r = torch.where(m, new - old, 0).exp()
    a = torch.where(m, batch["advantages"], 0)
    return -torch.minimum(r * a, r.clamp(0.8, 1.2) * a).sum() / m.sum()


@right("dr_grpo")
def sums_of_rows(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
    return -t.sum() / log_prob.shape[0]


@right("reinforce_pp_baseline", beta=0.05)
def with_k2(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.05):
    """Return a PPO loss with a KL term k2, averaged over responses."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    k2 = 0.5 * torch.where(mask, log_prob - ref_log_prob, 0).square()
    t = torch.minimum(r * a, r.clamp(0.8, 1.2) * a) - beta * k2
    return -(t.sum(1) / mask.sum(1)).mean()


# ---- responses -----------------------------------------------------------------------
@right("gspo")
def gspo_token_form(log_prob, old_log_prob, advantages, mask):
    """Return GSPO's loss in its form for tokens: the response's value, the token's
    gradient.
    """
    n = mask.sum(1, keepdim=True)
    lp = torch.where(mask, log_prob, 0)
    log_s = torch.where(mask, log_prob - old_log_prob, 0).sum(1, keepdim=True) / n
    s = (log_s.detach() + lp - lp.detach()).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.where(mask, torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a), 0)
    return -(t.sum(1) / n[:, 0]).mean()


@right("gspo")
def gspo_by_logsumexp(log_prob, old_log_prob, advantages, mask):
    """Return GSPO's loss with the ratio through a logsumexp of one number."""
    x = torch.where(mask, log_prob - old_log_prob, 0)
    n = mask.sum(1)
    s = torch.logsumexp((x.sum(1) / n)[:, None], 1).exp()
    a = torch.where(mask, advantages, 0).sum(1) / n
    return -torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a).mean()


@right("gspo")
def gspo_one_number_per_response(log_prob, old_log_prob, advantages, mask):
    x = torch.where(mask, log_prob - old_log_prob, 0)
    s = (x.sum(1) / mask.sum(1)).exp()
    a = torch.where(mask, advantages, 0).sum(1) / mask.sum(1)
    return torch.maximum(-s * a, -s.clamp(1 - 3e-4, 1 + 4e-4) * a)


@right("luspo")
def luspo_over_tokens(log_prob, old_log_prob, advantages, mask):
    """Return LUSPO's loss as a sum of the response's term over its tokens."""
    x = torch.where(mask, log_prob - old_log_prob, 0)
    n = mask.sum(1, keepdim=True)
    s = (x.sum(1, keepdim=True) / n).exp()
    a = torch.where(mask, advantages, 0)
    t = torch.minimum(s * a, s.clamp(1 - 2e-3, 1 + 2.5e-3) * a)
    return -torch.where(mask, t, 0).sum(1).mean()


@right("gmpo")
def gmpo_with_signs(log_prob, old_log_prob, advantages, mask):
    """Return GMPO's loss with a clip of sign(A) log r."""
    x = torch.where(mask, log_prob - old_log_prob, 0)
    a = torch.where(mask, advantages, 0)
    sign = a.sign()
    low = torch.minimum(sign * x, (sign * x).clamp(-0.4, 0.4))
    g = ((sign * low).sum(1) / mask.sum(1)).exp()
    return -(a.sum(1) / mask.sum(1) * g).mean()


@right("up_gspo")
def up_gspo_in_one_where(log_prob, old_log_prob, advantages, mask):
    """Return UP-GSPO's loss of means over responses, in one where."""
    n = mask.sum(1)
    new, old, a = (
        torch.where(mask, x, 0).sum(1) / n for x in (log_prob, old_log_prob, advantages)
    )
    s = (new - old).exp()
    return -torch.where(
        a > 0, a * new, torch.minimum(s * a, s.clamp(min=1 - 3e-4) * a)
    ).mean()


@right("topr")
def topr_in_two_sums(log_prob, old_log_prob, advantages, mask):
    """Return TOPR's loss with the weight of bad responses as exp of a clamp."""
    lp, x, a = (
        torch.where(mask, v, 0) for v in (log_prob, log_prob - old_log_prob, advantages)
    )
    A = a.sum(1) / mask.sum(1)
    w = torch.where(A < 0, x.sum(1).clamp(max=0).exp().detach(), 1.0)
    return -(w * A * lp.sum(1)).sum() / len(A)


@right("tpo")
def tpo_as_cross_entropy(log_prob, old_log_prob, advantages, mask, group):
    """Return TPO's loss by torch's cross entropy with a target of probabilities."""
    lp, old, a = (
        torch.where(mask, x, 0).sum(1) for x in (log_prob, old_log_prob, advantages)
    )
    a = a / mask.sum(1)
    loss = lp.new_zeros(())
    for g in torch.unique(group):
        i = torch.nonzero(group == g)[:, 0]
        q = torch.softmax(old[i] + a[i], 0)
        loss = loss + len(i) * F.cross_entropy(lp[i][None], q[None])
    return loss / len(group)


@right("vespo")
def vespo_in_the_authors_letters(
    log_prob,
    old_log_prob,
    advantages,
    mask,
    k_pos=2.0,
    lambda_pos=3.0,
    k_neg=3.0,
    lambda_neg=2.0,
):
    """Return VESPO's loss with the authors' k and λ."""
    lw = torch.where(mask, log_prob - old_log_prob, 0).sum(1).detach()
    A = torch.where(mask, advantages, 0).sum(1) / mask.sum(1)
    k = torch.where(A > 0, k_pos, k_neg)
    lam = torch.where(A > 0, lambda_pos, lambda_neg)
    phi = (k * lw - lam * torch.expm1(lw)).exp()
    return -(phi * A * torch.where(mask, log_prob, 0).sum(1)).mean()


@right("rloo")
def rloo_of_responses(log_prob, old_log_prob, advantages, mask):
    a = advantages[:, 0]
    return -(a * torch.where(mask, log_prob, 0).sum(1)).mean()


# ---- UP ------------------------------------------------------------------------------
@right("up_dapo")
def up_anchored_to_itself(log_prob, old_log_prob, advantages, mask):
    """Return UP-DAPO's loss by one ratio, whose anchor is the policy itself for good
    tokens.
    """
    lp, x, a = (
        torch.where(mask, v, 0) for v in (log_prob, log_prob - old_log_prob, advantages)
    )
    anchor = torch.where(a > 0, lp.detach(), lp - x)
    r = (lp - anchor).exp()
    t = torch.where(a > 0, r * a, torch.minimum(r * a, r.clamp(min=0.8) * a))
    return -torch.where(mask, t, 0).sum() / mask.sum()


@right("up_dapo")
def up_by_selected_signs(log_prob, old_log_prob, advantages, mask):
    """Return UP-DAPO's loss as a sum over good and a sum over bad tokens."""
    good, bad = mask & (advantages > 0), mask & (advantages < 0)
    r = (log_prob[bad] - old_log_prob[bad]).exp()
    J = (advantages[good] * log_prob[good]).sum() + (
        r.clamp(min=0.8) * advantages[bad]
    ).sum()
    return -J / mask.sum()


@right("up_grpo")
def up_with_the_log_ratio(log_prob, old_log_prob, advantages, mask):
    x = torch.where(mask, log_prob - old_log_prob, 0)
    a = torch.where(mask, advantages, 0)
    t = torch.where(a > 0, a * x, a * x.exp().clamp(min=0.8))
    return -(t.sum(1) / mask.sum(1)).mean()


# ---- weights that are constants ------------------------------------------------------
@right("cispo")
def cispo_by_no_grad(log_prob, old_log_prob, advantages, mask):
    with torch.no_grad():
        w = torch.where(mask, log_prob - old_log_prob, 0).clamp(max=math.log(5)).exp()
        w = w * torch.where(mask, advantages, 0)
    return -(w * torch.where(mask, log_prob, 0)).sum() / mask.sum()


@right("cispo_verl")
def cispo_in_a_hook(log_prob, old_log_prob, advantages, mask):
    """Return CISPO's loss whose weight is in a hook of its gradient."""
    lp = torch.where(mask, log_prob, 0)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp().detach().clamp(0.8, 1.2)
    a = torch.where(mask, advantages, 0)
    y = lp * (a / mask.sum())
    y.register_hook(lambda g: g * r)
    return -y.sum()


@right("gppo")
def gppo_by_two_ratios(log_prob, old_log_prob, advantages, mask):
    """Return GPPO's loss as a detached, bounded ratio times a ratio of 1."""
    lp = torch.where(mask, log_prob, 0)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    one = (lp - lp.detach()).exp()
    c = torch.where(a > 0, r.detach().clamp(max=1.28), r.detach().clamp(min=0.8)) * one
    return -(c * a).sum() / mask.sum()


@right("aspo")
def aspo_in_log_space(log_prob, old_log_prob, advantages, mask):
    """Return ASPO's loss with its weight and cap as logarithms."""
    x = torch.where(mask, log_prob - old_log_prob, 0)
    a, lp = torch.where(mask, advantages, 0), torch.where(mask, log_prob, 0)
    w = torch.where(a > 0, -x, x).clamp(max=math.log(3)).exp()
    alive = torch.where(a > 0, x.exp() <= 1.2, x.exp() >= 0.8)
    return -((w * alive).detach() * a * lp).sum() / mask.sum()


@right("sapo")
def sapo_by_tanh(log_prob, old_log_prob, advantages, mask):
    """Return SAPO's loss by tanh."""
    x = torch.where(mask, log_prob - old_log_prob, 0).expm1()
    a = torch.where(mask, advantages, 0)
    tau = torch.where(a > 0, 1.0, 1.05).to(x.dtype)
    t = 2 / tau * (1 + torch.tanh(tau * x / 2)) * a
    return -(torch.where(mask, t, 0).sum(1) / mask.sum(1)).mean()


@right("dro")
def dro_as_a_square(log_prob, old_log_prob, advantages, mask):
    """Return DRO's loss as the square of a difference."""
    x, a = (
        torch.where(mask, log_prob - old_log_prob, 0),
        torch.where(mask, advantages, 0),
    )
    return 0.05 * ((x - a / 0.1) ** 2).sum() / mask.sum()


@right("cfpo")
def cfpo_as_a_parabola(log_prob, old_log_prob, advantages, mask):
    y = torch.where(mask, log_prob - old_log_prob, 0).expm1()
    a = torch.where(mask, advantages, 0)
    t = a.abs() * (a.sign() * y - y * y / (2 * 0.2))
    return -(t.sum(1) / mask.sum(1)).mean()


@right("dppo_tv")
def dppo_in_probabilities(log_prob, old_log_prob, advantages, mask):
    """Return DPPO's loss by total variation, with the mask as one inequality."""
    p, mu = (torch.where(mask, v, 0).exp() for v in (log_prob, old_log_prob))
    a = torch.where(mask, advantages, 0)
    M = (a.sign() * (p - mu) <= 0.15).detach()
    x = torch.where(mask, log_prob - old_log_prob, 0)
    return -torch.where(mask & M, x.exp() * a, 0).sum(1).mean()


@right("m2po")
def m2po_dropped_one_by_one(log_prob, old_log_prob, advantages, mask):
    """Return M2PO's loss: the largest (log r)² are dropped one by one, until the mean
    of the rest is at most 0.04.
    """
    x, a = (
        torch.where(mask, log_prob - old_log_prob, 0),
        torch.where(mask, advantages, 0),
    )
    past = mask & ((a > 0) & (x > 0) | (a < 0) & (x < 0))
    i = past.flatten().nonzero()[:, 0]
    m2 = (x.detach() ** 2).flatten()[i]
    order = m2.argsort(descending=True)
    total, n, gone = m2.sum(), len(i), 0
    for k in order.tolist():
        if n == gone or total / (n - gone) <= 0.04:
            break
        total, gone = total - m2[k], gone + 1
    keep = mask.flatten().clone()
    keep[i[order[:gone]]] = False
    return -torch.where(keep.view_as(mask), x.exp() * a, 0).sum() / mask.sum()


# ---- samplers ------------------------------------------------------------------------
def clipped(mask, log_prob, old_log_prob, advantages, high):
    """Return PPO's terms, 0 in masked slots."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages, 0)
    return torch.minimum(r * a, r.clamp(0.8, high) * a)


@right("tis(dapo)")
def tis_by_minimum(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    """Return DAPO's loss times the ratio to the sampler, bounded in its logarithm."""
    y = torch.where(mask, old_log_prob - rollout_log_probs, 0).detach()
    w = torch.minimum(y, torch.full_like(y, math.log(2))).exp()
    return (
        -(w * clipped(mask, log_prob, old_log_prob, advantages, 1.28)).sum()
        / mask.sum()
    )


@right("tis(dapo)", is_max=3.0)
def tis_with_a_cap_of_three(
    log_prob, old_log_prob, advantages, mask, vllm_logprobs, tis_cap=3.0
):
    """Return DAPO's loss times the ratio to the sampler, at most 3."""
    rho = torch.where(mask, old_log_prob - vllm_logprobs, 0).exp().clamp(max=tis_cap)
    return (
        -(rho * clipped(mask, log_prob, old_log_prob, advantages, 1.28)).sum()
        / mask.sum()
    )


@right("mis_seq(gspo)")
def mis_seq_of_gspo(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    """Return GSPO's loss times the response's ratio to the sampler, which is 0 above 3."""
    n = mask.sum(1)
    x, a = (
        torch.where(mask, v, 0).sum(1) / n
        for v in (log_prob - old_log_prob, advantages)
    )
    log_S = torch.where(mask, old_log_prob - rollout_log_probs, 0).sum(1)
    w = torch.where(log_S <= math.log(3.0), log_S.exp(), 0)
    s = x.exp()
    return -(w * torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a)).mean()


@right("icepop(grpo)")
def icepop_in_logs(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    y = torch.where(mask, old_log_prob - rollout_log_probs, 0)
    w = torch.where((y >= math.log(0.5)) & (y <= math.log(5)), y.exp(), 0)
    t = w * clipped(mask, log_prob, old_log_prob, advantages, 1.2)
    return -(t.sum(1) / mask.sum(1)).mean()


@right("decoupled(ppo_clip)")
def decoupled_by_exponents(
    log_prob, proximal_log_probs, behavior_log_probs, advantages, mask
):
    """Return PPO's loss clipped around a proximal policy, times the ratio of that to
    the behavior policy.
    """
    d = torch.where(mask, proximal_log_probs - behavior_log_probs, 0)
    return (
        -(d.exp() * clipped(mask, log_prob, proximal_log_probs, advantages, 1.2)).sum()
        / mask.sum()
    )
