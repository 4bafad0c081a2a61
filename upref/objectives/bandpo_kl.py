# SPDX-License-Identifier: Apache-2.0
from upref.ops import clip, dual_clip, exp, expm1, inf, log, minimum, when, where
from upref.registry import objective


def band(log_mu, delta):
    """The roots r, below and above 1, of KL(Bern(mu) ‖ Bern(mu r)) = delta; r <= 1/mu. Bisected in log r."""
    mu, q_old = exp(log_mu), -expm1(log_mu)

    def divergence(log_r):
        rest = q_old * (log(-expm1(log_mu + log_r)) - log(q_old))
        return -mu * log_r - when(q_old > 0, rest)

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
    eq="Theorem 1, as its code cites it (paper not read here)",
    level="token",
    agg="seq-mean-token-mean",
    adv="group_norm",
    kl="k3",
    defaults={
        "delta": "0.05: the authors' scripts, band_radius_delta=0.05; their ActorConfig has 0.1",
        "c": "None: not in the definition; the authors' scripts clip dually at 10",
        "beta": "0: the authors' scripts add k3 (low_var_kl), kl_loss_coef=0.001",
    },
    unread="its bounds come from a bisection",
    note="PPO's clip, bounds from a ball of KL(π_old ‖ π_θ) of the binary collapse (o_t or not), by bisection. "
    "The authors' scripts also cap the upper bound at 10 (upper_bound_max) and dual-clip at 10; neither is here.",
)
def bandpo_kl(lp, lp_old, A, *, delta=0.05, c=None):
    """J = E 1/G Σ_i 1/|o_i| Σ_t min(r A, clip(r, low(mu), high(mu)) A),  mu f(r) + (1-mu) f((1-mu r)/(1-mu)) = δ"""
    low, high = band(lp_old, delta)
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, low, high) * A)


@bandpo_kl.with_weight
def bandpo_kl(r, A, log_mu, *, delta, c):
    low, high = band(log_mu, delta)
    return where(A > 0, when(r <= high, A * r), when((r >= low) & (r <= (c or inf)), A * r))
