# SPDX-License-Identifier: Apache-2.0
from upref.definition import NO_DUAL_CLIP, objective
from upref.ops import dual_clip, exp, inf, maximum, minimum, when, where


@objective(
    paper="fan2026up",
    eq='Sec. 5.3, "DAPO (ε_high = ∞)"',
    level="token",
    agg="group-token-mean",
    adv="group_norm",
    defaults={
        "eps_low": 'fan2026up Table A1, "Lower Clip" of DAPO: 0.2',
        "c": NO_DUAL_CLIP,
    },
    note="The ablation that keeps π_old in the ratio: the weight of a positive token grows with r, up to 1/π_old.",
)
def dapo_no_upper_clip(lp, lp_old, A, *, eps_low=0.2, c=None):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t min(r A_it, clip(r, 1-ε_low, ∞) A_it)"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, maximum(r, 1 - eps_low) * A)


@dapo_no_upper_clip.with_weight
def dapo_no_upper_clip_weight(r, A, *, eps_low, c):
    return where(A > 0, A * r, when((r >= 1 - eps_low) & (r <= (c or inf)), A * r))
