# SPDX-License-Identifier: Apache-2.0
"""Find why a loss is wrong: search for the known fault that, put into the reference,
reproduces the loss's weights.
"""

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from upref.aggregation import KEPT_MEAN
from upref.errors import InputError
from upref.registry import Objective, get, names
from upref.rollouts import Rollouts
from upref.transforms import CORRECTIONS, up
from upref.user_code import ROWS
from upref.verify.factors import (
    FACTORS,
    aggregation_id,
    aggregation_words,
    declared_aggregation,
)
from upref.verify.faults import first_fitting, hyperparameter_id, known
from upref.verify.faults.batch_reading import floored, left_out, reweighted
from upref.verify.faults.corrections import corrected, misread_bands, retuned
from upref.verify.faults.denominators import (
    OF_LENGTHS,
    WHERE_LENGTHS_EQUAL,
    batches_of_equal_lengths,
    divided,
    equal_length_faults,
    group_order_faults,
    kept_faults,
    rejected_by_ratio,
)
from upref.verify.faults.losses import (
    KL_MISSING,
    OTHER_KL,
    LossFault,
    fault,
    kl_added,
    kl_faults,
    ratio_power_faults,
    shape_of,
    words_for_other_kl,
)
from upref.verify.faults.measured import PART_IN_LOW_PRECISION
from upref.verify.finding import NO_CAUSE, Cause
from upref.verify.kl_terms import (
    TERM_OF,
    kl_slope,
    possible_terms,
    term_coefficient,
    term_slope,
)
from upref.verify.measure import (
    BESIDE_TIE,
    SLACK_OF_TIE,
    LossCase,
    make_case,
    unit_weights,
)
from upref.verify.synthesis.search import comparison_for_every_value, edited
from upref.weights.batches import (
    OFF_EDGES,
    SINGLE_EDGES,
    random_batch,
    single_token_responses,
)
from upref.weights.black_box import relative_error

SEARCH_SECONDS = 6.0  # of CPU time, for the cause of one difference
# the same where the search begins again with one advantage for each response
MORE_SECONDS = 3.0
BESIDE = 0.01  # relative distance to a ratio at which the loss changes
MOST_KL_TERMS = 3  # that are tried beside a fault of the rest
FEW = 24  # responses of the batch that each fault is compared on first
LEAST_ANSWERS = 3  # other batches on which a cause must hold
NO_GRADIENT = fault(
    "no gradient reaches log_prob: it is detached, or rounded away",
    "stop-gradient",
    id="no-gradient",
    scale=lambda batch: 0.0,
)


def _has_gradient(case: LossCase) -> bool:
    """Return whether any call of the loss so far had a gradient."""
    for question in case.loss.log:
        if question is not None and question.method == "measured":
            _, gradient = question.answer
            if gradient.any():
                return True
    return False


def explain(
    case: LossCase,
    batch: Rollouts,
    found: Tensor,
    ignore: Tensor,
    bounds: list[float],
    seconds: float = SEARCH_SECONDS,
) -> LossFault | None:
    """Return the first known fault that reproduces the weights found, on every compared
    token of the batch and on other batches.

    The order is: no gradient at all; other hyperparameters and KL terms; the catalogue
    of losses; faults of the batch's reading, of corrections and of denominators; other
    objectives. Then two faults together, one of the KL term and one of the rest. Then
    one edit of the objective's formula. Last, any objective, at hyperparameters that are
    recovered from the loss. Where the time is over, `case.search_ended` is set.

    Args:
        case: the loss and its objective.
        batch: a batch on which weights differ.
        found: the loss's weights on it, [B, T].
        ignore: tokens at a bound, where rounding decides, [B, T].
        bounds: ratios at which the loss was seen to change.
        seconds: the CPU time that the search may take.

    Returns:
        The fault, or None.
    """
    compared = batch.mask & ~ignore
    time_left = SearchTime(case, seconds)
    confirmation = _measure_confirmation(case, *_beside_measured_bounds(case, bounds))
    difference = Difference(
        case, batch, found, compared, bounds, confirmation, time_left
    )
    single_faults = chain(
        [] if _has_gradient(case) else [NO_GRADIENT],
        two_gradients(case, batch),
        by_fixed_length(case),
        kept_faults(case),
        _other_hyperparameters(case, bounds),
        _other_kl(case, batch, found, compared),
        _kl_aggregated(case),
        known("losses", case.objective, case.hp, bounds),
        group_order_faults(case),
        reweighted(case),
        left_out(case),
        floored(case),
        rejected_by_ratio(case),
        misread_bands(case),
        retuned(case),
        divided(case),
        equal_length_faults(case),
        ratio_power_faults(case.objective, case.hp, case.scale),
        _other_objectives(case),
        corrected(case),
    )

    def holds_elsewhere(candidate: LossFault) -> bool:
        """Return whether the fault fits other batches too: one of lengths also long
        responses, and other hyperparameters also ratios beside their own bounds.
        """
        if not confirmation.fits(candidate, case):
            return False
        more = [case.stress_batch("lengths")] if candidate.id in OF_LENGTHS else []
        if candidate.kind == "hyperparameter":
            more.append(_beside_bounds_of(case, candidate.change.hp))
        if candidate.id == WHERE_LENGTHS_EQUAL:
            more += batches_of_equal_lengths(case)
        return _measure_on(case, more).fits(candidate, case)

    def first(faults: Iterable[LossFault]) -> LossFault | None:
        """Return the first fault that fits this batch and others."""
        candidates = filter(holds_elsewhere, time_left.within(faults))
        return reproduces(candidates, case, batch, found, compared)

    known_fault = first(single_faults)
    if known_fault is not None and known_fault.id in NUMBERS_ALONE:
        # it says by how much the weights are off, and an edit says why
        return _one_edit(difference) or known_fault
    return (
        known_fault
        or _two_faults(difference)
        or _one_edit(difference)
        or first(_other_objectives_as_recovered(case))
    )


