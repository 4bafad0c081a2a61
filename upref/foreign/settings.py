# SPDX-License-Identifier: Apache-2.0
"""The names of frameworks' losses, and what they set: `FRAMEWORK:MODE[@matched][,FIELD=VALUE...]`.

`verl:vanilla` is the loss as the framework ships it. Fields of its config may follow: `verl:vanilla,clip_ratio_c=10`.
`verl:vanilla@matched` sets what the objective's hyperparameters call for; fields after it overrule that.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from upref.aggregation import Totals
from upref.errors import InputError


def split(name: str, mode: str) -> tuple[str, dict[str, Any], bool]:
    """(mode, fields, whether `@matched` follows the mode); InputError where it cannot be read.

    `defaults`, the word that once asked for the loss as shipped, is still accepted before the fields.
    """
    mode, *words = mode.split(",")
    mode, at, word = mode.partition("@")
    if at and word != "matched":
        raise InputError(f"{name}: {word!r} is unknown; write {mode} for the loss as shipped, or {mode}@matched.")
    old = words[:1] == ["defaults"]
    if at and old:
        raise InputError(f"{name}: leave `defaults` out of a matched loss.")
    return mode, dict(_field(name, w) for w in words[old:]), bool(at)


def _field(name: str, word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not (key and equals and value):
        raise InputError(f"{name}: {word!r} is not FIELD=VALUE; write e.g. trl:dapo,epsilon_high=0.28.")
    constants = {"None": None, "True": True, "False": False}
    if value in constants:
        return key, constants[value]
    number = _number(value)
    return key, value if number is None else number


def _number(text: str) -> int | float | None:
    """A whole number as an int, as a call from Python has it; None where the text is no number."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None


def _pairs(fields: dict[str, Any]) -> list[str]:
    return [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()]


def written(mode: str, fields: dict[str, Any]) -> str:
    """The name, without its framework, of a loss as shipped but for these fields."""
    return ",".join([mode, *_pairs(fields)])


def describe_fields(fields: dict[str, Any], shipped: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The fields in words, each with its shipped value where that is known and another."""
    out = []
    for key, value in fields.items():
        (pair,) = _pairs({key: value})
        if key in shipped and shipped[key] != value:
            pair += f" (shipped: {_pairs({key: shipped[key]})[0].partition('=')[2]})"
        out.append(pair)
    return ", ".join(out) or "its defaults"


def clip(h: dict[str, Any]) -> tuple[Any, Any]:
    """(low, high) of an objective's hyperparameters."""
    both = h.get("eps", h.get("delta"))
    return h.get("eps_low", both), h.get("eps_high", both)


@dataclass(frozen=True)
class Shipped:
    """What a framework's loss, bound as a plain function, keeps in `__upref__`: how it was set up."""

    fields: dict[str, Any]
    defaults: dict[str, Any]
    plain: Callable[..., Any] | None = None  # the same loss as shipped, where it was matched


@dataclass
class Bare:
    """What frameworks' losses read of Rollouts, unvalidated: masked slots may be poisoned, tensors on a tape."""

    logp: Tensor
    logp_old: Tensor
    adv: Tensor
    mask: Tensor
    totals: Totals
    logp_ref: Tensor | None = None
    entropy: Tensor | None = None


def hyperparameters(pairs: list[str]) -> dict[str, Any]:
    """`--hp NAME=NUMBER` of a command line; InputError where one is not that."""
    words = {"None": None, "True": True, "False": False}
    hp: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        number = _number(value)
        if number is None and value not in words:
            raise InputError(f"--hp {pair!r} is not NAME=NUMBER.")
        if number is not None and not math.isfinite(number):
            raise InputError(f"--hp {pair!r} is not NAME=NUMBER: {value} is none.")
        hp[key] = words[value] if number is None else number
    return hp
