# SPDX-License-Identifier: Apache-2.0
"""EasyR1's policy losses as the audit holds them against the papers, and why they
differ.
"""

import ast
import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.registry import get
from upref.rollouts import Rollouts, Totals
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, aggregated, fault, with_hp
from upref_frameworks.audits.case import MICRO
from upref_frameworks.audits.components import kls
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import (
    BETA,
    CLAMP,
    CLAMP_K3,
    CLAMP_S20,
    K1,
    NARROW_K3,
    SAMPLE,
    whiten_by_sample,
)
from upref_frameworks.audits.sources import source

PIN = Pin(
    repository="https://github.com/hiyouga/EasyR1",
    commit="b44b311b669bf1fd1aa2fc36f2251482ba33cb16",
    date="2026-07-30",
    files={
        "verl/trainer/core_algos.py": "871cadc71a8b04295ebdc8ff516ba242",
        "verl/utils/torch_functional.py": "fd686c86f5e479acb39d873fef8eadc0",
        "verl/workers/actor/dp_actor.py": "2e7ba59831f4a8c0d01e918103f19155",
    },
    skip_init=(
        "verl",
        "verl.utils",
        "verl.trainer",
        "verl.workers",
        "verl.workers.actor",
    ),
)
READ = (
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_dual",
    "loss_avg_mode",
    "tau_positive",
    "tau_negative",
)
KL_READ = ("use_kl_loss", "kl_penalty", "kl_coef")


def _algos() -> ModuleType:
    """Return EasyR1's module of losses, imported where an audit runs."""
    return importlib.import_module("verl.trainer.core_algos")


def _modes() -> list[str]:
    """Return the names that the annotation of loss_type allows."""
    return list(
        typing.get_args(
            inspect.signature(_algos().compute_policy_loss)
            .parameters["loss_type"]
            .annotation
        )
    )


def _defaults(mode: str) -> dict[str, Any]:
    """Return the defaults of ActorConfig that the loss reads, and those of its KL term."""
    config = importlib.import_module("verl.workers.actor.config").ActorConfig
    return {
        f.name: f.default for f in dataclasses.fields(config) if f.name in READ
    } | _kl_defaults()


def _kl_defaults() -> dict[str, Any]:
    """Return the defaults of AlgorithmConfig, read off its source: its module imports
    the workers.
    """
    return {
        n.target.id: ast.literal_eval(n.value)
        for n in ast.walk(ast.parse(source("verl.trainer.config")))
        if isinstance(n, ast.AnnAssign)
        and isinstance(n.target, ast.Name)
        and n.value
        and n.target.id in KL_READ
    }


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
    """Return the value of EasyR1's loss in this mode on tensors, with its KL term if
    that is on, times the share of the mini-batch's tokens that are in them.
    """
    settings = {k: v for k, v in config.items() if k not in KL_READ}
    algorithms = _algos()
    with np.errstate(divide="ignore"):  # log(1 - clip_ratio_low), where that is 1
        value, _ = algorithms.compute_policy_loss(
            old_log_prob, log_prob, advantages, mask, loss_type=mode, **settings
        )
    if config["use_kl_loss"]:
        kl = algorithms.compute_kl(log_prob, ref_log_prob, config["kl_penalty"])
        value = (
            value
            + algorithms.average_loss(kl, mask, config["loss_avg_mode"])
            * config["kl_coef"]
        )
    return value * mask.sum() / totals.tokens  # update_policy, of every micro-batch


def _token_share_scale(batch: Rollouts) -> Tensor:
    """Return a scale [B, 1]: MICRO times the tokens of the micro-batch that has the
    response, over all tokens.
    """
    parts = batch.split(MICRO)
    return torch.cat(
        [
            (MICRO * m.mask.sum() / batch.mask.sum()).expand(len(m.mask), 1)
            for m in parts
        ]
    ).to(batch.logp)


