# SPDX-License-Identifier: Apache-2.0
"""The paper's plug-in claim, bit for bit, and the relations between the family's members."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import upref
from upref.registry import get
from upref.weights.batches import batch, grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("base", "hand"), [("grpo", "up_grpo"), ("dapo", "up_dapo"), ("gspo", "up_gspo")])
@pytest.mark.parametrize("suffix", ["", "_anchored"])
def test_up_of_base_is_the_hand_written_one_bit_for_bit(base, hand, suffix, dtype):
    plugged, written = (upref.up_anchored if suffix else upref.up)(get(base)), get(hand + suffix)
    for hp in ({}, {"c": 3.0}) if "c" in written.hyperparameters else ({},):
        b = batch(get(base), **hp)
        b = replace(b, **{k: getattr(b, k).to(dtype) for k in ("logp", "logp_old", "adv", "entropy")})
        assert torch.equal(plugged(b, **hp), written(b, **hp))
        assert torch.equal(grad(partial(plugged, **hp), b), grad(partial(written, **hp), b))
        assert not torch.equal(grad(partial(plugged, **hp), b), grad(partial(get(base), **hp), b))


@pytest.mark.parametrize("base", ["grpo", "dapo", "gspo", "sapo", "cispo", "gmpo"])
def test_up_changes_nothing_on_policy(base):
    """Not in the paper, and the whole point: all of UP's effect is off-policy drift."""
    o = get(base)
    b = batch(o)
    b = replace(b, logp=b.logp_old)
    torch.testing.assert_close(grad(upref.up(o), b), grad(o, b), rtol=1e-14, atol=0)


def test_anchored_differs_in_value_only():
    for name in ("up_dapo", "up_grpo", "up_gspo"):
        a, o = get(name + "_anchored"), get(name)
        b = batch(o)
        torch.testing.assert_close(grad(a, b), grad(o, b), rtol=1e-13, atol=1e-18)
        assert abs(a(b) - o(b)) > 0.1


def test_positive_branches_of_up_topr_and_flat_cispo_are_one():
    """w = A: UP+ = TOPR+ = REINFORCE, and CISPO's code with both bounds at 0."""
    r = torch.linspace(0.1, 9, 50, dtype=torch.float64)
    A = torch.full_like(r, 0.7)
    for name in ("up_dapo", "up_grpo", "up_gspo", "topr", "reinforce", "rloo"):
        assert torch.equal(get(name).weight(r, A), A)
    assert torch.equal(get("cispo_verl").weight(r, A, eps_low=0, eps_high=0), A)


def test_up_of_a_name_by_name():
    b = batch(get("sapo"))
    assert torch.equal(get("up(sapo)")(b), upref.up(get("sapo"))(b))
    assert get("up(up(dapo))").name == "up(up(dapo))"
    with pytest.raises(upref.InputError):
        get("up(nothing)")


def test_objectives_survive_pickling():
    import pickle

    for name in ("dapo", "up(sapo)", "up_anchored(gspo)"):
        o = pickle.loads(pickle.dumps(get(name)))
        assert o.name == name and torch.equal(o(batch(o)), get(name)(batch(get(name))))
