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
from collections.abc import Callable
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
    return sum(
        b.tokens for b in small(c, grouped, seed, few) + bulk(c, grouped, seed, large)
    )


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
        m = b.of["mask"]
        x["advantages"] = x["advantages"].gather(1, m.int().argmax(1, keepdim=True))[
            :, 0
        ]
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
    m = b.of["mask"]
    if value.numel() == 1:
        return value.reshape(())
    if value.shape == m.shape:
        agg = (
            c.o.agg
            if c.o.agg != "seq-mean"
            else "seq-mean-token-sum"
            if c.o.level == "sequence_product"
            else "seq-mean-token-mean"
        )
        w = row_weights(agg, m, Totals.of(m))
        return (torch.where(m, value, 0).sum(-1) * w).sum()
    if value.shape == m.shape[:1]:
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
    leak = g.masked_fill(mask, 0).nan_to_num(nan=1.0) != 0
    if bool((leak & (b.scale > 0).any(1, keepdim=True)).any()):
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
    x = torch.where(b.of["mask"], b.of["log_prob"] - b.of["old_log_prob"], 0)
    if c.o.level in REDUCE:
        x = x.sum(-1, keepdim=True) / (
            b.of["mask"].sum(-1, keepdim=True).clamp(min=1)
            if c.o.level == "sequence_mean"
            else 1
        )
    close = SINGLE * torch.where(
        b.of["mask"], b.of["log_prob"].abs() + b.of["old_log_prob"].abs(), 0
    ).amax(-1, keepdim=True)
    near = (x[..., None] - torch.as_tensor(np.log(bounds(c)))).abs().amin(-1)
    return (near < close + 2e-7).expand_as(b.g)


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
    for which in (
        lambda: small(c, grouped, seed, few),
        lambda: bulk(c, grouped, seed, large),
    ):
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
