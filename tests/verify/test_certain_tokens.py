# SPDX-License-Identifier: Apache-2.0
"""Tokens of probability 1, equal tokens that have no order, and 16 bits that round."""

import math

import pytest
import torch

import upref

QUICK = ("unusual-inputs", "one-response", "every-value")  # oracles left out


@pytest.mark.parametrize("name", ["reinforce", "ppo_clip"])
def test_another_weight_at_log_probability_0_is_a_note(name):
    """Leave tokens of log-probability 0 out of a loss, and find it right with a note."""

    def loss(log_prob, old_log_prob, advantages, mask):
        is_token = mask & (log_prob != 0)
        A = torch.where(is_token, advantages, 0)
        if name == "reinforce":
            return -(A * torch.where(is_token, log_prob, 0)).sum() / len(mask)
        r = torch.where(is_token, log_prob - old_log_prob, 0).exp()
        return -torch.minimum(r * A, r.clamp(0.8, 1.2) * A).sum() / mask.sum()

    report = upref.check(loss, name, skip=QUICK)
    assert report, report.text()
    text = report.text(verbose=True)
    assert "log π = 0" in text and "no logit has a gradient" in text


@pytest.mark.parametrize(
    "guard",
    [lambda x: x.clamp(max=0), lambda x: torch.minimum(x, torch.zeros(()))],
    ids=["clamp", "minimum"],
)
def test_a_guard_at_0_is_no_failure(guard):
    def loss(log_prob, advantages, mask):
        A = torch.where(mask, advantages, 0)
        return -(A * torch.where(mask, guard(log_prob), 0)).sum() / len(mask)

    report = upref.check(loss, "reinforce", skip=QUICK)
    assert report, report.text()


def test_nan_at_log_probability_0_is_a_failure():
    def loss(log_prob, advantages, mask):
        x = torch.where(mask, log_prob, -1.0)
        odds = x - torch.log(-torch.expm1(x))
        own = -torch.nn.functional.softplus(-odds)  # log π again, by its odds
        return -torch.where(mask, advantages * own, 0).sum() / len(mask)

    report = upref.check(loss, "reinforce", skip=QUICK)
    assert [f.oracle for f in report.failures] == ["extremes"], report.text()
    assert "log π = 0" in report.text()


def with_divergence(derivative):
    """Return DPPO-KL's loss by a product with a mask. derivative: the divergence has a
    gradient, which is 0 times infinity where π_θ is 1.
    """

    def loss(log_prob, old_log_prob, advantages, mask, delta=0.05):
        """Return the loss of r · A over the tokens that move towards the old policy or
        have a KL divergence below delta.
        """
        lp, old = (torch.where(mask, x, -1.0) for x in (log_prob, old_log_prob))
        A = torch.where(mask, advantages, 0)
        p = (lp if derivative else lp.detach()).exp()
        q = old.exp()
        rest = torch.where(q < 1, (1 - q) * ((1 - q) / (1 - p)).log(), 0)
        kl = q * (q / p).log() + rest
        is_away = torch.where(A > 0, lp > old, lp < old)
        kept = torch.where(is_away, (delta - kl).sign().clamp(min=0), 1)
        return -((lp - old).exp() * A * kept).sum(1).mean()

    return loss


def test_a_divergence_that_is_nan_in_the_backward_at_log_probability_0_fails():
    report = upref.check(with_divergence(True), "dppo_kl", skip=QUICK)
    assert [f.oracle for f in report.failures] == ["extremes"], report.text()
    assert "log π = 0" in report.text()


def test_a_guard_decides_what_a_divergence_is_at_log_probability_0():
    report = upref.check(with_divergence(False), "dppo_kl", skip=QUICK)
    assert report, report.text()
    assert "log π = 0" not in report.text()


def gppo_by_logarithms(log_prob, old_log_prob, advantages, mask):
    """Return GPPO's loss with the clip as a detached shift of log r."""
    log_r = torch.where(mask, log_prob - old_log_prob, 0)
    A = torch.where(mask, advantages, 0)
    above = (math.log(1.28) - log_r.detach()).clamp(max=0)
    below = (math.log(0.8) - log_r.detach()).clamp(min=0)
    shift = torch.where(A > 0, above, below)
    return -(A * shift.exp() * log_r.exp()).sum() / mask.sum()


def test_a_log_ratio_rounded_to_bfloat16_loses_no_weight():
    """At log r = 80, the numbers of bfloat16 are 0.5 apart."""
    report = upref.check(gppo_by_logarithms, "gppo", skip=QUICK)
    assert report, report.text()


@pytest.mark.parametrize("axis", ["first step", "256 columns"])
def test_no_two_tokens_that_an_objective_orders_are_equal(axis):
    b = upref.weights.stress.stress_batch(axis, upref.get("clip_cov"))
    A = b.adv.expand_as(b.mask)[b.mask]
    tokens = torch.stack([A, b.logp[b.mask]])[:, A != 0]
    assert len(tokens.unique(dim=1).T) == len(tokens.T)
