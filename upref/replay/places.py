# SPDX-License-Identifier: Apache-2.0
"""Numbers of the sampler that stand in the wrong place: a shift along the response, and
exchanged responses.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from upref.replay.undo import (
    FEW,
    MOST_LEFT,
    NOTICEABLE_DISTANCE,
    Columns,
    Undone,
    words_for_long,
)

SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4)  # tokens
WRONG = 5 * NOTICEABLE_DISTANCE  # nats: distance of a response whose place is in doubt
# of the responses, beyond which a shift of some of them is reported
CHANGED_SHARE = 0.02
# The least share of the wrong responses that a shift or an exchange has to bring back.
# With less, something else is wrong with them.
EXPLAINED = 1 / 3
ROW_TOKENS = 8  # a shorter response says too little about its row
ROWS_COMPARED = 2048
PREFIX = 64  # tokens of a row that are compared with other rows


def find_shift(c: Columns) -> Undone | None:
    """Find whether the sampler's column is some tokens late or early, in all responses or
    in some.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, with the shift undone, of the shift in SHIFTS that explains the most
        responses. None where no shift explains the distance of enough of them. Tokens
        to which no number of a trained token moves are left out of the mask.
    """
    distances = c.row_distance()
    is_long_enough = c.mask.sum(1) >= ROW_TOKENS
    is_wrong = is_long_enough & (distances > WRONG)
    if int(is_wrong.sum()) < FEW:
        return None
    least_count = max(
        FEW, CHANGED_SHARE * len(distances), EXPLAINED * int(is_wrong.sum())
    )
    best: _Shifted | None = None
    for shift in SHIFTS:
        tried = _try_shift(c, shift, is_wrong)
        if best is None or tried.count > best.count:
            best = tried
    if best is None or best.count < least_count:
        return None
    left = best.columns.row_distance()
    is_explained = best.is_explained
    # where most wrong responses are shifted, the short ones are judged too
    if best.count > 0.5 * int(is_wrong.sum()):
        is_explained = is_explained | (left < distances)
    pick = is_explained[:, None]
    undone = Columns(
        c.trainer,
        torch.where(pick, best.columns.sampler, c.sampler),
        torch.where(pick, best.columns.mask, c.mask),
    )
    numbers = {
        "shift": best.shift,
        "rows": best.count,
        "of": int(is_long_enough.sum()),
        "long": words_for_long(c.mask, ROW_TOKENS),
    }
    before = float(distances[is_explained].mean())
    after = float(left[is_explained].mean())
    return Undone("shift", undone, before, after, numbers)


@dataclass(frozen=True)
class _Shifted:
    """The columns with the sampler's column moved by some tokens.

    Attributes:
        shift: by how many tokens: the number of slot t + shift goes to slot t.
        columns: the moved columns, and the tokens that have a number.
        is_explained: whether the shift explains the distance of a response, [B].
        count: of these responses.
    """

    shift: int
    columns: Columns
    is_explained: Tensor
    count: int


def _try_shift(c: Columns, shift: int, is_wrong: Tensor) -> _Shifted:
    """Move the sampler's column, and find which of the wrong responses this explains."""
    moved = _shift(c, shift)
    # A shift leaves out tokens at one end: the others must have been apart as well, in
    # either column.
    tokens_of_sampler = _move_column(moved.mask, -shift)
    before = Columns(c.trainer, c.sampler, moved.mask).row_distance()
    before_of_sampler = Columns(c.trainer, c.sampler, tokens_of_sampler).row_distance()
    least_before = before.minimum(before_of_sampler)
    keeps_enough = moved.mask.sum(1) >= ROW_TOKENS // 2
    is_apart = is_wrong & (least_before > WRONG) & keeps_enough
    is_explained = is_apart & (moved.row_distance() < MOST_LEFT * least_before)
    return _Shifted(shift, moved, is_explained, int(is_explained.sum()))


