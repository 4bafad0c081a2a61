# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective


@objective(
    paper="fan2026up",
    eq='Sec. 5.3, "REINFORCE (off-policy)"',
    level="token",
    agg="group-token-mean",
    adv="group_norm",
    note="The symmetric ablation: UP's unbounded branch for both signs, on samples of π_old.",
)
def reinforce_off_policy(lp, lp_old, A):
    """J = E_{o ~ π_old} 1/Σ_i|o_i| Σ_i Σ_t A_it log π_θ(o_it)"""
    return A * lp


@reinforce_off_policy.with_weight
def reinforce_off_policy_weight(r, A):
    return A + 0 * r
