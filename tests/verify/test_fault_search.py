# SPDX-License-Identifier: Apache-2.0
"""The search for the known fault that gives certain numbers: its order is that of the
ranks, and nothing else.
"""

import pytest

import upref
from upref.verify.faults import LAST, Fault, first_fitting, fitting, known, losses


@pytest.mark.parametrize(
    ("name", "bounds"),
    [("dapo", [0.5, 1.5]), ("up_dapo", []), ("gspo", []), ("cispo", [])],
)
def test_faults_come_in_the_order_of_their_ranks(name, bounds):
    objective = upref.get(name)
    hp = objective.resolve({})
    ranks = [fault.rank for fault in known("losses", objective, hp, bounds)]
    assert len(ranks) > 50 and ranks == sorted(ranks)


def test_the_place_of_a_family_in_the_table_has_no_effect(monkeypatch):
    objective = upref.get("dapo")
    hp = objective.resolve({})

    def order():
        """Return the faults in the order in which they are tried."""
        faults = known("losses", objective, hp, [0.5, 1.5])
        return [(fault.id, fault.words) for fault in faults]

    before = order()
    monkeypatch.setattr(losses, "FAMILIES", losses.FAMILIES[::-1])
    assert order() == before


def test_two_families_of_one_rank_are_a_mistake():
    ranks = [family.rank for family in losses.FAMILIES]
    assert len(set(ranks)) == len(ranks) and max(ranks) < losses.RANKS_OF_A_PAIR


def test_the_faults_of_the_objectives_own_bounds_come_before_those_of_others():
    """Only the faults of measured bounds say so, and they have the higher ranks."""
    objective = upref.get("dapo")
    faults = list(known("losses", objective, objective.resolve({}), [0.5]))
    at_others = [fault.rank for fault in faults if "(with bounds" in fault.words]
    at_own = [fault.rank for fault in faults if "(with bounds" not in fault.words]
    first_of_others = 2 * losses.RANKS_OF_A_PAIR
    assert {rank for rank in at_own if rank >= first_of_others} <= {LAST}
    assert at_others and min(at_others) >= first_of_others


def test_the_first_that_fits_is_found_and_none_is_tried_after_it():
    tried = []

    def is_even(fault):
        """Remember the fault that is tried, and return whether its change is even."""
        tried.append(fault.change)
        return fault.change % 2 == 0

    faults = [Fault(str(number), number) for number in (1, 2, 3, 4)]
    assert first_fitting(faults, is_even) is faults[1]
    assert tried == [1, 2]
    assert first_fitting(faults[:1], is_even) is None


def test_each_fault_that_fits_comes_with_how_it_fits():
    faults = [Fault(str(number), number) for number in (1, 2, 3)]
    halves = fitting(faults, lambda f: f.change / 2 if f.change > 1 else None)
    assert [(fault.change, half) for fault, half in halves] == [(2, 1.0), (3, 1.5)]


def test_a_fit_of_zero_is_a_fit():
    zero = Fault("zero", 0)
    assert list(fitting([zero], lambda fault: 0)) == [(zero, 0)]
