# SPDX-License-Identifier: Apache-2.0
"""Cases of several ranks: each rank is a process of its own over gloo, and a deadline ends them all.

`python -m upref.conformance.ranks FOLDER RANK` is one of these processes.
"""

import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from upref.conformance.adapter import Adapter, load_adapter
from upref.conformance.cases import CASES, Case
from upref.conformance.runner import Outcome, Status, describe_error, run, train
from upref.errors import InputError
from upref.verify.group import on_loopback

DEADLINE = 180.0  # seconds until the ranks of a case are ended
PAUSE = 0.05  # seconds between two looks at the processes


def run_ranks(
    adapter: Adapter, case: Case, *, seed: int = 0, explain: bool = True, deadline: float = DEADLINE
) -> Outcome:
    """Run a case of several ranks, each in a process of its own, and compare the gradient of the first.

    Args:
        adapter: an instance of a class that a file or a module defines at its top level; each process makes its own.
        case: a case whose `ranks` is above 1.
        seed: of the rows.
        explain: search for the cause of a difference.
        deadline: seconds after which the processes are ended.

    Returns:
        The outcome. Where a process fails, or the deadline passes, the case could not run.

    Raises:
        InputError: the adapter's class is in no file.
    """
    if reason := adapter.supports(case):
        return Outcome(case, Status.SKIPPED, reason)
    settings = dict(adapter.settings(case))
    with tempfile.TemporaryDirectory() as folder:
        task = {"target": _target(adapter), "case": case.id, "seed": seed, "explain": explain, "deadline": deadline}
        (Path(folder) / "task.json").write_text(json.dumps(task), encoding="utf-8")
        reason = _wait([_start(folder, rank, case.ranks) for rank in range(case.ranks)], folder, deadline)
        if reason:
            return Outcome(case, Status.COULD_NOT_RUN, reason, settings)
        outcome: Outcome = pickle.loads((Path(folder) / "outcome").read_bytes())
    return outcome


def _target(adapter: Adapter) -> str:
    kind = type(adapter)
    try:
        return f"{inspect.getfile(kind)}:{kind.__name__}"
    except (TypeError, OSError) as error:
        raise InputError(
            f"{kind.__name__} is defined in no file: a case of ranks makes it in other processes."
        ) from error


def _start(folder: str, rank: int, world: int) -> subprocess.Popen[bytes]:
    where = {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "upref.conformance.ranks", folder, str(rank)]
    with (Path(folder) / f"stderr{rank}").open("wb") as said:
        environment = os.environ | where | on_loopback() | {"PYTHONPATH": path}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said)


def _wait(processes: list[subprocess.Popen[bytes]], folder: str, deadline: float) -> str:
    """Wait for all processes; return why there is no outcome, or "". No process is left behind."""
    end = time.monotonic() + deadline
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > end:
                break
            time.sleep(PAUSE)
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:  # the others may fail because it did
            return "; ".join(f"rank {rank} failed: {_said(Path(folder), rank)}" for rank in failed)
        if any(process.poll() is None for process in processes):
            return f"the ranks had not finished after {deadline:g} seconds"
        return ""
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _said(folder: Path, rank: int) -> str:
    """Return the error of a rank, or the last line that it printed."""
    if (error := folder / f"error{rank}").exists():
        return error.read_text(encoding="utf-8")
    lines = (folder / f"stderr{rank}").read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line[:300] for line in reversed(lines) if line.strip()), "it was ended")


def main(folder: str, rank: int) -> None:
    """Be one rank: the first compares the gradient and writes the outcome; the others only train."""
    torch.set_num_threads(1)
    task: dict[str, Any] = json.loads((Path(folder) / "task.json").read_text(encoding="utf-8"))
    adapter, case = load_adapter(task["target"]), CASES[task["case"]]
    limit = timedelta(seconds=task["deadline"])
    store = f"file://{folder}/group"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case.ranks, timeout=limit)
    if rank:
        train(adapter, case, task["seed"])
    else:
        outcome = run(adapter, case, seed=task["seed"], explain=task["explain"])
        (Path(folder) / "outcome").write_bytes(pickle.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except Exception as failure:
        (Path(sys.argv[1]) / f"error{sys.argv[2]}").write_text(describe_error(failure), encoding="utf-8")
        traceback.print_exc()
        os._exit(1)  # the other ranks may be in a collective: do not wait for them
