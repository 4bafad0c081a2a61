# SPDX-License-Identifier: Apache-2.0
"""A table of results, audited: could these numbers be, and what does the winner's lead
mean?

Told are: which numbers of answers make a column possible (a printed p is some k/n,
rounded), whether the averages follow, the standard error of each, how often chance
makes such a lead, and, where a row cannot be, which one digit put back would mend it.
"""

from paper.grim.averages import by_n, follows, mean
from paper.grim.chance import chances, standard_error
from paper.grim.counts import Column, column
from paper.grim.digits import mend
from paper.grim.read import ResultsTable
from paper.grim.report import Audit, Row
from upref.errors import InputError


def audit(table: ResultsTable, draws: int = 20_000, seed: int = 0) -> Audit:
    """Everything at once; nothing is read or written."""
    if seed < 0:
        raise InputError(f"the seed must be 0 or more, got {seed}.")
    columns = [column(table, j) for j in range(len(table.columns))]
    counts = [c.n for c in columns]
    weighted = by_n(table, counts)
    rows = [_row(table, i, columns, weighted) for i in range(len(table.rows))]
    means = [mean(table, i, counts, weighted) for i in range(len(rows))]
    order = sorted(range(len(rows)), key=lambda i: -means[i])
    second, lead = (
        (table.rows[order[1]], float(means[order[0]] - means[order[1]]))
        if rows[1:]
        else (None, None)
    )
    luck = chances(table, columns, order, weighted, draws, seed)
    return Audit(
        columns, weighted, rows, table.rows[order[0]], second, lead, luck, seed, draws
    )


def _row(table: ResultsTable, i: int, columns: list[Column], weighted: bool) -> Row:
    counts, name, cells = [c.n for c in columns], table.rows[i], table.cells[i]
    right = follows(table, i, counts, weighted)
    wrong = right is False or any(name in c.misfits for c in columns)
    return Row(
        name,
        table.averages[i] if table.averages else None,
        f"{float(mean(table, i, counts, weighted)):.3f}",
        right,
        standard_error(cells, columns, weighted, problems=False),
        standard_error(cells, columns, weighted, problems=True),
        mend(table, i, counts, weighted) if wrong else [],
    )
