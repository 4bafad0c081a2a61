# SPDX-License-Identifier: Apache-2.0
"""A case of the set: a function, what it is meant as, and what is wrong with it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CASES: dict[str, "Case"] = {}


@dataclass(frozen=True)
class Case:
    """A function and the truth about it.

    part: tokens, kept, distillation or critics: a section of the page. target: what it
    is compared with. fault: what is wrong, "" if right. cause: a regular expression for
    the words of a true cause. agg and hp: what the check is told.
    """

    id: str
    part: str
    function: Callable[..., Any]
    target: str
    fault: str = ""
    cause: str = ""
    agg: str = ""
    hp: dict[str, Any] = field(default_factory=dict)


def _add(function: Any, **facts: Any) -> Any:
    """Add a function to CASES under its own name, and return it.

    Raises:
        ValueError: two cases have one name.
    """
    name = function.__name__
    if name in CASES:
        raise ValueError(f"two cases are called {name}")
    part = function.__module__.rpartition(".")[2]
    CASES[name] = Case(name, part, function, **facts)
    return function


def wrong(
    target: str, fault: str, cause: str, *, agg: str = "", **hp: Any
) -> Callable[[Any], Any]:
    """Return a decorator that adds a wrong function."""

    def add(function: Any) -> Any:
        return _add(function, target=target, fault=fault, cause=cause, agg=agg, hp=hp)

    return add


def right(target: str, *, agg: str = "", **hp: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds a right function."""

    def add(function: Any) -> Any:
        return _add(function, target=target, agg=agg, hp=hp)

    return add
