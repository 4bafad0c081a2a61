# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, minimum, sg, when, where


def flipped(lp, lp_old, A, alive_pos, alive_neg, cap):
    """1/r for A > 0 and r for A <= 0, both stopped at cap outside the derivative; 0 where the PPO clip is active."""
    w = where(A > 0, minimum(exp(lp_old - lp), cap), minimum(exp(lp - lp_old), cap))
    return when(where(A > 0, alive_pos, alive_neg), sg(w) * A * exp(lp - sg(lp)))


@objective(
    paper="wang2025aspo",
    eq="3, with steps 1-3 of Sec. 6",
    level="token",
    agg="token-mean",
    adv="group_norm",
    defaults={
        "eps": '0.2: wang2025aspo App. B: "The clipping ranges of GRPO and ASPO are set to ε = 0.2"',
        "cap": "3.0: the authors' code, positive_clip_ratio_c=3.0, and the line r = 3.0 of Fig. 4; the text gives none",
    },
    note="The weight of a positive token is turned upside down, not its clip: the Cap "
    "for A > 0 is GRPO's. It aggregates as App. B (\"token-level loss\") and the authors' "
    "code do; Eqs. 1 and 2 print GRPO's mean over each response first. The runs add k3 "
    "with 0.001.",
)
def aspo(lp, lp_old, A, *, eps=0.2, cap=3.0):
    """J_t = min(1/r, 3) A π_θ/sg(π_θ) if A > 0, r <= 1+ε;  min(r, 3) A π_θ/sg(π_θ) if A <= 0, r >= 1-ε;  else 0"""
    r = exp(lp - lp_old)
    return flipped(lp, lp_old, A, r <= 1 + eps, r >= 1 - eps, cap)


@aspo.with_weight
def aspo_weight(r, A, *, eps, cap):
    return where(
        A > 0,
        when(r <= 1 + eps, A * minimum(1 / r, cap)),
        when(r >= 1 - eps, A * minimum(r, cap)),
    )


def is_calm(entropy, mask):
    """True up to the 80 % quantile of each response's entropies (what the authors call high_entropy_mask)."""
    return entropy <= entropy.double().masked_fill(~mask, float("nan")).nanquantile(
        0.8, -1, keepdim=True
    )


@objective(
    paper="wang2025aspo",
    eq="3, as coded by its authors (Archer 2.0)",
    level="custom",
    agg="token-mean",
    adv="group_norm",
    defaults={
        "eps_calm": "0.2: the authors' dp_actor.py, *_low_entropy_clip_ratio_*=0.2; entropy up to the 80 % quantile",
        "eps_unsure": "0.4: the same, *_high_entropy_clip_ratio_*=0.4; entropy above it",
        "cap": "3.0: the same, negative_clip_ratio_c=3.0 and positive_clip_ratio_c=3.0",
    },
    not_symbolic="its clip depends on a quantile of the response's entropies",
    note="The clip widens on high-entropy tokens, which the paper's formula does not have. Copies of the code have a "
    "switch for it, use_dynamic_clip, off by default. It reads Rollouts.entropy.",
)
def aspo_code(lp, lp_old, A, mask, entropy, *, eps_calm=0.2, eps_unsure=0.4, cap=3.0):
    """As aspo with ε_t = 0.2 where H_t <= the response's 80 % quantile of entropies, else 0.4"""
    r, calm = exp(lp - lp_old), is_calm(entropy, mask)
    below = where(calm, r <= 1 + eps_calm, r <= 1 + eps_unsure)
    above = where(calm, r >= 1 - eps_calm, r >= 1 - eps_unsure)
    return flipped(lp, lp_old, A, below, above, cap)


@aspo_code.with_weight
def aspo_code_weight(r, A, mask, entropy, *, eps_calm, eps_unsure, cap):
    calm = is_calm(entropy, mask)
    below = where(calm, r <= 1 + eps_calm, r <= 1 + eps_unsure)
    above = where(calm, r >= 1 - eps_calm, r >= 1 - eps_unsure)
    return where(
        A > 0, when(below, A * minimum(1 / r, cap)), when(above, A * minimum(r, cap))
    )
