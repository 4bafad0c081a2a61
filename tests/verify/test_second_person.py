# SPDX-License-Identifier: Apache-2.0
"""The functions of a second person: each wrong one fails with its cause, each right one
agrees. By day a sample; all by night. The table: `python -m tests.second_person`.
"""

import pytest

from tests.second_person.__main__ import FIRST_SIGHT, run, table
from tests.second_person.case import CASES

SAMPLE = 13  # every so many cases by day


def test_every_case_is_in_the_record():
    assert list(FIRST_SIGHT) == list(CASES)
    assert "20 of 20" in table(FIRST_SIGHT)


def parameter(number, name):
    marks = [] if number % SAMPLE == 0 else [pytest.mark.nightly]
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", [parameter(n, name) for n, name in enumerate(CASES)])
def test_a_function_is_judged_rightly_with_its_cause(name):
    result = run(CASES[name])
    assert result["as_meant"], result["text"]
    assert not CASES[name].fault or result["cause"] == "true", result["said"]
