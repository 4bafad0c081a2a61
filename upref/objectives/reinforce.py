# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective


@objective(
    paper="williams1992simple",
    eq="fan2026up Eq. 1",
    level="token",
    agg="seq-mean-token-sum",
    adv="reward",
    note="The gradient of the paper's Eq. 1 is Eq. 2 only with the sampler frozen (derivations/log_derivative.py).",
)
def reinforce(lp, lp_old, A):
    """J = E_{o ~ π_θ} Σ_t A log π_θ(o_t), the sampling distribution held fixed."""
    return A * lp


@reinforce.with_weight
def reinforce_weight(r, A):
    return A + 0 * r
