# SPDX-License-Identifier: Apache-2.0
"""Which estimator, over which groups of responses, gives the recorded advantages from
the recorded rewards.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from upref import advantages as estimators
from upref.errors import InputError
from upref.replay.findings import Checked, ReplayFinding, Severity, note
from upref.replay.schema import PROMPTS_READ, RecordedBatch, expect_batch
from upref.replay.terms import USUAL_MULTIPLES, join_names
from upref.rollouts import one_per_response, per_response

EPSILONS = (1e-6, 1e-8, 1e-4)  # verl, others, TRL
# A column of float32 repeats an estimator to a few units in the last place, a column of
# bfloat16 to 2^-8, one of float16 to 2^-11.
TOLERANCE = 2e-5
TOLERANCE_BFLOAT16 = 2**-7
TOLERANCE_FLOAT16 = 2**-10
LEAST_RESPONSES = 3  # responses with an advantage: fewer fit anything
# The same, of advantages with the other sign or of other rows: rewards of 0 and 1 give two
# values, and so many of two values are in one order by chance with probability 2^-12
LEAST_MOVED = 12
# sizes of advantages that are equal in another order: fewer are so by chance
LEAST_SIZES = 4
# of advantages [B] and the lengths of their responses: the end of a name, and the result
Transform = Callable[[Tensor, Tensor], tuple[str, Tensor]]


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
        The first grouping over which an estimator fits, and its first estimator that
        does. It is false where that grouping mixes prompts and nothing else explains
        it, and where the advantages have the other sign or are those of other
        responses. No estimator is named where advantages differ within a response, are
        all 0, or fewer than LEAST_RESPONSES are not: a finding says so.

    Raises:
        InputError: a column is missing.
    """
    expect_batch(batch, "the check of advantages")
    batch.require("adv", "reward", purpose="the check of advantages")
    batch.expect_whole("group", purpose="the check of advantages")
    assert batch.adv is not None and batch.reward is not None
    trains = batch.mask.any(1)
    if not one_per_response(batch.adv[trains], batch.mask[trains]):
        return _without_estimator(1.0, _finding_per_token(batch))
    A = per_response(batch.adv, batch.mask)[trains]
    informative = int((A != 0).sum())
    if not informative:
        why = _why_no_advantage(batch)
        return _without_estimator(0.0, note("advantages", "no_signal", why=why))
    if informative < LEAST_RESPONSES:
        too_few = note("advantages", "too_few", responses=informative)
        return _without_estimator(0.0, too_few)
    for grouping in _possible_groupings(batch):
        estimates = _estimates_of(grouping, batch.reward)
        for transform in TRANSFORMS:
            fits = _fitting_estimators(batch, A, estimates, transform)
            if fits:
                (name, error), *others = fits
                return Advantages(
                    estimator=name,
                    grouping=grouping.name,
                    error=error,
                    also=tuple(other for other, _ in others[:3]),
                    findings=_grouping_findings(batch, name, grouping),
                )
    return _without_estimator(1.0, _undo_mistake(batch, A) or _no_estimator(batch))


def _without_estimator(error: float, finding: ReplayFinding) -> Advantages:
    """Return the Advantages with no estimator; the finding says why."""
    return Advantages(estimator="", grouping="", error=error, findings=(finding,))


def _why_no_advantage(batch: RecordedBatch) -> str:
    """Say in words why all advantages are 0: all rewards equal, one response a prompt,
    or equal rewards within each prompt; else that the rewards differ.
    """
    assert batch.reward is not None
    R = batch.reward
    if bool((R == R[0]).all()):
        return f"all rewards are {float(R[0]):g}"
    if batch.group is None:
        return "although the rewards differ"
    prompts = [R[batch.group == number] for number in batch.group.unique()]
    if all(len(own) == 1 for own in prompts):
        return (
            "each prompt has one response, which a group-relative estimator compares with "
            "itself"
        )
    differ = sum(bool((own != own[0]).any()) for own in prompts)
    if not differ:
        return "the rewards of each prompt are equal"
    return f"although the rewards of {differ} of {len(prompts)} prompts differ"


def _finding_per_token(batch: RecordedBatch) -> ReplayFinding:
    """Return the note on responses whose tokens have several advantages."""
    assert batch.adv is not None
    trains = batch.mask.any(1)
    equals_first = batch.adv == per_response(batch.adv, batch.mask)[:, None]
    is_constant = (equals_first | ~batch.mask).all(1)
    return note(
        "advantages",
        "per_token",
        rows=int((~is_constant & trains).sum()),
        of=int(trains.sum()),
    )


