# SPDX-License-Identifier: Apache-2.0
"""A number of tokens that hides in a tensor of the loss's own: in a slice that is written,
in positions, in a shape, in a quotient. It is a bound of the proof, and there is no word of
every batch.
"""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import upref
from upref.proof import every_size
from upref.proof.compare import compare
from upref.proof.domain import Pattern
from upref.proof.subjects import gradient_of
from upref.user_code import read


def weighted(lp, old, A, mask, w):
    """Return DAPO with a weight for each token."""
    r = torch.where(mask, lp - old, 0).exp()
    A = torch.where(mask, A, 0)
    return -(w * torch.minimum(r * A, r.clamp(0.8, 1.28) * A)).sum() / mask.sum()


def positions(lp):
    return torch.arange(lp.shape[1])


# ---- places ----------------------------------------------------------------------------
def columns_written(lp, old, A, mask):
    w = torch.ones_like(A)
    w[:, 100:] = 0
    return weighted(lp, old, A, mask, w)


def rows_written(lp, old, A, mask):
    w = torch.ones(len(lp), 1)
    w[100:] = 0
    return weighted(lp, old, A, mask, w)


def row_of_the_mask_written(lp, old, A, mask):
    w = torch.ones_like(mask, dtype=lp.dtype)
    w[100:] = 0
    return weighted(lp, old, A, mask, w)


def last_columns_kept(lp, old, A, mask):
    w = torch.zeros_like(A)
    w[:, -100:] = 1
    return weighted(lp, old, A, mask, w)


def slice_zeroed(lp, old, A, mask):
    w = torch.ones_like(A)
    w[:, 100:].zero_()
    return weighted(lp, old, A, mask, w)


def written_in_a_view(lp, old, A, mask):
    w = torch.ones_like(A)
    part = w.t()[100:]
    part *= 0
    return weighted(lp, old, A, mask, w)


def places_filled(lp, old, A, mask):
    place = positions(lp)
    w = torch.ones_like(A).index_fill(1, place[place >= 100], 0.0)
    return weighted(lp, old, A, mask, w)


def below_a_diagonal(lp, old, A, mask):
    w = torch.ones(lp.shape[1], lp.shape[1]).tril(100)[-1:]
    return weighted(lp, old, A, mask, w)


def above_a_diagonal(lp, old, A, mask):
    T = lp.shape[1]
    w = 1 - torch.triu(torch.ones(T, T), diagonal=100)[:1]
    return weighted(lp, old, A, mask, w)


def narrowed(lp, old, A, mask):
    w = torch.zeros_like(A)
    w.narrow(1, 0, min(100, lp.shape[1])).fill_(1.0)
    return weighted(lp, old, A, mask, w)


def first_part_of_split(lp, old, A, mask):
    w = torch.zeros_like(A)
    w.split(100, 1)[0].fill_(1.0)
    return weighted(lp, old, A, mask, w)


def list_of_columns_cut(lp, old, A, mask):
    w = torch.zeros_like(A)
    for column in w.unbind(1)[:100]:
        column.fill_(1.0)
    return weighted(lp, old, A, mask, w)


def columns_counted_by_range(lp, old, A, mask):
    w = torch.zeros_like(A)
    for _, column in zip(range(100), w.unbind(1), strict=False):
        column.fill_(1.0)
    return weighted(lp, old, A, mask, w)


def columns_counted_by_islice(lp, old, A, mask):
    w = torch.zeros_like(A)
    for column in itertools.islice(w.unbind(1), 100):
        column.fill_(1.0)
    return weighted(lp, old, A, mask, w)


# ---- shapes ----------------------------------------------------------------------------
def made_of_100(lp, old, A, mask):
    w = torch.cat([torch.ones(100), torch.zeros(lp.shape[1])])[: lp.shape[1]]
    return weighted(lp, old, A, mask, w)


def made_new_of_100(lp, old, A, mask):
    w = torch.cat([lp.new_ones(1, 100), torch.zeros_like(lp[:1])], 1)
    return weighted(lp, old, A, mask, w[:, : lp.shape[1]])


