# SPDX-License-Identifier: Apache-2.0
"""A loss that runs in another process: that process measures, and this one holds every module that gives a verdict.

`serve` runs there. It makes the loss, sends what its signature tells, then answers one question after the other, each a
method of Loss. `Remote` is the Loss here, and takes no other answer than numbers, names and sentences.
"""

import contextlib
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from upref.errors import Gone, InputError, OutOfMemory
from upref.foreign.guard import ENDS, gone, is_out_of_memory, note_changes, one_line, state_restored
from upref.foreign.loss import Loss, Outcome
from upref.registry import Objective

HERE = {"call", "objective", "log", "shipped"}  # fields that stay in their process
MOVED = ("adv_shape", "float_mask", "bound_args", "lines")  # fields that this process may set before a question
KNOWN = InputError, Gone, OutOfMemory  # exceptions that this process raises again


class Pipe(Protocol):
    """One end of a pipe between the two processes."""

    def send_bytes(self, data: bytes) -> None: ...

    def recv_bytes(self) -> bytes: ...


@dataclass(frozen=True)
class Remote(Loss):
    """A Loss whose function is at the other end of a pipe."""

    pipe: Any = field(default=None, repr=False, compare=False)
    matched: bool = True  # the loss that was asked for; else the same as its framework ships it

    def answer(self, what: str, inputs: tuple[Any, ...]) -> Any:
        own = {name: getattr(self, name) for name in MOVED}
        answer, calls = _asked(self.pipe, (self.matched, own, what, inputs))
        self.log.extend([None] * calls)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        note_changes(_asked(self.pipe, None))


def remote(pipe: Pipe, o: Objective) -> Loss:
    """The loss that `serve` made at the other end, to be compared with this objective."""
    own, shipped = (
        None if x is None else Remote(**x, call=_elsewhere, objective=o, pipe=pipe) for x in _received(pipe)
    )
    assert own is not None
    return replace(own, shipped=shipped and replace(shipped, matched=False))


def serve(make: Callable[[], Loss], pipe: Pipe) -> None:
    """Answer every question about the loss, until there is none left."""
    try:
        with state_restored() as changed, contextlib.redirect_stdout(sys.stderr):
            loss = make()
            both = loss, loss.shipped
            pipe.send_bytes(_dumped([None if x is None else _told(x) for x in both]))
            while (question := pickle.loads(pipe.recv_bytes())) is not None:
                pipe.send_bytes(_dumped(_answered(*both, *question)))
    except Exception as e:  # before the first answer, or on the way out
        pipe.send_bytes(_dumped(_raised(e)))
        return
    pipe.send_bytes(_dumped(changed))


def _answered(loss: Loss, shipped: Loss, matched: bool, own: dict[str, Any], what: str, inputs: Any) -> tuple[Any, int]:
    one = replace(loss if matched else shipped, log=[], **own)
    try:
        return one.answer(what, inputs), len(one.log)
    except (Exception, *ENDS) as e:
        return _raised(e), len(one.log)


def _raised(e: BaseException) -> Exception:
    if isinstance(e, ENDS) or is_out_of_memory(e):
        return gone("the loss", e)
    return e if isinstance(e, KNOWN) else RuntimeError(f"{type(e).__name__}: {one_line(e)}")


def _told(loss: Loss) -> dict[str, Any]:
    return {f.name: getattr(loss, f.name) for f in fields(Loss) if f.name not in HERE}


def _elsewhere(*inputs: Any) -> Any:
    raise AssertionError("its function is in another process")


def _asked(pipe: Pipe, question: Any) -> Any:
    pipe.send_bytes(_dumped(question))
    return _received(pipe)


def _received(pipe: Pipe) -> Any:
    answer = _Unpickler(io.BytesIO(pipe.recv_bytes())).load()
    if isinstance(answer, Exception):
        raise answer
    return answer


class _Pickler(pickle.Pickler):
    """Tensors as their bytes: what torch does for itself takes a hundred times as long."""

    def reducer_override(self, x: Any) -> Any:
        if type(x) is not Tensor:
            return NotImplemented
        flat = x.detach().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
        return _tensor, (data, str(x.dtype).removeprefix("torch."), tuple(x.shape))


def _tensor(data: bytes, kind: str, shape: tuple[int, ...]) -> Tensor:
    dtype = getattr(torch, kind)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.zeros(0, dtype=dtype)
    return flat.reshape(shape)


class _Unpickler(pickle.Unpickler):
    """Makes nothing else of what the process of the loss sends. pickle can set attributes of what is in MADE."""

    MADE = {x.__name__: x for x in (_tensor, Outcome, RuntimeError, *KNOWN)}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.MADE:
            raise Gone(f"the process of the loss sent {module}.{name}: no number, name or sentence.")
        return self.MADE[name]


def _dumped(x: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(x)
    return out.getvalue()
