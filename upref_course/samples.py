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


def numbers(x: list[float]) -> torch.Tensor:
    """As a float64 tensor."""
    return torch.tensor(x, dtype=torch.float64)


def batch(shows: str, p: list[float], mu: list[float], A: list[float]) -> ExerciseBatch:
    """lp, lp_old and A of samples whose probability was mu and is p."""
    return ExerciseBatch(
        shows, {"lp": numbers(p).log(), "lp_old": numbers(mu).log(), "A": numbers(A)}
    )


def arguments(b: Rollouts) -> dict[str, Any]:
    """The tokens of a batch of `upref check`, as the samples that they are to the
    student's function.
    """
    return {
        "lp": b.logp[b.mask],
        "lp_old": b.logp_old[b.mask],
        "A": b.adv.expand_as(b.logp)[b.mask],
    }


def checked(
    fn: Callable[..., Any], objective: str | Objective, skip: tuple[str, ...] = ()
) -> Report:
    """upref check: the samples are the tokens of all responses, so that their mean is
    the mean over tokens.

    Bounds that fn takes and does not use are found: they are parameters of what is
    checked, too.
    """
    o = get(objective) if isinstance(objective, str) else objective
    bounds = {
        k: v
        for k, v in inspect.signature(fn).parameters.items()
        if k in o.hyperparameters
    }

    def wrapped(
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        mask: Tensor,
        **given: Any,
    ) -> Tensor:
        return fn(log_prob[mask], old_log_prob[mask], advantages[mask], **given)

    own = list(inspect.signature(wrapped).parameters.values())[:4]
    wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*own, *(v.replace(kind=v.KEYWORD_ONLY) for v in bounds.values())]
    )
    return check(wrapped, o, skip=skip)
