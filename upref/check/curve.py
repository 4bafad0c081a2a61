# SPDX-License-Identifier: Apache-2.0
"""The oracles that hold a loss against its objective: weights by regime, aggregation, anchor, extremes, value."""

import math

import numpy as np
import torch
from torch import Tensor

from upref.check.causes import STOP, cause
from upref.check.fit import EXACT, HABIT, Case, promised
from upref.check.oracles import example, fail, note, oracle, worst, wrong
from upref.check.patterns import pattern
from upref.check.report import Finding
from upref.ops import mean_t, sum_t
from upref.regimes import anchor, column, interval, kinks, near_a_bound, random_batch
from upref.registry import REDUCE
from upref.rollouts import Rollouts

RANDOM = 120  # random batches beside the grid
NAMES = {1.0: "A > 0", -1.0: "A < 0", 0.0: "A = 0"}


def ratio(case: Case, b: Rollouts) -> Tensor:
    """The ratio that the objective acts on, at each token."""
    x = torch.where(b.mask, b.logp - b.logp_old, 0)
    if case.o.level == "sequence":
        x = mean_t(x, b.mask)[:, None].expand_as(x)
    elif case.o.level == "trajectory":
        x = sum_t(x, b.mask)[:, None].expand_as(x)
    return x.exp()


def bounds_of(case: Case, A: float) -> list[float]:
    if case.o.coupled or case.o.reads_mu or not A:
        return []
    return kinks(case.o, A, 0.02, **case.plain_hp)


@oracle("gradient")
def gradient(case: Case) -> list[Finding]:
    b = case.grid()
    found = case.weights(b)
    off, r = case.off(b, found), ratio(case, b)
    A = torch.where(b.mask, b.adv.expand_as(off), 0)
    ties = torch.zeros_like(b.mask)
    for sign in (1.0, -1.0):
        for k in bounds_of(case, sign):
            ties |= (A * sign > 0) & ((r / k - 1).abs() < 1e-11)
    bad = off > case.tol
    out = _ties(case, b, bad & ties, r, A, found)
    failing = bad & ~ties
    if failing.any():
        return out + _regimes(case, b, failing, off, r, A, found, ties)
    if case.tol < 1e-4 and (small := (off.masked_fill(ties, 0)).max()) > EXACT:
        out.append(
            note("gradient", f"weights differ by {small:.1e} relative", cause="a small constant in a denominator")
        )
    return out or _random(case)


def _ties(case, b, hit, r, A, found) -> list[Finding]:
    expected, out = case.expected(b), []
    for sign in (1.0, -1.0):
        at = hit & (A * sign > 0)
        for k in sorted({round(x, 9) for x in r[at].tolist()}):
            i, t = (at & ((r - k).abs() < 1e-8)).nonzero()[0].tolist()
            out.append(
                note(
                    "gradient",
                    f"{NAMES[sign]}, r = {k:.6g} exactly: the bound belongs to the other side",
                    expected[i, t].item(),
                    found[i, t].item(),
                )
            )
    return out


def _regimes(case, b, failing, off, r, A, found, ties) -> list[Finding]:
    expected, out, all_bounds = case.expected(b), [], []
    regions = []
    for sign in (1.0, -1.0, 0.0):
        side = b.mask & ~ties & (A.sign() == sign)
        if (failing & side).any():
            for text, members, ends in _runs(case, b, sign, side, failing, r):
                regions.append((text, members))
                all_bounds += ends
    bounds = sorted({round(x, 7) for x in all_bounds})
    why = cause(case, b, found, ties, bounds) or pattern(
        b, found, expected, r, b.mask & ~ties, case.tol, case.o.level not in REDUCE
    )
    for n, (text, members) in enumerate(regions):
        i, t = worst(torch.where(members & failing, _typical(off, r), -1.0))
        show = example(case, b, wrong(case), (i, t)) if n < 4 else ""
        out.append(fail("gradient", text, expected[i, t].item(), found[i, t].item(), show, why if n == 0 else ""))
    if why.startswith(STOP):
        out.append(fail(STOP, regions[0][0], "", "", cause=why))
    return out


def _typical(off: Tensor, r: Tensor) -> Tensor:
    """Prefer a large difference on a ratio that a reader can picture."""
    return off.nan_to_num(posinf=1e30).clamp(max=1e30) / (1 + r.log().abs() * 20) + 1e-12


def _runs(case: Case, b: Rollouts, sign: float, side: Tensor, failing: Tensor, r: Tensor):
    """(words, tokens, ends) of each interval of ratios on which this sign of A fails."""
    x = r[side]
    order = x.argsort()
    xs, bad = x[order].tolist(), failing[side][order].tolist()
    if all(bad):
        yield f"{NAMES[sign]}, any r", side, []
        return
    known = sorted({*bounds_of(case, sign)})
    # one ratio met several times (other A, other mu) fails if any of them does
    groups: list[tuple[float, float, bool]] = []
    for v, f in zip(xs, bad, strict=True):
        if groups and v <= groups[-1][1] * (1 + 1e-10):
            groups[-1] = (groups[-1][0], v, groups[-1][2] or f)
        else:
            groups.append((v, v, f))
    start = None
    runs = []
    for n, (_, _, f) in enumerate([*groups, (0, 0, False)]):
        if f and start is None:
            start = n
        elif not f and start is not None:
            runs.append((start, n - 1))
            start = None
    if len(runs) > 3:
        yield f"{NAMES[sign]}, scattered r", side, []
        return
    for lo, hi in runs:
        left = _end(case, sign, known, groups[lo - 1][1], groups[lo][0]) if lo else None
        right = _end(case, sign, known, groups[hi + 1][0], groups[hi][1]) if hi + 1 < len(groups) else None
        text = "any r" if left is None and right is None else interval(left, right, 5)
        members = side & (r >= groups[lo][0] * (1 - 1e-12)) & (r <= groups[hi][1] * (1 + 1e-12))
        yield f"{NAMES[sign]}, {text}", members, [e for e in (left, right) if e is not None]


