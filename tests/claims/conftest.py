# SPDX-License-Identifier: Apache-2.0
"""How a test says what it found of a claim (paper/claims): by what it asserts, never by
a word of its own.

Each fixture is a function (where, claimed, found, relation): it asserts that the
relation holds between what was found and what the reading requires, or that it does
not, and records the two numbers.
"""

import operator
from math import isclose

import pytest

from repro.mini.experiment import effects, plan, records
from repro.mini.experiment.questions import difference
from repro.mini.experiment.words import shown

WORDS = {
    operator.le: "at most ",
    operator.ge: "at least ",
    operator.lt: "below ",
    operator.gt: "above ",
    operator.ne: "other than ",
}


def equal(found, claimed):
    return isclose(found, claimed, rel_tol=1e-9, abs_tol=1e-12)


def words(where, claimed, found, relation):
    return f"{where}: the reading requires {WORDS.get(relation, '')}{claimed:.5g}, found {found + 0.0:.5g}"


@pytest.fixture
def counterexample(record_property):
    """Return a function that asserts that the relation does not hold between what was
    found and what is claimed, and records both.
    """

    def contradicts(where, claimed, found, relation=equal):
        assert not relation(found, claimed), words(where, claimed, found, relation)
        record_property("counterexample", words(where, claimed, found, relation))

    return contradicts


@pytest.fixture
def holds(record_property):
    """Return a function that asserts that the relation holds between what was found and
    what is claimed, and records both.
    """

    def agrees(where, claimed, found, relation=equal):
        assert relation(found, claimed), words(where, claimed, found, relation)
        record_property("identity", words(where, claimed, found, relation))

    return agrees


@pytest.fixture
def not_testable(record_property):
    """Return a function that records why nothing here can test the reading."""

    def says(why):
        record_property("not testable", why)

    return says


@pytest.fixture(scope="session")
def seen_in_round_2():
    """Return {name: effect} of the facts of the second round that nobody registered."""
    post_hoc = plan.load("round2/post_hoc")
    found = post_hoc.effects(records.load(post_hoc.results))
    return {e.question.name: e for e in found}


@pytest.fixture
def seen(record_property, seen_in_round_2):
    """Return a function that records the effect of a question of
    repro/mini/round2/post_hoc.toml, which decides nothing, and returns it.
    """

    def describes(name):
        found = seen_in_round_2[name]
        text = f"not registered, {found.n} seeds: {found.question.says} {shown(found)}"
        record_property("undecided", text)
        return found

    return describes


@pytest.fixture(scope="session")
def stale_runs():
    stale = plan.load("stale")
    return stale.runs(records.load(stale.results))


@pytest.fixture
def seen_on_stale_data(record_property, stale_runs):
    """Return a function that records the effect of UP-DAPO minus DAPO on a number of a
    run, which decides nothing, and returns it.
    """

    def describes(says, number, s):
        """Record the effect, and return it."""
        question = difference(number, "up_dapo", "dapo", f"s{s}")
        seeds = sorted({seed for *_, seed in stale_runs})
        found = effects.plain(question, stale_runs, seeds, ["walk", "biased"])
        record_property(
            "undecided",
            f"not registered, {found.n} seeds: {says}, {s} rollouts stale {shown(found)} points",
        )
        return found

    return describes
