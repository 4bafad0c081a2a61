# SPDX-License-Identifier: Apache-2.0
"""`upref.identify`: which objective a loss is, by its gradients alone. One file:
batches, matches, faults in turn.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import chain
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
    SINGLE,
    LossCase,
    ignores_sampler,
    sampler_words,
    unfed_words,
    unit_weights,
)
from upref.verify.oracles.numerics import clamps
from upref.verify.oracles.side_effects import in_training, mutation
from upref.verify.oracles.unusual import stress_findings
from upref.verify.oracles.weights import BESIDE_BOUND
from upref.verify.probe import SIGNS, BlackBox, measure, termed
from upref.verify.render import describe_pair
from upref.verify.report import UNKNOWN, Finding
from upref.weights.batches import (
    LOG_R,
    MU,
    SIGNS as ALL_SIGNS,
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
RANDOM = 12  # random batches beside the grid
# bounds that agree so far are the same bound, moved by a constant in a logarithm
LOOSE = 1e-3
BOTH_COMPARED = "it calls .backward() itself and returns a loss that has a gradient too: their sum is compared"
FAR = 1.0  # a relative distance of gradients at which the nearest objective is no help
APART = 1.25  # the factor between two values that batches must tell apart
TRIED = 6  # candidates of which the distance is taken where none fits


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
        if exchanged.order_unknown and _order_decides(exchanged, answer):
            raise InputError(exchanged.order_unknown)
    notes = [f"it changes {what}: restored afterwards" for what in sorted(changed)]
    return replace(answer, assumptions=[*answer.assumptions, *notes])


def _order_decides(loss: Loss, answer: Identification) -> bool:
    """Whether a loss whose policies were read by position is wrong for their order, or
    may be so.
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
    """The answer for a loss that was read, with the correction of its sampler and its
    writes into inputs.
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
        return answer
    return replace(
        answer,
        kind="pitfall" if answer else "none",
        why="; ".join(filter(None, [answer.why, *in_place_writes])),
    )


def _identify_weights(box: BlackBox, start: float) -> Identification:
    """What the weights of a measured loss are: an objective, one with a fault, or
    neither.
    """
    tried = _candidates(box)
    grids = _grids(box)
    first_batch, _, first_gradient = grids[0]
    again = box.case.gradient(first_batch)
    if box.random or not same_numbers(again, first_gradient):
        why = "two calls on the same batch give different gradients"
        return _answer(box, start, "none", [_nearest(box, tried, grids)], why)
    box, matches = _fitting_or_looser(box, tried, grids)
    if matches:
        return _judge(box, start, matches, grids)
    for try_other_box in (_identify_unscaled, _identify_with_other_kl):
        answer = try_other_box(box, start, tried, grids)
        if answer is not None:
            return answer
    if box.batch_coupled:
        tried = tried + _uncoupled_candidates(box)
    nearest = _nearest(box, tried, grids)
    for try_nearest in (_identify_partly_float32, _identify_pitfall, _identify_coupled):
        answer = try_nearest(box, start, nearest, grids)
        if answer is not None:
            return answer
    is_near = nearest.distance < FAR and _has_its_bounds(box, nearest)
    why = BOTH_COMPARED if box.loss.returns_live else ""
    return _answer(box, start, "none", [nearest] if is_near else [], why)


def _fitting_or_looser(
    box: BlackBox, tried: list[Candidate], grids: list[Grid]
) -> tuple[BlackBox, list[Match]]:
    """The candidates that fit, and the box that they fit: it may be compared less
    closely, where a bound that was computed in float32 needs that.
    """
    matches = _fitting(box, tried, grids)
    if box.batch_coupled:
        return box, matches
    if not matches and box.resolution < LOOSE:
        loose = box.loosened(LOOSE)
        refitted = _refit_loosely(loose, tried)
        return (loose, refitted) if refitted else (box, [])
    if matches and box.agg and not matches[0].own and box.resolution < BESIDE_BOUND:
        # one of two bounds in float32: they differ by its rounding
        loose = box.loosened(BESIDE_BOUND)
        refitted = _refit_loosely(loose, tried)
        if refitted and refitted[0].own:
            return loose, refitted
    return box, matches


def _judge(
    box: BlackBox, start: float, matches: list[Match], grids: list[Grid]
) -> Identification:
    """The answer for matches: an objective, or a pitfall where something is wrong."""
    match = matches[0]
    wrong = _faults(box, match, grids)
    if match.own and not wrong:
        wrong += _stress_words(box, match)
    else:
        wrong += _claimed(box, match)
    kind = "pitfall" if wrong else _kind_of(match)
    return _answer(box, start, kind, matches, "; ".join(wrong))


def _identify_unscaled(
    box: BlackBox, start: float, tried: list[Candidate], grids: list[Grid]
) -> Identification | None:
    """The answer for a loss whose weight on policy is not A, as under a cap below 1:
    what was divided out as a factor belongs to its weights. None where no objective
    has such weights.
    """
    if box.scale == 1 or box.batch_coupled:
        return None
    unscaled = box.unscaled()
    refitted = [best_candidate(c.objective, unscaled) for c in tried]
    matches = _fitting(unscaled, refitted, grids)
    if not matches:
        return None
    return _judge(unscaled, start, matches, grids)


def _identify_with_other_kl(
    box: BlackBox, start: float, tried: list[Candidate], grids: list[Grid]
) -> Identification | None:
    """A loss with a KL term of an unusual form, which is divided out first."""
    with_other_kl = termed(box)
    if not with_other_kl:
        return None
    matches = _fitting(with_other_kl, _candidates(with_other_kl), grids)
    if not matches:
        return None
    match = matches[0]
    wrong = _faults(with_other_kl, match, grids) + _claimed(with_other_kl, match)
    return _answer(with_other_kl, start, "pitfall", matches, "; ".join(wrong))


def _identify_partly_float32(
    box: BlackBox, start: float, nearest: Match, grids: list[Grid]
) -> Identification | None:
    """A loss whose curve has jumps that rounding makes, and whose gradients have none."""
    if nearest.distance > SINGLE or not nearest.name:
        return None
    wrong = _faults(box, nearest, grids)
    kind = "pitfall" if wrong else _kind_of(nearest)
    answer = _answer(box, start, kind, [nearest], "; ".join(wrong))
    assumed = "a part of it in float32: compared to 2e-5"
    return replace(answer, assumptions=[*answer.assumptions, assumed])


def _identify_pitfall(
    box: BlackBox, start: float, nearest: Match, grids: list[Grid]
) -> Identification | None:
    """A loss with a known fault on one of the objectives that its jumps suggest."""
    pitfall = _pitfall(box, get(nearest.name), grids)
    if pitfall is None:
        return None
    match, known_fault, case, factor = pitfall

    def weights_with_fault(batch: Rollouts) -> Tensor:
        """The weights that the fault gives the reference, times the factor."""
        weights = known_fault.change.weights(case.objective, case.hp, batch)
        return factor * (weights + box.kl_weights(batch))

    differences = _limits(box, case, weights_with_fault)
    words = [
        known_fault.words,
        *_multiplied(factor, match.agg),
        *_term(box, match),
        *differences,
    ]
    return _answer(box, start, "pitfall", [match], "; ".join(words))


def _identify_coupled(
    box: BlackBox, start: float, nearest: Match, grids: list[Grid]
) -> Identification | None:
    """A loss whose weights depend on whole batches or on groups."""
    coupled = _of_whole_batches(box)
    if not coupled:
        return None
    answer = _answer(box, start, "objective", coupled, "")
    return replace(answer, not_checked=[*answer.not_checked, *_unread(coupled[0])])


def _has_its_bounds(box: BlackBox, match: Match) -> bool:
    """Whether the weight of a loss jumps where this objective's does: else it is near
    by accident.
    """
    objective = get(match.name)
    if objective.reads_mu or objective.batch_coupled or box.batch_coupled:
        return True
    hp = objective.of_surrogate(
        {k: v for k, v in match.hp.items() if k in objective.hyperparameters}
    )
    for A in SIGNS:
        due_bounds = breakpoints(objective, A, 0.02, **hp)
        found_bounds = box.bounds(A)
        if len(due_bounds) != len(found_bounds) or any(
            abs(x / y - 1) > LOOSE
            for x, y in zip(due_bounds, found_bounds, strict=True)
        ):
            return False
    return True


def _of_whole_batches(box: BlackBox) -> list[Match]:
    """Objectives whose weights depend on the whole batch or on groups, at the
    hyperparameters that papers have.
    """
    batches = [
        box.case.ready(on_policy_batch()),
        *map(box.case.visible_batch, random_batches(0, RANDOM, True)),
    ]
    asked = []
    for batch in batches:
        with contextlib.suppress(InputError):
            asked.append((batch, box.case.gradient(batch)))
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
                for batch, gradient in asked
            ]
            if len(errors) > RANDOM / 2 and max(errors) <= 10 * box.tol:
                told_hp = {k: v for k, v in case.hp.items() if _is_told(case, k, asked)}
                matches.append(
                    Match(
                        objective.name,
                        told_hp,
                        objective.agg,
                        True,
                        not box.kl,
                        max(errors),
                        0.0,
                    )
                )
                break
    return matches


def _is_told(case: LossCase, key: str, asked: list[tuple[Rollouts, Tensor]]) -> bool:
    """Whether the weights on these batches tell this value of the hyperparameter from
    a larger and from a smaller one.
    """
    value = case.hp[key]
    if key == "beta" or value is None:
        return False

    def is_other(value: float) -> bool:
        """Whether the weights of some batch are others at this value."""
        changed_case = replace(case, hp=case.hp | {key: value})
        return any(
            not torch.equal(changed_case.expected(batch), case.expected(batch))
            for batch, _ in asked
        )

    others = (value * APART, value / APART) if value else (1,)
    return all(is_other(other) for other in others)


def _unread(match: Match) -> list[str]:
    """Words for the hyperparameters that no batch has told."""
    defaults = get(match.name).hyperparameters
    names = [
        k
        for k, v in defaults.items()
        if k not in match.hp and k != "beta" and v is not None
    ]
    return [f"{', '.join(names)}: these batches do not tell the value"] if names else []


def _with_correction(box: BlackBox, answer: Identification) -> Identification:
    """The answer with the correction of its sampler, where the loss has one that upref
    knows.
    """
    matched = answer.matches[0]
    case = _against(box, matched)
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
            *(corrected_case.change.hp for corrected_case in retuned(uncorrected)),
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
                    x for x in answer.not_checked if x != sampler_words(matched.name)
                ]
                found = replace(matched, name=objective.name, hp=corrected_hp)
                return replace(
                    answer, matches=[found], on_sampler=False, not_checked=unchecked
                )
    return answer


def _refit_loosely(box: BlackBox, tried: list[Candidate]) -> list[Match]:
    """Those of the candidates that fit a box that is looked at less closely."""
    return _fitting(
        box,
        [best_candidate(c.objective, box) for c in tried if c.miss[0] < 0.1],
        _grids(box),
    )


def _kind_of(match: Match) -> str:
    return "up" if match.name.startswith("up(") else "objective"


def _answer(
    box: BlackBox, start: float, kind: str, matches: list[Match], why: str
) -> Identification:
    """Put an answer together with what the box shows of its bounds, and what was not
    checked.
    """
    of = " (π_old = 0.02)" if box.reads_mu else ""
    bounds = {f"{s}{of}": box.bounds(A) for s, A in (("A > 0", 1.0), ("A < 0", -1.0))}
    loss = box.loss
    seconds = time.perf_counter() - start
    unchecked = []
    on_sampler = ignores_sampler(box.case)
    if on_sampler:
        unchecked.append(sampler_words(matches[0].name if matches else ""))
    unchecked += unfed_words(loss)
    if loss.form == "unreduced":
        unchecked.append("the aggregation, which its caller does")
    elif not loss.micro_batchable:
        unchecked.append("micro-batches")
    rest = loss.read_as, _contract(box), unchecked, on_sampler, seconds
    return Identification(loss.name, kind, matches, why, bounds, *rest)


def _nearest(box: BlackBox, tried: list[Candidate], grids: list[Grid]) -> Match:
    """The match of least distance on the batches, of the candidates that are nearest on
    the curve.
    """
    nearest = sorted(
        tried,
        key=lambda candidate: (
            candidate.is_extreme,
            not in_range(candidate.objective, candidate.hp),
            candidate.unexplained,
            candidate.miss,
        ),
    )[:TRIED]
    return min(
        (_match(box, candidate, grids) for candidate in nearest),
        key=lambda matched: (matched.mean, matched.distance),
    )


def _fitting(box: BlackBox, tried: list[Candidate], grids: list[Grid]) -> list[Match]:
    """Those that agree on the curve and on every batch, the simplest first."""
    matches = (_match(box, c, grids) for c in tried if c.fits)
    return sorted((m for m in matches if m.distance <= 10 * box.tol), key=_simplest)


def _candidates(box: BlackBox) -> list[Candidate]:
    return [
        c for objective in all_objectives() if (c := candidate_or_none(objective, box))
    ] or _uncoupled_candidates(box)


def _uncoupled_candidates(box: BlackBox) -> list[Candidate]:
    """All objectives whose weight depends on the token alone, at their best
    hyperparameters.
    """
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
def _grids(box: BlackBox) -> list[Grid]:
    """Tokens, responses by mean and by sum, random ones."""
    rng = np.random.default_rng(0)
    jumps = [p for p, _ in box.jumps if not p.unsure]
    cases = [
        (A, mu, float(r))
        for A in ALL_SIGNS
        for mu in MU
        for r in np.exp(LOG_R)
        if mu * r < 0.999
    ]
    for p in jumps:
        for A in (A for A in ALL_SIGNS if A * p.A > 0):
            for r in (p.r * (1 - box.resolution), p.r * (1 + box.resolution)):
                cases += [
                    (A, mu, r)
                    for mu in ([p.mu] if box.reads_mu else MU)
                    if mu * r < 0.999
                ]
    # on a bound of its own, rounding decides; so does torch's clamp, for either sign
    bound_points = [p for p in jumps if not box.reads_mu]
    cases = [
        point
        for point in cases
        if not any(abs(point[2] / p.r - 1) < 0.9 * box.resolution for p in bound_points)
    ]
    cases = [cases[i] for i in rng.permutation(len(cases))]
    # the bounds of a response's ratio do not depend on mu
    few_cases = [point for point in cases if point[1] not in MU[1:] and point[2] < 60]
    grids = [
        (make_batch(cases, "token", True, rng), False),
        *((make_batch(few_cases, level, True, rng), False) for level in REDUCE),
    ]
    mixed = make_batch(cases, "token", False, rng)
    grids += [(mixed, True)] if box.accepts(mixed) else []
    grids += [(random_batch(rng, one_adv=True), False) for _ in range(RANDOM)]
    ready = [(box.case.ready(batch), mixed) for batch, mixed in grids]
    return [(batch, mixed, box.case.gradient(batch)) for batch, mixed in ready]


def _weight_error(
    box: BlackBox,
    objective: Objective,
    hp: dict[str, Any],
    batch: Rollouts,
    gradient: Tensor,
) -> Tensor:
    """Relative difference of the weights on each token, 0 on masked slots; hp without
    beta.
    """
    expected = unit_weights(objective, batch, hp) + box.kl_weights(batch)
    found = (
        gradient
        / box.case.factors(batch, box.agg or declared_aggregation(objective))
        / box.scale
    )
    apart = relative_error(found, expected, batch.adv)
    if box.case.single:
        apart = apart.masked_fill(
            is_near_bound(lambda x: unit_weights(objective, x, hp), batch), 0
        )
    return torch.where(batch.mask, apart, 0)


# ---- candidates ----------------------------------------------------------------------
def _match(box: BlackBox, candidate: Candidate, grids: list[Grid]) -> Match:
    """Compare a candidate with the loss on all batches."""
    errors = []
    for batch, mixed, gradient in grids:
        if not (mixed and candidate.objective.one_adv):
            errors.append(
                _weight_error(box, candidate.objective, candidate.hp, batch, gradient)
            )
    distance = max(x.max().item() for x in errors)
    mean = sum(x.clamp(max=1).sum().item() for x in errors) / sum(
        int(batch.mask.sum()) for batch, *_ in grids
    )
    hp = candidate.effective_hp() if in_range(candidate.objective, candidate.hp) else {}
    same_kl = _same_kl(box, candidate.objective)
    if candidate.objective.kl and same_kl:
        hp["beta"] = box.beta
    return Match(
        candidate.objective.name,
        hp,
        _agg(box),
        _has_own_aggregation(box, candidate.objective),
        same_kl,
        distance,
        mean,
    )


def _same_kl(box: BlackBox, objective: Objective) -> bool:
    """Whether it has no KL term, or the objective's own."""
    return not box.kl or (objective.kl == box.kl and box.beta > 0)