def padded(lp, old, A, mask):
    w = F.pad(torch.ones(100), (0, lp.shape[1]))[: lp.shape[1]]
    return weighted(lp, old, A, mask, w)


def padded_by_100(lp, old, A, mask):
    w = F.pad(lp.new_ones(1, 0), (0, 100), value=1.0)
    w = F.pad(w, (0, lp.shape[1]))[:, : lp.shape[1]]
    return weighted(lp, old, A, mask, w)


def list_times_100(lp, old, A, mask):
    w = ([1.0] * 100 + [0.0] * lp.shape[1])[: lp.shape[1]]
    return weighted(lp, old, A, mask, torch.tensor(w))


def expanded_to_100(lp, old, A, mask):
    w = torch.cat([lp.new_ones(1).expand(100), lp.new_zeros(lp.shape[1])])
    return weighted(lp, old, A, mask, w[: lp.shape[1]])


def repeated_100_times(lp, old, A, mask):
    w = torch.cat([lp.new_ones(1).repeat(100), lp.new_zeros(lp.shape[1])])
    return weighted(lp, old, A, mask, w[: lp.shape[1]])


# ---- positions that are compared -------------------------------------------------------
def position_below_100(lp, old, A, mask):
    return weighted(lp, old, A, mask, positions(lp) < 100)


def position_below_a_tensor(lp, old, A, mask):
    limit = torch.tensor(100)
    return weighted(lp, old, A, mask, positions(lp) < limit)


def position_minus_100(lp, old, A, mask):
    w = (positions(lp) - 100 < 0).double()
    return weighted(lp, old, A, mask, w)


def position_minus_a_tensor(lp, old, A, mask):
    gap = positions(lp) - torch.tensor(100)
    return weighted(lp, old, A, mask, gap < 0)


def minus_position(lp, old, A, mask):
    return weighted(lp, old, A, mask, -positions(lp) > -100)


def share_of_100(lp, old, A, mask):
    share = positions(lp) / 100
    return weighted(lp, old, A, mask, share < 1)


def hundredths(lp, old, A, mask):
    share = (positions(lp) + 1) * 0.01
    return weighted(lp, old, A, mask, share <= 1)


def floor_of_hundredths(lp, old, A, mask):
    return weighted(lp, old, A, mask, 1 - torch.floor((positions(lp) + 1) / 101))


def integer_of_hundredths(lp, old, A, mask):
    w = 1 - ((positions(lp) + 1) / 101).long()
    return weighted(lp, old, A, mask, w)


def divided_and_rounded(lp, old, A, mask):
    w = 1 - positions(lp).div(100, rounding_mode="floor")
    return weighted(lp, old, A, mask, w)


