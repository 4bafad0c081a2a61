# SPDX-License-Identifier: Apache-2.0
"""Right trainers of more optimizer steps than `record_step` keeps, and optimizers that
make their gradients themselves, by a closure.
"""

import copy

import pytest
import torch
from loops import T, policy_step, qwen3

from upref.step import TorchModel, check_recorded, record_step
from upref.step.compare import record, sketch
from upref.step.compare.case import build_case, make_goal


@pytest.fixture(scope="module")
def model():
    return qwen3()


@pytest.fixture(scope="module")
def rows(model):
    return build_case(TorchModel(model), make_goal("dapo", {}, T), None, ()).rows


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=1e-2)


def take_steps(net, rows, optimizers, count):
    """Run a right loop: so many optimizer steps on these rows."""
    for _ in range(count):
        policy_step(net, rows)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def closure_of(net, rows):
    """Return a closure for `optimizer.step` as torch documents it: it zeroes the
    gradients and makes them.
    """

    def closure():
        net.zero_grad()
        policy_step(net, rows)

    return closure


def assert_agrees(seen, rows):
    report = check_recorded(seen, rows, "dapo", temperature=T)
    assert report, report.text()


@pytest.mark.parametrize("taken", [2, 3, 4, 5, 8])
def test_steps_after_the_kept_ones_change_nothing(model, rows, taken):
    net = copy.deepcopy(model)
    with record_step(net, first=2) as seen:
        take_steps(net, rows, [sgd(net)], taken)
    assert len(seen.steps) == 2
    assert_agrees(seen, rows)


def test_nothing_is_sketched_or_fed_after_the_kept_steps(model, rows, monkeypatch):
    """Count the sketches of gradients over three more steps than are kept."""
    net = copy.deepcopy(model)
    optimizer = sgd(net)
    sketches = []

    def counted(name, gradient):
        sketches.append(name)
        return sketch.project_some(name, gradient)

    monkeypatch.setattr(record, "project_some", counted)
    with record_step(net, first=1):
        take_steps(net, rows, [optimizer], 3)
        known = len(sketches)
        take_steps(net, rows, [optimizer], 3)
        assert len(sketches) == known > 0
        assert not net._forward_pre_hooks


def test_a_closure_that_zeroes_the_gradients(model, rows):
    net = copy.deepcopy(model)
    optimizer = sgd(net)
    closure = closure_of(net, rows)
    with record_step(net) as seen:
        for _ in range(3):
            optimizer.step(closure)
    assert_agrees(seen, rows)
    assert [step.backwards for step in seen.steps] == [2, 2, 2]
    assert [len(step.rows(rows)) for step in seen.steps] == [len(rows)] * 3


def test_a_closure_that_sets_the_gradients(model, rows):
    """It calls no backward: torch.autograd.grad makes the gradients."""
    net = copy.deepcopy(model)
    optimizer = sgd(net)

    def closure():
        twin = copy.deepcopy(net)
        twin.zero_grad()
        policy_step(twin, rows)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad

    plain = torch.autograd.backward
    with record_step(net) as seen:
        counting, torch.autograd.backward = torch.autograd.backward, plain
        for _ in range(3):
            optimizer.step(closure)
        torch.autograd.backward = counting
    assert_agrees(seen, [rows] * 3)


def test_a_closure_step_between_plain_steps(model, rows):
    """Take plain steps and steps with a closure in turn, and find that each agrees."""
    net = copy.deepcopy(model)
    optimizer = sgd(net)
    closure = closure_of(net, rows)
    with record_step(net) as seen:
        for closes in (False, True, False, True):
            if closes:
                optimizer.step(closure)
                continue
            optimizer.zero_grad()
            policy_step(net, rows)
            optimizer.step()
    assert_agrees(seen, rows)
    assert [step.backwards for step in seen.steps] == [2, 2, 2, 2]


def test_one_optimizer_for_each_parameter(model, rows):
    net = copy.deepcopy(model)
    optimizers = [torch.optim.SGD([p], lr=1e-2) for p in net.parameters()]
    with record_step(net, first=2) as seen:
        take_steps(net, rows, optimizers, 5)
    assert len(seen.steps) == 2
    assert_agrees(seen, rows)


def test_two_optimizers_of_which_one_takes_a_closure(model, rows):
    net = copy.deepcopy(model)
    parameters = list(net.parameters())
    one = torch.optim.SGD(parameters[:3], lr=1e-2)
    other = torch.optim.SGD(parameters[3:], lr=1e-2)
    with record_step(net) as seen:
        one.step(closure_of(net, rows))
        other.step()
    assert len(seen.steps) == 1
    assert_agrees(seen, rows)


def test_a_closure_of_an_optimizer_that_maximizes(model, rows):
    net = copy.deepcopy(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, maximize=True)

    def closure():
        optimizer.zero_grad()
        policy_step(net, rows)
        for p in net.parameters():
            if p.grad is not None:
                p.grad.neg_()

    with record_step(net) as seen:
        for _ in range(2):
            optimizer.step(closure)
    assert_agrees(seen, rows)
