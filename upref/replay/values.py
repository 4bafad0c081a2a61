# SPDX-License-Identifier: Apache-2.0
"""Numbers of a column that are not the log-probability: a factor, probabilities,
placeholders, a floor.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from upref.replay.undo import (
    FEW,
    MOST_LEFT,
    NOTICEABLE_DISTANCE,
    Columns,
    Undone,
)

LEAST_RATIOS = 10  # tokens that a median of quotients needs
FACTOR_ROUNDING = 0.02  # of a median quotient of the columns: nearer to 1 is no factor
LEAST_BFLOAT16 = 20  # numbers that show whether a column holds bfloat16
# tokens of a response, or responses, that cannot share one number by chance
LEAST_EQUAL = 5
FAR_BELOW = -100  # nats: no token that was drawn
# The trainer's probability below which an engine would not report a token as certain.
UNLIKELY_TOKEN = 0.05
CERTAIN_TOKEN = 0.99  # of the trainer, where an engine may well report certainty
DOUBTFUL_TOKEN = 0.5  # the same, for tokens at the same end of nearly every response
# of the tied tokens at such an end; certain tokens are doubtful for the trainer as often
# as other engines and experts make them, which is rarely
DOUBTFUL_SHARE = 0.25
LEAST_RUN = 4  # neighbors with one whole number
CLOSE = 0.1  # nats, from a placeholder: a token may have that log-probability
AGREES = 0.01  # nats: mean distance of columns that rounding explains


def find_sums(c: Columns) -> Undone | None:
    """Find whether the sampler's column holds the log-probability of the response up to
    each token.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, with the sums undone; None where they do not explain the distance.
    """
    before = c.distance()
    if before < NOTICEABLE_DISTANCE:
        return None
    steps = torch.diff(
        torch.where(c.mask, c.sampler, 0.0),
        dim=1,
        prepend=torch.zeros(len(c.sampler), 1, dtype=c.sampler.dtype),
    )
    has_trained_neighbor = (
        c.mask & torch.nn.functional.pad(c.mask, (1, 0), value=False)[:, :-1]
    )
    is_first = c.mask & (c.mask.cumsum(1) == 1)
    undone = Columns(c.trainer, steps, has_trained_neighbor | is_first)
    after = undone.distance()
    # The differences of a column that hardly changes are near 0, and so is the trainer's
    # column of a peaked policy: they must be nearer to it than zeros are.
    zeros = torch.zeros_like(c.sampler)
    others = [Columns(c.trainer, y, undone.mask).distance() for y in (c.sampler, zeros)]
    if after < MOST_LEFT * min(others):
        return Undone("sums", undone, before, after)
    return None


def is_constant(c: Columns) -> bool:
    """Return whether the sampler has one number on every compared token, and the
    trainer has LEAST_EQUAL different ones or more: no number is that of a token. False
    where the columns hardly differ.

    Args:
        c: the columns of the trainer and the sampler.
    """
    if c.distance() < NOTICEABLE_DISTANCE:
        return False  # of uniform policies, whose numbers are right
    y = c.trained(c.sampler)
    return bool((y == y[0]).all()) and len(c.trained(c.trainer).unique()) >= LEAST_EQUAL


def is_one_number_a_row(c: Columns) -> bool:
    """Return whether each response of LEAST_EQUAL tokens or more has one number for all
    its tokens in the sampler's column, and LEAST_EQUAL of them have different ones:
    then no number is that of a token. False where the columns hardly differ.

    Args:
        c: the columns of the trainer and the sampler.
    """
    if c.distance() < NOTICEABLE_DISTANCE:
        return False  # of uniform policies, whose numbers are right
    long = c.mask.sum(1) >= LEAST_EQUAL
    highest = torch.where(c.mask, c.sampler, -torch.inf).amax(1)[long]
    lowest = torch.where(c.mask, c.sampler, torch.inf).amin(1)[long]
    # a mean that was copied to each token is equal to the rounding of float32
    is_equal = bool((highest - lowest <= 1e-6 * highest.abs()).all())
    return is_equal and len(highest.unique()) >= LEAST_EQUAL


def find_factor(c: Columns) -> Undone | None:
    """Find whether the sampler's column is a multiple of the trainer's, has the other
    sign, or holds probabilities.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, "probabilities", "sign" or "factor", undone; None where none of the
        three explains their distance.
    """
    trainer = c.trained(c.trainer)
    sampled = c.trained(c.sampler)
    before = c.distance()
    if before < NOTICEABLE_DISTANCE:
        return None
    if bool((sampled >= 0).all()) and bool((sampled <= 1).all()):
        logarithms = torch.where(c.mask, c.sampler.clamp(min=1e-30).log(), 0.0)
        undone = replace(c, sampler=logarithms)
        if (after := undone.distance()) < MOST_LEFT * before:
            return Undone("probabilities", undone, before, after)
    # a quotient of numbers near 0 tells nothing
    has_ratio = (trainer < -0.05) & (sampled.abs() > 1e-6)
    if int(has_ratio.sum()) < LEAST_RATIOS:
        return None
    factor = float((sampled[has_ratio] / trainer[has_ratio]).median())
    if factor == 0 or abs(factor - 1) < FACTOR_ROUNDING:
        return None
    cause = "factor"
    if abs(factor + 1) < FACTOR_ROUNDING:
        cause = "sign"
        factor = -1.0  # the median is off by rounding
    undone = replace(c, sampler=c.sampler / factor)
    after = undone.distance()
    if after < MOST_LEFT * before and _has_one_factor(trainer, sampled):
        return Undone(cause, undone, before, after, {"factor": factor})
    return None


def _has_one_factor(x: Tensor, y: Tensor) -> bool:
    """Return whether likely and rare tokens have the same median factor y/x, to 5 %;
    False where there are too few of either. At another temperature they do not have it:
    likely tokens come much nearer to 0 than rare ones.
    """
    likely = (x > -0.7) & (x < -0.02)  # probability 0.5 to 0.98
    rare = x < -1.5  # below 0.22
    if min(int(likely.sum()), int(rare.sum())) < LEAST_RATIOS:
        return False
    factor_of_likely = float((y[likely] / x[likely]).median())
    factor_of_rare = float((y[rare] / x[rare]).median())
    return abs(factor_of_likely - factor_of_rare) < 0.05 * abs(factor_of_rare)


def find_placeholder(c: Columns) -> Undone | None:
    """Find whether one exact number stands on tokens that the trainer finds unlikely: the
    sampler did not draw them.

    Placeholders are whole numbers: 0, -1, -9999. Other numbers repeat in a healthy
    column, where responses to one prompt begin with the same token. An engine reports 0
    for a certain token as well, and a mixture of experts may be certain where the
    trainer is not: so a 0 counts only in a run of tokens of which several are unlikely,
    or at the same end of nearly every response.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, with the columns without these tokens; None without a placeholder. Of
        several whole numbers, the FEW most frequent ones are tried, and the first that
        is a placeholder is taken. It is "not_sampled", or the note "zero" where a 0 may
        be certainty.
    """
    for value in _frequent_whole_numbers(c.trained(c.sampler)):
        has_value = c.mask & (c.sampler == value)
        is_placeholder, is_evidence = _find_placeholder_tokens(c, value)
        different_tokens = len(c.trainer[is_evidence & is_placeholder].unique())
        if different_tokens < FEW or _is_floor_or_ceiling(c, has_value, value):
            continue
        rest = c.without(is_placeholder)
        most_are_off = float(rest.row_distance().quantile(0.25)) > NOTICEABLE_DISTANCE
        if most_are_off and rest.unrelated():
            continue  # all numbers are in wrong places, and so is what fills the gaps
        placeholders = Columns(c.trainer, c.sampler, is_placeholder)
        if placeholders.distance() <= 3 * rest.distance():
            continue  # they are hardly farther off than all others
        numbers = {
            "tokens": int(is_placeholder.sum()),
            "trained": int(c.mask.sum()),
            "value": f"{value.item():g}",
            "place": words_for_place(is_placeholder, c.mask),
        }
        distances = (c.distance(), rest.distance())
        may_be_certainty = value == 0 and _writes_certainty_as_zero(rest)
        if may_be_certainty and not _stand_alone(is_placeholder, rest):
            return Undone("zero", rest, *distances, numbers, severity="note")
        return Undone("not_sampled", rest, *distances, numbers)
    return None


def _frequent_whole_numbers(column: Tensor) -> list[Tensor]:
    """Return the whole numbers of a column [N] that may be placeholders, the most
    frequent first, at most FEW: of bfloat16 only 0 and those of FAR_BELOW or less.
    """
    whole_numbers = column[column == column.round()]
    if is_bfloat16(column):  # whole numbers of its grid repeat
        is_possible = (whole_numbers == 0) | (whole_numbers <= FAR_BELOW)
        whole_numbers = whole_numbers[is_possible]
    values, counts = whole_numbers.unique(return_counts=True)
    return list(values[counts.argsort(descending=True)[:FEW]])


def _find_placeholder_tokens(c: Columns, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens have a placeholder if this number is one, and which tokens
    speak for that; each [B, T].

    A token speaks for it where the number is too far from the trainer's to be that of
    the token. The placeholders are the runs of neighbors with enough such tokens; of a
    number that is no whole one by chance, all tokens that have it; and where there is
    no run, the tokens at one end of nearly every response.

    Args:
        c: the columns of the trainer and the sampler.
        value: a whole number of the sampler's column.
    """
    column = c.trained(c.sampler)
    has_value = c.mask & (c.sampler == value)
    # a number of a fine grid is a whole one by chance once in millions
    is_rarely_whole = value != 0 and not _is_coarse(column)
    if value == 0:  # certainty, which only a token that is unlikely contradicts
        least_evidence = FEW
        is_evidence = has_value & (c.trainer < math.log(UNLIKELY_TOKEN))
    else:
        least_evidence = 1
        largest_distance = CLOSE if is_rarely_whole else 1
        is_evidence = has_value & ((c.trainer - value).abs() > largest_distance)
    is_placeholder = _runs_with(has_value, is_evidence, least_evidence)
    if value != 0 and not is_bfloat16(column):
        # no policy gives so many neighbors the same whole number
        is_placeholder |= _runs_of(has_value, LEAST_RUN)
        is_evidence |= is_placeholder & ((c.trainer - value).abs() > CLOSE)
    if not is_placeholder.any():
        is_placeholder = _ties_at_an_end(has_value, c)
        is_doubtful = c.trainer < math.log(DOUBTFUL_TOKEN)
        return is_placeholder, is_evidence | (is_placeholder & is_doubtful)
    if is_rarely_whole:
        return has_value, is_evidence
    # one such number shows what the others are
    return is_placeholder | is_evidence, is_evidence


