# SPDX-License-Identifier: Apache-2.0
"""What is common to the names of frameworks' losses: MODE, then fields of the framework's config.

`verl:LOSS_MODE` and `trl:LOSS_TYPE` are set up as the objective's hyperparameters say. Fields may follow and overrule
that: `trl:grpo,importance_sampling_level=sequence`. With `defaults` in front of them nothing is set but they:
`trl:cispo,defaults`, `verl:vanilla,defaults,clip_ratio_c=10`.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from upref.aggregation import Totals
from upref.errors import InputError


def split(name: str, mode: str) -> tuple[str, dict[str, Any], bool]:
    """(mode, fields, whether all else stays at the framework's defaults); InputError where it cannot be read."""
    mode, *words = mode.split(",")
    plain = words[:1] == ["defaults"]
    return mode, dict(_field(name, w) for w in words[plain:]), plain


def _field(name: str, word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not (key and equals and value):
        raise InputError(f"{name}: {word!r} is not FIELD=VALUE; write e.g. trl:dapo,epsilon_high=0.28.")
    constants = {"None": None, "True": True, "False": False}
    if value in constants:
        return key, constants[value]
    for number in (int, float):
        try:
            return key, number(value)
        except ValueError:
            pass
    return key, value


def _pairs(fields: dict[str, Any]) -> list[str]:
    return [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()]


def written(mode: str, fields: dict[str, Any]) -> str:
    """The name, without its framework, of a loss at these settings and otherwise the framework's defaults."""
    return ",".join([mode, "defaults", *_pairs(fields)])


def said(fields: dict[str, Any]) -> str:
    return ", ".join(_pairs(fields)) or "its defaults"


def clip(h: dict[str, Any]) -> tuple[Any, Any]:
    """(low, high) of an objective's hyperparameters."""
    both = h.get("eps", h.get("delta"))
    return h.get("eps_low", both), h.get("eps_high", both)


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
        try:
            hp[key] = words[value] if value in words else float(value)
        except ValueError:
            raise InputError(f"--hp {pair!r} is not NAME=NUMBER.") from None
        if isinstance(hp[key], float) and not math.isfinite(hp[key]):
            raise InputError(f"--hp {pair!r} is not NAME=NUMBER: {value} is none.")
    return hp
