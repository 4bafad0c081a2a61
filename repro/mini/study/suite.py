# SPDX-License-Identifier: Apache-2.0
"""Runs the registered experiments over the cores there are:
`python -m repro.mini.study.suite` (-h for its options).

One process a core, one thread each, the core experiments first, seed by seed. Stop it
at any moment and start it again: finished runs are kept, begun ones go on from their
last checkpoint. Runs that two experiments share run once. At the end (also of an
interrupted one) it writes repro/mini/results/. Exit status: 0 all ran, 1 some run
failed, 2 could not start, 130 or 143 interrupted.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from repro.mini import files
from repro.mini.study import plan, results
from repro.mini.train.settings import Settings
from upref import interrupt
from upref.errors import InputError

ROOT = Path(__file__).parents[3]
OUT = ROOT / "repro" / "out" / "mini"
TRAIN = "repro.mini.train"
# the first round is closed, and its page stays as it is
REPORT = "repro.mini.round2.report"
say = Console(highlight=False, soft_wrap=True).print


def alone(out: Path):
    """One suite at a time in one folder. The runs inherit the lock: it lasts while one
    of them lives.
    """
    return files.alone(out, "another suite or by its runs")


def run_all(
    wanted: dict[str, Settings],
    out: Path,
    jobs: int,
    lock: int,
    hours: float = float("inf"),
    train: str = "",
    known: dict[str, results.Record] | None = None,
    ended: Callable[[], object] = lambda: None,
) -> list[str]:
    """Train what is not finished, `jobs` at a time; no new one after `hours`. Returns a
    sentence for each failure.

    How long it takes is foretold from the runs that are known; `ended` is called
    whenever one more has ended.
    """
    todo = [name for name in wanted if not results.status(out / name)]
    say(
        f"{len(wanted) - len(todo)} of {len(wanted)} runs are finished; {len(todo)} to go, {jobs} at a time."
    )
    if todo:
        left = results.forecast([wanted[name] for name in todo], known or {}) / 3600
        some = f", {lasting(left / jobs)} if {jobs} are free" if jobs > 1 else ""
        say(f"They take {lasting(left)} of one core{some}.")
    failures: list[str] = []
    running: dict[str, subprocess.Popen] = {}
    start = time.monotonic()
    with _bars(sum(wanted[n].steps for n in todo)) as bars:
        try:
            while running or (todo and time.monotonic() - start < hours * 3600):
                while (
                    todo
                    and len(running) < jobs
                    and time.monotonic() - start < hours * 3600
                ):
                    name = todo.pop(0)
                    running[name] = _launch(
                        out / name, wanted[name], lock, train or TRAIN
                    )
                    bars.begin(name, wanted[name].steps)
                for name in [n for n, p in running.items() if p.poll() is not None]:
                    failures += _finished(out / name, running.pop(name).returncode)
                    bars.end(name, results.status(out / name) or "failed")
                    ended()
                for name in running:
                    bars.at(name, _steps(out / name))
                time.sleep(0.3)
        finally:
            _stop(running.values())
    return failures


def lasting(hours: float) -> str:
    """A time to wait, in words."""
    if hours < 1 / 12:
        return "a few minutes"
    return (
        f"about {hours:.1f} hours" if hours >= 2 else f"about {60 * hours:.0f} minutes"
    )


def _launch(
    folder: Path, settings: Settings, lock: int, train: str
) -> subprocess.Popen:
    folder = folder.resolve()  # the run works in ROOT
    folder.mkdir(parents=True, exist_ok=True)
    asked = folder / "asked.json"
    files.write_atomically(asked, json.dumps(asdict(settings)))
    one = {
        v: "1" for v in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    }
    command = [
        sys.executable,
        "-m",
        train,
        "--settings",
        str(asked),
        "--out",
        str(folder),
    ]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | one,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[lock],
        )


def _finished(folder: Path, code: int) -> list[str]:
    """Nothing for a run that is a result; a sentence for one that failed and will be
    tried again.
    """
    if code == 0 and results.status(folder):
        return []
    last = (
        [line.strip() for line in _tail(folder / "log.txt") if line.strip()]
        or ["no word"]
    )[-1]
    # not finite: the same seed would end there again
    if code == 1 and list(folder.glob("minibatch-*")):
        why = f"stopped at step {_steps(folder)}: {last}"
        files.write_atomically(folder / "failed.json", json.dumps({"status": why}))
        return []
    return [
        f"{folder.name} ended with status {code}: {last} (all of it: {folder / 'log.txt'})"
    ]


def _tail(path: Path, size: int = 4000) -> list[str]:
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - size))
        return f.read().decode(errors="replace").splitlines()


def _steps(folder: Path) -> int:
    path = folder / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _stop(processes: Iterable[subprocess.Popen]) -> None:
    for p in processes:
        p.terminate()
    for p in processes:
        try:
            p.wait(10)
        except subprocess.TimeoutExpired:
            p.kill()


class _bars:
    """A bar for the whole and one for each running run; a line for each end where the
    output is no terminal.
    """

    def __init__(self, steps: int):
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        ]
        self.progress = Progress(
            *columns, TimeRemainingColumn(), disable=not sys.stdout.isatty()
        )
        self.all = self.progress.add_task("all steps", total=steps)
        self.rows: dict[str, tuple] = {}

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()

    def begin(self, name: str, steps: int) -> None:
        self.rows[name] = (
            self.progress.add_task(name, total=steps),
            time.monotonic(),
            steps,
        )

    def at(self, name: str, step: int) -> None:
        row = self.rows[name][0]
        before = self.progress.tasks[self.progress.task_ids.index(row)].completed
        self.progress.update(row, completed=step)
        self.progress.advance(self.all, step - before)

    def end(self, name: str, word: str) -> None:
        row, start, steps = self.rows[name]
        self.at(name, steps)
        self.progress.remove_task(row)
        self.progress.console.print(
            f"{word:8} {name} ({time.monotonic() - start:.0f} s)", highlight=False
        )


def cores() -> int:
    return len(os.sched_getaffinity(0))


def said(work: Callable[[], int], who: str) -> int:
    """work(), with what a user can set right said in one sentence."""
    interrupt.then("the same command goes on from here")
    try:
        return work()
    except InputError as error:
        print(f"{who}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"{who}: {error.strerror or error}: {error.filename or 'is the disk full?'}",
            file=sys.stderr,
        )
        return 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m repro.mini.study.suite", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--round",
        type=int,
        choices=(1, 2),
        help="of experiments (default: 2, or that of --only)",
    )
    parser.add_argument(
        "--core", action="store_true", help="only the core experiments of round 1"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only these experiments"
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="only the runs that the results do not hold yet",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="show the experiments and how many of their runs are there",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check the records of every round; train nothing",
    )
    parser.add_argument(
        "--hours",
        type=float,
        default=float("inf"),
        help="begin no new run after so many hours",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=cores(),
        help="runs at a time (default: one for each core)",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the runs")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder of what is to be committed (default: the round's)",
    )
    args = parser.parse_args(argv)

    def work() -> int:
        if args.verify:
            return _verify()
        round = args.round or (
            plan.load(args.only[0]).round if args.only else 1 if args.core else 2
        )
        names = args.only or plan.names(args.core, round)
        folder = args.results or results.folder_of(round)
        known = results.load(folder)
        held = known if args.missing else {}
        wanted = {name: s for name, s in plan.queue(names).items() if name not in held}
        if args.missing and not wanted:
            say(
                f"Nothing is missing: {folder} holds all {len(plan.queue(names))} runs."
            )
            say("To train them again: --out RUNS --results FOLDER.")
            return 0
        if args.list:
            return _list(names, wanted, args.out, known)
        if args.jobs < 1 or args.hours <= 0:
            raise InputError("--jobs must be at least 1 and --hours more than 0.")
        with alone(args.out) as lock:
            try:
                collect = lambda: results.collect(args.out, set(wanted), folder)
                failures = run_all(
                    wanted,
                    args.out,
                    args.jobs,
                    lock,
                    args.hours,
                    known=known,
                    ended=collect,
                )
            finally:
                known = collect()
                if round == 2:
                    importlib.import_module(REPORT).write(known, folder)
        for sentence in failures:
            print(sentence, file=sys.stderr)
        say(f"{sum(n in known for n in wanted)} of {len(wanted)} runs are in {folder}.")
        return 1 if failures else 0

    return said(work, "suite")


def _verify() -> int:
    """One line: what is whole. Raises InputError on the first record that is not."""
    mini = results.folder_of(2).parents[1]
    folders = [
        results.folder_of(1),
        results.folder_of(2),
        mini / "stale" / "results",
        mini / "controls" / "results",
    ]
    folders = [folder for folder in folders if folder.exists()]
    say(
        "; ".join(
            f"{folder.relative_to(ROOT)}: all {len(results.load(folder))} records are whole"
            for folder in folders
        )
    )
    return 0


def _list(
    names: Iterable[str], wanted: dict[str, Settings], out: Path, known: Container[str]
) -> int:
    for name in names:
        e, mine = plan.load(name), plan.queue([name]).keys() & wanted
        done = sum(n in known or bool(results.status(out / n)) for n in mine)
        say(
            f"{name:26} {'core' if e.core else '':5} {done:3} of {len(mine):3} runs  {e.question}",
            markup=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
