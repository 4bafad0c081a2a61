# SPDX-License-Identifier: Apache-2.0
"""Faults injected into every command that writes: what happened, the exit status, what
was lost.

    python -m benchmarks.reliability                 all groups, three at a time; status 1: something was lost
    python -m benchmarks.reliability files threads   some of: mini suite exact audit venv site files disk network two
                                                     interrupt threads

Rows go to reliability.json, each group with its day and its commit; from there
`python -m docs.make docs/reliability.md` writes the page. Needs Linux; `disk` and
`network` need root, for a mount and a network namespace of their own; `audit` and
`venv` need a package index. One file, because every group is a few lines on the same
helpers.
"""

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import upref
from docs.site import __main__ as site_
from repro.exact import __main__ as exact_
from repro.mini import files
from repro.mini.round2 import report
from repro.mini.study import results, suite
from repro.mini.train import command, loop
from repro.mini.train.settings import Settings
from upref import cli
from upref_frameworks import audits
from upref_frameworks.audits import isolated

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
S = Settings(
    steps=4,
    prompts=8,
    responses=4,
    minibatches=2,
    warmup=0,
    train_problems=100,
    eval_every=2,
    eval_problems=4,
    eval_samples=2,
    checkpoint_every=1,
)
AUDITED = "openrlhf"  # one small wheel
CLOSED = "http://127.0.0.1:9/simple"  # nothing listens there
# a list that repro/venv.sh installs -> the packages of it that are installed here
ENVIRONMENT = {
    "torch-cpu": ("mpmath",),  # in the place of torch
    "base": (
        *(
            "hatchling",
            "tomlkit",
            "packaging",
            "pathspec",
            "pluggy",
            "trove-classifiers",
            "setuptools",
        ),
        *("networkx", "jinja2", "markupsafe"),
    ),
    "docs": (
        "alabaster",
        "babel",
        "docutils",
        "imagesize",
        "pygments",
        "snowballstemmer",
        "markupsafe",
    ),
}
# command, fault, times, what happened, exit status, what was lost
Row = tuple[str, str, int, str, str, str]
Work = Callable[[], object]
rng = random.Random()


def row(
    who: str,
    fault: str,
    happened: str,
    status: object = 2,
    times: int = 1,
    lost: str = "nothing",
) -> Row:
    """Return one row of the record.

    Args:
        who: the command.
        fault: what was done to it.
        happened: its last sentence, or what it left.
        status: its exit status, or the statuses in words.
        times: how often the fault was injected.
        lost: what was lost.
    """
    return who, fault, times, happened, str(status), lost


# ---- processes -----------------------------------------------------------------------
def nothing() -> None:
    """Prepare a process that needs no preparation."""


