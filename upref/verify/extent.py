# SPDX-License-Identifier: Apache-2.0
"""Up to where one wrong token is wrong: the size of its advantage, or its probability, at
which a token like it becomes right.
"""

import math
from collections.abc import Callable

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.faults.batch_reading import between, bisected
from upref.verify.finding import NO_CAUSE, Cause
from upref.verify.measure import LossCase

# powers of ten by which the advantage is multiplied, the nearest first
SCALES = tuple(sign * power for power in range(1, 8) for sign in (1, -1))
# by how much both log-probabilities are lowered, the least first
LOWER_BY = (0.02, 0.1, 0.3, 1.0, 3.0, 8.0)
# the policies by their fields; a logarithm of 0 may stand for a number that is missing
POLICIES = {"logp_sampler": "μ", "logp_ref": "π_ref", "logp_old": "π_old"}
# the largest relative error of a right token. What is added to a weight is lost below
# the tolerance of a verdict where A is large, and is there all the same
EXACT = 1e-12
HARDLY = 1e-9  # by how much such a logarithm is lowered


def bound_of_token(case: LossCase, batch: Rollouts) -> Cause:
    """Return where a token like the wrong one of this batch is right; no cause where
    the batch has several slots, or no such token is right.

    Args:
        case: the loss and its objective.
        batch: the batch, in which a weight is wrong.
    """
    if batch.mask.numel() != 1:
        return NO_CAUSE

    def is_right(changed: Rollouts) -> bool:
        """Return whether the weight is right, relative to its own size."""
        try:
            errors = case.weight_error(changed, case.weights(changed), 1e-12)
        except InputError:  # it refuses such a token
            return False
        return bool(errors.max() <= EXACT)

    def scaled(power: float) -> Rollouts:
        """Return the batch with another size of A."""
        return batch.but(adv=batch.adv * 10**power)

    def lowered(by: float) -> Rollouts:
        """Return the batch with the same ratios between less likely tokens."""
        others = {
            name: x - by
            for name, x in batch.tensors().items()
            if name in ("logp", "logp_old", "logp_ref", "logp_sampler")
        }
        return batch.but(**others)

    A = abs(batch.adv.item())
    if A and is_right(batch):
        return NO_CAUSE
    for field, policy in POLICIES.items():
        x = getattr(batch, field)
        is_one = x is not None and x.item() == 0
        if is_one and is_right(batch.but(**{field: x - HARDLY})):
            return _pattern(f"where {policy} is not exactly 1 (a logarithm of 0)")
    power = next((x for x in SCALES if A and is_right(scaled(x))), None)
    if power is not None:
        bound = _turn(lambda x: is_right(scaled(x)), power, lambda x: A * 10**x)
        side = "above" if power > 0 else "below"
        return _pattern(f"{side} |A| = {bound:.6g}")
    by = next((x for x in LOWER_BY if is_right(lowered(x))), None)
    if by is not None:
        old = batch.logp_old.item()
        bound = _turn(lambda x: is_right(lowered(x)), by, lambda x: math.exp(old - x))
        return _pattern(f"below π_old = {bound:.6g}")
    return NO_CAUSE


def _turn(
    is_right: Callable[[float], bool], right: float, number: Callable[[float], float]
) -> float:
    """Return the number with the fewest digits at which a token becomes right.

    Args:
        is_right: of a change.
        right: a change with which it is right; without one it is wrong.
        number: what the change makes of the token's number.
    """
    turn = bisected(is_right, 0.0, right)
    room = 1e-9 * (1 if right > 0 else -1)
    low, high = sorted((number(turn - room), number(turn + room)))
    rounded = between(low * (1 - 1e-9), high * (1 + 1e-9))
    return number(turn) if rounded is None or not rounded else rounded


def _pattern(where: str) -> Cause:
    """Return the cause, of the kind "pattern", that says where a token like it is right."""
    return Cause(f"a token like it is right {where}", kind="pattern")
