# SPDX-License-Identifier: Apache-2.0
"""Known faults of losses in what a sum is divided by: lengths that are changed, and
means over parts of a batch.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.factors import FACTORS, common_value, declared_aggregation
from upref.verify.faults import SIGN_IDS
from upref.verify.faults.losses import LossFault, fault
from upref.verify.measure import LossCase
from upref.weights.batches import on_policy_batch
from upref.weights.black_box import part_with_advantage

PARTS = (2, 3, 4, 8)  # into which a batch is cut
BLOCKS = range(2, 17)  # rows that are taken for the responses to one prompt
LEAST = 1e-4  # a number added to a length: a smaller one is a guard against 0
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
MEANS = ((1.0, "the two means are added"), (0.5, "the two means are averaged"))
# what each token's weight is multiplied by, [B, T] or [B, 1]
ByToken = Callable[[Rollouts], Tensor]


def divided(case: LossCase) -> Iterator[LossFault]:
    """Faults of lengths, of each sign of A, and of parts of the batch, beside the
    objective of the case.
    """
    yield from _lengths(case)
    yield from _by_sign(case)
    yield from _parts(case)


def group_order_faults(case: LossCase) -> Iterator[LossFault]:
    """Groups that are read off the order of the rows, not off their ids; nothing of a
    loss without ids.
    """
    if "group" not in case.loss.reads:
        return
    words = (
        "rows of one prompt count as one group only where they are next to each other"
    )
    yield _aggregated(
        case, words, partial(_grouped, case, by=_runs), id="groups-by-neighbors"
    )
    for n in (0, *BLOCKS):
        size = f"{n} rows" if n else "equal size, in the order of the rows"
        words = f"groups are taken for blocks of {size}, whatever their ids"
        yield _aggregated(
            case,
            words,
            partial(_grouped, case, by=partial(_blocks, n=n)),
            id="groups-by-blocks",
        )


def _aggregated(case: LossCase, words: str, factor: ByToken, id: str) -> LossFault:
    """The objective's weights, multiplied by this factor in place of its aggregation's."""

    def weigh(batch: Rollouts) -> Tensor:
        return case.expected(batch) * factor(batch) / case.factors(batch)

    return fault(words, "aggregation", id=id, weigh=weigh, whole=True)


def _own_factor(case: LossCase, batch: Rollouts) -> Tensor:
    """The factor of the objective's own aggregation, [B, 1]."""
    return case.factors(batch, declared_aggregation(case.objective))


# ---- groups --------------------------------------------------------------------------
def _grouped(
    case: LossCase, batch: Rollouts, by: Callable[[Rollouts], Tensor | None]
) -> Tensor:
    """The same with other ids of the groups."""
    return _own_factor(case, batch.but(group=by(batch), totals=None))


def _runs(batch: Rollouts) -> Tensor | None:
    """A new id wherever the id changes from one row to the next."""
    if batch.group is None:
        return None
    changes = batch.group[1:] != batch.group[:-1]
    return torch.nn.functional.pad(changes.cumsum(0), (1, 0))


def _blocks(batch: Rollouts, n: int) -> Tensor:
    """An id for every n rows; n = 0: as many blocks as there are groups."""
    groups = 1 if batch.group is None else len(batch.group.unique())
    return torch.arange(len(batch.mask)) // (n or -(-len(batch.mask) // groups))


# ---- lengths -------------------------------------------------------------------------
def _length(batch: Rollouts) -> Tensor:
    """|o|, [B, 1]."""
    return batch.mask.sum(1, keepdim=True).to(batch.logp.dtype)


def _lengths(case: LossCase) -> Iterator[LossFault]:
    """A length, or the number of tokens, with a number added to it, of at least a
    number, or taken for another one.
    """

    def over_width(batch: Rollouts) -> Tensor:
        return _own_factor(case, batch) * _length(batch) / batch.mask.shape[1]

    def times_width(batch: Rollouts) -> Tensor:
        return _own_factor(case, batch) * batch.mask.shape[1] / _length(batch)

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
    if (measured := _multiples(case)) is not None:
        yield from _changed_lengths(case, *measured)


def _changed_lengths(
    case: LossCase, lengths: Tensor, multiples: Tensor
) -> Iterator[LossFault]:
    """What the multiple of each response's gradient, [B], makes of its length, [B], and
    of their sum.
    """

    def plus(batch: Rollouts, added: float) -> Tensor:
        return _own_factor(case, batch) * _length(batch) / (_length(batch) + added)

    def plus_total(batch: Rollouts, added: float) -> Tensor:
        return _own_factor(case, batch) * batch.mask.sum() / (batch.mask.sum() + added)

    def at_least(batch: Rollouts, least: float) -> Tensor:
        return (
            _own_factor(case, batch) * _length(batch) / _length(batch).clamp(min=least)
        )

    added = common_value(lengths / multiples - lengths)
    if added is not None and abs(added) > LEAST:
        yield _aggregated(
            case,
            f"{added:.6g} is added to each length |o|",
            partial(plus, added=added),
            id="number-added-to-length",
        )
    total = lengths.sum()
    added = common_value(total / multiples - total)
    if added is not None and abs(added) > LEAST:
        yield _aggregated(
            case,
            f"{added:.6g} is added to the number of tokens",
            partial(plus_total, added=added),
            id="number-added-to-token-count",
        )
    short = multiples < 1 - 1e-9
    least = common_value((lengths / multiples)[short])
    if least is not None and (~short).any():
        yield _aggregated(
            case,
            f"a length |o| counts as at least {least:.6g}",
            partial(at_least, least=least),
            id="length-at-least",
        )


