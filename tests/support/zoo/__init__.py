# SPDX-License-Identifier: Apache-2.0
"""Losses as framework engineers write them, most of them wrong, each with the oracles that must notice.

A loss is `(log_prob, old_log_prob, advantages, mask, *, hyperparameters) -> scalar`, to be minimized; `ref_log_prob`
and `group` are passed where the signature has them. RIGHT are the correct ones, ALL is everything.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ORACLES = (
    "gradient", "value", "aggregation", "micro-batches", "data-parallel", "padding", "masked-values", "on-policy",
    "stop-gradient", "extremes", "dead-hyperparameter", "scaling", "permutation", "determinism", "mutation",
    "zero-advantage", "unusual-inputs", "one-response", "loss-scale",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    function: Callable
    objective: str  # what its author believes it to be
    hp: dict[str, Any] = field(default_factory=dict)
    oracles: set[str] = field(default_factory=set)  # one of these at least must fire; none: the loss is right
    bug: str = ""
    leaks: bool = False  # a NaN in a masked slot reaches its gradient: a note
    source: str = ""  # project#thread where it was made, mended or asked about in public; "": only likely

    def __post_init__(self):
        assert self.oracles <= set(ORACLES), self.oracles - set(ORACLES)

    def __str__(self):
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"


from . import aggregation, clipping, family, gradients, hygiene, masking, numerics, right, sequence  # noqa: E402

WRONG = [c for m in (clipping, aggregation, masking, gradients, sequence, family, numerics, hygiene) for c in m.ZOO]
RIGHT = right.ZOO
ALL = WRONG + RIGHT
