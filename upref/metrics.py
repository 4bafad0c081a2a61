# SPDX-License-Identifier: Apache-2.0
"""What P problems with n sampled answers each say of a policy: Avg@k, Pass@1, Maj@k,
Best@k, as fractions in [0, 1].

    c = number of correct answers among the n of a problem;    mean_p = mean over the problems

Every function returns an `Estimate` whose 95 % interval is over *problems*: how far the
value might lie from that of another draw of P such problems (and of their samples). Two
policies on the same problems are compared pairwise, problem by problem, and not by
looking whether two such intervals overlap. InputError on anything but a bool table [P,
n].
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from typing import Any

import numpy as np

from upref.errors import InputError

_Z = 1.959963984540054  # Φ(_Z) = 0.975


@dataclass(frozen=True)
class Estimate:
    """A metric and its 95 % interval, fractions in [0, 1] with low <= value <= high."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, per_problem: Any) -> "Estimate":
        """Mean m of P numbers x in [0, 1], and Wilson's interval at an effective number
        of problems N:

            (m + z²/2N ± z √(m(1-m)/N + z²/4N²)) / (1 + z²/N)        N = P · max(1, m(1-m) / s²),  s² = Σ(x-m)²/(P-1)

        m(1-m) is the largest variance that a mean of m allows, reached by answers that
        are right or wrong: then N = P and this is Wilson's interval. Averaging over n
        samples spreads less and counts as more problems. Where s² says nothing (one
        problem, or all alike) N = P. Of a handful of problems s² is itself uncertain:
        read with care.

        Args:
            per_problem: P numbers in [0, 1], one for each problem.

        Returns:
            The mean and its 95 % interval.
        """
        x = np.asarray(per_problem, dtype=np.float64)
        P = len(x)
        m = x.mean()
        s2 = x.var(ddof=1) if P > 1 else 0.0
        N = P * max(1.0, m * (1 - m) / s2) if np.ptp(x) > 0 else P
        middle = m + _Z**2 / (2 * N)
        half = _Z * sqrt(m * (1 - m) / N + _Z**2 / (4 * N**2))
        low = (middle - half) / (1 + _Z**2 / N)
        high = (middle + half) / (1 + _Z**2 / N)
        return cls(
            float(m), float(max(0.0, min(low, m))), float(min(1.0, max(high, m)))
        )


def avg_at_k(correct: Any) -> Estimate:
    """Avg@k = mean_p c/n: the share of correct answers, all n = k samples used.

    correct: bool [P, n], an array, a CPU tensor or nested lists.

    Args:
        correct: [P, n], whether each answer is correct.

    Returns:
        A mean in [0, 1] with its interval.
    """
    return Estimate.of(_checked_table(correct).mean(1))


def pass_at_1(correct: Any) -> Estimate:
    """Pass@1 = mean_p c/n: the probability that one answer is correct. n samples only
    make it less noisy.

    The same number as Avg@n: what is reported as Pass@1 may be of 1 sample a problem or
    of 32, so state n beside it.

    Args:
        correct: [P, n], whether each answer is correct.

    Returns:
        A mean in [0, 1] with its interval.
    """
    return avg_at_k(correct)


def best_at_k(correct: Any, k: int) -> Estimate:
    """Best@k = Pass@k = mean_p (1 - C(n-c, k) / C(n, k)): the probability that one of k
    answers at least is correct.

    Unbiased for 1 - (1 - p)^k: the share of the k-subsets of the n samples with a
    correct answer (Chen et al. 2021, arXiv 2107.03374, Eq. 1), here by exact integers.
    InputError unless 1 <= k <= n.

    Args:
        correct: [P, n], whether each answer is correct.
        k: how many answers are drawn without replacement, at most n.

    Returns:
        A mean in [0, 1] with its interval.
    """
    table = _checked_table(correct)
    n = table.shape[1]
    _check_count("k", k, n)
    by_c = np.array([(comb(n, k) - comb(n - c, k)) / comb(n, k) for c in range(n + 1)])
    return Estimate.of(by_c[table.sum(1)])


def best_at_k_replaced(correct: Any, k: int) -> Estimate:
    """mean_p (1 - (1 - c/n)^k): the same with the k answers drawn from the n *with*
    replacement, in closed form.

    The expectation of `best_at_k_bootstrap`, and never above `best_at_k`. Any k >= 1.

    Args:
        correct: [P, n], whether each answer is correct.
        k: how many answers are drawn with replacement.

    Returns:
        A mean in [0, 1] with its interval.
    """
    table = _checked_table(correct)
    _check_count("k", k)
    exponent = float(min(k, 10**300))  # no float holds a whole number much larger
    return Estimate.of(1 - (1 - table.mean(1)) ** exponent)


