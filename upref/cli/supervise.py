# SPDX-License-Identifier: Apache-2.0
"""A verb that runs user code runs whole in a child process, which sends one report
through a pipe.

os._exit(0), a crash, a fork or an endless loop in a loss therefore never counts as a
verdict. This protects from accidents; a file that attacks its checker needs a container
(SECURITY.md). The file descriptor 1 of the child is stderr, so output that bypasses
Python stays out of the report.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from os import _exit  # as it is now: a check puts another in its place
from pathlib import Path
from typing import NamedTuple, NoReturn

from upref.errors import Gone

ENDS = {signal.SIGINT, signal.SIGTERM}
LONGEST = 2**26  # bytes of a report
QUIET = 2  # seconds after which a terminal shows that work goes on
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux


class Printed(NamedTuple):
    """What a verb has done.

    Attributes:
        status: the exit status: 0 equal or done, 1 different, 2 it could not run.
        out: what it printed.
        sentence: what is wrong, or empty.
    """

    status: int
    out: str
    sentence: str


def supervised(
    work: Callable[[], Printed], seconds: float, what: str = "the loss"
) -> Printed:
    """Do the work in a child process, and at the end kill that process with all that it
    has started.

    Args:
        work: what the child does.
        seconds: the time limit, from the fork to the last byte of the report.
        what: what runs in the child, in words.

    Returns:
        The report.

    Raises:
        Gone: the child ended without a report, took longer, or wrote something else
            into the pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    deadline = time.monotonic() + seconds
    parent = os.getpid()
    children_before = _children()
    # what the loss writes into the pipe without knowing it is no report
    token = secrets.token_hex(8)
    _adopt_orphans(True)
    reading_end, writing_end = os.pipe()
    # Python swallows what a signal handler raises within fork
    signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    pid = os.fork()
    if not pid:
        os.close(reading_end)
        _run_in_child(work, writing_end, parent, token)
    os.close(writing_end)
    progress = _Progress(seconds)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        return _parse_report(
            _read_line(reading_end, pid, deadline, what, progress), token, what
        )
    finally:  # after Ctrl-C and SIGTERM too
        progress.clear()
        os.close(reading_end)
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _end_children(children_before)
        _adopt_orphans(False)


# ---- the parent ----------------------------------------------------------------------
class _Progress:
    """Shows on a terminal how long the child has worked; nothing where stderr is none."""

    def __init__(self, seconds: float) -> None:
        """Take the time limit in seconds; show nothing yet."""
        self.seconds = seconds
        self.shown = 0  # the seconds that the terminal shows
        self.has_terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, passed: float) -> None:
        """Show the whole seconds that have passed, each once, from QUIET on."""
        if self.has_terminal and passed >= max(QUIET, self.shown + 1):
            self.shown = int(passed)
            words = f"working for {self.shown} s, at most {self.seconds:g} s ..."
            _print_to_terminal(f"\r{words}")

    def clear(self) -> None:
        """Remove what is shown."""
        if self.shown:
            _print_to_terminal(f"\r{'':60}\r")


def _print_to_terminal(words: str) -> None:
    """Print on stderr; nothing where the terminal is gone."""
    with contextlib.suppress(OSError):
        print(words, end="", file=sys.stderr, flush=True)


