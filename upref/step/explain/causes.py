# SPDX-License-Identifier: Apache-2.0
"""The fault that makes the token weights that were read off a gradient.

Weights are compared as (weight of the token before aggregation) x (factor of its
response) x (one constant). A fault is named where the three together give the weights
that were found.

In every function, `tokens` are the weights that were read, with the rows that they are of;
`batch` is these rows as Rollouts, and `hp` the objective's hyperparameters. `count` is the
number of rows. A LossFault changes what the objective is given, or the objective.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.kl import ESTIMATORS
from upref.registry import Objective, get, names
from upref.rollouts import Rollouts
from upref.step.explain.normalizers import explain_factors, right_factors
from upref.step.explain.weights import (
    WEIGHT_TOLERANCE,
    Tokens,
    factors_of_rows,
    is_named,
    left_out_cause,
)
from upref.step.inputs.rows import Row
from upref.verify.faults import fitting, hyperparameter_id, known, measured
from upref.verify.faults.batch_reading import between, bisected, moved
from upref.verify.faults.losses import (
    KL_MISSING,
    LossFault,
    fault,
    kl_added,
    term_of,
)
from upref.verify.finding import NO_CAUSE, Cause, join_causes

HALF_PRECISIONS = (torch.bfloat16, torch.float16)
# numbers of a row that a loop may keep in half precision
ROUNDED_WORDS = {
    "logp_old": "old log-probabilities",
    "adv": "advantages",
    "logp_ref": "reference model's log-probabilities",
}
ROUNDED_IDS = {
    "logp_old": "old-log-probs",
    "adv": "advantages",
    "logp_ref": "reference-log-probs",
}
USUAL_BOUNDS = (0.1, 0.2, 0.28, 0.3, 0.4, 3.0, 10.0)  # of a clip, as people set them
# the same of a sampler's correction
USUAL_CORRECTION_BOUNDS = (0.1, 0.2, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0, 10.0)
USUAL_VALUES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("eps", "eps_low", "eps_high", "c"), USUAL_BOUNDS),
    **dict.fromkeys(("is_min", "is_max"), USUAL_CORRECTION_BOUNDS),
}
# a bound is searched for from 1/100 to 100 times its usual value
FARTHEST_FACTOR = 100.0


# A fault of these kinds changes which tokens have a gradient. A response that has none,
# although this fault gives it one, is then no second fault: this fault is the wrong one.
STOPPING_KINDS = (
    "hyperparameter",
    "objective",
    "clip",
    "ratio",
    "stop-gradient",
    "rounding",
)


def find_fault(tokens: Tokens, only: Cause = NO_CAUSE) -> tuple[Cause, Tensor] | None:
    """Find the fault that gives these weights on all response tokens.

    Args:
        tokens: the weights that were read off the gradient.
        only: a cause; faults that it does not name are not tried.

    Returns:
        The cause and the weights that it gives, [B, T]; None where no fault fits.
    """
    hp = dict(tokens.goal.hp)
    if tokens.goal.objective.kl:
        hp["beta"] = tokens.goal.beta
    equal_weights = _equal_weights(tokens)
    if equal_weights is not None:
        cause, _ = equal_weights
        if not only or set(cause.ids) <= set(only.ids):
            return equal_weights
    named = (one for one in token_faults(tokens, hp) if is_named(one, only))
    is_silent = tokens.has_no_weight(tokens.found).all(1)
    right_multiples = right_factors(tokens.goal, tokens.padded)[:, None]
    found = fitting(named, partial(_fit, tokens, hp, is_silent, right_multiples))
    return next((how for _, how in found), None)


def _fit(
    tokens: Tokens,
    hp: dict[str, Any],
    is_silent: Tensor,
    right_multiples: Tensor,
    fault_tried: LossFault,
) -> tuple[Cause, Tensor] | None:
    """Return the cause that a fault is, and the weights that it gives, [B, T]; None where
    these are not the weights found.

    Args:
        tokens: the weights that were read off the gradient.
        hp: the objective's numbers.
        is_silent: whether no token of a response has a weight.
        right_multiples: the factor that each response should have, [B, 1].
        fault_tried: the fault.
    """
    weights, mask = _weights_of_fault(tokens, fault_tried, hp)
    row_factors = factors_of_rows(tokens, weights)
    if row_factors is None:
        return None
    # the factor of a response whose weights are within the noise, and should be, is not
    # known
    should_be_silent = tokens.near(weights * right_multiples, 0 * weights).all(1)
    row_factors[is_silent & should_be_silent] = torch.nan
    least = WEIGHT_TOLERANCE * row_factors.nan_to_num(0).abs().max()
    without_weight = [i for i, factor in enumerate(row_factors) if abs(factor) <= least]
    known_factors = len(row_factors) - int(row_factors.isnan().sum())
    if known_factors == 0 or len(without_weight) == known_factors:
        return None
    if without_weight and fault_tried.kind in STOPPING_KINDS:
        return None
    row_factors[without_weight] = torch.nan
    moving = int((mask & (weights != 0)).sum())
    explanation = explain_factors(
        tokens.goal,
        tokens.rows,
        tokens.padded,
        row_factors,
        without_weight,
        tokens.tol,
        mask,
        moving,
        _largest_odd_factor(fault_tried),
    )
    if explanation is None:
        return None
    aggregation, aggregation_factors = explanation
    if fault_tried.id == "advantages-negated" and bool(
        (aggregation_factors * ~row_factors.isnan() < 0).any()
    ):
        return None  # two signs that cancel are another fault
    left_out = left_out_cause(without_weight) if without_weight else NO_CAUSE
    has_weight = torch.ones(len(row_factors), dtype=torch.bool)
    has_weight[without_weight] = False
    fault_cause = _cause_with_range(tokens, fault_tried, hp, weights)
    cause = join_causes(fault_cause, left_out, aggregation)
    if not cause:
        return None
    multiples = torch.where(has_weight, aggregation_factors, 0)
    return cause, weights * multiples[:, None]


def _cause_with_range(
    tokens: Tokens, known_fault: LossFault, hp: dict[str, Any], weights: Tensor
) -> Cause:
    """Return the cause of a fault that fits. If the fault is another value of one
    bound, the cause names the range of values that fit.

    Where no token has a ratio between two values, both fit: to name one is to guess.

    Args:
        tokens: the tokens of the step.
        known_fault: it gives the weights of the step.
        hp: the objective's numbers.
        weights: the weights that the fault gives, [B, T].
    """
    if len(known_fault.change.hp) != 1:
        return known_fault.cause
    ((key, value),) = known_fault.change.hp.items()
    if key not in USUAL_VALUES or value is None:
        return known_fault.cause
    allowed = tokens.tol * weights.abs().max()

    def fits(other: float) -> bool:
        """Return whether this value of the bound gives the same weights."""
        change = replace(known_fault.change, hp={key: other})
        other_fault = replace(known_fault, change=change)
        other_weights, _ = _weights_of_fault(tokens, other_fault, hp)
        return bool((other_weights - weights).abs().max() <= allowed)

    low = _farthest_that_fits(fits, value, value / FARTHEST_FACTOR)
    high = _farthest_that_fits(fits, value, value * FARTHEST_FACTOR)
    if low > value * 0.99 and high < value * 1.01:
        return known_fault.cause
    if high >= value * FARTHEST_FACTOR:
        range_words = f"{low:.3g} or more"
    elif low <= value / FARTHEST_FACTOR:
        range_words = f"{high:.3g} or less"
    else:
        range_words = f"between {low:.3g} and {high:.3g}"
    usual = ", ".join(
        f"{usual_value:g}"
        for usual_value in USUAL_VALUES[key]
        if low <= usual_value <= high
    )
    right_value = "absent" if hp[key] is None else f"{hp[key]:g}"
    words = f"{key} is {range_words} (such as {usual}), not {right_value}"
    return replace(known_fault.cause, words=words)


def _farthest_that_fits(
    fits: Callable[[float], bool], value: float, farthest: float
) -> float:
    """Return the value nearest to `farthest` that fits.

    Args:
        fits: true of `value`, and of every value between two that fit.
        value: where the search begins, > 0.
        farthest: where it ends, > 0.
    """
    if fits(farthest):
        return farthest
    log_value = bisected(
        lambda log_value: fits(math.exp(log_value)), math.log(farthest), math.log(value)
    )
    return math.exp(log_value)


def _largest_odd_factor(known_fault: LossFault) -> float:
    """Return the largest constant factor that is accepted beside this fault, where no
    loop is known to have the factor. The inverse of a factor has the same bound.

    A free factor lets a wrong fault fit. Beside another objective none is accepted.
    """
    if known_fault.kind == "objective":
        return 1.0
    # without words it changes nothing: only the factor is wrong, however large
    return 1000.0 if known_fault.words else math.inf


def _equal_weights(tokens: Tokens) -> tuple[Cause, Tensor] | None:
    """Return the cause that all tokens that train have one weight, and the weights;
    None where the weights differ, or should be equal.
    """
    found = tokens.found[tokens.padded.mask]
    expected = tokens.expected[tokens.padded.mask]
    mean = float(found.nan_to_num(0).mean())
    largest_difference = float((found - mean).abs().nan_to_num(torch.inf).max())
    if (
        not mean
        or largest_difference > tokens.tol * abs(mean)
        or expected.std() <= tokens.tol * expected.abs().max()
    ):
        return None
    cause = measured.ONE_WEIGHT.cause(weight=mean)
    return cause, torch.where(tokens.padded.mask, mean, 0.0)


def _batch_fault(
    words: str,
    hp: dict[str, Any] | None = None,
    *,
    id: str,
    beside: str = "",
    **change: Tensor,
) -> LossFault:
    """Make the fault that the objective is given a batch with these fields replaced."""
    return fault(
        words,
        "batches",
        id=id,
        beside=beside,
        hp=hp or {},
        view=lambda batch: batch.but(**change),
    )


def token_faults(tokens: Tokens, hp: dict[str, Any]) -> Iterator[LossFault]:
    """Yield the faults that may give these weights, the likeliest first.

    Args:
        tokens: the weights that were read off the gradient.
        hp: the objective's numbers.

    Yields:
        A fault that changes nothing; then the known faults, those of masks first. An
        earlier fault is named where a later one gives the same weights.
    """
    batch = tokens.rollouts()
    objective = tokens.goal.objective
    yield _batch_fault("", id="")
    yield from _mask_and_ratio_faults(tokens, batch)
    yield from _exchanged_row_faults(tokens, batch)
    yield from _normalized_advantage_faults(tokens, batch)
    yield from _rounding_faults(batch)
    yield from _advantage_faults(tokens, batch)
    if batch.logp_ref is not None:
        yield from _reference_faults(tokens, batch, batch.logp_ref)
    if tokens.goal.beta:
        yield from _kl_faults(tokens, batch)
    yield from _hyperparameter_faults(objective, hp)
    if objective.level == "sequence_mean":
        yield from _wrong_length_faults(tokens, hp)
    yield from known("losses", objective, hp, [])
    yield from _other_objective_faults(objective, hp)
    # late: a lost sign may look like another response's advantage
    yield from _other_response_faults(tokens, batch, hp)
    for feature, words, lost in _features_of_lost_tokens(tokens, batch):
        yield _batch_fault(
            f"{words} do not train",
            id=f"{feature}-left-out",
            mask=tokens.padded.mask & ~lost,
        )


def _mask_and_ratio_faults(tokens: Tokens, batch: Rollouts) -> Iterator[LossFault]:
    """Yield faults of the loss mask, of the old log-probabilities, and both at once."""
    positions = torch.arange(tokens.is_token.shape[1])
    untrained = tokens.is_token & ~tokens.padded.mask
    last_position = torch.tensor([[len(row.response) - 1] for row in tokens.rows])
    masks: tuple[tuple[str, str, Tensor], ...] = (
        ("masked-tokens-train", "masked tokens train", tokens.is_token),
        (
            "mask-one-token-late",
            "the mask is one token late",
            moved(tokens.padded.mask, 1) & tokens.is_token,
        ),
        (
            "mask-one-token-early",
            "the mask is one token early",
            moved(tokens.padded.mask, -1) & tokens.is_token,
        ),
        (
            "last-token-left-out",
            "the last token of each response does not train",
            tokens.padded.mask & (positions != last_position),
        ),
        (
            "first-token-left-out",
            "the first token of each response does not train",
            tokens.padded.mask & (positions > 0),
        ),
        (
            "token-after-hole-left-out",
            "the first token after each hole does not train",
            tokens.padded.mask & ~moved(untrained, 1),
        ),
        (
            "tokens-behind-hole-left-out",
            "no token behind the first hole of a response trains",
            tokens.padded.mask & (untrained.cumsum(1) == 0),
        ),
        (
            "tokens-before-hole-left-out",
            "no token in front of the last hole of a response trains",
            tokens.padded.mask & (untrained.flip(1).cumsum(1).flip(1) == 0),
        ),
        (
            "cut-responses-train-by-first-token",
            "a response without the end token trains by its first token alone",
            tokens.padded.mask & (_has_end_token(tokens.rows) | (positions == 0)),
        ),
    )
    for fault_id, words, mask in masks:
        yield _batch_fault(words, id=fault_id, mask=mask)
    old_is_current = "the old log-probabilities are the current ones"
    ratio_is_1 = f"{old_is_current}, or have no effect: r = 1"
    yield _batch_fault(ratio_is_1, id="ratio-always-one", logp_old=tokens.lp)
    for fault_id, words, mask in masks:
        yield _batch_fault(
            f"{words}; {ratio_is_1}",
            id=fault_id,
            beside="ratio-always-one",
            mask=mask,
            logp_old=tokens.lp,
        )
    yield _batch_fault(
        "the old and the current log-probabilities are exchanged in the ratio",
        id="old-and-new-log-probs-exchanged",
        logp_old=2 * tokens.lp - batch.logp_old,  # 1 / r in place of r
    )
    yield _batch_fault(
        f"{old_is_current} at temperature 1",
        id="old-log-probs-at-temperature-1",
        logp_old=tokens.lp_at_temperature_1,
    )
    for places, where in {1: "late", -1: "early"}.items():
        yield _batch_fault(
            f"the old log-probabilities are one token too {where}",
            id=f"old-log-prob-one-token-{where}",
            logp_old=moved(batch.logp_old, places),
        )
    yield _batch_fault(
        "the old log-probabilities are counted without the holes",
        id="old-log-probs-without-holes",
        logp_old=_without_holes(batch.logp_old, tokens.padded.mask),
    )


def _exchanged_row_faults(tokens: Tokens, batch: Rollouts) -> Iterator[LossFault]:
    """Yield faults that give rows the numbers of other rows, or another sign."""
    orders = [*_row_orders(tokens.rows)]
    advantages = batch.adv[:, :1]
    # where an exchange of rows negates all advantages, so does the opposite sign
    opposite = [
        words
        for _, words, order in orders
        if torch.equal(advantages[order], -advantages)
    ]
    or_exchanged = f", or are those of {opposite[0]}" if opposite else ""
    yield _batch_fault(
        f"the advantages have the opposite sign{or_exchanged}",
        id="advantages-negated",
        adv=-batch.adv,
    )
    for rows, words, order in orders:
        if words not in opposite:
            yield _batch_fault(
                f"the advantages are those of {words}",
                id=f"advantages-of-{rows}",
                adv=advantages[order].expand_as(batch.adv),
            )
        for old in _reordered(tokens.rows, batch.logp_old, order):
            yield _batch_fault(
                f"the old log-probabilities are those of {words}",
                id=f"old-log-probs-of-{rows}",
                logp_old=old,
            )
    words = (
        "the advantages of the tokens that train are laid over all response tokens, "
        "one behind the other"
    )
    yield _batch_fault(
        words,
        id="advantages-laid-over",
        adv=_laid_over(batch.adv, tokens.padded.mask, tokens.is_token),
    )
    yield _batch_fault(
        "the sign of the advantages is lost",
        id="advantage-absolute",
        adv=batch.adv.abs(),
    )


def _normalized_advantage_faults(
    tokens: Tokens, batch: Rollouts
) -> Iterator[LossFault]:
    """Yield faults that center or normalize the advantages once more, over the batch or
    its parts.
    """
    count = len(tokens.rows)
    parts = [
        ("batch", "", torch.zeros(count)),
        ("group", " in each group", tokens.padded.group),
    ]
    for size in range(2, count):
        where = f" in each micro-batch of {size}"
        parts.append(("micro-batch", where, torch.arange(count) // size))
    for sample, where, part_of_row in parts:
        is_same_part = torch.eq(part_of_row[:, None], part_of_row).double()
        part_size = is_same_part.sum(1)  # of the part of each response, [B]
        mean = partial(_means_of_parts, is_same_part)
        A = batch.adv[:, 0]
        if where:
            yield _batch_fault(
                f"the advantages are centered again{where}",
                id=f"advantages-centered-over-{sample}",
                adv=(A - mean(A))[:, None].expand_as(batch.adv),
            )
        for step, how, mean_subtracted in (
            ("whitened", "normalized", mean(A)),
            ("divided", "divided by their standard deviation", 0 * A),
        ):
            for ddof in (1, 0):
                var = (mean(A**2) - mean(A) ** 2) * part_size / (part_size - ddof)
                shifted = A - mean_subtracted
                # a part of one response has no standard deviation
                normalized = torch.where(part_size > 1, shifted / var.sqrt(), shifted)
                yield _batch_fault(
                    f"the advantages are {how} again{where}",
                    id=f"advantages-{step}-over-{sample}",
                    adv=normalized[:, None].expand_as(batch.adv),
                )
    yield _batch_fault(
        "the advantages are centered again",
        id="advantages-centered-over-batch",
        adv=batch.adv - batch.adv[:, 0].mean(),
    )


def _reference_faults(
    tokens: Tokens, batch: Rollouts, logp_ref: Tensor
) -> Iterator[LossFault]:
    """Yield faults of the reference model's log-probabilities."""
    for places, where in {1: "late", -1: "early"}.items():
        yield _batch_fault(
            f"the reference model's log-probabilities are one token too {where}",
            id=f"reference-one-token-{where}",
            logp_ref=moved(logp_ref, places),
        )
    yield _batch_fault(
        "the reference model's log-probabilities are used as the old ones",
        id="ratio-to-reference",
        logp_old=logp_ref,
    )
    yield _batch_fault(
        "the reference model's log-probabilities are the current ones",
        id="reference-is-current-policy",
        logp_ref=tokens.lp,
    )
    yield _batch_fault(
        "the old policy is used as the reference model",
        id="reference-is-old-policy",
        logp_ref=batch.logp_old,
    )


