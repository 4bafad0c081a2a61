# SPDX-License-Identifier: Apache-2.0
"""Oracles of a loss's conduct as a function: what it reads, what it writes, and where its gradient goes."""

from dataclasses import replace

import torch
from torch import Tensor

from upref.check.adapters import ROLES
from upref.check.fit import Case
from upref.check.oracles import fail, note, oracle, role_name
from upref.check.report import Finding
from upref.errors import InputError
from upref.rollouts import Rollouts

CONSTANTS = "harmless while the caller passes tensors without requires_grad; .detach() makes it sure"


@oracle("stop-gradient")
def stop_gradient(case: Case) -> list[Finding]:
    loss, b = case.loss, case.grid(thin=5)
    out = []
    for k in ("logp_old", "adv", "logp_ref"):
        if k not in loss.reads or (k == "logp_ref" and not case.hp.get("beta")):
            continue
        full = loss.inputs(b, b.logp.clone().requires_grad_())
        free = full[k] = full[k].requires_grad_()
        value = loss.run(full, b)
        g = torch.autograd.grad(value, free, allow_unused=True)[0] if value.requires_grad else None
        if g is not None and (g != 0).any():
            out.append(role_name(k))
    if not out:
        return []
    return [note("stop-gradient", f"a gradient would flow into {', '.join(out)}", cause=CONSTANTS)]


@oracle("mutation")
def mutation(case: Case) -> list[Finding]:
    return [
        fail(
            "mutation",
            f"{role_name(k)} is changed in place",
            "inputs left alone",
            "other numbers after the call",
            cause="an in-place operation (x[...] =, mul_, clamp_, nan_to_num_)",
        )
        for k in sorted(case.loss.mutated)
        if k in ROLES
    ]


@oracle("dead-hyperparameter")
def dead_hyperparameter(case: Case) -> list[Finding]:
    loss, o, out = case.loss, case.o, []
    for key in case.hp:
        asked = key in loss.takes or (loss.swallows and key in loss.given)
        if not asked and not loss.swallows:
            continue
        now = case.hp[key]
        other = {"c": 2.0 if now != 2.0 else 3.0, "beta": 0.1 + (now or 0)}.get(key, now * 1.5 if now else 0.1)
        there = replace(case, hp=case.hp | {key: other})
        b = there.grid()
        if "beta" in (key,) and "logp_ref" not in loss.reads:
            continue
        try:
            told, changed = (
                loss.gradient(b, **{key: now}) if now is not None else loss.gradient(b),
                loss.gradient(b, **{key: other}),
            )
        except InputError as e:
            out.append(fail("dead-hyperparameter", f"{key} = {other:g}", "another gradient", str(e)))
            continue
        if torch.equal(told, changed):
            why = "it is swallowed by **kwargs" if key not in loss.takes else "the argument is never read"
            make = fail if asked else note
            out.append(
                make(
                    "dead-hyperparameter",
                    f"{key} from {_num(now)} to {other:g}",
                    "another gradient",
                    "the same gradient, bit for bit",
                    cause=why,
                )
            )
        elif not _explained(there, b, changed):
            out.append(
                fail(
                    "dead-hyperparameter",
                    f"{key} from {_num(now)} to {other:g}",
                    f"the gradient of {o.name} at {key} = {other:g}",
                    "another gradient",
                    cause=f"{key} does not mean what it means in {o.name}",
                )
            )
    return out


def _explained(case: Case, b: Rollouts, g: Tensor) -> bool:
    """Whether the moved gradient is right, or as wrong as before the move (the gradient oracle's business)."""
    here = replace(case, hp=case.o.resolve({k: v for k, v in case.hp.items() if k in case.loss.given}))
    off = case.off(b, g / case.factors(b))
    return bool((off > 10 * case.tol).double().mean() < 0.01) or bool(here.off(b).max() > 10 * case.tol)


def _num(x) -> str:
    return "absent" if x is None else f"{x:g}"