T = TypeVar("T")


class SearchTime:
    """The CPU time that a search for a cause may take.

    Args:
        case: it is told where the search ended without a cause.
        seconds: of CPU time.
    """

    def __init__(self, case: LossCase, seconds: float) -> None:
        self.case = case
        self.end = time.process_time() + seconds

    def within(self, candidates: Iterable[T]) -> Iterator[T]:
        """Yield the candidates until the time is over; then set `case.search_ended`."""
        for candidate in candidates:
            if time.process_time() > self.end:
                self.case.search_ended = True
                return
            yield candidate


def cause_with_one_advantage(case: LossCase) -> Cause:
    """Search for a cause with one advantage for each response, where the objective's
    formula has no other: a loss may read the A of a response off one of its tokens.

    Args:
        case: the loss, which takes advantages of tokens, and its objective.

    Returns:
        The cause; an empty one where there is none, where such advantages make no weight
        wrong, and where no search applies: a framework's loss, an objective with
        advantages of tokens, or a search that has used up its time before.
    """
    loss = case.loss
    has_own = loss.adv_shape == "BT" and case.objective.has_response_advantage
    if loss.framework or not has_own or case.search_ended:
        return NO_CAUSE
    with contextlib.suppress(InputError):  # it refuses such advantages
        one_each = replace(loss, adv_shape=ROWS, log=[])
        case_of_rows = make_case(one_each, case.objective, case.hp)
        batch = case_of_rows.grid()
        found = case_of_rows.kept_weights(batch)
        ties = case_of_rows.is_on_bound(batch)
        errors = case_of_rows.weight_error(batch, found)
        if errors.masked_fill(ties, 0).max() <= case.tol:
            return NO_CAUSE
        known_fault = explain(case_of_rows, batch, found, ties, [], MORE_SECONDS)
        if known_fault is not None and known_fault.id not in OF_ONE_SLOT:
            words = f"{known_fault.words} (where each response has one A)"
            return replace(known_fault.cause, words=words)
    return NO_CAUSE


# of a response with one A, only what masked slots hold tells them from other faults
OF_ONE_SLOT = ("advantages-one-token-late", "advantages-one-token-early")
NUMBERS_ALONE = ("weights-scaled-by-sign",)  # ids of faults that say how much, not why


def _beside_bounds_of(case: LossCase, changed: dict[str, Any]) -> Rollouts:
    """Return the grid around the bounds that these hyperparameters make, farther from
    each than float32 rounds it.
    """
    without_kl = {name: value for name, value in changed.items() if name != "beta"}
    return case.grid(edges=SINGLE_EDGES, **without_kl)


def _beside_measured_bounds(case: LossCase, bounds: list[float]) -> list[Rollouts]:
    """Return single tokens a little below and above each ratio at which the loss was seen
    to change: a cause with another bound does not fit them.

    Args:
        case: the loss and its objective.
        bounds: these ratios.

    Returns:
        A batch for each sign of A; none where there is no such ratio.
    """
    changes = np.array([bound for bound in bounds if bound > 0])
    if not changes.size:
        return []
    ratios = np.concatenate([changes * (1 - BESIDE), changes * (1 + BESIDE)])
    return [case.ready(single_token_responses(sign, ratios)) for sign in (1.0, -1.0)]


GRADIENT_TWICE = "its gradient is there twice: its own .backward() leaves it, and the loss that it returns has it again"
GRADIENT_LEFT = (
    "its own .backward() leaves a gradient that is added to that of the loss that it "
    "returns, which is right alone"
)
GRADIENT_RETURNED = (
    "the loss that it returns adds its gradient to the one that its own .backward() "
    "leaves, which is right alone"
)


def two_gradients(case: LossCase, batch: Rollouts) -> Iterator[LossFault]:
    """Yield the faults of a loss that calls .backward() itself and also returns a loss
    with a gradient, where one of the two gradients alone is right.

    Args:
        case: the loss and its objective.
        batch: a batch.
    """

    def own_gradient(batch: Rollouts) -> Tensor | None:
        """Return the gradient that the loss's own .backward() leaves, [B, T], or None."""
        return case.loss.ask("measured", batch, 1, None, {})[0].own_gradient

    def own_weights(batch: Rollouts) -> Tensor:
        """Return the weights of that gradient; 0 where there is none."""
        gradient = own_gradient(batch)
        if gradient is None:
            return torch.zeros_like(batch.logp)
        return gradient / case.factors(batch)

    if own_gradient(batch) is None:
        return
    own = own_weights(batch)
    # not against what is expected: torch has its own share of the gradient on a bound
    if alike(own, case.weights(batch) - own):
        fault_id = "gradient-twice"
        words = GRADIENT_TWICE
    else:
        fault_id = "gradient-left-behind"
        words = GRADIENT_LEFT
    yield fault(
        words,
        "batches",
        id=fault_id,
        weigh=lambda batch: case.expected(batch) + own_weights(batch),
        whole=True,
    )
    yield fault(
        GRADIENT_RETURNED,
        "batches",
        id="own-gradient-added",
        weigh=lambda batch: (
            case.weights(batch) - own_weights(batch) + case.expected(batch)
        ),
        whole=True,
    )


