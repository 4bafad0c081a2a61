# SPDX-License-Identifier: Apache-2.0
"""What the code compares with sizes, counts and ids: the bounds of a proof.

A proof is about batches of a few rows and columns. Where the code compares a size with a
number that no size of the proof reaches (`if T > 512`, `x[:, :1024]`, `group % 16`,
counts in int8), it may do something else on larger batches. `Sizes` notes each such
number with its line.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# what an integer type holds without wrapping, and a short float without rounding
LARGEST = {
    torch.int8: 127,
    torch.uint8: 255,
    torch.int16: 32767,
    torch.int32: 2**31 - 1,
    torch.bfloat16: 256,
    torch.float16: 2048,
}
COMPARES = {"gt", "lt", "ge", "le", "eq", "ne", "clamp", "clamp_min", "clamp_max"}
DIVIDES = {"remainder", "fmod", "floor_divide"}
SMALLEST = 3  # numbers below are sizes of the proof itself


@dataclass(frozen=True)
class Bound:
    """A number with which the code compares a size, and the line that does."""

    number: int
    line: str


@dataclass
class Sizes:
    """The bounds that were met.

    Attributes:
        bounds: each once.
        with_floats: constants that are floats may be counts; they are not where ratios
            or advantages are constants of the batch.
    """

    bounds: dict[Bound, None] = field(default_factory=dict)
    with_floats: bool = True

    def add(self, number: Any, line: str) -> None:
        """Note a number with which a size is compared.

        Args:
            number: it.
            line: of the user's code.
        """
        if isinstance(number, bool) or not isinstance(number, int | float):
            return
        if line and SMALLEST < number < 2**62:
            self.bounds.setdefault(Bound(int(number), line))

    def mark(self, size: Any, line: Callable[[], str]) -> Any:
        """Return a size or a count whose comparisons are noted.

        Args:
            size: a number, a torch.Size, or lists of numbers.
            line: returns the user's line.
        """
        if isinstance(size, torch.Size):
            return torch.Size([Count.of(n, self, line) for n in size])
        if isinstance(size, list):
            return [self.mark(n, line) for n in size]
        if isinstance(size, bool) or not isinstance(size, int | float):
            return size
        kind = Count if isinstance(size, int) else Measure
        return kind.of(size, self, line)

    def note(self, func: Any, args: Any, kwargs: Any, line: Callable[[], str]) -> None:
        """Note the numbers with which an operator compares counts.

        Args:
            func: the operator, all of whose tensors are constants.
            args, kwargs: its arguments.
            line: returns the user's line.
        """
        name = func.overloadpacket.__name__.rstrip("_")
        dtype = kwargs.get("dtype")
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not self.with_floats and any(x.is_floating_point() for x in tensors):
            return
        if name in COMPARES or name in DIVIDES:
            for number in (*args[1:], *kwargs.values()):
                if isinstance(number, int | float) and number > SMALLEST:
                    self.add(number, line())
        elif name == "_to_copy" and dtype in LARGEST:
            if args[0].dtype is not torch.bool:
                self.add(LARGEST[dtype], line())
        elif name == "sum" and dtype in LARGEST:
            self.add(LARGEST[dtype], line())

    def note_index(self, x: Tensor, index: Any, line: Callable[[], str]) -> None:
        """Note a slice of `x[...]` that ends beyond the tensor.

        Args:
            x: the tensor.
            index: what stands in brackets.
            line: returns the user's line.
        """
        longest = max(x.shape, default=0)
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, slice):
                for end in (part.start, part.stop):
                    if type(end) is int and abs(end) > longest:
                        self.add(abs(end), line())

    def note_cut(self, func: Any, args: Any, line: Callable[[], str]) -> None:
        """Note a slice that ends beyond its tensor, and parts that are larger than it.

        Args:
            func: the operator.
            args: its arguments.
            line: returns the user's line.
        """
        name = func.overloadpacket.__name__
        if name == "slice" and len(args) > 3:
            ends = args[3:4]
        elif name == "split":
            ends = args[1:2]
        else:
            return
        dim = args[1] if name == "slice" else (args[2] if len(args) > 2 else 0)
        for end in ends:
            if isinstance(end, int) and end > args[0].shape[dim]:
                self.add(end, line())


class _Noted:
    """A number that notes what it is compared with, and what it is divided by."""

    sizes: Sizes
    line: Callable[[], str]

    @classmethod
    def of(cls, number: Any, sizes: Sizes, line: Callable[[], str]) -> Any:
        """Make one.

        Args:
            number: the size or count.
            sizes: where comparisons are noted.
            line: returns the user's line.
        """
        made = cls(number)  # type: ignore[call-arg]
        made.sizes = sizes
        made.line = line
        return made

    def noted(self, other: Any) -> Any:
        """Return a number with which this one is compared.

        Args:
            other: the number.
        """
        is_number = isinstance(other, int | float) and not isinstance(other, _Noted)
        if is_number and other > SMALLEST:
            self.sizes.add(other, self.line())
        return other

    def made(self, number: Any) -> Any:
        """Return a number that was computed from this one, as one that notes too.

        Args:
            number: the number.
        """
        return self.sizes.mark(number, self.line)


def is_counted(x: Any) -> bool:
    """Tell whether a number notes what it is compared with.

    Args:
        x: a number.
    """
    return isinstance(x, _Noted)


def _comparison(name: str) -> Callable[..., Any]:
    def compare(self: Any, other: Any) -> Any:
        return getattr(super(type(self), self), name)(self.noted(other))

    return compare


def _division(name: str) -> Callable[..., Any]:
    def divide(self: Any, other: Any) -> Any:
        return self.made(getattr(super(type(self), self), name)(self.noted(other)))

    return divide


def _arithmetic(name: str) -> Callable[..., Any]:
    def compute(self: Any, other: Any) -> Any:
        found = getattr(super(type(self), self), name)(other)
        return found if found is NotImplemented else self.made(found)

    return compute


METHODS = {
    **{
        f"__{x}__": _comparison(f"__{x}__")
        for x in ("lt", "le", "gt", "ge", "eq", "ne")
    },
    **{f"__{x}__": _division(f"__{x}__") for x in ("mod", "floordiv")},
    **{f"__{x}__": _arithmetic(f"__{x}__") for x in ("truediv", "rtruediv", "pow")},
    **{
        f"__{x}__": _arithmetic(f"__{x}__")
        for x in ("add", "radd", "sub", "rsub", "mul", "rmul")
    },
}
Count: Any = type("Count", (_Noted, int), METHODS | {"__hash__": int.__hash__})
Measure: Any = type("Measure", (_Noted, float), METHODS | {"__hash__": float.__hash__})
