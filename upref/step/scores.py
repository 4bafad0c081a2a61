# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities made of the right logits in a wrong way: temperature, normalizer, label smoothing."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from upref.step.forward import log_prob


def scores(V: int) -> Iterator[tuple[str, Callable[[Tensor, Tensor, float], Tensor]]]:
    """Words, and a function of logits, labels and temperature."""
    its = lambda x, y: x.gather(1, y[:, None])[:, 0]

    def smooth(z: Tensor, y: Tensor, T: float, e: float) -> Tensor:
        return (1 - e) * log_prob(z, y, T) + e * (z / T).log_softmax(-1).mean(-1)

    def among(z: Tensor, y: Tensor, T: float, k: int) -> Tensor:
        kept = torch.zeros_like(z).scatter(1, z.topk(k).indices, 1.0).scatter(1, y[:, None], 1.0)
        return log_prob(z.masked_fill(kept == 0, -torch.inf), y, T)

    def sharded(z: Tensor, y: Tensor, T: float, n: int) -> Tensor:
        size = -(-V // n)
        own = torch.arange(z.shape[1]) // size == (y // size)[:, None]
        return log_prob(z.masked_fill(~own, -torch.inf), y, T)

    yield "log-probabilities are divided by the temperature, not logits", lambda z, y, T: log_prob(z, y, 1) / T
    yield "probabilities stand for log-probabilities", lambda z, y, T: log_prob(z, y, T).exp()
    yield "the log-normalizer has no gradient", lambda z, y, T: its(z / T, y) - (z / T).logsumexp(-1).detach()
    for n in (2, 4, 8):
        yield f"the log-softmax is over the label's shard of the vocabulary, of {n}", partial(sharded, n=n)
    for k in (k for k in (5, 10, 20, 40, 50, 100) if k < V):
        yield f"log-probabilities are normalized over the {k} largest", partial(among, k=k)
    for e in (0.1, 0.05, 0.2, 0.01):
        yield f"label smoothing of {e} is on", partial(smooth, e=e)
