# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from math import log

import torch
from torch import Tensor

from upref.registry import get
from upref.verify.faults import Fault
from upref_course.exercise import Exercise
from upref_course.samples import arguments, batch, check_samples


def loss(lp: Tensor, lp_old: Tensor, A: Tensor) -> Tensor:
    """Compute the importance-sampled loss of N samples: the right answer.

    Args:
        lp: log π_θ, [N].
        lp_old: log π_old, [N].
        A: advantages, [N].

    Returns:
        A scalar, to be minimized.
    """
    return -((lp - lp_old).exp() * A).mean()


EXERCISE = Exercise(
    number=3,
    slug="importance-sampling",
    title="learning from an older policy's samples",
    function="loss",
    gradient="lp",
    right=loss,
    proof=lambda fn: check_samples(
        fn, replace(get("is_pg"), agg="token-mean"), skip=("extremes", "masked-values")
    ),
    arguments=arguments,
    batches=(
        batch(
            "one sample of A = 1 that is twice as likely now: r = 2",
            [0.5],
            [0.25],
            [1.0],
        ),
        batch(
            "one sample of A = -1 that is half as likely now: r = 1/2",
            [0.25],
            [0.5],
            [-1.0],
        ),
        batch("two samples, r = 1 and r = 3", [0.2, 0.6], [0.2, 0.2], [1.0, 2.0]),
        batch(
            "four samples, r = 2, 1/2, 1 and 4",
            [0.2, 0.3, 0.1, 0.4],
            [0.1, 0.6, 0.1, 0.1],
            [1.0, -2.0, 0.5, 1.5],
        ),
    ),
    faults=(
        Fault(
            "the sign: this makes good samples less likely",
            lambda lp, old, A: ((lp - old).exp() * A).mean(),
            id="sign-flipped",
            hint="an optimizer goes downhill: hand it minus the mean.",
        ),
        Fault(
            "there is no ratio: the gradient is that of lesson 1's loss, on samples of another policy",
            lambda lp, old, A: -(lp * A).mean(),
            id="ratio-always-one",
            hint="the samples come as often as π_old says. What must each count, so that their mean is one over π_θ? "
            "(lp - lp_old is log r, not r yet.)",
        ),
        Fault(
            "the ratio is upside down: π_old / π_θ",
            lambda lp, old, A: -((old - lp).exp() * A).mean(),
            id="ratio-inverted",
            hint="a sample that has become more likely since (r = 2) came too seldom: it must count more, not less.",
        ),
        Fault(
            "a ratio of logarithms",
            lambda lp, old, A: -((lp / old) * A).mean(),
            id="ratio-of-logarithms",
            hint="lp and lp_old are logarithms: log a / log b is not a / b. exp(log a - log b) is.",
        ),
        Fault(
            "π_θ alone: π_old is left out",
            lambda lp, old, A: -(lp.exp() * A).mean(),
            id="old-policy-left-out",
            hint="weigh each sample by how much more likely it is now than when it was drawn: by π_θ / π_old.",
        ),
        Fault(
            "log π_θ and the ratio both carry a gradient",
            lambda lp, old, A: -((lp - old).exp() * lp * A).mean(),
            id="truncated-ratio-not-detached",
            hint="r has ∇r = r ∇log π in it already (Eq. 8): leave log π out, or .detach() the ratio beside it.",
        ),
        Fault(
            "the advantage is left out: every sample is made more likely",
            lambda lp, old, A: -(lp - old).exp().mean(),
            id="advantage-left-out",
            hint="each sample's ratio is multiplied by that sample's own A.",
        ),
        Fault(
            "the sum over the samples where their mean belongs",
            lambda lp, old, A: -((lp - old).exp() * A).sum(),
            id="sum-for-mean",
            hint="with twice as many samples the step should not be twice as long.",
        ),
        Fault(
            "the ratios are made to add up to 1, by a sum that carries a gradient",
            lambda lp, old, A: -(torch.softmax(lp - old, 0) * A).sum(),
            id="ratios-normalized",
            hint="self-normalized importance sampling is another estimator, and biased. Divide by N, the number of "
            "samples.",
        ),
        Fault(
            "the ratio of the whole batch: one number for all samples",
            lambda lp, old, A: -(lp - old).exp().mean() * A.mean(),
            id="ratio-of-batch",
            hint="each sample has its own ratio. Multiply first, then take the mean.",
        ),
        Fault(
            "the ratio is clipped",
            lambda lp, old, A: (
                -torch.minimum(
                    (lp - old).exp() * A, (lp - old).exp().clamp(0.8, 1.2) * A
                ).mean()
            ),
            id="ppo-clip",
            hint="that is lesson 4. Here every sample keeps its weight.",
        ),
        Fault(
            "base 2 or base 10",
            lambda lp, old, A: -(2 ** (lp - old) * A).mean(),
            id="base-2",
            hint=f"lp is a natural logarithm: .exp(), not 2 ** ... (2 ** x is e ** ({log(2):.3f} x)).",
        ),
    ),
    notice="-((lp - lp_old).exp().detach() * A * lp).mean() has the same gradient and would be right, too. "
    "At r = 1 lesson 1's loss, with A in place of the reward, has it as well: a test on policy shows no difference.",
)
