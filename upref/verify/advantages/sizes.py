# SPDX-License-Identifier: Apache-2.0
"""The oracle of the size of rewards: large, small, and small beside an offset."""

import contextlib
from collections.abc import Iterator
from fractions import Fraction
from itertools import product

from upref.errors import InputError
from upref.verify.advantages.case import SCALES, AdvantageCase
from upref.verify.exact import EVEN_GROUPS, RewardBatch
from upref.verify.finding import number_pair
from upref.verify.oracle import oracle
from upref.verify.report import Finding, note


def why_no_sizes(case: AdvantageCase) -> str:
    """Return why rewards of other sizes are not tried; "" where they are."""
    if case.wrong:
        return "the values are wrong already"
    return "correct or not has no size" if case.name == "signed" else ""


@oracle("shift-and-scale", not_run=why_no_sizes)
def shift_and_scale(case: AdvantageCase) -> Iterator[Finding]:
    """Compare on rewards of any size and beside any offset. float32 holds all of them
    exactly.

    Args:
        case: the function and its estimator.

    Yields:
        A failure for large rewards, one for much larger ones, and one for the first of the
        small ones that fails. Where the denominator was measured at large rewards alone,
        small ones may be divided by more, which is a note.
    """
    yield from case.compare(
        "shift-and-scale", "rewards times 8, plus 16", EVEN_GROUPS.times(8, plus=16)
    )
    yield from case.compare(
        "shift-and-scale", "rewards a million times larger", EVEN_GROUPS.times(2**20)
    )
    # no denominator, or one that holds however small the std is
    holds_at_every_std = (
        not case.denominator_is_known or not case.denominator.smallest_std
    )
    for sign, offset in product((1, -1), (0, 3, -3)):
        batch = EVEN_GROUPS.times(Fraction(sign, 1024), offset)
        if not holds_at_every_std and _has_larger_denominator(case, batch):
            continue
        negated = ", negated" if sign < 0 else ""
        raised = f", plus {offset}" if offset else ""
        words = f"rewards a thousand times smaller{negated}{raised}"
        if findings := list(case.compare("shift-and-scale", words, batch)):
            yield from findings
            return
    if not holds_at_every_std:
        yield from _other_denominator(case)


def _other_denominator(case: AdvantageCase) -> Iterator[Finding]:
    """Yield a note with the first size of rewards at which the function divides by
    another denominator.
    """
    for batch in SCALES:
        row = case.differs(batch)
        if row is not None:
            text = f"a std below {case.denominator.smallest_std:.2g}: another denominator than {case.denominator}"
            expected = case.expected(batch)[row]
            found = case.function(batch)[row]
            yield note("shift-and-scale", text, *number_pair("A", expected, found))
            return


def _has_larger_denominator(case: AdvantageCase, batch: RewardBatch) -> bool:
    """Return whether each advantage is at most as large as it should be and has the right
    sign, as if it were divided by more; False if the function refuses the batch.
    """
    tol = case.function.tol
    with contextlib.suppress(InputError):
        pairs = list(zip(case.expected(batch), case.function(batch), strict=True))
        return all(
            0 < found / expected <= 1 + 10 * tol if expected else abs(found) <= tol
            for expected, found in pairs
        )
    return False
