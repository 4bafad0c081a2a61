# SPDX-License-Identifier: Apache-2.0
"""Trains runs on the cores that there are: one process a core, one thread each.

Stop it at any moment and start it again: finished runs are kept, begun ones go on from
their last checkpoint. `say` prints a line on stdout.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from rich.console import Console

from repro.mini import files
from repro.mini.experiment import records
from repro.mini.train.settings import Settings
from upref import interrupt
from upref.errors import InputError

ROOT = Path(__file__).parents[3]
OUT = ROOT / "repro" / "out" / "mini"
TRAIN = "repro.mini.train"
PROGRESS_SECONDS = 60  # between two lines on the runs that train
P = ParamSpec("P")
say = Console(highlight=False, soft_wrap=True).print


def alone(out: Path) -> AbstractContextManager[int]:
    """Lock the folder, so that one suite at a time writes in it; gives the file
    descriptor.

    The runs inherit the lock: it lasts while one of them lives.

    Raises:
        InputError: another suite, or one of its runs, has the lock.
    """
    return files.alone(out, "another suite or by its runs")


def run_all(
    wanted: dict[str, Settings],
    out: Path,
    jobs: int,
    lock: int,
    hours: float = float("inf"),
    train: str | None = None,
    device: str = "cpu",
    ended: Callable[[], object] = lambda: None,
) -> list[str]:
    """Train what is not finished, `jobs` at a time, and print a line when a run ends
    and every PROGRESS_SECONDS.

    Where it is interrupted, the runs are ended and go on from a checkpoint later.

    Args:
        wanted: name -> settings.
        out: folder of the runs.
        jobs: runs at a time.
        lock: from `alone`.
        hours: no run is started after these; those that train are waited for.
        train: the module that trains; None: TRAIN.
        device: as torch names it.
        ended: called whenever one more has ended.

    Returns:
        A sentence for each failure; a run that stopped at a number that is not finite
        is a result, and no failure.
    """
    todo = [name for name in wanted if not records.status(out / name)]
    done = len(wanted) - len(todo)
    say(
        f"{done} of {len(wanted)} runs are finished; {len(todo)} to go, {jobs} at a time."
    )
    failures: list[str] = []
    running: dict[str, subprocess.Popen[bytes]] = {}
    end = time.monotonic() + 3600 * hours
    next_line = time.monotonic() + PROGRESS_SECONDS
    try:
        while running or (todo and time.monotonic() < end):
            while todo and len(running) < jobs and time.monotonic() < end:
                name = todo.pop(0)
                running[name] = _launch(
                    out / name, wanted[name], lock, train or TRAIN, device
                )
            have_ended = [name for name, p in running.items() if p.poll() is not None]
            for name in have_ended:
                failures += _finished(out / name, running.pop(name).returncode)
                word = records.status(out / name) or "failed"
                say(f"{word:8} {name}; {len(running) + len(todo)} to go", markup=False)
                ended()
            if running and time.monotonic() >= next_line:
                training = {name: wanted[name] for name in running}
                say(progress(out, training), markup=False)
                next_line += PROGRESS_SECONDS
            time.sleep(0.3)
    finally:
        _stop(running.values())
    return failures


def progress(out: Path, running: dict[str, Settings]) -> str:
    """Return in a sentence how many steps of each run have ended.

    Args:
        out: the folder of the runs.
        running: the settings of each run by its name.
    """
    parts = [
        f"{name} at step {_steps(out / name)} of {settings.steps}"
        for name, settings in running.items()
    ]
    return f"training: {', '.join(parts)}"


def delete_checkpoints(out: Path, names: Iterable[str]) -> None:
    """Delete the checkpoints of finished runs: a run of a language model leaves 9 GB.

    Args:
        out: the folder of the runs.
        names: of runs; what is not there or not finished stays.
    """
    for name in names:
        if records.status(out / name) == "done":
            shutil.rmtree(out / name / "checkpoints", ignore_errors=True)


def _launch(
    folder: Path, settings: Settings, lock: int, train: str, device: str
) -> subprocess.Popen[bytes]:
    """Start a run with one thread in a process of its own.

    Args:
        folder: of the run; its settings are written to asked.json there, and what it
            prints is added to log.txt.
        settings: of the run.
        lock: from `alone`; the run inherits it.
        train: the module that trains.
        device: as torch names it.
    """
    folder = folder.resolve()  # the run works in ROOT
    folder.mkdir(parents=True, exist_ok=True)
    asked = folder / "asked.json"
    files.write_atomically(asked, json.dumps(asdict(settings)))
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    one_thread = dict.fromkeys(limits, "1")
    command = [sys.executable, "-m", train]
    command += ["--settings", str(asked), "--out", str(folder)]
    if device != "cpu":
        command += ["--device", device]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | one_thread,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[lock],
        )


def _finished(folder: Path, code: int) -> list[str]:
    """Return [] for a run that is a result, or one sentence for a run that failed and
    is tried again next time.

    For a run that stopped at a number that is not finite, write failed.json: it is a
    result.

    Args:
        folder: of the run.
        code: its exit status.
    """
    if code == 0 and records.status(folder):
        return []
    said = [line.strip() for line in _tail(folder / "log.txt") if line.strip()]
    last = said[-1] if said else "no word"
    # a number was not finite (train/command.py): the same seed would end there again
    if code == 1 and list(folder.glob("minibatch-*")):
        why = f"stopped at step {_steps(folder)}: {last}"
        files.write_atomically(folder / "failed.json", json.dumps({"status": why}))
        return []
    return [
        f"{folder.name} ended with status {code}: {last} (all of it: {folder / 'log.txt'})"
    ]


def _tail(path: Path, size: int = 4000) -> list[str]:
    """Return the lines in the last `size` bytes of a file; the first may be cut."""
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - size))
        return f.read().decode(errors="replace").splitlines()


def _steps(folder: Path) -> int:
    """Return how many steps of a run have ended, by the lines of steps.jsonl."""
    path = folder / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End the processes by SIGTERM, or SIGKILL where one still lives after ten
    seconds.
    """
    for p in processes:
        p.terminate()
    for p in processes:
        try:
            p.wait(10)
        except subprocess.TimeoutExpired:
            p.kill()


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def exit_status_of(who: str) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Return a decorator of the function that does a command's work and returns its exit
    status. The status is 2, after a sentence on stderr, where the function raises
    InputError or OSError.

    An interruption prints that the same command goes on.

    Args:
        who: the name in front of the sentence.
    """

    def decorated(work: Callable[P, int]) -> Callable[P, int]:
        @wraps(work)
        def status(*args: P.args, **named: P.kwargs) -> int:
            """Do the work; return its status, or 2."""
            interrupt.then("the same command goes on from here")
            try:
                return work(*args, **named)
            except InputError as error:
                said = str(error)
            except OSError as error:
                where = error.filename or "is the disk full?"
                said = f"{error.strerror or error}: {where}"
            print(f"{who}: {said}", file=sys.stderr)
            return 2

        return status

    return decorated
