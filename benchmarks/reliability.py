# SPDX-License-Identifier: Apache-2.0
"""Faults injected into every command that writes: what happened, the exit status, what was lost.

    python -m benchmarks.reliability                 all groups, an hour of a core; status 1: something was lost
    python -m benchmarks.reliability files threads   some of: mini suite exact audit venv site files disk network two
                                                     interrupt threads

Rows go to reliability.json, from which `python -m docs.make docs/reliability.md` writes the page. Needs Linux; `disk`
and `network` need root, for a mount and a network namespace of their own; `audit` and `venv` need a package index.
One file, because every group is a few lines on the same four helpers.
"""

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
from pathlib import Path

import numpy as np
import torch

import upref
from docs.site import __main__ as site_
from repro.exact import __main__ as exact_
from repro.mini import files
from repro.mini.study import results, suite
from repro.mini.train import command, loop
from repro.mini.train.settings import Settings
from upref import audits, cli
from upref.audits import isolated

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
S = Settings(steps=4, prompts=8, responses=4, minibatches=2, warmup=0, train_problems=100, eval_every=2,
             eval_problems=4, eval_samples=2, checkpoint_every=1)  # fmt: skip
AUDITED = "openrlhf"  # one small wheel
CLOSED = "http://127.0.0.1:9/simple"  # nothing listens there
ENVIRONMENT = {  # a list that repro/venv.sh installs -> the packages of it that are installed here
    "torch-cpu": ("mpmath",),  # in the place of torch
    "base": (
        *("hatchling", "tomlkit", "packaging", "pathspec", "pluggy", "trove-classifiers", "setuptools"),
        *("networkx", "jinja2", "markupsafe"),
    ),
    "docs": ("alabaster", "babel", "docutils", "imagesize", "pygments", "snowballstemmer", "markupsafe"),
}
Row = tuple[str, str, int, str, str, str]  # command, fault, times, what happened, exit status, what was lost
rng = random.Random()


