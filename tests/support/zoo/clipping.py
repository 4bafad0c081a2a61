# SPDX-License-Identifier: Apache-2.0
"""Wrong clips. Wherever a bound stops the wrong thing, on-policy tests see nothing."""

import torch

from . import Case


def sides_swapped(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with eps_low above and eps_high below."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = torch.clamp(ratio, 1 - eps_high, 1 + eps_low)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    return losses[mask].sum() / mask.sum()


def no_minimum(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28):
    ratio = torch.exp(log_prob - old_log_prob).clamp(1 - eps_low, 1 + eps_high)
    return -(ratio * advantages)[mask].mean()


def clamps_the_product(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    surr1 = torch.exp(log_prob - old_log_prob) * advantages
    surr2 = torch.clamp(surr1, 1 - eps, 1 + eps)
    per_token = torch.where(mask, torch.min(surr1, surr2), 0.0)
    return -(per_token.sum(-1) / mask.sum(-1)).mean()


def maximum_of_objectives(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - eps, 1 + eps)
    return torch.minimum(pg_losses1, pg_losses2)[mask].mean()


def dual_clip_on_positives(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28, c=3.0
):
    """Return DAPO's loss whose dual clip acts where A > 0 too."""
    ratio = torch.exp(log_prob - old_log_prob)
    clip1 = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    clip2 = torch.max(clip1, c * advantages)
    return -clip2[mask].mean()


def dual_clip_below_one(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28, c=3.0
):
    """Return DAPO's loss with a dual clip at 1/c in place of c."""
    ratio = torch.exp(log_prob - old_log_prob)
    clip1 = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    floor = advantages / c  # the constant is kept as its reciprocal elsewhere
    return -torch.where(advantages < 0, torch.max(clip1, floor), clip1)[mask].mean()


def dual_clip_wrong_way(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28, c=3.0
):
    """Return DAPO's loss with a maximum for the dual clip of losses, which must be a
    minimum.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    loss = torch.max(
        -advantages * ratio, -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    )
    dual = torch.max(loss, -advantages * c)  # of losses, so it has to be the minimum
    return torch.where(advantages < 0, dual, loss)[mask].mean()


def dual_clip_is_soft(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28, c=3.0
):
    """Return DAPO's loss whose dual clip scales the term and its gradient down, where
    it must stop the gradient.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    scale = torch.where((advantages < 0) & (ratio > c), c / ratio.detach(), 1.0)
    surr = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    return -(scale * surr)[mask].mean()


def log_ratio_in_eps(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss with log r clipped to ±eps in place of r."""
    log_ratio = log_prob - old_log_prob
    ratio, clipped = log_ratio.exp(), log_ratio.clamp(-eps, eps).exp()
    per_token = torch.where(
        mask, torch.min(ratio * advantages, clipped * advantages), 0.0
    )
    return -(per_token.sum(-1) / mask.sum(-1)).mean()


def lower_bound_is_reciprocal(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 / (1 + eps), 1 + eps)
    return -torch.min(ratio * advantages, clipped * advantages)[mask].mean()


def one_eps_for_both_sides(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with eps_low on both sides."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - eps_low, 1 + eps_low)
    return -torch.min(ratio * advantages, clipped * advantages)[mask].mean()


def bounds_are_absolute(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with eps_low itself as the lower bound."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(eps_low, 1 + eps_high)
    return -torch.min(ratio * advantages, clipped * advantages)[mask].mean()


def advantage_outside_the_minimum(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    bounded = torch.minimum(ratio, ratio.clamp(1 - eps, 1 + eps))
    per_token = torch.where(mask, bounded * advantages, 0.0)
    return -(per_token.sum(-1) / mask.sum(-1)).mean()


def outside_the_window_is_dead(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    ratio = torch.exp(log_prob - old_log_prob)
    trusted = (ratio >= 1 - eps_low) & (ratio <= 1 + eps_high)
    return -(ratio * advantages)[mask & trusted].sum() / mask.sum()


def survivors_in_the_denominator(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss divided by the tokens that the clip leaves."""
    ratio = torch.exp(log_prob - old_log_prob)
    dead = ((advantages > 0) & (ratio > 1 + eps_high)) | (
        (advantages < 0) & (ratio < 1 - eps_low)
    )
    alive = mask & ~dead
    return -(ratio * advantages)[alive].sum() / alive.sum().clamp(min=1)


def ratio_upside_down(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return PPO's loss of π_old/π_θ."""
    neglogp, old_neglogp = -log_prob, -old_log_prob
    ratio = torch.exp(neglogp - old_neglogp)
    return -torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)[
        mask
    ].mean()


def upper_clip_forgotten(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss without the upper bound."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(min=1 - eps_low)
    return -torch.min(ratio * advantages, clipped * advantages)[mask].mean()


ZOO = [
    Case(sides_swapped, "dapo", oracles={"gradient"}, why="eps_low and eps_high change places"),
    Case(no_minimum, "dapo", oracles={"gradient"}, why="the clipped ratio alone, without the pessimistic minimum"),
    Case(
        clamps_the_product, "grpo", oracles={"gradient", "on-policy"},
        why="r A is clamped to 1 ± eps instead of r", source="alexis-jacq/Pytorch-DPPO#3",
    ),
    Case(maximum_of_objectives, "ppo_clip", oracles={"gradient"}, why="the minimum of two losses: the optimistic side"),
    Case(
        dual_clip_on_positives, "dapo", {"c": 3.0}, {"gradient", "on-policy"},
        "max(., c A) also where A > 0, which is constant there", "thu-ml/tianshou#433",
    ),
    Case(
        dual_clip_below_one, "dapo", {"c": 3.0}, {"gradient", "on-policy"},
        "a dual-clip constant below 1 kills on-policy negatives", "opendilab/PPOxFamily#95",
    ),
    Case(
        dual_clip_wrong_way, "dapo", {"c": 3.0}, {"gradient", "on-policy"},
        "dual clip with max where losses need min",
    ),
    Case(dual_clip_is_soft, "dapo", {"c": 3.0}, {"gradient"}, "beyond c the weight is c A instead of 0"),
    Case(log_ratio_in_eps, "grpo", oracles={"gradient"}, why="log r is clipped to ± eps: bounds 0.819 and 1.221"),
    Case(lower_bound_is_reciprocal, "ppo_clip", oracles={"gradient"}, why="the lower bound is 1/(1+eps), not 1-eps"),
    Case(
        one_eps_for_both_sides, "dapo", oracles={"gradient", "dead-hyperparameter"},
        why="eps_high is accepted and never read",
    ),
    Case(bounds_are_absolute, "dapo", oracles={"gradient"}, why="the lower bound is eps_low itself, not 1 - eps_low"),
    Case(
        advantage_outside_the_minimum, "grpo", oracles={"gradient"},
        why="A min(r, clip r): for A < 0 the clip stops the wrong side",
    ),
    Case(
        outside_the_window_is_dead, "dapo", oracles={"gradient"},
        why="tokens outside the window are dropped for both signs", source="natolambert/rlhf-book#290",
    ),
    Case(
        survivors_in_the_denominator, "dapo", oracles={"gradient", "aggregation", "micro-batches"},
        why="clipped tokens leave the denominator too",
    ),
    Case(
        ratio_upside_down, "ppo_clip", oracles={"gradient", "on-policy"},
        why="old over new: signs lost among negative log-probabilities", source="openai/baselines#652",
    ),
    Case(
        upper_clip_forgotten, "dapo", oracles={"gradient", "dead-hyperparameter"},
        why="only the lower bound: positives grow without limit",
    ),
]  # fmt: skip
