# SPDX-License-Identifier: Apache-2.0
"""What is said of a claim: the tests, their power, and every word of the rule."""

from dataclasses import replace

import mini_fake_train as fake
import numpy as np
import pytest
from scipy import stats

from repro.mini.experiment import claims, curves, effects, plan, records, words
from repro.mini.experiment.claims import Claim, Standing
from repro.mini.experiment.questions import Question, Term
from upref.errors import InputError

UP, DAPO = Term("up_dapo", "small", "avg"), Term("dapo", "small", "avg", weight=-1.0)
MORE = Question("avg", (UP, DAPO), bounds=((1, 0.0),), effect=2.0)
WIDTH = np.log(1.25)
KL = tuple(replace(term, metric="kl_base") for term in (UP, DAPO))
SAME = Question("kl_base", KL, ratio=True, bounds=((1, -WIDTH), (-1, WIDTH)))
AVG = {"arms": ["up_dapo", "dapo"], "metric": "avg", "more_than": 0.0, "effect": 0.02}


def table(*contrasts, id="it", **more):
    says = {"figure": "Fig. 0", "says": "It is so."}
    return {"id": id, "contrasts": list(contrasts or [AVG])} | says | more


def small(*tables, seeds=6) -> plan.Plan:
    arms = {a: {"objective": a} for a in ("dapo", "up_dapo", "is_pg")}
    return plan.Plan(
        name="small",
        folder=plan.MINI,
        results=plan.MINI,
        question="Is it so?",
        arms=arms,
        groups=[{"name": "small", "arms": list(arms), "bases": [""]}],
        main={"seeds": list(range(seeds))},
        settings={"steps": 40, "eval_every": 20},
        claims=tables,
    )


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """runs(plan, shift) -> its finished runs, of the fake trainer."""
    made = []

    def make(e, shift=None, keep=lambda settings: True):
        monkeypatch.setattr(fake, "SHIFT", shift or {})
        made.append(folder := tmp_path / str(len(made)))
        for key, s in e.todo({}):
            if keep(s):
                fake.write(s, folder / key)
        return {path.name: records.record(path) for path in folder.glob("*")}

    return make


def effect(question, values) -> effects.Effect:
    """The effect of these values, with its 95 % interval."""
    d = np.array(values, float)[:, None]
    if len(d) < 2:
        return effects.described(question, d)
    return effects.described(question, d, *effects.interval(d.mean(1), 0.05))


def standing(*found, **more) -> Standing:
    asked = tuple(e.question for e in found)
    claim = Claim("it", "Fig. 0", "It is so.", questions=asked)
    return Standing(claim, effects=found, **{"word": "undecided"} | more)


def one(e, known) -> Standing:
    (found,) = claims.judge(e, known)
    return found


# ---- the tests -----------------------------------------------------------------------
def test_p_values_are_scipys():
    d = np.random.default_rng(0).normal(0.3, 1, 9)
    p_for, p_against = effects.p_values(MORE, d)
    above = stats.ttest_1samp(d, 0, alternative="greater").pvalue
    below = stats.ttest_1samp(d, 0, alternative="less").pvalue
    assert p_for == pytest.approx(min(1, 2 * above))
    assert p_against == pytest.approx(min(1, 2 * below))
    scipys = stats.ttest_1samp(d, 0).confidence_interval(0.95)
    assert effects.interval(d, 0.05) == pytest.approx(scipys)


def test_comparable_is_an_equivalence_test():
    rng = np.random.default_rng(0)
    near, wide, far = (
        rng.normal(m, s, 9) for m, s in ((0.02, 0.05), (0.02, 0.8), (0.6, 0.05))
    )
    lower = stats.ttest_1samp(near, -WIDTH, alternative="greater").pvalue
    upper = stats.ttest_1samp(near, WIDTH, alternative="less").pvalue
    assert effects.p_values(SAME, near)[0] == pytest.approx(2 * max(lower, upper))
    assert lower < 0.01
    assert min(effects.p_values(SAME, wide)) > 0.05
    p_for, p_against = effects.p_values(SAME, far)
    assert p_for == 1 and p_against < 1e-4


