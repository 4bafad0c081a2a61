# SPDX-License-Identifier: Apache-2.0
"""Bad and odd inputs (odd.py) at every entry point of the API and of the command, audits and child processes included.

    python tests/support/fuzz.py [inputs] [seed] [FILE]

What must hold of each: an answer of bounded length, or InputError (exit status 2) with one sentence; no other
exception, no status 0 without a report that says so, no hang, and the process as it was. Prints what broke that, and
how many of what were tried. With FILE, what was done is kept there, and the same command goes on from it.
"""

import collections
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import odd
from odd import JUNK, VERBS, WORDS, a_loss, moody

import upref
import upref.curve
import upref.regimes
import upref.table
from upref.cli import main
from upref.errors import InputError
from upref.losses import read
from upref.losses.guard import RANDOM, STATE, _equal
from upref.table.read import read as read_table
from upref.verify import audit as audits
from upref.verify.audit import ledger
from upref.verify.identity import Identity
from upref.verify.report import Report

LIMIT = 60  # seconds of CPU for one input
LONGEST = 20_000  # characters of an answer
EVERY = 100  # inputs between two notes in FILE
LEDGER = resources.files("upref.verify.audit").joinpath("verl.toml").read_text(encoding="utf-8")


def tries(rng: random.Random):
    """(what it is called, a function to call)."""
    some = lambda: rng.choice(JUNK)
    hp = lambda: {
        rng.choice(["eps_low", "eps_high", "c", "beta", "x", "eps"]): some() for _ in range(rng.randint(0, 2))
    }
    number = lambda: rng.choice([0.1, 0.5, 1.0, -1.0, some()])
    name = lambda: rng.choice(["dapo", "gspo", "grpo", some()])
    any_name = lambda: rng.choice(upref.names())
    fields = ("logp", "logp_old", "adv", "mask", "group", "logp_ref", "entropy", "totals")
    b = upref.regimes.anchor()
    good = {k: getattr(b, k) for k in fields}
    mixed = lambda: upref.Rollouts(**good | {k: some() for k in rng.sample(fields, rng.randint(1, 3))})
    argv = lambda: [rng.choice(VERBS), *rng.choices(WORDS, k=rng.randint(0, 4))]
    a_moody = lambda: moody(rng, ends=False)
    calls = {
        "get": lambda: upref.get(some()),
        "up": lambda: upref.up(some()),
        "up_anchored": lambda: upref.up_anchored(some()),
        "Rollouts": mixed,
        "split": lambda: upref.regimes.anchor().split(some()),
        "J": lambda: upref.get("dapo")(b if rng.random() < 0.7 else mixed(), **hp()),
        "weight": lambda: upref.get("dapo").weight(1.0, 1.0, **hp()),
        "capacity": lambda: upref.capacity(name(), number(), number(), number(), **hp()),
        "weights": lambda: upref.curve.of(name(), **hp())(1.0, 1.0),
        "cap_map": lambda: upref.cap_map(*rng.choices(JUNK, k=rng.randint(0, 1)), adv=some(), **hp()),
        "derive": lambda: upref.derive(some()),
        "diagnose": lambda: upref.diagnose(some(), some()),
        "check": lambda: upref.check(some(), some(), **hp()),
        "check, skip": lambda: upref.check(upref.get("dapo"), "nothing", skip=some()),
        "identify": lambda: upref.identify(rng.choice(JUNK[:-2])),
        "check_kl": lambda: upref.check_kl(some(), rng.choice(["k1", some()]), skip=rng.choice([(), some()])),
        "check_advantages": lambda: upref.check_advantages(some(), rng.choice(["group_norm", some()]), **hp()),
        "read": lambda: read(rng.choice([a_loss(rng), a_loss(rng), some()]), upref.get("dapo"), hp()),
        "a loss": lambda: read(a_loss(rng)),
        "a KL": lambda: upref.check_kl(a_loss(rng), "k3"),
        "an advantage": lambda: upref.check_advantages(a_loss(rng), "group_mean"),
        "a moody loss, checked": lambda: upref.check(a_moody(), any_name()),
        "a moody loss, named": lambda: upref.identify(a_moody()),
        "a moody KL": lambda: upref.check_kl(a_moody(), rng.choice(["k1", "k2", "k3"])),
        "a moody advantage": lambda: upref.check_advantages(a_moody(), "group_norm"),
        "a moody curve": lambda: upref.capacity(a_moody(), 0.1, 0.1, 1.0),
        "audit": lambda: audits.audit(some(), rng.choice([(), some()])),
        "audit, ledger": lambda: ledger.hold([], ledger.read("verl", odd.a_ledger(rng, LEDGER)), str(some()), True),
        "audit-table": lambda: upref.table.audit(read_table(odd.a_table(rng)), draws=200, seed=rng.choice([0, 1, -1])),
        "command": lambda: command(argv()),
        "command, mostly right": lambda: command([rng.choice(["show", "cap", "weights"]), *rng.choices(WORDS, k=2)]),
        "child": lambda: child(rng),
    }
    slow = ("a moody loss, checked", "a moody loss, named")
    rare = {"process": lambda: child(rng, forked=False), "audit of a framework": lambda: framework(rng)}
    kind = rng.choice(list(calls))
    if kind in slow and rng.random() < 0.5:
        kind = "a moody curve"
    if rng.random() < 0.01:
        kind, calls = rng.choice(list(rare)), rare
    return kind, calls[kind]


