# SPDX-License-Identifier: Apache-2.0
"""What a task is: problems as rows of integers, prompts of one length, and a verifier
that reads tokens.

problems(split, n, seed)     int64 [n, K], one row a problem; split is "train", "test" or a level. No problem of
                             "train" is ever one of another split
prompts(problems)            token ids [n, P]
pictures(problems)           pixels [n, 3, H, W], or None where the task has none
demonstrations(n, style, generator)   problems [n, K] and responses [n, T], padded, to start a base policy from; only
                             of the TASKS, whose bases are trained here
verify(problems, tokens)     reward 0 or 1, whether the answer is well-formed, and the answer that votes
"""

import importlib
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from upref.errors import InputError

PAD, EOS, BOS = 0, 1, 2
SPECIAL = ("<pad>", "<eos>", "<bos>")
NO_ANSWER = -1
TASKS = ("countdown", "chain", "geometry")
# in the tokens of a model that has learned language elsewhere
OF_SMOLLM2 = ("addition",)


class Verdict(NamedTuple):
    """What a task's verifier finds in N responses."""

    reward: Tensor  # float32 [N], 0 or 1
    valid: Tensor  # bool [N]
    answer: Tensor  # int64 [N], NO_ANSWER where not valid: it has no vote


class Task(Protocol):
    """What a task has; its methods are described at the top of this file."""

    words: tuple[str, ...]  # token i is words[i]; () where another model has them
    vocabulary: int  # how many tokens there are
    end: int  # the token that ends a response
    prompt_length: int  # P
    response_length: int  # T, <eos> included
    levels: tuple[str, ...]  # names of the held-out sets by difficulty

    def problems(self, split: str, n: int, seed: int) -> Tensor: ...
    def prompts(self, problems: Tensor) -> Tensor: ...
    def pictures(self, problems: Tensor) -> Tensor | None: ...
    def demonstrations(
        self, n: int, style: str, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]: ...
    def verify(self, problems: Tensor, tokens: Tensor) -> Verdict: ...


def get(name: str) -> Task:
    """Return the task of that name.

    Raises:
        InputError: there is none.
    """
    names = TASKS + OF_SMOLLM2
    if name not in names:
        raise InputError(
            f"there is no task named {name!r}: choose one of {', '.join(names)}."
        )
    return importlib.import_module(f"repro.mini.tasks.{name}").task


def response_mask(tokens: Tensor, end: int = EOS) -> Tensor:
    """Return bool [N, T]: True up to and including the first `end`, or everywhere if
    there is none.
    """
    ended = tokens == end
    return ended.cumsum(1) - ended.long() == 0


def generator(*key: int | str) -> torch.Generator:
    """Return a random generator on the CPU, seeded by a digest of the key.

    Every purpose has its own: ("rollout", seed, step) has nothing to do with ("eval",
    ...).
    """
    import hashlib

    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
