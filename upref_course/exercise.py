# SPDX-License-Identifier: Apache-2.0
"""What an exercise is: a function to be filled in, the right one, small batches, and
the mistakes that are known.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upref.pages import locate_page
from upref.rollouts import Rollouts
from upref.verify.faults import Fault

FILES = Path(__file__).parent / "exercises"


@dataclass(frozen=True)
class ExerciseBatch:
    """Arguments of the function, by name and in its order; and what one sees on them,
    in words.
    """

    shows: str
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Exercise:
    """One of the course. The batches stand from the smallest to the largest: the first
    that differs is shown.
    """

    number: int
    slug: str  # docs/course/NN-slug.md
    title: str
    function: str  # what the file must have
    right: Callable[..., Any]
    batches: tuple[ExerciseBatch, ...]
    # mistakes that people make, with a hint; each change is a whole function
    faults: tuple[Fault[Callable[..., Any]], ...]
    notice: str  # what to think about once it is right
    # the argument whose gradient is compared; "" where there is none
    gradient: str = ""
    value: bool = False  # whether the value is compared
    none_is_an_answer: bool = False  # else None is a `return` forgotten
    # the library's own check, once every batch agrees: a Report
    proof: Callable[[Callable[..., Any]], Any] | None = None
    # the function's, of a batch that the proof shows
    arguments: Callable[[Rollouts], dict[str, Any]] | None = None
    answer_kept_back: bool = False  # whether the right answer is kept back
    # where no fault fits
    hint: Callable[[ExerciseBatch, Any], str] = field(default=lambda batch, got: "")

    @property
    def file(self) -> str:
        """Return the name of the exercise in the student's folder."""
        return f"lesson{self.number:02d}.py"

    @property
    def page(self) -> str:
        """Return the path of the lesson in a checkout."""
        return f"docs/course/{self.number:02d}-{self.slug}.md"

    @property
    def lesson(self) -> str:
        """Return where the lesson is: a file of this checkout, an address, or a path."""
        return locate_page(self.page)

    def facts(self) -> dict[str, Any]:
        """Return what `upref learn --json` prints of the exercise.

        Returns:
            Number, title, page and file.
        """
        return {
            "lesson": self.number,
            "title": self.title,
            "page": self.page,
            "file": self.file,
        }

    def text(self) -> str:
        """Return the file with the hole, as the student gets it.

        Returns:
            The source without its line of license.
        """
        return (FILES / self.file).read_text(encoding="utf-8").partition("\n")[2]
