# SPDX-License-Identifier: Apache-2.0
"""`upref.check`: run every oracle on a loss."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from upref.aggregation import KEPT_MEAN
from upref.errors import InputError
from upref.registry import Objective, get
from upref.user_code import (
    ENTROPY_COEF,
    FIRST,
    PER_RESPONSE,
    ROWS,
    SHAPES,
    UNREDUCED,
    Loss,
    infer_shapes,
    read,
)
from upref.user_code.arrays import NOT_EXERCISED
from upref.verify import oracles
from upref.verify.measure import (
    EXACT_TOL,
    HABIT_TOL,
    LossCase,
    make_case,
    sampler_words,
)
from upref.verify.oracle import Oracle, by_rank, discover, run, validate_names
from upref.verify.oracles.every_value import is_proved, values_in_words
from upref.verify.oracles.state import state
from upref.verify.report import (
    SKIPPED,
    Finding,
    Report,
    not_run,
    note,
    restores_state,
)

INVERTED = "ratio-inverted"  # what exchanged policies look like


# what is said of the divisor of an objective that rejects tokens, by its aggregation
DIVISORS_OF_KEPT = {
    "token-mean": [
        "rejected tokens count in the divisor (token-mean); --agg kept-mean leaves them out"
    ],
    KEPT_MEAN: [
        "rejected tokens are left out of the divisor (kept-mean); --agg token-mean counts them"
    ],
}


@cache
def every() -> list[Oracle]:
    """Return the oracles of a loss, in the order in which they run: all that stand in the
    folder `oracles`.

    Returns:
        The smallest rank first.
    """
    return by_rank(discover(oracles, Oracle))


@restores_state
def check(
    loss: Any,
    objective: str | Objective,
    *,
    agg: str = "",
    skip: Sequence[str] = (),
    **hp: Any,
) -> Report:
    """Compare the gradients of a loss with those of an objective.

    Args:
        loss: a callable `(log_prob [B, T], old_log_prob [B, T], advantages [B, T], mask
            [B, T]) -> scalar` to minimize, an Objective, a trainer class of TRL, or a
            name: package.module:function, path/to/file.py:function, verl:loss_mode,
            trl:loss_type. `upref.user_code` lists other arguments and results that are
            recognized.
        objective: a registered name, or an Objective.
        agg: aggregation in place of the objective's own, a name of
            upref.aggregation.AGGREGATIONS.
        skip: names of oracles not to run.
        **hp: the objective's hyperparameters. The loss gets those that it takes by name
            and keeps its own defaults for the rest. A name that only the loss has goes
            to the loss alone. `entropy_coef` declares an entropy bonus, averaged as the
            objective is: a loss with an argument `entropy` is then compared with
            -J - entropy_coef H.

    Returns:
        A Report: true if every oracle agrees; harmless habits are notes.

    Raises:
        InputError: the loss cannot be run.
    """
    reference = objective if isinstance(objective, Objective) else get(objective)
    if agg:
        reference = reference.aggregated(agg)
    validate_names(every(), skip)
    read_loss = read(loss, reference, hp)
    report = _report_of(read_loss, reference, agg, skip, hp)
    if not report:
        report = _with_one_advantage(report, read_loss, reference, agg, skip, hp)
    if (
        read_loss.order_unknown
        and not report
        and _may_fail_for_order(read_loss, reference, agg, skip, hp, report)
    ):
        raise InputError(read_loss.order_unknown)
    return _with_own_defaults(report, read_loss, reference, agg, skip, hp)


MIXED_ADVANTAGES = (
    "advantages that differ within a response get different weights: right if A is one "
    "number per response, as in the formula of {}: pass advantages[:, :1]"
)


def _with_one_advantage(
    report: Report,
    loss: Loss,
    objective: Objective,
    agg: str,
    skip: Sequence[str],
    hp: dict[str, Any],
) -> Report:
    """Check a loss that failed with advantages of tokens once more, with one advantage
    for each response, if the objective's formula has no other.

    Returns:
        The new report with a note on advantages of tokens, if it agrees; else the report
        that is given.
    """
    if loss.adv_shape != "BT" or loss.framework or not objective.has_response_advantage:
        return report
    if any(f.oracle == "layout" for f in report.failures):
        return report  # memory is what it reads wrongly, whatever A is
    one_each = replace(loss, adv_shape=ROWS, log=[])
    own_hp = {k: v for k, v in hp.items() if k in objective.hyperparameters}
    with contextlib.suppress(InputError):
        case = make_case(one_each, objective, objective.resolve(own_hp))
        batch = case.grid()
        only_on_tokens = torch.where(batch.mask, batch.adv, 0)
        # cheaper than all oracles: most losses fail here too
        if case.weight_error(batch.but(adv=only_on_tokens)).max() > case.tol:
            return report
        as_responses = _report_of(one_each, objective, agg, skip, hp)
        if as_responses:
            mixed = note("gradient", MIXED_ADVANTAGES.format(objective.name))
            return replace(as_responses, findings=[mixed, *as_responses.findings])
    return report


def _with_own_defaults(
    report: Report,
    loss: Loss,
    objective: Objective,
    agg: str,
    skip: Sequence[str],
    hp: dict[str, Any],
) -> Report:
    """Return the report. If it fails, and the loss agrees at its own default
    hyperparameters, every failure gets that as a cause, beside its own if that says why.
    """
    own_defaults = {k: v for k, v in loss.own_defaults.items() if v != report.hp.get(k)}
    if report or not own_defaults:
        return report
    try:
        if not _report_of(loss, objective, agg, skip, hp | own_defaults):
            return report
    except InputError:  # it is out of range
        return report
    options = " ".join(f"--hp {k}={v:g}" for k, v in own_defaults.items())
    whose = "the loss's own default" + ("s" if len(own_defaults) > 1 else "")
    words = f"it agrees with {options}, {whose}"

    def explained(finding: Finding) -> Finding:
        """Return the failure with these words beside the cause that it may have."""
        own_words = finding.cause if finding.is_explained else ""
        cause = "; ".join(filter(None, (own_words, words)))
        return replace(finding, cause=cause, cause_kind="why")

    findings = [
        explained(finding) if finding.severity == "failure" else finding
        for finding in report.findings
    ]
    return replace(report, findings=findings)


def entropy_coefficient(number: Any) -> float:
    """Return the declared coefficient of an entropy bonus as a float; raise InputError
    where it is no finite number of 0 or more.

    Args:
        number: as the user gave it.
    """
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 <= number < float("inf"):
        raise InputError(
            f"entropy_coef must be a finite number of 0 or more, got {repr(number)[:60]}."
        )
    return float(number)


def _may_fail_for_order(
    loss: Loss,
    objective: Objective,
    agg: str,
    skip: Sequence[str],
    hp: dict[str, Any],
    report: Report,
) -> bool:
    """Tell whether the order of the policies may be why a loss fails whose policies
    were read by position: a failure says so, or the loss agrees in the other order.
    """
    if any(INVERTED in failure.fault_ids for failure in report.failures):
        return True
    with contextlib.suppress(InputError):  # what it refuses in that order is no answer
        return bool(_report_of(loss.exchanged(), objective, agg, skip, hp))
    return False


def _report_of(
    loss: Loss, objective: Objective, agg: str, skip: Sequence[str], hp: dict[str, Any]
) -> Report:
    """Run all oracles on a loss that was read, and return the report."""
    start = time.perf_counter()
    own_hp = {k: v for k, v in hp.items() if k in objective.hyperparameters}
    case = make_case(loss, objective, objective.resolve(own_hp))
    if ENTROPY_COEF in hp and "entropy" in loss.reads:
        case.entropy_coef = entropy_coefficient(hp[ENTROPY_COEF])
    findings, outcomes = _run_every_oracle(case, skip)
    tolerances = {
        "weight, relative": case.tol,
        "silent below": EXACT_TOL if case.tol == HABIT_TOL else case.tol,
    }
    seconds = time.perf_counter() - start
    settings = "; ".join(filter(None, [loss.settings, as_shipped(loss, case)]))
    name = f"{objective.name} with {agg}" if agg else objective.name
    unchecked = not_checked(case) + not_run(_without_implied(outcomes, loss))
    all_hp = dict(case.hp)
    if case.entropy_coef:
        all_hp[ENTROPY_COEF] = case.entropy_coef
    # the proof is of J, and says nothing of a bonus
    is_proved_in_full = (
        outcomes.get("every-value") == "ok"
        and is_proved(case)
        and not case.entropy_coef
    )
    return Report(
        loss=loss.name,
        objective=name,
        hp=all_hp,
        findings=findings,
        read_as=loss.read_as,
        assumptions=assumptions(case),
        oracles=outcomes,
        tolerances=tolerances,
        seconds=seconds,
        settings=settings,
        not_checked=unchecked,
        proved_for=values_in_words(case.objective) if is_proved_in_full else "",
        unbound=loss.unbound,
    )


def _without_implied(outcomes: Mapping[str, str], loss: Loss) -> dict[str, str]:
    """Return what became of the oracles, without those whose answer another one implies.
    Those that the user skipped, or that a function of arrays gives nothing to look at,
    stay.
    """
    kept = dict(outcomes)
    for oracle in every():
        is_skipped = outcomes.get(oracle.name) == SKIPPED
        is_empty = loss.arrays is not None and oracle.name in NOT_EXERCISED
        if oracle.implied and not is_skipped and not is_empty:
            kept.pop(oracle.name, None)
    return kept


# the oracles of a function of another library that is not compiled
CORE = frozenset({"determinism", "gradient", "on-policy", "aggregation", "value"})
NOT_COMPILED = "without jax.jit a check of all batches takes minutes"


def _oracles_of(loss: Loss) -> list[Oracle]:
    """Return the oracles, of which those do not run that a function of another array
    library gives nothing to look at.
    """
    if loss.arrays is None:
        return every()
    reasons = dict(NOT_EXERCISED)
    if loss.arrays.is_slow:
        slow = {oracle.name: NOT_COMPILED for oracle in every()}
        reasons = {k: why for k, why in slow.items() if k not in CORE} | reasons

    def with_reason(oracle: Oracle) -> Oracle:
        """Return the oracle, with `not_run` replaced if there is a reason."""
        reason = reasons.get(oracle.name, "")
        return replace(oracle, not_run=lambda case: reason) if reason else oracle

    return [with_reason(oracle) for oracle in every()]


def _run_every_oracle(
    case: LossCase, skip: Sequence[str]
) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings of all oracles, and what became of each. Where the same batch
    has several answers, this alone is found, and no oracle can compare.
    """
    # the first oracle calls the loss twice
    first, *rest = _oracles_of(case.loss)
    findings, outcomes = run([first], case, skip)
    if not case.failed:
        other_findings, other_outcomes = run(rest, case, skip)
        findings = findings + other_findings
        outcomes = outcomes | other_outcomes
        if first.name not in skip and (late_findings := state(case)):
            case.failed.add("determinism")
            findings = late_findings
            outcomes = {first.name: "failure"}
    if "determinism" in case.failed:
        outcomes = {
            oracle.name: outcomes.get(oracle.name, "the same batch has other answers")
            for oracle in every()
        }
    return findings, outcomes


