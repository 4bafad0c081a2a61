# SPDX-License-Identifier: Apache-2.0
"""README's answer to "Does UP help?" and docs/findings.md, computed again from the raw
records by code of its own.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import linprog

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
ANSWER = README.partition("## Does UP help?")[2].partition("\n## ")[0]
TOP_P, T_1 = "test/top_p_0.7", "test/t_1"
OF_CONTROLS, OF_STALE = range(5100, 5117), range(3100, 3117)


def records(folder):
    with open(ROOT / f"repro/mini/{folder}/results/runs.jsonl", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def at_end(run, metric, decoding=TOP_P):
    return 100 * run["evals"][decoding][metric][-1]


def shown(x):
    low, high = stats.ttest_1samp(x, 0).confidence_interval(0.95)
    return f"{np.mean(x):+.1f} [{low:+.1f}, {high:+.1f}]"


# ---- without a lag -------------------------------------------------------------------
@pytest.fixture(scope="module")
def without_lag():
    """Return {(updates on a rollout, learning rate): {objective: {seed: run}}} of the
    runs on fresh data.
    """
    found = defaultdict(lambda: defaultdict(dict))
    for run in records("round2"):
        s = run["settings"]
        plain = (
            s["objective"] in ("dapo", "up_dapo")
            and (s["task"], s["base"], s["steps"]) == ("countdown", "walk", 100)
            and not (s["hp"] or s["dynamic_sampling"] or s["advantages"])
            and s["aggregation"] is None
            and s["seed"] in range(1000, 1017)
        )
        if plain:
            place = s["minibatches"] * s["epochs"], s["lr"]
            found[place][s["objective"]][s["seed"]] = run
    return found


def test_without_a_lag(without_lag):
    """Each row of the table follows from the runs; Avg@32 shows no gain, and Best@32
    one from 16 updates on.
    """
    part = PAGE.partition("<!-- docs.without_lag.text -->")[2]
    part = part.partition("<!-- end -->")[0]
    rows = []
    for line in part.split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].isdigit():
            rows.append(cells)
    assert [row[0] for row in rows] == ["4", "8", "16", "16", "32"]
    for updates, rate, best, avg, seeds in rows:
        runs = without_lag[int(updates), float(rate)]
        both = sorted(runs["up_dapo"].keys() & runs["dapo"].keys())
        assert len(both) == int(seeds)
        for metric, said in (("best", best), ("avg", avg)):
            effect = [
                at_end(runs["up_dapo"][k], metric) - at_end(runs["dapo"][k], metric)
                for k in both
            ]
            assert said.partition(";")[0] == shown(effect), (updates, rate, metric)
            low, high = re.findall(r"[-+][\d.]+", said)[1:3]
            if metric == "avg":
                assert float(low) < 0 < float(high)
            else:
                assert (float(low) > 0) == (int(updates) >= 16)


def test_readme_says_where_fresh_data_show_a_gain(without_lag):
    """Compute the gain at 16 updates a rollout from the runs, and find it in README's
    answer.
    """
    runs = without_lag[16, 3e-4]
    both = runs["up_dapo"].keys() & runs["dapo"].keys()
    gains = [
        at_end(runs["up_dapo"][k], "best") - at_end(runs["dapo"][k], "best")
        for k in both
    ]
    said = f"no gain shown at 8 updates a rollout; at 16, {np.mean(gains):+.1f} ["
    assert said in ANSWER


# ---- DAPO without its upper clip -----------------------------------------------------
def on_stale_data():
    """Return the runs of the experiment proper, 16 rollouts stale, with the sampler's
    lp_old.
    """
    runs = []
    for run in records("stale"):
        s = run["settings"]
        is_stale = s["staleness"] == 16 and s["old_log_probs"] == "sampler"
        if is_stale and s["seed"] in OF_STALE:
            runs.append(run)
    return runs


def test_the_share_of_the_clip_is_about_half():
    """At top-p 0.7, 16 rollouts stale; the share of the gain that DAPO has by dropping
    its upper clip: its interval begins below a half.
    """
    found = defaultdict(dict)
    for run in on_stale_data():
        s = run["settings"]
        found[s["objective"], s["base"]][s["seed"]] = at_end(run, "best")
    seeds = sorted(found["dapo", "walk"])
    assert len(seeds) == 17
    drawn = np.random.default_rng(0).integers(17, size=(10_000, 17))
    means = {}  # of each arm, one for each bootstrap draw of the seeds
    for arm in ("up_dapo", "dapo", "dapo_no_upper_clip"):
        of_bases = [[found[arm, base][k] for k in seeds] for base in ("walk", "biased")]
        best = np.mean(of_bases, 0)
        means[arm] = best[drawn].mean(1)
    beyond = means["up_dapo"] - means["dapo_no_upper_clip"]
    share = 1 - beyond / (means["up_dapo"] - means["dapo"])
    low, high = np.percentile(share, [2.5, 97.5])
    assert 0.35 < low < 0.45 and 0.55 < high < 0.65
    assert "gives about half of that." in ANSWER
    assert "has about half of that gain" in PAGE


def of_controls(arm, eps_high=None):
    """Return the runs of an objective 16 rollouts stale in the experiment proper; of
    DAPO with a wider clip where eps_high is given.
    """
    runs = []
    for run in records("controls"):
        s = run["settings"]
        if (
            s["objective"] == arm
            and s["staleness"] == 16
            and s["task"] == "countdown"
            and s["seed"] in OF_CONTROLS
            and s["hp"].get("eps_high") == eps_high
        ):
            runs.append(run)
    return runs


def largest_norm(runs):
    assert len(runs) == 34
    return max(max(r["steps"]["grad_norm_max"]) for r in runs)


def test_no_run_without_the_clip_explodes():
    """Compute the largest gradient norm of each arm, also with a wider clip and on stale
    data at one rate, and find all of them on the page.
    """
    arms = ("dapo_no_upper_clip", "up_dapo", "dapo")
    of_stale = on_stale_data()
    controls, stale = {}, {}
    for arm in arms:
        runs = [r for r in of_controls(arm) if not r["settings"]["entropy_bonus"]]
        controls[arm] = largest_norm(runs)
        runs = [r for r in of_stale if r["settings"]["objective"] == arm]
        stale[arm] = largest_norm(runs)
    for norms in (controls, stale):
        without, up, dapo = (norms[arm] for arm in arms)
        said = f"{without:.0f} without the upper clip, {up:.0f} for UP-DAPO and {dapo:.0f} for DAPO"
        assert said in PAGE
    for eps_high in (1.0, 0.5):
        norm = largest_norm(of_controls("dapo", eps_high))
        assert f"{norm:.0f} (ε_high = {eps_high:g}, " in PAGE
    assert controls["dapo_no_upper_clip"] < controls["dapo"]
    assert "explodes, and those of the tiny transformers do not." in PAGE


def test_both_numbers_of_the_clip_with_their_rates():
    """At half of UP's rate, registered; at UP's rate from the records on stale data."""
    for arm, rate in (("up_dapo", 1e-4), ("dapo_no_upper_clip", 5.5e-5)):
        assert {r["settings"]["lr"] for r in of_controls(arm)} == {rate}
    ends = defaultdict(dict)
    for run in on_stale_data():
        s = run["settings"]
        assert s["objective"] == "cispo" or s["lr"] == 1e-4
        pair = [at_end(run, metric, T_1) for metric in ("best", "avg")]
        ends[s["objective"], s["seed"]][s["base"]] = pair
    seeds = sorted(k for arm, k in ends if arm == "up_dapo")
    differences = []
    for k in seeds:
        of_up = np.mean([*ends["up_dapo", k].values()], 0)
        without_clip = np.mean([*ends["dapo_no_upper_clip", k].values()], 0)
        differences.append(of_up - without_clip)
    best, avg = np.array(differences).T
    curves = []  # of each run: at two decodings, Best@32 and Avg@32
    for run in of_controls("up_dapo"):
        decodings = ("test/top_p_0.9", T_1)
        curves.append([[at_end(run, m, d) for m in ("best", "avg")] for d in decodings])
    (best_09, avg_09), (best_1, avg_1) = np.mean(curves, 0)
    # how much Best@32 is lost for a point of Avg@32 from one decoding to the other
    slope = -(best_1 - best_09) / (avg_1 - avg_09)
    effects = [best + x * avg / 2 for x in (3.4, slope)]
    assert f"{shown(effects[0])} to {shown(effects[1])} at equal Avg@32" in PAGE


# ---- the second controls -------------------------------------------------------------
NAMES_OF_LOOK = {  # (objective, entropy bonus), at 1e-4 -> its name in the table
    ("dapo_no_upper_clip", 0.0): "DAPO without its upper clip",
    ("dapo", 0.0): "DAPO",
    ("dapo", 0.003): "DAPO with an entropy bonus of 0.003",
    ("dapo", 0.01): "DAPO with an entropy bonus of 0.01",
}


LOOKS = ((8, 0.01), (17, 0.04))  # seeds and level of each
DECODINGS = [
    f"test/{name}"
    for name in ("top_p_0.7", "top_p_0.75", "top_p_0.8", "top_p_0.9", "t_1")
]
MARGINS = {4: 1.0, 3: 1.8}  # of T = 1 and top-p 0.9, by their places in DECODINGS


def in_points(x):
    """Return a number as the page has it, which prints no -0.0."""
    return f"{round(x, 1) + 0.0:+.1f}"


def both_looks(of_looks, family):
    """Return the ends of what Student's intervals of both looks have in common, each at
    its level over the effects of a family.

    Args:
        of_looks: of the first and of the final look, a number for each of its seeds.
        family: how many effects it has.
    """
    ends = [
        stats.ttest_1samp(D, 0).confidence_interval(1 - level / family)
        for D, (_, level) in zip(of_looks, LOOKS, strict=True)
    ]
    return max(low for low, _ in ends), min(high for _, high in ends)


@pytest.mark.parametrize(("staleness", "arms"), [(16, 4), (0, 2)])
def test_the_final_look_at_the_fixed_decoding(staleness, arms):
    """Four numbers of each arm are in the family."""
    ends = defaultdict(dict)
    for run in records("controls2"):
        s = run["settings"]
        if (s["staleness"], s["lr"]) == (staleness, 1e-4):
            arm = s["objective"], s["entropy_bonus"]
            pair = [at_end(run, metric) for metric in ("best", "avg")]
            ends[arm][s["seed"], s["base"]] = pair
    compared = [arm for arm in NAMES_OF_LOOK if arm in ends]
    assert len(compared) == arms
    for arm in compared:
        name = NAMES_OF_LOOK[arm]
        assert len(ends[arm]) == 34
        of_seeds = []
        for seed in range(7100, 7117):
            bases = [b for k, b in ends[arm] if k == seed]
            minus = [
                np.subtract(ends["up_dapo", 0.0][seed, b], ends[arm][seed, b])
                for b in bases
            ]
            of_seeds.append(np.mean(minus, 0))
        words = []
        for x in np.transpose(of_seeds):
            low, high = both_looks([x[:n] for n, _ in LOOKS], 4 * arms)
            words.append(f"{in_points(x.mean())} [{in_points(low)}, {in_points(high)}]")
        best, avg = words
        assert re.search(
            rf"\| {re.escape(name)} \| {re.escape(best)}, [a-z0-9 ]+ \| {re.escape(avg)}, ",
            PAGE,
        )


def highest(points, avg):
    """Return the highest Best@32 of a mixture of points with this Avg@32 or more.

    Args:
        points: (Avg@32, Best@32), [..., 2].
        avg: the level.
    """
    averages, bests = points.reshape(-1, 2).T
    found = linprog(
        -bests,
        A_ub=[-averages],
        b_ub=[-avg],
        A_eq=[np.ones(len(bests))],
        b_eq=[1],
    )
    assert found.status == 0
    return -found.fun


def distance(up, other, at):
    """Return UP's Best@32 minus the other's at one Avg@32: half-way between what both
    have by a decoding in the end.

    Args:
        up: curves [seeds, steps, decodings, 2].
        other: likewise.
        at: the decoding, its place in DECODINGS.
    """
    up, other = up.mean(0), other.mean(0)
    avg = (up[-1, at, 0] + other[-1, at, 0]) / 2
    return highest(up, avg) - highest(other, avg)


def jackknifed(up, other, at):
    """Return the jackknife's value of the distance for each seed."""
    n = len(up)
    without = [
        distance(np.delete(up, k, 0), np.delete(other, k, 0), at) for k in range(n)
    ]
    return n * distance(up, other, at) - (n - 1) * np.array(without)


