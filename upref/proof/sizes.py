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
    """

    bounds: dict[Bound, None] = field(default_factory=dict)

    def add(self, number: Any, line: str) -> None:
        """Note a number with which a size is compared.

        Args:
            number: it.
            line: of the user's code.
        """
        if isinstance(number, bool) or not isinstance(number, int | float):
            return
        if SMALLEST < number < 2**62:
            self.bounds.setdefault(Bound(int(number), line))

    def mark(self, size: Any, line: Callable[[], str]) -> Any:
        """Return a size whose comparisons are noted.

        Args:
            size: an int, or a torch.Size.
            line: returns the user's line.
        """
        if isinstance(size, torch.Size):
            return torch.Size([Count.of(n, self, line) for n in size])
        return Count.of(size, self, line) if isinstance(size, int) else size

    def note(self, func: Any, args: Any, kwargs: Any, line: Callable[[], str]) -> None:
        """Note the numbers with which an operator compares counts.

        Args:
            func: the operator, all of whose tensors are constants.
            args, kwargs: its arguments.
            line: returns the user's line.
        """
        name = func.overloadpacket.__name__.rstrip("_")
        numbers = [
            x for x in (*args[1:], *kwargs.values()) if isinstance(x, int | float)
        ]
        if name in COMPARES or name in DIVIDES:
            for number in numbers:
                if number > SMALLEST:
                    self.add(number, line())
        elif name == "slice" and len(args) > 3:
            self._note_slice(args, line)
        elif name == "_to_copy" and kwargs.get("dtype") in LARGEST:
            if isinstance(args[0], Tensor) and args[0].dtype is not torch.bool:
                self.add(LARGEST[kwargs["dtype"]], line())
        elif name == "sum" and kwargs.get("dtype") in LARGEST:
            self.add(LARGEST[kwargs["dtype"]], line())

    def _note_slice(self, args: Any, line: Callable[[], str]) -> None:
        """Note the end of a slice that lies beyond the tensor."""
        end = args[3]
        if isinstance(end, int) and end > args[0].shape[args[1]]:
            self.add(end, line())


class Count(int):
    """A size of a tensor, as Python has it: an int that notes what it is compared with."""

    sizes: Sizes
    line: Callable[[], str]

    @classmethod
    def of(cls, number: int, sizes: Sizes, line: Callable[[], str]) -> "Count":
        """Make the count of a number.

        Args:
            number: the size.
            sizes: where comparisons are noted.
            line: returns the user's line.
        """
        count = cls(number)
        count.sizes = sizes
        count.line = line
        return count

    def _noted(self, other: Any) -> Any:
        if isinstance(other, int | float) and other > SMALLEST:
            self.sizes.add(other, self.line())
        return other

    def _made(self, number: Any) -> Any:
        if type(number) is int:
            return Count.of(number, self.sizes, self.line)
        return number

    def __lt__(self, other: Any) -> Any:
        return int(self) < self._noted(other)

    def __le__(self, other: Any) -> Any:
        return int(self) <= self._noted(other)

    def __gt__(self, other: Any) -> Any:
        return int(self) > self._noted(other)

    def __ge__(self, other: Any) -> Any:
        return int(self) >= self._noted(other)

    def __eq__(self, other: Any) -> Any:
        return int(self) == self._noted(other)

    def __ne__(self, other: Any) -> Any:
        return int(self) != self._noted(other)

    __hash__ = int.__hash__

    def __mod__(self, other: Any) -> Any:
        return self._made(int(self) % self._noted(other))

    def __floordiv__(self, other: Any) -> Any:
        return self._made(int(self) // self._noted(other))

    def __add__(self, other: Any) -> Any:
        return self._made(int(self) + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._made(int(self) - other)

    def __rsub__(self, other: Any) -> Any:
        return self._made(other - int(self))

    def __mul__(self, other: Any) -> Any:
        return self._made(int(self) * other)

    __rmul__ = __mul__
