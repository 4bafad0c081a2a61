# SPDX-License-Identifier: Apache-2.0
"""Level 7: an engine that hides its gradients passes, and each of its faults is found in
what the weights moved.
"""

import pytest

pytest.importorskip(
    "transformers",
    reason="the suite's models are made by transformers: repro/venv.sh trl",
)

from tests.conformance import engine_adapters as engines
from upref.conformance import CASES, Status, cases, run, run_ranks
from upref.conformance.engines import NO_MOVE, WRITE_MOVE
from upref_frameworks.steps.host import process_group

ALONE = [case for case in cases(7) if case.engine and case.ranks == 1]
FOUR = CASES["engine/micro-4/token-mean"]


@pytest.mark.parametrize("adapter", [engines.Flat, engines.Remote])
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_a_right_engine_passes(case, adapter):
    """The second trains in another process, and returns weights."""
    outcome = run(adapter(), case)
    assert outcome.status is Status.PASSED, str(outcome)
    assert "from what the weights moved" in str(outcome.report)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_other_rows_raise_no_false_alarm(case, seed):
    outcome = run(engines.Flat(), case, seed=seed)
    assert outcome.status is Status.PASSED, str(outcome)


@pytest.mark.parametrize(
    ("adapter", "cause"),
    [
        (engines.FirstAndLast, "responses 2, 3, 4, 5 do not train"),
        (engines.LastAlone, "responses 0, 1, 2, 3, 4, 5 do not train"),
        (engines.LastMissing, "responses 6, 7 do not train"),
        (engines.DividesTwice, "every weight is 1/4 times what it should be"),
        (engines.NeverDivides, "every weight is 4 times what it should be"),
        (engines.AddsAgain, "each response has one factor"),
        (engines.ClipsByDefault, "the gradient's norm is clipped to 1"),
        (engines.MeanOfMeans, "token-mean is taken over micro-batches of 2"),
        (engines.LosesAMicroBatch, "responses 2, 3 do not train"),
    ],
)
def test_what_an_engine_loses_is_named(adapter, cause):
    outcome = run(adapter(), FOUR)
    assert outcome.status is Status.FAILED
    assert cause in outcome.reason, outcome.reason


@pytest.mark.parametrize(
    ("adapter", "cause"),
    [
        (engines.NeverClears, "gradient of the first optimizer step is not cleared"),
        (engines.GradientOfStepBefore, "gets the gradient of the first"),
        (engines.NeverPlaces, "had the weights from before it"),
    ],
)
def test_what_is_stale_in_a_second_step_is_named(adapter, cause):
    outcome = run(adapter(), CASES["engine/updates-2"])
    assert outcome.status is Status.FAILED, str(outcome)
    assert cause in outcome.reason, outcome.reason


def test_two_micro_batches_would_not_show_what_four_show():
    """Of two, the first and the last are all that there are."""
    assert all(case.micro_batches > 2 for case in ALONE)


def test_an_engine_that_steps_too_often_is_no_verdict():
    class Twice(engines.Flat):
        def move(self, model, rows, case):
            super().step(model, rows, case)
            super().step(model, rows, case)

    outcome = run(Twice(), CASES["engine/updates-2"])
    assert outcome.status is Status.COULD_NOT_RUN
    assert "changed 4 times, and there are 2 optimizer steps" in outcome.reason


def test_a_step_of_such_an_engine_is_told_what_to_write():
    outcome = run(engines.Flat(), CASES["micro/4/token-mean"])
    assert (outcome.status, outcome.reason) == (Status.COULD_NOT_RUN, WRITE_MOVE)


def test_an_adapter_without_move_skips_the_level():
    outcome = run(engines.Plain(), FOUR)
    assert (outcome.status, outcome.reason) == (Status.SKIPPED, NO_MOVE)
    two_ranks = CASES["engine/dp2/micro-4/token-mean"]
    assert run_ranks(engines.Plain(), two_ranks).reason == NO_MOVE


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_fsdp1_agrees_in_one_process(case):
    with process_group("FSDP1", "torch"):
        outcome = run(engines.Fsdp1(), case)
    assert outcome.status is Status.PASSED, str(outcome)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("adapter", "status", "cause"),
    [
        (engines.Fsdp1, Status.PASSED, ""),
        (engines.CountsItsOwn, Status.FAILED, "taken over 2 ranks"),
        (engines.SumsTheRanks, Status.FAILED, "every weight is 2 times"),
    ],
)
def test_two_ranks_of_fsdp1(adapter, status, cause):
    outcome = run_ranks(adapter(), CASES["engine/dp2/micro-4/token-mean"])
    assert outcome.status is status, str(outcome)
    assert cause in outcome.reason
    assert bool(outcome.reason) == bool(cause)
