# SPDX-License-Identifier: Apache-2.0
"""The formula of an objective as source that can be edited, compiled and printed: its
function, those that it calls, its sampler's correction and its KL term.
"""

import ast
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from upref import kl, ops
from upref.ops import mean_t, sum_t
from upref.registry import REDUCE, Objective
from upref.rollouts import per_response

ENTRY = "J"  # the function that puts the parts together
OWN_MODULES = ("upref.objectives.", "upref.transforms", "upref.kl", "__main__")
BASE = "base_fn"  # what `base.fn` of a transform is called in the formula
INPUTS = ("lp", "lp_old", "A", "mask", "lp_ref", "lp_sampler", "entropy", "group")
OF_SAMPLER = ("lp_old - lp_sampler", "mask", "lp_sampler")  # as corrections take them


def call(name: str, *arguments: ast.expr) -> ast.Call:
    """Return the syntax tree of the call of a function of the formula."""
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def variable(name: str) -> ast.Name:
    """Return the syntax tree of a variable that is read."""
    return ast.Name(name, ast.Load())


def copied(node: ast.expr) -> ast.expr:
    """Return a deep copy of a node, by its source."""
    return ast.parse(ast.unparse(ast.fix_missing_locations(node)), mode="eval").body


# ---- words of the formula that no objective has ----------------------------------------
def rounded(x: Any, dtype: torch.dtype) -> Any:
    """Return x, rounded to a number format, in float64; its gradient is rounded too. What
    is no tensor stays as it is.
    """
    return x.to(dtype).to(torch.float64) if isinstance(x, Tensor) else x


def in_format(x: Any, dtype: torch.dtype) -> Any:
    """Return x in a number format, in which what follows is computed. What is no tensor of
    floats stays as it is.
    """
    is_number = isinstance(x, Tensor) and x.is_floating_point()
    return x.to(dtype) if is_number else x


def mean_over_width(x: Any, mask: Any) -> Any:
    """Return the sum over the tokens of each response, divided by the width."""
    return sum_t(x, mask) / mask.shape[-1]


def over_tokens(x: Any, mask: Any) -> Any:
    """Return the mean over the tokens of the batch, on each token."""
    return (torch.where(mask, x, 0).sum() / mask.sum()).expand_as(mask)


def over_response(x: Any, mask: Any) -> Any:
    """Return the mean over the tokens of each response, on each of them."""
    return mean_t(x, mask)[:, None].expand_as(mask)


def over_column(x: Any, mask: Any) -> Any:
    """Return the mean over the rows of each column, masked slots counted as 0."""
    return torch.where(mask, x, 0).mean(0, keepdim=True).expand_as(mask)


def all_over_kept(kept: Any, mask: Any) -> Any:
    """Return the tokens of the batch over those of them that are kept."""
    return mask.sum().double() / (kept & mask).sum().clamp(min=1)


def own_over_kept(kept: Any, mask: Any) -> Any:
    """Return the tokens of each response over those of them that are kept, [B, 1]."""
    own = (kept & mask).sum(-1, keepdim=True).clamp(min=1)
    return mask.sum(-1, keepdim=True).double() / own


ADDED = {
    f.__name__: f
    for f in (
        rounded,
        in_format,
        mean_over_width,
        over_tokens,
        over_response,
        over_column,
        all_over_kept,
        own_over_kept,
        per_response,
    )
}
FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


