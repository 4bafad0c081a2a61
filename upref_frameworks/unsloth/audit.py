# SPDX-License-Identifier: Apache-2.0
"""Unsloth's policy losses as the audit compares them with the papers, and why they
differ.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.ops import exp, expm1
from upref.verify.faults.losses import GROUPS, aggregated, fault, with_hp
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import BNPO, CAP, CLAMP_K3, F32, LUSPO, kl_term

PIN = Pin(
    packages=("unsloth_zoo==2026.10.9",),
    files={
        "unsloth_zoo/rl_replacements.py": "28275ce5683669113b8b6f47bdd04102",
        "unsloth_zoo/fused_losses/fused_linear.py": "7245d2f0774da223b33b24059d2854fb",
    },
    skip_init=(
        "unsloth_zoo",
        "unsloth_zoo.temporary_patches",
        "unsloth_zoo.fused_losses",
    ),
    stubs=("datasets",),
    # its own settings: no GPU, the plain functions
    env={"UNSLOTH_FORCE_CPU": "1", "UNSLOTH_COMPILE_DISABLE": "1"},
)
READ = (
    "epsilon_low",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "max_completion_length",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "use_bias_correction_kl",
)


def _zoo() -> ModuleType:
    """Return Unsloth's module of losses, imported where an audit runs."""
    return importlib.import_module("unsloth_zoo.rl_replacements")


def _source() -> str:
    """Return the source of Unsloth's loss."""
    return inspect.getsource(_zoo().grpo_compute_loss)


def _modes() -> list[str]:
    """Return the values that the loss's source compares loss_type with, in alphabetical
    order.
    """
    compared_with = " ".join(re.findall(r"loss_type (?:==|in) (.*?):", _source()))
    return sorted(set(re.findall(r'"(\w+)"', compared_with)))


def _defaults(mode: str) -> dict[str, Any]:
    """Return the values that the loss falls back to, the VALUE of kwargs.get(NAME,
    VALUE) in its source. beta is an argument without a default; 0 is no KL term.
    """
    fallbacks = {}
    for node in ast.walk(ast.parse(_source())):
        if isinstance(node, ast.Call) and len(node.args) == 2:
            name, value = node.args
            if isinstance(name, ast.Constant):
                fallbacks[name.value] = value
    return {k: ast.literal_eval(fallbacks[k]) for k in READ} | {"beta": 0.0}


def _loss(
    mode: str,
    config: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_log_prob: Tensor,
    totals: Totals,
    num_micro_batches: int,
) -> Tensor:
    """Return the value of the loss as Unsloth's trainer calls it: with the tokens of
    the accumulated batch, and how many micro-batches that has.
    """
    settings = {k: v for k, v in config.items() if k != "beta"}
    return _zoo().grpo_compute_loss(
        ref_log_prob,
        log_prob,
        old_log_prob,
        None,
        mask.long(),
        mask,
        config["beta"],
        advantages,
        loss_type=mode,
        num_items_in_batch=torch.as_tensor(totals.tokens),
        current_gradient_accumulation_steps=num_micro_batches,
        **settings,
    )[0]


