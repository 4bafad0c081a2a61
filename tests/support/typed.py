# SPDX-License-Identifier: Apache-2.0
"""What can be typed after `upref`: every verb with every option, files beside it, in
this process and in a child of it.

The verbs of PAPER follow `python -m paper`. VERBS holds the words of each verb;
test_fuzz.py holds that no verb and no option of `upref --help` is missing.
"""

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from paper.__main__ import VERBS as PAPER, main as paper, parser as paper_parser  # noqa: F401
from upref.cli import main
from upref_course.grader import exercises

LONGEST = 20_000  # characters of an answer
HP = ["--hp", "--hp=eps_low=0.1", "--hp=eps_low=nan", "--hp=c=None", "--hp=eps=1e999", "--hp==", "--hp=x=1",
      "--hp=eps_high=True"]  # fmt: skip
TIME = [
    "--timeout",
    "--timeout=0",
    "--timeout=-1",
    "--timeout=nan",
    "--timeout=x",
    "--timeout=9",
]
ALL = ["--json", "--debug", "-h", "--help"]
FIGURE = ["-o", "-o.", "-o/", "-o/no/x.svg", "-ox.xyz", "-ox.svg", "-o\0.svg"]
LOSSES = [
    "dapo", "gspo", "m2po", "aspo_code", "bandpo_kl", "nothing", "up(sapo)", "verl:vanilla", "verl:", "trl:nothing",
    "trl:grpo,x", ":", "x:y", "no.py:f", ".py:f", "upref:get", "upref.kl:k1", "os:getcwd", "math:exp", "torch:max",
    "mine.py:loss", "mine.py:wrong", "mine.py:missing", "mine.py:two.three", "table.csv", "torch", "π", "\0", "-", "--",
    "", "a" * 5000,
]  # fmt: skip
VERBS: dict[str, list[str]] = {
    "check": [*HP, *TIME, "--as", "--as=dapo", "--as=no", "--as-kl", "--as-kl=k1", "--as-kl=no", "--as-advantage",
              "--as-advantage=group_norm", "--as-advantage=no", "--as-distillation", "--as-distillation=jsd",
              "--as-distillation=no", "--as-value", "--as-value=mse", "--as-value=no", "--as-logprobs", "--agg", "--agg=no",
              "--skip",
              "--skip=no", "--watch", "-v", "--verbose"],
    "identify": [*TIME, "-v", "--verbose"],
    "diff": [*TIME, "--steps", "--case", "--case=no", "--seed=x", "dapo", "up_dapo", "mine.py:loss", "-v", "--verbose"],
    "maximizes": [*HP, *TIME, "--as-advantage", "--as-kl", "--as-kl=loss", "--as-kl=no", "--advantages",
                  "--advantages=reward", "--advantages=no", "--group-size", "--group-size=2", "--group-size=0",
                  "--group-size=x", "k1", "group_mean", "-v", "--verbose"],
    "prove": [*HP, *TIME, "--as", "--as=dapo", "--as=no", "--as=mine.py:loss", "--as-kl", "--as-kl=k1", "--as-kl=no",
              "--as-advantage", "--as-advantage=group_mean", "--as-advantage=gae", "--as-advantage=no",
              "--agg", "--agg=no", "--rows", "--rows=1", "--rows=0", "--rows=x", "--columns", "--columns=1",
              "--columns=-1", "-v", "--verbose"],
    "audit": ["verl", "trl", "torchrl", "slime", "--ledger", "--report", "--report=no", "--report=verl-1",
              "--source=no", "--source=.", "--version", "--version=1", "--proofs", "--draft", "--logprobs"],
    "list": ["--all", "--markdown"],
    "show": [],
    "cap": ["--log", *HP, *TIME, *FIGURE, "--adv", "--adv=-1", "--adv=nan", "--adv=x", "--adv=1e999"],
    "weights": [*HP, *TIME, *FIGURE],
    "explorer": ["no/x.html", "x.txt", "x.htm", ".", "\0.html", "x" * 300 + ".html", "mine.py/x.html"],
    "derive": ["grpo", "up_dapo", "m2po"],
    "learn": [*TIME, *map(str, range(-1, 12)), "1.5", "9" * 5000, "lesson01.py"],
    "claims": ["--section", "--section=3", "--section=4.1", "--section=B", "--section=99", "--section=", "--verdict",
               "--verdict=proved", "--verdict=red", "--verdict=no", "--run", "--save", "-v", "--verbose"],
    "recipe": [*HP, "--in", "--in=verl", "--in=liger", "--in=no", "dapo", "up_dapo"],
    "step": [*HP, "trl", "verl", "openrlhf", "no", "mine.py:loss", "--list", "--only", "--only=no such setting",
             "--against", "--against=no such file", "--as", "--as=dapo", "--as=no", "--temperature", "--temperature=0",
             "--model", "--model=no", "--without", "--without=ratio", "--without=no", "-v", "--verbose"],
    "replay": [*HP, "--zero", "--as", "--as=dapo", "--as=no", "--agg", "--agg=no", "--loss", "--loss=x", "--loss=1",
               "--only", "--only=loss", "--only=no", "--against", "--against=gspo", "--against=no", "--tokenizer",
               "--tokenizer=.", "-o", "-ox.xyz", "-ono/x.svg", "--zero", "-v", "--verbose", "table.csv", "mine.py",
               "."],
    "logs": ["--map", "--map=kl_loss=a", "--map=no", "--map=no=a", "-v", "--verbose", "table.csv", "mine.py", "."],
    "badge": ["-o", "-ox.svg", "-ono/x.svg", "table.csv", "mine.py", "."],
    "doctor": [],
}  # fmt: skip
# how often, of the times that chance has it
SLOW = {
    "diff": 0.3,
    "doctor": 0.1,
    "explorer": 0.5,
    "maximizes": 0.2,
    "prove": 0.2,
    "step": 0.1,
}
NO_VERB = ["frobnicate", "", "-x", "--help", "-h", "--debug", "--json", "π"]
FIT = {  # words that alone are a right call
    "show": [["dapo"], ["up(sapo)"]], "cap": [["dapo"]], "weights": [["grpo", "gspo"]], "list": [[]],
    "audit": [["verl", "--ledger"], ["slime", "--ledger"]], "derive": [["up_dapo"]],
    "learn": [[]], "claims": [[]],
    "check": [["mine.py:loss", "--as=dapo"]], "identify": [["mine.py:loss"]],
    "diff": [["mine.py:loss", "dapo"]], "maximizes": [["k1", "--as-kl=reward"]],
    "prove": [["mine.py:loss", "--as=dapo"]], "explorer": [["x.html"]], "doctor": [[]],
    "recipe": [["dapo", "--in", "verl"]], "step": [["trl", "--list"]],
    "replay": [["table.csv"]], "logs": [["table.csv"]], "badge": [["table.csv"]],
}  # fmt: skip
ROOT = str(Path(__file__).parents[2])
LOSS = f"""import sys, torch
sys.path.insert(0, {ROOT!r})
def loss(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    return -(torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages) * mask).sum() / mask.sum()
def wrong(log_prob, old_log_prob, advantages, mask): raise ValueError("one\\ntwo")
class two: three = 3
def __getattr__(name):
    import random
    from tests.support import bad_inputs
    if not name.startswith("moody_"): raise AttributeError(name)
    return bad_inputs.moody(random.Random(name))
"""


