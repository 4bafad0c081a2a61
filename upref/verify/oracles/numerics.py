# SPDX-License-Identifier: Apache-2.0
"""The oracle of far ratios, rare tokens and low precision."""

import math
from dataclasses import replace

import torch

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.measure import HABIT, Case
from upref.verify.oracle import oracle
from upref.verify.regions import NAMES
from upref.verify.report import UNKNOWN, Finding, fail, note
from upref.verify.shrink import as_python, example
from upref.verify.shrink import wrong as wrong_of
from upref.weights.batches import GUARD, column, overflowing

FAR = (5.0, 8.0, 9.5, 10.5, 15.0, 19.5, 20.5, 30.0, 50.0)
SAMPLED = math.log(torch.finfo(torch.float32).max) - 1  # log r beyond it needs a sampled token of probability e^-88
FULL = math.log(torch.finfo(torch.float64).max) - 1
FLOATS = ("logp", "logp_old", "adv", "logp_ref", "entropy", "logp_sampler")


@oracle("extremes", 90)
def extremes(case: Case) -> list[Finding]:
    out: list[Finding] = []
    if not case.single and not case.o.coupled and not case.wrong:
        out += clamps(case)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        if found := _overflows(case, dtype):
            return out + found
    return out


def _overflows(case: Case, dtype: torch.dtype) -> list[Finding]:
    """NaN, or a lost weight, where the objective's own is an ordinary number; a note beyond ratios that a sampler can
    produce, which is where exp(log r) overflows float32."""
    wide, short = case.ready(overflowing()), str(dtype).removeprefix("torch.")
    low = replace(wide, **{k: v.to(dtype) for k in FLOATS if (v := getattr(wide, k)) is not None})
    try:
        g = case.gradient(low).double()
    except InputError as e:
        if dtype is torch.float64 and not _runs_below_overflow(case, low):
            return [fail("extremes", "float64, |log r| up to 800", "a finite loss", str(e))]
        beyond = f"|log r| above {FULL:.0f} is" if dtype is torch.float64 else f"{short} inputs are"
        return [note("extremes", f"{beyond} refused", found=str(e))]
    b = replace(low, **{k: v.double() for k in FLOATS if (v := getattr(low, k)) is not None})
    expected, found = case.expected(b), g / case.factors(b)
    log_r, A = b.logp - b.logp_old, b.adv
    overflow = log_r.abs() > SAMPLED
    plain = (expected.abs() > 0.1 * A.abs()) & (expected.abs() < 10 * A.abs() + 1)  # a weight that is no ratio run away
    lost = ~found.isfinite() | ((found - expected).abs() > 0.1 * expected.abs())
    bad = (~found.isfinite() & (expected.abs() < 1e30) | lost & plain) & ~overflow
    spent = (~found.isfinite() | lost & plain) & ~bad
    if case.wrong:
        bad = bad & ~found.isfinite()
    for hit, severe in ((bad, True), (spent, False)):
        if not hit.any():
            continue
        i, t = hit.nonzero()[0].tolist()
        sign = NAMES.get(A[i, t].item(), f"A = {A[i, t].item():g}")
        text = f"{sign}, log r = {log_r[i, t].item():.3g}, log π = {b.logp[i, t].item():.4g}, {short}"
        want, got = expected[i, t].item(), found[i, t].item()
        why = _why(case, b, low, i, t)
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


def _why(case: Case, b: Rollouts, low: Rollouts, i: int, t: int) -> str:
    """The one change that makes it right: a nearer ratio, or the same ratio of a likelier token."""
    x, A = (b.logp - b.logp_old)[i, t].item(), b.adv[i, t].item()
    dtype = low.logp.dtype

    def right(log_r: float, lp: float) -> bool:
        full = lambda v: torch.full_like(low.logp[:1, :1], v)
        one = case.ready(Rollouts(full(lp), full(lp - log_r), full(A), full(1).bool(), logp_ref=full(lp)))
        try:
            found = case.gradient(one).double() / case.factors(one)
        except InputError:
            return False
        wide = replace(one, **{k: v.double() for k in FLOATS if (v := getattr(one, k)) is not None})
        return bool(
            (found - case.expected(wide)).abs().max() <= 0.05 * max(abs(A), float(case.expected(wide).abs().max()))
        )

    for d in (torch.float32, dtype):
        name, most, least = str(d).removeprefix("torch."), math.log(torch.finfo(d).max), -math.log(torch.finfo(d).tiny)
        sign = math.copysign(1, x)
        if abs(x) > most and right(sign * (most - 4), -1 - most) and not right(sign * (most + 4), -5 - most):
            return f"exp(log r) overflows {name} at |log r| > {most:.3g} (float16: 11.1), and 0 * inf is NaN"
        if abs(x) < 1 and right(x, 9 - least) and not right(x, -60 - least):
            return f"exp(log_prob) underflows {name}, though the ratio is near 1: use differences of log-probabilities"
    return ""


def clamps(case: Case) -> list[Finding]:
    """A weight that is lost beyond some |log r|: a clamp of the log-ratio."""
    guard = GUARD[case.o.level]
    for A in (1.0, -1.0):
        b = case.ready(column(A, [math.exp(s * x) for x in FAR for s in (1, -1)]))
        xs, found, expected = (v[:, 0].tolist() for v in (b.logp - b.logp_old, case.weights(b), case.expected(b)))
        wrong = (case.off(b)[:, 0] > HABIT).tolist()
        hit = [n for n in range(len(xs)) if wrong[n]]
        if not hit:
            continue
        n = hit[0]  # the nearest
        beyond = [not found[k] for k in range(len(xs)) if xs[k] * xs[n] > 0 and abs(xs[k]) >= abs(xs[n]) - 1e-9]
        last = max((abs(x) for x in xs[:n] if x * xs[n] > 0), default=0.0)
        text = f"{NAMES[A]}, log r = {xs[n]:.4g}"
        # a clamp leaves the value where it is and no gradient, for all that is farther
        why = f"log r is clamped, between {last:.4g} and {abs(xs[n]):.4g}" if all(beyond) else UNKNOWN
        if abs(xs[n]) < guard:
            one = case.ready(column(A, [math.exp(xs[n])]))
            return [fail("extremes", text, expected[n], found[n], example(case, one, wrong_of(case)), why)]
        far = f"clamped at {guard:g} or beyond" if all(beyond) else f"another weight at {guard:g} or beyond"
        return [note("extremes", f"{text}: {far}", expected[n], found[n], why)]
    return []