def _writes_certainty_as_zero(c: Columns) -> bool:
    """Return whether the sampler has 0 on FEW tokens or more of which the trainer is
    certain too: then its 0 on another token may be certainty as well.
    """
    has_zero = c.trained(c.sampler) == 0
    is_certain = c.trained(c.trainer) > math.log(CERTAIN_TOKEN)
    return int((has_zero & is_certain).sum()) >= FEW


def words_for_place(tokens: Tensor, mask: Tensor) -> str:
    """Say where tokens stand, if it is one place in their responses.

    Args:
        tokens: some of those that train, [B, T].
        mask: the tokens that train, [B, T].

    Returns:
        Words between commas that they are whole responses, or the first, or the last
        trained token of each; "" where they are none of these.
    """
    rows = tokens.any(1)
    if bool((tokens == mask)[rows].all()):
        count = int(rows.sum())
        whole = "one whole response" if count == 1 else f"{count} whole responses"
        return f", all of {whole},"
    order = mask.cumsum(1)
    for word, end in (("first", order == 1), ("last", order == order[:, -1:])):
        if bool(end[tokens].all()):
            return f", each the {word} one with a number in its response,"
    return ""


def _stand_alone(is_placeholder: Tensor, rest: Columns) -> bool:
    """Return whether tokens with a placeholder stand in runs of FEW or more on average,
    nine of ten runs behind a token that trains and has no placeholder, and all other
    tokens agree.

    A trainer that lacks a part of the context, or reads other ids, disagrees with the
    sampler on the tokens behind as well; and where it lacks the prompt or a turn, it
    disagrees on the first token that trains after it.
    """
    starts = is_placeholder.clone()
    starts[:, 1:] &= ~is_placeholder[:, :-1]
    behind_trained = torch.zeros_like(starts)
    behind_trained[:, 1:] = rest.mask[:, :-1]
    in_runs = int(is_placeholder.sum()) >= FEW * int(starts.sum())
    share = float(behind_trained[starts].double().mean())
    return in_runs and share > 0.9 and rest.distance() < AGREES


