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
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts

FREE_LOG_RATIO = (0.03, 0.7)  # least and largest |log r| of a token that shows no bound
# the same in half precision: inside the usual clip bounds and outside, far from both
COARSE_LOG_RATIOS = (0.03, 0.12), (0.4, 0.7)
# log r of tokens beyond bounds that no number of the objective makes
FAR_LOG_RATIOS = (1.25, -1.25, 2.6, -2.6)
LARGEST_LOG_RATIO = 2.8  # |log r| at most: a larger ratio outweighs all other tokens
# coarse -> what a number of the objective is multiplied and divided by, in turn. A ratio
# is put between the bound that the number makes and the bound that the result makes.
MULTIPLES = {True: (2.0,), False: (1.1, 1.4, 2.0)}
# the same of a bound on the mean of a response, which rounding moves by some 1e-5
MULTIPLES_OF_MEAN = (1.44,)
# coarse -> how far from the bound, in log r, such a ratio is at most
DISTANCE_FROM_BOUND = {True: 0.15, False: 0.03}
# ratios are searched on a grid, whose smallest |log r| depends on the objective's level
SMALLEST_LOG_RATIO = {"sequence_mean": 2e-5, "sequence_product": 1e-3}
SMALLEST_LOG_RATIO_OF_TOKENS = 4e-3  # at all other levels
GRID_STEP = 0.03  # of log |log r| from one ratio of the grid to the next
# relative to A: a weight that changes by less does not show where a bound is
LEAST_EFFECT = 0.02
KEPT_FREE = 0.3  # the least part of a sign's tokens whose ratio shows no bound
LARGEST_LOG_PROB = -1e-3  # of an old log-probability
MOST_DRAWS = 12  # of ratios, at most, where the objective couples its tokens
# level -> the mean of log r over a response, or its sum, in responses that show no bound:
# first where A > 0, then where A < 0
RESPONSE_LOG_RATIOS = {
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
        """Return the rollouts with these ratios. Their sampler is the old policy.

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
        """Repeat every response n times, so that each copy can have a ratio of its own.

        Args:
            n: how often.

        Returns:
            The copies of the first response, then those of the second, and so on.
        """
        repeated_fields = {
            name: tensor.repeat_interleave(n, 0)
            for name, tensor in vars(self).items()
            if tensor is not None
        }
        return WeightInputs(**repeated_fields)


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
        rng: draws what no bound decides.
        coarse: keep tokens away from bounds, for a step in half precision.
    """
    aims = [*_log_ratios_beside_bounds(batch, objective, hp, coarse)]
    if objective.level in REDUCE:
        return _response_log_ratios(batch, objective, aims, rng, coarse)
    best = _token_log_ratios(batch, aims, rng, coarse)
    if objective.level != "custom":
        return best
    # its tokens are coupled, so a draw may leave a number without effect
    fewest = _count_without_effect(batch, objective, hp, torch.from_numpy(best))
    for _ in range(MOST_DRAWS - 1):
        if fewest == 0:
            break
        drawn = _token_log_ratios(batch, aims, rng, coarse)
        without_effect = _count_without_effect(
            batch, objective, hp, torch.from_numpy(drawn)
        )
        if without_effect < fewest:
            fewest = without_effect
            best = drawn
    return best


# ---- where a number has an effect ----------------------------------------------------
def _with_number(
    objective: Objective, hp: dict[str, Any], name: str, times: float
) -> dict[str, Any] | None:
    """Return the hyperparameters with this one multiplied; None where it is 0, infinite
    or absent, or cannot have that value.
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
    """Return the weight of each token at these log r, [B, T]; nan if it cannot be
    computed.
    """
    without_kl = {name: value for name, value in hp.items() if name != "beta"}
    try:
        return objective.token_weights(batch.rollouts(log_r), **without_kl).double()
    except (InputError, RuntimeError):
        return torch.full_like(batch.lp, torch.nan)


def _log_ratios_beside_bounds(
    batch: WeightInputs, objective: Objective, hp: dict[str, Any], coarse: bool
) -> Iterator[np.ndarray]:
    """Find the log ratios at which another value of a number changes a token's weight.

    Each number is multiplied, and divided, by the multiples in turn, until one of them
    has an effect. A number that has an effect at more than half of all ratios is left
    out, because any ratio shows it.

    Yields:
        log r of each token between the two bounds, [B, T]; nan where there is none.
    """
    smallest = SMALLEST_LOG_RATIO.get(objective.level, SMALLEST_LOG_RATIO_OF_TOKENS)
    positive = np.exp(np.arange(np.log(smallest), np.log(LARGEST_LOG_RATIO), GRID_STEP))
    grid = torch.from_numpy(np.concatenate([-positive[::-1], positive]))
    count = len(grid)
    repeated = batch.repeated(count)
    log_r = grid.repeat(len(batch.lp))[:, None].expand_as(repeated.lp)
    possible = (repeated.lp - log_r <= LARGEST_LOG_PROB) & repeated.mask
    weights = _weights(repeated, objective, hp, log_r)
    multiples = (
        MULTIPLES_OF_MEAN
        if objective.level == "sequence_mean" and not coarse
        else MULTIPLES[coarse]
    )
    for name in hp:
        for direction in (1, -1):
            for multiple in multiples:
                changed = _with_number(objective, hp, name, multiple**direction)
                if changed is None:
                    continue
                changed_weights = _weights(repeated, objective, changed, log_r)
                change = (changed_weights - weights).abs()
                differs = (change > LEAST_EFFECT * repeated.adv.abs()) & possible
                if differs.sum() > possible.sum() / 2:
                    break
                log_ratios = _middle_of_nearest_run(
                    differs.view(len(batch.lp), count, -1).numpy(),
                    grid.numpy(),
                    DISTANCE_FROM_BOUND[coarse],
                )
                if np.isfinite(log_ratios).any():
                    yield log_ratios
                    break


def _middle_of_nearest_run(
    differs: np.ndarray, grid: np.ndarray, largest_distance: float
) -> np.ndarray:
    """Choose one ratio from those at which the weights differ.

    Args:
        differs: whether the weight differs, [B, n, T], at each log r of the grid.
        grid: log r, [n].
        largest_distance: of the result from the bound, in log r.

    Returns:
        log r of each token, [B, T]: the middle of the run of ratios that is nearest to
        1, or a ratio near its inner end; nan where there is none.
    """
    out = np.full((differs.shape[0], differs.shape[2]), np.nan)
    for i, t in zip(*np.nonzero(differs.any(1)), strict=True):
        indices = np.nonzero(differs[i, :, t])[0]
        run_ends = []
        for run in np.split(indices, np.nonzero(np.diff(indices) > 1)[0] + 1):
            if len(run) > 1:
                # the end that is nearer to r = 1 first
                run_ends.append(sorted((grid[run[0]], grid[run[-1]]), key=abs))
        if run_ends:
            inner, outer = min(run_ends, key=lambda ends: abs(ends[0]))
            distance = np.clip((outer - inner) / 2, -largest_distance, largest_distance)
            out[i, t] = inner + distance
    return out


# ---- tokens --------------------------------------------------------------------------
def _free_log_ratios(
    lp: np.ndarray, rng: np.random.Generator, coarse: bool
) -> np.ndarray:
    """Draw log r of every token, whatever the objective's bounds are, [B, T].

    Args:
        lp: log-probabilities, [B, T].
        rng: the draw.
        coarse: clearly inside of the usual clip bounds or clearly outside.
    """
    inside, outside = (rng.uniform(*span, lp.shape) for span in COARSE_LOG_RATIOS)
    if coarse:
        size = np.where(rng.random(lp.shape) < 0.5, inside, outside)
    else:
        size = rng.uniform(*FREE_LOG_RATIO, lp.shape)
    log_r = _random_signs(size, rng)
    # a token that is nearly certain was not more probable before
    return np.where(lp - log_r <= LARGEST_LOG_PROB, log_r, size)


def _token_log_ratios(
    batch: WeightInputs,
    aims: list[np.ndarray],
    rng: np.random.Generator,
    coarse: bool,
) -> np.ndarray:
    """Draw log r of every token, and put tokens on either side of each bound.

    Args:
        batch: whose advantages and mask say which tokens may carry a bound.
        aims: log r beside each bound, [B, T], NaN where a token cannot have it.
        rng: the draw.
        coarse: far from every bound, for a step in half precision.

    Returns:
        log r, [B, T].
    """
    lp = batch.lp.numpy()
    A = batch.adv.numpy()
    mask = batch.mask.numpy()
    log_r = _free_log_ratios(lp, rng, coarse)
    is_free = mask.copy()  # tokens whose ratio shows no bound yet

    def place_ratio(log_ratios: np.ndarray, sign: int, rank: np.ndarray) -> None:
        """Give one token its ratio: the free token with the lowest rank whose advantage
        has this sign and that can have its ratio.
        """
        old = lp - np.nan_to_num(log_ratios)
        is_possible = np.isfinite(log_ratios) & (old <= LARGEST_LOG_PROB)
        is_able = is_free & (A * sign > 0) & is_possible
        if is_able.any():
            lowest = np.argmin(np.where(is_able, rank, np.inf))
            place = np.unravel_index(lowest, log_r.shape)
            log_r[place] = log_ratios[place]
            is_free[place] = False

    # One token of each response is inside of all bounds, so that each response trains:
    # in the longest one, which may lack the end token, the last.
    for i, row_mask in enumerate(mask):
        places = np.nonzero(row_mask)[0]
        if len(places):
            is_longest = row_mask.sum() == mask.sum(1).max()
            t = places[-1] if is_longest else rng.choice(places)
            log_r[i, t] = rng.uniform(*COARSE_LOG_RATIOS[0])
            is_free[i, t] = False
    rarest_first = sorted(aims, key=lambda log_ratios: np.isfinite(log_ratios).sum())
    # The same ratios where A has the other sign and the bound should not act.
    inert = [
        np.where(np.isfinite(log_ratios), np.nan, np.nanmedian(log_ratios))
        for log_ratios in rarest_first
    ]
    for sign in (1, -1):
        has_sign = mask & (A * sign > 0)
        for log_ratios in rarest_first:
            rank = rng.random(lp.shape)
            if coarse:  # on large advantages, whose tokens rounding does not hide
                rank = rank - np.abs(A)
            place_ratio(log_ratios, sign, rank)
        # on small advantages, so that no token outweighs the others
        if not coarse:
            for far_log_ratio in FAR_LOG_RATIOS:
                rank = np.abs(A) + rng.random(lp.shape) / 100
                place_ratio(np.full(lp.shape, far_log_ratio), sign, rank)
        # then more of the same, while enough tokens show no bound
        for log_ratios in inert + rarest_first:
            if (is_free & has_sign).sum() > KEPT_FREE * has_sign.sum():
                place_ratio(log_ratios, sign, rng.random(lp.shape))
    return log_r


def _count_without_effect(
    batch: WeightInputs, objective: Objective, hp: dict[str, Any], log_r: Tensor
) -> int:
    """Count the changes of a number, to half and to twice its value, that leave all
    weights as they are.
    """
    weights = _weights(batch, objective, hp, log_r)
    count = 0
    for name in hp:
        for times in (0.5, 2.0):
            changed = _with_number(objective, hp, name, times)
            if changed is None:
                continue
            changed_weights = _weights(batch, objective, changed, log_r)
            if torch.allclose(weights, changed_weights, rtol=1e-3, atol=1e-6):
                count += 1
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
        rng: draws what no bound decides.
        coarse: keep tokens away from bounds, for a step in half precision.

    Returns:
        log r, [B, T].
    """
    lp = batch.lp.numpy()
    mask = batch.mask.numpy()
    means = _choose_means(
        batch.adv[:, 0].numpy(), aims, RESPONSE_LOG_RATIOS[objective.level], rng
    )
    log_r = _random_signs(rng.uniform(*FREE_LOG_RATIO, lp.shape), rng)
    # A token whose probability is near 1 cannot have every ratio. What it lacks of the
    # sum is given to the other tokens, some of which then lack a little, so four times.
    for _ in range(4):
        for i, trained in enumerate(mask):
            is_able = trained & (lp[i] - log_r[i] < LARGEST_LOG_PROB)
            if is_able.any():
                is_mean = objective.level == "sequence_mean"
                due_sum = means[i] * trained.sum() if is_mean else means[i]
                missing = due_sum - log_r[i, trained].sum()
                log_r[i, is_able] += missing / is_able.sum()
        log_r = np.maximum(log_r, lp - LARGEST_LOG_PROB)
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
        values_of_sign: what the other responses take in turn; first where A > 0, then
            where A < 0.
        rng: draws which response gets what.

    Returns:
        [B].
    """
    means = np.zeros(len(A))
    for sign, values in zip((1, -1), values_of_sign, strict=True):
        free_rows = [
            i
            for i in rng.permutation(len(A))
            if A[i] * sign > 0 or (A[i] == 0 and sign > 0)
        ]
        for aim in aims:
            candidates = [i for i in free_rows if np.isfinite(aim[i]).any()]
            if candidates and len(free_rows) > 2:
                means[candidates[0]] = np.nanmean(aim[candidates[0]])
                free_rows.remove(candidates[0])
        for turn, i in enumerate(free_rows):
            means[i] = values[turn % len(values)]
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
        rng: draws what no bound decides.
        coarse: keep ρ away from bounds, for a step in half precision.

    Returns:
        log ρ, [B, T].
    """
    log_rho = _random_signs(rng.uniform(0.03, 0.4, old.shape), rng)
    log_rho = np.where(
        old.numpy() - log_rho <= LARGEST_LOG_PROB, log_rho, np.abs(log_rho)
    )
    free_rows = [*rng.permutation(len(old))]
    for name, direction in product(hp, (1, -1)):
        changed = _with_number(objective, hp, name, MULTIPLES[coarse][0] ** direction)
        if changed is None:
            continue
        aim = _log_rho_beside_bound(old, mask, objective, hp, changed)
        candidates = [i for i in free_rows if np.isfinite(aim[i])]
        # half of the responses keep ratios that show no bound
        if candidates and len(free_rows) > len(old) // 2:
            log_rho[candidates[0]] = aim[candidates[0]]
            free_rows.remove(candidates[0])
    return log_rho


def _log_rho_beside_bound(
    old: Tensor,
    mask: Tensor,
    objective: Objective,
    hp: dict[str, Any],
    changed: dict[str, Any],
) -> np.ndarray:
    """Return one log ρ for all tokens of each response, [B]: the second smallest in
    size, of a grid, at which the changed hyperparameters give the response other
    factors; nan where there is none.
    """
    positive = np.exp(np.arange(np.log(1e-4), np.log(LARGEST_LOG_RATIO), GRID_STEP / 3))
    grid = torch.from_numpy(np.array(sorted([*-positive, *positive], key=abs)))
    count = len(grid)
    # all responses once for each log ρ of the grid
    repeated_old = old.repeat(count, 1)
    repeated_mask = mask.repeat(count, 1)
    log_mu = repeated_old - grid.repeat_interleave(len(old))[:, None]
    weights, changed_weights = (
        objective.sampler_weights(repeated_old, log_mu, repeated_mask, **numbers)
        for numbers in (hp, changed)
    )
    assert weights is not None and changed_weights is not None
    differs = ((weights - changed_weights).abs() > LEAST_EFFECT) & repeated_mask
    possible = ((log_mu <= LARGEST_LOG_PROB) | ~repeated_mask).all(1)
    acts = (differs.any(1) & possible).view(count, -1)
    # the second one: the first may be the bound itself
    is_second = acts & (acts.cumsum(0) == 2)
    log_rho = grid[is_second.int().argmax(0)]
    return torch.where(is_second.any(0), log_rho, torch.nan).numpy()