def start(work: Work, log: Path, before: Work = nothing) -> int:
    """Fork a process with a group of its own, so that nothing is imported again.

    Args:
        work: what the process does; its exit status is what this returns, or 0.
        log: file for its output.
        before: what the process does before the work.

    Returns:
        The id of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if process := os.fork():
        return process
    status = 99
    try:
        os.setsid()
        log_number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log_number, 1)
        os.dup2(log_number, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        before()
        status = int(work() or 0)
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    except upref.InputError as e:
        print(e, file=sys.stderr)
        status = 2
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def wait(process: int, seconds: float = 0, signal_number: int = 0) -> int:
    """Wait for the end of a process.

    Args:
        process: the id of the process.
        seconds: time after which the signal is sent to the group of the process.
        signal_number: the signal, or 0 for none.

    Returns:
        The exit status; negative, the signal that ended the process.
    """
    if signal_number:
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal_number)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def run(work: Work, log: Path, before: Work = nothing) -> tuple[int, str]:
    """Do the work in a process; return its exit status and its output."""
    status = wait(start(work, log, before))
    return status, log.read_text(errors="replace").strip()


def done(work: Work, log: Path) -> float:
    """Do work that must succeed in a process; return the seconds that it took."""
    begun = time.monotonic()
    status, output = run(work, log)
    assert status == 0, output[-3000:]
    return time.monotonic() - begun


def digest(folder: Path, *patterns: str) -> dict[str, str]:
    """Return the sha256 of every file in the folder that a pattern matches."""
    paths = [p for pattern in patterns for p in folder.rglob(pattern) if p.is_file()]
    return {str(p.relative_to(folder)): files.sha256(p) for p in sorted(paths)}


def sentence(output: str, folder: Path) -> str:
    """Return the last line of an output, without names of this machine."""
    if not output:
        return ""
    return output.splitlines()[-1].replace(f"{folder}/", "").replace(f"{ROOT}/", "")


def joined(values: Iterable[object]) -> str:
    """Return the distinct values in ascending order, as `0 or 2`."""
    return " or ".join(str(x) for x in sorted(set(values)))


# ---- kill -9 -------------------------------------------------------------------------
def killed(
    work: Work,
    out: Path,
    same: Callable[[], bool],
    times: int,
    seconds: float,
    stays: bool = False,
) -> int:
    """Kill a process with kill -9 at random moments, and start it again up to its end.

    Args:
        work: what the process does; it writes into `out`.
        out: the folder of the result.
        same: whether `out` holds the right result.
        times: how often to kill.
        seconds: a kill comes at most so long after the start.
        stays: whether `out` holds an earlier result, which must stay after every kill.

    Returns:
        How often the process reached its end.
    """
    log = out.with_name("log")
    hits = 0
    ends = 0
    status = 0
    while hits < times or status:
        process = start(work, log)
        if hits < times:
            status = wait(process, rng.uniform(0, seconds), signal.SIGKILL)
        else:
            status = wait(process)
        if status == -signal.SIGKILL:
            hits += 1
        elif status:
            output = log.read_text()
            assert "in use by" in output, output[-2000:]
        if stays or status == 0:
            assert same(), "another result"
        if status == 0:
            ends += 1
            if not stays:
                shutil.rmtree(out)
    return ends


def kill(
    folder: Path,
    who: str,
    what: str,
    work: Callable[[Path], object],
    *patterns: str,
    times: int = 8,
    stays: bool = False,
) -> Row:
    """Kill a command with kill -9, and return the row of it.

    Args:
        folder: where the command writes.
        who: the command.
        what: the files that are compared, in words.
        work: the command; it writes into the folder that it receives.
        patterns: of the files that must be the same as after an undisturbed run.
        times: how often to kill.
        stays: whether the result of an earlier run must stay after every kill.
    """
    out, whole = folder / "killed", folder / ("killed" if stays else "whole")
    seconds = done(lambda: work(whole), folder / "log")
    wanted = digest(whole, *patterns)

    def same() -> bool:
        """Compare the result with the undisturbed one; print which files differ."""
        result = digest(out, *patterns)
        names = wanted.keys() | result.keys()
        different = [name for name in names if wanted.get(name) != result.get(name)]
        print(different[:20], end="")
        return result == wanted and len(wanted) > 0

    ends = killed(lambda: work(out), out, same, times, seconds, stays)
    happened = f"started again, it ended {ends} times with {what} of an undisturbed run"
    if stays:
        happened = f"{what} of before stayed; built again, they were the same"
    return row(who, "kill -9", happened, "killed, then 0", times)


INSIDE = ("model.safetensors", "trainer.safetensors")  # a checkpoint
MINI = ("steps.jsonl", "evals.jsonl", "seen.npz", "step-4/model.safetensors")


def train(out: Path) -> object:
    """Train S into the folder, and print no line of it."""
    return loop.train(S, out, say=lambda _: None)


def exactly(out: Path) -> int:
    """Write one exact experiment of one objective into the folder."""
    return exact_.main(["rise", "--arms", "dapo", "--out", str(out)])


def suite_(out: Path) -> int:
    """Run a suite of two objectives in the folder; 1 if one of its runs failed."""
    wanted = {}
    for name in ("dapo", "up_dapo"):
        settings = replace(S, objective=name, steps=2, eval_every=2)
        wanted[settings.key] = settings
    with suite.alone(out) as lock:
        failures = suite.run_all(wanted, out, 2, lock)
        results.collect(out, set(wanted), out / "results")
    assert failures or set(results.load(out / "results")) == set(wanted)
    return bool(failures)


def mini(folder: Path) -> Iterator[Row]:
    yield kill(
        folder, "repro.mini.train", "the logs and the weights", train, *MINI, times=24
    )


def study(folder: Path) -> Iterator[Row]:
    what = "the records, logs and weights"
    patterns = (*MINI[:3], "step-2/model.safetensors")
    yield kill(folder, "repro.mini.study.suite", what, suite_, *patterns)


def exact(folder: Path) -> Iterator[Row]:
    yield kill(folder, "repro.exact", "report, figure and numbers", exactly, "*")


def audited(cache: Path) -> None:
    """Audit the framework, with its package and the report in the cache."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    text = str(isolated.run("audit", AUDITED, audits.framework(AUDITED).pin))
    files.write_atomically(cache / "answer", text)


