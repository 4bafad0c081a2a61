# SPDX-License-Identifier: Apache-2.0
"""No false green: whatever somebody's code does, status 0 comes with a finished report,
and nothing is left behind.
"""

import contextlib
import errno
import json
import logging
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import upref
import upref.weights.batches
from repro import fork
from tests.support.daily import daily
from tests.support.exit_status import COMMAND
from tests.support.hanging import HANGING
from tests.verify.test_cli import is_running
from upref.cli import commands, main
from upref.errors import InputError, TooManyLines
from upref.pytest_plugin import assert_policy_loss
from upref.user_code.function import is_same
from upref.user_code.guard import (
    AROUND,
    RANDOM,
    STATE,
    _equal,
    call_guarded,
    one_line,
    state_restored,
)

leave = os._exit

DAPO = """
import atexit, ctypes, functools, os, stat, subprocess, sys, time, torch
def loss(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    J = torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages)
    return -(J * mask).sum() / mask.sum()
def does(what):
    def f(log_prob, old_log_prob, advantages, mask):
        what()
        return loss(log_prob, old_log_prob, advantages, mask)
    return f
def late(what):
    calls = []
    return does(lambda: (calls.append(0), what() if len(calls) == 30 else None))
def forever():
    while True: time.sleep(0.01)
leaves, crashes = does(lambda: os._exit(0)), does(lambda: ctypes.string_at(0))
leaves_by_c = does(lambda: ctypes.CDLL(None)._exit(0))
loops, shouts = does(forever), does(lambda: os.write(1, b"shouted"))
asks, stumbles = does(lambda: torch.zeros(2**45)), late(lambda: int("no"))
later = does(lambda: atexit.register(os._exit, 0))
exits = does(lambda: sys.exit(0))
leaves_late, exits_late = late(lambda: os._exit(0)), late(lambda: sys.exit(0))
asks_late = late(lambda: torch.zeros(2**45))
leaves_by_c_late, crashes_late = late(lambda: ctypes.CDLL(None)._exit(0)), late(lambda: ctypes.string_at(0))
forks = does(lambda: os.fork())
@functools.cache
def start():  # they hold stderr open; the second one has a session of its own and no parent
    one = subprocess.Popen(["sleep", "600"])
    two = subprocess.run(["setsid", "sh", "-c", "sleep 600 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True)
    with open("started", "w") as f: f.write(f"{one.pid} {two.stdout}")
stays = does(start)
def write():
    for fd in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode): os.write(fd, b"[0, ")
        except OSError: pass
garbles, stops = does(functools.cache(write)), does(lambda: (write(), forever()))
def forge():
    for fd in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode): os.write(fd, b'[0, "agrees", ""]\\n')
        except OSError: pass
forges = does(functools.cache(forge))
def writes(log_prob, old_log_prob, advantages, mask):
    value = loss(log_prob, old_log_prob, advantages.clone(), mask)
    advantages.mul_(2)
    return value
wrong = lambda log_prob, old_log_prob, advantages, mask: -loss(log_prob, old_log_prob, advantages, mask)
print("printed at import")
"""
FAST = [
    x
    for name in (
        "extremes",
        "padding",
        "masked-values",
        "permutation",
        "scaling",
        "value",
    )
    for x in ("--skip", name)
]


