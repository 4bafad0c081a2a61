# SPDX-License-Identifier: Apache-2.0
from upref.definition import NO_DUAL_CLIP, objective
from upref.ops import clip, dual_clip, exp, inf, minimum, when, where


@objective(
    paper="hu2025reinforce++",
    eq="1, 4 and 5",
    level="token",
    agg="seq-mean-token-mean",
    adv="whiten",
    defaults={
        "eps": "0.2: hu2025reinforce++ v1, Sec. 4.2, Table 1; v9 reports none",
        "c": NO_DUAL_CLIP,
    },
    note="PPO's clip on rewards whitened over the global batch; its KL (k1) goes into the reward.",
)
def reinforce_pp(lp, lp_old, A, *, eps=0.2, c=None):
    """J = E 1/|o| Σ_t min(r A, clip(r, 1-ε, 1+ε) A),  A = (R - mean_batch) / std_batch"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, 1 - eps, 1 + eps) * A)


@reinforce_pp.with_weight
def reinforce_pp_weight(r, A, *, eps, c):
    return where(
        A > 0,
        when(r <= 1 + eps, A * r),
        when((r >= 1 - eps) & (r <= (c or inf)), A * r),
    )


@objective(
    paper="hu2025reinforce++",
    eq="1, 6, 7 and 8",
    level="token",
    agg="seq-mean-token-mean",
    adv="group_mean_whiten",
    kl="k2",
    defaults={
        "eps": "0.2: hu2025reinforce++ v1, Sec. 4.2, Table 1; v9 reports none",
        "c": NO_DUAL_CLIP,
        "beta": "0: hu2025reinforce++ adds λ E[k2] and reports no λ",
    },
    note="The variant with a group baseline, then whitened over the global batch.",
)
def reinforce_pp_baseline(lp, lp_old, A, *, eps=0.2, c=None):
    """As reinforce_pp, A = whiten(R - mean_group); minus β E[(log π_θ/π_ref)²/2]"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, 1 - eps, 1 + eps) * A)


reinforce_pp_baseline.with_weight(reinforce_pp.closed_form)
