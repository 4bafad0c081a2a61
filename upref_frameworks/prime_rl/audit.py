# SPDX-License-Identifier: Apache-2.0
"""prime-rl's policy losses as the audit compares them with the papers, and why they
differ.
"""

import ast
import importlib
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from upref.aggregation import aggregate
from upref.ops import exp, where
from upref.registry import get
from upref.rollouts import Rollouts, Totals
from upref.verify.faults.losses import LossFault, fault, with_hp
from upref_frameworks.audits.framework import Comparison, Framework, Pin
from upref_frameworks.audits.shared import ALWAYS
from upref_frameworks.audits.sources import source

CONFIGS = "../packages/prime-rl-configs/src/prime_rl/configs/trainer.py"
PIN = Pin(
    packages=("beartype==0.22.9",),
    repository="https://github.com/PrimeIntellect-ai/prime-rl",
    commit="559b44772e471d1538537b8805cc77f3824a5e64",
    date="2026-08-21",
    files={
        "prime_rl/trainer/rl/loss.py": "102b14539a2aa7e4b807967f9c9caeaa",
        CONFIGS: "8e9dfae7baf22c7eecd0238ddde47f2f",
    },
    root="src",
    skip_init=("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl"),
    stubs=("prime_rl.configs", "prime_rl.utils"),
    env={"TORCHDYNAMO_DISABLE": "1"},
)


def _losses() -> ModuleType:
    """Return prime-rl's module of losses, imported where an audit runs."""
    return importlib.import_module("prime_rl.trainer.rl.loss")


def _fields_of_losses() -> dict[str, dict[str, Any]]:
    """Read the fields of each loss's config class, with their defaults, off its source.

    The classes themselves import pydantic, which is no part of the audit.

    Returns:
        Of each loss, by what its field `type` holds: its other fields.
    """
    tree = ast.parse(source("prime_rl.trainer.rl.loss", CONFIGS, up=3))
    fields_of_losses: dict[str, dict[str, Any]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("LossConfig"):
            fields = _literal_fields(node)
            fields_of_losses[str(fields.pop("type"))] = fields
    return fields_of_losses


def _literal_fields(node: ast.ClassDef) -> dict[str, Any]:
    """Return the annotated fields of a class whose default is a literal: plain, or the
    first argument of a call such as Field(0.2).
    """
    literals = {}
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(
            field.target, ast.Name
        ):
            continue
        value = field.value
        if isinstance(value, ast.Call) and value.args:
            value = value.args[0]
        if isinstance(value, ast.Constant):
            literals[field.target.id] = value.value
    return literals


def _loss(
    mode: str,
    config: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    totals: Totals,
) -> Tensor:
    """Return the value of the loss as compute_loss has it: each sequence by itself,
    their sum divided by the tokens of the batch. What the loss does not read is None.
    """
    settings = SimpleNamespace(**config)
    f = getattr(_losses(), f"{mode}_loss_fn")
    none = [None] * len(mask)
    value, _ = _losses().compute_loss(
        list(log_prob),
        list(old_log_prob),
        none,
        list(advantages),
        list(mask),
        none,
        none,
        none,
        lambda inputs: f(inputs, settings),
        totals.tokens,
        1,
        1,
    )
    return value


def _penalty_fault(tau: float) -> LossFault:
    """Return the fault of a penalty tau (log r)² on each token."""

    def term(batch: Rollouts) -> Tensor:
        """Return minus the penalty, a scalar that is added to J."""
        # by the promised aggregation: the fault before it changes the term's, too
        log_r = batch.logp - batch.logp_old
        return -tau * aggregate(log_r**2, batch.mask, "seq-mean-token-sum")

    return fault(
        f"a penalty of {tau:g} (log r)² is added, of tokens out of the region too",
        "term",
        term=term,
    )


def _masked_by_probability(lp: Any, lp_old: Any, A: Any) -> Any:
    """Return r A where π_θ is within 0.1 of the sampler's probability, else 0."""
    return where(abs(exp(lp) - exp(lp_old)) <= 0.1, exp(lp - lp_old) * A, 0 * lp)


PENALTY = _penalty_fault(1e-3)
SYMMETRIC = fault(
    "both signs are masked on both sides, where π_θ moved by more than 0.1",
    "objective",
    objective=replace(
        get("dppo_tv"),
        name="A r where |π_θ - μ| <= 0.1",
        fn=_masked_by_probability,
        defaults={},
        closed_form=lambda r, A, mu: where(abs(r * mu - mu) <= 0.1, A * r, 0 * r),
    ),
)
COMPARISONS = (
    Comparison(
        "default", "default", {}, "dppo_tv", {}, (with_hp(delta=0.2), ALWAYS, PENALTY)
    ),
    Comparison("default", "ipo", {}, "dppo_tv", {}, (SYMMETRIC, ALWAYS, PENALTY)),
    Comparison("default", "default", {}, "dppo_tv_prime_rl", {}),
    Comparison("default", "ipo", {}, "ipo", {}),
    Comparison(
        "paper",
        "default",
        {"dppo_mask_low": 0.15, "dppo_mask_high": 0.15, "kl_tau": 0.0},
        "dppo_tv",
        {},
        (ALWAYS,),
    ),
    Comparison("paper", "ipo", {"kl_tau": 0.0}, "dppo_tv", {}, (SYMMETRIC, ALWAYS)),
)


REMARKS = (
    "compute_loss divides by rl_scale, the trained tokens of all micro-batches and ranks. The ratio is to the "
    "sampler. Its entropy is a metric, without a gradient.",
    "Not covered: the reference-KL and cross-entropy components, advantages (they are of its environments).",
)
PRIME_RL = Framework(
    "prime_rl",
    pin=PIN,
    modes=lambda: list(_fields_of_losses()),
    defaults=lambda mode: _fields_of_losses()[mode],
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    out_of_scope={"custom": "the user's own function"},
    remarks=REMARKS,
    kernels=lambda: {
        "selective_log_softmax": lambda logits, tokens, temperature: (
            _losses().selective_log_softmax(logits / temperature, tokens)
        )
    },
)
