# SPDX-License-Identifier: Apache-2.0
"""The `.pt` of slime's and miles' `--save-debug-train-data PATH` (or
`--dump-details FOLDER`).

slime, format_version 2: one file for each rollout, which may hold several optimizer
steps.
https://github.com/THUDM/slime/blob/624b824a898ab0ec1fcb4d373004c7f3852bf515/slime/observability/train_data_utils.py
miles: one file for each rank, with the columns of that rank alone.
https://github.com/radixark/miles/blob/31f1ca961a94cb860cec3b2dea34ec332bfa8f76/miles/utils/train_dump_utils.py
Columns are of the response; `tokens` has the prompt in front. A prompt has no id:
responses with equal prompts form a group. The files are read with weights_only=True, so
nothing in them is run.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.replay.batch import make_batch
from upref.replay.prompts import prompt_number
from upref.replay.schema import PROMPTS_READ, RecordedBatch

SUFFIXES: tuple[str, ...] = (".pt",)
COLUMNS = {
    "log_probs": "old",
    "rollout_log_probs": "sampler",
    "ref_log_probs": "ref",
    "advantages": "adv",
    "entropy": "entropy",
}
MOST = 2**27  # numbers of one column
ARCHIVE = b"PK\x03\x04"  # how a zip archive begins, as torch.save writes since 1.6
KEY = b"rollout_id"
PART = 2**20  # bytes
HINTS = {
    "sampler": "slime records rollout_log_probs where its generate function keeps SGLang's; its default does.",
    "ref": "slime records ref_log_probs with --ref-load and --use-kl-loss, or --kl-coef.",
    "reward": "miles' file of one rank does not say which of the raw rewards are its own.",
    "now": "slime and miles record the log-probabilities of the first pass alone.",
    "version": "this file has no weight_versions.",
}


def recognizes(path: Path) -> bool:
    """Tell whether a file is an archive of torch.save with a rollout_id, or is cut off.

    Its pickle is searched and not run: a folder may hold weights of a model too.

    Args:
        path: of a .pt file.
    """
    with path.open("rb") as file:
        if file.read(len(ARCHIVE)) != ARCHIVE:
            return False
    if not zipfile.is_zipfile(path):
        return True
    with zipfile.ZipFile(path) as archive:
        pickles = [n for n in archive.namelist() if n.endswith("/data.pkl")]
        return any(_contains(archive, name, KEY) for name in pickles)


def _contains(archive: zipfile.ZipFile, name: str, key: bytes) -> bool:
    """Return whether an entry of the archive contains these bytes. It is read in parts,
    and the end of each is kept for bytes that are in two parts.
    """
    with archive.open(name) as file:
        end = b""
        while part := file.read(PART):
            if key in end + part:
                return True
            end = part[-len(key) :]
    return False


def step_of(path: Path) -> int | None:
    """Return the number of the rollout, which may hold several optimizer steps.

    Args:
        path: of the file.

    Raises:
        InputError: it is another kind of file.
    """
    return int(_load(path)["rollout_id"])


def read(path: Path) -> RecordedBatch:
    """Read one file: a rollout of slime, or the part of one rank of miles.

    Args:
        path: of the file.

    Returns:
        The recorded batch.

    Raises:
        InputError: it is another kind of file, a sample lacks a column, or the file
            holds parts of responses.
    """
    held = _load(path)
    if held.get("cp_size", 1) != 1:
        raise InputError(
            f"{path} holds one part of each response (context parallel {held['cp_size']}): dump with 1."
        )
    if "samples" in held:
        samples = held["samples"]
    else:
        samples = _samples_of_rank(held["rollout_data"], path)
    if not samples:
        raise InputError(f"{path} holds no sample.")
    framework = "slime" if "samples" in held else "miles"
    lengths = [len(_flat(s["loss_masks"])) for s in samples]
    if sum(lengths) > MOST:
        raise InputError(f"{path} holds {sum(lengths):,} tokens, more than {MOST:,}.")
    responses = []  # their ids; `tokens` has those of the prompt before them
    for sample, length in zip(samples, lengths, strict=True):
        if length:
            responses.append(_flat(sample["tokens"])[-length:])
    columns: dict[str, Any] = {
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "mask": torch.cat([_flat(s["loss_masks"]) for s in samples]),
        "ids": torch.cat(responses),
        "group": _groups(samples, lengths),
    }
    for key, name in COLUMNS.items():
        if all(s.get(key) is not None for s in samples):
            columns[name] = torch.cat([_flat(s[key]).double() for s in samples])
    reward = _rewards(held, samples)
    if reward is not None:
        columns["reward"] = reward
    if "dp_shards" in held:
        columns |= _layout(held["dp_shards"], samples)
    versions = [s.get("weight_versions") for s in samples]
    if all(own and str(own[0]).isdigit() for own in versions):
        oldest = [min(int(version) for version in own) for own in versions if own]
        columns["version"] = torch.tensor(oldest)
    meta = {"framework": framework, PROMPTS_READ: "responses with equal prompts"}
    return make_batch(
        columns, file=str(path), step=int(held["rollout_id"]), meta=meta, hints=HINTS
    )


def _load(path: Path) -> dict[str, Any]:
    """Load a file of --save-debug-train-data. Raise InputError for any other file, and
    for another format_version than 2.
    """
    contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    is_dump = (
        isinstance(contents, dict)
        and "rollout_id" in contents
        and ("samples" in contents or "rollout_data" in contents)
    )
    if not is_dump:
        raise InputError(
            f"{path} is no file of --save-debug-train-data: it has no rollout_id and samples."
        )
    if "samples" in contents and contents.get("format_version") != 2:
        raise InputError(
            f"{path} has slime's format_version {contents.get('format_version')}; this upref reads 2."
        )
    return dict(contents)


def _flat(value: Any) -> Tensor:
    """Return a list or tensor of numbers as a tensor [n]. Raise InputError if there are
    more than MOST.
    """
    out = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    if out.numel() > MOST:
        raise InputError(
            f"a column announces {out.numel():,} numbers, more than {MOST:,}."
        )
    return out.reshape(-1)


def _samples_of_rank(data: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Return miles' columns of one rank as one dict for each sample. Entries that have
    no value for each sample are left out, and so is `raw_reward`. Raise InputError
    where there are no tokens.
    """
    count = len(data["loss_masks"])
    columns = {}
    for name, values in data.items():
        is_of_samples = isinstance(values, list | tuple) and len(values) == count
        if is_of_samples and name != "raw_reward":
            columns[name] = values
    if "tokens" not in columns:
        raise InputError(
            f"{path} lacks tokens: give the files of ranks of the last pipeline stage."
        )
    return [{name: values[i] for name, values in columns.items()} for i in range(count)]


