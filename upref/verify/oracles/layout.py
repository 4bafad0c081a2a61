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
    tolerance,
)
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import gradient_pair, make_example, shrink, worst
from upref.weights.batches import on_policy_batch

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
    """The gradient does not depend on how tensors are laid out in memory."""
    if any(
        outcome.wrote for outcome in case.noted_calls
    ):  # whose finding is the oracle mutation's
        return []
    b = case.ready(on_policy_batch())
    refused: dict[str, Finding] = {}
    for name, batch in product(
        LAYOUTS, (grid_off_bounds(case), b.but(logp=b.logp - 0.05 * b.logp.cos().abs()))
    ):
        try:
            distances = _distance_in_layout(case, batch, name)
        except InputError as e:
            refused[name] = note(
                "layout",
                f"inputs of which each tensor is {name} are refused",
                found=str(e),
            )
            continue
        if distances.max() > 0:
            return [*refused.values(), _reads_as_contiguous(case, batch, name)]
    if not refused:
        case.covered.append(COVERED)
    return list(refused.values())


def _reads_as_contiguous(case: LossCase, batch: Rollouts, name: str) -> Finding:
    """The finding of a batch whose gradient is another one in this layout."""
    small = shrink(batch, lambda c: bool(_distance_in_layout(case, c, name).max() > 0))
    due_gradient = case.gradient(small)
    found = case.loss.ask("gradient_in_layout", small, name)
    i, t = worst(_distance_in_layout(case, small, name))
    expected_number, found_number = gradient_pair(
        due_gradient, found, (i, t), "as of contiguous tensors"
    )
    shown = make_example(small, due_gradient, found, case.loss.reads)
    paste = f"# before the call: x = {PASTE[name]} for each tensor x of the batch"
    shown = replace(shown, then=paste) if shown else None
    return fail(
        "layout", f"each tensor is {name}", expected_number, found_number, shown, WHY
    )


def _distance_in_layout(case: LossCase, batch: Rollouts, name: str) -> Tensor:
    return gradient_distance(
        case.loss.ask("gradient_in_layout", batch, name),
        case.gradient(batch),
        batch.mask,
        tolerance(case, 1e-7),
    )
