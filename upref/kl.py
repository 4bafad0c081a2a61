# SPDX-License-Identifier: Apache-2.0
"""Per-token estimators of KL(π_θ ‖ π_ref) in nats, for samples of π_θ (Schulman 2020), d = log π_ref - log π_θ.

    k1 = -d                    unbiased;   as a loss its expected gradient is 0
    k2 = d² / 2                biased;     as a loss, on policy, its gradient is that of KL(π_θ ‖ π_ref)
    k3 = e^d - 1 - d  (>= 0)   unbiased;   as a loss, on policy, its gradient is that of KL(π_ref ‖ π_θ)
    k3_ratio = r k3            unbiased;   as a loss, its gradient is that of KL(π_θ ‖ π_ref), off policy too

r = π_θ/π_old, with its gradient; the samples of k3_ratio are π_old's. derivations/kl_estimators.py proves the
columns of k1, k2 and k3 by enumeration; tests/core/test_kl.py compares those of k3_ratio.

They hold for one token, given the tokens before it (its prefix). For responses the values add up, on policy: the mean
of Σ_t k1 is the divergence of whole responses. The gradients do not: those of k2, k3 and k3_ratio hold fixed how often
each prefix is reached, and leave out that a token changes which prefixes follow. Their sum can point elsewhere than
the gradient of the divergence of responses. That gradient is had with k1 in the reward: the weight of ∇log π_θ(o_t) is
then the sum of k1 over the token t and all later ones.

The paper (Eqs. 4, 15) names no estimator; GRPO's own is k3 (shao2024deepseekmath,
Eq. 4). k3_ratio is deepseek2025v32's, TRL's default.
"""

from typing import Any

from upref.ops import exp, expm1, saturate


def k1(lp, lp_ref):
    """log π_θ - log π_ref, elementwise."""
    return lp - lp_ref


def k2(lp, lp_ref):
    """(log π_θ - log π_ref)² / 2, elementwise."""
    return (lp - lp_ref) ** 2 / 2


def k3(lp, lp_ref):
    """π_ref/π_θ - 1 - log(π_ref/π_θ), elementwise; value and gradient stop where π_ref/π_θ overflows the dtype."""
    d = saturate(lp_ref - lp)
    return expm1(d) - d


def k3_ratio(lp, lp_ref, lp_old):
    """π_θ/π_old (π_ref/π_θ - 1 - log(π_ref/π_θ)), elementwise; the gradient flows through the ratio too."""
    return exp(lp - lp_old) * k3(lp, lp_ref)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
WITH_RATIO = {"k3_ratio": k3_ratio}  # they read lp_old
NAMES = (*ESTIMATORS, *WITH_RATIO)


def per_token(name: str, lp: Any, lp_ref: Any, lp_old: Any) -> Any:
    """Return the KL term of each token, before aggregation.

    Args:
        name: one of NAMES.
        lp: log π_θ(o_t), in nats.
        lp_ref: log π_ref(o_t), the same shape.
        lp_old: log π_old(o_t), the same shape; read by the estimators with a ratio alone.

    Returns:
        The estimator's value, elementwise, in nats.
    """
    if name in WITH_RATIO:
        return WITH_RATIO[name](lp, lp_ref, lp_old)
    return ESTIMATORS[name](lp, lp_ref)
