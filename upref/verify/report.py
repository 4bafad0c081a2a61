# SPDX-License-Identifier: Apache-2.0
"""What every check answers: true if nothing fails, notes allowed; printable, short or
whole, and JSON.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar

from upref.description import RATIOS_OF_RESPONSES
from upref.result import Result
from upref.user_code.guard import state_restored
from upref.user_code.settings import pairs
from upref.verify.finding import (
    Cause,
    CauseKind,
    Example,
    Interval,
    Number,
    Severity,
    TokenPlace,
)
from upref.verify.render import describe_example, describe_pair, describe_places

UNKNOWN = "no known cause fits"
NOTHING_FITS = Cause(UNKNOWN, kind="unknown")
LABELS: dict[CauseKind, str] = {
    "why": "likely",
    "pattern": "pattern",
    "unknown": "unknown",
}
SKIPPED = "skipped on request"
RAN_OUTCOMES = ("ok", "failure", "note")
USUAL_NOTES = ("stop-gradient", "extremes")  # notes on habits of nearly every loss
# the cause of a note on a gradient that reaches old or reference log-probabilities
HARMLESS_IF_DETACHED = (
    "harmless as long as callers pass them without requires_grad; "
    "add .detach() to be safe"
)
# findings of a kind that are printed; characters of a field
MOST_FINDINGS = 8
MOST_CHARACTERS = 400
COVERED = (
    "covered: "  # begins what was tested, a sentence of upref that -v prints whole
)
# lines of failures on one screen, and its width
LINES_OF_SCREEN = 28
COLUMNS = 118
BATCH_LEFT_OUT = (
    "      (-v prints the smallest batch that shows it: it takes more than a screen)"
)


def short(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the beginning of a text, and how many characters more there are.

    Args:
        text: of any length.
        most: characters that are kept.

    Returns:
        The text itself where it is short.
    """
    if len(text) <= most:
        return text
    return f"{text[:most]} ... and {len(text) - most:,} characters more"


