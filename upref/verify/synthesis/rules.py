# SPDX-License-Identifier: Apache-2.0
"""The edits of a formula: for one node of it, the nodes that may take its place.

A rule is a function from a node to pairs of words and a node. RULES are sorted from the
plainest to the least likely.
"""

import ast
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from upref import ops
from upref.verify.synthesis.formula import FORMATS, call, copied, variable

POLICIES = {
    "lp": "π_θ",
    "lp_old": "π_old",
    "lp_ref": "π_ref",
    "lp_sampler": "μ",
}
Alternative = tuple[str, ast.expr]  # the words for an edit, and the new node
Rule = Callable[[ast.expr], Iterator[Alternative]]
NOT_NUMBERS = (ast.Compare, ast.Constant, ast.Tuple, ast.Lambda, ast.Starred)


def rules(hp: dict[str, Any], numbers: list[float]) -> list[tuple[Rule, bool]]:
    """Return the rules, the plainest first, and whether each is of summands alone.

    Args:
        hp: the hyperparameters of the objective.
        numbers: at which the loss was seen to change, tried for each constant.

    Returns:
        A rule, and whether its nodes are a whole statement or a part of a sum.
    """
    bounds = _bounds_of_clip(hp)
    return [
        (_without, False),
        (_exchanged, False),
        (_policies, False),
        (partial(_numbers, numbers=numbers), False),
        (_put_together, False),
        (_in_both_cases, False),
        (_by_sign, False),
        (_detached, False),
        (partial(_bounded, bounds=bounds), False),
        (wrapped, False),
        (_in_formats, False),
        (_averaged, False),
        (partial(_multiplied, bounds=bounds), True),
    ]


def _bounds_of_clip(hp: dict[str, Any]) -> list[str]:
    """Return the bounds of the ratio that these hyperparameters make, as source; none
    where they make none.
    """
    low, high = (hp.get(name, hp.get("eps")) for name in ("eps_low", "eps_high"))
    return [] if low is None or high is None else [repr(1 - low), repr(1 + high)]


