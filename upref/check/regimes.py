# SPDX-License-Identifier: Apache-2.0
"""The regime grid: sign of A x ratio below, at and above every bound x π_old x ragged masks.

On policy (r = 1) nearly all objectives have the same gradient, so a test at r = 1 proves nothing. Everything that
compares losses reads its batches from here.
"""

import math
from dataclasses import replace
from functools import lru_cache
from itertools import cycle, product

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts

MU = (0.02, 0.3, 0.9)  # π_old of a rare, a likely and a nearly certain token
SIGNS = (1.0, -1.0, 0.5, -2.0, 0.0)
LOG_R = np.unique(np.r_[np.linspace(-4, 4, 33), np.outer((-1, 1), np.geomspace(1e-5, 0.3, 12)).ravel()])
EDGES = (
    -1e-9,
    0.0,
    1e-9,
)  # just inside, on and just outside a bound, relative to r; OFF_EDGES for whoever steps or re-sums
OFF_EDGES = (-1e-3, 1e-3)


@lru_cache(4096)
def kinks(objective: Objective, A: float, mu: float, **hp) -> list[float]:
    """The ratios at which the closed-form weight jumps, found by scanning and bisecting it; ascending."""
    grid = np.linspace(-8, 8, 4001 if objective.reads_mu else 40001)  # bounds that depend on mu are bisected: slow

    def w(log_r):
        r, mu_ = np.exp(log_r), np.full_like(log_r, mu)
        if objective.level == "free":  # one response of one token each
            one = torch.ones(len(r), 1, dtype=torch.bool)
            t = lambda x: torch.as_tensor(x)[:, None]
            return objective.weight(t(r), t(np.full_like(r, A)), t(mu_), one, t(np.ones_like(r)), **hp)[:, 0].numpy()
        return np.broadcast_to(objective.weight(r, np.full_like(r, A), mu_, **hp), r.shape)

    if objective.coupled:
        return []
    with np.errstate(all="ignore"):
        v = w(grid)
        # alive on one side and dead on the other, or a jump far above what a smooth weight does in one step
        jump = ((v[1:] == 0) != (v[:-1] == 0)) | (np.abs(np.diff(v)) > 0.2 * np.abs(v[1:]) + 1e-300)
        lo, hi = grid[:-1][jump], grid[1:][jump]
        below = np.sign(v[:-1][jump])
        for _ in range(48):  # 4e-3 / 2^48 is below an ulp of log r
            mid = (lo + hi) / 2
            left = np.sign(w(mid)) == below
            lo, hi = np.where(left, mid, lo), np.where(left, hi, mid)
    return [float(x) for x in np.exp(hi) if x * mu < 1]


def ratios(objective: Objective, A: float, mu: float, edges: tuple[float, ...] = EDGES, **hp) -> list[float]:
    """r at the given distances from every bound, and on a fixed grid of log r; all with mu r < 1."""
    bounds = kinks(objective, A, mu, **hp) if A else []
    # with a bound that depends on mu, on which side of it "at" falls is a matter of rounding
    near = [k * (1 + e) for k in bounds for e in edges if e or not objective.reads_mu]
    return [r for r in [*near, *np.exp(LOG_R)] if mu * r < 0.999]


def interval(low: float | None, high: float | None, digits: int = 4) -> str:
    """`r > 1.28`, or with both ends `0.8 < r <= 1.28`, in as many digits as tell the two apart."""
    if low is None or high is None:
        return f"r <= {high:.{digits}g}" if low is None else f"r > {low:.{digits}g}"
    while digits < 17 and f"{low:.{digits}g}" == f"{high:.{digits}g}":
        digits += 1
    return f"{low:.{digits}g} < r <= {high:.{digits}g}"


