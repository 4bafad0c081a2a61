# SPDX-License-Identifier: Apache-2.0
"""The replay of a run as one result, whose text fits on a screen."""

from dataclasses import asdict, dataclass, field
from typing import Any

from upref.replay.advantages import Advantages
from upref.replay.compare import HeavyToken, ObjectiveWeights
from upref.replay.findings import Checked, ReplayFinding, plain
from upref.replay.gap import Gap
from upref.replay.lines import report_lines
from upref.replay.loss import LoggedLoss
from upref.replay.schema import RecordedBatch
from upref.replay.series import Series
from upref.replay.zero import ZeroMismatch
from upref.result import Result


@dataclass(frozen=True)
class StepChecks:
    """What was found in one step."""

    step: int
    summary: str
    sampler: Gap | None
    advantages: Advantages | None
    loss: LoggedLoss | None
    old: ReplayFinding | None
    not_run: dict[str, str]
    zero: ZeroMismatch | None = None

    @property
    def findings(self) -> list[ReplayFinding]:
        """The findings of all checks of the step."""
        all_checks = (self.zero, self.sampler, self.advantages, self.loss)
        checks = [c for c in all_checks if c is not None]
        return [f for c in checks for f in c.findings] + (
            [self.old] if self.old else []
        )


@dataclass(frozen=True)
class Replay(Result):
    """What a run's recorded batches say. bool() is False where a check failed.

    Args:
        objective: name of the objective that ran; "" if it was not given.
        steps: the checks of each step.
        series: the gap over the steps; None for fewer than two.
        table: objectives on the tokens of the step `exercised`; None if they cannot be
            computed.
        heaviest: the tokens of that step with the largest weights under the first row
            of the table.
        exercised: the step where π_θ differs most from π_old; of several, the last one.
        widest: the step with the largest gap to the sampler; of several, the last one.
    """

    objective: str
    steps: tuple[StepChecks, ...]
    series: Series | None
    table: ObjectiveWeights | None
    heaviest: tuple[HeavyToken, ...]
    exercised: RecordedBatch = field(repr=False, compare=False)
    widest: RecordedBatch = field(repr=False, compare=False)

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def status(self) -> int:
        """Exit status: 0 nothing found, 1 a failure, 2 no failure, but a check could
        not run.
        """
        return 1 if self.failures else 2 if self.not_run else 0

    @property
    def findings(self) -> list[tuple[int | None, ReplayFinding]]:
        """(step, finding); step None: of the series."""
        findings_of_steps: list[tuple[int | None, ReplayFinding]] = [
            (s.step, f) for s in self.steps for f in s.findings
        ]
        return findings_of_steps + [
            (None, f) for f in (self.series.findings if self.series is not None else ())
        ]

    @property
    def failures(self) -> list[ReplayFinding]:
        return [f for _, f in self.findings if f.severity == "failure"]

    @property
    def notes(self) -> list[ReplayFinding]:
        return [f for _, f in self.findings if f.severity == "note"]

    @property
    def not_run(self) -> dict[str, str]:
        """Check -> the column that is missing and how it is recorded."""
        return {check: why for s in self.steps for check, why in s.not_run.items()}

    def data(self) -> dict[str, Any]:
        """The numbers and findings of the steps and of the run.

        Returns:
            What `upref replay --json` prints; None stands for infinity and NaN.
        """
        steps = [
            {
                "step": s.step,
                "summary": s.summary,
                "not_run": s.not_run,
                "sampler": _data(s.sampler),
                "advantages": _data(s.advantages),
                "loss": _data(s.loss),
                "zero": _data(s.zero),
                "findings": [asdict(f) | {"text": str(f)} for f in s.findings],
            }
            for s in self.steps
        ]
        whole = {
            "ok": bool(self),
            "status": self.status,
            "objective": self.objective,
            "steps": steps,
            "series": _data(self.series),
            "table": _data(self.table),
            "table_step": self.exercised.step,
            "heaviest": [asdict(t) for t in self.heaviest],
        }
        numbers: dict[str, Any] = plain(whole)
        return numbers

    def text(self, verbose: bool = False) -> str:
        """Return the report.

        Args:
            verbose: every step and every finding.

        Returns:
            Lines. Of a run, what was found at which steps comes first.
        """
        return "\n".join(report_lines(self, verbose))


def _data(checked: Checked | None) -> dict[str, Any] | None:
    """Return the numbers of a check; None where it did not run."""
    return None if checked is None else checked.data()