def audit(folder: Path) -> Iterator[Row]:
    """Kill an audit; then audit a package of which one file was changed."""
    who = f"upref audit {AUDITED}"
    yield kill(folder, who, "the report and the package", audited, "answer", "*.py")
    os.environ["XDG_CACHE_HOME"] = str(folder / "whole")
    with next(folder.glob("whole/**/models/loss.py")).open("a") as file:
        file.write("# one line more\n")
    status, output = run(lambda: cli.main(["audit", AUDITED]), folder / "log")
    fault = "a line added to the installed package"
    yield row(who, fault, sentence(output, folder), status)


def site(folder: Path) -> Iterator[Row]:
    """Twelve pages: all of them, with their code and every objective's derivation, take
    minutes.
    """
    from sphinx.cmd import build

    from docs.site import gather, links

    pages = {
        p.name: p.read_text(encoding="utf-8")
        for p in sorted((ROOT / "docs").glob("*.md"))[:11]
    }

    def few(source: Path) -> None:
        source.mkdir(parents=True)
        gather.settings(source)
        (source / "index.md").write_text("# A few pages")
        for name, text in pages.items():
            (source / name).write_text(text, encoding="utf-8")

    whole = build.build_main

    def lenient(argv: list[str]) -> int:
        """Build without -W: links lead to pages that are not there."""
        return whole([x for x in argv if x != "-W"] + ["-D", "nb_execution_mode=off"])

    def work(out: Path) -> object:
        return site_.main(str(out))

    build.build_main = lenient
    gather.gather = few
    links.dead = lambda html: []
    who = "docs/build.sh, of twelve pages"
    yield kill(folder, who, "the pages", work, "html/**/*.html", times=4, stays=True)


# ---- the environment -----------------------------------------------------------------
def checkout(place: Path) -> Path:
    """A copy with venv.sh, upref and short lists: the lines of a few packages."""
    if not place.exists():
        new = place.with_name("new")
        shutil.rmtree(new, ignore_errors=True)
        lists = new / "repro/requirements"
        lists.mkdir(parents=True)
        (new / "upref").mkdir()
        for name in (
            "pyproject.toml",
            "hatch_build.py",
            "README.md",
            "LICENSE",
            "upref/__init__.py",
            "repro/venv.sh",
        ):
            shutil.copy(ROOT / name, new / name)
        for part, names in ENVIRONMENT.items():
            list_name = "base" if part == "torch-cpu" else part
            whole_list = (ROOT / f"repro/requirements/{list_name}.txt").read_text()
            lines = [
                line
                for line in whole_list.splitlines(keepends=True)
                if re.split("[=;]", line)[0] in names
            ]
            (lists / f"{part}.txt").write_text("".join(lines))
        (lists / "torch.txt").touch()
        new.rename(place)
    return place


def installed(place: Path, *parts: str) -> int:
    """Make the environment of a checkout with these parts; return the exit status."""
    return subprocess.run(
        ["bash", "repro/venv.sh", *parts], cwd=checkout(place)
    ).returncode


THEN_OFFLINE = "kill -9, Ctrl-C or SIGTERM, then no network"
PACKAGES = ("*.py", "*.so", "METADATA", "entry_points.txt")


def install_docs(place: Path) -> int:
    """Make the environment of a checkout with the part `docs`."""
    return installed(place, "docs")


def venv(folder: Path) -> Iterator[Row]:
    """Kill repro/venv.sh; interrupt it and go on without a network; let it install from
    a list that the package index does not match.
    """
    who, log, place = "repro/venv.sh docs", folder / "log", folder / "place"
    yield kill(folder, who, "every file", install_docs, *PACKAGES, times=10)
    done(partial(installed, place), log)
    shutil.copytree(place, folder / "base", symlinks=True)
    yield interrupted_then_offline(folder, who, place)
    docs_list = place / "repro/requirements/docs.txt"
    pins = re.sub("sha256:[0-9a-f]{8}", "sha256:00000000", docs_list.read_text())
    docs_list.write_text(pins)
    status, output = run(partial(install_docs, place), log)
    yield row(who, "the index has other files", sentence(output, folder), status)


def interrupted_then_offline(folder: Path, who: str, place: Path) -> Row:
    """Interrupt repro/venv.sh six times, and go on without a package index.

    Args:
        folder: has a copy of the checkout in `base`.
        who: the command.
        place: the checkout, with its environment. It ends as it begins.
    """
    log = folder / "log"
    base = partial(installed, place)
    docs = partial(install_docs, place)
    good = digest(place, *PACKAGES)
    signals = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
    sentences: list[str] = []
    while len(sentences) < 6:
        signal_number = signals[len(sentences) % 3]
        wait(start(docs, log), rng.uniform(2, 9), signal_number)
        status, output = run(docs, log, close_index)
        assert status in (0, 2), output
        assert good.items() <= digest(place, *PACKAGES).items(), output
        assert run(base, log)[0] == 0, output
        if status == 2:
            sentences.append(sentence(output, folder))
        shutil.rmtree(place)
        shutil.copytree(folder / "base", place, symlinks=True)
    (happened,) = set(sentences)
    lost = "nothing: every file of the environment of before is whole"
    return row(who, THEN_OFFLINE, happened, 2, len(sentences), lost)


