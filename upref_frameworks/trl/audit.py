# SPDX-License-Identifier: Apache-2.0
"""TRL's policy losses as the audit compares them with the papers, and why they differ."""

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.advantages import group_mean
from upref.kl import k3
from upref.ops import exp
from upref.registry import get
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, LossFault, aggregated, fault, with_hp
from upref_frameworks.audits import token_parts
from upref_frameworks.audits.framework import Comparison, Component, Framework
from upref_frameworks.audits.shared import (
    BETA,
    BNPO,
    BY_TOKENS,
    CAP,
    F32,
    LENGTH,
    LUSPO,
    VESPO,
    kl_term,
)
from upref_frameworks.trl.losses import import_trl, loss_types, trl_loss

PRODUCT = replace(
    get("gspo"),
    name="min(S A, clip(S) A), S the product of a response's ratios",
    level="sequence_product",
)
UNCLIPPED = 1e30  # RLOOTrainer cannot switch its clip off


def _product_clip_fault(eps: float) -> LossFault:
    """Return the fault of a PPO clip on the product of a response's ratios. At a large
    eps nothing is clipped, and the words say so.
    """
    if eps < 1:
        words = "PPO's clip on the product of the response's ratios"
    else:
        words = "weighted by the product of the ratios"
    return fault(
        f"{words}, eps = {eps:g}",
        "objective",
        objective=PRODUCT,
        hp={"eps_low": eps, "eps_high": eps},
    )


