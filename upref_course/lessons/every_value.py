# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from itertools import pairwise
from math import inf, isinf

from upref.verify.faults import Fault
from upref_course.exercise import Exercise, ExerciseBatch

Weight = list[list[float]]  # pieces: where it ends, a and b of a + b r
Interval = tuple[float, float]


def formula(weight: Weight, r: float) -> list[float]:
    """Return a and b of the piece that holds just below a ratio.

    Args:
        weight: the pieces, from the smallest ratio on.
        r: the ratio.
    """
    return next([a, b] for end, a, b in weight if end >= r)


def intervals(f: Weight, g: Weight) -> Iterator[Interval]:
    """Yield the intervals between neighboring ends of the pieces of two weights.

    Args:
        f, g: the weights.
    """
    ends = sorted({end for end, _, _ in f + g})
    yield from pairwise([0.0, *ends])


def first_difference(f: Weight, g: Weight) -> Interval | None:
    """Return the first interval on which two weights differ: the right answer.

    Args:
        f, g: the weights at A = 1.

    Returns:
        Its ends; None where the weights are equal for every ratio.
    """
    for low, high in intervals(f, g):
        if formula(f, high) != formula(g, high):
            return low, high
    return None


# ---- mistakes ------------------------------------------------------------------------
# Each has the arguments and the result of `first_difference`.
def _at(weight: Weight, high: float, r: float) -> float:
    """Return the number of a weight at a ratio of the interval that ends at `high`."""
    a, b = formula(weight, high)
    return a + b * r


def _ends_of_one(f: Weight, g: Weight) -> Interval | None:
    """Search the intervals between the ends of f alone."""
    for low, high in pairwise([0.0, *(end for end, _, _ in f)]):
        if formula(f, high) != formula(g, high):
            return low, high
    return None


def _numbers_at_ends(f: Weight, g: Weight) -> Interval | None:
    """Compare the numbers at the upper end of each interval, not the pieces; at low + 1
    where that end is infinite.
    """
    for low, high in intervals(f, g):
        r = low + 1 if isinf(high) else high
        if _at(f, high, r) != _at(g, high, r):
            return low, high
    return None


def _numbers_in_the_middle(f: Weight, g: Weight) -> Interval | None:
    """Compare the numbers in the middle of each interval, not the pieces; at low + 1
    where it has no upper end.
    """
    for low, high in intervals(f, g):
        r = low + 1 if isinf(high) else (low + high) / 2
        if _at(f, high, r) != _at(g, high, r):
            return low, high
    return None


def _lists(f: Weight, g: Weight) -> Interval | None:
    """Compare the n-th piece of f with the n-th of g, as far as both have pieces."""
    low = 0.0
    for one, other in zip(f, g, strict=False):
        if one != other:
            return low, one[0]
        low = one[0]
    return None


def _last(f: Weight, g: Weight) -> Interval | None:
    """Return the last interval on which they differ, not the first."""
    found = None
    for low, high in intervals(f, g):
        if formula(f, high) != formula(g, high):
            found = low, high
    return found


def _not_sorted(f: Weight, g: Weight) -> Interval | None:
    """Take the ends of f and then those of g, without sorting them together."""
    ends = dict.fromkeys(end for end, _, _ in f + g)
    for low, high in pairwise([0.0, *ends]):
        if formula(f, high) != formula(g, high):
            return low, high
    return None


def _whole_lists(f: Weight, g: Weight) -> Interval | None:
    """Return the first interval where the lists of pieces differ anywhere."""
    return next(intervals(f, g)) if f != g else None


def _pieces_below(f: Weight, g: Weight) -> Interval | None:
    """Compare the pieces that end at the lower end of each interval."""
    for low, high in intervals(f, g):
        if formula(f, low) != formula(g, low):
            return low, high
    return None


def _always_none(f: Weight, g: Weight) -> Interval | None:
    """Return None, whatever the weights are."""
    return None


