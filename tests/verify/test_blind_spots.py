# SPDX-License-Identifier: Apache-2.0
"""The blind spots of tests/support/zoo/blind_spots.py: wrong on unusual inputs is rejected,
right in unusual ways passes.
"""

from dataclasses import replace

import pytest
import torch

import upref
from tests.fifth_set import aimed_losses
from tests.support.zoo import blind_spots, numerics
from upref.user_code import read
from upref.verify.extent import bound_of_token
from upref.verify.measure import make_case
from upref.verify.render import describe_example
from upref.verify.shrink import make_example
from upref.weights.batches import FAR_RATIOS, breakpoints, fill_padding, interval_words
from upref.weights.black_box import single_token_batch
from upref.weights.curve import make_curve_of_objective
from upref.weights.stress import AXES, LARGE, stress_batch


@pytest.mark.parametrize("name", ["dapo", "gspo", "topr"])
def test_an_axis_holds_what_it_says(name):
    """The batches of the axes have the lengths, widths, advantages and certain tokens
    that their words name.
    """
    o = upref.get(name)
    every = {axis: stress_batch(axis, o) for axis in AXES}

    def live(axis, x):
        """Return the numbers of the tokens that train."""
        return x[every[axis].mask]

    assert (
        LARGE in AXES["all at once"].words and every["all at once"].mask.sum() > 65_504
    )
    assert every["lengths"].mask.sum(1).max() == 520
    long = every["long responses"]
    assert long.mask.sum(1).unique().tolist() == [1025, 2049]
    assert long.mask.int().argmax(1).max() > 1000
    assert every["1024 columns"].mask.all(1).any()
    assert len(every["advantages"].mask) > 1024
    of_tokens = every["advantages of tokens"]
    assert ((of_tokens.adv > 0) & of_tokens.mask).any(1).all()
    assert ((of_tokens.adv < 0) & of_tokens.mask).any(1).all()
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
        curve = make_curve_of_objective(o)
        found = breakpoints(o, -1.0, 0.3)
        alone = [j.r for j in curve.jumps(-1.0, 0.3, FAR_RATIOS) if j.r * 0.3 < 1]
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


def test_a_prompt_without_tokens_that_makes_nan_is_noted():
    """A filter can mask all responses of a prompt, and 0 / 0 ends the training."""
    report = upref.check(aimed_losses.prompt_without_tokens, "dapo")
    assert any(
        "a prompt of which all responses" in f.regime and f.found == "NaN"
        for f in report.notes
    ), str(report)


def test_an_interval_of_one_ratio_is_said_to_be_one():
    assert interval_words(1.0, 1.0) == "r = 1 alone"
    assert interval_words(1.0, 1.0 + 1e-9) == "1 < r <= 1.000000001"


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


