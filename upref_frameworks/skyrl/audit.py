# SPDX-License-Identifier: Apache-2.0
"""SkyRL's policy losses as the audit compares them with the papers, and why they
differ.
"""

import importlib
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from upref import advantages
from upref.aggregation import Totals
from upref.ops import binary_kl
from upref.rollouts import Rollouts
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, aggregated, fault, with_hp
from upref_frameworks.audits import token_parts
from upref_frameworks.audits.components import kls
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import (
    ALONE,
    CLAMP,
    CLAMP_K3,
    CLAMP_S,
    NARROW_K3,
    SAMPLE,
    keep_singletons,
    whiten_by_sample,
)

HOME = "skyrl/backends/skyrl_train/utils/"
PIN = Pin(
    packages=("skyrl==0.3.0", "loguru==0.7.3", "pyyaml==6.0.3"),
    files={
        HOME + "ppo_utils.py": "0d7ae59af59b16cc3d0b6593251bd3ab",
        HOME + "torch_utils.py": "c145636be365b9513197cd0947f24ef2",
        "skyrl/train/config/config.py": "a3b36099c5308fc9bc658394f10cfff0",
    },
    skip_init=(
        "skyrl",
        "skyrl.backends",
        "skyrl.backends.skyrl_train",
        "skyrl.backends.skyrl_train.utils",
        "skyrl.train",
    ),
    stubs=("ray", "omegaconf", "skyrl_gym", "cloudpathlib", "peft"),
    decorators=("ray.remote",),
)
# losses with a section of their own
OWN = {"sapo": "sapo", "cispo": "cispo", "dppo": "dppo"}
READ = (
    "loss_reduction",
    "max_seq_len",
    "eps_clip_low",
    "eps_clip_high",
    "clip_ratio_c",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_estimator_type",
)


def _utils() -> ModuleType:
    """Return SkyRL's module of losses, imported where an audit runs."""
    # true here: an audit runs without ray
    vars(importlib.import_module("ray"))["is_initialized"] = lambda: False
    return importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")


def _settings(mode: str, config: dict[str, Any]) -> Any:
    """Return an AlgorithmConfig with these fields. A field that it does not have
    belongs to the section of the loss, such as `cispo`.
    """
    settings = importlib.import_module("skyrl.train.config").AlgorithmConfig(
        policy_loss_type=mode
    )
    for key, value in config.items():
        owner = settings if hasattr(settings, key) else getattr(settings, OWN[mode])
        setattr(owner, key, value)
    return settings


def _defaults(mode: str) -> dict[str, Any]:
    """Return the defaults of AlgorithmConfig in the fields of READ, and those of the
    section of the loss, where it has one.
    """
    settings = importlib.import_module("skyrl.train.config").AlgorithmConfig()
    return {k: getattr(settings, k) for k in READ} | (
        asdict(getattr(settings, OWN[mode])) if mode in OWN else {}
    )


def _loss(
    mode: str,
    config: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_log_prob: Tensor,
    group: Tensor,
    totals: Totals,
) -> Tensor:
    """Return the value of SkyRL's loss in this mode on tensors, with its KL term if
    that is on, reduced as in the whole mini-batch.
    """
    utils = _utils()
    cfg = _settings(mode, config)
    mask = mask.to(log_prob.dtype)
    # the trainer folds the reduction into the advantages of the whole mini-batch, the
    # workers then sum
    by_prompt, boundaries = _order_by_prompt(group)
    scaled = torch.empty_like(advantages)
    scaled[by_prompt] = utils.apply_loss_reduction_to_advantages_minibatch(
        advantages[by_prompt],
        mask[by_prompt],
        cfg.loss_reduction,
        len(mask),
        cfg.max_seq_len,
        boundaries,
    )
    micro_batch_factor = _factor_of_micro_batch(cfg.loss_reduction, mask, group, totals)
    behaviour = {"rollout_logprobs": old_log_prob} if mode == "rollout_is" else {}
    value, _ = utils.PolicyLossRegistry.get(mode)(
        log_prob, old_log_prob, scaled * micro_batch_factor, cfg, mask, **behaviour
    )
    if cfg.use_kl_loss:  # as the worker adds it
        kl = utils.compute_approx_kl(
            log_prob, ref_log_prob, mask, cfg.kl_estimator_type
        )
        mean_kl = utils.masked_mean(kl, mask, dim=-1).mean()
        value = value + cfg.kl_loss_coef * mean_kl * len(mask) / totals.sequences
    return value


