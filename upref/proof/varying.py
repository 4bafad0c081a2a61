# SPDX-License-Identifier: Apache-2.0
"""The number that `x.item()` gives in a proof: a formula that code takes for a float.

It is no tensor, because a float is none: `isinstance(n, float)` is true of it and
`isinstance(n, Tensor)` is false, and it is a number of its own, which no later write to
the tensor changes. A comparison of it is decided, as a branch is. It stops the trace
where code would read the number itself: by `float(n)`, by `math.exp(n)`, or as text.
`type(n)` cannot answer as a float does: the trace ends where code asks it.
"""

import os
import sys
from collections.abc import Callable
from numbers import Number
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_HERE = os.path.dirname(__file__) + os.sep


def _is_own(frame: FrameType) -> bool:
    """Tell whether a frame is of this folder's code."""
    return frame.f_code.co_filename.startswith(_HERE)


class VaryingNumber:
    """A float or an integer that varies, computed as a tensor, []."""

    __slots__ = ("tensor", "trace")

    def __init__(self, trace: Any, tensor: Tensor) -> None:
        """Take a number out of torch.

        Args:
            trace: the call that is traced.
            tensor: the number, [], in memory of its own.
        """
        self.trace = trace
        is_short = tensor.is_floating_point() and tensor.dtype is not torch.float64
        self.tensor = tensor.double() if is_short else tensor

    @property
    def kind(self) -> Any:
        """The type that the number has in a run."""
        return float if self.tensor.is_floating_point() else int

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The same, which isinstance asks; for this folder's own code what it is."""
        return VaryingNumber if _is_own(sys._getframe(1)) else self.kind  # noqa: SLF001

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with tensors in place of such numbers."""
        return func(*as_tensors(args), **as_tensors(kwargs or {}))

    def __hash__(self) -> int:
        """Return the hash at the witness. Stop where the number may be the same on a
        part of the inputs: a key of a dict may equal it there.
        """
        trace = self.trace
        with trace.busy():
            value = int(trace.ids(self.tensor))
            if not trace.is_over and trace.values.may_be_constant(value):
                trace.stop(
                    "looks up a value that varies in a dict or set",
                    "use torch.where, or compare it",
                )
            return hash(trace.values.evaluate(value, trace.point, trace.known))

    def __copy__(self) -> "VaryingNumber":
        return self

    def __deepcopy__(self, memo: Any) -> "VaryingNumber":
        return self

    def __bool__(self) -> bool:
        """Decide whether it is not 0."""
        return bool(self.tensor)

    def __getattr__(self, name: str) -> Any:
        """Stop at whatever else a float or an integer has."""
        if not hasattr(self.kind, name):
            raise AttributeError(
                f"'{self.kind.__name__}' object has no attribute {name!r}"
            )
        return self.trace.stop(
            f"reads {name} of a value as a number of Python", "keep it a tensor"
        )

    def __pos__(self) -> "VaryingNumber":
        return self

    def __neg__(self) -> "VaryingNumber":
        return VaryingNumber(self.trace, -self.tensor)

    def __abs__(self) -> "VaryingNumber":
        return VaryingNumber(self.trace, self.tensor.abs())


def as_tensors(x: Any) -> Any:
    """Return arguments with a tensor in place of each number that varies.

    Args:
        x: an argument, or a list, tuple or dict of arguments.
    """
    if isinstance(x, VaryingNumber):
        return x.tensor
    kind = type(x)
    if kind in (list, tuple):
        return kind(map(as_tensors, x))
    if kind is dict:
        return {name: as_tensors(part) for name, part in x.items()}
    return x


def _arithmetic(name: str) -> Callable[..., Any]:
    """Return the arithmetic method of this name. Its answer is a number that varies; a
    tensor if the other one is a tensor.
    """

    def compute(self: VaryingNumber, other: Any) -> Any:
        """Compute; return NotImplemented where the other is no number."""
        own = self.tensor
        if isinstance(other, Tensor):
            return getattr(own, name)(other)
        if not isinstance(other, VaryingNumber | Number):
            return NotImplemented
        is_quotient = "truediv" in name or "pow" in name
        if not own.is_floating_point() and (is_quotient or isinstance(other, float)):
            own = own.double()  # as Python does, and not in float32
        return VaryingNumber(self.trace, getattr(own, name)(as_tensors(other)))

    return compute


def _comparison(name: str) -> Callable[..., Any]:
    """Return the comparison of this name, which is decided."""

    def compare(self: VaryingNumber, other: Any) -> Any:
        """Decide; return NotImplemented where the other is no number."""
        if isinstance(other, Tensor):
            return getattr(self.tensor, name)(other)
        if not isinstance(other, VaryingNumber | Number):
            return NotImplemented
        return bool(getattr(self.tensor, name)(as_tensors(other)))

    return compare


def _conversion(name: str) -> Callable[..., Any]:
    """Return the conversion of this name, which stops."""

    def convert(self: VaryingNumber, *args: Any) -> Any:
        """Stop: the number would leave torch."""
        return self.trace.stop(
            f"reads a value as a number of Python, by {name.strip('_')}()",
            "keep it a tensor",
        )

    return convert


def _text(name: str) -> Callable[..., Any]:
    """Return the method of this name that makes text, which stops during a trace."""

    def write(self: VaryingNumber, *args: Any) -> str:
        """Stop: code may read the number from its text."""
        if not self.trace.is_over:
            self.trace.stop(
                "makes text of a value, which code may read",
                "leave the text out, or print it elsewhere",
            )
        return "a number that varies"

    return write


ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
CONVERSIONS = (
    *("float", "int", "index", "complex", "round", "trunc", "floor", "ceil"),
    *("divmod", "rdivmod", "reduce_ex", "array"),
)
TEXTS = ("repr", "str", "format")
for _name in ARITHMETIC:
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(VaryingNumber, _method, _arithmetic(_method))
for _name in COMPARISONS:
    setattr(VaryingNumber, f"__{_name}__", _comparison(f"__{_name}__"))
for _name in CONVERSIONS:
    setattr(VaryingNumber, f"__{_name}__", _conversion(f"__{_name}__"))
for _name in TEXTS:
    setattr(VaryingNumber, f"__{_name}__", _text(f"__{_name}__"))


__all__ = ["VaryingNumber", "as_tensors"]
