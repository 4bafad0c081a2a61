# SPDX-License-Identifier: Apache-2.0
"""The oracle of far ratios, rare tokens and low precision."""

import math
from dataclasses import replace

import torch

from upref.errors import InputError
from upref.regimes import column, overflowing
from upref.rollouts import Rollouts
from upref.verify.measure import Case
from upref.verify.oracle import oracle
from upref.verify.regions import NAMES
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import as_python, example, wrong

FAR = (5.0, 8.0, 9.5, 10.5, 15.0, 19.5, 20.5, 30.0, 50.0)
FULL = math.log(torch.finfo(torch.float64).max) - 1
FLOATS = ("logp", "logp_old", "adv", "logp_ref", "entropy")


@oracle("extremes", 90)
def extremes(case: Case) -> list[Finding]:
    out: list[Finding] = []
    if not case.single and not case.o.coupled and not case.wrong:
        out += _clamps(case)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        if found := _overflows(case, dtype):
            return out + found
    return out


def _overflows(case: Case, dtype: torch.dtype) -> list[Finding]:
    """NaN, or a weight lost, where the objective's own is an ordinary number; forgiven where exp(log r) overflows and
    the objective has that ratio in it."""
    wide, short = case.ready(overflowing()), str(dtype).removeprefix("torch.")
    low = replace(wide, **{k: getattr(wide, k).to(dtype) for k in FLOATS})
    try:
        g = case.gradient(low).double()
    except InputError as e:
        if dtype is torch.float64 and not _runs_below_overflow(case, low):
            return [fail("extremes", "float64, |log r| up to 800", "a finite loss", str(e))]
        beyond = f"|log r| above {FULL:.0f} is" if dtype is torch.float64 else f"{short} inputs are"
        return [note("extremes", f"{beyond} refused", found=str(e))]
    b = replace(low, **{k: getattr(low, k).double() for k in FLOATS})
    expected, found = case.expected(b), g / case.factors(b)
    log_r, A = b.logp - b.logp_old, b.adv
    inside = torch.float32 if case.single and dtype is torch.float64 else dtype
    overflow = log_r.abs() > math.log(torch.finfo(inside).max) - 1
    plain = (expected.abs() > 0.1 * A.abs()) & (expected.abs() < 10 * A.abs() + 1)  # a weight that is no ratio run away
    lost = ~found.isfinite() | ((found - expected).abs() > 0.1 * expected.abs())
    bad = ~found.isfinite() & ~overflow & (expected.abs() < 1e30) | lost & plain
    spent = ~found.isfinite() & ~bad
    if case.wrong:
        bad = bad & ~found.isfinite()
    for hit, severe in ((bad, True), (spent, False)):
        if not hit.any():
            continue
        i, t = hit.nonzero()[0].tolist()
        text = f"{NAMES[A[i, t].item()]}, log r = {log_r[i, t].item():.3g}, log π = {b.logp[i, t].item():.4g}, {short}"
        want, got = expected[i, t].item(), found[i, t].item()
        if found[i, t].isfinite():
            why = "an overflowing ratio is replaced by another weight"
        elif overflow[i, t]:
            why = "exp overflows where it is not taken, and 0 * inf = NaN on the way back"
        elif b.logp[i, t] < math.log(torch.finfo(dtype).tiny) + 20:
            why = "exp(log_prob) underflows: use differences of log-probabilities"
        else:
            why = "it computes in a narrower dtype than its inputs have"
        if not severe:
            return [note("extremes", text, want, got, why)]
        keep = {k: getattr(low, k)[i : i + 1, :1] for k in ("logp", "logp_old", "adv", "mask")}
        batch = as_python(Rollouts(**keep)).replace("torch.float64", str(dtype))
        return [fail("extremes", text, want, got, batch, why)]
    return []


def _runs_below_overflow(case: Case, b: Rollouts) -> bool:
    """Whether it raised only because exp(log r) is infinite: louder than the NaN that is forgiven."""
    try:
        case.gradient(replace(b, logp=torch.where((b.logp - b.logp_old).abs() > FULL, b.logp_old, b.logp)))
    except InputError:
        return False
    return True


def _clamps(case: Case) -> list[Finding]:
    """A weight that is lost beyond some |log r|: a clamp of the log-ratio."""
    at = lambda A, x: case.ready(column(A, [math.exp(x)]))
    for A in (1.0, -1.0):
        hit = [s * x for x in FAR for s in (1, -1) if float(case.off(at(A, s * x)).max()) > 1e-6]
        near = [x for x in hit if abs(x) < 20]
        if not hit:
            continue
        x = near[0] if near else hit[0]
        b = at(A, x)
        expected, found = case.expected(b)[0, 0].item(), case.weights(b)[0, 0].item()
        text = f"{NAMES[A]}, log r = {x:g}"
        if near:
            why = "the log-ratio is clamped below 20"
            return [fail("extremes", text, expected, found, example(case, b, wrong(case)), why)]
        return [note("extremes", text, expected, found, "the log-ratio is clamped at 20 or beyond")]
    return []
