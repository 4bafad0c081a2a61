# SPDX-License-Identifier: Apache-2.0
"""Numbers as fractions: a float stands for the simplest fraction that rounds to it."""

import math
from fractions import Fraction
from functools import cache

Number = int | float | Fraction

SAME = 1e-12  # relative difference of two numbers that count as one
ULPS = 4  # of a float, within which the simplest fraction is looked for
LONGEST_EXPONENT = 700  # of e: beyond, a number has no float


@cache
def simplest(x: float) -> Fraction:
    """Return the fraction with the smallest denominator within ULPS roundings of a
    float; a whole number below 2^53 as it is.

    Args:
        x: a finite float.
    """
    exact = Fraction(x)
    if exact.denominator == 1 and abs(exact) < 2**53:
        return exact
    width = abs(exact) * ULPS * Fraction(1, 2**53)
    low, high = exact - width, exact + width
    if x < 0:
        return -_simplest_between(-high, -low)
    return _simplest_between(low, high)


def _simplest_between(low: Fraction, high: Fraction) -> Fraction:
    """Return the fraction with the smallest denominator in an interval of positive
    numbers, by its continued fraction.
    """
    whole = low.numerator // low.denominator
    if low == whole:
        return Fraction(whole)
    if whole + 1 <= high:
        return Fraction(whole + 1)
    return whole + 1 / _simplest_between(1 / (high - whole), 1 / (low - whole))


def to_float(x: Fraction) -> float:
    """Return the nearest float; infinity where there is none.

    Args:
        x: any fraction.
    """
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def near(x: Fraction, y: Fraction) -> bool:
    """Tell whether two numbers differ by rounding alone.

    Args:
        x, y: any fractions.
    """
    if x == y:
        return True
    return abs(x - y) <= Fraction(SAME) * max(abs(x), abs(y))


def exp(x: float) -> float:
    """Return e^x, infinity where it overflows.

    Args:
        x: any float.
    """
    return math.inf if x > LONGEST_EXPONENT else math.exp(x)
