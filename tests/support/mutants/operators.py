# SPDX-License-Identifier: Apache-2.0
"""One slip in a module's source: for every node of its syntax tree all that a hand may
have written there instead.

Nothing here knows an objective: names of variables are the ones of styles.py, the rest
is Python and torch.
"""

import ast
from dataclasses import dataclass

import numpy as np

from .slips import swaps, text
from .words import parsed

KINDS = ("sign", "side", "bound", "order", "detach", "mask", "denominator", "reduction", "dtype", "index", "off by one",
         "constant", "dropped", "advantage", "function", "clamp", "names", "branch", "scale")  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A module with one slip. kind: one of KINDS. what: "old -> new". text: the
    module's source.
    """

    kind: str
    what: str
    text: str

    @property
    def single(self) -> bool:
        """Return whether it computes in float32 in part, which is a habit and not a
        slip.
        """
        return ".float().double()" in self.what.partition(" -> ")[2]


def _walk(tree: ast.AST) -> list[tuple[ast.AST, str, int | None, ast.AST, bool]]:
    """Return (parent, field, position in the field's list or None, node, whether it is
    an index or a dimension) of every node, outermost first.

    Targets of an assignment and parameters are left out.
    """
    out = []

    def go(node: ast.AST, index: bool):
        """Add the node's children to `out`, each before its own. index: the node is
        inside an index or a dimension already.
        """
        defines = isinstance(node, ast.Assign | ast.FunctionDef | ast.Lambda)
        for field, value in ast.iter_fields(node):
            if defines and field in ("targets", "args"):
                continue
            is_index = index or field == "slice" or _holds_dimension(node, field)
            children = enumerate(value) if isinstance(value, list) else [(None, value)]
            for i, child in children:
                if isinstance(child, ast.AST):
                    out.append((node, field, i, child, is_index))
                    go(child, is_index)

    go(tree, False)
    return out


def _holds_dimension(node: ast.AST, field: str) -> bool:
    """Return whether the field is the arguments of a method that takes a dimension."""
    if not isinstance(node, ast.Call) or field != "args":
        return False
    takes_one = ("sum", "mean", "cumsum", "gather", "argmax", "index_add")
    return isinstance(node.func, ast.Attribute) and node.func.attr in takes_one


def sites(source: str) -> tuple[ast.Module, list[tuple[str, str, tuple]]]:
    """Return the tree, and (kind, "old -> new", where and how) of every slip; `put`
    turns the last into a text.
    """
    tree = ast.parse(source)
    out = []
    for parent, field, i, node, index in _walk(tree):
        if not isinstance(node, ast.expr):
            continue
        for kind, new in swaps(node, index):
            out.append((kind, f"{text(node)} -> {new}", (parent, field, i, new)))
    return tree, out


def put(tree: ast.Module, parent: ast.AST, field: str, i: int | None, new: str) -> str:
    """Return the module's text with `new` in place of one node, or "" if `new` is no
    Python. The tree is as before afterwards.
    """
    try:
        fresh = parsed(new)
    except SyntaxError:
        return ""
    kept = getattr(parent, field)
    changed = fresh if i is None else [*kept[:i], fresh, *kept[i + 1 :]]
    setattr(parent, field, changed)
    mutated = ast.unparse(tree)
    setattr(parent, field, kept)
    return mutated


def sample(
    source: str, n: int, rng: np.random.Generator, allowed=lambda m: True
) -> list[Mutant]:
    """Return up to n mutants with one slip each, drawn kind by kind so that each kind
    has the same chance.

    No text occurs twice, and none is the original. A mutant that `allowed` refuses is
    left out. There are fewer than n when the slips run out.
    """
    tree, every = sites(source)
    by_kind: dict[str, list] = {}
    for kind, what, where in every:
        by_kind.setdefault(kind, []).append((kind, what, where))
    pools = []
    for _, slips in sorted(by_kind.items()):
        pools.append([slips[i] for i in rng.permutation(len(slips))])
    drawn: dict[str, Mutant] = {}  # by text
    while len(drawn) < n and any(pools):
        for i in rng.permutation(len(pools)):
            if not pools[i] or len(drawn) >= n:
                continue
            kind, what, where = pools[i].pop()
            mutant = Mutant(kind, what, put(tree, *where))
            if mutant.text not in ("", source) and allowed(mutant):
                drawn.setdefault(mutant.text, mutant)
    return list(drawn.values())
