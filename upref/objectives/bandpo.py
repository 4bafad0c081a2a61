# SPDX-License-Identifier: Apache-2.0
"""BandPO: PPO's clip with bounds that depend on π_old(o_t), from a ball of each of three divergences."""

from typing import Any

from upref.definition import objective
from upref.ops import (
    clip,
    dual_clip,
    exp,
    expm1,
    inf,
    log,
    maximum,
    minimum,
    sqrt,
    when,
    where,
)

BAND: dict[str, Any] = dict(
    paper="li2026bandpo",
    known_from="the authors' code and scripts",
    level="token",
    agg="seq-mean-token-mean",
    adv="group_norm",
    kl="k3",
    defaults={
        "delta": "0.05: the authors' scripts, band_radius_delta=0.05; their ActorConfig has 0.1",
        "c": "None: not in the definition; the authors' scripts clip dually at 10",
        "beta": "0: the authors' scripts add k3 (low_var_kl), kl_loss_coef=0.001",
    },
)
SCRIPTS = "The authors' scripts also cap the upper bound at 10 (upper_bound_max) and dual-clip at 10; neither is here."


def below(log_mu, log_q, delta):
    """log(p / mu) where KL(Bern(mu) ‖ Bern(p)) = delta and p < mu; q = 1 - mu.

    By Newton's method in x = log(p / mu), in which KL is convex: begun where KL is too large, it only comes nearer. It
    begins at the nearer of two such x, from KL >= -mu x + q log q and KL >= (mu - p)² max(1 / (2 mu), 2); KL <= -x.
    """
    mu, q = exp(log_mu), exp(log_q)
    rest = lambda log_1_p: when(q > 0, q * (log_1_p - log_q))
    within = lambda x: clip(x, -800, -delta)  # e^-800 is 0 in every dtype
    near = 1 - sqrt(delta * minimum(2 / mu, 1 / (2 * mu * mu)))
    x = within(maximum(-(delta + rest(0)) / mu, log(maximum(near, 1e-300))))
    for _ in range(8):  # 5 reach the last digit at the default delta, 7 at 1e-8
        left = -expm1(log_mu + x)  # 1 - p
        x = within(x - (-mu * x - rest(log(left)) - delta) * left / (mu * expm1(x)))
    return x


def band(log_mu, delta):
    """The roots r, below and above 1, of KL(Bern(mu) ‖ Bern(mu r)) = delta; r <= 1/mu."""
    log_q = log(-expm1(log_mu))
    # p is above mu where 1 - p is below 1 - mu
    q_low = log_q + below(log_q, log_mu, delta)
    return exp(below(log_mu, log_q, delta)), exp(log(-expm1(q_low)) - log_mu)


@objective(
    **BAND,
    eq="Theorem 1, as its code cites it",
    not_symbolic="its bounds are found by Newton's method",
    note="PPO's clip, bounds from a ball of KL(π_old ‖ π_θ) of the binary collapse (o_t or not). "
    + SCRIPTS,
)
def bandpo_kl(lp, lp_old, A, *, delta=0.05, c=None):
    """J = E 1/G Σ_i 1/|o_i| Σ_t min(r A, clip(r, low, high) A),  mu f(r) + (1-mu) f((1-mu r)/(1-mu)) = δ, f(u) = -log u"""
    low, high = band(lp_old, delta)
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, low, high) * A)


@bandpo_kl.with_weight
def bandpo_kl_weight(r, A, log_mu, *, delta, c):
    low, high = band(log_mu, delta)
    return where(
        A > 0, when(r <= high, A * r), when((r >= low) & (r <= (c or inf)), A * r)
    )


@objective(
    **BAND,
    eq="Proposition 4, as its code cites it",
    note="PPO's clip, bounds from an f-divergence ball, f(u) = (u-1)²: closed form r = 1 ± √(δ(1-mu)/mu), mu = π_old. "
    + SCRIPTS,
)
def bandpo_chi2(lp, lp_old, A, *, delta=0.05, c=None):
    """J = E 1/G Σ_i 1/|o_i| Σ_t min(r A, clip(r, low, high) A),  mu f(r) + (1-mu) f((1-mu r)/(1-mu)) = δ, f(u) = (u-1)²"""
    mu = exp(lp_old)
    reach = sqrt(delta * maximum(-expm1(lp_old), 0) / mu)
    low, high = maximum(1 - reach, 0), minimum(1 + reach, 1 / mu)
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, low, high) * A)


@bandpo_chi2.with_weight
def bandpo_chi2_weight(r, A, mu, *, delta, c):
    reach = sqrt(delta * (1 - mu) / mu)
    low, high = maximum(1 - reach, 0), minimum(1 + reach, 1 / mu)
    return where(
        A > 0, when(r <= high, A * r), when((r >= low) & (r <= (c or inf)), A * r)
    )


@objective(
    **BAND,
    eq="Proposition 4, as its code cites it",
    note="PPO's clip, bounds from an f-divergence ball, f(u) = |u-1|/2: closed form r = 1 ± δ/mu, mu = π_old. "
    + SCRIPTS,
)
def bandpo_tv(lp, lp_old, A, *, delta=0.05, c=None):
    """J = E 1/G Σ_i 1/|o_i| Σ_t min(r A, clip(r, low, high) A),  mu f(r) + (1-mu) f((1-mu r)/(1-mu)) = δ, f(u) = |u-1|/2"""
    mu = exp(lp_old)
    low, high = maximum(1 - delta / mu, 0), minimum(1 + delta / mu, 1 / mu)
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, low, high) * A)


@bandpo_tv.with_weight
def bandpo_tv_weight(r, A, mu, *, delta, c):
    low, high = maximum(1 - delta / mu, 0), minimum(1 + delta / mu, 1 / mu)
    return where(
        A > 0, when(r <= high, A * r), when((r >= low) & (r <= (c or inf)), A * r)
    )
