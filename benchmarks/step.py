# SPDX-License-Identifier: Apache-2.0
"""How long `upref.check_step` takes on models of two layers: right steps, and wrong
ones, whose cause is searched.

    python -m benchmarks.step                   the set of tests/step/planted
    python -m benchmarks.step FOLDER            the thirteen trainers too; see tests/trainers

Times are CPU seconds on one thread. Exit status 1: a right step takes more than half a
second, or a wrong one more than five.
"""

import argparse
import contextlib
import io
import os
import platform
import statistics
from pathlib import Path

import torch

from tests.step.planted.__main__ import run
from tests.step.planted.case import CASES
from tests.trainers.__main__ import found
from tests.trainers.cases import CASES as LOOPS

RIGHT, WRONG = 0.5, 5.0  # the limits, in seconds


def table(what: str, times: dict[str, float], limit: float) -> bool:
    """Print the five slowest, and whether all keep the limit."""
    rows = sorted(times.items(), key=lambda row: -row[1])
    print(f"{what}, {len(rows)}")
    for name, t in rows[:5]:
        print(f"  {t:6.2f}  {name}")
    slowest = rows[0][1]
    ok = slowest <= limit
    median = statistics.median(times.values())
    word = "yes" if ok else "NO"
    print(f"  median {median:.2f}; slowest {slowest:.2f}, at most {limit}: {word}\n")
    return ok


def planted(only: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """CPU seconds of the right and of the wrong steps of the set; of these alone, where
    some are named.
    """
    times: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for case in CASES.values():
        if only and case.id not in only:
            continue
        times[not case.right][case.id] = run(case)["seconds"]
    return times


def trainers(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """CPU seconds of the loops that agree, and of those that differ, on one draw."""
    times: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for loop in LOOPS:
        name = loop.repository.split("/")[1]
        checkout = (folder / name).resolve()
        if checkout.is_dir():
            with contextlib.redirect_stdout(io.StringIO()):  # some print
                found(loop, checkout, 0)  # which imports
                result = found(loop, checkout, 1)
            agrees = result.get("agrees", False)
            times[not agrees][f"{name}, {loop.variant}"] = result["seconds"]
    return times


def main() -> int:
    """Print the times; 1 if a step takes longer than its limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="steps of the set")
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{platform.machine()}, {os.cpu_count()} cores, {versions}")
    print("CPU seconds on one thread; the five slowest of each\n")
    run(CASES["padding_filled"])  # which imports
    right, wrong = planted(options.only)
    quick = table("right steps of tests/step/planted", right, RIGHT)
    quick &= table("wrong steps of tests/step/planted", wrong, WRONG)
    if options.folder:
        right, wrong = trainers(options.folder)
        quick &= table("loops of the thirteen trainers that agree", right, RIGHT)
        quick &= table("loops of the thirteen trainers that differ", wrong, WRONG)
    return not quick


if __name__ == "__main__":
    raise SystemExit(main())
