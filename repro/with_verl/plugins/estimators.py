# SPDX-License-Identifier: Apache-2.0
"""The advantages of upref.advantages that verl has no estimator for: upref/signed and
upref/reward.

Imported by each of verl's processes (VERL_USE_EXTERNAL_MODULES); verl computes
advantages in the driver.
"""

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from upref import advantages


def _per_response(adv: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the advantages [B] on each trained token [B, T], 0 elsewhere; twice,
    because verl takes advantages and returns.
    """
    out = adv[:, None] * response_mask
    return out, out


@register_adv_est("upref/signed")
@torch.no_grad()
def signed(
    token_level_rewards: Tensor, response_mask: Tensor, config=None, **_
) -> tuple[Tensor, Tensor]:
    """Return A_i = +1 for each response whose summed reward is positive, -1 for the
    others. A penalty for length changes the reward, and must not make a third value.
    """
    rewards = token_level_rewards.sum(-1)
    return _per_response(
        advantages.signed((rewards > 0).to(rewards.dtype)), response_mask
    )


@register_adv_est("upref/reward")
@torch.no_grad()
def reward(
    token_level_rewards: Tensor, response_mask: Tensor, config=None, **_
) -> tuple[Tensor, Tensor]:
    """Return A_i = R_i, the summed reward of each response."""
    return _per_response(advantages.reward(token_level_rewards.sum(-1)), response_mask)