def close_index() -> None:
    """Let pip find no package index in this process."""
    os.environ.update(
        PIP_INDEX_URL=CLOSED,
        PIP_EXTRA_INDEX_URL=CLOSED,
        PIP_RETRIES="1",
        PIP_CONFIG_FILE=os.devnull,
    )
    os.environ.pop("PIP_FIND_LINKS", None)


# ---- files that are not what they were -----------------------------------------------
def damaged(content: bytes) -> Iterator[bytes]:
    """The content cut, and one byte of it changed, at random places; its end twice;
    other content.
    """
    for _ in range(10):
        n = rng.randrange(len(content))
        yield content[:n]
        yield (
            content[:n] + bytes([content[n] ^ rng.randrange(1, 256)]) + content[n + 1 :]
        )
    yield content + content[-50:]
    yield b"garbage"


def row_of_ends(who: str, fault: str, ends: list[tuple[int, str]], folder: Path) -> Row:
    """Return one row for many runs of a command.

    Args:
        who: the command.
        fault: what was done to it.
        ends: exit status and output of each run: 0 with the same result, or 2 with one
            sentence.
        folder: is left out of the sentences.
    """
    statuses = [status for status, _ in ends]
    assert set(statuses) <= {0, 2}, ends
    assert not any("Traceback" in output for _, output in ends), ends
    sentences = [sentence(output, folder) for status, output in ends if status == 2]
    happened = sentences[:1]
    if 0 in statuses:
        happened.insert(0, "the same result")
    return row(who, fault, " or ".join(happened), joined(statuses), len(ends))


@dataclass(frozen=True)
class Training:
    """A command that trains, and the result of an undisturbed run of it.

    Args:
        train: the command.
        out: the folder into which it writes.
        log: the file for its output.
        undisturbed: sha256 of the files of the undisturbed run.
    """

    train: Callable[[], int]
    out: Path
    log: Path
    undisturbed: dict[str, str]

    def is_right(self) -> bool:
        """Whether the folder has the files of the undisturbed run."""
        return digest(self.out, *MINI) == self.undisturbed


def make_training(folder: Path) -> Training:
    """Train undisturbed into `whole` of the folder; return the command for `run`."""
    settings, out, whole = folder / "s.json", folder / "run", folder / "whole"
    S.write(settings)
    train(whole)
    command_again = partial(
        command.main, ["--settings", str(settings), "--out", str(out)]
    )
    return Training(command_again, out, folder / "log", digest(whole, *MINI))


def files_(folder: Path) -> Iterator[Row]:
    """Damage the files that commands read."""
    training = make_training(folder)
    yield from damaged_results(folder)
    yield from damaged_checkpoint(folder, training)
    shutil.rmtree(training.out)
    shutil.copytree(folder / "whole", training.out)
    yield altered_log(folder, training)
    yield file_with_code(folder)


def damaged_results(folder: Path) -> Iterator[Row]:
    """Damage recorded results, and list them."""
    copy = folder / "results"
    shutil.copytree(results.folder_of(2), copy)
    records = results.load(copy)

    def show() -> int:
        status = suite.main(["--list", "--results", str(copy)])
        assert status or results.load(copy) == records, "silently wrong"
        return status

    for name in ("runs.jsonl", "manifest.json"):
        path = copy / name
        before = path.read_bytes()
        ends = []
        for content in damaged(before):
            path.write_bytes(content)
            ends.append(run(show, folder / "log"))
        path.write_bytes(before)
        fault = f"`{name}` cut or altered"
        yield row_of_ends("repro.mini.study.suite", fault, ends, folder)


def damaged_checkpoint(folder: Path, training: Training) -> Iterator[Row]:
    """Damage a file of an interrupted run, and continue the run."""
    out = training.out

    def interrupt_run() -> None:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "whole", out)
        (out / "done.json").unlink()
        shutil.rmtree(out / "checkpoints/step-4")

    inside = [f"checkpoints/step-3/{name}" for name in (*INSIDE, files.PROVENANCE)]
    for name in ("steps.jsonl", *inside):
        path = out / name
        ends = []
        interrupt_run()
        for content in rng.sample([*damaged(path.read_bytes())], 4):
            interrupt_run()
            path.write_bytes(content)
            status, output = run(training.train, training.log)
            assert status or training.is_right(), "silently wrong"
            ends.append((status, output))
        fault = f"`{path.name}` of an interrupted run cut or altered"
        yield row_of_ends("repro.mini.train", fault, ends, folder)