def word(low, high, margin):
    """Return the word of an interval that the page defines."""
    within = -margin < low and high < margin
    if low < 0 < high:
        return "no difference" if within else "undecided"
    size = f" by less than {margin:g}" if within else ""
    return ("gains" if low > 0 else "loses") + size


def over_bases(curves, other, n, at):
    """Return UP-DAPO minus another arm at equal Avg@32 for each of n seeds, as a mean
    over the bases.
    """
    seeds = range(7100, 7100 + n)
    of_bases = []
    for base in ("walk", "biased"):
        up, others = (
            np.stack([curves[arm, base, k] for k in seeds])
            for arm in ("up_dapo", other)
        )
        of_bases.append(jackknifed(up, others, at))
    return np.mean(of_bases, 0)


@pytest.mark.parametrize("staleness", [16, 0])
def test_the_final_look_at_equal_average(staleness):
    """The rows and the registered answer are those of code that shares nothing with the
    engine: mixtures of points by linear programming.
    """
    curves = {}
    for run in records("controls2"):
        s = run["settings"]
        if (s["staleness"], s["lr"], s["entropy_bonus"]) == (staleness, 1e-4, 0.0):
            columns = [[run["evals"][d][m] for m in ("avg", "best")] for d in DECODINGS]
            points = 100 * np.transpose(columns, (2, 0, 1))
            curves[s["objective"], s["base"], s["seed"]] = points
    stale, _, fresh = PAGE.partition("On fresh data, with 16 updates a rollout")
    gives_more = []
    for other in ("dapo_no_upper_clip", "dapo"):
        cells = []
        words = []
        for at, margin in MARGINS.items():
            of_looks = [over_bases(curves, other, n, at) for n, _ in LOOKS]
            low, high = both_looks(of_looks, 4)
            words.append(word(low, high, margin))
            mean = of_looks[-1].mean()
            shown = f"{in_points(mean)} [{in_points(low)}, {in_points(high)}]"
            cells.append(f"{shown}, {words[-1]}")
        row = f"| UP-DAPO | {NAMES_OF_LOOK[other, 0.0]} | {cells[0]} | {cells[1]} | "
        assert row in (stale if staleness else fresh)
        gains, loses = (any(w.startswith(x) for w in words) for x in ("gains", "loses"))
        gives_more.append(gains and not loses)
    if staleness:
        is_yes = "**UP-DAPO gives more than each control**" in stale
        assert is_yes == all(gives_more)