def _has_own_aggregation(box: BlackBox, objective: Objective) -> bool:
    """Whether the aggregation is the objective's; without group ids the batch is one
    group.
    """
    same = declared_aggregation(objective) == box.agg or (
        "group" not in box.loss.reads
        and {declared_aggregation(objective), box.agg}
        == {"token-mean", "group-token-mean"}
    )
    return same


def _agg(box: BlackBox) -> str:
    if box.agg == "seq-mean-token-sum" and 0 < box.scale < 1:
        return f"{BY_LENGTH}, L = {1 / box.scale:.7g}"
    return box.agg


def _simplest(match: Match) -> Any:
    """The objective whose own aggregation it is goes first, then the one with fewer
    hyperparameters.
    """
    plain = sum(v is not None and k != "beta" for k, v in match.hp.items())
    inert = len(get(match.name).hyperparameters) - len(match.hp)
    return (
        not match.own,
        not match.same_kl,
        not match.same_kl and not get(match.name).kl,
        match.name.startswith("up("),
        plain,
        inert,
        len(match.hp.keys() - {"beta"}),
        "anchored" in match.name,
        match.name,
    )


# ---- faults --------------------------------------------------------------------------
def _multiplied(k: float, agg: str) -> list[str]:
    """Words for a factor of every weight, where it is no part of the aggregation."""
    out = []
    if k < 0:
        out.append("the sign is flipped: J is returned where a loss, -J, should be")
    if abs(k) != 1 and not agg.startswith(BY_LENGTH):
        out.append(f"every weight is {abs(k):.7g} times what it should be")
    return out


