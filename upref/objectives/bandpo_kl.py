# SPDX-License-Identifier: Apache-2.0
from upref.ops import clip, exp, log, minimum, when, where
from upref.registry import objective


def band(log_mu, delta):
    """The roots r, below and above 1, of KL(Bern(mu) ‖ Bern(mu r)) = delta; r <= 1/mu. Bisected in log r."""
    mu = exp(log_mu)

    def divergence(log_r):
        return -mu * log_r - (1 - mu) * log((1 - mu * exp(log_r)) / (1 - mu))

    def bisect(outside):
        inside = 0 * mu
        for _ in range(60):
            middle = (inside + outside) / 2
            within = divergence(middle) <= delta
            inside, outside = where(within, middle, inside), where(within, outside, middle)
        return exp(inside)

    return bisect(0 * mu - 800), bisect(-log_mu)  # e^-800 is 0 in every dtype



@objective(
    paper="li2026bandpo",
    eq="the band of its code (Theorem 1)",
    level="token",
    agg="seq-mean-token-mean",
    adv="group_norm",
    kl="k3",
    defaults={
        "delta": "0.05: the authors' scripts; their config default is 0.1",
        "beta": "0: the authors' scripts add k3 with 0.001",
    },
    unread="its bounds come from a bisection",
    note="PPO's clip with bounds from an f-divergence ball, f(u) = -log u + u - 1: KL(π_old ‖ π_θ) of the binary collapse, by bisection. The weight reads mu = π_old(o_t).",
)
def bandpo_kl(lp, lp_old, A, *, delta=0.05):
    """J = E 1/G Σ_i 1/|o_i| Σ_t min(r A, clip(r, low(mu), high(mu)) A),  mu f(r) + (1-mu) f((1-mu r)/(1-mu)) = δ"""
    low, high = band(lp_old, delta)
    r = exp(lp - lp_old)
    return minimum(r * A, clip(r, low, high) * A)


@bandpo_kl.with_weight
def bandpo_kl(r, A, log_mu, *, delta):
    low, high = band(log_mu, delta)
    return where(A > 0, when(r <= high, A * r), when(r >= low, A * r))
