# SPDX-License-Identifier: Apache-2.0
"""Losses that answer with a Tensor subclass, and losses that are wrong on one response
only.
"""

import pytest
import torch

import upref
from tests.support.daily import daily


class Agrees(torch.Tensor):
    """Whatever it is compared with."""

    def abs(self):
        return self * 0

    def __gt__(self, other):
        return torch.zeros(self.shape, dtype=torch.bool)


def test_an_answer_with_its_own_comparisons():
    def loss(log_prob, old_log_prob, advantages, mask):
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        return (-torch.where(mask, r * advantages, 0).sum() / mask.sum()).as_subclass(
            Agrees
        )

    assert not upref.check(loss, "dapo")


# ---- a batch of one response ---------------------------------------------------------
def dapo(log_prob, old_log_prob, advantages, mask, low=0.2):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    x = torch.min(r * advantages, r.clamp(1 - low, 1.28) * advantages)
    return -torch.where(mask, x, 0).sum() / mask.sum()


WHEN = {
    "one response": lambda A, mask: len(mask) == 1,
    "all advantages positive": lambda A, mask: bool((A[mask] > 0).all()),
    "all advantages negative": lambda A, mask: bool((A[mask] < 0).all()),
}


@pytest.mark.parametrize("when", daily(WHEN, 2))
def test_a_loss_that_is_wrong_on_one_response_is_rejected(when):
    def loss(log_prob, old_log_prob, advantages, mask):
        bad = WHEN[when](advantages.expand_as(mask), mask)
        return dapo(log_prob, old_log_prob, advantages, mask) * (0.9 if bad else 1)

    assert not upref.check(loss, "dapo")
    assert upref.check(dapo, "dapo")


def test_a_loss_that_needs_several_responses_is_judged_on_them():
    def loss(log_prob, old_log_prob, advantages, mask):
        assert len(mask) > 1, "one response is no batch"
        return dapo(log_prob, old_log_prob, advantages, mask)

    report = upref.check(loss, "dapo")
    assert not [
        f
        for f in report.failures
        if "one response" in f.regime or "one token" in f.regime
    ], str(report)
    assert any(
        "is refused" in f.regime and "no batch" in str(f.found) for f in report.notes
    ), str(report)
    assert "batches of one token" in upref.check(dapo, "dapo").text(verbose=True)
