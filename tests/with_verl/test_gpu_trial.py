# SPDX-License-Identifier: Apache-2.0
"""The trial on a GPU, as far as it goes without one: its settings, its judge, its row."""

import json
import os
import subprocess
import sys

import pytest

import upref

pytest.importorskip(
    "psutil", reason="`repro/venv.sh smoke` installs what watches a trainer"
)
from benchmarks.gpu import keep
from repro.with_verl import gpu_trial as trial
from repro.with_verl.cpu import smoke
from repro.with_verl.place import ROOT
from repro.with_verl.run import watch

ENDED = watch.Outcome(0, "", 60.0)


def rows(count=3, **extra):
    data = {
        "training/global_step": 1,
        smoke.SCORE: 0.1,
        smoke.PARITY: 1e-7,
        "actor/upref/normalizer": 1.0,
        "actor/upref/clip/neg_low": 0.25,
    }
    return [
        {"step": i, "data": data | {smoke.SCORE: i / 10} | extra}
        for i in range(1, count + 1)
    ]


def replay(*causes, status=0):
    steps = [{"sampler": {"cause": cause}} for cause in causes]
    return {"status": status, "text": "", "report": {"steps": steps}}


def wrong(found, said, fault=False, asked=3):
    return trial.judge(found, asked, ENDED, said, "toy", fault)[1]


def test_a_run_in_which_everything_held_has_nothing_wrong():
    report, said = trial.judge(
        rows(), 3, ENDED, replay("agree", "agree"), "toy", fault=False
    )
    assert said == []
    assert "tokens left the band in 3 of 3 steps" in report
    assert any("agree in 2" in line for line in report)


def test_a_run_whose_ratios_stay_in_the_band_proves_nothing():
    inside = rows(**{"actor/upref/clip/neg_low": 0.0})
    assert any("no token left the band" in w for w in wrong(inside, replay("agree")))
    above = rows(
        **{"actor/upref/clip/neg_low": 0.0, "actor/upref/above_high": 0.1}
    )  # what UP trains and DAPO clips
    assert wrong(above, replay("agree")) == []


def test_a_failure_in_replay_and_a_missing_record_are_wrong():
    assert "not planted" in wrong(rows(), replay("shift", status=1))[0]
    assert "not planted" in wrong(rows(), replay("agree", "raw_temperature"))[0]
    assert "no recorded step" in wrong(rows(), replay())[0]


def test_the_planted_fault_must_be_named():
    named = replay("some_temperature", "raw_temperature")
    assert wrong(rows(), named, fault=True) == []
    unnamed = replay("agree", "agree")
    assert "does not name" in wrong(rows(), unnamed, fault=True)[0]


def test_random_weights_need_not_learn():
    flat = rows(24, **{smoke.SCORE: 0.25})
    _, of_half = trial.judge(flat, 24, ENDED, replay("agree"), "half", fault=False)
    assert of_half == [] and "did not rise" in wrong(flat, replay("agree"), asked=24)[0]


def test_the_reward_of_random_weights_is_the_share_of_words_that_fit():
    score = trial.compute_score("made", "w1 w2 w5 <user>", "1")
    assert score["score"] == 2 / 3 and score["acc"] == 1.0
    assert trial.compute_score("made", "", "1")["score"] == 0


def test_modules_of_the_user_are_imported_before_the_plug_in(monkeypatch, tmp_path):
    ours = "upref_frameworks.verl.training"
    monkeypatch.setenv(smoke.MODULES, f"theirs,{ours}")
    found = trial.environment(tmp_path / "log", eager=True)
    assert found[smoke.MODULES] == f"theirs,{ours}"
    assert found["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in trial.environment(tmp_path / "log", eager=False)


@pytest.mark.verl
@pytest.mark.parametrize("size", ["toy", "half"])
def test_verl_accepts_the_settings_of_both_sizes(tmp_path, size):
    pytest.importorskip(
        "verl.workers.config", reason="`repro/venv.sh verl` installs it"
    )
    objective = upref.get("up_dapo")
    given = trial.settings(objective, 2, tmp_path, size, fault=size == "toy")
    assert not any(v == "cpu" for v in given.values())
    cfg = trial.dry_run(objective, [f"{k}={v}" for k, v in given.items()], size)
    assert cfg.trainer.total_training_steps == 2
    assert cfg.actor_rollout_ref.rollout.free_cache_engine == (size == "half")


def test_the_seconds_of_a_start_are_read_off_the_output():
    output = "\n".join(
        [
            "2026-11-28 23:59:50,251\tINFO worker.py:2038 -- Started a local Ray instance.",
            "(EngineCore pid=3) INFO 11-29 00:00:10 [core.py:344] init engine (profile, ...) took 15.86 s",
            "(TaskRunner pid=2) INFO:2026-11-29 00:00:12,093:all initialize finished, ready to fit",
            "2026-11-29 00:01:00 Started a local Ray instance.",
            "all initialize finished, ready to fit",
        ]
    )
    assert trial.milestones(output, "23:59:40") == {
        "Ray runs": 10,
        "vLLM's engine is ready": 30,
        "verl is ready to train": 32,
    }


def test_a_word_that_is_no_override_is_refused(tmp_path):
    command = [sys.executable, "-m", "repro.with_verl.gpu_trial", str(tmp_path), "lr"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "'lr' is no override" in done.stderr


def test_its_row_is_kept_beside_those_of_benchmarks_gpu(tmp_path):
    row = {"run": "toy: up_dapo", "wrong": []}
    new = {
        "date": "2026-01-01",
        "parts": {"verl-toy": {"status": 0}},
        "rows": {"verl-toy": [row]},
    }
    [run] = keep.added([], json.loads(json.dumps(new)), "abc")
    [found] = [made for made in run.rows.values() if made["kind"] != "run"]
    assert found["kind"] == "verl" and found["run"] == "toy: up_dapo"


@pytest.mark.verl
def test_without_engines_the_trainer_makes_none_and_sends_no_weights():
    pytest.importorskip(
        "verl.trainer.ppo.v1", reason="`repro/venv.sh smoke` installs it"
    )
    code = """
import asyncio, repro.with_verl.recorded
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerManager
from omegaconf import OmegaConf

assert PPOTrainer._enable_hybrid_replicas is False
assert PPOTrainerSync.on_step_end(None) is None
config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"nnodes": 0}, "model": {}}})
LLMServerManager.rollout_replica_class = object  # its choice imports vLLM
LLMServerManager(config)  # asserts that there are workers otherwise
print("no engines")
"""
    environment = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.stdout.endswith("no engines\n"), done.stderr[-2000:]


def test_the_smoke_run_imports_modules_of_the_user_behind_its_own(
    monkeypatch, tmp_path
):
    monkeypatch.setenv(smoke.MODULES, "theirs")
    found = smoke.environment(tmp_path / "log", ("extra",))[smoke.MODULES]
    ours = "repro.with_verl.cpu.device,upref_frameworks.verl.training"
    assert found == f"{ours},extra,theirs"
