# SPDX-License-Identifier: Apache-2.0
"""Experiments with families of intervals: which runs come next, how a rate is chosen, what
is said where the truth is known, and that nothing ran before it was registered.
"""

import hashlib
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from repro.mini import tasks
from repro.mini.experiment import (
    answer,
    command,
    effects,
    page,
    plan,
    power,
    questions,
    records,
    registration,
    search,
)
from repro.mini.train.settings import Settings
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
P = plan.load("controls")
STALE = plan.load("stale")


# ---- equal Avg@32 --------------------------------------------------------------------
def test_the_frontier_is_the_best_mixture():
    """Against a search over all mixtures of two points."""
    points = np.random.default_rng(0).normal(size=(7, 2))
    shares = np.linspace(0, 1, 2001)[:, None, None, None]
    mixtures = (shares * points[:, None] + (1 - shares) * points[None, :]).reshape(
        -1, 2
    )
    for a in np.linspace(points[:, 0].min() - 1, points[:, 0].max() - 1e-3, 17):
        expected = mixtures[mixtures[:, 0] >= a, 1].max()
        assert effects.frontier(points, a) == pytest.approx(expected, abs=5e-3)
    assert np.isnan(effects.frontier(points, points[:, 0].max() + 1e-9))


def test_pseudo_values_of_a_mean_are_the_numbers():
    x = np.random.default_rng(1).normal(size=9)
    assert effects.jackknife(lambda seeds: x[seeds].mean(), 9) == pytest.approx(x)


# Of DAPO 16 rollouts stale, about: Avg@32 and Best@32 by top-p, and a line of steps
# towards it.
DECODED = np.array(
    [[29.3, 58.6], [28.8, 62.8], [28.4, 67.5], [27.1, 74.2], [24.5, 77.4]]
)
BEFORE = [
    np.array([-5.0, 5.0]),
    np.array([-3.0, 3.5]),
    np.array([-1.5, 1.5]),
    np.array([0.0, 0.0]),
]
TRUE = np.stack([DECODED + shift for shift in BEFORE])


def simulated(rng, true: np.ndarray, seeds: int) -> np.ndarray:
    """Return curves [seeds, steps, decodings, 2]: each seed is better or worse, and
    keeps more or less entropy.
    """
    better = rng.normal(0, 1.0, (seeds, 1, 1))
    entropy = rng.normal(0, 1.0, (seeds, 1, 1))
    drift = rng.normal(0, 0.5, (seeds, len(true), 1))
    found = np.repeat(true[None], seeds, 0)
    found[..., 0] += (
        better - 0.4 * entropy + drift + rng.normal(0, 0.25, found.shape[:3])
    )
    found[..., 1] += (
        better + 1.2 * entropy + drift + rng.normal(0, 1.0, found.shape[:3])
    )
    return found


def covered(
    gain: list[float], level: int, seeds: int, repetitions: int
) -> tuple[float, float]:
    """Return how often a plain 95 % interval holds the true difference, and the mean
    error; with two bases.

    The gain is one number a decoding. The first arm also stands at another place on the
    plane.
    """
    rng, hits, errors = np.random.default_rng(seeds), [], []
    moved = TRUE + np.stack([np.full(5, 0.3), gain], 1)
    truth = effects.at_equal_avg(moved[None], TRUE[None], level)
    for _ in range(repetitions):
        columns = []
        for _ in range(2):
            first, other = simulated(rng, moved, seeds), simulated(rng, TRUE, seeds)
            found = effects.jackknife(
                lambda k: effects.at_equal_avg(first[k], other[k], level),  # noqa: B023
                seeds,
            )
            columns.append(found)
        D = np.stack(columns, 1).mean(1)
        low, high = effects.interval(D, 0.05)
        hits.append(low <= truth <= high)
        errors.append(D.mean() - truth)
    return float(np.mean(hits)), float(np.nanmean(errors))


@pytest.mark.parametrize("seeds", [8, 17])
@pytest.mark.parametrize("level", [4, 3])
@pytest.mark.parametrize("gain", [[0, 0, 0, 0, 0], [0, 0.5, 1, 2, 3], [5, 4, 3, 2, 1]])
def test_intervals_at_equal_avg_hold_the_truth(gain, level, seeds):
    """At both primary levels (T = 1, top-p 0.9), with and without an effect, at both
    looks.
    """
    rate, error = covered(gain, level, seeds, 300)
    assert 0.9 <= rate <= 0.99
    assert abs(error) < 0.35


