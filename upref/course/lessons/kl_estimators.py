# SPDX-License-Identifier: Apache-2.0
import torch

from upref import kl
from upref.course.exercise import Batch, Exercise, Slip
from upref.verify.kl import check_kl


def k3(lp, lp_ref):
    return kl.k3(lp, lp_ref)


def batch(shows, p, q):
    numbers = lambda x: torch.tensor(x, dtype=torch.float64).log()
    return Batch(shows, {"lp": numbers(p), "lp_ref": numbers(q)})


EXERCISE = Exercise(
    number=9,
    slug="kl-estimators",
    title="three estimators of one divergence",
    function="k3",
    gradient="lp",
    value=True,
    right=k3,
    proof=lambda fn: check_kl(lambda log_prob, ref_log_prob: fn(log_prob, ref_log_prob), "k3"),
    batches=(
        batch("a token that both policies give 1/4", [0.25], [0.25]),
        batch("a token that is half as likely now as under the reference: d = log 2", [0.2], [0.4]),
        batch("a token that is twice as likely now: d = -log 2", [0.4], [0.2]),
        batch("three tokens", [0.5, 0.1, 0.3], [0.25, 0.4, 0.3]),
    ),
    slips=(
        Slip(
            "d has the wrong sign: π_θ / π_ref where π_ref / π_θ belongs",
            "d = log π_ref - log π_θ. The samples are π_θ's, so it is π_ref that needs a ratio.",
            lambda lp, ref: (lp - ref).exp() - 1 - (lp - ref),
        ),
        Slip(
            "the - 1 is missing: two equal policies are not at 0",
            "k3 = e^d - 1 - d. At d = 0 it must be 0.",
            lambda lp, ref: (ref - lp).exp() - (ref - lp),
        ),
        Slip(
            "+ d where - d belongs",
            "k3 is never negative. Is yours, for d = -log 2?",
            lambda lp, ref: (ref - lp).exp() - 1 + (ref - lp),
        ),
        Slip(
            "- d is missing",
            "e^d - 1 alone has mean 0 under π_θ, whatever the policies.",
            lambda lp, ref: (ref - lp).exp() - 1,
        ),
        Slip("this is k1", "right on average, but it may be negative, and as a loss it does nothing.", kl.k1),
        Slip("this is k1 with its sign flipped", "and k3 = e^d - 1 - d.", lambda lp, ref: ref - lp),
        Slip("this is k2", "it is biased. k3 = e^d - 1 - d.", kl.k2),
        Slip("this is k2 without its 1/2", "k3 = e^d - 1 - d.", lambda lp, ref: (lp - ref) ** 2),
        Slip("this is |d|", "k3 = e^d - 1 - d.", lambda lp, ref: (lp - ref).abs()),
        Slip(
            "weighed by π_θ, though the samples come as often as π_θ says",
            "the mean over samples is the sum over π_θ already. No lp.exp() in front.",
            lambda lp, ref: lp.exp() * (lp - ref),
        ),
        Slip(
            "k3 with its sign flipped",
            "it is a divergence, 0 or more. The loss adds beta times it, the objective takes it away.",
            lambda lp, ref: -kl.k3(lp, ref),
        ),
        Slip(
            "the mean over the tokens",
            "one number for each token, [N]: the aggregation of lesson 8 comes later.",
            lambda lp, ref: kl.k3(lp, ref).mean(),
        ),
    ),
    notice="its value is that of KL(π_θ ‖ π_ref) on average; its gradient, as a loss, is that of KL(π_ref ‖ π_θ).",
)  # fmt: skip
