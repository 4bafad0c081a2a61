# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end a command, its imports too, with one sentence and exit status
130 or 143.

`repro`, `docs`, `benchmarks` and `paper` call `handled` in their __init__, so that it
holds for every `python -m` of theirs.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

# the reading end of a pipe that gets the numbers of the signals; empty before `handled`
_signal_pipe: list[int] = []
_parts_of_sentence = {"who": "", "then": "run the same command again"}


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception: on its way child processes are stopped and drafts are
    removed.
    """


def handled(who: str = "") -> None:
    """Print one sentence for an interrupt of this process, from now on.

    Args:
        who: The command. "": `python -m` as it was typed, and nothing where this
            process was started otherwise.
    """
    # Python has "-m" there while it looks for the module, and only then
    if not who and sys.argv[0] != "-m":
        return
    _parts_of_sentence["who"] = (
        who or f"python -m {sys.orig_argv[sys.orig_argv.index('-m') + 1]}"
    )
    process = os.getpid()

    def raise_terminated(number: int, frame: Any) -> None:
        """Raise Terminated; in a fork of this process, end by the signal itself."""
        if os.getpid() != process:  # a fork, whose end is its own
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise Terminated

    signal.signal(signal.SIGTERM, raise_terminated)
    # a shell that starts a command with & has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # some extension modules turn an interrupt of their import into an ImportError
    if not _signal_pipe:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        _signal_pipe.append(reading)
    sys.excepthook = _end
    sys.unraisablehook = _repeat_interrupt


@contextmanager
def handled_within(who: str) -> Iterator[None]:
    """Print one sentence for an interrupt inside, and raise SystemExit; restore the
    handlers at the end.

    Args:
        who: the command, as messages name it.

    Yields:
        Once.
    """
    handlers = [
        (number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)
    ]
    hooks = sys.excepthook, sys.unraisablehook
    handled(who)
    try:
        yield
    except KeyboardInterrupt as e:
        _end(type(e), e, None)
    finally:
        sys.excepthook, sys.unraisablehook = hooks
        for number, before in handlers:
            signal.signal(number, before)


def then(sentence: str) -> None:
    """Set what an interrupt leaves and how to go on, in place of "run the same command
    again".

    Args:
        sentence: what is printed.
    """
    _parts_of_sentence["then"] = sentence


def _repeat_interrupt(unraisable: Any) -> None:
    """Send an interrupt once more, a moment later, where it came while Python ran a
    callback, whose exceptions Python passes over.
    """
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    number = (
        signal.SIGTERM if issubclass(unraisable.exc_type, Terminated) else signal.SIGINT
    )
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()


def _end(kind: Any, error: Any, trace: Any) -> None:
    """Print one line and raise SystemExit with the status of a shell, 130 or 143, where
    Ctrl-C or SIGTERM ended the program; print any other exception as Python does.
    """
    if issubclass(kind, ImportError) and _signal_pipe:
        with suppress(BlockingIOError):
            numbers = {*os.read(_signal_pipe[0], 4096)} & {
                signal.SIGINT,
                signal.SIGTERM,
            }
            if numbers:
                kind = Terminated if signal.SIGTERM in numbers else KeyboardInterrupt
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    verb, status = ("terminated", 143) if kind is Terminated else ("interrupted", 130)
    line_break = "\n" if sys.stderr.isatty() else ""  # behind ^C
    print(
        f"{line_break}{_parts_of_sentence['who']}: {verb}; {_parts_of_sentence['then']}.",
        file=sys.stderr,
    )
    atexit.register(_end_quietly)  # the last one registered runs first
    raise SystemExit(status)


def _end_quietly() -> None:
    """Print no exception from here on: a library whose import was interrupted, as ray's,
    may raise in what it has registered for the end of the process.
    """
    sys.unraisablehook = _print_nothing


def _print_nothing(unraisable: Any) -> None:
    """Ignore an exception that nobody can catch, at the end of the process."""
