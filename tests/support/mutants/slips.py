# SPDX-License-Identifier: Apache-2.0
"""What a hand may have written in place of one node of a syntax tree: (kind, the text
in its place).
"""

import ast
from collections.abc import Iterator
from typing import TypeGuard

from .words import number

FLOATS = {
    "lp",
    "old",
    "A",
    "r",
    "s",
    "S",
    "J",
    "w",
    "kl",
    "ref",
    "mu",
    "log_r",
    "log_s",
    "x",
    "p",
    "gain",
    "clipped",
    "g",
}
OTHER_NAME = {"lp": "old", "old": "lp", "ref": "old", "r": "(1 / r)", "s": "(1 / s)", "log_r": "(-log_r)", "low": "high",
              "high": "low", "M": "~M", "beyond": "~beyond", "below": "above", "above": "below"}  # fmt: skip
Swap = tuple[str, str]  # kind, the text in the node's place


def text(node: ast.AST) -> str:
    return ast.unparse(node)


def _constant(node: ast.Constant, index: bool) -> Iterator[Swap]:
    """Yield other numbers in place of one: its neighbors for an index; else neighbors
    of an integer or 0, multiples, the negative, and 0. Nothing for a bool or a text.
    """
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if index:
        for step in (1, -1):
            yield "index", repr(int(value + step))
        return
    if isinstance(value, int) or value == 0:
        for step in (1, -1):
            yield "off by one", repr(value + step)
    if value:
        for factor in (0.5, 2.0, 1.1, 1.001):
            yield "constant", repr(value * factor)
        yield "constant", repr(-value)
        yield "constant", "0.0"


def _binary(node: ast.BinOp) -> Iterator[Swap]:
    """Yield what may replace a sum, product, quotient or logical operation: one side
    alone, another operator, exchanged sides, changed denominators.
    """
    a, b = f"({text(node.left)})", f"({text(node.right)})"
    numeric = number(node.left) and number(node.right)
    one_side = "bound" if numeric else "dropped"
    other_operator = "bound" if numeric else "sign"
    yield one_side, a
    yield one_side, b
    match node.op:
        case ast.Add():
            yield other_operator, f"{a} - {b}"
        case ast.Sub():
            yield other_operator, f"{a} + {b}"
            yield ("bound" if numeric else "side"), f"{b} - {a}"
            # only a difference of plain variables, such as lp - old: nothing with a
            # method or with decimals
            if not numeric and "." not in text(node):
                for limit in (0.5, 3, 5, 10, 20):
                    yield "clamp", f"torch.clamp({a} - {b}, -{limit}, {limit})"
        case ast.Mult():
            yield "order", f"{a} + {b}"
            yield "function", f"{a} / {b}"
            yield from _lost_parentheses(node.left, node.right)
            yield from _lost_parentheses(node.right, node.left)
        case ast.Div():
            yield "function", f"{a} * {b}"
            yield "function", f"{b} / {a}"
            for epsilon in ("1e-08", "1e-06", "0.0001", "1"):
                yield "denominator", f"{a} / ({b} + {epsilon})"
            if not number(node.right):
                yield "denominator", f"{a} / {b}.clamp(min=2)"
                yield "denominator", f"{a} / {b} ** 2"
                yield "denominator", f"{a} / {b} ** 0.5"
                yield "detach", f"({a} / {b}).detach()"
                yield "denominator", f"{a} / {b}.max()"
        case ast.BitAnd():
            yield "branch", f"{a} | {b}"
        case ast.BitOr():
            yield "branch", f"{a} & {b}"


def _lost_parentheses(side: ast.expr, factor: ast.expr) -> Iterator[Swap]:
    """Yield x + y * z for a product (x + y) * z, where `side` is a sum or a difference;
    else nothing.
    """
    if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Add | ast.Sub):
        sign = "+" if isinstance(side.op, ast.Add) else "-"
        product = f"({text(side.right)}) * ({text(factor)})"
        yield "order", f"{text(side.left)} {sign} {product}"


INEQUALITIES = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
OTHER_DIRECTION = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
WITH_OR_WITHOUT_EQUALITY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}


def _compare(node: ast.Compare) -> Iterator[Swap]:
    """Yield what may replace an inequality: the other direction, with or without the
    bound itself, a shifted bound, always true. Nothing for other comparisons.
    """
    a, b = text(node.left), text(node.comparators[0])
    op = INEQUALITIES.get(type(node.ops[0]))
    if op is None:
        return
    yield "side", f"{a} {OTHER_DIRECTION[op]} {b}"
    yield "off by one", f"{a} {WITH_OR_WITHOUT_EQUALITY[op]} {b}"
    for shift in ("0.01", "1e-05", "-0.1"):
        yield "bound", f"{a} {op} {b} + {shift}"
    yield "branch", f"({a} {op} {b}) | True"


