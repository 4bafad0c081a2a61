# SPDX-License-Identifier: Apache-2.0
"""Metrics by exhaustive enumeration: every subset, every tuple, every way to break a
tie.
"""

import math
from collections import defaultdict
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from upref.metrics import (
    Estimate,
    avg_at_k,
    best_at_k,
    best_at_k_bootstrap,
    best_at_k_replaced,
    maj_at_k,
    pass_at_1,
)
from upref.rollouts import InputError


def rows(cell, n):
    return st.lists(st.lists(cell, min_size=n, max_size=n), min_size=1, max_size=4)


tables = st.integers(1, 5).flatmap(lambda n: rows(st.booleans(), n))


def share(outcomes):
    outcomes = list(outcomes)
    return Fraction(sum(outcomes), len(outcomes))


def mean(xs):
    xs = list(xs)
    return float(sum(xs, Fraction(0)) / len(xs))


@settings(deadline=None)
@given(tables)
def test_avg_at_k_and_pass_at_1_are_the_share_of_correct_answers(table):
    want = mean(share(row) for row in table)
    assert math.isclose(avg_at_k(table).value, want, abs_tol=1e-15)
    assert (
        pass_at_1(np.array(table))
        == avg_at_k(torch.tensor(table))
        == avg_at_k(table)
        == best_at_k(table, 1)
    )


@settings(deadline=None)
@given(tables, st.data())
def test_best_at_k_is_the_share_of_subsets_with_a_correct_answer(table, data):
    k = data.draw(st.integers(1, len(table[0])))
    want = mean(share(any(s) for s in combinations(row, k)) for row in table)
    assert math.isclose(best_at_k(table, k).value, want, abs_tol=1e-15)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 2), (4, 3), (5, 5)])
@pytest.mark.parametrize(
    "p", [Fraction(0), Fraction(1, 3), Fraction(9, 10), Fraction(1)]
)
def test_best_at_k_is_unbiased_for_one_minus_all_wrong(n, k, p):
    """E over all 2^n outcomes, each with its probability, is 1 - (1 - p)^k; the
    replaced form is biased low.
    """
    expected = replaced = 0.0
    for row in product([True, False], repeat=n):
        weight = float(math.prod(p if x else 1 - p for x in row))
        expected += weight * best_at_k([row], k).value
        replaced += weight * best_at_k_replaced([row], k).value
    truth = float(1 - (1 - p) ** k)
    assert math.isclose(expected, truth, abs_tol=1e-14)
    if k > 1 and 0 < p < 1:
        assert replaced < truth - 1e-3


@settings(deadline=None)
@given(tables, st.integers(1, 4))
def test_replaced_is_the_share_of_tuples_with_a_correct_answer(table, k):
    want = mean(share(any(t) for t in product(row, repeat=k)) for row in table)
    assert math.isclose(best_at_k_replaced(table, k).value, want, abs_tol=1e-14)
    if k <= len(table[0]):
        assert best_at_k_replaced(table, k).value <= best_at_k(table, k).value + 1e-15


def test_best_at_k_is_exact_for_large_n():
    """n = 1024, one correct: 1 - C(1023, k)/C(1024, k) = k/1024. Two at k = 512: 1 -
    (512·511)/(1024·1023).
    """
    table = np.zeros((1, 1024), bool)
    table[0, 7] = True
    for k in (1, 5, 512, 1023, 1024):
        assert best_at_k(table, k).value == k / 1024
    table[0, 8] = True
    assert best_at_k(table, 512).value == float(1 - Fraction(512 * 511, 1024 * 1023))


# ---- verl's bootstrap ----------------------------------------------------------------
def verl_best(row, k, draws, seed):
    """Return Best@k of a row by the procedure of verl's `bootstrap_metric`, one tuple
    at a time, from the global generator, whose state is restored.
    """
    state = np.random.get_state()
    np.random.seed(seed)
    tuples = np.random.choice(len(row), size=(draws, k), replace=True)
    np.random.set_state(state)
    return sum(max(row[i] for i in t) for t in tuples) / draws


@pytest.mark.parametrize("k", [1, 2, 4, 9])
@pytest.mark.parametrize("seed", [42, 7])
def test_bootstrap_draws_what_verl_draws(k, seed):
    table = [[True, False, False, False], [False] * 4, [True, True, False, False]]
    want = sum(verl_best(row, k, 100, seed) for row in table) / 3
    assert math.isclose(
        best_at_k_bootstrap(table, k, draws=100, seed=seed).value, want, rel_tol=1e-12
    )
    if seed == 42:
        assert best_at_k_bootstrap(table, k) == best_at_k_bootstrap(
            table, k, draws=1000, seed=42
        )


