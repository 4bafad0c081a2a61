# SPDX-License-Identifier: Apache-2.0
"""Losses that are not functions of their arguments alone, or not of all of them."""

import torch

from . import Case


def fills_advantages_in_place(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss, and set the caller's masked advantages to 0."""
    advantages.masked_fill_(~mask, 0)
    ratio = torch.exp((log_prob - old_log_prob).masked_fill(~mask, 0))
    return (
        -torch.min(
            ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
        ).sum()
        / mask.sum()
    )


def clamps_old_in_place(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss, and clamp the caller's old log-probabilities at -700."""
    old_log_prob.clamp_(min=-700)
    ratio = torch.exp(log_prob - old_log_prob)
    return -torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )[mask].mean()


def scales_advantages_in_place(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss, and divide the caller's advantages by the lengths."""
    # right the first time, wrong in the second epoch
    advantages /= mask.sum(-1, keepdim=True)
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -torch.where(mask, terms, 0.0).sum(-1).mean()


def drops_tokens_at_random(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2):
    """Return UP-DAPO's loss over nine in ten tokens, chosen at random."""
    keep = mask & (torch.rand(mask.shape) < 0.9)
    ratio = torch.exp(log_prob - old_log_prob)
    negative = torch.min(ratio * advantages, ratio.clamp(min=1 - eps_low) * advantages)
    return -torch.where(advantages > 0, advantages * log_prob, negative)[keep].sum() / (
        0.9 * mask.sum()
    )


_seen = [1.0]


def remembers_the_last_batch(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    A = advantages / _seen[-1]
    _seen.append(0.9 * _seen[-1] + 0.1 * advantages[mask].abs().mean().item())
    ratio = torch.exp(log_prob - old_log_prob)
    return -torch.min(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A)[mask].mean()


def swallows_the_dual_clip(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28, **kwargs
):
    """Return DAPO's loss, whose dual clip is on only under the name clip_ratio_c;
    **kwargs swallows c.
    """
    clip_ratio_c = kwargs.get("clip_ratio_c")
    ratio = torch.exp(log_prob - old_log_prob)
    ratio = (
        ratio
        if clip_ratio_c is None
        else torch.where(advantages < 0, ratio.clamp(max=clip_ratio_c), ratio)
    )
    return -torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )[mask].mean()


def eps_written_into_the_code(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[
        mask
    ].mean()


def c_read_as_a_flag(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28, c=None
):
    """Return DAPO's loss with a dual clip at 3, whatever c is."""
    ratio = torch.exp(log_prob - old_log_prob)
    if c is not None:
        ratio = torch.where(advantages < 0, ratio.clamp(max=3.0), ratio)
    return -torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )[mask].mean()


def advantages_clamped(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    A = advantages.clamp(-5, 5)
    ratio = torch.exp(log_prob - old_log_prob)
    return -torch.min(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A)[mask].mean()


def whitened_again(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    A = advantages[mask]
    A = (A - A.mean()) / (A.std(correction=0) + 1e-8)
    ratio = torch.exp(log_prob - old_log_prob)[mask]
    return -torch.min(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A).mean()


def spike_guard(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss, clamped to ±20."""
    ratio = torch.exp(log_prob - old_log_prob)
    loss = -torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )[mask].mean()
    return loss.clamp(-20, 20)


def tiny_advantage_for_zero(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2):
    A = torch.where(advantages == 0, 1e-3, advantages)
    ratio = torch.exp(log_prob - old_log_prob)
    negative = torch.min(ratio * A, ratio.clamp(min=1 - eps_low) * A)
    return -torch.where(A > 0, A * log_prob, negative)[mask].mean()


def leash_to_old(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss plus 0.01 times k3 to the old policy."""
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    policy = -torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    return (policy + 0.01 * (torch.exp(-log_ratio) - 1 + log_ratio))[mask].mean()


def first_row_as_baseline(log_prob, old_log_prob, advantages, mask):
    first = advantages[0][mask[0]].mean()
    return -((advantages - first) * log_prob)[mask].mean()


def later_rows_weigh_less(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss with weights that fall by 1 % from row to row."""
    decay = 0.99 ** torch.arange(len(mask), dtype=log_prob.dtype)
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return (
        -(decay * torch.where(mask, terms, 0.0).sum(-1) / mask.sum(-1)).sum()
        / decay.sum()
    )


def later_tokens_weigh_less(log_prob, old_log_prob, advantages, mask):
    decay = 0.99 ** torch.arange(mask.shape[1], dtype=log_prob.dtype)
    return -(decay * advantages * log_prob)[mask].mean()


def stops_at_a_kl(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss without the responses whose mean of log π_old - log π_θ
    exceeds 1, divided by all tokens.
    """
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    drift = -torch.where(mask, log_ratio, 0.0).sum(
        -1, keepdim=True
    ).detach() / mask.sum(-1, keepdim=True)
    return -torch.where(mask & (drift <= 1.0), terms, 0.0).sum() / mask.sum()


ZOO = [
    Case(
        fills_advantages_in_place, "dapo", oracles={"mutation"},
        why="masked advantages are overwritten in the caller's batch"
    ),
    Case(
        clamps_old_in_place, "dapo", oracles={"mutation"},
        why="old log-probabilities are clamped for everybody after it",
    ),
    Case(
        scales_advantages_in_place, "grpo", oracles={"mutation", "determinism"},
        why="every epoch divides the same advantages by the length once more",
    ),
    Case(
        drops_tokens_at_random, "up_dapo", oracles={"determinism", "gradient"},
        why="a dropout over tokens that no seed controls",
    ),
    Case(
        remembers_the_last_batch, "ppo_clip", oracles={"determinism", "gradient", "scaling"},
        why="a running scale of the advantages lives between the calls",
    ),
    Case(
        swallows_the_dual_clip, "dapo", {"c": 3.0}, {"gradient", "dead-hyperparameter"},
        "c arrives under another name and **kwargs swallows it", "RLinf/RLinf#316",
    ),
    Case(
        eps_written_into_the_code, "ppo_clip", oracles={"dead-hyperparameter"},
        why="eps is accepted; 0.8 and 1.2 are literals",
    ),
    Case(
        c_read_as_a_flag, "dapo", {"c": 10.0}, {"gradient", "dead-hyperparameter"},
        "any c turns on a dual clip at 3",
    ),
    Case(
        advantages_clamped, "ppo_clip", oracles={"scaling", "gradient"},
        why="large advantages are clamped at 5 without being told", source="kvablack/ddpo-pytorch#12",
    ),
    Case(
        whitened_again, "ppo_clip", oracles={"scaling", "gradient", "micro-batches", "on-policy"},
        why="advantages are whitened once more per micro-batch", source="axon-rl/gem#113",
    ),
    Case(
        spike_guard, "dapo", oracles={"scaling", "extremes", "gradient"},
        why="a loss beyond ± 20 has no gradient at all", source="huggingface/trl#281",
    ),
    Case(tiny_advantage_for_zero, "up_dapo", oracles={"zero-advantage", "gradient"}, why="A = 0 is nudged to 1e-3"),
    Case(
        leash_to_old, "dapo", oracles={"zero-advantage", "gradient", "scaling"},
        why="a KL penalty to π_old, zero on-policy and declared nowhere", source="GMISWE/tinker-cloud#66",
    ),
    Case(
        first_row_as_baseline, "reinforce_off_policy",
        oracles={"permutation", "micro-batches", "gradient", "on-policy"},
        why="the first response (the greedy one, once) is everybody's baseline",
    ),
    Case(
        later_rows_weigh_less, "grpo", oracles={"permutation", "micro-batches", "gradient", "aggregation"},
        why="a weight per row index",
    ),
    Case(
        later_tokens_weigh_less, "reinforce_off_policy", oracles={"gradient", "padding", "aggregation", "on-policy"},
        why="a discount over columns, so that left padding changes the loss",
    ),
    Case(
        stops_at_a_kl, "dapo", oracles={"gradient", "extremes"},
        why="responses whose mean log r is below -1 are dropped without being told",
    ),
]  # fmt: skip