def _kl_faults(tokens: Tokens, batch: Rollouts) -> Iterator[LossFault]:
    """Yield faults of the KL term."""
    yield KL_MISSING
    yield kl_added(tokens.goal.beta)
    for name, estimator in ESTIMATORS.items():
        words = f"the KL term ({name}) of the old policy is folded into the advantage"
        yield _batch_fault(
            words,
            {"beta": 0.0},
            id="kl-of-old-policy-in-advantage",
            adv=batch.adv
            - tokens.goal.beta * estimator(batch.logp_old, tokens.padded.ref),
        )


def _hyperparameter_faults(
    objective: Objective, hp: dict[str, Any]
) -> Iterator[LossFault]:
    """Yield the objective with each of USUAL_VALUES in place of its own bound, then with
    its clip bounds exchanged.
    """
    for key in sorted(USUAL_VALUES.keys() & hp.keys()):
        for value in USUAL_VALUES[key]:
            if value == hp[key] or not _is_accepted(objective, key, value):
                continue
            right_value = "absent" if hp[key] is None else f"{hp[key]:g}"
            yield fault(
                f"{key} is {value:g}, not {right_value}",
                "hyperparameter",
                id=hyperparameter_id(key),
                hp={key: value},
            )
    low = hp.get("eps_low")
    high = hp.get("eps_high")
    if (
        low is not None
        and high is not None
        and low != high
        and _is_accepted(objective, "eps_low", high)
    ):
        yield fault(
            f"the clip bounds are exchanged: eps_low is {high:g} and eps_high is {low:g}",
            "hyperparameter",
            id="clip-bounds-exchanged",
            hp={"eps_low": high, "eps_high": low},
        )


