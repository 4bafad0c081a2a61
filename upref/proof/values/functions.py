# SPDX-License-Identifier: Apache-2.0
"""Functions of formulas: powers, roots, inverses, exponentials, logarithms."""

import math
from collections.abc import Callable
from fractions import Fraction

from upref.proof.values.arithmetic import Arithmetic
from upref.proof.values.nodes import (
    Choice,
    Function,
    Logarithm,
    Monomial,
    TooHard,
)
from upref.proof.values.rationals import LONGEST_EXPONENT, Number, simplest, to_float

MOST_SPLIT = 6  # comparisons in the argument of a function that is split by them


class Functions(Arithmetic):
    """Functions, as products of powers where they are such."""

    # ---- powers ----------------------------------------------------------------------
    def power(self, x: int, exponent: Number) -> int:
        """Return a value to the power of a number.

        Args:
            x: an id.
            exponent: a number; where it is no integer, the value must be above 0.

        Raises:
            TooHard: the exponent is an integer beyond 64 or -64, or 0 is raised to a
                negative one.
        """
        e = simplest(exponent) if isinstance(exponent, float) else Fraction(exponent)
        if e == 0:
            return self.one
        if e == 1:
            return self.real(x)
        if e.denominator == 1 and e > 0:
            if e > 64:
                raise TooHard(f"a power of {e}")
            half = self.power(x, e // 2)
            square = self.multiply(half, half)
            return self.multiply(square, x) if e % 2 else square
        if e < 0:
            return self.inverse(self.power(x, -e))
        return self._root(x, e)

    def _root(self, x: int, e: Fraction) -> int:
        """Return a value to the power of a fraction between 0 and infinity."""
        x = self.real(x)
        if self.special(x):
            return x if x == self.inf else self.nan
        if self._splits(x):
            return self._split(x, lambda part: self._root(part, e))
        if x == self.zero:
            return self.zero
        self._must_be_positive(x, "a root")
        if (single := self._single(x)) is not None:
            monomial, c = single
            power = self._number_to(c, e)
            return self._polynomial({tuple((a, p * e) for a, p in monomial): power})
        if e.denominator == 2:
            size = abs(max(self.terms(x))[1])
            root = self._of_atom(Function("sqrt", self.scale(x, 1 / size)))
            root = self.scale(root, self._number_to(size, Fraction(1, 2)))
            return self.multiply(root, self.power(x, e.numerator // 2))
        return self.exp(self.scale(self.log(x), e))

    def _number_to(self, c: Fraction, e: Fraction) -> Fraction:
        """Return a positive number to a power; exact for integers."""
        if e.denominator == 1 and abs(e) <= 64:
            return c ** int(e)
        return simplest(to_float(c) ** float(e))

    def _single(self, x: int) -> tuple[Monomial, Fraction] | None:
        """Return monomial and coefficient of a value that is one positive term, of
        atoms that are above 0.
        """
        terms = self.terms(x)
        if len(terms) != 1 or terms[0][1] <= 0:
            return None
        if all(self.is_positive(atom) for atom, _ in terms[0][0]):
            return terms[0]
        return None

    def inverse(self, x: int) -> int:
        """Return 1 divided by a value, 0 of an infinite one; raise TooHard for the
        number 0.
        """
        x = self.real(x)
        if name := self.special(x):
            return self.nan if name == "nan" else self.zero
        if self._splits(x):
            return self._split(x, self.inverse)
        if x == self.zero:
            raise TooHard("a division by 0")
        terms = self.terms(x)
        if len(terms) == 1:
            monomial, c = terms[0]
            return self._polynomial({_inverted(monomial): 1 / c})
        # what all terms share, their leading coefficient included, is inverted by itself
        common = self._content([monomial for monomial, _ in terms])
        rest = {quotient(monomial, common): c for monomial, c in terms}
        lead = rest[max(rest)]
        argument = self._polynomial(
            {monomial: c / lead for monomial, c in rest.items()}
        )
        inverse_of_rest = self._of_atom(Function("inverse", argument))
        inverse_of_common = self._polynomial({_inverted(common): 1 / lead})
        return self.multiply(inverse_of_common, inverse_of_rest)

    def divide(self, x: int, y: int) -> int:
        """Return the quotient of two values."""
        return self.multiply(x, self.inverse(y))

    def _content(self, monomials: list[Monomial]) -> Monomial:
        """Return the largest monomial that divides all of these."""
        common = dict(monomials[0])
        for monomial in monomials[1:]:
            powers = dict(monomial)
            shared = [atom for atom in common if atom in powers]
            common = {atom: min(common[atom], powers[atom]) for atom in shared}
        if len(monomials) > 1:  # negative powers are multiplied out too
            for monomial in monomials:
                for atom, e in monomial:
                    if e < 0:
                        common[atom] = min(common.get(atom, Fraction(0)), e)
        return self._monomial(common)

    # ---- exponentials and logarithms -------------------------------------------------
    def exp(self, x: int) -> int:
        """Return e to the power of a value: a product of powers where the value has
        logarithms.
        """
        x = self.real(x)
        if name := self.special(x):
            return {"inf": self.inf, "-inf": self.zero, "nan": self.nan}[name]
        out = self.one
        rest: dict[Monomial, Fraction] = {}
        for monomial, c in self.terms(x):
            if not monomial:
                out = self.multiply(out, self._number_exp(c))
                continue
            factor = self._exp_of_term(monomial, c)
            if factor is None:
                rest[monomial] = c
            else:
                out = self.multiply(out, factor)
        if rest:
            lead = max(rest.items())[1]
            argument = self._polynomial({m: c / lead for m, c in rest.items()})
            out = self.multiply(out, self._of_atom(Function("exp", argument), lead))
        return out

    def _number_exp(self, c: Fraction) -> int:
        """Return e to the power of a number; raise TooHard beyond e^700 and e^-700."""
        exponent = to_float(c)
        if abs(exponent) > LONGEST_EXPONENT:
            raise TooHard(f"e to the power of {exponent:g}")
        return self.number(math.exp(exponent))

    def _exp_of_term(self, monomial: Monomial, c: Fraction) -> int | None:
        """Return exp of one term: of c log x, x to the power of c; of a term with a
        choice in it, the choice between two exponentials. None for any other.
        """
        first, exponent = monomial[0]
        kind = self.atoms[first]
        if len(monomial) == 1 and exponent == 1:
            if isinstance(kind, Logarithm):
                return self._polynomial({((kind.of, c),): Fraction(1)})
            if isinstance(kind, Function) and kind.name == "log":
                return self.power(kind.argument, c)
        for atom, e in monomial:
            kind = self.atoms[atom]
            if isinstance(kind, Choice) and e == 1:
                others = tuple(power for power in monomial if power[0] != atom)
                factor = self._polynomial({others: c})
                return self.choose(
                    kind.condition,
                    self.exp(self.multiply(factor, kind.yes)),
                    self.exp(self.multiply(factor, kind.no)),
                )
        return None

    def log(self, x: int) -> int:
        """Return the natural logarithm of a value, minus infinity of the number 0. The
        value must be above 0.
        """
        x = self.real(x)
        if name := self.special(x):
            return self.inf if name == "inf" else self.nan
        if self._splits(x):
            return self._split(x, self.log)
        if x == self.zero:
            return self.minus_inf
        self._must_be_positive(x, "a logarithm")
        single = self._single(x)
        if single is None:
            return self._of_atom(Function("log", x))
        monomial, c = single
        out = self.number(math.log(c)) if c != 1 else self.zero
        for atom, e in monomial:
            kind = self.atoms[atom]
            if isinstance(kind, Function) and kind.name == "exp":
                part = kind.argument
            else:
                part = self._of_atom(Logarithm(atom))
            out = self.add(out, self.scale(part, e))
        return out

    def _must_be_positive(self, x: int, what: str) -> None:
        """Note that a value must be above 0."""
        self.oblige(self.above(x), f"{what} of a value that is not above 0")

    def sigmoid(self, x: int) -> int:
        """Return 1 / (1 + e^-x)."""
        if name := self.special(x):
            return {"inf": self.one, "-inf": self.zero, "nan": self.nan}[name]
        return self.inverse(self.add(self.one, self.exp(self.negative(x))))

    # ---- any function ----------------------------------------------------------------
    def call(self, name: str, argument: int) -> int:
        """Return a function by its name.

        Args:
            name: of the function, as of a Function.
            argument: an id.
        """
        match name:
            case "exp":
                return self.exp(argument)
            case "log":
                return self.log(argument)
            case "inverse":
                return self.inverse(argument)
            case "sqrt":
                return self.power(argument, Fraction(1, 2))
            case "same":
                return argument
        return self.apply(name, argument)

    def apply(self, name: str, x: int) -> int:
        """Return a function of which nothing is known but that it is one.

        Args:
            name: of the function.
            x: an id.

        Raises:
            TooHard: the value is infinite or NaN.
        """
        x = self.real(x)
        if self.special(x):
            raise TooHard(f"{name} of a value that is infinite or not a number")
        if self._splits(x):
            return self._split(x, lambda part: self.apply(name, part))
        return self._of_atom(Function(name, x))

    def _splits(self, x: int) -> bool:
        """Tell whether a value has choices, and few enough to be made one by one."""
        return 0 < len(self.support(x)) <= MOST_SPLIT

    def _split(self, x: int, of: Callable[[int], int]) -> int:
        """Return a function of a value, once for each side of a choice in it."""
        condition = min(self.support(x))
        yes = of(self.assume(x, condition, True))
        no = of(self.assume(x, condition, False))
        return self.choose(self.literal(condition), yes, no)


def quotient(monomial: Monomial, by: Monomial) -> Monomial:
    """Return the quotient of two monomials; an exponent may become negative.

    Args:
        monomial, by: powers of atoms.
    """
    powers = dict(monomial)
    for atom, e in by:
        powers[atom] = powers.get(atom, Fraction(0)) - e
    return tuple(sorted((a, e) for a, e in powers.items() if e))


def _inverted(monomial: Monomial) -> Monomial:
    """Return 1 divided by a monomial."""
    return tuple((atom, -e) for atom, e in monomial)
