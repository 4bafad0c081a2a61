# SPDX-License-Identifier: Apache-2.0
"""The mutants of every registered objective, one after the other: the truth, then the
verdict.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import upref

from . import batches, judge, search
from .operators import sample
from .store import Store, digest, library, searcher
from .styles import STYLES, Config, arguments, compiled, configs, fits, write

WHOLE = 10  # every tenth mutant gets the whole report


@dataclass(frozen=True)
class Subject:
    """One loss that is to be judged."""

    config: Config
    style: str
    kind: str
    what: str
    text: str
    single: bool = False

    @property
    def key(self) -> str:
        return digest(str(self.config), self.style, self.text)

    @property
    def adv(self) -> str:
        return "B" if self.style == "trl" else "BT"

    @property
    def names(self) -> list[str]:
        return arguments(self.config, self.style)


def every_config() -> list[Config]:
    return [c for name in upref.names() for c in configs(upref.get(name))]


def of(c: Config, style: str, n: int, seed: int) -> list[Subject]:
    rng = np.random.default_rng([seed, *map(ord, f"{c}{style}")])
    # bounds that rounding moves at will
    allowed = lambda m: not (m.single and (c.o.reads_mu or c.o.batch_coupled))
    picked = sample(write(c, style), n, rng, allowed)
    return [Subject(c, style, m.kind, m.what, m.text, m.single) for m in picked]


ROUNDS = 6  # a run that is cut off has seen every objective


def subjects(
    total: int, seed: int, only: list[Config] | None = None
) -> Iterator[Subject]:
    """So many in all, as evenly as it goes over configurations and styles."""
    places = [(c, s) for c in every_config() for s in STYLES if fits(s, c)]
    counts = [
        total * (i + 1) // len(places) - total * i // len(places)
        for i in range(len(places))
    ]
    picked: dict[int, list[Subject]] = {}
    for turn in range(ROUNDS):
        for i, (c, s) in enumerate(places):
            if only is None or c in only:
                if i not in picked:
                    picked[i] = of(c, s, counts[i], seed) if counts[i] else []
                yield from picked[i][turn::ROUNDS]


def judged(
    s: Subject, scratch: Path, seed: int, nth: int = 1, *, large: int = search.BULK, few: int = search.SMALL,
    known: bool = False,
) -> dict[str, Any] | None:  # fmt: skip
    """Truth and verdict of one, kept. Without a large search no mutant is called equal
    to its objective.

    known: only what is kept already; None where it is not.
    """
    truths, verdicts = store_of(scratch, "truth"), store_of(scratch, "verdict")
    key, full = (
        digest(s.key, searcher(), str(seed), str(few), str(large)),
        nth % WHOLE == 0,
    )
    if known and key not in truths.known:
        return None

    def true() -> dict[str, Any]:
        try:
            f = compiled(s.text)
        except Exception:
            return {"kind": "stillborn", "apart": -1.0, "tokens": 0}
        return asdict(
            search.truth(
                f, s.config, s.names, s.adv, seed, few=few, large=large, single=s.single
            )
        )

    def said() -> dict[str, Any]:
        f = compiled(s.text)
        start = time.process_time()
        v = judge.verdict(f, s.config)
        row = {
            "quick": v.accepted,
            "said": v.said,
            "spent": time.process_time() - start,
            "library": library(),
        }
        if full:
            # π_old = 1 cannot be shifted
            some = batches.small(s.config, "group" in s.names, seed, 24)[:24]
            # the reference refuses a row without a token
            some = [b for b in some if b.of["mask"].any(1).all()]
            row |= asdict(judge.whole(f, s.config, some, s.names))
        return row

    t = truths.get(key, true)
    out = {"id": s.key, "config": str(s.config), "objective": s.config.o.name, "style": s.style, "operator": s.kind,
           "what": s.what, "truth": t["kind"], "apart": t["apart"], "tokens": t["tokens"]}  # fmt: skip
    if out["truth"] == "equal" and not large and s.kind != "rewriting":
        out["truth"] = "unsearched"
    if out["truth"] in ("stillborn", "unsearched"):
        return out
    key = digest(s.key, str(full))
    if known:  # whichever was asked for: parts count on their own
        keys = [digest(s.key, x) for x in ("True", "False")]
        return next(
            (out | verdicts.known[k] for k in keys if k in verdicts.known), None
        )
    # what was misjudged, or had a false cause, is judged again
    stale = lambda row: (
        bool(wrong(out | row) or row.get("true") == "no")
        and row["library"] != library()
    )
    return out | verdicts.get(key, said, stale)


_stores: dict[Path, Store] = {}


def store_of(scratch: Path, name: str) -> Store:
    path = scratch / f"{name}.jsonl"
    if path not in _stores:
        _stores[path] = Store(path)
    return _stores[path]


def wrong(row: dict[str, Any]) -> str:
    """missed, or alarm: what the checker got wrong of it; "" where it is right or
    nothing is known.
    """
    if "quick" not in row:
        return ""
    return {("differs", True): "missed", ("equal", False): "alarm"}.get(
        (row["truth"], row["quick"]), ""
    )
