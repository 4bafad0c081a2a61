# SPDX-License-Identifier: Apache-2.0
"""The experiments of the first round fit together; each run runs once, whatever happens."""

import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import mini_fake_train as fake
import pytest

from repro.mini.experiment import command, plan, records, suite
from repro.mini.train.settings import Settings
from tests.support.hanging import HANGING
from upref import interrupt
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
CORE = {"dapo", "up_dapo", "dapo_no_upper_clip", "reinforce_off_policy", "is_pg"}
CORE_EXPERIMENTS = ("up_dapo_vs_dapo", "ablations_standard", "self_anchor")
FIRST_ROUND = sorted((plan.MINI / "experiments").glob("*.toml"))
SHORT = {"steps": 40, "eval_every": 20}


def small(seeds=5) -> plan.Plan:
    """Return a plan of three arms and this many seeds."""
    arms = {a: {"objective": a} for a in ("dapo", "up_dapo", "is_pg")}
    return plan.Plan(
        name="small",
        folder=ROOT,
        results=ROOT,
        question="Is it so?",
        arms=arms,
        groups=[{"name": "small", "arms": list(arms), "bases": [""]}],
        main={"seeds": list(range(seeds))},
        settings=SHORT,
    )


@pytest.fixture(autouse=True)
def path_of_children(monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "mini")])
    )


@pytest.fixture
def collected(tmp_path):
    """Return a function that runs a plan by the fake trainer, and returns the records
    of its runs.
    """

    def make(e):
        for key, s in e.todo({}):
            fake.write(s, tmp_path / "out" / key)
        keys = {key for key, _ in e.todo({})}
        return records.collect(tmp_path / "out", keys, tmp_path / "results")

    return make


# ---- what was registered -------------------------------------------------------------
@pytest.mark.parametrize("path", FIRST_ROUND, ids=lambda path: path.stem)
def test_an_experiment_of_the_first_round_fits_together(path):
    e = plan.load(path.stem)
    assert e.question and e.note and e.claims and e.figures
    for run in e.todo({}):
        s = run.settings
        evaluated = (s.eval_problems, s.eval_samples, s.beta, s.grad_clip)
        assert evaluated == (256, 32, 0, 1)
        assert s.lr == 3e-4 or e.name == "learning_rate", "one learning rate for all"
    many = e.name in (*CORE_EXPERIMENTS, "ablations_high_off_policy")
    assert len(e.main["seeds"]) >= (5 if many else 3)


def test_all_that_the_paper_shows_is_asked():
    texts = [tomllib.loads(path.read_text(encoding="utf-8")) for path in FIRST_ROUND]
    answered = {answer for text in texts for answer in text["answers"]}
    assert answered >= {f"Fig. {i}" for i in range(2, 9)} | {"Table 1"}
    assert set(plan.load("ablations_standard").arms) == CORE
    family = plan.load("family").arms
    assert len(family) == 13 and {"up_grpo", "dapo"} <= set(family)


def test_core_experiments_share_their_runs():
    wanted = {run.key for n in CORE_EXPERIMENTS for run in plan.load(n).todo({})}
    assert len(wanted) == 25
    shared = wanted & {run.key for run in plan.load("learning_rate").todo({})}
    assert len(shared) == 6, "its middle rate is the core's"


@pytest.mark.parametrize(
    ("text", "says"), [("seeds = ", "Invalid value"), ("surprise = 1", "surprise")]
)
def test_an_experiment_that_does_not_fit_is_refused(text, says, tmp_path):
    head = 'question="q"\narms={dapo={objective="dapo"}}\n'
    head += "" if "seeds" in text else "seeds=[0]\n"
    path = tmp_path / "x.toml"
    path.write_text(head + text)
    with pytest.raises(InputError, match=says):
        plan.read(path, "x")


# ---- results -------------------------------------------------------------------------
def test_bins_keep_means_and_the_largest_norm(tmp_path):
    lines = [
        {"step": i, "entropy": i, "grad_norm_max": 100.0 if i == 7 else 1.0}
        for i in range(12)
    ]
    columns = records._bins(lines)
    assert columns["step"] == [0, 5, 10] and columns["entropy"] == [2, 7, 10.5]
    assert columns["grad_norm_max"] == [1, 100, 1]


