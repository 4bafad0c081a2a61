# SPDX-License-Identifier: Apache-2.0
"""ART's (openpipe-art) policy loss as the audit compares it with the papers, and why it
differs.
"""

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.registry import get
from upref.verify.faults.losses import aggregated, fault, with_hp
from upref_frameworks.audits.framework import Comparison, Framework, Pin

PIN = Pin(
    packages=(
        "openpipe-art==0.5.18",
        "pydantic==2.12.5",
        "pydantic-core==2.41.5",
        "annotated-types==0.7.0",
        "typing-inspection==0.4.2",
    ),
    files={"art/loss.py": "80093955fe1f1b0c4ea84ee0a32f2ade"},
    skip_init=("art", "art.utils"),
    stubs=("art.dev",),
)


def _loss_module() -> ModuleType:
    """Return ART's module of losses, imported where an audit runs."""
    return importlib.import_module("art.loss")


class _RecordingConfig(dict[str, Any]):
    """A config that records what the loss looks up in it, and with which default."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key. A key that is absent gets the default as its
        value.
        """
        return self.setdefault(key, default)


def _lengthened(x: Tensor) -> Tensor:
    """Return x [B, T] with one more place, [B, T + 1]: -1, since the last place of a
    row predicts nothing.
    """
    return torch.nn.functional.pad(x, (0, 1), value=-1.0)


def _shifted(x: Tensor, first: float | bool = 0) -> Tensor:
    """Return x [B, T] one place later, behind `first`, [B, T + 1]. ART's packing lays
    tokens out so, and the loss shifts them back.
    """
    return torch.cat([torch.full_like(x[:, :1], first), x], 1)


def _loss_sum(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_log_prob: Tensor,
    weights: Tensor,
    config: dict[str, Any],
) -> Tensor:
    """Call ART's loss on rows [B, T], each of one response; return the sum over tokens."""
    rows = torch.arange(1, len(mask) + 1)[:, None].expand_as(mask)
    inputs = {
        "logprobs": _shifted(old_log_prob),
        "advantages": _shifted(advantages),
        "assistant_mask": _shifted(mask),
        "weights": _shifted(weights),
        "group_ids": _shifted(rows),
    }
    return (
        _loss_module()
        .loss_fn(
            inputs,
            _lengthened(log_prob),
            _lengthened(ref_log_prob),
            None,
            config,
            reduction="sum",
        )
        .policy_loss
    )


def _defaults(mode: str) -> dict[str, Any]:
    """Return the defaults inside the loss. It is called on one token, with a config
    that records which fields are looked up and with which default.
    """
    config = _RecordingConfig(ppo=True) if mode == "ppo" else _RecordingConfig()
    x = torch.full((1, 2), -1.0)
    _loss_sum(x, x, x, torch.ones(1, 2, dtype=torch.bool), x, torch.ones(1, 2), config)
    return dict(config)


def _loss(
    mode: str,
    config: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_log_prob: Tensor,
    totals: Totals,
) -> Tensor:
    """Return the value of ART's loss in this mode on tensors."""
    lengths = mask.sum(1, keepdim=True)
    # as pack.py: equal within a response, the same sum for every response, 1 on average
    weights = (
        (1 / lengths * (totals.tokens / totals.sequences))
        .expand(mask.shape)
        .to(log_prob.dtype)
    )
    return (
        _loss_sum(
            log_prob, old_log_prob, advantages, mask, ref_log_prob, weights, config
        )
        / totals.tokens
    )


MEANS = aggregated("seq-mean-token-mean")
MEANS = replace(MEANS, words=f"{MEANS.words}, and no setting gives another")
RIGHT = replace(
    with_hp(eps_high=0.1),
    words="the cap on wrong tokens, 1.1, holds for right ones too",
)
CAPPED = {"max_negative_advantage_importance_sampling_weight": 1.1}
SEQUENCE = {"importance_sampling_level": "sequence"}
WHOLE = replace(get("cispo"), level="sequence_mean", agg=get("gspo").agg)
STAYS = fault(
    "loss_fn stays cispo: a weight of at most 5, no clip",
    "objective",
    objective=WHOLE,
    hp={"eps_high": 4.0},
)
COMPARISONS = (
    Comparison("default", "cispo", {}, "cispo", {}, (MEANS,)),
    Comparison("default", "cispo", SEQUENCE, "gspo", {}, (STAYS,)),
    Comparison("default", "ppo", {}, "grpo", {}),
    Comparison(
        "default", "ppo", SEQUENCE, "gspo", {}, (with_hp(eps_low=0.2, eps_high=0.2),)
    ),
    Comparison(
        "default", "ppo", CAPPED, "dapo", {"eps_high": 0.2, "c": 1.1}, (MEANS, RIGHT)
    ),
    Comparison("paper", "cispo", {"epsilon_high": 4.0}, "cispo", {}, (MEANS,)),
    Comparison("paper", "ppo", {"epsilon": 0.2}, "grpo", {}),
    Comparison(
        "paper", "ppo", {"epsilon": 0.2, "epsilon_high": 0.28}, "dapo", {}, (MEANS,)
    ),
    Comparison(
        "paper", "ppo", SEQUENCE | {"epsilon": 3e-4, "epsilon_high": 4e-4}, "gspo", {}
    ),
)

REMARKS = (
    "There is one loss: ppo=True is `ppo`, else it is `cispo`, which is the default.",
    "Tokens weigh 1 over the length of their response and the sum is divided by the tokens of the batch, as "
    "pack.py and the Megatron trainer do.",
    "Not covered: advantages (pack.py divides them by the batch's mean |A|), the KL penalty (it moves advantages), "
    "kimi_k2_tau, truncated importance sampling, the averages of both ratios.",
)
ART = Framework(
    "art",
    pin=PIN,
    modes=lambda: ["cispo", "ppo"],
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    remarks=REMARKS,
    tol=1e-6,  # 1e-8 in the count of a response's tokens
)