def altered_log(folder: Path, training: Training) -> Row:
    """Alter the log of a run that has ended, and collect its result."""
    with (training.out / "steps.jsonl").open("r+") as file:
        file.write("[")

    def collect() -> bool:
        return bool(results.collect(folder, {"run"}, folder / "new"))

    status, output = run(collect, training.log)
    fault = "a log altered after its run ended"
    return row("repro.mini.study.suite", fault, sentence(output, folder), status)


def file_with_code(folder: Path) -> Row:
    """Give a command that reads tensors a file that runs code when it is unpickled."""

    class Payload:
        def __reduce__(self):
            return Path.touch, (folder / "ran",)

    path = folder / "minibatch.safetensors"
    torch.save({"settings": {}, "batch": Payload()}, path)
    status, output = run(
        lambda: command.main(["--minibatch", str(path)]), folder / "log"
    )
    assert not (folder / "ran").exists()
    return row(
        "repro.mini.train --minibatch",
        "a file that holds code",
        sentence(output, folder),
        status,
        lost="nothing: it did not run",
    )


# ---- full disks, no network ----------------------------------------------------------
libc = ctypes.CDLL(None, use_errno=True)
NAMESPACE = {"mount": 0x20000, "network": 0x40000000}


def alone_with(what: str) -> None:
    """Give this process a namespace of its own, of mounts or of the network."""
    if libc.unshare(NAMESPACE[what]):
        raise OSError(ctypes.get_errno(), f"this needs root: no {what} namespace")


def small_disk(folder: Path, size: str) -> None:
    """A file system of that size on the folder, for this process alone."""
    alone_with("mount")
    libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE
    if libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), "no tmpfs could be mounted")


def full(place: Path, name: str, make: Callable[[Path], int]) -> int:
    """Run a command on a full disk that has the file that the command writes.

    Args:
        place: the disk.
        name: the file.
        make: the command; it writes the file into the folder that it receives.

    Returns:
        The status of the command, or 98 if the file has changed or is not alone.
    """
    (place / name).write_text("as it was")
    with contextlib.suppress(OSError), (place / "full").open("wb") as f:
        while f.write(b"x" * 4096):
            f.flush()
    (place / "full").open("r+b").truncate(8192)
    status = make(place)
    left = {p.name for p in place.iterdir()} - {"full"}
    unchanged = left == {name} and (place / name).read_text() == "as it was"
    return status if unchanged else 98


def draw_cap(folder: Path) -> int:
    """Draw a Cap map into the folder."""
    return cli.main(["cap", "dapo", "-o", str(folder / "cap.svg")])


def write_explorer(folder: Path) -> int:
    """Write the explorer into the folder."""
    return cli.main(["explorer", str(folder / "x.html")])


def write_report(folder: Path) -> int:
    """Write the report of the recorded results into the folder."""

    def write() -> int:
        return int(bool(report.write(results.load(results.folder_of(2)), folder)))

    return suite.said(write, "report")


# command -> the file that it writes, and a function that writes it into a folder
WRITES = {
    "upref cap -o": ("cap.svg", draw_cap),
    "upref explorer": ("x.html", write_explorer),
    "repro.exact": ("rise.svg", exactly),
    "repro.mini.round2.report": ("report.md", write_report),
}


def disk(folder: Path) -> Iterator[Row]:
    """Train with a limit on the size of a file, and run commands on a full disk."""
    yield limited_files(folder, make_training(folder))
    place = folder / "disk"
    place.mkdir()

    def mount() -> None:
        small_disk(place, "64k")

    for who, (name, make) in WRITES.items():
        status, output = run(partial(full, place, name, make), folder / "log", mount)
        assert status == 2, (who, status, output)
        happened = sentence(output, folder)
        lost = "nothing: the old file stayed"
        yield row(who, "a full disk (tmpfs)", happened, lost=lost)


def limited_files(folder: Path, training: Training) -> Row:
    """Train four times with a limit on the size of a file, then without a limit."""

    def limit() -> None:
        size = random.choice([100, 2500, 100_000, 600_000])
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    sentences = []
    for _ in range(4):
        random.seed()
        status, output = run(training.train, training.log, limit)
        assert status == 2 and "Traceback" not in output, output
        sentences.append(sentence(output, folder))
    assert run(training.train, training.log)[0] == 0 and training.is_right()
    return row(
        "repro.mini.train",
        "files limited to 100 B to 600 kB (`ulimit -f`)",
        max(sentences, key=len),
        2,
        len(sentences),
        "nothing: with space it ended with the same bits",
    )


