# SPDX-License-Identifier: Apache-2.0
"""The oracle of the size of rewards: large, small, and small beside an offset."""

import contextlib
from collections.abc import Iterator
from fractions import Fraction

from upref.errors import InputError
from upref.verify.advantages.case import SCALES, AdvantageCase
from upref.verify.exact import EVEN, RewardBatch
from upref.verify.finding import number_pair
from upref.verify.oracle import oracle
from upref.verify.report import Finding, note


def no_sizes(case: AdvantageCase) -> str:
    if case.wrong:
        return "the values are wrong already"
    return "correct or not has no size" if case.name == "signed" else ""


@oracle("shift-and-scale", not_run=no_sizes)
def shift_and_scale(case: AdvantageCase) -> Iterator[Finding]:
    """Rewards of any size and beside any offset, all of them numbers that float32
    holds.
    """
    close = {
        (k, plus): EVEN.times(Fraction(k, 1024), plus)
        for k in (1, -1)
        for plus in (0, 3, -3)
    }
    yield from case.compare(
        "shift-and-scale", "rewards times 8, plus 16", EVEN.times(8, plus=16)
    )
    yield from case.compare(
        "shift-and-scale", "rewards a million times larger", EVEN.times(2**20)
    )
    # no denominator, or one that holds however small the std
    seen = not case.known or not case.divided.least
    for (k, plus), batch in close.items():
        if seen or not _shrinks(case, batch):
            negated = ", negated" if k < 0 else ""
            raised = f", plus {plus}" if plus else ""
            said = f"a thousand times smaller{negated}{raised}"
            if got := list(case.compare("shift-and-scale", f"rewards {said}", batch)):
                yield from got
                return
    if not seen and (
        other := next(
            (batch for batch in SCALES if case.differs(batch) is not None), None
        )
    ):
        i = case.differs(other) or 0
        text = f"a std below {case.divided.least:.2g}: another denominator than {case.divided}"
        yield note(
            "shift-and-scale",
            text,
            *number_pair("A", case.expected(other)[i], case.f(other)[i]),
        )


def _shrinks(case: AdvantageCase, batch: RewardBatch) -> bool:
    """Whether its advantages are smaller than they should be, but of the same signs:
    divided by more.
    """
    with contextlib.suppress(InputError):
        pairs = list(zip(case.expected(batch), case.f(batch), strict=True))
        return all(
            0 < y / x <= 1 + 10 * case.f.tol if x else abs(y) <= case.f.tol
            for x, y in pairs
        )
    return False
