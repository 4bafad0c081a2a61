# SPDX-License-Identifier: Apache-2.0
"""check with a declared entropy bonus: -J - entropy_coef H."""

import pytest
import torch

import upref
from upref.cli import main

C = 0.01


def surrogate(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return torch.minimum(r * A, r.clamp(0.8, 1.28) * A)


def mean(x, mask):
    return torch.where(mask, x, 0).sum() / mask.sum()


def row_mean(x, mask):
    lengths = mask.sum(1).clamp(min=1)
    return (torch.where(mask, x, 0).sum(1) / lengths).sum() / mask.any(1).sum()


def right(log_prob, old_log_prob, advantages, mask, entropy, entropy_coef=0.0):
    J = surrogate(log_prob, old_log_prob, advantages, mask)
    return -mean(J, mask) - entropy_coef * mean(entropy, mask)


def other_name(log_prob, old_log_prob, advantages, mask, entropies, ent_coef=0.0):
    return right(log_prob, old_log_prob, advantages, mask, entropies, ent_coef)


def fixed(log_prob, old_log_prob, advantages, mask, entropy):
    return right(log_prob, old_log_prob, advantages, mask, entropy, C)


def unreduced(log_prob, old_log_prob, advantages, mask, entropy):
    J = surrogate(log_prob, old_log_prob, advantages, mask)
    return -J - C * torch.where(mask, entropy, 0)


def of_responses(log_prob, old_log_prob, advantages, mask, entropy):
    J = surrogate(log_prob, old_log_prob, advantages, mask)
    return -row_mean(J, mask) - C * row_mean(entropy, mask)


def sign(log_prob, old_log_prob, advantages, mask, entropy):
    return right(log_prob, old_log_prob, advantages, mask, entropy, -C)


def coefficient(log_prob, old_log_prob, advantages, mask, entropy):
    return right(log_prob, old_log_prob, advantages, mask, entropy, 0.001)


def detached(log_prob, old_log_prob, advantages, mask, entropy):
    return right(log_prob, old_log_prob, advantages, mask, entropy.detach(), C)


def missing(log_prob, old_log_prob, advantages, mask, entropy):
    return right(log_prob, old_log_prob, advantages, mask, entropy)


def over_slots(log_prob, old_log_prob, advantages, mask, entropy):
    return (
        missing(log_prob, old_log_prob, advantages, mask, entropy) - C * entropy.mean()
    )


def masked_added(log_prob, old_log_prob, advantages, mask, entropy):
    bonus = entropy.sum() / mask.sum()
    return missing(log_prob, old_log_prob, advantages, mask, entropy) - C * bonus


def other_mean(log_prob, old_log_prob, advantages, mask, entropy):
    J = surrogate(log_prob, old_log_prob, advantages, mask)
    return -mean(J, mask) - C * row_mean(entropy, mask)


def squared(log_prob, old_log_prob, advantages, mask, entropy):
    return right(log_prob, old_log_prob, advantages, mask, entropy**2, C)


RIGHT = [
    (right, "dapo"),
    (other_name, "dapo"),
    (fixed, "dapo"),
    (unreduced, "dapo"),
]
WRONG = [
    (
        sign,
        "the entropy is added to the loss, not subtracted: a penalty of 0.01 times it",
    ),
    (coefficient, "the coefficient of the entropy bonus is 0.001, not 0.01"),
    (detached, "the bonus is missing, or computed of a detached entropy"),
    (missing, "the bonus is missing, or computed of a detached entropy"),
    (over_slots, "the entropy bonus counts masked slots: it is the mean over all"),
    (masked_added, "the entropy bonus counts masked slots"),
    (other_mean, "the entropy bonus is aggregated by seq-mean-token-mean, not by "),
    (squared, ""),
]


@pytest.mark.parametrize("loss, objective", RIGHT)
def test_a_right_bonus_agrees(loss, objective):
    report = upref.check(loss, objective, entropy_coef=C)
    assert report, report
    assert report.hp["entropy_coef"] == C
    assert report.oracles["entropy-bonus"] == "ok"
    assert report.oracles["value"] == "ok", report
    assert "proved" not in str(report)


def test_the_bonus_is_averaged_as_the_objective_is():
    aggregated = {"agg": "seq-mean-token-mean", "entropy_coef": C}
    assert upref.check(of_responses, "dapo", **aggregated)
    assert not upref.check(other_mean, "dapo", **aggregated)


@pytest.mark.parametrize("loss, cause", WRONG)
def test_a_wrong_bonus_is_named(loss, cause):
    report = upref.check(loss, "dapo", entropy_coef=C)
    (failure,) = [f for f in report.failures if f.oracle == "entropy-bonus"]
    assert cause in failure.cause, report
    assert bool(failure.cause) == bool(cause)


def test_a_bonus_that_is_not_declared_fails_and_is_told_how():
    (failure,) = upref.check(fixed, "dapo").failures
    assert "declare it, --hp entropy_coef=0.01" in failure.cause
    (failure,) = upref.check(sign, "dapo").failures
    assert "declare" not in failure.cause


def test_a_loss_without_the_entropy_cannot_have_a_bonus():
    def policy(log_prob, old_log_prob, advantages, mask):
        return -mean(surrogate(log_prob, old_log_prob, advantages, mask), mask)

    with pytest.raises(upref.InputError, match="no argument for the entropy"):
        upref.check(policy, "dapo", entropy_coef=C)
    with pytest.raises(upref.InputError, match="finite number of 0 or more"):
        upref.check(right, "dapo", entropy_coef=-1)


def test_the_command_takes_it(capsys):
    command = ["check", f"{__file__}:coefficient", "--as", "dapo"]
    assert main([*command, "--hp", "entropy_coef=0.001"]) == 0
    assert "entropy_coef=0.001" in capsys.readouterr().out
    assert main([*command, "--hp", "entropy_coef=0.01"]) == 1
    assert "the coefficient of the entropy bonus is 0.001" in capsys.readouterr().out
