# SPDX-License-Identifier: Apache-2.0
from upref.definition import NO_DUAL_CLIP, objective
from upref.ops import exp, inf, sg, when, where


@objective(
    paper="su2025cegppo",
    eq="as coded by its authors, loss_func gppo_general",
    level="token",
    agg="token-mean",
    adv="group_norm",
    known_from="the authors' README, core_algos.py and scripts",
    defaults={
        "eps_low": "0.2: the authors' recipe/dapo/7B_perf_run_gppo_v1_*_ours_math.sh, clip_ratio_low=0.2",
        "eps_high": "0.2: the same script, clip_ratio_high=0.2",
        "share_low": "0.75: the same script, gppo_loss_beta1=0.75; 0.5 for 1.5B, 0.25 in ppo_trainer.yaml",
        "share_high": "1.0: the same scripts, gppo_loss_beta2=1.0",
        "c": NO_DUAL_CLIP,
    },
    note="GPPO with a factor on what the clip would drop: β1 below 1-ε_low for A < 0, β2 above 1+ε_high for A > 0. The "
    "authors' code has a dual clip too: no gradient where A < 0 and r > c, with c = 3, in their scripts 10.",
)
def ce_gppo(
    lp, lp_old, A, *, eps_low=0.2, eps_high=0.2, share_low=0.75, share_high=1.0, c=None
):
    """J = w_t A π_θ/sg(π_θ), w = β1 (1-ε_low) if A < 0, r < 1-ε_low; β2 (1+ε_high) if A > 0, r > 1+ε_high; else r"""
    r = exp(lp - lp_old)
    J = (
        sg(bounded(r, A, eps_low, eps_high, share_low, share_high))
        * A
        * exp(lp - sg(lp))
    )
    return J if c is None else where((A < 0) & (r > c), c * A, J)


def bounded(r, A, eps_low, eps_high, share_low, share_high):
    """β2 (1+ε_high) where A > 0, r > 1+ε_high; β1 (1-ε_low) where A <= 0, r < 1-ε_low; else r."""
    above = where(r > 1 + eps_high, share_high * (1 + eps_high), r)
    return where(A > 0, above, where(r < 1 - eps_low, share_low * (1 - eps_low), r))


@ce_gppo.with_weight
def ce_gppo_weight(r, A, *, eps_low, eps_high, share_low, share_high, c):
    alive = A * bounded(r, A, eps_low, eps_high, share_low, share_high)
    return where(A > 0, alive, when(r <= (c or inf), alive))
