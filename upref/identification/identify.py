# SPDX-License-Identifier: Apache-2.0
"""`upref.identify`: which objective a loss is, by its gradients alone.

The loss is measured, and the objectives that it may be are fitted (subject.py). WAYS is
the table of explanations: the first that applies, by its rank, is taken. It is completed
by what is beside the weights, and printed as the answer (explanation.py).
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from upref.aggregation import AGGREGATIONS
from upref.errors import InputError
from upref.identification.coupled import explain_coupled, undetermined
from upref.identification.deviations import (
    beside_weights,
    elsewhere,
    failures_of,
    find_deviations,
    on_unusual_inputs,
)
from upref.identification.explanation import Explanation, answer
from upref.identification.identification import Identification, Match
from upref.identification.pitfalls import explain_pitfall, only_those_of
from upref.identification.subject import LOOSE_BOUND, Subject
from upref.registry import get
from upref.transforms import CORRECTIONS
from upref.user_code import Loss, read
from upref.user_code.guard import state_restored
from upref.verify.faults.corrections import retuned
from upref.verify.finding import Cause
from upref.verify.match import find_candidates
from upref.verify.measure import FLOAT32_TOL, LossCase, make_case
from upref.verify.oracles.every_value import prove_few
from upref.verify.oracles.side_effects import mutation
from upref.verify.oracles.weights import BESIDE_BOUND
from upref.verify.probe import SIGNS, measure, measure_batches, termed
from upref.weights.batches import USUAL_MU, breakpoints, on_policy_batch
from upref.weights.black_box import same_numbers

TWO_ANSWERS = Cause("two calls on the same batch give different gradients")
BOTH_COMPARED = Cause(
    "it calls .backward() itself and returns a loss that has a gradient too: their sum is compared"
)
# a relative distance of gradients at which the nearest objective is no help
FAR_DISTANCE = 1.0


def identify(loss: Any) -> Identification:
    """Name the objective of a loss, with its hyperparameters, from its gradients.

    Args:
        loss: as for `upref.check`. A loss that takes no group ids gets a batch of one
            group.

    Returns:
        An Identification: true if an objective is named, printable, and JSON. Gradients
        are compared for |log r| <= 15, |A| from 1e-6 to 40 and responses of up to 520
        tokens. The value of the loss, NaN in masked slots, and code that changes the
        advantages before the call are not tested.

    Raises:
        InputError: the loss cannot be run, or is not differentiable.
    """
    with state_restored() as changed:
        start = time.perf_counter()
        loss_as_read = read(loss)
        explanation = explain_loss(loss_as_read)
        if loss_as_read.order_unknown and _may_fail_for_order(explanation):
            raise InputError(loss_as_read.order_unknown)
        identification = answer(explanation)
    notes = [f"it changes {what}: restored afterwards" for what in sorted(changed)]
    return replace(
        identification,
        assumptions=[*identification.assumptions, *notes],
        seconds=time.perf_counter() - start,
    )


def explain_loss(loss: Loss) -> Explanation:
    """Return what a loss is: the first of WAYS that applies, with the sampler's
    correction, the inputs that it changes, and the proof.

    Args:
        loss: as read.

    Raises:
        InputError: the loss cannot be run, or is not differentiable.
    """
    box = measure(loss)
    subject = Subject(box, measure_batches(box), find_candidates(box))
    found = (way.explain(subject) for way in sorted(WAYS, key=lambda way: way.rank))
    explanation = next(filter(None, found))
    return _proved(_with_writes(_with_correction(explanation)))


def _may_fail_for_order(explanation: Explanation) -> bool:
    """Tell whether the order of the policies may be why a loss is not identified whose
    policies were read by position: its ratio is inverted, or it is identified with the
    two exchanged.
    """
    if explanation.is_named:
        return False
    if explanation.has_fault("ratio-inverted"):
        return True
    with contextlib.suppress(InputError):  # what it refuses in that order is no answer
        return explain_loss(explanation.subject.loss.exchanged()).is_named
    return False


# ---- the ways ------------------------------------------------------------------------
def _as_noise(subject: Subject) -> Explanation | None:
    """Explain a loss of which two calls give two gradients: nothing is known of it but
    the nearest objective. None for any other loss.
    """
    first = subject.batches[0]
    again = subject.box.case.gradient(first.batch)
    if subject.box.random or not same_numbers(again, first.gradient):
        return Explanation(subject, [subject.nearest], (TWO_ANSWERS,), is_none=True)
    return None


def _as_objective(subject: Subject) -> Explanation | None:
    """Explain a loss whose weights objectives have, with what is wrong beside the
    weights; None where no objective has them.
    """
    if not subject.matches:
        return None
    wrong = find_deviations(subject, subject.matches[0])
    return Explanation(subject, subject.matches, tuple(wrong))


def _with_rounded_bound(subject: Subject) -> Explanation | None:
    """Explain a loss one of whose two bounds is in float32. Compared no nearer than its
    rounding, it is an objective with its own aggregation; else it is one of another
    aggregation. None for any other loss.
    """
    box = subject.box
    if box.batch_coupled or subject.has_rounded_bounds or not box.agg:
        return None
    if not subject.matches or subject.matches[0].own:
        return None
    loose = subject.loosened(BESIDE_BOUND)
    if not loose.matches or not loose.matches[0].own:
        return None
    return _as_objective(loose)


def _with_loose_bounds(subject: Subject) -> Explanation | None:
    """Explain a loss whose bounds are an objective's up to a constant in a logarithm
    (LOOSE_BOUND); None for any other.
    """
    if subject.box.batch_coupled or subject.is_loose:
        return None
    return _as_objective(subject.loosened(LOOSE_BOUND))


def _with_factor_in_weights(subject: Subject) -> Explanation | None:
    """Explain a loss whose weight at r = 1 is not A, as under a cap below 1. The
    measurement divided that weight out as a factor; here it belongs to the weights
    again. None where no objective has them then.
    """
    box = subject.box
    if box.scale == 1 or box.batch_coupled:
        return None
    return _as_objective(subject.refitted(box.unscaled()))


def _with_other_kl(subject: Subject) -> Explanation | None:
    """Explain a loss with a KL term of an unusual form, which is subtracted first; None
    where there is no such term, or no objective has the weights that are left.
    """
    box = termed(subject.box)
    if box is None:
        return None
    other = replace(subject, box=box, candidates=find_candidates(box))
    if not other.matches:
        return None
    match = other.matches[0]
    why = (*beside_weights(other, match), *on_unusual_inputs(other, match))
    return Explanation(other, other.matches, why)


def _partly_in_float32(subject: Subject) -> Explanation | None:
    """Explain a loss whose curve has jumps from rounding alone: the nearest objective
    is as near as float32 allows. None where it is not.
    """
    nearest = subject.nearest
    if nearest.distance > FLOAT32_TOL or not nearest.name:
        return None
    wrong = beside_weights(subject, nearest)
    assumed = "a part of it in float32: compared to 2e-5"
    return Explanation(subject, [nearest], tuple(wrong), assumptions=(assumed,))


def _as_none(subject: Subject) -> Explanation:
    """Explain a loss that nothing else explains: as none, with the nearest objective
    where it jumps at the same ratios; only its name where it is FAR_DISTANCE or more
    away.
    """
    nearest = subject.nearest
    why = (BOTH_COMPARED,) if subject.loss.returns_live else ()
    none = Explanation(subject, [], why, is_none=True)
    if not nearest.name or not _has_its_bounds(subject, nearest):
        return none
    if nearest.distance < FAR_DISTANCE:
        return replace(none, matches=[nearest])
    return replace(none, far=nearest.name)


@dataclass(frozen=True)
class Way:
    """One way to explain a loss.

    Attributes:
        rank: of the ways that apply, the one of the lowest rank is the answer.
        explain: from the loss to the explanation, None where it does not apply.
    """

    rank: int
    explain: Callable[[Subject], Explanation | None]


WAYS = (
    Way(10, _as_noise),
    Way(20, _with_rounded_bound),
    Way(30, _as_objective),
    Way(40, _with_loose_bounds),
    Way(50, _with_factor_in_weights),
    Way(60, _with_other_kl),
    Way(70, _partly_in_float32),
    Way(80, explain_pitfall),
    Way(90, explain_coupled),
    Way(100, _as_none),
)


def _has_its_bounds(subject: Subject, match: Match) -> bool:
    """Tell whether the weight of a loss jumps where this objective's does. If not, it
    is near by accident.
    """
    box = subject.box
    objective = get(match.name)
    if objective.reads_mu or objective.batch_coupled or box.batch_coupled:
        return True
    hp = objective.surrogate_hyperparameters(only_those_of(objective, match.hp))
    for A in SIGNS:
        due = breakpoints(objective, A, USUAL_MU, **hp)
        found = box.bounds(A)
        if len(due) != len(found):
            return False
        pairs = zip(due, found, strict=True)
        if any(abs(bound / jump - 1) > LOOSE_BOUND for bound, jump in pairs):
            return False
    return True


# ---- what is beside the weights ------------------------------------------------------
def _with_correction(explanation: Explanation) -> Explanation:
    """Return the explanation with the sampler correction of the loss. It stays as it is
    where the loss has no correction of CORRECTIONS, or is not named.
    """
    if not explanation.is_named or not explanation.ignores_sampler:
        return explanation
    match = explanation.match
    with contextlib.suppress(InputError):
        for case in _corrected_cases(explanation):
            if _has_its_weights(case):
                shown = {k: v for k, v in case.hp.items() if k in ("is_min", "is_max")}
                hp = match.hp | shown
                corrected = replace(match, name=case.objective.name, hp=hp)
                return replace(explanation, matches=[corrected], is_corrected=True)
    return explanation


def _corrected_cases(explanation: Explanation) -> Iterator[LossCase]:
    """Yield the match with each correction, at the default bounds and at others."""
    match = explanation.match
    case = explanation.subject.case_of(match)
    given = {name: value for name, value in match.hp.items() if value is not None}
    for name in CORRECTIONS:
        objective = get(f"{name}({match.name})")
        corrected = replace(case, objective=objective, hp=objective.resolve(given))
        yield corrected
        for known_fault in retuned(corrected):
            yield replace(corrected, hp=corrected.hp | known_fault.change.hp)


def _has_its_weights(case: LossCase) -> bool:
    """Tell whether a loss has the weights of its case where the sampler is far away."""
    batches = [
        case.ready(on_policy_batch()),
        case.stress_batch("sampler"),
        case.stress_batch("lengths"),
    ]
    return all(
        case.weight_error(batch, floor=1e-12).max() <= 10 * case.tol
        for batch in batches
    )


def _with_writes(explanation: Explanation) -> Explanation:
    """Return the explanation with the inputs that the loss changes in place."""
    findings = mutation.findings(explanation.subject.box.case)
    return explanation.but(*(Cause(f.regime) for f in failures_of(findings)))


def _proved(explanation: Explanation) -> Explanation:
    """Return the explanation with its proof. What an input disproves is a pitfall; what
    is not proved stays as it is.
    """
    with contextlib.suppress(InputError):
        case = _case_as_printed(explanation)
        if case is None:
            return explanation
        finding, proved = prove_few(case)
        if finding:
            return replace(explanation, why=(elsewhere(finding),))
        return replace(explanation, proved=proved)
    return explanation


def _case_as_printed(explanation: Explanation) -> LossCase | None:
    """Make the case of the loss and its first match, with the numbers and the aggregation
    that the report prints. None where these are not all of the answer.
    """
    if not explanation.is_named or explanation.ignores_sampler:
        return None
    match = explanation.match
    objective = get(match.name)
    # a proof has no fixed length by which a loss divides
    has_no_length = match.length is None
    has_named_sum = match.own or match.agg in AGGREGATIONS
    is_whole = match.same_kl and has_no_length and has_named_sum
    if not is_whole or (objective.batch_coupled and undetermined(match)):
        return None
    if not match.own:
        objective = objective.aggregated(match.agg)
    printed = {
        name: value if value is None else float(f"{value:.7g}")
        for name, value in match.hp.items()
    }
    loss = explanation.subject.loss
    return make_case(loss, objective, objective.resolve(printed))
