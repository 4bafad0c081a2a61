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
        # responses that may go on, and those that are over, with their probabilities
        begun, ended = {(): 1.0}, {}
        while begun:
            grown = one_token_more(policy, prompt, begun, top_p)
            begun = {}
            for said, w in grown.items():
                is_over = said[-1] == tasks.EOS or len(said) == task.response_length
                if is_over:
                    ended[said] = w
                else:
                    begun[said] = w
        assert sum(ended.values()) == pytest.approx(1)
        padded = []
        for said in ended:
            padding = [tasks.PAD] * (task.response_length - len(said))
            padded.append([*said, *padding])
        tokens = torch.tensor(padded)
        same_problem = problems[at : at + 1].repeat_interleave(len(tokens), 0)
        verdicts = task.verify(same_problem, tokens).reward.tolist()
        of_responses = zip(ended.values(), verdicts, strict=True)
        right += sum(w for w, verdict in of_responses if verdict)
    return right / len(problems)


def one_token_more(policy, prompt, begun, top_p):
    """Return the responses with each next token of the nucleus, and their
    probabilities.

    Args:
        policy: the model.
        prompt: token ids.
        begun: token ids of a response so far -> its probability; all of one length.
        top_p: of the nucleus.
    """
    ids = torch.tensor([[*prompt, *said] for said in begun])
    p = nucleus(policy(input_ids=ids).logits[:, -1].softmax(-1), top_p).double()
    p = p / p.sum(-1, keepdim=True)
    grown = {}
    for (said, w), row in zip(begun.items(), p, strict=True):
        for token in row.nonzero()[:, 0].tolist():
            grown[(*said, token)] = w * row[token].item()
    return grown


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
