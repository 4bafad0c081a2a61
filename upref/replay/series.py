# SPDX-License-Identifier: Apache-2.0
"""The gap over the steps of a run: does it follow the lag of the weights, or only the steps?

Weights that never reach the engine leave its policy where it was, so the gap grows with the distance that the trainer
moves. Weights that arrive late leave a gap that depends on the lag alone. Only the column of the reference model, where
that holds the weights of the start, undoes the first case; a trend is a signature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import torch

from upref.replay.findings import Checked, Finding
from upref.replay.gap import LARGE_EXPONENT, Gap
from upref.replay.schema import RecordedBatch

LEAST_STEPS = 4
UNLIKELY = 0.05  # of as many rising pairs by chance
GROWTH = 2.0  # times: a gap that less than doubles is steady


@dataclass(frozen=True)
class StepGap:
    """The gap of one step, in what a series needs of it.

    Args:
        step: its number.
        k3: estimate of KL(μ || π_old) in nats.
        ref_k3: the same against the reference model, None without the column ref.
        lags: lag of the weights that sampled -> (tokens, k3); empty without the columns version and step.
    """

    step: int
    k3: float
    ref_k3: float | None
    lags: dict[int, tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Series(Checked):
    """The gap over the steps, in order."""

    steps: tuple[StepGap, ...]


def measure_step(batch: RecordedBatch, gap: Gap, position: int) -> StepGap:
    """What the series keeps of a step; position counts the steps where the file has no number."""
    assert batch.sampler is not None
    drawn = batch.mask & batch.sampler.isfinite()
    d = (batch.trainer() - batch.sampler).clamp(max=LARGE_EXPONENT)
    k3 = d.expm1() - d
    ref_k3 = None
    if batch.ref is not None:
        against = (batch.ref - batch.sampler)[drawn].clamp(max=LARGE_EXPONENT)
        ref_k3 = float((against.expm1() - against).mean())
    lags: dict[int, tuple[int, float]] = {}
    if batch.version is not None and batch.step is not None:
        lag = (batch.step - batch.version)[:, None].expand_as(drawn)[drawn]
        for value in lag.unique().tolist():
            chosen = lag == value
            lags[int(value)] = (int(chosen.sum()), float(k3[drawn][chosen].mean()))
    return StepGap(batch.step if batch.step is not None else position, gap.k3, ref_k3, lags)


def series(steps: Sequence[StepGap]) -> Series:
    """Judge the gap of several steps.

    Args:
        steps: from `measure_step`, in the order of the run.

    Returns:
        The Series. It is false where the reference model's column shows that the engine kept its first weights.
    """
    findings: list[Finding] = []
    k3 = [s.k3 for s in steps]
    grows = _grows(k3)
    numbers = {"first": k3[0], "last": k3[-1], "steps": len(k3)} if k3 else {}
    undone = [s for s in steps if s.ref_k3 is not None and s.ref_k3 < 0.1 * s.k3]
    later = [s for s in steps[1:] if s.k3 > 1e-4]
    if grows and len(later) >= LEAST_STEPS - 1 and len(undone) >= 0.9 * len(later):
        findings.append(Finding("series", "failure", "never_delivered", numbers))
    elif (by_lag := _by_lag(steps)) is not None:
        findings.append(Finding("series", "note", "follows_lag", by_lag))
    elif grows:
        findings.append(Finding("series", "note", "grows_with_steps", numbers))
    return Series(steps=tuple(steps), findings=tuple(findings))


def _grows(k3: Sequence[float]) -> bool:
    """Whether the later steps have the larger gaps, by Kendall's test on all steps but the first.

    The first one may be before any update, where the gap is rounding: from there to the second it grows in any run
    that is late at all.
    """
    if len(k3) < LEAST_STEPS:
        return False
    rest = k3[1:]
    pairs = [(a, b) for i, a in enumerate(rest) for b in rest[i + 1 :]]
    falling = sum(b <= a for a, b in pairs)
    return _chance(len(rest), falling) < UNLIKELY and rest[-1] > GROWTH * rest[0] and rest[-1] > 1e-4


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
    """The mean k3 at the least and the largest lag, where it rises with the lag; None where lags do not differ."""
    tokens: dict[int, int] = {}
    sums: dict[int, float] = {}
    for s in steps:
        for lag, (count, k3) in s.lags.items():
            tokens[lag] = tokens.get(lag, 0) + count
            sums[lag] = sums.get(lag, 0.0) + count * k3
    lags = sorted(lag for lag, count in tokens.items() if count >= 100)
    if len(lags) < 2:
        return None
    low, high = (sums[lag] / tokens[lag] for lag in (lags[0], lags[-1]))
    return {"least": lags[0], "most": lags[-1], "low": low, "high": high} if high > GROWTH * low else None


def ratio_one(batch: RecordedBatch) -> Finding | None:
    """r = 1 on every token of data that older weights sampled: old was computed again with the current ones."""
    if batch.now is None or batch.old is None or batch.version is None or batch.step is None:
        return None
    lag = int((batch.step - batch.version).min())
    if lag < 1 or not torch.equal(batch.now, batch.old):
        return None
    return Finding("old", "note", "ratio_one", {"lag": lag})
