# SPDX-License-Identifier: Apache-2.0
"""Tasks so small that every response is listed, and policies that are one table or one layer.

    N responses of at most T tokens, each with its prompt and its reward;
    a token is chosen in a context, its prefix;
    logits z = features θ, [C, V]: features = identity is a table, anything else one
    layer shared by the contexts;
    log π(o_t) = log_softmax(z[context of o_t])[o_t]

θ is [S, D, V]: S policies at once, each by itself. All in float64. In the shapes Q is the
number of prompts, C that of contexts, D that of features, V that of tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from upref.errors import InputError

F64 = torch.float64


@dataclass(frozen=True)
class Task:
    """All responses to all prompts; the responses to one prompt are all that the policy
    can answer to it.

    Attributes:
        contexts: index of the context in which each token is chosen.
        tokens: of each response.
        mask: False on padding.
        prompt: index of each response's prompt.
        reward: of each response.
        features: of each context; the identity for a table.
    """

    contexts: Int[Tensor, "N T"]
    tokens: Int[Tensor, "N T"]
    mask: Bool[Tensor, "N T"]
    prompt: Int[Tensor, " N"]
    reward: Float[Tensor, " N"]
    features: Float[Tensor, "C D"] | Float[Tensor, "S C D"]

    @property
    def binary(self) -> bool:
        """Whether every reward is 0 or 1."""
        return bool(((self.reward == 0) | (self.reward == 1)).all())

    @property
    def one_length(self) -> bool:
        """Whether all responses have equally many tokens."""
        return len(self.mask.sum(1).unique()) == 1

    def table(self, theta: Float[Tensor, "S D V"]) -> Float[Tensor, "S C V"]:
        """Return log π of every token in every context."""
        return (self.features @ theta).log_softmax(-1)

    def log_probs(self, theta: Float[Tensor, "S D V"]) -> Float[Tensor, "S N T"]:
        """Return log π of every token of every response; masked slots have something
        finite.
        """
        return self.table(theta)[:, self.contexts, self.tokens]

    def responses(self, lp: Float[Tensor, "S N T"]) -> Float[Tensor, "S N"]:
        """Return π(o) of every response, from its tokens' log π."""
        return (lp * self.mask).sum(-1).exp()

    def right(self, pi: Float[Tensor, "S N"]) -> Float[Tensor, "S Q"]:
        """Return the expected reward of each prompt."""
        return per_prompt(self, pi * self.reward)

    def start(self, probs: Float[Tensor, "... C V"] | list) -> Float[Tensor, "S D V"]:
        """Return θ of the policy with these probabilities of tokens in each context, by
        least squares on the logits where one layer cannot have them.

        Args:
            probs: [C, V] of one policy, or with a first dimension of several.

        Raises:
            InputError: a probability is not above 0, or a context's do not add up to 1.
        """
        p = torch.as_tensor(probs, dtype=F64)
        if (p <= 0).any() or ((p.sum(-1) - 1).abs() > 1e-9).any():
            raise InputError(
                "a policy's probabilities must be positive and add up to 1 in every context."
            )
        z = p.log()
        theta = torch.linalg.pinv(self.features) @ (z - z.mean(-1, keepdim=True))
        return theta if theta.ndim == 3 else theta[None]


def per_prompt(task: Task, x: Float[Tensor, "S N"]) -> Float[Tensor, "S Q"]:
    """Return the sum of x over the responses to each prompt."""
    return torch.zeros(len(x), int(task.prompt.max()) + 1, dtype=F64).index_add(
        1, task.prompt, x
    )


def bandit(reward: list[float], prompts: int = 1) -> Task:
    """Return a task of responses of one token: arm v of prompt q has reward[q V + v].

    Args:
        reward: of each arm of each prompt, of which there are equally many.
        prompts: how many; each is one context of a table.

    Raises:
        InputError: the rewards are not a multiple of the prompts.
    """
    N = len(reward)
    if N % prompts:
        raise InputError(
            f"{N} rewards cannot be shared out equally among {prompts} prompts."
        )
    arms = N // prompts
    prompt = torch.arange(N) // arms
    return Task(
        contexts=prompt[:, None],
        tokens=(torch.arange(N) % arms)[:, None],
        mask=torch.ones(N, 1, dtype=torch.bool),
        prompt=prompt,
        reward=torch.tensor(reward, dtype=F64),
        features=torch.eye(prompts, dtype=F64),
    )


def strings(
    vocabulary: int, length: int, right: set[tuple[int, ...]], end: int | None = None
) -> Task:
    """Return a task of all strings of that many tokens to one prompt, with a table that
    has a context for each prefix.

    Args:
        vocabulary: tokens are 0, ..., vocabulary - 1.
        length: of a response, or the longest with `end`.
        right: the responses of reward 1; others have 0.
        end: a token after which a response is over: responses then differ in length.

    Raises:
        InputError: one in `right` is no response.
    """
    whole: list[tuple[int, ...]] = []  # the responses, each once
    prefixes: dict[tuple[int, ...], int] = {(): 0}  # prefix -> its context
    for o in product(range(vocabulary), repeat=length):
        if end is not None and end in o:
            o = o[: o.index(end) + 1]
        if o not in whole:
            whole.append(o)
            for t in range(len(o)):
                prefixes.setdefault(o[:t], len(prefixes))
    if not right <= set(whole):
        raise InputError(
            f"{sorted(right - set(whole))[0]} is not a response of this task."
        )

    def pad(row: Iterable[int]) -> list[int]:
        """Return the row with zeros up to the length of the longest response."""
        numbers = list(row)
        return numbers + [0] * (length - len(numbers))

    def contexts(o: tuple[int, ...]) -> list[int]:
        """Return the context of each token of a response."""
        return [prefixes[o[:t]] for t in range(len(o))]

    lengths = torch.tensor([len(o) for o in whole])
    return Task(
        contexts=torch.tensor([pad(contexts(o)) for o in whole]),
        tokens=torch.tensor([pad(o) for o in whole]),
        mask=torch.arange(length) < lengths[:, None],
        prompt=torch.zeros(len(whole), dtype=torch.int64),
        reward=torch.tensor([float(o in right) for o in whole], dtype=F64),
        features=torch.eye(len(prefixes), dtype=F64),
    )
