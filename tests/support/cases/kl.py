# SPDX-License-Identifier: Apache-2.0
"""KL estimators as people write them: (function, estimator, words of the report);
wrong: (..., oracle, cause).
"""

import math

import torch
import torch.nn.functional as F

from upref import kl


def k3_by_hand(logprob, ref_logprob):
    d = ref_logprob - logprob
    return torch.exp(d) - d - 1


def clamped(logprob, ref_logprob):
    return k3_by_hand(logprob, ref_logprob).clamp(-10, 10)


def far_clamp(logprob, ref_logprob):
    d = (ref_logprob - logprob).clamp(-30, 30)
    return d.expm1() - d


def under_no_grad(logprob, ref_logprob):
    with torch.no_grad():
        return k3_by_hand(logprob, ref_logprob)


def refuses_float64(logprob, ref_logprob):
    assert logprob.dtype == torch.float32
    return k3_by_hand(logprob, ref_logprob)


RIGHT = [
    (k3_by_hand, "k3", ""),
    (lambda lp, ref: k3_by_hand(lp, ref).float(), "k3", "float32"),
    (lambda lp, ref: k3_by_hand(lp.float(), ref.float()), "k3", "float32"),
    (lambda lp, ref: k3_by_hand(lp.float(), ref.float()).double(), "k3", "float32"),
    (lambda lp, ref: lp.float() - ref.float(), "k1", "float32"),
    (refuses_float64, "k3", "float32"),
    (
        lambda ref_logps, logps: kl.k3(logps, ref_logps),
        "k3",
        "ref_logps -> ref_log_prob; logps -> log_prob",
    ),
    (lambda ref_logps, x: kl.k3(x, ref_logps), "k3", "x -> log_prob, by position"),
    (
        lambda p, q: kl.k3(p, q),
        "k3",
        "p -> log_prob, by position; q -> ref_log_prob, by position",
    ),
]


WRONG = [
    (under_no_grad, "k3", "gradient", "no_grad"),
    (lambda lp, ref: kl.k3(ref, lp), "k3", "value", "the other way round"),
    (
        lambda lp, ref: (ref - lp).exp() - 1 + (ref - lp),
        "k3",
        "value",
        "sign of its logarithm",
    ),
    (lambda lp, ref: ref - lp, "k1", "value", "sign flipped"),
    (lambda lp, ref: (lp - ref) ** 2, "k2", "value", "without its 1/2"),
    (lambda lp, ref: (lp - ref).abs(), "k1", "value", "|log"),
    (lambda lp, ref: lp.exp() * (lp - ref), "k1", "value", "weighted by a probability"),
    (clamped, "k3", "clamp", "bites"),
    (
        lambda lp, ref: kl.k2(lp, ref) + (kl.k3(lp, ref) - kl.k2(lp, ref)).detach(),
        "k3",
        "gradient",
        "straight",
    ),
    (kl.k1, "k3", "value", "k1 itself"),
    (
        lambda lp, ref: (ref - lp.detach()).exp() - 1 - (ref - lp),
        "k3",
        "gradient",
        "by the gradient alone: k1 itself",
    ),
    (
        lambda lp, ref: kl.k3(lp, ref) + (kl.k2(lp, ref) - kl.k3(lp, ref)).detach(),
        "k3",
        "value",
        "by the value alone",
    ),
    (lambda lp, ref: k3_by_hand(lp.float(), ref.float()) * 1.01, "k3", "value", ""),
    (
        lambda lp, ref: k3_by_hand(lp, ref) / math.log(2),
        "k3",
        "gradient",
        "1.4427 times k3",
    ),
    (lambda lp, ref: ref.sub_(lp.detach()).exp() - 1 - ref, "k3", "mutation", ""),
    (lambda lp, ref: k3_by_hand(lp, ref.clamp(min=-12)), "k3", "clamp", "bites"),
    (lambda lp, ref: kl.k1(lp, ref) + 1e-3 * torch.rand(()), "k1", "determinism", ""),
    (lambda lp, ref: kl.k3(lp, ref) + 1, "k3", "value", "k3 plus 1"),
    (lambda lp, ref: (lp - ref).abs() / 2, "k2", "value", "half of |"),
    (
        lambda lp, ref: F.smooth_l1_loss(lp, ref, reduction="none"),
        "k2",
        "value",
        "smooth L1",
    ),
    (lambda lp, ref: (lp.exp() - ref.exp()) ** 2, "k2", "gradient", "(π_θ - π_ref)²"),
    (
        lambda lp, ref: (lp - ref).clamp(min=0),
        "k1",
        "value",
        "k1 without its values below 0",
    ),
    (
        lambda lp, ref: (ref - lp).exp() * (lp - ref),
        "k1",
        "value",
        "π_ref/π_θ (log π_θ - log π_ref)",
    ),
    (
        lambda lp, ref: kl.k2(lp, ref).mean(-1, keepdim=True).expand_as(lp),
        "k2",
        "value",
        "the mean of k2 over each row",
    ),
    (
        lambda lp, ref: kl.k3(lp, ref.roll(1, -1)),
        "k3",
        "gradient",
        "ref_log_prob one token too late",
    ),
    (
        lambda lp, ref: kl.k1(lp, ref.roll(-1, -1)),
        "k1",
        "value",
        "ref_log_prob one token too early",
    ),
    (lambda lp, ref: F.softplus(ref - lp) - math.log(2), "k3", "value", ""),
]
