# SPDX-License-Identifier: Apache-2.0
"""The loops of other people: their lines are run as they are, and the record of
docs/thirteen_trainers.json is what the cases expect.
"""

import json

import pytest

from docs.thirteen_trainers import cases as recorded, readings
from tests.trainers.__main__ import is_expected
from tests.trainers.cases import CASES
from tests.trainers.source import definitions, lines

SCRIPT = """\
import a_package_that_nobody_has

@a_package_that_nobody_has.compiled
def double(x):
    return factor * x

def main():
    total = 0
    for x in rows:
        total += double(x)
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_a_function_runs_without_the_imports_of_its_file(script):
    assert definitions(script, "double", factor=2)["double"](3) == 6


def test_lines_run_as_they_are(script):
    space = {"total": 0, "rows": [1, 2], "double": abs}
    lines(script, "for x in rows", "total += double", space)
    assert space["total"] == 3


def test_what_a_file_lacks_is_an_error(script):
    with pytest.raises(KeyError, match="treble"):
        definitions(script, "treble")
    with pytest.raises(KeyError, match="no lines from"):
        lines(script, "for y in", "total", {})


def test_each_recorded_verdict_is_the_expected_one():
    found = {(x["repository"], x["variant"], x["objective"]): x for x in recorded()}
    assert len(found) == len(CASES)
    for one in CASES:
        record = found[one.repository, one.variant, one.objective]
        assert len(record["verdicts"]) == 3
        for its in record["verdicts"]:
            assert is_expected(one, its), json.dumps(its)


def test_each_repository_was_read():
    assert {x.repository for x in CASES} == {x["repository"] for x in readings()}


def test_what_differs_is_said_where_a_loop_differs():
    differs = {x.repository for x in CASES if x.found}
    assert differs == {x["repository"] for x in readings() if x["differs"]}