def test_readme_has_the_effects_of_the_second_controls():
    """Beyond no upper clip at UP's rate at both levels, and on fresh data."""
    cell = r"([^,|]+, [^,|]+), [a-z0-9 .]+ \| "
    row = rf"\| UP-DAPO \| DAPO without its upper clip \| {cell}{cell}"
    at_t_1, at_top_p = re.search(row, PAGE).groups()
    assert (
        f"{at_t_1} [at UP's](docs/findings.md#the-second-controls) (top-p 0.9: {at_top_p})"
        in ANSWER
    )
    fresh = PAGE.partition("On fresh data at the two fixed decodings")[2]
    best = re.search(r"\| DAPO \| ([^,|]+, [^,|]+), ", fresh)
    assert f", {best[1]} at [1e-4](docs/findings.md#the-second-controls)" in ANSWER


# ---- a language model ----------------------------------------------------------------
def test_the_language_models_averages_follow_from_its_records():
    """UP-DAPO minus DAPO, Avg@32 at T = 1, from the runs themselves."""
    at_end_of = {}
    for run in records("language_model"):
        s = run["settings"]
        if s["staleness"] == 4:
            name = s["objective"], bool(s["entropy_bonus"])
            score = 100 * run["evals"]["test/t_1"]["avg"][-1]
            at_end_of.setdefault(name, {})[s["seed"]] = score
    assert {len(of_seeds) for of_seeds in at_end_of.values()} == {6}
    up, dapo = at_end_of["up_dapo", False], at_end_of["dapo", False]
    of_seeds = [up[seed] - dapo[seed] for seed in up]
    row = re.search(r"\| DAPO \| (\S+) \[(\S+), (\S+)\], undecided", PAGE)
    assert row[1] == f"{np.mean(of_seeds):+.1f}"
    # t of 5 degrees of freedom at 0.04 / 12, of a family of twelve
    half = stats.t.ppf(1 - 0.04 / 24, 5) * np.std(of_seeds, ddof=1) / 6**0.5
    assert row[2] == f"{np.mean(of_seeds) - half:+.1f}"
    assert "six seeds, unsearched rate): [undecided]" in ANSWER


