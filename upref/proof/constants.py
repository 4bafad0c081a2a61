# SPDX-License-Identifier: Apache-2.0
"""The numbers that stand in the user's code where it compares Python's numbers: bounds of
a proof too.

A size or a count that has left torch is a number like any other: `n = float(mask.sum())`,
`for i, row in enumerate(x)`, `n += 1`. So the lines that run are read. Where one compares
numbers, cuts a list, or divides and rounds, each constant of it is a bound, unless an
operator of torch got that constant there, or it is compared with a setting of the loss.
"""

import ast
import dis
import linecache
import math
import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any, TypeGuard

import numpy as np

from upref.proof.sizes import SMALLEST, Sizes, is_counted
from upref.user_code.guard import NOT_USER_CODE

CUTS = {"min", "max", "islice", "range", "divmod", "split", "chunk", "narrow"}
REPEATS = {"range", "islice", "repeat", "chunk"}  # a number of times, by itself a bound
ROUNDS = (ast.Mod, ast.FloorDiv, ast.RShift, ast.BitAnd)
LIMIT = 2**62
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
LARGEST_EXPONENT = 64  # of a power and a shift


@dataclass(frozen=True)
class Place:
    """One comparison of a file: its constants, and the names that it compares.

    Attributes:
        numbers: its constants.
        names: the source of each name in it, as an expression.
        computes: it compares more than names.
    """

    numbers: tuple[float, ...]
    names: tuple[ast.expr, ...]
    computes: bool


@dataclass
class Constants:
    """The constants of the lines that run.

    Attributes:
        sizes: where they are noted.
        of_torch: those that an operator of torch got, with the line.
        found: the others may be bounds.
        settings: numbers that the user's function is called with.
        asks_type: the first of the user's functions that calls type(); "" where none
            does.
    """

    sizes: Sizes
    of_torch: set[tuple[str, float]] = field(default_factory=set)
    found: dict[tuple[str, float], None] = field(default_factory=dict)
    settings: set[float] = field(default_factory=set)
    asks_type: str = ""

    def note_operator(self, args: Any, line: Callable[[], str]) -> None:
        """Note the numbers that an operator of torch gets.

        Args:
            args: its arguments.
            line: returns the user's line.
        """
        numbers = [x for x in args if isinstance(x, int | float) and x > SMALLEST]
        if numbers:
            at = line()
            self.of_torch.update((at, float(x)) for x in numbers)

    def conclude(self) -> None:
        """Make bounds of what was found."""
        for line, number in self.found:
            if (line, number) not in self.of_torch:
                self.sizes.add(number, line)

    # ---- lines as they run -----------------------------------------------------------
    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Follow the lines of a function of the user, and note the numbers that it is
        called with as settings. It is called as of sys.settrace, and returns the
        function that gets each line, None for other code.
        """
        if event != "call" or not is_of_user(frame.f_code):
            return None
        if not self.asks_type and _calls_type(frame.f_code):
            self.asks_type = frame.f_code.co_name
        if frame.f_back is None or not is_of_user(frame.f_back.f_code):
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = (frame.f_locals.get(name) for name in names)
            self.settings.update(x for x in values if _is_number(x))
        return self.follow

    def follow(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Read a line that runs, as of sys.settrace; return itself for the next line."""
        if event == "line":
            for place in places(frame.f_code.co_filename).get(frame.f_lineno, ()):
                self._read(place, frame)
        return self.follow

    def _read(self, place: Place, frame: FrameType) -> None:
        """Keep the numbers that a place compares with what the code has computed; of computed
        ones alone, the largest.
        """
        computed: list[float] = []  # sizes, counts, and local numbers of the code
        fixed = list(place.numbers)  # constants, settings, and numbers of a module
        for name in place.names:
            value = _value(name, frame)
            if isinstance(value, np.ndarray) and value.size:
                computed.append(float(value.size))
            if not _is_number(value):
                continue
            is_local = isinstance(name, ast.Name) and name.id in frame.f_locals
            is_setting = float(value) in self.settings
            if is_counted(value) or (is_local and not is_setting):
                computed.append(value)
            else:
                fixed.append(value)
        if not computed and not place.computes:
            return
        if not fixed and computed:
            fixed = [max(computed)]
        line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        for number in fixed:
            if SMALLEST < number < LIMIT:
                self.found[line, number] = None


def _is_number(x: Any) -> TypeGuard[int | float]:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _value(name: ast.expr, frame: FrameType) -> Any:
    """Return what a name holds; None where it holds nothing, or is an attribute that is
    not there.
    """
    if isinstance(name, ast.Name):
        return frame.f_locals.get(name.id, frame.f_globals.get(name.id))
    assert isinstance(name, ast.Attribute)
    return getattr(_value(name.value, frame), name.attr, None)