def test_bootstrap_leaves_the_global_generator_alone():
    before = np.random.get_state()[1].copy()
    best_at_k_bootstrap([[True, False]], 2)
    assert (np.random.get_state()[1] == before).all()


def test_bootstrap_converges_to_the_replaced_form():
    """One correct of 8, k = 8: 1 - (7/8)^8 = 0.656 against Pass@8 = 1. Standard error
    √(.656·.344/20000) = 0.0034.
    """
    table = [[True] + [False] * 7]
    got = best_at_k_bootstrap(table, 8, draws=20_000).value
    assert abs(got - best_at_k_replaced(table, 8).value) < 5 * 0.0034
    assert math.isclose(best_at_k_replaced(table, 8).value, 1 - (7 / 8) ** 8)
    assert best_at_k(table, 8).value == 1


# ---- majority ------------------------------------------------------------------------
@settings(deadline=None)
@given(rows(st.sampled_from("abcd"), 6), st.sampled_from("abcd"))
def test_majority_is_the_expectation_over_fair_tie_breaks(answers, truth):
    def fair(row):  # each of the tied answers is as likely to win
        """Return the probability that the truth wins a majority vote whose ties are
        broken at random.
        """
        candidates = sorted(set(row))
        winners = [
            a
            for a in candidates
            if all(row.count(a) >= row.count(b) for b in candidates)
        ]
        return share(w == truth for w in winners)

    correct = [[a == truth for a in row] for row in answers]
    assert math.isclose(
        maj_at_k(answers, correct).value, mean(map(fair, answers)), abs_tol=1e-15
    )


def test_two_answers_may_both_be_correct():
    """0.5 and 1/2 are two votes, both right, tied with a wrong one: 2/3."""
    assert math.isclose(
        maj_at_k([["0.5", "1/2", "3"]], [[True, True, False]]).value, 2 / 3
    )


def test_ties_share_where_verl_takes_the_first():
    """Find 1/2 for a tie where verl's majority is 1 or 0 by the order of the answers."""

    def verl_majority(row, correct):  # verl's `calc_maj_val`
        votes = defaultdict(list)
        for a, c in zip(row, correct, strict=True):
            votes[a].append(c)
        return votes[max(votes, key=lambda a: len(votes[a]))][0]

    tie = ["7", "3", "3", "7"]
    assert maj_at_k([tie], [[True, False, False, True]]).value == 0.5
    assert maj_at_k([tie], [[False, True, True, False]]).value == 0.5
    assert verl_majority(tie, [True, False, False, True]) == 1
    assert verl_majority(tie, [False, True, True, False]) == 0
    clear = ["3", "7", "7", "1"]
    right = [False, True, True, False]
    assert maj_at_k([clear], [right]).value == verl_majority(clear, right) == 1


def test_no_answer_has_no_vote():
    assert maj_at_k([[None, None, None, 4]], [[False, False, False, True]]).value == 1
    # an answer like any other
    assert maj_at_k([["", "", "", 4]], [[False, False, False, True]]).value == 0
    assert (
        maj_at_k([[None, None], [(1, 2), (1, 2)]], [[False, False], [True, True]]).value
        == 0.5
    )


@pytest.mark.parametrize(
    ("answers", "correct", "says"),
    [
        (
            [["a", "b", "a"]],
            [[True, False, False]],
            "problem 0 has 'a' marked both correct and wrong",
        ),
        ([["a"], [None]], [[True], [True]], "problem 1 has None marked both"),
        ([["a"]], [[True, False]], "1 lists of 2 answers"),
        ([["a"], ["b"]], [[True]], "1 lists of 1 answers"),
        ([[["a"]]], [[True]], "pass it as a string"),
    ],
)
def test_majority_refuses_what_does_not_fit(answers, correct, says):
    with pytest.raises(InputError) as e:
        maj_at_k(answers, correct)
    assert says in str(e.value)


# ---- the interval --------------------------------------------------------------------
def solves_wilson(bound, m, N):
    """Return whether |m - μ| = z √(μ(1-μ)/N) for a bound μ, which defines Wilson's."""
    return math.isclose(
        (m - bound) ** 2,
        1.959963984540054**2 * bound * (1 - bound) / N,
        rel_tol=1e-9,
        abs_tol=1e-12,
    )


