# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import clip, exp, minimum, when, where


@objective(
    paper="zhu2025surprising",
    eq="9",
    level="token",
    agg="seq-mean-token-sum",
    adv="signed",
    defaults={
        "lam": '0.1: zhu2025surprising Sec. 5; its README: "the λ in the paper, recommended value is 0.1"'
    },
    on_policy_exception="positive responses weigh lam by definition",
    note="A = +1 or -1, no baseline, no ratio. lam = 1 is REINFORCE, lam -> 0 negative-sample reinforcement.",
)
def w_reinforce(lp, lp_old, A, *, lam=0.1):
    """J = λ E_{R=+1} log π_θ(o) - E_{R=-1} log π_θ(o): Eq. 9's gradient as a surrogate"""
    return where(A > 0, lam * A * lp, A * lp)


@w_reinforce.with_weight
def w_reinforce_weight(r, A, *, lam):
    return where(A > 0, lam * A, A) + 0 * r


@objective(
    paper="zhu2025surprising",
    eq="9, as coded by its authors (advantage=weighted)",
    level="token",
    agg="token-mean",
    adv="signed",
    defaults={
        "lam": "0.1: the paper's; the code's ppo_trainer.yaml: \"positive_advantage_weight: 1\"",
        "eps": '0.2: zhu2025surprising App. D.1; the code\'s ppo_trainer.yaml: "clip_ratio: 0.2"',
    },
    on_policy_exception="positive responses weigh lam by definition",
    note="The runs used PPO's clip around the same weighting.",
)
def w_reinforce_code(lp, lp_old, A, *, lam=0.1, eps=0.2):
    """J = 1/Σ_i|o_i| Σ_i Σ_t min(r a, clip(r, 1-ε, 1+ε) a),  a = λA if A > 0 else A"""
    r, a = exp(lp - lp_old), where(A > 0, lam * A, A)
    return minimum(r * a, clip(r, 1 - eps, 1 + eps) * a)


@w_reinforce_code.with_weight
def w_reinforce_code_weight(r, A, *, lam, eps):
    return where(A > 0, when(r <= 1 + eps, lam * A * r), when(r >= 1 - eps, A * r))