def _call(node: ast.Call) -> Iterator[Swap]:
    """Yield what may replace a call: of min and max, clamp, where, exp and its like,
    and the methods detach, sum, mean, clamp, cumsum and unique.
    """
    called = text(node.func)
    args = [text(a) for a in node.args]
    if called in ("torch.minimum", "torch.maximum"):
        yield from _minimum_or_maximum(node)
    elif called == "torch.clamp":
        yield from _clamp(node)
    elif called == "torch.where":
        yield from _where(node)
    elif called == "torch.exp":
        yield "function", f"(1 + {args[0]})"
        yield "function", f"torch.expm1({args[0]})"
        yield "dropped", args[0]
        yield "detach", f"torch.exp({args[0]}).detach()"
        yield "side", f"torch.exp(-({args[0]}))"
    elif called in ("torch.expm1", "torch.log", "torch.sqrt", "torch.sigmoid"):
        yield "dropped", args[0]
        yield "side", f"{called}(-({args[0]}))"
        yield "function", f"{called}({args[0]}) ** 2"
    elif isinstance(node.func, ast.Attribute):
        yield from _method(node, node.func)


def _minimum_or_maximum(node: ast.Call) -> Iterator[Swap]:
    """Yield what may replace torch.minimum(x, y) or torch.maximum(x, y): the other one,
    one argument alone, a common factor outside, a detached argument, the average.
    """
    called = text(node.func)
    left, right = node.args
    x, y = text(left), text(right)
    other = "torch.maximum" if called == "torch.minimum" else "torch.minimum"
    yield "side", f"{other}({x}, {y})"
    yield "dropped", x
    yield "dropped", y
    if _is_product(left) and _is_product(right):
        factor = text(left.right)
        if factor == text(right.right):
            without_factor = f"({text(left.left)}, {text(right.left)})"
            yield "order", f"{called}{without_factor} * {factor}"
            yield "order", f"{other}{without_factor} * {factor}"
    yield "detach", f"{called}({x}, ({y}).detach())"
    yield "detach", f"{called}(({x}).detach(), {y})"
    yield "function", f"(({x}) + ({y})) / 2"


def _is_product(node: ast.expr) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _clamp(node: ast.Call) -> Iterator[Swap]:
    """Yield what may replace torch.clamp(x, low, high), torch.clamp(x, min=low) or
    torch.clamp(x, max=high): x alone, detached, one bound alone, moved bounds.
    """
    args = [text(a) for a in node.args]
    bounds = {k.arg: text(k.value) for k in node.keywords}
    x = args[0]
    yield "clamp", x
    yield "detach", f"({text(node)}).detach()"
    if len(args) == 3:
        _, low, high = args
        yield "side", f"torch.clamp({x}, min={low})"
        yield "side", f"torch.clamp({x}, max={high})"
        # bounds mirrored at 1, and bounds of r - 1 on r
        yield "bound", f"torch.clamp({x}, 2 - ({high}), 2 - ({low}))"
        yield "bound", f"torch.clamp({x}, ({low}) - 1, ({high}) - 1)"
        for shift in ("0.01", "1e-05", "1e-07", "-0.05"):
            yield "bound", f"torch.clamp({x}, {low}, ({high}) + {shift})"
        for shift in ("0.0001", "1e-05", "-0.05"):
            yield "bound", f"torch.clamp({x}, ({low}) + {shift}, {high})"
        # the value is clamped, and the gradient is not
        yield "clamp", f"{x} + (torch.clamp({x}, {low}, {high}) - {x}).detach()"
    for side, other_side in (("min", "max"), ("max", "min")):
        if side in bounds:
            bound = bounds[side]
            yield "side", f"torch.clamp({x}, {other_side}={bound})"
            for shift in ("0.01", "1e-05", "-0.1"):
                yield "bound", f"torch.clamp({x}, {side}=({bound}) + {shift})"
            yield "clamp", f"torch.clamp({x}, {side}={bound}, {other_side}=50.0)"


def _where(node: ast.Call) -> Iterator[Swap]:
    """Yield what may replace torch.where(condition, x, y): exchanged branches, one
    branch alone, a detached branch, and another mask where the condition is the mask.
    """
    condition, x, y = (text(a) for a in node.args)
    x_is_number, y_is_number = number(node.args[1]), number(node.args[2])
    yield "branch", f"torch.where({condition}, {y}, {x})"
    if condition in ("mask", "m"):
        yield "mask", x
        yield "mask", f"torch.where({condition}.roll(1, -1), {x}, {y})"
        before_response = f"({condition}.cumsum(-1) == 0)"
        yield "mask", f"torch.where({condition} | {before_response}, {x}, {y})"
        yield "mask", f"{x} * {condition}"
        return
    yield "branch", x
    # a number alone would have no shape
    yield "branch", (f"{y} + 0.0 * A" if y_is_number else y)
    if not x_is_number:
        yield "detach", f"torch.where({condition}, ({x}).detach(), {y})"
    if not y_is_number:
        yield "detach", f"torch.where({condition}, {x}, ({y}).detach())"