def whole_quotient(lp, old, A, mask):
    return weighted(lp, old, A, mask, 1 - positions(lp) // 100)


def relu_of_a_gap(lp, old, A, mask):
    late = F.relu(positions(lp).double() - 100)
    return weighted(lp, old, A, mask, 1 - late)


def sigmoid_of_a_gap(lp, old, A, mask):
    return weighted(lp, old, A, mask, torch.sigmoid(1000.0 * (100 - positions(lp))))


def sign_of_a_gap(lp, old, A, mask):
    gap = torch.tensor(100.5) - positions(lp)
    return weighted(lp, old, A, mask, gap.sign())


def smaller_of_two(lp, old, A, mask):
    place = positions(lp) + 1
    w = torch.minimum(place, torch.tensor(100)) / place
    return weighted(lp, old, A, mask, w)


def sum_of_hundredths(lp, old, A, mask):
    w = torch.full((lp.shape[1],), 0.01).cumsum(0) < 1
    return weighted(lp, old, A, mask, w)


def searched(lp, old, A, mask):
    w = 1 - torch.bucketize(positions(lp), torch.tensor([100]))
    return weighted(lp, old, A, mask, w)


def evenly_spaced(lp, old, A, mask):
    T = lp.shape[1]
    w = torch.linspace(1, T, T) <= 100
    return weighted(lp, old, A, mask, w)


def array_of_numpy(lp, old, A, mask):
    place = np.arange(lp.shape[1])
    w = torch.from_numpy((place < 100).astype(float))
    return weighted(lp, old, A, mask, w)


def array_written(lp, old, A, mask):
    w = np.ones(lp.shape[1])
    w[100:] = 0
    return weighted(lp, old, A, mask, torch.from_numpy(w))


# ---- counts ----------------------------------------------------------------------------
def count_of_hundredths(lp, old, A, mask):
    w = torch.where(mask.sum() * 0.01 > 1, 2.0, 1.0)
    return weighted(lp, old, A, mask, w)


def one_over_a_count(lp, old, A, mask):
    w = torch.where(1 / mask.sum() < 0.01, 2.0, 1.0)
    return weighted(lp, old, A, mask, w)


def size_over_100(lp, old, A, mask):
    share = lp.shape[1] / 100
    return weighted(lp, old, A, mask, 2.0 if share > 1 else 1.0)


def hundredth_of_a_size(lp, old, A, mask):
    share = lp.shape[1] * 0.01
    return weighted(lp, old, A, mask, 2.0 if share > 1 else 1.0)


def hundred_over_a_size(lp, old, A, mask):
    room = 100 / lp.shape[1]
    return weighted(lp, old, A, mask, 2.0 if room < 1 else 1.0)


def hundred_minus_a_size(lp, old, A, mask):
    room = 100 - lp.shape[1]
    return weighted(lp, old, A, mask, 2.0 if room < 0 else 1.0)


HELPERS = ("weighted", "positions")
HIDDEN = [
    f
    for name, f in list(globals().items())
    if getattr(f, "__code__", None) and f.__module__ == __name__ and name not in HELPERS
]


ONE_BATCH = [Pattern(((True, True),))]


def compared(loss, among):
    """Return the comparison of the loss with DAPO on few batches."""
    dapo = upref.get("dapo")
    read_loss, reference = read(loss, dapo, {}), read(dapo, dapo, {})
    given = gradient_of(read_loss), gradient_of(reference)
    return compare(*given, among, False, (), 20.0)


@pytest.mark.parametrize("loss", HIDDEN, ids=lambda f: f.__name__)
def test_its_number_is_a_bound(loss):
    found = compared(loss, ONE_BATCH)
    assert found.status == "proved", found.reason
    numbers = [bound.number for bound in found.bounds]
    assert any(50 <= number <= 200 or number == 100_000 for number in numbers), numbers


# ---- right losses without such a number ------------------------------------------------
def with_guards(lp, old, A, mask):
    """Return DAPO's loss with the guards that people add: masked_fill, full_like, an
    epsilon, a clamp.
    """
    r = torch.where(mask, lp - old, 0.0).exp()
    A = A.masked_fill(~mask, 0.0)
    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
    J = torch.where(mask, J, torch.full_like(J, 0.0))
    return -J.sum() / (mask.sum() + 1e-12).clamp(min=1e-6)


def row_after_row(lp, old, A, mask):
    total = lp.new_zeros(())
    for i in range(len(lp)):
        total = total + with_guards(lp[i], old[i], A[i], mask[i]) * mask[i].sum()
    return total / mask.float().sum()


def up_to_the_last_token(lp, old, A, mask):
    place = torch.arange(lp.shape[1]).expand_as(mask)
    last = torch.where(mask, place, -1).max() + 1
    inputs = (x[:, :last] for x in (lp, old, A, mask))
    return with_guards(*inputs)


TWO_ROWS = [Pattern(((True, True), (True, False)))]


@pytest.mark.parametrize(
    "loss", [with_guards, row_after_row, up_to_the_last_token], ids=lambda f: f.__name__
)
def test_guards_and_places_of_the_batch_are_no_bounds(loss):
    found = compared(loss, TWO_ROWS)
    assert found.status == "proved", found.reason
    assert not found.bounds


@pytest.mark.parametrize("loss", HIDDEN, ids=lambda f: f.__name__)
def test_it_is_not_proved_for_every_size(loss):
    dapo = upref.get("dapo")
    read_loss = read(loss, dapo, {})

    def function(batch, scale):
        return every_size.gradient(read_loss, batch, scale)

    def reference(batch, scale):
        return every_size.gradient_of_objective(dapo, {}, batch, scale)

    assert every_size.why_not(function, reference, False, frozenset())
