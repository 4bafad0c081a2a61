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

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    for n in range(BATCHES):
        B, T = 6, 9
        length = torch.randint(1, T + 1, (B, 1), generator=rng)
        length[n % B] = T
        old = -normal(B, T).abs() - 0.1
        spread = (0.0, 0.05, 0.4, 1.5)[n % 4]
        lp = (old + (spread * normal(B, T)).clamp(-3, 3)).clamp(max=-1e-3)
        A = normal(B, 1).expand(B, T).clone()
        ref = (lp + 0.3 * normal(B, T)).clamp(max=-1e-3)
        yield lp, old, A, torch.arange(T) < length, ref


def slope(loss, lp, *more) -> torch.Tensor:
    """The gradient of a loss; of one that runs the backward pass itself, too."""
    x = lp.clone().requires_grad_()
    y = loss(x, *more)
    return x.grad if x.grad is not None else torch.autograd.grad(y, x)[0]


def apart(loss, other) -> float:
    """The largest difference of the gradients of two losses, over the largest gradient of the other."""
    worst = 0.0
    for lp, *more in batches():
        g, h = slope(loss, lp, *more), slope(other, lp, *more)
        worst = max(worst, ((g - h).abs().max() / h.abs().max()).item())
    return worst


def raises(loss) -> bool:
    """Whether it stops by itself on one of the batches, with one advantage per response and with one a token."""
    needs_ref = "ref_log_prob" in inspect.signature(loss).parameters
    for one_per_response in (True, False):
        try:
            for lp, old, A, m, ref in batches():
                inputs = [lp, old, A[:, 0] if one_per_response else A, m]
                loss(*inputs, ref) if needs_ref else loss(*inputs)
            return False
        except (RuntimeError, ValueError, AssertionError):
            continue
    return True


def called(loss):
    """A loss as upref reads it, on (lp, old, A, m, ref)."""
    read = upref.user_code.read(loss)

    def value(lp, old, A, m, ref):
        b = upref.Rollouts(
            logp=lp.detach(),
            logp_old=old,
            adv=A,
            mask=m,
            group=torch.zeros(len(m), dtype=torch.int64),
            logp_ref=ref,
        )
        return read.run(read.inputs(b, lp), b).value

    return value


def reference(name: str, hp: dict[str, float]):
    """The objective itself, on (lp, old, A, m, ref)."""
    o = upref.get(name)

    def loss(lp, old, A, m, ref):
        b = upref.Rollouts(logp=lp, logp_old=old, adv=A, mask=m, logp_ref=ref)
        return o.loss(b, **hp)

    return loss


# ---- one loss ------------------------------------------------------------------------
def judged(name: str, listed: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What check, identify and the formula by hand say of a loss.

    Args:
        name: of its wrapper.
        listed: its table in losses.toml.
        folder: where the repositories are.
    """
    wrap, hand = getattr(wrappers, name), getattr(by_hand, listed["by_hand"])
    loss = wrap(Fetched(folder / listed["repo"].replace("/", "+")))
    start = time.process_time()
    out: dict[str, Any] = {"by_hand": inspect.getdoc(hand)}
    hp = {k: v for k, v in listed["hp"].items() if v}
    try:
        report = upref.check(loss, listed["held"], **hp)
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
        answer = upref.identify(loss)
        out["identify"] = str(answer).partition("\n")[0].partition(" is ")[2]
        out["kind"] = answer.kind
    except InputError:
        out["identify"] = ""
    try:
        out["off_formula"] = apart(called(loss), hand)
        out["off_objective"] = apart(hand, reference(listed["held"], hp))
    except (InputError, RuntimeError):
        out["off_formula"] = out["off_objective"] = None
    out["cpu"] = round(time.process_time() - start, 1)
    return out


def machine() -> str:
    return f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"


def write(results: dict, table: dict):
    """Write the results in the order of losses.toml, without losses that it no longer has."""
    ordered = {
        name: results[name]
        for name in ["machine", *table, "estimators"]
        if name in results
    }
    write_atomically(
        HERE / "found.json", json.dumps(ordered, indent=1, ensure_ascii=False) + "\n"
    )


def main(folder: str, *names: str):
    """Judge the losses that are named, or all, and the estimators; write each result."""
    table = tomllib.loads((HERE / "losses.toml").read_text(encoding="utf-8"))
    file = HERE / "found.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if "estimators" in names or not names:
        results["estimators"] = estimators.judged(Path(folder))
    losses = [name for name in names if name in table] if names else table
    for name in losses:
        result = judged(name, table[name], Path(folder))
        results |= {name: result, "machine": machine()}
        write(results, table)
        shown = {key: result.get(key) for key in ("check", "refused", "identify")}
        print(name, shown, flush=True)
    write(results, table)


if __name__ == "__main__":
    main(*sys.argv[1:])
