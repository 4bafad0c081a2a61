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

from upref.replay.findings import Severity

# share of the distance that may be left where a cause explains it
MOST_LEFT = 0.25
NOTICEABLE_DISTANCE = 0.02  # distance below which there is nothing to explain
# below this correlation, one column tells nothing about the other
UNRELATED_CORRELATION = 0.5
# nats: in a correlation, lower log-probabilities count as this one
LOW_LOG_PROB = -4.0
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
        """log ρ of each token, [B, T]."""
        return self.trainer - self.sampler

    def trained(self, column: Tensor) -> Tensor:
        """Return the numbers of a column on the tokens that are compared, [n]."""
        return column[self.mask]

    def without(self, tokens: Tensor) -> "Columns":
        """Return the columns with these tokens left out of the mask."""
        return replace(self, mask=self.mask & ~tokens)

    def distance(self) -> float:
        """Return the mean of min(|x - y|, 1) over the compared tokens, in nats; 0 where
        there are none.
        """
        differences = self.trained(self.log_rho)
        return float(differences.abs().clamp(max=1).mean()) if len(differences) else 0.0

    def correlation(self) -> float:
        """Return the correlation of the two columns, whose numbers count at least as
        LOW_LOG_PROB; 1 where a column is then constant, or there are fewer than FEW
        tokens.
        """
        x = self.trained(self.trainer)
        y = self.trained(self.sampler)
        clamped = torch.stack([x, y]).clamp(min=LOW_LOG_PROB)
        if len(x) < FEW or not bool((clamped.std(1) > 0).all()):
            return 1.0
        return float(clamped.corrcoef()[0, 1])

    def unrelated(self) -> bool:
        """Return whether the columns differ noticeably and are hardly correlated."""
        return (
            self.distance() > NOTICEABLE_DISTANCE
            and self.correlation() < UNRELATED_CORRELATION
        )

    def row_distance(self) -> Tensor:
        """Return the mean of min(|x - y|, 1) of each response, [B], in nats; 0 for one
        without compared tokens.
        """
        distances = torch.where(self.mask, self.log_rho.abs().clamp(max=1), 0.0)
        return distances.sum(1) / self.mask.sum(1).clamp(min=1)


def words_for_long(mask: Tensor, least: int) -> str:
    """Say that only long responses are counted: " of at least 8 tokens"; "" where all
    responses that train are long.

    Args:
        mask: the tokens that train, [B, T].
        least: tokens that train in a long response.
    """
    tokens = mask.sum(1)
    are_all_long = bool((tokens[tokens > 0] >= least).all())
    return "" if are_all_long else f" of at least {least} tokens"


@dataclass(frozen=True)
class Undone:
    """A cause, the columns without it, and the distances before and after, in nats.

    Its `numbers` are those of its sentence in words.SAMPLER, beside the two distances.
    Its severity is "note" where another cause leaves the same columns.
    """

    cause: str
    columns: Columns
    before: float
    after: float
    numbers: dict[str, Any] = field(default_factory=dict)
    severity: Severity = "failure"
