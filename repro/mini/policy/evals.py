# SPDX-License-Identifier: Apache-2.0
"""Avg@k, Maj@k, Best@k and Pass@1 of a policy on held-out problems."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from repro.mini.policy import models
from repro.mini.policy.sample import sample
from repro.mini.tasks import NO_ANSWER, Task
from upref import metrics

CHUNK = 32  # problems sampled at once


def tables(
    model: PreTrainedModel,
    task: Task,
    problems: Tensor,
    k: int,
    top_p: float,
    g: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Sample k responses to each problem at T = 1 and verify them.

    Returns:
        Whether each is right, bool [P, k], and what it answers, int [P, k], both on the
        CPU.
    """
    right, said = [], []
    for part in problems.to(torch.get_default_device()).split(CHUNK):
        samples = sample(
            model,
            models.inputs(task, part),
            k,
            task.response_length,
            g,
            top_p=top_p,
            keep=False,
            end=task.end,
        )
        verdict = task.verify(part.repeat_interleave(k, 0), samples.tokens)
        right.append(verdict.reward.bool().view(-1, k))
        said.append(verdict.answer.view(-1, k))
    return torch.cat(right).cpu(), torch.cat(said).cpu()


def scores(correct: Tensor, answers: Tensor) -> dict[str, float | int]:
    """Return the value of each estimate, as a share, with `n_problems` and `k`."""
    values = {name: e.value for name, e in estimates(correct, answers).items()}
    return values | {"n_problems": len(correct), "k": correct.shape[1]}


def bits(which: Tensor) -> str:
    """Return bool [P] as hexadecimal text, 8 problems a byte, the first
    problem first.
    """
    return np.packbits(which.numpy()).tobytes().hex()


def times(right: Tensor) -> str:
    """Return how many samples of each problem are right, a byte each, as hexadecimal
    text, the first problem first.

    Args:
        right: bool [P, k], k at most 255.
    """
    return bytes(right.sum(1).tolist()).hex()


def counts(right: Tensor) -> list[int]:
    """Return how many problems have 0, 1, ..., k right samples. Every Pass@k follows
    from it.

    Args:
        right: bool [P, k].
    """
    return right.sum(1).bincount(minlength=right.shape[1] + 1).tolist()


def estimates(
    correct: Tensor | np.ndarray, answers: Tensor | np.ndarray
) -> dict[str, metrics.Estimate]:
    """Return Avg@k, Maj@k, Best@k, Best@k by bootstrap and Pass@1, by the names of
    EVAL_METRICS (questions.py).

    Args:
        correct: bool [P, k].
        answers: [P, k], numbers or text, of which the most frequent of a problem counts
            for Maj@k; NO_ANSWER and None have no vote.
    """
    k = correct.shape[1]
    votes = [[None if a == NO_ANSWER else a for a in row] for row in answers.tolist()]
    return {
        "avg": metrics.avg_at_k(correct),
        "maj": metrics.maj_at_k(votes, correct),
        "best": metrics.best_at_k(correct, k),
        "best_bootstrap": metrics.best_at_k_bootstrap(correct, k),
        "pass1": metrics.pass_at_1(correct),
    }
