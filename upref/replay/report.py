# SPDX-License-Identifier: Apache-2.0
"""The replay of a run as one result, whose text fits on a screen."""

from dataclasses import asdict, dataclass
from typing import Any

from upref.replay.checks import RunChecks
from upref.replay.findings import Checked, plain
from upref.replay.lines import report_lines
from upref.result import Result


@dataclass(frozen=True)
class Replay(RunChecks, Result):
    """What a run's recorded batches say. bool() is False where a check failed."""

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def status(self) -> int:
        """Exit status: 0 no failure, 1 a failure, 2 no failure, but a check could
        not run.
        """
        if self.failures:
            return 1
        return 2 if self.not_run else 0

    def data(self) -> dict[str, Any]:
        """Return the numbers and findings of the steps and of the run.

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
