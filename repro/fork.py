# SPDX-License-Identifier: Apache-2.0
"""Processes of Python as forks of one that has imported what is slow to import: a start
of 2 s takes 0.1 s.

`executable() + ARGUMENTS` starts like `PYTHON ARGUMENTS`: it hands its arguments,
environment and output to the forking process and waits for the end of the fork; where
there is none, it becomes that Python itself. The forking process listens on the Unix
socket that UPREF_FORK names. It ends with its parent, however that ends, and removes
the socket; where both are killed, the next start removes what is left. Ray's workers
are such forks, and so are the commands of the pages and of many tests (`environment`).
"""

import atexit
import gc
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import NoReturn

SOCKET = "UPREF_FORK"  # names the Unix socket
# a folder that has nothing but the socket of a process with this parent
OURS = re.compile(r"upref-(\d+)-.*-fork")
SLOW = ("torch", "sympy")  # to import, of what upref needs


def executable() -> list[str]:
    """Return the command that starts like Python, without its arguments."""
    return [sys.executable, "-S", "-E", "-P", os.path.abspath(__file__)]


def start(path: str, early: Iterable[str], late: Iterable[str] = ()) -> None:
    """Start the process that forks. Its environment is this one's without PYTHONPATH and
    PYTHONSAFEPATH, and has the socket's path.

    Args:
        path: of the Unix socket on which it listens.
        early: modules that it imports at once.
        late: modules that it imports when the first fork is asked for.
    """
    # each fork is given PYTHONPATH's folders by the process that asks for it
    own = ("PYTHONPATH", "PYTHONSAFEPATH")
    env = {k: v for k, v in os.environ.items() if k not in own} | {SOCKET: path}
    how = ["fork", ",".join(early), ",".join(late), str(os.getpid())]
    subprocess.Popen([sys.executable, "-P", os.path.abspath(__file__), *how], env=env)


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Make this process's folder of sockets; remove those of processes that are gone."""
    for name in os.listdir(tempfile.gettempdir()):
        if (of := OURS.fullmatch(name)) and not _lives(int(of[1])):
            shutil.rmtree(os.path.join(tempfile.gettempdir(), name), ignore_errors=True)
    # a socket's name is short
    return tempfile.TemporaryDirectory(prefix=f"upref-{os.getpid()}-", suffix="-fork")


