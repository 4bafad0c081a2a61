# SPDX-License-Identifier: Apache-2.0
"""What the files of the folder `objectives` have of each objective, read without running
them.

To run one imports torch, which takes seconds: the command lists and describes
objectives before that. A test holds each description against the registered objective.
"""

import ast
import hashlib
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from upref.errors import InputError

LEVELS = {
    "token": "acts on each token separately: lp, lp_old, A are [B, T]",
    "sequence_mean": "acts on mean_t lp, the log of a response's geometric-mean probability: lp, lp_old, A are [B]",
    "sequence_product": "acts on sum_t lp, the log-probability of a whole response: lp, lp_old, A are [B]",
    "custom": "couples tokens in a custom way: lp, lp_old, A are [B, T], with the mask",
}
# of the ratio on which an objective of the level acts: of a token, the geometric mean of
# a response's, or their product
RATIO_SYMBOLS = {
    "token": "r",
    "sequence_mean": "s",
    "sequence_product": "S",
    "custom": "r",
}
RATIOS_OF_RESPONSES = {
    "s": "the geometric mean of r over the tokens of a response",
    "S": "the product of r over the tokens of a response",
}
ERRORS = """Log-probabilities in nats, J and weights in units of the advantage. Raises InputError on log-probabilities
that are positive, non-finite or of another shape, on a mask that is not boolean, on a response without a token, and on
hyperparameters that it does not have or that are out of range."""
NO_DUAL_CLIP = (  # where the default c=None comes from
    "None: the formula has no dual clip (ye2020mastering). fan2026up App. B has one and gives no value; verl sets 3, "
    "DAPO's code 10"
)
FOLDER = Path(__file__).parent / "objectives"
CAPACITIES = Path(__file__).parent / "capacities.toml"
IMPORTED = {"NO_DUAL_CLIP": NO_DUAL_CLIP}  # what a file has from upref.definition


class Unreadable(Exception):
    """A file has to be run before this is known of it."""


@dataclass(frozen=True)
class Description:
    """An objective in words: the facts of its paper, and the text of its two functions.

    Its fields are those of `upref.definition.Objective` of the same names.
    """

    name: str
    equation: str
    paper: str
    eq: str
    level: str
    agg: str
    adv: str
    hyperparameters: dict[str, Any]  # name -> default
    function: str  # source, without its decorator
    weight: str  # the same of the closed form
    kl: str = ""
    defaults: dict[str, str] = field(default_factory=dict)
    note: str = ""
    not_symbolic: str = ""
    on_policy_exception: str = ""
    scale_exception: str = ""
    known_from: str = ""
    batch_coupled: str = ""
    is_up: bool = False

    @property
    def source(self) -> str:
        """The key of its paper and the place there."""
        return citation(self.paper, self.eq)


def citation(paper: str, eq: str) -> str:
    """Return the key of a paper and a place in it, or that it is unpublished.

    Args:
        paper: a key of papers.bib, or "".
        eq: an equation or section, or "".
    """
    return ", ".join(filter(None, (paper, eq))) or "unpublished"


@dataclass(frozen=True)
class Written:
    """How a file writes one objective: a function below `@objective(...)`."""

    file: Path
    function: ast.FunctionDef
    facts: dict[str, ast.expr]  # the arguments of `objective`
    constants: dict[str, ast.expr]  # of the file


@cache
def written() -> dict[str, Written]:
    """Return how each objective of the folder is written, by its name."""
    found = {}
    for path in FOLDER.glob("*.py"):
        tree = syntax_tree(path)
        constants = dict(_constants(tree))
        for function in _functions(tree):
            for call in (d for d in function.decorator_list if isinstance(d, ast.Call)):
                if ast.unparse(call.func) == "objective":
                    facts = dict(_arguments(call, constants))
                    found[function.name] = Written(path, function, facts, constants)
    return found


def fact(objective: Written, name: str) -> Any:
    """Return a fact that the decorator states; "" where it states none.

    Args:
        objective: how it is written.
        name: of the fact.

    Raises:
        Unreadable: its value is not written as text.
    """
    facts = objective.facts
    return _value(facts[name], objective.constants) if name in facts else ""


def describe(name: str) -> Description | None:
    """Return the description of an objective of the folder.

    Args:
        name: of the objective.

    Returns:
        None where there is no such objective, or its file has to be run to know it.
    """
    objective = written().get(name)
    if objective is None:
        return None
    try:
        facts = {key: fact(objective, key) for key in objective.facts}
        defaults = _defaults(objective) | ({"beta": 0.0} if facts.get("kl") else {})
        return Description(
            name,
            ast.get_docstring(objective.function) or "",
            hyperparameters=defaults,
            function=_text(objective.function, objective.file),
            weight=_text(_weight(objective), objective.file),
            **{"paper": "", "eq": ""} | facts,
        )
    except (Unreadable, TypeError):  # TypeError: a fact that has no words, as a sampler
        return None


