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
    out = adv[:, None] * response_mask
    return out, out


@register_adv_est("upref/signed")
@torch.no_grad()
def signed(
    token_level_rewards: Tensor, response_mask: Tensor, config=None, **_
) -> tuple[Tensor, Tensor]:
    """A_i = +1 where the summed reward is positive, -1 elsewhere: a penalty for length
    must not make a third value.
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
    """A_i = R_i, the summed reward."""
    return _per_response(advantages.reward(token_level_rewards.sum(-1)), response_mask)
