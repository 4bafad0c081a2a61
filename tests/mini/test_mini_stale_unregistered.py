# SPDX-License-Identifier: Apache-2.0
"""The page of what nobody registered, and README's numbers: recomputed here from
runs.jsonl by scipy alone.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from docs import answer
from repro.mini.experiment import plan, standing

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "repro/mini/stale/results"
BASES, SEEDS = ("walk", "biased"), range(3100, 3117)
WHERE = {"top-p 0.7": "test/top_p_0.7", "T = 1": "test/t_1"}
ARMS = {
    "UP-DAPO": "up_dapo",
    "DAPO": "dapo",
    "DAPO without its upper clip": "dapo_no_upper_clip",
    "CISPO": "cispo",
}
PAGE = (RESULTS / "unregistered.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runs():
    """Return {(method, staleness, source of lp_old, base, seed): record} of the
    400-step runs.
    """
    lines = map(
        json.loads, (RESULTS / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    )
    named = ("objective", "staleness", "old_log_probs", "base", "seed")
    return {
        tuple(r["settings"][k] for k in named): r
        for r in lines
        if r["settings"]["steps"] == 400
    }


def per_seed(runs, arm, s, metric, where="test/top_p_0.7", old="sampler", at=-1):
    """Return the mean over bases of a metric at one evaluation, in points, for each
    seed.
    """
    ends = [
        [runs[arm, s, old, base, k]["evals"][where][metric][at] for base in BASES]
        for k in SEEDS
    ]
    return 100 * np.mean(ends, axis=1)


def plain(x):
    """Return the mean and scipy's 95 % interval, as the page prints them."""
    ends = stats.ttest_1samp(x, 0).confidence_interval(0.95)
    return printed(x.mean(), ends.low, ends.high)


def simultaneous(x, m):
    """Return the mean and the meet of the Bonferroni intervals of the two registered
    looks, for m comparisons, as the report prints them.
    """
    first = stats.ttest_1samp(x[:8], 0).confidence_interval(1 - 0.01 / m)
    final = stats.ttest_1samp(x, 0).confidence_interval(1 - 0.04 / m)
    return printed(x.mean(), max(first.low, final.low), min(first.high, final.high))


def printed(mean, low, high):
    mean, low, high = (f"{round(float(x), 1) + 0.0:+.1f}" for x in (mean, low, high))
    return f"{mean} [{low}, {high}]"


def rows(heading):
    """Return the cells of the table under a heading of the page, without its head."""
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [
        line.strip("| ").split(" | ")
        for line in table.splitlines()
        if line.startswith("| ")
    ][2:]


def test_every_interval_of_both_decodings(runs):
    found = rows("Both decodings, with Maj@32")
    assert len(found) == 18
    for difference, s, decoding, *effects, above in found:
        one, other = (ARMS[name] for name in difference.split(" − "))
        pairs = [per_seed(runs, one, int(s), m, WHERE[decoding]) - per_seed(runs, other, int(s), m, WHERE[decoding])
                 for m in ("best", "avg", "maj")]  # fmt: skip
        assert effects == [plain(x) for x in pairs], (difference, s, decoding)
        assert above == ", ".join(str(np.sum(x > 1e-9)) for x in pairs)


def test_where_each_method_ends(runs):
    """Compute the page's table of ends from the runs."""
    base, *found = rows("Where each method ends")
    start = {
        m: np.mean([100 * r["evals"]["test/top_p_0.7"][m][0] for r in runs.values()])
        for m in ("best", "avg", "maj")
    }
    assert base[3:6] == [f"{start[m]:.1f}" for m in start]
    assert len(found) == 14
    for name, s, old, *ends in found:
        expected = []
        for where in WHERE.values():
            for m in start:
                mean = per_seed(runs, ARMS[name], int(s), m, where, old).mean()
                expected.append(f"{mean:.1f}")
        assert ends == expected, (name, s, old)


