# SPDX-License-Identifier: Apache-2.0
"""One call of a function of torch, with a formula for every number that it computes.

The function runs as it is, in float64, at one point: the witness. Beside the memory of
each tensor that depends on the inputs stands a second memory, with the id of a formula
(upref.proof.values) for each number. The first memory holds decoys, wherever a formula
varies: a number that leaves torch unnoticed, by whatever way, is none of the witness,
and what is made of it disagrees with the run without formulas. Every operator of the forward and of
the backward pass arrives in `Operators`. Operators that move numbers move the ids in
the same way, so that views, slices and writes in place need no rules of their own;
operators that compute have a rule (upref.proof.operators).

What Python reads of a tensor is answered in front of torch's methods. Where it decides a branch, the
condition and its truth at the witness are the next step of the path; a number that
Python would take out of torch ends the trace with a reason.
"""

import _thread
import builtins
import os
import random
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from functools import cache, wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from upref.proof.constants import Constants
from upref.proof.operators import Operation, elementwise, find_rule, shape_of
from upref.proof.sizes import Bound, Sizes
from upref.proof.values import Known, TooHard, Values
from upref.proof.varying import VaryingNumber, as_tensors
from upref.user_code.guard import NOT_USER_CODE

SHORT = (torch.float32, torch.float16, torch.bfloat16)
# numbers in place of those that vary, one row for each call
DECOYS = ((1e300, -1e300), (-1e300,), (0.5, -0.5), (1e300,), (1e-300, -1e-300))
MOST_STEPS = 400  # of one path
CALLERS = ("subjects.py", "every_size.py")  # that call the user's function
RULES = "Lifted."  # the class in one of them that the operators of a trace call
# operators whose result has numbers that nobody has written
EMPTY = {
    *("empty", "empty_like", "empty_strided", "empty_permuted"),
    *("new_empty", "new_empty_strided"),
}
REREADS = (torch.ops.aten.view.dtype, torch.ops.aten._neg_view.default)


class NoProof(Exception):
    """There is no proof; the message says why, and what to write instead."""


@dataclass(frozen=True)
class Step:
    """A branch of the user's code: a condition, and whether it held at the witness."""

    condition: int
    holds: bool
    line: str


@dataclass(frozen=True)
class Memory:
    """The ids beside the memory of a tensor; `storage` keeps the address in use."""

    storage: Any
    ids: Tensor
    dtype: torch.dtype

    def held(self) -> Tensor:
        """Return what the memory holds."""
        flat = torch.empty(0, dtype=self.dtype)
        return flat.set_(self.storage, 0, (len(self.ids),), (1,))


