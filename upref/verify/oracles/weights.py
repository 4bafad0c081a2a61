# SPDX-License-Identifier: Apache-2.0
"""A loss against its objective: weights by regime, weights on random batches,
aggregation, anchor, value.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.aggregation import KEPT_MEAN
from upref.errors import InputError
from upref.registry import REDUCE
from upref.rollouts import Rollouts
from upref.verify.explain import (
    SEARCH_SECONDS,
    by_fixed_length,
    cause_if_confirmed,
    cause_with_one_advantage,
    explain,
    first_confirmed,
    has_weights_found,
    holds_on_other_batches,
    in_low_precision,
    two_gradients,
)
from upref.verify.extent import bound_of_token
from upref.verify.factors import (
    MEANING,
    SAME_FACTOR,
    aggregation_id,
    aggregation_words,
    common_value,
    declared_aggregation,
)
from upref.verify.faults.denominators import (
    DIVIDED_BY_ALL,
    divided_by_kept,
    length_faults,
)
from upref.verify.faults.losses import LossFault, fault
from upref.verify.finding import NO_CAUSE, Cause, Number, TokenPlace, number_pair
from upref.verify.measure import EXACT_TOL, HABIT_TOL, VALUE_ROUNDING, LossCase
from upref.verify.oracle import oracle
from upref.verify.pattern import MeasuredWeights, pattern
from upref.verify.regions import Region, regions
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import (
    cut,
    differ,
    example,
    numbers,
    sampler_ratio,
    shrink,
    smallest,
    token_numbers,
    worst,
)
from upref.weights.batches import (
    OFF_EDGES,
    USUAL_MU,
    breakpoints,
    high_entropy_weight,
    make_batch,
    random_batch,
    random_batches,
)
from upref.weights.black_box import (
    part_with_advantage,
    single_token_batch,
    two_token_batch,
)
from upref.weights.curve import make_curve_of_objective

RANDOM_BATCHES = 60  # beside the grid
BELOW_LIMIT = (
    f"below the limit of {HABIT_TOL:g}, which leaves room for 1e-6 in a denominator"
)
ONLY_IN_FLOAT32 = (
    "weights are right up to what rounding its inputs to float32 makes of them"
)


@oracle("gradient", 10, needed=True)
def gradient(case: LossCase) -> list[Finding]:
    """Compare the weight of each token on the grid, then on random batches.

    Args:
        case: the loss and its objective.

    Returns:
        Failures, one for each region in which weights differ, and notes. A loss that is
        right to float32 alone gets a note, and `case` is compared as float32 from here
        on.
    """
    batch = case.grid()
    found = case.kept_weights(batch)
    errors = case.weight_error(batch, found)
    r = case.ratio(batch)
    A = torch.where(batch.mask, batch.adv.expand_as(errors), 0)
    ties = case.is_on_bound(batch)
    is_wrong = errors > case.tol
    failing = is_wrong & ~ties
    if (
        failing.any()
        and not case.single
        and _switches_to_float32(case, batch, found, ties)
    ):
        return [note("gradient", ONLY_IN_FLOAT32), *_random(case)]
    if failing.any():
        return _regimes(case, batch, failing, r, A, found, ties)
    findings = _ties(case, batch, is_wrong & ties, r, A, found)
    largest_error = errors.masked_fill(ties, 0).max()
    if not case.single and largest_error > EXACT_TOL:
        text = f"weights differ by {largest_error:.1e} relative"
        findings.append(note("gradient", text, cause=BELOW_LIMIT))
    return findings or _random(case)


def _switches_to_float32(
    case: LossCase, batch: Rollouts, found: Tensor, ties: Tensor
) -> bool:
    """Return whether the weights are right to the precision of float32, and no bound is
    moved. If so, the case is compared to that precision from here on: it is changed in
    place.
    """
    if _has_moved_bound(case):
        return False
    single = replace(case)
    single.in_float32()
    if (single.weight_error(batch, found) > single.tol).logical_and(~ties).any():
        return False
    # so far from the bounds that no rounding moves a token over them
    if single.weight_error(single.grid()).max() > single.tol:
        return False
    case.in_float32()
    return True


BESIDE_BOUND = 3e-7  # relative: farther from a bound than float32 rounds it
LIKELIEST = 0.99  # π_θ of the tokens beside a bound is below this
LEAST_TOKENS = 4  # at one bound, with several π_old, that show that it lies elsewhere
ERROR_BEYOND_BOUND = 0.01  # relative, of a weight on the other side of a bound


def _has_moved_bound(case: LossCase) -> bool:
    """Return whether the loss has one of the objective's bounds at another ratio for
    tokens of all π_old. Rounding moves some tokens over a bound and some back; a moved
    bound moves all.
    """
    objective = case.objective
    if objective.batch_coupled:
        return False
    weight: Callable[..., Any] = make_curve_of_objective(
        objective, **case.hp_without_kl
    )
    if "entropy" not in objective.reads:

        def one_row(tokens: list[Any]) -> Rollouts:
            """Return a batch of these tokens, (A, π_old, r) each."""
            return make_batch(tokens, objective.level, True, np.random.default_rng(0))

        return _moves_a_bound(case, weight, one_row)
    if _moves_a_bound(case, weight, _from_tokens(single_token_batch)):
        return True
    weight = high_entropy_weight(objective, case.hp_without_kl)
    return _moves_a_bound(case, weight, _from_tokens(two_token_batch))


def _from_tokens(make: Callable[..., Rollouts]) -> Callable[[list[Any]], Rollouts]:
    """Return a function that makes a batch of a list of tokens (A, π_old, r), from one
    that takes A, r and π_old apart.
    """
    return lambda tokens: make(*np.array(tokens)[:, [0, 2, 1]].T)


def _moves_a_bound(
    case: LossCase, weight: Callable[..., Any], make: Callable[[list[Any]], Rollouts]
) -> bool:
    """Return whether all tokens just beside one of the objective's bounds are wrong.

    Args:
        case: the loss and its objective.
        weight: the objective's weight of (r, A, π_old).
        make: from a list of tokens (A, π_old, r) to a batch, where each token is the
            first of its row if a row has several.
    """
    for A in (1.0, -1.0):
        for tokens in _tokens_beside_bounds(case, weight, A):
            if len(tokens) < LEAST_TOKENS:
                continue
            batch = case.ready(make(tokens))
            errors = case.weight_error(batch)
            if "entropy" in case.objective.reads:
                errors = errors[..., 0]
            else:
                errors = errors[batch.mask]
            if (errors > ERROR_BEYOND_BOUND).all():
                return True
    return False


def _tokens_beside_bounds(
    case: LossCase, weight: Callable[..., Any], A: float
) -> Iterator[list[tuple[float, float, float]]]:
    """Yield the tokens (A, π_old, r) just below each bound, and those just above it, at
    several π_old: one list for each side of each bound.

    Bounds at two π_old count as one if the weight is 0 on the same sides of both, and
    as many such bounds lie below them.
    """
    reads_mu = case.objective.reads_mu
    tokens_of: dict[tuple[Any, ...], list[tuple[float, float, float]]] = {}
    # bounds that depend on π_old are slow to find
    count = 8 if reads_mu else 24
    for mu in np.geomspace(0.02, 0.6, count).tolist():
        # how many bounds so far have a weight on the same sides
        bounds_like_it: Counter[tuple[bool, ...]] = Counter()
        mu_of_bounds = mu if reads_mu else USUAL_MU
        for bound in breakpoints(case.objective, A, mu_of_bounds, **case.hp_without_kl):
            ratios = bound * (1 - BESIDE_BOUND), bound * (1 + BESIDE_BOUND)
            has_weight = tuple((weight(ratios, A, mu) != 0).tolist())
            bounds_like_it[has_weight] += 1
            same_bound = has_weight, bounds_like_it[has_weight]
            for side, r in enumerate(ratios):
                if mu * r < LIKELIEST:
                    tokens_of.setdefault((side, *same_bound), []).append((A, mu, r))
    yield from tokens_of.values()


def _ties(
    case: LossCase,
    batch: Rollouts,
    wrong_ties: Tensor,
    r: Tensor,
    A: Tensor,
    found: Tensor,
) -> list[Finding]:
    """Return a note for each bound on which a weight is none of those between its two
    sides, where those beside it are right.
    """
    expected = case.expected(batch)
    notes = []
    for sign in (1.0, -1.0):
        of_sign = wrong_ties & (A * sign > 0)
        for bound in sorted({round(x, 9) for x in r[of_sign].tolist()}):
            i, t = (of_sign & ((r - bound).abs() < 1e-8)).nonzero()[0].tolist()
            place = TokenPlace(
                sign,
                numbers={case.objective.ratio_symbol: bound},
                remark="exactly on a bound, and not between the weights beside it",
            )
            notes.append(
                note(
                    "gradient",
                    "",
                    expected[i, t].item(),
                    found[i, t].item(),
                    place=place,
                )
            )
    return notes


def _regimes(
    case: LossCase,
    batch: Rollouts,
    failing: Tensor,
    r: Tensor,
    A: Tensor,
    found: Tensor,
    ties: Tensor,
) -> list[Finding]:
    """Return a failure for each region in which weights differ. Where one known fault
    gives all weights, all failures have its cause.
    """
    parts = [
        part
        for sign in (1.0, -1.0, 0.0)
        for part in regions(case, batch, sign, A, ties, failing, r, case.bounds(sign))
    ]
    bounds = sorted({round(end, 7) for part in parts for end in part.ends})
    known_fault = explain(case, batch, found, ties, bounds)
    prefer = _preference(case.weight_error(batch, found), r)
    if known_fault is not None:
        by_sign = _by_sign(parts)
        findings = _of_one_fault(case, batch, by_sign, failing, prefer, known_fault)
        if findings:
            case.cause = known_fault.cause
            return findings
    expected = case.expected(batch)
    compared = MeasuredWeights(
        batch, found, expected, r, case.objective.ratio_symbol, batch.mask & ~ties
    )
    if len(parts) > 2:
        parts = _by_sign(parts)
    of_responses = cause_with_one_advantage(case)
    failures: list[Finding] = []
    for part in parts:
        small, token = _smallest_of(case, batch, part, failing, prefer)
        # the pattern is that of all regions: the first failure has it
        if failures:
            why = NO_CAUSE
        else:
            why = of_responses or _pattern_of(case, compared, small)
        failures.append(_in_region(case, part, small, token, why))
    return failures


def _of_one_fault(
    case: LossCase,
    batch: Rollouts,
    parts: list[Region],
    failing: Tensor,
    prefer: Tensor,
    known_fault: LossFault,
) -> list[Finding]:
    """Return one finding for all regions that the fault explains, shown in the first
    region with a batch on which the printed gradients differ, or in the last region. A
    fault of a stop-gradient is a failure of the oracle stop-gradient too. Nothing where
    the fault does not have the weights found on the batch that is shown: it is then not
    the cause.

    Args:
        case, batch, failing, prefer: as of `_smallest_of`.
        parts: the regions, one for each sign of A.
        known_fault: the fault.
    """
    for part in parts:
        small, token = _smallest_of(case, batch, part, failing, prefer)
        finding = _in_region(case, part, small, token, known_fault.cause)
        if finding.example is not None:
            break
    if not has_weights_found(known_fault, case, small):
        return []
    also = tuple(other.place for other in parts if other is not part)
    finding = replace(finding, also=also)
    if known_fault.kind != "stop-gradient":
        return [finding]
    lost = fail("stop-gradient", "", cause=known_fault.cause, place=parts[0].place)
    return [finding, lost]


def _in_region(
    case: LossCase, part: Region, small: Rollouts, at: tuple[int, int], why: Cause
) -> Finding:
    """Return the failure of a region, shown by this token of its smallest batch."""
    place = replace(part.place, numbers=token_numbers(case, small, at))
    shown = example(case, small)
    return fail("gradient", "", *numbers(case, small, *at), shown, why, place=place)


def _pattern_of(case: LossCase, compared: MeasuredWeights, small: Rollouts) -> Cause:
    """Return what the wrong weights have in common, the first of: a relation of numbers;
    low precision; a coupling of responses. The order of the rows and the bound of the
    token that is shown are added to it where they matter, and so is a search that took
    too long.

    Args:
        case: the loss and its objective.
        compared: the weights of the batch that was compared.
        small: the smallest batch, which is shown.
    """
    found = case.kept_weights(small)
    expected = case.expected(small)
    r = case.ratio(small)
    symbol = case.objective.ratio_symbol
    shown = MeasuredWeights(small, found, expected, r, symbol, small.mask)
    by_token = case.objective.level not in REDUCE
    relation = pattern(compared, shown, case.tol, by_token)
    if relation.kind == "unknown":
        better = in_low_precision(case) or _coupling(case, compared)
        relation = better or relation
    if relation.kind != "why" and _changes_with_row_order(case):
        words = [relation.words] if relation.kind == "pattern" else []
        relation = Cause("; ".join([*words, ORDER_MATTERS]), kind="pattern")
    if relation.kind != "why" and (bound := bound_of_token(case, small)):
        words = [relation.words] if relation.kind == "pattern" else []
        relation = replace(bound, words="; ".join([*words, bound.words]))
    if case.search_ended and relation.kind != "why":
        ended = f"the search for a cause ended after {SEARCH_SECONDS:g} CPU seconds"
        relation = replace(relation, words=f"{relation.words}; {ended}")
    return relation


ORDER_MATTERS = (
    "the weights of a response change with its place among the rows, as where the rows are "
    "cut into parts that are averaged each by itself"
)


def _changes_with_row_order(case: LossCase) -> bool:
    """Return whether the gradients of the responses are others where the last row
    comes first. The opposite order would keep parts of equal size together.
    """
    # random numbers have no ties, which an order of rows may break
    batch = case.ready(random_batch(np.random.default_rng(37), case.one_adv, (24, 4)))
    rolled = torch.arange(len(batch.mask)).roll(1)
    try:
        found, again = (case.gradient(batch) for _ in range(2))
        reordered = case.gradient(batch.take(rolled))
    except InputError:  # it refuses such a batch
        return False
    is_random = not torch.equal(found, again)
    if is_random or not (found.isfinite().all() and reordered.isfinite().all()):
        return False
    largest_change = (reordered - found[rolled]).abs().max()
    return bool(largest_change > 1e-3 * found.abs().max())


ROWS_ALONE = 8  # responses that are measured each by itself
ALONE_IS_NOTHING = (
    "a response that is alone in its batch has no gradient, as where something is "
    "compared with its mean over the responses"
)
COUPLED = (
    "the weights within a response change with the other responses of its batch, by more "
    "than one factor: something is computed across responses, or from their number"
)


def _coupling(case: LossCase, compared: MeasuredWeights) -> Cause:
    """Return how the weights within a response change where it is alone in its batch;
    no cause where one factor explains it, as a denominator does. At most ROWS_ALONE
    responses are tried.

    Args:
        case: the loss and its objective.
        compared: the weights of the batch that was compared.
    """
    if case.objective.batch_coupled or "group" in case.objective.reads:
        return NO_CAUSE
    batch = replace(compared.b, group=None, totals=None)
    step = math.ceil(len(batch.mask) / ROWS_ALONE)
    rows = range(0, len(batch.mask), step)
    is_nothing = []
    for row in rows:
        part = cut(batch, [row], None)
        tokens = compared.use[row]
        beside_others = compared.found[row][tokens]
        if part is None or not beside_others.any():
            continue
        try:
            alone = case.weights(case.visible_batch(part))[0][tokens]
        except InputError:  # it refuses one response
            return NO_CAUSE
        is_nothing.append(
            bool((alone.abs() <= 1e-12 * beside_others.abs().max()).all())
        )
        if not is_nothing[-1] and _differ_by_more_than_a_factor(alone, beside_others):
            return Cause(COUPLED, kind="pattern")
    if is_nothing and all(is_nothing):
        return Cause(ALONE_IS_NOTHING, kind="pattern")
    return NO_CAUSE


def _differ_by_more_than_a_factor(x: Tensor, y: Tensor) -> bool:
    """Return whether no factor k gives x = k y to 1e-3 of the largest x. k is fitted by
    least squares. False where a number is not finite.
    """
    if not (x.isfinite().all() and y.isfinite().all()):
        return False
    factor = (x * y).sum() / (y * y).sum()
    return bool((x - factor * y).abs().max() > 1e-3 * x.abs().max())


def _smallest_of(
    case: LossCase, batch: Rollouts, part: Region, failing: Tensor, prefer: Tensor
) -> tuple[Rollouts, tuple[int, int]]:
    """Return the smallest batch in which tokens of this region differ, and the token
    that differs most.

    Args:
        case: the loss and its objective.
        batch: the batch that is made smaller, [B, T].
        part: the region.
        failing: the tokens of the batch that differ, [B, T].
        prefer: how much each token should be the one that is shown, [B, T].
    """
    wrong_tokens = part.tokens & failing
    wrong_at = _wrong_at
    # where none is visible, another aggregation than the objective's makes up for it
    visible = _visibly_wrong_at(case, batch, part.sign) & wrong_tokens
    if visible.any():
        wrong_tokens = visible
        wrong_at = _visibly_wrong_at

    def shows(case: LossCase, batch: Rollouts, sign: float) -> Tensor:
        """Return the tokens of a smaller batch that are wrong and lie in the region."""
        return wrong_at(case, batch, sign) & part.contains(case.ratio(batch))

    def smallest_with(
        shows: Callable[..., Tensor], wrong_tokens: Tensor
    ) -> tuple[Rollouts, tuple[int, int]]:
        """Return the smallest batch with such a token, and the token that differs most
        in it.
        """
        token = worst(torch.where(wrong_tokens, prefer, -1.0))
        small = shrink(batch, lambda x: bool(shows(case, x, part.sign).any()), token)
        shown = shows(case, small, part.sign)
        errors = case.weight_error(small, case.kept_weights(small))
        return small, worst(errors.masked_fill(~shown, -1.0))

    small, token = smallest_with(shows, wrong_tokens)
    if not case.single and not _beyond_float32(case, small)[token]:
        # a bound that the loss computes in float32 is not what is wrong with it
        clearly_wrong = wrong_tokens & _beyond_float32(case, batch)
        if clearly_wrong.any():
            return smallest_with(
                lambda *arguments: shows(*arguments) & _beyond_float32(*arguments[:2]),
                clearly_wrong,
            )
    return small, token


def _beyond_float32(case: LossCase, batch: Rollouts) -> Tensor:
    """Return the tokens whose weight is wrong by more than the rounding of float32,
    [B, T].

    Args:
        case: the loss and its objective.
        batch: the batch.
    """
    single = replace(case)
    single.in_float32()
    return single.weight_error(batch, case.kept_weights(batch)) > single.tol


def _by_sign(parts: list[Region]) -> list[Region]:
    """Merge the regions of each sign of A into one, in the order in which the signs come
    first. More findings of one fault are hard to read.
    """
    merged = []
    for sign in dict.fromkeys(p.sign for p in parts):
        of_sign = [p for p in parts if p.sign == sign]
        tokens = torch.stack([p.tokens for p in of_sign]).any(0)
        intervals = tuple(interval for p in of_sign for interval in p.place.intervals)
        place = replace(of_sign[0].place, intervals=intervals)
        merged.append(Region(place, sign, tokens))
    return merged


def _wrong_at(case: LossCase, batch: Rollouts, sign: float) -> Tensor:
    """Return the tokens of this sign of A whose weight is wrong, [B, T]."""
    has_sign = batch.adv.expand_as(batch.mask).sign() == sign
    errors = case.weight_error(batch, case.kept_weights(batch))
    return (errors > case.tol) & has_sign


def _visibly_wrong_at(case: LossCase, batch: Rollouts, sign: float) -> Tensor:
    """Return the tokens of this sign of A whose weight is wrong, and whose dJ/dlp is
    another number too, [B, T].
    """
    return _wrong_at(case, batch, sign) & differ(case, batch)


def _preference(errors: Tensor, r: Tensor) -> Tensor:
    """Return how much each token should be the one that is shown, [B, T], above 0: most
    where the error is large and the ratio is near 1.
    """
    finite_errors = errors.nan_to_num(posinf=1e30).clamp(max=1e30)
    # a log r of 1 / 20 counts as much as half of the error
    return finite_errors / (1 + r.log().abs() * 20) + 1e-12


def _random_batches(case: LossCase) -> list[Rollouts]:
    """Return the random batches, as the loss can read them: the same objects each time.
    An objective whose bounds must be solved for is slow: it gets fewer.
    """
    count = RANDOM_BATCHES // 4 if case.objective.reads_mu else RANDOM_BATCHES
    return case.cached(
        ("random", count),
        lambda: list(map(case.visible_batch, random_batches(0, count, case.one_adv))),
    )


def _random(case: LossCase) -> list[Finding]:
    """Return the failure on the first random batch with a wrong weight, shown in the
    smallest part of it, as a list; [] if all batches are right to 10 times the
    tolerance.
    """
    for n, batch in enumerate(_random_batches(case)):
        _, gradient = case.kept_value_and_gradient(batch)
        errors = case.weight_error(batch, gradient / case.factors(batch))
        if not errors.max() > 10 * case.tol:
            continue
        errors = errors.masked_fill(case.rounded(batch), 0)
        if errors.max() > 10 * case.tol:
            known_fault = explain(
                case, batch, case.kept_weights(batch), case.rounded(batch), []
            )
            batch, i, t = smallest(case, batch, worst(errors))
            if known_fault and not has_weights_found(known_fault, case, batch):
                known_fault = None
            sign = batch.adv[i, t].sign().item()
            ratio = case.ratio(batch)[i, t].item()
            ratios = {case.objective.ratio_symbol: ratio} | sampler_ratio(
                case, batch, (i, t)
            )
            place = TokenPlace(
                sign, numbers=ratios, remark=f"first seen in random batch {n}"
            )
            expected, found = numbers(case, batch, i, t)
            remark = _words_for_weight_alone(case, batch, i, t)
            found_number = Number(found, "weight", remark)
            cause = known_fault.cause if known_fault else in_low_precision(case)
            cause = cause or _right_without_holes(case, batch)
            cause = cause or bound_of_token(case, batch)
            cause = cause or _one_factor_of_batch(case, batch)
            return [
                fail(
                    "gradient",
                    "",
                    expected,
                    found_number,
                    example(case, batch),
                    cause,
                    place=place,
                )
            ]
    return []


def _one_factor_of_batch(case: LossCase, batch: Rollouts) -> Cause:
    """Return by which factor all weights of a small batch are off, and whether it is the
    share of its slots that are tokens; no cause where they have several factors, where
    the factor is 1, or where one weight alone has it.

    Args:
        case: the loss and its objective.
        batch: the batch.
    """
    expected = case.expected(batch)
    use = batch.mask & (expected.abs() > 1e-9)
    factor = common_value((case.kept_weights(batch) / expected)[use])
    if factor is None or abs(factor - 1) < 1e-6:
        return NO_CAUSE
    words = f"every weight of the batch below is {factor:.5g} times what it should be"
    tokens = int(batch.mask.sum())
    slots = batch.mask.numel()
    if tokens < slots and abs(factor - tokens / slots) < 1e-6:
        words += (
            f", as where all of its {slots} slots are counted, not its {tokens} tokens"
        )
    elif use.sum() < 2:
        return NO_CAUSE  # of one number alone this says nothing
    return Cause(words, kind="pattern")


RIGHT_WITHOUT_HOLES = (
    "with the same tokens at the front of their rows the weights are right: masked slots "
    "before or between the tokens change them"
)


def _right_without_holes(case: LossCase, batch: Rollouts) -> Cause:
    """Return that the weights are right where the tokens of each row stand in front of
    its masked slots; no cause where they do so already, or where they are wrong there.
    """
    order = (~batch.mask).int().argsort(stable=True, dim=1)
    if torch.equal(batch.mask.gather(1, order), batch.mask):
        return NO_CAUSE
    fields = {
        name: x.gather(1, order) if x.shape == batch.mask.shape else x
        for name, x in batch.tensors().items()
    }
    try:
        errors = case.weight_error(case.visible_batch(Rollouts.unchecked(**fields)))
    except InputError:
        return NO_CAUSE
    is_right = bool(errors.max() <= case.tol)
    return Cause(RIGHT_WITHOUT_HOLES, kind="pattern") if is_right else NO_CAUSE


def _words_for_weight_alone(case: LossCase, batch: Rollouts, i: int, t: int) -> str:
    """Return the words for the weight that the same token has in a batch of its own; ""
    where it is the same, where A is 0, and where the token is alone already or has
    another ratio alone.
    """
    A = batch.adv[i, t].item()
    has_other_ratio_alone = case.objective.level in (*REDUCE, "custom")
    if has_other_ratio_alone or A == 0 or batch.mask.sum() == 1:
        return ""
    r = (batch.logp[i, t] - batch.logp_old[i, t]).exp().item()
    mu = batch.logp_old[i, t].exp().item()
    alone = case.weights(case.ready(single_token_batch(A, [r], [mu])))[0, 0].item()
    if abs(alone - case.weights(batch)[i, t].item()) <= 1e-6 * abs(A):
        return ""
    return f"and {alone:.6g} alone in its batch"


@oracle(
    "on-policy",
    20,
    lambda case: case.objective.on_policy_exception,
    implied=True,
    needed=True,
)
def on_policy(case: LossCase) -> list[Finding]:
    """Compare the weights at r = 1.

    Args:
        case: the loss and its objective.

    Returns:
        One failure, shown in the smallest batch, with a known fault or the one factor of
        all weights as its cause. Nothing if the weights are right to 10 times the
        tolerance, or if dJ/dlp is right, which leaves it to the oracle `aggregation`.
    """
    batch = case.on_policy()
    errors = case.weight_error(batch, case.kept_weights(batch))
    if errors.max() <= 10 * case.tol:
        return []
    if not differ(case, batch)[errors > 10 * case.tol].any():
        return []  # the oracle `aggregation` reports another aggregation

    def shows(batch: Rollouts) -> bool:
        """Return whether a weight is wrong, and dJ/dlp there is another number too."""
        is_wrong = case.weight_error(batch, case.kept_weights(batch)) > 10 * case.tol
        return bool((differ(case, batch) & is_wrong).any())

    small = shrink(batch, shows, worst(errors.masked_fill(~differ(case, batch), 0)))
    errors = case.weight_error(small, case.kept_weights(small))
    i, t = worst(errors.masked_fill(~differ(case, small), 0))
    scaled = case.kept_weights(batch) / case.scale
    scaling = fault(
        f"every weight is {case.scale:.5g} times what it should be",
        "rounding",
        id="weights-scaled",
        scale=lambda batch: case.scale,
    )
    is_scaled = (
        case.fits
        and abs(case.scale - 1) > 1e-5
        and bool(case.weight_error(batch, scaled).max() <= 10 * case.tol)
    )
    cause = case.cause or first_confirmed(case, two_gradients(case, batch))
    if is_scaled:
        scaling = next(by_fixed_length(case), scaling)
    if not cause and is_scaled:  # on many rows too: few may have a factor of their own
        cause = cause_if_confirmed(case, scaling, case.grid(edges=OFF_EDGES))
    if not cause and not case.wrong:  # too little to show in a batch of many tokens
        cause = first_confirmed(case, length_faults(case))
    place = TokenPlace(
        small.adv[i, t].sign().item(),
        numbers={case.objective.ratio_symbol: 1.0} | sampler_ratio(case, small, (i, t)),
    )
    return [
        fail(
            "on-policy",
            "",
            *numbers(case, small, i, t),
            example(case, small),
            cause,
            place=place,
        )
    ]


@oracle("aggregation", 30, needed=True)
def aggregation(case: LossCase) -> list[Finding]:
    """Compare the factors of the responses, by which the aggregation multiplies their
    weights.

    Args:
        case: the loss and its objective.

    Returns:
        A failure at the response whose factor is off by most, in the smallest batch; a
        note where all factors are off by one that is nearly 1; nothing where they agree,
        and where no aggregation explains the gradient.
    """
    batch = case.on_policy()
    declared = declared_aggregation(case.objective)
    is_declared = declared == case.agg
    declared_words = aggregation_words(declared) if is_declared else case.objective.agg
    if case.agg == declared and HABIT_TOL < abs(case.scale - 1) < SAME_FACTOR:
        return [
            note(
                "aggregation",
                f"a factor of 1 {case.scale - 1:+.1e}",
                cause=f"below the limit of {SAME_FACTOR:g} of a factor",
            )
        ]

    def factors_differ(batch: Rollouts) -> bool:
        """Return whether the factors of this batch differ."""
        return not torch.allclose(
            case.factors(batch, declared), case.factors(batch), rtol=1e-6
        )

    def shows(batch: Rollouts) -> bool:
        """Return whether the factors differ, and dJ/dlp is another number too."""
        return factors_differ(batch) and bool(differ(case, batch).any())

    if not case.fits or not factors_differ(batch):
        return []
    small = shrink(batch, shows if shows(batch) else factors_differ)
    lengths = small.mask.sum(1)
    right_factors = case.factors(small, declared)[:, 0]
    found_factors = case.factors(small)[:, 0]
    row = int((found_factors / right_factors - 1).abs().argmax())
    has_group = case.loss.visible_batch(batch).group is not None
    if has_group or case.objective.agg != "group-token-mean":
        group = ""
    else:
        group = " (the loss takes no groups: the batch counts as one)"
    text = f"ragged lengths (here a response of {int(lengths[row])} of {int(lengths.sum())} tokens)"
    expected = Number(
        right_factors[row].item(), "factor", f"by {declared_words}{group}"
    )
    found = Number(
        found_factors[row].item(), "factor", f"by {aggregation_words(case.agg)}"
    )

    why = _cause_of_factors(case, batch)
    return [fail("aggregation", text, expected, found, example(case, small), why)]


def _cause_of_factors(case: LossCase, batch: Rollouts) -> Cause:
    """Return the cause that the loss has the aggregation that was recognized, if it
    explains other batches too.
    """
    roles_at_old_policy = ["logp", "logp_ref"]
    if case.objective.sampler:
        roles_at_old_policy.append("logp_sampler")

    def gradients_at_old_policy(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the part of the gradient that depends on A, where all policies are
        π_old: as found, and as the aggregation makes it. There, as in `make_case`,
        neither a clip nor a KL term acts.
        """
        replaced = dict.fromkeys(roles_at_old_policy, batch.logp_old)
        at_old_policy = case.visible_batch(batch.but(**replaced))
        expected = case.expected(at_old_policy) * case.factors(at_old_policy)
        return part_with_advantage(case.gradient, at_old_policy), expected * case.scale

    # a wrong power of the response's ratio looks like a factor at r = 1
    may_be_power = case.objective.one_adv and "gradient" in case.failed
    if may_be_power or not holds_on_other_batches(case, gradients_at_old_policy, batch):
        return NO_CAUSE
    if case.agg == KEPT_MEAN:
        return divided_by_kept(case)
    if case.objective.agg == KEPT_MEAN and case.agg == "token-mean":
        return DIVIDED_BY_ALL
    words = aggregation_words(case.agg)
    # a response's own number may have the factor of a sum over its tokens without one
    is_of_tokens = case.objective.level == "token"
    is_own = not case.loss.left_to_caller
    if (
        is_own
        and is_of_tokens
        and case.agg in MEANING
        and abs(case.scale - 1) < SAME_FACTOR
    ):
        words = f"{words}: {MEANING[case.agg]}"
    if case.objective.rejects and "gradient" in case.failed:
        words += ", in batches that lose no token to a rejection"
    return Cause(words, (aggregation_id(case.agg),))


VALUE_BATCHES = 10  # random batches on which the value is compared


@oracle(
    "value", 150, lambda case: "the weights are wrong already" if case.wrong else ""
)
def value(case: LossCase) -> list[Finding]:
    """Compare the value of the loss on random batches, up to the first that differs. A
    value that is not finite is a failure. Another difference, which has no effect on the
    gradient, is a note, but where the value changes from call to call.
    """
    tol = max(VALUE_ROUNDING, case.tol, case.value_tol)
    for n, batch in enumerate(_random_batches(case)[:VALUE_BATCHES]):
        found_value, _ = case.kept_value_and_gradient(batch)
        found = found_value.item()
        expected = case.expected_value(batch)
        if not math.isfinite(found):
            return [
                fail(
                    "value", f"random batch {n}", *number_pair("value", expected, found)
                )
            ]
        if abs(found - expected) > tol * max(1, abs(expected)):
            why = "a form or a constant without effect on the gradient"
            return [
                note(
                    "value",
                    "the value differs",
                    *number_pair("value", expected, found),
                    why,
                )
            ]
    return []