# ---- the plan of the controls, on simulated records ----------------------------------
CURVES = {  # added to the points of DAPO's curves, by arm: (Avg@32, Best@32)
    "equal": {},
    "more": {"up_dapo": (0.0, 6.0)},
    "bonus": {"up_dapo": (0.0, 6.0), "dapo_bonus": (0.0, 6.0)},
    "less": {"up_dapo": (0.0, -6.0)},
    "beyond": {"dapo_bonus": (-12.0, 6.0)},
}


def fake(s: Settings, world: str) -> questions.RunRecord:
    """Return a record of a run: the arm's true curve, with a seed's luck. Of the
    choices, 1e-4 and 0.01 are the best.
    """
    rng = np.random.default_rng([s.seed, *f"{s.key} {world}".encode()])
    steps = [step for step in range(1, s.steps + 1) if step % s.eval_every == 0]
    arm = arm_of(s)
    loss = abs(np.log10(s.lr / 1e-4))
    if s.entropy_bonus:
        loss += abs(np.log10(s.entropy_bonus / 0.01))
    of_world = np.array(CURVES[world].get(arm, (0.0, 0.0)))
    points = TRUE[-len(steps) :] + of_world - [3 * loss, 0]
    if s.seed not in P.search.seeds:
        points = simulated(rng, points, 1)[0]
    points = points / 100
    evals = {}
    for i, top_p in enumerate(s.decodings):
        evals[f"test/{questions.decoding_name(top_p)}"] = {
            "step": steps,
            "avg": points[:, i, 0].tolist(),
            "best": points[:, i, 1].tolist(),
        }
    columns = {"step": list(range(0, s.steps, 5))}
    n = len(columns["step"])
    columns |= {"entropy": [0.4] * n, "valid": [0.9] * n, "reward": [0.2] * n}
    return {"name": s.key, "status": "done", "settings": vars(s), "provenance": {"seconds": {"all": 60.0}},
            "steps": columns, "evals": evals}  # fmt: skip


def arm_of(s: Settings) -> str:
    bonus = "dapo_bonus" if s.entropy_bonus else s.objective
    return bonus if not s.hp else f"dapo_clip_{s.hp['eps_high']:g}".replace(".", "_")


def play(world: str, stages: int = 99):
    """Run the experiment as the plan asks for it, by fake runs, up to so many stages;
    return the records.
    """
    known: dict[str, questions.RunRecord] = {}
    while (todo := P.todo(known)) and stages:
        known |= {key: fake(s, world) for key, s in todo}
        stages -= 1
    return known


def family_of(p: plan.Plan, known, name: str) -> list[effects.Effect]:
    """Return the effects of one family."""
    by_name = {f.name: found for f, found in p.by_family(p.effects(known))}
    return by_name[name]


@pytest.fixture(scope="module")
def played():
    return {
        world: play(world) for world in ("equal", "more", "bonus", "less", "beyond")
    }


@pytest.mark.parametrize(
    ("world", "word", "of_bonus"),
    [
        ("equal", {"no", "undecided"}, {"nothing more", "undecided"}),
        ("more", {"yes"}, {"more"}),
        ("bonus", {"no", "undecided"}, {"nothing more", "undecided"}),
        ("less", {"no"}, {"less"}),
        ("beyond", {"undecided", "no"}, {"undecided"}),
    ],
)
def test_the_answer_where_the_truth_is_known(played, world, word, of_bonus):
    found = P.effects(played[world])
    assert answer.answer(P, found) in word
    assert answer.against(P, found, "dapo_bonus") in of_bonus
    reached = {e.reached for e in answer.of_control(P, found, "dapo_bonus")}
    assert reached == ({False} if world == "beyond" else {True})


def test_simulated_choices_are_the_best_ones(played):
    for cell in P.cells():
        assert P.choice(cell, played["equal"]) == (
            1e-4,
            0.01 if cell.arm == "dapo_bonus" else None,
        )
    assert len(played["equal"]) == P.expected(played["equal"]) and not P.todo(
        played["equal"]
    )
    assert {run.key for run in P.reachable(played["equal"])} >= set(played["equal"])


def test_every_arm_has_the_same_effort_of_search(played):
    tried: dict[tuple[str, int, str], int] = {}
    for r in played["equal"].values():
        s = Settings(**r["settings"])
        if s.seed in P.search.seeds:
            at = (arm_of(s), s.staleness, s.task)
            tried[at] = tried.get(at, 0) + 1
    assert len(tried) == len(P.cells())
    assert {n for (_, _, task), n in tried.items() if task == "countdown"} == {28}
    assert {n for (_, _, task), n in tried.items() if task == "chain"} == {14}


