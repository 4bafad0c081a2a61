# SPDX-License-Identifier: Apache-2.0
"""The trial on a GPU, as far as it goes without one: its settings, its judge, its row."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

import upref

pytest.importorskip(
    "psutil", reason="`repro/venv.sh smoke` installs what watches a trainer"
)
from benchmarks.gpu import check, keep
from repro.mini import tasks
from repro.mini.policy import smollm2
from repro.with_verl import addition, gpu_trial as trial
from repro.with_verl.cpu import smoke, toy
from repro.with_verl.place import EXTERNAL_MODULES, ROOT
from repro.with_verl.run import watch

ENDED = watch.Outcome(0, "", 60.0)


def rows(count=3, **extra):
    """Return logged rows of `count` steps, with rewards that grow; `extra` is in each."""
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
    monkeypatch.setenv(EXTERNAL_MODULES, f"theirs,{ours}")
    found = trial.environment(tmp_path / "log", eager=True)
    assert found[EXTERNAL_MODULES] == f"theirs,{ours}"
    assert found["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in trial.environment(tmp_path / "log", eager=False)


@pytest.mark.verl
@pytest.mark.parametrize("size", ["toy", "half", "smollm2"])
def test_verl_accepts_the_settings_of_each_size(tmp_path, size):
    pytest.importorskip(
        "verl.workers.config", reason="`repro/venv.sh verl` installs it"
    )
    objective = upref.get("up_dapo")
    given = trial.settings(objective, 2, tmp_path, size, fault=size == "toy")
    assert not any(v == "cpu" for v in given.values())
    lines = smoke.as_overrides(given)
    cfg = smoke.let_verl_read(objective, lines, trial.SHAPES[size])
    assert cfg.trainer.total_training_steps == 2
    assert cfg.actor_rollout_ref.rollout.free_cache_engine == (size == "half")


def started(monkeypatch, tmp_path, **how):
    """Return what gpu_trial gives to watch.run, and its exit status; verl is not
    started.
    """
    given = {}

    def run(command, log, output, **more):
        output.write_text("")
        given.update(more, command=command)
        return ENDED

    monkeypatch.setattr(watch, "run", run)
    monkeypatch.setattr(trial, "make", lambda out, size: (out / "model").mkdir())
    monkeypatch.setattr(trial, "replayed", lambda *_: replay())
    arguments = {"steps": 2, "size": "toy", "fault": False, "extra": []} | how
    given["status"] = trial.main(upref.get("up_dapo"), tmp_path / "out", **arguments)
    return given


def test_verl_is_ended_at_the_limit_that_is_asked_for(monkeypatch, tmp_path, capsys):
    """It was not passed on: a trial trained until the caller's limit killed its judge."""
    assert started(monkeypatch, tmp_path, limit=340.0)["limit"] == 340.0
    assert (tmp_path / "out/gpu.json").exists()


def test_a_rehearsal_on_a_cpu_writes_no_row_of_a_gpu(monkeypatch, tmp_path, capsys):
    given = started(monkeypatch, tmp_path, cpu=True)
    assert "trainer.device=cpu" in given["command"]
    assert given["env"]["VERL_PLATFORM"] == "cpu"
    assert not (tmp_path / "out/gpu.json").exists()
    found = json.loads((tmp_path / "out/cpu.json").read_text())
    assert found["gpu"] == "none"


def test_a_replay_that_takes_too_long_is_reported(tmp_path):
    found = trial.replayed(tmp_path, "up_dapo", limit=0.01)
    assert "took longer" in found["text"] and "report" not in found
    assert any("no recorded step" in w for w in wrong(rows(), found))