@dataclass
class Trace:
    """The state of one call.

    Attributes:
        values: all formulas.
        point: the number of each variable.
        most_operators: that may run.
        decoys: what the memory of the tensors holds where a formula varies.
        lifted: where the size of the batch is open, upref.proof.every_size.Lifted.
        path: the branches that were taken.
        stopped: why there is no proof; "" while there may be one.
        sizes: what the code compares with sizes and counts.
        constants: numbers that stand in its comparisons.
        is_rounded: whether a part was computed in less than float64.
        unknown_places: ids of places that torch does not fix.
    """

    values: Values
    point: Mapping[str, float]
    most_operators: int = 100_000
    decoys: tuple[float, ...] = DECOYS[0]
    lifted: Any = None
    path: list[Step] = field(default_factory=list)
    stopped: str = ""
    sizes: Sizes = field(default_factory=Sizes)
    constants: Constants = field(init=False)
    is_rounded: bool = False
    memories: dict[int, Memory] = field(default_factory=dict)
    known: Known = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)  # operators that computed
    unknown_places: set[int] = field(default_factory=set)
    thread: Any = field(default_factory=threading.current_thread)
    operators: int = 0
    is_busy: bool = False  # what runs is upref's, not the user's
    is_over: bool = False
    has_numbers: bool = False  # the code has read one by item() or tolist()

    def __post_init__(self) -> None:
        self.constants = Constants(self.sizes)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, what runs is upref's own: tensors are read as they are, and no line
        of it is followed.
        """
        before, follows = self.is_busy, sys.gettrace()
        self.is_busy = True
        sys.settrace(None)
        try:
            yield
        finally:
            self.is_busy = before
            sys.settrace(follows)

    # ---- the second memory -----------------------------------------------------------
    def is_known(self, x: Tensor) -> bool:
        """Tell whether a tensor stands in memory that has ids."""
        return x.layout is torch.strided and (
            x.untyped_storage()._cdata in self.memories
        )

    def ids(self, x: Any) -> Tensor:
        """Return the ids of a tensor's numbers, or of one number.

        Args:
            x: a tensor or a number of Python.

        Returns:
            A tensor of the same shape; where the tensor has ids, a view of them.
        """
        if not isinstance(x, Tensor):
            return torch.tensor(self.values.number(x))
        memory = self.memories.get(x.untyped_storage()._cdata)
        if memory is None:
            return self._ids_of_constants(x)
        if memory.dtype.itemsize != x.element_size():
            self.stop("reads the bytes of a tensor as another type")
        return memory.ids.as_strided(x.size(), x.stride(), x.storage_offset())

    def _ids_of_constants(self, x: Tensor) -> Tensor:
        """Return the ids of the numbers that a tensor has in memory, in its shape; stop
        at complex and quantized ones.
        """
        if x.is_complex() or x.is_quantized:
            self.stop("computes with complex or quantized numbers")
        numbers = x.reshape(-1).tolist()
        ids = [self.values.number(number) for number in numbers]
        return torch.tensor(ids, dtype=torch.int64).view(x.shape)

    def put(self, x: Tensor, ids: Tensor) -> None:
        """Set the ids of a tensor; where all are constants, new memory needs none. The
        tensor's own memory gets the constants, and decoys for what varies.

        Args:
            x: the tensor, written in place.
            ids: of its numbers, in its shape.
        """
        storage = x.untyped_storage()
        memory = self.memories.get(storage._cdata)
        ids = ids.expand(x.shape)
        if memory is None:
            if self.values.constants.issuperset(ids.reshape(-1).tolist()):
                self._hide(x, ids)
                return
            memory = self._make_memory(x, storage)
        if x.numel():
            view = memory.ids.as_strided(x.size(), x.stride(), x.storage_offset())
            view.copy_(ids)
            self._hide(x, ids)

    def _hide(self, x: Tensor, ids: Tensor) -> None:
        """Write what the memory of a tensor holds: constants, and decoys for the rest."""
        if not x.numel():
            return
        flat = []
        for n, value in enumerate(ids.reshape(-1).tolist()):
            decoy = self.decoys[n % len(self.decoys)]
            flat.append(self.values.number_of(value, decoy))
        # a tensor of its own, so that autograd does not take this for a write
        memory = torch.empty(0, dtype=x.dtype).set_(
            x.untyped_storage(), x.storage_offset(), x.size(), x.stride()
        )
        memory.copy_(_of_type(flat, x.dtype).view(x.shape))

    def numbers(self, x: Tensor) -> Tensor:
        """Return a tensor with the numbers that it has at the witness; stop where one
        has no value.

        Args:
            x: the tensor.
        """
        ids = self.ids(x)
        try:
            flat = [
                self.values.evaluate(value, self.point, self.known)
                for value in ids.reshape(-1).tolist()
            ]
        except (ArithmeticError, ValueError):
            self.stop("computes a value that is not finite")
        return _of_type(flat, x.dtype).view(x.shape)

    def is_intact(self) -> bool:
        """Tell whether each number that varies is still a decoy in memory: code that
        writes there by other ways than torch's changes no formula.
        """
        parts: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for memory in self.memories.values():
            if memory.dtype.is_floating_point:
                pair = memory.held(), memory.ids
                parts.setdefault(memory.dtype, []).append(pair)
        for dtype, pairs in parts.items():
            held, ids = (torch.cat(part) for part in zip(*pairs, strict=True))
            decoys = _of_type(list(self.decoys), dtype)
            others = ids[~torch.isin(held, decoys)]
            if not self.values.constants.issuperset(others.tolist()):
                return False
        return True

    def _make_memory(self, x: Tensor, storage: Any) -> Memory:
        """Make the ids of a storage, those of the numbers that it holds now."""
        if not storage.resizable():
            self.stop("writes values into memory of another library, such as numpy")
        size = storage.nbytes() // x.element_size()
        if size == x.numel() and x.is_contiguous():  # all of it is set now
            memory = Memory(storage, torch.zeros(size, dtype=torch.int64), x.dtype)
            self.memories[storage._cdata] = memory
            return memory
        whole = torch.empty(0, dtype=x.dtype).set_(storage, 0, (size,), (1,))
        memory = Memory(storage, self._ids_of_constants(whole.detach()), x.dtype)
        self.memories[storage._cdata] = memory
        return memory

    def introduce(self, x: Tensor, ids: Tensor) -> None:
        """Give an input its variables.

        Args:
            x: a tensor with memory of its own.
            ids: in its shape.
        """
        storage = x.untyped_storage()
        size = storage.nbytes() // x.element_size()
        memory = Memory(storage, torch.zeros(size, dtype=torch.int64), x.dtype)
        self.memories[storage._cdata] = memory
        memory.ids.as_strided(x.size(), x.stride(), x.storage_offset()).copy_(ids)
        self._hide(x, ids)

    def concrete(self, x: Any) -> Any:
        """Return a tensor as it is; stop where its numbers vary.

        Args:
            x: a tensor, or anything else.
        """
        if isinstance(x, Tensor) and self.varies(x):
            self.refuse_unknown(x)
            self.stop("takes places from values that vary")
        return x

    def varies(self, x: Tensor) -> bool:
        """Tell whether a number of a tensor depends on the inputs.

        Args:
            x: a tensor.
        """
        if not self.is_known(x):
            return False
        return not self.values.constants.issuperset(self.ids(x).reshape(-1).tolist())

    def size_read(self) -> None:
        """Stop where the user's code reads a size that is open."""
        if self.lifted is not None and is_code_of_user():
            self.stop("reads a size")

    # ---- branches --------------------------------------------------------------------
    def decide(self, value: int) -> bool:
        """Decide a condition as it is at the witness, and make it a step of the path.

        A condition that is constant, or that follows from the path, is no new step. The
        trace stops where the size of the batch is open, where a compared value has no
        number, and after MOST_STEPS steps.

        Args:
            value: id of a condition, or of a number that is true where it is not 0.

        Returns:
            Whether it holds at the witness.
        """
        condition = self.values.condition(value)
        if self.lifted is not None and condition not in (0, 1):
            self.stop("branches on a value")
        for step in self.path:
            condition = self.values.given(condition, step.condition, step.holds)
        if condition in (self.values.zero, self.values.one):
            return condition == self.values.one
        if len(self.path) >= MOST_STEPS:
            self.stop(f"takes more than {MOST_STEPS} branches")
        try:
            holds = bool(self.values.evaluate(condition, self.point, self.known))
        except (ArithmeticError, ValueError):
            self.stop("compares a value that is not finite")
        self.path.append(Step(condition, holds, user_line()))
        return holds

    def order(self, smaller: int, larger: int, strictly: bool = False) -> None:
        """Make `smaller <= larger` a step of the path; NaN counts as the largest. Stop
        where it does not hold at the witness.

        Args:
            smaller, larger: ids.
            strictly: they must not be equal.
        """
        if larger == self.values.nan:
            return
        if not self.decide(self.values.greater(larger, smaller, not strictly)):
            self.stop("sorts numbers that are nearly equal")

    def equality(self, x: int, y: int) -> int:
        """Return the condition that two values are equal, as far as the path leaves it
        open; NaN equals NaN here.
        """
        if x == y:
            return self.values.one
        condition = self.values.equals(x, y)
        for step in self.path:
            condition = self.values.given(condition, step.condition, step.holds)
        return condition

    def unknown_place(self) -> int:
        """Return the id of a place that torch does not fix, a new one at each call."""
        place = self.values.variable(f"place{len(self.values.nodes)}")
        self.unknown_places.add(place)
        return place

    def refuse_shared(self, tensors: list[Tensor]) -> None:
        """Stop where a tensor stands in memory of another library that is that of a
        tensor with formulas: what is read there has none.
        """
        for x in tensors:
            if x.layout is not torch.strided or x.device.type != "cpu":
                continue
            storage = x.untyped_storage()
            if storage.resizable() or storage._cdata in self.memories:
                continue
            start, size = storage.data_ptr(), storage.nbytes()
            for memory in self.memories.values():
                first = memory.storage.data_ptr()
                if start < first + memory.storage.nbytes() and first < start + size:
                    self.stop("reads the memory of a tensor by another library")

    def refuse_unknown(self, x: Tensor) -> None:
        """Stop where a tensor has a place that torch does not fix."""
        if not self.unknown_places or not self.is_known(x):
            return
        if not self.unknown_places.isdisjoint(self.ids(x).reshape(-1).tolist()):
            self.stop(
                "takes the place of one of several values that may be equal",
                "sort(stable=True) keeps their order",
            )

    def stop(self, why: str, instead: str = "") -> Any:
        """End the trace.

        Args:
            why: a verb and its objects; the user's line goes in front, or "it".
            instead: what to write instead.

        Raises:
            NoProof: always.
        """
        words = f"{user_line() or 'it'} {why}"
        if instead:
            words += f": {instead}"
        self.stopped = self.stopped or words
        raise NoProof(self.stopped)


