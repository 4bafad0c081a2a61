# SPDX-License-Identifier: Apache-2.0
"""What `identify` calls a loss whose truth is known."""

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
    """An answer of `identify`. right: whether it is right, as the head of this module
    has it. said: the first line of the answer. seconds: of CPU.
    """

    right: bool
    said: str
    seconds: float = 0.0


def named(loss: Callable, c: Config, kind: str) -> Named:
    """Put a loss to `identify`, and return whether the answer is right.

    For kind "equal", it is right if it names the objective, or another that check
    accepts. For "differs", it is right if it does not name the objective, and any name
    that it gives is one that check accepts. A refusal is right only for "differs".
    """
    start = time.process_time()
    try:
        who = upref.identify(loss)
    except InputError as e:
        return Named(
            kind == "differs", f"refused: {e}"[:200], time.process_time() - start
        )
    seconds = time.process_time() - start
    claimed = []
    if who.kind in ("objective", "up"):
        claimed = [m for m in who.matches if m.own]
    names_it = any(_is(m, c) for m in claimed)
    if kind == "equal":  # by its name, or by another of the same gradient
        right = names_it or (bool(claimed) and _holds(loss, claimed[0]))
    else:
        right = not names_it and (not claimed or _holds(loss, claimed[0]))
    return Named(right, str(who).splitlines()[0][:200], seconds)


def _same(x: float | None, y: float | None) -> bool:
    """Return whether two hyperparameters are equal to six digits, or both None."""
    if x is None or y is None:
        return x is y
    return x == y or abs(x - y) <= 1e-6 * max(1.0, abs(y))


def _is(m: Match, c: Config) -> bool:
    """Return whether a match is this objective at these hyperparameters, to six digits;
    those that the match leaves out are not compared.
    """
    if m.name != c.o.name:
        return False
    want = c.all_hp
    for name, value in m.hp.items():
        # a beta of None and one of 0 both mean that there is no KL term
        if name == "beta" and not value and not want.get(name):
            continue
        if not _same(value, want.get(name)):
            return False
    return True


def _holds(loss: Callable, m: Match) -> bool:
    """Return whether check accepts the loss as the match's objective, with
    hyperparameters at the seven digits that identify prints.
    """
    hp = {}
    for name, value in m.hp.items():
        if value is None or (name == "beta" and not value):
            continue  # a term that is switched off
        hp[name] = float(f"{value:.7g}")
    return verdict(loss, Config(upref.get(m.name), tuple(hp.items()))).accepted


def subjects(total: int, seed: int) -> Iterator[Subject]:
    """Yield one mutant each of up to `total` random pairs of configuration and style,
    then half as many rewritings.
    """
    places = [(c, s) for c in every_config() for s in STYLES if fits(s, c)]
    for i in np.random.default_rng([seed, 8]).permutation(len(places))[:total]:
        yield from of(*places[i], 1, seed + 1)
    yield from rewritings(total // 2, seed + 1, compiled=0)


def rows(
    total: int, seed: int, scratch: Path, known: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a row for each subject, with the answers that are kept. A wrong answer of
    another library is computed anew. With `known`, skip the subjects that have no
    answer yet.
    """
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
    """Return one subject's truth, and what `identify` says of it.

    The row of a subject that is neither equal nor different counts as right, and
    `identify` is not called. A mutant (not a rewriting) that does not differ is
    "unsearched": the search has only FEW small batches here.
    """
    row = {
        "config": str(s.config),
        "style": s.style,
        "operator": s.kind,
        "what": s.what,
        "library": library(),
    }
    size = {"few": FEW, "large": 0}
    try:
        f = compiled(s.text)
        kind = truth(f, s.config, s.names, s.adv, seed, **size, single=s.single).kind
    except Exception:
        kind = "stillborn"
    if kind == "equal" and s.kind != "rewriting":
        kind = "unsearched"
    if kind not in ("equal", "differs"):
        return row | {"truth": kind, "right": True, "said": ""}
    n = named(f, s.config, kind)
    return row | {"truth": kind, "right": n.right, "said": n.said, "seconds": n.seconds}