LEAST_LENGTH = 16  # tokens: a smaller divisor is no response's greatest length


def by_fixed_length(case: LossCase) -> Iterator[LossFault]:
    """Yield the fault that a sum over each response is divided by one whole number of at
    least LEAST_LENGTH, as Dr. GRPO's code divides by a length that is fixed beforehand.
    Nothing is yielded for a loss or an objective of another aggregation.

    Args:
        case: the loss and its objective.
    """
    sums_tokens = (
        case.agg == declared_aggregation(case.objective) == "seq-mean-token-sum"
    )
    if not sums_tokens or not case.fits or not 0 < case.scale < 1:
        return
    length = round(1 / case.scale)
    if length < LEAST_LENGTH or abs(case.scale * length - 1) > 10 * case.tol:
        return
    yield fault(
        f"every weight is 1/{length} times what it should be: if {length} is the fixed length L of Dr. GRPO's code "
        "(seq-mean-token-sum-norm), check the loss times L",
        "rounding",
        id="weights-scaled",
        scale=lambda batch: case.scale,
    )


@dataclass(frozen=True)
class ConfirmationBatches:
    """Other batches, of other widths and compositions: a fault must fit them too.

    Attributes:
        batches: each batch, the weights found on it, and the tokens that are compared.
    """

    batches: list[tuple[Rollouts, Tensor, Tensor]]

    def fits(self, fault: LossFault, case: LossCase, ties: bool = False) -> bool:
        """Tell whether a fault has the gradients that were found on all these batches.

        Args:
            fault: the fault.
            case: the loss and its objective.
            ties: whether tokens exactly on a bound of the fault may have a weight
                between those beside it.
        """
        compare = fits_but_ties if ties else fits
        return all(
            compare(fault, case, *measured, 10 * case.tol) for measured in self.batches
        )

    def without(self, part: Callable[[Rollouts], Tensor]) -> "ConfirmationBatches":
        """Subtract a part from what was found.

        Args:
            part: of a batch, the gradient [B, T] that is explained already.

        Returns:
            The same batches with the rest.
        """
        return ConfirmationBatches(
            [
                (batch, found - part(batch), compared)
                for batch, found, compared in self.batches
            ]
        )


def _measure_confirmation(case: LossCase, *more: Rollouts) -> ConfirmationBatches:
    """Measure the loss on `confirmation_batches`, and on these."""
    return _measure_on(case, [*confirmation_batches(case), *more])


def _measure_on(case: LossCase, batches: list[Rollouts]) -> ConfirmationBatches:
    """Measure the loss on these batches, without those that it refuses."""
    measured = []
    for batch in batches:
        with contextlib.suppress(InputError):  # a refusal is another oracle's finding
            found = case.kept_weights(batch)
            compared = batch.mask & found.isfinite() & ~case.rounded(batch)
            measured.append((batch, found, compared))
    return ConfirmationBatches(measured)


def has_weights_found(fault: LossFault, case: LossCase, batch: Rollouts) -> bool:
    """Tell whether the objective with this fault has the loss's weights on a batch; on a
    bound of the fault, those between the two sides of it.

    Args:
        fault: the fault.
        case: the loss and its objective.
        batch: the batch.
    """
    return _measure_on(case, [batch]).fits(fault, case, ties=True)


def confirmation_batches(case: LossCase) -> list[Rollouts]:
    """Return the batches on which a cause is confirmed: on policy, with small advantages
    and with A > 0 alone too; near every bound; three random ones; one of 64 responses;
    and, for an objective that corrects for its sampler, one whose sampler is far away.

    Args:
        case: the loss and its objective.

    Returns:
        Batches, made once.
    """
    key = ("confirmation", case.objective.name, *case.hp_without_kl.items())
    return case.cached(key, lambda: _make_confirmation_batches(case))


def _make_confirmation_batches(case: LossCase) -> list[Rollouts]:
    """Make what `confirmation_batches` returns."""
    on_policy = case.on_policy()
    sizes = 1 + torch.arange(len(on_policy.adv), dtype=on_policy.adv.dtype) / 10
    batches = [
        on_policy,
        on_policy.but(adv=on_policy.adv / 1000),
        on_policy.but(adv=on_policy.adv.abs() * sizes[:, None]),
        case.grid(seed=7, edges=OFF_EDGES, thin=3),
    ]
    for seed in (0, 3, 5):
        generator = np.random.default_rng(seed)
        batches.append(case.ready(random_batch(generator, case.one_adv)))
    large = random_batch(np.random.default_rng(4), case.one_adv, (64, 40))
    batches.append(case.ready(large))
    if case.objective.sampler is not None:
        batches.append(case.stress_batch("sampler"))
    return batches


def cause_if_confirmed(case: LossCase, fault: LossFault, *more: Rollouts) -> Cause:
    """Return the cause of a fault that reproduces the loss on all
    `confirmation_batches`, and on these.

    Args:
        case: the loss and its objective.
        fault: the fault.
        *more: batches on which it must hold too.

    Returns:
        Its cause, or an empty one.
    """
    if _measure_confirmation(case, *more).fits(fault, case):
        return fault.cause
    return NO_CAUSE


