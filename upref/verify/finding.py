# SPDX-License-Identifier: Apache-2.0
"""A difference between a function and its reference, as data.

`upref.verify.render` makes its text, once. Nothing reads that text again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["failure", "note"]
# what the words of a cause are: why a function differs; what its wrong numbers have in
# common, which says where; or that no known cause fits
CauseKind = Literal["why", "pattern", "unknown"]


@dataclass(frozen=True)
class Number:
    """A number that a report shows.

    Args:
        value: the number; it may be infinite, or not a number.
        unit: what it is a number of: weight, dJ/dlp, factor, A.
        remark: what the reader should know of it, such as "as without".
    """

    value: float
    unit: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Cause:
    """Why a function differs. It is false where nothing is known.

    Args:
        words: for a reader.
        ids: of the known faults that it names, as `upref.verify.faults` has them. Empty
            where the words are an observation or an advice.
        kind: what the words are.
    """

    words: str = ""
    ids: tuple[str, ...] = ()
    kind: CauseKind = "why"

    def __bool__(self) -> bool:
        return bool(self.words)

    def __str__(self) -> str:
        return self.words


NO_CAUSE = Cause()


def join_causes(*causes: Cause) -> Cause:
    """Return several causes that act together as one, their words as one list.

    Args:
        *causes: empty ones are left out.

    Returns:
        A cause with all ids.
    """
    words = "; ".join(cause.words for cause in causes if cause)
    return Cause(words, tuple(fault_id for cause in causes for fault_id in cause.ids))


@dataclass(frozen=True)
class Interval:
    """Ratios between two bounds. None: no bound on that side.

    Args:
        low, high: the bounds.
        symbol: of the ratio: r of a token, s or S of a response.
    """

    low: float | None = None
    high: float | None = None
    symbol: str = "r"


@dataclass(frozen=True)
class TokenPlace:
    """The tokens that differ, and the one of them that is shown.

    Args:
        sign: of their A: 1, -1 or 0; None where it does not matter.
        intervals: of the ratio, in which all tokens of this sign differ. One without
            bounds: whatever the ratio. Empty: `decided_by` tells, or one token is
                meant.
        decided_by: what may tell these tokens from right ones, where the ratio does
            not: the sampler's ratio "ρ"; "others", what else is in the batch, since
            those tried are right in a batch of one token; "|A|" or "π_old", since
            tokens of the same ratios are right for one value of it; or that they are
            "scattered" among right ones.
        numbers: of the token that is shown, by their symbols: A, r, s, ρ, log r.
        remark: what else tells this token apart.
    """

    sign: float | None = None
    intervals: tuple[Interval, ...] = ()
    decided_by: Literal["", "ρ", "others", "|A|", "π_old", "scattered"] = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    remark: str = ""


@dataclass(frozen=True)
class Example:
    """The smallest input that was found to show a difference.

    Args:
        inputs: the numbers of each argument by its name, as nested lists.
        dtype: of the arguments that are floating-point numbers, such as "float64".
        rollouts: whether the inputs are the fields of `upref.Rollouts`.
        expected: what is right on it: dJ/dlp, or the advantages.
        found: what the function makes of it.
        code: Python that makes the inputs, where they are not listed.
        then: Python that changes the inputs before they are used.
        size: responses and tokens of the smallest batch, where it is too large to list.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    rollouts: bool = False
    expected: list[Any] | None = None
    found: list[Any] | None = None
    code: str = ""
    then: str = ""
    size: tuple[int, int] | None = None


def number_pair(
    unit: str, expected: float, found: float, remark: str = ""
) -> tuple[Number, Number]:
    """Return two numbers of one unit. The remark belongs to the expected one.

    Args:
        unit: of both.
        expected, found: the numbers.
        remark: what the reader should know of the expected one.
    """
    return Number(expected, unit, remark), Number(found, unit)
