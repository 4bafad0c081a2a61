# SPDX-License-Identifier: Apache-2.0
"""Record the steps of TRL's GRPOTrainer, or of a class derived from it.

    upref.replay.record(trainer, "dumps")

Five methods of the trainer are wrapped, on the object alone. A micro-batch is what
`_compute_loss` is given; log π_θ and the entropy are what its forward pass returns;
dL/dlog π_θ is what arrives there in the trainer's own backward pass. The divisors are
computed from GRPOConfig as TRL documents them, not read from its loss.

The steps have the numbers of TRL's log, from 1. The weights of a generation have the
number of the step that they train first. A prompt's group is its place in the
generation batch.
"""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upref.replay.record import (
    finish,
    hand_over,
    keep_gradient,
    loss_scale,
    step_batch,
)
from upref.replay.schema import RecordedBatch
from upref.replay.terms import EXTRA_TERMS
from upref.replay.trainers import Schedule, Sink

TRAINER = "TRL's GRPOTrainer"
WRAPPED = (
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
    "training_step",
)
OF_RESPONSES = ("reward", "group", "version")
# of what travels with a generation batch through TRL's shuffling and splitting
KEY = "upref_{}"
OPTIONAL = {
    "old": "old_per_token_logps",
    "sampler": "sampling_per_token_logps",
    "ref": "ref_per_token_logps",
    "correction": "importance_sampling_ratio",
}
SETTINGS = (
    "loss_type",
    "importance_sampling_level",
    "epsilon",
    "epsilon_high",
    "delta",
    "beta",
    "temperature",
    "scale_rewards",
    "use_bias_correction_kl",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "vllm_importance_sampling_mode",
)
ADDED = {  # attribute of the trainer -> what its loss has beside the objective
    "_entropy_bonus_enabled": "an entropy bonus",
    "aux_loss_enabled": "the router's auxiliary loss",
}
HINTS = {
    "sampler": "TRL has it with GRPOConfig.use_vllm=True.",
    "ref": "TRL computes it with GRPOConfig.beta above 0.",
    "old": "TRL computes it where a generation batch makes several optimizer steps, and with vLLM.",
    "reward": "a completion of the generation batch had no reward.",
}


def recognizes(trainer: Any) -> bool:
    """Tell whether this is a GRPOTrainer of TRL, or derived from it; import nothing.

    Args:
        trainer: any object.
    """
    classes = {(c.__module__, c.__name__) for c in type(trainer).__mro__}
    return ("trl.trainer.grpo_trainer", "GRPOTrainer") in classes


def attach(trainer: Any, schedule: Schedule, sink: Sink) -> Callable[[], None]:
    """Give each step of the schedule to the sink from now on.

    Args:
        trainer: as recognized.
        schedule: which steps are recorded.
        sink: takes each recorded step, and returns metrics for TRL's log.

    Returns:
        A function that leaves the trainer as it was.
    """
    return Hooks(trainer, schedule, sink).detach


