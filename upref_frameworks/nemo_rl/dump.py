# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's `train_data_step{N}.jsonl`: one response a line, written by default beside
its logs.

https://github.com/NVIDIA-NeMo/RL/blob/7ea279abfbeb698b092856d0dab61e7cf39bc909/nemo_rl/algorithms/grpo.py#L3651
Each value has a batch axis of one. Log-probabilities stand at the position of their
token; position 0 never trains. With dynamic sampling `rewards` is of all responses and
`filtered_rewards` of those that train. The prompt has no id: responses whose tokens
before the first trained one are equal form a group, as in NeMo-RL itself.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from upref.errors import InputError
from upref.replay.batch import make_batch
from upref.replay.prompts import prompt_number
from upref.replay.schema import PROMPTS_READ, RecordedBatch

SUFFIXES: tuple[str, ...] = (".jsonl",)
KEYS = {
    "token_ids": "ids",
    "advantages": "adv",
    "generation_logprobs": "sampler",
    "prev_logprobs": "old",
}
NEEDED = ("token_ids", "token_loss_mask", "sample_loss_mask")
ABSENT = "NeMo-RL's train_data_step*.jsonl has no such column."
META = {"framework": "NeMo-RL", PROMPTS_READ: "responses with equal prompts"}
HINTS = {
    "old": "NeMo-RL writes zeros with loss_fn.force_on_policy_ratio=true; set it to false.",
    "now": ABSENT,
    "ref": ABSENT,
    "version": ABSENT,
    "sampler": "this file has no generation_logprobs.",
    "reward": "this file has no rewards.",
    "adv": "this file has no advantages.",
}


def recognizes(path: Path) -> bool:
    """Tell whether the first line is a response of NeMo-RL.

    Args:
        path: of a .jsonl file.
    """
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    return all(f'"{key}"' in first for key in NEEDED[1:])


def step_of(path: Path) -> int | None:
    """Return the number after `step` in the name of the file.

    Args:
        path: of the file.

    Returns:
        The optimizer step; None where the name has no number.
    """
    found = re.search(r"step(\d+)", path.stem)
    return int(found[1]) if found else None


def read(path: Path) -> RecordedBatch:
    """Read one file: the responses of one step.

    Args:
        path: of the file.

    Returns:
        The recorded batch. Old log-probabilities that are all 0 are left out.

    Raises:
        InputError: the file is empty, a line lacks a key, or its lists differ in
            length.
    """
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            rows.append(_columns_of_line(json.loads(line), f"{path}, line {number}"))
    if not rows:
        raise InputError(f"{path} is empty: NeMo-RL writes one response a line.")
    shared = set.intersection(*(set(row) for row in rows))
    width = max(len(row["ids"]) for row in rows)
    columns: dict[str, Any] = {}
    for name in sorted(shared):
        values = [row[name] for row in rows]
        if name == "reward":
            columns[name] = np.array(values)
        else:
            padded = [np.pad(value, (0, width - len(value))) for value in values]
            columns[name] = np.stack(padded)
    if "old" in columns and not (columns["old"] * columns["mask"]).any():
        del columns["old"]
    columns["group"] = _groups(columns["ids"], columns["mask"])
    return make_batch(
        columns, file=str(path), step=step_of(path), meta=META, hints=HINTS
    )


def _columns_of_line(line: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the columns of one response by upref's names: arrays [T], and `reward`, a
    number. Raise InputError for a line that lacks a key or whose lists differ in
    length.
    """
    if not isinstance(line, dict):
        raise InputError(
            f"{where} is no JSON object: NeMo-RL writes one response a line."
        )
    for key in NEEDED:
        if key not in line:
            raise InputError(
                f"{where} lacks {key}: NeMo-RL writes it into each line; was the file altered?"
            )
    ids = np.array(_without_batch_axis(line["token_ids"]), dtype=np.int64)
    token_mask = np.array(_without_batch_axis(line["token_loss_mask"]))
    sample_mask = np.array(_without_batch_axis(line["sample_loss_mask"]))
    columns: dict[str, Any] = {"ids": ids, "mask": token_mask * sample_mask != 0}
    for key, name in KEYS.items():
        if key in line and name != "ids":
            value = np.array(_without_batch_axis(line[key]), dtype=np.float64)
            if value.ndim == 0 or len(value) == 1:
                columns[name] = np.broadcast_to(value, ids.shape)
            else:
                columns[name] = value
    for name, value in columns.items():
        if value.shape != ids.shape:
            raise InputError(
                f"{where}: {name} has shape {value.shape}, token_ids {ids.shape}; was the file altered?"
            )
    columns["mask"][0] = False  # position 0 never trains
    # the second, where it is there, is of the responses that train
    for key in ("rewards", "filtered_rewards"):
        if key in line:
            rewards = np.array(_without_batch_axis(line[key])).reshape(-1)
            columns["reward"] = float(rewards[0])
    return columns


def _without_batch_axis(value: Any) -> Any:
    """Return a value without its batch axis of one: [x], or [[x, y, ...]]."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _groups(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return a number for each row's prompt, [N]: equal where the tokens before the
    first trained one are. Of a row without a trained token all tokens count.
    """
    start = np.where(mask.any(1), mask.argmax(1), ids.shape[1])
    return np.array([prompt_number(row[:n]) for row, n in zip(ids, start, strict=True)])
