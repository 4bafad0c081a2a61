# SPDX-License-Identifier: Apache-2.0
"""A trainer is watched to its end, whatever becomes of it; with vLLM installed, three
real steps.
"""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import upref

psutil = pytest.importorskip(
    "psutil", reason="`repro/venv.sh smoke` installs what watches a trainer"
)
from repro.with_verl.cpu import smoke, toy  # noqa: E402
from repro.with_verl.place import ROOT  # noqa: E402
from repro.with_verl.run import advice, watch  # noqa: E402

SMOKE = [sys.executable, "-m", "repro.with_verl.cpu.smoke", "up_dapo"]

TRAINER = """
import json, os, subprocess, sys, time
log, plan = sys.argv[1], sys.argv[2]
actor = subprocess.Popen(["bash", "-c", "exec -a 'ray::WorkerDict.update' sleep 600"])
idle = subprocess.Popen(["bash", "-c", "exec -a ray::IDLE sleep 600"])
time.sleep(1)
for step in (1, 2, 3):
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    time.sleep(0.4)  # longer than the watch looks away: two steps at once have no pace
    data = {"training/global_step": step, "critic/score/mean": step / 10, "actor/upref/parity_max_abs": 1e-7}
    print(json.dumps({"step": step, "data": data}), file=open(log, "a"), flush=True)
idle.kill()
if plan == "ends":
    actor.kill()
    sys.exit(0)
if plan == "loses":
    actor.kill()
    actor.wait()
    time.sleep(3)
if plan in ("fails", "loses"):
    sys.exit("ValueError: no such thing")
open(log + ".pid", "w").write(str(actor.pid))
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watch, "LOOK", 0.2)
    monkeypatch.setattr(watch, "BLAME", 1.5)


def trainer(tmp_path, plan, stall=600.0, do=None, asked=9, limit=math.inf):
    """Watch a trainer that follows a plan; return how it ended and its steps.

    It asserts that three steps were told, and that no process of it is left. do: is run
    beside it with the file of its process id.
    """
    script, log = tmp_path / "trainer.py", tmp_path / "log.jsonl"
    script.write_text(TRAINER)
    if do:
        threading.Thread(
            target=do, args=(tmp_path / "log.jsonl.pid",), daemon=True
        ).start()
    told = []
    out = watch.run(
        [sys.executable, str(script), str(log), plan], log, tmp_path / "output",
        env={}, asked=asked, stall=stall, first=600, tell=told.append, limit=limit,
    )  # fmt: skip
    assert [r["step"] for r in told] == [1, 2, 3]
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]
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
    said = advice.cure(tmp_path / "output", tmp_path)
    assert said == "its last error was: ValueError: no such thing"
    (tmp_path / "output").write_text("Training Progress:  17%|#   | 2/12\n")
    said = advice.cure(tmp_path / "output", tmp_path)
    assert said == "its output names no error"


def test_a_trainer_that_ends_because_an_actor_died_names_it(tmp_path):
    out, rows = trainer(tmp_path, "loses")
    assert (
        out.status == 1
        and "failed; the first to go was ray::WorkerDict"
        in smoke.judge(rows, 8, out)[1][0]
    )


def test_a_dead_actor_ends_a_trainer_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "GRACE", 2)
    out, rows = trainer(tmp_path, "hangs", do=kill_when_there)
    assert out.status is None and "ray::WorkerDict" in out.why and "died" in out.why
    assert "after step 3" in smoke.judge(rows, 8, out)[1][0]


def test_a_trainer_that_is_done_is_ended_and_not_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "GRACE", 0)
    monkeypatch.setattr(watch, "END", 4)
    out, rows = trainer(tmp_path, "hangs", do=kill_when_there, asked=3)
    assert (
        out.status is None
        and "after its last step" in out.why
        and smoke.judge(rows, 3, out)[1] == []
    )


def test_no_step_for_long_ends_it_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "crowd", lambda: 1.0)
    out, _ = trainer(tmp_path, "hangs", stall=4)
    assert out.status is None and "no step for" in out.why
    left = [
        p
        for p in psutil.process_iter(["status"])
        if p.pid == int((tmp_path / "log.jsonl.pid").read_text())
    ]
    assert all(p.info["status"] == "zombie" for p in left)  # at most not yet reaped


def test_a_limit_ends_it_and_what_it_logged_is_judged(tmp_path):
    out, rows = trainer(tmp_path, "hangs", limit=6)
    assert out.status is None and out.why == "its limit of 6 s"
    wrong = smoke.judge(rows, 9, out)[1]
    assert wrong[0] == "ended: its limit of 6 s, after step 3"


def test_a_run_that_waits_for_what_does_not_come_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "IDLE", 3)
    out, _ = trainer(tmp_path, "hangs")
    assert out.status is None and "hardly any work" in out.why


def test_a_full_disk_is_said_in_one_sentence(tmp_path):
    output = tmp_path / "output"
    output.write_text(
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 1024 vs 918\n"
    )
    assert "the disk is full" in advice.cure(output, tmp_path)
    output.write_text("ValueError: no such thing\n")
    assert "no such thing" in advice.cure(output, tmp_path)


def test_a_line_half_written_is_not_a_step(tmp_path):
    log = tmp_path / "log"
    assert watch.steps(log) == []
    log.write_text('{"step": 1, "data": {"training/global_step": 1}}\n{"step": 2, "da')
    assert [r["step"] for r in watch.steps(log)] == [1]


def test_a_flat_score_and_a_missing_plug_in_are_wrong():
    def row(i, score):
        return {"step": i, "data": {smoke.SCORE: score}}

    wrong = smoke.judge(
        [row(i, 0.1) for i in range(1, 25)], 24, watch.Outcome(0, "", 1.0)
    )[1]
    assert len(wrong) == 2 and "did not rise" in wrong[0] and "no parity" in wrong[1]
    assert smoke.judge([], 3, watch.Outcome(1, "", 1.0))[1] == ["step 1 of 3 failed"]
    assert "killed by signal 9" in smoke.judge([], 3, watch.Outcome(-9, "", 1.0))[1][0]


def test_the_toy_task():
    def score(text):
        return toy.compute_score("toy", text, "2")

    assert score("2 2 2 2 2 2 2 2") == {"score": 1.0, "acc": 1.0, "pred": "2"}
    assert (
        score("2 a 2") == {"score": 2 / toy.RESPONSE, "acc": 0.0, "pred": "2"}
        and score("")["score"] == 0
    )
    assert len(set(toy.VOCAB)) == len(toy.VOCAB)


@pytest.mark.verl
def test_verl_accepts_the_settings_and_refuses_a_typing_error():
    pytest.importorskip(
        "verl.workers.config", reason="`repro/venv.sh verl` installs it"
    )
    # one of each aggregation: nothing else depends on the objective
    for name in ("up_dapo", "up_gspo", "dr_grpo"):
        smoke.dry_run(upref.get(name))
    for line, said in (
        ("clip_rato=0.3", "did you mean .*clip_ratio"),
        ("loss_agg_mode=token-maen", "verl refuses"),
    ):
        with pytest.raises(upref.InputError, match=said):
            smoke.dry_run(upref.get("up_dapo"), [f"actor_rollout_ref.actor.{line}"])


@pytest.mark.skipif(
    not importlib.util.find_spec("verl"),
    reason="`repro/venv.sh verl` installs what reads them",
)
def test_a_wrong_override_starts_nothing_and_removes_nothing(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    command = [*SMOKE, "--out", str(tmp_path), "trainer.no_such=1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 2 and "no_such" in done.stderr.splitlines()[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def real(test):
    """Mark a test as slow and of the trainer, and skip it without vLLM."""
    no_vllm = not importlib.util.find_spec("vllm")
    skip = pytest.mark.skipif(
        no_vllm, reason="no vLLM here: `repro/venv.sh smoke` installs it"
    )
    return pytest.mark.slow(pytest.mark.smoke(skip(test)))


@real
def test_three_real_steps_of_verl_and_vllm(tmp_path):
    """With settings of the GPU scales: packed rows, dynamic batches, recomputation,
    offloading, a reference.

    Each optimizer step is recorded, with vLLM's own log-probabilities, and replayed.
    """
    from upref.replay import gap, loss, read_steps

    settings = [
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.0",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=128",
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
    ]
    recorded = {"UPREF_REPLAY": str(tmp_path / "dumps"), "UPREF_REPLAY_EVERY": "1"}
    done = subprocess.run(
        [*SMOKE, "--steps", "3", "--out", tmp_path / "run", *settings], cwd=ROOT,
        env=os.environ | recorded, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (
        found["steps"] == 3
        and 0 < found["parity_max_abs"] < 1e-4
        and found["wrong"] == []
    )
    assert found["normalizer"] == pytest.approx([1, 1, 1], abs=1e-4)
    batches = list(read_steps([tmp_path / "dumps"]))
    assert len(batches) == 3 * smoke.PROMPTS // smoke.MINI
    for batch in batches:
        sampler = gap(batch)
        assert sampler.cause in ("agree", "two_policies"), str(sampler.findings)
        judged = loss(batch, "up_dapo")
        assert judged.found == judged.expected and judged.gradient == judged.expected, (
            str(judged.findings)
        )
