# SPDX-License-Identifier: Apache-2.0
"""Causes of a gap that can be undone: each function returns the columns without the cause, or None.

The distance of two columns is the mean of min(|x - y|, 1) over the trained tokens: bounded, so that one impossible
token does not outweigh a thousand. A cause is accepted where undoing it leaves a quarter of the distance or less. In
two columns of the same tokens, in the same rows, each of these changes enlarges the distance, so a healthy gap of any
size is never undone.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

QUARTER = 0.25
NOTICEABLE = 0.02  # distance below which there is nothing to explain
SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4)  # tokens
ROW_TOKENS = 8  # a shorter response says too little about its row
ROWS_COMPARED = 2048
PREFIX = 64  # tokens of a row that are compared with other rows
FEW = 3
LEAST_RATIOS = 10  # likely and rare tokens, for the median of a ratio
CHANGED_SHARE = 0.02  # of the responses, beyond which a cause of some of them is reported
ENOUGH = 20  # numbers, to tell that a column holds bfloat16
FAR_BELOW = -100  # nats: no token that was drawn
UNLIKELY = 0.05  # probability by the trainer of a token that an engine would not report as certain


@dataclass(frozen=True)
class Columns:
    """x = log π_old and y = log μ, [B, T], and the tokens that are compared."""

    x: Tensor
    y: Tensor
    mask: Tensor

    @property
    def d(self) -> Tensor:
        return self.x - self.y

    def trained(self, column: Tensor) -> Tensor:
        return column[self.mask]

    def without(self, tokens: Tensor) -> "Columns":
        """The same without these tokens."""
        return replace(self, mask=self.mask & ~tokens)

    def distance(self) -> float:
        """Mean of min(|x - y|, 1)."""
        d = self.trained(self.d)
        return float(d.abs().clamp(max=1).mean()) if len(d) else 0.0

    def row_distance(self) -> Tensor:
        """The same of each response, [B]; 0 for a response without tokens."""
        off = torch.where(self.mask, self.d.abs().clamp(max=1), 0.0)
        return off.sum(1) / self.mask.sum(1).clamp(min=1)


@dataclass(frozen=True)
class Undone:
    """A cause, the columns without it, and the distances before and after on the same tokens."""

    cause: str
    columns: Columns
    before: float
    after: float
    numbers: dict[str, Any] = field(default_factory=dict)


def find_factor(c: Columns) -> Undone | None:
    """The sampler's column is a multiple of the trainer's, has the other sign, or holds probabilities."""
    x, y = c.trained(c.x), c.trained(c.y)
    before = c.distance()
    if before < NOTICEABLE:
        return None
    if bool((y >= 0).all()) and bool((y <= 1).all()):
        logs = torch.where(c.mask, c.y.clamp(min=1e-30).log(), 0.0)
        undone = replace(c, y=logs)
        if (after := undone.distance()) < QUARTER * before:
            return Undone("probabilities", undone, before, after)
    sure = (x < -0.05) & (y.abs() > 1e-6)
    if int(sure.sum()) < 10:
        return None
    factor = float((y[sure] / x[sure]).median())
    if factor == 0 or abs(factor - 1) < 0.02:
        return None
    undone = replace(c, y=c.y / factor)
    after = undone.distance()
    if after < QUARTER * before and _one_factor(x, y):
        cause = "sign" if abs(factor + 1) < 0.02 else "factor"
        return Undone(cause, undone, before, after, {"factor": factor})
    return None


def _one_factor(x: Tensor, y: Tensor) -> bool:
    """Whether likely and rare tokens have the same factor. At another temperature they do not: likely tokens come much
    nearer to 0 than rare ones."""
    likely, rare = (x > -0.7) & (x < -0.02), x < -1.5
    if min(int(likely.sum()), int(rare.sum())) < LEAST_RATIOS:
        return False
    first, second = (float((y[some] / x[some]).median()) for some in (likely, rare))
    return abs(first - second) < 0.05 * abs(second)


def find_shift(c: Columns) -> Undone | None:
    """The sampler's column is some tokens late or early, in all responses or in some."""
    own = c.row_distance()
    enough = c.mask.sum(1) >= ROW_TOKENS
    bad = enough & (own > 5 * NOTICEABLE)
    if int(bad.sum()) < FEW:
        return None
    best: tuple[int, int, Columns, Tensor] | None = None
    for k in SHIFTS:
        moved = _shift(c, k)
        # A shift leaves out tokens at one end: the others must have been apart as well, in either column.
        stay, came = (Columns(c.x, c.y, tokens).row_distance() for tokens in (moved.mask, _moved(moved.mask, -k)))
        apart = bad & (stay.minimum(came) > 5 * NOTICEABLE) & (moved.mask.sum(1) >= ROW_TOKENS // 2)
        fits = apart & (moved.row_distance() < QUARTER * stay.minimum(came))
        count = int(fits.sum())
        if best is None or count > best[0]:
            best = (count, k, moved, fits)
    if best is None or best[0] < max(FEW, CHANGED_SHARE * len(own)):
        return None
    count, k, moved, fits = best
    pick = fits[:, None]
    undone = Columns(c.x, torch.where(pick, moved.y, c.y), torch.where(pick, moved.mask, c.mask))
    return Undone(
        "shift", undone, float(own[fits].mean()), float(moved.row_distance()[fits].mean()),
        {"shift": k, "rows": count, "of": int(enough.sum())},
    )  # fmt: skip


def _shift(c: Columns, k: int) -> Columns:
    """y at t + k beside x at t, where both are trained tokens of the response."""
    return Columns(c.x, _moved(c.y, k), c.mask & _moved(c.mask, k))


def _moved(column: Tensor, k: int) -> Tensor:
    """The column k slots earlier; 0 where there is nothing."""
    out = torch.zeros_like(column)
    if k > 0:
        out[:, :-k] = column[:, k:]
    else:
        out[:, -k:] = column[:, :k]
    return out


def find_exchanged_rows(c: Columns) -> Undone | None:
    """The sampler's column of a response stands in another response's row."""
    own = c.row_distance()
    bad = ((c.mask.sum(1) >= ROW_TOKENS) & (own > 5 * NOTICEABLE)).nonzero()[:, 0][:ROWS_COMPARED]
    if len(bad) < 2:
        return None
    x, y, mask = _aligned(c, bad)
    compared, matches, before = [], [], []
    for number in range(len(bad)):
        # a row of the column is as long as its own response: behind it the file holds zeros
        both = mask[number][None, :] & (y != 0)
        off = ((x[number][None, :] - y).abs().clamp(max=1) * both).sum(1) / both.sum(1).clamp(min=1)
        off = torch.where(both.sum(1) >= min(ROW_TOKENS, int(mask[number].sum())), off, 1.0)
        two = off.topk(min(3, len(off)), largest=False)
        best = int(two.indices[0])
        same = both[best]
        off_own = float((x[number] - y[number])[same].abs().clamp(max=1).mean()) if same.any() else 0.0
        before.append(off_own)  # of the row's own column, on the same tokens
        compared.append(two.values)
        matches.append(best)
    nearest = torch.stack([v[0] for v in compared])
    others = torch.stack([v[-1] for v in compared])  # the third nearest: two responses may be equal
    elsewhere = torch.tensor(matches) != torch.arange(len(bad))
    apart = torch.tensor(before)
    fits = (
        elsewhere & (apart > 5 * NOTICEABLE) & (nearest < QUARTER * apart) & ((nearest < 0.5 * others) | (len(bad) < 3))
    )
    if int(fits.sum()) < 2:
        return None
    rows = bad[fits]
    source = bad[torch.tensor(matches)[fits]]
    if len(source.unique()) < 0.8 * len(source):
        return None  # an exchange gives every row another one
    columns = c.y.clone()
    columns[rows] = _placed(c, rows, source)
    mask_now = c.mask.clone()
    mask_now[rows] &= columns[rows] != 0
    undone = Columns(c.x, columns, mask_now)
    after = float(undone.row_distance()[rows].mean())
    numbers = {"rows": len(rows), "of": len(own), "first": int(rows[0]), "second": int(source[0])}
    return Undone("rows", undone, float(apart[fits].mean()), after, numbers)


def _aligned(c: Columns, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and mask of these rows from their first trained token on, [rows, PREFIX]."""
    first = c.mask[rows].int().argmax(1)
    width = min(PREFIX, c.mask.shape[1])
    index = first[:, None] + torch.arange(width)[None, :]
    inside = index < c.mask.shape[1]
    index = index.clamp(max=c.mask.shape[1] - 1)
    x, y, mask = (column[rows].gather(1, index) for column in (c.x, c.y, c.mask))
    return x, y * inside, mask & inside


def _placed(c: Columns, rows: Tensor, source: Tensor) -> Tensor:
    """The column of the rows `source`, moved so that it starts where the rows `rows` start."""
    width = c.mask.shape[1]
    offset = c.mask[source].int().argmax(1) - c.mask[rows].int().argmax(1)
    index = torch.arange(width)[None, :] + offset[:, None]
    inside = (index >= 0) & (index < width)
    return c.y[source].gather(1, index.clamp(0, width - 1)) * inside


def find_placeholder(c: Columns) -> Undone | None:
    """One exact number stands on tokens that the trainer finds unlikely: the sampler did not draw them.

    Placeholders are whole numbers: 0, -1, -9999. Other numbers repeat in a healthy column, where responses to one
    prompt begin with the same token. An engine reports 0 for a certain token as well, and a mixture of experts may be
    certain where the trainer is not: so a 0 counts only in a run of tokens of which several are unlikely.
    """
    y = c.trained(c.y)
    whole = y[y == y.round()]
    if is_bfloat16(y):  # whole numbers of its grid repeat
        whole = whole[(whole == 0) | (whole <= FAR_BELOW)]
    values, counts = whole.unique(return_counts=True)
    for at in counts.argsort(descending=True)[:FEW].tolist():
        value = values[at]
        tied = c.mask & (c.y == value)
        evidence = tied & ((c.x < math.log(UNLIKELY)) if value == 0 else ((c.x - value).abs() > 1))
        run = _runs_with(tied, evidence, FEW if value == 0 else 1)
        varied = len(c.x[evidence & run].unique())
        if varied < FEW or _limits(c, tied, value):
            continue
        rest = c.without(run)
        on_run = Columns(c.x, c.y, run).distance()
        if on_run > 3 * rest.distance():
            numbers = {"tokens": int(run.sum()), "trained": len(y), "value": f"{value.item():g}"}
            return Undone("not_sampled", rest, c.distance(), rest.distance(), numbers)
    return None


def is_bfloat16(column: Tensor) -> bool:
    """Whether every number of the column is one of bfloat16, and there are enough to tell."""
    some = column[(column != 0) & column.isfinite()]
    return len(some) > ENOUGH and bool((some.bfloat16().double() == some).all())


def _limits(c: Columns, tied: Tensor, value: Tensor) -> bool:
    """Whether the number is the floor or the ceiling of its column, beyond which the other column goes on."""
    y, beyond = c.trained(c.y), c.x[tied] - value
    if value == y.min() and value != y.max():
        return bool((beyond < 0).double().mean() > 0.9)
    return bool(value == y.max() and value < 0 and (beyond > 0).double().mean() > 0.9)


def _runs_with(tied: Tensor, evidence: Tensor, least: int) -> Tensor:
    """The runs of neighbouring tied tokens of which at least so many, and a fifth of the run, are evidence."""
    starts = tied & ~torch.nn.functional.pad(tied, (1, 0))[:, :-1]
    number = starts.flatten().cumsum(0).view(tied.shape)
    runs = int(number.max()) + 1
    sizes = torch.bincount(number[tied], minlength=runs)
    hits = torch.bincount(number[evidence], minlength=runs)
    return tied & ((hits >= least) & (hits >= 0.2 * sizes))[number]


def find_floor(c: Columns) -> Undone | None:
    """One column has a floor (or a ceiling) at which values of the other one go on."""
    for name, held, other in (("sampler", c.y, c.x), ("old", c.x, c.y)):
        inside = c.trained(held)
        for lowest in (True, False):
            value = inside.min() if lowest else inside.max()
            tied = c.mask & (held == value)
            if int(tied.sum()) < FEW or (not lowest and float(value) > -1e-3):
                continue
            beyond = (value - other[tied]) * (1 if lowest else -1)
            rest = (c.x - c.y)[c.mask & ~tied].abs()
            noise = float(rest.quantile(0.95)) if 0 < len(rest) < 10_000_000 else 0.0
            # ties of a coarse grid lie within a grid step of the other column, on both sides
            far = int((beyond > max(0.1, 4 * noise)).sum())
            varied = len(other[tied].unique()) > FEW  # responses to one prompt begin with the same token
            one_way = float((beyond > -noise - 1e-6).double().mean()) > 0.95 and float(beyond.median()) > noise
            if varied and one_way and far >= FEW:
                limited = other.clamp(min=float(value)) if lowest else other.clamp(max=float(value))
                undone = Columns(limited, held, c.mask) if name == "sampler" else Columns(held, limited, c.mask)
                numbers = {"column": name, "value": float(value), "tokens": int(tied.sum()),
                           "side": "floor" if lowest else "ceiling"}  # fmt: skip
                return Undone("floor", undone, c.distance(), undone.distance(), numbers)
    return None
