# SPDX-License-Identifier: Apache-2.0
"""The names of frameworks' losses, and what they set:
`FRAMEWORK:MODE[@matched][,FIELD=VALUE...]`.

`verl:vanilla` is the loss as the framework ships it. Fields of its config may follow:
`verl:vanilla,clip_ratio_c=10`. `verl:vanilla@matched` sets what the objective's
hyperparameters call for; fields after it overrule that.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from upref.aggregation import Totals
from upref.cli.verb import parse_number
from upref.errors import InputError


def split_name(name: str, mode: str) -> tuple[str, dict[str, Any], bool]:
    """Split what follows the colon of a loss's name into mode and fields.

    `defaults`, the word that once meant the loss as shipped, is still accepted before
    the fields.

    Args:
        name: the whole name, for messages.
        mode: `MODE[@matched][,FIELD=VALUE...]`.

    Returns:
        (mode, field -> value, whether `@matched` follows the mode). Values are numbers,
        True, False, None or text.

    Raises:
        InputError: it cannot be read.
    """
    mode, *words = mode.split(",")
    mode, separator, word = mode.partition("@")
    if separator and word != "matched":
        raise InputError(
            f"{name}: {word!r} is unknown; write {mode} for the loss as shipped, or {mode}@matched."
        )
    old = words[:1] == ["defaults"]
    if separator and old:
        raise InputError(f"{name}: leave `defaults` out of a matched loss.")
    return mode, dict(_field(name, w) for w in words[old:]), bool(separator)


def _field(name: str, word: str) -> tuple[str, Any]:
    """Split FIELD=VALUE; return the field, and the value as None, True, False, a
    number, or else text. Raise InputError where one of the two is empty.
    """
    key, equals, value = word.partition("=")
    if not (key and equals and value):
        raise InputError(
            f"{name}: {word!r} is not FIELD=VALUE; write e.g. trl:dapo,epsilon_high=0.28."
        )
    constants = {"None": None, "True": True, "False": False}
    if value in constants:
        return key, constants[value]
    number = parse_number(value)
    return key, value if number is None else number


def clip_bounds(hp: dict[str, Any]) -> tuple[Any, Any]:
    """Return the two distances of an objective's clip bounds from a ratio of 1.

    Args:
        hp: its hyperparameters.

    Returns:
        (low, high): eps_low and eps_high, each in its absence eps or delta; None where
        there is neither.
    """
    width = hp.get("eps", hp.get("delta"))
    return hp.get("eps_low", width), hp.get("eps_high", width)


@dataclass
class Bare:
    """What frameworks' losses read of Rollouts, unvalidated: masked slots may hold NaN,
    and tensors may be part of autograd's graph.
    """

    logp: Tensor
    logp_old: Tensor
    adv: Tensor
    mask: Tensor
    totals: Totals
    logp_ref: Tensor | None = None
    entropy: Tensor | None = None