def test_the_command_line_says_0_only_after_a_report(tmp_path):
    """Losses that end, hang or kill their process get the status of COMMAND, one report
    at most, and leave no process.
    """
    (tmp_path / "mine.py").write_text(DAPO)

    def start(loss):
        """Start `upref check --json` on a loss of mine.py as a process of its own, and
        return it.
        """
        return subprocess.Popen(
            [*fork.executable(), "-m", "upref", "check", f"mine.py:{loss}", "--as", "dapo", *FAST, "--json", "--timeout",
             "12" if loss in ("loops", "stops") else "300"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=os.environ | fork.environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip

    ends = COMMAND | {
        f"{name}_late": COMMAND[name]
        for name in ("leaves", "leaves_by_c", "crashes", "exits", "asks")
    }
    running = {loss: start(loss) for loss in ends}
    for loss, (_, status, says, report) in ends.items():
        out, err = running[loss].communicate(timeout=400)
        assert (running[loss].returncode, says in err) == (status, True), (loss, err)
        # one report, of one process
        assert json.loads(out)["ok"] == (status == 0) if report else not out, (
            loss,
            out,
        )
    assert not any(map(is_running, (tmp_path / "started").read_text().split()))


def test_a_reader_that_leaves_early_gets_the_verdict(tmp_path):
    """Run a check whose output is cut, closed or full, and find its status and no
    traceback.
    """
    (tmp_path / "mine.py").write_text(DAPO)
    env = os.environ | fork.environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for how, status in (("| head -c 1", 1), (">&-", 2), ("> /dev/full", 2)):
        # which needs all three streams
        python = sys.executable if how == ">&-" else shlex.join(fork.executable())
        command = f"{python} -m upref check mine.py:wrong --as dapo {shlex.join(FAST)} {how}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=env,
        )
        assert done.returncode == status and "Traceback" not in done.stderr, (how, done)


def dapo(log_prob, old_log_prob, advantages, mask):
    return upref.get("dapo").loss(
        upref.Rollouts(log_prob, old_log_prob, advantages, mask)
    )


def after(what, answer=dapo):
    """Return a loss that calls `what` first, and then answers as DAPO."""

    def loss(log_prob, old_log_prob, advantages, mask):
        what()
        return answer(log_prob, old_log_prob, advantages, mask)

    return loss


def raising(error):
    def throw():
        raise error

    return throw


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, what=lambda: sys.exit(0)):
        ctx.what = what
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.what()
        return g, None


def overwritten(log_prob, old_log_prob, advantages, mask):
    r = (log_prob - old_log_prob).exp()
    square = r * r
    r.mul_(2)
    return (square * mask).sum()