def _weighted_k3(lp: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    """Return k3 times the ratio, as Unsloth clamps it: log-ratio to 20, value to 10."""
    d = (ref - lp).clamp(-20, 20)
    return (exp(lp - old) * (expm1(d) - d)).clamp(-10, 10)


KL = {"beta": 0.04}
SEQUENCE = {"importance_sampling_level": "sequence"}
GSPO = SEQUENCE | {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
HIGHER = {"epsilon_high": 0.28}
LENGTH = fault(
    "divided by max_completion_length = 8192",
    "aggregation",
    scale=lambda batch: 1 / 8192,
)
LONG = SEQUENCE | {"epsilon_low": 2e-3, "epsilon_high": 2.5e-3}
WEIGHTED = kl_term(
    "the KL term is multiplied by the ratio, which is differentiated too, and clamped to 10",
    _weighted_k3,
)
CLIP = with_hp(eps_low=0.2, eps_high=0.2)
COMPARISONS = (
    Comparison("default", "grpo", {}, "grpo", {}),
    Comparison("default", "grpo", KL, "grpo", {"beta": 0.04}, (CLAMP_K3,)),
    Comparison(
        "default",
        "grpo",
        KL | {"use_bias_correction_kl": True},
        "grpo",
        {"beta": 0.04},
        (WEIGHTED,),
    ),
    Comparison("default", "bnpo", {}, "ppo_clip", {}),
    Comparison("default", "dapo", {}, "dapo", {}, (with_hp(eps_high=0.2), GROUPS)),
    Comparison(
        "default", "dapo", SEQUENCE, "gspo", {}, (CLIP, aggregated("token-mean"))
    ),
    Comparison("default", "dr_grpo", {}, "dr_grpo", {}, (LENGTH,)),
    Comparison("default", "cispo", {}, "cispo", {}, (CAP, GROUPS)),
    Comparison("default", "sapo", {}, "sapo", {}, (F32,)),
    Comparison("default", "luspo", {}, "luspo", {}, (LUSPO,)),
    Comparison("paper", "grpo", {}, "grpo", {}),
    Comparison("paper", "grpo", GSPO, "gspo", {}),
    Comparison("paper", "bnpo", {}, "ppo_clip", {}),
    Comparison("paper", "dapo", HIGHER, "dapo", {}, (GROUPS,)),
    Comparison(
        "paper", "dapo", HIGHER | {"delta": 10.0}, "dapo", {"c": 10.0}, (GROUPS,)
    ),
    Comparison("paper", "dr_grpo", {"max_completion_length": 1}, "dr_grpo", {}),
    Comparison("paper", "cispo", {"epsilon_high": 5.0}, "cispo", {}, (GROUPS,)),
    Comparison("paper", "sapo", {"sapo_temperature_pos": 1.0}, "sapo", {}, (F32,)),
    Comparison("paper", "luspo", LONG, "luspo", {}),
)


def _parts() -> tuple[Component, ...]:
    """Return Unsloth's functions of log-probabilities, which are compared by
    themselves.
    """
    zoo = _zoo()

    def plain(z: Tensor, tokens: Tensor, t: float) -> Tensor:
        """Return log-probabilities of logits divided by the temperature."""
        return zoo.selective_log_softmax(z / t, tokens)

    def chunked(z: Tensor, tokens: Tensor, t: float) -> Tensor:
        """Return log-probabilities by the function that takes the temperature."""
        return zoo.chunked_selective_log_softmax(z, tokens, t)

    def head(z: Tensor, tokens: Tensor, t: float) -> Tensor:
        """Return log-probabilities of hidden states; the head is the identity."""
        return zoo.chunked_hidden_states_selective_log_softmax(
            z, torch.eye(z.shape[-1], dtype=z.dtype), tokens, temperature=t
        )

    names = {
        "selective_log_softmax": plain,
        "in chunks": chunked,
        "in chunks, from hidden states": head,
    }
    return tuple(
        Component("logprobs", k, f, "token_log_probs", tol=1e-4)
        for k, f in names.items()
    )


def _kernels() -> dict[str, Callable[..., Any]]:
    """Return the functions of Unsloth that compute log-probabilities, by name."""
    fused = importlib.import_module(
        "unsloth_zoo.fused_losses.fused_linear"
    ).fused_linear_logprobs

    def linear(
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: float,
        bias: Tensor | None = None,
    ) -> Any:
        """Return log-probabilities and entropy by the fused output layer."""
        return fused(
            hidden,
            weight,
            tokens,
            bias=bias,
            temperature=temperature,
            return_entropy=True,
        )

    def chunked(
        hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float
    ) -> Any:
        """Return log-probabilities by the function that the trainer calls, with the
        temperature by name.
        """
        return _zoo().chunked_hidden_states_selective_log_softmax(
            hidden, weight, tokens, temperature=temperature
        )

    return {"fused_linear_logprobs": linear, "in chunks, from hidden states": chunked}


REMARKS = (
    "grpo_compute_loss as UnslothEfficientGRPO calls it, which then differentiates it in one chunk. Defaults are "
    "what this function falls back to. Unsloth's trainer (models/rl.py of unsloth 2026.10.9) passes values of its own "
    "where a field is left unset: beta is 0 with dapo and dr_grpo and 0.001 with the others, epsilon_high is 0.28 with "
    "an explicit dapo and 5.0 with cispo, vllm_importance_sampling_correction is off.",
    "Micro-batches by TRL's contract: of equal size; cispo and dapo divide by the tokens of the accumulated batch.",
    "Not covered: vLLM's correction weights and rejection, the off-policy mask, entropy terms, sample weights, "
    "advantages (they are TRL's), compiled code.",
)
UNSLOTH = Framework(
    "unsloth",
    pin=PIN,
    modes=_modes,
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    split_reasons={"bnpo": BNPO},
    kernels=_kernels,
    out_of_scope={
        "vespo": "its weight is computed by TRL's function, which the trainer passes"
    },
    remarks=REMARKS,
    one_adv=True,
)
