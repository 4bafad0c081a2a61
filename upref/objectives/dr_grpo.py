# SPDX-License-Identifier: Apache-2.0
from upref.definition import NO_DUAL_CLIP, objective
from upref.ops import clip, dual_clip, exp, inf, minimum, when, where


@objective(
    paper="liu2025understanding",
    eq="Sec. 3.2: Eq. 3 without 1/|o_i| and std",
    level="token",
    agg="seq-mean-token-sum",
    adv="group_mean",
    kl="k3",
    defaults={
        "eps": '0.2: liu2025understanding Table 6: "Policy clipping parameter 0.2"',
        "c": NO_DUAL_CLIP,
        "beta": '0: liu2025understanding Sec. 3: "We will assume β = 0 throughout this paper"',
    },
    note="GRPO without 1/|o_i| and without the standard deviation. Official code divides by a fixed length as well: "
    "aggregate(..., 'seq-mean-token-sum-norm', length=L).",
)
def dr_grpo(lp, lp_old, A, *, eps=0.2, c=None):
    """J = E 1/G Σ_i Σ_t min(r A_i, clip(r, 1-ε, 1+ε) A_i),  A_i = R_i - mean(R)"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, 1 - eps, 1 + eps) * A)


@dr_grpo.with_weight
def dr_grpo_weight(r, A, *, eps, c):
    return where(
        A > 0,
        when(r <= 1 + eps, A * r),
        when((r >= 1 - eps) & (r <= (c or inf)), A * r),
    )
