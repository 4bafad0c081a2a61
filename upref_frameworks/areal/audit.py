# SPDX-License-Identifier: Apache-2.0
"""AReaL's policy losses as the audit compares them with the papers, and why they
differ.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from upref import kl
from upref.aggregation import Totals
from upref.verify.faults.losses import GROUPS, aggregated, with_hp
from upref_frameworks.audits.components import kls
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import ALWAYS, clamp_kl

PIN = Pin(
    packages=("colorlog==6.9.0",),
    repository="https://github.com/areal-project/AReaL",
    commit="cbff54d645d2cd8ee1f1c358a82f3f473588433d",
    date="2026-08-22",
    files={
        "areal/utils/functional/functional.py": "126aae263175d49930473bfa74d3c032",
        "areal/utils/functional/vocab_parallel.py": "a88d7f6076b0aca5f4bb28d5f19a61fc",
        "areal/utils/data.py": "c473fb9d63a93745bd1f5624c06abeb3",
    },
    skip_init=(
        "areal",
        "areal.api",
        "areal.engine",
        "areal.engine.fsdp_utils",
        "areal.infra",
        "areal.utils",
        "areal.utils.functional",
    ),
    stubs=(
        "areal.infra.platforms",
        "uvloop",
        "yaml",
        "hydra",
        "omegaconf",
        "einops",
        "torchdata",
        "transformers",
        "ray",
        "requests",
        "numba",
    ),
    decorators=("ray.remote", "numba.njit", "uvloop.install"),
)
READ = {
    "ppo_actor_loss_fn": (
        "eps_clip",
        "eps_clip_higher",
        "c_clip",
        "importance_sampling_level",
    ),
    "cispo_loss_fn": ("eps_clip", "eps_clip_higher"),
    "sapo_loss_fn": ("sapo_tau_pos", "sapo_tau_neg", "importance_sampling_level"),
}


def _functional() -> ModuleType:
    """Return AReaL's module of losses, imported where an audit runs."""
    return importlib.import_module("areal.utils.functional.functional")


def _data() -> ModuleType:
    """Return AReaL's module of KL estimators and normalization, imported likewise."""
    return importlib.import_module("areal.utils.data")


def _modes() -> list[str]:
    """Return the names of AReaL's losses: the functions whose names end in `_loss_fn`
    and that take `advantages`.
    """
    found = [(n, f) for n, f in vars(_functional()).items() if n.endswith("_loss_fn")]
    return [n for n, f in found if "advantages" in inspect.signature(f).parameters]


def _defaults(mode: str) -> dict[str, Any]:
    """Return those defaults of PPOActorConfig that READ lists for the loss of this
    mode.
    """
    fields = dataclasses.fields(
        importlib.import_module("areal.api.cli_args").PPOActorConfig
    )
    return {f.name: f.default for f in fields if f.name in READ[mode]}


def _loss(
    mode: str,
    config: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    totals: Totals,
) -> Tensor:
    """Return the value of AReaL's loss in this mode on tensors, times the share of the
    mini-batch's tokens that are in them.
    """
    settings = {k.removeprefix("sapo_"): v for k, v in config.items()}
    f = getattr(_functional(), mode)
    # SAPO's function has no argument for the policy before the update
    proximal = {} if mode == "sapo_loss_fn" else {"proximal_logprobs": old_log_prob}
    value, _ = f(
        log_prob,
        old_logprobs=old_log_prob,
        advantages=advantages,
        loss_mask=mask,
        **settings,
        **proximal,
    )
    return value * mask.sum() / totals.tokens  # the engine's loss_weight_fn