OTHER_FUNCTION = {
    "minimum": ("maximum",),
    "maximum": ("minimum",),
    "mean_t": ("sum_t", "mean_over_width"),
    "sum_t": ("mean_t", "mean_over_width"),
    "exp": ("expm1",),
}
# functions whose first two arguments are alike, or no two policies
SYMMETRIC = ("minimum", "maximum", "where", "when", "clip", "mean_t", "sum_t")
OTHER_OPERATOR: dict[type[ast.AST], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
OTHER_COMPARISON: dict[type[ast.AST], type[ast.cmpop]] = {
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
}
# by the name of a function, what it says where the function is not there
MISSING = {
    "sg": "not detached",
    "minimum": "the minimum is missing",
    "maximum": "the maximum is missing",
    "clip": "the clip is missing",
    "abs": "the absolute value is missing",
    "exp": "the exponential is missing",
    "where": "one formula for both cases",
    "when": "the condition is missing",
}


def _without(node: ast.expr) -> Iterator[Alternative]:
    """Yield edits that leave something out: a function around its argument, one side of an
    operation, a sign.
    """
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            for argument in arguments[1:] if name in ("when", "where") else arguments:
                if not (isinstance(argument, ast.Name) and argument.id == "mask"):
                    yield MISSING.get(name, f"{name} is missing"), argument
        case ast.BinOp(left=left, op=op, right=right):
            yield "a part is missing", left
            if not isinstance(op, ast.Sub | ast.Div | ast.Pow):
                yield "a part is missing", right
        case ast.UnaryOp(op=ast.USub() | ast.Invert(), operand=operand):
            yield "the sign is missing", operand
    match node:
        # binary_kl(p, q): exp(q) * (q - p)
        case ast.Call(func=ast.Name(id="binary_kl"), args=[p, q]):
            log_ratio = ast.BinOp(q, ast.Sub(), p)
            of_sampled = ast.BinOp(call("exp", q), ast.Mult(), log_ratio)
            yield "the divergence has the term of the sampled token alone", of_sampled


def _exchanged(node: ast.expr) -> Iterator[Alternative]:
    """Yield edits that write another function or operator, or exchange two things."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            for other in OTHER_FUNCTION.get(name, ()):
                yield "another function", call(other, *arguments)
            if name == "where":
                condition, x, y = arguments
                yield "the two cases are exchanged", call(name, condition, y, x)
            if len(arguments) > 1 and name not in SYMMETRIC:
                x, y, *rest = arguments
                yield "two arguments are exchanged", call(name, y, x, *rest)
            if name == "abs":
                yield "a square", ast.BinOp(arguments[0], ast.Mult(), arguments[0])
        # mask.sum(): mask.numel()
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="mask"), attr="sum"), args=[]
        ):
            slots = ast.Attribute(variable("mask"), "numel", ast.Load())
            yield "all slots are counted, padding included", ast.Call(slots, [], [])
        case ast.BinOp(left=left, op=op, right=right):
            for operator in OTHER_OPERATOR.get(type(op), ()):
                yield "another operator", ast.BinOp(left, operator(), right)
            if isinstance(op, ast.Sub | ast.Div | ast.Pow):
                yield "the two sides are exchanged", ast.BinOp(right, op, left)
            match node:
                # exp(d) - 1: d
                case ast.BinOp(
                    left=ast.Call(func=ast.Name(id="exp"), args=[d]),
                    op=ast.Sub(),
                    right=ast.Constant(value=1),
                ):
                    yield "log r for r - 1", d
            if isinstance(op, ast.Sub) and isinstance(left, ast.Name):
                quotient = call("log", ast.BinOp(left, ast.Div(), right))
                yield "a quotient of logarithms is taken for the ratio", quotient
            if isinstance(op, ast.Pow):
                if _is_log_ratio(left):
                    shift = ast.BinOp(call("exp", left), ast.Sub(), ast.Constant(1))
                    yield "r - 1 for log r", ast.BinOp(shift, op, right)
                yield "an absolute value", call("abs", left)
                yield "a power of e", call("exp", right)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if other_comparison := OTHER_COMPARISON.get(type(op)):
                yield (
                    "the comparison is the other way round",
                    ast.Compare(left, [other_comparison()], [right]),
                )


def _is_log_ratio(node: ast.expr) -> bool:
    """Return whether the node is a difference of two policies' log-probabilities."""
    match node:
        case ast.BinOp(left=ast.Name(id=x), op=ast.Sub(), right=ast.Name(id=y)):
            return x in POLICIES and y in POLICIES
    return False


def _policies(node: ast.expr) -> Iterator[Alternative]:
    """Yield edits that read another policy."""
    if isinstance(node, ast.Name) and node.id in POLICIES:
        for other, letter in POLICIES.items():
            if other != node.id:
                words = f"{letter} for {POLICIES[node.id]}"
                yield words, variable(other)
                if other == "lp":
                    yield f"{words}, detached", call("sg", variable(other))


# of a constant c
OTHER_NUMBERS: tuple[Callable[[float], float], ...] = (
    lambda c: 0.0,
    lambda c: 1.0,
    lambda c: -c,
    lambda c: 2 * c,
    lambda c: c / 2,
    lambda c: 1 / c,
    lambda c: 1 - c,
    lambda c: 1 + c,
    lambda c: c * c,
    math.sqrt,
    math.exp,
    math.log,
    lambda c: math.inf,
)


def _numbers(node: ast.expr, numbers: list[float]) -> Iterator[Alternative]:
    """Yield edits of a number."""
    match node:
        case ast.Constant(value=int() | float() as c) if not isinstance(c, bool):
            tried = []
            for change in OTHER_NUMBERS:
                try:
                    tried.append(float(change(c)))
                except (ValueError, ZeroDivisionError, OverflowError):
                    continue
            tried += [x for bound in numbers for x in (bound, bound - 1, 1 - bound)]
            for number in dict.fromkeys(tried):
                if number != c:
                    yield "another number", ast.Constant(number)


def _put_together(node: ast.expr) -> Iterator[Alternative]:
    """Yield edits that move a part of a sum into a product, a call or a condition. The
    comments have the source before and after the edit.
    """
    match node:
        # a * b + c: a * (b + c)
        case ast.BinOp(
            left=ast.BinOp(left=a, op=ast.Mult() | ast.Div() as times, right=b),
            op=ast.Add() | ast.Sub() as plus,
            right=c,
        ):
            words = "the factor multiplies the second part too"
            if "lp_sampler" in ast.dump(a) and "lp_ref" in ast.dump(c):
                words = "the sampler's correction multiplies the KL term too"
            yield words, ast.BinOp(a, times, ast.BinOp(b, plus, c))
        # when(condition, x) + c: when(condition, x + c)
        case ast.BinOp(
            left=ast.Call(func=ast.Name(id="when"), args=[condition, x], keywords=[]),
            op=ast.Add() | ast.Sub() as plus,
            right=c,
        ):
            yield (
                "the second part has the condition too",
                call("when", condition, ast.BinOp(x, plus, c)),
            )
        # when(condition, x): when(condition, x) * share(condition, mask)
        case ast.Call(func=ast.Name(id="when"), args=[condition, _], keywords=[]):
            for share in ("all_over_kept", "own_over_kept"):
                yield (
                    "the denominator counts only the tokens of the condition",
                    ast.BinOp(
                        node, ast.Mult(), call(share, condition, variable("mask"))
                    ),
                )
    match node:
        # when(condition, a + b): when(condition, a) + b
        case ast.Call(func=ast.Name(id="when"), args=[condition, ast.BinOp() as inner]):
            moved = call("when", condition, inner.left)
            yield (
                "the second part is outside of the condition",
                ast.BinOp(moved, inner.op, inner.right),
            )
        # sg(f(x, bound)) * a: sg(f(x * a, bound))
        case ast.BinOp(
            left=ast.Call(
                func=ast.Name(id="sg"), args=[ast.Call(args=[x, *more]) as f]
            ),
            op=ast.Mult(),
            right=a,
        ) if more:
            bounded = ast.Call(f.func, [ast.BinOp(x, ast.Mult(), a), *more], [])
            yield "the bound acts on the product with A", call("sg", bounded)
        # clip(x, low, high) * A: clip(x * A, low, high)
        case ast.BinOp(
            left=ast.Call(
                func=ast.Name(id="minimum" | "maximum" | "clip"), args=[x, *more]
            ) as f,
            op=ast.Mult(),
            right=ast.Name(id="A") as a,
        ):
            product = ast.BinOp(x, ast.Mult(), a)
            yield (
                "the bound acts on the product with A",
                ast.Call(f.func, [product, *more], []),
            )
        # minimum(exp(sum_t(x, mask)), bound): exp(sum_t(minimum(x, log(bound)), mask))
        case ast.Call(
            func=ast.Name(id="minimum"),
            args=[
                ast.Call(
                    func=ast.Name(id="exp"),
                    args=[ast.Call(args=[x, ast.Name(id="mask")]) as total],
                ),
                bound,
            ],
        ):
            of_each = call("minimum", x, call("log", bound))
            yield (
                "the bound is on each factor, not on the product",
                call("exp", ast.Call(total.func, [of_each, variable("mask")], [])),
            )
        # where(condition, a * x, b * x): x
        case ast.Call(
            func=ast.Name(id="where"),
            args=[_, ast.BinOp(right=x), ast.BinOp(right=y)],
        ) if ast.dump(x) == ast.dump(y):
            yield "the factor is missing in both cases", x
        # where(condition, minimum(x, high), maximum(x, low)): clip(x, low, high)
        case ast.Call(
            func=ast.Name(id="where"),
            args=[
                _,
                ast.Call(func=ast.Name(id="minimum"), args=[x, high]),
                ast.Call(func=ast.Name(id="maximum"), args=[y, low]),
            ],
        ) if ast.dump(x) == ast.dump(y):
            yield "both bounds act in both cases", call("clip", x, low, high)
            below = call("minimum", x, _log_of_one_plus(high))
            above = call("maximum", y, _log_of_one_plus(low))
            yield (
                "the bounds of the ratio are 1 - ε and 1 + ε, not their exponentials",
                call("where", node.args[0], below, above),
            )
    yield from _inside_of_term(node)


def _log_of_one_plus(bound: ast.expr) -> ast.expr:
    """Return log(1 + bound)."""
    one = ast.Constant(1.0)
    if isinstance(bound, ast.UnaryOp):
        return call("log", ast.BinOp(one, ast.Sub(), bound.operand))
    return call("log", ast.BinOp(one, ast.Add(), bound))


def _in_both_cases(node: ast.expr) -> Iterator[Alternative]:
    """Yield edits that are made in both cases of a `where`, whose formulas have one form
    and other numbers.
    """
    match node:
        case ast.Call(func=ast.Name(id="where"), args=[condition, x, y]):
            pairs = zip(_edited_somewhere(x), _edited_somewhere(y), strict=False)
            for (words, new_x), (same_words, new_y) in pairs:
                if words != same_words:
                    return  # the two cases have other forms
                yield (
                    f"{words} in both cases",
                    call("where", condition, new_x, new_y),
                )


def _edited_somewhere(node: ast.expr) -> Iterator[Alternative]:
    """Yield copies of an expression, each with one plain edit of a node of it: expressions
    of one form give the same edits in the same order.
    """
    root = ast.Expression(copied(node))
    for parent in ast.walk(root):
        for field, value in ast.iter_fields(parent):
            is_part = isinstance(value, ast.expr) and field != "func"
            if not is_part and field != "args":
                continue
            places = enumerate(value) if isinstance(value, list) else [(None, value)]
            for index, child in places:
                for rule in (_without, _exchanged, _negated):
                    for words, new in rule(child):
                        _put(parent, field, index, new)
                        yield words, copied(root.body)
                        _put(parent, field, index, child)


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    """Put a node into a field of its parent."""
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _negated(node: ast.expr) -> Iterator[Alternative]:
    """Yield the edit of a sign."""
    if not isinstance(node, NOT_NUMBERS):
        yield "another sign", ast.UnaryOp(ast.USub(), node)


def _inside_of_term(node: ast.expr) -> Iterator[Alternative]:
    """Yield edits of J that move the correction or the KL term into the objective's
    function.
    """
    match node:
        # f(lp, lp_old, A) - second: f(lp, lp_old, A - second)
        case ast.BinOp(left=first, op=ast.Sub(), right=second):
            changed = _Advantage(second)
            copy = changed.visit(copied(first))
            if changed.found and "lp_ref" in ast.dump(second):
                yield "the KL term is subtracted from A, inside of the clip", copy
                detached = _Advantage(call("sg", second)).visit(copied(first))
                yield "the KL term, detached, is subtracted from A", detached
        # correction(lp_old - lp_sampler) * f(lp, lp_old, A): f(lp, lp_sampler, A)
        case ast.BinOp(
            left=ast.Call(args=[ast.BinOp(), *_]),
            op=ast.Mult(),
            right=ast.Call(args=[_, _, *_]) as term,
        ) if "lp_sampler" in ast.dump(node.left):
            yield (
                "the clip acts on π_θ/μ, not on π_θ/π_old",
                _Policy("lp_old", "lp_sampler").visit(copied(term)),
            )


class _Advantage(ast.NodeTransformer):
    """Subtract a part from the A that a function is given, in place. `found` says whether
    one was.
    """

    def __init__(self, part: ast.expr) -> None:
        self.part = part
        self.found = False

    def visit_Call(self, node: ast.Call) -> ast.expr:
        for number, argument in enumerate(node.args):
            if isinstance(argument, ast.Name) and argument.id == "A":
                node.args[number] = ast.BinOp(argument, ast.Sub(), self.part)
                self.found = True
        return node


class _Policy(ast.NodeTransformer):
    """Write one policy for another."""

    def __init__(self, old: str, new: str) -> None:
        self.old = old
        self.new = new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.new if node.id == self.old else node.id, node.ctx)


