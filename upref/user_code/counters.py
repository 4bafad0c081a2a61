# SPDX-License-Identifier: Apache-2.0
"""Counters that a user's function keeps between its calls, found where Python keeps
state, and set ahead: a loss that changes at its millionth call is not called a million
times.
"""

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

DEEPEST = 6  # containers and functions within each other


@dataclass(frozen=True)
class Place:
    """Where a number is kept.

    Attributes:
        owner: the object that keeps it: a cell of a closure, a dict, a list, an object or
            a tensor.
        key: the name or index under which it is kept; None in a cell and in a tensor.
    """

    owner: Any
    key: Any = None

    def read(self) -> float:
        """Return the number."""
        if isinstance(self.owner, torch.Tensor):
            return float(self.owner.detach().item())
        if isinstance(self.owner, types.CellType):
            return float(self.owner.cell_contents)
        if isinstance(self.owner, dict | list):
            return float(self.owner[self.key])
        return float(getattr(self.owner, self.key))

    def write(self, number: float) -> None:
        """Put another number there, of the type of the one before.

        Args:
            number: what is written.
        """
        if isinstance(self.owner, torch.Tensor):
            with torch.no_grad():
                self.owner.fill_(number)
        elif isinstance(self.owner, types.CellType):
            self.owner.cell_contents = type(self.owner.cell_contents)(number)
        elif isinstance(self.owner, dict | list):
            self.owner[self.key] = type(self.owner[self.key])(number)
        else:
            of_type = type(getattr(self.owner, self.key))
            setattr(self.owner, self.key, of_type(number))


def counters(function: Callable[..., Any], call: Callable[[], Any]) -> list[Place]:
    """Find the numbers that grow by the same amount, above 0, in each of three calls. The
    function is called three times.

    Args:
        function: whose closures, globals, attributes and objects are searched.
        call: calls it once.

    Returns:
        Where they are; none for a function without state.
    """
    places = list(_numbers_kept(function))
    if not places:
        return []
    read = [[place.read() for place in places]]
    for _ in range(3):
        call()
        read.append([place.read() for place in places])
    out = []
    for place, first, second, third, fourth in zip(places, *read, strict=True):
        step = second - first
        if step > 0 and third - second == step and fourth - third == step:
            out.append(place)
    return out


def _numbers_kept(function: Callable[..., Any]) -> Iterator[Place]:
    """Yield every place of a number that the function can reach and change, within
    DEEPEST containers or functions. A tensor of one number that needs no gradient is one
    too.
    """
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(function, 0)]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or depth > DEEPEST:
            continue
        seen.add(id(value))
        for place, inside in _parts(value):
            if isinstance(inside, torch.Tensor):
                if inside.numel() == 1 and not inside.requires_grad:
                    yield Place(inside)
            elif not _is_number(inside):
                waiting.append((inside, depth + 1))
            elif place is not None:
                yield place


def _is_number(value: Any) -> bool:
    """Return whether a value may be a counter: a number that is no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parts(value: Any) -> Iterator[tuple[Place | None, Any]]:
    """Yield the place and the value of each thing that a value keeps. The place is None
    where it cannot be changed. Nothing is yielded for other kinds of values, such as
    objects of a library.
    """
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield None, value.__self__
        yield None, value.__func__
    elif isinstance(value, functools.partial):
        yield None, value.func
        for inside in (*value.args, *value.keywords.values()):
            yield None, inside
    elif isinstance(value, dict):
        for key, inside in list(value.items()):
            yield Place(value, key), inside
    elif isinstance(value, list):
        for i, inside in enumerate(value):
            yield Place(value, i), inside
    elif isinstance(value, tuple):
        for inside in value:
            yield None, inside
    elif _is_of_user(type(value)):
        attributes = getattr(value, "__dict__", {})
        for key, inside in list(attributes.items()):
            yield Place(value, key), inside
        if callable(value):
            yield None, type(value).__call__


def _parts_of_function(
    function: types.FunctionType,
) -> Iterator[tuple[Place | None, Any]]:
    """Yield what a function of Python keeps: its closure, its attributes, its defaults,
    and the globals that it names.
    """
    for cell in function.__closure__ or ():
        try:
            yield Place(cell), cell.cell_contents
        except ValueError:  # it is empty
            continue
    yield None, function.__dict__
    yield None, function.__defaults__
    yield None, function.__kwdefaults__
    if _is_of_user(function):
        for name in function.__code__.co_names:
            if name in function.__globals__:
                yield Place(function.__globals__, name), function.__globals__[name]


NOT_OF_USER = ("torch", "numpy", "upref", "builtins", "typing", "abc", "functools")


def _is_of_user(value: Any) -> bool:
    """Return whether a function or a class is the user's, by its module."""
    module = getattr(value, "__module__", None) or ""
    return str(module).partition(".")[0] not in NOT_OF_USER