def best_at_k_bootstrap(
    correct: Any, k: int, draws: int = 1000, seed: int = 42
) -> Estimate:
    """verl's `best@k/mean`: the mean over `draws` random k-tuples of the n answers,
    drawn with replacement.

    Another quantity than `best_at_k`: its expectation is `best_at_k_replaced`. Draws as
    verl's `bootstrap_metric` does (legacy generator, the same tuples for every
    problem), and so returns the same number as verl for the same table.

    Args:
        correct: [P, n], whether each answer is correct.
        k: how many answers are drawn with replacement.
        draws: how many k-tuples.
        seed: of the generator.

    Returns:
        A mean in [0, 1] with its interval.

    Raises:
        InputError: k times draws is above 1e9, or the seed is out of range.
    """
    table = _checked_table(correct)
    _check_count("k", k)
    _check_count("draws", draws)
    if k * draws > 10**9:
        raise InputError(
            "so many draws do not fit into memory: k times draws is 1e9 at most."
        )
    if (
        isinstance(seed, bool)
        or not isinstance(seed, int | np.integer)
        or not 0 <= seed < 2**32
    ):
        raise InputError(
            f"seed must be a whole number from 0 to 2^32 - 1, got {repr(seed)[:60]}."
        )
    tuples = np.random.RandomState(seed).choice(
        table.shape[1], size=(draws, k), replace=True
    )
    return Estimate.of([row[tuples].any(1).mean() for row in table])


def maj_at_k(answers: Sequence[Sequence[Hashable]], correct: Any) -> Estimate:
    """Maj@k = mean_p [the answer with most of the n = k votes is correct]; tied answers
    share: the mean over them.

    That is the expectation when a tie is broken by a fair draw. verl gives a tie to the
    answer sampled first, and its `maj@k/mean` averages over tuples drawn with
    replacement. answers: [P][n] hashables, in the form that the checker compares ("1/2"
    and "0.5" are two answers). None is no answer: it has no vote, and a problem without
    votes scores 0. InputError if equal answers have different verdicts.

    Args:
        answers: [P][n], what each sample answers.
        correct: [P, n], whether each answer is correct.

    Returns:
        A mean in [0, 1] with its interval.
    """
    table = _checked_table(correct)
    rows: Any = (
        [_as_list(row) for row in answers]
        if isinstance(answers, Sequence)
        else _as_list(answers)
    )
    sized = isinstance(rows, list) and all(isinstance(row, Sequence) for row in rows)
    if (
        not sized
        or len(rows) != len(table)
        or any(len(row) != table.shape[1] for row in rows)
    ):
        raise InputError(
            f"answers must be {table.shape[0]} lists of {table.shape[1]} answers, the shape of `correct`."
        )
    return Estimate.of(
        [
            _score_of_problem(p, row, verdicts)
            for p, (row, verdicts) in enumerate(zip(rows, table, strict=True))
        ]
    )


def _as_list(x: Any) -> Any:
    """Return an array as a list, and everything else as it is."""
    return x.tolist() if isinstance(x, np.ndarray) else x


def _score_of_problem(
    problem: int, row: Sequence[Hashable], verdicts: np.ndarray
) -> float:
    """Return the share of the most frequent answers to one problem that is right; 0
    without an answer.

    Raises:
        InputError: equal answers have different verdicts, or one cannot be compared.
    """
    verdict: dict[Hashable, bool] = {None: False}  # None is no answer
    for answer, right in zip(row, verdicts.tolist(), strict=True):
        if not isinstance(answer, Hashable):
            raise InputError(
                f"problem {problem} has the answer {answer!r}, which cannot be compared: pass it as a string."
            )
        if verdict.setdefault(answer, right) != right:
            raise InputError(
                f"problem {problem} has {answer!r} marked both correct and wrong: check how answers are read."
            )
    votes = Counter(answer for answer in row if answer is not None)
    most_frequent = [answer for answer in votes if votes[answer] == max(votes.values())]
    return sum(verdict[answer] for answer in most_frequent) / max(len(most_frequent), 1)


def _checked_table(correct: Any) -> np.ndarray:
    """Return the verdicts as a bool array [P, n]; InputError where they are none."""
    try:
        table = np.asarray(correct)
    except (TypeError, ValueError) as e:
        raise InputError(
            "correct must be a rectangular bool table [P, n] on the CPU: n verdicts for each problem."
        ) from e
    if table.dtype != bool or table.ndim != 2 or table.size == 0:
        got = f"{table.dtype} {table.shape}"
        raise InputError(
            f"correct must be a bool table [P, n], not empty, got {got}: compare scores with a threshold."
        )
    return table


def _check_count(name: str, k: Any, most: float = float("inf")) -> None:
    """Raise InputError unless k is a whole number from 1 to `most`."""
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or not 1 <= k <= most:
        if most < float("inf"):
            limit = f"between 1 and the {most} samples of a problem"
        else:
            limit = ">= 1"
        raise InputError(f"{name} must be a whole number {limit}, got {k!r}.")
