# SPDX-License-Identifier: Apache-2.0
"""The closed vocabulary in which every objective is written: torch computes it, sympy derives it, numpy maps it.

A word looks at its arguments: a torch tensor is computed with autograd, a sympy expression (or an object array of them)
stays symbolic, anything else is numpy. Three conventions, the same for all readers:

* `exp` saturates: where e^x overflows the dtype, its value is the largest finite number and its gradient 0, so that a
  ratio in the branch not taken is never infinite and 0 * inf never makes NaN in a backward pass.
* `clip`, `minimum`, `maximum` against a number pass the whole gradient at equality (the paper's Eq. 10: r <= 1 + eps).
  `torch.clamp` does so up to torch 2.13 and passes none in 2.14, so it is not used for them.
* `sg`, the stop-gradient: its value is its argument, its derivative 0.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

inf = math.inf


def _backend(*xs: Any) -> str:
    """Return the library whose functions these arguments need: torch, sympy or numpy."""
    if any(isinstance(x, Tensor) for x in xs):
        return "torch"
    # a symbol can only exist where sympy was imported; never import it for torch
    sympy = sys.modules.get("sympy")
    if sympy and any(
        isinstance(x, sympy.Basic) or (isinstance(x, np.ndarray) and x.dtype == object)
        for x in xs
    ):
        return "sympy"
    return "numpy"


def _elementwise_symbolic(f: Any, *xs: Any) -> Any:
    """Return f of each element; of scalars a scalar, of arrays an object array."""
    return np.frompyfunc(f, len(xs), 1)(*xs)


def _saturating_exp(x: Tensor) -> Tensor:
    """Return e^x, at most the largest finite number of the dtype."""
    # Out of place: torch 2.11 compiles an in-place step of an autograd.Function's forward
    # to a gradient of 0.
    return x.exp().clamp(max=torch.finfo(x.dtype).max)


def with_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: keep the function's signature. `apply` of an autograd Function asks for
    that of its forward at each call, and to find it takes longer than to add tensors.
    """
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return function


