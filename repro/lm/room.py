# SPDX-License-Identifier: Apache-2.0
"""Whether memory and disk carry a run, looked at before anything is downloaded:
`python -m repro.lm.room`. Needs no package. Exit status: 0 they do, 2 they do not, in
one sentence.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from upref.errors import InputError

ROOT = Path(__file__).parents[2]
OUT = ROOT / "repro" / "out" / "lm"
GB = 1e9
MEMORY = 5.0 * GB  # free when a run starts; a run took 4.8 at most on a CPU
ENVIRONMENT = 2.2 * GB  # of repro/venv.sh lm
MODEL = 0.6 * GB  # as float32
CHECKPOINT = 1.7 * GB  # weights and two moments
CHECKPOINTS = 3  # two are kept, while the next is written
CGROUP = Path("/sys/fs/cgroup")


def check(out: Path = OUT) -> None:
    """Raise InputError where free memory or disk is too small for a run.

    Args:
        out: folder of the runs; it need not exist.
    """
    memory = free_memory()
    if memory < MEMORY:
        raise InputError(
            f"a run takes {MEMORY / GB:.1f} GB of memory, and {memory / GB:.1f} GB are free: "
            "close other programs, or train the miniature (repro/run.sh OBJECTIVE mini)."
        )
    there = next(p for p in (out, *out.parents) if p.exists())
    free = shutil.disk_usage(there).free
    needed = needed_disk(out)
    if free < needed:
        raise InputError(
            f"a run takes {needed / GB:.1f} GB of disk, and {there} has {free / GB:.1f} GB free: "
            "free some, or clone the checkout onto a larger disk."
        )


def needed_disk(out: Path) -> float:
    """Return the bytes of disk that a run still takes: environment, model and
    checkpoints, less what is there already.

    Args:
        out: folder of the runs.
    """
    needed = CHECKPOINTS * CHECKPOINT
    there = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    needed -= min(needed, there)
    if not (ROOT / ".venv" / "stamp-lm").exists():
        needed += ENVIRONMENT
    if not (out.parent / "smollm2-135m-instruct").exists():
        needed += MODEL
    return needed


def free_memory(
    read: Callable[[Path], str] = Path.read_text,
) -> float:
    """Return the bytes of memory that this process may still take: the machine's or
    those of its control group, whichever is less; infinite where neither can be read.

    Args:
        read: reads a file.
    """
    found = [float("inf")]
    try:
        lines = read(Path("/proc/meminfo")).splitlines()
        (line,) = (line for line in lines if line.startswith("MemAvailable:"))
        found.append(1024 * float(line.split()[1]))
    except (OSError, ValueError, IndexError):
        pass
    try:
        most = float(read(CGROUP / "memory.max"))
        used = float(read(CGROUP / "memory.current"))
        stat = dict(line.split() for line in read(CGROUP / "memory.stat").splitlines())
        # a cache of files that the kernel gives up when memory is needed
        found.append(most - used + float(stat["inactive_file"]))
    except (OSError, ValueError, LookupError):  # "max": no limit
        pass
    return min(found)


def main() -> int:
    """Check the default folder; return 0, or 2 after a sentence on stderr."""
    try:
        check()
    except InputError as e:
        print(f"lm: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
