# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

import torch
from torch import Tensor

from upref.verify.faults import Fault
from upref_course.exercise import Exercise, ExerciseBatch
from upref_course.samples import arguments, batch, check_samples, numbers

LOW = 0.8  # the lower bound of DAPO's clip, 1 - eps_low at its default


def ratio(lp: Tensor, lp_old: Tensor, A: Tensor | None = None) -> Tensor:
    """Return π_θ / π_old of each sample.

    Args:
        lp: log π_θ, [N].
        lp_old: log π_old, [N].
        A: advantages, [N]; where they are above 0 the ratio is set to 1, so that it
            cannot overflow. None: no ratio is.

    Returns:
        [N].
    """
    log_r = lp - lp_old
    if A is not None:
        log_r = torch.where(A > 0, 0, log_r)
    return log_r.exp()


def clipped_term(lp: Tensor, lp_old: Tensor, A: Tensor) -> Tensor:
    """Return DAPO's objective of bad samples: min(r A, max(r, 0.8) A).

    Args:
        lp: log π_θ, [N].
        lp_old: log π_old, [N].
        A: advantages, [N].

    Returns:
        [N]. Where A > 0 it means nothing, but is finite.
    """
    r = ratio(lp, lp_old, A)
    return torch.minimum(r * A, r.clamp(min=LOW) * A)


def loss(lp: Tensor, lp_old: Tensor, A: Tensor, eps_low: float = 0.2) -> Tensor:
    """Compute UP-DAPO's loss of N samples: the right answer.

    Args:
        lp: log π_θ, [N].
        lp_old: log π_old, [N].
        A: advantages, [N].
        eps_low: part of the exercise's signature; not read: the bound is LOW.

    Returns:
        A scalar, to be minimized.
    """
    return -torch.where(A > 0, A * lp, clipped_term(lp, lp_old, A)).mean()


