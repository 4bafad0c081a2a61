# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, sigmoid, where


@objective(
    paper="gao2025soft",
    eq="5 and 6",
    known_from="verl's and TRL's code, and public notes that print both equations",
    level="token",
    agg="seq-mean-token-mean",
    adv="group_norm",
    defaults={
        "tau_pos": "1.0: gao2025soft, as TRL's paper_index.md and verl's ActorConfig have it",
        "tau_neg": "1.05: the same",
    },
    note="A soft gate: the weight is A at r = 1, largest near r = 2, then decays, never 0. J(r = 1) = 2A/τ, not A.",
)
def sapo(lp, lp_old, A, *, tau_pos=1.0, tau_neg=1.05):
    """J = E 1/G Σ_i 1/|o_i| Σ_t f(r) A_i,  f(r) = (4/τ) σ(τ(r-1)),  τ = τ_pos if A > 0 else τ_neg"""
    x = exp(lp - lp_old) - 1
    # σ = 1 - closed: closed has the digits where σ rounds to 1
    closed = sigmoid(where(A > 0, -tau_pos * x, -tau_neg * x))
    return where(A > 0, 4 / tau_pos * A, 4 / tau_neg * A) * (1 - closed)


@sapo.with_weight
def sapo_weight(r, A, *, tau_pos, tau_neg):
    return A * r * where(A > 0, slope(r, tau_pos), slope(r, tau_neg))


def slope(r, tau):
    """f'(r) of f(r) = (4/τ) σ(τ(r-1))."""
    return 4 * sigmoid(tau * (r - 1)) * sigmoid(-tau * (r - 1))