def _fitting_estimators(
    batch: RecordedBatch,
    A: Tensor,
    estimates: list[tuple[str, Tensor]],
    transform: Transform,
) -> list[tuple[str, float]]:
    """Return the estimators that reproduce the recorded advantages to rounding: their
    names, and their errors in units of the largest advantage, in the order of
    `estimates`.

    Args:
        batch: the recorded step.
        A: the advantages of the responses that train.
        estimates: the names of estimators, and what they give, [B].
        transform: one of TRANSFORMS. Its words are added to the names.
    """
    trains = batch.mask.any(1)
    lengths = batch.mask.sum(1)
    tolerance = _tolerance(A)
    fits = []
    for name, estimated in estimates:
        suffix, changed = transform(estimated, lengths)
        error = float((changed[trains] - A).abs().max() / A.abs().max())
        if error < tolerance:
            fits.append((name + suffix, error))
    return fits


def _grouping_findings(
    batch: RecordedBatch, estimator: str, grouping: "Grouping"
) -> tuple[ReplayFinding, ...]:
    """Return the findings on the grouping that fits: none where it is the prompts' own
    and no responses seem to be missing, where it needs no groups, or where the prompts
    are not recorded.

    A grouping that mixes prompts is a failure, or a note where the groups of the file
    may not be the prompts.
    """
    if batch.group is None or grouping.name == NO_GROUPS:
        return ()
    if grouping.name == PROMPTS:
        return _rests_of_prompts(batch, estimator)
    if grouping.name == WHOLE:
        return (note("advantages", "whole_batch", estimator=estimator),)
    mixed = sum(
        len(batch.group[grouping.ids == number].unique()) > 1
        for number in grouping.ids.unique()
    )
    numbers = {
        "estimator": estimator,
        "grouping": grouping.name,
        "mixed": mixed,
        "groups": len(grouping.ids.unique()),
    }
    if mixed and _is_line_of_rewards(batch):
        return (note("advantages", "fixed_baseline", **numbers),)
    if mixed:
        severity: Severity = "failure" if _groups_are_prompts(batch) else "note"
        return (ReplayFinding("advantages", severity, "wrong_grouping", numbers),)
    return (
        note("advantages", "subgroups", estimator=estimator, grouping=grouping.name),
    )


LEAST_RESTS = 2  # prompts that lack responses: one may have equal rewards by chance


def _rests_of_prompts(
    batch: RecordedBatch, estimator: str
) -> tuple[ReplayFinding, ...]:
    """Return one note where all prompts with fewer responses than the largest have
    equal rewards, and some of the largest have not: the responses that differed may
    have been dropped. Return () otherwise, or where there are fewer than LEAST_RESTS
    such prompts or one of them has a single response.
    """
    assert batch.group is not None and batch.reward is not None
    rewards = [batch.reward[batch.group == number] for number in batch.group.unique()]
    size = max(map(len, rewards))
    rests = [own for own in rewards if len(own) < size]
    wholes = [own for own in rewards if len(own) == size]
    if len(rests) < LEAST_RESTS or any(len(own) == 1 for own in rests):
        return ()
    rests_are_equal = all(bool((own == own[0]).all()) for own in rests)
    some_wholes_differ = any(bool((own != own[0]).any()) for own in wholes)
    if not (rests_are_equal and some_wholes_differ):
        return ()
    return (
        note(
            "advantages",
            "rests_of_prompts",
            estimator=estimator,
            rests=len(rests),
            prompts=len(rewards),
            size=size,
        ),
    )


def _is_line_of_rewards(batch: RecordedBatch) -> bool:
    """Return whether the advantages are a (R - b) with the same a and b in all
    responses.

    Then a fixed baseline gives them as well as any grouping.
    """
    assert batch.adv is not None and batch.reward is not None
    trains = batch.mask.any(1)
    A = per_response(batch.adv, batch.mask)[trains]
    R = batch.reward[trains]
    line = torch.stack([R, torch.ones_like(R)], 1)
    off = A - line @ torch.linalg.lstsq(line, A[:, None]).solution[:, 0]
    return bool(off.abs().max() < _tolerance(A) * A.abs().max())


def _tolerance(A: Tensor) -> float:
    """Return the error that rounding may make, relative to the largest advantage: more
    where all advantages are bfloat16 numbers, or float16 numbers.
    """
    if (A.bfloat16().double() == A).all():
        return TOLERANCE_BFLOAT16
    return TOLERANCE_FLOAT16 if (A.half().double() == A).all() else TOLERANCE


