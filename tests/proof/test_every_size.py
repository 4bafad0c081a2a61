# SPDX-License-Identifier: Apache-2.0
"""A proof for every number of rows and columns: right losses have it, and no loss that
treats sizes or positions apart does.
"""

import pytest
import torch

import upref
from tests.support.daily import daily


def terms(lp, old, A, high=1.28):
    r = (lp - old).exp()
    return torch.minimum(r * A, r.clamp(0.8, high) * A)


def mean(J, mask):
    return -(J * mask).sum() / mask.sum()


def lengths(mask):
    return mask.sum(1, keepdim=True)


# ---- right ones ------------------------------------------------------------------------
def token_mean(lp, old, A, mask):
    return mean(terms(lp, old, A), mask)


def with_where(lp, old, A, mask):
    J = torch.where(mask, terms(lp, old, A), 0)
    return -J.sum(-1).sum() / mask.float().sum().clamp(min=1)


def mean_of_lengths(lp, old, A, mask):
    """Return DAPO's loss as a mean over responses, each divided by the mean length: it
    is the mean over tokens.
    """
    rows = (terms(lp, old, A) * mask).sum(1) / mask.sum(1).double().mean()
    return -rows.mean()


def flat(lp, old, A, mask):
    return -(terms(lp, old, A).reshape(-1) * mask.flatten()).sum() / mask.sum()


def sequence_mean(lp, old, A, mask):
    rows = (terms(lp, old, A, 1.2) * mask).sum(-1) / mask.sum(-1)
    return -rows.mean()


RIGHT = [
    (token_mean, "dapo"),
    (with_where, "dapo"),
    (mean_of_lengths, "dapo"),
    (flat, "dapo"),
    (sequence_mean, "grpo"),
]


@pytest.mark.parametrize(
    ("loss", "name"), RIGHT, ids=lambda x: getattr(x, "__name__", x)
)
def test_it_is_proved_for_every_size(loss, name):
    proof = upref.prove(loss, name, rows=1, columns=1)
    assert proof and proof.every_size, proof.sizes_open
    assert "every batch" in str(proof)


# ---- those that are another loss on some size ----------------------------------------
def exact_length(lp, old, A, mask):
    return mean(terms(lp, old, A) * (lengths(mask) != 256), mask)


def exact_length_as_truth(lp, old, A, mask):
    keep = (lengths(mask) - 256).bool()
    return mean(torch.where(keep, terms(lp, old, A), 0), mask)


def exact_length_by_not(lp, old, A, mask):
    keep = torch.logical_not(torch.logical_not(lengths(mask) - 256))
    return mean(terms(lp, old, A) * keep, mask)


def exact_length_by_a_power(lp, old, A, mask):
    gap = (lengths(mask) - 256.0).abs()
    return mean(terms(lp, old, A) * (1 - torch.tensor(0.0) ** gap), mask)


def exact_length_by_a_quotient(lp, old, A, mask):
    gap = lengths(mask) - 256.0
    return mean(terms(lp, old, A) * torch.nan_to_num(gap / gap), mask)


def exact_length_by_two_maxima(lp, old, A, mask):
    gap = lengths(mask) - 256.0
    return mean(terms(lp, old, A) * (torch.maximum(gap, -gap) != 0), mask)


def exact_length_by_a_bump(lp, old, A, mask):
    bump = torch.relu(1 - (lengths(mask) - 256.0).abs())
    return mean(terms(lp, old, A) * (1 - bump), mask)


def single_tokens_dropped(lp, old, A, mask):
    return mean(terms(lp, old, A) * (lengths(mask) > 1), mask)


def many_tokens(lp, old, A, mask):
    return token_mean(lp, old, A, mask) * torch.where(mask.sum() >= 1000, 2, 1)


def many_clipped(lp, old, A, mask):
    clipped = ((lp - old).exp() > 1.28).double().sum()
    return token_mean(lp, old, A, mask) * torch.where(clipped == 300, 2, 1)