def _other_objective_faults(
    objective: Objective, hp: dict[str, Any]
) -> Iterator[LossFault]:
    """Yield each other registered objective, with the numbers that both have."""
    for name in names():
        other = get(name)
        if name == objective.name or other.batch_coupled:
            continue
        shared_hp = {
            key: value
            for key, value in hp.items()
            if key in other.hyperparameters and value is not None
        }
        yield fault(
            f"the objective is {other.name}",
            "objective",
            id=f"other-objective-{other.name}",
            objective=other,
            hp=shared_hp,
        )


def _other_response_faults(
    tokens: Tokens, batch: Rollouts, hp: dict[str, Any]
) -> Iterator[LossFault]:
    """Yield faults that give responses the numbers of other responses, in the order
    that the weights show.
    """
    count = len(tokens.rows)
    # id, words, field of the batch; and for each response j, its numbers given to all
    for fault_id, numbers, name, given_to_all in (
        (
            "advantages-of-other-responses",
            "advantages",
            "adv",
            [batch.adv[j, 0].expand_as(batch.adv) for j in range(count)],
        ),
        (
            "old-log-probs-of-other-responses",
            "old log-probabilities",
            "logp_old",
            [batch.logp_old[j].expand_as(batch.logp_old) for j in range(count)],
        ),
    ):
        found = _find_sources(tokens, name, given_to_all, hp)
        if found is None:
            continue
        source, is_certain = found
        if name == "adv" and not is_certain.all():
            continue
        if 2 * int(is_certain.sum()) < count:
            continue
        sources = zip(source.tolist(), is_certain.tolist(), strict=True)
        words = " ".join(str(j) if certain else "?" for j, certain in sources)
        exchanged = torch.stack([given_to_all[j][i] for i, j in enumerate(source)])
        change: Any = {name: exchanged}
        of_others = f"the {numbers} are those of other responses: of {words}"
        yield _batch_fault(of_others, id=fault_id, **change)


