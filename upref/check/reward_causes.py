# SPDX-License-Identifier: Apache-2.0
"""What a wrong advantage function is likely to be: changes to the right numbers, and other formulas, all exact."""

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from upref import advantages
from upref.check.rationals import (
    CENTRES,
    EVEN,
    NORMED,
    UNEVEN,
    Batch,
    Rows,
    by,
    exact,
    fit_denominator,
    mean,
    near,
    variance,
)
from upref.errors import InputError


def cause(case: Any, b: Batch) -> str:
    """The first formula that gives what was found, on every batch that fails or else on this one; in words."""
    failing = [x for x in (case.batch(EVEN), case.batch(UNEVEN)) if _fails(case, x)]
    return _explained(case, [b, *failing]) or _explained(case, [b])


def _fails(case, b: Batch) -> bool:
    try:
        return case.differs(b) is not None
    except InputError:
        return False


def _explained(case, batches: list[Batch]) -> str:
    found, tol = [case.f(*b) for b in batches], case.f.tol
    if any(not math.isfinite(a) for A in found for a in A):
        return "0/0: the std of a group of one, or of equal rewards, is 0 or NaN"
    for words, f in _changes(case):
        if all(near(f(b), A, tol) for b, A in zip(batches, found, strict=True)):
            return words
    likely = ""
    for options in zip(*(_formulas(*b, case.f.lengths(*b)) for b in batches), strict=True):
        fits = [_eps(c, var, A, tol) for (_, c, var), A in zip(options, found, strict=True)]
        if all(eps is not None and eps <= 1.0 for eps in fits):
            if all(eps is not None and eps <= 1e-3 for eps in fits):
                return options[0][0]
            likely = likely or f"{options[0][0]}, eps = {fits[0]:.3g}"
    return likely


def _eps(c: Rows, var: Rows | None, A: Sequence[float], tol: float) -> float | None:
    """The eps with which c / std is A; 0 where nothing is divided; None where none fits."""
    if var is None:
        return 0.0 if near([float(x) for x in c], A, tol) else None
    if any(bool(x) != bool(abs(a) > tol) for x, v, a in zip(c, var, A, strict=True) if v):
        return None
    got = fit_denominator(c, var, A, tol)
    return got[1] if got else None


def _changes(case) -> Iterator[tuple[str, Callable[[Batch], list[float]]]]:
    """Changes to the right numbers."""
    right = case.expected
    if case.name == "leave_one_out":
        yield "the mean includes the response itself: G/(G-1) is missing", lambda b: exact("group_mean", *b)
    yield "the sign is flipped: bad answers are reinforced", lambda b: [-x for x in right(b)]
    yield "its absolute value: bad answers are reinforced", lambda b: [abs(x) for x in right(b)]
    yield "negative advantages are dropped", lambda b: [max(x, 0.0) for x in right(b)]
    yield "positive advantages are dropped", lambda b: [min(x, 0.0) for x in right(b)]
    one = case.batch(EVEN)
    got = list(zip(right(one), case.f(*one), strict=True))
    k = next((y / x for x, y in got if abs(x) > 1e-9), 1.0)
    yield f"every advantage is {k:.5g} times what it should be", lambda b: [k * x for x in right(b)]
    top = max(abs(y) for _, y in got)
    yield f"advantages are clipped to ±{top:.4g}", lambda b: [max(-top, min(top, x)) for x in right(b)]
    for ddof in (0, 1):
        again = lambda b, d=ddof: exact("whiten", [Fraction(x) for x in right(b)], b[1], d)
        yield "normalised twice: by prompt, then over the batch", again
    for ddof in (0, 1) if case.name in NORMED else ():
        said = "G (population)" if not ddof else "G - 1 (Bessel)"
        yield f"the std divides by {said}", lambda b, d=ddof: exact(case.name, b[0], b[1], d, case.eps, case.form)  # type: ignore[misc]
    for name in advantages.ADVANTAGES:
        if name not in (case.name, "signed"):
            said = " (over the batch, whatever the prompt)" if name == "whiten" else ""
            for ddof in (1, 0) if name in NORMED else (1,):
                yield f"it is {name}{said}", lambda b, n=name, d=ddof: exact(n, b[0], b[1], d)  # type: ignore[misc]


def _formulas(R: Rows, group: Sequence, lengths: Sequence[int]) -> Iterator[tuple[str, Rows, Rows | None]]:
    """(words, numerators, variances or None where nothing is divided), in the order in which they are tried."""
    n = len(R)
    keys = {"of its prompt": list(group), "of the whole batch": [0] * n}
    blocks = [g for g in sorted(set(group)) for _ in range(list(group).count(g))]
    keys["of as many rows in a row as its prompt has (groups taken to be contiguous)"] = blocks
    keys |= {f"of {k} consecutive rows (a fixed stride)": [i // k for i in range(n)] for k in (2, 3, 4, 5, 8)}
    tokens = [i for i, length in enumerate(lengths) for _ in range(length)]
    divided = {
        f"divided by the std {where} (over {'G' if not ddof else 'G - 1'})": (key, ddof)
        for where, key in keys.items()
        for ddof in (1, 0)
    }
    yield "the reward itself: nothing is subtracted and nothing divided", R, None
    for (where, key), (centre, f) in ((k, c) for c in CENTRES.items() for k in keys.items()):
        c = by(key, R, f)
        said = f"{centre} {where} is subtracted"
        yield f"{said}, nothing divided", c, None
        for words, (other, ddof) in divided.items():
            for x in ("reward", "difference"):
                var = by(other, R if x == "reward" else c, lambda xs, d=ddof: [variance(xs, d)] * len(xs))
                yield f"{said}, {words}", c, var
        for ddof in (1, 0):
            var = by(key, R, lambda xs, d=ddof: [variance(xs, d)] * len(xs))
            yield f"{said}, divided by the variance {where}, not by its root", c, [v * v for v in var]
        yield (
            f"{said}, divided by the range {where}",
            c,
            by(key, R, lambda xs: [(max(xs) - min(xs)) ** 2] * len(xs)),
        )
        spread = by(key, c, lambda xs: [mean([abs(x) for x in xs]) ** 2] * len(xs))
        yield f"{said}, divided by the mean absolute difference {where}", c, spread
    for where, key in keys.items():
        for ddof in (1, 0):
            var = by(key, R, lambda xs, d=ddof: [variance(xs, d)] * len(xs))
            yield f"nothing is subtracted, divided by the std {where}", R, var
    c = by(group, R, CENTRES["the mean"])
    over = [c[i] for i in tokens]
    for ddof in (0, 1):
        m = mean(over)
        yield (
            "whitened over tokens, where a long response counts more",
            [x - m for x in c],
            [variance(over, ddof)] * n,
        )
