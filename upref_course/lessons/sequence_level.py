# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

import torch
from torch import Tensor

from upref.rollouts import per_response
from upref.verify.check import check
from upref.verify.faults import Fault
from upref.verify.report import Report
from upref_course.exercise import Exercise, ExerciseBatch

LOW, HIGH = 1 - 3e-4, 1 + 4e-4


def mean_log(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return log s of each response: the mean of its log-ratios.

    Args:
        lp: log π_θ, [B, T].
        old: log π_old, [B, T].
        mask: [B, T], False on padding.

    Returns:
        [B].
    """
    return torch.where(mask, lp - old, 0).sum(1) / mask.sum(1)


def min_clip(s: Tensor, A: Tensor) -> Tensor:
    """Return minus the smaller of s A and clip(s) A, with GSPO's bounds.

    Args:
        s: ratios, of any shape.
        A: advantages, of a shape that broadcasts with it.

    Returns:
        The terms of a loss.
    """
    return -torch.minimum(s * A, s.clamp(LOW, HIGH) * A)


def loss(
    lp: Tensor,
    lp_old: Tensor,
    A: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> Tensor:
    """Compute GSPO's loss of B responses: the right answer.

    Args:
        lp: log π_θ, [B, T].
        lp_old: log π_old, [B, T].
        A: one advantage for each response, [B].
        mask: [B, T], False on padding.
        eps_low: part of the exercise's signature; not read: the bounds are the defaults.
        eps_high: as eps_low.

    Returns:
        A scalar, to be minimized.
    """
    return min_clip(mean_log(lp, lp_old, mask).exp(), A).mean()


def report(fn: Callable[..., Tensor]) -> Report:
    """Run `upref check` on the student's function, with one advantage per response.

    Args:
        fn: (lp, lp_old, A, mask) -> a loss.

    Returns:
        The report, with GSPO as the objective.
    """

    def wrapped(
        log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor
    ) -> Tensor:
        """Call the function with one advantage for each response, [B]."""
        return fn(log_prob, old_log_prob, per_response(advantages, mask), mask)

    return check(wrapped, "gspo", skip=("extremes", "masked-values"))


def batch(
    shows: str,
    log_r: list[list[float]],
    A: list[float],
    mask: list[list[bool]] | None = None,
) -> ExerciseBatch:
    """Make B responses by their log-ratios.

    Args:
        shows: what it shows, in words.
        log_r: log(π_θ / π_old) of each token, [B, T].
        A: one advantage for each response, [B].
        mask: [B, T], False on padding; None: there is no padding.

    Returns:
        A batch whose inputs are the arguments of the exercise.
    """
    log_ratio = torch.tensor(log_r, dtype=torch.float64)
    if mask is None:
        trains = torch.ones_like(log_ratio, dtype=torch.bool)
    else:
        trains = torch.tensor(mask)
    lp = torch.full_like(log_ratio, -1.0)
    return ExerciseBatch(
        shows,
        {
            "lp": lp,
            "lp_old": lp - log_ratio,
            "A": torch.tensor(A, dtype=torch.float64),
            "mask": trains,
        },
    )


def mean_over_tokens(term: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a loss: the mean over responses of the mean of a term over their tokens.

    Args:
        term: (ratios [B, T], advantages [B, 1]) -> [B, T].

    Returns:
        A function of (lp, lp_old, A, mask).
    """

    def objective(lp: Tensor, old: Tensor, A: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of the term, a scalar."""
        x = term(torch.where(mask, lp - old, 0).exp(), A[:, None])
        return (torch.where(mask, x, 0).sum(1) / mask.sum(1)).mean()

    return objective


EXERCISE = Exercise(
    number=7,
    slug="sequence-level",
    title="one ratio for the whole response",
    function="loss",
    gradient="lp",
    right=loss,
    proof=report,
    arguments=lambda b: {
        "lp": b.logp,
        "lp_old": b.logp_old,
        "A": per_response(b.adv, b.mask),
        "mask": b.mask,
    },
    batches=(
        batch("one response of two tokens, on policy", [[0.0, 0.0]], [1.0]),
        batch("A > 0, one token up, one down: s is inside", [[0.3, -0.2998]], [1.0]),
        batch(
            "A > 0, both tokens a little up: s is above its bound",
            [[0.01, 0.002]],
            [1.0],
        ),
        batch(
            "A < 0, one token up, one far down: s is below its bound",
            [[0.3, -1.0]],
            [-1.0],
        ),
        batch("A < 0, both up", [[0.3, 0.5]], [-1.0]),
        batch(
            "one token, and one slot of padding", [[-0.5, 0.2]], [2.0], [[True, False]]
        ),
        batch(
            "two responses, of two tokens and of one",
            [[0.1, -0.3], [-0.2, 5.0]],
            [1.0, 2.0],
            [[True, True], [True, False]],
        ),
    ),
    faults=(
        Fault(
            "the product of the ratios: the sum of their logarithms where the mean belongs",
            lambda lp, old, A, mask: min_clip(
                torch.where(mask, lp - old, 0).sum(1).exp(), A
            ).mean(),
            id="log-ratio-summed",
            hint="s is the geometric mean: divide the sum of lp - lp_old by the number of tokens before the "
            "exponential.",
        ),
        Fault(
            "the arithmetic mean of the ratios",
            lambda lp, old, A, mask: min_clip(
                torch.where(mask, (lp - old).exp(), 0).sum(1) / mask.sum(1), A
            ).mean(),
            id="arithmetic-mean-of-ratios",
            hint="s is the geometric mean: first the mean of lp - lp_old, then the exponential.",
        ),
        Fault(
            "every token has its own ratio and its own clip: lesson 4's loss with GSPO's bounds",
            mean_over_tokens(min_clip),
            id="ratio-of-token",
            hint="one number s for a response: all its tokens are clipped together, or none.",
        ),
        Fault(
            "padding is counted in |o|",
            lambda lp, old, A, mask: min_clip(
                torch.where(mask, lp - old, 0).mean(1).exp(), A
            ).mean(),
            id="log-ratio-over-padded-width",
            hint="divide by the number of tokens of the response, mask.sum(1), not by the width of the batch.",
        ),
        Fault(
            "the mask is not used",
            lambda lp, old, A, mask: min_clip((lp - old).mean(1).exp(), A).mean(),
            id="log-ratio-ignores-mask",
            hint="a slot where the mask is False is padding: it may hold any number.",
        ),
        Fault(
            "the minimum is missing",
            lambda lp, old, A, mask: (
                -(mean_log(lp, old, mask).exp().clamp(LOW, HIGH) * A).mean()
            ),
            id="minimum-missing",
            hint="as in lesson 4: min(s A, clip(s) A).",
        ),
        Fault(
            "there is no clip",
            lambda lp, old, A, mask: -(mean_log(lp, old, mask).exp() * A).mean(),
            id="no-bound",
            hint="as in lesson 4, with s in place of r.",
        ),
        Fault(
            "long responses weigh more: the mean is over tokens",
            lambda lp, old, A, mask: (
                (min_clip(mean_log(lp, old, mask).exp(), A) * mask.sum(1)).sum()
                / mask.sum()
            ),
            id="aggregated-by-token-mean",
            hint="a response has one term. Take the mean over responses (the default "
            "of TRL and verl is the mean over tokens).",
        ),
        Fault(
            "the sum over the responses where their mean belongs",
            lambda lp, old, A, mask: loss(lp, old, A, mask) * len(A),
            id="sum-for-mean",
            hint="Eq. 6 has 1/G in front.",
        ),
        Fault(
            "the sign",
            lambda lp, old, A, mask: -loss(lp, old, A, mask),
            id="sign-flipped",
            hint="an optimizer goes downhill.",
        ),
        Fault(
            "lesson 4's bounds: 0.2 and 0.28",
            lambda lp, old, A, mask: (
                -torch.minimum(
                    (s := mean_log(lp, old, mask).exp()) * A, s.clamp(0.8, 1.28) * A
                ).mean()
            ),
            id="other-eps-low-eps-high",
            hint="s is a mean over many tokens and moves little: GSPO's bounds are 3e-4 and 4e-4.",
        ),
    ),
    notice="the gradient of every token of a response is the same, A s / |o|: the ratio of one rare token hardly "
    "shows. UP-GSPO, Eq. 16, is this with A mean(log π_θ) for A > 0.",
)
