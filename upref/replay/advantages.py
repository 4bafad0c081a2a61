# SPDX-License-Identifier: Apache-2.0
"""Which estimator, over which groups of responses, gives the recorded advantages from
the recorded rewards.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from upref import advantages as estimators
from upref.errors import InputError
from upref.replay.findings import Checked, ReplayFinding, Severity, note
from upref.replay.schema import PROMPTS_READ, RecordedBatch, expect_batch
from upref.rollouts import one_per_response, per_response

EPSILONS = (1e-6, 1e-8, 1e-4)  # verl, others, TRL
# A column of float32 repeats an estimator to a few units in the last place, a column of
# bfloat16 to 2^-8.
TOLERANCE = 2e-5
TOLERANCE_BFLOAT16 = 2**-7
LEAST = 3  # responses with an advantage: fewer fit anything


@dataclass(frozen=True, kw_only=True)
class Advantages(Checked):
    """How the advantages were made.

    Args:
        estimator: name and settings; "" if none fits.
        grouping: over which responses; "" if none fits.
        error: largest difference, in units of the largest advantage.
        also: further estimators that fit this batch as well.
    """

    estimator: str
    grouping: str
    error: float
    also: tuple[str, ...] = ()


def advantages(batch: RecordedBatch) -> Advantages:
    """Name the estimator and the grouping that reproduce the recorded advantages.

    Args:
        batch: with the columns adv and reward; with group, the prompts' own grouping is
            tried first.

    Returns:
        The answer. It is false where an estimator fits over groups that mix prompts,
        and none fits over the prompts.

    Raises:
        InputError: a column is missing.
    """
    expect_batch(batch, "the check of advantages")
    batch.require("adv", "reward", purpose="the check of advantages")
    batch.expect_whole("group", purpose="the check of advantages")
    assert batch.adv is not None and batch.reward is not None
    trains = batch.mask.any(1)
    if not one_per_response(batch.adv[trains], batch.mask[trains]):
        same = (
            (batch.adv == per_response(batch.adv, batch.mask)[:, None]) | ~batch.mask
        ).all(1)
        differs = note(
            "advantages",
            "per_token",
            rows=int((~same & trains).sum()),
            of=int(trains.sum()),
        )
        return Advantages(estimator="", grouping="", error=1.0, findings=(differs,))
    A = per_response(batch.adv, batch.mask)[trains]
    informative = int((A != 0).sum())
    if informative < LEAST:
        few = note("advantages", "no_signal")
        if informative:
            few = note("advantages", "too_few", responses=informative)
        return Advantages(estimator="", grouping="", error=0.0, findings=(few,))
    tolerance = _tolerance(A)
    for grouping, after in product(_groupings(batch), (_unchanged, _whitened)):
        fits: list[tuple[str, float]] = []
        for name, estimate in grouping.estimators():
            made = _made(estimate, batch.reward, grouping.ids)
            if made is not None:
                suffix, made = after(made, batch.mask)
                error = float((made[trains] - A).abs().max() / A.abs().max())
                if error < tolerance:
                    fits.append((name + suffix, error))
        if fits:
            break
    else:
        return Advantages(
            estimator="", grouping="", error=1.0, findings=(_unknown(batch),)
        )
    (name, error), *others = fits
    also = tuple(other for other, _ in others[:3])
    findings = _judged(batch, name, grouping)
    return Advantages(
        estimator=name,
        grouping=grouping.name,
        error=error,
        also=also,
        findings=findings,
    )


def _judged(
    batch: RecordedBatch, estimator: str, grouping: "Grouping"
) -> tuple[ReplayFinding, ...]:
    """What a grouping other than the prompts' means."""
    if batch.group is None or grouping.name in (PROMPTS, NO_GROUPS):
        return ()
    if grouping.name == WHOLE:
        return (note("advantages", "whole_batch", estimator=estimator),)
    mixed = sum(
        len(batch.group[grouping.ids == g].unique()) > 1 for g in grouping.ids.unique()
    )
    numbers = {
        "estimator": estimator,
        "grouping": grouping.name,
        "mixed": mixed,
        "groups": len(grouping.ids.unique()),
    }
    if mixed and _of_rewards_alone(batch):
        return (note("advantages", "fixed_baseline", **numbers),)
    if mixed:
        severity: Severity = "failure" if _certain_groups(batch) else "note"
        return (ReplayFinding("advantages", severity, "wrong_grouping", numbers),)
    return (
        note("advantages", "subgroups", estimator=estimator, grouping=grouping.name),
    )


def _of_rewards_alone(batch: RecordedBatch) -> bool:
    """Whether the advantages are a (R - b) with the same a and b in all responses: then
    no grouping is told from a fixed baseline.
    """
    assert batch.adv is not None and batch.reward is not None
    trains = batch.mask.any(1)
    A = per_response(batch.adv, batch.mask)[trains]
    R = batch.reward[trains]
    line = torch.stack([R, torch.ones_like(R)], 1)
    off = A - line @ torch.linalg.lstsq(line, A[:, None]).solution[:, 0]
    return bool(off.abs().max() < _tolerance(A) * A.abs().max())


