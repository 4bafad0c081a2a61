# SPDX-License-Identifier: Apache-2.0
"""The oracle of the inputs that a framework's trainer may give a loss, or leave out: a
mask of tools, importance ratios, advantages of another shape, no old log-probabilities.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from upref.errors import InputError
from upref.verify.measure import LossCase
from upref.verify.oracle import oracle
from upref.verify.oracles.invariance import (
    gradient_distance,
    grid_off_bounds,
)
from upref.verify.report import Finding, note
from upref.verify.shrink import gradient_pair, worst


def _why_one_way(case: LossCase) -> str:
    """Return why no other inputs are tried; "" where they are."""
    if case.wrong:
        return "the weights are wrong already"
    if not case.loss.given_otherwise:
        return "no trainer is known to give it its inputs in another way"
    return ""


@oracle("contract", 75, _why_one_way, implied=True)
def contract(case: LossCase) -> Iterator[Finding]:
    """Note each way of giving the loss the same batch in which it has another gradient
    than it must have, or refuses the inputs.

    Args:
        case: the loss and its objective.

    Yields:
        A note for each way.
    """
    for other in case.loss.given_otherwise:
        batch = case.ready(other.prepare(grid_off_bounds(case)))
        given_otherwise = replace(case.loss, call=other.call, log=[])
        try:
            due = case.gradient(batch) * other.factor(batch)
            found = given_otherwise.gradient(batch)
        except InputError as e:
            yield note("contract", f"{other.words} are refused", found=str(e))
            continue
        # tokens that must not train are among what is compared
        every_slot = torch.ones_like(batch.mask)
        distances = gradient_distance(found, due, every_slot, case.allowed_error())
        if distances.max() > 0:
            numbers = gradient_pair(due, found, worst(distances))
            yield note("contract", other.words, *numbers, other.advice)
