# SPDX-License-Identifier: Apache-2.0
"""A trainer is watched to its end, whatever becomes of it; with vLLM installed, three real steps."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import upref

psutil = pytest.importorskip("psutil", reason="`repro/venv.sh smoke` installs what watches a trainer")
WITH_VERL = Path(__file__).parents[1] / "repro" / "with_verl"


def load(name):
    spec = importlib.util.spec_from_file_location(name, WITH_VERL / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


watch, toy, smoke = (load(name) for name in ("watch", "toy", "smoke"))

TRAINER = """
import json, os, subprocess, sys, time
log, plan = sys.argv[1], sys.argv[2]
actor = subprocess.Popen(["bash", "-c", "exec -a 'ray::WorkerDict.update' sleep 600"])
idle = subprocess.Popen(["bash", "-c", "exec -a ray::IDLE sleep 600"])
time.sleep(3)
for step in (1, 2, 3):
    data = {"training/global_step": step, "critic/score/mean": step / 10, "actor/upref/parity_max_abs": 1e-7}
    print(json.dumps({"step": step, "data": data}), file=open(log, "a"), flush=True)
idle.kill()
if plan == "ends":
    actor.kill()
    sys.exit(0)
if plan == "fails":
    sys.exit("ValueError: no such thing")
open(log + ".pid", "w").write(str(actor.pid))
time.sleep(600)
"""


def trainer(tmp_path, plan, stall=600.0, do=None):
    script, log = tmp_path / "trainer.py", tmp_path / "log.jsonl"
    script.write_text(TRAINER)
    if do:
        threading.Thread(target=do, args=(tmp_path / "log.jsonl.pid",), daemon=True).start()
    told = []
    out = watch.run(
        [sys.executable, str(script), str(log), plan], log, tmp_path / "output", env={}, stall=stall, first=600,
        tell=told.append,
    )  # fmt: skip
    assert [r["step"] for r in told] == [1, 2, 3]
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not left
    return out, watch.steps(log)


def kill_when_there(pid_file):
    while not pid_file.exists() or not pid_file.read_text():
        time.sleep(0.1)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_a_trainer_that_ends_is_left_to_end(tmp_path):
    out, rows = trainer(tmp_path, "ends")
    assert (out.status, out.why) == (0, "") and smoke.judge(rows, 3, out)[1] == []
    report, wrong = smoke.judge(rows, 4, out)  # status 0, and yet not all steps
    assert wrong == ["step 4 of 4 failed"] and "parity_max_abs 1.0e-07" in report


def test_a_trainer_that_fails_says_so(tmp_path):
    out, rows = trainer(tmp_path, "fails")
    assert out.status == 1 and smoke.judge(rows, 8, out)[1] == ["step 4 of 8 failed"]
    assert smoke.error_in(tmp_path / "output") == "ValueError: no such thing"


def test_a_dead_actor_ends_a_trainer_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "GRACE", 2)
    out, rows = trainer(tmp_path, "hangs", do=kill_when_there)
    assert out.status is None and "ray::WorkerDict" in out.why and "died" in out.why
    assert "after step 3" in smoke.judge(rows, 8, out)[1][0]


def test_no_step_for_long_ends_it_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "crowd", lambda: 1.0)
    out, _ = trainer(tmp_path, "hangs", stall=4)
    assert out.status is None and "no step for" in out.why
    assert not psutil.pid_exists(int((tmp_path / "log.jsonl.pid").read_text()))


def test_a_run_that_waits_for_what_does_not_come_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "IDLE", 3)
    out, _ = trainer(tmp_path, "hangs")
    assert out.status is None and "nobody worked" in out.why


def test_a_full_disk_is_said_in_one_sentence(tmp_path):
    output = tmp_path / "output"
    output.write_text("RuntimeError: [enforce fail at x.cc:680] . PytorchStreamWriter failed writing file\n")
    assert "the disk is full" in smoke.full_disk(output) and str(tmp_path) in smoke.full_disk(output)
    output.write_text("ValueError: no such thing\n")
    assert smoke.full_disk(output) == ""


def test_a_line_half_written_is_not_a_step(tmp_path):
    log = tmp_path / "log"
    assert watch.steps(log) == []
    log.write_text('{"step": 1, "data": {"training/global_step": 1}}\n{"step": 2, "da')
    assert [r["step"] for r in watch.steps(log)] == [1]


def test_a_score_that_does_not_rise_and_a_missing_plug_in_are_wrong():
    row = lambda i, score: {"step": i, "data": {smoke.SCORE: score}}
    wrong = smoke.judge([row(i, 0.1) for i in range(1, 25)], 24, watch.Outcome(0, "", 1.0))[1]
    assert len(wrong) == 2 and "did not rise" in wrong[0] and "no parity" in wrong[1]
    assert smoke.judge([], 3, watch.Outcome(1, "", 1.0))[1] == ["step 1 of 3 failed"]


def test_the_toy_task():
    assert toy.compute_score("toy", "2 2 2 2 2 2 2 2", "2") == 1
    assert toy.compute_score("toy", "2 a 2", "2") == 2 / toy.RESPONSE and toy.compute_score("toy", "", "2") == 0
    assert len(set(toy.VOCAB)) == len(toy.VOCAB)


@pytest.mark.verl
def test_verl_accepts_the_settings_and_refuses_a_typing_error():
    pytest.importorskip("verl.workers.config", reason="`repro/venv.sh verl` installs it")
    for name in ("up_dapo", "up_gspo", "dr_grpo"):  # one of each aggregation: nothing else depends on the objective
        smoke.dry_run(upref.get(name))
    for key, wrong in (("clip_rato", "0.3"), ("loss_agg_mode", "token-maen")):
        with pytest.raises(upref.InputError, match=f"verl refuses .*{key if key == 'clip_rato' else wrong}"):
            smoke.dry_run(upref.get("up_dapo"), [f"actor_rollout_ref.actor.{key}={wrong}"])


def real(test):
    no_vllm = not importlib.util.find_spec("vllm")
    skip = pytest.mark.skipif(no_vllm, reason="no vLLM here: `repro/venv.sh smoke` installs it")
    return pytest.mark.slow(pytest.mark.smoke(skip(test)))


@real
def test_three_real_steps_of_verl_and_vllm(tmp_path):
    done = subprocess.run(
        [sys.executable, WITH_VERL / "smoke.py", "up_dapo", "--steps", "3", "--out", tmp_path / "run"],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["steps"] == 3 and 0 < found["parity_max_abs"] < 1e-4 and found["wrong"] == []


@real
@pytest.mark.parametrize("victim", ["VLLM::EngineCore", "ray::WorkerDict", "ray::TaskRunnerV1"])
def test_a_killed_process_ends_the_run_which_then_goes_on_from_its_checkpoint(tmp_path, victim):
    command = [sys.executable, WITH_VERL / "smoke.py", "up_dapo", "--steps", "4", "--out", tmp_path / "run"]
    first = subprocess.Popen([*command, "trainer.save_freq=1"], stdout=subprocess.PIPE, text=True)
    said = ""
    while "step   2" not in said:
        line = first.stdout.readline()
        assert line, said
        said += line
    mine = psutil.Process(first.pid).children(recursive=True)
    [p] = [p for p in mine if " ".join(p.cmdline()).startswith(victim)]
    p.kill()
    said += first.communicate(timeout=300)[0]  # the watch ends it within GRACE and what stopping takes
    assert first.returncode == 1 and ("died" in said or "step 3 of 4 failed" in said or "step 4 of 4 failed" in said)
    done = subprocess.run([*command, "--again"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "step   1 " not in done.stdout and "step   4 " in done.stdout, done.stdout