@pytest.mark.nightly
@pytest.mark.smoke
@pytest.mark.skipif(
    not importlib.util.find_spec("vllm"),
    reason="vLLM is not installed (`repro/venv.sh smoke`)",
)
def test_the_trial_is_rehearsed_on_a_cpu_to_its_last_line(tmp_path):
    command = [sys.executable, "-m", "repro.with_verl.gpu_trial", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--cpu", "--steps", "2"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    [row] = json.loads((tmp_path / "out/cpu.json").read_text())["rows"]["verl-toy"]
    assert row["wrong"] == [] and len(row["steps"]) == 2
    assert set(trial.causes(row["replay"])) == {"agree"}
    assert "loss: it is the token-mean of up_dapo's terms" in row["replay"]["text"]


# ---- SmolLM2 -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (" 125\n", 1.0),
        (" 125\n7", 1.0),
        (" 125", 0.0),  # its line did not end
        ("125\n", 0.0),
        (" 0125\n", 0.0),
        (" 126\n", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_of_addition_is_that_of_the_task(answer, score):
    assert addition.compute_score("addition", answer, "125")["score"] == score


def test_the_problems_of_addition_are_those_of_the_task(tmp_path):
    pandas = pytest.importorskip("pandas")
    addition.make_data(tmp_path / "data.parquet")
    data = pandas.read_parquet(tmp_path / "data.parquet")
    problems = tasks.get("addition").problems("train", addition.PROBLEMS, seed=0)
    assert len(data) == len(problems) == addition.PROBLEMS
    a, b = problems[0].tolist()
    [message] = data.prompt[0]
    assert message["content"] == f"14 + 23 = 37\n{a} + {b} ="
    assert data.reward_model[0]["ground_truth"] == str(a + b)


def test_the_folder_of_smollm2_ends_a_response_with_its_line(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    source = tmp_path / "converted"
    toy.make_model(source)
    monkeypatch.setattr(smollm2, "folder", lambda: source)
    addition.make_model(tmp_path / "model")
    made = tmp_path / "model"
    generation = json.loads((made / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tasks.get("addition").end
    assert (made / "model.safetensors").resolve() == source / "model.safetensors"
    tokenizer = AutoTokenizer.from_pretrained(made)
    messages = [{"role": "user", "content": "14 + 23 = 37\n58 + 67 ="}]
    said = tokenizer.apply_chat_template(messages, tokenize=False)
    assert said == messages[0]["content"]


@pytest.mark.skipif(
    not (smollm2.FOLDER / "provenance.json").exists(),
    reason="`repro/run.sh up_dapo lm` has not converted SmolLM2 here",
)
def test_verl_reads_the_prompts_of_the_task():
    from transformers import AutoTokenizer

    problems = tasks.get("addition").problems("test", 20, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(smollm2.FOLDER)
    texts = [addition.text(a, b) for a, b in problems.tolist()]
    read = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert read == tasks.get("addition").prompts(problems).tolist()


# ---- benchmarks.gpu --check ----------------------------------------------------------
def test_a_look_without_a_package_that_it_reads_versions_with(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert [line.ok for line in check.packages()]
    monkeypatch.setattr(check, "LOOKS", (check.versions,))
    assert check.main() == 1
    assert "lacks  versions: " in capsys.readouterr().out


def test_a_torch_for_which_vllm_is_not_built_is_said(monkeypatch):
    there = {"transformers": "5.11.0", "torch": "2.10.0+cu130", "vllm": "0.24.0"}
    metadata = check.importlib.metadata
    monkeypatch.setattr(metadata, "version", there.__getitem__)
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch==2.11.0", "numpy"])
    said = [line.text for line in check.versions()]
    assert said == [
        f"transformers 5.11.0 is here, and verl 0.9.1 needs {said[0].split('needs ')[1]}",
        "torch 2.10.0 is here, and vLLM 0.24.0 needs torch==2.11.0.",
    ]
    there |= {"transformers": "5.9.0", "torch": "2.11.0+cu130"}
    assert list(check.versions()) == []


def test_a_package_for_another_python_is_said(monkeypatch, tmp_path):
    package = tmp_path / "of_another_python"
    package.mkdir()
    (package / "__init__.py").write_text("import of_another_python.compiled_part")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(check, "COMPILED", ("of_another_python", "is_not_here"))
    [line] = check.compiled()
    assert not line.ok and "compiled_part" in line.text


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
    """In a fresh process, because the patch stays."""
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
    monkeypatch.setenv(EXTERNAL_MODULES, "theirs")
    found = smoke.environment(tmp_path / "log")[EXTERNAL_MODULES]
    ours = "repro.with_verl.cpu.device,upref_frameworks.verl.training"
    assert found == f"{ours},theirs"
