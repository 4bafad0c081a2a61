# SPDX-License-Identifier: Apache-2.0
"""Whether a row's average is the mean of its cells."""

from collections.abc import Sequence
from fractions import Fraction

from paper.grim.counts import half, middle, unrounded
from paper.grim.read import ResultsTable


def mean(
    table: ResultsTable, i: int, counts: list[int | None], weighted: bool = False
) -> Fraction:
    """The mean of the unrounded cells of row i, where n says what they are."""
    there = [
        (t, n) for t, n in zip(table.cells[i], counts, strict=True) if t is not None
    ]
    return _mean(
        [middle(t, n) for t, n in there],
        [(n or 1) if weighted else 1 for _, n in there],
    )


def _mean(xs: Sequence[Fraction], w: list[int]) -> Fraction:
    return sum((x * v for x, v in zip(xs, w, strict=True)), Fraction(0)) / (sum(w) or 1)


def mean_fits(
    average: str, cells: list[str], counts: list[int | None], weighted: bool = False
) -> bool:
    """Whether the printed average is the mean of the unrounded cells, or of the printed
    ones; weighted: by n.
    """
    w = [(n or 0) if weighted else 1 for n in counts]
    if not sum(w):
        return False
    rough = sum(float(t) * v for t, v in zip(cells, w, strict=True)) / sum(w)
    if (
        abs(rough - float(average))
        > float(half(average) + max(map(half, cells))) + 1e-9
    ):
        return False  # neither can be; the rest is exact, and slow
    least, most = zip(*map(unrounded, cells, counts), strict=True)
    a, h = Fraction(average), half(average)
    if _mean(least, w) <= a + h and _mean(most, w) >= a - h:
        return True
    return abs(_mean([Fraction(t) for t in cells], w) - a) <= h


def follows(
    table: ResultsTable, i: int, counts: list[int | None], weighted: bool
) -> bool | None:
    """None: there is no average, or a cell is missing."""
    average, cells = table.averages[i] if table.averages else None, table.cells[i]
    if average is None or None in cells:
        return None
    return mean_fits(average, [c for c in cells if c], counts, weighted)


def by_n(table: ResultsTable, counts: list[int | None]) -> bool:
    """Whether the averages are weighted by n: only if more of them follow so."""
    if table.averages is None or None in counts:
        return False
    plain, weighted = (
        sum(follows(table, i, counts, w) is True for i in range(len(table.rows)))
        for w in (False, True)
    )
    return weighted > plain
