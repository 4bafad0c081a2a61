# SPDX-License-Identifier: Apache-2.0
"""Synthetic batches: the regime grid (sign of A x ratio below, at and above every bound
x π_old x ragged masks), on policy, random, and with ratios far from 1. They are in one
file, so that what is covered can be read off in one place.

On policy (r = 1) nearly all objectives have the same gradient, so a test at r = 1
proves nothing. Everything that compares losses reads its batches from here, and those
of unusual inputs from stress.py.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache
from itertools import cycle, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.advantages import group_norm
from upref.errors import InputError
from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts
from upref.weights.black_box import (
    low_probability,
    relative_error,
    single_token_batch,
)
from upref.weights.curve import make_curve_of_objective
from upref.weights.jumps import GRID

MU = (0.02, 0.3, 0.9)  # π_old of a rare, a likely and a nearly certain token
# further π_old, where the bounds depend on it
MU_READ = (1e-4, 0.07, 0.6, 0.97, 0.995)
GRID_ADVANTAGES = (1.0, -1.0, 0.5, -2.0, 0.0)
# log r of the grid, whatever the bounds are: far from 1 on a line, near 1 at powers
LOG_R = np.unique(
    np.r_[
        np.linspace(-4, 4, 33), np.outer((-1, 1), np.geomspace(1e-5, 0.3, 12)).ravel()
    ]
)
FAR_RATIOS = GRID[abs(np.log(GRID)) < 8]  # where bounds are looked for
# distances of the grid's ratios from a bound, relative to r: just inside, on it, outside
BOUND_EDGES = (-1e-9, 0.0, 1e-9)
# the same where sums in another order, or finite differences, must not cross a bound
OFF_EDGES = (-1e-3, 1e-3)
# the same for a loss that computes in float32: less than any bound is wide, GSPO's of
# 3e-4 too
SINGLE_EDGES = (-3e-5, 3e-5)
# of the responses of `on_policy_batch`: (tokens, advantage, group)
ON_POLICY_RESPONSES = (
    (1, 1.0, 0),
    (5, -1.0, 0),
    (2, -0.5, 0),
    (7, 0.5, 1),
    (3, 2.0, 1),
    (4, -2.0, 2),
    (6, 1.5, 2),
    (2, -0.75, 2),
)
OVERFLOW = (20.0, 60.0, 80.0, 100.0, 800.0)  # |log r| at which exp leaves some dtype
# level -> |log r| from which on a clamp is only a guard, which training does not meet;
# for "sequence_mean" it is the mean over a response
GUARD = {"token": 20.0, "custom": 20.0, "sequence_product": 20.0, "sequence_mean": 10.0}
USUAL_MU = 0.02  # π_old of a token for which no bound on π_θ - π_old acts near r = 1
# |log r| on both sides of 10 and 20, where implementations clamp it
CLAMPS = (9.5, 10.5, 19.5, 20.5, 25.0)


@lru_cache(4096)
def breakpoints(objective: Objective, A: float, mu: float, **hp: Any) -> list[float]:
    """Return the ratios with mu r < 1 at which the weight of a token by itself jumps,
    ascending.

    Args:
        objective: any; [] for one without a weight of a token by itself.
        A: the advantage.
        mu: π_old.
        **hp: hyperparameters.

    Returns:
        Ratios with |log r| < 8. The list is kept for the next call: do not write to it.
    """
    if objective.batch_coupled:
        return []
    mus = MU + MU_READ if objective.reads_mu else (None,)
    grid = tuple((sign, grid_mu) for sign in GRID_ADVANTAGES if sign for grid_mu in mus)
    point = (A, mu if objective.reads_mu else None)
    found = _jumps(objective, grid if point in grid else (point,), **hp)
    return [r for r in found[point] if r * mu < 1]


@lru_cache(1024)
def _jumps(
    objective: Objective, points: tuple[tuple[float, float | None], ...], **hp: Any
) -> dict[tuple[float, float | None], list[float]]:
    """Return the ratios at which the weight of a token by itself jumps, ascending, at
    each of these (A, π_old); None for a π_old that has no effect. Where the objective
    reads the entropy, those of a token of high entropy are among them.
    """
    curves = [make_curve_of_objective(objective, **hp)]
    if "entropy" in objective.reads:
        curves += [replace(curves[0], weight=high_entropy_weight(objective, hp))]
    A, mu = zip(*points, strict=True)
    # all points in one call: that is faster
    jumps_of_curves = [
        curve.all_jumps(A, None if None in mu else mu, FAR_RATIOS) for curve in curves
    ]
    return {
        point: sorted({jump.r for jumps in jumps_of_point for jump in jumps})
        for point, *jumps_of_point in zip(points, *jumps_of_curves, strict=True)
    }


def high_entropy_weight(
    objective: Objective, hp: dict[str, Any]
) -> Callable[..., np.ndarray]:
    """Make the function of the weight of a token beside one of half its entropy: some
    objectives give a token of high entropy another weight.

    Args:
        objective: one that reads the entropy.
        hp: resolved hyperparameters.

    Returns:
        A function of (r, A, mu), numpy arrays.
    """

    def weight(r: Any, A: Any, mu: Any) -> np.ndarray:
        """Return the weight of the first of two tokens, which has the higher entropy."""
        points = np.broadcast_arrays(r, A, mu)
        # two tokens for each point, [n, 2]: the point itself, and one with r = 1
        r, A, mu = (
            torch.tensor(column.reshape(-1, 1)).expand(-1, 2).clone()
            for column in points
        )
        r[:, 1] = 1.0
        H = torch.tensor([2.0, 1.0], dtype=r.dtype).expand_as(r)
        w = objective.weight(r, A, mu, torch.ones_like(r, dtype=torch.bool), H, **hp)
        return w[:, 0].numpy().reshape(points[0].shape)

    return weight


def ratios(
    objective: Objective,
    A: float,
    mu: float,
    edges: tuple[float, ...] = BOUND_EDGES,
    **hp: Any,
) -> list[float]:
    """Return r at the given distances from every bound, and on a fixed grid of log r;
    all with mu r < 0.999.

    Args:
        objective: any.
        A: the advantage; at 0 there are no bounds.
        mu: π_old.
        edges: distances from a bound, relative to r.
        **hp: hyperparameters.

    Returns:
        Ratios, those beside bounds first.
    """
    bounds = breakpoints(objective, A, mu, **hp) if A else []
    # A bound that depends on mu is itself rounded: on which side of it a ratio on the
    # bound falls is chance, so there is none.
    beside_bounds = [
        bound * (1 + edge)
        for bound in bounds
        for edge in edges
        if edge or not objective.reads_mu
    ]
    return [r for r in [*beside_bounds, *np.exp(LOG_R)] if mu * r < 0.999]


def interval_words(
    low: float | None,
    high: float | None,
    digits: int = 4,
    ratio: str = "r",
    below: str = "<=",
) -> str:
    """Name an interval: `r > 1.28`, or with both ends `0.8 < r <= 1.28`, in as many
    digits as tell the two apart.

    Args:
        low, high: the bounds; None: there is none. At most one is None.
        digits: at least so many.
        ratio: its symbol.
        below: "<=", or "<" where the upper bound itself was not looked at.

    Returns:
        Words.
    """
    if low is None or high is None:
        if low is None:
            return f"{ratio} {below} {high:.{digits}g}"
        return f"{ratio} > {low:.{digits}g}"
    if low == high:
        return f"{ratio} = {low:.{digits}g} alone"
    while digits < 17 and f"{low:.{digits}g}" == f"{high:.{digits}g}":
        digits += 1
    return f"{low:.{digits}g} < {ratio} {below} {high:.{digits}g}"


def regime_words(A: float, r: float, bounds: list[float], ratio: str = "r") -> str:
    """Name the regime of a token: the sign of A, and the interval of r between two
    bounds: `A < 0, r > 1.28`.

    Args:
        A: the advantage.
        r: the ratio.
        bounds: those of the objective, ascending; []: `A < 0, any r`.
        ratio: the symbol of the ratio on which the objective acts.

    Returns:
        Words.
    """
    sign = "A = 0"
    if A:
        sign = "A > 0" if A > 0 else "A < 0"
    below = [bound for bound in bounds if bound < r]
    above = [bound for bound in bounds if bound >= r]
    if not bounds:
        return f"{sign}, any {ratio}"
    low = below[-1] if below else None
    high = above[0] if above else None
    return f"{sign}, {interval_words(low, high, ratio=ratio)}"


def batch(
    objective: Objective,
    *,
    seed: int = 0,
    edges: tuple[float, ...] = BOUND_EDGES,
    thin: int = 1,
    mus: tuple[float, ...] = MU,
    **hp: Any,
) -> Rollouts:
    """Make a float64 batch that visits every regime of the objective (sign of A,
    interval of r between two bounds, π_old), masked slots poisoned with NaN, groups
    interleaved.

    A token-level objective meets one regime per token. An objective that acts on whole
    responses meets one per response, reached by tokens whose ratios differ.

    Args:
        objective: whose bounds the grid is around.
        seed: of the order of the regimes.
        edges: distances from each bound, relative to r.
        thin: keep every so many-th regime.
        mus: probabilities under π_old.
        **hp: hyperparameters.

    Returns:
        A batch of the caller's own: it may be written to.
    """
    # a copy, because a loss may write to what it is given
    return deepcopy(
        kept_batch(objective, seed=seed, edges=edges, thin=thin, mus=mus, **hp)
    )


@lru_cache(128)  # of about 50 kB
def kept_batch(
    objective: Objective,
    *,
    seed: int = 0,
    edges: tuple[float, ...] = BOUND_EDGES,
    thin: int = 1,
    mus: tuple[float, ...] = MU,
    **hp: Any,
) -> Rollouts:
    """Return the batch of `batch`, made once in a process: do not write to its tensors."""
    # the bounds of a response's ratio do not depend on mu
    mus = mus[:1] if objective.level in REDUCE else mus
    cases = []
    for A, mu in product(GRID_ADVANTAGES, mus):
        for r in ratios(objective, A, mu, edges, **hp):
            cases.append((A, mu, r))
    if "entropy" in objective.reads:
        # three times, as `_rollouts` draws the entropies: that each case stands beside
        # tokens of lower entropy, and beside tokens of higher entropy
        cases *= 3
    if objective.batch_coupled:  # no two tokens tie where the batch is sorted
        cases = [(A, mu, r * (1 - 1e-5 * i)) for i, (A, mu, r) in enumerate(cases)]
        cases += _cases_near_clip(hp, np.random.default_rng(seed + 1))
    rng = np.random.default_rng(seed)
    cases = [cases[i] for i in rng.permutation(len(cases))][::thin]
    rows = _rows(cases, objective.level, objective.agg == "seq-mean", rng)
    if objective.level == "custom":
        rows += _responses_beside_bounds(objective, edges, **hp)
    if objective.sampler is None:
        return _rollouts(rows, rng)
    log_rhos = log_rhos_beside_bounds(objective, edges, **hp)
    first_of_sampler = len(rows)
    for A in (1.0, -1.0):
        for log_rho in log_rhos:
            # so low that log π_old - log ρ, the sampler's, is below 0 too
            log_mu = min(-1.2, *log_rho) - 0.01
            rows.append([(A, log_mu, -A * 1e-4)] * len(log_rho))
    batch = _rollouts(rows, rng)
    logp_sampler = sampler_logp(batch)
    for i, log_rho in enumerate(2 * log_rhos, first_of_sampler):
        tokens = slice(len(log_rho))
        numbers = torch.tensor(log_rho, dtype=torch.float64)
        logp_sampler[i, tokens] = batch.logp_old[i, tokens] - numbers
    return replace(batch, logp_sampler=logp_sampler)


NEAR_CLIP = 5e-4  # how near, relative, ratios are to a clip of a coupled batch


def _cases_near_clip(
    hp: dict[str, Any], rng: np.random.Generator
) -> list[tuple[float, float, float]]:
    """Return 48 cases (A, π_old, r) near each of 1 + eps_high (A = 1) and 1 - eps_low
    (A = -1) that the hyperparameters have. An objective whose tokens decide about each
    other has no weight of a token by itself, and so no bounds that are found.
    """
    clips = [
        (sign, 1 + sign * hp[name])
        for sign, name in ((1.0, "eps_high"), (-1.0, "eps_low"))
        if name in hp
    ]
    return [
        (A, MU[1], bound * (1 + NEAR_CLIP * distance))
        for A, bound in clips
        for distance in rng.uniform(-1, 1, 48).tolist()
    ]


# what the log ρ, or log r, of three tokens differs by from their mean
AROUND_MEAN = (0.3, -0.1, -0.2)
# the least distance of a response's product or mean from a bound, relative: a loss in
# float32 adds up rounded log-probabilities
LEAST_EDGE_OF_SUM = 1e-6


def _responses_beside_bounds(
    objective: Objective, edges: tuple[float, ...], **hp: Any
) -> "list[RowOfTokens]":
    """Return responses of three tokens on both sides of each mean log r at which one of
    their weights begins or ends to be 0.
    """
    distances = [edge for edge in edges if edge]
    return [
        [(A, LOG_OLD, mean + distance + difference) for difference in AROUND_MEAN]
        for A in (1.0, -1.0)
        for mean in _bounds_of_mean(objective, A, **hp)
        for distance in distances
    ]


LOG_OLD = -6.0  # log π_old of tokens whose ratios may be large
# mean log r of a response, and log ρ, at which bounds are searched
LOG_SCAN = np.sort(np.outer((-1, 1), np.geomspace(1e-6, 8, 160)).ravel())


@lru_cache(256)
def _bounds_of_mean(objective: Objective, A: float, **hp: Any) -> list[float]:
    """Return the mean log r, ascending and below 4, at which a weight of a response
    begins or ends to be 0. Its tokens differ from the mean by AROUND_MEAN.
    """
    if objective.batch_coupled:
        return []

    def kinds(means: np.ndarray) -> np.ndarray:
        """Return for each mean a number from 0 to 7: the sum of 1, 2 and 4 for those of
        the three weights that are 0.
        """
        log_r = torch.from_numpy(means[:, None] + np.array(AROUND_MEAN))
        old = torch.full_like(log_r, LOG_OLD)
        ones = torch.ones_like(log_r)
        responses = Rollouts.unchecked(
            logp=old + log_r,
            logp_old=old,
            logp_sampler=old,
            adv=A * ones,
            mask=ones.bool(),
            entropy=ones,
        )
        is_zero = objective.token_weights(responses, **hp) == 0
        return (is_zero * torch.tensor([1, 2, 4])).sum(1).numpy()

    return _changes(kinds, LOG_SCAN[LOG_SCAN < 4])


def _changes(
    kinds: Callable[[np.ndarray], np.ndarray], points: np.ndarray
) -> list[float]:
    """Return the places, ascending, at which a function of numbers gets another value.

    Args:
        kinds: the function, of many numbers at once.
        points: numbers, ascending, between which it is searched.
    """
    found = kinds(points)
    changes = np.flatnonzero(found[1:] != found[:-1])
    low, high = points[changes], points[changes + 1]
    for _ in range(50):
        middle = (low + high) / 2
        is_low = kinds(middle) == found[changes]
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    places: list[float] = high.tolist()
    return places


def log_rhos_beside_bounds(
    objective: Objective, edges: tuple[float, ...], **hp: Any
) -> list[tuple[float, ...]]:
    """Find responses on both sides of each bound of a sampler's correction: of one
    token; of two and three tokens of which the sum of log ρ, or the mean, is there.

    Args:
        objective: one with a correction.
        edges: distances from a bound.
        **hp: hyperparameters.

    Returns:
        log ρ of the tokens of each response.
    """
    distance = max(LEAST_EDGE_OF_SUM, min(abs(edge) for edge in edges if edge))
    responses: list[tuple[float, ...]] = []
    for bound in _bounds_of_correction(objective, **hp):
        for log_rho in (bound - distance, bound + distance):
            responses += [
                (log_rho,),
                (log_rho + 0.4, -0.4),
                tuple(log_rho / 3 + difference for difference in AROUND_MEAN),
                tuple(log_rho + difference for difference in AROUND_MEAN),
            ]
    return responses


@lru_cache(256)
def _bounds_of_correction(objective: Objective, **hp: Any) -> list[float]:
    """Return the log ρ, ascending, at which the correction of a response of one token
    begins or ends to be ρ, 0 or 1.
    """

    def kinds(log_rhos: np.ndarray) -> np.ndarray:
        """Return for each log ρ a number from 0 to 7: the sum of 1, 2 and 4 for those
        of 0, 1 and ρ that the factor is.
        """
        log_rho = torch.from_numpy(log_rhos)[:, None]
        lp_old = (log_rho - 0.01).clamp(max=-1.2)
        mask = torch.ones_like(log_rho, dtype=torch.bool)
        factors = objective.sampler_weights(lp_old, lp_old - log_rho, mask, **hp)
        assert factors is not None
        values = torch.cat([0 * log_rho, 0 * log_rho + 1, log_rho.exp()], 1)
        is_value = torch.isclose(factors, values, rtol=1e-12, atol=0)
        return (is_value * torch.tensor([1, 2, 4])).sum(1).numpy()

    return _changes(kinds, LOG_SCAN)


# (A, log π_old, log r) of each token of a response
RowOfTokens = list[tuple[float, float, float]]


def make_batch(
    cases: list[tuple[float, float, float]],
    level: str,
    one_adv: bool,
    rng: np.random.Generator,
) -> Rollouts:
    """Make a batch with one of these (A, mu, r) per token, or per response at a level
    of whole responses.

    Args:
        cases: (A, mu, r) each.
        level: of the objective.
        one_adv: one advantage for each response.
        rng: of the tokens' numbers.

    Returns:
        A batch in float64.
    """
    return _rollouts(_rows(cases, level, one_adv, rng), rng)


def _rows(
    cases: list[tuple[float, float, float]],
    level: str,
    one_adv: bool,
    rng: np.random.Generator,
) -> list[RowOfTokens]:
    """Return the rows of `make_batch`."""
    if level in REDUCE:
        return _responses(cases, level, rng)
    return _tokens(cases, one_adv, rng)


def _tokens(
    cases: list[Any], one_adv: bool, rng: np.random.Generator
) -> list[RowOfTokens]:
    """Return rows of 1 to 9 tokens, one token per case (A, π_old, r), in random order.
    With `one_adv` the tokens of a row have the same A.
    """
    if one_adv:
        cases = sorted(cases, key=lambda c: c[0])
    rows = []
    lengths = cycle((3, 1, 9, 5, 2, 7))
    while cases:
        n = next(lengths)
        row = cases[:n]
        cases = cases[n:]
        if one_adv:
            # sorted by A: what is cut off begins the next row
            same_A = [c for c in row if c[0] == row[0][0]]
            row, cases = same_A, row[len(same_A) :] + cases
        rows.append([(A, math.log(mu), math.log(r)) for A, mu, r in row])
    return [rows[i] for i in rng.permutation(len(rows))]


def _responses(
    cases: list[Any], level: str, rng: np.random.Generator
) -> list[RowOfTokens]:
    """Return one response of 1 to 5 tokens per case (A, π_old, r): its tokens' log r
    differ, and have the mean, or the sum, log r of the case. The case's π_old does not
    count.
    """
    rows = []
    for (A, _, r), n in zip(cases, cycle((3, 1, 5, 2)), strict=False):
        spread = rng.normal(size=n)
        mean = math.log(r) if level == "sequence_mean" else math.log(r) / n
        # log π_old is so low that log π_θ stays below 0
        rows.append(
            [
                (A, -6.0 - abs(deviation), mean + deviation)
                for deviation in spread - spread.mean()
            ]
        )
    return rows


def _rollouts(rows: list[RowOfTokens], rng: np.random.Generator) -> Rollouts:
    """Return the batch of rows of tokens (A, log π_old, log r), padded with NaN by one
    column at least; each prompt has three responses or so, at random rows.

    Raises:
        InputError: there are no rows.
    """
    if not rows:
        raise InputError("the regime grid is empty: choose a smaller thin.")
    T = max(map(len, rows)) + 1  # one column of padding at least

    def padded(place: int) -> Tensor:
        """Return the number at this place of each token, NaN in the padding, [B, T]."""
        return torch.tensor(
            [
                [token[place] for token in row] + [math.nan] * (T - len(row))
                for row in rows
            ],
            dtype=torch.float64,
        )

    adv = padded(0)
    logp_old = padded(1)
    log_r = padded(2)
    group = torch.as_tensor(
        rng.permutation(np.arange(len(rows)) % max(1, len(rows) // 3))
    )
    entropy = torch.as_tensor(_entropies(rng, adv.shape))
    return Rollouts(
        logp_old + log_r, logp_old, adv, ~adv.isnan(), group, entropy=entropy
    )


# ---- other batches -------------------------------------------------------------------
def on_policy_batch(width: int = 9) -> Rollouts:
    """Make a batch with π_θ = π_old, ragged lengths, three groups of unequal sizes, one
    advantage per response: always the same one.

    Args:
        width: columns; what does not fit of a response is left out.

    Returns:
        A batch in float64.
    """
    lengths, advantages, groups = zip(*ON_POLICY_RESPONSES, strict=True)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    lp = (
        -0.5
        - torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape).sin() ** 2
    )
    adv = torch.tensor(advantages, dtype=torch.float64)[:, None].expand_as(mask).clone()
    return Rollouts(lp, lp.clone(), adv, mask, torch.tensor(groups), entropy=1 + lp**2)


def _entropies(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw entropies in nats that are exact in float32, in which many losses compare
    them with a quantile.
    """
    return rng.uniform(0, 3, shape).astype(np.float32).astype(float)


