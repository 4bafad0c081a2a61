# SPDX-License-Identifier: Apache-2.0
"""The registered experiments fit together; each run runs once, whatever happens;
verdicts say what is there.
"""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mini_fake_train as fake
import pytest

from repro.mini.round2 import report
from repro.mini.round2.rule import judge
from repro.mini.study import plan, results, suite
from repro.mini.study.plan import Claim, Contrast, Experiment
from repro.mini.train.settings import Settings
from upref import interrupt
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
CORE = {"dapo", "up_dapo", "dapo_no_upper_clip", "reinforce_off_policy", "is_pg"}
SHORT = {"steps": 40, "eval_every": 20}


def contrast(*arms, metric="avg", **more):
    return Contrast(arms, metric, **({"more_than": 0.0} | more))


def small(*contrasts, seeds=5, claims=None, **more) -> Experiment:
    arms = {a: {"objective": a} for a in ("dapo", "up_dapo", "is_pg")}
    claims = claims or (Claim("it", "Fig. 0", "It is so.", contrasts=contrasts),)
    return Experiment(
        "small",
        "Is it so?",
        [],
        list(range(seeds)),
        arms,
        claims,
        1,
        settings=SHORT,
        **more,
    )


@pytest.fixture(autouse=True)
def path_of_children(monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "mini")])
    )


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """runs(experiment, shift) -> its finished runs, of the fake trainer."""

    def make(e, shift=None, keep=lambda arm, seed: True):
        monkeypatch.setattr(fake, "SHIFT", shift or {})
        for arm, seed, s in e.runs():
            if keep(arm, seed):
                fake.write(s, tmp_path / "out" / s.key)
        return results.collect(
            tmp_path / "out", {s.key for *_, s in e.runs()}, tmp_path / "results"
        )

    return make


# ---- what was registered -------------------------------------------------------------
@pytest.mark.parametrize("name", plan.names())
def test_an_experiment_fits_together(name):
    e = plan.load(name)
    assert e.question and e.answers and e.note and e.claims and e.figures
    for arm, _, s in e.runs():
        assert (
            s.eval_problems == 256
            and s.eval_samples == 32
            and s.beta == 0
            and s.grad_clip == 1
        )
        assert s.lr == 3e-4 or name == "learning_rate", "one learning rate for all"
        many = name in plan.names(core=True) or (name == "ablations_high_off_policy")
        assert len(e.seeds) >= (5 if many else 3), arm


def test_all_that_the_paper_shows_is_asked():
    answered = {a for n in plan.names() for a in plan.load(n).answers}
    assert answered >= {f"Fig. {i}" for i in range(2, 9)} | {"Table 1"}
    assert set(plan.load("ablations_standard").arms) == CORE
    family = plan.load("family").arms
    assert len(family) == 13 and {"up_grpo", "dapo"} <= set(family)
    assert (
        plan.names()[:3]
        == plan.names(core=True)
        == ["up_dapo_vs_dapo", "ablations_standard", "self_anchor"]
    )


def test_core_experiments_share_their_runs():
    wanted = plan.queue(plan.names(core=True))
    assert len(wanted) == 25 and len({s.key for s in wanted.values()}) == 25
    shared = set(wanted) & set(plan.queue(["learning_rate"]))
    assert len(shared) == 6, "its middle rate is the core's"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("queue = ", "Invalid value"),
        ("surprise = 1", "surprise"),
        ('[[claims]]\nid="a"\nfigure="f"\nsays="s"', "needs contrasts or not_testable"),
        (
            '[[claims]]\nid="a"\nfigure="f"\nsays="s"\ncontrasts=[{arms=["dapo"], metric="speed", more_than=0}]',
            "computed",
        ),
        (
            '[[claims]]\nid="a"\nfigure="f"\nsays="s"\ncontrasts=[{arms=["ppo"], metric="avg", more_than=0}]',
            "'ppo'",
        ),
        (
            '[[claims]]\nid="a"\nfigure="f"\nsays="s"\ncontrasts=[{arms=["dapo"], metric="avg"}]',
            "computed",
        ),
    ],
)
def test_an_experiment_that_does_not_fit_is_refused(text, says, tmp_path, monkeypatch):
    head = (
        'question="q"\nanswers=[]\nqueue=1\nseeds=[0]\narms={dapo={objective="dapo"}}\n'
    )
    (tmp_path / "x.toml").write_text((head if "queue" not in text else "") + text)
    monkeypatch.setitem(plan.FOLDERS, 1, tmp_path)
    with pytest.raises(InputError, match=says):
        plan.load("x")
    with pytest.raises(
        InputError, match="there is no experiment named 'y': choose one of"
    ):
        monkeypatch.setattr(plan, "names", lambda round=1: ["x"])
        plan.load("y")


