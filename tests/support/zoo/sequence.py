# SPDX-License-Identifier: Apache-2.0
"""One ratio per response, got wrong: its mean, its shape, or the place of the
stop-gradient.
"""

import torch

from . import Case


def product_of_ratios(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    s = torch.where(mask, log_prob - old_log_prob, 0.0).sum(-1).exp()
    A = advantages[mask.cumsum(-1).eq(1) & mask]
    return -torch.min(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).mean()


def mean_over_the_width(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO's loss with log r averaged over all columns."""
    s = torch.where(mask, log_prob - old_log_prob, 0.0).mean(-1, keepdim=True).exp()
    loss = -torch.min(s * advantages, s.clamp(1 - eps_low, 1 + eps_high) * advantages)
    return (torch.where(mask, loss, 0.0).sum(-1) / mask.sum(-1)).mean()


def tokens_are_clipped(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GRPO's loss with GSPO's bounds: each token has its own ratio."""
    ratio = torch.exp(log_prob - old_log_prob)
    loss = -torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    return (torch.where(mask, loss, 0.0).sum(-1) / mask.sum(-1)).mean()


def weighted_by_length(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO's loss averaged over tokens, so that long responses count more."""
    lengths = mask.sum(-1, keepdim=True)
    s = (
        torch.where(mask, log_prob - old_log_prob, 0.0).sum(-1, keepdim=True) / lengths
    ).exp()
    per_token_loss = -torch.min(
        s * advantages, s.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    return torch.where(mask, per_token_loss, 0.0).sum() / mask.sum()


def summed_over_tokens(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    s = (
        torch.where(mask, log_prob - old_log_prob, 0.0).sum(-1, keepdim=True)
        / mask.sum(-1, keepdim=True)
    ).exp()
    loss = -torch.min(s * advantages, s.clamp(1 - eps_low, 1 + eps_high) * advantages)
    return torch.where(mask, loss, 0.0).sum(-1).mean()


def outer_product(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO's loss of s [B] and A [B, 1], whose product is [B, B]."""
    # [B]
    s = (torch.where(mask, log_prob - old_log_prob, 0.0).sum(-1) / mask.sum(-1)).exp()
    # [B, 1]
    A = torch.where(mask, advantages, 0.0).sum(-1, keepdim=True) / mask.sum(
        -1, keepdim=True
    )
    return -torch.min(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).mean()  # [B, B]


def arithmetic_mean(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO's loss with the mean of r in place of its geometric mean."""
    ratio = torch.where(mask, log_prob - old_log_prob, 0.0).exp()
    s = torch.where(mask, ratio, 0.0).sum(-1) / mask.sum(-1)
    A = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1)
    return -torch.min(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).mean()


def token_variant_anchored_on_old(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO-token's loss with r of each token as one more factor."""
    log_ratio = torch.where(mask, log_prob - old_log_prob, 0.0)
    s = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).exp()
    token = s.detach() * log_ratio.exp()  # should be log_prob - log_prob.detach()
    dead = ((advantages > 0) & (s > 1 + eps_high)) | (
        (advantages < 0) & (s < 1 - eps_low)
    )
    terms = torch.where(mask & ~dead, token * advantages, 0.0)
    return -(terms.sum(-1) / mask.sum(-1)).mean()


def token_variant_clips_tokens(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO-token's loss, masked where a token's own ratio is outside of the
    bounds.
    """
    log_ratio = torch.where(mask, log_prob - old_log_prob, 0.0)
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    token = log_ratio.exp()
    s = mean.exp().detach() * token / token.detach()
    inside = (token >= 1 - eps_low) & (token <= 1 + eps_high)
    terms = torch.where(mask & inside, s * advantages, 0.0)
    return -(terms.sum(-1) / mask.sum(-1)).mean()


def centered_over_the_batch(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO's loss with the batch's mean of each column subtracted from log r."""
    log_ratio = log_prob - old_log_prob
    stable = log_ratio - log_ratio.mean(dim=0, keepdim=True)
    s = (
        torch.where(mask, stable, 0.0).sum(-1, keepdim=True)
        / mask.sum(-1, keepdim=True)
    ).exp()
    loss = -torch.min(s * advantages, s.clamp(1 - eps_low, 1 + eps_high) * advantages)
    return (torch.where(mask, loss, 0.0).sum(-1) / mask.sum(-1)).mean()


def sum_for_positives(log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4):
    """Return UP-GSPO's loss with the sum over tokens in place of the mean for good
    responses.
    """
    lp, old = (
        torch.where(mask, log_prob, 0.0).sum(-1),
        torch.where(mask, old_log_prob, 0.0).sum(-1),
    )
    A = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1)
    s = ((lp - old) / mask.sum(-1)).exp()
    return -torch.where(
        A > 0, A * lp, torch.min(s * A, s.clamp(min=1 - eps_low) * A)
    ).mean()


def clip_of_dapo(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return GSPO's loss with DAPO's bounds by default."""
    s = (torch.where(mask, log_prob - old_log_prob, 0.0).sum(-1) / mask.sum(-1)).exp()
    A = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1)
    return -torch.min(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).mean()


ZOO = [
    Case(
        product_of_ratios, "gspo", oracles={"gradient", "on-policy"},
        why="the product of ratios, not its |o|-th root", source="huggingface/trl#5814",
    ),
    Case(
        mean_over_the_width, "gspo", oracles={"gradient", "padding", "on-policy", "aggregation"},
        why="log r averaged over the padded width",
    ),
    Case(tokens_are_clipped, "gspo", oracles={"gradient"}, why="the token ratio is clipped: GRPO with GSPO's bounds"),
    Case(
        weighted_by_length, "gspo", oracles={"gradient", "aggregation"},
        why="a [B, 1] term broadcast over tokens, then a token mean", source="huggingface/trl#3823",
    ),
    Case(
        summed_over_tokens, "gspo", oracles={"gradient", "aggregation", "on-policy"},
        why="seq-mean-token-sum multiplies by the length", source="alibaba/ROLL#165",
    ),
    Case(
        outer_product, "gspo", oracles={"gradient", "micro-batches", "on-policy"},
        why="[B] times [B, 1] is [B, B]: every ratio meets every advantage",
    ),
    Case(arithmetic_mean, "gspo", oracles={"gradient"}, why="the arithmetic mean of the token ratios"),
    Case(token_variant_anchored_on_old, "gspo", oracles={"gradient", "stop-gradient"}, why="GSPO-token: weight s r_t"),
    Case(
        token_variant_clips_tokens, "gspo", oracles={"gradient"},
        why="the sequence ratio is used, the token ratio clipped",
    ),
    Case(
        centered_over_the_batch, "gspo", oracles={"gradient", "masked-values", "micro-batches", "on-policy"},
        why="log-ratios are centered over the batch, padding included", source="MakazhanAlpamys/Soup#723",
    ),
    Case(sum_for_positives, "up_gspo", oracles={"gradient", "on-policy"}, why="A Σ log π where the mean is meant"),
    Case(
        clip_of_dapo, "gspo", oracles={"gradient"},
        why="defaults of the token ratio left in place: the clip never acts",
    ),
]  # fmt: skip
