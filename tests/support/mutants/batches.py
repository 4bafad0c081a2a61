# SPDX-License-Identifier: Apache-2.0
"""The batches on which the search compares a loss with its objective, drawn over the
declared domain, each with the gradient that the objective has there.

Written with numpy's generator and the registry's closed forms alone; it shares no batch
with the checker. o is the objective of a configuration c, B the number of responses, T
the number of columns, w the weight of a token in the aggregation, and g the gradient
dJ/dlp, [B, T].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.aggregation import Totals, row_weights
from upref.registry import REDUCE
from upref.rollouts import Rollouts

from .styles import Config

SINGLE = 4e-7  # of a log-probability, what rounding to float32 moves
SURE = 2.0**-23  # the last log π below 0 that float32 tells from it, and a bit


@dataclass
class Batch:
    """What a loss gets, and what its gradient has to be."""

    of: dict[str, Tensor]  # by argument; advantages [B, T]
    one_adv: bool
    g: Tensor  # dJ/dlp of the objective
    # what a difference of one token's gradient is measured by; 0 where it is not
    # compared
    scale: Tensor
    far: bool  # its ratios are out of reach of floating point
    jump: Callable[[], Tensor]  # how far rounding to float32 moves the gradient

    @property
    def tokens(self) -> int:
        """Count the trained tokens."""
        return int(self.of["mask"].sum())


def bounds(c: Config) -> np.ndarray:
    """Return the ratios at which a hyperparameter may put a bound, and 1; all above
    1e-3.

    Each hyperparameter v but beta, where it is a number other than 0, gives 1 + v, 1 -
    v, v, 1 / v, exp(v) and exp(-v). The ratios are unordered.
    """
    of_hyperparameters: set[float] = set()
    for name, v in c.all_hp.items():
        if isinstance(v, int | float) and v and name != "beta":
            of_hyperparameters.add(1 + v)
            of_hyperparameters.add(1 - v)
            of_hyperparameters.add(v)
            of_hyperparameters.add(1 / v)
            of_hyperparameters.add(math.exp(v))
            of_hyperparameters.add(math.exp(-v))
    # the order of this set decides which bound a seed draws
    ratios = {1.0} | of_hyperparameters
    return np.array([x for x in ratios if x > 1e-3])


def draw(
    c: Config,
    rng: np.random.Generator,
    shape: tuple[int, int],
    far: bool = False,
    dense: bool = False,
) -> dict[str, Any]:
    """Draw one batch as arrays [B, T], with `group` [B] and `one`, which is true where
    each response has one advantage.

    Args:
        c: the configuration, whose bounds the ratios lie around.
        rng: the generator; its state moves.
        shape: B and T.
        far: draw one |log r| of 18 to 900 for each response, where exp may overflow.
        dense: let most responses fill all columns, with few holes in the mask.

    Every response has a token. Masked slots are not set apart yet: `made` does that.
    The order of the draws is part of what a seed means.
    """
    B, T = shape
    o = c.o
    kind = rng.integers(4)
    mask = _draw_mask(rng, shape, with_holes=kind == 0, dense=dense)
    old = _draw_log_pi_old(rng, shape, one_scale_a_response=kind == 1)
    log_r = _draw_log_ratios(c, rng, old)
    if far:
        sign = rng.choice([-1, 1], (B, 1))
        of_response = sign * rng.uniform(18, 900, (B, 1))
        log_r = np.repeat(of_response, log_r.shape[1], 1)
        old = np.repeat(old[:, :1], T, 1)
    if o.level in REDUCE:
        log_r = _scattered_over_tokens(c, rng, log_r, mask, far)
    log_r = np.broadcast_to(log_r, shape)
    # a token that grew so likely was rarer before
    room = rng.exponential(0.1, shape) * (rng.random(shape) < 0.95)
    old = np.minimum(old, -np.maximum(log_r, 0) - room)
    lp = np.minimum(old + log_r, 0)
    if rng.random() < 0.2 and not far:  # on policy
        lp = old.copy()
    one = _has_one_advantage(c, rng, dense)
    A = _draw_advantages(rng, shape, one)
    spread = rng.choice([1e-3, 0.3, 3.0])
    ref = np.minimum(lp - spread * np.clip(rng.normal(size=shape), -3, 3), -1e-6)
    if far:  # where the ratio overflows, a KL term is all that is left
        ref = lp
    group = _draw_groups(rng, B)
    return {
        "log_prob": lp,
        "old_log_prob": old,
        "advantages": A,
        "mask": mask,
        "ref_log_prob": ref,
        "entropy": rng.uniform(0, 3, shape),
        "group": group,
        "one": one,
    }


def _draw_mask(
    rng: np.random.Generator, shape: tuple[int, int], with_holes: bool, dense: bool
) -> np.ndarray:
    """Draw which slots have a trained token, [B, T]: one stretch in each response, at
    times not from the first column on; at least one token.

    Args:
        rng: the generator; its state moves.
        shape: B and T.
        with_holes: leave out 30% of the tokens; if `dense`, only in 30% of the batches.
        dense: let 85% of the responses fill all columns, not 30%.
    """
    B, T = shape
    lengths = np.exp(rng.uniform(0, math.log(T + 1), B)).astype(int)
    lengths = np.clip(lengths, 1, T)
    lengths = np.where(rng.random(B) < (0.85 if dense else 0.3), T, lengths)
    padded_left = rng.random((B, 1)) < 0.3
    shift = rng.integers(0, T, (B, 1)) % (T - lengths[:, None] + 1)
    start = np.where(padded_left, shift, 0)
    column = np.arange(T)
    mask = (column >= start) & (column < start + lengths[:, None])
    if with_holes and (not dense or rng.random() < 0.3):
        mask &= rng.random(shape) < 0.7
    mask[~mask.any(1), 0] = True
    return mask


def _draw_log_pi_old(
    rng: np.random.Generator, shape: tuple[int, int], one_scale_a_response: bool
) -> np.ndarray:
    """Draw log π_old, [B, T], of sure to very rare tokens; in half of the batches 5% of
    the tokens have -1e-7.

    With `one_scale_a_response`, the tokens of a response are about equally likely.
    """
    B, T = shape
    columns = 1 if one_scale_a_response else T
    exponential = -rng.exponential(1, shape)
    old = exponential * rng.choice([0.001, 0.05, 0.5, 2.0, 8.0], (B, columns))
    nearly_sure = rng.random(shape) < rng.choice([0.0, 0.05])
    return np.where(nearly_sure, -1e-7, old)


def _draw_log_ratios(
    c: Config, rng: np.random.Generator, old: np.ndarray
) -> np.ndarray:
    """Draw log r around the bounds and at large, within 18 of 0.

    Returns:
        [B, T], or [B, 1] if the objective has one ratio for each response.

    Args:
        c: the configuration, whose bounds half of the ratios lie around.
        rng: the generator; its state moves.
        old: log π_old, [B, T], on which the bounds of some objectives depend.
    """
    B, T = old.shape
    o = c.o
    of_responses = o.level in REDUCE
    near = np.log(rng.choice(bounds(c), (B, 1 if of_responses else T)))
    if o.reads_mu and not of_responses and "delta" in c.all_hp:
        near = _log_bounds_by_delta(rng, c.all_hp["delta"], np.exp(old))
    size = near.shape
    # from a bound by a millionth of its logarithm to all of it; from 1 by at most 0.1
    closeness = rng.choice([-1, 1], size) * 10 ** rng.uniform(-6, 0, size)
    around = near + closeness * np.where(np.abs(near) > 0, np.abs(near), 0.1)
    normal = rng.normal(size=size)
    at_large = normal * rng.choice([1e-4, 0.02, 0.3, 1.0, 4.0], size)
    log_r = np.where(rng.random(size) < 0.55, around, at_large)
    log_r = np.clip(log_r, -18, 18)
    is_large = rng.random(size) < 0.1
    large = rng.choice([-1, 1], size) * rng.uniform(4, 18, size)
    log_r = np.where(is_large, large, log_r)
    is_on_policy = rng.random(size) < 0.04
    return np.where(is_on_policy, 0.0, log_r)


def _log_bounds_by_delta(
    rng: np.random.Generator, delta: float, mu: np.ndarray
) -> np.ndarray:
    """Draw the logarithm of a bound that depends on π_old, [B, T]: its distance from 1
    is δ/π_old, or the root of (1 - π_old) δ/π_old or of twice that.
    """
    form = rng.choice(3, mu.shape)
    factor = np.where(form == 1, 1, 2)
    root = np.sqrt(np.maximum(1 - mu, 0) * delta * factor / mu)
    distance = np.where(form == 0, delta / mu, root)
    bound = 1 + rng.choice([-1, 1], mu.shape) * distance
    return np.log(np.maximum(bound, 1e-3))


def _scattered_over_tokens(
    c: Config, rng: np.random.Generator, log_s: np.ndarray, mask: np.ndarray, far: bool
) -> np.ndarray:
    """Return tokens' log r, [B, T], whose mean or sum in a response is the log s that
    was drawn.

    Args:
        c: the configuration: its level is the mean or the sum.
        rng: the generator; its state moves.
        log_s: of each response, [B, 1].
        mask: [B, T].
        far: give every token of a response the same log r.
    """
    n = mask.sum(1, keepdims=True)
    scattered = rng.normal(size=mask.shape) * rng.choice([0.001, 0.1, 1.0])
    noise = np.where(mask, scattered, 0)
    of_token = log_s if c.o.level == "sequence_mean" else log_s / n
    if far:
        return of_token
    return of_token + (noise - noise.sum(1, keepdims=True) / n)


def _has_one_advantage(c: Config, rng: np.random.Generator, dense: bool) -> bool:
    """Return whether each response has one advantage: always where the objective needs
    that, else at random. The generator moves in the second case only.
    """
    o = c.o
    if o.agg == "seq-mean" or o.level in REDUCE:
        return True
    if o.agg == "seq-mean-token-sum" and o.adv in ("leave_one_out", "signed"):
        return True  # the response is the action
    return rng.random() < (0.85 if dense else 0.6)


def _draw_advantages(
    rng: np.random.Generator, shape: tuple[int, int], one: bool
) -> np.ndarray:
    """Draw advantages [B, T], 0 in 7% of the responses, else 1e-6 to 40 or about normal
    in size. one: every token of a response has the same.
    """
    B, T = shape
    size = (B, 1) if one else (B, T)
    sign = rng.choice([-1, 1], size)
    of_any_size = rng.random((B, 1)) < 0.5
    any_size = np.exp(rng.uniform(math.log(1e-6), math.log(40), size))
    ordinary = np.abs(rng.normal(size=size)) + 0.05
    A = sign * np.where(of_any_size, any_size, ordinary)
    is_not_zero = rng.random((B, 1)) < 0.93
    return np.broadcast_to(A * is_not_zero, shape)


def _draw_groups(rng: np.random.Generator, B: int) -> np.ndarray:
    """Draw ids of groups [B], int64: small, with gaps, negative or above 2**40. Every
    group has two responses or more where B allows it.
    """
    count = max(1, int(rng.integers(1, max(2, B // 2 + 1))))
    group = (np.arange(B) // 2) % count
    group = rng.permutation(_without_single(group, 0))
    group = _without_single(group, group[0] if len(group) else 0)
    match rng.integers(4):
        case 1:
            group = 3 + 17 * group
        case 2:
            group = -1 - group
        case 3:
            group = group + 2**40
    return group.astype(np.int64)


def _without_single(group: np.ndarray, other: int) -> np.ndarray:
    """Return the groups; a response that is alone in its group is put into `other`."""
    return np.where(np.bincount(group)[group] > 1, group, other)


def made(
    c: Config,
    arrays: dict[str, Any],
    rng: np.random.Generator,
    far: bool,
    grouped: bool,
    empty: bool,
) -> Batch:
    """Turn drawn arrays into a Batch: put junk into the masked slots, and compute the
    objective's gradient and where it is compared.

    Args:
        c: the configuration.
        arrays: what `draw` returned; its `one` is taken out of it.
        rng: chooses the junk, one number for each tensor.
        far: compare only where the gradient lies between a tenth of w |A| and ten times
            it.
        grouped: give the objective the groups.
        empty: add a response without a token.

    Tokens are left out of the comparison (scale 0) where the gradient is not finite;
    and, where the objective reads π_old, where log π_θ is 0 or a shift of 1e-9 moves
    the gradient by a thousandth.
    """
    one = arrays.pop("one")
    t = _tensors(arrays, rng, empty)
    mask = t["mask"]
    lp, old = t["log_prob"], t["old_log_prob"]
    o, hp = c.o, c.all_hp
    group = t["group"] if grouped else None
    fields = {
        "logp": lp,
        "logp_old": old,
        "adv": t["advantages"],
        "mask": mask,
        "group": group,
        "logp_ref": t["ref_log_prob"],
        "entropy": t["entropy"],
    }
    rows = row_weights(o.agg, mask, Totals.of(mask, group))
    w = torch.as_tensor(rows, dtype=torch.float64).expand(len(mask))[:, None]
    beta = hp.pop("beta", 0)

    def gradient(old: Tensor, lp: Tensor = lp) -> Tensor:
        """Return dJ/dlp by the closed form of the weight, with the KL term's."""
        batch = Rollouts.unchecked(**fields | {"logp": lp, "logp_old": old})
        g = o.gradient(batch, **hp)
        if beta:
            d = lp - t["ref_log_prob"]
            slope = {"k2": d, "k3": 1 - torch.exp(-d)}[o.kl]
            g = g - beta * w * torch.where(mask, slope, 0)
        return g

    g = gradient(old)
    if o.agg == "seq-mean" and o.level != "sequence_product":
        w = w / mask.sum(-1, keepdim=True).clamp(min=1)
    A = t["advantages"].abs()
    scale = torch.maximum(g.abs(), w * A).clamp(min=1e-15)
    compared = mask & g.isfinite()
    if far:
        compared &= (g.abs() > 0.1 * w * A) & (g.abs() < 10 * w * A)
    # π_θ = 1 exactly is the bound r = 1 / π_old, and is what float32 makes of the last
    # 6e-8 before it
    if o.reads_mu:
        compared &= lp < 0
        nearby = [
            gradient(old - 1e-9),
            gradient(old + 1e-9),
            gradient(old, torch.where(lp > -SURE, -SURE, lp)),
        ]
        compared &= sum((x - g).abs() / scale for x in nearby) < 1e-3
    rounding = SINGLE * torch.maximum(lp.abs(), old.abs()).clamp(min=1)

    def jump() -> Tensor:
        """Return by how much the gradient moves, relative to scale, [B, T], where a
        log-probability is rounded to float32.
        """
        moved = [
            gradient(old - rounding),
            gradient(old + rounding),
            gradient(old, lp - rounding),
        ]
        return sum(((x - g).abs() / scale for x in moved), torch.zeros_like(g))

    return Batch(t, one, g, torch.where(compared, scale, 0), far, jump)


