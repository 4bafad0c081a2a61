# SPDX-License-Identifier: Apache-2.0
"""Bad and odd inputs at every entry point of the API and of the command.

    python tests/support/fuzz.py [inputs] [seed]

What must hold of each: an answer, or InputError (exit status 2) with one sentence; no other exception, no status 0
without a word on stdout, no hang, and the process as it was. Prints what broke that, and how many of what were tried.
"""

import collections
import contextlib
import functools
import io
import random
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import upref
import upref.curve
import upref.regimes
from upref.cli import main
from upref.errors import InputError
from upref.losses import read
from upref.losses.guard import STATE, _equal

LIMIT = 60  # seconds for one input
JUNK = [
    None, True, 0, 1, -1, 3, 10**9, 10**400, -(10**400), 0.5, 1.5, float("nan"), float("inf"), -0.0, 1j, "", "x",
    "dapo", "up(dapo)", "up(", "up()", "up(up(dapo))", "π", "\0", "a" * 5000, b"x", [], {}, (), [1], {"a": 1}, object(),
    int, Exception, print, len, torch, torch.tensor(1.0), torch.zeros(0), torch.full((2, 3), -1.0),
    torch.ones(2, 3).bool(),
    torch.tensor([1j]), torch.zeros(2, 3, device="meta"), torch.eye(2).to_sparse(), np.zeros(3), np.array(["x"]),
    np.float64(0.2), np.array(None), range(3), iter([]), lambda: None, lambda x: x, lambda *a: a[0].sum(),
    torch.nn.Linear(2, 2), upref.get("dapo"), upref.regimes.anchor(),
]  # fmt: skip
WORDS = [
    "dapo", "gspo", "m2po", "aspo_code", "bandpo_kl", "nothing", "up(sapo)", "verl:vanilla", "verl:", "trl:nothing",
    "trl:grpo,x", ":", "x:y", "no.py:f", ".py:f", "upref:get", "upref.kl:k1", "os:getcwd", "math:exp", "torch:max",
    "mine.py:loss", "mine.py:wrong", "mine.py:missing", "mine.py:two.three", "torch", "π", "\0", "-", "--", "", "--hp",
    "--json", "--as", "--adv", "-o", "--timeout", "--skip", "--hp=eps_low=0.1", "--hp=eps_low=nan", "--hp=c=None",
    "--hp=eps=1e999", "--hp==", "--hp=x=1", "--hp=eps_high=True", "--adv=-1", "--adv=nan", "--adv=x", "-o.", "-o/",
    "-o/no/x.svg", "-ox.xyz", "-o\0.svg", "--timeout=0", "--timeout=-1", "--timeout=nan", "--timeout=x", "--skip=no",
    "--as=dapo", "--as=no", "--as-kl=k1", "--as-kl=no", "--as-advantage=group_norm", "--as-advantage=no", "--ledger",
    "--markdown", "--debug", "-v",
]  # fmt: skip
VERBS = ["check", "identify", "audit", "list", "show", "cap", "weights", "frobnicate", "", "-x"]
NAMES = [
    "log_prob", "old_log_prob", "advantages", "mask", "lp", "old", "A", "x", "y", "batch", "cfg", "eps", "clip_low",
    "ref_log_prob", "group", "entropy", "totals", "padding_mask", "neg_logp", "lengths", "self", "kl_coef", "Â", "_",
    "f",
]  # fmt: skip
ANSWERS = {
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
LOSS = """import torch
def loss(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    return -(torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages) * mask).sum() / mask.sum()
def wrong(log_prob, old_log_prob, advantages, mask): raise ValueError("one\\ntwo")
class two: three = 3
"""


def a_loss(rng: random.Random):
    """A function with a signature and an answer by chance."""
    chosen = rng.sample(NAMES, rng.randint(0, 6))
    if rng.random() < 0.5:
        chosen = [*rng.sample(NAMES[:4], 4), *chosen[:1]]
    chosen, parts = list(dict.fromkeys(chosen)), []
    for i, name in enumerate(chosen):
        parts.append(name + rng.choice(["", "", "", "=None", "=0.2", "=()"]) * (i > 2))
    cut = next((i for i, p in enumerate(parts) if "=" in p), len(parts))
    parts = parts[:cut] + [p if "=" in p else p + "=None" for p in parts[cut:]]
    for mark in ("/", "*", "*a"):
        if parts and rng.random() < 0.1 and not {"*", "*a"} & set(parts):
            parts.insert(rng.randint(1, len(parts)) if mark == "/" else rng.randint(0, len(parts) - 1), mark)
    parts += ["**k"] * (rng.random() < 0.1)
    scope: dict = {"answer": ANSWERS[rng.choice(list(ANSWERS))]}
    with contextlib.suppress(SyntaxError):
        exec(f"def f({', '.join(parts)}): return answer([{', '.join(chosen)}])", scope)
    f = scope.get("f", lambda log_prob, old_log_prob, advantages, mask: log_prob.sum())
    return functools.partial(f) if rng.random() < 0.1 else f


def tries(rng: random.Random):
    """(what it is called, a function to call)."""
    some = lambda: rng.choice(JUNK)
    hp = lambda: {
        rng.choice(["eps_low", "eps_high", "c", "beta", "x", "eps"]): some() for _ in range(rng.randint(0, 2))
    }
    number = lambda: rng.choice([0.1, 0.5, 1.0, -1.0, some()])
    name = lambda: rng.choice(["dapo", "gspo", "grpo", some()])
    fields = ("logp", "logp_old", "adv", "mask", "group", "logp_ref", "entropy", "totals")
    b = upref.regimes.anchor()
    good = {k: getattr(b, k) for k in fields}
    mixed = lambda: upref.Rollouts(**good | {k: some() for k in rng.sample(fields, rng.randint(1, 3))})
    argv = lambda: [rng.choice(VERBS), *rng.choices(WORDS, k=rng.randint(0, 4))]
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
        "command": lambda: command(argv()),
        "command, mostly right": lambda: command([rng.choice(["show", "cap", "weights"]), *rng.choices(WORDS, k=2)]),
    }
    kind = rng.choice(list(calls))
    return kind, calls[kind]


