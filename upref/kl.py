# SPDX-License-Identifier: Apache-2.0
"""Per-token estimators of KL(π_θ ‖ π_ref) in nats, for samples of π_θ (Schulman 2020), d = log π_ref - log π_θ.

    k1 = -d                    unbiased;   as a loss its expected gradient is 0
    k2 = d² / 2                biased;     as a loss, on policy, its gradient is that of KL(π_θ ‖ π_ref)
    k3 = e^d - 1 - d  (>= 0)   unbiased;   as a loss, on policy, its gradient is that of KL(π_ref ‖ π_θ)

derivations/kl_estimators.py proves the three right-hand columns by enumeration. The paper (Eqs. 4, 15) names no
estimator; GRPO's own is k3 (shao2024deepseekmath, Eq. 4).
"""

from upref.ops import expm1, saturate


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


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