def test_one_seed_decides_nothing_and_equal_seeds_do():
    assert effects.p_values(MORE, np.array([7.0])) == (1.0, 1.0)
    assert effects.p_values(MORE, np.array([7.0, 7.0]))[0] == 0
    assert effects.p_values(MORE, np.array([0.0, 0.0]))[0] == 1
    assert effect(MORE, [7.0]).word == "not finished"


@pytest.mark.parametrize("question", [MORE, SAME], ids=["more", "same"])
def test_power_is_how_often_it_would_be_found(question):
    sd, n, level = (2.0, 12, 0.01) if question is MORE else (0.15, 12, 0.01)
    true, rng = question.effect or 0.0, np.random.default_rng(1)
    draws = [rng.normal(true, sd, n) for _ in range(1500)]
    hits = np.mean([effects.p_values(question, d)[0] < level for d in draws])
    power_of = lambda n: effects.power_of_bounds(question, sd, n, level)
    assert power_of(n) == pytest.approx(hits, abs=0.04)
    enough = effects.fewest(power_of, 0.8, 200)
    assert power_of(enough) >= 0.8 > power_of(enough - 1)


def test_an_interval_by_hand():
    """Mean 3, sd √2.5, n = 5: half-width 2.7764 · √2.5 / √5 (t table, 4 degrees of
    freedom).
    """
    low, high = effects.interval(np.array([1.0, 2, 3, 4, 5]), 0.05)
    assert low == pytest.approx(3 - 2.7764 * 0.5**0.5, abs=1e-4)
    assert high == pytest.approx(3 + 2.7764 * 0.5**0.5, abs=1e-4)


def test_the_interval_covers_19_times_in_20():
    rng = np.random.default_rng(0)
    ends = [effects.interval(rng.normal(0.3, 1, 5), 0.05) for _ in range(2000)]
    covered = np.mean([low <= 0.3 <= high for low, high in ends])
    assert abs(covered - 0.95) < 3 * (0.95 * 0.05 / 2000) ** 0.5


def test_holm_by_hand_and_in_any_order():
    by_hand = pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert effects.holm([0.01, 0.04, 0.03, 0.005]) == by_hand
    assert effects.holm([0.9, 0.8]) == [1.0, 1.0] and effects.holm([]) == []


def test_holm_keeps_the_family_wise_error():
    p = np.random.default_rng(1).uniform(size=(4000, 8))
    wrong = np.mean([min(effects.holm(list(row))) < 0.05 for row in p])
    assert wrong < 0.05 + 3 * (0.05 * 0.95 / 4000) ** 0.5
    assert np.mean(p.min(1) < 0.05) > 0.3  # what it would be without


# ---- the words -----------------------------------------------------------------------
def test_every_word_of_the_rule(runs):
    both = small(table(id="paper"), table(id="ours", source="ours"))

    def said(shift, e=both):
        return [s.word for s in claims.judge(e, runs(e, shift))]

    assert said({"up_dapo": {"avg": 0.05}}) == ["reproduced", "holds"]
    assert said({"up_dapo": {"avg": -0.05}}) == ["refuted", "refuted"]
    assert said({}) == ["undecided", "undecided"]
    two = small(table(AVG, AVG | {"arms": ["up_dapo", "is_pg"]}))
    higher = {"up_dapo": {"avg": 0.051}, "is_pg": {"avg": 0.051}}
    assert said(higher, two) == ["in part"]
    e = small(table())
    few = one(e, runs(e, keep=lambda s: s.seed < 3))
    assert (few.word, few.why) == ("not finished", "3 of 6 seeds so far")
    assert few.n == 3
    assert one(e, {}).word == "not finished"


KL_BELOW = {
    "arms": ["up_dapo", "dapo"],
    "metric": "kl_base",
    "ratio": True,
    "less_than": 1.25,
}
FALLS = {"arms": ["dapo"], "metric": "entropy", "at": "change", "less_than": 0.0}
RISES = {"arms": ["dapo"], "metric": "entropy", "at": "change", "more_than": 0.0}