def command(argv: list[str]):
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(argv)
    except SystemExit as e:
        status = e.code
    said = err.getvalue()
    if status not in (0, 1, 2) or (status == 2 and said.count("\n") != 1 and "--debug" not in argv):
        raise AssertionError(f"{argv}: status {status}, {said[-300:]!r}")
    if status != 2 and not out.getvalue():
        raise AssertionError(f"{argv}: status {status} without a report")


def broken(kind: str, call) -> str:
    """What does not hold of this input, "" if all does."""
    before = {name: get() for name, (get, _) in STATE.items()}
    stdout = sys.stdout
    signal.alarm(LIMIT)
    what = ""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            call()
    except InputError as e:
        what = "" if "\n" not in str(e) and len(str(e)) < 1000 else f"not one sentence: {str(e)[:200]!r}"
    except BaseException as e:
        where = e.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where else ""
        what = f"{type(e).__name__}: {' '.join(str(e).split())[:200]} ({at})"
    finally:
        signal.alarm(0)
    left = [name for name, (get, put) in STATE.items() if not _equal(before[name], get())]
    for name in left:
        STATE[name][1](before[name])
    if sys.stdout is not stdout:
        sys.stdout = stdout
        left.append("stdout")
    return what or (f"left behind: {', '.join(left)}" if left else "")


def fuzz(inputs: int, seed: int) -> tuple[collections.Counter, dict[str, list[str]]]:
    """(how many of each kind, what broke -> the inputs, as `kind @ number`)."""

    def late(number, frame):
        raise TimeoutError(f"no end within {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    counts: collections.Counter = collections.Counter()
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("mine.py").write_text(LOSS)
        for i in range(inputs):
            kind, call = tries(random.Random(f"{seed} {i}"))
            counts[kind] += 1
            if what := broken(kind, call):
                found.setdefault(f"{kind}: {what}", []).append(f"{seed} {i}")
    signal.signal(signal.SIGALRM, before)
    return counts, found


if __name__ == "__main__":
    inputs, seed = (int(x) for x in (*sys.argv[1:], "2000", "0")[:2]) if len(sys.argv) != 2 else (int(sys.argv[1]), 0)
    counts, found = fuzz(inputs, seed)
    for what, where in sorted(found.items()):
        print(f"{len(where):4} {what}   [{where[0]}]")
    print(f"{sum(counts.values())} inputs, seed {seed}: {sum(map(len, found.values()))} broke a rule")
    print(", ".join(f"{k} {n}" for k, n in sorted(counts.items())))
    sys.exit(bool(found))
