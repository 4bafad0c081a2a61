# SPDX-License-Identifier: Apache-2.0
"""Intervals, Holm's procedure, effects in print, and what was kept of closed claims."""

import numpy as np
import pytest
from scipy import stats

from docs import record
from repro.mini.experiment import curves, effects, frozen, plan, standing, words
from repro.mini.experiment.questions import Question, Term, known

UP, DAPO = Term("up_dapo", "small", "avg"), Term("dapo", "small", "avg", weight=-1.0)
MORE = Question("avg", (UP, DAPO))


def effect(question, values) -> effects.Effect:
    """Return the effect of these values, with its 95 % interval."""
    d = np.array(values, float)[:, None]
    if len(d) < 2:
        return effects.described(question, d)
    return effects.described(question, d, *effects.interval(d.mean(1), 0.05))


@pytest.mark.parametrize(
    ("metric", "is_known"), [("pass@8", True), ("pass@x", False), ("pass@", False)]
)
def test_a_number_that_no_run_has_is_not_known(metric, is_known):
    """`pass@x` was let in by the plan, and ended in an error at its first record."""
    assert known(Term("dapo", "small", metric)) == is_known


def test_an_interval_by_hand():
    """Mean 3, sd √2.5, n = 5: half-width 2.7764 · √2.5 / √5 (t table, 4 degrees of
    freedom).
    """
    low, high = effects.interval(np.array([1.0, 2, 3, 4, 5]), 0.05)
    assert low == pytest.approx(3 - 2.7764 * 0.5**0.5, abs=1e-4)
    assert high == pytest.approx(3 + 2.7764 * 0.5**0.5, abs=1e-4)


def test_an_interval_is_scipys():
    d = np.random.default_rng(0).normal(0.3, 1, 9)
    scipys = stats.ttest_1samp(d, 0).confidence_interval(0.95)
    assert effects.interval(d, 0.05) == pytest.approx(scipys)


def test_the_interval_covers_19_times_in_20():
    rng = np.random.default_rng(0)
    ends = [effects.interval(rng.normal(0.3, 1, 5), 0.05) for _ in range(2000)]
    covered = np.mean([low <= 0.3 <= high for low, high in ends])
    assert abs(covered - 0.95) < 3 * (0.95 * 0.05 / 2000) ** 0.5


def test_holm_by_hand_and_in_any_order():
    by_hand = pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert frozen.holm([0.01, 0.04, 0.03, 0.005]) == by_hand
    assert frozen.holm([0.9, 0.8]) == [1.0, 1.0] and frozen.holm([]) == []


def test_holm_keeps_the_family_wise_error():
    p = np.random.default_rng(1).uniform(size=(4000, 8))
    wrong = np.mean([min(frozen.holm(list(row))) < 0.05 for row in p])
    assert wrong < 0.05 + 3 * (0.05 * 0.95 / 4000) ** 0.5
    assert np.mean(p.min(1) < 0.05) > 0.3  # what it would be without


@pytest.mark.parametrize("folder", plan.ROUNDS, ids=["first", "second"])
def test_every_claim_of_a_closed_round_has_a_standing(folder):
    kept = record.rows(plan.ROUNDS[folder] / "standing.json")
    asked = {
        f"{path.stem}/{claim['id']}"
        for path in folder.glob("*.toml")
        for claim in plan.load(path.stem).claims
    }
    assert kept.keys() == asked
    assert set(standing.everything()) >= asked


def test_a_claim_of_a_closed_round_asks_for_its_contrasts():
    tuned = plan.load("family_tuned")
    by_id = {family.name: family for family in tuned.families}
    collapse = by_id["entropy_collapses"]
    assert len(collapse.questions) == 9
    assert {(q.metric, q.terms[0].at) for q in collapse.questions} == {
        ("entropy", "change")
    }


def test_numbers_in_print():
    assert words.shown(effect(MORE, [1.0, 3.0])) == "+2.0 [-10.7, +14.7]"
    ratio = Question("kl_base", (UP, DAPO), ratio=True)
    assert words.rounded(ratio, 0.0) == "×1.000"
    assert words.rounded(MORE, -0.04) == "+0.0"
    assert effect(MORE, [7.0]).word == "not finished"


def test_no_two_arms_look_alike():
    """Find another color or dash for each arm of an experiment, and one color for a
    base and its UP.
    """
    for path in sorted((plan.MINI / "round2" / "experiments").glob("*.toml")):
        arms = list(plan.load(path.stem).arms)
        if len(arms) > 20:  # a search for learning rates
            continue
        assert len(set(curves.line_styles(arms).values())) == len(arms), path.stem
    names = ["cispo", "up_cispo", "rloo", "rloo_clipped", "dapo", "up_dapo"]
    style = curves.line_styles(names)
    assert style["cispo"].color == style["up_cispo"].color != style["rloo"].color
    assert style["rloo"].color == style["rloo_clipped"].color
    assert style["up_cispo"].dash == style["rloo_clipped"].dash == "--"
    assert style["up_dapo"].dash == style["cispo"].dash == "-"
