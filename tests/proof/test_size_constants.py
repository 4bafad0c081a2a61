# SPDX-License-Identifier: Apache-2.0
"""A number that the code compares with a size or a count is a bound of the proof, by
whatever way the count has left torch.
"""

import itertools
import math

import numpy as np
import pytest
import torch

import upref
from tests.support.daily import daily

LIMIT = 777


def terms(lp, old, A, mask):
    r = torch.where(mask, lp - old, 0).exp()
    A = torch.where(mask, A, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.28) * A).sum()


def dapo(lp, old, A, mask):
    return terms(lp, old, A, mask) / mask.sum()


def rows_of(lp, old, A, mask):
    return zip(lp, old, A, mask, strict=True)


def number_by_float(lp, old, A, mask):
    count = float(mask.sum())
    return dapo(lp, old, A, mask) * (2 if count > 1000 else 1)


def number_by_int(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (2 if int(mask.sum()) > 1000 else 1)


def number_in_a_quotient(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (2 if mask.sum().item() / 1000 > 1 else 1)


def number_in_a_difference(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (2 if float(mask.sum()) - 1000 > 0 else 1)


def index_of_enumerate(lp, old, A, mask):
    rows = enumerate(rows_of(lp, old, A, mask))
    return sum(terms(*row) * (2 if i > 1000 else 1) for i, row in rows) / mask.sum()


def index_of_range(lp, old, A, mask):
    """Return DAPO's loss, with the rows from LIMIT on counted twice."""
    total = 0
    for i in range(len(lp)):
        row = terms(lp[i], old[i], A[i], mask[i])
        total = total + (row if i < LIMIT else 2 * row)
    return total / mask.sum()


def own_counter(lp, old, A, mask):
    """Return DAPO's loss without its thousandth row."""
    total, count = 0, 0
    for row in rows_of(lp, old, A, mask):
        count += 1
        if count == 1000:
            continue
        total = total + terms(*row)
    return total / mask.sum()


def two_names(lp, old, A, mask):
    count, limit = 0, 1000
    for _ in mask:
        count += 1
    return dapo(lp, old, A, mask) * (2 if count > limit else 1)


def cut_list(lp, old, A, mask):
    return (
        sum(terms(*row) for row in list(rows_of(lp, old, A, mask))[:1000]) / mask.sum()
    )


def cut_iterator(lp, old, A, mask):
    rows = itertools.islice(rows_of(lp, old, A, mask), 1000)
    return sum(terms(*row) for row in rows) / mask.sum()


def logarithm(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (2 if math.log(mask.sum()) > 10 else 1)


def count_of_numpy(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (2 if np.sqrt(mask.numpy().sum()) > 1000 else 1)


def smaller_of_two(lp, old, A, mask):
    return terms(lp, old, A, mask) / min(int(mask.sum()), 1000)


def factor(count):
    return 1 if count <= 1 << 12 else 2


def within_a_helper(lp, old, A, mask):
    return dapo(lp, old, A, mask) * factor(float(mask.sum()))


def in_a_set(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (2 if lp.shape[1] in {512, 1000} else 1)


def in_a_table(lp, old, A, mask):
    return dapo(lp, old, A, mask) * {1000: 2}.get(lp.shape[1], 1)


def by_a_pattern(lp, old, A, mask):
    match len(mask):
        case 1000:
            return 2 * dapo(lp, old, A, mask)
    return dapo(lp, old, A, mask)


def bits(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (1 + (lp.shape[1] >> 10))


def digits(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (2 if len(str(mask.numel())) > 10 else 1)


NUMBERS = {
    "index_of_range": 777,
    "logarithm": 10,
    "within_a_helper": 4096,
    "bits": 1024,  # n >> 10 is n // 1024
    "digits": 10,
}
HELPERS = ("terms", "dapo", "rows_of")
BOUNDED = [
    f
    for name, f in list(globals().items())
    if getattr(f, "__code__", None)
    and f.__code__.co_varnames[:2] == ("lp", "old")
    and name not in HELPERS
]


@pytest.mark.parametrize("loss", daily(BOUNDED, 2), ids=lambda f: f.__name__)
def test_its_number_is_a_bound(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof, proof.reason
    assert NUMBERS.get(loss.__name__, 1000) in [number for number, _ in proof.bounds]


class Settings:
    largest = 1e9
    level = 7

    def clip(self, r):
        return r if self.level > 5 else r.clamp(max=self.largest)


def compares_settings(lp, old, A, mask, warmup=20.0):
    """Return DAPO's loss, in which numbers are compared with constants and settings,
    and never with a size.
    """
    r = torch.where(mask, lp - old, 0).exp()
    A = torch.where((A > 7) | (A < -1e5), A * 1.0, A)
    J = torch.minimum(Settings().clip(r) * A, r.clamp(0.8, 1.28) * A)
    if warmup > 10 and LIMIT > 9:
        return -torch.where(mask, J, 0).sum() / mask.sum()
    return J.sum()


def test_numbers_beside_settings_and_tensors_are_no_bounds():
    proof = upref.prove(compares_settings, "dapo", rows=1, columns=1)
    assert proof and not proof.bounds


def prompts_as_floats(lp, old, A, mask, group):
    """Return CISPO's loss with a denominator for each prompt, whose ids are compared as
    float32.
    """
    r = torch.where(mask, lp - old, 0).exp().clamp(max=5).detach()
    J = torch.where(mask, r * A * lp, 0).sum(1)
    ids = group.float()
    same = (ids[:, None] == ids).to(lp.dtype)
    return -(J / (same @ mask.sum(1).to(lp.dtype))).sum() / len(ids.unique())


def test_ids_of_prompts_that_are_compared_are_no_bounds():
    proof = upref.prove(prompts_as_floats, "cispo", rows=2, columns=1, eps_high=4)
    assert proof and not proof.bounds


def ceiling_of_a_setting(lp, old, A, mask, block=64):
    return dapo(lp, old, A, mask) * -(-lp.shape[1] // block)


def ceiling_of_a_quotient(lp, old, A, mask, block=64):
    return dapo(lp, old, A, mask) * math.ceil(lp.shape[1] / block)


def shift_by_a_setting(lp, old, A, mask, bits=6):
    return dapo(lp, old, A, mask) * (1 + (lp.shape[1] >> bits))


def shift_of_a_tensor(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (1 + torch.bitwise_right_shift(mask.sum(), 6))


def bits_of_a_tensor(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (1 + (mask.sum() & 64))


def quotient_of_tensors(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (1 + mask.sum() // torch.full((), 64))


SIXTY_FOUR = [
    *(ceiling_of_a_setting, ceiling_of_a_quotient, shift_by_a_setting),
    *(shift_of_a_tensor, bits_of_a_tensor, quotient_of_tensors),
]


@pytest.mark.parametrize("loss", SIXTY_FOUR, ids=lambda f: f.__name__)
def test_a_size_that_is_divided_or_read_by_bits_has_a_bound(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof, proof.reason
    assert 64 in [number for number, _ in proof.bounds]


def prompts_by_their_last_bits(lp, old, A, mask, group):
    """Return DAPO's loss with the mean within each prompt; 7 and 23 are one prompt."""
    r = torch.where(mask, lp - old, 0).exp()
    A = torch.where(mask, A, 0)
    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A).sum(1)
    ids = group & 15
    same = (ids[:, None] == ids).to(J.dtype)
    is_first = torch.tril(same, -1).sum(1) == 0
    means = same @ J / (same @ mask.sum(1).to(J.dtype))
    return -means[is_first].sum() / is_first.sum()


def test_ids_of_prompts_whose_bits_are_read_have_a_bound():
    proof = upref.prove(prompts_by_their_last_bits, "dapo", rows=2, columns=1)
    assert proof, proof.reason
    assert [number for number, _ in proof.bounds] == [15]
