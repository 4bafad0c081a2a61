# SPDX-License-Identifier: Apache-2.0
"""The smallest batch that still shows a finding, as Python that can be copied, with both gradients."""

import math
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.factors import declared_aggregation
from upref.verify.measure import FLOATS, Case

LONGEST = 160  # slots of a batch that is printed
DIGITS = (6, 9, 12)  # of a printed gradient: as few as show a difference
PER_TOKEN = (*FLOATS, "mask")
READ = ("logp_ref", "entropy", "logp_sampler")  # printed where the loss reads them


def shrink(b: Rollouts, bad: Callable[[Rollouts], bool], at: tuple[int, int] | None = None) -> Rollouts:
    """b with rows, then tokens, dropped greedily and numbers rounded, while `bad` holds. at: a token that shows it."""

    def still(x: Rollouts | None) -> bool:
        try:
            return x is not None and bad(x)
        except InputError:
            return False

    b = replace(b, totals=None) if b.totals is not None and still(_try(b, totals=None)) else b
    if b.group is not None and still(_try(b, group=None)):
        b = replace(b, group=None)
    if at is not None:
        i, t = at
        for guess in (cut(b, [i], [t]), cut(b, [i], None)):
            if still(guess):
                assert guess
                b = guess
                break
    size = (len(b.mask) + 1) // 2
    while size and len(b.mask) > 1:
        rows = list(range(len(b.mask)))
        for start in range(0, len(rows), size):
            guess = cut(b, rows[:start] + rows[start + size :], None)
            if still(guess):
                assert guess
                b = guess
                break
        else:
            size = size // 2 if size > 1 else 0
    if b.mask.numel() > LONGEST:
        b = next((guess for guess in _few(b) if guess and still(guess)), b)
    t = 0
    while t < b.mask.shape[1] and b.mask.shape[1] > 1:
        guess = cut(b, list(range(len(b.mask))), [u for u in range(b.mask.shape[1]) if u != t])
        if still(guess):
            assert guess
            b = guess
        else:
            t += 1
    for digits in (1, 2, 3, 4, 6):
        if still(guess := _rounded(b, digits)):
            assert guess
            return guess
    return b


def _few(b: Rollouts) -> Iterator[Rollouts | None]:
    """The rows of a few groups, or a few rows: where no single one can be left out, many can be at once."""
    rng, ids = random.Random(0), list(range(len(b.mask))) if b.group is None else b.group.tolist()
    for n in (2, 3, 4, 6):
        for _ in range(40):
            some = rng.sample(sorted(set(ids)), min(n, len(set(ids))))
            yield cut(b, [i for i, g in enumerate(ids) if g in some], None)


def _try(b: Rollouts, **change) -> Rollouts | None:
    try:
        return replace(b, **change)
    except InputError:
        return None


def cut(b: Rollouts, rows: list[int], columns: list[int] | None) -> Rollouts | None:
    """These rows and columns; None where they are no batch."""
    if not rows or columns == []:
        return None
    change = {}
    for name in PER_TOKEN:
        x = getattr(b, name)
        if x is not None:
            change[name] = x[rows] if columns is None or x.shape[1] == 1 else x[rows][:, columns]
    group = None if b.group is None else b.group[rows]
    return _try(b, **change, group=group, totals=None)


def _rounded(b: Rollouts, digits: int) -> Rollouts | None:
    names = [n for n in PER_TOKEN if n != "mask" and getattr(b, n) is not None]
    return _try(b, **{n: (getattr(b, n) * 10**digits).round() / 10**digits for n in names})


def as_python(
    b: Rollouts, expected: Tensor | None = None, found: Tensor | None = None, reads: Collection[str] = ()
) -> str:
    """`b = upref.Rollouts(...)`, and the two gradients dJ/dlp as comments. reads: what the loss reads of it.

    Returns "" if the two gradients are equal in all digits that can be printed: such a batch shows no difference.
    """
    if expected is not None and found is not None and _digits(expected, found) is None:
        return ""
    if b.mask.numel() > LONGEST:
        B, T = b.mask.shape
        return f"# no small batch shows it; the smallest found has {B} responses of up to {T} tokens, too many to print"
    names = ["logp", "logp_old", "adv", *(n for n in READ if n in reads and getattr(b, n) is not None)]
    lines = [f"    {n}=torch.tensor({_list(getattr(b, n))}, dtype={b.logp.dtype})," for n in names]
    lines.append(f"    mask=torch.tensor({b.mask.tolist()}),")
    if b.group is not None:
        lines.append(f"    group=torch.tensor({b.group.tolist()}),")
    both = (("expected", expected), ("found   ", found))
    digits = DIGITS[0] if expected is None or found is None else _digits(expected, found) or DIGITS[-1]
    said = [f"# {what} dJ/dlp: {_list(g + 0.0, digits)}" for what, g in both if g is not None]
    return "\n".join(["b = upref.Rollouts(", *lines, ")", *said])


def _digits(x: Tensor, y: Tensor) -> int | None:
    """The digits in which two gradients differ when they are printed, or None if they are equal in all of them."""
    return next((n for n in DIGITS if _list(x + 0.0, n) != _list(y + 0.0, n)), None)


def _list(x: Tensor, digits: int = 17) -> str:
    def number(v: float) -> str:
        if not math.isfinite(v):
            return f'float("{v}")'
        return f"{v:.{digits}g}" if digits < 17 else repr(v)

    return "[" + ", ".join("[" + ", ".join(number(v) for v in row) + "]" for row in x.double().tolist()) + "]"


def example(case: Case, b: Rollouts, dtype: torch.dtype | None = None) -> str:
    """The batch as Python, with the promised and the found gradient; "" if these are equal. dtype: that of the numbers
    which the loss gets."""
    low = b if dtype is None else b.but(**{k: v.to(dtype) for k in FLOATS if (v := getattr(b, k)) is not None})
    try:
        right = case.expected(b) * case.factors(b, declared_aggregation(case.o))
        return as_python(low, right, case.gradient(low), case.loss.reads)
    except InputError:
        return as_python(low, reads=case.loss.reads)


def differ(case: Case, b: Rollouts) -> Tensor:
    """The tokens of a batch whose printed dJ/dlp, the objective's and the loss's, are not the same number."""
    right, found = case.expected(b) * case.factors(b, declared_aggregation(case.o)), case.gradient(b)
    same = torch.isclose(found, right, rtol=10.0 ** (1 - DIGITS[-1]), atol=0, equal_nan=True)
    return b.mask & ~same


def smallest(case: Case, b: Rollouts, at: tuple[int, int]) -> tuple[Rollouts, int, int]:
    """The smallest batch in which a weight is wrong, and its worst token: a finding's numbers are of this batch."""
    small = shrink(b, wrong(case), at)
    return small, *worst(case.off(small))


def numbers(case: Case, b: Rollouts, i: int, t: int) -> tuple[float, float]:
    """The expected weight of a token of a batch, and the found one."""
    return case.expected(b)[i, t].item(), case.weights(b)[i, t].item()


def wrong(case: Case) -> Callable[[Rollouts], bool]:
    """Whether some token of a batch has another weight than expected."""
    return lambda b: bool(case.off(b).max() > 10 * case.tol)


def worst(off: Tensor) -> tuple[int, int]:
    return divmod(int(off.argmax()), off.shape[1])
