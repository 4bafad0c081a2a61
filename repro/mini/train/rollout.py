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
    """The responses of one step, B = prompts · responses rows, those of one prompt side
    by side.

    A state is a prompt with a beginning of its responses (policy/sample.py). Of the
    problems, `prompts` has each once.
    """

    prompts: dict[str, Tensor]
    tokens: Tensor  # [B, T]
    mask: Tensor  # [B, T]
    # [S, V] of the sampler in each state, at the temperature of the sampling
    log_probs: Tensor
    state: Tensor  # [B, T], row of log_probs of each token
    logp: Tensor  # [B, T], lp_old: of the sampler, or recomputed by the policy
    adv: Tensor  # [B]
    reward: Tensor  # [B], of which the advantages were made
    group: Tensor  # [B], the index of its prompt
    seen: dict[str, float]  # for steps.jsonl: over all that was sampled

    def prompts_of(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the prompts of these rows, each once, and the index of each row's
        prompt among them, [len(rows)].
        """
        which, of = self.group[rows].unique(return_inverse=True)
        return {name: x[which] for name, x in self.prompts.items()}, of


def rollout(
    policy: PreTrainedModel, task: Task, problems: Tensor, s: Settings, step: int
) -> Batch:
    """Sample responses, score them, and compute their advantages.

    With dynamic sampling, prompts are drawn in rounds until enough have responses of
    different rewards, or MOST_ROUNDS are over; then those come first.

    Args:
        policy: samples.
        task: of the problems.
        problems: all that are trained on, from which `prompts` are drawn each round.
        s: the settings.
        step: decides, with the seed, what is drawn.
    """
    # of each round: mixed, problems, tokens, mask, state, rewards, one row a prompt
    kept: list[tuple[Tensor, ...]] = []
    # of each round: reward, valid, length, sum of entropies, one number a response
    judged: list[tuple[Tensor, ...]] = []
    said: list[Tensor] = []  # log-probabilities in the states of each round
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
        entropies = entropy(said[-1])[state].where(mask, 0.0).sum(1)
        judged.append((verdict.reward, verdict.valid, mask.sum(1), entropies))
        rewards = verdict.reward - too_long(mask, s)
        by_prompt = rewards.view(s.prompts, -1)
        mixed = (by_prompt != by_prompt[:, :1]).any(1)  # rewards differ in the group
        state += sum(map(len, said[:-1]))  # rows in the states of all rounds
        of_responses = (
            x.view(s.prompts, s.responses, *x.shape[1:])
            for x in (tokens, mask, state, rewards)
        )
        kept.append((mixed, drawn, *of_responses))
        if sum(int(mixed.sum()) for mixed, *_ in kept) >= s.prompts:
            break
    mixed, drawn, *rest = (torch.cat(x) for x in zip(*kept, strict=True))
    first = torch.arange(s.prompts)
    if s.dynamic_sampling:  # the mixed groups, in the order in which they were drawn
        first = torch.argsort(~mixed, stable=True)[: s.prompts]
    tokens, mask, state, rewards = (x[first].flatten(0, 1) for x in rest)
    log_probs = torch.cat(said)
    group = torch.arange(s.prompts).repeat_interleave(s.responses)
    right, valid, length, H = (torch.cat(x).double() for x in zip(*judged, strict=True))
    estimator = advantages.get(s.advantages or s.target().adv)
    return Batch(
        prompts=models.inputs(task, drawn[first]),
        tokens=tokens,
        mask=mask,
        log_probs=log_probs,
        state=state,
        logp=log_probs[state, tokens].where(mask, 0.0),
        adv=estimator(rewards, faults.groups_of(s.fault, group, s.prompts)),
        reward=rewards,
        group=group,
        seen={
            "reward": right.mean().item(),
            "valid": valid.mean().item(),
            "length": length.mean().item(),
            "entropy": (H.sum() / length.sum()).item(),
            "groups_used": int(mixed[first].sum()),
            "rounds": attempt + 1,
        },
    )


def spread(x: Tensor, mask: Tensor) -> Tensor:
    """Return x, [mask.sum()], in the places of the mask, [B, T], with 0 elsewhere: the
    opposite of x[mask]. The gradient passes through.
    """
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


def too_long(mask: Tensor, s: Settings) -> Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), [B]: 0 until
    the last `overlong` tokens, then up to 1, linearly; 0 for all where it is not set.
    """
    if s.overlong is None:
        return torch.zeros(len(mask))
    return ((mask.sum(1) - (mask.shape[1] - s.overlong)) / s.overlong).clamp(0, 1)
