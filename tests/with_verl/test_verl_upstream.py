# SPDX-License-Identifier: Apache-2.0
"""No drift from verl's scripts unseen, no argument that vLLM does not have, and the batch file is the command."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import upref
from repro.with_verl import upstream
from repro.with_verl.config import compose as c
from repro.with_verl.config import vllm_args
from repro.with_verl.place import ROOT

SLURM = ROOT / "repro" / "with_verl" / "slurm.sbatch"


def test_every_difference_from_verls_scripts_has_its_reason(capsys):
    assert upstream.main([]) == 0
    out = capsys.readouterr().out
    assert out.count("## paper_") == len(upstream.SCRIPTS) == 4
    for fact in upstream.facts().values():
        assert len(fact["commit"]) == 40 and len(fact["settings"]) > 30


def test_a_difference_that_nobody_has_explained_is_told(monkeypatch, capsys):
    facts = upstream.facts()
    facts["paper_math"]["settings"] |= {"actor_rollout_ref.actor.new_setting": "7", "trainer.save_freq": "3"}
    monkeypatch.setattr(upstream, "facts", lambda: facts)
    assert upstream.main([]) == 1
    out = capsys.readouterr().out
    assert "| actor_rollout_ref.actor.new_setting | 7 | (not set) |  |" in out and "2 differences have no reason" in out


SCRIPT = """
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
n=${N:-$((1024 * 2))}
MODEL=(a.b="$DEVICE" +c.d=${n})
LAUNCH=(python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${MODEL[@]}" e.f='["console"]' "$@"
"""


def test_a_script_is_read_without_running_a_program(tmp_path):
    assert upstream.settings_of(SCRIPT) == {"a.b": "gpu", "c.d": "2048", "e.f": '["console"]'}
    file = tmp_path / "made"
    for line in (f"touch {file}", f"/bin/touch {file}", f"echo > {file}"):
        with pytest.raises(upref.InputError, match="hands nothing to verl"):
            upstream.settings_of(f"set -e\n{line}\n{SCRIPT}")
    assert not file.exists()


def test_the_scales_name_the_commit_that_was_recorded():
    commits = {f["commit"][:8] for f in upstream.facts().values()}
    for name in c.scale_names():
        for _, source in c.load_scale(name).values.values():
            for repository in ("verl-recipe ", "verl "):
                if f"{repository}" in source and ".sh" in source:
                    assert any(commit in source for commit in commits), source


def test_every_scale_hands_vllm_what_it_knows():
    known = vllm_args.known()
    assert {"max_model_len", "enforce_eager", "mm_processor_cache_gb"} <= known
    assert "disable_mm_preprocessor_cache" not in known  # the example of 2025 had it
    facts = json.loads(vllm_args.FACTS.read_text())
    pin = (ROOT / "repro/requirements/gpu.txt").read_text()
    assert facts["wheel"].split("-")[1] == pin.split("\nvllm==")[1].split()[0]
    for name in c.scale_names():
        for key in c.load_scale(name).values:
            head, _, argument = key.lstrip("+").partition("engine_kwargs.vllm.")
            assert not argument or argument in known, (name, head)


def test_the_argument_names_are_read_from_the_source():
    source = "class EngineArgs:\n    model: str = 'a'\n    _hidden: int = 1\n\nclass Other:\n    x: int = 1\n"
    assert vllm_args.names(source) == ["model"]


STAND_IN = """#!/bin/bash
echo "$0 $*" >> {log}
[[ "$*" == *run.launch* ]] || exit 0
trap 'exit 143' TERM
for i in {{1..100}}; do read -t 0.1 <> <(:) || true; done
"""


@pytest.fixture
def slurm(tmp_path):
    """A cluster of two nodes whose programs write down how they are called."""
    log = tmp_path / "called"
    for name in ("srun", "sleep", "python"):
        (tmp_path / name).write_text(STAND_IN.format(log=log))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "scontrol $*" >> {log}\n[[ $1 != show ]] || echo "n1\nn2"\n')
    (tmp_path / "scontrol").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "UPREF_PYTHON": str(tmp_path / "python")}
    env |= {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    start = lambda *a, **more: subprocess.Popen(["bash", str(SLURM), *a], env=env | more)
    called = lambda: log.read_text().splitlines() if log.exists() else []
    return start, called


def wait_for(called, word):
    until = time.monotonic() + 30
    while not any(word in line for line in called()):
        assert time.monotonic() < until, called()
        time.sleep(0.1)
    return next(line for line in called() if word in line)


def test_the_batch_file_is_the_same_command_and_sigterm_puts_it_back(slurm):
    start, called = slurm
    job = start("up_dapo", "gpu8", "seed=2", SLURM_JOB_NUM_NODES="1", SLURM_ARRAY_TASK_ID="")
    line = wait_for(called, "run.launch")
    assert line.endswith("-m repro.with_verl.run.launch up_dapo gpu8 seed=2 trainer.nnodes=1")
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 143 and "scontrol requeue 7" in called()
    assert not any("srun" in x for x in called())


def test_over_two_nodes_it_starts_ray_on_both(slurm):
    start, called = slurm
    job = start("up_dapo", "paper", SLURM_JOB_NUM_NODES="2", SLURM_ARRAY_TASK_ID="3")
    line = wait_for(called, "run.launch")
    assert line.endswith("up_dapo paper trainer.nnodes=2 seed=3")
    ray = sorted((x for x in called() if "srun" in x), key=lambda x: "-w n1" not in x)  # both were started with &
    assert len(ray) == 2 and "-w n1" in ray[0] and "--head" in ray[0]
    assert "-w n2" in ray[1] and "--address=n1:20007" in ray[1]
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 143


def test_the_documented_commands_have_their_programs():
    """`ray` is on no PATH: each indented command of PAPER.md begins with what there is."""
    text = (ROOT / "repro/with_verl/PAPER.md").read_text()
    commands = [line.strip().split() for line in text.splitlines() if line.startswith("    ")]
    assert len(commands) >= 8
    for first, *rest in commands:
        first = rest[0] if first.startswith("RAY_ADDRESS=") else first
        assert first in ("bash", ".venv-gpu/bin/python", ".venv-gpu/bin/ray") or (ROOT / first).exists(), first
        for word in rest:
            if word.startswith("repro.with_verl."):
                assert (ROOT / Path(*word.split("."))).with_suffix(".py").exists(), word
