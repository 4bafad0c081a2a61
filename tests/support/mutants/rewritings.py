# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""The same loss, written otherwise: algebra, other calls, loops, chunks, einsum, custom
autograd, buffers of other dtypes, packed rows, torch.compile; several at once. What
must be accepted."""

import ast
import shutil
import textwrap
from collections.abc import Iterator

import numpy as np

from .losses import Subject, every_config
from .operators import _walk, text
from .styles import STYLES, Config, arguments, fits, write
from .words import number, parsed

PRELUDE = """
class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]
"""
FLOAT32 = "float32"


MIRRORED = {ast.Gt: "<", ast.GtE: "<=", ast.Lt: ">", ast.LtE: ">="}
NEGATED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
BACK = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def others(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (kind of rewriting, other text of the same meaning) of one node. The kind
    is FLOAT32 where a number is rounded to that.
    """
    if isinstance(node, ast.BinOp):
        yield from _binary(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _compare(node)
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif (
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and node.id in ("lp", "old", "A", "r", "s", "J")
    ):
        yield "copies", f"{node.id}.clone()"
        yield "algebra", f"({node.id} + 0.0)"
        yield "algebra", f"(2 * {node.id} / 2)"


def _binary(node: ast.BinOp) -> Iterator[tuple[str, str]]:
    """Yield (kind of rewriting, other text of the same meaning) of a sum, difference,
    product or quotient; of one without a variable also its value.
    """
    a, b = f"({text(node.left)})", f"({text(node.right)})"
    numeric = not any(isinstance(n, ast.Name) for n in ast.walk(node))
    match node.op:
        case ast.Mult():
            yield "algebra", f"{b} * {a}"
        case ast.Add():
            yield "algebra", f"{b} + {a}"
        case ast.Sub():
            yield "algebra", f"-({b} - {a})"
            if not numeric:
                yield "algebra", f"{a} + {b} * -1"
                # torch.sub takes tensors
                if number(node.left) or number(node.right):
                    yield "calls", f"{a} - {b}"
                else:
                    yield "calls", f"torch.sub({a}, {b})"
        case ast.Div():
            # 1 / an integer tensor has float32's digits
            counts = not number(node.right)
            yield (FLOAT32 if counts else "algebra"), f"{a} * (1.0 / {b})"
    if numeric:
        yield "algebra", repr(eval(text(node), {}))
        yield FLOAT32, f"torch.tensor({text(node)})"


def _compare(node: ast.Compare) -> Iterator[tuple[str, str]]:
    """Yield (kind of rewriting, other text of the same meaning) of a comparison `a < b`
    and its like; of a comparison with 0 also one of the sign. There, any other operator
    is taken for ==.
    """
    a, b = text(node.left), text(node.comparators[0])
    mirrored = MIRRORED.get(type(node.ops[0]))
    if mirrored:
        yield "algebra", f"({b}) {mirrored} ({a})"
        yield "algebra", f"~(({a}) {NEGATED[mirrored]} ({b}))"
    if b == "0":
        operator = BACK[mirrored] if mirrored else "=="
        yield "algebra", f"torch.sign({a}) {operator} 0"


def _call(node: ast.Call) -> Iterator[tuple[str, str]]:
    """Yield (kind of rewriting, other text of the same meaning) of a call of torch;
    nothing of a function that is not listed here.
    """
    called = text(node.func)
    args = [text(a) for a in node.args]
    if called in ("torch.minimum", "torch.maximum"):
        yield from _minimum_or_maximum(called, *args)
    elif called == "torch.clamp":
        yield from _clamp(node)
    elif called == "torch.where":
        condition, x, y = args
        yield "algebra", f"torch.where(~({condition}), {y}, {x})"
        if y == "0.0":
            yield "calls", f"({x}).masked_fill(~({condition}), 0.0)"
    elif called == "torch.exp":
        yield "calls", f"({args[0]}).exp()"
        yield "calls", f"torch.exp2(({args[0]}) * math.log2(math.e))"
        yield "custom autograd", f"Exp.apply({args[0]})"
        yield "algebra", f"1 / torch.exp(-({args[0]}))"
    elif isinstance(node.func, ast.Attribute):
        x, name = text(node.func.value), node.func.attr
        if name == "detach":
            yield "calls", f"({x}).clone().detach()"
            yield "calls", f"({x}).data"
        elif name in ("sum", "mean") and x in ("mask", "m"):
            yield from _count_of_tokens(x, ", ".join(args))
        elif name == "mean":
            yield "algebra", f"({x}).sum() / ({x}).numel()"
        elif name == "sum":
            yield from _sum(x, args, has_keywords=bool(node.keywords))


def _minimum_or_maximum(called: str, x: str, y: str) -> Iterator[tuple[str, str]]:
    """Yield (kind of rewriting, other text of the same meaning) of torch.minimum(x, y)
    or torch.maximum(x, y). called: which of the two.
    """
    if called == "torch.minimum":
        opposite, comparison, scalar, reduction = "maximum", "<=", "min", "amin"
    else:
        opposite, comparison, scalar, reduction = "minimum", ">=", "max", "amax"
    yield "algebra", f"-torch.{opposite}(-({x}), -({y}))"
    yield "calls", f"torch.where(({x}) {comparison} ({y}), {x}, {y})"
    yield "calls", f"torch.{scalar}({x}, {y})"
    both = f"torch.stack(torch.broadcast_tensors({x}, {y}))"
    yield "calls", f"{both}.{reduction}(0)"


def _clamp(node: ast.Call) -> Iterator[tuple[str, str]]:
    """Yield (kind of rewriting, other text of the same meaning) of torch.clamp(x, low,
    high), torch.clamp(x, min=low) or torch.clamp(x, max=high).
    """
    args = [text(a) for a in node.args]
    keywords = {k.arg: text(k.value) for k in node.keywords}
    x = args[0]
    if len(args) == 3:
        low, high = args[1], args[2]
    else:
        low, high = keywords.get("min"), keywords.get("max")
    bounds = []
    if low:
        bounds.append(f"min={low}")
    if high:
        bounds.append(f"max={high}")
    inside = ", ".join(bounds)
    yield "calls", f"({x}).clamp({inside})"
    yield "calls", f"torch.clip({x}, {inside})"
    if low and high:
        yield "calls", f"torch.clamp(torch.clamp({x}, min={low}), max={high})"
        not_below = f"torch.where(({x}) > {high}, {high}, {x})"
        yield "calls", f"torch.where(({x}) < {low}, {low}, {not_below})"
    elif high:
        yield "calls", f"torch.where(({x}) > {high}, {high}, {x})"
        yield "calls", f"torch.minimum({x}, torch.full_like({x}, {high}))"
    else:
        yield "calls", f"torch.where(({x}) < {low}, {low}, {x})"
        yield "calls", f"torch.maximum({x}, torch.full_like({x}, {low}))"


def _count_of_tokens(mask: str, inside: str) -> Iterator[tuple[str, str]]:
    """Yield (kind of rewriting, other text of the same meaning) of mask.sum(inside)."""
    yield "dtype of a buffer", f"{mask}.float().sum({inside})"
    yield "dtype of a buffer", f"{mask}.int().sum({inside})"
    yield "dtype of a buffer", f"{mask}.double().sum({inside})"
    dim = ", dim=-1" if inside else ""
    yield "calls", f"torch.count_nonzero({mask}{dim})"


def _sum(x: str, args: list[str], has_keywords: bool) -> Iterator[tuple[str, str]]:
    """Yield (kind of rewriting, other text of the same meaning) of x.sum() or
    x.sum(-1); nothing of a sum with other arguments.
    """
    if not args and not has_keywords:
        yield "einsum", f"torch.einsum('...->', {x})"
        yield "chunks", f"sum((v.sum() for v in ({x}).flatten().split(7)))"
        yield "calls", f"({x}).sum(-1).sum()"
        flat = f"({x}).flatten()"
        yield "calls", f"torch.dot({flat}, torch.ones_like({flat}))"
    elif args == ["-1"]:
        yield "einsum", f"torch.einsum('...t->...', {x})"
        yield "loops", f"torch.stack([v.sum() for v in ({x}).unbind(0)])"
        yield "chunks", f"sum((v.sum(-1) for v in ({x}).split(3, -1)))"


def inside(source: str, n: int, rng: np.random.Generator) -> tuple[str, list[str]]:
    """Return the source with up to n nodes rewritten one after the other, and the kinds
    of rewriting, in order.

    Each kind has the same chance. There are fewer than n where nothing is left to
    rewrite.
    """
    said: list[str] = []
    for _ in range(n):
        tree = ast.parse(source)
        # by kind: where in the tree a rewriting of that kind is possible, and its text
        places: dict[str, list[tuple[ast.AST, str, int | None, str]]] = {}
        for parent, field, i, node, is_index in _walk(tree):
            if isinstance(node, ast.expr) and not is_index:
                for kind, new in others(node):
                    places.setdefault(kind, []).append((parent, field, i, new))
        if not places:
            break
        kinds = sorted(places)
        kind = kinds[rng.integers(len(kinds))]
        of_kind = places[kind]
        parent, field, i, new = of_kind[rng.integers(len(of_kind))]
        if i is None:
            setattr(parent, field, parsed(new))
        else:
            getattr(parent, field)[i] = parsed(new)
        source = ast.unparse(ast.fix_missing_locations(tree))
        said.append(kind)
    return source, said


# ---- around the whole function -------------------------------------------------------
AROUND = {
    "rows in another order": "return whole(**{k: v.flip(0) for k, v in given.items()})",
    "more padding": "return whole(**{k: torch.nn.functional.pad(v, (1, 2)) if v.ndim == 2 else v for k, v in given.items()})",
    "custom autograd, whole": """
        class Whole(torch.autograd.Function):
            @staticmethod
            def forward(ctx, lp):
                with torch.enable_grad():
                    x = lp.detach().requires_grad_()
                    value = whole(**(given | {'log_prob': x}))
                ctx.save_for_backward(torch.autograd.grad(value, x)[0])
                return value.detach()
            @staticmethod
            def backward(ctx, g):
                return g * ctx.saved_tensors[0]
        return Whole.apply(given['log_prob'])""",
    "checkpoint": "return torch.utils.checkpoint.checkpoint(lambda: whole(**given), use_reentrant=False)",
    "chunks of rows": """
        parts = [{k: v[i:i + 3] for k, v in given.items()} for i in range(0, len(mask), 3)]
        return sum(whole(**p) * SHARE for p in parts if p['mask'].any())""",
    "double throughout": """
        wide = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
        return whole(**wide).to(log_prob.dtype)""",
    "columns dropped that nobody uses": """
        used = mask.any(0)
        return whole(**{k: v[:, used] if v.ndim == 2 else v for k, v in given.items()})""",
    "a factor and its inverse": "return whole(**given) * 8 / 8",
    "compiled": "return quick(**given)",
    "compiled by inductor": "return quick(**given)",
}  # fmt: skip


def around(s: str, names: list[str], how: str, c: Config) -> str:
    """Return the source with its `loss` renamed to `whole`, and a new `loss` that calls
    it in one of the ways of AROUND.

    Args:
        s: the source.
        names: the arguments of `loss`.
        how: a key of AROUND.
        c: the configuration, whose aggregation says which share of the whole a chunk of
            rows has.
    """
    is_mean_over_tokens = "token-mean" in c.o.agg and "seq" not in c.o.agg
    if is_mean_over_tokens:
        share = "p['mask'].sum() / mask.sum()"
    else:
        share = "len(p['mask']) / len(mask)"
    body = textwrap.dedent(AROUND[how].replace("SHARE", share)).strip()
    given = ", ".join(f"{k}={k}" for k in names)
    head = "import torch.utils.checkpoint\n" if how == "checkpoint" else ""
    backend = {"compiled": "aot_eager", "compiled by inductor": "inductor"}.get(how)
    # after three shapes that it cannot generalize over, torch runs the function as it
    # is
    if backend:
        head += "import torch._dynamo\ntorch._dynamo.config.recompile_limit = 3\n"
        head += f"quick = torch.compile(whole, dynamic=True, backend={backend!r})\n"
    return (
        f"{s.replace('def loss(', 'def whole(')}\n"
        f"{head}"
        f"def loss({', '.join(names)}):\n"
        f"    given = dict({given})\n"
        f"{textwrap.indent(body, '    ')}\n"
    )


# of those under torch.compile, how many by its own backend, which takes half a minute
# of CPU
INDUCTOR = 3


def rewritings(
    total: int, seed: int, compiled: int = 20, only: list[Config] | None = None
) -> Iterator[Subject]:
    """Yield `total` rewritings, spread over the configurations and styles, each with
    one to six nodes rewritten and at times wrapped as a whole.

    Args:
        total: how many.
        seed: of the choices.
        compiled: how many of them run under torch.compile; these come first, and
            INDUCTOR of them use inductor where there is a compiler of C++.
        only: yield those of these configurations alone.
    """
    places = [(c, s) for c in every_config() for s in STYLES if fits(s, c)]
    # the last ones are compiled, and yielded first
    first_compiled = max(0, total - compiled)
    first_by_inductor = total - min(INDUCTOR, compiled)
    for n in [*range(first_compiled, total), *range(first_compiled)]:
        rng = np.random.default_rng([seed, 7, n])
        # steps of 37 spread the first ones over all objectives
        c, style = places[(n * 37) % len(places)]
        if only is not None and c not in only:
            continue
        source, said = inside(write(c, style), int(rng.integers(1, 7)), rng)
        if n >= first_by_inductor and shutil.which("g++"):
            ways = ["compiled by inductor"]
        elif n >= first_compiled:
            ways = ["compiled"]
        else:
            ways = ways_around(c, style)
        if len(ways) == 1 or rng.random() < 0.6:
            way = ways[rng.integers(len(ways))]
            source = around(source, arguments(c, style), way, c)
            said.append(way)
        start = "import math\nimport torch\n"
        yield Subject(
            config=c,
            style=style,
            kind="rewriting",
            what=", ".join(said),
            text=start + PRELUDE + source.removeprefix(start),
            single=FLOAT32 in said,
        )


def ways_around(c: Config, style: str) -> list[str]:
    """Return the keys of AROUND that keep the meaning of a loss in this style, without
    those that compile it.
    """
    ways = [way for way in AROUND if not way.startswith("compiled")]
    # a chunk lacks the tokens of other rows that the objective or the style's
    # denominators need
    if c.o.batch_coupled or style == "groups":
        ways.remove("chunks of rows")
    if style == "trl":
        ways.remove("columns dropped that nobody uses")
    return ways
