# SPDX-License-Identifier: Apache-2.0
"""Bad and odd inputs (bad_inputs.py) at every entry point: public functions (entries.py), the
command (typed.py), audits.

    python -m tests.support.fuzz [inputs] [seed] [FILE] [--record]

What must hold of each: an answer of bounded length, or InputError (exit status 2) with
one sentence; no other exception, no status 0 without a report that says so, no hang,
and the process as it was. Prints what broke that, and how many of what were tried. With
FILE, what was done is kept there, and the same command goes on from it. With --record,
the complete run is a record of RECORDS, which docs/what-check-sees.md counts.
"""

import collections
import contextlib
import functools
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import paper.claims
import upref
import upref.weights.batches
import upref.weights.curve
from docs import record
from tests.support import bad_inputs, entries, typed
from tests.support.bad_inputs import JUNK, a_loss, moody
from upref.errors import InputError
from upref.identification.identification import Identification
from upref.user_code import read
from upref.user_code.guard import RANDOM, STATE, _equal
from upref.verify.report import Report
from upref_course import explorer, grader as learn
from upref_frameworks import audits, ledger, names
from upref_frameworks.audits.ledger import check_ledger

LIMIT = 60  # seconds of CPU for one input
ANSWERS = Report | Identification | learn.ExerciseVerdict
EVERY = 100  # inputs between two notes in FILE
RECORDS = Path(__file__).with_name("fuzz.json")
CLAIMS = (
    resources.files("paper.claims").joinpath("claims.toml").read_text(encoding="utf-8")
)
LEDGER = (
    resources.files("upref_frameworks")
    .joinpath("verl/ledger.toml")
    .read_text(encoding="utf-8")
)


def tries(rng: random.Random):
    """Draw an input: return what it is called, and a function without arguments that
    runs it.

    Slow kinds are replaced six times in ten by quick ones.
    """

    def some():
        return rng.choice(JUNK)

    def hp():
        """Draw up to two hyperparameters with junk."""
        given = {}
        for _ in range(rng.randint(0, 2)):
            name = rng.choice(["eps_low", "eps_high", "c", "beta", "x", "eps"])
            given[name] = some()
        return given

    def number():
        return rng.choice([0.1, 0.5, 1.0, -1.0, some()])

    def name():
        return rng.choice(["dapo", "gspo", "grpo", some()])

    def any_name():
        return rng.choice(upref.names())

    fields = (
        "logp",
        "logp_old",
        "adv",
        "mask",
        "group",
        "logp_ref",
        "entropy",
        "totals",
    )
    b = upref.weights.batches.on_policy_batch()
    good = {k: getattr(b, k) for k in fields}

    def mixed():
        """Make a batch with one to three fields of junk."""
        wrong = rng.sample(fields, rng.randint(1, 3))
        return upref.Rollouts(**good | {k: some() for k in wrong})

    def a_moody():
        return moody(rng, ends=False)

    calls = {
        entries.qualified(name): functools.partial(entry, name, rng)
        for name in entries.PUBLIC
    }
    calls |= {
        "get": lambda: upref.get(some()),
        "Rollouts": mixed,
        "J": lambda: upref.get("dapo")(b if rng.random() < 0.7 else mixed(), **hp()),
        "capacity": lambda: upref.capacity(
            name(), number(), number(), number(), **hp()
        ),
        "curve": lambda: upref.weights.curve.make_curve(name(), **hp())(1.0, 1.0),
        "cap_map": lambda: upref.cap_map(
            *rng.choices(JUNK, k=rng.randint(0, 1)), adv=some(), **hp()
        ),
        "clipping": lambda: upref.replay.clipping(some(), some()),
        "check": lambda: upref.check(some(), some(), **hp()),
        "check, skip": lambda: upref.check(upref.get("dapo"), "nothing", skip=some()),
        "identify": lambda: upref.identify(rng.choice(JUNK[:-2])),
        "check_kl": lambda: upref.check_kl(
            some(), rng.choice(["k1", some()]), skip=rng.choice([(), some()])
        ),
        "check_advantages": lambda: upref.check_advantages(
            some(), rng.choice(["group_norm", some()]), **hp()
        ),
        "read": lambda: read(
            rng.choice([a_loss(rng), a_loss(rng), some()]), upref.get("dapo"), hp()
        ),
        "a loss": lambda: read(a_loss(rng)),
        "a KL": lambda: upref.check_kl(a_loss(rng), "k3"),
        "an advantage": lambda: upref.check_advantages(a_loss(rng), "group_mean"),
        "a moody loss, checked": lambda: upref.check(a_moody(), any_name()),
        "a moody loss, named": lambda: upref.identify(a_moody()),
        "a moody KL": lambda: upref.check_kl(a_moody(), rng.choice(["k1", "k2", "k3"])),
        "a moody advantage": lambda: upref.check_advantages(a_moody(), "group_norm"),
        "a moody curve": lambda: upref.capacity(a_moody(), 0.1, 0.1, 1.0),
        "audit": lambda: audits.audit(some(), rng.choice([(), some()])),
        "audit, ledger": lambda: check_ledger(
            [], ledger.read("verl", bad_inputs.a_ledger(rng, LEDGER)), str(some()), True
        ),
        "a student": lambda: a_student(rng),
        "claims": lambda: paper.claims.read(bad_inputs.a_ledger(rng, CLAIMS)),
        "explorer": lambda: explorer.write(rng.choice(["no/x.html", *map(str, JUNK)])),
    }
    slow = (
        "upref.check_step",
        "upref.assert_step",
        "upref.check_recorded",
        "a moody loss, checked",
        "a moody loss, named",
        "upref.assert_policy_loss",
        "upref.check",
        "upref.identify",
    )
    kind = rng.choice([*calls, *["command"] * 15, *["child"] * 4])
    if kind in slow and rng.random() < 0.6:
        kind = rng.choice(["upref.Rollouts", "a student", "a loss"])
    if rng.random() < 0.006:  # each takes seconds
        kind = rng.choice(["process"] * 4 + ["audit of a framework"])
    if kind == "command":
        argv = typed.argv(rng)
        verb = argv[0] if argv[0] in typed.VERBS else ""
        return f"command {verb}", lambda: typed.command(argv)
    if kind in ("child", "process"):
        argv = typed.judging(rng)
        return f"{kind} {argv[0]}", lambda: typed.child(argv, forked=kind == "child")
    if kind == "audit of a framework":
        return kind, lambda: framework(rng)
    return kind, calls[kind]


