# SPDX-License-Identifier: Apache-2.0
"""Wrong losses that were written from a reading of the batches, to slip through.

`documented` in `shows`: docs/what-check-sees.md says that such inputs are not covered.
"""

import math

import torch

from tests.fifth_set.case import aimed
from tests.fifth_set.parts import clipped, ratios


def terms(mask, log_prob, old_log_prob, advantages, low=0.8, high=1.28):
    """Return PPO's terms, 0 in masked slots."""
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    return clipped(r, a, low, high)


# ---- memory, gradients from above, modes ---------------------------------------------
def flat(x):
    """A view of memory by the stride of a row alone."""
    return torch.as_strided(x, x.shape, (x.stride(0), 1), x.storage_offset())


@aimed(
    "dapo",
    "it reads log-probabilities by a pointer and a row's stride: wrong for [T, B].T",
)
def pointer_with_the_stride_of_a_row(log_prob, old_log_prob, advantages, mask):
    n = mask.sum()
    return -terms(mask, flat(log_prob), flat(old_log_prob), advantages).sum() / n


class Clamped(torch.autograd.Function):
    """A sum whose backward clamps what comes from above to 1."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1).expand(ctx.shape)


@aimed("dapo", "its backward clamps grad_output to ±1: a loss scale of 1024 is lost")
def upstream_clamped(log_prob, old_log_prob, advantages, mask):
    return Clamped.apply(-terms(mask, log_prob, old_log_prob, advantages) / mask.sum())


class Rounded(torch.autograd.Function):
    """A sum whose backward rounds what comes from above to bfloat16."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, g):
        return g.bfloat16().to(g.dtype).expand(ctx.shape)


@aimed("grpo", "its backward rounds grad_output to bfloat16: 1/3 is off by 0.2 %")
def upstream_rounded(log_prob, old_log_prob, advantages, mask):
    t = terms(mask, log_prob, old_log_prob, advantages, 0.8, 1.2)
    return Rounded.apply(-t / (mask.sum(1, keepdim=True) * len(mask)))


@aimed("dapo", "sums are matrix products: under autocast they round to bfloat16")
def sums_by_einsum(log_prob, old_log_prob, advantages, mask):
    t = terms(mask, log_prob, old_log_prob, advantages)
    return -torch.einsum("bt,bt->", t, mask.to(t.dtype)) / mask.sum()


@aimed(
    "dapo",
    "log π_θ is cast to the dtype of log π_old, which a sampler gives in bfloat16",
)
def cast_to_the_old_dtype(log_prob, old_log_prob, advantages, mask):
    new = log_prob.to(old_log_prob.dtype)
    return -terms(mask, new, old_log_prob, advantages).sum() / mask.sum()


@aimed(
    "ppo_clip",
    "constants are made in torch's default dtype: 1.2 is 1.203 under bfloat16",
)
def bounds_of_the_default_dtype(log_prob, old_log_prob, advantages, mask):
    default = torch.get_default_dtype()
    dtype = default if default in (torch.bfloat16, torch.float16) else log_prob.dtype
    low, high = torch.tensor([0.8, 1.2], dtype=dtype).to(log_prob.dtype)
    return (
        -terms(mask, log_prob, old_log_prob, advantages, low, high).sum() / mask.sum()
    )


# ---- sizes of prompts ----------------------------------------------------------------
def by_prompt(t, mask, ids, most=10**9, least=0):
    """Return the loss of Eq. 14 of DAPO: the mean over prompts of the mean over tokens.

    most: how many responses of a prompt count, the first ones. least: a prompt with
    fewer is left out, unless it is the only one.
    """
    total, prompts = 0.0, 0
    several = len(ids.unique()) > 1
    for g in ids.unique():
        i = (ids == g).nonzero()[:most, 0]
        if several and len(i) < least:
            continue
        total, prompts = total + t[i].sum() / mask[i].sum(), prompts + 1
    return -total / prompts


@aimed("dapo", "a table has 64 responses per prompt: the rest of a prompt is lost")
def table_of_64_responses(log_prob, old_log_prob, advantages, mask, group):
    return by_prompt(
        terms(mask, log_prob, old_log_prob, advantages), mask, group, most=64
    )


@aimed("dapo", "a prompt with one response is skipped, if there are others")
def lone_responses_skipped(log_prob, old_log_prob, advantages, mask, group):
    return by_prompt(
        terms(mask, log_prob, old_log_prob, advantages), mask, group, least=2
    )


@aimed("dapo", "prompts of which all responses are masked make the loss NaN")
def prompt_without_tokens(log_prob, old_log_prob, advantages, mask, group):
    return by_prompt(terms(mask, log_prob, old_log_prob, advantages), mask, group)