def network(folder: Path) -> Iterator[Row]:
    """Check a loss without a network, and audit a package that is not cached."""
    log = folder / "log"
    (folder / "my.py").write_text("import upref\ndapo = upref.get('dapo').loss\n")
    check = partial(cli.main, ["check", f"{folder}/my.py:dapo", "--as", "dapo"])
    online = run(check, log)
    offline = run(check, log, partial(alone_with, "network"))
    assert online == offline and online[0] == 0, (online, offline)
    yield row("upref check", "no network", "the same report, to the letter", 0)

    def go_offline() -> None:
        alone_with("network")
        os.environ.update(
            XDG_CACHE_HOME=str(folder / "cache"),
            PIP_CONFIG_FILE=os.devnull,
            PIP_INDEX_URL=CLOSED,
        )
        os.environ.pop("PIP_FIND_LINKS", None)

    status, output = run(lambda: cli.main(["audit", AUDITED]), log, go_offline)
    assert status == 2 and output.count("\n") == 0, output
    assert not list((folder / "cache").rglob("*.py")), output
    happened = sentence(output, folder)
    yield row(f"upref audit {AUDITED}", "no network, nothing cached", happened)


# ---- two at once, interrupts, threads ------------------------------------------------
def two(folder: Path) -> Iterator[Row]:
    """Start a command twice at the same time, with one folder for both."""
    training = make_training(folder)
    logs, fault = [folder / "a", folder / "b"], "two in one folder"

    def run_twice(work: Work) -> list[int]:
        """Start the work twice, and return the statuses, the lower one first."""
        return sorted(map(wait, [start(work, log) for log in logs]))

    assert run_twice(training.train) == [0, 2] and training.is_right()
    outputs = [log.read_text() for log in logs]
    refusal = next(output for output in outputs if "in use" in output)
    yield row("repro.mini.train", fault, sentence(refusal, folder), "0 and 2")
    done(lambda: exactly(folder / "one"), logs[0])
    assert run_twice(lambda: exactly(folder / "two")) == [0, 0]
    assert digest(folder / "two", "*") == digest(folder / "one", "*")
    yield row("repro.exact", fault, "both wrote the same, whole files", "0 and 0")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")

    def install() -> None:
        print(isolated.place(AUDITED, audits.framework(AUDITED).pin).version)

    assert run_twice(install) == [0, 0]
    assert not list(folder.glob("cache/**/.half-*"))
    done(install, logs[0])
    fault = "two install the package"
    yield row(f"upref audit {AUDITED}", fault, "one whole folder", "0 and 0")


INTERRUPTED = [  # as they are typed; {} is a folder
    "-m upref check {}/slow.py:loss --as dapo",
    "-m upref derive all",
    "-m upref audit verl",
    "-m paper claims --run",
    "-m repro.mini.train --settings {}/s.json --out {}/run",
    "-m repro.exact --out {}/exact",
    "-m repro.reference dapo",
    "-m repro.mini.study.suite --out {}/runs --results {}/new",
    "-m repro.mini.round2.report --results {}/new",
    "-m repro.mini.compare up_dapo --out {}/runs",
    "-m docs.make docs/reliability.md",
    "-m docs.site {}/site",
    "-m benchmarks.speed",
    "figures/make.py {}",
]


