# SPDX-License-Identifier: Apache-2.0
"""A rule for each operator of torch: from the ids of its inputs to those of its result.

An *id* is the number of a formula (upref.proof.values). The *witness* is the point at
which the user's function runs, and a *step of the path* is a condition that a proof
assumes as it was decided there (upref.proof.trace).

A rule takes an `Operation` and returns the ids of the result, in its shape, or a tuple
of such tensors. None in place of one leaves the ids of that result as they are. A rule
that runs the operator itself puts the result into `answer`, and returns (None,). In
every rule, `o` is the call and `v` all formulas, whose methods make new ids of ids.

Seven kinds, which docs/howto/prove.md lists from this table. *Moves*: the operator runs on
the ids themselves. *Exact*: arithmetic, comparisons and choices, by upref.proof.values.
*Of logarithms*: exp, log and their like, which are exact where the argument is a logarithm
of ratios, or such a ratio; of anything else a proof knows a few properties. *By value*: a
function such as erf, of which a proof knows only that it is one. *Places*: sort, topk,
argmax and nonzero answer as at the witness, and the order that they found is a step of
the path. *Of constants*: there is no proof where the argument varies. *Random*: there is
none. An operator without a rule runs as torch's own decomposition into others, and where
torch has none there is no proof.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from upref.proof.values import Values

Rule = Callable[["Operation"], Any]
LOWEST = -(2**62)


@dataclass(frozen=True)
class Shape:
    """What is the same at each call of an operator.

    Attributes:
        name: without `aten::` and the `_` of a write in place.
        names: of its arguments.
        defaults: by name.
        written: arguments that it writes to.
        is_view: its results have the memory of an argument.
        is_random: it draws random numbers.
    """

    name: str
    names: tuple[str, ...]
    defaults: dict[str, Any]
    written: tuple[str, ...]
    is_view: bool
    is_random: bool


@cache
def shape_of(func: Any) -> Shape:
    """Return what is the same at each call of an operator.

    Args:
        func: the operator.
    """
    schema = func._schema
    name = schema.name.partition("::")[2]
    in_place = name.endswith("_") and not name.endswith("__")
    written = []
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name)
    returns = [r.alias_info for r in schema.returns]
    is_view = bool(returns) and all(a is not None and not a.is_write for a in returns)
    # squeeze_ and its like change no number; resize_ does
    is_view |= torch.Tag.inplace_view in func.tags and not name.startswith("resize")
    return Shape(
        name=name[:-1] if in_place else name,
        names=tuple(a.name for a in schema.arguments),
        defaults={a.name: a.default_value for a in schema.arguments},
        written=tuple(written),
        is_view=is_view,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
    )


class Operation:
    """One call of an operator, with its arguments by name.

    Attributes:
        trace: the state of the call of the user's function.
        values: of the trace.
        name: of the operator, without `aten::` and the `_` of a write in place.
        answer: what the operator answers, where the rule has run it itself.
        decided: arguments with the numbers of the witness, for the call.
    """

    def __init__(self, trace: Any, func: Any, args: Any, kwargs: Any) -> None:
        """Give each argument its name; those that are not given have their defaults.

        Args:
            trace: the state of the call of the user's function.
            func: the operator, an overload such as torch.ops.aten.sum.dim_IntList.
            args, kwargs: the arguments of the call.
        """
        self.trace = trace
        self.values: Values = trace.values
        self.func = func
        self.answer: Any = None
        self.decided: dict[str, Any] = {}
        self.shape = shape_of(func)
        self.name = self.shape.name
        self.arguments = dict(self.shape.defaults)
        self.arguments.update(zip(self.shape.names, args, strict=False))
        self.arguments.update(kwargs)

    def written(self) -> list[Tensor]:
        """Return the tensors to which the operator writes."""
        values = (self.arguments[name] for name in self.shape.written)
        return [x for x in values if isinstance(x, Tensor)]

    def __getitem__(self, name: str) -> Any:
        """Return an argument; KeyError where the operator has none of that name."""
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument; the default where the operator has none of that name, or
        has None there.
        """
        value = self.arguments.get(name)
        return default if value is None else value

    def ids(self, name: str) -> Tensor:
        """Return the ids of an argument's numbers, in its shape, [] for a number of
        Python.
        """
        return self.trace.ids(self.arguments[name])

    def run(self, /, **replaced: Any) -> Any:
        """Run the operator with some arguments replaced. A tensor that is not replaced
        must not vary: else the trace stops.

        Args:
            **replaced: arguments by name.

        Returns:
            What the operator returns.
        """
        arguments = {
            name: self.trace.concrete(x) if name not in replaced else replaced[name]
            for name, x in self.arguments.items()
        }
        return self._call(arguments)

    def call(self) -> Any:
        """Run the operator on its own arguments, with those of `decided` in their
        place.
        """
        return self._call(self.arguments | self.decided)

    def at_witness(self) -> Any:
        """Run the operator with the numbers of its argument `self` at the witness."""
        return self._call(self.arguments | {"self": self.trace.numbers(self["self"])})

    def _call(self, arguments: dict[str, Any]) -> Any:
        """Run the operator on these arguments, by position where its schema allows it."""
        positional, by_name = [], {}
        for a in self.func._schema.arguments:
            if a.kwarg_only:
                by_name[a.name] = arguments[a.name]
            else:
                positional.append(arguments[a.name])
        return self.func(*positional, **by_name)


# ---- what rules are made of ----------------------------------------------------------
def elementwise(of: Callable[..., int], *ids: Tensor) -> Tensor:
    """Apply a function of values to tensors of ids, which are broadcast.

    Args:
        of: ids to an id; it is called once for each different combination of ids.
        *ids: tensors.

    Returns:
        Ids, in the shape to which the tensors are broadcast.
    """
    if len(ids) > 1:
        ids = torch.broadcast_tensors(*ids)
    shape = ids[0].shape
    columns = [x.reshape(-1).tolist() for x in ids]
    known: dict[Any, int] = {}
    out = []
    for key in zip(*columns, strict=True):
        if key not in known:
            known[key] = of(*key)
        out.append(known[key])
    return torch.tensor(out, dtype=torch.int64).view(shape)


def along(of: Callable[[list[int]], Any], ids: Tensor, dims: Any, keep: bool) -> Tensor:
    """Reduce dimensions of a tensor of ids.

    Args:
        of: a list of ids to one id; the list is empty where a dimension has size 0.
        ids: the tensor.
        dims: numbers of dimensions; None or empty: all.
        keep: keep them, with size 1.

    Returns:
        Ids, in the shape that is left.
    """
    reduced = dimensions_of(dims, ids.ndim)
    rest = [d for d in range(ids.ndim) if d not in reduced]
    sizes_left = [ids.shape[d] for d in rest]
    # the dimensions that are reduced become the last one; a single number is a row of one
    if ids.ndim:
        rows = ids.permute(*rest, *reduced).reshape(*sizes_left, -1)
    else:
        rows = ids.reshape(1)
    if rows.numel():
        flat = rows.reshape(-1, rows.shape[-1])
    else:  # as many rows, each of them empty
        flat = rows.new_zeros(math.prod(sizes_left), 0)
    out = torch.tensor([of(row) for row in flat.tolist()], dtype=torch.int64)
    if keep:
        shape = [1 if d in reduced else n for d, n in enumerate(ids.shape)]
    else:
        shape = sizes_left
    return out.view(shape)


