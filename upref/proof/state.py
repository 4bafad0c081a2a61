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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from upref.proof.constants import is_of_user
from upref.proof.varying import VaryingNumber
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


class Part(NamedTuple):
    """A thing that an object holds.

    Attributes:
        label: what its name has after that of the object.
        held: itself.
        write: puts another one in its place; None where that is not possible.
    """

    label: str
    held: Any
    write: Write | None = None


class Reached(NamedTuple):
    """An object that a function can reach, before it is looked at.

    Attributes:
        name: how it is reached.
        held: itself.
        write: puts another one in its place; None where that is not possible.
        depth: how many objects lie between the function and it.
    """

    name: str
    held: Any
    write: Write | None
    depth: int


def kept(function: Any) -> dict[str, Kept]:
    """Return what a function can reach that may be a state, by its name.

    Where it can reach more than MOST objects, the rest is left out, and the name MORE
    is among the names.

    Args:
        function: the user's, or one that calls it.
    """
    out: dict[str, Kept] = {}
    seen: dict[int, Any] = {}  # by ids, which stay theirs as long as these are held
    todo = deque([Reached("it", function, None, 0)])
    while todo:
        if len(seen) >= MOST:
            out[MORE] = Kept("", None, None)
            break
        name, x, write, depth = todo.popleft()
        parts: Iterator[Part]
        value = _snapshot(x)
        if value is not None:
            while name in out:  # a part of another kind has this name
                name += "'"
            is_chance = _state_of_generator(x) is not None
            out[name] = Kept(value, x, write, is_chance)
            parts = _beside(x) if isinstance(x, Tensor) else iter(())
        elif id(x) in seen or depth >= DEEPEST:
            continue
        else:
            seen[id(x)] = x
            out |= _lengths(name, x)
            parts = _parts(x)
        for part in parts:
            reached = f"{name}{part.label}"
            todo.append(Reached(reached, part.held, part.write, depth + 1))
    return out


def _lengths(name: str, x: Any) -> dict[str, Kept]:
    """Return the length of a list, and a number for its entries beyond MOST_ENTRIES; of
    a dict or a set outside of caches, how many keys it has; {} of anything else.
    """
    out: dict[str, Kept] = {}
    if isinstance(x, list | deque):
        out[f"{LENGTH}{name}"] = Kept(len(x), x, None, is_length=True)
        if len(x) > MOST_ENTRIES:
            rest = _numbers_beyond(x)
            out[f"{name}[{MOST_ENTRIES}:]"] = Kept(rest, x, None)
    elif isinstance(x, dict | set) and CACHED not in name:
        out[f"{KEYS}{name}"] = Kept(len(x), x, None)
    return out


def _snapshot(x: Any) -> Any:
    """Return what a number, a text, a tensor or a generator is now, to compare it; None
    of anything else. Of a tensor that is its version, which each write raises, and its
    identity if it has floats.
    """
    if isinstance(x, VaryingNumber):
        return id(x)
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


def _parts(x: Any) -> Iterator[Part]:
    """Yield what an object holds. Of a list, that is only its first MOST_ENTRIES; of a
    module, or of an object without attributes, nothing.
    """
    if isinstance(x, list | deque | dict | tuple | set | frozenset):
        yield from _entries(x)
    elif isinstance(x, FunctionType):
        yield from _parts_of_function(x)
    elif isinstance(x, partial | BuiltinFunctionType | MethodType):
        yield from _bound(x)
    elif isinstance(x, property | staticmethod | classmethod):
        yield from _functions_within(x)
    elif isinstance(x, _Cache):
        yield from _parts_of_cache(x)
    elif isinstance(x, ContextVar):
        yield Part("", x.get(None), x.set)
    elif isinstance(x, Iterator) and type(x).__module__ in ITERATORS:
        yield from _parts_of_iterator(x)
    elif isinstance(x, weakref.ref):
        yield Part("", x())
    elif isinstance(x, type):
        yield from _parts_of_class(x)
    elif isinstance(x, ModuleType):
        return
    elif hasattr(x, "__dict__") or hasattr(type(x), "__slots__"):
        yield Part(f".{type(x).__name__}", type(x))
        yield from _attributes(x)