def _no_estimator(batch: RecordedBatch) -> ReplayFinding:
    """Return the note that no estimator gives the advantages. Where groups differ in
    size, some may not be whole in this file.
    """
    if batch.group is not None:
        _, sizes = batch.group.unique(return_counts=True)
        low = int(sizes.min())
        high = int(sizes.max())
        if low < high:
            return note("advantages", "split_groups", low=low, high=high)
    return note("advantages", "no_estimator")


def _groups_are_prompts(batch: RecordedBatch) -> bool:
    """Return whether the groups are sure to be the prompts.

    They are where the file states them. A reader that has only the prompts' tokens
    (PROMPTS_READ) takes responses with equal prompts for a group; where an agent varies
    the prompt, such groups have several sizes, or one response.
    """
    assert batch.group is not None
    _, sizes = batch.group.unique(return_counts=True)
    if PROMPTS_READ not in batch.meta:
        return True
    return bool(((sizes == sizes[0]) & (sizes > 1)).all())


def _leave_unchanged(A: Tensor, lengths: Tensor) -> tuple[str, Tensor]:
    """Return the end of the estimator's name, which is empty, and the same advantages."""
    return "", A


def _whiten(A: Tensor, lengths: Tensor, ddof: int = 1) -> tuple[str, Tensor]:
    """Return the end of the estimator's name, and the advantages [B] whitened over
    tokens: less their mean, over their standard deviation.

    With ddof 1 it is `upref.advantages.whiten_tokens` of advantages that the tokens of a
    response share: the advantage of a response of n tokens counts n times. OpenRLHF has
    ddof 0: it divides the squares by the number of tokens, not by one less.

    Args:
        A: advantages, [B].
        lengths: number of trained tokens of each response, [B].
        ddof: subtracted from the number of tokens in the variance.
    """
    tokens = lengths.sum()
    centered = A - (lengths * A).sum() / tokens
    variance = (lengths * centered**2).sum() / (tokens - ddof)
    name = ", whitened over tokens" if ddof else ", whitened over tokens (ddof=0)"
    return name, centered / (variance + 1e-8).sqrt()


Estimate = Callable[[Tensor, Tensor], Tensor]
TRANSFORMS: tuple[Transform, ...] = (
    _leave_unchanged,
    _whiten,
    partial(_whiten, ddof=0),
)
# responses of consecutive groups that are tried with a shorter last one, where the
# prompts have different numbers of responses
LARGEST_WITH_REST = 16
PROMPTS = "each prompt"
NO_GROUPS = "no group"
WHOLE = "the whole batch"


@dataclass(frozen=True)
class Grouping:
    """A way to group the responses, and the estimators to try on it.

    Attributes:
        name: in words.
        ids: the group of each response, [B].
        estimators: yields the names and functions of estimators.
        is_usual: whether trainers group like this: by prompts, by consecutive rows where
            the prompts are not known, or not at all.
    """

    name: str
    ids: Tensor
    estimators: Callable[[], Iterator[tuple[str, Estimate]]]
    is_usual: bool = False


def _possible_groupings(batch: RecordedBatch) -> Iterator[Grouping]:
    """Yield the ways to group the responses, in the order in which they are tried: by
    prompts, not at all, by consecutive rows, by rows at one distance, by ranks, by
    micro-batches, and the whole batch as one group. What is not recorded is left out.

    Sizes divide the number of responses; where prompts have different numbers of
    responses, groups up to LARGEST_WITH_REST rows may leave a smaller last one.
    """
    count = len(batch.mask)
    rows = torch.arange(count)
    one_group = torch.zeros(count, dtype=torch.int64)
    if batch.group is not None:
        yield Grouping(PROMPTS, batch.group, _group_estimators, is_usual=True)
    yield Grouping(NO_GROUPS, one_group, _estimators_without_groups, is_usual=True)
    has_rest = batch.group is not None and _have_other_sizes(batch.group)
    for size in range(2, count):
        if count % size == 0 or (has_rest and size <= LARGEST_WITH_REST):
            yield Grouping(
                f"{size} consecutive rows",
                rows // size,
                _group_estimators,
                is_usual=batch.group is None,
            )
    for step in range(2, count):
        if count % step == 0:
            name = f"rows that stand {step} apart"
            yield Grouping(name, rows % step, _group_estimators)
    for name, column in (("each rank", batch.rank), ("each micro-batch", batch.micro)):
        if column is not None and len(column.unique()) > 1:
            yield Grouping(name, column, _group_estimators)
    yield Grouping(WHOLE, one_group, _group_estimators)


