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
# estimators that divide by a standard deviation
DIVIDED_BY_STD = ("group_norm", "whiten", "group_mean_whiten")
UNGROUPED = ("whiten", "signed", "reward")  # estimators that do not read groups
LENGTHS = (3, 1, 4, 2, 5)  # of responses, in tokens


@dataclass(frozen=True)
class RewardBatch:
    """Rewards and the prompts that they belong to.

    Attributes:
        R: a reward for each response.
        group: the id of the prompt of each response.
    """

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
        """Return the batch with every reward multiplied by k, and a number added.

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
    """Return a length in tokens for each response, for functions of tokens. It depends
    on the reward and the prompt alone, so it stays with the row in every order.

    Args:
        R: rewards; NaN and None are allowed.
        group: prompt ids.

    Returns:
        A number of tokens for each response.
    """
    numbers = []
    for reward, group_id in zip(R, group, strict=True):
        is_nan = reward != reward
        quarters = 0 if is_nan else int(4 * (reward or 0))
        numbers.append(LENGTHS[(quarters + group_id) % len(LENGTHS)])
    return numbers


EVEN_GROUPS = RewardBatch.of(
    "1 0 0 1  1 0 0 0  1/4 1/2 -1 2", "0 0 0 0  1 1 1 1  2 2 2 2"
)
UNEVEN_GROUPS = RewardBatch.of(
    "1 0  1 1/2 0 -1 3/4  1 0 0  2 1/4", "0 0  1 1 1 1 1  2 2 2  3 3"
)
INTERLEAVED_PROMPTS = RewardBatch.of(
    "1 1/2 0 0 -1 1 1/4 2 0 1 3/4 0", "0 1 2 2 1 0 1 0 2 2 0 1"
)
LONE_RESPONSES = RewardBatch.of("3/4 1 0 1/2 2", "0 1 1 1 2")
EQUAL_REWARDS = RewardBatch.of(
    "1/10 1/10 1/10 1/10 1/10 1/10 1/10 1 0 1", "0 0 0 0 0 0 0 1 1 1"
)
# prompts all of whose responses fail, and all of whose responses succeed
SOLVED_PROMPTS = RewardBatch.of(
    "0 0 0 0  1 1 1 1  -1 -1 -1 -1  1 0 0 1", "0 0 0 0  1 1 1 1  2 2 2 2  3 3 3 3"
)
# a hundred prompts of four responses, no two of which are all alike
HUNDRED_PROMPTS = RewardBatch(
    tuple(Fraction(i * i % 11 + i % 3, 4) for i in range(400)),
    tuple(i // 4 for i in range(400)),
)
GRADED_REWARDS = RewardBatch.of(
    "7/10 3/4 4/5 41/50  1/3 2/3 5/7 1/9  91/100 23/25 93/100 19/20",
    "0 0 0 0  1 1 1 1  2 2 2 2",
)  # no multiples of 1/2, so float32 rounds them
# an advantage is up to 11
LARGE_GROUPS = RewardBatch(
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


def per_key(
    key: Sequence[Any], R: Rows, f: Callable[[Rows], Rows]
) -> tuple[Fraction, ...]:
    """Apply a function to the rewards of each key, and put its numbers back in place.

    Args:
        key: the key of each row; equal keys belong together.
        R: rewards.
        f: from the rewards of one key to as many numbers.
    """
    rows_of: dict[Any, list[int]] = {}
    for i, k in enumerate(key):
        rows_of.setdefault(k, []).append(i)
    numbers = [Fraction(0)] * len(R)
    for rows in rows_of.values():
        for i, number in zip(rows, f([R[i] for i in rows]), strict=True):
            numbers[i] = number
    return tuple(numbers)


def minus(baseline: Callable[[Rows], Fraction]) -> Callable[[Rows], Rows]:
    """Make an estimator that subtracts a baseline from the rewards of a group.

    Args:
        baseline: from the rewards of a group to one number.

    Returns:
        A function from the rewards of a group to their advantages.
    """

    def centered(xs: Rows) -> Rows:
        """Return the rewards less their baseline."""
        subtracted = baseline(xs)
        return [x - subtracted for x in xs]

    return centered


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
    """Divide the centered rewards by their mean; 0 where the mean is not positive.

    Args:
        xs: the rewards of a group.

    Returns:
        Their advantages.
    """
    m = mean(xs)
    return [(x - m) / m if m > 0 else Fraction(0) for x in xs]


def variance_of_rows(key: Sequence[Any], R: Rows, ddof: int) -> tuple[Fraction, ...]:
    """Return for each row the variance of all rows of its key.

    Args:
        key: the key of each row.
        R: rewards.
        ddof: 1 divides by n - 1, 0 by n.
    """
    return per_key(key, R, lambda xs: [variance(xs, ddof)] * len(xs))


def numerators_and_variances(name: str, b: RewardBatch, ddof: int) -> tuple[Rows, Rows]:
    """Return the numerator and the variance of each response's advantage: the reward
    less a mean, and the variance whose root divides it.

    Args:
        name: the name of the estimator, of DIVIDED_BY_STD.
        b: the batch.
        ddof: 1 divides by n - 1, 0 by n.
    """
    whole_batch = (0,) * len(b.R)
    rows_of_mean = whole_batch if name == "whiten" else b.group
    rows_of_variance = b.group if name == "group_norm" else whole_batch
    numerators = per_key(rows_of_mean, b.R, minus(mean))
    return numerators, variance_of_rows(rows_of_variance, numerators, ddof)


# ---- denominators --------------------------------------------------------------------
@dataclass(frozen=True)
class Form:
    """A formula of a standard deviation and eps.

    Attributes:
        value: from a variance and eps to the denominator.
        eps: from a denominator and a variance to eps, the inverse.
        effect_of_large_eps: the words for what a large eps does.
    """

    value: Callable[[float, float], float]
    eps: Callable[[float, float], float]
    effect_of_large_eps: str = (
        "it shrinks every advantage, most where a group nearly agrees"
    )


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
    """What an estimator of DIVIDED_BY_STD divides by.

    Attributes:
        ddof: 1 if the variance divides by n - 1, 0 if it divides by n.
        eps: the number that bounds the denominator from below.
        form: how the two are combined, a name of FORMS.
        smallest_std: the smallest standard deviation at which this denominator was
            measured; 0 where it holds at all that were tried.
    """

    ddof: int = 1
    eps: float = 0.0
    form: str = "std + eps"
    smallest_std: float = 0.0

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


def fit_denominator(
    c: Rows,
    var: Rows,
    found: Sequence[float],
    tol: float,
    ddof: int = 1,
    eps: float | None = None,
) -> Denominator | None:
    """Return the denominator with which the numerators give the advantages found: the
    first form of FORMS that fits all. None where none fits, where an advantage that
    should not be 0 is 0 or not finite, and where no advantage shows a denominator.

    Args:
        c: numerators, one for each advantage.
        var: variances, one for each advantage.
        found: the advantages that the function returned.
        tol: the relative error that is allowed.
        ddof: of the variances.
        eps: the eps, where it is known; None measures it.
    """
    # an advantage of 0, or one that is divided by eps alone, shows no denominator
    informative = [
        (numerator, row_variance, found_advantage)
        for numerator, row_variance, found_advantage in zip(c, var, found, strict=True)
        if numerator and row_variance
    ]
    if not informative:
        return None
    if any(
        not found_advantage or not math.isfinite(found_advantage)
        for *_, found_advantage in informative
    ):
        return None
    # the denominator of each advantage, beside its variance
    measured = sorted(
        (float(row_variance), float(numerator) / found_advantage)
        for numerator, row_variance, found_advantage in informative
    )
    smallest_variance, denominator_there = measured[0]  # it shows eps best
    slack = 10 * tol
    for name, form in FORMS.items():
        if eps is not None:
            form_eps = eps
        elif (
            abs(form.value(smallest_variance, 0.0) - denominator_there)
            <= slack * denominator_there
        ):
            form_eps = 0.0
        else:
            form_eps = form.eps(denominator_there, smallest_variance)
        if form_eps >= 0 and all(
            denominator > 0
            and abs(form.value(row_variance, form_eps) - denominator)
            <= slack * denominator
            for row_variance, denominator in measured
        ):
            return Denominator(ddof, form_eps, name)
    return None


def advantage(
    name: str, batch: RewardBatch, denominator: Denominator = Denominator()
) -> list[float]:
    """Return the advantages of an estimator of upref.advantages, computed in fractions
    and rounded once or twice at the end.

    Args:
        name: the name of the estimator.
        batch: the batch.
        denominator: what an estimator of DIVIDED_BY_STD divides by.

    Returns:
        A number for each response.
    """
    match name:
        case "group_mean":
            return [float(x) for x in per_key(batch.group, batch.R, minus(mean))]
        case "leave_one_out":
            return [float(x) for x in per_key(batch.group, batch.R, minus_the_others)]
        case "maxrl":
            return [float(x) for x in per_key(batch.group, batch.R, over_the_mean)]
        case "reward":
            return [float(x) for x in batch.R]
        case "signed":
            return [1.0 if x > 0 else -1.0 for x in batch.R]
    numerators, variances = numerators_and_variances(name, batch, denominator.ddof)
    return [
        float(numerator) / denominator.of(row_variance) if numerator else 0.0
        for numerator, row_variance in zip(numerators, variances, strict=True)
    ]


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
