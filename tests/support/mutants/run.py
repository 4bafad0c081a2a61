# SPDX-License-Identifier: Apache-2.0
"""What a run consists of, in the order in which it is done, the cheap first."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import estimators
from .losses import Subject, every_config, judged, store_of, subjects, wrong
from .rewritings import rewritings
from .store import digest, library
from .styles import Config

FIRST = 60  # small batches for what differs: most show it on the first
# of each configuration's mutants that these do not tell apart, how many go through the
# whole search
LOT = 5

__all__ = ["Draw", "rows", "wrong"]


@dataclass(frozen=True)
class Draw:
    mutants: int
    rewritings: int
    seed: int
    scratch: Path


def rows(
    plan: Draw, part: int = 0, parts: int = 1, known: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield one row for each loss that has an answer: mutants, estimators, rewritings,
    then the whole search of a few mutants that the small batches do not tell apart.

    Args:
        plan: what the run consists of.
        part, parts: judge every `parts`-th configuration from `part` on; estimators
            belong to part 0.
        known: compute nothing; yield only what is kept.
    """
    mine = every_config()[part::parts]
    unlike: list[Subject] = []
    for n, s in enumerate(subjects(plan.mutants, plan.seed, mine)):
        row = judged(s, plan.scratch, plan.seed, n, large=0, few=FIRST, known=known)
        if row is None:
            continue
        if row["truth"] == "unsearched":
            unlike.append(s)
        else:
            yield row
    for one in estimators.subjects(plan.seed) if part == 0 else ():
        if row := kept(plan, one, known):
            yield row
    for s in rewritings(plan.rewritings, plan.seed, only=mine):
        if row := judged(
            s, plan.scratch, plan.seed, 1, large=0, few=FIRST, known=known
        ):
            yield row
    for c, of in drawn(unlike, plan.seed):
        # one configuration after the other: they share the search's batches
        for nth, s in enumerate(of):
            row = None
            if nth < LOT:  # the first of them gets the whole report
                row = judged(s, plan.scratch, plan.seed, min(nth, 1), known=known)
            yield row or {"id": s.key, "truth": "unsearched", "config": str(c)}


def drawn(unlike: list[Subject], seed: int) -> Iterator[tuple[Config, list[Subject]]]:
    """Yield each configuration with its mutants: first the LOT that get the whole
    search, chosen at random, then the rest.

    Of the LOT, those without groups come first: they share batches.
    """
    by: dict[Config, list[Subject]] = {}
    for s in unlike:
        by.setdefault(s.config, []).append(s)
    for c, of in by.items():
        mixed = sorted(of, key=lambda s: digest(str(seed), s.key))
        yield c, sorted(mixed[:LOT], key=lambda s: "group" in s.names) + mixed[LOT:]


def kept(plan: Draw, one: tuple, known: bool) -> dict[str, Any] | None:
    """Return the row of one estimator, computed if it is not kept yet; with `known`,
    None instead.
    """
    store, key = store_of(plan.scratch, "estimators"), digest(one[1], one[4], library())
    if known:
        return store.known.get(key)
    return store.get(key, lambda: estimators.judged(*one, plan.seed))
