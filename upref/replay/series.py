# SPDX-License-Identifier: Apache-2.0
"""The gap over the steps of a run: does it follow the lag of the weights, or only the
steps?

Weights that never reach the engine leave its policy where it was, so the gap grows with
the distance that the trainer moves. Weights that arrive late leave a gap that depends
on the lag alone. Only the column of the reference model, where that holds the weights
of the start, undoes the first case; a trend is a signature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from upref.replay.findings import Checked, ReplayFinding
from upref.replay.schema import RecordedBatch

LEAST_STEPS = 4
UNLIKELY = 0.12  # of as many rising pairs by chance; of five steps, two pairs may fall
GROWTH = 2.0  # times the size at the least lag
MOVED = 1.4  # times from the first half to the second
LEAST_SIZE = 1e-4  # nats: a smaller gap is rounding


@dataclass(frozen=True)
class StepGap:
    """The gap of one step, in what a series needs of it.

    Its size is half the mean of min(|log ρ|, 1)², which is KL(μ || π_old) in nats where
    the gap is small, without the heavy tail of other estimates.

    Args:
        step: its number.
        size: of the gap to the trainer.
        ref_size: of the gap to the reference model, None without the column ref.
        lags: lag of the weights that sampled -> (tokens, size); empty without the
            columns version and step.
    """

    step: int
    size: float
    ref_size: float | None
    lags: dict[int, tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Series(Checked):
    """The gap over the steps, in order."""

    steps: tuple[StepGap, ...]


def measure_step(batch: RecordedBatch, position: int) -> StepGap:
    """What the series keeps of a step; position counts the steps where the file has no
    number.

    Args:
        batch: of one step.
        position: of the step in the series.
    """
    assert batch.sampler is not None
    drawn = batch.mask & batch.sampler.isfinite()
    squares = _half_squares(batch.trainer() - batch.sampler)
    ref_size = None
    if batch.ref is not None:
        ref_size = float(_half_squares(batch.ref - batch.sampler)[drawn].mean())
    lags: dict[int, tuple[int, float]] = {}
    if batch.version is not None and batch.step is not None:
        lag = (batch.step - batch.version)[:, None].expand_as(drawn)[drawn]
        for value in lag.unique().tolist():
            chosen = lag == value
            lags[int(value)] = (int(chosen.sum()), float(squares[drawn][chosen].mean()))
    step = batch.step if batch.step is not None else position
    return StepGap(step, float(squares[drawn].mean()), ref_size, lags)


def _half_squares(d: Tensor) -> Tensor:
    return 0.5 * d.clamp(-1, 1) ** 2


def series(steps: Sequence[StepGap]) -> Series:
    """Judge the gap of several steps.

    Args:
        steps: from `measure_step`, in the order of the run.

    Returns:
        The Series. It is false where the reference model's column shows that the engine
        kept its first weights.
    """
    findings: list[ReplayFinding] = []
    sizes = [s.size for s in steps]
    numbers = (
        {"first": sizes[0], "last": sizes[-1], "steps": len(sizes)} if sizes else {}
    )
    later = [s for s in steps[1:] if s.size > LEAST_SIZE]
    undone = [s for s in later if s.ref_size is not None and s.ref_size < 0.1 * s.size]
    if (
        len(later) >= LEAST_STEPS - 1
        and len(undone) == len(later)
        and _apart([s.size for s in later])
    ):
        findings.append(ReplayFinding("series", "failure", "never_delivered", numbers))
    elif (by_lag := _by_lag(steps)) is not None:
        findings.append(ReplayFinding("series", "note", "follows_lag", by_lag))
    elif _grows(sizes):
        findings.append(ReplayFinding("series", "note", "grows_with_steps", numbers))
    return Series(steps=tuple(steps), findings=tuple(findings))


def _grows(sizes: Sequence[float]) -> bool:
    """Whether the later steps have the larger gaps, by Kendall's test on all steps but
    the first.

    The first one may be before any update, where the gap is rounding: from there to the
    second it grows in any run that is late at all.
    """
    if len(sizes) < LEAST_STEPS:
        return False
    rest = sizes[1:]
    pairs = [(a, b) for i, a in enumerate(rest) for b in rest[i + 1 :]]
    falling = sum(b <= a for a, b in pairs)
    return (
        _chance(len(rest), falling) < UNLIKELY
        and _apart(rest)
        and rest[-1] > LEAST_SIZE
    )


def _apart(sizes: Sequence[float]) -> bool:
    """Whether the second half is larger than the first half."""
    half = len(sizes) // 2
    return sum(sizes[-half:]) > MOVED * sum(sizes[:half])


def _chance(n: int, falling: int) -> float:
    """Probability that a random order of n numbers has at most so many falling pairs."""
    ways = [1.0]
    for size in range(2, n + 1):
        total = [0.0] * (len(ways) + size - 1)
        for number, count in enumerate(ways):
            for more in range(size):
                total[number + more] += count / size
        ways = total
    return sum(ways[: falling + 1]) if falling < comb(n, 2) else 1.0


def _by_lag(steps: Sequence[StepGap]) -> dict[str, float] | None:
    """The mean size at the least and the largest lag, where it rises with the lag; None
    where lags do not differ.
    """
    tokens: dict[int, int] = {}
    sums: dict[int, float] = {}
    for s in steps:
        for lag, (count, size) in s.lags.items():
            tokens[lag] = tokens.get(lag, 0) + count
            sums[lag] = sums.get(lag, 0.0) + count * size
    lags = sorted(lag for lag, count in tokens.items() if count >= 100)
    if len(lags) < 2:
        return None
    low, high = (sums[lag] / tokens[lag] for lag in (lags[0], lags[-1]))
    return (
        {"least": lags[0], "most": lags[-1], "low": low, "high": high}
        if high > GROWTH * low
        else None
    )


def ratio_one(batch: RecordedBatch) -> ReplayFinding | None:
    """r = 1 on every token of data that older weights sampled: old was computed again
    with the current ones.

    Args:
        batch: of one step.
    """
    if (
        batch.now is None
        or batch.old is None
        or batch.version is None
        or batch.step is None
    ):
        return None
    lag = int((batch.step - batch.version).min())
    if lag < 1 or not torch.equal(batch.now, batch.old):
        return None
    return ReplayFinding("old", "note", "ratio_one", {"lag": lag})
