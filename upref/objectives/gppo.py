# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, inf, maximum, minimum, sg, when, where


@objective(
    paper="su2025klear",
    eq="as coded by its authors",
    known_from="the authors' README and code",
    level="token",
    agg="group-token-mean",
    adv="group_norm",
    defaults={
        "eps_low": "0.2: the authors' recipe/dapo/perf_run_dapo_ours_math.sh, clip_ratio_low=0.2",
        "eps_high": "0.28: the same script, clip_ratio_high=0.28",
        "c": "None: the formula has none; the authors' code kills A < 0, r > c with c = 3, their scripts with 10",
    },
    note="DAPO's value with a gradient that survives the clip: out of the window the weight is the bound, never 0. "
    "Without group ids the whole batch counts as one group, which is what the authors' code computes.",
)
def gppo(lp, lp_old, A, *, eps_low=0.2, eps_high=0.28, c=None):
    """J = min(r A, clip(r, (1-ε_low)/sg(r) r, (1+ε_high)/sg(r) r) A), 1/Σ_i|o_i| Σ_i Σ_t of it"""
    r = exp(lp - lp_old)
    bounded = where(A > 0, minimum(r, 1 + eps_high), maximum(r, 1 - eps_low))
    J = A * sg(bounded) * exp(lp - sg(lp))
    return J if c is None else where((A < 0) & (r > c), c * A, J)


@gppo.with_weight
def gppo_weight(r, A, *, eps_low, eps_high, c):
    return where(
        A > 0,
        A * minimum(r, 1 + eps_high),
        when(r <= (c or inf), A * maximum(r, 1 - eps_low)),
    )