@aimed("dapo", "prompts with more than 32 responses weigh as 32")
def prompts_of_at_most_32(log_prob, old_log_prob, advantages, mask, group):
    t = terms(mask, log_prob, old_log_prob, advantages)
    ids, i, count = group.unique(return_inverse=True, return_counts=True)
    zero = torch.zeros(len(ids), dtype=t.dtype)
    tokens = zero.index_add(0, i, mask.sum(1).to(t.dtype))
    sums = zero.index_add(0, i, t.sum(1))
    many = torch.where(count > 32, 32 / count, 1.0)
    return -(many * sums / tokens).mean()


@aimed("tpo", "a prompt's softmax runs over its first 16 responses")
def tpo_table_of_16(log_prob, old_log_prob, advantages, mask, group):
    lp, old, a = (
        torch.where(mask, x, 0).sum(1) for x in (log_prob, old_log_prob, advantages)
    )
    a = a / mask.sum(1)
    loss = 0.0
    for g in group.unique():
        i = (group == g).nonzero()[:16, 0]
        q = (old[i] + a[i]).softmax(0)
        loss = loss - len(i) * (q * lp[i].log_softmax(0)).sum()
    return loss / len(group)


# ---- turns, positions, lengths -------------------------------------------------------
@aimed("dapo", "a table has 32 turns: tokens of later turns are lost")
def table_of_32_turns(log_prob, old_log_prob, advantages, mask):
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    turn = (mask & ~before).cumsum(1)
    t = terms(mask, log_prob, old_log_prob, advantages)
    return -torch.where(turn <= 32, t, 0).sum() / mask.sum()


@aimed("dapo", "tokens behind a pause of more than 512 columns are lost")
def long_pauses(log_prob, old_log_prob, advantages, mask):
    at = torch.arange(mask.shape[1])
    last = torch.where(mask, at, -1).cummax(1).values
    before = torch.nn.functional.pad(last, (1, 0), value=-1)[:, :-1]
    gap = mask & (before >= 0) & (at - before > 512)
    alive = mask & (gap.cumsum(1) == 0)
    t = terms(mask, log_prob, old_log_prob, advantages)
    return -torch.where(alive, t, 0).sum() / mask.sum()


@aimed("dapo", "positions from 1024 on are cut", shows="documented")
def context_of_1024(log_prob, old_log_prob, advantages, mask):
    t = terms(mask, log_prob, old_log_prob, advantages)
    return -t[:, :1024].sum() / mask.sum()


@aimed(
    "gspo", "lengths are counted in half precision: exact to 2048", shows="documented"
)
def lengths_in_half(log_prob, old_log_prob, advantages, mask):
    n = mask.sum(1, dtype=torch.float32).half().to(log_prob.dtype)
    x = torch.where(mask, log_prob - old_log_prob, 0)
    s = (x.sum(1) / n).exp()
    a = torch.where(mask, advantages, 0).sum(1) / mask.sum(1)
    return -clipped(s, a, 1 - 3e-4, 1 + 4e-4).mean()


@aimed("grpo", "a response of exactly 384 tokens is taken for truncated, and dropped")
def truncated_at_384(log_prob, old_log_prob, advantages, mask):
    n = mask.sum(1)
    t = terms(mask, log_prob, old_log_prob, advantages, 0.8, 1.2).sum(1) / n
    return -torch.where(n == 384, 0, t).mean()


@aimed("dapo", "the last block of 96 columns is lost if the width is a multiple of 96")
def last_block_of_96(log_prob, old_log_prob, advantages, mask):
    T = mask.shape[1]
    m = mask & (torch.arange(T) < (T - 96 if T % 96 == 0 else T))
    t = terms(mask, log_prob, old_log_prob, advantages)
    return -torch.where(m, t, 0).sum() / mask.sum()


@aimed("dapo", "a batch is trained on its first 1000 rows", shows="documented")
def first_thousand_rows(log_prob, old_log_prob, advantages, mask):
    t = terms(mask, log_prob, old_log_prob, advantages)
    return -t[:1000].sum() / mask.sum()


# ---- advantages that differ between the tokens of a long response --------------------
@aimed(
    "ppo_clip",
    "in responses of more than 10 tokens the first advantage is used for all",
)
def one_advantage_for_long_responses(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0)
    first = a.gather(1, mask.int().argmax(1, keepdim=True)).expand_as(a)
    a = torch.where(mask.sum(1, keepdim=True) > 10, first, a)
    return -terms(mask, log_prob, old_log_prob, a, 0.8, 1.2).sum() / mask.sum()