def _tolerance(A: Tensor) -> float:
    """How far, in units of the largest, rounding moves advantages of this type."""
    coarse = bool((A.bfloat16().double() == A).all())
    return TOLERANCE_BFLOAT16 if coarse else TOLERANCE


def _unknown(batch: RecordedBatch) -> ReplayFinding:
    """No estimator gives the advantages: of groups that are not whole here, perhaps, or
    of any.
    """
    if batch.group is not None:
        _, sizes = batch.group.unique(return_counts=True)
        low = int(sizes.min())
        high = int(sizes.max())
        if low < high:
            return note("advantages", "split_groups", low=low, high=high)
    return note("advantages", "no_estimator")


def _certain_groups(batch: RecordedBatch) -> bool:
    """Whether the groups are sure to be the prompts.

    A reader takes responses with equal prompts for a group. Where an agent varies the
    prompt, such groups have several sizes.
    """
    assert batch.group is not None
    _, sizes = batch.group.unique(return_counts=True)
    return PROMPTS_READ not in batch.meta or bool(
        ((sizes == sizes[0]) & (sizes > 1)).all()
    )


def _unchanged(A: Tensor, mask: Tensor) -> tuple[str, Tensor]:
    return "", A


def _whitened(A: Tensor, mask: Tensor) -> tuple[str, Tensor]:
    """The advantages [B] of responses, whitened over their tokens."""
    white = estimators.whiten_tokens(A[:, None].expand_as(mask).contiguous(), mask)
    return ", whitened over tokens", per_response(white, mask)


Estimate = Callable[[Tensor, Tensor], Tensor]
PROMPTS = "each prompt"
NO_GROUPS = "no group"
WHOLE = "the whole batch"


@dataclass(frozen=True)
class Grouping:
    """A way to group the responses, and the estimators to try on it."""

    name: str
    ids: Tensor
    estimators: Callable[[], Iterator[tuple[str, Estimate]]]


def _groupings(batch: RecordedBatch) -> Iterator[Grouping]:
    """The prompts' own, none, then runs of n consecutive rows, ranks, micro-batches,
    and the whole batch as a group.
    """
    n = len(batch.mask)
    rows = torch.arange(n)
    whole = torch.zeros(n, dtype=torch.int64)
    if batch.group is not None:
        yield Grouping(PROMPTS, batch.group, _of_groups)
    yield Grouping(NO_GROUPS, whole, _of_no_group)
    for size in range(2, n):
        if n % size == 0:
            yield Grouping(f"{size} consecutive rows", rows // size, _of_groups)
    for name, column in (("each rank", batch.rank), ("each micro-batch", batch.micro)):
        if column is not None and len(column.unique()) > 1:
            yield Grouping(name, column, _of_groups)
    yield Grouping(WHOLE, whole, _of_groups)


def _of_groups() -> Iterator[tuple[str, Estimate]]:
    """Estimators that compare a response with its group. The simplest name comes first
    where several agree.
    """
    yield "group_mean", estimators.group_mean
    for ddof in (1, 0):
        for eps in EPSILONS:
            yield (
                f"group_norm(ddof={ddof}, eps={eps:g})",
                partial(estimators.group_norm, ddof=ddof, eps=eps),
            )
    yield "leave_one_out", estimators.leave_one_out
    yield "leave_one_out over the standard deviation of the others", _over_std_of_others
    for eps in EPSILONS:
        name = f"group_mean over the standard deviation of all rewards (ddof=1, eps={eps:g})"
        yield name, partial(_over_std_of_all, eps=eps)
    for ddof in (0, 1):
        for eps in EPSILONS:
            name = f"group_mean_whiten(ddof={ddof}, eps={eps:g})"
            yield name, partial(estimators.group_mean_whiten, ddof=ddof, eps=eps)


def _of_no_group() -> Iterator[tuple[str, Estimate]]:
    """Estimators that have no groups."""
    yield "reward", estimators.reward
    yield "signed", estimators.signed


def _over_std_of_others(rewards: Tensor, group: Tensor) -> Tensor:
    """(R_i - mean of the others) / (their standard deviation + 1e-6), where that is not
    0: NeMo-RL's default.
    """
    out = torch.zeros_like(rewards)
    for g in group.unique():
        members = (group == g).nonzero()[:, 0]
        n = len(members)
        if n < 3:
            return torch.full_like(rewards, torch.nan)
        R = rewards[members]
        mean = (R.sum() - R) / (n - 1)
        variance = ((R**2).sum() - R**2) / (n - 1) - mean**2
        std = (variance.clamp(min=0) * (n - 1) / (n - 2)).sqrt()
        A = R - mean
        out[members] = torch.where(std > 1e-6, A / (std + 1e-6), A)
    return out


def _over_std_of_all(rewards: Tensor, group: Tensor, eps: float) -> Tensor:
    """(R_i - mean of its group) / (standard deviation of all rewards + eps)."""
    return estimators.group_mean(rewards, group) / (rewards.std() + eps)


def _made(estimate: Estimate, rewards: Tensor, group: Tensor) -> Tensor | None:
    """The estimator's advantages in float64; None where it does not take these rewards."""
    try:
        made = estimate(rewards, group)
    except InputError:
        return None
    return made if bool(made.isfinite().all()) else None
