# SPDX-License-Identifier: Apache-2.0
"""How verdicts and tables are printed, by the verbs of upref and by those of other
packages.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from upref.errors import InputError
from upref.result import Result

if TYPE_CHECKING:
    from rich.console import Console


def answer(args: Namespace, verdict: Result) -> int:
    """Print a verdict, as --json and --verbose ask, and return the exit status.

    Args:
        args: the parsed words.
        verdict: a Result.

    Returns:
        0 where the verdict is positive, else 1, even if the reader of a pipe closes it.

    Raises:
        InputError: stdout is closed.
    """
    if sys.stdout is None or sys.stdout.closed:
        raise InputError("stdout is closed: the report cannot be printed.")
    try:
        _print(args, verdict)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads it has seen enough; the verdict stands
        sys.stdout = None
    return 0 if verdict else 1


def _print(args: Namespace, verdict: Result) -> None:
    """Print a verdict as JSON, as plain text, or with colors on a terminal."""
    if args.json:
        print(verdict.json())
    elif not sys.stdout.isatty() or not verdict.head_style:
        print(verdict.text(args.verbose))  # nothing is wrapped or cut
    else:
        _console().print(*verdict.lines(args.verbose), sep="\n")


def _console() -> "Console":
    """Return rich's console: as wide as the terminal, or 160 columns without one."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], heads: bool = True
) -> None:
    """Print rows under their heads, or with heads=False the rows alone.

    Args:
        head: a head for each column.
        rows: text for each column.
        heads: print the heads.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    rich_table = Table(
        *map(escape, head), box=box.SIMPLE_HEAD, show_header=heads, pad_edge=False
    )
    for row in rows:
        rich_table.add_row(*map(escape, row))  # a file's name may have brackets
    _console().print(rich_table)