def _means_of_parts(is_same_part: Tensor, numbers: Tensor) -> Tensor:
    """Return the mean of the numbers [B] over each response's part, [B]. The matrix
    [B, B] is 1 where two responses are in one part, else 0.
    """
    return is_same_part @ numbers / is_same_part.sum(1)


def _has_end_token(rows: Sequence[Row]) -> Tensor:
    """Tell which responses end in the end token, [B, 1].

    The end token is the one in which most responses end. If all end differently, it is
    not known, and every response counts as ended.
    """
    last_tokens = [row.response[-1] for row in rows]
    end, count = Counter(last_tokens).most_common(1)[0]
    return torch.tensor([[count < 2 or token == end] for token in last_tokens])


def _find_sources(
    tokens: Tokens, name: str, given_to_all: Sequence[Tensor], hp: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Find the response from which each response took its advantages or its old
    log-probabilities.

    Args:
        tokens: the weights that were read.
        name: the field of `Rollouts` that holds these numbers.
        given_to_all: the numbers of response j, given to all responses, [B, T], for
            each j.
        hp: the objective's hyperparameters.

    Returns:
        The source of each response, [B], and whether no other is possible, [B]. None
        where each response has its own, or where the responses are not exchanged one
        for one: a number that happens to equal another response's was not taken from
        it.
    """
    count = len(tokens.rows)
    right_multiples = right_factors(tokens.goal, tokens.padded)[:, None]
    # response i has the weights that the numbers of response j make
    has_numbers_of = torch.zeros(count, count, dtype=torch.bool)
    for j in range(count):
        change: Any = {name: given_to_all[j]}
        weights, mask = _weights_of_fault(tokens, _batch_fault("", id="", **change), hp)
        is_same = tokens.near(tokens.found, weights * right_multiples)
        has_numbers_of[:, j] = (is_same | ~mask).all(1)
    if name == "adv":
        # a response whose own advantage fits has its own, though another may be equal
        is_own = has_numbers_of.diagonal()
        only_own = torch.eye(count, dtype=torch.bool)
        has_numbers_of = torch.where(is_own[:, None], only_own, has_numbers_of)
    return _match_rows(has_numbers_of)


def _match_rows(possible: Tensor) -> tuple[Tensor, Tensor] | None:
    """Match each row with a source, no source twice.

    Args:
        possible: whether row i may have the numbers of row j, [B, B].

    Returns:
        The source of each row, [B], and whether no other is possible, [B]. None where
        each row may have its own numbers, where no row is certain to have another's,
        or where no match is left for a row.
    """
    count = len(possible)
    source = torch.full((len(possible),), -1)
    remaining = possible.clone()
    if possible.diagonal().all():
        return None
    # first the rows that have one possible source left
    while len(rows := ((remaining.sum(1) == 1) & (source < 0)).nonzero()[:, 0]):
        i = int(rows[0])
        j = int(remaining[i].int().argmax())
        source[i] = j
        remaining[:, j] = False
    is_certain = source >= 0
    has_other_source = source != torch.arange(count)
    if not (is_certain & has_other_source).any():
        return None
    # then the others, those with the fewest possible sources first
    uncertain = (~is_certain).nonzero()[:, 0].tolist()
    for i in sorted(uncertain, key=lambda i: int(possible[i].sum())):
        if not remaining[i].any():
            return None
        source[i] = i if remaining[i, i] else int(remaining[i].int().argmax())
        remaining[:, source[i]] = False
    return source, is_certain


def _rounding_faults(rollouts: Rollouts) -> Iterator[LossFault]:
    """Yield the faults that numbers of the rows were kept in half precision."""
    for half_precision in HALF_PRECISIONS:
        dtype = str(half_precision).removeprefix("torch.")
        for name, words in ROUNDED_WORDS.items():
            values = getattr(rollouts, name)
            if values is not None:
                yield _batch_fault(
                    f"the {words} are rounded to {dtype}",
                    id=f"{ROUNDED_IDS[name]}-rounded",
                    **{name: values.to(half_precision).to(values.dtype)},
                )


def _advantage_faults(tokens: Tokens, rollouts: Rollouts) -> Iterator[LossFault]:
    """Yield the faults that advantages are clipped or discounted, by the bound or the
    factor that the weights show.
    """
    has_weight = (
        tokens.padded.mask
        & ~tokens.is_stopped
        & ~tokens.found.isnan()
        & ~tokens.has_no_weight(tokens.found)
    )
    # 1 where there is no weight, so that nothing is divided by 0
    expected = torch.where(has_weight, tokens.expected, 1)
    multiples = torch.where(has_weight, tokens.found / expected, torch.nan)
    row_multiples = multiples.nanmedian(1).values
    is_smaller = row_multiples < 1 - 1e-3
    A = rollouts.adv[:, 0].abs()
    limits = (A * row_multiples)[is_smaller]
    if len(limits) > 1 and bool(((limits / limits[0] - 1).abs() < 1e-3).all()):
        limit = float(f"{float(limits.median()):.4g}")
        yield _batch_fault(
            f"advantages are clipped to ±{limit:g}",
            id="advantages-clipped",
            adv=rollouts.adv.clamp(-limit, limit),
        )
    if not has_weight.any() or not bool((multiples[has_weight] > 0).all()):
        return
    positions = torch.arange(has_weight.shape[1], dtype=torch.float64).expand(
        has_weight.shape
    )
    length = torch.tensor([[len(row.response)] for row in tokens.rows])
    trained_position = tokens.padded.mask.double().cumsum(1) - 1
    for where, discounted_tokens in (
        ("from the last token back", length - 1 - positions),
        ("from the first token on", positions),
        (
            "from the last token that trains back",
            trained_position.amax(1, keepdim=True) - trained_position,
        ),
    ):
        # log multiple = distance x log gamma + a constant of the row
        distance = _centered_by_row(discounted_tokens, has_weight)
        log_multiple = _centered_by_row(multiples.clamp(min=1e-300).log(), has_weight)
        if not bool(distance.any()):
            continue
        gamma = float(
            ((distance * log_multiple).sum() / (distance * distance).sum()).exp()
        )
        if abs(gamma - 1) > 1e-4:
            yield _batch_fault(
                f"A is discounted by {gamma:.4g} a token, {where}",
                id="advantages-discounted",
                adv=rollouts.adv
                * float(f"{gamma:.4g}") ** discounted_tokens.clamp(min=0),
            )


def _centered_by_row(numbers: Tensor, is_counted: Tensor) -> Tensor:
    """Return the numbers less their mean over the counted tokens of each row, [B, T]; 0
    on other tokens.
    """
    counted = torch.where(is_counted, numbers, 0)
    sums = counted.sum(1, keepdim=True)
    mean = sums / is_counted.sum(1, keepdim=True).clamp(min=1)
    return torch.where(is_counted, counted - mean, 0)


def _laid_over(numbers: Tensor, mask: Tensor, is_token: Tensor) -> Tensor:
    """Return the numbers of the tokens that train, written without gaps to the first
    response tokens of the batch, whether those train or not, [B, T].
    """
    numbers = numbers.expand_as(mask)
    laid_over = torch.zeros_like(numbers)
    places = is_token.nonzero()[: int(mask.sum())]
    laid_over[places[:, 0], places[:, 1]] = numbers[mask]
    return laid_over


def _wrong_length_faults(tokens: Tokens, hp: dict[str, Any]) -> Iterator[LossFault]:
    """Yield the faults that a response's mean log-ratio is divided by another length
    than that of its tokens that train.
    """
    term = term_of(tokens.goal.objective, hp)

    def divided_by(
        width: int | Tensor, lp: Tensor, old: Tensor, A: Tensor, mask: Tensor
    ) -> Tensor:
        """Return J with the sum of log r divided by this width."""
        return term(old + (lp - old) * mask.sum(1, keepdim=True) / width, old, A, mask)

    for length_id, words, part_of_row in (
        ("whole-row", "prompt and response", lambda row: row.ids),
        ("response", "the response, masked tokens included", lambda row: row.response),
    ):
        lengths = torch.tensor([[len(part_of_row(row))] for row in tokens.rows])[
            tokens.padded.mask.any(1)
        ]
        yield fault(
            f"the response's log-ratio is divided by the length of {words}",
            "ratio",
            id=f"log-ratio-over-{length_id}",
            J=partial(divided_by, lengths),
        )
    longest_row = max(len(row.ids) for row in tokens.rows)
    longest_response = max(len(row.response) for row in tokens.rows)
    for width in dict.fromkeys((longest_row - 1, longest_row, longest_response)):
        yield fault(
            "the response's log-ratio is divided by the padded width",
            "ratio",
            id="log-ratio-over-padded-width",
            J=partial(divided_by, width),
        )


def _is_accepted(objective: Objective, key: str, value: float) -> bool:
    """Tell whether the hyperparameter can have this value."""
    try:
        objective.resolve({key: value})
    except InputError:
        return False
    return True


def _features_of_lost_tokens(
    tokens: Tokens, rollouts: Rollouts
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the features by which tokens are lost. Each token that should train and does
    not train has the feature, and no token that trains has it.

    Yields:
        The id of the feature, the tokens with it in words, and which they are, [B, T].
    """
    should_train = tokens.padded.mask & ~tokens.is_stopped & ~tokens.found.isnan()
    has_no_weight = tokens.has_no_weight(tokens.found)
    is_lost = should_train & has_no_weight
    is_kept = should_train & ~has_no_weight
    if is_lost.sum() < 2 or not is_kept.any():
        return
    positions = torch.arange(should_train.shape[1]).expand(should_train.shape) + 1.0
    log_r = tokens.lp - rollouts.logp_old
    place = positions + torch.tensor([[len(row.prompt)] for row in tokens.rows])
    ids = torch.zeros_like(positions)
    for i, row in enumerate(tokens.rows):
        ids[i, : len(row.response)] = torch.tensor(row.response)
    for feature_id, words, feature in (
        ("tokens-of-one-id", "tokens that equal {:g}", ids),
        ("tokens-at-one-place", "the tokens at place {:g} of each row", place),
    ):
        values = feature[is_lost].unique()
        if len(values) == 1 and not (feature[is_kept] == values).any():
            yield feature_id, words.format(float(values)), feature == values
    if late := _late_tokens(is_kept, is_lost, positions, place):
        yield late
    features = (
        ("early-tokens-of-row", "tokens before place {:g} of a row", -place),
        ("far-tokens", "tokens with a log r above {:g} or below -{:g}", log_r.abs()),
        ("likelier-tokens", "tokens with a log r above {:g}", log_r),
        ("less-likely-tokens", "tokens with a log r below -{:g}", -log_r),
        ("large-advantages", "tokens with an advantage above {:g}", rollouts.adv),
        ("small-advantages", "tokens with an advantage below -{:g}", -rollouts.adv),
    )
    for feature_id, words, feature in features:
        largest_kept = float(feature[is_kept].max())
        smallest_lost = float(feature[is_lost].min())
        if (limit := between(largest_kept, smallest_lost)) is not None:
            yield feature_id, words.format(abs(limit), abs(limit)), feature > limit


def _late_tokens(
    is_kept: Tensor, is_lost: Tensor, positions: Tensor, place: Tensor
) -> tuple[str, str, Tensor] | None:
    """Return the feature that all lost tokens are behind a place, of their responses or
    of their rows; of either, where the lengths of these rows do not tell. None where
    neither separates lost tokens from kept ones.

    Args:
        is_kept, is_lost: the tokens that train, and those that should, [B, T].
        positions: of each token in its response, from 1 on.
        place: of each token in its row, its prompt included.
    """
    found = []
    for feature_id, whole, feature in (
        ("late-tokens", "response", positions),
        ("late-tokens-of-row", "row", place),
    ):
        largest_kept = float(feature[is_kept].max())
        smallest_lost = float(feature[is_lost].min())
        if (limit := between(largest_kept, smallest_lost)) is not None:
            words = f"behind the first {limit:g} of a {whole}"
            found.append((feature_id, words, feature > limit))
    if not found:
        return None
    feature_id, _, lost = found[0]
    return feature_id, f"tokens {' or '.join(words for _, words, _ in found)}", lost


def _row_orders(rows: Sequence[Row]) -> list[tuple[str, str, Tensor]]:
    """List the orders in which a loop may exchange rows.

    Returns:
        An id, words, and the number of the row whose numbers each row gets, [B].
    """
    count = len(rows)
    orders = []
    smaller_parts = [size for size in (4, 2) if size < count]
    for part_size in dict.fromkeys((count, *smaller_parts)):
        for shift in range(1, part_size):
            order_id = "later-rows"
            words = f"row i + {shift}"
            if shift > part_size // 2:
                order_id = "earlier-rows"
                words = f"row i - {part_size - shift}"
            if part_size < count:
                order_id = f"{order_id}-of-part"
                words = f"{words} of micro-batches of {part_size}"
            parts = torch.arange(count).split(part_size)
            order = torch.cat([part.roll(-shift) for part in parts])
            orders.append((order_id, words, order))
    lengths = torch.tensor([len(row.response) for row in rows])
    for longest_first in (False, True):
        order = lengths.argsort(descending=longest_first, stable=True)
        how = "by length, longest first" if longest_first else "by length"
        words = f"another row: responses are sorted {how}, and these are not"
        order_id = "rows-by-length-down" if longest_first else "rows-by-length"
        orders.append((order_id, words, order.argsort()))
    return orders


def _reordered(rows: Sequence[Row], values: Tensor, order: Tensor) -> Iterator[Tensor]:
    """Yield values of response tokens, [B, T], with the rows in this order.

    The rows that a loop exchanges may be responses, whole rows that are padded on the
    right, or whole rows that are padded on the left. In whole rows, a response's values
    begin at another column, so other values fall on its tokens.
    """
    lengths = [len(row.response) for row in rows]
    responses_only = [0] * len(lengths)
    padded_right = [len(row.prompt) for row in rows]
    width = max(len(row.ids) for row in rows)
    padded_left = [width - length for length in lengths]
    for first_columns in (responses_only, padded_right, padded_left):
        whole_rows = values.new_zeros(len(lengths), width + values.shape[1])
        for i, first in enumerate(first_columns):
            whole_rows[i, first : first + lengths[i]] = values[i, : lengths[i]]
        exchanged = whole_rows[order]
        yield torch.stack(
            [
                exchanged[i, first : first + values.shape[1]]
                for i, first in enumerate(first_columns)
            ]
        )


def _weights_of_fault(
    tokens: Tokens, known_fault: LossFault, hp: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the weights that a fault gives, and the tokens that train under it.

    Returns:
        Weights before aggregation, times the scale of the goal, [B, T], and a mask,
        [B, T]. The weights are huge where the fault cannot be computed, so that they
        fit nothing.
    """
    batch = tokens.rollouts()
    weights = torch.zeros_like(batch.logp)
    try:
        batch = known_fault.change.view(batch)
        # a batch has no response without a token that trains
        trains = batch.mask.any(1)
        trained_rows = {name: x[trains] for name, x in batch.tensors().items()}
        # the batch has the fault's view already
        change = replace(known_fault.change, view=lambda batch: batch)
        unscaled = change.weights(tokens.goal.objective, hp, batch.but(**trained_rows))
        weights[trains] = unscaled * tokens.goal.scale
    except (InputError, RuntimeError, TypeError, AttributeError, AssertionError):
        weights += 1e9
    return weights, batch.mask


def _without_holes(numbers: Tensor, mask: Tensor) -> Tensor:
    """Return the numbers of the tokens that train, moved together to the start of each
    row, [B, T]; 0 behind them.
    """
    moved_together = torch.zeros_like(numbers)
    for i, trains in enumerate(mask):
        moved_together[i, : trains.sum()] = numbers[i, trains]
    return moved_together
