# SPDX-License-Identifier: Apache-2.0
"""The number that a formula has at a point."""

import math
from collections.abc import Callable, Iterable, Mapping

from upref.proof.values.nodes import (
    TOTALS,
    Branch,
    Choice,
    Compare,
    Function,
    Logarithm,
    Polynomial,
    Special,
    Variable,
)
from upref.proof.values.rationals import exp, to_float
from upref.proof.values.table import Table

Known = dict[int, float]  # of a value; of an atom at -1 - its number


FLOATS: dict[str, Callable[[float], float]] = {
    "exp": exp,
    "log": math.log,
    "inverse": lambda x: 1 / x,
    "sqrt": math.sqrt,
    "same": lambda x: x,
    "sin": math.sin,
    "cos": math.cos,
    "erf": math.erf,
    "atan": math.atan,
}


class Points(Table):
    """Formulas with numbers for their variables."""

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
        """Compute what `evaluate` keeps."""
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
        """Return the number that an atom has at a point."""
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

    def may_be_constant(self, value: int) -> bool:
        """Tell whether a value may be the same number on an open set of points: not so a
        polynomial of variables and their logarithms that varies.

        Args:
            value: an id.
        """
        node = self.nodes[value]
        if value in self.constants or not isinstance(node, Polynomial):
            return True
        for monomial, _ in node.terms:
            for atom, _ in monomial:
                kind = self.atoms[atom]
                of = self.atoms[kind.of] if isinstance(kind, Logarithm) else kind
                if not isinstance(of, Variable):
                    return True
        return False

    def variables(self, values: Iterable[int]) -> set[str]:
        """Return the names of the variables in values; not those inside of sums over
        tokens.

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
        """Return the values in an atom, none for a sum over tokens; the name of a
        variable is added to the names.
        """
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