def _entries(x: Any) -> Iterator[Part]:
    """Yield the first MOST_ENTRIES of a list or deque, or all entries of a dict, a tuple
    or a set.
    """
    if isinstance(x, list | deque):
        for n, entry in enumerate(itertools.islice(x, MOST_ENTRIES)):
            yield Part(f"[{n}]", entry, partial(x.__setitem__, n))
    elif isinstance(x, dict):
        for key, entry in list(x.items()):
            yield Part(f"[{str(key)[:40]}]", entry, partial(x.__setitem__, key))
    else:
        for n, entry in enumerate(list(x)):
            yield Part(f"[{n}]", entry)


def _bound(x: Any) -> Iterator[Part]:
    """Yield the function and the arguments of a partial, the function and the object of
    a method, and the object of a method that is written in C.
    """
    if isinstance(x, partial):
        yield Part("", x.func)
        yield Part("", x.args)
        yield Part("", x.keywords)
    elif isinstance(x, MethodType):
        yield Part("", x.__func__)
        yield Part("", x.__self__)
    elif not isinstance(x.__self__, ModuleType | type | None):
        yield Part("", x.__self__)


def _functions_within(x: Any) -> Iterator[Part]:
    """Yield the functions of a property, or that of a static method or class method."""
    if isinstance(x, property):
        yield Part("", x.fget)
        yield Part(" set", x.fset)
        yield Part(" deleted", x.fdel)
    else:
        yield Part("", x.__func__)


def _parts_of_cache(x: Any) -> Iterator[Part]:
    """Yield the function that a cache wraps, and the entries of the cache that may
    change. That the cache has more entries than before is no change of the function.
    """
    yield Part("", x.__wrapped__)
    for entry in gc.get_referents(x):
        if isinstance(entry, list | deque | dict | set | Tensor | np.ndarray):
            yield Part(f"{CACHED} (entry {id(entry)})", entry)


def _parts_of_function(function: FunctionType) -> Iterator[Part]:
    """Yield what a function has from the functions around it; of the user's, also what
    it names, its defaults and its attributes.
    """
    is_user = is_of_user(function.__code__)
    if is_user:
        yield from _named(function)
        yield Part(" default", function.__defaults__)
        yield Part(" default", function.__kwdefaults__)
        yield Part(".", vars(function))
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            held = cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
        label = f" > {name}" if is_user else ""
        yield Part(label, held, partial(setattr, cell, "cell_contents"))


def _parts_of_class(kind: type) -> Iterator[Part]:
    """Yield the attributes, the bases and the metaclass of a class of the user; nothing
    of any other class.
    """
    if not _is_class_of_user(kind):
        return
    yield from _attributes(kind)
    for other in (*kind.__bases__, type(kind)):
        yield Part(f".{other.__name__}", other)


def _attributes(x: Any) -> Iterator[Part]:
    """Yield the attributes of an object, those in slots too."""
    for name, part in list(getattr(x, "__dict__", {}).items()):
        yield Part(f".{name}", part, partial(setattr, x, name))
    if isinstance(x, type):
        return
    for kind in type(x).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        for name in names:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"  # as Python names it
            if hasattr(x, name):
                yield Part(f".{name}", getattr(x, name), partial(setattr, x, name))


def _beside(x: Tensor) -> Iterator[Part]:
    """Yield what a tensor has beside its numbers: attributes, and the gradient of a leaf."""
    if x.is_leaf and x.grad is not None:
        yield Part(".grad", x.grad)
    for name, part in list(vars(x).items()):
        yield Part(f".{name}", part, partial(setattr, x, name))


def _parts_of_iterator(x: Any) -> Iterator[Part]:
    """Yield how far an iterator went, and what it goes through. Nothing of it can be
    replaced.
    """
    if isinstance(x, GeneratorType):
        yield from _parts_of_generator(x)
        return
    try:
        state = x.__reduce__()
    except TypeError:
        state = (next(_LOOKS),)  # it may have gone on since the last look
    for n, part in enumerate(state):
        yield Part(f" part {n}", part)


