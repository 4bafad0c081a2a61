# SPDX-License-Identifier: Apache-2.0
"""The oracles: each looks at a Case from one side and answers with Findings."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from upref.check.adapters import ROLES
from upref.check.fit import Case, anchor, promised
from upref.check.report import Finding
from upref.check.shrink import as_python, shrink
from upref.errors import InputError
from upref.rollouts import Rollouts

ORACLES: dict[str, Callable[[Case], list[Finding]]] = {}
BIT = 1e-12
FIELDS = ("logp", "logp_old", "adv", "mask", "group", "logp_ref", "entropy")


def oracle(name: str):
    def wrap(f):
        ORACLES[name] = f
        return f

    return wrap


def fail(oracle: str, regime: str, expected: Any, found: Any, batch: str = "", cause: str = "") -> Finding:
    return Finding(oracle, "failure", regime, _say(expected), _say(found), batch, cause)


def note(oracle: str, regime: str, expected: Any = "", found: Any = "", cause: str = "") -> Finding:
    return Finding(oracle, "note", regime, _say(expected), _say(found), "", cause)


def _say(x: Any) -> str:
    return x if isinstance(x, str) else f"weight {x + 0.0:.6g}"


def example(case: Case, b: Rollouts, bad: Callable[[Rollouts], bool], at: tuple[int, int] | None = None) -> str:
    """The smallest batch on which `bad` holds, with the promised and the found gradient."""
    b = shrink(b, bad, at)
    try:
        expected = case.expected(b) * case.factors(b, promised(case.o))
        return as_python(b, expected, case.loss.gradient(b))
    except InputError:
        return as_python(b)


def worst(off: Tensor) -> tuple[int, int]:
    return divmod(int(off.argmax()), off.shape[1])


def wrong(case: Case, tol: float = 0.0) -> Callable[[Rollouts], bool]:
    """Whether some token of a batch has another weight than expected."""
    return lambda b: bool(case.off(b).max() > max(10 * case.tol, tol))


def moved(x: Tensor, y: Tensor, mask: Tensor, tol: float) -> Tensor:
    """Relative difference on unmasked slots; infinite where one is not finite and the other is."""
    off = ((x - y).abs() / y.abs().amax().clamp(min=1e-30)).nan_to_num(nan=math.inf)
    return torch.where(mask & (off > tol), off, 0)


# ---- the batch in other clothes: what must not change the gradient -----------------------------------------------------
def regroup(b: Rollouts, f: Callable[[str, Tensor], Tensor]) -> Rollouts:
    return replace(b, totals=None, **{k: f(k, v) for k in FIELDS if (v := getattr(b, k)) is not None})


@oracle("padding")
def padding(case: Case) -> list[Finding]:
    b = replace(case.grid(thin=3), totals=None)
    value, g = case.loss.both(b)
    slack = max(BIT, case.tol if case.tol > 1e-4 else 0)
    out = []
    leak = torch.where(b.mask, 0, g.abs().nan_to_num(nan=math.inf))
    if leak.max() > 0:
        bad = lambda x: bool((case.loss.gradient(x)[~x.mask] != 0).any())
        out.append(fail("padding", "masked slots that hold ordinary numbers", "weight 0", "a gradient flows into them",
                        example(case, b, bad), "the mask is ignored"))  # fmt: skip
    for left, right in ((0, 3), (2, 0)):
        wide = regroup(b, lambda k, v, n=(left, right): v if k == "group" else  # type: ignore[misc]
                       torch.nn.functional.pad(v, n, value=-0.7 if v.is_floating_point() else 0))  # fmt: skip
        wider, g2 = case.loss.both(wide)
        side = f"{left} columns of padding on the left" if left else f"{right} columns of padding on the right"
        off = moved(g2[:, left : left + g.shape[1]], g, b.mask, slack)
        if off.max() > 0:
            i, t = worst(off)
            before, after = g[i, t].item(), g2[i, t + left].item()
            out.append(fail("padding", f"with {side}", f"dJ/dlp {before:.6g}, as without", f"{after:.6g}", as_python(
                shrink(b, lambda x: True, (i, t))), "a mean or a bound reads the padded width"))  # fmt: skip
        elif (wider - value).abs() > 1e-6 * value.abs().clamp(min=1e-3):
            out.append(note("padding", f"the value moves with {side}, the gradient does not", f"{value:.6g}", f"{wider:.6g}"))
    return out + _empty_row(case, b, g, slack)


def _empty_row(case: Case, b: Rollouts, g: Tensor, slack: float) -> list[Finding]:
    """A fully masked row, as frameworks pad batches with, counts nothing in a mean over tokens."""
    if "token-mean" not in (case.o.agg, case.o.agg.removeprefix("group-")) or case.loss.unreduced:
        return []
    more = object.__new__(Rollouts)  # Rollouts itself refuses such a row
    rows = {k: torch.cat([v, v[:1]]) for k in FIELDS if (v := getattr(b, k)) is not None}
    rows["mask"][-1] = False
    more.__dict__.update({k: rows.get(k) for k in FIELDS} | {"totals": None})
    try:
        g2 = case.loss.gradient(more)
    except InputError:
        return []
    off = moved(g2[:-1], g, b.mask, slack)
    if off.max() == 0 and (g2[-1] == 0).all():
        return []
    i, t = worst(off)
    return [fail("padding", "with a row that is masked throughout", f"dJ/dlp {g[i, t].item():.6g}, as without",
                 f"{g2[i, t].item():.6g}", cause="the row is counted in a denominator")]  # fmt: skip


@oracle("poison")
def poison(case: Case) -> list[Finding]:
    b = case.grid(thin=5)
    value, g = case.loss.both(b)
    reads = [k for k in ("logp", "logp_old", "adv", "logp_ref", "entropy") if k in case.loss.reads]
    for k in reads:
        for p in (math.nan, math.inf, -math.inf, 1e30):
            x = getattr(b, k)
            if x is None or (k == "adv" and case.loss.adv_shape != "BT"):
                continue
            bad = lambda c, k=k, p=p: replace(c, **{k: getattr(c, k).masked_fill(~c.mask, p)})
            try:
                v2, g2 = case.loss.both(bad(b))
            except InputError as e:
                return [fail("poison", f"masked slots of {_role(k)} hold {p}", "no effect", str(e))]
            changes = {
                f"the loss is {v2.item():.4g}": not torch.equal(v2, value),
                "the gradient of unmasked tokens changes": not torch.equal(g2[b.mask], g[b.mask]),
                "the gradient of the masked slots is not 0": not bool((g2[~b.mask] == 0).all()),
            }
            if not any(changes.values()):
                continue
            regime, what = f"masked slots of {_role(k)} hold {p}", " and ".join(w for w, on in changes.items() if on)
            if case.loss.framework:
                return [note("poison", regime, "no effect, bit for bit", what, POISON)]

            def shows(c: Rollouts, bad=bad) -> bool:
                one, two = case.loss.both(c), case.loss.both(bad(c))
                return not (torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]))

            return [fail("poison", regime, "no effect, bit for bit", what, as_python(bad(shrink(b, shows))), POISON)]
    return []


POISON = "0 * NaN = NaN: mask the inputs, torch.where(mask, x, 0), before exp and before the product"


def _role(k: str) -> str:
    return ROLES[k].split()[0]


@oracle("permutation")
def permutation(case: Case) -> list[Finding]:
    b = replace(case.grid(thin=3), totals=None)
    g, n, slack = case.loss.gradient(b), len(b.mask), max(BIT, case.tol if case.tol > 1e-4 else 0)
    for i in (torch.arange(n).roll(1), torch.arange(n).flip(0), torch.randperm(n, generator=torch.Generator())):
        off = moved(case.loss.gradient(regroup(b, lambda k, v, i=i: v[i])), g[i], b.mask[i], slack)  # type: ignore[misc]
        if off.max() > 0:
            break
    else:
        return []
    return [fail("permutation", "rows in another order", "the same gradient, in that order", "another gradient",
                 cause="rows are read by position, as if groups were contiguous or equal in size")]  # fmt: skip


@oracle("determinism")
def determinism(case: Case) -> list[Finding]:
    b = case.grid(thin=5)
    (v, g), (v2, g2) = case.loss.both(b), case.loss.both(b)
    if torch.equal(v, v2) and torch.equal(g, g2):
        return []
    return [fail("determinism", "the same batch twice", "the same numbers", "other numbers",
                 cause="it draws random numbers or keeps state between calls")]  # fmt: skip


@oracle("scaling")
def scaling(case: Case) -> list[Finding]:
    if case.hp.get("beta"):
        return []
    b = case.grid(thin=3)
    g, g2 = case.loss.gradient(b), case.loss.gradient(replace(b, adv=3 * b.adv))
    off = moved(g2 / 3, g, b.mask, max(1e-7, case.tol if case.tol > 1e-4 else 0))
    if off.max() == 0:
        return []
    i, t = worst(off)
    return [fail("scaling", "all advantages times 3", f"3 times the gradient: {3 * g[i, t].item():.6g}",
                 f"{g2[i, t].item():.6g}", cause="advantages are normalised, clipped or squared inside")]  # fmt: skip


@oracle("zero-advantage")
def zero_advantage(case: Case) -> list[Finding]:
    if case.hp.get("beta"):
        return []
    b = case.grid(thin=3)
    g = case.loss.gradient(replace(b, adv=torch.zeros_like(b.adv)))
    if (g == 0).all():
        return []
    return [fail("zero-advantage", "A = 0 everywhere", "weight 0", "a gradient" if g.isfinite().all() else "NaN or infinity",
                 cause="a term without A, or a division by the advantages' deviation")]  # fmt: skip


# ---- constants, randomness, inputs -----------------------------------------------------------------------------------
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
            out.append(_role(k))
    if not out:
        return []
    return [note("stop-gradient", f"a gradient would flow into {', '.join(out)}", cause="harmless while the caller passes "
                 "tensors without requires_grad; .detach() makes it sure")]  # fmt: skip


@oracle("mutation")
def mutation(case: Case) -> list[Finding]:
    return [fail("mutation", f"{_role(k)} is changed in place", "inputs left alone", "other numbers after the call",
                 cause="an in-place operation (x[...] =, mul_, clamp_, nan_to_num_)") for k in sorted(case.loss.mutated)
            if k in ROLES]  # fmt: skip


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
            told, changed = loss.gradient(b, **{key: now}) if now is not None else loss.gradient(b), loss.gradient(
                b, **{key: other})
        except InputError as e:
            out.append(fail("dead-hyperparameter", f"{key} = {other:g}", "another gradient", str(e)))
            continue
        if torch.equal(told, changed):
            why = "it is swallowed by **kwargs" if key not in loss.takes else "the argument is never read"
            make = fail if asked else note
            out.append(make("dead-hyperparameter", f"{key} from {_num(now)} to {other:g}", "another gradient",
                            "the same gradient, bit for bit", cause=why))  # fmt: skip
        elif not _explained(there, b, changed):
            out.append(fail("dead-hyperparameter", f"{key} from {_num(now)} to {other:g}",
                            f"the gradient of {o.name} at {key} = {other:g}", "another gradient",
                            cause=f"{key} does not mean what it means in {o.name}"))  # fmt: skip
    return out


def _explained(case: Case, b: Rollouts, g: Tensor) -> bool:
    """Whether the moved gradient is right, or as wrong as before the move (the gradient oracle's business)."""
    here = replace(case, hp=case.o.resolve({k: v for k, v in case.hp.items() if k in case.loss.given}))
    off = case.off(b, g / case.factors(b))
    return bool((off > 10 * case.tol).double().mean() < 0.01) or bool(here.off(b).max() > 10 * case.tol)


def _num(x) -> str:
    return "absent" if x is None else f"{x:g}"


@oracle("split")
def split(case: Case) -> list[Finding]:
    loss, out = case.loss, []
    if case.o.coupled:
        return []
    b = case.ready(anchor())
    b = replace(b, logp=b.logp - 0.05 * b.logp.cos().abs())
    v, g = loss.both(b)
    for n in (2, 3, 8):
        parts = [loss.both(m) for m in b.split(n)]
        g2, v2 = torch.cat([p[1] for p in parts]), sum(p[0] for p in parts)
        off = moved(g2, g, b.mask, max(1e-7, case.tol if case.tol > 1e-4 else 0))
        if off.max() > 0:
            i, t = worst(off)
            out.append(fail("split", f"{n} micro-batches of unequal lengths, their losses added up",
                            f"dJ/dlp {g[i, t].item():.6g}, as of the whole", f"{g2[i, t].item():.6g}",
                            as_python(b), "it is normalised by the micro-batch, not by the mini-batch's totals"))  # fmt: skip
            break
        if (v2 - v).abs() > 1e-6 * v.abs().clamp(min=1e-3):
            out.append(note("split", f"the value of {n} micro-batches does not add up, the gradient does"))
            break
    return out
