# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import clip, exp, minimum, sg


@objective(
    paper="chen2025minimax",
    eq="4 and 5",
    level="token",
    agg="group-token-mean",
    adv="group_norm",
    defaults={
        "eps_high": '4.0 (weights up to 5): chen2025minimax Sec. 3.1 "only tuned" it and prints no value; '
        '5 is the truncation of qi2026rethinking App. E, "C = 5 by default"',
    },
    note="The paper sets ε_low so large that its floor is inert: only the upper side is clipped. No weight is ever 0.",
)
def cispo(lp, lp_old, A, *, eps_high=4.0):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t sg(min(r, 1+ε_high)) A_i log π_θ"""
    return sg(minimum(exp(lp - lp_old), 1 + eps_high)) * A * lp


@cispo.with_weight
def cispo_weight(r, A, *, eps_high):
    return A * minimum(r, 1 + eps_high)


@objective(
    paper="chen2025minimax",
    eq="as coded in verl 0.9.1, loss_mode cispo",
    level="token",
    agg="group-token-mean",
    adv="group_norm",
    defaults={
        "eps_low": "verl 0.9.1 ActorConfig.clip_ratio_low: 0.2; its example sets 10 to make the floor inert",
        "eps_high": "verl 0.9.1 ActorConfig.clip_ratio_high: 0.2",
    },
    note="Two-sided: also the small weights are lifted. "
    "Without group ids the whole batch counts as one group, which is what verl computes.",
)
def cispo_verl(lp, lp_old, A, *, eps_low=0.2, eps_high=0.2):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t sg(clip(r, 1-ε_low, 1+ε_high)) A_i log π_θ"""
    return sg(clip(exp(lp - lp_old), 1 - eps_low, 1 + eps_high)) * A * lp


@cispo_verl.with_weight
def cispo_verl_weight(r, A, *, eps_low, eps_high):
    return A * clip(r, 1 - eps_low, 1 + eps_high)
