# SPDX-License-Identifier: Apache-2.0
"""Right losses whose clamp passes no gradient exactly at a bound, as torch's does from
2.14 on: min(r A, clip(r) A) has half of its gradient there.
"""

import math

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
    log_r = torch.where(mask, log_prob - old_log_prob, 0)
    s = (log_r.sum(1) / mask.sum(1)).exp()
    A = advantages[:, 0]
    clipped = StrictClamp.apply(s, 1 - eps_low, 1 + eps_high)
    return -torch.minimum(s * A, clipped * A).mean()


def dapo(log_prob, old_log_prob, advantages, mask):
    """Its bounds are e^±0.25, which the batches have too."""
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
