# SPDX-License-Identifier: Apache-2.0
"""Functions that another array library computes and differentiates: JAX and MLX.

`from_jax` and `from_mlx` make a function of arrays a function of tensors, whose gradient
is the library's own: that of `jax.vjp` or `mlx.core.vjp`. Neither library is a
dependency: it is imported where its function is called.
"""

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError, importing

COPIED = "its arrays are copies of the tensors"
# the oracles of a loss that a function of arrays gives nothing to look at
NOT_EXERCISED = {
    "in-training": "the library differentiates by the inputs that its caller names",
    "layout": COPIED,
    "mutation": COPIED,
    "every-value": "upref reads no formula from another library's function",
}
# a check compiles for many shapes, and calls for each a few times
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}
RUNS_ONCE = "what its Python does beside arrays (jax.jit runs it once for each shape)"


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor among the arguments: its place among all tensors."""

    index: int


class ArrayFunction:
    """A function of arrays as a function of tensors.

    Attributes:
        fn: the function of arrays.
        float32: it gets arrays of float32 in place of float64.
    """

    library: ClassVar[str]

    def __init__(self, fn: Callable[..., Any], float32: bool) -> None:
        """Refuse what is not callable; keep the name and the signature of the function,
        from which upref reads its roles.
        """
        if not callable(fn):
            raise InputError(
                f"a function of {self.library}'s arrays is expected, got {repr(fn)[:60]}."
            )
        if not isinstance(float32, bool):
            raise InputError(f"float32 is True or False, got {repr(float32)[:60]}.")
        self.fn = fn
        self.float32 = float32
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with arrays in place of tensors, and return its answer as
        tensors. The value, or the loss in a tuple or dict, has the gradient that the
        library computes.
        """
        tensors: list[Tensor] = []

        def slot(x: Any) -> Any:
            """Put a tensor aside; return any other value as it is."""
            if not isinstance(x, Tensor):
                return x
            tensors.append(x)
            return Slot(len(tensors) - 1)

        arguments = _mapped((args, kwargs), slot)
        for watcher in _watchers:
            watcher.append(self)
        with self._set_up():
            arrays = [self._array(x.detach()) for x in tensors]
            needed = _needed(tensors)
            raw, gradients = self._call(arguments, arrays, needed)
            answer = _mapped(raw, self._tensor)
            if gradients is not None:
                gradients = [self._tensor(x) for x in gradients]
        key = _key_of_loss(answer)
        value = answer if key is None else answer[key]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return answer

        def pull(upstream: Tensor) -> list[Tensor]:
            """Return the gradients by the tensors that require one."""
            if gradients is not None:
                return [upstream * x for x in gradients]
            with self._set_up():
                found = self._pull(arguments, arrays, needed, self._array(upstream))
                return [self._tensor(x) for x in found]

        value = _Pulled.apply(value, pull, *tensors)
        if key is None:
            return value
        if key == 0:
            return (value, *answer[1:])
        return answer | {key: value}

    @property
    def is_slow(self) -> bool:
        """Whether each operation costs time on each new shape."""
        return False

    def not_checked(self) -> list[str]:
        """Return what a verdict says nothing about, in words."""
        return []

    def _array(self, x: Tensor) -> Any:
        """Return a copy of a tensor as an array."""
        if self.float32 and x.dtype is torch.float64:
            x = x.float()
        name = str(x.dtype).removeprefix("torch.")
        # numpy has no bfloat16
        numbers = (x.float() if x.dtype is torch.bfloat16 else x).numpy()
        return self._from_numpy(numbers, name)

    def _tensor(self, x: Any) -> Any:
        """Return a copy of an array as a tensor, and any other value as it is."""
        if not self._is_array(x):
            return x
        if "bfloat16" in str(x.dtype):
            return torch.from_numpy(np.array(self._as_float32(x))).bfloat16()
        return torch.from_numpy(np.array(x))

    # ---- what each library does ------------------------------------------------------
    def _set_up(self) -> contextlib.AbstractContextManager[Any]:
        """Compute on the CPU inside, in float64 unless float32 is asked for."""
        raise NotImplementedError

    def _is_array(self, x: Any) -> bool:
        """Return whether a value is an array of the library."""
        raise NotImplementedError

    def _from_numpy(self, numbers: Any, dtype: str) -> Any:
        """Return a copy as an array of the dtype of this name."""
        raise NotImplementedError

    def _as_float32(self, x: Any) -> Any:
        """Return an array in float32."""
        raise NotImplementedError

    def _call(
        self, arguments: Any, arrays: list[Any], needed: tuple[int, ...]
    ) -> tuple[Any, Any]:
        """Call the function of arrays.

        Returns:
            Its answer, and the gradients of its loss by the needed arrays where they
            were computed together with it; else None.
        """
        raise NotImplementedError

    def _pull(
        self, arguments: Any, arrays: list[Any], needed: tuple[int, ...], upstream: Any
    ) -> Any:
        """Return the gradients by the needed arrays."""
        raise NotImplementedError


