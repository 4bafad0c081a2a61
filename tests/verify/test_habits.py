# SPDX-License-Identifier: Apache-2.0
"""The table of habits (tests/support/zoo/habits.py) is what the checker does."""

import pytest

from tests.support.zoo.habits import ACCEPTED, HABITS, NOTED, REJECTED


@pytest.mark.parametrize("habit", HABITS, ids=str)
def test_the_verdict_is_the_tables(habit):
    report = habit.judged()
    said = " ".join([*(f"{f.regime} {f.cause} {f.found}" for f in report.findings), *report.contract])
    assert bool(report) == (habit.verdict != REJECTED), f"{habit.words}: {habit.verdict}\n{report}"
    assert habit.says in said, report.text(verbose=True)
    if habit.verdict == ACCEPTED and habit.kind == "loss":  # these two have something to say of every short loss
        assert {f.oracle for f in report.notes} <= {"stop-gradient", "extremes"}, report.text(verbose=True)


def test_each_habit_is_decided_once_and_has_a_reason():
    assert len({h.words for h in HABITS}) == len(HABITS) == len({h.function.__name__ for h in HABITS})
    assert all(h.why and h.verdict in (ACCEPTED, NOTED, REJECTED) for h in HABITS)
    assert all(h.says for h in HABITS if h.verdict == NOTED)