# ---- processes -------------------------------------------------------------------------------------------------------
def start(work: Callable[[], object], log: Path, before: Callable[[], object] = lambda: None) -> int:
    """A process group of its own, forked, so that nothing is imported again; its output goes to the log."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if process := os.fork():
        return process
    status = 99
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(out, number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
    """Its exit status; negative, the signal that ended it. sign: sent to its group after so many seconds."""
    if sign:
        time.sleep(after)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, sign)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def run(work: Callable[[], object], log: Path, before: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """(exit status, output)"""
    status = wait(start(work, log, before))
    return status, log.read_text(errors="replace").strip()


def killed(work: Callable[[], object], place: Path, same: Callable[[], bool], times: int, seconds: float = 0) -> str:
    """kill -9 so often, at random moments; what is killed is started again, up to its end, which must be the same."""
    log = place.with_name("log")
    hits = ends = status = 0
    if not seconds:
        begun = time.monotonic()
        status, said = run(work, log)
        assert status == 0 and same(), said
        seconds = time.monotonic() - begun
        shutil.rmtree(place)
    while hits < times or status:
        process = start(work, log)
        status = wait(process, rng.uniform(0, seconds), signal.SIGKILL) if hits < times else wait(process)
        hits += status == -signal.SIGKILL
        if status == 0:
            assert same(), "another result"
            ends += 1
            shutil.rmtree(place)
        assert status in (0, -signal.SIGKILL) or "in use by" in log.read_text(), log.read_text()[-2000:]
    return f"started again, it ended {ends} times with {{}} of an undisturbed run"


def digest(folder: Path, *patterns: str) -> dict[str, str]:
    found = sorted(p for pattern in patterns for p in folder.rglob(pattern) if p.is_file())
    return {str(p.relative_to(folder)): files.sha256(p) for p in found}


def sentence(said: str, folder: Path) -> str:
    """The last line of what a command says, without names of this machine."""
    return said.splitlines()[-1].replace(f"{folder}/", "").replace(str(ROOT) + "/", "") if said else ""


# ---- kill -9 ---------------------------------------------------------------------------------------------------------
INSIDE = ("model.safetensors", "trainer.safetensors")  # a checkpoint
MINI = ("steps.jsonl", "evals.jsonl", "seen.npz", "step-4/model.safetensors")


def mini(folder: Path) -> Iterator[Row]:
    loop.train(S, folder / "whole", say=lambda _: None)
    whole, out = digest(folder / "whole", *MINI), folder / "killed"
    happened = killed(lambda: loop.train(S, out), out, lambda: digest(out, *MINI) == whole, 24)
    yield "repro.mini.train", "kill -9", 24, happened.format("the logs and the weights"), "killed, then 0", "nothing"


def suite_(folder: Path) -> Iterator[Row]:
    runs = [replace(S, objective=name, steps=2, eval_every=2) for name in ("dapo", "up_dapo")]
    wanted = {s.key: s for s in runs}
    for name, s in wanted.items():
        loop.train(s, folder / "whole" / name, say=lambda _: None)
    names = ("steps.jsonl", "evals.jsonl", "seen.npz", "step-2/model.safetensors")
    whole, out = digest(folder / "whole", *names), folder / "killed"

    def work() -> int:
        with suite.alone(out) as lock:
            failures = suite.run_all(wanted, out, 2, lock)
            results.collect(out, set(wanted), out / "results")
        print(*failures, sep="\n")
        return bool(failures)

    def same() -> bool:
        return digest(out, *names) == whole and set(results.load(out / "results")) == set(wanted)

    happened = killed(work, out, same, 8)
    yield (
        "repro.mini.study.suite",
        "kill -9",
        8,
        happened.format("the records, logs and weights"),
        "killed, then 0",
        "nothing",
    )


def exact(folder: Path) -> Iterator[Row]:
    ask = lambda out: exact_.main(["rise", "--arms", "dapo", "--out", str(out)])
    assert run(lambda: ask(folder / "whole"), folder / "log")[0] == 0
    whole, out = digest(folder / "whole", "*"), folder / "killed"
    happened = killed(lambda: ask(out), out, lambda: digest(out, "*") == whole, 8)
    yield "repro.exact", "kill -9", 8, happened.format("report, figure and numbers"), "killed, then 0", "nothing"


def audit(folder: Path) -> Iterator[Row]:
    cache = folder / "killed"
    pin = audits.framework(AUDITED).pin
    assert pin
    found = lambda: str(isolated.run("audit", AUDITED, pin))

    def work() -> None:
        os.environ["XDG_CACHE_HOME"] = str(cache)
        (folder / "answer").write_text(found())

    assert run(work, folder / "log")[0] == 0, (folder / "log").read_text()
    whole, packages = (folder / "answer").read_text(), digest(cache, "*.py")
    shutil.rmtree(cache)
    happened = killed(
        work, cache, lambda: (folder / "answer").read_text() == whole and digest(cache, "*.py") == packages, 8
    )
    yield (
        f"upref audit {AUDITED}",
        "kill -9",
        8,
        happened.format("the report and the package"),
        "killed, then 0",
        "nothing",
    )
    os.environ["XDG_CACHE_HOME"] = str(cache)
    found()
    next(cache.rglob("models/loss.py")).open("a").write("# one line more\n")
    status, said = run(lambda: cli.main(["audit", AUDITED]), folder / "log")
    yield (
        f"upref audit {AUDITED}",
        "a line added to the installed package",
        1,
        sentence(said, folder),
        str(status),
        "nothing",
    )


# ---- the environment -------------------------------------------------------------------------------------------------
def checkout(folder: Path) -> Path:
    """A copy with venv.sh, upref and short lists: the lines of a few packages."""
    place = folder / "checkout"
    lists = place / "repro/requirements"
    lists.mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    (place / "upref").mkdir()
    shutil.copy(ROOT / "upref/__init__.py", place / "upref")
    shutil.copy(ROOT / "repro/venv.sh", place / "repro")
    for part, names in ENVIRONMENT.items():
        lines = (ROOT / f"repro/requirements/{part.replace('torch-cpu', 'base')}.txt").read_text().splitlines(True)
        (lists / f"{part}.txt").write_text("".join(x for x in lines if re.split("[=;]", x)[0] in names))
    (lists / "torch.txt").touch()
    return place


def venv(folder: Path) -> Iterator[Row]:
    place = checkout(folder)
    env, log = place / ".venv", folder / "log"
    installed = lambda: digest(env / "lib", "*.py", "*.so", "METADATA", "entry_points.txt")
    ask = lambda *parts: subprocess.run(["bash", "repro/venv.sh", *parts], cwd=place).returncode
    assert run(lambda: ask("docs"), log)[0] == 0, log.read_text()
    whole = installed()
    shutil.rmtree(env)

    def same() -> bool:
        now = installed()
        print(sorted(k for k in now.keys() | whole.keys() if now.get(k) != whole.get(k))[:20])
        return now == whole

    happened = killed(lambda: ask("docs"), env, same, 10)
    yield "repro/venv.sh docs", "kill -9", 10, happened.format("every file"), "killed, then 0", "nothing"

    def offline() -> None:
        os.environ.update(PIP_INDEX_URL=CLOSED, PIP_EXTRA_INDEX_URL=CLOSED, PIP_RETRIES="1", PIP_CONFIG_FILE=os.devnull)
        os.environ.pop("PIP_FIND_LINKS", None)

    assert run(ask, log)[0] == 0
    good, sentences = installed(), []
    shutil.copytree(env, folder / "base", symlinks=True)
    while len(sentences) < 4:
        wait(start(lambda: ask("docs"), log), rng.uniform(2, 9), signal.SIGKILL)
        status, said = run(lambda: ask("docs"), log, offline)
        kept = {k: v for k, v in installed().items() if k in good}
        assert status in (0, 2) and kept == good and run(ask, log)[0] == 0, said
        if status == 2:
            sentences.append(sentence(said, folder))
        shutil.rmtree(env)
        shutil.copytree(folder / "base", env, symlinks=True)
    (words,) = set(sentences)
    yield "repro/venv.sh docs", "kill -9, then no network", 4, words, "2", "nothing: every file of the base is whole"
    list_ = place / "repro/requirements/docs.txt"
    list_.write_text(re.sub("sha256:[0-9a-f]{8}", "sha256:00000000", list_.read_text()))
    shutil.rmtree(env)
    status, said = run(lambda: ask("docs"), log)
    yield "repro/venv.sh docs", "the index has other files", 1, sentence(said, folder), str(status), "nothing"


def site(folder: Path) -> Iterator[Row]:
    import sphinx.cmd.build

    whole_build = sphinx.cmd.build.build_main
    sphinx.cmd.build.build_main = lambda argv: whole_build([*argv, "-D", "nb_execution_mode=off"])
    out = folder / "killed"
    pages = lambda: sorted(str(p.relative_to(out)) for p in (out / "html").rglob("*.html"))
    begun = time.monotonic()
    status, said = run(lambda: site_.main(str(out)), folder / "log")
    assert status == 0, said[-3000:]
    seconds, before = time.monotonic() - begun, digest(out, "html/*.html")
    for _ in range(4):
        wait(start(lambda: site_.main(str(out)), folder / "log"), rng.uniform(0, seconds), signal.SIGKILL)
        assert digest(out, "html/*.html") == before, "the site of before"
    whole = pages()
    status, said = run(lambda: site_.main(str(out)), folder / "log")
    assert status == 0 and pages() == whole, said[-3000:]
    happened = f"the {len(whole)} pages of before stayed; built again, all were there"
    yield "docs/build.sh", "kill -9 (pages whose code is not run)", 4, happened, "killed, then 0", "nothing"


# ---- files that are not what they were -------------------------------------------------------------------------------
def damaged(content: bytes) -> Iterator[bytes]:
    """The content cut, and one byte of it changed, at random places; its end twice; other content."""
    for _ in range(10):
        n = rng.randrange(len(content))
        yield content[:n]
        yield content[:n] + bytes([content[n] ^ rng.randrange(1, 256)]) + content[n + 1 :]
    yield content + content[-50:]
    yield b"garbage"


def told(fault: str, ends: list[tuple[int, str]], folder: Path) -> tuple[str, int, str, str, str]:
    """A row for many ends, each 0 with the same result or 2 with one sentence."""
    assert {status for status, _ in ends} <= {0, 2} and not any("Traceback" in said for _, said in ends), ends
    said = [sentence(said, folder) for status, said in ends if status == 2]
    happened = " or ".join((["the same result"] if len(said) < len(ends) else []) + said[:1])
    return fault, len(ends), happened, " or ".join(str(x) for x in sorted({status for status, _ in ends})), "nothing"


def files_(folder: Path) -> Iterator[Row]:
    out, log, settings = folder / "run", folder / "log", folder / "s.json"
    S.write(settings)
    train = lambda: command.main(["--settings", str(settings), "--out", str(out)])
    loop.train(S, folder / "whole", say=lambda _: None)
    whole = digest(folder / "whole", *MINI)

    def interrupted() -> None:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "whole", out)
        (out / "done.json").unlink()
        shutil.rmtree(out / "checkpoints/step-4")

    shutil.copytree(results.folder_of(2), folder / "results")
    records = results.load(folder / "results")

    def show() -> int:
        status = suite.main(["--list", "--results", str(folder / "results")])
        assert status or results.load(folder / "results") == records, "silently wrong"
        return status

    for path in ("runs.jsonl", "manifest.json"):
        before, ends = (folder / "results" / path).read_bytes(), []
        for now in damaged(before):
            (folder / "results" / path).write_bytes(now)
            ends.append(run(show, log))
        (folder / "results" / path).write_bytes(before)
        yield "repro.mini.study.suite", *told(f"`{path}` cut or altered", ends, folder)
    for path in ("steps.jsonl", *(f"checkpoints/step-3/{x}" for x in (*INSIDE, files.PROVENANCE))):
        ends = []
        interrupted()
        for now in rng.sample([*damaged((out / path).read_bytes())], 4):
            interrupted()
            (out / path).write_bytes(now)
            ends.append(run(train, log))
            assert ends[-1][0] or digest(out, *MINI) == whole, "silently wrong"
        yield "repro.mini.train", *told(f"`{Path(path).name}` of an interrupted run cut or altered", ends, folder)
    shutil.rmtree(out)
    shutil.copytree(folder / "whole", out)
    with (out / "steps.jsonl").open("r+") as f:
        f.write("[")
    status, said = run(lambda: bool(results.collect(folder, {"run"}, folder / "new")), log)
    yield (
        "repro.mini.study.suite",
        "a log altered after its run ended",
        1,
        sentence(said, folder),
        str(status),
        "nothing",
    )

    class Payload:
        def __reduce__(self):
            return Path.touch, (folder / "ran",)

    torch.save({"settings": {}, "batch": Payload()}, folder / "replay.safetensors")
    status, said = run(lambda: command.main(["--replay", str(folder / "replay.safetensors")]), log)
    assert not (folder / "ran").exists()
    yield (
        "repro.mini.train --replay",
        "a file that holds code",
        1,
        sentence(said, folder),
        str(status),
        "nothing: it did not run",
    )


# ---- full disks, no network ------------------------------------------------------------------------------------------
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


def disk(folder: Path) -> Iterator[Row]:
    log, settings, place = folder / "log", folder / "s.json", folder / "disk"
    place.mkdir()
    S.write(settings)
    loop.train(S, folder / "whole", say=lambda _: None)
    whole, out = digest(folder / "whole", *MINI), folder / "run"
    train = lambda: command.main(["--settings", str(settings), "--out", str(out)])
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (rng.choice([100, 2500, 100_000, 600_000]),) * 2)
    ends = []
    for _ in range(4):
        status, said = run(train, log, lambda: (rng.seed(), signal.signal(signal.SIGXFSZ, signal.SIG_IGN), limit()))
        assert status == 2 and "Traceback" not in said, said
        ends.append(sentence(said, folder))
    assert run(train, log)[0] == 0 and digest(out, *MINI) == whole
    yield (
        "repro.mini.train",
        "files limited to 100 B to 600 kB (`ulimit -f`)",
        4,
        max(ends, key=len),
        "2",
        "nothing: with space it ended with the same bits",
    )

    def beside(make: Callable[[Path], int], name: str) -> Callable[[], int]:
        """On a disk of 64 kB that holds this file and is full: the status, if the file is as it was and alone."""

        def work() -> int:
            (place / name).write_text("as it was")
            with contextlib.suppress(OSError), (place / "full").open("wb") as f:
                while f.write(b"x" * 4096):
                    f.flush()
            (place / "full").open("r+b").truncate(8192)
            status = make(place)
            left = {p.name for p in place.iterdir()} - {"full"}
            return status if left == {name} and (place / name).read_text() == "as it was" else 98

        return work

    for who, name, make in (
        ("upref cap -o", "cap.svg", lambda at: cli.main(["cap", "dapo", "-o", str(at / "cap.svg")])),
        ("upref explorer", "x.html", lambda at: cli.main(["explorer", str(at / "x.html")])),
        ("repro.exact", "rise.svg", lambda at: exact_.main(["rise", "--arms", "dapo", "--out", str(at)])),
        ("repro.mini.study.report", "verdicts.md", lambda at: suite.said(lambda: report(at), "report")),
    ):
        status, said = run(beside(make, name), log, lambda: small_disk(place, "64k"))
        assert status == 2, (who, status, said)
        yield (
            who,
            "a full disk (tmpfs)",
            1,
            sentence(said, folder).replace(f"{place}/", ""),
            str(status),
            "nothing: the old file stayed",
        )


def report(folder: Path) -> int:
    from repro.mini.study import report as report_

    report_.write(results.load(results.folder_of(1)), folder)
    return 0


def network(folder: Path) -> Iterator[Row]:
    (folder / "my.py").write_text("import upref\ndapo = upref.get('dapo').loss\n")
    ask = lambda: cli.main(["check", f"{folder}/my.py:dapo", "--as", "dapo"])
    with_, without = run(ask, folder / "log"), run(ask, folder / "log", lambda: alone_with("network"))
    assert with_ == without and with_[0] == 0, (with_, without)
    yield "upref check", "no network", 1, "the same report, to the letter", "0", "nothing"

    def nowhere() -> None:
        alone_with("network")
        os.environ.update(XDG_CACHE_HOME=str(folder / "cache"), PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL=CLOSED)
        os.environ.pop("PIP_FIND_LINKS", None)

    status, said = run(lambda: cli.main(["audit", AUDITED]), folder / "log", nowhere)
    assert status == 2 and said.count("\n") == 0 and not list((folder / "cache").rglob("*.py")), said
    yield f"upref audit {AUDITED}", "no network, nothing cached", 1, sentence(said, folder), "2", "nothing"


# ---- two at once, interrupts, threads --------------------------------------------------------------------------------
def two(folder: Path) -> Iterator[Row]:
    out, settings, logs = folder / "run", folder / "s.json", [folder / "a", folder / "b"]
    S.write(settings)
    train = lambda: command.main(["--settings", str(settings), "--out", str(out)])
    loop.train(S, folder / "whole", say=lambda _: None)
    statuses = sorted(map(wait, [start(train, log) for log in logs]))
    assert statuses == [0, 2] and digest(out, *MINI) == digest(folder / "whole", *MINI)
    said = next(x for log in logs if "in use" in (x := log.read_text()))
    yield "repro.mini.train", "two in one folder", 1, sentence(said, folder), "0 and 2", "nothing"
    ask = lambda: exact_.main(["rise", "--arms", "dapo", "--out", str(folder / "exact")])
    assert [wait(start(ask, log)) for log in logs[:1]] == [0]
    whole = digest(folder / "exact", "*")
    assert list(map(wait, [start(ask, log) for log in logs])) == [0, 0] and digest(folder / "exact", "*") == whole
    yield "repro.exact", "two in one folder", 1, "both wrote the same, whole files", "0 and 0", "nothing"
    pin = audits.framework(AUDITED).pin
    assert pin
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    install = lambda: print(isolated.place(AUDITED, pin).version)
    statuses = list(map(wait, [start(install, log) for log in logs]))
    assert (
        statuses == [0, 0] and run(install, logs[0]) == (0, pin.version) and not list(folder.glob("cache/**/.half-*"))
    )
    yield f"upref audit {AUDITED}", "two install the package", 1, "one whole folder", "0 and 0", "nothing"


def interrupt(folder: Path) -> Iterator[Row]:
    out, settings, log = folder / "run", folder / "s.json", folder / "log"
    S.write(settings)
    (folder / "slow.py").write_text("import time\ndef loss(log_prob, old_log_prob, advantages, mask): time.sleep(60)\n")

    def upref_(*argv: str) -> Callable[[], int]:
        def work() -> int:
            sys.argv = ["upref", *argv]
            return cli.main()

        return work

    for who, work in (
        ("repro.mini.train", lambda: command.main(["--settings", str(settings), "--out", str(out)])),
        ("repro.exact", lambda: exact_.main(["--out", str(out)])),
        ("upref check", upref_("check", f"{folder}/slow.py:loss", "--as", "dapo")),
        ("upref derive", upref_("derive", "all")),
        ("upref audit", upref_("audit", "verl")),
    ):
        for sign, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            shutil.rmtree(out, ignore_errors=True)
            ended = wait(start(work, log), 1.0, sign)
            said = log.read_text().strip()
            fine = (status, -sign) if sign == signal.SIGTERM and "repro" in who else (status,)
            assert ended in fine and "Traceback" not in said, (who, ended, said)
            if sign == signal.SIGINT:
                yield who, "Ctrl-C", 1, sentence(said, folder), str(ended), "nothing"


def threads(folder: Path, checks: int = 1000, workers: int = 8) -> Iterator[Row]:
    """Losses and KL estimators, right and wrong, that print, warn, draw, and change a dtype."""

    def noise() -> None:
        print("swallowed")
        warnings.warn("ignored", stacklevel=2)
        torch.set_default_dtype(torch.float64)
        torch.rand(1), np.random.rand(), random.random()

    def loss(sign: int) -> Callable:
        def dapo(log_prob, old_log_prob, advantages, mask):
            noise()
            r = torch.where(mask, log_prob - old_log_prob, 0).exp()
            return -sign * (torch.minimum(r * advantages, r.clamp(0.8, 1.28) * advantages) * mask).sum() / mask.sum()

        return dapo

    def kl(sign: int) -> Callable:
        def k1(log_prob, ref_log_prob):
            noise()
            return sign * (log_prob - ref_log_prob)

        return k1

    state = lambda: (
        [sys.stdout, sys.stderr, sys.excepthook, sys.gettrace(), threading.excepthook, warnings.showwarning],
        [list(warnings.filters), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()],
        [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()), os.getcwd()],
        [signal.getsignal(signal.SIGINT), torch.utils.hooks.RemovableHandle.next_id],
    )  # fmt: skip
    before = state()

    def check(i: int) -> bool:
        right = 1 if i % 3 else -1
        report = upref.check_kl(kl(right), "k1") if i % 20 else upref.check(loss(right), "dapo")
        return bool(report) == (right == 1)

    with ThreadPoolExecutor(workers) as pool:
        verdicts = list(pool.map(check, range(checks)))
    assert all(verdicts) and state() == before, Counter(verdicts)
    happened = "every verdict right; stdout, warnings, hooks, dtype, generators as before"
    yield (
        f"upref.check, check_kl in {workers} threads",
        "losses that print, warn, draw, change a dtype",
        checks,
        happened,
        "",
        "nothing",
    )


# ---- the command -----------------------------------------------------------------------------------------------------
GROUPS = {"mini": mini, "suite": suite_, "exact": exact, "audit": audit, "venv": venv, "site": site, "files": files_,
          "disk": disk, "network": network, "two": two, "interrupt": interrupt, "threads": threads}  # fmt: skip


def main(*names: str) -> int:
    lost = False
    for name in names or GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            process = start(lambda n=name, f=folder: keep(n, list(GROUPS[n](Path(f)))), log := Path(folder) / "all")
            status = wait(process)
            print(f"{name}: {'done' if not status else 'FAILED'}", flush=True)
            print(log.read_text()[-5000:] if status else "", flush=True)
            lost |= bool(status)
    return int(lost)


def keep(name: str, rows: list[Row]) -> None:
    """Two of this command may run, each with groups of its own."""
    with RECORD.open("a+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.seek(0)
        record = json.loads(f.read() or "{}")
        f.truncate(0)
        f.write(json.dumps({k: v for k in GROUPS if (v := (record | {name: rows}).get(k))}, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*sys.argv[1:]))
