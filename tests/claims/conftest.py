# SPDX-License-Identifier: Apache-2.0
"""How a test says what it found of a claim (upref/paper/claims): by what it asserts, never by a word of its own.

Each fixture is a function (where, claimed, found, relation): it asserts that the relation holds between what was found
and what the paper claims, or that it does not, and records the two numbers.
"""

import operator
from math import isclose

import pytest

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
    return f"{where}: by the paper {WORDS.get(relation, '')}{claimed:.5g}, found {found + 0.0:.5g}"


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
