# SPDX-License-Identifier: Apache-2.0
"""The guard around user code: it returns the answer, or raises InputError with one
sentence; within a check Gone, where the code ends the program.

`call_guarded` makes one call: of a loss, an advantage function, a KL estimator or a backward
pass. It restores the state of the process after the call. `state_restored` does the
same for a whole check, restores random generators at the end, and reports what was
changed. Only state that changes what a later computation gives, or that code at import
often sets, is restored. Checks in several threads take turns, because this state
belongs to the whole process. upref/cli/supervise.py handles what no guard in the same
process can stop, such as a crash or an endless loop. One file: what is set back, and
the call around which it is.
"""

import contextlib
import io
import logging
import os
import random
import sys
import sysconfig
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from os import _exit  # as it is now: a loss may put another in its place
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import Gone, InputError, OutOfMemory, TooManyLines, describe_kind
from upref.tensors import describe
from upref.user_code.arrays import advice_on_error


def one_line(error: BaseException) -> str:
    """Return the words of an exception, on one line: those that fit into 200 characters.
    In place of a message that is empty or cannot be read, a remark says so.

    Args:
        error: the exception.
    """
    try:
        words = " ".join(str(error).split())
        return textwrap.shorten(words, 200, placeholder=" ...") or "(it says no more)"
    except BaseException:
        return "(its message cannot be read)"


# ---- the state of the process --------------------------------------------------------
def _working_directory() -> str:
    """Return the current folder; "" where it was removed."""
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _go_back_to(folder: str) -> None:
    """Change to the folder, or to the root for ""; stay where it was removed."""
    with contextlib.suppress(OSError):  # it was removed
        os.chdir(folder or os.sep)


State = dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]


def _environment() -> dict[str, str]:
    """Return the environment variables that a check restores."""
    # torch's compiler sets it
    return {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}


def _set_environment(before: dict[str, str]) -> None:
    """Replace all environment variables by these."""
    os.environ.clear()
    os.environ.update(before)


def _set_autocast(on: bool, dtype: torch.dtype) -> None:
    """Set whether torch casts on the CPU by itself, and to which dtype."""
    torch.set_autocast_enabled("cpu", on)
    torch.set_autocast_dtype("cpu", dtype)


def _set_logging(level: int, handlers: list[logging.Handler], disabled: int) -> None:
    """Set the level and the handlers of the root logger, and the level up to which all
    loggers are disabled.
    """
    logging.root.setLevel(level)
    logging.root.handlers = handlers
    logging.disable(disabled)


def _precision() -> tuple[str, ...]:
    """Return the precision of products: one value by its one name; or two by its newer
    names, where a program set one of those, as torch then refuses the one name.
    """
    try:
        return (torch.get_float32_matmul_precision(),)
    except RuntimeError:
        return tuple(backend.fp32_precision for backend in _precision_backends())


def _precision_backends() -> tuple[Any, ...]:
    """Return what has the newer names, which torch does not type: of CUDA and of the
    CPU.
    """
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.mkldnn.matmul


def _set_precision(value: tuple[str, ...]) -> None:
    """Set the precision to what `_precision` returned."""
    if len(value) == 1:
        torch.set_float32_matmul_precision(value[0])
        return
    for backend, precision in zip(_precision_backends(), value, strict=True):
        backend.fp32_precision = precision


# what it is called -> how it is read, and how it is set
STATE: State = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    # get_default_device is slow
    "torch's default device": (lambda: torch.empty(0).device, torch.set_default_device),
    "whether torch computes gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's anomaly mode": (
        torch.is_anomaly_enabled,
        torch.autograd.set_detect_anomaly,
    ),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's choice of algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda on: torch.use_deterministic_algorithms(on[0], warn_only=on[1]),
    ),
    "torch's autocast": (
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        lambda on: _set_autocast(*on),
    ),
    "the precision of torch's products": (_precision, _set_precision),
    "what numpy does about overflow": (np.geterr, lambda how: np.seterr(**how)),
    "the working directory": (_working_directory, _go_back_to),
}
RANDOM: State = {
    "torch's random generator": (torch.get_rng_state, torch.set_rng_state),
    "numpy's random generator": (
        lambda: np.random.get_state(legacy=True),
        np.random.set_state,
    ),
    "Python's random generator": (random.getstate, random.setstate),
}


