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
from upref.step.goal import Goal
from upref.step.rows import Padded, Row
from upref.verify.factors import FACTORS, aggregation_id, declared_aggregation, names
from upref.verify.faults import measured
from upref.verify.finding import NO_CAUSE, Cause, join_causes


def longest(rows: Sequence[Any], of: Callable[[Any], Sequence[int]]) -> int:
    """The largest number of tokens that a row has in the part that `of` returns.

    Args:
        rows: one or more.
        of: the part of a row.
    """
    return max(len(of(r)) for r in rows)


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


# the largest number that is taken for one: nearly every factor is 1e-5 from 1 over a
# larger one
DIVISOR = 1000


def factor_words(
    goal: Goal,
    rows: Sequence[Row],
    padded: Padded,
    k: Tensor,
    dead: list[int],
    tol: float,
    mask: Tensor | None = None,
    moving: int = 0,
    odd: float = math.inf,
) -> tuple[Cause, Tensor] | None:
    """The aggregation, right or wrong, that gives these factors, and its own factors;
    None where none does. The right one is no cause.

    dead: responses that do not train. mask: the tokens that train, where they are
    others. moving: how many of them have a weight other than 0. odd: the largest
    constant factor, or inverse of one, that is taken where no loop is known to have it.
    """
    tell = ~k.isnan()
    causes, each = zip(*aggregations(goal, rows, padded, k, dead, mask), strict=True)
    F = torch.stack(each)
    times, fits = _constants(k[tell], F[:, tell], 10 * tol)
    exact = fits & ((times - 1).abs() <= 10 * tol)
    if exact.any():
        first = int(exact.int().argmax())
        return causes[first], F[first]
    if not fits.any():
        return None
    first = int(fits.int().argmax())
    cause = causes[first]
    f = F[first]
    times_right = float(times[first])
    # what the norm was before its clip is not known, so a constant factor is not either
    if goal.clip is not None:
        return cause, f * times_right
    kind, number = _familiar(times_right, goal.temperature)
    c_all, is_even = _constants(k[tell], torch.ones_like(k[tell])[None], 1e-5)
    c = float(c_all)
    if (
        not number
        and bool(is_even)
        and c > 0
        and (D := round(1 / c)) <= DIVISOR
        and abs(c * D - 1) < 1e-5
    ):
        return _divisor(D, rows, padded, moving), torch.full_like(k, 1 / D)
    if not number and max(abs(times_right), 1 / abs(times_right)) > odd:
        return None
    words = f"every weight is {number or f'{times_right:.5g}'} times what it should be"
    scaling = Cause(words, (f"weights-scaled{kind}",))
    return join_causes(cause, scaling), f * times_right


