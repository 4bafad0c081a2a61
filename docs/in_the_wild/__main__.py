# SPDX-License-Identifier: Apache-2.0
"""Judges the losses of losses.toml and writes found.json: `python -m docs.in_the_wild FOLDER [NAME...]`.

FOLDER holds owner+name/ for each repository, at the commit that losses.toml names. For each loss: what upref.check and
upref.identify say, and by hand: autograd on random batches of its own against the formula of by_hand.py, and that
formula against the objective that the loss is compared with.
"""

import inspect
import json
import platform
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import torch

import upref
from docs.in_the_wild import by_hand, estimators, wrappers
from docs.in_the_wild.fetched import Fetched
from upref.errors import InputError
from upref.files import write_atomically

HERE = Path(__file__).parent
BATCHES = 40


# ---- by hand -------------------------------------------------------------------------
def batches():
    """Ragged, two groups, log r from 0 (on policy) to ±3, advantages one a response."""
    rng = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)
    for n in range(BATCHES):
        B, T = 6, 9
        length = torch.randint(1, T + 1, (B, 1), generator=rng)
        length[n % B] = T
        old = -normal(B, T).abs() - 0.1
        apart = (0.0, 0.05, 0.4, 1.5)[n % 4]
        lp = (old + (apart * normal(B, T)).clamp(-3, 3)).clamp(max=-1e-3)
        A, ref = (
            normal(B, 1).expand(B, T).clone(),
            (lp + 0.3 * normal(B, T)).clamp(max=-1e-3),
        )
        yield lp, old, A, torch.arange(T) < length, ref


def slope(f, lp, *more) -> torch.Tensor:
    x = lp.clone().requires_grad_()
    y = f(x, *more)
    return x.grad if x.grad is not None else torch.autograd.grad(y, x)[0]


def apart(one, other) -> float:
    """The largest difference of the gradients of two losses, over the largest gradient of the other."""
    worst = 0.0
    for lp, *more in batches():
        g, h = slope(one, lp, *more), slope(other, lp, *more)
        worst = max(worst, ((g - h).abs().max() / h.abs().max()).item())
    return worst


def raises(loss) -> bool:
    """Whether it stops by itself on one of the batches, with one advantage per response and with one a token."""
    needs = inspect.signature(loss).parameters
    for A_of in (lambda A: A[:, 0], lambda A: A):
        try:
            for lp, old, A, m, ref in batches():
                loss(lp, old, A_of(A), m, *([ref] if "ref_log_prob" in needs else []))
            return False
        except (RuntimeError, ValueError, AssertionError):
            continue
    return True


def called(loss):
    """A loss as upref reads it, on (lp, old, A, m, ref)."""
    read = upref.user_code.read(loss)

    def f(lp, old, A, m, ref):
        b = upref.Rollouts(
            logp=lp.detach(),
            logp_old=old,
            adv=A,
            mask=m,
            group=torch.zeros(len(m), dtype=torch.int64),
            logp_ref=ref,
        )
        return read.run(read.inputs(b, lp), b).value

    return f


def reference(name: str, hp: dict[str, float]):
    """The objective itself."""
    o = upref.get(name)

    def f(lp, old, A, m, ref):
        return o.loss(
            upref.Rollouts(logp=lp, logp_old=old, adv=A, mask=m, logp_ref=ref), **hp
        )

    return f


# ---- one loss ------------------------------------------------------------------------
def judged(name: str, says: dict[str, Any], folder: Path) -> dict[str, Any]:
    wrap, hand = getattr(wrappers, name), getattr(by_hand, says["by_hand"])
    loss = wrap(Fetched(folder / says["repo"].replace("/", "+")))
    start = time.process_time()
    out: dict[str, Any] = {"lines": lines(wrap), "by_hand": inspect.getdoc(hand)}
    hp = {k: v for k, v in says["hp"].items() if v}
    try:
        report = upref.check(loss, says["held"], **hp)
        out["check"] = bool(report)
        out["failures"] = [
            {"oracle": f.oracle, "where": f.regime, "cause": f.cause}
            for f in report.failures
        ]
        out["notes"] = [f.oracle for f in report.notes]
    except InputError as e:
        out["refused"] = str(e)
        out["raises"] = raises(loss)
    try:
        one = upref.identify(loss)
        out["identify"] = str(one).partition("\n")[0].partition(" is ")[2]
        out["kind"] = one.kind
    except InputError:
        out["identify"] = ""
    try:
        out["off_formula"] = apart(called(loss), hand)
        out["off_objective"] = apart(hand, reference(says["held"], hp))
    except (InputError, RuntimeError):
        out["off_formula"] = out["off_objective"] = None
    out["cpu"] = round(time.process_time() - start, 1)
    return out


def lines(wrap) -> int:
    """Of the wrapper and of what it uses of its file, without the first of each and without blank ones."""
    used, todo = {}, [wrap]
    while todo:
        f = todo.pop()
        used[f.__name__] = (
            sum(bool(x.strip()) for x in inspect.getsource(f).splitlines()) - 1
        )
        todo += [
            g
            for name, g in vars(wrappers).items()
            if name in _names(f.__code__) and inspect.isfunction(g) and name not in used
        ]
    return sum(used.values())


def _names(code) -> set[str]:
    return set(code.co_names).union(
        *(_names(c) for c in code.co_consts if inspect.iscode(c))
    )


def machine() -> str:
    return f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"


def write(found: dict, table: dict):
    kept = {
        name: found[name] for name in ["machine", *table, "estimators"] if name in found
    }
    write_atomically(
        HERE / "found.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
    )


def main(folder: str, *names: str):
    table = tomllib.loads((HERE / "losses.toml").read_text(encoding="utf-8"))
    file = HERE / "found.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if "estimators" in names or not names:
        found["estimators"] = estimators.judged(Path(folder))
    for name in [n for n in names if n in table] or ([] if names else table):
        found[name] = judged(name, table[name], Path(folder))
        found |= {"machine": machine()}
        write(found, table)
        print(
            name,
            {k: found[name].get(k) for k in ("check", "refused", "identify")},
            flush=True,
        )
    write(found, table)


if __name__ == "__main__":
    main(*sys.argv[1:])
