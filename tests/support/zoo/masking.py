# SPDX-License-Identifier: Apache-2.0
"""Slots outside the mask that reach the loss or its gradient, and slots inside it that
do not.
"""

import torch

from . import Case


def mask_never_read(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's terms averaged over all slots."""
    ratio = torch.exp(log_prob - old_log_prob)
    return -torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    ).mean()


def denominator_only(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's terms of all slots, divided by the number of tokens."""
    ratio = torch.exp(log_prob - old_log_prob)
    return (
        -torch.min(
            ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
        ).sum()
        / mask.sum()
    )


def shifted_by_one(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    shifted = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    return -torch.where(shifted, terms, 0.0).sum() / mask.sum()


def inverted(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return PPO's loss with log r set to 0 inside the mask, in place of outside."""
    # the polarity of attention masks
    log_ratio = (log_prob - old_log_prob).masked_fill(mask, 0)
    ratio = log_ratio.exp()
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -terms[mask].mean()


def advantage_averaged_over_padding(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO's loss with each advantage averaged over all columns."""
    log_ratio = torch.where(mask, log_prob - old_log_prob, 0.0)
    s = (log_ratio.sum(-1) / mask.sum(-1)).exp()
    A = advantages.masked_fill(~mask, 0).mean(-1)
    return -torch.min(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).mean()


def nonzero_advantage_is_the_mask(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2
):
    """Return UP-DAPO's loss over the tokens with an advantage other than 0."""
    response = mask & (advantages != 0)
    ratio = torch.exp(log_prob - old_log_prob)
    negative = torch.min(ratio * advantages, ratio.clamp(min=1 - eps_low) * advantages)
    return -torch.where(advantages > 0, advantages * log_prob, negative)[
        response
    ].mean()


def zero_log_prob_is_padding(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss over the slots whose old log-probability is not 0, whatever
    the mask.
    """
    real = old_log_prob != 0  # the engine pads its log-probabilities with zeros
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    return -terms[real].sum() / real.sum()


def last_column_lost(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss without the last column, divided by all tokens."""
    lp, old, A, inside = (x[:, :-1] for x in (log_prob, old_log_prob, advantages, mask))
    ratio = torch.exp(lp - old)
    terms = torch.min(ratio * A, ratio.clamp(1 - eps_low, 1 + eps_high) * A)
    return -terms[inside].sum() / mask.sum()


def mask_is_a_prefix(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss over as many slots from the left as the response has tokens."""
    lengths = mask.sum(-1)
    inside = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    return -terms[inside].sum() / lengths.sum()


def until_the_last_token(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss over all slots up to each response's last token, holes
    included.
    """
    total = log_prob.new_zeros(())
    for lp, old, A, inside in zip(
        log_prob, old_log_prob, advantages, mask, strict=True
    ):
        end = int(inside.nonzero().max()) + 1  # tool output between two turns is inside
        ratio = torch.exp(lp[:end] - old[:end])
        total = (
            total
            + torch.min(ratio * A[:end], ratio.clamp(1 - eps, 1 + eps) * A[:end]).mean()
        )
    return -total / len(mask)


def padding_in_the_batch_mean(log_prob, old_log_prob, advantages, mask):
    baseline = advantages.nan_to_num().mean()  # padding is zero there, they say
    return -((advantages - baseline) * log_prob)[mask].mean()


def padding_reported(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss plus a detached term that holds what masked slots hold."""
    log_ratio = (log_prob - old_log_prob)[mask]
    ratio, A = log_ratio.exp(), advantages[mask]
    loss = -torch.min(ratio * A, ratio.clamp(1 - eps_low, 1 + eps_high) * A).mean()
    # so that the logged loss shows the KL
    return loss + 1e-3 * (old_log_prob - log_prob).mean().detach()


ZOO = [
    Case(
        mask_never_read, "dapo", oracles={"masked-values", "padding", "gradient", "aggregation"},
        why="the mask is an ornament",
    ),
    Case(
        denominator_only, "dapo", oracles={"masked-values", "padding", "gradient"},
        why="padding is summed, tokens counted",
    ),
    Case(
        shifted_by_one, "dapo", oracles={"gradient", "padding", "masked-values"},
        why="the mask of the inputs on the log-probabilities of the targets", source="CarperAI/trlx#582",
    ),
    Case(inverted, "ppo_clip", oracles={"gradient"}, why="masked_fill(mask): the ratio of every real token is 1"),
    Case(
        advantage_averaged_over_padding, "gspo", oracles={"gradient", "padding", "on-policy", "aggregation"},
        why="the response's advantage is a mean over the padded width", source="areal-project/AReaL#1346",
    ),
    Case(
        nonzero_advantage_is_the_mask, "up_dapo", oracles={"gradient", "aggregation"},
        why="tokens with A = 0 are taken for padding",
    ),
    Case(
        zero_log_prob_is_padding, "dapo", oracles={"masked-values", "padding", "gradient", "aggregation"},
        why="padding is recognized by a log-probability of 0",
    ),
    Case(
        last_column_lost, "dapo", oracles={"gradient", "padding", "aggregation"},
        why="the last token of the longest responses is dropped",
    ),
    Case(
        mask_is_a_prefix, "dapo", oracles={"gradient", "padding", "masked-values", "aggregation"},
        why="only the length of the mask is used: wrong with left padding or tool output in the middle",
    ),
    Case(
        until_the_last_token, "grpo", oracles={"gradient", "padding", "masked-values", "aggregation"},
        why="masked spans between turns are trained on",
    ),
    Case(
        padding_in_the_batch_mean, "reinforce_off_policy",
        oracles={"gradient", "padding", "masked-values", "micro-batches", "aggregation", "on-policy"},
        why="a baseline averaged over padding",
    ),
    Case(
        padding_reported, "dapo", oracles={"masked-values", "value", "padding"},
        why="the gradient is right, but the value reads masked slots",
    ),
]  # fmt: skip
