# SPDX-License-Identifier: Apache-2.0
"""What a loss of upref's logs of each micro-batch while it trains."""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from upref.registry import Objective
from upref.replay.clipping import clipping
from upref.rollouts import Rollouts


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
    """Compute `upref.replay.clipping` of a micro-batch that is being trained on.

    The keys are always the same: a framework's ranks must agree on them. A metric must
    not stop a run, so nothing is validated and rows without a token are left out.

    Args:
        objective: that is trained.
        lp, lp_old: log π_θ and log π_old, [B, T].
        A: advantages, [B, T] or [B, 1].
        mask: [B, T].
        hp: resolved hyperparameters.
        entropy: per token, where the objective reads it.
        logp_sampler: log μ, where it corrects for its sampler.

    Returns:
        `upref/KEY` -> number.
    """
    rows = mask.any(1)
    A = A.expand_as(mask)
    entropy = torch.zeros_like(lp) if entropy is None else entropy
    engine = lp_old if logp_sampler is None else logp_sampler
    lp, lp_old, A, mask, entropy, engine = (
        x[rows] for x in (lp, lp_old, A, mask, entropy, engine)
    )
    if not len(mask):  # no token at all: one of A = 0, r = 1 stands for it
        lp = lp_old = A = entropy = engine = lp.new_zeros(1, 1)
        mask = mask.new_ones(1, 1)
    batch = Rollouts.unchecked(
        logp=lp, logp_old=lp_old, adv=A, mask=mask, entropy=entropy, logp_sampler=engine
    )
    return {f"upref/{k}": v for k, v in clipping(objective, batch, **hp).items()}
