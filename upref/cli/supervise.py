# SPDX-License-Identifier: Apache-2.0
"""User code in a child process, which sends what it measures, or its report, through a pipe.

os._exit(0), a crash, a fork or an endless loop in a loss therefore never counts as a verdict. This protects from
accidents; a file that attacks its checker needs a container (SECURITY.md). The file descriptor 1 of the child is
stderr, so output that bypasses Python stays out of the report.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from os import _exit  # as it is now: a loss may put another in its place
from typing import Any

from upref.errors import Gone

ENDS = {signal.SIGINT, signal.SIGTERM}


class Child:
    """A process that runs user code. what: it runs, in words. deadline: of time.monotonic()."""

    def __init__(self, pid: int, pipe: Any, what: str, seconds: float):
        self.pid, self.pipe, self.what, self.seconds = pid, pipe, what, seconds
        self.deadline = time.monotonic() + seconds

    def send_bytes(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, as the next line that is received tells
            self.pipe.send_bytes(data)

    def recv_bytes(self) -> bytes:
        """What the child sends next; Gone where it ends before that, or not in time."""
        closed = False
        while (left := self.deadline - time.monotonic()) > 0:
            # a process that the child has forked may hold the other end open
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            try:
                if not closed and self.pipe.poll(0 if ended else min(left, 0.2)):
                    return self.pipe.recv_bytes()
            except (EOFError, OSError):
                closed = True
            if ended:
                status = ended.si_status
                how = f"ended the process with exit status {status}"
                how = how if ended.si_code == os.CLD_EXITED else f"died of signal {status}"
                raise Gone(f"{self.what} {how} before there was a report: a function returns its value.")
            time.sleep(0.01 * closed)
        raise Gone(f"{self.what} timed out after {self.seconds:g} s; raise --timeout.")


@contextlib.contextmanager
def child(work: Callable[[Any], None], seconds: float, what: str = "the loss") -> Iterator[Child]:
    """A process that does the work, given its end of the pipe. With the block it ends, and so does its group."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    ours, theirs = Pipe()
    # Python swallows what a signal handler raises within fork
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    parent, pid = os.getpid(), os.fork()
    if not pid:
        _child(lambda: work(theirs), parent)
    theirs.close()
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield Child(pid, ours, what, seconds)
    finally:  # after Ctrl-C and SIGTERM too
        ours.close()
        for kill in (os.killpg, os.kill):  # and what the loss has started: who reads stdout would wait for that
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def supervised(work: Callable[[], int], seconds: float, what: str = "the loss") -> int:
    """The exit status of work that prints in the child; Gone where it ends without one or takes longer."""

    def told(pipe: Any) -> None:
        process, status = os.getpid(), work()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if os.getpid() == process:
            pipe.send_bytes(str(status).encode())

    with child(told, seconds, what) as one:
        return int(one.recv_bytes())


def _child(work: Callable[[], None], parent: int):
    """Never returns, never runs what the loss has left for the end of the process."""
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for at_terminal in (signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(at_terminal, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the parent's; KeyboardInterrupt is the loss's
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        threading.Thread(target=_ends_with, args=(parent,), daemon=True).start()
        with contextlib.suppress(OSError):  # stdout is closed
            own = os.dup(1)
            os.dup2(2, 1)
            sys.stdout = open(own, "w", encoding=getattr(sys.stdout, "encoding", None))  # noqa: SIM115
        work()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        _exit(2)


def _ends_with(parent: int):
    """A child whose parent was killed does not go on."""
    while os.getppid() == parent:
        time.sleep(0.5)
    _exit(2)  # a check puts a function that raises in the place of os._exit