def _is_coarse(column: Tensor) -> bool:
    """Return whether all numbers are of float16 or bfloat16, or have four decimals or
    fewer: there whole numbers are no rarity.
    """
    grids = (column.half().double(), column.bfloat16().double())
    is_on_grid = [bool((grid == column).all()) for grid in grids]
    four_decimals = (column * 1e4).round() / 1e4
    has_four_decimals = bool(((four_decimals - column).abs() < 1e-9).all())
    return any(is_on_grid) or has_four_decimals


def is_bfloat16(column: Tensor) -> bool:
    """Return whether every number of the column is one of bfloat16, and there are
    enough to tell.

    Args:
        column: any shape; zeros and numbers that are not finite do not count.
    """
    numbers = column[(column != 0) & column.isfinite()]
    return len(numbers) > LEAST_BFLOAT16 and bool(
        (numbers.bfloat16().double() == numbers).all()
    )


def _is_floor_or_ceiling(c: Columns, has_value: Tensor, value: Tensor) -> bool:
    """Return whether `value` is the least or the largest number of the sampler's
    column, and the trainer's numbers on nine of ten of its tokens lie beyond it, or
    within CLOSE. A largest number of 0 is no ceiling.
    """
    y = c.trained(c.sampler)
    above = c.trainer[has_value] - value
    if value == y.min() and value != y.max():
        return bool((above < CLOSE).double().mean() > 0.9)
    is_above = (above > -CLOSE).double().mean() > 0.9
    return bool(value == y.max() and value < 0 and is_above)


