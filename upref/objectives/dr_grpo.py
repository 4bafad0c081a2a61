# SPDX-License-Identifier: Apache-2.0
from upref.ops import clip, dual_clip, exp, inf, minimum, when, where
from upref.registry import objective


@objective(
    paper="liu2025understanding",
    eq="Sec. 3.2",
    level="token",
    agg="seq-mean-token-sum",
    adv="group_mean",
    kl="k3",
    defaults={
        "eps": "0.2, PPO's; fan2026up Table A3 for the whole comparison",
        "c": "None: no objective of the paper has a dual clip; App. B adds c without a value. verl: 3.0, DAPO's recipe: 10.0",
        "beta": "0: the paper's runs have no KL term",
    },
    note="GRPO without 1/|o_i| and without the standard deviation. Official code divides by a fixed length as well: "
    "aggregate(..., 'seq-mean-token-sum-norm', length=L).",
)
def dr_grpo(lp, lp_old, A, *, eps=0.2, c=None):
    """J = E 1/G Σ_i Σ_t min(r A_i, clip(r, 1-ε, 1+ε) A_i),  A_i = R_i - mean(R)"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, 1 - eps, 1 + eps) * A)


@dr_grpo.with_weight
def dr_grpo(r, A, *, eps, c):
    return where(A > 0, when(r <= 1 + eps, A * r), when((r >= 1 - eps) & (r <= (c or inf)), A * r))
