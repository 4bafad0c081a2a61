# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators in exact rationals: one floating-point division (and square root) at the very end.

A second witness beside upref.advantages, from the equations in its docstrings; with the batches to compare on.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

Rows = Sequence[Fraction]
Batch = tuple[list[Fraction], list[int]]
NORMED = ("group_norm", "whiten", "group_mean_whiten")  # divided by a standard deviation
UNGROUPED = ("whiten", "signed", "reward")
DENOMINATORS: dict[str, Callable[[Fraction, float], float]] = {
    "std + eps": lambda var, eps: math.sqrt(var) + eps,
    "√(var + eps)": lambda var, eps: math.sqrt(var + Fraction(eps)),
    "max(std, eps)": lambda var, eps: max(math.sqrt(var), eps),
}


def mean(xs: Rows) -> Fraction:
    return sum(xs, Fraction(0)) / len(xs)


def variance(xs: Rows, ddof: int) -> Fraction:
    m = mean(xs)
    return sum(((x - m) ** 2 for x in xs), Fraction(0)) / max(len(xs) - ddof, 1)


def by(key: Sequence, R: Rows, f: Callable) -> list[Fraction]:
    """f of the rewards of each key, put back in place."""
    out = [Fraction(0)] * len(R)
    for k in dict.fromkeys(key):
        rows = [i for i, h in enumerate(key) if h == k]
        for i, x in zip(rows, f([R[i] for i in rows]), strict=True):
            out[i] = x
    return out


CENTRES: dict[str, Callable[[Rows], Rows]] = {
    "the mean": lambda xs: [x - mean(xs) for x in xs],
    "the mean of the others": lambda xs: [
        x - mean([*xs[:i], *xs[i + 1 :]]) if len(xs) > 1 else Fraction(0) for i, x in enumerate(xs)
    ],
    "the median": lambda xs: [x - (sorted(xs)[(len(xs) - 1) // 2] + sorted(xs)[len(xs) // 2]) / 2 for x in xs],
    "the smallest reward": lambda xs: [x - min(xs) for x in xs],
    "the largest reward": lambda xs: [x - max(xs) for x in xs],
    "the sum": lambda xs: [x - sum(xs) for x in xs],
    "the sum over G - 1, the response itself included": lambda xs: [
        x - sum(xs, Fraction(0)) / max(len(xs) - 1, 1) for x in xs
    ],
    "the first reward": lambda xs: [x - xs[0] for x in xs],
}


def exact(name: str, R: Rows, group: Sequence, ddof: int = 1, eps: float = 0.0, form: str = "std + eps") -> list[float]:
    """The advantages called `name` of upref.advantages, each rounded once or twice."""
    match name:
        case "group_mean":
            return [float(x) for x in by(group, R, CENTRES["the mean"])]
        case "leave_one_out":
            return [float(x) for x in by(group, R, CENTRES["the mean of the others"])]
        case "reward":
            return [float(x) for x in R]
        case "signed":
            return [1.0 if x > 0 else -1.0 for x in R]
    c, var = parts(name, R, group, ddof)
    return [float(x) / DENOMINATORS[form](v, eps) if x else 0.0 for x, v in zip(c, var, strict=True)]


def parts(name: str, R: Rows, group: Sequence, ddof: int) -> tuple[list[Fraction], list[Fraction]]:
    """Numerator and variance of each response, of an estimator of NORMED."""
    batch = [0] * len(R)
    c = by(batch if name == "whiten" else group, R, CENTRES["the mean"])
    among = group if name == "group_norm" else batch
    return c, by(among, c, lambda xs: [variance(xs, ddof)] * len(xs))


def fit_denominator(c: Rows, var: Rows, found: Sequence[float], tol: float) -> tuple[str, float, float] | None:
    """(form, eps, spread) with which c / denominator is what was found."""
    use = [(x, v, a) for x, v, a in zip(c, var, found, strict=True) if x and v]
    if not use or any(not a or not math.isfinite(a) for *_, a in use):
        return None
    d = [(float(x) / a, v) for x, v, a in use]
    fits = []
    for form, rest in (
        ("std + eps", [y - math.sqrt(v) for y, v in d]),
        ("√(var + eps)", [math.copysign(y * y, y) - float(v) for y, v in d]),
    ):
        eps, spread = sum(rest) / len(rest), max(rest) - min(rest)
        if eps > -tol and spread <= 10 * tol * max(y for y, _ in d) and min(y for y, _ in d) > 0:
            fits.append((form, 0.0 if abs(eps) <= 4 * spread + 1e-13 else eps, spread))
    return min(fits, key=lambda f: f[2]) if fits else None


def near(x: Sequence[float], y: Sequence[float], tol: float) -> bool:
    return len(x) == len(y) and all(
        a == b or abs(a - b) <= tol * max(1.0, abs(a)) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(x, y, strict=True)
    )


def rows(rewards: str, group: str) -> Batch:
    return [Fraction(x) for x in rewards.split()], [int(g) for g in group.split()]


EVEN = rows("1 0 0 1  1 0 0 0  1/4 1/2 -1 2", "0 0 0 0  1 1 1 1  2 2 2 2")
UNEVEN = rows("1 0  1 1/2 0 -1 3/4  1 0 0  2 1/4", "0 0  1 1 1 1 1  2 2 2  3 3")
INTERLEAVED = rows("1 1/2 0 0 -1 1 1/4 2 0 1 3/4 0", "0 1 2 2 1 0 1 0 2 2 0 1")
