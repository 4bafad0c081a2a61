# SPDX-License-Identifier: Apache-2.0
"""The ledger as strict expected failures: an audit's rows against the recorded
deviations.

NAME/ledger.toml is reviewed by hand, and every number in it was seen by running the
framework. `check_ledger` reports recorded deviations that are gone, and deviations
that are not recorded.
"""

from typing import Any

from upref_frameworks.audits.compare import ComparisonRow, Example, FaultEffect
from upref_frameworks.ledger import SEVERITY, Entry, Evidence


def changed_defaults(
    now: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]], version: str
) -> list[str]:
    """Compare the defaults of a framework's config with the recorded ones.

    Args:
        now: loss -> field -> value, as the version has them.
        recorded: the same as the ledger has them; under `every` what holds of all
            losses. Empty where it records none.
        version: the version, for the sentences.

    Returns:
        A sentence for each default that differs, is new or is gone; none where nothing
        is recorded.
    """
    if not recorded:
        return []
    changed = []
    for mode, fields in now.items():
        was = recorded.get("every", {}) | recorded.get(mode, {})
        changed += [
            f"{mode}: the default of {k} is {fields.get(k, 'gone')} in {version}, and was {was.get(k, 'not there')}"
            for k in sorted({*fields, *was})
            if fields.get(k) != was.get(k)
        ]
    return changed


def as_toml_value(default: object) -> bool | int | float | str:
    """Return a default as TOML and JSON can hold it: what is no scalar becomes text.

    Args:
        default: of a field of a config.

    Returns:
        The same bool, number or string; str() of anything else, such as "None".
    """
    if isinstance(default, bool | int | float | str):
        return default
    return str(default)


def check_ledger(
    rows: list[ComparisonRow],
    entries: list[Entry],
    version: str,
    complete: bool,
    gone: tuple[str, ...] = (),
) -> list[str]:
    """Compare the deviations of an audit with those that the ledger records.

    Args:
        rows: of the audit.
        entries: of the ledger.
        version: the audited version, for the sentences.
        complete: whether these are all rows; only then are sizes compared, and entries
            reported whose rows are missing.
        gone: losses that the version no longer has; their entries are not reported as
            gone.

    Returns:
        Sentences in alphabetical order: deviations that the ledger does not have or has
        with other numbers, and entries that no longer show.
    """
    # (reason, loss, promise, micro-batches) -> the entry, and its evidence for this row
    known = {}
    for e in entries:
        for evidence in e.evidence:
            loss, promise = evidence.loss, evidence.held_against
            known[e.reason, loss, promise, evidence.micro_batches] = (e, evidence)
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
        mode = key[1].partition(",")[0]
        if (complete or key[1:] in audited) and mode not in gone:
            entry, then = known[key]
            said.append(
                f"{entry.key} is gone: in {version} {then.command} no longer shows it; review the entry"
            )
    return sorted(said)


def sizes(rows: list[ComparisonRow], entries: list[Entry]) -> list[str]:
    """Compare the recorded size of each entry with the measured one.

    Args:
        rows: of the audit.
        entries: of the ledger.

    Returns:
        A sentence for each entry with another severity, or another share of a typical
        batch's gradient to two digits. Shares below 1e-9 are rounding and count as
        equal.
    """
    out = []
    for e in entries:
        if worst := largest_effect(rows, e):
            share = float(f"{worst.change:.2g}")
            is_rounding = max(share, e.change) < 1e-9
            has_other_share = share != e.change and not is_rounding
            if has_other_share or e.severity != worst.severity:
                out.append(
                    f"{e.key} is of another size: severity {worst.severity}, change {share:g}, recorded "
                    f"{e.severity or 'nothing'}, {e.change:g}"
                )
    return out


def largest_effect(rows: list[ComparisonRow], entry: Entry) -> FaultEffect | None:
    """Return the effect of an entry in the row of its evidence where it is most severe;
    rows beside the defaults do not count.

    Args:
        rows: of the audit.
        entry: of the ledger.

    Returns:
        The effect; None where no row of these shows the entry.
    """
    rows_of_entry = {
        (x.loss, x.held_against, x.micro_batches)
        for x in entry.evidence
        if not x.beside_defaults
    }
    effects = []
    for r in rows:
        if (r.label, r.promise, r.micro_batches) not in rows_of_entry:
            continue
        for (words, _), effect in zip(r.reasons, r.effects, strict=False):
            if words == entry.reason:
                effects.append(effect)
    return most_severe(effects) if effects else None


def most_severe(effects: list[FaultEffect]) -> FaultEffect:
    """Return the effect of the worst severity, of equal ones that of largest change.

    Args:
        effects: at least one.
    """
    return min(effects, key=lambda x: ([*SEVERITY].index(x.severity), -x.change))


def as_evidence(row: ComparisonRow, spot: Example) -> Evidence:
    """Return what the ledger must record of one reason of a row.

    Args:
        row: of the audit.
        spot: the token that the reason changes most.

    Returns:
        Evidence; its regime and weights are empty where the reason changes no token.
    """
    shown = (spot.where, *spot.weights) if spot.difference else ("", "", "")
    return Evidence(row.label, row.promise, *shown, row.micro_batches)