@pytest.mark.parametrize(
    ("shift", "contrast", "word"),
    [
        ({"up_dapo": {"avg": 0.05}}, AVG | {"more_than": 0.2}, "refuted"),
        ({"up_dapo": {"kl_base": 0.01}}, KL_BELOW, "reproduced"),
        ({"up_dapo": {"kl_base": 0.05}}, KL_BELOW, "refuted"),
        ({}, FALLS, "reproduced"),
        ({}, RISES, "refuted"),
    ],
)
def test_bounds_ratios_and_one_arm(runs, shift, contrast, word):
    e = small(table(contrast))
    assert one(e, runs(e, shift)).word == word


def test_effect_and_seeds_are_those_of_the_runs(runs):
    e = small(table())
    known = runs(e, {"up_dapo": {"avg": 0.05}})
    end = lambda arm, seed: next(
        100 * r["evals"]["test/top_p_0.7"]["avg"][-1]
        for r in known.values()
        if (r["settings"]["objective"], r["settings"]["seed"]) == (arm, seed)
    )
    d = [end("up_dapo", seed) - end("dapo", seed) for seed in range(6)]
    (found,) = one(e, known).effects
    assert found.mean == pytest.approx(np.mean(d)) and abs(found.mean - 5) < 0.5
    assert found.values == pytest.approx(d)


def test_a_stopped_run_counts_as_0(runs):
    e = small(table())
    known = runs(e)
    name = next(name for name in known if name.startswith("up_dapo"))
    known[name]["status"] = "stopped at step 3: loss nan"
    (found,) = one(e, known).effects
    assert found.n == 6 and min(found.values) < -5


def test_the_gate(runs):
    e = small(table(gate="dapo"))
    known = runs(e, {"up_dapo": {"avg": 0.05}})
    for rises, word in ((True, "reproduced"), (False, "not testable here")):
        for r in known.values():
            r["steps"]["reward"] = sorted(r["steps"]["reward"], reverse=not rises)
        assert one(e, known).word == word
    gone = next(name for name in known if name.startswith("dapo-walk-s5"))
    few = {key: r for key, r in known.items() if key != gone}
    assert one(e, few).why == "5 of 6 seeds so far", "five seeds close nothing"


def test_a_claim_that_cannot_be_tested_here():
    never = {"id": "x", "figure": "f", "says": "s", "not_testable": "no such model"}
    found = one(small(never), {})
    assert (found.word, found.why) == ("not testable here", "no such model")


def test_refuted_is_corrected_like_reproduced(monkeypatch, runs):
    """Holm over a family of many claims: what is refuted alone, barely, is undecided
    among them.
    """
    barely = np.array([-2.0, -1.6, -0.9, -0.7, -0.4, 0.1])[:, None]
    nothing = np.array([-1.0, 1.0, -2.0, 2.0, -3.0, 3.0])[:, None]
    assert 0.005 < effects.p_values(MORE, barely.mean(1))[1] < 0.05
    monkeypatch.setattr(
        effects,
        "differences",
        lambda q, *_: barely if q.terms[0].at == "last" else nothing,
    )
    among = [table(AVG | {"at": "area"}, id=str(i)) for i in range(12)]
    ours = [t | {"source": "ours"} for t in among]
    said = lambda *tables: claims.judge(small(*tables), {})[0]
    monkeypatch.setattr(claims, "_gain", lambda *_: None)
    alone, many, two = said(table()), said(table(), *among), said(table(), *ours)
    assert [s.p_against < 0.05 for s in (alone, many, two)] == [True, False, True]


def test_holm_is_over_the_claims_of_an_experiment(runs):
    """Twenty claims about nothing: no verdict is of chance."""
    e = small(
        *(
            table(
                {"arms": ["is_pg", "dapo"], "metric": m, "at": at, "more_than": 0.0},
                id=f"{m}{at}",
            )
            for m in ("reward", "valid", "length", "kl_old", "alive")
            for at in ("mean", "last", "max", "change")
        )
    )
    found = claims.judge(e, runs(e))
    assert not any(s.word == "reproduced" for s in found)
    for s in found:
        (e,) = s.effects
        assert s.p_for >= effects.p_values(e.question, np.array(e.values))[0]


