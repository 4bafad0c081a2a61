# SPDX-License-Identifier: Apache-2.0
"""Mistakes that belong to one objective: UP, CISPO, SAPO, GMPO, DPPO, ASPO, TOPR and
others.
"""

import torch

from . import Case


def up_on_the_wrong_branch(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2):
    """Return UP's loss with the branches of good and bad tokens exchanged."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = torch.min(ratio * advantages, ratio.clamp(min=1 - eps_low) * advantages)
    return -torch.where(advantages < 0, advantages * log_prob, clipped)[mask].mean()


def up_for_both_signs(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2):
    return -(advantages * log_prob)[mask].mean()


def up_only_where_clipped(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2):
    """Return UP's loss whose unclipped branch acts only where A > 0 and r > 1."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = torch.min(ratio * advantages, ratio.clamp(min=1 - eps_low) * advantages)
    return -torch.where((advantages > 0) & (ratio > 1), advantages * log_prob, clipped)[
        mask
    ].mean()


def up_without_the_clip(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.where(advantages > 0, advantages * log_prob, ratio * advantages)
    return -(torch.where(mask, terms, 0.0).sum(-1) / mask.sum(-1)).mean()


def up_clips_positives(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return UP's loss whose good tokens beyond 1 + eps_high have no gradient."""
    ratio = torch.exp(log_prob - old_log_prob)
    positive = torch.where(
        ratio <= 1 + eps_high, advantages * log_prob, (advantages * log_prob).detach()
    )
    negative = torch.min(ratio * advantages, ratio.clamp(min=1 - eps_low) * advantages)
    return -torch.where(advantages > 0, positive, negative)[mask].mean()


def cispo_cap_is_absolute(log_prob, old_log_prob, advantages, mask, *, eps_high=4.0):
    weight = torch.exp(log_prob - old_log_prob).clamp(max=eps_high).detach()
    return -(weight * advantages * log_prob)[mask].mean()


def cispo_cap_below_one(log_prob, old_log_prob, advantages, mask, *, eps_high=0.2):
    weight = torch.exp(log_prob - old_log_prob).clamp(max=eps_high).detach()
    return -(weight * advantages * log_prob)[mask].mean()


def cispo_offsets_twice(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.2
):
    """Return CISPO's loss with bounds taken for distances from 1, and so counted twice."""
    # the config holds bounds, the code wants offsets
    low, high = 1 - (1 - eps_low), 1 + (1 + eps_high)
    weight = torch.exp(log_prob - old_log_prob).clamp(low, high).detach()
    return -(weight * advantages * log_prob)[mask].mean()


def cispo_with_a_floor(log_prob, old_log_prob, advantages, mask, *, eps_high=4.0):
    weight = torch.exp(log_prob - old_log_prob).clamp(1 - 0.2, 1 + eps_high).detach()
    return -(weight * advantages * log_prob)[mask].mean()


def cispo_drops_tokens(log_prob, old_log_prob, advantages, mask, *, eps_high=4.0):
    ratio = torch.exp(log_prob - old_log_prob).detach()
    weight = torch.where(ratio > 1 + eps_high, 0.0, ratio)
    return -(weight * advantages * log_prob)[mask].mean()


def sapo_times_ratio(
    log_prob, old_log_prob, advantages, mask, *, tau_pos=1.0, tau_neg=1.05
):
    """Return SAPO's loss with the ratio as one more factor."""
    ratio = torch.exp(log_prob - old_log_prob)
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    terms = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * ratio * advantages
    return -(torch.where(mask, terms, 0.0).sum(-1) / mask.sum(-1)).mean()


def sapo_taus_swapped(
    log_prob, old_log_prob, advantages, mask, *, tau_pos=1.0, tau_neg=1.05
):
    """Return SAPO's loss with the temperatures of good and bad tokens exchanged."""
    ratio = torch.exp(log_prob - old_log_prob)
    tau = torch.where(advantages > 0, tau_neg, tau_pos)
    terms = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    return -(torch.where(mask, terms, 0.0).sum(-1) / mask.sum(-1)).mean()


def sapo_without_its_scale(
    log_prob, old_log_prob, advantages, mask, *, tau_pos=1.0, tau_neg=1.05
):
    """Return SAPO's loss without the factor 4/τ."""
    ratio = torch.exp(log_prob - old_log_prob)
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    terms = torch.sigmoid(tau * (ratio - 1)) * advantages
    return -(torch.where(mask, terms, 0.0).sum(-1) / mask.sum(-1)).mean()


def gmpo_over_the_micro_batch(log_prob, old_log_prob, advantages, mask, *, eps=0.4):
    """Return GMPO's loss with one geometric mean over the whole batch."""
    log_ratio = log_prob - old_log_prob
    bounded = torch.where(
        advantages > 0, log_ratio.clamp(max=eps), log_ratio.clamp(min=-eps)
    )
    geometric = bounded[mask].mean().exp()
    A = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1)
    return -(geometric * A).mean()


def gmpo_clips_the_ratio(log_prob, old_log_prob, advantages, mask, *, eps=0.4):
    """Return GMPO's loss with r clipped to 1 ± eps in place of log r to ±eps."""
    ratio = torch.exp(log_prob - old_log_prob)
    bounded = torch.where(
        advantages > 0, ratio.clamp(max=1 + eps), ratio.clamp(min=1 - eps)
    ).log()
    s = (torch.where(mask, bounded, 0.0).sum(-1) / mask.sum(-1)).exp()
    A = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1)
    return -(s * A).mean()


