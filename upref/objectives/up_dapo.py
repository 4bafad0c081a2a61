# SPDX-License-Identifier: Apache-2.0
from upref.definition import NO_DUAL_CLIP, objective
from upref.ops import dual_clip, exp, inf, maximum, minimum, sg, when, where

DEFAULTS = {
    "eps_low": 'fan2026up Table A1, "Lower Clip": 0.2; App. A: UP "eliminate the need for the upper clip"',
    "c": NO_DUAL_CLIP,
}


@objective(
    paper="fan2026up",
    eq="14",
    level="token",
    agg="group-token-mean",
    adv="group_norm",
    is_up=True,
    defaults=DEFAULTS,
    note="Eq. 14 prints 1+ε_high, which is inert for A <= 0 (derivations/eps_high_inert.py). "
    "Without group ids the batch is one group.",
)
def up_dapo(lp, lp_old, A, *, eps_low=0.2, c=None):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t { A log π_θ if A > 0;  min(r A, clip(r, 1-ε_low, ∞) A) if A <= 0 }"""
    r = dual_clip(exp(lp - lp_old), A, c)
    return where(A > 0, A * lp, minimum(r * A, maximum(r, 1 - eps_low) * A))


@up_dapo.with_weight
def up_dapo_weight(r, A, *, eps_low, c):
    return where(A > 0, A, when((r >= 1 - eps_low) & (r <= (c or inf)), A * r))


@objective(
    paper="fan2026up",
    eq="12, in Eq. 14",
    level="token",
    agg="group-token-mean",
    adv="group_norm",
    is_up=True,
    defaults=DEFAULTS,
    note="The self-anchored form: gradient of up_dapo, but not its value nor its Hessian.",
)
def up_dapo_anchored(lp, lp_old, A, *, eps_low=0.2, c=None):
    """As up_dapo, with π_θ/sg(π_θ) in place of log π_θ."""
    r = dual_clip(exp(lp - lp_old), A, c)
    return where(
        A > 0, A * exp(lp - sg(lp)), minimum(r * A, maximum(r, 1 - eps_low) * A)
    )


up_dapo_anchored.with_weight(up_dapo.closed_form)
