# SPDX-License-Identifier: Apache-2.0
"""Rejected and selected tokens, and three divisors: twenty wrong losses, ten right."""

import torch

from tests.second_person.case import right, wrong

ICEPOP = {"is_min": 0.5, "is_max": 2.0}


def dapo_terms(log_probs, old_log_probs, advantages, mask, low=0.2, high=0.28):
    r = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).exp()
    A = torch.where(mask.bool(), advantages, 0.0)
    return torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)


def engine_ratio(old_log_probs, rollout_log_probs, mask):
    gap = torch.where(mask.bool(), old_log_probs - rollout_log_probs, 0.0)
    return gap.detach().exp()


def popped(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    """Return the terms of IcePop on DAPO, and what is kept."""
    rho = engine_ratio(old_log_probs, rollout_log_probs, mask)
    keep = ((rho >= 0.5) & (rho <= 2.0) & mask.bool()).to(log_probs.dtype)
    terms = dapo_terms(log_probs, old_log_probs, advantages, mask)
    return terms * rho * keep, keep


def threshold(entropies, mask, quantile=0.8):
    return torch.quantile(entropies[mask.bool()], quantile)


# ---- wrong: divisors -----------------------------------------------------------------
@wrong(
    "icepop(dapo)",
    "rejected tokens stay in the divisor",
    "all trained tokens|token-mean",
    agg="kept-mean",
    **ICEPOP,
)
def divided_by_all(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    J, _ = popped(
        log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
    )
    return -J.sum() / response_mask.sum()


@wrong(
    "icepop(dapo)",
    "rejected tokens are not counted",
    "kept-mean",
    agg="token-mean",
    **ICEPOP,
)
def divided_by_kept(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    J, keep = popped(
        log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
    )
    return -J.sum() / keep.sum().clamp(min=1)


@wrong(
    "icepop(dapo)",
    "it divides by the sum of the weights, not by the number of tokens kept",
    "sum of the sampler's weights",
    agg="kept-mean",
    **ICEPOP,
)
def divided_by_sum_of_weights(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    rho = engine_ratio(old_log_probs, rollout_log_probs, response_mask)
    w = rho * ((rho >= 0.5) & (rho <= 2.0) & response_mask.bool())
    J = dapo_terms(log_probs, old_log_probs, advantages, response_mask) * w
    return -J.sum() / w.sum().clamp(min=1e-6)


@wrong(
    "icepop(dapo)",
    "each response is divided by its own kept tokens, then averaged over responses",
    "seq-mean|response",
    agg="kept-mean",
    **ICEPOP,
)
def kept_mean_of_each_response(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    J, keep = popped(
        log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
    )
    return -(J.sum(1) / keep.sum(1).clamp(min=1)).mean()


@wrong(
    "icepop(dapo)",
    "a mean over the padded width of the kept tokens",
    "padded|padding|width|B T|rectangle|all slots",
    agg="token-mean",
    **ICEPOP,
)
def mean_over_the_rectangle(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    J, _ = popped(
        log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
    )
    return -J.mean()


@wrong("dapo", "a mean where a sum is meant", "token-mean|divi", agg="token-sum")
def mean_for_sum(log_probs, old_log_probs, advantages, mask):
    J = dapo_terms(log_probs, old_log_probs, advantages, mask)
    return -J.sum() / mask.sum()


@wrong(
    "dapo",
    "the sum is divided by the number of responses",
    "seq-mean-token-sum|responses",
    agg="token-sum",
)
def sum_over_responses(log_probs, old_log_probs, advantages, mask):
    J = dapo_terms(log_probs, old_log_probs, advantages, mask)
    return -J.sum(1).mean()


@wrong("dapo", "padded slots train", "mask|padding|untrained", agg="token-sum")
def sum_with_padding(log_probs, old_log_probs, advantages, mask):
    r = (log_probs - old_log_probs).exp()
    J = torch.minimum(r * advantages, r.clamp(0.8, 1.28) * advantages)
    return -torch.nan_to_num(J).sum()


# ---- wrong: rejections ---------------------------------------------------------------
@wrong(
    "icepop(dapo)",
    "the ratio is rejected on the other side: old / rollout is taken as rollout / old",
    "1/ρ|inver|μ/π|upside|other way|reciprocal",
    agg="token-mean",
    **ICEPOP,
)
def ratio_upside_down(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    rho = engine_ratio(rollout_log_probs, old_log_probs, response_mask)
    keep = (rho >= 0.5) & (rho <= 2.0) & response_mask.bool()
    J = dapo_terms(log_probs, old_log_probs, advantages, response_mask)
    return -(J * rho * keep).sum() / response_mask.sum()


@wrong(
    "icepop(dapo)",
    "kept tokens have the weight 1, not the ratio",
    "weight|ratio|ρ|mask",
    agg="token-mean",
    **ICEPOP,
)
def kept_without_weight(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    rho = engine_ratio(old_log_probs, rollout_log_probs, response_mask)
    keep = (rho >= 0.5) & (rho <= 2.0) & response_mask.bool()
    J = dapo_terms(log_probs, old_log_probs, advantages, response_mask)
    return -(J * keep).sum() / response_mask.sum()


@wrong(
    "icepop(dapo)",
    "ratios are clamped to the bounds, not rejected",
    "at least 0.5, at most 2",
    agg="token-mean",
    **ICEPOP,
)
def clamped_not_rejected(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    rho = engine_ratio(old_log_probs, rollout_log_probs, response_mask)
    w = rho.clamp(0.5, 2.0)
    J = dapo_terms(log_probs, old_log_probs, advantages, response_mask)
    return -(J * w * response_mask).sum() / response_mask.sum()


@wrong(
    "icepop(dapo)",
    "the ratio is of the current policy to the engine, not of the old one",
    "π_θ|current|now|new|log_prob|old",
    agg="token-mean",
    **ICEPOP,
)
def ratio_of_current_policy(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    rho = engine_ratio(log_probs, rollout_log_probs, response_mask)
    keep = (rho >= 0.5) & (rho <= 2.0) & response_mask.bool()
    J = dapo_terms(log_probs, old_log_probs, advantages, response_mask)
    return -(J * rho * keep).sum() / response_mask.sum()


@wrong(
    "icepop(dapo)",
    "the lower bound is missing",
    "ρ, 0 above 2$",
    agg="kept-mean",
    **ICEPOP,
)
def no_lower_bound(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    rho = engine_ratio(old_log_probs, rollout_log_probs, response_mask)
    keep = (rho <= 2.0) & response_mask.bool()
    J = dapo_terms(log_probs, old_log_probs, advantages, response_mask)
    return -(J * rho * keep).sum() / keep.sum().clamp(min=1)


@wrong(
    "seq_mask(dapo)",
    "a response is dropped if one of its tokens is outside, not by their mean",
    "one of its tokens",
    agg="token-mean",
    is_min=0.8,
    is_max=1.25,
)
def dropped_by_one_token(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    rho = engine_ratio(old_log_probs, rollout_log_probs, response_mask)
    fine = ((rho >= 0.8) & (rho <= 1.25)) | ~response_mask.bool()
    keep = fine.all(1, keepdim=True) & response_mask.bool()
    J = dapo_terms(log_probs, old_log_probs, advantages, response_mask)
    return -(J * keep).sum() / response_mask.sum()


# ---- wrong: entropy ------------------------------------------------------------------
@wrong(
    "top_entropy(dapo)",
    "the tokens of low entropy train",
    "low|other side|below|smallest",
    agg="kept-mean",
)
def low_entropy_trains(
    logps, old_logps, advantages, completion_mask, entropies, eps_low=0.2, eps_high=0.28
):
    J = dapo_terms(logps, old_logps, advantages, completion_mask, eps_low, eps_high)
    low = (entropies <= threshold(entropies, completion_mask, 0.2)) & (
        completion_mask.bool()
    )
    return -(J * low).sum() / low.sum()


@wrong(
    "top_entropy(dapo)",
    "the quantile is over padding too",
    "padding|untrained|all slots|mask",
    agg="kept-mean",
)
def quantile_with_padding(logps, old_logps, advantages, completion_mask, entropies):
    J = dapo_terms(logps, old_logps, advantages, completion_mask)
    bound = torch.quantile((entropies * completion_mask).flatten(), 0.8)
    top = (entropies >= bound) & completion_mask.bool()
    return -(J * top).sum() / top.sum().clamp(min=1)


@wrong(
    "top_entropy(dapo)",
    "the quantile is of each response, not of the batch",
    "response",
    agg="kept-mean",
)
def quantile_by_response(logps, old_logps, advantages, completion_mask, entropies):
    J = dapo_terms(logps, old_logps, advantages, completion_mask)
    m = completion_mask.bool()
    top = torch.zeros_like(m)
    for i in range(len(m)):
        if m[i].any():
            bound = torch.quantile(entropies[i][m[i]], 0.8)
            top[i] = m[i] & (entropies[i] >= bound)
    return -(J * top).sum() / top.sum()


@wrong(
    "top_entropy(dapo)",
    "the tokens of low entropy stay in the divisor",
    "all trained tokens|token-mean",
    agg="kept-mean",
)
def entropy_divided_by_all(logps, old_logps, advantages, completion_mask, entropies):
    J = dapo_terms(logps, old_logps, advantages, completion_mask)
    m = completion_mask.bool()
    top = m & (entropies >= threshold(entropies, m))
    return -(J * top).sum() / m.sum()


@wrong(
    "top_entropy(dapo)",
    "the top half trains, not the top fifth",
    "quantile|0.5",
    agg="kept-mean",
)
def top_half(logps, old_logps, advantages, completion_mask, entropies):
    J = dapo_terms(logps, old_logps, advantages, completion_mask)
    m = completion_mask.bool()
    top = m & (entropies >= threshold(entropies, m, 0.5))
    return -(J * top).sum() / top.sum()


@wrong(
    "top_entropy(dapo)",
    "entropy weighs the tokens, it does not select them",
    "entrop",
    agg="token-mean",
)
def weighed_by_entropy(logps, old_logps, advantages, completion_mask, entropies):
    J = dapo_terms(logps, old_logps, advantages, completion_mask)
    m = completion_mask.bool()
    w = entropies.detach() / entropies[m].mean()
    return -torch.where(m, J * w, 0.0).sum() / m.sum()


# ---- right ---------------------------------------------------------------------------
@right("icepop(dapo)", agg="kept-mean", **ICEPOP)
def kept_by_indexing(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    """Return IcePop's loss over DAPO of the kept tokens alone, divided by their number."""
    m = response_mask.bool()
    lp, old, mu, A = (
        x[m] for x in (log_probs, old_log_probs, rollout_log_probs, advantages)
    )
    rho = (old - mu).exp()
    keep = (rho >= 0.5) & (rho <= 2.0)
    r = (lp - old).exp()
    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A) * rho
    return -J[keep].sum() / max(int(keep.sum()), 1)


@right("icepop(dapo)", agg="token-mean", **ICEPOP)
def zero_weight_counted(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    """Return IcePop's loss over DAPO, divided by all trained tokens."""
    m = response_mask.to(log_probs.dtype)
    rho = engine_ratio(old_log_probs, rollout_log_probs, response_mask)
    w = torch.where((rho < 0.5) | (rho > 2.0), torch.zeros_like(rho), rho)
    J = dapo_terms(log_probs, old_log_probs, advantages, response_mask)
    return -(J * w * m).sum() / m.sum()


@right("icepop(dapo)", agg="token-sum", **ICEPOP)
def popped_sum(log_probs, old_log_probs, rollout_log_probs, advantages, response_mask):
    J, _ = popped(
        log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
    )
    return -J.sum()


@right("dapo", agg="token-sum")
def tinker_sum(log_probs, old_log_probs, advantages, mask):
    return -dapo_terms(log_probs, old_log_probs, advantages, mask).sum()


@right("top_entropy(dapo)", agg="kept-mean")
def entropy_mask_kept(logps, old_logps, advantages, completion_mask, entropies):
    J = dapo_terms(logps, old_logps, advantages, completion_mask)
    m = completion_mask.bool()
    top = (entropies >= threshold(entropies, m)) & m
    return -(J * top).sum() / top.sum().clamp(min=1.0)


@right("top_entropy(dapo)", agg="token-mean")
def entropy_mask_all(logps, old_logps, advantages, completion_mask, entropies):
    """Return DAPO's loss over the fifth of the tokens with the highest entropies,
    divided by all.
    """
    J = dapo_terms(logps, old_logps, advantages, completion_mask)
    pad = completion_mask.bool()
    flat = entropies[pad].float()
    bound = torch.quantile(flat, 0.8) if flat.numel() else 0.0
    J = J * ((entropies * pad) >= bound)
    return -(J * pad).sum() / pad.sum().clamp(min=1.0)


@right("top_entropy(dapo)", agg="kept-mean")
def entropy_detached(logps, old_logps, advantages, completion_mask, entropies):
    """Return DAPO's loss over the fifth of the tokens with the highest entropies,
    divided by their number.
    """
    with torch.no_grad():
        m = completion_mask.bool()
        values = entropies.masked_fill(~m, -1.0)
        bound = torch.quantile(values[m], 0.8)
        top = (values >= bound).to(logps.dtype)
    per_token = -dapo_terms(logps, old_logps, advantages, completion_mask)
    return (per_token * top).sum() / top.sum()


@right("mis(dapo)", agg="kept-mean", is_max=2.0)
def mis_kept(log_probs, old_log_probs, rollout_log_probs, advantages, response_mask):
    rho = engine_ratio(old_log_probs, rollout_log_probs, response_mask)
    keep = (rho <= 2.0) & response_mask.bool()
    J = dapo_terms(log_probs, old_log_probs, advantages, response_mask)
    return -(J * rho * keep).sum() / keep.sum().clamp(min=1)


@right("seq_mask(dapo)", agg="kept-mean", is_min=0.8, is_max=1.25)
def responses_dropped(
    log_probs, old_log_probs, rollout_log_probs, advantages, response_mask
):
    """Return DAPO's loss over responses whose geometric mean of π_old/μ is in [0.8,
    1.25], divided by their tokens.
    """
    m = response_mask.to(log_probs.dtype)
    gap = torch.where(response_mask.bool(), old_log_probs - rollout_log_probs, 0.0)
    s = (gap.sum(1) / m.sum(1).clamp(min=1)).exp()
    keep = m * ((s >= 0.8) & (s <= 1.25))[:, None]
    J = dapo_terms(log_probs, old_log_probs, advantages, response_mask)
    return -(J * keep).sum() / keep.sum().clamp(min=1)


@right("dapo", agg="token-sum")
def sum_of_python(logprobs, old_logprobs, advantages, mask):
    """Return DAPO's terms summed over all tokens, by a loop over rows."""
    total = logprobs.new_zeros(())
    for lp, old, a, m in zip(
        logprobs, old_logprobs, advantages, mask.bool(), strict=True
    ):
        r = (lp[m] - old[m]).exp()
        total = total - torch.min(r * a[m], r.clamp(0.8, 1.28) * a[m]).sum()
    return total