SAID = "the KL term is multiplied by the ratio, which is differentiated too"
KL = kl_term(SAID, lambda lp, ref, old: exp(lp - old) * k3(lp, ref))
SEQUENCE = {"importance_sampling_level": "sequence"}
GSPO = SEQUENCE | {"epsilon": 3e-4, "epsilon_high": 4e-4}
LONG = SEQUENCE | {"epsilon": 2e-3, "epsilon_high": 2.5e-3}
COMPARISONS = (
    Comparison("default", "dapo", {}, "dapo", {}, (with_hp(eps_high=0.2), GROUPS)),
    Comparison("default", "grpo", {}, "grpo", {}),
    Comparison("default", "grpo", {"beta": BETA}, "grpo", {"beta": BETA}, (KL,)),
    Comparison("default", "bnpo", {}, "ppo_clip", {}),
    Comparison("default", "dr_grpo", {}, "dr_grpo", {}, (LENGTH,)),
    Comparison(
        "default",
        "dapo",
        SEQUENCE,
        "gspo",
        {},
        (with_hp(eps_low=0.2, eps_high=0.2), aggregated("token-mean")),
    ),
    Comparison("default", "cispo", {}, "cispo", {}, (CAP, GROUPS)),
    Comparison("default", "sapo", {}, "sapo", {}, (F32,)),
    Comparison("default", "vespo", {}, "vespo", {}, (BY_TOKENS,), one_adv=True),
    Comparison("default", "luspo", {}, "luspo", {}, (LUSPO,), one_adv=True),
    Comparison("default", "gmpo", {}, "gmpo", {}),
    Comparison(
        "default", "rloo", {}, "rloo", {}, (_product_clip_fault(0.2),), one_adv=True
    ),
    Comparison(
        "paper", "dapo", {"epsilon": 0.2, "epsilon_high": 0.28}, "dapo", {}, (GROUPS,)
    ),
    Comparison(
        "paper",
        "dapo",
        {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 10.0},
        "dapo",
        {"c": 10.0},
        (GROUPS,),
    ),
    Comparison("paper", "grpo", {"epsilon": 0.2}, "grpo", {}),
    Comparison(
        "paper",
        "grpo",
        {"beta": BETA, "use_bias_correction_kl": False},
        "grpo",
        {"beta": BETA},
    ),
    Comparison("paper", "bnpo", {"epsilon": 0.2}, "ppo_clip", {}),
    Comparison(
        "paper", "dr_grpo", {"epsilon": 0.2, "max_completion_length": 1}, "dr_grpo", {}
    ),
    Comparison("paper", "grpo", GSPO, "gspo", {}),
    Comparison("paper", "cispo", {"epsilon_high": 5.0}, "cispo", {}, (GROUPS,)),
    Comparison(
        "paper",
        "sapo",
        {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        "sapo",
        {},
        (F32,),
    ),
    Comparison("paper", "luspo", LONG, "luspo", {}),
    Comparison("paper", "vespo", VESPO, "vespo", {}, (BY_TOKENS,), one_adv=True),
    Comparison("paper", "gmpo", {"epsilon": 0.4}, "gmpo", {}),
    Comparison(
        "paper",
        "rloo",
        {"epsilon": UNCLIPPED},
        "rloo",
        {},
        (_product_clip_fault(UNCLIPPED),),
        one_adv=True,
    ),
)
OUT_OF_SCOPE = {
    "async_grpo": "no GRPOTrainer, and its constructor wants a running vLLM server",
}


def _modes() -> list[str]:
    """Return every loss_type, `rloo`, and the packages of trl.experimental that define
    a trainer derived from GRPO's or RLOO's, in alphabetical order.
    """
    root = Path(import_trl().__path__[0]) / "experimental"
    family = re.compile(
        r"^class \w*(GRPO|RLOO)\w*Trainer\(|^class \w+\((GRPO|RLOO)Trainer\)", re.M
    )
    packages = {
        f.relative_to(root).parts[0]
        for f in root.rglob("*.py")
        if family.search(f.read_text(encoding="utf-8"))
    }
    return sorted({*loss_types(), "rloo", *packages})


def _kernels() -> dict[str, Callable[..., Any]]:
    """Return the functions of TRL that compute log-probabilities, by name."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import selective_log_softmax_and_entropy

    def chunked(
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: float,
        bias: Tensor | None = None,
        softcap: float | None = None,
        logit_scale: float = 1.0,
    ) -> tuple[Tensor, ...]:
        """Return log-probabilities and entropy by TRL's function of hidden states, in
        chunks of 8,192.
        """
        given = (
            hidden.flatten(0, -2),
            weight,
            bias,
            tokens.flatten(),
            temperature,
            8192,
            softcap,
            logit_scale,
        )
        return tuple(
            x.view_as(tokens)
            for x in ChunkedLogProbFunction.apply(*given, ("entropy",))[:2]
        )

    def selective(
        logits: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities as TRL's trainer computes them, with the temperature
        by name.
        """
        return selective_log_softmax_and_entropy(
            logits, tokens, temperature=temperature
        )

    return {
        "ChunkedLogProbFunction": chunked,
        "selective_log_softmax_and_entropy": selective,
    }


def _advantages(trainer: type, **settings: Any) -> Callable[..., Tensor]:
    """Return the statements of the trainer's own method that make advantages, as a
    function of rewards and groups.

    They stand in the middle of a method that samples and scores: from the first statement
    on the grouped rewards to the one that replaces NaN. `settings` are the attributes of
    the trainer that they read.
    """
    method = vars(trainer)["_generate_and_score_completions"]
    lines = inspect.getsource(method).splitlines()
    beginnings = ("mean_grouped_rewards = ", "grouped_rewards")
    first = next(i for i, x in enumerate(lines) if x.strip().startswith(beginnings))
    if "mean_grouped" in lines[first]:  # inside of a branch, which is taken whole
        first = next(
            i for i, x in enumerate(lines) if x.strip().startswith("unscorable_mask = ")
        )
    end = "advantages = torch.nan_to_num(advantages"
    last = next(i for i, x in enumerate(lines) if i > first and end in x)
    statements = textwrap.dedent("\n".join(lines[first : last + 1]))
    code = compile(statements, trainer.__name__, "exec")

    def advantages(R: Tensor, group: Tensor) -> Tensor:
        """Return the advantages that TRL gives these rewards."""
        trainer_attributes = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            reward_funcs=[None],
            **settings,
        )
        trainer_attributes.reward_weights = torch.ones(1, dtype=R.dtype)
        names = {
            "self": trainer_attributes,
            "rewards": R.clone(),
            "rewards_per_func": R.clone()[:, None],
            "device": R.device,
            "num_generations": int((group == group[0]).sum()),
        }
        exec(code, vars(sys.modules[trainer.__module__]) | names, names)
        return torch.as_tensor(names["advantages"])

    return advantages


