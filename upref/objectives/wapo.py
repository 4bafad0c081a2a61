# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, minimum, when


@objective(
    paper="yss2026gradient",
    eq="as coded by its authors, loss_type wapo",
    level="token",
    agg="seq-mean-token-sum",
    adv="group_mean",
    known_from="the paper's abstract, the authors' README and trainer.py",
    defaults={"eps": "9.0: the authors' README, clip_eps = 9.0"},
    on_policy_exception="responses that are not winners are dropped",
    note="Winners alone, with PPO's upper clip. UP does the reverse: it unclips the "
    "winners and keeps the losers. The authors also divide by a fixed length: "
    "aggregate(..., 'seq-mean-token-sum-norm', length=L).",
)
def wapo(lp, lp_old, A, *, eps=9.0):
    """J = E 1/G Σ_i Σ_t min(r, 1+ε) A_i [A_i > 0],  A_i = R_i - mean(R)"""
    return when(A > 0, minimum(exp(lp - lp_old), 1 + eps) * A)


@wapo.with_weight
def wapo_weight(r, A, *, eps):
    return when((A > 0) & (r <= 1 + eps), A * r)
