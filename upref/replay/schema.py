# SPDX-License-Identifier: Apache-2.0
"""The recorded batch: what a real run wrote of one step, checked once at the boundary.

docs/dump.md is this schema for people. B responses of at most T tokens; log-probabilities in nats at the temperature
that trains. A dump holds the texts of users, as token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts

SCHEMA = 1  # version of docs/dump.md
MOST_SLOTS = 2**27  # B x T of a step: 1 GiB for a column of float64
ROUNDING = 1e-3  # how far a fused log-softmax in half precision overshoots 0

# What is stored per token, [B, T] or ragged, and what per response, [B].
LOG_PROBS = {
    "old": "log π_old of the trainer before the update",
    "sampler": "log μ of the engine that sampled; NaN: the sampler did not draw this token",
    "now": "log π_θ of the trainer in this micro-batch",
    "ref": "log π_ref of the reference model",
}
TOKEN_FLOATS = LOG_PROBS | {"adv": "advantage", "entropy": "entropy of π_θ in nats"}
TOKEN_INTEGERS = {
    "ids": "token id",
    "sampler_ids": "the ids as the sampler drew them",
    "turn": "number of the turn or source of the token",
}
RESPONSE_COLUMNS = {
    "reward": "reward of the response",
    "group": "prompt of the response",
    "version": "step of the weights that sampled the response",
    "micro": "micro-batch of the response",
    "rank": "data-parallel rank of the response",
}
COLUMNS = TOKEN_INTEGERS | {"mask": "true on the tokens that train"} | TOKEN_FLOATS | RESPONSE_COLUMNS


@dataclass(frozen=True, eq=False)
class RecordedBatch:
    """One step of a run, or what one file holds of it. A column that was not recorded is None.

    Args:
        ids: token ids, [B, T].
        mask: [B, T], True on the tokens that train. A response may have none.
        adv: advantages, [B, T].
        old, sampler, now, ref: log-probabilities in nats, [B, T]; see LOG_PROBS.
        entropy: nats, [B, T].
        sampler_ids: [B, T].
        turn: [B, T].
        reward, group, version, micro, rank: one number per response, [B].
        step: number of the optimizer step, where it is known.
        logged: numbers that the run logged for this step, for example {"loss": 0.0123}.
        meta: facts about the run, in words.
        hints: column -> how the framework is made to record it, where the reader of the file knows.
        file: where it was read.
    """

    ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    adv: Float[Tensor, "B T"] | None = None
    old: Float[Tensor, "B T"] | None = None
    sampler: Float[Tensor, "B T"] | None = None
    now: Float[Tensor, "B T"] | None = None
    ref: Float[Tensor, "B T"] | None = None
    entropy: Float[Tensor, "B T"] | None = None
    sampler_ids: Int[Tensor, "B T"] | None = None
    turn: Int[Tensor, "B T"] | None = None
    reward: Float[Tensor, " B"] | None = None
    group: Int[Tensor, " B"] | None = None
    version: Int[Tensor, " B"] | None = None
    micro: Int[Tensor, " B"] | None = None
    rank: Int[Tensor, " B"] | None = None
    step: int | None = None
    logged: Mapping[str, float] = field(default_factory=dict)
    meta: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    file: str = ""

    @property
    def tokens(self) -> int:
        """How many tokens train."""
        return int(self.mask.sum())

    @property
    def recorded(self) -> list[str]:
        """Names of the columns that are there."""
        return [name for name in COLUMNS if getattr(self, name) is not None]

    def require(self, *names: str, purpose: str) -> None:
        """Raise InputError, with the framework's setting where it is known, unless all these columns are there."""
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            first = missing[0]
            hint = self.hints.get(first, "record it as docs/dump.md describes.")
            raise InputError(f"{purpose} needs the column {first} ({COLUMNS[first]}), which {self.file} lacks: {hint}")

    def trainer(self) -> Float[Tensor, "B T"]:
        """The trainer's log-probabilities before the update: `old`, else `now`."""
        column = self.old if self.old is not None else self.now
        if column is None:
            self.require("old", purpose="every check of log-probabilities")
        assert column is not None
        return column

    def rows(self, index: Tensor) -> "RecordedBatch":
        """The responses of that index."""
        columns = {name: getattr(self, name)[index] for name in self.recorded}
        return replace(self, **columns)

    def rollouts(self, *, sampler: bool = False) -> Rollouts:
        """The responses that train, as the input of an objective; π_θ is `now`, else π_old: the first optimizer step.

        Raises:
            InputError: a column is missing or is not a log-probability.
        """
        self.require("adv", purpose="an objective")
        b = self.rows(self.mask.any(1))
        assert b.adv is not None
        old, mu = b.trainer(), None
        if sampler:
            b.require("sampler", purpose="a sampler correction")
            assert b.sampler is not None
            mu = torch.where(b.sampler <= ROUNDING, b.sampler.clamp(max=0), b.sampler)
        group = b.group
        if group is not None and bool((group.unique(return_counts=True)[1] == 1).any()):
            group = None  # the rest of the group was dropped, or lies in another file
        return Rollouts(
            logp=old if b.now is None else b.now, logp_old=old, adv=b.adv, mask=b.mask, group=group, logp_ref=b.ref,
            entropy=b.entropy, logp_sampler=mu,
        )  # fmt: skip


