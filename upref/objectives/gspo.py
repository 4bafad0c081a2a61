# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import clip, exp, minimum, when, where


@objective(
    paper="zheng2025group",
    eq="5; fan2026up Eq. 6",
    level="sequence_mean",
    agg="seq-mean",
    adv="group_norm",
    defaults={
        "eps_low": 'fan2026up Table A1, "Lower Clip": 3e-4; zheng2025group Sec. 5.1: '
        '"the left and right clipping ranges in Equation (5) to 3e-4 and 4e-4, respectively"',
        "eps_high": 'fan2026up Table A1, "Upper Clip": 4e-4; zheng2025group Sec. 5.1: the same sentence',
    },
    note="The same function as DAPO's, handed mean_t lp instead of lp.",
)
def gspo(lp, lp_old, A, *, eps_low=3e-4, eps_high=4e-4):
    """J = E 1/G Σ_i min(s_i A_i, clip(s_i, 1-ε_low, 1+ε_high) A_i),  s = (π_θ(o)/π_old(o))^(1/|o|)"""
    s = exp(lp - lp_old)
    return minimum(s * A, clip(s, 1 - eps_low, 1 + eps_high) * A)


@gspo.with_weight
def gspo_weight(s, A, *, eps_low, eps_high):
    return where(A > 0, when(s <= 1 + eps_high, A * s), when(s >= 1 - eps_low, A * s))
