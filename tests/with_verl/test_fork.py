# SPDX-License-Identifier: Apache-2.0
"""A forked worker is what Python would have started: arguments, environment, folder,
output, exit status, end.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from repro import fork
from tests.support.hanging import HANGING

ROOT = Path(__file__).parents[2]
SERVER = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}]
from repro import fork
sys.path[0] = ""
fork.become(fork.serve("", "wave", str(os.getppid())))
"""
WORKER = """
import json, os, random, sys, time
found = [sys.argv[1:], os.environ["WHO"], os.getcwd(), os.getppid(), "wave" in sys.modules, __name__, random.random()]
print(json.dumps([os.getpid(), *found]), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    with tempfile.TemporaryDirectory() as folder:  # a socket's name is short
        yield tmp_path, os.environ | {"UPREF_FORK": f"{folder}/s", "WHO": "me"}


@pytest.fixture
def server(place):
    """Start the server of forks, yield it when it listens, and kill it."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], env=place[1])
    while not os.path.exists(place[1]["UPREF_FORK"]):
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


def worker(place, seconds):
    """Start a worker by fork.executable(): it prints what it found, sleeps for some
    seconds, and exits with 3.
    """
    folder, env = place
    return subprocess.Popen(
        [*fork.executable(), folder / "worker.py", str(seconds)],
        env=env, cwd=folder, stdout=subprocess.PIPE,
    )  # fmt: skip


def test_workers_are_forks_with_their_own_everything(place, server):
    both = [worker(place, 0.1) for _ in range(2)]
    said = [json.loads(p.communicate(timeout=300)[0]) for p in both]
    for pid, *found, _ in said:
        assert (
            found == [["0.1"], "me", str(place[0]), server.pid, True, "__main__"]
            and pid != server.pid
        )
    assert [p.returncode for p in both] == [3, 3]
    # another process, other random numbers
    assert said[0][0] != said[1][0] and said[0][-1] != said[1][-1]


def test_a_killed_worker_ends_who_asked_and_the_other_way_round(place, server):
    first, second = worker(place, 600), worker(place, 600)
    pids = [json.loads(p.stdout.readline())[0] for p in (first, second)]
    os.kill(pids[0], signal.SIGKILL)
    assert first.wait(300) != 0
    second.kill()
    # pytest's time limit, if any, is the bound
    while Path(f"/proc/{pids[1]}").exists():
        time.sleep(0.05)


def test_without_the_forking_process_a_worker_starts_by_itself(place):
    process = worker(place, 0)
    _, _, who, _, parent, imported, _, _ = json.loads(
        process.communicate(timeout=300)[0]
    )
    assert (who, parent, imported, process.returncode) == ("me", os.getpid(), False, 3)


USER = """
import time
from repro import fork
assert fork.environment()
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_end_of_the_parent_leaves_no_socket(tmp_path, end):
    """The server of forks removes its socket, however its parent ends."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", USER], cwd=ROOT, env=os.environ | {"TMPDIR": folder}, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
            # a shell's `&` has it ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        assert process.stdout.readline() == b"started\n" and os.listdir(folder)
        if end == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, end)  # as a time limit or a terminal does
        process.wait(timeout=HANGING)
        deadline = time.monotonic() + HANGING
        while os.listdir(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not os.listdir(folder)


STARTER = """
import os, signal, sys
from repro import fork
fork.start(os.path.join(fork._folder().name, "s"), ("json",))  # it has our stdout
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forking_process_ends_with_a_parent_killed_at_once(tmp_path):
    """It took process 1 for its parent, and lived for ever. What both leave behind, the
    next start removes.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TMPDIR": folder}
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER], cwd=ROOT, env=env, stdout=subprocess.PIPE
        )
        # all that had the pipe open have ended
        assert process.communicate(timeout=HANGING)[0] == b""
        # as after a SIGKILL of both
        (Path(folder) / f"upref-{process.pid}-x-fork").mkdir(exist_ok=True)
        again = "from repro import fork; import os, tempfile; fork._folder(); print(*os.listdir(tempfile.gettempdir()))"
        said = subprocess.run(
            [sys.executable, "-c", again],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
        )
        assert (
            said.stdout.count("-fork") == 1
            and f"upref-{process.pid}-" not in said.stdout
        )
