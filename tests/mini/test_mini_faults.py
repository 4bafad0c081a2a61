# SPDX-License-Identifier: Apache-2.0
"""Each mistake of repro/mini/train/faults.py is the one that its sentence names, and no
mistake is the objective itself.
"""

from dataclasses import replace

import pytest
import torch

import upref
from repro.mini.experiment.plan import load
from repro.mini.train import faults, loop
from repro.mini.train.faults import Minibatch
from repro.mini.train.settings import Settings
from upref import Totals
from upref.errors import InputError

DAPO = replace(upref.get("dapo"), agg="token-mean")
HP = DAPO.resolve({})


def minibatch(groups=4, size=4, tokens=6):
    """Return a minibatch with ratios on both sides of both bounds, and lengths from 1
    to `tokens`.
    """
    g = torch.Generator().manual_seed(3)
    rows = groups * size
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    mask = torch.arange(tokens) < lengths[:, None]
    old = torch.randn(rows, tokens, generator=g).where(mask, 0.0) - 2
    step = 0.4 * torch.randn(rows, tokens, generator=g)
    lp = (old + step.where(mask, 0.0)).requires_grad_()
    A = torch.randn(rows, 1, generator=g)
    group = torch.arange(groups).repeat_interleave(size)
    ref = old - 0.3
    return Minibatch(lp, old, A, mask, group, ref, None, Totals.of(mask, group))


def weights(fault, o=DAPO, hp=HP, m=None):
    """Return dJ/dlp of each token with a fault; "" is the objective's own."""
    m = m or minibatch()
    (found,) = torch.autograd.grad(faults.loss_of(fault)(o, m, hp), m.lp)
    return found


def test_no_fault_is_the_objective():
    m = minibatch()
    (own,) = torch.autograd.grad(
        DAPO.J(m.lp, m.lp_old, m.A, m.mask, m.group, totals=m.totals), m.lp
    )
    assert torch.equal(weights("", m=m), own)


@pytest.mark.parametrize(
    "fault", [name for name in faults.LOSSES if name != "penalty_added"]
)
def test_a_fault_changes_the_gradient(fault):
    assert not torch.allclose(weights(fault), weights(""), rtol=1e-3, atol=0)


def test_without_a_ratio_each_token_has_its_advantage():
    m = minibatch()
    expected = (m.A * m.mask) / m.mask.sum()
    assert torch.allclose(weights("no_ratio", m=m), expected)


def test_the_old_log_probabilities_are_those_of_the_token_before():
    m = minibatch()
    late = torch.cat([m.lp_old[:, :1], m.lp_old[:, :-1]], 1)
    expected = weights("", m=replace(m, lp_old=late))
    assert torch.equal(weights("shifted_old"), expected)


def test_the_first_token_does_not_train_with_a_late_mask():
    late, right = weights("shifted_mask"), weights("")
    m = minibatch()
    assert late[:, 0].eq(0).all() and right[:, 0].ne(0).any()
    scale = m.mask.sum() / m.mask[:, 1:].sum()
    assert torch.allclose(late[:, 1:], right[:, 1:] * scale)


def test_micro_batches_have_means_of_their_own():
    m = minibatch()
    found, right = weights("micro_batch_means", m=m), weights("", m=m)
    order = m.mask.sum(1).argsort(stable=True)
    for rows in order.chunk(faults.MICRO_BATCHES):
        scale = m.mask.sum() / (faults.MICRO_BATCHES * m.mask[rows].sum())
        assert torch.allclose(found[rows], right[rows] * scale)


def test_the_last_micro_batch_trains_alone():
    found, right = weights("last_micro_batch"), weights("")
    assert found[:12].eq(0).all()
    assert torch.allclose(found[12:], right[12:])


def test_padding_makes_the_step_smaller():
    m = minibatch()
    scale = m.mask.sum() / m.mask.numel()
    assert torch.allclose(weights("padding_counts"), weights("") * scale)


def test_without_the_minimum_a_clipped_token_never_trains():
    m = minibatch()
    r = (m.lp - m.lp_old).exp()
    inside = (r > 0.8) & (r < 1.28) & m.mask
    expected = (r * m.A).where(inside, torch.tensor(0.0)) / m.mask.sum()
    assert torch.allclose(weights("clip_without_minimum"), expected.detach())


def test_the_penalty_is_added():
    o = upref.get("grpo")
    hp = o.resolve({"beta": 0.5})
    right, without = weights("", o, hp), weights("", o, o.resolve({"beta": 0.0}))
    found = weights("penalty_added", o, hp)
    assert torch.allclose(found - without, without - right, atol=1e-7)
    assert not torch.allclose(found, without)


def test_a_reward_is_compared_with_those_of_other_prompts():
    group = torch.arange(3).repeat_interleave(2)
    assert faults.groups_of("", group, 3) is group
    assert faults.groups_of(faults.GROUPS, group, 3).tolist() == [0, 1, 2, 0, 1, 2]


def test_the_temperature_is_forgotten_by_the_trainer_alone():
    assert faults.temperature_of("", 0.7) == 0.7
    assert faults.temperature_of(faults.TEMPERATURE, 0.7) == 1


def test_an_unknown_fault_is_one_sentence():
    with pytest.raises(InputError, match=r"fault must be one of no_ratio, .* 'ratio'"):
        Settings(fault="ratio")


def test_each_fault_has_an_arm():
    plan = load("faults")
    arms = {cell.arm for cell in plan.cells()}
    assert arms - {"clean"} == set(faults.NAMES)


@pytest.mark.parametrize("arm", ["other_groups", "penalty_added"])
def test_an_arm_with_a_fault_trains(arm, tmp_path):
    plan = load("faults")
    cell = next(cell for cell in plan.cells() if cell.arm == arm)
    (run,) = plan.main_runs([cell], [1], {}).values()
    small = replace(
        run.settings, steps=1, prompts=8, responses=4, eval_every=0, train_problems=50
    )
    loop.train(small, tmp_path, say=str)
    assert (tmp_path / "done.json").exists()
