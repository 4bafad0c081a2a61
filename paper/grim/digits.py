# SPDX-License-Identifier: Apache-2.0
"""Which one altered digit would explain that a row cannot be."""

from fractions import Fraction

from paper.grim.averages import mean_fits
from paper.grim.counts import numerators
from paper.grim.read import ResultsTable


def mend(
    table: ResultsTable, i: int, counts: list[int | None], weighted: bool = False
) -> list[str]:
    """Every change of one digit after which row i can be: "Minerva 31.52 -> 31.25"."""
    cells, average = table.cells[i], table.averages[i] if table.averages else None
    if None in cells:
        return []
    texts, found = [c for c in cells if c], []
    wrong = {
        j
        for j, (t, n) in enumerate(zip(texts, counts, strict=True))
        if n and not numerators(t, n)
    }
    for j, text in enumerate(texts):
        if wrong <= {j}:
            for t in one_digit_off(text):
                if consistent(
                    [*texts[:j], t, *texts[j + 1 :]], average, counts, weighted
                ):
                    found.append(f"{table.columns[j]} {text} -> {t}")
    if average and not wrong:
        found += [
            f"average {average} -> {t}"
            for t in one_digit_off(average)
            if consistent(texts, t, counts, weighted)
        ]
    return found


def one_digit_off(text: str) -> list[str]:
    """All percentages that differ from this one in exactly one digit."""
    edits = (
        text[:i] + d + text[i + 1 :]
        for i, c in enumerate(text)
        if c.isdigit()
        for d in "0123456789"
        if d != c
    )
    return [t for t in edits if Fraction(t) <= 100]


def consistent(
    cells: list[str],
    average: str | None,
    counts: list[int | None],
    weighted: bool = False,
) -> bool:
    """Whether one row can be: every cell some k/n, and the average their mean."""
    if any(n and not numerators(t, n) for t, n in zip(cells, counts, strict=True)):
        return False
    return average is None or mean_fits(average, cells, counts, weighted)
