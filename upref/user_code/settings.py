# SPDX-License-Identifier: Apache-2.0
"""How a framework's loss was set up, and its fields in words."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


def pairs(fields: dict[str, Any]) -> list[str]:
    """Write settings as text.

    Args:
        fields: values by name.

    Returns:
        `name=value` each, floats in six digits.
    """
    return [
        f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()
    ]


def describe_fields(
    fields: dict[str, Any],
    defaults: Mapping[str, Any] = MappingProxyType({}),
    called: str = "shipped",
) -> str:
    """Write fields in words, each with its default where that is known and differs.

    Args:
        fields: name -> value.
        defaults: of the framework.
        called: what a default is called.

    Returns:
        Words.
    """
    parts = []
    for key, value in fields.items():
        (pair,) = pairs({key: value})
        if key in defaults and defaults[key] != value:
            pair += f" ({called}: {pairs({key: defaults[key]})[0].partition('=')[2]})"
        parts.append(pair)
    return ", ".join(parts) or "its defaults"


@dataclass(frozen=True)
class Shipped:
    """What a framework's loss, bound as a plain function, keeps in `__upref__`: how it
    was set up.
    """

    fields: dict[str, Any]
    defaults: dict[str, Any]
    # the same loss as shipped, where it was matched
    plain: Callable[..., Any] | None = None
