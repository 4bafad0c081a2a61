# SPDX-License-Identifier: Apache-2.0
"""The platform `cpu` of verl 0.9.1: what verl asks of an accelerator, answered for a
host without one.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed
import verl.utils.import_utils
from verl.plugin.platform import (
    PlatformBase,
    PlatformRegistry,
    get_platform,
    set_platform,
)

from upref.errors import importing


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, where a CPU has nothing to do."""


def _resident(*_: Any, **__: Any) -> int:
    """Return the bytes of memory that this process holds."""
    return psutil.Process().memory_info().rss


def _memory(*_: Any, **__: Any) -> tuple[int, int]:
    """Return the host's bytes of memory, available and in all."""
    return (
        psutil.virtual_memory().available,
        psutil.virtual_memory().total,
    )


def device_module() -> ModuleType:
    """Make the module that verl uses in place of torch.cuda on a CPU.

    Returns:
        torch.cpu, with one device, the CPU. Its random state is torch's, its free memory
        the host's, and each count of used memory, the largest too, is what this process
        holds now.
    """
    module = ModuleType("torch.cpu")
    for name, value in vars(torch.cpu).items():
        if not name.startswith("__"):
            setattr(module, name, value)
    module.__dict__.update(
        set_device=do_nothing,
        current_device=lambda: torch.device("cpu"),
        device_count=lambda: 1,
        get_device_name=lambda *_, **__: "CPU",
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda new_state, *_, **__: torch.set_rng_state(new_state),
        mem_get_info=_memory,
        empty_cache=do_nothing,
        ipc_collect=do_nothing,
        set_per_process_memory_fraction=do_nothing,
        reset_peak_memory_stats=do_nothing,
        memory_allocated=_resident,
        memory_reserved=_resident,
        max_memory_allocated=_resident,
        max_memory_reserved=_resident,
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]  # verl is untyped here
    """A host without an accelerator; its methods implement verl's PlatformBase.

    Ray gets a number of GPUs that do not exist (`ray_init.num_gpus`): they are only
    counted.
    """

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module()

    def is_available(self) -> bool:
        """Return True: there is always a CPU."""
        return True

    def current_device(self) -> torch.device:
        """Return a device where CUDA has an index: `.to(0)` would be the first GPU."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """Return the number of devices, one."""
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = do_nothing
    profiler_start = profiler_stop = cudart = do_nothing

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generator of the host, the only one here."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """Return that a CPU has no compute capability."""
        return (None, None)

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed that runs on CPUs."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable that verl sets for its workers."""
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        """Return a context that does nothing, since nothing is profiled."""
        return nullcontext()

    def ray_resource_name(self) -> str:
        """Return Ray's name of the devices that `ray_init.num_gpus` counts."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return the variable that keeps Ray from setting the visible devices."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """Return False: weights travel to vLLM through shared memory."""
        return False


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make this platform verl's, also where verl resolved another one before.

    verl resolves the platform once per process, and its device name once per module;
    inside, all of them are replaced.

    Raises:
        NotInstalled: verl's engine, or what it imports, is missing.
    """
    with importing("verl"):
        from verl.models.transformers import monkey_patch
        from verl.workers.engine.fsdp import transformer_impl

    platform = get_platform()
    set_platform(PlatformCPU())
    with (
        patch.object(transformer_impl, "device_name", "cpu"),
        patch.object(monkey_patch, "is_trl_available", is_trl_available),
    ):
        try:
            yield
        finally:
            set_platform(platform)


def name_devices_once(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap torch's init_process_group so that it accepts verl's backend on a CPU.

    verl passes "cpu:gloo,DEVICE:BACKEND", which here names the CPU twice, and torch
    refuses that.

    Args:
        init: torch.distributed.init_process_group.

    Returns:
        A function of the same arguments, which drops the repeated part.
    """

    @functools.wraps(init)
    def wrapped(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(backend, str) and "," in backend:
            backend = ",".join(dict.fromkeys(backend.split(",")))
        init(backend, *args, **kwargs)

    return wrapped


# verl patches TRL's value head wherever TRL is installed; TRL 1.16 has none, and no
# critic trains here
def is_trl_available() -> bool:
    """Return False, in place of verl's function of that name."""
    return False


verl.utils.import_utils.is_trl_available = is_trl_available
