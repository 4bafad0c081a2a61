# SPDX-License-Identifier: Apache-2.0
"""Right terms, wrong mean. With responses of equal length most of these are invisible."""

import torch

from . import Case


def mean_of_response_means(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    ).masked_fill(~mask, 0)
    return -(terms.sum(1) / mask.sum(1)).mean()


def mean_of_all_tokens(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -torch.masked_select(terms, mask).mean()


def mean_over_padded_width(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -terms.masked_fill(~mask, 0).mean(dim=1).mean()


def mean_over_the_rectangle(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, c=None
):
    """Return UP-DAPO's terms averaged over all slots, masked ones included."""
    ratio = torch.exp(log_prob - old_log_prob)
    ratio = (
        ratio if c is None else torch.where(advantages < 0, ratio.clamp(max=c), ratio)
    )
    negative = torch.min(ratio * advantages, ratio.clamp(min=1 - eps_low) * advantages)
    return -torch.where(
        mask, torch.where(advantages > 0, advantages * log_prob, negative), 0
    ).mean()


def plain_sum(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28):
    """Return DAPO's terms summed over tokens, without a denominator."""
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    return -terms[mask].sum()


def empty_rows_count_a_token(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    tokens = mask.sum(dim=-1).clamp_min(1).sum()
    return -terms.masked_fill(~mask, 0).sum() / tokens


def normalised_twice(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's means of responses, summed and divided by the number of tokens."""
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages
    ).masked_fill(~mask, 0)
    per_response = terms.sum(-1) / mask.sum(-1)
    return -per_response.sum() / mask.sum()


def token_level_in_name_only(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's terms divided by the number of responses, taken for that of tokens."""
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    # [B], so numel() counts responses
    policy_loss = -terms.masked_fill(~mask, 0).sum(-1)
    return policy_loss.sum() / max(policy_loss.numel(), 1)


def length_is_the_padded_width(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss with the number of columns in place of each length."""
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages
    ).masked_fill(~mask, 0)
    return -(terms.sum(-1) / mask.shape[-1]).mean()


def dr_grpo_keeps_the_length(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss where Dr. GRPO's was meant: each response is divided by its
    length.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages
    ).masked_fill(~mask, 0)
    return -(terms.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def sum_of_group_means(log_prob, old_log_prob, advantages, mask, group, *, eps_low=0.2):
    """Return UP-DAPO's means of prompts, summed, not averaged."""
    ratio = torch.exp(log_prob - old_log_prob)
    negative = torch.min(ratio * advantages, ratio.clamp(min=1 - eps_low) * advantages)
    terms = torch.where(advantages > 0, advantages * log_prob, negative)
    loss = log_prob.new_zeros(())
    for g in group.unique():
        rows = group == g
        loss = loss - terms[rows][mask[rows]].mean()
    return loss


def groups_by_stride(
    log_prob, old_log_prob, advantages, mask, group, *, eps_low=0.2, eps_high=0.28
):
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    ).masked_fill(~mask, 0)
    # the sampler yields the same number for every prompt
    num_generations = -(-len(mask) // len(group.unique()))
    means = [
        rows.sum() / inside.sum()
        for rows, inside in zip(
            terms.split(num_generations), mask.split(num_generations), strict=True
        )
    ]
    return -torch.stack(means).mean()


def divided_again_by_accumulation(
    log_prob,
    old_log_prob,
    advantages,
    mask,
    *,
    eps_low=0.2,
    eps_high=0.28,
    gradient_accumulation_steps=4,
):
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    return -terms[mask].sum() / mask.sum() / gradient_accumulation_steps


def longest_response_as_unit(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return PPO's terms divided by the number of responses times the longest length."""
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages
    ).masked_fill(~mask, 0)
    return -terms.sum() / (len(mask) * mask.sum(-1).max())


def first_length_for_all(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss with the first response's length in place of each."""
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages
    ).masked_fill(~mask, 0)
    return -(terms.sum(-1) / mask[0].sum()).mean()


def mean_over_live_responses(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss averaged over the responses that have an advantage other than
    0.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages
    ).masked_fill(~mask, 0)
    # a zero-variance group teaches nothing: leave it out
    live = (advantages.masked_fill(~mask, 0) != 0).any(-1)
    return -(terms.sum(-1) / mask.sum(-1))[live].sum() / live.sum().clamp(min=1)


ZOO = [
    Case(
        mean_of_response_means, "dapo", oracles={"aggregation", "gradient"},
        why="the response mean of GRPO under DAPO's name", source="verl-project/verl#957",
    ),
    Case(
        mean_of_all_tokens, "grpo", oracles={"aggregation", "gradient"},
        why="the token mean of DAPO under GRPO's name", source="verl-project/verl#593",
    ),
    Case(
        mean_over_padded_width, "grpo", oracles={"aggregation", "padding", "gradient"},
        why="a response is averaged over the padded width",
    ),
    Case(
        mean_over_the_rectangle, "up_dapo", oracles={"aggregation", "padding", "gradient"},
        why="masked terms are zero, but they are counted",
    ),
    Case(plain_sum, "dapo", oracles={"aggregation", "gradient"}, why="no denominator: the step grows with the batch"),
    Case(
        empty_rows_count_a_token, "dapo", oracles={"aggregation", "padding", "micro-batches"},
        why="a fully masked row adds one token to the denominator", source="radixark/miles#2796",
    ),
    Case(normalised_twice, "grpo", oracles={"aggregation", "gradient"}, why="by the response's tokens, then by all"),
    Case(
        token_level_in_name_only, "dapo", oracles={"aggregation", "gradient"},
        why="numel() of per-response sums counts responses", source="akaszubski/autonomous-dev#413",
    ),
    Case(
        length_is_the_padded_width, "dr_grpo", oracles={"aggregation", "padding", "gradient"},
        why="the constant length is this batch's width",
    ),
    Case(
        dr_grpo_keeps_the_length, "dr_grpo", oracles={"aggregation", "gradient"},
        why="only the standard deviation was removed, 1/|o| stayed",
    ),
    Case(sum_of_group_means, "up_dapo", oracles={"aggregation", "gradient"}, why="never divided by the prompts"),
    Case(
        groups_by_stride, "dapo", oracles={"aggregation", "gradient", "permutation"},
        why="groups are taken to be contiguous and of equal size", source="areal-project/AReaL#1419",
    ),
    Case(
        divided_again_by_accumulation, "dapo", oracles={"aggregation", "gradient"},
        why="a global token mean divided once more by the accumulation steps", source="modelscope/ms-swift#10117",
    ),
    Case(
        longest_response_as_unit, "grpo", oracles={"aggregation", "micro-batches", "gradient"},
        why="every response is divided by the longest one of the batch",
    ),
    Case(
        first_length_for_all, "grpo", oracles={"aggregation", "permutation", "gradient"},
        why="the first response's length divides all",
    ),
    Case(
        mean_over_live_responses, "grpo", oracles={"aggregation", "micro-batches", "gradient"},
        why="responses with A = 0 leave the denominator",
    ),
]  # fmt: skip