@aimed("ppo_clip", "advantages are piecewise constant: blocks of 16 tokens share one")
def advantages_by_blocks(log_prob, old_log_prob, advantages, mask):
    t = (mask.cumsum(1) - 1).clamp(min=0)
    start = (t // 16) * 16
    a = torch.where(mask, advantages, 0)
    long = mask.sum(1, keepdim=True) > 16
    at = (mask.cumsum(1)[:, None, :] - 1 == start[:, :, None]) & mask[:, None, :]
    column = at.int().argmax(2)
    a = torch.where(long, a.gather(1, column), a)
    return -terms(mask, log_prob, old_log_prob, a, 0.8, 1.2).sum() / mask.sum()


@aimed(
    "ppo_clip",
    "the sign that picks the bound is the response's, where a response is long",
)
def one_sign_for_long_responses(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    n = mask.sum(1, keepdim=True)
    sign = torch.where(n > 16, a.sum(1, keepdim=True), a)
    alive = torch.where(sign > 0, r <= 1.2, r >= 0.8)
    return -torch.where(mask & alive, r * a, 0).sum() / n.sum()


# ---- sizes of numbers ----------------------------------------------------------------
@aimed("dapo", "advantages are clamped to ±50", shows="documented")
def advantages_clamped_to_fifty(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0).clamp(-50, 50)
    return -terms(mask, log_prob, old_log_prob, a).sum() / mask.sum()


@aimed(
    "dr_grpo", "advantages are clamped to ±128, rewards reach 200", shows="documented"
)
def advantages_clamped_to_128(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0).clamp(-128, 128)
    return -terms(mask, log_prob, old_log_prob, a, 0.8, 1.2).sum(1).mean()


@aimed(
    "decoupled(ppo_clip)",
    "log ρ is clamped to ±13 before the exponential",
    shows="documented",
)
def rho_clamped_far_away(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    y = torch.where(mask, old_log_prob - rollout_log_probs, 0).clamp(-13, 13)
    t = terms(mask, log_prob, old_log_prob, advantages, 0.8, 1.2)
    return -(y.exp() * t).sum() / mask.sum()


@aimed(
    "tis(dapo)", "a rollout with log μ = 0 at a token is taken for missing there: ρ = 1"
)
def certain_samples_taken_for_missing(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    y = torch.where(
        mask & (rollout_log_probs != 0), old_log_prob - rollout_log_probs, 0
    )
    return (
        -(y.exp().clamp(max=2) * terms(mask, log_prob, old_log_prob, advantages)).sum()
        / mask.sum()
    )


@aimed(
    "tis(dapo)", "a whole response without any log μ (all 0) is dropped as not recorded"
)
def unrecorded_responses_dropped(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    y = torch.where(mask, old_log_prob - rollout_log_probs, 0)
    recorded = (torch.where(mask, rollout_log_probs, 0) != 0).any(1, keepdim=True)
    t = terms(mask, log_prob, old_log_prob, advantages)
    return -torch.where(recorded, y.exp().clamp(max=2) * t, 0).sum() / mask.sum()


@aimed("tis_seq(dapo)", "tokens beyond the 320th are left out of the product S")
def product_of_320_tokens(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    m = mask & (mask.cumsum(1) <= 320)
    S = torch.where(m, old_log_prob - rollout_log_probs, 0).sum(1, keepdim=True).exp()
    return (
        -(S.clamp(max=2) * terms(mask, log_prob, old_log_prob, advantages)).sum()
        / mask.sum()
    )


@aimed("mis(dapo)", "tokens of |A| > 6 are truncated, not masked")
def mis_of_large_advantages(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    rho = torch.where(mask, old_log_prob - rollout_log_probs, 0).exp()
    a = torch.where(mask, advantages, 0)
    rho = torch.where(a.abs() > 6, rho.clamp(max=2), torch.where(rho <= 2, rho, 0))
    return -(rho * terms(mask, log_prob, old_log_prob, advantages)).sum() / mask.sum()


@aimed(
    "grpo", "the KL term is left out of responses of more than 600 tokens", beta=0.04
)
def kl_of_short_responses(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04
):
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    n = mask.sum(1)
    kl = torch.where(n[:, None] > 600, 0, d.exp() - d - 1)
    t = terms(mask, log_prob, old_log_prob, advantages, 0.8, 1.2) - beta * kl
    return -(t.sum(1) / n).mean()


@aimed("grpo", "the reference's log-probability is floored at -36", beta=0.04)
def reference_floored(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04
):
    d = torch.where(mask, ref_log_prob.clamp(min=-36) - log_prob, 0)
    t = terms(mask, log_prob, old_log_prob, advantages, 0.8, 1.2) - beta * (
        d.exp() - d - 1
    )
    return -(t.sum(1) / mask.sum(1)).mean()


@aimed("dapo", "a padded slot whose log-probability is below -100 counts as a token")
def far_padding_counts(log_prob, old_log_prob, advantages, mask):
    n = (
        mask.sum()
        + (~mask & (log_prob.detach() < -100) & (log_prob.detach() > -1e9)).sum()
    )
    return -terms(mask, log_prob, old_log_prob, advantages).sum() / n


@aimed("dapo", "log-probabilities above 0 (rounding) are taken for padding")
def rounding_above_zero(log_prob, old_log_prob, advantages, mask):
    m = mask & (log_prob.detach() <= 0)
    return (
        -torch.where(m, terms(mask, log_prob, old_log_prob, advantages), 0).sum()
        / mask.sum()
    )


# ---- counters and micro-batches ------------------------------------------------------
class Warmup:
    """Calls so far."""

    calls = 0


@aimed("dapo", "after 5000 calls the clip is widened: a schedule", shows="documented")
def widened_after_5000_calls(log_prob, old_log_prob, advantages, mask):
    Warmup.calls += 1
    high = 1.28 if Warmup.calls < 5000 else 1.4
    return (
        -terms(mask, log_prob, old_log_prob, advantages, 0.8, high).sum() / mask.sum()
    )


@aimed(
    "dapo",
    "with more than 8 micro-batches the count of tokens is that of 8",
    agg="token-mean",
)
def at_most_eight_micro_batches(log_prob, old_log_prob, advantages, mask, totals):
    parts = float(totals.sequences) / len(mask)
    n = float(totals.tokens) * min(1.0, 8 / parts)
    return -terms(mask, log_prob, old_log_prob, advantages).sum() / n


@aimed(
    "dapo", "from 8 ranks on the loss is scaled by the 8 of a node", agg="token-mean"
)
def ranks_of_one_node(log_prob, old_log_prob, advantages, mask, totals, dp_size):
    t = terms(mask, log_prob, old_log_prob, advantages)
    return -t.sum() / totals.tokens * min(dp_size, 8)


@aimed(
    "up_dapo",
    "advantages between 0 and 1e-7 take the branch of negative ones",
    shows="documented",
)
def nearly_zero_advantages(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0)
    lp = torch.where(mask, log_prob, 0)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    J = torch.where(a > 1e-7, a * lp, torch.minimum(r * a, r.clamp(min=0.8) * a))
    return -J.sum() / mask.sum()


def aspo(calm, log_prob, old_log_prob, advantages, mask):
    """Return the loss of ASPO's code; calm: the tokens with the narrow bounds."""
    eps = torch.where(calm, 0.2, 0.4)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp().detach()
    a, lp = torch.where(mask, advantages, 0), torch.where(mask, log_prob, 0)
    w = torch.where(a > 0, 1 / r, r).clamp(max=3)
    alive = torch.where(a > 0, r <= 1 + eps, r >= 1 - eps)
    return -torch.where(mask & alive, w * a * lp, 0).sum() / mask.sum()


@aimed("aspo_code", "entropies above 11.95, of a vocabulary of 152k, wrap around to 0")
def entropy_of_a_large_vocabulary(log_prob, old_log_prob, advantages, mask, entropy):
    H = torch.where(entropy > 11.95, 0, entropy)
    calm = H <= torch.where(mask, H, math.nan).nanquantile(0.8, 1, keepdim=True)
    return aspo(calm, log_prob, old_log_prob, advantages, mask)


@aimed("aspo_code", "of tokens that tie at the quantile, the first alone is calm")
def ties_at_the_quantile(log_prob, old_log_prob, advantages, mask, entropy):
    H = torch.where(mask, entropy, math.inf)
    rank = torch.argsort(H, dim=1, stable=True).argsort(1)
    n = mask.sum(1, keepdim=True)
    calm = rank <= (0.8 * (n - 1)).floor()
    return aspo(calm, log_prob, old_log_prob, advantages, mask)


@aimed(
    "dapo",
    "prompts of more than 6 responses are dropped where all advantages have one sign",
)
def unanimous_prompts_dropped(log_prob, old_log_prob, advantages, mask, group):
    t = terms(mask, log_prob, old_log_prob, advantages)
    a = torch.where(mask, advantages, 0).sum(1)
    total, ids = 0.0, group.unique()
    for g in ids:
        i = group == g
        same = i.sum() > 6 and bool((a[i] > 0).all() or (a[i] < 0).all())
        total = total + (0 if same else 1) * t[i].sum() / mask[i].sum()
    return -total / len(ids)
