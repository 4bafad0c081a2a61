# SPDX-License-Identifier: Apache-2.0
"""prime-rl's two losses: a region of probabilities, symmetric or DPPO's, and a penalty on log² r."""

from typing import Any

from upref.definition import objective
from upref.ops import exp, when, where

TAU = '0.001: prime-rl 559b4477, kl_tau: "Temperature for the KL term."'
PRIME_RL: dict[str, Any] = dict(
    paper="qi2026rethinking",
    level="token",
    agg="token-mean",
    adv="group_mean",
    scale_exception="the penalty on log² r does not grow with A",
    note="π_old is the rollout policy. The penalty, which prime-rl takes from Kimi K2.5 (arXiv 2602.02276), is on "
    "every token, also on those outside the region.",
)


@objective(
    **PRIME_RL,
    eq="13, masked on both sides, as coded in prime-rl, loss type ipo",
    known_from="prime-rl's ipo_loss_fn, at commit 559b4477",
    defaults={
        "delta": "0.1: prime-rl 559b4477 IPOLossConfig.ipo_threshold",
        "tau": TAU,
    },
)
def ipo(lp, lp_old, A, *, delta=0.1, tau=1e-3):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t { M_t r_t A_t - τ (log r_t)² },  M = 0 where |π_θ(o_t) - π_old(o_t)| > δ"""
    M = abs(exp(lp) - exp(lp_old)) <= delta
    return when(M, exp(lp - lp_old) * A) - tau * (lp - lp_old) ** 2


@ipo.with_weight
def ipo_weight(log_r, A, log_mu, *, delta, tau):
    M = abs(exp(log_mu + log_r) - exp(log_mu)) <= delta
    return when(M, A * exp(log_r)) - 2 * tau * log_r


@objective(
    **PRIME_RL,
    eq="12 and 13, as coded in prime-rl, loss type default",
    known_from="prime-rl's default_loss_fn, at commit 559b4477",
    defaults={
        "delta": "0.2: prime-rl 559b4477 DefaultLossConfig.dppo_mask_low and dppo_mask_high",
        "tau": TAU,
    },
)
def dppo_tv_prime_rl(lp, lp_old, A, *, delta=0.2, tau=1e-3):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t { M_t r_t A_t - τ (log r_t)² },  M of dppo_tv"""
    gain = exp(lp) - exp(lp_old)
    M = where(A > 0, gain, -gain) <= delta
    return when(M, exp(lp - lp_old) * A) - tau * (lp - lp_old) ** 2


@dppo_tv_prime_rl.with_weight
def dppo_tv_prime_rl_weight(log_r, A, log_mu, *, delta, tau):
    gain = exp(log_mu + log_r) - exp(log_mu)
    M = where(A > 0, gain, -gain) <= delta
    return when(M, A * exp(log_r)) - 2 * tau * log_r
