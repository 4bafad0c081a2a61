# SPDX-License-Identifier: Apache-2.0
"""`upref learn`: the exercises of the course in docs/course, and the judge of what a
student made of them.

lessons/    one file an exercise: the right function, batches, known mistakes; a new file needs no edit elsewhere
exercises/  the files with a hole, as the student gets them
"""

import ast
from dataclasses import dataclass
from pathlib import Path

from upref.errors import InputError
from upref.files import write_atomically
from upref.user_code.load import load
from upref.verify.oracle import discover
from upref_course import lessons, require_exercise
from upref_course.exercise import Exercise, located
from upref_course.verdict import ExerciseVerdict, judged, unfilled

__all__ = [
    "ExerciseVerdict",
    "Reading",
    "contents",
    "exercise",
    "exercises",
    "judge",
    "judged",
    "located",
    "unfilled",
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


def contents() -> list[Exercise | Reading]:
    """Every page of the course, in the order in which it is read."""
    return sorted(
        [*exercises(), *READINGS],
        key=lambda page: page.number if isinstance(page, Exercise) else page.after,
    )


def exercises() -> list[Exercise]:
    """All of them, in the order of the course."""
    return sorted(discover(lessons, Exercise), key=lambda e: e.number)


def exercise(number: int) -> Exercise:
    """The one of that lesson; InputError where there is none."""
    if number == 0:
        page = located(READINGS[0].page)
        raise InputError(f"lesson 0, the loop, has no exercise. Read it: {page}")
    require_exercise(number)
    return next(e for e in exercises() if e.number == number)


def write(e: Exercise, folder: Path) -> bool:
    """The file with the hole into the folder; False where a file of that name is there
    already, which stays.
    """
    if (folder / e.file).exists():
        return False
    write_atomically(folder / e.file, e.text())
    return True


def judge(e: Exercise, folder: Path) -> ExerciseVerdict:
    """What is to be said of the student's file. Raises InputError where it cannot be
    read or run.
    """
    fn = load(f"{folder / e.file}:{e.function}")
    return unfilled(e) if _hole(e, folder / e.file) else judged(e, fn)


def _hole(e: Exercise, file: Path) -> bool:
    """Whether the function still answers, or sets something, with `...`."""
    for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef) and function.name == e.function:
            given = [
                n.value
                for n in ast.walk(function)
                if isinstance(n, ast.Return | ast.Assign)
            ]
            return any(isinstance(v, ast.Constant) and v.value is ... for v in given)
    return False