def test_against_the_base_and_with_lp_old_recomputed(runs):
    """Three tables of the page: against the base, the decoding, and lp_old recomputed."""
    for name, s, best, avg in rows("Against the base"):
        arm, s = ARMS[name], int(s)
        for m, effect in (("best", best), ("avg", avg)):
            end = per_seed(runs, arm, s, m)
            assert effect == plain(end - per_seed(runs, arm, s, m, at=0)), (name, s)
    for name, s, best, avg in rows("The decoding against the method"):
        arm, s = ARMS[name], int(s)
        for m, effect in (("best", best), ("avg", avg)):
            at_t_1 = per_seed(runs, arm, s, m, WHERE["T = 1"])
            assert effect == plain(at_t_1 - per_seed(runs, arm, s, m)), (name, s)
    for name, best, avg, maj in rows("Where lp_old is recomputed"):
        arm = ARMS[name]
        for m, effect in (("best", best), ("avg", avg), ("maj", maj)):
            recomputed = per_seed(runs, arm, 16, m, old="recomputed")
            assert effect == plain(recomputed - per_seed(runs, arm, 16, m)), name


def test_peaks_in_place_of_ends(runs):
    def peak(arm, s, metric):
        """Return the mean over bases of the largest value of a metric, in points, for
        each seed.
        """
        tops = []
        for k in SEEDS:
            of_bases = []
            for base in BASES:
                evals = runs[arm, s, "sampler", base, k]["evals"]
                of_bases.append(max(evals["test/top_p_0.7"][metric]))
            tops.append(of_bases)
        return 100 * np.mean(tops, axis=1)

    for s, best, avg, maj in rows("Peaks in place of ends"):
        for m, effect in (("best", best), ("avg", avg), ("maj", maj)):
            difference = peak("up_dapo", int(s), m) - peak("dapo", int(s), m)
            assert effect == plain(difference)


def test_at_equal_average_by_hand(runs):
    """The point of DAPO's mean path that has UP-DAPO's Avg@32 lies between the two
    evaluations around it.
    """
    for s, text in rows("Is it early stopping?"):
        avg, best = (
            np.array([per_seed(runs, "dapo", int(s), m, at=i).mean() for i in range(9)])
            for m in ("avg", "best")
        )
        end = per_seed(runs, "up_dapo", int(s), "avg").mean()
        i = int(np.flatnonzero(avg >= end)[0])
        # on the line between the evaluations i - 1 and i
        of_best, of_avg = best[i] - best[i - 1], avg[i] - avg[i - 1]
        there = best[i - 1] + of_best * (end - avg[i - 1]) / of_avg
        mean, low, high = map(float, re.findall(r"[+-][\d.]+", text))
        of_up = per_seed(runs, "up_dapo", int(s), "best").mean()
        assert mean == round(of_up - there, 1)
        assert low < mean < high


def test_entropy_and_best(runs):
    """Compute the page's correlation of the last entropies with Best@k over the cells."""
    cells = sorted({place[:3] for place in runs})
    entropy = []
    for cell in cells:
        of_runs = []
        for base in BASES:
            for k in SEEDS:
                of_run = runs[(*cell, base, k)]["steps"]["entropy"]
                of_runs.append(np.mean(of_run[-16:]))
        entropy.append(np.mean(of_runs))
    best = [per_seed(runs, arm, s, "best", old=old).mean() for arm, s, old in cells]
    r = stats.pearsonr(entropy, best).statistic
    assert f"Over the {len(cells)} cells" in PAGE and f"the correlation {r:.3f}" in PAGE


