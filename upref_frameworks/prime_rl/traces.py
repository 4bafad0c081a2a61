# SPDX-License-Identifier: Apache-2.0
"""prime-rl's traces beside its .bin: `rollouts/step_{N}/train/effective/traces.jsonl`.

https://github.com/PrimeIntellect-ai/prime-rl/blob/559b44772e471d1538537b8805cc77f3824a5e64/src/prime_rl/monitors/file.py
https://github.com/PrimeIntellect-ai/verifiers/blob/main/verifiers/v1/trace.py
A line is an episode with its traces. A trace is a tree of nodes, each with token ids;
each path from the root to a leaf is a branch, and a sample of the trainer. Its reward is
the sum of score times weight over its rewards. The .bin has no reward; samples are found
in the traces by their tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upref.errors import InputError

PATH = Path("train", "effective", "traces.jsonl")  # in the folder of a step


@dataclass(frozen=True)
class Branch:
    """One sample in the traces: its tokens, and the reward of its trace."""

    ids: tuple[int, ...]
    reward: float


def read_branches(path: Path) -> list[Branch]:
    """Read the branches of all traces.

    Args:
        path: of traces.jsonl.

    Returns:
        Those with tokens, in the order of the file.

    Raises:
        InputError: a line is no episode of prime-rl.
    """
    out: list[Branch] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    out += _branches_of(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError, IndexError):
                    raise InputError(
                        f"{path}, line {number}: no episode of prime-rl; was the file cut off?"
                    ) from None
    return out


def _branches_of(episode: dict[str, Any]) -> Iterator[Branch]:
    """Yield the branches of an episode's traces that have tokens: one for each leaf of
    a trace.
    """
    for trace in episode["traces"]:
        rewards = (r for r in trace["rewards"].values() if r is not None)
        reward = sum(float(r["score"]) * float(r["weight"]) for r in rewards)
        nodes = trace["nodes"]
        inner = {node.get("parent") for node in nodes}  # places in `nodes`
        for leaf in range(len(nodes)):
            if leaf not in inner:
                ids = tuple(_tokens_to(nodes, leaf))
                if ids:
                    yield Branch(ids, reward)


def _tokens_to(nodes: list[dict[str, Any]], leaf: int) -> list[int]:
    """Return the tokens from the root to a leaf. A cycle in the tree, which no trace
    has, ends after as many steps as there are nodes.
    """
    path: list[list[int]] = []
    place: int | None = leaf
    while place is not None and len(path) <= len(nodes):
        path.append(nodes[place]["token_ids"])
        place = nodes[place].get("parent")
    return [int(token) for ids in reversed(path) for token in ids]


def find_reward(ids: tuple[int, ...], branches: list[Branch]) -> float | None:
    """Return the reward of the trace that a sample was made of.

    Args:
        ids: of the sample; padding may stand behind it, or it is cut off.
        branches: of the step.

    Returns:
        That of the longest branches whose tokens agree with the sample as far as both
        go; None where no branch does, or these have several rewards.
    """
    fitting: list[Branch] = []
    for branch in branches:
        shared = min(len(ids), len(branch.ids))
        if ids[:shared] == branch.ids[:shared]:
            fitting.append(branch)
    longest = max((len(branch.ids) for branch in fitting), default=0)
    rewards = {b.reward for b in fitting if len(b.ids) == longest}
    return rewards.pop() if len(rewards) == 1 else None
