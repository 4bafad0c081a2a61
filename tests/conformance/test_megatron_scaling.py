# SPDX-License-Identifier: Apache-2.0
"""Megatron's loss scaling under context parallelism 2: two of three ways to return a
loss give the whole gradient.
"""

import os

import pytest

from tests.conformance.megatron_ranks import measure
from tests.conformance.megatron_scaling import WAYS, rank_errors
from upref.verify.group import on_loopback


@pytest.mark.nightly
def test_the_scaling_of_a_loss_under_context_parallelism(monkeypatch):
    """Three values without `calculate_per_token_loss` divide each rank's sum by that
    rank's own tokens.
    """
    pytest.importorskip(
        "megatron.core", reason="pip install --no-deps megatron-core==0.16.1 einops"
    )
    for name, value in on_loopback().items():
        monkeypatch.setitem(os.environ, name, value)
    errors = measure(rank_errors)
    assert list(errors) == list(WAYS)
    assert errors["two values"] < 2e-5
    assert errors["three values, per token"] < 2e-5
    assert errors["three values"] > 0.1
