# SPDX-License-Identifier: Apache-2.0
"""What was done to the right gradient, or to its parts, before the optimizer got it:
clips and weight decay.
"""

import torch
from torch import Tensor

from upref.step.forward import MAX_RESIDUAL, best_factors, clip_norm, is_near
from upref.step.goal import Goal
from upref.step.reference import Model, TorchModel
from upref.verify.faults import measured
from upref.verify.finding import NO_CAUSE, Cause


def divided_after(
    clip: float, whole: Tensor, g: Tensor, counts: dict[str, int], bound: float
) -> Cause:
    """The count by which a gradient was divided after its norm was clipped.

    Args:
        clip: the bound of the norm.
        whole: the right gradient before its clip, [P].
        g: the gradient that was found, [P].
        counts: what it may be divided by.
        bound: the relative error that is allowed.
    """
    for what, n in counts.items():
        if n > 1 and is_near(g, clip_norm(whole * n, clip) / n, bound):
            acts = float(whole.norm()) * n > clip
            if acts and not is_near(g, clip_norm(whole, clip), bound):
                return measured.NORM_CLIPPED_BEFORE_DIVISION.cause(
                    norm=clip, number=n, what=what
                )
    return NO_CAUSE


def find_change(
    goal: Goal, model: Model, rows: Tensor, want: Tensor, g: Tensor, bound: float
) -> Cause:
    """Find the change of the right gradient that makes the one that was found.

    Args:
        goal: the objective with its terms.
        model: the reference.
        rows: the right gradient of each row, [B, P].
        want: the right gradient, [P].
        g: the gradient that was found, [P].
        bound: the relative error that is allowed.

    Returns:
        The cause; none where no change makes it.
    """
    total = rows.sum(0)
    return (
        _weight_decay(model, want, g, bound)
        or _clip_of_entries(total, g, bound)
        or _clip_of_each_parameter(goal, model, total, g, bound)
        or _clip_of_accumulated_norm(goal, rows, g, bound)
        or _clip_that_scales_rows(goal, rows, g, bound)
    )


def _weight_decay(model: Model, want: Tensor, g: Tensor, bound: float) -> Cause:
    """Return the cause that a multiple of the parameters is added; none otherwise."""
    if isinstance(model, TorchModel):
        theta = model.flat({name: p.detach() for name, p in model.params.items()})
        rate = float((g - want) @ theta / (theta @ theta))
        if is_near(g, want + rate * theta, bound):
            return measured.WEIGHT_DECAY_IN_GRADIENT.cause(rate=rate)
    return NO_CAUSE


def _clip_of_entries(total: Tensor, g: Tensor, bound: float) -> Cause:
    """Return the cause that each entry is clipped, in place of the norm; none
    otherwise.
    """
    # the bound shows: what was clipped is now the largest entry
    largest = float(g.abs().max())
    if is_near(g, total.clamp(-largest, largest), bound):
        return measured.ENTRIES_CLIPPED.cause(largest=largest)
    return NO_CAUSE


def _clip_of_each_parameter(
    goal: Goal, model: Model, total: Tensor, g: Tensor, bound: float
) -> Cause:
    """Return the cause that the norm of each parameter's gradient is clipped by itself,
    at the goal's bound or at the largest of these norms; none otherwise.
    """
    parts = model.split(total).values()
    largest_norm = max(float(part.norm()) for part in model.split(g).values())
    for clip in dict.fromkeys((goal.clip or 0.0, largest_norm)):
        clipped = torch.cat([clip_norm(part, clip) for part in parts])
        several_clipped = sum(float(part.norm()) > clip for part in parts) > 1
        if several_clipped and is_near(g, clipped, bound):
            return measured.PARAMETERS_CLIPPED.cause(norm=clip)
    return NO_CAUSE


def _clip_of_accumulated_norm(
    goal: Goal, rows: Tensor, g: Tensor, bound: float
) -> Cause:
    """Return the cause that the norm of what has accumulated is clipped after each
    micro-batch; none otherwise.
    """
    for clip in dict.fromkeys((goal.clip or 0.0, float(g.norm()))):
        for size in range(1, len(rows)):
            first, *others = rows.split(size)
            accumulated = first.sum(0)
            acts_early = False  # after the last micro-batch it is the usual clip
            for other in others:
                acts_early = acts_early or float(accumulated.norm()) > clip
                accumulated = clip_norm(accumulated, clip) + other.sum(0)
            if acts_early and is_near(g, clip_norm(accumulated, clip), bound):
                return measured.ACCUMULATED_NORM_CLIPPED.cause(
                    norm=clip, responses=size
                )
    return NO_CAUSE


def _clip_that_scales_rows(goal: Goal, rows: Tensor, g: Tensor, bound: float) -> Cause:
    """Return the cause that the norm of each micro-batch is clipped by itself, or that
    the norm is clipped where it should not be; none otherwise. Both only make rows
    smaller.
    """
    factors, residual = best_factors(rows, g)
    if residual > max(MAX_RESIDUAL, 3 * bound) or not (factors < 1 + 1e-4).all():
        return NO_CAUSE
    for size in range(1, len(rows)):
        parts = rows.split(size)
        norms_of_clipped = [
            float((part_factors @ part).norm())
            for part, part_factors in zip(parts, factors.split(size), strict=True)
            if part_factors.max() < 1 - 1e-3
        ]
        if len(norms_of_clipped) < 2:
            continue
        clip = max(norms_of_clipped)
        clipped = torch.stack([clip_norm(part.sum(0), clip) for part in parts]).sum(0)
        if is_near(g, clipped, bound):
            return measured.MICRO_BATCH_NORMS_CLIPPED.cause(responses=size, norm=clip)
    # a bound is a round number, and a factor of 1/2 is another fault
    clip = float(f"{g.norm():.2g}")
    if (
        goal.clip is None
        and is_near(g, clip_norm(rows.sum(0), clip), bound)
        and abs(factors[0] - 0.5) > 1e-3
    ):
        return measured.NORM_CLIPPED.cause(norm=clip)
    return NO_CAUSE
