# SPDX-License-Identifier: Apache-2.0
"""Oracles that need no reference: what must not change a loss's gradient, or change it in a known way."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from upref.check.fit import Case
from upref.check.oracles import FIELDS, as_python, example, fail, moved, note, oracle, role_name, shrink, worst
from upref.check.report import Finding
from upref.errors import InputError
from upref.regimes import OFF_EDGES
from upref.rollouts import Rollouts

BIT = 1e-12


def regroup(b: Rollouts, f: Callable[[str, Tensor], Tensor]) -> Rollouts:
    return replace(b, totals=None, **{k: f(k, v) for k in FIELDS if (v := getattr(b, k)) is not None})


@oracle("padding")
def padding(case: Case) -> list[Finding]:
    b = replace(case.grid(thin=3, edges=OFF_EDGES), totals=None)  # on a bound, the order of a sum would decide
    value, g = case.loss.both(b)
    slack = max(BIT, case.tol if case.tol > 1e-4 else 0)
    out = []
    leak = torch.where(b.mask, 0, g.abs().nan_to_num(nan=math.inf))
    if leak.max() > 0:
        bad = lambda x: bool((case.loss.gradient(x)[~x.mask] != 0).any())
        out.append(
            fail(
                "padding",
                "masked slots that hold ordinary numbers",
                "weight 0",
                "a gradient flows into them",
                example(case, b, bad),
                "the mask is ignored",
            )
        )
    for left, right in ((0, 3), (2, 0)):
        wide = regroup(
            b,
            lambda k, v, n=(left, right): (
                v
                if k == "group"
                # type: ignore[misc]
                else torch.nn.functional.pad(v, n, value=-0.7 if v.is_floating_point() else 0)
            ),
        )
        wider, g2 = case.loss.both(wide)
        side = f"{left} columns of padding on the left" if left else f"{right} columns of padding on the right"
        off = moved(g2[:, left : left + g.shape[1]], g, b.mask, slack)
        if off.max() > 0:
            i, t = worst(off)
            before, after = g[i, t].item(), g2[i, t + left].item()
            out.append(
                fail(
                    "padding",
                    f"with {side}",
                    f"dJ/dlp {before:.6g}, as without",
                    f"{after:.6g}",
                    as_python(shrink(b, lambda x: True, (i, t))),
                    "a mean or a bound reads the padded width",
                )
            )
        elif (wider - value).abs() > 1e-6 * value.abs().clamp(min=1e-3):
            out.append(
                note("padding", f"the value moves with {side}, the gradient does not", f"{value:.6g}", f"{wider:.6g}")
            )
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
    return [
        fail(
            "padding",
            "with a row that is masked throughout",
            f"dJ/dlp {g[i, t].item():.6g}, as without",
            f"{g2[i, t].item():.6g}",
            cause="the row is counted in a denominator",
        )
    ]


JUNK = (0.0, -30.0, 30.0)  # what padding may hold: a log-probability of anything, an advantage of any size
NOT_NUMBERS = (math.nan, math.inf, -math.inf, 1e30)
LEAK = "NaN in a masked slot reaches the gradient: mask the inputs, torch.where(mask, x, 0), before multiplying"


@oracle("poison")
def poison(case: Case) -> list[Finding]:
    """Numbers in masked slots must count for nothing; NaN there is a note, since frameworks pad with numbers."""
    b = case.grid(thin=5)
    value, g = case.loss.both(b)
    reads = [k for k in ("logp", "logp_old", "adv", "logp_ref", "entropy") if k in case.loss.reads]
    leaks: list[Finding] = []
    for k, p in ((k, p) for p in (*JUNK, *NOT_NUMBERS) for k in reads):
        if getattr(b, k) is None or (k == "adv" and case.loss.adv_shape != "BT"):
            continue
        bad = lambda c, k=k, p=p: replace(c, **{k: getattr(c, k).masked_fill(~c.mask, p)})
        regime = f"masked slots of {role_name(k)} hold {p:g}"
        try:
            v2, g2 = case.loss.both(bad(b))
        except InputError as e:
            if p in JUNK:
                return [fail("poison", regime, "no effect", str(e))]
            return [note("poison", regime, "no effect", str(e))]
        changes = {
            f"the loss is {v2.item():.4g}": not torch.equal(v2, value),
            "the gradient of unmasked tokens changes": not torch.equal(g2[b.mask], g[b.mask]),
            "the gradient of the masked slots is not 0": not bool((g2[~b.mask] == 0).all()),
        }
        if not any(changes.values()):
            continue
        what = " and ".join(w for w, on in changes.items() if on)
        if p not in JUNK or case.loss.framework:
            leaks = leaks or [note("poison", regime, "no effect, bit for bit", what, LEAK)]
            continue

        def shows(c: Rollouts, bad=bad) -> bool:
            one, two = case.loss.both(c), case.loss.both(bad(c))
            return not (torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]))

        finite = v2.isfinite() and g2.isfinite().all()
        why = "masked slots are read: the mask is missing from a sum, a mean or a bound" if finite else LEAK
        return [fail("poison", regime, "no effect, bit for bit", what, as_python(bad(shrink(b, shows))), why)]
    return leaks


def _moves(case: Case, b: Rollouts, i: Tensor, slack: float) -> bool:
    there = case.loss.gradient(regroup(b, lambda k, v: v[i]))
    return bool(moved(there, case.loss.gradient(b)[i], b.mask[i], slack).max() > 0)


@oracle("permutation")
def permutation(case: Case) -> list[Finding]:
    b = replace(case.grid(thin=3, edges=OFF_EDGES), totals=None)  # on a bound, the order of a sum would decide
    g, n, slack = case.loss.gradient(b), len(b.mask), max(BIT, case.tol if case.tol > 1e-4 else 0)
    orders = (
        lambda n: torch.arange(n).roll(1),
        lambda n: torch.arange(n).flip(0),
        lambda n: torch.randperm(n, generator=torch.Generator()),
    )
    for order in orders:
        i = order(n)
        off = moved(case.loss.gradient(regroup(b, lambda k, v, i=i: v[i])), g[i], b.mask[i], slack)  # type: ignore[misc]
        if off.max() > 0:
            break
    else:
        return []
    return [
        fail(
            "permutation",
            "rows in another order",
            "the same gradient, in that order",
            "another gradient",
            as_python(shrink(b, lambda c: _moves(case, c, order(len(c.mask)), slack))),
            "rows are read by position, as if groups were contiguous or equal in size",
        )
    ]


@oracle("determinism")
def determinism(case: Case) -> list[Finding]:
    b = case.grid(thin=5)
    (v, g), (v2, g2) = case.loss.both(b), case.loss.both(b)
    if torch.equal(v, v2) and torch.equal(g, g2):
        return []
    return [
        fail(
            "determinism",
            "the same batch twice",
            "the same numbers",
            "other numbers",
            as_python(shrink(b, lambda c: not torch.equal(case.loss.gradient(c), case.loss.gradient(c)))),
            "it draws random numbers or keeps state between calls",
        )
    ]


@oracle("scaling")
def scaling(case: Case) -> list[Finding]:
    if case.hp.get("beta"):
        return []
    b = case.grid(thin=3, edges=OFF_EDGES)  # on a bound, the order of a sum would decide
    g, g2 = case.loss.gradient(b), case.loss.gradient(replace(b, adv=3 * b.adv))
    off = moved(g2 / 3, g, b.mask, max(1e-7, case.tol if case.tol > 1e-4 else 0))
    if off.max() == 0:
        return []
    i, t = worst(off)

    def scales(c: Rollouts) -> bool:
        one, three = case.loss.gradient(c), case.loss.gradient(replace(c, adv=3 * c.adv))
        return bool(moved(three / 3, one, c.mask, max(1e-6, case.tol)).max() > 0)

    return [
        fail(
            "scaling",
            "all advantages times 3",
            f"3 times the gradient: {3 * g[i, t].item():.6g}",
            f"{g2[i, t].item():.6g}",
            as_python(shrink(b, scales, (i, t))),
            "advantages are normalised, clipped or squared inside",
        )
    ]


@oracle("zero-advantage")
def zero_advantage(case: Case) -> list[Finding]:
    if case.hp.get("beta"):
        return []
    b = case.grid(thin=3, edges=OFF_EDGES)  # on a bound, the order of a sum would decide
    g = case.loss.gradient(replace(b, adv=torch.zeros_like(b.adv)))
    if (g == 0).all():
        return []
    return [
        fail(
            "zero-advantage",
            "A = 0 everywhere",
            "weight 0",
            "a gradient" if g.isfinite().all() else "NaN or infinity",
            cause="a term without A, or a division by the advantages' deviation",
        )
    ]
