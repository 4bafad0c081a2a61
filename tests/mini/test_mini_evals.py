# SPDX-License-Identifier: Apache-2.0
"""Avg@k of a policy is its chance of a right answer, and the generator decides the rest."""

from math import sqrt

import pytest
import torch

from repro.mini import tasks
from repro.mini.policy import bases, evals
from repro.mini.policy.sample import nucleus


@torch.inference_mode()
def exact_avg(problems, top_p=0.7):
    """Return what Avg@k estimates, without drawing: every response that WALK's nucleus
    allows, by its probability.
    """
    task, policy = tasks.get("countdown"), bases.load("walk", "countdown")
    problems = task.problems("test", problems, 0)
    right = 0.0
    for at, prompt in enumerate(task.prompts(problems).tolist()):
        begun, ended = {(): 1.0}, {}
        while begun:
            p = (
                policy(input_ids=torch.tensor([[*prompt, *said] for said in begun]))
                .logits[:, -1]
                .softmax(-1)
            )
            p = nucleus(p, top_p).double()
            odds = zip(begun.items(), p / p.sum(-1, keepdim=True), strict=True)
            grown = {
                (*said, t): w * row[t].item()
                for (said, w), row in odds
                for t in row.nonzero()[:, 0].tolist()
            }

            def is_over(said):
                return said[-1] == tasks.EOS or len(said) == task.response_length

            ended |= {said: w for said, w in grown.items() if is_over(said)}
            begun = {said: w for said, w in grown.items() if not is_over(said)}
        assert sum(ended.values()) == pytest.approx(1)
        tokens = torch.tensor(
            [
                [*said, *[tasks.PAD] * (task.response_length - len(said))]
                for said in ended
            ]
        )
        verdicts = task.verify(
            problems[at : at + 1].repeat_interleave(len(tokens), 0), tokens
        ).reward.tolist()
        right += sum(
            w for w, verdict in zip(ended.values(), verdicts, strict=True) if verdict
        )
    return right / len(problems)


def scores(problems, k, seed=0):
    """Return what the evaluation of WALK prints, at top-p 0.7."""
    task, policy = tasks.get("countdown"), bases.load("walk", "countdown")
    g = tasks.generator("evaluate", seed)
    asked = task.problems("test", problems, 0)
    return evals.scores(*evals.tables(policy, task, asked, k, 0.7, g))


def test_avg_is_the_chance_of_a_right_answer():
    p = exact_avg(16)
    assert abs(scores(16, 512)["avg"] - p) < 4 * sqrt(p * (1 - p) / (16 * 512))


def test_the_seed_decides():
    first = scores(8, 4)
    assert scores(8, 4) == first
    assert scores(8, 4, seed=1) != first
    assert 0 < first["avg"] < first["best"] and first["k"] == 4
