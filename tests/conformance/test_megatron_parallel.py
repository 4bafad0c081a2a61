# SPDX-License-Identifier: Apache-2.0
"""Megatron's tensor and pipeline parallelism 2 give the gradient of one process."""

import os

import pytest

from tests.conformance.megatron_parallel import WAYS, rank_errors
from tests.conformance.megatron_ranks import measure
from upref.verify.group import on_loopback


@pytest.mark.nightly
def test_two_ranks_that_share_a_layer_or_a_stage_give_the_gradient_of_one(monkeypatch):
    """A loss that is divided by the micro-batches twice is found, as it should be."""
    pytest.importorskip(
        "megatron.core", reason="pip install --no-deps megatron-core==0.16.1 einops"
    )
    for name, value in on_loopback().items():
        monkeypatch.setitem(os.environ, name, value)
    errors = measure(rank_errors)
    assert list(errors) == list(WAYS)
    assert errors["tensor parallel 2"] < 1e-5
    assert errors["pipeline parallel 2"] < 1e-6
    assert errors["pipeline parallel 2, divided twice"] == pytest.approx(
        2 / 3, abs=1e-4
    )
