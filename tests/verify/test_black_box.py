# SPDX-License-Identifier: Apache-2.0
"""check, identify, weights and Cap measure the same properties of one loss."""

import pytest
import torch

import upref
from upref.user_code import read
from upref.verify.factors import TOKEN_SUM
from upref.verify.measure import make_case
from upref.verify.probe import measure
from upref.weights.batches import fill_padding, on_policy_batch
from upref.weights.black_box import gives_two_answers, is_coupled, part_with_advantage
from upref.weights.curve import SINGLE_FLOOR, make_curve, make_curve_of_loss


def clipped_terms(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return torch.minimum(r * A, r.clamp(0.8, 1.2) * A)


def clipped(log_prob, old_log_prob, advantages, mask):
    return -clipped_terms(log_prob, old_log_prob, advantages, mask).sum() / mask.sum()


def in_float32(log_prob, old_log_prob, advantages, mask):
    return clipped(log_prob.float(), old_log_prob.float(), advantages.float(), mask)


def reinforce_in_float32(log_prob, old_log_prob, advantages, mask):
    return -(log_prob.float() * advantages.float())[mask].mean()


def with_kl_in_float64(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    surrogate = in_float32(log_prob, old_log_prob, advantages, mask)
    return surrogate.double() + 0.1 * (d.exp() - d - 1)[mask].mean()


@pytest.mark.parametrize(
    "loss, expected",
    [
        (clipped, False),
        (in_float32, True),
        (reinforce_in_float32, True),
        (with_kl_in_float64, False),
    ],
)
def test_all_measure_the_same_precision(loss, expected):
    objective = upref.get("ppo_clip")
    of_check = make_case(read(loss, objective, {}), objective, objective.resolve({}))
    of_identify = measure(read(loss))
    of_weights = make_curve_of_loss(read(loss))
    found = (
        of_check.single,
        of_identify.case.single,
        of_weights.floor == SINGLE_FLOOR,
    )
    assert found == (expected,) * 3


def summed_over_100(log_prob, old_log_prob, advantages, mask):
    return -clipped_terms(log_prob, old_log_prob, advantages, mask).sum() / 100


def doubled(log_prob, old_log_prob, advantages, mask):
    return 2 * clipped(log_prob, old_log_prob, advantages, mask)


@pytest.mark.parametrize(
    "loss, agg, scale",
    [
        (clipped, "token-mean", 1.0),
        (doubled, "token-mean", 2.0),
        # on one batch a mean over tokens is this sum, times a number
        (summed_over_100, TOKEN_SUM, 0.01),
    ],
)
def test_check_and_identify_measure_the_same_aggregation(loss, agg, scale):
    objective = upref.get("ppo_clip")
    of_check = make_case(read(loss, objective, {}), objective, objective.resolve({}))
    of_identify = measure(read(loss))
    assert (of_check.agg, of_identify.agg) == (agg, agg)
    assert (of_check.scale, of_identify.scale) == pytest.approx((scale, scale))


def test_check_names_a_sum_that_is_divided_by_a_constant():
    """Of such a loss `check` said that no known cause fits."""
    report = upref.check(summed_over_100, "ppo_clip")
    assert "a plain sum over all tokens" in report.failures[0].cause


def whitened(log_prob, old_log_prob, advantages, mask):
    A = advantages[mask]
    advantages = (advantages - A.mean()) / A.std()  # NaN of one token
    return clipped(log_prob, old_log_prob, advantages, mask)


def thinned(log_prob, old_log_prob, advantages, mask):
    terms = clipped_terms(log_prob, old_log_prob, advantages, mask)
    kept = torch.rand_like(log_prob) > 0.1
    return -(terms * kept * mask).sum() / mask.sum()


def clipped_where_sure(log_prob, old_log_prob, advantages, mask, entropy):
    """Return PPO's loss without a clip where a token's entropy is above the batch's
    mean.
    """
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    mean = torch.where(mask, entropy, 0).sum() / mask.sum()
    bounded = clipped_terms(log_prob, old_log_prob, advantages, mask)
    terms = torch.where(entropy > mean, r * advantages, bounded)
    return -(terms * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    "loss, why",
    [
        (whitened, "it depends on the other tokens of a batch"),
        (thinned, "two calls on the same batch give different gradients"),
        (clipped_where_sure, "it depends on the token's entropy"),
    ],
)
def test_what_identify_measures_has_no_weight_of_a_single_token(loss, why):
    with pytest.raises(upref.InputError, match=f"no weight of a single token: {why}"):
        make_curve(loss)
    with pytest.raises(upref.InputError, match=why):
        upref.capacity(loss, 0.1, 0.1)
    assert not upref.identify(loss)


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.672, 1.2, 2.5, 5.0])
def test_a_threshold_of_entropy_is_found(threshold):
    def of_unsure(log_prob, old_log_prob, advantages, mask, entropy):
        terms = clipped_terms(log_prob, old_log_prob, advantages, mask)
        return -(terms * (entropy > threshold) * mask).sum() / mask.sum()

    with pytest.raises(upref.InputError, match="it depends on the token's entropy"):
        make_curve(of_unsure)


def test_identify_measures_what_weights_refuse():
    assert measure(read(whitened)).batch_coupled
    assert measure(read(clipped_where_sure)).reads_entropy
    assert upref.identify(thinned).why == (
        "two calls on the same batch give different gradients"
    )


def without_a_gradient_below(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    terms = torch.where(r < 0.7, (r - 0.7).sqrt(), r) * advantages
    return -terms[mask].mean()


def test_a_gradient_that_is_not_a_number_is_the_same_twice():
    assert not measure(read(without_a_gradient_below)).random
    assert "two calls" not in upref.identify(without_a_gradient_below).why


def test_a_counter_of_calls_gives_two_answers():
    calls = []

    def gradient(batch):
        calls.append(batch)
        return batch.adv * len(calls)

    assert gives_two_answers(gradient, on_policy_batch())


def refuses_no_advantage(log_prob, old_log_prob, advantages, mask):
    assert advantages.any()
    return clipped(log_prob, old_log_prob, advantages, mask)


def test_the_part_with_advantages_is_all_where_no_advantage_is_refused():
    batch = fill_padding(on_policy_batch())
    refusing, plain = (read(f).gradient for f in (refuses_no_advantage, clipped))
    assert torch.equal(part_with_advantage(refusing, batch), plain(batch))


def test_a_size_that_all_advantages_share_couples_no_tokens():
    def divided_by_size(r, A, mu):
        return r * A / abs(A).mean()

    assert not is_coupled(divided_by_size, (1.0, -1.0), 1e-6)
    assert is_coupled(divided_by_size, (1.0, -1.0, 0.5, -2.0), 1e-6)
