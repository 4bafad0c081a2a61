# SPDX-License-Identifier: Apache-2.0
"""Odd inputs for fuzz.py: values, signatures, answers, tables, ledgers, and losses and
solutions of exercises that turn bad when asked for something particular."""

import contextlib
import functools
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import upref
import upref.weights.batches

JUNK = [
    None, True, 0, 1, -1, 3, 10**9, 10**400, -(10**400), 0.5, 1.5, float("nan"), float("inf"), -0.0, 1j, "", "x",
    "dapo", "up(dapo)", "up(", "up()", "up(up(dapo))", "π", "\0", "a" * 5000, b"x", [], {}, (), [1], {"a": 1}, object(),
    int, Exception, print, len, torch, torch.tensor(1.0), torch.zeros(0), torch.full((2, 3), -1.0),
    torch.ones(2, 3).bool(),
    torch.tensor([1j]), torch.zeros(2, 3, device="meta"), torch.eye(2).to_sparse(), np.zeros(3), np.array(["x"]),
    np.float64(0.2), np.array(None), range(3), iter([]), lambda: None, lambda x: x, lambda *a: a[0].sum(),
    torch.nn.Linear(2, 2), upref.get("dapo"), upref.weights.batches.on_policy_batch(),
]  # fmt: skip
NAMES = [
    "log_prob", "old_log_prob", "advantages", "mask", "lp", "old", "A", "x", "y", "batch", "cfg", "eps", "clip_low",
    "ref_log_prob", "group", "entropy", "totals", "padding_mask", "neg_logp", "lengths", "self", "kl_coef", "Â", "_",
    "f",
]  # fmt: skip
CELLS = [
    "12.34",
    "0",
    "100",
    "",
    "-",
    "x",
    "nan",
    "1e5",
    "101",
    "-3",
    "50 ± 2",
    "**7.5**",
    "33.333333333",
    "π",
    '"',
    "1",
]


def _forever(*_):
    """Sleep without end; whatever it is given."""
    while True:
        time.sleep(0.01)


# ---- functions with a signature and an answer by chance ------------------------------
ANSWERS: dict[str, Callable] = {
    "sum": lambda a: sum(x.sum() for x in a if isinstance(x, torch.Tensor) and x.is_floating_point()),
    "first": lambda a: a[0] if a else None,
    "tuple": lambda a: (a[0].sum(), a[0].sum()) if a and isinstance(a[0], torch.Tensor) else a,
    "nothing": lambda a: None, "complex": lambda a: torch.tensor(1j, requires_grad=True),
    "nan": lambda a: sum(x.sum() for x in a if isinstance(x, torch.Tensor)) * float("nan"),
    "zero": lambda a: 0, "divides": lambda a: 1 / 0, "exits": lambda a: sys.exit(0),
    "dtype": lambda a: torch.set_default_dtype(torch.float64), "no_grad": lambda a: torch.set_grad_enabled(False),
    "stops": lambda a: next(iter([])), "recurses": lambda a: ANSWERS["recurses"](a),
    "closes": lambda a: sys.stdout.close(),
    "meta": lambda a: torch.zeros((), device="meta"), "dict": lambda a: {"loss": a[0].sum()} if a else {},
}  # fmt: skip


def a_loss(rng: random.Random) -> Callable:
    """Return a function whose parameters and answer are drawn at random: up to six
    names of NAMES with defaults and marks, and one of ANSWERS of all of them.

    Half of the time it has the four arguments of a loss. If the drawn signature is no
    Python, it is a plain sum of log_prob. One in ten is a functools.partial.
    """
    chosen = rng.sample(NAMES, rng.randint(0, 6))
    if rng.random() < 0.5:
        chosen = [*rng.sample(NAMES[:4], 4), *chosen[:1]]
    chosen = list(dict.fromkeys(chosen))
    parts, had_default = [], False
    for i, name in enumerate(chosen):
        default = rng.choice(["", "", "", "=None", "=0.2", "=()"])
        if i <= 2:
            default = ""  # the first three have none
        elif had_default and not default:
            default = "=None"  # after a default, Python needs one
        had_default = had_default or default != ""
        parts.append(name + default)
    for mark in ("/", "*", "*a"):
        if parts and rng.random() < 0.1 and not {"*", "*a"} & set(parts):
            # "/" has a parameter before it, a star one behind it
            if mark == "/":
                place = rng.randint(1, len(parts))
            else:
                place = rng.randint(0, len(parts) - 1)
            parts.insert(place, mark)
    if rng.random() < 0.1:
        parts.append("**k")
    scope: dict = {"answer": ANSWERS[rng.choice(list(ANSWERS))]}
    with contextlib.suppress(SyntaxError):
        exec(f"def f({', '.join(parts)}): return answer([{', '.join(chosen)}])", scope)
    f = scope.get("f", lambda log_prob, old_log_prob, advantages, mask: log_prob.sum())
    return functools.partial(f) if rng.random() < 0.1 else f


# ---- losses that run, and turn bad when asked for something particular ---------------
def _clip(r, A):
    return torch.minimum(r * A, r.clamp(0.8, 1.28) * A)


