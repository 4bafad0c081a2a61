# SPDX-License-Identifier: Apache-2.0
"""How long `upref.check` takes: on every loss of the tests' zoo, on every registered
objective; and `upref -h`.

    python -m benchmarks.check                  all of it, two to four minutes; exit status 1: over a limit

Times are CPU seconds on one thread, which on a quiet machine are the seconds one waits:
other work on the machine disturbs them less. `upref -h` is a new process each time. The
first check, which imports, is not counted.
"""

import statistics
import subprocess
import sys
import time

import torch

import upref
from benchmarks import cpu
from docs import record
from tests.support import zoo

STARTS = 7
MEDIAN, OBJECTIVE, START = 0.5, 3.0, 0.3  # the limits, in seconds


def seconds(loss, objective: str, **hp) -> float:
    """CPU seconds of a check."""
    start = time.process_time()
    upref.check(loss, objective, **hp)
    return time.process_time() - start


def starting() -> float:
    """CPU seconds of `upref -h`, the process and all."""
    before = cpu.of_children()
    subprocess.run(
        [sys.executable, "-m", "upref", "-h"], check=True, capture_output=True
    )
    return cpu.of_children() - before


def table(times: dict[str, float], limit: float, judged: str) -> bool:
    """Prints the five slowest, the median, the sum; whether what is judged, "median" or
    "slowest", keeps the limit.
    """
    rows = sorted(times.items(), key=lambda row: -row[1])
    for name, t in rows[:5]:
        print(f"  {t:6.2f}  {name}")
    number = statistics.median(times.values()) if judged == "median" else rows[0][1]
    ok = number <= limit
    word = "yes" if ok else "NO"
    total = sum(times.values())
    print(f"  {judged} {number:.2f}, at most {limit}: {word}; all {total:.1f}\n")
    return ok


def main() -> int:
    """Print the times; 1 if one of them is over its limit."""
    torch.set_num_threads(1)
    print(f"{record.machine()}, upref {upref.__version__}")
    print("CPU seconds on one thread; the five slowest of each\n")
    upref.check(upref.get("dapo"), "dapo")
    print(f"upref.check on the zoo of tests/support/zoo, {len(zoo.ALL)} losses")
    cases = {f"{i} {case} {case.hp or ''}": case for i, case in enumerate(zoo.ALL)}
    times = {k: seconds(c.function, c.objective, **c.hp) for k, c in cases.items()}
    quick = table(times, MEDIAN, "median")
    print(
        f"upref.check of each registered objective against itself, {len(upref.names())}"
    )
    times = {name: seconds(upref.get(name), name) for name in upref.names()}
    quick &= table(times, OBJECTIVE, "slowest")
    print(f"upref -h, {STARTS} times")
    times = {f"start {i + 1}": starting() for i in range(STARTS)}
    quick &= table(times, START, "median")
    return not quick


if __name__ == "__main__":
    raise SystemExit(main())
