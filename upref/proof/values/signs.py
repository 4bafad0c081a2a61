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


def log_of_bound(x: float) -> float:
    """Return the natural logarithm, minus infinity of 0 and infinity of infinity.

    Args:
        x: 0 or more.
    """
    if x == 0:
        return -math.inf
    return math.log(x) if x < math.inf else math.inf


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
        lead = max(terms)
        scale = abs(terms[lead])
        flipped = terms[lead] < 0
        scaled = {m: c / (-scale if flipped else scale) for m, c in terms.items()}
        out = self._compare(scaled)
        return self.negation(out) if flipped else out

    def _is_sum_of_squares(self, terms: dict[Monomial, Fraction]) -> bool:
        """Tell whether a sum is a sum of squares of linear terms of variables, as a
        variance is: by completing one square after the other.
        """
        form: dict[tuple[int, int], Fraction] = {}
        for monomial, c in terms.items():
            atoms = [atom for atom, e in monomial for _ in range(int(e))]
            is_power = all(e in (1, 2) for _, e in monomial)
            if not is_power or len(atoms) > 2:
                return False
            if any(not isinstance(self.atoms[atom], Variable) for atom in atoms):
                return False
            x, y = sorted([*atoms, -1, -1][:2])  # -1 stands for the number 1
            form[x, y] = c if x == y else c / 2
        left = sorted({atom for pair in form for atom in pair}, reverse=True)
        while left:
            x, *left = left
            square = form.get((x, x), Fraction(0))
            beside = {y: form.get((y, x), Fraction(0)) for y in left}
            if square < 0 or (square == 0 and any(beside.values())):
                return False
            for y, z in combinations_with_replacement(sorted(left), 2):
                taken = beside[y] * beside[z] / square if square else Fraction(0)
                form[y, z] = form.get((y, z), Fraction(0)) - taken
        return True

    def _is_linear_in_logs(self, terms: dict[Monomial, Fraction]) -> bool:
        """Tell whether a sum has logarithms and a number only."""
        return all(
            not m
            or (
                len(m) == 1
                and m[0][1] == 1
                and isinstance(self.atoms[m[0][0]], Logarithm)
            )
            for m in terms
        )

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
        """Return the condition that a m - b n, of positive atoms, is above 0, as that
        of m/n - b/a, with integer powers that have no common factor.
        """
        (m, a), (n, b) = sorted(terms.items(), reverse=True)
        if a < 0:
            return self.negation(self._above_of_two({m: -a, n: -b}))
        bound = -b / a
        powers = dict(m)
        for atom, e in n:
            powers[atom] = powers.get(atom, Fraction(0)) - e
        powers = {atom: e for atom, e in powers.items() if e}
        low, high = self._bounds(tuple(sorted(powers.items())))
        level = to_float(bound)
        if low >= level * (1 - SAME):
            return self.one
        if high <= level * (1 + SAME):
            return self.zero
        times = Fraction(
            math.lcm(*(e.denominator for e in powers.values())),
            math.gcd(*(e.numerator for e in powers.values())),
        )
        if powers[min(powers)] < 0:
            times = -times
        if abs(times) <= LARGEST_POWER and times.numerator <= LARGEST_POWER:
            powers = {atom: e * times for atom, e in powers.items()}
            bound = self._number_to(bound, times)
            if times < 0:
                one = {self._monomial(powers): Fraction(1), (): -bound}
                return self.negation(self._compare_function(one))
        return self._compare_function({self._monomial(powers): Fraction(1), (): -bound})

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