def _of_type(numbers: list[float], dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor of a type, [N]: a bool is whether one is above 0, and
    an integer its whole part, within what the type can hold and at most 2^62.
    """
    out = torch.tensor(numbers, dtype=torch.float64)
    if dtype is torch.bool:
        return out > 0
    if dtype.is_floating_point or dtype.is_complex:
        return out.to(dtype)
    holds = torch.iinfo(dtype)
    return out.clamp(holds.min, min(holds.max, 2**62)).to(dtype)


_real_path = cache(os.path.realpath)
_HERE = os.path.dirname(os.path.realpath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_STANDARD = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_UPREF = os.path.dirname(_HERE[:-1]) + os.sep
_CALLS = (_HERE, _TORCH, f"{_UPREF}verify{os.sep}", f"{_UPREF}user_code{os.sep}")


def user_line() -> str:
    """Return file and line of the user's code that runs, as `my.py:9`. Where none is on
    the stack, return the innermost line of an installed package, such as the framework
    whose loss is compared; "" where there is neither, as in a backward pass.
    """
    frame: FrameType | None = sys._getframe(1)
    within = ""
    while frame is not None:
        file = frame.f_code.co_filename
        real = _real_path(file)
        line = f"{os.path.basename(file)}:{frame.f_lineno}"
        is_caller = real.startswith(_HERE) and os.path.basename(real) in CALLERS
        if is_caller and not frame.f_code.co_qualname.startswith(RULES):
            break
        if not real.startswith(NOT_USER_CODE) and not file.startswith("<"):
            return line
        if not within and not real.startswith(_CALLS) and os.sep in file:
            within = line
        frame = frame.f_back
    return within


@cache
def _is_machinery(file: str) -> bool:
    """Tell whether a file is upref's, torch's or of the standard library."""
    is_installed = "site-packages" in file or "dist-packages" in file
    if file.startswith(_STANDARD) and not is_installed:
        return True
    return file.startswith((_UPREF, _TORCH)) or "<frozen " in file


def is_code_of_user() -> bool:
    """Tell whether the function that is compared, or one that it calls, is running: code
    of another package than upref is the user's here, wherever it is installed.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        real = _real_path(frame.f_code.co_filename)
        if real.startswith(_HERE) and os.path.basename(real) in CALLERS:
            return False
        if not _is_machinery(real):
            return True
        frame = frame.f_back
    return False


# ---- what Python reads ---------------------------------------------------------------
def _read_item(trace: Trace, read: Any, x: Tensor) -> Any:
    """Answer `x.item()`: decide a bool, and return any other number as one that varies.
    Where there is not one number, torch's own method raises.
    """
    if x.numel() != 1:
        return read(x)
    if x.dtype is torch.bool:
        return trace.decide(int(trace.ids(x).reshape(())))
    return VaryingNumber(trace, x.detach().reshape(()).clone())


def _read_list(trace: Trace, read: Any, x: Tensor) -> Any:
    """Answer `x.tolist()`: lists in lists, with the entries that `_read_item` returns."""
    if x.ndim == 0:
        return _read_item(trace, read, x)
    return [_read_list(trace, read, part) for part in x.detach().unbind(0)]


def _read_bool(trace: Trace, read: Any, x: Tensor) -> Any:
    """Answer `bool(x)`: decide whether the one number is true. Where there is not one,
    torch's own method raises.
    """
    if x.numel() != 1:
        return read(x)
    return trace.decide(int(trace.ids(x).reshape(())))


def _read_number(trace: Trace, read: Any, x: Tensor) -> Any:
    """Answer `float(x)` and its like of a bool, which is decided; stop at any other
    number.
    """
    if x.dtype is torch.bool:
        return read(torch.tensor(_read_bool(trace, read, x)))
    name = read.__name__.strip("_")
    return trace.stop(
        f"reads a value as a number of Python, by {name}()", "keep it a tensor"
    )


def _read_bytes(trace: Trace, read: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Stop: the value would leave torch."""
    name = read.__name__.strip("_")
    return trace.stop(
        f"takes a value out of torch, by {name}()", "use operators of torch"
    )


def _read_text(trace: Trace, read: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Stop: code may read a value from its text."""
    return trace.stop(
        "makes text of a value, which code may read",
        "leave the text out, or print it elsewhere",
    )


READS: dict[str, Callable[..., Any]] = {
    "item": _read_item,
    "tolist": _read_list,
    "__bool__": _read_bool,
    **dict.fromkeys(("__float__", "__int__", "__index__", "__complex__"), _read_number),
    **dict.fromkeys(
        (
            "numpy",
            "__array__",
            "__dlpack__",
            "data_ptr",
            "untyped_storage",
            "storage",
            "_typed_storage",
            "__reduce_ex__",
            "__deepcopy__",
            "share_memory_",
            "apply_",
            "map_",
            "map2_",
        ),
        _read_bytes,
    ),
    **dict.fromkeys(("__repr__", "__format__", "__str__"), _read_text),
}
SIZES = ("size", "numel", "nelement")


@contextmanager
def _reads_answered(trace: Trace) -> Iterator[None]:
    """Answer what Python reads of tensors, by methods in front of those of torch. A mode
    of torch would not be asked within a backward pass.
    """
    T = torch.Tensor
    own = {name: T.__dict__[name] for name in (*READS, *SIZES) if name in T.__dict__}
    for name, read in READS.items():
        setattr(T, name, _answer_in_front(trace, getattr(T, name), read))
    for name in SIZES:
        setattr(T, name, _size_in_front(trace, getattr(T, name)))
    length = builtins.len

    def count(x: Any) -> int:
        """Return the length of anything; of a tensor, as a size whose comparisons are
        noted.
        """
        is_size = isinstance(x, Tensor) and not trace.is_busy
        if is_size:
            trace.size_read()
        return trace.sizes.mark(length(x), user_line) if is_size else length(x)

    builtins.len = count
    shape: Any = T.shape
    setattr(T, "shape", property(_size_in_front(trace, shape.__get__)))  # noqa: B010
    try:
        yield
    finally:
        builtins.len = length
        for name in (*READS, *SIZES, "shape"):
            delattr(T, name)
        for name, method in own.items():
            setattr(T, name, method)


def _answer_in_front(
    trace: Trace, method: Callable[..., Any], read: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a method of tensors that asks `read` where the tensor varies.

    Args:
        trace: the call that is traced.
        method: torch's own.
        read: answers in its place, and gets both.
    """

    @wraps(method)
    def answer(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call `read` where the tensor varies, else torch's own method."""
        if trace.is_busy:
            return method(x, *args, **kwargs)
        trace.has_numbers |= method.__name__ in ("item", "tolist")
        with trace.busy():
            if trace.varies(x):
                trace.refuse_unknown(x)
                return read(trace, method, x, *args, **kwargs)
            found = method(x, *args, **kwargs)
        if method.__name__ in ("item", "tolist"):
            return trace.sizes.mark(found, user_line)
        return found

    return answer


def _size_in_front(trace: Trace, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that tells a size, which notes that it was read and marks its answer."""

    def size(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return torch's own answer, marked so that its comparisons are noted."""
        found = method(x, *args, **kwargs)
        if trace.is_busy:
            return found
        trace.size_read()
        return trace.sizes.mark(found, user_line)

    return size


class Slices(TorchFunctionMode):
    """Notes the slices of `x[...]`. A method in front of torch's would stay behind: once
    `Tensor.__getitem__` was assigned, Python takes a tensor without dimensions for a
    sequence, and `torch.tensor([x.sum()])` fails from then on.
    """

    def __init__(self, trace: Trace) -> None:
        """Note slices for this call."""
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch; note an index, a read size and an error of the user's."""
        trace = self.trace
        is_index = func in (Tensor.__getitem__, Tensor.__setitem__)
        if is_index and not trace.is_busy:
            with trace.busy():
                trace.sizes.note_index(args[0], args[1], user_line)
        try:
            out = func(*as_tensors(args), **as_tensors(kwargs or {}))
        except Exception:
            if trace.lifted is not None and is_code_of_user():
                trace.stopped = (
                    trace.stopped or f"{user_line() or 'it'} raises an error"
                )
            raise
        if trace.lifted is not None and not trace.is_busy:
            of = func.__self__ if func.__name__ == "__get__" else func  # an attribute
            name = getattr(of, "__name__", "")
            if _tells_size(out) and name not in trace.lifted.harmless:
                trace.size_read()
        return out


@contextmanager
def _slices_noted(trace: Trace) -> Iterator[None]:
    """Note the slices of the code inside, and of the backward passes that it starts,
    where torch asks no mode unless it is entered anew.
    """
    backward = torch.autograd._engine_run_backward

    def noted_backward(*args: Any, **kwargs: Any) -> Any:
        """Run a backward pass inside the mode that notes slices."""
        with Slices(trace):
            return backward(*args, **kwargs)

    torch.autograd._engine_run_backward = noted_backward
    try:
        with Slices(trace):
            yield
    finally:
        torch.autograd._engine_run_backward = backward


@contextmanager
def _chance_refused(trace: Trace) -> Iterator[None]:
    """Stop where Python asks the operating system for random bytes, which numpy's new
    generators, secrets and random.SystemRandom do too. A module that is imported may.
    """
    from_system, seed = os.urandom, random.Random.seed

    def refuse(size: int) -> bytes:
        """Stop where the user's code draws; return the system's random bytes to others."""
        if not trace.is_busy and not _is_importing():
            trace.stop("draws random numbers", "a proof is of a function")
        return from_system(size)

    def seed_with(self: random.Random, a: Any = None, version: int = 2) -> None:
        """Seed a generator. Without a seed Python takes one from the system: refuse
        that.
        """
        if a is None:
            refuse(0)
        seed(self, a, version)

    os.urandom = refuse
    setattr(random, "_urandom", refuse)  # noqa: B010
    setattr(random.Random, "seed", seed_with)  # noqa: B010
    try:
        yield
    finally:
        os.urandom = from_system
        setattr(random, "_urandom", from_system)  # noqa: B010
        setattr(random.Random, "seed", seed)  # noqa: B010


@contextmanager
def _ways_out_refused(trace: Trace) -> Iterator[None]:
    """Stop where code starts a thread or hands work to one, because the operators that
    run there do not arrive here, and where it hands memory to another library.
    """
    what = {
        "start": "starts a thread, where a proof sees no operators",
        "submit": "hands work to a thread, where a proof sees no operators",
        "to_dlpack": "hands the memory of a tensor to another library, by to_dlpack()",
    }
    places: tuple[tuple[Any, str, str], ...] = (
        (threading.Thread, "start", "start"),
        (_thread, "start_new_thread", "start"),
        (ThreadPoolExecutor, "submit", "submit"),
        (torch.utils.dlpack, "to_dlpack", "to_dlpack"),
        (torch._C, "_to_dlpack", "to_dlpack"),
    )
    # a release of torch may lack a private name
    there = [place for place in places if hasattr(*place[:2])]
    own = [getattr(owner, name) for owner, name, _ in there]
    for (owner, name, kind), function in zip(there, own, strict=True):
        setattr(owner, name, _refusal(trace, function, what[kind]))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(there, own, strict=True):
            setattr(owner, name, function)


def _refusal(trace: Trace, function: Any, why: str) -> Callable[..., Any]:
    """Return a function that stops where the user's code calls it."""

    @wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        """Stop; call the function itself for upref's own code."""
        if not trace.is_busy and threading.current_thread() is trace.thread:
            trace.stop(why, "use operators of torch")
        return function(*args, **kwargs)

    return refuse


def _is_importing() -> bool:
    """Tell whether a module is being imported."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _tells_size(out: Any) -> bool:
    """Tell whether what torch answers is no tensor, so that a size may stand in it."""
    if isinstance(out, list | tuple):
        return any(map(_tells_size, out)) or not out
    return not (out is None or isinstance(out, Tensor | torch.dtype | torch.device))


# ---- operators -----------------------------------------------------------------------
@cache
def can_decompose(func: Any) -> bool:
    """Return whether torch composes an operator of others, without a rule for its
    gradient.

    Args:
        func: an OpOverload; its own `_can_decompose` is not there in torch 2.4.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), key
    )


class Operators(TorchDispatchMode):
    """Runs every operator, and beside it the rule for its formulas."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return whether torch wraps the method below for its compiler, which takes a
        second to import; `tracing` runs compiled code eagerly.
        """
        return False

    def __init__(self, trace: Trace) -> None:
        """Keep the formulas of this call."""
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator as `_run` does, with what upref itself reads left alone."""
        # a mode that notes slices need not look at upref's own operators
        with self.trace.busy(), torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator of torch, and stop the trace at what no proof can follow."""
        trace = self.trace
        tensors = [
            x for x in _leaves((*args, *kwargs.values())) if isinstance(x, Tensor)
        ]
        shape = shape_of(func)
        trace.operators += 1
        if trace.operators > trace.most_operators:
            trace.stop(f"runs more than {trace.most_operators:,} operators")
        if shape.is_random:
            trace.stop("draws random numbers", "a proof is of a function")
        trace.refuse_shared(tensors)
        trace.sizes.note_cut(func, args, user_line)
        trace.sizes.note_places(func, args, kwargs, user_line)
        trace.constants.note_operator(args[1:], user_line)
        if shape.name in EMPTY and trace.lifted is None:
            return _spoilt(func(*args, **kwargs))
        if trace.lifted is not None:
            return self._run_alike(func, args, kwargs, tensors)
        if not any(map(trace.is_known, tensors)):
            trace.sizes.note(func, args, kwargs, user_line)
            return func(*args, **kwargs)
        if not any(map(trace.varies, tensors)):
            trace.sizes.note(func, args, kwargs, user_line)
        if func in REREADS:
            trace.stop("reads the bytes of a tensor as other numbers")
        if shape.is_view and can_decompose(func):
            return self._decompose(func, args, kwargs)  # such as `to`, which may copy
        if shape.is_view:
            return func(*args, **kwargs)  # its memory has the ids
        for x in tensors:
            trace.refuse_unknown(x)
        if any(x.layout is not torch.strided or x.is_quantized for x in tensors):
            trace.stop("computes with sparse or quantized tensors")
        try:
            return self._run_rule(func, args, kwargs)
        except TooHard as error:
            return trace.stop(f"has {error}")

    def _run_alike(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> Any:
        """Run an operator on a batch of open size, of which all tokens are alike."""
        trace = self.trace
        is_of_user = is_code_of_user()
        if not is_of_user and not any(map(trace.is_known, tensors)):
            return func(*args, **kwargs)
        if can_decompose(func):
            return self._decompose(func, args, kwargs)
        # so torch divides the gradient of a mean
        is_by_size = (
            shape_of(func).name == "div"
            and not is_of_user
            and type(args[1]) is int
            and args[1] in trace.lifted.sizes
        )
        if is_by_size:
            answer = func(*args, **kwargs)
            trace.put(answer, trace.lifted.divided_by_size(trace, *args))
            return answer
        trace.lifted.refuse(trace, func, args, kwargs)
        try:
            if not tensors or shape_of(func).is_view:
                answer = func(*args, **kwargs)
            else:
                answer = self._run_rule(func, args, kwargs)
        except TooHard as error:
            return trace.stop(f"has {error}")
        trace.lifted.accept(trace, shape_of(func).name, tensors, answer)
        return answer

    def _run_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator by its rule, and keep the formulas of its results. One without
        a rule is decomposed.
        """
        trace = self.trace
        operation = Operation(trace, func, args, kwargs)
        rule = find_rule(operation.name)
        if trace.lifted is not None and operation.name in trace.lifted.reductions:
            rule = trace.lifted.reduce
        if rule is None:
            return self._decompose(func, args, kwargs)
        trace.seen.add(operation.name)
        ids = rule(operation)
        written = operation.written()
        if operation.answer is not None:
            return operation.answer
        answer = operation.call()
        results = written or [x for x in _leaves((answer,)) if isinstance(x, Tensor)]
        ids_of_results = ids if isinstance(ids, tuple) else (ids,)
        for x, part in zip(results, ids_of_results, strict=False):
            if part is not None:
                trace.put(x, self._as_of_type(x, part))
                trace.is_rounded |= x.dtype in SHORT
        return answer

    def _as_of_type(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the ids of a result as its type holds them: True + True is True, and an
        integer must be whole and fit.
        """
        trace = self.trace
        if x.is_floating_point() or x.is_complex():
            return ids
        if x.dtype is torch.bool:
            return elementwise(trace.values.condition, ids)
        type_holds = torch.iinfo(x.dtype)
        for value in set(ids.reshape(-1).tolist()):
            bounds = trace.values.whole_bounds(value)
            if bounds is None or not (
                type_holds.min <= bounds[0] and bounds[1] <= type_holds.max
            ):
                trace.stop(f"rounds or wraps a value in {x.dtype}", "keep it a float")
        return ids

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator without a rule as the operators that it is made of; stop
        where torch knows none.
        """
        trace = self.trace
        made_of = find_decomposition(func)
        answer = NotImplemented
        if made_of is not None:
            with self:
                answer = made_of(*args, **kwargs)
        if answer is NotImplemented:
            name = func._schema.name.partition("::")[2]
            trace.stop(f"calls {name}, of which upref has no formula")
        return answer


def _spoilt(x: Tensor) -> Tensor:
    """Fill new memory, which often holds zeros, with NaN, True or the largest integer:
    a value that shows that it was read. Return the same tensor.
    """
    if x.is_floating_point() or x.is_complex():
        return x.fill_(float("nan"))
    return x.fill_(1 if x.dtype is torch.bool else torch.iinfo(x.dtype).max)


def find_decomposition(func: Any) -> Callable[..., Any] | None:
    """Return a function that computes an operator by simpler ones; None where torch has
    none.

    Args:
        func: the operator.
    """
    from torch._decomp import decomposition_table

    if func in decomposition_table:
        return decomposition_table[func]
    with suppress(Exception):
        if can_decompose(func):
            return func.decompose
    return None


def _leaves(items: Sequence[Any]) -> list[Any]:
    """Return what lists and tuples hold, however deep."""
    out: list[Any] = []
    for item in items:
        if isinstance(item, list | tuple):
            out += _leaves(item)
        else:
            out.append(item)
    return out


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Trace the code inside.

    Args:
        trace: the state, which is added to.
    """
    # compiled code needs the compiler, which is imported where it was compiled;
    # torch 2.4 and 2.5 cannot switch it off, and a compiled loss ends without a proof
    is_compiled = "torch._dynamo" in sys.modules
    can_switch = hasattr(torch.compiler, "set_stance")
    eager: AbstractContextManager[Any] = nullcontext()
    if is_compiled and can_switch:
        eager = torch.compiler.set_stance("force_eager")
    trace.is_over = False
    with (
        eager,
        _reads_answered(trace),
        _slices_noted(trace),
        _chance_refused(trace),
        _ways_out_refused(trace),
        Operators(trace),
    ):
        before = sys.gettrace()
        sys.settrace(trace.constants.enter)
        try:
            yield
        finally:
            sys.settrace(before)
    trace.is_over = True
    if trace.has_numbers and trace.constants.asks_type and not trace.stopped:
        trace.stopped = (
            f"{trace.constants.asks_type} asks the type() of something, where numbers "
            "are read by item(): use isinstance"
        )
    trace.constants.conclude()


__all__ = ["Bound", "NoProof", "Step", "Trace", "tracing", "user_line"]