def _method(node: ast.Call, method: ast.Attribute) -> Iterator[Swap]:
    """Yield what may replace x.detach(), x.sum(), x.mean(), x.clamp(), x.cumsum() and
    x.unique(); nothing for another method. method: what is called.
    """
    x = text(method.value)
    match method.attr:
        case "detach":
            yield "detach", x
        case "sum" | "mean":
            if x in ("mask", "m", "response_mask"):
                yield from _count_of_tokens(node, x)
            else:
                yield from _sum_or_mean(node, x, method.attr)
        case "clamp":
            yield "clamp", x
        case "cumsum":
            yield "index", x
        case "unique":
            yield "reduction", f"{x}.unique()[:-1]"


def _count_of_tokens(node: ast.Call, mask: str) -> Iterator[Swap]:
    """Yield other denominators in place of mask.sum(...) or mask.mean(...)."""
    count = text(node)
    yield "denominator", f"{mask}.numel()"
    yield "denominator", f"len({mask})"
    yield "denominator", f"{mask}.shape[-1]"
    yield "denominator", f"({count}) * len(mask)"
    yield "denominator", f"({count} - 1).clamp(min=1)"
    yield "dtype", f"{count}.bfloat16().double()"


def _sum_or_mean(node: ast.Call, x: str, name: str) -> Iterator[Swap]:
    """Yield other reductions in place of x.sum(...) or x.mean(...). name: which of the
    two.
    """
    positional = [text(a) for a in node.args]
    by_keyword = [f"{k.arg}={text(k.value)}" for k in node.keywords]
    inside = ", ".join(positional + by_keyword)
    other = "mean" if name == "sum" else "sum"
    yield "reduction", f"{x}.{other}({inside})"
    yield "reduction", f"{x}.amax({inside})"
    if inside:
        yield "reduction", f"{x}.sum()"
        yield "reduction", f"{x}.cumsum(-1)[:, -1]"
        yield "off by one", f"{x}[:, 1:].{name}({inside})"
        yield "off by one", f"{x}[:, :-1].{name}({inside})"
    else:
        whole = f"{x}.median()" if name == "mean" else f"{x}.sum() / len({x})"
        yield "reduction", whole
        yield "reduction", f"{x}[1:].{name}()"
        yield "reduction", f"{x}[..., :-1].{name}()"


CHANGED_ADVANTAGES = (
    "A.abs()",
    "A.sign()",
    "A.clamp(min=0)",
    "A.clamp(max=0)",
    "A.clamp(-2, 2)",
    "A.clamp(-10, 10)",
    "(A - A.mean())",
    "(A / (A.std() + 1e-06))",
    "torch.where(A > 0, A, 0.5 * A)",
    "torch.where(A.abs() < 0.001, 0.0, A)",
)


def _name(node: ast.Name) -> Iterator[Swap]:
    """Yield what may replace a variable: changed masks, another sign, dtype, scale or
    column, a detach; other advantages; and the name that it is confused with.
    """
    name = node.id
    if name in ("mask", "m"):
        yield "mask", f"torch.ones_like({name})"
        yield "mask", f"~{name}"
        yield "mask", f"{name}.roll(1, -1)"
        # without the first token, and without those after the 100th
        yield "mask", f"({name} & ({name}.cumsum(-1) > 1))"
        yield "mask", f"({name} & ({name}.cumsum(-1) <= 100))"
    if name in FLOATS:
        yield "sign", f"(-{name})"
        yield "detach", f"{name}.detach()"
        for dtype in ("bfloat16", "half", "float"):
            yield "dtype", f"{name}.{dtype}().double()"
        for factor in (1.0001, 0.9, 2):
            yield "scale", f"({factor} * {name})"
        if name not in ("J", "A", "w", "kl"):
            yield "index", f"{name}.roll(1, -1)"
        yield "function", f"({name} ** 2)"
    if name == "A":
        for changed in CHANGED_ADVANTAGES:
            yield "advantage", changed
    if name in OTHER_NAME:
        yield "names", OTHER_NAME[name]


def swaps(node: ast.AST, index: bool) -> Iterator[Swap]:
    """Yield every slip of one node, as (kind, text in its place).

    Args:
        node: of the syntax tree.
        index: whether it is an index or a dimension, which concerns constants alone.
    """
    if isinstance(node, ast.Constant):
        yield from _constant(node, index)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
        yield ("sign" if isinstance(node.op, ast.USub) else "mask"), text(node.operand)
    elif isinstance(node, ast.BinOp):
        yield from _binary(node)
    elif isinstance(node, ast.Compare):
        yield from _compare(node)
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield from _name(node)
