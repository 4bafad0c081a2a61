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
    """What a fault makes of the advantages of a batch.

    numbers: of a batch, the right advantages and k. variance: where there is one,
    numbers are divided by its root, plus
    an eps that is read off. k: what {k} in the words is.
    """

    numbers: Callable[[RewardBatch, Floats, float], Floats | Rows]
    variance: Callable[[RewardBatch, Rows], Rows] | None = None
    # of the right answers and those found
    k: Callable[[Floats, Floats], float] | None = None


AdvantageFault: TypeAlias = Fault[AdvantageChange]


# ---- another answer ------------------------------------------------------------------
def _ratio(right: Floats, found: Floats, sign: int = 0) -> float:
    """Of the first that is not 0, or has this sign."""
    ratios = (
        y / x
        for x, y in zip(right, found, strict=True)
        if (x * sign if sign else abs(x)) > 1e-9
    )
    return next(ratios, 1.0)


def _largest(right: Floats, found: Floats) -> float:
    return max(map(abs, found))


def _added(right: Floats, found: Floats) -> float:
    return found[0] - right[0]


def _reordered(right: Floats, n: int) -> Floats:
    return [*right[n:], *right[:n]]


def _divided(words: str, size: Callable[[int], float], id: str) -> AdvantageFault:
    """By a function of the number of responses of the prompt."""

    def over(batch: RewardBatch, right: Floats, k: float) -> Floats:
        """The right advantages, each divided by what its prompt's responses give."""
        return [
            x / size(batch.group.count(group_id))
            for x, group_id in zip(right, batch.group, strict=True)
        ]

    return Fault(words, AdvantageChange(over), id=id)


def _answer(
    words: str,
    change: Callable[[float, float], float],
    k: Callable[[Floats, Floats], float] | None = None,
    *,
    id: str,
) -> AdvantageFault:
    """A change of each right advantage."""
    return Fault(
        words,
        AdvantageChange(lambda batch, right, k: [change(x, k) for x in right], k=k),
        id=id,
    )


def _named(
    words: str, name: str, ddof: int, of: tuple[str, ...], id: str
) -> AdvantageFault:
    """An estimator in place of another; eps is read off."""
    if name not in exact.DIVIDED_BY_STD:
        return Fault(
            words,
            AdvantageChange(lambda batch, right, k: exact.advantage(name, batch)),
            id=id,
            of=of,
        )

    def numerator(batch: RewardBatch, right: Floats, k: float) -> Rows:
        numerators, _ = exact.numerators_and_variances(name, batch, ddof)
        return numerators

    def variance(batch: RewardBatch, numerators: Rows) -> Rows:
        _, variances = exact.numerators_and_variances(name, batch, ddof)
        return variances

    return Fault(words, AdvantageChange(numerator, variance), id=id, of=of)


def _twice(ddof: int, batch: RewardBatch, right: Floats, k: float) -> Floats:
    return exact.advantage(
        "whiten", replace(batch, R=tuple(map(Fraction, right))), exact.Denominator(ddof)
    )


