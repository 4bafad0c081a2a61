# SPDX-License-Identifier: Apache-2.0
"""The sympy side of `upref.ops`: the stop-gradient as a function, and how a derivative is read off a regime."""

import sympy


class StopGradient(sympy.Function):
    """sg(x): value x, derivative 0."""

    nargs = 1

    def fdiff(self, argindex=1):
        return sympy.S.Zero

    def _eval_is_extended_positive(self):
        return self.args[0].is_extended_positive

    def _latex(self, printer):
        return rf"\operatorname{{sg}}\left({printer.doprint(self.args[0])}\right)"


def forget_sg(expr: sympy.Expr) -> sympy.Expr:
    """The value of an expression: sg(x) -> x. To be called after differentiating."""
    return expr.replace(StopGradient, lambda x: x)


def in_regime(expr: sympy.Expr, point: dict) -> sympy.Expr:
    """The branch of every Piecewise that holds at `point`, kept symbolic: a derivative as it reads in one regime."""

    def branch(*pairs):
        for value, condition in pairs:
            if condition == True or sympy.simplify(condition.subs(point)) == True:  # noqa: E712
                return value
        raise ValueError(f"no branch holds at {point}")

    while expr.has(sympy.Piecewise):
        expr = expr.replace(sympy.Piecewise, branch)
    return expr
