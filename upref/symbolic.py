# SPDX-License-Identifier: Apache-2.0
"""The sympy side of `upref.ops`: its words `sg` and `where` as functions, arrays of
symbols, and the reading of an expression in one regime.
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
        """Return the derivative by the argument: 0."""
        return sympy.S.Zero

    def _eval_is_extended_positive(self) -> Any:
        """Tell sympy whether it is above 0, as its argument is."""
        return self.args[0].is_extended_positive

    def _sympystr(self, printer: Any) -> str:
        """Return sg(x) as text."""
        return f"sg({printer.doprint(self.args[0])})"

    def _latex(self, printer: Any) -> str:
        """Return sg(x) as LaTeX."""
        return rf"\operatorname{{sg}}\left({printer.doprint(self.args[0])}\right)"


class Where(sympy.Function):  # type: ignore[misc]
    """x where the condition holds, else y: a Piecewise that does not fold the
    conditions nested in it.

    Folding makes sympy's own Piecewise slow on min(r A, clip(r) A);
    `.rewrite(sympy.Piecewise)` returns that one.
    """

    nargs = 3
    is_commutative = True

    @classmethod
    def eval(cls, condition: Any, x: Any, y: Any) -> Any:
        """Return the branch of a condition that is decided, and x where both branches
        are x; else None: sympy keeps the expression.
        """
        if condition in (sympy.true, sympy.false):
            return x if condition == sympy.true else y
        return x if x == y else None

    def _eval_derivative(self, s: Any) -> Any:
        """Return the derivative of each branch, by the same condition."""
        condition, x, y = self.args
        return Where(condition, x.diff(s), y.diff(s))

    def _eval_rewrite_as_Piecewise(
        self, condition: Any, x: Any, y: Any, **kwargs: Any
    ) -> Any:
        """Return sympy's own Piecewise of the two branches."""
        return Piecewise((x, condition), (y, True))

    def _latex(self, printer: Any) -> str:
        """Return the cases as LaTeX."""
        return printer.doprint(self.rewrite(Piecewise))

    def _mpmathcode(self, printer: Any) -> str:
        """Return a Python condition, which computes only the branch that holds."""
        condition, x, y = (printer.doprint(arg) for arg in self.args)
        return f"(({x}) if {condition} else ({y}))"


def forget_sg(expr: Expr) -> Expr:
    """Replace sg(x) by x in an expression, after it is differentiated."""
    return expr.replace(StopGradient, lambda x: x)


def _elementwise(compare: Callable[[Any, Any], Any]) -> Any:
    """Return a comparison of arrays that compares element by element."""
    relation = np.frompyfunc(compare, 2, 1)
    return lambda self, other: relation(self, other)


class SymbolArray(np.ndarray):
    """An object array whose comparisons return relations. numpy's own comparisons would
    convert each relation to a bool, which sympy refuses.
    """

    def __new__(cls, elements: Any) -> Any:
        """Make an object array of these elements, of any shape."""
        return np.array(elements, dtype=object).view(cls)

    __le__ = _elementwise(operator.le)
    __lt__ = _elementwise(operator.lt)
    __ge__ = _elementwise(operator.ge)
    __gt__ = _elementwise(operator.gt)


def in_regime(expr: Expr, point: dict[Any, Any]) -> Expr:
    """Replace every `where` by the branch that holds at a point. The branch stays
    symbolic: the result is the expression in one regime.

    Args:
        expr: the expression.
        point: a number for each symbol of the conditions.

    Raises:
        ValueError: the point does not decide a condition.
    """

    def branch(condition: Any, x: Any, y: Any) -> Any:
        """Return the branch of one `where`; raise ValueError where its condition is
        undecided.
        """
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
    """Return these J on each open interval of r = exp(lp - lp_old) between the
    breakpoints of all of them.

    Args:
        Js: expressions in lp and lp_old.
        lp: log π_θ.
        lp_old: log π_old.
        r: the ratio.
        at: numbers for the other symbols, which order the breakpoints.

    Returns:
        (low, high, [(J, dJ/dlp as a function of r), ...]) for each interval.

    Raises:
        ValueError: a breakpoint has no closed form.
    """
    # each breakpoint as an expression, by its number
    ends = {sympy.S.Zero: sympy.S.Zero, sympy.oo: sympy.oo}
    for J in Js:
        for breakpoint_ in breakpoints(J.subs({lp: sympy.log(r), lp_old: 0}), r):
            if r in breakpoint_.free_symbols:
                raise ValueError(
                    f"no closed form of the {r} at which {breakpoint_} = 0"
                )
            number = breakpoint_.subs(at)
            if number.is_positive:
                ends.setdefault(number, breakpoint_)
    intervals = []
    for low, high in pairwise(sorted(ends)):
        if high != sympy.oo:
            inside = (low + high) / 2
        elif low:
            inside = 2 * low
        else:
            inside = sympy.S.One
        point = at | {lp: sympy.log(inside), lp_old: 0}
        in_interval = []
        for J in Js:
            branch = in_regime(J, point)
            slope = forget_sg(branch.diff(lp)).subs(lp, lp_old + sympy.log(r))
            in_interval.append((branch, sympy.simplify(slope)))
        intervals.append((ends[low], ends[high], in_interval))
    return intervals


def breakpoints(expr: Expr, r: Symbol) -> list[Expr]:
    """Return every r at which a condition of an expression can change. It is solved
    where the condition is linear in r, 1/r or log r.

    A condition that is none of these is returned as the expression that is 0 there. No
    breakpoint is missing, but some may be none: a condition may have no effect.

    Args:
        expr: the expression.
        r: the ratio.
    """
    roots = set()
    for relation in expr.atoms(Relational):
        for difference in _alternatives(relation.lhs - relation.rhs):
            if r in difference.free_symbols:
                roots.add(_root_or_difference(difference, r))
    roots.discard(None)
    return sorted(roots, key=sympy.default_sort_key)


def _alternatives(expr: Expr) -> Iterator[Expr]:
    """Yield the expression with each `where` in it replaced by each of its two values
    in turn.
    """
    innermost = [w for w in expr.atoms(Where) if not any(a.has(Where) for a in w.args)]
    if not innermost:
        yield expr
        return
    for value in innermost[0].args[1:]:
        yield from _alternatives(expr.xreplace({innermost[0]: value}))


def _root_or_difference(difference: Expr, r: Symbol) -> Expr | None:
    """Return the r at which a difference is 0, where its numerator is linear in r or in
    log r; None where the numerator is a constant, so that it is 0 at no r or at every r.

    Any other difference is returned itself, with one of its two signs: a - b and b - a
    give the same expression.
    """
    x = Symbol("x")
    for unknown, r_of in ((r, lambda value: value), (sympy.log(r), sympy.exp)):
        numerator = sympy.numer(sympy.together(sympy.expand(difference)))
        numerator = numerator.subs(unknown, x)
        if r in numerator.free_symbols or not numerator.is_polynomial(x):
            continue
        polynomial = sympy.Poly(numerator, x)
        if polynomial.degree() == 1:
            return r_of(sympy.simplify(-polynomial.nth(0) / polynomial.nth(1)))
        if polynomial.degree() < 1:
            return None
    return -difference if difference.could_extract_minus_sign() else difference
