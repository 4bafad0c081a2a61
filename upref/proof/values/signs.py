# SPDX-License-Identifier: Apache-2.0
"""The sign of a formula: always the same one, or a comparison."""

import math
from fractions import Fraction
from itertools import combinations_with_replacement

from upref.proof.values.conditions import Conditions
from upref.proof.values.functions import quotient
from upref.proof.values.nodes import (
    MOST_CASES,
    Compare,
    Function,
    Logarithm,
    Monomial,
    Polynomial,
    TooHard,
    Variable,
)
from upref.proof.values.rationals import (
    LONGEST_EXPONENT,
    SAME,
    exp,
    near,
    simplest,
    to_float,
)

LARGEST_POWER = 24  # to which both sides of a comparison are raised
MOST_SUPPORT = 16  # comparisons on which one depends: each doubles the cases
NUMBER = -1  # in a quadratic form, the place of the number 1; no atom has it


def log_of_bound(x: float) -> float:
    """Return the natural logarithm, minus infinity of 0 and infinity of infinity.

    Args:
        x: 0 or more.
    """
    if x == 0:
        return -math.inf
    return math.log(x) if x < math.inf else math.inf


def _is_square_by_square(form: dict[tuple[int, int], Fraction]) -> bool:
    """Tell whether x'Fx is a sum of squares, by completing the square of one variable
    after the other: F_xx x² + 2 Σ F_xy x y is a square less (Σ F_xy y)² / F_xx.

    Args:
        form: the entries of F, as of `Signs._quadratic_form`; it is written to.
    """
    left = sorted({place for pair in form for place in pair}, reverse=True)
    while left:
        x, *left = left
        square = form.get((x, x), Fraction(0))
        beside = {y: form.get((y, x), Fraction(0)) for y in left}
        if square < 0:
            return False
        if square == 0:
            if any(beside.values()):
                return False
            continue
        for y, z in combinations_with_replacement(sorted(left), 2):
            taken = beside[y] * beside[z] / square
            form[y, z] = form.get((y, z), Fraction(0)) - taken
    return True


def _power_without_fractions(monomial: Monomial) -> Fraction:
    """Return the power to which a monomial is raised so that its exponents are integers
    without a common factor, the first of them above 0.
    """
    exponents = [e for _, e in monomial]
    power = Fraction(
        math.lcm(*(e.denominator for e in exponents)),
        math.gcd(*(e.numerator for e in exponents)),
    )
    return -power if exponents[0] < 0 else power


