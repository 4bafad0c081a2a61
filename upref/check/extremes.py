# SPDX-License-Identifier: Apache-2.0
"""The oracle of far ratios, rare tokens and low precision."""

import math
from dataclasses import replace

import torch

from upref.check.curve import NAMES
from upref.check.fit import Case
from upref.check.oracles import as_python, example, fail, note, oracle, wrong
from upref.check.report import Finding
from upref.errors import InputError
from upref.regimes import column, overflowing
from upref.rollouts import Rollouts

FAR = (5.0, 8.0, 9.5, 10.5, 15.0, 19.5, 20.5, 30.0, 50.0)


@oracle("extremes")
def extremes(case: Case) -> list[Finding]:
    out: list[Finding] = []
    if case.tol < 1e-4 and not case.o.coupled and not case.wrong:
        out += _clamps(case)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        if found := _overflows(case, dtype):
            return out + found
    return out


def _far(case: Case, dtype) -> Rollouts:
    b = case.ready(overflowing())
    return replace(b, **{k: getattr(b, k).to(dtype) for k in ("logp", "logp_old", "adv", "logp_ref", "entropy")})


def _overflows(case: Case, dtype) -> list[Finding]:
    """NaN, or a weight lost, where the objective's own is an ordinary number; forgiven where exp(log r) overflows and
    the objective has that ratio in it."""
    low, short = _far(case, dtype), str(dtype).removeprefix("torch.")
    try:
        g = case.loss.gradient(low).double()
    except InputError as e:
        if dtype is torch.float64:
            return [fail("extremes", "float64, |log r| up to 800", "a finite loss", str(e))]
        return [note("extremes", f"{short} inputs are refused", found=str(e))]
    wide = lambda k: {k: getattr(low, k).double()}
    b = replace(low, **wide("logp"), **wide("logp_old"), **wide("adv"), **wide("logp_ref"), **wide("entropy"))
    expected, found = case.expected(b), g / case.factors(b)
    log_r, A = b.logp - b.logp_old, b.adv
    inside = torch.float32 if case.tol > 1e-4 and dtype is torch.float64 else dtype  # a loss that computes in float32
    overflow = log_r.abs() > math.log(torch.finfo(inside).max) - 1
    plain = (expected.abs() > 0.1 * A.abs()) & (expected.abs() < 10 * A.abs() + 1)  # a weight that is no ratio run away
    lost = ~found.isfinite() | ((found - expected).abs() > 0.1 * expected.abs())
    bad = ~found.isfinite() & ~overflow & (expected.abs() < 1e30) | lost & plain
    spent = ~found.isfinite() & ~bad
    for hit, make in ((bad, fail), (spent, note)):
        if case.wrong and make is fail:
            hit = hit & ~found.isfinite()
        if hit.any():
            i, t = hit.nonzero()[0].tolist()
            why = (
                "exp overflows where it is not taken, and 0 * inf = NaN on the way back"
                if overflow[i, t]
                else "exp(log_prob) underflows: use differences of log-probabilities"
                if b.logp[i, t] < math.log(torch.finfo(dtype).tiny) + 20
                else "it computes in a narrower dtype than its inputs have"
            )
            if found[i, t].isfinite():
                why = "an overflowing ratio is replaced by another weight"
            text = (
                f"{NAMES[A[i, t].item()]}, log r = {log_r[i, t].item():.3g}, log π = {b.logp[i, t].item():.4g}, {short}"
            )
            want, got = expected[i, t].item(), found[i, t].item()
            if make is note:
                return [note("extremes", text, want, got, why)]
            return [fail("extremes", text, want, got, _one(low, i, dtype), why)]
    return []


def _one(b: Rollouts, i: int, dtype) -> str:
    """That response as Python, in its dtype."""
    keep = {k: getattr(b, k)[i : i + 1, :1] for k in ("logp", "logp_old", "adv", "mask")}
    return as_python(Rollouts(**keep)).replace("torch.float64", str(dtype))


def _clamps(case: Case) -> list[Finding]:
    """A weight that is lost beyond some |log r|: a clamp of the log-ratio."""
    for A in (1.0, -1.0):
        cols = [(s, x, float(case.off(case.ready(column(A, [math.exp(s * x)]))).max())) for x in FAR for s in (1, -1)]
        hit = [(s, x) for s, x, off in cols if off > 1e-6]
        near = [(s, x) for s, x in hit if x < 20]
        if not hit:
            continue
        s, x = near[0] if near else hit[0]
        b = case.ready(column(A, [math.exp(s * x)]))
        e, f = case.expected(b)[0, 0].item(), case.weights(b)[0, 0].item()
        text = f"{NAMES[A]}, log r = {s * x:g}"
        if near:
            return [fail("extremes", text, e, f, example(case, b, wrong(case)), "the log-ratio is clamped below 20")]
        return [note("extremes", text, e, f, "the log-ratio is clamped at 20 or beyond")]
    return []
