# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table.

    Args:
        columns: The heads; "" where a column has none.
        rows: The cells of each row, as many as there are heads.

    Returns:
        The lines, without an end of line after the last.

    Raises:
        ValueError: A row has another number of cells.
    """
    heads = [f" {head} " if head else " " for head in columns]
    lines = [f"|{'|'.join(heads)}|", f"|{'---|' * len(columns)}"]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"{len(row)} cells for {len(columns)} columns: {row}.")
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def codes(names: Iterable[str]) -> str:
    """Return names as code, with commas between them."""
    return ", ".join(f"`{name}`" for name in names)
