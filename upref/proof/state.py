# SPDX-License-Identifier: Apache-2.0
"""What a loss keeps from call to call: numbers and tensors that its module holds. A proof is
of a function of its inputs, so where one of them changes, there is none.
"""

import itertools
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from upref.proof.constants import is_of_user

MOST = 5000  # objects that are looked at
DEEPEST = 6


def kept(function: Any) -> dict[str, Any]:
    """Return the numbers and tensors that a function can reach, by their names.

    Args:
        function: the user's, or one that calls it.
    """
    out: dict[str, Any] = {}
    seen: set[int] = set()
    todo = [("it", function, 0)]
    while todo and len(seen) < MOST:
        name, x, depth = todo.pop()
        if isinstance(x, int | float | itertools.count):
            out[name] = repr(x)
        elif isinstance(x, Tensor):
            is_count = not x.is_floating_point()
            out[name] = (0 if is_count else id(x), x._version)  # noqa: SLF001
        elif id(x) not in seen and depth < DEEPEST:
            seen.add(id(x))
            todo += [(f"{name}{more}", part, depth + 1) for more, part in _parts(x)]
    return out


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with a name for each."""
    if isinstance(x, dict):
        yield from ((f"[{str(key)[:40]}]", part) for key, part in list(x.items()))
    elif isinstance(x, list | tuple | set | frozenset):
        yield from ((f"[{n}]", part) for n, part in enumerate(list(x)))
    elif isinstance(x, MethodType):
        yield from (("", x.__func__), ("", x.__self__))
    elif isinstance(x, FunctionType):
        if is_of_user(x.__code__):
            for name in _names_in(x):
                if name in x.__globals__:
                    yield f" > {name}", x.__globals__[name]
            yield from (("", x.__defaults__), ("", x.__kwdefaults__), ("", vars(x)))
        for cell in x.__closure__ or ():
            try:
                yield "", cell.cell_contents
            except ValueError:  # empty
                continue
    elif isinstance(x, type | ModuleType):
        if isinstance(x, type) and any(
            isinstance(f, FunctionType) and is_of_user(f.__code__)
            for f in vars(x).values()
        ):
            yield from ((f".{name}", part) for name, part in list(vars(x).items()))
    elif hasattr(x, "__dict__"):
        yield "", type(x)
        yield from ((f".{name}", part) for name, part in list(vars(x).items()))


def _names_in(function: FunctionType) -> set[str]:
    """Return the names that a function reads, in the functions within it too."""
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [c for c in code.co_consts if hasattr(c, "co_names")]
    return names


def changed_name(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the name of something kept that changed, or is new; "" where nothing did. New
    tensors of integers are positions, which code keeps by their sizes.

    Args:
        before, after: of `kept`.
    """
    for name, value in after.items():
        if before.get(name, (0, 0)) != value:
            return name.rpartition(" > ")[2]
    return ""
