# SPDX-License-Identifier: Apache-2.0
"""Where the ratios of a step's rows stand, so that each number of the objective has an
effect on them.

The old log-probabilities of rows that upref makes are its own choice. For each number
of the objective, and for each sign of A, the ratios are found between the bound that
the number makes and the bound that a slightly smaller, or a slightly larger, number
makes. Some tokens, or responses, get such a ratio: a loop with a bound a little off
then has another gradient. Other tokens are far from 1, beyond the bounds that loops
have and objectives have not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts

SPREAD = (0.03, 0.7)  # |log r| of a token that no bound asks for
# in half precision: inside the usual clip bounds and outside, far from both
COARSE = (0.03, 0.12), (0.4, 0.7)
# log r of tokens beyond bounds that no number of the objective makes
FAR = (1.25, -1.25, 2.6, -2.6)
MOST = 2.8  # |log r| at most: a larger ratio outweighs all other tokens
# coarse -> multiples of a number between whose bounds ratios are put
NEAR = {True: (2.0,), False: (1.1, 1.4, 2.0)}
# the same of a bound on the mean of a response, which rounding moves by some 1e-5
NEAR_MEAN = (1.44,)
# coarse -> how far from the bound, in log r, such a ratio is at most
BESIDE = {True: 0.15, False: 0.03}
# |log r| of the grid; 4e-3 of tokens
SMALLEST = {"sequence_mean": 2e-5, "sequence_product": 1e-3}
STEP = 0.03  # of the grid, relative
EFFECT = 0.02  # of A: a weight that changes by less does not show where a bound is
KEPT_FREE = 0.3  # of a sign's tokens have a ratio that no bound asks for
LIMIT = -1e-3  # of an old log-probability
DRAWS = 12  # designs that are tried for an objective whose tokens are coupled
# of log r over a response, or its sum, of the responses that no bound asks for: where A
# > 0, and A < 0
MEANS = {
    "sequence_mean": ((-0.3, 0.05, -0.05, 1e-4), (0.3, -0.05, 0.05, -1e-4)),
    "sequence_product": ((-1.2, 0.5, 0.08, -0.05), (1.2, -0.4, -0.1, 0.4)),
}


@dataclass(frozen=True)
class WeightInputs:
    """What weights depend on beside the ratios. All [B, T] over the response tokens,
    padded.
    """

    lp: Tensor
    adv: Tensor
    mask: Tensor
    entropy: Tensor | None = None

    def rollouts(self, log_r: Tensor) -> Rollouts:
        """With these ratios, by a sampler that is the old policy.

        Args:
            log_r: [B, T].
        """
        old = (self.lp - log_r).clamp(max=0)
        return Rollouts.unchecked(
            logp=self.lp,
            logp_old=old,
            logp_sampler=old,
            adv=self.adv,
            mask=self.mask,
            entropy=self.entropy,
        )

    def repeated(self, n: int) -> "WeightInputs":
        """Every response n times, one behind the other.

        Args:
            n: how often.
        """
        each = {
            k: v.repeat_interleave(n, 0) for k, v in vars(self).items() if v is not None
        }
        return WeightInputs(**each)


def choose_log_ratios(
    batch: WeightInputs,
    objective: Objective,
    hp: dict[str, Any],
    rng: np.random.Generator,
    coarse: bool = False,
) -> np.ndarray:
    """Return log r of every response token, [B, T].

    Args:
        batch: log-probabilities, advantages and masks; the entropies, if the objective
            reads them.
        objective: the objective.
        hp: its numbers, resolved.
        rng: of what no bound decides.
        coarse: keep tokens away from bounds, for a step in half precision.
    """
    aims = [*_aims(batch, objective, hp, coarse)]
    if objective.level in REDUCE:
        return _response_log_ratios(batch, objective, aims, rng, coarse)
    best: tuple[int, np.ndarray] | None = None
    for _ in range(DRAWS if objective.level == "custom" else 1):
        drawn = _token_log_ratios(batch, aims, rng, coarse)
        if objective.level == "custom":
            unseen = _unseen(batch, objective, hp, torch.from_numpy(drawn))
        else:
            unseen = 0
        if best is None or unseen < best[0]:
            best = unseen, drawn
        if not unseen:
            break
    assert best is not None
    return best[1]


# ---- where a number has an effect ----------------------------------------------------
def _changed(
    objective: Objective, hp: dict[str, Any], name: str, times: float
) -> dict[str, Any] | None:
    """The numbers with this one multiplied; None where it is no number, or cannot have
    that value.
    """
    value = hp[name]
    if not value or not abs(value) < float("inf") or name == "seed":
        return None
    try:
        return objective.resolve(hp | {name: value * times})
    except InputError:
        return None


def _weights(
    batch: WeightInputs, objective: Objective, hp: dict[str, Any], log_r: Tensor
) -> Tensor:
    """Of each token at that log r; nan where a weight has no value."""
    plain_hp = {k: v for k, v in hp.items() if k != "beta"}
    try:
        return objective.token_weights(batch.rollouts(log_r), **plain_hp).double()
    except (InputError, RuntimeError):
        return torch.full_like(batch.lp, torch.nan)


def _aims(
    batch: WeightInputs, objective: Objective, hp: dict[str, Any], coarse: bool
) -> Iterator[np.ndarray]:
    """For each number, smaller and larger: log r of each token that is between the two
    bounds, [B, T]; else nan.

    Nothing for a number that has an effect at most ratios: any ratio shows it.
    """
    smallest = SMALLEST.get(objective.level, 4e-3)
    positive = np.exp(np.arange(np.log(smallest), np.log(MOST), STEP))
    grid = torch.from_numpy(np.concatenate([-positive[::-1], positive]))
    n = len(grid)
    wide = batch.repeated(n)
    log_r = grid.repeat(len(batch.lp))[:, None].expand_as(wide.lp)
    possible = (wide.lp - log_r <= LIMIT) & wide.mask
    weights = _weights(wide, objective, hp, log_r)
    multiples = (
        NEAR_MEAN if objective.level == "sequence_mean" and not coarse else NEAR[coarse]
    )
    for name in hp:
        for direction in (1, -1):
            for times in multiples:
                changed = _changed(objective, hp, name, times**direction)
                if changed is None:
                    continue
                changed_weights = _weights(wide, objective, changed, log_r)
                differs = (
                    (changed_weights - weights).abs() > EFFECT * wide.adv.abs()
                ) & possible
                if differs.sum() > possible.sum() / 2:
                    break
                aim = _between(
                    differs.view(len(batch.lp), n, -1).numpy(),
                    grid.numpy(),
                    BESIDE[coarse],
                )
                if np.isfinite(aim).any():
                    yield aim
                    break


def _between(moved: np.ndarray, grid: np.ndarray, beside: float) -> np.ndarray:
    """[B, T] of moved [B, n, T]: the middle of the ratios that moved and are nearest to
    1, near their inner end.
    """
    out = np.full((moved.shape[0], moved.shape[2]), np.nan)
    for i, t in zip(*np.nonzero(moved.any(1)), strict=True):
        indices = np.nonzero(moved[i, :, t])[0]
        runs = np.split(indices, np.nonzero(np.diff(indices) > 1)[0] + 1)
        ends = [
            tuple(sorted((grid[x[0]], grid[x[-1]]), key=abs))
            for x in runs
            if len(x) > 1
        ]
        if ends:
            inner, outer = min(ends, key=lambda x: abs(x[0]))
            out[i, t] = inner + np.clip((outer - inner) / 2, -beside, beside)
    return out


# ---- tokens --------------------------------------------------------------------------
def _token_log_ratios(
    batch: WeightInputs,
    wanted: list[np.ndarray],
    rng: np.random.Generator,
    coarse: bool,
) -> np.ndarray:
    """Draw log r of every token, and put tokens on either side of each bound.

    Args:
        batch: whose advantages and mask say which tokens may carry a bound.
        wanted: log r beside each bound, [B, T], NaN where a token cannot have it.
        rng: the draw.
        coarse: far from every bound, for a step in half precision.

    Returns:
        log r, [B, T].
    """
    lp, A, mask = (x.numpy() for x in (batch.lp, batch.adv, batch.mask))
    inside, outside = (rng.uniform(*span, lp.shape) for span in COARSE)
    if coarse:
        size = np.where(rng.random(lp.shape) < 0.5, inside, outside)
    else:
        size = rng.uniform(*SPREAD, lp.shape)
    log_r = _random_signs(size, rng)
    log_r = np.where(lp - log_r <= LIMIT, log_r, size)
    free = mask.copy()

    def place_one(x: np.ndarray, sign: int, rank: np.ndarray) -> None:
        """Give one free token of that sign its ratio: of those that can have it one
        with the lowest rank.
        """
        able = free & (A * sign > 0) & np.isfinite(x) & (lp - np.nan_to_num(x) <= LIMIT)
        if able.any():
            place = np.unravel_index(
                np.argmin(np.where(able, rank, np.inf)), log_r.shape
            )
            log_r[place] = x[place]
            free[place] = False

    # One token of each response is inside of all bounds, so that each response trains:
    # in the longest one, which may lack the end token, the last.
    for i, row_mask in enumerate(mask):
        places = np.nonzero(row_mask)[0]
        if len(places):
            if row_mask.sum() == mask.sum(1).max():
                t = places[-1]
            else:
                t = rng.choice(places)
            log_r[i, t] = rng.uniform(*COARSE[0])
            free[i, t] = False
    rarest_first = sorted(wanted, key=lambda x: np.isfinite(x).sum())
    # The same ratios where A has the other sign and the bound should not act.
    inert = [np.where(np.isfinite(x), np.nan, np.nanmedian(x)) for x in rarest_first]
    for sign in (1, -1):
        of_sign = mask & (A * sign > 0)
        # in half precision on large advantages, whose tokens rounding does not hide
        for x in rarest_first:
            place_one(x, sign, rng.random(lp.shape) - (np.abs(A) if coarse else 0))
        # on small advantages, so that no token outweighs the others
        if not coarse:
            for far_log_ratio in FAR:
                rank = np.abs(A) + rng.random(lp.shape) / 100
                place_one(np.full(lp.shape, far_log_ratio), sign, rank)
        for x in inert + rarest_first:
            if (free & of_sign).sum() > KEPT_FREE * of_sign.sum():
                place_one(x, sign, rng.random(lp.shape))
    return log_r


def _unseen(
    batch: WeightInputs, objective: Objective, hp: dict[str, Any], log_r: Tensor
) -> int:
    """How many numbers at half and at twice their value leave all weights as they are."""
    weights = _weights(batch, objective, hp, log_r)
    count = 0
    for name in hp:
        for times in (0.5, 2.0):
            changed = _changed(objective, hp, name, times)
            if changed is not None:
                count += torch.allclose(
                    weights,
                    _weights(batch, objective, changed, log_r),
                    rtol=1e-3,
                    atol=1e-6,
                )
    return count


# ---- responses -----------------------------------------------------------------------
def _response_log_ratios(
    batch: WeightInputs,
    objective: Objective,
    aims: list[np.ndarray],
    rng: np.random.Generator,
    coarse: bool,
) -> np.ndarray:
    """Draw log r of every token so that each response has a chosen mean or sum.

    Args:
        batch: [B, T], one advantage for each response.
        objective: an objective whose ratio belongs to the response.
        aims: [B, T] each, log r beside one bound; NaN where a response cannot have it.
        rng: of what no bound decides.
        coarse: keep tokens away from bounds, for a step in half precision.

    Returns:
        log r, [B, T].
    """
    lp = batch.lp.numpy()
    mask = batch.mask.numpy()
    means = _choose_means(batch.adv[:, 0].numpy(), aims, MEANS[objective.level], rng)
    log_r = _random_signs(rng.uniform(*SPREAD, lp.shape), rng)
    for _ in range(4):  # what a probable token cannot have is moved to the others
        for i, trained in enumerate(mask):
            tokens = trained.sum() if objective.level == "sequence_mean" else 1
            able = trained & (lp[i] - log_r[i] < LIMIT)
            if able.any():
                missing = means[i] * tokens - log_r[i, trained].sum()
                log_r[i, able] += missing / able.sum()
        log_r = np.maximum(log_r, lp - LIMIT)
    return log_r


def _choose_means(
    A: np.ndarray,
    aims: list[np.ndarray],
    values_of_sign: tuple[tuple[float, ...], tuple[float, ...]],
    rng: np.random.Generator,
) -> np.ndarray:
    """Choose the mean, or the sum, of log r of each response.

    Args:
        A: one advantage for each response, [B].
        aims: [B, T] each, log r beside one bound. One response per sign gets it.
        values_of_sign: what the other responses take in turn, where A > 0 and A < 0.
        rng: which response gets what.

    Returns:
        [B].
    """
    means = np.zeros(len(A))
    for sign, values in zip((1, -1), values_of_sign, strict=True):
        rows = [
            i
            for i in rng.permutation(len(A))
            if A[i] * sign > 0 or (A[i] == 0 and sign > 0)
        ]
        for aim in aims:
            able = [i for i in rows if np.isfinite(aim[i]).any()]
            if able and len(rows) > 2:
                means[able[0]] = np.nanmean(aim[able[0]])
                rows.remove(able[0])
        for k, i in enumerate(rows):
            means[i] = values[k % len(values)]
    return means


def _random_signs(size: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Give each number a sign at random."""
    return size * rng.choice([-1, 1], size.shape)