def dimensions_of(dims: Any, ndim: int) -> list[int]:
    """Return numbers of dimensions, each counted from the front; all of them for None
    and [].

    Args:
        dims: one number or several.
        ndim: how many dimensions the tensor has.
    """
    if ndim == 0:
        return []
    if dims is None or dims == []:
        return list(range(ndim))
    given = [dims] if isinstance(dims, int) else list(dims)
    return [d % ndim for d in given]


def add_all(values: Values, ids: Sequence[int]) -> int:
    """Return the sum of values; 0 of none."""
    return reduce(values.add, ids, values.zero)


# ---- tables --------------------------------------------------------------------------
_OF_ONE_TENSOR = (
    "clone contiguous repeat roll flip gather index_select take tril triu unfold "
    "diag_embed repeat_interleave rot90 select_backward slice_backward "
    "diagonal_backward _unsafe_view _reshape_copy lift_fresh lift lift_fresh_copy "
    "alias_copy as_strided_copy detach_copy expand_copy permute_copy select_copy "
    "slice_copy split_copy squeeze_copy t_copy transpose_copy unbind_copy "
    "unsqueeze_copy view_copy"
)
MOVES: dict[str, tuple[str, ...]] = {  # operator -> arguments that hold values
    **dict.fromkeys(_OF_ONE_TENSOR.split(), ("self", "grad_output")),
    "cat": ("tensors",),
    "stack": ("tensors",),
    "select_scatter": ("self", "src"),
    "slice_scatter": ("self", "src"),
    "as_strided_scatter": ("self", "src"),
    "diagonal_scatter": ("self", "src"),
    "index_copy": ("self", "source"),
    "masked_scatter": ("self", "source"),
}

WORDS = {  # kind of operators -> what a proof knows of them
    "moves": "everything: they move numbers",
    "exact": "everything, as of real numbers",
    "of logarithms": "everything, if the argument is a logarithm of ratios, or a ratio of which "
    "they take the logarithm; else a few properties, such as exp(x) > 0",
    "by value": "that equal arguments give equal values",
    "places": "everything: each order of the numbers is a path; of equal numbers, only the "
    "places that torch fixes",
    "of constants": "there is no proof if the argument varies",
    "random": "there is no proof",
}
RULES: dict[str, Rule] = {}
KINDS: dict[str, str] = {}


def rule(names: str, kind: str = "exact") -> Callable[[Rule], Rule]:
    """Return a decorator that makes a function the rule of these operators.

    Args:
        names: of operators, with spaces between.
        kind: a key of WORDS.
    """

    def register(function: Rule) -> Rule:
        """Enter the function into RULES, and the kind into KINDS; return the function."""
        for name in names.split():
            RULES[name] = function
            KINDS[name] = kind
        return function

    return register


def operators_of(kind: str) -> list[str]:
    """Return the names of the operators of one kind.

    Args:
        kind: a key of WORDS.
    """
    if kind == "moves":
        return sorted(MOVES)
    return sorted(name for name, its_kind in KINDS.items() if its_kind == kind)


@cache
def find_rule(name: str) -> Rule | None:
    """Return the rule of an operator; None where it has none.

    Args:
        name: without `aten::` and the `_` of a write in place.
    """
    if name in MOVES:
        return _move
    return RULES.get(name)


def _move(o: Operation) -> Tensor | tuple[Tensor, ...]:
    """Run the operator on the ids in place of the values, so that they move alike."""
    replaced: dict[str, Any] = {}
    for name in MOVES[o.name]:
        value = o.arguments.get(name)
        if isinstance(value, Tensor):
            replaced[name] = o.ids(name)
        elif isinstance(value, list | tuple):
            replaced[name] = [o.trace.ids(x) for x in value]
    return o.run(**replaced)


# ---- numbers as they are -------------------------------------------------------------
@rule("_to_copy")
def _to_copy(o: Operation) -> Tensor:
    """Convert to another dtype, to bool by whether a number is not 0. The trace stops
    where a varying value would be rounded.
    """
    ids = o.ids("self")
    dtype = o["dtype"]
    if dtype is None or dtype == o["self"].dtype:
        return ids.clone()
    if dtype is torch.bool:
        return elementwise(o.values.condition, ids)
    if not dtype.is_floating_point and o["self"].is_floating_point():
        if any(map(o.values.varies, set(ids.reshape(-1).tolist()))):
            o.trace.stop("rounds a value to an integer", "keep it a float")
        return o.trace.ids(o["self"].detach().to(dtype))
    return elementwise(o.values.real, ids)


@rule("copy")
def _copy(o: Operation) -> Tensor:
    """Return the ids of the source in the destination's shape, as conditions where
    numbers are copied to bools.
    """
    ids = o.ids("src").expand(o["self"].shape)
    if o["self"].dtype is torch.bool and o["src"].dtype is not torch.bool:
        return elementwise(o.values.condition, ids)
    return ids.clone()


@rule("fill")
def _fill(o: Operation) -> Tensor:
    """Return the id of the value for each entry."""
    return o.ids("value").expand(o["self"].shape)


@rule("zero zeros_like")
def _zero(o: Operation) -> Tensor:
    """Return the id of the number 0, which is 0, for each entry."""
    return torch.zeros(o["self"].shape, dtype=torch.int64)


@rule("ones_like")
def _one(o: Operation) -> Tensor:
    """Return the id of the number 1, which is 1, for each entry."""
    return torch.ones(o["self"].shape, dtype=torch.int64)


@rule("empty_like new_empty empty_strided new_empty_strided")
def _empty(o: Operation) -> Tensor | None:
    """Write no ids: these numbers are not set yet."""
    return None


@rule("rand_like randn_like", "random")
def _random(o: Operation) -> Any:
    """Stop the trace."""
    return o.trace.stop("draws random numbers")


@rule("new_zeros")
def _new_zeros(o: Operation) -> Tensor:
    """Return the id of the number 0, which is 0, in the given size."""
    return torch.zeros(list(o["size"]), dtype=torch.int64)


@rule("new_ones")
def _new_ones(o: Operation) -> Tensor:
    """Return the id of the number 1, which is 1, in the given size."""
    return torch.ones(list(o["size"]), dtype=torch.int64)


@rule("full_like new_full full")
def _full(o: Operation) -> Tensor:
    """Return the id of the fill value, in the given size or else in the shape of
    `self`.
    """
    value = o.get("fill_value")
    size = o.get("size", None)
    shape = list(size) if size is not None else o["self"].shape
    return o.trace.ids(value).expand(shape)


@rule("constant_pad_nd")
def _pad(o: Operation) -> Tensor:
    """Pad the ids with that of the fill value, or with that of 0."""
    fill = int(o.trace.ids(o.get("value", 0)))
    return o.run(self=o.ids("self"), value=fill)


@rule("masked_fill")
def _masked_fill(o: Operation) -> Tensor:
    """Return the value where the mask holds, elsewhere the number that was there."""
    return _choose(o, o.ids("mask"), o.ids("value"), o.ids("self"))


