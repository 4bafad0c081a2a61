# SPDX-License-Identifier: Apache-2.0
"""The registered objectives by name: those of the folder `objectives`, loaded when
first asked for, and transforms.
"""

import copyreg
import functools
import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from upref import catalog, definition, ops
from upref.definition import ERRORS, LEVELS, NO_DUAL_CLIP, REDUCE, TRANSFORMS, Objective
from upref.errors import InputError

__all__ = [
    "ERRORS",
    "LEVELS",
    "NO_DUAL_CLIP",
    "REDUCE",
    "Objective",
    "get",
    "names",
    "objective",
    "parts",
]


def _load() -> dict[str, Objective]:
    """Return all registered objectives by name, once their modules are imported; raise
    InputError where one does not import.
    """
    if not _loaded:
        from upref import objectives, transforms  # noqa: F401  # it registers them

        found = pkgutil.iter_modules(objectives.__path__)
        for finder, name, _ in sorted(found, key=lambda module: module.name):
            try:
                importlib.import_module(f"upref.objectives.{name}")
            except Exception as error:  # whatever a file of a user raises
                file = Path(finder.path) / f"{name}.py"  # type: ignore[union-attr]
                raise InputError(_why_not_imported(file, error)) from error
        _loaded.append(True)
    return definition.OBJECTIVES


def _why_not_imported(file: Path, error: Exception) -> str:
    """Say which file and line of the folder `objectives` does not import, and what to
    do. Of a name that upref.ops lacks, say which ones it has; of wrong syntax, the file
    may be one that is imported from there.

    Args:
        file: the file that was imported.
        error: what the import raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).parent == file.parent]
    where = f"{own[-1].filename}, line {own[-1].lineno}" if own else str(file)
    what = str(error)
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
        what = error.msg
    if not isinstance(error, InputError):
        what = f"{type(error).__name__}: {what}"
    if isinstance(error, ImportError) and error.name == ops.__name__:
        what += f"; upref.ops has {', '.join(_operations())}"
    return f"{where}: {what.removesuffix('.')}. Every command reads this folder: fix the file, or move it elsewhere."


def _operations() -> list[str]:
    """Return the names of the functions of upref.ops with which an objective is
    written.
    """
    functions = inspect.getmembers(ops, inspect.isfunction)
    return [
        name
        for name, function in functions
        if function.__module__ == ops.__name__
        and not name.startswith("_")
        and name not in ("recorded_sg", "with_signature")  # for upref itself
    ]


_loaded: list[bool] = []


@functools.wraps(definition.objective)
def objective(**facts: Any) -> Callable[[Callable[..., Any]], Objective]:
    """Return the decorator of `upref.definition.objective`, once the shipped objectives
    are loaded.
    """
    _load()  # so that a name that is taken is refused here
    return definition.objective(**facts)


def names() -> list[str]:
    """Return the names of all registered objectives, in alphabetical order."""
    return sorted(_load())


def get(name: str) -> Objective:
    """Return the objective of that name; `up(NAME)` applies UP to it.

    Args:
        name: such as `dapo`, `up(dapo)` or `tis(dapo)`.

    Raises:
        InputError: no objective has this name; the message lists the nearest names.
    """
    known = _load()
    if not isinstance(name, str):
        raise InputError(
            f"an objective is called by its name, got {type(name).__name__}: `upref list --all` shows all."
        )
    if name.count("(") > 20:
        raise InputError(
            f"{name[:40]}... is nested {name.count('(')} times: up(NAME) once is enough."
        )
    make, base = parts(name)
    if make:
        return TRANSFORMS[make](get(base))
    make, _, base = name.partition("(")
    if make.lower() in TRANSFORMS and base.endswith(")"):
        raise InputError(
            f"there is no transform named {make!r}: did you mean {make.lower()}?"
        )
    if name not in known:
        raise catalog.unknown(name, known)
    return known[name]


def parts(name: str) -> tuple[str, str]:
    """Return the parts of the name of an objective.

    Args:
        name: of an objective.

    Returns:
        The outermost transform and the name of what it is applied to, such as
        ("up", "dapo") of `up(dapo)`; "" and the name itself where it has none.
    """
    transform, _, base = name.partition("(")
    if transform in TRANSFORMS and base.endswith(")"):
        return transform, base[:-1]
    return "", name


# a process that is sent one looks it up by its name
copyreg.pickle(Objective, lambda o: (get, (o.name,)))
