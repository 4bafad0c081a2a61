# SPDX-License-Identifier: Apache-2.0
"""The gap over the steps of a run: does it follow the lag of the weights, or only the
steps?

Weights that never reach the engine leave its policy where it was, so the gap grows with
the distance that the trainer moves. Weights that arrive late leave a gap that depends
on the lag alone. Only the column of the reference model, where that holds the weights
of the start, undoes the first case; a trend is a signature.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import torch
from torch import Tensor

from upref.replay.findings import STEPS_NAMED, Checked, ReplayFinding, note
from upref.replay.schema import RecordedBatch
from upref.result import name_first

LEAST_STEPS = 4
UNLIKELY = 0.12  # of as many rising pairs by chance; of five steps, two pairs may fall
GROWTH = 2.0  # times the size at the least lag
LEAST_RISE = 1.4  # times from the first half to the second
LEAST_SIZE = 1e-4  # nats: a smaller gap is rounding
# nats: a mean gap of 0.03 nats. Below it a step may differ from the others by rounding
LEAST_LONE_SIZE = 4.5e-4
STANDS_OUT = 10.0  # times the median of the other steps
JUMP = 3.0  # times the largest gap before
LEAST_BEFORE = 3  # steps before a jump
LEAST_AFTER = 2  # steps after it: one step alone stands out
LEAST_TOKENS = 100  # tokens at a lag
# within which the trainer may still be the reference model; later, the reference moved
FIRST_STEPS = 10


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
    """Measure what the series needs of a step, so that the step need not stay in
    memory.

    Args:
        batch: of one step, with the column sampler.
        position: of the step in the series, its number where the file has none.
    """
    assert batch.sampler is not None
    drawn = batch.mask & batch.sampler.isfinite()
    squares = _half_squares(batch.beside_sampler() - batch.sampler)
    ref_size = None
    if batch.ref is not None:
        ref_size = float(_half_squares(batch.ref - batch.sampler)[drawn].mean())
    lags: dict[int, tuple[int, float]] = {}
    if batch.version is not None and batch.step is not None:
        lag = batch.lags()[drawn]
        for value in lag.unique().tolist():
            chosen = lag == value
            lags[int(value)] = (int(chosen.sum()), float(squares[drawn][chosen].mean()))
    step = batch.step if batch.step is not None else position
    return StepGap(step, float(squares[drawn].mean()), ref_size, lags)


def _half_squares(d: Tensor) -> Tensor:
    """Return min(|d|, 1)² / 2, in the shape of d: capped k2, in nats."""
    return 0.5 * d.clamp(-1, 1) ** 2


def series(steps: Sequence[StepGap]) -> Series:
    """Judge the gap of several steps.

    Args:
        steps: from `measure_step`, in the order of the run.

    Returns:
        The Series, failures before notes; it has no findings for fewer than
        LEAST_STEPS. It is false where the sampler's column stays the reference
        model's although newer weights are recorded as having sampled.
    """
    findings = [*_find_lone_steps(steps), *_find_trend(steps)]
    failures_first = sorted(findings, key=lambda f: f.severity)
    return Series(steps=tuple(steps), findings=tuple(failures_first))


def _find_lone_steps(steps: Sequence[StepGap]) -> Iterator[ReplayFinding]:
    """Yield at most two notes: from which step on the gap is larger than before, and
    which earlier steps have a gap that stands out. Nothing for fewer than LEAST_STEPS.
    """
    if len(steps) < LEAST_STEPS:
        return
    sizes = torch.tensor([s.size for s in steps], dtype=torch.float64)
    start = _start_of_jump(sizes)
    if start is not None:
        before = float(sizes[:start].max())
        after = float(sizes[start:].min())
        yield note(
            "series",
            "jumps",
            since=steps[start].step,
            until=steps[start - 1].step,
            before=before,
            after=after,
        )
    stands_out = _stands_out(sizes)
    if start is not None:
        stands_out[start:] = False
    if not stands_out.any():
        return
    lone = [s.step for s, is_lone in zip(steps, stands_out, strict=True) if is_lone]
    yield note(
        "series",
        "stands_out",
        lone=len(lone),
        of=len(steps),
        named=name_first(lone, STEPS_NAMED),
        least=float(sizes[stands_out].min()),
        median=float(sizes[~stands_out].median()),
    )


def _stands_out(sizes: Tensor) -> Tensor:
    """Return which gaps are far above the median of the others, [steps]; none where
    these are more than half of the steps.
    """
    stands_out = torch.zeros(len(sizes), dtype=torch.bool)
    # twice: the second median leaves out the large ones that the first one found
    for _ in range(2):
        median = sizes[~stands_out].median()
        stands_out = sizes > max(STANDS_OUT * float(median), LEAST_LONE_SIZE)
    if int(stands_out.sum()) > len(sizes) // 2:
        return torch.zeros_like(stands_out)
    return stands_out


def _start_of_jump(sizes: Tensor) -> int | None:
    """Return the index of the step from which on each gap is more than JUMP times each
    one before; of several, the one with the largest jump; None where there is none. At
    least LEAST_BEFORE steps are before it, and LEAST_AFTER from it on.
    """
    best = None
    largest = JUMP
    for start in range(LEAST_BEFORE, len(sizes) - LEAST_AFTER + 1):
        before = float(sizes[:start].max())
        after = float(sizes[start:].min())
        if after > LEAST_LONE_SIZE and after > largest * before:
            best = start
            largest = after / before if before else math.inf
    return best


def _find_trend(steps: Sequence[StepGap]) -> Iterator[ReplayFinding]:
    """Yield one finding on how the gap grows, or none. The first of these that applies
    is it: the sampler is the reference; the gap follows the lag within steps; it grows
    at one lag; it grows and one version sampled everything; it follows the lag; it
    grows.
    """
    sizes = [s.size for s in steps]
    if len(sizes) < LEAST_STEPS:
        return
    numbers: dict[str, Any] = {
        "first": sizes[0],
        "last": sizes[-1],
        "steps": len(sizes),
    }
    if _is_reference(steps) and len(_versions(steps)) > 1:
        yield ReplayFinding("series", "failure", "never_delivered", numbers)
    elif _is_reference(steps):
        yield note("series", "stays_reference", **numbers)
    elif (by_lag := _sizes_by_lag_in_steps(steps)) is not None:
        yield note("series", "follows_lag", **by_lag)
    elif (lag := _growing_lag(steps)) is not None:
        yield note("series", "grows_at_one_lag", lag=lag, **numbers)
    elif len(versions := _versions(steps)) == 1 and _grows(sizes):
        yield note("series", "one_version", version=versions.pop(), **numbers)
    elif (by_lag := _sizes_by_lag(steps)) is not None:
        yield note("series", "follows_lag", **by_lag)
    elif _grows(sizes):
        yield note("series", "grows_with_steps", **numbers)


def _is_reference(steps: Sequence[StepGap]) -> bool:
    """Return whether the sampler's column is that of the reference model, from which
    the trainer moves away: at each step from the first with a gap on, but for the first
    of the run, its gap to the reference is below a tenth of that to the trainer, and
    the latter rises.

    A reference that follows the policy, as where each iteration begins with the policy
    as its reference, brings the gap back to 0; and its first step may be any step of
    the run.
    """
    # index of the first step with a gap
    away = next((n for n, s in enumerate(steps) if s.size > LEAST_SIZE), len(steps))
    # without a gap at first, the run must begin where the reference is still the
    # trainer
    if away > 0 and steps[0].step > FIRST_STEPS:
        return False
    later = steps[max(1, away) :]
    if len(later) < LEAST_STEPS - 1:
        return False
    for s in later:
        is_at_reference = s.ref_size is not None and s.ref_size < 0.1 * s.size
        if not is_at_reference:
            return False
    sizes = [s.size for s in later]
    return min(sizes) > LEAST_SIZE and _rises(sizes)


def _grows(sizes: Sequence[float]) -> bool:
    """Return whether the later steps have the larger gaps, by Kendall's test on all
    steps but the first.

    The first one may be before any update, where the gap is rounding: from there to the
    second it grows in any run that is late at all.
    """
    if len(sizes) < LEAST_STEPS:
        return False
    return _rises(sizes[1:]) and sizes[-1] > LEAST_SIZE


def _rises(sizes: Sequence[float]) -> bool:
    """Return whether later numbers are larger than earlier ones, by Kendall's test and
    by the sums of the two halves. Ties count as falling.
    """
    pairs = [(a, b) for i, a in enumerate(sizes) for b in sizes[i + 1 :]]
    falling = sum(b <= a for a, b in pairs)
    is_unlikely = _probability_of_order(len(sizes), falling) < UNLIKELY
    return is_unlikely and _is_second_half_larger(sizes)


def _is_second_half_larger(sizes: Sequence[float]) -> bool:
    """Return whether the second half sums to more than LEAST_RISE times the first half;
    the middle one of an odd number does not count.
    """
    half = len(sizes) // 2
    return sum(sizes[-half:]) > LEAST_RISE * sum(sizes[:half])


def _probability_of_order(n: int, falling: int) -> float:
    """Return the probability that a random order of n different numbers has at most
    `falling` falling pairs.
    """
    # probabilities[k]: that the first `size` numbers have k falling pairs. One more
    # number falls below 0 to size - 1 of those before it, with equal probabilities.
    probabilities = [1.0]
    for size in range(2, n + 1):
        longer = [0.0] * (len(probabilities) + size - 1)
        for pairs, probability in enumerate(probabilities):
            for more in range(size):
                longer[pairs + more] += probability / size
        probabilities = longer
    return sum(probabilities[: falling + 1]) if falling < comb(n, 2) else 1.0


def _sizes_by_lag(steps: Sequence[StepGap]) -> dict[str, float] | None:
    """Return the numbers of the note "follows_lag": the least and the largest lag with
    LEAST_TOKENS tokens, and the mean gap there. None where these are one lag, or the
    gap at the largest is not GROWTH times that at the least.
    """
    tokens: dict[int, int] = {}
    sums: dict[int, float] = {}
    for s in steps:
        for lag, (count, size) in s.lags.items():
            tokens[lag] = tokens.get(lag, 0) + count
            sums[lag] = sums.get(lag, 0.0) + count * size
    lags = sorted(lag for lag, count in tokens.items() if count >= LEAST_TOKENS)
    if len(lags) < 2:
        return None
    least, most = lags[0], lags[-1]
    low = sums[least] / tokens[least]
    high = sums[most] / tokens[most]
    if high > GROWTH * low:
        return {"least": least, "most": most, "low": low, "high": high}
    return None


def _sizes_by_lag_in_steps(steps: Sequence[StepGap]) -> dict[str, float] | None:
    """Return `_sizes_by_lag` of the steps that have tokens of several lags: what grows
    with the steps does not enter.
    """
    return _sizes_by_lag([s for s in steps if len(s.lags) > 1])


def _growing_lag(steps: Sequence[StepGap]) -> int | None:
    """Return the lag that most steps have, the first left out, where the gap grows from
    step to step at that lag; None where it does not, or fewer than LEAST_STEPS - 1
    steps have it.
    """
    sizes: dict[int, list[float]] = {}
    for s in steps[1:]:
        for lag, (count, size) in s.lags.items():
            if count >= LEAST_TOKENS:
                sizes.setdefault(lag, []).append(size)
    if not sizes:
        return None
    lag, sizes_at_lag = max(sizes.items(), key=lambda item: len(item[1]))
    enough = len(sizes_at_lag) >= LEAST_STEPS - 1 and sizes_at_lag[-1] > LEAST_SIZE
    if enough and _rises(sizes_at_lag):
        return lag
    return None


def _versions(steps: Sequence[StepGap]) -> set[int]:
    """Return the steps of the weights that sampled, as they were recorded; empty where
    the files of a step do not tell.
    """
    if not all(s.lags for s in steps):
        return set()
    return {s.step - lag for s in steps for lag in s.lags}


def ratio_one(batch: RecordedBatch) -> ReplayFinding | None:
    """Return the note that r = 1 on every token although older weights sampled all of
    them: old was computed again with the current ones. None where this is not so, or
    where a column that tells is missing: now, old, version, or the number of the step.

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
    lags = batch.lags()[batch.mask]
    lag, most = int(lags.min()), int(lags.max())
    if lag < 1 or not torch.equal(batch.now, batch.old):
        return None
    if most > lag:
        numbers = {"lag": lag, "most": most}
        return ReplayFinding("old", "note", "ratio_one_of_versions", numbers)
    return ReplayFinding("old", "note", "ratio_one", {"lag": lag})
