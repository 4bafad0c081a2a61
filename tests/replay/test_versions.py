# SPDX-License-Identifier: Apache-2.0
"""Versions of tokens: responses that several weights sampled, one after the other."""

import numpy as np
import pytest
import torch

import upref
from upref.replay.batch import make_batch, merge
from upref.replay.series import measure_step, ratio_one
from upref.replay.zero import zero_mismatch

MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool)
OLD = np.array([[-1.0, -2.0, -1.5, -0.5], [-1.0, -0.25, -2.0, 0.0]])
VERSION = np.array([[3, 3, 5, 5], [5, 5, 5, 0]])
IDS = np.arange(8).reshape(2, 4)
SAMPLER = OLD - 0.25 * (VERSION == 3)


def batch(version=VERSION, **more):
    columns = {"ids": IDS, "mask": MASK, "old": OLD, "sampler": SAMPLER}
    return make_batch(columns | {"version": version} | more, file="run.npz", step=5)


def test_the_gap_is_known_for_each_version_of_tokens():
    # two tokens are two steps late, half of 0.25 squared each; five are of this step
    assert measure_step(batch(), 0).lags == {2: (2, 0.03125), 0: (5, 0.0)}


def test_a_version_of_responses_is_that_of_all_their_tokens():
    of_tokens = batch(np.array([[3, 3, 3, 3], [5, 5, 5, 9]]))
    of_responses = batch(np.array([3, 5]))
    assert torch.equal(of_tokens.lags()[MASK], of_responses.lags()[MASK])


def test_versions_of_tokens_and_of_responses_are_merged():
    both = merge([batch(), batch(np.array([3, 5]))])
    assert both.lags()[both.mask].tolist() == [2, 2, 0, 0, 0, 0, 0, 2, 2, 2, 2, 0, 0, 0]


def test_packed_versions_lie_where_their_tokens_lie():
    """Find the same lags of a packed batch and of the padded one."""
    flat = {
        "ids": IDS,
        "mask": MASK,
        "old": OLD,
        "sampler": SAMPLER,
        "version": VERSION,
    }
    packed = {name: x[MASK] for name, x in flat.items()}
    packed["offsets"] = np.array([0, 4, 7])
    found = make_batch(packed, file="run.npz", step=5)
    assert found.lags()[found.mask].tolist() == batch().lags()[MASK].tolist()


def test_tokens_of_this_step_alone_must_have_equal_bits():
    found = zero_mismatch(batch(now=OLD))
    assert found and found.tokens == 5


def test_a_ratio_of_one_on_late_tokens_says_how_late_they_are():
    late = batch(np.where(VERSION == 5, 4, VERSION), now=OLD)
    found = ratio_one(late)
    assert found is not None and found.cause == "ratio_one_of_versions"
    assert found.numbers == {"lag": 1, "most": 2}


def test_a_version_of_another_shape_is_refused():
    with pytest.raises(upref.InputError, match="version has shape"):
        batch(VERSION[:, :2])
