# SPDX-License-Identifier: Apache-2.0
"""What `upref.check` answers: true if the loss is the objective, notes allowed; printable, and JSON."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any


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

    def __str__(self) -> str:
        lines = [f"{'FAIL' if self.severity == 'failure' else 'note'}  {self.oracle}: {self.regime}"]
        lines += [f"      expected  {self.expected}"] if self.expected else []
        lines += [f"      found     {self.found}"] if self.found else []
        lines += [f"      likely    {self.cause}"] if self.cause else []
        lines += ["      " + line for line in self.batch.splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """The verdict on one loss. Truth value: no failure."""

    loss: str
    objective: str
    hp: dict[str, Any]
    findings: list[Finding]
    contract: list[str]
    oracles: dict[str, str]  # name -> "ok", "failure", "note" or why it was not run
    tolerances: dict[str, float]
    seconds: float = field(compare=False)

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.severity == "failure"]

    @property
    def notes(self) -> list[Finding]:
        return [f for f in self.findings if f.severity == "note"]

    def assert_ok(self) -> "Report":
        """Itself; AssertionError with the whole report where there is a failure."""
        if not self:
            raise AssertionError(f"\n{self}")
        return self

    def json(self) -> str:
        return json.dumps({"ok": bool(self)} | asdict(self), indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        hp = "".join(f", {k}={v:g}" for k, v in self.hp.items() if v is not None)
        head = f"{self.loss} as {self.objective}{hp}: {self._verdict()}"
        ran = ", ".join(k for k, v in self.oracles.items() if v in ("ok", "failure", "note"))
        tail = [f"Oracles: {ran} ({self.seconds:.1f} s)."]
        tail += [f"Not run: {k} ({v})." for k, v in self.oracles.items() if v not in ("ok", "failure", "note")]
        return "\n".join(
            [head, *map(str, self.failures), *map(str, self.notes), *(f"Contract: {c}." for c in self.contract), *tail]
        )

    def _verdict(self) -> str:
        n, m = len(self.failures), len(self.notes)
        notes = f"{m} note{'s' * (m != 1)}"
        return f"{n} failure{'s' * (n != 1)}, {notes}" if n else f"agrees, {notes}" if m else "agrees"

    def __rich_console__(self, console, options):
        from rich.text import Text

        style = {"FAIL": "bold red", "note": "yellow", "Cont": "dim", "Orac": "dim", "Not ": "dim"}
        for line in str(self).splitlines():
            yield Text(line, style=style.get(line[:4], ""))
