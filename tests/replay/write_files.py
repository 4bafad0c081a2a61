# SPDX-License-Identifier: Apache-2.0
"""Make the files of prime-rl and SkyRL in tests/replay/files with their own code.

    python -m tests.replay.write_files PRIME_RL SKYRL

The arguments are checkouts at the commits of files/written_by.json. Only what writes a
batch is imported from them: modules that these import for other work are replaced by
empty ones. SkyRL's pickle stays outside of the repository; its converter's file and the
numbers that went in are kept.
"""

import asyncio
import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.replay.simulator import FAULTS, PROMPT, World

HERE = Path(__file__).parent / "files"
WORLD = World("qwen3", 61, responses=16, length=12)


def stand_in(name: str, **names: Any) -> None:
    """Let a module of this name be imported that has these names."""
    module = ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module


def columns() -> dict[str, torch.Tensor]:
    """Return the columns of one step of the simulator, in float32."""
    out = FAULTS["healthy_bfloat16"](WORLD)
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in out.items()
    }


def prime_rl(checkout: Path, target: Path) -> None:
    """Write two ranks of two micro-batches each, by prime-rl's packing and its
    filesystem sender.
    """
    sys.path.insert(0, str(checkout / "src"))
    logger = SimpleNamespace(debug=print, info=print, warning=print)
    stand_in("prime_rl.utils.logger", get_logger=lambda: logger)
    stand_in("prime_rl.configs.shared", TransportConfig=object)
    stand_in(
        "prime_rl.transports.rollouts.zmq",
        ZMQMicroBatchReceiver=object,
        ZMQMicroBatchSender=object,
    )
    batching = importlib.import_module("prime_rl.trainer.batch")
    rollouts = importlib.import_module("prime_rl.transports.rollouts")
    held = columns()
    samples = []
    for row in range(WORLD.responses):
        size = int(held["mask"][row].nonzero().max()) + 1
        samples.append(
            rollouts.TrainingSample(
                token_ids=held["ids"][row, :size].tolist(),
                mask=held["mask"][row, :size].tolist(),
                logprobs=held["sampler"][row, :size].tolist(),
                temperatures=[1.0] * size,
                env_name="count",
                advantages=held["adv"][row, :size].tolist(),
            )
        )
    cost = batching.build_bin_cost(None)
    grid = batching.prepare_batch(samples, 64, 2, cost, pad_to_multiple_of=8)
    with tempfile.TemporaryDirectory() as folder:
        sender = rollouts.FileSystemMicroBatchSender(Path(folder), 2, current_step=7)
        asyncio.run(sender.send(grid))
        for rank in range(2):
            written = Path(folder) / f"rollouts/step_7/rank_{rank}.bin"
            (target / "step_7").mkdir(exist_ok=True)
            (target / "step_7" / written.name).write_bytes(written.read_bytes())


def skyrl(checkout: Path, target: Path) -> None:
    """Dump a training input by SkyRL's own classes; convert it; keep the converted
    file.
    """
    sys.path.insert(0, str(checkout))
    for name in (
        "skyrl",
        "skyrl.backends",
        "skyrl.backends.skyrl_train",
        "skyrl.backends.skyrl_train.utils",
    ):
        stand_in(name, __path__=[str(checkout / name.replace(".", "/"))])
    stand_in(
        "skyrl.backends.skyrl_train.utils.replay_utils",
        make_replay_padding_indices=None,
    )
    batches = importlib.import_module("skyrl.backends.skyrl_train.training_batch")
    from upref_frameworks.skyrl import convert

    held = columns()
    longest = WORLD.length
    lengths = held["mask"].sum(1).tolist()
    wide = {
        name: torch.zeros(WORLD.responses, longest)
        for name in ("adv", "old", "sampler", "mask")
    }
    sequences = torch.zeros(WORLD.responses, PROMPT + longest, dtype=torch.long)
    for row, n in enumerate(lengths):  # SkyRL pads on the left
        sequences[row, longest - n :] = held["ids"][row, : PROMPT + n]
        for name, column in wide.items():
            column[row, longest - n :] = held[name][row, PROMPT : PROMPT + n].float()
    batch = batches.TrainingInputBatch(
        {
            "sequences": sequences,
            "loss_mask": wide["mask"],
            "response_mask": wide["mask"].long(),
            "advantages": wide["adv"],
            "action_log_probs": wide["old"],
            "rollout_logprobs": wide["sampler"],
            "base_action_log_probs": None,
        }
    )
    starts = range(0, WORLD.responses, WORLD.group)
    batch.metadata = {
        "policy_prompt_boundaries": [(start, start + WORLD.group) for start in starts]
    }
    with tempfile.TemporaryDirectory() as folder:
        batch.save(str(Path(folder) / "global_step_7_training_input.pkl"))
        convert.main(
            [str(Path(folder) / "global_step_7_training_input.pkl"), "-o", folder]
        )
        (target / "global_step_7_training_input.npz").write_bytes(
            (Path(folder) / "global_step_7_training_input.npz").read_bytes()
        )
    np.savez(
        target / "skyrl_expected.npz",
        **{name: column.numpy() for name, column in wide.items()},
    )


def main(prime_rl_checkout: str, skyrl_checkout: str) -> None:
    """Write all of them."""
    torch.set_num_threads(1)
    prime_rl(Path(prime_rl_checkout), HERE)
    skyrl(Path(skyrl_checkout), HERE)


if __name__ == "__main__":
    main(*sys.argv[1:])
