# SPDX-License-Identifier: Apache-2.0
"""The smallest batch that still shows a finding, as Python that can be copied, with both gradients."""

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.factors import promised
from upref.verify.measure import Case

LONGEST = 160  # slots of a batch that is printed
PER_TOKEN = ("logp", "logp_old", "adv", "mask", "logp_ref", "entropy", "logp_sampler")


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
        for guess in (_cut(b, [i], [t]), _cut(b, [i], None)):
            if still(guess):
                assert guess
                b = guess
                break
    size = (len(b.mask) + 1) // 2
    while size and len(b.mask) > 1:
        rows = list(range(len(b.mask)))
        for start in range(0, len(rows), size):
            guess = _cut(b, rows[:start] + rows[start + size :], None)
            if still(guess):
                assert guess
                b = guess
                break
        else:
            size = size // 2 if size > 1 else 0
    t = 0
    while t < b.mask.shape[1] and b.mask.shape[1] > 1:
        guess = _cut(b, list(range(len(b.mask))), [u for u in range(b.mask.shape[1]) if u != t])
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


def _try(b: Rollouts, **change) -> Rollouts | None:
    try:
        return replace(b, **change)
    except InputError:
        return None


def _cut(b: Rollouts, rows: list[int], columns: list[int] | None) -> Rollouts | None:
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


def as_python(b: Rollouts, expected: Tensor | None = None, found: Tensor | None = None) -> str:
    """`b = upref.Rollouts(...)`, and the two gradients dJ/dlp as comments."""
    if b.mask.numel() > LONGEST:
        B, T = b.mask.shape
        return f"# no small batch shows it; the smallest found has {B} responses of up to {T} tokens, too many to print"
    lines = [f"    {n}=torch.tensor({_list(getattr(b, n))}, dtype=torch.float64)," for n in ("logp", "logp_old", "adv")]
    lines.append(f"    mask=torch.tensor({b.mask.tolist()}),")
    if b.group is not None:
        lines.append(f"    group=torch.tensor({b.group.tolist()}),")
    both = (("expected", expected), ("found   ", found))
    said = [f"# {what} dJ/dlp: {_list(g + 0.0, 6)}" for what, g in both if g is not None]
    return "\n".join(["b = upref.Rollouts(", *lines, ")", *said])


def _list(x: Tensor, digits: int = 17) -> str:
    def number(v: float) -> str:
        if not math.isfinite(v):
            return f'float("{v}")'
        return f"{v:.{digits}g}" if digits < 17 else repr(v)

    return "[" + ", ".join("[" + ", ".join(number(v) for v in row) + "]" for row in x.double().tolist()) + "]"


def example(case: Case, b: Rollouts, bad: Callable[[Rollouts], bool], at: tuple[int, int] | None = None) -> str:
    """The smallest batch on which `bad` holds, with the promised and the found gradient."""
    b = shrink(b, bad, at)
    try:
        return as_python(b, case.expected(b) * case.factors(b, promised(case.o)), case.gradient(b))
    except InputError:
        return as_python(b)


def wrong(case: Case) -> Callable[[Rollouts], bool]:
    """Whether some token of a batch has another weight than expected."""
    return lambda b: bool(case.off(b).max() > 10 * case.tol)


def worst(off: Tensor) -> tuple[int, int]:
    return divmod(int(off.argmax()), off.shape[1])
