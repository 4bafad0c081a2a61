# SPDX-License-Identifier: Apache-2.0
"""A framework in a folder and a process of its own: `run` does there what child.py
knows and brings its answer.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import upref
from upref.errors import InputError
from upref_frameworks.audits.isolated.pin import Pin, place

SECONDS = 900
PYTHON = [sys.executable]
LIBRARY = Path(__file__).parents[3]  # where its process finds this package
QUIET = {  # no GPU, no network, no telemetry
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONSAFEPATH": "1",
}
# in the child: the framework's name, its version, and remarks on it; else empty
INSIDE: dict[str, Any] = {}


def run_elsewhere(
    work: str,
    name: str,
    pin: Pin | None,
    version: str,
    source: str,
    loud: bool,
    **more: Any,
) -> Any:
    """Do a job by `run`, unless this process is where the framework is.

    Args:
        work: a key of WORK in child.py.
        name: the framework.
        pin: None: the framework is imported from the running environment.
        version: another version than the pinned one, or `newest`.
        source: path of a working copy of the framework.
        loud: print the output of the process on stderr.
        **more: the other arguments of the job.

    Returns:
        The result of `run`; None where there is no pin, or this is the framework's own
        process.

    Raises:
        InputError: as of `run`; or a version or a working copy is given and there is no
            pin.
    """
    if pin and not INSIDE:
        return run(work, name, pin, version, source, loud, **more)
    if version or source:
        raise InputError(
            f"{name} is audited as it is installed: leave --version and --source out."
        )
    return None


def run(
    work: str,
    name: str,
    pin: Pin,
    version: str = "",
    source: str = "",
    loud: bool = False,
    **more: Any,
) -> Any:
    """Do a job of child.py in a process that has this framework and no other.

    Args:
        work: a key of WORK in child.py.
        name: the framework.
        pin: which files of it, installed where they are not yet.
        version: another version than the pinned one, or `newest`.
        source: path of a working copy of the framework, used in its place.
        loud: print the output of the process on stderr.
        **more: the other arguments of the job.

    Returns:
        What the function in child.py returns.

    Raises:
        InputError: the framework cannot be installed, or the process fails, or gives no
            answer within SECONDS.
    """
    where = place(name, pin, version, source)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        answer = Path(folder) / "answer"
        job.write_bytes(pickle.dumps((work, name, where, more)))
        ours = dict.fromkeys([str(LIBRARY), str(Path(upref.__file__).parents[1])])
        # a cluster may have torch there
        paths = [*ours, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | QUIET | pin.env | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [
            *PYTHON,
            "-m",
            "upref_frameworks.audits.child",
            str(job),
            str(answer),
        ]
        try:
            said = subprocess.run(
                command,
                env=env,
                cwd=folder,
                timeout=SECONDS,
                text=True,
                errors="replace",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise InputError(
                f"{name} {where.version}: no answer within {SECONDS} s."
            ) from e
        if loud:
            print(said.stdout, end="", file=sys.stderr)
        if not answer.exists():
            last = (said.stdout.strip().splitlines() or ["it said nothing"])[-1]
            raise InputError(
                f"{name} {where.version} ended its process with {said.returncode} before a report: {last}"
            )
        kind, got = pickle.loads(answer.read_bytes())
    if kind == "error":
        raise InputError(got)
    return got