@rule("where")
def _where(o: Operation) -> Tensor | tuple[Tensor, ...]:
    """Choose by a condition. With a condition alone, find the places where it holds."""
    if "other" not in o.arguments:
        return _nonzero_of(o, "condition")
    return _choose(o, o.ids("condition"), o.ids("self"), o.ids("other"))


def _choose(o: Operation, condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Return one of two values by a condition. One that decides about infinity or NaN is
    a step of the path.
    """
    v = o.values

    def of(c: int, x: int, y: int) -> int:
        """Return the id of one choice."""
        if v.varies(c) and x != y and (v.special(x) or v.special(y)):
            return x if o.trace.decide(c) else y  # infinity is no part of a formula
        return v.choose(v.condition(c), x, y)

    return elementwise(of, condition, yes, no)


@rule("nan_to_num")
def _nan_to_num(o: Operation) -> Tensor:
    """Put numbers in place of NaN and infinity: those given, else torch's own."""
    v = o.values
    largest = torch.finfo(o["self"].dtype).max
    instead = {
        "nan": o.get("nan", 0.0),
        "inf": o.get("posinf", largest),
        "-inf": o.get("neginf", -largest),
    }

    def of(x: int) -> int:
        """Return the number in place of NaN and infinity; any other value as it is."""
        kind = v.special(x)
        return v.number(instead[kind]) if kind else x

    return elementwise(of, o.ids("self"))


# ---- arithmetic ----------------------------------------------------------------------
@rule("add sub rsub")
def _add(o: Operation) -> Tensor:
    """Return self + alpha other, of sub self - alpha other, of rsub other - alpha self."""
    v = o.values
    factor = Fraction(-1 if o.name in ("sub", "rsub") else 1)
    x, y = o.ids("self"), o.ids("other")
    if o.name == "rsub":
        x, y = y, x
    alpha = o.get("alpha", 1)
    by = v.number(alpha)
    return elementwise(lambda a, b: v.add(a, v.multiply(b, v.scale(by, factor))), x, y)


@rule("mul")
def _mul(o: Operation) -> Tensor:
    """Return the product; of two tensors of bools, whether both hold."""
    v = o.values
    if o["self"].dtype is torch.bool and _is_bool(o["other"]):
        return elementwise(v.both, o.ids("self"), o.ids("other"))
    return elementwise(v.multiply, o.ids("self"), o.ids("other"))


def _is_bool(x: Any) -> bool:
    """Tell whether something is a bool, or a tensor of bools."""
    return isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype is torch.bool)


@rule("div divide true_divide")
def _div(o: Operation) -> Tensor:
    """Divide. A division that rounds is of constants alone: else the trace stops."""
    if o.get("rounding_mode"):
        return _only_constants(o, "divides and rounds")
    return elementwise(lambda x, y: _quotient(o, x, y), o.ids("self"), o.ids("other"))


def _quotient(o: Operation, x: int, y: int) -> int:
    """Return x / y. A divisor that varies must not be 0. By the number 0, 0 and NaN
    become NaN, and any other x infinite, with its sign. The trace stops where x has no
    known sign.
    """
    v = o.values
    if y == v.zero:
        return _quotient_by_zero(o, x)
    divisor = v.constant(y)
    if divisor is None and not v.special(y):
        must_differ(o, y)
    return v.divide(x, y)


def _quotient_by_zero(o: Operation, x: int) -> int:
    """Return x / 0, as `_quotient` does."""
    v = o.values
    if x in (v.zero, v.nan):
        return v.nan
    if v.special(x):
        return x
    sign = v.sign_of(x)
    if sign is None:
        o.trace.stop("divides by 0")
    return v.inf if sign and sign > 0 else v.minus_inf


def must_differ(o: Operation, x: int) -> None:
    """Note that a value must not be 0 on an open set: a proof has to show that, because
    the value divides.
    """
    o.values.oblige(o.values.differs(x, o.values.zero), "a division by 0")


@rule("reciprocal")
def _reciprocal(o: Operation) -> Tensor:
    """Return 1 / x, as `_quotient` divides."""
    one = o.values.one
    return elementwise(lambda x: _quotient(o, one, x), o.ids("self"))


@rule("neg")
def _neg(o: Operation) -> Tensor:
    """Return minus a value."""
    return elementwise(o.values.negative, o.ids("self"))


@rule("abs")
def _abs(o: Operation) -> Tensor:
    """Return x where x > 0, else -x."""
    v = o.values
    zero = v.zero
    return elementwise(
        lambda x: v.choose(v.greater(x, zero), x, v.negative(x)), o.ids("self")
    )


@rule("sgn sign")
def _sign(o: Operation) -> Tensor:
    """Return the sign of a value, as `sign` does."""
    return elementwise(lambda x: sign(o.values, x), o.ids("self"))


def sign(v: Values, x: int) -> int:
    """Return the sign of a value, 1, 0 or -1: 0 only where it is 0 on an open set."""
    minus = v.choose(v.greater(v.zero, x), v.number(-1), v.zero)
    return v.choose(v.greater(x, v.zero), v.one, minus)


@rule("square")
def _square(o: Operation) -> Tensor:
    """Return x x."""
    return elementwise(lambda x: o.values.multiply(x, x), o.ids("self"))


@rule("pow")
def _pow(o: Operation) -> Tensor:
    """Raise to a power. Where the exponent e varies, x ** e is exp(e log x). The base
    of a negative constant exponent must not be 0.
    """
    v = o.values

    def of(x: int, e: int) -> int:
        """Return x ** e."""
        exponent = v.constant(e)
        if exponent is not None:
            if exponent < 0:
                must_differ(o, x)
            return v.power(x, exponent)
        return v.exp(v.multiply(e, v.log(x)))

    return elementwise(of, o.ids("self"), o.ids("exponent"))


@rule("sqrt rsqrt")
def _sqrt(o: Operation) -> Tensor:
    """Return the square root, or of rsqrt 1 divided by it."""
    e = Fraction(1, 2) if o.name == "sqrt" else Fraction(-1, 2)
    return elementwise(lambda x: o.values.power(x, e), o.ids("self"))


@rule("exp", "of logarithms")
def _exp(o: Operation) -> Tensor:
    """Return e^x."""
    return elementwise(o.values.exp, o.ids("self"))


@rule("expm1", "of logarithms")
def _expm1(o: Operation) -> Tensor:
    """Return e^x - 1."""
    v = o.values
    return elementwise(lambda x: v.subtract(v.exp(x), v.one), o.ids("self"))


@rule("exp2", "of logarithms")
def _exp2(o: Operation) -> Tensor:
    """Return 2^x, as e^(x log 2)."""
    v = o.values
    log2 = v.number(math.log(2))
    return elementwise(lambda x: v.exp(v.multiply(x, log2)), o.ids("self"))


@rule("log", "of logarithms")
def _log(o: Operation) -> Tensor:
    """Return the natural logarithm."""
    return elementwise(o.values.log, o.ids("self"))