def capacity_text(name: str) -> str:
    """Return the table of Probability Capacity of an objective of the folder, as
    `upref show` prints it.

    Args:
        name: of the objective.

    Returns:
        "" where it is not known of the file as it is now.
    """
    known = tomllib.loads(CAPACITIES.read_text(encoding="utf-8")).get(name, {})
    objective = written().get(name)
    if objective is None or known.get("of") != digest(objective.file):
        return ""
    return str(known["text"]).strip("\n")


def digest(file: Path) -> str:
    """Return what tells one content of a file from another.

    Args:
        file: of an objective.
    """
    text = file.read_text(encoding="utf-8")  # whatever ends its lines
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def names_of(module: str, table: str) -> list[str]:
    """Return the names in a table of a module of upref, without running the module.

    Args:
        module: such as `kl`.
        table: a tuple of text, a dictionary with keys of text, or
            `{f.__name__: f for f in (...)}`.
    """
    constants = dict(_constants(syntax_tree(FOLDER.parent / f"{module}.py")))
    match constants[table]:
        case ast.DictComp(generators=[ast.comprehension(iter=ast.Tuple(elts=found))]):
            return [ast.unparse(name) for name in found]
        case ast.Dict(keys=found):
            return [ast.literal_eval(name) for name in found if name is not None]
        case found:
            return list(ast.literal_eval(found))


# ---- a file's syntax tree ------------------------------------------------------------
@cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the tree of a file, read once.

    Args:
        path: of the file.

    Raises:
        InputError: it is no Python.
    """
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise InputError(
            f"{path}, line {error.lineno}: SyntaxError: {error.msg}. Every command reads "
            "this folder: fix the file, or move it elsewhere."
        ) from error


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Return the functions at the top level of a file."""
    return (node for node in tree.body if isinstance(node, ast.FunctionDef))


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of the assignments at the top level of a file."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            yield ast.unparse(target), node.value


def _defaults(objective: Written) -> dict[str, Any]:
    """Return the defaults of the arguments that can be passed by name alone."""
    arguments = objective.function.args
    arguments_and_defaults = zip(
        arguments.kwonlyargs, arguments.kw_defaults, strict=True
    )
    return {
        argument.arg: _value(default, objective.constants)
        for argument, default in arguments_and_defaults
        if default is not None
    }


def _weight(objective: Written) -> ast.FunctionDef:
    """Return the function of the weight: it stands below `@NAME.with_weight`, or in
    `NAME.with_weight(FUNCTION)`; FUNCTION may be `OTHER.closed_form`, the weight of
    another objective.

    Raises:
        Unreadable: it stands elsewhere.
    """
    tree = syntax_tree(objective.file)
    name = objective.function.name
    functions = {f.name: f for f in _functions(tree)}
    for function in functions.values():
        if f"{name}.with_weight" in map(ast.unparse, function.decorator_list):
            return function
    for node in tree.body:
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call):
            continue
        if ast.unparse(call.func) != f"{name}.with_weight":
            continue
        given = ast.unparse(call.args[0])
        other = given.removesuffix(".closed_form")
        if other not in (given, name) and other in written():
            return _weight(written()[other])
        if given in functions:
            return functions[given]
    raise Unreadable(name)


def _text(function: ast.FunctionDef, file: Path) -> str:
    """Return the source of a function without its decorators."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return textwrap.dedent("\n".join(lines[function.lineno - 1 : function.end_lineno]))


def _arguments(
    call: ast.Call, constants: dict[str, ast.expr]
) -> Iterator[tuple[str, ast.expr]]:
    """Yield the keyword arguments of a call, and those of `**NAME` too, where NAME is a
    dict of the same file.
    """
    for keyword in call.keywords:
        if keyword.arg is None:
            yield from _items(keyword.value, constants)
        else:
            yield keyword.arg, keyword.value


def _items(
    shared: ast.expr, constants: dict[str, ast.expr]
) -> Iterator[tuple[str, ast.expr]]:
    """Yield the items of a dict, which is written as a literal, as `dict(...)`, as a union
    of two, or as the name of one.
    """
    if isinstance(shared, ast.Name):
        yield from _items(constants[shared.id], constants)
    elif isinstance(shared, ast.Call):
        yield from _arguments(shared, constants)
    elif isinstance(shared, ast.BinOp):
        yield from _items(shared.left, constants)
        yield from _items(shared.right, constants)
    elif isinstance(shared, ast.Dict):
        for key, value in zip(shared.keys, shared.values, strict=True):
            if key is None:
                yield from _items(value, constants)
            else:
                yield ast.literal_eval(key), value


def _value(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    """Return the value of an expression of text, numbers and names of these.

    Args:
        node: the expression.
        constants: what names of the file stand for.

    Raises:
        Unreadable: it has another operation or another name.
    """
    match node:
        case ast.Name(id=name) if name in constants:
            return _value(constants[name], constants)
        case ast.Name(id=name) if name in IMPORTED:
            return IMPORTED[name]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, constants) + _value(right, constants)
        case ast.Dict() | ast.BinOp(op=ast.BitOr()):
            items = _items(node, constants)
            return {key: _value(value, constants) for key, value in items}
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise Unreadable(ast.unparse(node)) from error
