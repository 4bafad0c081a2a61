# SPDX-License-Identifier: Apache-2.0
from upref.definition import NO_DUAL_CLIP, objective
from upref.ops import clip, dual_clip, exp, inf, minimum, when, where


@objective(
    paper="shao2024deepseekmath",
    eq="3; fan2026up Eq. 4",
    level="token",
    agg="seq-mean-token-mean",
    adv="group_norm",
    kl="k3",
    defaults={
        "eps": 'fan2026up Table A3, "Lower Clip" and "Upper Clip": 0.2; shao2024deepseekmath publishes no value',
        "c": NO_DUAL_CLIP,
        "beta": '0: fan2026up gives none; shao2024deepseekmath Sec. 4.2: "The KL coefficient is 0.04"',
    },
)
def grpo(lp, lp_old, A, *, eps=0.2, c=None):
    """J = E 1/G Σ_i 1/|o_i| Σ_t { min(r A_i, clip(r, 1-ε, 1+ε) A_i) - β D_KL(π_θ ‖ π_ref) }"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, 1 - eps, 1 + eps) * A)


@grpo.with_weight
def grpo_weight(r, A, *, eps, c):
    return where(
        A > 0,
        when(r <= 1 + eps, A * r),
        when((r >= 1 - eps) & (r <= (c or inf)), A * r),
    )
