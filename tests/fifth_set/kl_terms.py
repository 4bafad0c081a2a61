# SPDX-License-Identifier: Apache-2.0
"""KL terms: wrong, right, blind and aimed."""

import torch
import torch.nn.functional as F

from tests.fifth_set.case import case


def term(target, fault="", aimed=False):
    """Decorator: a KL term."""
    return case("kl", target, fault, aimed=aimed, shows="by hand")


@term("k3", "the ratio is π_θ/π_ref")
def k3_reversed(log_prob, ref_log_prob):
    d = log_prob - ref_log_prob
    return d.exp() - 1 - d


@term("k3", "the constant -1 is missing: the value is 1 too large")
def k3_without_one(logprobs, ref_logprobs):
    d = ref_logprobs - logprobs
    return d.exp() - d


@term("k3", "the exponential is detached: the gradient is 1")
def k3_ratio_detached(log_prob, ref_log_prob):
    d = ref_log_prob - log_prob
    return d.exp().detach() - 1 - d


@term("k2", "the half is missing")
def k2_whole(log_prob, ref_log_prob):
    return (log_prob - ref_log_prob).square()


@term("k1", "the absolute value is taken, as verl's 'abs'")
def k1_absolute(log_prob, ref_log_prob):
    return (log_prob - ref_log_prob).abs()


@term("k3", "it is clamped to ±10, as verl's low_var_kl")
def k3_clamped(log_prob, ref_log_prob):
    d = torch.clamp(ref_log_prob - log_prob, -20, 20)
    return torch.clamp(d.exp() - d - 1, -10, 10)


@term("k3", "the probabilities are subtracted, not divided")
def k3_of_probabilities(log_prob, ref_log_prob):
    d = ref_log_prob.exp() - log_prob.exp()
    return d.exp() - 1 - d


@term("k1", "F.kl_div has its arguments exchanged and weighs by the reference")
def by_kl_div(log_prob, ref_log_prob):
    return F.kl_div(log_prob, ref_log_prob, reduction="none", log_target=True)


@term("k2", "it is Huber's: linear beyond 1")
def k2_of_huber(log_prob, ref_log_prob):
    return F.smooth_l1_loss(log_prob, ref_log_prob, reduction="none")


@term("k3", "it is taken with base 2 logarithms")
def k3_in_bits(log_prob, ref_log_prob):
    d = (ref_log_prob - log_prob) / 0.6931471805599453
    return torch.exp2(d) - 1 - d


@term("k3", "a token of probability above 0.99999 has no penalty", aimed=True)
def k3_of_uncertain_tokens(log_prob, ref_log_prob):
    d = ref_log_prob - log_prob
    return torch.where((log_prob > -1e-5) & (log_prob < 0), 0, d.exp() - 1 - d)


@term(
    "k3",
    "a row with more than 16 tokens of |d| > 5 gets the mean of its penalties",
    aimed=True,
)
def k3_of_bad_rows(log_prob, ref_log_prob):
    d = ref_log_prob - log_prob
    k = d.exp() - 1 - d
    many = (d.abs() > 5).sum(1, keepdim=True) > 16
    return torch.where(many, k.mean(1, keepdim=True).expand_as(k), k)


@term("k3", "rows beyond the fourth are averaged with the fourth", aimed=True)
def k3_of_four_rows(log_prob, ref_log_prob):
    d = ref_log_prob - log_prob
    k = d.exp() - 1 - d
    return torch.cat([k[:4], k[4:] * 0.5 + 0.5 * k[3:4].expand_as(k[4:])])


@term("k2", "columns beyond the 64th are left out", aimed=True)
def k2_of_64_columns(log_prob, ref_log_prob):
    k = (log_prob - ref_log_prob) ** 2 / 2
    return k * (torch.arange(k.shape[1]) < 64)


@term("k3", "log-probabilities of the policy below -75 are floored", aimed=True)
def k3_floored(log_prob, ref_log_prob):
    d = ref_log_prob - log_prob.clamp(min=-75)
    return d.exp() - 1 - d


@term("k3")
def k3_by_expm1(*, logps, ref_logps):
    d = ref_logps - logps
    return torch.expm1(d) - d


@term("k3")
def k3_in_float32(log_prob, ref_log_prob):
    d = (ref_log_prob - log_prob).float()
    return d.exp() - d - 1


@term("k2")
def k2_by_mse(log_prob, ref_log_prob):
    return F.mse_loss(log_prob, ref_log_prob, reduction="none") / 2


@term("k1")
def k1_by_subtraction(policy_logprobs, reference_logprobs):
    return torch.sub(policy_logprobs, reference_logprobs)


@term("k3")
def k3_as_a_bregman_divergence(log_prob, ref_log_prob):
    ratio = torch.exp(ref_log_prob - log_prob)
    return ratio - 1 - torch.log(ratio)
