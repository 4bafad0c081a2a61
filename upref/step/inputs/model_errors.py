# SPDX-License-Identifier: Apache-2.0
"""What a model raises inside the reference, as one sentence: the model's line, and what
to change.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from upref.errors import InputError
from upref.interrupt import Terminated
from upref.user_code.guard import one_line

LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])


@contextmanager
def as_input_error(ids: Sequence[int] = ()) -> Iterator[None]:
    """Raise an InputError in place of what the model raises.

    Args:
        ids: the longest sequence that it is fed.

    Raises:
        InputError: the model raised an error.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, Terminated, MemoryError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {one_line(error)}{_place(error)}"
        raise InputError(
            f"the model fails on one row of token ids [1, {len(ids)}]: {what}: {_advice(error, ids)}"
        ) from error


def _place(error: Exception) -> str:
    """Return the last line outside of torch and upref on the way to the error, as
    " (FILE, line 3, in FUNCTION)"; "" where there is none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if _is_outside(frame.filename)]
    if not outside:
        return ""
    last = outside[-1]
    return f" ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def _is_outside(file: str) -> bool:
    """Tell whether a frame is in a file of the user's, and not in torch, upref or a
    text such as <string>.
    """
    return not file.startswith("<") and not any(
        Path(file).is_relative_to(x) for x in LIBRARIES
    )


def _advice(error: Exception, ids: Sequence[int]) -> str:
    """Return what to change, by the kind and the words of the error."""
    if isinstance(error, TypeError) and "missing" in str(error):
        return "give these arguments a default, or pass a module whose forward takes the token ids alone."
    if (
        isinstance(error, AssertionError)
        or "dtype" in str(error)
        or "expected scalar type" in str(error)
    ):
        return "the reference runs a float64 copy of the model on the CPU; let this line accept float64."
    if isinstance(error, IndexError) and "out of range" in str(error):
        return f"the model needs {len(ids)} positions, and an entry of its tables for each token id."
    if "NVIDIA" in str(error) or "CUDA" in str(error):
        return "the reference runs a copy of the model on the CPU; use the device of the input."
    return "pass a module whose forward takes token ids [1, S] and returns logits [1, S, V]."