def caught(process: int, number: int) -> bool:
    """Whether the process has a handler of that signal."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1)


INSTALLS = "repro/venv.sh docs"


def long_commands(folder: Path) -> dict[str, list[str]]:
    """The commands of INTERRUPTED and those of a shell: name -> arguments."""
    S.write(folder / "s.json")
    (folder / "slow.py").write_text(
        "import time\ndef loss(log_prob, old_log_prob, advantages, mask): time.sleep(60)\n"
    )
    commands = {}
    for typed in INTERRUPTED:
        name = typed.removeprefix("-m ").replace("{}/", "").removesuffix(" {}")
        arguments = typed.replace("{}", str(folder)).split()
        commands[name] = [sys.executable, *arguments]
    script = checkout(folder / "place") / "repro/venv.sh"
    commands[INSTALLS] = ["bash", str(script), "docs"]
    return commands


def interrupt(folder: Path) -> Iterator[Row]:
    """End every long command with kill -9, Ctrl-C and SIGTERM."""
    commands = long_commands(folder)
    yield from killed_anywhere(folder, commands)
    for name, argv in commands.items():
        happened = ""
        statuses = []
        for signal_number in (signal.SIGINT, signal.SIGTERM) * 2:
            if name == INSTALLS:  # of a complete environment nothing is left to do
                shutil.rmtree(folder / "place/.venv", ignore_errors=True)
            status, output = interrupted(name, argv, signal_number)
            if status <= 2:  # it had ended before the signal came
                continue
            statuses.append(status)
            if status == 130 and "interrupted" in output:
                happened = sentence(output, folder)
        happened = happened.replace(f"{sys.executable} ", "") or "it had ended"
        if statuses:
            fault = "Ctrl-C or SIGTERM"
            yield row(name, fault, happened, joined(statuses), len(statuses))


def interrupted(name: str, argv: list[str], signal_number: int) -> tuple[int, str]:
    """Start a command, and send it a signal at a random moment after it has a handler.

    Args:
        name: the command, for messages.
        argv: the command with its arguments.
        signal_number: the signal.

    Returns:
        The exit status as a shell gives it, and what is on stderr.
    """
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not caught(process.pid, signal.SIGTERM):
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 4))
    process.send_signal(signal_number)
    # its children have the pipe too: they have ended
    output = process.communicate(timeout=120)[1].strip()
    status = shell_status(process.returncode)
    right = status in (0, 2, 128 + signal_number) and "Traceback" not in output
    assert right, (name, process.returncode, output)
    return status, output


def shell_status(returncode: int) -> int:
    """Return the exit status as a shell gives it: for a signal, 128 + its number."""
    return 128 - returncode if returncode < 0 else returncode


KILLS = 2  # of each long command
LASTS = 9.0  # seconds, within which a command is killed
GRACE = 30.0  # seconds in which what a killed command has started must end


def killed_anywhere(folder: Path, commands: dict[str, list[str]]) -> Iterator[Row]:
    """kill -9 of the process group of each long command, of the suite of tests too.

    A process that has left the group, as the child of `upref check` has, must end by
    itself; the same command must then start and end on SIGTERM without a traceback; and
    the checkout must be as it was.
    """
    suite_of_tests = ["bash", "tests/run.sh", "save"]
    before = checkout_state()
    for name, argv in (commands | {"tests/run.sh save": suite_of_tests}).items():
        for _ in range(KILLS):
            process = subprocess.Popen(argv, cwd=ROOT, start_new_session=True, **SILENT)
            wait_for_kill(process)
            assert ended_within(process.pid, GRACE), (name, of_session(process.pid))
        again = subprocess.Popen(
            argv,
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(rng.uniform(3, LASTS))
        os.killpg(again.pid, signal.SIGTERM)
        output = again.communicate(timeout=120)[1]
        status = shell_status(again.returncode)
        right = status in (0, 2, 143) and "Traceback" not in output
        assert right, (name, status, output)
        assert ended_within(again.pid, GRACE), (name, of_session(again.pid))
        happened = "no process stayed, and it started again"
        yield row(name, "kill -9", happened, f"killed, then {status}", KILLS)
    assert checkout_state() == before, "a file of the checkout has changed"


SILENT: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.DEVNULL,
    "stderr": subprocess.DEVNULL,
}


def wait_for_kill(process: "subprocess.Popen[Any]") -> None:
    """Kill the group of a process at a random moment; it may have ended before."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(rng.uniform(0, LASTS))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def of_session(session: int) -> list[str]:
    """The processes of a session that have not ended, by name."""
    names = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text(errors="replace").rpartition(")")
            state, _parent, _group, session_of_process = fields.split()[:4]
            if int(session_of_process) == session and state != "Z":
                names.append(name)
    return names


