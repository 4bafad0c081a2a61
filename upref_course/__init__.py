# SPDX-License-Identifier: Apache-2.0
"""The course: lessons, the grader of its exercises, and the explorer."""

from pathlib import Path

from upref.errors import InputError


def require_exercise(number: int) -> None:
    """Raise InputError where the course has no exercise of that number.

    Args:
        number: of a lesson, as typed.
    """
    files = (Path(__file__).parent / "exercises").glob("lesson*.py")
    known = [int(file.stem.removeprefix("lesson")) for file in files]
    if number not in known:
        raise InputError(
            f"there is no lesson {number}: the course has lessons {min(known)} to {max(known)}."
        )
