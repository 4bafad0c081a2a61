# SPDX-License-Identifier: Apache-2.0
"""Ids of faults: one mistake has one, in whatever function it is made, and programs
decide by it.
"""

import re
from collections import defaultdict

import pytest
import torch

import upref
from docs.faults import faults
from upref.step.inputs.families import tiny
from upref.verify.faults.measured import OBSERVATIONS
from upref_course.grader import exercises
from upref_course.verdict import judge_function

PART = re.compile(r"(?<!\w)-?\d+(\.\d+)?(e[-+]?\d+)?")


@pytest.fixture(scope="module")
def known():
    pytest.importorskip("transformers")
    return [*faults()]


def test_every_fault_has_an_id_and_every_id_is_a_word(known):
    for kind, name, cause in known:
        assert cause.ids or not cause.words, (kind, name, cause.words)
        for id in cause.ids:
            assert re.fullmatch(r"[a-z0-9_()-]+", id), (kind, name, id)


def test_one_sentence_has_one_id(known):
    """Two records that say the same are one fault, but for what is only observed."""
    ids = defaultdict(set)
    for kind, _, cause in known:
        if cause.ids and cause.ids[0] in OBSERVATIONS:
            continue
        if kind != "course":  # a lesson's words are for its one function
            ids[PART.sub("#", cause.words)].add(cause.ids)
    assert not {words: found for words, found in ids.items() if len(found) > 1}


def test_a_loss_a_lesson_and_json_name_a_missing_minimum_by_one_id():
    def clipped(lp, lp_old, A):
        return -((lp - lp_old).exp().clamp(0.8, 1.28) * A).mean()

    def loss(log_prob, old_log_prob, advantages, mask):
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        A = torch.where(mask, advantages, 0)
        return -(r.clamp(0.8, 1.28) * A).sum() / mask.sum()

    report = upref.check(loss, "dapo")
    (lesson,) = [e for e in exercises() if e.slug == "clipping"]
    assert report.failures[0].fault_ids == ("minimum-missing",)
    assert '"minimum-missing"' in report.json()
    assert judge_function(lesson, clipped).fault_ids == ("minimum-missing",)


def test_a_step_a_function_and_a_lesson_name_a_forgotten_temperature_by_one_id():
    """All three have the id temperature-missing."""
    pytest.importorskip("transformers")

    def step(model, rows):
        """Compute DAPO's gradient with logits at temperature 1, one row at a time."""
        total = 0
        for row in rows:
            ids = torch.tensor([row.prompt + row.response])
            n = len(row.response)
            logits = model(ids).logits[0, -n - 1 : -1].double()
            lp = logits.log_softmax(-1).gather(-1, ids[0, -n:, None])[:, 0]
            r = (lp - torch.tensor(row.old).double()).exp()
            A = torch.as_tensor(row.adv).double()
            J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
            total = total + (J * torch.tensor(row.trains)).sum()
        (-total / sum(sum(row.trains) for row in rows)).backward()

    def log_probs(logits, labels, temperature):
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    of_step = upref.check_step(step, tiny("qwen3"), "dapo", temperature=0.7)
    of_function = upref.check_logprobs(log_probs)
    lessons = {i for e in exercises() for f in e.faults for i in f.cause.ids}
    assert of_step.failures[0].fault_ids == ("temperature-missing",)
    assert of_function.failures[0].fault_ids == ("temperature-missing",)
    assert "temperature-missing" in lessons
