# SPDX-License-Identifier: Apache-2.0
"""The ledger as strict expected failures: an audit's rows against the recorded
deviations.

NAME/ledger.toml is reviewed by hand, and every number in it was seen by running the
framework. `check_ledger` reports recorded deviations that are gone, and deviations
that are not recorded.
"""

from typing import Any

from upref_frameworks.audits.compare import ComparisonRow, Example, FaultEffect
from upref_frameworks.ledger import SEVERITY, Entry, Evidence, recorded


def changed_defaults(
    name: str, defaults: dict[str, dict[str, Any]], version: str
) -> list[str]:
    """Sentences: defaults of the framework's own config that are no longer what is
    recorded.
    """
    then = recorded(name).get("defaults", {})
    return [
        f"{mode}: the default of {k} is {now.get(k, 'gone')} in {version}, and was {was.get(k, 'not there')}"
        for mode, now in defaults.items()
        for was in ([then.get("every", {}) | then.get(mode, {})] if then else [])
        for k in sorted({*now, *was})
        if now.get(k) != was.get(k)
    ]


def plainly(x: Any) -> Any:
    """A default as TOML and JSON can hold it."""
    return x if isinstance(x, bool | int | float | str) else str(x)


def check_ledger(
    rows: list[ComparisonRow],
    entries: list[Entry],
    version: str,
    complete: bool,
    gone: tuple[str, ...] = (),
) -> list[str]:
    """Sentences: deviations of these rows that the ledger has not, or has otherwise;
    with complete, also those gone.

    gone: losses that are themselves.
    """
    known = {
        (e.reason, x.loss, x.held_against, x.micro_batches): (e, x)
        for e in entries
        for x in e.evidence
    }
    said = []
    seen = set()
    audited = {(r.label, r.promise, r.micro_batches) for r in rows}
    for r in rows:
        for words, spot in r.reasons:
            key = (words, r.label, r.promise, r.micro_batches)
            seen.add(key)
            now = as_evidence(r, spot)
            if key not in known:
                said.append(f"not recorded: {words} ({now.command}; {now})")
            elif known[key][1] != now:
                entry, then = known[key]
                said.append(
                    f"{entry.key} has changed, {then} in {entry.version}, {now} in {version} ({now.command})"
                )
    if complete:
        said += sizes(rows, entries)
    for key in known.keys() - seen:
        if (complete or key[1:] in audited) and key[1].partition(",")[0] not in gone:
            entry, then = known[key]
            said.append(
                f"{entry.key} is gone: in {version} {then.command} no longer shows it; review the entry"
            )
    return sorted(said)


def sizes(rows: list[ComparisonRow], entries: list[Entry]) -> list[str]:
    """Sentences: entries whose severity, or share of a typical batch's gradient, is no
    longer what is recorded.
    """
    out = []
    for e in entries:
        if worst := largest(rows, e):
            share = float(f"{worst.change:.2g}")
            rounding = max(share, e.change) < 1e-9
            if (e.severity, e.change) != (
                worst.severity,
                e.change if rounding else share,
            ):
                out.append(
                    f"{e.key} is of another size: severity {worst.severity}, change {share:g}, recorded "
                    f"{e.severity or 'nothing'}, {e.change:g}"
                )
    return out


def largest(rows: list[ComparisonRow], entry: Entry) -> FaultEffect | None:
    """The effect of this entry in that row of its evidence where it is most severe."""
    recorded = {(x.loss, x.held_against, x.micro_batches) for x in entry.evidence}
    effects = [
        effect
        for r in rows
        if (r.label, r.promise, r.micro_batches) in recorded
        for (words, _), effect in zip(r.reasons, r.effects, strict=False)
        if words == entry.reason
    ]
    return severest(effects) if effects else None


def severest(effects: list[FaultEffect]) -> FaultEffect:
    return min(effects, key=lambda x: ([*SEVERITY].index(x.severity), -x.change))


def as_evidence(r: ComparisonRow, spot: Example) -> Evidence:
    """What the ledger has to say of this row's reason."""
    shown = (spot.where, *spot.weights) if spot.difference else ("", "", "")
    return Evidence(r.label, r.promise, *shown, r.micro_batches)