def framework(rng: random.Random):
    """One comparison of an installed framework's audit."""
    name = rng.choice(audits.frameworks())
    one = rng.choice(audits.framework(name).comparisons)
    return audits.audit(name, (one,))


# ---- the command -----------------------------------------------------------------------------------------------------
def command(argv: list[str]):
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(argv)
    except SystemExit as e:
        status = e.code
    judge(argv, status, out.getvalue(), err.getvalue())


def child(rng: random.Random, forked: bool = True):
    """The command line as it is typed: in a child of this process, or in a process of its own."""
    loss = f"mine.py:{rng.choice(['loss', 'wrong', *[f'moody_{rng.randrange(10**9)}'] * 6])}"
    objective = rng.choice(["dapo", "grpo", "gspo", "no"])
    verbs = (["check", "--as", objective], ["check", "--as-kl", "k3"], ["check", "--as-advantage", "group_norm"])
    verb, *what = rng.choice([*verbs, ["identify"], ["cap"], ["weights"]])
    more = rng.choice([[], [], ["--json"], ["--skip=no"], [] if verb in ("cap", "weights") else ["-v"]])
    argv = [verb, loss, *what, "--timeout", rng.choice(["4", "8"]), *more]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if forked:
            status = _forked(argv, out.fileno(), err.fileno())
        else:
            env = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
            command = [sys.executable, "-m", "upref", *argv]
            status = subprocess.run(command, stdout=out, stderr=err, check=False, env=env).returncode
        out.seek(0), err.seek(0)
        judge(argv, status, out.read(), err.read(), noisy=True)


def _forked(argv: list[str], out: int, err: int) -> int:
    kept, streams, before = (os.dup(1), os.dup(2)), (sys.stdout, sys.stderr), sys.argv
    os.dup2(out, 1), os.dup2(err, 2)
    sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
    sys.argv = ["upref", *argv]
    try:
        return main()
    except SystemExit as e:
        return e.code  # type: ignore[return-value]
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        sys.stdout, sys.stderr, sys.argv = *streams, before
        for fd, was in zip((1, 2), kept, strict=True):
            os.dup2(was, fd), os.close(was)


def judge(argv: list[str], status, out: str, err: str, noisy: bool = False):
    """noisy: the loss may have written to stderr too."""
    tail = f"{argv}: status {status}, {err[-300:]!r}"
    assert status in (0, 1, 2), tail
    if "--debug" not in argv:
        assert "Traceback (most recent" not in err, tail
        last = err.rstrip("\n").rpartition("\n")[2]
        assert status != 2 or (last.startswith("upref") and len(last) < 1200 and (noisy or err.count("\n") == 1)), tail
    assert status == 2 or out, f"{argv}: status {status} without a report"
    if status != 2 and "--json" not in argv and argv[0] == "check":
        assert out.startswith("NOT ") == (status == 1) and (": agrees" in out) == (status == 0), f"{tail} {out[:200]}"
    if status != 2 and "--json" in argv and argv[0] in ("check", "identify"):
        assert json.loads(out)["ok" if argv[0] == "check" else "identified"] == (status == 0), tail
    assert argv[0] not in ("check", "identify") or "--json" in argv or len(out) <= LONGEST, f"{argv}: {len(out)} long"


