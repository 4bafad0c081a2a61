# SPDX-License-Identifier: Apache-2.0
"""An adapter for OpenRLHF: its unmodified ActorPPOTrainer on given rows, with a
stand-in for DeepSpeed's engine.
"""

import copy
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch

from upref.conformance import Case
from upref.step.compare.record import Recorded
from upref.step.inputs.rows import Row
from upref_frameworks.openrlhf.step import record_from_rewards, record_training
from upref_frameworks.steps.settings import attention_of

SEQUENCES = dict(loss_agg_mode="seq-mean-token-mean")

# objective -> the fields of its section `actor` that ask for it
FIELDS: dict[str, dict[str, Any]] = {
    "ppo_clip": dict(eps_clip_low_high=(0.2, 0.2)),
    "dapo": dict(eps_clip_low_high=(0.2, 0.28)),
    "grpo": SEQUENCES | dict(eps_clip_low_high=(0.2, 0.2)),
    "gspo": dict(eps_clip_low_high=(3e-4, 4e-4), policy_loss_type="gspo"),
}

# estimator of advantages -> algo.advantage.estimator
ESTIMATORS = {
    "group_mean": "dr_grpo",
    "group_norm": "group_norm",
    "leave_one_out": "rloo",
}

# settings that `upref diff` tries where the step differs from another trainer's
ALTERNATIVES: tuple[dict[str, Any], ...] = (
    dict(loss_agg_mode="token-mean"),
    SEQUENCES,
    dict(temperature=1.0),
    dict(eps_clip_low_high=(0.2, 0.2)),
    dict(eps_clip_low_high=(0.2, 0.28)),
    dict(dual_clip=None),
    dict(dual_clip=3.0),
    dict(policy_loss_type="gspo"),
    dict(beta=0.0),
    dict(entropy_coef=None),
    dict(clip=0.0),
    dict(clip=1.0),
)
# where it makes the advantages, these too
PREPARING = tuple(dict(estimator=name) for name in ESTIMATORS.values())


class OpenRLHF:
    """ActorPPOTrainer of the installed OpenRLHF."""

    name = f"openrlhf {importlib.metadata.version('openrlhf')}"
    changed: Mapping[str, Any] = {}  # over the settings of each case

    def supports(self, case: Case) -> str:
        """Return why OpenRLHF lacks what the case sets; "" where it lacks nothing.

        Args:
            case: one of the suite.
        """
        if case.objective not in FIELDS:
            return f"OpenRLHF has no policy_loss_type of {case.objective}"
        if case.ranks > 1:
            return "DeepSpeed, which averages over ranks, is replaced here"
        if case.advantages and case.advantages not in ESTIMATORS:
            return f"OpenRLHF has no advantage.estimator of {case.advantages}"
        if case.ddof != 1:
            return "the standard deviation divides by G - 1"
        if case.drop_truncated:
            return "OpenRLHF has no option that drops responses that were cut off"
        return ""

    def scale(self, case: Case) -> float:
        """Return 1: no loss of OpenRLHF is documented to have a constant factor.

        Args:
            case: not read.
        """
        return 1.0

    def fields(self, case: Case) -> dict[str, Any]:
        """Return the arguments of `record_training` for a case.

        Args:
            case: one that `supports` accepts; its eight rows are divided by its
                micro-batches and updates.

        Returns:
            Argument -> value; the others keep the defaults of `record_training`.
        """
        fields = FIELDS[case.objective] | dict(
            micro=8 // (case.micro_batches * case.updates), updates=case.updates
        )
        if "c" in case.hp:
            fields |= dict(dual_clip=case.hp["c"])
        if case.beta:
            fields |= dict(beta=case.beta)
        if case.reference == "adapter":
            fields |= dict(lora_rank=4)
        if case.iterations > 1:
            fields |= dict(epochs=case.iterations)
        if case.entropy_coef:
            fields |= dict(entropy_coef=case.entropy_coef)
        if case.clip:
            fields |= dict(clip=case.clip)
        return fields

    def settings(self, case: Case) -> dict[str, str]:
        """Return OpenRLHF's own configuration of a case, as the results have it.

        Args:
            case: one that `supports` accepts.

        Returns:
            Setting -> value, as Python writes it.
        """
        said = self.fields(case) | dict(temperature=case.temperature)
        if case.advantages:
            said |= dict(estimator=ESTIMATORS[case.advantages])
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
        one_pass = dict(micro=8 // case.updates)
        return [one_pass, *ALTERNATIVES, *(PREPARING if case.advantages else ())]

    def with_settings(self, changed: dict[str, Any]) -> "OpenRLHF":
        """Return this adapter with other settings.

        Args:
            changed: setting -> value, over those of each case.
        """
        other = copy.copy(self)
        other.changed = {**self.changed, **changed}
        return other

    def _fields(self, case: Case) -> dict[str, Any]:
        """Return the arguments of `record_training` with the changed settings in them;
        temperature and estimator are arguments of their own.
        """
        rest = ("temperature", "estimator")
        return self.fields(case) | {
            key: value for key, value in self.changed.items() if key not in rest
        }

    def step(self, model: Any, rows: list[Row], case: Case) -> Recorded:
        """Let OpenRLHF's trainer take the optimizer steps of a case.

        Args:
            model: a small causal language model of transformers; OpenRLHF trains a
                copy.
            rows: the responses.
            case: one that `supports` accepts.

        Returns:
            The recorded steps.
        """
        return record_training(
            model,
            rows,
            self.changed.get("temperature", case.temperature),
            attention=attention_of(case.family),
            dtype=getattr(torch, case.dtype),
            **self._fields(case),
        )

    def train(
        self, model: Any, rows: list[Row], case: Case, reference: Any
    ) -> Recorded:
        """Let OpenRLHF's trainer make experiences of the rows of a case, and train on
        them.

        Args:
            model: a small causal language model of transformers; OpenRLHF trains a
                copy.
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
            self.changed.get("estimator", ESTIMATORS[case.advantages]),
            reference=reference,
            attention=attention_of(case.family),
            rate=0.005,
            **self._fields(case),
        )