DAPO_S = replace(get("dapo"), level="sequence_mean")
DUAL_S = fault(
    "the dual clip c = 3, of a response's ratio",
    "objective",
    objective=DAPO_S,
    hp={"eps_low": 3e-4, "eps_high": 4e-4, "c": 3.0},
)
WEIGHED = fault(
    "micro-batches count by their tokens, where loss_avg_mode=seq too",
    "batches",
    scale=_token_share_scale,
)
DUAL = with_hp(c=3.0)
CLIP_S = with_hp(eps_low=0.2, eps_high=0.3)
TOKENS = aggregated("token-mean")
FLOOR = fault(
    "weights in [0.8, 1.3], from both sides",
    "objective",
    objective="cispo_verl",
    hp={"eps_low": 0.2, "eps_high": 0.3},
)
SCRIPT = fault(
    "weights in [1, 5], from both sides",
    "objective",
    objective="cispo_verl",
    hp={"eps_low": 0.0, "eps_high": 4.0},
)
KL = {"use_kl_loss": True, "kl_coef": BETA}
OFF = {"clip_ratio_dual": 1e10}
DUAL10 = {"clip_ratio_dual": 10.0}
SEQ = {"loss_avg_mode": "seq"}
HIGHER = {"clip_ratio_high": 0.28}
GRPO = {"clip_ratio_high": 0.2} | SEQ | OFF
GSPO = SEQ | {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4} | OFF
COMPARISONS = (
    Comparison(
        "default", "default", {}, "dapo", {}, (with_hp(eps_high=0.3), DUAL, GROUPS)
    ),
    Comparison("default", "gspo", {}, "gspo", {}, (DUAL_S, CLIP_S, TOKENS)),
    Comparison("default", "gspo_token", {}, "gspo", {}, (DUAL_S, CLIP_S, TOKENS)),
    Comparison("default", "cispo", {}, "cispo", {}, (FLOOR, GROUPS)),
    Comparison(
        "default",
        "cispo",
        {"clip_ratio_low": 0.0, "clip_ratio_high": 4.0},
        "cispo",
        {},
        (SCRIPT, GROUPS),
    ),
    Comparison("default", "sapo", {}, "sapo", {}, (TOKENS,)),
    Comparison(
        "default",
        "default",
        GRPO | KL | DUAL10,
        "grpo",
        {"beta": BETA, "c": 10.0},
        (K1,),
    ),
    Comparison("paper", "default", HIGHER | OFF, "dapo", {}, (GROUPS, CLAMP)),
    Comparison("paper", "default", HIGHER | DUAL10, "dapo", {"c": 10.0}, (GROUPS,)),
    Comparison("paper", "default", GRPO, "grpo", {}, (CLAMP,)),
    Comparison(
        "paper",
        "default",
        GRPO | KL | {"kl_penalty": "low_var_kl"},
        "grpo",
        {"beta": BETA},
        (CLAMP_K3, CLAMP),
    ),
    Comparison("paper", "gspo", GSPO, "gspo", {}, (CLAMP_S20,)),
    Comparison("paper", "gspo_token", GSPO, "gspo", {}, (CLAMP_S20,)),
    Comparison(
        "paper",
        "cispo",
        {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
        "cispo",
        {},
        (GROUPS,),
    ),
    Comparison("paper", "sapo", SEQ, "sapo", {}),
)


def _advantages(name: str) -> Callable[..., Tensor]:
    """Return EasyR1's advantages of this name, as a function of rewards and groups."""

    def advantages(R: Tensor, group: Tensor) -> Tensor:
        """Return the advantages [N]; each response is one token."""
        settings = (
            {"index": group.numpy()} if name in ("grpo", "rloo") else {"gamma": 1.0}
        )
        ones = torch.ones_like(R)[:, None]
        return _algos().compute_advantage_return(
            name, token_level_rewards=R[:, None], response_mask=ones, **settings
        )[0][:, 0]

    return advantages


REMARKS = (
    "Each micro-batch is multiplied by its share of the mini-batch's tokens, as DataParallelPPOActor.update_policy "
    "has it. KL terms are in float32; GRPO and RLOO refuse a group of one.",
    "Not covered: several ranks, packed sequences, the advantages gae, remax and grpo_passk, KLs abs and full.",
)
EASYR1 = Framework(
    "easyr1",
    pin=PIN,
    modes=_modes,
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    split_reasons=dict.fromkeys(("default", "gspo", "gspo_token", "sapo"), WEIGHED),
    remarks=REMARKS,
    parts=lambda: (
        Component(
            "advantages",
            "grpo",
            _advantages("grpo"),
            "group_norm",
            {"eps": 1e-6},
            leaves_out=("one",),
            tol=1e-5,
        ),
        Component(
            "advantages",
            "rloo",
            _advantages("rloo"),
            "leave_one_out",
            leaves_out=("one",),
            tol=1e-5,
        ),
        Component(
            "advantages",
            "reinforce_plus_plus",
            _advantages("reinforce_plus_plus"),
            "whiten",
            reasons=(Fault(SAMPLE, whiten_by_sample),),
            tol=1e-6,
        ),
        *kls(
            lambda *x: _algos().compute_kl(*x),
            {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
            {"low_var_kl": (NARROW_K3,)},
            tol=1e-5,
        ),
    ),
    tol=3e-7,  # its bounds are exp(log(1 + ε)): on a bound, rounding would decide
)
