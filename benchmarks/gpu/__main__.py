# SPDX-License-Identifier: Apache-2.0
"""Run upref's checks on a GPU, and write what they find as one JSON file.

    python -m benchmarks.gpu --check                what is missing here, in ten seconds
    python -m benchmarks.gpu --out FOLDER           all parts
    python -m benchmarks.gpu --out FOLDER steps     some parts
    python -m benchmarks.gpu --out FOLDER --trial   a trial of this script: small, on the CPU

Each part is a process with a time limit of its own. Parts that measure no time run side
by side; training and the sizes run alone. A part that fails or is ended keeps the rows
that it has, and the exit status is 1. FOLDER gets gpu.json and gpu.log. `python -m
benchmarks.gpu.keep FOLDER/gpu.json COMMIT` adds the rows to results.json, and `python
-m docs.make docs/gpu.md` makes the page.

Needs torch with CUDA, transformers and an installation of upref; TRL, verl and Liger
are checked where they are installed. The parts import all of these, so they are imported
where they are used: `--check` works without them.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from upref.files import write_atomically

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Part:
    """A process: `benchmarks.gpu.MODULE.main(place, *given)`."""

    module: str
    given: tuple[str, ...]
    limit: int  # seconds


def parts() -> dict[str, Part]:
    """Return all parts by name, in the order in which they start. The parts that a
    change of the code affects most come first.
    """
    from benchmarks.gpu import kernels, losses, steps, suite

    by_name = {
        "tests": Part("tests", (), TOGETHER),
        "facts": Part("facts", (), TOGETHER),
    }
    by_name["samplers"] = Part("samplers", (), TOGETHER)
    for i in range(suite.SHARDS):
        by_name[f"suite-{i}"] = Part("suite", (str(i),), TOGETHER)
    for i in range(steps.PARTS):
        by_name[f"steps-{i}"] = Part("steps", (str(i),), TOGETHER)
    for i in range(len(kernels.MAKERS)):
        by_name[f"kernels-{i}"] = Part("kernels", (str(i),), TOGETHER)
    for i in range(losses.SHARDS):
        by_name[f"losses-{i}"] = Part("losses", (str(i),), TOGETHER)
    by_name["training"] = Part("training", (), TRAINING)
    by_name["sizes"] = Part("sizes", (), 150)
    return by_name


ALONE = ("training", "sizes")
TOGETHER = 170  # seconds, of each part that measures no time
TRAINING = 300  # seconds; 230 once cut its last run
# minutes -> the parts to ask for in them, by the beginning of their names
SIDE_BY_SIDE = ("tests", "facts", "samplers", "suite", "steps", "kernels", "losses")
ASKS = {
    3: SIDE_BY_SIDE[:-1],
    6: (*SIDE_BY_SIDE, "sizes"),
    9: (*SIDE_BY_SIDE, "training"),
    11: (),
}


def main(argv: list[str] | None = None) -> int:
    """Run the parts whose names begin with a given word, or all of them. Return exit
    status 1 if one of them failed or was ended at its time limit, else 0. `--check`,
    `--child` and `--one` do another job and return its status.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--child"]:
        from benchmarks.gpu import training

        return training.child(argv[1:])
    if argv == ["--check"]:
        from benchmarks.gpu import check

        return check.main()
    args = make_parser().parse_args(argv)
    if args.one:
        return one(args.one, "cpu" if args.trial else "cuda", args.trial)
    args.out.mkdir(parents=True, exist_ok=True)
    every = parts()
    names = list(every)
    if args.asked:
        names = [name for name in names if name.startswith(tuple(args.asked))]
    # a time limit of the caller ends the parts too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="upref-gpu-") as folder:
        work = Path(folder)
        states: dict[str, Any] = {}
        together = [name for name in names if name not in ALONE]
        width = 2 if args.trial else os.cpu_count() or 4
        run(together, every, args, work, states, width)
        for name in ALONE:
            if name in names:
                run([name], every, args, work, states, 1)
    return int(any(state["status"] != 0 for state in states.values()))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "asked", nargs="*", help="parts, by the beginning of their names"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trial", action="store_true", help="small, on the CPU")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    return parser