def test_an_unfinished_line_is_left_out_and_a_corrupt_one_said(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert [line["step"] for line in records.read_lines(path)] == [0, 1]
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(InputError, match="corrupt"):
        records.read_lines(path)


def test_collecting_keeps_the_lines_that_are_there(collected, tmp_path, monkeypatch):
    """Collect two experiments in turn, and find the first's lines and its provenance
    unchanged.
    """
    one, two = small(seeds=1), replace(small(), main={"seeds": [1]})
    collected(one)
    path = tmp_path / "results" / "runs.jsonl"
    before = path.read_text().splitlines()
    both = collected(two)
    assert len(both) == 6 and set(before) < set(path.read_text().splitlines())
    line = records.load(tmp_path / "results")[one.todo({})[0].key]
    assert line["settings"]["seed"] == 0 and line["provenance"]["commit"] == fake.COMMIT
    assert max(map(len, before)) < 12_000, "small enough to commit"
    monkeypatch.setattr(fake, "COMMIT", {"id": "f" * 40, "dirty": True})
    assert collected(two) == both, "also of a run that the folder has"


def test_time_is_foretold_from_finished_runs_of_the_same_kind(collected):
    known = collected(small(seeds=1))
    todo = [run.settings for run in small().todo(known)]
    # the fake says a second a run
    assert records.forecast(todo, known) == pytest.approx(len(todo))


def test_nothing_is_foretold_of_a_base_that_nobody_timed(collected):
    """A language model was said to take the time of a tiny transformer."""
    known = collected(small(seeds=1))
    [first, *_] = [run.settings for run in small().todo({})]
    assert math.isnan(records.forecast([replace(first, base="smollm2")], known))
    said = plan.load("language_model").progress({})
    assert "runs of the experiment proper: `python" in said


# ---- the suite -----------------------------------------------------------------------
QUEUE = dict(small(seeds=1).todo({}))


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
    assert all(records.status(tmp_path / "runs" / name) == "done" for name in QUEUE)


def test_a_failed_run_is_told_and_tried_again_and_stops_nothing(tmp_path, monkeypatch):
    (said,) = run_suite(tmp_path, monkeypatch, "fail-dapo")
    assert "status 2: cannot write: no space left" in said and said.startswith("dapo-")
    assert [records.status(tmp_path / n) for n in QUEUE] == ["", "done", "done"]
    assert run_suite(tmp_path, monkeypatch) == []
    assert [(tmp_path / n / "starts").read_text() for n in QUEUE] == ["xx", "x", "x"]


def test_a_run_that_is_not_finite_is_a_result(tmp_path, monkeypatch):
    for _ in range(2):
        assert run_suite(tmp_path, monkeypatch, "nan-is_pg") == []
    (name,) = (n for n in QUEUE if n.startswith("is_pg"))
    assert (tmp_path / name / "starts").read_text() == "x"
    line = records.record(tmp_path / name)
    assert line["status"].startswith(
        "stopped at step 3: step 3, minibatch 0: loss nan"
    ) and line["steps"]["step"] == [0]


def test_no_new_run_after_the_hours(tmp_path, monkeypatch):
    assert run_suite(tmp_path, monkeypatch, hours=0) == []
    assert not any(records.status(tmp_path / n) for n in QUEUE)


@pytest.mark.nightly
def test_interrupted_it_goes_on_and_one_suite_runs_at_a_time(
    tmp_path, monkeypatch, capfd
):
    """ctrl-C stops the runs too; after kill -9 the runs hold the lock until they end,
    and nothing runs twice.
    """
    code = "import sys; from pathlib import Path; from test_mini_suite import child; sys.exit(child(Path(sys.argv[1])))"

    def written_steps():
        """Count the steps that all runs have written so far."""
        return sum(f.read_text().count("\n") for f in tmp_path.glob("*/steps.jsonl"))

    def start():
        """Start a suite in a process of its own, and return it after five more steps
        are written.
        """
        env = os.environ | {"FAKE": "slow"}
        p = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=env
        )
        deadline = time.monotonic() + HANGING
        while written_steps() < before + 5:
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
    assert p.wait(HANGING) == 143
    assert not any(records.status(tmp_path / n) for n in QUEUE)
    before = written_steps()
    p = start()
    p.kill()
    p.wait()
    with pytest.raises(InputError, match="in use"), suite.alone(tmp_path):
        pass
    deadline = time.monotonic() + HANGING
    while True:  # its runs end by themselves
        try:
            assert run_suite(tmp_path, monkeypatch) == []
            break
        except InputError:
            assert time.monotonic() < deadline, "its runs have not ended"
            time.sleep(0.2)
    assert all(records.status(tmp_path / n) == "done" for n in QUEUE)
    for name, s in QUEUE.items():
        assert [
            x["step"] for x in records.read_lines(tmp_path / name / "steps.jsonl")
        ] == list(range(s.steps))


