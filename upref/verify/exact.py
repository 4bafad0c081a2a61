# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators in exact rationals: one floating-point division (and square
root) at the very end.

A second witness beside upref.advantages, from the equations in its docstrings; with the
batches to compare on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Rows = Sequence[Fraction]
# divided by a standard deviation
NORMED = ("group_norm", "whiten", "group_mean_whiten")
UNGROUPED = ("whiten", "signed", "reward")
LENGTHS = (3, 1, 4, 2, 5)


@dataclass(frozen=True)
class RewardBatch:
    """R: a reward per response. group: its prompt."""

    R: tuple[Fraction, ...]
    group: tuple[int, ...]

    @staticmethod
    def of(rewards: str, group: str) -> "RewardBatch":
        """Read a batch from text: `RewardBatch.of("1 0 1/2", "0 0 1")`.

        Args:
            rewards: numbers or fractions, separated by spaces.
            group: prompt ids, one for each reward.

        Returns:
            The batch.
        """
        return RewardBatch(
            tuple(map(Fraction, rewards.split())), tuple(map(int, group.split()))
        )

    def take(self, rows: Sequence[int]) -> "RewardBatch":
        """Select rows.

        Args:
            rows: their indices, in the order of the result.

        Returns:
            The batch of these rows.
        """
        return RewardBatch(
            tuple(self.R[i] for i in rows), tuple(self.group[i] for i in rows)
        )

    def times(self, k: Fraction | int, plus: int = 0) -> "RewardBatch":
        """Multiply every reward, then add a number.

        Args:
            k: the factor.
            plus: what is added.

        Returns:
            The batch with the same groups.
        """
        return RewardBatch(tuple(k * x + plus for x in self.R), self.group)

    def rows_of(self, g: int) -> list[int]:
        """Find the rows of a group.

        Args:
            g: its prompt id.

        Returns:
            Their indices, in order.
        """
        return [i for i, h in enumerate(self.group) if h == g]

    @property
    def lengths(self) -> list[int]:
        return lengths(self.R, self.group)


def lengths(R: Sequence[Any], group: Sequence[int]) -> list[int]:
    """Of each response in tokens, for functions of tokens; it travels with the row. R
    may hold NaN and None.

    Args:
        R: rewards.
        group: prompt ids.

    Returns:
        A number of tokens for each response.
    """
    return [
        LENGTHS[(int(4 * (x or 0)) + group_id if x == x else group_id) % 5]
        for x, group_id in zip(R, group, strict=True)
    ]


