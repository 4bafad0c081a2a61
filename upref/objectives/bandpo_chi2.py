# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import clip, dual_clip, exp, expm1, inf, maximum, minimum, sqrt, when, where


@objective(
    paper="li2026bandpo",
    eq="Proposition 4, as its code cites it",
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
    note="PPO's clip, bounds from an f-divergence ball, f(u) = (u-1)²: closed form r = 1 ± √(δ(1-mu)/mu), mu = π_old. "
    "The authors' scripts also cap the upper bound at 10 (upper_bound_max) and dual-clip at 10; neither is here.",
)
def bandpo_chi2(lp, lp_old, A, *, delta=0.05, c=None):
    """J = E 1/G Σ_i 1/|o_i| Σ_t min(r A, clip(r, low(mu), high(mu)) A),  mu f(r) + (1-mu) f((1-mu r)/(1-mu)) = δ"""
    mu = exp(lp_old)
    reach = sqrt(delta * maximum(-expm1(lp_old), 0) / mu)
    low, high = maximum(1 - reach, 0), minimum(1 + reach, 1 / mu)
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A, clip(r, low, high) * A)


@bandpo_chi2.with_weight
def bandpo_chi2_weight(r, A, mu, *, delta, c):
    reach = sqrt(delta * (1 - mu) / mu)
    low, high = maximum(1 - reach, 0), minimum(1 + reach, 1 / mu)
    return where(A > 0, when(r <= high, A * r), when((r >= low) & (r <= (c or inf)), A * r))