def _faults(box: BlackBox, match: Match, grids: list[Grid]) -> list[str]:
    """What keeps a loss with the right weights from being right."""
    words = []
    twice = _two_gradients(box, match, grids[0][0])
    # two gradients are the factor
    factor = math.copysign(1.0, box.scale) if twice else box.scale
    words += _multiplied(factor, _agg(box))
    words += [twice] if twice else []
    if box.agg and box.agg not in AGGREGATIONS:
        words.append(f"aggregated by {box.agg}")
    words += _term(box, match) + [
        f.regime for f in in_training.findings(_against(box, match))
    ]
    batch = grids[0][0]
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


def _two_gradients(box: BlackBox, match: Match, batch: Rollouts) -> str:
    """In words, what its own .backward() leaves beside the gradient of the loss that it
    returns.
    """
    if not box.loss.returns_live:
        return ""
    case = _against(box, match)
    known_fault = reproduces(
        two_gradients(case, batch), case, batch, case.weights(batch), batch.mask
    )
    return known_fault.words if known_fault else ""


def _term(box: BlackBox, match: Match) -> list[str]:
    """A KL term that is not the objective's."""
    if not box.kl or match.same_kl:
        return []
    return [words_for_other_kl(get(match.name), box.beta, box.kl)]


def _against(box: BlackBox, match: Match) -> LossCase:
    """The loss compared with its match."""
    objective = get(match.name)
    hp = objective.resolve({k: v for k, v in match.hp.items() if v is not None})
    return replace(
        box.case,
        objective=objective,
        hp=hp,
        agg=box.agg or declared_aggregation(objective),
    )


