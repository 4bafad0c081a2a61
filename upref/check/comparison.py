# SPDX-License-Identifier: Apache-2.0
"""What the audit compares and what it finds: a framework's loss, its promise, the reasons and the row of the table."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from upref.check.frameworks import written
from upref.registry import Objective, get
from upref.rollouts import Rollouts

TOL = 1e-7
MICRO = 8


@dataclass(frozen=True)
class Reason:
    """What a framework does otherwise: words, and a change to the reference, to the batch or to the gradient."""

    words: str
    objective: str | Objective | None = None
    hp: dict[str, Any] = field(default_factory=dict)
    agg: str | None = None
    view: Callable[[Rollouts], Rollouts] = lambda b: b
    scale: Callable[[Rollouts], Tensor | float] = lambda b: 1.0
    term: Callable[[Rollouts], Tensor] | None = None  # added to J
    # tokens too near to a bound that rounding moves
    skip: Callable[[Rollouts], Tensor] = lambda b: torch.zeros_like(b.mask)


@dataclass(frozen=True)
class Comparison:
    """A framework's loss with these fields of its config, the objective it is held against, why they differ."""

    setting: str  # default | paper
    mode: str
    config: dict[str, Any]
    objective: str
    hp: dict[str, Any]
    reasons: tuple[Reason, ...] = ()
    one_adv: bool = False  # it takes one advantage per response

    @property
    def label(self) -> str:
        """As `upref check FRAMEWORK:LABEL` reads it."""
        return written(self.mode, self.config)

    @property
    def promise(self) -> str:
        return self.objective + "".join(f", {k}={v:g}" for k, v in self.hp.items())


def with_hp(**hp: float) -> Reason:
    return Reason(", ".join(f"{k} = {v:g}" for k, v in hp.items()), hp=hp)


def aggregated(name: str) -> Reason:
    return Reason(f"aggregated by {name}", agg=name)


GROUPS = Reason("one denominator for the batch, not one per prompt", view=lambda b: replace(b, group=None))


@dataclass(frozen=True)
class Spot:
    """A token on which two gradients differ most: its regime, and its weight dJ_t/dlp by the one and by the other.

    Differences are relative to max(1, |expected|). Tokens within |log r| <= 5 go before the farther ones.
    """

    difference: float
    where: str
    expected: float
    found: float

    @property
    def weights(self) -> tuple[str, str]:
        """Expected and found, with as many digits as tell them apart."""
        for digits in (4, 8, 12):
            both = f"{self.expected:.{digits}g}", f"{self.found:.{digits}g}"
            if both[0] != both[1]:
                break
        return both

    def __str__(self) -> str:
        return f"{self.where}: {' -> '.join(self.weights)}"


@dataclass(frozen=True)
class Row:
    """One comparison: the difference before any reason, the change each reason makes, the difference after all."""

    setting: str
    mode: str
    label: str
    objective: str
    promise: str
    command: str
    micro_batches: int
    difference: float
    spot: Spot
    reasons: list[tuple[str, Spot]]
    remains: float

    @property
    def agrees(self) -> bool:
        return self.difference <= TOL

    @property
    def ok(self) -> bool:
        """Agrees, or differs for reasons that leave no difference."""
        return self.remains <= TOL

    @property
    def verdict(self) -> str:
        if self.agrees:
            return "agrees exactly" if self.difference == 0 else f"agrees to {self.difference:.0e}"
        return "differs, explained" if self.ok else "differs, UNEXPLAINED"


def accounted(c: Comparison, reasons: tuple[Reason, ...]) -> tuple[Objective, dict[str, Any]]:
    """The objective and hyperparameters that these reasons leave."""
    o, hp = get(c.objective), c.hp
    for why in reasons:
        if why.objective:
            o, hp = get(why.objective) if isinstance(why.objective, str) else why.objective, why.hp
        else:
            hp = hp | why.hp
    return o, hp