@rule("log1p", "of logarithms")
def _log1p(o: Operation) -> Tensor:
    """Return log(1 + x)."""
    v = o.values
    return elementwise(lambda x: v.log(v.add(x, v.one)), o.ids("self"))


@rule("log2 log10", "of logarithms")
def _log_of_base(o: Operation) -> Tensor:
    """Return the logarithm to the base 2 or 10, the natural one times a number."""
    v = o.values
    unit = 1 / math.log(2 if o.name == "log2" else 10)
    return elementwise(lambda x: v.scale(v.log(x), unit), o.ids("self"))


@rule("sigmoid", "of logarithms")
def _sigmoid(o: Operation) -> Tensor:
    """Return 1 / (1 + e^-x)."""
    return elementwise(o.values.sigmoid, o.ids("self"))


@rule("sigmoid_backward", "of logarithms")
def _sigmoid_backward(o: Operation) -> Tensor:
    """Return g s (1 - s), of the upstream gradient g and the sigmoid s."""
    v = o.values

    def of(g: int, s: int) -> int:
        return v.multiply(g, v.multiply(s, v.subtract(v.one, s)))

    return elementwise(of, o.ids("grad_output"), o.ids("output"))


@rule("log_sigmoid_forward", "of logarithms")
def _log_sigmoid(o: Operation) -> tuple[Tensor, Tensor]:
    """Return log sigmoid(x), and the ids of an empty buffer, which torch returns too."""
    v = o.values
    ids = elementwise(lambda x: v.log(v.sigmoid(x)), o.ids("self"))
    return ids, torch.zeros(0, dtype=torch.int64)


@rule("log_sigmoid_backward", "of logarithms")
def _log_sigmoid_backward(o: Operation) -> Tensor:
    """Return g sigmoid(-x), of the upstream gradient g."""
    v = o.values
    return elementwise(
        lambda g, x: v.multiply(g, v.sigmoid(v.negative(x))),
        o.ids("grad_output"),
        o.ids("self"),
    )


@rule("tanh", "of logarithms")
def _tanh(o: Operation) -> Tensor:
    """Return tanh x, as 2 sigmoid(2x) - 1."""
    v = o.values

    def of(x: int) -> int:
        return v.subtract(v.scale(v.sigmoid(v.scale(x, 2)), 2), v.one)

    return elementwise(of, o.ids("self"))


@rule("tanh_backward", "of logarithms")
def _tanh_backward(o: Operation) -> Tensor:
    """Return g (1 - y²), of the upstream gradient g and y = tanh x."""
    v = o.values

    def of(g: int, y: int) -> int:
        return v.multiply(g, v.subtract(v.one, v.multiply(y, y)))

    return elementwise(of, o.ids("grad_output"), o.ids("output"))


@rule("softplus", "of logarithms")
def _softplus(o: Operation) -> Tensor:
    """Return log(1 + exp(beta x)) / beta, and x where beta x is above the threshold."""
    v = o.values
    beta, threshold = o.get("beta", 1), o.get("threshold", 20)

    def of(x: int) -> int:
        """Return softplus(x)."""
        scaled = v.scale(x, beta)
        soft = v.scale(v.log(v.add(v.one, v.exp(scaled))), Fraction(1) / Fraction(beta))
        return v.choose(v.greater(scaled, v.number(threshold)), x, soft)

    return elementwise(of, o.ids("self"))


@rule("softplus_backward", "of logarithms")
def _softplus_backward(o: Operation) -> Tensor:
    """Return g sigmoid(beta x), and the upstream gradient g itself where beta x is
    above the threshold.
    """
    v = o.values
    beta, threshold = o.get("beta", 1), o.get("threshold", 20)

    def of(g: int, x: int) -> int:
        """Return the gradient by x, of the upstream gradient g."""
        scaled = v.scale(x, beta)
        soft = v.multiply(g, v.sigmoid(scaled))
        return v.choose(v.greater(scaled, v.number(threshold)), g, soft)

    return elementwise(of, o.ids("grad_output"), o.ids("self"))


@rule("relu")
def _relu(o: Operation) -> Tensor:
    """Return x where x > 0, else 0."""
    v = o.values
    return elementwise(
        lambda x: v.choose(v.greater(x, v.zero), x, v.zero), o.ids("self")
    )


@rule("threshold_backward")
def _threshold_backward(o: Operation) -> Tensor:
    """Return the upstream gradient where a value exceeds the threshold, else 0."""
    v = o.values
    level = v.number(o["threshold"])
    return elementwise(
        lambda g, x: v.choose(v.greater(x, level), g, v.zero),
        o.ids("grad_output"),
        o.ids("self"),
    )


@rule("erf sin cos atan", "by value")
def _by_value(o: Operation) -> Tensor:
    """Return a function of which a proof knows only that equal arguments give equal
    values.
    """
    return elementwise(lambda x: o.values.apply(o.name, x), o.ids("self"))


@rule("logaddexp", "of logarithms")
def _logaddexp(o: Operation) -> Tensor:
    """Return log(e^x + e^y)."""
    v = o.values
    return elementwise(
        lambda x, y: v.log(v.add(v.exp(x), v.exp(y))), o.ids("self"), o.ids("other")
    )


@rule("xlogy", "of logarithms")
def _xlogy(o: Operation) -> Tensor:
    """Return x log y, and 0 where x is the number 0."""
    v = o.values

    def of(x: int, y: int) -> int:
        return v.zero if x == v.zero else v.multiply(x, v.log(y))

    return elementwise(of, o.ids("self"), o.ids("other"))


@rule("floor ceil round trunc frac remainder fmod floor_divide", "of constants")
def _rounded(o: Operation) -> Tensor:
    """Round constants; stop where a value varies."""
    return _only_constants(o, "rounds a value")


def _only_constants(o: Operation, what: str) -> Tensor:
    """Run the operator on constants; stop where a value varies.

    Args:
        o: the call.
        what: what the operator does, a verb and its object, for the reason.
    """
    for x in o.arguments.values():
        if isinstance(x, Tensor) and o.trace.varies(x):
            o.trace.stop(f"{what}, by {o.name}")
    return o.trace.ids(o.run())


# ---- comparisons and choices ---------------------------------------------------------
@rule("gt lt ge le")
def _compare(o: Operation) -> Tensor:
    """Return the condition that one value is greater, or at least as large; x < y is
    read as y > x.
    """
    v = o.values
    or_equal = o.name in ("ge", "le")
    x, y = o.ids("self"), o.ids("other")
    if o.name in ("lt", "le"):
        x, y = y, x
    return elementwise(lambda a, b: v.greater(a, b, or_equal), x, y)


@rule("eq ne")
def _equal(o: Operation) -> Tensor:
    """Compare for equality: conditions by their truth, other values by their numbers."""
    v = o.values

    def of(x: int, y: int) -> int:
        """Return the condition that two values are equal, of `ne` that they are not."""
        if _is_truth(v, x) and _is_truth(v, y):
            same = v.same_truth(x, y)
        else:
            same = v.equals(x, y)
        return same if o.name == "eq" else v.negation(same)

    return elementwise(of, o.ids("self"), o.ids("other"))


def _is_truth(v: Values, x: int) -> bool:
    """Tell whether an id is a condition, or true or false."""
    return v.condition(x) == x