def counted(count: int, noun: str) -> str:
    """Return `1 note` or `3 notes`.

    Args:
        count: how many.
        noun: in the singular.

    Returns:
        Words.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first_few(lines: list[str], what: str, most: int = MOST_FINDINGS) -> list[str]:
    """Return the first of the lines, and how many more there are.

    Args:
        lines: all of them.
        what: what one line is of, such as "note".
        most: how many lines are kept.
    """
    left_out = len(lines) - most
    if left_out <= 0:
        return lines
    return [*lines[:most], f"... and {counted(left_out, what)} more"]


@dataclass(frozen=True)
class Finding:
    """One difference between a function and its reference, or a note on the function.

    Args:
        oracle: which test found it.
        severity: a failure makes the verdict negative, a note does not.
        about: what was done to the function, or what is noted, in words.
        place: which tokens differ, and the one that is shown.
        also: other tokens that the same fault changes.
        expected: what the reference has there.
        found: what the function has there.
        example: the smallest input that shows it.
        cause: the mistake that gives the numbers that were found, in words.
        cause_kind: whether the cause says why, or what the wrong numbers have in common,
            or that nothing known fits.
        fault_ids: of the known faults that the cause names, which never change.
        subject: the argument or hyperparameter that it is about.
    """

    oracle: str
    severity: Severity
    about: str = ""
    place: TokenPlace | None = None
    expected: Number | str = ""
    found: Number | str = ""
    example: Example | None = None
    cause: str = ""
    subject: str = ""
    also: tuple[TokenPlace, ...] = ()
    fault_ids: tuple[str, ...] = ()
    cause_kind: CauseKind = "why"

    @property
    def is_explained(self) -> bool:
        """Whether its cause says why."""
        return bool(self.cause) and self.cause_kind == "why"

    @property
    def regime(self) -> str:
        """Where it differs, in words: `A < 0, r > 1.28`."""
        place = describe_places(self.place, self.also) if self.place else ""
        return short(": ".join(filter(None, [self.about, place])))

    @property
    def batch(self) -> str:
        """The smallest input that shows it, as Python that can be pasted."""
        return describe_example(self.example) if self.example else ""

    @property
    def difference(self) -> str:
        """What should be there and what is, in words."""
        expected, found = describe_pair(self.expected, self.found)
        return f"{expected} is due, {found} found"

    @property
    def seen(self) -> str:
        """What was found, and where, without its cause."""
        if not isinstance(self.found, Number):
            return self.regime
        _, found = describe_pair(self.expected, self.found)
        return f"{found} at {self.regime}"

    def text(self, verbose: bool = True, same: Sequence["Finding"] = ()) -> str:
        """Return it as a paragraph.

        Args:
            verbose: a note with all that a failure has.
            same: other findings of the same cause, which get a line each.
        """
        if self.severity == "note" and not verbose:
            cause = f" ({self.cause})" if self.cause else ""
            return f"note  {self.oracle}: {self.regime}{cause}"
        word = "note"
        label = "remark"
        if self.severity == "failure":
            word = "FAIL"
            label = LABELS[self.cause_kind]
        expected, found = describe_pair(self.expected, self.found)
        lines = [f"{word}  {self.oracle}: {self.regime}"]
        if expected:
            lines.append(f"      expected  {expected}")
        if found:
            lines.append(f"      found     {found}")
        if self.cause:
            lines.append(f"      {label:9} {self.cause}")
        lines += [f"      so too    {other.oracle}: {other.regime}" for other in same]
        lines += ["      " + line for line in self.batch.splitlines()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def read_finding(record: dict[str, Any]) -> Finding:
    """Return the finding of which this is the record, made by `asdict`.

    Args:
        record: its fields, with dictionaries in place of the records inside it.
    """
    fields = dict(record)
    for side in ("expected", "found"):
        if isinstance(fields[side], dict):
            number = fields[side]
            fields[side] = Number(**number | {"value": float(number["value"])})
    if fields["place"] is not None:
        fields["place"] = _read_place(fields["place"])
    fields["also"] = tuple(_read_place(place) for place in fields["also"])
    fields["fault_ids"] = tuple(fields["fault_ids"])
    if fields["example"] is not None:
        fields["example"] = Example(**fields["example"])
    return Finding(**fields)


def _read_place(record: dict[str, Any]) -> TokenPlace:
    """Return the TokenPlace of which this is the record."""
    intervals = tuple(Interval(**interval) for interval in record["intervals"])
    return TokenPlace(**record | {"intervals": intervals})


def not_run(oracles: dict[str, str]) -> list[str]:
    """Return the oracles that were not run, as one item of what a report says nothing
    about.

    Args:
        oracles: name -> what became of it.

    Returns:
        [their names, with commas between], or [] where all were run.
    """
    left_out = ", ".join(
        name for name, became in oracles.items() if became not in RAN_OUTCOMES
    )
    return [left_out] if left_out else []


def fail(
    oracle: str,
    about: str,
    expected: Any = "",
    found: Any = "",
    example: Example | None = None,
    cause: str | Cause = "",
    *,
    place: TokenPlace | None = None,
    subject: str = "",
) -> Finding:
    """Return a finding that makes the report false.

    Args:
        expected, found: Numbers, or plain numbers that are weights, or words.
        oracle, about, example, cause, place, subject: as of a Finding.
    """
    return Finding(
        oracle,
        "failure",
        short(about),
        place,
        _number_or_words(expected),
        _number_or_words(found),
        example,
        short(str(cause)),
        subject,
        fault_ids=cause.ids if isinstance(cause, Cause) else (),
        cause_kind=cause.kind if isinstance(cause, Cause) else "why",
    )


def note(
    oracle: str,
    about: str,
    expected: Any = "",
    found: Any = "",
    cause: str | Cause = "",
    *,
    place: TokenPlace | None = None,
    subject: str = "",
) -> Finding:
    """Return a finding that the reader should know of, and that changes no verdict.

    Args:
        expected, found: Numbers, or plain numbers that are weights, or words.
        oracle, about, cause, place, subject: as of a Finding.
    """
    finding = fail(
        oracle, about, expected, found, None, cause, place=place, subject=subject
    )
    return replace(finding, severity="note")


def _number_or_words(x: Any) -> Number | str:
    """Return a plain number as a weight, and shorten words; a Number stays as it is."""
    if isinstance(x, Number):
        return x
    return short(x) if isinstance(x, str) else Number(float(x), "weight")


def _height(text: str) -> int:
    """Return how many lines a text takes on a screen of COLUMNS columns."""
    return sum(math.ceil(max(len(line), 1) / COLUMNS) for line in text.splitlines())


@dataclass(frozen=True)
class Report(Result):
    """The verdict on one function. Truth value: no failure."""

    loss: str  # its name, as it was given
    objective: str
    hp: dict[str, Any]
    findings: list[Finding]
    read_as: str  # which argument was taken for what
    assumptions: list[str]  # what was assumed of it, a sentence each
    oracles: dict[str, str]  # name -> "ok", "failure", "note" or why it was not run
    tolerances: dict[str, float]
    seconds: float = field(compare=False)
    # what was set of the framework's config, and what the loss as shipped gives
    settings: str = ""
    # what it says nothing about, in words
    not_checked: list[str] = field(default_factory=list)
    # for which values the weights are proved on small batches (upref.prove), in words;
    # "" where they are not
    proved_for: str = ""
    # what a note costs whoever trains with it, in words, for the first line
    costs: str = ""
    # of a wrong function: settings of hp that nobody gave
    guessed: tuple[str, ...] = ()
    # hyperparameters that were given, and that no argument of the function takes
    unbound: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def proved(self) -> bool:
        """Whether the weights are proved for the values of `proved_for`."""
        return bool(self.proved_for)

    @property
    def failures(self) -> list[Finding]:
        """The findings that make the verdict negative.

        Returns:
            In the order in which the oracles ran.
        """
        return [f for f in self.findings if f.severity == "failure"]

    @property
    def notes(self) -> list[Finding]:
        """The findings that the reader should know and that change no verdict.

        Returns:
            In the order in which the oracles ran.
        """
        return [f for f in self.findings if f.severity == "note"]

    def data(self) -> dict[str, Any]:
        """Return the fields of the report, `ok` and `proved`.

        Returns:
            Their values by name.
        """
        return {"ok": bool(self)} | asdict(self) | {"proved": self.proved}

    def text(self, verbose: bool = False) -> str:
        """Return the verdict, the failures and a line for each note, as the command prints
        them.

        Args:
            verbose: all findings with their batches, and all that was assumed and run.

        Returns:
            Lines, without a line break at the end.
        """
        lines = [
            self._verdict_line(),
            *describe_unbound(self.unbound),
            *self._failure_lines(verbose),
        ]
        if self.failures and not any(finding.cause for finding in self.failures):
            lines.append(f"      unknown   {UNKNOWN}; the numbers above are measured")
        lines += self._note_lines(verbose)
        lines += self._legend()
        lines += describe_basis(self.read_as, self.not_checked)
        if self.guessed:
            values = ", ".join(f"{key}={self.hp[key]:g}" for key in self.guessed)
            lines.append(
                f"guessed: {values}, for no usual value makes it right; "
                f"give yours with --hp {self.guessed[0]}=VALUE"
            )
        if verbose:
            lines += describe_assumptions(self.assumptions, 2 * MOST_FINDINGS)
            lines += self._oracle_lines()
        elif self.assumptions:
            assumptions = counted(len(self.assumptions), "assumption")
            lines.append(f"{assumptions}; -v shows all (in Python .text(verbose=True))")
        return "\n".join(lines)

    def _note_lines(self, verbose: bool) -> list[str]:
        """Return a text for each note, and one line for all that are usual; `verbose`:
        these have a text each too.
        """
        usual: list[Finding] = []
        if not verbose:
            usual = [found for found in self.notes if found.oracle in USUAL_NOTES]
        others = [found.text(verbose) for found in self.notes if found not in usual]
        lines = first_few(others, "note")
        if usual:
            oracles = ", ".join(dict.fromkeys(found.oracle for found in usual))
            seen = "; ".join(found.seen for found in usual)
            lines.append(f"note  {oracles}: {seen} (usual; -v explains)")
        return lines

    def _oracle_lines(self) -> list[str]:
        """Return a line for each oracle that was not run, and one for all that were."""
        lines = []
        ran = []
        for name, became in self.oracles.items():
            if became in RAN_OUTCOMES:
                ran.append(name)
            else:
                lines.append(f"not run: {name} ({became})")
        lines.append(f"oracles: {', '.join(ran)} ({self.seconds:.1f} s)")
        return lines

    def _legend(self) -> list[str]:
        """Return a line for each ratio of a response that the findings name."""
        places = [f.place for f in self.findings if f.place]
        symbols = {symbol for place in places for symbol in place.numbers}
        symbols |= {interval.symbol for place in places for interval in place.intervals}
        return [
            f"{symbol} is {words}"
            for symbol, words in RATIOS_OF_RESPONSES.items()
            if symbol in symbols
        ]

    @property
    def faults(self) -> list[list[Finding]]:
        """The failures: those of one known cause together, each other one by itself.

        Returns:
            Groups of findings, in the order of their first.
        """
        groups: dict[str, list[Finding]] = {}
        for index, f in enumerate(self.failures):
            key = f.cause if f.is_explained else f"failure {index}"
            groups.setdefault(key, []).append(f)
        return list(groups.values())

    def _failure_lines(self, verbose: bool) -> list[str]:
        """Return a paragraph for each fault, at most MOST_FINDINGS, and a last line that
        says how many faults are left out.

        Args:
            verbose: more of them, several with a batch. Otherwise they fit on a screen,
                and only the first one has its batch.
        """
        shown_batches = MOST_FINDINGS // 2 if verbose else 1
        screen_height = math.inf if verbose else LINES_OF_SCREEN
        faults = self._faults_in_printed_order()
        paragraphs: list[str] = []
        height = 0
        for index, (first, *same) in enumerate(faults[:MOST_FINDINGS]):
            without_batch = replace(first, example=None)
            text = (first if index < shown_batches else without_batch).text(same=same)
            if index == 0 and first.example and _height(text) > screen_height:
                text = f"{without_batch.text(same=same)}\n{BATCH_LEFT_OUT}"
            height += _height(text)
            if paragraphs and height > screen_height:
                break
            paragraphs.append(text)
        left_out = len(faults) - len(paragraphs)
        if left_out:
            paragraphs.append(f"... and {counted(left_out, 'failure')} more")
        return paragraphs

    def _faults_in_printed_order(self) -> list[list[Finding]]:
        """Return the faults in the order of the text. If nothing says why the first one
        is there, those that are explained come next: they must not be left out for want
        of room.
        """
        faults = self.faults
        if faults and not faults[0][0].is_explained:
            faults[1:] = sorted(faults[1:], key=lambda fault: not fault[0].is_explained)
        return faults

    def _verdict_line(self) -> str:
        """Return the verdict in one line."""
        hp = ", ".join(
            f"{name}={value:g}" for name, value in self.hp.items() if value is not None
        )
        fault_count = len(self.faults)
        note_count = len(self.notes)
        counts = counted(fault_count, "failure") if fault_count else "agrees"
        if self.proved and not fault_count:
            counts += f", and proved {self.proved_for}"
        if self.costs and not fault_count:
            counts += f", but {self.costs}"
        skipped = sum(became == SKIPPED for became in self.oracles.values())
        if note_count:
            counts += f", {counted(note_count, 'note')}"
        if skipped:
            counts += f", {counted(skipped, 'oracle')} skipped"
        loss = short(self.loss)
        if hp:
            loss += f" at {hp}"
        if self.settings:
            loss += f"; {self.settings}"
        return f"{'NOT ' if fault_count else ''}{self.objective}: {counts}   {loss}"


R = TypeVar("R", bound=Report)


def describe_unbound(unbound: Mapping[str, Any]) -> list[str]:
    """Say which hyperparameters were given and could not be passed to the function.

    Args:
        unbound: name -> value.

    Returns:
        One line of a report; none where all were passed.
    """
    if not unbound:
        return []
    given = ", ".join(pairs(dict(unbound)))
    reach, it = ("reaches", "it") if len(unbound) == 1 else ("reach", "them")
    return [
        f"{given} {reach} no argument of the loss: only what it is compared with gets {it}"
    ]


def describe_basis(read_as: str, not_checked: Sequence[str]) -> list[str]:
    """Say how the arguments were read, and what a verdict says nothing about.

    Args:
        read_as: which argument was taken for what; "" where nothing was read.
        not_checked: in words.

    Returns:
        Lines of a report; none where there is nothing to say.
    """
    lines = [f"read as: {short(read_as)}"] if read_as else []
    if not_checked:
        lines.append(f"not checked: {'; '.join(not_checked)}")
    return lines


def describe_assumptions(
    assumptions: Sequence[str], most: int = MOST_FINDINGS
) -> list[str]:
    """Say what was assumed of a function.

    Args:
        assumptions: a sentence each.
        most: how many are kept.

    Returns:
        Lines of a report.
    """
    lines = [
        s if s.startswith(COVERED) else f"assumed: {short(s)}" for s in assumptions
    ]
    return first_few(lines, "assumption", most)


def row(key: str, text: str, width: int = 118) -> str:
    """Return one line of a report, `key text`, wrapped under its text.

    Args:
        key: at most 12 characters.
        text: of any length.
        width: of a line.

    Returns:
        Lines, without a line break at the end.
    """
    return textwrap.fill(
        text, width, initial_indent=f"  {key:12} ", subsequent_indent=" " * 15
    )


def restores_state(check: Callable[..., R]) -> Callable[..., R]:
    """Decorate a check so that it restores what the function under check changes in the
    process, and notes it.

    Args:
        check: a function that returns a Report.

    Returns:
        The function, whose report has a note for each change.
    """

    @wraps(check)
    def restoring_check(*args: Any, **kwargs: Any) -> R:
        """Do the check, and add a note of the oracle `mutation` for each change of the
        process, in alphabetical order.
        """
        with state_restored() as changed:
            report = check(*args, **kwargs)
        if not changed:
            return report
        notes = [
            note("mutation", f"it changes {what}", cause="restored after the call")
            for what in sorted(changed)
        ]
        outcomes = dict(report.oracles)
        if outcomes.get("mutation") != "failure":
            outcomes["mutation"] = "note"
        return replace(report, findings=[*report.findings, *notes], oracles=outcomes)

    return restoring_check