def test_intervals_at_fixed_decodings_by_independent_code(played):
    """The interval at both looks by scipy, over paired differences of the two bases'
    mean.
    """
    by = {}
    for r in played["more"].values():
        s = Settings(**r["settings"])
        if s.seed in P.main["seeds"] and s.staleness == 16:
            by[arm_of(s), s.base, s.seed] = r
    fixed = family_of(P, played["more"], "fixed")
    assert len(fixed) == 24
    for e in fixed:
        name, decoding, other = e.question.metric, e.question.decoding, e.question.other

        def end(arm, base, seed):
            """Return the metric at the end of a run, in percent."""
            evals = by[arm, base, seed]["evals"]
            return 100 * evals[f"test/{decoding}"][name][-1]  # noqa: B023

        x = []
        for seed in range(5100, 5117):
            walk = end("up_dapo", "walk", seed) - end(other, "walk", seed)
            biased = end("up_dapo", "biased", seed) - end(other, "biased", seed)
            x.append(np.mean([walk, biased]))
        first = stats.ttest_1samp(x[:8], 0).confidence_interval(1 - 0.01 / 24)
        second = stats.ttest_1samp(x, 0).confidence_interval(1 - 0.04 / 24)
        low, high = max(first.low, second.low), min(first.high, second.high)
        assert (e.mean, e.low, e.high) == pytest.approx((np.mean(x), low, high))


def test_nothing_is_said_before_the_first_look(tmp_path):
    for stages, finished in ((0, False), (1, False), (2, False), (3, True)):
        known = play("more", stages)
        words = {e.word for e in family_of(P, known, "equal")}
        assert (words == {"not finished"}) != finished
        found = P.effects(known)
        assert (answer.answer(P, found) == "not finished") != finished
        page.write(P, known, tmp_path)
        text = (tmp_path / "report.md").read_text(encoding="utf-8")
        assert f"{len(known)} of {P.expected(known)} runs are finished" in text
        assert ("**Not finished**" in text) != finished


def test_the_command(tmp_path, capsys):
    """--list counts the runs and their hours, --collect writes a report, and no job is
    refused.
    """
    where = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert command.main(["controls", *where, "--list"]) == 0
    said = capsys.readouterr().out
    assert "0 of 899 runs are finished. Next are 268 runs of the search" in said
    assert 1 < float(said.partition("about ")[2].partition(" hours")[0]) < 4, (
        "power.md says 2.5"
    )
    assert (
        command.main(["controls", *where, "--collect"]) == 0
        and (tmp_path / "results/report.md").exists()
    )
    capsys.readouterr()
    assert (
        command.main(["controls", *where, "--jobs", "0"]) == 2
        and capsys.readouterr().err.count("\n") == 1
    )


def test_a_plan_that_does_not_fit_together_is_one_sentence(tmp_path):
    """An unknown group, an arm outside of its group, a missing table and an unknown key
    are each refused.
    """
    text = (P.folder / "plan.toml").read_text(encoding="utf-8")
    cases = {
        'groups = ["s0", "chain_s16"]': (
            'groups = ["s0", "chain"]',
            "there is no group 'chain'",
        ),
        'others = ["dapo", "dapo_bonus"]': (
            'others = ["dapo_clip_1"]',
            "which is not in the group",
        ),
        "[arms.up_both_sides]": (
            "[arms.up_both]",
            "has no table for the arm 'up_both_sides'",
        ),
        "question =": ("questions =", "questions"),
    }
    for old, (new, says) in cases.items():
        assert old in text
        (tmp_path / "plan.toml").write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(InputError, match=says):
            plan.read(tmp_path / "plan.toml")


