# SPDX-License-Identifier: Apache-2.0
"""Right losses whose clamp passes no gradient exactly at a bound, as torch's does from
2.14 on: min(r A, clip(r) A) has half of its gradient there.
"""

import math

import pytest
import torch

import upref


class StrictClamp(torch.autograd.Function):
    """torch.clamp of 2.14, under any version of torch."""

    @staticmethod
    def forward(context, x, low, high):
        context.save_for_backward((x > low) & (x < high))
        return x.clamp(low, high)

    @staticmethod
    def backward(context, upstream):
        (inside,) = context.saved_tensors
        return upstream * inside, None, None


def gspo(log_prob, old_log_prob, advantages, mask, eps_low=3e-4, eps_high=4e-4):
    """Return GSPO's loss with a clamp that has no gradient on a bound."""
    log_r = torch.where(mask, log_prob - old_log_prob, 0)
    s = (log_r.sum(1) / mask.sum(1)).exp()
    A = advantages[:, 0]
    clipped = StrictClamp.apply(s, 1 - eps_low, 1 + eps_high)
    return -torch.minimum(s * A, clipped * A).mean()


def dapo(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss with bounds of e^±0.25, which the batches have too, and a
    clamp that has no gradient on them.
    """
    log_r = torch.where(mask, log_prob - old_log_prob, 0)
    A = torch.where(mask, advantages, 0)
    clipped = StrictClamp.apply(log_r, -0.25, 0.25).exp()
    return -torch.minimum(log_r.exp() * A, clipped * A).sum() / mask.sum()


def test_a_bound_that_half_precision_rounds_to_the_ratio_is_no_failure():
    """In bfloat16 1.0004 is 1."""
    report = upref.check(gspo, "gspo")
    assert report, report.text()


def test_half_a_gradient_on_a_bound_hides_no_objective():
    found = upref.identify(dapo)
    assert found, found.text()
    [match] = found.matches
    assert match.name == "dapo"
    assert math.isclose(match.hp["eps_low"], 1 - math.exp(-0.25), rel_tol=1e-4)
    assert math.isclose(match.hp["eps_high"], math.exp(0.25) - 1, rel_tol=1e-4)


def test_the_references_keep_the_gradient_on_a_bound():
    r = torch.tensor([0.8, 1.28], dtype=torch.float64, requires_grad=True)
    upref.ops.clip(r, 0.8, 1.28).sum().backward()
    assert r.grad.tolist() == [1, 1]


def ppo(log_prob, old_log_prob, advantages, mask, eps=0.2):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    clipped = StrictClamp.apply(r, 1 - eps, 1 + eps)
    return -torch.minimum(r * A, clipped * A).sum() / mask.sum()


def ppo_of_tensors(log_prob, old_log_prob, advantages, mask, eps=0.2):
    """Return PPO's loss with half of the clamp's gradient on a bound, as torch 2.14 has
    it for a bound that is a tensor.
    """
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    strict = StrictClamp.apply(r, 1 - eps, 1 + eps)
    clipped = (strict + r.clamp(1 - eps, 1 + eps)) / 2
    return -torch.minimum(r * A, clipped * A).sum() / mask.sum()


@pytest.mark.parametrize("loss", [ppo, ppo_of_tensors])
@pytest.mark.parametrize("eps", [0.1, 0.2, 0.6, 0.9])
def test_a_bound_on_a_ratio_of_any_batch_is_no_failure(loss, eps):
    """1.1 and 0.4 are the ratios of the batches of one token: bounds at 0.1 and 0.6."""
    report = upref.check(loss, "ppo_clip", eps=eps)
    assert report, report.text()


def strictly_inside(log_prob, old_log_prob, advantages, mask, eps=0.2):
    """Return PPO's loss as cases, with < for <=: on a bound a token has all of its
    gradient or none.
    """
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    trains = torch.where(A > 0, r < 1 + eps, r > 1 - eps)
    J = torch.where(trains, r * A, torch.where(A > 0, 1 + eps, 1 - eps) * A)
    return -J.sum() / mask.sum()


def test_ties_change_no_line_that_is_printed_by_default():
    """One assumption says of all bounds what decides there, under any torch."""
    strict, inside = (
        upref.check(loss, "ppo_clip", eps=0.1) for loss in (ppo, strictly_inside)
    )
    assert strict.text().splitlines()[1:] == inside.text().splitlines()[1:]
    assert not [note for note in strict.notes if note.oracle == "gradient"]
    for report in (strict, inside):
        said = [line for line in report.assumptions if "exactly on a bound" in line]
        assert len(said) == 1, report.assumptions


def test_a_number_on_a_bound_that_no_rule_gives_is_noted():
    def loss(log_prob, old_log_prob, advantages, mask):
        """Return PPO's loss with three times the gradient on the upper bound."""
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        A = torch.where(mask, advantages, 0)
        J = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
        on_bound = (r.detach() / 1.2 - 1).abs() < 1e-12
        return -torch.where(on_bound, 3 * r * A, J).sum() / mask.sum()

    report = upref.check(loss, "ppo_clip", skip=["value"])
    said = [f for f in report.findings if "exactly on a bound" in f.regime]
    assert said and all("not between" in f.regime for f in said), report.text()
