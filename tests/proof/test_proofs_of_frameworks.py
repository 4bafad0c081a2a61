# SPDX-License-Identifier: Apache-2.0
"""A framework's losses are proved to be what its audit promises, or what it records."""

import torch

from upref.verify.faults.losses import GROUPS, with_hp
from upref_frameworks.audits.framework import Comparison, Framework
from upref_frameworks.audits.proofs import (
    DIFFERS,
    OPEN,
    PROVED,
    WITH_FAULTS,
    prove_comparison,
)


def loss(mode, config, log_prob, old_log_prob, advantages, mask):
    """Return a framework's PPO loss; in the mode "numpy" a factor of 1 goes through
    numpy.
    """
    r = torch.exp(log_prob - old_log_prob)
    if mode == "numpy":
        r = r * torch.from_numpy(advantages.numpy()).abs().sign()
    clipped = r.clamp(1 - config["low"], 1 + config["high"])
    return -(torch.min(r * advantages, clipped * advantages) * mask).sum() / mask.sum()


MINE = Framework(
    "mine",
    modes=lambda: ["clip", "numpy"],
    comparisons=(),
    loss_by_names=loss,
    defaults=lambda mode: {"low": 0.2, "high": 0.2},
)


def row(mode, fields, promise, faults=()):
    return prove_comparison(
        MINE, Comparison("paper", mode, fields, promise, {}, faults)
    )


def test_a_loss_that_is_its_promise_is_proved():
    found = row("clip", {}, "ppo_clip")
    assert (found.status, found.faults, found.at) == (PROVED, (), "")


def test_a_recorded_difference_is_proved_to_be_all():
    found = row("clip", {"high": 0.28}, "ppo_clip", (with_hp(eps=0.28),))
    assert found.status == DIFFERS and found.at  # the lower bound is another one too
    found = row("clip", {"high": 0.28}, "dapo", (GROUPS,))
    assert found.status == WITH_FAULTS and found.at
    assert found.faults == (GROUPS.words,)


def test_a_difference_without_a_record_is_no_proof_of_anything():
    found = row("clip", {"high": 0.3}, "ppo_clip")
    assert found.status == DIFFERS and "r = " in found.at


def test_a_value_that_leaves_torch_is_no_proof():
    found = row("numpy", {}, "ppo_clip")
    assert found.status == OPEN and "numpy" in found.reason
