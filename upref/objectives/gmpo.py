# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, maximum, mean_t, minimum, when, where


@objective(
    paper="zhao2025geometric",
    eq="4",
    level="custom",
    agg="seq-mean",
    adv="group_norm",
    defaults={
        "eps": '0.4: zhao2025geometric Sec. 3: "(ε_low, ε_high) in Equation 4 to (e^-0.4, e^0.4)"'
    },
    note="A clipped token loses its own gradient, but goes on scaling the others' through the geometric mean.",
)
def gmpo(lp, lp_old, A, mask, *, eps=0.4):
    """J = E 1/G Σ_i A_i (Π_t min(r^σ, clip(r^σ, e^-ε, e^ε))^σ)^(1/|o_i|),  σ = sgn A_i"""
    log_r = lp - lp_old
    clipped = where(A > 0, minimum(log_r, eps), maximum(log_r, -eps))
    return A[..., 0] * exp(mean_t(clipped, mask))


@gmpo.with_weight
def gmpo_weight(log_r, A, mask, *, eps):
    g = exp(mean_t(where(A > 0, minimum(log_r, eps), maximum(log_r, -eps)), mask))
    share = A * (g / mask.sum(-1))[..., None]
    return where(A > 0, when(log_r <= eps, share), when(log_r >= -eps, share))
