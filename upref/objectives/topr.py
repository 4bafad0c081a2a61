# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, minimum, sg, where


@objective(
    paper="roux2025tapered",
    eq="7 and 8",
    level="sequence_product",
    agg="seq-mean",
    adv="signed",
    note="Its positive branch is UP's. The paper's runs divide by the response's length, its formula does not.",
)
def topr(lp, lp_old, A):
    """∇J = Σ_{R>=0} μ(τ) R ∇log π(τ) + Σ_{R<0} μ(τ) [π(τ)/μ(τ)]_0^1 R ∇log π(τ),  τ a whole response"""
    S = exp(lp - lp_old)
    return where(A >= 0, A * lp, sg(minimum(S, 1)) * A * lp)


@topr.with_weight
def topr_weight(S, A):
    return where(A >= 0, A + 0 * S, A * minimum(S, 1))
