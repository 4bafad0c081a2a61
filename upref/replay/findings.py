# SPDX-License-Identifier: Apache-2.0
"""What a check of a recorded batch answers: numbers and findings as data.
`upref.replay.words` turns them into text.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from upref.replay.words import sentence
from upref.result import Result

Severity = Literal["failure", "note"]
STEPS_NAMED = 8  # steps with a finding that are named


@dataclass(frozen=True)
class ReplayFinding:
    """One thing that a check found.

    Args:
        check: which check: sampler, advantages, loss, old, series, zero.
        severity: "failure" only where the cause was undone and the difference vanished,
            or where the file says it outright; "note" where the tokens bear a signature
            that several causes share.
        cause: a key of upref.replay.words.CAUSES.
        numbers: what its sentence quotes.
    """

    check: str
    severity: Severity
    cause: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return sentence(self.cause, self.numbers)


def note(check: str, cause: str, **numbers: Any) -> ReplayFinding:
    """Return a finding of severity "note": one that accuses nobody.

    Args:
        check: that found it.
        cause: a key of upref.replay.words.CAUSES.
        **numbers: for the sentence.
    """
    return ReplayFinding(check, "note", cause, numbers)


@dataclass(frozen=True, kw_only=True)
class Checked(Result):
    """The answer of one check. bool() is False where a finding is a failure."""

    findings: tuple[ReplayFinding, ...] = ()

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[ReplayFinding]:
        return [f for f in self.findings if f.severity == "failure"]

    @property
    def notes(self) -> list[ReplayFinding]:
        return [f for f in self.findings if f.severity == "note"]

    def data(self) -> dict[str, Any]:
        """Return its numbers and findings, for JSON: None stands for infinity and NaN."""
        numbers: dict[str, Any] = plain({"ok": bool(self)} | asdict(self))
        return numbers


def plain(x: Any) -> Any:
    """Make a value fit for JSON.

    Args:
        x: numbers, text, and dicts and lists of them.

    Returns:
        The same; infinity and NaN become None, tuples become lists, keys become text.
    """
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x