class _Exp(torch.autograd.Function):
    """e^x, at most the largest finite number of the dtype; the gradient is y, and 0 where y saturates or is NaN."""

    generate_vmap_rule = True

    @staticmethod
    @with_signature
    def forward(x: Any) -> Any:
        return _saturating_exp(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        """Save e^x for the backward pass."""
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """Return the upstream gradient times e^x; 0 where e^x saturates or is NaN."""
        (y,) = ctx.saved_tensors
        return torch.where(y < torch.finfo(y.dtype).max, g * y, 0)


def exp(x: Any) -> Any:
    """e^x; for torch at most the largest finite number of the dtype, its gradient 0 there.

    Args:
        x: a tensor, an array, a number or a sympy expression.

    Returns:
        The same kind, elementwise.
    """
    match _backend(x):
        case "torch":
            return _Exp.apply(x) if x.requires_grad else _saturating_exp(x)
        case "sympy":
            return _elementwise_symbolic(sys.modules["sympy"].exp, x)
    with np.errstate(over="ignore"):
        return np.minimum(np.exp(x), np.finfo(np.float64).max)


def expm1(x: Any) -> Any:
    """e^x - 1, accurate near 0; saturates as exp does.

    Args:
        x: a tensor, an array, a number or a sympy expression.

    Returns:
        The same kind, elementwise.
    """
    match _backend(x):
        case "torch":
            return where(x < 1, x.clamp(max=1).expm1(), exp(x) - 1)
        case "sympy":
            return exp(x) - 1
    with np.errstate(over="ignore"):
        return np.minimum(np.expm1(x), np.finfo(np.float64).max)


def saturate(x: Any) -> Any:
    """x, stopped where e^x overflows.

    Args:
        x: a tensor, an array, a number or a sympy expression.

    Returns:
        The same kind, elementwise.
    """
    match _backend(x):
        case "torch":
            return x.clamp(max=math.log(torch.finfo(x.dtype).max))
        case "sympy":
            return x
    return np.minimum(x, math.log(np.finfo(np.float64).max))


def log(x: Any) -> Any:
    """The natural logarithm.

    Args:
        x: a tensor, an array, a number or a sympy expression.

    Returns:
        The same kind, elementwise.
    """
    match _backend(x):
        case "torch":
            return x.log()
        case "sympy":
            return _elementwise_symbolic(sys.modules["sympy"].log, x)
    return np.log(x)


def sqrt(x: Any) -> Any:
    """The square root.

    Args:
        x: a tensor, an array, a number or a sympy expression.

    Returns:
        The same kind, elementwise.
    """
    match _backend(x):
        case "torch":
            return x.sqrt()
        case "sympy":
            return _elementwise_symbolic(sys.modules["sympy"].sqrt, x)
    return np.sqrt(x)


def sigmoid(x: Any) -> Any:
    """1/(1 + e^-x).

    Args:
        x: a tensor, an array, a number or a sympy expression.

    Returns:
        The same kind, elementwise.
    """
    match _backend(x):
        case "torch":
            return x.sigmoid()
        case "sympy":
            return _elementwise_symbolic(
                lambda v: 1 / (1 + sys.modules["sympy"].exp(-v)), x
            )
    z = np.exp(-np.abs(x))
    return np.where(np.asarray(x) >= 0, 1 / (1 + z), z / (1 + z))


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y.

    Args:
        condition: true or false, elementwise.
        x, y: tensors, arrays, numbers or sympy expressions.

    Returns:
        The same kind, elementwise.
    """
    match _backend(condition, x, y):
        case "torch":
            return torch.where(torch.as_tensor(condition), x, y)
        case "sympy":
            from upref.symbolic import Where

            return _elementwise_symbolic(Where, condition, x, y)
    return np.where(condition, x, y)


def when(condition: Any, x: Any) -> Any:
    """x where the condition holds, else 0: Iverson's bracket [condition] x.

    Args:
        condition: true or false, elementwise.
        x: a tensor, an array, a number or a sympy expression.

    Returns:
        The same kind, elementwise.
    """
    return where(condition, x, 0)


def dual_clip(r: Any, A: Any, c: Any) -> Any:
    """r, stopped at c where A < 0 (Ye et al. 2020): max(min(r A, clip(r) A), c A) is the clipped term of this r.

    Args:
        r: the ratio.
        A: the advantage.
        c: the bound; None: there is none.

    Returns:
        The ratio, of the kind of r.
    """
    return r if c is None else where(A < 0, minimum(r, c), r)


def _choose(choice: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return choice(x). A compiled backward pass compares x again: else torch keeps a
    boolean for each number, and its compiled code for a CPU writes those 20 times
    slower than eager.
    """
    if x.requires_grad and torch.compiler.is_compiling():
        return checkpoint(choice, x, use_reentrant=False, preserve_rng_state=False)
    return choice(x)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of the two, elementwise.

    Args:
        x, y: tensors, arrays, numbers or sympy expressions.

    Returns:
        The same kind, elementwise. Where a tensor equals a number, the whole gradient is the tensor's; of two equal
        tensors, each has half.
    """
    match _backend(x, y):
        case "torch":
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                return torch.minimum(x, y)
            x, y = (x, y) if isinstance(x, Tensor) else (y, x)
            return _choose(lambda x: torch.where(x > y, y, x), x)
        case "sympy":
            return where(_elementwise_symbolic(lambda a, b: a <= b, x, y), x, y)
    return np.minimum(x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger of the two, elementwise.

    Args:
        x, y: tensors, arrays, numbers or sympy expressions.

    Returns:
        The same kind, elementwise. Where a tensor equals a number, the whole gradient is the tensor's; of two equal
        tensors, each has half.
    """
    match _backend(x, y):
        case "torch":
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                return torch.maximum(x, y)
            x, y = (x, y) if isinstance(x, Tensor) else (y, x)
            return _choose(lambda x: torch.where(x < y, y, x), x)
        case "sympy":
            return where(_elementwise_symbolic(lambda a, b: a >= b, x, y), x, y)
    return np.maximum(x, y)


def clip(x: Any, low: Any, high: Any) -> Any:
    """low where x < low, high where x > high, else x.

    Args:
        x: a tensor, an array, a number or a sympy expression.
        low, high: the bounds.

    Returns:
        The same kind, elementwise; no gradient beyond a bound.
    """
    match _backend(x, low, high):
        case "torch":
            return torch.where(x > high, high, torch.where(x < low, low, x))
        case "sympy":
            return minimum(maximum(x, low), high)
    return np.clip(x, low, high)


def binary_kl(lp: Any, lp_old: Any) -> Any:
    """KL(Bern(mu) ‖ Bern(p)) in nats; 1 - p is taken as -expm1(lp), accurate near 1.

    Args:
        lp: log p.
        lp_old: log mu.

    Returns:
        Nats, elementwise.
    """
    q = -expm1(lp)
    q_old = -expm1(lp_old)
    return exp(lp_old) * (lp_old - lp) + when(q_old > 0, q_old * (log(q_old) - log(q)))


# set by recorded_sg alone, and of this thread alone: an sg of another thread is no part
# of the recording
_sg_visitor: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar(
    "_sg_visitor", default=None
)


@contextmanager
def recorded_sg(values: list[Tensor]) -> Iterator[list[Tensor]]:
    """Record the values of torch's sg inside, or return them again.

    With an empty list, each sg inside appends its value. With a filled list, each sg returns the next recorded value.
    Finite differences need this: they must hold every sg(x) at its first value.

    Args:
        values: an empty list, which is filled, or one that was filled.
    """
    record, queue = not values, iter(values)

    def visit(x: Tensor) -> Tensor:
        """Record the value of one sg, or return the next recorded one."""
        if record:
            values.append(x)
            return x
        return next(queue)

    token = _sg_visitor.set(visit)
    try:
        yield values
    finally:
        _sg_visitor.reset(token)


def sg(x: Any) -> Any:
    """The stop-gradient operator of Eq. 12.

    Args:
        x: a tensor, an array, a number or a sympy expression.

    Returns:
        x itself, as a constant for derivatives.
    """
    match _backend(x):
        case "torch":
            # the compiler reads no ContextVar
            visit = None if torch.compiler.is_compiling() else _sg_visitor.get()
            return x.detach() if visit is None else visit(x.detach())
        case "sympy":
            from upref.symbolic import StopGradient

            return _elementwise_symbolic(StopGradient, x)
    return x


def sum_t(x: Any, mask: Any) -> Any:
    """Σ_t over the unmasked tokens of each response: [B, T] -> [B], for torch in float32 at least.

    Args:
        x: [B, T].
        mask: [B, T], True on response tokens.

    Returns:
        [B].
    """
    inside = where(mask, x, 0)
    if isinstance(x, Tensor):
        return inside.sum(-1, dtype=torch.promote_types(x.dtype, torch.float32))
    return inside.sum(-1)


def mean_t(x: Any, mask: Any) -> Any:
    """(1/|o|) Σ_t over the unmasked tokens of each response: [B, T] -> [B]; 0 for a response with no token.

    Args:
        x: [B, T].
        mask: [B, T], True on response tokens.

    Returns:
        [B].
    """
    return sum_t(x, mask) / maximum(mask.sum(-1), 1)
