# SPDX-License-Identifier: Apache-2.0
"""What the code compares with sizes, counts and ids: the bounds of a proof.

A proof is about batches of a few rows and columns. Where the code compares a size with a
number that no size of the proof reaches (`if T > 512`, `x[:, :1024]`, `group % 16`,
counts in int8), it may do something else on larger batches. `Sizes` notes each such
number with its line.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from upref.proof.operators import shape_of

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
SHIFTS = {"bitwise_right_shift", "rshift"}
BITS = {"bitwise_and", "and", "bitwise_or", "or"}
DIVIDES = {"remainder", "fmod", "floor_divide"} | SHIFTS | BITS
TWO = COMPARES | {"minimum", "maximum", "fmin", "fmax", "searchsorted", "bucketize"}
ROUNDS = {"floor", "ceil", "round", "trunc", "frac"}
ADDS = {"sum", "cumsum", "prod", "cumprod", "mean", "nansum"}
BENDS = {  # functions that are nearly constant where their argument is large
    *("sign", "sgn", "relu", "heaviside", "signbit", "abs", "sigmoid", "tanh", "erf"),
    *("exp", "exp2", "expm1", "softplus", "_softmax", "threshold", "bool"),
}
# arguments that are no size and no place: the numbers that a tensor is filled with
VALUES = {
    *("value", "fill_value", "other", "alpha", "beta", "exponent", "eps", "min", "max"),
    *("dtype", "layout", "device", "memory_format", "correction", "dim", "dims"),
    *("self", "s", "scalar", "lambd", "threshold", "nan", "posinf", "neginf"),
}
SMALLEST = 3  # numbers below are sizes of the proof itself
LARGEST_RATIO = 1e9  # of two numbers that are compared: beyond, one is an eps
LARGEST_SIZE = 2**62
LARGEST_SHIFT = 64
MOST_TOKENS = 1e5  # of a batch: what is larger by more guards a division
CLEARLY = 10  # times larger than a number that a count is compared with


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
        tokens: of the batch: how large its own sizes and counts are.
        ids: of its prompts.
    """

    bounds: dict[Bound, None] = field(default_factory=dict)
    with_floats: bool = True
    tokens: int = SMALLEST
    ids: frozenset[int] = frozenset()

    @property
    def ids_are_apart(self) -> bool:
        """Whether the ids are larger than any size or count of the batch, so that a
        number shows which of them it is.
        """
        return min(self.ids, default=0) > max(SMALLEST, self.tokens)

    def are_ids(self, numbers: Any) -> bool:
        """Tell whether numbers are ids of prompts, and no sizes or counts.

        Args:
            numbers: one, or a tensor of them.
        """
        if not self.ids_are_apart:
            return False
        if isinstance(numbers, Tensor):
            if numbers.dtype is torch.bool or numbers.is_complex():
                return False
            listed = numbers.detach().reshape(-1).tolist()
        else:
            listed = [numbers]
        return bool(listed) and self.ids.issuperset(listed)

    def add(self, number: Any, line: str, smallest: float = SMALLEST) -> None:
        """Note a number with which a size is compared, unless it is no number, at most
        `smallest`, larger than any size, or compared outside of the user's lines.

        Args:
            number: it.
            line: of the user's code; "" where none runs.
            smallest: numbers up to it are not noted.
        """
        if isinstance(number, bool) or not isinstance(number, int | float):
            return
        if line and smallest < number < LARGEST_SIZE:
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
        if name.startswith("__"):  # `__rshift__`
            name = name.strip("_")
        dtype = kwargs.get("dtype")
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not self.with_floats and any(x.is_floating_point() for x in tensors):
            return
        is_rounded = name == "div" and kwargs.get("rounding_mode")
        if name in COMPARES or name in DIVIDES or is_rounded:
            for number in (*args[1:], *kwargs.values()):
                is_id = name in ("eq", "ne") and number in self.ids
                if isinstance(number, int | float) and not is_id:
                    divisor = _power_of_two(number) if name in SHIFTS else number
                    smallest = 0 if self.are_ids(args[0]) else SMALLEST
                    self.add(abs(divisor), line(), smallest)
        # a type that holds no larger count
        is_cast = name == "_to_copy" and args[0].dtype is not torch.bool
        if dtype in LARGEST and (is_cast or name in ADDS):
            self.add(LARGEST[dtype], line())
        if tensors:
            number = self._compared(name, args, kwargs)
            if number:
                self.add(number, line())

    def _compared(self, name: str, args: Any, kwargs: Any) -> float:
        """Return the number with which an operator compares constants; 0 where it
        compares none, or one that these sizes reach.
        """
        x = args[0]
        if not isinstance(x, Tensor) or x.dtype is torch.bool or x.is_complex():
            return 0
        is_whole = not x.is_floating_point()
        is_equality = name in ("eq", "ne")
        others: list[Any]  # what the numbers of x are compared with
        if name in DIVIDES:
            divisors = [y for y in args[1:] if isinstance(y, Tensor)]
            return max((self._largest_divisor(name, y) for y in divisors), default=0)
        if name in TWO:
            others = [y for y in (*args[1:], *kwargs.values()) if _is_real(y)]
        elif name in ROUNDS or (name == "_to_copy" and _loses_digits(x, kwargs)):
            others = [1.0]
        elif name in BENDS:
            others = [0.0]
        else:
            return 0
        if is_equality and is_whole:
            return 0  # ids of prompts
        pairs: list[tuple[float, float]] = []
        for other in others:
            pairs += _pairs(x, other)
        if is_equality:
            pairs = [pair for pair in pairs if not self.ids.issuperset(pair)]
        return self.threshold(pairs, is_whole)

    def _largest_divisor(self, name: str, divisors: Tensor) -> int:
        """Return the largest number of a tensor that divides, if it is larger than the
        sizes of the batch; else 0.

        Args:
            name: of the operator.
            divisors: on its right side.
        """
        numbers = divisors.detach().reshape(-1).tolist()
        if name in SHIFTS:
            numbers = [_power_of_two(number) for number in numbers]
        return self.threshold([(number, 0) for number in numbers], True)

    def threshold(self, pairs: Iterable[tuple[float, float]], is_whole: bool) -> int:
        """Return how large a size must be for a comparison to turn, where that is larger
        than the sizes of the batch; else 0.

        Args:
            pairs: of numbers that are compared.
            is_whole: they are sizes and counts themselves, and no quotients of them.
        """
        most = max(SMALLEST, self.tokens + 1)
        found = [0.0]
        for x, y in pairs:
            size, bound = abs(x), abs(y)
            found += [n for n in (size, bound) if most < n < LARGEST_SIZE]
            if is_whole:
                continue
            # a quotient of a size turns where the size is larger by this factor
            if size and most < bound / size < LARGEST_RATIO:
                found.append(bound / size)
            if bound and max(most, CLEARLY) < size / bound < MOST_TOKENS:
                found.append(size / bound)
        return round(max(found))

    def note_places(
        self, func: Any, args: Any, kwargs: Any, line: Callable[[], str]
    ) -> None:
        """Note whole numbers that say how large a tensor is, or at which place.

        Args:
            func: the operator.
            args, kwargs: its arguments.
            line: returns the user's line.
        """
        most = max(SMALLEST, self.tokens + 1)
        given = [*zip(shape_of(func).names, args, strict=False), *kwargs.items()]
        for name, value in given:
            if name in VALUES:
                continue
            for number in value if isinstance(value, list | tuple) else [value]:
                if type(number) is int and most < abs(number) < 2**31:
                    self.add(abs(number), line())

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
            func: the operator; any but a slice and a split is left out.
            args: its arguments.
            line: returns the user's line.
        """
        name = func.overloadpacket.__name__
        # slice(x, dim, start, end) and split(x, size, dim)
        if name == "slice" and len(args) > 2:
            dim = args[1]
            ends = args[2:4]
        elif name == "split":
            dim = args[2] if len(args) > 2 else 0
            ends = args[1:2]
        else:
            return
        for end in ends:
            if isinstance(end, int) and abs(end) > args[0].shape[dim]:
                self.add(abs(end), line())


def _power_of_two(bits: float) -> float:
    """Return the number by which a shift of so many bits divides."""
    return 2.0 ** min(bits, LARGEST_SHIFT)


def _pairs(x: Tensor, y: Any) -> Iterator[tuple[float, float]]:
    """Yield the numbers of two tensors that meet, or those of a tensor and a number."""
    both = torch.broadcast_tensors(x.detach(), torch.as_tensor(y).detach())
    lists = (part.double().reshape(-1).tolist() for part in both)
    yield from zip(*lists, strict=True)


def _is_real(x: Any) -> bool:
    """Tell whether something is a number, or a tensor of numbers."""
    if isinstance(x, Tensor):
        return not x.is_complex()
    return isinstance(x, int | float) and not isinstance(x, bool)


def _loses_digits(x: Tensor, kwargs: Any) -> bool:
    """Tell whether a cast rounds: from a float to integers."""
    dtype = kwargs.get("dtype")
    return x.is_floating_point() and dtype is not None and not dtype.is_floating_point


class _Noted:
    """A number that notes what it is compared with, and what it is divided by."""

    sizes: Sizes
    line: Callable[[], str]

    @classmethod
    def of(cls, number: Any, sizes: Sizes, line: Callable[[], str]) -> Any:
        """Make a size or a count that notes its comparisons.

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
        """Note a number with which this one is compared, and return it.

        Args:
            other: the number.
        """
        is_number = isinstance(other, int | float) and not isinstance(other, _Noted)
        if not is_number:
            return other
        own: Any = self
        is_quotient = isinstance(self, float)  # T / 100 > 1
        if abs(other) > SMALLEST:
            self.sizes.add(abs(other), self.line())
        elif self.sizes.are_ids(own):
            self.sizes.add(abs(other), self.line(), smallest=0)
        elif is_quotient or int(own) not in self.sizes.ids:
            pairs = [(float(own), float(other))]
            number = self.sizes.threshold(pairs, not is_quotient)
            self.sizes.add(number, self.line())
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
    """Return the comparison of this name, which notes the other number."""

    def compare(self: Any, other: Any) -> Any:
        return getattr(super(type(self), self), name)(self.noted(other))

    return compare