def _read_line(
    pipe: int, pid: int, deadline: float, what: str, progress: _Progress
) -> bytes:
    """Read what the child sends, up to the chunk that has a line break.

    Args:
        pipe: the reading end.
        pid: of the child.
        deadline: on the clock of `time.monotonic`.
        what: what runs in the child, in words.
        progress: shows how long it has worked.

    Raises:
        Gone: the child ended before it sent a line, sent too much, or took longer.
    """
    line = bytearray()
    closed = False
    while (seconds_left := deadline - time.monotonic()) > 0:
        progress.show(progress.seconds - seconds_left)
        # a process that the child has forked may hold the other end open
        exit_state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ready: list[int] = []
        if not closed:
            # of a child that has ended, only what is in the pipe already
            wait = 0 if exit_state else min(seconds_left, 0.2)
            ready, _, _ = select.select([pipe], [], [], wait)
        if ready:
            chunk = os.read(pipe, 2**16)
            line += chunk
            closed = not chunk
            if b"\n" in chunk:
                return bytes(line)
            if len(line) > LONGEST:
                raise Gone(
                    f"{what} sent more than {LONGEST:,} bytes: a report is shorter."
                )
        elif exit_state:
            how = _describe_end(exit_state.si_status, exit_state.si_code)
            raise Gone(
                f"{what} {how} before there was a report: a function returns its value."
            )
        elif closed:
            time.sleep(0.01)
    raise Gone(f"{what} timed out after {progress.seconds:g} s; raise --timeout.")


def _describe_end(status: int, code: int) -> str:
    """Say in words how a child ended."""
    if code == os.CLD_EXITED:
        return f"ended the process with exit status {status}"
    if status == signal.SIGKILL:
        return "was killed (by signal 9, as Linux does where memory runs out)"
    return f"died of signal {status}"


def _parse_report(line: bytes, token: str, what: str) -> Printed:
    """Read the report of a line; Gone where it does not begin with the token, or is no
    report.
    """
    if line.startswith(token.encode()):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            report = Printed(*json.loads(line.removeprefix(token.encode())))
            are_texts = all(isinstance(text, str) for text in report[1:])
            if report.status in (0, 1, 2) and are_texts:
                return report
    raise Gone(
        f"{what} garbled the report: write to files alone that the code has opened, "
        "and replace no functions of Python."
    )


# ---- the child -----------------------------------------------------------------------
def _run_in_child(
    work: Callable[[], Printed], pipe: int, parent: int, token: str
) -> NoReturn:
    """Do the work, send the report, and end the process without anything that the loss
    has left for its end.

    The report is one line: the token and a JSON list. The exit status of the process is
    always 2: the parent reads the verdict from the report alone.

    Args:
        work: what this child does.
        pipe: the writing end.
        parent: the process id of the parent, with which this process ends.
        token: precedes the report, so that nothing else is taken for one.
    """
    try:
        process = os.getpid()
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for at_terminal in (signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(at_terminal, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the parent's
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        _adopt_orphans(True)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        # it is one of 0, 1 and 2 where those were closed
        pipe = fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 3)
        with contextlib.suppress(OSError):
            os.dup2(2, 1)
        report = work()
        if os.getpid() == process:  # else the loss has forked, and this is the copy
            line = f"{token}{json.dumps(report)}\n".encode()
            while line:
                line = line[os.write(pipe, line) :]
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        _exit(2)


def _end_with(parent: int) -> None:
    """End this process and all that it has started when its parent ends, SIGKILL
    included.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    _end_children(set())
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    _exit(2)


# ---- what the loss has started, sessions of their own included (Linux) ---------------
def _adopt_orphans(on: bool) -> None:
    """Set whether this process becomes the parent of a descendant whose own parent ends."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(SUBREAPER, int(on), 0, 0, 0)


def _children() -> set[int]:
    """Return the process ids of the children of this process; none where there is no
    /proc.
    """
    children = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "PID (COMMAND) STATE PARENT ...": a command may hold spaces and brackets
            _, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid():
                children.add(int(stat.parent.name))
    return children


def _end_children(children_before: set[int]) -> None:
    """Kill the children that were not there before, and wait for their ends. Their own
    children then become those of this process, and end in the next round.
    """
    children_to_leave = set(children_before)
    while children_to_end := _children() - children_to_leave:
        for pid in children_to_end:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:  # it runs as another user
                children_to_leave.add(pid)
            except ProcessLookupError:
                pass
        for pid in children_to_end - children_to_leave:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
