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

One file, because its functions call each other: the rules of one normal form.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations_with_replacement

Monomial = tuple[tuple[int, Fraction], ...]
Number = int | float | Fraction

SAME = 1e-12  # relative difference of two numbers that count as one
ULPS = 4  # of a float, within which the simplest fraction is looked for
MOST_TERMS = 600  # of a product; longer ones are not multiplied out
MOST_CASES = 4096  # of one comparison
MOST_SPLIT = 6  # comparisons in the argument of a function that is split by them
LARGEST_POWER = 24  # to which both sides of a comparison are raised
MOST_TOKENS = 2**31 - 1  # of a batch
LONGEST_EXPONENT = 700  # of e: beyond, a number has no float


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


Known = dict[int, float]  # of a value; of an atom at -1 - its number


def _exp(x: float) -> float:
    """Return e^x, infinity where it overflows."""
    return math.inf if x > LONGEST_EXPONENT else math.exp(x)


FLOATS: dict[str, Callable[[float], float]] = {
    "exp": _exp,
    "log": math.log,
    "inverse": lambda x: 1 / x,
    "sqrt": math.sqrt,
    "same": lambda x: x,
    "sin": math.sin,
    "cos": math.cos,
    "erf": math.erf,
    "atan": math.atan,
}
Node = Polynomial | Special | Compare | Branch
POSITIVE = ("exp", "sqrt")
# sums of a formula over all tokens of a row, over all rows: nothing of the formula is
# about the token at hand
TOTALS = ("sum over the row", "sum over the rows")


