# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of a two-layer twin of a run of TRL's trainer, before the run
starts.
"""

from typing import Any

import torch

from upref.errors import InputError
from upref.registry import Objective
from upref.step.check import StepReport
from upref.user_code.guard import state_restored
from upref_frameworks.steps.twin import twin
from upref_frameworks.trl import step as trl
from upref_frameworks.trl.accelerate_state import restored_state

# fields of GRPOConfig that a twin takes over; micro-batches are cut to its eight
# responses
KEPT = (
    "temperature",
    "beta",
    "scale_rewards",
    "num_iterations",
    "mask_truncated_completions",
    "disable_dropout",
    "pad_to_multiple_of",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "cast_lm_head_to_fp32",
    "use_bias_correction_kl",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
)
# learning rates at which r leaves 1, and not for good; else 0.01
RATES = {"sequence_mean": 2e-6, "sequence_product": 1e-3}


def trl_twin(
    cls: type,
    objective: Objective,
    hp: dict[str, Any],
    model: Any,
    args: Any = None,
    peft_config: Any = None,
) -> StepReport:
    """Check one optimizer step of a two-layer twin of a run, on the CPU.

    Args:
        cls: the trainer's class, with the arguments of GRPOTrainer.
        objective: the objective that trains.
        hp: its hyperparameters.
        model, args, peft_config: the run's; args None: TRL's defaults.

    Returns:
        The report. The state that accelerate shares between trainers is restored.

    Raises:
        InputError: no twin of this model can be made, several processes train, or the
            objective needs a sampler.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise InputError(
            "step_check needs one process: start the script once without a launcher, then drop it."
        )
    if objective.sampler is not None:
        raise InputError(
            f"{objective.name} corrects for the sampler, and a twin has none: leave step_check out."
        )
    # the run's device and ranks, which a trainer on the CPU overwrites
    with restored_state(), state_restored():
        args = args or trl.default_config()
        settings = {k: getattr(args, k) for k in KEPT}
        asked = args.model_init_kwargs or {}
        how = {
            k: asked[k]
            for k in ("attn_implementation", "revision", "trust_remote_code")
            if k in asked
        }
        size = min(2, settings["per_device_train_batch_size"])
        acc = settings["gradient_accumulation_steps"]
        micro_batches = 8 // size  # micro-batches of the eight responses
        if acc >= settings["steps_per_generation"] * settings["num_iterations"]:
            # one optimizer step a generation batch, as in the run
            acc = micro_batches
        else:
            acc = min(2, acc)
        acc = 1 if objective.batch_coupled else acc
        settings |= dict(
            per_device_train_batch_size=size,
            steps_per_generation=micro_batches,
            gradient_accumulation_steps=acc,
            learning_rate=RATES.get(objective.level, 0.01),
        )
        arguments = {
            "objective": objective,
            "hp": hp,
            "parity": {"first": 0, "every": 0},
        }
        return trl.report(
            twin(model, peft_config, **how),
            settings,
            trl.batch(),
            objective,
            hp,
            {"beta": settings["beta"]},
            step=int(acc < micro_batches),
            cls=cls,
            more=arguments,
        )