def _division(name: str) -> Callable[..., Any]:
    """Return the division of this name: it notes the divisor, and its answer notes too."""

    def divide(self: Any, other: Any) -> Any:
        """Note the divisor, divide, and return a number that notes too."""
        found = getattr(super(type(self), self), name)(self.noted(other))
        return found if found is NotImplemented else self.made(found)

    return divide


def _shift(self: Any, bits: Any) -> Any:
    """Shift to the right, and note the power of two by which that divides."""
    found = int.__rshift__(self, bits)
    if found is not NotImplemented:
        self.noted(_power_of_two(bits))
        found = self.made(found)
    return found


def _unary(name: str) -> Callable[..., Any]:
    """Return the method of this name without arguments, whose answer notes too."""

    def compute(self: Any) -> Any:
        return self.made(getattr(super(type(self), self), name)())

    return compute


def _rounding(name: str) -> Callable[..., Any]:
    """Return the rounding of this name: of a quotient below 1, such as `T / 64`, it notes
    how much larger the size must be for another answer.
    """

    def rounded(self: Any, *digits: Any) -> Any:
        """Note the quotient, unless it is rounded to digits behind the point."""
        if not digits and abs(float(self)) < 1:
            number = self.sizes.threshold([(float(self), 1.0)], False)
            self.sizes.add(number, self.line())
        return getattr(super(type(self), self), name)(*digits)

    return rounded


