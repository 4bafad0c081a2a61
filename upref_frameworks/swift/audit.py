# SPDX-License-Identifier: Apache-2.0
"""ms-swift's policy losses as the audit compares them with the papers, and why they
differ.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.kl import k3
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, with_hp
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import BNPO, CAP, CLAMP_K3, LENGTH, NO_KL, kl_term
from upref_frameworks.audits.sources import source

TRAINERS = "swift.rlhf_trainers."
PIN = Pin(
    packages=("ms-swift==4.6.0",),
    files={
        "swift/rlhf_trainers/grpo_trainer.py": "53fddb594ce9a996da34b285984ce4fa",
        "swift/rl_core/advantage.py": "397e403576ad2557e0e7ee80130e0b37",
    },
    skip_init=("swift", "swift.rlhf_trainers"),
    stubs=(
        "accelerate",
        "dacite",
        "datasets",
        "json_repair",
        "modelscope",
        "pandas",
        "requests",
        "tqdm",
        "transformers",
        "trl",
        "swift.dataset",
        "swift.infer_engine",
        "swift.rewards",
        "swift.sequence_parallel",
        "swift.template",
        "swift.trainers",
        "swift.utils.logger",
        *(TRAINERS + m for m in ("arguments", "gkd_helpers", "rollout_mixin", "utils")),
    ),
    decorators=(
        TRAINERS + "utils.profiling_decorator",
        "trl.import_utils._is_package_available",
        "swift.utils.logger.get_logger",
    ),
)


LOSS = "_compute_loss_and_metrics"
GIVEN = "_get_per_token_logps_and_entropies"
READ = (
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "tau_pos",
    "tau_neg",
    "kl_in_reward",
)
FIPO = (
    "fipo_decay_rate",
    "fipo_clip_range",
    "fipo_clip_high_only",
    "fipo_safety_threshold",
)


def _advantage_module() -> ModuleType:
    """Return ms-swift's module of advantages, imported where an audit runs."""
    return importlib.import_module("swift.rl_core.advantage")


def _module() -> ModuleType:
    """Return ms-swift's module of the trainer, imported where an audit runs."""
    module = importlib.import_module(TRAINERS + "grpo_trainer")
    vars(module).update(nanmax=torch.max, nanmin=torch.min)  # of its metrics
    return module


def _source(path: str) -> str:
    """Return the text of a file of the package, by its path relative to the folder
    above the trainers'.
    """
    return source(TRAINERS + "grpo_trainer", path, up=1)


def _modes() -> list[str]:
    """Return the values that the trainer's source compares self.loss_type with, and
    those of WINDOW_NORMALIZED_LOSS_TYPES, in alphabetical order.
    """
    compared_with = re.findall(
        r"self\.loss_type (?:==|in) ('\w+'|\[.*?\])",
        _source("rlhf_trainers/grpo_trainer.py"),
    )
    return sorted(
        {
            *re.findall(r"'(\w+)'", " ".join(compared_with)),
            *_module().WINDOW_NORMALIZED_LOSS_TYPES,
        }
    )


def _arguments() -> dict[str, Any]:
    """Return the fields of GRPOArgumentsMixin, with their defaults."""
    mixin = importlib.import_module(TRAINERS + "args_mixin").GRPOArgumentsMixin
    return {f.name: f.default for f in fields(mixin)}


def _defaults(mode: str) -> dict[str, Any]:
    """Return the defaults of ms-swift's arguments, with the values that their
    validation puts in place of None.
    """
    source_text = _source("arguments/rlhf_args.py")
    init_grpo = source_text[source_text.index("def _init_grpo") :]
    beta = re.search(r"self\.beta = ([\d.]+)", init_grpo)
    length = re.search(r"max_completion_length: int = (\d+)", source_text)
    assert beta and length
    names_read = (*READ, *FIPO) if mode == "fipo" else READ
    return {k: _arguments()[k] for k in names_read} | {
        "beta": float(beta[1]),
        "max_completion_length": int(length[1]),
    }


