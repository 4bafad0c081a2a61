# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""What a hand may have written in place of one node of a syntax tree: (kind, the text
in its place).
"""

import ast
from collections.abc import Iterator

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
    v = node.value
    if isinstance(v, bool) or not isinstance(v, int | float):
        return
    if index:
        yield from (("index", repr(int(v + d))) for d in (1, -1))
        return
    if isinstance(v, int) or v == 0:
        yield from (("off by one", repr(v + d)) for d in (1, -1))
    if v:
        yield from (("constant", repr(v * k)) for k in (0.5, 2.0, 1.1, 1.001))
        yield "constant", repr(-v)
        yield "constant", "0.0"


def _binary(node: ast.BinOp) -> Iterator[Swap]:
    """Yield what may replace a sum, product, quotient or logical operation: one side
    alone, another operator, exchanged sides, changed denominators.
    """
    a, b = f"({text(node.left)})", f"({text(node.right)})"
    numeric = number(node.left) and number(node.right)
    kind = "bound" if numeric else "dropped"
    yield kind, a
    yield kind, b
    match node.op:
        case ast.Add():
            yield ("bound" if numeric else "sign"), f"{a} - {b}"
        case ast.Sub():
            yield ("bound" if numeric else "sign"), f"{a} + {b}"
            yield ("bound" if numeric else "side"), f"{b} - {a}"
            if not numeric and "." not in text(node):
                yield from (
                    ("clamp", f"torch.clamp({a} - {b}, -{x}, {x})")
                    for x in (0.5, 3, 5, 10, 20)
                )
        case ast.Mult():
            yield "order", f"{a} + {b}"
            yield "function", f"{a} / {b}"
            for x, y in ((node.left, node.right), (node.right, node.left)):
                if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Add | ast.Sub):
                    sign = "+" if isinstance(x.op, ast.Add) else "-"
                    yield (
                        "order",
                        f"{text(x.left)} {sign} ({text(x.right)}) * ({text(y)})",
                    )
        case ast.Div():
            yield "function", f"{a} * {b}"
            yield "function", f"{b} / {a}"
            yield from (
                ("denominator", f"{a} / ({b} + {e})")
                for e in ("1e-08", "1e-06", "0.0001", "1")
            )
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


def _compare(node: ast.Compare) -> Iterator[Swap]:
    """Yield what may replace an inequality: the other direction, with or without the
    bound itself, a shifted bound, always true. Nothing for other comparisons.
    """
    a, b = text(node.left), text(node.comparators[0])
    op = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=="}.get(
        type(node.ops[0])
    )
    if op in (None, "=="):
        return
    yield "side", f"{a} {op.translate(str.maketrans('<>', '><'))} {b}"
    yield "off by one", f"{a} {op[0] if len(op) > 1 else op + '='} {b}"
    yield from (("bound", f"{a} {op} {b} + {d}") for d in ("0.01", "1e-05", "-0.1"))
    yield "branch", f"({a} {op} {b}) | True"


def _call(node: ast.Call) -> Iterator[Swap]:
    """Yield what may replace a call: of min and max, clamp, where, exp and its like,
    and the methods detach, sum, mean, clamp, cumsum and unique.
    """
    f, args = text(node.func), [text(a) for a in node.args]
    kw = {k.arg: text(k.value) for k in node.keywords}
    if f in ("torch.minimum", "torch.maximum"):
        other = "torch.maximum" if f.endswith("minimum") else "torch.minimum"
        yield "side", f"{other}({', '.join(args)})"
        yield from (("dropped", x) for x in args)
        x, y = node.args
        if all(
            isinstance(v, ast.BinOp) and isinstance(v.op, ast.Mult) for v in (x, y)
        ) and text(x.right) == text(y.right):
            yield "order", f"{f}({text(x.left)}, {text(y.left)}) * {text(x.right)}"
            yield "order", f"{other}({text(x.left)}, {text(y.left)}) * {text(x.right)}"
        yield "detach", f"{f}({args[0]}, ({args[1]}).detach())"
        yield "detach", f"{f}(({args[0]}).detach(), {args[1]})"
        yield "function", f"(({args[0]}) + ({args[1]})) / 2"
    elif f == "torch.clamp":
        yield "clamp", args[0]
        yield "detach", f"({text(node)}).detach()"
        if len(args) == 3:
            x, lo, hi = args
            yield "side", f"torch.clamp({x}, min={lo})"
            yield "side", f"torch.clamp({x}, max={hi})"
            yield "bound", f"torch.clamp({x}, 2 - ({hi}), 2 - ({lo}))"
            yield "bound", f"torch.clamp({x}, ({lo}) - 1, ({hi}) - 1)"
            yield from (
                ("bound", f"torch.clamp({x}, {lo}, ({hi}) + {d})")
                for d in ("0.01", "1e-05", "1e-07", "-0.05")
            )
            yield from (
                ("bound", f"torch.clamp({x}, ({lo}) + {d}, {hi})")
                for d in ("0.0001", "1e-05", "-0.05")
            )
            yield "clamp", f"{x} + (torch.clamp({x}, {lo}, {hi}) - {x}).detach()"
        for side, other in (("min", "max"), ("max", "min")):
            if side in kw:
                yield "side", f"torch.clamp({args[0]}, {other}={kw[side]})"
                yield from (
                    ("bound", f"torch.clamp({args[0]}, {side}=({kw[side]}) + {d})")
                    for d in ("0.01", "1e-05", "-0.1")
                )
                yield (
                    "clamp",
                    f"torch.clamp({args[0]}, {side}={kw[side]}, {other}=50.0)",
                )
    elif f == "torch.where":
        c, x, y = args
        yield "branch", f"torch.where({c}, {y}, {x})"
        in_mask = c in ("mask", "m")
        yield ("mask" if in_mask else "branch"), x
        if not in_mask:
            yield "branch", f"{y} + 0.0 * A" if number(node.args[2]) else y
            if not number(node.args[1]):
                yield "detach", f"torch.where({c}, ({x}).detach(), {y})"
            if not number(node.args[2]):
                yield "detach", f"torch.where({c}, {x}, ({y}).detach())"
        else:
            yield "mask", f"torch.where({c}.roll(1, -1), {x}, {y})"
            yield "mask", f"torch.where({c} | ({c}.cumsum(-1) == 0), {x}, {y})"
            yield "mask", f"{x} * {c}"
    elif f == "torch.exp":
        yield "function", f"(1 + {args[0]})"
        yield "function", f"torch.expm1({args[0]})"
        yield "dropped", args[0]
        yield "detach", f"torch.exp({args[0]}).detach()"
        yield "side", f"torch.exp(-({args[0]}))"
    elif f in ("torch.expm1", "torch.log", "torch.sqrt", "torch.sigmoid"):
        yield "dropped", args[0]
        yield "side", f"{f}(-({args[0]}))"
        yield "function", f"{f}({args[0]}) ** 2"
    elif isinstance(node.func, ast.Attribute):
        x, name = text(node.func.value), node.func.attr
        inside = ", ".join([*args, *(f"{k}={v}" for k, v in kw.items())])
        if name == "detach":
            yield "detach", x
        elif name in ("sum", "mean"):
            counts = x in ("mask", "m", "response_mask")
            kind = "denominator" if counts else "reduction"
            yield (
                kind,
                f"{x}.{'mean' if name == 'sum' else 'sum'}({inside})"
                if not counts
                else f"{x}.numel()",
            )
            yield kind, f"len({x})" if counts else f"{x}.amax({inside})"
            if counts:
                yield "denominator", f"{x}.shape[-1]"
                yield "denominator", f"({text(node)}) * len(mask)"
                yield "denominator", f"({text(node)} - 1).clamp(min=1)"
                yield "dtype", f"{text(node)}.bfloat16().double()"
            elif not inside:
                yield (
                    "reduction",
                    f"{x}.median()" if name == "mean" else f"{x}.sum() / len({x})",
                )
                yield "reduction", f"{x}[1:].{name}()"
                yield "reduction", f"{x}[..., :-1].{name}()"
            if inside and not counts:
                yield "reduction", f"{x}.sum()"
                yield "reduction", f"{x}.cumsum(-1)[:, -1]"
                yield "off by one", f"{x}[:, 1:].{name}({inside})"
                yield "off by one", f"{x}[:, :-1].{name}({inside})"
        elif name == "clamp":
            yield "clamp", x
        elif name == "cumsum":
            yield "index", x
        elif name == "unique":
            yield "reduction", f"{x}.unique()[:-1]"


def _name(node: ast.Name) -> Iterator[Swap]:
    """Yield what may replace a variable: changed masks, another sign, dtype, scale or
    column, a detach; other advantages; and the name that it is confused with.
    """
    n = node.id
    if n in ("mask", "m"):
        yield "mask", f"torch.ones_like({n})"
        yield "mask", f"~{n}"
        yield "mask", f"{n}.roll(1, -1)"
        yield "mask", f"({n} & ({n}.cumsum(-1) > 1))"
        yield "mask", f"({n} & ({n}.cumsum(-1) <= 100))"
    if n in FLOATS:
        yield "sign", f"(-{n})"
        yield "detach", f"{n}.detach()"
        yield from (
            ("dtype", f"{n}.{d}().double()") for d in ("bfloat16", "half", "float")
        )
        yield from (("scale", f"({k} * {n})") for k in (1.0001, 0.9, 2))
        if n not in ("J", "A", "w", "kl"):
            yield "index", f"{n}.roll(1, -1)"
        yield "function", f"({n} ** 2)"
    if n == "A":
        for how in ("A.abs()", "A.sign()", "A.clamp(min=0)", "A.clamp(max=0)", "A.clamp(-2, 2)", "A.clamp(-10, 10)",
                    "(A - A.mean())", "(A / (A.std() + 1e-06))", "torch.where(A > 0, A, 0.5 * A)", "torch.where(A.abs() < 0.001, 0.0, A)"):  # fmt: skip
            yield "advantage", how
    if n in OTHER_NAME:
        yield "names", OTHER_NAME[n]


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
