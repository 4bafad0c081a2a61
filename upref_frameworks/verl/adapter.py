# SPDX-License-Identifier: Apache-2.0
"""An adapter for verl: its unmodified TrainingWorker over FSDP2 and gloo, on given
rows.
"""

import copy
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from upref.conformance import Case
from upref.step.compare.record import Recorded
from upref.step.inputs.rows import Row
from upref_frameworks.steps.settings import attention_of
from upref_frameworks.verl.from_rewards import record_from_rewards
from upref_frameworks.verl.step import record_training

LENGTH = 16  # loss_scale_factor: what dr_grpo divides a sum over tokens by
FIXED_CLIP = dict(clip_ratio_low=0.2, clip_ratio_high=0.2)
SEQUENCES = dict(loss_agg_mode="seq-mean-token-mean")

# objective -> the fields of ActorConfig that ask for it
FIELDS: dict[str, dict[str, Any]] = {
    "ppo_clip": FIXED_CLIP,
    "dapo": dict(clip_ratio_low=0.2, clip_ratio_high=0.28),
    "grpo": FIXED_CLIP | SEQUENCES,
    "dr_grpo": FIXED_CLIP
    | dict(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=LENGTH),
    # CISPO has no lower bound: a ratio is never below 0.
    "cispo": dict(
        clip_ratio_low=1.0, clip_ratio_high=4.0, policy_loss=dict(loss_mode="cispo")
    ),
    "sapo": SEQUENCES | dict(policy_loss=dict(loss_mode="sapo")),
    "gspo": SEQUENCES
    | dict(
        clip_ratio_low=3e-4, clip_ratio_high=4e-4, policy_loss=dict(loss_mode="gspo")
    ),
    "reinforce": dict(
        loss_agg_mode="seq-mean-token-sum", policy_loss=dict(loss_mode="gpg")
    ),
}


# estimator of advantages -> the fields of verl's section `algorithm`
ALGORITHMS: dict[str, dict[str, Any]] = {
    "group_mean": dict(adv_estimator="grpo", norm_adv_by_std_in_grpo=False),
    "group_norm": dict(adv_estimator="grpo", norm_adv_by_std_in_grpo=True),
    "leave_one_out": dict(adv_estimator="rloo"),
}

# settings that `upref diff` tries where the step differs from another trainer's
ALTERNATIVES: tuple[dict[str, Any], ...] = (
    dict(loss_agg_mode="token-mean"),
    SEQUENCES,
    dict(loss_agg_mode="seq-mean-token-sum"),
    dict(temperature=1.0),
    dict(clip_ratio_high=0.2),
    dict(clip_ratio_high=0.28),
    dict(clip_ratio_c=1e9),
    dict(clip_ratio_c=3.0),
    dict(policy_loss=dict(loss_mode="gspo")),
    dict(use_kl_loss=False),
    dict(entropy_coeff=0.0),
    dict(clip_grad=1e9),
    dict(clip_grad=1.0),
)
# where it makes the advantages, these too
PREPARING: tuple[dict[str, Any], ...] = (
    dict(norm_adv_by_std_in_grpo=True),
    dict(norm_adv_by_std_in_grpo=False),
    dict(adv_estimator="rloo"),
)
# the sections of the settings that are not of ActorConfig
ENGINE = ("micro_batch_size_per_gpu", "mixed_precision")
ALGORITHM = ("adv_estimator", "norm_adv_by_std_in_grpo")
RUN = ("temperature", "clip_grad")


