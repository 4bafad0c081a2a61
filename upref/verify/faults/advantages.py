# SPDX-License-Identifier: Apache-2.0
"""Known faults of advantage functions, each computed exactly."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any, TypeAlias

import torch

from upref import advantages
from upref.verify import exact
from upref.verify.exact import RewardBatch, Rows, mean, minus, per_key, variance_of_rows
from upref.verify.faults import Fault

Floats = Sequence[float]


@dataclass(frozen=True)
class AdvantageChange:
    """The change that a fault makes to the advantages of a batch.

    Attributes:
        numbers: from a batch, its right advantages and k to the changed advantages, or
            to numerators.
        variance: from a batch and the numerators to variances. The numerators are
            divided by their roots with an eps, which is measured. None: no division.
        k: from the right advantages and those found to the number {k} in the words.
    """

    numbers: Callable[[RewardBatch, Floats, float], Floats | Rows]
    variance: Callable[[RewardBatch, Rows], Rows] | None = None
    k: Callable[[Floats, Floats], float] | None = None


AdvantageFault: TypeAlias = Fault[AdvantageChange]


# ---- changes of the right advantages -------------------------------------------------
def _first_ratio(right: Floats, found: Floats, sign: int = 0) -> float:
    """Return found over right of the first advantage that is not 0.

    Args:
        right: the right advantages.
        found: those found.
        sign: 1 or -1 for the first advantage of this sign; 0 for any.
    """
    for expected, advantage in zip(right, found, strict=True):
        size = expected * sign if sign else abs(expected)
        if size > 1e-9:
            return advantage / expected
    return 1.0


def _largest(right: Floats, found: Floats) -> float:
    """Return the largest size of an advantage found."""
    return max(map(abs, found))


def _first_difference(right: Floats, found: Floats) -> float:
    """Return found less right of the first advantage."""
    return found[0] - right[0]


def _rotated(right: Floats, places: int) -> Floats:
    """Return the advantages, moved by so many rows: row i has that of row i + places, and
    the first rows follow the last ones.
    """
    return [*right[places:], *right[:places]]


def _divided_by_size(
    words: str, size: Callable[[int], float], id: str
) -> AdvantageFault:
    """Make the fault that each advantage is divided by a function of the number of
    responses of its prompt.
    """

    def divided(batch: RewardBatch, right: Floats, k: float) -> Floats:
        """Return the right advantages, divided."""
        return [
            x / size(batch.group.count(group_id))
            for x, group_id in zip(right, batch.group, strict=True)
        ]

    return Fault(words, AdvantageChange(divided), id=id)


def _change_of_each(
    words: str,
    change: Callable[[float, float], float],
    k: Callable[[Floats, Floats], float] | None = None,
    *,
    id: str,
) -> AdvantageFault:
    """Make the fault that changes each right advantage by itself.

    Args:
        words: what is done otherwise.
        change: from an advantage and k to the changed one.
        k: from the right advantages and those found to k; None: k is 0, and not read.
        id: of the fault.
    """
    return Fault(
        words,
        AdvantageChange(lambda batch, right, k: [change(x, k) for x in right], k=k),
        id=id,
    )


def _other_estimator(
    words: str, name: str, ddof: int, applies_to: tuple[str, ...], id: str
) -> AdvantageFault:
    """Make the fault that another estimator takes the place of one of those that it
    applies to.

    Args:
        words: what is done otherwise.
        name: of the other estimator.
        ddof: of its variance: 1 divides by n - 1, 0 by n; not read where it divides by no
            standard deviation.
        applies_to: the estimators whose place it takes.
        id: of the fault.
    """
    if name not in exact.DIVIDED_BY_STD:
        return Fault(
            words,
            AdvantageChange(lambda batch, right, k: exact.advantage(name, batch)),
            id=id,
            applies_to=applies_to,
        )

    def numerator(batch: RewardBatch, right: Floats, k: float) -> Rows:
        """Return the numerators of that estimator."""
        numerators, _ = exact.numerators_and_variances(name, batch, ddof)
        return numerators

    def variance(batch: RewardBatch, numerators: Rows) -> Rows:
        """Return the variances of that estimator."""
        _, variances = exact.numerators_and_variances(name, batch, ddof)
        return variances

    return Fault(
        words, AdvantageChange(numerator, variance), id=id, applies_to=applies_to
    )


def _whitened_over_batch(
    ddof: int, batch: RewardBatch, right: Floats, k: float
) -> Floats:
    """Return the right advantages, normalized over the whole batch once more."""
    of_advantages = replace(batch, R=tuple(map(Fraction, right)))
    return exact.advantage("whiten", of_advantages, exact.Denominator(ddof))


def _changes_of_right_advantages() -> Iterator[AdvantageFault]:
    """Yield the faults that change the right advantages, their sign, their size or the row
    that gets them, and then those that take another estimator. Where several give the same
    advantages, the first is named.
    """
    itself = "the mean includes the response itself: G/(G-1) is missing"
    yield _other_estimator(
        itself,
        "group_mean",
        1,
        id="mean-includes-itself",
        applies_to=("leave_one_out",),
    )
    yield _change_of_each(
        "the sign is flipped: bad answers are reinforced",
        lambda x, k: -x,
        id="advantages-negated",
    )
    yield _change_of_each(
        "its absolute value: bad answers are reinforced",
        lambda x, k: abs(x),
        id="advantage-absolute",
    )
    yield _change_of_each(
        "negative advantages are dropped",
        lambda x, k: max(x, 0.0),
        id="negative-advantages-dropped",
    )
    yield Fault(
        "responses with a reward of 0 or less have the advantage 0: only those above 0 train",
        AdvantageChange(_where_reward_is_positive),
        id="advantages-of-not-positive-rewards-dropped",
    )
    yield _change_of_each(
        "positive advantages are dropped",
        lambda x, k: min(x, 0.0),
        id="positive-advantages-dropped",
    )
    yield _change_of_each(
        "every advantage is {k:.5g} times what it should be",
        lambda x, k: k * x,
        _first_ratio,
        id="advantages-scaled",
    )
    yield _change_of_each(
        "advantages are clipped to at most {k:.4g}",
        min,
        lambda right, found: max(found),
        id="advantages-clipped-above",
    )
    yield _change_of_each(
        "advantages are clipped to at least {k:.4g}",
        max,
        lambda right, found: min(found),
        id="advantages-clipped-below",
    )
    # after the clips of one side: a batch that meets one of the two bounds shows no other
    yield _change_of_each(
        "advantages are clipped to ±{k:.4g}",
        lambda x, k: max(-k, min(k, x)),
        _largest,
        id="advantages-clipped",
    )
    yield _change_of_each(
        "advantages below 0 are {k:.5g} times what they should be",
        lambda x, k: k * x if x < 0 else x,
        partial(_first_ratio, sign=-1),
        id="negative-advantages-scaled",
    )
    yield _change_of_each(
        "advantages above 0 are {k:.5g} times what they should be",
        lambda x, k: k * x if x > 0 else x,
        partial(_first_ratio, sign=1),
        id="positive-advantages-scaled",
    )
    yield _change_of_each(
        "{k:.4g} is added to every advantage",
        lambda x, k: x + k,
        _first_difference,
        id="constant-added-to-advantages",
    )
    yield _change_of_each("tanh of it", lambda x, k: math.tanh(x), id="advantage-tanh")
    yield _divided_by_size(
        "it is divided by the number of responses of its prompt",
        float,
        id="divided-by-group-size",
    )
    yield _divided_by_size(
        "it is divided by the square root of the number of responses of its prompt",
        math.sqrt,
        id="divided-by-root-of-group-size",
    )
    yield _divided_by_size(
        "it is multiplied by (G - 1)/G, with G responses to its prompt",
        lambda G: G / (G - 1) if G > 1 else math.inf,
        id="advantages-times-share-of-others",
    )
    yield Fault(
        "each response has the advantage of the row in front",
        AdvantageChange(lambda batch, right, k: _rotated(right, -1)),
        id="advantages-of-row-before",
    )
    yield Fault(
        "each response has the advantage of the row behind",
        AdvantageChange(lambda batch, right, k: _rotated(right, 1)),
        id="advantages-of-row-after",
    )
    yield _change_of_each(
        "it is rounded to float16",
        lambda x, k: torch.tensor(x).half().item(),
        id="rounded-to-float16",
    )
    yield _change_of_each(
        "it is rounded to bfloat16",
        lambda x, k: torch.tensor(x).bfloat16().item(),
        id="rounded-to-bfloat16",
    )
    for ddof in (0, 1):
        yield Fault(
            "normalized twice: by prompt, then over the batch",
            AdvantageChange(partial(_whitened_over_batch, ddof)),
            id="advantages-whitened-over-batch",
        )
    yield from _other_estimators()


def _where_reward_is_positive(batch: RewardBatch, right: Floats, k: float) -> Floats:
    """Return the advantages of responses with a reward above 0; 0 for the others."""
    return [
        advantage if reward > 0 else 0.0
        for advantage, reward in zip(right, batch.R, strict=True)
    ]


def _other_estimators() -> Iterator[AdvantageFault]:
    """Yield the faults that the std is the other one, and then that the function is
    another estimator.
    """
    for name in exact.DIVIDED_BY_STD:
        yield _other_estimator(
            "the std divides by G (population)",
            name,
            0,
            id="std-of-population",
            applies_to=(name,),
        )
        yield _other_estimator(
            "the std divides by G - 1 (Bessel)",
            name,
            1,
            id="std-of-sample",
            applies_to=(name,),
        )
    for name in advantages.ADVANTAGES:
        if name == "signed":
            continue
        if name == "whiten":
            words = "it is whiten (over the batch, whatever the prompt)"
        else:
            words = f"it is {name}"
        others = tuple(other for other in advantages.ADVANTAGES if other != name)
        ddofs = (1, 0) if name in exact.DIVIDED_BY_STD else (1,)
        for ddof in ddofs:
            yield _other_estimator(words, name, ddof, others, id=f"estimator-{name}")


# ---- other rewards -------------------------------------------------------------------
def _over_length(batch: RewardBatch) -> RewardBatch:
    """Return the batch with each reward divided by the length of its response."""
    pairs = zip(batch.R, batch.lengths, strict=True)
    return replace(batch, R=tuple(reward / n for reward, n in pairs))


def _times_length(batch: RewardBatch) -> RewardBatch:
    """Return the batch with each reward multiplied by the length of its response."""
    pairs = zip(batch.R, batch.lengths, strict=True)
    return replace(batch, R=tuple(reward * n for reward, n in pairs))


def _of_other_rewards() -> Iterator[AdvantageFault]:
    """Yield the faults that the rewards are averaged over tokens, or added up over them,
    before an estimator gets them.
    """
    for words, change, id in (
        (
            "the reward of a response is divided by its length: a mean over its tokens, not a sum",
            _over_length,
            "rewards-over-length",
        ),
        (
            "the reward of a response is multiplied by its length: it is added once for each token",
            _times_length,
            "rewards-times-length",
        ),
    ):
        for name in advantages.ADVANTAGES:
            if name == "signed":
                continue
            for ddof in (1, 0) if name in exact.DIVIDED_BY_STD else (1,):
                other = _other_estimator(words, name, ddof, (name,), id)
                yield replace(other, change=_after(change, other.change))


def _after(
    rewards: Callable[[RewardBatch], RewardBatch], change: AdvantageChange
) -> AdvantageChange:
    """Return a change of the advantages of a batch with other rewards."""
    variance = change.variance

    def numbers(batch: RewardBatch, right: Floats, k: float) -> Floats | Rows:
        """Return what the change makes of the other rewards."""
        return change.numbers(rewards(batch), right, k)

    def variance_of_other(batch: RewardBatch, numerators: Rows) -> Rows:
        """Return the variances of the other rewards."""
        assert variance is not None
        return variance(rewards(batch), numerators)

    return AdvantageChange(numbers, variance_of_other if variance else None)


# ---- other formulas: a baseline of some rows, divided by a spread of some rows -------
def _median(xs: Rows) -> Fraction:
    """Return the median; of an even count, the mean of the two in the middle."""
    ordered = sorted(xs)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _lower_median(xs: Rows) -> Fraction:
    """Return the median as torch.median does; of an even count, the lower one of the two
    in the middle.
    """
    return sorted(xs)[(len(xs) - 1) // 2]


def _less_others_over_all(xs: Rows) -> Rows:
    """Return the rewards less the sum of the others, divided by the count of all."""
    total = sum(xs, Fraction(0))
    return [x - (total - x) / len(xs) for x in xs]


def _keys_of_reshaped(rows_of_prompt: bool, batch: RewardBatch) -> Sequence[Any]:
    """Return the key of each row where a batch is reshaped, its prompts taken to be of
    one size; the prompts where they cannot be.

    Args:
        rows_of_prompt: to [prompts, responses], not to [responses, prompts].
        batch: the batch.
    """
    row_count = len(batch.R)
    prompt_count = len(set(batch.group))
    if row_count % prompt_count:
        return batch.group
    if rows_of_prompt:
        return [i // (row_count // prompt_count) for i in range(row_count)]
    return [i % prompt_count for i in range(row_count)]


def _keys_by_stride(k: int, batch: RewardBatch) -> Sequence[Any]:
    """Return one key for each k consecutive rows."""
    return [i // k for i in range(len(batch.R))]


# estimators by the words for what they subtract from the rewards of some rows
CENTERS: dict[str, Callable[[Rows], Rows]] = {
    "the mean": minus(mean),
    "the mean of the others": exact.minus_the_others,
    "the sum of the others, divided by G and not by G - 1,": _less_others_over_all,
    "the median": minus(_median),
    "the lower median (torch.median)": minus(_lower_median),
    "the smallest reward": minus(min),
    "the largest reward": minus(max),
    "the sum": minus(lambda xs: sum(xs, Fraction(0))),
    "G/(G - 1) times the mean": minus(
        lambda xs: sum(xs, Fraction(0)) / max(len(xs) - 1, 1)
    ),
    "the first reward": minus(lambda xs: xs[0]),
}
# by the words for some rows: from a batch to a key for each row, equal for these rows
KEYS: dict[str, Callable[[RewardBatch], Sequence[Any]]] = {
    "of its prompt": lambda batch: batch.group,
    "of the whole batch": lambda batch: [0] * len(batch.R),
    "of as many rows in a row as its prompt has (groups taken to be contiguous)": lambda batch: (
        sorted(batch.group)
    ),
    "of as many consecutive rows (reshaped to [prompts, responses])": lambda batch: (
        _keys_of_reshaped(True, batch)
    ),
    "of rows that are as far apart as there are prompts (reshaped to [responses, prompts])": lambda batch: (
        _keys_of_reshaped(False, batch)
    ),
} | {
    f"of {k} consecutive rows (a fixed stride)": partial(_keys_by_stride, k)
    for k in (2, 3, 4, 5, 8)
}
# from (keys, rewards, rewards less a center) to the square of a divisor for each row
Spread = Callable[[Sequence[Any], Rows, Rows], Rows]
OF_REWARDS = "of the rewards"
OF_DIFFERENCES = "of the differences"
# what the std is of, the words for its ddof, and its variance
STD: tuple[tuple[str, str, Spread], ...] = (
    (OF_REWARDS, "over n - 1", lambda key, R, c: variance_of_rows(key, R, 1)),
    (OF_DIFFERENCES, "over n - 1", lambda key, R, c: variance_of_rows(key, c, 1)),
    (OF_REWARDS, "over n", lambda key, R, c: variance_of_rows(key, R, 0)),
    (OF_DIFFERENCES, "over n", lambda key, R, c: variance_of_rows(key, c, 0)),
)
OTHER_SPREADS: tuple[tuple[str, Spread], ...] = (
    (
        "the variance {}, not by its root",
        lambda key, R, c: tuple(v * v for v in variance_of_rows(key, R, 1)),
    ),
    (
        "the variance {}, not by its root",
        lambda key, R, c: tuple(v * v for v in variance_of_rows(key, R, 0)),
    ),
    (
        "the standard error {}, std / √n,",
        lambda key, R, c: per_key(
            key, R, lambda xs: [exact.variance(xs, 1) / len(xs)] * len(xs)
        ),
    ),
    (
        "the range {}",
        lambda key, R, c: per_key(
            key, R, lambda xs: [(max(xs) - min(xs)) ** 2] * len(xs)
        ),
    ),
    (
        "the mean absolute deviation {}",
        lambda key, R, c: per_key(
            key, c, lambda xs: [mean([abs(x) for x in xs]) ** 2] * len(xs)
        ),
    ),
)


@lru_cache(4096)
def _centered(center: str, where: str, batch: RewardBatch) -> Rows:
    """Return the rewards less this center of these rows; "" subtracts nothing."""
    return per_key(KEYS[where](batch), batch.R, CENTERS[center]) if center else batch.R


@lru_cache(4096)
def _spread(spread: Spread, where: str, batch: RewardBatch, c: Rows) -> Rows:
    """Return the square of the divisor of these rows, for each row."""
    return spread(KEYS[where](batch), batch.R, c)


def _formula(
    words: str,
    center: str,
    where: str = "",
    spread: Spread | None = None,
    rows_of_spread: str = "",
    *,
    id: str,
) -> AdvantageFault:
    """Make the fault of another formula.

    Args:
        words: what is done otherwise.
        center: a key of CENTERS, or "".
        where: a key of KEYS: the rows of the center.
        spread: what divides; None divides by nothing.
        rows_of_spread: a key of KEYS: the rows of the spread; "" for those of the
            center.
        id: the id of the fault.
    """
    variance = None
    if spread is not None:
        variance = partial(_spread, spread, rows_of_spread or where)
    change = AdvantageChange(
        lambda batch, right, k: _centered(center, where, batch), variance
    )
    return Fault(words, change, id=id)


def _formulas() -> Iterator[AdvantageFault]:
    """Yield the faults of other formulas, in the order in which they are tried."""
    yield _formula(
        "the reward itself, without a baseline or a division", "", id="reward-itself"
    )
    for center, where in product(CENTERS, KEYS):
        subtracted = f"{center} {where} is subtracted"
        yield _formula(
            f"{subtracted}, nothing divided", center, where, id="other-baseline"
        )
        for rows, (of, over, spread) in product(KEYS, STD):
            # a number that is subtracted from each of these rows leaves their std
            if rows == where and center != "the mean of the others":
                if of == OF_DIFFERENCES:
                    continue
                of = ""
            std = " ".join(filter(None, ("the std", of, rows, f"({over})")))
            yield _formula(
                f"{subtracted}, divided by {std}",
                center,
                where,
                spread,
                rows,
                id="other-baseline-and-divisor",
            )
        for words, spread in OTHER_SPREADS:
            yield _formula(
                f"{subtracted}, divided by {words.format(where)}",
                center,
                where,
                spread,
                id="other-baseline-and-divisor",
            )
    for where, (of, over, spread) in product(KEYS, STD):
        if of == OF_REWARDS:
            yield _formula(
                f"nothing is subtracted, divided by the std {where} ({over})",
                "",
                where,
                spread,
                id="no-baseline",
            )
    words = "whitened over tokens, where a long response counts more"
    yield Fault(
        words,
        AdvantageChange(_less_mean_over_tokens, partial(_variance_over_tokens, 0)),
        id="whitened-over-tokens",
    )
    yield Fault(
        words,
        AdvantageChange(_less_mean_over_tokens, partial(_variance_over_tokens, 1)),
        id="whitened-over-tokens",
    )


def _centered_reward_of_tokens(batch: RewardBatch) -> Rows:
    """Return for each token of the batch the reward of its response, less the mean of
    its prompt.
    """
    centered = _centered("the mean", "of its prompt", batch)
    return [centered[i] for i, n in enumerate(batch.lengths) for _ in range(n)]


def _less_mean_over_tokens(batch: RewardBatch, right: Floats, k: float) -> Rows:
    """Return the centered rewards of the responses, less their mean over all tokens."""
    mean_over_tokens = mean(_centered_reward_of_tokens(batch))
    return [x - mean_over_tokens for x in _centered("the mean", "of its prompt", batch)]


def _variance_over_tokens(ddof: int, batch: RewardBatch, c: Rows) -> Rows:
    """Return the variance of the centered rewards over all tokens, the same for each
    response.
    """
    return [exact.variance(_centered_reward_of_tokens(batch), ddof)] * len(c)


@cache
def known() -> tuple[AdvantageFault, ...]:
    """Return every fault of this file, in the order in which they are tried."""
    return (*_changes_of_right_advantages(), *_of_other_rewards(), *_formulas())
