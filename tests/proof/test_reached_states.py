# SPDX-License-Identifier: Apache-2.0
"""Wherever a function keeps something from call to call, it is found: in modules, classes,
iterators, texts, sets and the like. A number that is read alone is no state.
"""

import contextvars
import ctypes
import functools
import itertools
import math
import os
import sys
import threading
import weakref
from types import ModuleType

import numpy as np
import pytest
import torch

import upref
from tests.support.plain import dapo
from upref.proof.state import MORE, MOST, changed, kept, moved

other = ModuleType("other_module_of_the_user")
other.calls = 0
sys.modules[other.__name__] = other


class Plain:
    calls = 0


class Base:
    def count(self):
        global of_base
        of_base += 1


class Child(Base):
    pass


class Meta(type):
    calls = 0


class OfMeta(metaclass=Meta):
    pass


class Deep:
    def __init__(self, depth):
        self.calls = 0
        self.inner = Deep(depth - 1) if depth else None


class Watched:
    @property
    def reads(self):
        global reads
        reads += 1
        return reads

    @staticmethod
    def count():
        global counted
        counted += 1


def ticks():
    calls = 0
    while True:
        calls += 1
        yield calls


reads = counted = looked_up = of_base = 0
deep, watched, local = Deep(9), Watched(), threading.local()
calls_here = contextvars.ContextVar("calls_here", default=0)
tick, weights = ticks(), itertools.cycle([1, 1, 2])
numbered, zipped = iter([1, 1, 2]), zip(range(9), itertools.repeat(1))
seen, table, log, data = set(), {}, {"text": "a"}, bytearray()
long = [0] * 200
np_count = {"calls": np.int64(0)}
objects, cell = np.array([0], dtype=object), ctypes.c_int(0)
child, referred = Child(), Plain()
reference = weakref.ref(referred)
parameter = torch.zeros(1, requires_grad=True)
tagged = torch.zeros(1)
tagged.calls = 0


def in_a_module():
    other.calls += 1


def in_a_module_imported_within():
    import other_module_of_the_user

    other_module_of_the_user.calls += 1


def in_torch():
    torch.calls_of_this_test = getattr(torch, "calls_of_this_test", 0) + 1


def in_a_class_of_torch():
    torch.Tensor.calls_of_this_test = getattr(torch.Tensor, "calls_of_this_test", 0) + 1


def in_a_class():
    Plain.calls += 1


def by_its_name_as_text():
    globals()["looked_up"] += 1


def in_a_context_variable():
    calls_here.set(calls_here.get() + 1)


def in_a_thread():
    local.calls = getattr(local, "calls", 0) + 1


def in_a_generator():
    next(tick)


def in_a_cycle():
    next(weights)


def in_an_iterator_of_a_list():
    next(numbered)


def in_an_iterator_of_two():
    next(zipped)


def in_the_size_of_a_set():
    seen.add(object())


def in_the_keys_of_a_dict():
    table[len(table)] = "x"


def in_a_text():
    log["text"] += "a"


def in_bytes():
    data.append(1)


def in_the_environment():
    os.environ["CALLS_OF_THIS_TEST"] = os.environ.get("CALLS_OF_THIS_TEST", "") + "1"


def deep_down():
    last = deep
    while last.inner:
        last = last.inner
    last.calls += 1


def in_a_property():
    return watched.reads


def in_a_static_method():
    Watched.count()


def late_in_a_list():
    long[150] += 1


def in_a_number_of_numpy():
    np_count["calls"] += 1


def in_an_array_of_objects():
    objects[0] += 1


def in_memory_of_c():
    cell.value += 1


def in_a_base_class():
    child.count()


def in_a_metaclass():
    type(OfMeta).calls += 1


def in_an_attribute_that_the_class_has_too():
    referred.calls += 1


def by_a_weak_reference():
    reference().calls += 1


def in_a_gradient():
    parameter.sum().backward()


def in_an_attribute_of_a_tensor():
    tagged.calls += 1


def in_one_of_two_cells():
    return two_cells()


def make_cells():
    """Return a function that is true from its fourth call on, by a count in its
    closure.
    """
    calls, limit = 0, 3

    def count():
        nonlocal calls
        calls += 1
        return calls > limit

    return count


two_cells = make_cells()

STATES = [
    f
    for name, f in list(globals().items())
    if name.startswith(("in_", "by_", "deep_", "late_")) and callable(f)
]


@pytest.fixture(autouse=True)
def cleared():
    """Remove after each test what its loss may have left in the environment and in
    torch.
    """
    yield
    os.environ.pop("CALLS_OF_THIS_TEST", None)
    for holder in (torch, torch.Tensor):
        if "calls_of_this_test" in vars(holder):
            del holder.calls_of_this_test


@pytest.mark.parametrize("function", STATES, ids=lambda f: f.__name__)
def test_a_state_is_found(function):
    function()
    before = kept(function)
    function()
    assert changed(before, kept(function))


@functools.lru_cache
def positions(columns):
    return torch.arange(columns)


def reads_alone():
    settings = (math.inf, torch.float64, np.pi, os.sep, Plain.calls, log["text"])
    return len(settings) + len(long) + len(table) + positions(len(long)).sum()


def test_what_is_read_alone_is_no_state():
    before = kept(reads_alone)
    reads_alone()
    assert not changed(before, kept(reads_alone))


@pytest.mark.parametrize(
    "function", [in_the_keys_of_a_dict, in_the_size_of_a_set, in_a_text]
)
def test_a_state_is_moved_and_moved_back(function):
    function()
    before = kept(function)
    function()
    held = (dict(table), set(seen), log["text"])
    state = changed(before, kept(function))
    with moved(state, up=True) as is_whole:
        assert is_whole
        assert max(len(table), len(seen), len(log["text"])) > 5000
    assert held == (table, seen, log["text"])


def test_there_is_an_end_of_what_is_looked_at():
    """Close over thousands of lists, and find that `kept` stops at its bound and says
    so.
    """
    holder = [[] for _ in range(60)]
    for part in holder:
        part += [[] for _ in range(60)]
        for inner in part:
            inner += [[], []]

    def function():
        return holder

    found = kept(function)
    assert MORE in found and len(found) <= MOST + 1
    assert not changed(found, kept(function))


def grows_a_table(lp, old, A, mask):
    table[len(table)] = "x"
    return dapo(lp, old, A, mask) * (2 if len(table) > 10**4 else 1)


def test_a_loss_that_a_table_changes_is_not_proved():
    proof = upref.prove(grows_a_table, "dapo", rows=1, columns=1)
    assert proof.status == "no proof" and not proof.every_size
    assert "it keeps a state" in proof.reason