def _groups(samples: list[dict[str, Any]], lengths: list[int]) -> Tensor:
    """Return a number for each sample's prompt: equal where the tokens before the
    response are.
    """
    out = []
    for sample, n in zip(samples, lengths, strict=True):
        ids = _flat(sample["tokens"])
        out.append(prompt_number(ids[: len(ids) - n].tolist()))
    return torch.tensor(out)


def _rewards(contents: dict[str, Any], samples: list[dict[str, Any]]) -> Tensor | None:
    """Return the raw reward of each sample, [N]; None where the file does not say which
    it is. The column `rewards` is normalized already.
    """
    if all("local_raw_reward" in s for s in samples):
        return torch.tensor(
            [float(s["local_raw_reward"]) for s in samples], dtype=torch.float64
        )
    raw = contents.get("raw_reward")
    if raw is None or not all(s.get("rollout_position") is not None for s in samples):
        return None
    return torch.tensor(
        [float(raw[s["rollout_position"]]) for s in samples], dtype=torch.float64
    )


def _layout(
    shards: list[dict[str, Any]], samples: list[dict[str, Any]]
) -> dict[str, Tensor]:
    """Return the rank of each sample, and its micro-batch if each sample has one, by
    the sample's position in the rollout; {} where the positions are not recorded.
    """
    if not all(s.get("rollout_position") is not None for s in samples):
        return {}
    place = {s["rollout_position"]: i for i, s in enumerate(samples)}
    micro = torch.full((len(samples),), -1)
    rank = torch.full((len(samples),), -1)
    number = 0
    for shard in shards:
        partition = shard.get("partition") or []
        for position in partition:
            rank[place[position]] = shard["data_parallel_rank"]
        for members in shard.get("micro_batch_indices") or []:
            for member in members:
                micro[place[partition[member]]] = number
            number += 1
    if bool((micro >= 0).all()):
        return {"rank": rank, "micro": micro}
    return {"rank": rank}