def beside() -> None:
    """Write the files that the words name into the working directory."""
    Path("mine.py").write_text(LOSS)
    Path("table.csv").write_text("method,a,Average\nx,50.00,50.00\ny,25,25.0\n")


def argv(rng: random.Random) -> list[str]:
    """Return random words after `upref`: a verb, or something that is none, with some
    of its own words, others' and losses.

    Slow verbs are often replaced by `list`. The file of a lesson is written where the
    verb reads it.
    """
    verb = rng.choice([*VERBS] * 5 + NO_VERB)
    if rng.random() > SLOW.get(verb, 1):
        verb = "list"
    own = VERBS.get(verb, []) + ALL
    many = [*own * 3, *rng.choice([*VERBS.values()]), *LOSSES]
    if rng.random() < 0.4:
        words = rng.choice(FIT.get(verb, [[]]))
    else:
        words = rng.choices(LOSSES, k=rng.randint(0, 1))
    words = [*words, *rng.choices(many, k=rng.randint(0, 3))]
    rng.shuffle(words)
    if verb == "claims" and "--run" in words:
        words.append("--section=99")  # all of them take an hour
    if verb == "audit":  # nothing is fetched, no framework's whole audit is run
        options = {word.partition("=")[0] for word in words}
        if not options & {"--ledger", "--report"}:
            words.append("--ledger")
    if verb == "learn":
        for word in words:
            if word in map(str, range(1, 11)):
                a_lesson(int(word), rng, ends=False)
    return [verb, *words]