# ---- one input -------------------------------------------------------------------------------------------------------
def _children() -> int:
    """How many live on; those that a loss forked get a moment to end."""
    with contextlib.suppress(ChildProcessError):
        for _ in range(200):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)
        return 1
    return 0


OTHER: dict[str, Callable] = {
    "signal handlers": lambda: [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF)],
    "the environment": lambda: {k: v for k, v in os.environ.items() if k != "UPREF_FUZZ"},
    "filters of warnings": lambda: list(warnings.filters),
    "child processes": _children,
    "open files": lambda: len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0,
    "the trace function": sys.gettrace,
}


def broken(kind: str, call) -> str:
    """What does not hold of this input, "" if all does."""
    every = STATE | RANDOM
    before, other = {name: get() for name, (get, _) in every.items()}, {name: get() for name, get in OTHER.items()}
    stdout, modules = sys.stdout, len(sys.modules)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    what = ""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            answer = call()
            if isinstance(answer, Report | Identity) and (n := len(answer.text(verbose=True))) > LONGEST:
                what = f"the report is {n} characters long"
    except InputError as e:
        what = "" if "\n" not in str(e) and len(str(e)) < 1000 else f"not one sentence: {str(e)[:200]!r}"
    except BaseException as e:
        where = e.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where else ""
        what = f"{type(e).__name__}: {' '.join(str(e).split())[:400]} ({at})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    left = [name for name, (get, _) in every.items() if not _equal(before[name], get())]
    for name in left:
        every[name][1](before[name])
    left += [name for name, get in OTHER.items() if other[name] != get()]
    if len(sys.modules) > modules:  # libraries change these when they are imported
        left = [name for name in left if name not in (*RANDOM, "the environment", "filters of warnings", "open files")]
    if sys.stdout is not stdout:
        sys.stdout = stdout
        left.append("stdout")
    return what or (f"left behind: {', '.join(left)}" if left else "")


def fuzz(inputs: int, seed: int, file: Path | None = None) -> tuple[collections.Counter, dict[str, list[str]]]:
    """(how many of each kind, what broke -> the inputs, as `seed number`)."""

    def late(number, frame):
        raise TimeoutError(f"no end within {LIMIT} s")

    begun = json.loads(file.read_text()) if file and file.exists() else {"next": 0, "counts": {}, "found": {}}
    counts, found = collections.Counter(begun["counts"]), begun["found"]
    before, ours = signal.signal(signal.SIGPROF, late), os.getpid()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("mine.py").write_text(odd.LOSS)
        Path("table.csv").write_text("method,a,Average\nx,50.00,50.00\ny,25,25.0\n")
        for i in range(begun["next"], inputs):
            kind, call = tries(random.Random(f"{seed} {i}"))
            counts[kind] += 1
            if what := broken(kind, call):
                found.setdefault(f"{kind}: {what}", []).append(f"{seed} {i}")
            if os.getpid() != ours:
                os._exit(3)
            if file and (i + 1) % EVERY == 0:
                file.write_text(json.dumps({"next": i + 1, "counts": counts, "found": found}, indent=1))
    signal.signal(signal.SIGPROF, before)
    return counts, found


if __name__ == "__main__":
    given = (*sys.argv[1:], *("2000", "0", "")[len(sys.argv) - 1 :])
    inputs, seed, kept = int(given[0]), int(given[1]), Path(given[2]).absolute() if given[2] else None
    counts, found = fuzz(inputs, seed, kept)
    for what, where in sorted(found.items()):
        print(f"{len(where):4} {what}   [{where[0]}]")
    print(f"{sum(counts.values())} inputs, seed {seed}: {sum(map(len, found.values()))} broke a rule")
    print(", ".join(f"{k} {n}" for k, n in sorted(counts.items())))
    sys.exit(bool(found))
