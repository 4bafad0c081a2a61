# SPDX-License-Identifier: Apache-2.0
"""Known faults of losses in what a sum is divided by: lengths that are changed, and
means over parts of a batch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from upref.aggregation import KEPT_MEAN, OVER_RESPONSES
from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.factors import (
    FACTORS,
    aggregation_words,
    common_value,
    declared_aggregation,
)
from upref.verify.faults import SIGN_IDS, hyperparameter_id
from upref.verify.faults.batch_reading import bisected
from upref.verify.faults.corrections import divisor_ratio
from upref.verify.faults.losses import LossFault, fault
from upref.verify.finding import Cause
from upref.verify.measure import LossCase
from upref.weights.batches import random_batch
from upref.weights.black_box import part_with_advantage

PARTS = range(2, 9)  # into which a batch is cut
PART_SIZES = range(2, 17)  # rows of a part
COLUMN_SIZES = (1, 2, 3, 4, 5, 8, 10, 16, 32)  # columns of a part
QUANTILES = tuple(k / 20 for k in range(1, 20))  # of the entropy, that are tried
BLOCKS = range(2, 17)  # rows that are taken for the responses to one prompt
LEAST_ADDED = 1e-4  # to a length: a smaller number is a guard against 0
SIGNS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("A > 0", lambda A: A > 0),
    ("A < 0", lambda A: A < 0),
    ("A <= 0", lambda A: A <= 0),
)
# ids of the faults of a length, which hold for responses of any length
OF_LENGTHS = (
    "number-added-to-length",
    "number-added-to-token-count",
    "length-at-least",
)
# the factor on each of two means, and the words for how they are combined
MEANS = ((1.0, "the two means are added"), (0.5, "the two means are averaged"))
# from a batch to the factor of each token's weight, [B, T] or [B, 1]
ByToken = Callable[[Rollouts], Tensor]


def divided(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults of lengths, of means over one sign of A, and of means over parts
    of the batch.

    Args:
        case: the loss and its objective.
    """
    yield from length_faults(case)
    yield from counted_faults(case)
    yield from _rounded(case)
    yield from _by_sign(case)
    yield from _parts(case)
    yield from _column_parts(case)
    yield from _prompts(case)


DIVIDED_BY_KEPT = Cause(
    "it divides by the tokens that were kept, not by all trained tokens: that is --agg kept-mean",
    ("divided-by-kept-tokens",),
)
BY_TOKENS = ("token-mean", "group-token-mean", KEPT_MEAN)
DIVIDED_BY_ALL = Cause(
    "it divides by all trained tokens, rejected ones too, not by those that were kept: that is --agg token-mean",
    ("divided-by-rejected-tokens-too",),
)


