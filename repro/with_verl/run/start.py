# SPDX-License-Identifier: Apache-2.0
"""Start the trainer of a run, follow it to its end, and say what to do next: for a
cluster as for a laptop.
"""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.with_verl.config.compose import Run
from repro.with_verl.health import ALARMS, BOUND
from repro.with_verl.machine.estimate import Estimate
from repro.with_verl.run import advice, folder, records, watch
from repro.with_verl.run.saved import checkpoints, save

SCORE = "critic/score/mean"
DIED_AHEAD = 75  # EX_TEMPFAIL of sysexits.h: starting again makes progress
LOG_TO = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"


@dataclass(frozen=True)
class Patience:
    """How long a run may do nothing before it is ended.

    Attributes:
        first: seconds without output, before the first step.
        stall: seconds without a step, later.
        idle: whether a run that waits without using the CPU is ended sooner.
    """

    first: float = 7200
    stall: float = 7200
    idle: bool = False  # on GPUs the work is not the CPU's

    @classmethod
    def of(cls, e: Estimate) -> "Patience":
        """Return patience of five times the longest step by the estimate, and at least
        two hours.
        """
        step = e.step_seconds + e.validation_seconds + e.checkpoint_seconds
        return cls(first=max(7200, 5 * step), stall=max(7200, 5 * step))


def checkpointed(directory: Path) -> int:
    """Return the step of the last whole checkpoint; 0: none."""
    try:
        return int(
            (checkpoints(directory) / "latest_checkpointed_iteration.txt").read_text()
        )
    except (OSError, ValueError):
        return 0


def start(
    run: Run,
    total: int | None,
    again: str,
    patience: Patience | None = None,
    **facts: Any,
) -> int:
    """Train a run until `total` steps are logged; save its settings, follow it, and log
    its last line.

    Args:
        run: the run.
        total: steps; None: as many as verl trains.
        again: the command that goes on, for the last line.
        patience: None: the defaults.
        **facts: written to overrides.json too.

    Returns:
        0: it finished. 143 or 130: it was asked to end. 75: it died after it saved a
            new checkpoint. Any other status: it died.

    Raises:
        InputError: the folder is another run's, or another process trains in it.
    """
    patience = patience or Patience()
    with folder.alone(run.directory):
        folder.check(run.directory, run.overrides)
        save(run, run.directory, total=total, again=again, **facts)
        part = records.new_part(run.directory)
        kept = checkpointed(run.directory)
        log = run.directory / "verl.log"
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *run.overrides]
        command.append(f"{LOG_TO}={part}")
        print(f"starting verl; checkpoints and logs go to {run.directory}", flush=True)

        told: list[float] = []

        def tell(row: dict) -> None:
            """Write steps.jsonl anew and print the step. At the second one print what
            the rest of the run takes.
            """
            records.collect(run.directory)
            print(line_of_step(row, total), flush=True)
            told.append(row["data"].get("timing_s/step", 0.0))
            # the first step of a start compiles and warms up
            if len(told) == 2 and total:
                estimate = facts.get("estimate", {})
                left = total - row["step"]
                print(predicted_again(estimate, told[-1], left), flush=True)

        # A run on one machine joins no cluster: not another's, nor one that has left
        # its address behind.
        where = {} if joins(run) else {"RAY_ADDRESS": "local"}
        ended = ""
        try:
            with terminable():
                outcome = watch.run(
                    command,
                    part,
                    log,
                    env=run.env | where | {records.PATH: str(part)},
                    asked=total or 10**9,
                    stall=patience.stall,
                    first=patience.first,
                    idle=patience.idle,
                    tell=tell,
                    echo=True,
                )
            status = outcome.status
            ended = outcome.why
        except Terminated:
            status, ended = 143, "it received SIGTERM"
        except KeyboardInterrupt:
            status, ended = 130, "it was interrupted"
        records.collect(run.directory)
        last, code = last_words(run, total, status, ended, log, again)
        with open(log, "a", encoding="utf-8") as f:
            f.write(f"{last}\n")
        print(last, flush=True)
        if code not in (0, 130, 143) and checkpointed(run.directory) > kept:
            return DIED_AHEAD
        return code


