# SPDX-License-Identifier: Apache-2.0
"""Stale data: what staleness means in a run, the registered rule, and that nothing ran
before it was registered.
"""

import hashlib
import json
import multiprocessing
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from repro.mini import tasks
from repro.mini.stale import __main__ as command, design, report, rule
from repro.mini.study import registration, results
from repro.mini.train import loop
from repro.mini.train.checkpoint import Run
from repro.mini.train.settings import Settings
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
S = Settings(
    steps=4, prompts=4, responses=4, minibatches=2, warmup=0, train_problems=100, eval_every=0, eval_problems=4,
    eval_samples=2, checkpoint_every=1, staleness=2, old_log_probs="recomputed", lean_eval=True,
)  # fmt: skip
D = design.load()


# ---- a run ---------------------------------------------------------------------------
def test_responses_come_from_the_policy_of_s_rollouts_ago():
    run = Run(S)
    for step in range(6):
        next(run.policy.parameters()).data.fill_(step)
        assert next(run.sampler().parameters()).unique().item() == max(0, step - 2)
    assert len(run.ring) == 3, "no more snapshots than are needed"
    assert Run(replace(S, staleness=0)).sampler.__self__.ring == []


def test_lp_old_is_the_samplers_or_recomputed(tmp_path):
    """With one update a rollout a recomputed ratio is 1, whatever the staleness; the
    sampler's is not.
    """
    for old, exact in (("recomputed", True), ("sampler", False)):
        loop.train(
            replace(S, minibatches=1, old_log_probs=old),
            tmp_path / old,
            say=lambda _: None,
        )
        rows = [
            json.loads(line)
            for line in (tmp_path / old / "steps.jsonl").read_text().splitlines()
        ]
        ratios = [row["ratio_q"] for row in rows]
        assert np.allclose(ratios[0], 1, atol=1e-5), (
            "at the first step the sampler is the policy"
        )
        assert np.allclose(ratios[-1], 1, atol=1e-5) == exact


def test_killed_with_snapshots_in_the_ring(tmp_path):
    """kill -9 in step 3 and in step 4: the run ends as one that nothing happened to, to
    the bit.
    """
    loop.train(S, tmp_path / "whole", say=lambda _: None)
    out = tmp_path / "run"
    for last in ("checkpoints/step-2", "checkpoints/step-3", "done.json"):
        victim = multiprocessing.get_context("fork").Process(
            target=loop.train, args=(S, out)
        )
        victim.start()
        while victim.is_alive() and not (out / last).exists():
            time.sleep(0.002)
        if last == "done.json":
            victim.join()
        victim.kill()
        victim.join()
    for name in (
        "steps.jsonl",
        "evals.jsonl",
        f"checkpoints/step-{S.steps}/model.safetensors",
    ):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (
            name
        )
    fresh = replace(S, staleness=0)
    loop.train(fresh, tmp_path / "fresh", say=lambda _: None)
    assert (tmp_path / "fresh/steps.jsonl").read_bytes() != (
        out / "steps.jsonl"
    ).read_bytes()


def test_settings_say_what_is_wrong_and_old_names_stay():
    for r in results.read_lines(results.folder_of(2) / "runs.jsonl")[:3]:
        assert Settings(**r["settings"]).key == r["name"], (
            "named before there was staleness"
        )
    for bad in ({"staleness": -1}, {"staleness": 1.5}, {"old_log_probs": "none"}):
        with pytest.raises(InputError, match=next(iter(bad))):
            Settings(**bad)


