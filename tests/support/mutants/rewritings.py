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
from .styles import STYLES, Config, fits, write
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


def others(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (kind of rewriting, other text of the same meaning) of one node. The kind
    is FLOAT32 where a number is rounded to that.
    """
    if isinstance(node, ast.BinOp):
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
                    yield (
                        "calls",
                        f"torch.sub({a}, {b})"
                        if not number(node.left) and not number(node.right)
                        else f"{a} - {b}",
                    )
            case ast.Div():
                # 1 / an integer tensor has float32's digits
                counts = not number(node.right)
                yield (FLOAT32 if counts else "algebra"), f"{a} * (1.0 / {b})"
        if numeric:
            yield "algebra", repr(eval(text(node), {}))
            yield FLOAT32, f"torch.tensor({text(node)})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        a, b = text(node.left), text(node.comparators[0])
        back = {ast.Gt: "<", ast.GtE: "<=", ast.Lt: ">", ast.LtE: ">="}.get(
            type(node.ops[0])
        )
        if back:
            yield "algebra", f"({b}) {back} ({a})"
            yield (
                "algebra",
                f"~(({a}) {({'<': '<=', '<=': '<', '>': '>=', '>=': '>'})[back]} ({b}))",
            )
        if b == "0":
            yield (
                "algebra",
                f"torch.sign({a}) {({'<': '>', '<=': '>=', '>': '<', '>=': '<='}).get(back, '==')} 0",
            )
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif (
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and node.id in ("lp", "old", "A", "r", "s", "J")
    ):
        yield "copies", f"{node.id}.clone()"
        yield "algebra", f"({node.id} + 0.0)"
        yield "algebra", f"(2 * {node.id} / 2)"


def _calls(node: ast.Call) -> Iterator[tuple[str, str]]:
    """Yield (kind of rewriting, other text of the same meaning) of a call of torch;
    nothing of a function that is not listed here.
    """
    f, args = text(node.func), [text(a) for a in node.args]
    kw = {k.arg: text(k.value) for k in node.keywords}
    if f in ("torch.minimum", "torch.maximum"):
        x, y = args
        least = f.endswith("minimum")
        yield "algebra", f"-torch.{'maximum' if least else 'minimum'}(-({x}), -({y}))"
        yield "calls", f"torch.where(({x}) {'<=' if least else '>='} ({y}), {x}, {y})"
        yield "calls", f"torch.{'min' if least else 'max'}({x}, {y})"
        yield (
            "calls",
            f"torch.stack(torch.broadcast_tensors({x}, {y})).{'amin' if least else 'amax'}(0)",
        )
    elif f == "torch.clamp":
        x = args[0]
        lo, hi = (
            (args[1], args[2]) if len(args) == 3 else (kw.get("min"), kw.get("max"))
        )
        inside = ", ".join(f"{k}={v}" for k, v in (("min", lo), ("max", hi)) if v)
        yield "calls", f"({x}).clamp({inside})"
        yield "calls", f"torch.clip({x}, {inside})"
        if lo and hi:
            yield "calls", f"torch.clamp(torch.clamp({x}, min={lo}), max={hi})"
            yield (
                "calls",
                f"torch.where(({x}) < {lo}, {lo}, torch.where(({x}) > {hi}, {hi}, {x}))",
            )
        elif hi:
            yield "calls", f"torch.where(({x}) > {hi}, {hi}, {x})"
            yield "calls", f"torch.minimum({x}, torch.full_like({x}, {hi}))"
        else:
            yield "calls", f"torch.where(({x}) < {lo}, {lo}, {x})"
            yield "calls", f"torch.maximum({x}, torch.full_like({x}, {lo}))"
    elif f == "torch.where":
        c, x, y = args
        yield "algebra", f"torch.where(~({c}), {y}, {x})"
        if y == "0.0":
            yield "calls", f"({x}).masked_fill(~({c}), 0.0)"
    elif f == "torch.exp":
        yield "calls", f"({args[0]}).exp()"
        yield "calls", f"torch.exp2(({args[0]}) * math.log2(math.e))"
        yield "custom autograd", f"Exp.apply({args[0]})"
        yield "algebra", f"1 / torch.exp(-({args[0]}))"
    elif isinstance(node.func, ast.Attribute) and node.func.attr in (
        "sum",
        "mean",
        "detach",
    ):
        x, name = text(node.func.value), node.func.attr
        counts = x in ("mask", "m")
        if name == "detach":
            yield "calls", f"({x}).clone().detach()"
            yield "calls", f"({x}).data"
        elif counts:
            inside = ", ".join(args)
            yield "dtype of a buffer", f"{x}.float().sum({inside})"
            yield "dtype of a buffer", f"{x}.int().sum({inside})"
            yield "dtype of a buffer", f"{x}.double().sum({inside})"
            yield "calls", f"torch.count_nonzero({x}{', dim=-1' if inside else ''})"
        elif name == "mean":
            yield "algebra", f"({x}).sum() / ({x}).numel()"
        elif not args and not kw:
            yield "einsum", f"torch.einsum('...->', {x})"
            yield "chunks", f"sum((v.sum() for v in ({x}).flatten().split(7)))"
            yield "calls", f"({x}).sum(-1).sum()"
            yield (
                "calls",
                f"torch.dot(({x}).flatten(), torch.ones_like(({x}).flatten()))",
            )
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
        places = [(p, f, i, k, new) for p, f, i, node, index in _walk(tree) if isinstance(node, ast.expr) and not index
                  for k, new in others(node)]  # fmt: skip
        kinds = sorted({x[3] for x in places})
        if not kinds:
            break
        kind = kinds[rng.integers(len(kinds))]
        of = [x for x in places if x[3] == kind]
        parent, field, i, _, new = of[rng.integers(len(of))]
        if i is None:
            setattr(parent, field, parsed(new))
        else:
            getattr(parent, field)[i] = parsed(new)
        source, said = ast.unparse(ast.fix_missing_locations(tree)), [*said, kind]
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
    share = (
        "p['mask'].sum() / mask.sum()"
        if "token-mean" in c.o.agg and "seq" not in c.o.agg
        else "len(p['mask']) / len(mask)"
    )
    body = textwrap.indent(
        textwrap.dedent(AROUND[how].replace("SHARE", share)).strip(), "    "
    )
    given = ", ".join(f"{k}={k}" for k in names)
    head = "import torch.utils.checkpoint\n" if how == "checkpoint" else ""
    backend = {"compiled": "aot_eager", "compiled by inductor": "inductor"}.get(how)
    # after three shapes that it cannot generalize over, torch runs the function as it
    # is
    if backend:
        head += "import torch._dynamo\ntorch._dynamo.config.recompile_limit = 3\n"
        head += f"quick = torch.compile(whole, dynamic=True, backend={backend!r})\n"
    return f"{s.replace('def loss(', 'def whole(')}\n{head}def loss({', '.join(names)}):\n    given = dict({given})\n{body}\n"


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
    for n in sorted(range(total), key=lambda n: n < total - compiled):
        rng = np.random.default_rng([seed, 7, n])
        c, style = places[(n * 37) % len(places)]
        if only is not None and c not in only:
            continue
        source, said = inside(write(c, style), int(rng.integers(1, 7)), rng)
        one = Subject(c, style, "", "", source)
        ways = [
            w
            for w in AROUND
            if not w.startswith("compiled")
            and not (w == "chunks of rows" and (c.o.batch_coupled or style == "groups"))
        ]
        ways = [
            w
            for w in ways
            if not (style == "trl" and w == "columns dropped that nobody uses")
        ]
        if n >= total - compiled:
            own = n >= total - min(INDUCTOR, compiled) and shutil.which("g++")
            ways = ["compiled by inductor" if own else "compiled"]
        if len(ways) == 1 or rng.random() < 0.6:
            way = ways[rng.integers(len(ways))]
            source, said = around(source, one.names, way, c), [*said, way]
        start = "import math\nimport torch\n"
        yield Subject(
            c,
            style,
            "rewriting",
            ", ".join(said),
            start + PRELUDE + source.removeprefix(start),
            FLOAT32 in said,
        )
