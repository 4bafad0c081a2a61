# SPDX-License-Identifier: Apache-2.0
import torch
from torch import Tensor

from upref.verify.faults import Fault
from upref_course.exercise import Exercise
from upref_course.samples import arguments, batch, check_samples

HIGH, LOW = 1.28, 0.8


def ratio(lp: Tensor, old: Tensor) -> Tensor:
    """Return π_θ / π_old of each sample.

    Args:
        lp: log π_θ, [N].
        old: log π_old, [N].

    Returns:
        [N].
    """
    return (lp - old).exp()


def loss(
    lp: Tensor, lp_old: Tensor, A: Tensor, eps_low: float = 0.2, eps_high: float = 0.28
) -> Tensor:
    """Compute DAPO's loss of N samples: the right answer.

    Args:
        lp: log π_θ, [N].
        lp_old: log π_old, [N].
        A: advantages, [N].
        eps_low: the lower bound of the ratio is 1 - eps_low.
        eps_high: the upper bound of the ratio is 1 + eps_high.

    Returns:
        A scalar, to be minimized.
    """
    r = ratio(lp, lp_old)
    return -torch.minimum(r * A, r.clamp(1 - eps_low, 1 + eps_high) * A).mean()


EXERCISE = Exercise(
    number=4,
    slug="clipping",
    title="clipping, and where it bites",
    function="loss",
    gradient="lp",
    right=loss,
    proof=lambda fn: check_samples(fn, "dapo", skip=("extremes", "masked-values")),
    arguments=arguments,
    batches=(
        batch("A > 0, r = 1.1: inside", [0.11], [0.1], [1.0]),
        batch("A > 0, r = 2: above the upper bound", [0.2], [0.1], [1.0]),
        batch("A > 0, r = 1/2: good, and less likely than it was", [0.1], [0.2], [1.0]),
        batch(
            "A = 1/2, r = 2: above the upper bound, though r A is not",
            [0.2],
            [0.1],
            [0.5],
        ),
        batch("A < 0, r = 1/2: below the lower bound", [0.1], [0.2], [-1.0]),
        batch("A < 0, r = 2: bad, and more likely than it was", [0.2], [0.1], [-1.0]),
        batch("A > 0, r = 1.25: inside, near the upper bound", [0.25], [0.2], [1.0]),
        batch("A < 0, r = 0.76: just below the lower bound", [0.38], [0.5], [-1.0]),
        batch("A < 0, r = 0.81: inside, near the lower bound", [0.405], [0.5], [-1.0]),
        batch(
            "A < 0, r = 12: bad, and twelve times as likely as it was",
            [0.6],
            [0.05],
            [-1.0],
        ),
        batch(
            "four samples, r = 1.1, 2, 1/2 and 1/2",
            [0.11, 0.4, 0.1, 0.2],
            [0.1, 0.2, 0.2, 0.4],
            [1.0, 2, 1, -1],
        ),
    ),
    faults=(
        Fault(
            "the minimum is missing: clip(r) A alone is clipped on both sides for both signs",
            lambda lp, old, A: -(ratio(lp, old).clamp(LOW, HIGH) * A).mean(),
            id="minimum-missing",
            hint="a good token that is less likely now must be pushed up again. Which is smaller, r A or clip(r) A?",
        ),
        Fault(
            "two mistakes: the minimum is missing, and the sum over the samples stands where "
            "their mean belongs",
            lambda lp, old, A: -(ratio(lp, old).clamp(LOW, HIGH) * A).sum(),
            id="minimum-missing-and-summed",
            hint="a good token that is less likely now must be pushed up again. And how does the size of a step "
            "depend on the number of samples?",
        ),
        Fault(
            "the larger of the two, where the smaller belongs",
            lambda lp, old, A: (
                -torch.maximum(
                    ratio(lp, old) * A, ratio(lp, old).clamp(LOW, HIGH) * A
                ).mean()
            ),
            id="maximum-for-minimum",
            hint="the objective takes the minimum of r A and clip(r) A. (Of a loss, which is -J, it is the "
            "maximum.)",
        ),
        Fault(
            "there is no clip",
            lambda lp, old, A: -(ratio(lp, old) * A).mean(),
            id="no-bound",
            hint="this is lesson 3's loss. Where is the token done, for A > 0, and where for A < 0?",
        ),
        Fault(
            "the sign",
            lambda lp, old, A: torch.minimum(
                ratio(lp, old) * A, ratio(lp, old).clamp(LOW, HIGH) * A
            ).mean(),
            id="sign-flipped",
            hint="an optimizer goes downhill: hand it minus the mean of the smaller of the two.",
        ),
        Fault(
            "both bounds are eps_low",
            lambda lp, old, A: (
                -torch.minimum(
                    ratio(lp, old) * A, ratio(lp, old).clamp(LOW, 1.2) * A
                ).mean()
            ),
            id="other-eps-high",
            hint="the upper bound is 1 + eps_high.",
        ),
        Fault(
            "both bounds are eps_high",
            lambda lp, old, A: (
                -torch.minimum(
                    ratio(lp, old) * A, ratio(lp, old).clamp(0.72, HIGH) * A
                ).mean()
            ),
            id="other-eps-low",
            hint="the lower bound is 1 - eps_low.",
        ),
        Fault(
            "the two bounds have changed places",
            lambda lp, old, A: (
                -torch.minimum(
                    ratio(lp, old) * A, ratio(lp, old).clamp(0.72, 1.2) * A
                ).mean()
            ),
            id="clip-sides-swapped",
            hint="below is 1 - eps_low, above is 1 + eps_high.",
        ),
        Fault(
            "the bounds are those of log r, not of r",
            lambda lp, old, A: (
                -torch.minimum(
                    ratio(lp, old) * A, (lp - old).clamp(-0.2, 0.28).exp() * A
                ).mean()
            ),
            id="bounds-on-log-ratio",
            hint="0.28 is how far r may be from 1. Take the exponential first, then clip.",
        ),
        Fault(
            "eps_low and eps_high are taken for the bounds themselves",
            lambda lp, old, A: (
                -torch.minimum(
                    ratio(lp, old) * A, ratio(lp, old).clamp(0.2, 0.28) * A
                ).mean()
            ),
            id="bounds-absolute",
            hint="they are distances from 1: the window is from 1 - eps_low to 1 + eps_high.",
        ),
        Fault(
            "the product r A is clipped, not the ratio",
            lambda lp, old, A: (
                -torch.minimum(
                    ratio(lp, old) * A, (ratio(lp, old) * A).clamp(LOW, HIGH)
                ).mean()
            ),
            id="product-clipped",
            hint="clip r; then multiply by A. With A = -1 the product is never near 1.",
        ),
        Fault(
            "A multiplies the minimum of r and clip(r), which is min(r, 1 + eps_high), whatever the sign of A",
            lambda lp, old, A: (
                -(
                    torch.minimum(ratio(lp, old), ratio(lp, old).clamp(LOW, HIGH)) * A
                ).mean()
            ),
            id="advantage-after-minimum",
            hint="A decides which of r A and clip(r) A is smaller: multiply both by A first, then take the minimum.",
        ),
        Fault(
            "the lower bound is missing",
            lambda lp, old, A: (
                -torch.minimum(
                    ratio(lp, old) * A, ratio(lp, old).clamp(max=HIGH) * A
                ).mean()
            ),
            id="no-lower-clip",
            hint="a bad token is done below r = 1 - eps_low.",
        ),
        Fault(
            "the upper bound is missing",
            lambda lp, old, A: (
                -torch.minimum(
                    ratio(lp, old) * A, ratio(lp, old).clamp(min=LOW) * A
                ).mean()
            ),
            id="no-upper-clip",
            hint="a good token is done above r = 1 + eps_high.",
        ),
        Fault(
            "the ratio is upside down",
            lambda lp, old, A: (
                -torch.minimum(
                    ratio(old, lp) * A, ratio(old, lp).clamp(LOW, HIGH) * A
                ).mean()
            ),
            id="ratio-inverted",
            hint="r = π_θ / π_old = exp(lp - lp_old).",
        ),
        Fault(
            "the weight is capped where it should be 0: this is CISPO",
            lambda lp, old, A: (
                -(ratio(lp, old).clamp(LOW, HIGH).detach() * A * lp).mean()
            ),
            id="weight-clipped",
            hint="beyond its bound a token has no gradient: min(r A, clip(r) A), without stop-gradient.",
        ),
        Fault(
            "the minimum of the two means, where the mean of the minima belongs",
            lambda lp, old, A: (
                -torch.minimum(
                    (ratio(lp, old) * A).mean(),
                    (ratio(lp, old).clamp(LOW, HIGH) * A).mean(),
                )
            ),
            id="minimum-of-means",
            hint="take the minimum for each token, then the mean.",
        ),
        Fault(
            "a bad token that has become more likely loses its gradient too: a two-sided clip, or a dual clip",
            lambda lp, old, A: (
                -torch.where(
                    A > 0,
                    torch.minimum(ratio(lp, old), torch.tensor(HIGH)),
                    ratio(lp, old).clamp(LOW, HIGH),
                )
                .mul(A)
                .mean()
            ),
            id="two-sided-clip-where-a-negative",
            hint="for A < 0 there is a lower bound only. A bad token at r = 2 is exactly the one to push down.",
        ),
        Fault(
            "a dual clip: a bad token beyond some r loses its gradient",
            lambda lp, old, A: (
                -torch.minimum(ratio(lp, old) * A, ratio(lp, old).clamp(LOW, HIGH) * A)
                .maximum(torch.where(A < 0, 3 * A, -torch.inf))
                .mean()
            ),
            id="dual-clip",
            hint="verl has one at r = 3 by default, DAPO's own code at r = 10. DAPO's equation has none.",
        ),
        Fault(
            "the sum over the samples where their mean belongs",
            lambda lp, old, A: (
                -torch.minimum(
                    ratio(lp, old) * A, ratio(lp, old).clamp(LOW, HIGH) * A
                ).sum()
            ),
            id="sum-for-mean",
            hint="with twice as many samples the step should not be twice as long.",
        ),
    ),
    notice="at r = 1 this loss and lesson 3's are the same. A run that takes one step per batch "
    "never clips, whatever the bounds.",
)
