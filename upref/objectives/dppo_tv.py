# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, minimum, sg, when, where


@objective(
    paper="qi2026rethinking",
    eq="12 and 13",
    level="token",
    agg="seq-mean-token-sum",
    adv="group_mean",
    defaults={
        "delta": '0.15: qi2026rethinking App. C.1: "δ = 0.15 for TV divergence and δ = 0.05 for KL divergence", '
        "C = ∞; App. E: 0.2 (LoRA: 0.15) with C = 5",
    },
    note="π_old must be the rollout policy itself, not a recomputed one (Sec. 5.2). The weight reads mu = π_old(o_t).",
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


@objective(
    paper="qi2026rethinking",
    eq="23, as coded in verl 0.9.1, loss_mode dppo_tv",
    level="token",
    agg="token-mean",
    adv="group_mean",
    defaults={
        "delta": "0.2: verl 0.9.1 ActorConfig.clip_ratio_low and clip_ratio_high",
        "trunc": '3.0: verl 0.9.1 reads config.get("clip_ratio_c", 20.0), but ActorConfig defines clip_ratio_c = 3.0',
    },
    note="The ratio is truncated and outside the derivative: weight A min(r, C) M.",
)
def dppo_tv_verl(lp, lp_old, A, *, delta=0.2, trunc=3.0):
    """J = E 1/Σ_i|o_i| Σ_t M_t sg(min(r, C)) A_t log π_θ"""
    gain = exp(lp) - exp(lp_old)
    M = where(A > 0, gain, -gain) <= delta
    return when(M, sg(minimum(exp(lp - lp_old), trunc)) * A * lp)


@dppo_tv_verl.with_weight
def dppo_tv_verl_weight(log_r, A, log_mu, *, delta, trunc):
    gain = exp(log_mu + log_r) - exp(log_mu)
    return when(where(A > 0, gain, -gain) <= delta, A * minimum(exp(log_r), trunc))
