# SPDX-License-Identifier: Apache-2.0
"""The lessons of the course as notebooks: `python -m docs.notebooks FOLDER`.

A program of a lesson is a cell, with the output that the page prints. Pictures are inside
the file. A notebook runs where `pip install -e ".[prove]"` was run in a checkout. It does
not run in a browser alone: every program imports torch, which Pyodide does not have.
"""

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

from upref.errors import InputError
from upref.files import write_atomically
from upref_course.grader import course_pages

ROOT = Path(__file__).parents[1]
PROGRAM = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
PICTURE = re.compile(r"!\[([^]]*)\]\(([^)]+\.svg)\)")
LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:)[^)]+\)")  # to a page beside
NOTE = (
    "This notebook runs in the environment in which a checkout of upref was installed by "
    '`pip install -e ".[prove]"`.'
)


def notebook(page: Path) -> dict[str, Any]:
    """Return a page as a notebook, in the format of Jupyter.

    Args:
        page: a lesson, in markdown.
    """
    text = page.read_text(encoding="utf-8")
    cells = [prose(NOTE, page)]
    at = 0
    for program in PROGRAM.finditer(text):
        cells.append(prose(text[at : program.start()], page))
        cells.append(code(program[1], program[2] or ""))
        at = program.end()
    cells.append(prose(text[at:], page))
    kept = [cell for cell in cells if cell["source"]]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {
        "cells": [cell | {"id": f"cell-{n}"} for n, cell in enumerate(kept)],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def prose(text: str, page: Path) -> dict[str, Any]:
    """Return a cell of Markdown: pictures go into it, links to other pages become plain
    text, and comments are left out.

    Args:
        text: a part of the page.
        page: its file, for the paths of pictures.
    """

    def drawn(picture: re.Match[str]) -> str:
        """Return a picture as HTML that has its bytes inside."""
        svg = base64.b64encode((page.parent / picture[2]).read_bytes()).decode()
        return f'<img alt="{picture[1]}" src="data:image/svg+xml;base64,{svg}">'

    text = LINK.sub(r"\1", PICTURE.sub(drawn, text))
    text = re.sub(r"<!--.*?-->\n*", "", text)
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip()}


def code(program: str, printed: str) -> dict[str, Any]:
    """Return a cell of code with what it printed on the page."""
    output = {"output_type": "stream", "name": "stdout", "text": printed}
    return {
        "cell_type": "code",
        "metadata": {},
        "execution_count": None,
        "outputs": [output] if printed else [],
        "source": program.rstrip("\n"),
    }


def write(folder: Path) -> list[Path]:
    """Write a notebook for each page of the course into a folder, which is made; return
    the files.

    Raises:
        InputError: The folder has a notebook of that name: it may be of use to
            somebody. No file is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for lesson in course_pages():
        file = folder / f"{Path(lesson.page).stem}.ipynb"
        if file.exists():
            raise InputError(
                f"{file} exists and stays as it is; name a folder without it."
            )
    files = []
    for lesson in course_pages():
        page = ROOT / lesson.page
        file = folder / f"{page.stem}.ipynb"
        text = json.dumps(notebook(page), indent=1, ensure_ascii=False)
        write_atomically(file, text + "\n")
        files.append(file)
    return files


def main(folder: str = "") -> int:
    """Write the notebooks, and print where they are; for -h, or without a folder, print
    how the command is called.

    Returns:
        0; 2 if no folder is named or it has one of the notebooks.
    """
    if not folder or folder.startswith("-"):
        print(__doc__, file=sys.stdout if folder in ("-h", "--help") else sys.stderr)
        return 0 if folder in ("-h", "--help") else 2
    try:
        print(*write(Path(folder)), sep="\n")
    except InputError as error:
        print(f"docs.notebooks: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
