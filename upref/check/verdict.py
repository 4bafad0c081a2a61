# SPDX-License-Identifier: Apache-2.0
"""`upref.check`: run every oracle on a loss."""

import time
from typing import Any

from upref.check import conduct, curve, extremes, invariance, parallel  # noqa: F401  they register their oracles
from upref.check.adapters import SHAPES, Loss, adapt
from upref.check.fit import EXACT, HABIT, Case, fit
from upref.check.oracles import ORACLES
from upref.check.report import Finding, Report
from upref.errors import InputError
from upref.regimes import anchor
from upref.registry import Objective, get

ORDER = (
    "gradient",
    "on-policy",
    "aggregation",
    "split",
    "data-parallel",
    "padding",
    "poison",
    "stop-gradient",
    "extremes",
    "dead-hyperparameter",
    "scaling",
    "zero-advantage",
    "permutation",
    "determinism",
    "value",
    "mutation",
)


def check(loss: Any, objective: str | Objective, *, skip: tuple[str, ...] = (), **hp) -> Report:
    """Whether `loss` is the objective: a Report, true where every oracle agrees, with notes on harmless habits.

    loss: a callable `(log_prob, old_log_prob, advantages, mask) -> scalar` to be minimised (see upref.check.adapters),
    an Objective, a trainer class of TRL's, or a name: package.module:function, path/to/file.py:function,
    verl:loss_mode, trl:loss_type (see upref.check.frameworks). hp are the objective's hyperparameters; the loss gets
    those that it takes by name and keeps its own defaults for the rest. skip: names of oracles not to run. Raises
    InputError where the loss cannot be run at all.
    """
    start = time.perf_counter()
    o = get(objective) if isinstance(objective, str) else objective
    if unknown := sorted(set(skip) - set(ORDER)):
        raise InputError(f"no oracle is called {unknown[0]!r}: choose from {', '.join(ORDER)}.")
    resolved = o.resolve(hp)
    case = probe(adapt(loss, o, hp), o, hp)
    found, ran = [], {}
    for name in ORDER:
        if why := _not_run(name, case, skip):
            ran[name] = why
            continue
        got = _run(name, case)
        found += got
        case.wrong |= any(f.severity == "failure" for f in got if f.oracle in ("gradient", "aggregation"))
        ran[name] = next((s for s in ("failure", "note") if any(f.severity == s for f in got)), "ok")
    if case.loss.printed:
        found.append(Finding("value", "note", "the loss prints while it computes", "", ""))
    tolerances = {"weight, relative": case.tol, "silent below": EXACT if case.tol == HABIT else case.tol}
    return Report(case.loss.name, o.name, resolved, found, contract(case), ran, tolerances, time.perf_counter() - start)


def _run(name: str, case: Case) -> list[Finding]:
    try:
        return ORACLES[name](case)
    except InputError as e:
        return [Finding(name, "failure", "on a batch of this oracle", "a loss", str(e))]


def _not_run(name: str, case: Case, skip) -> str:
    if name in skip:
        return "skipped on request"
    if name == "split" and not case.loss.splits:
        return "the loss is one call on the whole mini-batch: it takes no `totals`"
    if name == "data-parallel" and (why := parallel.not_parallel(case)):
        return why
    if name in ("split", "data-parallel") and case.o.coupled:
        return case.o.coupled
    if name == "on-policy" and case.o.off_anchor:
        return case.o.off_anchor
    if name in ("scaling", "zero-advantage") and case.hp.get("beta"):
        return "the KL term does not scale with A"
    return ""


def probe(loss: Loss, o: Objective, hp) -> Case:
    """The Case, once it is known in which shapes this loss takes its mask and advantages."""
    first: InputError | None = None
    cases: list[tuple[bool, str, bool, Case]] = []
    for adv_shape in [loss.adv_shape] if loss.framework else list(SHAPES):
        for float_mask in (False, True):
            loss.adv_shape, loss.float_mask, loss.unreduced = adv_shape, float_mask, False
            try:
                case = _try(loss, o, hp)
            except InputError as e:
                first = first or e
                continue
            if case.fits and abs(case.k - 1) < 1e-5:
                return case
            cases.append((case.fits, adv_shape, float_mask, case))
            break
    if not cases:
        assert first is not None
        raise first
    _, loss.adv_shape, loss.float_mask, case = next((c for c in cases if c[0]), cases[0])
    return case


def _try(loss: Loss, o: Objective, hp) -> Case:
    b = Case(loss, o, o.resolve(hp)).ready(anchor())
    x = b.logp.clone().requires_grad_()
    value = loss.run(loss.inputs(b, x), b)
    if not value.requires_grad:
        raise InputError(
            f"the result of {loss.name} has no gradient: it is computed under no_grad, detached, or a new tensor."
        )
    if not value.isfinite():
        raise InputError(f"{loss.name} is {value.item()} on a good batch (π_θ = π_old, finite log-probabilities).")
    return fit(loss, o, hp)


def contract(case: Case) -> list[str]:
    """What was assumed of the loss, a sentence each."""
    loss, out = case.loss, list(case.loss.contract)
    if "group" not in loss.reads and case.o.agg == "group-token-mean":
        out.append("the loss takes no group ids: the batch counts as one group, as in DAPO's code, verl and TRL")
    if loss.adv_shape != "BT":
        out.append(f"it takes advantages as {SHAPES[loss.adv_shape]}: one per response")
    if loss.float_mask:
        out.append("it takes the mask as numbers")
    if loss.unreduced:
        out.append(f"it answers without reduction: aggregated here by {case.o.agg}")
    if not parallel.not_parallel(case) and not case.o.coupled:
        out.append(f"gradients of data-parallel ranks are averaged; {parallel.contract(case)}")
    if not loss.splits:
        out.append("one call sees the whole mini-batch: what its micro-batches add up to is not checked")
    if loss.first_of:
        out.append("it answers with a tuple: its first element is the loss")
    if case.tol > 1e-4:
        out.append("it computes in float32: compared to 0.2 %, and not within 0.1 % of a bound")
    return out