class JaxFunction(ArrayFunction):
    """A function of JAX, compiled by `jax.jit` where this can trace it.

    Attributes:
        is_compiled: so far jax.jit could.
    """

    library = "JAX"

    def __init__(self, fn: Callable[..., Any], float32: bool) -> None:
        super().__init__(fn, float32)
        self.is_compiled = True
        # for each set of arguments that are no arrays, as jax.jit knows arrays alone
        self._compiled: dict[Any, Callable[..., Any]] = {}

    @property
    def is_slow(self) -> bool:
        """Whether each operation costs time on each new shape."""
        return not self.is_compiled

    def not_checked(self) -> list[str]:
        """Return what a verdict says nothing about, in words."""
        return [RUNS_ONCE] if self.is_compiled else []

    @contextlib.contextmanager
    def _set_up(self) -> Iterator[None]:
        jax = _imported("jax", "jax")
        with (
            jax.enable_x64(not self.float32),
            jax.default_device(jax.local_devices(backend="cpu")[0]),
        ):
            yield

    def _is_array(self, x: Any) -> bool:
        return isinstance(x, import_module("jax").Array)

    def _from_numpy(self, numbers: Any, dtype: str) -> Any:
        return import_module("jax.numpy").array(numbers, dtype=dtype)

    def _as_float32(self, x: Any) -> Any:
        return x.astype("float32")

    def _call(
        self, arguments: Any, arrays: list[Any], needed: tuple[int, ...]
    ) -> tuple[Any, Any]:
        """Return the answer, and the gradients of a scalar by the needed arrays. They
        are None for any other answer, and where no array needs one.
        """
        jax = import_module("jax")

        def forward(arrays: list[Any]) -> tuple[Any, Any]:
            """Return what the function answers, and the gradients of a scalar."""

            def loss_by(*moved: Any) -> tuple[Any, Any]:
                """Return the loss as a function of the needed arrays, and the answer."""
                answer = _filled(self.fn, arguments, _with(arrays, needed, moved))
                return _loss_in(answer), answer

            if not needed:
                return _filled(self.fn, arguments, arrays), None
            loss, pull, answer = jax.vjp(
                loss_by, *(arrays[i] for i in needed), has_aux=True
            )
            is_scalar = getattr(loss, "shape", None) == ()
            if not is_scalar:
                return answer, None
            return answer, pull(jax.numpy.ones_like(loss))

        return self._run(("forward", needed, _key(arguments)), forward, arrays)

    def _pull(
        self, arguments: Any, arrays: list[Any], needed: tuple[int, ...], upstream: Any
    ) -> Any:
        """Return the gradients by the needed arrays of the value times `upstream`, by
        one more forward pass.
        """
        vjp = import_module("jax").vjp

        def backward(arrays: list[Any], upstream: Any) -> Any:
            """Return the gradients by the needed arrays."""

            def loss_by(*moved: Any) -> Any:
                """Return the loss as a function of the needed arrays."""
                return _loss_in(
                    _filled(self.fn, arguments, _with(arrays, needed, moved))
                )

            return vjp(loss_by, *(arrays[i] for i in needed))[1](upstream)

        return self._run(
            ("backward", needed, _key(arguments)), backward, arrays, upstream
        )

    def _run(self, key: Any, function: Callable[..., Any], *arrays: Any) -> Any:
        """Run a function of arrays, compiled if it can be. The first failure of a compiled
        one that runs as it is ends the compilation for this JaxFunction.

        Args:
            key: under which the compiled function is kept; two calls with one key have the
                same arguments beside their arrays.
            function: the function.
            *arrays: its arguments.
        """
        if not self.is_compiled:
            return function(*arrays)
        try:
            compiled = self._compiled.get(key)
        except TypeError:  # an argument that has no hash
            key, compiled = id(function), None
        if compiled is None:
            compiled = self._compiled[key] = import_module("jax").jit(
                function, compiler_options=COMPILER_OPTIONS
            )
        try:
            return compiled(*arrays)
        except Exception:
            # what it raises by itself counts
            answer = function(*arrays)
            self.is_compiled = False
            return answer