# of upref.weights.stress.AXES
ASKED = ("ratios", "advantages", "certain tokens", "lengths")


def _stress_words(box: BlackBox, match: Match) -> list[str]:
    """What unusual inputs show of a loss that has the right weights on ordinary ones,
    as check asks them.
    """
    if (
        box.scale != 1
        or not (match.own and match.same_kl)
        or box.resolution >= LOOSE
        or box.batch_coupled
    ):
        return []
    case = _against(box, match)
    if not case.single and (
        found := [f for f in clamps(case) if f.severity == "failure"]
    ):
        return [f"{f.regime}: {_cause(f)}" for f in found]
    # after the clamps: what it forgives as float32 is not asked so nearly any more
    for axis in ASKED:
        batch = case.stress_batch(axis)
        if found := [
            f for f in stress_findings(case, axis, batch, ()) if f.severity == "failure"
        ]:
            return [f"{found[0].regime}: {found[0].difference}"]
    return []


def _cause(finding: Finding) -> str:
    """The cause of a finding; the difference that it shows where that is unknown."""
    return finding.cause if finding.cause != UNKNOWN else finding.difference


@dataclass
class Claim(LossCase):
    """A LossCase of which the weights are what is said of the loss: an objective with a
    fault in it.
    """

    said: Callable[[Rollouts], Tensor] = lambda batch: batch.logp

    def expected(self, batch: Rollouts) -> Tensor:
        return self.said(batch)


