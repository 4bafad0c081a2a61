# SPDX-License-Identifier: Apache-2.0
"""The two of the entropy mechanism: both look for the tokens whose log-probability and advantage vary together."""

from upref.definition import objective
from upref.ops import clip, exp, inf, minimum, when, where


def covariance(lp, A, mask):
    """(A - mean A) (lp - mean lp), the means over the batch's tokens, as constants."""
    n = mask.sum()
    centered = lambda x: (
        where(mask, x, 0).double() - where(mask, x, 0).double().sum() / n
    )
    return centered(A.expand_as(mask)) * centered(lp.detach())


def cut(scores, share, mask, descending):
    """The score of the last of that share of the batch's tokens, one at least, in this order."""
    last = (share * mask.sum()).long().clamp(1, scores.numel()) - 1
    return scores.flatten().sort(descending=descending).values.gather(0, last.view(1))


def largest(cov, mask, share):
    """True on the tokens of the largest covariance."""
    return mask & (
        cov >= cut(cov.masked_fill(~mask, -inf), share, mask, descending=True)
    )


def drawn(cov, mask, among, share, seed):
    """True on that share of the batch's tokens, drawn from `among`. The seed decides which; the order of rows does not."""
    rank = cov.masked_fill(~among, inf).flatten().argsort().argsort().view_as(cov)
    # an odd factor permutes, the seed turns
    score = ((rank + 1) * 2654435761 + int(seed) * 1640531527) % 2**32
    score = score.masked_fill(~among, 2**32)
    return among & (score <= cut(score, share, mask, descending=False))


@objective(
    paper="cui2025entropy",
    eq="KL-Cov, as coded by its authors and in verl 0.9.1, loss_mode kl_cov",
    level="custom",
    agg="token-mean",
    adv="group_norm",
    known_from="the authors' core_algos.py, verl's kl_cov",
    defaults={
        "share": "0.0002: verl 0.9.1 PolicyLossConfig.kl_cov_ratio; the authors' 32b_kl_cov.sh has it too, "
        "their 7b_kl_cov.sh has 0.002",
        "coef": "1.0: the authors' recipe/dapo/7b_kl_cov.sh, ppo_kl_coef=1; verl's PolicyLossConfig has 0.1",
    },
    not_symbolic="it sorts the tokens of the whole batch",
    batch_coupled="which tokens are penalized depends on the whole batch",
    scale_exception="the penalty |log r| does not grow with A",
    note="No clip at all. The penalty has no gradient at r = 1, so that it is inert on policy. Ties go together.",
)
def kl_cov(lp, lp_old, A, mask, *, share=0.0002, coef=1.0):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t { r A - coef |log r| [Cov_t among the largest] },  Cov_t = (A - Ā)(log π_θ - mean)"""
    penalized = largest(covariance(lp, A, mask), mask, share)
    return exp(lp - lp_old) * A - when(penalized, coef * abs(lp - lp_old))


@kl_cov.with_weight
def kl_cov_weight(log_r, A, log_mu, mask, *, share, coef):
    penalized = largest(covariance(log_mu + log_r, A, mask), mask, share)
    return A * exp(log_r) - when(penalized, coef * log_r.sign())


@objective(
    paper="cui2025entropy",
    eq="Clip-Cov, as coded by its authors and in verl 0.9.1, loss_mode clip_cov",
    level="custom",
    agg="token-mean",
    adv="group_norm",
    known_from="the authors' core_algos.py, verl's clip_cov",
    defaults={
        "share": "0.0002: verl 0.9.1 PolicyLossConfig.clip_cov_ratio",
        "low": "1.0: verl 0.9.1 PolicyLossConfig.clip_cov_lb",
        "high": "5.0: verl 0.9.1 PolicyLossConfig.clip_cov_ub",
        "eps_low": "0.2: verl 0.9.1 ActorConfig.clip_ratio_low; the authors' 7b_clip_cov.sh has 1",
        "eps_high": "0.2: verl 0.9.1 ActorConfig.clip_ratio_high; the authors' 7b_clip_cov.sh has 1",
        "seed": "0: the code draws anew at each call (torch.randperm); here a seed makes it a function",
    },
    not_symbolic="it draws among the tokens of the whole batch",
    batch_coupled="which tokens are dropped depends on the whole batch",
    on_policy_exception="a few tokens are dropped at random",
    scale_exception="the band of covariances from which tokens are drawn does not grow with A",
)
def clip_cov(
    lp,
    lp_old,
    A,
    mask,
    *,
    share=0.0002,
    low=1.0,
    high=5.0,
    eps_low=0.2,
    eps_high=0.2,
    seed=0,
):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t min(r A, clip(r, 1-ε_low, 1+ε_high) A), 0 on tokens drawn where low < Cov_t < high"""
    r = exp(lp - lp_old)
    unclipped = where(A > 0, r <= 1 + eps_high, r >= 1 - eps_low)
    cov = covariance(lp, A, mask)
    dropped = drawn(
        cov, mask, mask & unclipped & (cov > low) & (cov < high), share, seed
    )
    return when(~dropped, minimum(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A))


@clip_cov.with_weight
def clip_cov_weight(
    log_r, A, log_mu, mask, *, share, low, high, eps_low, eps_high, seed
):
    r = exp(log_r)
    alive = where(A > 0, r <= 1 + eps_high, r >= 1 - eps_low)
    cov = covariance(log_mu + log_r, A, mask)
    dropped = drawn(cov, mask, mask & alive & (cov > low) & (cov < high), share, seed)
    return when(alive & ~dropped, A * r)
