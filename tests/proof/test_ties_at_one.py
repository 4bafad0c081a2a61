# SPDX-License-Identifier: Apache-2.0
"""A bound that every token of probability 1 meets: a proof leaves these tokens out, and
says so.
"""

import pytest
import torch

import upref


def bounds(log_prob, old_log_prob):
    """Return the ratio, and BandPO's bounds of total variation: 1/π_old is the most
    that a ratio can be.
    """
    old = old_log_prob.exp()
    r = (log_prob - old_log_prob).exp()
    low = torch.relu(1 - 0.05 / old)
    return r, low, torch.minimum(1 + 0.05 / old, 1 / old)


def mean(x, mask):
    return torch.where(mask, x, 0.0).sum(1).div(mask.sum(1)).mean()


def by_minimum(log_prob, old_log_prob, advantages, mask):
    r, low, high = bounds(log_prob, old_log_prob)
    kept = torch.where(advantages > 0, torch.minimum(r, high), torch.maximum(r, low))
    return -mean(kept * advantages, mask)


def without_certain_tokens(log_prob, old_log_prob, advantages, mask):
    r, low, high = bounds(log_prob, old_log_prob)
    kept = torch.where(advantages > 0, torch.minimum(r, high), torch.maximum(r, low))
    return -mean(torch.where(log_prob == 0, 0.0, kept * advantages), mask)


def halved(log_prob, old_log_prob, advantages, mask):
    return by_minimum(log_prob, old_log_prob, advantages, mask) / 2


def by_least(log_prob, old_log_prob, advantages, mask):
    r, low, high = bounds(log_prob, old_log_prob)
    least = torch.stack([r, high]).amin(dim=0)
    kept = torch.where(advantages > 0, least, r.max(low))
    return -mean(kept * advantages, mask)


def halved_at_one(log_prob, old_log_prob, advantages, mask):
    w = torch.where(old_log_prob == 0, 0.5, 1.0)
    r = (log_prob - old_log_prob).exp()
    kept = torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages)
    return -(kept * w * mask).sum() / mask.sum()


def prove(loss):
    return upref.prove(loss, "bandpo_tv", rows=1, columns=1, delta=0.05)


@pytest.mark.parametrize("loss", [by_minimum, by_least])
def test_a_minimum_that_ties_at_a_probability_of_1_is_proved_beside_it(loss):
    proof = prove(loss)
    assert proof.status == "proved", proof
    assert "tokens to which a policy gives the probability 1 are left out" in str(proof)


def test_another_weight_at_a_probability_of_1_is_no_tie():
    proof = prove(without_certain_tokens)
    assert proof.status != "proved", proof


def test_half_a_loss_is_no_tie():
    assert prove(halved).status == "differs"


def test_a_weight_that_is_halved_at_a_probability_of_1_is_no_tie():
    proof = upref.prove(halved_at_one, "dapo", rows=1, columns=1)
    assert proof.status == "differs", proof


@pytest.mark.nightly
def test_a_proof_without_ties_says_nothing_of_them():
    def dapo(log_prob, old_log_prob, advantages, mask):
        r = (log_prob - old_log_prob).exp()
        least = torch.minimum(r * advantages, r.clamp(0.8, 1.28) * advantages)
        return -torch.where(mask, least, 0.0).sum() / mask.sum()

    proof = upref.prove(dapo, "dapo", agg="token-mean")
    assert proof.status == "proved" and "left out" not in str(proof)
