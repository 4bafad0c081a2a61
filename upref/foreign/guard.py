# SPDX-License-Identifier: Apache-2.0
"""The guard around user code: it returns the answer, or raises InputError with one sentence.

`called` makes one call: of a loss, an advantage function, a KL estimator or a backward pass. It restores the state of
the process after the call. `undisturbed` does the same for a whole check, restores random generators at the end, and
reports what was changed. Checks in several threads take turns, because this state belongs to the whole process.
upref/cli/supervise.py handles what no guard in the same process can stop, such as os._exit or an endless loop.
"""

import contextlib
import io
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from upref.errors import InputError
from upref.interrupt import Terminated


def said(e: BaseException) -> str:
    """What an exception says, on one line."""
    try:
        return " ".join(str(e).split())[:200] or "(it says no more)"
    except Exception:
        return "(its source cannot be read)"


# ---- the state of the process ----------------------------------------------------------------------------------------
def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


# what it is called -> how it is read, and how it is set
STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, torch.set_default_device),
    "whether torch computes gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's choice of algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "the precision of torch's products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "what numpy does about overflow": (np.geterr, lambda how: np.seterr(**how)),
    "the working directory": (_folder, lambda folder: os.chdir(folder or os.sep)),
}
RANDOM: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's random generator": (torch.get_rng_state, torch.set_rng_state),
    "numpy's random generator": (lambda: np.random.get_state(legacy=True), np.random.set_state),
    "Python's random generator": (random.getstate, random.setstate),
}


_watching: list[set[str]] = []  # one for each `undisturbed` that is open
_turn = threading.RLock()  # one thread at a time


def _new_turn() -> None:
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):  # the thread that held it does not exist in the child
    os.register_at_fork(after_in_child=_new_turn)


@contextlib.contextmanager
def _restored(state: dict[str, tuple[Callable[..., Any], Callable[..., Any]]]) -> Iterator[None]:
    before = {name: read() for name, (read, _) in state.items()}
    try:
        yield
    finally:
        for name, (read, put) in state.items():
            if not _equal(before[name], read()):
                put(before[name])
                if _watching:
                    _watching[-1].add(name)


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return torch.equal(x, y)
    if isinstance(x, tuple):
        return all(_equal(a, b) for a, b in zip(x, y, strict=True))
    return np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y


@contextlib.contextmanager
def undisturbed() -> Iterator[set[str]]:
    """The state of the process is after it what it was before; what was changed in between, by name."""
    changed: set[str] = set()
    with _turn:
        _watching.append(changed)
        try:
            with _restored(STATE | RANDOM):
                yield changed
        finally:
            _watching[:] = [x for x in _watching if x is not changed]


# ---- one call --------------------------------------------------------------------------------------------------------
def called(name: str, call: Callable[[], Any], lines: int = 0) -> tuple[Any, bool]:
    """(its answer, whether it printed). lines: of Python that it may run before it is stopped, 0 for any number."""
    out, process = _Kept(None), os.getpid()
    try:
        with _turn:
            out.stream = sys.stdout
            state = _restored(STATE if _watching else STATE | RANDOM)  # in a check, a loss that draws is noted
            with contextlib.redirect_stdout(out), warnings.catch_warnings(), state, _ctrl_c(), _at_most(lines):
                warnings.simplefilter("ignore")
                answer = call()
    except InputError as e:
        raise InputError(said(e)) from e
    except Terminated:
        raise
    except _CtrlC:
        raise KeyboardInterrupt from None
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as e:
        raise InputError(f"{name} ends the program ({type(e).__name__}): a function returns its value.") from e
    except BaseException as e:
        raise InputError(f"{name} raised {type(e).__name__}: {said(e)}") from e
    finally:
        if os.getpid() != process:  # it forked, and this is the copy: one report is enough
            os._exit(0)
    return answer, out.wrote


class _Kept(io.StringIO):
    """Swallows what this thread prints; other threads still print to the stream that it replaces."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream, self.thread, self.wrote = stream, threading.get_ident(), False

    def write(self, text: str) -> int:
        if threading.get_ident() != self.thread and self.stream is not None:
            return self.stream.write(text)
        self.wrote = self.wrote or bool(text)
        return len(text)

    def close(self) -> None:
        """User code may close its standard output."""


class _CtrlC(BaseException):
    """The person at the keyboard, not a loss that raises KeyboardInterrupt."""


@contextlib.contextmanager
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C while it runs is the user's, and ends everything."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def pressed(number: Any, frame: Any) -> None:
        raise _CtrlC

    signal.signal(signal.SIGINT, pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _at_most(lines: int) -> Iterator[None]:
    """What runs in it is stopped after so many lines: a loop that would take years ends here."""
    left = lines

    def trace(frame: Any, event: Any, arg: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TimeoutError(f"stopped after {lines} lines")
        return trace

    before = sys.gettrace()
    if lines:
        sys.settrace(trace)
    try:
        yield
    finally:
        if lines:
            sys.settrace(before)
