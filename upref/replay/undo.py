# SPDX-License-Identifier: Apache-2.0
"""The two columns of a gap, and a cause of it that was undone: in places.py and
values.py.

The distance of two columns is the mean of min(|x - y|, 1) over the trained tokens:
bounded, so that one impossible token does not outweigh a thousand. A cause is accepted
where undoing it leaves a quarter of the distance or less. In two columns of the same
tokens, in the same rows, each of these changes enlarges the distance, so a healthy gap
of any size is never undone.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

QUARTER = 0.25  # of the distance may be left
NOTICEABLE = 0.02  # distance below which there is nothing to explain
UNRELATED = 0.5  # correlation of two columns below which neither is news of the other
LOW = -4.0  # nats, below which one number is as good as another in a correlation
FEW = 3  # tokens or responses: fewer are no pattern


@dataclass(frozen=True)
class Columns:
    """The log-probabilities of trainer (log π_old) and sampler (log μ), [B, T], and the
    tokens that are compared.
    """

    trainer: Tensor
    sampler: Tensor
    mask: Tensor

    @property
    def log_rho(self) -> Tensor:
        return self.trainer - self.sampler

    def trained(self, column: Tensor) -> Tensor:
        return column[self.mask]

    def without(self, tokens: Tensor) -> "Columns":
        """The same without these tokens."""
        return replace(self, mask=self.mask & ~tokens)

    def distance(self) -> float:
        """Mean of min(|x - y|, 1)."""
        d = self.trained(self.log_rho)
        return float(d.abs().clamp(max=1).mean()) if len(d) else 0.0

    def correlation(self) -> float:
        """Of the two columns, down to LOW nats; 1 where one of them is constant."""
        x = self.trained(self.trainer)
        y = self.trained(self.sampler)
        both = torch.stack([x, y]).clamp(min=LOW)
        if len(x) < FEW or not bool((both.std(1) > 0).all()):
            return 1.0
        return float(both.corrcoef()[0, 1])

    def unrelated(self) -> bool:
        """Whether a token's numbers in the columns have little to do with each other."""
        return self.distance() > NOTICEABLE and self.correlation() < UNRELATED

    def row_distance(self) -> Tensor:
        """The same of each response, [B]; 0 for a response without tokens."""
        off = torch.where(self.mask, self.log_rho.abs().clamp(max=1), 0.0)
        return off.sum(1) / self.mask.sum(1).clamp(min=1)


@dataclass(frozen=True)
class Undone:
    """A cause, the columns without it, and the distances before and after on the same
    tokens.
    """

    cause: str
    columns: Columns
    before: float
    after: float
    numbers: dict[str, Any] = field(default_factory=dict)
