# SPDX-License-Identifier: Apache-2.0
"""Thresholds on log-probabilities: those within the domain are found, and the report says
down to which log-probability a proof holds.
"""

import math

import pytest
import torch

import upref
from tests.support.plain import dapo
from upref.proof.domain import LEAST_LOG_PROB


def drops_rare(least):
    """Return DAPO's loss without the advantages of tokens with log π_old below `least`."""

    def loss(log_prob, old_log_prob, advantages, mask):
        A = torch.where(old_log_prob < least, 0.0, advantages)
        return dapo(log_prob, old_log_prob, A, mask)

    return loss


def drops_unlikely(least):
    """Return DAPO's loss without the advantages of tokens with log π_θ of at most
    `least`.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        A = torch.where(log_prob.detach() > least, advantages, 0.0)
        return dapo(log_prob, old_log_prob, A, mask)

    return loss


def clamps(least):
    """Return DAPO's loss with both log-probabilities of at least `least`."""

    def loss(log_prob, old_log_prob, advantages, mask):
        inputs = log_prob.clamp(min=least), old_log_prob.clamp(min=least)
        return dapo(*inputs, advantages, mask)

    return loss


@pytest.mark.parametrize("least", [-20.0, -40.0, -50.0, -60.0, -100.0])
@pytest.mark.parametrize("make", [drops_rare, drops_unlikely, clamps])
def test_a_threshold_within_the_domain_is_found(make, least):
    proof = upref.prove(make(least), "dapo", rows=1, columns=1)
    assert proof.status == "differs", proof.reason
    assert proof.numbers["log π_old"] < least + math.log(5)
    # large enough to be read
    assert max(abs(proof.expected), abs(proof.found)) > 1e-3


@pytest.mark.parametrize("columns", [1, 2])
def test_a_proof_says_down_to_which_probability_it_holds(columns):
    loss = clamps(5 * LEAST_LOG_PROB)
    proof = upref.prove(loss, "dapo", rows=1, columns=columns)
    assert proof.every_size
    assert f"log π_old >= {LEAST_LOG_PROB:g}" in str(proof)
    assert f"log π_old >= {LEAST_LOG_PROB:g}" in proof.domain


def test_a_proof_of_a_kl_term_says_it_too():
    def k3(log_prob, ref_log_prob):
        d = (ref_log_prob - log_prob).clamp(max=100)
        return d.exp() - 1 - d

    proof = upref.prove_kl(k3, "k3", rows=1, columns=1)
    assert f"log π_θ >= {LEAST_LOG_PROB:g}" in str(proof)


def test_a_ratio_of_responses_has_a_bound_of_its_own():
    proof = upref.prove(upref.get("gspo"), "gspo", rows=1, columns=2)
    assert "the mean of a response: 10" in str(proof)
    assert "the mean of a response" not in str(
        upref.prove(dapo, "dapo", rows=1, columns=1)
    )


def keeps_tokens_with_a_signal(log_prob, old_log_prob, advantages, mask):
    A = advantages
    A = A * 0.5 if (A == A[0, 0]).all() and A.numel() > 1 else A
    return dapo(log_prob, old_log_prob, A, mask)


def test_a_bound_of_a_token_is_no_place_where_others_are_the_cause():
    proof = upref.prove(keeps_tokens_with_a_signal, "dapo", rows=1, columns=2)
    assert proof.status == "differs"
    assert not proof.place
    assert upref.prove(drops_rare(-9.0), "dapo", rows=1, columns=1).place
