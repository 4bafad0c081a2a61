# SPDX-License-Identifier: Apache-2.0
"""verl's own policy losses on a batch of ours, and as `Loss`: `verl:LOSS_MODE`, or a
function of its signature.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from upref.aggregation import Totals, verl_name
from upref.errors import InputError, importing
from upref.registry import Objective
from upref.rollouts import Rollouts
from upref.user_code.loss import MAIN, Loss, OtherInputs
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


class InstalledVerl(NamedTuple):
    """What is used of the installed verl: two of its objects, and its version."""

    core_algos: Any  # the module verl.trainer.ppo.core_algos
    ActorConfig: Any  # its class
    version: str


def import_verl() -> InstalledVerl:
    """Import what is used of the installed verl.

    Returns:
        Its module core_algos, its class ActorConfig and its version.

    Raises:
        InputError: verl is not installed.
    """
    with importing("verl"):
        import verl
        from verl.trainer.ppo import core_algos
        from verl.workers.config import ActorConfig
    return InstalledVerl(core_algos, ActorConfig, verl.__version__)


class StandInConfig(SimpleNamespace):
    """What a function of verl's signature reads of ActorConfig, for where verl is not
    installed: 0.9.1's defaults.
    """

    def __init__(self, **fields: Any) -> None:
        """Take fields over the defaults."""
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
        """Return a field, or the default where there is none, as verl's configs do."""
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


def policy_loss_config(**fields: Any) -> Any:
    """Make verl's `PolicyLossConfig`, or a stand-in where verl is not installed.

    Args:
        **fields: fields of verl's `PolicyLossConfig`.

    Returns:
        That configuration, or a namespace of the fields.
    """
    try:
        import_verl()
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
    is_weights: Tensor | None = None,
    **actor_config: Any,
) -> Tensor:
    """Compute the scalar on which verl calls backward() for one (micro-)batch.

    Args:
        loss_mode: a name registered in verl, or a function with the signature of its
            policy losses.
        batch: token tensors [B, T]; gradients flow into `batch.logp`. Its totals are
            the counts of the mini-batch; without them those of this batch.
        agg: verl's loss_agg_mode.
        padding: what masked slots hold; None: what the batch has there.
        ranks: number of ranks that average their gradients.
        is_weights: what verl's rollout correction multiplies the terms by, [B, T].
        **actor_config: fields of verl's ActorConfig and of its PolicyLossConfig.

    Returns:
        The loss of one rank.

    Raises:
        InputError: verl is not installed and `loss_mode` is a name, or verl refuses a
            setting.
    """
    try:
        core_algos, ActorConfig, _ = import_verl()
    except InputError:
        if not callable(loss_mode):
            raise
        ActorConfig = StandInConfig
    try:
        if callable(loss_mode):
            loss_function = loss_mode
        else:
            loss_function = core_algos.get_policy_loss_fn(loss_mode)
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

    loss, _ = loss_function(
        old_log_prob=padded(batch.logp_old),
        log_prob=padded(batch.logp),
        advantages=padded(batch.adv),
        response_mask=batch.mask,
        loss_agg_mode=agg,
        config=config,
        rollout_is_weights=is_weights,
    )
    return loss


def default_fields() -> dict[str, Any]:
    """Return the defaults of ActorConfig, and of the fields that only some losses read.

    Returns:
        Field -> default; where verl is not installed, what a loss reads of version
        0.9.1.
    """
    try:
        config = import_verl().ActorConfig
    except InputError:
        defaults: dict[str, Any] = {"loss_agg_mode": "token-mean"}
        defaults |= vars(StandInConfig())
        defaults.pop("policy_loss", None)
        return defaults
    of_loss = dataclasses.fields(policy_loss_config())
    all_fields = [*dataclasses.fields(config)]
    all_fields += [field for field in of_loss if field.name in OF_LOSS]
    return {
        f.name: f.default for f in all_fields if f.default is not dataclasses.MISSING
    }


def _correction_of_responses(logp: Tensor) -> Tensor:
    """Return weights of a rollout correction, one for each response, [B, 1]: 0.5, 1,
    1.5, 2, 0.5, ...
    """
    rows = torch.arange(len(logp), dtype=logp.dtype)
    return 0.5 + rows[:, None] % 4 / 2


