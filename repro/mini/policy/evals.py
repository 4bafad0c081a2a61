# SPDX-License-Identifier: Apache-2.0
"""Avg@k, Maj@k, Best@k and Pass@1 of a policy on held-out problems."""

import numpy as np
import torch

from repro.mini.policy import models
from repro.mini.policy.sample import sample
from repro.mini.tasks import NO_ANSWER, Task
from upref import metrics

CHUNK = 32  # problems sampled at once


def tables(model, task: Task, problems, k: int, top_p: float, g: torch.Generator):
    """Of k samples a problem at T = 1: whether right, bool [P, k], and what they
    answer, int [P, k].
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


def scores(correct, answers) -> dict[str, float | int]:
    values = {name: e.value for name, e in estimates(correct, answers).items()}
    return values | {"n_problems": len(correct), "k": correct.shape[1]}


def bits(which) -> str:
    """Of bool [P], hexadecimal, the first problem first."""
    return np.packbits(which.numpy()).tobytes().hex()


def times(right) -> str:
    """Of bool [P, k], k at most 255: how many samples of each problem are right, a byte
    each, hexadecimal, the first problem first.
    """
    return bytes(right.sum(1).tolist()).hex()


def counts(right) -> list[int]:
    """Of bool [P, k]: how many problems have 0, 1, ..., k right samples. Every Pass@k
    follows from it.
    """
    return right.sum(1).bincount(minlength=right.shape[1] + 1).tolist()


def estimates(correct, answers) -> dict[str, metrics.Estimate]:
    """Of a bool table [P, k] and answers [P, k], as what votes: a number or a word,
    NO_ANSWER and None do not.
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
