# SPDX-License-Identifier: Apache-2.0
"""The fifth unseen set: verdicts stay as they were at first sight, or become right.

By day a sample; the whole set by night. The table: `python -m tests.fifth_set`.
"""

import pytest

from tests.fifth_set.__main__ import FIRST_SIGHT, first_sight, run
from tests.fifth_set.case import CASES
from tests.fifth_set.truth import disagreements

SAMPLE = 23  # every so many cases by day
HELD = [name for name, entry in FIRST_SIGHT.items() if entry["as_meant"]]


def test_every_case_is_in_the_record():
    assert sorted(FIRST_SIGHT) == sorted(CASES)
    assert "loss" in "\n".join(first_sight())


def test_what_the_set_says_of_its_losses_holds():
    assert list(disagreements(list(CASES.values())[::SAMPLE])) == []


@pytest.mark.nightly
def test_what_the_set_says_of_all_its_losses_holds():
    assert list(disagreements(CASES.values())) == []


def parameter(number, name):
    marks = [] if number % SAMPLE == 0 else [pytest.mark.nightly]
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", [parameter(n, name) for n, name in enumerate(HELD)])
def test_a_verdict_stays_right(name):
    debatable = FIRST_SIGHT[name].get("debatable", "")
    if "equivalent" in debatable:
        pytest.skip(debatable)
    result = run(CASES[name])
    was_changed_on_purpose = "is accepted since" in debatable
    assert result["good"] != was_changed_on_purpose, result["text"]
