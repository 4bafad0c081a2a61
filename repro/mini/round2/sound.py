# SPDX-License-Identifier: Apache-2.0
"""Which finished runs have a number for every question: of a run that stopped at its
first step, or of a KL of 0, there is no logarithm. Such a run is named in the report
and left out; its claims stay unfinished."""

from collections.abc import Iterable
from math import isfinite

from repro.mini.study.plan import Contrast, Experiment
from repro.mini.study.results import Record, value
from upref.errors import InputError


def sound(
    e: Experiment, records: dict[str, Record], more: Iterable[Contrast] = ()
) -> dict[str, Record]:
    """The experiment's runs that answer its claims, its gates and `more`."""
    gates = {c.gate for c in e.claims if c.gate}
    gains = [Contrast((arm,), "reward", "gain", more_than=0) for arm in gates]
    asked = [*(x for c in e.claims for x in c.contrasts), *gains, *more]
    there = {(arm, s.key): r for arm, _, s in e.runs() if (r := records.get(s.key))}
    return {
        key: r
        for (arm, key), r in there.items()
        if all(has(r, c) for c in asked if arm in c.arms) and begun(r)
    }


def unsound(
    e: Experiment, records: dict[str, Record], more: Iterable[Contrast] = ()
) -> set[str]:
    """The names of those that are there and are not."""
    return ({s.key for *_, s in e.runs()} & records.keys()) - sound(
        e, records, more
    ).keys()


def begun(r: Record) -> bool:
    return bool(r["steps"])


def has(r: Record, c: Contrast) -> bool:
    try:
        x = value(r, c)
    except (InputError, KeyError, IndexError):
        return False
    return isfinite(x) and (x > 0 or not c.ratio)