def child(out: Path) -> int:
    """Run the queue in this folder, interrupts handled; return the suite's exit status."""

    @suite.exit_status_of("suite")
    def work():
        with suite.alone(out) as lock:
            return len(suite.run_all(QUEUE, out, 2, lock, train="mini_fake_train"))

    interrupt.handled("suite")
    return work()


def test_the_command(tmp_path, capsys):
    asked = ["up_dapo_vs_dapo", "--out", str(tmp_path / "runs")]
    elsewhere = ["--results", str(tmp_path / "results")]
    # those committed, and those of nobody yet
    for where, done in ([], 10), (elsewhere, 0):
        assert command.main([*asked, "--list", *where]) == 0
        assert f"{done} of 10 runs are finished" in capsys.readouterr().out
    assert command.main(["nothing"]) == 2
    assert "there is no experiment named 'nothing'" in capsys.readouterr().err
    assert command.main([*asked, *elsewhere, "--jobs", "0"]) == 2
    (tmp_path / "file").touch()
    there = ["--out", str(tmp_path / "file"), *elsewhere]
    assert command.main(["up_dapo_vs_dapo", *there]) == 2
    assert "cannot write in" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["moe", "stale", "controls"])
def test_a_finished_experiment_keeps_its_report(name, capsys):
    for words in ([], ["--collect"]):
        assert command.main([name, *words]) == 2
        assert "its report stays as it is" in capsys.readouterr().err


def test_an_experiment_is_trained_and_reported(tmp_path, monkeypatch, capsys):
    """Into folders of its own, as somebody would repeat it."""
    monkeypatch.setattr(suite, "TRAIN", "mini_fake_train")
    moe = plan.load("moe")
    short = replace(moe, settings=moe.settings | {"steps": 3}, main={"seeds": [1000]})
    monkeypatch.setattr(command, "load", lambda name: short)
    where = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    begun = tmp_path / "runs" / next(iter(dict(short.todo({})))) / "checkpoints"
    begun.mkdir(parents=True)
    assert command.main(["moe", *where]) == 0
    assert not begun.exists()
    assert "2 of 2 runs are finished." in capsys.readouterr().out
    text = (tmp_path / "results/report.md").read_text(encoding="utf-8")
    assert "UP-GSPO ends with more right answers than GSPO." in text
    assert command.main(["moe", *where, "--hours", "1e-9"]) == 0


def test_the_checkpoints_of_finished_runs_alone_are_deleted(tmp_path):
    for name in ("finished", "begun", "another"):
        (tmp_path / name / "checkpoints/step-1").mkdir(parents=True)
    for name in ("finished", "another"):
        (tmp_path / name / "done.json").write_text("{}")
    suite.delete_checkpoints(tmp_path, ["finished", "begun", "never begun"])
    kept = sorted(path.parent.name for path in tmp_path.glob("*/checkpoints"))
    assert kept == ["another", "begun"]
    assert (tmp_path / "finished/done.json").exists()


def test_settings_of_the_fake_are_the_real_ones():
    assert isinstance(next(iter(QUEUE.values())), Settings)


def test_a_line_says_how_far_the_runs_are(tmp_path):
    """Nothing but `0 of 4 runs are finished` was printed for minutes."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/steps.jsonl").write_text("{}\n" * 25)
    running = {"a": Settings(), "b": Settings(steps=7)}
    assert suite.progress(tmp_path, running) == (
        "training: a at step 25 of 100, b at step 0 of 7"
    )