def test_what_can_be_0_is_not_a_ratio():
    reward = AVG | {"metric": "reward", "ratio": True, "more_than": 1.0}
    with pytest.raises(InputError, match="compared by differences"):
        claims.judge(small(table(reward)), {})


def test_a_run_without_a_number_is_left_out(runs):
    """Of a KL of 0 there is no logarithm, of no step no number."""
    e = small(table(KL_BELOW))
    known = runs(e)
    odd = {name.split("-walk")[0]: name for name in known if "-s0-" in name}
    known[odd["dapo"]]["steps"]["kl_base"] = [0.0] * 8
    assert (one(e, known).word, one(e, known).n) == ("not finished", 5)
    known[odd["is_pg"]]["steps"] = {}  # no claim asks for it
    assert one(e, known).n == 5


# ---- in print ------------------------------------------------------------------------
def test_an_effect_outside_the_interval_is_excluded():
    less = [-2.0, 2.0, -1.0, 1.0, 0.0, 0.4]
    wide = np.random.default_rng(0).normal(1, 5, 6)
    assert effect(MORE, less).high < MORE.effect < effect(MORE, wide).high
    assert claims.limit(standing(effect(MORE, less))).startswith("excluded above +")
    assert claims.limit(standing(effect(MORE, wide))) == ""


def test_the_interval_that_is_printed_is_the_one_that_decides():
    """Of every claim of the second round: it leaves out the bound exactly where the
    rule says so.
    """
    known, seen = records.load(plan.MINI / "round2" / "results"), set()
    for path in sorted((plan.MINI / "round2" / "experiments").glob("*.toml")):
        for s in claims.judge(plan.load(path.stem), known):
            if s.word not in ("reproduced", "holds", "refuted", "undecided"):
                continue
            seen.add(s.word)
            beyond = [_sides(e) for e in s.effects]
            assert all(all(x) for x, _ in beyond) == (s.word in ("reproduced", "holds"))
            assert any(any(x) for _, x in beyond) == (s.word == "refuted")
    assert len(seen) == 4


def _sides(e):
    """Of each bound: whether the interval lies on the claimed side, on the other one."""
    claimed = [e.low > b if side > 0 else e.high < b for side, b in e.question.bounds]
    other = [e.high < b if side > 0 else e.low > b for side, b in e.question.bounds]
    return claimed, other


def test_the_weakest_contrast_is_the_one_that_refutes():
    seen = [(10, 11), (-1, 0.1), (-10, -11), (-0.1, -2)]
    found = standing(*(effect(MORE, d) for d in seen))
    assert "weakest: -10.5 " in claims.shown(found)


def test_numbers_in_print():
    assert words.shown(effect(MORE, [1.0, 3.0])) == "+2.0 [-10.7, +14.7]"
    assert words.claimed(MORE) == "avg last up_dapo − dapo > 0"
    assert words.claimed(SAME) == "kl_base last up_dapo / dapo within ×1.25"
    assert words.rounded(SAME, 0.0) == "×1.000"
    assert words.rounded(MORE, -0.04) == "+0.0"


def test_no_two_arms_look_alike():
    for path in sorted((plan.MINI / "round2" / "experiments").glob("*.toml")):
        arms = list(plan.load(path.stem).arms)
        if len(arms) > 20:  # a search for learning rates
            continue
        colour, dashes = curves.looks(arms)
        assert len({(colour[a], dashes[a]) for a in arms}) == len(arms), path.stem
    names = ["cispo", "up_cispo", "rloo", "rloo_clipped", "dapo", "up_dapo"]
    colour, dashes = curves.looks(names)
    assert colour["cispo"] == colour["up_cispo"] != colour["rloo"]
    assert colour["rloo"] == colour["rloo_clipped"]
    assert dashes["up_cispo"] == dashes["rloo_clipped"] == "--"
    assert dashes["up_dapo"] == dashes["cispo"] == "-"
