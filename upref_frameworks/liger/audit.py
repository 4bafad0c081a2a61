# SPDX-License-Identifier: Apache-2.0
"""Liger-Kernel's chunked GRPO loss as the audit compares it with the papers, and why it
differs.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from upref.kl import k3
from upref.rollouts import Rollouts, Totals
from upref.verify.faults.losses import GROUPS, LossFault, aggregated, fault, with_hp
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import (
    BNPO,
    BY_TOKENS,
    CAP,
    F32,
    LENGTH,
    LUSPO,
    NO_KL,
    SLOTS,
    VESPO,
    WIDTH,
)
from upref_frameworks.audits.sources import arguments

PIN = Pin(
    packages=("liger-kernel==0.8.5",),
    files={
        "liger_kernel/chunked_loss/grpo_loss.py": "b4ea24c05ac63f9981de71d0d9310876",
        "liger_kernel/ops/fused_linear_scaled_cross_entropy.py": "ce69ad089ff7bc684535c9de30f38b2b",
        "liger_kernel/chunked_loss/fused_linear_ppo.py": "0daa930fb2967cec318f543b5137b009",
    },
    root="src",
    skip_init=("liger_kernel", "liger_kernel.chunked_loss", "liger_kernel.ops"),
)
# NO_KL below: beta is 0.04 by default, and few papers have the term
COUNTED = ("dapo", "cispo", "vespo")  # these read num_items_in_batch


def _grpo() -> ModuleType:
    """Return Liger's module of the GRPO loss, imported where an audit runs."""
    return importlib.import_module("liger_kernel.chunked_loss.grpo_loss")


def _modes() -> list[str]:
    """Return the names with which ppo_loss_fn's source compares loss_type."""
    source = inspect.getsource(_grpo().LigerFusedLinearGRPOFunction.ppo_loss_fn)
    tests = re.findall(r'loss_type (?:==|in) ("\w+"|\([^)]*\))', source)
    return sorted({name for test in tests for name in re.findall(r'"(\w+)"', test)})


def _defaults(mode: str) -> dict[str, Any]:
    """Return the defaults of the module that users construct."""
    return arguments(_grpo().LigerFusedLinearGRPOLoss.__init__, "loss_type")


# not of the loss on log-probabilities
ELSEWHERE = ("compiled", "use_ref_model", "chunk_size", "temperature")


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
    """Return the value of Liger's loss in this mode on tensors. A loss that is not
    given the tokens of the whole batch is divided by the number of micro-batches.
    """
    settings = {k: v for k, v in config.items() if k not in ELSEWHERE}
    token_count = {"num_items_in_batch": int(totals.tokens)} if mode in COUNTED else {}
    value, _ = _grpo().LigerFusedLinearGRPOFunction.ppo_loss_fn(
        log_prob,
        mask,
        advantages,
        mask,
        ref_per_token_logps=ref_log_prob,
        old_per_token_logps=old_log_prob,
        loss_type=mode,
        **settings,
        **token_count,
    )
    return value if mode in COUNTED else value / num_micro_batches


def _kl_fault(words: str, weight: Callable[[Tensor, Tensor], Tensor]) -> LossFault:
    """Return the fault of a part of luspo's KL term: k3 of each slot times a weight.
    The weight is a function of the mask and of each response's share of the width.
    """

    def term(batch: Rollouts) -> Tensor:
        """Return the faulty term of a batch, with the coefficient 0.04."""
        assert batch.logp_ref is not None
        mask = batch.mask.to(batch.logp)
        share_of_width = mask.mean(1, keepdim=True)
        terms = k3(batch.logp, batch.logp_ref) * weight(mask, share_of_width)
        return -0.04 * terms.sum() / len(mask)

    return fault(words, "term", term=term)