def _parts_of_generator(x: Any) -> Iterator[Part]:
    """Yield at which instruction a generator stands, its variables, and the iterator
    that it yields from. One that has ended has no frame, so no variables.
    """
    frame = x.gi_frame
    if frame is None:
        yield Part(" at", -1)
    else:
        yield Part(" at", frame.f_lasti)
        for name, part in list(frame.f_locals.items()):
            yield Part(f" > {name}", part)
    yield Part(" from", x.gi_yieldfrom)


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


def _named(function: FunctionType) -> Iterator[Part]:
    """Yield what a function names: of its module, of modules that it imports, and of
    modules and classes among these, of which anybody may set attributes.
    """
    names = _names_in(function)
    own = function.__globals__
    todo: list[Part] = []
    for name in sorted(names):
        if name in own:
            todo.append(Part(f" > {name}", own[name], partial(own.__setitem__, name)))
        elif name in sys.modules:
            todo.append(Part(f" > {name}", sys.modules[name]))
    seen: set[int] = set()
    while todo:
        part = todo.pop()
        yield part
        held = part.held
        if isinstance(held, ModuleType | type) and id(held) not in seen:
            seen.add(id(held))
            for name in sorted(names & vars(held).keys()):
                write = partial(setattr, held, name)
                todo.append(Part(f"{part.label}.{name}", vars(held)[name], write))


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

    found: dict[str, Kept] = {}
    for name, now in after.items():
        is_changed = name != MORE and before.get(name) != now
        if is_changed and not is_left_out(name, now):
            found[name] = now
    resized = [name.removeprefix(LENGTH) for name in found if name.startswith(LENGTH)]
    starts_of_entries = tuple(f"{name}[" for name in resized)
    return {
        name: now
        for name, now in found.items()
        if not name.startswith(starts_of_entries)
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
            if undo is None:
                is_whole = False
            else:
                back.append(undo)
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
        return _move_tensor(x, far)
    if isinstance(x, np.ndarray):
        return _move_array(x, far)
    if one.write is not None and isinstance(x, VaryingNumber):
        one.write(far)
        return partial(one.write, x)
    if one.write is None or not isinstance(x, int | float | str | bytes):
        return None
    one.write(_moved_value(x, far))
    return partial(one.write, x)


def _move_tensor(x: Tensor, far: float) -> Callable[[], object]:
    """Add `far` to a tensor in place, to integers as far as their type goes; turn truths
    around. Return what moves it back.
    """
    numbers = x.detach().clone()
    with torch.no_grad():
        if x.dtype is torch.bool:
            x.logical_not_()
        elif x.is_floating_point():
            x.add_(far)
        else:
            x.add_(_whole(far, torch.iinfo(x.dtype).max))
    return lambda: x.detach().copy_(numbers)


def _move_array(x: Any, far: float) -> Callable[[], object] | None:
    """Add `far` to an array of numpy in place; return what moves it back, None where it
    holds no numbers or cannot be written.
    """
    if x.dtype.kind not in "iuf" or not x.flags.writeable:
        return None
    numbers = x.copy()
    with np.errstate(all="ignore"):
        if x.dtype.kind == "f":
            moved_numbers = x + far
        else:
            moved_numbers = x.astype(np.int64) + _whole(far, np.iinfo(x.dtype).max)
    x[...] = moved_numbers.astype(x.dtype)
    return lambda: x.__setitem__(..., numbers)


def _moved_value(x: Any, far: float) -> Any:
    """Return a number that is moved by `far`, the other truth, or a text: one that is
    repeated where `far` is above 0, else an empty one.
    """
    if isinstance(x, str | bytes):
        repeats = max(2, LONGER // max(len(x), 1))
        return x * repeats if far > 0 else x[:0]
    if isinstance(x, bool):
        return not x
    if isinstance(x, int):
        return x + _whole(far, LARGEST_MOVE)
    return x + far


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
