# SPDX-License-Identifier: Apache-2.0
"""The report of the experiment on UP's controls, computed again from its records by
code that shares nothing with the registered rule.
"""

import json
import re
from collections import defaultdict

import numpy as np
import pytest
from scipy import stats

from repro.mini.experiment import plan, standing

RESULTS = plan.MINI / "controls" / "results"
DECODINGS = ["top_p_0.7", "top_p_0.75", "top_p_0.8", "top_p_0.9", "t_1"]
SEEDS = range(5100, 5117)
FIRST_LOOK = 8
WIDER = {0.5: "dapo_clip_0_5", 1.0: "dapo_clip_1", 3.0: "dapo_clip_3"}


def arm(settings):
    if settings["entropy_bonus"]:
        return "dapo_bonus"
    return WIDER.get(settings["hp"].get("eps_high"), settings["objective"])


def group(settings):
    if settings["task"] == "chain":
        return "chain_s16"
    return f"s{settings['staleness']}"


@pytest.fixture(scope="module")
def runs():
    """Return {(arm, group): {base: {seed: record}}} of the experiment proper."""
    found = defaultdict(lambda: defaultdict(dict))
    with open(RESULTS / "runs.jsonl", encoding="utf-8") as lines:
        for r in map(json.loads, lines):
            s = r["settings"]
            if s["seed"] in SEEDS:
                assert r["status"] == "done"
                found[arm(s), group(s)][s["base"]][s["seed"]] = r
    return found


@pytest.fixture(scope="module")
def rows():
    """Return {section: rows of cells} of the report's tables."""
    found, title = defaultdict(list), ""
    for line in (RESULTS / "report.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            title = line.removeprefix("### ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 7 and cells[0] != "metric":
            found[title].append(cells)
    return found


def upper_hull(points):
    """Return the vertices of the upper convex hull of points (x, y), from left to
    right.
    """
    hull = []
    for x, y in sorted(map(tuple, points)):
        while len(hull) > 1:
            (x1, y1), (x2, y2) = hull[-2:]
            if (x2 - x1) * (y - y1) < (y2 - y1) * (x - x1):
                break
            hull.pop()
        hull.append((x, y))
    return np.array(hull).T


def best_at(points, level):
    """Return the highest Best@32 of a mixture of points whose Avg@32 is at least the
    level; NaN if none has it.
    """
    x, y = upper_hull(points)
    if level > x[-1]:
        return np.nan
    return max(np.interp(level, x, y), y[x >= level].max())


def points(records):
    """Return Avg@32 and Best@32 of records, in points, [seeds, steps and decodings, 2]."""
    shares = []
    for record in records:
        of_run = []
        for decoding in DECODINGS:
            evals = record["evals"][f"test/{decoding}"]
            for t in range(len(evals["avg"])):
                of_run.append([evals["avg"][t], evals["best"][t]])
        shares.append(of_run)
    return 100 * np.array(shares)


def equal_avg(first, other, decoding):
    """Return the jackknife's pseudo-values of the distance of two arms on one base."""
    at_end = (
        [100 * r["evals"][f"test/{decoding}"]["avg"][-1] for r in first],
        [100 * r["evals"][f"test/{decoding}"]["avg"][-1] for r in other],
    )
    ours, theirs = points(first), points(other)

    def distance(kept):
        level = (np.mean(at_end[0], where=kept) + np.mean(at_end[1], where=kept)) / 2
        return best_at(ours[kept].mean(0), level) - best_at(theirs[kept].mean(0), level)

    n = len(first)
    whole = distance(np.ones(n, bool))
    return [n * whole - (n - 1) * distance(np.arange(n) != k) for k in range(n)]


def number(record, metric):
    """Return one number of one run, in the units of the report."""
    name, _, decoding = metric.partition("/")
    if name in ("avg", "best"):
        return 100 * record["evals"][f"test/{decoding}"][name][-1]
    column = np.array(record["steps"]["entropy" if name == "entropy" else "valid"])
    late = column[-(len(column) // 5) :].mean()
    return late if name == "entropy" else 100 * (1 - late)


def per_seed(runs, metric, first, other, where, seeds):
    """Return the effect of each seed, as the mean over the bases."""
    by_base = []
    for base, of_first in runs[first, where].items():
        mine = [of_first[k] for k in seeds]
        others = [runs[other, where][base][k] for k in seeds]
        if metric.startswith("equal_avg/"):
            by_base.append(equal_avg(mine, others, metric.partition("/")[2]))
        else:
            pairs = zip(mine, others, strict=True)
            by_base.append([number(a, metric) - number(b, metric) for a, b in pairs])
    return np.mean(by_base, axis=0)


def interval(x, level):
    found = stats.ttest_1samp(x, 0).confidence_interval(1 - level)
    return found.low, found.high


def test_every_interval_of_the_report_is_computed_again(runs, rows):
    """Mean and interval of each printed effect follow from runs.jsonl, by code of this
    file alone, to half a unit of the last digit.
    """
    compared = 0
    for title, of_section in rows.items():
        first = "dapo" if title.startswith("DAPO minus") else "up_dapo"
        for metric, other, where, n, shown, _, _ in of_section:
            if shown in ("not finished", "out of reach"):
                continue
            assert int(n) in (FIRST_LOOK, len(SEEDS))
            m = len(of_section)
            x = per_seed(runs, metric, first, other, where, SEEDS[:FIRST_LOOK])
            low, high = interval(x, 0.01 / m)
            if int(n) == len(SEEDS):
                x = per_seed(runs, metric, first, other, where, SEEDS)
                late = interval(x, 0.04 / m)
                meet = max(low, late[0]), min(high, late[1])
                low, high = meet if meet[0] < meet[1] else late
            printed = [float(v) for v in re.findall(r"[-+]\d+\.\d+", shown)]
            digit = 0.001 if metric == "entropy" else 0.1
            assert np.allclose(printed, [x.mean(), low, high], atol=0.501 * digit), (
                f"{title}: {metric} minus {other}, {where}: {shown}, "
                f"and {x.mean():.3f} [{low:.3f}, {high:.3f}]"
            )
            compared += 1
    assert compared >= 110


def test_the_ledger_has_the_effects_of_the_report(rows):
    """Each registered effect at equal Avg@32 that has a margin, in the words of claims."""
    found = standing.of_plan(plan.load("controls"))
    primary = [r for t, of_t in rows.items() if "equal Avg@32: UP" in t for r in of_t]
    assert len(primary) == 12 and len(found) == 20
    for metric, other, where, n, shown, _, word in primary:
        s = found[f"controls/{metric.partition('/')[2]}_{other}_{where}"]
        assert s["shown"].startswith(f"{shown} points: ") and s["seeds"] == int(n)
        assert s["word"] == word and s["decides"]
        high = float(shown.partition(", ")[2].strip("]"))
        margin = 2 if metric.endswith("t_1") else 4
        if word.startswith("gains"):
            assert s["verdict"] == "reproduced"
        elif word.startswith("loses"):
            assert s["verdict"] == "contradicted" and s["refuted"]
        elif high < margin:
            assert s["verdict"] == "excluded"
            assert s["limit"] == f"excluded above {high:+.1f}"
        else:
            assert s["verdict"] == "undecided"