def _answers() -> Iterator[AdvantageFault]:
    """Faults that change the right advantages themselves."""
    itself = "the mean includes the response itself: G/(G-1) is missing"
    yield _named(
        itself, "group_mean", 1, id="mean-includes-itself", of=("leave_one_out",)
    )
    yield _answer(
        "the sign is flipped: bad answers are reinforced",
        lambda x, k: -x,
        id="advantages-negated",
    )
    yield _answer(
        "its absolute value: bad answers are reinforced",
        lambda x, k: abs(x),
        id="advantage-absolute",
    )
    yield _answer(
        "negative advantages are dropped",
        lambda x, k: max(x, 0.0),
        id="negative-advantages-dropped",
    )
    yield _answer(
        "positive advantages are dropped",
        lambda x, k: min(x, 0.0),
        id="positive-advantages-dropped",
    )
    yield _answer(
        "every advantage is {k:.5g} times what it should be",
        lambda x, k: k * x,
        _ratio,
        id="advantages-scaled",
    )
    yield _answer(
        "advantages are clipped to at most {k:.4g}",
        min,
        lambda right, found: max(found),
        id="advantages-clipped-above",
    )
    yield _answer(
        "advantages are clipped to at least {k:.4g}",
        max,
        lambda right, found: min(found),
        id="advantages-clipped-below",
    )
    # behind the bounds of one side: where one is met alone, the other is not known
    yield _answer(
        "advantages are clipped to ±{k:.4g}",
        lambda x, k: max(-k, min(k, x)),
        _largest,
        id="advantages-clipped",
    )
    yield _answer(
        "advantages below 0 are {k:.5g} times what they should be",
        lambda x, k: k * x if x < 0 else x,
        partial(_ratio, sign=-1),
        id="negative-advantages-scaled",
    )
    yield _answer(
        "advantages above 0 are {k:.5g} times what they should be",
        lambda x, k: k * x if x > 0 else x,
        partial(_ratio, sign=1),
        id="positive-advantages-scaled",
    )
    yield _answer(
        "{k:.4g} is added to every advantage",
        lambda x, k: x + k,
        _added,
        id="constant-added-to-advantages",
    )
    yield _answer("tanh of it", lambda x, k: math.tanh(x), id="advantage-tanh")
    yield _divided(
        "it is divided by the number of responses of its prompt",
        float,
        id="divided-by-group-size",
    )
    yield _divided(
        "it is divided by the square root of the number of responses of its prompt",
        math.sqrt,
        id="divided-by-root-of-group-size",
    )
    yield Fault(
        "each response has the advantage of the row in front",
        AdvantageChange(lambda batch, right, k: _reordered(right, -1)),
        id="advantages-of-row-before",
    )
    yield Fault(
        "each response has the advantage of the row behind",
        AdvantageChange(lambda batch, right, k: _reordered(right, 1)),
        id="advantages-of-row-after",
    )
    yield _answer(
        "it is rounded to float16",
        lambda x, k: torch.tensor(x).half().item(),
        id="rounded-to-float16",
    )
    yield _answer(
        "it is rounded to bfloat16",
        lambda x, k: torch.tensor(x).bfloat16().item(),
        id="rounded-to-bfloat16",
    )
    for ddof in (0, 1):
        yield Fault(
            "normalized twice: by prompt, then over the batch",
            AdvantageChange(partial(_twice, ddof)),
            id="advantages-whitened-over-batch",
        )
    for name in exact.DIVIDED_BY_STD:
        yield _named(
            "the std divides by G (population)",
            name,
            0,
            id="std-of-population",
            of=(name,),
        )
        yield _named(
            "the std divides by G - 1 (Bessel)", name, 1, id="std-of-sample", of=(name,)
        )
    for name in advantages.ADVANTAGES:
        if name == "signed":
            continue
        if name == "whiten":
            words = "it is whiten (over the batch, whatever the prompt)"
        else:
            words = f"it is {name}"
        others = tuple(n for n in advantages.ADVANTAGES if n != name)
        for ddof in (1, 0) if name in exact.DIVIDED_BY_STD else (1,):
            yield _named(words, name, ddof, others, id=f"estimator-{name}")


