# SPDX-License-Identifier: Apache-2.0
"""What a command of upref takes from its start to its end: imports, and the rest.

    python -m benchmarks.startup --before fa2bc552    beside that commit, in a checkout
    python -m benchmarks.startup --rounds 1 list      a quick look at one row

Figures are CPU seconds on one thread, the process and its child together, the median
over rounds. In each round all commands take their turn, and each version of upref. On a
busy machine CPU seconds rise too: compare what stands side by side. Imports are what
`import` statements take, those of torch too; the first row is torch alone.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks import cpu
from docs import record

ROOT = Path(__file__).parents[1]
LOSSES = """\
import torch


def loss(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.28) * A).sum() / mask.sum()


def wrong(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return -(r.clamp(0.8, 1.28) * A).sum() / mask.sum()
"""
# It appends the CPU seconds of each import to a file, in the child of a command too.
RUN = """\
import builtins, importlib, os, sys, time

file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
inside = False

def timed(function):
    def run(*args, **kw):
        global inside
        if inside:
            return function(*args, **kw)
        inside, start = True, time.process_time()
        try:
            return function(*args, **kw)
        finally:
            inside = False
            seconds = time.process_time() - start
            if seconds > 1e-4:
                os.write(file, f"{seconds}\\n".encode())
    return run

builtins.__import__ = timed(builtins.__import__)
importlib.import_module = timed(importlib.import_module)
sys.argv[:] = ["upref", *sys.argv[2:]]
if len(sys.argv) == 1:
    import torch
else:
    from upref.cli import main
    sys.exit(main())
"""


class Row(NamedTuple):
    """A command.

    Attributes:
        words: behind `upref`; none for torch alone.
        status: its exit status. A version that gives another one cannot do this.
    """

    words: str
    status: int


ROWS = {
    "torch": Row("", 0),
    "list": Row("list", 0),
    "no such objective": Row("check my.py:loss --as dapp", 2),
    "no such function": Row("check my.py:los --as dapo", 2),
    "check, right": Row("check my.py:loss --as dapo", 0),
    "check, wrong": Row("check my.py:wrong --as dapo", 1),
    "check of three": Row("check my.py:loss my.py:wrong my.py:loss --as dapo", 1),
    "identify": Row("identify my.py:loss", 0),
}


class Took(NamedTuple):
    """CPU seconds of a command.

    Attributes:
        whole: of the process and its children.
        imports: the part of it in which something is imported.
    """

    whole: float
    imports: float


def took(row: Row, folder: Path, root: Path) -> Took | None:
    """Run a command in a process of its own; return its CPU seconds and the part of
    them that imports take, or None if it ends with another status than the row's.

    Args:
        row: the command.
        folder: with my.py, where it runs.
        root: of the upref that runs.
    """
    imports = folder / "imports"
    imports.write_text("")
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "PYTHONPYCACHEPREFIX": str(folder / "compiled"),
    }
    # as on the machine of a user, where pip compiles what it installs
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = cpu.of_children()
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(imports), *row.words.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        check=False,
    )
    whole = cpu.of_children() - before
    if done.returncode != row.status:
        return None
    return Took(whole, sum(map(float, imports.read_text().split())))


def unpack(commit: str, folder: Path) -> None:
    """Put the files of a commit into a folder."""
    git = ["git", "archive", commit, "upref", "upref_frameworks", "upref_course"]
    archive = subprocess.run(git, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def measure(
    names: list[str], roots: dict[str, Path], folder: Path, rounds: int
) -> dict[tuple[str, str], Took]:
    """Return (row, version) -> the medians over rounds of its times. A version that
    cannot do what a row asks has no entry.
    """
    (folder / "my.py").write_text(LOSSES)
    # each row once: Python compiles the files that it imports
    for root in roots.values():
        for name in names:
            took(ROWS[name], folder, root)
    every: dict[tuple[str, str], list[Took]] = {}
    for _ in range(rounds):
        for name, (version, root) in product(names, roots.items()):
            one = took(ROWS[name], folder, root)
            if one is not None:
                every.setdefault((name, version), []).append(one)
    medians = {}
    for key, runs in every.items():
        whole = statistics.median(run.whole for run in runs)
        imports = statistics.median(run.imports for run in runs)
        medians[key] = Took(whole, imports)
    return medians


def table(
    names: list[str], versions: list[str], found: dict[tuple[str, str], Took]
) -> list[str]:
    """Return the lines of the table: whole, imports and rest of each version."""
    above = "".join(f"{version:>27}" for version in versions)
    heads = f"{'whole':>9}{'imports':>9}{'rest':>9}" * len(versions)
    lines = [f"{'':18}{above}", f"{'':18}{heads}"]
    for name in names:
        line = f"{name:18}"
        for version in versions:
            if (name, version) in found:
                whole, imports = found[name, version]
                line += f"{whole:9.2f}{imports:9.2f}{whole - imports:9.2f}"
            else:
                line += f"{'-':>9}" * 3
        lines.append(line)
    return lines


def main() -> None:
    """Measure the commands, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--before", metavar="COMMIT", help="a commit to stand beside")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    names = args.names or list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}: {', '.join(ROWS)}")
    load = os.getloadavg()[0]
    print(f"{record.machine()}; {args.rounds} rounds; load {load:.1f} at the start")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        roots = {"now": ROOT}
        if args.before:
            (folder / "before").mkdir()
            unpack(args.before, folder / "before")
            roots = {args.before: folder / "before"} | roots
        found = measure(names, roots, folder, args.rounds)
    print("CPU seconds on one thread\n")
    print("\n".join(table(names, list(roots), found)))
    print()
    for name in names:
        words = ROWS[name].words
        print(f"{name}: {f'upref {words}' if words else 'import torch'}")
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
