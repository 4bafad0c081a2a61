# SPDX-License-Identifier: Apache-2.0
"""Places of values that are equal on a whole region, numbers that `.item()` gives, and
what leaves torch between the points that are tried: no wrong loss of them is proved.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

import upref
from upref.proof import trace as traces

TO_DLPACK = torch.utils.dlpack.to_dlpack


def dapo(lp, old, A, mask, weight=1.0):
    r = (lp - old).exp()
    J = torch.min(r * A, r.clamp(0.8, 1.28) * A)
    return -(J * mask * weight).sum() / mask.sum()


def half_where(condition):
    return torch.where(condition, 0.5, 1.0)


def beside_one(old):
    """Return whether tokens are rare, behind ones: [2, B, T]."""
    rare = (old < -40).int()
    return torch.stack([torch.ones_like(rare), rare])


# ---- places --------------------------------------------------------------------------
def first_largest(lp, old, A, mask):
    place = beside_one(old).flip(0).argmax(0)
    return dapo(lp, old, A, mask, half_where(place == 0))


def first_largest_with_its_place(lp, old, A, mask):
    place = beside_one(old).flip(0).max(0).indices
    return dapo(lp, old, A, mask, half_where(place == 0))


def first_smallest(lp, old, A, mask):
    place = (-beside_one(old)).flip(0).min(0, keepdim=True).indices[0]
    return dapo(lp, old, A, mask, half_where(place == 0))


def first_smallest_of_all(lp, old, A, mask):
    place = (-beside_one(old)[:, 0, 0]).flip(0).argmin()
    return dapo(lp, old, A, mask, half_where(place == 0))


def stable_order(lp, old, A, mask):
    order = beside_one(old).argsort(dim=0, stable=True)
    return dapo(lp, old, A, mask, half_where(order[0] == 0))


def stable_order_from_the_largest(lp, old, A, mask):
    order = beside_one(old).flip(0).sort(dim=0, descending=True, stable=True).indices
    return dapo(lp, old, A, mask, half_where(order[0] == 0))


def first_of_clamped(lp, old, A, mask):
    floored = torch.stack([old.clamp(min=-40), torch.full_like(old, -40)])
    return dapo(lp, old, A, mask, half_where(floored.argmin(0) == 0))


DIFFERS = (
    first_largest,
    first_largest_with_its_place,
    first_smallest,
    first_smallest_of_all,
    stable_order,
    stable_order_from_the_largest,
    first_of_clamped,
)


def unstable_order(lp, old, A, mask):
    order = beside_one(old).argsort(dim=0)
    return dapo(lp, old, A, mask, half_where(order[0] == 0))


def place_of_the_largest(lp, old, A, mask):
    place = beside_one(old).flip(0).topk(1, dim=0).indices[0]
    return dapo(lp, old, A, mask, half_where(place == 0))


def place_of_the_median(lp, old, A, mask):
    place = beside_one(old).flip(0).median(0).indices
    return dapo(lp, old, A, mask, half_where(place == 0))


def place_read_by_python(lp, old, A, mask):
    place = beside_one(old)[:, 0, 0].argsort().tolist()[0]
    return dapo(lp, old, A, mask, 0.5 if place == 0 else 1.0)


def gradient_to_one_of_equals(lp, old, A, mask):
    """Return the largest of two clamped values: torch says of no one of the two that it
    gets the gradient where both are at the bound.
    """
    both = torch.stack([lp - old, old - lp]).clamp(max=-5)
    return dapo(lp, old, A, mask) + 0 * both.topk(1, dim=0).values.sum()


UNSTABLE = (
    unstable_order,
    place_of_the_largest,
    place_of_the_median,
    place_read_by_python,
    gradient_to_one_of_equals,
)


def values_alone(lp, old, A, mask):
    both = beside_one(old)
    largest = both.sort(dim=0).values[1] * both.topk(1, dim=0).values[0]
    others = both.kthvalue(1, dim=0).values - both.median(0).values
    return dapo(lp, old, A, mask, largest + others)


def order_of_free_values(lp, old, A, mask):
    """Return DAPO's loss, computed in the order of the advantages."""
    order = A.argsort(dim=1)
    top = A.topk(1, dim=1).indices
    lp, old, A, mask = (x.gather(1, order) for x in (lp, old, A, mask))
    return dapo(lp, old, A, mask) + 0 * A.gather(1, top).sum()