def make_batch(columns: Mapping[str, Any], *, file: str, **facts: Any) -> RecordedBatch:
    """Check columns as a file holds them, and make them a batch.

    Args:
        columns: name -> tensor or array. Token columns are [B, T], or [N] with `offsets` [B + 1].
        file: where they were read.
        **facts: step, logged, meta and hints of RecordedBatch.

    Returns:
        The batch: floats in float64, masked slots of float columns 0.

    Raises:
        InputError: a column is missing, unknown, of another shape, or holds what it may not hold.
    """
    given = dict(columns)
    offsets = given.pop("offsets", None)
    for name in given:
        if name not in COLUMNS:
            raise InputError(f"{file}: {name!r} is no column of docs/dump.md; put it into meta, or leave it out.")
    for name in ("ids", "mask"):
        if name not in given:
            raise InputError(f"{file} lacks the column {name} ({COLUMNS[name]}): nothing can be told without it.")
    tensors = {name: _tensor(name, value, file) for name, value in given.items()}
    if offsets is not None:
        tensors = _padded(tensors, _tensor("offsets", offsets, file), file)
    shape = tuple(tensors["mask"].shape)
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{file}: mask has shape {list(shape)}; give [B, T], or [N] with offsets.")
    if shape[0] * shape[1] > MOST_SLOTS:
        raise InputError(f"{file} has {shape[0]} x {shape[1]} slots, more than {MOST_SLOTS:,}: split the step.")
    made: dict[str, Any] = {"mask": _mask(tensors["mask"], file)}
    mask = made["mask"]
    if not mask.any():
        raise InputError(f"{file}: mask is false everywhere, so no token trains.")
    for name, value in tensors.items():
        if name != "mask":
            expected = shape[:1] if name in RESPONSE_COLUMNS else shape
            if name == "adv" and tuple(value.shape) in (shape[:1], (shape[0], 1)):
                value = value.reshape(-1, 1).expand(shape)
            if tuple(value.shape) != expected:
                raise InputError(f"{file}: {name} has shape {list(value.shape)}, expected {list(expected)}.")
            made[name] = _column(name, value, mask, file)
    return RecordedBatch(**made, file=file, **facts)


