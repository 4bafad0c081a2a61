# SPDX-License-Identifier: Apache-2.0
"""verl's own policy losses on a batch of ours."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from upref.aggregate import Totals
from upref.errors import InputError, importing
from upref.regimes import grad
from upref.rollouts import Rollouts


def verl():
    """(core_algos, ActorConfig, version) of the installed verl; InputError where there is none."""
    with importing("verl", "'upref-rl[verl]'"):
        import verl
        from verl.trainer.ppo import core_algos
        from verl.workers.config import ActorConfig
    return core_algos, ActorConfig, verl.__version__


class StandInConfig(SimpleNamespace):
    """What a function of verl's signature reads of ActorConfig, for where verl is not installed: 0.9.1's defaults."""

    def __init__(self, **fields):
        clip = dict(
            clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05
        )
        other = dict(loss_scale_factor=None, entropy_coeff=0, use_kl_loss=False, kl_loss_coef=0.001)
        super().__init__(global_batch_info={}, policy_loss=SimpleNamespace(), **clip | other | fields)

    def get(self, key: str, default=None):
        return getattr(self, key, default)

    def __getitem__(self, key: str):
        return getattr(self, key)


def verl_loss(
    loss_mode: str | Callable,
    b: Rollouts,
    agg: str = "token-mean",
    padding: float | None = 0.0,
    ranks: int = 1,
    **actor_config,
) -> Tensor:
    """The scalar that verl would call backward() on for this (micro-)batch on one rank; gradients flow into b.logp.

    loss_mode: a registered name, or a function of that signature. actor_config: fields of verl's ActorConfig. Masked
    slots hold `padding`, or with None what the batch has there. The counts of the mini-batch are b.totals; ranks: how
    many average their gradients.
    """
    try:
        core_algos, ActorConfig, _ = verl()
    except InputError:
        if not callable(loss_mode):
            raise
        ActorConfig = StandInConfig
    try:
        f = loss_mode if callable(loss_mode) else core_algos.get_policy_loss_fn(loss_mode)
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=agg, **actor_config
        )
    except (ValueError, TypeError) as e:
        raise InputError(f"verl refuses loss_mode={loss_mode}, loss_agg_mode={agg}, {actor_config}: {e}") from e
    totals = b.totals or Totals.of(b.mask)
    config.global_batch_info.update(  # what verl's ppo_loss fills in
        dp_size=ranks,
        batch_num_tokens=int(totals.tokens),
        global_batch_size=int(totals.sequences),
        loss_scale_factor=config.loss_scale_factor,
    )
    padded = lambda x: x if padding is None else torch.where(b.mask, x, padding)
    loss, _ = f(
        old_log_prob=padded(b.logp_old),
        log_prob=padded(b.logp),
        advantages=padded(b.adv),
        response_mask=b.mask,
        loss_agg_mode=agg,
        config=config,
        rollout_is_weights=None,
    )
    return loss


def verl_weights(loss_mode: str, b: Rollouts, agg: str = "token-mean", **actor_config) -> Tensor:
    """-d loss / d logp of verl's loss, [B, T]: to be compared with `Objective.gradient`."""
    return -grad(lambda b: verl_loss(loss_mode, b, agg, **actor_config), b)
