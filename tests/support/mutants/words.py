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
    nodes = list(ast.walk(x))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    has_subscript = any(isinstance(n, ast.Subscript) for n in nodes)
    return names <= NUMBERS | {"math"} and not has_subscript


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
        if node.id == "inf":
            renamed = parsed("math.inf")
        elif node.id == "lp_old":
            renamed = ast.Name("old", node.ctx)
        else:
            renamed = ast.Name(node.id, node.ctx)
        return ast.copy_location(renamed, node)

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
        word = node.func.id if isinstance(node.func, ast.Name) else ""
        if word == "dual_clip":
            return self._dual_clip(node)
        node = self.generic_visit(node)
        args = node.args
        if word in SAME:
            module = "math" if all(map(number, args)) else "torch"
            return call(f"{module}.{word}", *args)
        match word:
            case "sg":
                return ast.Call(ast.Attribute(args[0], "detach", ast.Load()), [], [])
            case "where":
                return call("torch.where", *args)
            case "when":
                return call("torch.where", *args, constant(0.0))
            case "clip":
                return call("torch.clamp", *args)
            case "minimum":
                return _least_or_greatest("torch.minimum", "max", *args)
            case "maximum":
                return _least_or_greatest("torch.maximum", "min", *args)
            case "sum_t":
                return parsed(_sum_over_tokens(*args))
            case "mean_t":
                return parsed(
                    f"{_sum_over_tokens(*args)} / {ast.unparse(args[1])}.sum(-1)"
                )
        if word in self.scope and inspect.isfunction(self.scope[word]):
            self.used[word] = self.scope[word]
        return node

    def _dual_clip(self, node: ast.Call) -> ast.expr:
        """Translate dual_clip(r, A, c), with c as it is given."""
        r, A, _ = (self.visit(argument) for argument in node.args)
        c = self.given.get("c")
        if c is None:
            return r
        ratio = ast.unparse(r)
        clamped = f"torch.clamp({ratio}, max={c})"
        return parsed(f"torch.where({ast.unparse(A)} < 0, {clamped}, {ratio})")


def _least_or_greatest(
    called: str, side: str, first: ast.expr, second: ast.expr
) -> ast.Call:
    """Return the syntax of a minimum or maximum of two, as a clamp if one is a number.

    Args:
        called: torch.minimum or torch.maximum.
        side: the clamp's argument for the number, "max" or "min".
        first: one argument.
        second: the other.
    """
    if number(second):
        return call("torch.clamp", first, **{side: second})
    if number(first):
        return call("torch.clamp", second, **{side: first})
    return call(called, first, second)


def _sum_over_tokens(x: ast.expr, mask: ast.expr) -> str:
    """Return the text of x's sum over the tokens of the mask in each response."""
    return f"torch.where({ast.unparse(mask)}, {ast.unparse(x)}, 0.0).sum(-1)"


def function(f) -> ast.FunctionDef:
    """Return the syntax of a function without decorators, docstring, and terms such as
    `+ 0 * r`.
    """
    node = ast.parse(textwrap.dedent(inspect.getsource(f))).body[0]
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        node.body = node.body[1:]  # without the docstring
    return Idle().visit(node)


class Idle(ast.NodeTransformer):
    """Remove terms such as `+ 0 * r`, which are there for their shape alone."""

    def visit_BinOp(self, node):
        """Return the left side of a sum whose right side begins with `0 * `."""
        node = self.generic_visit(node)
        is_sum = isinstance(node.op, ast.Add)
        if is_sum and ast.unparse(node.right).startswith("0 * "):
            return node.left
        return node


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
    translated = t.visit(function(f)).body
    *before, last = [ast.fix_missing_locations(s) for s in translated]
    statements = [ast.unparse(s) for s in before]
    return helpers(t.used), statements, ast.unparse(last.value)