def merge(parts: Sequence[RecordedBatch]) -> RecordedBatch:
    """Join what several files hold of one step: ranks and micro-batches. A column that one of them lacks is dropped."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.mask.shape[1] for part in parts)
    shared = [name for name in COLUMNS if all(getattr(part, name) is not None for part in parts)]
    columns: dict[str, Tensor] = {}
    for name in shared:
        pieces = [getattr(part, name) for part in parts]
        if name == "micro":  # each file numbers its own
            pieces = [piece + 1_000_000 * number for number, piece in enumerate(pieces)]
        if name not in RESPONSE_COLUMNS:
            pieces = [torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces]
        columns[name] = torch.cat(pieces)
    if columns["mask"].numel() > MOST_SLOTS:
        raise InputError(f"step {parts[0].step} has more than {MOST_SLOTS:,} slots over {len(parts)} files: cut it.")
    if "rank" not in columns:
        columns["rank"] = torch.cat([torch.full((len(part.mask),), n) for n, part in enumerate(parts)])
    logged = {key: value for part in parts for key, value in part.logged.items()}
    if any(part.logged != parts[0].logged for part in parts):
        logged = {}  # each file has its own loss: their sum is not known to be the step's
    _check_repeated(parts)
    facts = {"step": parts[0].step, "logged": logged, "meta": parts[0].meta, "hints": parts[0].hints}
    made: dict[str, Any] = columns | facts
    return RecordedBatch(**made, file=f"{parts[0].file} and {len(parts) - 1} more")


def _check_repeated(parts: Sequence[RecordedBatch]) -> None:
    """Raise InputError where two files hold the same responses: ranks of one tensor-parallel group, or copies."""
    seen: dict[tuple[Any, ...], str] = {}
    for part in parts:
        key = (tuple(part.mask.shape), part.tokens, int(part.ids.sum()), int((part.ids * part.mask).sum()))
        twin = seen.setdefault(key, part.file)
        if twin != part.file and _equal(part, next(p for p in parts if p.file == twin)):
            raise InputError(f"{part.file} holds the same responses as {twin}: give one of them.")


def _equal(one: RecordedBatch, other: RecordedBatch) -> bool:
    return torch.equal(one.ids, other.ids) and torch.equal(one.mask, other.mask)


def _tensor(name: str, value: Any, file: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.is_sparse or value.is_meta or value.numel() > MOST_SLOTS:
            raise InputError(f"{file}: {name} holds {value.numel():,} numbers, more than {MOST_SLOTS:,}.")
        return value.detach().cpu()
    array = np.asarray(value)
    if array.size > MOST_SLOTS:
        raise InputError(f"{file}: {name} holds {array.size:,} numbers, more than {MOST_SLOTS:,}.")
    if name == "group" and array.dtype.kind in "US":
        array = np.unique(array, return_inverse=True)[1]
    if array.dtype.kind not in "biuf":
        raise InputError(f"{file}: {name} holds {array.dtype}, not numbers.")
    if array.dtype.kind == "u":
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array))


def _padded(tensors: dict[str, Tensor], offsets: Tensor, file: str) -> dict[str, Tensor]:
    """Ragged token columns as [B, T]."""
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.is_floating_point():
        raise InputError(f"{file}: offsets must be whole numbers [B + 1], got shape {list(offsets.shape)}.")
    lengths = offsets.diff()
    total = len(tensors["mask"])
    if offsets[0] != 0 or int(offsets[-1]) != total or bool((lengths < 0).any()):
        raise InputError(f"{file}: offsets must rise from 0 to the number of tokens, {total}.")
    width = int(lengths.max())
    if len(lengths) * width > MOST_SLOTS or width == 0:
        raise InputError(f"{file}: {len(lengths)} responses of up to {width:,} tokens cannot be held: split the step.")
    inside = torch.arange(width)[None, :] < lengths[:, None]
    out = {}
    for name, value in tensors.items():
        if name in RESPONSE_COLUMNS:
            out[name] = value
            continue
        if tuple(value.shape) != (total,):
            raise InputError(f"{file}: {name} has shape {list(value.shape)}, expected [{total}] as the mask.")
        padded = torch.zeros(inside.shape, dtype=value.dtype)
        padded[inside] = value
        out[name] = padded
    return out


def _mask(mask: Tensor, file: str) -> Tensor:
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(f"{file}: mask must hold 0 and 1.")
    return mask.bool()


def _column(name: str, value: Tensor, mask: Tensor, file: str) -> Tensor:
    """A column in float64 or int64; masked slots of float columns are 0."""
    if name not in TOKEN_FLOATS and name != "reward":
        if value.is_floating_point() and not bool((value == value.round()).all()):
            raise InputError(f"{file}: {name} must hold whole numbers.")
        return value.long()
    value = value.double()
    if name == "reward":
        bad = ~value.isfinite()
        if bad.any():
            raise InputError(f"{file}: reward is {value[bad][0].item()} at response {int(bad.nonzero()[0])}.")
        return value
    bad = mask & (value == torch.inf if name == "sampler" else ~value.isfinite())
    if bad.any():
        row, token = bad.nonzero()[0].tolist()
        raise InputError(
            f"{file}: {name} is {value[row, token].item()} at response {row}, token {token}, which trains."
        )
    if name == "sampler":
        value = value.masked_fill(value == -torch.inf, torch.nan)
    if name in LOG_PROBS and name != "sampler":  # what the sampler's column holds, the check of the gap says
        value = torch.where((value > 0) & (value <= ROUNDING), 0.0, value)
        if bool((mask & (value > 0)).any()):
            row, token = (mask & (value > 0)).nonzero()[0].tolist()
            raise InputError(
                f"{file}: {name} is {value[row, token].item():.4g} > 0 at response {row}, token {token}: "
                "log-probabilities are never positive; are these probabilities or losses?"
            )
    return torch.where(mask, value, 0.0)
