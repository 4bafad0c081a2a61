# SPDX-License-Identifier: Apache-2.0
"""identify_step: the name of a loop's objective, and where no name is true, none."""

import pytest
import torch
from loops import T, collated, log_probs, policy_step, qwen3, surrogate, with_

import upref


def identified(step, **how):
    return upref.identify_step(step, qwen3(), temperature=T, **how)


def of_terms(terms, over="tokens", times=1.0, trained=lambda trains: trains):
    """Return a step with these terms [B, S - 1] of (lp, old, A), averaged over tokens
    or responses, times a constant.

    trained: of the mask of trained tokens, those that count.
    """

    def step(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        J = terms(log_probs(model, ids, there), old[:, 1:], adv[:, 1:])
        m = trained(trains[:, 1:])
        mean = (J * m).sum() / m.sum()
        if over == "responses":
            mean = ((J * m).sum(1) / m.sum(1)).mean()
        (-times * mean).backward()

    return step


def test_dapo_has_its_name():
    found = identified(with_())
    assert found.matches[0].name == "dapo" and not found.matches[0].hp, found
    assert "check_step(step, model, 'dapo', temperature=0.7)" in str(found)


def test_an_aggregation_bounds_and_a_factor_are_found():
    def narrow(lp, old, A):
        return surrogate(lp, old, A, 0.1, 0.1)

    found = identified(of_terms(narrow, "responses", times=2.0))
    first = found.matches[0]
    assert (first.name, first.hp, first.scale) == ("grpo", {"eps": 0.1}, 2.0), found


def test_a_factor_that_is_no_short_number_is_found():
    found = identified(of_terms(surrogate, times=8 / 9))
    assert "dapo (times 0.888889)" in str(found), found


@pytest.mark.nightly
def test_a_number_that_no_row_reaches_is_said():
    """Where no bound stops the ratio from below, any from 1 on is as true."""

    def not_clipped(lp, old, A):
        return (lp - old).exp() * A

    found = identified(of_terms(not_clipped))
    assert "may be others: eps_low = 3 (1.5 and 300 agree too)" in str(found), found


def test_a_lost_token_is_no_bound_of_the_ratio():
    """Tokens of larger ratios train."""

    def without_last(trains):
        return trains * torch.nn.functional.pad(trains, (0, 1))[:, 1:]

    found = identified(of_terms(surrogate, trained=without_last))
    assert not found and "none above" not in found.why, found


@pytest.mark.nightly
def test_an_objective_with_a_small_term_beside_it_is_not_it():
    def with_bonus(lp, old, A):
        return surrogate(lp, old, A) + 1e-4 * lp

    found = identified(of_terms(with_bonus))
    assert not found and "dapo has nearly its weights" in found.why, found


def test_a_loop_on_policy_is_dapo_without_ratio():
    found = identified(of_terms(lambda lp, old, A: lp * A), without=["ratio"])
    assert str(found.matches[0]) == "dapo (without ratio)", found


@pytest.mark.nightly
def test_an_unusual_bound_is_bracketed():
    found = identified(with_(high=0.25))
    assert not found and "A > 0: none above r between" in found.why, found


def test_a_wrong_forward_pass_has_no_name():
    def cold(model, rows):
        policy_step(model, rows, temperature=1.0)

    found = identified(cold)
    assert not found and "no weights of the response tokens" in found.why, found
    assert torch.is_grad_enabled()
