# SPDX-License-Identifier: Apache-2.0
"""A case of the set: a function, what it is meant as, and whether it is right."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CASES: dict[str, "Case"] = {}


@dataclass(frozen=True)
class Case:
    """A function and the truth about it.

    kind: loss, box, advantage, kl or logprobs. target: what it is compared with; of a
    box, what identify should answer. fault: what is wrong in one sentence; "" if right.
    aimed: written from a reading of the batches. shows: "gradient" if a private batch
    of truth.py shows the fault, else what it takes.
    """

    id: str
    kind: str
    function: Callable[..., Any]
    target: str
    fault: str
    aimed: bool = False
    shows: str = "gradient"
    hp: dict[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether the function is what it is meant as."""
        return not self.fault


def case(
    kind: str,
    target: str,
    fault: str = "",
    *,
    aimed: bool = False,
    shows: str = "gradient",
    **hp: Any,
) -> Callable[[Any], Any]:
    """Return a decorator that adds a function, or an object, to the set under its own
    name, and returns it.

    Raises:
        ValueError: two cases have one name.
    """

    def add(function: Any) -> Any:
        name = getattr(function, "__name__", type(function).__name__)
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = Case(name, kind, function, target, fault, aimed, shows, hp)
        return function

    return add


def wrong(target: str, fault: str, **more: Any) -> Callable[[Any], Any]:
    """Decorator: a wrong loss."""
    return case("loss", target, fault, **more)


def right(target: str, **hp: Any) -> Callable[[Any], Any]:
    """Decorator: a right loss."""
    return case("loss", target, **hp)


def aimed(
    target: str, fault: str, shows: str = "by hand", **hp: Any
) -> Callable[[Any], Any]:
    """Return a decorator that adds a wrong loss that was written to slip through."""
    return case("loss", target, fault, aimed=True, shows=shows, **hp)
