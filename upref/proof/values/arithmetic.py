# SPDX-License-Identifier: Apache-2.0
"""Sums and products of formulas."""

from fractions import Fraction

from upref.proof.values.nodes import (
    POSITIVE,
    TOTALS,
    Choice,
    Function,
    Monomial,
    TooHard,
    Variable,
)
from upref.proof.values.points import Points
from upref.proof.values.rationals import Number

MOST_TERMS = 600  # of a product; longer ones are not multiplied out


class Arithmetic(Points):
    """Addition, multiplication, and the signs of factors."""

    def add(self, x: int, y: int) -> int:
        """Return the sum of two values."""
        x, y = self.real(x), self.real(y)
        if x == self.zero:
            return y
        if y == self.zero:
            return x
        key = (x, y) if x < y else (y, x)
        known = self._sums.get(key)
        if known is None:
            known = self._sums[key] = self._add(x, y)
        return known

    def _add(self, x: int, y: int) -> int:
        """Compute what `add` keeps. Infinity and NaN are added as floats are."""
        kinds = {self.special(x), self.special(y)} - {""}
        if kinds:
            if len(kinds) > 1 or "nan" in kinds:
                return self.nan
            return self.inf if "inf" in kinds else self.minus_inf
        total = dict(self.terms(x))
        for monomial, c in self.terms(y):
            total[monomial] = total.get(monomial, Fraction(0)) + c
        return self._polynomial(total)

    def scale(self, x: int, factor: Number) -> int:
        """Return a value times a number."""
        return self.multiply(x, self.number(factor))

    def negative(self, x: int) -> int:
        """Return minus a value."""
        return self.scale(x, -1)

    def subtract(self, x: int, y: int) -> int:
        """Return the difference of two values."""
        return self.add(x, self.negative(y))

    def multiply(self, x: int, y: int) -> int:
        """Return the product of two values."""
        x, y = self.real(x), self.real(y)
        if x == self.one:
            return y
        if y == self.one:
            return x
        key = (x, y) if x < y else (y, x)
        known = self._products.get(key)
        if known is None:
            known = self._products[key] = self._multiply(x, y)
        return known

    def _multiply(self, x: int, y: int) -> int:
        """Compute what `multiply` keeps: the sum of the products of all pairs of terms.

        Raises:
            TooHard: there are more than MOST_TERMS pairs, even with the longer factor as
                one atom.
        """
        if self.special(x) or self.special(y):
            return self._multiply_special(x, y)
        if self.zero in (x, y):
            return self.zero
        left, right = self.terms(x), self.terms(y)
        if len(left) * len(right) > MOST_TERMS:
            # the longer one becomes an atom of its own
            longer, other = (x, y) if len(left) >= len(right) else (y, x)
            longer = self._of_atom(Function("same", longer))
            left, right = self.terms(longer), self.terms(other)
        if len(left) * len(right) > MOST_TERMS:
            raise TooHard(f"a product of more than {MOST_TERMS} terms")
        total: dict[Monomial, Fraction] = {}
        rest = self.zero  # the products that are no single term
        for of_left, c_left in left:
            for of_right, c_right in right:
                monomial, factor = self._join(of_left, of_right)
                c = c_left * c_right
                if factor is None:
                    total[monomial] = total.get(monomial, Fraction(0)) + c
                else:
                    product = self.multiply(self._polynomial({monomial: c}), factor)
                    rest = self.add(rest, product)
        return self.add(self._polynomial(total), rest)

    def _multiply_special(self, x: int, y: int) -> int:
        """Return a product one factor of which is infinite or NaN: NaN with NaN and
        with 0, else an infinity with the product's sign; raise TooHard where that is
        open.
        """
        if "nan" in (self.special(x), self.special(y)):
            return self.nan
        signs = [self._sign_of_factor(v) for v in (x, y)]
        if 0 in signs:
            return self.nan
        return self.inf if signs[0] * signs[1] > 0 else self.minus_inf

    def _sign_of_factor(self, x: int) -> int:
        """Return the sign of a factor of infinity, 1, 0 or -1; raise TooHard where it
        is open.
        """
        if name := self.special(x):
            return -1 if name == "-inf" else 1
        sign = self.sign_of(x)
        if sign is None:
            raise TooHard("infinity times a value of unknown sign")
        return sign

    def sign_of(self, x: int) -> int | None:
        """Return the sign that a value always has: 1, 0 or -1; None where that is open.

        Args:
            x: an id.

        Raises:
            TooHard: it is infinite or NaN.
        """
        c = self.constant(x)
        if c is not None:
            return (c > 0) - (c < 0)
        condition = self.above(x)
        if condition in (self.zero, self.one):
            return 1 if condition == self.one else -1
        return None

    def is_positive(self, atom: int) -> bool:
        """Tell whether an atom is known to be above 0.

        Args:
            atom: its number.
        """
        kind = self.atoms[atom]
        if isinstance(kind, Variable):
            return kind.low >= 0
        if not isinstance(kind, Function):
            return False
        if kind.name == "inverse":
            return self.sign_of(kind.argument) == 1
        if kind.name in TOTALS:
            is_known = kind.argument in self.positive_totals
            return is_known or self.sign_of(kind.argument) == 1
        return kind.name in POSITIVE

    def _join(self, a: Monomial, b: Monomial) -> tuple[Monomial, int | None]:
        """Return the product of two monomials, and a value that is to be multiplied
        with it: what became of two choices by one condition, of a root to a power, or
        of a value times its inverse. None in its place where nothing is left to
        multiply.
        """
        if not a:
            return b, None
        if not b:
            return a, None
        powers = dict(a)
        for atom, exponent in b:
            powers[atom] = powers.get(atom, Fraction(0)) + exponent
        choices = self._choices_to_join(powers)
        if choices:
            return self._join_choices(powers, choices)
        for atom, exponent in powers.items():
            kind = self.atoms[atom]
            if not isinstance(kind, Function):
                continue
            if kind.name == "sqrt":
                whole = exponent // 2  # sqrt(x)^(2k) is x^k
                if whole:
                    powers[atom] = exponent - 2 * whole
                    factor = self.power(kind.argument, whole)
                    return self._monomial(powers), factor
            if kind.name == "inverse" and exponent > 0:
                reduced = self._reduce(powers, atom, kind.argument)
                if reduced is not None:
                    return reduced
        return self._monomial(powers), None

    def _choices_to_join(self, powers: dict[int, Fraction]) -> list[int]:
        """Return the choices by one condition that become one choice: the first ones of
        which there are several, or one to another power than 1; [] where there are none.
        """
        by_condition: dict[int, list[int]] = {}
        for atom, exponent in powers.items():
            kind = self.atoms[atom]
            if isinstance(kind, Choice) and exponent:
                by_condition.setdefault(kind.condition, []).append(atom)
        for choices in by_condition.values():
            if len(choices) > 1 or powers[choices[0]] != 1:
                return choices
        return []

    def _join_choices(
        self, powers: dict[int, Fraction], atoms: list[int]
    ) -> tuple[Monomial, int]:
        """Return the product with the choices of one condition made one."""
        yes = no = self.one
        condition = -1
        for atom in atoms:
            kind = self.atoms[atom]
            assert isinstance(kind, Choice)
            condition = kind.condition
            yes = self.multiply(yes, self.power(kind.yes, powers[atom]))
            no = self.multiply(no, self.power(kind.no, powers[atom]))
        rest = {atom: e for atom, e in powers.items() if atom not in atoms}
        return self._monomial(rest), self.choose(condition, yes, no)

    def _reduce(
        self, powers: dict[int, Fraction], inverse: int, argument: int
    ) -> tuple[Monomial, int] | None:
        """Return m / (c l + rest), where the monomial m holds l, the leading one of the
        divisor, as the product of m / l and (1 - rest / (c l + rest)) / c.

        Args:
            powers: of m times the inverse.
            inverse: the atom 1 / (c l + rest).
            argument: c l + rest.

        Returns:
            The monomial m / l and the other factor; None where m does not hold l.
        """
        (lead, c), *rest = reversed(self.terms(argument))
        if not lead:
            return None
        for atom, exponent in lead:
            have = powers.get(atom, Fraction(0))
            has_same_sign = have * exponent > 0
            if not has_same_sign or abs(have) < abs(exponent):
                return None
        left = dict(powers)
        for atom, exponent in lead:
            left[atom] -= exponent
        left[inverse] -= 1
        others = self._polynomial(dict(rest))
        once = self._polynomial({((inverse, Fraction(1)),): Fraction(1)})
        factor = self.subtract(self.one, self.multiply(others, once))
        return self._monomial(left), self.scale(factor, 1 / c)
