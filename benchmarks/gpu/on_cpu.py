# SPDX-License-Identifier: Apache-2.0
"""A trial of benchmarks.gpu.training without a GPU: the same path, small, on the CPU."""

from typing import Any

import trl

from repro.with_trl import train


class OnCpu(trl.GRPOConfig):
    """What train.py asks for, on the CPU."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named | {"use_cpu": True})


def prepare() -> None:
    """Change repro.with_trl.train in this process: small sizes, no check for a GPU, a
    pretended GPU of 80 GB, and training on the CPU.
    """
    sizes: Any = train
    sizes.check = lambda args: None
    sizes.gpu_bytes = lambda: 80e9
    sizes.RESPONSES, sizes.LONGEST = 64, 12
    train.BATCH["max_completion_length"] = 12
    train.BATCH["learning_rate"] = 1e-2
    of_trl: Any = trl
    of_trl.GRPOConfig = OnCpu
