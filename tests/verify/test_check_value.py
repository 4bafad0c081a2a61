# SPDX-License-Identifier: Apache-2.0
"""`upref.check_value` on losses of critics that are right and wrong."""

import pytest
import torch

import upref
from tests.support.cases import critics
from upref import critic


def ids(x):
    return getattr(x, "__name__", None)


@pytest.mark.parametrize(("loss", "name", "agg"), critics.RIGHT, ids=ids)
def test_a_right_loss_is_accepted(loss, name, agg):
    report = upref.check_value(loss, name, agg=agg)
    assert report, str(report)


@pytest.mark.parametrize(("loss", "name", "fault_id"), critics.WRONG, ids=ids)
def test_a_wrong_loss_fails_with_its_cause(loss, name, fault_id):
    report = upref.check_value(loss, name)
    assert not report
    assert report.failures[0].fault_ids == (fault_id,), str(report)


def test_a_clip_that_nothing_reads_is_found():
    (failure,) = upref.check_value(critics.clip_unused, "clipped").failures
    assert failure.oracle == "settings" and "clip = 0.5" in failure.about


def test_the_factor_and_the_clip_are_found_or_held_to():
    report = upref.check_value(critics.as_in_rsl_rl, "clipped")
    assert report.hp == {"clip": 0.2, "scale": 1.0}
    assert not upref.check_value(critics.as_in_rsl_rl, "clipped", scale=0.5)
    assert upref.check_value(critics.ValueLoss(0.3), "clipped").hp["clip"] == 0.3
    assert not upref.check_value(critics.ValueLoss(0.3), "clipped", clip=0.2)
    assert upref.check_value(critics.tripled, "clipped", scale=1.5)


def test_what_cannot_be_read_is_one_sentence():
    with pytest.raises(upref.InputError, match="no argument is called old_values"):
        upref.check_value(critics.squared, "clipped")
    with pytest.raises(upref.InputError, match="choose one of mse, clipped"):
        upref.check_value(critics.squared, "ppo")
    with pytest.raises(upref.InputError, match="what is foo"):
        upref.check_value(lambda values, returns, foo: values.sum(), "mse")


def as_in_mappo(values, value_preds_batch, return_batch, active_masks_batch, clip=0.2):
    """Return the clipped loss, whose old values are called predictions."""
    return critics.of_tokens(
        values, value_preds_batch, return_batch, active_masks_batch, clip
    )


def as_in_rllib(values, vf_preds, value_targets, mask, vf_clip_param=0.2):
    """Return the clipped loss, whose old values are called predictions."""
    return critics.of_tokens(values, vf_preds, value_targets, mask, vf_clip_param)


@pytest.mark.parametrize("loss", [as_in_mappo, as_in_rllib])
@pytest.mark.parametrize("name", ["clipped", "mse"])
def test_predicted_values_may_be_the_old_ones(loss, name):
    with pytest.raises(upref.InputError, match="cannot tell which of v"):
        upref.check_value(loss, name)


def test_a_wrong_loss_of_predictions_that_are_new_by_name_fails():
    def loss(new_value_preds, old_value_preds, returns, mask, clip=0.2):
        return critics.smaller_error(
            new_value_preds, old_value_preds, returns, mask, clip
        )

    (failure,) = upref.check_value(loss, "clipped").failures
    assert failure.fault_ids == ("value-minimum",)


# ---- the reference -------------------------------------------------------------------
def one(values, old, returns, **settings):
    """Return the loss and its gradient of single tokens."""
    V = torch.tensor([values], dtype=torch.float64, requires_grad=True)
    R, before = (torch.tensor([x], dtype=torch.float64) for x in (returns, old))
    loss = critic.clipped(V, R, before, **settings)
    (gradient,) = torch.autograd.grad(loss.sum(), V)
    return loss[0].tolist(), gradient[0].tolist()


def test_a_value_beyond_the_clip_is_only_led_back():
    """V_old = 0, ε = 0.2, V = 0.5: towards R = 2 it has moved enough, from R = -1 it is
    led back, and within the clip nothing is clipped.
    """
    loss, gradient = one([0.5, 0.5, 0.1], [0.0] * 3, [2.0, -1.0, 2.0])
    # (0.2 - 2)² / 2; (0.5 + 1)² / 2; (0.1 - 2)² / 2
    assert loss == pytest.approx([1.62, 1.125, 1.805])
    assert gradient == pytest.approx([0.0, 1.5, -1.9])


def test_a_wide_clip_is_mse():
    V, R, old = torch.randn(
        3, 4, 5, generator=torch.Generator().manual_seed(0)
    ).double()
    torch.testing.assert_close(critic.clipped(V, R, old, clip=1e9), critic.mse(V, R))
    for bad in (-1, True, "x"):
        with pytest.raises(upref.InputError, match="clip must be"):
            critic.clipped(V, R, old, clip=bad)
    with pytest.raises(upref.InputError, match="of one shape"):
        critic.mse(V, R[:1])
