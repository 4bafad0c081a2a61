# SPDX-License-Identifier: Apache-2.0
"""An independent search: does a loss's gradient differ from its objective's anywhere in the declared domain?

The domain: log π <= 0, |log r| <= 18 (a sum over a response <= 300) and beyond it wherever the objective's own weight is
an ordinary number; one token to hundreds in a response, padding left, right and in between, any number in masked slots
(-30 to 30); advantages 0 and 1e-6 to 40, one a response, or one a token where the objective allows it; groups of two and
more under any ids; |log π_ref / π_θ| <= 9; a row without a token where the aggregation is a mean over tokens. Left out
are ratios on a bound, to 1e-9 (which side they belong to is the habit of an implementation).

Written with numpy's generator alone; it shares no batch and no generator with the checker.
"""

import math
from collections.abc import Callable, Iterator
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

SAME, OTHER = 2e-6, 2e-5  # relative: up to the first a habit of rounding, beyond the second another gradient
SMALL, BULK = 240, 640  # batches of some dozen tokens, batches of 16,384 slots
SINGLE = 4e-7  # of a log-probability, what rounding to float32 moves


@dataclass
class Batch:
    """What a loss gets, and what its gradient has to be."""

    of: dict[str, Tensor]  # by argument; advantages [B, T]
    one_adv: bool
    g: Tensor  # dJ/dlp of the objective
    scale: Tensor  # what a difference of one token's gradient is measured by; 0 where it is not compared
    far: bool  # its ratios are out of reach of floating point
    jump: Callable[[], Tensor]  # how far rounding to float32 moves the gradient

    @property
    def tokens(self) -> int:
        return int(self.of["mask"].sum())


def bounds(c: Config) -> np.ndarray:
    """Ratios that the hyperparameters name, one way or another."""
    hp = [v for k, v in c.all_hp.items() if isinstance(v, int | float) and v and k != "beta"]
    r = {1.0} | {f(v) for v in hp for f in (lambda v: 1 + v, lambda v: 1 - v, lambda v: v, lambda v: 1 / v, math.exp,
                                            lambda v: math.exp(-v))}  # fmt: skip
    return np.array([x for x in r if x > 1e-3])