def find_alignment(c: Columns) -> Undone | None:
    """Find whether the sampler's numbers stand at the left or at the right end of each
    row, and the tokens of the response do not.

    The distance between the two places differs from response to response, so a shift
    by one number of slots does not undo it. What stands beside no trained token is not
    recorded, and so some tokens have no number.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, with the numbers back beside their tokens, where it explains half or
        more of the wrong responses that it moves; the left end is tried first. None
        otherwise. Tokens without a number, and responses that may be moved too, are
        left out of the mask.
    """
    distances = c.row_distance()
    is_long_enough = c.mask.sum(1) >= ROW_TOKENS
    is_wrong = is_long_enough & (distances > WRONG)
    width = c.mask.shape[1]
    first_token = c.mask.int().argmax(1)
    last_token = width - 1 - c.mask.flip(1).int().argmax(1)
    for side, offset in (("left", -first_token), ("right", width - 1 - last_token)):
        moved = _move_each_row(c, offset)
        keeps_enough = moved.mask.sum(1) >= ROW_TOKENS // 2
        is_apart = is_wrong & (offset != 0) & keeps_enough
        before = replace(c, mask=moved.mask).row_distance()
        is_explained = is_apart & (before > WRONG)
        is_explained &= moved.row_distance() < MOST_LEFT * before
        if int(is_explained.sum()) < max(FEW, 0.5 * int(is_apart.sum())):
            continue
        # Other rows may be moved as well, and too short to tell: their tokens are left
        # out, unless the offset is 0.
        pick = is_explained[:, None]
        undone = Columns(
            c.trainer,
            torch.where(pick, moved.sampler, c.sampler),
            torch.where(pick, moved.mask, c.mask & (offset == 0)[:, None]),
        )
        return Undone(
            "aligned",
            undone,
            float(before[is_explained].mean()),
            float(moved.row_distance()[is_explained].mean()),
            {
                "side": side,
                "rows": int(is_explained.sum()),
                "of": int(is_long_enough.sum()),
                "long": words_for_long(c.mask, ROW_TOKENS),
            },
        )
    return None


def _move_each_row(c: Columns, offset: Tensor) -> Columns:
    """Return the columns with the sampler's row i moved left by offset[i]: slot t takes
    the log-probability of slot t + offset[i]. A token stays in the mask where both slots
    are trained.
    """
    width = c.mask.shape[1]
    index = torch.arange(width)[None, :] + offset[:, None]
    inside = (index >= 0) & (index < width)
    index = index.clamp(0, width - 1)
    is_trained_there = c.mask.gather(1, index) & inside
    # not a product with `inside`: -inf * 0 is NaN
    moved = torch.where(inside, c.sampler.gather(1, index), 0.0)
    return Columns(c.trainer, moved, c.mask & is_trained_there)


def _shift(c: Columns, k: int) -> Columns:
    """Return the columns with the sampler's number of slot t + k at slot t; a token is
    kept in the mask where both slots are trained.
    """
    return Columns(
        c.trainer, _move_column(c.sampler, k), c.mask & _move_column(c.mask, k)
    )


def _move_column(column: Tensor, k: int) -> Tensor:
    """Return the column [B, T] moved k slots to the left, for k < 0 to the right; 0 or
    False in the slots that become empty.
    """
    moved = torch.zeros_like(column)
    if k == 0:
        return column.clone()
    if k > 0:
        moved[:, :-k] = column[:, k:]
    else:
        moved[:, -k:] = column[:, :k]
    return moved


def find_exchanged_rows(c: Columns) -> Undone | None:
    """Find whether the sampler's column of a response stands in another response's row.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, with the rows in place; None where no exchange explains their
        distance. Of the wrong responses the first ROWS_COMPARED are compared with each
        other. Responses that are off and not among the exchanged ones are left out of
        the mask.
    """
    distances = c.row_distance()
    is_wrong = (c.mask.sum(1) >= ROW_TOKENS) & (distances > WRONG)
    wrong_rows = is_wrong.nonzero()[:, 0][:ROWS_COMPARED]
    if len(wrong_rows) < 2:
        return None
    nearest = _find_nearest_columns(*_from_first_trained(c, wrong_rows))
    is_elsewhere = nearest.row != torch.arange(len(wrong_rows))
    is_exchanged = (
        is_elsewhere
        & (nearest.own_distance > WRONG)
        & (nearest.distance < MOST_LEFT * nearest.own_distance)
    )
    if len(wrong_rows) >= 3:  # there are others, and it is clearly nearer
        is_exchanged &= nearest.distance < 0.5 * nearest.third_distance
    # where most responses are off otherwise, two of them are alike by chance
    if int(is_exchanged.sum()) < max(2, EXPLAINED * len(wrong_rows)):
        return None
    rows = wrong_rows[is_exchanged]
    source = wrong_rows[nearest.row[is_exchanged]]
    if len(source.unique()) < 0.8 * len(source):
        return None  # an exchange gives every row another one
    undone = _with_columns_of(c, rows, source)
    after = float(undone.row_distance()[rows].mean())
    # the others that are off may be exchanged too, and too short or too alike to be
    # told: nothing may be read from them
    exchanged = torch.zeros(len(distances), dtype=torch.bool)
    exchanged[rows] = True
    usual = float(undone.row_distance()[rows].quantile(0.9))
    unsure = ~exchanged & (distances > max(NOTICEABLE_DISTANCE, usual))
    undone = undone.without(unsure[:, None])
    numbers = {
        "rows": len(rows),
        "of": len(distances),
        "first": int(rows[0]),
        "second": int(source[0]),
    }
    before = float(nearest.own_distance[is_exchanged].mean())
    return Undone("rows", undone, before, after, numbers)