def test_the_numbers_of_readme(runs):
    """Registered effects with the intervals of their families, of 6 and 12 (and of 2
    where lp_old is recomputed).
    """

    def difference(one, other, s, m, **k):
        return per_seed(runs, one, s, m, **k) - per_seed(runs, other, s, m, **k)

    gain = {}
    for staleness in (0, 4, 16):
        best = difference("up_dapo", "dapo", staleness, "best")
        gain[staleness] = simultaneous(best, 6)
    average = simultaneous(difference("up_dapo", "dapo", 16, "avg"), 6)
    anchor = simultaneous(difference("up_dapo", "dapo_no_upper_clip", 16, "best"), 12)
    again = simultaneous(difference("up_dapo", "dapo", 16, "best", old="recomputed"), 2)
    sampled = {}
    for m in ("best", "avg", "maj"):
        sampled[m] = difference("up_dapo", "dapo", 16, m, where="test/t_1")
    below = f"{np.sum(sampled['avg'] < -1e-9)} of 17 seeds below 0"
    majority = plain(difference("up_dapo", "dapo", 16, "maj"))

    def best_at(base, arm, at):
        """Return the mean Best@32 of an arm at its first or last evaluation, in percent
        without decimals.
        """
        of_seeds = []
        for k in SEEDS:
            evals = runs[arm, 16, "sampler", base, k]["evals"]
            of_seeds.append(evals["test/top_p_0.7"]["best"][at])
        return f"{100 * np.mean(of_seeds):.0f}"

    ends = {}
    for base in BASES:
        for arm in ("dapo", "up_dapo"):
            for at in (0, -1):
                ends[base, arm, at] = best_at(base, arm, at)
    walk, biased = BASES
    of_stale, of_fresh = ("up_dapo", 16, "avg"), ("dapo", 0, "avg")
    stale = plain(per_seed(runs, *of_stale) - per_seed(runs, *of_fresh))
    lost, others = [], []
    for arm in ("dapo", "up_dapo"):
        recomputed = per_seed(runs, arm, 16, "avg", old="recomputed")
        lost.append(recomputed - per_seed(runs, arm, 16, "avg"))
        others.append(per_seed(runs, arm, 16, "best", old="recomputed").mean())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    findings = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    section = readme.partition("## Does UP help?")[2].partition("\n## ")[0]
    section += findings.partition("## The answer today")[2].partition("\n## ")[0]
    for said in (
        f"right at least once in 32 | {gain[16]} | {plain(sampled['best'])} |",
        f"right on average | {average} | {plain(sampled['avg'])}; {below} |",
        f"the most frequent is right | {majority}, not registered | {plain(sampled['maj'])} |",
        f"Best@32 {gain[16]} points, average {average}. Fresh data, Best@32: no gain "
        "shown at 8 updates",
        f"from the base at {ends[walk, 'dapo', 0]} % Best@32 falls to "
        f"{ends[walk, 'up_dapo', -1]} % under UP and to {ends[walk, 'dapo', -1]} % under "
        f"DAPO; from the base at {ends[biased, 'dapo', 0]} % it rises to "
        f"{ends[biased, 'up_dapo', -1]} % and to {ends[biased, 'dapo', -1]} %.",
        f"Avg@32 is {stale} points (not registered) from that of DAPO on fresh data",
        f"UP gains {again} of Best@32: both methods end at {others[0]:.0f} to {others[1]:.0f} %. Their "
        f"Avg@32 is then {-np.mean(lost):.0f} points lower than with the sampler's lp_old",
    ):
        assert said in section, said
    half = float(str(anchor).partition(" ")[0]) / float(str(gain[16]).partition(" ")[0])
    assert 0.45 < half < 0.55


@pytest.mark.parametrize(
    "page",
    ["docs/findings.md", "docs/glossary.md"],
)
def test_pages_agree_on_what_brackets_mean(page):
    report = (RESULTS / "report.md").read_text(encoding="utf-8")
    brackets = re.search(r"Brackets hold an interval\..* 95 % interval\.", report)[0]
    assert len(brackets) > 200 and brackets in (ROOT / page).read_text(encoding="utf-8")


