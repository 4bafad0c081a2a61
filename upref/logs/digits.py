# SPDX-License-Identifier: Apache-2.0
"""How exactly each number of a log was written.

A number is known to half a unit of the last digit that was written. "0.80" and
"2.05e+03" show that digit. Python, JSON and Weights & Biases leave out zeros at the end,
so 1.0, 4000.0, 3 and 0.5 may be exact or rounded: such a number is *short*. The other
numbers of its column tell how it was written. A run that was resumed may have another
format, so they count where they stand before it and after it in the file, and then the
coarser of the two sides does.
"""

import math
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
NEIGHBORS = 8  # numbers on each side that tell how a short one was written
FEWEST_DIGITS = 3  # significant digits that a float without decimals has at least
UNROUNDED_DIGITS = 9  # significant digits of a number that nobody rounded
LARGEST_EXPONENT = 300  # 10.0**308 is the largest power of ten that is a float


class Written(float):
    """A number, with the text by which the file has it."""

    text: str

    def __new__(cls, text: str) -> "Written":
        number = super().__new__(cls, text)
        number.text = text.strip()
        return number


def text_of(number: float) -> str:
    """Return the text by which the file has a number: Python's where it has none."""
    return number.text if isinstance(number, Written) else repr(float(number))


def last_digit(number: float) -> int:
    """Return the exponent of 10 of the last digit that is known to be written: -2 of
    0.80, 1 of 2.05e+03, 0 of 4096, and 1 of 12340.0, which may have four digits.

    Args:
        number: finite.
    """
    decimal = Decimal(text_of(number))
    exponent = decimal.as_tuple().exponent
    assert isinstance(exponent, int)
    if _has_zero_decimal(decimal):
        of_last = decimal.normalize().as_tuple().exponent
        assert isinstance(of_last, int)
        coarsest = decimal.adjusted() + 1 - FEWEST_DIGITS
        exponent = max(0, min(of_last, coarsest)) if decimal else 0
    return max(-LARGEST_EXPONENT, min(int(exponent), LARGEST_EXPONENT))


def is_short(number: float) -> bool:
    """Return whether zeros may be left out at the end of a number: it is whole, or a
    multiple of 1/8, and its text has no such zero and no exponent.

    Args:
        number: finite.
    """
    text = text_of(number)
    if "e" in text.lower():
        return False
    decimal = Decimal(text)
    exponent = decimal.as_tuple().exponent
    assert isinstance(exponent, int)
    if exponent >= 0 or _has_zero_decimal(decimal):
        return True
    ends_with_zero = decimal.as_tuple().digits[-1] == 0
    return exponent >= -3 and not ends_with_zero and (number * 8).is_integer()


def _has_zero_decimal(decimal: Decimal) -> bool:
    """Return whether it has one decimal, 0: Python writes it of each whole float."""
    parts = decimal.as_tuple()
    return parts.exponent == -1 and parts.digits[-1] == 0


def significant_digits(number: float) -> int:
    """Return how many digits are written from the first one that is not 0: 4 of
    0.001230; 0 of 0.

    Args:
        number: finite.
    """
    decimal = Decimal(text_of(number))
    return decimal.adjusted() + 1 - last_digit(number) if decimal else 0


def is_unrounded(number: float) -> bool:
    """Return whether a number has so many digits that nobody rounded it. A whole number,
    as a count of tokens, tells nothing.
    """
    if number.is_integer() or not math.isfinite(number):
        return False
    mantissa = text_of(number).lower().partition("e")[0]
    return len(mantissa.lstrip("+-0.").replace(".", "")) >= UNROUNDED_DIGITS


def half_digits(column: Sequence[float]) -> tuple[Numbers, Numbers, Numbers]:
    """Return how exactly the numbers of a column are known.

    Args:
        column: N numbers in the order of the file; NaN or infinity where a row has
            none.

    Returns:
        Three lists, [N], of half a unit of the last digit of each number. They differ
        at short numbers. Where neighbors stand on one side only, the first list has
        the coarsest unit that the number may have, the second one is infinite, and the
        third one has the neighbors' unit. Without neighbors the third one is infinite
        too. All are NaN where there is no number.
    """
    own = np.full(len(column), math.nan)
    shown = np.full(len(column), math.nan)
    hinted = np.full(len(column), math.nan)
    there = [i for i, x in enumerate(column) if math.isfinite(x)]
    open_ones = [i for i in there if is_short(column[i])]
    for i in there:
        own[i] = shown[i] = hinted[i] = 0.5 * 10.0 ** last_digit(column[i])
    if not open_ones:
        return own, shown, hinted
    full = sorted(set(there) - set(open_ones))
    exponents = [last_digit(column[i]) for i in full]
    digits = [significant_digits(column[i]) for i in full]
    places = np.searchsorted(full, open_ones)
    for i, place in zip(open_ones, places, strict=True):
        sides = (
            slice(max(0, place - NEIGHBORS), place),
            slice(place, place + NEIGHBORS),
        )
        halves = [
            _half_digit_as(exponents[side], digits[side], column[i])
            for side in sides
            if exponents[side]
        ]
        hinted[i] = max(halves, default=math.inf)
        shown[i] = hinted[i] if len(halves) == len(sides) else math.inf
        own[i] = min(own[i], shown[i])
    return own, shown, hinted


def _half_digit_as(
    exponents: Sequence[int], digits: Sequence[int], number: float
) -> float:
    """Return half a unit of the last digit of a number that was written as its
    neighbors: with as many decimals, or as many significant digits, whichever are fewer.

    Args:
        exponents: of the last digit of each neighbor.
        digits: how many significant ones each neighbor has.
        number: the number.
    """
    half = 0.5 * 10.0 ** min(exponents)
    if number:
        first = Decimal(text_of(number)).adjusted()
        half = max(half, 0.5 * 10.0 ** (first + 1 - max(digits)))
    return half
