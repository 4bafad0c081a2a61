# SPDX-License-Identifier: Apache-2.0
"""Random generators and states, wherever a loss reaches them: no such loss is proved. A
state that changes nothing, and a cache of constants, cost no proof.
"""

import functools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import upref
from tests.support.daily import daily
from tests.support.plain import dapo

python_generator = random.Random(0)
numpy_generator = np.random.default_rng(0)
old_generator = np.random.RandomState(0)
torch_generator = torch.Generator().manual_seed(0)
draw = numpy_generator.random
holder = SimpleNamespace(parts=[{"chance": random.Random(1)}])


def half_if(rare, lp, old, A, mask):
    return dapo(lp, old, A, mask) * (0.5 if rare else 1.0)


def of_python(lp, old, A, mask):
    return half_if(python_generator.random() < 1e-9, lp, old, A, mask)


def of_numpy(lp, old, A, mask):
    return half_if(numpy_generator.random() < 1e-9, lp, old, A, mask)


def of_old_numpy(lp, old, A, mask):
    return half_if(old_generator.random_sample() < 1e-9, lp, old, A, mask)


def of_torch(lp, old, A, mask):
    rare = torch.rand((), generator=torch_generator) < 1e-9
    return half_if(rare, lp, old, A, mask)


def by_a_method(lp, old, A, mask):
    return half_if(draw() < 1e-9, lp, old, A, mask)


def in_an_object(lp, old, A, mask):
    rare = holder.parts[0]["chance"].random() < 1e-9
    return half_if(rare, lp, old, A, mask)


def in_a_default(lp, old, A, mask, chance=random.Random(2)):  # noqa: B008
    return half_if(chance.random() < 1e-9, lp, old, A, mask)


def in_a_closure():
    """Return a loss that is halved once in 1e9 calls, by a generator in its closure."""
    chance = np.random.default_rng(3)

    def loss(lp, old, A, mask):
        return half_if(chance.random() < 1e-9, lp, old, A, mask)

    return loss


def drawn_from(chance, lp, old, A, mask):
    return half_if(chance.random() < 1e-9, lp, old, A, mask)


GENERATORS = [
    of_python,
    of_numpy,
    of_old_numpy,
    of_torch,
    by_a_method,
    in_an_object,
    in_a_default,
    in_a_closure(),
    functools.partial(drawn_from, random.Random(4)),
]


@pytest.mark.parametrize("loss", GENERATORS)
def test_a_loss_that_draws_is_not_proved(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof.status == "no proof"
    assert "draws" in proof.reason


class Average:
    def __init__(self):
        self.value = None

    def update(self, x):
        kept = x.detach().mean().item() if self.value is None else self.value
        self.value = kept
        return kept


class Counter:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


average, counter = Average(), Counter()
entries, recent, counts = [0], deque([0], maxlen=9), np.zeros(1)


def by_an_average(lp, old, A, mask):
    return half_if(abs(average.update(A)) > 1e9, lp, old, A, mask)


def by_a_slot(lp, old, A, mask):
    counter.calls += 1
    return half_if(counter.calls > 5000, lp, old, A, mask)


def by_an_entry(lp, old, A, mask):
    entries[0] += 1
    return half_if(entries[0] > 5000, lp, old, A, mask)


def by_a_deque(lp, old, A, mask):
    recent[0] += 1
    return half_if(recent[0] > 5000, lp, old, A, mask)


def by_an_array(lp, old, A, mask):
    counts[0] += 1
    return half_if(counts[0] > 5000, lp, old, A, mask)


class Hidden:
    """Its slot has the name that Python makes of it: _Hidden__calls."""

    __slots__ = ("__calls",)

    def __init__(self):
        self.__calls = 0

    def count(self):
        self.__calls += 1
        return self.__calls


hidden = Hidden()
small_counts = np.zeros(1, dtype=np.int32)


def by_a_private_slot(lp, old, A, mask):
    return half_if(hidden.count() > 5000, lp, old, A, mask)


def by_a_small_array(lp, old, A, mask):
    small_counts[0] += 1
    return half_if(small_counts[0] > 5000, lp, old, A, mask)


@functools.lru_cache(None)
def seen(name):
    return []


def by_a_cached_list(lp, old, A, mask):
    shapes = seen("shapes")
    shapes.append(tuple(mask.shape))
    return half_if(len(shapes) > 5000, lp, old, A, mask)


@pytest.mark.parametrize(
    "loss",
    daily(
        [
            by_an_average,
            by_a_slot,
            by_an_entry,
            by_a_deque,
            by_an_array,
            by_a_cached_list,
            by_a_private_slot,
            by_a_small_array,
        ],
        2,
    ),
)
def test_a_loss_that_a_state_changes_is_not_proved(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof.status == "no proof"
    assert "it keeps a state" in proof.reason


@functools.lru_cache(maxsize=8)
def weights_of(columns):
    return torch.ones(columns, dtype=torch.float64)


log, log_of_counts = [], deque(maxlen=3)
calls = SimpleNamespace(number=0, last=[0.0], array=np.zeros(2))


def with_a_cache(lp, old, A, mask):
    return dapo(lp, old, A * weights_of(lp.shape[1]), mask)


def with_a_log(lp, old, A, mask):
    """Return DAPO's loss, and count its calls in an object, a list and two logs."""
    calls.number += 1
    calls.last[0] += 0.5
    calls.array += 1
    log.append(calls.number)
    log_of_counts.append(calls.number)
    return dapo(lp, old, A, mask)


@pytest.mark.nightly
@pytest.mark.parametrize("loss", [with_a_cache, with_a_log])
def test_what_changes_nothing_costs_no_proof(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=2)
    assert proof.status == "proved", proof.reason


def test_what_was_moved_is_moved_back():
    before = calls.number
    upref.prove(with_a_log, "dapo", rows=1, columns=1)
    assert before < calls.number < before + 1000
    assert calls.last[0] < 1000
    assert max(log) == calls.number


def broken(log_prob, ref_log_prob):
    """Return k3, whose backward pass fails: the result of exp is overwritten."""
    d = ref_log_prob - log_prob
    e = d.exp()
    k = e - 1 - d
    e.mul_(0)
    return k


def test_a_backward_pass_of_a_term_that_fails_is_the_users():
    proof = upref.prove_kl(broken, "k3", rows=1, columns=1)
    assert proof.status == "no proof"
    assert "the backward pass of" in proof.reason