# ---- verdicts ------------------------------------------------------------------------
UP, DOWN = {"up_dapo": {"avg": 0.05}}, {"up_dapo": {"avg": -0.05}}


KL = contrast(
    "up_dapo", "dapo", metric="kl_base", ratio=True, more_than=None, less_than=1.25
)


@pytest.mark.parametrize(
    ("shift", "contrasts", "word"),
    [
        (UP, [contrast("up_dapo", "dapo")], "reproduced"),
        (DOWN, [contrast("up_dapo", "dapo")], "refuted"),
        ({}, [contrast("dapo", "dapo", more_than=0.0)], "undecided"),
        (UP, [contrast("up_dapo", "dapo", more_than=0.2)], "refuted"),
        ({"up_dapo": {"kl_base": 0.01}}, [KL], "reproduced"),
        ({"up_dapo": {"kl_base": 0.05}}, [KL], "refuted"),
        (
            {},
            [
                contrast(
                    "dapo", metric="entropy", at="change", more_than=None, less_than=0.0
                )
            ],
            "reproduced",
        ),
        ({}, [contrast("dapo", metric="entropy", at="change")], "refuted"),
    ],
)
def test_a_verdict_says_what_was_put_in(runs, shift, contrasts, word):
    e = small(*contrasts)
    (v,) = judge(e, runs(e, shift))
    assert (v.word, v.n) == (word, 5)


def test_effect_and_interval_are_those_of_the_runs(runs):
    e = small(contrast("up_dapo", "dapo"))
    records = runs(e, UP)
    last = lambda arm, seed: records[e.run(arm, seed).key]["evals"]["test/top_p_0.7"][
        "avg"
    ][-1]
    (v,) = judge(e, records)
    d = [last("up_dapo", s) - last("dapo", s) for s in e.seeds]
    found = v.found[0]
    assert (
        found.mean == pytest.approx(sum(d) / 5)
        and abs(found.mean - 0.05) < 0.005
        and found.high - found.low < 0.01
    )


def test_a_stopped_run_counts_and_all_seeds_make_a_verdict(runs, tmp_path):
    e = small(contrast("up_dapo", "dapo"))
    records = runs(e, UP, keep=lambda arm, seed: seed < 3)
    (v,) = judge(e, records)
    assert (v.word, v.why, v.n) == ("not finished", "3 of 5 seeds so far", 3)
    name = e.run("up_dapo", 0).key
    stopped = records | {
        name: records[name] | {"status": "stopped at step 3: loss nan"}
    }
    assert results.value(stopped[name], e.claims[0].contrasts[0]) == 0
    (v,) = judge(e, {})
    assert (v.word, v.n) == ("not finished", 0)


def test_holm_is_over_the_claims_of_an_experiment(runs):
    """Twenty claims about nothing: some interval excludes 0 by chance, no verdict does."""
    claims = tuple(
        Claim(
            f"{metric}{at}",
            "",
            "",
            contrasts=(
                contrast("is_pg", "dapo", metric=metric, at=at, more_than=bound),
            ),
        )
        for metric in ("reward", "valid", "length", "kl_old", "alive")
        for at, bound in (("mean", 0.0), ("last", 0.0), ("max", 0.0), ("change", 0.0))
    )
    e = small(claims=claims)
    found = judge(e, runs(e))
    assert not any(v.word == "reproduced" for v in found)
    assert all(v.p_for >= max(f.p_for for f in v.found) for v in found)


# ---- results -------------------------------------------------------------------------
def test_bins_keep_means_and_the_largest_norm(tmp_path):
    lines = [
        {"step": i, "entropy": i, "grad_norm_max": 100.0 if i == 7 else 1.0}
        for i in range(12)
    ]
    columns = results._bins(lines)
    assert columns["step"] == [0, 5, 10] and columns["entropy"] == [2, 7, 10.5]
    assert columns["grad_norm_max"] == [1, 100, 1]


