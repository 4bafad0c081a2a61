# SPDX-License-Identifier: Apache-2.0
"""Known faults of losses in what a sum is divided by: lengths that are changed, and means over parts of a batch."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.factors import FACTORS, common_value, declared_aggregation
from upref.verify.faults.losses import LossFault, fault
from upref.verify.measure import Case, without_rest
from upref.weights.batches import on_policy_batch

PARTS = (2, 3, 4, 8)  # into which a batch is cut
LEAST = 1e-4  # a number added to a length: a smaller one is a guard against 0
SIGNS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("A > 0", lambda A: A > 0),
    ("A < 0", lambda A: A < 0),
    ("A <= 0", lambda A: A <= 0),
)
ByToken = Callable[[Rollouts], Tensor]  # what each token's weight is multiplied by, [B, T] or [B, 1]


def divided(case: Case) -> Iterator[LossFault]:
    """All faults of this file, beside the objective of the case."""
    yield from _lengths(case)
    yield from _by_sign(case)
    yield from _parts(case)


def _aggregated(case: Case, words: str, factor: ByToken) -> LossFault:
    """The objective's weights, multiplied by this factor in place of its aggregation's."""
    return fault(words, "aggregation", weigh=lambda b: case.expected(b) * factor(b) / case.factors(b), whole=True)


def _length(b: Rollouts) -> Tensor:
    return b.mask.sum(1, keepdim=True).to(b.logp.dtype)


def _own(case: Case, b: Rollouts) -> Tensor:
    """The factor of the objective's own aggregation, [B, 1]."""
    return case.factors(b, declared_aggregation(case.o))


def _lengths(case: Case) -> Iterator[LossFault]:
    """A length, or the number of tokens, with a number added to it, of at least a number, or taken for another one."""
    own = partial(_own, case)
    width = lambda b: b.mask.shape[1]
    yield _aggregated(case, "the padded width T replaces the length |o|",
                      lambda b: own(b) * _length(b) / width(b))  # fmt: skip
    yield _aggregated(case, "the padded width T is a factor in place of the length |o|",
                      lambda b: own(b) * width(b) / _length(b))  # fmt: skip
    if (times := _times(case)) is None:
        return
    n, k = times
    added = common_value(n / k - n)
    if added is not None and abs(added) > LEAST:
        yield _aggregated(case, f"{added:.6g} is added to each length |o|",
                          lambda b: own(b) * _length(b) / (_length(b) + added))  # fmt: skip
    total = n.sum()
    every = common_value(total / k - total)
    if every is not None and abs(every) > LEAST:
        tokens = lambda b: b.mask.sum()
        yield _aggregated(case, f"{every:.6g} is added to the number of tokens",
                          lambda b: own(b) * tokens(b) / (tokens(b) + every))  # fmt: skip
    short = k < 1 - 1e-9
    least = common_value((n / k)[short])
    if least is not None and (~short).any():
        yield _aggregated(case, f"a length |o| counts as at least {least:.6g}",
                          lambda b: own(b) * _length(b) / _length(b).clamp(min=least))  # fmt: skip


def _times(case: Case) -> tuple[Tensor, Tensor] | None:
    """The lengths of the on-policy batch, and what each response's gradient is multiplied by beside the objective's."""
    b = case.ready(on_policy_batch())
    at = dict.fromkeys(("logp", "logp_ref", *(["logp_sampler"] if case.o.sampler else [])), b.logp_old)
    b = case.visible_batch(b.but(**at))
    try:
        found, due = without_rest(case, b), case.expected(b) * _own(case, b)
    except InputError:
        return None
    rows = [common_value((g / d)[m]) for g, d, m in zip(found, due, b.mask & (due.abs() > 1e-9), strict=True)]
    if any(k is None for k in rows):
        return None
    return _length(b)[:, 0], torch.tensor([k or 0.0 for k in rows], dtype=b.logp.dtype)


def _by_sign(case: Case) -> Iterator[LossFault]:
    """Each sign of A by an aggregation, or a mean, of its own."""
    own = partial(_own, case)
    for words, on in SIGNS:

        def other(b: Rollouts, on: Callable[[Tensor], Tensor] = on, f: ByToken | None = None) -> Tensor:
            return torch.where(on(b.adv.expand_as(b.mask)), (f or own)(b), own(b))

        for name in FACTORS:
            f = partial(case.factors, agg=name)
            yield _aggregated(case, f"the terms of {words} have another aggregation than the rest: {name}",
                              partial(other, f=f))  # fmt: skip

    def apart(b: Rollouts, count: Callable[[Tensor, Tensor], Tensor], share: float) -> Tensor:
        """Each sign divided by its own count of tokens, or of responses."""
        positive = b.adv.expand_as(b.mask) > 0
        good, bad = b.mask & positive, b.mask & ~positive
        of_good, of_bad = count(good, b.mask), count(bad, b.mask)
        return share * torch.where(positive, 1 / of_good.clamp(min=1), 1 / of_bad.clamp(min=1))

    tokens = lambda mine, mask: mine.sum()
    responses = lambda mine, mask: mine.any(1).sum() * mask.sum(1, keepdim=True)
    for of, count in (("tokens", tokens), ("responses", responses)):
        for share, how in ((1.0, "the two means are added"), (0.5, "the two means are averaged")):
            words = f"the terms of A > 0 and those of A <= 0 are averaged over their own {of}; {how}"
            yield _aggregated(case, words, partial(apart, count=count, share=share))


def _rows(b: Rollouts, i: Tensor) -> Rollouts:
    return b.but(totals=None, **{name: x[i] for name, x in vars(b).items() if isinstance(x, Tensor)})


def _parts(case: Case) -> Iterator[LossFault]:
    """The mean over equally many responses after each other is averaged once more."""
    f = FACTORS[declared_aggregation(case.o)]
    for n in PARTS:
        for up in (True, False):

            def parts(b: Rollouts, n: int = n, up: bool = up) -> Tensor:
                if len(b.mask) < n:
                    return _own(case, b)
                rows = torch.arange(len(b.mask)).tensor_split(n)
                if not up:
                    size = len(b.mask) // n
                    rows = (*torch.arange(size * (n - 1)).split(size), torch.arange(size * (n - 1), len(b.mask)))
                return torch.cat([f(_rows(b, i)) for i in rows])[:, None] / n

            words = f"the batch is cut into {n} parts after each other; each part is averaged by itself, then the parts"
            yield _aggregated(case, words, parts)
