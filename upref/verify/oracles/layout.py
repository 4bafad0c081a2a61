# SPDX-License-Identifier: Apache-2.0
"""The oracle of tensors that are not contiguous: slices of wider ones, and advantages
with a stride of 0.
"""

from dataclasses import replace

from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.finding import number_pair
from upref.verify.measure import Case
from upref.verify.oracle import oracle
from upref.verify.oracles.invariance import moved, off_bounds, slack
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import make_example, shrink, worst
from upref.weights.batches import on_policy_batch

SLICED = "each tensor is a slice of a wider one"
COVERED = "tensors that are slices of wider ones, and advantages expanded from one number for each response"
PASTE = "# before the call: x = torch.nn.functional.pad(x, (2, 1))[:, 2:-1] for each tensor x of the batch"
WHY = "it reads memory as if its inputs were contiguous: call .contiguous(), or use their strides"


@oracle(
    "layout", 140, lambda case: "the weights are wrong already" if case.wrong else ""
)
def layout(case: Case) -> list[Finding]:
    if any(done.wrote for done in case.done):  # whose finding is the oracle mutation's
        return []
    b = case.ready(on_policy_batch())
    for batch in (off_bounds(case), b.but(logp=b.logp - 0.05 * b.logp.cos().abs())):
        try:
            off = _moved(case, batch)
        except InputError as e:
            return [
                note("layout", f"inputs of which {SLICED} are refused", found=str(e))
            ]
        if off.max() > 0:
            small = shrink(batch, lambda c: bool(_moved(case, c).max() > 0))
            due, found = case.gradient(small), case.loss.ask("sliced", small)
            i, t = worst(_moved(case, small))
            says = number_pair(
                "dJ/dlp",
                due[i, t].item(),
                found[i, t].item(),
                "as of contiguous tensors",
            )
            shown = make_example(small, due, found, case.loss.reads)
            shown = replace(shown, then=PASTE) if shown else None
            return [fail("layout", SLICED, *says, shown, WHY)]
    case.covered.append(COVERED)
    return []


def _moved(case: Case, b: Rollouts) -> Tensor:
    return moved(
        case.loss.ask("sliced", b), case.gradient(b), b.mask, slack(case, 1e-7)
    )
