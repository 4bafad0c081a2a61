# SPDX-License-Identifier: Apache-2.0
"""What a training step hands over: a log_prob that a network has computed, old_log_prob
that nobody detached.
"""

import contextlib

import pytest
import torch

import upref
from tests.support.daily import daily

NETWORK = (
    "the gradient differs when log_prob is the output of a network, as in training"
)


def dapo(log_prob, old_log_prob, advantages, mask, factor=1.0):
    """Return DAPO's loss times a factor."""
    lp, old, A = (
        torch.where(mask, x, 0.0) for x in (log_prob, old_log_prob, advantages)
    )
    r = (lp - old).exp()
    return (
        -factor
        * torch.where(mask, torch.minimum(r * A, r.clamp(0.8, 1.28) * A), 0.0).sum()
        / mask.sum()
    )


def reads_grad(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss; half of its gradient where log_prob has a graph."""
    calm = log_prob.grad_fn is None
    return dapo(
        log_prob if calm else 0.5 * log_prob + 0.5 * log_prob.detach(),
        old_log_prob,
        advantages,
        mask,
    )


def writes(log_prob, old_log_prob, advantages, mask):
    with contextlib.suppress(RuntimeError):  # of a leaf
        log_prob.clamp_(min=-2)
    return dapo(log_prob, old_log_prob, advantages, mask)


def steps(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss without its graph, after its own backward pass: twice as large
    where log_prob has a graph.
    """
    loss = dapo(
        log_prob, old_log_prob, advantages, mask, 1.0 if log_prob.is_leaf else 2.0
    )
    loss.backward()
    return loss.detach()


WRONG = [
    lambda lp, old, A, m: dapo(lp, old, A, m, 1.0 if lp.is_leaf else 2.0),
    reads_grad,
    writes,
    steps,
]


@pytest.mark.parametrize("loss", daily(WRONG, 2))
def test_a_loss_that_is_wrong_on_the_output_of_a_network_alone(loss):
    report = upref.check(loss, "dapo")
    said = [f.regime for f in report.failures if f.oracle == "in-training"]
    assert len(said) == 1 and said[0].startswith(NETWORK), str(report)
    assert (
        upref.identify(loss).kind == "pitfall" and NETWORK in upref.identify(loss).why
    )


def test_a_loss_that_takes_no_output_of_a_network():
    def loss(log_prob, old_log_prob, advantages, mask):
        log_prob.requires_grad_(False).requires_grad_()  # of a leaf alone
        return dapo(log_prob, old_log_prob, advantages, mask)

    (found,) = upref.check(loss, "dapo").failures
    assert (
        found.regime == "it raises when log_prob is the output of a network"
        and "RuntimeError" in found.found
    )


@pytest.mark.parametrize("name", ["old_log_prob", "advantages"])
def test_what_wants_a_gradient_changes_no_other(name):
    def loss(log_prob, old_log_prob, advantages, mask):
        wants = {"old_log_prob": old_log_prob, "advantages": advantages}[
            name
        ].requires_grad
        return dapo(log_prob, old_log_prob, advantages, mask, 2.0 if wants else 1.0)

    (found,) = upref.check(loss, "dapo").failures
    assert found.oracle == "in-training" and found.regime.endswith(
        f"requires_grad set on {name} as well"
    )


def test_one_that_is_refused_hides_no_other():
    def loss(log_prob, old_log_prob, advantages, mask):
        """Return DAPO's loss, doubled where the advantages have a graph; fail where the
        old log-probabilities do.
        """
        assert not old_log_prob.requires_grad
        return dapo(
            log_prob,
            old_log_prob,
            advantages,
            mask,
            2.0 if advantages.requires_grad else 1.0,
        )

    assert not upref.check(loss, "dapo")


def refuses(log_prob, old_log_prob, advantages, mask):
    assert not old_log_prob.requires_grad and not advantages.requires_grad
    return dapo(log_prob, old_log_prob, advantages, mask)


def retains(log_prob, old_log_prob, advantages, mask):
    log_prob.retain_grad()
    return dapo(log_prob, old_log_prob, advantages, mask)


def right_step(log_prob, old_log_prob, advantages, mask):
    loss = dapo(log_prob, old_log_prob, advantages, mask)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("loss", [refuses, retains, right_step])
def test_what_is_right_in_training_is_right(loss):
    report = upref.check(loss, "dapo")
    assert report, str(report)


def test_a_loss_that_counts_calls_is_not_blamed_on_the_network():
    """The fifth of every seven calls: the three of the oracle of determinism are alike."""
    calls = [0]

    def loss(log_prob, old_log_prob, advantages, mask):
        calls[0] += 1
        return dapo(log_prob, old_log_prob, advantages, mask, 1.0 + (calls[0] % 7 == 0))

    for _ in range(7):
        report = upref.check(loss, "dapo")
        assert not report and not any(
            f.regime.startswith(NETWORK) for f in report.failures
        ), str(report)
