# SPDX-License-Identifier: Apache-2.0
"""What a loss keeps from call to call: numbers, texts, tensors, lists and the like that it
can reach. A proof is of a function of its inputs. So where one of them has changed, it is
moved far away, and the loss must still be proved. What cannot be moved, such as an iterator
that went on, is the end of a proof; so is a random generator that has moved.
"""

import gc
import itertools
import os
import random
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from numbers import Number
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.proof.constants import is_of_user
from upref.user_code.guard import NOT_USER_CODE

MOST = 5000  # objects that are looked at
DEEPEST = 24
FAR = 1_000_003  # by which a number is moved at least
LARGEST_MOVE = 2**61
MOST_ENTRIES = 64  # of a list that are looked at, each by itself
CACHED = " in a cache"
LENGTH = "the length of "
KEYS = "the number of keys of "
MORE = "more objects than are looked at"
_Cache: Any = type(lru_cache(lambda: None))
LONGER = 100_000  # entries that a list gets
ITERATORS = ("builtins", "itertools")  # modules of iterators whose state can be read
Write = Callable[[Any], object]


@dataclass(frozen=True)
class Kept:
    """A number, a text, a tensor or a list that a function can reach.

    Attributes:
        value: to compare it with what it is later.
        held: itself.
        write: puts another one in its place; None where that is not possible.
        is_chance: it is a random generator.
        is_length: the value is the length of a list, and the list can be made longer.
    """

    value: Any
    held: Any = field(compare=False)
    write: Write | None = field(compare=False)
    is_chance: bool = field(default=False, compare=False)
    is_length: bool = field(default=False, compare=False)


def kept(function: Any) -> dict[str, Kept]:
    """Return what a function can reach that may be a state, by its name.

    Where it can reach more than MOST objects, the rest is left out, and the name MORE
    is among the names.

    Args:
        function: the user's, or one that calls it.
    """
    out: dict[str, Kept] = {}
    seen: dict[int, Any] = {}  # by ids, which stay theirs as long as these are held
    todo: deque[tuple[str, Any, Write | None, int]] = deque([("it", function, None, 0)])
    while todo:
        if len(seen) >= MOST:
            out[MORE] = Kept("", None, None)
            break
        name, x, write, depth = todo.popleft()
        found = _snapshot(x)
        if found is not None:
            while name in out:  # a part of another kind has this name
                name += "'"
            is_chance = _state_of_generator(x) is not None
            out[name] = Kept(found, x, write, is_chance)
            if isinstance(x, Tensor):
                todo += [(f"{name}{m}", p, w, depth + 1) for m, p, w in _beside(x)]
        elif id(x) not in seen and depth < DEEPEST:
            seen[id(x)] = x
            if isinstance(x, list | deque):
                out[f"{LENGTH}{name}"] = Kept(len(x), x, None, is_length=True)
                if len(x) > MOST_ENTRIES:
                    rest = _numbers_beyond(x)
                    out[f"{name}[{MOST_ENTRIES}:]"] = Kept(rest, x, None)
            elif isinstance(x, dict | set) and CACHED not in name:
                out[f"{KEYS}{name}"] = Kept(len(x), x, None)
            todo += [(f"{name}{m}", p, w, depth + 1) for m, p, w in _parts(x)]
    return out


def _snapshot(x: Any) -> Any:
    """Return what a number, a text, a tensor or a generator is now, to compare it; None
    of anything else. Of a tensor that is its version, which each write raises, and its
    identity if it has floats.
    """
    if isinstance(x, Number | np.generic | itertools.count):
        return repr(x)
    if isinstance(x, str | bytes):
        return x
    if isinstance(x, Tensor):
        is_count = not x.is_floating_point()
        return (0 if is_count else id(x), x._version)  # noqa: SLF001
    if isinstance(x, np.ndarray):
        return hash(repr(x.tolist()) if x.dtype.hasobject else x.tobytes())
    try:
        return bytes(memoryview(x))  # bytearray, array, what ctypes makes
    except (TypeError, ValueError):
        return _state_of_generator(x)


def _numbers_beyond(x: Any) -> int:
    """Return a number for the numbers and texts of a list beyond those looked at."""
    kinds = (int, float, str, bytes)
    rest = itertools.islice(x, MOST_ENTRIES, None)
    return hash(tuple(part for part in rest if isinstance(part, kinds)))


def _state_of_generator(x: Any) -> Any:
    """Return a value that changes when a random generator draws; None of anything else."""
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
    """Yield what an object holds: the end of the part's name, the part, and a function
    that puts another one in its place, None where that is not possible. Of a list, only
    the first MOST_ENTRIES; nothing of a module, or of an object without attributes.
    """
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
            yield from _named(x)
            yield " default", x.__defaults__, None
            yield " default", x.__kwdefaults__, None
            yield ".", vars(x), None
        names = x.__code__.co_freevars
        for name, cell in zip(names, x.__closure__ or (), strict=True):
            try:
                label = f" > {name}" if is_of_user(x.__code__) else ""
                write = partial(setattr, cell, "cell_contents")
                yield label, cell.cell_contents, write
            except ValueError:  # empty
                continue
    elif isinstance(x, property):
        parts = {"": x.fget, " set": x.fset, " deleted": x.fdel}
        yield from ((label, part, None) for label, part in parts.items())
    elif isinstance(x, staticmethod | classmethod):
        yield "", x.__func__, None
    elif isinstance(x, ContextVar):
        yield "", x.get(None), x.set
    elif isinstance(x, Iterator) and type(x).__module__ in ITERATORS:
        yield from _parts_of_iterator(x)
    elif isinstance(x, weakref.ref):
        yield "", x(), None
    elif isinstance(x, type):
        if _is_class_of_user(x):
            yield from _attributes(x)
            for kind in (*x.__bases__, type(x)):
                yield f".{kind.__name__}", kind, None
    elif not isinstance(x, ModuleType) and (
        hasattr(x, "__dict__") or hasattr(type(x), "__slots__")
    ):
        yield f".{type(x).__name__}", type(x), None
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


