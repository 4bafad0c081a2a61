# SPDX-License-Identifier: Apache-2.0
"""An objective's own function, or its closed-form weight, as the plain torch that
somebody else would write.

The source is parsed, hyperparameters become numbers, each word of upref.ops becomes
calls of torch; helpers of the objective's file come along, translated. What is left are
assignments that end in one expression.
"""

import ast
import inspect
import math
import textwrap
from typing import Any

NUMBERS = {"eps", "eps_low", "eps_high", "c", "cap", "delta", "lam", "tau", "tau_pos", "tau_neg", "trunc",
           "c1_pos", "c2_pos", "c1_neg", "c2_neg", "eps_calm", "eps_unsure", "budget"}  # fmt: skip
SAME = {"exp", "expm1", "log", "sqrt", "sigmoid"}


def parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def number(x: ast.AST) -> bool:
    """Return whether an expression holds no tensor: only names of hyperparameters and
    math, and no subscript.
    """
    names = {n.id for n in ast.walk(x) if isinstance(n, ast.Name)}
    return names <= NUMBERS | {"math"} and not any(
        isinstance(n, ast.Subscript) for n in ast.walk(x)
    )


def call(f: str, *args: ast.expr, **kw: ast.expr) -> ast.Call:
    """Return the syntax of a call of f."""
    return ast.Call(parsed(f), list(args), [ast.keyword(k, v) for k, v in kw.items()])


def constant(v: Any) -> ast.expr:
    """Return the syntax of a number; infinity is math.inf."""
    return parsed("math.inf" if v == math.inf else repr(v))


class Translate(ast.NodeTransformer):
    """Turn the words of upref.ops into torch. given: names that become numbers. used:
    functions of the objective's file that were called.
    """

    def __init__(self, given: dict[str, Any], scope: dict[str, Any]):
        self.given, self.scope, self.used = given, scope, {}

    def visit_Name(self, node):
        """Replace a hyperparameter by its number, lp_old by old, and inf by math.inf."""
        if node.id in self.given and isinstance(node.ctx, ast.Load):
            return constant(self.given[node.id])
        renamed = {"lp_old": "old", "inf": "math.inf"}.get(node.id)
        return ast.copy_location(parsed(renamed) if renamed == "math.inf" else ast.Name(renamed or node.id, node.ctx),
                                 node)  # fmt: skip

    def visit_arg(self, node):
        return ast.arg({"lp_old": "old"}.get(node.arg, node.arg))

    def visit_IfExp(self, node):  # only `... if c is None else ...`
        """Choose the branch of `... if c is None else ...`, the only conditional of an
        objective, by the given c. In a helper, which has c as its argument, leave it.
        """
        if "c" not in self.given:  # the argument of a helper
            return self.generic_visit(node)
        return self.visit(node.body if self.given["c"] is None else node.orelse)

    def visit_BoolOp(self, node):
        """Replace `c or inf` by its number."""
        if ast.unparse(node) == "c or inf":
            return constant(self.given["c"] or math.inf)
        return self.generic_visit(node)

    def visit_Call(self, node):
        """Translate a call: `when` is a `where` with 0, `clip` a clamp, a minimum with
        a number a clamp, `sg` a detach, `mean_t` and `sum_t` masked sums over tokens.

        `dual_clip(r, A, c)` is r clamped at c where A < 0, or r where c is None.
        Functions of numbers become those of math.
        """
        f = node.func.id if isinstance(node.func, ast.Name) else ""
        if f == "dual_clip":
            r, A, _ = (self.visit(a) for a in node.args)
            c = self.given.get("c")
            return r if c is None else parsed(f"torch.where({ast.unparse(A)} < 0, torch.clamp({ast.unparse(r)}, max={c}), "
                                              f"{ast.unparse(r)})")  # fmt: skip
        node = self.generic_visit(node)
        a = node.args
        if f in SAME and all(map(number, a)):
            return call(f"math.{f}", *a)
        if f in SAME:
            return call(f"torch.{f}", *a)
        if f == "sg":
            return ast.Call(ast.Attribute(a[0], "detach", ast.Load()), [], [])
        if f == "where":
            return call("torch.where", *a)
        if f == "when":
            return call("torch.where", *a, constant(0.0))
        if f == "clip":
            return call("torch.clamp", *a)
        if f in ("minimum", "maximum"):
            side = "max" if f == "minimum" else "min"
            for x, y in (a, a[::-1]):
                if number(y):
                    return call("torch.clamp", x, **{side: y})
            return call(f"torch.{f}", *a)
        if f in ("mean_t", "sum_t"):
            x, m = (ast.unparse(v) for v in a)
            total = f"torch.where({m}, {x}, 0.0).sum(-1)"
            return parsed(f"{total} / {m}.sum(-1)" if f == "mean_t" else total)
        if f in self.scope and inspect.isfunction(self.scope[f]):
            self.used[f] = self.scope[f]
        return node


def function(f) -> ast.FunctionDef:
    """Return the syntax of a function without decorators, docstring, and terms such as
    `+ 0 * r`.
    """
    node = ast.parse(textwrap.dedent(inspect.getsource(f))).body[0]
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    if isinstance(node.body[0], ast.Expr) and isinstance(
        node.body[0].value, ast.Constant
    ):
        node.body = node.body[1:]
    return Idle().visit(node)


class Idle(ast.NodeTransformer):
    """Remove terms such as `+ 0 * r`, which are there for their shape alone."""

    def visit_BinOp(self, node):
        """Return the left side of a sum whose right side begins with `0 * `."""
        node = self.generic_visit(node)
        return (
            node.left
            if isinstance(node.op, ast.Add)
            and ast.unparse(node.right).startswith("0 * ")
            else node
        )


def helpers(found: dict[str, Any]) -> list[str]:
    """Return the sources of these functions and of all that they call in their file,
    translated, without annotations.
    """
    done: dict[str, str] = {}
    queue = dict(found)
    while queue:
        name, f = queue.popitem()
        t = Translate({}, f.__globals__)
        node = t.visit(function(f))
        node.returns = None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None  # its names are not those of torch
        done[name] = ast.unparse(ast.fix_missing_locations(node))
        queue |= {k: v for k, v in t.used.items() if k not in done}
    return list(done.values())


def body(f, given: dict[str, Any]) -> tuple[list[str], list[str], str]:
    """Return (sources of helpers, statements, the expression returned) of a function
    written in the words of upref.ops, as torch.
    """
    t = Translate(given, f.__globals__)
    *before, last = [ast.fix_missing_locations(s) for s in t.visit(function(f)).body]
    return helpers(t.used), [ast.unparse(s) for s in before], ast.unparse(last.value)
