# SPDX-License-Identifier: Apache-2.0
"""Losses in the words of public trainers, and what goes wrong when somebody edits one
line of them.

Written before the checker ran on any of them; two boxes that were no losses were
replaced after it. A base is right. A row of EDITS puts other text into its source:
(base, name, [old text, new text, ...]); HARMLESS are edits that change no gradient. One
file: an edit can only be read beside its base.
"""
# ruff: noqa: E501 - an edit is one row

import inspect
import textwrap
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F


# An edit replaces text of a line, so the lines stay as they are.
# fmt: off
def masked_mean(values, mask, axis=None):
    return (values * mask).sum(axis) / mask.sum(axis)


def agg_loss(loss_mat, loss_mask, loss_agg_mode):
    """Return the mean of a matrix of losses, over tokens or over responses, as verl's
    function of that name does.
    """
    if loss_agg_mode == "token-mean":
        return masked_mean(loss_mat, loss_mask)
    seq_losses = torch.sum(loss_mat * loss_mask, dim=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        seq_losses = seq_losses / loss_mask.sum(-1).clamp(min=1)
    return seq_losses.mean()


def vanilla(old_log_prob, log_prob, advantages, response_mask, clip_ratio_low=0.2, clip_ratio_high=0.28,
            clip_ratio_c=3.0, loss_agg_mode="token-mean"):  # fmt: skip
    """Return verl's PPO loss with a dual clip."""
    negative_approx_kl = log_prob - old_log_prob
    negative_approx_kl = torch.clamp(negative_approx_kl, min=-20.0, max=20.0)
    ratio = torch.exp(negative_approx_kl)
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    clip_pg_losses1 = torch.maximum(pg_losses1, pg_losses2)
    pg_losses3 = -advantages * clip_ratio_c
    clip_pg_losses2 = torch.min(pg_losses3, clip_pg_losses1)
    pg_losses = torch.where(advantages < 0, clip_pg_losses2, clip_pg_losses1)
    return agg_loss(pg_losses, response_mask, loss_agg_mode)


def sequence(old_log_prob, log_prob, advantages, response_mask, clip_ratio_low=3e-4, clip_ratio_high=4e-4):
    """Return verl's GSPO loss."""
    negative_approx_kl = log_prob - old_log_prob
    seq_lengths = torch.sum(response_mask, dim=-1).clamp(min=1)
    negative_approx_kl_seq = torch.sum(negative_approx_kl * response_mask, dim=-1) / seq_lengths
    log_seq_ratio = log_prob - log_prob.detach() + negative_approx_kl_seq.detach().unsqueeze(-1)
    log_seq_ratio = torch.clamp(log_seq_ratio, max=10.0)
    seq_ratio = torch.exp(log_seq_ratio)
    pg_losses1 = -advantages * seq_ratio
    pg_losses2 = -advantages * torch.clamp(seq_ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    pg_losses = torch.maximum(pg_losses1, pg_losses2)
    return agg_loss(pg_losses, response_mask, "seq-mean-token-mean")


def grpo(per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask, epsilon=0.2,
         beta=0.04):  # fmt: skip
    """Return TRL's GRPO loss with a KL term, one advantage per response."""
    per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
    log_ratio = per_token_logps - old_per_token_logps
    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    per_token_loss1 = coef_1 * advantages.unsqueeze(1)
    per_token_loss2 = coef_2 * advantages.unsqueeze(1)
    per_token_loss = -torch.min(per_token_loss1, per_token_loss2)
    per_token_loss = per_token_loss + beta * per_token_kl
    return ((per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()


def cispo(per_token_logps, old_per_token_logps, advantages, completion_mask, epsilon_high=4.0):
    """Return TRL's CISPO loss, one advantage per response."""
    log_ratio = per_token_logps - old_per_token_logps
    coef_1 = torch.exp(log_ratio)
    clamped_ratios = torch.clamp(coef_1, max=1 + epsilon_high).detach()
    per_token_loss = -clamped_ratios * advantages.unsqueeze(1) * per_token_logps
    return (per_token_loss * completion_mask).sum() / completion_mask.sum().clamp(min=1.0)


def dr(per_token_logps, old_per_token_logps, advantages, completion_mask, epsilon=0.2):
    coef_1 = torch.exp(per_token_logps - old_per_token_logps)
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    return (per_token_loss * completion_mask).sum() / per_token_loss.size(0)


def policy_loss(log_probs, old_log_probs, advantages, action_mask=None, clip_eps_low=0.2, clip_eps_high=0.28):
    """Return OpenRLHF's PPO loss."""
    ratio = (log_probs - old_log_probs).exp()
    surr1 = ratio * advantages
    surr2 = ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    loss = -torch.min(surr1, surr2)
    return masked_mean(loss, action_mask)


def unclipped_positives(logprobs, old_logprobs, advantages, loss_mask, cliprange_low=0.2):
    """Return UP-DAPO's loss, with the ratio of positive tokens anchored at the policy
    itself.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    anchored = torch.exp(logprobs - logprobs.detach())
    positive = anchored * advantages
    negative = torch.min(ratio * advantages, torch.clamp(ratio, min=1 - cliprange_low) * advantages)
    objective = torch.where(advantages > 0, positive, negative)
    return -(objective * loss_mask).sum() / loss_mask.sum()


def with_engine(log_prob, old_log_prob, rollout_log_probs, advantages, response_mask, clip_ratio_low=0.2,
                clip_ratio_high=0.28, tis_imp_ratio_cap=2.0):  # fmt: skip
    """Return verl's PPO loss times the truncated ratio to the inference engine."""
    ratio = torch.exp(log_prob - old_log_prob)
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    pg_losses = torch.maximum(pg_losses1, pg_losses2)
    tis_imp_ratio = torch.exp(old_log_prob - rollout_log_probs)
    tis_imp_ratio = torch.clamp(tis_imp_ratio, max=tis_imp_ratio_cap)
    pg_losses = pg_losses * tis_imp_ratio
    return masked_mean(pg_losses, response_mask)


def soft(per_token_logps, old_per_token_logps, advantages, completion_mask, tau_pos=1.0, tau_neg=1.05):
    """Return TRL's SAPO loss."""
    log_ratio = per_token_logps - old_per_token_logps
    coef_1 = torch.exp(log_ratio)
    temperatures = torch.where(advantages > 0, tau_pos, tau_neg)
    soft_coef_1 = torch.sigmoid(temperatures * (coef_1 - 1)) * 4 / temperatures
    per_token_loss = -soft_coef_1 * advantages
    return ((per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()


def leave_one_out_pg(logprobs, advantages, action_mask):
    logprobs_sum = (logprobs * action_mask).sum(1)
    return -(advantages[:, 0] * logprobs_sum).mean()


def tapered(log_probs, old_log_probs, advantages, loss_mask):
    """Return TOPR's loss: a response with a negative reward is weighted by its ratio,
    at most 1.
    """
    seq_logp = (log_probs * loss_mask).sum(-1)
    seq_old = (old_log_probs * loss_mask).sum(-1)
    rewards = advantages[:, 0]
    weight = torch.where(rewards >= 0, 1.0, torch.exp(seq_logp - seq_old).clamp(0, 1).detach())
    return -(weight * rewards * seq_logp).mean()


def geometric(log_probs, old_log_probs, advantages, mask, clip=0.4):
    """Return GMPO's loss."""
    sgn_A = advantages.sign()
    sgn_diff = sgn_A * (log_probs - old_log_probs)
    sgn_min = torch.min(sgn_diff, torch.clamp(sgn_diff, -clip, clip))
    diff_min = sgn_A * sgn_min
    ratio = torch.exp((diff_min * mask).sum(-1) / mask.sum(-1))
    return -(advantages[:, 0] * ratio).mean()


def divergence_mask(log_prob, old_log_prob, advantages, response_mask, delta=0.15):
    """Return DPPO's loss by total variation: tokens beyond delta on the side of A are
    masked.
    """
    prob, old_prob = log_prob.detach().exp(), old_log_prob.exp()
    invalid_pos = (advantages > 0) & (prob - old_prob > delta)
    invalid_neg = (advantages < 0) & (old_prob - prob > delta)
    keep = ~(invalid_pos | invalid_neg)
    ratio = torch.exp(log_prob - old_log_prob)
    return -(ratio * advantages * keep * response_mask).sum(-1).mean()


def preserved(log_prob, old_log_prob, advantages, response_mask, clip_ratio_low=0.2, clip_ratio_high=0.28):
    """Return a PPO loss whose clipped tokens keep a gradient, as in GPPO."""
    ratio = torch.exp(log_prob - old_log_prob)
    low, high = (1 - clip_ratio_low) / ratio.detach(), (1 + clip_ratio_high) / ratio.detach()
    clipped = torch.where(ratio > 1 + clip_ratio_high, ratio * high, ratio)
    clipped = torch.where(ratio < 1 - clip_ratio_low, ratio * low, clipped)
    return masked_mean(torch.max(-advantages * ratio, -advantages * clipped), response_mask)


def areal(logprobs, proximal_logprobs, old_logprobs, advantages, loss_mask, eps_clip=0.2):
    """Return AReaL's decoupled PPO loss, clipped around a proximal policy, times the
    ratio of that to the old policy.
    """
    ratio = torch.exp(logprobs - proximal_logprobs)
    clipped_ratio = torch.clamp(ratio, 1.0 - eps_clip, 1.0 + eps_clip)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio)
    behav_imp_weight = torch.exp(proximal_logprobs - old_logprobs)
    return masked_mean(pg_loss * behav_imp_weight.detach(), loss_mask)
# fmt: on


BASES = {
    "vanilla": ("dapo", {"c": 3.0}), "sequence": ("gspo", {}), "grpo": ("grpo", {"beta": 0.04}), "cispo": ("cispo", {}),
    "dr": ("dr_grpo", {}), "policy_loss": ("dapo", {}), "unclipped_positives": ("up_dapo", {}),
    "with_engine": ("tis(dapo)", {}), "soft": ("sapo", {}), "leave_one_out_pg": ("rloo", {}), "tapered": ("topr", {}),
    "geometric": ("gmpo", {}), "divergence_mask": ("dppo_tv", {}), "preserved": ("gppo", {}),
    "areal": ("decoupled(ppo_clip)", {}),
}  # fmt: skip
EDITS = [
    # PPO's clip as in verl
    ("vanilla", "dual clip on winners", ["advantages < 0", "advantages > 0"]),
    ("vanilla", "min for max", ["torch.maximum(", "torch.minimum("]),
    ("vanilla", "bounds swapped", ["1 - clip_ratio_low, 1 + clip_ratio_high", "1 - clip_ratio_high, 1 + clip_ratio_low"]),
    ("vanilla", "max in the dual clip", ["torch.min(pg_losses3", "torch.max(pg_losses3"]),
    ("vanilla", "ratio inverted", ["log_prob - old_log_prob", "old_log_prob - log_prob"]),
    ("vanilla", "clamp at 2", ["min=-20.0, max=20.0", "min=-2.0, max=2.0"]),
    ("vanilla", "padded width", ["agg_loss(pg_losses, response_mask, loss_agg_mode)", "(pg_losses * response_mask).mean()"]),
    ("vanilla", "c as a distance", ["-advantages * clip_ratio_c", "-advantages * (1 + clip_ratio_c)"]),
    ("vanilla", "c without A", ["-advantages * clip_ratio_c", "clip_ratio_c * torch.ones_like(advantages)"]),
    ("vanilla", "ratio detached", ["torch.exp(negative_approx_kl)", "torch.exp(negative_approx_kl.detach())"]),
    ("vanilla", "first term clipped twice", ["pg_losses1 = -advantages * ratio", "ratio = ratio.clamp(max=1.28); pg_losses1 = -advantages * ratio"]),
    ("vanilla", "means of responses", ['loss_agg_mode="token-mean"', 'loss_agg_mode="seq-mean-token-mean"']),
    ("vanilla", "sums of responses", ['loss_agg_mode="token-mean"', 'loss_agg_mode="seq-mean-token-sum"']),
    ("vanilla", "winners clipped one-sidedly by 2", ["clip_pg_losses1)\n    return", "torch.where(advantages > 1, pg_losses1, clip_pg_losses1))\n    return"]),
    ("vanilla", "whitened again", ["    negative_approx_kl = log_prob", "    advantages = (advantages - masked_mean(advantages, response_mask)) / (masked_mean(advantages**2, response_mask).sqrt() + 1e-8)\n    negative_approx_kl = log_prob"]),
    ("vanilla", "tokens of tiny A dropped", ["    negative_approx_kl = log_prob", "    response_mask = response_mask * (advantages.abs() > 1e-4)\n    negative_approx_kl = log_prob"]),
    ("vanilla", "the last token is not trained", ["    negative_approx_kl = log_prob", "    response_mask = response_mask * torch.cat([response_mask[:, 1:], response_mask[:, :1] * 0], 1)\n    negative_approx_kl = log_prob"]),
    ("vanilla", "far tokens dropped", ["    negative_approx_kl = log_prob", "    response_mask = response_mask * ((log_prob - old_log_prob).detach().abs() < 3)\n    negative_approx_kl = log_prob"]),
    ("vanilla", "overlong responses dropped", ["    negative_approx_kl = log_prob", "    response_mask = response_mask * (response_mask.sum(-1, keepdim=True) <= 256)\n    negative_approx_kl = log_prob"]),
    # GSPO as in verl
    ("sequence", "token mean", ['"seq-mean-token-mean"', '"token-mean"']),
    ("sequence", "sum of log-ratios", [" / seq_lengths", ""]),
    ("sequence", "gradient twice", ["negative_approx_kl_seq.detach()", "negative_approx_kl_seq"]),
    ("sequence", "clamp at 0.1", ["max=10.0", "max=0.1"]),
    ("sequence", "padded width", ["torch.sum(response_mask, dim=-1).clamp(min=1)", "response_mask.shape[-1]"]),
    ("sequence", "whole batch", ["torch.sum(negative_approx_kl * response_mask, dim=-1) / seq_lengths", "(masked_mean(negative_approx_kl, response_mask) * torch.ones_like(seq_lengths))"]),
    ("sequence", "min for max", ["torch.maximum(", "torch.minimum("]),
    ("sequence", "DAPO's bounds", ["clip_ratio_low=3e-4, clip_ratio_high=4e-4", "clip_ratio_lo=0.2, clip_ratio_hi=0.28", "1 - clip_ratio_low, 1 + clip_ratio_high", "1 - clip_ratio_lo, 1 + clip_ratio_hi"]),
    ("sequence", "lengths at least 4", [".clamp(min=1)", ".clamp(min=4)"]),
    # GRPO as in TRL
    ("grpo", "policies exchanged in the KL", ["torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps)", "torch.exp(per_token_logps - ref_per_token_logps) - (per_token_logps - ref_per_token_logps)"]),
    ("grpo", "KL added to J", ["+ beta", "- beta"]),
    ("grpo", "lengths at least 4", ["min=1.0", "min=4.0"]),
    ("grpo", "padded width", ["completion_mask.sum(-1).clamp(min=1.0)", "completion_mask.size(1)"]),
    ("grpo", "no old policy", ["- old_per_token_logps", "- per_token_logps.detach()"]),
    ("grpo", "ratio of responses", ["coef_1 = torch.exp(log_ratio)", "coef_1 = torch.exp(((log_ratio * completion_mask).sum(-1) / completion_mask.sum(-1)).unsqueeze(-1))"]),
    ("grpo", "sum of responses", ["min=1.0)).mean()", "min=1.0)).sum()"]),
    ("grpo", "KL times the ratio", ["beta * per_token_kl", "beta * per_token_kl * coef_1"]),
    ("grpo", "KL by tokens", ["per_token_loss = per_token_loss + beta * per_token_kl\n    return ", "return beta * masked_mean(per_token_kl, completion_mask) + "]),
    ("grpo", "absolute KL", ["torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1", "(per_token_logps - ref_per_token_logps).abs()"]),
    ("grpo", "KL of a constant", ["torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps)", "torch.exp(ref_per_token_logps - per_token_logps.detach()) - (ref_per_token_logps - per_token_logps.detach())"]),
    ("grpo", "KL's exponential detached", ["torch.exp(ref_per_token_logps - per_token_logps) -", "torch.exp(ref_per_token_logps - per_token_logps).detach() -"]),
    ("grpo", "k1 for k3, twice as strong", ["torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1", "2 * (per_token_logps - ref_per_token_logps)"]),
    ("grpo", "KL to the old policy", ["log_ratio = ", "ref_per_token_logps = old_per_token_logps\n    per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1\n    log_ratio = "]),
    ("grpo", "ratio to the reference", ["per_token_logps - old_per_token_logps", "per_token_logps - ref_per_token_logps"]),
    ("grpo", "clip inside the product", ["coef_2 * advantages.unsqueeze(1)", "torch.clamp(per_token_loss1, 1 - epsilon, 1 + epsilon)"]),
    # CISPO as in TRL
    ("cispo", "not detached", [".detach()", ""]),
    ("cispo", "cap as absolute", ["max=1 + epsilon_high", "max=epsilon_high"]),
    ("cispo", "masked beyond the cap", ["-clamped_ratios", "-clamped_ratios * (coef_1 <= 1 + epsilon_high)"]),
    ("cispo", "probability for its logarithm", ["* per_token_logps\n", "* torch.exp(per_token_logps)\n"]),
    ("cispo", "cap for winners alone", ["-clamped_ratios", "-torch.where(advantages.unsqueeze(1) > 0, clamped_ratios, coef_1.detach())"]),
    ("cispo", "a floor of 0.8", ["max=1 + epsilon_high", "min=0.8, max=1 + epsilon_high"]),
    ("cispo", "a mean of responses", ["(per_token_loss * completion_mask).sum() / completion_mask.sum().clamp(min=1.0)", "((per_token_loss * completion_mask).sum(1) / completion_mask.sum(1)).mean()"]),
    # Dr. GRPO, OpenRLHF
    ("dr", "lengths divided out", ["(per_token_loss * completion_mask).sum() / per_token_loss.size(0)", "masked_mean(per_token_loss, completion_mask, -1).mean()"]),
    ("dr", "all slots", ["per_token_loss.size(0)", "per_token_loss.numel()"]),
    ("dr", "all tokens", ["per_token_loss.size(0)", "completion_mask.sum()"]),
    ("policy_loss", "no lower side", ["ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high)", "ratio.clamp(max=1 + clip_eps_high)"]),
    ("policy_loss", "A by its size", ["1 + clip_eps_high) * advantages", "1 + clip_eps_high) * advantages.abs()"]),
    ("policy_loss", "half precision", ["(log_probs - old_log_probs)", "(log_probs.bfloat16() - old_log_probs.bfloat16())"]),
    ("policy_loss", "responses", ["masked_mean(loss, action_mask)", "masked_mean(loss, action_mask, -1).mean()"]),
    ("policy_loss", "nothing clipped", ["-torch.min(surr1, surr2)", "-surr1"]),
    ("policy_loss", "clip on log r", ["ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high)", "(log_probs - old_log_probs).clamp(-clip_eps_low, clip_eps_high).exp()"]),
    # UP
    ("unclipped_positives", "the ratio stays", ["positive = anchored", "positive = ratio"]),
    ("unclipped_positives", "no anchor", ["torch.exp(logprobs - logprobs.detach())", "torch.exp(logprobs)"]),
    ("unclipped_positives", "A is lost", ["positive = anchored * advantages", "positive = anchored"]),
    ("unclipped_positives", "all anchored", ["torch.min(ratio * advantages, torch.clamp(ratio, min=1 - cliprange_low) * advantages)", "anchored * advantages"]),
    ("unclipped_positives", "branches exchanged", ["advantages > 0", "advantages < 0"]),
    ("unclipped_positives", "max for min", ["torch.min(ratio", "torch.max(ratio"]),
    ("unclipped_positives", "losers unclipped", ["torch.clamp(ratio, min=1 - cliprange_low)", "ratio"]),
    ("unclipped_positives", "confident tokens dropped", ["positive = anchored * advantages", "positive = anchored * advantages * (logprobs.detach() < -0.01)"]),
    # the sampler's policy
    ("with_engine", "of the current policy", ["torch.exp(old_log_prob - rollout", "torch.exp(log_prob.detach() - rollout"]),
    ("with_engine", "inverted", ["torch.exp(old_log_prob - rollout_log_probs)", "torch.exp(rollout_log_probs - old_log_prob)"]),
    ("with_engine", "a floor for a cap", ["max=tis_imp_ratio_cap", "min=tis_imp_ratio_cap"]),
    ("with_engine", "masked", ["torch.clamp(tis_imp_ratio, max=tis_imp_ratio_cap)", "torch.where(tis_imp_ratio <= tis_imp_ratio_cap, tis_imp_ratio, 0)"]),
    ("with_engine", "no correction", ["pg_losses * tis_imp_ratio", "pg_losses"]),
    ("with_engine", "KL to the sampler", ["pg_losses * tis_imp_ratio", "pg_losses * tis_imp_ratio + 0.01 * (log_prob - rollout_log_probs) ** 2 / 2"]),
    # SAPO, RLOO, TOPR, GMPO, DPPO, GPPO
    ("soft", "no factor 4 / tau", [" * 4 / temperatures", ""]),
    ("soft", "temperatures exchanged", ["tau_pos, tau_neg)\n", "tau_neg, tau_pos)\n"]),
    ("soft", "of log r", ["(coef_1 - 1)", "log_ratio"]),
    ("leave_one_out_pg", "a mean over tokens", ["(logprobs * action_mask).sum(1)", "masked_mean(logprobs, action_mask, 1)"]),
    ("tapered", "not detached", [".clamp(0, 1).detach()", ".clamp(0, 1)"]),
    ("tapered", "no cap", [".clamp(0, 1)", ""]),
    ("tapered", "a cap for winners", ["rewards >= 0", "rewards <= 0"]),
    ("geometric", "by tokens", ["torch.exp((diff_min * mask).sum(-1) / mask.sum(-1))", "masked_mean(torch.exp(diff_min), mask, -1)"]),
    ("geometric", "of the width", ["/ mask.sum(-1)", "/ mask.size(-1)"]),
    ("geometric", "sign lost", ["diff_min = sgn_A * sgn_min", "diff_min = sgn_min"]),
    ("divergence_mask", "both signs alike", ["invalid_neg = (advantages < 0) & (old_prob - prob > delta)", "invalid_neg = (advantages < 0) & (prob - old_prob > delta)"]),
    ("divergence_mask", "two-sided", ["(advantages > 0) & (prob - old_prob > delta)", "((prob - old_prob).abs() > delta)"]),
    ("divergence_mask", "relative", ["(advantages > 0) & (prob - old_prob > delta)", "(advantages > 0) & (prob / old_prob - 1 > delta)"]),
    ("preserved", "not detached", ["(1 + clip_ratio_high) / ratio.detach()", "(1 + clip_ratio_high) / ratio"]),
    ("preserved", "no lower bound", ["torch.where(ratio < 1 - clip_ratio_low, ratio * low, clipped)", "clipped"]),
    ("areal", "behaviour by the current policy", ["torch.exp(proximal_logprobs - old_logprobs)", "torch.exp(logprobs.detach() - old_logprobs)"]),
]  # fmt: skip
HARMLESS = [
    ("vanilla", "clamp above alone at 5", ["min=-20.0, max=20.0", "max=5.0"]),
    ("vanilla", "no clamp", ["    negative_approx_kl = torch.clamp(negative_approx_kl, min=-20.0, max=20.0)\n", ""]),
    ("vanilla", "relu of the excess", ["torch.maximum(pg_losses1, pg_losses2)", "pg_losses1 + F.relu(pg_losses2 - pg_losses1)"]),
    ("vanilla", "stacked", ["torch.maximum(pg_losses1, pg_losses2)", "torch.stack([pg_losses1, pg_losses2]).max(0).values"]),
    ("vanilla", "indexed", ["agg_loss(pg_losses, response_mask, loss_agg_mode)", "pg_losses[response_mask.bool()].mean()"]),
    ("vanilla", "dots", ["agg_loss(pg_losses, response_mask, loss_agg_mode)", "torch.dot(pg_losses.flatten(), response_mask.to(pg_losses.dtype).flatten()) / response_mask.sum()"]),
    ("vanilla", "filled", ["agg_loss(pg_losses, response_mask, loss_agg_mode)", "pg_losses.masked_fill(~response_mask.bool(), 0).sum() / response_mask.sum()"]),
    ("vanilla", "packed", ["    negative_approx_kl = log_prob", "    keep = response_mask.bool(); log_prob, old_log_prob, advantages = log_prob[keep], old_log_prob[keep], advantages[keep]; response_mask = torch.ones_like(log_prob)\n    negative_approx_kl = log_prob"]),
    ("vanilla", "float32", ["log_prob - old_log_prob", "log_prob.float() - old_log_prob.float()"]),
    ("vanilla", "A detached", ["    negative_approx_kl = log_prob", "    advantages, old_log_prob = advantages.detach(), old_log_prob.detach()\n    negative_approx_kl = log_prob"]),
    ("sequence", "no clamp", ["    log_seq_ratio = torch.clamp(log_seq_ratio, max=10.0)\n", ""]),
    ("sequence", "plain", ["log_prob - log_prob.detach() + negative_approx_kl_seq.detach().unsqueeze(-1)", "negative_approx_kl_seq.unsqueeze(-1).expand_as(log_prob)"]),
    ("grpo", "expm1", ["torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1", "torch.expm1(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps)"]),
    ("grpo", "einsum", ["(per_token_loss * completion_mask).sum(-1)", "torch.einsum('bt,bt->b', per_token_loss, completion_mask.to(per_token_loss.dtype))"]),
    ("cispo", "no grad", ["clamped_ratios = torch.clamp(coef_1, max=1 + epsilon_high).detach()", "clamped_ratios = coef_1.detach().clamp_max(1 + epsilon_high)"]),
    ("dr", "mean of sums", ["(per_token_loss * completion_mask).sum() / per_token_loss.size(0)", "(per_token_loss * completion_mask).sum(-1).mean()"]),
    ("policy_loss", "softened to a where", ["-torch.min(surr1, surr2)", "-torch.where(surr1 < surr2, surr1, surr2)"]),
    ("policy_loss", "a negated max", ["-torch.min(surr1, surr2)", "torch.max(-surr1, -surr2)"]),
    ("unclipped_positives", "at least 0", ["advantages > 0", "advantages >= 0"]),
    ("unclipped_positives", "an inert upper bound", ["torch.clamp(ratio, min=1 - cliprange_low)", "torch.clamp(ratio, 1 - cliprange_low, 1.28)"]),
    ("unclipped_positives", "the logarithm itself", ["anchored * advantages", "logprobs * advantages"]),
    ("unclipped_positives", "by masks", ["torch.where(advantages > 0, positive, negative)", "positive * (advantages > 0) + negative * (advantages <= 0)"]),
    ("with_engine", "detached", ["pg_losses * tis_imp_ratio", "pg_losses * tis_imp_ratio.detach()"]),
    ("soft", "by tanh", ["torch.sigmoid(temperatures * (coef_1 - 1)) * 4 / temperatures", "(1 + torch.tanh(temperatures * (coef_1 - 1) / 2)) * 2 / temperatures"]),
    ("tapered", "by exp of a clamp", ["torch.exp(seq_logp - seq_old).clamp(0, 1)", "torch.exp((seq_logp - seq_old).clamp(max=0))"]),
    ("geometric", "min with a bound", ["torch.clamp(sgn_diff, -clip, clip)", "torch.full_like(sgn_diff, clip)"]),
    ("divergence_mask", "by where", ["ratio * advantages * keep", "torch.where(keep, ratio * advantages, 0)"]),
]  # fmt: skip


def edited(base, edit=()):
    """Return the base with old texts of its source replaced by new ones. edit: old,
    new, old, new, ...

    Raises:
        AssertionError: an old text is not there.
    """
    source = textwrap.dedent(inspect.getsource(globals()[base]))
    for old, new in zip(edit[::2], edit[1::2], strict=True):
        assert old in source, (base, old)
        source = source.replace(old, new)
    space = dict(globals())
    exec(source, space)
    return space[base]


# ---- black boxes: (base, edit, the objectives of this gradient, hyperparameters) -----
BOXES = [
    ("vanilla", ["0.28", "0.4", "c=3.0", "c=10.0"], "dapo ppo_clip", {"eps_high": 0.4, "c": 10.0}),
    ("vanilla", ["low=0.2, clip_ratio_high=0.28", "low=0.1, clip_ratio_high=0.1", "c=3.0", "c=1e30"], "ppo_clip", {"eps": 0.1}),
    ("vanilla", ["1 - clip_ratio_low, 1 + clip_ratio_high", "1 - clip_ratio_low, 1e9", "c=3.0", "c=1e30"], "dapo_no_upper_clip", {}),
    ("sequence", ["3e-4", "3e-3", "4e-4", "5e-3"], "gspo", {"eps_low": 3e-3, "eps_high": 5e-3}),
    ("sequence", ['"seq-mean-token-mean"', '"seq-mean-token-sum"', "3e-4", "1e-3", "4e-4", "2e-3"], "luspo", {"eps_low": 1e-3, "eps_high": 2e-3}),
    ("grpo", ["epsilon=0.2", "epsilon=0.25", "beta=0.04", "beta=0.001"], "grpo", {"eps": 0.25, "beta": 0.001}),
    ("cispo", ["4.0", "2.5"], "cispo", {"eps_high": 2.5}),
    ("cispo", ["max=1 + epsilon_high", "min=0.7, max=1.4"], "cispo_verl", {"eps_low": 0.3, "eps_high": 0.4}),
    ("dr", ["epsilon=0.2", "epsilon=0.3"], "dr_grpo", {"eps": 0.3}),
    ("dr", ["-torch.min(coef_1 * advantages, coef_2 * advantages)", "-coef_1 * advantages"], "is_pg", {}),
    ("unclipped_positives", ["cliprange_low=0.2", "cliprange_low=0.35"], "up_dapo", {"eps_low": 0.35}),
    ("soft", ["tau_pos=1.0, tau_neg=1.05", "tau_pos=0.7, tau_neg=1.4"], "sapo", {"tau_pos": 0.7, "tau_neg": 1.4}),
    ("leave_one_out_pg", [], "rloo reinforce", {}),
    ("tapered", [], "topr", {}),
    ("geometric", ["clip=0.4", "clip=0.2"], "gmpo", {"eps": 0.2}),
    ("divergence_mask", ["delta=0.15", "delta=0.2"], "dppo_tv", {"delta": 0.2}),
    ("preserved", ["0.2, clip_ratio_high=0.28", "0.15, clip_ratio_high=0.3"], "gppo", {"eps_low": 0.15, "eps_high": 0.3}),
    ("vanilla", ["ratio = torch.exp(negative_approx_kl)", "ratio = torch.exp(negative_approx_kl); advantages = advantages * torch.sigmoid(-old_log_prob)"], "", {}),
    ("vanilla", ["    negative_approx_kl = log_prob", "    response_mask = response_mask * torch.cat([response_mask[:, 1:], response_mask[:, :1] * 0], 1)\n    negative_approx_kl = log_prob"], "", {}),
    ("soft", ["torch.sigmoid(temperatures * (coef_1 - 1)) * 4 / temperatures", "torch.atan(coef_1)"], "", {}),
    ("cispo", ["torch.clamp(coef_1, max=1 + epsilon_high)", "(coef_1 / (1 + coef_1 / epsilon_high))"], "", {}),
    ("sequence", ["seq_ratio = torch.exp(log_seq_ratio)", "seq_ratio = torch.sqrt(1 + log_seq_ratio**2)"], "refused", {}),
    ("unclipped_positives", ["anchored * advantages", "logprobs * advantages.abs().sqrt()"], "", {}),
]  # fmt: skip


# ---- estimators of advantages --------------------------------------------------------
def grpo_outcome(rewards, group, epsilon=1e-6, norm_adv_by_std=True):
    """Return verl's GRPO advantages by dictionaries; 0 for a single response."""
    scores, index = rewards.clone(), group.tolist()
    id2score, id2mean, id2std = defaultdict(list), {}, {}
    for i in range(len(scores)):
        id2score[index[i]].append(scores[i])
    for idx in id2score:
        if len(id2score[idx]) == 1:
            id2mean[idx], id2std[idx] = torch.tensor(0.0), torch.tensor(1.0)
        else:
            id2mean[idx] = torch.mean(torch.stack(id2score[idx]))
            id2std[idx] = torch.std(torch.stack(id2score[idx]))
    for i in range(len(scores)):
        if len(id2score[index[i]]) > 1:
            scores[i] = scores[i] - id2mean[index[i]]
            scores[i] = (
                scores[i] / (id2std[index[i]] + epsilon)
                if norm_adv_by_std
                else scores[i]
            )
        else:
            scores[i] = 0
    return scores


def rloo_outcome(rewards, group):
    """Return verl's RLOO advantages by a dictionary; 0 for a single response."""
    scores, index = rewards.clone(), group.tolist()
    id2score = defaultdict(list)
    for i in range(len(scores)):
        id2score[index[i]].append(rewards[i])
    for i in range(len(scores)):
        n = len(id2score[index[i]])
        mean = torch.stack(id2score[index[i]]).mean()
        scores[i] = scores[i] * n / (n - 1) - mean * n / (n - 1) if n > 1 else 0
    return scores


def pandas_like(rewards, group):
    """Return group_norm's advantages with the population's deviation, by numpy; 0 where
    all rewards are equal.
    """
    r, g = rewards.double().numpy(), group.numpy()
    out = np.zeros_like(r)
    for k in np.unique(g):
        x = r[g == k]
        out[g == k] = (x - x.mean()) / (x.std() + 1e-6) if np.ptp(x) > 0 else 0
    return torch.from_numpy(out).to(rewards.dtype)


def one_hot(rewards, group):
    """Return group_mean's advantages by a matrix of memberships; below 1e-12 they are
    0.
    """
    member = F.one_hot(group.unique(return_inverse=True)[1]).double()
    mean = member.T @ rewards.double() / member.sum(0)
    out = rewards.double() - member @ mean
    same = ((member * rewards.double()[:, None]).T.sum(1) / member.sum(0)).isfinite()
    assert same.all()
    return torch.where(out.abs() < 1e-12, 0, out).to(rewards.dtype)


def reinforce_plus_plus(rewards):
    return (rewards - rewards.mean()) / (rewards.var(unbiased=False).sqrt() + 1e-8)


ESTIMATORS = [
    ("grpo_outcome", [], "group_norm", {}, ""),
    ("grpo_outcome", ["norm_adv_by_std=True", "norm_adv_by_std=False"], "group_mean", {}, ""),
    ("rloo_outcome", [], "leave_one_out", {}, ""),
    ("pandas_like", [], "group_norm", {"ddof": 0}, ""),
    ("one_hot", [], "group_mean", {}, ""),
    ("reinforce_plus_plus", [], "whiten", {}, ""),
    ("grpo_outcome", ["range(len(scores)):\n        if", "range(len(scores) - 1):\n        if"], "group_norm", {}, "the last response keeps its reward"),
    ("grpo_outcome", ["torch.std(torch.stack(id2score[idx]))", "torch.std(torch.stack(id2score[idx])) ** 2"], "group_norm", {}, "the variance"),
    ("grpo_outcome", ["torch.mean(", "torch.median("], "group_norm", {}, "the median"),
    ("grpo_outcome", ["torch.mean(torch.stack(id2score[idx]))", "scores.mean()"], "group_norm", {}, "the batch's mean"),
    ("grpo_outcome", ["torch.std(torch.stack(id2score[idx]))", "scores.std()"], "group_norm", {}, "the batch's changing deviation"),
    ("grpo_outcome", ["len(id2score[idx]) == 1", "len(id2score[idx]) <= 2", "len(id2score[index[i]]) > 1", "True"], "group_norm", {}, "pairs keep their reward"),
    ("grpo_outcome", ["index = rewards.clone(), group.tolist()", "index = rewards.clone(), (group % 32).tolist()"], "group_norm", {}, "ids collide modulo 32"),
    ("grpo_outcome", ["            scores[i] = 0\n", "            pass\n"], "group_norm", {}, "a response by itself keeps its reward"),
    ("grpo_outcome", ["+ epsilon)", "* epsilon + 1)"], "group_norm", {}, "not divided by the deviation"),
    ("grpo_outcome", ["return scores", "return scores.clamp(-1.5, 1.5)"], "group_norm", {}, "clamped at 1.5"),
    ("grpo_outcome", ["return scores", "return scores / scores.abs().max().clamp(min=1)"], "group_norm", {}, "divided by the batch's largest"),
    ("rloo_outcome", ["mean * n / (n - 1)", "mean"], "leave_one_out", {}, "the mean is not of the others"),
    ("rloo_outcome", ["n / (n - 1) - mean", "n / (n + 1) - mean"], "leave_one_out", {}, "n + 1"),
    ("rloo_outcome", ["if n > 1 else 0", "if n > 1 else scores[i]"], "leave_one_out", {}, ""),
    ("pandas_like", ["x.std()", "np.abs(x).mean()"], "group_norm", {"ddof": 0}, "the mean size"),
    ("one_hot", ["/ member.sum(0)\n    out", "/ member.shape[0]\n    out"], "group_mean", {}, "divided by the batch"),
    ("reinforce_plus_plus", ["rewards - rewards.mean()", "rewards"], "whiten", {}, "the mean stays"),
    ("reinforce_plus_plus", ["rewards.var(unbiased=False).sqrt()", "rewards.var(unbiased=False)"], "whiten", {}, "the variance"),
]  # fmt: skip

# What was wrong or missing at first sight: what is said now.
CAUSES = {
    (
        "vanilla",
        "max in the dual clip",
    ): "the dual clip takes the other one of its two terms",
    ("vanilla", "ratio inverted"): "the ratio is inverted",
    ("sequence", "padded width"): "divided by the padded width",
    ("sequence", "whole batch"): "over the whole batch",
    ("grpo", "KL's exponential detached"): "has the gradient of k1, not of k3",
    (
        "grpo",
        "k1 for k3, twice as strong",
    ): "has the gradient of 0.08 k1, not of 0.04 k3",
    ("grpo", "KL to the old policy"): "the KL term (k3) is to π_old, not to π_ref",
    ("grpo", "ratio to the reference"): "the ratio is to π_ref, not to π_old",
    ("cispo", "masked beyond the cap"): "beyond the cap no gradient is left",
    ("cispo", "cap for winners alone"): "truncated only where A > 0",
    (
        "unclipped_positives",
        "losers unclipped",
    ): "the clip has no lower side where A <= 0",
    ("unclipped_positives", "branches exchanged"): "the branches are exchanged",
    ("with_engine", "inverted"): "the sampler's ratio is inverted",
    (
        "with_engine",
        "of the current policy",
    ): "the sampler's ratio is of π_θ, not of π_old",
    ("with_engine", "masked"): "its gradient is that of mis(dapo)",
    ("with_engine", "no correction"): "the sampler's ratio has no effect",
    ("with_engine", "KL to the sampler"): "0.01 k2 (to μ)",
    (
        "areal",
        "behaviour by the current policy",
    ): "the sampler's ratio is of π_θ, not of π_old",
}
