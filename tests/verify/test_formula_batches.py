# SPDX-License-Identifier: Apache-2.0
"""Functions that are wrong only where ordinary small batches do not go: large numbers,
few tokens, untrained tokens in front, ties, writes to padding.
"""

import pytest
import torch

import upref
from upref.token_advantages import gae, minillm, pass_at_k


def mean(x, mask):
    return torch.where(mask, x, 0).sum() / mask.sum()


def value_clamped(values, returns, mask):
    return 0.5 * mean((values.clamp(-10, 10) - returns) ** 2, mask)


def return_clamped(values, returns, mask):
    return 0.5 * mean((values - returns.clamp(-10, 10)) ** 2, mask)


def zero_returns_left_out(values, returns, mask):
    errors = torch.where(returns != 0, (values - returns) ** 2, 0)
    return 0.5 * mean(errors, mask)


def divides_by_8_at_least(values, returns, mask):
    errors = torch.where(mask, (values - returns) ** 2, 0)
    return 0.5 * errors.sum() / mask.sum().clamp(min=8)


def returns_of_padding_set_to_0(values, returns, mask):
    returns.mul_(mask)
    return 0.5 * mean((values - returns) ** 2, mask)


@pytest.mark.parametrize(
    "loss",
    [
        value_clamped,
        return_clamped,
        zero_returns_left_out,
        divides_by_8_at_least,
        returns_of_padding_set_to_0,
    ],
)
def test_a_critic_that_is_wrong_on_unusual_batches_fails(loss):
    assert not upref.check_value(loss, "mse")


def lengths_for_the_mask(student_logits, teacher_logits, mask):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    first = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
    return mean((q.exp() * (q - p)).sum(-1), first)


def kl_by_8_at_least(student_logits, teacher_logits, mask):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    terms = torch.where(mask, (q.exp() * (q - p)).sum(-1), 0)
    return terms.sum() / mask.sum().clamp(min=8)


def sampled_by_lengths(log_prob, teacher_log_prob, mask):
    first = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
    return mean((log_prob - teacher_log_prob) ** 2 / 2, first)


def sampled_clamped(log_prob, teacher_log_prob, mask):
    weight = (log_prob - teacher_log_prob).clamp(-10, 10)
    return mean(weight.detach() * log_prob, mask)


def teacher_overwritten(student_logits, teacher_logits, mask):
    teacher_logits.sub_(teacher_logits.logsumexp(-1, keepdim=True))
    q = student_logits.log_softmax(-1)
    return mean((teacher_logits.exp() * (teacher_logits - q)).sum(-1), mask)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lengths_for_the_mask, "reverse_kl"),
        (kl_by_8_at_least, "reverse_kl"),
        (sampled_by_lengths, "sampled_reverse_kl"),
        (sampled_clamped, "sampled_reverse_kl"),
        (teacher_overwritten, "forward_kl"),
    ],
)
def test_a_distillation_that_is_wrong_on_unusual_batches_fails(loss, name):
    assert not upref.check_distillation(loss, name)


def clamped(rewards, values, mask, gamma, lam):
    return gae(rewards, values, mask, gamma=gamma, lam=lam).clamp(-10, 10)


def ratio_clamped(log_prob, teacher_log_prob, mask, gamma):
    ratio = (teacher_log_prob - log_prob).clamp(-10, 10)
    return minillm(torch.zeros_like(ratio), ratio, mask, gamma=gamma)


def second_distinct(rewards, mask, group):
    """Return pass_at_k's advantages with the best response compared with the second
    distinct reward, not with the second best response.
    """
    A = pass_at_k(rewards, mask, group)
    R = torch.where(mask, rewards, 0).sum(1)
    for i in range(len(R)):
        others = R[(group == group[i]) & mask.any(1)].unique()
        if len(others) > 1 and R[i] == others[-1]:
            A[i] = torch.where(mask[i], others[-1] - others[-2], 0)
    return A


@pytest.mark.parametrize(
    ("fn", "name"),
    [(clamped, "gae"), (ratio_clamped, "minillm"), (second_distinct, "pass_at_k")],
)
def test_advantages_that_are_wrong_on_unusual_batches_fail(fn, name):
    assert not upref.check_advantages(fn, name)


def sum_of_response_means(values, returns):
    return ((values - returns) ** 2).mean(1).sum()


def divided_by_the_square_of_the_length(values, returns):
    return 0.5 * ((values - returns) ** 2).sum() / values.shape[1] ** 2


def test_a_critic_without_a_mask_is_compared_at_two_shapes():
    report = upref.check_value(sum_of_response_means, "mse", agg="seq-mean-token-sum")
    assert not report
    (failure,) = upref.check_value(sum_of_response_means, "mse").failures
    assert failure.fault_ids == ("aggregated-by-sum-of-token-means",), str(failure)
    assert not upref.check_value(divided_by_the_square_of_the_length, "mse")


def kl_over_the_vocabulary(student_logits, teacher_logits):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return (p.exp() * (p - q)).mean(-1).sum()


def sampled_over_the_square_of_responses(log_prob, teacher_log_prob):
    squares = (log_prob - teacher_log_prob) ** 2 / 2
    return squares.sum() / len(squares) ** 2


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (kl_over_the_vocabulary, "forward_kl"),
        (sampled_over_the_square_of_responses, "sampled_reverse_kl"),
    ],
)
def test_a_ratio_of_sizes_is_no_constant_factor(loss, name):
    (failure,) = upref.check_distillation(loss, name).failures
    assert failure.fault_ids == (), str(failure)


def test_a_bootstrap_that_is_read_on_some_responses_is_not_called_unread():
    def on_full_responses(rewards, values, mask, bootstrap, gamma, lam):
        own = torch.where(mask[:, -1], bootstrap, 0)
        return gae(rewards, values, mask, own, gamma=gamma, lam=lam)

    report = upref.check_advantages(on_full_responses, "gae")
    assert not report
    assert "bootstrap-missing" not in report.failures[0].fault_ids


def prints_and_clears(values, returns, mask):
    print("a step")
    returns[~mask] = 0
    return 0.5 * mean((values - returns) ** 2, mask)


def test_a_printing_function_is_not_excused_for_what_it_writes():
    report = upref.check_value(prints_and_clears, "mse")
    assert "mutation" in [finding.oracle for finding in report.failures]
