# SPDX-License-Identifier: Apache-2.0
"""From columns as a file holds them to a recorded batch: every shape, kind and number
is checked here, once.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.replay.schema import (
    COLUMNS,
    COUNTS,
    LARGEST,
    LOG_PROBS,
    MOST_SLOTS,
    RESPONSE_COLUMNS,
    ROUNDING,
    SEVERAL_LOSSES,
    TOKEN_FLOATS,
    UNTOLD,
    RecordedBatch,
)

# times the responses that the files state as the step's: two runs have twice as many, and
# a framework that repeats some to fill its last micro-batch has fewer
MOST_ABOVE = 1.5


def make_batch(columns: Mapping[str, Any], *, file: str, **facts: Any) -> RecordedBatch:
    """Check columns as a file holds them, and make them a batch.

    Args:
        columns: name -> tensor or array. Token columns are [B, T], or [N] with
            `offsets` [B + 1].
        file: where they were read.
        **facts: step, logged, meta and hints of RecordedBatch.

    Returns:
        The batch: floats in float64, masked slots of float columns 0.

    Raises:
        InputError: a column is missing, unknown, of another shape, or holds what it may
            not hold.
    """
    given = dict(columns)
    offsets = given.pop("offsets", None)
    for name in given:
        if name not in COLUMNS:
            raise InputError(
                f"{file}: {name!r} is no column of docs/dump.md; put it into meta, or leave it out."
            )
    for name in ("ids", "mask"):
        if name not in given:
            raise InputError(
                f"{file} lacks the column {name} ({COLUMNS[name]}): nothing can be told without it."
            )
    tensors = {name: _tensor(name, value, file) for name, value in given.items()}
    if offsets is not None:
        tensors = _pad_columns(tensors, _tensor("offsets", offsets, file), file)
    shape = tuple(tensors["mask"].shape)
    if len(shape) != 2 or 0 in shape:
        raise InputError(
            f"{file}: mask has shape {list(shape)}; give [B, T], or [N] with offsets."
        )
    if shape[0] * shape[1] > MOST_SLOTS:
        raise InputError(
            f"{file} has {shape[0]} x {shape[1]} slots, more than {MOST_SLOTS:,}: split the step."
        )
    made: dict[str, Any] = {"mask": _mask(tensors["mask"], file)}
    mask = made["mask"]
    if not mask.any():
        raise InputError(f"{file}: mask is false everywhere, so no token trains.")
    for name, value in tensors.items():
        if name != "mask":
            shaped = _fit_to_mask(name, value, shape, file)
            made[name] = _column(name, shaped, mask, file)
    _check_counts(facts.get("logged", {}), file)
    return RecordedBatch(**made, file=file, **facts)


def _fit_to_mask(name: str, value: Tensor, shape: tuple[int, ...], file: str) -> Tensor:
    """Return a column as it is, but advantages of responses as those of their tokens.

    Args:
        name: of the column.
        value: [B, T], or [B] for a column of responses; advantages also [B] or [B, 1].
        shape: of the mask, (B, T).
        file: for messages.

    Raises:
        InputError: the column has another shape.
    """
    responses, _ = shape
    is_of_responses = name in RESPONSE_COLUMNS
    if name == "version" and value.ndim == 2:  # the version of each token
        is_of_responses = False
    expected = (responses,) if is_of_responses else shape
    if name == "adv" and tuple(value.shape) in ((responses,), (responses, 1)):
        value = value.reshape(-1, 1).expand(shape)
    if tuple(value.shape) != expected:
        raise InputError(
            f"{file}: {name} has shape {list(value.shape)}, expected {list(expected)}."
        )
    return value


def _check_counts(logged: Mapping[str, float], file: str) -> None:
    """Raise InputError where a count of COUNTS is there and could not divide the loss
    of the step: it is not finite, or not above 0.
    """
    for name in COUNTS:
        value = logged.get(name, 1.0)
        if not (value > 0 and math.isfinite(value)):
            raise InputError(
                f"{file}: {name} under logged is {value:g}; it must be a finite number above 0."
            )


def merge(parts: Sequence[RecordedBatch]) -> RecordedBatch:
    """Join what several files hold of one step: ranks and micro-batches.

    A column that some of them lack is dropped, and `dropped` names one of these files.
    Without the column rank, each file counts as a rank. Where the files log different
    numbers, all logged numbers are dropped, and where a loss is among them, `meta` says
    which differ.

    Args:
        parts: of one step; at least one.

    Returns:
        The step: rows in the order of the parts, padded to the widest; `meta` and
        `hints` of the first part. A single part is returned as it is.

    Raises:
        InputError: the step has more than MOST_SLOTS slots, or the files are of two
            runs or hold the same responses.
    """
    if len(parts) == 1:
        return parts[0]
    width = max(part.mask.shape[1] for part in parts)
    held = {name for part in parts for name in part.recorded}
    lacking: dict[str, str] = {}  # column -> the first file that lacks it
    columns: dict[str, Tensor] = {}
    for name in COLUMNS:
        if name not in held:
            continue
        files = [part.file for part in parts if getattr(part, name) is None]
        if files:
            lacking[name] = files[0]
        else:
            columns[name] = _join_column(name, parts, width)
    if columns["mask"].numel() > MOST_SLOTS:
        raise InputError(
            f"step {parts[0].step} has more than {MOST_SLOTS:,} slots over {len(parts)} files: cut it."
        )
    if "rank" not in columns:
        ranks = [torch.full((len(part.mask),), n) for n, part in enumerate(parts)]
        columns["rank"] = torch.cat(ranks)
    logged = dict(parts[0].logged)
    if any(part.logged != parts[0].logged for part in parts):
        # each file has its own loss: their sum is not known to be the step's
        logged = {}
    _check_repeated(parts)
    _check_one_run(parts)
    meta = dict(parts[0].meta)
    if "loss" not in logged and any("loss" in part.logged for part in parts):
        meta[SEVERAL_LOSSES] = _words_for_two_that_differ(parts)
    if why := _untold_runs(parts):
        meta[UNTOLD] = why
    facts = {
        "step": parts[0].step,
        "logged": logged,
        "meta": meta,
        "hints": parts[0].hints,
        "dropped": lacking,
    }
    made: dict[str, Any] = columns | facts
    return RecordedBatch(**made, file=f"{parts[0].file} and {len(parts) - 1} more")


def _join_column(name: str, parts: Sequence[RecordedBatch], width: int) -> Tensor:
    """Return a column that all parts have, rows in the order of the parts: [B, width],
    padded with 0, or [B] for a column of responses.

    Micro-batches of different parts get different numbers. Versions of responses become
    versions of tokens where another part has these.
    """
    pieces: list[Tensor] = [getattr(part, name) for part in parts]
    if name == "micro":
        # each file numbers its own from 0: a million for each keeps them apart
        pieces = [piece + 1_000_000 * number for number, piece in enumerate(pieces)]
    if name == "version" and any(piece.ndim == 2 for piece in pieces):
        for number, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            if piece.ndim == 1:
                pieces[number] = piece[:, None].expand_as(part.mask)
    if name not in RESPONSE_COLUMNS or pieces[0].ndim == 2:
        pieces = [
            torch.nn.functional.pad(piece, (0, width - piece.shape[1]))
            for piece in pieces
        ]
    return torch.cat(pieces)


def _words_for_two_that_differ(parts: Sequence[RecordedBatch]) -> str:
    """Name the logged numbers that differ in the first file and in the next that logs
    others: "loss 0.1 in a.npz and loss 0.2 in b.npz". There must be such a file.
    """
    first = parts[0]
    second = next(part for part in parts if part.logged != first.logged)
    all_names = dict.fromkeys([*first.logged, *second.logged])
    names = [n for n in all_names if first.logged.get(n) != second.logged.get(n)]
    words = []
    for part in (first, second):
        numbers = []
        for name in names:
            if name in part.logged:
                numbers.append(f"{name} {part.logged[name]:.6g}")
            else:
                numbers.append(f"no {name}")
        words.append(f"{', '.join(numbers)} in {part.file}")
    return " and ".join(words)


def _check_repeated(parts: Sequence[RecordedBatch]) -> None:
    """Raise InputError where two files hold the same responses: ranks of one
    tensor-parallel group, or copies.
    """
    seen: dict[tuple[Any, ...], str] = {}
    for part in parts:
        key = (
            tuple(part.mask.shape),
            part.tokens,
            int(part.ids.sum()),
            int((part.ids * part.mask).sum()),
        )
        first_file = seen.setdefault(key, part.file)
        if first_file == part.file:
            continue
        # equal sums are no proof: two files may differ in their ids
        twin = next(p for p in parts if p.file == first_file)
        if _has_same_responses(part, twin):
            raise InputError(
                f"{part.file} holds the same responses as {first_file}: give one of them."
            )


def _check_one_run(parts: Sequence[RecordedBatch]) -> None:
    """Raise InputError where files of one step are of two runs: of two frameworks, under
    one name in two folders, or with more responses than each says that the step has.
    """
    _refuse_two_frameworks(parts)
    _refuse_two_folders(parts)
    _refuse_too_many_responses(parts)


def _refuse_two_frameworks(parts: Sequence[RecordedBatch]) -> None:
    """Raise InputError where a file names another framework than the first one."""
    first = parts[0]
    framework = first.meta.get("framework")
    for part in parts[1:]:
        other = part.meta.get("framework")
        if None not in (framework, other) and framework != other:
            raise InputError(
                f"step {first.step} is in {first.file} of {framework} and in {part.file} of "
                f"{other}: give the files of one run."
            )


def _refuse_two_folders(parts: Sequence[RecordedBatch]) -> None:
    """Raise InputError where files of one name are in two folders, unless they are of
    two ranks.
    """
    files: dict[str, RecordedBatch] = {}
    for part in parts:
        twin = files.setdefault(Path(part.file).name, part)
        if twin.file == part.file:
            continue
        if twin.rank is None or part.rank is None:
            raise InputError(
                f"step {part.step} is in {twin.file} and in {part.file}, with other responses, and no column rank "
                "says that these are of two ranks: give the files of one run, or record rank."
            )
        if torch.equal(twin.rank.unique(), part.rank.unique()):
            raise InputError(
                f"step {part.step} of the same rank is in {twin.file} and in {part.file}, with "
                "other responses: give the files of one run."
            )


def _refuse_too_many_responses(parts: Sequence[RecordedBatch]) -> None:
    """Raise InputError where all files state one number of responses of the step, and
    together hold more than MOST_ABOVE times as many.
    """
    # NaN where a file states none: no comparison with it is true
    stated = {part.logged.get("responses", math.nan) for part in parts}
    there = sum(len(part.mask) for part in parts)
    if len(stated) == 1 and there > MOST_ABOVE * max(stated):
        raise InputError(
            f"the {len(parts)} files of step {parts[0].step} hold {there} responses, and each of them says that the step "
            f"has {max(stated):g}: they are of several runs. Give the files of one run."
        )


def _untold_runs(parts: Sequence[RecordedBatch]) -> str:
    """Say that files are joined which may be of two runs; "" where all of them have a
    rank, and no two the same.
    """
    ranks = [
        tuple(part.rank.unique().tolist()) for part in parts if part.rank is not None
    ]
    if not ranks:
        why = "name no rank"
    elif len(ranks) < len(parts):
        why = "do not all name a rank"
    elif len(set(ranks)) == 1:
        why = "are of one rank"
    elif len(set(ranks)) < len(ranks):
        why = "are not all of different ranks"
    else:
        return ""
    return f"its {len(parts)} files {why}, and are joined: if they are of two runs, give those of one"


def _has_same_responses(one: RecordedBatch, other: RecordedBatch) -> bool:
    """Return whether two parts have equal token ids and masks."""
    return torch.equal(one.ids, other.ids) and torch.equal(one.mask, other.mask)


def _tensor(name: str, value: Any, file: str) -> Tensor:
    """Return a column as a tensor on the CPU; group ids that are text become numbers.

    Raises:
        InputError: it has more than MOST_SLOTS numbers, or holds no numbers.
    """
    if isinstance(value, Tensor):
        if value.is_sparse or value.is_meta or value.numel() > MOST_SLOTS:
            raise InputError(
                f"{file}: {name} holds {value.numel():,} numbers, more than {MOST_SLOTS:,}."
            )
        return value.detach().cpu()
    array = np.asarray(value)
    if array.size > MOST_SLOTS:
        raise InputError(
            f"{file}: {name} holds {array.size:,} numbers, more than {MOST_SLOTS:,}."
        )
    if name == "group" and array.dtype.kind in "US":
        array = _number_texts(array)
    if array.dtype.kind not in "biuf":
        raise InputError(f"{file}: {name} holds {array.dtype}, not numbers.")
    if array.dtype.kind == "u":
        array = array.astype(np.int64)
    # torch has no numbers of the other byte order
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.ascontiguousarray(array))


def _number_texts(texts: np.ndarray) -> np.ndarray:
    """Return a whole number for each text, of the same shape: a hash, which is the same
    in every file.
    """
    kinds, number = np.unique(texts, return_inverse=True)
    digests = [hashlib.sha256(str(text).encode()).digest() for text in kinds]
    # 63 bits, so that it is a positive int64
    numbers = [int.from_bytes(d[:8], "big") >> 1 for d in digests]
    return np.array(numbers, dtype=np.int64)[number.reshape(texts.shape)]


def _pad_columns(
    tensors: dict[str, Tensor], offsets: Tensor, file: str
) -> dict[str, Tensor]:
    """Return ragged token columns [N] as [B, T], padded with 0 on the right; columns of
    responses as they are.

    Args:
        tensors: columns by name, `mask` among them.
        offsets: where each response begins in the N tokens, and N, [B + 1].
        file: for messages.

    Raises:
        InputError: the offsets do not fit the columns, or the padded size is above
            MOST_SLOTS.
    """
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.is_floating_point():
        raise InputError(
            f"{file}: offsets must be whole numbers [B + 1], got shape {list(offsets.shape)}."
        )
    lengths = offsets.diff()
    total = len(tensors["mask"])
    if offsets[0] != 0 or int(offsets[-1]) != total or bool((lengths < 0).any()):
        raise InputError(
            f"{file}: offsets must rise from 0 to the number of tokens, {total}."
        )
    width = int(lengths.max())
    if len(lengths) * width > MOST_SLOTS or width == 0:
        raise InputError(
            f"{file}: {len(lengths)} responses of up to {width:,} tokens cannot be held: split the step."
        )
    inside = torch.arange(width)[None, :] < lengths[:, None]
    out = {}
    for name, value in tensors.items():
        is_of_tokens = tuple(value.shape) == (total,)
        adv_of_responses = name == "adv" and not is_of_tokens
        versions_of_tokens = name == "version" and is_of_tokens
        of_responses = name in RESPONSE_COLUMNS and not versions_of_tokens
        if of_responses or adv_of_responses:
            out[name] = value
            continue
        if not is_of_tokens:
            raise InputError(
                f"{file}: {name} has shape {list(value.shape)}, expected [{total}] as the mask."
            )
        padded = torch.zeros(inside.shape, dtype=value.dtype)
        padded[inside] = value
        out[name] = padded
    return out


def _mask(mask: Tensor, file: str) -> Tensor:
    """Return the mask as booleans; InputError unless it holds only 0 and 1."""
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(f"{file}: mask must hold 0 and 1.")
    return mask.bool()


def _column(name: str, value: Tensor, mask: Tensor, file: str) -> Tensor:
    """Return a column in float64, or in int64 if it holds whole numbers; masked slots
    of float columns of tokens are 0.

    Raises:
        InputError: a trained token or a reward has a number that its column may not
            hold; the message says where.
    """
    if name == "reward":
        return _rewards(value, file)
    if name in TOKEN_FLOATS:
        return _floats_of_tokens(name, value, mask, file)
    return _whole_numbers(name, value, mask, file)


def _whole_numbers(name: str, value: Tensor, mask: Tensor, file: str) -> Tensor:
    """Return a column in int64; InputError where it holds no whole numbers, or the id
    of a trained token is below 0.
    """
    if value.is_floating_point():
        is_whole = (value == value.round()) & (value.abs() <= 2.0**53)
        if not bool(is_whole.all()):
            raise InputError(f"{file}: {name} must hold whole numbers, up to 2^53.")
    value = value.long()
    if name != "ids":
        return value
    bad = mask & (value < 0)
    if bad.any():
        row, token = bad.nonzero()[0].tolist()
        raise InputError(
            f"{file}: ids is {int(value[row, token])} at response {row}, token {token}, which trains."
        )
    return value


def _rewards(value: Tensor, file: str) -> Tensor:
    """Return the rewards in float64; InputError where one is above LARGEST in size,
    infinite or NaN.
    """
    value = value.double()
    if bool((value.isfinite() & (value.abs() > LARGEST)).any()):
        raise InputError(f"{file}: reward holds numbers beyond those of float32.")
    bad = ~value.isfinite()
    if bad.any():
        raise InputError(
            f"{file}: reward is {value[bad][0].item()} at response {int(bad.nonzero()[0])}."
        )
    return value


def _floats_of_tokens(name: str, value: Tensor, mask: Tensor, file: str) -> Tensor:
    """Return a column of TOKEN_FLOATS in float64, 0 on masked slots.

    In the sampler's column -inf becomes NaN: not drawn. In other columns of
    log-probabilities a number above 0 by at most ROUNDING becomes 0.

    Raises:
        InputError: a trained token has a number that its column may not hold.
    """
    value = value.double()
    if bool((value.isfinite() & (value.abs() > LARGEST) & mask).any()):
        raise InputError(f"{file}: {name} holds numbers beyond those of float32.")
    if name == "sampler":
        bad = mask & (value == torch.inf)
    else:
        bad = mask & ~value.isfinite()
    if bad.any():
        row, token = bad.nonzero()[0].tolist()
        raise InputError(
            f"{file}: {name} is {value[row, token].item()} at response {row}, token {token}, which trains."
        )
    if name == "sampler":
        value = value.masked_fill(value == -torch.inf, torch.nan)
    # the check of the gap judges the sampler's column
    if name in LOG_PROBS and name != "sampler":
        value = torch.where((value > 0) & (value <= ROUNDING), 0.0, value)
        is_above_one = mask & (value > 0)  # as a probability
        if bool(is_above_one.any()):
            row, token = is_above_one.nonzero()[0].tolist()
            raise InputError(
                f"{file}: {name} is {value[row, token].item():.4g} > 0 at response {row}, token {token}: "
                "log-probabilities are never positive; are these probabilities or losses?"
            )
    return torch.where(mask, value, 0.0)