class MlxFunction(ArrayFunction):
    """A function of MLX."""

    library = "MLX"

    @contextlib.contextmanager
    def _set_up(self) -> Iterator[None]:
        # on Linux, mlx alone has no library that computes
        install = "mlx[cpu]" if sys.platform == "linux" else "mlx"
        mx = _imported("mlx.core", install)
        with mx.stream(mx.cpu):
            yield

    def _is_array(self, x: Any) -> bool:
        return isinstance(x, import_module("mlx.core").array)

    def _from_numpy(self, numbers: Any, dtype: str) -> Any:
        mx = import_module("mlx.core")
        return mx.array(
            numbers, dtype=mx.bool_ if dtype == "bool" else getattr(mx, dtype)
        )

    def _as_float32(self, x: Any) -> Any:
        return x.astype(import_module("mlx.core").float32)

    def _call(
        self, arguments: Any, arrays: list[Any], needed: tuple[int, ...]
    ) -> tuple[Any, Any]:
        return _filled(self.fn, arguments, arrays), None

    def _pull(
        self, arguments: Any, arrays: list[Any], needed: tuple[int, ...], upstream: Any
    ) -> Any:
        """Return the gradients by the needed arrays of the value times `upstream`."""

        def loss_by(*moved: Any) -> Any:
            """Return the loss as a function of the needed arrays."""
            return _loss_in(_filled(self.fn, arguments, _with(arrays, needed, moved)))

        mx = import_module("mlx.core")
        return mx.vjp(loss_by, [arrays[i] for i in needed], [upstream])[1]


def from_jax(fn: Callable[..., Any], *, float32: bool = False) -> JaxFunction:
    """Make a function of JAX one that upref can check: `loss = upref.from_jax(my_loss)`.

    Its gradient is that of `jax.vjp`, on the CPU. It is compiled by `jax.jit` once for
    each shape, and runs as it is where jax.jit cannot trace it.

    Args:
        fn: a function of jax arrays, compiled or not, with the arguments that
            `upref.check` knows. Where it returns a tuple or a dict, the first element or
            the entry `loss` has the gradient.
        float32: it gets float32 arrays in place of float64 ones.

    Returns:
        A function of torch tensors with the same arguments.
    """
    return JaxFunction(fn, float32)


def from_mlx(fn: Callable[..., Any]) -> MlxFunction:
    """Make a function of MLX one that upref can check: `loss = upref.from_mlx(my_loss)`.

    Its gradient is that of `mlx.core.vjp`, on the CPU, in float32: MLX rounds Python's
    numbers to float32 beside arrays of float64 too.

    Args:
        fn: a function of mlx arrays, with the arguments that `upref.check` knows. Where
            it returns a tuple or a dict, the first element or the entry `loss` has the
            gradient.

    Returns:
        A function of torch tensors with the same arguments.
    """
    return MlxFunction(fn, float32=True)


