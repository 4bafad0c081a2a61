# SPDX-License-Identifier: Apache-2.0
"""Two ranks of Megatron as processes of this machine, on a CPU."""

import tempfile
import warnings
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import distributed as dist, multiprocessing
from torch.overrides import TorchFunctionMode

WORLD = 2


class OnCpu(TorchFunctionMode):
    """Megatron's schedules make their counters on the device `cuda`."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Call the function with "cpu" in place of a CUDA device."""
        named = dict(named or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*arguments, **named)


def join_group(rank: int, store: str) -> None:
    """Make this process a rank of the group that meets at `store`, in one thread."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)


def measure(
    rank_errors: Callable[[int, str, MutableMapping[str, float]], None],
    deadline: float = 300.0,
) -> dict[str, float]:
    """Run the ranks, and return the relative error of the gradient for each way.

    Args:
        rank_errors: What a rank does. It gets its number, the address of the group's
            store, and the errors; the first rank writes them.
        deadline: Seconds to wait until the next rank ends.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Manager() as manager,
    ):
        errors = manager.dict()
        arguments = (f"file://{folder}/group", errors)
        context = multiprocessing.spawn(rank_errors, arguments, WORLD, join=False)
        try:
            for _ in range(WORLD):
                if context.join(timeout=deadline):  # it waits for one of them alone
                    break
            return dict(errors)
        finally:
            for process in context.processes:
                process.kill()