def _tensors(
    arrays: dict[str, Any], rng: np.random.Generator, empty: bool
) -> dict[str, Tensor]:
    """Return the arrays as tensors, with one number of junk for each in the masked
    slots. empty: add a copy of the first response, without a token.
    """
    t = {k: torch.tensor(np.array(v)) for k, v in arrays.items()}
    if empty:
        t = {k: torch.cat([v, v[:1]]) for k, v in t.items()}
        t["mask"][-1] = False
    for k in ("log_prob", "old_log_prob", "ref_log_prob", "advantages"):
        junk = float(rng.choice([0.0, -1.0, -30.0, 30.0, -0.3]))
        t[k] = t[k].masked_fill(~t["mask"], junk)
    return t


@lru_cache(3)
def small(c: Config, grouped: bool, seed: int, n: int) -> list[Batch]:
    """Return n batches of up to 8 responses and 40 columns, then the rare ones.

    Every eighth has ratios out of reach of floating point. Where the aggregation is a
    mean over tokens, every sixteenth has one more response, without a token. The last
    three calls are cached.
    """
    rng, out = np.random.default_rng([seed, 1]), []
    means = c.o.agg in ("token-mean", "group-token-mean")
    for i in range(n):
        shape = (
            int(rng.integers(2 if grouped else 1, 9)),
            int(rng.choice([1, 2, 3, 5, 8, 13, 40])),
        )
        far, empty = i % 8 == 7, means and i % 16 == 5
        out.append(made(c, draw(c, rng, shape, far), rng, far, grouped, empty))
    return out + rare(c, grouped, seed)