def _multiples(case: LossCase) -> tuple[Tensor, Tensor] | None:
    """The lengths of the on-policy batch, and what each response's gradient is
    multiplied by beside the objective's.
    """
    batch = case.ready(on_policy_batch())
    replaced = dict.fromkeys(
        ("logp", "logp_ref", *(["logp_sampler"] if case.objective.sampler else [])),
        batch.logp_old,
    )
    batch = case.visible_batch(batch.but(**replaced))
    try:
        found = part_with_advantage(case.gradient, batch)
        expected = case.expected(batch) * _own_factor(case, batch)
    except InputError:
        return None
    rows = [
        common_value((gradient / d)[m])
        for gradient, d, m in zip(
            found, expected, batch.mask & (expected.abs() > 1e-9), strict=True
        )
    ]
    if any(k is None for k in rows):
        return None
    return _length(batch)[:, 0], torch.tensor(
        [k or 0.0 for k in rows], dtype=batch.logp.dtype
    )


# ---- signs of A ----------------------------------------------------------------------
def _by_sign(case: LossCase) -> Iterator[LossFault]:
    """Each sign of A by an aggregation, or a mean, of its own."""

    def one_sign(batch: Rollouts, on: Callable[[Tensor], Tensor], name: str) -> Tensor:
        return torch.where(
            on(batch.adv.expand_as(batch.mask)),
            case.factors(batch, name),
            _own_factor(case, batch),
        )

    for terms, on in SIGNS:
        for name in FACTORS:
            words = (
                f"the terms of {terms} have another aggregation than the rest: {name}"
            )
            yield _aggregated(
                case,
                words,
                partial(one_sign, on=on, name=name),
                id=f"other-aggregation-where-{SIGN_IDS[terms]}",
            )
    for of, count in (("tokens", _tokens), ("responses", _responses)):
        for share, how in MEANS:
            words = f"the terms of A > 0 and those of A <= 0 are averaged over their own {of}; {how}"
            yield _aggregated(
                case,
                words,
                partial(_apart, count=count, share=share),
                id=f"signs-averaged-over-own-{of}",
            )


def _apart(
    batch: Rollouts, count: Callable[[Tensor, Tensor], Tensor], share: float
) -> Tensor:
    """One over what each sign counts by itself, times the share of its mean."""
    positive = batch.adv.expand_as(batch.mask) > 0
    of_good = count(batch.mask & positive, batch.mask)
    of_bad = count(batch.mask & ~positive, batch.mask)
    return share * torch.where(
        positive, 1 / of_good.clamp(min=1), 1 / of_bad.clamp(min=1)
    )


def _tokens(side: Tensor, mask: Tensor) -> Tensor:
    """The number of tokens of one sign."""
    return side.sum()


def _responses(side: Tensor, mask: Tensor) -> Tensor:
    """The number of responses that have such tokens, times the length of each response."""
    return side.any(1).sum() * mask.sum(1, keepdim=True)


# ---- parts of the batch --------------------------------------------------------------
def _parts(case: LossCase) -> Iterator[LossFault]:
    """The mean over equally many responses after each other is averaged once more."""

    def parts(
        batch: Rollouts, n: int, split: Callable[[int, int], list[Tensor]]
    ) -> Tensor:
        if len(batch.mask) < n:
            return _own_factor(case, batch)
        factors = [
            _own_factor(case, _rows(batch, i)) for i in split(len(batch.mask), n)
        ]
        return torch.cat(factors) / n

    for n in PARTS:
        for split in (_equal, _last_larger):
            words = f"the batch is cut into {n} parts after each other; each part is averaged by itself, then the parts"
            yield _aggregated(
                case, words, partial(parts, n=n, split=split), id="parts-averaged"
            )


def _equal(rows: int, n: int) -> list[Tensor]:
    """The first parts have one row more where n does not divide their number."""
    return list(torch.arange(rows).tensor_split(n))


def _last_larger(rows: int, n: int) -> list[Tensor]:
    """The last part has all rows that are left over."""
    size = rows // n
    return list(torch.arange(rows).tensor_split([size * k for k in range(1, n)]))


def _rows(batch: Rollouts, i: Tensor) -> Rollouts:
    """These rows as a batch of their own, with totals of their own."""
    return batch.but(
        totals=None,
        **{name: x[i] for name, x in batch.tensors().items()},
    )
