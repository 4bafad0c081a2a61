# SPDX-License-Identifier: Apache-2.0
"""The keys that recipes set, as each framework's source declares them:
`python -m docs.recipe_keys NAME...` reads the audited version of these frameworks, or
of all, and writes docs/recipe_keys.json.

Where a key is declared stands in the ledger, `schema` of [recipe]: by the beginning of
the key, the file and in it a class, a function, or `options` for the options of a
command line. Nothing of a framework is run.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upref.errors import InputError
from upref.files import write_atomically
from upref_frameworks.audits import framework, frameworks
from upref_frameworks.audits.isolated.pin import place
from upref_frameworks.audits.recipe import covered_objectives, recipe, typed_fields
from upref_frameworks.ledger import read_tables

FILE = Path(__file__).parent / "recipe_keys.json"


def recorded_keys() -> dict[str, Any]:
    """Return what was committed: by framework its version and, by key, where it is
    declared, its type and default.
    """
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def lines_of(name: str) -> list[str]:
    """Return every line that a recipe for this framework sets, those for the advantages
    included.

    Args:
        name: a framework with an audit.
    """
    advantages = [
        how["set"] for how in read_tables(name)["recipe"]["advantages"].values()
    ]
    return [
        line for o in covered_objectives(name, {}) for line in recipe(o, name).settings
    ] + advantages


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
    root, schema = (
        Path(place(name, pin).paths[0]),
        read_tables(name)["recipe"]["schema"],
    )
    if pin.repository and pin.root:  # paths are those of the repository
        root = root.parents[pin.root.count("/")]
    found = {}
    for key in sorted({k for line in lines_of(name) for k, _ in typed_fields(line)}):
        begin = max((b for b in schema if key.startswith(b)), key=len, default=None)
        if begin is None:
            raise InputError(f"{name}: `schema` of [recipe] says nothing of {key!r}.")
        owners = [schema[begin]] if isinstance(schema[begin], str) else schema[begin]
        declared = [
            d
            for owner in owners
            for d in _declared(root, owner, key.removeprefix(begin))
        ]
        if not declared:
            raise InputError(
                f"{name}: {key!r} is declared in none of {', '.join(owners)}."
            )
        found[key] = declared[0] | {"type": _type_of_union(declared)}
    return found


def _type_of_union(declared: list[dict[str, str]]) -> str:
    """The first declaration's type; of a key that tells the members of a union apart,
    every literal.
    """
    kinds = list(dict.fromkeys(d["type"] for d in declared))
    return (
        " | ".join(kinds)
        if all(kind.startswith("Literal[") for kind in kinds)
        else kinds[0]
    )


def _declared(root: Path, where: str, key: str) -> Iterator[dict[str, str]]:
    """The declarations of a key in a class, in a function or among the options of a
    command line.
    """
    path, _, owner = where.partition(" ")
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    for line, kind, default in (
        _options(tree, key) if owner == "options" else _fields(tree, owner, key)
    ):
        yield {"at": f"{path}#L{line}", "type": kind, "default": default}


def _options(tree: ast.Module, key: str) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(
            isinstance(a, ast.Constant) and a.value == f"--{key}" for a in node.args
        ):
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            choices = f"Literal{given['choices']}" if "choices" in given else ""
            kind = choices or given.get(
                "type", "bool" if "store_" in given.get("action", "") else "str"
            )
            yield node.lineno, kind, given.get("default", "")


def _fields(tree: ast.Module, owner: str, key: str) -> Iterator[tuple[int, str, str]]:
    """Fields of a class, and arguments of a function or a constructor."""
    outer, _, inner = owner.partition(".")
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for top in (n for n in ast.walk(tree) if isinstance(n, kinds) and n.name == outer):
        nodes = (
            [n for n in top.body if isinstance(n, kinds) and n.name == inner]
            if inner
            else [top]
        )
        for node in nodes:
            yield from (
                _of_class(node, key)
                if isinstance(node, ast.ClassDef)
                else _of_function(node, key)
            )


def _of_class(node: ast.ClassDef, key: str) -> Iterator[tuple[int, str, str]]:
    for x in node.body:
        if (
            isinstance(x, ast.AnnAssign)
            and isinstance(x.target, ast.Name)
            and x.target.id == key
        ):
            yield x.lineno, ast.unparse(x.annotation), _default(x.value)


def _default(value: ast.expr | None) -> str:
    """A default as the source writes it, out of field(default=...)."""
    if isinstance(value, ast.Call):
        keyword = next((k.value for k in value.keywords if k.arg == "default"), None)
        value = keyword or (value.args[0] if value.args else value)
    return "" if value is None else ast.unparse(value)


def _of_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, key: str
) -> Iterator[tuple[int, str, str]]:
    positional, named = node.args.args, node.args.kwonlyargs
    defaults = [None] * (len(positional) - len(node.args.defaults)) + node.args.defaults
    for arg, default in [
        *zip(positional, defaults, strict=True),
        *zip(named, node.args.kw_defaults, strict=True),
    ]:
        if arg.arg == key:
            yield (
                arg.lineno,
                ast.unparse(arg.annotation) if arg.annotation else "",
                _default(default),
            )


def main(*asked: str) -> None:
    """Read the sources of these frameworks, or of all that have a schema, and write
    what was found.
    """
    every = recorded_keys()
    for name in asked or [
        n for n in frameworks() if "schema" in read_tables(n)["recipe"]
    ]:
        pin = framework(name).pin
        assert pin is not None
        every[name] = {"version": pin.version, "keys": keys_of(name)}
        print(name, len(every[name]["keys"]))
    write_atomically(
        FILE, json.dumps(every, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
