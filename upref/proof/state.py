# SPDX-License-Identifier: Apache-2.0
"""What a loss keeps from call to call: numbers, tensors and lists that its module holds. A
proof is of a function of its inputs. So where one of them has changed, it is moved far away,
and the loss must still be proved.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from upref.proof.constants import is_of_user

MOST = 5000  # objects that are looked at
DEEPEST = 6
FAR = 1_000_003  # by which a number is moved
LONGER = 100_000  # entries that a list gets
Write = Callable[[Any], object]


@dataclass(frozen=True)
class Kept:
    """A number, a tensor or a list that a function can reach.

    Attributes:
        value: to compare it with what it is later.
        held: itself.
        write: puts another one in its place; None where that is not possible.
    """

    value: Any
    held: Any = field(compare=False)
    write: Write | None = field(compare=False)


def kept(function: Any) -> dict[str, Kept]:
    """Return what a function can reach that may be a state, by its name.

    Args:
        function: the user's, or one that calls it.
    """
    out: dict[str, Kept] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any, Write | None, int]] = [("it", function, None, 0)]
    while todo and len(seen) < MOST:
        name, x, write, depth = todo.pop()
        if isinstance(x, int | float | itertools.count):
            out[name] = Kept(repr(x), x, write)
        elif isinstance(x, Tensor):
            is_count = not x.is_floating_point()
            version = x._version  # noqa: SLF001
            out[name] = Kept((0 if is_count else id(x), version), x, write)
        elif id(x) not in seen and depth < DEEPEST:
            seen.add(id(x))
            if isinstance(x, list):
                out[f"the length of {name}"] = Kept(len(x), x, None)
                continue
            todo += [(f"{name}{m}", p, w, depth + 1) for m, p, w in _parts(x)]
    return out


def _parts(x: Any) -> Iterator[tuple[str, Any, Write | None]]:
    """Yield what an object holds, with a name and a way to replace it."""
    if isinstance(x, dict):
        for key, part in list(x.items()):
            yield f"[{str(key)[:40]}]", part, partial(x.__setitem__, key)
    elif isinstance(x, tuple | set | frozenset):
        yield from ((f"[{n}]", part, None) for n, part in enumerate(list(x)))
    elif isinstance(x, MethodType):
        yield from (("", x.__func__, None), ("", x.__self__, None))
    elif isinstance(x, FunctionType):
        if is_of_user(x.__code__):
            for name in _names_in(x):
                if name in x.__globals__:
                    write = partial(x.__globals__.__setitem__, name)
                    yield f" > {name}", x.__globals__[name], write
            more = (x.__defaults__, x.__kwdefaults__, vars(x))
            yield from (("", part, None) for part in more)
        for cell in x.__closure__ or ():
            try:
                yield "", cell.cell_contents, partial(setattr, cell, "cell_contents")
            except ValueError:  # empty
                continue
    elif isinstance(x, type):
        functions = (f for f in vars(x).values() if isinstance(f, FunctionType))
        if any(is_of_user(f.__code__) for f in functions):
            yield from _attributes(x)
    elif hasattr(x, "__dict__") and not isinstance(x, ModuleType):
        yield "", type(x), None
        yield from _attributes(x)


def _attributes(x: Any) -> Iterator[tuple[str, Any, Write | None]]:
    """Yield the attributes of an object, as `_parts` does."""
    for name, part in list(vars(x).items()):
        yield f".{name}", part, partial(setattr, x, name)


def _names_in(function: FunctionType) -> set[str]:
    """Return the names that a function reads, in the functions within it too."""
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [c for c in code.co_consts if hasattr(c, "co_names")]
    return names


def changed(before: dict[str, Kept], after: dict[str, Kept]) -> dict[str, Kept]:
    """Return what changed, or is new, by its name. New tensors of integers are left out:
    they are positions, which code keeps by their sizes.

    Args:
        before, after: of `kept`.
    """
    return {
        name.replace("it > ", ""): now
        for name, now in after.items()
        if before.get(name) != now and not (now.value == (0, 0) and name not in before)
    }


@contextmanager
def moved(state: dict[str, Kept], up: bool) -> Iterator[bool]:
    """Move a state far away from what it is; move it back at the end.

    Args:
        state: of `changed`.
        up: to larger numbers and longer lists, not to smaller ones and empty lists.

    Yields:
        Whether all of it could be moved.
    """
    back: list[Callable[[], object]] = []
    is_whole = True
    try:
        for one in state.values():
            undo = _move(one, up)
            is_whole &= undo is not None
            back += [undo] if undo else []
        yield is_whole
    finally:
        for undo in back:
            undo()


def _move(one: Kept, up: bool) -> Callable[[], object] | None:
    """Move a number, a tensor or a list; return what moves it back, None where it stays."""
    x = one.held
    if isinstance(x, list):
        entries = list(x)
        x[:] = x + x[-1:] * LONGER if up else []
        return lambda: x.__setitem__(slice(None), entries)
    if isinstance(x, Tensor):
        numbers = x.detach().clone()
        with torch.no_grad():
            x.logical_not_() if x.dtype is torch.bool else x.add_(FAR if up else -FAR)
        return lambda: x.detach().copy_(numbers)
    if one.write is None or not isinstance(x, int | float):
        return None
    one.write(not x if isinstance(x, bool) else x + (FAR if up else -FAR))
    return partial(one.write, x)
