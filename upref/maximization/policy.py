# SPDX-License-Identifier: Apache-2.0
"""A policy that is small enough to list: a table of logits over two tokens.

z_k            the logit of token 1 behind prefix k; token 0 has the logit 0
π(1 | k)       1 / (1 + e^-z_k)
P(o)           the probability of the response o, the product over its tokens
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

TOKENS = (0, 1)
STOP = 0  # the token that ends a response, where one does


@dataclass(frozen=True)
class Responses:
    """All responses of a policy with two tokens.

    Attributes:
        words: "one length" or "different lengths".
        tokens: the tokens of each response.
        prefixes: every sequence of tokens behind which another one follows.
    """

    words: str
    tokens: tuple[tuple[int, ...], ...]
    prefixes: tuple[tuple[int, ...], ...]

    @cached_property
    def lengths(self) -> Tensor:
        """The number of tokens of each response, [N]."""
        return torch.tensor([len(response) for response in self.tokens])

    @cached_property
    def mask(self) -> Tensor:
        """True where a response has a token, [N, T]."""
        columns = torch.arange(int(self.lengths.max()))
        return columns < self.lengths[:, None]

    @cached_property
    def prefix_of_token(self) -> Tensor:
        """The index of the prefix behind which each token stands, [N, T]; 0 where there is
        no token.
        """
        index = {prefix: k for k, prefix in enumerate(self.prefixes)}
        out = torch.zeros(self.mask.shape, dtype=torch.int64)
        for i, response in enumerate(self.tokens):
            for t in range(len(response)):
                out[i, t] = index[response[:t]]
        return out

    @cached_property
    def token(self) -> Tensor:
        """Each token, [N, T]; 0 where there is none."""
        out = torch.zeros(self.mask.shape, dtype=torch.int64)
        for i, response in enumerate(self.tokens):
            out[i, : len(response)] = torch.tensor(response)
        return out

    def log_probs(self, z: Tensor) -> Tensor:
        """Return log π of each token, [N, T]; 0 where there is none.

        Args:
            z: the logits, one for each prefix.
        """
        logits = z[self.prefix_of_token]
        lp = torch.where(self.token == 1, logsigmoid(logits), logsigmoid(-logits))
        return torch.where(self.mask, lp, 0)

    def probabilities(self, z: Tensor) -> Tensor:
        """Return P of each response, [N]. They add up to 1.

        Args:
            z: the logits, one for each prefix.
        """
        return self.log_probs(z).sum(1).exp()

    def entropies(self, z: Tensor) -> Tensor:
        """Return the entropy of the policy behind each prefix, in nats, [K].

        Args:
            z: the logits, one for each prefix.
        """
        p = z.sigmoid()
        return -(p * logsigmoid(z) + (1 - p) * logsigmoid(-z))

    def slopes(self, z: Tensor) -> Tensor:
        """Return the derivative of each log-probability by each logit, [N, T, K].

        Args:
            z: the logits, one for each prefix.
        """
        by_own_logit = self.token - z.sigmoid()[self.prefix_of_token]
        by_own_logit = torch.where(self.mask, by_own_logit, 0)
        own = torch.nn.functional.one_hot(self.prefix_of_token, len(self.prefixes))
        return by_own_logit[:, :, None] * own


def _with_one_length(length: int) -> Responses:
    """Return all responses of so many tokens."""
    prefixes = [
        prefix
        for size in range(length)
        for prefix in itertools.product(TOKENS, repeat=size)
    ]
    tokens = tuple(itertools.product(TOKENS, repeat=length))
    return Responses("one length", tokens, tuple(prefixes))


def _with_stop(longest: int) -> Responses:
    """Return all responses that end at the first STOP, or at the largest length: the
    shortest first.
    """
    prefixes = tuple((1,) * size for size in range(longest))
    tokens = [(*prefix, STOP) for prefix in prefixes]
    return Responses("different lengths", (*tokens, (1,) * longest), prefixes)


# four responses and three logits each
ONE_LENGTH = _with_one_length(2)
DIFFERENT_LENGTHS = _with_stop(3)
