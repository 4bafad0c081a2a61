# SPDX-License-Identifier: Apache-2.0
"""Claims of Section 5 and Appendix A that numbers in print can settle: tables, peaks,
settings.
"""

import operator
import re
from itertools import product
from math import floor

import pytest
import torch
from scipy.stats import spearmanr

from docs import controls, stale
from paper.claims import evidence
from repro.mini.experiment import effects, plan, questions, records
from repro.mini.experiment.questions import Question, survival, term_of
from repro.mini.experiment.words import shown
from repro.with_verl.config.scales import paper
from tests.support.on_tokens import weight
from tests.support.table1 import mean, mean_fits, read
from upref import get
from upref.metrics import best_at_k_replaced

TABLE = read()
PRINTED = {
    name: list(map(float, cells))
    for name, cells in zip(TABLE.rows, TABLE.cells, strict=True)
}
AVERAGE = dict(zip(TABLE.rows, map(float, TABLE.averages), strict=True))
OURS = "UP-GRPO"
KEPT = paper()
PEAKS = KEPT["peaks"]
TEX = evidence.paper()


def close(found, claimed):
    return abs(found - claimed) < 0.005 + 1e-9


def best_other(j):
    return max(cells[j] for name, cells in PRINTED.items() if name != OURS)


# ---- peaks ---------------------------------------------------------------------------
def nearest(percent, n):
    return max(
        (floor(percent * n / 100 + x) for x in (0, 1)),
        key=lambda k: -abs(100 * k / n - percent),
    )


def test_avg32_peaks_are_shares_of_960_answers(holds):
    for name, p in PEAKS["avg32"].items():
        k = nearest(p, 960)
        holds(f"{name}: {k} of 30 x 32 answers, in per cent", p, 100 * k / 960, close)


def test_which_estimators_can_give_best32(holds, counterexample, record_property):
    """Drawing 32 of 32 answers with replacement, a problem with k right ones counts 1 -
    (1 - k/32)^32. Of the numbers of two decimals most are such values: the test that
    the two peaks can be has little power.
    """

    def best_of_32_with(k):
        """Return Best@32 of a problem with k right answers of 32."""
        return best_at_k_replaced(torch.arange(32)[None] < k, 32).value

    few = [best_of_32_with(k) for k in (1, 2, 3, 4)]
    values = []
    for rarely in product(range(5), repeat=4):
        partly = sum(n * x for n, x in zip(rarely, few, strict=True))
        for solved in range(31 - sum(rarely)):
            values.append(100 * (solved + partly) / 30)
    hundredths = range(6000, 9801)
    reached = {round(100 * v) for v in values} & set(hundredths)
    share = len(reached) / len(hundredths)
    assert share > 0.5
    record_property(
        "identity",
        f"{share:.0%} of the numbers of two decimals from 60 to 98 are such values",
    )
    for name, p in PEAKS["best32"].items():
        found = min(values, key=lambda v: abs(v - p))
        holds(
            f"{name}: a value of the bootstrap with replacement, in per cent",
            p,
            found,
            close,
        )
        counterexample(
            f"{name}: the nearest share of 30 problems, in per cent",
            p,
            100 * nearest(p, 30) / 30,
            close,
        )


def lead(metric, one, other, holds, said):
    """Assert that the difference of two peaks of a metric, in points, is what the paper
    says.
    """
    holds(
        f"{one} minus {other}, {metric}, points",
        said,
        PEAKS[metric][one] - PEAKS[metric][other],
        close,
    )


def test_gain_of_up_gspo(holds):
    lead("avg32", "UP-GSPO", "GSPO", holds, 3.02)


def test_gain_on_geometry3k(holds):
    """No share of 601 problems prints as either number."""
    lead("geometry3k", "UP-GRPO", "GRPO", holds, 3.30)
    for p in PEAKS["geometry3k"].values():
        assert not close(100 * nearest(p, 601) / 601, p)


def above(metric, holds):
    up, dapo = PEAKS[metric]["UP-DAPO"], PEAKS[metric]["DAPO"]
    holds(f"UP-DAPO's peak against DAPO's, {metric}, as printed", dapo, up, operator.gt)


def test_peak_of_avg32(holds):
    above("avg32", holds)


def test_peak_of_maj32(holds):
    """No share of 30 problems prints as either number."""
    above("maj32", holds)
    for p in PEAKS["maj32"].values():
        assert not close(100 * nearest(p, 30) / 30, p)


