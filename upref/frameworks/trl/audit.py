# SPDX-License-Identifier: Apache-2.0
"""TRL's policy losses as the audit holds them against the papers, and why they differ."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from upref.aggregation import aggregate
from upref.audits.compare import Comparison
from upref.audits.framework import Framework
from upref.audits.usual import BNPO, BY_TOKENS, LUSPO, capped
from upref.foreign.trl import loss_types, trl, trl_loss
from upref.kl import k3
from upref.ops import exp
from upref.registry import get
from upref.rollouts import Rollouts
from upref.verify.faults import GROUPS, Slip, aggregated, with_hp

PRODUCT = replace(get("gspo"), name="min(S A, clip(S) A), S the product of a response's ratios", level="trajectory")
UNCLIPPED = 1e30  # RLOOTrainer cannot switch its clip off


def _product(eps: float) -> Slip:
    said = "PPO's clip on the product of the response's ratios" if eps < 1 else "weighted by the product of the ratios"
    return Slip(f"{said}, eps = {eps:g}", "objective", objective=PRODUCT, hp={"eps_low": eps, "eps_high": eps})


F32 = Slip("1.05 held in float32", "rounding", hp={"tau_neg": float(np.float32(1.05))})


def _weighted_kl(b: Rollouts) -> Tensor:
    assert b.logp_ref is not None
    return -BETA * aggregate(exp(b.logp - b.logp_old) * k3(b.logp, b.logp_ref), b.mask, "seq-mean-token-mean")


BETA = 0.04
SAID = "the KL term is multiplied by the ratio, which is differentiated too"
KL = Slip(SAID, "term", hp={"beta": 0.0}, term=_weighted_kl)
LENGTH = Slip("divided by max_completion_length = 512", "aggregation", scale=lambda b: 1 / 512)
GSPO = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
COMPARISONS = (
    Comparison("default", "dapo", {}, "dapo", {}, (with_hp(eps_high=0.2), GROUPS)),
    Comparison("default", "grpo", {}, "grpo", {}),
    Comparison("default", "grpo", {"beta": BETA}, "grpo", {"beta": BETA}, (KL,)),
    Comparison("default", "bnpo", {}, "ppo_clip", {}),
    Comparison("default", "dr_grpo", {}, "dr_grpo", {}, (LENGTH,)),
    Comparison("default", "dapo", {"importance_sampling_level": "sequence"}, "gspo", {}, (
        with_hp(eps_low=0.2, eps_high=0.2), aggregated("token-mean"))),
    Comparison("default", "cispo", {}, "cispo", {}, (
        Slip("epsilon_high is the cap itself: every weight is at most 0.2", "objective",
             objective=capped(0.2)), GROUPS)),
    Comparison("default", "sapo", {}, "sapo", {}, (F32,)),
    Comparison("default", "vespo", {}, "vespo", {}, (BY_TOKENS,), one_adv=True),
    Comparison("default", "luspo", {}, "gspo", {}, (
        Slip("the ratio of each token (importance_sampling_level), eps = 0.2", "objective",
             objective="ppo_clip", hp={"eps": 0.2}),
        LUSPO), one_adv=True),
    Comparison("default", "gmpo", {}, "gmpo", {}),
    Comparison("default", "rloo", {}, "rloo", {}, (_product(0.2),), one_adv=True),
    Comparison("paper", "dapo", {"epsilon": 0.2, "epsilon_high": 0.28}, "dapo", {}, (GROUPS,)),
    Comparison("paper", "dapo", {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 10.0}, "dapo", {"c": 10.0}, (GROUPS,)),
    Comparison("paper", "grpo", {"epsilon": 0.2}, "grpo", {}),
    Comparison("paper", "grpo", {"beta": BETA, "use_bias_correction_kl": False}, "grpo", {"beta": BETA}),
    Comparison("paper", "bnpo", {"epsilon": 0.2}, "ppo_clip", {}),
    Comparison("paper", "dr_grpo", {"epsilon": 0.2, "max_completion_length": 1}, "dr_grpo", {}),
    Comparison("paper", "grpo", GSPO, "gspo", {}),
    Comparison("paper", "cispo", {"epsilon_high": 5.0}, "cispo", {}, (GROUPS,)),
    Comparison("paper", "sapo", {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}, "sapo", {}, (F32,)),
    Comparison("paper", "luspo", GSPO, "gspo", {}, (LUSPO,)),
    Comparison("paper", "vespo", VESPO, "vespo", {}, (BY_TOKENS,), one_adv=True),
    Comparison("paper", "gmpo", {"epsilon": 0.4}, "gmpo", {}),
    Comparison("paper", "rloo", {"epsilon": UNCLIPPED}, "rloo", {}, (_product(UNCLIPPED),), one_adv=True),
)  # fmt: skip
OUT_OF_SCOPE = {
    "async_grpo": "no GRPOTrainer, and its constructor wants a running vLLM server",
}


def _modes() -> list[str]:
    """Every loss_type, RLOOTrainer, and the packages of trl.experimental that define a trainer of these families."""
    root = Path(trl().__file__).parent / "experimental"
    family = re.compile(r"^class \w*(GRPO|RLOO)\w*Trainer\(|^class \w+\((GRPO|RLOO)Trainer\)", re.M)
    own = {f.relative_to(root).parts[0] for f in root.rglob("*.py") if family.search(f.read_text(encoding="utf-8"))}
    return sorted({*loss_types(), "rloo", *own})


def _kernels() -> dict[str, Callable]:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import selective_log_softmax_and_entropy

    def chunked(hidden, weight, tokens, temperature, bias=None, softcap=None, logit_scale=1.0):
        given = hidden.flatten(0, -2), weight, bias, tokens.flatten(), temperature, 8192, softcap, logit_scale
        return tuple(x.view_as(tokens) for x in ChunkedLogProbFunction.apply(*given, ("entropy",))[:2])

    selective = lambda logits, tokens, temperature: selective_log_softmax_and_entropy(
        logits, tokens, temperature=temperature
    )
    return {"ChunkedLogProbFunction": chunked, "selective_log_softmax_and_entropy": selective}


REMARKS = [
    "Micro-batches by TRL's contract: of equal size, counted by current_gradient_accumulation_steps; "
    "num_items_in_batch counts the tokens of a generation batch, which is one optimizer step.",
    "Not covered: several ranks, generation batches of several optimizer steps, vLLM's correction weights, the "
    "off-policy mask, entropy terms.",
]
TRL = Framework(
    "trl",
    version=lambda: trl().__version__,
    loss=lambda c, b, padding: trl_loss(c.mode, b, padding=padding, **c.config),
    modes=_modes,
    comparisons=COMPARISONS,
    split_reasons={"bnpo": BNPO},
    out_of_scope=OUT_OF_SCOPE,
    remarks=lambda: REMARKS,
    kernels=_kernels,
)
