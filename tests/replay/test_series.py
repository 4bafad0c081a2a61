# SPDX-License-Identifier: Apache-2.0
"""Weights that are never delivered are told from weights that are late, from six steps."""

import pytest

from tests.replay.simulator import World, run_of_steps
from upref.replay import make_batch, replay
from upref.replay.series import StepGap, series


@pytest.fixture(scope="module")
def runs():
    return {
        d: run_of_steps(World("qwen3", 5, responses=32, length=20), d)
        for d in ("never", "late", "now")
    }


def steps_of(run, *left_out):
    return [
        make_batch({k: v for k, v in c.items() if k not in left_out}, file="f", step=s)
        for s, c in enumerate(run)
    ]


def causes(run, *left_out):
    found = replay(steps_of(run, *left_out), only=["sampler"])
    return bool(found), [f.cause for f in found.series.findings]


def test_the_reference_proves_that_nothing_was_delivered(runs):
    assert causes(runs["never"]) == (False, ["never_delivered"])


def test_without_that_column_growth_is_a_note(runs):
    assert causes(runs["never"], "ref", "version") == (True, ["grows_with_steps"])


def test_an_engine_that_is_one_step_late_does_not_grow(runs):
    assert causes(runs["late"], "ref", "version") == (True, [])
    assert causes(runs["late"], "version") == (True, [])


def test_a_gap_that_follows_the_lag_is_staleness(runs):
    assert causes(runs["late"]) == (True, ["follows_lag"])


def test_an_engine_in_step_is_clean(runs):
    assert causes(runs["now"]) == (True, [])


def test_a_rising_learning_rate_in_a_late_run_is_no_failure():
    """Its gap grows as the square of the rate, at a lag of 1: no column tells it from
    weights that never arrive.
    """
    found = series(
        [StepGap(s, 1e-3 * s**2, None, {1: (1000, 1e-3 * s**2)}) for s in range(6)]
    )
    assert found and [f.cause for f in found.notes] == ["grows_with_steps"]


def test_a_failure_of_the_series_fails_the_replay(runs):
    found = replay(steps_of(runs["never"]), only=["sampler"])
    assert found.status == 1 and "never received new weights" in found.text()
    assert '"never_delivered"' in found.json()
