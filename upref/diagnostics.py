# SPDX-License-Identifier: Apache-2.0
"""What an objective does to a batch, read off the closed-form weight: which tokens are
clipped, alive, overflowing.
"""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from upref.errors import InputError
from upref.ops import exp, mean_t, sum_t
from upref.registry import Objective
from upref.rollouts import Rollouts


def diagnose(objective: Objective, b: Rollouts, **hp: Any) -> dict[str, float]:
    """Count clipped and unclipped tokens of a batch, and summarize its ratios; no
    gradient flows.

    Args:
        objective: the Objective; the ratio is the one that it uses: r, or s or S of the
            whole response.
        b: the batch.
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
    """
    for x, kind in ((objective, Objective), (b, Rollouts)):
        if not isinstance(x, kind):
            raise InputError(
                f"diagnose takes an Objective, e.g. upref.get('dapo'), and Rollouts, not {type(x).__name__}."
            )
    lp, old, mask = b.logp.detach(), b.logp_old, b.mask
    log_r = (lp - old).masked_fill(~mask, 0)
    if objective.level == "sequence_mean":
        log_r = mean_t(log_r, mask)[:, None].expand_as(mask)
    elif objective.level == "sequence_product":
        log_r = sum_t(log_r, mask)[:, None].expand_as(mask)
    A = b.adv.expand_as(mask)
    w = objective.token_weights(b, **hp)
    dead = w == 0
    pos, neg, r = mask & (A > 0), mask & (A < 0), exp(log_r)
    most = torch.finfo(w.dtype).max
    lost = ~w.isfinite() | (
        (r == torch.finfo(r.dtype).max) & (w.abs() > most**0.5 * A.abs())
    )
    inside, mass = r[mask].double(), w.double().abs().masked_fill(lost | ~mask, 0)
    numbers = {
        "clip/pos_high": fraction(dead & (log_r >= 0), pos),
        "clip/pos_low": fraction(dead & (log_r < 0), pos),
        "clip/neg_high": fraction(dead & (log_r >= 0), neg),
        "clip/neg_low": fraction(dead & (log_r < 0), neg),
        "alive": fraction(~dead & ~lost, pos | neg),
        "overflow": fraction(lost, mask),
        "above_high": fraction(r > 1.28, pos),
        "mass_above_high": mass[pos & (r > 1.28)].sum()
        / mass.sum().clamp(min=torch.finfo(torch.float64).tiny),
        "ratio/mean": inside.mean(),
        "ratio/max": inside.max(),
        "ratio/min": inside.min(),
        "kl_old": -(lp - old)[mask].double().mean(),
    }
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))


@torch.no_grad()
def live(
    objective: Objective,
    lp: Tensor,
    lp_old: Tensor,
    A: Tensor,
    mask: Bool[Tensor, "B T"],
    hp: dict[str, Any],
    entropy: Tensor | None = None,
    logp_sampler: Tensor | None = None,
) -> dict[str, float]:
    """`diagnose` of a micro-batch that is being trained on, as upref/KEY. Always the
    same keys: a framework's ranks must agree on them. A metric must not stop a run, so
    nothing is validated and rows without a token are left out.

    Args:
        objective: that is trained.
        lp, lp_old: log π_θ and log π_old, [B, T].
        A: advantages, [B, T] or [B, 1].
        mask: [B, T].
        hp: resolved hyperparameters.
        entropy: per token, where the objective reads it.
        logp_sampler: log μ, where it corrects for its sampler.

    Returns:
        Metric -> number.
    """
    rows = mask.any(1)
    A = A.expand_as(mask)
    entropy = torch.zeros_like(lp) if entropy is None else entropy
    engine = lp_old if logp_sampler is None else logp_sampler
    lp, lp_old, A, mask, entropy, engine = (
        x[rows] for x in (lp, lp_old, A, mask, entropy, engine)
    )
    if not len(mask):  # no token at all: one of A = 0, r = 1 stands for it
        lp, lp_old, A, entropy, engine, mask = (
            *((lp.new_zeros(1, 1),) * 5),
            mask.new_ones(1, 1),
        )
    b = Rollouts.unchecked(
        logp=lp, logp_old=lp_old, adv=A, mask=mask, entropy=entropy, logp_sampler=engine
    )
    return {f"upref/{k}": v for k, v in diagnose(objective, b, **hp).items()}


def fraction(hit: Bool[Tensor, "B T"], of: Bool[Tensor, "B T"]) -> Tensor:
    """Share of `of` that is hit; 0 where there is none.

    Args:
        hit: [B, T].
        of: [B, T], the tokens that count.

    Returns:
        A scalar in [0, 1].
    """
    return (hit & of).sum().double() / of.sum().clamp(min=1)
