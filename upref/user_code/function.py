# SPDX-License-Identifier: Apache-2.0
"""A user's function, whatever it computes: how it is loaded and refused, called and
watched, and tried in one way after another.

A KL term, a log-probability function, an advantage function and a function of named
tensors are UserFunctions. A loss may be many other things than a function, such as a
trainer's class, so it has readers of its own; it shares the call and the comparison.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError, describe_kind
from upref.result import name_first
from upref.user_code.guard import call_guarded
from upref.user_code.load import load, name_of

LISTED = 6  # outputs that a report names
Way = TypeVar("Way")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Called:
    """What one call returned and did.

    Attributes:
        returned: the value itself.
        wrote: the keys of the inputs whose values it changed.
        printed: whether it printed.
    """

    returned: Any
    wrote: frozenset[str]
    printed: bool


def other_outputs(returned: Any, taken: Any) -> list[str]:
    """Say which parts of what a function returned are left aside.

    Args:
        returned: a value, a tuple or a dictionary.
        taken: the part that is compared.

    Returns:
        One item of what a report says nothing about, or none.
    """
    if returned is taken:
        return []
    if isinstance(returned, dict):
        others = [f"{key!r:.40}" for key, x in returned.items() if x is not taken]
        return [f"what else it returns, {name_first(others, LISTED)}"] if others else []
    if not isinstance(returned, tuple) or len(returned) < 2:
        return []
    if len(returned) == 2:
        return ["its second output"]
    return [f"its outputs 2 to {len(returned)}"]


class Snapshot:
    """The values of inputs before a call, to find those that the call changes.

    Args:
        inputs: tensors, arrays, lists or numbers by any key.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.inputs = inputs
        self.before = {key: _copied(x) for key, x in inputs.items()}

    def changed(self) -> frozenset[str]:
        """Return the keys of the inputs that have other values now."""
        return frozenset(
            key for key, x in self.inputs.items() if not is_same(self.before[key], x)
        )


def _copied(x: Any) -> Any:
    """Return the values of an input, which no call can change."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    return repr(x.tolist() if isinstance(x, np.ndarray) else x)


def is_same(before: Any, x: Any) -> bool:
    """Tell whether an input has the values that it had before, with NaN in the same
    places.

    Args:
        before: a copy of it.
        x: the input.
    """
    if not isinstance(x, Tensor):
        return bool(before == _copied(x))
    now = x.detach()
    if torch.equal(before, now):
        return True
    if before.shape != now.shape:
        return False
    return bool(((before == now) | (before.isnan() & now.isnan())).all())


@dataclass(frozen=True)
class UserFunction:
    """A user's function.

    Attributes:
        name: its name in reports.
        fn: the function itself.
    """

    name: str
    fn: Callable[..., Any]

    def watched(
        self,
        call: Callable[[], Any],
        inputs: Mapping[str, Any],
        passed: Mapping[str, Any],
        lines: int = 0,
    ) -> Called:
        """Call the function once, and compare its inputs before and after.

        Args:
            call: calls it on the inputs.
            inputs: that it must not write to.
            passed: what it is passed, by the names of its arguments, for messages.
            lines: the lines of Python that the call may run; 0 for any number.

        Raises:
            InputError: the function raises.
        """
        snapshot = Snapshot(inputs)
        returned, printed = call_guarded(self.name, call, lines, passed)
        return Called(returned, snapshot.changed(), printed)


def load_function(
    fn: Any, kind: str, find: Callable[[str], Any] = load
) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function of what a user gave.

    Args:
        fn: a function, or its name.
        kind: what it should be, in words with an article.
        find: from a name to the function.

    Raises:
        InputError: nothing has this name, or it is a class or no function.
    """
    name = name_of(fn)
    found = find(fn) if isinstance(fn, str) else fn
    if isinstance(found, type):
        raise InputError(f"{name} is a class, not {kind}: pass a function or its name.")
    if not callable(found):
        raise InputError(
            f"{describe_kind(found)} is not {kind}: pass a function or its name."
        )
    return name, found


def refuse_needed(name: str, needed: Iterable[str]) -> None:
    """Refuse a function that needs an argument which upref does not have.

    Args:
        name: of the function.
        needed: such arguments.

    Raises:
        InputError: there is one.
    """
    argument = next(iter(needed), None)
    if argument is not None:
        raise InputError(
            f"{name} needs {argument!r}, which upref cannot give: bind it with functools.partial."
        )


def first_that_runs(
    ways: Iterable[Way], run: Callable[[Way], Made]
) -> tuple[Way, Made]:
    """Return the first way in which a function runs, and what it made.

    Args:
        ways: such as other dtypes of its inputs, the likeliest first; at least one.
        run: runs a way.

    Raises:
        InputError: it runs in none; the error is that of the first.
    """
    errors = []
    for way in ways:
        try:
            return way, run(way)
        except InputError as error:
            errors.append(error)
    raise errors[0] from None