def _positive_advantage() -> ast.expr:
    """Return the condition A > 0."""
    return ast.Compare(variable("A"), [ast.Gt()], [ast.Constant(0)])


def _by_sign(node: ast.expr) -> Iterator[Alternative]:
    """Yield the plain edits for one sign of A alone."""
    if isinstance(node, ast.Compare | ast.UnaryOp):
        return
    for rule in (_without, _exchanged, _policies):
        for words, new in rule(node):
            yield (
                f"{words} where A > 0",
                call("where", _positive_advantage(), new, node),
            )
            yield (
                f"{words} where A <= 0",
                call("where", _positive_advantage(), node, new),
            )


def _detached(node: ast.expr) -> Iterator[Alternative]:
    """Yield the edit that a part is detached."""
    if not isinstance(node, NOT_NUMBERS):
        yield "detached", call("sg", node)


def _bounded(node: ast.expr, bounds: list[str]) -> Iterator[Alternative]:
    """Yield edits that bound a ratio.

    Args:
        node: the node.
        bounds: the two bounds of a clip of the ratio, or none.
    """
    if bounds and isinstance(node, ast.Call) and "exp" in ast.unparse(node.func):
        low, high = (ast.parse(x, mode="eval").body for x in bounds)
        yield "a clip too many", call("clip", node, low, high)
        yield "a bound too many", call("minimum", node, high)
        yield "a bound too many", call("maximum", node, low)