def entry(name: str, rng: random.Random):
    """Call a public function with drawn arguments, and return its answer; a test that
    it fails is an answer too.
    """
    with contextlib.suppress(pytest.fail.Exception):
        return entries.called(name, rng)()


def a_student(rng: random.Random):
    number = rng.randint(1, 10)
    typed.a_lesson(number, rng, ends=False)
    return learn.judge(learn.exercise(number), Path.cwd())


def framework(rng: random.Random):
    """Run one comparison of an installed framework's audit, drawn at random."""
    name = rng.choice(names())
    one = rng.choice(audits.framework(name).comparisons)
    return audits.audit(name, (one,))


VERDICTS = Path(paper.claims.__file__).with_name("computed.json")


# ---- one input -----------------------------------------------------------------------
def _children() -> int:
    """Reap the children that have ended; return 1 if one lives on after two seconds,
    else 0.
    """
    with contextlib.suppress(ChildProcessError):
        for _ in range(200):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)
        return 1
    return 0


OTHER: dict[str, Callable] = {
    "signal handlers": lambda: [
        signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF)
    ],
    "the environment": lambda: {
        k: v for k, v in os.environ.items() if k != "UPREF_FUZZ"
    },
    "filters of warnings": lambda: list(warnings.filters),
    "child processes": _children,
    "open files": lambda: (
        len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    ),
    "the trace function": sys.gettrace,
    "the registry": upref.names,
    "the verdicts of the claims": lambda: VERDICTS.read_bytes(),
}