DAPO = [[1.28, 0.0, 1.0], [inf, 0.0, 0.0]]


def batch(shows: str, f: Weight, g: Weight) -> ExerciseBatch:
    """Make a batch of two weights.

    Args:
        shows: what it shows, in words.
        f, g: the weights.

    Returns:
        A batch whose inputs are f and g.
    """
    return ExerciseBatch(shows, {"f": f, "g": g})


EXERCISE = Exercise(
    number=12,
    slug="every-value",
    title="equal for every value",
    function="first_difference",
    value=True,
    none_is_an_answer=True,
    right=first_difference,
    batches=(
        batch("r and r, without a bound", [[inf, 0.0, 1.0]], [[inf, 0.0, 1.0]]),
        batch("r and 2 r, without a bound", [[inf, 0.0, 1.0]], [[inf, 0.0, 2.0]]),
        batch("DAPO's weight and one without its clip", DAPO, [[inf, 0.0, 1.0]]),
        batch(
            "DAPO's weight, and the same with an end where nothing changes",
            DAPO,
            [[0.8, 0.0, 1.0], *DAPO],
        ),
        batch(
            "DAPO's weight, and one that is another between 1.14 and 1.2",
            DAPO,
            [[1.14, 0.0, 1.0], [1.2, 0.0, 0.5], *DAPO],
        ),
        batch(
            "two lines that cross in the middle, at r = 1",
            [[2.0, 0.0, 1.0], [inf, 0.0, 0.0]],
            [[2.0, 2.0, -1.0], [inf, 0.0, 0.0]],
        ),
        batch(
            "two lines that cross at the end, at r = 1",
            [[1.0, 0.0, 1.0], [inf, 1.0, 0.0]],
            [[1.0, 2.0, -1.0], [inf, 1.0, 0.0]],
        ),
        batch(
            "two intervals in which they differ",
            [[0.8, 0.0, 0.0], *DAPO],
            [[0.5, 0.0, 0.0], [inf, 0.0, 1.0]],
        ),
    ),
    faults=(
        Fault(
            "it cuts at the ends of f alone",
            _ends_of_one,
            id="ends-of-one-function",
            hint="g may change where f does not: cut at the ends of both.",
        ),
        Fault(
            "it compares the numbers at the end of each interval, and two lines can cross there",
            _numbers_at_ends,
            id="numbers-at-ends",
            hint="one equal number says nothing of the rest. Compare a and b.",
        ),
        Fault(
            "it compares the numbers in the middle of each interval, and two lines can cross there",
            _numbers_in_the_middle,
            id="numbers-in-the-middle",
            hint="one equal number says nothing of the rest. Compare a and b.",
        ),
        Fault(
            "it compares the lists of pieces, not the weights",
            _lists,
            id="lists-of-pieces",
            hint="one weight can be cut into pieces in many ways: compare on the intervals between the ends of both.",
        ),
        Fault(
            "it compares the whole lists f and g, not the weights on one interval",
            _whole_lists,
            id="whole-lists",
            hint="one weight can be cut into pieces in many ways: compare on the intervals between the ends of both.",
        ),
        Fault(
            "it reads the piece that ends at low, not the one between low and high",
            _pieces_below,
            id="piece-below",
            hint="formula(f, r) is the piece just below r: on the interval from low to high it is formula(f, high).",
        ),
        Fault(
            "it answers None (equal for every ratio) whatever the two weights are",
            _always_none,
            id="always-none",
            hint="a function that ends without `return` answers None, too.",
        ),
        Fault(
            "the last interval in which they differ, not the first",
            _last,
            id="last-interval",
            hint="return as soon as one is found.",
        ),
        Fault(
            "the ends are not sorted",
            _not_sorted,
            id="ends-not-sorted",
            hint="an interval lies between neighbors: sort the ends of both together.",
        ),
    ),
    notice="no ratio was tried, and the answer holds for all of them. With several tokens the intervals become cells that "
    "polynomials bound, and a solver goes through them.",
)
