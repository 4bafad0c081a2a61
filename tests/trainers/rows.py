# SPDX-License-Identifier: Apache-2.0
"""Rows as the tensors that most loops take, and a frozen model that has their reference
log-probabilities.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from upref.step import Row

END, PAD = 2, 0


def pad(lists: Sequence[Sequence[float]], value: float = 0.0, left: bool = False):
    """Return lists of any length as one tensor, padded on the right, or on the left."""
    tensors = [torch.tensor(list(x)) for x in lists]
    side = "left" if left else "right"
    return nn.utils.rnn.pad_sequence(tensors, True, value, side)


def ids_of(rows: Sequence[Row], value: int = PAD) -> Tensor:
    """[B, S]: prompt and response, padded on the right."""
    return pad([r.ids for r in rows], value)


def aligned(rows: Sequence[Row], values: Callable[[Row], Sequence[float]]) -> Tensor:
    """[B, S - 1]: of each predicted token; 0 in the prompt and in the padding."""
    return pad([[0.0] * len(r.prompt) + list(values(r)) for r in rows])[:, 1:]


def response_mask(rows: Sequence[Row]) -> Tensor:
    """[B, S - 1]: whether the predicted token is of the response."""
    return aligned(rows, lambda r: [1.0] * len(r.response)).bool()


def number_of(rows: Sequence[Row], name: str) -> Tensor:
    """[B]: one number of each row."""
    return torch.tensor([getattr(r, name) for r in rows], dtype=torch.float32)


class Frozen(nn.Module):
    """Stands for a reference model: its logits give each response token the reference
    log-probability of its row.
    """

    def __init__(self, rows: Sequence[Row], vocabulary: int, temperature: float = 1.0):
        super().__init__()
        self.rows, self.V, self.T = rows, vocabulary, temperature

    def forward(self, input_ids: Tensor, *_: Any, logits_to_keep: int = 0, **__: Any):
        """Return logits that give each response found in the ids its reference
        log-probabilities; 0 elsewhere.
        """
        z = torch.zeros(*input_ids.shape, self.V)
        for at, ids in enumerate(input_ids.tolist()):
            for r in self.rows:
                text = r.ids
                places = [i for i in range(len(ids)) if ids[i : i + len(text)] == text]
                for i in places[:1]:
                    self._fill(z[at], i + len(r.prompt), r)
        return SimpleNamespace(logits=z[:, -logits_to_keep:] * self.T)

    def _fill(self, z: Tensor, first: int, r: Row) -> None:
        for t, (token, lp) in enumerate(zip(r.response, r.ref, strict=True), first):
            lp = torch.tensor(lp)
            z[t - 1] = ((1 - lp.exp()) / (self.V - 1)).log()
            z[t - 1, token] = lp
