# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from math import log

import torch

from upref.course.exercise import Exercise, Slip
from upref.course.samples import batch, checked
from upref.registry import get


def loss(lp, lp_old, A):
    return -((lp - lp_old).exp() * A).mean()


EXERCISE = Exercise(
    number=3,
    slug="importance-sampling",
    title="learning from an older policy's samples",
    function="loss",
    gradient="lp",
    right=loss,
    proof=lambda fn: checked(fn, replace(get("is_pg"), agg="token-mean"), skip=("extremes", "poison")),
    batches=(
        batch("one sample of A = 1 that is twice as likely now: r = 2", [0.5], [0.25], [1.0]),
        batch("one sample of A = -1 that is half as likely now: r = 1/2", [0.25], [0.5], [-1.0]),
        batch("two samples, r = 1 and r = 3", [0.2, 0.6], [0.2, 0.2], [1.0, 2.0]),
        batch("four samples, r = 2, 1/2, 1 and 4", [0.2, 0.3, 0.1, 0.4], [0.1, 0.6, 0.1, 0.1], [1.0, -2.0, 0.5, 1.5]),
    ),
    slips=(
        Slip(
            "the sign: this makes good samples less likely",
            "an optimizer goes downhill: hand it minus the mean.",
            lambda lp, old, A: ((lp - old).exp() * A).mean(),
        ),
        Slip(
            "there is no ratio: the gradient is that of lesson 1's loss, on samples of another policy",
            "the samples come as often as π_old says. What must each count, so that their mean is one over π_θ? "
            "(lp - lp_old is log r, not r yet.)",
            lambda lp, old, A: -(lp * A).mean(),
        ),
        Slip(
            "the ratio is upside down: π_old / π_θ",
            "a sample that has become more likely since (r = 2) came too seldom: it must count more, not less.",
            lambda lp, old, A: -((old - lp).exp() * A).mean(),
        ),
        Slip(
            "a ratio of logarithms",
            "lp and lp_old are logarithms: log a / log b is not a / b. exp(log a - log b) is.",
            lambda lp, old, A: -((lp / old) * A).mean(),
        ),
        Slip(
            "π_θ alone: π_old is left out",
            "weigh each sample by how much more likely it is now than when it was drawn: by π_θ / π_old.",
            lambda lp, old, A: -(lp.exp() * A).mean(),
        ),
        Slip(
            "log π_θ and the ratio both carry a gradient",
            "r has ∇r = r ∇log π in it already (Eq. 8): leave log π out, or .detach() the ratio beside it.",
            lambda lp, old, A: -((lp - old).exp() * lp * A).mean(),
        ),
        Slip(
            "the advantage is left out: every sample is made more likely",
            "each sample's ratio is multiplied by that sample's own A.",
            lambda lp, old, A: -(lp - old).exp().mean(),
        ),
        Slip(
            "the sum over the samples where their mean belongs",
            "with twice as many samples the step should not be twice as long.",
            lambda lp, old, A: -((lp - old).exp() * A).sum(),
        ),
        Slip(
            "the ratios are made to add up to 1, by a sum that carries a gradient",
            "self-normalized importance sampling is another estimator, and biased. Divide by N, the number of samples.",
            lambda lp, old, A: -(torch.softmax(lp - old, 0) * A).sum(),
        ),
        Slip(
            "the ratio of the whole batch: one number for all samples",
            "each sample has its own ratio. Multiply first, then take the mean.",
            lambda lp, old, A: -(lp - old).exp().mean() * A.mean(),
        ),
        Slip(
            "the ratio is clipped",
            "that is lesson 4. Here every sample keeps its weight.",
            lambda lp, old, A: -torch.minimum((lp - old).exp() * A, (lp - old).exp().clamp(0.8, 1.2) * A).mean(),
        ),
        Slip(
            "base 2 or base 10",
            f"lp is a natural logarithm: .exp(), not 2 ** ... (2 ** x is e ** ({log(2):.3f} x)).",
            lambda lp, old, A: -(2 ** (lp - old) * A).mean(),
        ),
    ),
    notice="(lp - lp_old).exp().detach() * lp has the same gradient and would be right, too. At r = 1 so "
    "would lesson 1's loss: a test on policy sees no difference.",
)  # fmt: skip
