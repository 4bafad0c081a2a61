# SPDX-License-Identifier: Apache-2.0
"""How far chance moves an average, and how often it makes a lead as large as the
winner's.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from paper.grim.counts import Column, middle
from paper.grim.read import ResultsTable

TIE = 1e-12  # means, as shares, that differ by less are equal


@dataclass(frozen=True)
class Chance:
    """The same drawn again. se_lead: of the difference of first and second, rows
    independent.
    """

    model: str
    se_lead: float
    # rows within two standard errors (of a difference) of the winner, the winner among
    # them
    contenders: list[str]
    again_first: float  # the rows being as good as printed
    # the contenders being equally good, the first leads the second by as much
    lead_if_equal: float
    # winner and second being equally good, the winner leads by as much
    lead_of_two: float


def standard_error(
    cells: list[str | None], columns: list[Column], weighted: bool, problems: bool
) -> float | None:
    """Of the mean in points: binomial in each cell, columns independent; None where an
    n is unknown.
    """
    total = variance = 0.0
    for text, c in zip(cells, columns, strict=True):
        if text is None:
            continue
        if c.n is None:
            return None
        p, w = float(text) / 100, c.n if weighted else 1
        variance += w**2 * p * (1 - p) / (c.n / c.samples if problems else c.n)
        total += w
    return 100 * sqrt(variance) / total if total else None


def chances(
    table: ResultsTable,
    columns: list[Column],
    order: list[int],
    weighted: bool,
    draws: int,
    seed: int,
) -> list[Chance]:
    """The extremes between which the truth lies; order: the rows, best first. Empty if
    there is only one row, an n is unknown or a cell missing."""
    n, samples = [c.n or 0 for c in columns], [c.samples for c in columns]
    if len(order) < 2 or not all(n) or any(None in row for row in table.cells):
        return []
    w = np.array(n, float) if weighted else np.ones(len(n))
    p = np.array(
        [
            [float(middle(t or "", k) / 100) for t, k in zip(row, n, strict=True)]
            for row in table.cells
        ]
    )

    def luck(model: str, units: list[int]) -> Chance:
        """Return the chances if each cell holds this many independent answers."""
        return _chance(
            model, np.array(units), p, w / w.sum(), order, table.rows, draws, seed
        )

    alike = [
        luck(
            "all answers to one problem alike",
            [k // s for k, s in zip(n, samples, strict=True)],
        )
    ]
    return [luck("answers independent", n), *(alike if max(samples) > 1 else [])]


def _chance(
    model: str, n, p, w, order: list[int], names: list[str], draws: int, seed: int
) -> Chance:
    """Binomial in each cell [row, column], cells independent; the means drawn are
    compared unrounded.
    """
    first, second = order[:2]
    means, se = p @ w, np.sqrt((p * (1 - p) / n) @ w**2)
    lead = means[first] - means[second] - TIE
    near = [
        i for i in order if means[first] - means[i] <= 2 * np.hypot(se[first], se[i])
    ]
    rng = np.random.default_rng(seed)

    def draw(q):
        """Return means drawn from these accuracies, [draws, rows]."""
        return rng.binomial(n, q, size=(draws, *q.shape)) / n @ w

    def equal(rows: list[int], many: int):
        """Return means of so many rows, each as good as these rows are on average."""
        return draw(np.repeat(p[rows].mean(0, keepdims=True), many, 0))

    again = draw(p)
    ahead = again[:, first] - np.delete(again, first, 1).max(1)
    top = np.sort(equal(near, max(2, len(near))), 1)
    two = equal([first, second], 2)
    return Chance(
        model,
        100 * float(np.hypot(se[first], se[second])),
        [names[i] for i in near],
        float(((ahead > TIE) + 0.5 * (abs(ahead) <= TIE)).mean()),
        float((top[:, -1] - top[:, -2] >= lead).mean()),
        float((two[:, 0] - two[:, 1] >= lead).mean()),
    )
