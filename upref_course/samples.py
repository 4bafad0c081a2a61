# SPDX-License-Identifier: Apache-2.0
"""What the exercises about N samples of one token share: their batches, and
`upref check` of a loss of theirs.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upref.registry import Objective, get
from upref.rollouts import Rollouts
from upref.verify.check import check
from upref.verify.report import Report
from upref_course.exercise import ExerciseBatch


def numbers(values: list[float]) -> Tensor:
    """Make a float64 tensor.

    Args:
        values: its numbers.

    Returns:
        [N].
    """
    return torch.tensor(values, dtype=torch.float64)


def batch(shows: str, p: list[float], mu: list[float], A: list[float]) -> ExerciseBatch:
    """Make a batch of N samples of one token each.

    Args:
        shows: what it shows, in words.
        p: their probabilities now, [N].
        mu: their probabilities when they were drawn, [N].
        A: their advantages, [N].

    Returns:
        A batch whose inputs are lp, lp_old and A.
    """
    return ExerciseBatch(
        shows, {"lp": numbers(p).log(), "lp_old": numbers(mu).log(), "A": numbers(A)}
    )


def arguments(rollouts: Rollouts) -> dict[str, Any]:
    """Turn the tokens of a batch of `upref check` into samples of the exercise.

    Args:
        rollouts: token tensors [B, T].

    Returns:
        lp, lp_old and A of the tokens that train, [N].
    """
    return {
        "lp": rollouts.logp[rollouts.mask],
        "lp_old": rollouts.logp_old[rollouts.mask],
        "A": rollouts.adv.expand_as(rollouts.logp)[rollouts.mask],
    }


def check_samples(
    fn: Callable[..., Any], objective: str | Objective, skip: tuple[str, ...] = ()
) -> Report:
    """Run `upref check` on a function of samples.

    The samples are the tokens of all responses, so that their mean is the mean over
    tokens. Bounds that `fn` takes and does not use are found: they are parameters of
    what is checked, too.

    Args:
        fn: (lp, lp_old, A) -> a loss, of samples [N], with the bounds that it takes.
        objective: what the loss should be.
        skip: oracles that are left out.

    Returns:
        The report.
    """
    reference = get(objective) if isinstance(objective, str) else objective
    bounds = {
        k: v
        for k, v in inspect.signature(fn).parameters.items()
        if k in reference.hyperparameters
    }

    def wrapped(
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        mask: Tensor,
        **given: Any,
    ) -> Tensor:
        """Call the function with the trained tokens alone."""
        return fn(log_prob[mask], old_log_prob[mask], advantages[mask], **given)

    # the signature that `upref check` reads: the four tensors, and the bounds of `fn`
    own = list(inspect.signature(wrapped).parameters.values())[:4]
    wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*own, *(v.replace(kind=v.KEYWORD_ONLY) for v in bounds.values())]
    )
    return check(wrapped, reference, skip=skip)