def test_peak_of_best32(holds):
    above("best32", holds)


# ---- Table 1 -------------------------------------------------------------------------
def test_up_grpo_has_the_best_average(holds):
    for cells, average in zip(TABLE.cells, TABLE.averages, strict=True):
        assert mean_fits(average, cells, TABLE.answers)
    holds("UP-GRPO's average, in per cent", 61.31, AVERAGE[OURS])
    holds(
        "against the best other average",
        max(a for n, a in AVERAGE.items() if n != OURS),
        AVERAGE[OURS],
        operator.gt,
    )


def test_the_margin_over_gspo(holds):
    """Find the margin in the printed averages; that of the counts inferred from the
    printed cells is a little smaller.
    """
    unrounded = {
        name: mean(cells, TABLE.answers)
        for name, cells in zip(TABLE.rows, TABLE.cells, strict=True)
    }
    holds(
        "UP-GRPO minus GSPO, of the printed averages",
        1.16,
        AVERAGE[OURS] - AVERAGE["GSPO"],
    )
    assert f"{float(unrounded[OURS] - unrounded['GSPO']):.3f}" == "1.150"


def test_gspo_has_the_best_average_of_the_eleven(holds):
    holds("GSPO's average, in per cent", 60.15, AVERAGE["GSPO"])
    others = [a for name, a in AVERAGE.items() if name not in (OURS, "GSPO")]
    holds("best average of the other ten", AVERAGE["GSPO"], max(others), operator.lt)


def test_averages_of_those_said_to_keep_their_entropy(holds, counterexample):
    """UP-GRPO is above all nine others, W-REINFORCE below six, ASPO below one."""
    kept = (OURS, "W-REINFORCE", "ASPO")
    lost = {name: a for name, a in AVERAGE.items() if name not in kept}
    best = max(lost.values())
    assert len(lost) == 9 and best == lost["GSPO"]
    below = [sum(AVERAGE[name] < a for a in lost.values()) for name in kept]
    assert below == [0, 6, 1]
    where = "average, against the best of the nine said to collapse"
    holds(f"UP-GRPO's {where}", best, AVERAGE[OURS], operator.gt)
    for name in kept[1:]:
        counterexample(f"{name}'s {where}", best, AVERAGE[name], operator.gt)


def test_up_grpo_is_first_or_tied_on_four(holds):
    first = [PRINTED[OURS][j] >= best_other(j) for j in range(5)]
    holds("benchmarks on which UP-GRPO is first or ties", 4, sum(first))
    assert first == [True, True, True, True, False]


def test_olympiadbench_is_second_to_aspo(holds):
    holds("UP-GRPO on OlympiadBench", 58.33, PRINTED[OURS][4])
    holds("best other on OlympiadBench", 58.48, PRINTED["ASPO"][4])
    assert sorted((c[4] for c in PRINTED.values()), reverse=True)[:2] == [58.48, 58.33]


def test_up_grpo_is_above_grpo_on_all_five(holds):
    gains = [a - b for a, b in zip(PRINTED[OURS], PRINTED["GRPO"], strict=True)]
    holds("smallest gain over GRPO, points", 0, min(gains), operator.gt)


def test_up_grpo_is_never_behind_its_family(holds, counterexample):
    """Find that the smallest lead is not below 0, and not above it either."""
    family = [PRINTED[n] for n in ("GRPO", "Dr. GRPO", "GMPO", "GSPO")]
    least = min(
        ours - theirs[j] for theirs in family for j, ours in enumerate(PRINTED[OURS])
    )
    holds(
        "smallest lead over GRPO, Dr. GRPO, GMPO and GSPO on a benchmark, points",
        0,
        least,
        operator.ge,
    )
    counterexample("the same, without ties", 0, least, operator.gt)


def test_twelve_baselines_are_eleven_and_dapo(holds):
    others = [n for n in TABLE.rows if n != OURS]
    holds("baselines in Table 1", 11, len(others))
    assert "DAPO" not in others and KEPT["names"]["DAPO"] == "dapo"


# ---- what the ablations are taken to show --------------------------------------------
def test_a_bounded_gradient_that_is_never_clipped_needs_no_self_anchor(counterexample):
    """GPPO keeps π_old in its ratio and stops the gradient of the ratio's excess: 1+ε
    at most, and never 0.
    """
    found = weight("gppo", 50.0, 1.0)
    assert 0 < found
    counterexample(
        "weight of a right token under GPPO, r = 50: as large as r",
        50,
        found,
        operator.ge,
    )