# ---- the formula -------------------------------------------------------------------------
@dataclass(frozen=True)
class Formula:
    """An objective as source.

    Attributes:
        objective: the objective.
        hp: its hyperparameters.
        functions: their syntax trees, by the names by which they call each other; J puts
            the parts together.
        names: what else they call.
    """

    objective: Objective
    hp: dict[str, Any]
    functions: dict[str, ast.FunctionDef]
    names: dict[str, Any]

    def compiled(self) -> Callable[..., Tensor]:
        """Compile the formula as it is now: its trees are shared, and an edit changes them
        in place.

        Returns:
            J of INPUTS: terms [B, T], or [B].

        Raises:
            SyntaxError, ValueError or TypeError: an edit has made no program of it.
        """
        module = ast.Module(list(self.functions.values()), [])
        ast.fix_missing_locations(module)
        names = dict(self.names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an edit may index a number
            exec(compile(module, "<formula>", "exec"), names)
        J: Callable[..., Tensor] = names[ENTRY]
        return J


def formula_of(objective: Objective, hp: dict[str, Any]) -> Formula | None:
    """Read the formula of an objective at these hyperparameters, which stand in it as
    numbers. The KL term is part of it where J has a term for each token.

    Args:
        objective: the objective.
        hp: resolved hyperparameters.

    Returns:
        The formula, or None where a part of it has no source.
    """
    functions: dict[str, ast.FunctionDef] = {}
    names: dict[str, Any] = vars(ops) | ADDED | FORMATS
    beta = hp.get("beta") or 0.0
    reduce = REDUCE.get(objective.level)
    has_terms_of_responses = objective.agg == "seq-mean" or reduce is not None
    policies, A = "lp, lp_old", "A"
    if reduce:
        reducer = reduce.__name__
        policies = f"{reducer}(lp, mask), {reducer}(lp_old, mask)"
        A = "per_response(A, mask)"
    elif objective.agg == "seq-mean":
        A = "per_response(A, mask)[:, None]"
    try:
        # the objective's own function
        term = _read(objective.fn, functions, names, hp)
        own = inspect.signature(objective.fn).parameters
        more = [f"{x}={x}" for x in ("mask", "entropy", "group") if x in own]
        J = f"{term}({', '.join([policies, A, *more])})"
        # times the weights of its sampler's correction, as many arguments as that takes
        if objective.sampler is not None:
            w = _read(objective.sampler, functions, names, hp)
            arguments = inspect.signature(objective.sampler).parameters.values()
            count = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in arguments)
            w += f"({', '.join(OF_SAMPLER[:count])})"
            J = f"mean_t({w}, mask) * {J}" if has_terms_of_responses else f"{w} * {J}"
        # less beta times the KL term
        if beta and not has_terms_of_responses:
            estimator = (kl.ESTIMATORS | kl.WITH_RATIO)[objective.kl]
            k = _read(estimator, functions, names, hp)
            J += f" - {beta!r} * {k}({', '.join(inspect.signature(estimator).parameters)})"
    except (OSError, TypeError, SyntaxError, KeyError, ValueError):
        return None
    entry = ast.parse(f"def {ENTRY}({', '.join(INPUTS)}):\n    return {J}").body[0]
    assert isinstance(entry, ast.FunctionDef)
    functions[ENTRY] = entry
    return Formula(objective, hp, functions, names)


