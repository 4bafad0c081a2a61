# SPDX-License-Identifier: Apache-2.0
"""One step's experience: problems drawn, responses sampled and verified, advantages.
DAPO's two options live here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repro.mini.policy import models
from repro.mini.policy.sample import sample
from repro.mini.tasks import Task, generator
from repro.mini.train import faults
from repro.mini.train.measure import entropy
from repro.mini.train.settings import Settings
from upref import advantages

# of dynamic sampling; then groups of equal rewards fill up, with advantage 0
MOST_ROUNDS = 8


@dataclass
class Batch:
    """prompts of `prompts` problems; everything else has one row a response, those of
    one prompt side by side.
    """

    prompts: dict[str, Tensor]
    tokens: Tensor  # [B, T]
    mask: Tensor  # [B, T]
    # [S, V] of π_old in each state it was in, at the temperature of the sampling
    log_probs: Tensor
    state: Tensor  # [B, T], the one of each token
    logp: Tensor  # [B, T] of π_old
    adv: Tensor  # [B]
    reward: Tensor  # [B], of which the advantages were made
    group: Tensor  # [B]
    seen: dict[str, float]  # for steps.jsonl: over all that was sampled

    def prompts_of(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The prompts of these rows, each once, and which of them each row has."""
        which, of = self.group[rows].unique(return_inverse=True)
        return {name: x[which] for name, x in self.prompts.items()}, of


def rollout(
    policy: PreTrainedModel, task: Task, problems: Tensor, s: Settings, step: int
) -> Batch:
    """Sample responses, score them, and compute their advantages.

    With dynamic sampling, prompts are drawn until enough have responses of different
    rewards, or MOST_ROUNDS are over; then those come first.
    """
    kept: list[tuple[Tensor, ...]] = []
    judged: list[tuple[Tensor, ...]] = []
    said: list[Tensor] = []
    for attempt in range(MOST_ROUNDS if s.dynamic_sampling else 1):
        g = generator("rollout", s.seed, step, attempt)
        order = torch.randperm(len(problems), generator=g, device="cpu")
        drawn = problems[order[: s.prompts]].to(torch.get_default_device())
        tokens, mask, logits, state = sample(
            policy,
            models.inputs(task, drawn),
            s.responses,
            task.response_length,
            g,
            s.temperature,
            end=task.end,
        )
        said.append((logits / s.temperature).log_softmax(-1))
        verdict = task.verify(drawn.repeat_interleave(s.responses, 0), tokens)
        judged.append(
            (
                verdict.reward,
                verdict.valid,
                mask.sum(1),
                entropy(said[-1])[state].where(mask, 0.0).sum(1),
            )
        )
        rewards = verdict.reward - too_long(mask, s)
        mixed = (rewards.view(s.prompts, -1) != rewards.view(s.prompts, -1)[:, :1]).any(
            1
        )
        state += sum(map(len, said[:-1]))
        kept.append(
            (
                mixed,
                drawn,
                *(
                    x.view(s.prompts, s.responses, *x.shape[1:])
                    for x in (tokens, mask, state, rewards)
                ),
            )
        )
        if sum(int(mixed.sum()) for mixed, *_ in kept) >= s.prompts:
            break
    mixed, drawn, *rest = (torch.cat(x) for x in zip(*kept, strict=True))
    # without dynamic sampling, all of them as they came
    first = (
        torch.argsort(~mixed, stable=True)[: s.prompts]
        if s.dynamic_sampling
        else torch.arange(s.prompts)
    )
    tokens, mask, state, rewards = (x[first].flatten(0, 1) for x in rest)
    log_probs, group = (
        torch.cat(said),
        torch.arange(s.prompts).repeat_interleave(s.responses),
    )
    right, valid, length, H = (torch.cat(x).double() for x in zip(*judged, strict=True))
    return Batch(
        models.inputs(task, drawn[first]),
        tokens,
        mask,
        log_probs,
        state,
        log_probs[state, tokens].where(mask, 0.0),
        advantages.get(s.advantages or s.target().adv)(
            rewards, faults.groups_of(s.fault, group, s.prompts)
        ),
        rewards,
        group,
        {
            "reward": right.mean().item(),
            "valid": valid.mean().item(),
            "length": length.mean().item(),
            "entropy": (H.sum() / length.sum()).item(),
            "groups_used": int(mixed[first].sum()),
            "rounds": attempt + 1,
        },
    )


def spread(x: Tensor, mask: Tensor) -> Tensor:
    """[mask.sum()] to [B, T], 0 elsewhere: the opposite of x[mask], gradient included."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


def too_long(mask: Tensor, s: Settings) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13): 0 before the last
    `overlong` tokens, then up to 1.
    """
    if s.overlong is None:
        return torch.zeros(len(mask))
    return ((mask.sum(1) - (mask.shape[1] - s.overlong)) / s.overlong).clamp(0, 1)