def test_methods_said_to_avoid_collapse_are_asymmetric(holds):
    """So are two that are said to collapse: SAPO's temperatures and GSPO's bounds differ
    by the sign of the advantage.
    """
    for name in ("w_reinforce", "aspo", "up_grpo"):
        wrong, right = -weight(name, 1.1, -1.0), weight(name, 1.1, 1.0)
        holds(
            f"weight at r = 1.1 of a right token under {name}, as of a wrong one",
            wrong,
            right,
            operator.ne,
        )
    assert weight("sapo", 1.3, 1.0) != -weight("sapo", 1.3, -1.0)
    bounds = get("gspo").hyperparameters
    assert bounds["eps_low"] != bounds["eps_high"]


# ---- settings ------------------------------------------------------------------------
def pairs(table):
    """Return (two column names, rows of (name, one number, the other)) for each two
    columns of a table.
    """
    t = KEPT[table]
    return [
        (
            t["columns"][i : i + 2],
            [(row[0], row[1 + i], row[2 + i]) for row in t["rows"]],
        )
        for i in range(0, len(t["columns"]), 2)
    ]


def test_only_eps_high_differs(holds):
    for table in ("A1", "A3", "A5"):
        for names, rows in pairs(table):
            differ = [what for what, a, b in rows if a != b]
            assert differ == ["Upper Clip ε_high"], (table, names)
    holds("settings that differ, in each of Tables A1, A3 and A5", 1, len(differ))


def test_which_tables_give_grpo_one_epsilon(holds, counterexample):
    for table, say in (("A3", holds), ("A5", counterexample)):
        rows = {row[0]: row[1] for row in KEPT[table]["rows"]}
        say(
            f"ε_high of GRPO in Table {table}, as ε_low",
            rows["Lower Clip ε_low"],
            rows["Upper Clip ε_high"],
        )


@pytest.mark.skipif(TEX is None, reason="the paper's LaTeX is not here")
def test_the_paper_prints_no_record_of_its_runs(not_testable):
    printed, _ = TEX
    assert "Project Page" in printed
    for pattern in (
        r"github|gitlab|huggingface\.co",
        r"\bcommit\b",
        r"source code|our code|code (is|are|will be)\b",
        r"wandb|tensorboard|training logs?\b",
    ):
        assert not re.search(pattern, printed, re.IGNORECASE), pattern
    not_testable(
        "no run of the authors can be read: the printed text names no code, no commit "
        "and no log of them; the title page links a project page, which was not read"
    )


# ---- without a clip ------------------------------------------------------------------
def at_dose(name, number, *arms, ratio=False):
    """Return the effect of an arm's number at a dose of the second round, or of one arm
    against another, with a plain 95 % interval.
    """
    dose = plan.load(name)
    runs = dose.runs(records.load(dose.results))
    terms = [
        term_of(number, arm, name, sign)
        for arm, sign in zip(arms, (1.0, -1.0), strict=False)
    ]
    question = Question(terms[0].metric, tuple(terms), ratio=ratio)
    return effects.plain(question, runs, dose.main["seeds"], [""])


def test_entropy_of_up_grpo_beside_the_eleven(record_property):
    """W-REINFORCE as its authors train it has more entropy, and over the whole of
    training GSPO has; at the end UP-GRPO has more than the other nine, and than
    W-REINFORCE as it is printed.
    """
    rivals = {"gspo": "GSPO", "w_reinforce_code": "W-REINFORCE as its authors train it"}
    for number, when in (("entropy@mean", "mean of training"), ("entropy", "end")):
        for arm, name in rivals.items():
            found = at_dose("family_tuned", number, "up_grpo", arm)
            assert found.high < 0 or (arm, when) == ("gspo", "end")
            record_property(
                "undecided",
                f"not registered, {found.n} seeds: entropy, {when}, UP-GRPO − {name} "
                f"{shown(found)} nats",
            )
    others = (
        "grpo",
        "dr_grpo",
        "cispo",
        "dppo_tv",
        "gmpo",
        "sapo",
        "reinforce_pp",
        "rloo",
        "aspo",
    )
    for arm in (*others, "w_reinforce"):
        assert at_dose("family_tuned", "entropy", "up_grpo", arm).low > 0