SEQUENCE = {"importance_sampling_level": "sequence"}
TOKENS = aggregated("token-mean")
COMPARISONS = (
    Comparison("default", "ppo_actor_loss_fn", {}, "ppo_clip", {}),
    Comparison(
        "default",
        "ppo_actor_loss_fn",
        SEQUENCE,
        "gspo",
        {},
        (with_hp(eps_low=0.2, eps_high=0.2), ALWAYS),
    ),
    Comparison("paper", "ppo_actor_loss_fn", {}, "grpo", {}, (TOKENS,)),
    Comparison(
        "paper", "ppo_actor_loss_fn", {"eps_clip_higher": 0.28}, "dapo", {}, (GROUPS,)
    ),
    Comparison(
        "paper",
        "ppo_actor_loss_fn",
        {"eps_clip_higher": 0.28, "c_clip": 10.0},
        "dapo",
        {"c": 10.0},
        (GROUPS,),
    ),
    Comparison(
        "paper",
        "ppo_actor_loss_fn",
        SEQUENCE | {"eps_clip": 3e-4, "eps_clip_higher": 4e-4},
        "gspo",
        {},
        (ALWAYS,),
    ),
    Comparison(
        "paper",
        "cispo_loss_fn",
        {"eps_clip": 1.0, "eps_clip_higher": 4.0},
        "cispo",
        {},
        (GROUPS,),
    ),
    Comparison("paper", "sapo_loss_fn", {}, "sapo", {}, (ALWAYS,)),
)


def _normalized(**config: Any) -> Callable[..., Tensor]:
    """Return AReaL's normalization with this configuration, as a function of rewards
    and groups. All groups must be of one size.
    """

    def advantages(rewards: Tensor, group: Tensor) -> Tensor:
        """Return the normalized rewards; AReaL is told the size of the first group."""
        size = int(torch.bincount(group)[0])
        made = importlib.import_module("areal.api.cli_args").NormConfig(
            group_size=size, **config
        )
        return _data().Normalization(made)(rewards)

    return advantages


def _kl(lp: Tensor, ref: Tensor, name: str) -> Tensor:
    """Return AReaL's KL estimate of this name."""
    return _data().KLEstimator(name, True)(lp, ref)


def _parts() -> tuple[Component, ...]:
    """Return the parts of AReaL that are compared by themselves, such as its
    advantages.
    """
    groups = ("uneven", "one")  # groups are of one size
    return (
        Component(
            "advantages",
            "group, group",
            _normalized(mean_level="group", std_level="group"),
            "group_norm",
            {"eps": 1e-5},
            leaves_out=groups,
            tol=1e-5,
        ),
        Component(
            "advantages",
            "group, none",
            _normalized(mean_level="group", std_level=None),
            "group_mean",
            leaves_out=groups,
            tol=1e-6,
        ),
        Component(
            "advantages",
            "leave one out",
            _normalized(mean_level="group", mean_leave1out=True, std_level=None),
            "leave_one_out",
            leaves_out=groups,
            tol=1e-6,
        ),
        Component(
            "advantages",
            "batch",
            _normalized(),
            "whiten",
            {"ddof": 1, "eps": 1e-5},
            leaves_out=groups,
            tol=1e-5,
        ),
        *kls(
            _kl,
            {k: k for k in kl.ESTIMATORS},
            {k: (clamp_kl(f),) for k, f in kl.ESTIMATORS.items()},
            tol=1e-5,
        ),
    )


def _kernels() -> dict[str, Any]:
    """Return the functions of AReaL that compute log-probabilities, by name."""
    # with an NPU the module does not compile its functions
    vars(importlib.import_module("areal.infra.platforms"))["is_npu_available"] = True
    module = importlib.import_module("areal.utils.functional.vocab_parallel")
    return {
        "gather_logprobs_entropy": lambda logits, tokens, temperature: (
            module.gather_logprobs_entropy(logits, tokens, temperature)
        )
    }


REMARKS = (
    "Micro-batches count by their tokens, as the engine's loss_weight_fn has it. The KL term (kl_ctl = 0.1, k1, in "
    "float32) is a part of the reward, and not of these losses.",
    "Not covered: packed sequences, the decoupled loss and its rejection sampling, M2PO's mask, distillation.",
)
AREAL = Framework(
    "areal",
    pin=PIN,
    modes=_modes,
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    kernels=_kernels,
    remarks=REMARKS,
    out_of_scope={
        "m2po": "actor.m2_threshold leaves out the tokens on which the sampler's policy and the one before the update "
        "differ most, whatever the sign of A; the objective of the registry compares π_θ, and leaves out only what is "
        "already past π_old in the direction of the update",
    },
)
