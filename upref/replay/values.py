# SPDX-License-Identifier: Apache-2.0
"""Numbers of a column that are not the log-probability: a factor, probabilities,
placeholders, a floor.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from upref.replay.undo import FEW, NOTICEABLE, QUARTER, Columns, Undone

LEAST_RATIOS = 10  # likely and rare tokens, for the median of a ratio
ENOUGH = 20  # numbers, to tell that a column holds bfloat16
LONG = 5  # tokens of a response, or responses, that cannot share one number by chance
FAR_BELOW = -100  # nats: no token that was drawn
# probability by the trainer of a token that an engine would not report as certain
UNLIKELY = 0.05
DOUBTFUL = 0.5  # the same, of a token at the same end of nearly every response


def find_sums(c: Columns) -> Undone | None:
    """The sampler's column holds the log-probability of the response up to each token.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, with the sums undone; None where they do not explain the distance.
    """
    before = c.distance()
    if before < NOTICEABLE:
        return None
    steps = torch.diff(
        torch.where(c.mask, c.sampler, 0.0),
        dim=1,
        prepend=torch.zeros(len(c.sampler), 1, dtype=c.sampler.dtype),
    )
    together = c.mask & torch.nn.functional.pad(c.mask, (1, 0), value=False)[:, :-1]
    starts = c.mask & (c.mask.cumsum(1) == 1)
    undone = Columns(c.trainer, steps, together | starts)
    after = undone.distance()
    if after < QUARTER * Columns(c.trainer, c.sampler, undone.mask).distance():
        return Undone("sums", undone, before, after)
    return None


def is_one_number_a_row(c: Columns) -> bool:
    """Whether each response has one number for all its tokens, and the responses have
    different ones: then no number is that of a token.

    Args:
        c: the columns of the trainer and the sampler.
    """
    if c.distance() < NOTICEABLE:
        return False  # of uniform policies, whose numbers are right
    long = c.mask.sum(1) >= LONG
    highest = torch.where(c.mask, c.sampler, -torch.inf).amax(1)[long]
    lowest = torch.where(c.mask, c.sampler, torch.inf).amin(1)[long]
    return len(highest.unique()) >= LONG and bool(
        (highest - lowest <= 1e-6 * highest.abs()).all()
    )


def find_factor(c: Columns) -> Undone | None:
    """The sampler's column is a multiple of the trainer's, has the other sign, or holds
    probabilities.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, undone; None where none of the three explains their distance.
    """
    x = c.trained(c.trainer)
    y = c.trained(c.sampler)
    before = c.distance()
    if before < NOTICEABLE:
        return None
    if bool((y >= 0).all()) and bool((y <= 1).all()):
        logs = torch.where(c.mask, c.sampler.clamp(min=1e-30).log(), 0.0)
        undone = replace(c, sampler=logs)
        if (after := undone.distance()) < QUARTER * before:
            return Undone("probabilities", undone, before, after)
    sure = (x < -0.05) & (y.abs() > 1e-6)
    if int(sure.sum()) < 10:
        return None
    factor = float((y[sure] / x[sure]).median())
    if factor == 0 or abs(factor - 1) < 0.02:
        return None
    undone = replace(c, sampler=c.sampler / factor)
    after = undone.distance()
    if after < QUARTER * before and _one_factor(x, y):
        cause = "sign" if abs(factor + 1) < 0.02 else "factor"
        return Undone(cause, undone, before, after, {"factor": factor})
    return None


def _one_factor(x: Tensor, y: Tensor) -> bool:
    """Whether likely and rare tokens have the same factor. At another temperature they
    do not: likely tokens come much nearer to 0 than rare ones."""
    likely = (x > -0.7) & (x < -0.02)
    rare = x < -1.5
    if min(int(likely.sum()), int(rare.sum())) < LEAST_RATIOS:
        return False
    first, second = (float((y[some] / x[some]).median()) for some in (likely, rare))
    return abs(first - second) < 0.05 * abs(second)


def find_placeholder(c: Columns) -> Undone | None:
    """One exact number stands on tokens that the trainer finds unlikely: the sampler
    did not draw them.

    Placeholders are whole numbers: 0, -1, -9999. Other numbers repeat in a healthy
    column, where responses to one prompt begin with the same token. An engine reports 0
    for a certain token as well, and a mixture of experts may be certain where the
    trainer is not: so a 0 counts only in a run of tokens of which several are unlikely,
    or at the same end of nearly every response.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The columns without these tokens; None where there is no placeholder.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, with the columns without these tokens; None without a placeholder.
    """
    y = c.trained(c.sampler)
    whole = y[y == y.round()]
    if is_bfloat16(y):  # whole numbers of its grid repeat
        whole = whole[(whole == 0) | (whole <= FAR_BELOW)]
    values, counts = whole.unique(return_counts=True)
    for at in counts.argsort(descending=True)[:FEW].tolist():
        value = values[at]
        tied = c.mask & (c.sampler == value)
        evidence = tied & (
            (c.trainer < math.log(UNLIKELY))
            if value == 0
            else ((c.trainer - value).abs() > 1)
        )
        run = _runs_with(tied, evidence, FEW if value == 0 else 1)
        if run.any():
            run = run | evidence  # one such number shows what the others are
        else:
            run = _at_an_end(tied, c.mask)
            evidence = evidence | (run & (c.trainer < math.log(DOUBTFUL)))
        varied = len(c.trainer[evidence & run].unique())
        if varied < FEW or _limits(c, tied, value):
            continue
        rest = c.without(run)
        most_are_off = float(rest.row_distance().quantile(0.25)) > NOTICEABLE
        if most_are_off and rest.unrelated():
            continue  # all numbers are in wrong places, and so is what fills the gaps
        on_run = Columns(c.trainer, c.sampler, run).distance()
        if on_run > 3 * rest.distance():
            numbers = {
                "tokens": int(run.sum()),
                "trained": len(y),
                "value": f"{value.item():g}",
            }
            return Undone("not_sampled", rest, c.distance(), rest.distance(), numbers)
    return None


def is_bfloat16(column: Tensor) -> bool:
    """Whether every number of the column is one of bfloat16, and there are enough to
    tell.

    Args:
        column: any shape; zeros and numbers that are not finite do not count.
    """
    some = column[(column != 0) & column.isfinite()]
    return len(some) > ENOUGH and bool((some.bfloat16().double() == some).all())


def _limits(c: Columns, tied: Tensor, value: Tensor) -> bool:
    """Whether the number is the floor or the ceiling of its column, beyond which the
    other column goes on.
    """
    y = c.trained(c.sampler)
    beyond = c.trainer[tied] - value
    if value == y.min() and value != y.max():
        return bool((beyond < 0).double().mean() > 0.9)
    return bool(value == y.max() and value < 0 and (beyond > 0).double().mean() > 0.9)


def _runs_with(tied: Tensor, evidence: Tensor, least: int) -> Tensor:
    """The runs of neighbouring tied tokens of which at least so many, and a fifth of
    the run, are evidence.
    """
    starts = tied & ~torch.nn.functional.pad(tied, (1, 0))[:, :-1]
    number = starts.flatten().cumsum(0).view(tied.shape)
    runs = int(number.max()) + 1
    sizes = torch.bincount(number[tied], minlength=runs)
    hits = torch.bincount(number[evidence], minlength=runs)
    return tied & ((hits >= least) & (hits >= 0.2 * sizes))[number]


def _at_an_end(tied: Tensor, mask: Tensor) -> Tensor:
    """The tied tokens, where they are the first or the last token of nearly every
    response and hardly any other.
    """
    order = mask.cumsum(1)
    for end in (order == 1, order == mask.sum(1, keepdim=True)):
        place = mask & end
        at_end = tied[place].double().mean()
        elsewhere = tied[mask & ~place].double().mean()
        if float(at_end) > 0.95 and float(elsewhere) < 0.05:
            return tied & place
    return torch.zeros_like(tied)


def find_floor(c: Columns) -> Undone | None:
    """One column has a floor (or a ceiling) at which values of the other one go on.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, undone; None where there is none.
    """
    for name, held, other in (
        ("sampler", c.sampler, c.trainer),
        ("old", c.trainer, c.sampler),
    ):
        inside = c.trained(held)
        for lowest in (True, False):
            value = inside.min() if lowest else inside.max()
            tied = c.mask & (held == value)
            if int(tied.sum()) < FEW or (not lowest and float(value) > -1e-3):
                continue
            beyond = (value - other[tied]) * (1 if lowest else -1)
            rest = (c.trainer - c.sampler)[c.mask & ~tied].abs()
            noise = float(rest.quantile(0.95)) if 0 < len(rest) < 10_000_000 else 0.0
            # ties of a coarse grid lie within a grid step of the other column, on both
            # sides
            far = int((beyond > max(0.1, 4 * noise)).sum())
            # responses to one prompt begin with the same token
            varied = len(other[tied].unique()) > FEW
            one_way = (
                float((beyond > -noise - 1e-6).double().mean()) > 0.95
                and float(beyond.median()) > noise
            )
            if varied and one_way and far >= FEW:
                if lowest:
                    limited = other.clamp(min=float(value))
                else:
                    limited = other.clamp(max=float(value))
                if name == "sampler":
                    undone = Columns(limited, held, c.mask)
                else:
                    undone = Columns(held, limited, c.mask)
                numbers = {
                    "column": name,
                    "value": float(value),
                    "tokens": int(tied.sum()),
                    "side": "floor" if lowest else "ceiling",
                }
                return Undone("floor", undone, c.distance(), undone.distance(), numbers)
    return None
