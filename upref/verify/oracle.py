# SPDX-License-Identifier: Apache-2.0
"""The one runner of oracles, for losses, advantages and KL estimators alike.

An oracle looks at a case from one side and answers with Findings. Each kind of check has
a case of its own, which its oracles read. The runner reads `failed` alone.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar

from upref.errors import InputError
from upref.verify.report import SKIPPED, Finding, fail, note

Not = Callable[[Any], str]  # of the case that the oracle is for


class Case(Protocol):
    """What the runner reads of a case.

    Attributes:
        failed: the names of the oracles that have failed so far. What follows from one
            is not said again.
    """

    failed: set[str]


@dataclass(frozen=True)
class Oracle:
    """One test of a report. `oracle` makes it.

    Attributes:
        name: as it stands in reports and in `skip`.
        findings: from a case to its Findings.
        not_run: from a case to why the oracle does not apply; "" where it does.
        rank: small goes first.
        implied: where it does not apply, other oracles have compared the same weights.
        needed: without its batches there is no verdict.
    """

    name: str
    findings: Callable[[Any], Iterable[Finding]]
    not_run: Not = lambda case: ""
    rank: float = 50
    implied: bool = False
    needed: bool = False


def oracle(
    name: str,
    rank: float = 50,
    not_run: Not = lambda case: "",
    implied: bool = False,
    needed: bool = False,
) -> Callable[[Callable[..., Any]], Oracle]:
    """Return a decorator that makes an Oracle of a function of a case.

    Args:
        name: as it stands in reports and in `skip`.
        rank: small goes first.
        not_run: why it does not apply to a case; "" where it does.
        implied: where it does not apply, others have compared the same weights.
        needed: what the user's code raises on its batches is an input error; on the
            batches of another oracle it is a note.

    Returns:
        The decorator. Its function yields the Findings of a case.
    """
    return lambda findings: Oracle(name, findings, not_run, rank, implied, needed)


class Done(Protocol):
    """What a call of a user-supplied function did beside its answer."""

    @property
    def wrote(self) -> frozenset[str]: ...  # arguments whose values it changed
    @property
    def printed(self) -> bool: ...


def refused(oracle: str, batch: str, error: Exception) -> Finding:
    """Return the note that the user's code raises on a batch, so that nothing is known
    of its numbers there.

    Args:
        oracle: the name of the oracle that asks.
        batch: what the batch is, in words.
        error: what was raised.
    """
    return note(oracle, f"{batch}: refused, so not tested", found=str(error))


def untouched(done: Done, cause: str = "") -> Iterator[Finding]:
    """Yield the findings of the oracle `mutation`: a failure for each argument that a call
    changed in place, in alphabetical order, and a note if the call printed.

    Args:
        done: what a call changed.
        cause: how it came about, where that is known.
    """
    for name in sorted(done.wrote):
        yield fail(
            "mutation",
            f"{name} is changed in place",
            "inputs left alone",
            "different numbers after the call",
            cause=cause,
        )
    if done.printed:
        yield note("mutation", "it prints")


def untouched_on(calls: Iterable[Done], cause: str = "") -> list[Finding]:
    """Return the findings of the oracle `mutation` on the first batch that is changed; if
    none is, those of the first batch with a note.

    Args:
        calls: what the call on each batch changed.
        cause: as of `untouched`.
    """
    notes: list[Finding] = []
    for done in calls:
        findings = list(untouched(done, cause))
        if any(finding.severity == "failure" for finding in findings):
            return findings
        notes = notes or findings
    return notes


T = TypeVar("T")


def discover(package: ModuleType, kind: type[T]) -> list[T]:
    """Return all objects of that type in the modules of a package, so that a new file
    needs no edit elsewhere. The modules are imported.

    Args:
        package: whose modules are imported.
        kind: the type.

    Returns:
        Each object once, modules in alphabetical order.
    """
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    by_identity = {
        id(value): value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, kind)
    }
    return list(by_identity.values())


def by_rank(oracles: Iterable[Oracle]) -> list[Oracle]:
    """Sort oracles by rank, then by name.

    Args:
        oracles: in any order.

    Returns:
        The order in which they run.
    """
    return sorted(oracles, key=lambda one_oracle: (one_oracle.rank, one_oracle.name))


def validate_names(oracles: Iterable[Oracle], skip: Iterable[str]) -> None:
    """Raise InputError if `skip` names an unknown oracle, or is no list of strings.

    Args:
        oracles: all that there are.
        skip: names, in a list, a tuple or a set.
    """
    known = [one_oracle.name for one_oracle in oracles]
    if not isinstance(skip, list | tuple | set | frozenset) or not all(
        isinstance(name, str) for name in skip
    ):
        raise InputError(
            f"skip is a list of oracles' names: choose from {', '.join(known)}."
        )
    if unknown := sorted(set(skip) - set(known)):
        raise InputError(
            f"there is no oracle named {unknown[0]!r}: choose from {', '.join(known)}."
        )


def run(
    oracles: Iterable[Oracle], case: Case, skip: Iterable[str] = ()
) -> tuple[list[Finding], dict[str, str]]:
    """Run the oracles on a case. Those that fail are added to case.failed.

    Args:
        oracles: in the order in which they run.
        case: what they read.
        skip: names of those that are left out.

    Returns:
        The findings, and name -> what became of the oracle: ok, note, failure, or why it
            was not run.

    Raises:
        InputError: the user's code raises on a batch without which there is no verdict.
    """
    all_findings: list[Finding] = []
    outcomes: dict[str, str] = {}
    for current in oracles:
        if why := SKIPPED if current.name in skip else current.not_run(case):
            outcomes[current.name] = why
            continue
        findings: list[Finding] = []
        error: InputError | None = None
        try:
            # what is found before an error stays found
            for finding in current.findings(case):
                findings.append(finding)
        except InputError as e:
            if current.needed:
                raise InputError(
                    f"{e}: without an answer on this batch, of the oracle {current.name}, there is no verdict."
                ) from e
            error = e
            findings.append(refused(current.name, "a batch of this oracle", e))
        kept_findings = [finding for finding in findings if finding.oracle not in skip]
        all_findings += kept_findings
        outcomes[current.name] = _outcome(
            findings, kept_findings, is_refused=error is not None
        )
        for finding in kept_findings:
            if finding.severity == "failure":
                case.failed.add(finding.oracle)
    return all_findings, outcomes


def _outcome(
    findings: Sequence[Finding], kept_findings: Sequence[Finding], is_refused: bool
) -> str:
    """Return what became of an oracle that was run.

    Args:
        findings: all that it found.
        kept_findings: of these, what is not for an oracle that is skipped.
        is_refused: the user's code raised on a batch of it.
    """
    severities = {finding.severity for finding in kept_findings}
    if findings and not kept_findings:
        return f"what it found is for {findings[0].oracle}, which is skipped"
    if "failure" in severities:
        return "failure"
    if is_refused:
        return "a batch of it is refused"
    return "note" if "note" in severities else "ok"