@rule("minimum maximum")
def _least(o: Operation) -> Tensor:
    """Return the smaller, or the larger, of two values; NaN where one is NaN."""
    of = least if o.name == "minimum" else most
    return elementwise(lambda x, y: of(o.values, x, y), o.ids("self"), o.ids("other"))


@rule("fmin fmax")
def _least_number(o: Operation) -> Tensor:
    """Return the smaller, or the larger, of two values; the other one where one is NaN."""
    v = o.values
    of_numbers = least if o.name == "fmin" else most

    def of(x: int, y: int) -> int:
        """Return the id of one of the two."""
        if x == v.nan:
            return y
        if y == v.nan:
            return x
        return of_numbers(v, x, y)

    return elementwise(of, o.ids("self"), o.ids("other"))


def least(v: Values, x: int, y: int) -> int:
    """Return the smaller of two values; NaN where one is NaN."""
    if v.nan in (x, y):
        return v.nan
    return v.choose(v.greater(x, y), y, x)


def most(v: Values, x: int, y: int) -> int:
    """Return the larger of two values; NaN where one is NaN."""
    if v.nan in (x, y):
        return v.nan
    return v.choose(v.greater(y, x), y, x)


@rule("clamp clamp_min clamp_max clip hardtanh")
def _clamp(o: Operation) -> Tensor:
    """Bound values from below and from above, by what is given of the two. Where the
    bounds cross, the upper one wins.
    """
    low = o.get("min", o.get("min_val"))
    high = o.get("max", o.get("max_val"))
    ids = o.ids("self")
    if low is not None:
        ids = elementwise(lambda x, y: most(o.values, x, y), ids, o.trace.ids(low))
    if high is not None:
        ids = elementwise(lambda x, y: least(o.values, x, y), ids, o.trace.ids(high))
    return ids


@rule(
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__"
)
def _logic(o: Operation) -> Tensor:
    """Join two conditions. Bits of integers are joined where they are constants alone."""
    v = o.values
    logical = o.name.startswith("logical")
    if not logical and not (_is_bool(o["self"]) and _is_bool(o["other"])):
        return _only_constants(o, "computes with bits")
    word = o.name.strip("_").rpartition("_")[2]

    def differ(x: int, y: int) -> int:
        return v.negation(v.same_truth(x, y))

    of = {"and": v.both, "or": v.either, "xor": differ}[word]
    return elementwise(of, o.ids("self"), o.ids("other"))


@rule("logical_not bitwise_not")
def _not(o: Operation) -> Tensor:
    """Negate conditions. Bits of integers are inverted where they are constants alone."""
    v = o.values
    if o.name == "bitwise_not" and o["self"].dtype is not torch.bool:
        return _only_constants(o, "computes with bits")
    return elementwise(lambda x: v.negation(v.condition(x)), o.ids("self"))


@rule("isnan isinf isfinite isposinf isneginf")
def _is_special(o: Operation) -> Tensor:
    """Tell which values are NaN, infinite or finite: 1 or 0, the ids of true and false."""
    names = {
        "isnan": ("nan",),
        "isinf": ("inf", "-inf"),
        "isfinite": ("",),
        "isposinf": ("inf",),
        "isneginf": ("-inf",),
    }[o.name]
    v = o.values
    return elementwise(lambda x: int(v.special(x) in names), o.ids("self"))


@rule("signbit")
def _signbit(o: Operation) -> Tensor:
    """Return the condition that a value is below 0."""
    v = o.values
    return elementwise(lambda x: v.greater(v.zero, x), o.ids("self"))


@rule("copysign")
def _copysign(o: Operation) -> Tensor:
    """Return the size of one value with the sign of another. 0 counts as above 0."""
    v = o.values

    def of(x: int, y: int) -> int:
        """Return |x|, or -|x| where y < 0."""
        size = v.choose(v.greater(x, v.zero), x, v.negative(x))
        return v.choose(v.greater(v.zero, y), v.negative(size), size)

    return elementwise(of, o.ids("self"), o.ids("other"))


@rule("heaviside")
def _heaviside(o: Operation) -> Tensor:
    """Return 1 above 0, 0 below 0, and the second value at 0."""
    v = o.values

    def of(x: int, at_zero: int) -> int:
        """Return 1, 0, or `at_zero` where x is 0."""
        equal = v.choose(v.equals(x, v.zero), at_zero, v.zero)
        return v.choose(v.greater(x, v.zero), v.one, equal)

    return elementwise(of, o.ids("self"), o.ids("values"))


# ---- sums and their like -------------------------------------------------------------
@rule("sum")
def _sum(o: Operation) -> Tensor:
    """Add up values along dimensions."""
    v = o.values
    keep = bool(o.get("keepdim", False))
    return along(lambda row: add_all(v, row), o.ids("self"), o.get("dim"), keep)


@rule("mean")
def _mean(o: Operation) -> Tensor:
    """Return means along dimensions; NaN of no values."""
    v = o.values

    def of(row: list[int]) -> int:
        return v.scale(add_all(v, row), Fraction(1, len(row))) if row else v.nan

    return along(of, o.ids("self"), o.get("dim"), bool(o.get("keepdim", False)))


@rule("var std")
def _var(o: Operation) -> Tensor:
    """Return the variance or its root, the sum of squares divided by the number of
    values less the correction, 1 by default; NaN of no values. With too few values the
    sum is divided by 0, and the trace stops where the sum varies.
    """
    v = o.values
    correction = o.get("correction", 1)
    if "unbiased" in o.arguments:
        correction = int(o["unbiased"])

    def of(row: list[int]) -> int:
        """Return the formula of the variance of one row of formulas, or of its root."""
        if not row:
            return v.nan
        mean = v.scale(add_all(v, row), Fraction(1, len(row)))
        gaps = [v.subtract(x, mean) for x in row]
        total = add_all(v, [v.multiply(x, x) for x in gaps])
        divisor = max(len(row) - Fraction(correction), Fraction(0))
        if not divisor and v.varies(total):  # infinite, or NaN where it is 0
            o.trace.stop("divides by 0")
        out = _quotient(o, total, v.number(divisor))
        return out if o.name == "var" else v.power(out, Fraction(1, 2))

    return along(of, o.ids("self"), o.get("dim"), bool(o.get("keepdim", False)))


@rule("prod")
def _prod(o: Operation) -> Tensor:
    """Multiply all values along dimensions; 1 of none."""
    v = o.values
    return along(
        lambda row: reduce(v.multiply, row, v.one),
        o.ids("self"),
        o.get("dim"),
        bool(o.get("keepdim", False)),
    )


@rule("any all")
def _any(o: Operation) -> Tensor:
    """Return the condition that any, or all, of the values along dimensions are true.
    Of no values, any is false and all is true.
    """
    v = o.values
    of = v.either if o.name == "any" else v.both
    start = v.zero if o.name == "any" else v.one
    return along(
        lambda row: reduce(of, row, start),
        o.ids("self"),
        o.get("dim"),
        bool(o.get("keepdim", False)),
    )


