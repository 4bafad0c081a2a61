# SPDX-License-Identifier: Apache-2.0
"""A device that a CPU stands in for: tensors on it refuse to meet tensors of the CPU.

PyTorch names the device `meta`: of the devices without kernels here it is the one that
transformers takes. A tensor on it holds a tensor of the CPU, on which each operation
runs. What is copied to the device, or made
there, becomes such a tensor. An operation on tensors of both devices raises the error
of a GPU. A number, a tensor without dimensions, may come from the CPU, as on a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")


class OnDevice(Tensor):
    """A tensor on the stand-in device; `held` is the tensor of the CPU."""

    held: Tensor
    is_meta = False  # it has numbers

    @staticmethod
    def __new__(cls, held: Tensor):
        """Return a tensor without storage that has the shape and strides of the one
        held.
        """
        out = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        out.held = held
        return out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """By it PyTorch knows that a module must exchange such a parameter whole."""
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> "OnDevice":
        return OnDevice(inner["held"])

    def tolist(self) -> Any:
        """The numbers, copied to the CPU."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class MadeOnDevice(TorchFunctionMode):
    """`torch.tensor(x, device=...)` first makes a tensor of the CPU, and moves it: its
    own move is below the dispatch of operations.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Make a tensor with a device on the CPU first, and move it there."""
        its = dict(kwargs or {})
        if func is not torch.tensor or its.get("device") is None:
            return func(*args, **its)
        device = torch.device(its.pop("device"))
        return func(*args, **its).to(device)


class StandIn(TorchDispatchMode):
    """The device, while it is there: what is made or copied to it stays on it.

    Attributes:
        met: the operations in which tensors of both devices met. The check catches such
            errors while it searches for a cause, so a test reads them here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []
        self.made = MadeOnDevice()

    def __enter__(self):
        self.made.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.made.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation by `run`, and note its name in `met` where it gets tensors
        of both devices.
        """
        try:
            return run(func, args, kwargs or {})
        except DevicesMeetError:
            self.met.append(str(func))
            raise


class DevicesMeetError(RuntimeError):
    """An operation got tensors of both devices."""


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation, on the device where a GPU would leave it.

    Raises:
        DevicesMeetError: it got tensors of both devices.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = [x for x in tensors if isinstance(x, OnDevice)]
    here = [x for x in tensors if not isinstance(x, OnDevice) and x.ndim]
    name = func.overloadpacket.__name__
    if there and here and name not in ("copy_", "_to_copy"):
        raise DevicesMeetError(f"expected all tensors on the same device: {func}")

    def held(x: Any) -> Any:
        """Return what the CPU computes with in place of an argument."""
        return x.held if isinstance(x, OnDevice) else x

    its = tree_map(held, kwargs)
    to = its.get("device")
    if to is not None:
        its["device"] = torch.device("cpu")
    out = func(*tree_map(held, args), **its)
    if name == "copy_":
        return args[0]
    if not (there if to is None else to.type == DEVICE.type):
        return out
    moved = tree_map(lambda x: OnDevice(x) if isinstance(x, Tensor) else x, out)
    if to is not None:
        return moved
    return return_and_correct_aliasing(func, args, kwargs, moved)
