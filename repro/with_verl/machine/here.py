# SPDX-License-Identifier: Apache-2.0
"""What this machine has: GPUs, driver, disk, memory, installed packages. It runs before
anything is installed.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from repro.with_verl.place import ROOT

CLUSTER = Path("/tmp/ray/ray_current_cluster")  # where Ray notes the one that runs
MEGATRON = (  # of requirements/megatron.txt, and what these import
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "mbridge",
    "apex",
    "nvidia-modelopt",
    "pulp",
    "scipy",
    "onnxscript",
    "nvdlfw-inspect",
)
# that `pip install --no-deps -e .` leaves out in verl's image
OURS = ("jaxtyping", "math-verify", "sympy")
PACKAGES = (
    "verl",
    "vllm",
    "torch",
    "transformers",
    "ray",
    "TransferQueue",
    "flash-attn",
    "flashinfer-python",
    *MEGATRON,
    *OURS,
    "cuda-toolkit",
)
# CUDA -> the oldest driver, by NVIDIA's compatibility table
DRIVER = {"13": 580, "12": 525}


@dataclass
class Machine:
    """What is here. `look` fills it in; tests make their own."""

    gpus: int = 0
    gpu_bytes: float = 0.0
    gpu_name: str = ""
    free_disk: float = 0.0
    versions: dict[str, str | None] = field(default_factory=dict)
    nodes: int = 1
    driver: str = ""
    # the newest CUDA that the driver's library runs, 13000 for 13.0; 0: not known
    cuda: int = 0
    memory: float = 1e13  # of the host
    shared: float = 1e13  # bytes of /dev/shm
    cores: int = 10_000


def look(where: Path = ROOT) -> Machine:
    """Return what this machine has: GPUs by nvidia-smi, so that torch is not imported;
    packages by their metadata; the free disk of the file system that `where` is on.
    """
    m = Machine(versions={p: version_of(p) for p in PACKAGES})
    where = next(p for p in [where, *where.parents] if p.exists())
    m.free_disk = shutil.disk_usage(where).free
    m.nodes = max(1, ray_nodes())
    m.memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    m.cores = os.cpu_count() or 1
    m.shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    rows = of_gpus("driver_version,name,memory.total")
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        rows = rows[: len(visible.split(","))]
    m.gpus = len(rows)
    if rows:
        m.driver, _, rest = rows[0].partition(", ")
        m.gpu_name, _, mib = rest.rpartition(", ")
        m.gpu_bytes = float(mib) * 2**20
        m.cuda = newest_cuda()
    return m


def of_gpus(fields: str) -> list[str]:
    """Return a line for each GPU with these fields of nvidia-smi, ", " between them;
    [] where it does not run.

    Args:
        fields: their names, with commas between them.
    """
    query = f"--query-gpu={fields}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def newest_cuda() -> int:
    """Return the newest CUDA that libcuda runs, 13000 for 13.0; 0 where there is none.

    A package of NVIDIA's, cuda-compat, brings a newer libcuda than the driver's own,
    and nvidia-smi names the driver.
    """
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def old_driver(m: Machine, toolkit: str) -> Iterator[str]:
    """Yield a sentence if the driver cannot run this CUDA. CUDA itself says so only
    when a worker starts.

    Args:
        m: the machine.
        toolkit: the version of CUDA that the packages are built for, as 13.0.2; ""
            where it is not known.

    Yields:
        A sentence where the driver is too old, and nothing stands in for it.
    """
    cuda, major = toolkit.partition(".")[0], m.driver.partition(".")[0]
    old = major.isdecimal() and int(major) < DRIVER.get(cuda, 0)
    if old and m.cuda < 1000 * int(cuda):
        compat = "-".join(["cuda-compat", *toolkit.split(".")[:2]])
        yield (
            f"the driver {m.driver} is too old for this environment's CUDA {cuda}, which needs {DRIVER[cuda]} or newer: "
            f"update it; on a data-center GPU, NVIDIA's package {compat} does instead, with its folder on LD_LIBRARY_PATH."
        )


def ray_nodes() -> int:
    """Return how many machines with GPUs the Ray cluster has that a driver would join;
    0 where none runs or answers within two minutes. None is started.
    """
    address = os.environ.get("RAY_ADDRESS") or ("auto" if CLUSTER.exists() else "")
    if not address:
        return 0
    code = (
        "import ray, logging, sys; ray.init(address=sys.argv[1], logging_level=logging.ERROR); "
        "print('NODES', sum(n['Alive'] and n['Resources'].get('GPU', 0) > 0 for n in ray.nodes()))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, address],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0
    found = [
        line.split()[1]
        for line in done.stdout.splitlines()
        if line.startswith("NODES ")
    ]
    return int(found[-1]) if found else 0


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
