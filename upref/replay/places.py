# SPDX-License-Identifier: Apache-2.0
"""Numbers of the sampler that stand in the wrong place: a shift along the response, and
exchanged responses.
"""

from dataclasses import replace

import torch
from torch import Tensor

from upref.replay.undo import FEW, NOTICEABLE, QUARTER, Columns, Undone

SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4)  # tokens
# of the responses, beyond which a shift of some of them is reported
CHANGED_SHARE = 0.02
# of the responses that are off, at least, that the shift or the exchange brings back:
# else they are off otherwise
EXPLAINED = 1 / 3
ROW_TOKENS = 8  # a shorter response says too little about its row
ROWS_COMPARED = 2048
PREFIX = 64  # tokens of a row that are compared with other rows


def find_shift(c: Columns) -> Undone | None:
    """The sampler's column is some tokens late or early, in all responses or in some.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, with the shift undone; None where no shift explains their distance.
    """
    own = c.row_distance()
    enough = c.mask.sum(1) >= ROW_TOKENS
    bad = enough & (own > 5 * NOTICEABLE)
    if int(bad.sum()) < FEW:
        return None
    best: tuple[int, int, Columns, Tensor] | None = None
    for k in SHIFTS:
        moved = _shift(c, k)
        # A shift leaves out tokens at one end: the others must have been apart as well,
        # in either column.
        stay, came = (
            Columns(c.trainer, c.sampler, tokens).row_distance()
            for tokens in (moved.mask, _moved(moved.mask, -k))
        )
        apart = (
            bad
            & (stay.minimum(came) > 5 * NOTICEABLE)
            & (moved.mask.sum(1) >= ROW_TOKENS // 2)
        )
        fits = apart & (moved.row_distance() < QUARTER * stay.minimum(came))
        count = int(fits.sum())
        if best is None or count > best[0]:
            best = (count, k, moved, fits)
    if best is None or best[0] < max(
        FEW, CHANGED_SHARE * len(own), EXPLAINED * int(bad.sum())
    ):
        return None
    count, k, moved, fits = best
    # then in the responses too that are too short to be judged
    if count > 0.5 * int(bad.sum()):
        fits = fits | (moved.row_distance() < own)
    pick = fits[:, None]
    undone = Columns(
        c.trainer,
        torch.where(pick, moved.sampler, c.sampler),
        torch.where(pick, moved.mask, c.mask),
    )
    return Undone(
        "shift",
        undone,
        float(own[fits].mean()),
        float(moved.row_distance()[fits].mean()),
        {"shift": k, "rows": count, "of": int(enough.sum())},
    )


def find_alignment(c: Columns) -> Undone | None:
    """The sampler's numbers are at the left or at the right end of each row, where
    the tokens of the response do not.

    The distance between the two places differs from response to response, so a shift
    by one number of slots does not undo it. What stands beside no trained token is not
    recorded, and so some tokens have no number.
    """
    own = c.row_distance()
    enough = c.mask.sum(1) >= ROW_TOKENS
    bad = enough & (own > 5 * NOTICEABLE)
    width = c.mask.shape[1]
    first = c.mask.int().argmax(1)
    last = width - 1 - c.mask.flip(1).int().argmax(1)
    for side, offset in (("left", -first), ("right", width - 1 - last)):
        moved = _each_moved(c, offset)
        kept = moved.mask.sum(1) >= ROW_TOKENS // 2
        apart = bad & (offset != 0) & kept
        before = replace(c, mask=moved.mask).row_distance()
        fits = apart & (before > 5 * NOTICEABLE)
        fits &= moved.row_distance() < QUARTER * before
        if int(fits.sum()) < max(FEW, 0.5 * int(apart.sum())):
            continue
        # the others may be so too, and too short to be told: nothing is read from them
        pick = fits[:, None]
        undone = Columns(
            c.trainer,
            torch.where(pick, moved.sampler, c.sampler),
            torch.where(pick, moved.mask, c.mask & (offset == 0)[:, None]),
        )
        return Undone(
            "aligned",
            undone,
            float(before[fits].mean()),
            float(moved.row_distance()[fits].mean()),
            {"side": side, "rows": int(fits.sum()), "of": int(enough.sum())},
        )
    return None


def _each_moved(c: Columns, offset: Tensor) -> Columns:
    """y at t + offset of its row beside x at t, where both are trained tokens."""
    width = c.mask.shape[1]
    index = torch.arange(width)[None, :] + offset[:, None]
    inside = (index >= 0) & (index < width)
    index = index.clamp(0, width - 1)
    came = c.mask.gather(1, index) & inside
    return Columns(c.trainer, c.sampler.gather(1, index) * inside, c.mask & came)


def _shift(c: Columns, k: int) -> Columns:
    """y at t + k beside x at t, where both are trained tokens of the response."""
    return Columns(c.trainer, _moved(c.sampler, k), c.mask & _moved(c.mask, k))


def _moved(column: Tensor, k: int) -> Tensor:
    """The column k slots earlier; 0 where there is nothing."""
    out = torch.zeros_like(column)
    if k == 0:
        return column.clone()
    if k > 0:
        out[:, :-k] = column[:, k:]
    else:
        out[:, -k:] = column[:, :k]
    return out


def find_exchanged_rows(c: Columns) -> Undone | None:
    """The sampler's column of a response stands in another response's row.

    Args:
        c: the columns of the trainer and the sampler.

    Returns:
        The cause, with the rows in place; None where no exchange explains their
            distance.
    """
    own = c.row_distance()
    bad = ((c.mask.sum(1) >= ROW_TOKENS) & (own > 5 * NOTICEABLE)).nonzero()[:, 0][
        :ROWS_COMPARED
    ]
    if len(bad) < 2:
        return None
    x, y, mask = _aligned(c, bad)
    compared = []
    matches = []
    before = []
    for number in range(len(bad)):
        # a row of the column is as long as its own response: behind it the file holds
        # zeros
        both = mask[number][None, :] & (y != 0)
        off = ((x[number][None, :] - y).abs().clamp(max=1) * both).sum(1) / both.sum(
            1
        ).clamp(min=1)
        off = torch.where(
            both.sum(1) >= min(ROW_TOKENS, int(mask[number].sum())), off, 1.0
        )
        two = off.topk(min(3, len(off)), largest=False)
        best = int(two.indices[0])
        same = both[best]
        if same.any():
            off_own = float((x[number] - y[number])[same].abs().clamp(max=1).mean())
        else:
            off_own = 0.0
        before.append(off_own)  # of the row's own column, on the same tokens
        compared.append(two.values)
        matches.append(best)
    nearest = torch.stack([v[0] for v in compared])
    # the third nearest: two responses may be equal
    others = torch.stack([v[-1] for v in compared])
    elsewhere = torch.tensor(matches) != torch.arange(len(bad))
    apart = torch.tensor(before)
    fits = (
        elsewhere
        & (apart > 5 * NOTICEABLE)
        & (nearest < QUARTER * apart)
        & ((nearest < 0.5 * others) | (len(bad) < 3))
    )
    # where most responses are off otherwise, two of them are alike by chance
    if int(fits.sum()) < max(2, EXPLAINED * len(bad)):
        return None
    rows = bad[fits]
    source = bad[torch.tensor(matches)[fits]]
    if len(source.unique()) < 0.8 * len(source):
        return None  # an exchange gives every row another one
    columns = c.sampler.clone()
    columns[rows] = _placed(c, rows, source)
    mask_now = c.mask.clone()
    mask_now[rows] &= columns[rows] != 0
    undone = Columns(c.trainer, columns, mask_now)
    after = float(undone.row_distance()[rows].mean())
    # the others that are off may be exchanged too, and too short or too alike to be
    # told: nothing may be read from them
    exchanged = torch.zeros(len(own), dtype=torch.bool)
    exchanged[rows] = True
    usual = float(undone.row_distance()[rows].quantile(0.9))
    unsure = ~exchanged & (own > max(NOTICEABLE, usual))
    undone = undone.without(unsure[:, None])
    numbers = {
        "rows": len(rows),
        "of": len(own),
        "first": int(rows[0]),
        "second": int(source[0]),
    }
    return Undone("rows", undone, float(apart[fits].mean()), after, numbers)


def _aligned(c: Columns, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and mask of these rows from their first trained token on, [rows, PREFIX]."""
    first = c.mask[rows].int().argmax(1)
    width = min(PREFIX, c.mask.shape[1])
    index = first[:, None] + torch.arange(width)[None, :]
    inside = index < c.mask.shape[1]
    index = index.clamp(max=c.mask.shape[1] - 1)
    x, y, mask = (
        column[rows].gather(1, index) for column in (c.trainer, c.sampler, c.mask)
    )
    return x, y * inside, mask & inside


def _placed(c: Columns, rows: Tensor, source: Tensor) -> Tensor:
    """The column of the rows `source`, moved so that it starts where the rows `rows`
    start.
    """
    width = c.mask.shape[1]
    offset = c.mask[source].int().argmax(1) - c.mask[rows].int().argmax(1)
    index = torch.arange(width)[None, :] + offset[:, None]
    inside = (index >= 0) & (index < width)
    return c.sampler[source].gather(1, index.clamp(0, width - 1)) * inside
