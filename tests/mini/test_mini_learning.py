# SPDX-License-Identifier: Apache-2.0
"""A tiny transformer learns within seconds; and it would not if a sign, the advantages
or the mask were wrong.

Each mutation below is a bug that trainers have had. The test of the tests: with it,
`learns` must be false.
"""

from dataclasses import replace

import pytest
import torch

import upref
from repro.mini.policy import models
from repro.mini.train import loop
from repro.mini.train.checkpoint import Run
from repro.mini.train.measure import Tally
from repro.mini.train.rollout import rollout
from repro.mini.train.settings import Settings

STEPS = 12
FAST = Settings(
    steps=STEPS,
    prompts=32,
    responses=16,
    minibatches=4,
    lr=1e-3,
    warmup=1,
    train_problems=64,
)


def learns(s, spoil=lambda batch: None, run=None):
    """Return whether the reward on 64 problems rises by half within twelve steps, and
    the gradient of a step's first minibatch (on-policy: nothing is clipped) reaches the
    logits of each token of a response with an advantage, and no others.
    """
    models.deterministic()
    run = run or Run(s)
    problems = run.task.problems("train", s.train_problems, 0)
    rewards = []
    for step in range(s.steps):
        run.step = step
        batch = rollout(run.policy, run.task, problems, s, step)
        rewards.append(batch.seen["reward"])
        sampled = batch.mask & (batch.adv != 0)[:, None]
        spoil(batch)
        first, *others = torch.arange(len(batch.tokens)).chunk(s.minibatches)
        if not torch.equal(update_and_see(run, batch, first), sampled[first]):
            return False
        for rows in others:
            loop.update(run, batch, None, rows, Tally(batch.tokens.shape[1]))
    return sum(rewards[-3:]) > 1.5 * sum(rewards[:3])


def update_and_see(run, batch, rows):
    """Run one update, and return where a logit of these rows had a gradient, [rows, T]."""
    touched = torch.zeros(len(rows), batch.tokens.shape[1], dtype=torch.bool)
    alive = batch.adv[rows] != 0
    alive[0] |= not alive.any()

    def see(grad):
        """Note which trained tokens have a gradient: the hook of the logits."""
        mask = batch.mask[rows][alive]
        # as wide as `update` reads
        mask = mask & (torch.arange(mask.shape[1]) < mask.any(0).sum())
        touched[alive] = torch.zeros_like(mask).masked_scatter(
            mask, (grad != 0).any(-1)
        )

    original = models.response_logits

    def watched(*args):
        logits = original(*args)
        logits.register_hook(see)
        return logits

    models.response_logits = watched
    try:
        loop.update(run, batch, None, rows, Tally(batch.tokens.shape[1]))
    finally:
        models.response_logits = original
    return touched


@pytest.mark.parametrize("name", ["up_dapo", "grpo"])
def test_it_learns(name):
    assert learns(replace(FAST, objective=name))


def flipped_loss():
    """Return whether a run learns whose loss has the wrong sign."""
    run = Run(FAST)
    o = upref.get("up_dapo")
    run.objective = replace(
        o, fn=lambda lp, lp_old, A, **hp: -o.fn(lp, lp_old, A, **hp)
    )
    return learns(FAST, run=run)


def flipped_advantages():
    return learns(FAST, lambda batch: setattr(batch, "adv", -batch.adv))


def advantages_of_others():
    """Return whether a run learns whose advantages are those of the next response of
    the group.
    """
    return learns(
        FAST,
        lambda batch: setattr(
            batch, "adv", batch.adv.view(32, 16).roll(1, 1).flatten()
        ),
    )


def advantages_of_another_group():
    return learns(FAST, lambda batch: setattr(batch, "adv", batch.adv.roll(16)))


def padding_trained_too():
    return learns(
        FAST, lambda batch: setattr(batch, "mask", torch.ones_like(batch.mask))
    )


def mask_shifted_by_one():
    """Return whether a run learns whose mask is one token late."""
    return learns(
        FAST,
        lambda batch: setattr(
            batch, "mask", batch.mask.roll(1, 1) | (torch.arange(13) == 12)
        ),
    )


def mask_turned_around():
    return learns(
        FAST,
        lambda batch: setattr(batch, "mask", ~batch.mask | (torch.arange(13) == 12)),
    )


def eos_not_trained():
    """Return whether a run learns whose end tokens do not train."""

    def spoil(batch):
        last = batch.mask.sum(1, keepdim=True) - 1
        batch.mask = batch.mask & ((torch.arange(13) != last) | (last == 0))

    return learns(FAST, spoil)


BUGS = [
    flipped_loss,
    flipped_advantages,
    advantages_of_others,
    advantages_of_another_group,
    padding_trained_too,
    mask_shifted_by_one,
    mask_turned_around,
    eos_not_trained,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_it_would_notice(bug):
    assert not bug()
