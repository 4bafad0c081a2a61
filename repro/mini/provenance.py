# SPDX-License-Identifier: Apache-2.0
"""What a result was made with: commit, versions, machine class. Nothing that names a
machine or a person.
"""

import os
import platform
import subprocess
from pathlib import Path

import numpy
import torch
import transformers

import upref


def of_this_machine() -> dict:
    """Return the commit, the versions of the packages, and the machine."""
    return {
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
            "upref": upref.__version__,
        },
        "machine": {
            "cpu": cpu(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        }
        | gpu(),
    }


def gpu() -> dict:
    """Return {"gpu": its name} where tensors are made on a GPU, else {}."""
    if torch.get_default_device().type != "cuda":
        return {}
    return {"gpu": torch.cuda.get_device_name()}


def commit() -> dict:
    """Return {"id": the commit of the code that runs, "dirty": whether tracked files
    differ from it}; both None outside git.

    Files of results do not count: the suite writes them between runs.
    """
    # kill -9 leaves no lock behind
    git = ("git", "--no-optional-locks", "-C", str(Path(__file__).parent))
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = [
            *git,
            "status",
            "--porcelain",
            "-uno",
            "--",
            ":/",
            ":(exclude,glob,top)repro/mini/**/results/**",
        ]
        status = subprocess.run(changed, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {"id": None, "dirty": None}
    return {"id": head.stdout.strip(), "dirty": bool(status.stdout)}


def cpu() -> str:
    """Return the name of the processor, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip()
            for line in lines
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
