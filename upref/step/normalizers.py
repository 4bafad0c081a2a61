# SPDX-License-Identifier: Apache-2.0
"""Why the responses of a step have the factors that they have: the aggregation, and
what it was taken over.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from upref.rollouts import Rollouts
from upref.step.goal import Goal
from upref.step.rows import Padded, Row
from upref.verify.factors import FACTORS, aggregation_id, declared_aggregation, names
from upref.verify.faults import measured
from upref.verify.finding import NO_CAUSE, Cause, join_causes


def longest(rows: Sequence[Row], of: Callable[[Row], Sequence[int]]) -> int:
    """The largest number of tokens that a row has in the part that `of` returns.

    Args:
        rows: one or more.
        of: the part of a row.
    """
    return max(len(of(r)) for r in rows)


# what a micro-batch may be weighted or divided by: an id, words, and its number
SIZES: tuple[tuple[str, str, Callable[[Sequence[Row]], int]], ...] = (
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
    b: Padded,
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

    def constant(f: Tensor, tol: float) -> float | None:
        """c of k = c f."""
        ratio = (k / f)[tell]
        c = float(ratio.median())
        right = (
            ratio.isfinite().all()
            and (ratio.abs() > 1e-12).all()
            and (ratio / c - 1).abs().max() <= tol
        )
        return c if right else None

    scaled = None
    for cause, f in aggregations(goal, rows, b, k, dead, mask):
        c = constant(f, 10 * tol)
        if c is not None and abs(c - 1) <= 10 * tol:
            return cause, f
        scaled = scaled or (None if c is None else (cause, f, c))
    if scaled is None:
        return None
    cause, f, times = scaled
    # what the norm was before its clip is not known, so a constant factor is not either
    if goal.clip is not None:
        return cause, f * times
    kind, number = _familiar(times, goal.temperature)
    c = constant(torch.ones_like(k), 1e-5)
    if (
        not number
        and c
        and c > 0
        and (D := round(1 / c)) <= DIVISOR
        and abs(c * D - 1) < 1e-5
    ):
        return _divisor(D, rows, b, moving), torch.full_like(k, 1 / D)
    if not number and max(abs(times), 1 / abs(times)) > odd:
        return None
    words = f"every weight is {number or f'{times:.5g}'} times what it should be"
    every = Cause(words, (f"weights-scaled{kind}",))
    return join_causes(cause, every), f * times


def _divisor(D: int, rows: Sequence[Row], b: Padded, moving: int) -> Cause:
    """What the sum over all tokens is divided by, and what has that number."""
    same = {
        "the tokens that no clip stops": moving,
        f"{len(rows)} responses x {D // len(rows)}": D if D % len(rows) == 0 else 0,
    }
    for m in range(1, len(rows)):
        parts = b.mask.split(m)
        for name, part in {"last": parts[-1], "first": parts[0]}.items():
            same[f"the tokens of the {name} micro-batch, of {len(part)} responses"] = (
                int(part.sum())
            )
    found = " or ".join(words for words, n in same.items() if n == D)
    words = f"the sum over all tokens is divided by {D}"
    ids = ("sum-divided-by-a-number",)
    return Cause(f"{words}: {found}" if found else words, ids)


def _familiar(c: float, T: float) -> tuple[str, str]:
    """A factor as a fraction, or by the temperature, where it is one that a loop is
    likely to have: the end of an id, and the number in words.
    """
    # of micro-batches and ranks, and scales of a loss
    for n in (*range(2, 65), *(2**k for k in range(7, 17))):
        if abs(abs(c) * n - 1) < 1e-3:
            return "-by-fraction", f"{'-' if c < 0 else ''}1/{n}"
    for id, words, v in (
        ("-by-temperature", "T", T),
        ("-by-inverse-temperature", "1/T", 1 / T),
        ("-by-inverse-temperature-squared", "1/T²", T**-2),
    ):
        if T != 1 and abs(c / v - 1) < 1e-3:
            return id, f"{c:.4g} (= {words})"
    return "", ""


def right_factors(goal: Goal, b: Padded) -> Tensor:
    """[B]: by which the weights of each response's tokens are multiplied.

    Args:
        goal: the objective with its terms.
        b: the rows, padded.
    """
    own, group = _own(goal, b)
    return _factors(own, b.mask, group)


def _own(goal: Goal, b: Padded) -> tuple[str, Tensor | None]:
    """The aggregation of the goal, and the groups that it is over."""
    own = declared_aggregation(goal.o)
    group = b.group if goal.grouped else None
    if own == "group-token-mean" and group is None:
        own = "token-mean"
    return own, group


def aggregations(
    goal: Goal,
    rows: Sequence[Row],
    b: Padded,
    k: Tensor,
    dead: list[int],
    trained: Tensor | None = None,
) -> Iterator[tuple[Cause, Tensor]]:
    """A cause and the factor of each response; the right one first, which is none.

    Args:
        goal: the objective with its terms.
        rows: of the step.
        b: the rows, padded.
        k: the factors that were found, [B].
        dead: responses that do not train.
        trained: tokens that train, where they are others, [B, T].
    """
    own, group = _own(goal, b)
    masked = int((b.here & ~b.mask).sum())
    # two readings of one number
    alike = own == "token-mean" and masked and masked % len(rows) == 0
    as_many = f", or {masked // len(rows)} more a response" if alike else ""
    words = f"the normalizer counts masked tokens too{as_many}"
    too_many = Cause(words, ("normalizer-counts-masked-tokens",))
    yield NO_CAUSE, _factors(own, b.mask, group)
    if trained is not None and not trained.equal(b.mask):
        yield NO_CAUSE, _factors(own, trained, group)
    n = len(rows)
    for ranks in (2, 4):
        each = [torch.arange(r, n, ranks) for r in range(ranks)]
        for m in range(1, n // ranks):
            if dead == sorted(int(i) for at in each[1:] for i in at[:-m]):
                f = _factors(own, b.mask, group).clone()
                f[each[0][:-m]] *= ranks
                yield (
                    measured.LAST_MICRO_BATCH_REDUCED_ALONE.cause(
                        responses=m, ranks=ranks
                    ),
                    f,
                )
    if dead:
        alive = [i for i in range(n) if i not in dead]
        kept = torch.ones(n, dtype=torch.float64)
        kept[alive] = _factors(own, b.mask[alive])
        yield measured.NORMALIZER_COUNTS_OTHERS_ONLY.cause(), kept
    parts = [*_partitions(n, goal, rows, b, k)]
    for counted, mask in ((NO_CAUSE, b.mask), (too_many, b.here)):
        for agg in names(own):
            other = NO_CAUSE
            if agg != own:
                words = f"aggregated by {agg}, not by {own}"
                other = Cause(words, (aggregation_id(agg),))
            yield join_causes(counted, other), _factors(agg, mask, group)
        for id, called, part in parts:
            for agg in dict.fromkeys(
                [own, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
            ):
                f = torch.zeros(n, dtype=torch.float64)
                for at in part:
                    f[at] = _factors(agg, mask[at])
                words = f"{agg} is taken over {called}, and the results are averaged"
                other = Cause(words, (f"{agg}-over-{id}",))
                yield join_causes(counted, other), f / len(part)
    everything = ("all-responses", "all responses", [torch.arange(n)])
    for size_id, size, count in SIZES:
        for id, called, part in (everything, *parts):
            N = [count([rows[i] for i in at.tolist()]) for at in part]
            mean, even = (
                torch.zeros(n, dtype=torch.float64),
                torch.zeros(n, dtype=torch.float64),
            )
            for at, m in zip(part, N, strict=True):
                mean[at], even[at] = (
                    m / float(b.mask[at].sum().clamp(min=1)) / sum(N),
                    1 / m,
                )
            if len(part) > 1:
                words = f"token-mean is taken over {called}, and each result is weighted by its {size}"
                yield Cause(words, (f"mean-over-{id}-weighted-by-{size_id}",)), mean
            words = f"the sum over {called} is divided by the {size}"
            ids = (f"sum-over-{id}-divided-by-{size_id}",)
            yield Cause(words, ids), even / len(part)


def _factors(agg: str, mask: Tensor, group: Tensor | None = None) -> Tensor:
    """The factor of each response by that aggregation, right or wrong, of the tokens in
    the mask.
    """
    return FACTORS[agg](Rollouts.unchecked(mask=mask, group=group))


def _partitions(
    n: int, goal: Goal, rows: Sequence[Row], b: Padded, k: Tensor
) -> Iterator[tuple[str, str, list[Tensor]]]:
    """Parts of the responses that may be averaged apart: an id, words, and the parts."""
    for m in range(1, n):
        yield "micro-batches", f"micro-batches of {m}", [*torch.arange(n).split(m)]
    for ranks, every in ((2, "2nd"), (4, "4th")):
        yield (
            f"{ranks}-ranks",
            f"{ranks} ranks with every {every} row",
            [torch.arange(r, n, ranks) for r in range(min(ranks, n))],
        )
    lengths = torch.tensor([len(r.ids) for r in rows])
    for m in (2, 4):
        words = f"micro-batches of {m} sorted by length"
        yield "sorted-micro-batches", words, [*lengths.argsort().split(m)]
    unit = (k / _factors(declared_aggregation(goal.o), b.mask)).nan_to_num(0)
    alike = sorted(
        {
            tuple(j for j in range(n) if abs(unit[j] / unit[i] - 1) < 1e-3)
            for i in range(n)
        }
        - {()}
    )
    if 1 < len(alike) < n and sum(map(len, alike)) == n:
        said = " | ".join(" ".join(map(str, a)) for a in alike)
        words = f"micro-batches (responses {said})"
        yield "other-micro-batches", words, [torch.tensor(a) for a in alike]
