# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective


@objective(
    paper="ahmadian2024back",
    eq="Sec. 2.3, the RLOO estimator (unnumbered)",
    level="token",
    agg="seq-mean-token-sum",
    adv="leave_one_out",
    note="REINFORCE over whole responses. TRL clips a product ratio and verl a token ratio here; the paper has none.",
)
def rloo(lp, lp_old, A):
    """J = 1/k Σ_i [R_i - 1/(k-1) Σ_{j≠i} R_j] Σ_t log π_θ(o_it)"""
    return A * lp


@rloo.with_weight
def rloo_weight(r, A):
    return A + 0 * r
