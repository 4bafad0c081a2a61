# SPDX-License-Identifier: Apache-2.0
"""Ray's workers as forks of one process that has imported torch, verl and vLLM: their many imports are one.

Ray starts a worker by `PY_EXECUTABLE default_worker.py ...`, and is given this file for that (`executable`). Called so,
it hands the worker's arguments, environment and output to the forking process and waits for the worker's end; where
there is none, it becomes the worker itself. The forking process (`start`) imports verl when the first worker asks, in
its environment, because verl reads that while it is imported.
"""

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress

SOCKET = "UPREF_FORK"  # names the Unix socket
EARLY = ("torch", "transformers", "tensordict")  # while Ray starts: what does not read verl's environment
MODULES = (
    "verl.trainer.main_ppo", "verl.trainer.ppo.v1", "verl.workers.engine_workers", "verl.experimental.reward_loop",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)  # fmt: skip


def executable() -> str:
    return f"{sys.executable} -S -E -P {os.path.abspath(__file__)}"


def start() -> None:
    """Once, in the driver: whoever asks before it listens starts like any worker of Ray."""
    path = os.environ.get(SOCKET)
    if path and not os.path.exists(path):
        subprocess.Popen([sys.executable, "-m", "repro.with_verl.cpu.fork", "fork"])


def ask(arguments: list[str]) -> int:
    """A worker, from its start to its end."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(os.environ[SOCKET])
    except (OSError, KeyError):
        os.execv(sys.executable, [sys.executable, *arguments])
    socket.send_fds(server, [b"+"], [0, 1, 2])
    server.sendall(json.dumps([arguments, dict(os.environ), os.getcwd()]).encode() + b"\n")
    return int(server.recv(8) or b"1")


def serve() -> list[str]:
    """Fork for each that asks. Returns in the forks, with their arguments."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ[SOCKET])
    listener.listen(64)
    parent, imported = os.getppid(), False
    asking: dict[int, socket.socket] = {}
    for name in EARLY:
        __import__(name)
    while os.getppid() == parent:  # not left behind
        ready, _, _ = select.select([listener, *asking.values()], [], [], 0.2)
        for pid, client in list(asking.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                with suppress(OSError):  # Ray has ended who asked
                    asking.pop(pid).sendall(str(os.waitstatus_to_exitcode(status) & 255).encode())
            elif client in ready:  # Ray has ended what it takes for the worker
                os.kill(pid, signal.SIGKILL)
        if listener not in ready:
            continue
        client, _ = listener.accept()
        _, files, _, _ = socket.recv_fds(client, 1, 3)
        arguments, environment, folder = json.loads(client.makefile().readline())
        if not imported:
            adopt(environment, folder)
            for name in MODULES:
                __import__(name)
            imported = True
        pid = os.fork()
        if pid == 0:
            listener.close()
            for at, file in enumerate(files):
                os.dup2(file, at)
            adopt(environment, folder)
            return arguments
        asking[pid] = client
        for file in files:
            os.close(file)
    sys.exit()


def adopt(environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def become(arguments: list[str]) -> None:
    """The worker, as Python would have started it."""
    import random

    import numpy

    random.seed()  # the forks of one process would draw the same numbers
    numpy.random.seed()
    sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:] != ["fork"]:
        sys.exit(ask(sys.argv[1:]))
    become(serve())
