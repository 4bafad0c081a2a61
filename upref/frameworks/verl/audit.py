# SPDX-License-Identifier: Apache-2.0
"""verl's policy losses as the audit holds them against the papers, and why they differ."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from upref.audits.compare import MICRO, Comparison
from upref.audits.framework import Framework
from upref.audits.usual import CLAMP, CLAMP_S
from upref.foreign.verl import NO_DUAL_CLIP, verl, verl_loss
from upref.objectives.dppo_kl import binary_kl
from upref.rollouts import Rollouts
from upref.verify.faults import GROUPS, Slip, aggregated, with_hp


def _micro_means(b: Rollouts) -> Tensor:
    """B over the size of the micro-batch a response is in."""
    return torch.cat([torch.full((len(m.mask), 1), len(b.mask) / len(m.mask)) for m in b.split(MICRO)]).to(b.logp)


E20 = math.exp(20)
MICRO_MEAN = Slip("torch.mean of each micro-batch, global_batch_info unread", "batches", scale=_micro_means)


def _dppo(kind: str, delta: float, trunc: float) -> tuple[Slip, ...]:
    name = f"dppo_{kind}_verl"
    said = f"delta = {delta:g}, ratio cut at {trunc:.4g} outside the derivative ({name})"
    near = lambda b: (binary_kl(b.logp, b.logp_old) - delta).abs() < 1e-5
    moved = "1e-8 inside the logarithms moves the bound by < 1e-5 (tokens there left out)"
    near_kl = Slip(moved, "rounding", skip=near)
    cut = Slip(said, "objective", objective=name, hp={"delta": delta, "trunc": trunc})
    return (cut, near_kl) if kind == "kl" else (cut,)


def _clip(low: float, high: float, c: float | None = None) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high} | ({"clip_ratio_c": c} if c else {})


TOKENS, MEANS, SUMS = ({"loss_agg_mode": a} for a in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"))
COMPARISONS = (
    Comparison("default", "vanilla", TOKENS, "ppo_clip", {}, (with_hp(c=3.0),)),
    Comparison("default", "gspo", TOKENS, "gspo", {}, (
        with_hp(eps_low=0.2, eps_high=0.2), aggregated("token-mean"), CLAMP_S)),
    Comparison("default", "cispo", TOKENS, "cispo", {}, (
        Slip("weights in [0.8, 1.2], from both sides", "objective", objective="cispo_verl"), GROUPS)),
    Comparison("default", "sapo", TOKENS, "sapo", {}),
    Comparison("default", "geo_mean", TOKENS, "gmpo", {}, (with_hp(eps=0.2),)),
    Comparison("default", "dppo_tv", TOKENS, "dppo_tv", {}, (*_dppo("tv", 0.2, 3.0), aggregated("token-mean"))),
    Comparison("default", "dppo_kl", TOKENS, "dppo_kl", {}, (*_dppo("kl", 0.2, 3.0), aggregated("token-mean"))),
    Comparison("default", "gpg", TOKENS, "reinforce_off_policy", {}, (GROUPS,)),
    Comparison("paper", "vanilla", TOKENS | _clip(0.2, 0.28, NO_DUAL_CLIP), "dapo", {}, (GROUPS, CLAMP)),
    Comparison("paper", "vanilla", TOKENS | _clip(0.2, 0.28, 10.0), "dapo", {"c": 10.0}, (GROUPS,)),
    Comparison("paper", "vanilla", MEANS | _clip(0.2, 0.2, NO_DUAL_CLIP), "grpo", {}, (CLAMP,)),
    Comparison("paper", "vanilla", SUMS | _clip(0.2, 0.2, NO_DUAL_CLIP), "dr_grpo", {}, (CLAMP,)),
    Comparison("paper", "gspo", MEANS | _clip(3e-4, 4e-4), "gspo", {}, (CLAMP_S,)),
    Comparison("paper", "cispo", TOKENS | _clip(1.0, 4.0), "cispo", {}, (GROUPS,)),
    Comparison("paper", "sapo", MEANS | {"tau_pos": 1.0, "tau_neg": 1.05}, "sapo", {}),
    Comparison("paper", "geo_mean", TOKENS | _clip(0.4, 0.4), "gmpo", {}),
    Comparison("paper", "dppo_tv", SUMS | _clip(0.15, 0.15, NO_DUAL_CLIP), "dppo_tv", {}, _dppo("tv", 0.15, E20)),
    Comparison("paper", "dppo_kl", SUMS | _clip(0.05, 0.05, NO_DUAL_CLIP), "dppo_kl", {}, _dppo("kl", 0.05, E20)),
    Comparison("paper", "gpg", SUMS, "reinforce", {}),
)  # fmt: skip
OUT_OF_SCOPE = {
    "clip_cov": "clips a random subset of tokens, so two calls differ",
    "kl_cov": "no objective of the registry: a penalty on the tokens of largest covariance",
    "dro": "no objective of the registry: a squared log-ratio penalty",
    "bypass_mode": "a dispatcher: it recomputes mask and weights and calls vanilla or a REINFORCE",
}


def _loss(c: Comparison, b: Rollouts, padding: float | None) -> Tensor:
    actor = dict(c.config)
    return verl_loss(c.mode, b, actor.pop("loss_agg_mode"), padding=padding, **actor)


def _remarks() -> list[str]:
    added = (torch.ones(1, dtype=torch.bool).sum() + 1e-8 - 1).item()  # as agg_loss computes it
    return [
        f"The 1e-8 in the denominators of seq-mean-token-mean adds {added:g} to a count of 1 (float32).",
        "Not covered: several ranks, responses without a token, rollout_is_weights, loss_scale_factor.",
    ]


def _kernels() -> dict[str, Callable]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    def from_logits(logits, tokens, temperature):
        """As its workers call both, on logits divided by the temperature."""
        return logprobs_from_logits(logits / temperature, tokens), entropy_from_logits(logits / temperature)

    fused = lambda hidden, weight, tokens, temperature: FusedLinearForPPO()(hidden, weight, tokens, temperature)
    return {"FusedLinearForPPO": fused, "logprobs_from_logits, entropy_from_logits": from_logits}


VERL = Framework(
    "verl",
    version=lambda: verl()[2],
    loss=_loss,
    modes=lambda: [m for m in verl()[0].POLICY_LOSS_REGISTRY if not m.startswith("upref/")],
    comparisons=COMPARISONS,
    split_reasons={"geo_mean": MICRO_MEAN},
    out_of_scope=OUT_OF_SCOPE,
    remarks=_remarks,
    kernels=_kernels,
)
