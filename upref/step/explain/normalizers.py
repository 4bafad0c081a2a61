# SPDX-License-Identifier: Apache-2.0
"""Why the responses of a step have the factors that they have: the aggregation, and
what it was taken over.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from upref.rollouts import Rollouts
from upref.step.compare.goal import Goal
from upref.step.inputs.rows import Padded, Row
from upref.verify.factors import (
    FACTORS,
    aggregation_id,
    aggregation_words,
    declared_aggregation,
    names,
)
from upref.verify.faults import measured
from upref.verify.finding import NO_CAUSE, Cause, join_causes


def longest(rows: Sequence[Any], part: Callable[[Any], Sequence[int]]) -> int:
    """Return the largest number of tokens that a row has in this part.

    Args:
        rows: one or more.
        part: from a row to the part of it.
    """
    return max(len(part(r)) for r in rows)


# what a micro-batch may be weighted or divided by: an id, words, and its number
SIZES: tuple[tuple[str, str, Callable[[Sequence[Any]], int]], ...] = (
    ("responses", "responses", len),
    (
        "response-tokens",
        "response tokens, masked ones included",
        lambda rows: sum(len(r.response) for r in rows),
    ),
    (
        "tokens",
        "tokens, prompts included",
        lambda rows: sum(len(r.ids) for r in rows),
    ),
    (
        "slots",
        "slots of the padded batch",
        lambda rows: len(rows) * longest(rows, lambda r: r.ids),
    ),
    (
        "slots-but-first-column",
        "slots of the padded batch but its first column",
        lambda rows: len(rows) * (longest(rows, lambda r: r.ids) - 1),
    ),
    (
        "response-slots",
        "slots of the padded responses",
        lambda rows: len(rows) * longest(rows, lambda r: r.response),
    ),
)


# a larger number is not taken for a divisor: nearly every factor is 1e-5 from 1 over
# some number above it
LARGEST_DIVISOR = 1000


def explain_factors(
    goal: Goal,
    rows: Sequence[Row],
    padded: Padded,
    row_factors: Tensor,
    without_weight: list[int],
    tolerance: float,
    trained: Tensor | None = None,
    moving: int = 0,
    largest_odd: float = math.inf,
) -> tuple[Cause, Tensor] | None:
    """Find the aggregation, right or wrong, that gives these factors of the responses.

    Args:
        goal: the objective with its terms.
        rows: of the step.
        padded: the rows, padded.
        row_factors: the factors that were found, [B]; nan where one is not known.
        without_weight: responses that do not train.
        tolerance: the relative error of the weights.
        trained: the tokens that train, where they are others than the mask's, [B, T].
        moving: how many of them have a weight other than 0.
        largest_odd: how large a constant factor may be that no loop is known to have.
            Its inverse has the same bound.

    Returns:
        The cause, which is empty for the right aggregation, and the factors that it
        gives, [B]; None where no aggregation fits.
    """
    is_known = ~row_factors.isnan()
    causes, factors = zip(
        *aggregations(goal, rows, padded, row_factors, without_weight, trained),
        strict=True,
    )
    candidates = torch.stack(factors)
    known_factors = row_factors[is_known]
    constants, is_fit = _constants(
        known_factors, candidates[:, is_known], 10 * tolerance
    )
    exact = is_fit & ((constants - 1).abs() <= 10 * tolerance)
    if exact.any():
        first = int(exact.int().argmax())
        return causes[first], candidates[first]
    if not is_fit.any():
        return None
    first = int(is_fit.int().argmax())
    cause = causes[first]
    factors_found = candidates[first]
    constant = float(constants[first])
    # what the norm was before its clip is not known, so a constant factor is not either
    if goal.clip is not None:
        return cause, factors_found * constant
    id_end, number_words = _familiar_constant(constant, goal.temperature)
    if not number_words:
        if divisor := _common_divisor(known_factors):
            factors_of_sum = torch.full_like(row_factors, 1 / divisor)
            return _divisor_cause(divisor, rows, padded, moving), factors_of_sum
        if max(abs(constant), 1 / abs(constant)) > largest_odd:
            return None
    words = (
        f"every weight is {number_words or f'{constant:.5g}'} times what it should be"
    )
    scaling = Cause(words, (f"weights-scaled{id_end}",))
    return join_causes(cause, scaling), factors_found * constant


def _common_divisor(factors: Tensor) -> int:
    """Return the number D, if all factors are 1 / D and D is at most LARGEST_DIVISOR;
    else 0.
    """
    medians, are_equal = _constants(factors, torch.ones_like(factors)[None], 1e-5)
    factor = float(medians)
    if not are_equal or factor <= 0:
        return 0
    divisor = round(1 / factor)
    is_whole = abs(factor * divisor - 1) < 1e-5
    return divisor if is_whole and divisor <= LARGEST_DIVISOR else 0


def _constants(
    row_factors: Tensor, candidates: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Return the constant that makes each candidate the factors that were found.

    Args:
        row_factors: factors that were found, [B].
        candidates: factors of each aggregation, [n, B].
        tolerance: the relative error that is allowed.

    Returns:
        The constants, [n], and whether each is one that fits all responses, [n].
    """
    ratio = row_factors / candidates
    constants = ratio.median(1).values
    is_usable = ratio.isfinite().all(1) & (ratio.abs() > 1e-12).all(1)
    is_same = ((ratio / constants[:, None] - 1).abs() <= tolerance).all(1)
    return constants, is_usable & is_same


