# SPDX-License-Identifier: Apache-2.0
"""The machine and the versions; and what the launchers of repro/ choose on it."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime

import torch

from benchmarks.gpu.place import SEED, PartSetup

PACKAGES = (
    "torch", "triton", "transformers", "accelerate", "trl", "verl", "liger-kernel", "tensordict", "datasets", "numpy",
)  # fmt: skip
QUERY = "name,memory.total,driver_version,clocks.sm,clocks.mem,power.limit"
# what is run, and its time limit
COMMANDS = {
    "nvidia-smi": (["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"], 20),
    "upref doctor": ([sys.executable, "-m", "upref", "doctor"], 60),
    "ladder": (
        [sys.executable, "-m", "repro.with_verl.machine.ladder", "up_dapo", ""],
        30,
    ),
    "ladder trl": (
        [sys.executable, "-m", "repro.with_verl.machine.ladder", "up_dapo", "trl"],
        30,
    ),
    "repro/run.sh up_dapo --dry-run": (
        ["bash", "repro/run.sh", "up_dapo", "--dry-run"],
        100,
    ),
    "repro/run.sh up_dapo gpu1": (["bash", "repro/run.sh", "up_dapo", "gpu1"], 100),
}


def main(place: PartSetup) -> None:
    """Write a row of the machine with the versions of its packages, and a row for each
    command: its exit status and the end of its output.
    """
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    gpu, size, capability = "", 0, []
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        size = torch.cuda.get_device_properties(0).total_memory
        capability = list(torch.cuda.get_device_capability())
    place.write(
        fact="machine",
        gpu=gpu,
        bytes=size,
        capability=capability,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        machine=platform.machine(),
        cores=os.cpu_count(),
        date=datetime.now(UTC).date().isoformat(),
        seed=SEED,
        versions=versions,
    )
    for name, (command, seconds) in COMMANDS.items():
        with place.row(fact=name) as row:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                env=os.environ | {"UPREF_PYTHON": sys.executable},
            )
            row |= {
                "status": done.returncode,
                "out": done.stdout[-6000:],
                "err": done.stderr[-3000:],
            }
