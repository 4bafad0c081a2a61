# SPDX-License-Identifier: Apache-2.0
"""Intervals that cover, p-values that agree with them, and Holm's correction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from repro.mini.study.stats import effect, holm
from upref.errors import InputError

some = st.lists(st.floats(-10, 10), min_size=2, max_size=8).filter(lambda x: np.std(x) > 1e-6)


def test_an_example_by_hand():
    """Mean 3, sd √2.5, n = 5: half-width 2.7764 · √2.5 / √5 (t table, 4 degrees of freedom)."""
    e = effect([1, 2, 3, 4, 5])
    assert (e.mean, e.n, e.seeds_for) == (3, 5, 5)
    assert e.low == pytest.approx(3 - 2.7764 * 0.5**0.5, abs=1e-4)
    assert e.high == pytest.approx(3 + 2.7764 * 0.5**0.5, abs=1e-4)


@given(some, st.floats(-5, 5))
def test_p_is_scipys_and_agrees_with_the_interval(x, bound):
    above, below = effect(x, bound, 1), effect(x, bound, -1)
    assert min(above.p, below.p) == pytest.approx(ttest_1samp(x, bound).pvalue, rel=1e-6, abs=1e-12)
    for e, beyond in ((above, above.low - bound), (below, bound - below.high)):
        assert (e.p < 0.05) == (beyond > 0) or abs(beyond) < 1e-9
    assert effect([-v for v in x], -bound, -1).p == pytest.approx(above.p)


@given(some)
def test_a_ratio_is_the_effect_of_logarithms(x):
    e, logs = effect(np.exp(x), 1.25, -1, ratio=True), effect(x, np.log(1.25), -1)
    assert (e.p, e.seeds_for) == (pytest.approx(logs.p), logs.seeds_for)
    assert np.log([e.low, e.mean, e.high]) == pytest.approx([logs.low, logs.mean, logs.high], abs=1e-9)


def test_the_interval_covers_19_times_in_20():
    rng = np.random.default_rng(0)
    found = [effect(rng.normal(0.3, 1, 5)) for _ in range(2000)]
    covered = np.mean([e.low <= 0.3 <= e.high for e in found])
    assert abs(covered - 0.95) < 3 * (0.95 * 0.05 / 2000) ** 0.5


def test_one_seed_decides_nothing_and_equal_seeds_do():
    one = effect([7.0])
    assert (one.p, one.low, one.high) == (1.0, -np.inf, np.inf)
    assert effect([7.0, 7.0]).p == 0 and effect([7.0, 7.0], side=-1).p == 1 and effect([0.0, 0.0]).p == 1


def test_holm_by_hand_and_in_any_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_holm_keeps_the_family_wise_error():
    p = np.random.default_rng(1).uniform(size=(4000, 8))
    wrong = np.mean([min(holm(list(row))) < 0.05 for row in p])
    assert wrong < 0.05 + 3 * (0.05 * 0.95 / 4000) ** 0.5
    assert np.mean(p.min(1) < 0.05) > 0.3  # what it would be without


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: effect([]), "finite numbers"),
        (lambda: effect([1.0, float("nan")]), "finite numbers"),
        (lambda: effect([1.0, 0.0], 1, ratio=True), "positive"),
        (lambda: effect([1.0, 2.0], 0, ratio=True), "positive"),
        (lambda: effect([1.0], side=0), "side"),
    ],
)
def test_what_has_no_effect_is_said(call, says):
    with pytest.raises(InputError, match=says):
        call()
