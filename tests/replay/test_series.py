# SPDX-License-Identifier: Apache-2.0
"""Weights that are never delivered are told from weights that are late, from six steps."""

import pytest

from tests.replay.simulator import World, count_as_delivered, run_of_steps
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


def test_the_reference_and_newer_versions_prove_that_nothing_was_delivered():
    lags = [1] * len(GROWING)
    assert of_sizes(*GROWING, lags=lags, ref=0.0) == (False, ["never_delivered"])


def test_updates_on_responses_of_the_reference_model_are_no_failure(runs):
    """A first rollout is sampled by the reference model, and may last for many updates."""
    assert causes(runs["never"]) == (True, ["stays_reference"])
    assert causes(runs["never"], "version") == (True, ["stays_reference"])
    lags = range(len(GROWING))
    assert of_sizes(*GROWING, lags=lags, ref=0.0) == (True, ["stays_reference"])


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
    assert found and [f.cause for f in found.notes] == ["grows_at_one_lag"]


def of_sizes(*sizes, lags=None, ref=None, first=0):
    """Return whether the series of steps with these gaps agrees, and its causes."""
    steps = []
    for n, size in enumerate(sizes):
        lag = {} if lags is None else {lags[n]: (1000, size)}
        steps.append(StepGap(first + n, size, ref, lag))
    found = series(steps)
    return bool(found), [f.cause for f in found.findings]


GROWING = tuple(0.01 * n for n in range(8))


def test_a_false_count_of_versions_does_not_make_staleness():
    """The engine keeps its first weights and counts them as one step old."""
    lags = [0, *[1] * 7]
    assert of_sizes(*GROWING, lags=lags) == (True, ["grows_at_one_lag"])


def test_weights_of_one_step_are_named_and_not_called_stale():
    assert of_sizes(*GROWING, lags=range(8)) == (True, ["one_version"])


def test_a_lag_that_grows_is_staleness():
    lags = [0, 1, 1, 2, 2, 3, 3, 4]
    assert of_sizes(*(0.01 * lag for lag in lags), lags=lags) == (True, ["follows_lag"])


def test_lags_within_a_step_tell_although_the_gap_grows():
    steps = [
        StepGap(s, 0.01 * s, None, {1: (500, 0.005 * s), 4: (500, 0.02 * s)})
        for s in range(4, 12)
    ]
    assert [f.cause for f in series(steps).findings] == ["follows_lag"]


def test_without_versions_the_sentence_leaves_the_lag_open():
    (finding,) = series([StepGap(n, s, None, {}) for n, s in enumerate(GROWING)]).notes
    assert finding.cause == "grows_with_steps" and "growing lag" in str(finding)


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ((*GROWING, *GROWING), 0),  # two iterations
        (GROWING, 64),  # one, late in the run
    ],
)
def test_a_reference_that_follows_the_policy_is_no_failure(sizes, first):
    """Each iteration begins with the policy as its reference and as its sampler."""
    lags = [1] * len(sizes)
    found, _ = of_sizes(*sizes, lags=lags, ref=0.0, first=first)
    assert found


STEADY = (8e-4, 9e-4, 8e-4, 7e-4, 8e-4)


def test_the_steps_that_stand_out_are_named():
    found = series(
        [
            StepGap(s, size, None, {})
            for s, size in zip(
                range(250, 330, 10), (*STEADY, 0.02, 0.03, 8e-4), strict=True
            )
        ]
    )
    (finding,) = found.notes
    assert finding.cause == "stands_out"
    assert "at 2 of 8 steps: 300, 310" in str(finding)
    assert "the median of the other steps is 0.0008" in str(finding)


def test_the_step_from_which_the_gap_is_larger_is_named():
    sizes = (*STEADY, 0.02, 0.03, 0.02)
    found = series(
        [StepGap(n, size, None, {}) for n, size in enumerate(sizes, start=7)]
    )
    assert found and found.notes[0].cause == "jumps"
    assert "from step 12 on" in str(found.notes[0])
    assert "the largest up to step 11 is 0.0009" in str(found.notes[0])
    assert "stands_out" not in [f.cause for f in found.notes]


@pytest.mark.parametrize(
    "sizes",
    [
        (*STEADY, *STEADY),
        (1e-7, 1e-7, 1e-5, 1e-7, 1e-7, 1e-7),  # rounding
        (0.0, *[0.01] * 7),  # one step late
        (0.0, 0.01, 0.02, *[0.02] * 5),  # two steps late
        (*STEADY, 0.002, 0.001, 0.002),  # a little larger
    ],
)
def test_steady_gaps_have_no_step_that_stands_out(sizes):
    causes = of_sizes(*sizes)[1]
    assert "stands_out" not in causes and "jumps" not in causes


def test_a_failure_of_the_series_fails_the_replay(runs):
    """The file counts each update as delivered."""
    steps = steps_of(count_as_delivered(runs["never"]))
    found = replay(steps, only=["sampler"])
    words = " ".join(found.text().split())
    assert found.status == 1 and "never received new weights" in words
    assert '"never_delivered"' in found.json()