def _order_by_prompt(group: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return an order of the rows in which those of a prompt stand together, as in
    SkyRL's trainer; and where each prompt begins and ends.
    """
    order = group.argsort(stable=True)
    ends = group.unique(return_counts=True)[1].cumsum(0).tolist()
    return order, list(zip([0, *ends], ends, strict=False))


def _factor_of_micro_batch(
    reduction: str, mask: Tensor, group: Tensor, totals: Totals
) -> Tensor | float:
    """Return the factor that turns the reduction of a micro-batch into its part of the
    whole mini-batch's: a number, or [B, 1] for prompt_mean.
    """
    if reduction == "token_mean":
        return mask.sum() / totals.tokens
    if reduction != "prompt_mean":
        return len(mask) / totals.sequences
    counts = Totals.of(mask.bool(), group)
    all_tokens = totals.groups * totals.group_tokens
    return torch.as_tensor(counts.groups * counts.group_tokens / all_tokens).expand(
        len(mask)
    )[:, None]


def _near_bound(batch: Rollouts) -> Tensor:
    """Return the tokens so near to the bound 0.05 of dppo_kl that rounding may move
    them across it, [B, T].
    """
    return (binary_kl(batch.logp, batch.logp_old) - 0.05).abs() < 1e-5


NO_KL = {"use_kl_loss": False}
PROMPTS = NO_KL | {"loss_reduction": "prompt_mean"}
MEANS = NO_KL | {"loss_reduction": "sequence_mean"}
SUMS = NO_KL | {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 1}
FLOOR = fault(
    "weights in [1, 6]: cispo_eps_clip_low = 0 lifts every smaller one to 1",
    "objective",
    objective="cispo_verl",
    hp={"eps_low": 0.0, "eps_high": 5.0},
)
NEAR = fault(
    "1e-8 inside the logarithms moves the bound by < 1e-5 (tokens there left out)",
    "rounding",
    skip=_near_bound,
)
TOKENS = aggregated("token-mean")
COMPARISONS = (
    Comparison("default", "regular", NO_KL, "ppo_clip", {}, (CLAMP,)),
    Comparison(
        "default",
        "regular",
        {"loss_reduction": "sequence_mean"},
        "grpo",
        {},
        (with_hp(beta=0.001), CLAMP, CLAMP_K3),
    ),
    Comparison("default", "dual_clip", NO_KL, "ppo_clip", {}, (with_hp(c=3.0),)),
    Comparison(
        "default",
        "gspo",
        NO_KL,
        "gspo",
        {},
        (with_hp(eps_low=0.2, eps_high=0.2), TOKENS, CLAMP_S),
    ),
    Comparison("default", "cispo", NO_KL, "cispo", {}, (FLOOR, GROUPS)),
    Comparison("default", "sapo", NO_KL, "sapo", {}, (TOKENS,)),
    Comparison(
        "default", "dppo", NO_KL, "dppo_tv", {}, (with_hp(delta=0.2), TOKENS, CLAMP)
    ),
    Comparison("default", "importance_sampling", NO_KL, "is_pg", {}, (TOKENS,)),
    Comparison(
        "paper", "regular", NO_KL | {"eps_clip_high": 0.28}, "dapo", {}, (GROUPS, CLAMP)
    ),
    Comparison(
        "paper", "regular", PROMPTS | {"eps_clip_high": 0.28}, "dapo", {}, (CLAMP,)
    ),
    Comparison("paper", "regular", MEANS, "grpo", {}, (CLAMP,)),
    Comparison("paper", "regular", SUMS, "dr_grpo", {}, (CLAMP,)),
    Comparison(
        "paper",
        "regular",
        MEANS | {"use_kl_loss": True, "kl_loss_coef": 0.04},
        "grpo",
        {"beta": 0.04},
        (CLAMP, CLAMP_K3),
    ),
    Comparison(
        "paper",
        "dual_clip",
        NO_KL | {"eps_clip_high": 0.28, "clip_ratio_c": 10.0},
        "dapo",
        {"c": 10.0},
        (GROUPS,),
    ),
    Comparison(
        "paper",
        "gspo",
        MEANS | {"eps_clip_low": 3e-4, "eps_clip_high": 4e-4},
        "gspo",
        {},
        (CLAMP_S,),
    ),
    Comparison(
        "paper",
        "cispo",
        NO_KL | {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0},
        "cispo",
        {},
        (GROUPS,),
    ),
    Comparison(
        "paper",
        "cispo",
        PROMPTS | {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0},
        "cispo",
        {},
    ),
    Comparison("paper", "sapo", MEANS, "sapo", {}),
    Comparison(
        "paper",
        "dppo",
        SUMS | {"delta_low": 0.15, "delta_high": 0.15},
        "dppo_tv",
        {},
        (CLAMP,),
    ),
    Comparison(
        "paper",
        "dppo",
        SUMS | {"dppo_type": "binary_kl", "delta_low": 0.05, "delta_high": 0.05},
        "dppo_kl",
        {},
        (NEAR, CLAMP),
    ),
    Comparison("paper", "importance_sampling", SUMS, "is_pg", {}),
)


def _advantages(name: str, **options: bool) -> Callable[..., Tensor]:
    """Return SkyRL's advantages of this name, as a function of rewards and groups."""

    def advantages(rewards: Tensor, group: Tensor) -> Tensor:
        """Return the advantages where each response is one token. SkyRL's function
        writes into the rewards, so it gets a copy.
        """
        estimator = _utils().AdvantageEstimatorRegistry.get(name)
        ones = torch.ones_like(rewards)[:, None]
        return estimator(
            token_level_rewards=rewards.clone()[:, None],
            response_mask=ones,
            index=group.numpy(),
            gamma=1.0,
            **options,
        )[0][:, 0]

    return advantages


def _responses(mask: Tensor) -> Tensor:
    """Return SkyRL's response mask: from the first to the last trained slot, a tool's
    tokens included.
    """
    begun = mask.cumsum(1) > 0
    to_come = mask.flip(1).cumsum(1).flip(1) > 0
    return begun & to_come


def _gae(which: int, gamma: float, lam: float) -> Callable[..., Tensor]:
    """Return SkyRL's GAE (0) or its returns (1), as a function of rewards, values and
    mask. Like its trainer it passes the response mask.
    """

    def answer(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return SkyRL's advantages or returns."""
        whole = _responses(mask).to(values)
        both = _utils().compute_gae_advantage_return(rewards, values, whole, gamma, lam)
        return both[which]

    return token_parts.on_trained(answer)


def _gae_through_tools(
    name: str, gamma: float, lam: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a reference of GAE in which a tool's tokens are steps like the others."""

    def answer(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return the advantages or returns of trained slots."""
        of_name = token_parts.ADVANTAGES[name]
        A = of_name(rewards, values, _responses(mask), gamma=gamma, lam=lam)
        return torch.where(mask, A, 0)

    return answer


def _gae_parts(gamma: float, lam: float) -> tuple[Component, ...]:
    """Return SkyRL's GAE and its returns, with these settings."""
    return tuple(
        Component(
            "token_advantages",
            f"{name}, gamma={gamma:g}, lambd={lam:g}",
            _gae(which, gamma, lam),
            name,
            {"gamma": gamma, "lam": lam},
            (Fault(TOOL_STEP, _gae_through_tools(name, gamma, lam)),),
            leaves_out=(token_parts.BEHIND,),
        )
        for which, name in enumerate(("gae_whitened", "gae_returns"))
    )


def _value_loss(clip: float | None) -> Callable[..., Tensor]:
    """Return SkyRL's loss of a critic, as a function of values, old values, returns and
    mask.
    """

    def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        """Return the loss at this clip."""
        config = _settings("regular", {"value_clip": clip})
        numbers = mask.to(values)
        value, _ = _utils().ppo_critic_loss(values, old, returns, config, numbers)
        return value

    return loss


def _parts() -> tuple[Component, ...]:
    """Return the parts of SkyRL that are compared by themselves, such as its
    advantages.
    """
    logprobs = importlib.import_module(
        "skyrl.backends.skyrl_train.utils.torch_utils"
    ).logprobs_from_logits
    return (
        Component(
            "advantages",
            "grpo",
            _advantages("grpo"),
            "group_norm",
            reasons=(Fault(ALONE, keep_singletons(advantages.group_norm)),),
            tol=1e-5,
        ),
        Component(
            "advantages",
            "grpo, grpo_norm_by_std=False",
            _advantages("grpo", grpo_norm_by_std=False),
            "group_mean",
            reasons=(Fault(ALONE, keep_singletons(advantages.group_mean)),),
        ),
        Component("advantages", "rloo", _advantages("rloo"), "leave_one_out"),
        Component(
            "advantages",
            "reinforce++",
            _advantages("reinforce++"),
            "whiten",
            reasons=(Fault(SAMPLE, whiten_by_sample),),
            tol=1e-6,
        ),
        *kls(
            lambda lp, ref, name: _utils().compute_approx_kl(lp, ref, None, name),
            {"k1": "k1", "k2": "k2", "k3": "k3"},
            {"k3": (NARROW_K3,)},
        ),
        Component(
            "logprobs",
            "logprobs_from_logits",
            lambda z, tokens, t: logprobs(z / t, tokens),
            "token_log_probs",
        ),
        *_gae_parts(1.0, 1.0),
        *_gae_parts(0.9, 0.8),
        Component(
            "value",
            "ppo_critic_loss, value_clip=0.2",
            _value_loss(0.2),
            "clipped, seq-mean-token-mean",
            {"clip": 0.2},
        ),
        Component(
            "value",
            "ppo_critic_loss, value_clip=None",
            _value_loss(None),
            "mse, seq-mean-token-mean",
        ),
    )


TOOL_STEP = "a tool's token is a step of its own, with its value"
REMARKS = (
    "It computes ratios in float32: compared to 1e-6. prompt_mean gets the prompts' places in the mini-batch, as its "
    "trainer computes them.",
    "Not covered: several ranks, off_policy_correction, the maxrl estimator.",
    "gae gets a batch as its trainer makes it: padding before the responses, and the response mask, which has a "
    "tool's tokens too.",
    "Not covered: advantage_batch_normalize (off by default). Its deviation is over tokens, and its mean over padding too, "
    "which counts as 0 (skyrl/train/trainer.py, lines 1451 and 1452; NovaSky-AI/SkyRL#1305, open when it was read).",
)
SKYRL = Framework(
    "skyrl",
    pin=PIN,
    modes=lambda: [str(m) for m in _utils().PolicyLossRegistry.list_available()],
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    remarks=REMARKS,
    tol=1e-6,
    out_of_scope={
        "clip_cov": "clips a random subset of tokens, so two calls differ",
        "kl_cov": "not compared by this audit: a penalty on the tokens of largest covariance (kl_cov of the registry)",
        "cross_entropy": "supervised: it reads no advantages",
        "rollout_is": "no objective of the registry: the ratio to the sampler, 0 outside two bounds",
    },
)
