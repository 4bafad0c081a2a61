# SPDX-License-Identifier: Apache-2.0
"""What a formula is made of: polynomials of atoms, and conditions."""

import math
from dataclasses import dataclass
from fractions import Fraction

Monomial = tuple[tuple[int, Fraction], ...]  # (atom, exponent), sorted

POSITIVE = ("exp", "sqrt")
# sums of a formula over all tokens of a row, over all rows: nothing of the formula is
# about the token at hand
TOTALS = ("sum over the row", "sum over the rows")
MOST_CASES = 4096  # of one comparison


class TooHard(Exception):
    """The formula leaves what the normal form can hold; the message says why."""


@dataclass(frozen=True)
class Variable:
    """A real number that is free between two bounds; above 0 where `low` is >= 0."""

    name: str
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Logarithm:
    """The natural logarithm of an atom that is above 0."""

    of: int


@dataclass(frozen=True)
class Choice:
    """One value where a condition holds, and another one elsewhere."""

    condition: int
    yes: int
    no: int


@dataclass(frozen=True)
class Function:
    """A function of a value, of which a few properties are known."""

    name: str
    argument: int


Atom = Variable | Logarithm | Choice | Function


@dataclass(frozen=True)
class Polynomial:
    """A sum of (monomial, coefficient), sorted by monomial, without zeros."""

    terms: tuple[tuple[Monomial, Fraction], ...]


@dataclass(frozen=True)
class Special:
    """Infinity, or not a number, by its name."""

    name: str


@dataclass(frozen=True)
class Compare:
    """polynomial > 0, without choices in it."""

    polynomial: int


@dataclass(frozen=True)
class Branch:
    """A condition: one where a comparison holds, and another one elsewhere. Comparisons
    come in the order of their ids, so that one condition has one form.
    """

    comparison: int
    yes: int
    no: int


Node = Polynomial | Special | Compare | Branch