# ---- stale data: rates, numbers and intervals -----------------------------------------
def fake_of_stale(s: Settings, gain: float = 0.0) -> questions.RunRecord:
    """Return a record whose numbers depend on seed, method, rate and staleness; the
    best rate is 1e-4.
    """
    g = tasks.generator("fake", s.objective, s.base, s.staleness, s.lr, s.seed)
    n = max(1, s.steps // questions.BIN)
    if s.objective != "up_dapo":
        gain = 0.0
    noise = 0.004 * torch.randn(n, generator=g, dtype=torch.float64).numpy()
    reward = 0.15 + 0.1 * np.arange(n) / n - 0.02 * abs(np.log10(s.lr / 1e-4)) + noise
    right = float(0.2 + gain * s.staleness / 16 + 0.005 * torch.randn(1, generator=g))
    counts = [256 - 100, *[0] * 31, 100]
    evals = {
        questions.WHERE: {
            "step": [0, s.steps],
            "avg": [0.1, right],
            "best": [0.5, 3 * right],
        }
    }
    steps = {
        "step": [questions.BIN * i for i in range(n)],
        "reward": reward.tolist(),
        "valid": [0.9] * n,
    }
    steps["entropy"] = (0.4 + noise).tolist()
    return {"name": "fake", "status": "done", "settings": vars(s), "provenance": {"seconds": {"all": 60.0}},
            "steps": steps, "evals": evals, "counts": {questions.WHERE: counts}}  # fmt: skip


def play_stale(gain=0.0):
    """Run the experiment as the plan asks for it, by fake runs; yield the records after
    every stage.
    """
    known: dict[str, questions.RunRecord] = {}
    while todo := STALE.todo(known):
        known |= {key: fake_of_stale(s, gain) for key, s in todo}
        yield known


def test_rates_at_an_edge_extend_the_grid():
    grid = [3.0, 4.0]
    scores = dict.fromkeys([1.0, 2.0, 3.0, 4.0, 5.0])
    assert search.choose_rate(scores, grid) == (None, grid)
    scores |= {3.0: 0.3, 4.0: 0.2}
    assert search.choose_rate(scores, grid) == (None, [2.0])
    assert search.choose_rate(scores | {2.0: 0.1}, grid) == (3.0, [])
    assert search.choose_rate(scores | {2.0: 0.3}, grid) == (None, [1.0]), (
        "of two that are equal the lower"
    )
    assert search.choose_rate(scores | {2.0: 0.4, 1.0: 0.5}, grid) == (1.0, []), (
        "there is none below"
    )
    assert search.choose_rate({3.0: 0.1, 4.0: 0.2, 5.0: 0.1}, grid) == (4.0, [])


def test_survival():
    def lived(reward, status="done"):
        """Return up to which step a run with these binned rewards is said to have
        lived.
        """
        steps = [questions.BIN * i for i in range(len(reward))]
        return questions.survival(
            {
                "status": status,
                "settings": {"steps": 400},
                "steps": {"step": steps, "reward": reward},
            }
        )

    assert lived([0.1, 0.2, 0.3]) == 400
    assert lived([0.1, 0.4, 0.21, 0.19, 0.4]) == 15
    assert lived([0.1, 0.2, 0.3], "stopped at step 13: no number") == 11


def test_pass_at_k_is_upref_s():
    from upref import metrics

    right = torch.rand(50, 32, generator=torch.Generator().manual_seed(0)) < torch.rand(
        50, 1
    )
    counts = right.sum(1).bincount(minlength=33).tolist()
    for k in (1, 2, 4, 8, 16, 32):
        assert questions.pass_at(k, counts) == pytest.approx(
            metrics.best_at_k(right, k).value
        )


def test_the_whole_experiment_is_asked_for_in_order_and_ends():
    stages = [{r["settings"]["steps"] for r in all_.values()} for all_ in play_stale()]
    assert stages[0] == {200} and stages[-1] == {200, 400}
    *_, known = play_stale()
    assert len(known) == STALE.expected(known) and not STALE.todo(known)
    rates = {STALE.choice(cell, known).rate for cell in STALE.cells()}
    assert rates <= set(STALE.search.rates)
    assert {run.key for run in STALE.reachable(known)} >= set(known)


def end(r: questions.RunRecord, metric: str) -> float:
    """Return one number of a finished run, by code of its own."""
    if metric in ("avg", "best"):
        return 100 * r["evals"]["test/top_p_0.7"][metric][-1]
    if metric.startswith("pass@"):
        counts = np.array(r["counts"]["test/top_p_0.7"])
        none = stats.hypergeom(
            32, np.arange(33), int(metric.removeprefix("pass@"))
        ).pmf(0)
        return 100 * float((counts * (1 - none)).sum() / counts.sum())

    def last(name):
        return float(np.mean(np.array_split(r["steps"][name], 5)[-1]))

    if metric == "survival":
        peak, steps = 0.0, zip(r["steps"]["step"], r["steps"]["reward"], strict=True)
        for step, reward in steps:
            peak = max(peak, reward)
            if reward < peak / 2:
                return step
        return r["settings"]["steps"]
    return last("entropy") if metric == "entropy" else 100 - 100 * last("valid")


@pytest.mark.parametrize("which", ["equal", "gains", "recorded"])
def test_words_and_intervals_by_independent_code(which):
    """Every interval of every family again from the records, by scipy and a way of its
    own.
    """
    if which == "recorded":
        known = records.load(STALE.results)
    else:
        *_, known = play_stale(0.04 if which == "gains" else 0.0)
    by = {}
    for r in known.values():
        s = r["settings"]
        if s["steps"] == 400:
            old = s["old_log_probs"]
            by[s["objective"], s["base"], s["staleness"], s["seed"], old] = r
    assert all(r["status"] == "done" for r in by.values())
    # comparisons in each family: each has its share of the error
    sizes = {
        "dapo": 6,
        "neighbours": 12,
        "entropy": 9,
        "malformed": 9,
        "survival": 9,
        "slope": 6,
        "passes": 18,
    }
    sizes["recomputed"] = 2
    levels = [0, 4, 16]
    found = [(f.name, e) for f, es in STALE.by_family(STALE.effects(known)) for e in es]
    assert len(found) == sum(sizes.values())
    for family, e in found:
        old = "recomputed" if family == "recomputed" else "sampler"
        name, other, group = e.question.name, e.question.other, e.question.group
        staleness = 16 if old == "recomputed" else int(group.removeprefix("s") or -1)

        def minus(seed, level):
            """Return UP's end minus the other's, averaged over the two bases."""
            differences = []
            for base in ("walk", "biased"):
                at = (base, level, seed, old)  # noqa: B023
                of_up, of_other = by["up_dapo", *at], by[other, *at]  # noqa: B023
                differences.append(end(of_up, name) - end(of_other, name))  # noqa: B023
            return np.mean(differences)

        x = []
        for seed in range(3100, 3117):
            if staleness < 0:  # the slope, over 16 levels
                by_level = [minus(seed, level) for level in levels]
                x.append(16 * np.polyfit(levels, by_level, 1)[0])
            else:
                x.append(minus(seed, staleness))
        m = sizes[family]
        if np.ptp(x) == 0:
            assert (e.mean, e.low, e.high) == pytest.approx((x[0], x[0], x[0]))
            continue
        # a look at 8 seeds and one at all 17; what both leave
        first = stats.ttest_1samp(x[:8], 0).confidence_interval(1 - 0.01 / m)
        second = stats.ttest_1samp(x, 0).confidence_interval(1 - 0.04 / m)
        low, high = max(first.low, second.low), min(first.high, second.high)
        if low >= high or np.isnan(low):
            low, high = second.low, second.high
        assert (e.mean, e.low, e.high) == pytest.approx((np.mean(x), low, high))
        if e.low > 0:
            assert e.word.startswith("gains")
        elif e.high < 0:
            assert e.word.startswith("loses")
        else:
            assert e.word in ("no difference", "undecided")
        if which == "gains" and staleness == 16 and family in ("dapo", "neighbours"):
            assert e.word == "gains"


def test_more_seeds_where_the_spread_asks_for_them():
    """Add noise to the ends of the long runs, and find 24 seeds due."""
    *_, known = play_stale()
    for r in known.values():
        if r["settings"]["steps"] == 400:
            settings = map(str, r["settings"].values())
            generator = tasks.generator("wide", *settings)
            noise = float(torch.randn(1, generator=generator))
            r["evals"][questions.WHERE]["avg"][-1] += 0.03 * noise
    assert STALE.seeds_due(known) == 24


def test_power_is_how_often_it_is_found():
    rng = np.random.default_rng(0)
    above_0 = []
    for _ in range(2000):
        low = effects.interval(rng.normal(1.5, 1.6, 17), 0.04 / 18)[0]
        above_0.append(low > 0)
    found = np.mean(above_0)
    assert effects.power(1.5, 1.6, 17, 0.04 / 18) == pytest.approx(found, abs=0.04)


# ---- what is registered --------------------------------------------------------------
def git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True)
    return done.stdout


