# SPDX-License-Identifier: Apache-2.0
"""`upref learn`: the exercises of the course in docs/course, and the judge of what a
student made of them.

lessons/    one file an exercise: the right function, batches, known mistakes; a new file needs no edit elsewhere
exercises/  the files with a hole, as the student gets them
"""

import ast
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from upref.errors import InputError
from upref.files import write_atomically
from upref.user_code.load import load
from upref.verify.oracle import discover
from upref_course import lessons, require_exercise
from upref_course.exercise import Exercise, locate_page
from upref_course.verdict import ExerciseVerdict, judge_function, judge_hole

__all__ = [
    "ExerciseVerdict",
    "Reading",
    "course_pages",
    "exercise",
    "exercises",
    "judge",
    "judge_function",
    "judge_hole",
    "locate_page",
    "remember",
    "state",
    "write",
]


@dataclass(frozen=True)
class Reading:
    """A page of the course that has no exercise."""

    after: int  # the lesson that it follows
    mark: str  # what stands in place of a lesson's number
    title: str
    page: str


READINGS = (
    Reading(0, "0", "the loop", "docs/course/00-the-loop.md"),
    Reading(
        4, "", "cap the weight, keep the gradient", "docs/course/capping-the-weight.md"
    ),
    Reading(11, "", "from logits to log-probabilities", "docs/course/log-probs.md"),
)


def course_pages() -> list[Exercise | Reading]:
    """Return every page of the course, in the order in which it is read.

    Returns:
        The exercises, and the pages without an exercise.
    """
    return sorted(
        [*exercises(), *READINGS],
        key=lambda page: page.number if isinstance(page, Exercise) else page.after,
    )


def exercises() -> list[Exercise]:
    """Return all exercises.

    Returns:
        One for each module of upref_course/lessons, in the order of the course.
    """
    return sorted(discover(lessons, Exercise), key=lambda e: e.number)


def exercise(number: int) -> Exercise:
    """Return the exercise of a lesson.

    Args:
        number: of the lesson.

    Raises:
        InputError: the lesson has no exercise, or there is no such lesson.
    """
    if number == 0:
        page = locate_page(READINGS[0].page)
        raise InputError(f"lesson 0, the loop, has no exercise. Read it: {page}")
    require_exercise(number)
    return next(e for e in exercises() if e.number == number)


def write(exercise: Exercise, folder: Path) -> bool:
    """Write the file with the hole into a folder.

    Args:
        exercise: whose file.
        folder: the student's.

    Returns:
        False where a file of that name exists already, which stays as it is.
    """
    if (folder / exercise.file).exists():
        return False
    write_atomically(folder / exercise.file, exercise.text())
    return True


def judge(exercise: Exercise, folder: Path) -> ExerciseVerdict:
    """Judge the student's file.

    Args:
        exercise: that the file is meant to solve.
        folder: where the file is.

    Returns:
        The verdict.

    Raises:
        InputError: the file cannot be read, or its function cannot be run.
    """
    file = folder / exercise.file
    fn = load(f"{file}:{exercise.function}")
    if _has_hole(exercise, file):
        return judge_hole(exercise)
    return judge_function(exercise, fn)


# the files of a folder that were judged right: {file: digest of its text}
RIGHT = ".upref-learn.json"


def remember(exercise: Exercise, folder: Path, right: bool) -> None:
    """Write down whether the student's file was judged right, for the list of lessons.

    A folder in which nothing can be written is left as it is.

    Args:
        exercise: that the file is meant to solve.
        folder: where the file is, and where the file RIGHT is written.
        right: the verdict.
    """
    judged = _judged_right(folder)
    judged.pop(exercise.file, None)
    if right:
        judged[exercise.file] = _digest(folder / exercise.file)
    with suppress(OSError):
        write_atomically(folder / RIGHT, json.dumps(judged, indent=1) + "\n")


def state(exercise: Exercise, folder: Path) -> str:
    """Return how far the student is.

    Args:
        exercise: of a lesson.
        folder: the student's.

    Returns:
        "" where the file is not there; "right" where it is the file that was judged
        right; "begun" otherwise.
    """
    file = folder / exercise.file
    if not file.exists():
        return ""
    right = _judged_right(folder).get(exercise.file) == _digest(file)
    return "right" if right else "begun"


def _judged_right(folder: Path) -> dict[str, str]:
    """Return what the file RIGHT of a folder holds; nothing where it cannot be read."""
    try:
        judged = json.loads((folder / RIGHT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return judged if isinstance(judged, dict) else {}


def _digest(file: Path) -> str:
    """Return a digest of a file; "" where it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _has_hole(exercise: Exercise, file: Path) -> bool:
    """Return whether the function still returns or assigns `...`; False where the file
    has no such function.
    """
    for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef) and function.name == exercise.function:
            return any(_is_hole(node) for node in ast.walk(function))
    return False


def _is_hole(node: ast.AST) -> bool:
    """Return whether a node is a statement that returns or assigns `...`."""
    if not isinstance(node, ast.Return | ast.Assign):
        return False
    return isinstance(node.value, ast.Constant) and node.value.value is ...
