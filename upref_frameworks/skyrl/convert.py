# SPDX-License-Identifier: Apache-2.0
"""Write SkyRL's dumps as files of docs/dump.md. Run it in SkyRL's environment.

    python -m upref_frameworks.skyrl.convert dumped_data/*.pkl -o dumps

SkyRL writes `global_step_{N}_training_input.pkl` with trainer.dump_data_batch=true:
https://github.com/NovaSky-AI/SkyRL/blob/a9564572eb8e91076be43c1bd5e4615e3de17265/skyrl/train/trainer.py#L1236
It is a pickle of SkyRL's own class, and a pickle may run code. So SkyRL's own `load`
opens it here, and `upref replay` reads only what this command writes. Convert files of
your own runs alone. **The files hold users' texts, as token ids.**

Columns of a response are as wide as the longest one and end where the sequence ends. A
dump may hold several optimizer steps. SkyRL removes the rewards and the prompts' names
before it dumps; the boundaries between prompts stay.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.replay.batch import make_batch
from upref.replay.files import write
from upref.replay.record import open_folder
from upref.replay.schema import HINT, RecordedBatch
from upref.tensors import describe

COLUMNS = {
    "advantages": "adv",
    "action_log_probs": "old",
    "rollout_logprobs": "sampler",
    "base_action_log_probs": "ref",
}
HINTS = {
    "reward": "SkyRL removes the rewards before it dumps.",
    "now": "SkyRL dumps before the training, so r = 1.",
    "sampler": "SkyRL has it with generator.sampling_params.logprobs set.",
    "ref": "SkyRL computes it with trainer.algorithm.use_kl_loss or use_kl_in_reward.",
    "version": "SkyRL's dump has no such column.",
}
# `upref replay` calls the next three functions on such a file: they say what to do.
SUFFIXES: tuple[str, ...] = (".pkl",)


def recognizes(path: Path) -> bool:
    """Tell whether the file has the name of SkyRL's dump.

    Args:
        path: of a .pkl file.
    """
    return bool(re.fullmatch(r"global_step_\d+_training_input", path.stem))


def step_of(path: Path) -> int | None:
    """Refuse the file: nothing opens a pickle outside of SkyRL's environment.

    Args:
        path: of the file.

    Raises:
        InputError: always, with the command that converts it.
    """
    raise InputError(
        f"{path} is a pickle, which may run code: in SkyRL's environment, convert it with "
        f"`python -m upref_frameworks.skyrl.convert {path.name} -o dumps`, and replay dumps."
    )


def read(path: Path) -> RecordedBatch:
    """Refuse the file, as step_of.

    Args:
        path: of the file.

    Raises:
        InputError: always.
    """
    raise InputError(f"{path} is a pickle of SkyRL: convert it first.")


def to_recorded_batch(
    tensors: Mapping[str, Any], metadata: Mapping[str, Any], file: str
) -> RecordedBatch:
    """Make a recorded batch of SkyRL's TrainingInputBatch.

    Args:
        tensors: its tensors by name: sequences [B, S], the others [B, T], their last slots
            aligned.
        metadata: its metadata.
        file: name for messages; the number in it is the step.

    Returns:
        The batch, without the rows that SkyRL appended to fill up a batch.

    Raises:
        InputError: a tensor is missing or has another shape.
    """
    for name in ("sequences", "loss_mask"):
        if tensors.get(name) is None:
            raise InputError(f"{file} lacks {name}: it is no training input of SkyRL.")
    for name in ("sequences", "loss_mask", *COLUMNS):
        x = tensors.get(name)
        if x is not None and not (isinstance(x, Tensor) and x.ndim == 2):
            raise InputError(
                f"{file}: {name} must be a tensor of two dimensions, got {describe(x)}."
            )
    appended = metadata.get("pad_size") or 0
    rows = len(tensors["sequences"]) - int(appended)
    if rows < 1:
        raise InputError(
            f"{file}: pad_size is {appended}, and it has {len(tensors['sequences'])} rows: none is left."
        )
    width = tensors["loss_mask"].shape[1]
    columns: dict[str, Tensor] = {
        "ids": tensors["sequences"][:rows, -width:],
        "mask": tensors["loss_mask"][:rows] != 0,
    }
    for key, name in COLUMNS.items():
        if tensors.get(key) is not None:
            columns[name] = tensors[key][:rows].double()
    boundaries = metadata.get("policy_prompt_boundaries")
    if boundaries is not None:
        columns["group"] = _groups(boundaries, rows, file)
    found = re.search(r"global_step_(\d+)_", Path(file).name)
    hints = {HINT + name: words for name, words in HINTS.items() if name not in columns}
    return make_batch(
        columns,
        file=file,
        step=int(found[1]) if found else None,
        meta={"framework": "SkyRL"} | hints,
    )


def _groups(boundaries: list[tuple[int, int]], rows: int, file: str) -> Tensor:
    """Return the number of each row's prompt, [rows]. Raise InputError where the
    boundaries leave a row out.
    """
    prompt_numbers = torch.full((rows,), -1)
    for number, (start, end) in enumerate(boundaries):
        prompt_numbers[start:end] = number
    if (prompt_numbers < 0).any():
        raise InputError(
            f"{file}: its prompt boundaries leave out {int((prompt_numbers < 0).sum())} of {rows} responses."
        )
    return prompt_numbers


def main(arguments: list[str] | None = None) -> None:
    """Convert SkyRL's dumps into files of a folder, and print the path of each.

    Args:
        arguments: of the command line; None: those of the process.

    Raises:
        SystemExit: with status 2, where SkyRL is missing, or a file cannot be
            converted.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "files", nargs="+", help="global_step_*_training_input.pkl of your own runs"
    )
    parser.add_argument(
        "-o", "--folder", required=True, help="where the converted files go"
    )
    options = parser.parse_args(arguments)
    try:
        from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    except ImportError as e:
        parser.exit(
            2,
            f"upref: this needs SkyRL ({e}): run it in the environment that trains.\n",
        )
    try:
        folder = open_folder(options.folder)
        for file in options.files:
            tensors = TrainingInputBatch().load(file)
            path = folder / f"{Path(file).stem}.npz"
            write(path, to_recorded_batch(tensors, tensors.metadata or {}, file))
            print(path)
    except (InputError, OSError) as e:
        parser.exit(2, f"upref: {e}\n")


if __name__ == "__main__":
    main()