def _claimed(box: BlackBox, match: Match) -> list[str]:
    """Where the match, with its factor and KL term, is not what the loss does."""
    case = _against(box, match)
    plain = {k: v for k, v in case.hp.items() if k != "beta"}
    return _limits(
        box,
        case,
        lambda batch: (
            box.scale
            * (unit_weights(case.objective, batch, plain) + box.kl_weights(batch))
        ),
    )


def _limits(
    box: BlackBox, case: LossCase, said: Callable[[Rollouts], Tensor]
) -> list[str]:
    """What unusual inputs show of a loss that has these weights on ordinary ones."""
    if box.resolution >= LOOSE or box.batch_coupled:
        return []
    claim = Claim(**{f.name: getattr(case, f.name) for f in fields(case)}, said=said)
    for axis in (*ASKED, "reference") if box.kl else ASKED:
        if found := [
            f
            for f in stress_findings(claim, axis, case.stress_batch(axis), ())
            if f.severity == "failure"
        ]:
            expected, measured = describe_pair(found[0].expected, found[0].found)
            return [
                f"it differs elsewhere: {found[0].regime}: this gives {expected}, {measured} found"
            ]
    return []


# what a mean over tokens is called where PPO's clip has it
OBJECTIVE_OF_MEAN = {"seq-mean-token-mean": "grpo", "seq-mean-token-sum": "dr_grpo"}
# an objective, and the bounds of its clip
Base = tuple[Objective, dict[str, float]]


