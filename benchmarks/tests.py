# SPDX-License-Identifier: Apache-2.0
"""Where the time of the tests goes: `python -m benchmarks.tests [ARGUMENTS OF PYTEST]`.

`--record` in front of the arguments writes the tests of SLOW seconds and more into
tests/seconds.tsv; tests/conftest.py starts with the longest of them.

Runs the tests with two workers and prints processor seconds, of a test and of the
processes that it started, by file and for the longest tests. Processor seconds hardly
depend on what else the machine does; half of the sum is the least that two cores can
take.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks import cpu
from upref.files import write_atomically

LOG = "UPREF_TEST_TIME"
RECORD = Path(__file__).parents[1] / "tests/seconds.tsv"
SLOW = 2.0  # processor seconds of a test that is recorded


def used() -> float:
    """Return the processor seconds so far, of this process and of the child processes
    that have ended.
    """
    return time.process_time() + cpu.of_children()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Append the processor seconds and the name of a test to the file that the
    environment variable LOG names. pytest calls it around each test of a worker.
    """
    before = used()
    yield
    with open(os.environ[LOG], "a", encoding="utf-8") as log:
        log.write(f"{used() - before:.3f}\t{item.nodeid}\n")


def record(tests: list[tuple[float, str]]) -> None:
    """Write the tests of at least SLOW seconds into RECORD, the longest first. A
    recorded test that did not run this time keeps its row, if its file is still there.
    """
    ran = {name for _, name in tests}
    before = RECORD.read_text(encoding="utf-8") if RECORD.exists() else ""
    slow = [test for test in tests if test[0] >= SLOW]
    for line in before.splitlines():
        seconds, _, name = line.partition("\t")
        file = RECORD.parents[1] / name.split("::")[0]
        if name not in ran and file.exists():
            slow.append((float(seconds), name))
    slow.sort(reverse=True)
    lines = [f"{seconds:.1f}\t{name}\n" for seconds, name in slow]
    write_atomically(RECORD, "".join(lines))


def main(*arguments: str) -> int:
    """Run the tests with these arguments, and print where their time went.

    Args:
        arguments: of pytest; `--record` in front of them writes the slow tests down.

    Returns:
        The exit status of pytest.
    """
    recording = arguments[:1] == ("--record",)
    if recording:
        arguments = arguments[1:]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal"]
        command += ["-q", "-p", "benchmarks.tests", *arguments]
        environment = os.environ | {LOG: str(log), "OMP_NUM_THREADS": "1"}
        start = time.time()
        status = subprocess.run(command, env=environment).returncode
        if not log.exists():
            return status
        lines = log.read_text(encoding="utf-8").splitlines()
    tests = []
    for line in lines:
        seconds, name = line.split("\t")
        tests.append((float(seconds), name))
    tests.sort(reverse=True)
    if recording:
        record(tests)
    seconds_of: dict[str, float] = {}  # file -> seconds
    for seconds, name in tests:
        file = name.split("::")[0]
        seconds_of[file] = seconds_of.get(file, 0) + seconds
    used_by_all = sum(seconds for seconds, _ in tests)
    waited = time.time() - start
    print(
        f"\n{used_by_all:.0f} processor seconds, {waited:.0f} seconds, {len(tests)} tests"
    )
    longest = sorted(seconds_of.items(), key=lambda item: item[1], reverse=True)
    for file, seconds in longest[:30]:
        print(f"{seconds:8.1f}  {file}")
    print()
    for seconds, name in tests[:40]:
        print(f"{seconds:8.1f}  {name}")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
