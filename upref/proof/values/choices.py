# SPDX-License-Identifier: Apache-2.0
"""Choices by a condition: made, decided, and counted."""

from collections.abc import Iterator
from fractions import Fraction

from upref.proof.values.nodes import (
    MOST_CASES,
    Branch,
    Choice,
    Compare,
    Function,
    Logarithm,
    Monomial,
    Polynomial,
    TooHard,
)
from upref.proof.values.signs import Signs

MOST_TOKENS = 2**31 - 1  # of a batch


class Choices(Signs):
    """One value where a condition holds, another one elsewhere; and what a value is where
    a comparison is decided.
    """

    def choose(self, condition: int, yes: int, no: int) -> int:
        """Return one value where a condition holds, and another one elsewhere.

        Args:
            condition: id of a condition.
            yes, no: ids.

        Raises:
            TooHard: one of two different values is infinite or NaN.
        """
        if condition == self.one or yes == no:
            return yes
        if condition == self.zero:
            return no
        if isinstance(self.nodes[yes], Branch) or isinstance(self.nodes[no], Branch):
            if self._is_boolean(yes) and self._is_boolean(no):
                return self.either(
                    self.both(condition, yes), self.both(self.negation(condition), no)
                )
            yes, no = self.real(yes), self.real(no)
        for comparison, truth in self.facts(condition):
            yes = self.assume(yes, comparison, truth)
        for comparison, truth in self.facts(self.negation(condition)):
            no = self.assume(no, comparison, truth)
        if yes == no:
            return yes
        if self.special(yes) or self.special(no):
            # a branch that is infinite is never multiplied out
            raise TooHard("a choice of which one side is infinite or not a number")
        return self._of_atom(Choice(condition, yes, no))

    def assume(self, value: int, comparison: int, truth: bool) -> int:
        """Return a value where a comparison holds, or where it does not. What follows
        for other bounds of the same monomial is assumed too.

        Args:
            value: an id of a number or of a condition.
            comparison: an id of a comparison.
            truth: whether it holds.
        """
        support = self.support(value)
        for other, holds in self._implied(comparison, truth):
            if other in support:
                value = self._assume(value, other, holds)
        return value

    def given(self, value: int, condition: int, holds: bool) -> int:
        """Return a value where a condition holds, or fails, as far as that decides it.

        Args:
            value: an id of a number or of a condition.
            condition: an id of a condition.
            holds: whether it holds.
        """
        fact = condition if holds else self.negation(condition)
        if value in (fact, self.negation(fact)) and self._is_boolean(value):
            return self.one if value == fact else self.zero
        for comparison, truth in self.facts(fact):
            value = self.assume(value, comparison, truth)
        return value

    def _implied(self, comparison: int, truth: bool) -> Iterator[tuple[int, bool]]:
        """Yield a comparison and its truth, and what follows for others of the same
        monomial m: a comparison of one monomial is c m + number > 0.
        """
        yield comparison, truth
        terms = self._terms_compared(comparison)
        if len(terms) == 1:
            yield from self._implied_by_sign(terms[0][0], truth)
            return
        if len(terms) != 2 or terms[0][0] != ():
            return  # of more than one monomial
        (_, number), (monomial, c) = terms
        for other in self._families.get(((), monomial), []):
            (_, other_number), (_, other_c) = self._terms_compared(other)
            if other == comparison or other_c != c:
                continue
            # c m > -number implies c m > -other_number if that is smaller
            if truth and -other_number <= -number:
                yield other, True
            elif not truth and -other_number >= -number:
                yield other, False
        if c == 1:
            yield from self._implied_for_sign(monomial, -number, truth)

    def _terms_compared(self, comparison: int) -> tuple[tuple[Monomial, Fraction], ...]:
        """Return the terms of the polynomial that a comparison compares with 0."""
        node = self.nodes[comparison]
        assert isinstance(node, Compare)
        return self.terms(node.polynomial)

    def _implied_by_sign(
        self, monomial: Monomial, truth: bool
    ) -> Iterator[tuple[int, bool]]:
        """Yield what x > 0, or x < 0, says of c x + number > 0 where c > 0."""
        for other in self._families.get(((), monomial), []):
            (_, number), (_, c) = self._terms_compared(other)
            bound = -number / c
            if c < 0:
                continue
            if truth and bound <= 0:
                yield other, True
            elif not truth and bound >= 0:
                yield other, False

    def _implied_for_sign(
        self, monomial: Monomial, bound: Fraction, truth: bool
    ) -> Iterator[tuple[int, bool]]:
        """Yield what x > c, or x < c, says of x > 0."""
        for other in self._families.get((monomial,), []):
            if truth and bound >= 0:
                yield other, True
            elif not truth and bound <= 0:
                yield other, False

    def _assume(self, value: int, comparison: int, truth: bool) -> int:
        """Return a value where a comparison is decided; it is computed once."""
        if comparison not in self.support(value):
            return value
        key = (value, comparison, truth)
        known = self._assumed.get(key)
        if known is None:
            known = self._assumed[key] = self._assume_anew(value, comparison, truth)
        return known

    def _assume_anew(self, value: int, comparison: int, truth: bool) -> int:
        """Compute what `_assume` keeps: a value where a comparison is decided."""
        node = self.nodes[value]
        if isinstance(node, Branch):
            if node.comparison == comparison:
                return node.yes if truth else node.no
            return self._branch(
                node.comparison,
                self._assume(node.yes, comparison, truth),
                self._assume(node.no, comparison, truth),
            )
        out = self.zero
        for monomial, c in self.terms(value):
            # the powers of atoms that do not depend on the comparison, and the others
            plain = []
            depending = []
            for atom, exponent in monomial:
                if comparison in self.atom_support(atom):
                    depending.append((atom, exponent))
                else:
                    plain.append((atom, exponent))
            product = self._polynomial({tuple(plain): c})
            for atom, exponent in depending:
                became = self._assume_atom(atom, comparison, truth)
                product = self.multiply(product, self.power(became, exponent))
            out = self.add(out, product)
        return out

    def _assume_atom(self, atom: int, comparison: int, truth: bool) -> int:
        """Return an atom where a comparison is decided, as a value."""
        kind = self.atoms[atom]
        if isinstance(kind, Choice):
            condition = self._assume(kind.condition, comparison, truth)
            if condition == self.one:
                return self._assume(kind.yes, comparison, truth)
            if condition == self.zero:
                return self._assume(kind.no, comparison, truth)
            return self.choose(
                condition,
                self._assume(kind.yes, comparison, truth),
                self._assume(kind.no, comparison, truth),
            )
        if isinstance(kind, Logarithm):
            of = self._assume_atom(kind.of, comparison, truth)
            return self.log(of)
        assert isinstance(kind, Function)
        argument = self._assume(kind.argument, comparison, truth)
        return self.call(kind.name, argument)

    def whole_bounds(self, value: int) -> tuple[Fraction, Fraction] | None:
        """Return the least and the largest number that a value may be, where it is a whole
        number by its choices; None where it may be another one.

        Args:
            value: an id of a number or of a condition.
        """
        node = self.nodes[self.real(value)]
        if not isinstance(node, Polynomial):
            return None
        low = high = Fraction(0)
        for monomial, c in node.terms:
            bounds = self._whole_bounds_of_term(monomial, c)
            if bounds is None or c.denominator != 1:
                return None
            low += bounds[0]
            high += bounds[1]
        return low, high

    def _whole_bounds_of_term(
        self, monomial: Monomial, c: Fraction
    ) -> tuple[Fraction, Fraction] | None:
        """Return the least and the largest number that a term of choices between whole
        numbers and of counts may be; None where it has other factors.
        """
        low = high = c
        for atom, exponent in monomial:
            kind = self.atoms[atom]
            if exponent != 1:
                return None
            if self.is_count(atom):
                sides = [Fraction(1), Fraction(MOST_TOKENS)]
            elif isinstance(kind, Choice):
                yes = self.whole_bounds(kind.yes)
                no = self.whole_bounds(kind.no)
                if yes is None or no is None:
                    return None
                sides = [*yes, *no]
            else:
                return None
            products = [end * side for end in (low, high) for side in sides]
            low, high = min(products), max(products)
        return low, high

    def cases(
        self, x: int, y: int, most: int = MOST_CASES
    ) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yield each way to decide the comparisons in two values, and what they are then.

        Args:
            x, y: ids of numbers.
            most: cases; more are too many.

        Yields:
            The conditions that hold, and two values without choices.

        Raises:
            TooHard: there are more.
        """
        stack: list[tuple[tuple[int, ...], int, int]] = [((), x, y)]
        count = 0
        while stack:
            decided, a, b = stack.pop()
            if self.same(a, b):
                continue
            support = self.support(a) | self.support(b)
            if not support:
                count += 1
                if count > most:
                    raise TooHard(f"a gradient of more than {most} cases")
                yield decided, a, b
                continue
            condition = min(support)
            for truth in (False, True):
                fact = self.literal(condition)
                fact = fact if truth else self.negation(fact)
                left = self.assume(a, condition, truth)
                right = self.assume(b, condition, truth)
                stack.append(((*decided, fact), left, right))
