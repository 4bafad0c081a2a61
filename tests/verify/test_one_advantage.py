# SPDX-License-Identifier: Apache-2.0
"""Losses that are right where all tokens of a response share one advantage, as in the
formula, and that give tokens of different advantages other weights.
"""

import pytest
import torch

import upref
from tests.support.daily import daily


def group_average(log_prob, old_log_prob, advantages, mask, eps=0.2):
    """Return GRPO's loss with the mean of a response's advantages for each of its
    tokens.
    """
    A = (torch.where(mask, advantages, 0).sum(1) / mask.sum(1))[:, None]
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    J = torch.minimum(r * A, r.clamp(1 - eps, 1 + eps) * A)
    return -(torch.where(mask, J, 0).sum(1) / mask.sum(1)).mean()


def winners_by_rows(log_prob, old_log_prob, advantages, mask):
    """Return WAPO's loss of the responses whose first token has A > 0."""
    first = mask.int().argmax(1, keepdim=True)
    wins = advantages.gather(1, first)[:, 0] > 0
    lp, old, A, m = (x[wins] for x in (log_prob, old_log_prob, advantages, mask))
    r = torch.where(m, lp - old, 0).exp()
    return -torch.where(m, r.clamp(max=10.0) * A, 0).sum() / len(mask)


def masked_by_rows(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss with off-policy sequence masking of the responses whose first
    token has A < 0.
    """
    first = mask.int().argmax(1, keepdim=True)
    bad = advantages.gather(1, first)[:, 0] < 0
    log_r = torch.where(mask, log_prob - old_log_prob, 0)
    drifted = -log_r.detach().sum(1) / mask.sum(1) > 0.5
    kept = mask & ~(bad & drifted)[:, None]
    r = log_r.exp()
    A = torch.where(mask, advantages, 0)
    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
    return -torch.where(kept, J, 0).sum() / mask.sum()


RIGHT = {
    "grpo": (group_average, {}),
    "wapo": (winners_by_rows, {}),
    "opsm(dapo)": (masked_by_rows, {"opsm_delta": 0.5}),
}


@pytest.mark.parametrize("name", daily(RIGHT, 3))
def test_a_loss_of_one_advantage_per_response_agrees_and_is_told(name):
    loss, hp = RIGHT[name]
    report = upref.check(loss, name, **hp)
    assert report, report.text()
    [said] = [f for f in report.notes if "differ within a response" in f.regime]
    assert "right if A is one number per response" in said.regime
    assert "advantages[:, :1]" in said.regime

    def given_columns(log_prob, old_log_prob, advantages, mask):
        return loss(log_prob, old_log_prob, advantages[:, :1].expand(mask.shape), mask)

    assert upref.check(given_columns, name, **hp)


def test_an_objective_with_advantages_of_tokens_rejects_it():
    """PPO's advantages come from a critic and differ from token to token."""

    def loss(log_prob, old_log_prob, advantages, mask):
        A = (torch.where(mask, advantages, 0).sum(1) / mask.sum(1))[:, None]
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        J = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
        return -torch.where(mask, J, 0).sum() / mask.sum()

    assert not upref.check(loss, "ppo_clip")


def no_minimum(log_prob, old_log_prob, advantages, mask):
    A = (torch.where(mask, advantages, 0).sum(1) / mask.sum(1))[:, None]
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    J = r.clamp(0.8, 1.2) * A
    return -(torch.where(mask, J, 0).sum(1) / mask.sum(1)).mean()


def one_token_late(log_prob, old_log_prob, advantages, mask):
    A = torch.where(mask, advantages, 0).roll(1, 1)
    return group_average(log_prob, old_log_prob, A, mask)


def second_column(log_prob, old_log_prob, advantages, mask):
    A = advantages.roll(-1, 1)[:, :1].expand(mask.shape)
    return group_average(log_prob, old_log_prob, A, mask)


@pytest.mark.parametrize("loss", [no_minimum, one_token_late, second_column])
def test_what_is_wrong_for_one_advantage_too_is_rejected(loss):
    assert not upref.check(loss, "grpo")
