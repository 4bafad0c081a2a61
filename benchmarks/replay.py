# SPDX-License-Identifier: Apache-2.0
"""CPU seconds and memory of `upref replay` for a step of a million trained tokens.

python -m benchmarks.replay
"""

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from upref import replay

RESPONSES, LENGTH, GROUP = 1024, 1200, 8
GIB = 2**30


def columns() -> dict[str, Any]:
    """A step of a bfloat16 engine: a gap of about 0.02 nats."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(RESPONSES, LENGTH, generator=generator)
    old = -draw.pow(6) * 8
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (RESPONSES,), generator=generator)
    lengths[: RESPONSES // 2] = LENGTH
    reward = (torch.rand(RESPONSES, generator=generator) < 0.5).double()
    groups = reward.view(-1, GROUP)
    adv = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    noise = torch.randn(RESPONSES, LENGTH, generator=generator)
    return {
        "ids": torch.randint(1, 150_000, (RESPONSES, LENGTH), generator=generator),
        "mask": torch.arange(LENGTH)[None, :] < lengths[:, None],
        "old": old,
        "sampler": (old + 0.02 * noise * (old < -0.01)).clamp(max=0),
        "now": (old + 0.05 * noise.flip(0)).clamp(max=0),
        "adv": adv.flatten(),
        "reward": reward,
        "group": torch.arange(RESPONSES) // GROUP,
    }


def timed(name: str, work: Callable[[], Any]) -> Any:
    """What the work returns; its seconds are printed."""
    start = time.process_time()
    out = work()
    print(f"{name:34} {time.process_time() - start:7.2f} s")
    return out


def main() -> None:
    """Print the seconds of each part of the replay, and the memory of the process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.npz"
        made = replay.make_batch(columns(), file="made", step=1, logged={"loss": 0.01})
        replay.write(file, made)
        batch = timed("read", lambda: replay.read(file))
        print(
            f"{batch.tokens:,} trained tokens, {file.stat().st_size / 2**20:.0f} MiB on the disk, one thread"
        )
        timed("the sampler's gap", lambda: replay.gap(batch))
        timed("advantages", lambda: replay.advantages(batch))
        assert batch.adv is not None
        shaped = replace(batch, adv=batch.adv.clamp(-1, 1))
        timed("advantages that no estimator gives", lambda: replay.advantages(shaped))
        timed("the loss", lambda: replay.loss(batch, "dapo"))
        timed(
            "six objectives",
            lambda: replay.weights(
                batch, ["up_dapo", "grpo", "gspo", "cispo", "tis(dapo)"], ran="dapo"
            ),
        )
        timed(
            "upref replay, from the file on",
            lambda: replay.replay(replay.read_steps([file]), "dapo").text(),
        )
        replay.write(file, shaped)
        timed(
            "the same, where no estimator fits",
            lambda: replay.replay(replay.read_steps([file]), "dapo").text(),
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{'largest memory of the process':34} {peak / GIB:7.2f} GiB")


if __name__ == "__main__":
    main()