def broken(kind: str, call) -> str:
    """Run an input, and return the first rule that it broke, or "" if it broke none.

    A rule is broken by a report that is too long, an InputError of several lines, any
    other exception, or a state of the process that is changed. The state is restored.
    """
    restorable = STATE | RANDOM
    before = {name: get() for name, (get, _) in restorable.items()}
    other_before = {name: get() for name, get in OTHER.items()}
    stdout, modules = sys.stdout, len(sys.modules)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            what = too_long(call())
    except InputError as e:
        is_sentence = "\n" not in str(e) and len(str(e)) < 1000
        what = "" if is_sentence else f"not one sentence: {str(e)[:200]!r}"
    except BaseException as e:
        message = " ".join(str(e).split())[:400]
        what = f"{type(e).__name__}: {message} ({innermost_line(e)})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    changed = []
    for name, (get, _) in restorable.items():
        if not _equal(before[name], get()):
            changed.append(name)
    for name in changed:
        _, restore = restorable[name]
        restore(before[name])
    changed += [name for name, get in OTHER.items() if other_before[name] != get()]
    if len(sys.modules) > modules:  # libraries change these when they are imported
        by_import = (*RANDOM, "the environment", "filters of warnings", "open files")
        changed = [name for name in changed if name not in by_import]
    if sys.stdout is not stdout:
        sys.stdout = stdout
        changed.append("stdout")
    if what:
        return what
    return f"left behind: {', '.join(changed)}" if changed else ""


def too_long(answer: Any) -> str:
    """Return how long a report is if it is longer than a report may be, else ""."""
    if not isinstance(answer, ANSWERS):
        return ""
    length = len(answer.text(verbose=True))
    if length <= typed.LONGEST:
        return ""
    return f"the report is {length} characters long"


def innermost_line(error: BaseException) -> str:
    """Return "file:line" of where an exception was raised, or "" if it was not."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    if where is None:
        return ""
    file = Path(where.tb_frame.f_code.co_filename)
    return f"{file.name}:{where.tb_lineno}"


def fuzz(
    inputs: int, seed: int, file: Path | None = None
) -> tuple[collections.Counter, dict[str, list[str]]]:
    """Run the inputs, and return how many of each kind there were, and what broke with
    its inputs as "seed number".

    Args:
        inputs: how many.
        seed: of all inputs.
        file: where the run is kept at every hundredth input; it goes on from what is
            there.
    """

    def late(number, frame):
        """Raise a TimeoutError: the signal's handler."""
        raise TimeoutError(f"no end within {LIMIT} s")

    begun = {"next": 0, "counts": {}, "found": {}}
    if file and file.exists():
        begun = json.loads(file.read_text())
    counts, found = collections.Counter(begun["counts"]), begun["found"]
    before, ours = signal.signal(signal.SIGPROF, late), os.getpid()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        typed.beside()
        for i in range(begun["next"], inputs):
            kind, call = tries(random.Random(f"{seed} {i}"))
            counts[kind] += 1
            if what := broken(kind, call):
                found.setdefault(f"{kind}: {what}", []).append(f"{seed} {i}")
            if os.getpid() != ours:  # an input forked, and its child came here
                os._exit(3)
            if file and (i + 1) % EVERY == 0:
                done = {"next": i + 1, "counts": counts, "found": found}
                file.write_text(json.dumps(done, indent=1))
    signal.signal(signal.SIGPROF, before)
    return counts, found


def record_run(
    file: Path,
    counts: collections.Counter[str],
    found: dict[str, list[str]],
    inputs: int,
    seed: int,
) -> None:
    """Record a complete run, in place of an earlier one of the seed.

    Args:
        file: of the records.
        counts, found: what `fuzz` returned.
        inputs: how many there were.
        seed: of the run.
    """
    broke = [where for places in found.values() for where in places]
    again = sum(bool(broken(*tries(random.Random(where)))) for where in broke)
    row = {"again": again, "counts": dict(sorted(counts.items())), "found": found}
    command = f"python -W ignore -m tests.support.fuzz {inputs} {seed} FILE --record"
    record.add(file, command, {f"seed {seed}": row}, [seed])


def main(words: list[str]) -> int:
    """Run the fuzzer on `[inputs] [seed] [FILE] [--record]`, and print what broke;
    return 1 if something did, else 0.
    """
    given = [word for word in words if word != "--record"]
    inputs_word, seed_word, kept_word = [*given, *("2000", "0", "")[len(given) :]]
    inputs = int(inputs_word)
    seed = int(seed_word)
    kept = Path(kept_word).absolute() if kept_word else None
    counts, found = fuzz(inputs, seed, kept)
    for what, where in sorted(found.items()):
        print(f"{len(where):4} {what}   [{where[0]}]")
    broke = sum(map(len, found.values()))
    print(f"{sum(counts.values())} inputs, seed {seed}: {broke} broke a rule")
    print(", ".join(f"{kind} {n}" for kind, n in sorted(counts.items())))
    if "--record" in words:
        record_run(RECORDS, counts, found, inputs, seed)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
