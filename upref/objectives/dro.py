# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective


@objective(
    paper="richemond2024offline",
    eq="as coded in verl, loss_mode dro",
    level="token",
    agg="token-mean",
    adv="reward",
    known_from="verl's compute_policy_loss_dro and docs/algo/dro.md, which cite no paper",
    defaults={
        "tau": "0.1: twinkle's dro_beta=0.1; verl's policy_loss.dro_beta has no default and must be set"
    },
    scale_exception="the penalty on log² r does not grow with A",
    note="A token rests at r = e^(A/τ). verl requires advantages that fit its soft formulation and computes none.",
)
def dro(lp, lp_old, A, *, tau=0.1):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t { A log π_θ - τ/2 (log r)² }"""
    return A * lp - tau / 2 * (lp - lp_old) ** 2


@dro.with_weight
def dro_weight(log_r, A, *, tau):
    return A - tau * log_r