def _end(case: Case, sign: float, known: list[float], good: float, bad: float) -> float:
    """The bound between a ratio that agrees and one that does not: the objective's own, or found by asking the loss."""
    lo, hi = min(good, bad), max(good, bad)
    for k in known:
        if lo * (1 - 1e-12) <= k <= hi * (1 + 1e-12):
            return k
    if case.o.level == "free" or case.o.reads_mu:
        return bad
    for _ in range(6):
        xs = np.exp(np.linspace(math.log(good), math.log(bad), 33))
        wrongs = (case.off(case.ready(column(sign, xs))) > case.tol).any(1).tolist()
        if True not in wrongs or not wrongs.index(True):
            return bad
        good, bad = xs[wrongs.index(True) - 1], xs[wrongs.index(True)]
    return float(bad)


def _random(case: Case, seed: int = 0) -> list[Finding]:
    rng = np.random.default_rng(seed)
    for n in range(RANDOM // 4 if case.o.reads_mu else RANDOM):  # bisected bounds are slow
        b = case.ready(random_batch(rng, case.one_adv))
        off = case.off(b)
        if case.tol > 1e-4:
            off = off.masked_fill(near_a_bound(case.expected, b), 0)
        if off.max() > 10 * case.tol:
            i, t = worst(off)
            regime = f"{NAMES[b.adv[i, t].sign().item()]}, r = {ratio(case, b)[i, t].item():.4g}, in random batch {n}"
            return [
                fail(
                    "gradient",
                    regime,
                    case.expected(b)[i, t].item(),
                    case.weights(b)[i, t].item(),
                    example(case, b, wrong(case), (i, t)),
                    "the weight depends on other tokens of the batch",
                )
            ]
    return []


@oracle("aggregation")
def aggregation(case: Case) -> list[Finding]:
    b = case.ready(anchor())
    want = promised(case.o)
    said = case.o.agg if want != case.agg else want
    if case.agg == want and abs(case.k - 1) > HABIT and abs(case.k - 1) < 1e-5:
        return [note("aggregation", f"a factor of 1 {case.k - 1:+.1e}", cause="a small constant in a denominator")]
    same = torch.allclose(case.factors(b, want), case.factors(b), rtol=1e-6)
    if case.fits and same:
        return []
    if not case.fits:
        return []
    n = b.mask.sum(1)
    i = int((case.factors(b)[:, 0] / case.factors(b, want)[:, 0] - 1).abs().argmax())
    bad = lambda x: not torch.allclose(case.factors(x, want), case.factors(x), rtol=1e-6)
    group = "" if case.loss.view(b).group is not None else " (the loss sees no groups: the batch is one)"
    return [
        fail(
            "aggregation",
            f"ragged lengths, a response of {int(n[i])} of {int(n.sum())} tokens",
            f"{said}{group}: factor {case.factors(b, want)[i, 0].item():.5g} on each of its tokens",
            f"{case.agg}: factor {case.factors(b)[i, 0].item():.5g}",
            example(case, b, bad),
            case.agg,
        )
    ]


@oracle("on-policy")
def on_policy(case: Case) -> list[Finding]:
    if case.o.off_anchor:
        return []
    b = case.ready(anchor())
    off = case.off(b)
    if off.max() <= 10 * case.tol:
        return []
    i, t = worst(off)
    f, e = case.weights(b)[i, t].item(), case.expected(b)[i, t].item()
    why = f"every weight is {case.k:.5g} times what it should be" if case.fits and abs(case.k - 1) > 1e-5 else ""
    return [
        fail(
            "on-policy",
            f"{NAMES[float(np.sign(b.adv[i, t].item()))]}, r = 1",
            e,
            f,
            example(case, b, wrong(case), (i, t)),
            why,
        )
    ]


@oracle("value")
def value(case: Case) -> list[Finding]:
    if case.wrong:
        return []
    rng = np.random.default_rng(1)
    for n in range(10):
        b = case.ready(random_batch(rng, case.one_adv))
        found, expected = case.loss(b).item(), case.o.loss(b, **case.hp).item()
        if not math.isfinite(found):
            return [fail("value", f"random batch {n}", f"{expected:.6g}", f"{found}")]
        if abs(found - expected) > max(1e-6, case.tol) * max(1, abs(expected)):
            return [
                note(
                    "value",
                    "the value differs",
                    f"{expected:.6g}",
                    f"{found:.6g}",
                    "a form or a constant without effect on the gradient",
                )
            ]
    return []