def a_lesson(number: int, rng: random.Random, ends: bool) -> None:
    """Write what a student may have in the file of that exercise: a solution, an odd
    text, bytes, a folder, or nothing. What was there is removed.
    """
    e = next(e for e in exercises() if e.number == number)
    file = Path(e.file)
    file.rmdir() if file.is_dir() else file.unlink(missing_ok=True)
    hook = f"import sys\nsys.path.insert(0, {ROOT!r})\nimport random\nfrom tests.support import bad_inputs\n"
    text = f"{hook}{e.function} = bad_inputs.student({number}, random.Random({rng.random()}), {ends})\n"
    odd_ones = ["", "def f(", "\0", e.text(), f"{e.function} = 3", "raise SystemExit", f"def {e.function}(): pass",
                f"def {e.function}(*a): return ...", "import no_such_module", f"class {e.function}: pass",
                "1/0"]  # fmt: skip
    match rng.choice(["solution"] * 8 + ["odd"] * 4 + ["none", "folder", "bytes"]):
        case "solution":
            file.write_text(text)
        case "odd":
            file.write_text(rng.choice(odd_ones))
        case "folder":
            file.mkdir()
        case "bytes":
            file.write_bytes(b"\xff\xfe" + text.encode())


# ---- run -----------------------------------------------------------------------------
def command(argv: list[str]) -> None:
    """Run the words in this process, and assert what `judge` asserts."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = paper(argv) if argv[0] in PAPER else main(argv)
    except SystemExit as e:
        status = e.code
    judge(argv, status, out.getvalue(), err.getvalue())


def judging(rng: random.Random) -> list[str]:
    """Return words of a verb that runs somebody's function, and one that may turn bad
    or end the process. For `learn` the lesson's file is written.
    """
    loss = f"mine.py:{rng.choice(['loss', 'wrong', *[f'moody_{rng.randrange(10**9)}'] * 6])}"
    objective, number = rng.choice(["dapo", "grpo", "gspo", "no"]), rng.randint(1, 10)
    judges = (["check", loss, "--as", objective], ["check", loss, "--as-kl", "k3"],
              ["check", loss, "--as-advantage", "group_norm"], ["identify", loss])  # fmt: skip
    verb, *what = rng.choice(
        [*judges, ["cap", loss], ["weights", loss], *[["learn", str(number)]] * 3]
    )
    if verb == "learn":
        a_lesson(number, rng, ends=True)
    more = rng.choice(
        [
            [],
            [],
            ["--json"],
            ["--skip=no"],
            ["-v"] if verb in ("check", "identify") else [],
        ]
    )
    return [verb, *what, "--timeout", rng.choice(["4", "8"]), *more]


def child(argv: list[str], forked: bool) -> None:
    """Run the words as they are typed, in a child of this process or in a process of
    its own, and assert what `judge` asserts.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if forked:
            status = _forked(argv, out.fileno(), err.fileno())
        else:
            env = os.environ | {
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))
            }
            run = [sys.executable, "-m", "upref", *argv]
            status = subprocess.run(
                run, stdout=out, stderr=err, check=False, env=env
            ).returncode
        out.seek(0), err.seek(0)
        judge(argv, status, out.read(), err.read(), noisy=True)


def _forked(argv: list[str], out: int, err: int) -> int:
    """Run upref's main function with stdout and stderr on these file descriptors;
    return its exit status. Both, and sys.argv, are restored.
    """
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


# ---- and judged ----------------------------------------------------------------------
HEADS = {  # how the answer of a verb begins that says no, or yes
    "check": lambda out, no: out.startswith("NOT ") == no and (": agrees" in out) != no,
    "learn": lambda out, no: (": not yet" in out.partition("\n")[0]) == no,
}
# of what is printed with --json
TRUTH = {"check": "ok", "identify": "identified", "learn": "ok"}


def judge(argv: list[str], status, out: str, err: str, noisy: bool = False) -> None:
    """Assert that the exit status, the report and the errors of a command agree.

    Args:
        argv: the words.
        status: 0, 1 or 2, or the assertion fails.
        out, err: what was printed.
        noisy: the loss may have written to stderr too.
    """
    verb = argv[0]
    tail = f"{[x[:60] for x in argv]}: status {status}, {err[-300:]!r}"
    assert status in (0, 1, 2), tail
    if "--debug" not in argv:
        assert "Traceback (most recent" not in err, tail
        # a proof that was not found has a report
        no_proof = verb == "prove" and out and not err
        if status == 2 and not no_proof:
            last = err.rstrip("\n").rpartition("\n")[2]
            assert last.startswith(("upref", "python -m paper")), tail
            assert len(last) < 1200, tail
            assert noisy or err.count("\n") == 1, tail
    assert status == 2 or out, f"{tail}: no report"
    if status == 2 or {"-h", "--help"} & {*argv}:
        return
    if "--json" not in argv and verb in HEADS:
        assert HEADS[verb](out, status == 1), f"{tail} {out[:200]}"
    if "--json" in argv and verb != "audit":
        said = json.loads(out)
        if verb in TRUTH and TRUTH[verb] in said:
            assert said[TRUTH[verb]] == (status == 0), tail
    judges = verb in ("check", "identify", "learn") and "--json" not in argv
    assert not judges or len(out) <= LONGEST, f"{tail}: {len(out)} long"