def ended_within(session: int, seconds: float) -> bool:
    """Whether all processes of a session end by themselves in that time."""
    deadline = time.monotonic() + seconds
    while of_session(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def checkout_state() -> str:
    """What git says of the checkout, without the record of this command and the page that
    `docs.make` writes from it, which is one of the long commands."""
    status = ["git", "-C", str(ROOT), "status", "--porcelain", "--", "."]
    left_out = f":!{RECORD.relative_to(ROOT)}", ":!docs/reliability.md"
    return subprocess.run(
        [*status, *left_out], capture_output=True, text=True, check=True
    ).stdout


def shared_state() -> tuple[list, ...]:
    """What the threads of a process share: streams and hooks, torch's settings, the
    generators and the folder, handlers.
    """
    return (
        [
            sys.stdout,
            sys.stderr,
            sys.excepthook,
            sys.gettrace(),
            threading.excepthook,
            warnings.showwarning,
        ],
        [
            list(warnings.filters),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
        ],
        [
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(np.random.get_state()),
            os.getcwd(),
        ],
        [signal.getsignal(signal.SIGINT), torch.utils.hooks.RemovableHandle.next_id],
    )


def make_noise() -> None:
    """Change what the threads of a process share: print, warn, draw, set a dtype."""
    print("swallowed")
    warnings.warn("ignored", stacklevel=2)
    torch.set_default_dtype(torch.float64)
    torch.rand(1)
    np.random.rand()
    random.random()


def noisy_loss(sign: int) -> Callable:
    """Return DAPO's loss that makes noise; with -1 for the sign, it is wrong."""

    def dapo(log_prob, old_log_prob, advantages, mask):
        make_noise()
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        surrogate = torch.minimum(r * advantages, r.clamp(0.8, 1.28) * advantages)
        return -sign * (surrogate * mask).sum() / mask.sum()

    return dapo


def noisy_kl(sign: int) -> Callable:
    """Return the estimator k1 that makes noise; with -1 for the sign, it is wrong."""

    def k1(log_prob, ref_log_prob):
        make_noise()
        return sign * (log_prob - ref_log_prob)

    return k1


def is_verdict_right(i: int) -> bool:
    """Check a noisy function: one in three is wrong, one in twenty is a loss."""
    sign = 1 if i % 3 else -1
    if i % 20:
        result = upref.check_kl(noisy_kl(sign), "k1")
    else:
        result = upref.check(noisy_loss(sign), "dapo")
    return bool(result) == (sign == 1)


def threads(folder: Path, checks: int = 1000, workers: int = 8) -> Iterator[Row]:
    """Check noisy losses and KL estimators, right and wrong, in several threads."""
    before = shared_state()
    with ThreadPoolExecutor(workers) as pool:
        right = list(pool.map(is_verdict_right, range(checks)))
    assert all(right) and shared_state() == before, Counter(right)
    yield row(
        f"upref.check, check_kl in {workers} threads",
        "losses that print, warn, draw, change a dtype",
        "every verdict right; stdout, warnings, hooks, dtype, generators as before",
        "",
        checks,
    )


# ---- the command ---------------------------------------------------------------------
GROUPS = {
    "mini": mini,
    "suite": study,
    "exact": exact,
    "audit": audit,
    "venv": venv,
    "site": site,
    "files": files_,
    "disk": disk,
    "network": network,
    "two": two,
    "interrupt": interrupt,
    "threads": threads,
}


def keep_group(name: str, folder: Path) -> None:
    """Run a group in the folder, and keep its rows."""
    keep(name, list(GROUPS[name](folder)))


AT_ONCE = 3  # groups: most of their time they wait for a random moment


def main(argv: list[str] | None = None) -> int:
    """Run the groups that are named, or all of them; 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", help=f"some of {', '.join(GROUPS)}")
    names = parser.parse_args(argv).groups
    if unknown := [name for name in names if name not in GROUPS]:
        parser.error(f"there is no group {unknown[0]}; there are {', '.join(GROUPS)}")
    left, running = list(names or GROUPS), {}
    lost = False
    while left or running:
        while left and len(running) < AT_ONCE:
            name = left.pop(0)
            folder = Path(tempfile.mkdtemp())
            process = start(partial(keep_group, name, folder), folder / "all")
            running[process] = name, folder, time.monotonic()
        process, status = os.wait()
        name, folder, begun = running.pop(process)
        seconds = time.monotonic() - begun
        print(f"{name}: {'FAILED' if status else 'done'}, {seconds:.0f} s", flush=True)
        if status:
            print((folder / "all").read_text(errors="replace")[-5000:], flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        lost |= bool(status)
    return int(lost)


def commit() -> str:
    """Of the code that runs; with a + where files of it are changed."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*git, "rev-parse", "--short=9", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    code = [".", f":!{RECORD.relative_to(ROOT)}", ":!docs"]
    changed = subprocess.run(
        [*git, "diff", "--quiet", "HEAD", "--", *code], check=False
    ).returncode
    return head.strip() + ("+" if changed else "")


def keep(name: str, rows: list[Row]) -> None:
    """Rows with the day and the commit that they are of. Two of this command may run,
    each with groups of its own.
    """
    made = {
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "rows": rows,
    }
    lock = os.open(RECORD.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    record = json.loads(RECORD.read_text(encoding="utf-8")) | {name: made}
    files.write_atomically(
        RECORD,
        json.dumps({k: record[k] for k in GROUPS if k in record}, indent=1) + "\n",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
