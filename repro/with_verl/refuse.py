# SPDX-License-Identifier: Apache-2.0
"""How checks refuse: each yields sentences, and the first one ends the launch."""

from collections.abc import Iterable

from upref import InputError


def refuse(sentences: Iterable[str]) -> None:
    """Raise InputError with the first of the sentences; return if there is none."""
    for sentence in sentences:
        raise InputError(sentence)