REFUSED = {
    "exits": (after(lambda: sys.exit(0)), "ends the program"),
    "stops": (after(raising(GeneratorExit())), "ends the program"),
    "base": (after(raising(BaseException("x"))), "raised BaseException: x"),
    "unprintable": (after(raising(Unprintable())), "raised Unprintable"),
    "lines": (after(raising(InputError("two\nlines"))), "two lines"),
    "exits on the way back": (lambda lp, old, A, mask: dapo(Back.apply(lp), old, A, mask), "the backward pass of"),
    "cannot go back": (overwritten, "modified by an inplace operation"),
    "complex": (lambda lp, old, A, mask: dapo(lp, old, A, mask) * (1 + 0j), "complex"),
    "sparse": (lambda lp, old, A, mask: (lp * mask).to_sparse(), "sparse"),
    "meta": (lambda lp, old, A, mask: dapo(lp, old, A, mask).to("meta"), "meta"),
    "nested": (lambda lp, old, A, mask: torch.nested.nested_tensor(list(lp)), "nested"),
    "a number": (lambda lp, old, A, mask: dapo(lp, old, A, mask).item(), "return the tensor"),
    "a generator": (lambda lp, old, A, mask: (x for x in lp), "return the loss itself"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_one_sentence_for_a_loss_that_does_not_answer(what):
    loss, says = REFUSED[what]
    for ask in (
        lambda: upref.check(loss, "dapo"),
        lambda: upref.identify(loss),
        lambda: upref.capacity(loss, 0.1, 0.1),
    ):
        with pytest.raises(InputError) as e:
            ask()
        assert says in str(e.value) and "\n" not in str(e.value)


CHANGES = {
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "whether torch computes gradients": lambda: torch.set_grad_enabled(False),
    "torch's anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "torch's number of threads": lambda: torch.set_num_threads(
        3 - torch.get_num_threads() % 2
    ),
    "torch's choice of algorithms": lambda: torch.use_deterministic_algorithms(True),
    "the precision of torch's products": lambda: torch.set_float32_matmul_precision(
        "medium"
    ),
    "what numpy does about overflow": lambda: np.seterr(over="ignore", divide="ignore"),
    "the working directory": lambda: os.chdir("/"),
    "torch's random generator": lambda: torch.manual_seed(1),
    "numpy's random generator": lambda: np.random.seed(1),
    "Python's random generator": lambda: random.seed(1),
    "torch's autocast": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "whether tiny numbers are 0": lambda: torch.set_flush_denormal(True),
    "the environment": lambda: os.environ.update(CUDA_VISIBLE_DEVICES="7"),
    "the root logger": lambda: logging.disable(50),
}


def test_what_a_loss_changes_of_the_process_is_set_back():
    """All of CHANGES at once, in a loss and in a KL term: each is a note, and the state
    is as before.
    """

    def all_of_it(answer):
        for change in CHANGES.values():
            change()
        return answer

    # left on by another test of this process
    on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    every = STATE | RANDOM | AROUND
    before = {name: read() for name, (read, _) in every.items()}

    def loss(log_prob, old_log_prob, advantages, mask):
        return all_of_it(dapo(log_prob, old_log_prob, advantages, mask))

    report = upref.check(loss, "dapo", skip=("extremes", "masked-values"))
    assert report and {f"it changes {name}" for name in CHANGES} <= {
        f.regime for f in report.notes
    }
    k1 = upref.check_kl(
        lambda log_prob, ref_log_prob: all_of_it(log_prob - ref_log_prob), "k1"
    )
    assert k1 and "it changes torch's default dtype" in {f.regime for f in k1.notes}
    assert [
        name for name, (read, _) in every.items() if not _equal(before[name], read())
    ] == []
    torch.use_deterministic_algorithms(on)


def test_what_an_import_changes_is_no_habit_of_the_function(tmp_path, monkeypatch):
    """`import jax` sets environment variables and draws from numpy's generator."""
    monkeypatch.setenv("UPREF_TEST_OF_IMPORTS", "before")
    file = tmp_path / "sets_up.py"
    file.write_text(
        "import os, numpy\n"
        "numpy.random.rand()\n"
        "os.environ['UPREF_TEST_OF_IMPORTS'] = 'import'\n"
        "def k1(log_prob, ref_log_prob):\n"
        "    assert os.environ['UPREF_TEST_OF_IMPORTS'] == 'import'\n"
        "    return log_prob - ref_log_prob\n"
        "numpy.random.seed(0)\n"
        "def draws(log_prob, ref_log_prob):\n"
        "    numpy.random.seed(0)\n"
        "    return log_prob - ref_log_prob\n"
    )
    quiet = upref.check_kl(f"{file}:k1", "k1")
    assert quiet and not [f for f in quiet.notes if f.oracle == "mutation"]
    [drawn] = [
        f for f in upref.check_kl(f"{file}:draws", "k1").notes if f.oracle == "mutation"
    ]
    assert drawn.regime == "it changes numpy's random generator"


def test_a_check_computes_in_one_thread():
    """Two threads that wait for each other on a busy machine took ten times the CPU
    time, and the largest batches were left out as too slow.
    """
    seen = set()

    def loss(log_prob, old_log_prob, advantages, mask):
        seen.add(torch.get_num_threads())
        return dapo(log_prob, old_log_prob, advantages, mask)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert upref.identify(loss) and torch.get_num_threads() == 2 and seen == {1}
    torch.set_num_threads(before)


def test_the_rest_is_set_back_without_a_working_directory(tmp_path, monkeypatch):
    """FileNotFoundError came from within the check, and what comes after the directory
    stayed as the loss set it.
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = random.getstate()

    def removes(log_prob, old_log_prob, advantages, mask):
        """Remove the working directory, and change a random state and an environment
        variable; then answer as DAPO.
        """
        if (tmp_path / "here").exists():
            (tmp_path / "here").rmdir()
            random.seed(1)
            os.environ["OF_A_LOSS"] = "1"
        return dapo(log_prob, old_log_prob, advantages, mask)

    upref.check(removes, "dapo", skip=("extremes", "masked-values"))
    assert random.getstate() == before and "OF_A_LOSS" not in os.environ
    os.chdir(tmp_path)


def test_every_state_is_a_case():
    assert set(CHANGES) | {"torch's default device"} == set(STATE | RANDOM | AROUND)


class Leaves:
    """A loss that ends the program when it is looked at, not when it is called."""

    def __call__(self, log_prob, old_log_prob, advantages, mask):
        return dapo(log_prob, old_log_prob, advantages, mask)

    @property
    def __upref__(self):
        raise SystemExit(0)


class Speechless(Exception):
    def __str__(self):
        raise SystemExit(0)


LEAVING = {
    "os._exit": after(lambda: os._exit(0)),
    "os._exit, caught": lambda log_prob, old_log_prob, advantages, mask: (
        leave_in_a_try()
    ),
    "a property": Leaves(),
    "an exception's words": after(raising(Speechless())),
    "SystemExit": after(raising(SystemExit(0))),
    "GeneratorExit": after(raising(GeneratorExit())),
}


def counting(at, what, back):
    """Return DAPO's loss, which runs `what` at call number `at`, and the list of its
    calls.

    back: run it in the first backward pass from that call on, not in the call.
    """
    calls = []

    def loss(log_prob, old_log_prob, advantages, mask, eps_low=0.2, eps_high=0.28):
        calls.append(0)
        now = what if len(calls) == at or (back and len(calls) > at) else lambda: None
        now = now if back else now() or (lambda: None)
        o, b = (
            upref.get("dapo"),
            upref.Rollouts(Back.apply(log_prob, now), old_log_prob, advantages, mask),
        )
        return o.loss(b, eps_low=eps_low, eps_high=eps_high)

    return loss, calls


ENDS = (lambda: os._exit(0), lambda: sys.exit(0), raising(GeneratorExit()))


PARTS = daily(range(4), 4)  # of the calls of a loss: every fourth by day


def spread(most, first=12, later=12):
    """Return (number, call) of calls of a loss: each of the first ones, and `later` of
    those up to `most`.
    """
    return list(
        enumerate(
            [
                *range(1, first + 1),
                *np.unique(np.linspace(first + 1, most, later).astype(int)).tolist(),
            ]
        )
    )


@pytest.mark.parametrize("part", PARTS)
def test_whichever_call_ends_the_process_there_is_no_verdict(part):
    """From the first call to the last, probes of other inputs, seeds and finite
    differences among them.
    """
    loss, calls = counting(0, None, False)
    assert upref.check(loss, "dapo")
    for n, at in spread(len(calls))[part::4]:
        loss, _ = counting(at, ENDS[n % len(ENDS)], n % 3 == 0)
        with pytest.raises(InputError, match="ends the program"):
            assert_policy_loss(loss, "dapo")
    if part:
        return
    loss, calls = counting(0, None, False)
    assert upref.identify(loss)
    for n, at in enumerate((2, 30, len(calls) // 2, len(calls))):
        with pytest.raises(InputError, match="ends the program"):
            upref.identify(counting(at, ENDS[n % len(ENDS)], n % 2 == 0)[0])


NO_MEMORY = (
    raising(MemoryError()),
    lambda: torch.zeros(2**45),
    lambda: np.zeros(2**45),
)


@pytest.mark.parametrize("part", PARTS)
def test_whichever_call_has_no_memory_there_is_no_verdict(part):
    """No memory is neither another formula nor a refusal of the inputs."""
    loss, calls = counting(0, None, False)
    assert upref.check(loss, "dapo")
    for n, at in spread(len(calls))[part::4]:
        loss, _ = counting(at, NO_MEMORY[n % 3], n % 8 == 0)
        with pytest.raises(
            InputError,
            match=r"asked for more memory than there is \((Memory|Runtime|_ArrayMemory)Error",
        ):
            upref.check(loss, "dapo")
    for n, at in enumerate((1, 3, 40)):
        with pytest.raises(InputError, match="asked for more memory than there is"):
            upref.identify(counting(at, NO_MEMORY[n], False)[0])


def test_no_memory_in_a_function_that_is_no_loss():
    for throw in NO_MEMORY:
        for ask in (
            lambda f: upref.check_kl(lambda log_prob, ref_log_prob: f(), "k3"),
            lambda f: upref.check_advantages(lambda rewards, group: f(), "group_norm"),
            lambda f: upref.check_logprobs(lambda logits, tokens: f()),
        ):
            with pytest.raises(InputError, match="asked for more memory than there is"):
                ask(throw)


@pytest.mark.parametrize("part", PARTS)
def test_an_exception_that_does_not_recur_is_no_verdict(part):
    """It is no refusal of the inputs: whoever took it for one would go on with other
    shapes, or say nothing of it.
    """
    loss, calls = counting(0, None, False)
    assert upref.check(loss, "dapo")
    for _, at in spread(len(calls), later=8)[part::4]:
        loss, _ = counting(at, raising(ValueError("no")), False)
        with pytest.raises(
            InputError,
            match=r"raised ValueError: no \(test_guard.py, line \d+, in throw\) "
            r"\(it was called with log_prob = b?float.*\); on the same inputs loss then answered",
        ):
            upref.check(loss, "dapo")


def test_a_loss_that_begins_to_raise_is_no_verdict():
    """It has used up files, threads or a disk: "NOT dapo" said that it is another
    formula.
    """
    calls = []

    def leaks(log_prob, old_log_prob, advantages, mask):
        calls.append(0)
        if len(calls) > 150:
            raise OSError(errno.EMFILE, "Too many open files")
        return dapo(log_prob, old_log_prob, advantages, mask)

    with pytest.raises(
        InputError, match=r"answered call 1; on the same inputs .* Too many"
    ):
        upref.check(leaks, "dapo")


def test_a_time_limit_holds_for_a_file_that_is_a_pipe(tmp_path):
    """The command waited for a writer before it set the limit."""
    os.mkfifo(tmp_path / "pipe.py")
    words = ["check", f"{tmp_path}/pipe.py:loss", "--as", "dapo", "--timeout", "1"]
    done = subprocess.run(
        [*fork.executable(), "-m", "upref", *words],
        env=os.environ | fork.environment(),
        capture_output=True,
        text=True,
        timeout=HANGING,
    )
    assert done.returncode == 2 and "timed out after 1 s" in done.stderr


def test_a_rank_that_ends_the_process_is_no_verdict():
    def at_rank_1(logits, tokens):
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            os._exit(0)
        return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    with pytest.raises(InputError, match="ends the program"):
        upref.check_logprobs(at_rank_1, ranks=2)


def leave_in_a_try():
    try:
        os._exit(0)
    except Exception:
        raise AssertionError from None


@pytest.mark.parametrize("how", LEAVING)
def test_a_loss_that_ends_the_process_fails_the_test(how):
    for ask in (lambda loss: assert_policy_loss(loss, "dapo"), upref.identify):
        with pytest.raises((InputError, pytest.fail.Exception)):
            ask(LEAVING[how])
    assert os._exit is leave


def test_an_exception_without_words_is_still_a_sentence(capsys, monkeypatch):
    def full(*_):
        raise MemoryError

    def silent(*_):
        raise KeyError

    with pytest.raises(InputError, match=r"f raised KeyError: \(it says no more\)"):
        call_guarded("f", silent)
    with pytest.raises(
        InputError, match=r"f asked for more memory than there is \(MemoryError\)"
    ):
        call_guarded("f", full)
    monkeypatch.setattr(commands, "RUN", {"list": full})
    assert main(["list"]) == 2 and "not enough memory" in capsys.readouterr().err


def test_a_loss_that_closes_stdout_prints():
    report = upref.check(
        after(lambda: (print("x"), sys.stdout.close())), "dapo", skip=("extremes",)
    )
    assert report and "prints" in str(report) and not sys.stdout.closed


def test_ctrl_c_is_the_users():
    # a shell's & and other tests may have it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), state_restored():
        call_guarded("f", lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(1)))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    "bad",
    [
        lambda: upref.get(None), lambda: upref.get(3), lambda: upref.get("up(" * 900 + ")" * 900),
        lambda: upref.up(None),
        lambda: upref.check(dapo, None), lambda: upref.check(dapo, "dapo", skip=None),
        lambda: upref.check(dapo, "dapo", eps_high=10**400), lambda: upref.check(dapo, "dapo", eps_high=1j),
        lambda: upref.capacity("dapo", float("nan"), 0.1), lambda: upref.check_kl(dapo, []),
        lambda: upref.check_advantages(dapo, []), lambda: upref.derive(None), lambda: upref.cap_map("dapo", adv="x"),
        lambda: upref.replay.clipping(None, None), lambda: upref.Rollouts(1, 2, 3, 4),
        lambda: upref.weights.batches.on_policy_batch().split(10**9),
        lambda: upref.weights.batches.on_policy_batch().split(0),
    ],
)  # fmt: skip
def test_bad_inputs_of_the_api_are_one_sentence(bad):
    with pytest.raises(InputError) as e:
        bad()
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


@pytest.mark.parametrize(
    "hp",
    [
        "eps_high=nan",
        "eps_high=inf",
        "eps_high=-inf",
        "eps_high=1e999",
        "=",
        "eps_high",
    ],
)
def test_a_hyperparameter_is_a_finite_number(capsys, hp):
    assert main(["cap", "dapo", "--hp", hp]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_checks_in_threads_leave_the_process_as_it_was(capsys):
    """Losses that print, warn, and change a dtype, in four threads; another thread
    prints in the meantime.
    """

    def k1(log_prob, ref_log_prob):
        print("swallowed")
        warnings.warn("ignored", stacklevel=2)
        torch.set_default_dtype(torch.float64)
        return log_prob - ref_log_prob

    out, filters, dtype = sys.stdout, list(warnings.filters), torch.get_default_dtype()
    with ThreadPoolExecutor(4) as pool:
        reports = [pool.submit(upref.check_kl, k1, "k1") for _ in range(8)]
        while not all(r.done() for r in reports):
            print("heard", end="")
            time.sleep(0.01)
    assert all(r.result() and "prints" in str(r.result()) for r in reports)
    assert (
        sys.stdout is out
        and warnings.filters == filters
        and torch.get_default_dtype() is dtype
    )
    assert set(capsys.readouterr().out.replace("heard", "")) == set()


def test_a_check_in_a_forked_child_does_not_wait():
    """The lock that another thread holds at the fork is free in the child."""
    held, free = threading.Event(), threading.Event()

    def hold():
        with state_restored():
            held.set()
            free.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        call_guarded("f", lambda: 1)
        os._exit(7)
    deadline = time.monotonic() + HANGING
    while (
        not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    free.set()
    thread.join()
    assert os.waitstatus_to_exitcode(ended[1]) == 7


def count_to(n):
    for _ in range(n):
        pass


def test_the_budget_of_a_call_counts_lines_alone():
    lines = 1 + 2 * 8  # `for` once more than `pass`, and the line of the call below
    _, printed = call_guarded("f", lambda: count_to(8), lines + 1)
    assert not printed
    with pytest.raises(InputError, match=f"stopped after {lines} lines"):
        call_guarded("f", lambda: count_to(8), lines)


def test_the_budget_ends_code_that_catches_every_exception():
    """Find that code that suppresses each exception is stopped after 100 lines too."""

    def loops():
        while True:
            with contextlib.suppress(Exception):
                count_to(8)

    def goes_on():
        try:
            count_to(1000)
        except BaseException:
            return 0.0

    for call in (loops, goes_on):
        with pytest.raises(TooManyLines, match="f was stopped after 100 lines"):
            call_guarded("f", call, 100)


def test_a_number_is_not_taken_for_the_nan_that_it_replaces():
    nan = torch.tensor([math.nan, 1.0])
    assert is_same(nan, nan.clone())
    assert not is_same(nan, torch.tensor([12345.0, 1.0]))
    assert not is_same(nan, torch.tensor([math.nan, 2.0]))


def test_an_exception_that_raises_has_no_message():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert one_line(Mute()) == "(its message cannot be read)"