def _divisor_cause(
    divisor: int, rows: Sequence[Row], padded: Padded, moving: int
) -> Cause:
    """Return the cause that the sum over all tokens is divided by this number, with
    what in the step has that number.

    Args:
        divisor: the number.
        rows: of the step.
        padded: the rows, padded.
        moving: how many tokens have a weight other than 0.
    """
    numbers = {
        "the tokens that no clip stops": moving,
        f"the number of responses, {len(rows)}": len(rows),
    }
    if divisor % len(rows) == 0 and divisor > len(rows):
        numbers[f"{len(rows)} responses x {divisor // len(rows)}"] = divisor
    for size in range(1, len(rows)):
        parts = padded.mask.split(size)
        for name, part in {"last": parts[-1], "first": parts[0]}.items():
            responses = "1 response" if len(part) == 1 else f"{len(part)} responses"
            words = f"the tokens of the {name} micro-batch, of {responses}"
            numbers[words] = int(part.sum())
    found = " or ".join(words for words, n in numbers.items() if n == divisor)
    words = f"the sum over all tokens is divided by {divisor}"
    ids = ("sum-divided-by-a-number",)
    return Cause(f"{words}: {found}" if found else words, ids)


def _familiar_constant(constant: float, temperature: float) -> tuple[str, str]:
    """Name a constant that a loop is likely to have: a fraction, or one that the
    temperature makes.

    Returns:
        The end of an id and the number in words; two empty strings for any other.
    """
    # numbers of micro-batches and ranks, and scales of a loss
    for number in (*range(2, 65), *(2**k for k in range(7, 17))):
        if abs(abs(constant) * number - 1) < 1e-3:
            return "-by-fraction", f"{'-' if constant < 0 else ''}1/{number}"
    for end_of_id, words, value in (
        ("-by-temperature", "T", temperature),
        ("-by-inverse-temperature", "1/T", 1 / temperature),
        ("-by-inverse-temperature-squared", "1/T²", temperature**-2),
    ):
        if temperature != 1 and abs(constant / value - 1) < 1e-3:
            return end_of_id, f"{constant:.4g} (= {words})"
    return "", ""


def right_factors(goal: Goal, padded: Padded) -> Tensor:
    """Return the factor by which the aggregation multiplies each response's weights, [B].

    Args:
        goal: the objective with its terms.
        padded: the rows, padded.
    """
    agg, group = _goal_aggregation(goal, padded)
    return _factors(agg, padded.mask, group)


def _goal_aggregation(goal: Goal, padded: Padded) -> tuple[str, Tensor | None]:
    """Return the aggregation of the goal, and the groups over which it averages."""
    agg = declared_aggregation(goal.objective)
    group = padded.group if goal.grouped else None
    if agg == "group-token-mean" and group is None:
        agg = "token-mean"
    return agg, group


