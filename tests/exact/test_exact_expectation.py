# SPDX-License-Identifier: Apache-2.0
"""The expectation is what one gets by listing every ordered group and calling the
objective on each.
"""

from itertools import product

import pytest
import torch

import upref
from repro.exact import expected, flow
from repro.exact.task import F64, bandit, strings
from upref import advantages
from upref.errors import InputError

BATCH_WIDE = ("whiten", "group_mean_whiten")
ONE_GROUP = [
    name
    for name, o in ((name, upref.get(name)) for name in upref.names())
    if o.adv not in BATCH_WIDE and not o.batch_coupled
]


def brute(task, o, theta, lp_old, G, **hp):
    """Return the sum over ordered groups of their probability times the objective, as a
    user would call it.
    """
    lp = task.log_probs(theta)
    table = task.table(theta)
    H = -(table.exp() * table).sum(-1)[0][task.contexts]
    old = task.responses(lp_old)[0]
    total = 0
    for group in product(range(len(old)), repeat=G):
        rows = torch.tensor(group)
        A = advantages.get(o.adv)(task.reward[rows], torch.zeros(G, dtype=torch.int64))
        b = upref.Rollouts(
            lp[0, rows],
            lp_old[0, rows],
            A[:, None],
            task.mask[rows],
            entropy=H[rows].detach(),
        )
        total = total + old[rows].prod() * o(b, **hp)
    return total


def case(task, seed=0, spread=0.7):
    """Return a policy's parameters, and the log-probabilities of another one that the
    samples are from: ratios are on all sides of every bound.
    """
    g = torch.Generator().manual_seed(seed)
    shape = (1, task.features.shape[1], int(task.tokens.max()) + 1)
    theta = torch.randn(shape, generator=g, dtype=F64)
    return theta, task.log_probs(
        theta + spread * torch.randn(shape, generator=g, dtype=F64)
    )


def both_gradients(task, o, G):
    """Return the gradient by the expectation's formula, and by listing every group of
    G.
    """
    theta, lp_old = case(task)
    theta.requires_grad_()
    truth = torch.autograd.grad(brute(task, o, theta, lp_old, G), theta)[0]
    rows = expected.rows(task, lp_old, o, G)
    return flow.gradient(task, o, theta, lp_old, rows), truth


@pytest.mark.parametrize("name", [*ONE_GROUP, "up(sapo)", "up(gmpo)"])
def test_one_token(name):
    found, truth = both_gradients(bandit([1.0, 0, 0]), upref.get(name), 3)
    # gspo's bounds are tiny: all may be clipped
    assert truth.abs().max() > 1e-3 or name in ("gspo",)
    assert torch.allclose(found, truth, atol=1e-13, rtol=1e-11)


@pytest.mark.parametrize("name", ONE_GROUP)
def test_two_tokens(name):
    task = strings(2, 2, {(0, 1), (1, 1)})
    found, truth = both_gradients(task, upref.get(name), 2)
    assert torch.allclose(found, truth, atol=1e-13, rtol=1e-11)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in ONE_GROUP
        if upref.get(n).agg not in ("token-mean", "group-token-mean")
    ],
)
def test_lengths_that_differ(name):
    task = strings(2, 2, {(0,), (1, 1)}, end=0)
    assert not task.one_length
    found, truth = both_gradients(task, upref.get(name), 3)
    assert torch.allclose(found, truth, atol=1e-13, rtol=1e-11)


def test_a_denominator_over_the_batch_is_its_mean_length():
    """token-mean in a batch of infinitely many groups: 1/E|o| instead of E 1/|o|."""
    task, o = strings(2, 2, {(0,), (1, 1)}, end=0), upref.get("w_reinforce_code")
    theta, lp_old = case(task)
    pi = task.responses(lp_old)[0]
    lp = task.log_probs(theta)[0]
    w = o.weight((lp - lp_old[0]).exp(), (2 * task.reward - 1)[:, None].expand_as(lp))
    by_hand = (pi[:, None] * w * task.mask) / (pi @ task.mask.sum(1).to(F64))
    lp_leaf = lp[None].clone().requires_grad_()
    rows = expected.rows(task, lp_old, o, 4)
    found = torch.autograd.grad(
        expected.J(task, o, lp_leaf, lp_old, rows, task.table(theta)), lp_leaf
    )[0][0]
    assert torch.allclose(found, by_hand, atol=1e-14)