# ---- the bonus -----------------------------------------------------------------------
def test_the_bonus_is_below_dapo_at_the_length_of_the_search_too():
    """The sentence with the four scores at step 200 and at the end is on the page."""
    decodings = [
        f"test/{d}"
        for d in ("top_p_0.7", "top_p_0.75", "top_p_0.8", "top_p_0.9", "t_1")
    ]
    runs = of_controls("dapo")

    def score(has_bonus, at):
        """Return the largest mean of Best@32 + 3.4 Avg@32, in points, of the arms with
        or without a bonus.
        """
        mine = [r for r in runs if bool(r["settings"]["entropy_bonus"]) == has_bonus]
        sums = [
            [
                100 * (r["evals"][d]["best"][at] + 3.4 * r["evals"][d]["avg"][at])
                for d in decodings
            ]
            for r in mine
        ]
        return np.mean(sums, 0).max()

    early, late = -3, -1  # of the evaluations at 100, 200, 300 and 400
    said = (
        f"{score(True, early):.1f} with the bonus and {score(False, early):.1f} for DAPO at "
        f"step 200, {score(True, late):.1f} and {score(False, late):.1f} at the end"
    )
    assert said in PAGE


def test_the_bonus_was_searched_and_the_experiment_is_finished():
    pages = [
        "README.md",
        "docs/findings.md",
        "docs/verdicts.md",
        "docs/architecture.md",
    ]
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "tuned entropy bonus" not in text and "tuned bonus" not in text, page
    verdicts = (ROOT / "docs/verdicts.md").read_text(encoding="utf-8")
    assert "not finished" not in verdicts.partition("## The first round")[0]
