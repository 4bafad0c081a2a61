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
    """Whether an expression holds no tensor."""
    names = {n.id for n in ast.walk(x) if isinstance(n, ast.Name)}
    return names <= NUMBERS | {"math"} and not any(
        isinstance(n, ast.Subscript) for n in ast.walk(x)
    )


def call(f: str, *args: ast.expr, **kw: ast.expr) -> ast.Call:
    return ast.Call(parsed(f), list(args), [ast.keyword(k, v) for k, v in kw.items()])


def constant(v: Any) -> ast.expr:
    return parsed("math.inf" if v == math.inf else repr(v))


class Translate(ast.NodeTransformer):
    """From the words of upref.ops to torch. given: names that become numbers. used:
    helpers that it met.
    """

    def __init__(self, given: dict[str, Any], scope: dict[str, Any]):
        self.given, self.scope, self.used = given, scope, {}

    def visit_Name(self, node):
        if node.id in self.given and isinstance(node.ctx, ast.Load):
            return constant(self.given[node.id])
        renamed = {"lp_old": "old", "inf": "math.inf"}.get(node.id)
        return ast.copy_location(parsed(renamed) if renamed == "math.inf" else ast.Name(renamed or node.id, node.ctx),
                                 node)  # fmt: skip

    def visit_arg(self, node):
        return ast.arg({"lp_old": "old"}.get(node.arg, node.arg))

    def visit_IfExp(self, node):  # only `... if c is None else ...`
        if "c" not in self.given:  # the argument of a helper
            return self.generic_visit(node)
        return self.visit(node.body if self.given["c"] is None else node.orelse)

    def visit_BoolOp(self, node):
        if ast.unparse(node) == "c or inf":
            return constant(self.given["c"] or math.inf)
        return self.generic_visit(node)

    def visit_Call(self, node):
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
    """Its source without decorators, docstring and idle terms."""
    node = ast.parse(textwrap.dedent(inspect.getsource(f))).body[0]
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    if isinstance(node.body[0], ast.Expr) and isinstance(
        node.body[0].value, ast.Constant
    ):
        node.body = node.body[1:]
    return Idle().visit(node)


class Idle(ast.NodeTransformer):
    """Without `+ 0 * r`."""

    def visit_BinOp(self, node):
        node = self.generic_visit(node)
        return (
            node.left
            if isinstance(node.op, ast.Add)
            and ast.unparse(node.right).startswith("0 * ")
            else node
        )


def helpers(found: dict[str, Any]) -> list[str]:
    """The sources of these functions and of what they call, translated."""
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
    """(helpers, statements, the expression returned) of a function in the words of
    upref.ops.
    """
    t = Translate(given, f.__globals__)
    *before, last = [ast.fix_missing_locations(s) for s in t.visit(function(f)).body]
    return helpers(t.used), [ast.unparse(s) for s in before], ast.unparse(last.value)