def _clip_widths(bounds: list[float]) -> tuple[float, float]:
    """The widths below and above 1 of a clip with these bounds; one stands for both
    where the other is absent, 0 where both are.
    """
    # nearest to 1: a guard is farther
    low = next((1 - x for x in reversed(bounds) if 0 < x < 1), None)
    high = next((x - 1 for x in bounds if 1 < x < 10), None)
    return low or high or 0.0, high or low or 0.0


def _bases(box: BlackBox, nearest: Objective, low: float, high: float) -> list[Base]:
    """The objectives on which a fault is looked for, with a clip of these widths."""
    clip = {"eps_low": low, "eps_high": high} if low else {}
    bases: list[Base] = []
    if not low or abs(low - high) < 1e-6:
        mean_objective = get(OBJECTIVE_OF_MEAN.get(box.agg, "ppo_clip"))
        bases.append((mean_objective, {"eps": low} if low else {}))
    return [*bases, (get("dapo"), clip), (get("gspo"), clip), (nearest, clip)]


def _mirrored_bases(box: BlackBox, low: float, high: float) -> list[Base]:
    """The same where old and new are exchanged: the bounds are those of 1 / r."""
    if not high or not 0 < low < 1:
        return []
    clip = {"eps_low": 1 - 1 / (1 + high), "eps_high": 1 / (1 - low) - 1}
    bases: list[Base] = []
    if abs(clip["eps_low"] - clip["eps_high"]) < 1e-6:
        mean_objective = get(OBJECTIVE_OF_MEAN.get(box.agg, "ppo_clip"))
        bases.append((mean_objective, {"eps": clip["eps_low"]}))
    return [*bases, (get("dapo"), clip), (get("gspo"), clip)]


def _taken(objective: Objective, hp: dict[str, float]) -> dict[str, float]:
    """Those of the hyperparameters that the objective has."""
    return {key: v for key, v in hp.items() if key in objective.hyperparameters}