SURROGATES: dict[str, Callable] = {  # of lp, log r, A
    "clip": lambda lp, x, A: _clip(x.exp(), A), "plain": lambda lp, x, A: x.exp() * A, "log": lambda lp, x, A: lp * A,
    "cubed": lambda lp, x, A: x**3 * A, "rounded": lambda lp, x, A: (x.exp() * 4).round() * A * lp,
    "root": lambda lp, x, A: x.abs().sqrt() * A, "sine": lambda lp, x, A: (9 * x).sin() * A,
    "gate": lambda lp, x, A: torch.sigmoid(x) * A, "float32": lambda lp, x, A: _clip(x.float().exp(), A.float()),
    "half": lambda lp, x, A: _clip(x.half().exp(), A.half()), "normed": lambda lp, x, A: _clip(x.exp(), A / A.std()),
    "steps": lambda lp, x, A: sum((x > k / 9).detach() * lp * A for k in range(-9, 9)),
    "huge": lambda lp, x, A: 1e200 * x * A,
    "tiny": lambda lp, x, A: 1e-200 * x * A, "noise": lambda lp, x, A: lp * A * torch.rand_like(lp),
    "past": lambda lp, x, A: lp.cumsum(1) * A, "power": lambda lp, x, A: x.exp() ** 40 * A,
}  # fmt: skip
SUMS: dict[str, Callable] = {
    "mean": lambda J, m: (J * m).sum() / m.sum(), "rows": lambda J, m: ((J * m).sum(1) / m.sum(1)).mean(),
    "sum": lambda J, m: (J * m).sum(), "tokens": lambda J, m: J * m, "responses": lambda J, m: (J * m).sum(1),
    "padded": lambda J, m: J.mean(), "first": lambda J, m: J[:, 0].mean(), "largest": lambda J, m: J.max(),
    "selected": lambda J, m: J[m].mean(), "list": lambda J, m: [(J * m).sum() / m.sum()],
    "dict": lambda J, m: {"loss": (J * m).sum() / m.sum(), "x": 1},
}  # fmt: skip
WHEN: dict[str, Callable] = {  # of the inputs and the number of the call
    "always": lambda lp, old, A, m, n: True, "never": lambda lp, old, A, m, n: False,
    "the second call": lambda lp, old, A, m, n: n == 2, "from the ninth call": lambda lp, old, A, m, n: n >= 9,
    "every seventh": lambda lp, old, A, m, n: n % 7 == 0, "many rows": lambda lp, old, A, m, n: len(lp) > 100,
    "one row": lambda lp, old, A, m, n: len(lp) == 1, "one token": lambda lp, old, A, m, n: lp.shape[1] == 1,
    "long": lambda lp, old, A, m, n: lp.shape[1] > 60, "A is 0": lambda lp, old, A, m, n: not A.any(),
    "A is large": lambda lp, old, A, m, n: A.abs().max() > 5, "NaN": lambda lp, old, A, m, n: bool(lp.isnan().any()),
    "far": lambda lp, old, A, m, n: bool(((lp - old).abs() > 9).any()),
    "float32": lambda lp, old, A, m, n: lp.dtype == torch.float32,
    "an empty row": lambda lp, old, A, m, n: bool((~m.bool()).all(1).any()),
    "certain": lambda lp, old, A, m, n: bool((old.where(m.bool(), -1) == 0).any()),
}  # fmt: skip


def _raises(e: BaseException):
    def throw(*_):
        raise e

    return throw


def _written(lp, old, A, m):
    old.mul_(1.01)


# how many calls of a loss still may: each copies the whole process
FORKS: list[bool] = []


def _forks(*_):
    if FORKS and FORKS.pop():
        os.fork()


def _warned(*_):
    warnings.warn("w" * 300, stacklevel=1)


# of the inputs; the answer in place of the loss, None for none
THEN: dict[str, Callable] = {
    "raises": _raises(ValueError("one\ntwo")), "raises much": _raises(RuntimeError("long " * 40_000)),
    "raises lines": _raises(KeyError("\n" * 9999)), "exits": lambda *_: sys.exit(0), "stops": _raises(StopIteration()),
    "interrupts": _raises(KeyboardInterrupt()), "memory": _raises(MemoryError()), "deep": _raises(RecursionError()),
    "asserts": _raises(AssertionError()), "nan": lambda lp, *_: lp.sum() * float("nan"),
    "inf": lambda lp, *_: lp.sum() * float("inf"), "other shape": lambda lp, *_: lp.new_zeros(3, requires_grad=True),
    "no gradient": lambda lp, *_: lp.detach().sum(), "zero": lambda lp, *_: 0 * lp.sum(),
    "half": lambda lp, *_: lp.half().sum(),
    "complex": lambda lp, *_: lp.sum() * 1j, "a float": lambda lp, *_: lp.sum().item(), "empty": lambda lp, *_: lp[:0],
    "integer": lambda lp, *_: torch.tensor(3), "prints": lambda *_: print("x" * 10**5),
    "closes": lambda *_: sys.stdout.close(),
    "dtype": lambda *_: torch.set_default_dtype(torch.float64), "no_grad": lambda *_: torch.set_grad_enabled(False),
    "seeds": lambda *_: torch.manual_seed(0) and None, "seeds numpy": lambda *_: np.random.seed(0), "writes": _written,
    "threads": lambda *_: torch.set_num_threads(1), "moves": lambda *_: os.chdir("/"), "warns": _warned,
    "backward": lambda lp, *_: lp.sum().backward(), "numpy": lambda *_: np.seterr(all="raise") and None,
    "forks": _forks, "environment": lambda *_: os.environ.update(UPREF_FUZZ="1"),
}  # fmt: skip
ENDS: dict[str, Callable] = {  # what only a parent process can see
    "leaves": lambda *_: os._exit(0), "aborts": lambda *_: os.abort(), "loops": _forever,
    "killed": lambda *_: os.kill(os.getpid(), 9),
}  # fmt: skip


