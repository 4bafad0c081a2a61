# SPDX-License-Identifier: Apache-2.0
"""What a loss keeps from call to call: numbers, tensors and lists that it can reach. A
proof is of a function of its inputs. So where one of them has changed, it is moved far away,
and the loss must still be proved. A random generator that has moved is the end of a proof.
"""

import gc
import itertools
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.proof.constants import is_of_user

MOST = 5000  # objects that are looked at
DEEPEST = 6
FAR = 1_000_003  # by which a number is moved at least
LARGEST_MOVE = 2**61
MOST_ENTRIES = 64  # of a list that are looked at
CACHED = " in a cache"
LENGTH = "the length of "
_Cache: Any = type(lru_cache(lambda: None))
LONGER = 100_000  # entries that a list gets
Write = Callable[[Any], object]


@dataclass(frozen=True)
class Kept:
    """A number, a tensor or a list that a function can reach.

    Attributes:
        value: to compare it with what it is later.
        held: itself.
        write: puts another one in its place; None where that is not possible.
        is_chance: it is a random generator.
    """

    value: Any
    held: Any = field(compare=False)
    write: Write | None = field(compare=False)
    is_chance: bool = field(default=False, compare=False)


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
        elif isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
            out[name] = Kept(hash(x.tobytes()), x, None)
        elif (drawn := _state_of_generator(x)) is not None:
            out[name] = Kept(drawn, x, None, is_chance=True)
        elif id(x) not in seen and depth < DEEPEST:
            seen.add(id(x))
            if isinstance(x, list | deque):
                out[f"{LENGTH}{name}"] = Kept(len(x), x, None)
            todo += [(f"{name}{m}", p, w, depth + 1) for m, p, w in _parts(x)]
    return out


def _state_of_generator(x: Any) -> Any:
    """Return the state of a random generator, to compare it; None of anything else."""
    if isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
        return hash(x.getstate())
    if isinstance(x, np.random.Generator):
        return repr(x.bit_generator.state)
    if isinstance(x, np.random.RandomState):
        return hash(str(x.get_state(legacy=False)["state"]))
    if isinstance(x, torch.Generator):
        return hash(x.get_state().numpy().tobytes())
    return None


def _parts(x: Any) -> Iterator[tuple[str, Any, Write | None]]:
    """Yield what an object holds, with a name and a way to replace it."""
    if isinstance(x, list | deque):
        for n, part in enumerate(itertools.islice(x, MOST_ENTRIES)):
            yield f"[{n}]", part, partial(x.__setitem__, n)
    elif isinstance(x, partial):
        yield from (("", part, None) for part in (x.func, x.args, x.keywords))
    elif isinstance(x, BuiltinFunctionType):
        if not isinstance(x.__self__, ModuleType | type | None):
            yield "", x.__self__, None
    elif isinstance(x, _Cache):
        yield "", x.__wrapped__, None
        # entries of the cache that may change; that it has more is no change of the function
        for part in gc.get_referents(x):
            if isinstance(part, list | deque | dict | set | Tensor | np.ndarray):
                yield f"{CACHED} (entry {id(part)})", part, None
    elif isinstance(x, dict):
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
    elif not isinstance(x, ModuleType) and (
        hasattr(x, "__dict__") or hasattr(type(x), "__slots__")
    ):
        yield "", type(x), None
        yield from _attributes(x)


def _attributes(x: Any) -> Iterator[tuple[str, Any, Write | None]]:
    """Yield the attributes of an object, as `_parts` does."""
    for name, part in list(getattr(x, "__dict__", {}).items()):
        yield f".{name}", part, partial(setattr, x, name)
    if isinstance(x, type):
        return
    for kind in type(x).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"  # as Python names it
            if hasattr(x, name):
                yield f".{name}", getattr(x, name), partial(setattr, x, name)


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
    they are positions, which code keeps by their sizes. So are new entries of caches, and
    the entries of a list that is longer or shorter now.

    Args:
        before, after: of `kept`.
    """

    def is_left_out(name: str, now: Kept) -> bool:
        is_new = name not in before
        return is_new and (now.value == (0, 0) or CACHED in name)

    found = {
        name: now
        for name, now in after.items()
        if before.get(name) != now and not is_left_out(name, now)
    }
    lists = tuple(
        f"{name.removeprefix(LENGTH)}[" for name in found if name.startswith(LENGTH)
    )
    return {
        _words(name): now
        for name, now in found.items()
        if not (lists and name.startswith(lists))
    }


def _words(name: str) -> str:
    """Return the name of a state without how upref reaches it."""
    return re.sub(r" \(entry \d+\)", "", name.replace("it > ", ""))


@contextmanager
def moved(state: dict[str, Kept], up: bool, far: float = FAR) -> Iterator[bool]:
    """Move a state far away from what it is; move it back at the end.

    Args:
        state: of `changed`.
        up: to larger numbers and longer lists, not to smaller ones and empty lists.
        far: by which numbers are moved; integers by LARGEST_MOVE at most.

    Yields:
        Whether all of it could be moved.
    """
    back: list[Callable[[], object]] = []
    is_whole = True
    try:
        for one in state.values():
            undo = _move(one, far if up else -far)
            is_whole &= undo is not None
            back += [undo] if undo else []
        yield is_whole
    finally:
        for undo in reversed(back):
            undo()


def _move(one: Kept, far: float) -> Callable[[], object] | None:
    """Move a number, a tensor or a list; return what moves it back, None where it stays."""
    x = one.held
    if isinstance(x, list | deque):
        return _move_list(x, far > 0)
    if isinstance(x, Tensor):
        numbers = x.detach().clone()
        with torch.no_grad():
            if x.dtype is torch.bool:
                x.logical_not_()
            else:
                x.add_(
                    far
                    if x.is_floating_point()
                    else _whole(far, torch.iinfo(x.dtype).max)
                )
        return lambda: x.detach().copy_(numbers)
    if isinstance(x, np.ndarray):
        if x.dtype.kind == "b" or not x.flags.writeable:
            return None
        held = x.copy()
        moved_numbers: Any
        with np.errstate(all="ignore"):
            if x.dtype.kind == "f":
                moved_numbers = x + far
            else:
                moved_numbers = x.astype(np.int64) + _whole(far, np.iinfo(x.dtype).max)
        x[...] = moved_numbers.astype(x.dtype)
        return lambda: x.__setitem__(..., held)
    if one.write is None or not isinstance(x, int | float):
        return None
    if isinstance(x, bool):
        one.write(not x)
    else:
        one.write(x + (_whole(far, LARGEST_MOVE) if isinstance(x, int) else far))
    return partial(one.write, x)


def _whole(far: float, largest: int) -> int:
    """Return the integer nearest to `far` by which numbers of a type are moved.

    Args:
        far: the distance.
        largest: number of the type.
    """
    most = min(LARGEST_MOVE, largest)
    return int(max(-most, min(most, far)))


def _move_list(x: Any, longer: bool) -> Callable[[], object]:
    """Make a list or deque longer, or empty; return what moves it back."""
    entries = list(x)

    def fill(with_entries: list[Any]) -> None:
        x.clear()
        x.extend(with_entries)

    fill(entries + entries[-1:] * LONGER if longer else [])
    return partial(fill, entries)
