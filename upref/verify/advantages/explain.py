# SPDX-License-Identifier: Apache-2.0
"""What a wrong advantage function is likely to be: known slips as records, each computed exactly."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache, partial
from typing import Any

from upref import advantages
from upref.verify.advantages.exact import (
    NORMED,
    Batch,
    Denominator,
    Rows,
    by,
    deviation,
    exact,
    fit,
    mean,
    minus,
    minus_the_others,
    near,
    variance,
)  # fmt: skip

Numbers = Sequence[float] | Rows
SMALL = 1e-3  # an eps that a slip may come with


@dataclass(frozen=True)
class Slip:
    """words: {k} is a number that is read off. kind: what it changes. numbers: what it answers with; where there is a
    variance, what it divides by the root of that, eps unknown. of: the estimators that it is a slip of, () for all.
    """

    words: str
    kind: str  # answer | estimator | divisor | formula
    numbers: Callable[[Any, Batch, float], Numbers]
    variance: Callable[[Batch, Rows], Rows] | None = None
    k: Callable[[Sequence[float], Sequence[float]], float] | None = None  # of expected and found
    of: tuple[str, ...] = ()


def cause(case: Any, batches: Sequence[Batch]) -> str:
    """The first slip that gives what was found on every one of these batches, in words; "" where none does."""
    found = [a for b in batches for a in case.f(b)]
    if any(not math.isfinite(a) for a in found):
        return "0/0: the std of a group of one, or of equal rewards, is 0 or NaN"
    right = [x for b in batches for x in case.expected(b)]
    likely = ""
    for slip in slips():
        if slip.of and case.name not in slip.of:
            continue
        k = slip.k(right, found) if slip.k else 0.0
        eps = _eps(slip, case, batches, found, k)
        if eps is not None and eps <= SMALL:
            return slip.words.format(k=k)
        if eps is not None and eps <= 1.0:
            likely = likely or f"{slip.words.format(k=k)}, eps = {eps:.3g}"
    return likely


def _eps(slip: Slip, case: Any, batches: Sequence[Batch], found: Sequence[float], k: float) -> float | None:
    """The eps with which the slip gives what was found; 0 where nothing is divided; None where none fits."""
    each = [slip.numbers(case, b, k) for b in batches]
    numbers = [x for part in each for x in part]
    if slip.variance is None:
        return 0.0 if near([float(x) for x in numbers], found, case.f.tol) else None
    if any(x * a < 0 for x, a in zip(numbers, found, strict=True)):
        return None  # whatever it is divided by
    var = [v for b, c in zip(batches, each, strict=True) for v in slip.variance(b, c)]  # type: ignore[arg-type]
    if any(bool(x) != (abs(a) > case.f.tol) for x, v, a in zip(numbers, var, found, strict=True) if v):
        return None
    got = fit(numbers, var, found, case.f.tol)  # type: ignore[arg-type]
    return got.eps if got else None


def _largest(right: Sequence[float], found: Sequence[float]) -> float:
    return max(map(abs, found))


def _ratio(right: Sequence[float], found: Sequence[float]) -> float:
    return next((y / x for x, y in zip(right, found, strict=True) if abs(x) > 1e-9), 1.0)


def _twice(ddof: int, case: Any, b: Batch, k: float) -> Numbers:
    once = replace(b, R=tuple(Fraction(x) for x in case.expected(b)))
    return exact("whiten", once, replace(case.divided, ddof=ddof, eps=0.0))


def _other_ddof(case: Any, b: Batch, k: float, ddof: int) -> Numbers:
    return exact(case.name, b, replace(case.divided, ddof=ddof))


def _answer(words: str, change: Callable[[float, float], float], k: Any = None) -> Slip:
    """A change of each right advantage."""
    return Slip(words, "answer", lambda case, b, k: [change(x, k) for x in case.expected(b)], k=k)


CHANGES = (
    Slip("the mean includes the response itself: G/(G-1) is missing", "estimator",
         lambda case, b, k: exact("group_mean", b), of=("leave_one_out",)),
    _answer("the sign is flipped: bad answers are reinforced", lambda x, k: -x),
    _answer("its absolute value: bad answers are reinforced", lambda x, k: abs(x)),
    _answer("negative advantages are dropped", lambda x, k: max(x, 0.0)),
    _answer("positive advantages are dropped", lambda x, k: min(x, 0.0)),
    _answer("every advantage is {k:.5g} times what it should be", lambda x, k: k * x, _ratio),
    _answer("advantages are clipped to ±{k:.4g}", lambda x, k: max(-k, min(k, x)), _largest),
    *(Slip("normalised twice: by prompt, then over the batch", "answer", partial(_twice, d)) for d in (0, 1)),
    Slip("the std divides by G (population)", "divisor", partial(_other_ddof, ddof=0), of=NORMED),
    Slip("the std divides by G - 1 (Bessel)", "divisor", partial(_other_ddof, ddof=1), of=NORMED),
)  # fmt: skip


# ---- other formulas: a baseline of some rows, divided by a spread of some rows ---------------------------------------
def _median(xs: Rows) -> Fraction:
    s = sorted(xs)
    return (s[(len(s) - 1) // 2] + s[len(s) // 2]) / 2


CENTRES: dict[str, Callable[[Rows], Rows]] = {
    "the mean": minus(mean),
    "the mean of the others": minus_the_others,
    "the median": minus(_median),
    "the smallest reward": minus(min),
    "the largest reward": minus(max),
    "the sum": minus(lambda xs: sum(xs, Fraction(0))),
    "the sum over G - 1, the response itself included": minus(
        lambda xs: sum(xs, Fraction(0)) / max(len(xs) - 1, 1)
    ),
    "the first reward": minus(lambda xs: xs[0]),
}  # fmt: skip
KEYS: dict[str, Callable[[Batch], Sequence]] = {
    "of its prompt": lambda b: b.group,
    "of the whole batch": lambda b: [0] * len(b.R),
    "of as many rows in a row as its prompt has (groups taken to be contiguous)": lambda b: sorted(b.group),
    **{
        f"of {k} consecutive rows (a fixed stride)": lambda b, k=k: [i // k for i in range(len(b.R))]  # type: ignore[misc]
        for k in (2, 3, 4, 5, 8)
    },
}


Spread = Callable[[Sequence, Rows, Rows], Rows]  # of (key, rewards, differences): the square of what divides
STD: tuple[tuple[str, Spread], ...] = (
    ("(over G - 1)", lambda key, R, c: deviation(key, R, 1)),
    ("(over G - 1)", lambda key, R, c: deviation(key, c, 1)),
    ("(over G)", lambda key, R, c: deviation(key, R, 0)),
    ("(over G)", lambda key, R, c: deviation(key, c, 0)),
)
OTHER: tuple[tuple[str, Spread], ...] = (
    ("the variance {}, not by its root", lambda key, R, c: tuple(v * v for v in deviation(key, R, 1))),
    ("the variance {}, not by its root", lambda key, R, c: tuple(v * v for v in deviation(key, R, 0))),
    ("the range {}", lambda key, R, c: by(key, R, lambda xs: [(max(xs) - min(xs)) ** 2] * len(xs))),
    ("the mean absolute difference {}",
     lambda key, R, c: by(key, c, lambda xs: [mean([abs(x) for x in xs]) ** 2] * len(xs))),
)  # fmt: skip


@lru_cache(4096)
def _centred(centre: str, where: str, b: Batch) -> Rows:
    return by(KEYS[where](b), b.R, CENTRES[centre])


def _difference(centre: str, where: str, case: Any, b: Batch, k: float) -> Rows:
    return _centred(centre, where, b)


@lru_cache(4096)
def _spread(spread: Spread, where: str, b: Batch, c: Rows) -> Rows:
    return spread(KEYS[where](b), b.R, c)


def _formulas() -> Iterator[Slip]:
    """In the order in which they are tried."""
    yield Slip("the reward itself: nothing is subtracted and nothing divided", "formula", lambda case, b, k: b.R)
    for centre in CENTRES:
        for where in KEYS:
            numbers = partial(_difference, centre, where)
            said = f"{centre} {where} is subtracted"
            yield Slip(f"{said}, nothing divided", "formula", numbers)
            for there in KEYS:
                for over, std in STD:
                    words = f"{said}, divided by the std {there} {over}"
                    yield Slip(words, "formula", numbers, partial(_spread, std, there))
            for words, spread in OTHER:
                yield Slip(
                    f"{said}, divided by {words.format(where)}", "formula", numbers, partial(_spread, spread, where)
                )
    for where in KEYS:
        for _, std in STD[::2]:
            words = f"nothing is subtracted, divided by the std {where}"
            yield Slip(words, "formula", lambda case, b, k: b.R, partial(_spread, std, where))
    for ddof in (0, 1):
        words = "whitened over tokens, where a long response counts more"
        yield Slip(words, "formula", _over_tokens, partial(_of_tokens, ddof))


def _tokens(b: Batch) -> Rows:
    c = _centred("the mean", "of its prompt", b)
    return [c[i] for i, n in enumerate(b.lengths) for _ in range(n)]


def _of_tokens(ddof: int, b: Batch, c: Rows) -> Rows:
    return [variance(_tokens(b), ddof)] * len(c)


def _over_tokens(case: Any, b: Batch, k: float) -> Rows:
    m = mean(_tokens(b))
    return [x - m for x in _centred("the mean", "of its prompt", b)]


def _other(name: str, ddof: int, case: Any, b: Batch, k: float) -> Numbers:
    return exact(name, b, Denominator(ddof))


def _estimators() -> Iterator[Slip]:
    known = [name for name in advantages.ADVANTAGES if name != "signed"]
    for name in known:
        words = f"it is {name}" + " (over the batch, whatever the prompt)" * (name == "whiten")
        others = tuple(n for n in advantages.ADVANTAGES if n != name)
        for ddof in (1, 0) if name in NORMED else (1,):
            yield Slip(words, "estimator", partial(_other, name, ddof), of=others)


@cache
def slips() -> tuple[Slip, ...]:
    return (*CHANGES, *_estimators(), *_formulas())