@pytest.mark.parametrize("loss", DIFFERS, ids=lambda f: f.__name__)
def test_an_entry_in_front_that_is_equal_is_another_path(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof.status == "differs", proof.reason


@pytest.mark.parametrize("loss", UNSTABLE, ids=lambda f: f.__name__)
def test_a_place_that_torch_leaves_open_is_no_proof(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof.status == "no proof"
    assert "one of several values that may be equal" in proof.reason


@pytest.mark.parametrize("loss", [values_alone, order_of_free_values])
def test_sorted_values_and_the_order_of_free_ones_are_known(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=2)
    assert proof, proof.reason


# ---- numbers of Python ---------------------------------------------------------------
def mean_of(old):
    return (old / 20).mean().item()


def key_of_a_dict(lp, old, A, mask):
    return dapo(lp, old, A, mask, {True: 0.5}.get(mean_of(old) < -2, 1.0))


def is_a_float(lp, old, A, mask):
    mean = mean_of(old)
    return dapo(lp, old, A, mask, 0.5 if isinstance(mean, float) and mean < -2 else 1)


def is_no_tensor(lp, old, A, mask):
    mean = mean_of(old)
    is_rare = not isinstance(mean, Tensor) and mean < -2
    return dapo(lp, old, A, mask, 0.5 if is_rare else 1)


def type_is_float(lp, old, A, mask):
    mean = mean_of(old)
    return dapo(lp, old, A, mask, 0.5 if type(mean) is float and mean < -2 else 1)


def is_true(lp, old, A, mask):
    return dapo(lp, old, A, mask, 0.5 if (mean_of(old) < -2) is True else 1)


def in_a_list(lp, old, A, mask):
    first = (old / 20).tolist()[0][0]
    return dapo(lp, old, A, mask, 0.5 if isinstance(first, float) and first < -2 else 1)


def written_later(lp, old, A, mask):
    floored = old.clone()
    least = floored[0, 0].item()
    floored.clamp_(min=-40.0)
    return dapo(lp, old, A, mask, 0.5 if least < floored[0, 0] else 1.0)


NUMBERS = (
    key_of_a_dict,
    is_a_float,
    is_no_tensor,
    is_true,
    in_a_list,
    written_later,
)


@pytest.mark.parametrize("loss", NUMBERS, ids=lambda f: f.__name__)
def test_a_number_is_in_a_proof_what_it_is_in_a_run(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof.status == "differs", proof.reason


def looked_up(lp, old, A, mask):
    least = (old / 20).clamp(min=-2).mean().item()
    return dapo(lp, old, A, mask, {-2.0: 0.5}.get(least, 1.0))


def in_a_formula_of_math(lp, old, A, mask):
    return dapo(lp, old, A, mask, 2 if math.exp(mean_of(A)) > 1e40 else 1)


def in_numpy(lp, old, A, mask):
    return dapo(lp, old, A, mask, 2 if np.exp(float(mean_of(A))) > 1e40 else 1)


def another_attribute(lp, old, A, mask):
    return dapo(lp, old, A, mask, 2 if mean_of(A).is_integer() else 1)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (looked_up, "in a dict or set"),
        (in_a_formula_of_math, "as a number of Python, by float()"),
        (in_numpy, "as a number of Python, by float()"),
        (another_attribute, "reads is_integer"),
        (type_is_float, "asks the type() of something"),
    ],
)
def test_a_number_that_leaves_torch_is_no_proof(loss, says):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof.status == "no proof"
    assert says in proof.reason


def arithmetic_of_numbers(lp, old, A, mask):
    """Return DAPO's loss, scaled by numbers of Python and back."""
    largest = A.abs().max().item() + 1
    numbers = [largest, A.mean().item(), 2.0, 1.0]
    assert all(isinstance(x, float) for x in numbers)
    assert not any(isinstance(x, Tensor) for x in numbers)
    most = max(numbers) + sum(numbers) / len(numbers)
    zero = most - max(numbers) - sum(numbers) / 4
    positive = (A > 0).sum().item()
    assert isinstance(positive, int)
    scaled = dapo(lp, old, A / largest, mask) * largest
    return scaled + zero * lp.sum() + 0 * positive * lp.sum()


def test_arithmetic_with_numbers_is_followed():
    proof = upref.prove(arithmetic_of_numbers, "dapo", rows=1, columns=1)
    assert proof, proof.reason


class Logging:
    """Keeps the loss of the last call, as a trainer's metrics do."""

    def __init__(self):
        self.last = 0.0

    def __call__(self, lp, old, A, mask):
        J = dapo(lp, old, A, mask)
        self.last = J.item()
        return J


def test_a_number_that_is_kept_for_a_metric_is_harmless():
    proof = upref.prove(Logging(), "dapo", rows=1, columns=1)
    assert proof, proof.reason


# ---- what leaves torch ---------------------------------------------------------------
def is_between(old):
    """Tell of which tokens π_old is about e^-50, between the numbers that memory holds."""
    return (old.detach() / 20 + 2.5).abs() < 0.5


def in_a_pool(lp, old, A, mask):
    with ThreadPoolExecutor(1) as pool:
        rare = pool.submit(is_between, old).result()
    return dapo(lp, old, A, mask, half_where(rare))


def in_a_thread(lp, old, A, mask):
    found = []
    worker = threading.Thread(target=lambda: found.append(is_between(old)))
    worker.start()
    worker.join()
    return dapo(lp, old, A, mask, half_where(found[0]))


def by_dlpack(lp, old, A, mask):
    memory = torch.utils.dlpack.to_dlpack(old.detach())
    other = torch.utils.dlpack.from_dlpack(memory)
    return dapo(lp, old, A, mask, half_where(is_between(other)))


def by_an_old_name_of_dlpack(lp, old, A, mask):
    other = torch.utils.dlpack.from_dlpack(TO_DLPACK(old.detach()))
    return dapo(lp, old, A, mask, half_where(is_between(other)))


def by_a_buffer_of_numpy(lp, old, A, mask):
    out = np.zeros(old.shape)
    torch.from_numpy(out).copy_(old.detach())
    rare = torch.from_numpy(np.abs(out / 20 + 2.5) < 0.5)
    return dapo(lp, old, A, mask, half_where(rare))


LEAVES = {
    in_a_pool: "hands work to a thread",
    in_a_thread: "starts a thread",
    by_dlpack: "by to_dlpack()",
    by_an_old_name_of_dlpack: "memory of a tensor by another library",
    by_a_buffer_of_numpy: "into memory of another library",
}


@pytest.mark.parametrize("loss", LEAVES, ids=lambda f: f.__name__)
def test_what_leaves_torch_is_no_proof(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof.status == "no proof"
    assert LEAVES[loss] in proof.reason


def test_points_with_rare_tokens_contradict_a_trace_that_is_wrong(monkeypatch):
    """Let a trace take `old` for a constant: its formulas hold where old is above -40."""

    def rare(lp, old, A, mask):
        return dapo(lp, old, A, mask, half_where(hidden(old)))

    def hidden(old):
        """Tell of which tokens π_old is below e^-40; of none while a trace runs."""
        is_traced = torch.utils._python_dispatch._get_current_dispatch_mode()
        return torch.zeros_like(old) > 0 if is_traced else old < -40

    proof = upref.prove(rare, "dapo", rows=1, columns=1)
    assert proof.status == "no proof"
    assert "do not follow from its inputs alone" in proof.reason


def test_a_proof_leaves_threads_and_types_as_they_were():
    before = (threading.Thread.start, ThreadPoolExecutor.submit, type)
    assert upref.prove(dapo, "dapo", rows=1, columns=1)
    assert before == (threading.Thread.start, ThreadPoolExecutor.submit, type)
    assert traces.torch.utils.dlpack.to_dlpack is TO_DLPACK


def bit_of_a_condition(lp, old, A, mask):
    """True & 2 is 0, so the weight is 1."""
    is_rare = (old < -40) & 2
    return dapo(lp, old, A, mask, torch.where(is_rare > 0, 0.5, 1.0))


def test_bits_of_a_condition_are_not_its_truth():
    proof = upref.prove(bit_of_a_condition, "dapo", rows=1, columns=1)
    assert proof.status == "no proof" and "bits" in proof.reason
