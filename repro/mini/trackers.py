# SPDX-License-Identifier: Apache-2.0
"""The numbers of steps.jsonl to a tracker as well, by flag; neither is needed to train."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from repro.mini.settings import Settings
from upref.errors import InputError


def tracker(name: str, s: Settings, out: Path) -> Callable[[int, dict], None]:
    """`log(step, numbers)` for "tensorboard" or "wandb" (offline until `wandb sync`). InputError if not installed."""
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(out / "tensorboard")
            return lambda step, numbers: [writer.add_scalar(k, v, step) for k, v in scalars(numbers).items()]
        import wandb
    except ImportError as e:
        raise InputError(f"--{name} needs the package {name}, which is not installed: pip install {name}.") from e
    os.environ.setdefault("WANDB_MODE", "offline")
    run = wandb.init(project="upref-mini", name=s.key, config=asdict(s), dir=str(out))
    return lambda step, numbers: run.log(scalars(numbers), step=step)


def scalars(numbers: dict) -> dict[str, float]:
    return {k: v for k, v in numbers.items() if isinstance(v, int | float) and k != "step"}
