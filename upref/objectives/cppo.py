# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, maximum, minimum, when, where


def within_budget(gain, mask, delta, budget, floor):
    """I_t of Eq. 10: w_t D_t <= min(δ, δ + δ_b W_{t-1} - S_{t-1}), D_t = |gain|; w_t falls from 1 to the floor."""
    n = mask.sum(-1)[..., None]
    w = when(mask, 1 - (1 - floor) * (mask.cumsum(-1) - 1) / maximum(n - 1, 1))
    drift = w * abs(where(mask, gain, 0))
    S, W = drift.cumsum(-1) - drift, w.cumsum(-1) - w  # before this token
    return drift <= minimum(delta, delta + budget * W - S)


@objective(
    paper="mao2026beyond",
    eq="8 to 11",
    level="custom",
    agg="seq-mean-token-sum",
    adv="group_norm",
    defaults={
        "delta": '0.15: mao2026beyond Sec. 4.1: "δ = 0.15 for the dense models and δ = 0.2 for the 30B-A3B MoE model"',
        "budget": '0.015: mao2026beyond Sec. 4.1, δ_b: "For the post-trained reasoning model ... fixed δb = 0.015"',
        "floor": '0.8: mao2026beyond Sec. 4.1: "CPPO uses wmin = 0.8 throughout"',
    },
    not_symbolic="its budget is a running sum over the response",
    note="DPPO whose bound is tighter early in a response, and once its prefix has drifted. D is |π_θ - π_old| of the "
    "sampled token (Fig. 6); the runs take 20 tokens, and on base models δ_b from the response's 90 % quantile. Another "
    "method of this name, Completion Pruning Policy Optimization (arXiv 2503.22342), drops completions.",
)
def cppo(lp, lp_old, A, mask, *, delta=0.15, budget=0.015, floor=0.8):
    """J = E Σ_t M_t r_t A_t,  M_t = [A_t (r_t - 1) <= 0 or w_t D_t <= min(δ, δ + δ_b W_{t-1} - S_{t-1})]"""
    inside = within_budget(exp(lp) - exp(lp_old), mask, delta, budget, floor)
    return when((A * (lp - lp_old) <= 0) | inside, exp(lp - lp_old) * A)


@cppo.with_weight
def cppo_weight(log_r, A, log_mu, mask, *, delta, budget, floor):
    inside = within_budget(
        exp(log_mu + log_r) - exp(log_mu), mask, delta, budget, floor
    )
    return when((A * log_r <= 0) | inside, A * exp(log_r))
