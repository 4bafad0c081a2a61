# SPDX-License-Identifier: Apache-2.0
"""A user-supplied function of several tensors as one frozen type. The names of its
arguments alone tell what it gets: no argument is filled by its position.
"""

import inspect
import itertools
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.user_code.function import Called, UserFunction, load_function
from upref.user_code.signature import parameters

Inputs = Mapping[str, Tensor]  # by role
# how a mask and prompt ids may be passed, the usual first
MASK_KINDS = ("bool", "numbers")
ID_KINDS = ("tensor", "strings")


@dataclass(frozen=True)
class Vocabulary:
    """What arguments of one kind of function are called.

    Attributes:
        kind: the kind of function, in words with an article.
        role: from a name to the input that it means, or "".
        setting: from a name to the setting that it means, or "".
        roles: the inputs that upref can pass, by the names of upref.
        masks: the inputs that are masks.
        ids: the inputs that are prompt ids.
    """

    kind: str
    role: Callable[[str], str]
    setting: Callable[[str], str]
    roles: tuple[str, ...]
    masks: tuple[str, ...] = ("mask",)
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedFunction(UserFunction):
    """A user's function whose arguments were read by their names.

    Attributes:
        roles: argument -> input.
        settings: argument -> setting.
        by_position: the arguments that can only be passed by position, in order.
        bound: arguments that the user set, which no setting means.
        required: the settings without a default.
        vocabulary: what its arguments may be called.
        mask_kind: how masks are passed, one of MASK_KINDS.
        id_kind: how prompt ids are passed, one of ID_KINDS.
        dtype: of the numbers that it gets.
    """

    roles: Mapping[str, str]
    settings: Mapping[str, str]
    by_position: tuple[str, ...]
    bound: Mapping[str, Any]
    required: frozenset[str]
    vocabulary: Vocabulary
    mask_kind: str = "bool"
    id_kind: str = "tensor"
    dtype: torch.dtype = field(default=torch.float64)

    @property
    def reads(self) -> frozenset[str]:
        """The inputs that it takes."""
        return frozenset(self.roles.values())

    @property
    def takes(self) -> frozenset[str]:
        """The settings that it takes."""
        return frozenset(self.settings.values())

    @property
    def read_as(self) -> str:
        """The arguments whose name is not upref's, with what they get."""
        both = {**self.roles, **self.settings}
        return "; ".join(f"{p} -> {r}" for p, r in both.items() if p != r)

    def kinds(self) -> Iterable["NamedFunction"]:
        """Yield the function with each way in which its inputs may be passed, float64
        before float32, and then the usual one first.
        """
        has_mask = bool(self.reads & set(self.vocabulary.masks))
        has_ids = bool(self.reads & set(self.vocabulary.ids))
        ways = itertools.product(
            (torch.float64, torch.float32),
            MASK_KINDS if has_mask else MASK_KINDS[:1],
            ID_KINDS if has_ids else ID_KINDS[:1],
        )
        for dtype, mask_kind, id_kind in ways:
            yield replace(self, dtype=dtype, mask_kind=mask_kind, id_kind=id_kind)

    def __call__(self, inputs: Inputs, settings: Mapping[str, Any]) -> Called:
        """Call the function once.

        Args:
            inputs: tensors by role; those that it does not take are not passed.
            settings: by name; those that it does not take are not passed.

        Returns:
            What it returned and did; the inputs by the names of its arguments.

        Raises:
            InputError: it raised; the message has what was passed.
        """
        given = {p: self._passed(r, inputs[r]) for p, r in self.roles.items()}
        values = {p: settings[s] for p, s in self.settings.items() if s in settings}
        by_name = {**given, **values, **self.bound}
        by_place = [by_name.pop(p) for p in self.by_position if p in by_name]
        return self.watched(
            lambda: self.fn(*by_place, **by_name),
            given,
            {**given, **values, **self.bound},
        )

    def _passed(self, role: str, x: Tensor) -> Any:
        """Return an input as the function takes it."""
        if role in self.vocabulary.masks and self.mask_kind == "numbers":
            return x.to(self.dtype)
        if role in self.vocabulary.ids and self.id_kind == "strings":
            return np.array([f"prompt-{i}" for i in x.tolist()], dtype=object)
        if x.is_floating_point():
            return x.to(self.dtype).clone()  # no leaf: it may be written to
        return x.clone()


def read(
    fn: Any,
    vocabulary: Vocabulary,
    required: Iterable[str],
    hp: Mapping[str, Any],
    own: Container[str],
) -> NamedFunction:
    """Read the arguments of a function by their names.

    Args:
        fn: the function, or its name.
        vocabulary: what its arguments may be called.
        required: the inputs that it must take.
        hp: settings that the user gave, by upref's names or by the function's own.
        own: the settings of the formula that it is compared with.

    Returns:
        The function, in the first way in which inputs may be passed.

    Raises:
        InputError: an argument without a default has an unknown name, two arguments
            mean one input, or one that is required is missing.
    """
    name, fn = load_function(fn, vocabulary.kind)
    roles: dict[str, str] = {}
    settings: dict[str, str] = {}
    bound: dict[str, Any] = {}
    by_position = []
    required_settings = set()
    for p in parameters(fn):
        if p.kind is p.VAR_KEYWORD:
            continue
        role = vocabulary.role(p.name)
        setting = vocabulary.setting(p.name)
        if p.name in hp and setting not in own:
            bound[p.name] = hp[p.name]
        elif setting:
            settings[p.name] = setting
            if p.default is p.empty:
                required_settings.add(setting)
        elif role and p.kind is not p.VAR_POSITIONAL:
            roles[p.name] = role
        elif p.default is p.empty:
            raise InputError(_unknown(name, p, vocabulary))
        if p.kind is p.POSITIONAL_ONLY:
            by_position.append(p.name)
    _refuse_doubles(name, roles, vocabulary)
    if missing := [role for role in required if role not in roles.values()]:
        has = ", ".join(f"{p} ({r})" for p, r in roles.items()) or "none that is known"
        raise InputError(
            f"{name}: no argument is called {missing[0]} or the like (read: {has}). {_names(vocabulary)}"
        )
    return NamedFunction(
        name,
        fn,
        roles,
        settings,
        tuple(by_position),
        bound,
        frozenset(required_settings),
        vocabulary,
    )


def _refuse_doubles(
    name: str, roles: Mapping[str, str], vocabulary: Vocabulary
) -> None:
    """Raise InputError if two arguments mean one input."""
    for role in vocabulary.roles:
        same = [p for p, r in roles.items() if r == role]
        if len(same) > 1:
            raise InputError(
                f"{name}: {' and '.join(same)} both mean {role}: rename one. {_names(vocabulary)}"
            )


def _unknown(name: str, p: inspect.Parameter, vocabulary: Vocabulary) -> str:
    """Return the message that the name of an argument is not known, and what to do."""
    star = "*" if p.kind is p.VAR_POSITIONAL else ""
    return (
        f"{name}: what is {star}{p.name}? Arguments of {vocabulary.kind} are read by their names alone. "
        f"{_names(vocabulary)} Rename it, write a wrapper, or bind a value: `--hp {p.name}=VALUE`."
    )


def _names(vocabulary: Vocabulary) -> str:
    """Return a sentence with the names that are known."""
    return f"The names are {', '.join(vocabulary.roles)} and their usual variants."