@rule("amax amin")
def _extreme(o: Operation) -> Tensor:
    """Return the largest, or the smallest, value along dimensions."""
    of = most if o.name == "amax" else least
    return along(
        lambda row: reduce(lambda x, y: of(o.values, x, y), row),
        o.ids("self"),
        o.get("dim"),
        bool(o.get("keepdim", False)),
    )


@rule("max min", "places")
def _extreme_and_place(o: Operation) -> Any:
    """Return the extreme of two tensors, of all values, or along a dimension with its
    place. That place is the one at the witness, and a step of the path.
    """
    of = most if o.name == "max" else least
    if "other" in o.arguments:
        return elementwise(
            lambda x, y: of(o.values, x, y), o.ids("self"), o.ids("other")
        )
    if o.get("dim") is None:
        ids = o.ids("self").reshape(-1).tolist()
        return torch.tensor(reduce(lambda x, y: of(o.values, x, y), ids))
    # one branch for each place at which it may be
    o.answer = o.at_witness()
    places = o.answer[1]
    keep = bool(o.get("keepdim", False))
    return _put_extremes(o, places, o["dim"], keep, largest=o.name == "max")


def _put_extremes(
    o: Operation, places: Tensor, dim: int, keep: bool, largest: bool
) -> tuple[Tensor | None, ...]:
    """Set the ids of the answer to those at places that the operator found, and make it
    a step of the path that they are the largest, or the smallest.

    Args:
        o: the call, with its answer.
        places: of the extremes along the dimension.
        dim: the dimension.
        keep: the places have this dimension, with size 1.
        largest: they are places of the largest values, not of the smallest.

    Returns:
        (None,).
    """
    ids = o.ids("self")
    if ids.ndim == 0:
        _put_answer(o, ids)
        return (None,)
    if not keep:
        places = places.unsqueeze(dim)
    _order_beside_extremes(o, ids, places, dim, largest)
    picked = ids.gather(dim, places)
    _put_answer(o, picked if keep else picked.squeeze(dim))
    return (None,)


def _order_beside_extremes(
    o: Operation, ids: Tensor, places: Tensor, dim: int, largest: bool
) -> None:
    """Make it steps of the path that the values at places are the extremes along a
    dimension, each the first one: torch documents that. So no value in front of it
    equals it.

    Args:
        o: the call.
        ids: all values.
        places: one for each row along the dimension, which has size 1.
        dim: the dimension.
        largest: the values there are the largest, not the smallest.
    """
    rows = ids.movedim(dim, -1).reshape(-1, ids.shape[dim]).tolist()
    place_of_each = places.movedim(dim, -1).reshape(-1).tolist()
    for row, place in zip(rows, place_of_each, strict=True):
        for n, other in enumerate(row):
            is_in_front = n < place
            if n == place:
                continue
            if largest:
                o.trace.order(other, row[place], is_in_front)
            else:
                o.trace.order(row[place], other, is_in_front)


def _put_answer(o: Operation, ids: Tensor) -> None:
    """Set the ids of the first tensor that the operator has answered."""
    first = o.answer[0] if isinstance(o.answer, tuple) else o.answer
    o.trace.put(first, ids)


@rule("argmax argmin", "places")
def _place(o: Operation) -> Any:
    """Answer with the place of the extreme value at the witness, and make it a step of
    the path that it is there.
    """
    o.answer = o.at_witness()
    ids = o.ids("self")
    dim = o.get("dim")
    if dim is None:
        ids, dim = ids.reshape(-1), 0
        places = o.answer.reshape(1)
    elif o.get("keepdim", False):
        places = o.answer
    else:
        places = o.answer.unsqueeze(dim)
    _order_beside_extremes(o, ids, places, dim, largest=o.name == "argmax")
    return (None,)


@rule("sort argsort topk kthvalue median nanmedian", "places")
def _sort(o: Operation) -> Any:
    """Answer with what sorts at the witness. The order of each two neighbors becomes a
    step of the path; a single number, [], stops the trace.

    Of values that may be equal on a region, a stable sort keeps the order that they had.
    Of any other operator torch does not say which comes first, so their places are
    unknown, and whatever reads them stops the trace.
    """
    if o["self"].ndim == 0:
        o.trace.stop(f"calls {o.name} of one number")
    dim = o.get("dim")
    if dim is None and o.name in ("median", "nanmedian"):
        return _median(o)
    o.answer = o.at_witness()
    dim = -1 if dim is None else dim
    ids = o.ids("self")
    if not ids.numel():
        return (None,)
    descending = bool(o.get("descending", o.get("largest", False)))
    numbers = o.trace.numbers(o["self"])
    order = numbers.sort(dim=dim, stable=True, descending=descending).indices
    given = o.answer if isinstance(o.answer, Tensor) else o.answer[1]
    if given.ndim < ids.ndim:  # kthvalue and median leave the dimension out
        given = given.unsqueeze(dim)
    lines = zip(_lines(ids, dim), _lines(order, dim), _lines(given, dim), strict=True)
    sorted_lines = [_sorted(o, *line, descending) for line in lines]
    shape = given.movedim(dim, -1).shape
    values, places = (
        torch.tensor(part).view(shape).movedim(-1, dim)
        for part in zip(*sorted_lines, strict=True)
    )
    o.trace.put(given, places)
    if isinstance(o.answer, tuple):
        _put_answer(o, values.reshape(o.answer[0].shape))
    return (None,)


def _lines(x: Tensor, dim: int) -> list[list[int]]:
    """Return the entries of a tensor along a dimension, a list for each line of it."""
    return x.movedim(dim, -1).reshape(-1, x.shape[dim]).tolist()


def _sorted(
    o: Operation, line: list[int], order: list[int], given: list[int], descending: bool
) -> tuple[list[int], list[int]]:
    """Make it steps of the path that a line is in an order, and return what the operator
    answers of it.

    Args:
        o: the call.
        line: ids of the values.
        order: their places, as a stable sort at the witness orders them.
        given: the places that the operator answered there.
        descending: the largest comes first.

    Returns:
        The ids of the values and those of their places. A place that torch leaves open
        is unknown.
    """
    is_stable = o.get("stable", False)
    tied: set[int] = set()  # ranks of values that equal a neighbor, here or elsewhere
    is_open = False  # some are equal on a part of the path alone
    for rank, (first, second) in enumerate(pairwise(order)):
        x, y = line[first], line[second]
        smaller, larger = (y, x) if descending else (x, y)
        o.trace.order(smaller, larger, is_stable and first > second)
        if is_stable:
            continue
        equal = o.trace.equality(x, y)
        if equal != o.values.zero:
            tied.update((rank, rank + 1))
        is_open |= equal not in (o.values.zero, o.values.one)
    if o.name in ("kthvalue", "median", "nanmedian"):
        ranks = [_middle(o, line)]
    elif is_open and not o.get("sorted", True):
        o.trace.stop("selects values that may be equal, in no order")
    elif is_open or is_stable:
        ranks = list(range(len(given)))
    else:
        ranks = [order.index(place) for place in given]
    places = [
        o.trace.unknown_place() if is_open and rank in tied else o.values.number(place)
        for rank, place in zip(ranks, given, strict=True)
    ]
    return [line[order[rank]] for rank in ranks], places