def run(
    names: list[str],
    every: dict[str, Part],
    args: argparse.Namespace,
    work: Path,
    states: dict[str, Any],
    width: int,
) -> None:
    """Run parts side by side; at the end kill those that still run, and write gpu.json
    and gpu.log.

    Args:
        names: of the parts, in the order in which they start.
        every: all parts by name.
        args: the options of the command.
        work: folder of the rows and the logs of the parts.
        states: part -> its status and seconds; filled in place.
        width: how many parts may run at a time.
    """
    waiting, running = list(names), {}
    try:
        watch(waiting, running, every, args, work, states, width)
    finally:
        for process, _ in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        collect(args.out, work, states)


def watch(
    waiting: list[str],
    running: dict[str, tuple[subprocess.Popen[bytes], float]],
    every: dict[str, Part],
    args: argparse.Namespace,
    work: Path,
    states: dict[str, Any],
    width: int,
) -> None:
    """Start the waiting parts, and kill each part that runs past its time limit, until
    none is left.

    gpu.json and gpu.log are written whenever a part ends, and every five seconds.

    Args:
        waiting: names of parts; emptied in place.
        running: name -> its process and the time at which it started; changed in place.
        every: all parts by name.
        args: the options of the command.
        work: folder of the rows and the logs of the parts.
        states: part -> its status and seconds; filled in place.
        width: how many parts may run at a time.
    """
    written = time.monotonic()
    while waiting or running:
        while waiting and len(running) < width:
            name = waiting.pop(0)
            running[name] = (start(name, args, work), time.monotonic())
        for name, (process, since) in list(running.items()):
            took = time.monotonic() - since
            # a CPU takes longer than the GPU for which the limits are
            late = took > every[name].limit * (20 if args.trial else 1)
            if process.poll() is None:
                if not late:
                    continue
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            states[name] = {
                "status": "ended at its limit" if late else process.returncode,
                "seconds": round(took, 1),
            }
            del running[name]
            print(f"{name:14} {states[name]}", flush=True)
            collect(args.out, work, states)
        if time.monotonic() > written + 5:
            collect(args.out, work, states)
            written = time.monotonic()
        time.sleep(0.2)


def start(name: str, args: argparse.Namespace, work: Path) -> subprocess.Popen[bytes]:
    """Start a part as `--one`, in a process group of its own, which fetches nothing from
    Hugging Face. Its output is appended to work/NAME.log and its rows to
    work/NAME.jsonl.
    """
    command = [
        sys.executable, "-m", "benchmarks.gpu", "--out", str(args.out),
        "--one", name, str(work / f"{name}.jsonl"), str(work),
    ]  # fmt: skip
    if args.trial:
        command.append("--trial")
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with open(work / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,
            env=environment,
        )


def one(arguments: list[str], device: str, small: bool) -> int:
    """Run one part in this process; return exit status 0.

    Args:
        arguments: the part's name, the file for its rows, and a folder for its files.
        device: "cuda" or "cpu".
        small: whether this is a trial of the script.
    """
    from benchmarks.gpu.place import PartSetup

    name, rows, folder = arguments
    part = parts()[name]
    module = importlib.import_module(f"benchmarks.gpu.{part.module}")
    module.main(PartSetup(device, small, Path(rows), Path(folder)), *part.given)
    return 0


def collect(out: Path, work: Path, states: dict[str, Any]) -> None:
    """Write gpu.json and gpu.log from the rows and the logs that the parts have written
    so far; of each log its last 60,000 characters.
    """
    from benchmarks.gpu.place import lines

    rows = {path.stem: lines(path) for path in sorted(work.glob("*.jsonl"))}
    date = datetime.now(UTC).date().isoformat()
    found = {"date": date, "parts": states, "rows": rows}
    text = json.dumps(found, indent=1) + "\n"
    write_atomically(out / "gpu.json", text)
    logs = []
    for path in sorted(work.glob("*.log")):
        log = path.read_text(encoding="utf-8", errors="replace")
        logs.append(f"==== {path.stem}\n{log[-60_000:]}")
    write_atomically(out / "gpu.log", "\n".join(logs))


if __name__ == "__main__":
    sys.exit(main())