def _over_batch(R: Tensor, group: Tensor) -> Tensor:
    """Return GRPOConfig.scale_rewards="batch": rewards less their group's mean, divided
    by the standard deviation of all rewards, after Lite PPO (arXiv 2508.08221).
    """
    return group_mean(R, group) / (R.std(correction=1) + 1e-4)


def _part(mode: str, found: Any, promise: Any, **more: Any) -> Component:
    """Return a component of advantages, which is not compared in uneven groups or
    groups of one.
    """
    return Component(
        "advantages",
        mode,
        found,
        promise,
        leaves_out=("uneven", "one"),
        tol=1e-6,
        **more,
    )


def _labels(mask: Tensor) -> Tensor:
    """Return labels of a language model, [B, T]: -100, which losses leave out, where
    the mask is false.
    """
    return torch.where(mask, 0, -100)


def _of_trainer(trainer: str, **settings: Any) -> Callable[..., Tensor]:
    """Return generalized_jsd_loss of an experimental trainer, such as gkd.GKDTrainer, as
    a function of logits and mask.
    """

    def loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """Return the loss, the mean over the tokens."""
        folder, _, name = trainer.partition(".")
        module = importlib.import_module(f"trl.experimental.{folder}")
        of_class = getattr(module, name).generalized_jsd_loss
        return of_class(student, teacher, _labels(mask), **settings)

    return loss


def _of_sdpo(function: str, **settings: Any) -> Callable[..., Tensor]:
    """Return a function of SDPO's loss_utils, as a function of logits and mask; the
    trainer aggregates as the policy loss does, and here the mean is over the tokens.
    """

    def loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over the tokens."""
        module = importlib.import_module("trl.experimental.sdpo.loss_utils")
        per_token = getattr(module, function)(student, teacher, **settings)
        return per_token[mask].mean()

    return loss


def _sampled_of_sdpo(student: Tensor, teacher: Tensor, tokens: Tensor) -> Tensor:
    """Return SDPO's loss of sampled tokens, [B, T], at alpha = 1: the reverse KL."""
    module = importlib.import_module("trl.experimental.sdpo.loss_utils")
    return module.compute_sampled_token_self_distillation_loss(
        student, teacher, tokens, distillation_alpha=1.0
    )