def rare(c: Config, grouped: bool, seed: int) -> list[Batch]:
    """Return batches that chance seldom draws: with tokens that π_old gave a
    probability of 1, and without groups those of one token and of one response.
    """
    rng, out = np.random.default_rng([seed, 3]), []
    shapes = (
        [(4, 5), (8, 13), (2, 40)]
        if grouped
        else [(1, 1), (1, 1), (1, 1), (1, 5), (1, 13), (4, 5), (8, 13)]
    )
    for shape in shapes:
        x = draw(c, rng, shape)
        if shape[0] > 1:
            sure = rng.random(shape) < 0.4
            x["log_prob"] = np.where(
                sure, -rng.exponential(0.3, shape) - 1e-3, x["log_prob"]
            )
            x["old_log_prob"] = np.where(sure, 0.0, x["old_log_prob"])
            x["ref_log_prob"] = np.where(
                sure, x["log_prob"] - rng.exponential(1, shape), x["ref_log_prob"]
            )
            # as every style takes them
            x["advantages"], x["one"] = x["advantages"][:, :1] + np.zeros(shape), True
        out.append(made(c, x, rng, False, grouped, False))
    return out


@lru_cache(1)
def bulk(c: Config, grouped: bool, seed: int, n: int) -> list[Batch]:
    """Return n batches of 16,384 slots, most of them tokens, with up to 4,096 in a
    response. The last call is cached.
    """
    rng = np.random.default_rng([seed, 2])
    shapes = [(4, 4096), (8, 2048), (16, 1024), (32, 512)]
    return [
        made(c, draw(c, rng, shapes[i % 4], dense=True), rng, False, grouped, False)
        for i in range(n)
    ]
