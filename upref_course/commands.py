# SPDX-License-Identifier: Apache-2.0
"""The verbs `upref learn` and `upref explorer`."""

import argparse
import json
import sys
from pathlib import Path

from upref.cli.verb import Verb, add_time_limit
from upref_course import require_exercise


def _learn_arguments(c: argparse.ArgumentParser) -> None:
    """Add the arguments of `upref learn`."""
    c.add_argument(
        "lesson",
        nargs="?",
        type=int,
        metavar="N",
        help="write lessonNN.py here; if it exists, grade it",
    )
    add_time_limit(c, 60)


def _refuse_learn(args: argparse.Namespace) -> None:
    """Raise InputError where the course has no such lesson."""
    if args.lesson:  # of 0 the run tells that there is nothing to grade
        require_exercise(args.lesson)


def _learn(args: argparse.Namespace) -> int:
    """Write the exercise of a lesson into this folder, or grade it if it is there;
    without a lesson, list all. The status is 1 for a wrong answer.
    """
    here = Path.cwd()
    if args.lesson and sys.stderr.isatty():
        file = f"lesson{args.lesson:02d}.py"
        if (here / file).exists():
            # before torch is imported, which takes seconds
            print(f"checking {file} ...", file=sys.stderr)
    if args.lesson is None:
        return _list_exercises(args, here)
    from upref.cli.output import answer
    from upref_course import grader

    e = grader.exercise(args.lesson)
    if not grader.write(e, here):
        verdict = grader.judge(e, here)
        grader.remember(e, here, bool(verdict))
        return answer(args, verdict)
    if args.json:
        print(json.dumps(e.facts(), ensure_ascii=False))
    else:
        print(
            f"{e.file}: written. Fill the hole, the line with `...`; then `upref learn {e.number}` judges it. "
            f"The lesson: {e.lesson}"
        )
    return 0


def _list_exercises(args: argparse.Namespace, here: Path) -> int:
    """Print the pages of the course, and which exercises in the folder `here` are
    right; with --json the exercises alone. The status is 0.
    """
    from upref.cli.output import table
    from upref_course import grader

    rows = []
    for e in grader.exercises():
        state = grader.state(e, here)
        rows.append(e.facts() | {"here": bool(state), "state": state})
    if args.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    yours = {r["lesson"]: (r["file"], r["state"]) for r in rows if r["here"]}
    lines = []
    for page in grader.course_pages():
        if isinstance(page, grader.Reading):
            lines.append([page.mark, page.title, "nothing to write", ""])
        else:
            file, state = yours.get(page.number, ("", ""))
            lines.append([str(page.number), page.title, file, state])
    table(["", "lesson", "your file", ""], lines)
    right = sum(r["state"] == "right" for r in rows)
    print(
        f"{right} of {len(rows)} exercises are right, as `upref learn N` last judged."
    )
    print(f"The lessons: {grader.locate_page('docs/course/README.md')}")
    print(
        "`upref learn 1` writes the exercise of lesson 1 into this folder; once it is there, judges it."
    )
    return 0


def _explorer_arguments(c: argparse.ArgumentParser) -> None:
    """Add the argument of `upref explorer`."""
    c.add_argument(
        "file", metavar="FILE", help="the .html file to write; it needs no network"
    )


def _explorer(args: argparse.Namespace) -> int:
    """Write the explorer, and print the name of its file."""
    from upref_course.explorer import write

    file = str(write(args.file))
    print(
        json.dumps({"file": file})
        if args.json
        else f"{file}: open it in a browser; it needs no network."
    )
    return 0


LEARN = Verb(
    "list the exercises of the course, or write and grade one",
    _learn_arguments,
    _learn,
    "your function",
    _refuse_learn,
)
EXPLORER = Verb(
    "write an interactive HTML page: Cap maps, weights and a small policy",
    _explorer_arguments,
    _explorer,
)
