# SPDX-License-Identifier: Apache-2.0
"""The losses of Axolotl's asynchronous GRPO trainer as the audit compares them with the
papers, and why they differ.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.verify.faults.losses import GROUPS, aggregated, with_hp
from upref_frameworks.audits.framework import Comparison, Framework, Pin
from upref_frameworks.audits.shared import BNPO, CAP, F32, LENGTH, LUSPO, SLOTS, WIDTH

TRAINER = "axolotl.core.trainers.grpo.async_trainer"
PIN = Pin(
    packages=("axolotl==0.21.0", "trl==1.14.1"),
    files={
        "axolotl/core/trainers/grpo/async_trainer.py": "a744b5c3868141a041099b82577ecd04",
        "trl/trainer/grpo_config.py": "68a927fb50b742f5cc35d6e094392f54",
    },
    skip_init=(
        "axolotl",
        "axolotl.core",
        "axolotl.core.trainers",
        "axolotl.core.trainers.grpo",
        "axolotl.utils",
    ),
    stubs=("trl", "accelerate", "peft", "liger_kernel", "axolotl.utils.logging"),
    decorators=(
        "trl.extras.profiling.profiling_decorator",
        "axolotl.utils.logging.get_logger",
    ),
)
READ = (
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "beta",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "max_completion_length",
)


def _module() -> ModuleType:
    """Return Axolotl's module of the trainer, imported where an audit runs."""
    module = importlib.import_module(TRAINER)
    vars(module).update(nanmax=torch.max, nanmin=torch.min)  # of its metrics
    return module


def _modes() -> list[str]:
    """Return the values that the trainer's source compares self.loss_type with, in
    alphabetical order.
    """
    source = Path(inspect.getfile(_module())).read_text(encoding="utf-8")
    compared_with = re.findall(r"self\.loss_type (?:==|in) (\"\w+\"|\(.*?\))", source)
    return sorted({*re.findall(r'"(\w+)"', " ".join(compared_with))})


def _defaults(mode: str) -> dict[str, Any]:
    """Return the defaults of the fields of READ in TRL's GRPOConfig, read from its
    source: Axolotl's configuration derives from it and does not change these.
    """
    folder = Path(inspect.getfile(_module())).parents[4]
    tree = ast.parse(
        (folder / "trl/trainer/grpo_config.py").read_text(encoding="utf-8")
    )
    [config] = [
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "GRPOConfig"
    ]
    values = {}  # field -> what it is assigned, field(default=...)
    for statement in config.body:
        if isinstance(statement, ast.AnnAssign):
            values[ast.unparse(statement.target)] = statement.value
    defaults = {}
    for field in READ:
        for keyword in getattr(values[field], "keywords", ()):
            if keyword.arg == "default":
                defaults[field] = ast.literal_eval(keyword.value)
    return defaults


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
    """Return the value of the trainer's own `_compute_loss`. The trainer is not set up:
    it has only the attributes that the method reads, and gets these log-probabilities
    in place of a model's.
    """
    trainer = object.__new__(_module().AsyncGRPOTrainer)
    high = (
        config["epsilon"] if config["epsilon_high"] is None else config["epsilon_high"]
    )
    vars(trainer).update(
        config,
        loss_type=mode,
        epsilon_low=config["epsilon"],
        epsilon_high=high,
        top_entropy_quantile=1.0,
        args=SimpleNamespace(**config),
        model=SimpleNamespace(training=True),
        is_fsdp_enabled=False,
        use_vllm=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=num_micro_batches,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x),
        _metrics={"train": _DiscardedMetrics()},
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            log_prob,
            log_prob.detach(),
            None,
        ),
    )
    ids = torch.zeros_like(mask, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old_log_prob,
        "ref_per_token_logps": ref_log_prob,
        "num_items_in_batch": totals.tokens,
    }
    return trainer._compute_loss(None, batch)


class _DiscardedMetrics(dict[str, list[Any]]):
    """The trainer's metrics: a list for every name, which is thrown away."""

    def __missing__(self, key: str) -> list[Any]:
        return []


SEQUENCE = {"importance_sampling_level": "sequence"}
GSPO = SEQUENCE | {"epsilon": 3e-4, "epsilon_high": 4e-4}
CLIP = with_hp(eps_low=0.2, eps_high=0.2)
COMPARISONS = (
    Comparison("default", "grpo", {}, "grpo", {}),
    Comparison("default", "bnpo", {}, "ppo_clip", {}),
    Comparison("default", "dapo", {}, "dapo", {}, (with_hp(eps_high=0.2), GROUPS)),
    Comparison(
        "default", "dapo", SEQUENCE, "gspo", {}, (CLIP, aggregated("token-mean"))
    ),
    Comparison("default", "dr_grpo", {}, "dr_grpo", {}, (LENGTH,)),
    Comparison("default", "cispo", {}, "cispo", {}, (CAP, GROUPS)),
    Comparison("default", "sapo", {}, "sapo", {}, (F32,)),
    Comparison("default", "luspo", {}, "luspo", {}, (LUSPO, WIDTH, SLOTS)),
    Comparison("paper", "grpo", {}, "grpo", {}),
    Comparison("paper", "grpo", {"beta": 0.04}, "grpo", {"beta": 0.04}),
    Comparison("paper", "grpo", GSPO, "gspo", {}),
    Comparison("paper", "bnpo", {}, "ppo_clip", {}),
    Comparison("paper", "dapo", {"epsilon_high": 0.28}, "dapo", {}, (GROUPS,)),
    Comparison("paper", "dr_grpo", {"max_completion_length": 1}, "dr_grpo", {}),
    Comparison("paper", "cispo", {"epsilon_high": 5.0}, "cispo", {}, (GROUPS,)),
    Comparison("paper", "sapo", {}, "sapo", {}, (F32,)),
    Comparison(
        "paper",
        "luspo",
        SEQUENCE | {"epsilon": 2e-3, "epsilon_high": 2.5e-3},
        "luspo",
        {},
    ),
)

REMARKS = (
    "AsyncGRPOTrainer's own _compute_loss, called on a trainer that was not set up: log-probabilities are given to "
    "it, one process, no model. Without trl.use_data_producer or trl.async_prefetch Axolotl trains with TRL's.",
    "This loss reads none of entropy_coef and its four relatives, which the trl block of the YAML takes.",
    "Not covered: the off-policy mask, vLLM's importance weights, entropy masks, batch flattening, the router's "
    "auxiliary loss.",
)
AXOLOTL = Framework(
    "axolotl",
    pin=PIN,
    modes=_modes,
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    split_reasons={"bnpo": BNPO},
    remarks=REMARKS,
    one_adv=True,
)
