# SPDX-License-Identifier: Apache-2.0
"""The oracle of functions that take a mask of responses: those that it leaves out enter
no mean and no standard deviation.
"""

from collections.abc import Iterator
from fractions import Fraction

from upref.errors import InputError
from upref.verify.advantages.case import AdvantageCase
from upref.verify.exact import RewardBatch, nearly_equal
from upref.verify.finding import Cause, Example, number_pair
from upref.verify.oracle import oracle
from upref.verify.report import Finding, fail

REWARDS = RewardBatch(
    tuple(Fraction(x) for x in ("1", "0", "3/2", "3/4", "2", "-1", "1/2", "1/4")),
    (0, 0, 0, 0, 1, 1, 1, 1),
)
KEPT = (True, True, False, True, False, True, True, True)
ROWS = tuple(i for i, is_kept in enumerate(KEPT) if is_kept)
COUNTED = Cause(
    "the responses that the mask leaves out count in the mean and the standard deviation",
    ("masked-responses-count",),
)
COUNTED_AS_ZERO = Cause(
    "the responses that the mask leaves out count with a reward of 0",
    ("masked-responses-count-as-zero",),
)


def no_row_mask(case: AdvantageCase) -> str:
    """Return why no mask of responses is tried; "" where one is."""
    if "row_mask" not in case.function.reads:
        return "it takes no mask of responses"
    if case.function.groups_are_contiguous or case.wrong:
        return "the values are wrong already, or it takes no group ids"
    return ""


@oracle("response-mask", not_run=no_row_mask)
def response_mask(case: AdvantageCase) -> Iterator[Finding]:
    """Compare the responses that are kept with a batch that has no others. Yield a failure
    at the response that is off by most, with its cause if the others count in the mean,
    as they are or as rewards of 0.

    Args:
        case: the function and its estimator.

    Raises:
        InputError: the function refuses the batch.
    """
    batch = case.batch(REWARDS)
    expected = case.expected(batch.take(list(ROWS)))
    words = "two responses that the mask leaves out"
    try:
        found = case.function.on_rows(batch.R, batch.group, KEPT)
    except InputError as e:
        raise InputError(f"{e}, on {words}") from e
    at_kept = [found[row] for row in ROWS]
    tol = max(case.function.tol, 1e-6)
    if nearly_equal(at_kept, expected, tol):
        return
    worst = max(range(len(ROWS)), key=lambda i: abs(at_kept[i] - expected[i]))
    inputs = {
        "rewards": [float(reward) for reward in batch.R],
        "group": list(batch.group),
        "mask": list(KEPT),
    }
    zeroed = RewardBatch(
        tuple(
            r if kept else Fraction(0) for r, kept in zip(batch.R, KEPT, strict=True)
        ),
        batch.group,
    )
    cause = Cause()
    for changed, why in ((batch, COUNTED), (zeroed, COUNTED_AS_ZERO)):
        everywhere = case.expected(changed)
        if nearly_equal(at_kept, [everywhere[row] for row in ROWS], tol):
            cause = why
            break
    numbers = number_pair("A", expected[worst], at_kept[worst])
    about = f"{words}: response {ROWS[worst]}"
    yield fail("response-mask", about, *numbers, Example(inputs), cause)
