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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
    return who, fault, times, happened, str(status), lost


# ---- processes -----------------------------------------------------------------------
def start(work: Work, log: Path, before: Work = lambda: None) -> int:
    """A process group of its own, forked, so that nothing is imported again; its output
    goes to the log.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if process := os.fork():
        return process
    status = 99
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for number in (1, 2):
            os.dup2(out, number)
        sys.stdout, sys.stderr = (
            open(1, "w", closefd=False),  # noqa: SIM115
            open(2, "w", closefd=False),  # noqa: SIM115
        )
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


def wait(process: int, after: float = 0, sign: int = 0) -> int:
    """Its exit status; negative, the signal that ended it. sign: sent to its group
    after so many seconds.
    """
    if sign:
        time.sleep(after)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, sign)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def run(work: Work, log: Path, before: Work = lambda: None) -> tuple[int, str]:
    """(exit status, output)"""
    status = wait(start(work, log, before))
    return status, log.read_text(errors="replace").strip()


def done(work: Work, log: Path) -> float:
    """Seconds that it took to end well."""
    begun = time.monotonic()
    status, said = run(work, log)
    assert status == 0, said[-3000:]
    return time.monotonic() - begun


def digest(folder: Path, *patterns: str) -> dict[str, str]:
    found = sorted(
        p for pattern in patterns for p in folder.rglob(pattern) if p.is_file()
    )
    return {str(p.relative_to(folder)): files.sha256(p) for p in found}


def sentence(said: str, folder: Path) -> str:
    """The last line of what a command says, without names of this machine."""
    return (
        said.splitlines()[-1].replace(f"{folder}/", "").replace(f"{ROOT}/", "")
        if said
        else ""
    )


# ---- kill -9 -------------------------------------------------------------------------
def killed(
    work: Work,
    out: Path,
    same: Callable[[], bool],
    times: int,
    seconds: float,
    stays: bool = False,
) -> int:
    """kill -9 so often, at random moments; what is killed is started again, up to its
    end, which must be the same.

    Returns how often it ended. stays: the result of before must be there after every
    kill.
    """
    log, hits, ends, status = out.with_name("log"), 0, 0, 0
    while hits < times or status:
        process = start(work, log)
        status = (
            wait(process, rng.uniform(0, seconds), signal.SIGKILL)
            if hits < times
            else wait(process)
        )
        hits += status == -signal.SIGKILL
        assert status in (0, -signal.SIGKILL) or "in use by" in log.read_text(), (
            log.read_text()[-2000:]
        )
        assert same() if stays or status == 0 else True, "another result"
        ends += status == 0
        if status == 0 and not stays:
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
    """work: writes into the folder that it is given; patterns: of the files there that
    must be the same.
    """
    out, whole = folder / "killed", folder / ("killed" if stays else "whole")
    seconds = done(lambda: work(whole), folder / "log")
    wanted = digest(whole, *patterns)

    def same() -> bool:
        found = digest(out, *patterns)
        print(
            [k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k)][
                :20
            ],
            end="",
        )
        return found == wanted and len(wanted) > 0

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
    wanted = {
        s.key: s
        for s in (
            replace(S, objective=name, steps=2, eval_every=2)
            for name in ("dapo", "up_dapo")
        )
    }
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
    what, patterns = (
        "the records, logs and weights",
        (*MINI[:3], "step-2/model.safetensors"),
    )
    yield kill(folder, "repro.mini.study.suite", what, suite_, *patterns)


def exact(folder: Path) -> Iterator[Row]:
    yield kill(folder, "repro.exact", "report, figure and numbers", exactly, "*")


def audited(cache: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    files.write_atomically(
        cache / "answer",
        str(isolated.run("audit", AUDITED, audits.framework(AUDITED).pin)),
    )


def audit(folder: Path) -> Iterator[Row]:
    who = f"upref audit {AUDITED}"
    yield kill(folder, who, "the report and the package", audited, "answer", "*.py")
    os.environ["XDG_CACHE_HOME"] = str(folder / "whole")
    next(folder.glob("whole/**/models/loss.py")).open("a").write("# one line more\n")
    status, said = run(lambda: cli.main(["audit", AUDITED]), folder / "log")
    yield row(
        who, "a line added to the installed package", sentence(said, folder), status
    )


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
            lines = (
                (ROOT / f"repro/requirements/{part.replace('torch-cpu', 'base')}.txt")
                .read_text()
                .splitlines(True)
            )
            (lists / f"{part}.txt").write_text(
                "".join(x for x in lines if re.split("[=;]", x)[0] in names)
            )
        (lists / "torch.txt").touch()
        new.rename(place)
    return place


def installed(place: Path, *parts: str) -> int:
    return subprocess.run(
        ["bash", "repro/venv.sh", *parts], cwd=checkout(place)
    ).returncode


THEN_OFFLINE = "kill -9, Ctrl-C or SIGTERM, then no network"
PACKAGES = ("*.py", "*.so", "METADATA", "entry_points.txt")


def venv(folder: Path) -> Iterator[Row]:
    who, log, place = "repro/venv.sh docs", folder / "log", folder / "place"
    yield kill(
        folder,
        who,
        "every file",
        lambda out: installed(out, "docs"),
        *PACKAGES,
        times=10,
    )

    def offline() -> None:
        os.environ.update(
            PIP_INDEX_URL=CLOSED,
            PIP_EXTRA_INDEX_URL=CLOSED,
            PIP_RETRIES="1",
            PIP_CONFIG_FILE=os.devnull,
        )
        os.environ.pop("PIP_FIND_LINKS", None)

    base = partial(installed, place)
    docs = partial(installed, place, "docs")
    said: list[str] = []
    done(base, log)
    good = digest(place, *PACKAGES)
    shutil.copytree(place, folder / "base", symlinks=True)
    while len(said) < 6:
        wait(
            start(docs, log),
            rng.uniform(2, 9),
            [signal.SIGKILL, signal.SIGINT, signal.SIGTERM][len(said) % 3],
        )
        status, last = run(docs, log, offline)
        assert (
            status in (0, 2)
            and good.items() <= digest(place, *PACKAGES).items()
            and run(base, log)[0] == 0
        ), last
        if status == 2:
            said.append(sentence(last, folder))
        shutil.rmtree(place)
        shutil.copytree(folder / "base", place, symlinks=True)
    (words,) = set(said)
    yield row(
        who,
        THEN_OFFLINE,
        words,
        2,
        len(said),
        "nothing: every file of the environment of before is whole",
    )
    list_ = place / "repro/requirements/docs.txt"
    list_.write_text(re.sub("sha256:[0-9a-f]{8}", "sha256:00000000", list_.read_text()))
    status, last = run(docs, log)
    yield row(who, "the index has other files", sentence(last, folder), status)


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


def told(who: str, fault: str, ends: list[tuple[int, str]], folder: Path) -> Row:
    """A row for many ends, each 0 with the same result or 2 with one sentence."""
    assert {status for status, _ in ends} <= {0, 2} and not any(
        "Traceback" in said for _, said in ends
    ), ends
    said = [sentence(said, folder) for status, said in ends if status == 2]
    happened = " or ".join(
        (["the same result"] if len(said) < len(ends) else []) + said[:1]
    )
    return row(
        who,
        fault,
        happened,
        " or ".join(str(x) for x in sorted({x for x, _ in ends})),
        len(ends),
    )


def asked(folder: Path) -> tuple[Callable[[], int], Path, Path, dict[str, str]]:
    """The command that trains, its folder, the file for its output, and what an
    undisturbed run gives.
    """
    S.write(folder / "s.json")
    train(folder / "whole")
    out = folder / "run"
    typed = ["--settings", str(folder / "s.json"), "--out", str(out)]
    ask = partial(command.main, typed)
    return ask, out, folder / "log", digest(folder / "whole", *MINI)


def files_(folder: Path) -> Iterator[Row]:
    ask, out, log, whole = asked(folder)
    kept = folder / "results"
    shutil.copytree(results.folder_of(2), kept)
    records = results.load(kept)

    def show() -> int:
        status = suite.main(["--list", "--results", str(kept)])
        assert status or results.load(kept) == records, "silently wrong"
        return status

    for path in ("runs.jsonl", "manifest.json"):
        before, ends = (kept / path).read_bytes(), []
        for now in damaged(before):
            (kept / path).write_bytes(now)
            ends.append(run(show, log))
        (kept / path).write_bytes(before)
        yield told("repro.mini.study.suite", f"`{path}` cut or altered", ends, folder)

    def interrupted() -> None:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "whole", out)
        (out / "done.json").unlink()
        shutil.rmtree(out / "checkpoints/step-4")

    for path in (
        "steps.jsonl",
        *(f"checkpoints/step-3/{x}" for x in (*INSIDE, files.PROVENANCE)),
    ):
        ends = []
        interrupted()
        for now in rng.sample([*damaged((out / path).read_bytes())], 4):
            interrupted()
            (out / path).write_bytes(now)
            ends.append(run(ask, log))
            assert ends[-1][0] or digest(out, *MINI) == whole, "silently wrong"
        yield told(
            "repro.mini.train",
            f"`{Path(path).name}` of an interrupted run cut or altered",
            ends,
            folder,
        )
    shutil.rmtree(out)
    shutil.copytree(folder / "whole", out)
    with (out / "steps.jsonl").open("r+") as f:
        f.write("[")
    status, said = run(
        lambda: bool(results.collect(folder, {"run"}, folder / "new")), log
    )
    yield row(
        "repro.mini.study.suite",
        "a log altered after its run ended",
        sentence(said, folder),
        status,
    )

    class Payload:
        def __reduce__(self):
            return Path.touch, (folder / "ran",)

    torch.save({"settings": {}, "batch": Payload()}, folder / "minibatch.safetensors")
    status, said = run(
        lambda: command.main(["--minibatch", str(folder / "minibatch.safetensors")]),
        log,
    )
    assert not (folder / "ran").exists()
    who, fault, lost = (
        "repro.mini.train --minibatch",
        "a file that holds code",
        "nothing: it did not run",
    )
    yield row(who, fault, sentence(said, folder), status, lost=lost)


# ---- full disks, no network ----------------------------------------------------------
libc = ctypes.CDLL(None, use_errno=True)
NAMESPACE = {"mount": 0x20000, "network": 0x40000000}


def alone_with(what: str) -> None:
    if libc.unshare(NAMESPACE[what]):
        raise OSError(ctypes.get_errno(), f"this needs root: no {what} namespace")


def small_disk(folder: Path, size: str) -> None:
    """A file system of that size on the folder, for this process alone."""
    alone_with("mount")
    libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE
    if libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), "no tmpfs could be mounted")


def full(place: Path, name: str, make: Callable[[Path], int]) -> int:
    """On a disk that holds this file and is full: the status, if the file is as it was
    and alone.
    """
    (place / name).write_text("as it was")
    with contextlib.suppress(OSError), (place / "full").open("wb") as f:
        while f.write(b"x" * 4096):
            f.flush()
    (place / "full").open("r+b").truncate(8192)
    status = make(place)
    left = {p.name for p in place.iterdir()} - {"full"}
    return (
        status if left == {name} and (place / name).read_text() == "as it was" else 98
    )


WRITES = {  # command -> its file on the disk, how it is made there
    "upref cap -o": (
        "cap.svg",
        lambda at: cli.main(["cap", "dapo", "-o", str(at / "cap.svg")]),
    ),
    "upref explorer": ("x.html", lambda at: cli.main(["explorer", str(at / "x.html")])),
    "repro.exact": ("rise.svg", exactly),
    "repro.mini.round2.report": (
        "report.md",
        lambda at: suite.said(
            lambda: int(bool(report.write(results.load(results.folder_of(2)), at))),
            "report",
        ),
    ),
}


def disk(folder: Path) -> Iterator[Row]:
    ask, out, log, whole = asked(folder)
    place, said = folder / "disk", []
    place.mkdir()

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (random.choice([100, 2500, 100_000, 600_000]),) * 2
        )

    for _ in range(4):
        random.seed()
        status, last = run(ask, log, limited)
        assert status == 2 and "Traceback" not in last, last
        said.append(sentence(last, folder))
    assert run(ask, log)[0] == 0 and digest(out, *MINI) == whole
    fault, lost = (
        "files limited to 100 B to 600 kB (`ulimit -f`)",
        "nothing: with space it ended with the same bits",
    )
    yield row("repro.mini.train", fault, max(said, key=len), 2, len(said), lost)
    for who, (name, make) in WRITES.items():
        status, last = run(
            partial(full, place, name, make), log, lambda: small_disk(place, "64k")
        )
        assert status == 2, (who, status, last)
        yield row(
            who,
            "a full disk (tmpfs)",
            sentence(last, folder),
            lost="nothing: the old file stayed",
        )


def network(folder: Path) -> Iterator[Row]:
    (folder / "my.py").write_text("import upref\ndapo = upref.get('dapo').loss\n")
    ask = partial(cli.main, ["check", f"{folder}/my.py:dapo", "--as", "dapo"])
    online = run(ask, folder / "log")
    offline = run(ask, folder / "log", partial(alone_with, "network"))
    assert online == offline and online[0] == 0, (online, offline)
    yield row("upref check", "no network", "the same report, to the letter", 0)

    def nowhere() -> None:
        alone_with("network")
        os.environ.update(
            XDG_CACHE_HOME=str(folder / "cache"),
            PIP_CONFIG_FILE=os.devnull,
            PIP_INDEX_URL=CLOSED,
        )
        os.environ.pop("PIP_FIND_LINKS", None)

    status, said = run(lambda: cli.main(["audit", AUDITED]), folder / "log", nowhere)
    assert (
        status == 2
        and said.count("\n") == 0
        and not list((folder / "cache").rglob("*.py"))
    ), said
    yield row(
        f"upref audit {AUDITED}", "no network, nothing cached", sentence(said, folder)
    )


# ---- two at once, interrupts, threads ------------------------------------------------
def two(folder: Path) -> Iterator[Row]:
    ask, out, _, whole = asked(folder)
    logs, fault = [folder / "a", folder / "b"], "two in one folder"

    def both(work: Work) -> list[int]:
        """Start the work twice, and return the statuses, the lower one first."""
        return sorted(map(wait, [start(work, log) for log in logs]))

    assert both(ask) == [0, 2] and digest(out, *MINI) == whole
    said = next(x for log in logs if "in use" in (x := log.read_text()))
    yield row("repro.mini.train", fault, sentence(said, folder), "0 and 2")
    done(lambda: exactly(folder / "one"), logs[0])
    assert both(lambda: exactly(folder / "two")) == [0, 0]
    assert digest(folder / "two", "*") == digest(folder / "one", "*")
    yield row("repro.exact", fault, "both wrote the same, whole files", "0 and 0")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")

    def install() -> None:
        print(isolated.place(AUDITED, audits.framework(AUDITED).pin).version)

    assert both(install) == [0, 0] and not list(folder.glob("cache/**/.half-*"))
    done(install, logs[0])
    yield row(
        f"upref audit {AUDITED}",
        "two install the package",
        "one whole folder",
        "0 and 0",
    )


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


def long_commands(folder: Path) -> dict[str, list[str]]:
    """The commands of INTERRUPTED and those of a shell: name -> arguments."""
    S.write(folder / "s.json")
    (folder / "slow.py").write_text(
        "import time\ndef loss(log_prob, old_log_prob, advantages, mask): time.sleep(60)\n"
    )
    commands = {
        x.removeprefix("-m ").replace("{}/", "").removesuffix(" {}"): [
            sys.executable,
            *x.format(*[folder] * 9).split(),
        ]
        for x in INTERRUPTED
    }
    commands["repro/venv.sh docs"] = [
        "bash",
        str(checkout(folder / "place") / "repro/venv.sh"),
        "docs",
    ]
    return commands


def interrupt(folder: Path) -> Iterator[Row]:
    commands = long_commands(folder)
    yield from killed_anywhere(folder, commands)
    for name, argv in commands.items():
        said, ends = "", []
        for number in (signal.SIGINT, signal.SIGTERM) * 2:
            p = subprocess.Popen(
                argv,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            while p.poll() is None and not caught(p.pid, signal.SIGTERM):
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 4))
            p.send_signal(number)
            # its children have the pipe too: they have ended
            last = p.communicate(timeout=120)[1].strip()
            # at the very end: as in a shell
            status = 128 - p.returncode if p.returncode < 0 else p.returncode
            assert status in (0, 2, 128 + number) and "Traceback" not in last, (
                name,
                p.returncode,
                last,
            )
            if status > 2:  # else it had ended
                ends.append(status)
                said = (
                    sentence(last, folder)
                    if status == 130 and "interrupted" in last
                    else said
                )
        happened = said.replace(f"{sys.executable} ", "") or "it had ended"
        both = " or ".join(str(x) for x in sorted(set(ends)))
        if ends:
            yield row(name, "Ctrl-C or SIGTERM", happened, both, len(ends))


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
        said = again.communicate(timeout=120)[1]
        status = 128 - again.returncode if again.returncode < 0 else again.returncode
        assert status in (0, 2, 143) and "Traceback" not in said, (name, status, said)
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
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            who, _, facts = stat.read_text(errors="replace").rpartition(")")
            state, _, _, its_session = facts.split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(who)
    return found


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


def threads(folder: Path, checks: int = 1000, workers: int = 8) -> Iterator[Row]:
    """Losses and KL estimators, right and wrong, that print, warn, draw, and change a
    dtype.
    """

    def noise() -> None:
        print("swallowed")
        warnings.warn("ignored", stacklevel=2)
        torch.set_default_dtype(torch.float64)
        torch.rand(1), np.random.rand(), random.random()

    def loss(sign: int) -> Callable:
        def dapo(log_prob, old_log_prob, advantages, mask):
            noise()
            r = torch.where(mask, log_prob - old_log_prob, 0).exp()
            return (
                -sign
                * (
                    torch.minimum(r * advantages, r.clamp(0.8, 1.28) * advantages)
                    * mask
                ).sum()
                / mask.sum()
            )

        return dapo

    def kl(sign: int) -> Callable:
        def k1(log_prob, ref_log_prob):
            noise()
            return sign * (log_prob - ref_log_prob)

        return k1

    before = shared_state()

    def check(i: int) -> bool:
        right = 1 if i % 3 else -1
        report = (
            upref.check_kl(kl(right), "k1")
            if i % 20
            else upref.check(loss(right), "dapo")
        )
        return bool(report) == (right == 1)

    with ThreadPoolExecutor(workers) as pool:
        verdicts = list(pool.map(check, range(checks)))
    assert all(verdicts) and shared_state() == before, Counter(verdicts)
    who, fault = (
        f"upref.check, check_kl in {workers} threads",
        "losses that print, warn, draw, change a dtype",
    )
    happened = (
        "every verdict right; stdout, warnings, hooks, dtype, generators as before"
    )
    yield row(who, fault, happened, "", checks)


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
