# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, when


def keep_smallest(x, among, budget):
    """True on the largest set of smallest x (in `among`) whose mean is <= budget: Algorithm 1 drops from the top.

    Tokens that tie at the cut-off go together, so that the order of the batch does not matter.
    """
    ascending = x.double().masked_fill(~among, float("inf")).flatten().sort().values
    mean = ascending.cumsum(0) / ascending.new_ones(len(ascending)).cumsum(0)
    return x < ascending.masked_fill(mean <= budget, float("inf")).min()


@objective(
    paper="zheng2025prosperity",
    eq="Algorithm 1",
    level="custom",
    agg="group-token-mean",
    adv="group_norm",
    defaults={
        "tau": '0.04: the authors: "Across all our experiments, we consistently set τ_M2 = 0.04" (project page)'
    },
    not_symbolic="it sorts the tokens of the whole batch",
    batch_coupled="which tokens are masked depends on the whole batch",
    note="Among the tokens already past π_old in the update's direction, drops the largest log² r until their mean "
    "is <= τ. The authors' code instead caps |log r| where the capped mean is τ, and masks beyond it.",
)
def m2po(lp, lp_old, A, mask, *, tau=0.04):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t M_t r_t A_t,  mean of (log r)² over the kept trust-region tokens <= τ"""
    log_r = lp - lp_old
    beyond = mask & ((A > 0) & (log_r > 0) | (A < 0) & (log_r < 0))
    return when(~beyond | keep_smallest(log_r**2, beyond, tau), exp(log_r) * A)


@m2po.with_weight
def m2po_weight(log_r, A, mask, *, tau):
    beyond = mask & ((A > 0) & (log_r > 0) | (A < 0) & (log_r < 0))
    return when(~beyond | keep_smallest(log_r**2, beyond, tau), A * exp(log_r))