def test_z_is_the_975_quantile_of_the_normal():
    assert math.isclose(
        0.5 * (1 + math.erf(1.959963984540054 / math.sqrt(2))), 0.975, abs_tol=1e-15
    )


@pytest.mark.parametrize("P", [2, 7, 40])
@pytest.mark.parametrize("right", [0, 1, 2])
def test_one_sample_a_problem_gives_wilsons_interval(P, right):
    e = pass_at_1([[i < right] for i in range(P)])
    assert e.value == right / P
    assert solves_wilson(e.low, e.value, P) and solves_wilson(e.high, e.value, P)
    assert (e.low < e.value or right == 0) and (e.high > e.value or right == P)
    assert e.low < e.high


def test_a_spread_below_the_binomial_counts_as_more_problems():
    """x = 1/4, 3/4 alternating, P = 8: m = 1/2, s² = 8·(1/16)/7 = 1/14, N = 8 ·
    (1/4)·14 = 28.
    """
    e = avg_at_k([[True, False, False, False], [True, True, True, False]] * 4)
    assert e.value == 0.5
    assert solves_wilson(e.low, 0.5, 28) and solves_wilson(e.high, 0.5, 28)
    assert math.isclose(e.low + e.high, 1)


@pytest.mark.parametrize(
    ("row", "m"), [([True], 1.0), ([False], 0.0), ([True, False], 0.5)]
)
@pytest.mark.parametrize("P", [1, 30])
def test_problems_that_score_alike_leave_wilsons_interval(row, m, P):
    e = avg_at_k([row] * P)
    assert e.value == m and e.high - e.low > 0.1
    assert solves_wilson(e.low, m, P) and solves_wilson(e.high, m, P)


@settings(deadline=None)
@given(tables)
def test_the_interval_contains_the_value_and_stays_in_0_1(table):
    n = len(table[0])
    bootstrap = best_at_k_bootstrap(table, 2, draws=20)
    for e in (
        avg_at_k(table),
        best_at_k(table, n),
        best_at_k_replaced(table, 3),
        bootstrap,
    ):
        assert (
            isinstance(e, Estimate)
            and 0 <= e.low <= e.value <= e.high <= 1
            and e.low < e.high
        )


@pytest.mark.parametrize("n", [1, 32])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(n):
    """1000 draws of 40 problems of Beta(½, ½) difficulty. 95 % ± 4 standard errors of
    0.7 % (√(.95·.05/1000)).
    """
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        e = avg_at_k(rng.random((40, n)) < rng.beta(0.5, 0.5, (40, 1)))
        hits += e.low <= 0.5 <= e.high
    assert abs(hits / 1000 - 0.95) < 4 * 0.007


# ---- bad input -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "f",
    [
        avg_at_k,
        pass_at_1,
        lambda c: best_at_k(c, 1),
        lambda c: best_at_k_bootstrap(c, 1),
    ],
)
@pytest.mark.parametrize(
    ("correct", "says"),
    [
        ([[1.0, 0.0]], "float64 (1, 2): compare scores with a threshold"),
        ([[1, 0]], "int64"),
        ([True, False], "(2,)"),
        (np.zeros((0, 4), bool), "not empty"),
        (np.zeros((4, 0), bool), "not empty"),
        ([[True], [True, False]], "rectangular"),
    ],
)
def test_a_bad_table_is_refused(f, correct, says):
    with pytest.raises(InputError) as e:
        f(correct)
    assert says in str(e.value)


@pytest.mark.parametrize("k", [0, -1, 1.0, True, "1"])
def test_a_bad_k_is_refused(k):
    for f in (best_at_k, best_at_k_replaced, best_at_k_bootstrap):
        with pytest.raises(InputError, match="k must be a whole number"):
            f([[True, False]], k)
    with pytest.raises(InputError, match="draws"):
        best_at_k_bootstrap([[True, False]], 1, draws=k)


def test_best_at_k_needs_k_samples():
    with pytest.raises(InputError, match="between 1 and the 2 samples"):
        best_at_k([[True, False]], 3)
    assert best_at_k_replaced([[True, False]], 3).value == 1 - 0.5**3
    assert best_at_k([[True, False]], np.int64(2)).value == 1
