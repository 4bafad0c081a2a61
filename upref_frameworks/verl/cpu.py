# SPDX-License-Identifier: Apache-2.0
"""The platform `cpu` of verl 0.9.1: what verl asks of an accelerator, answered for a
host without one.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
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

nothing = lambda *_, **__: None


def device_module() -> ModuleType:
    """What verl asks of torch.cuda, answered for a CPU: torch.cpu, the host's generator
    and the host's memory.
    """
    module = ModuleType("torch.cpu")
    module.__dict__.update(
        {k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")}
    )
    resident = lambda *_: psutil.Process().memory_info().rss
    memory = lambda *_: (
        psutil.virtual_memory().available,
        psutil.virtual_memory().total,
    )
    module.__dict__.update(
        set_device=nothing,  # torch.cpu's own refuses an index
        current_device=lambda: torch.device("cpu"),
        device_count=lambda: 1,
        get_device_name=lambda *_: "CPU",
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        mem_get_info=memory,
        empty_cache=nothing,
        ipc_collect=nothing,
        set_per_process_memory_fraction=nothing,
        reset_peak_memory_stats=nothing,
        **{
            f"{most}memory_{kind}": resident
            for most in ("", "max_")
            for kind in ("allocated", "reserved")
        },
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """A host without an accelerator. Ray is told of GPUs that are not there
    (`ray_init.num_gpus`): they only count.
    """

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module()

    is_available = lambda self: True
    # a device where CUDA has an index: `.to(0)` would be the first GPU
    current_device = lambda self: torch.device("cpu")
    device_count = lambda self: 1
    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing

    def manual_seed(self, seed: int):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed
    get_device_capability = lambda self, device_index=0: (None, None)
    communication_backend_name = lambda self: "gloo"
    visible_devices_envvar = lambda self: "CUDA_VISIBLE_DEVICES"
    nvtx_range = lambda self, msg: nullcontext()
    ray_resource_name = lambda self: "GPU"
    ray_noset_envvars = lambda self: ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]
    # weights travel to vLLM through shared memory
    is_ipc_supported = lambda self: False


@contextmanager
def on_cpu() -> Iterator[None]:
    """This platform, also where verl resolved another one before: it does so once per
    process, and per module.
    """
    from verl.models.transformers import monkey_patch
    from verl.workers.engine.fsdp import transformer_impl

    platform = get_platform()
    set_platform(PlatformCPU())
    with (
        patch.object(transformer_impl, "device_name", "cpu"),
        patch.object(monkey_patch, "is_trl_available", without_trl),
    ):
        try:
            yield
        finally:
            set_platform(platform)


def once_per_device(init):
    """verl asks for "cpu:gloo,DEVICE:BACKEND", which here names the CPU twice, and
    torch refuses that.
    """

    @functools.wraps(init)
    def wrapped(backend=None, *args, **kwargs):
        if isinstance(backend, str) and "," in backend:
            backend = ",".join(dict.fromkeys(backend.split(",")))
        return init(backend, *args, **kwargs)

    return wrapped


# verl patches TRL's value head wherever TRL is installed; TRL 1.16 has none, and no
# critic trains here
without_trl = lambda: False
verl.utils.import_utils.is_trl_available = without_trl