def _beside(x: Tensor) -> Iterator[tuple[str, Any, Write | None]]:
    """Yield what a tensor has beside its numbers: attributes, and the gradient of a leaf."""
    if x.is_leaf and x.grad is not None:
        yield ".grad", x.grad, None
    for name, part in list(vars(x).items()):
        yield f".{name}", part, partial(setattr, x, name)


def _parts_of_iterator(x: Any) -> Iterator[tuple[str, Any, Write | None]]:
    """Yield how far an iterator went, and what it goes through, as `_parts` does. Nothing
    of it can be replaced.
    """
    if isinstance(x, GeneratorType):
        frame = x.gi_frame
        yield " at", frame.f_lasti if frame else -1, None
        for name, part in list(frame.f_locals.items()) if frame else ():
            yield f" > {name}", part, None
        yield " from", x.gi_yieldfrom, None
        return
    try:
        state = x.__reduce__()
    except TypeError:
        state = (next(_LOOKS),)  # it may have gone on since the last look
    yield from ((f" part {n}", part, None) for n, part in enumerate(state))


_LOOKS = itertools.count()


def _is_class_of_user(kind: type) -> bool:
    """Tell whether a class is the user's: by its functions, or by the file of its module."""
    functions = (f for f in vars(kind).values() if isinstance(f, FunctionType))
    if any(is_of_user(f.__code__) for f in functions):
        return True
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or ""
    is_file_of_user = file and not os.path.realpath(file).startswith(NOT_USER_CODE)
    return module is None or bool(is_file_of_user)


def _named(function: FunctionType) -> Iterator[tuple[str, Any, Write | None]]:
    """Yield what a function names: of its module, of modules that it imports, and of
    modules and classes among these, of which anybody may set attributes.
    """
    names = _names_in(function)
    own = function.__globals__
    todo: list[tuple[str, Any, Write | None]] = []
    for name in sorted(names):
        if name in own:
            todo.append((f" > {name}", own[name], partial(own.__setitem__, name)))
        elif name in sys.modules:
            todo.append((f" > {name}", sys.modules[name], None))
    seen: set[int] = set()
    while todo:
        label, part, write = todo.pop()
        yield label, part, write
        if isinstance(part, ModuleType | type) and id(part) not in seen:
            seen.add(id(part))
            for name in sorted(names & vars(part).keys()):
                inner = vars(part)[name]
                todo.append((f"{label}.{name}", inner, partial(setattr, part, name)))


def _names_in(function: FunctionType) -> set[str]:
    """Return the names that a function reads, in the functions within it too; texts of it
    may be names: `globals()["calls"]`, `getattr(x, "calls")`.
    """
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        names.update(c for c in code.co_consts if isinstance(c, str))
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    return names


def changed(before: dict[str, Kept], after: dict[str, Kept]) -> dict[str, Kept]:
    """Return what changed, or is new, by its name. New tensors of integers are left out:
    they are positions, which code keeps by their sizes. So are new entries of caches, and
    the entries of a list that is longer or shorter now.

    Args:
        before, after: of `kept`.
    """

    def is_left_out(name: str, now: Kept) -> bool:
        """Tell whether an entry is a new tensor of integers, or a new entry of a cache."""
        is_new = name not in before
        return is_new and (now.value == (0, 0) or CACHED in name)

    found = {
        name: now
        for name, now in after.items()
        if name != MORE and before.get(name) != now and not is_left_out(name, now)
    }
    lists = tuple(
        f"{name.removeprefix(LENGTH)}[" for name in found if name.startswith(LENGTH)
    )
    return {
        name: now
        for name, now in found.items()
        if not (lists and name.startswith(lists))
    }


def in_words(name: str) -> str:
    """Return the name of a state without how upref reaches it.

    Args:
        name: of `kept`.
    """
    return re.sub(r" \(entry \d+\)|\bit(\[\d\])? > ", "", name)


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
    """Move a number, a tensor, a list or a dict; return what moves it back, None where
    it cannot be moved. A dict or a set gets more keys, and stays as it is where `far`
    is below 0.
    """
    x = one.held
    if isinstance(x, list | deque):
        return _move_list(x, far > 0) if one.is_length else None
    if isinstance(x, dict | set):
        return _add_keys(x) if far > 0 else _leave
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
        if x.dtype.kind not in "iuf" or not x.flags.writeable:
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
    if one.write is None or not isinstance(x, int | float | str | bytes):
        return None
    if isinstance(x, str | bytes):
        one.write(x * max(2, LONGER // max(len(x), 1)) if far > 0 else x[:0])
    elif isinstance(x, bool):
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
        """Replace all entries by these."""
        x.clear()
        x.extend(with_entries)

    fill(entries + entries[-1:] * LONGER if longer else [])
    return partial(fill, entries)


def _add_keys(x: Any) -> Callable[[], object]:
    """Give a dict or a set more keys; return what takes them away."""
    keys = [object() for _ in range(LONGER)]
    if isinstance(x, dict):
        value = next(reversed(x.values()), None)
        x.update(dict.fromkeys(keys, value))
    else:
        x.update(keys)

    def remove() -> None:
        """Take the new keys away again."""
        for key in keys:
            if isinstance(x, dict):
                x.pop(key, None)
            else:
                x.discard(key)

    return remove


def _leave() -> None:
    """Move nothing back."""
