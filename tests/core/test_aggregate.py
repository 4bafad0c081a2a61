# SPDX-License-Identifier: Apache-2.0
"""Each aggregation against its formula in exact rationals, and under every split."""

import math
from fractions import Fraction as F
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from upref.aggregation import AGGREGATIONS, Totals, aggregate
from upref.errors import InputError
from upref.ops import mean_t
from upref.rollouts import Rollouts

LENGTHS = [3, 1, 4, 2, 2]
GROUP = [7, 9, 7, 9, 7]
X = [[F(i * 5 + t * t - 3, 7) for t in range(n)] for i, n in enumerate(LENGTHS)]
L = 6


def formula(agg: str) -> F:
    """Return the aggregation of X in exact rationals, by its formula."""
    if agg == "token-sum":
        return sum(map(sum, X))
    if agg in ("token-mean", "kept-mean"):
        return sum(map(sum, X)) / sum(LENGTHS)
    if agg == "group-token-mean":
        means = []
        for g in (7, 9):
            responses = [i for i in range(5) if GROUP[i] == g]
            total = sum(sum(X[i]) for i in responses)
            means.append(total / sum(LENGTHS[i] for i in responses))
        return sum(means) / 2
    if agg == "seq-mean-token-mean":
        return sum(sum(x) / len(x) for x in X) / 5
    total = sum(map(sum, X)) / 5
    return total / L if agg.endswith("norm") else total


def padded():
    """Return X as a tensor [5, 4] with NaN in the padding, and its mask."""
    x, mask = (
        torch.full((5, 4), float("nan"), dtype=torch.float64),
        torch.zeros(5, 4, dtype=torch.bool),
    )
    for i, row in enumerate(X):
        x[i, : len(row)] = torch.tensor([float(v) for v in row], dtype=torch.float64)
        mask[i, : len(row)] = True
    return x, mask


@pytest.mark.parametrize("agg", [a for a in AGGREGATIONS if a != "seq-mean"])
def test_formula_in_exact_rationals(agg):
    x, mask = padded()
    assert aggregate(
        x, mask, agg, torch.tensor(GROUP), length=L
    ).item() == pytest.approx(float(formula(agg)), abs=1e-15)


def test_seq_mean_takes_one_number_per_response():
    x, mask = padded()
    per_row = mean_t(x, mask)
    assert aggregate(per_row, mask, "seq-mean").item() == pytest.approx(
        float(formula("seq-mean-token-mean")), abs=1e-15
    )


def test_without_groups_the_batch_is_one_group():
    x, mask = padded()
    assert aggregate(x, mask, "group-token-mean") == aggregate(x, mask, "token-mean")
    assert aggregate(x, mask, "group-token-mean", torch.tensor(GROUP)) != aggregate(
        x, mask, "token-mean"
    )


@pytest.mark.parametrize("agg", [a for a in AGGREGATIONS if a != "seq-mean"])
@given(cuts=st.sets(st.integers(1, 4)))
def test_any_split_adds_up(agg, cuts):
    """Micro-batches, or ranks whose gradients are summed: same Totals, parts add up."""
    x, mask = padded()
    group = torch.tensor(GROUP)
    totals, whole = Totals.of(mask, group), aggregate(x, mask, agg, group, length=L)
    edges = [0, *sorted(cuts), 5]
    parts = 0
    for a, b in pairwise(edges):
        i = torch.arange(a, b)
        parts += aggregate(x[i], mask[i], agg, group[i], totals.rows(i), length=L)
    assert parts.item() == pytest.approx(whole.item(), abs=1e-14)


def test_the_naive_split_does_not_add_up():
    """Why Totals exists: per-micro-batch token means, averaged, are another objective
    (TRL #3021, verl #906).
    """
    x, mask = padded()
    naive = (
        aggregate(x[:2], mask[:2], "token-mean")
        + aggregate(x[2:], mask[2:], "token-mean")
    ) / 2
    assert abs(naive - aggregate(x, mask, "token-mean")) > 0.1


def test_half_precision_accumulates_in_float32():
    x, mask = (
        torch.ones(64, 2048, dtype=torch.float16),
        torch.ones(64, 2048, dtype=torch.bool),
    )
    J = aggregate(x, mask, "seq-mean-token-sum")
    assert J.dtype == torch.float32 and J == 2048
    assert aggregate(x, mask, "token-mean") == 1


def test_errors():
    x, mask = padded()
    with pytest.raises(InputError, match="unknown aggregation 'mean'"):
        aggregate(x, mask, "mean")
    with pytest.raises(InputError, match="fixed length"):
        aggregate(x, mask, "seq-mean-token-sum-norm")
    for length in (0, -3, math.nan, "a"):
        with pytest.raises(InputError, match="length must be a number above 0"):
            aggregate(x, mask, "seq-mean-token-sum-norm", length=length)


def test_split_refuses_nonsense():
    x, mask = padded()
    b = Rollouts(-x.abs(), -x.abs(), x, mask, torch.tensor(GROUP))
    for n in (0, -1):
        with pytest.raises(InputError, match="from 1 to 64"):
            b.split(n)
    assert len(b.split(9)) == 5


@pytest.mark.parametrize(
    "name", ["dapo", "gspo", "gmpo", "topr", "m2po", "up_gspo_anchored"]
)
def test_a_fully_masked_response_adds_nothing(name):
    """Whatever it holds: a framework pads with such rows; they count in B, as in verl's
    global_batch_size.
    """
    from upref.registry import get

    lp, old = (
        torch.tensor([[-1.0, -2.0], [9.0, float("nan")]]),
        torch.tensor([[-1.2, -1.9], [float("inf"), 0.0]]),
    )
    A, mask = torch.tensor([[1.0], [5.0]]), torch.tensor([[True, True], [False, False]])
    lp.requires_grad_()
    J = get(name).J(lp, old, A, mask)
    J.backward()
    alone = get(name).J(
        lp[:1], old[:1], A[:1], mask[:1], totals=Totals.of(mask).rows(torch.arange(1))
    )
    assert J == alone and (lp.grad[1] == 0).all() and lp.grad.isfinite().all()


def test_two_ranks_that_share_a_group():
    """Each knows its own rows; lengths and groups are gathered, and gradients are
    summed.
    """
    from upref.registry import get

    x, mask = padded()
    group, lp = torch.tensor(GROUP), -x.abs()
    ranks = torch.tensor([0, 2, 4]), torch.tensor([1, 3])
    gathered = (
        torch.cat([mask[i].sum(-1) for i in ranks]),
        torch.cat([group[i] for i in ranks]),
    )
    for name in ("dapo", "grpo", "gspo"):
        adv = torch.ones(5, 1, dtype=torch.float64)
        whole = get(name)(Rollouts(lp, lp - 0.1, adv, mask, group))
        totals, parts, start = Totals.of_lengths(*gathered), 0, 0
        for i in ranks:
            mine = totals.rows(torch.arange(start, start + len(i)))
            parts += get(name)(
                Rollouts(lp[i], lp[i] - 0.1, adv[i], mask[i], group[i], totals=mine)
            )
            start += len(i)
        assert parts.item() == pytest.approx(whole.item(), abs=1e-14)
