# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import clip, exp, minimum, sqrt, when, where


@objective(
    paper="cai2026beyond",
    eq="15",
    level="token",
    agg="group-token-mean",
    adv="group_norm",
    known_from="three public reading notes and an implementation that agree",
    defaults={"delta": "0.05: two of the notes, default δ = 0.05 of the experiments"},
    note="The clip widens for rare tokens: π_θ may move by √(δ π_old). BandPO's χ² bound without (1-π_old) and without "
    "the simplex. An implementation reports outer bounds of r at 0.5 and 10 in the runs; they are not in Eq. 15.",
)
def ripo(lp, lp_old, A, *, delta=0.05):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t min(r A, clip(r, 1-ε_t, 1+ε_t) A),  ε_t = √(δ/π_old(o_t))"""
    r, eps = exp(lp - lp_old), sqrt(delta / exp(lp_old))
    return minimum(r * A, clip(r, 1 - eps, 1 + eps) * A)


@ripo.with_weight
def ripo_weight(r, A, mu, *, delta):
    eps = sqrt(delta / mu)
    return where(A > 0, when(r <= 1 + eps, A * r), when(r >= 1 - eps, A * r))
