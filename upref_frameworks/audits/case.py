# SPDX-License-Identifier: Apache-2.0
"""A comparison as a framework's table has it, and as it is made: types alone."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from upref.rollouts import Rollouts
from upref.user_code.settings import pairs
from upref.verify.faults.losses import LossFault
from upref_frameworks.audits.faulty import Explanation

TOL = 1e-7
MICRO = 8  # micro-batches into which the batch of a comparison is split


@dataclass(frozen=True)
class Comparison:
    """A loss of a framework, what it is compared with, and why the two differ.

    Attributes:
        setting: `default` or `paper`: whose hyperparameters the loss has.
        mode: the framework's name of the loss.
        config: fields of the framework's config, over its defaults.
        objective: the name of the objective that the loss promises.
        hp: hyperparameters of the objective.
        reasons: the faults that account for the difference.
        one_adv: whether the loss takes one advantage per response.
    """

    setting: str
    mode: str
    config: dict[str, Any]
    objective: str
    hp: dict[str, Any]
    reasons: tuple[LossFault, ...] = ()
    one_adv: bool = False

    @property
    def label(self) -> str:
        """Return the loss as `upref check FRAMEWORK:LABEL` reads it: MODE,FIELD=VALUE.
        It is what `split_name` of settings.py splits.
        """
        return ",".join([self.mode, *pairs(self.config)])

    @property
    def promise(self) -> str:
        """Return the objective with its hyperparameters, such as `dapo, eps_high=0.28`."""
        return self.objective + "".join(f", {k}={v:g}" for k, v in self.hp.items())


@dataclass(frozen=True)
class ComparisonCase:
    """All that a comparison needs beside the numbers of the framework.

    Attributes:
        comparison: a row of the framework's table.
        label: the loss as `upref check FRAMEWORK:LABEL` reads it.
        promise: the promised objective with its hyperparameters, in words.
        without_faults: what explains a loss that agrees.
        explanation: explained by the faults of the comparison.
        split_explanation: explained by these and by what micro-batches change; None
            where the loss is not compared in micro-batches.
        batch: where the gradients are compared, [B, T]; see `make_grid` of losses.py.
        typical: where the effects of the faults are measured; see `typical_batch`.
        unit: the weight that the promised aggregation gives to the tokens of each
            response, [B, 1]. A gradient of J divided by it is the token's own weight
            dJ_t/dlp.
    """

    comparison: Comparison
    label: str
    promise: str
    without_faults: Explanation
    explanation: Explanation
    split_explanation: Explanation | None
    batch: Rollouts
    typical: Rollouts
    unit: Tensor
