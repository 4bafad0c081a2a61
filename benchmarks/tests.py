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
from collections import Counter
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
        options = [
            "-n",
            "2",
            "--dist",
            "worksteal",
            "-q",
            "-p",
            "benchmarks.tests",
            *arguments,
        ]
        start = time.time()
        pytest_ = [sys.executable, "-m", "pytest", *options]
        status = subprocess.run(
            pytest_, env=os.environ | {LOG: str(log), "OMP_NUM_THREADS": "1"}
        ).returncode
        if not log.exists():
            return status
        rows = [
            line.split("\t") for line in log.read_text(encoding="utf-8").splitlines()
        ]
    tests = sorted(((float(seconds), name) for seconds, name in rows), reverse=True)
    if recording:
        record(tests)
    files: Counter[str] = Counter()
    for seconds, name in tests:
        files[name.split("::")[0]] += seconds  # type: ignore[assignment] # a Counter of seconds
    print(
        f"\n{sum(s for s, _ in tests):.0f} processor seconds, {time.time() - start:.0f} seconds, {len(tests)} tests"
    )
    for name, seconds in files.most_common(30):
        print(f"{seconds:8.1f}  {name}")
    print()
    for seconds, name in tests[:40]:
        print(f"{seconds:8.1f}  {name}")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
