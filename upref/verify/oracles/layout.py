# SPDX-License-Identifier: Apache-2.0
"""The oracle of tensors that are not contiguous: slices, transposed ones, and
advantages with a stride of 0.
"""

from dataclasses import replace
from itertools import product

from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.user_code.loss import LAYOUTS
from upref.verify.measure import LossCase
from upref.verify.oracle import oracle
from upref.verify.oracles.invariance import (
    gradient_distance,
    grid_off_bounds,
)
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import gradient_pair, make_example, shrink, worst

COVERED = (
    "tensors that are slices of wider ones or a transposed [T, B], and advantages expanded from one number for each "
    "response"
)
PASTE = dict(
    zip(
        LAYOUTS,
        ("torch.nn.functional.pad(x, (2, 1))[:, 2:-1]", "x.T.contiguous().T"),
        strict=True,
    )
)
WHY = "its result depends on how its inputs lie in memory: call .contiguous(), or use every stride"


@oracle(
    "layout", 140, lambda case: "the weights are wrong already" if case.wrong else ""
)
def layout(case: LossCase) -> list[Finding]:
    """Compare the gradient of tensors that are laid out otherwise in memory.

    Args:
        case: the loss and its objective. The words for what was right are added to
            `case.covered`.

    Returns:
        Notes of the layouts that the loss refuses, and the failure of the first layout
        that changes the gradient. Nothing if the loss writes to its inputs.
    """
    writes_to_inputs = any(outcome.wrote for outcome in case.noted_calls)
    if writes_to_inputs:  # the oracle `mutation` reports that
        return []
    on_policy = case.on_policy()
    near_on_policy = on_policy.but(
        logp=on_policy.logp - 0.05 * on_policy.logp.cos().abs()
    )
    refused: dict[str, Finding] = {}
    for layout_name, batch in product(LAYOUTS, (grid_off_bounds(case), near_on_policy)):
        try:
            distances = _distance_in_layout(case, batch, layout_name)
        except InputError as e:
            refused[layout_name] = note(
                "layout",
                f"inputs of which each tensor is {layout_name} are refused",
                found=str(e),
            )
            continue
        if distances.max() > 0:
            return [*refused.values(), _layout_failure(case, batch, layout_name)]
    if not refused:
        case.covered.append(COVERED)
    return list(refused.values())


def _layout_failure(case: LossCase, batch: Rollouts, layout_name: str) -> Finding:
    """Return the failure of a loss whose gradient changes with this layout."""
    small = shrink(
        batch, lambda c: bool(_distance_in_layout(case, c, layout_name).max() > 0)
    )
    due_gradient = case.gradient(small)
    found = case.loss.ask("gradient_in_layout", small, layout_name)
    i, t = worst(_distance_in_layout(case, small, layout_name))
    expected_number, found_number = gradient_pair(
        due_gradient, found, (i, t), "as of contiguous tensors"
    )
    shown = make_example(small, due_gradient, found, case.loss.reads)
    paste = (
        f"# before the call: x = {PASTE[layout_name]} for each tensor x of the batch"
    )
    shown = replace(shown, then=paste) if shown else None
    return fail(
        "layout",
        f"each tensor is {layout_name}",
        expected_number,
        found_number,
        shown,
        WHY,
    )


def _distance_in_layout(case: LossCase, batch: Rollouts, layout_name: str) -> Tensor:
    """Return how far the gradient in this layout is from that of contiguous tensors,
    [B, T].
    """
    return gradient_distance(
        case.loss.ask("gradient_in_layout", batch, layout_name),
        case.gradient(batch),
        batch.mask,
        case.allowed_error(1e-7),
    )