def wrapped(node: ast.expr) -> Iterator[Alternative]:
    """Yield edits that put a function around a node.

    Args:
        node: the node.
    """
    is_mask = isinstance(node, ast.Name) and node.id == "mask"
    if is_mask or isinstance(node, NOT_NUMBERS):
        return
    yield "an absolute value too many", call("abs", node)
    yield "a square too many", ast.BinOp(node, ast.Mult(), node)
    yield from _negated(node)
    yield "an inverse", ast.BinOp(ast.Constant(1), ast.Div(), node)
    for name in ("sqrt", "log", "exp"):
        yield f"{name} too many", call(name, node)
    match node:
        case ast.Call(func=ast.Name(id=name), args=[x, *_]) if not hasattr(ops, name):
            yield "the token's own part is left out", ast.BinOp(node, ast.Sub(), x)


def _in_formats(node: ast.expr) -> Iterator[Alternative]:
    """Yield edits that a part is rounded, or computed in another number format."""
    if isinstance(node, NOT_NUMBERS):
        return
    for name in FORMATS:
        yield f"rounded to {name}", call("rounded", node, variable(name))
        if isinstance(node, ast.Name):
            continue
        words = f"computed in {name}"
        yield words, call("rounded", _in_format(node, name), variable(name))
        if isinstance(node, ast.Call):
            arguments: list[ast.expr] = [
                call("in_format", x, variable(name)) for x in node.args
            ]
            of_rounded = ast.Call(node.func, arguments, node.keywords)
            yield words, call("rounded", of_rounded, variable(name))