def _have_other_sizes(group: Tensor) -> bool:
    """Return whether the groups have different numbers of responses."""
    return len(group.unique(return_counts=True)[1].unique()) > 1


def _group_estimators() -> Iterator[tuple[str, Estimate]]:
    """Yield the names and functions of estimators that compare a response with its
    group, the simplest first.
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


def _estimators_without_groups() -> Iterator[tuple[str, Estimate]]:
    """Yield the names and functions of estimators that need no groups."""
    yield "reward", estimators.reward
    yield "signed", estimators.signed


def _undo_mistake(batch: RecordedBatch, A: Tensor) -> ReplayFinding | None:
    """Find whether the advantages are those of an estimator with the other sign, of
    other rows, or times one of USUAL_MULTIPLES; else whether they are those of an
    estimator with some set to 0, or in another order. None where no estimator gives
    them so, or where fewer than LEAST_MOVED are not 0.

    Args:
        batch: the recorded step, whose advantages no estimator gives.
        A: the advantages of the responses that train.
    """
    trains = batch.mask.any(1)
    if int((A != 0).sum()) < LEAST_MOVED:
        return None
    estimates = list(_estimates(batch))
    for name, estimated in estimates:
        finding = _undo_place_or_sign(batch, A, name, estimated)
        if finding is not None:
            return finding
        for factor in USUAL_MULTIPLES:
            if _is_same(factor * estimated[trains], A):
                return note(
                    "advantages", "multiple_advantages", estimator=name, factor=factor
                )
    of_trained = [(name, estimated[trains]) for name, estimated in estimates]
    return _undo_masking(A, of_trained) or _undo_order(A, of_trained)


def _undo_place_or_sign(
    batch: RecordedBatch, A: Tensor, name: str, estimated: Tensor
) -> ReplayFinding | None:
    """Find whether the advantages are those that an estimator gives other rows, or have
    the other sign; None where neither is so.

    Args:
        batch: the recorded step.
        A: the advantages of the responses that train.
        name: of the estimator.
        estimated: what it gives all responses, [B].
    """
    trains = batch.mask.any(1)
    ways = []
    for words, changed in _changes_of_place(estimated, batch.group):
        if _is_same(changed[trains], A):
            ways.append(words)
    is_negated = _is_same(-estimated[trains], A)
    if is_negated and not ways:
        numbers = {"estimator": name}
        return ReplayFinding("advantages", "failure", "negated_advantages", numbers)
    if is_negated:
        ways.append("with the other sign")
    if ways:
        numbers = {"estimator": name, "ways": join_names(ways)}
        return ReplayFinding("advantages", "failure", "moved_advantages", numbers)
    return None


def _undo_masking(
    A: Tensor, estimates: list[tuple[str, Tensor]]
) -> ReplayFinding | None:
    """Find whether some advantages are 0, where an estimator's are not, and all others
    are that estimator's; None where this holds for no estimator.

    Args:
        A: the advantages of the responses that train.
        estimates: the names of estimators, and what they give these responses.
    """
    for name, estimated in estimates:
        is_masked = (A == 0) & (estimated.abs() > _tolerance(A) * A.abs().max())
        is_part = bool(is_masked.any()) and not bool(is_masked.all())
        if is_part and _is_same(estimated[~is_masked], A[~is_masked]):
            return note(
                "advantages",
                "masked_advantages",
                estimator=name,
                kept=int((~is_masked).sum()),
                of=len(A),
            )
    return None


def _undo_order(A: Tensor, estimates: list[tuple[str, Tensor]]) -> ReplayFinding | None:
    """Find whether the advantages are those of an estimator, in another order; None
    where they are of none, or have fewer than LEAST_SIZES different sizes.

    Args:
        A: the advantages of the responses that train.
        estimates: the names of estimators, and what they give these responses.
    """
    sizes = A.abs().sort().values
    # sizes that rounding does not make different
    is_other_size = sizes.diff() > 10 * _tolerance(A) * A.abs().max()
    if int(is_other_size.sum()) + 1 < LEAST_SIZES:
        return None
    for name, estimated in estimates:
        if _is_same(estimated.sort().values, A.sort().values):
            numbers = {"estimator": name}
            return ReplayFinding(
                "advantages", "failure", "shuffled_advantages", numbers
            )
    return None


def _is_same(estimated: Tensor, A: Tensor) -> bool:
    """Return whether the estimates are the recorded advantages, to rounding."""
    error = (estimated - A).abs().max() / A.abs().max()
    return bool(error < _tolerance(A))


def _estimates(batch: RecordedBatch) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the advantages [B] of each estimator under each of TRANSFORMS,
    over the groupings that trainers use: the prompts, or consecutive rows where these
    are not known, and no groups.
    """
    assert batch.reward is not None
    lengths = batch.mask.sum(1)
    for grouping in _possible_groupings(batch):
        if not grouping.is_usual:
            continue
        estimates = _estimates_of(grouping, batch.reward)
        for transform in TRANSFORMS:
            for name, estimated in estimates:
                suffix, changed = transform(estimated, lengths)
                yield f"{name}{suffix} of {grouping.name}", changed