class _NearestColumns(NamedTuple):
    """The sampler's column that is nearest to each row of the trainer's, [n].

    Distances are means of min(|x - y|, 1) over the tokens of both, in nats.
    """

    row: Tensor  # the number of the row in which the column stands
    distance: Tensor
    # of the third nearest one, not of the second: two responses may be equal
    third_distance: Tensor
    own_distance: Tensor  # of the row's own column, on the same tokens


def _find_nearest_columns(x: Tensor, y: Tensor, mask: Tensor) -> _NearestColumns:
    """Compare each row of the trainer with each row of the sampler.

    Args:
        x, y: log-probabilities of the trainer and of the sampler, [n, T].
        mask: the tokens that train, [n, T].
    """
    rows = []
    smallest_distances = []
    own_distances = []
    for number in range(len(x)):
        # a row of the column is as long as its own response, and 0 behind it
        in_both = mask[number][None, :] & (y != 0)
        differences = (x[number][None, :] - y).abs().clamp(max=1) * in_both
        token_counts = in_both.sum(1)
        is_long_enough = token_counts >= min(ROW_TOKENS, int(mask[number].sum()))
        distances = torch.where(
            is_long_enough, differences.sum(1) / token_counts.clamp(min=1), 1.0
        )
        nearest_three = distances.topk(min(3, len(distances)), largest=False)
        nearest_row = int(nearest_three.indices[0])
        in_nearest = in_both[nearest_row]
        own_distance = 0.0
        if in_nearest.any():
            own_differences = (x[number] - y[number])[in_nearest].abs()
            own_distance = float(own_differences.clamp(max=1).mean())
        rows.append(nearest_row)
        smallest_distances.append(nearest_three.values)
        own_distances.append(own_distance)
    return _NearestColumns(
        torch.tensor(rows),
        torch.stack([values[0] for values in smallest_distances]),
        torch.stack([values[-1] for values in smallest_distances]),
        torch.tensor(own_distances),
    )


def _with_columns_of(c: Columns, rows: Tensor, source: Tensor) -> Columns:
    """Return the columns with the sampler's columns of the rows `source` in `rows`. A
    token to which no number moves, or a 0, is left out of the mask.
    """
    columns = c.sampler.clone()
    columns[rows] = _move_to_start(c, rows, source)
    mask = c.mask.clone()
    mask[rows] &= columns[rows] != 0  # 0 stands behind a shorter response
    return Columns(c.trainer, columns, mask)


def _from_first_trained(c: Columns, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return trainer, sampler and mask of these rows from their first trained token on,
    [rows, PREFIX] or, in a narrower batch, [rows, T]. Slots beyond the row are masked,
    and 0 in the sampler's column.
    """
    first = c.mask[rows].int().argmax(1)
    width = min(PREFIX, c.mask.shape[1])
    index = first[:, None] + torch.arange(width)[None, :]
    inside = index < c.mask.shape[1]
    index = index.clamp(max=c.mask.shape[1] - 1)
    x, y, mask = (
        column[rows].gather(1, index) for column in (c.trainer, c.sampler, c.mask)
    )
    return x, y * inside, mask & inside


def _move_to_start(c: Columns, rows: Tensor, source: Tensor) -> Tensor:
    """Return the sampler's column of the rows `source`, [rows, T], moved so that its
    first trained token is where that of `rows` is; 0 in the slots that become empty.
    """
    width = c.mask.shape[1]
    offset = c.mask[source].int().argmax(1) - c.mask[rows].int().argmax(1)
    index = torch.arange(width)[None, :] + offset[:, None]
    inside = (index >= 0) & (index < width)
    return c.sampler[source].gather(1, index.clamp(0, width - 1)) * inside