def words(A: float, r: float, bounds: list[float]) -> str:
    """The regime of a token in words: `A < 0, r > 1.28`."""
    sign = "A > 0" if A > 0 else "A < 0" if A < 0 else "A = 0"
    below, above = [k for k in bounds if k < r], [k for k in bounds if k >= r]
    if not bounds:
        return f"{sign}, any r"
    return f"{sign}, {interval(below[-1] if below else None, above[0] if above else None)}"


def batch(objective: Objective, *, seed: int = 0, edges: tuple[float, ...] = EDGES, thin: int = 1, **hp) -> Rollouts:
    """A float64 batch that visits every regime of the objective, masked slots poisoned with NaN, groups interleaved.

    A token-level objective meets one regime per token; one that acts on a response meets one per response, reached by
    tokens whose ratios differ. thin=k keeps every k-th regime.
    """
    # the bounds of a response's ratio do not depend on mu
    mus = MU[:1] if objective.level in REDUCE else MU
    cases = [(A, mu, r) for A, mu in product(SIGNS, mus) for r in ratios(objective, A, mu, edges, **hp)]
    rng = np.random.default_rng(seed)
    cases = [cases[i] for i in rng.permutation(len(cases))][::thin]
    return lay(cases, objective.level, objective.agg == "seq-mean", rng)


def lay(cases: list[tuple[float, float, float]], level: str, one_adv: bool, rng: np.random.Generator) -> Rollouts:
    """A batch of these (A, mu, r): one a token, or one a response at a level of responses."""
    return _rollouts(_responses(cases, level, rng) if level in REDUCE else _tokens(cases, one_adv, rng), rng)


def _tokens(cases, one_adv, rng):
    """Rows of 1 to 9 tokens; the tokens of one row share A where one advantage per response is wanted."""
    if one_adv:
        cases = sorted(cases, key=lambda c: c[0])
    rows, lengths = [], cycle((3, 1, 9, 5, 2, 7))
    while cases:
        n = next(lengths)
        row, cases = cases[:n], cases[n:]
        if one_adv:
            same = [c for c in row if c[0] == row[0][0]]  # sorted by A: what is cut off begins the next row
            row, cases = same, row[len(same) :] + cases
        rows.append([(A, math.log(mu), math.log(r)) for A, mu, r in row])
    return [rows[i] for i in rng.permutation(len(rows))]


def _responses(cases, level, rng):
    """One response per case: token log-ratios that differ and have the wanted mean (or sum)."""
    rows = []
    for (A, _, r), n in zip(cases, cycle((3, 1, 5, 2)), strict=False):
        spread = rng.normal(size=n)
        target = math.log(r) if level == "sequence" else math.log(r) / n
        rows.append([(A, -6.0 - abs(x), target + x) for x in spread - spread.mean()])
    return rows


def _rollouts(rows, rng) -> Rollouts:
    if not rows:
        raise InputError("the regime grid is empty: choose a smaller thin.")
    T = max(map(len, rows)) + 1  # one column of padding at least
    full = lambda i: torch.tensor(
        [[c[i] for c in row] + [math.nan] * (T - len(row)) for row in rows], dtype=torch.float64
    )
    adv, logp_old, log_r = full(0), full(1), full(2)
    group = torch.as_tensor(rng.permutation(np.arange(len(rows)) % max(1, len(rows) // 3)))
    entropy = torch.as_tensor(rng.uniform(0, 3, size=adv.shape))
    return Rollouts(logp_old + log_r, logp_old, adv, ~adv.isnan(), group, entropy=entropy)


def at(b: Rollouts, i: int, t: int) -> tuple[float, float, float]:
    """(A, r, mu) of one token of a batch."""
    A = b.adv[i, t if b.adv.shape[1] > 1 else 0]
    return A.item(), (b.logp[i, t] - b.logp_old[i, t]).exp().item(), b.logp_old[i, t].exp().item()


def grad(f, b: Rollouts) -> Tensor:
    """d f(batch) / d logp by autograd, [B, T]; f maps Rollouts to a scalar."""
    x = b.logp.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(f(replace(b, logp=x)), x)
    return g