def _trainer(mode: str, config: dict[str, Any], steps: int) -> Any:
    """Return a GRPOTrainer that was not set up: it has its arguments, read by its own
    method, and no model.
    """
    trainer = object.__new__(_module().GRPOTrainer)
    settings = {
        "loss_type": mode,
        "num_iterations": 1,
        "gradient_accumulation_steps": steps,
    }
    trainer.args = SimpleNamespace(**_arguments() | config | settings)
    trainer._prepare_algorithm_params()
    alone = SimpleNamespace(num_processes=1, gather_for_metrics=lambda x: x)
    vars(trainer).update(
        accelerator=alone,
        model=SimpleNamespace(training=True),
        beta=config["beta"],
        compute_entropy=False,
        max_completion_length=config["max_completion_length"],
        disable_rollout_importance_sampling=False,
        _has_teacher=False,
        chord_sft_iterator=None,
        compute_loss_func=None,
        model_accepts_loss_kwargs=False,
        current_gradient_accumulation_steps=steps,
    )
    return trainer


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
    """Return the trainer's loss of these log-probabilities, divided by the number of
    micro-batches as transformers' Trainer does.
    """
    trainer = _trainer(mode, config, num_micro_batches)
    vars(trainer)[GIVEN] = lambda *_, **__: (log_prob, None)
    batch = SimpleNamespace(
        completion_mask=mask,
        truncated_mask=mask.new_zeros(len(mask)),
        ref_per_token_logps=ref_log_prob,
        advantages=_advantage_module().expand_advantage_to_per_token(advantages, mask),
        old_per_token_logps=old_log_prob,
        rollout_per_token_logps=None,
        teacher_per_token_logps=None,
        num_items_in_batch=totals.tokens,
    )
    loss, *_ = getattr(trainer, LOSS)(None, {}, batch)
    return loss / num_micro_batches


SEQUENCE = {"importance_sampling_level": "sequence"}
GSPO = NO_KL | {"epsilon": 3e-4, "epsilon_high": 4e-4}
HIGHER = NO_KL | {"epsilon_high": 0.28}
CLIP = with_hp(eps_low=0.2, eps_high=0.2)
KL = kl_term(
    "a KL term with beta = 0.04, where the paper has none",
    lambda lp, ref, old: k3(lp, ref).clamp(max=10),
    agg="token-mean",
    instead=False,
)
COMPARISONS = (
    Comparison("default", "grpo", {}, "grpo", {"beta": 0.04}, (CLAMP_K3,)),
    Comparison("default", "grpo", NO_KL | SEQUENCE, "gspo", {}, (CLIP,)),
    Comparison("default", "bnpo", NO_KL, "ppo_clip", {}),
    Comparison("default", "dapo", {}, "dapo", {}, (with_hp(eps_high=0.2), GROUPS, KL)),
    Comparison("default", "dr_grpo", NO_KL, "dr_grpo", {}, (LENGTH,)),
    Comparison("default", "cispo", NO_KL, "cispo", {}, (CAP, GROUPS)),
    Comparison("default", "sapo", NO_KL, "sapo", {}),
    Comparison("paper", "grpo", NO_KL, "grpo", {}),
    Comparison("paper", "grpo", GSPO | SEQUENCE, "gspo", {}),
    Comparison(
        "paper",
        "grpo",
        GSPO | {"importance_sampling_level": "sequence_token"},
        "gspo",
        {},
    ),
    Comparison("paper", "bnpo", NO_KL, "ppo_clip", {}),
    Comparison("paper", "dapo", HIGHER, "dapo", {}, (GROUPS,)),
    Comparison(
        "paper", "dapo", HIGHER | {"delta": 10.0}, "dapo", {"c": 10.0}, (GROUPS,)
    ),
    Comparison("paper", "dr_grpo", NO_KL | {"max_completion_length": 1}, "dr_grpo", {}),
    Comparison("paper", "cispo", NO_KL | {"epsilon_high": 5.0}, "cispo", {}, (GROUPS,)),
    Comparison("paper", "sapo", NO_KL, "sapo", {}),
    Comparison(
        "paper",
        "fipo",
        HIGHER | {"delta": 10.0, "fipo_safety_threshold": 10.0},
        "fipo",
        {},
    ),
)


