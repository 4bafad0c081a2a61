# SPDX-License-Identifier: Apache-2.0
"""Intervals that cover, and Holm's correction."""

import numpy as np
import pytest

from repro.mini.round2 import rule
from repro.mini.study.plan import Contrast
from repro.mini.study.stats import holm

AVG = Contrast(("dapo",), "avg", more_than=0.0)


def test_an_example_by_hand():
    """Mean 3, sd √2.5, n = 5: half-width 2.7764 · √2.5 / √5 (t table, 4 degrees of
    freedom).
    """
    f = rule.test(AVG, [1, 2, 3, 4, 5])
    assert (f.mean, f.n) == (3, 5)
    assert f.low == pytest.approx(3 - 2.7764 * 0.5**0.5, abs=1e-4)
    assert f.high == pytest.approx(3 + 2.7764 * 0.5**0.5, abs=1e-4)


def test_the_interval_covers_19_times_in_20():
    rng = np.random.default_rng(0)
    found = [rule.test(AVG, rng.normal(0.3, 1, 5)) for _ in range(2000)]
    covered = np.mean([f.low <= 0.3 <= f.high for f in found])
    assert abs(covered - 0.95) < 3 * (0.95 * 0.05 / 2000) ** 0.5


def test_one_seed_decides_nothing_and_equal_seeds_do():
    one = rule.test(AVG, [7.0])
    assert (one.p_for, one.low, one.high) == (1.0, -np.inf, np.inf)
    assert (
        rule.test(AVG, [7.0, 7.0]).p_for == 0 and rule.test(AVG, [0.0, 0.0]).p_for == 1
    )


def test_holm_by_hand_and_in_any_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_holm_keeps_the_family_wise_error():
    p = np.random.default_rng(1).uniform(size=(4000, 8))
    wrong = np.mean([min(holm(list(row))) < 0.05 for row in p])
    assert wrong < 0.05 + 3 * (0.05 * 0.95 / 4000) ** 0.5
    assert np.mean(p.min(1) < 0.05) > 0.3  # what it would be without
