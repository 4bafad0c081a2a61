# SPDX-License-Identifier: Apache-2.0
"""Every number of every objective: a step with half or twice its value is noticed, or
it is listed with the reason.
"""

import pytest
from loops import T, qwen3
from test_reach import step_of

import upref
from docs.bounds import (
    DUAL_CLIP,
    exceptions,
    judged,
    numbers,
    other_values,
    recorded,
    reference_model,
)
from upref.step import check_step


@pytest.fixture(scope="module")
def model():
    return reference_model()


@pytest.mark.parametrize("name", judged())
def test_each_number_is_noticed_or_listed(model, name):
    """The list may only shrink: what is noticed must leave it."""
    listed = {number for objective, number in exceptions() if objective == name}
    assert {one.name for one in numbers(model, name) if not one.reached} == listed


def test_the_page_has_every_number():
    """What is recorded is of the objectives of today, and the page gives a reason where
    one is not noticed.
    """
    every = [(one.objective, one.name) for one in recorded()]
    assert {*every} == {(n, k) for n in judged() for k in upref.get(n).hyperparameters}
    assert {(one.objective, one.name) for one in recorded() if not one.reached} == {
        *exceptions()
    }


def test_the_list_holds_numbers_of_objectives():
    assert len(exceptions()) <= 3
    for name, number in exceptions():
        assert number in upref.get(name).hyperparameters


def pairs():
    """Yield (objective, its number, another value) of every number that a step must
    notice.
    """
    for name in judged():
        o = upref.get(name)
        for number, value in o.hyperparameters.items():
            if (
                number == "beta"
                or "entropy" in o.reads
                or (name, number) in exceptions()
            ):
                continue
            for other in other_values(number, DUAL_CLIP if value is None else value):
                if number != "c" or other > 1:
                    yield name, number, other


SAMPLE = {
    ("gspo", "eps_low", 6e-4),
    ("dppo_tv", "delta", 0.3),
    ("aspo", "cap", 1.5),
    ("up_dapo", "c", 6.0),
}


@pytest.mark.parametrize(
    ("name", "number", "value"),
    [
        pytest.param(*pair, marks=[] if pair in SAMPLE else pytest.mark.nightly)
        for pair in pairs()
    ],
)
def test_a_step_with_another_number_is_rejected(name, number, value):
    hp = {"c": DUAL_CLIP} if number == "c" else {}
    report = check_step(
        step_of(name, **{number: value}),
        qwen3(),
        name,
        temperature=T,
        explain=False,
        **hp,
    )
    assert not report, report


def test_the_sample_is_of_the_pairs():
    assert {*pairs()} >= SAMPLE
