# SPDX-License-Identifier: Apache-2.0
"""Losses that reject tokens, with both divisors: RIGHT with the aggregation that each
has, and WRONG with the id of the fault.
"""

import torch


def _ratios(log_probs, old_log_probs, advantages, mask):
    r = torch.where(mask, log_probs - old_log_probs, 0).exp()
    A = torch.where(mask, advantages, 0)
    return torch.minimum(r * A, r.clamp(0.8, 1.28) * A)


def _rho(old_log_probs, rollout_log_probs, mask):
    return torch.where(mask, old_log_probs - rollout_log_probs, 0).exp().detach()


def _icepop(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    rho = _rho(old_log_probs, rollout_log_probs, mask)
    keep = (rho >= 0.5) & (rho <= 5) & mask
    return _ratios(log_probs, old_log_probs, advantages, mask) * rho * keep, keep


def icepop_counted(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    J, _ = _icepop(log_probs, old_log_probs, rollout_log_probs, advantages, mask)
    return -J.sum() / mask.sum()


def icepop_dropped(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    J, keep = _icepop(log_probs, old_log_probs, rollout_log_probs, advantages, mask)
    return -J.sum() / keep.sum().clamp(min=1)


def icepop_by_response(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    J, keep = _icepop(log_probs, old_log_probs, rollout_log_probs, advantages, mask)
    return -(J.sum(1) / keep.sum(1).clamp(min=1)).mean()


def icepop_over_responses(
    log_probs, old_log_probs, rollout_log_probs, advantages, mask
):
    J, keep = _icepop(log_probs, old_log_probs, rollout_log_probs, advantages, mask)
    return -J.sum() / keep.any(1).sum().clamp(min=1)


def icepop_over_padding(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    J, keep = _icepop(log_probs, old_log_probs, rollout_log_probs, advantages, mask)
    return -J.sum() / (keep | ~mask).sum()


def icepop_over_advantages(
    log_probs, old_log_probs, rollout_log_probs, advantages, mask
):
    J, keep = _icepop(log_probs, old_log_probs, rollout_log_probs, advantages, mask)
    return -J.sum() / (keep & (advantages != 0)).sum().clamp(min=1)


def unclipped_counted(log_probs, old_log_probs, advantages, mask):
    r = torch.where(mask, log_probs - old_log_probs, 0).exp()
    A = torch.where(mask, advantages, 0)
    keep = mask & ~((A > 0) & (r > 1.28)) & ~((A < 0) & (r < 0.8))
    return -(r * A * keep).sum() / keep.sum().clamp(min=1)


def icepop_summed(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    J, _ = _icepop(log_probs, old_log_probs, rollout_log_probs, advantages, mask)
    return -J.sum()


def mis_dropped(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    rho = _rho(old_log_probs, rollout_log_probs, mask)
    keep = (rho <= 2) & mask
    J = _ratios(log_probs, old_log_probs, advantages, mask) * rho
    return -J[keep].sum() / max(int(keep.sum()), 1)


def responses_dropped(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    """Return DAPO's loss over responses whose geometric mean of π_old/μ is in [0.8,
    1.25], divided by the tokens of these alone.
    """
    log_rho = torch.where(mask, old_log_probs - rollout_log_probs, 0)
    s = (log_rho.sum(1) / mask.sum(1).clamp(min=1)).exp().detach()
    keep = ((s >= 0.8) & (s <= 1.25))[:, None] & mask
    J = _ratios(log_probs, old_log_probs, advantages, mask)
    return -torch.where(keep, J, 0).sum() / keep.sum().clamp(min=1)


def _top(entropies, mask, quantile=0.8):
    return mask & (entropies >= torch.quantile(entropies[mask], quantile))


def top_counted(log_probs, old_log_probs, advantages, mask, entropies):
    J = _ratios(log_probs, old_log_probs, advantages, mask)
    return -(J * _top(entropies, mask)).sum() / mask.sum()


def top_dropped(log_probs, old_log_probs, advantages, mask, entropies):
    J = _ratios(log_probs, old_log_probs, advantages, mask)
    top = _top(entropies, mask)
    return -(J * top).sum() / top.sum()


def all_train(log_probs, old_log_probs, advantages, mask, entropies):
    return -_ratios(log_probs, old_log_probs, advantages, mask).sum() / mask.sum()


def low_trains(log_probs, old_log_probs, advantages, mask, entropies):
    J = _ratios(log_probs, old_log_probs, advantages, mask)
    low = mask & (entropies <= torch.quantile(entropies[mask], 0.2))
    return -(J * low).sum() / low.sum()


def tis_over_kept(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    rho = _rho(old_log_probs, rollout_log_probs, mask)
    keep = (rho <= 2) & mask
    J = _ratios(log_probs, old_log_probs, advantages, mask) * rho.clamp(max=2)
    return -J.sum() / keep.sum().clamp(min=1)


def fifth_of_tokens(log_probs, old_log_probs, advantages, mask, entropies):
    """Return DAPO's loss over the fifth of the tokens with the highest entropies, where
    a quantile would keep one token more.
    """
    H = entropies.masked_fill(~mask, -torch.inf).flatten()
    top = torch.zeros_like(mask).flatten()
    top[H.topk(max(int(0.2 * int(mask.sum())), 1)).indices] = True
    top = top.view_as(mask) & mask
    J = _ratios(log_probs, old_log_probs, advantages, mask)
    return -(J * top).sum() / top.sum().clamp(min=1)


ICEPOP = "icepop(dapo)"
GEO = {"is_min": 0.8, "is_max": 1.25}
RIGHT = [
    (icepop_counted, ICEPOP, "token-mean", {}),
    (icepop_dropped, ICEPOP, "kept-mean", {}),
    (icepop_summed, ICEPOP, "token-sum", {}),
    (mis_dropped, "mis(dapo)", "kept-mean", {}),
    (responses_dropped, "seq_mask(dapo)", "kept-mean", GEO),
    (top_counted, "top_entropy(dapo)", "token-mean", {}),
    (top_dropped, "top_entropy(dapo)", "kept-mean", {}),
]
# another sum than the objective's, and rejected tokens beside it
OVER_RESPONSES = "divided-by-kept-responses"
OVER_PADDING = "divided-by-kept-tokens-and-padding"
NOT_COUNTED = [
    (icepop_over_responses, ICEPOP, "kept-mean", {}, OVER_RESPONSES),
    (icepop_over_padding, ICEPOP, "kept-mean", {}, OVER_PADDING),
    (
        icepop_over_advantages,
        ICEPOP,
        "kept-mean",
        {},
        "divided-by-tokens-with-advantage",
    ),
    (unclipped_counted, "dapo", "token-mean", {}, "divided-by-unclipped-tokens"),
]
KEPT, ALL = "divided-by-kept-tokens", "divided-by-rejected-tokens-too"
WRONG = [
    (icepop_dropped, ICEPOP, "token-mean", {}, KEPT),
    (icepop_counted, ICEPOP, "kept-mean", {}, ALL),
    (mis_dropped, "mis(dapo)", "token-mean", {}, KEPT),
    (responses_dropped, "seq_mask(dapo)", "token-mean", GEO, KEPT),
    (icepop_by_response, ICEPOP, "seq-mean-token-mean", {}, f"{KEPT}-of-response"),
    (top_dropped, "top_entropy(dapo)", "token-mean", {}, KEPT),
    (top_counted, "top_entropy(dapo)", "kept-mean", {}, ALL),
    (all_train, "top_entropy(dapo)", "token-mean", {}, "low-entropy-trains"),
]