@pytest.mark.parametrize("folder", ["round2", "stale", "controls"])
def test_the_registration_precedes_every_run(folder):
    """The registered commit has no run, holds the registered files, and is an ancestor
    of the commit of every run.
    """
    registered = registration.load(plan.MINI / folder)
    commit = registered["commit"]
    try:
        git("cat-file", "-e", commit)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no history here")
    own = f"repro/mini/{folder}"
    held = git("ls-tree", "-r", "--name-only", commit, own).decode().split()
    assert held and f"{own}/results/runs.jsonl" not in held
    root = "repro/mini" if folder == "controls" else own
    for name, digest in registered["sha256"].items():
        content = git("show", f"{commit}:{root}/{name}")
        assert hashlib.sha256(content).hexdigest() == digest, name
    known = records.load(plan.MINI / folder / "results")
    made = [r["provenance"]["commit"] for r in known.values() if r["provenance"]]
    for at in {c["id"] for c in made}:
        git("merge-base", "--is-ancestor", commit, at)
    assert not any(c["dirty"] for c in made)


def test_every_record_is_of_a_run_that_a_plan_asks_for():
    asked, there = {}, {}
    for plan_ in map(plan.load, plan.paths()):
        if not plan_.others:
            there[plan_.results] = known = records.load(plan_.results)
            keys = {run.key for run in plan_.reachable(known)}
            asked.setdefault(plan_.results, set()).update(keys)
    for results, known in there.items():
        assert set(known) <= asked[results], results