def test_a_policy_learns_without_a_clip_where_the_ratio_stays(counterexample):
    """The reward of importance sampling without any clip rises in training with one
    epoch a step, and with two it does not.
    """
    low = at_dose("dose_low", "reward@change", "is_pg")
    assert at_dose("dose_middle", "reward@change", "is_pg").low < 0
    counterexample(
        "change of reward in training without any clip, the ratio kept, one epoch a "
        f"step, {low.n} seeds, {shown(low)} points; lower end, as a loss",
        0,
        low.low,
        operator.lt,
    )


# ---- runs on stale data and of the second round --------------------------------------
def test_no_run_on_stale_data_loses_half_of_its_peak(holds, stale_runs):
    """Survival is a measure that was registered there, with the sampler's lp_old. Where
    lp_old is recomputed, one run of DAPO does.
    """
    lasted, recomputed = [], []
    for (arm, group, *_), run in stale_runs.items():
        if arm in ("dapo", "up_dapo"):
            is_whole = survival(run) == run["settings"]["steps"] == 400
            if group == "recomputed":
                recomputed.append((arm, is_whole))
            else:
                lasted.append(is_whole)
    assert [arm for arm, is_whole in recomputed if not is_whole] == ["dapo"]
    holds(
        f"runs of DAPO and UP-DAPO on stale data, of {len(lasted)} of 400 steps, whose "
        "reward falls below half of its peak",
        0,
        len(lasted) - sum(lasted),
    )


def test_largest_gradient_norm_of_up_and_dapo(record_property):
    low, middle = (
        at_dose(name, "grad_norm_max@max", "up_dapo", "dapo", ratio=True)
        for name in ("dose_low", "dose_middle")
    )
    for name, found in (("dose_low", low), ("dose_middle", middle)):
        record_property(
            "undecided",
            f"not registered, {found.n} seeds: largest gradient norm UP-DAPO / DAPO, "
            f"{name} {shown(found)}",
        )
    # logarithms of ratios
    assert low.low < 0 < low.high and middle.high < 0


# ---- runs that nobody registered: they decide nothing --------------------------------
def test_w_reinforce_in_its_authors_form_keeps_its_entropy(seen, record_property):
    """A fall of 0.1 nats is the size of a collapse that was registered for nine other
    methods, and each of them falls by more. But it learns little.
    """
    tuned = plan.load("family_tuned")
    runs, seeds = tuned.runs(records.load(tuned.results)), tuned.main["seeds"]
    (claim,) = (c for c in tuned.claims if c["id"] == "entropy_collapses")
    for contrast in claim["contrasts"]:
        assert len(contrast["arms"]) == 1
        question = questions.contrast(contrast, tuned.name)
        other = effects.plain(question, runs, seeds, [""])
        assert other.high < contrast["effect"] == -0.1
    assert contrast["effect"] < seen("w_reinforce").low
    ends = {}
    for arm, name in (("w_reinforce_code", "W-REINFORCE"), ("grpo", "GRPO")):
        means = []
        for number in ("reward@change", "reward", "malformed"):
            question = Question(number, (term_of(number, arm, tuned.name),))
            means.append(effects.plain(question, runs, seeds, [""]).mean)
        gain, reward, malformed = ends[arm] = means
        record_property(
            "undecided",
            f"{name} there: reward {gain:+.1f} points, to {reward:.1f} %; malformed "
            f"answers at the end {malformed:.0f} %",
        )
    assert ends["w_reinforce_code"][0] < ends["grpo"][0] / 3
    assert 40 < ends["w_reinforce_code"][2] < 50 and ends["grpo"][2] < 15


def test_aspo_in_its_authors_form_loses_entropy(seen):
    assert seen("aspo").high < 0


def test_the_self_anchor_and_the_largest_gradient_norm(seen):
    # logarithms of ratios
    assert seen("anchor_middle").high < 0 and seen("anchor_high").high < 0


def test_maj32_on_stale_data(seen_on_stale_data):
    for s in (0, 4, 16):
        found = seen_on_stale_data("Maj@32 UP-DAPO − DAPO", "maj", s)
        assert found.low < 0 < found.high
        at_t_1 = seen_on_stale_data("Maj@32 at T = 1 UP-DAPO − DAPO", "maj/t_1", s)
        assert (at_t_1.low > 0) == (s == 4) and at_t_1.high > 0


