# SPDX-License-Identifier: Apache-2.0
"""Table 1 of fan2026up: its numbers as they are printed, and what rounding allows.

A printed percentage p is some k of n answers, rounded: 100 k/n lies within half a unit of
the last place of p (the GRIM test, Brown and Heathers 2017). n is the same for a column.
"""

import csv
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, log, prod
from pathlib import Path

FILE = Path(__file__).parent / "fan2026up_table1.csv"
MOST = 2000  # answers, where their number is searched for


@dataclass(frozen=True)
class ResultsTable:
    """What was printed.

    Attributes:
        columns: the benchmarks.
        rows: the methods.
        cells: percentages as text, [rows, columns].
        averages: the printed average of each row.
        answers: how many answers make the numbers of each column possible: those of
            the row `n`, which is not the paper's.
    """

    columns: list[str]
    rows: list[str]
    cells: list[list[str]]
    averages: list[str]
    answers: list[int]


def read() -> ResultsTable:
    """Read the table."""
    text = FILE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    head, answers, *rows = csv.reader(lines)
    return ResultsTable(
        columns=head[1:-1],
        rows=[row[0] for row in rows],
        cells=[row[1:-1] for row in rows],
        averages=[row[-1] for row in rows],
        answers=[prod(map(int, n.split("x"))) for n in answers[1:-1]],
    )


@lru_cache(maxsize=100_000)
def numerators(text: str, n: int) -> range:
    """Return all k from 0 to n for which 100 k/n rounds to that text, a tie either way;
    an empty range where there is none.
    """
    value, half = Fraction(text), half_a_unit(text)
    least = ceil((value - half) * n / 100)
    most = floor((value + half) * n / 100)
    return range(max(0, least), min(n, most) + 1)


def half_a_unit(text: str) -> Fraction:
    """Half a unit of the last place: what rounding may have taken or given."""
    return Fraction(1, 2 * 10 ** len(text.partition(".")[2]))


def possible(texts: list[str], most: int) -> list[int]:
    """All n up to `most` for which every one of these percentages is some k/n."""
    return [n for n in range(1, most + 1) if all(numerators(t, n) for t in texts)]


def likeliest(texts: list[str]) -> tuple[int, float]:
    """Return the n up to MOST that explains these percentages best, and how probable it
    is that as many distinct numbers at random would fit it.

    Each distinct number is one of the n + 1 that n makes possible or, once in 200, a
    slip.
    """
    distinct = set(texts)

    def likelihood(n: int) -> float:
        """Return the log-likelihood of n."""
        slip = log(0.005 / _printable(texts[0]))
        return sum(-log(n + 1) if numerators(t, n) else slip for t in distinct)

    best = max(range(1, MOST + 1), key=likelihood)
    return best, prod(min(1.0, (best + 1) / _printable(t)) for t in distinct)


def _printable(text: str) -> int:
    """Return how many percentages can be printed with as many places."""
    return 100 * 10 ** len(text.partition(".")[2]) + 1


def mean(cells: list[str], answers: list[int]) -> Fraction:
    """Return the mean of the unrounded cells of a row, each taken in the middle of what
    it can be.
    """
    middles = []
    for text, n in zip(cells, answers, strict=True):
        k = numerators(text, n)
        middles.append(Fraction(100 * (k[0] + k[-1]), 2 * n))
    return sum(middles, Fraction(0)) / len(middles)


def mean_fits(average: str, cells: list[str], answers: list[int]) -> bool:
    """Return whether the printed average is the mean of the unrounded cells."""
    ks = [numerators(t, n) for t, n in zip(cells, answers, strict=True)]
    least = [Fraction(100 * k[0], n) for k, n in zip(ks, answers, strict=True)]
    most = [Fraction(100 * k[-1], n) for k, n in zip(ks, answers, strict=True)]
    value, half = Fraction(average), half_a_unit(average)
    above = sum(most, Fraction(0)) / len(most) >= value - half
    return above and sum(least, Fraction(0)) / len(least) <= value + half
