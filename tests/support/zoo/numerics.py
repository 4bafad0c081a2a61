# SPDX-License-Identifier: Apache-2.0
"""Guards and precisions that change the objective."""

import torch

from . import Case


def log_ratio_clamped_at_two(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with log r clamped to ±2."""
    ratio = torch.clamp(log_prob - old_log_prob, -2, 2).exp()
    return -torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )[mask].mean()


def ratio_capped_at_ten(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with r at most 10."""
    ratio = torch.exp(log_prob - old_log_prob).clamp(max=10)
    return -torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )[mask].mean()


def guarded_quotient(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = log_prob[mask].exp() / (old_log_prob[mask].exp() + 1e-6)
    A = advantages[mask]
    return -torch.min(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A).mean()


def log_of_probability_plus_eps(log_prob, old_log_prob, advantages, mask):
    return -(advantages * torch.log(log_prob.exp() + 1e-5))[mask].mean()


def half_precision_ratio(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with r computed in float16."""
    ratio = (log_prob.half() - old_log_prob.half()).exp().to(log_prob.dtype)
    return -torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )[mask].mean()


def bfloat16_sequence_ratio(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO's loss with s computed in bfloat16."""
    log_ratio = torch.where(mask, log_prob - old_log_prob, 0.0).bfloat16()
    s = (log_ratio.sum(-1) / mask.sum(-1)).exp()
    A = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1)
    return -torch.min(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).mean()


def integer_advantages(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    A = torch.where(mask, advantages, 0.0).long()
    ratio = torch.exp(log_prob - old_log_prob)
    return -torch.min(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A)[mask].mean()


def integer_mean_length(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss divided by the number of responses times their mean length,
    rounded down.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    mean_length = mask.sum() // len(mask)
    return -terms[mask].sum() / (mean_length * len(mask))


def one_added_to_every_length(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -(torch.where(mask, terms, 0.0).sum(-1) / (mask.sum(-1) + 1)).mean()


def first_order_ratio(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = 1 + (log_prob - old_log_prob)
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -(torch.where(mask, terms, 0.0).sum(-1) / mask.sum(-1)).mean()


def log_prob_floor(log_prob, old_log_prob, advantages, mask):
    return -(advantages * log_prob.clamp(min=-5))[mask].mean()


ZOO = [
    Case(
        log_ratio_clamped_at_two, "dapo", oracles={"gradient", "extremes"},
        why="the guard meant for e^20 stands at e^2: negatives beyond it have no gradient",
    ),
    Case(
        ratio_capped_at_ten, "dapo", oracles={"gradient", "extremes"}, why="an undeclared dual clip with c = 10"
    ),
    Case(
        guarded_quotient, "ppo_clip", oracles={"gradient", "extremes", "on-policy"},
        why="1e-6 added to a probability: rare tokens lose their gradient",
    ),
    Case(
        log_of_probability_plus_eps, "reinforce_off_policy", oracles={"gradient", "extremes", "on-policy"},
        why="log(π + 1e-5): the rarest tokens are the ones that vanish",
    ),
    Case(half_precision_ratio, "dapo", oracles={"gradient", "extremes", "on-policy"}, why="log-probabilities in fp16"),
    Case(
        bfloat16_sequence_ratio, "gspo", oracles={"gradient", "extremes"},
        why="bf16 cannot tell 1 + 4e-4 from 1: the clip window has no inside",
    ),
    Case(integer_advantages, "ppo_clip", oracles={"gradient", "scaling", "on-policy"}, why="A = 0.5 becomes 0"),
    Case(integer_mean_length, "dapo", oracles={"aggregation", "gradient"}, why="the mean length is rounded down"),
    Case(
        one_added_to_every_length, "grpo", oracles={"aggregation", "gradient", "on-policy"},
        why="|o| + 1 in the denominator",
    ),
    Case(first_order_ratio, "grpo", oracles={"gradient"}, why="r is linearised: 1 + log r"),
    Case(
        log_prob_floor, "reinforce_off_policy", oracles={"gradient", "extremes", "on-policy"},
        why="log π floored at -5",
    ),
]  # fmt: skip
