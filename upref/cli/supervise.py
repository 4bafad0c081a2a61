# SPDX-License-Identifier: Apache-2.0
"""User code in a child process: its exit status counts only after it reports that it has finished.

os._exit(0), a crash, a fork or an endless loop in a loss therefore never counts as a verdict. This protects from
accidents; a file that attacks its checker needs a container (SECURITY.md). The child is forked before any heavy import,
which costs a few milliseconds. Its file descriptor 1 is stderr, so output that bypasses Python stays out of the report.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from os import _exit, write  # as they are now: a loss may put others in their place

ENDS = {signal.SIGINT, signal.SIGTERM}


def supervised(work: Callable[[], int], seconds: float, what: str = "the loss") -> int:
    """The exit status of the work; 2, with one sentence on stderr, where it ends without one or takes longer. what: it
    runs, in words."""
    if not hasattr(os, "fork"):
        return work()
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # Python swallows what a signal raises within fork
    parent, child = os.getpid(), os.fork()
    if not child:
        _child(work, writing, parent)
    os.close(writing)
    said = None
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if (said := _said(reading, child, time.monotonic() + seconds)) is not None:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    finally:  # after Ctrl-C and SIGTERM too
        os.close(reading)
        _kill(child)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if said is None:
        return _no_verdict(f"{what} timed out after {seconds:g} s; raise --timeout.")
    if said:
        return int(said)
    how = f"ended the process with exit status {ended}" if ended >= 0 else f"died of signal {-ended}"
    return _no_verdict(f"{what} {how} before there was a report: a function returns its value.")


def _kill(child: int):
    """The child and what its loss has started: who reads stdout would wait for that."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)


def _no_verdict(sentence: str) -> int:
    print(f"upref: {sentence}", file=sys.stderr)
    return 2


def _said(reading: int, child: int, end: float) -> bytes | None:
    """What the child says last, b"" if it ends without a word, None if it does not end in time."""
    while (left := end - time.monotonic()) > 0:
        ready = select.select([reading], [], [], min(left, 0.2))[0]
        # a process that the child has forked may hold the other end open
        if ready or os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return os.read(reading, 64) if select.select([reading], [], [], 0)[0] else b""
    return None


def _child(work: Callable[[], int], writing: int, parent: int):
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
        process = os.getpid()
        status = work()
        if os.getpid() == process:
            write(writing, str(status).encode())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        _exit(2)


def _ends_with(parent: int):
    """A child whose parent was killed does not go on."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(2)
