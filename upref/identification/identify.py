# SPDX-License-Identifier: Apache-2.0
"""`upref.identify`: which objective a loss is, by its gradients alone. One file:
batches, matches, faults in turn.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.aggregation import AGGREGATIONS, BY_LENGTH, Totals
from upref.errors import InputError
from upref.identification.identification import Identification, Match
from upref.registry import REDUCE, Objective, get, names
from upref.rollouts import Rollouts
from upref.transforms import CORRECTIONS
from upref.user_code import Loss, read
from upref.user_code.guard import state_restored
from upref.verify.explain import fits, reproduces, two_gradients
from upref.verify.factors import declared_aggregation
from upref.verify.faults import known
from upref.verify.faults.corrections import retuned
from upref.verify.faults.losses import (
    INVERTED_RATIO,
    LossFault,
    fault,
    words_for_other_kl,
)
from upref.verify.faults.targets import ETAS
from upref.verify.match import (
    Candidate,
    all_objectives,
    best_candidate,
    candidate_or_none,
    in_range,
)
from upref.verify.measure import (
    FLOAT32_TOL,
    LossCase,
    ignores_sampler,
    make_case,
    sampler_words,
    unfed_words,
    unit_weights,
)
from upref.verify.oracles.every_value import describe_few, every_value, is_proved
from upref.verify.oracles.numerics import clamps
from upref.verify.oracles.side_effects import in_training, mutation
from upref.verify.oracles.unusual import stress_findings
from upref.verify.oracles.weights import BESIDE_BOUND
from upref.verify.probe import SIGNS, BlackBox, measure, termed
from upref.verify.render import describe_pair
from upref.verify.report import UNKNOWN, Finding
from upref.weights.batches import (
    GRID_ADVANTAGES,
    LOG_R,
    MU,
    breakpoints,
    is_near_bound,
    make_batch,
    on_policy_batch,
    random_batch,
    random_batches,
)
from upref.weights.black_box import relative_error, same_numbers

# a batch, whether its advantages differ within a response, the loss's gradient
Grid = tuple[Rollouts, bool, Tensor]
RANDOM_BATCHES = 12  # random batches beside the grid
# bounds that agree so far are the same bound, moved by a constant in a logarithm
LOOSE_BOUND = 1e-3
BOTH_COMPARED = "it calls .backward() itself and returns a loss that has a gradient too: their sum is compared"
# a relative distance of gradients at which the nearest objective is no help
FAR_DISTANCE = 1.0
LEAST_FACTOR_APART = 1.25  # the factor between two values that batches must tell apart
MOST_CANDIDATES = 6  # whose distance is measured, where none fits


def identify(loss: Any) -> Identification:
    """Name the objective of a loss, with its hyperparameters, from its gradients.

    Args:
        loss: as for `upref.check`. A loss that takes no group ids gets a batch of one
            group.

    Returns:
        An Identification: true if an objective is named, printable, and JSON. Gradients
            are compared for |log r| <= 15,
        |A| from 1e-6 to 40 and responses of up to 520 tokens. The value of the loss, masked slots, and code that
        changes the advantages before the call are not tested.

    Raises:
        InputError: the loss cannot be run, or is not differentiable.
    """
    with state_restored() as changed:
        start = time.perf_counter()
        exchanged = read(loss)
        answer = _identify(exchanged, start)
        if exchanged.order_unknown and _may_fail_for_order(exchanged, answer):
            raise InputError(exchanged.order_unknown)
    notes = [f"it changes {what}: restored afterwards" for what in sorted(changed)]
    return replace(
        answer,
        assumptions=[*answer.assumptions, *notes],
        seconds=time.perf_counter() - start,
    )


def _may_fail_for_order(loss: Loss, answer: Identification) -> bool:
    """Tell whether the order of the policies may be why a loss is not identified whose
    policies were read by position.
    """
    if answer.kind in ("objective", "up"):
        return False
    if INVERTED_RATIO in answer.why:
        return True
    with contextlib.suppress(InputError):  # what it refuses in that order is no answer
        exchanged = _identify(loss.exchanged(), time.perf_counter())
        return exchanged.kind in ("objective", "up")
    return False


def _identify(loss: Loss, started: float) -> Identification:
    """Return the answer for a loss that was read, with the correction of its sampler
    and its writes into inputs.
    """
    measured = measure(loss)
    answer = _identify_weights(measured, started)
    if answer.on_sampler and answer.kind in ("objective", "up"):
        with contextlib.suppress(InputError):
            answer = _with_correction(measured, answer)
    in_place_writes = [
        f.regime for f in mutation.findings(measured.case) if f.severity == "failure"
    ]
    if not in_place_writes:
        return _with_proof(loss, answer)
    return replace(
        answer,
        kind="pitfall" if answer else "none",
        why="; ".join(filter(None, [answer.why, *in_place_writes])),
    )


def _with_proof(loss: Loss, answer: Identification) -> Identification:
    """Return the answer with its proof. An answer that an input disproves is a pitfall;
    one of which there is no proof stays as it is.
    """
    with contextlib.suppress(InputError):
        case = _case_as_printed(loss, answer)
        if case is None or every_value.not_run(case):
            return answer
        for finding in every_value.findings(case):
            why = _difference_elsewhere(finding)
            return replace(answer, kind="pitfall", why=why)
        if is_proved(case):
            return replace(answer, proved=describe_few(case))
    return answer


def _case_as_printed(loss: Loss, answer: Identification) -> LossCase | None:
    """Make the case of the loss and its first match, with the numbers and the aggregation
    that the report prints. None where these are not all of the answer.
    """
    if answer.kind not in ("objective", "up") or answer.on_sampler:
        return None
    match = answer.matches[0]
    objective = get(match.name)
    is_whole = match.same_kl and (match.own or match.agg in AGGREGATIONS)
    if not is_whole or (objective.batch_coupled and _undetermined_words(match)):
        return None
    if not match.own:
        objective = objective.aggregated(match.agg)
    printed = {
        name: value if value is None else float(f"{value:.7g}")
        for name, value in match.hp.items()
    }
    return make_case(loss, objective, objective.resolve(printed))


def _identify_weights(box: BlackBox, started: float) -> Identification:
    """Return the answer that the weights of a measured loss give: an objective, one
    with a fault, or neither.
    """
    candidates = _candidates(box)
    measured = _measure_batches(box)
    first_batch, _, first_gradient = measured[0]
    again = box.case.gradient(first_batch)
    if box.random or not same_numbers(again, first_gradient):
        why = "two calls on the same batch give different gradients"
        return _answer(box, started, "none", [_nearest(box, candidates, measured)], why)
    box, matches = _fitting_or_looser(box, candidates, measured)
    if matches:
        return _answer_for_matches(box, started, matches, measured)
    for try_other_box in (_identify_unscaled, _identify_with_other_kl):
        answer = try_other_box(box, started, candidates, measured)
        if answer is not None:
            return answer
    if box.batch_coupled:
        candidates = candidates + _uncoupled_candidates(box)
    nearest = _nearest(box, candidates, measured)
    for try_nearest in (_identify_partly_float32, _identify_pitfall, _identify_coupled):
        answer = try_nearest(box, started, nearest, measured)
        if answer is not None:
            return answer
    is_near = nearest.distance < FAR_DISTANCE and _has_its_bounds(box, nearest)
    why = BOTH_COMPARED if box.loss.returns_live else ""
    return _answer(box, started, "none", [nearest] if is_near else [], why)


def _fitting_or_looser(
    box: BlackBox, candidates: list[Candidate], measured: list[Grid]
) -> tuple[BlackBox, list[Match]]:
    """Return the box and the matches that fit it. Where a bound was computed in
    float32, the box is one that is compared less closely.
    """
    matches = _fitting_matches(box, candidates, measured)
    if box.batch_coupled:
        return box, matches
    if not matches and box.resolution < LOOSE_BOUND:
        loose = box.loosened(LOOSE_BOUND)
        refitted = _refit_loosely(loose, candidates)
        return (loose, refitted) if refitted else (box, [])
    if matches and box.agg and not matches[0].own and box.resolution < BESIDE_BOUND:
        # one of two bounds in float32: they differ by its rounding
        loose = box.loosened(BESIDE_BOUND)
        refitted = _refit_loosely(loose, candidates)
        if refitted and refitted[0].own:
            return loose, refitted
    return box, matches


def _answer_for_matches(
    box: BlackBox, started: float, matches: list[Match], measured: list[Grid]
) -> Identification:
    """Return the answer for matches: an objective, or a pitfall where something is
    wrong.
    """
    match = matches[0]
    deviations = _fault_words(box, match, measured)
    if match.own and not deviations:
        deviations += _stress_words(box, match)
    else:
        deviations += _deviations_of_match(box, match)
    kind = "pitfall" if deviations else _kind_of(match)
    return _answer(box, started, kind, matches, "; ".join(deviations))


def _identify_unscaled(
    box: BlackBox, started: float, candidates: list[Candidate], measured: list[Grid]
) -> Identification | None:
    """Return the answer for a loss whose weight at r = 1 is not A, as under a cap below
    1. `measure` divided that weight out as a factor; here it belongs to the weights
    again. None where no objective has such weights.
    """
    if box.scale == 1 or box.batch_coupled:
        return None
    unscaled = box.unscaled()
    refitted = [best_candidate(c.objective, unscaled) for c in candidates]
    matches = _fitting_matches(unscaled, refitted, measured)
    if not matches:
        return None
    return _answer_for_matches(unscaled, started, matches, measured)


def _identify_with_other_kl(
    box: BlackBox, started: float, candidates: list[Candidate], measured: list[Grid]
) -> Identification | None:
    """Return the answer for a loss with a KL term of an unusual form, which is
    subtracted first; None where it has none, or no match.
    """
    with_other_kl = termed(box)
    if not with_other_kl:
        return None
    matches = _fitting_matches(with_other_kl, _candidates(with_other_kl), measured)
    if not matches:
        return None
    match = matches[0]
    deviations = _fault_words(with_other_kl, match, measured) + _deviations_of_match(
        with_other_kl, match
    )
    return _answer(with_other_kl, started, "pitfall", matches, "; ".join(deviations))


def _identify_partly_float32(
    box: BlackBox, started: float, nearest: Match, measured: list[Grid]
) -> Identification | None:
    """Return the answer for a loss whose curve has jumps from rounding alone; None where
    the nearest match is farther than rounding explains.
    """
    if nearest.distance > FLOAT32_TOL or not nearest.name:
        return None
    deviations = _fault_words(box, nearest, measured)
    kind = "pitfall" if deviations else _kind_of(nearest)
    answer = _answer(box, started, kind, [nearest], "; ".join(deviations))
    assumed = "a part of it in float32: compared to 2e-5"
    return replace(answer, assumptions=[*answer.assumptions, assumed])


def _identify_pitfall(
    box: BlackBox, started: float, nearest: Match, measured: list[Grid]
) -> Identification | None:
    """Return the answer for a loss with a known fault on an objective that its jumps
    suggest; None where no fault fits.
    """
    pitfall = _find_pitfall(box, get(nearest.name), measured)
    if pitfall is None:
        return None
    match, known_fault, case, factor = pitfall

    def weights_with_fault(batch: Rollouts) -> Tensor:
        """Return the weights of the reference with the fault, times the factor."""
        weights = known_fault.change.weights(case.objective, case.hp, batch)
        return factor * (weights + box.kl_weights(batch))

    differences = _deviations_on_unusual_inputs(box, case, weights_with_fault)
    words = [
        known_fault.words,
        *_factor_words(factor, match.agg),
        *_kl_term_words(box, match),
        *differences,
    ]
    return _answer(box, started, "pitfall", [match], "; ".join(words))


def _identify_coupled(
    box: BlackBox, started: float, nearest: Match, measured: list[Grid]
) -> Identification | None:
    """Return the answer for a loss whose weights depend on whole batches or on groups;
    None where no such objective fits.
    """
    matches = _matches_of_whole_batches(box)
    if not matches:
        return None
    answer = _answer(box, started, "objective", matches, "")
    return replace(
        answer, not_checked=[*answer.not_checked, *_undetermined_words(matches[0])]
    )


def _has_its_bounds(box: BlackBox, match: Match) -> bool:
    """Tell whether the weight of a loss jumps where this objective's does. If not, it
    is near by accident.
    """
    objective = get(match.name)
    if objective.reads_mu or objective.batch_coupled or box.batch_coupled:
        return True
    hp = objective.surrogate_hyperparameters(_only_those_of(objective, match.hp))
    for A in SIGNS:
        due_bounds = breakpoints(objective, A, 0.02, **hp)
        found_bounds = box.bounds(A)
        if len(due_bounds) != len(found_bounds) or any(
            abs(due / found - 1) > LOOSE_BOUND
            for due, found in zip(due_bounds, found_bounds, strict=True)
        ):
            return False
    return True


def _matches_of_whole_batches(box: BlackBox) -> list[Match]:
    """Return the matches of objectives whose weights depend on the whole batch or on
    groups, at the hyperparameters of papers.
    """
    batches = [
        box.case.ready(on_policy_batch()),
        *map(box.case.visible_batch, random_batches(0, RANDOM_BATCHES, True)),
    ]
    measured = []
    for batch in batches:
        with contextlib.suppress(InputError):
            measured.append((batch, box.case.gradient(batch)))
    matches = []
    for objective in (get(name) for name in names() if get(name).batch_coupled):
        for hp in [
            {},
            *({"eta": eta} for eta in ETAS if "eta" in objective.hyperparameters),
        ]:
            case = LossCase(
                box.loss,
                objective,
                objective.resolve(hp),
                declared_aggregation(objective),
                tol=box.tol,
            )
            errors = [
                case.weight_error(batch, gradient / case.factors(batch)).max().item()
                for batch, gradient in measured
            ]
            if len(errors) > RANDOM_BATCHES / 2 and max(errors) <= 10 * box.tol:
                determined_hp = {
                    k: v
                    for k, v in case.hp.items()
                    if _is_determined(case, k, measured)
                }
                matches.append(
                    Match(
                        objective.name,
                        determined_hp,
                        objective.agg,
                        True,
                        not box.kl,
                        max(errors),
                        0.0,
                    )
                )
                break
    return matches


def _is_determined(
    case: LossCase, key: str, measured: list[tuple[Rollouts, Tensor]]
) -> bool:
    """Tell whether the weights on these batches differ at a larger and at a smaller
    value of the hyperparameter.
    """
    value = case.hp[key]
    if key == "beta" or value is None:
        return False

    def is_other(value: float) -> bool:
        """Tell whether the weights of some batch differ at this value."""
        changed_case = replace(case, hp=case.hp | {key: value})
        return any(
            not torch.equal(changed_case.expected(batch), case.expected(batch))
            for batch, _ in measured
        )

    other_values = (
        (value * LEAST_FACTOR_APART, value / LEAST_FACTOR_APART) if value else (1,)
    )
    return all(is_other(other) for other in other_values)


def _undetermined_words(match: Match) -> list[str]:
    """Return words for the hyperparameters whose value no batch shows."""
    defaults = get(match.name).hyperparameters
    names = [
        name
        for name, default in defaults.items()
        if name not in match.hp and name != "beta" and default is not None
    ]
    return [f"{', '.join(names)}: these batches do not tell the value"] if names else []


def _with_correction(box: BlackBox, answer: Identification) -> Identification:
    """Return the answer with the sampler correction of the loss. It stays as it is where
    the loss has no correction of CORRECTIONS.
    """
    matched = answer.matches[0]
    case = _case_of_match(box, matched)
    for name in CORRECTIONS:
        objective = get(f"{name}({matched.name})")
        uncorrected = replace(
            case,
            objective=objective,
            hp=objective.resolve(
                {k: v for k, v in matched.hp.items() if v is not None}
            ),
        )
        for hp in (
            {},
            *(known_fault.change.hp for known_fault in retuned(uncorrected)),
        ):
            corrected_case = replace(uncorrected, hp=uncorrected.hp | hp)
            batches = [
                corrected_case.ready(on_policy_batch()),
                corrected_case.stress_batch("sampler"),
                corrected_case.stress_batch("lengths"),
            ]
            if all(
                corrected_case.weight_error(batch, floor=1e-12).max()
                <= 10 * corrected_case.tol
                for batch in batches
            ):
                corrected_hp = matched.hp | {
                    k: v
                    for k, v in corrected_case.hp.items()
                    if k in ("is_min", "is_max")
                }
                unchecked = [
                    words
                    for words in answer.not_checked
                    if words != sampler_words(matched.name)
                ]
                found = replace(matched, name=objective.name, hp=corrected_hp)
                return replace(
                    answer, matches=[found], on_sampler=False, not_checked=unchecked
                )
    return answer


def _refit_loosely(box: BlackBox, candidates: list[Candidate]) -> list[Match]:
    """Return the matches of the candidates with a box that is compared less closely."""
    return _fitting_matches(
        box,
        [
            best_candidate(candidate.objective, box)
            for candidate in candidates
            if candidate.miss[0] < 0.1
        ],
        _measure_batches(box),
    )


def _kind_of(match: Match) -> str:
    return "up" if match.name.startswith("up(") else "objective"


def _answer(
    box: BlackBox, started: float, kind: str, matches: list[Match], why: str
) -> Identification:
    """Make an answer, with the bounds of the box and with what was not checked."""
    at_old_probability = " (π_old = 0.02)" if box.reads_mu else ""
    bounds = {
        f"{sign_words}{at_old_probability}": box.bounds(A)
        for sign_words, A in (("A > 0", 1.0), ("A < 0", -1.0))
    }
    loss = box.loss
    seconds = time.perf_counter() - started
    not_checked = []
    on_sampler = ignores_sampler(box.case)
    if on_sampler:
        not_checked.append(sampler_words(matches[0].name if matches else ""))
    not_checked += unfed_words(loss)
    if loss.form == "unreduced":
        not_checked.append("the aggregation, which its caller does")
    elif not loss.micro_batchable:
        not_checked.append("micro-batches")
    return Identification(
        loss.name,
        kind,
        matches,
        why,
        bounds,
        loss.read_as,
        _assumptions(box),
        not_checked,
        on_sampler,
        seconds,
    )


def _nearest(box: BlackBox, candidates: list[Candidate], measured: list[Grid]) -> Match:
    """Return the match that is nearest on the batches, among the MOST_CANDIDATES that are
    nearest on the curve.
    """
    nearest_on_curve = sorted(
        candidates,
        key=lambda candidate: (
            candidate.is_extreme,
            not in_range(candidate.objective, candidate.hp),
            candidate.unexplained,
            candidate.miss,
        ),
    )[:MOST_CANDIDATES]
    return min(
        (
            _compare_on_batches(box, candidate, measured)
            for candidate in nearest_on_curve
        ),
        key=lambda matched: (matched.mean, matched.distance),
    )


def _fitting_matches(
    box: BlackBox, candidates: list[Candidate], measured: list[Grid]
) -> list[Match]:
    """Return the matches of the candidates that agree on the curve and on every batch,
    the simplest first.
    """
    matches = (
        _compare_on_batches(box, candidate, measured)
        for candidate in candidates
        if candidate.fits
    )
    return sorted(
        (match for match in matches if match.distance <= 10 * box.tol),
        key=_simplicity_key,
    )


def _candidates(box: BlackBox) -> list[Candidate]:
    return [
        c for objective in all_objectives() if (c := candidate_or_none(objective, box))
    ] or _uncoupled_candidates(box)


def _uncoupled_candidates(box: BlackBox) -> list[Candidate]:
    """Return a candidate for each objective whose weight depends on the token alone."""
    return [
        best_candidate(objective, box)
        for objective in all_objectives()
        if not (
            objective.batch_coupled
            or objective.reads_mu
            or "entropy" in objective.reads
        )
    ]


# ---- batches -------------------------------------------------------------------------
def _measure_batches(box: BlackBox) -> list[Grid]:
    """Measure the loss on a batch of tokens, on batches of responses (their log-ratio
    is a mean, and a sum), and on random ones.
    """
    rng = np.random.default_rng(0)
    jump_points = [point for point, _ in box.jumps if not point.high_entropy]
    cases = [
        (A, mu, float(r))
        for A in GRID_ADVANTAGES
        for mu in MU
        for r in np.exp(LOG_R)
        if mu * r < 0.999
    ]
    for jump in jump_points:
        for A in (A for A in GRID_ADVANTAGES if A * jump.A > 0):
            for r in (jump.r * (1 - box.resolution), jump.r * (1 + box.resolution)):
                cases += [
                    (A, mu, r)
                    for mu in ([jump.mu] if box.reads_mu else MU)
                    if mu * r < 0.999
                ]
    # leave out ratios on a bound: there rounding decides, and so does torch's clamp
    bounds = [] if box.reads_mu else [jump.r for jump in jump_points]
    cases = [
        (A, mu, r)
        for A, mu, r in cases
        if not any(abs(r / bound - 1) < 0.9 * box.resolution for bound in bounds)
    ]
    cases = [cases[i] for i in rng.permutation(len(cases))]
    # the bounds of a response's ratio do not depend on mu
    few_cases = [(A, mu, r) for A, mu, r in cases if mu not in MU[1:] and r < 60]
    # each with whether the tokens of a response have advantages of their own
    batches = [
        (make_batch(cases, "token", True, rng), False),
        *((make_batch(few_cases, level, True, rng), False) for level in REDUCE),
    ]
    with_own_advantages = make_batch(cases, "token", False, rng)
    if box.accepts(with_own_advantages):
        batches.append((with_own_advantages, True))
    batches += [(random_batch(rng, one_adv=True), False) for _ in range(RANDOM_BATCHES)]
    ready = [(box.case.ready(batch), differ) for batch, differ in batches]
    return [(batch, differ, box.case.gradient(batch)) for batch, differ in ready]


def _weight_error(
    box: BlackBox,
    objective: Objective,
    hp: dict[str, Any],
    batch: Rollouts,
    gradient: Tensor,
) -> Tensor:
    """Return the relative difference of the weights on each token, 0 on masked slots.
    The hyperparameters have no beta: the KL term is the one measured of the loss.
    """
    expected = unit_weights(objective, batch, hp) + box.kl_weights(batch)
    found = (
        gradient
        / box.case.factors(batch, box.agg or declared_aggregation(objective))
        / box.scale
    )
    errors = relative_error(found, expected, batch.adv)
    if box.case.single:
        weights = partial(unit_weights, objective, hp=hp)
        errors = errors.masked_fill(is_near_bound(weights, batch), 0)
    return torch.where(batch.mask, errors, 0)


# ---- candidates ----------------------------------------------------------------------
def _compare_on_batches(
    box: BlackBox, candidate: Candidate, measured: list[Grid]
) -> Match:
    """Compare a candidate with the loss on all batches, and return it as a match."""
    errors = []
    for batch, advantages_differ, gradient in measured:
        if not (advantages_differ and candidate.objective.one_adv):
            errors.append(
                _weight_error(box, candidate.objective, candidate.hp, batch, gradient)
            )
    distance = max(error.max().item() for error in errors)
    mean = sum(error.clamp(max=1).sum().item() for error in errors) / sum(
        int(batch.mask.sum()) for batch, *_ in measured
    )
    hp = candidate.effective_hp() if in_range(candidate.objective, candidate.hp) else {}
    same_kl = _same_kl(box, candidate.objective)
    if candidate.objective.kl and same_kl:
        hp["beta"] = box.beta
    return Match(
        candidate.objective.name,
        hp,
        _aggregation_name(box),
        _has_own_aggregation(box, candidate.objective),
        same_kl,
        distance,
        mean,
    )


def _same_kl(box: BlackBox, objective: Objective) -> bool:
    """Tell whether the loss has no KL term, or the objective's own."""
    return not box.kl or (objective.kl == box.kl and box.beta > 0)


