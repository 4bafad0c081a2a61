# SPDX-License-Identifier: Apache-2.0
"""No argument that vLLM does not have, and the batch file is the command."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from repro.with_verl.config import scales, vllm_args
from repro.with_verl.place import ROOT
from tests.support.hanging import HANGING

SLURM = ROOT / "repro" / "with_verl" / "slurm.sbatch"


def test_every_scale_hands_vllm_what_it_knows():
    known = vllm_args.known()
    assert {"max_model_len", "enforce_eager", "mm_processor_cache_gb"} <= known
    assert "disable_mm_preprocessor_cache" not in known  # the example of 2025 had it
    facts = json.loads(vllm_args.FACTS.read_text())
    pin = (ROOT / "repro/requirements/gpu.txt").read_text()
    assert facts["wheel"].split("-")[1] == pin.split("\nvllm==")[1].split()[0]
    for name in scales.scale_names():
        for key in scales.load_scale(name).values:
            head, _, argument = key.lstrip("+").partition("engine_kwargs.vllm.")
            assert not argument or argument in known, (name, head)


def test_the_argument_names_are_read_from_the_source():
    source = "class EngineArgs:\n    model: str = 'a'\n    _hidden: int = 1\n\nclass Other:\n    x: int = 1\n"
    assert vllm_args.names(source) == ["model"]


PROGRAM = """#!/bin/bash
echo "${{0##*/}} $*" >> {log}
case "${{0##*/}} $*" in
    "python "*" status") echo " 1 node_a"; [[ $(grep -c "^srun" {log}) -lt 2 ]] || echo " 1 node_b" ;;
    "scontrol show"*) printf 'n1\\nn2\\n' ;;
    *run.launch* | srun*)
        echo "$$" >> {log}.${{0##*/}}
        trap 'exit {status}' TERM
        for i in {{1..200}}; do read -t 0.05 <> <(:) || true; done ;;
esac
"""


@pytest.fixture
def slurm(tmp_path):
    """Make a cluster of two nodes: its programs write down how they are called, and its
    sbatch signals as SLURM's does.
    """
    log = tmp_path / "called"

    def programs(status=143):
        for name in ("srun", "sleep", "python", "scontrol"):
            (tmp_path / name).write_text(PROGRAM.format(log=log, status=status))
            (tmp_path / name).chmod(0o755)

    programs()
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "UPREF_PYTHON": str(tmp_path / "python"),
    }
    env |= {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }

    def start(*a, **more):
        return subprocess.Popen(["bash", str(SLURM), *a], env=env | more)

    def called():
        return log.read_text().splitlines() if log.exists() else []

    def time_is_nearly_up(job):
        """Signal the job as sbatch does near its time limit.

        man sbatch, --signal: B: signals the batch shell alone; without it all job
        steps, but not the shell.
        """
        [asked] = re.findall(r"^#SBATCH --signal=(\S+)$", SLURM.read_text(), re.M)
        where, _, name = asked.rpartition(":")
        number = getattr(signal, f"SIG{name.partition('@')[0]}")
        pids = [job.pid] if where == "B" else pids_of(Path(f"{log}.srun"))
        for pid in pids:
            os.kill(pid, number)

    yield start, called, time_is_nearly_up, programs
    for file in (Path(f"{log}.srun"), Path(f"{log}.python")):
        for pid in pids_of(file):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pids_of(file):
    """Read the process ids that a program of the cluster wrote down, if any."""
    if not file.exists():
        return []
    return [int(pid) for pid in file.read_text().split()]


def wait_for(called, word):
    """Wait until a call holds this word, and return its line. It fails after HANGING
    seconds.
    """
    until = time.monotonic() + HANGING
    while not any(word in line for line in called()):
        assert time.monotonic() < until, called()
        time.sleep(0.1)
    return next(line for line in called() if word in line)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_the_job_is_requeued_when_its_time_is_nearly_up(slurm, nodes):
    start, called, time_is_nearly_up, _ = slurm
    job = start(
        "up_dapo", "gpu8", "seed=2", SLURM_JOB_NUM_NODES=nodes, SLURM_ARRAY_TASK_ID=""
    )
    line = wait_for(called, "run.launch")
    assert line.endswith(
        f"-m repro.with_verl.run.launch up_dapo gpu8 seed=2 trainer.nnodes={nodes}"
    )
    time.sleep(0.5)
    time_is_nearly_up(job)
    try:
        assert job.wait(8) == 143 and "scontrol requeue 7" in called()
    finally:
        job.kill()
    assert ("srun" in " ".join(called())) == (nodes == "2")


@pytest.mark.parametrize(("status", "again"), [(75, True), (1, False), (2, False)])
def test_a_run_that_died_is_requeued_if_it_got_further(slurm, status, again):
    start, called, _, programs = slurm
    programs(status)
    job = start("up_dapo", "gpu8", SLURM_JOB_NUM_NODES="1", SLURM_ARRAY_TASK_ID="")
    wait_for(called, "run.launch")
    time.sleep(0.5)
    # the stand-in for the launcher then ends with `status`
    job.send_signal(signal.SIGTERM)
    assert job.wait(300) == status and ("scontrol requeue 7" in called()) == again


def test_over_two_nodes_it_starts_ray_on_both_and_waits_for_them(slurm):
    start, called, *_ = slurm
    job = start("up_dapo", "paper", SLURM_JOB_NUM_NODES="2", SLURM_ARRAY_TASK_ID="3")
    line = wait_for(called, "run.launch")
    assert line.endswith("up_dapo paper trainer.nnodes=2 seed=3")
    ray = [x for x in called() if x.startswith("srun")]
    assert len(ray) == 2 and "-w n1" in ray[0] and "--head" in ray[0]
    assert "-w n2" in ray[1] and "--address=n1:20007" in ray[1]
    # the head was up
    assert called().index(ray[1]) > min(
        i for i, x in enumerate(called()) if x.endswith("status")
    )
    job.send_signal(signal.SIGTERM)
    assert job.wait(300) == 143


def test_the_documented_commands_have_their_programs():
    """`ray` is on no PATH: each indented command of PAPER.md begins with what there is."""
    text = (ROOT / "repro/with_verl/PAPER.md").read_text()
    commands = [
        line.strip().split() for line in text.splitlines() if line.startswith("    ")
    ]
    assert len(commands) >= 8
    for first, *rest in commands:
        first = rest[0] if first.startswith("RAY_ADDRESS=") else first
        assert (
            first in ("bash", ".venv-gpu/bin/python", ".venv-gpu/bin/ray")
            or (ROOT / first).exists()
        ), first
        for word in rest:
            if word.startswith("repro.with_verl."):
                assert (ROOT / Path(*word.split("."))).with_suffix(".py").exists(), word
