# SPDX-License-Identifier: Apache-2.0
"""DPPO: tokens masked beyond a binary divergence between π_old and π_θ; by the paper and as verl has it."""

from typing import Any

from upref.definition import objective
from upref.ops import binary_kl, exp, minimum, sg, when, where

PAPER: dict[str, Any] = dict(
    paper="qi2026rethinking",
    level="token",
    agg="seq-mean-token-sum",
    adv="group_mean",
    note="π_old must be the rollout policy itself, not a recomputed one (Sec. 5.2). The weight reads mu = π_old(o_t).",
)
VERL = PAPER | dict(
    agg="token-mean",
    defaults={
        "delta": "0.2: verl 0.9.1 ActorConfig.clip_ratio_low and clip_ratio_high",
        "trunc": '3.0: verl 0.9.1 reads config.get("clip_ratio_c", 20.0), but ActorConfig defines clip_ratio_c = 3.0',
    },
    note="The ratio is truncated and outside the derivative: weight A min(r, C) M.",
)


@objective(
    **PAPER,
    eq="12 and 14",
    defaults={
        "delta": '0.05: qi2026rethinking App. C.1: "δ = 0.15 for TV divergence and δ = 0.05 for KL divergence", '
        "C = ∞; App. E: 0.05 with C = 5",
    },
)
def dppo_kl(lp, lp_old, A, *, delta=0.05):
    """J = E Σ_t M_t r_t A_t,  M = 0 where KL(Bern(π_old(o_t)) ‖ Bern(π_θ(o_t))) > δ on the side the update pushes to"""
    M = (binary_kl(lp, lp_old) <= delta) | (where(A > 0, lp - lp_old, lp_old - lp) <= 0)
    return when(M, exp(lp - lp_old) * A)


@dppo_kl.with_weight
def dppo_kl_weight(log_r, A, log_mu, *, delta):
    M = (binary_kl(log_mu + log_r, log_mu) <= delta) | (
        where(A > 0, log_r, -log_r) <= 0
    )
    return when(M, A * exp(log_r))


@objective(**VERL, eq="23, as coded in verl 0.9.1, loss_mode dppo_kl")
def dppo_kl_verl(lp, lp_old, A, *, delta=0.2, trunc=3.0):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t M_t sg(min(r, C)) A_t log π_θ"""
    M = (binary_kl(lp, lp_old) <= delta) | (where(A > 0, lp - lp_old, lp_old - lp) <= 0)
    return when(M, sg(minimum(exp(lp - lp_old), trunc)) * A) * lp


@dppo_kl_verl.with_weight
def dppo_kl_verl_weight(log_r, A, log_mu, *, delta, trunc):
    M = (binary_kl(log_mu + log_r, log_mu) <= delta) | (
        where(A > 0, log_r, -log_r) <= 0
    )
    return when(M, A * minimum(exp(log_r), trunc))


@objective(
    **PAPER,
    eq="12 and 13",
    defaults={
        "delta": '0.15: qi2026rethinking App. C.1: "δ = 0.15 for TV divergence and δ = 0.05 for KL divergence", '
        "C = ∞; App. E: 0.2 (LoRA: 0.15) with C = 5",
    },
)
def dppo_tv(lp, lp_old, A, *, delta=0.15):
    """J = E Σ_t M_t r_t A_t,  M = 0 where |π_θ(o_t) - π_old(o_t)| > δ on the side the update pushes to"""
    gain = exp(lp) - exp(lp_old)
    M = where(A > 0, gain, -gain) <= delta
    return when(M, exp(lp - lp_old) * A)


@dppo_tv.with_weight
def dppo_tv_weight(log_r, A, log_mu, *, delta):
    gain = exp(log_mu + log_r) - exp(log_mu)
    return when(where(A > 0, gain, -gain) <= delta, A * exp(log_r))


@objective(**VERL, eq="23, as coded in verl 0.9.1, loss_mode dppo_tv")
def dppo_tv_verl(lp, lp_old, A, *, delta=0.2, trunc=3.0):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t M_t sg(min(r, C)) A_t log π_θ"""
    gain = exp(lp) - exp(lp_old)
    M = where(A > 0, gain, -gain) <= delta
    return when(M, sg(minimum(exp(lp - lp_old), trunc)) * A) * lp


@dppo_tv_verl.with_weight
def dppo_tv_verl_weight(log_r, A, log_mu, *, delta, trunc):
    gain = exp(log_mu + log_r) - exp(log_mu)
    return when(where(A > 0, gain, -gain) <= delta, A * minimum(exp(log_r), trunc))
