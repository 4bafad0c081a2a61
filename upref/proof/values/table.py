# SPDX-License-Identifier: Apache-2.0
"""All formulas of one proof by their ids: each one is made once, and looked up."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction

from upref.proof.values.nodes import (
    TOTALS,
    Atom,
    Branch,
    Choice,
    Compare,
    Function,
    Logarithm,
    Monomial,
    Node,
    Polynomial,
    Special,
    TooHard,
    Variable,
)
from upref.proof.values.rationals import Number, near, simplest, to_float


class Table(ABC):
    """The formulas, and what is read off them.

    0 is the number 0 and `false`, 1 is the number 1 and `true`.
    """

    def __init__(self) -> None:
        """Begin a table that has 0, 1, both infinities and NaN."""
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

    # ---- rules of the layers above, which the layers below them need -----------------
    @abstractmethod
    def power(self, x: int, exponent: Number) -> int:
        """Return a value to the power of a number (upref.proof.values.functions)."""

    @abstractmethod
    def above(self, x: int, or_equal: bool = False) -> int:
        """Return the condition that a value is above 0 (upref.proof.values.signs)."""

    @abstractmethod
    def choose(self, condition: int, yes: int, no: int) -> int:
        """Return one value where a condition holds, and another one elsewhere
        (upref.proof.values.choices).
        """

    @abstractmethod
    def assume(self, value: int, comparison: int, truth: bool) -> int:
        """Return a value where a comparison holds, or where it does not, with what
        follows for other comparisons (upref.proof.values.choices).
        """

    @abstractmethod
    def _assume(self, value: int, comparison: int, truth: bool) -> int:
        """Return the same, with nothing that follows."""

    # ---- nodes and atoms -------------------------------------------------------------
    def _node(self, node: Node) -> int:
        """Return the id of a node, a new one where it is not known."""
        known = self._node_ids.get(node)
        if known is None:
            known = self._node_ids[node] = len(self.nodes)
            self.nodes.append(node)
            # 0 has no terms, and any other number one term without atoms
            is_number = isinstance(node, Polynomial) and all(
                not monomial for monomial, _ in node.terms
            )
            if is_number or isinstance(node, Special):
                self.constants.add(known)
        return known

    def _atom(self, atom: Atom) -> int:
        """Return the id of an atom, a new one where neither it nor a near one is known."""
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
            if all(near(c, d) for (_, c), (_, d) in pairs):
                return known
        alike.append((len(self.atoms), terms))
        return None

    def _polynomial(self, terms: dict[Monomial, Fraction]) -> int:
        """Return the id of a polynomial; terms with the coefficient 0 are left out."""
        kept = tuple(sorted((m, c) for m, c in terms.items() if c))
        return self._node(Polynomial(kept))

    def _of_atom(self, atom: Atom, exponent: Fraction = Fraction(1)) -> int:
        """Return the id of an atom to a power, as a value."""
        return self._polynomial({((self._atom(atom), exponent),): Fraction(1)})

    def _monomial(self, powers: dict[int, Fraction]) -> Monomial:
        """Return powers of atoms as a Monomial; those with the exponent 0 are left out."""
        return tuple(sorted((atom, e) for atom, e in powers.items() if e))

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

    def literal(self, comparison: int) -> int:
        """Return a comparison as a condition.

        Args:
            comparison: an id of a comparison.
        """
        return self._node(Branch(comparison, self.one, self.zero))

    def oblige(self, condition: int, words: str) -> None:
        """Note a condition that must hold everywhere, or there is no proof; nothing
        where it is true.

        Args:
            condition: an id.
            words: what there is where it does not hold, as "a division by 0".
        """
        if condition != self.one:
            self.obligations.setdefault(condition, words)

    # ---- numbers and variables -------------------------------------------------------
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
        """Return the id of a number, a float as its simplest fraction; infinity and NaN
        have ids too.
        """
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

    # ---- what a value is -------------------------------------------------------------
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
        """Return the number that a value always is; None where it varies, and where it
        is infinite, NaN or a condition.

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

    def _is_boolean(self, value: int) -> bool:
        """Tell whether a value is a condition, or true or false: 1 or 0."""
        return value in (self.zero, self.one) or isinstance(self.nodes[value], Branch)

    def is_count(self, atom: int) -> bool:
        """Tell whether an atom is a number of tokens or rows, of which there is one: a
        sum of 1, of the mask, or of such a number.

        Args:
            atom: its number.
        """
        kind = self.atoms[atom]
        if not isinstance(kind, Function) or kind.name not in TOTALS:
            return False
        if kind.argument in self.positive_totals:
            return True
        terms = self.terms(kind.argument)
        monomial, c = terms[0]
        if len(terms) > 1 or c != 1 or len(monomial) != 1:
            return False
        inner, exponent = monomial[0]
        return exponent == 1 and self.is_count(inner)

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
        # one term `variable`, and at most a number, which sorts first
        is_bound = len(monomial) == 1 and monomial[0][1] == 1 and c == 1
        others = [m for m, _ in terms[:-1]]
        if not is_bound or others not in ([], [()]):
            return None
        atom = self.atoms[monomial[0][0]]
        if not isinstance(atom, Variable):
            return None
        return atom.name, -to_float(terms[0][1]) if len(terms) == 2 else 0.0

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
            near(c, right[m]) for m, c in left.items()
        )

    def support(self, value: int) -> frozenset[int]:
        """Return the comparisons on which a value depends by a choice; not those inside
        of a sum over tokens.

        Args:
            value: an id of a number or of a condition.
        """
        known = self._supports.get(value)
        if known is None:
            known = self._supports[value] = self._support(value)
        return known

    def _support(self, value: int) -> frozenset[int]:
        """Compute what `support` keeps: the comparisons on which a value depends."""
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
        """Return the comparisons on which an atom depends; none for a sum over tokens.

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