def _runs_of(tied: Tensor, least: int) -> Tensor:
    """Return the tokens, [B, T], in runs of `least` or more neighboring tied tokens."""
    starts = tied & ~torch.nn.functional.pad(tied, (1, 0))[:, :-1]
    run_number = starts.flatten().cumsum(0).view(tied.shape)
    sizes = torch.bincount(run_number[tied], minlength=int(run_number.max()) + 1)
    return tied & (sizes >= least)[run_number]


def _runs_with(tied: Tensor, evidence: Tensor, least_evidence: int) -> Tensor:
    """Return the tokens, [B, T], in those runs of neighboring tied tokens that have
    enough evidence: `least_evidence` tokens, and a fifth of the run.

    Args:
        tied: tokens that share one number, [B, T].
        evidence: those of them that show that the number is none of theirs, [B, T].
        least_evidence: tokens.
    """
    starts = tied & ~torch.nn.functional.pad(tied, (1, 0))[:, :-1]
    run_number = starts.flatten().cumsum(0).view(tied.shape)
    runs = int(run_number.max()) + 1
    sizes = torch.bincount(run_number[tied], minlength=runs)
    evidence_of_runs = torch.bincount(run_number[evidence], minlength=runs)
    has_enough = evidence_of_runs >= least_evidence
    has_enough &= evidence_of_runs >= 0.2 * sizes
    return tied & has_enough[run_number]