def _correction_of(batch: Rollouts) -> Tensor:
    """Return the weights of the responses of a batch, [B, 1]."""
    return _correction_of_responses(batch.logp)


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
    """Translate the hyperparameters of an objective into verl's fields.

    Args:
        objective: the objective.
        hp: hyperparameters; the others have the objective's defaults.

    Returns:
        Fields of ActorConfig and PolicyLossConfig. A dual clip that is None becomes
        NO_DUAL_CLIP.
    """
    resolved = objective.resolve(hp)
    low, high = clip_bounds(resolved)
    actor = {
        "clip_ratio": high,
        "clip_ratio_low": low,
        "clip_ratio_high": high,
        "clip_ratio_c": resolved.get("c"),
    }
    actor = {k: v for k, v in actor.items() if v is not None}
    if resolved.get("c", 0) is None:
        actor["clip_ratio_c"] = NO_DUAL_CLIP
    own_names = {
        field: resolved[k] for k, field in NAMED.get(objective.name, {}).items()
    }
    return (
        actor
        | {k: resolved[k] for k in ("tau_pos", "tau_neg") if k in resolved}
        | own_names
    )


def load_loss(name: str, mode: str, objective: Objective, hp: dict[str, Any]) -> Loss:
    """Return one of verl's losses by its name.

    Args:
        name: the whole name, `verl:MODE...`, for messages.
        mode: what follows the colon: `MODE[@matched][,FIELD=VALUE...]`.
        objective: at whose settings a loss `@matched` is set up.
        hp: its hyperparameters.

    Returns:
        The Loss.

    Raises:
        InputError: the name cannot be read. Whether verl has the loss shows at its
            first call.
    """
    mode, fields, matched = split_name(name, mode)
    return make_loss(name, mode, objective, hp, fields, matched)


def make_loss(
    name: str,
    mode: str | Callable[..., Any],
    objective: Objective,
    hp: dict[str, Any],
    fields: dict[str, Any] | None = None,
    matched: bool = True,
) -> Loss:
    """Make a Loss of a policy loss of verl, or of a function with the same signature.

    A user's function is called as verl calls its losses; the report states that.

    Args:
        name: of the loss, for messages.
        mode: a loss_mode of verl, or the function.
        objective: what it is compared with.
        hp: hyperparameters of the objective.
        fields: of ActorConfig and PolicyLossConfig, over all others.
        matched: whether the fields follow from the objective; else they are verl's
            defaults.

    Returns:
        The Loss. A matched one of verl's has the loss as shipped in `shipped`.
    """
    all_settings: dict[str, Any] = {}
    if matched:
        all_settings["loss_agg_mode"] = verl_name(objective.level, objective.agg)
    all_settings |= fields or {}

    def settings(hp: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of verl's actor at these hyperparameters."""
        if not matched:
            return dict(all_settings)
        return settings_for(objective, hp) | all_settings

    def call_corrected(full: dict[str, Any], moved: dict[str, Any]) -> Tensor:
        """Return verl's loss of a batch with weights of a rollout correction."""
        weights = _correction_of_responses(full["logp"].detach())
        return call(full, moved, weights.expand(full["mask"].shape))

    def call(
        full: dict[str, Any], moved: dict[str, Any], is_weights: Tensor | None = None
    ) -> Tensor:
        """Return verl's loss of a batch.

        Args:
            full: the tensors and counts of the batch, by name.
            moved: hyperparameters over `hp`.
            is_weights: of a rollout correction, [B, T]; None: there is none.

        Raises:
            InputError: a user's function reads a field that verl's config does not
                have.
        """
        batch = Bare(
            logp=full["logp"],
            logp_old=full["logp_old"],
            mask=full["mask"],
            totals=full["totals"],
            adv=full["adv"],
        )
        use = settings(hp | moved)
        agg = use.pop("loss_agg_mode", default_fields()["loss_agg_mode"])
        try:
            return verl_loss(
                mode,
                batch,
                agg,
                padding=None,
                ranks=full["ranks"],
                is_weights=is_weights,
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
    plain: Loss | None = None
    if matched and isinstance(mode, str):
        plain = make_loss(name, mode, objective, hp, None, matched=False)
    ways: tuple[OtherInputs, ...] = ()
    if mode != "bypass_mode":  # which computes the weights itself
        with_weights = OtherInputs(
            "rollout_is_weights, one for each response",
            call_corrected,
            "verl's rollout correction must multiply each response's gradient by them",
            factor=_correction_of,
        )
        ways = (with_weights,)
    loss = Loss(
        name,
        call,
        objective,
        frozenset({*MAIN, "totals"}),
        framework="verl",
        read_as="verl's signature",
        assumptions=assumptions,
        fields=settings(hp),
        defaults=default_fields(),
        shipped=plain,
        given_otherwise=ways,
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