def _read(
    function: Any,
    functions: dict[str, ast.FunctionDef],
    names: dict[str, Any],
    hp: dict[str, Any],
) -> str:
    """Add a function, and those of upref that it calls, to the formula.

    Args:
        function: the function.
        functions, names: those of the formula; what is found is added in place.
        hp: numbers that replace its keyword-only arguments.

    Returns:
        What it is called there: its own name, or "term" for `fn`; with "_of_base" behind
        it where another function has that name.

    Raises:
        OSError, TypeError or SyntaxError: it has no source of a plain function.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError
    name = tree.name if tree.name not in ("fn", ENTRY) else "term"
    while name in functions:
        name += "_of_base"
    tree.name = name
    tree.decorator_list = []
    tree.returns = None
    functions[name] = tree
    # a hyperparameter becomes a number, in the body and as a default
    numbers = {}
    parameters = zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True)
    for number, (parameter, _) in enumerate(parameters):
        if parameter.arg in hp:
            numbers[parameter.arg] = ast.Constant(hp[parameter.arg])
            tree.args.kw_defaults[number] = ast.Constant(hp[parameter.arg])
    seen = inspect.getclosurevars(function)
    known = {**seen.globals, **seen.nonlocals}
    # a transform calls `base.fn`: the function of its base is read too
    base = known.get("base")
    if isinstance(base, Objective):
        names[BASE] = None
        names["base"] = base
        called = _read(base.fn, functions, names, hp)
        _Renamed(called).visit(tree)
        known.pop("base")
    tree.body = [_Numbers(numbers).visit(x) for x in tree.body if not _is_docstring(x)]
    # functions of upref become a part of the formula; anything else is called as it is
    for key, value in known.items():
        is_own = isinstance(value, FunctionType) and value.__module__.startswith(
            OWN_MODULES
        )
        if is_own and value.__name__ == key and value.__module__ != "upref.ops":
            if key not in functions:
                _read(value, functions, names, {})
        elif key not in names:
            names[key] = value
    return name


def _is_docstring(x: ast.stmt) -> bool:
    """Return whether a statement is a string alone."""
    return (
        isinstance(x, ast.Expr)
        and isinstance(x.value, ast.Constant)
        and isinstance(x.value.value, str)
    )


class _Renamed(ast.NodeTransformer):
    """Write the name of a function for `base.fn`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace `base.fn`; any other attribute stays."""
        self.generic_visit(node)
        is_base = isinstance(node.value, ast.Name) and node.value.id == "base"
        if is_base and node.attr == "fn":
            return ast.Name(self.name, ast.Load())
        return node


class _Numbers(ast.NodeTransformer):
    """Write numbers for hyperparameters, and what they decide."""

    def __init__(self, numbers: dict[str, ast.Constant]) -> None:
        self.numbers = numbers

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a hyperparameter that is read by its number."""
        if isinstance(node.ctx, ast.Load) and node.id in self.numbers:
            return ast.Constant(self.numbers[node.id].value)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """Replace a choice by whether a number is None by the branch that is taken."""
        self.generic_visit(node)
        match node.test:
            case ast.Compare(
                left=ast.Constant(value=x),
                ops=[ast.Is()],
                comparators=[ast.Constant(value=None)],
            ):
                return node.body if x is None else node.orelse
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace a dual clip without a bound by its ratio."""
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Name(id="dual_clip"), args=[r, _, ast.Constant(value=None)]
            ):
                return r
        return node


# ---- a formula for a reader ----------------------------------------------------------
LETTERS = {
    "minimum": "min",
    "maximum": "max",
    "sg": "detach",
    "mean_t": "mean_over_response",
    "over_response": "mean_over_response",
    "sum_t": "sum_over_response",
    "over_tokens": "mean_over_batch",
    "over_column": "mean_over_column",
    "lp": "log_prob",
    "lp_old": "old_log_prob",
    "lp_ref": "ref_log_prob",
    "lp_sampler": "rollout_log_probs",
}


class _Folded(ast.NodeTransformer):
    """Compute what is made of numbers alone, and write a reader's names."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Compute an operation on two numbers, and keep one that has no value."""
        self.generic_visit(node)
        match node:
            case ast.BinOp(left=ast.Constant(), right=ast.Constant()):
                try:
                    number = eval(ast.unparse(node))
                    return ast.Constant(float(f"{number:.6g}"))
                except (ArithmeticError, TypeError, ValueError):
                    return node  # such as 1 / 0: it is printed as it is
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Write a reader's name, where LETTERS has one."""
        return ast.Name(LETTERS.get(node.id, node.id), node.ctx)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Round a finite float to six digits."""
        if isinstance(node.value, float) and math.isfinite(node.value):
            return ast.Constant(float(f"{node.value:.6g}"))
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Write a call as a reader would: a mean without its mask, a rounding as `.to`."""
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="per_response"), args=[A, _]):
                return A
            case ast.Call(func=ast.Attribute(value=x, attr="expand_as")):
                return x
            # the mask of a mean is not said
            case ast.Call(func=ast.Name(id=name), args=[x, ast.Name(id="mask")]):
                return call(name, x)
            case ast.Call(func=ast.Name(id="rounded"), args=[x, _]) if any(
                isinstance(part, ast.Attribute) and part.attr == "to"
                for part in ast.walk(x)
            ):
                return x  # it is computed in the format already
            case ast.Call(
                func=ast.Name(id="rounded" | "in_format"), args=[x, number_format]
            ):
                to = ast.Attribute(x, "to", ast.Load())
                return ast.Call(to, [number_format], [])
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Leave out a new axis, as of x[:, None]."""
        self.generic_visit(node)
        is_new_axis = "None" in ast.unparse(node.slice)
        return node.value if is_new_axis else node


def in_letters(node: ast.AST) -> str:
    """Write a part of a formula for a reader.

    Args:
        node: an expression of a formula.

    Returns:
        One line.
    """
    copy = ast.parse(ast.unparse(ast.fix_missing_locations(node))).body[0]
    text = ast.unparse(_Folded().visit(copy))
    return " ".join(text.removeprefix("return ").split()).replace("1e309", "inf")