def _middle(o: Operation, line: list[int]) -> int:
    """Return the rank of the one value that an operator selects of a line. NaN stops a
    median.
    """
    if o.name == "kthvalue":
        return int(o["k"]) - 1
    count = sum(x != o.values.nan for x in line)
    if o.name == "median" and count < len(line):
        o.trace.stop("calls median of a value that is not a number")
    return max(0, (count - 1) // 2)


def _median(o: Operation) -> Tensor:
    """Return the lower median of a whole tensor, as torch does. The order of all values
    becomes steps of the path; NaN stops the trace.
    """
    ids = o.ids("self").reshape(-1)
    ordered = ids[o.trace.numbers(o["self"]).reshape(-1).sort(stable=True).indices]
    if o.values.nan in ordered.tolist():
        o.trace.stop(f"calls {o.name} of a value that is not a number")
    for x, y in pairwise(ordered.tolist()):
        o.trace.order(x, y)
    return ordered[(len(ordered) - 1) // 2]


@rule("cumsum")
def _cumsum(o: Operation) -> Tensor:
    """Return running sums along a dimension."""
    return _running(o, o.values.add)


@rule("cumprod")
def _cumprod(o: Operation) -> Tensor:
    """Return running products along a dimension."""
    return _running(o, o.values.multiply)


def _running(o: Operation, of: Callable[[int, int], int]) -> Tensor:
    """Return what a function has gathered up to each place of a dimension."""
    ids = o.ids("self").clone()
    if ids.ndim:
        lines = ids.movedim(o["dim"], 0)
        for i in range(1, len(lines)):
            lines[i] = elementwise(of, lines[i - 1], lines[i])
    return ids


@rule("logsumexp", "of logarithms")
def _logsumexp(o: Operation) -> Tensor:
    """Return the logarithm of the sum of exponentials along dimensions."""
    v = o.values
    return along(
        lambda row: v.log(add_all(v, [v.exp(x) for x in row])),
        o.ids("self"),
        list(o["dim"]),
        bool(o.get("keepdim", False)),
    )


@rule("_softmax _log_softmax", "of logarithms")
def _softmax(o: Operation) -> Tensor:
    """Return exp(x) / Σ exp(x) along a dimension, or the logarithm of that."""
    v = o.values
    powers = elementwise(v.exp, o.ids("self"))
    total = along(lambda row: add_all(v, row), powers, [o["dim"]], True)
    share = elementwise(v.divide, powers, total)
    return share if o.name == "_softmax" else elementwise(v.log, share)


@rule("_softmax_backward_data _log_softmax_backward_data", "of logarithms")
def _softmax_backward(o: Operation) -> Tensor:
    """Return the gradient of a softmax, or of its logarithm, by its input."""
    v = o.values
    g, y = o.ids("grad_output"), o.ids("output")
    if o.name == "_softmax_backward_data":
        product = elementwise(v.multiply, g, y)
        total = along(lambda row: add_all(v, row), product, [o["dim"]], True)
        return elementwise(
            lambda p, q, s: v.subtract(p, v.multiply(q, s)), product, y, total
        )
    total = along(lambda row: add_all(v, row), g, [o["dim"]], True)
    return elementwise(
        lambda p, q, s: v.subtract(p, v.multiply(v.exp(q), s)), g, y, total
    )


# ---- products ------------------------------------------------------------------------
def product(v: Values, x: Tensor, y: Tensor) -> Tensor:
    """Return the product of matrices of ids, [..., n, k] and [..., k, m]: [..., n, m]."""
    terms = elementwise(v.multiply, x.unsqueeze(-1), y.unsqueeze(-3))
    return along(lambda row: add_all(v, row), terms, [terms.ndim - 2], False)


@rule("mm bmm")
def _mm(o: Operation) -> Tensor:
    """Return the product of two matrices, or of batches of them."""
    return product(o.values, o.ids("self"), o.ids("mat2"))


@rule("mv")
def _mv(o: Operation) -> Tensor:
    """Return the product of a matrix and a vector."""
    return product(o.values, o.ids("self"), o.ids("vec")[:, None])[:, 0]


@rule("dot vdot")
def _dot(o: Operation) -> Tensor:
    """Return the sum of the products of two vectors' entries, []."""
    other = "tensor" if "tensor" in o.arguments else "other"
    return product(o.values, o.ids("self")[None], o.ids(other)[:, None])[0, 0]


@rule("addmm baddbmm")
def _addmm(o: Operation) -> Tensor:
    """Return beta times a tensor plus alpha times a product of matrices."""
    v = o.values
    first, second = ("mat1", "mat2") if o.name == "addmm" else ("batch1", "batch2")
    made = product(v, o.ids(first), o.ids(second))
    beta, alpha = o.get("beta", 1), o.get("alpha", 1)
    return elementwise(
        lambda x, y: v.add(v.scale(x, beta), v.scale(y, alpha)), o.ids("self"), made
    )


@rule("addcmul addcdiv")
def _addcmul(o: Operation) -> Tensor:
    """Add a multiple of the product, or of the quotient, of two tensors."""
    v = o.values
    of = v.multiply if o.name == "addcmul" else lambda x, y: _quotient(o, x, y)
    by = o.get("value", 1)
    return elementwise(
        lambda x, y, z: v.add(x, v.scale(of(y, z), by)),
        o.ids("self"),
        o.ids("tensor1"),
        o.ids("tensor2"),
    )


@rule("lerp")
def _lerp(o: Operation) -> Tensor:
    """Move from one value toward another by a weight."""
    v = o.values
    return elementwise(
        lambda x, y, w: v.add(x, v.multiply(w, v.subtract(y, x))),
        o.ids("self"),
        o.ids("end"),
        o.ids("weight"),
    )


# ---- places --------------------------------------------------------------------------
def decided(o: Operation, mask: Tensor) -> Tensor:
    """Return a mask as it is at the witness, each entry of which becomes a step of the
    path; a mask without ids is returned as it is.
    """
    if not o.trace.is_known(mask):
        return mask
    truths = [o.trace.decide(x) for x in o.trace.ids(mask).reshape(-1).tolist()]
    return torch.tensor(truths, dtype=torch.bool).view(mask.shape)


@rule("nonzero", "places")
def _nonzero(o: Operation) -> Any:
    """Answer with the places of the entries that are true, or not 0, at the witness."""
    o.answer = decided(o, o["self"]).nonzero()
    return (None,)


def _nonzero_of(o: Operation, name: str) -> Any:
    """Answer with the places at which an argument holds at the witness, a tensor of
    numbers for each dimension.
    """
    o.answer = torch.where(decided(o, o[name]))
    return (None,)


@rule("masked_select", "places")
def _masked_select(o: Operation) -> Tensor:
    """Return the values where the mask holds at the witness."""
    mask = o.decided["mask"] = decided(o, o["mask"])
    ids = o.ids("self")
    return torch.masked_select(*torch.broadcast_tensors(ids, mask))


@rule("_local_scalar_dense is_nonzero", "places")
def _read(o: Operation) -> Any:
    """Read one value as a number of Python. A condition is decided, and what varies stops
    the trace.
    """
    x = o["self"]
    value = int(o.ids("self").reshape(()))
    if x.dtype is torch.bool or o.name == "is_nonzero":
        o.answer = o.trace.decide(value)
    elif o.values.varies(value):
        o.trace.stop("reads a value as a number of Python", "keep it a tensor")
    else:
        o.answer = o.func(x)
    return (None,)


@rule("equal", "places")
def _all_equal(o: Operation) -> Any:
    """Tell whether two tensors are equal. Each pair of values, up to the first that
    differs at the witness, becomes a step of the path.
    """
    v = o.values
    if o["self"].shape != o["other"].shape:
        o.answer = False
        return (None,)
    same = elementwise(
        lambda x, y: v.condition(v.equals(x, y)), o.ids("self"), o.ids("other")
    )
    o.answer = all(o.trace.decide(x) for x in same.reshape(-1).tolist())
    return (None,)


def _places(o: Operation, indices: Any) -> list[Any]:
    """Return the indices of `x[...]`, with masks decided, and keep them for the call;
    no other index may vary.
    """
    out = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            out.append(decided(o, index))
        else:
            out.append(o.trace.concrete(index))
    o.decided["indices"] = out
    return out


@rule("index _unsafe_index")
def _index(o: Operation) -> Tensor:
    """Return the values at indices, as `x[...]`."""
    return torch.ops.aten.index.Tensor(o.ids("self"), _places(o, o["indices"]))


@rule("index_put _unsafe_index_put _index_put_impl")
def _index_put(o: Operation) -> Tensor:
    """Write values at places, or add them there."""
    ids = o.ids("self").clone()
    places = _places(o, o["indices"])
    if not o.get("accumulate", False):
        return torch.ops.aten.index_put(ids, places, o.ids("values"))
    numbers = torch.arange(ids.numel()).view(ids.shape)
    targets = torch.ops.aten.index.Tensor(numbers, places)
    added = o.ids("values").expand(targets.shape)
    return _add_at(o, ids, targets, added)


def _add_at(o: Operation, ids: Tensor, targets: Tensor, added: Tensor) -> Tensor:
    """Return ids to which values are added at places of the flat tensor; a place may
    come several times.

    Args:
        o: the call.
        ids: to which is added.
        targets: a place in the flat tensor for each value.
        added: ids of the values, in the same shape.
    """
    flat = ids.reshape(-1).tolist()
    places = targets.reshape(-1).tolist()
    values = added.reshape(-1).tolist()
    for place, x in zip(places, values, strict=True):
        flat[place] = o.values.add(flat[place], x)
    return torch.tensor(flat, dtype=torch.int64).view(ids.shape)


@rule("scatter")
def _scatter(o: Operation) -> Tensor:
    """Write values at places along a dimension. With a reduction, the trace stops."""
    if o.get("reduce"):
        o.trace.stop("calls scatter with reduce=", "use scatter_add")
    ids = o.ids("self").clone()
    index = o.trace.concrete(o["index"])
    if "src" not in o.arguments:
        return ids.scatter(o["dim"], index, int(o.ids("value")))
    return ids.scatter(o["dim"], index, o.ids("src"))


@rule("scatter_add")
def _scatter_add(o: Operation) -> Tensor:
    """Add values at places along a dimension; without a place nothing changes."""
    ids = o.ids("self")
    index = o.trace.concrete(o["index"])
    if not index.numel():
        return ids.clone()
    targets, source = _scattered(o, index)
    return _add_at(o, ids, targets, source)


@rule("scatter_reduce")
def _scatter_reduce(o: Operation) -> Tensor:
    """Gather the values that go to each place, with what is there unless include_self
    is false, and reduce each lot to one value.
    """
    v = o.values
    how = o["reduce"]
    reductions: dict[str, Callable[[int, int], int]] = {
        "sum": v.add,
        "mean": v.add,
        "prod": v.multiply,
        "amin": lambda x, y: least(v, x, y),
        "amax": lambda x, y: most(v, x, y),
    }
    ids = o.ids("self")
    index = o.trace.concrete(o["index"])
    if not index.numel():
        return ids.clone()
    targets, source = _scattered(o, index)
    places = targets.reshape(-1).tolist()
    values = source.reshape(-1).tolist()
    flat = ids.reshape(-1).tolist()
    lots: dict[int, list[int]] = {}  # the values that go to each place
    for place, x in zip(places, values, strict=True):
        if place not in lots:
            lots[place] = [flat[place]] if o.get("include_self", True) else []
        lots[place].append(x)
    for place, lot in lots.items():
        flat[place] = reduce(reductions[how], lot)
        if how == "mean":
            flat[place] = v.scale(flat[place], Fraction(1, len(lot)))
    return torch.tensor(flat, dtype=torch.int64).view(ids.shape)


def _scattered(o: Operation, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the flat place of the result for each entry of the index, and the id that
    is put there.
    """
    ids = o.ids("self")
    numbers = torch.arange(ids.numel()).view(ids.shape)
    targets = _gather_places(numbers, o["dim"], index)
    return targets, o.ids("src")[tuple(slice(n) for n in index.shape)]


def _gather_places(numbers: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the flat places that an index along a dimension names, in the index's
    shape.
    """
    # the index may be smaller than the tensor in each other dimension
    cut = [slice(n) for n in index.shape]
    if numbers.ndim:
        cut[dim] = slice(None)
    return numbers[tuple(cut)].gather(dim, index)


@rule("index_add")
def _index_add(o: Operation) -> Tensor:
    """Add a multiple of a tensor at places along a dimension."""
    v = o.values
    ids = o.ids("self")
    index = o.trace.concrete(o["index"])
    numbers = torch.arange(ids.numel()).view(ids.shape)
    targets = numbers.index_select(o["dim"], index)
    added = elementwise(lambda x: v.scale(x, o.get("alpha", 1)), o.ids("source"))
    return _add_at(o, ids, targets, added)


@rule("index_fill")
def _index_fill(o: Operation) -> Tensor:
    """Write one value at places along a dimension."""
    ids = o.ids("self").clone()
    return ids.index_fill(o["dim"], o.trace.concrete(o["index"]), int(o.ids("value")))


@rule(
    "searchsorted bucketize unique _unique2 unique_dim unique_consecutive bincount histc",
    "of constants",
)
def _search(o: Operation) -> Tensor:
    """Stop the trace: such an operator runs only where no tensor has ids."""
    return o.trace.stop(f"calls {o.name} of values that vary")


@rule("count_nonzero")
def _count(o: Operation) -> Tensor:
    """Count the values that are true, or not 0, along dimensions."""
    v = o.values
    return along(
        lambda row: add_all(v, [v.real(v.condition(x)) for x in row]),
        o.ids("self"),
        o.get("dim"),
        False,
    )


@rule("_assert_async _assert_scalar", "places")
def _assert(o: Operation) -> Any:
    """Decide the condition that is asserted; stop where it is false at the witness."""
    if not o.trace.decide(int(o.ids("self").reshape(()))):
        o.trace.stop("asserts what does not hold for every value")
    return (None,)


@rule("record_stream")
def _nothing(o: Operation) -> Any:
    """Set no ids: the operator computes nothing."""
    return (None,)
