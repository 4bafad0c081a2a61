# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, sg, where

SOURCE = 'shen2026vespo Sec. 4.1: "VESPO uses (c1,c2) = (2.0,3.0) for A>0 and (3.0,2.0) for A<0"'


@objective(
    paper="shen2026vespo",
    eq="20",
    level="sequence_product",
    agg="seq-mean",
    adv="group_mean",
    defaults={"c1_pos": SOURCE, "c2_pos": SOURCE, "c1_neg": SOURCE, "c2_neg": SOURCE},
    note="φ peaks near W = 1 and vanishes smoothly on both sides; the largest is (c1/c2)^c1 e^(c2-c1). "
    "The authors' code calls c1 k and c2 lambda, and divides by the tokens of the batch.",
)
def vespo(lp, lp_old, A, *, c1_pos=2.0, c2_pos=3.0, c1_neg=3.0, c2_neg=2.0):
    """∇J = E_{τ ~ μ} φ(W) A ∇log π(τ),  φ(W) = W^c1 e^(c2 (1-W)),  W = π(τ)/μ(τ),  c1 and c2 by the sign of A"""
    log_W = lp - lp_old
    W = exp(log_W)
    φ = where(
        A > 0,
        exp(c1_pos * log_W + c2_pos * (1 - W)),
        exp(c1_neg * log_W + c2_neg * (1 - W)),
    )
    return sg(φ) * A * lp


@vespo.with_weight
def vespo_weight(log_r, A, *, c1_pos, c2_pos, c1_neg, c2_neg):
    W = exp(log_r)
    return A * where(
        A > 0,
        exp(c2_pos * (1 - W) + c1_pos * log_r),
        exp(c2_neg * (1 - W) + c1_neg * log_r),
    )
