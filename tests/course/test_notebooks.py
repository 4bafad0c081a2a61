# SPDX-License-Identifier: Apache-2.0
"""The lessons as notebooks: the programs of the pages, with what the pages print."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from docs import notebooks
from upref_course import grader

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / page.page for page in grader.course_pages()]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return notebooks by the name of their page."""
    files = notebooks.write(tmp_path_factory.mktemp("notebooks"))
    return {f.stem: json.loads(f.read_text(encoding="utf-8")) for f in files}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_has_every_program_and_no_goal_that_is_not_there(written, page):
    book = written[page.stem]
    text = page.read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    cells = [c["source"] for c in book["cells"] if c["cell_type"] == "code"]
    assert [c + "\n" for c in cells] == programs and programs
    prose = "".join(c["source"] for c in book["cells"] if c["cell_type"] == "markdown")
    assert ".svg)" not in prose and ".md)" not in prose and "<!--" not in prose
    assert text.count(".svg)") == prose.count("data:image/svg+xml;base64,")
    nbformat = pytest.importorskip("nbformat", reason="the site's tools have it")
    nbformat.validate(book)


def test_its_cells_print_what_they_say(written):
    """Those of lesson 1, one after another in one scope."""
    space: dict = {}
    shown = 0
    for cell in written["01-policy-gradient"]["cells"]:
        if cell["cell_type"] != "code":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(cell["source"], space)
        for output in cell["outputs"]:
            assert printed.getvalue() == output["text"]
            shown += 1
    assert shown


def test_without_a_folder_it_says_what_it_takes(capsys):
    assert notebooks.main() == 2 and "FOLDER" in capsys.readouterr().err


def test_a_notebook_that_was_worked_in_stays_as_it_is(tmp_path, capsys):
    worked = tmp_path / f"{PAGES[-1].stem}.ipynb"
    worked.write_text("an answer", encoding="utf-8")
    assert notebooks.main(str(tmp_path)) == 2
    assert "stays as it is" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [worked]
    assert worked.read_text(encoding="utf-8") == "an answer"
