# SPDX-License-Identifier: Apache-2.0
"""Watch a running trainer: judge recorded steps while it trains, over all ranks, under
any loss.

    upref.replay.watch(trainer, "dapo", every=50, eps_high=0.2)        # one line before trainer.train()

Three things are checked at such a step: the logged loss, dL/dlp of every token of all
micro-batches and ranks (`upref.replay.normalizer`), and the sampler's log-probabilities
where the trainer has them (`upref.replay.gap`). Their numbers are logged beside the
trainer's own; `gap_cause` is the place of the cause in CAUSES, from 1, and 0 for none.

A loss or a gradient that is another sum of the objective's terms, or 2, 4, 8, 1/2, 1/4,
1/8 or -1 times the objective's, stops the run. Any other difference is a warning, and so
is what is found in the sampler's column: it may be what the run is meant to do.

A loss of upref's inside a trainer compares itself besides (`upref_frameworks.parity`).
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from upref.definition import Objective
from upref.errors import InputError
from upref.replay.batch import merge
from upref.replay.findings import ReplayFinding
from upref.replay.gap import Gap, gap
from upref.replay.loss import loss
from upref.replay.record import (
    Recording,
    Stopped,
    file_sink,
    gather_ranks,
    open_folder,
    recorder_of,
)
from upref.replay.schema import RecordedBatch
from upref.replay.terms import objective_as_run
from upref.replay.trainers import EVERY, Schedule, Sink
from upref.replay.words import SAMPLER

log = logging.getLogger(__name__)
CAUSES = tuple(SAMPLER)
ON_FAIL = ("stop", "warn")
KEEP = ("all", "failed")
# Of a gradient that is a multiple of the objective's. With the hyperparameters of a
# user it may be another objective's; of a loss whose objective is known it is wrong.
MULTIPLES = ("gradient_scaled", "gradient_sign", "gradient_zero")


def watch(
    trainer: Any,
    objective: str | Objective,
    *,
    every: int = EVERY,
    folder: str | Path = "",
    on_fail: str = "stop",
    keep: str = "all",
    known: bool = False,
    **hp: Any,
) -> Recording:
    """Judge optimizer steps of a trainer while it trains. Call it on every rank.

    Args:
        trainer: a GRPOTrainer of TRL, or of a class derived from it.
        objective: what its loss should be.
        every: number of optimizer steps between two that are judged; the first one is
            judged too.
        folder: where these steps are recorded too; "": nowhere. The files hold users'
            texts.
        on_fail: "stop" ends a run whose loss or gradient is that of another sum of the
            objective's terms, or 2, 4, 8, 1/2, 1/4, 1/8 or -1 times the objective's
            (with `known`, any multiple of the gradient); "warn" logs it. Any other
            difference is a warning, and stops nothing.
        keep: which of the judged steps are recorded in the folder: "all", or "failed",
            those for which "stop" would end the run.
        known: whether the objective and its hyperparameters are certain, as with
            upref's own trainer. Then each multiple of the gradient is a failure,
            whatever the factor.
        **hp: hyperparameters of the objective.

    Returns:
        The Recording, whose `stop` ends the watch.

    Raises:
        InputError: no installed package knows such a trainer, or the objective or a
            hyperparameter does not exist.
        Stopped: from the training, at a step for which "stop" ends the run.
    """
    recorder = recorder_of(trainer)
    step_watch = Watch(
        objective,
        hp=hp,
        on_fail=on_fail,
        sink=sink_of(folder, keep),
        keep=keep,
        known=known,
    )
    return Recording(recorder.attach(trainer, Schedule(every), step_watch))


def sink_of(folder: str | Path, keep: str) -> Sink | None:
    """Return what records judged steps in the folder; None for no folder.

    A folder for failed steps alone is made at the first failed step.

    Args:
        folder: its path; "": nowhere.
        keep: "all" or "failed".
    """
    if not folder:
        return None
    if keep == "all":
        return file_sink(open_folder(folder))

    def make_folder_and_write(batch: RecordedBatch | None, group: Any = None) -> None:
        """Write the step, after making the folder; nothing for None."""
        if batch is not None:
            file_sink(open_folder(folder))(batch, group)

    return make_folder_and_write


class Watch:
    """Judge each recorded step. A recorder calls this object with the step.

    Args:
        objective: what the loss should be, as `upref.replay.loss` takes it.
        hp: its hyperparameters.
        on_fail: "stop" or "warn".
        sink: what records a step, before the run is stopped.
        keep: which steps it records: "all", or "failed".
        known: whether the objective and its hyperparameters are those that the trainer
            was given, not what a user says of them. Then each multiple of the gradient
            is a failure, whatever the factor.
    """

    def __init__(
        self,
        objective: str | Objective,
        hp: dict[str, Any],
        on_fail: str,
        sink: Sink | None,
        keep: str = "all",
        known: bool = False,
    ) -> None:
        """Resolve the objective as it was run, and begin without failures; InputError
        where a word, the objective or a hyperparameter does not exist.
        """
        expect_choices(on_fail, keep)
        self.objective = objective_as_run(objective, hp)
        self.objective.resolve(hp)
        self.hp = hp
        self.on_fail = on_fail
        self.sink = sink
        self.keep = keep
        self.known = known
        self.failures = 0
        self.causes_reported: set[str] = set()

    def __call__(
        self, batch: RecordedBatch | None, group: Any = None
    ) -> Mapping[str, float]:
        """Judge a step over all ranks, record it where that is due, and log what was
        found. `failures` counts the steps that failed.

        Args:
            batch: what this rank has of it; None where it could not record it.
            group: process group of the data-parallel ranks; None: the default one.

        Returns:
            Metrics to log, under "upref/": loss_off (|the objective's loss - the logged
            one|), normalizer, failures, and of a sampler's column those of its gap.

        Raises:
            InputError: a rank has not recorded the step.
            Stopped: the step failed, and on_fail is "stop".
        """
        whole = join_ranks(batch, group)
        if self.sink is not None and self.keep == "all":
            self.sink(batch, group)
        found = loss(whole, self.objective, **self.hp)
        metrics = {"loss_off": abs(found.value - found.logged)}
        if found.gradient_factor is not None:
            metrics["normalizer"] = found.gradient_factor
        if whole.sampler is not None:
            sampler = gap(whole)
            metrics |= _gap_metrics(sampler)
            self._tell(whole, sampler.findings)
        self._tell(whole, tuple(found.notes))
        failures = found.failures
        if self.known:
            for finding in found.notes:
                if finding.cause in MULTIPLES:
                    failures.append(replace(finding, severity="failure"))
        self.failures += bool(failures)
        if self.sink is not None and self.keep == "failed" and failures:
            self.sink(batch, group)
        self._judge(whole, failures)
        metrics["failures"] = float(self.failures)
        return {f"upref/{name}": value for name, value in metrics.items()}

    def _judge(self, batch: RecordedBatch, failures: list[ReplayFinding]) -> None:
        """Raise Stopped with the failures of a step, or log them, as `on_fail` says; do
        nothing where there are none.
        """
        if not failures:
            return
        sentence = f"step {batch.step}: {' '.join(str(f) for f in failures)}"
        if self.on_fail == "stop":
            raise Stopped(sentence)
        log.error("%s It trains on (on_fail=warn).", sentence)

    def _tell(self, batch: RecordedBatch, findings: tuple[ReplayFinding, ...]) -> None:
        """Log each finding as a warning, a cause only once in the run."""
        for f in findings:
            if f.cause not in self.causes_reported:
                log.warning("step %s: %s", batch.step, f)
            self.causes_reported.add(f.cause)


def _gap_metrics(found: Gap) -> dict[str, float]:
    """Return the metrics of a gap that a trainer logs. `gap_cause` is the place of its
    first finding's cause in CAUSES, from 1; 0 where it has none.
    """
    cause = found.findings[0].cause if found.findings else ""
    return {
        "rho_mean": found.rho_mean,
        "gap_k3": found.k3,
        "gap_mean_abs": found.mean_abs,
        "effective": found.effective,
        "gap_cause": float(1 + CAUSES.index(cause)) if cause else 0.0,
    }


def expect_choices(on_fail: str, keep: str) -> None:
    """Raise InputError unless both are words that `watch` takes.

    Args:
        on_fail: "stop" or "warn".
        keep: "all" or "failed".
    """
    if on_fail not in ON_FAIL:
        raise InputError(f"on_fail must be stop or warn, not {on_fail!r}.")
    if keep not in KEEP:
        raise InputError(f"keep must be all or failed, not {keep!r}.")


def join_ranks(batch: RecordedBatch | None, group: Any = None) -> RecordedBatch:
    """Return the step over all data-parallel ranks. All ranks must call it, and each
    waits for the others.

    Args:
        batch: of this rank; None where it could not record it.
        group: torch's process group; None: the default one.

    Raises:
        InputError: a rank has no step.
    """
    parts = gather_ranks(batch, group)
    if any(part is None for part in parts):
        raise InputError("a rank could not record the step.")
    return batch if batch is not None and len(parts) == 1 else merge(parts)
