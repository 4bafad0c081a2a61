# SPDX-License-Identifier: Apache-2.0
"""Known faults as records, of every kind of function. A file in this folder that holds
a Catalogue adds to them.
"""

import heapq
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from upref.verify.finding import Cause
from upref.verify.oracle import discover

C = TypeVar("C")
F = TypeVar("F", bound="Fault[Any]")
M = TypeVar("M")
LAST = 1_000_000  # the rank of a fault that has none of its own


@dataclass(frozen=True)
class Fault(Generic[C]):
    """A known fault. A check names it where the reference with this change has the
    function's very numbers.

    Attributes:
        words: what is done otherwise than by the reference. No decision is taken on the
            words.
        change: what it makes of the reference: losses.Change, advantages.AdvantageChange,
            logprobs.Stages, a KL formula, a forward pass of a training step, or the
            function that an exercise of the course expects.
        kind: what it changes, one of losses.KINDS; "" where nothing depends on it.
        applies_to: the functions that it is a fault of, by name; () for all.
        meant: the objective that its author had in mind, where that is another than the
            one it comes nearest to.
        whole: a few rows of a batch do not show it.
        hint: what to tell a student who made it.
        rank: of two faults that give the same numbers, the one of the lower rank is
            named; of one rank, the one that its table has first.
        id: a name that never changes, by which programs tell faults apart. Faults of
            several kinds of function have one id where they are one mistake. "" of
            what is known of one framework alone.
        beside: the id of a second fault, which is made together with it.
    """

    words: str
    change: C
    kind: str = ""
    applies_to: tuple[str, ...] = ()
    meant: str = ""
    whole: bool = False
    hint: str = ""
    rank: int = LAST
    id: str = ""
    beside: str = ""

    @property
    def cause(self) -> Cause:
        """What a finding says of it."""
        return Cause(self.words, tuple(filter(None, (self.id, self.beside))))


@dataclass(frozen=True)
class Catalogue:
    """Faults of one kind of function: of "losses", "advantages", "kl" or "logprobs".

    faults takes what the module of that name passes to `known`: of losses, the
    objective, its hyperparameters and the bounds at which a wrong loss was seen to
    change; of log-probabilities, the problem; of the others, nothing.
    """

    function: str
    faults: Callable[..., Iterable[Fault[Any]]]


# what ids call the tokens of which A is so
SIGN_IDS = {
    "A > 0": "a-positive",
    "A < 0": "a-negative",
    "A <= 0": "a-not-positive",
    "A is not 0": "a-not-zero",
}


def hyperparameter_id(*names: str) -> str:
    """Return the id of the fault that these hyperparameters have other values, such as
    "other-eps-low-eps-high".

    Args:
        *names: of hyperparameters.
    """
    return f"other-{'-'.join(names).replace('_', '-')}"


def known(function: str, *given: Any) -> Iterator[Fault[Any]]:
    """Yield all faults of that kind of function, in the order of their ranks: those of
    the module of this name, and those of the Catalogues of other files.

    Args:
        function: losses, advantages, kl or logprobs.
        *given: what that module's `known` takes: the objective, its hyperparameters and
            bounds at which a wrong loss was seen to change; or a problem; or nothing.
    """
    own = import_module(f"{__name__}.{function}").known(*given)
    others = [
        catalogue.faults(*given)
        for catalogue in discover(sys.modules[__name__], Catalogue)
        if catalogue.function == function
    ]
    return heapq.merge(own, *others, key=lambda fault: fault.rank)


def fitting(faults: Iterable[F], fit: Callable[[F], M | None]) -> Iterator[tuple[F, M]]:
    """Yield the faults that give the numbers found.

    Args:
        faults: in the order in which they are tried, as `known` yields them.
        fit: tries a fault. It returns how the fault fits, None where it does not.

    Returns:
        Each fault that fits, and how.
    """
    for candidate in faults:
        how = fit(candidate)
        if how is not None:
            yield candidate, how


def first_fitting(faults: Iterable[F], fits: Callable[[F], bool]) -> F | None:
    """Return the first fault that gives the numbers found, None where none does.

    Args:
        faults: in the order in which they are tried, as `known` yields them.
        fits: whether a fault gives these numbers.
    """
    found = fitting(faults, lambda candidate: fits(candidate) or None)
    return next((candidate for candidate, _ in found), None)