EVEN = RewardBatch.of("1 0 0 1  1 0 0 0  1/4 1/2 -1 2", "0 0 0 0  1 1 1 1  2 2 2 2")
UNEVEN = RewardBatch.of(
    "1 0  1 1/2 0 -1 3/4  1 0 0  2 1/4", "0 0  1 1 1 1 1  2 2 2  3 3"
)
INTERLEAVED = RewardBatch.of(
    "1 1/2 0 0 -1 1 1/4 2 0 1 3/4 0", "0 1 2 2 1 0 1 0 2 2 0 1"
)
SINGLE = RewardBatch.of("3/4 1 0 1/2 2", "0 1 1 1 2")
EQUAL = RewardBatch.of(
    "1/10 1/10 1/10 1/10 1/10 1/10 1/10 1 0 1", "0 0 0 0 0 0 0 1 1 1"
)
# prompts all of whose responses fail, and all of whose responses succeed
SOLVED = RewardBatch.of(
    "0 0 0 0  1 1 1 1  -1 -1 -1 -1  1 0 0 1", "0 0 0 0  1 1 1 1  2 2 2 2  3 3 3 3"
)
# a hundred prompts of four responses, no two of which are all alike
PROMPTS = RewardBatch(
    tuple(Fraction(i * i % 11 + i % 3, 4) for i in range(400)),
    tuple(i // 4 for i in range(400)),
)
FINE = RewardBatch.of(
    "7/10 3/4 4/5 41/50  1/3 2/3 5/7 1/9  91/100 23/25 93/100 19/20",
    "0 0 0 0  1 1 1 1  2 2 2 2",
)  # no halves
# A up to 11
LARGE = RewardBatch(
    tuple(Fraction(i % 128 == 77 or i == 200) for i in range(256)),
    (0,) * 128 + (1,) * 128,
)


# ---- parts of an estimator -----------------------------------------------------------
def mean(xs: Rows) -> Fraction:
    """Return the exact mean.

    Args:
        xs: at least one number.
    """
    return sum(xs, Fraction(0)) / len(xs)


def variance(xs: Rows, ddof: int) -> Fraction:
    """Return the exact variance; that of one number with ddof 1 is 0.

    Args:
        xs: at least one number.
        ddof: 0 divides by the count, 1 by one less.
    """
    m = mean(xs)
    return sum(((x - m) ** 2 for x in xs), Fraction(0)) / max(len(xs) - ddof, 1)


def by(key: Sequence[Any], R: Rows, f: Callable[[Rows], Rows]) -> tuple[Fraction, ...]:
    """f of the rewards of each key, put back in place.

    Args:
        key: of each row; equal keys belong together.
        R: rewards.
        f: from the rewards of one key to as many numbers.
    """
    rows: dict[str, Any] = {}
    for i, k in enumerate(key):
        rows.setdefault(k, []).append(i)
    out = [Fraction(0)] * len(R)
    for group_rows in rows.values():
        for i, x in zip(group_rows, f([R[i] for i in group_rows]), strict=True):
            out[i] = x
    return tuple(out)


def minus(baseline: Callable[[Rows], Fraction]) -> Callable[[Rows], Rows]:
    """Make an estimator that subtracts a baseline from the rewards of a group.

    Args:
        baseline: from the rewards of a group to one number.

    Returns:
        A function from the rewards of a group to their advantages.
    """

    def centred(xs: Rows) -> Rows:
        batch = baseline(xs)
        return [x - batch for x in xs]

    return centred


def minus_the_others(xs: Rows) -> Rows:
    """Subtract from each reward the mean of the other ones (RLOO); 0 without others.

    Args:
        xs: the rewards of a group.

    Returns:
        Their advantages.
    """
    total = sum(xs, Fraction(0))
    n = len(xs)
    return [x - (total - x) / (n - 1) if n > 1 else Fraction(0) for x in xs]


def over_the_mean(xs: Rows) -> Rows:
    """Divide the centred rewards by their mean; 0 where the mean is not positive.

    Args:
        xs: the rewards of a group.

    Returns:
        Their advantages.
    """
    m = mean(xs)
    return [(x - m) / m if m > 0 else Fraction(0) for x in xs]


def deviation(key: Sequence[Any], R: Rows, ddof: int) -> tuple[Fraction, ...]:
    """The variance of the rows of its key, for each row.

    Args:
        key: of each row.
        R: rewards.
        ddof: 1 divides by n - 1, 0 by n.
    """
    return by(key, R, lambda xs: [variance(xs, ddof)] * len(xs))


def parts(name: str, b: RewardBatch, ddof: int) -> tuple[Rows, Rows]:
    """Numerator and variance of each response, of an estimator of NORMED.

    Args:
        name: of the estimator.
        b: the batch.
        ddof: 1 divides by n - 1, 0 by n.
    """
    batch = (0,) * len(b.R)
    c = by(batch if name == "whiten" else b.group, b.R, minus(mean))
    return c, deviation(b.group if name == "group_norm" else batch, c, ddof)


# ---- what stands under the bar -------------------------------------------------------
@dataclass(frozen=True)
class Form:
    """value: of a variance and eps. eps: of a denominator that was found and the
    variance. large: what that does.
    """

    value: Callable[[float, float], float]
    eps: Callable[[float, float], float]
    large: str = "it shrinks every advantage, most where a group nearly agrees"


FORMS = {
    "std + eps": Form(lambda v, eps: math.sqrt(v) + eps, lambda d, v: d - math.sqrt(v)),
    "√(var + eps)": Form(lambda v, eps: math.sqrt(v + eps), lambda d, v: d * d - v),
    "max(std, eps)": Form(
        lambda v, eps: max(math.sqrt(v), eps),
        lambda d, v: d,
        "a floor: it shrinks the advantages of a group that nearly agrees",
    ),
}


@dataclass(frozen=True)
class Denominator:
    """What an estimator of NORMED divides by. least: the smallest std beside which it
    was seen, 0 beside any.
    """

    ddof: int = 1
    eps: float = 0.0
    form: str = "std + eps"
    least: float = 0.0

    def of(self, var: Fraction) -> float:
        """Return what advantages are divided by.

        Args:
            var: the exact variance of the rewards.

        Returns:
            The standard deviation with its eps, in the unit of the rewards.
        """
        return FORMS[self.form].value(float(var), self.eps)

    def __str__(self) -> str:
        if not self.eps:
            return "the std alone"
        return f"{self.form} with eps = {self.eps:.3g}"


def fit(
    c: Rows,
    var: Rows,
    found: Sequence[float],
    tol: float,
    ddof: int = 1,
    eps: float | None = None,
) -> Denominator | None:
    """The Denominator with which c over it is what was found, None where none is; eps
    where it is known.

    Args:
        c: numerators.
        var: variances.
        found: what the function answered.
        tol: the relative error that is allowed.
        ddof: of the variances.
    """
    use = [(x, v, a) for x, v, a in zip(c, var, found, strict=True) if x and v]
    if not use or any(not a or not math.isfinite(a) for *_, a in use):
        return None
    d = sorted((float(v), float(x) / a) for x, v, a in use)
    v0, d0 = d[0]  # the smallest variance shows eps best
    slack = 10 * tol
    for name, form in FORMS.items():
        if eps is not None:
            e = eps
        elif abs(form.value(v0, 0.0) - d0) <= slack * d0:
            e = 0.0
        else:
            e = form.eps(d0, v0)
        if e >= 0 and all(
            y > 0 and abs(form.value(v, e) - y) <= slack * y for v, y in d
        ):
            return Denominator(ddof, e, name)
    return None


def advantage(
    name: str, batch: RewardBatch, divided: Denominator = Denominator()
) -> list[float]:
    """The advantages called `name` of upref.advantages, each rounded once or twice.

    Args:
        name: of the estimator.
        batch: the batch.
        divided: what it divides by.

    Returns:
        A number for each response.
    """
    match name:
        case "group_mean":
            return [float(x) for x in by(batch.group, batch.R, minus(mean))]
        case "leave_one_out":
            return [float(x) for x in by(batch.group, batch.R, minus_the_others)]
        case "maxrl":
            return [float(x) for x in by(batch.group, batch.R, over_the_mean)]
        case "reward":
            return [float(x) for x in batch.R]
        case "signed":
            return [1.0 if x > 0 else -1.0 for x in batch.R]
    c, var = parts(name, batch, divided.ddof)
    return [float(x) / divided.of(v) if x else 0.0 for x, v in zip(c, var, strict=True)]


def nearly_equal(x: Sequence[float], y: Sequence[float], tol: float) -> bool:
    """Tell whether two lists are equal up to rounding; NaN equals NaN.

    Args:
        x: the reference.
        y: of the same length; another length is a difference.
        tol: relative to x, and absolute below |x| = 1.

    Returns:
        Whether all pairs are near.
    """
    return len(x) == len(y) and all(
        a == b
        or abs(a - b) <= tol * max(1.0, abs(a))
        or (math.isnan(a) and math.isnan(b))
        for a, b in zip(x, y, strict=True)
    )
