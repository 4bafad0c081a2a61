# SPDX-License-Identifier: Apache-2.0
"""Causes of wrong critics, distillation losses and advantages that were once false or
missing.
"""

import pytest
import torch

import upref
from upref.token_advantages import (
    discounted_returns,
    gae,
    gpg,
    optimal_token_baseline,
)


def mean(x, mask):
    return torch.where(mask, x, 0).sum() / mask.sum()


def errors(values, old_values, returns, clip):
    near = old_values + (values - old_values).clamp(-clip, clip)
    return (values - returns) ** 2, (near - returns) ** 2


def maximum_of_means(values, old_values, returns, mask, clip=0.2):
    one, near = errors(values, old_values, returns, clip)
    return torch.maximum(mean(one, mask), mean(near, mask)) / 2


def maximum_of_responses(values, old_values, returns, mask, clip=0.2):
    both = errors(values, old_values, returns, clip)
    sums = [torch.where(mask, x, 0).sum(1) for x in both]
    return torch.maximum(*sums).sum() / mask.sum() / 2


def by_lengths(values, old_values, returns, mask, clip=0.2):
    first = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
    return mean(torch.maximum(*errors(values, old_values, returns, clip)), first) / 2


def values_clamped(values, old_values, returns, mask, clip=0.2):
    both = errors(values.clamp(-10, 10), old_values, returns, clip)
    return mean(torch.maximum(*both), mask) / 2


@pytest.mark.parametrize(
    ("loss", "id"),
    [
        (maximum_of_means, "value-maximum-of-sums"),
        (maximum_of_responses, "value-maximum-of-sums"),
        (by_lengths, "mask-read-as-lengths"),
        (values_clamped, "values-clamped"),
    ],
)
def test_a_wrong_critic_has_its_cause(loss, id):
    report = upref.check_value(loss, "clipped")
    assert report.failures[0].fault_ids == (id,), str(report)


def test_values_that_cancel_are_not_said_to_be_detached_for_sure():
    def moved(values, old_values, returns, mask):
        return mean((values - (returns - old_values + values)) ** 2, mask)

    (failure,) = upref.check_value(moved, "mse").failures
    assert "or they cancel" in failure.cause


def test_a_write_into_an_argument_is_its_own_cause():
    def shifted(values, returns, mask):
        loss = mean((values - returns.clone()) ** 2, mask)
        returns.add_(1.0)
        return loss

    (failure,) = upref.check_value(shifted, "mse").failures
    assert failure.oracle == "mutation" and "it writes into" in failure.cause


def kl(student_logits, teacher_logits, mask):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return mean((q.exp() * (q - p)).sum(-1), mask)


def divided_twice(student_logits, teacher_logits, mask, temperature=1.0):
    square = temperature**2
    return kl(student_logits / square, teacher_logits / square, mask)


def times_temperature(student_logits, teacher_logits, mask, temperature=1.0):
    q, p = student_logits / temperature, teacher_logits / temperature
    return temperature * kl(q, p, mask)


def logits_clamped(student_logits, teacher_logits, mask):
    return kl(student_logits.clamp(-10, 10), teacher_logits.clamp(-10, 10), mask)


def guarded(student_logits, teacher_logits, mask):
    q, p = student_logits.softmax(-1), teacher_logits.softmax(-1)
    return mean((q * ((q + 1e-6).log() - (p + 1e-6).log())).sum(-1), mask)


@pytest.mark.parametrize(
    ("loss", "id"),
    [
        (divided_twice, "temperature-twice"),
        (times_temperature, "loss-times-temperature"),
        pytest.param(logits_clamped, "logits-clamped", marks=pytest.mark.nightly),
        pytest.param(guarded, "guard-in-logarithm", marks=pytest.mark.nightly),
    ],
)
def test_a_wrong_divergence_has_its_cause(loss, id):
    report = upref.check_distillation(loss, "reverse_kl")
    assert report.failures[0].fault_ids == (id,), str(report)