def test_an_unfinished_line_is_left_out_and_a_corrupt_one_said(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert [line["step"] for line in results.read_lines(path)] == [0, 1]
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(InputError, match="corrupt"):
        results.read_lines(path)


def test_collecting_keeps_the_lines_that_are_there(runs, tmp_path, monkeypatch):
    one, two = (
        small(contrast("dapo"), seeds=1),
        replace(small(contrast("dapo"), seeds=2), seeds=[1]),
    )
    runs(one)
    before = (tmp_path / "results" / "runs.jsonl").read_text().splitlines()
    both = runs(two)
    assert len(both) == 6 and set(before) < set(
        (tmp_path / "results" / "runs.jsonl").read_text().splitlines()
    )
    line = results.load(tmp_path / "results")[one.run("dapo", 0).key]
    assert line["settings"]["seed"] == 0 and line["provenance"]["commit"] == fake.COMMIT
    assert max(map(len, before)) < 12_000, "small enough to commit"
    monkeypatch.setattr(fake, "COMMIT", {"id": "f" * 40, "dirty": True})
    assert runs(two) == both, "also of a run that the folder has from another version"


# ---- the report ----------------------------------------------------------------------
def test_a_table_has_the_means_and_is_the_same_twice(runs):
    e = small(
        contrast("up_dapo", "dapo"),
        table={"title": "Table", "metric": "pass1", "sets": ["one_step", "two_steps"]},
    )
    records = runs(e, UP)
    text = report.table(e, records)
    assert (
        text == report.table(e, records)
        and "| method | one_step | two_steps | average | seeds |" in text
    )
    assert "| up_dapo | **" not in text and "up_dapo" in text


def test_what_a_record_says_is_text_in_a_report(runs):
    """Not HTML, not a link, not a second line: a record may be somebody else's."""
    e = small(contrast("dapo"), seeds=1)
    evil = "stopped at step 3: <script>x</script> [a](javascript:b)\n# c"
    records = {k: r | {"status": evil} for k, r in runs(e).items()}
    for r in records.values():
        r["provenance"]["commit"]["id"] = r["provenance"]["machine"]["cpu"] = "<b>"
    pages = report.section(e, records, records, []), str(report.made_with(records))
    for page in pages:
        assert not re.search(r"<script|<b>|(?<!\\)\[a|^# c", page, re.M)
    assert all(
        "&lt;script&gt;x&lt;/script&gt; \\[a\\](javascript:b) # c" in page
        for page in pages[:1]
    )


# ---- the suite -----------------------------------------------------------------------
QUEUE = {s.key: s for *_, s in small(contrast("dapo"), seeds=1).runs()}


def run_suite(out, monkeypatch, behaviour="", wanted=QUEUE, **more):
    monkeypatch.setenv("FAKE", behaviour)
    with suite.alone(out) as lock:
        return suite.run_all(wanted, out, 2, lock, train="mini_fake_train", **more)


def test_every_run_once_and_never_again(tmp_path, monkeypatch):
    assert (
        run_suite(tmp_path, monkeypatch) == []
        and run_suite(tmp_path, monkeypatch) == []
    )
    assert {
        name: (tmp_path / name / "starts").read_text() for name in QUEUE
    } == dict.fromkeys(QUEUE, "x")


def test_a_folder_named_from_where_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_suite(Path("runs"), monkeypatch) == []
    assert all(results.status(tmp_path / "runs" / name) == "done" for name in QUEUE)


def test_a_failed_run_is_told_and_tried_again_and_stops_nothing(tmp_path, monkeypatch):
    (said,) = run_suite(tmp_path, monkeypatch, "fail-dapo")
    assert "status 2: cannot write: no space left" in said and said.startswith("dapo-")
    assert [results.status(tmp_path / n) for n in QUEUE] == ["", "done", "done"]
    assert run_suite(tmp_path, monkeypatch) == []
    assert [(tmp_path / n / "starts").read_text() for n in QUEUE] == ["xx", "x", "x"]


def test_a_run_that_is_not_finite_is_a_result(tmp_path, monkeypatch):
    for _ in range(2):
        assert run_suite(tmp_path, monkeypatch, "nan-is_pg") == []
    (name,) = (n for n in QUEUE if n.startswith("is_pg"))
    assert (tmp_path / name / "starts").read_text() == "x"
    line = results.record(tmp_path / name)
    assert line["status"].startswith(
        "stopped at step 3: step 3, minibatch 0: loss nan"
    ) and line["steps"]["step"] == [0]


def test_only_what_the_results_do_not_hold(tmp_path, monkeypatch, capsys):
    held = plan.queue(["second_task"])
    line = {key: {} for key in results.NEEDED}
    results.keep({name: line | {"name": name} for name in list(held)[1:]}, tmp_path)
    asked = [
        "--only",
        "second_task",
        "--missing",
        "--list",
        "--out",
        str(tmp_path),
        "--results",
        str(tmp_path),
    ]
    assert suite.main(asked) == 0 and "0 of   1 runs" in capsys.readouterr().out
    assert suite.main([a for a in asked if a != "--missing"]) == 0
    assert f"{len(held) - 1} of {len(held):3} runs" in capsys.readouterr().out
    results.keep({name: line | {"name": name} for name in held}, tmp_path)
    assert (
        suite.main(asked) == 0
        and f"holds all {len(held)} runs" in capsys.readouterr().out
    )


def test_no_new_run_after_the_hours(tmp_path, monkeypatch):
    assert run_suite(tmp_path, monkeypatch, hours=1e-9) == []
    assert not any(results.status(tmp_path / n) for n in QUEUE)


def test_interrupted_it_goes_on_and_one_suite_runs_at_a_time(
    tmp_path, monkeypatch, capfd
):
    """ctrl-C stops the runs too; after kill -9 the runs hold the lock until they end,
    and nothing runs twice.
    """
    code = "import sys; from pathlib import Path; from test_mini_suite import child; sys.exit(child(Path(sys.argv[1])))"

    def start():
        env = os.environ | {"FAKE": "slow"}
        p = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=env
        )
        deadline = time.monotonic() + 120
        while (
            sum(f.read_text().count("\n") for f in tmp_path.glob("*/steps.jsonl"))
            < before + 5
        ):
            assert time.monotonic() < deadline and p.poll() is None
            time.sleep(0.02)
        return p

    before = 0
    p = start()
    with (
        pytest.raises(InputError, match="in use by another suite"),
        suite.alone(tmp_path),
    ):
        pass
    p.send_signal(signal.SIGTERM)
    assert p.wait(300) == 143 and not any(results.status(tmp_path / n) for n in QUEUE)
    before = sum(f.read_text().count("\n") for f in tmp_path.glob("*/steps.jsonl"))
    p = start()
    p.kill()
    p.wait()
    with pytest.raises(InputError, match="in use"), suite.alone(tmp_path):
        pass
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:  # its runs end by themselves
        try:
            assert run_suite(tmp_path, monkeypatch) == []
            break
        except InputError:
            time.sleep(0.2)
    assert all(results.status(tmp_path / n) == "done" for n in QUEUE)
    for name, s in QUEUE.items():
        assert [
            x["step"] for x in results.read_lines(tmp_path / name / "steps.jsonl")
        ] == list(range(s.steps))


def child(out: Path) -> int:
    def work():
        with suite.alone(out) as lock:
            return len(suite.run_all(QUEUE, out, 2, lock, train="mini_fake_train"))

    interrupt.handled("suite")
    return suite.said(work, "suite")


def test_the_command(tmp_path, capsys):
    asked = ["--round", "1", "--list", "--out", str(tmp_path)]
    # those committed, and those of nobody yet
    for results_at, done in ([], 10), (["--results", str(tmp_path)], 0):
        assert suite.main(asked + results_at) == 0
        assert (
            f"up_dapo_vs_dapo            core  {done:3} of  10 runs"
            in capsys.readouterr().out
        )
    assert suite.main(["--only", "nothing", "--out", str(tmp_path)]) == 2
    assert "there is no experiment named 'nothing'" in capsys.readouterr().err
    assert suite.main(["--jobs", "0", "--out", str(tmp_path)]) == 2
    (tmp_path / "file").touch()
    assert suite.main(["--core", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write in" in capsys.readouterr().err


def test_settings_of_the_fake_are_the_real_ones():
    assert isinstance(next(iter(QUEUE.values())), Settings)
