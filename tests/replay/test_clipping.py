# SPDX-License-Identifier: Apache-2.0
"""Every number on a batch made by hand."""

import math

import pytest
import torch

import upref
from upref.errors import InputError
from upref.replay import clipping


def made(ratios, advantages, dtype=torch.float64):
    """Return a batch of one response with these ratios and advantages, and one of a
    single token with A = 0.
    """
    log_r = torch.tensor(
        [[math.log(r) for r in ratios], [0.0] * len(ratios)], dtype=dtype
    )
    adv = torch.tensor([advantages, [0.0] * len(ratios)], dtype=dtype)
    mask = torch.ones_like(adv, dtype=torch.bool)
    mask[1, 1:] = False
    return upref.Rollouts(
        -3 + log_r.clamp(max=2.9), -3 - (log_r - 2.9).clamp(min=0), adv, mask
    )


B = made([2.0, 1.25, 0.5, 1.0, 2.0, 0.5, 5.0], [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -2.0])


def test_clip_fractions_by_side_and_sign():
    d = clipping(upref.get("dapo"), B, c=3.0)
    assert d["clip/pos_high"] == pytest.approx(1 / 4)  # r = 2 of A > 0
    assert d["clip/pos_low"] == 0
    assert d["clip/neg_low"] == pytest.approx(1 / 3)  # r = 0.5
    assert d["clip/neg_high"] == pytest.approx(1 / 3)  # r = 5 > c
    assert d["alive"] == pytest.approx(4 / 7)
    assert d["above_high"] == pytest.approx(1 / 4)


def test_up_keeps_alive_what_dapo_clips():
    assert clipping(upref.get("dapo"), B)["mass_above_high"] == 0
    d = clipping(upref.get("up_dapo"), B)
    # 4 tokens of A > 0 weigh 1 each, one of them at r = 2; A < 0: 2, 0 (r = 0.5 is
    # clipped) and 2 x 5
    assert d["mass_above_high"] == pytest.approx(1 / (4 + 2 + 0 + 10))
    assert d["clip/pos_high"] == 0 and d["alive"] == pytest.approx(6 / 7)


def test_overflow_is_reported():
    log_r = torch.tensor([[1000.0, 0.1, 0.1]])
    b = upref.Rollouts(
        torch.full((1, 3), -0.5),
        -0.5 - log_r,
        torch.tensor([[-1.0]]),
        torch.ones(1, 3, dtype=torch.bool),
    )
    assert clipping(upref.get("dapo_no_upper_clip"), b)["overflow"] == pytest.approx(
        1 / 3
    )


def test_sequence_level_counts_responses_by_their_own_ratio():
    b = made([2.0, 0.5], [1.0, 1.0])  # s = 1: inside, though both tokens are far out
    assert clipping(upref.get("gspo"), b)["alive"] == 1


def test_ratio_statistics():
    d = clipping(upref.get("dapo"), B)
    assert d["ratio/max"] == pytest.approx(5) and d["ratio/min"] == pytest.approx(0.5)
    assert d["ratio/mean"] == pytest.approx((2 + 1.25 + 0.5 + 1 + 2 + 0.5 + 5 + 1) / 8)
    assert d["kl_old"] == pytest.approx(-(math.log(1.25) + math.log(5)) / 8)


def test_trajectory_level_multiplies_the_ratios():
    d = clipping(upref.get("topr"), made([2.0, 3.0], [1.0, 1.0]))
    assert d["ratio/max"] == pytest.approx(6)


def test_a_weight_that_overflows_is_neither_alive_nor_silent():
    b = upref.Rollouts(
        torch.full((1, 3), -0.5), torch.tensor([[-100.5, -87.5, -0.5]]), torch.tensor([[1.0, 1e3, 1.0]]),
        torch.ones(1, 3, dtype=torch.bool),
    )  # fmt: skip
    d = clipping(upref.get("is_pg"), b)
    assert d["overflow"] == pytest.approx(2 / 3) and d["alive"] == pytest.approx(1 / 3)
    d = clipping(upref.get("up_dapo"), b)  # no ratio left: nothing overflows
    assert d["overflow"] == 0 and d["alive"] == 1


def test_what_is_no_objective_or_no_batch_is_one_sentence():
    with pytest.raises(InputError, match="takes an Objective"):
        clipping("dapo", B)
    with pytest.raises(InputError, match="Rollouts or a RecordedBatch, not NoneType"):
        clipping(upref.get("dapo"), None)