@cache
def simplest(x: float) -> Fraction:
    """Return the fraction with the smallest denominator that rounds to a float.

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
    """Return the simplest fraction of an interval of positive numbers."""
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


class Values:
    """All formulas of one proof. Each has an id; 0 is the number 0 and `false`, 1 is the
    number 1 and `true`.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.atoms: list[Atom] = []
        self._node_ids: dict[Node, int] = {}
        self._atom_ids: dict[Atom, int] = {}
        self._numbers: dict[Number, int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._products: dict[tuple[int, int], int] = {}
        self._assumed: dict[tuple[int, int, bool], int] = {}
        self._signs: dict[tuple[int, bool], int] = {}
        self._negations: dict[int, int] = {}
        self._joined: dict[tuple[int, int], int] = {}
        self._supports: dict[int, frozenset[int]] = {}
        self._atom_supports: dict[int, frozenset[int]] = {}
        # comparisons by the monomials of their polynomials
        self._families: dict[tuple[Monomial, ...], list[int]] = {}
        # inverses and roots by the monomials of their arguments
        self._functions: dict[
            tuple[str, tuple[Monomial, ...]],
            list[tuple[int, tuple[tuple[Monomial, Fraction], ...]]],
        ] = {}
        # conditions that must hold, or a function has no value
        self.obligations: dict[int, str] = {}
        # what is above 0 when it is summed
        self.positive_totals: set[int] = set()
        self.constants: set[int] = set()  # ids of numbers, infinity included
        self.zero = self._node(Polynomial(()))
        self.one = self._node(Polynomial((((), Fraction(1)),)))
        self.inf = self._node(Special("inf"))
        self.minus_inf = self._node(Special("-inf"))
        self.nan = self._node(Special("nan"))

    # ---- nodes and atoms -------------------------------------------------------------
    def _node(self, node: Node) -> int:
        known = self._node_ids.get(node)
        if known is None:
            known = self._node_ids[node] = len(self.nodes)
            self.nodes.append(node)
            is_number = isinstance(node, Polynomial) and (
                not node.terms or (len(node.terms) == 1 and not node.terms[0][0])
            )
            if is_number or isinstance(node, Special):
                self.constants.add(known)
        return known

    def _atom(self, atom: Atom) -> int:
        known = self._atom_ids.get(atom)
        if known is None:
            known = self._nearly_known(atom)
        if known is None:
            known = len(self.atoms)
            self.atoms.append(atom)
        self._atom_ids[atom] = known
        return known

    def _nearly_known(self, atom: Atom) -> int | None:
        """Return a known inverse or root whose argument differs by rounding alone; None
        where there is none.
        """
        if not isinstance(atom, Function) or atom.name not in ("inverse", "sqrt"):
            return None
        terms = self.terms(atom.argument)
        family = (atom.name, tuple(m for m, _ in terms))
        alike = self._functions.setdefault(family, [])
        for known, others in alike:
            pairs = zip(terms, others, strict=True)
            if all(_near(c, d) for (_, c), (_, d) in pairs):
                return known
        alike.append((len(self.atoms), terms))
        return None

    def _polynomial(self, terms: dict[Monomial, Fraction]) -> int:
        kept = tuple(sorted((m, c) for m, c in terms.items() if c))
        return self._node(Polynomial(kept))

    def _of_atom(self, atom: Atom, exponent: Fraction = Fraction(1)) -> int:
        return self._polynomial({((self._atom(atom), exponent),): Fraction(1)})

    def terms(self, value: int) -> tuple[tuple[Monomial, Fraction], ...]:
        """Return the terms of a value.

        Args:
            value: an id of a number or of a condition.

        Raises:
            TooHard: it is infinite or not a number.
        """
        node = self.nodes[self.real(value)]
        if not isinstance(node, Polynomial):
            raise TooHard("a value that is infinite or not a number")
        return node.terms

    def constant(self, value: int) -> Fraction | None:
        """Return the number that a value always is; None where it varies.

        Args:
            value: an id.
        """
        node = self.nodes[value]
        if not isinstance(node, Polynomial):
            return None
        if not node.terms:
            return Fraction(0)
        if len(node.terms) == 1 and not node.terms[0][0]:
            return node.terms[0][1]
        return None

    def number_of(self, value: int, otherwise: float) -> float:
        """Return the number that a value always is, infinity included.

        Args:
            value: an id.
            otherwise: what to return where it varies.
        """
        if value not in self.constants:
            return otherwise
        name = self.special(value)
        return float(name) if name else to_float(self.constant(value) or Fraction(0))

    def special(self, value: int) -> str:
        """Return inf, -inf or nan, and "" for any other value.

        Args:
            value: an id.
        """
        node = self.nodes[value]
        return node.name if isinstance(node, Special) else ""

    def varies(self, value: int) -> bool:
        """Tell whether a value is no constant, infinity included.

        Args:
            value: an id.
        """
        return value not in self.constants

    # ---- making values ---------------------------------------------------------------
    def number(self, x: Number | bool) -> int:
        """Return the id of a number.

        Args:
            x: a number of Python; a float is read as the simplest fraction that rounds
                to it.
        """
        known = self._numbers.get(x)
        if known is None:
            known = self._numbers[x] = self._make_number(x)
        return known

    def _make_number(self, x: Number) -> int:
        if isinstance(x, float):
            if math.isnan(x):
                return self.nan
            if math.isinf(x):
                return self.inf if x > 0 else self.minus_inf
            x = simplest(x)
        return self._polynomial({(): Fraction(x)})

    def variable(
        self, name: str, low: float = -math.inf, high: float = math.inf
    ) -> int:
        """Return the id of a free variable.

        Args:
            name: of the variable, the same id each time.
            low, high: between which it lies.
        """
        return self._of_atom(Variable(name, low, high))

    def real(self, value: int) -> int:
        """Return a value as a number: 1 and 0 for a condition.

        Args:
            value: an id of a number or of a condition.
        """
        if isinstance(self.nodes[value], Branch):
            return self.choose(value, self.one, self.zero)
        return value

    def choose(self, condition: int, yes: int, no: int) -> int:
        """Return one value where a condition holds, and another one elsewhere.

        Args:
            condition: id of a condition.
            yes, no: ids.
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

    def facts(self, condition: int) -> Iterator[tuple[int, bool]]:
        """Yield comparisons that are decided where a condition holds.

        Args:
            condition: an id.

        Yields:
            A comparison, and whether it holds.
        """
        node = self.nodes[condition]
        while isinstance(node, Branch) and self.zero in (node.yes, node.no):
            yield node.comparison, node.no == self.zero
            node = self.nodes[node.yes if node.no == self.zero else node.no]

    def bound_of(self, comparison: int) -> tuple[str, float] | None:
        """Return variable and number of a comparison `variable > number`; None for any
        other.

        Args:
            comparison: an id of a comparison.
        """
        node = self.nodes[comparison]
        assert isinstance(node, Compare)
        terms = self.terms(node.polynomial)
        monomial, c = terms[-1]
        is_bound = len(monomial) == 1 and monomial[0][1] == 1 and c == 1
        if not is_bound or len(terms) > 2 or (len(terms) == 2 and terms[0][0]):
            return None
        atom = self.atoms[monomial[0][0]]
        if not isinstance(atom, Variable):
            return None
        return atom.name, -to_float(terms[0][1]) if len(terms) == 2 else 0.0

    def _is_boolean(self, value: int) -> bool:
        return value in (self.zero, self.one) or isinstance(self.nodes[value], Branch)

    # ---- arithmetic ------------------------------------------------------------------
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
        kinds = {self.special(x), self.special(y)} - {""}
        if kinds:
            if len(kinds) > 1 or "nan" in kinds:
                return self.nan
            return self.inf if "inf" in kinds else self.minus_inf
        total = dict(self.terms(x))
        for monomial, c in self.terms(y):
            total[monomial] = total.get(monomial, Fraction(0)) + c
        return self._polynomial(total)

    def polynomial_of(self, monomial: Monomial, c: Number) -> int:
        """Return one term.

        Args:
            monomial: powers of atoms.
            c: its coefficient.
        """
        return self._polynomial({monomial: Fraction(c)})

    def total(self, name: str, value: int) -> int:
        """Return the sum of a value over tokens.

        Args:
            name: one of TOTALS.
            value: an id.
        """
        return self.zero if value == self.zero else self._of_atom(Function(name, value))

    def is_count(self, atom: int) -> bool:
        """Tell whether an atom is a number of tokens or rows, of which there is one.

        Args:
            atom: its number.
        """
        kind = self.atoms[atom]
        if not isinstance(kind, Function) or kind.name not in TOTALS:
            return False
        if kind.argument in self.positive_totals:
            return True
        terms = self.terms(kind.argument)
        inner = terms[0][0]
        is_atom = len(terms) == 1 and terms[0][1] == 1 and len(inner) == 1
        return is_atom and inner[0][1] == 1 and self.is_count(inner[0][0])

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
        rest = self.zero
        for a, c in left:
            for b, d in right:
                monomial, more = self._join(a, b)
                if more is None:
                    total[monomial] = total.get(monomial, Fraction(0)) + c * d
                else:
                    product = self.multiply(self._polynomial({monomial: c * d}), more)
                    rest = self.add(rest, product)
        return self.add(self._polynomial(total), rest)

    def _multiply_special(self, x: int, y: int) -> int:
        """Return a product one factor of which is infinite or not a number."""
        if "nan" in (self.special(x), self.special(y)):
            return self.nan
        signs = [self._sign_of_factor(v) for v in (x, y)]
        if 0 in signs:
            return self.nan
        return self.inf if signs[0] * signs[1] > 0 else self.minus_inf

    def _sign_of_factor(self, x: int) -> int:
        """Return the sign of a factor of infinity."""
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
        """
        c = self.constant(x)
        if c is not None:
            return (c > 0) - (c < 0)
        condition = self.above(x)
        if condition in (self.zero, self.one):
            return 1 if condition == self.one else -1
        return None

    def _join(self, a: Monomial, b: Monomial) -> tuple[Monomial, int | None]:
        """Return the product of two monomials, and a value that is to be multiplied
        with it: what became of two choices by one condition, or of a value times its
        inverse.
        """
        if not a:
            return b, None
        if not b:
            return a, None
        powers = dict(a)
        for atom, exponent in b:
            powers[atom] = powers.get(atom, Fraction(0)) + exponent
        choices: dict[int, list[int]] = {}
        for atom in powers:
            kind = self.atoms[atom]
            if isinstance(kind, Choice) and powers[atom]:
                choices.setdefault(kind.condition, []).append(atom)
        for atoms in choices.values():
            if len(atoms) > 1 or powers[atoms[0]] != 1:
                return self._join_choices(powers, atoms)
        for atom, exponent in powers.items():
            kind = self.atoms[atom]
            if isinstance(kind, Function) and kind.name == "sqrt":
                whole = exponent // 2
                if whole:
                    powers[atom] = exponent - 2 * whole
                    more = self.power(kind.argument, whole)
                    return self._monomial(powers), more
            if isinstance(kind, Function) and kind.name == "inverse" and exponent > 0:
                reduced = self._reduce(powers, atom, kind.argument)
                if reduced is not None:
                    return reduced
        return self._monomial(powers), None

    def _monomial(self, powers: dict[int, Fraction]) -> Monomial:
        return tuple(sorted((atom, e) for atom, e in powers.items() if e))

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
        """Return m / (l + rest), where m holds the leading monomial l, as
        (m / l) (1 - rest / (l + rest)); None where m does not hold it.
        """
        (lead, c), *rest = reversed(self.terms(argument))
        if not lead:
            return None
        for atom, exponent in lead:
            have = powers.get(atom, Fraction(0))
            if have * exponent <= 0 or abs(have) < abs(exponent):
                return None
        quotient = dict(powers)
        for atom, exponent in lead:
            quotient[atom] -= exponent
        quotient[inverse] -= 1
        others = self._polynomial(dict(rest))
        once = self._polynomial({((inverse, Fraction(1)),): Fraction(1)})
        more = self.subtract(self.one, self.multiply(others, once))
        return self._monomial(quotient), self.scale(more, 1 / c)

    def power(self, x: int, exponent: Number) -> int:
        """Return a value to the power of a number.

        Args:
            x: an id.
            exponent: a number; where it is no integer, the value must be above 0.
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

    def inverse(self, x: int) -> int:
        """Return 1 divided by a value."""
        x = self.real(x)
        if name := self.special(x):
            return self.nan if name == "nan" else self.zero
        if self._splits(x):
            return self._split(x, self.inverse)
        if x == self.zero:
            raise TooHard("a division by 0")
        terms = self.terms(x)
        content = self._content([m for m, _ in terms])
        if len(terms) == 1:
            monomial, c = terms[0]
            return self._polynomial({tuple((a, -e) for a, e in monomial): 1 / c})
        primitive = {_divide(m, content): c for m, c in terms}
        lead = primitive[max(primitive)]
        argument = self._polynomial({m: c / lead for m, c in primitive.items()})
        out = self._of_atom(Function("inverse", argument))
        factor = {tuple((a, -e) for a, e in content): 1 / lead}
        return self.multiply(self._polynomial(factor), out)

    def divide(self, x: int, y: int) -> int:
        """Return the quotient of two values."""
        return self.multiply(x, self.inverse(y))

    def _content(self, monomials: list[Monomial]) -> Monomial:
        """Return the largest monomial that divides all of these."""
        common = dict(monomials[0])
        for monomial in monomials[1:]:
            powers = dict(monomial)
            common = {
                atom: min(e, powers[atom])
                for atom, e in common.items()
                if atom in powers
            }
        if len(monomials) > 1:  # negative powers are multiplied out too
            for monomial in monomials:
                for atom, e in monomial:
                    if e < 0:
                        common[atom] = min(common.get(atom, Fraction(0)), e)
        return tuple(sorted((a, e) for a, e in common.items() if e))

    # ---- functions -------------------------------------------------------------------
    def exp(self, x: int) -> int:
        """Return e to the power of a value."""
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
        """Return e to the power of a number."""
        exponent = to_float(c)
        if abs(exponent) > LONGEST_EXPONENT:
            raise TooHard(f"e to the power of {exponent:g}")
        return self.number(math.exp(exponent))

    def _exp_of_term(self, monomial: Monomial, c: Fraction) -> int | None:
        """Return exp of one term; None where it is no product of powers."""
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
                rest = tuple(p for p in monomial if p[0] != atom)
                factor = self._polynomial({rest: c})
                return self.choose(
                    kind.condition,
                    self.exp(self.multiply(factor, kind.yes)),
                    self.exp(self.multiply(factor, kind.no)),
                )
        return None

    def log(self, x: int) -> int:
        """Return the natural logarithm of a value."""
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

    def oblige(self, condition: int, words: str) -> None:
        """Note a condition that must hold everywhere, or there is no proof.

        Args:
            condition: an id.
            words: what there is where it does not hold.
        """
        if condition != self.one:
            self.obligations.setdefault(condition, words)

    def differs(self, x: int, y: int) -> int:
        """Return the condition that two values are not equal."""
        return self.negation(self.equals(x, y))

    def sigmoid(self, x: int) -> int:
        """Return 1 / (1 + e^-x)."""
        if name := self.special(x):
            return {"inf": self.one, "-inf": self.zero, "nan": self.nan}[name]
        return self.inverse(self.add(self.one, self.exp(self.negative(x))))

    def apply(self, name: str, x: int) -> int:
        """Return a function of which nothing is known but that it is one.

        Args:
            name: of the function.
            x: an id.
        """
        x = self.real(x)
        if self.special(x):
            raise TooHard(f"{name} of a value that is infinite or not a number")
        if self._splits(x):
            return self._split(x, lambda part: self.apply(name, part))
        return self._of_atom(Function(name, x))

    def _splits(self, x: int) -> bool:
        """Tell whether a value has choices, few enough to be made one by one."""
        return 0 < len(self.support(x)) <= MOST_SPLIT

    def _split(self, x: int, of: Callable[[int], int]) -> int:
        """Return a function of a value, once for each side of a choice in it."""
        condition = min(self.support(x))
        yes = of(self.assume(x, condition, True))
        no = of(self.assume(x, condition, False))
        return self.choose(self.literal(condition), yes, no)

    # ---- conditions ------------------------------------------------------------------
    def condition(self, value: int) -> int:
        """Return a value as a condition: a number is true where it is not 0.

        Args:
            value: an id.
        """
        if self._is_boolean(value):
            return value
        return self.differs(value, self.zero)

    def _branch(self, comparison: int, yes: int, no: int) -> int:
        """Return a condition that one comparison decides first."""
        yes = self.assume(yes, comparison, True)
        no = self.assume(no, comparison, False)
        return yes if yes == no else self._node(Branch(comparison, yes, no))

    def negation(self, x: int) -> int:
        """Return the condition that another one does not hold."""
        if x in (self.zero, self.one):
            return self.one if x == self.zero else self.zero
        known = self._negations.get(x)
        if known is None:
            node = self.nodes[x]
            assert isinstance(node, Branch)
            yes, no = self.negation(node.yes), self.negation(node.no)
            known = self._negations[x] = self._branch(node.comparison, yes, no)
            self._negations[known] = x
        return known

    def both(self, x: int, y: int) -> int:
        """Return the condition that two conditions hold."""
        x, y = self.condition(x), self.condition(y)
        if self.zero in (x, y):
            return self.zero
        if x == y or y == self.one:
            return x
        if x == self.one:
            return y
        key = (x, y) if x < y else (y, x)
        known = self._joined.get(key)
        if known is None:
            known = self._joined[key] = self._both(x, y)
        return known

    def _both(self, x: int, y: int) -> int:
        left, right = self.nodes[x], self.nodes[y]
        assert isinstance(left, Branch) and isinstance(right, Branch)
        first = min(left.comparison, right.comparison)
        return self._branch(
            first,
            self.both(self._assume(x, first, True), self._assume(y, first, True)),
            self.both(self._assume(x, first, False), self._assume(y, first, False)),
        )

    def either(self, x: int, y: int) -> int:
        """Return the condition that one of two conditions holds."""
        x, y = self.condition(x), self.condition(y)
        return self.negation(self.both(self.negation(x), self.negation(y)))

    def same_truth(self, x: int, y: int) -> int:
        """Return the condition that two conditions hold or fail together."""
        x, y = self.condition(x), self.condition(y)
        return self.either(
            self.both(x, y), self.both(self.negation(x), self.negation(y))
        )

    def greater(self, x: int, y: int, or_equal: bool = False) -> int:
        """Return the condition x > y, or x >= y.

        Args:
            x, y: ids; infinity and not-a-number included.
            or_equal: whether it holds where they are equal.
        """
        x, y = self.real(x), self.real(y)
        kinds = (self.special(x), self.special(y))
        if any(kinds):
            return self._greater_special(kinds, or_equal)
        return self.above(self.subtract(x, y), or_equal)

    def _greater_special(self, kinds: tuple[str, str], or_equal: bool) -> int:
        if "nan" in kinds:
            return self.zero
        size = {"-inf": -1, "": 0, "inf": 1}
        left, right = size[kinds[0]], size[kinds[1]]
        holds = left > right or (or_equal and left == right)
        return self.one if holds else self.zero

    def equals(self, x: int, y: int) -> int:
        """Return the condition that two values are equal on an open set.

        Args:
            x, y: ids.
        """
        x, y = self.real(x), self.real(y)
        kinds = (self.special(x), self.special(y))
        if any(kinds):
            return self.one if kinds[0] == kinds[1] != "nan" else self.zero
        difference = self.subtract(x, y)
        at_least = self.above(difference, True)
        return self.both(at_least, self.negation(self.above(difference)))

    def above(self, x: int, or_equal: bool = False) -> int:
        """Return the condition that a value is above 0.

        Args:
            x: an id.
            or_equal: whether it holds where the value is 0 on an open set.
        """
        key = (x, or_equal)
        known = self._signs.get(key)
        if known is None:
            if len(self._signs) > 100 * MOST_CASES:
                raise TooHard("a comparison of too many cases")
            known = self._signs[key] = self._above(x, or_equal)
        return known

    def _above(self, x: int, or_equal: bool) -> int:
        c = self.constant(x)
        if c is not None:
            return self.one if c > 0 or (or_equal and c == 0) else self.zero
        support = self.support(x)
        if len(support) > 16:
            raise TooHard("a comparison that depends on more than 16 others")
        if support:
            condition = min(support)
            yes = self.above(self.assume(x, condition, True), or_equal)
            no = self.above(self.assume(x, condition, False), or_equal)
            return self._where(condition, yes, no)
        return self._above_pure(x)

    def _where(self, comparison: int, yes: int, no: int) -> int:
        """Return one condition where a comparison holds, and another one elsewhere."""
        if yes == no:
            return yes
        fact = self.literal(comparison)
        return self.either(self.both(fact, yes), self.both(self.negation(fact), no))

    def literal(self, comparison: int) -> int:
        """Return a comparison as a condition.

        Args:
            comparison: an id of a comparison.
        """
        return self._node(Branch(comparison, self.one, self.zero))

    def _above_pure(self, x: int) -> int:
        """Return the sign of a value without choices: that of its common factors, and
        that of the rest.
        """
        terms = self.terms(x)
        content = self._content([m for m, _ in terms])
        out = self.one
        for atom, e in content:
            if self.is_positive(atom) or (e.denominator == 1 and e % 2 == 0):
                continue
            out = self.same_truth(out, self._above_atom(atom))
        rest = {_divide(m, content): c for m, c in terms}
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
        """Return the sign of a sum without a common factor."""
        positive = all(self.is_positive(a) for m in terms for a, _ in m)
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
        bounds = self._interval(terms)
        if bounds[0] >= 0:
            return self.one
        if bounds[1] <= 0:
            return self.zero
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
        """Return the sign of Σ c log x + c0: that of Π x^c - e^-c0."""
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
        """Return the sign of a m - b n, of positive atoms: that of m/n - b/a, with
        integer powers that have no common factor.
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
        """Compare a monomial with a number; exp is compared by its argument."""
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
            if all(_near(c, d) for (_, c), (_, d) in zip(kept, others, strict=True)):
                return self.literal(known)
        made = self._node(Compare(self._node(Polynomial(kept))))
        self._families.setdefault(family, []).append(made)
        return self.literal(made)

    # ---- bounds ----------------------------------------------------------------------
    def _bounds(self, monomial: Monomial) -> tuple[float, float]:
        """Return bounds between which a monomial lies."""
        low = high = 0.0  # of the logarithm
        for atom, e in monomial:
            kind = self.atoms[atom]
            if isinstance(kind, Variable) and len(monomial) == 1 and e == 1:
                return kind.low, kind.high
            if not isinstance(kind, Variable) or kind.low < 0:
                if self.is_positive(atom):
                    return 0.0, math.inf
                return -math.inf, math.inf
            ends = [
                float(e)
                * (math.log(x) if 0 < x < math.inf else math.inf * (1 if x else -1))
                for x in (kind.low, kind.high)
            ]
            low += min(ends)
            high += max(ends)
        return _exp(low), _exp(high)

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

    # ---- choices ---------------------------------------------------------------------
    def support(self, value: int) -> frozenset[int]:
        """Return the comparisons on which a value depends by a choice.

        Args:
            value: an id of a number or of a condition.
        """
        known = self._supports.get(value)
        if known is None:
            known = self._supports[value] = self._support(value)
        return known

    def _support(self, value: int) -> frozenset[int]:
        node = self.nodes[value]
        match node:
            case Polynomial():
                atoms = {atom for m, _ in node.terms for atom, _ in m}
                return frozenset().union(*map(self.atom_support, atoms))
            case Branch():
                parts = self.support(node.yes) | self.support(node.no)
                return parts | {node.comparison}
        return frozenset()

    def atom_support(self, atom: int) -> frozenset[int]:
        """Return the comparisons on which an atom depends.

        Args:
            atom: its number.
        """
        known = self._atom_supports.get(atom)
        if known is None:
            kind = self.atoms[atom]
            match kind:
                case Choice():
                    parts = (kind.condition, kind.yes, kind.no)
                    known = frozenset().union(*map(self.support, parts))
                case Function():
                    is_total = kind.name in TOTALS
                    known = frozenset() if is_total else self.support(kind.argument)
                case Logarithm():
                    known = self.atom_support(kind.of)
                case _:
                    known = frozenset()
            self._atom_supports[atom] = known
        return known

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
        """Yield a comparison and those of the same monomial that follow from it."""
        yield comparison, truth
        node = self.nodes[comparison]
        assert isinstance(node, Compare)
        terms = self.terms(node.polynomial)
        if len(terms) != 2 or terms[0][0] != ():
            if len(terms) == 1:
                yield from self._implied_by_sign(terms[0][0], truth)
            return
        bound = -terms[0][1]
        family = tuple(m for m, _ in terms)
        lead_is_positive = terms[1][1] > 0
        for other in self._families.get(family, []):
            other_node = self.nodes[other]
            assert isinstance(other_node, Compare)
            others = self.terms(other_node.polynomial)
            if other == comparison or (others[1][1] > 0) != lead_is_positive:
                continue
            if others[1][1] != terms[1][1]:
                continue
            other_bound = -others[0][1]
            if truth and other_bound <= bound:
                yield other, True
            elif not truth and other_bound >= bound:
                yield other, False
        if lead_is_positive and terms[1][1] == 1:
            yield from self._implied_for_sign(terms[1][0], bound, truth)

    def _implied_by_sign(
        self, monomial: Monomial, truth: bool
    ) -> Iterator[tuple[int, bool]]:
        """Yield what x > 0, or x < 0, says of x > c."""
        for other in self._families.get(((), monomial), []):
            node = self.nodes[other]
            assert isinstance(node, Compare)
            terms = self.terms(node.polynomial)
            bound = -terms[0][1] / terms[1][1]
            if terms[1][1] < 0:
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
        if comparison not in self.support(value):
            return value
        key = (value, comparison, truth)
        known = self._assumed.get(key)
        if known is None:
            known = self._assumed[key] = self._assume_anew(value, comparison, truth)
        return known

    def _assume_anew(self, value: int, comparison: int, truth: bool) -> int:
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
            plain = tuple(
                p for p in monomial if comparison not in self.atom_support(p[0])
            )
            product = self._polynomial({plain: c})
            for atom, e in monomial:
                if comparison in self.atom_support(atom):
                    became = self._assume_atom(atom, comparison, truth)
                    product = self.multiply(product, self.power(became, e))
            out = self.add(out, product)
        return out

    def _assume_atom(self, atom: int, comparison: int, truth: bool) -> int:
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
            ends = (c, c)
            for atom, e in monomial:
                kind = self.atoms[atom]
                if self.is_count(atom) and e == 1:
                    ends = (min(c, c * MOST_TOKENS), max(c, c * MOST_TOKENS))
                    continue
                if not isinstance(kind, Choice) or e != 1:
                    return None
                sides = (self.whole_bounds(kind.yes), self.whole_bounds(kind.no))
                if sides[0] is None or sides[1] is None:
                    return None
                products = [x * y for x in ends for y in (*sides[0], *sides[1])]
                ends = (min(products), max(products))
            if c.denominator != 1:
                return None
            low, high = low + ends[0], high + ends[1]
        return low, high

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

    # ---- numbers at a point ----------------------------------------------------------
    def evaluate(self, value: int, point: Mapping[str, float], known: Known) -> float:
        """Return the number that a value has at a point; 1 and 0 for a condition.

        Args:
            value: an id.
            point: a number for each variable, by name.
            known: numbers of this point that are known; it is added to.

        Raises:
            ArithmeticError, ValueError: a function has no value there.
        """
        have = known.get(value)
        if have is None:
            have = known[value] = self._evaluate(value, point, known)
        return have

    def _evaluate(self, value: int, point: Mapping[str, float], known: Known) -> float:
        node = self.nodes[value]
        match node:
            case Special():
                return float(node.name)
            case Compare():
                return float(self.evaluate(node.polynomial, point, known) > 0)
            case Branch():
                holds = self.evaluate(node.comparison, point, known)
                return self.evaluate(node.yes if holds else node.no, point, known)
        total = []
        for monomial, c in node.terms:
            product = to_float(c)
            for atom, e in monomial:
                base = self._evaluate_atom(atom, point, known)
                product *= base ** int(e) if e.denominator == 1 else base ** float(e)
            total.append(product)
        return math.fsum(total) if all(map(math.isfinite, total)) else sum(total)

    def _evaluate_atom(
        self, atom: int, point: Mapping[str, float], known: Known
    ) -> float:
        have = known.get(-1 - atom)
        if have is not None:
            return have
        kind = self.atoms[atom]
        match kind:
            case Variable():
                number = point[kind.name]
            case Logarithm():
                number = math.log(self._evaluate_atom(kind.of, point, known))
            case Choice():
                holds = self.evaluate(kind.condition, point, known)
                number = self.evaluate(kind.yes if holds else kind.no, point, known)
            case Function():
                argument = self.evaluate(kind.argument, point, known)
                number = FLOATS[kind.name](argument)
        known[-1 - atom] = number
        return number

    def variables(self, values: Iterable[int]) -> set[str]:
        """Return the names of the variables in values.

        Args:
            values: ids.
        """
        names: set[str] = set()
        seen: set[int] = set()
        todo = list(values)
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            node = self.nodes[value]
            match node:
                case Branch():
                    todo += [node.comparison, node.yes, node.no]
                case Compare():
                    todo.append(node.polynomial)
                case Polynomial():
                    for atom in {atom for m, _ in node.terms for atom, _ in m}:
                        todo += self._parts(atom, names)
        return names

    def _parts(self, atom: int, names: set[str]) -> tuple[int, ...]:
        """Return the values in an atom; the name of a variable is added to the names."""
        kind = self.atoms[atom]
        match kind:
            case Variable():
                names.add(kind.name)
                return ()
            case Choice():
                return (kind.condition, kind.yes, kind.no)
            case Logarithm():
                return self._parts(kind.of, names)
            case Function():
                return () if kind.name in TOTALS else (kind.argument,)

    def same(self, x: int, y: int) -> bool:
        """Tell whether two values are one formula, up to the rounding of its numbers.

        Args:
            x, y: ids.
        """
        if x == y:
            return True
        if self.special(x) or self.special(y):
            return False
        left, right = dict(self.terms(x)), dict(self.terms(y))
        return left.keys() == right.keys() and all(
            _near(c, right[m]) for m, c in left.items()
        )


def _divide(monomial: Monomial, by: Monomial) -> Monomial:
    """Return the quotient of two monomials."""
    powers = dict(monomial)
    for atom, e in by:
        powers[atom] = powers.get(atom, Fraction(0)) - e
    return tuple(sorted((a, e) for a, e in powers.items() if e))


def _near(x: Fraction, y: Fraction) -> bool:
    """Tell whether two numbers differ by rounding alone."""
    if x == y:
        return True
    return abs(x - y) <= Fraction(SAME) * max(abs(x), abs(y))
