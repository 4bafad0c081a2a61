# SPDX-License-Identifier: Apache-2.0
"""A recorded gradient that is another objective's fails; that of a healthy run does not,
whatever is added to the loss, and however the gradient is rounded.
"""

import pytest
import torch

from tests.replay.test_odd_healthy import Size, columns
from upref import Rollouts, registry
from upref.replay import make_batch, replay

TERMS = {
    "nothing": lambda lp, old: 0 * lp,
    "a KL term": lambda lp, old: 0.02 * (lp - old) ** 2,
    "a supervised term": lambda lp, old: -0.05 * lp,
}


def steps_of(name, term, dtype=torch.float32, at_one=False):
    """Return two steps of a run of an objective, with the gradient that its trainer
    recorded.

    at_one: the trainer takes π_old for π_θ, so that all ratios are 1.
    """
    steps = []
    for seed in (0, 1):
        made = columns(seed, Size(3, 4, 20, 24))
        old, mask = made["old"].double(), made["mask"]
        logp = (old if at_one else made["now"].double()).clone().requires_grad_()
        batch = Rollouts.unchecked(
            logp=logp,
            logp_old=old,
            adv=made["adv"].double(),
            mask=mask,
            group=made["group"],
        )
        loss = registry.get(name).loss(batch)
        loss = loss + (TERMS[term](logp, old) * mask).sum() / mask.sum()
        (gradient,) = torch.autograd.grad(loss, logp)
        made["grad"] = gradient.to(dtype).float()
        logged = {"loss": loss.item()}
        steps.append(make_batch(made, file="f", step=seed + 1, logged=logged))
    return steps


def causes(steps, name):
    """The causes of the failures of a run that is named so."""
    return {f.cause for f in replay(steps, registry.get(name)).failures}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_healthy_gradient_is_not_called_another_objectives(dtype, term):
    assert causes(steps_of("dapo", term, dtype), "dapo") == set()


@pytest.mark.nightly
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("name", ["cispo", "grpo", "gspo", "reinforce", "up_dapo"])
def test_no_healthy_objective_is_called_another(name, term):
    assert causes(steps_of(name, term), name) == set()


def test_ratios_of_1_in_the_trainer_are_no_other_objective():
    assert causes(steps_of("dapo", "nothing", at_one=True), "dapo") == set()


def test_another_objective_is_named():
    assert causes(steps_of("up_dapo", "nothing"), "dapo") == {"gradient_of_another"}
