# SPDX-License-Identifier: Apache-2.0
"""Result: the interface of everything that upref returns as a verdict."""

from collections.abc import Sequence
from typing import Any, Self


class Result:
    """A verdict: bool() says whether it is good, str() prints it, json() is
    machine-readable.

    A subclass has `__bool__`, `__str__` and `json`.
    """

    @property
    def failures(self) -> Sequence[Any]:
        """What speaks against it; each prints as text."""
        return [] if self else [str(self).partition("\n")[0]]

    @property
    def notes(self) -> Sequence[Any]:
        """What the reader should know and what changes no verdict."""
        return []

    def json(self) -> str:
        """The result as a JSON object.

        Returns:
            JSON: numbers, and sentences for a reader.
        """
        raise TypeError(f"{type(self).__name__} has no JSON form.")

    def assert_ok(self) -> Self:
        """Return itself. Raises AssertionError with the whole text where the verdict is
        not good.

        Returns:
            The result, so that a test can go on with it.
        """
        if not self:
            raise AssertionError(f"\n{self}")
        return self
