# SPDX-License-Identifier: Apache-2.0
"""The blind spots of tests/support/zoo/blind_spots.py: wrong on unusual inputs is rejected,
right in unusual ways passes.
"""

from dataclasses import replace

import pytest
import torch

import upref
from tests.support.zoo import blind_spots
from upref.verify.render import describe_example
from upref.verify.shrink import make_example
from upref.weights.batches import FAR, breakpoints, fill_padding, interval
from upref.weights.curve import of_objective
from upref.weights.stress import AXES, LARGE, stress_batch


@pytest.mark.parametrize("name", ["dapo", "gspo", "topr"])
def test_an_axis_holds_what_it_says(name):
    o = upref.get(name)
    every = {axis: stress_batch(axis, o) for axis in AXES}
    live = lambda axis, x: x[every[axis].mask]
    assert (
        LARGE in AXES["all at once"].words and every["all at once"].mask.sum() > 65_504
    )
    assert every["lengths"].mask.sum(1).max() == 520
    assert live("advantages", every["advantages"].adv).abs().max() == 40
    assert live("certain tokens", every["certain tokens"].logp_old).max() == 0


@pytest.mark.parametrize("name", ["dapo", "gspo", "m2po", "tis(dapo)"])
def test_a_batch_of_unusual_inputs_is_one_that_rollouts_takes(name):
    o = upref.get(name)
    for axis in AXES:
        b = stress_batch(axis, o)
        filled = fill_padding(replace(b))  # which looks at every number
        for field, x in filled.tensors().items():
            assert torch.equal(x, getattr(b, field)), (axis, field)


def test_bounds_found_together_are_those_found_one_by_one():
    for name in ("dapo", "bandpo_tv", "aspo_code"):
        o = upref.get(name)
        curve = of_objective(o)
        found = breakpoints(o, -1.0, 0.3)
        alone = [j.r for j in curve.jumps(-1.0, 0.3, FAR) if j.r * 0.3 < 1]
        assert found and set(alone) <= set(found)


def test_who_answers_otherwise_each_time_is_asked_nothing_else():
    spot = next(s for s in blind_spots.CAUSES if s.function.__name__ == "stateful")
    report = upref.check(spot.function, spot.objective)
    assert [f.oracle for f in report.failures] == ["determinism"]


def test_the_report_says_what_was_covered():
    report = upref.check(upref.get("dapo"), "dapo")
    (said,) = [c for c in report.assumptions if c.startswith("covered:")]
    assert "65,504" in said and "π_old" in said and "2^40" in said


@pytest.mark.parametrize("spot", blind_spots.RIGHT, ids=str)
def test_identify_agrees_with_check(spot):
    """What check accepts is named so, or as what has the same gradient: partly in
    float32 or not.
    """
    identity = upref.identify(spot.function)
    assert identity and not identity.why, str(identity)
    match = next(m for m in identity.matches if m.name == spot.objective)
    expected = upref.get(spot.objective).resolve(spot.hp)
    for k, v in match.hp.items():
        assert v == expected[k] or v == pytest.approx(expected[k], abs=2e-6), (
            f"{k} = {v}, not {expected[k]}"
        )


def test_no_batch_is_printed_that_nobody_reads():
    b = stress_batch("lengths", upref.get("dapo"))
    text = describe_example(make_example(b))
    assert "too many to print" in text and len(text) < 200


def test_a_row_without_tokens_that_makes_nan_is_noted():
    """Outside what the papers define, and many batches are padded by such rows."""
    report = upref.check(blind_spots.empty_row_makes_nan, "grpo")
    assert report and any(
        "masked throughout" in f.regime and f.found == "NaN" for f in report.notes
    ), str(report)


def test_an_interval_of_one_ratio_is_said_to_be_one():
    assert interval(1.0, 1.0) == "r = 1 alone"
    assert interval(1.0, 1.0 + 1e-9) == "1 < r <= 1.000000001"


def test_objectives_of_the_same_bounds_share_their_batches():
    """A batch depends on the level and on the bounds alone; what most of it is, on
    neither.
    """
    one, other, wide = (
        stress_batch("masks", upref.get(name)) for name in ("grpo", "ppo_clip", "gspo")
    )
    assert (
        one is other
        and torch.equal(one.mask, wide.mask)
        and not torch.equal(one.logp, wide.logp)
    )
