# SPDX-License-Identifier: Apache-2.0
"""An independent search: does a loss's gradient differ from its objective's anywhere in
the declared domain?

The domain: log π <= 0, |log r| <= 18 (a sum over a response <= 300) and beyond it
wherever the objective's own weight is an ordinary number; one token to thousands in a
response, padding left, right and in between, any number in masked slots (-30 to 30);
advantages 0 and 1e-6 to 40, one a response, or one a token where the objective allows
it; groups of two and more under any ids; |log π_ref / π_θ| <= 9; a row without a token
where the aggregation is a mean over tokens. Left out are ratios on a bound, to 1e-9
(which side they belong to is the habit of an implementation), and π_θ = 1 where the
last float32 below it is another matter (a divergence is infinite there). Of a loss that
computes in float32 in part the rounding of log-probabilities is forgiven.

Written with numpy's generator alone; it shares no batch and no generator with the
checker.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from upref.aggregation import Totals, row_weights
from upref.registry import REDUCE

from .batches import SINGLE, Batch, bounds, bulk, small
from .styles import Config

# relative: up to the first a habit of rounding, beyond the second another gradient
SAME, OTHER = 2e-6, 2e-5
SMALL, BULK = 240, 640  # batches of some dozen tokens, batches of 16,384 slots


def size(
    c: Config, grouped: bool, seed: int, few: int = SMALL, large: int = BULK
) -> int:
    """Count the tokens of all batches of the search."""
    batches = small(c, grouped, seed, few) + bulk(c, grouped, seed, large)
    return sum(b.tokens for b in batches)


def gradient(loss: Callable, c: Config, b: Batch, names: list[str], adv: str) -> Tensor:
    """Return dJ/dlp of a loss, [B, T].

    It is NaN everywhere if the loss is not finite (but for batches of far ratios), and
    0 if the loss does not depend on log π_θ. An answer without reduction is reduced as
    the objective says.

    Args:
        loss: the function.
        c: the objective at its hyperparameters.
        b: the batch.
        names: the arguments of the loss.
        adv: the shape of its advantages, "B" or "BT".
    """
    x = {k: b.of[k] for k in names}
    x["log_prob"] = x["log_prob"].clone().requires_grad_()
    if adv == "B":
        first_token = b.of["mask"].int().argmax(1, keepdim=True)
        x["advantages"] = x["advantages"].gather(1, first_token)[:, 0]
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
    """Reduce a loss's answer to a scalar: per token as the objective aggregates, per
    response by their mean.

    Raises:
        ValueError: any other shape.
    """
    mask = b.of["mask"]
    if value.numel() == 1:
        return value.reshape(())
    if value.shape == mask.shape:
        agg = c.o.agg
        if agg == "seq-mean":
            product = c.o.level == "sequence_product"
            agg = "seq-mean-token-sum" if product else "seq-mean-token-mean"
        w = row_weights(agg, mask, Totals.of(mask))
        return (torch.where(mask, value, 0).sum(-1) * w).sum()
    if value.shape == mask.shape[:1]:
        return value.mean()
    raise ValueError(f"shape {list(value.shape)}")


def apart(
    loss: Callable,
    c: Config,
    b: Batch,
    names: list[str],
    adv: str,
    single: bool = False,
) -> float:
    """Return the largest difference of a token's gradient, relative to the batch's
    scale.

    It is infinite where the gradient is not a number, or not 0 in a masked slot of a
    response that is compared. For a loss that computes in float32 in part (`single`),
    what rounding explains is subtracted first.
    """
    g = gradient(loss, c, b, names, adv)
    mask = b.of["mask"]
    leaks = g.masked_fill(mask, 0).nan_to_num(nan=1.0) != 0
    is_compared = (b.scale > 0).any(1, keepdim=True)
    if bool((leaks & is_compared).any()):
        return math.inf
    off = (g.double() - b.g).abs() / b.scale
    off = off.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(b.scale == 0, 0)
    if single:
        off = (off - 3 * b.jump() - 1e-5).clamp(min=0).masked_fill(_beside(c, b), 0)
    return float(off.max()) if off.numel() else 0.0


def _beside(c: Config, b: Batch) -> Tensor:
    """Return where a token's ratio is so near to a bound that rounding to float32 can
    move it across, [B, T].
    """
    mask, lp, old = b.of["mask"], b.of["log_prob"], b.of["old_log_prob"]
    log_r = torch.where(mask, lp - old, 0)
    if c.o.level in REDUCE:
        log_r = log_r.sum(-1, keepdim=True)
    if c.o.level == "sequence_mean":
        log_r = log_r / mask.sum(-1, keepdim=True).clamp(min=1)
    size = torch.where(mask, lp.abs() + old.abs(), 0).amax(-1, keepdim=True)
    rounding = SINGLE * size + 2e-7
    log_bounds = torch.as_tensor(np.log(bounds(c)))
    distance = (log_r[..., None] - log_bounds).abs().amin(-1)
    return (distance < rounding).expand_as(b.g)


@dataclass(frozen=True)
class Truth:
    """kind: differs, equal, unclear (between the two tolerances), stillborn (it runs on
    no batch).
    """

    kind: str
    apart: float
    tokens: int  # looked at until the answer stood


def truth(loss: Callable, c: Config, names: list[str], adv: str, seed: int, *, few: int = SMALL, large: int = BULK,
          single: bool = False) -> Truth:  # fmt: skip
    """Compare a loss with its objective on batch after batch, and return what it is.

    The first batch with a difference over OTHER ends the search: "differs". Otherwise
    it is "equal" up to SAME, and "unclear" between the two. An error on the first batch
    that is tried is "stillborn", and a later one is a difference. Batches with an
    advantage for each token are skipped for a loss that takes one for each response.
    """
    grouped = "group" in names
    worst, tokens, ran = 0.0, 0, False
    for b in _small_then_large(c, grouped, seed, few, large):
        if adv == "B" and not b.one_adv:
            continue
        tokens += b.tokens
        try:
            here = apart(loss, c, b, names, adv, single)
        except Exception:  # whatever a mutant raises
            if not ran:
                return Truth("stillborn", math.inf, tokens)
            here = math.inf
        ran = True
        worst = max(worst, here)
        if worst > OTHER:
            return Truth("differs", worst, tokens)
    return Truth("equal" if worst <= SAME else "unclear", worst, tokens)


def _small_then_large(
    c: Config, grouped: bool, seed: int, few: int, large: int
) -> Iterator[Batch]:
    """Yield the batches of the search. The large ones are made only when they are
    reached: most differences show before.
    """
    yield from small(c, grouped, seed, few)
    yield from bulk(c, grouped, seed, large)
