# SPDX-License-Identifier: Apache-2.0
"""What an objective does to the tokens of a batch, from its closed-form weight: which
are clipped, have a gradient, or overflow.
"""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from upref.errors import InputError
from upref.ops import exp, mean_t, sum_t
from upref.registry import Objective
from upref.replay.schema import RecordedBatch
from upref.rollouts import Rollouts


def clipping(
    objective: Objective, batch: Rollouts | RecordedBatch, **hp: Any
) -> dict[str, float]:
    """Count clipped and unclipped tokens of a batch, and summarize its ratios; no
    gradient flows.

    Args:
        objective: the Objective; the ratio is the one that it uses: r, or s or S of the
            whole response.
        batch: the batch; of a recorded one, the responses that train.
        **hp: hyperparameters of the objective.

    Returns:
        A dict of floats. Fractions are of unmasked tokens:

        clip/{pos,neg}_{high,low}   tokens of weight 0 with r >= 1 (high) or r < 1 (low), of the tokens with A > 0 (pos)
                                    or A < 0 (neg). In the paper pos_high is the Upper
                                    Clip, neg_low the Lower Clip, neg_high the Dual Clip
        alive                       tokens with a nonzero weight, of those with A != 0
        overflow                    tokens whose exact weight the dtype cannot hold: IS, or an unclipped side. Where the
                                    ratio itself overflows, `ops.exp` saturates and
                                    their gradient is 0 instead
        above_high                  tokens with r > 1.28 (DAPO's bound), of the tokens with A > 0: UP trains them
        mass_above_high             the share of these tokens in Σ |w| over the batch
        ratio/{mean,max,min}        of the ratio
        kl_old                      mean of k1: log π_old - log π_θ, in nats

    Raises:
        InputError: it is no objective or no batch, or a column is missing.
    """
    if not isinstance(objective, Objective):
        raise InputError(
            f"clipping takes an Objective, for example upref.get('dapo'), not {type(objective).__name__}."
        )
    if not isinstance(batch, Rollouts | RecordedBatch):
        raise InputError(
            f"clipping takes Rollouts or a RecordedBatch, not {type(batch).__name__}."
        )
    b = batch
    if isinstance(b, RecordedBatch):
        b = b.rollouts(sampler=objective.sampler is not None)
    lp = b.logp.detach()
    old = b.logp_old
    mask = b.mask
    log_r = (lp - old).masked_fill(~mask, 0)
    if objective.level == "sequence_mean":
        log_r = mean_t(log_r, mask)[:, None].expand_as(mask)
    elif objective.level == "sequence_product":
        log_r = sum_t(log_r, mask)[:, None].expand_as(mask)
    A = b.adv.expand_as(mask)
    w = objective.token_weights(b, **hp)
    dead = w == 0
    is_positive = mask & (A > 0)
    is_negative = mask & (A < 0)
    r = exp(log_r)
    largest_number = torch.finfo(w.dtype).max
    # a ratio that overflows has the largest number in its place
    is_saturated = r == torch.finfo(r.dtype).max
    is_weight_of_ratio = w.abs() > largest_number**0.5 * A.abs()
    overflows = ~w.isfinite() | (is_saturated & is_weight_of_ratio)
    trained_ratios = r[mask].double()
    absolute_weights = w.double().abs().masked_fill(overflows | ~mask, 0)
    total_weight = absolute_weights.sum().clamp(min=torch.finfo(torch.float64).tiny)
    is_above_high = is_positive & (r > 1.28)
    numbers = {
        "clip/pos_high": fraction(dead & (log_r >= 0), is_positive),
        "clip/pos_low": fraction(dead & (log_r < 0), is_positive),
        "clip/neg_high": fraction(dead & (log_r >= 0), is_negative),
        "clip/neg_low": fraction(dead & (log_r < 0), is_negative),
        "alive": fraction(~dead & ~overflows, is_positive | is_negative),
        "overflow": fraction(overflows, mask),
        "above_high": fraction(r > 1.28, is_positive),
        "mass_above_high": absolute_weights[is_above_high].sum() / total_weight,
        "ratio/mean": trained_ratios.mean(),
        "ratio/max": trained_ratios.max(),
        "ratio/min": trained_ratios.min(),
        "kl_old": -(lp - old)[mask].double().mean(),
    }
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))


def fraction(hit: Bool[Tensor, "B T"], of: Bool[Tensor, "B T"]) -> Tensor:
    """Return the share of the tokens `of` that are hit; 0 where there are none.

    Args:
        hit: [B, T].
        of: [B, T], the tokens that count.

    Returns:
        A scalar in [0, 1].
    """
    return (hit & of).sum().double() / of.sum().clamp(min=1)