# ---- the sampler ---------------------------------------------------------------------
def choose_log_rho(
    old: Tensor,
    mask: Tensor,
    objective: Objective,
    hp: dict[str, Any],
    rng: np.random.Generator,
    coarse: bool = False,
) -> np.ndarray:
    """Return log ρ = log π_old - log μ of every response token, [B, T], so that each
    number of the objective's correction acts.

    Some responses have one log ρ in all tokens, beside a bound: that shows a bound on a
    token, on the product of a response, and on its mean.

    Args:
        old: log π_old, [B, T].
        mask: of the tokens that train.
        objective: an objective with a sampler correction.
        hp: its numbers, resolved.
        rng: of what no bound decides.
        coarse: keep ρ away from bounds, for a step in half precision.

    Returns:
        log ρ, [B, T].
    """
    log_rho = _random_signs(rng.uniform(0.03, 0.4, old.shape), rng)
    log_rho = np.where(old.numpy() - log_rho <= LIMIT, log_rho, np.abs(log_rho))
    free = [*rng.permutation(len(old))]
    for name, sign in ((name, sign) for name in hp for sign in (1, -1)):
        changed = _changed(objective, hp, name, NEAR[coarse][0] ** sign)
        aim = (
            None if changed is None else _rho_between(old, mask, objective, hp, changed)
        )
        able = [] if aim is None else [i for i in free if np.isfinite(aim[i])]
        if able and len(free) > len(old) // 2:
            assert aim is not None
            log_rho[able[0]] = aim[able[0]]
            free.remove(able[0])
    return log_rho


def _rho_between(
    old: Tensor,
    mask: Tensor,
    objective: Objective,
    hp: dict[str, Any],
    changed: dict[str, Any],
) -> np.ndarray:
    """[B]: a log ρ near to 0 that, in all tokens of a response, gives them other
    factors with the changed numbers; nan where there is none.
    """
    positive = np.exp(np.arange(np.log(1e-4), np.log(MOST), STEP / 3))
    grid = torch.from_numpy(np.array(sorted([*-positive, *positive], key=abs)))
    n = len(grid)
    wide, wide_mask = (x.repeat(n, 1) for x in (old, mask))
    mu = wide - grid.repeat_interleave(len(old))[:, None]
    weights, changed_weights = (
        objective.sampler_weights(wide, mu, wide_mask, **x) for x in (hp, changed)
    )
    assert weights is not None and changed_weights is not None
    differs = ((weights - changed_weights).abs() > EFFECT) & wide_mask
    possible = ((mu <= LIMIT) | ~wide_mask).all(1)
    acts = (differs.any(1) & possible).view(n, -1)
    # the second one: the first may be the bound itself
    second = acts & (acts.cumsum(0) == 2)
    x = grid[second.int().argmax(0)]
    return torch.where(second.any(0), x, torch.nan).numpy()