class Signs(Conditions):
    """The condition that a value is above 0, and bounds that decide it."""

    def above(self, x: int, or_equal: bool = False) -> int:
        """Return the condition that a value is above 0.

        Args:
            x: an id.
            or_equal: whether it holds where the value is 0 on an open set.

        Raises:
            TooHard: the value depends on too many comparisons, or is infinite or NaN.
        """
        key = (x, or_equal)
        known = self._signs.get(key)
        if known is None:
            if len(self._signs) > 100 * MOST_CASES:
                raise TooHard("a comparison of too many cases")
            known = self._signs[key] = self._above(x, or_equal)
        return known

    def _above(self, x: int, or_equal: bool) -> int:
        """Compute what `above` keeps. The comparisons in the value are decided first."""
        c = self.constant(x)
        if c is not None:
            return self.one if c > 0 or (or_equal and c == 0) else self.zero
        support = self.support(x)
        if len(support) > MOST_SUPPORT:
            raise TooHard(
                f"a comparison that depends on more than {MOST_SUPPORT} others"
            )
        if support:
            condition = min(support)
            yes = self.above(self.assume(x, condition, True), or_equal)
            no = self.above(self.assume(x, condition, False), or_equal)
            return self._where(condition, yes, no)
        return self._above_pure(x)

    def _above_pure(self, x: int) -> int:
        """Return the condition that a value without choices is above 0: its common
        factors and the rest have one sign.
        """
        terms = self.terms(x)
        content = self._content([m for m, _ in terms])
        out = self.one
        for atom, e in content:
            if self.is_positive(atom) or (e.denominator == 1 and e % 2 == 0):
                continue
            out = self.same_truth(out, self._above_atom(atom))
        rest = {quotient(m, content): c for m, c in terms}
        return self.same_truth(out, self._above_primitive(rest))

    def _above_atom(self, atom: int) -> int:
        """Return the condition that an atom is above 0."""
        kind = self.atoms[atom]
        if isinstance(kind, Logarithm):
            base = self._polynomial({((kind.of, Fraction(1)),): Fraction(1)})
            return self.greater(base, self.one)
        if isinstance(kind, Function) and kind.name == "log":
            return self.greater(kind.argument, self.one)
        if isinstance(kind, Function) and kind.name in ("inverse", "same", "tanh"):
            return self.above(kind.argument)
        return self._compare({((atom, Fraction(1)),): Fraction(1)})

    def _above_primitive(self, terms: dict[Monomial, Fraction]) -> int:
        """Return the condition that a sum without a common factor is above 0."""
        positive = all(self.is_positive(a) for m in terms for a, _ in m)
        # one sign of all terms decides
        if positive or set(terms) == {()}:
            signs = {c > 0 for c in terms.values()}
            if len(signs) == 1:
                return self.one if signs.pop() else self.zero
        if self._is_linear_in_logs(terms):
            return self._above_of_logs(terms)
        if len(terms) == 2 and positive:
            return self._above_of_two(terms)
        if self._is_sum_of_squares(terms):
            return self.one
        low, high = self._interval(terms)
        if low >= 0:
            return self.one
        if high <= 0:
            return self.zero
        # nothing decides it: a comparison, whose leading coefficient is 1
        leading = terms[max(terms)]
        condition = self._compare({m: c / leading for m, c in terms.items()})
        return self.negation(condition) if leading < 0 else condition

    def _is_sum_of_squares(self, terms: dict[Monomial, Fraction]) -> bool:
        """Tell whether a sum is a sum of squares of linear terms of variables, as a
        variance is.
        """
        form = self._quadratic_form(terms)
        return form is not None and _is_square_by_square(form)

    def _quadratic_form(
        self, terms: dict[Monomial, Fraction]
    ) -> dict[tuple[int, int], Fraction] | None:
        """Return a polynomial of variables, of degree 2 at most, as a symmetric matrix F:
        it is x'Fx, where x holds the variables and the number 1, whose place is NUMBER.
        Each entry is there once, with the smaller place first. None for any other sum.
        """
        form: dict[tuple[int, int], Fraction] = {}
        for monomial, c in terms.items():
            if any(exponent not in (1, 2) for _, exponent in monomial):
                return None
            factors: list[int] = []  # x and y of the monomial x y, x twice of x²
            for atom, exponent in monomial:
                factors += [atom] * int(exponent)
            if len(factors) > 2:
                return None
            if not all(isinstance(self.atoms[atom], Variable) for atom in factors):
                return None
            first, second = sorted([*factors, NUMBER, NUMBER][:2])
            form[first, second] = c if first == second else c / 2
        return form

    def _is_linear_in_logs(self, terms: dict[Monomial, Fraction]) -> bool:
        """Tell whether a sum has logarithms and a number only."""
        for monomial in terms:
            if not monomial:  # the number
                continue
            atom, exponent = monomial[0]
            is_log = isinstance(self.atoms[atom], Logarithm)
            if len(monomial) > 1 or exponent != 1 or not is_log:
                return False
        return True

    def _above_of_logs(self, terms: dict[Monomial, Fraction]) -> int:
        """Return the condition that Σ c log x + c0 is above 0, as that of Π x^c -
        e^-c0.
        """
        c0 = terms.get((), Fraction(0))
        powers: dict[int, Fraction] = {}
        for monomial, c in terms.items():
            if monomial:
                kind = self.atoms[monomial[0][0]]
                assert isinstance(kind, Logarithm)
                powers[kind.of] = c
        unit = max(abs(c) for c in powers.values())
        exponent = to_float(-c0 / unit)
        if abs(exponent) > LONGEST_EXPONENT:
            return self.one if exponent < 0 else self.zero
        monomial = self._monomial({a: c / unit for a, c in powers.items()})
        bound = simplest(math.exp(exponent)) if exponent else Fraction(1)
        return self._above_of_two({monomial: Fraction(1), (): -bound})

    def _above_of_two(self, terms: dict[Monomial, Fraction]) -> int:
        """Return the condition that a m + b n is above 0, of monomials m and n of positive
        atoms, where a and b have different signs. Divided by a n it is m/n > -b/a. Both
        sides are raised to a power by which the exponents of m/n become integers that
        have no common factor, so that equal conditions are equal formulas.
        """
        (m, a), (n, b) = sorted(terms.items(), reverse=True)
        if a < 0:
            return self.negation(self._above_of_two({m: -a, n: -b}))
        bound = -b / a
        ratio = quotient(m, n)
        low, high = self._bounds(ratio)
        level = to_float(bound)
        if low >= level * (1 - SAME):
            return self.one
        if high <= level * (1 + SAME):
            return self.zero
        times = _power_without_fractions(ratio)
        if max(abs(times), Fraction(times.numerator)) > LARGEST_POWER:
            return self._compare_function({ratio: Fraction(1), (): -bound})
        raised = self._monomial({atom: e * times for atom, e in ratio})
        raised_bound = self._number_to(bound, times)
        condition = self._compare_function({raised: Fraction(1), (): -raised_bound})
        # a negative power turns the comparison around
        return self.negation(condition) if times < 0 else condition

    def _compare_function(self, terms: dict[Monomial, Fraction]) -> int:
        """Return the condition that a monomial is above a number; exp is compared by
        its argument.
        """
        lead = max(terms)
        if len(lead) == 1:
            kind = self.atoms[lead[0][0]]
            bound = -terms.get((), Fraction(0))
            if isinstance(kind, Function) and kind.name == "exp" and lead[0][1] == 1:
                level = self.number(math.log(bound))
                return self.greater(kind.argument, level)
        return self._compare(terms)

    def _compare(self, terms: dict[Monomial, Fraction]) -> int:
        """Return the comparison of a sum with 0: the one that exists, if there is one
        with nearly the same numbers.
        """
        kept = tuple(sorted((m, c) for m, c in terms.items() if c))
        family = tuple(m for m, _ in kept)
        for known in self._families.get(family, []):
            node = self.nodes[known]
            assert isinstance(node, Compare)
            others = self.terms(node.polynomial)
            if all(near(c, d) for (_, c), (_, d) in zip(kept, others, strict=True)):
                return self.literal(known)
        made = self._node(Compare(self._node(Polynomial(kept))))
        self._families.setdefault(family, []).append(made)
        return self.literal(made)

    # ---- bounds ----------------------------------------------------------------------
    def _bounds(self, monomial: Monomial) -> tuple[float, float]:
        """Return bounds between which a monomial lies; infinite where none are known."""
        low = high = 0.0  # of the logarithm
        for atom, e in monomial:
            kind = self.atoms[atom]
            if isinstance(kind, Variable) and len(monomial) == 1 and e == 1:
                return kind.low, kind.high
            if not isinstance(kind, Variable) or kind.low < 0:
                if self.is_positive(atom):
                    return 0.0, math.inf
                return -math.inf, math.inf
            ends = [float(e) * log_of_bound(x) for x in (kind.low, kind.high)]
            low += min(ends)
            high += max(ends)
        return exp(low), exp(high)

    def _interval(self, terms: dict[Monomial, Fraction]) -> tuple[float, float]:
        """Return bounds between which a sum lies, widened by their rounding."""
        low = high = size = 0.0
        for monomial, c in terms.items():
            factor = to_float(c)
            ends = [factor * x if x else 0.0 for x in self._bounds(monomial)]
            low += min(ends)
            high += max(ends)
            size += max(abs(x) for x in ends)
        if not math.isfinite(size):
            size = 0.0
        if math.isnan(low) or math.isnan(high):
            return -math.inf, math.inf
        return low - 1e-12 * size, high + 1e-12 * size
