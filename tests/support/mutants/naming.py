# SPDX-License-Identifier: Apache-2.0
"""The same for identify: what it calls a loss whose truth is known."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import upref
from upref.errors import InputError
from upref.identification.identification import Match

from .judge import verdict
from .losses import Subject, every_config, of, store_of
from .rewritings import rewritings
from .search import truth
from .store import digest, library, searcher
from .styles import STYLES, Config, compiled, fits

# batches of the search: enough for whether it differs, and for equal where the text
# keeps the meaning
FEW = 60


@dataclass(frozen=True)
class Named:
    """right: as the package says. said: what identify answered."""

    right: bool
    said: str
    seconds: float = 0.0


def named(loss: Callable, c: Config, kind: str) -> Named:
    """equal: the objective, or one of its gradient, is to be named. differs: it is not,
    and a given name holds.
    """
    start = time.process_time()
    try:
        who = upref.identify(loss)
    except InputError as e:
        return Named(
            kind == "differs", f"refused: {e}"[:200], time.process_time() - start
        )
    seconds = time.process_time() - start
    claimed = (
        [m for m in who.matches if m.own] if who.kind in ("objective", "up") else []
    )
    here = any(_is(m, c) for m in claimed)
    said = str(who).splitlines()[0][:200]
    if kind == "equal":  # by its name, or by another of the same gradient
        return Named(
            here or (bool(claimed) and _holds(loss, claimed[0])), said, seconds
        )
    return Named(not here and (not claimed or _holds(loss, claimed[0])), said, seconds)


def _same(x: float | None, y: float | None) -> bool:
    """Return whether two hyperparameters are equal to six digits, or both None."""
    if x is None or y is None:
        return x is y
    return x == y or abs(x - y) <= 1e-6 * max(1.0, abs(y))


def _is(m: Match, c: Config) -> bool:
    """The objective at its hyperparameters; those without effect are not among the
    match's.
    """
    want = c.all_hp
    return m.name == c.o.name and all(
        _same(v, want.get(k))
        for k, v in m.hp.items()
        if k != "beta" or v or want.get(k)
    )


def _holds(loss: Callable, m: Match) -> bool:
    """Whether check agrees with the name, at the digits that identify prints."""
    hp = {
        k: float(f"{v:.7g}")
        for k, v in m.hp.items()
        if v is not None and (k != "beta" or v)
    }
    return verdict(loss, Config(upref.get(m.name), tuple(hp.items()))).accepted


def subjects(total: int, seed: int) -> Iterator[Subject]:
    """So many mutants, over all configurations and styles, and half as many rewritings."""
    places = [(c, s) for c in every_config() for s in STYLES if fits(s, c)]
    for i in np.random.default_rng([seed, 8]).permutation(len(places))[:total]:
        yield from of(*places[i], 1, seed + 1)
    yield from rewritings(total // 2, seed + 1, compiled=0)


def rows(
    total: int, seed: int, scratch: Path, known: bool = False
) -> Iterator[dict[str, Any]]:
    store = store_of(scratch, "named")
    for s in subjects(total, seed):
        key = digest(s.key, searcher(), str(seed))
        if known and key not in store.known:
            continue
        yield store.get(
            key,
            lambda s=s: _row(s, seed),
            lambda row: not row["right"] and row["library"] != library(),
        )  # type: ignore[misc]


def _row(s: Subject, seed: int) -> dict[str, Any]:
    row = {
        "config": str(s.config),
        "style": s.style,
        "operator": s.kind,
        "what": s.what,
        "library": library(),
    }
    try:
        f = compiled(s.text)
        kind = truth(
            f, s.config, s.names, s.adv, seed, few=FEW, large=0, single=s.single
        ).kind
    except Exception:
        kind = "stillborn"
    if kind == "equal" and s.kind != "rewriting":
        kind = "unsearched"
    if kind not in ("equal", "differs"):
        return row | {"truth": kind, "right": True, "said": ""}
    n = named(f, s.config, kind)
    return row | {"truth": kind, "right": n.right, "said": n.said, "seconds": n.seconds}
