# SPDX-License-Identifier: Apache-2.0
"""Start a trainer, follow the steps it logs, and end it when it cannot go on: verl
hangs where a worker has died.

A run is over when its process is. It is ended, with all it has started, GRACE seconds
after an actor of Ray or an engine of vLLM has gone; when no step was logged for IDLE
seconds and four times the longest step so far, and it used less than half the CPU that
it used between steps: it waits for what does not come; when no step was logged for
`stall` seconds and ten times the longest step; and, before the first step, when nothing
was written for `first` seconds. On a machine with more work than cores the last two
count less. After the last step it has END seconds to shut down. What Ray runs on other
machines is not seen from here: there only the steps count, and what verl says.
"""

import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from repro.with_verl.run import records

# seconds for verl to notice by itself; to finish, one actor after the other; see above
GRACE, END, IDLE = 25, 120, 30
# seconds between looks; an actor that went so long before the trainer is named
LOOK, BLAME = 1.0, 5.0
ACTOR = re.compile(r"^ray::(?!IDLE)[A-Z]\w+|^VLLM::\w+|(?<=/)(raylet|gcs_server)(?= )")


@dataclass
class Outcome:
    """How a command ended."""

    status: int | None  # of the process; None: it was ended from here
    why: str  # "" where it ended by itself
    seconds: float
    # of it and all it started: what does not depend on what else the machine does
    cpu_seconds: float = 0.0
    gone: str = ""  # the actor or engine that went first, and when


def steps(log: Path) -> list[dict]:
    """Return the steps of training that verl's file logger has written so far."""
    return records.training(records.read(log))


class Family:
    """A process and all it has started, also what was left behind by a parent that
    died.
    """

    def __init__(self, pid: int):
        """Follow the process of this id, which must be running."""
        self.root = psutil.Process(pid)
        self.seen: dict[psutil.Process, str] = {self.root: ""}
        self.dead: list[str] = []
        self.since = 0.0  # the first of them was seen to be gone
        self.used: dict[psutil.Process, float] = {}
        self.worked = 0.0  # seconds of CPU so far

    def look(self):
        """Find all processes of the family, add their CPU seconds since the last look
        to `worked`, and put actors that are gone into `dead`.
        """
        wanted = ["ppid", "cmdline", "status", "cpu_times"]
        everybody = [
            p for p in psutil.process_iter(wanted) if p.info["status"] != "zombie"
        ]
        found = {p for p in everybody if p in self.seen}
        more = found
        while more:  # their children, the children of these, and so on
            pids = {p.pid for p in found}
            more = {p for p in everybody if p.info["ppid"] in pids} - found
            found |= more
        for p in self.seen.keys() - found - {self.root}:
            if actor := ACTOR.search(self.seen[p]):
                self.since = self.since or time.monotonic()
                self.dead.append(f"{actor[0]} (process {p.pid})")
        self.seen = {p: " ".join(p.info["cmdline"] or []) for p in found}
        used = {}
        for p in found:
            if times := p.info["cpu_times"]:
                used[p] = times.user + times.system
        since_last = [seconds - self.used.get(p, 0.0) for p, seconds in used.items()]
        self.worked += sum(since_last)
        self.used = used

    def end(self):
        """End all processes of the family: ask them by SIGTERM, and kill after five
        seconds those that are left.
        """
        for send in (signal.SIGTERM, signal.SIGKILL):
            self.look()
            for p in self.seen:
                with suppress(psutil.Error):
                    p.send_signal(send)
            psutil.wait_procs(list(self.seen), timeout=5)


def crowd() -> float:
    """Return how many processes want each core beyond the two that a run keeps busy; at
    least 1.
    """
    return max(1.0, (os.getloadavg()[0] - 2) / (os.cpu_count() or 1))


def show(output: Path, after: int) -> int:
    """Print what was written to a file behind byte `after`; return how many bytes it
    has now.
    """
    with output.open("rb") as f:
        f.seek(after)
        new = f.read()
    sys.stdout.write(new.decode(errors="replace"))
    sys.stdout.flush()
    return after + len(new)


