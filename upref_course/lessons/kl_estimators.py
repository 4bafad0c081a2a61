# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

from torch import Tensor

from upref import kl
from upref.verify.faults import Fault
from upref.verify.faults.kl import (
    ABSOLUTE,
    FLIPPED,
    INVERTED,
    NEGATIVE,
    NO_LOG,
    PLUS,
    SQUARE,
    WEIGHTED,
)
from upref.verify.kl import check_kl
from upref_course.exercise import Exercise, ExerciseBatch
from upref_course.samples import numbers


def k3(lp: Tensor, lp_ref: Tensor) -> Tensor:
    """Return e^d - 1 - d with d = log π_ref - log π_θ: the right answer.

    Args:
        lp: log π_θ, [N].
        lp_ref: log π_ref, [N].

    Returns:
        [N], 0 or more.
    """
    return kl.k3(lp, lp_ref)


def batch(shows: str, p: list[float], p_ref: list[float]) -> ExerciseBatch:
    """Make tokens by their probabilities.

    Args:
        shows: what it shows, in words.
        p: their probabilities under π_θ, [N].
        p_ref: their probabilities under π_ref, [N].

    Returns:
        A batch whose inputs are lp and lp_ref.
    """
    return ExerciseBatch(
        shows, {"lp": numbers(p).log(), "lp_ref": numbers(p_ref).log()}
    )


EXERCISE = Exercise(
    number=9,
    slug="kl-estimators",
    title="three estimators of one divergence",
    function="k3",
    gradient="lp",
    value=True,
    right=k3,
    proof=lambda fn: check_kl(
        lambda log_prob, ref_log_prob: fn(log_prob, ref_log_prob), "k3"
    ),
    batches=(
        batch("a token that both policies give 1/4", [0.25], [0.25]),
        batch(
            "a token that is half as likely now as under the reference: d = log 2",
            [0.2],
            [0.4],
        ),
        batch("a token that is twice as likely now: d = -log 2", [0.4], [0.2]),
        batch("three tokens", [0.5, 0.1, 0.3], [0.25, 0.4, 0.3]),
    ),
    faults=(
        replace(
            INVERTED,
            words="d has the wrong sign: π_θ / π_ref where π_ref / π_θ belongs",
            hint="d = log π_ref - log π_θ. The samples are π_θ's, so it is π_ref that needs a ratio.",
        ),
        Fault(
            "the - 1 is missing: two equal policies are not at 0",
            lambda lp, ref: (ref - lp).exp() - (ref - lp),
            id="k3-one-missing",
            hint="k3 = e^d - 1 - d. At d = 0 it must be 0.",
        ),
        replace(
            PLUS,
            words="+ d where - d belongs",
            hint="k3 is never negative. Is yours, for d = -log 2?",
        ),
        replace(
            NO_LOG,
            words="- d is missing",
            hint="e^d - 1 alone has mean 0 under π_θ, whatever the policies.",
        ),
        Fault(
            "this is k1",
            kl.k1,
            id="estimator-k1",
            hint="right on average, but it may be negative, and as a loss it does nothing.",
        ),
        replace(FLIPPED, hint="and k3 = e^d - 1 - d."),
        Fault(
            "this is k2",
            kl.k2,
            id="estimator-k2",
            hint="it is biased. k3 = e^d - 1 - d.",
        ),
        replace(SQUARE, hint="k3 = e^d - 1 - d."),
        replace(ABSOLUTE, hint="k3 = e^d - 1 - d."),
        replace(
            WEIGHTED,
            words="weighed by π_θ, though the samples come as often as π_θ says",
            hint="the mean over samples is the sum over π_θ already. No lp.exp() in front.",
        ),
        replace(
            NEGATIVE,
            hint="it is a divergence, 0 or more. The loss adds beta times it, the objective takes it away.",
        ),
        Fault(
            "the mean over the tokens",
            lambda lp, ref: kl.k3(lp, ref).mean(),
            id="mean-over-tokens",
            hint="one number for each token, [N]: the aggregation of lesson 8 comes later.",
        ),
    ),
    notice="its value is that of KL(π_θ ‖ π_ref) on average; the gradient of a token is that of KL(π_ref ‖ π_θ).",
)
