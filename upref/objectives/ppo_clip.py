# SPDX-License-Identifier: Apache-2.0
from upref.definition import NO_DUAL_CLIP, objective
from upref.ops import clip, dual_clip, exp, inf, minimum, when, where


@objective(
    paper="schulman2017proximal",
    eq="7",
    level="token",
    agg="token-mean",
    adv="whiten",
    defaults={
        "eps": 'schulman2017proximal Sec. 3: "where epsilon is a hyperparameter, say, ε = 0.2"',
        "c": NO_DUAL_CLIP,
    },
    note="The paper's advantage is GAE, from a critic. Here each response has one reward, and `whiten` takes its place.",
)
def ppo_clip(lp, lp_old, A, *, eps=0.2, c=None):
    """J = Ê_t min(r_t A_t, clip(r_t, 1-ε, 1+ε) A_t)"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, 1 - eps, 1 + eps) * A)


@ppo_clip.with_weight
def ppo_clip_weight(r, A, *, eps, c):
    return where(
        A > 0,
        when(r <= 1 + eps, A * r),
        when((r >= 1 - eps) & (r <= (c or inf)), A * r),
    )