def _ties_at_an_end(tied: Tensor, c: Columns) -> Tensor:
    """Return the tied tokens at one end of the responses, [B, T], where nearly every
    response has one there, and hardly any other token is tied, or hardly any other tied
    token is doubtful for the trainer (DOUBTFUL_TOKEN); else no token. The first tokens
    of the responses are tried before the last ones.
    """
    order = c.mask.cumsum(1)
    is_doubtful = c.trainer < math.log(DOUBTFUL_TOKEN)
    for end in (order == 1, order == c.mask.sum(1, keepdim=True)):
        place = c.mask & end
        elsewhere = c.mask & ~place
        at_end = float(tied[place].double().mean())
        doubtful_at_end = float(is_doubtful[tied & place].double().mean())
        doubtful_elsewhere = is_doubtful[tied & elsewhere].double()
        is_lone = float(tied[elsewhere].double().mean()) < 0.05
        # of a peaked policy, whose exact zeros are right elsewhere
        if len(doubtful_elsewhere) and doubtful_at_end > DOUBTFUL_SHARE:
            is_lone |= float(doubtful_elsewhere.mean()) < doubtful_at_end / 50
        if at_end > 0.95 and is_lone:
            return tied & place
    return torch.zeros_like(tied)


def find_floor(c: Columns) -> Undone | None:
    """Find whether one column has a floor or a ceiling beyond which values of the other
    one go on. The sampler's column is tried first, and the floor before the ceiling.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, with the other column clamped at the same number; None where there is
        none. A ceiling above -0.001, where a token is certain, is none.
    """
    for name in ("sampler", "old"):
        for lowest in (True, False):
            undone = _undo_limit(c, name, lowest)
            if undone is not None:
                return undone
    return None


def _undo_limit(c: Columns, name: str, lowest: bool) -> Undone | None:
    """Find whether one column has a floor or a ceiling, and clamp the other one at it.

    Args:
        c: the columns of the trainer and the sampler.
        name: of the column that may be limited: "sampler", or "old" for the trainer's.
        lowest: whether to look for a floor; else for a ceiling.
    """
    if name == "sampler":
        limited, other = c.sampler, c.trainer
    else:
        limited, other = c.trainer, c.sampler
    trained = c.trained(limited)
    limit = float(trained.min() if lowest else trained.max())
    has_limit = c.mask & (limited == limit)
    if not lowest and limit > -1e-3:
        return None  # certain tokens are no ceiling
    if not _is_limit(c, other, has_limit, limit, lowest):
        return None
    other_limited = other.clamp(min=limit) if lowest else other.clamp(max=limit)
    if name == "sampler":
        undone = Columns(other_limited, limited, c.mask)
    else:
        undone = Columns(limited, other_limited, c.mask)
    numbers = {
        "column": name,
        "value": limit,
        "tokens": int(has_limit.sum()),
        "side": "floor" if lowest else "ceiling",
    }
    return Undone("floor", undone, c.distance(), undone.distance(), numbers)


def _is_limit(
    c: Columns, other: Tensor, has_limit: Tensor, limit: float, lowest: bool
) -> bool:
    """Return whether the least (or largest) number of a column is a floor (or ceiling):
    several different tokens share it, nearly all of them are beyond it in the other
    column, and some of them farther than the two columns differ elsewhere.

    Args:
        c: the columns of the trainer and the sampler.
        other: the column that goes on, [B, T].
        has_limit: the tokens that have the number, [B, T].
        limit: the number.
        lowest: whether it is the least one of its column.
    """
    if int(has_limit.sum()) < FEW:
        return False
    beyond = (limit - other[has_limit]) * (1 if lowest else -1)
    rest = (c.trainer - c.sampler)[c.mask & ~has_limit].abs()
    # `quantile` takes at most 2^24 numbers
    noise = float(rest.quantile(0.95)) if 0 < len(rest) < 10_000_000 else 0.0
    # ties of a coarse grid lie within a grid step of the other column, on both sides
    number_far_beyond = int((beyond > max(0.1, 4 * noise)).sum())
    # responses to one prompt begin with the same token
    has_different_tokens = len(other[has_limit].unique()) > FEW
    are_beyond = float((beyond > -noise - 1e-6).double().mean()) > 0.95
    is_one_sided = are_beyond and float(beyond.median()) > noise
    return has_different_tokens and is_one_sided and number_far_beyond >= FEW