def test_avg32_on_stale_data_at_t_1(seen_on_stale_data):
    found = seen_on_stale_data("Avg@32 at T = 1 UP-DAPO − DAPO", "avg/t_1", 16)
    assert found.high < 0 and max(found.values) < 0


def test_best32_where_lp_old_is_recomputed(record_property):
    """A registered effect, with its registered interval and margin."""
    experiment = plan.load("stale")
    known = records.load(experiment.results)
    by_family = experiment.by_family(experiment.effects(known))
    (of_family,) = (of for family, of in by_family if family.name == "recomputed")
    (found,) = (e for e in of_family if e.question.metric == "best")
    assert found.word == "no difference" and found.high < found.question.margin == 4
    record_property(
        "excluded",
        f"registered, {found.n} seeds: Best@32 UP-DAPO − DAPO, 16 rollouts stale, lp_old "
        f"recomputed {shown(found)} points",
    )


def test_best32_from_each_base_on_stale_data(stale_runs, record_property):
    ends = {}
    for base in ("walk", "biased"):
        for at, arm in (("first", "dapo"), ("last", "dapo"), ("last", "up_dapo")):
            question = Question("best", (term_of(f"best@{at}", arm, "s16"),))
            seeds = sorted({seed for *_, seed in stale_runs})
            found = effects.plain(question, stale_runs, seeds, [base])
            ends[base, at, arm] = found.mean
    falls = "walk"
    rises = "biased"
    for base in (falls, rises):
        start = ends[base, "first", "dapo"]
        dapo = ends[base, "last", "dapo"]
        up = ends[base, "last", "up_dapo"]
        assert up > dapo and (start > up if base == falls else dapo > start)
        record_property(
            "undecided",
            f"not registered, {found.n} seeds, 16 rollouts stale: Best@32 from "
            f"{start:.1f} % to {up:.1f} % under UP-DAPO and {dapo:.1f} % under DAPO",
        )


def entropy_and_best32_kept(run):
    """Return the entropy of the last fifth of a run over that of its first, and its
    Best@32 at the end over that of its base.
    """
    entropy = run["steps"]["entropy"]
    n = max(1, len(entropy) // 5)
    best = run["evals"]["test/top_p_0.7"]["best"]
    return sum(entropy[-n:]) / sum(entropy[:n]), best[-1] / best[0]


def test_entropy_and_best32_over_methods_and_runs(record_property):
    """The signs differ: over the methods of two experiments they rise together, over
    all runs of the second round they do not.
    """
    of_stale, cells = stale.entropy_and_best()
    of_controls, methods = controls.entropy_and_best()
    runs = []
    for run in records.load(plan.load("dose_low").results).values():
        is_done = run["status"] == "done" and "solved" in run
        if is_done and run["settings"]["base"] == "walk":
            runs.append(run)
    kept = [entropy_and_best32_kept(run) for run in runs]
    of_runs = spearmanr(*zip(*kept, strict=True)).statistic
    assert of_stale > 0.9 and of_controls > 0.5 and of_runs < -0.3
    correlations = {
        f"{cells} settings on stale data, means over seeds, correlation": of_stale,
        f"{methods} methods of the controls, means over seeds, correlation": of_controls,
        f"{len(runs)} runs of the second round, what is kept of each, rank "
        "correlation": of_runs,
    }
    for what, found in correlations.items():
        record_property(
            "undecided", f"not registered, entropy and Best@32 over {what} {found:+.2f}"
        )


def test_peaks_of_best32_in_the_miniature(seen_on_stale_data, record_property):
    """In round two the highest of a run's evaluations is that of the untrained policy,
    whatever the method.
    """
    for dose in map(plan.load, ("dose_low", "dose_middle", "dose_high")):
        for (arm, *_), run in dose.runs(records.load(dose.results)).items():
            best = run["evals"]["test/top_p_0.7"]["best"]
            compared = arm in ("dapo", "up_dapo")
            assert not compared or max(best) == best[0], run["name"]
    record_property(
        "undecided",
        "round two: in every run of DAPO and UP-DAPO at the three doses the peak of "
        "Best@32 is the untrained policy's",
    )
    gains = [
        seen_on_stale_data("peak of Best@32 UP-DAPO − DAPO", "best@highest", s)
        for s in (0, 4, 16)
    ]
    assert gains[0].low < 0 < gains[0].high and all(e.low > 0 for e in gains[1:])