def _estimates_of(grouping: Grouping, rewards: Tensor) -> list[tuple[str, Tensor]]:
    """Return the name and the advantages [B] of each estimator over a grouping, without
    the estimators that refuse these rewards or give a number that is not finite.
    """
    estimates = []
    for name, estimate in grouping.estimators():
        estimated = _estimate_or_none(estimate, rewards, grouping.ids)
        if estimated is not None:
            estimates.append((name, estimated))
    return estimates


def _changes_of_place(A: Tensor, group: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """Yield mistakes that give each response the advantage of another row, in words, and
    what they make of the right advantages, [B]. Mistakes that need groups of one size
    in consecutive rows are left out where there are none.

    Args:
        A: the right advantages, [B].
        group: the prompt of each response, [B], or None.
    """
    for rows in (1, -1):
        yield _words_for_row(rows), A.roll(-rows)
    yield "of the rows in reverse order", A.flip(0)
    size = _size_of_consecutive_groups(group)
    if size is None:
        return
    for rows in (size, -size):
        yield f"{_words_for_row(rows)}, which is of another prompt", A.roll(-rows)
    groups = A.view(-1, size)
    for rows in (1, -1):
        words = f"{_words_for_row(rows)}, within each prompt"
        yield words, groups.roll(-rows, 1).flatten()
    transposed = "of another row, as where a {} x {} table is read by columns"
    yield transposed.format(*groups.shape), groups.T.flatten()
    others = A.view(size, -1)
    yield transposed.format(*others.shape), others.T.flatten()


def _words_for_row(rows: int) -> str:
    """Say which row: `rows` > 0 is so many rows behind, else so many before."""
    if rows > 0:
        return f"of the row {rows} behind"
    return f"of the row {-rows} before"


def _size_of_consecutive_groups(group: Tensor | None) -> int | None:
    """Return the number of responses of each prompt, where all prompts have as many, in
    consecutive rows. None where they have not, have one, or there is one prompt.
    """
    if group is None:
        return None
    _, sizes = group.unique_consecutive(return_counts=True)
    size = int(sizes[0])
    are_prompts = len(sizes) == len(group.unique()) and bool((sizes == size).all())
    return size if are_prompts and 1 < size < len(group) else None


def _over_std_of_others(rewards: Tensor, group: Tensor) -> Tensor:
    """Return NeMo-RL's default advantages, [B]: (R_i - mean of the others of its group)
    / (their standard deviation + 1e-6).

    Where the standard deviation is at most 1e-6, the difference is not divided. All are
    NaN where a group has fewer than three responses.
    """
    advantages = torch.zeros_like(rewards)
    for number in group.unique():
        members = (group == number).nonzero()[:, 0]
        count = len(members)
        if count < 3:
            return torch.full_like(rewards, torch.nan)
        R = rewards[members]
        mean = (R.sum() - R) / (count - 1)
        variance = ((R**2).sum() - R**2) / (count - 1) - mean**2
        std = (variance.clamp(min=0) * (count - 1) / (count - 2)).sqrt()
        A = R - mean
        advantages[members] = torch.where(std > 1e-6, A / (std + 1e-6), A)
    return advantages


def _over_std_of_all(rewards: Tensor, group: Tensor, eps: float) -> Tensor:
    """Return (R_i - mean of its group) / (standard deviation of all rewards + eps),
    [B].
    """
    return estimators.group_mean(rewards, group) / (rewards.std() + eps)


def _estimate_or_none(
    estimate: Estimate, rewards: Tensor, group: Tensor
) -> Tensor | None:
    """Return the estimator's advantages, [B]; None where it refuses these rewards or
    gives a number that is not finite.
    """
    try:
        made = estimate(rewards, group)
    except InputError:
        return None
    return made if bool(made.isfinite().all()) else None
