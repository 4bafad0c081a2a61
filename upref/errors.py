# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def describe_kind(value: Any) -> str:
    """Return the type of a value with its article: `a float`, `an int`.

    Args:
        value: anything.
    """
    kind = type(value).__name__
    is_an = kind[0] in "aeioAEIO" or kind == "ndarray"
    return f"{'an' if is_an else 'a'} {kind}"


class InputError(ValueError):
    """Bad input from the user: one sentence that says what is wrong and what to do."""

    def __init__(self, sentence: str):
        """Put the sentence on one line; leave out the middle of one of 900 characters
        or more.
        """
        sentence = " ".join(str(sentence).split())  # it may quote what it was given
        super().__init__(
            sentence
            if len(sentence) < 900
            else f"{sentence[:700]} ... {sentence[-150:]}"
        )


class NotInstalled(InputError):
    """A framework does not import here."""


class TooManyLines(InputError):
    """User code was stopped after a number of lines of Python. It may be right: it was
    not judged.
    """


class Gone(Exception):
    """User code ends its process, or takes too long: one sentence. No oracle takes it
    for a finding; a public function raises it as InputError."""


class OutOfMemory(Gone):
    """User code asked for more memory than there is. An oracle that asks with very
    large numbers may read it as a refusal of them."""


# what `repro/venv.sh` calls the part that has a framework
PARTS = {"verl": "verl", "trl": "trl", "transformers": "trl"}


@contextmanager
def importing(framework: str) -> Iterator[None]:
    """Turn whatever a framework that is not installed, or half installed, raises into
    one sentence.

    Args:
        framework: its name.

    Yields:
        Once; import the framework inside.

    Raises:
        NotInstalled: the import failed.
    """
    try:
        yield
    except Exception as e:
        why = f"{type(e).__name__}: {e}".splitlines()[0]
        install = f"`pip install {framework}`"
        if part := PARTS.get(framework):
            install = f"in a checkout `repro/venv.sh {part}` installs what its losses need, elsewhere {install}"
        raise NotInstalled(
            f"{framework} does not import here ({why}): {install}."
        ) from e