def first_confirmed(
    case: LossCase, faults: Iterable[LossFault], *more: Rollouts
) -> Cause:
    """Return the cause of the first fault that `cause_if_confirmed` accepts.

    Args:
        case: the loss and its objective.
        faults: in the order in which they are tried.
        *more: batches on which it must hold too.

    Returns:
        Its cause, or an empty one.
    """

    def is_confirmed(known_fault: LossFault) -> bool:
        """Return whether the fault is the cause."""
        return bool(cause_if_confirmed(case, known_fault, *more))

    known_fault = first_fitting(faults, is_confirmed)
    return known_fault.cause if known_fault else NO_CAUSE


def cause_if_confirmed_at(
    case: LossCase,
    fault: LossFault,
    batch: Rollouts,
    at: tuple[int, int],
    found: float,
    *more: Rollouts,
) -> Cause:
    """Return the cause of a fault that has the weight found at one token of a batch,
    where the reference has another, and that `cause_if_confirmed` accepts.

    Args:
        case: the loss and its objective.
        fault: the fault.
        batch: the batch.
        at: the response and the column.
        found: the loss's weight there.
        *more: batches on which it must hold too.

    Returns:
        Its cause, or an empty one.
    """
    expected = case.expected(batch)[at].item()
    by_fault = fault.change.weights(case.objective, case.hp, batch)[at].item()
    if abs(by_fault - found) <= 1e-3 * abs(expected - found):
        return cause_if_confirmed(case, fault, batch, *more)
    return NO_CAUSE


def holds_on_other_batches(
    case: LossCase, change: Callable[[Rollouts], tuple[Tensor, Tensor]], *more: Rollouts
) -> bool:
    """Return whether a cause holds on all `confirmation_batches` that the loss accepts,
    and on at least LEAST_ANSWERS of them. It is for causes that do not change the
    weights.

    Args:
        case: the loss and its objective.
        change: from a batch to the numbers found and those that the cause makes of the
            reference.
        *more: batches on which it must hold too.
    """
    answers = []
    for batch in (*confirmation_batches(case), *more):
        with contextlib.suppress(InputError):
            answers.append(alike(*change(replace(batch, totals=None))))
    return len(answers) >= LEAST_ANSWERS and all(answers)


def alike(x: Tensor, y: Tensor) -> bool:
    """Tell whether two tensors agree to 1e-5 of the largest number of the second. They
    do not where a number is NaN.

    Args:
        x: any shape.
        y: of the same shape.
    """
    return bool((x - y).abs().max() <= 1e-5 * y.abs().max())


@dataclass(frozen=True)
class Difference:
    """A difference of a loss from its objective, of which a fault is to be the cause.

    Attributes:
        case: the loss and its objective.
        batch: a batch on which weights differ.
        found: the loss's weights on it, [B, T].
        compared: the tokens that are compared, [B, T].
        bounds: ratios at which the loss was seen to change.
        confirmation: other batches with the weights found there.
        time_left: how long the search may go on.
    """

    case: LossCase
    batch: Rollouts
    found: Tensor
    compared: Tensor
    bounds: list[float]
    confirmation: ConfirmationBatches
    time_left: SearchTime


FRESH_SEEDS = (21, 22, 23)  # of random batches that no search compares
FRESH_AXES = ("ratios", "advantages", "lengths")  # of unusual inputs, likewise


def _fresh_batches(case: LossCase) -> list[Rollouts]:
    """Return the batches on which an edit is confirmed, beside `confirmation_batches`:
    no edit was chosen for what it makes of them.
    """
    random = [
        case.ready(random_batch(np.random.default_rng(seed), case.one_adv))
        for seed in FRESH_SEEDS
    ]
    return [*random, *map(case.stress_batch, FRESH_AXES)]


def _one_edit(difference: Difference) -> LossFault | None:
    """Return the first edit of the objective's own formula that reproduces the loss, also
    on batches of which the search knows nothing, or None.

    An edit with a number is left out if NEARBY times that number reproduces the loss too,
    and so is an edit that a proof tells from the loss. The fault's words are the edited
    formula, and say whether it is proved for every value.

    Args:
        difference: of the loss.
    """
    case = difference.case
    batch = difference.batch
    found = difference.found
    confirmation = difference.confirmation
    compared = difference.compared & ~case.rounded(batch)

    def reproduces_all(candidate: LossFault) -> bool:
        """Return whether a fault has the weights found, on fresh batches too."""
        return (
            fits(candidate, case, batch, found, compared, case.tol)
            and confirmation.fits(candidate, case, ties=True)
            and _measure_on(case, _fresh_batches(case)).fits(candidate, case, ties=True)
        )

    for edit, candidate in difference.time_left.within(edited(case, difference.bounds)):
        if reproduces_all(candidate):
            nearby = edit.with_other_number(NEARBY)
            # a number without effect is not the loss's
            if nearby and reproduces_all(
                nearby.fault(nearby.compiled(), case, case.agg)
            ):
                continue
            proof = comparison_for_every_value(case, edit)
            if proof != "differs":
                proved = " (proved for every value)" if proof == "proved" else ""
                return replace(candidate, words=edit.text() + proved)
    return None


NEARBY = 1.001  # times a number: a loss at another one