class Hooks:
    """The wrapped methods of one trainer, and what they keep of the step that is being
    trained.
    """

    def __init__(self, trainer: Any, schedule: Schedule, sink: Sink) -> None:
        """Wrap the methods of the trainer, on this object alone; those that were there
        stay in `wrapped`.
        """
        self.trainer = trainer
        self.schedule = schedule
        self.sink = sink
        self.wrapped = {name: getattr(trainer, name) for name in WRAPPED}
        self.before = {
            name: vars(trainer)[name] for name in WRAPPED if name in vars(trainer)
        }
        self.detached = False
        self.error: Exception | None = None  # why the step cannot be recorded
        self.rewards: Tensor | None = None
        self.forward: tuple[Any, ...] = ()
        self.micro_batches: list[dict[str, Tensor]] = []
        self.items: list[float] = []  # num_items_in_batch of each
        self.losses: list[Tensor] = []
        for name in WRAPPED:
            setattr(trainer, name, getattr(self, name))

    def detach(self) -> None:
        """Take the wrappers off, and forget the step."""
        attributes = vars(self.trainer)
        for name in WRAPPED:
            if attributes.get(name) != getattr(self, name):
                # somebody has wrapped it again: ours stays under theirs and keeps
                # nothing
                continue
            if name in self.before:
                attributes[name] = self.before[name]
            else:
                del attributes[name]
        self.detached = True
        self._forget()

    def _forget(self) -> None:
        """Drop what is kept of the step."""
        self.micro_batches = []
        self.items = []
        self.losses = []
        self.forward = ()

    def _is_recorded(self) -> bool:
        """Return whether the step that is being trained is recorded."""
        return not self.detached and self.schedule.due(self._step())

    def _step(self) -> int:
        """Return the number of the step that is being trained, as TRL's log counts it."""
        return int(self.trainer.state.global_step) + 1

    # ---- the wrapped methods ---------------------------------------------------------
    def _calculate_rewards(self, *args: Any, **kw: Any) -> Tensor:
        """Call TRL's method, and keep the rewards."""
        rewards: Tensor = self.wrapped["_calculate_rewards"](*args, **kw)
        self.rewards = rewards
        return rewards

    def _generate_and_score_completions(self, *args: Any, **kw: Any) -> dict[str, Any]:
        """Call TRL's method. In training, label each response that it generates with
        its prompt, its reward and the step of its weights.
        """
        self.rewards = None
        out: dict[str, Any] = self.wrapped["_generate_and_score_completions"](
            *args, **kw
        )
        if self.trainer.model.training and not self.detached:
            self._tried(lambda: self._label(out))
        return out

    def _get_per_token_logps_and_entropies(
        self, *args: Any, **kw: Any
    ) -> tuple[Any, ...]:
        """Call TRL's method, and keep the log-probabilities and entropies."""
        self.forward = self.wrapped["_get_per_token_logps_and_entropies"](*args, **kw)
        return self.forward

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        """Call TRL's method, and keep the micro-batch where the step is recorded."""
        loss: Tensor = self.wrapped["_compute_loss"](model, inputs)
        if self._is_recorded() and self.trainer.model.training:
            self._tried(lambda: self._keep(inputs))
        self.forward = ()
        return loss

    def training_step(self, *args: Any, **kw: Any) -> Tensor:
        """Run the trainer's training_step; after the last of a step, write the step.

        Args:
            *args, **kw: what transformers' training loop passes.

        Returns:
            The loss of the micro-batch, unchanged.
        """
        is_recorded = self._is_recorded()
        loss: Tensor = self.wrapped["training_step"](*args, **kw)
        if is_recorded and (self.micro_batches or self.error):
            self.losses.append(loss.detach())
            if self.trainer.accelerator.sync_gradients:
                finish(self._write, self.detach, None)
                self._forget()
        return loss

    def _tried(self, work: Callable[[], None]) -> None:
        """Call `work`, unless an error is kept already. An error of it is kept until
        the step ends, where all ranks learn of it.
        """
        try:
            if self.error is None:
                work()
        except Exception as e:
            self.error = e

    # ---- what is kept ----------------------------------------------------------------
    def _label(self, generated: dict[str, Any]) -> None:
        """Let each generated response carry the number of its prompt, the step of its
        weights, and its reward where each completion has one. TRL shuffles these with
        the batch.
        """
        trainer = self.trainer
        n = len(generated["completion_ids"])  # of this rank
        first = n * trainer.accelerator.process_index
        numbers = torch.arange(first, first + n)
        device = generated["completion_ids"].device
        generated[KEY.format("group")] = (numbers // trainer.num_generations).to(device)
        generated[KEY.format("version")] = torch.full((n,), self._step(), device=device)
        if self.rewards is not None and not self.rewards.isnan().all(1).any():
            total = (
                self.rewards * trainer.reward_weights.to(self.rewards.device)
            ).nansum(1)
            generated[KEY.format("reward")] = total[first : first + n].to(device)

    def _keep(self, inputs: dict[str, Any]) -> None:
        """Keep a micro-batch on the CPU; its gradient arrives in the backward pass."""
        lp, entropy = self.forward[:2]
        completion_mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = completion_mask * inputs["tool_mask"]
        else:
            mask = completion_mask
        adv = inputs["advantages"]
        columns = {
            "ids": inputs["completion_ids"] * completion_mask,
            "mask": mask.bool(),
            "now": lp,
            "adv": (adv[:, None] if adv.ndim == 1 else adv).expand_as(lp),
        }
        if entropy is not None:
            columns["entropy"] = entropy
        for name, key in OPTIONAL.items():
            if inputs.get(key) is not None:
                columns[name] = inputs[key].expand_as(lp)
        for name in OF_RESPONSES:
            if KEY.format(name) in inputs:
                columns[name] = inputs[KEY.format(name)]
        on_cpu = {name: value.detach().cpu() for name, value in columns.items()}
        # a gradient times an unknown scale is not recorded
        if not self._scaled_by_deepspeed():
            keep_gradient(on_cpu, lp)
        self.micro_batches.append(on_cpu)
        self.items.append(float(inputs["num_items_in_batch"]))

    def _scaled_by_deepspeed(self) -> bool:
        """Return whether DeepSpeed multiplies the loss by a scale of its own, which is
        unknown here: in float16.
        """
        accelerator = self.trainer.accelerator
        by_deepspeed = str(accelerator.distributed_type).endswith("DEEPSPEED")
        return by_deepspeed and accelerator.mixed_precision == "fp16"

    def _write(self) -> None:
        """Hand the step to the sink, and its metrics to TRL's log."""
        loss = torch.stack(self.losses).double().sum().float()
        mean = float(self.trainer.accelerator.reduce(loss, "mean"))
        metrics = hand_over(lambda: self._batch(mean), self.sink, None)
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(value)

    def _batch(self, loss: float) -> RecordedBatch:
        """Return the recorded step of this rank, with the loss over all ranks. Raise
        the error that was kept, if there is one.
        """
        if self.error is not None:
            raise self.error
        trainer = self.trainer
        accelerator = trainer.accelerator
        ranks = accelerator.num_processes
        logged = self._counts(ranks) | {"loss": loss}
        meta = {"framework": f"TRL {importlib.metadata.version('trl')}"}
        for name in SETTINGS:
            if hasattr(trainer.args, name):
                meta[name] = str(getattr(trainer.args, name))
        extra = [
            words for name, words in ADDED.items() if getattr(trainer, name, False)
        ]
        if extra:
            meta[EXTRA_TERMS] = " and ".join(extra)
        return step_batch(
            self.micro_batches,
            step=self._step(),
            rank=accelerator.process_index,
            logged=logged,
            meta=meta,
            gradient_scale=ranks * loss_scale(accelerator.scaler),
            hints=HINTS,
        )

    def _counts(self, ranks: int) -> dict[str, float]:
        """Return the counts of a step as TRL documents them, over all ranks: ranks,
        responses, and the tokens where they are known.

        Its tokens are the mean over the steps of a generation batch.
        """
        trainer = self.trainer
        loss_type = getattr(trainer, "loss_type", "")
        responses = sum(len(part["mask"]) for part in self.micro_batches)
        counts = {"ranks": float(ranks), "responses": float(responses * ranks)}
        if len(set(self.items)) == 1:  # else the step is of several generation batches
            share = (
                trainer.current_gradient_accumulation_steps
                / trainer.args.steps_per_generation
            )
            counts["generation_tokens"] = self.items[0]
            counts["tokens"] = max(self.items[0], 1.0) * share
            if loss_type == "vespo":  # its divisor is tokens
                counts["divisor"] = counts["tokens"]
        if loss_type == "dr_grpo":  # its divisor is responses times this length
            counts["length"] = float(trainer.max_completion_length)
        return counts