def _constants(k: Tensor, F: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """c of k = c f for each f, and whether there is one.

    Args:
        k: factors that were found, [B].
        F: factors of each aggregation, [n, B].
        tol: the relative error that is allowed.

    Returns:
        [n] and [n].
    """
    ratio = k / F
    c = ratio.median(1).values
    fits = ratio.isfinite().all(1) & (ratio.abs() > 1e-12).all(1)
    return c, fits & (((ratio / c[:, None] - 1).abs() <= tol).all(1))


def _divisor(D: int, rows: Sequence[Row], padded: Padded, moving: int) -> Cause:
    """What the sum over all tokens is divided by, and what has that number."""
    same = {
        "the tokens that no clip stops": moving,
        f"the number of responses, {len(rows)}": len(rows),
        f"{len(rows)} responses x {D // len(rows)}": (
            D if D % len(rows) == 0 and D > len(rows) else 0
        ),
    }
    for m in range(1, len(rows)):
        parts = padded.mask.split(m)
        for name, part in {"last": parts[-1], "first": parts[0]}.items():
            responses = "1 response" if len(part) == 1 else f"{len(part)} responses"
            words = f"the tokens of the {name} micro-batch, of {responses}"
            same[words] = int(part.sum())
    found = " or ".join(words for words, n in same.items() if n == D)
    words = f"the sum over all tokens is divided by {D}"
    ids = ("sum-divided-by-a-number",)
    return Cause(f"{words}: {found}" if found else words, ids)


def _familiar(c: float, temperature: float) -> tuple[str, str]:
    """A factor as a fraction, or by the temperature, where it is one that a loop is
    likely to have: the end of an id, and the number in words.
    """
    # of micro-batches and ranks, and scales of a loss
    for n in (*range(2, 65), *(2**k for k in range(7, 17))):
        if abs(abs(c) * n - 1) < 1e-3:
            return "-by-fraction", f"{'-' if c < 0 else ''}1/{n}"
    for id, words, v in (
        ("-by-temperature", "T", temperature),
        ("-by-inverse-temperature", "1/T", 1 / temperature),
        ("-by-inverse-temperature-squared", "1/T²", temperature**-2),
    ):
        if temperature != 1 and abs(c / v - 1) < 1e-3:
            return id, f"{c:.4g} (= {words})"
    return "", ""


def right_factors(goal: Goal, padded: Padded) -> Tensor:
    """[B]: by which the weights of each response's tokens are multiplied.

    Args:
        goal: the objective with its terms.
        padded: the rows, padded.
    """
    agg, group = _goal_aggregation(goal, padded)
    return _factors(agg, padded.mask, group)


def _goal_aggregation(goal: Goal, padded: Padded) -> tuple[str, Tensor | None]:
    """The aggregation of the goal, and the groups that it is over."""
    agg = declared_aggregation(goal.o)
    group = padded.group if goal.grouped else None
    if agg == "group-token-mean" and group is None:
        agg = "token-mean"
    return agg, group


def aggregations(
    goal: Goal,
    rows: Sequence[Row],
    padded: Padded,
    k: Tensor,
    dead: list[int],
    trained: Tensor | None = None,
) -> Iterator[tuple[Cause, Tensor]]:
    """A cause and the factor of each response; the right one first, which is none.

    Args:
        goal: the objective with its terms.
        rows: of the step.
        padded: the rows, padded.
        k: the factors that were found, [B].
        dead: responses that do not train.
        trained: tokens that train, where they are others, [B, T].
    """
    agg_of_goal, group = _goal_aggregation(goal, padded)
    yield NO_CAUSE, _factors(agg_of_goal, padded.mask, group)
    if trained is not None and not trained.equal(padded.mask):
        yield NO_CAUSE, _factors(agg_of_goal, trained, group)
    n = len(rows)
    for ranks in (2, 4):
        each = [torch.arange(r, n, ranks) for r in range(ranks)]
        for m in range(1, n // ranks):
            if dead == sorted(
                int(i) for rows_of_part in each[1:] for i in rows_of_part[:-m]
            ):
                f = _factors(agg_of_goal, padded.mask, group).clone()
                f[each[0][:-m]] *= ranks
                yield (
                    measured.LAST_MICRO_BATCH_REDUCED_ALONE.cause(
                        responses=m, ranks=ranks
                    ),
                    f,
                )
    if dead:
        alive = [i for i in range(n) if i not in dead]
        factors_left = torch.ones(n, dtype=torch.float64)
        factors_left[alive] = _factors(agg_of_goal, padded.mask[alive])
        yield measured.NORMALIZER_COUNTS_OTHERS_ONLY.cause(), factors_left
    of_step = _Step(
        agg_of_goal,
        tuple(_Lengths(range(len(r.ids)), range(len(r.response))) for r in rows),
        _as_tuples(padded.mask),
        _as_tuples(padded.here),
        None if group is None else tuple(group.tolist()),
    )
    alike = [*_alike(goal, padded, k)]
    for means, of_alike in zip(
        _means(of_step), _means_over(of_step, alike), strict=True
    ):
        yield from means
        yield from of_alike
    for sums, of_alike in zip(_sums(of_step), _sums_over(of_step, alike), strict=True):
        yield from sums
        yield from of_alike


class _Lengths(NamedTuple):
    """The tokens of a row, as far as a normalizer counts them."""

    ids: range
    response: range


class _Step(NamedTuple):
    """What the aggregations of a step depend on but for the factors that were found."""

    own: str
    rows: tuple[_Lengths, ...]
    mask: tuple[tuple[bool, ...], ...]
    here: tuple[tuple[bool, ...], ...]
    group: tuple[int, ...] | None


def _as_tuples(x: Tensor) -> tuple[tuple[bool, ...], ...]:
    return tuple(map(tuple, x.tolist()))


Part: TypeAlias = tuple[str, str, list[Tensor]]  # an id, words, and the responses
Factors: TypeAlias = list[tuple[Cause, Tensor]]


@lru_cache(maxsize=8)
def _means(step: _Step) -> list[Factors]:
    """Aggregations of the whole step and of its parts, by the tokens that are counted."""
    out = []
    group = None if step.group is None else torch.tensor(step.group)
    parts = _means_over(step, [*_partitions(step.rows)])
    for (counted, mask), of_parts in zip(_counted(step), parts, strict=True):
        means = []
        for agg in names(step.own):
            other = NO_CAUSE
            if agg != step.own:
                words = f"aggregated by {agg}, not by {step.own}"
                other = Cause(words, (aggregation_id(agg),))
            means.append((join_causes(counted, other), _factors(agg, mask, group)))
        out.append([*means, *of_parts])
    return out


def _counted(step: _Step) -> list[tuple[Cause, Tensor]]:
    """The tokens that a normalizer may count, and what is wrong with that."""
    mask = torch.tensor(step.mask)
    is_here = torch.tensor(step.here)
    masked = int((is_here & ~mask).sum())
    n = len(step.rows)
    # two readings of one number
    two = step.own == "token-mean" and masked and masked % n == 0
    as_many = f", or {masked // n} more a response" if two else ""
    words = f"the normalizer counts masked tokens too{as_many}"
    too_many = Cause(words, ("normalizer-counts-masked-tokens",))
    return [(NO_CAUSE, mask), (too_many, is_here)]


def _means_over(step: _Step, parts: Sequence[Part]) -> list[Factors]:
    """Means over each of these partitions, averaged, by the tokens that are counted."""
    n = len(step.rows)
    out = []
    aggs = (step.own, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    for counted, mask in _counted(step):
        block = []
        for id, called, part in parts:
            for agg in dict.fromkeys(aggs):
                f = torch.zeros(n, dtype=torch.float64)
                for rows_of_part in part:
                    f[rows_of_part] = _factors(agg, mask[rows_of_part])
                words = f"{agg} is taken over {called}, and the results are averaged"
                other = Cause(words, (f"{agg}-over-{id}",))
                block.append((join_causes(counted, other), f / len(part)))
        out.append(block)
    return out


@lru_cache(maxsize=8)
def _sums(step: _Step) -> list[Factors]:
    """Sums over the step and its parts, each divided by a size, by that size."""
    everything = ("all-responses", "all responses", [torch.arange(len(step.rows))])
    return _sums_over(step, [everything, *_partitions(step.rows)])


def _sums_over(step: _Step, parts: Sequence[Part]) -> list[Factors]:
    """Sums over each of these partitions, by the size that they are divided by."""
    n = len(step.rows)
    rows = step.rows
    mask = torch.tensor(step.mask)
    out = []
    for size_id, size, count in SIZES:
        block = []
        for id, called, part in parts:
            N = [
                count([rows[i] for i in rows_of_part.tolist()]) for rows_of_part in part
            ]
            mean = torch.zeros(n, dtype=torch.float64)
            even_factors = torch.zeros(n, dtype=torch.float64)
            for rows_of_part, m in zip(part, N, strict=True):
                mean[rows_of_part], even_factors[rows_of_part] = (
                    m / float(mask[rows_of_part].sum().clamp(min=1)) / sum(N),
                    1 / m,
                )
            if len(part) > 1:
                words = f"token-mean is taken over {called}, and each result is weighted by its {size}"
                ids = (f"mean-over-{id}-weighted-by-{size_id}",)
                block.append((Cause(words, ids), mean))
            words = f"the sum over {called} is divided by the {size}"
            ids = (f"sum-over-{id}-divided-by-{size_id}",)
            block.append((Cause(words, ids), even_factors / len(part)))
            if (
                size_id != "responses"
                and len({len(rows_of_part) for rows_of_part in part}) > 1
            ):
                share = torch.zeros(n, dtype=torch.float64)
                for rows_of_part in part:
                    share[rows_of_part] = len(rows_of_part) / n
                words += ", and each result is weighted by its responses"
                ids = (f"{ids[0]}-weighted-by-responses",)
                block.append((Cause(words, ids), even_factors * share))
        out.append(block)
    return out


def _factors(agg: str, mask: Tensor, group: Tensor | None = None) -> Tensor:
    """The factor of each response by that aggregation, right or wrong, of the tokens in
    the mask.
    """
    return FACTORS[agg](Rollouts.unchecked(mask=mask, group=group))


def _partitions(rows: Sequence[_Lengths]) -> Iterator[Part]:
    """Parts of the responses that may be averaged apart."""
    n = len(rows)
    for m in range(1, n):
        yield "micro-batches", f"micro-batches of {m}", [*torch.arange(n).split(m)]
    for ranks, ordinal in ((2, "2nd"), (4, "4th")):
        yield (
            f"{ranks}-ranks",
            f"{ranks} ranks with every {ordinal} row",
            [torch.arange(r, n, ranks) for r in range(min(ranks, n))],
        )
    lengths = torch.tensor([len(r.ids) for r in rows])
    for m in (2, 4):
        words = f"micro-batches of {m} sorted by length"
        yield "sorted-micro-batches", words, [*lengths.argsort().split(m)]


def _alike(goal: Goal, padded: Padded, k: Tensor) -> Iterator[Part]:
    """The parts of the responses that have one factor each beside the right ones."""
    n = len(k)
    unit = (k / _factors(declared_aggregation(goal.o), padded.mask)).nan_to_num(0)
    is_near = (unit / unit[:, None] - 1).abs() < 1e-3
    alike = sorted({tuple(x.nonzero()[:, 0].tolist()) for x in is_near} - {()})
    if 1 < len(alike) < n and sum(map(len, alike)) == n:
        said = " | ".join(" ".join(map(str, a)) for a in alike)
        words = f"micro-batches (responses {said})"
        yield "other-micro-batches", words, [torch.tensor(a) for a in alike]
