# SPDX-License-Identifier: Apache-2.0
"""Result: what everything that upref returns as a verdict has, and how it is printed."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

# rich's styles of the lines of a report, by their first four letters
STYLES = {
    "FAIL": "bold red",
    "note": "yellow",
    "read": "dim",
    "assu": "dim",
    "orac": "dim",
    "not ": "dim",
}


class Result:
    """A verdict: bool() says whether it is good, str() prints it, json() encodes it.

    A subclass has `__bool__`, `text` and `data`. Text for a terminal and JSON are made
    from these two, here and nowhere else.
    """

    json_indent = 1  # spaces

    def text(self, verbose: bool = False) -> str:
        """Return the result in words.

        Args:
            verbose: with all that it rests on.

        Returns:
            Lines, without a line break at the end.
        """
        return repr(self)

    def data(self) -> Any:
        """Return the result as numbers, sentences, lists and dictionaries.

        Returns:
            What `json` encodes.

        Raises:
            TypeError: this kind of result has no such form.
        """
        raise TypeError(f"{type(self).__name__} has no JSON form.")

    @property
    def failures(self) -> Sequence[Any]:
        """What makes the verdict bad; each prints as text."""
        return [] if self else [self.text().partition("\n")[0]]

    @property
    def notes(self) -> Sequence[Any]:
        """What the reader should know, and what does not change the verdict."""
        return []

    @property
    def head_style(self) -> str:
        """rich's style of the first line; "": all lines are printed as they are."""
        return "bold green" if self else "bold red"

    def json(self) -> str:
        """Return the result as JSON.

        Returns:
            JSON: numbers, and sentences for a reader. Infinity and NaN are strings.
        """
        return json.dumps(
            encode(self.data()), indent=self.json_indent, ensure_ascii=False
        )

    def lines(self, verbose: bool = False) -> Iterator[Any]:
        """Yield the text as rich prints it on a terminal.

        Args:
            verbose: as of `text`.

        Yields:
            A renderable for each line.
        """
        from rich.text import Text

        for number, line in enumerate(self.text(verbose).splitlines()):
            style = STYLES.get(line[:4], "") if number else self.head_style
            yield Text(line, style=style, overflow="fold")

    def assert_ok(self) -> Self:
        """Return itself. Raises AssertionError with the whole text where the verdict is
        not good.

        Returns:
            The result, so that a test can go on with it.
        """
        if not self:
            raise AssertionError(f"\n{self}")
        return self

    def __str__(self) -> str:
        return self.text()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield from self.lines()


def name_first(names: Sequence[object], most: int) -> str:
    """Name the first of many things, so that a long list does not hide the sentence.

    Args:
        names: of all of them.
        most: how many are named.

    Returns:
        The names, and how many more there are.
    """
    named = ", ".join(map(str, names[:most]))
    left_out = len(names) - most
    return f"{named} and {left_out} more" if left_out > 0 else named


def encode(x: Any) -> Any:
    """Make a value fit for JSON, which has no word for infinity and not-a-number.

    Args:
        x: numbers, text, lists and dictionaries.

    Returns:
        The same. Such a number becomes the word that float() reads; tuples become
        lists, and keys become text.
    """
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    if isinstance(x, Mapping):
        return {str(key): encode(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [encode(value) for value in x]
    return x
