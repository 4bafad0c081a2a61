# SPDX-License-Identifier: Apache-2.0
"""open-instruct's policy losses as the audit compares them with the papers, and why
they differ.
"""

import dataclasses
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.kl import k3
from upref.verify.faults.losses import GROUPS, with_hp
from upref_frameworks.audits.components import kls
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import kl_term

PIN = Pin(
    repository="https://github.com/allenai/open-instruct",
    commit="e6c3044aa6201c8bfa4573c1b03142af599e730d",
    date="2026-08-20",
    files={
        "open_instruct/grpo_utils.py": "dcadf2c3ce4d3b70e0f113942a00226e",
        "open_instruct/model_utils.py": "ea12a42c088812498dd29f152c061ac3",
    },
    skip_init=("open_instruct",),
    stubs=(
        "open_instruct.data_loader",
        "open_instruct.data_types",
        "open_instruct.logger_utils",
        "open_instruct.olmo_core_utils",
        "open_instruct.utils",
        "open_instruct.ground_truth_utils",
        "pandas",
        "ray",
        "wandb",
        "datasets",
        "transformers",
        "accelerate",
        "deepspeed",
        "huggingface_hub",
        "olmo_core",
    ),
    # log_softmax_and_gather is compiled: the plain function is audited
    env={"TORCHDYNAMO_DISABLE": "1"},
    decorators=(
        "open_instruct.logger_utils.setup_logger",
        "ray.remote",
        "open_instruct.utils.retry_on_exception",
    ),
)
READ = (
    "beta",
    "clip_lower",
    "clip_higher",
    "kl_estimator",
    "loss_denominator",
    "loss_fn",
    "load_ref_policy",
)


def _utils() -> ModuleType:
    """Return open-instruct's module of losses, imported where an audit runs."""
    return importlib.import_module("open_instruct.grpo_utils")


def _defaults(mode: str) -> dict[str, Any]:
    """Return the defaults of GRPOExperimentConfig in the fields of READ, without
    `loss_fn`.
    """
    fields = {
        f.name: f.default for f in dataclasses.fields(_utils().GRPOExperimentConfig)
    }
    return {k: fields[k] for k in READ if k != "loss_fn"}


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
    """Return the value of the loss as grpo_fast.py computes it. Its denominator is of
    the whole batch.
    """
    settings = SimpleNamespace(**config, loss_fn=mode)
    ref = ref_log_prob if config["load_ref_policy"] else None
    ratio = torch.exp(log_prob - old_log_prob)
    terms, _, kl = _utils().compute_grpo_loss(
        log_prob, ratio, advantages, ref, settings, torch.ones_like(ratio)
    )
    divisor: Tensor | float = totals.tokens
    if config["loss_denominator"] != "token":
        divisor = float(config["loss_denominator"])
    return _utils().masked_mean(terms + config["beta"] * kl, mask, None, divisor)


NO_KL = {"load_ref_policy": False}
KL = kl_term(
    "a KL term, k3 with beta = 0.05, is on by default",
    lambda lp, ref, old: k3(lp, ref),
    0.05,
    "token-mean",
    instead=False,
)
HIGH = with_hp(eps_high=0.272)
COMPARISONS = (
    Comparison("default", "dapo", {}, "dapo", {}, (HIGH, GROUPS, KL)),
    Comparison("default", "cispo", NO_KL, "cispo", {}, (HIGH, GROUPS)),
    Comparison("paper", "dapo", NO_KL | {"clip_higher": 0.28}, "dapo", {}, (GROUPS,)),
    Comparison("paper", "dapo", NO_KL | {"clip_higher": 0.2}, "ppo_clip", {}),
    Comparison("paper", "cispo", NO_KL | {"clip_higher": 4.0}, "cispo", {}, (GROUPS,)),
)


def _model() -> ModuleType:
    """Return open-instruct's module of KL terms, imported where an audit runs."""
    return importlib.import_module("open_instruct.model_utils")


REMARKS = (
    "The sum is divided by the tokens of the whole batch, or by a constant (loss_denominator).",
    "Not covered: several ranks, the correction for the sampler (use_rho_correction, on by default: its weights "
    "are 1 where sampler and trainer agree), advantages (its data loader wants datasets and ray).",
)
OPEN_INSTRUCT = Framework(
    "open_instruct",
    pin=PIN,
    modes=lambda: [str(m) for m in _utils().GRPOLossType],
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    remarks=REMARKS,
    parts=lambda: (
        *kls(
            lambda lp, ref, name: _model().estimate_kl(lp - ref, torch.ones_like(lp))[
                int(name[-1])
            ],
            {"kl_estimator 0": "k1", "kl_estimator 1": "k2", "kl_estimator 2": "k3"},
        ),
        Component(
            "logprobs",
            "log_softmax_and_gather",
            lambda z, tokens, t: _model().log_softmax_and_gather(z / t, tokens),
            "token_log_probs",
        ),
    ),
)