class _Pulled(torch.autograd.Function):
    """Gives a value the gradients that another library computes.

    It is applied to the value, what returns the gradients by the tensors that require
    one from that by the value, and all tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        pull: Callable[[Tensor], list[Tensor]],
        *tensors: Tensor,
    ) -> Tensor:
        """Return a copy of the value, and keep for `backward` which tensors need a
        gradient.
        """
        ctx.pull = pull
        ctx.needed = _needed(tensors)
        ctx.dtypes = [x.dtype for x in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        gradients: list[Any] = [None] * len(ctx.dtypes)
        for i, gradient in zip(ctx.needed, ctx.pull(upstream), strict=True):
            gradients[i] = gradient.to(ctx.dtypes[i])
        return None, None, *gradients


def _needed(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the places of the tensors that require a gradient."""
    return tuple(i for i, x in enumerate(tensors) if x.requires_grad)


# ---- which functions were called -----------------------------------------------------
_watchers: list[list[ArrayFunction]] = []


@contextlib.contextmanager
def watched() -> Iterator[list[ArrayFunction]]:
    """Yield a list to which each ArrayFunction that is called inside is added."""
    called: list[ArrayFunction] = []
    _watchers.append(called)
    try:
        yield called
    finally:
        _watchers.pop()


# which module's arrays -> what makes a function of them one of tensors
WRAPPERS = {"jax": "from_jax", "jaxlib": "from_jax", "mlx": "from_mlx"}


def advice_on_array(x: Any) -> str:
    """Say how to check a function that returned an array of another library; "" for any
    other value.

    Args:
        x: what it returned.
    """
    wrapper = WRAPPERS.get(type(x).__module__.partition(".")[0])
    return (
        f"check `upref.{wrapper}(f)`, whose gradient is the library's"
        if wrapper
        else ""
    )


def advice_on_error(error: BaseException) -> str:
    """Say how to check a function that handed torch tensors to another library; "" for
    any other error.

    Args:
        error: what it raised.
    """
    if not isinstance(error, TypeError):
        return ""
    try:
        message = str(error)
    except Exception:  # of a user's class
        return ""
    if "torch" not in message:
        return ""
    packages = set()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        packages.add(str(frame.f_globals.get("__name__")).partition(".")[0])
        # JAX leaves its own frames out
        packages |= {
            value.__name__.partition(".")[0]
            for value in frame.f_globals.values()
            if isinstance(value, ModuleType)
        }
    if "mlx.core" in message:
        packages.add("mlx")
    wrapper = next((WRAPPERS[name] for name in WRAPPERS if name in packages), "")
    return (
        f"; it was called with torch tensors: check upref.{wrapper}(f)"
        if wrapper
        else ""
    )


# ---- arguments and answers -----------------------------------------------------------
def _imported(module: str, install: str) -> Any:
    """Import a library, or say in one sentence that it is not installed."""
    with importing(install):
        return import_module(module)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return dicts, tuples and lists of the same structure, with every value within them
    changed.
    """
    if isinstance(tree, dict):
        return {key: _mapped(x, change) for key, x in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(x, change) for x in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_mapped(x, change) for x in tree)
    return change(tree)


def _filled(fn: Callable[..., Any], arguments: Any, arrays: list[Any]) -> Any:
    """Call a function with the arrays in place of the Slots."""

    def fill(x: Any) -> Any:
        """Return the array of a Slot, and any other value as it is."""
        return arrays[x.index] if isinstance(x, Slot) else x

    args, kwargs = _mapped(arguments, fill)
    return fn(*args, **kwargs)


def _with(arrays: list[Any], places: tuple[int, ...], moved: Any) -> list[Any]:
    """Return the arrays with others at these places."""
    others = dict(zip(places, moved, strict=True))
    return [others.get(i, x) for i, x in enumerate(arrays)]


def _key(tree: Any) -> Any:
    """Return what tells arguments without their arrays from others, by types too: 1 is
    not True.
    """
    if isinstance(tree, dict):
        return tuple((name, _key(x)) for name, x in tree.items())
    if isinstance(tree, tuple | list):
        return (type(tree), *map(_key, tree))
    return type(tree), tree


def _key_of_loss(answer: Any) -> Any:
    """Return where the loss is in an answer: 0, "loss", or None where it is all."""
    if isinstance(answer, dict) and "loss" in answer:
        return "loss"
    return 0 if isinstance(answer, tuple | list) and answer else None


def _loss_in(answer: Any) -> Any:
    """Return the loss alone."""
    key = _key_of_loss(answer)
    return answer if key is None else answer[key]
