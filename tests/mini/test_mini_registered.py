# SPDX-License-Identifier: Apache-2.0
"""The engine of registered experiments: it repeats that on stale data, and its rule
holds what it promises.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from repro.mini.controls import power as controls_power
from repro.mini.registered import command, plan, report, rule
from repro.mini.stale import design, rule as stale_rule
from repro.mini.study import registration, results
from repro.mini.train.settings import Settings
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
CONTROLS = ROOT / "repro" / "mini" / "controls"
STALE = design.load()
P = plan.load(CONTROLS / "plan.toml")


# ---- the plan of the experiment on stale data, for this engine -----------------------
def stale_plan() -> plan.Plan:
    """The registered design as a plan: the same cells, runs, stages and families."""
    d, (first, *others) = STALE, STALE.arms
    groups = [
        {
            "name": f"s{s}",
            "arms": d.arms,
            "bases": d.bases,
            "settings": {"staleness": s, "old_log_probs": "sampler"},
        }
        for s in d.staleness
    ]
    again = {"staleness": 16, "old_log_probs": "recomputed"}
    groups.append(
        {
            "name": "recomputed",
            "arms": d.recomputed["arms"],
            "bases": d.bases,
            "settings": again,
        }
    )
    levels = [f"s{s}" for s in sorted(d.staleness)]
    families = [
        {
            "name": "dapo",
            "metrics": ["avg", "best"],
            "others": ["dapo"],
            "groups": levels,
            "primary": True,
        },
        {
            "name": "neighbours",
            "metrics": ["avg", "best"],
            "others": others[1:],
            "groups": levels,
            "primary": True,
        },
        *(
            {"name": m, "metrics": [m], "others": others, "groups": levels}
            for m in stale_rule.SECONDARY
        ),
        {
            "name": "slope",
            "metrics": ["avg", "best"],
            "others": others,
            "groups": levels,
            "slope": True,
        },
        {
            "name": "passes",
            "metrics": [f"pass@{k}" for k in stale_rule.PASSES],
            "others": others,
            "groups": ["s16"],
        },
        {
            "name": "recomputed",
            "metrics": ["avg", "best"],
            "others": ["dapo"],
            "groups": ["recomputed"],
        },
    ]
    for family in families:
        family["first"] = first
        if family["name"] in ("dapo", "neighbours", "recomputed"):
            family["margins"] = d.interest
    stages = [
        {"kind": "search", "groups": ["s16"]},
        {"kind": "search", "groups": ["s0"]},
        {"kind": "main", "groups": ["s16", "s0"], "seeds": 8},
        {"kind": "search", "groups": ["s4", "recomputed"]},
        {"kind": "main", "groups": ["s4", "recomputed"], "seeds": 8},
        {"kind": "main"},
    ]
    return plan.Plan(
        folder=design.HERE,
        question=d.question,
        command="python -m repro.mini.stale",
        settings=d.settings,
        arms={arm: {"objective": arm} for arm in d.arms},
        groups=groups,
        search=d.search
        | {"rates": d.rates, "more_rates": d.more_rates, "score": "reward"},
        main=d.main,
        stopping=d.stopping,
        stages=stages,
        families=families,
    )


def cell_of(cell: stale_rule.Cell) -> plan.Cell:
    return plan.Cell(
        cell.arm, "recomputed" if cell.old == "recomputed" else f"s{cell.staleness}"
    )


@pytest.fixture(scope="module")
def stale_records():
    return results.load(design.RESULTS)


def test_the_stale_design_has_the_same_cells_runs_and_rates(stale_records):
    p = stale_plan()
    assert p.cells() == [cell_of(c) for c in STALE.cells()]
    assert (
        p.digest()
        == (design.HERE / "runs.sha256").read_text().strip()
        == STALE.digest()
    )
    for c in STALE.cells():
        assert p.choice(cell_of(c), stale_records) == (
            STALE.rate(c, stale_records),
            None,
        )
        scores = {
            choice.rate: score
            for choice, score in p.scores(cell_of(c), stale_records).items()
        }
        assert scores == STALE.scores(c, stale_records)
    mine = p.main_runs(p.cells(), p.main["seeds"], stale_records)
    theirs = STALE.main_runs(STALE.cells(), STALE.main["seeds"], stale_records)
    assert [r.key for r in mine.values()] == [r.key for r in theirs.values()]
    assert (
        p.expected(stale_records) == STALE.expected(stale_records) == len(stale_records)
    )


def test_the_stale_design_asks_for_the_same_runs_next(stale_records):
    p = stale_plan()
    searches = {k: r for k, r in stale_records.items() if r["settings"]["steps"] == 200}
    few = {
        k: r
        for k, r in stale_records.items()
        if r["settings"]["steps"] == 200 or r["settings"]["seed"] < 3108
    }
    for records in (
        {},
        dict(list(searches.items())[:100]),
        searches,
        few,
        stale_records,
    ):
        assert [run.key for run in p.todo(records)] == [
            run.key for run in STALE.todo(records)
        ]


def test_the_stale_records_give_the_same_effects(stale_records):
    """All 71: mean, both ends, each base, seeds and word."""
    p = stale_plan()
    mine = {
        (e.family, e.metric, e.other, e.group): e
        for e in rule.effects(p, stale_records)
    }
    theirs = stale_rule.effects(STALE, stale_records)
    assert len(mine) == len(theirs) == 71
    for e in theirs:
        group = (
            ""
            if e.staleness is None
            else "recomputed"
            if e.family == "recomputed"
            else f"s{e.staleness}"
        )
        found = mine[e.family, e.metric, e.other, group]
        assert (found.n, found.word) == (e.n, e.word)
        expected = (e.mean, e.low, e.high, e.sd, *e.by_base)
        assert (
            found.mean,
            found.low,
            found.high,
            found.sd,
            *found.by_base,
        ) == pytest.approx(expected, abs=1e-12)


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
        assert rule.frontier(points, a) == pytest.approx(expected, abs=5e-3)
    assert np.isnan(rule.frontier(points, points[:, 0].max() + 1e-9))


def test_pseudo_values_of_a_mean_are_the_numbers():
    x = np.random.default_rng(1).normal(size=9)
    assert rule.jackknife(lambda seeds: x[seeds].mean(), 9) == pytest.approx(x)


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
    """Curves [seeds, steps, decodings, 2]: each seed is better or worse, and keeps more
    or less entropy.
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
    """How often a plain 95 % interval holds the true difference, and the mean error;
    two bases.

    The gain is one number a decoding. The first arm also stands at another place on the
    plane.
    """
    rng, hits, errors = np.random.default_rng(seeds), [], []
    moved = TRUE + np.stack([np.full(5, 0.3), gain], 1)
    truth = rule.at_equal_avg(moved[None], TRUE[None], level)
    for _ in range(repetitions):
        columns = []
        for _ in range(2):
            first, other = simulated(rng, moved, seeds), simulated(rng, TRUE, seeds)
            found = rule.jackknife(
                lambda k: rule.at_equal_avg(first[k], other[k], level),  # noqa: B023
                seeds,
            )
            columns.append(found)
        D = np.stack(columns, 1).mean(1)
        low, high = stale_rule.interval(D, 0.05)
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