def gmpo_ignores_the_sign(log_prob, old_log_prob, advantages, mask, *, eps=0.4):
    bounded = torch.where(mask, (log_prob - old_log_prob).clamp(max=eps), 0.0)
    s = (bounded.sum(-1) / mask.sum(-1)).exp()
    A = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1)
    return -(s * A).mean()


def dppo_masks_both_sides(log_prob, old_log_prob, advantages, mask, *, delta=0.15):
    """Return DPPO's loss that masks a token beyond delta on either side, whatever the
    sign of A.
    """
    p, mu = log_prob.exp(), old_log_prob.exp()
    keep = ((p - mu).abs() <= delta).detach()
    terms = torch.where(
        mask & keep, torch.exp(log_prob - old_log_prob) * advantages, 0.0
    )
    return -terms.sum(-1).mean()


def dppo_thresholds_the_ratio(log_prob, old_log_prob, advantages, mask, *, delta=0.15):
    ratio = torch.exp(log_prob - old_log_prob)
    beyond = torch.where(advantages > 0, ratio - 1, 1 - ratio) > delta
    return -torch.where(mask & ~beyond, ratio * advantages, 0.0).sum(-1).mean()


def dppo_kl_reversed(log_prob, old_log_prob, advantages, mask, *, delta=0.05):
    """Return DPPO-KL's loss with the divergence the other way: KL(π_θ ‖ π_old)."""
    lp, old = torch.where(mask, log_prob, -1.0), torch.where(mask, old_log_prob, -1.0)
    p, mu = lp.detach().exp(), old.exp()
    kl = p * (p.log() - old) + (1 - p) * (torch.log1p(-p) - torch.log1p(-mu))
    outward = torch.where(advantages > 0, lp > old, lp < old)
    return (
        -torch.where(
            mask & ~((kl > delta) & outward), torch.exp(lp - old) * advantages, 0.0
        )
        .sum(-1)
        .mean()
    )


def aspo_soft_clip_at_eps(
    log_prob, old_log_prob, advantages, mask, *, eps=0.2, cap=3.0
):
    """Return ASPO's loss whose weight is capped at 1 + eps in place of cap."""
    ratio = torch.exp(log_prob - old_log_prob)
    weight = torch.where(
        advantages > 0, (1 / ratio).clamp(max=1 + eps), ratio.clamp(max=1 + eps)
    ).detach()
    alive = torch.where(advantages > 0, ratio <= 1 + eps, ratio >= 1 - eps)
    return (
        -torch.where(mask & alive, weight * advantages * log_prob, 0.0).sum()
        / mask.sum()
    )


def aspo_flips_negatives_too(
    log_prob, old_log_prob, advantages, mask, *, eps=0.2, cap=3.0
):
    """Return ASPO's loss with 1/r for bad tokens too."""
    ratio = torch.exp(log_prob - old_log_prob)
    weight = (1 / ratio).clamp(max=cap).detach()
    alive = torch.where(advantages > 0, ratio <= 1 + eps, ratio >= 1 - eps)
    return (
        -torch.where(mask & alive, weight * advantages * log_prob, 0.0).sum()
        / mask.sum()
    )


def topr_divided_by_length(log_prob, old_log_prob, advantages, mask):
    """Return TOPR's loss with each response divided by its length."""
    lp, old = (
        torch.where(mask, log_prob, 0.0).sum(-1),
        torch.where(mask, old_log_prob, 0.0).sum(-1),
    )
    A = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1)
    weight = torch.where(A >= 0, 1.0, (lp - old).exp().clamp(max=1)).detach()
    return -(weight * A * lp / mask.sum(-1)).mean()


def topr_per_token(log_prob, old_log_prob, advantages, mask):
    weight = torch.where(
        advantages >= 0, 1.0, torch.exp(log_prob - old_log_prob).clamp(max=1)
    ).detach()
    return -torch.where(mask, weight * advantages * log_prob, 0.0).sum(-1).mean()


def lambda_on_the_negatives(log_prob, old_log_prob, advantages, mask, *, lam=0.1):
    A = torch.where(advantages < 0, lam * advantages, advantages)
    return -torch.where(mask, A * log_prob, 0.0).sum(-1).mean()


