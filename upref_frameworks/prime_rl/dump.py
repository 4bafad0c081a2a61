# SPDX-License-Identifier: Apache-2.0
"""prime-rl's `rollouts/step_{N}/rank_{R}.bin`, which its filesystem transport leaves on
the disk.

https://github.com/PrimeIntellect-ai/prime-rl/blob/559b44772e471d1538537b8805cc77f3824a5e64/src/prime_rl/transports/rollouts/types.py
A file is msgpack: a list of micro-batches, each a list of the fields of `MicroBatch` in
their order, where fields that have their default may be missing at the end. A
micro-batch packs several samples, whose lengths are `seq_lens`; padding that does not
train counts as the end of the last. The trainer's log-probabilities are not there:
prime-rl's loss takes the engine's as π_old. The rewards are those of the traces beside
the file, where prime-rl wrote them.
"""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from upref.errors import InputError
from upref.replay.batch import make_batch
from upref.replay.prompts import prompt_number
from upref.replay.schema import PROMPTS_READ, RecordedBatch
from upref_frameworks.prime_rl.traces import PATH, find_reward, read_branches

SUFFIXES: tuple[str, ...] = (".bin",)
FIELDS = (
    "input_ids",
    "loss_mask",
    "advantages",
    "inference_logprobs",
    "position_ids",
    "sequence_lengths",
    "temperatures",
    "env_names",
    "seq_lens",
    "ref_logprobs",
    "routed_experts",
    "mm_kwargs",
    "mm_token_type_ids",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
)
NEEDED = 9  # of the fields have no default
COLUMNS = {
    "input_ids": "ids",
    "advantages": "adv",
    "inference_logprobs": "sampler",
    "ref_logprobs": "ref",
    "rl_weights": "correction",
}
ABSENT = "prime-rl's rollout files have no such column."
META = {"framework": "prime-rl", PROMPTS_READ: "samples with equal prompts"}
HINTS = {
    "old": "prime-rl's rollout files have no log-probability of the trainer: its loss takes the "
    "engine's as π_old. Record the trainer's own as docs/dump.md describes.",
    "now": ABSENT,
    "reward": "prime-rl's rollout files have no reward: keep its traces beside them, rollouts/step_N/train/"
    "effective/traces.jsonl, which its file monitor writes.",
    "version": ABSENT,
    "ref": "prime-rl writes ref_logprobs where an algorithm scores against a reference.",
}


def recognizes(path: Path) -> bool:
    """Tell whether a path is one of prime-rl's, step_NUMBER/rank_NUMBER.bin; other
    programs write .bin files too.

    Args:
        path: of a .bin file.
    """
    return bool(re.fullmatch(r"rank_\d+", path.stem)) and step_of(path) is not None


def step_of(path: Path) -> int | None:
    """Return the number in the name of the file's folder.

    Args:
        path: of the file.

    Returns:
        The optimizer step; None where the folder is not called step_NUMBER.
    """
    found = re.fullmatch(r"step_(\d+)", path.resolve().parent.name)
    return int(found[1]) if found else None


def read(path: Path) -> RecordedBatch:
    """Read one file: the micro-batches of one rank.

    Args:
        path: of the file.

    Returns:
        The recorded batch; a sample of a packed micro-batch is a response.

    Raises:
        InputError: it is another kind of file, or its lists differ in length.
    """
    import msgspec

    held = msgspec.msgpack.decode(path.read_bytes())
    if not isinstance(held, list) or not held:
        raise InputError(f"{path} holds no micro-batch of prime-rl.")
    parts = []
    for number, fields in enumerate(held):
        parts.append(_micro_batch(fields, f"{path}, micro-batch {number}"))
    if any(part["rl_weights"] is not None for part in parts):
        for part in parts:
            # prime-rl leaves the weights out where each is 1
            part["rl_weights"] = part["rl_weights"] or [1.0] * len(part["input_ids"])
    lengths = [length for part in parts for length in part["seq_lens"]]
    columns: dict[str, Any] = {"offsets": np.cumsum([0, *lengths])}
    for key, name in COLUMNS.items():
        if all(part[key] is not None for part in parts):
            columns[name] = np.concatenate([np.asarray(part[key]) for part in parts])
    columns["mask"] = np.concatenate([_trains(part) for part in parts])
    counts = [len(part["seq_lens"]) for part in parts]
    columns["micro"] = np.repeat(np.arange(len(parts)), counts)
    columns["rank"] = np.full(len(lengths), int(path.stem.partition("_")[2]))
    columns["group"] = _groups(columns["ids"], columns["mask"], columns["offsets"])
    columns |= _rewards(path, columns["ids"], columns["offsets"])
    return make_batch(
        columns, file=str(path), step=step_of(path), meta=META, hints=HINTS
    )


def _micro_batch(fields: Any, where: str) -> dict[str, Any]:
    """Return the fields of one micro-batch by their names, with None for those that are
    missing. Raise InputError if it has another number of fields, or its lists differ in
    length.
    """
    if not isinstance(fields, list) or not NEEDED <= len(fields) <= len(FIELDS):
        raise InputError(
            f"{where} is no micro-batch of prime-rl: this upref reads its {len(FIELDS)} fields."
        )
    part: dict[str, Any] = dict.fromkeys(FIELDS)
    part.update(zip(FIELDS, fields, strict=False))
    size = len(part["input_ids"])
    for name in ("loss_mask", *COLUMNS):
        if part[name] is not None and len(part[name]) != size:
            raise InputError(
                f"{where}: {name} has {len(part[name])} numbers, input_ids {size}; "
                "was the file altered?"
            )
    if sum(part["seq_lens"]) != size:
        raise InputError(
            f"{where}: seq_lens sum to {sum(part['seq_lens'])}, and it has {size} tokens."
        )
    return part


def _trains(part: dict[str, Any]) -> np.ndarray:
    """Return whether each token of a micro-batch trains, [n]: the mask is true there
    and the weight of the policy loss is not 0. prime-rl counts no token of weight 0.
    """
    mask = np.asarray(part["loss_mask"], dtype=bool)
    if part["rl_weights"] is None:
        return mask
    return mask & (np.asarray(part["rl_weights"]) != 0)


def _groups(ids: np.ndarray, mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return a number for each sample's prompt: equal where the tokens before the first
    that trains are. Of a sample that does not train, all tokens count.
    """
    out = []
    for start, end in pairwise(offsets):
        trains = mask[start:end]
        first = int(trains.argmax()) if trains.any() else int(end - start)
        out.append(prompt_number(ids[start : start + first]))
    return np.array(out)


def _rewards(path: Path, ids: np.ndarray, offsets: np.ndarray) -> dict[str, Any]:
    """Return {"reward": that of each sample}; {} where there are no traces, or a sample
    is not found in them.
    """
    traces = path.parent / PATH
    if not traces.is_file():
        return {}
    branches = read_branches(traces)
    samples = [tuple(ids[a:b].tolist()) for a, b in pairwise(offsets)]
    rewards = [find_reward(sample, branches) for sample in samples]
    if None in rewards:
        return {}
    return {"reward": np.array(rewards)}