def by_sign(
    good: Callable[..., Tensor], bad: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Make a loss of a term for good samples and one for bad samples.

    Args:
        good: (lp, lp_old, A) -> the objective where A > 0, [N].
        bad: (lp, lp_old, A) -> the objective where A <= 0, [N].

    Returns:
        A function of (lp, lp_old, A): minus the mean over all samples.
    """
    return lambda lp, old, A: (
        -torch.where(A > 0, good(lp, old, A), bad(lp, old, A)).mean()
    )


def log_term(lp: Tensor, old: Tensor, A: Tensor) -> Tensor:
    """Return UP's objective of good samples: A log π.

    Args:
        lp: log π_θ, [N].
        old: part of the signature that `by_sign` calls; not read.
        A: advantages, [N].

    Returns:
        [N].
    """
    return A * lp


def ratio_term(lp: Tensor, old: Tensor, A: Tensor) -> Tensor:
    """Return the objective of importance sampling: r A.

    Args:
        lp: log π_θ, [N].
        old: log π_old, [N].
        A: advantages, [N].

    Returns:
        [N].
    """
    return A * ratio(lp, old)


def dapo_term(lp: Tensor, old: Tensor, A: Tensor) -> Tensor:
    """Return DAPO's objective: min(r A, clip(r) A).

    Args:
        lp: log π_θ, [N].
        old: log π_old, [N].
        A: advantages, [N].

    Returns:
        [N].
    """
    return torch.minimum(ratio(lp, old) * A, ratio(lp, old).clamp(LOW, 1.28) * A)


FAR = numbers([-0.1]), numbers([-1000.0])

EXERCISE = Exercise(
    number=6,
    slug="up",
    title="UP, and its price",
    function="loss",
    gradient="lp",
    right=loss,
    proof=lambda fn: check_samples(fn, "up_dapo", skip=("masked-values",)),
    arguments=arguments,
    batches=(
        batch("A > 0, r = 1", [0.1], [0.1], [1.0]),
        batch("A > 0, r = 2: DAPO would have clipped it", [0.2], [0.1], [1.0]),
        batch("A > 0, r = 1/2", [0.1], [0.2], [2.0]),
        batch("A < 0, r = 2", [0.2], [0.1], [-1.0]),
        batch("A < 0, r = 1/2: below the lower bound", [0.1], [0.2], [-1.0]),
        batch(
            "A < 0, r = 12: bad, and twelve times as likely as it was",
            [0.6],
            [0.05],
            [-1.0],
        ),
        ExerciseBatch(
            "A > 0, and r = e^999.9, too large for a number",
            {
                "lp": FAR[0],
                "lp_old": FAR[1],
                "A": numbers([1.0]),
            },
        ),
        batch(
            "four samples, r = 2, 1/2, 2 and 1/2",
            [0.2, 0.1, 0.4, 0.2],
            [0.1, 0.2, 0.2, 0.4],
            [1.0, 2, -1, -1],
        ),
    ),
    faults=(
        Fault(
            "a ratio overflows, and the gradient is NaN: 0 * inf or inf / inf",
            by_sign(
                log_term,
                lambda lp, old, A: torch.minimum(
                    ratio(lp, old) * A, ratio(lp, old).clamp(min=LOW) * A
                ),
            ),
            id="overflow",
            hint="torch.where computes both branches, and the backward pass goes through both. Keep the exponent "
            "at 0 where A > 0: r = torch.where(A > 0, 0, lp - lp_old).exp().",
        ),
        Fault(
            "good tokens still have a ratio: this is importance sampling for A > 0",
            by_sign(ratio_term, clipped_term),
            id="ratio-where-a-positive",
            hint="UP has weight A there, whatever r is: log π_θ has no π_old in it.",
        ),
        Fault(
            "good tokens still have a ratio, with a cap",
            by_sign(
                lambda lp, old, A: (lp - old).exp().clamp(max=1.28).detach() * A * lp,
                clipped_term,
            ),
            id="capped-ratio-where-a-positive",
            hint="UP has weight A there, whatever r is: log π_θ has no π_old in it.",
        ),
        Fault(
            "good and bad tokens are averaged apart",
            lambda lp, old, A: (
                -sum(
                    (
                        (log_term if good else clipped_term)(lp, old, A)[
                            (A > 0) == good
                        ]
                    ).mean()
                    for good in (True, False)
                    if ((A > 0) == good).any()
                )
            ),
            id="signs-averaged-over-own-tokens",
            hint="divide by all N.",
        ),
        Fault(
            "good tokens are still clipped: this is DAPO",
            lambda lp, old, A: -dapo_term(lp, old, A).mean(),
            id="positive-tokens-clipped",
            hint="UP leaves the clip to the bad tokens. For A > 0 it is A log π_θ.",
        ),
        Fault(
            "A log π_θ for bad tokens, too",
            lambda lp, old, A: -(A * lp).mean(),
            id="log-prob-where-a-negative",
            hint="off-policy REINFORCE pushes a bad token down without end. For A <= 0 UP keeps DAPO's clipped "
            "term.",
        ),
        Fault(
            "π_θ itself where log π_θ belongs",
            by_sign(lambda lp, old, A: A * lp.exp(), clipped_term),
            id="probability-for-log-prob",
            hint="A π_θ has weight A π_θ: the rarer the token, the weaker the push. A log π_θ has weight A.",
        ),
        Fault(
            "the branches have changed places",
            by_sign(dapo_term, log_term),
            id="branches-exchanged",
            hint="A log π_θ is for the good tokens, A > 0.",
        ),
        Fault(
            "bad tokens have lost their lower clip",
            by_sign(log_term, ratio_term),
            id="no-lower-clip",
            hint="below r = 1 - eps_low a bad token has been pushed far enough: the term of lesson 4.",
        ),
        Fault(
            "bad tokens are clipped on both sides: the minimum is missing",
            by_sign(
                log_term,
                lambda lp, old, A: (
                    torch.where(A > 0, 0, lp - old).exp().clamp(LOW, 1.28) * A
                ),
            ),
            id="minimum-missing",
            hint="a bad token that has become more likely (r = 2) must be pushed down: min(r A, clip(r) A).",
        ),
        Fault(
            "a dual clip: a bad token beyond some r loses its gradient",
            by_sign(
                log_term, lambda lp, old, A: clipped_term(lp, old, A).maximum(3 * A)
            ),
            id="dual-clip",
            hint="verl has one at r = 3 by default, DAPO's own code at r = 10. UP's equation has none.",
        ),
        Fault(
            "good tokens get no gradient: their term has no lp in it, or lp is detached or cancels",
            by_sign(lambda lp, old, A: A * lp.detach(), clipped_term),
            id="positive-advantages-dropped",
            hint="in π_θ / sg(π_θ) only the denominator is a constant: (lp - lp.detach()).exp().",
        ),
        Fault(
            "the sign",
            lambda lp, old, A: -loss(lp, old, A),
            id="sign-flipped",
            hint="an optimizer goes downhill: hand it minus the mean.",
        ),
        Fault(
            "the sum over the samples where their mean belongs",
            lambda lp, old, A: loss(lp, old, A) * len(A),
            id="sum-for-mean",
            hint="with twice as many samples the step should not be twice as long.",
        ),
    ),
    notice="A (lp - lp.detach()).exp(), the paper's Eq. 12, has the same gradient and another value. Where r = 1 this "
    "loss and DAPO's have the same gradient: UP changes nothing in the first step after sampling.",
)