def moody(rng: random.Random, ends: bool = True) -> Callable:
    """Return a loss that computes something, and that answers in a bad way on the
    inputs or calls that WHEN selects.

    The bad way is one of THEN. With `ends`, one in five losses may have one of ENDS
    too, which end the process or hang.
    """
    J = rng.choice(list(SURROGATES.values()))
    total = rng.choice(list(SUMS.values()))
    when = rng.choice(list(WHEN.values()))
    bad_ways = THEN
    if ends and rng.random() < 0.2:
        bad_ways = THEN | ENDS
    then = rng.choice(list(bad_ways.values()))
    calls = [0]
    FORKS[:] = [True] * 5

    def loss(log_prob, old_log_prob, advantages, mask) -> Any:
        """Return a random total of a random surrogate (minus it, if it is a tensor), or
        the bad answer where it is due. An answer of None stands for the ordinary one.
        """
        calls[0] += 1
        given = log_prob, old_log_prob, advantages, mask
        if when(*given, calls[0]) and (got := then(*given)) is not None:
            return got
        m = mask.bool()
        lp, old, A = (
            torch.where(m, x, 0) if x.shape == m.shape else x for x in given[:3]
        )
        got = total(J(lp, lp - old, A), m)
        return (
            -got
            if isinstance(got, torch.Tensor)
            else {**got}
            if isinstance(got, dict)
            else got
        )

    return loss


def a_ledger(rng: random.Random, text: str) -> str:
    """Return up to 40 lines of the ledger from a random place on, with up to three
    lines dropped, doubled, cut in half or replaced by junk.
    """
    lines = text.splitlines()
    start = rng.randrange(max(1, len(lines) - 40))
    lines = lines[start : start + 40]
    for _ in range(rng.randint(0, 3)):
        i = rng.randrange(len(lines))
        what = rng.choice(["drop", "twice", "cut", "junk"])
        junk = rng.choice(
            ['x = "', "[", "[[deviation]]", 'status = "no"', "evidence = 3"]
        )
        half = lines[i][: len(lines[i]) // 2]
        lines[i : i + 1] = {
            "drop": [],
            "twice": [lines[i]] * 2,
            "cut": [half],
            "junk": [junk],
        }[what]
        lines = lines or [""]
    return "\n".join(lines)


# ---- what a student writes -----------------------------------------------------------
TURNED: dict[str, Callable] = {  # of the answer of a solution
    "as it is": lambda x: x, "twice": lambda x: 2 * x, "negated": lambda x: -x, "detached": lambda x: x.detach(),
    "a number": lambda x: float(x.sum()), "nothing": lambda x: None, "text": lambda x: "x" * 9999,
    "a list": lambda x: [x],
    "longer": lambda x: torch.stack([x, x]), "complex": lambda x: x * 1j, "NaN": lambda x: x * float("nan"),
    "infinite": lambda x: x * float("inf"), "rounded": lambda x: round(float(x), 1), "half": lambda x: x.half(),
    "numpy": lambda x: np.asarray(x), "a bool": lambda x: bool(x.any()), "meta": lambda x: x.to("meta"),
    "huge": lambda x: 10**400, "junk": lambda x: object(), "itself": lambda x: (lambda y: y.append(y) or y)([]),
}  # fmt: skip


def student(number: int, rng: random.Random, ends: bool = True) -> Callable:
    """Return a solution of that exercise: right or with a known mistake, with its
    answer turned in one of the ways of TURNED, and bad at one call of the first thirty.

    With `ends`, three in ten may end the process or hang there.
    """
    from upref_course.grader import exercise

    e = exercise(number)
    base, turn = (
        rng.choice([e.right, *(s.fn for s in e.slips)]),
        rng.choice(list(TURNED.values())),
    )
    then, bad = (
        rng.choice(
            list((THEN | ENDS if ends and rng.random() < 0.3 else THEN).values())
        ),
        rng.randint(1, 30),
    )
    calls = [0]
    FORKS[:] = [True] * 5

    def solution(*given):
        calls[0] += 1
        if calls[0] == bad and (got := then(*(given * 4)[:4])) is not None:
            return got
        return turn(base(*given))

    return solution
