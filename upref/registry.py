# SPDX-License-Identifier: Apache-2.0
"""The registered objectives by name: those of the folder `objectives`, loaded when
first asked for, and transforms.
"""

import copyreg
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from upref import catalog, definition
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
    """All registered objectives; their modules are imported once."""
    if not _loaded:
        from upref import objectives, transforms  # noqa: F401  # it registers them

        for module in sorted(m.name for m in pkgutil.iter_modules(objectives.__path__)):
            importlib.import_module(f"upref.objectives.{module}")
        _loaded.append(True)
    return definition.OBJECTIVES


_loaded: list[bool] = []


@functools.wraps(definition.objective)
def objective(**facts: Any) -> Callable[[Callable[..., Any]], Objective]:
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
