# SPDX-License-Identifier: Apache-2.0
"""The mutants of every registered objective, one after the other: the truth of each,
then the checker's verdict.

A *row* is a dict about one subject. Always: id, config, objective, style, operator (the
kind of slip, or "rewriting"), what (the slip, or the kinds of rewriting), truth, apart
(the largest relative difference) and tokens (those that the search compared). With a
verdict: quick (accepted up to the first failure), said (that failure), spent (CPU
seconds) and library. With the whole report: accepted, seconds, cause, and true, which
says whether the cause is ("yes", "no", or "" if it is no change of the objective). Of a
missed loss: overflow.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import upref

from . import batches, judge, search
from .operators import Mutant, sample
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
        """Return the digest that identifies the subject: of its configuration, style
        and text.
        """
        return digest(str(self.config), self.style, self.text)

    @property
    def adv(self) -> str:
        """Return the shape of the advantages that its style takes: "B" in the style of
        TRL, else "BT".
        """
        return "B" if self.style == "trl" else "BT"

    @property
    def names(self) -> list[str]:
        return arguments(self.config, self.style)


def every_config() -> list[Config]:
    """Return every registered objective at its defaults, and at other hyperparameters
    where it has some.
    """
    return [c for name in upref.names() for c in configs(upref.get(name))]


def of(c: Config, style: str, n: int, seed: int) -> list[Subject]:
    """Return up to n mutants of one configuration in one style.

    Without those that compute a part in float32, where the objective reads π_old or
    couples the batch: there rounding decides on which side of a bound a token is.
    """
    rng = np.random.default_rng([seed, *map(ord, f"{c}{style}")])
    # bounds that rounding moves at will
    rounding_decides = c.o.reads_mu or c.o.batch_coupled

    def allowed(m: Mutant) -> bool:
        """Return whether rounding does not decide what the mutant computes."""
        return not (m.single and rounding_decides)

    picked = sample(write(c, style), n, rng, allowed)
    return [Subject(c, style, m.kind, m.what, m.text, m.single) for m in picked]


ROUNDS = 6  # a run that is cut off has seen every objective


def subjects(
    total: int, seed: int, only: list[Config] | None = None
) -> Iterator[Subject]:
    """Yield about `total` mutants in all, spread evenly over the configurations and
    styles.

    They come in ROUNDS rounds over all configurations, so that a run that is cut off
    has judged some of each. With `only`, those configurations alone are yielded, each
    with the share that it has of the whole.
    """
    places = [(c, s) for c in every_config() for s in STYLES if fits(s, c)]
    # the first i places together have total * i / len(places) mutants, rounded down
    until = [total * i // len(places) for i in range(len(places) + 1)]
    picked: dict[int, list[Subject]] = {}
    for turn in range(ROUNDS):
        for i, (c, style) in enumerate(places):
            if only is not None and c not in only:
                continue
            if i not in picked:
                count = until[i + 1] - until[i]
                picked[i] = of(c, style, count, seed) if count else []
            yield from picked[i][turn::ROUNDS]


def differs_by_overflow_alone(
    loss: Callable[..., Tensor], s: Subject, seed: int, few: int
) -> bool:
    """Return whether the loss differs only by NaN where exp(log r) overflows.

    The checker notes such a loss and accepts it: see docs/what-check-sees.md.

    Args:
        loss: the function that the subject's text defines.
        s: the subject.
        seed: of the search's batches.
        few: how many small batches are compared.
    """
    dtype = torch.float32 if s.single else torch.float64
    overflow = math.log(torch.finfo(dtype).max) - 1
    for b in batches.small(s.config, "group" in s.names, seed, few):
        if s.adv == "B" and not b.one_adv:
            continue
        if not b.far:
            if search.apart(loss, s.config, b, s.names, s.adv, s.single) > search.OTHER:
                return False
            continue
        gradient = search.gradient(loss, s.config, b, s.names, s.adv)
        log_r = torch.where(b.of["mask"], b.of["log_prob"] - b.of["old_log_prob"], 0)
        largest = torch.maximum(log_r.amax(-1), log_r.sum(-1))
        overflows = (largest > overflow)[:, None] & gradient.isnan()
        off = (gradient.double() - b.g).abs() / b.scale.clamp(min=1e-300)
        differs = off.nan_to_num(nan=math.inf) > search.OTHER
        compared = ~b.of["mask"] | (b.scale > 0)
        if bool((differs & compared & ~overflows).any()):
            return False
    return True


def judged(
    s: Subject, scratch: Path, seed: int, nth: int = 1, *, large: int = search.BULK, few: int = search.SMALL,
    known: bool = False,
) -> dict[str, Any] | None:  # fmt: skip
    """Return the row of one mutant or rewriting: its truth and its verdict, which are
    kept in the scratch folder.

    Args:
        s: the mutant or rewriting.
        scratch: the folder of the answers.
        seed: of the search.
        nth: where it is divisible by WHOLE, the whole report is made too.
        large: how many large batches the search has. With 0, a mutant that does not
            differ is called "unsearched", not "equal".
        few: how many small batches.
        known: use only answers that are kept; return None where there is none.

    A "stillborn" or "unsearched" row has no verdict.
    """
    truths, verdicts = store_of(scratch, "truth"), store_of(scratch, "verdict")
    truth_key = digest(s.key, searcher(), str(seed), str(few), str(large))
    full = nth % WHOLE == 0  # whether the whole report is due
    if known and truth_key not in truths.known:
        return None

    def find_truth() -> dict[str, Any]:
        """Run the search on the subject and return the truth as a row; "stillborn"
        where its text is no Python.
        """
        try:
            loss = compiled(s.text)
        except Exception:
            return {"kind": "stillborn", "apart": -1.0, "tokens": 0}
        size = {"few": few, "large": large}
        truth = search.truth(
            loss, s.config, s.names, s.adv, seed, **size, single=s.single
        )
        return asdict(truth)

    def find_verdict() -> dict[str, Any]:
        """Run the checker up to the first failure, and where it is due the whole
        report; return the verdict as a row.
        """
        loss = compiled(s.text)
        start = time.process_time()
        verdict = judge.verdict(loss, s.config)
        row = {
            "quick": verdict.accepted,
            "said": verdict.said,
            "spent": time.process_time() - start,
            "library": library(),
        }
        if full:
            # π_old = 1 cannot be shifted
            some = batches.small(s.config, "group" in s.names, seed, 24)[:24]
            # the reference refuses a row without a token
            some = [b for b in some if b.of["mask"].any(1).all()]
            row |= asdict(judge.whole(loss, s.config, some))
        return row

    truth = truths.get(truth_key, find_truth)
    out = {
        "id": s.key,
        "config": str(s.config),
        "objective": s.config.o.name,
        "style": s.style,
        "operator": s.kind,
        "what": s.what,
        "truth": truth["kind"],
        "apart": truth["apart"],
        "tokens": truth["tokens"],
    }
    if out["truth"] == "equal" and not large and s.kind != "rewriting":
        out["truth"] = "unsearched"
    if out["truth"] in ("stillborn", "unsearched"):
        return out
    if known:  # with the whole report, or without: parts of a run count on their own
        for with_report in (True, False):
            key = digest(s.key, str(with_report))
            if key in verdicts.known:
                return with_habit(out | verdicts.known[key], s, seed, few)
        return None

    def stale(row: dict[str, Any]) -> bool:
        """Return whether an older library misjudged this, or gave a false cause: then it
        is judged again.
        """
        is_bad = bool(wrong(out | row) or row.get("true") == "no")
        return is_bad and row["library"] != library()

    verdict = verdicts.get(digest(s.key, str(full)), find_verdict, stale)
    return with_habit(out | verdict, s, seed, few)


def with_habit(row: dict[str, Any], s: Subject, seed: int, few: int) -> dict[str, Any]:
    """Return the row. Where the loss was missed, it gains `overflow`: whether the loss
    differs from its objective only where exp(log r) overflows.
    """
    # the search stops at the first batch that differs: a finite difference is no overflow
    if wrong(row) == "missed" and row["apart"] == math.inf:
        try:
            row["overflow"] = differs_by_overflow_alone(compiled(s.text), s, seed, few)
        except Exception:  # whatever a mutant raises tells it from its objective too
            row["overflow"] = False
    return row


_stores: dict[Path, Store] = {}


def store_of(scratch: Path, name: str) -> Store:
    """Return the store NAME.jsonl of a folder; there is one object for each file."""
    path = scratch / f"{name}.jsonl"
    if path not in _stores:
        _stores[path] = Store(path)
    return _stores[path]


def wrong(row: dict[str, Any]) -> str:
    """Return "missed" if a loss that differs was accepted, "alarm" if an equal one was
    rejected, else "".

    It is "" too where there is no verdict or the truth is neither.
    """
    if "quick" not in row:
        return ""
    accepted = row["quick"]
    if row["truth"] == "differs" and accepted:
        return "missed"
    if row["truth"] == "equal" and not accepted:
        return "alarm"
    return ""