def divisor_clamped(lp, old, A, mask):
    return -(terms(lp, old, A) * mask).sum() / mask.sum().clamp(max=4000)


def padded_mean(lp, old, A, mask):
    J = terms(lp, old, A) * mask
    return -J.mean() * (mask.sum() / mask.sum()) * lp.numel() / mask.sum()


def cut(lp, old, A, mask):
    return token_mean(lp[:, :1024], old[:, :1024], A[:, :1024], mask[:, :1024])


def squeezed(lp, old, A, mask):
    return mean(terms(lp, old, A).squeeze(), mask)


def positions(lp, old, A, mask):
    near = torch.arange(lp.shape[1]) < 5000
    return mean(terms(lp, old, A) * near, mask)


def running_count(lp, old, A, mask):
    return mean(terms(lp, old, A) * (mask.cumsum(1) <= 512), mask)


def transposed(lp, old, A, mask):
    J = terms(lp, old, A)
    return -(J.t().flatten() * mask.t().flatten()).sum() / mask.sum()


def turned_twice(lp, old, A, mask):
    return mean(terms(lp, old, A.roll(7, 1).roll(-7, 1)), mask)


def spread(lp, old, A, mask):
    return mean(terms(lp, old, A), mask) * (1 + 0 * A.std())


def share_of_the_largest(lp, old, A, mask):
    kept = A.flatten().topk(max(1, A.numel() // 100)).values.sum()
    return mean(terms(lp, old, A), mask) + 0 * kept


def size_by_torch(lp, old, A, mask):
    return token_mean(lp, old, A, mask) * (2 if torch.numel(lp) > 9999 else 1)


def size_by_strides(lp, old, A, mask):
    return token_mean(lp, old, A, mask) * (2 if lp.stride(0) > 9999 else 1)


def size_by_bytes(lp, old, A, mask):
    return token_mean(lp, old, A, mask) * (2 if lp.nbytes > 99999 else 1)


def size_by_an_error(lp, old, A, mask):
    """Return DAPO's loss, doubled in batches of more than 5000 rows, which an
    IndexError tells.
    """
    try:
        lp[5000]
    except IndexError:
        return token_mean(lp, old, A, mask)
    return 2 * token_mean(lp, old, A, mask)


def shape_by_an_error(lp, old, A, mask):
    """Return DAPO's loss, doubled where it has a multiple of 512 slots, which a
    RuntimeError tells.
    """
    try:
        lp.view(-1, 512)
    except RuntimeError:
        return token_mean(lp, old, A, mask)
    return 2 * token_mean(lp, old, A, mask)


def short_counts(lp, old, A, mask):
    return -(terms(lp, old, A) * mask).sum() / mask.bfloat16().sum().double()


def first_column_changed(lp, old, A, mask):
    w = torch.ones_like(A)
    w[:, 0] = 2.0
    return -(terms(lp, old, A) * mask).sum() / mask.sum() * (w.sum() / w.sum())


def last_row_changed(lp, old, A, mask):
    w = torch.ones_like(A)
    w[-1].fill_(2.0)
    return mean(terms(lp, old, A), mask) + 0 * w.sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (2 if g.stride(0) > 9999 else 1)


def backward_by_size(lp, old, A, mask):
    return token_mean(Doubled.apply(lp), old, A, mask)


OTHERS = (
    "terms mean lengths token_mean with_where mean_of_lengths flat sequence_mean "
    "of_sequences"
)
SOME_SIZES = [
    f
    for name, f in list(globals().items())
    if getattr(f, "__code__", None) and name not in OTHERS.split()
    if f.__code__.co_varnames[:2] == ("lp", "old")
]


@pytest.mark.parametrize("loss", daily(SOME_SIZES, 2), ids=lambda f: f.__name__)
def test_it_is_not_proved_for_every_size(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert not proof.every_size
    assert "every batch" not in str(proof)
