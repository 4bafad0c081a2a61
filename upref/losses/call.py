# SPDX-License-Identifier: Apache-2.0
"""One call of anybody's function: its answer, or one sentence for whatever it does instead of answering."""

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from upref.errors import InputError
from upref.losses.load import said


def called(name: str, call: Callable[[], Any], lines: int = 0) -> tuple[Any, bool]:
    """(its answer, whether it printed). lines: of Python that it may run before it is stopped, 0 for any number."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings(), _at_most(lines):
            warnings.simplefilter("ignore")
            answer = call()
    except InputError:
        raise
    except (SystemExit, KeyboardInterrupt) as e:
        raise InputError(f"{name} ends the program ({type(e).__name__}): a function returns its value.") from e
    except Exception as e:
        raise InputError(f"{name} raised {type(e).__name__}: {said(e)}") from e
    return answer, bool(out.getvalue())


@contextlib.contextmanager
def _at_most(lines: int) -> Iterator[None]:
    """What runs in it is stopped after so many lines: a loop that would take years ends here."""
    left = lines

    def trace(frame, event, arg):
        nonlocal left
        left -= 1
        if left < 0:
            raise TimeoutError(f"stopped after {lines} lines")
        return trace

    before = sys.gettrace()
    if lines:
        sys.settrace(trace)
    try:
        yield
    finally:
        if lines:
            sys.settrace(before)
