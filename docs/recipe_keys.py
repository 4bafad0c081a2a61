# SPDX-License-Identifier: Apache-2.0
"""The keys that recipes set, as each framework's source declares them:
`python -m docs.recipe_keys NAME...` reads the audited version of these frameworks, or
of all, and writes docs/recipe_keys.json.

Where a key is declared stands in the ledger, `schema` of [recipe]: by the beginning of
the key, the file and in it a class, a function, or `options` for the options of a
command line. Nothing of a framework is run.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from docs import record
from upref.errors import InputError
from upref_frameworks import names as frameworks
from upref_frameworks.audits import framework
from upref_frameworks.audits.isolated.pin import place
from upref_frameworks.audits.recipe import covered_objectives, recipe, typed_fields
from upref_frameworks.ledger import read_tables

FILE = Path(__file__).parent / "recipe_keys.json"


def lines_of(name: str) -> list[str]:
    """Return every line that a recipe for this framework sets, those for the advantages
    included.

    Args:
        name: a framework with an audit.
    """
    lines = []
    for objective in covered_objectives(name, {}):
        lines += recipe(objective, name).settings
    for estimator in read_tables(name)["recipe"]["advantages"].values():
        lines.append(estimator["set"])
    return lines


def keys_of(name: str) -> dict[str, dict[str, str]]:
    """Return where each key of the recipes is declared in the framework's source, its
    type and its default.

    Args:
        name: a framework with a pin.

    Returns:
        By key: at (PATH#LNUMBER), type and default, as the source writes them; empty
            where it gives none.

    Raises:
        InputError: a key is declared nowhere that the ledger names.
    """
    pin = framework(name).pin
    assert pin is not None
    root = Path(place(name, pin).paths[0])
    if pin.repository and pin.root:  # paths are those of the repository
        root = root.parents[pin.root.count("/")]
    schema = read_tables(name)["recipe"]["schema"]
    keys = {key for line in lines_of(name) for key, _ in typed_fields(line)}
    return {key: _declaration(name, root, schema, key) for key in sorted(keys)}


def _declaration(
    name: str, root: Path, schema: dict[str, str | list[str]], key: str
) -> dict[str, str]:
    """Return where a key is declared, its type and its default.

    Args:
        name: of the framework.
        root: of its sources.
        schema: the beginning of a key -> where keys with it are declared.
        key: of a recipe.

    Raises:
        InputError: it is declared nowhere that the ledger names.
    """
    beginnings = [beginning for beginning in schema if key.startswith(beginning)]
    if not beginnings:
        raise InputError(f"{name}: `schema` of [recipe] says nothing of {key!r}.")
    longest = max(beginnings, key=len)
    owners = schema[longest]
    if isinstance(owners, str):
        owners = [owners]
    declared: list[dict[str, str]] = []
    for owner in owners:
        declared += _declared(root, owner, key.removeprefix(longest))
    if not declared:
        raise InputError(f"{name}: {key!r} is declared in none of {', '.join(owners)}.")
    return declared[0] | {"type": _type_of_union(declared)}


def _type_of_union(declared: list[dict[str, str]]) -> str:
    """Return the first declaration's type; but every literal where all are literals, as
    those of a key that distinguishes the members of a union.
    """
    types = list(dict.fromkeys(declaration["type"] for declaration in declared))
    if all(type_.startswith("Literal[") for type_ in types):
        return " | ".join(types)
    return types[0]


def _declared(root: Path, where: str, key: str) -> Iterator[dict[str, str]]:
    """Yield the declarations of a key in a class, in a function or among the options of
    a command line: at (PATH#LNUMBER), type and default.

    Args:
        root: of the sources.
        where: a file below it, a space, and a class, a function or "options".
        key: without its beginning.
    """
    path, _, owner = where.partition(" ")
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    if owner == "options":
        declarations = _options(tree, key)
    else:
        declarations = _fields(tree, owner, key)
    for line, type_, default in declarations:
        yield {"at": f"{path}#L{line}", "type": type_, "default": default}


Declaration = tuple[int, str, str]  # line, type and default


def _options(tree: ast.Module, key: str) -> Iterator[Declaration]:
    """Yield the calls that declare an option of a command line, `--KEY`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if f"--{key}" in given:
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            yield node.lineno, _type_of_option(keywords), keywords.get("default", "")


def _type_of_option(keywords: dict[str | None, str]) -> str:
    """Return the type of an option, from the keywords of the call that declares it: its
    choices, its type, "bool" for a flag, or "str".
    """
    if "choices" in keywords:
        return f"Literal{keywords['choices']}"
    if "type" in keywords:
        return keywords["type"]
    return "bool" if "store_" in keywords.get("action", "") else "str"


def _fields(tree: ast.Module, owner: str, key: str) -> Iterator[Declaration]:
    """Yield the fields of a class, or the arguments of a function or a constructor, of
    this name.

    Args:
        tree: of the file.
        owner: CLASS, FUNCTION, or CLASS.METHOD.
        key: the name.
    """
    outer, _, inner = owner.partition(".")
    for node in _definitions(ast.walk(tree), outer):
        for definition in _definitions(node.body, inner) if inner else [node]:
            if isinstance(definition, ast.ClassDef):
                yield from _of_class(definition, key)
            else:
                yield from _of_function(definition, key)


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(nodes: Iterable[ast.AST], name: str) -> Iterator[Definition]:
    """Yield the classes and functions of this name among the nodes."""
    for node in nodes:
        if isinstance(node, Definition) and node.name == name:
            yield node


def _of_class(node: ast.ClassDef, key: str) -> Iterator[Declaration]:
    """Yield the annotated field of a class that has this name."""
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign):
            continue
        target = statement.target
        if isinstance(target, ast.Name) and target.id == key:
            type_ = ast.unparse(statement.annotation)
            yield statement.lineno, type_, _default(statement.value)


def _default(value: ast.expr | None) -> str:
    """Return a default as the source writes it, "" for None. Of a call it is the
    `default` or the first argument, as in field(default=...), or else the call.
    """
    if isinstance(value, ast.Call):
        by_name = [k.value for k in value.keywords if k.arg == "default"]
        value = [*by_name, *value.args, value][0]
    return "" if value is None else ast.unparse(value)


def _of_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, key: str
) -> Iterator[Declaration]:
    """Yield the argument of a function that has this name."""
    positional, named = node.args.args, node.args.kwonlyargs
    required = len(positional) - len(node.args.defaults)
    defaults = [None] * required + node.args.defaults + node.args.kw_defaults
    for argument, default in zip([*positional, *named], defaults, strict=True):
        if argument.arg == key:
            annotation = argument.annotation
            type_ = ast.unparse(annotation) if annotation else ""
            yield argument.lineno, type_, _default(default)


def main(*names: str) -> None:
    """Read the sources of these frameworks, or of all that have a schema, and write
    their keys.
    """
    with_schema = [n for n in frameworks() if "schema" in read_tables(n)["recipe"]]
    for name in names or with_schema:
        pin = framework(name).pin
        assert pin is not None
        keys = keys_of(name)
        row = {"version": pin.version, "keys": keys}
        record.add(FILE, f"python -m docs.recipe_keys {name}", {name: row})
        print(name, len(keys))


if __name__ == "__main__":
    main(*sys.argv[1:])