def _floored_tail(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return the forward KL over the student's 3 most likely tokens and the rest, whose
    probability is at least 1e-7; the mean over the tokens.
    """
    lp, lp_teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    top = lp.topk(3, -1).indices

    def with_rest(x: Tensor) -> Tensor:
        """Return the log-probabilities of the 3 tokens and of the rest."""
        kept = x.gather(-1, top)
        in_all = kept.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
        return torch.cat([kept, (-in_all.expm1()).log()], -1)

    lp, lp_teacher = with_rest(lp), with_rest(lp_teacher)
    return (lp_teacher.exp() * (lp_teacher - lp)).sum(-1)[mask].mean()


def _divergences() -> tuple[Component, ...]:
    """Return the losses of GKD, IW-OPD and SDPO that read a teacher."""
    gkd, iw_opd = "gkd.GKDTrainer", "iw_opd.IWOPDTrainer"
    full = "compute_full_logit_self_distillation_loss"
    top = "compute_topk_self_distillation_loss"

    def part(
        mode: str, found: Any, promise: str, *reasons: Fault[Any], **hp: float
    ) -> Component:
        """Return a loss of a teacher, and what it is compared with."""
        return Component("distillation", mode, found, promise, hp, reasons, tol=1e-6)

    def of_topk(alpha: float, tail: bool) -> Callable[..., Tensor]:
        """Return SDPO's loss over the student's 3 most likely tokens."""
        return _of_sdpo(
            top,
            distillation_topk=3,
            distillation_alpha=alpha,
            distillation_add_tail=tail,
        )

    return (
        part("gkd, beta=0.5", _of_trainer(gkd), "jsd"),
        part(
            "gkd, beta=0.1, temperature=2",
            _of_trainer(gkd, beta=0.1, temperature=2.0),
            "jsd",
            beta=0.1,
            temperature=2.0,
        ),
        part("gkd, beta=0", _of_trainer(gkd, beta=0), "forward_kl"),
        part("gkd, beta=1", _of_trainer(gkd, beta=1), "reverse_kl"),
        part(
            "iw_opd, beta=0, top_k=3",
            _of_trainer(iw_opd, beta=0, top_k=3),
            "teacher_top_k_tail(forward_kl)",
            k=3,
        ),
        part(
            "iw_opd, beta=1, top_k=3",
            _of_trainer(iw_opd, beta=1, top_k=3),
            "student_top_k_tail(reverse_kl)",
            k=3,
        ),
        part(
            "iw_opd, beta=1, top_k=3, add_tail=False",
            _of_trainer(iw_opd, beta=1, top_k=3, add_tail=False),
            "student_top_k_renormalized(reverse_kl)",
            k=3,
        ),
        part(
            "sdpo, sampled_token",
            token_parts.in_expectation(_sampled_of_sdpo),
            "sampled_reverse_kl",
        ),
        part(
            "sdpo, full_logits, alpha=0.5",
            _of_sdpo(full, distillation_alpha=0.5),
            "jsd",
        ),
        part(
            "sdpo, topk_logits, alpha=1",
            of_topk(1.0, False),
            "student_top_k_renormalized(reverse_kl)",
            k=3,
        ),
        part(
            "sdpo, topk_logits, alpha=0, add_tail",
            of_topk(0.0, True),
            "student_top_k_tail(forward_kl)",
            Fault("the rest has at least 1e-7", _floored_tail),
            k=3,
        ),
    )


def _parts() -> tuple[Component, ...]:
    """Return the parts of TRL that are compared by themselves, such as its advantages."""
    grpo = import_trl().GRPOTrainer
    rloo = import_trl().RLOOTrainer
    return (
        _part(
            "grpo, scale_rewards=group",
            _advantages(grpo, scale_rewards="group"),
            "group_norm",
            hp={"eps": 1e-4},
        ),
        _part(
            "grpo, scale_rewards=batch",
            _advantages(grpo, scale_rewards="batch"),
            _over_batch,
            words="R minus the group's mean, over the batch's std + 1e-4",
        ),
        _part(
            "grpo, scale_rewards=none",
            _advantages(grpo, scale_rewards="none"),
            "group_mean",
        ),
        _part("rloo", _advantages(rloo, normalize_advantages=False), "leave_one_out"),
        *_divergences(),
    )


REMARKS = (
    "Micro-batches by TRL's contract: of equal size, counted by current_gradient_accumulation_steps; "
    "num_items_in_batch counts the tokens of a generation batch, which is one optimizer step.",
    "Not covered: several ranks, generation batches of several optimizer steps, vLLM's correction weights, the "
    "off-policy mask, entropy terms.",
    "Of the experimental trainers the losses of a teacher of GKD, IW-OPD and SDPO are compared, over logits that are "
    "aligned with the tokens; of GOLD and the distillation by a server nothing is.",
)
TRL = Framework(
    "trl",
    version=lambda: import_trl().__version__,
    loss=lambda mode, fields, batch, padding: trl_loss(
        mode, batch, padding=padding, **fields
    ),
    modes=_modes,
    comparisons=COMPARISONS,
    parts=_parts,
    split_reasons={"bnpo": BNPO},
    out_of_scope=OUT_OF_SCOPE,
    remarks=REMARKS,
    kernels=_kernels,
)
