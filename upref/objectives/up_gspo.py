# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, maximum, minimum, sg, when, where

DEFAULTS = {
    "eps_low": 'fan2026up Table A1, "Lower Clip" of UP-GSPO: 3e-4, "Upper Clip": "-"',
}


@objective(
    paper="fan2026up",
    eq="16",
    level="sequence_mean",
    agg="seq-mean",
    adv="group_norm",
    is_up=True,
    defaults=DEFAULTS,
    note="UP-DAPO's function, handed mean_t lp. For A > 0 it equals UP-GRPO's: there is no ratio left that could be of a "
    "token or of a response.",
)
def up_gspo(lp, lp_old, A, *, eps_low=3e-4):
    """J = E 1/G Σ_i { A_i mean_t log π_θ if A_i > 0;  min(s_i A_i, clip(s_i, 1-ε_low, ∞) A_i) if A_i <= 0 }"""
    s = exp(lp - lp_old)
    return where(A > 0, A * lp, minimum(s * A, maximum(s, 1 - eps_low) * A))


@up_gspo.with_weight
def up_gspo_weight(s, A, *, eps_low):
    return where(A > 0, A, when(s >= 1 - eps_low, A * s))


@objective(
    paper="fan2026up",
    eq="A4, in Eq. A7",
    level="sequence_mean",
    agg="seq-mean",
    adv="group_norm",
    is_up=True,
    defaults=DEFAULTS,
    note="The self-anchored form: gradient of up_gspo, but not its value nor its Hessian.",
)
def up_gspo_anchored(lp, lp_old, A, *, eps_low=3e-4):
    """As up_gspo, with π_θ/sg(π_θ) in place of log π_θ (of the geometric mean)."""
    s = exp(lp - lp_old)
    return where(
        A > 0, A * exp(lp - sg(lp)), minimum(s * A, maximum(s, 1 - eps_low) * A)
    )


up_gspo_anchored.with_weight(up_gspo.closed_form)