def _arithmetic(name: str) -> Callable[..., Any]:
    """Return the arithmetic method of this name, whose answer notes its comparisons
    too.
    """

    def compute(self: Any, other: Any) -> Any:
        """Compute, and return a number that notes too; NotImplemented where the other
        is no number.
        """
        found = getattr(super(type(self), self), name)(other)
        if found is NotImplemented and isinstance(other, float):  # an int by a float
            found = getattr(float(self), name)(float(other))
        return found if found is NotImplemented else self.made(found)

    return compute


DIVISIONS = ("mod", "rmod", "floordiv", "rfloordiv", "divmod")
METHODS = {
    **{
        f"__{x}__": _comparison(f"__{x}__")
        for x in ("lt", "le", "gt", "ge", "eq", "ne")
    },
    **{f"__{x}__": _division(f"__{x}__") for x in DIVISIONS},
    **{f"__{x}__": _unary(f"__{x}__") for x in ("neg", "pos", "abs")},
    **{f"__{x}__": _arithmetic(f"__{x}__") for x in ("truediv", "rtruediv", "pow")},
    **{
        f"__{x}__": _arithmetic(f"__{x}__")
        for x in ("add", "radd", "sub", "rsub", "mul", "rmul")
    },
}
OF_COUNTS = {
    "__hash__": int.__hash__,
    "__rshift__": _shift,
    **{f"__{x}__": _division(f"__{x}__") for x in ("and", "rand")},
}
OF_QUOTIENTS: dict[str, Any] = {
    "__hash__": float.__hash__,
    **{
        f"__{x}__": _rounding(f"__{x}__")
        for x in ("int", "trunc", "ceil", "floor", "round")
    },
}
Count: Any = type("Count", (_Noted, int), METHODS | OF_COUNTS)
Measure: Any = type("Measure", (_Noted, float), METHODS | OF_QUOTIENTS)