def _averaged(node: ast.expr) -> Iterator[Alternative]:
    """Yield edits that average a part over other tokens, or center it."""
    if isinstance(node, NOT_NUMBERS):
        return
    mask = variable("mask")
    yield "the mean over the response", call("over_response", node, mask)
    yield "the mean over the batch", call("over_tokens", node, mask)
    match node:
        # lp - lp_old
        case ast.BinOp(left=ast.Name(id="lp"), op=ast.Sub(), right=ast.Name()):
            length = ast.parse("mask.sum(-1)", mode="eval").body
            yield "divided by the length", ast.BinOp(node, ast.Div(), length)
            yield "multiplied by the length", ast.BinOp(node, ast.Mult(), length)
        # f(mean_t(lp, mask), mean_t(lp_old, mask), per_response(A, mask), ...)
        case ast.Call(
            args=[ast.Call(args=[x, _]) as p, ast.Call(args=[y, _]) as q, *z]
        ):
            centered = [
                ast.Call(policy.func, [_centered(of), mask], [])
                for policy, of in ((p, x), (q, y))
            ]
            yield (
                "log-probabilities are centered over the rows of each column",
                ast.Call(node.func, [*centered, *z], node.keywords),
            )
            if z and isinstance(z[0], ast.Call):
                own = ast.parse("lp - sg(lp)", mode="eval").body
                of_token = ast.BinOp(_column(p), ast.Add(), own)
                others: list[ast.expr] = [_column(part) for part in (q, z[0])]
                yield (
                    "the response's ratio is not detached beside the token's own",
                    ast.Call(node.func, [of_token, *others, *z[1:]], node.keywords),
                )
                every = ast.Call(
                    node.func, [p, q, _column(z[0]), *z[1:]], node.keywords
                )
                yield (
                    "ratios [B] meet advantages [B, 1], and make [B, B]",
                    ast.Call(
                        ast.Attribute(every, "mean", ast.Load()), [ast.Constant(0)], []
                    ),
                )