def _lives(pid: int) -> bool:
    """Return whether a process of this number runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


@cache
def environment(*late: str) -> dict[str, str]:
    """Return an environment in which `executable` forks from a process of our own,
    which this starts, and for whose socket it waits up to 20 s; {} where the system is
    not Linux.

    Args:
        *late: modules that it imports when the first fork is asked for, beside SLOW,
            which it imports at once.
    """
    if sys.platform != "linux":
        return {}
    path = os.path.join(_folder().name, "-".join(["s", *late]))
    start(path, SLOW, late)
    for _ in range(1000):  # 20 s
        if os.path.exists(path):
            break
        time.sleep(0.02)
    return {SOCKET: path}


def ask(arguments: list[str]) -> int:
    """Ask for a fork with these arguments, wait for its end, and return its exit status
    (1 if that is not known).

    Where there is no forking process, or the first argument is missing, "-" or an option
    of Python beside -c and -m, this process becomes Python itself.
    """
    server = socket.socket(socket.AF_UNIX)
    try:
        if arguments[:1] in ([], ["-"]) or (
            arguments[0][0] == "-" and arguments[0] not in ("-c", "-m")
        ):
            raise KeyError("an option of Python")
        server.connect(os.environ[SOCKET])
    except (OSError, KeyError):
        os.execv(sys.executable, [sys.executable, *arguments])
    socket.send_fds(server, [b"+"], [0, 1, 2])  # stdin, stdout, stderr
    server.sendall(
        json.dumps([arguments, dict(os.environ), os.getcwd()]).encode() + b"\n"
    )
    return int(server.recv(8) or b"1")


def serve(early: str, late: str, parent: str) -> list[str]:
    """Fork for each process that asks, as long as the parent with this process id
    lives.

    It returns in the forks, with their arguments. The forking process itself never
    returns: it exits, and removes the socket.

    Args:
        early: modules that are imported at once, with commas between them.
        late: modules that are imported at the first fork.
        parent: process id.
    """
    listener = socket.socket(socket.AF_UNIX)
    path = os.environ[SOCKET]
    try:
        listener.bind(path)
    except FileNotFoundError:  # the parent has ended and removed the folder
        sys.exit()
    listener.listen(64)
    is_first = True  # no fork was asked for yet
    # signals are for the forks; a time limit sends SIGTERM to all of a group at once
    ours = {
        number: signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    asking: dict[int, socket.socket] = {}  # process id of a fork -> who asked for it
    import_all(early)
    gc.freeze()  # the forks share what was imported
    while os.getppid() == int(parent):  # not left behind
        ready, _, _ = select.select(
            [listener, *asking.values()], [], [], 0.02 if asking else 0.2
        )
        look_after(asking, ready)
        if listener not in ready:
            continue
        client, _ = listener.accept()
        _, files, _, _ = socket.recv_fds(client, 1, 3)
        arguments, environment, folder = json.loads(client.makefile().readline())
        if is_first:
            adopt(environment, folder)
            import_all(late)
            is_first = False
        pid = os.fork()
        if pid == 0:
            listener.close()
            for number, handler in ours.items():
                signal.signal(number, handler)
            take_over(files)
            adopt(environment, folder)
            return arguments
        asking[pid] = client
        for file in files:
            os.close(file)
    with suppress(OSError):
        os.unlink(path)
        # else a folder of other things too
        if OURS.fullmatch(os.path.basename(os.path.dirname(path))):
            os.rmdir(os.path.dirname(path))
    sys.exit()


def import_all(names: str) -> None:
    """Import these modules, with commas between their names."""
    for name in filter(None, names.split(",")):
        __import__(name)


def look_after(asking: dict[int, socket.socket], ready: list[socket.socket]) -> None:
    """Send the exit status of each fork that has ended to who asked for it; kill the
    forks of those that were killed.

    Args:
        asking: process id of a fork -> who asked for it; those that have ended are
            taken out.
        ready: what can be read: who asked writes nothing, and so has gone.
    """
    for pid, client in list(asking.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            del asking[pid]
            code = os.waitstatus_to_exitcode(status) & 255
            with suppress(OSError):  # who asked has ended
                client.sendall(str(code).encode())
        elif client in ready:
            os.kill(pid, signal.SIGKILL)


def take_over(files: list[int]) -> None:
    """Make these files the standard input, output and errors of this process."""
    for at, file in enumerate(files):
        os.dup2(file, at)
        os.close(file)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115  of other files
    sys.stderr = open(  # noqa: SIM115
        2, "w", errors="backslashreplace", buffering=1, closefd=False
    )


def adopt(environment: dict[str, str], folder: str) -> None:
    """Take over the environment variables and the folder of the process that asked."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def become(arguments: list[str]) -> None:
    """Run the program that the arguments name, as Python would have started it.

    Args:
        arguments: -m MODULE, -c CODE or a FILE, and what follows.

    Raises:
        BaseException: what the program raises, SystemExit included.
    """
    import random

    import numpy

    random.seed()  # the forks of one process would draw the same numbers
    numpy.random.seed()
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    kind, *rest = arguments
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(
            0, {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(kind))
        )
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.modules["__main__"] = ["-c", *rest[1:]], ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def end(arguments: list[str]) -> NoReturn:
    """Run the program of these arguments, and end the process as Python would, but for
    the 0.6 s in which it takes down what was imported.
    """
    status = 1
    try:
        become(arguments)
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException as e:
        traceback.print_exception(e)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it was closed
            stream.flush()
    os._exit(status & 255)


if __name__ == "__main__":
    if sys.argv[1:2] == ["fork"] and len(sys.argv) == 5:
        end(serve(*sys.argv[2:]))
    else:
        sys.exit(ask(sys.argv[1:]))
