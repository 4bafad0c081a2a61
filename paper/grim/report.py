# SPDX-License-Identifier: Apache-2.0
"""The audit's answer: printable, JSON, true if everything fits."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

from paper.grim.chance import Chance
from paper.grim.counts import MOST, Column
from paper.grim.read import Count
from upref.result import Result


@dataclass(frozen=True)
class Row:
    """se: of the average, if all answers are independent; se_problems: if all answers
    to a problem are one answer.
    """

    name: str
    average: str | None
    from_cells: str
    follows: bool | None
    se: float | None
    se_problems: float | None
    mended: list[str]


@dataclass(frozen=True)
class Audit(Result):
    columns: list[Column]
    weighted: bool
    rows: list[Row]
    winner: str
    second: str | None
    lead: float | None
    chances: list[Chance]
    seed: int
    draws: int

    def __bool__(self) -> bool:
        return not any(c.misfits for c in self.columns) and all(
            r.follows is not False for r in self.rows
        )

    def data(self) -> dict[str, Any]:
        """The columns, rows and chances, and `fits`.

        Returns:
            What `python -m paper audit-table --json` prints.
        """
        return asdict(self) | {"fits": bool(self)}

    def text(self, verbose: bool = False) -> str:
        averages = f"Averages{', weighted by n' if self.weighted else ''}, and their standard errors in points"
        blocks = (
            ["Numbers of answers", *map(_column, self.columns)],
            [averages, *_rows(self.rows)],
            list(_lead(self)),
        )
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    @property
    def head_style(self) -> str:
        """None: the first line is a heading, not the verdict."""
        return ""


def _column(c: Column) -> str:
    if c.n is None:
        few = f"too few numbers to tell; possible: {_listed(c.fit)}"
        return f"  {c.name}: n unknown, {few if c.fit else f'none up to {MOST} makes all rows possible'}"
    fits = f"fits all rows; by accident with probability {c.accident:.1g}"
    others = _listed([k for k in c.fit if k != c.n])
    more = f"; {'all rows fit' if c.misfits else 'also'} {others}" if others else ""
    searched = "" if c.given else " (searched for)"
    verdict = f"cannot be: {', '.join(c.misfits)}" if c.misfits else fits
    return f"  {c.name}: n = {Count(c.n, c.samples)}{searched}, {verdict}{more}"


def _rows(rows: list[Row]) -> Iterator[str]:
    width = max(len(r.name) for r in rows)
    for r in rows:
        said = {None: "", True: "follows", False: "does not follow"}[r.follows]
        se = f"± {r.se:.2f}" if r.se is not None else ""
        se += f" to {r.se_problems:.2f}" if (r.se_problems or 0) > (r.se or 0) else ""
        yield f"  {r.name:{width}}  {r.average or '':>6}  from the cells {r.from_cells}  {said:8}  {se}".rstrip()
        if r.mended:
            yield f"  {'':{width}}  one changed digit would make it possible: {'; or '.join(r.mended)}"


def _lead(a: Audit) -> Iterator[str]:
    if a.lead is None:
        return
    first, second = (
        next(r.average for r in a.rows if r.name == name)
        for name in (a.winner, a.second)
    )
    printed = (
        f" (as printed, {Decimal(first) - Decimal(second)})" if first and second else ""
    )
    yield f"{a.winner} leads {a.second} by {a.lead:.3f} points{printed}"
    if len(a.chances) > 1:
        yield "  from: answers independent; to: all answers to one problem equal. The true value lies between."
    for luck in a.chances:
        yield from _chance(a, luck)
    if a.chances:
        yield (
            f"  Binomial in every cell, cells and rows independent, {a.draws} draws, seed {a.seed}. Rows that answer "
            "the same problems differ less by chance than that; the choice of a checkpoint and the training seed add "
            "to it."
        )


def _chance(a: Audit, luck: Chance) -> Iterator[str]:
    rows, others = len(luck.contenders), luck.contenders[1:]
    yield (
        f"  {luck.model}: standard error of that difference {luck.se_lead:.2f}; {len(others)} other "
        f"row{'s' if len(others) != 1 else ''} within two of its kind ({', '.join(others) or 'none'})"
    )
    yield f"    in a parametric bootstrap of the printed rows {a.winner} is first in {luck.again_first:.1%} of draws"
    yield f"    if {a.winner} and {a.second} are equally good, {a.winner} leads by as much in {luck.lead_of_two:.1%}"
    if others:
        yield (
            f"    if those {rows} are equally good, the first leads the next by as much in {luck.lead_if_equal:.1%}, "
            f"and it is {a.winner} in {1 / rows:.1%}"
        )


def _listed(ns: list[int], most: int = 8) -> str:
    """The first few, runs of neighbors joined."""
    starts = [b for a, b in pairwise([-1, *ns]) if b != a + 1]
    ends = [a for a, b in pairwise([*ns, 0]) if b != a + 1]
    text = [
        f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)
    ]
    return ", ".join(text[:most]) + (
        f" and {len(text) - most} more" if len(text) > most else ""
    )
