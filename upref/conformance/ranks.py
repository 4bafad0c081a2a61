# SPDX-License-Identifier: Apache-2.0
"""Cases of several ranks: each rank is a process of its own over gloo, and a deadline
ends them all.

`python -m upref.conformance.ranks TASK RANK` is one of these processes; TASK is a JSON
object. Its standard output is one JSON object: of the first rank the outcome, of a rank
that fails the error. What it prints goes to stderr.
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import IO, Any

import torch
from torch import distributed as dist

from upref.conformance.adapter import Adapter, load_adapter
from upref.conformance.cases import CASES, Case
from upref.conformance.engines import NO_MOVE
from upref.conformance.runner import (
    Outcome,
    Status,
    describe_error,
    run,
    train_on_other_rank,
)
from upref.errors import InputError
from upref.step.check import StepReport
from upref.verify.group import on_loopback
from upref.verify.report import read_finding

DEADLINE = 180.0  # seconds until the ranks of a case are ended
PAUSE = 0.05  # seconds between two looks at the processes


@dataclass(frozen=True)
class RankProcess:
    """The process of one rank, and the files that it writes to."""

    number: int
    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def report(self) -> dict[str, Any]:
        """Return the JSON object that the process wrote; {} where it wrote none."""
        self.stdout.seek(0)
        try:
            report: dict[str, Any] = json.loads(self.stdout.read())
        except ValueError:
            return {}
        return report

    def error(self) -> str:
        """Return the error that the process reported, or the last line that it printed
        to stderr, up to 300 characters; "it was ended" where there is neither.
        """
        if error := self.report().get("error"):
            return str(error)
        self.stderr.seek(0)
        lines = self.stderr.read().decode("utf-8", errors="replace").split("\n")
        return next(
            (line[:300] for line in reversed(lines) if line.strip()), "it was ended"
        )


def run_ranks(
    adapter: Adapter,
    case: Case,
    *,
    seed: int = 0,
    explain: bool = True,
    deadline: float = DEADLINE,
) -> Outcome:
    """Run a case of several ranks, each in a process of its own, and compare the
    gradient of the first.

    Args:
        adapter: an instance of a class that a file or a module defines at its top
            level; each process makes its own.
        case: a case whose `ranks` is above 1.
        seed: of the rows.
        explain: search for the cause of a difference.
        deadline: seconds after which the processes are ended.

    Returns:
        The outcome. Where a process fails, or the deadline passes, the case could not
        run.

    Raises:
        InputError: the adapter's class is in no file.
    """
    if case.engine and not hasattr(adapter, "move"):
        return Outcome(case, Status.SKIPPED, NO_MOVE)
    if reason := adapter.supports(case):
        return Outcome(case, Status.SKIPPED, reason)
    settings = dict(adapter.settings(case))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        task = {
            "target": _target_of(adapter),
            "case": case.id,
            "seed": seed,
            "explain": explain,
            "deadline": deadline,
            "store": f"file://{folder}/group",
        }
        ranks = [
            stack.enter_context(_rank_process(task, number, case.ranks))
            for number in range(case.ranks)
        ]
        reason = _wait_for_ranks(ranks, deadline)
        report_of_first = ranks[0].report()
    if not reason and "outcome" not in report_of_first:
        reason = "rank 0 ended before there was an outcome"
    if reason:
        return Outcome(case, Status.COULD_NOT_RUN, reason, settings)
    return _outcome_of_record(report_of_first["outcome"], case)


def _outcome_of_record(record: dict[str, Any], case: Case) -> Outcome:
    """Return the Outcome from which `asdict` made this record.

    Args:
        record: as a rank's process wrote it in JSON.
        case: the case, which takes the place of its record.
    """
    report = record["report"]
    if report is not None:
        findings = [read_finding(one) for one in report["findings"]]
        report = StepReport(**report | {"findings": findings})
    status = Status(record["status"])
    return Outcome(
        case,
        status,
        record["reason"],
        record["settings"],
        report,
        record["seconds"],
        record["traceback"],
    )


def _target_of(adapter: Adapter) -> str:
    """Return `FILE:CLASS` of an adapter, from which other processes make their own;
    InputError where its class is in no file.
    """
    kind = type(adapter)
    try:
        return f"{inspect.getfile(kind)}:{kind.__name__}"
    except (TypeError, OSError) as error:
        raise InputError(
            f"{kind.__name__} is defined in no file: a case of ranks makes it in other processes."
        ) from error


@contextmanager
def _rank_process(
    task: dict[str, Any], number: int, world_size: int
) -> Iterator[RankProcess]:
    """Start the process of a rank, and kill it where the `with` statement ends.

    Args:
        task: as `main` takes it, in JSON types.
        number: of the rank, from 0 on.
        world_size: number of ranks.
    """
    environment = os.environ | on_loopback()
    environment |= {
        "RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29512",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }
    command = [
        sys.executable,
        "-m",
        "upref.conformance.ranks",
        json.dumps(task),
        str(number),
    ]
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command, env=environment, stdout=stdout, stderr=stderr
        )
        try:
            yield RankProcess(number, process, stdout, stderr)
        finally:
            process.kill()
            process.wait()


def _wait_for_ranks(ranks: Sequence[RankProcess], deadline: float) -> str:
    """Wait until all processes end, one fails, or the deadline (in seconds) passes;
    return why there is no outcome, or "".
    """
    time_of_end = time.monotonic() + deadline
    processes = [rank.process for rank in ranks]
    while any(process.poll() is None for process in processes):
        one_failed = any(process.poll() for process in processes)
        if one_failed or time.monotonic() > time_of_end:
            break
        time.sleep(PAUSE)
    failed = [rank for rank in ranks if rank.process.poll()]
    if failed:  # the others may fail because it did
        return "; ".join(
            f"rank {rank.number} failed: {rank.error()}" for rank in failed
        )
    if any(process.poll() is None for process in processes):
        return f"the ranks had not finished after {deadline:g} seconds"
    return ""


def main(task: dict[str, Any], rank: int) -> dict[str, Any]:
    """Be one rank: the first compares the gradient, the others only train.

    Args:
        task: the adapter's target, the case's id, the seed, the deadline and the
            group's store.
        rank: from 0 on.

    Returns:
        The report: `outcome` of the first rank, nothing of the others.
    """
    torch.set_num_threads(1)
    adapter = load_adapter(task["target"])
    case = CASES[task["case"]]
    limit = timedelta(seconds=task["deadline"])
    dist.init_process_group(
        "gloo",
        init_method=task["store"],
        rank=rank,
        world_size=case.ranks,
        timeout=limit,
    )
    report = {}
    if rank:
        train_on_other_rank(adapter, case, task["seed"])
    else:
        outcome = run(adapter, case, seed=task["seed"], explain=task["explain"])
        report["outcome"] = asdict(outcome)
    dist.barrier()
    dist.destroy_process_group()
    return report


if __name__ == "__main__":
    to_parent = os.dup(1)
    os.dup2(2, 1)  # what the framework prints is no report
    try:
        its_report = main(json.loads(sys.argv[1]), int(sys.argv[2]))
    except Exception as failure:
        traceback.print_exc()
        os.write(to_parent, json.dumps({"error": describe_error(failure)}).encode())
        os._exit(1)  # the other ranks may be in a collective: do not wait for them
    os.write(to_parent, json.dumps(its_report).encode())