# ---- other formulas: a baseline of some rows, divided by a spread of some rows -------
def _median(xs: Rows) -> Fraction:
    s = sorted(xs)
    return (s[(len(s) - 1) // 2] + s[len(s) // 2]) / 2


def _stride(k: int, batch: RewardBatch) -> Sequence[Any]:
    return [i // k for i in range(len(batch.R))]


CENTRES: dict[str, Callable[[Rows], Rows]] = {
    "the mean": minus(mean),
    "the mean of the others": exact.minus_the_others,
    "the median": minus(_median),
    "the smallest reward": minus(min),
    "the largest reward": minus(max),
    "the sum": minus(lambda xs: sum(xs, Fraction(0))),
    "G/(G - 1) times the mean": minus(
        lambda xs: sum(xs, Fraction(0)) / max(len(xs) - 1, 1)
    ),
    "the first reward": minus(lambda xs: xs[0]),
}
KEYS: dict[str, Callable[[RewardBatch], Sequence[Any]]] = {
    "of its prompt": lambda batch: batch.group,
    "of the whole batch": lambda batch: [0] * len(batch.R),
    "of as many rows in a row as its prompt has (groups taken to be contiguous)": lambda batch: (
        sorted(batch.group)
    ),
} | {
    f"of {k} consecutive rows (a fixed stride)": partial(_stride, k)
    for k in (2, 3, 4, 5, 8)
}
# of (key, rewards, differences): the square of what divides
Spread = Callable[[Sequence[Any], Rows, Rows], Rows]
OF_REWARDS = "of the rewards"
OF_DIFFERENCES = "of the differences"
STD: tuple[tuple[str, str, Spread], ...] = (
    (OF_REWARDS, "over n - 1", lambda key, R, c: variance_of_rows(key, R, 1)),
    (OF_DIFFERENCES, "over n - 1", lambda key, R, c: variance_of_rows(key, c, 1)),
    (OF_REWARDS, "over n", lambda key, R, c: variance_of_rows(key, R, 0)),
    (OF_DIFFERENCES, "over n", lambda key, R, c: variance_of_rows(key, c, 0)),
)
OTHER: tuple[tuple[str, Spread], ...] = (
    (
        "the variance {}, not by its root",
        lambda key, R, c: tuple(v * v for v in variance_of_rows(key, R, 1)),
    ),
    (
        "the variance {}, not by its root",
        lambda key, R, c: tuple(v * v for v in variance_of_rows(key, R, 0)),
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
def _centred(centre: str, where: str, batch: RewardBatch) -> Rows:
    return per_key(KEYS[where](batch), batch.R, CENTRES[centre]) if centre else batch.R


@lru_cache(4096)
def _spread(spread: Spread, where: str, batch: RewardBatch, c: Rows) -> Rows:
    return spread(KEYS[where](batch), batch.R, c)


def _formula(
    words: str,
    centre: str,
    where: str = "",
    spread: Spread | None = None,
    there: str = "",
    *,
    id: str,
) -> AdvantageFault:
    """A fault with another center, over the rows that `where` names, or another
    spread, over the rows that `there` names.
    """
    var = partial(_spread, spread, there or where) if spread else None
    return Fault(
        words,
        AdvantageChange(lambda batch, right, k: _centred(centre, where, batch), var),
        id=id,
    )


def _formulas() -> Iterator[AdvantageFault]:
    """In the order in which they are tried."""
    yield _formula(
        "the reward itself, without a baseline or a division", "", id="reward-itself"
    )
    for centre, where in product(CENTRES, KEYS):
        said = f"{centre} {where} is subtracted"
        yield _formula(f"{said}, nothing divided", centre, where, id="other-baseline")
        for rows, (of, over, spread) in product(KEYS, STD):
            # a number that is subtracted from each of these rows leaves their std
            if rows == where and centre != "the mean of the others":
                if of == OF_DIFFERENCES:
                    continue
                of = ""
            std = " ".join(filter(None, ("the std", of, rows, f"({over})")))
            yield _formula(
                f"{said}, divided by {std}",
                centre,
                where,
                spread,
                rows,
                id="other-baseline-and-divisor",
            )
        for words, spread in OTHER:
            yield _formula(
                f"{said}, divided by {words.format(where)}",
                centre,
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
        AdvantageChange(_over_tokens, partial(_of_tokens, 0)),
        id="whitened-over-tokens",
    )
    yield Fault(
        words,
        AdvantageChange(_over_tokens, partial(_of_tokens, 1)),
        id="whitened-over-tokens",
    )


def _tokens(batch: RewardBatch) -> Rows:
    c = _centred("the mean", "of its prompt", batch)
    return [c[i] for i, n in enumerate(batch.lengths) for _ in range(n)]


def _over_tokens(batch: RewardBatch, right: Floats, k: float) -> Rows:
    m = mean(_tokens(batch))
    return [x - m for x in _centred("the mean", "of its prompt", batch)]


def _of_tokens(ddof: int, batch: RewardBatch, c: Rows) -> Rows:
    return [exact.variance(_tokens(batch), ddof)] * len(c)


@cache
def known() -> tuple[AdvantageFault, ...]:
    return (*_answers(), *_formulas())
