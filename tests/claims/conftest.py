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

from repro.mini.round2 import tables, unregistered
from repro.mini.stale import unregistered as on_stale_data
from repro.mini.stale.rule import Cell
from repro.mini.study import results

RECORDS = results.load(results.folder_of(2))
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
    def contradicts(where, claimed, found, relation=equal):
        assert not relation(found, claimed), words(where, claimed, found, relation)
        record_property("counterexample", words(where, claimed, found, relation))

    return contradicts


@pytest.fixture
def holds(record_property):
    def agrees(where, claimed, found, relation=equal):
        assert relation(found, claimed), words(where, claimed, found, relation)
        record_property("identity", words(where, claimed, found, relation))

    return agrees


@pytest.fixture
def seen(record_property):
    """Of a comparison of repro/mini/round2/unregistered.py: records the effect, which
    decides nothing.
    """

    def describes(name):
        found = unregistered.measure(name, RECORDS)
        text = f"not registered, {found.n} seeds: {unregistered.SEEN[name].says} {tables.show(found)}"
        record_property("undecided", text)
        return found

    return describes


@pytest.fixture(scope="session")
def stale_runs():
    return on_stale_data.load()


@pytest.fixture
def seen_on_stale_data(record_property, stale_runs):
    """Of UP-DAPO minus DAPO and a number of a run: records the effect, which decides
    nothing.
    """

    def describes(says, number, s):
        found = stale_runs.difference(Cell("up_dapo", s), Cell("dapo", s), number)
        record_property(
            "undecided",
            f"not registered, {found.n} seeds: {says}, {s} rollouts stale {found} points",
        )
        return found

    return describes