# ---- the rule ------------------------------------------------------------------------
def fake(s: Settings, gain: float = 0.0) -> results.Record:
    """A record whose numbers depend on seed, method, rate and staleness; the best rate
    is 1e-4.
    """
    g = tasks.generator("fake", s.objective, s.base, s.staleness, s.lr, s.seed)
    n = max(1, s.steps // results.BIN)
    if s.objective != "up_dapo":
        gain = 0.0
    noise = 0.004 * torch.randn(n, generator=g, dtype=torch.float64).numpy()
    reward = 0.15 + 0.1 * np.arange(n) / n - 0.02 * abs(np.log10(s.lr / 1e-4)) + noise
    right = float(0.2 + gain * s.staleness / 16 + 0.005 * torch.randn(1, generator=g))
    counts = [256 - 100, *[0] * 31, 100]
    evals = {
        rule.WHERE: {
            "step": [0, s.steps],
            "avg": [0.1, right],
            "best": [0.5, 3 * right],
        }
    }
    steps = {
        "step": [results.BIN * i for i in range(n)],
        "reward": reward.tolist(),
        "valid": [0.9] * n,
    }
    steps["entropy"] = (0.4 + noise).tolist()
    return {"name": "fake", "status": "done", "settings": vars(s), "provenance": {"seconds": {"all": 60.0}},
            "steps": steps, "evals": evals, "counts": {rule.WHERE: counts}}  # fmt: skip


def play(gain=0.0, most=10_000):
    """The experiment as the design asks for it, by fake runs; records after every
    stage.
    """
    records: dict[str, results.Record] = {}
    while (todo := D.todo(records)) and len(records) < most:
        records |= {key: fake(s, gain) for key, s in todo}
        yield records


def test_rates_at_an_edge_extend_the_grid():
    grid = [3.0, 4.0]
    scores = dict.fromkeys([1.0, 2.0, 3.0, 4.0, 5.0])
    assert rule.choose(scores, grid) == (None, grid)
    scores |= {3.0: 0.3, 4.0: 0.2}
    assert rule.choose(scores, grid) == (None, [2.0])
    assert rule.choose(scores | {2.0: 0.1}, grid) == (3.0, [])
    assert rule.choose(scores | {2.0: 0.3}, grid) == (None, [1.0]), (
        "of two that are equal the lower"
    )
    assert rule.choose(scores | {2.0: 0.4, 1.0: 0.5}, grid) == (1.0, []), (
        "there is none below"
    )
    assert rule.choose({3.0: 0.1, 4.0: 0.2, 5.0: 0.1}, grid) == (4.0, [])


def test_survival():
    def lived(reward, status="done"):
        steps = [results.BIN * i for i in range(len(reward))]
        return rule.survival(
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
    for k in rule.PASSES:
        assert rule.pass_at(k, counts) == pytest.approx(
            metrics.best_at_k(right, k).value
        )


def test_the_whole_experiment_is_asked_for_in_order_and_ends():
    stages = [{r["settings"]["steps"] for r in records.values()} for records in play()]
    assert stages[0] == {200} and stages[-1] == {200, 400}
    *_, records = play()
    assert len(records) == D.expected(records) and not D.todo(records)
    assert {D.rate(c, records) for c in D.cells()} <= set(D.rates)
    assert {s.key for s in D.reachable(records)} >= set(records)


def end(r: results.Record, metric: str) -> float:
    """One number of a finished run, by code of its own."""
    if metric in ("avg", "best"):
        return 100 * r["evals"]["test/top_p_0.7"][metric][-1]
    if metric.startswith("pass@"):
        counts = np.array(r["counts"]["test/top_p_0.7"])
        none = stats.hypergeom(
            32, np.arange(33), int(metric.removeprefix("pass@"))
        ).pmf(0)
        return 100 * float((counts * (1 - none)).sum() / counts.sum())
    last = lambda name: float(np.mean(np.array_split(r["steps"][name], 5)[-1]))
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
        records = results.load(design.RESULTS)
    else:
        *_, records = play(0.04 if which == "gains" else 0.0)
    by = {}
    for r in records.values():
        s = r["settings"]
        if s["steps"] == 400:
            by[
                s["objective"], s["base"], s["staleness"], s["seed"], s["old_log_probs"]
            ] = r
    assert all(r["status"] == "done" for r in by.values())
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
    levels, found = [0, 4, 16], rule.effects(D, records)
    assert len(found) == sum(sizes.values())
    for e in found:
        old = "recomputed" if e.family == "recomputed" else "sampler"

        def minus(k, s):
            return np.mean([
                end(by["up_dapo", b, s, k, old], e.metric) - end(by[e.other, b, s, k, old], e.metric)  # noqa: B023
                for b in ("walk", "biased")
            ])  # fmt: skip

        x = []
        for k in range(3100, 3117):
            x.append(
                16 * np.polyfit(levels, [minus(k, s) for s in levels], 1)[0]
                if e.staleness is None
                else minus(k, e.staleness)
            )
        m = sizes[e.family]
        if np.ptp(x) == 0:
            assert (e.mean, e.low, e.high) == pytest.approx((x[0], x[0], x[0]))
            continue
        a = stats.ttest_1samp(x[:8], 0).confidence_interval(1 - 0.01 / m)
        b = stats.ttest_1samp(x, 0).confidence_interval(1 - 0.04 / m)
        low, high = max(a.low, b.low), min(a.high, b.high)
        if low >= high or np.isnan(low):
            low, high = b.low, b.high
        assert (e.mean, e.low, e.high) == pytest.approx((np.mean(x), low, high))
        sure = "gains" if e.low > 0 else "loses" if e.high < 0 else ""
        assert (
            e.word.startswith(sure)
            if sure
            else e.word in ("no difference", "undecided")
        )
        if which == "gains" and e.staleness == 16 and e.family in report.PRIMARY:
            assert e.word == "gains"


def test_nothing_is_said_before_the_first_look(tmp_path):
    for stage, records in enumerate(play()):
        words = {e.word for e in rule.effects(D, records) if e.family in report.PRIMARY}
        finished = [
            k
            for k in D.main["seeds"]
            if any(r["settings"]["seed"] == k for r in records.values())
        ]
        assert (words == {"not finished"}) == (len(finished) < 8)
        if stage not in (0, 2, 3):
            continue
        report.write(D, records, tmp_path)
        text = (tmp_path / "report.md").read_text(encoding="utf-8")
        assert f"{len(records)} of {D.expected(records)} runs are finished" in text
        assert ("not finished" in words) == (
            "Too few seeds are finished" in text or "Nothing is decided yet" in text
        )


def test_more_seeds_where_the_spread_asks_for_them():
    *_, records = play()
    for r in records.values():
        if r["settings"]["steps"] == 400:
            noise = float(
                torch.randn(
                    1,
                    generator=tasks.generator(
                        "wide", *map(str, r["settings"].values())
                    ),
                )
            )
            r["evals"][rule.WHERE]["avg"][-1] += 0.03 * noise
    assert rule.seeds_due(D, records) == 24


def test_power_is_how_often_it_is_found():
    rng = np.random.default_rng(0)
    found = np.mean(
        [rule.interval(rng.normal(1.5, 1.6, 17), 0.04 / 18)[0] > 0 for _ in range(2000)]
    )
    assert rule.power(1.5, 1.6, 17, 0.04 / 18) == pytest.approx(found, abs=0.04)


def test_the_command(tmp_path, capsys):
    """It says what comes next, takes over nothing where there is nothing, begins no run
    after its hours.
    """
    where = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert command.main([*where, "--list"]) == 0
    assert (
        "0 of 700 runs are finished. Next are 64 runs of the search for rates"
        in capsys.readouterr().out
    )
    assert (
        command.main([*where, "--collect"]) == 0
        and (tmp_path / "results/report.md").exists()
    )
    assert command.main([*where, "--hours", "1e-9"]) == 0 and not list(
        (tmp_path / "runs").iterdir()
    )
    capsys.readouterr()
    assert (
        command.main([*where, "--jobs", "0"]) == 2
        and capsys.readouterr().err.count("\n") == 1
    )


# ---- the registration ----------------------------------------------------------------
def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_nothing_registered_has_changed():
    assert registration.load(design.HERE)["sha256"] == registration.digests(design.HERE)
    assert (design.HERE / "runs.sha256").read_text().strip() == D.digest(), (
        "a setting of some run has changed"
    )


def test_the_registration_precedes_every_run():
    commit = registration.load(design.HERE)["commit"]
    try:
        git("cat-file", "-e", commit)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no history here")
    held = git("ls-tree", "-r", "--name-only", commit, "repro/mini/stale").split()
    assert "repro/mini/stale/results/runs.jsonl" not in held
    for name, digest in registration.digests(design.HERE).items():
        show = ["git", "show", f"{commit}:repro/mini/stale/{name}"]
        assert (
            hashlib.sha256(
                subprocess.run(show, cwd=ROOT, capture_output=True, check=True).stdout
            ).hexdigest()
            == digest
        )
    records = results.load(design.RESULTS)
    made = [r["provenance"]["commit"] for r in records.values() if r["provenance"]]
    for at in {c["id"] for c in made}:
        git("merge-base", "--is-ancestor", commit, at)
    assert not any(c["dirty"] for c in made)
    assert set(records) <= {s.key for s in D.reachable(records)}
    pilot = {
        r["settings"]["seed"] for r in results.read_lines(design.HERE / "pilot.jsonl")
    }
    assert (
        not {*D.main["seeds"]} & ({*D.search["seeds"]} | pilot)
        and not {*D.search["seeds"]} & pilot
    )