def aggregations(
    goal: Goal,
    rows: Sequence[Row],
    padded: Padded,
    row_factors: Tensor,
    without_weight: list[int],
    trained: Tensor | None = None,
) -> Iterator[tuple[Cause, Tensor]]:
    """Yield the aggregations that a loop may have, the right one first.

    Args:
        goal: the objective with its terms.
        rows: of the step.
        padded: the rows, padded.
        row_factors: the factors that were found, [B].
        without_weight: responses that do not train.
        trained: tokens that train, where they are others, [B, T].

    Yields:
        A cause, empty for the right aggregation, and the factor of each response, [B].
    """
    agg_of_goal, group = _goal_aggregation(goal, padded)
    yield NO_CAUSE, _factors(agg_of_goal, padded.mask, group)
    if trained is not None and not trained.equal(padded.mask):
        yield NO_CAUSE, _factors(agg_of_goal, trained, group)
    count = len(rows)
    for ranks in (2, 4):
        rows_of_ranks = [torch.arange(rank, count, ranks) for rank in range(ranks)]
        for size in range(1, count // ranks):
            # of the ranks but the first, all micro-batches but the last
            not_reduced = sorted(
                int(i)
                for rows_of_rank in rows_of_ranks[1:]
                for i in rows_of_rank[:-size]
            )
            if without_weight == not_reduced:
                factors = _factors(agg_of_goal, padded.mask, group).clone()
                factors[rows_of_ranks[0][:-size]] *= ranks
                yield (
                    measured.LAST_MICRO_BATCH_REDUCED_ALONE.cause(
                        responses=size, ranks=ranks
                    ),
                    factors,
                )
    if without_weight:
        has_weight = [i for i in range(count) if i not in without_weight]
        factors_left = torch.ones(count, dtype=torch.float64)
        factors_left[has_weight] = _factors(agg_of_goal, padded.mask[has_weight])
        yield measured.NORMALIZER_COUNTS_OTHERS_ONLY.cause(), factors_left
    step = _Step(
        agg_of_goal,
        tuple(_Lengths(range(len(row.ids)), range(len(row.response))) for row in rows),
        _as_tuples(padded.mask),
        _as_tuples(padded.is_token),
        None if group is None else tuple(group.tolist()),
    )
    parts_alike = [*_parts_alike(goal, padded, row_factors)]
    for means, of_parts_alike in zip(
        _mean_aggregations(step), _means_over(step, parts_alike), strict=True
    ):
        yield from means
        yield from of_parts_alike
    for sums, of_parts_alike in zip(
        _sum_aggregations(step), _sums_over(step, parts_alike), strict=True
    ):
        yield from sums
        yield from of_parts_alike


class _Lengths(NamedTuple):
    """Ranges as long as a row, and as its response. Functions that count the tokens of a
    `Row` take it too, and it can be a key of a cache.
    """

    ids: range
    response: range


class _Step(NamedTuple):
    """What decides which aggregations a step may have, as a key of a cache."""

    goal_agg: str  # the aggregation of the goal
    rows: tuple[_Lengths, ...]
    mask: tuple[tuple[bool, ...], ...]
    is_token: tuple[tuple[bool, ...], ...]
    group: tuple[int, ...] | None


def _as_tuples(x: Tensor) -> tuple[tuple[bool, ...], ...]:
    """Return a mask [B, T] as tuples, which can be a key of a cache."""
    return tuple(map(tuple, x.tolist()))


# a division of the responses into parts: an id, words, and the responses of each part
Partition: TypeAlias = tuple[str, str, list[Tensor]]
Factors: TypeAlias = list[tuple[Cause, Tensor]]


@lru_cache(maxsize=8)
def _mean_aggregations(step: _Step) -> list[Factors]:
    """List the means over the whole step and over its parts, a list for each choice of
    the tokens that are counted.
    """
    out = []
    group = None if step.group is None else torch.tensor(step.group)
    parts = _means_over(step, [*_partitions(step.rows)])
    for (counted, mask), of_parts in zip(_counted_tokens(step), parts, strict=True):
        means = []
        for agg in names(step.goal_agg):
            other = NO_CAUSE
            if agg != step.goal_agg:
                due = aggregation_words(step.goal_agg)
                words = f"aggregated by {aggregation_words(agg)}, not by {due}"
                other = Cause(words, (aggregation_id(agg),))
            means.append((join_causes(counted, other), _factors(agg, mask, group)))
        out.append([*means, *of_parts])
    return out


def _counted_tokens(step: _Step) -> list[tuple[Cause, Tensor]]:
    """List the tokens that a normalizer may count, [B, T], each with the cause that it
    counts them; the right ones have none.
    """
    mask = torch.tensor(step.mask)
    is_token = torch.tensor(step.is_token)
    masked = int((is_token & ~mask).sum())
    count = len(step.rows)
    # the same number may be the masked tokens, or so many more for each response
    is_ambiguous = step.goal_agg == "token-mean" and masked and masked % count == 0
    as_many = f", or {masked // count} more a response" if is_ambiguous else ""
    words = f"the normalizer counts masked tokens too{as_many}"
    with_masked = Cause(words, ("normalizer-counts-masked-tokens",))
    return [(NO_CAUSE, mask), (with_masked, is_token)]


def _means_over(step: _Step, parts: Sequence[Partition]) -> list[Factors]:
    """List averages of means over the parts of each partition, a list for each choice of
    the tokens that are counted.
    """
    count = len(step.rows)
    out = []
    aggs = (step.goal_agg, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    for counted, mask in _counted_tokens(step):
        aggregations = []
        for parts_id, words_of_parts, partition in parts:
            for agg in dict.fromkeys(aggs):
                factors = torch.zeros(count, dtype=torch.float64)
                for rows in partition:
                    factors[rows] = _factors(agg, mask[rows])
                words = f"{agg} is taken over {words_of_parts}, and the results are averaged"
                other = Cause(words, (f"{agg}-over-{parts_id}",))
                cause = join_causes(counted, other)
                aggregations.append((cause, factors / len(partition)))
        out.append(aggregations)
    return out


@lru_cache(maxsize=8)
def _sum_aggregations(step: _Step) -> list[Factors]:
    """List sums over the step and over its parts, a list for each size by which they
    are divided.
    """
    everything = ("all-responses", "all responses", [torch.arange(len(step.rows))])
    return _sums_over(step, [everything, *_partitions(step.rows)])


def _sums_over(step: _Step, parts: Sequence[Partition]) -> list[Factors]:
    """List sums over the parts of each partition, a list for each size by which they are
    divided.
    """
    rows = step.rows
    mask = torch.tensor(step.mask)
    out = []
    for size_id, size_words, size_of in SIZES:
        aggregations: Factors = []
        for parts_id, parts_words, partition in parts:
            sizes = []
            for part_rows in partition:
                sizes.append(size_of([rows[i] for i in part_rows.tolist()]))
            if len(partition) > 1:
                words = f"token-mean is taken over {parts_words}, and each result is weighted by its {size_words}"
                ids = (f"mean-over-{parts_id}-weighted-by-{size_id}",)
                factors = _weighted_means(mask, partition, sizes)
                aggregations.append((Cause(words, ids), factors))
            words = f"the sum over {parts_words} is divided by the {size_words}"
            ids = (f"sum-over-{parts_id}-divided-by-{size_id}",)
            one_over_size = torch.zeros(len(rows), dtype=torch.float64)
            share = torch.zeros(len(rows), dtype=torch.float64)  # of the responses
            for part_rows, size_of_part in zip(partition, sizes, strict=True):
                one_over_size[part_rows] = 1 / size_of_part
                share[part_rows] = len(part_rows) / len(rows)
            aggregations.append((Cause(words, ids), one_over_size / len(partition)))
            parts_differ = len({len(part_rows) for part_rows in partition}) > 1
            if parts_differ and size_id != "responses":
                words += ", and each result is weighted by its responses"
                ids = (f"{ids[0]}-weighted-by-responses",)
                aggregations.append((Cause(words, ids), one_over_size * share))
        out.append(aggregations)
    return out


def _weighted_means(
    mask: Tensor, partition: Sequence[Tensor], sizes: Sequence[float]
) -> Tensor:
    """Return the factor of each response, [B], in the mean over tokens of each part,
    weighted by the sizes of the parts.

    Args:
        mask: of the step, [B, T].
        partition: the indices of the rows of each part.
        sizes: of the parts.
    """
    factors = torch.zeros(len(mask), dtype=torch.float64)
    for part_rows, size in zip(partition, sizes, strict=True):
        trained = float(mask[part_rows].sum().clamp(min=1))
        factors[part_rows] = size / trained / sum(sizes)
    return factors


def _factors(agg: str, mask: Tensor, group: Tensor | None = None) -> Tensor:
    """Return the factor that an aggregation gives each response, if it counts the tokens
    in the mask, [B].
    """
    return FACTORS[agg](Rollouts.unchecked(mask=mask, group=group))


def _partitions(rows: Sequence[_Lengths]) -> Iterator[Partition]:
    """Yield the ways in which a loop may divide the responses into parts that it
    averages apart.
    """
    count = len(rows)
    for size in range(1, count):
        yield (
            "micro-batches",
            f"micro-batches of {size}",
            [*torch.arange(count).split(size)],
        )
    for ranks, ordinal in ((2, "2nd"), (4, "4th")):
        yield (
            f"{ranks}-ranks",
            f"{ranks} ranks with every {ordinal} row",
            [torch.arange(rank, count, ranks) for rank in range(min(ranks, count))],
        )
    lengths = torch.tensor([len(row.ids) for row in rows])
    for size in (2, 4):
        words = f"micro-batches of {size} sorted by length"
        yield "sorted-micro-batches", words, [*lengths.argsort().split(size)]


def _parts_alike(
    goal: Goal, padded: Padded, row_factors: Tensor
) -> Iterator[Partition]:
    """Yield the division of the responses into parts with the same multiple of the
    right factor, if there are several parts and some has several responses.
    """
    count = len(row_factors)
    right = _factors(declared_aggregation(goal.objective), padded.mask)
    multiples = (row_factors / right).nan_to_num(0)
    is_alike = (multiples / multiples[:, None] - 1).abs() < 1e-3
    groups_alike = sorted(
        {tuple(row.nonzero()[:, 0].tolist()) for row in is_alike} - {()}
    )
    if 1 < len(groups_alike) < count and sum(map(len, groups_alike)) == count:
        group_words = " | ".join(" ".join(map(str, group)) for group in groups_alike)
        words = f"micro-batches (responses {group_words})"
        yield (
            "other-micro-batches",
            words,
            [torch.tensor(group) for group in groups_alike],
        )