def _has_own_aggregation(box: BlackBox, objective: Objective) -> bool:
    """Tell whether the aggregation of the loss is the objective's. A loss that takes no
    group ids gets a batch of one group, where both token means are equal.
    """
    aggregations = {declared_aggregation(objective), box.agg}
    return len(aggregations) == 1 or (
        "group" not in box.loss.reads
        and aggregations == {"token-mean", "group-token-mean"}
    )


def _aggregation_name(box: BlackBox) -> str:
    if box.agg == "seq-mean-token-sum" and 0 < box.scale < 1:
        return f"{BY_LENGTH}, L = {1 / box.scale:.7g}"
    return box.agg


def _simplicity_key(match: Match) -> tuple[bool | int | str, ...]:
    """Return a key for sorting: an objective that has this aggregation itself goes
    first, then the one with fewer hyperparameters.
    """
    hyperparameter_count = sum(
        value is not None and name != "beta" for name, value in match.hp.items()
    )
    without_effect = len(get(match.name).hyperparameters) - len(match.hp)
    return (
        not match.own,
        not match.same_kl,
        not match.same_kl and not get(match.name).kl,
        match.name.startswith("up("),
        hyperparameter_count,
        without_effect,
        len(match.hp.keys() - {"beta"}),
        "anchored" in match.name,
        match.name,
    )