def _pitfall(
    box: BlackBox, nearest: Objective, grids: list[Grid]
) -> tuple[Match, LossFault, LossCase, float] | None:
    """A known fault on the clip that the jumps suggest, else on the nearest objective;
    with the case that has it, and the factor."""
    bounds = sorted({round(r, 9) for A in SIGNS for r in box.bounds(A)})
    low, high = _clip_widths(bounds)
    mirrored_bases = _mirrored_bases(box, low, high)
    bases = [*mirrored_bases, *_bases(box, nearest, low, high)]
    batch, gradient = _stack(grids[:2] + grids[-RANDOM:])
    for n, (objective, clip) in enumerate(bases):
        is_mirrored = n < len(mirrored_bases)
        resolved = objective.resolve(_taken(objective, clip))
        hp = {key: v for key, v in resolved.items() if key != "beta"}
        case = LossCase(
            box.loss,
            objective,
            hp,
            box.agg or declared_aggregation(objective),
            tol=box.tol,
            edges=box.case.edges,
        )
        # the factor may be the fault's own: an inverted ratio turns the sign of what is
        # on policy
        plain = gradient(case)
        # a fault that needs no factor goes first
        for factor in dict.fromkeys((1.0, box.scale)):
            found = plain / factor - box.kl_weights(batch)
            candidates = (
                candidate
                for candidate in known(
                    "losses", objective, hp, [] if is_mirrored else bounds
                )
                if not is_mirrored or candidate.kind == "ratio"
            )
            faults = chain(two_gradients(case, batch), candidates)
            known_fault = reproduces(faults, case, batch, found, batch.mask)
            if known_fault:
                break
        if not known_fault:
            continue
        no_fault = fault("", known_fault.kind)
        if fits(no_fault, case, batch, found, batch.mask, case.tol):
            return None  # right on all of this without any fault: it is wrong elsewhere
        if known_fault.meant:
            objective = get(known_fault.meant)
            hp = clip = _taken(objective, {"eps_low": low, "eps_high": high})
        match = _match_of_pitfall(box, objective, case, hp, clip)
        return match, known_fault, case, factor
    return None


def _match_of_pitfall(
    box: BlackBox,
    objective: Objective,
    case: LossCase,
    hp: dict[str, Any],
    clip: dict[str, float],
) -> Match:
    """The match that is shown of an objective with a fault: its clip, and its KL term
    where that is the objective's own.
    """
    shown = {key: v for key, v in hp.items() if clip.get(key) is not None}
    same_kl = _same_kl(box, objective)
    if box.kl and same_kl:
        shown["beta"] = box.beta
    own = _has_own_aggregation(box, objective)
    agg = _agg(box) or case.agg
    return Match(objective.name, shown, agg, own, same_kl, 0.0, 0.0)


def _stack(grids: list[Grid]) -> tuple[Rollouts, Callable[[LossCase], Tensor]]:
    """Batches of other widths below each other, and the weights of the case on them."""
    T = max(batch.mask.shape[1] for batch, *_ in grids)

    def wide(x: Tensor, fill: Any) -> Tensor:
        """[B, T] of the widest batch, filled on the right."""
        return torch.nn.functional.pad(x, (0, T - x.shape[1]), value=fill)

    def stack(name: str, fill: Any) -> Tensor:
        """That field of all batches, below each other."""
        return torch.cat([wide(getattr(batch, name), fill) for batch, *_ in grids])

    fields: dict[str, Any] = {
        "logp": -1.0,
        "logp_old": -1.1,
        "logp_ref": -1.2,
        "entropy": 1.0,
        "mask": False,
    }
    A = torch.cat(
        [
            wide(batch.adv, 0.0).where(wide(batch.mask, False), batch.adv[:, :1])
            for batch, *_ in grids
        ]
    )
    fields = {k: stack(k, v) for k, v in fields.items()}
    return Rollouts(adv=A, **fields), lambda case: torch.cat(
        [wide(gradient / case.factors(batch), 0.0) for batch, _, gradient in grids]
    )


def _contract(box: BlackBox) -> list[str]:
    """What the comparison has assumed, in words."""
    loss = box.loss
    out = list(box.loss.assumptions)
    if "group" not in loss.reads and box.agg == "token-mean":
        out.append(
            "the loss takes no group ids: token-mean and group-token-mean are one"
        )
    if box.resolution >= LOOSE and not box.case.single:
        out.append(
            "its bounds are the objective's to 0.1 %, not exactly: compared no nearer to them"
        )
    if BESIDE_BOUND <= box.resolution < LOOSE and not box.case.single:
        out.append("a bound is rounded to float32: compared no nearer to it")
    if box.case.single:
        out.append(
            "it computes in float32: compared to 0.2 %, bounds known to about 1e-6"
        )
    return out