def test_a_ratio_that_is_clamped_has_its_cause():
    def clamped(log_prob, teacher_log_prob, mask):
        weight = (teacher_log_prob - log_prob).exp().clamp(max=1.0)
        return -mean(weight.detach() * log_prob, mask)

    report = upref.check_distillation(clamped, "sampled_forward_kl")
    assert report.failures[0].fault_ids == ("teacher-ratio-clamped",), str(report)


def clamped_advantages(rewards, values, mask, gamma, lam):
    return gae(rewards, values, mask, gamma=gamma, lam=lam).clamp(-5, 5)


def own_token_left_out(log_prob, teacher_log_prob, mask, gamma):
    difference = torch.where(mask, teacher_log_prob - log_prob, 0)
    return discounted_returns(difference, mask, gamma=gamma) - difference


def mean_kept_by_n(rewards, values, mask, gamma, lam):
    A = gae(rewards, values, mask, gamma=gamma, lam=lam)
    std = (A[mask].var(unbiased=False) + 1e-8).sqrt()
    return ((A - A[mask].mean()) / std + A[mask].mean()) * mask


def counted_by_own_advantage(rewards, mask, group):
    """Return GPG's advantages, scaled by all responses over those whose own advantage
    is not 0.
    """
    A = gpg(rewards, mask, group)
    R = torch.where(mask, rewards, 0).sum(1)
    same = (group[:, None] == group) & mask.any(1) & mask.any(1)[:, None]
    centered = R - same.double() @ R / same.sum(1).clamp(min=1)
    count = ((centered.abs() > 1e-12) & mask.any(1)).sum().clamp(min=1)
    plain = torch.where(mask, centered[:, None], 0)
    return plain * mask.any(1).sum() / count if bool(A.any()) else A


def lone_tokens_at_0(rewards, log_prob, sum_pi_squared, mask, group):
    """Return the optimal token baseline's advantages, 0 for a token without a peer at
    its number.
    """
    A = optimal_token_baseline(rewards, log_prob, sum_pi_squared, mask, group)
    number = mask.long().cumsum(1)
    for i, k in mask.nonzero().tolist():
        others = (number == number[i, k]) & mask & (group == group[i])[:, None]
        if others.sum() == 1:
            A[i, k] = 0
    return A


@pytest.mark.parametrize(
    ("fn", "name", "id"),
    [
        (clamped_advantages, "gae", "advantages-clamped"),
        (own_token_left_out, "minillm", "own-reward-missing"),
        (mean_kept_by_n, "gae_whitened", "mean-kept"),
        (counted_by_own_advantage, "gpg", "gpg-factor-of-nonzero-advantages"),
        (
            lone_tokens_at_0,
            "optimal_token_baseline",
            "lone-token-without-advantage",
        ),
    ],
)
def test_wrong_advantages_have_their_cause(fn, name, id):
    report = upref.check_advantages(fn, name)
    assert report.failures[0].fault_ids == (id,), str(report)


def with_ratio(log_prob, old_log_prob, teacher_log_prob, mask):
    A = (teacher_log_prob - old_log_prob).detach()
    return -mean((log_prob - old_log_prob).exp() * A, mask)


def with_ratio_detached(logps, rollout_logps, teacher_logps, mask):
    A = teacher_logps - rollout_logps
    return -mean((logps - rollout_logps).exp().detach() * A, mask)


def test_a_sampled_loss_may_have_an_old_policy():
    report = upref.check_distillation(with_ratio, "sampled_reverse_kl")
    assert report, str(report)
    assert any("off policy" in what for what in report.not_checked)
    assert not upref.check_distillation(with_ratio_detached, "sampled_reverse_kl")


def test_an_old_policy_beside_logits_is_one_sentence():
    def mixed(student_logits, teacher_logits, old_log_prob, mask):
        return kl(student_logits, teacher_logits, mask)

    with pytest.raises(upref.InputError, match="only the sampled forms have"):
        upref.check_distillation(mixed, "reverse_kl")
