# SPDX-License-Identifier: Apache-2.0
"""What every check answers: true if nothing fails, notes allowed; printable, short or whole, and JSON."""

import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar

from upref.foreign.guard import state_restored
from upref.result import Result

UNKNOWN = "no known cause fits"
SKIPPED = "skipped on request"
RAN = ("ok", "failure", "note")
USUAL = ("stop-gradient", "extremes")  # notes on habits of nearly every loss
SHOWN, WIDE, LONGEST = 8, 400, 3000  # findings of a kind that are printed; characters of a field, and of a batch


def short(text: str, most: int = WIDE) -> str:
    """Its beginning, and how much more there is."""
    return text if len(text) <= most else f"{text[:most]} ... and {len(text) - most:,} characters more"


def some(lines: list[str], what: str, most: int = SHOWN) -> list[str]:
    """The first of them, and how many more there are."""
    return [*lines[:most], *([f"... and {len(lines) - most} {what} more"] if len(lines) > most else [])]


@dataclass(frozen=True)
class Finding:
    """One difference: which oracle saw it, for which tokens, expected and found, the smallest batch, the cause."""

    oracle: str
    severity: str  # failure | note
    regime: str  # in words: A < 0, r > 1.28
    expected: str
    found: str
    batch: str = ""  # copyable Python
    cause: str = ""

    def text(self, verbose: bool = True) -> str:
        if self.severity == "note" and not verbose:
            return f"note  {self.oracle}: {self.regime}" + (f" ({self.cause})" if self.cause else "")
        lines = [f"{'FAIL' if self.severity == 'failure' else 'note'}  {self.oracle}: {self.regime}"]
        lines += [f"      expected  {self.expected}"] if self.expected else []
        lines += [f"      found     {self.found}"] if self.found else []
        lines += [f"      likely    {self.cause}"] if self.cause else []
        lines += ["      " + line for line in self.batch.splitlines()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def not_run(oracles: dict[str, str]) -> list[str]:
    """The oracles that were not run, as one item of what a report says nothing about."""
    left_out = ", ".join(name for name, became in oracles.items() if became not in RAN)
    return [left_out] if left_out else []


def fail(oracle: str, regime: str, expected: Any = "", found: Any = "", batch: str = "", cause: str = "") -> Finding:
    """A finding that makes the report false; a batch too long to read is left out."""
    if len(batch) > LONGEST:
        batch = f"# the smallest batch that shows it takes {len(batch):,} characters: too many to print"
    expected, found = _say_both(expected, found)
    return Finding(oracle, "failure", short(regime), expected, found, batch, short(cause))


def apart(text: str, x: float, y: float) -> tuple[str, str]:
    """Two numbers in words, with as many digits as tell them apart."""
    for digits in (6, 9, 12, 17):
        one, other = (text.format(f"{v + 0.0:.{digits}g}") for v in (x, y))
        if one != other:
            break
    return one, other


def note(oracle: str, regime: str, expected: Any = "", found: Any = "", cause: str = "") -> Finding:
    """A finding that the reader should know of, and that changes no verdict."""
    expected, found = _say_both(expected, found)
    return Finding(oracle, "note", short(regime), expected, found, "", short(cause))


def _say_both(expected: Any, found: Any) -> tuple[str, str]:
    if isinstance(expected, str) or isinstance(found, str):
        return _say(expected), _say(found)
    return apart("weight {}", expected, found)


def _say(x: Any) -> str:
    return short(x) if isinstance(x, str) else f"weight {x + 0.0:.6g}"


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
    settings: str = ""  # what was set of the framework's config, and what the loss as shipped gives
    not_checked: list[str] = field(default_factory=list)  # what it says nothing about, in words

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.severity == "failure"]

    @property
    def notes(self) -> list[Finding]:
        return [f for f in self.findings if f.severity == "note"]

    def json(self) -> str:
        return json.dumps({"ok": bool(self)} | asdict(self), indent=1, ensure_ascii=False)

    def text(self, verbose: bool = False) -> str:
        """The verdict, the failures, a line for each note; verbose: all that was assumed and run."""
        lines = [self._head(), *some([f.text() for f in self._few_batches()], "failures")]
        if self.failures and not any(f.cause for f in self.failures):
            lines.append(f"      likely    {UNKNOWN}; the numbers are what was found")
        usual = [] if verbose else [f.oracle for f in self.notes if f.oracle in USUAL]
        lines += some([f.text(verbose) for f in self.notes if f.oracle not in usual], "notes")
        if usual:
            lines.append(f"note  {', '.join(dict.fromkeys(usual))}: habits of nearly every loss (-v explains)")
        lines += [f"read as: {short(self.read_as)}"] if self.read_as else []
        lines += [f"not checked: {'; '.join(self.not_checked)}"] if self.not_checked else []
        if verbose:
            ran = ", ".join(k for k, v in self.oracles.items() if v in RAN)
            lines += some([f"assumed: {short(c)}" for c in self.assumptions], "assumptions", 2 * SHOWN)
            lines += [f"not run: {k} ({v})" for k, v in self.oracles.items() if v not in RAN]
            lines += [f"oracles: {ran} ({self.seconds:.1f} s)"]
        elif n := len(self.assumptions):
            lines.append(f"{n} assumption{'s' if n > 1 else ''}; -v or .text(verbose=True) shows all")
        return "\n".join(lines)

    def _few_batches(self) -> list[Finding]:
        """The failures, the first half of them with its batch: one shows what is wrong."""
        return [f if n < SHOWN // 2 else replace(f, batch="") for n, f in enumerate(self.failures)]

    def _head(self) -> str:
        hp = ", ".join(f"{k}={v:g}" for k, v in self.hp.items() if v is not None)
        n, m = len(self.failures), len(self.notes)
        counts = f"{n} failure{'s' if n != 1 else ''}" if n else "agrees"
        skipped = sum(v == SKIPPED for v in self.oracles.values())
        if m:
            counts += f", {m} note{'s' if m != 1 else ''}"
        if skipped:
            counts += f", {skipped} oracle{'s' if skipped != 1 else ''} skipped"
        loss = short(self.loss)
        if hp:
            loss += f" at {hp}"
        if self.settings:
            loss += f"; {self.settings}"
        return f"{'NOT ' if n else ''}{self.objective}: {counts}   {loss}"

    def __str__(self) -> str:
        return self.text()

    def lines(self, verbose: bool = False):
        """For a terminal."""
        return styled(self.text(verbose), "bold green" if self else "bold red")

    def __rich_console__(self, console, options):
        yield from self.lines()


R = TypeVar("R", bound=Report)


def styled(text: str, head: str):
    """The lines of a report as rich prints them."""
    from rich.text import Text

    style = {"FAIL": "bold red", "note": "yellow", "read": "dim", "assu": "dim", "orac": "dim", "not ": "dim"}
    for n, line in enumerate(text.splitlines()):
        yield Text(line, style=head if n == 0 else style.get(line[:4], ""), overflow="fold")


def row(key: str, text: str, width: int = 118) -> str:
    """One line of a report, `key text`, wrapped under its text."""
    return textwrap.fill(text, width, initial_indent=f"  {key:12} ", subsequent_indent=" " * 15)


def restores_state(check: Callable[..., R]) -> Callable[..., R]:
    """Decorator: restore what the function under check changes in the process, and note it."""

    @wraps(check)
    def one(*args: Any, **kwargs: Any) -> R:
        with state_restored() as changed:
            report = check(*args, **kwargs)
        if not changed:
            return report
        notes = [note("mutation", f"it changes {what}", cause="restored after the call") for what in sorted(changed)]
        ran = report.oracles | ({} if report.oracles.get("mutation") == "failure" else {"mutation": "note"})
        return replace(report, findings=[*report.findings, *notes], oracles=ran)

    return one