def _two_faults(difference: Difference) -> LossFault | None:
    """Return a fault of the KL term and one of the rest that together reproduce the
    loss, as one fault, or None. Tokens with A = 0 show the KL term alone: without one
    among the compared tokens, None.

    Args:
        difference: of the loss.
    """
    case = difference.case
    batch = difference.batch
    found = difference.found
    compared = difference.compared
    bounds = difference.bounds
    without_advantage = compared & (batch.adv.expand_as(compared) == 0)
    if not without_advantage.any():
        return None
    objective = case.objective
    hp_at_beta_0 = case.hp_without_kl | ({"beta": 0.0} if objective.kl else {})
    case_without_kl = replace(case, hp=hp_at_beta_0)

    def kl_part(kl_fault: LossFault, batch: Rollouts) -> Tensor:
        """Return what this fault of the KL term adds to the weights of the rest."""
        rest = unit_weights(objective, batch, hp_at_beta_0)
        return kl_fault.change.weights(objective, case.hp, batch) - rest

    def both(batch: Rollouts, kl_fault: LossFault, other_fault: LossFault) -> Tensor:
        """Return the weights with the two faults."""
        other_weights = other_fault.change.weights(objective, hp_at_beta_0, batch)
        return other_weights + kl_part(kl_fault, batch)

    kl_candidates = [*_other_kl(case, batch, found, compared)]
    if case.hp.get("beta"):
        kl_candidates += [
            KL_MISSING,
            *_kl_aggregated(case),
            *kl_faults(objective, case.hp),
        ]
    fitting_kl_faults = []
    for kl_fault in kl_candidates:
        errors = relative_error(found, kl_part(kl_fault, batch), batch.adv)
        if (errors[without_advantage] < case.tol).all():
            fitting_kl_faults.append(kl_fault)
    for kl_fault in fitting_kl_faults[:MOST_KL_TERMS]:
        rest_elsewhere = difference.confirmation.without(partial(kl_part, kl_fault))
        candidates = chain(
            _other_hyperparameters(case_without_kl, bounds),
            known("losses", objective, hp_at_beta_0, bounds),
            _other_objectives(case_without_kl),
        )
        confirmed = (
            candidate
            for candidate in difference.time_left.within(candidates)
            if rest_elsewhere.fits(candidate, case_without_kl)
        )
        rest = found - kl_part(kl_fault, batch)
        other_fault = reproduces(confirmed, case_without_kl, batch, rest, compared)
        if other_fault is not None:
            return fault(
                f"two faults together: {other_fault.words}; and {kl_fault.words}",
                other_fault.kind,
                id=other_fault.id,
                beside=kl_fault.id,
                weigh=partial(both, kl_fault=kl_fault, other_fault=other_fault),
            )
    return None