def fake(s: Settings, world: str) -> results.Record:
    """A record of a run: the arm's true curve, with a seed's luck. Of the choices, 1e-4
    and 0.01 are the best.
    """
    rng = np.random.default_rng([s.seed, *f"{s.key} {world}".encode()])
    steps = [step for step in range(1, s.steps + 1) if step % s.eval_every == 0]
    arm = arm_of(s)
    loss = abs(np.log10(s.lr / 1e-4)) + (
        abs(np.log10(s.entropy_bonus / 0.01)) if s.entropy_bonus else 0
    )
    true = (
        TRUE[-len(steps) :]
        + np.array(CURVES[world].get(arm, (0.0, 0.0)))
        - [3 * loss, 0]
    )
    points = (true if s.seed in P.search["seeds"] else simulated(rng, true, 1)[0]) / 100
    names = [f"test/{rule.name_of(top_p)}" for top_p in s.decodings]
    evals = {
        name: {
            "step": steps,
            "avg": points[:, i, 0].tolist(),
            "best": points[:, i, 1].tolist(),
        }
        for i, name in enumerate(names)
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
    """The experiment as the plan asks for it, by fake runs, up to so many stages."""
    records: dict[str, results.Record] = {}
    while (todo := P.todo(records)) and stages:
        records |= {key: fake(s, world) for key, s in todo}
        stages -= 1
    return records


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
    found = rule.effects(P, played[world])
    assert rule.answer(found, P) in word
    assert rule.against(found, P, "dapo_bonus") in of_bonus
    reached = {
        e.reached for e in found if e.family == "equal" and e.other == "dapo_bonus"
    }
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
        if s.seed in P.search["seeds"]:
            at = (arm_of(s), s.staleness, s.task)
            tried[at] = tried.get(at, 0) + 1
    assert len(tried) == len(P.cells())
    assert {n for (_, _, task), n in tried.items() if task == "countdown"} == {28}
    assert {n for (_, _, task), n in tried.items() if task == "chain"} == {14}


def test_intervals_at_fixed_decodings_by_independent_code(played):
    by = {
        (arm_of(s), s.base, s.seed): r
        for r in played["more"].values()
        if (s := Settings(**r["settings"])).seed in P.main["seeds"]
        and s.staleness == 16
    }
    fixed = [e for e in rule.effects(P, played["more"]) if e.family == "fixed"]
    assert len(fixed) == 24
    for e in fixed:
        name, decoding = e.metric.split("/")
        end = lambda arm, b, k: (
            100 * by[arm, b, k]["evals"][f"test/{decoding}"][name][-1]  # noqa: B023
        )
        x = [
            np.mean(
                [end("up_dapo", b, k) - end(e.other, b, k) for b in ("walk", "biased")]
            )
            for k in range(5100, 5117)
        ]
        a = stats.ttest_1samp(x[:8], 0).confidence_interval(1 - 0.01 / 24)
        b = stats.ttest_1samp(x, 0).confidence_interval(1 - 0.04 / 24)
        assert (e.mean, e.low, e.high) == pytest.approx(
            (np.mean(x), max(a.low, b.low), min(a.high, b.high))
        )


def test_nothing_is_said_before_the_first_look(tmp_path):
    for stages, finished in ((0, False), (1, False), (2, False), (3, True)):
        records = play("more", stages)
        found = rule.effects(P, records)
        assert (
            {e.word for e in found if e.family == "equal"} == {"not finished"}
        ) != finished
        assert (rule.answer(found, P) == "not finished") != finished
        report.write(P, records, tmp_path)
        text = (tmp_path / "report.md").read_text(encoding="utf-8")
        assert f"{len(records)} of {P.expected(records)} runs are finished" in text
        assert ("**Not finished**" in text) != finished


def test_the_command(tmp_path, capsys):
    where = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert command.main(CONTROLS, [*where, "--list"]) == 0
    said = capsys.readouterr().out
    assert "0 of 899 runs are finished. Next are 268 runs of the search" in said
    assert 1 < float(said.partition("about ")[2].partition(" hours")[0]) < 4, (
        "power.md says 2.5"
    )
    assert (
        command.main(CONTROLS, [*where, "--collect"]) == 0
        and (tmp_path / "results/report.md").exists()
    )
    capsys.readouterr()
    assert (
        command.main(CONTROLS, [*where, "--jobs", "0"]) == 2
        and capsys.readouterr().err.count("\n") == 1
    )


def test_a_plan_that_does_not_fit_together_is_one_sentence(tmp_path):
    text = (CONTROLS / "plan.toml").read_text(encoding="utf-8")
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
            plan.load(tmp_path / "plan.toml")


# ---- what is registered --------------------------------------------------------------
def test_power_cost_and_names_are_those_of_the_plan():
    assert (CONTROLS / "power.md").read_text(encoding="utf-8") == controls_power.text(P)
    assert (CONTROLS / "runs.sha256").read_text().strip() == P.digest(), (
        "a setting of some run has changed"
    )
    assert (
        sum(row[-1] for row in controls_power.cost(P, results.load(design.RESULTS)))
        < controls_power.LIMIT
    )


def test_nothing_registered_has_changed():
    assert registration.load(CONTROLS)["sha256"] == command.digests(CONTROLS)
    with pytest.raises(InputError, match="registered"):
        command.register(P, "another commit")


def test_the_registration_precedes_every_run():
    commit = registration.load(CONTROLS)["commit"]
    git = lambda *words: (
        subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, check=True
        ).stdout
    )
    try:
        git("cat-file", "-e", commit)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no history here")
    held = (
        git("ls-tree", "-r", "--name-only", commit, "repro/mini/controls")
        .decode()
        .split()
    )
    assert (
        "repro/mini/controls/plan.toml" in held
        and "repro/mini/controls/results/runs.jsonl" not in held
    )
    for name in command.digests(CONTROLS):
        assert (
            git("show", f"{commit}:repro/mini/{name}")
            == (ROOT / "repro" / "mini" / name).read_bytes()
        )
    records = results.load(P.results)
    for at in {
        r["provenance"]["commit"]["id"] for r in records.values() if r["provenance"]
    }:
        git("merge-base", "--is-ancestor", commit, at)
    assert not any(
        r["provenance"]["commit"]["dirty"] for r in records.values() if r["provenance"]
    )
    assert set(records) <= {run.key for run in P.reachable(records)}


def test_no_seed_was_used_before():
    """Not by the search, and by no committed run of another experiment."""
    seeds = {*P.search["seeds"], *P.main["seeds"]}
    assert len(seeds) == len(P.search["seeds"]) + len(P.main["seeds"])
    for folder in (results.folder_of(1), results.folder_of(2), design.RESULTS):
        assert not seeds & {
            r["settings"]["seed"] for r in results.load(folder).values()
        }


def test_the_legend_of_the_figure_is_inside_of_it():
    folder = Path(report.__file__).parents[1] / "controls"
    figure = report.plane(
        plan.load(folder / "plan.toml"), results.load(folder / "results")
    )
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0
