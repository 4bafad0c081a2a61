# SPDX-License-Identifier: Apache-2.0
"""A proof in the lowest torch that pyproject.toml allows, whose operators have fewer
methods.
"""

import pytest
import torch

import upref
from upref.proof.trace import can_decompose

ATEN = torch.ops.aten


def test_it_is_told_which_operators_are_composed_of_others():
    assert can_decompose(ATEN.to.dtype) and can_decompose(ATEN.reshape.default)
    assert not can_decompose(ATEN.expand.default)
    assert not can_decompose(ATEN.mul.Tensor)


def test_a_loss_is_proved_without_the_method_that_old_versions_lack(monkeypatch):
    monkeypatch.delattr(torch._ops.OpOverload, "_can_decompose", raising=False)
    pytest.importorskip("z3", reason='`pip install ".[prove]"` installs it')

    def loss(logp, logp_old, adv, mask):
        r = torch.where(mask, logp - logp_old, 0).exp()
        A = torch.where(mask, adv, 0)
        each = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
        return -each.sum() / mask.sum()

    assert upref.prove(loss, "ppo_clip", rows=1)