def _kl_aggregated(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that the KL term has another aggregation than the rest."""
    objective = case.objective
    beta = case.hp.get("beta") or 0.0
    if not beta:
        return

    def weights(batch: Rollouts, name: str) -> Tensor:
        """Return the weights whose KL term has the aggregation of this name."""
        rest = unit_weights(objective, batch, case.hp_without_kl | {"beta": 0.0})
        ratio_of_factors = case.factors(batch, name) / case.factors(batch)
        return rest - beta * kl_slope(objective.kl, batch) * ratio_of_factors

    for name in FACTORS:
        if name != case.agg:
            yield fault(
                f"the KL term has another aggregation than the rest: {aggregation_words(name)}",
                "term",
                id=f"kl-{aggregation_id(name)}",
                weigh=partial(weights, name=name),
                whole=True,
            )


def reproduces(
    faults: Iterable[LossFault],
    case: LossCase,
    batch: Rollouts,
    found: Tensor,
    compared: Tensor,
) -> LossFault | None:
    """Return the first fault that has the weights found on all compared tokens.

    Args:
        faults: in the order in which they are tried.
        case: the loss and its objective.
        batch: the batch.
        found: the loss's weights on it, [B, T].
        compared: the tokens that are compared, [B, T].

    Returns:
        The fault, or None.
    """
    first_rows = batch.but(group=None).take(slice(FEW))
    compared = compared & ~case.rounded(batch)

    def fits_first_rows(candidate: LossFault) -> bool:
        """Return whether the fault fits the first rows, where most faults fail already;
        or whether it cannot be compared on a part of the batch.
        """
        return candidate.whole or fits(
            candidate, case, first_rows, found[:FEW], compared[:FEW], case.tol
        )

    def fits_all_rows(candidate: LossFault) -> bool:
        """Return whether the fault fits the batch."""
        return fits_first_rows(candidate) and fits(
            candidate, case, batch, found, compared, case.tol
        )

    return first_fitting(faults, fits_all_rows)


def fits(
    candidate: LossFault,
    case: LossCase,
    batch: Rollouts,
    found: Tensor,
    compared: Tensor,
    tol: float,
) -> bool:
    """Return whether the objective with this fault has the weights found on the
    compared tokens. It has not where they cannot be computed for this objective.

    Args:
        candidate: the fault.
        case: the loss and its objective.
        batch: the batch.
        found: the loss's weights on it, [B, T].
        compared: the tokens that are compared, [B, T].
        tol: the relative error that is allowed.
    """
    try:
        weights = candidate.change.weights(case.objective, case.hp, batch)
        errors = relative_error(found, weights, batch.adv)
        compared = compared & ~candidate.change.skip(batch)
    # the fault needs a form that this objective does not have
    except (
        InputError,
        RuntimeError,
        TypeError,
        NameError,
        ValueError,
        ArithmeticError,
    ):
        return False
    return bool((errors[compared] < tol).all())


STEP = 3e-4  # a factor of 1 + STEP on a probability, or on an advantage
LEAST_JUMP = 4e-4  # relative: what is smooth bends less over two such steps
LARGEST_JUMP = 0.03  # relative: a bound that is crossed changes more
LEAST_SHARE = 0.02  # of the tokens, that jump
MOST_ERROR = 0.1  # relative, of a weight that is right but for rounding
JUMP_OF_BFLOAT16 = 1.5e-3  # between the roundings of float16 and of bfloat16
STEPPED = {  # the roles that are moved, in words
    "logp": "π_θ",
    "logp_old": "π_old",
    "adv": "A",
    "logp_ref": "π_ref",
    "logp_sampler": "μ",
}


def in_low_precision(case: LossCase) -> Cause:
    """Return the cause that a part of the loss is rounded to a format of 16 bits.

    Each input of STEPPED is moved by STEP in both directions. A smooth weight bends by
    less than LEAST_JUMP. Rounding is the cause if at least LEAST_SHARE of the weights, but
    not all, jump by more, at most LEAST_SHARE of these by more than LARGEST_JUMP, and if
    at most LEAST_SHARE of the weights are wrong by more than MOST_ERROR. The first input
    that shows it is named.

    Args:
        case: the loss and its objective.

    Returns:
        The cause, or an empty one.
    """
    if case.objective.level == "sequence_product":
        return NO_CAUSE  # a product of many ratios bends as much as rounding jumps
    # the ratios of the grid are few, and a random batch has as many as tokens
    batch = case.ready(random_batch(np.random.default_rng(31), case.one_adv, (64, 40)))
    found = case.weights(batch)
    size = found.abs()
    use = batch.mask & (size > 1e-6) & found.isfinite()
    errors = ((found - case.expected(batch)).abs() / size)[use]
    if not len(errors) or errors.quantile(1 - LEAST_SHARE) > MOST_ERROR:
        return NO_CAUSE
    for role, name in STEPPED.items():
        x = getattr(batch, role)
        if x is None:
            continue
        if role == "adv":
            above = x + STEP * x
            below = x - STEP * x
            moves = use
        else:
            above = (x + STEP).clamp(max=0)  # no log-probability is above 0
            below = x - STEP
            moves = use & (x < -STEP)
        up = case.weights(batch.but(**{role: above}))
        down = case.weights(batch.but(**{role: below}))
        bends = ((up - 2 * found + down).abs() / size)[moves]
        jumps = bends[bends > LEAST_JUMP]
        if len(jumps) < LEAST_SHARE * len(bends):
            continue
        if jumps.quantile(1 - LEAST_SHARE) > LARGEST_JUMP or len(jumps) == len(bends):
            continue
        jump = float(jumps.median())
        number_format = "bfloat16" if jump > JUMP_OF_BFLOAT16 else "float16"
        return PART_IN_LOW_PRECISION.cause(
            number_format=number_format, role=name, step=STEP, jump=jump
        )
    return NO_CAUSE


MOST_TIES = 0.1  # of the tokens of a batch that may lie exactly on a bound


def fits_but_ties(
    candidate: LossFault,
    case: LossCase,
    batch: Rollouts,
    found: Tensor,
    compared: Tensor,
    tol: float,
) -> bool:
    """Return what `fits` returns, but up to MOST_TIES of the tokens may have a weight
    between those just beside them on the two sides: at a bound, rounding decides.

    Args:
        candidate, case, batch, found, compared, tol: as `fits` takes them.
    """
    if fits(candidate, case, batch, found, compared, tol):
        return True

    def weights(shift: float) -> Tensor:
        """Return the fault's weights at log π_θ + shift, [B, T]."""
        moved = batch.but(logp=batch.logp + shift)
        return candidate.change.weights(case.objective, case.hp, moved)

    try:
        errors = relative_error(found, weights(0), batch.adv)
        sides = torch.stack([weights(-BESIDE_TIE), weights(BESIDE_TIE)])
    except (InputError, RuntimeError, TypeError):
        return False
    is_wrong = compared & ~(errors < tol)
    slack = SLACK_OF_TIE * sides.abs().amax(0)
    is_between = (found >= sides.amin(0) - slack) & (found <= sides.amax(0) + slack)
    is_few = is_wrong.sum() <= MOST_TIES * compared.sum()
    return bool(is_few and is_between[is_wrong].all())


def _other_hyperparameters(case: LossCase, bounds: list[float]) -> Iterator[LossFault]:
    """Yield the faults that the objective has other hyperparameters: its two bounds
    swapped; those that are recovered from the loss; no KL term, or one of the other sign.
    """
    from upref.verify.match import recover

    hp = case.hp
    if {"eps_low", "eps_high"} <= hp.keys() and hp["eps_low"] != hp["eps_high"]:
        swapped = {"eps_low": hp["eps_high"], "eps_high": hp["eps_low"]}
        yield fault(
            "the two sides of the clip are swapped (eps_low, eps_high)",
            "hyperparameter",
            id="clip-sides-swapped",
            hp=swapped,
        )
    for changed in recover(case):
        yield fault(
            _words_for_hyperparameters(changed, hp, case.objective.ratio_symbol),
            "hyperparameter",
            id=hyperparameter_id(*changed),
            hp=changed,
        )
    if hp.get("beta"):
        yield KL_MISSING
        yield kl_added(hp["beta"])


def _other_kl(
    case: LossCase, batch: Rollouts, found: Tensor, compared: Tensor
) -> Iterator[LossFault]:
    """Yield the faults that the KL term has another coefficient or another form, or
    that there is one where the objective has none. Both are read off the tokens with
    A = 0, where nothing but the KL term is left.

    Args:
        case: the loss and its objective.
        batch: a batch on which weights differ.
        found: the loss's weights on it, [B, T].
        compared: the tokens that are compared, [B, T].
    """
    without_advantage = compared & (batch.adv.expand_as(compared) == 0)
    if not without_advantage.any():
        return
    objective = case.objective
    own_beta = case.hp.get("beta") or 0.0
    own_name = TERM_OF.get(objective.kl, "")
    hp_without_kl = {k: v for k, v in case.hp.items() if k != "beta"}

    def weights(batch: Rollouts, beta: float, name: str) -> Tensor:
        """Return the weights with the KL term of this name and coefficient."""
        rest = unit_weights(objective, batch, objective.resolve(hp_without_kl))
        return rest - beta * term_slope(name, batch)

    for name in possible_terms(own_name, case.loss.reads):
        slope = term_slope(name, batch)[without_advantage]
        beta = term_coefficient(found[without_advantage], slope)
        if abs(beta) <= case.tol:
            continue
        if name == own_name:
            yield fault(
                _words_for_hyperparameters(
                    {"beta": beta}, case.hp, objective.ratio_symbol
                ),
                "hyperparameter",
                id=hyperparameter_id("beta"),
                hp={"beta": beta},
            )
        elif not own_beta:
            yield fault(
                words_for_other_kl(objective, beta, name),
                "term",
                id="kl-not-of-objective",
                weigh=partial(weights, beta=beta, name=name),
            )
        # at the objective's own coefficient, kl_faults has it
        elif beta > 0 and abs(beta - own_beta) > case.tol:
            yield fault(
                f"the KL term has the gradient of {beta:.6g} {name}, not of {own_beta:g} {objective.kl}: {OTHER_KL}",
                "term",
                id=f"kl-gradient-of-{name}",
                weigh=partial(weights, beta=beta, name=name),
            )


def _number_in_words(value: float | None) -> str:
    """Return a hyperparameter's value in words; None is one that is absent. A bound
    that float32 rounded is shown as it was written.
    """
    if value is None:
        return "absent"
    short = float(f"{value:.3g}")
    is_rounded = abs(short - value) <= min(OF_FLOAT32, 1e-3 * abs(value))
    return f"{short if is_rounded else value:.6g}"


OF_FLOAT32 = 1e-7  # by which it rounds a bound near 1


def _words_for_hyperparameters(
    changed: dict[str, Any], hp: dict[str, Any], ratio: str
) -> str:
    """Return the words for hyperparameters with other values, such as "eps_high is 0.2,
    not 0.28", and what the values are where that is recognized: bounds taken as absolute
    or on log r, a dual clip, or the values of partners.

    Args:
        changed: the values that were found.
        hp: the values that they should have.
        ratio: the symbol of the objective's ratio.
    """
    words = "; ".join(
        f"{name} is {found}, not {meant}"
        for name, value in changed.items()
        if (found := _number_in_words(value)) != (meant := _number_in_words(hp[name]))
    )
    if not changed:
        return words
    if all(
        _is_absolute_bound(name, value, hp[name]) for name, value in changed.items()
    ):
        words += ": taken as absolute, not as a distance from 1"
    if all(
        _is_bound_on_log_r(name, value, hp[name]) for name, value in changed.items()
    ):
        words += f": the bounds are on log {ratio}, not on {ratio}"
    if "c" in changed and hp["c"] is None and changed["c"] is not None:
        # a mask does the same
        words += (
            f": where A < 0 no gradient is left beyond {ratio} = {changed['c']:.6g}"
        )
    return words + _words_for_partners(changed, hp)


def _words_for_partners(changed: dict[str, Any], hp: dict[str, Any]) -> str:
    """Return the words for hyperparameters that have each the value of its partner, as
    tau_pos that of tau_neg; "" where one has not.

    Args:
        changed: the values that were found.
        hp: the values that they should have.
    """
    partners = {name: _partner(name) for name in changed}
    for name, partner in partners.items():
        value, meant = changed[name], hp.get(partner)
        if value is None or meant is None:
            return ""
        if value != meant and not abs(value - meant) <= SAME_BOUND:
            return ""
    if set(partners.values()) == set(changed):
        return ": they are swapped"
    of_partners = "this is the value" if len(changed) == 1 else "these are the values"
    return f": {of_partners} of {', '.join(partners.values())}"


def _partner(name: str) -> str:
    """Return the name of the hyperparameter for the other sign of A, or the other side:
    eps_high for eps_low. A name without _pos, _neg, _low or _high is its own partner.
    """
    for one, other in (("_pos", "_neg"), ("_low", "_high")):
        if one in name:
            return name.replace(one, other)
        if other in name:
            return name.replace(other, one)
    return name


SAME_BOUND = 1e-6  # two bounds are equal up to this


def _is_absolute_bound(name: str, found: Any, own: Any) -> bool:
    """Return whether the bound found, 1 - eps_low or 1 + eps_high, is the hyperparameter's
    own value, which should be its distance from 1. False for another name or for None.
    """
    if found is None or own is None or name not in ("eps_low", "eps_high"):
        return False
    bound = 1 - found if name == "eps_low" else 1 + found
    return abs(bound - own) < SAME_BOUND


def _is_bound_on_log_r(name: str, found: Any, own: Any) -> bool:
    """Return whether the bound found is exp(-own) below 1, or exp(own) above 1: then the
    hyperparameter's own value bounds log r. False for a name that is no clip width, and
    where a value is None.
    """
    if found is None or own is None or name not in ("eps_low", "eps_high", "eps"):
        return False
    if name == "eps_low":
        return abs((1 - found) - math.exp(-own)) < SAME_BOUND
    return abs((1 + found) - math.exp(own)) < SAME_BOUND


def _other_objectives(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that the loss is another objective, at the hyperparameters that
    the two share and at the other's defaults. Objectives with the loss's aggregation
    come first.
    """
    objective = case.objective
    hp = case.hp
    if not shape_of(objective, hp).ignores_ratio[1.0]:  # no log π_θ where A > 0 yet
        yield fault(
            f"its gradient is that of up({objective.name}): log π_θ in place of the clipped ratio where A > 0",
            "objective",
            id="up-of-objective",
            objective=up(objective),
            hp=hp,
        )
    for name in CORRECTIONS if objective.sampler else ():
        other = get(re.sub(f"({'|'.join(CORRECTIONS)})[(]", f"{name}(", objective.name))
        shared_hp = {k: v for k, v in hp.items() if k in other.hyperparameters}
        for other_hp in (shared_hp, {}):
            yield _fault_of_other_objective(other, other_hp, _words_for_divisor(case))
    objectives = [
        get(name)
        for name in names()
        if name != objective.name and not get(name).batch_coupled
    ]
    for other in sorted(
        objectives, key=lambda other: declared_aggregation(other) != case.agg
    ):
        shared_hp = {
            k: v for k, v in hp.items() if k in other.hyperparameters and v is not None
        }
        for other_hp in (shared_hp, {}):
            words = _words_for_aggregation(case, other) or _words_for_divisor(case)
            yield _fault_of_other_objective(other, other_hp, words)


def _fault_of_other_objective(
    other: Objective, hp: dict[str, Any], aggregation: str = ""
) -> LossFault:
    """Make the fault that the loss is another objective.

    Args:
        other: the other objective.
        hp: its hyperparameters that are not at their defaults.
        aggregation: words for another aggregation.
    """
    return fault(
        f"its gradient is that of {_call_in_words(other, hp)}{aggregation}",
        "objective",
        id=f"other-objective-{other.name}",
        objective=other,
        hp=hp,
    )


def _other_objectives_as_recovered(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that the loss is any objective, or up(...) of it, at the
    hyperparameters and with the KL term that are recovered from the loss.
    """
    from upref.verify.match import fitting

    def weights(
        batch: Rollouts, box: Any, objective: Objective, own_hp: dict[str, Any]
    ) -> Tensor:
        """Return the weights of the objective at these hyperparameters, times the
        scale of the loss, with its KL term.
        """
        objective_weights = unit_weights(objective, batch, objective.resolve(own_hp))
        return box.scale * (objective_weights + box.kl_weights(batch))

    for box, other, hp in fitting(case.loss):
        own_hp = {k: v for k, v in hp.items() if k != "beta"}
        times = f"{box.scale:.6g} times " if box.scale != 1 else ""
        call = _call_in_words(other, own_hp)
        kl_term = f", with a KL term: {box.beta:.6g} {box.kl}" if box.kl else ""
        aggregation = _words_for_aggregation(case, other)
        yield fault(
            f"its gradient is {times}that of {call}{kl_term}{aggregation}",
            "objective",
            id=f"other-objective-{other.name}",
            weigh=partial(weights, box=box, objective=other, own_hp=own_hp),
        )


def _words_for_divisor(case: LossCase) -> str:
    """Return the words for a divisor that stays the objective's own, or "" where no
    rejection changes it.
    """
    if case.agg != KEPT_MEAN:
        return ""
    return f", divided by the number of tokens that {case.objective.name} keeps"


def _words_for_aggregation(case: LossCase, objective: Objective) -> str:
    """Return the words for the aggregation of the loss, or "" where an objective has
    the same.
    """
    batch = case.on_policy()
    own_factors = case.factors(batch, declared_aggregation(objective))
    if alike(own_factors, case.factors(batch)):
        return ""
    # a loss that reads no group ids has no groups: the two aggregations are one
    if case.agg == "group-token-mean" and "group" not in case.loss.reads:
        return ", aggregated by token-mean"
    return f", aggregated by {aggregation_words(case.agg)}"


def _call_in_words(objective: Objective, hp: dict[str, Any]) -> str:
    """Return the name of the objective, with its hyperparameters that are neither 0 nor
    None, such as "dapo(eps_low=0.2, eps_high=0.28)".
    """
    arguments = ", ".join(
        f"{name}={value:g}" for name, value in objective.resolve(hp).items() if value
    )
    return f"{objective.name}({arguments})" if arguments else objective.name