def random_batch(
    rng: np.random.Generator,
    one_adv: bool = False,
    shape: tuple[int, int] | None = None,
) -> Rollouts:
    """Draw a batch: ragged masks with holes, ratios near 1 and far, groups of about two
    or none. A tenth of the responses has A = 0 throughout.

    Args:
        rng: draws everything.
        one_adv: one advantage for each response.
        shape: responses and columns; None: drawn too, 2 to 6 and 1 to 8.

    Returns:
        A batch in float64. Each response has a token; masked slots hold ordinary
        numbers.
    """
    B, T = shape or (int(rng.integers(2, 7)), int(rng.integers(1, 9)))
    mask = rng.random((B, T)) < rng.choice([0.3, 0.8, 1.0])
    mask[:, rng.integers(T)] = True
    old = -rng.exponential(rng.choice([0.2, 2.0, 8.0]), (B, T)) - 1e-3
    log_r = rng.normal(size=(B, T)) * rng.choice([1e-4, 0.02, 0.2, 1.0, 3.0])
    lp = np.minimum(old + log_r, -1e-6)
    A = rng.normal(size=(B, 1 if one_adv else T)) * (rng.random((B, 1)) < 0.9)
    group = (
        rng.permutation(np.arange(B) % max(1, B // 2)) if rng.random() < 0.7 else None
    )

    def tensor(array: np.ndarray) -> Tensor:
        """Return an array as a tensor [B, T]."""
        return torch.tensor(np.broadcast_to(array, (B, T)))

    return Rollouts(
        tensor(lp),
        tensor(old),
        tensor(A),
        tensor(mask),
        None if group is None else torch.tensor(group),
        entropy=tensor(_entropies(rng, (B, T))),
    )


@lru_cache(16)
def random_batches(seed: int, n: int, one_adv: bool) -> list[Rollouts]:
    """Return n random batches with filled padding, made once in a process: do not write
    to their tensors.

    Args:
        seed: of the numbers.
        n: how many batches.
        one_adv: one advantage for each response.

    Returns:
        n batches.
    """
    rng = np.random.default_rng(seed)
    return [fill_padding(random_batch(rng, one_adv)) for _ in range(n)]


def single_token_responses(A: float, rs: Sequence[float] | np.ndarray) -> Rollouts:
    """Return one response of one low-probability token for each ratio.

    Args:
        A: the advantage of all.
        rs: ratios, [n].

    Returns:
        A batch [n, 1].
    """
    r = np.asarray(rs, dtype=float)
    return single_token_batch(A, r, low_probability(r))


def overflowing_batch() -> Rollouts:
    """Return ratios far from 1, of both signs of log r, rare tokens whose ratio is near
    1, and tokens whose log π_θ is exactly 0, as float32 rounds it where π_θ is near 1.

    Each response has two equal tokens, so that the mean and the product of its ratios
    are not those of one token.
    """
    log_ratios = (*(sign * size for size in OVERFLOW for sign in (1, -1)), 0.1)
    # A, log r, and how far below 0 the larger of log π_θ and log π_old is
    cases = [
        (A, log_r, 0.5) for A in (1.0, -1.0, 0.0, 1e-4, -1e-4) for log_r in log_ratios
    ]
    cases += [
        (A, 0.0625, depth) for A in (1.0, -1.0) for depth in (50.0, 120.0, 1000.0)
    ]
    cases += [(1.0, 0.0625, 0.0), (-1.0, 0.0625, 0.0)]
    A, log_r, depth = (
        torch.tensor(numbers, dtype=torch.float64)[:, None].expand(-1, 2)
        for numbers in zip(*cases, strict=True)
    )
    lp = torch.where(log_r > 0, 0, log_r) - depth
    ones = torch.ones_like(A)
    return Rollouts(lp, lp - log_r, A.clone(), ones.bool(), logp_ref=lp, entropy=ones)


def clamped_batch() -> Rollouts:
    """Return responses whose log r is on both sides of where implementations clamp it,
    with both signs of A.

    Each pair of A and log r is a group of two equal responses of three tokens.
    """
    cases = [
        (A, sign * size)
        for A in (1.0, -1.0)
        for sign in (-1, 1)
        for size in CLAMPS
        for _response_of_group in range(2)
    ]
    adv, log_r = torch.tensor(cases, dtype=torch.float64).T[:, :, None].expand(2, -1, 3)
    old = torch.where(log_r > 0, -30.0, -1.0)
    return Rollouts(
        old + log_r,
        old,
        adv,
        torch.ones(adv.shape, dtype=torch.bool),
        torch.arange(len(cases)) // 2,
    )


def concatenate(batches: Sequence[Rollouts], multiple_of: int = 1) -> Rollouts:
    """Return several batches as one, with groups of their own.

    Args:
        batches: with groups; other fields than log-probabilities, advantages and masks
            are left out.
        multiple_of: the number of rows is a multiple of it: rows from the start occur
            twice where it would not be.

    Returns:
        Rollouts [B, T], as wide as the widest batch; added slots are masked.
    """
    T = max(batch.mask.shape[1] for batch in batches)

    def padded(name: str) -> Tensor:
        """Return this field of all batches, padded to the widest."""
        return torch.cat(
            [
                torch.nn.functional.pad(
                    getattr(batch, name), (0, T - batch.mask.shape[1])
                )
                for batch in batches
            ]
        )

    groups = []
    next_id = 0
    for batch in batches:
        assert batch.group is not None
        groups.append(batch.group + next_id)
        next_id = int(groups[-1].max()) + 1
    fields = [*map(padded, ("logp", "logp_old", "adv", "mask")), torch.cat(groups)]
    logp, old, adv, mask, group = (
        torch.cat([x, x[: -len(x) % multiple_of]]) for x in fields
    )
    return Rollouts(logp, old, adv, mask, group)


def fill_padding(batch: Rollouts) -> Rollouts:
    """Return the batch with plausible numbers in its masked slots, and with a reference
    policy if it has none. A masked slot has the advantage of the response's first
    token.

    Args:
        batch: any batch.

    Returns:
        One that every loss can read.
    """
    A = torch.where(batch.mask, batch.adv.expand_as(batch.mask), 0)
    first = A.gather(1, batch.mask.int().argmax(1, keepdim=True))
    entropy = batch.entropy
    if entropy is not None:
        entropy = entropy.masked_fill(~batch.mask, 1.0)
    filled = batch.but(
        logp=batch.logp.masked_fill(~batch.mask, -1.0),
        logp_old=batch.logp_old.masked_fill(~batch.mask, -1.1),
        adv=torch.where(batch.mask, A, first),
        entropy=entropy,
    )
    if filled.logp_ref is not None:
        return filled
    return filled.but(logp_ref=reference_logp(filled))


def reference_logp(batch: Rollouts) -> Tensor:
    """Return log π_ref of each token, 0.1 to 0.5 nats below log π_old.

    Args:
        batch: any batch.

    Returns:
        [B, T].
    """
    slots = torch.arange(batch.mask.numel(), dtype=batch.logp.dtype)
    wave = slots.reshape(batch.mask.shape).sin()
    return batch.logp_old - 0.3 - 0.2 * wave


def sampler_logp(batch: Rollouts) -> Tensor:
    """Return log μ of each token: rows in turn equal to log π_old but for rounding,
    near to it, and off by up to 2 nats.

    Args:
        batch: any batch.

    Returns:
        [B, T], -1.2 on masked slots.
    """
    B, T = batch.mask.shape
    spread = torch.tensor([1e-5, 0.1, 2.0], dtype=batch.logp.dtype)[
        torch.arange(B) % 3, None
    ]
    wave = (1.7 * torch.arange(B * T, dtype=batch.logp.dtype) + 0.3).sin().reshape(B, T)
    return torch.where(batch.mask, (batch.logp_old - spread * wave).clamp(max=0), -1.2)


# ---- reading and comparing -----------------------------------------------------------
def is_near_bound(
    weights: Callable[[Rollouts], Tensor], batch: Rollouts, step: float = 2e-5
) -> Tensor:
    """Find the tokens whose weight jumps within `step` of their log r.

    Args:
        weights: the weight of each token of a batch.
        batch: the batch.
        step: a distance in log r, in nats; the default is what rounding to float32
            moves it by.

    Returns:
        [B, T], True near a jump.
    """
    at_larger_r = weights(batch.but(logp_old=batch.logp_old - step))
    at_smaller_r = weights(batch.but(logp_old=batch.logp_old + step))
    return relative_error(at_smaller_r, at_larger_r, floor=1e-6) > 1e-3


def token_at(batch: Rollouts, i: int, t: int) -> tuple[float, float, float]:
    """Return (A, r, mu) of one token of a batch.

    Args:
        batch: the batch.
        i: the response.
        t: the token.

    Returns:
        Three numbers.
    """
    A = batch.adv[i, t if batch.adv.shape[1] > 1 else 0]
    return (
        A.item(),
        (batch.logp[i, t] - batch.logp_old[i, t]).exp().item(),
        batch.logp_old[i, t].exp().item(),
    )


@cache
def typical_batch() -> Rollouts:
    """Make a batch such as training meets, from a fixed seed.

    π_old is above 0.9 for half of the tokens and has a long tail; log r has a standard
    deviation of 0.15 (1 - π_old), log π_θ - log π_ref of 0.3 (1 - π_old). Each prompt
    has at least one right and one wrong response; A is group-normalized. A tenth of the
    responses has a tool's answer inside, which is masked. The batch is made once in a
    process: do not write to its tensors.

    Returns:
        Rollouts [128, 160] in float64: 16 prompts with 8 responses of 8 to 160 tokens.
    """
    generator = torch.Generator().manual_seed(25)
    G = 16
    n = 8
    T = 160

    def normal(*shape: int) -> Tensor:
        """Return standard normal numbers of this batch's own generator."""
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rand(*shape: int) -> Tensor:
        """Return uniform numbers of the same generator."""
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    length = (60 * (0.7 * normal(G * n)).exp()).clamp(8, T).long()
    slot = torch.arange(T)
    mask = slot < length[:, None]
    tool = (
        (rand(G * n) < 0.1)[:, None]
        & (slot >= length[:, None] // 3)
        & (slot < length[:, None] // 2)
    )
    # minus an exponential number of mean 4, times the fourth power of a uniform one
    lp_old = -(4 * rand(G * n, T).clamp(min=1e-12).log().neg()) * rand(G * n, T) ** 4
    uncertainty = 1 - lp_old.exp()
    lp = (lp_old + 0.15 * uncertainty * normal(G * n, T)).clamp(max=-1e-9)
    ref = (lp + 0.3 * uncertainty * normal(G * n, T)).clamp(max=-1e-9)
    # each prompt has a pass rate of 0.1 to 0.9
    right = rand(G, n) < (0.1 + 0.8 * rand(G))[:, None]
    right[:, 0] = True
    right[:, 1] = False
    group = torch.arange(G).repeat_interleave(n)
    adv = group_norm(right.double().flatten(), group)[:, None].expand(-1, T)
    return Rollouts(lp, lp_old, adv, mask & ~tool, group, logp_ref=ref)