def _column(x: ast.expr) -> ast.expr:
    """Return x[:, None]."""
    column = ast.parse("x[:, None]", mode="eval").body
    assert isinstance(column, ast.Subscript)
    column.value = x
    return column


def _centered(x: ast.expr) -> ast.expr:
    """Return x less its mean over the rows of each column."""
    return ast.BinOp(x, ast.Sub(), call("over_column", x, variable("mask")))


FACTORS = {
    "π_θ": "exp(lp)",
    "π_old": "exp(lp_old)",
    "r": "exp(lp - lp_old)",
    "sg(r)": "sg(exp(lp - lp_old))",
    "A": "A",
    "|A|": "abs(A)",
    "|o|": "mask.sum(-1, keepdim=True)",
}


def _multiplied(node: ast.expr, bounds: list[str]) -> Iterator[Alternative]:
    """Yield edits that multiply a part of a sum by a factor, or divide it.

    Args:
        node: the node.
        bounds: the two bounds of a clip of the ratio, or none.
    """
    if isinstance(node, NOT_NUMBERS):
        return
    factors = FACTORS
    if bounds:
        clipped = f"clip(exp(lp - lp_old), {', '.join(bounds)})"
        factors = FACTORS | {"clip(r)": clipped, "sg(clip(r))": f"sg({clipped})"}
    for letter, source in factors.items():
        factor = ast.parse(source, mode="eval").body
        yield f"a factor {letter} too many", ast.BinOp(node, ast.Mult(), factor)
        yield f"divided by {letter}", ast.BinOp(node, ast.Div(), factor)


class _Cast(ast.NodeTransformer):
    """Read each variable in a number format."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return call("in_format", ast.Name(node.id, node.ctx), variable(self.name))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        arguments = [self.visit(x) for x in node.args]
        return ast.Call(node.func, arguments, node.keywords)


def _in_format(node: ast.expr, name: str) -> ast.expr:
    """Return a copy of the node, computed in a number format."""
    cast: ast.expr = _Cast(name).visit(copied(node))
    return cast