def test_policies_do_not_know_of_each_other():
    """Find that the gradient of two policies together is those of each alone."""
    task, o = strings(2, 2, {(0, 1)}), upref.get("up_dapo")
    (a, old_a), (b, old_b) = case(task, 1), case(task, 2)
    together, olds = torch.cat([a, b]), torch.cat([old_a, old_b])

    def grad(theta, old):
        return flow.gradient(task, o, theta, old, expected.rows(task, old, o, 4))

    apart = torch.cat([grad(a, old_a), grad(b, old_b)])
    assert torch.allclose(grad(together, olds), apart, atol=1e-14)


def test_probabilities_add_up():
    task = bandit([1.0, 0, 0, 1, 1, 0], prompts=2)
    _, lp_old = case(task)
    for G in (2, 5, None):
        assert expected.rows(
            task, lp_old, upref.get("dapo"), G
        ).weight.sum() == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize(
    "adv", ["group_norm", "group_mean", "leave_one_out", "signed", "reward"]
)
def test_a_large_group_is_nearly_an_infinite_one(adv):
    task, o = bandit([1.0, 0, 0]), upref.get("up_dapo")
    theta, lp_old = case(task)

    def grad(G):
        return flow.gradient(
            task, o, theta, lp_old, expected.rows(task, lp_old, o, G, adv)
        )

    gap = [float((grad(G) - grad(None)).abs().max()) for G in (64, 512)]
    assert gap[1] < 0.01 * float(grad(None).abs().max()) and gap[1] < gap[0] / 4 + 1e-12


@pytest.mark.parametrize("adv", BATCH_WIDE)
def test_normalised_over_the_batch(adv):
    """Two prompts of different difficulty: mean 0 and variance 1 over everything that
    can be drawn.
    """
    task, o = bandit([1.0, 0, 0, 1, 1, 0], prompts=2), upref.get("ppo_clip")
    _, lp_old = case(task)
    for G in (4, None):
        rows = expected.rows(task, lp_old, o, G, adv)
        assert rows.weight @ rows.A == pytest.approx(0, abs=1e-6)
        assert rows.weight @ rows.A**2 == pytest.approx(1, abs=1e-5)


def test_it_is_the_registrys_own_eps():
    """The moments of an infinite batch cannot be the registry's function: its eps is
    repeated, so it is compared.
    """
    R, g = torch.tensor([0.0, 1e-6], dtype=F64), torch.zeros(2, dtype=torch.int64)
    for name, eps in expected.EPS.items():
        centered = torch.tensor([-5e-7, 5e-7], dtype=F64)
        std = centered.std(correction=1 if name == "group_norm" else 0)
        assert torch.allclose(
            advantages.get(name)(R, g), centered / (std + eps), rtol=1e-9
        )


def test_what_cannot_be_is_one_sentence():
    """Objectives, groups, advantages and tasks that have no exact expectation here."""
    task = bandit([1.0, 0, 0])
    _, lp_old = case(task)
    with pytest.raises(InputError, match="couples the batch"):
        expected.rows(task, lp_old, upref.get("m2po"), None)
    with pytest.raises(InputError, match="groups of at least two"):
        expected.rows(task, lp_old, upref.get("dapo"), 1)
    with pytest.raises(InputError, match="rewards of 0 and 1"):
        expected.rows(bandit([1.0, 0.5, 0]), lp_old, upref.get("dapo"), 4)
    different = strings(2, 2, {(0,), (1, 1)}, end=0)
    per_group = next(
        o for o in map(upref.get, ONE_GROUP) if o.agg == "group-token-mean"
    )
    with pytest.raises(InputError, match="one length"):
        expected.rows(different, case(different)[1], per_group, 4)
    with pytest.raises(InputError, match="beta"):
        theta, _ = case(task)
        flow.gradient(
            task,
            upref.get("grpo"),
            theta,
            lp_old,
            expected.rows(task, lp_old, upref.get("grpo"), 4),
            beta=1,
        )
    with pytest.raises(InputError, match="add up to 1"):
        task.start([[0.5, 0.2, 0.2]])
    with pytest.raises(InputError, match="not a response"):
        strings(2, 2, {(2, 2)})
    with pytest.raises(InputError, match="shared out"):
        bandit([1.0, 0, 0], prompts=2)