def kept_faults(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that a mean counts the tokens that a filter or a correction
    rejects, or leaves them out, against what the objective's aggregation says.

    Args:
        case: the loss and its objective.
    """
    if not case.objective.rejects:
        return

    def over_kept(batch: Rollouts) -> Tensor:
        """Return the factor that divides by all kept tokens, [B, 1]."""
        return case.factors(batch, KEPT_MEAN)

    def over_kept_of_response(batch: Rollouts) -> Tensor:
        """Return the factor that divides by the response's kept tokens, [B, 1]."""
        kept = case.kept(batch).sum(1, keepdim=True).clamp(min=1)
        return 1 / (len(batch.mask) * kept.to(batch.logp.dtype))

    if case.objective.agg == KEPT_MEAN:
        cause = DIVIDED_BY_ALL
        factor: ByToken = partial(case.factors, agg="token-mean")
    else:
        cause = divided_by_kept(case)
        factor = over_kept
    yield _aggregated(case, cause.words, factor, id=cause.ids[0])
    yield _aggregated(
        case,
        "each response is divided by its own tokens that were kept",
        over_kept_of_response,
        id="divided-by-kept-tokens-of-response",
    )
    yield _aggregated(
        case,
        "it divides by the number of responses with a token that was kept, not by a number of tokens",
        lambda batch: _over(case.kept(batch).any(1), batch),
        id="divided-by-kept-responses",
    )
    yield _aggregated(
        case,
        "padding counts as kept: it divides by the tokens that were kept and by all masked slots",
        lambda batch: _over(case.kept(batch) | ~batch.mask, batch),
        id="divided-by-kept-tokens-and-padding",
    )
    if case.objective.sampler is not None:
        yield _aggregated(
            case,
            "it divides by the sum of the sampler's weights, not by a number of tokens",
            partial(_over_sum_of_weights, case),
            id="divided-by-sum-of-sampler-weights",
        )
    if case.objective.keeps is not None and "entropy" in case.objective.reads:
        yield from _entropy_faults(case)


# ---- a rejection by the ratio of the update -------------------------------------------
LOG_RATIOS = np.linspace(-4, 4, 80)  # at which a rejection is measured: none is 0
LOG_OLD = -5.0  # log π_old of these tokens: log π_θ is below 0 too


class DependsOnOthers(Exception):
    """Other tokens of the batch decide whether a token loses its gradient."""


def rejected_by_ratio(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that tokens are rejected by their ratio π_θ/π_old, and that the
    divisor counts them or does not. The bounds are measured. Nothing is yielded if no
    token loses its gradient, if a token loses it beside others and not alone, if the loss
    refuses such tokens, or for an objective whose ratio is not that of a token.

    Args:
        case: the loss and its objective.
    """
    if case.objective.level != "token":
        return

    def has_lost_gradient(log_ratios: np.ndarray) -> np.ndarray:
        """Return which tokens of these log-ratios should have a weight and have none.
        A pushes each towards a ratio of 1, so that no clip stops it.
        """
        log_r = torch.as_tensor(log_ratios)[:, None]
        old = torch.full_like(log_r, LOG_OLD)
        A = -log_r.sign()
        ones = torch.ones_like(log_r)
        batch = case.ready(
            Rollouts(old + log_r, old, A, ones.bool(), logp_ref=old, entropy=ones)
        )
        found = case.weights(batch)
        # NaN: a divisor that counts the kept tokens, and none is kept
        has_none = (found == 0) | found.isnan()
        return (has_none & (case.expected(batch) != 0))[:, 0].numpy()

    def is_lost_at(log_ratio: float) -> bool:
        """Return whether a token of this log-ratio has lost its gradient."""
        return bool(has_lost_gradient(np.array([log_ratio]))[0])

    def bound(start: int, step: int) -> float:
        """Return the ratio beyond which tokens are lost, from a place of LOG_RATIOS on in
        steps; 0 or infinity where none is.
        """
        places = range(start, len(LOG_RATIOS) if step > 0 else -1, step)
        lost = next((n for n in places if is_lost[n]), None)
        # a token with a ratio near 1 is never rejected
        if lost is None or lost == start:
            return 0.0 if step < 0 else math.inf
        if not is_lost_at(LOG_RATIOS[lost]) or is_lost_at(LOG_RATIOS[lost - step]):
            raise DependsOnOthers
        found = bisected(is_lost_at, LOG_RATIOS[lost - step], LOG_RATIOS[lost])
        return float(f"{math.exp(found):.6g}")

    try:
        is_lost = has_lost_gradient(LOG_RATIOS)
        half = len(LOG_RATIOS) // 2
        low = bound(half - 1, -1)
        high = bound(half, 1)
    except (InputError, DependsOnOthers):  # InputError: it refuses such a batch
        return
    if low == 0 and high == math.inf:
        return

    def kept(batch: Rollouts) -> Tensor:
        """Return the tokens whose ratio is within the bounds, [B, T]."""
        r = torch.where(batch.mask, batch.logp - batch.logp_old, 0).exp()
        return batch.mask & (r >= low) & (r <= high)

    def counted(batch: Rollouts) -> Tensor:
        """Return the factor of each token where the divisor counts all, [B, T]."""
        return _own_factor(case, batch) * kept(batch)

    def not_counted(batch: Rollouts) -> Tensor:
        """Return the factor of each token where the divisor counts the kept ones."""
        return _over(kept(batch), batch) * kept(batch)

    def unclipped(batch: Rollouts, factor: ByToken) -> Tensor:
        """Return the weights r A with this factor, [B, T]."""
        r = torch.where(batch.mask, batch.logp - batch.logp_old, 0).exp()
        return r * batch.adv * factor(batch) / case.factors(batch)

    sides = [
        f"below {low:g}" if low else "",
        f"above {high:g}" if high < math.inf else "",
    ]
    rejected = (
        f"tokens whose ratio π_θ/π_old is {' or '.join(filter(None, sides))} are rejected, "
        "for both signs of A: they have no gradient"
    )
    divisors = [("counts them", "rejected-by-ratio-but-counted", counted)]
    if declared_aggregation(case.objective) in BY_TOKENS:
        divisors.append(("does not count them", "rejected-by-ratio", not_counted))
    for counts, fault_id, factor in divisors:
        words = f"{rejected}, and the divisor {counts}"
        yield _aggregated(case, words, factor, id=fault_id)
        if not case.hp.get("beta"):
            yield fault(
                f"{words}; between these bounds no clip acts",
                "clip",
                id=f"{fault_id}-without-clip",
                weigh=partial(unclipped, factor=factor),
                whole=True,
            )


def divided_by_kept(case: LossCase) -> Cause:
    """Return the cause that a sum is divided by the tokens that were kept.

    Args:
        case: a loss and its objective, which divides by something else.
    """
    if declared_aggregation(case.objective) in BY_TOKENS:
        return DIVIDED_BY_KEPT
    words = "it divides by the number of tokens that were kept: that is --agg kept-mean"
    return replace(DIVIDED_BY_KEPT, words=words)


def counted_faults(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that a mean over tokens leaves clipped tokens, or those with A = 0,
    out of its divisor.

    Args:
        case: the loss and its objective.
    """
    if declared_aggregation(case.objective) not in BY_TOKENS:
        return

    def moves(batch: Rollouts) -> Tensor:
        """Return the tokens with A other than 0, [B, T]."""
        return batch.adv.expand_as(batch.logp) != 0

    def counted(batch: Rollouts) -> Tensor:
        """Return the tokens that the objective counts, [B, T]."""
        is_kept_mean = case.objective.agg == KEPT_MEAN
        return case.kept(batch) if is_kept_mean else batch.mask

    def trained(batch: Rollouts) -> Tensor:
        """Return the tokens with a gradient, [B, T]."""
        return case.expected(batch) != 0

    yield _aggregated(
        case,
        "clipped tokens are left out of the divisor: it counts those without a clip",
        lambda batch: _over(trained(batch) | (counted(batch) & ~moves(batch)), batch),
        id="divided-by-unclipped-tokens",
    )
    yield _aggregated(
        case,
        "tokens with A = 0 are left out of the divisor",
        lambda batch: _over(counted(batch) & moves(batch), batch),
        id="divided-by-tokens-with-advantage",
    )


def _over(counted: Tensor, batch: Rollouts) -> Tensor:
    """Return the factor that divides by a count, at least 1, [B, 1]."""
    count = counted.sum().clamp(min=1).to(batch.logp.dtype)
    return (1 / count).expand(len(batch.mask), 1)


def _over_sum_of_weights(case: LossCase, batch: Rollouts) -> Tensor:
    """Return the factor that divides by the sum of the sampler's weights, [B, 1]."""
    factors = case.objective.factors(batch, **case.hp_without_kl)
    assert factors is not None
    total = torch.where(batch.mask, factors, 0).sum().clamp(min=1e-12)
    return (1 / total).expand(len(batch.mask), 1)


# ---- a selection by entropy ----------------------------------------------------------
# from the entropies, the mask and the quantile to the tokens that are kept, or to a
# factor of each token
Selection = Callable[[Tensor, Tensor, float], Tensor]


def _above(H: Tensor, mask: Tensor, q: float) -> Tensor:
    """Return the trained tokens whose entropy is at least the quantile q."""
    return mask & (H >= H[mask].quantile(q))


def _above_with_padding(H: Tensor, mask: Tensor, q: float) -> Tensor:
    """Return the same, of a quantile to which padding adds zeros."""
    return mask & (H >= torch.where(mask, H, 0).flatten().quantile(q))


def _above_of_all_slots(H: Tensor, mask: Tensor, q: float) -> Tensor:
    """Return the same, of a quantile to which padding adds what it holds."""
    return mask & (H >= H.flatten().quantile(q))


def _above_of_response(H: Tensor, mask: Tensor, q: float) -> Tensor:
    """Return the same, of a quantile of each response."""
    bounds = torch.where(mask, H, torch.nan).nanquantile(q, dim=1, keepdim=True)
    return mask & (H >= bounds)


def _below(H: Tensor, mask: Tensor, q: float) -> Tensor:
    """Return the trained tokens whose entropy is at most the quantile 1 - q."""
    return mask & (H <= H[mask].quantile(round(1 - q, 12)))


def _below_unrounded(H: Tensor, mask: Tensor, q: float) -> Tensor:
    """Return the same, where 1 - q is rounded to binary: it moves a bound that is one of
    the entropies.
    """
    return mask & (H <= H[mask].quantile(1 - q))


def _not_above(H: Tensor, mask: Tensor, q: float) -> Tensor:
    """Return the trained tokens whose entropy is below the quantile q."""
    return mask & ~_above(H, mask, q)


SELECTIONS: tuple[tuple[str, str, Selection], ...] = (
    (
        "tokens of low entropy train too: none is left out",
        "low-entropy-trains",
        lambda H, mask, q: mask,
    ),
    (
        "the tokens of low entropy train, not those of high entropy",
        "low-entropy-alone-trains",
        _below,
    ),
    (
        "the tokens of low entropy train, not those of high entropy",
        "low-entropy-alone-trains",
        _below_unrounded,
    ),
    (
        "the tokens below the quantile train, not those above it",
        "low-entropy-alone-trains",
        _not_above,
    ),
    (
        "the quantile of the entropy counts padding as entropies of 0",
        "entropy-quantile-with-padding",
        _above_with_padding,
    ),
    (
        "the quantile of the entropy is over all slots, padding included",
        "entropy-quantile-with-padding",
        _above_of_all_slots,
    ),
    (
        "the quantile of the entropy is of each response, not of the batch",
        "entropy-quantile-of-response",
        _above_of_response,
    ),
    (
        "tokens are multiplied by their entropy, not selected by it",
        "weighted-by-entropy",
        lambda H, mask, q: mask * H,
    ),
    (
        "tokens are multiplied by their entropy over the mean entropy, not selected by it",
        "weighted-by-entropy",
        lambda H, mask, q: mask * H / H[mask].mean(),
    ),
)


def _entropy_faults(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that tokens are selected by their entropies in another way; last,
    at another quantile. The divisor is as the aggregation says.

    Args:
        case: the loss and its objective.
    """

    def weights(batch: Rollouts, select: Selection, q: float) -> Tensor:
        """Return the objective's weights with this selection, [B, T]."""
        assert batch.entropy is not None
        factors = select(batch.entropy, batch.mask, q)
        of_all = case.expected(batch.but(entropy=torch.ones_like(batch.logp)))
        is_mask = factors.dtype == torch.bool
        kept = factors if is_mask else batch.mask
        return of_all * factors * divisor_ratio(case, batch, kept)

    own = case.hp["entropy_quantile"]
    for words, fault_id, select in SELECTIONS:
        weigh = partial(weights, select=select, q=own)
        yield fault(words, "advantage", id=fault_id, weigh=weigh, whole=True)
    for q in QUANTILES:
        if not math.isclose(q, own):
            yield fault(
                f"entropy_quantile is {q:g}, not {own:g}",
                "hyperparameter",
                id=hyperparameter_id("entropy_quantile"),
                weigh=partial(weights, select=_above, q=q),
                whole=True,
            )


def group_order_faults(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that groups are read off the order of the rows, not off their
    ids. A loss without ids has none.

    Args:
        case: the loss and its objective.
    """
    if "group" not in case.loss.reads:
        return
    words = (
        "rows of one prompt count as one group only where they are next to each other"
    )
    yield _aggregated(
        case,
        words,
        partial(_factor_of_groups, case, by=_ids_of_runs),
        id="groups-by-neighbors",
    )
    for n in (0, *BLOCKS):
        size = f"{n} rows" if n else "equal size, in the order of the rows"
        words = f"groups are taken for blocks of {size}, whatever their ids"
        yield _aggregated(
            case,
            words,
            partial(_factor_of_groups, case, by=partial(_ids_of_blocks, n=n)),
            id="groups-by-blocks",
        )


def _aggregated(case: LossCase, words: str, factor: ByToken, id: str) -> LossFault:
    """Make the fault that the objective's weights are multiplied by another factor than
    that of the loss's aggregation.

    Args:
        case: the loss and its objective.
        words: what is done otherwise.
        factor: from a batch to the other factor, [B, T] or [B, 1].
        id: of the fault.
    """

    def weigh(batch: Rollouts) -> Tensor:
        """Return the weights with that factor."""
        return case.expected(batch) * factor(batch) / case.factors(batch)

    return fault(words, "aggregation", id=id, weigh=weigh, whole=True)


def _own_factor(case: LossCase, batch: Rollouts) -> Tensor:
    """Return the factor of the objective's own aggregation, [B, 1]."""
    return case.factors(batch, declared_aggregation(case.objective))


# ---- groups --------------------------------------------------------------------------
def _factor_of_groups(
    case: LossCase, batch: Rollouts, by: Callable[[Rollouts], Tensor | None]
) -> Tensor:
    """Return the factor of the objective's own aggregation with other groups, [B, 1].

    Args:
        case: the loss and its objective.
        batch: the batch.
        by: from the batch to the ids of the other groups.
    """
    return _own_factor(case, batch.but(group=by(batch), totals=None))


def _ids_of_runs(batch: Rollouts) -> Tensor | None:
    """Return a new id wherever the id changes from one row to the next."""
    if batch.group is None:
        return None
    changes = batch.group[1:] != batch.group[:-1]
    return torch.nn.functional.pad(changes.cumsum(0), (1, 0))


def _ids_of_blocks(batch: Rollouts, n: int) -> Tensor:
    """Return an id for every n rows. n = 0 makes as many blocks as there are groups."""
    rows = len(batch.mask)
    groups = 1 if batch.group is None else len(batch.group.unique())
    rows_of_block = n or math.ceil(rows / groups)
    return torch.arange(rows) // rows_of_block


# ---- lengths -------------------------------------------------------------------------
def _length(batch: Rollouts) -> Tensor:
    """Return the lengths |o| of the responses, [B, 1]."""
    return batch.mask.sum(1, keepdim=True).to(batch.logp.dtype)


def length_faults(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that another number takes the place of a length or of the number
    of tokens: the padded width; a length with a number added to it; a length of at
    least a number.

    Args:
        case: the loss and its objective.
    """

    def over_width(batch: Rollouts) -> Tensor:
        """Return the factor that is divided by T, not by |o|."""
        return _own_factor(case, batch) * _length(batch) / batch.mask.shape[1]

    def times_width(batch: Rollouts) -> Tensor:
        """Return the factor that is multiplied by T, not by |o|."""
        return _own_factor(case, batch) * batch.mask.shape[1] / _length(batch)

    def over_every_length(batch: Rollouts) -> Tensor:
        """Return the factor that is divided by each length in turn."""
        factor = (1 / _length(batch).clamp(min=1)).mean() / len(batch.mask)
        return factor.expand(len(batch.mask), 1)

    def over_one_response_less(batch: Rollouts) -> Tensor:
        """Return the factor that is divided by B - 1, and by 1 where B is 1."""
        B = len(batch.mask)
        return _own_factor(case, batch) * B / max(B - 1, 1)

    if declared_aggregation(case.objective) in OVER_RESPONSES:
        yield _aggregated(
            case,
            "it divides by B - 1, not by the number B of responses",
            over_one_response_less,
            id="divided-by-one-response-less",
        )
    yield _aggregated(
        case,
        "the padded width T replaces the length |o|",
        over_width,
        id="padded-width-for-length",
    )
    yield _aggregated(
        case,
        "the padded width T is a factor in place of the length |o|",
        times_width,
        id="padded-width-as-factor",
    )
    for words, fault_id, count in COUNTED:
        yield _aggregated(
            case, words, partial(_factor_of_counted, case, count=count), id=fault_id
        )
    if declared_aggregation(case.objective) != "seq-mean":
        yield _aggregated(
            case,
            "sums [B] are divided by lengths [B, 1], which makes [B, B]: each response "
            "is divided by every length of the batch in turn",
            over_every_length,
            id="lengths-broadcast",
        )
    measured = _lengths_and_multiples(case)
    if measured is not None:
        yield from _changed_lengths(case, *measured)


def _from_first_token(mask: Tensor) -> Tensor:
    """Return the columns from the first token of each response on, [B, T]."""
    return mask.cumsum(1) > 0


def _to_last_token(mask: Tensor) -> Tensor:
    """Return the columns up to the last token of each response, [B, T]."""
    return _from_first_token(mask.flip(1)).flip(1)


# words, the id of a fault, and what is counted for the tokens of a response
COUNTED: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
    (
        "a response is as long as from its first to its last token: holes are counted",
        "holes-counted",
        lambda mask: _from_first_token(mask) & _to_last_token(mask),
    ),
    (
        "the columns before the first token of a response are counted as its tokens",
        "columns-before-response-counted",
        lambda mask: mask | ~_from_first_token(mask) & mask.any(1, keepdim=True),
    ),
    (
        "all columns up to the last token of a response are counted as its tokens",
        "columns-to-last-token-counted",
        _to_last_token,
    ),
    (
        "a response is as long as the tokens in front of the first masked slot of its "
        "row: those behind a hole are not counted",
        "tokens-behind-hole-not-counted",
        lambda mask: mask.cumprod(1).bool(),
    ),
)


def _factor_of_counted(
    case: LossCase, batch: Rollouts, count: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the factor of the objective's own aggregation, with other tokens counted.

    Args:
        case: the loss and its objective.
        batch: the batch.
        count: from the mask to what is counted, both [B, T].
    """
    return _own_factor(case, batch.but(mask=count(batch.mask), totals=None))


# ---- equal lengths -------------------------------------------------------------------
WHERE_LENGTHS_EQUAL = "padded-width-where-lengths-equal"  # the id of a fault


def equal_length_faults(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that the padded width replaces the lengths only in a batch whose
    responses all have one length.

    Args:
        case: the loss and its objective.
    """

    def over_width(batch: Rollouts, least_rows: int) -> Tensor:
        """Return the objective's own factor, with the padded width in place of the length
        where all lengths are equal and there are at least so many rows.
        """
        lengths = _length(batch)
        is_equal = bool((lengths == lengths[:1]).all()) and len(lengths) >= least_rows
        share = lengths / batch.mask.shape[1] if is_equal else 1
        return _own_factor(case, batch) * share

    for least_rows in (1, 2):
        yield _aggregated(
            case,
            "where all responses of a batch have one length, it divides by the padded "
            "width: masked slots are counted as tokens",
            partial(over_width, least_rows=least_rows),
            id=WHERE_LENGTHS_EQUAL,
        )


def batches_of_equal_lengths(case: LossCase) -> list[Rollouts]:
    """Return batches of which all responses have one length, beside masked slots.

    Args:
        case: the loss and its objective.
    """
    batches = []
    for seed, length in ((41, 2), (42, 3), (43, 1)):
        batch = random_batch(np.random.default_rng(seed), case.one_adv, (5, 4))
        first = seed % 2  # padding on both sides, or behind the tokens alone
        columns = torch.arange(4)
        is_token = (columns >= first) & (columns < first + length)
        batch = batch.but(mask=is_token.expand(5, 4).clone(), totals=None)
        batches.append(case.ready(batch))
    return batches


# ---- numbers of 16 bits --------------------------------------------------------------
# the name of a format, its type, and the largest relative error of its rounding
FORMATS = (
    ("bfloat16", torch.bfloat16, "0.4 %"),
    ("float16", torch.float16, "0.05 %, or more below 6e-5 and above 65504"),
)


def _rounded(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that what a sum is divided by, or one over it, is rounded to a
    format of 16 bits.

    Args:
        case: the loss and its objective.
    """

    def inverse_of_length(batch: Rollouts, dtype: torch.dtype) -> Tensor:
        """Return the factor where 1/|o| is rounded."""
        lengths = _length(batch).clamp(min=1)
        return _own_factor(case, batch) * lengths * (1 / lengths).to(dtype)

    def length(batch: Rollouts, dtype: torch.dtype) -> Tensor:
        """Return the factor where |o| is rounded."""
        lengths = _length(batch).clamp(min=1)
        return _own_factor(case, batch) * lengths / lengths.to(dtype)

    def count(batch: Rollouts, dtype: torch.dtype) -> Tensor:
        """Return the factor where the number of tokens is rounded."""
        tokens = batch.mask.sum().to(batch.logp.dtype)
        return _own_factor(case, batch) * tokens / tokens.to(dtype)

    def factor(batch: Rollouts, dtype: torch.dtype) -> Tensor:
        """Return the whole factor of each response, rounded."""
        return _own_factor(case, batch).to(dtype).to(batch.logp.dtype)

    what_is_rounded: tuple[tuple[str, Callable[[Rollouts, torch.dtype], Tensor]], ...]
    if declared_aggregation(case.objective) in BY_TOKENS:
        what_is_rounded = (
            ("one over the number of tokens", factor),
            ("the number of tokens", count),
        )
    else:
        what_is_rounded = (
            ("one over the length |o|", inverse_of_length),
            ("the length |o|", length),
            ("the factor of each response, one over its divisors,", factor),
        )
    for (what, rounded), (name, dtype, error) in product(what_is_rounded, FORMATS):
        yield _aggregated(
            case,
            f"rounding: {what} is computed in {name}, with an error of up to {error}",
            partial(rounded, dtype=dtype),
            id="divisor-in-low-precision",
        )


def _changed_lengths(
    case: LossCase, lengths: Tensor, multiples: Tensor
) -> Iterator[LossFault]:
    """Yield the faults of a length with a number that is measured: one that is added to
    each length or to the number of tokens, or the least that a length counts as. Each is
    yielded only if one such number explains all responses.

    Args:
        case: the loss and its objective.
        lengths: the lengths of the responses, [B].
        multiples: the gradient of each response over the expected one, [B].
    """

    def length_plus(batch: Rollouts, added: float) -> Tensor:
        """Return the factor where a number is added to each length."""
        return _own_factor(case, batch) * _length(batch) / (_length(batch) + added)

    def total_plus(batch: Rollouts, added: float) -> Tensor:
        """Return the factor where a number is added to the number of tokens."""
        return _own_factor(case, batch) * batch.mask.sum() / (batch.mask.sum() + added)

    def length_at_least(batch: Rollouts, least: float) -> Tensor:
        """Return the factor where each length counts as at least a number."""
        length = _length(batch)
        return _own_factor(case, batch) * length / length.clamp(min=least)

    added = common_value(lengths / multiples - lengths)
    if added is not None and abs(added) > LEAST_ADDED:
        yield _aggregated(
            case,
            f"{added:.6g} is added to each length |o|",
            partial(length_plus, added=added),
            id="number-added-to-length",
        )
    total = lengths.sum()
    added = common_value(total / multiples - total)
    if added is not None and abs(added) > LEAST_ADDED:
        # a total in float32 has no more of its digits
        short = float(f"{added:.2g}")
        total_in_float32 = (total + short).float().double()
        is_rounded = abs(float(total_in_float32 - total) - added) < 1e-9
        if (case.single and abs(added) < 0.01) or is_rounded:
            added = short
        yield _aggregated(
            case,
            f"{added:.6g} is added to the number of tokens",
            partial(total_plus, added=added),
            id="number-added-to-token-count",
        )
    is_short = multiples < 1 - 1e-9
    least = common_value((lengths / multiples)[is_short])
    if least is not None and not is_short.all():
        yield _aggregated(
            case,
            f"a length |o| counts as at least {least:.6g}",
            partial(length_at_least, least=least),
            id="length-at-least",
        )


def capped_lengths(case: LossCase, batch: Rollouts) -> Iterator[LossFault]:
    """Yield the fault that a length counts as at most a number, which is measured on
    long responses.

    Args:
        case: the loss and its objective.
        batch: a batch with long responses.
    """
    found = case.weights(batch)
    ratio = torch.where(batch.mask, found / case.expected(batch), torch.nan)
    multiples = ratio.nanmedian(1, keepdim=True).values
    is_capped = ((multiples - 1).abs() > LEAST_ADDED)[:, 0] & multiples.isfinite()[:, 0]
    lengths = _length(batch)
    # the length is a factor, or it is what divides
    for power in (1, -1):
        most = common_value((lengths * multiples**power)[is_capped])
        if most is None:
            continue

        def length_at_most(batch: Rollouts, most: float, power: int) -> Tensor:
            """Return the factor where each length counts as at most a number."""
            share = _length(batch).clamp(max=most) / _length(batch).clamp(min=1)
            return _own_factor(case, batch) * share**power

        yield _aggregated(
            case,
            f"a length |o| counts as at most {most:.6g}",
            partial(length_at_most, most=most, power=power),
            id="length-at-most",
        )


def _lengths_and_multiples(case: LossCase) -> tuple[Tensor, Tensor] | None:
    """Return the lengths of the responses of the on-policy batch, [B], and the gradient
    of each response over the expected one, [B]; None where the tokens of a response
    have several such multiples, or where the loss refuses the batch.
    """
    batch = case.on_policy()
    roles = ["logp", "logp_ref"]
    if case.objective.sampler:
        roles.append("logp_sampler")
    batch = case.visible_batch(batch.but(**dict.fromkeys(roles, batch.logp_old)))
    try:
        found = part_with_advantage(case.gradient, batch)
        expected = case.expected(batch) * _own_factor(case, batch)
    except InputError:
        return None
    use = batch.mask & (expected.abs() > 1e-9)
    multiples = []
    for row in range(len(found)):
        multiple = common_value((found[row] / expected[row])[use[row]])
        if multiple is None:
            return None
        multiples.append(multiple)
    return _length(batch)[:, 0], torch.tensor(multiples, dtype=batch.logp.dtype)


# ---- signs of A ----------------------------------------------------------------------
def _by_sign(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that each sign of A has an aggregation, or a mean, of its own."""

    def factor_by_sign(
        batch: Rollouts, has_sign: Callable[[Tensor], Tensor], name: str
    ) -> Tensor:
        """Return the factor of this aggregation where A has the sign, and the
        objective's own elsewhere.
        """
        return torch.where(
            has_sign(batch.adv.expand_as(batch.mask)),
            case.factors(batch, name),
            _own_factor(case, batch),
        )

    for sign, has_sign in SIGNS:
        for name in FACTORS:
            yield _aggregated(
                case,
                f"the terms of {sign} have another aggregation than the rest: {aggregation_words(name)}",
                partial(factor_by_sign, has_sign=has_sign, name=name),
                id=f"other-aggregation-where-{SIGN_IDS[sign]}",
            )
    for counted, divisor in (
        ("tokens", _token_count),
        ("responses", _response_count_times_length),
    ):
        for share, how in MEANS:
            words = f"the terms of A > 0 and those of A <= 0 are averaged over their own {counted}; {how}"
            yield _aggregated(
                case,
                words,
                partial(_factor_of_own_mean, divisor=divisor, share=share),
                id=f"signs-averaged-over-own-{counted}",
            )


def _factor_of_own_mean(
    batch: Rollouts, divisor: Callable[[Tensor, Tensor], Tensor], share: float
) -> Tensor:
    """Return the factor where A > 0 and A <= 0 are averaged apart, [B, T].

    Args:
        batch: the batch.
        divisor: from the tokens of one sign and the mask to what they are divided by.
        share: the factor on each of the two means.
    """
    is_positive = batch.adv.expand_as(batch.mask) > 0
    of_positive = divisor(batch.mask & is_positive, batch.mask)
    of_others = divisor(batch.mask & ~is_positive, batch.mask)
    return share * torch.where(
        is_positive, 1 / of_positive.clamp(min=1), 1 / of_others.clamp(min=1)
    )


def _token_count(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the number of these tokens."""
    return tokens.sum()


def _response_count_times_length(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the number of responses with such tokens, times the length of each
    response, [B, 1].
    """
    return tokens.any(1).sum() * mask.sum(1, keepdim=True)


# ---- prompts --------------------------------------------------------------------------
def _prompts(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that a prompt counts once for each of its responses, or not at
    all. A loss without group ids has none.

    Args:
        case: the loss and its objective.
    """
    if "group" not in case.loss.reads:
        return

    def once_for_each_response(batch: Rollouts) -> Tensor:
        """Return the factor where the mean of a prompt counts so often."""
        if batch.group is None:
            return _own_factor(case, batch)
        is_same = batch.group[:, None] == batch.group
        share = is_same.sum(1, keepdim=True) / len(batch.mask)
        return _own_factor(case, batch) * share * len(batch.group.unique())

    def without_prompts(batch: Rollouts, has: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the factor where prompts that have no such A are left out."""
        A = batch.adv.expand_as(batch.mask)
        is_kept = (batch.mask & has(A)).any(1)
        if batch.group is None:  # one prompt
            is_kept = is_kept.any().expand_as(is_kept)
        else:
            is_kept = ((batch.group[:, None] == batch.group) & is_kept).any(1)
        factor = torch.zeros(len(batch.mask), 1, dtype=batch.logp.dtype)
        if is_kept.any():
            factor[is_kept] = _own_factor(case, _rows(batch, is_kept))
        return factor

    yield _aggregated(
        case,
        "the mean of a prompt counts once for each of its responses, not once",
        once_for_each_response,
        id="prompts-weigh-by-responses",
    )
    for which, fault_id, has in (
        ("A > 0", "prompts-without-a-positive-left-out", lambda A: A > 0),
        ("A other than 0", "prompts-without-advantage-left-out", lambda A: A != 0),
    ):
        yield _aggregated(
            case,
            f"prompts of which no response has {which} are not trained, and not counted",
            partial(without_prompts, has=has),
            id=fault_id,
        )


# ---- parts of the batch --------------------------------------------------------------
def _parts(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that the batch is cut into parts of consecutive responses, each
    part is averaged, and the averages are averaged.
    """

    def factor(
        batch: Rollouts, n: int, split: Callable[[int, int], list[Tensor]]
    ) -> Tensor:
        """Return the factor of the averages over n parts, [B, 1]."""
        if len(batch.mask) < n:
            return _own_factor(case, batch)
        factors = [
            _own_factor(case, _rows(batch, rows)) for rows in split(len(batch.mask), n)
        ]
        return torch.cat(factors) / n

    for n in PARTS:
        for split in (_split_evenly, _split_with_larger_last):
            words = f"the batch is cut into {n} parts after each other; each part is averaged by itself, then the parts"
            yield _aggregated(
                case, words, partial(factor, n=n, split=split), id="parts-averaged"
            )

    def factor_by_size(batch: Rollouts, size: int) -> Tensor:
        """Return the factor of the averages over parts of so many rows, [B, 1]."""
        parts = torch.arange(len(batch.mask)).split(size)
        factors = [_own_factor(case, _rows(batch, rows)) for rows in parts]
        return torch.cat(factors) / len(parts)

    for size in PART_SIZES:
        words = f"the batch is cut into parts of {size} rows; each part is averaged by itself, then the parts"
        yield _aggregated(
            case, words, partial(factor_by_size, size=size), id="parts-averaged"
        )


def _column_parts(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that the columns are cut into parts, the tokens of each part are
    averaged, and the averages are averaged.

    Args:
        case: the loss and its objective.
    """
    is_of_tokens = declared_aggregation(case.objective) in BY_TOKENS
    if not is_of_tokens or "group" in case.loss.reads:
        return

    def factor(batch: Rollouts, size: int, counts_empty: bool) -> Tensor:
        """Return the factor of the averages over parts of so many columns, [B, T]."""
        tokens = [part.sum() for part in batch.mask.split(size, 1)]
        parts = len(tokens) if counts_empty else sum(1 for n in tokens if n)
        of_part = [1 / (n.clamp(min=1).double() * max(parts, 1)) for n in tokens]
        of_column = torch.stack(of_part).repeat_interleave(size)
        return of_column[: batch.mask.shape[1]].to(batch.logp.dtype)

    for size, counts_empty in product(COLUMN_SIZES, (True, False)):
        part = f"parts of {size} columns" if size > 1 else "single columns"
        yield _aggregated(
            case,
            f"the batch is cut into {part}; each part is averaged by itself, then the parts",
            partial(factor, size=size, counts_empty=counts_empty),
            id="column-parts-averaged",
        )


def _split_evenly(rows: int, n: int) -> list[Tensor]:
    """Cut row numbers into n parts; the first parts have one row more if n does not
    divide their number.
    """
    return list(torch.arange(rows).tensor_split(n))


def _split_with_larger_last(rows: int, n: int) -> list[Tensor]:
    """Cut row numbers into n parts; the last part has all rows that are left over."""
    size = rows // n
    return list(torch.arange(rows).tensor_split([size * k for k in range(1, n)]))


def _rows(batch: Rollouts, rows: Tensor) -> Rollouts:
    """Return these rows as a batch of their own, with totals of their own."""
    return batch.but(
        totals=None,
        **{name: x[rows] for name, x in batch.tensors().items()},
    )
