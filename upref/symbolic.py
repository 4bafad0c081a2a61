# SPDX-License-Identifier: Apache-2.0
"""The sympy side of `upref.ops`: its words `sg` and `where` as functions, arrays of
symbols, how a regime is read.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import sympy
from sympy import Expr, Piecewise, Symbol
from sympy.core.relational import Relational


class StopGradient(sympy.Function):  # type: ignore[misc]  # mypy does not read sympy
    """sg(x): value x, derivative 0."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return sympy.S.Zero

    def _eval_is_extended_positive(self) -> Any:
        return self.args[0].is_extended_positive

    def _sympystr(self, printer: Any) -> str:
        return f"sg({printer.doprint(self.args[0])})"

    def _latex(self, printer: Any) -> str:
        return rf"\operatorname{{sg}}\left({printer.doprint(self.args[0])}\right)"


class Where(sympy.Function):  # type: ignore[misc]
    """x where the condition holds, else y: a Piecewise that does not fold what is
    nested in its condition.

    Folding makes sympy's own slow on min(r A, clip(r) A); `.rewrite(sympy.Piecewise)`
    gives that.
    """

    nargs = 3
    is_commutative = True

    @classmethod
    def eval(cls, condition: Any, x: Any, y: Any) -> Any:
        if condition in (sympy.true, sympy.false):
            return x if condition == sympy.true else y
        return x if x == y else None

    def _eval_derivative(self, s: Any) -> Any:
        condition, x, y = self.args
        return Where(condition, x.diff(s), y.diff(s))

    def _eval_rewrite_as_Piecewise(
        self, condition: Any, x: Any, y: Any, **kwargs: Any
    ) -> Any:
        return Piecewise((x, condition), (y, True))

    def _latex(self, printer: Any) -> str:
        return printer.doprint(self.rewrite(Piecewise))

    def _mpmathcode(self, printer: Any) -> str:
        """As Python branches: only the one that holds is computed."""
        condition, x, y = (printer.doprint(arg) for arg in self.args)
        return f"(({x}) if {condition} else ({y}))"


def forget_sg(expr: Expr) -> Expr:
    """The value of an expression: sg(x) -> x. To be called after differentiating."""
    return expr.replace(StopGradient, lambda x: x)


def _elementwise(compare: Callable[[Any, Any], Any]) -> Any:
    relation = np.frompyfunc(compare, 2, 1)
    return lambda self, other: relation(self, other)


class SymbolArray(np.ndarray):
    """An object array whose comparisons give relations: numpy's own would ask each
    element for its truth.
    """

    def __new__(cls, elements: Any) -> Any:
        return np.array(elements, dtype=object).view(cls)

    __le__ = _elementwise(operator.le)
    __lt__ = _elementwise(operator.lt)
    __ge__ = _elementwise(operator.ge)
    __gt__ = _elementwise(operator.gt)


def in_regime(expr: Expr, point: dict[Any, Any]) -> Expr:
    """The branch of every `where` that holds at `point`, kept symbolic: an expression
    as it reads in one regime.

    Raises ValueError where the point leaves a condition undecided.
    """

    def branch(condition: Any, x: Any, y: Any) -> Any:
        holds = condition.subs(point)
        if holds not in (sympy.true, sympy.false):
            raise ValueError(f"{condition} is undecided at {point}")
        return x if holds == sympy.true else y

    while expr.has(Where):
        expr = expr.replace(Where, branch)
    return expr


def pieces(
    Js: Sequence[Expr], lp: Symbol, lp_old: Symbol, r: Symbol, at: dict[Any, Any]
) -> list[tuple[Any, ...]]:
    """(low, high, [(J, dJ/dlp in r), ...]) of these J on every open interval of r =
    exp(lp - lp_old) between breakpoints.

    at: numbers for the other symbols, which order the breakpoints. The intervals are
    those of all Js together.

    Raises ValueError where a breakpoint has no closed form.
    """
    ends = {sympy.S.Zero: sympy.S.Zero, sympy.oo: sympy.oo}
    for J in Js:
        for k in breakpoints(J.subs({lp: sympy.log(r), lp_old: 0}), r):
            if r in k.free_symbols:
                raise ValueError(f"no closed form of the {r} at which {k} = 0")
            if k.subs(at).is_positive:
                ends.setdefault(k.subs(at), k)
    found = []
    for a, b in pairwise(sorted(ends)):
        inside = (2 * a if a else sympy.S.One) if b == sympy.oo else (a + b) / 2
        branches = [in_regime(J, at | {lp: sympy.log(inside), lp_old: 0}) for J in Js]
        read = [
            (J, sympy.simplify(forget_sg(J.diff(lp)).subs(lp, lp_old + sympy.log(r))))
            for J in branches
        ]
        found.append((ends[a], ends[b], read))
    return found


def breakpoints(expr: Expr, r: Symbol) -> list[Expr]:
    """Every r at which a condition of `expr` can change, solved where it is linear in
    r, 1/r or log r.

    A condition that is none of these comes back as the expression that vanishes there.
    More than the true breakpoints may come back (some conditions are never decisive),
    none is missing.
    """
    found = {}
    for relation in expr.atoms(Relational):
        for difference in _alternatives(relation.lhs - relation.rhs):
            if r in difference.free_symbols:
                found[_root_or_difference(difference, r)] = True
    return sorted((k for k in found if k is not None), key=sympy.default_sort_key)


def _alternatives(expr: Expr) -> Iterator[Expr]:
    """The expression with each `where` in it replaced by each of its two values in
    turn.
    """
    inner = [w for w in expr.atoms(Where) if not any(a.has(Where) for a in w.args)]
    if not inner:
        yield expr
        return
    for value in inner[0].args[1:]:
        yield from _alternatives(expr.xreplace({inner[0]: value}))


def _root_or_difference(difference: Expr, r: Symbol) -> Expr | None:
    """r where the difference is 0; None where it is 0 at no r, or at every r.

    Where no closed form is at hand, the difference comes back, with one of its two
    signs: that of a - b and of b - a is the same expression.
    """
    x = Symbol("x")
    for unknown, back in ((r, lambda v: v), (sympy.log(r), sympy.exp)):
        numerator = sympy.numer(sympy.together(sympy.expand(difference))).subs(
            unknown, x
        )
        if r not in numerator.free_symbols and numerator.is_polynomial(x):
            p = sympy.Poly(numerator, x)
            if p.degree() <= 1:
                if p.degree() == 1:
                    return back(sympy.simplify(-p.nth(0) / p.nth(1)))
                return None
    return -difference if difference.could_extract_minus_sign() else difference
