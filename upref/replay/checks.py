# SPDX-License-Identifier: Apache-2.0
"""What the checks of a run's recorded batches found, as data."""

from dataclasses import dataclass, field

from upref.replay.advantages import Advantages
from upref.replay.compare import HeavyToken, ObjectiveWeights
from upref.replay.findings import ReplayFinding
from upref.replay.gap import Gap
from upref.replay.loss import LoggedLoss
from upref.replay.schema import RecordedBatch
from upref.replay.series import Series
from upref.replay.zero import ZeroMismatch


@dataclass(frozen=True)
class StepChecks:
    """What was found in one step.

    Args:
        step: its number.
        summary: where it was read, its size, and its columns.
        sampler, advantages, loss, zero: what each check found; None where it did not run.
        old: a finding on the column old.
        not_run: check -> why it did not run.
        untold: that its files may be of two runs; "" where they are of one.
        same_gradient: (sum, objective) of the other objectives that have the recorded
            gradient, where the named one has not.
    """

    step: int
    summary: str
    sampler: Gap | None
    advantages: Advantages | None
    loss: LoggedLoss | None
    old: ReplayFinding | None
    not_run: dict[str, str]
    zero: ZeroMismatch | None = None
    untold: str = ""
    same_gradient: tuple[tuple[str, str], ...] = ()

    @property
    def has_other_gradient(self) -> bool:
        """Whether a note says that the recorded gradient is not the named objective's.
        Without the column now nothing tells.
        """
        causes = {f.cause for f in self.loss.findings} if self.loss else set()
        return "gradient_other" in causes and "needs_now" not in causes

    @property
    def findings(self) -> list[ReplayFinding]:
        """The findings of all checks of the step."""
        all_checks = (self.zero, self.sampler, self.advantages, self.loss)
        checks = [c for c in all_checks if c is not None]
        return [f for c in checks for f in c.findings] + (
            [self.old] if self.old else []
        )


@dataclass(frozen=True)
class RunChecks:
    """What was found in the steps of a run.

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
        """Check -> why it did not run; of several steps, at the last of them."""
        return {check: why for s in self.steps for check, why in s.not_run.items()}