def predicted_again(estimate: dict[str, Any], seconds: float, left: int) -> str:
    """Return a line with what is left of the run, by a measured step, beside the
    estimate where there is one. It is a bound: the first two steps compile and warm up.
    """
    hours = left * seconds / 3600
    line = f"  measured {seconds:,.0f} s a step: the {left} steps that are left take {hours:,.1f} hours"
    if not estimate.get("step_seconds"):
        return line
    each = estimate["dollars"] / estimate["gpu_hours"] if estimate["gpu_hours"] else 0
    cost = hours * estimate["gpus"]
    return (
        f"{line}, {cost:,.0f} GPU-hours, {cost * each:,.0f} dollars, without validations; the estimate was "
        f"{estimate['step_seconds']:,.0f} s a step"
    )


def joins(run: Run) -> bool:
    """Return whether a run joins a Ray cluster: it needs several machines, or the user
    named a cluster in RAY_ADDRESS.
    """
    nodes = [
        line.partition("=")[2]
        for line in run.overrides
        if line.startswith("trainer.nnodes=")
    ]
    return bool(os.environ.get("RAY_ADDRESS")) or (bool(nodes) and nodes[-1] != "1")


def line_of_step(row: dict, total: int | None) -> str:
    """Return a step of the log as one line."""
    d = row["data"]
    score = d.get(SCORE, float("nan"))
    line = f"  step {row['step']:4} of {total or '?'}  score {score:.3f}"
    if BOUND in d:
        line += f"  parity {d[BOUND]:.2g}"
    if d.get(ALARMS, 0) > 0:
        line += "  PARITY ALARM"
    if "timing_s/step" in d:
        line += f"  {d['timing_s/step']:.1f} s"
    return line


def last_words(
    run: Run, total: int | None, status: int | None, ended: str, log: Path, again: str
) -> tuple[str, int]:
    """Return the last line of the log, which says what to do next, and the exit status.

    Args:
        run: the run.
        total: steps; None: as many as verl trains.
        status: of verl's process; None: it was ended from here.
        ended: why it was ended; "": it ended by itself.
        log: verl's output, in which the cause is searched.
        again: the command that goes on.

    Returns:
        The line; and 0 if all steps were trained, else `status`, or 1 where that is
        None or 0.
    """
    rows = records.training(records.merged(run.directory))
    done = rows[-1]["step"] if rows else 0
    kept = checkpointed(run.directory)
    of = f"{done} of {total} steps" if total else f"{done} steps"
    report = f"python -m repro.with_verl.report {run.directory}"
    # it saves checkpoints, and ended before the last one was whole
    lost_its_end = bool(status or ended) and 0 < kept < done
    trained = done >= total if total else status == 0
    if trained and not lost_its_end:
        return f"upref: finished, {of}: `{report}`", 0
    how = "verl ended early"
    if status:
        how = f"verl ended with status {status}"
    cure = "" if status in (130, 143) else f"; {advice.cure(log, run.directory)}"
    goes = "from the beginning (no checkpoint was saved)"
    if kept:
        goes = f"from the checkpoint of step {kept}"
    line = f"upref: ended after {of}: {ended or how}{cure}. The same command goes on {goes}: {again}"
    return line, status or 1


class Terminated(Exception):
    """SIGTERM, as SLURM and Kubernetes send it."""


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into the exception Terminated, so that the process can end what it
    started. In a thread that is not the main one nothing changes.
    """
    # there nobody may set a handler
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command_line(argv: list[str]) -> str:
    """Return the command that launches a run with these words, quoted for a shell."""
    return shlex.join(["python", "-m", "repro.with_verl.run.launch", *argv])