def as_shipped(loss: Loss, case: LossCase) -> str:
    """Return in words whether the framework's loss, as it is shipped, is the objective,
    where the loss was set up as the objective says; "" elsewhere. Only the weights and
    the aggregation decide.

    Args:
        loss: as read.
        case: the loss and its objective.
    """
    if loss.shipped is None:
        return ""
    shipped = make_case(infer_shapes(loss.shipped), case.objective, case.hp)
    found, _ = run(
        [
            oracle
            for oracle in every()
            if oracle.name in ("gradient", "on-policy", "aggregation")
        ],
        shipped,
        (),
    )
    wrong = any(f.severity == "failure" for f in found)
    return f"as shipped: {'NOT ' if wrong else ''}{case.objective.name}"


def not_checked(case: LossCase) -> list[str]:
    """Return what the verdict says nothing about, in words, beside the oracles that were
    not run; [] for nothing.

    Args:
        case: the loss and its objective.
    """
    out = []
    if case.ignores_sampler():
        out.append(sampler_words(case.objective.name))
    out += [*case.loss.unfed_words, *case.loss.switched_off]
    if case.loss.arrays is not None:
        out += case.loss.arrays.not_checked()
    if case.loss.never_given:
        names = ", ".join(case.loss.never_given)
        out.append(f"what it makes of {names}, which its trainer may give it")
    if "group" not in case.loss.reads and case.objective.agg == "group-token-mean":
        out.append("the mean within each prompt (the loss takes no group ids)")
    if case.loss.left_to_caller:
        out.append(case.loss.left_to_caller)
    return out


