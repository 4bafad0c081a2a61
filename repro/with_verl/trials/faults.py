# SPDX-License-Identifier: Apache-2.0
"""What a real run does when something breaks: one smoke run, broken in six ways, that
goes on after each of them.

    python -m repro.with_verl.trials.faults [--out DIR] [--keep] [FAULT...]

A fault strikes after a step of its own start; then the run must end by itself, say why,
and go on from its last checkpoint. Reports the seconds from the fault to the end;
`--keep` writes them into results/faults.json. Exit status 0: all ended within LIMIT and
went on. Needs `unshare` (user namespaces) for the full disk, a small tmpfs.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from repro.with_verl.cpu import toy
from repro.with_verl.place import RESULTS, ROOT, pythonpath
from upref.errors import InputError
from upref.files import own_folder, write_atomically

LIMIT = 60  # seconds from a fault to the end of the run
VICTIMS = {
    "engine": "VLLM::EngineCore",
    "worker": "ray::WorkerDict",
    "trainer": "ray::TaskRunnerV1",
    "driver": None,
}
FAULTS = ("reward", *VICTIMS, "disk")
HANG = "UPREF_HANG"  # the file whose being there makes the reward hang


def compute_score(*args, **kwargs) -> dict:
    """The toy's reward, which hangs while the file is there."""
    while os.path.exists(os.environ[HANG]):
        time.sleep(1)
    return toy.compute_score(*args, **kwargs)


def strike(fault: str, smoke: psutil.Process, out: Path):
    if fault == "reward":
        Path(os.environ[HANG]).touch()
    elif fault == "disk":
        resize(
            out / "checkpoints", shutil.disk_usage(out / "checkpoints").used + 100_000
        )
    else:
        started = [(p, " ".join(p.cmdline())) for p in smoke.children(recursive=True)]
        name = VICTIMS[fault] or "verl.trainer.main_ppo"
        [victim] = [
            p for p, line in started if line.startswith(name) or f" -m {name} " in line
        ]
        victim.kill()


def heal(fault: str, out: Path):
    if fault == "reward":
        Path(os.environ[HANG]).unlink()
    elif fault == "disk":
        resize(out / "checkpoints", 1 << 30)


def resize(folder: Path, size: int):
    subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)


def once(fault: str, out: Path, steps: int, again: bool) -> dict:
    """A start, two steps, the fault, the end."""
    command = [
        sys.executable,
        "-m",
        "repro.with_verl.cpu.smoke",
        "up_dapo",
        "--steps",
        str(steps),
        "--out",
        str(out),
        *(["--again"] if again else []),
        # or the old ones make room on a full disk
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=100",
        "reward.custom_reward_function.path=pkg://repro.with_verl.trials.faults",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": pythonpath()},
    )
    logged, said, struck = [], [], None
    assert process.stdout
    for line in process.stdout:
        print(line, end="", flush=True)
        said.append(line.strip())
        if step := re.match(r" *step +(\d+) ", line):
            logged.append(int(step[1]))
            if len(logged) == 2 and fault:
                strike(fault, psutil.Process(process.pid), out)
                struck = time.monotonic()
    status = process.wait()
    seconds = None if struck is None else round(time.monotonic() - struck, 1)
    here = f"{ROOT}/"  # a result names no place of this machine
    words = [x.replace(here, "") for x in said if x.startswith(("WRONG", "verl: "))]
    return {
        "fault": fault,
        "steps": logged,
        "seconds_to_end": seconds,
        "status": status,
        "said": words,
    }


def main(faults: list[str], out: Path) -> list[dict]:
    own_folder(out, empty=True)
    (out / "checkpoints").mkdir()
    if "disk" in faults:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", out / "checkpoints"],
            check=True,
        )
    os.environ[HANG] = str(out / "hang")
    steps = 5 * len(faults) + 2
    found: list[dict] = []
    for fault in faults:
        found.append(once(fault, out, steps, again=bool(found)))
        heal(fault, out)
    last = max(x for row in found for x in row["steps"])
    return [*found, once("", out, last + 2, again=True)]


def judge(found: list[dict]) -> list[str]:
    """What is wrong."""
    wrong = []
    for before, row in zip([None, *found], found, strict=False):
        name = row["fault"] or "the last start"
        if row["fault"] and not (row["seconds_to_end"] or 1e9) <= LIMIT:
            wrong.append(f"{name}: ended after {row['seconds_to_end']} s")
        if row["fault"] and not (row["status"] == 1 and row["said"]):
            wrong.append(f"{name}: status {row['status']}, said {row['said']}")
        # a step is saved before it is logged, so that one may have been saved only
        if before and not (
            row["steps"] and 1 < row["steps"][0] <= before["steps"][-1] + 2
        ):
            wrong.append(
                f"{name}: did not go on from a checkpoint: {row['steps']} after {before['steps']}"
            )
    if not found[-1]["fault"] and found[-1]["status"] != 0:
        wrong.append(f"the run was not whole at the end: {found[-1]['said']}")
    return wrong


def keep(found: list[dict]):
    """Into results/faults.json: a run a line, in place of those whose faults it has all
    had.
    """
    path, new = RESULTS / "faults.json", {row["fault"] for row in found if row["fault"]}
    old = json.loads(path.read_text()) if path.exists() else []
    runs = [
        run for run in old if not new >= {row["fault"] for row in run if row["fault"]}
    ] + [found]
    write_atomically(path, "[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("faults", nargs="*", choices=(*FAULTS, []))
    parser.add_argument("--out", type=Path, default=ROOT / "repro" / "out" / "faults")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    chosen = args.faults or list(FAULTS)
    if "disk" in chosen and "UPREF_UNSHARED" not in os.environ:
        # a mount that nobody else sees, and that goes with this process
        os.environ["UPREF_UNSHARED"] = "1"
        os.execvp(
            "unshare",
            [
                "unshare",
                "-rm",
                sys.executable,
                "-m",
                "repro.with_verl.trials.faults",
                *sys.argv[1:],
            ],
        )
    try:
        found = main(chosen, args.out.resolve())
    except InputError as e:
        print(f"faults: {e}", file=sys.stderr)
        sys.exit(2)
    wrong = judge(found)
    if args.keep:
        keep(found)
    print("\n".join(map(json.dumps, found)), "\n".join(f"WRONG  {w}" for w in wrong))
    sys.exit(bool(wrong))