class Verl:
    """TrainingWorker of the installed verl."""

    name = f"verl {importlib.metadata.version('verl')}"
    changed: Mapping[str, Any] = {}  # over the settings of each case

    def supports(self, case: Case) -> str:
        """Return why verl lacks what the case sets; "" where it lacks nothing.

        Args:
            case: one of the suite.
        """
        if case.objective not in FIELDS:
            return f"verl has no loss_mode of {case.objective}"
        if case.parallel != "data":
            return "Ulysses, Megatron and pipelines are not driven here"
        if case.advantages and case.advantages not in ALGORITHMS:
            return f"verl has no adv_estimator of {case.advantages}"
        if case.ddof != 1:
            return "the standard deviation divides by G - 1"
        if case.drop_truncated:
            return "verl has no option that drops responses that were cut off"
        return ""

    def scale(self, case: Case) -> float:
        """Return the factor by which verl documents that it multiplies the loss.

        Args:
            case: one of the suite.

        Returns:
            1 / LENGTH for Dr. GRPO, whose sum verl divides by loss_scale_factor; else
            1.
        """
        return 1 / LENGTH if case.objective == "dr_grpo" else 1.0

    def actor(self, case: Case) -> dict[str, Any]:
        """Return the fields of verl's ActorConfig for a case.

        Args:
            case: one that `supports` accepts.

        Returns:
            Field -> value; the others keep verl's defaults.
        """
        fields = dict(FIELDS[case.objective])
        if "c" in case.hp:
            fields |= dict(clip_ratio_c=case.hp["c"])
        if case.beta:
            fields |= dict(use_kl_loss=True, kl_loss_coef=case.beta, kl_loss_type="k3")
        if case.entropy_coef:
            fields |= dict(entropy_coeff=case.entropy_coef)
        return fields

    def engine(self, case: Case) -> dict[str, Any]:
        """Return the fields of verl's FSDPEngineConfig for a case.

        Args:
            case: its eight rows are divided by its micro-batches, updates and ranks.

        Returns:
            Field -> value; the others keep verl's defaults.
        """
        parts = case.micro_batches * case.updates * case.ranks
        fields: dict[str, Any] = dict(micro_batch_size_per_gpu=8 // parts)
        if case.dtype == "bfloat16":
            fields["mixed_precision"] = None  # verl's default, bfloat16
        return fields

    def settings(self, case: Case) -> dict[str, str]:
        """Return verl's own configuration of a case, as it is written to the results.

        Args:
            case: one that `supports` accepts.

        Returns:
            Setting -> value, as Python writes it.
        """
        said = self.actor(case) | self.engine(case)
        said |= ALGORITHMS.get(case.advantages, {})
        if case.iterations > 1:
            said |= dict(ppo_epochs=case.iterations)
        said |= dict(
            temperature=case.temperature, ppo_mini_batch_size=8 // case.updates
        )
        if case.clip:
            said |= dict(clip_grad=case.clip)
        said |= self.changed
        return {key: repr(value) for key, value in said.items()}

    def alternatives(self, case: Case) -> list[dict[str, Any]]:
        """Return settings to try in place of those of a case.

        Args:
            case: one that `supports` accepts.

        Returns:
            Changes of its settings: one micro-batch for an optimizer step; then those
            of the tables.
        """
        one_pass = dict(micro_batch_size_per_gpu=8 // (case.updates * case.ranks))
        return [one_pass, *ALTERNATIVES, *(PREPARING if case.advantages else ())]

    def with_settings(self, changed: dict[str, Any]) -> "Verl":
        """Return this adapter with other settings.

        Args:
            changed: setting -> value, over those of each case.
        """
        other = copy.copy(self)
        other.changed = {**self.changed, **changed}
        return other

    def _changed_in(self, *names: str) -> dict[str, Any]:
        """Return the changed settings that have these names; without names those of
        ActorConfig.
        """
        others = (*ENGINE, *ALGORITHM, *RUN)
        return {
            key: value
            for key, value in self.changed.items()
            if key in names or (not names and key not in others)
        }

    def step(self, model: Any, rows: list[Row], case: Case) -> Recorded:
        """Let verl's worker take the optimizer steps of a case.

        Args:
            model: a small causal language model of transformers; verl trains a copy.
            rows: the responses.
            case: one that `supports` accepts.

        Returns:
            The recorded steps.
        """
        return record_training(
            model,
            rows,
            self.changed.get("temperature", case.temperature),
            actor=self.actor(case) | self._changed_in(),
            engine=self.engine(case) | self._changed_in(*ENGINE),
            clip=self.changed.get("clip_grad", case.clip or 1e9),
            attention=attention_of(case.family),
            mini_batches=case.updates,
            rate=1e-6,
        )

    def train(
        self, model: Any, rows: list[Row], case: Case, reference: Any
    ) -> Recorded:
        """Let verl's PPOTrainer make advantages and log-probabilities of the rows of a
        case, and train on them.

        Args:
            model: a small causal language model of transformers; verl trains a copy.
            rows: the responses with their rewards.
            case: one of level 6 that `supports` accepts.
            reference: the reference model, or None.

        Returns:
            The recorded steps.
        """
        return record_from_rewards(
            model,
            rows,
            self.changed.get("temperature", case.temperature),
            algorithm=ALGORITHMS[case.advantages] | self._changed_in(*ALGORITHM),
            actor=self.actor(case)
            | dict(ppo_epochs=case.iterations)
            | self._changed_in(),
            engine=self.engine(case) | self._changed_in(*ENGINE),
            updates=case.updates,
            reference=reference,
            lora_rank=4 if case.reference == "adapter" else 0,
        )