def assumptions(case: LossCase) -> list[str]:
    """Return what was assumed of the loss, a sentence each.

    Args:
        case: the loss and its objective.
    """
    from upref.verify.oracles import batches, unusual

    loss = case.loss
    out = list(case.loss.assumptions)
    if "group" not in loss.reads and case.objective.agg == "group-token-mean":
        out.append(
            "the loss takes no group ids: the batch counts as one group, as in DAPO's code, verl and TRL"
        )
    if case.objective.rejects:
        out += DIVISORS_OF_KEPT.get(case.objective.agg, [])
    if loss.adv_shape not in ("BT", ROWS, FIRST):
        out.append(f"it takes advantages as {SHAPES[loss.adv_shape]}: one per response")
    if loss.float_mask:
        out.append("it takes the mask as numbers")
    if loss.form == UNREDUCED:
        out.append(
            f"it returns an unreduced tensor: upref aggregates it by {case.objective.agg}"
        )
    if loss.form == PER_RESPONSE:
        out.append("it returns one number for each response: upref takes their mean")
    if loss.returns_live:
        out.append(
            "it calls .backward() itself and returns a loss that has a gradient too: their sum is compared"
        )
    elif loss.calls_backward:
        out.append(
            "it calls .backward() itself: the gradient that it leaves is the one compared"
        )
    if not batches.not_parallel(case):
        out.append(
            f"gradients of data-parallel ranks are averaged; {batches.rank_counts(case)}"
        )
    if loss.equal_cuts:
        out.append("micro-batches have equally many responses")
    if loss.wrapped:
        out.append("it returns a tuple or a dict; the loss is taken from it")
    if case.bounds(1.0) or case.bounds(-1.0):
        out.append(
            "a token exactly on a bound may have the weight of either side, or one "
            "between: which one depends on < or <=, on rounding and on torch's clamp, "
            "which changed in 2.14"
        )
    if not case.failed:
        out.append(unusual.covered(case))
    if case.single:
        out.append(
            "it has float32's precision: compared to 2e-5, at a distance from each bound above its rounding"
        )
    return out
