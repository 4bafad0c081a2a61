# SPDX-License-Identifier: Apache-2.0
"""The oracle of unusual inputs: each axis of upref.regimes.AXES by itself, then all of them at once."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from upref.errors import InputError
from upref.regimes import AXES, LARGE, anchor, beyond, renamed
from upref.rollouts import Rollouts
from upref.verify.measure import Case
from upref.verify.oracle import oracle
from upref.verify.oracles.invariance import moved, slack
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import example, worst

TOO_LONG = 0.8  # seconds: a loss that would take longer for the large batch is not asked for it
LAST = "all at once"


@oracle("reach", 145, lambda case: "the weights are wrong already" if case.wrong else "")
def reach(case: Case) -> list[Finding]:
    spent, tokens = 0.0, 1
    notes: list[Finding] = []
    for name in AXES:
        if name == "reference" and not case.hp.get("beta"):
            continue
        if name == LAST and spent / tokens * 80_000 > TOO_LONG:
            return [*notes, note("reach", f"{LARGE}: not asked, it would take long")]
        b = case.ready(beyond(name, case.o, **case.plain_hp))
        start = time.process_time()
        found = _look(case, name, b)
        if any(f.severity == "failure" for f in found):
            return found
        notes += found
        spent, tokens = (time.process_time() - start, int(b.mask.sum())) if name == "lengths" else (spent, tokens)
    return notes + _groups(case)


def _look(case: Case, name: str, b: Rollouts) -> list[Finding]:
    try:
        off = _off(case, b)
    except InputError as e:
        return [fail("reach", AXES[name].words, "a finite loss", str(e))]
    if not off.max() > 10 * case.tol:
        return []
    if not case.single and _in_part(case, b):
        return [note("reach", f"{AXES[name].words}: {PARTLY}")]
    i, t = worst(off)
    found = case.weights(b)
    n, A = int(b.mask[i].sum()), b.adv[i, t].item()
    text = f"{AXES[name].words}: A = {A:.4g}, π_old = {b.logp_old[i, t].exp().item():.6g}, token {t + 1} of {n}"
    return [fail("reach", text, case.expected(b)[i, t].item(), found[i, t].item(), _shown(case, name, b, i, t))]


PARTLY = "right up to what rounding its inputs to float32 makes of them"


def _in_part(case: Case, b: Rollouts) -> bool:
    """Whether a part in float32 explains it, which only many tokens show; then it is so compared from here on."""
    single = replace(case)
    single.in_float32()
    if _off(single, b).max() > 10 * single.tol:
        return False
    case.in_float32()
    return True


def _off(case: Case, b: Rollouts) -> Tensor:
    """Tokens beside a bound, and those where the objective itself has no weight, count nothing."""
    apart = case.off(b, floor=1e-12)
    if not apart.max() > 10 * case.tol:
        return apart
    expected = case.expected(b)
    edge = case.moves(b, expected) > 1e-3 * torch.maximum(expected.abs(), b.adv.abs())
    return apart.masked_fill(edge | ~expected.isfinite(), 0)


def _shown(case: Case, name: str, b: Rollouts, i: int, t: int) -> str:
    """One token or one response where that still shows it, else how the batch is made."""
    bad = lambda x: bool(_off(case, x).max() > 10 * case.tol)
    row = lambda cut: replace(b, **{
        k: v[i : i + 1, cut] for k in ("logp", "logp_old", "adv", "mask", "logp_ref", "entropy")
        if (v := getattr(b, k)) is not None}, group=None, totals=None)  # fmt: skip
    for cut in (slice(t, t + 1), slice(0, int(b.mask[i].nonzero().max()) + 1)):
        small = case.ready(row(cut))
        if small.mask.numel() <= 32 and bad(small):
            return example(case, small, lambda x: False)
    hp = "".join(f", {k}={v!r}" for k, v in case.plain_hp.items() if v is not None)
    return f"from upref.regimes import beyond, ready\nb = ready(beyond({name!r}, upref.get({case.o.name!r}){hp}))"


def _groups(case: Case) -> list[Finding]:
    if "group" not in case.loss.reads:
        return []
    b = case.ready(anchor())
    g, notes = case.gradient(b), []
    for words, c in renamed(b).items():
        try:
            off = moved(case.gradient(c), g, b.mask, slack(case, 1e-7))
        except InputError as e:
            if words == "with gaps":
                return [fail("reach", f"group ids {words}", "the same gradient", str(e))]
            notes.append(note("reach", f"group ids {words} are refused", found=str(e)))
            continue
        if off.max() > 0:
            i, t = worst(off)
            says = f"dJ/dlp {g[i, t].item():.6g}, as with ids 0, 1, 2", f"{case.gradient(c)[i, t].item():.6g}"
            ids = f"{c.group.unique().tolist()}" if c.group is not None else ""
            return [fail("reach", f"group ids {words}: {ids}", *says)]
    return notes


def covered(case: Case) -> str:
    """What was looked at, in one sentence; what is not in it was not."""
    words = [a.words for name, a in AXES.items() if name != "reference" or case.hp.get("beta")]
    groups = ["group ids with gaps, negative, beyond 2^40"] if "group" in case.loss.reads else []
    said = "; ".join(["every bound, |log r| up to 800", *words[:-1], *groups, words[-1]])
    return "covered: " + ("the objective's regimes alone, since it is wrong there" if case.wrong else said)
