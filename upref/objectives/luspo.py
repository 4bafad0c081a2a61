# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import clip, exp, minimum, when, where


@objective(
    paper="liu2026length",
    eq="Sec. 4: GSPO's objective times |o_i|",
    level="sequence_mean",
    agg="seq-mean-token-sum",
    adv="group_norm",
    known_from="the paper's abstract, TRL's loss_type luspo and paper_index.md",
    defaults={
        "eps_low": "0.002: TRL's paper_index.md, epsilon=2e-3, section 5.1 of the paper",
        "eps_high": "0.0025: the same, epsilon_high=2.5e-3",
    },
    note="GSPO with the response's term on each of its |o_i| tokens, so that tokens of long responses weigh as much.",
)
def luspo(lp, lp_old, A, *, eps_low=2e-3, eps_high=2.5e-3):
    """J = E 1/G Σ_i |o_i| min(s_i A_i, clip(s_i, 1-ε_low, 1+ε_high) A_i),  s = (π_θ(o)/π_old(o))^(1/|o|)"""
    s = exp(lp - lp_old)
    return minimum(s * A, clip(s, 1 - eps_low, 1 + eps_high) * A)


@luspo.with_weight
def luspo_weight(s, A, *, eps_low, eps_high):
    return where(A > 0, when(s <= 1 + eps_high, A * s), when(s >= 1 - eps_low, A * s))
