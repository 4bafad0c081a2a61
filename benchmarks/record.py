# SPDX-License-Identifier: Apache-2.0
"""What recording costs a run of TRL's trainer: seconds in the hooks beside those of the
steps, on a CPU.

python -m benchmarks.record
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from upref import replay
from upref.replay.record import EVERY
from upref.step.inputs.families import tiny
from upref.step.inputs.rows import Row
from upref_frameworks.trl import record, step

STEPS, RESPONSES, PROMPT, LENGTH = 4, 16, 64, 512
SIZE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}


def rows() -> list[Row]:
    """A generation batch of RESPONSES responses of LENGTH tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int) -> list[int]:
        """Random token ids of the tiny model, without its special ones."""
        return torch.randint(3, 96, (tokens,), generator=generator).tolist()

    return [
        Row(
            prompt=draw(PROMPT),
            response=draw(LENGTH),
            trains=[True] * LENGTH,
            adv=float(i % 4),
            old=None,
            group=i // 4,
        )
        for i in range(RESPONSES)
    ]


class Clock:
    """A callable that adds up the seconds that its calls take."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work
        self.seconds = 0.0

    def __call__(self, *args: Any, **kw: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.work(*args, **kw)
        finally:
            self.seconds += time.perf_counter() - start


def measure(every: int) -> tuple[float, float, int]:
    """Train with a recorder.

    Args:
        every: number of optimizer steps between two that are recorded.

    Returns:
        Seconds of a step, seconds of it in the hooks, and bytes of the largest file.
    """
    import trl

    with tempfile.TemporaryDirectory() as folder:

        class Recorded(trl.GRPOTrainer):  # type: ignore[misc]
            def __init__(self, *args: Any, **kw: Any) -> None:
                super().__init__(*args, **kw)
                replay.record(self, folder, every=every)
                self.clock = Clock(self.training_step)
                self.training_step = self.clock

        keeps = Clock(record.Hooks._tried)  # noqa: SLF001
        writes = Clock(record.finish)

        def keep(recorder: record.Hooks, work: Callable[[], None]) -> None:
            """The recorder's own method, by the clock."""
            keeps(recorder, work)

        with (
            patch.object(record.Hooks, "_tried", keep),
            patch.object(record, "finish", writes),
        ):
            fields = {"max_completion_length": LENGTH, "per_device_train_batch_size": 4}
            _, trainer = step.record_training(
                tiny("qwen3", **SIZE), fields, rows(), STEPS, Recorded
            )
        sizes = [file.stat().st_size for file in Path(folder).glob("*.npz")]
    return (
        trainer.clock.seconds / STEPS,
        (keeps.seconds + writes.seconds) / STEPS,
        max(sizes),
    )


def main() -> None:
    """Print what recording costs a step, and the disk."""
    os.environ["CI"] = "1"  # TRL's telemetry is silent there
    logging.getLogger("upref").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seconds, of_hooks, size = measure(1)
    tokens = RESPONSES * LENGTH // 2
    width, layers = SIZE["hidden_size"], SIZE["num_hidden_layers"]
    print(f"a step of {tokens:,} tokens, {width} wide, {layers} layers, one thread")
    print(f"{'a step':34} {seconds:8.3f} s")
    print(
        f"{'of which recording it':34} {of_hooks:8.3f} s, {size / 2**20:.2f} MiB on the disk"
    )
    share = of_hooks / EVERY / (seconds - of_hooks)
    print(f"{f'recorded each {EVERY}th step':34} {share:8.3%} of a step")
    print(f"{'1 % where a step takes':34} {100 * of_hooks / EVERY:8.3f} s")


if __name__ == "__main__":
    main()
