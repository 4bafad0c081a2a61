# SPDX-License-Identifier: Apache-2.0
"""Values as formulas in one normal form: numbers, conditions, and choices between them.

A value is a polynomial with rational coefficients. Its monomials are products of
powers of atoms: variables, logarithms of positive atoms, choices by a condition, and
functions of values (exp, log, inverse, sqrt). exp of a sum of logarithms is a product
of powers, so that the ratio of two probabilities, its roots and its products need no
exp at all. Equal values have equal ids in most cases, and then no solver is needed.

A condition is a comparison `polynomial > 0`, or a combination of comparisons. Points
at which a polynomial that is compared is 0 are left out: a comparison that is not true
is `polynomial < 0`. Values that are equal on an open set are equal formulas, once the
choices in them are made, and the comparison of these is exact.

Numbers are rational: a float stands for the simplest fraction that rounds to it.
Bounds of one monomial that differ by less than SAME are one bound.

rationals   numbers as fractions
nodes       what a formula is made of
table       all formulas of one proof, by their ids
points      the number that a formula has at a point
arithmetic  sums and products
functions   powers, roots, inverses, exponentials, logarithms
conditions  not, and, or; greater and equal
signs       the sign of a formula: always the same one, or a comparison
choices     one value where a condition holds, another one elsewhere

From `table` on, each file adds one subject to the class of the file before it, and
`Values` has all of them. The rules call each other: `table` declares the few that a
file needs of a later one.
"""

from upref.proof.values.choices import Choices
from upref.proof.values.nodes import (
    TOTALS,
    Atom,
    Branch,
    Choice,
    Compare,
    Function,
    Logarithm,
    Monomial,
    Polynomial,
    TooHard,
    Variable,
)
from upref.proof.values.points import Known
from upref.proof.values.rationals import simplest

__all__ = [
    "TOTALS",
    "Atom",
    "Branch",
    "Choice",
    "Compare",
    "Function",
    "Known",
    "Logarithm",
    "Monomial",
    "Polynomial",
    "TooHard",
    "Values",
    "Variable",
    "simplest",
]


class Values(Choices):
    """All formulas of one proof, with all rules."""
