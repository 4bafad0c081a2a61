# SPDX-License-Identifier: Apache-2.0
"""The settings of a framework and their defaults, read from its source or from the
signature of a function.
"""

import ast
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any


def defaults(module: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Read the defaults of some options of a command line from its source.

    Args:
        module: the module that adds the options to a parser.
        names: options, such as `--eps-clip`.

    Returns:
        Field -> default, by the names of argparse: `eps_clip`.

    Raises:
        KeyError: the module adds no such option.
    """
    return {
        name.strip("-").replace("-", "_"): options(module)[name]["default"]
        for name in names
    }


def arguments(function: Callable[..., Any], *but: str) -> dict[str, Any]:
    """Return the arguments of a function or a constructor with their defaults.

    Args:
        function: not called.
        *but: arguments to leave out, beside `self`.

    Returns:
        Name -> default; inspect's `empty` for an argument without one.
    """
    return {
        k: p.default
        for k, p in inspect.signature(function).parameters.items()
        if k not in ("self", *but)
    }


def source(module: str, beside: str = ".", up: int = 0) -> str:
    """Return the text of a module without importing it, or of a file near it.

    Args:
        module: its importable name; packages above it are imported.
        beside: path of another file, relative to the folder that `up` selects; ".": the
            module itself.
        up: 0: the module's own folder; 1: the folder above it, and so on.

    Returns:
        The source, as text.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin)
    return (file if beside == "." else file.parents[up] / beside).read_text(
        encoding="utf-8"
    )


def options(module: str) -> dict[str, dict[str, Any]]:
    """Read the options of a command line from the source of the module that adds them.

    Args:
        module: not imported.

    Returns:
        Option, with its hyphens -> those keywords of its add_argument that are
        literals. `default` is always there: False for a flag and None for others where
        the source gives none.
    """
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(source(module))):
        if not isinstance(node, ast.Call):
            continue
        for word in node.args:
            if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                found.setdefault(str(word.value), _literal_keywords(node))
    return found


def _literal_keywords(call: ast.Call) -> dict[str, Any]:
    """Return the keywords of a call of add_argument that are literals, and `default`."""
    literals: dict[str, Any] = {}
    for keyword in call.keywords:
        if _is_literal(keyword.value):
            literals[keyword.arg or ""] = ast.literal_eval(keyword.value)
    if "default" not in literals:
        is_flag = literals.get("action") == "store_true"
        literals["default"] = False if is_flag else None
    return literals


def _is_literal(node: ast.expr) -> bool:
    """Return whether an expression consists of constants, signs, lists and tuples only."""
    kinds = ast.Constant | ast.List | ast.Tuple | ast.Load | ast.UnaryOp | ast.USub
    return all(isinstance(n, kinds) for n in ast.walk(node))