@pytest.mark.parametrize("p", [P, STALE], ids=["controls", "stale"])
def test_no_seed_was_used_before(p):
    """Not by the search or a pilot, and by no committed run of an earlier experiment."""
    seeds = {*p.search.seeds, *p.main["seeds"]}
    assert len(seeds) == len(p.search.seeds) + len(p.main["seeds"])
    earlier = [folder for folder in plan.ROUNDS.values()]
    earlier += [STALE.results] if p is P else []
    before = [r for folder in earlier for r in records.load(folder).values()]
    for pilot in plan.MINI.glob("*/pilot.jsonl"):
        before += records.read_lines(pilot)
    assert not seeds & {r["settings"]["seed"] for r in before}


def test_seeds_of_the_second_round_are_those_of_its_power_calculation():
    text = (plan.MINI / "round2/power.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ][1:]
    for name, _, _, _, _, seeds, has, *_ in rows:
        assert int(seeds) == len(plan.load(name).main["seeds"])
        assert name == "dose_high" or float(has) >= 0.8, name


@pytest.mark.nightly
def test_power_is_of_the_spread_in_a_finished_experiment(tmp_path, capsys):
    """Of Best@32 at equal Avg@32 and T = 1, from the effects of the controls."""
    found = [e for e in P.effects(records.load(P.results)) if e.reached]
    same = [e.sd**2 for e in found if e.question.name == "equal_avg/t_1"]
    sd = np.mean(same) ** 0.5
    rows = [line.strip("| ").split(" | ") for line in power.text(P, P).splitlines()]
    row = next(r for r in rows if r[:2] == ["equal", "equal_avg/t_1"] and r[3] == "17")
    quantile = stats.t.ppf(1 - 0.04 / 12 / 2, 16)
    assert row[2] == f"{sd:.2f}" and row[4] == f"{quantile * sd / 17**0.5:.2f}"
    draws = np.random.default_rng(0).normal(2.0, sd, (2000, 17))
    hits = [effects.interval(D, 0.04 / 12)[0] > 0 for D in draws]
    assert float(row[6]) == pytest.approx(np.mean(hits), abs=0.03)
    fresh = replace(P, folder=tmp_path, results=tmp_path / "results")
    power.write(fresh, P)
    assert (tmp_path / "runs.sha256").read_text().strip() == P.digest()
    assert command.main(["controls", "--power", "controls"]) == 2
    assert "its power.md stays as it is" in capsys.readouterr().err
    assert command.main(["moe", "--power", "controls"]) == 2
    assert command.main(["stale", "--power", "nothing"]) == 2


def test_a_plan_is_registered_once_and_before_any_run(tmp_path, capsys):
    for name in ("stale", "controls"):
        assert command.main([name, "--register", "another commit"]) == 2
        assert "is registered or has runs already" in capsys.readouterr().err
    (tmp_path / "plan.toml").write_text("question = 'new'")
    fresh = replace(P, folder=tmp_path, results=tmp_path / "results")
    registration.register(fresh, "abc")
    found = registration.load(tmp_path)
    assert found["commit"] == "abc" and "train/halves.py" in found["sha256"]
    assert registration.changed(tmp_path) == []
    (tmp_path / "plan.toml").write_text("question = 'newer'")
    assert registration.changed(tmp_path) == ["plan.toml"]


def test_the_legend_of_the_figure_is_inside_of_it(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(page, "save", lambda figure, path: drawn.append(figure))
    page.drawn_plane(P, records.load(P.results), [], tmp_path)
    (figure,) = drawn
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0
