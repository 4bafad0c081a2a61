# SPDX-License-Identifier: Apache-2.0
"""A printed percentage is some k of n answers, rounded: which k, and which n makes a
whole column possible.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, log, prod

from paper.grim.read import Count, ResultsTable

MOST = 2000  # answers, where n is searched for
# An n that was searched for is believed if numbers at random would fit some n as small
# more rarely than TELLING, and if there are DISTINCT numbers at least: that all their k
# share a factor with a true n of 2, 3, ... times as many answers has a probability of
# about Σ f^-DISTINCT, 4 % for five.
TELLING, DISTINCT = 1e-3, 5


@dataclass(frozen=True)
class Column:
    """given: n that was said; n: what is taken; fit: every n up to MOST that fits all
    rows; misfits: rows that n does not fit."""

    name: str
    given: list[str]
    n: int | None
    samples: int
    fit: list[int]
    misfits: list[str]
    # how probable it is that as many distinct numbers taken at random would fit this n
    accident: float | None


def column(table: ResultsTable, j: int) -> Column:
    """The n of one column: of those said, or of all up to MOST, the one that explains
    its numbers best.
    """
    texts = {
        row: t
        for row, cells in zip(table.rows, table.cells, strict=True)
        if (t := cells[j]) is not None
    }
    said, distinct = table.counts[j], set(texts.values())
    best = max(
        said or map(Count, range(1, MOST + 1)), key=lambda c: _likelihood(distinct, c.n)
    )
    accident = prod(min(1.0, (best.n + 1) / _printable(t)) for t in distinct)
    misfits = [row for row, t in texts.items() if not numerators(t, best.n)]
    name, given, fit = (
        table.columns[j],
        [str(c) for c in said],
        possible(list(distinct)),
    )
    if not said and (
        len(distinct) < DISTINCT or best.n * accident > TELLING or len(misfits) > 1
    ):
        return Column(name, given, None, 1, fit, [], None)
    return Column(name, given, best.n, best.samples, fit, misfits, accident)


def possible(texts: list[str], most: int = MOST) -> list[int]:
    """All n up to `most` for which every one of these percentages is some k/n."""
    return [n for n in range(1, most + 1) if all(numerators(t, n) for t in texts)]


@lru_cache(maxsize=100_000)
def numerators(text: str, n: int) -> range:
    """All k with 100 k/n rounded to that, a tie either way."""
    v, h = Fraction(text), half(text)
    return range(max(0, ceil((v - h) * n / 100)), min(n, floor((v + h) * n / 100)) + 1)


def half(text: str) -> Fraction:
    """Half a unit of the last place: what rounding may have taken or given."""
    return Fraction(1, 2 * 10 ** _places(text))


def unrounded(text: str, n: int | None) -> tuple[Fraction, Fraction]:
    """From where to where the percentage can be, n making it some k/n."""
    if n and (k := numerators(text, n)):
        return Fraction(100 * k[0], n), Fraction(100 * k[-1], n)
    return Fraction(text) - half(text), Fraction(text) + half(text)


def middle(text: str, n: int | None) -> Fraction:
    return sum(unrounded(text, n), Fraction(0)) / 2


def _likelihood(texts: set[str], n: int) -> float:
    """Log-probability of these distinct numbers: one of the n + 1 that n makes
    possible, or, once in 200, a slip.
    """
    return sum(
        -log(n + 1) if numerators(t, n) else log(0.005 / _printable(t)) for t in texts
    )


def _printable(text: str) -> int:
    """How many percentages can be printed with as many places."""
    return 100 * 10 ** _places(text) + 1


def _places(text: str) -> int:
    return len(text.partition(".")[2])
