# SPDX-License-Identifier: Apache-2.0
from upref.definition import NO_DUAL_CLIP, objective
from upref.ops import dual_clip, exp, inf, maximum, minimum, sg, when, where

DEFAULTS = {
    "eps": 'fan2026up Table A3, "Lower Clip" of UP-GRPO: 0.2, "Upper Clip": "-"',
    "c": NO_DUAL_CLIP,
    "beta": "0: the paper prints -β D_KL in both branches (its prose says negative ones) and gives no β",
}


@objective(
    paper="fan2026up",
    eq="15",
    level="token",
    agg="seq-mean-token-mean",
    adv="group_norm",
    is_up=True,
    kl="k3",
    defaults=DEFAULTS,
    note="Eq. 15 prints 1+ε, which is inert for A <= 0.",
)
def up_grpo(lp, lp_old, A, *, eps=0.2, c=None):
    """J = E 1/G Σ_i 1/|o_i| Σ_t { A_i log π_θ if A_i > 0;  min(r A_i, clip(r, 1-ε, ∞) A_i) if A_i <= 0 } - β D_KL"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return where(A > 0, A * lp, minimum(r * A, maximum(r, 1 - eps) * A))


@up_grpo.with_weight
def up_grpo_weight(r, A, *, eps, c):
    return where(A > 0, A, when((r >= 1 - eps) & (r <= (c or inf)), A * r))


@objective(
    paper="fan2026up",
    eq="12, in Eq. 15",
    level="token",
    agg="seq-mean-token-mean",
    adv="group_norm",
    is_up=True,
    kl="k3",
    defaults=DEFAULTS,
    note="The self-anchored form: gradient of up_grpo, but not its value nor its Hessian.",
)
def up_grpo_anchored(lp, lp_old, A, *, eps=0.2, c=None):
    """As up_grpo, with π_θ/sg(π_θ) in place of log π_θ."""
    r = dual_clip(exp(lp - lp_old), A, c)
    return where(A > 0, A * exp(lp - sg(lp)), minimum(r * A, maximum(r, 1 - eps) * A))


up_grpo_anchored.with_weight(up_grpo.closed_form)


@objective(
    paper="fan2026up",
    eq="15, as coded in verl pull request 7022",
    level="token",
    agg="token-mean",
    adv="group_norm",
    is_up=True,
    known_from="the pull request's description and a public copy of its compute_policy_loss_up",
    defaults={
        "eps": "0.2: verl's ActorConfig.clip_ratio",
        "c": "3.0: verl's ActorConfig.clip_ratio_c, which verl's vanilla loss always applies",
    },
    note="up_grpo_anchored with a dual clip and verl's default aggregation; the KL term is verl's own.",
)
def up_grpo_verl(lp, lp_old, A, *, eps=0.2, c=3.0):
    """As up_grpo_anchored, 1/Σ_i|o_i| Σ_i Σ_t of it, and no gradient above r = c where A < 0"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return where(A > 0, A * exp(lp - sg(lp)), minimum(r * A, maximum(r, 1 - eps) * A))


up_grpo_verl.with_weight(up_grpo.closed_form)