# ---- faults --------------------------------------------------------------------------
def _factor_words(factor: float, agg: str) -> list[str]:
    """Return words for a factor of every weight that the aggregation does not have."""
    words = []
    if factor < 0:
        words.append("the sign is flipped: J is returned where a loss, -J, should be")
    if abs(factor) != 1 and not agg.startswith(BY_LENGTH):
        words.append(f"every weight is {abs(factor):.7g} times what it should be")
    return words


def _fault_words(box: BlackBox, match: Match, measured: list[Grid]) -> list[str]:
    """Return in words what is wrong with a loss whose weights are right."""
    words = []
    two_gradients_found = _two_gradients_words(box, match, measured[0][0])
    # where two gradients are added up, they explain the factor
    factor = math.copysign(1.0, box.scale) if two_gradients_found else box.scale
    words += _factor_words(factor, _aggregation_name(box))
    words += [two_gradients_found] if two_gradients_found else []
    if box.agg and box.agg not in AGGREGATIONS:
        words.append(f"aggregated by {box.agg}")
    words += _kl_term_words(box, match) + [
        f.regime for f in in_training.findings(_case_of_match(box, match))
    ]
    batch = measured[0][0]
    if box.loss.micro_batchable and not get(match.name).batch_coupled:
        rows = torch.arange(len(batch.mask) // 8 * 8)  # TRL's micro-batches are equal
        batch = batch.rows(
            rows,
            Totals.of(
                batch.mask[rows], None if batch.group is None else batch.group[rows]
            ),
        )
        whole_gradient = box.case.gradient(batch)
        parts = torch.cat([box.case.gradient(part) for part in batch.split(4)])
        if (parts - whole_gradient).abs().max() > 1e-5 * whole_gradient.abs().max():
            words.append(
                "the mean is taken of each micro-batch: the gradients of parts do not add up to the batch's"
            )
    return words


def _two_gradients_words(box: BlackBox, match: Match, batch: Rollouts) -> str:
    """Return in words which second gradient the loss's own .backward() leaves, beside
    that of the loss that it returns; "" where it leaves none, or none that is known.
    """
    if not box.loss.returns_live:
        return ""
    case = _case_of_match(box, match)
    known_fault = reproduces(
        two_gradients(case, batch), case, batch, case.weights(batch), batch.mask
    )
    return known_fault.words if known_fault else ""


def _kl_term_words(box: BlackBox, match: Match) -> list[str]:
    """Return words for a KL term that is not the objective's."""
    if not box.kl or match.same_kl:
        return []
    return [words_for_other_kl(get(match.name), box.beta, box.kl)]


def _case_of_match(box: BlackBox, match: Match) -> LossCase:
    """Make the case of the loss and its match."""
    objective = get(match.name)
    hp = objective.resolve({k: v for k, v in match.hp.items() if v is not None})
    return replace(
        box.case,
        objective=objective,
        hp=hp,
        agg=box.agg or declared_aggregation(objective),
    )


# the keys of upref.weights.stress.AXES on which a loss is tested
AXES_COMPARED = ("ratios", "advantages", "certain tokens", "lengths")


def _stress_words(box: BlackBox, match: Match) -> list[str]:
    """Return in words the first failure on unusual inputs, as `check` finds it, of a
    loss with the right weights on ordinary ones.
    """
    if (
        box.scale != 1
        or not (match.own and match.same_kl)
        or box.resolution >= LOOSE_BOUND
        or box.batch_coupled
    ):
        return []
    case = _case_of_match(box, match)
    if not case.single and (
        failures := [
            finding for finding in clamps(case) if finding.severity == "failure"
        ]
    ):
        return [
            f"{finding.regime}: {_cause_or_difference(finding)}" for finding in failures
        ]
    # after the clamps: these may switch the case to float32, which allows more
    for axis in AXES_COMPARED:
        batch = case.stress_batch(axis)
        if failures := [
            finding
            for finding in stress_findings(case, axis, batch, ())
            if finding.severity == "failure"
        ]:
            return [f"{failures[0].regime}: {failures[0].difference}"]
    return []


def _cause_or_difference(finding: Finding) -> str:
    """Return the cause of a finding; where it is unknown, the difference."""
    return finding.cause if finding.cause != UNKNOWN else finding.difference


@dataclass
class Claim(LossCase):
    """A LossCase whose expected weights are those of the answer: an objective with a
    fault or a factor in it.
    """

    claimed_weights: Callable[[Rollouts], Tensor] = lambda batch: batch.logp

    def expected(self, batch: Rollouts) -> Tensor:
        return self.claimed_weights(batch)


def _deviations_of_match(box: BlackBox, match: Match) -> list[str]:
    """Return in words where unusual inputs show that the match, with its factor and KL
    term, is not what the loss does.
    """
    case = _case_of_match(box, match)
    # `kl_weights` has the KL term
    without_kl = {name: value for name, value in case.hp.items() if name != "beta"}
    return _deviations_on_unusual_inputs(
        box,
        case,
        lambda batch: (
            box.scale
            * (unit_weights(case.objective, batch, without_kl) + box.kl_weights(batch))
        ),
    )


def _deviations_on_unusual_inputs(
    box: BlackBox, case: LossCase, claimed_weights: Callable[[Rollouts], Tensor]
) -> list[str]:
    """Return in words the first unusual input on which the loss has other weights than
    these.
    """
    if box.resolution >= LOOSE_BOUND or box.batch_coupled:
        return []
    claim = Claim(
        **{item.name: getattr(case, item.name) for item in fields(case)},
        claimed_weights=claimed_weights,
    )
    for axis in (*AXES_COMPARED, "reference") if box.kl else AXES_COMPARED:
        if failures := [
            finding
            for finding in stress_findings(claim, axis, case.stress_batch(axis), ())
            if finding.severity == "failure"
        ]:
            return [_difference_elsewhere(failures[0])]
    return []


def _difference_elsewhere(finding: Finding) -> str:
    """Return in words where the loss has other weights than the answer."""
    expected, measured = describe_pair(finding.expected, finding.found)
    return f"it differs elsewhere: {finding.regime}: this gives {expected}, {measured} found"


# aggregation -> the objective that has PPO's clip with it
OBJECTIVE_OF_MEAN = {"seq-mean-token-mean": "grpo", "seq-mean-token-sum": "dr_grpo"}
# an objective, and the bounds of its clip
Base = tuple[Objective, dict[str, float]]


def _clip_widths(bounds: list[float]) -> tuple[float, float]:
    """Return the widths below and above 1 of a clip with these bounds, ascending. Where
    one bound is absent, its width is that of the other; where both are absent, 0.
    """
    # the bounds nearest to 1: a guard against overflow is farther from it
    low = next((1 - bound for bound in reversed(bounds) if 0 < bound < 1), None)
    high = next((bound - 1 for bound in bounds if 1 < bound < 10), None)
    return low or high or 0.0, high or low or 0.0


def _bases(box: BlackBox, nearest: Objective, low: float, high: float) -> list[Base]:
    """Return the objectives to search for a fault, with a clip of these widths."""
    clip = {"eps_low": low, "eps_high": high} if low else {}
    bases: list[Base] = []
    if not low or abs(low - high) < 1e-6:
        mean_objective = get(OBJECTIVE_OF_MEAN.get(box.agg, "ppo_clip"))
        bases.append((mean_objective, {"eps": low} if low else {}))
    return [*bases, (get("dapo"), clip), (get("gspo"), clip), (nearest, clip)]


def _mirrored_bases(box: BlackBox, low: float, high: float) -> list[Base]:
    """Return the objectives to search where π_θ and π_old may be exchanged: the bounds
    are then those of 1 / r.
    """
    if not high or not 0 < low < 1:
        return []
    clip = {"eps_low": 1 - 1 / (1 + high), "eps_high": 1 / (1 - low) - 1}
    bases: list[Base] = []
    if abs(clip["eps_low"] - clip["eps_high"]) < 1e-6:
        mean_objective = get(OBJECTIVE_OF_MEAN.get(box.agg, "ppo_clip"))
        bases.append((mean_objective, {"eps": clip["eps_low"]}))
    return [*bases, (get("dapo"), clip), (get("gspo"), clip)]


def _only_those_of(objective: Objective, hp: dict[str, float]) -> dict[str, float]:
    """Return those of the hyperparameters that the objective has."""
    return {
        name: value for name, value in hp.items() if name in objective.hyperparameters
    }


def _find_pitfall(
    box: BlackBox, nearest: Objective, measured: list[Grid]
) -> tuple[Match, LossFault, LossCase, float] | None:
    """Find a known fault of an objective with the clip that the jumps suggest, else of
    the nearest one. Return its match, the fault, the case that has it, and the factor.
    """
    bounds = sorted({round(r, 9) for A in SIGNS for r in box.bounds(A)})
    low, high = _clip_widths(bounds)
    mirrored_bases = _mirrored_bases(box, low, high)
    bases = [*mirrored_bases, *_bases(box, nearest, low, high)]
    batch, weights_of = _stack_batches(measured[:2] + measured[-RANDOM_BATCHES:])
    for number, (objective, clip) in enumerate(bases):
        is_mirrored = number < len(mirrored_bases)
        case = _case_of_base(box, objective, clip)
        # The factor that was measured on policy may be the fault's own: an inverted ratio
        # changes the sign there. So a fault that needs no factor goes first.
        weights_with_factor = weights_of(case)
        for factor in dict.fromkeys((1.0, box.scale)):
            found = weights_with_factor / factor - box.kl_weights(batch)
            candidates = _candidate_faults(case, batch, bounds, is_mirrored)
            known_fault = reproduces(candidates, case, batch, found, batch.mask)
            if not known_fault:
                continue
            no_fault = fault("", known_fault.kind)
            if fits(no_fault, case, batch, found, batch.mask, case.tol):
                return None  # right on all of this without any fault: it is wrong elsewhere
            if known_fault.meant:
                objective = get(known_fault.meant)
                widths = {"eps_low": low, "eps_high": high}
                shown_hp = _only_those_of(objective, widths)
            else:
                shown_hp = {k: v for k, v in case.hp.items() if clip.get(k) is not None}
            match = _match_of_pitfall(box, objective, shown_hp, case.agg)
            return match, known_fault, case, factor
    return None


def _case_of_base(
    box: BlackBox, objective: Objective, clip: dict[str, float]
) -> LossCase:
    """Return the loss beside an objective with this clip and without its KL term."""
    resolved = objective.resolve(_only_those_of(objective, clip))
    hp = {key: v for key, v in resolved.items() if key != "beta"}
    return LossCase(
        box.loss,
        objective,
        hp,
        box.agg or declared_aggregation(objective),
        tol=box.tol,
        edges=box.case.edges,
    )


def _candidate_faults(
    case: LossCase, batch: Rollouts, bounds: list[float], is_mirrored: bool
) -> Iterator[LossFault]:
    """Yield the faults to try on a base. Its bounds are mirrored by a wrong ratio alone,
    so a mirrored base is tried with the faults of the ratio.
    """
    yield from two_gradients(case, batch)
    for known_fault in known(
        "losses", case.objective, case.hp, [] if is_mirrored else bounds
    ):
        if known_fault.kind == "ratio" or not is_mirrored:
            yield known_fault


def _match_of_pitfall(
    box: BlackBox, objective: Objective, shown_hp: dict[str, Any], default_agg: str
) -> Match:
    """Return the match of an objective with a fault. It shows these hyperparameters,
    and the KL coefficient where the KL term is the objective's own.
    """
    same_kl = _same_kl(box, objective)
    shown = shown_hp | ({"beta": box.beta} if box.kl and same_kl else {})
    has_own_aggregation = _has_own_aggregation(box, objective)
    agg = _aggregation_name(box) or default_agg
    return Match(objective.name, shown, agg, has_own_aggregation, same_kl, 0.0, 0.0)


def _stack_batches(
    measured: list[Grid],
) -> tuple[Rollouts, Callable[[LossCase], Tensor]]:
    """Return batches of several widths as one, and the function from a case to the
    loss's weights on it.
    """
    T = max(batch.mask.shape[1] for batch, *_ in measured)

    def widened(x: Tensor, padding: Any) -> Tensor:
        """Return the tensor padded on the right to the width of the widest batch."""
        return torch.nn.functional.pad(x, (0, T - x.shape[1]), value=padding)

    padding_of_fields: dict[str, Any] = {
        "logp": -1.0,
        "logp_old": -1.1,
        "logp_ref": -1.2,
        "entropy": 1.0,
        "mask": False,
    }
    stacked: dict[str, Any] = {
        name: torch.cat(
            [widened(getattr(batch, name), padding) for batch, *_ in measured]
        )
        for name, padding in padding_of_fields.items()
    }
    # the padding of a response has its advantage
    A = torch.cat(
        [
            widened(batch.adv, 0.0).where(widened(batch.mask, False), batch.adv[:, :1])
            for batch, *_ in measured
        ]
    )

    def weights_of(case: LossCase) -> Tensor:
        """Return the gradients that were measured, without the aggregation of a case."""
        return torch.cat(
            [
                widened(gradient / case.factors(batch), 0.0)
                for batch, _, gradient in measured
            ]
        )

    return Rollouts(adv=A, **stacked), weights_of


def _assumptions(box: BlackBox) -> list[str]:
    """Return in words what the comparison assumes of the loss."""
    loss = box.loss
    sentences = list(box.loss.assumptions)
    if "group" not in loss.reads and box.agg == "token-mean":
        sentences.append(
            "the loss takes no group ids: token-mean and group-token-mean are one"
        )
    if box.resolution >= LOOSE_BOUND and not box.case.single:
        sentences.append(
            "its bounds are the objective's to 0.1 %, not exactly: compared no nearer to them"
        )
    if BESIDE_BOUND <= box.resolution < LOOSE_BOUND and not box.case.single:
        sentences.append("a bound is rounded to float32: compared no nearer to it")
    if box.case.single:
        sentences.append(
            "it computes in float32: compared to 0.2 %, bounds known to about 1e-6"
        )
    return sentences
