# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp


@objective(
    paper="fan2026up",
    eq="7",
    level="token",
    agg="seq-mean-token-sum",
    adv="group_norm",
    note="Eq. 7 prints neither the sum over tokens nor a normalizer; here it is Eq. 1's sum.",
)
def is_pg(lp, lp_old, A):
    """J = E_{o ~ π_old} Σ_t A r_t: importance sampling without a clip."""
    return A * exp(lp - lp_old)


@is_pg.with_weight
def is_pg_weight(r, A):
    return A * r
