# SPDX-License-Identifier: Apache-2.0
"""Zero mismatch: sampler and trainer aim at equal bits. Where do they differ?

Kernels that do not depend on the batch give each token the same bits on both sides. Then
one token that differs is a fault, and where it stands tells which: a shape of the
micro-batch, a position, a token id.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from upref.errors import InputError
from upref.replay.findings import Checked, ReplayFinding
from upref.replay.schema import ROUNDING, RecordedBatch, expect_batch

TAILS = (0.01, 0.1, 0.5)  # nats
QUARTERS = 4  # parts of a response
MOST_SHAPES = 6  # shapes of micro-batches that are named
MOST_IDS = 4  # token ids that are named
TWIN = (
    "a copy of a column gives equal bits too, so nothing is shown. Record the first "
    "optimizer step on the responses, with the column now from the trainer's own "
    "forward pass."
)


@dataclass(frozen=True, kw_only=True)
class ZeroMismatch(Checked):
    """The tokens of a step whose two numbers are not the same bits.

    Args:
        tokens: number of tokens compared: those that train, of responses that the
            current weights sampled.
        differ: how many of them differ.
        responses, responses_off: number of responses, and of those in which one differs.
        first: (response, token) of the first one that differs; None without one.
        beyond: nats -> share of the tokens whose |log ρ| is larger.
        quarters: share of the tokens that differ, in each quarter of the responses.
        shapes: (rows, longest row) of a micro-batch -> share of its tokens that differ;
            empty without the column micro.
        ids: token id -> (how many differ, how many there are), of the ids with most.
    """

    tokens: int
    differ: int
    responses: int
    responses_off: int
    first: tuple[int, int] | None
    beyond: dict[float, float]
    quarters: tuple[float, ...]
    shapes: dict[tuple[int, int], float]
    ids: dict[int, tuple[int, int]]


def zero_mismatch(batch: RecordedBatch) -> ZeroMismatch:
    """Compare the sampler's column with the trainer's bit by bit.

    Args:
        batch: with the columns sampler and old, or now. With version, only tokens
            that the weights of this step sampled are compared.

    Returns:
        The ZeroMismatch. It is false where a token differs.

    Raises:
        InputError: a column is missing, older weights sampled all responses, or the
            columns are equal and may be copies: then nothing is shown.
    """
    expect_batch(batch, "the check of zero mismatch")
    batch.require("sampler", purpose="the check of zero mismatch")
    assert batch.sampler is not None
    trainer = batch.trainer()
    compared = batch.mask & batch.sampler.isfinite() & _is_current(batch)
    if not compared.any():
        raise InputError(
            "no token that trains was sampled by the weights of this step, so equal bits "
            "are not the aim."
        )
    # as the trainer's columns are read: a log-softmax may overshoot 0 by rounding
    is_rounded = (batch.sampler > 0) & (batch.sampler <= ROUNDING)
    sampler = torch.where(is_rounded, 0.0, batch.sampler)
    differs = compared & (trainer != sampler)
    computed_again = batch.now is not None and torch.equal(
        batch.now[compared], sampler[compared]
    )
    if not differs.any() and not computed_again:
        raise InputError(f"the {int(compared.sum()):,} tokens are equal, but {TWIN}")
    return _count(batch, compared, differs, (trainer - sampler).abs())


def _is_current(batch: RecordedBatch) -> Tensor:
    """Return which tokens the weights of this step sampled, [B, T]; all where the file
    has no version or step.
    """
    if batch.version is None or batch.step is None:
        return torch.ones_like(batch.mask)
    return batch.lags() <= 0


def _count(
    batch: RecordedBatch, compared: Tensor, differs: Tensor, size: Tensor
) -> ZeroMismatch:
    """Count the tokens that differ, by place, shape and id; the finding names the
    first.

    Args:
        batch: the recorded step.
        compared: the tokens that are compared, [B, T].
        differs: those whose numbers differ, [B, T].
        size: |log ρ|, [B, T].
    """
    assert batch.sampler is not None
    tokens = int(compared.sum())
    rows_off = differs.any(1)
    beyond = {t: float((size[compared] > t).double().mean()) for t in TAILS}
    first = None
    findings: tuple[ReplayFinding, ...] = ()
    if rows_off.any():
        row, token = differs.nonzero()[0].tolist()
        first = (row, token)
        numbers = {
            "differ": int(differs.sum()),
            "tokens": tokens,
            "rows": int(rows_off.sum()),
            "of": int(compared.any(1).sum()),
            "row": row,
            "token": token,
            "mu": float(batch.sampler[row, token]),
            "pi": float(batch.trainer()[row, token]),
            "half": beyond[0.5],
        }
        findings = (ReplayFinding("zero", "failure", "differs", numbers),)
    return ZeroMismatch(
        tokens=tokens,
        differ=int(differs.sum()),
        responses=int(compared.any(1).sum()),
        responses_off=int(rows_off.sum()),
        first=first,
        beyond=beyond,
        quarters=_by_quarter(compared, differs),
        shapes=dict(_by_shape(batch, compared, differs)),
        ids=_by_id(batch.ids, compared, differs),
        findings=findings,
    )


def _share(differs: Tensor, of: Tensor) -> float:
    """Return the share of the tokens `of` [B, T] that differ; 0 where there are none."""
    return float((differs & of).sum()) / max(1, int(of.sum()))


def _by_quarter(compared: Tensor, differs: Tensor) -> tuple[float, ...]:
    """Return the share of the compared tokens that differ, in each quarter of the
    responses by number of compared tokens, the first quarter first.
    """
    order = compared.cumsum(1) - 1
    lengths = compared.sum(1, keepdim=True).clamp(min=1)
    quarter = (QUARTERS * order / lengths).floor()
    return tuple(_share(differs, compared & (quarter == q)) for q in range(QUARTERS))


def _by_shape(
    batch: RecordedBatch, compared: Tensor, differs: Tensor
) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield each shape of a micro-batch, rows and longest row, and the share of its
    tokens that differ, smallest shape first; nothing without the column micro.
    """
    if batch.micro is None:
        return
    number = batch.micro
    if batch.rank is not None:
        number = torch.stack([batch.micro, batch.rank], 1).unique(
            dim=0, return_inverse=True
        )[1]
    lengths = batch.mask.sum(1)
    rows_of_shape: dict[tuple[int, int], Tensor] = {}
    for n in number.unique():
        rows = number == n
        shape = (int(rows.sum()), int(lengths[rows].max()))
        rows_of_shape[shape] = rows_of_shape.get(shape, torch.zeros_like(rows)) | rows
    for shape, rows in sorted(rows_of_shape.items()):
        yield shape, _share(differs, compared & rows[:, None])


def _by_id(
    ids: Tensor, compared: Tensor, differs: Tensor
) -> dict[int, tuple[int, int]]:
    """Return, for the MOST_IDS token ids that differ most often, how many tokens differ
    and how many are compared.
    """
    kinds, counts = ids[differs].unique(return_counts=True)
    most = counts.argsort(descending=True, stable=True)[:MOST_IDS].tolist()
    return {
        int(kinds[i]): (int(counts[i]), int((compared & (ids == kinds[i])).sum()))
        for i in most
    }
