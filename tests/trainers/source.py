# SPDX-License-Identifier: Apache-2.0
"""Lines of other people's files, run as they are, without what their files import.

A training script imports a sampler, a tracker and a data set before its first function.
The functions that train need none of those.
"""

import ast
import importlib
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


def definitions(file: Path, *names: str, **known: Any) -> dict[str, Any]:
    """Return the functions and classes of a file that have these names, and what they
    refer to.

    Args:
        file: the path of a Python file.
        names: of its functions and classes, unmodified but for their decorators, which
            compile or check types.
        known: names that they refer to, such as torch.

    Returns:
        name -> function, class, or what is known.

    Raises:
        KeyError: the file lacks a name.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    for node in body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    if missing := {*names} - {node.name for node in body}:
        raise KeyError(f"{file} has no {', '.join(sorted(missing))}")
    space = dict(known)
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module([*future, *body], [])
    exec(compile(module, str(file), "exec"), space)
    return space


def lines(file: Path, first: str, last: str, space: dict[str, Any]) -> None:
    """Run the lines of a script from the one that begins with `first` to the one that
    begins with `last`, both stripped, as they are.

    Raises:
        KeyError: the file has no such lines.
    """
    text = file.read_text(encoding="utf-8").splitlines()
    starts = [i for i, x in enumerate(text) if x.strip().startswith(first)]
    ends = [i for i, x in enumerate(text) if x.strip().startswith(last)]
    ends = [i for i in ends if starts and i >= starts[0]]
    if not starts or not ends:
        raise KeyError(f"{file} has no lines from {first!r} to {last!r}")
    part = textwrap.dedent("\n".join(text[starts[0] : ends[0] + 1]))
    # line numbers of the file
    exec(compile("\n" * starts[0] + part, str(file), "exec"), space)


@contextmanager
def _first_in_path(folder: Path) -> Iterator[None]:
    """Import from a folder while the context lasts, and leave none of its modules
    behind.
    """
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if Path(file).is_relative_to(folder):
                del sys.modules[name]


def module(folder: Path, name: str) -> ModuleType:
    """Import a module of a checkout as a whole, and return it."""
    with _first_in_path(folder):
        return importlib.import_module(name)
