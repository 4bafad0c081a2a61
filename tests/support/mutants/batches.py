# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
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
    hp = [
        v
        for k, v in c.all_hp.items()
        if isinstance(v, int | float) and v and k != "beta"
    ]
    r = {1.0} | {f(v) for v in hp for f in (lambda v: 1 + v, lambda v: 1 - v, lambda v: v, lambda v: 1 / v, math.exp,
                                            lambda v: math.exp(-v))}  # fmt: skip
    return np.array([x for x in r if x > 1e-3])


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
    """
    B, T = shape
    o = c.o
    wide = o.level in REDUCE
    kind = rng.integers(4)
    lengths = np.clip(np.exp(rng.uniform(0, math.log(T + 1), B)).astype(int), 1, T)
    lengths = np.where(rng.random(B) < (0.85 if dense else 0.3), T, lengths)
    at = np.arange(T)
    start = np.where(
        rng.random((B, 1)) < 0.3,
        rng.integers(0, T, (B, 1)) % (T - lengths[:, None] + 1),
        0,
    )
    mask = (at >= start) & (at < start + lengths[:, None])
    if kind == 0 and (not dense or rng.random() < 0.3):  # with holes
        mask &= rng.random((B, T)) < 0.7
    mask[~mask.any(1), 0] = True
    # π_old
    old = -rng.exponential(1, (B, T)) * rng.choice(
        [0.001, 0.05, 0.5, 2.0, 8.0], (B, 1 if kind == 1 else T)
    )
    old = np.where(rng.random((B, T)) < rng.choice([0.0, 0.05]), -1e-7, old)
    # log r, around the bounds and at large
    near = np.log(rng.choice(bounds(c), (B, 1 if wide else T)))
    if o.reads_mu and not wide and "delta" in c.all_hp:
        d, mu = c.all_hp["delta"], np.exp(old)
        by = rng.choice(3, (B, T))
        reach = np.where(
            by == 0,
            d / mu,
            np.sqrt(np.maximum(1 - mu, 0) * d * np.where(by == 1, 1, 2) / mu),
        )
        near = np.log(np.maximum(1 + rng.choice([-1, 1], (B, T)) * reach, 1e-3))
    close = rng.choice([-1, 1], near.shape) * 10 ** rng.uniform(-6, 0, near.shape)
    x = near + close * np.where(np.abs(near) > 0, np.abs(near), 0.1)
    loose = rng.normal(size=near.shape) * rng.choice(
        [1e-4, 0.02, 0.3, 1.0, 4.0], near.shape
    )
    x = np.clip(np.where(rng.random(near.shape) < 0.55, x, loose), -18, 18)
    x = np.where(
        rng.random(near.shape) < 0.1,
        rng.choice([-1, 1], near.shape) * rng.uniform(4, 18, near.shape),
        x,
    )
    x = np.where(rng.random(near.shape) < 0.04, 0.0, x)
    if far:
        x = np.repeat(
            rng.choice([-1, 1], (B, 1)) * rng.uniform(18, 900, (B, 1)), x.shape[1], 1
        )
        old = np.repeat(old[:, :1], T, 1)
    if wide:  # the response's own ratio is drawn, its tokens' are scattered around it
        n = mask.sum(1, keepdims=True)
        noise = np.where(
            mask, rng.normal(size=(B, T)) * rng.choice([0.001, 0.1, 1.0]), 0
        )
        x = (x if o.level == "sequence_mean" else x / n) + (
            0 if far else noise - noise.sum(1, keepdims=True) / n
        )
    x = np.broadcast_to(x, (B, T))
    # a token that grew so likely was rarer before
    old = np.minimum(
        old,
        -np.maximum(x, 0) - rng.exponential(0.1, (B, T)) * (rng.random((B, T)) < 0.95),
    )
    lp = np.minimum(old + x, 0)
    if rng.random() < 0.2 and not far:  # on policy
        lp = old.copy()
    # the response is the action
    whole = o.agg == "seq-mean-token-sum" and o.adv in ("leave_one_out", "signed")
    one = (
        o.agg == "seq-mean" or wide or whole or rng.random() < (0.85 if dense else 0.6)
    )
    size = (B, 1) if one else (B, T)
    A = rng.choice([-1, 1], size) * np.where(rng.random((B, 1)) < 0.5, np.exp(rng.uniform(math.log(1e-6), math.log(40), size)),
                                             np.abs(rng.normal(size=size)) + 0.05)  # fmt: skip
    A = np.broadcast_to(A * (rng.random((B, 1)) < 0.93), (B, T))
    ref = np.minimum(
        lp - rng.choice([1e-3, 0.3, 3.0]) * np.clip(rng.normal(size=(B, T)), -3, 3),
        -1e-6,
    )
    ref = lp if far else ref  # where the ratio overflows, a KL term is all that is left
    group = (np.arange(B) // 2) % max(1, int(rng.integers(1, max(2, B // 2 + 1))))
    group = rng.permutation(np.where(np.bincount(group)[group] > 1, group, 0))
    group = np.where(
        np.bincount(group)[group] > 1, group, group[0] if len(group) else 0
    )
    ids = [lambda g: g, lambda g: 3 + 17 * g, lambda g: -1 - g, lambda g: g + 2**40][
        rng.integers(4)
    ]
    return {"log_prob": lp, "old_log_prob": old, "advantages": A, "mask": mask, "ref_log_prob": ref,
            "entropy": rng.uniform(0, 3, (B, T)), "group": ids(group).astype(np.int64), "one": one}  # fmt: skip


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
    t = {k: torch.tensor(np.array(v)) for k, v in arrays.items()}
    mask = t["mask"]
    if empty:
        t = {k: torch.cat([v, v[:1]]) for k, v in t.items()}
        mask = t["mask"]
        mask[-1] = False
    for k in ("log_prob", "old_log_prob", "ref_log_prob", "advantages"):
        junk = float(rng.choice([0.0, -1.0, -30.0, 30.0, -0.3]))
        t[k] = t[k].masked_fill(~mask, junk)
    o, hp = c.o, c.all_hp
    group = t["group"] if grouped else None
    fields = dict(logp=t["log_prob"], logp_old=t["old_log_prob"], adv=t["advantages"], mask=mask, group=group,
                  logp_ref=t["ref_log_prob"], entropy=t["entropy"])  # fmt: skip

    rows = row_weights(o.agg, mask, Totals.of(mask, group))
    w = torch.as_tensor(rows, dtype=torch.float64).expand(len(mask))[:, None]
    beta = hp.pop("beta", 0)

    def gradient(old: Tensor, lp: Tensor = t["log_prob"]) -> Tensor:
        """Return dJ/dlp by the closed form of the weight, with the KL term's."""
        g = o.gradient(
            Rollouts.unchecked(**fields | {"logp": lp, "logp_old": old}), **hp
        )
        if beta:
            d = lp - t["ref_log_prob"]
            g = g - beta * w * torch.where(
                mask, {"k2": d, "k3": 1 - torch.exp(-d)}[o.kl], 0
            )
        return g

    g = gradient(fields["logp_old"])
    if o.agg == "seq-mean" and o.level != "sequence_product":
        w = w / mask.sum(-1, keepdim=True).clamp(min=1)
    A = t["advantages"].abs()
    scale = torch.maximum(g.abs(), w * A).clamp(min=1e-15)
    keep = mask & g.isfinite()
    if far:
        keep &= (g.abs() > 0.1 * w * A) & (g.abs() < 10 * w * A)
    lp, old = t["log_prob"], t["old_log_prob"]
    # π_θ = 1 exactly is the bound r = 1 / π_old, and is what float32 makes of the last
    # 6e-8 before it
    if o.reads_mu:
        keep &= lp < 0
        there = [gradient(old + s) for s in (-1e-9, 1e-9)] + [
            gradient(old, torch.where(lp > -SURE, -SURE, lp))
        ]
        keep &= sum((x - g).abs() / scale for x in there) < 1e-3
    d = SINGLE * torch.maximum(lp.abs(), old.abs()).clamp(min=1)

    def jump() -> Tensor:
        """Return by how much the gradient moves, relative to scale, [B, T], where a
        log-probability is rounded to float32.
        """
        moved = [gradient(old - d), gradient(old + d), gradient(old, lp - d)]
        return sum(((x - g).abs() / scale for x in moved), torch.zeros_like(g))

    return Batch(t, one, g, torch.where(keep, scale, 0), far, jump)


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
