# SPDX-License-Identifier: Apache-2.0
from upref.definition import NO_DUAL_CLIP, objective
from upref.ops import clip, dual_clip, exp, inf, minimum, when, where


@objective(
    paper="yu2025dapo",
    eq="8",
    level="token",
    agg="group-token-mean",
    adv="group_norm",
    defaults={
        "eps_low": 'fan2026up Table A1, "Lower Clip": 0.2; yu2025dapo Sec. 4.1: "the clipping parameter ε_low to 0.2"',
        "eps_high": 'fan2026up Table A1, "Upper Clip": 0.28; yu2025dapo Sec. 4.1: "and ε_high to 0.28"',
        "c": NO_DUAL_CLIP,
    },
    note="Without group ids the whole batch counts as one group, which is what DAPO's code, verl and TRL compute.",
)
def dapo(lp, lp_old, A, *, eps_low=0.2, eps_high=0.28, c=None):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t min(r A_it, clip(r, 1-ε_low, 1+ε_high) A_it)"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A)


@dapo.with_weight
def dapo_weight(r, A, *, eps_low, eps_high, c):
    return where(
        A > 0,
        when(r <= 1 + eps_high, A * r),
        when((r >= 1 - eps_low) & (r <= (c or inf)), A * r),
    )