def draw(c: Config, rng: np.random.Generator, shape: tuple[int, int], far: bool = False, dense: bool = False) -> dict[str, Any]:
    """One batch as arrays."""
    B, T = shape
    o = c.o
    wide = o.level in REDUCE
    kind = rng.integers(4)
    lengths = np.clip(np.exp(rng.uniform(0, math.log(T + 1), B)).astype(int), 1, T)
    lengths = np.where(rng.random(B) < (0.85 if dense else 0.3), T, lengths)
    at = np.arange(T)
    start = np.where(rng.random((B, 1)) < 0.3, rng.integers(0, T, (B, 1)) % (T - lengths[:, None] + 1), 0)
    mask = (at >= start) & (at < start + lengths[:, None])
    if kind == 0 and (not dense or rng.random() < 0.3):  # with holes
        mask &= rng.random((B, T)) < 0.7
    mask[~mask.any(1), 0] = True
    # π_old
    old = -rng.exponential(1, (B, T)) * rng.choice([0.001, 0.05, 0.5, 2.0, 8.0], (B, 1 if kind == 1 else T))
    old = np.where(rng.random((B, T)) < rng.choice([0.0, 0.05]), -1e-7, old)
    # log r, around the bounds and at large
    near = np.log(rng.choice(bounds(c), (B, 1 if wide else T)))
    if o.reads_mu and not wide:
        d, mu = c.all_hp["delta"], np.exp(old)
        by = rng.choice(3, (B, T))
        reach = np.where(by == 0, d / mu, np.sqrt(np.maximum(1 - mu, 0) * d * np.where(by == 1, 1, 2) / mu))
        near = np.log(np.maximum(1 + rng.choice([-1, 1], (B, T)) * reach, 1e-3))
    close = rng.choice([-1, 1], near.shape) * 10 ** rng.uniform(-6, 0, near.shape)
    x = near + close * np.where(np.abs(near) > 0, np.abs(near), 0.1)
    loose = rng.normal(size=near.shape) * rng.choice([1e-4, 0.02, 0.3, 1.0, 4.0], near.shape)
    x = np.clip(np.where(rng.random(near.shape) < 0.55, x, loose), -18, 18)
    x = np.where(rng.random(near.shape) < 0.1, rng.choice([-1, 1], near.shape) * rng.uniform(4, 18, near.shape), x)
    x = np.where(rng.random(near.shape) < 0.04, 0.0, x)
    if far:
        x = np.repeat(rng.choice([-1, 1], (B, 1)) * rng.uniform(18, 900, (B, 1)), x.shape[1], 1)
        old = np.repeat(old[:, :1], T, 1)
    if wide:  # the response's own ratio is drawn, its tokens' are scattered around it
        n = mask.sum(1, keepdims=True)
        noise = np.where(mask, rng.normal(size=(B, T)) * rng.choice([0.001, 0.1, 1.0]), 0)
        x = (x if o.level == "sequence" else x / n) + (0 if far else noise - noise.sum(1, keepdims=True) / n)
    x = np.broadcast_to(x, (B, T))
    # a token that grew so likely was rarer before
    old = np.minimum(old, -np.maximum(x, 0) - rng.exponential(0.1, (B, T)) * (rng.random((B, T)) < 0.95))
    lp = np.minimum(old + x, 0)
    if rng.random() < 0.2 and not far:  # on policy
        lp = old.copy()
    one = o.agg == "seq-mean" or wide or rng.random() < (0.85 if dense else 0.6)
    size = (B, 1) if one else (B, T)
    A = rng.choice([-1, 1], size) * np.where(rng.random((B, 1)) < 0.5, np.exp(rng.uniform(math.log(1e-6), math.log(40), size)),
                                             np.abs(rng.normal(size=size)) + 0.05)  # fmt: skip
    A = np.broadcast_to(A * (rng.random((B, 1)) < 0.93), (B, T))
    ref = np.minimum(lp - rng.choice([1e-3, 0.3, 3.0]) * np.clip(rng.normal(size=(B, T)), -3, 3), -1e-6)
    ref = lp if far else ref  # where the ratio overflows, a KL term is all that is left
    group = (np.arange(B) // 2) % max(1, int(rng.integers(1, max(2, B // 2 + 1))))
    group = rng.permutation(np.where(np.bincount(group)[group] > 1, group, 0))
    group = np.where(np.bincount(group)[group] > 1, group, group[0] if len(group) else 0)
    ids = [lambda g: g, lambda g: 3 + 17 * g, lambda g: -1 - g, lambda g: g + 2**40][rng.integers(4)]
    return {"log_prob": lp, "old_log_prob": old, "advantages": A, "mask": mask, "ref_log_prob": ref,
            "entropy": rng.uniform(0, 3, (B, T)), "group": ids(group).astype(np.int64), "one": one}  # fmt: skip


def made(c: Config, arrays: dict[str, Any], rng: np.random.Generator, far: bool, grouped: bool, empty: bool) -> Batch:
    """With numbers in the masked slots, and what the objective has for a gradient."""
    one = arrays.pop("one")
    t = {k: torch.as_tensor(np.ascontiguousarray(v)) for k, v in arrays.items()}
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

    def gradient(old: Tensor) -> Tensor:
        """The closed form of the weight, and of the KL term's."""
        g = o.gradient(Rollouts.unchecked(**fields | {"logp_old": old}), **hp)
        if beta:
            d = t["log_prob"] - t["ref_log_prob"]
            g = g - beta * w * torch.where(mask, {"k2": d, "k3": 1 - torch.exp(-d)}[o.kl], 0)
        return g

    g = gradient(fields["logp_old"])
    if o.agg == "seq-mean" and o.level != "trajectory":
        w = w / mask.sum(-1, keepdim=True).clamp(min=1)
    A = t["advantages"].abs()
    scale = torch.maximum(g.abs(), w * A).clamp(min=1e-15)
    keep = mask & g.isfinite()
    if far:
        keep &= (g.abs() > 0.1 * w * A) & (g.abs() < 10 * w * A)
    d = SINGLE * torch.maximum(t["log_prob"].abs(), t["old_log_prob"].abs()).clamp(min=1)
    jump = lambda: sum(((gradient(fields["logp_old"] + s * d) - g).abs() / scale for s in (-1, 1)), torch.zeros_like(g))
    return Batch(t, one, g, torch.where(keep, scale, 0), far, jump)


@lru_cache(3)
def batches(c: Config, grouped: bool, seed: int, small: int) -> list[Batch]:
    return list(_small(c, grouped, seed, small))


def _small(c: Config, grouped: bool, seed: int, small: int) -> Iterator[Batch]:
    rng = np.random.default_rng([seed, 1])
    means = c.o.agg in ("token-mean", "group-token-mean")
    for n in range(small):
        shape = (int(rng.integers(2 if grouped else 1, 9)), int(rng.choice([1, 2, 3, 5, 8, 13, 40])))
        far, empty = n % 8 == 7, means and n % 16 == 5
        yield made(c, draw(c, rng, shape, far), rng, far, grouped, empty)


@lru_cache(1)
def bulk(c: Config, grouped: bool, seed: int, n: int) -> list[Batch]:
    rng = np.random.default_rng([seed, 2])
    shapes = [(4, 4096), (8, 2048), (16, 1024), (32, 512)]
    return [made(c, draw(c, rng, shapes[i % 4], dense=True), rng, False, grouped, False) for i in range(n)]


def size(c: Config, grouped: bool, seed: int, small: int = SMALL, large: int = BULK) -> int:
    """How many tokens the whole search holds."""
    return sum(b.tokens for b in batches(c, grouped, seed, small) + bulk(c, grouped, seed, large))


def gradient(loss: Callable, c: Config, b: Batch, names: list[str], adv: str) -> Tensor:
    """dJ/dlp of a loss, [B, T], NaN where its value is no number; an answer without reduction is reduced as the
    objective says."""
    x = {k: b.of[k] for k in names}
    x["log_prob"] = x["log_prob"].clone().requires_grad_()
    if adv == "B":
        m = b.of["mask"]
        x["advantages"] = x["advantages"].gather(1, m.int().argmax(1, keepdim=True))[:, 0]
    value = loss(**x)
    if value.ndim:
        value = _reduced(value, c, b)
    if not value.isfinite() and not b.far:
        return torch.full_like(b.g, math.nan)
    if not value.requires_grad:
        return torch.zeros_like(b.g)
    (g,) = torch.autograd.grad(value, x["log_prob"], allow_unused=True)
    return torch.zeros_like(b.g) if g is None else -g


def _reduced(value: Tensor, c: Config, b: Batch) -> Tensor:
    m = b.of["mask"]
    if value.numel() == 1:
        return value.reshape(())
    if value.shape == m.shape:
        agg = c.o.agg if c.o.agg != "seq-mean" else "seq-mean-token-sum" if c.o.level == "trajectory" else "seq-mean-token-mean"
        w = row_weights(agg, m, Totals.of(m))
        return (torch.where(m, value, 0).sum(-1) * w).sum()
    if value.shape == m.shape[:1]:
        return value.mean()
    raise ValueError(f"shape {list(value.shape)}")


def apart(loss: Callable, c: Config, b: Batch, names: list[str], adv: str, single: bool = False) -> float:
    """The largest relative difference of a token's gradient; infinite where it is not a number or leaks."""
    g = gradient(loss, c, b, names, adv)
    mask = b.of["mask"]
    if bool((g.masked_fill(mask, 0).nan_to_num(nan=1.0) != 0).any()):
        return math.inf
    off = (g.double() - b.g).abs() / b.scale
    off = off.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(b.scale == 0, 0)
    if single:
        off = (off - 3 * b.jump() - 1e-5).clamp(min=0).masked_fill(_beside(c, b), 0)
    return float(off.max()) if off.numel() else 0.0


def _beside(c: Config, b: Batch) -> Tensor:
    """Tokens whose ratio is as near to a bound as rounding to float32 moves it."""
    x = torch.where(b.of["mask"], b.of["log_prob"] - b.of["old_log_prob"], 0)
    if c.o.level in REDUCE:
        x = x.sum(-1, keepdim=True) / (b.of["mask"].sum(-1, keepdim=True).clamp(min=1) if c.o.level == "sequence" else 1)
    close = SINGLE * torch.where(b.of["mask"], b.of["log_prob"].abs() + b.of["old_log_prob"].abs(), 0).amax(-1, keepdim=True)
    near = (x[..., None] - torch.as_tensor(np.log(bounds(c)))).abs().amin(-1)
    return (near < close + 2e-7).expand_as(b.g)


@dataclass(frozen=True)
class Truth:
    """kind: differs, equal, unclear (between the two tolerances), stillborn (it runs on no batch)."""

    kind: str
    apart: float
    tokens: int  # looked at until the answer stood


def truth(loss: Callable, c: Config, names: list[str], adv: str, seed: int, *, small: int = SMALL, large: int = BULK,
          single: bool = False) -> Truth:  # fmt: skip
    grouped = "group" in names
    worst, tokens, ran = 0.0, 0, False
    for which in (lambda: batches(c, grouped, seed, small), lambda: bulk(c, grouped, seed, large)):
        for b in which():
            if adv == "B" and not b.one_adv:
                continue
            tokens += b.tokens
            try:
                here = apart(loss, c, b, names, adv, single)
            except Exception:  # whatever a mutant raises
                if not ran:
                    return Truth("stillborn", math.inf, tokens)
                here = math.inf
            ran, worst = True, max(worst, here)
            if worst > OTHER:
                return Truth("differs", worst, tokens)
    return Truth("equal" if worst <= SAME else "unclear", worst, tokens)
