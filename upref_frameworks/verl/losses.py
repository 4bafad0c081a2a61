# SPDX-License-Identifier: Apache-2.0
"""verl's own policy losses on a batch of ours, and as `Loss`: `verl:LOSS_MODE`, or a
function of its signature.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals, verl_name
from upref.errors import InputError, importing
from upref.registry import Objective
from upref.rollouts import Rollouts
from upref.user_code.loss import MAIN, Loss
from upref.user_code.settings import describe_fields
from upref_frameworks.settings import Bare, clip_bounds, split_name

OF_LOSS = (
    "clip_cov_ratio",
    "clip_cov_lb",
    "clip_cov_ub",
    "kl_cov_ratio",
    "ppo_kl_coef",
    "dro_beta",
)  # of PolicyLossConfig
NO_DUAL_CLIP = 1e10  # verl cannot switch it off; its ratio never exceeds e^20


def verl() -> Any:
    """(core_algos, ActorConfig, version) of the installed verl; InputError where there
    is none.
    """
    with importing("verl"):
        import verl
        from verl.trainer.ppo import core_algos
        from verl.workers.config import ActorConfig
    return core_algos, ActorConfig, verl.__version__


class StandInConfig(SimpleNamespace):
    """What a function of verl's signature reads of ActorConfig, for where verl is not
    installed: 0.9.1's defaults.
    """

    def __init__(self, **fields: Any) -> None:
        clip = dict(
            clip_ratio=0.2,
            clip_ratio_low=0.2,
            clip_ratio_high=0.2,
            clip_ratio_c=3.0,
            tau_pos=1.0,
            tau_neg=1.05,
        )
        other = dict(
            loss_scale_factor=None,
            entropy_coeff=0,
            use_kl_loss=False,
            kl_loss_coef=0.001,
        )
        of_loss = {"policy_loss": SimpleNamespace()}
        super().__init__(global_batch_info={}, **clip | other | of_loss | fields)

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


def policy_loss_config(**fields: Any) -> Any:
    """Return verl's `PolicyLossConfig` with these fields, or where verl is not
    installed what a loss reads of it.

    Args:
        **fields: fields of verl's `PolicyLossConfig`.

    Returns:
        That configuration, or a namespace of the fields.
    """
    try:
        verl()
    except InputError:
        return SimpleNamespace(**fields)
    from verl.workers.config import PolicyLossConfig

    return PolicyLossConfig(**fields)


def verl_loss(
    loss_mode: str | Callable[..., Any],
    batch: Rollouts | Bare,
    agg: str = "token-mean",
    padding: float | None = 0.0,
    ranks: int = 1,
    **actor_config: Any,
) -> Tensor:
    """The scalar that verl would call backward() on for this (micro-)batch on one rank;
    gradients flow into batch.logp.

    loss_mode: a registered name, or a function of that signature. actor_config: fields
    of verl's ActorConfig and of its PolicyLossConfig. Masked slots hold `padding`, or
    with None what the batch has there. The counts of the mini-batch are batch.totals;
    ranks: how many average their gradients.
    """
    try:
        core_algos, ActorConfig, _ = verl()
    except InputError:
        if not callable(loss_mode):
            raise
        ActorConfig = StandInConfig
    try:
        if callable(loss_mode):
            f = loss_mode
        else:
            f = core_algos.get_policy_loss_fn(loss_mode)
        of_loss = {k: v for k, v in actor_config.items() if k in OF_LOSS}
        if of_loss:
            actor_config = {k: v for k, v in actor_config.items() if k not in OF_LOSS}
            actor_config["policy_loss"] = policy_loss_config(**of_loss)
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            loss_agg_mode=agg,
            **actor_config,
        )
    except (ValueError, TypeError) as e:
        raise InputError(
            f"verl refuses loss_mode={loss_mode}, loss_agg_mode={agg}, {actor_config}: {e}"
        ) from e
    totals = batch.totals or Totals.of(batch.mask)
    config.global_batch_info.update(  # what verl's ppo_loss fills in
        dp_size=ranks,
        batch_num_tokens=int(totals.tokens),
        global_batch_size=int(totals.sequences),
        loss_scale_factor=config.loss_scale_factor,
    )

    def padded(x: Tensor) -> Tensor:
        """Return x with masked slots set to the padding, if one is given."""
        return x if padding is None else torch.where(batch.mask, x, padding)

    loss, _ = f(
        old_log_prob=padded(batch.logp_old),
        log_prob=padded(batch.logp),
        advantages=padded(batch.adv),
        response_mask=batch.mask,
        loss_agg_mode=agg,
        config=config,
        rollout_is_weights=None,
    )
    return loss


def shipped() -> dict[str, Any]:
    """The defaults of verl's ActorConfig, or where verl is not installed those of its
    0.9.1 that a loss reads.
    """
    try:
        config = verl()[1]
    except InputError:
        return {"loss_agg_mode": "token-mean"} | {
            k: v for k, v in vars(StandInConfig()).items() if k != "policy_loss"
        }
    all_fields = [
        *dataclasses.fields(config),
        *(f for f in dataclasses.fields(policy_loss_config()) if f.name in OF_LOSS),
    ]
    return {
        f.name: f.default for f in all_fields if f.default is not dataclasses.MISSING
    }


# ---- as a Loss -----------------------------------------------------------------------
NAMED = {  # hyperparameters of verl's own losses, as its PolicyLossConfig names them
    "kl_cov": {"share": "kl_cov_ratio", "coef": "ppo_kl_coef"},
    "clip_cov": {
        "share": "clip_cov_ratio",
        "low": "clip_cov_lb",
        "high": "clip_cov_ub",
    },
    "dro": {"tau": "dro_beta"},
}


def settings_for(objective: Objective, hp: dict[str, Any]) -> dict[str, Any]:
    """The fields of verl's ActorConfig and PolicyLossConfig that say what the
    objective's hyperparameters say.
    """
    h = objective.resolve(hp)
    low, high = clip_bounds(h)
    actor = {
        "clip_ratio": high,
        "clip_ratio_low": low,
        "clip_ratio_high": high,
        "clip_ratio_c": h.get("c"),
    }
    actor = {k: v for k, v in actor.items() if v is not None}
    if h.get("c", 0) is None:
        actor["clip_ratio_c"] = NO_DUAL_CLIP
    named = {field: h[k] for k, field in NAMED.get(objective.name, {}).items()}
    return actor | {k: h[k] for k in ("tau_pos", "tau_neg") if k in h} | named


def named(name: str, mode: str, objective: Objective, hp: dict[str, Any]) -> Loss:
    mode, fields, matched = split_name(name, mode)
    return of(name, mode, objective, hp, fields, matched)


def of(
    name: str,
    mode: str | Callable[..., Any],
    objective: Objective,
    hp: dict[str, Any],
    fields: dict[str, Any] | None = None,
    matched: bool = True,
) -> Loss:
    """The Loss of a registered name or of a function of that signature; matched: set up
    as the objective says.

    A function of somebody's own is called as verl calls its losses, which the report
    says.
    """
    all_settings = (
        {"loss_agg_mode": verl_name(objective.level, objective.agg)} if matched else {}
    ) | (fields or {})

    def settings(hp: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of verl's actor at these hyperparameters."""
        return (settings_for(objective, hp) if matched else {}) | all_settings

    def call(full: dict[str, Any], moved: dict[str, Any]) -> Tensor:
        batch = Bare(
            **{k: full[k] for k in ("logp", "logp_old", "mask", "totals", "adv")}
        )
        use = {"loss_agg_mode": shipped()["loss_agg_mode"]} | settings(hp | moved)
        try:
            return verl_loss(
                mode,
                batch,
                use.pop("loss_agg_mode"),
                padding=None,
                ranks=full["ranks"],
                **use,
            )
        except AttributeError as e:
            if isinstance(mode, str) or not type(e.obj).__name__.endswith("Config"):
                raise
            raise InputError(
                f"{name} reads config.{e.name}, which verl's ActorConfig does not have. Its arguments are those of "
                "verl's losses, so it gets verl's config: check a wrapper with other names."
            ) from e

    assumptions = (
        f"verl's contract: {describe_fields(settings(hp))}; global_batch_info carries the counts of the mini-batch, so "
        "that the losses of its micro-batches add up; masked slots hold finite numbers",
    )
    if matched and isinstance(mode, str):
        plain = of(name, mode, objective, hp, None, matched=False)
    else:
        plain = None
    loss = Loss(
        name,
        call,
        objective,
        frozenset({*MAIN, "totals"}),
        framework="verl",
        read_as="verl's signature",
        assumptions=assumptions,
        fields=settings(hp),
        defaults=shipped(),
        shipped=plain,
        counts_from="verl passes in config.global_batch_info",
    )
    if isinstance(mode, str):
        return loss
    read_as = "by its arguments' names a policy loss of verl, which is called with verl's ActorConfig"
    switched_off: tuple[str, ...] = ()
    if settings(hp).get("clip_ratio_c") == NO_DUAL_CLIP:
        switched_off = (
            "a dual clip, if it has one: config.clip_ratio_c = 1e+10 switches it off here",
        )
    return replace(
        loss,
        read_as=read_as,
        defaults_called="verl's default",
        switched_off=switched_off,
    )
