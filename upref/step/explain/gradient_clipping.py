# SPDX-License-Identifier: Apache-2.0
"""What was done to the right gradient, or to its parts, before the optimizer got it:
clips and weight decay.
"""

import math

import torch
from torch import Tensor

from upref.step.compare.forward import MAX_RESIDUAL, best_factors, clip_norm, is_near
from upref.step.compare.goal import Goal
from upref.step.inputs.reference import Model, TorchModel
from upref.verify.faults import measured
from upref.verify.finding import NO_CAUSE, Cause

LARGEST_CHANCE = 0.01  # with which any norm is a number of two digits, to the bound


def divided_after(
    clip: float, whole: Tensor, g: Tensor, counts: dict[str, int], bound: float
) -> Cause:
    """Return the cause that the gradient was divided by a count after its norm was
    clipped; none where no count gives the gradient.

    Args:
        clip: the bound of the norm.
        whole: the right gradient before its clip, [P].
        g: the gradient that was found, [P].
        counts: what it may be divided by, by its name.
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
    cause = (
        _weight_decay(model, want, g, bound)
        or _clip_of_entries(total, g, bound)
        or _clip_of_each_parameter(goal, model, total, g, bound)
    )
    if cause:
        return cause
    if is_near(g, clip_norm(total, float(g.norm())), bound):
        # any factor below 1: clips of parts may give it too, where one part has it all
        return _clip_to_round_number(goal, total, g, bound)
    return _clip_of_accumulated_norm(goal, rows, g, bound) or _clip_of_micro_batches(
        rows, g, bound
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
            for other in others:
                accumulated = clip_norm(accumulated, clip) + other.sum(0)
            if is_near(g, clip_norm(accumulated, clip), bound):
                return measured.ACCUMULATED_NORM_CLIPPED.cause(
                    norm=clip, responses=size
                )
    return NO_CAUSE


def _clip_of_micro_batches(rows: Tensor, g: Tensor, bound: float) -> Cause:
    """Return the cause that the norm of each micro-batch is clipped by itself, which only
    makes rows smaller; none otherwise.
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
    return NO_CAUSE


def _clip_to_round_number(goal: Goal, whole: Tensor, g: Tensor, bound: float) -> Cause:
    """Return the cause that the norm is clipped where it should not be; none otherwise.

    Any factor below 1 gives such a gradient. Only a norm that is a number of two digits,
    and not by chance, tells that it is a clip.
    """
    norm = float(g.norm())
    clip = float(f"{norm:.2g}")
    step = 10.0 ** (math.floor(math.log10(norm)) - 1)  # to the next such number
    chance = 2 * bound * norm / step
    if goal.clip is not None or chance > LARGEST_CHANCE:
        return NO_CAUSE
    is_half = abs(float(g @ whole / (whole @ whole)) - 0.5) < 1e-3  # another fault
    if is_near(g, clip_norm(whole, clip), bound) and not is_half:
        return measured.NORM_CLIPPED.cause(norm=clip)
    return NO_CAUSE