@cache
def _calls_type(code: CodeType) -> bool:
    """Tell whether a function takes Python's `type` from its globals."""
    return any(
        step.opname.startswith("LOAD_GLOBAL") and step.argval == "type"
        for step in dis.get_instructions(code)
    )


@cache
def is_of_user(code: CodeType) -> bool:
    """Tell whether code is the user's, not that of upref or of an installed package.

    Args:
        code: of a function.
    """
    file = code.co_filename
    return not file.startswith("<") and not os.path.realpath(file).startswith(
        NOT_USER_CODE
    )


@cache
def places(file: str) -> dict[int, list[Place]]:
    """Return the comparisons of a file by line; none of a file that cannot be read.

    Args:
        file: its path.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    out: dict[int, list[Place]] = {}
    for node in ast.walk(tree):
        place = _place(node)
        if place is not None:
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):  # type: ignore[attr-defined]
                out.setdefault(line, []).append(place)
    return out


def _place(node: ast.AST) -> Place | None:
    """Return what a node compares; None where it compares nothing."""
    parts = _compared_parts(node)
    if parts is None:
        return None
    numbers: list[float] = []
    names: list[ast.expr] = []
    for part in parts:
        numbers += _numbers(part)
        names += _names(part)
    match node:
        case ast.BinOp(op=ast.RShift(), right=ast.Constant(value=int(bits))):
            # n >> 10 is n // 1024
            numbers = [float(2 ** min(bits, LARGEST_EXPONENT))]
    is_comparison = isinstance(node, ast.Compare)
    if not numbers and not (is_comparison and len(names) > 1):
        return None
    is_plain_call = isinstance(node, ast.Call) and _called(node) not in REPEATS
    computes = True
    if is_comparison or is_plain_call:
        computes = any(map(_calls_or_indexes, parts))
    return Place(tuple(numbers), tuple(names), computes)


def _compared_parts(node: ast.AST) -> list[ast.AST] | None:
    """Return the parts of a node whose numbers may be bounds: of a comparison, an index,
    a division that rounds, a function of CUTS or REPEATS, a list that is repeated, and
    the keys of a dict. None of any other node.
    """
    match node:
        case ast.Compare() | ast.Slice() | ast.MatchValue():
            return [node]
        case ast.Subscript(slice=ast.Constant() | ast.Tuple() as index):
            return [index]
        case ast.BinOp(op=op) if isinstance(op, ROUNDS):
            return [node]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return [*node.args] if name in CUTS | REPEATS else None
        case ast.BinOp(op=ast.Mult(), left=ast.List() | ast.Tuple(), right=times):
            return [times]
        case ast.BinOp(op=ast.Mult(), left=times, right=ast.List() | ast.Tuple()):
            return [times]
        case ast.Dict():
            return [key for key in node.keys if key is not None]
    return None


def _calls_or_indexes(expression: ast.AST) -> bool:
    """Tell whether an expression has a call or an index in it."""
    parts = ast.walk(expression)
    return any(isinstance(part, ast.Call | ast.Subscript) for part in parts)


def _called(node: ast.Call) -> str:
    """Return the name of the function that is called, without what it belongs to."""
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    return str(name)


def _numbers(node: ast.AST) -> Iterator[float]:
    """Yield the numbers of an expression, `1 << 10` as one of them."""
    if isinstance(node, ast.Constant):
        if _is_number(node.value):
            yield float(node.value)
        return
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        value = _computed(node)
        if value is not None:
            yield abs(float(value))
            return
    for part in ast.iter_child_nodes(node):
        yield from _numbers(part)


def _computed(node: ast.AST) -> int | float | None:
    """Compute an expression that is arithmetic of small numbers alone, or return None."""
    match node:
        case ast.Constant(value=int(x) | float(x)) if abs(x) < LIMIT:
            return x
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            value = _computed(inner)
            if value is None or isinstance(sign, ast.UAdd):
                return value
            return -value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            first, second = _computed(left), _computed(right)
            if first is None or second is None:
                return None
            is_power = isinstance(op, ast.Pow | ast.LShift)
            if is_power and abs(second) >= LARGEST_EXPONENT:
                return None
            try:
                result = ARITHMETIC[type(op)](first, second)
            except (ArithmeticError, TypeError, ValueError):
                return None  # 0**-1, 1.5 << 2, 1 << -1
            if not _is_number(result):
                return None  # (-8) ** 0.5
            return result if abs(result) < LIMIT else math.inf
    return None


def _names(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the names of an expression, and names with attributes; none of calls."""
    if isinstance(node, ast.Name):
        yield node
    elif isinstance(node, ast.Attribute):
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name):
            yield node
    elif not isinstance(node, ast.Call):
        for part in ast.iter_child_nodes(node):
            yield from _names(part)