# state that is read once in a check, because no later answer depends on it
AROUND: State = {
    "whether tiny numbers are 0": (
        lambda: (torch.tensor(1e-310, dtype=torch.float64) * 1).item() == 0,
        torch.set_flush_denormal,
    ),
    "the environment": (_environment, _set_environment),
    "the root logger": (
        lambda: (
            logging.root.level,
            list(logging.root.handlers),
            logging.root.manager.disable,
        ),
        lambda v: _set_logging(*v),
    ),
}


# what an import may change, as JAX's and Transformers' do: no habit of the function
CHANGED_BY_IMPORTS = (*RANDOM, "the environment", "the root logger")
# names of what was changed, a set for each `state_restored` that is open
_changed_in_checks: list[set[str]] = []
# name -> value before, of each `_with_state_restored` that is open
_open_states: list[dict[str, Any]] = []
_turn = threading.RLock()  # one thread at a time


def _new_turn() -> None:
    """Replace the lock by one that no thread holds."""
    global _turn
    _turn = threading.RLock()


# the thread that held the lock does not exist in the child
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_turn)


@contextlib.contextmanager
def _with_state_restored(state: State) -> Iterator[None]:
    """Restore this state at the end, and add the names of what was changed to those of the
    check under way, if there is one.
    """
    before = {name: read() for name, (read, _) in state.items()}
    _open_states.append(before)
    try:
        yield
    finally:
        _open_states[:] = [s for s in _open_states if s is not before]
        after = [read() for read, _ in state.values()]
        values = list(before.values())
        # one comparison for all, where none of them is an array
        if state is not STATE or values != after:
            _restore_changed(state, values, after)


@contextlib.contextmanager
def keeping_what_imports_change() -> Iterator[None]:
    """Import inside: what this changes of CHANGED_BY_IMPORTS stays, and is no change of
    the function that a check calls afterwards."""
    try:
        yield
    finally:
        everything = STATE | RANDOM | AROUND
        for draw in (random.random, np.random.random, lambda: torch.rand(())):
            draw()  # else a function that seeds as its file did would change nothing
        for before in _open_states:
            for name in before.keys() & set(CHANGED_BY_IMPORTS):
                before[name] = everything[name][0]()


def _restore_changed(state: State, before: list[Any], after: list[Any]) -> None:
    """Restore what has another value now, and keep its name for the check that runs."""
    for old, new, (name, (_, put)) in zip(before, after, state.items(), strict=True):
        if not _equal(old, new):
            put(old)
            if _changed_in_checks:
                _changed_in_checks[-1].add(name)