@dataclass
class Progress:
    """What was seen of a command up to the last look.

    Attributes:
        start: time of its start.
        last: time of its last step; before the first, of its last output.
        steps: how many it has logged.
        longest: seconds between two steps, at most.
        written: bytes of its output; -1: it was not looked at.
        pace: CPU seconds that it uses in a second between steps.
        worked: its CPU seconds up to the last step.
        at_first: time and CPU seconds at the first step.
    """

    start: float
    last: float
    steps: int = 0
    longest: float = 0.0
    written: int = -1
    pace: float = 0.0
    worked: float = 0.0
    at_first: tuple[float, float] = (0.0, 0.0)

    def add_step(self, now: float, worked: float) -> None:
        """Count a step that is seen now, after so many CPU seconds."""
        if self.steps:
            first, worked_first = self.at_first
            self.longest = max(self.longest, now - self.last)
            self.pace = (worked - worked_first) / max(now - first, 1)
        else:  # that was the start
            self.at_first = now, worked
        self.steps += 1
        self.last, self.worked = now, worked

    def add_output(self, now: float, written: int) -> None:
        """Take so many bytes of output, if they are new, as a sign of life."""
        if written != self.written:
            self.written, self.last = written, now


def _reason_to_end(
    seen: Progress,
    family: Family,
    now: float,
    *,
    is_last: bool,
    stall: float,
    first: float,
    idle: bool,
    limit: float,
) -> str:
    """Return why a command has to be ended now, by the rules in the head of this file;
    "" if it may go on.

    Args:
        seen: its progress.
        family: its processes.
        now: the time.
        is_last: whether it has logged its last step.
        stall, first, idle, limit: as for `run`.
    """
    waited = now - seen.last
    if now - seen.start > limit:
        return f"its limit of {limit:.0f} s"
    if is_last:
        return "it did not end after its last step" if waited > END else ""
    if family.dead:
        is_late = now - family.since > GRACE
        return f"{family.dead[0]} died and the trainer did not end" if is_late else ""
    hardly_works = family.worked - seen.worked < seen.pace / 2 * waited
    if idle and hardly_works and waited > max(IDLE, 4 * seen.longest):
        return f"no step for {waited:.0f} s and hardly any work: it waits; does a reward hang?"
    patience = max(stall, 10 * seen.longest) if seen.steps else first
    if waited > patience * crowd():
        return f"no {'step' if seen.steps else 'sign of life'} for {waited:.0f} s"
    return ""


def run(
    command: list[str],
    log: Path,
    output: Path,
    *,
    env: dict,
    asked: int,
    stall: float,
    first: float,
    tell=print,
    idle: bool = True,
    echo: bool = False,
    limit: float = math.inf,
) -> Outcome:
    """Run a command until it ends or has to be ended, by the rules in the head of this
    file.

    Args:
        command: the words.
        log: the file of steps that the command writes.
        output: its output is appended to this file.
        env: environment variables, over those of this process.
        asked: the number of the last step.
        stall: seconds without a step after which it is ended.
        first: seconds without output after which it is ended before its first step.
        tell: called with each step that is logged.
        idle: whether it is ended where it waits without using the CPU, too.
        echo: whether its output is printed as it comes.
        limit: seconds after which it is ended.

    Returns:
        How it ended. None of its processes is left.
    """
    start = time.monotonic()
    seen = Progress(start, last=start)
    why = ""  # it has to be ended
    shown = output.stat().st_size if output.exists() else 0
    with output.open("ab") as f:
        process = subprocess.Popen(
            command,
            stdout=f,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            start_new_session=True,
        )
    family = Family(process.pid)
    try:
        while process.poll() is None and not why:
            family.look()
            now = time.monotonic()
            rows = steps(log)
            for row in rows[seen.steps :]:
                tell(row)
                seen.add_step(now, family.worked)
            if not seen.steps:
                seen.add_output(now, output.stat().st_size)
            why = _reason_to_end(
                seen,
                family,
                now,
                is_last=bool(rows) and rows[-1]["step"] >= asked,
                stall=stall,
                first=first,
                idle=idle,
                limit=limit,
            )
            shown = show(output, shown) if echo else shown
            time.sleep(LOOK)
        for row in steps(log)[seen.steps :]:
            tell(row)
        # those that went with the trainer are not to blame
        ago = time.monotonic() - family.since
        gone = ""
        if family.dead and ago > BLAME:
            gone = f"{family.dead[0]}, {ago:.0f} s before the end"
    finally:  # also when this is interrupted: nothing is left running
        family.look()
        family.end()
        process.wait()
        if echo:
            show(output, shown)
    return Outcome(
        None if why else process.returncode,
        why,
        time.monotonic() - start,
        family.worked,
        gone,
    )