BETA = with_hp(beta=0.04)
CLIP = with_hp(eps_low=0.2, eps_high=0.2)
HIGH = replace(
    with_hp(eps_high=0.2),
    words="eps_high = 0.2, in a kernel whose callers pass both bounds",
)
SEQUENCE = {"importance_sampling_level": "sequence"}
GSPO = SEQUENCE | {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
LONG = SEQUENCE | {"epsilon_low": 2e-3, "epsilon_high": 2.5e-3}
COMPARISONS = (
    Comparison("default", "grpo", {}, "grpo", {}, (BETA,)),
    Comparison("default", "dapo", NO_KL, "dapo", {}, (HIGH, GROUPS)),
    Comparison("default", "bnpo", NO_KL, "ppo_clip", {}),
    Comparison(
        "default",
        "dr_grpo",
        NO_KL | {"max_completion_length": 512},
        "dr_grpo",
        {},
        (LENGTH,),
    ),
    Comparison("default", "cispo", NO_KL, "cispo", {}, (CAP, GROUPS)),
    Comparison("default", "sapo", NO_KL, "sapo", {}, (F32,)),
    Comparison("default", "vespo", NO_KL, "vespo", {}, (BY_TOKENS,)),
    Comparison(
        "default",
        "dapo",
        NO_KL | SEQUENCE,
        "gspo",
        {},
        (CLIP, aggregated("token-mean")),
    ),
    Comparison("default", "luspo", NO_KL, "luspo", {}, (LUSPO, WIDTH, SLOTS)),
    Comparison(
        "default",
        "luspo",
        LONG,
        "luspo",
        {},
        (
            _kl_fault(BETA.words, lambda m, _: m),
            _kl_fault(WIDTH.words, lambda m, share: m * (share - 1)),
            _kl_fault(SLOTS.words, lambda m, share: (1 - m) * share),
        ),
    ),
    Comparison("paper", "grpo", {"beta": 0.04}, "grpo", {"beta": 0.04}),
    Comparison("paper", "grpo", NO_KL | GSPO, "gspo", {}),
    Comparison("paper", "dapo", NO_KL | {"epsilon_high": 0.28}, "dapo", {}, (GROUPS,)),
    Comparison(
        "paper",
        "dapo",
        NO_KL | {"epsilon_high": 0.28, "delta": 10.0},
        "dapo",
        {"c": 10.0},
        (GROUPS,),
    ),
    Comparison("paper", "bnpo", NO_KL, "ppo_clip", {}),
    Comparison("paper", "dr_grpo", NO_KL | {"max_completion_length": 1}, "dr_grpo", {}),
    Comparison("paper", "cispo", NO_KL | {"epsilon_high": 5.0}, "cispo", {}, (GROUPS,)),
    Comparison("paper", "sapo", NO_KL, "sapo", {}, (F32,)),
    Comparison("paper", "vespo", NO_KL | VESPO, "vespo", {}, (BY_TOKENS,)),
    Comparison("paper", "luspo", NO_KL | LONG, "luspo", {}),
)


def _chunked_log_probs(z: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return Liger's chunked log-probabilities of logits z: these are its hidden
    states, and its head is the identity.
    """
    return _chunk_forward(z, torch.eye(z.shape[-1], dtype=z.dtype), tokens, temperature)


def _chunk_forward(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float
) -> Tensor:
    """Return Liger's log-probabilities of hidden states, in chunks."""
    base = importlib.import_module(
        "liger_kernel.chunked_loss.fused_linear_ppo"
    ).LigerFusedLinearPPOBase
    return base.chunk_forward(hidden, weight, tokens, temperature=temperature)


def _jsd(beta: float, temperature: float) -> Callable[..., Tensor]:
    """Return LigerFusedLinearJSDLoss without its loss of labels, as a function of logits
    and mask: the hidden states are the logits, and the heads the identity.
    """

    def loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """Return the loss, the mean over the tokens."""
        module = importlib.import_module("liger_kernel.chunked_loss.jsd_loss")
        of_class = module.LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0,
            weight_soft_loss=1.0,
            beta=beta,
            temperature=temperature,
            compiled=False,
        )
        head = torch.eye(student.shape[-1], dtype=student.dtype)
        labels = torch.where(mask, 0, -100).flatten()
        given = (student.flatten(0, -2), head, teacher.flatten(0, -2), head, labels)
        value: Tensor = of_class(*given)
        return value

    return loss


def _parts() -> tuple[Component, ...]:
    """Return the parts of Liger that are compared by themselves: its KL term, its
    log-probabilities and its loss of a teacher.
    """
    return (
        Component(
            "kl", "k3_loss_fn", lambda lp, ref: _grpo().k3_loss_fn(ref, lp), "k3"
        ),
        Component(
            "logprobs", "chunk_forward", _chunked_log_probs, "token_log_probs", tol=1e-4
        ),
        *(
            Component(
                "distillation",
                f"LigerFusedLinearJSDLoss, beta={beta:g}, temperature={temperature:g}",
                _jsd(beta, temperature),
                promise,
                hp | {"temperature": temperature},
                tol=1e-6,
            )
            for beta, temperature, promise, hp in (
                (0.5, 1.0, "jsd", {"beta": 0.5}),
                (0.1, 2.0, "jsd", {"beta": 0.1}),
                (0.0, 1.0, "forward_kl", {}),
                (1.0, 1.0, "reverse_kl", {}),
            )
        ),
    )


def _kernels() -> dict[str, Callable[..., Any]]:
    """Return the functions of Liger that compute log-probabilities, by name."""
    module = importlib.import_module(
        "liger_kernel.ops.fused_linear_scaled_cross_entropy"
    )

    def scaled(
        hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies by the function that a CPU runs. It
        takes rows and returns -log π.
        """
        apply = module.LigerFusedLinearScaledCrossEntropyFunction.apply
        nll, entropy = apply(
            hidden.flatten(0, -2), weight, tokens.flatten(), temperature, -100, 1, True
        )
        return -nll.view_as(tokens), entropy.view_as(tokens)

    return {
        "chunk_forward": _chunk_forward,
        "fused_linear_scaled_cross_entropy": scaled,
    }


REMARKS = (
    "Micro-batches as TRL's Liger path had it: the loss of each is divided by their number, but for dapo, cispo "
    "and vespo, which are given num_items_in_batch.",
    "chunk_forward computes in float32: compared to 1e-4. LigerFusedLinearJSDLoss adds up its value in float32: to 1e-6.",
    "Not covered: several ranks, the Triton kernels, torch.compile, vLLM's correction weights.",
)
LIGER = Framework(
    "liger",
    pin=PIN,
    modes=_modes,
    defaults=_defaults,
    loss_by_names=_loss,
    one_adv=True,
    comparisons=COMPARISONS,
    parts=_parts,
    split_reasons={"bnpo": BNPO},
    kernels=_kernels,
    remarks=REMARKS,
)
