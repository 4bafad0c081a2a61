# SPDX-License-Identifier: Apache-2.0
"""The launcher with verl's real trainer, on this CPU: what a run of days meets.

    python -m repro.with_verl.trials.restart [--keep] [TRIAL...]

terminated   SIGTERM after three steps: status 143, nothing left running; the same command goes on and finishes
sabotaged    a loss that is a tenth too large, with parity.on_fail=warn: it trains to its end, and is noticed
nodes        two Ray nodes on this machine, each with one logical GPU, and a run over both

`--keep` writes results/restart.json. Exit status 1 where a trial did not show what it
should.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from repro.with_verl.health import STEPS as STEPS_KEPT
from repro.with_verl.machine.here import CLUSTER
from repro.with_verl.place import RESULTS, ROOT, RUNS, pythonpath
from repro.with_verl.run import records
from upref.errors import InputError
from upref.files import write_atomically

LAUNCH = [sys.executable, "-m", "repro.with_verl.run.launch", "up_dapo", "cpu"]
STEPS = "trainer.total_training_steps="
TWO = [
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
]


def launch(*settings: str, end_after: int | None = None, **env: str) -> dict:
    """One start; SIGTERM to the launcher, as SLURM sends it, after so many of its
    steps.
    """
    given = os.environ | {"PYTHONPATH": pythonpath(), "PYTHONUNBUFFERED": "1"} | env
    process = subprocess.Popen(
        [*LAUNCH, *settings], cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True
    )
    steps: list[int] = []
    last = folder = ""
    assert process.stdout
    started: list[psutil.Process] = []
    for line in process.stdout:
        if found := re.match(r"starting verl; checkpoints and logs go to (.*)", line):
            folder = found[1]
        if found := re.match(r" *step +(\d+) of \d+ ", line):
            print(line, end="", flush=True)
            steps.append(int(found[1]))
            if end_after and len(steps) == end_after:
                started = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGTERM)
        last = line.strip() or last
    status = process.wait()
    left = [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    print(last, flush=True)
    words = last.replace(f"{ROOT}/", "").replace(sys.executable, "python")
    return {
        "settings": list(settings),
        "steps": steps,
        "status": status,
        "last": words,
        "left": len(left),
        "folder": Path(folder).name,
    }


def terminated() -> dict:
    asked = (f"{STEPS}8", "trainer.save_freq=2", "name=restart-terminated")
    first = launch(*asked, end_after=3)
    time.sleep(3)
    second = launch(*asked)
    whole = [
        r["step"] for r in records.training(records.merged(RUNS / "restart-terminated"))
    ]
    wrong = []
    if first["status"] != 143 or "SIGTERM" not in first["last"] or first["left"]:
        wrong.append("the launcher did not end as SIGTERM asks")
    if (
        second["status"]
        or not second["steps"]
        or not 1 < second["steps"][0] <= first["steps"][-1] + 1
    ):
        wrong.append("the same command did not go on from a checkpoint")
    if whole != list(range(1, 9)):
        wrong.append(f"steps.jsonl is not whole: {whole}")
    return {"starts": [first, second], "wrong": wrong}


def sabotaged() -> dict:
    run = launch(
        f"{STEPS}3",
        "name=restart-sabotaged",
        VERL_USE_EXTERNAL_MODULES="repro.with_verl.trials.sabotage",
    )
    rows = records.training(records.merged(RUNS / "restart-sabotaged"))
    alarms = [r["data"].get("actor/upref/parity_alarms", 0) for r in rows]
    factors = [r["data"].get("actor/upref/normalizer") for r in rows]
    wrong = []
    if run["status"] or len(rows) != 3:
        wrong.append("it did not train to its end")
    kept = len(list((RUNS / "restart-sabotaged" / STEPS_KEPT).glob("*.npz")))
    told = [x for x in factors if x is not None]
    if (
        not alarms
        or not max(alarms) > 0
        or not kept
        or not told
        or any(abs(x - 1.1) > 1e-3 for x in told)
    ):
        wrong.append("nobody noticed")
    return {
        "starts": [run],
        "alarms": alarms,
        "factors": factors,
        "kept": kept,
        "wrong": wrong,
    }


def nodes() -> dict:
    """Each node its own raylet; they share this machine's cores and memory."""
    from repro.with_verl.cpu import smoke

    if CLUSTER.exists():
        raise InputError(
            f"a Ray cluster runs here ({CLUSTER} names it), and this trial would replace its file: stop it first."
        )
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    env = os.environ | smoke.environment(RUNS / "unused") | {"PYTHONPATH": pythonpath()}
    env.pop("UPREF_FORK")
    # else a token must be made, and be on every machine
    env["RAY_AUTH_MODE"] = "disabled"
    common = [
        "--num-gpus=1",
        "--num-cpus=16",
        "--object-store-memory=300000000",
        "--disable-usage-stats",
    ]
    port = "6399"
    started = [
        ["start", "--head", f"--port={port}", "--include-dashboard=false", *common],
        ["start", f"--address=127.0.0.1:{port}", *common],
    ]
    ours: list[psutil.Process] = []
    try:
        for arguments in started:
            before = {p.pid for p in psutil.process_iter()}
            subprocess.run(
                [*ray, *arguments],
                env=env,
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=300,
            )
            ours += [
                p
                for p in psutil.process_iter(["cmdline"])
                if p.pid not in before and mine(p)
            ]
        run = launch(
            f"{STEPS}2",
            "name=restart-nodes",
            *TWO,
            RAY_ADDRESS=f"127.0.0.1:{port}",
            RAY_AUTH_MODE="disabled",
        )
    finally:
        for p in ours:
            with contextlib.suppress(psutil.Error):
                p.kill()
        # or the next driver would look for it
        CLUSTER.unlink(missing_ok=True)
    wrong = (
        []
        if run["status"] == 0 and len(run["steps"]) == 2
        else ["it did not train over two nodes"]
    )
    return {"starts": [run], "wrong": wrong}


def mine(p: psutil.Process) -> bool:
    line = " ".join(p.info["cmdline"] or [])
    return bool(re.search(r"raylet|gcs_server|/ray/", line))


TRIALS = {
    "terminated": terminated,
    "sabotaged": sabotaged,
    "nodes": nodes,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trials", nargs="*", choices=[*TRIALS, []])
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    path = RESULTS / "restart.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    bad = False
    for name in args.trials or TRIALS:
        shutil.rmtree(RUNS / f"restart-{name}", ignore_errors=True)
        try:
            result = TRIALS[name]()
        except InputError as e:
            print(f"restart: {e}", file=sys.stderr)
            sys.exit(2)
        bad |= bool(result["wrong"])
        print(f"{name}: {'; '.join(result['wrong']) or 'as it should be'}", flush=True)
        found[name] = result
        if args.keep:
            rows = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
            write_atomically(path, "{\n" + ",\n".join(rows) + "\n}\n")
    sys.exit(bad)