def test_each_base_apart(runs):
    """No sum of the page: of each base, at the start and at the end, and the effect."""

    def of_base(base, arm, s, at=-1):
        """Return Best@32 of one base at one evaluation, in points, for each seed."""
        found = [
            runs[arm, s, "sampler", base, k]["evals"]["test/top_p_0.7"]["best"][at]
            for k in SEEDS
        ]
        return 100 * np.array(found)

    printed_rows = rows("Each base apart")
    changes = []
    for base in BASES:
        for s in (0, 4, 16):
            for arm, name in (("dapo", "DAPO"), ("up_dapo", "UP-DAPO")):
                first, last = of_base(base, arm, s, 0), of_base(base, arm, s)
                means = [f"{first.mean():.1f}", f"{last.mean():.1f}"]
                changes.append([base, name, str(s), *means, plain(last - first)])
    assert printed_rows[: len(changes)] == changes
    effects = []
    for s in (0, 4, 16):
        row = [str(s)]
        for base in BASES:
            row.append(plain(of_base(base, "up_dapo", s) - of_base(base, "dapo", s)))
        effects.append(row)
    assert printed_rows[-len(effects) :] == effects


def test_both_measures_in_one_number(runs):
    """Best@32 plus Avg@32 at the rate at which DAPO trades them by its decoding, by
    independent code.
    """
    top, t_1 = "test/top_p_0.7", "test/t_1"
    moved = {}
    for m in ("best", "avg"):
        at_t_1 = per_seed(runs, "dapo", 16, m, where=t_1)
        at_top = per_seed(runs, "dapo", 16, m, where=top)
        moved[m] = np.mean(at_t_1 - at_top)
    rate = -moved["best"] / moved["avg"]

    def difference(s, m, where):
        """Return UP-DAPO's metric minus DAPO's, for each seed."""
        of_up = per_seed(runs, "up_dapo", s, m, where=where)
        return of_up - per_seed(runs, "dapo", s, m, where=where)

    expected = []
    for s in (0, 4, 16):
        row = [str(s)]
        for where in (top, t_1):
            best, avg = difference(s, "best", where), difference(s, "avg", where)
            row.append(plain(best + rate * avg))
        expected.append(row)
    assert rows("Both measures in one number") == expected


def test_how_each_effect_stands_is_what_the_report_says():
    """For the ledger of claims: the words of report.md, in the common vocabulary."""
    report = (RESULTS / "report.md").read_text(encoding="utf-8")
    told = {}  # claim -> (the interval that is shown, the word)
    for line in report.partition("### Survival")[0].splitlines():
        if re.match(r"\| (Avg|Best|entropy)", line):
            metric, other, group, _, shown, _, word, *_ = line.strip("| ").split(" | ")
            if other != "cispo":
                name = metric.partition("@")[0].lower()
                told[f"{name}_{other}_{group}"] = (shown, word)
    meant = {
        "gains": "reproduced",
        "higher": "reproduced",
        "no difference": "excluded",
        "not decided": "undecided",
    }
    found = standing.of_plan(plan.load("stale"))
    assert len(found) == 18
    assert {key.removeprefix("stale/") for key in found} == set(told)
    for key, s in found.items():
        shown, word = told[key.removeprefix("stale/")]
        assert s["shown"].startswith(f"{shown}: ") and s["verdict"] == meant[word], key
        limit = ""
        if word == "no difference":
            high = shown.partition(", ")[2].partition("]")[0]
            limit = f"excluded above {high}"
        assert s["limit"] == limit
        assert (s["seeds"], s["of"]) == (17, 17)
        assert s["verdict"] != "undecided" or s["needed"] > 17


def test_the_answer_stays_short():
    words = re.sub(r"!\[.*|\]\([^)]*\)|[|*]", " ", answer.text()).split()
    assert sum(bool(re.search("[A-Za-z]", w)) for w in words) <= 130


def test_a_page_says_where_a_command_is_that_it_names():
    """A reader typed the command of a page whose program had been deleted."""
    said = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    gone = set()
    for page in (ROOT / "repro/mini").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for module, commit in re.findall(
            r"python -m (repro[\w.]*)[^`]*`( of commit \w+)?", text
        ):
            path = ROOT / module.replace(".", "/")
            is_here = (
                path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            )
            if not is_here and not commit:
                gone.add(module.split(".")[2])
    assert gone == {"round2", "stale", "controls", "study"}
    for folder in gone - {"study"}:
        assert f"repro.mini.{folder}" in said