# what ordinary batches of a run have, and the others lack
def dapo_terms(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's terms of a batch, 0 in masked slots."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return torch.minimum(r * A, r.clamp(0.8, 1.28) * A)


def averaged_by_response_in_a_first_step(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss; but a mean over responses where there are more than 8 and
    every ratio is 1.
    """
    t = dapo_terms(log_prob, old_log_prob, advantages, mask)
    if len(mask) > 8 and torch.equal(log_prob.detach()[mask], old_log_prob[mask]):
        return -(t.sum(1) / mask.sum(1)).mean()
    return -t.sum() / mask.sum()


def without_the_column_behind_a_prompt(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss, without the first trained column where that is the 33rd or
    later.
    """
    t = dapo_terms(log_prob, old_log_prob, advantages, mask)
    start = int(mask.any(0).int().argmax())
    lost = torch.arange(mask.shape[1]) == (start if start >= 32 else -1)
    return -torch.where(lost, 0, t).sum() / mask.sum()


def without_a_clip_where_nothing_is_padded(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss; without a clip where each of several responses fills more
    than 16 columns.
    """
    if min(mask.shape) > 1 and mask.shape[1] > 16 and mask.all():
        return -((log_prob - old_log_prob).exp() * advantages).mean()
    return -dapo_terms(log_prob, old_log_prob, advantages, mask).sum() / mask.sum()


@pytest.mark.parametrize(
    "loss",
    [
        averaged_by_response_in_a_first_step,
        without_the_column_behind_a_prompt,
        without_a_clip_where_nothing_is_padded,
    ],
)
def test_a_first_step_and_a_batch_without_padding_are_asked(loss):
    report = upref.check(loss, "dapo")
    assert "unusual-inputs" in {f.oracle for f in report.failures}, report


def test_a_response_of_several_certain_samples_is_asked():
    def dropped(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
        """Return DAPO's loss times the ratio to the sampler, without the responses of
        more than three tokens that are all certain to the sampler.
        """
        t = dapo_terms(log_prob, old_log_prob, advantages, mask)
        rho = torch.where(mask, old_log_prob - rollout_log_probs, 0).exp()
        certain = (torch.where(mask, rollout_log_probs, 0) == 0).all(1)
        lost = (certain & (mask.sum(1) > 3))[:, None]
        return -torch.where(lost, 0, rho.clamp(max=2) * t).sum() / mask.sum()

    assert not upref.check(dropped, "tis(dapo)")


def test_a_clamp_of_log_r_hides_no_leak_of_a_masked_slot():
    """NaN of an advantage reaches the gradient where log r is inside the clamp alone."""
    report = upref.check(numerics.log_ratio_clamped_at_two, "dapo")
    assert "masked-values" in {finding.oracle for finding in report.notes}


@pytest.mark.parametrize(
    ("loss", "objective", "hp", "words"),
    [
        (
            aimed_losses.first_thousand_rows,
            "dapo",
            {},
            "of 1,040 rows only 1,001 to 1,040 have wrong weights",
        ),
        (
            aimed_losses.kl_of_short_responses,
            "grpo",
            {"beta": 0.04},
            "responses of up to 256 tokens are right, those of 1,023 and more are not",
        ),
    ],
)
def test_the_rows_or_lengths_that_are_wrong_are_named(loss, objective, hp, words):
    assert words in str(upref.check(loss, objective, **hp))


def test_masking_without_effect_is_named():
    """The clip of DAPO is PPO's, and was named as the cause."""
    report = upref.check(upref.get("dapo").loss, "opsm(dapo)")
    assert "opsm_delta has no effect" in report.failures[0].cause


def up_beyond_a_threshold(log_prob, old_log_prob, advantages, mask):
    """Return UP-DAPO's loss whose unclipped branch begins at A = 1e-5, not at 0."""
    lp = torch.where(mask, log_prob, 0)
    a = torch.where(mask, advantages, 0)
    r = (lp - torch.where(mask, old_log_prob, 0)).exp()
    clipped = torch.minimum(r * a, r.clamp(min=0.8) * a)
    terms = torch.where(a > 1e-5, a * lp, clipped)
    return -torch.where(mask, terms, 0).sum() / mask.sum()


def rare_tokens_alone(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask & (old_log_prob.exp() <= 0.95), advantages, 0)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    terms = torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
    return -torch.where(mask, terms, 0).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss", "name", "token", "where"),
    [
        (up_beyond_a_threshold, "up_dapo", (1e-6, 400.0, 0.002), "above |A| = 1e-05"),
        (rare_tokens_alone, "dapo", (0.4, 1.0, 1.0), "below π_old = 0.95"),
        (rare_tokens_alone, "dapo", (0.4, 1.0, 0.5), ""),
    ],
)
def test_a_wrong_token_says_where_one_like_it_is_right(loss, name, token, where):
    objective = upref.get(name)
    case = make_case(read(loss, objective, {}), objective, objective.resolve({}))
    found = bound_of_token(case, case.ready(single_token_batch(*([x] for x in token))))
    assert found.words == (f"a token like it is right {where}" if where else "")
