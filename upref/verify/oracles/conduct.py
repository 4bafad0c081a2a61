# SPDX-License-Identifier: Apache-2.0
"""Oracles of a loss's conduct as a function: what it reads, what it writes, and where its gradient goes."""

from dataclasses import replace

import torch
from torch import Tensor

from upref.errors import InputError
from upref.losses.names import CALLED
from upref.ops import replayed_sg
from upref.regimes import OFF_EDGES
from upref.rollouts import Rollouts
from upref.verify.factors import even
from upref.verify.measure import Case
from upref.verify.oracle import oracle
from upref.verify.report import Finding, fail, note

CONSTANTS = "harmless while the caller passes tensors without requires_grad; .detach() makes it sure"


@oracle("stop-gradient", 80)
def stop_gradient(case: Case) -> list[Finding]:
    loss, b = case.loss, case.grid(thin=5)
    out = []
    for k in ("logp_old", "adv", "logp_ref"):
        if k not in loss.reads or (k == "logp_ref" and not case.hp.get("beta")):
            continue
        full = loss.inputs(b, b.logp.clone().requires_grad_())
        free = full[k] = full[k].requires_grad_()
        done = loss.run(full, b)
        g = torch.autograd.grad(done.value, free, allow_unused=True)[0] if done.attached else None
        if g is not None and (g != 0).any():
            out.append(CALLED[k])
    if "entropy" in loss.reads:
        full = loss.inputs(b, b.logp.clone().requires_grad_())
        full["entropy"] = full["entropy"].requires_grad_()
        done = loss.run(full, b)
        g = torch.autograd.grad(done.value, full["entropy"], allow_unused=True)[0] if done.attached else None
        if g is not None and (g != 0).any():
            bonus = even(-(g / case.factors(b))[b.mask])
            why = f"a bonus of {bonus:.4g} times the entropy of each token" if bonus is not None else ""
            return [fail("stop-gradient", "the entropy, which depends on the policy", "no gradient into it",
                         f"a gradient of up to {g.abs().max().item():.3g}", cause=why)]  # fmt: skip
    notes = [note("stop-gradient", f"a gradient would flow into {', '.join(out)}", cause=CONSTANTS)] if out else []
    return _declared(case) + notes


def _declared(case: Case) -> list[Finding]:
    """The surrogate against finite differences, every sg(x) held at its value: for losses in the words of upref.ops."""
    b = case.grid(thin=3, edges=OFF_EDGES)  # on a bound, a finite difference means nothing
    values: list[Tensor] = []
    with replayed_sg(values):
        case.loss(b)
    if not values or case.single or case.o.coupled:
        return []
    g, rng = -case.gradient(b), torch.Generator().manual_seed(0)
    for _ in range(4):
        step = torch.where(b.mask, torch.randn(g.shape, generator=rng, dtype=g.dtype), 0) * 1e-6
        ends = []
        for sign in (1, -1):
            with replayed_sg(values):
                ends.append(case.loss(replace(b, logp=b.logp + sign * step)))
        there, here = (ends[0] - ends[1]).item() / 2e-6, (g * step).sum().item() / 1e-6
        if not abs(there - here) <= 1e-5 * (g * step).abs().sum().item() / 1e-6 + 1e-9:
            why = (
                "its gradient is not that of its value: a .detach() not declared with sg, or a backward pass of its own"
            )
            regime = "finite differences in a random direction, every sg(x) held at its value"
            return [fail("stop-gradient", regime, f"derivative {there:.6g}", f"autograd {here:.6g}", cause=why)]
    return []


@oracle("mutation", 160)
def mutation(case: Case) -> list[Finding]:
    """What all calls so far have changed or printed."""
    why = "it writes into the tensor that it was given"
    changed = sorted({CALLED[k] for done in case.done for k in done.wrote if k in CALLED})
    says = "inputs left alone", "other numbers after the call"
    out = [fail("mutation", f"{name} is changed in place", *says, cause=why) for name in changed]
    printed = any(done.printed for done in case.done)
    return [*out, *([note("mutation", "the loss prints while it computes")] if printed else [])]


@oracle("dead-hyperparameter", 100)
def dead_hyperparameter(case: Case) -> list[Finding]:
    return [f for key in case.hp for f in _moved(case, key)]


def _moved(case: Case, key: str) -> list[Finding]:
    """One hyperparameter is handed over, moved."""
    loss, o, now = case.loss, case.o, case.hp[key]
    asked = key in loss.takes or (loss.swallows and key in loss.given)
    if not (asked or loss.swallows) or (key == "beta" and "logp_ref" not in loss.reads):
        return []
    other = {"c": 2.0 if now != 2.0 else 3.0, "beta": 0.1 + (now or 0)}.get(key, now * 1.5 if now else 0.1)
    there = replace(case, hp=case.hp | {key: other})
    b = there.grid()
    text = f"{key} from {_num(now)} to {other:g}"
    try:
        told = case.gradient(b, 1, **({key: now} if now is not None else {}))
        changed = case.gradient(b, 1, **{key: other})
    except InputError as e:
        return [fail("dead-hyperparameter", f"{key} = {other:g}", "another gradient", str(e))]
    if torch.equal(told, changed):
        why = "it goes into **kwargs and has no effect" if key not in loss.takes else "the argument has no effect"
        make = fail if asked else note
        return [make("dead-hyperparameter", text, "another gradient", "the same gradient, bit for bit", cause=why)]
    if _explained(there, b, changed):
        return []
    want = f"the gradient of {o.name} at {key} = {other:g}"
    why = f"{key} has another effect than in {o.name}"
    return [fail("dead-hyperparameter", text, want, "another gradient", cause=why)]


def _explained(case: Case, b: Rollouts, g: Tensor) -> bool:
    """Whether the moved gradient is right, or as wrong as before the move (the gradient oracle's business)."""
    here = replace(case, hp=case.o.resolve({k: v for k, v in case.hp.items() if k in case.loss.given}))
    off = case.off(b, g / case.factors(b))
    return bool((off > 10 * case.tol).double().mean() < 0.01) or bool(here.off(b).max() > 10 * case.tol)


def _num(x: float | None) -> str:
    return "absent" if x is None else f"{x:g}"
