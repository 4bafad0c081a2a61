# SPDX-License-Identifier: Apache-2.0
from upref.ops import exp, maximum, minimum, when, where, clip
from upref.registry import objective


@objective(
    paper="li2026bandpo",
    eq="the band of its code (Proposition 4)",
    level="token",
    agg="seq-mean-token-mean",
    adv="group_norm",
    kl="k3",
    defaults={
        "delta": "0.05: the authors' scripts; their config default is 0.1",
        "beta": "0: the authors' scripts add k3 with 0.001",
    },
    note="PPO's clip with bounds from an f-divergence ball, f(u) = |u-1|/2: closed form r = 1 ± δ/mu. The weight reads mu = π_old(o_t).",
)
def bandpo_tv(lp, lp_old, A, *, delta=0.05):
    """J = E 1/G Σ_i 1/|o_i| Σ_t min(r A, clip(r, low(mu), high(mu)) A),  mu f(r) + (1-mu) f((1-mu r)/(1-mu)) = δ"""
    mu = exp(lp_old)
    low, high = maximum(1 - delta / mu, 0), minimum(1 + delta / mu, 1 / mu)
    r = exp(lp - lp_old)
    return minimum(r * A, clip(r, low, high) * A)


@bandpo_tv.with_weight
def bandpo_tv(r, A, mu, *, delta):
    low, high = maximum(1 - delta / mu, 0), minimum(1 + delta / mu, 1 / mu)
    return where(A > 0, when(r <= high, A * r), when(r >= low, A * r))
