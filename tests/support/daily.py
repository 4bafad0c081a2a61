# SPDX-License-Identifier: Apache-2.0
"""A sample for every day of what takes minutes; the rest is nightly."""

from collections.abc import Iterable
from typing import Any

import pytest


def daily(cases: Iterable[Any], every: int) -> list[Any]:
    """Return the cases as parameters of a test, of which one in `every` runs by day and
    the rest by night. A tuple becomes several arguments.
    """

    def row(case):
        return case if isinstance(case, tuple) else (case,)

    return [
        pytest.param(*row(c), marks=[pytest.mark.nightly] if n % every else [])
        for n, c in enumerate(cases)
    ]