def rloo_with_a_clip(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -torch.where(mask, terms, 0.0).sum(-1).mean()


def gppo_is_dapo(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return GPPO's loss whose clipped tokens lose their gradient, as in DAPO."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high) / ratio.detach() * ratio.detach()
    return -torch.min(ratio * advantages, clipped * advantages)[mask].mean()


def band_from_the_new_policy(log_prob, old_log_prob, advantages, mask, *, delta=0.05):
    """Return BandPO's loss with a band around the current policy in place of the old
    one.
    """
    p = log_prob.detach().exp()
    ratio = torch.exp(log_prob - old_log_prob)
    low, high = (1 - delta / p).clamp(min=0), 1 + delta / p
    terms = torch.min(
        ratio * advantages, torch.minimum(torch.maximum(ratio, low), high) * advantages
    )
    return -(torch.where(mask, terms, 0.0).sum(-1) / mask.sum(-1)).mean()


ZOO = [
    Case(up_on_the_wrong_branch, "up_dapo", oracles={"gradient"}, why="negatives lose their clip, positives keep r"),
    Case(up_for_both_signs, "up_dapo", oracles={"gradient", "dead-hyperparameter"}, why="A log π for both signs"),
    Case(
        up_only_where_clipped, "up_dapo", oracles={"gradient"},
        why="log π only where r > 1: below, the weight is A r",
    ),
    Case(up_without_the_clip, "up_grpo", oracles={"gradient", "dead-hyperparameter"}, why="negatives are not clipped"),
    Case(up_clips_positives, "up_dapo", oracles={"gradient"}, why="the upper clip survives on the positive branch"),
    Case(
        cispo_cap_is_absolute, "cispo", oracles={"gradient"},
        why="the offset eps_high is taken for the bound: 4 instead of 5", source="NovaSky-AI/SkyRL#1928",
    ),
    Case(
        cispo_cap_below_one, "cispo", {"eps_high": 0.2}, {"gradient", "on-policy"},
        "an absolute cap of 0.2 divides every on-policy gradient by five",
    ),
    Case(
        cispo_offsets_twice, "cispo_verl", oracles={"gradient"},
        why="bounds are made from bounds: [0.2, 2.2]", source="NovaSky-AI/SkyRL#553",
    ),
    Case(
        cispo_with_a_floor, "cispo", oracles={"gradient"},
        why="small weights are lifted to 0.8: two-sided by default",
    ),
    Case(cispo_drops_tokens, "cispo", oracles={"gradient"}, why="beyond the cap the weight is 0: PPO's clip again"),
    Case(sapo_times_ratio, "sapo", oracles={"gradient", "on-policy"}, why="an additional factor r"),
    Case(sapo_taus_swapped, "sapo", oracles={"gradient"}, why="tau_pos and tau_neg change places"),
    Case(sapo_without_its_scale, "sapo", oracles={"gradient", "on-policy"}, why="4/τ is missing"),
    Case(
        gmpo_over_the_micro_batch, "gmpo", oracles={"gradient", "micro-batches", "aggregation"},
        why="one geometric mean for the whole micro-batch", source="verl-project/verl#5614",
    ),
    Case(gmpo_clips_the_ratio, "gmpo", oracles={"gradient"}, why="eps bounds r, where it should bound log r"),
    Case(gmpo_ignores_the_sign, "gmpo", oracles={"gradient"}, why="the upper bound for both signs"),
    Case(dppo_masks_both_sides, "dppo_tv", oracles={"gradient"}, why="tokens that move back are masked too"),
    Case(dppo_thresholds_the_ratio, "dppo_tv", oracles={"gradient"}, why="delta bounds r - 1, not p - mu"),
    Case(dppo_kl_reversed, "dppo_kl", oracles={"gradient"}, why="KL(π ‖ π_old) for KL(π_old ‖ π)"),
    Case(
        aspo_soft_clip_at_eps, "aspo", oracles={"gradient", "dead-hyperparameter"},
        why="the soft clip at 1 + eps instead of 3: both caps act inside the window",
    ),
    Case(aspo_flips_negatives_too, "aspo", oracles={"gradient"}, why="1/r for both signs"),
    Case(topr_divided_by_length, "topr", oracles={"gradient", "on-policy", "aggregation"}, why="length-normalized"),
    Case(topr_per_token, "topr", oracles={"gradient"}, why="a token ratio, where the response's product is meant"),
    Case(lambda_on_the_negatives, "w_reinforce", oracles={"gradient", "on-policy"}, why="lam weighs the other sign"),
    Case(rloo_with_a_clip, "rloo", oracles={"gradient"}, why="PPO's clip inside a REINFORCE estimator"),
    Case(gppo_is_dapo, "gppo", oracles={"gradient"}, why="the stop-gradient cancels: clipped tokens stay dead"),
    Case(band_from_the_new_policy, "bandpo_tv", oracles={"gradient"}, why="bounds from π_θ instead of π_old"),
]  # fmt: skip
