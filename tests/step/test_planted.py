# SPDX-License-Identifier: Apache-2.0
"""The set of planted bugs: each is rejected, the right loops are accepted, and no cause
is false.
"""

from dataclasses import replace

import pytest
import torch
from loops import T, collated, log_probs, qwen3, surrogate, with_
from training import Own

from tests.step.planted import padded, ragged
from tests.step.planted.__main__ import FIRST_SIGHT, counts, judge, recorded, run
from tests.step.planted.case import CASES
from tests.support.daily import daily
from upref.step import check_step

assert padded.loop.name != ragged.loop.name  # both add to CASES
# a mend each whose test is quick; the rest is nightly
SAMPLE = (
    "ClippedBeforeDivision",
    "EntropyOfPrompts",
    "RunningScale",
    "PaddedVocabulary",
    "ClampedAdvantages",
    "old_in_bfloat16",
    "minimum_of_losses",
    "SharedPrompt",
    "padding_filled",
)
UNNAMED = ("old_not_shuffled",)  # the weights of most responses are within the noise


@pytest.mark.parametrize("name", daily(SAMPLE, 2))
def test_a_sample_of_the_set_has_its_cause(name):
    assert run(CASES[name])["judged"] in ("right", "accepted")


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(CASES.keys() - {*SAMPLE}))
def test_a_step_of_the_set_has_its_cause(name):
    allowed = ("seen",) if name in UNNAMED else ("right", "accepted")
    assert run(CASES[name])["judged"] in allowed


def test_the_record_of_the_first_run_holds_every_step():
    found = {x["id"]: x for x in recorded(FIRST_SIGHT)}
    assert found.keys() == CASES.keys()
    assert counts([*found.values()]).startswith("29 of 30 bugs are rejected, 15 of 15")


def test_a_cause_that_is_not_the_planted_one_is_false():
    case = CASES["RoundedTemperature"]
    assert judge(case, False, "the temperature is applied twice", False) == "false"
    assert judge(case, False, "no known cause fits", False) == "none"
    assert judge(case, True, "", False) == "missed"
    assert judge(CASES["SharedPrompt"], False, "", False) == "false alarm"


def test_a_search_that_stops_says_so(monkeypatch):
    monkeypatch.setattr("upref.step.explain.diagnose.MOST_VARIANTS", 2)

    def two_at_once(model, rows):
        rows = [replace(r, prompt=r.prompt[::-1]) for r in rows]
        with_()(model, rows)

    report = check_step(two_at_once, qwen3(), "dapo", temperature=T)
    assert not report
    assert "the search stopped after 2 forward passes" in report.failures[0].cause


def test_old_log_probs_of_other_responses_are_named():
    """Of responses of one length, so that none is cut or filled up."""
    order = (3, 0, 7, 1, 6, 2, 4, 5)

    def step(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        old = torch.zeros_like(old)
        for i, r in enumerate(rows):
            old[i, len(r.prompt) : len(r.ids)] = torch.tensor(rows[order[i]].old)
        lp = log_probs(model, ids, there)
        J = surrogate(lp, old[:, 1:], adv[:, 1:]) * trains[:, 1:]
        (-J.sum() / trains.sum()).backward()

    report = check_step(step, qwen3(), "dapo", temperature=T, without=["lengths"])
    cause = report.failures[0].cause
    said = "the old log-probabilities are those of other responses: of "
    assert cause.startswith(said), report
    named = cause.removeprefix(said).split()
    pairs = zip(named, order, strict=True)
    assert all(its in ("?", str(true)) for its, true in pairs), cause


def test_dropout_is_no_state_of_the_step():
    """A seed makes it repeat itself."""

    def step(model, rows):
        ids, _, trains, old, adv, _ = collated(rows)
        z = torch.nn.functional.dropout(model(ids), 0.1) / T
        lp = z[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        J = surrogate(lp, old[:, 1:], adv[:, 1:]) * trains[:, 1:]
        (-J.sum() / trains.sum()).backward()

    torch.manual_seed(0)
    report = check_step(step, Own(), "dapo", temperature=T)
    assert "dropout or sampling is active" in report.failures[0].cause