def _equal(x: Any, y: Any) -> bool:
    """Return whether two values of a state are the same. They may be arrays or tensors, or
    tuples with them.
    """
    if isinstance(x, torch.Tensor):
        return torch.equal(x, y)
    if isinstance(x, np.ndarray):
        return np.array_equal(x, y)
    if isinstance(x, tuple) and any(isinstance(part, np.ndarray) for part in x):
        return all(_equal(a, b) for a, b in zip(x, y, strict=True))
    return x == y


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread of torch inside, and restore the number afterwards.

    The tensors of a check are small. On a busy machine, threads that wait for each
    other cost ten times the CPU time of the work, and a check has a limit of that.
    """
    threads = torch.get_num_threads()
    _outer_thread_counts.append(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _outer_thread_counts.pop()
        torch.set_num_threads(threads)


# numbers of threads that the checks under way found
_outer_thread_counts: list[int] = []


@contextlib.contextmanager
def outer_threads() -> Iterator[None]:
    """Compute inside a check in the threads that the process had before it."""
    before = torch.get_num_threads()
    torch.set_num_threads(_outer_thread_counts[-1] if _outer_thread_counts else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def state_restored() -> Iterator[set[str]]:
    """Restore the state of the process at the end; yield the names of what was changed.

    Yields:
        The names, as a set that is complete at the end.

    Raises:
        InputError: the code inside ends the program or runs out of memory.
    """
    changed: set[str] = set()
    with _turn:
        _changed_in_checks.append(changed)
        state = STATE | RANDOM
        # an inner check has nothing around it to restore
        if len(_changed_in_checks) == 1:
            state |= AROUND
        try:
            with one_thread(), _with_state_restored(state), _no_exit():
                yield changed
        except (SystemExit, GeneratorExit, Ended, Gone, MemoryError, RuntimeError) as e:
            if isinstance(e, RuntimeError) and not is_out_of_memory(e):
                raise
            stop = e if isinstance(e, Gone) else gone("it", e)
            if len(_changed_in_checks) == 1:
                raise InputError(str(stop)) from None
            raise stop from None
        finally:
            _changed_in_checks[:] = [s for s in _changed_in_checks if s is not changed]


class Ended(BaseException):
    """os._exit was called: pytest and every other caller would end with that status,
    and without a report.
    """


ENDS = SystemExit, GeneratorExit, Ended  # what ends a program


# what torch's allocator of the CPU says, on Linux and macOS and on Windows: its
# exception has no type of its own
NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory of the host or of a GPU has run out.

    Args:
        error: the error.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in one_line(error) for text in NO_MEMORY
    )


# what CUDA says when it can do nothing more in this process, whatever is asked
GPU_LOST = (
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "misaligned address",
)


def is_gpu_lost(error: BaseException) -> bool:
    """Return whether the GPU answers nothing more in this process, in whatever was
    called.

    Args:
        error: what was raised.
    """
    return isinstance(error, RuntimeError) and any(
        text in one_line(error) for text in GPU_LOST
    )


def gone(name: str, error: BaseException) -> Gone:
    """Make the error for user code that ended without a verdict about it.

    Args:
        name: of the user's function.
        error: what was raised.
    """
    if is_gpu_lost(error):
        return Gone(
            f"{name} lost the GPU ({type(error).__name__}: {one_line(error)}): there is no verdict, "
            "and no more CUDA in this process. CUDA_LAUNCH_BLOCKING=1 shows the line."
        )
    if is_out_of_memory(error):
        if str(error):
            error_words = f"{type(error).__name__}: {one_line(error)}"
        else:
            error_words = type(error).__name__
        return OutOfMemory(
            f"{name} asked for more memory than there is ({error_words}): without it there is no verdict."
        )
    return Gone(
        f"{name} ends the program ({type(error).__name__}): a function returns its value."
    )


def stopped(error: Gone) -> Gone | InputError:
    """Return what to raise: within a check Gone, which no oracle takes for a finding, else
    InputError.

    Args:
        error: the end of user code.
    """
    return error if _changed_in_checks else InputError(str(error))


@contextlib.contextmanager
def _no_exit() -> Iterator[None]:
    """Raise Ended where the code inside calls os._exit."""
    plain_exit, process = os._exit, os.getpid()

    def raise_ended(status: int = 0) -> None:
        """Raise Ended in place of os._exit; end the process if it is a fork."""
        if os.getpid() != process:  # a fork's end is its own
            plain_exit(status)
        raise Ended(f"os._exit({status})")

    os._exit = raise_ended  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = plain_exit


@contextlib.contextmanager
def refuse_exit(name: str) -> Iterator[None]:
    """Raise InputError where the code inside ends the program.

    Args:
        name: of the user's function, for the message.
    """
    try:
        with _no_exit():
            yield
    except (SystemExit, GeneratorExit, Ended) as e:
        raise InputError(str(gone(name, e))) from e


# ---- one call ------------------------------------------------------------------------
def call_guarded(
    name: str,
    call: Callable[[], Any],
    lines: int = 0,
    passed: Mapping[str, Any] | None = None,
) -> tuple[Any, bool]:
    """Call user code. Restore the state of the process afterwards, and make InputError of
    what the code raises.

    Args:
        name: of the user's function, for messages.
        call: calls it.
        lines: lines of Python that it may run before it is stopped; 0: any number.
        passed: the arguments of the call, which a message about an exception shows.

    Returns:
        Its answer, and whether it printed to standard output, which is not shown.

    Raises:
        InputError: the code raises an exception, or ran more lines (TooManyLines); outside
            of a check also what is Gone within one.
        Gone: within a check, the code ends the program, or memory or the GPU is lost.
    """
    output = _SwallowedOutput(None)
    process = os.getpid()
    try:
        with _turn:
            output.stream = sys.stdout
            # a check restores the random state itself, and notes a loss that draws
            state = STATE if _changed_in_checks else STATE | RANDOM
            with (
                contextlib.redirect_stdout(output),
                warnings.catch_warnings(),
                _with_state_restored(state),
            ):
                warnings.simplefilter("ignore")
                answer = _call_within(lines, call)
    except _LineLimit as e:
        raise TooManyLines(f"{name} was stopped after {lines} lines of Python") from e
    except InputError as e:
        raise InputError(one_line(e)) from e
    except KeyboardInterrupt:
        raise
    except ENDS as e:
        raise stopped(gone(name, e)) from e
    except BaseException as e:
        if is_out_of_memory(e) or is_gpu_lost(e):
            raise stopped(gone(name, e)) from e
        advice = f"{asks_for_gpu(e)}{advice_on_error(e)}{_called_with(passed)}"
        raise InputError(
            f"{name} raised {type(e).__name__}: {one_line(e)}{_where_raised(e)}{advice}"
        ) from e
    finally:
        # it forked, and this is the copy: one report is enough
        if os.getpid() != process:
            _exit(0)
    return answer, output.wrote


CALLED_WITH = " (it was called with "


def without_call(error: InputError) -> str:
    """Return the sentence of an error without the arguments of the call.

    Args:
        error: of `call_guarded`.
    """
    return str(error).partition(CALLED_WITH)[0]


def _called_with(passed: Mapping[str, Any] | None) -> str:
    """Return in words what a function was called with; "" where that is not known."""
    if not passed:
        return ""
    words = ", ".join(f"{p} = {_shown(x)}" for p, x in passed.items())
    return f"{CALLED_WITH}{words})"


def _shown(x: Any) -> str:
    """Return a value in a few characters."""
    if isinstance(x, Tensor):
        return describe(x)
    if isinstance(x, np.ndarray | list):
        return f"{len(x)} in {describe_kind(x)}"
    return repr(x)[:40]


def asks_for_gpu(error: BaseException) -> str:
    """Return in words what to do about code that asks for a GPU where there is none.

    Args:
        error: what the code raised.

    Returns:
        The end of a sentence; "" for any other error.
    """
    message = one_line(error)
    is_gpu_absent = "not compiled with CUDA" in message or "NVIDIA driver" in message
    return (
        "; make tensors on the device of log_prob, not on cuda" if is_gpu_absent else ""
    )


_INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
NOT_USER_CODE = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (str(Path(__file__).parents[1]), *_INSTALLED)
)


def _where_raised(error: BaseException) -> str:
    """Return in words where the user's own code raised an error: the innermost frame
    outside of upref and of what is installed; "" without one.
    """
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        f
        for f in frames
        if os.path.isfile(f.filename)
        and not os.path.realpath(f.filename).startswith(NOT_USER_CODE)
    ]
    if user_frames:
        return f" ({os.path.basename(user_frames[-1].filename)}, line {user_frames[-1].lineno}, in {user_frames[-1].name})"
    return ""


class _SwallowedOutput(io.StringIO):
    """Swallows what this thread prints; other threads still print to the stream that it
    replaces.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream
        self.thread = threading.get_ident()
        self.wrote = False

    def write(self, text: str) -> int:
        """Drop the text, and note that there was one; pass it on from another thread."""
        if threading.get_ident() != self.thread and self.stream is not None:
            return self.stream.write(text)
        self.wrote = self.wrote or bool(text)
        return len(text)

    def close(self) -> None:
        """Do nothing: user code may close its standard output."""


class _LineLimit(BaseException):
    """User code ran more lines than it may. It is no Exception: a loop that catches
    every Exception would go on.
    """


def _call_within(lines: int, call: Callable[[], Any]) -> Any:
    """Call a function, and stop it after a number of lines of Python. This ends a loop
    over so many numbers that it would take years.

    It ends neither a loop in C, nor a loop that is written on one line, nor code that
    catches BaseException and goes on; the last is refused if it returns. The time limit
    of the command ends all of them.

    Args:
        lines: how many lines it may run; 0 for any number.
        call: the function.

    Raises:
        _LineLimit: it ran more lines.
    """
    if not lines:
        return call()
    lines_left = lines

    def trace(frame: Any, event: str, arg: Any) -> Any:
        """Count the lines of every function that is entered from now on."""
        nonlocal lines_left
        if event == "line":
            lines_left -= 1
        if lines_left < 0:
            raise _LineLimit
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        answer = call()
    finally:
        sys.settrace(before)
    if lines_left < 0:
        raise _LineLimit  # the function caught it
    return answer