def _advantages(
    estimator: str, scale: str, group_size: int = 4
) -> Callable[..., Tensor]:
    """Return ms-swift's advantages for groups of one size, as a function of rewards and
    groups.
    """
    return lambda R, g: _advantage_module().compute_advantages(
        R[:, None], torch.ones(1), group_size, estimator, scale
    )[0]


def _dynamic_advantages(estimator: str, scale: str) -> Callable[..., Tensor]:
    """Return ms-swift's advantages for groups of any size. They are computed in
    float32.
    """
    return lambda R, g: _advantage_module().compute_advantages_dynamic(
        R.float()[:, None],
        torch.ones(1),
        [str(i) for i in g.tolist()],
        [str(i) for i in range(len(g))],
        estimator,
        scale,
    )[0]


def _over_rewards(R: Tensor, group: Tensor) -> Tensor:
    """Return rewards less their group's mean, divided by the standard deviation of all
    rewards.
    """
    centered = R - torch.stack([R[group == i].mean() for i in group])
    return centered / (R.std() + 1e-4)


def _teacher_kl(lp: Tensor, ref: Tensor) -> Tensor:
    """Return ms-swift's KL term of a teacher, [B, T]; it takes the teacher first."""
    return _advantage_module().compute_teacher_kl_per_token(
        ref, lp, torch.ones_like(lp)
    )


def _parts() -> tuple[Component, ...]:
    """Return the parts of ms-swift that are compared by themselves, such as its
    advantages.
    """
    equal = ("uneven", "one")
    std = {"ddof": 1, "eps": 1e-4}
    return (
        Component(
            "advantages",
            "grpo",
            _advantages("grpo", "group"),
            "group_norm",
            std,
            leaves_out=equal,
        ),
        Component(
            "advantages",
            "grpo, none",
            _advantages("grpo", "none"),
            "group_mean",
            leaves_out=equal,
        ),
        Component(
            "advantages",
            "grpo, batch",
            _advantages("grpo", "batch"),
            "group_mean_whiten",
            std,
            (
                Fault(
                    "over the standard deviation of the rewards, not of what is left of them",
                    _over_rewards,
                ),
            ),
            equal,
        ),
        Component(
            "advantages",
            "rloo",
            _advantages("rloo", "none"),
            "leave_one_out",
            leaves_out=equal,
        ),
        Component(
            "advantages",
            "reinforce_plus_plus",
            _advantages("reinforce_plus_plus", "batch"),
            "group_mean_whiten",
            std,
            leaves_out=equal,
        ),
        Component(
            "advantages",
            "grpo, dynamic",
            _dynamic_advantages("grpo", "group"),
            "group_norm",
            std,
            tol=1e-3,
        ),
        Component(
            "advantages",
            "rloo, dynamic",
            _dynamic_advantages("rloo", "none"),
            "leave_one_out",
            tol=1e-5,
        ),
        Component("kl", "of the teacher", _teacher_kl, "k3"),
    )


REMARKS = (
    "GRPOTrainer's own loss method, called on a trainer that was not set up: log-probabilities are given to it, "
    "one process, no model.",
    "Micro-batches: its value over the accumulation steps, as transformers' Trainer divides it; cispo and dapo are "
    "multiplied by them before.",
    "Not covered: the Megatron and Ray trainers, Liger, padding-free batches, rollout corrections, the off-policy "
    "mask, entropy masks, KL in the reward, RLSD, SDAR, CHORD.",
)
SWIFT = Framework(
    "swift",
    pin=PIN,
    modes=_modes,
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    split_reasons={"bnpo": BNPO},
    remarks=REMARKS,
    one_adv=True,
    out_of_scope={
        "real": "no objective of the registry: a contrast of the responses of one prompt",
    },
)
