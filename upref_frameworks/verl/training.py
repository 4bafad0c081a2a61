# SPDX-License-Identifier: Apache-2.0
"""Every objective as a policy loss of verl: `actor.policy_loss.loss_mode=upref/up_dapo`
runs the function proved here.

verl imports this module in each of its processes: by the entry point (group
`verl.plugins`) of an installed upref, or from a checkout by
`VERL_USE_EXTERNAL_MODULES=upref_frameworks.verl.training`, which fails loudly; the
entry point does not.

Hyperparameters are the paper's (`upref show NAME`) unless they are set under their own
names:

    actor_rollout_ref.actor.policy_loss._target_=upref_frameworks.verl.training.PolicyLoss
    '+actor_rollout_ref.actor.policy_loss.upref={eps_low: 0.2, c: 10.0}'

verl's clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c, tau_pos and tau_neg
are not read: they always have a value (0.2, 0.2, 0.2, 3.0, ...), which would give GSPO
a band 600 times too wide and every PPO-like loss a dual clip. A run that moves one of
them from verl's default to another value than the one in force is stopped and told what
to write.

The first micro-batches of each process, and then every 50th, are compared with the
float64 reference (parity.py): `upref/parity_max_abs` is the largest difference so far,
and a run beyond what rounding explains stops.
`upref={parity: {first: 8, every: 20, on_fail: warn}}` sets how often, and trains on
(`upref/parity_alarms` counts); 0 and 0: never.

`upref={step_check: true}` checks one optimizer step of a two-layer twin of the run (its
family, head, padding, LoRA, KL and entropy terms), on the CPU in a process of its own,
before the first step; a difference stops the run.

UPREF_REPLAY=dumps in the environment records the actor's optimizer steps, under any
policy loss, and UPREF_WATCH=own judges whole steps of these losses over all ranks:
record.py.

What differs from the objective called on `Rollouts`, because of what verl hands to a
loss:

* one advantage per response where the objective acts on one: token advantages (GAE, KL
  in the reward) are refused;
* `rollout_is_weights` multiply token terms; a term per response takes their mean
  (verl's gspo weighs each token);
* `loss_scale_factor` is not read: dr_grpo is its paper's plain sum over tokens;
* metrics are per micro-batch, and verl averages them;
* no prompt ids: `group-token-mean` (Eq. 14) becomes the token mean of the mini-batch,
  as in verl's own losses, and tpo cannot run;
* no entropy: aspo_code cannot run;
* KL and entropy terms are verl's (`use_kl_loss`, `kl_loss_coef`, `entropy_coeff`),
  aggregated by `actor.loss_agg_mode`. The objective's own aggregation is fixed; set
  loss_agg_mode to the same (one warning says which) so that they agree;
* an objective coupled over the batch (m2po) gets one micro-batch;
* `algorithm.rollout_correction.bypass_mode=True` makes verl replace any loss_mode by
  its own `bypass_mode`.
"""

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upref import InputError, Objective, Totals, get, names
from upref.aggregation import verl_name
from upref.logprobs import clamp_log_probs
from upref.rollouts import one_per_response
from upref_frameworks.hidden import in_verl
from upref_frameworks.live import live
from upref_frameworks.parity import Monitor
from upref_frameworks.verl.record import LOSSES, by_environment
from upref_frameworks.verl.step import settings_of_twin, stop_unless_twin_agrees

try:
    from verl.trainer.ppo.core_algos import register_policy_loss
    from verl.workers.config import ActorConfig, PolicyLossConfig
except ImportError as e:
    raise ImportError(
        f"verl is not installed ({e}): `repro/venv.sh verl` installs what its losses need."
    ) from e

log = logging.getLogger(__name__)
# verl's root logger shows warnings only, and which hyperparameters run must be seen
# once
log.setLevel(logging.INFO)

# verl's key -> what it would be called here
VERL_KEYS = {
    "clip_ratio": ("eps", "eps_low", "eps_high", "delta"),
    "clip_ratio_low": ("eps", "eps_low", "delta"),
    "clip_ratio_high": ("eps", "eps_high", "delta"),
    "clip_ratio_c": ("c", "trunc", "cap"),
    "tau_pos": ("tau_pos",),
    "tau_neg": ("tau_neg",),
}
# the signature of verl's policy losses: (loss, metrics)
PolicyLossFunction = Callable[..., tuple[Tensor, dict[str, float]]]
_monitors: dict[tuple[Any, ...], Monitor] = {}
_logged: set[tuple[Any, ...]] = set()  # what this process has logged already


@dataclasses.dataclass
class PolicyLoss(PolicyLossConfig):  # type: ignore[misc]  # verl is untyped here
    """verl's policy_loss section with a place for hyperparameters: `upref`, name ->
    value.
    """

    upref: dict[str, Any] = dataclasses.field(default_factory=dict)


def register(objective: Objective) -> PolicyLossFunction:
    """Make an objective a policy loss of verl called `upref/NAME`.

    Args:
        objective: a registered one, `up(...)` of one, or your own.

    Returns:
        The loss, with the signature of verl's policy losses. It returns the scalar and
        metrics of the micro-batch.
    """

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return -J of a micro-batch times the number of ranks, and metrics. The
        arguments are those of a policy loss of verl.
        """
        hp = hyperparameters(objective, config)
        monitor = monitor_of(objective, config)
        _check_twin(objective, config, hp)
        _warn_of_aggregation(objective, loss_agg_mode)
        mask = response_mask.bool()
        log_prob = clamp_log_probs(log_prob)
        old_log_prob = clamp_log_probs(old_log_prob)
        if objective.one_adv and not one_per_response(advantages, mask):
            raise InputError(
                f"upref/{objective.name} needs one advantage per response, and the tokens of one differ: use an "
                "outcome estimator (grpo, rloo, ...) without KL in the reward, or a token-level objective."
            )
        totals, dp_size = global_totals(config.global_batch_info, mask)
        J = objective.J(
            log_prob,
            old_log_prob,
            advantages,
            mask,
            totals=totals,
            is_weights=rollout_is_weights,
            **hp,
        )
        loss = -J * dp_size
        batch = dict(
            logp=log_prob,
            logp_old=old_log_prob,
            adv=advantages,
            mask=mask,
            totals=totals,
            dp_size=dp_size,
        )
        parity = monitor(loss, batch | {"is_weights": rollout_is_weights}, hp)
        return loss, live(
            objective, log_prob, old_log_prob, advantages, mask, hp
        ) | parity

    LOSSES[f"upref/{objective.name}"] = objective
    loss.__name__ = loss.__qualname__ = f"upref/{objective.name}"
    loss.__doc__ = f"{objective.name} in verl: -J, and what it does to the tokens."
    return register_policy_loss(loss.__name__)(loss)


def hyperparameters(objective: Objective, config: Any) -> dict[str, Any]:
    """Return the hyperparameters in force: `policy_loss.upref` over the defaults.

    Args:
        objective: the objective that trains.
        config: verl's ActorConfig.

    Returns:
        Name -> value, without beta: the KL term is verl's.

    Raises:
        InputError: the objective cannot run in verl, a name does not exist, or a field
            of verl's has a value that this loss does not read.
    """
    if config is None:
        raise InputError(
            f"upref/{objective.name} needs verl's actor config: pass config=."
        )
    if objective.needs:
        raise InputError(
            f"{objective.name} needs {objective.needs[0]}, which verl does not pass to a loss."
        )
    if objective.sampler is not None:
        raise InputError(
            f"{objective.name} needs the sampler's log-probabilities, which verl does not pass to a loss: train its"
            " base, and set algorithm.rollout_correction.rollout_is and rollout_is_threshold, which multiply weights."
        )
    given = {
        k: v for k, v in _section(config).items() if k not in ("parity", "step_check")
    }
    if "beta" in given:
        raise InputError(
            "verl adds the KL term: set actor.use_kl_loss and actor.kl_loss_coef, not upref.beta."
        )
    hp = objective.resolve(given)
    hp.pop("beta", None)
    _refuse_ignored_keys(objective, config, hp, given)
    _log_hyperparameters(objective, hp, given)
    return hp


def _section(config: Any) -> dict[str, Any]:
    """Return the settings `policy_loss.upref` of verl's configuration; {} where there
    are none.
    """
    return dict((config.get("policy_loss", None) or {}).get("upref", None) or {})


def monitor_of(objective: Objective, config: Any) -> Monitor:
    """Return this process's monitor of an objective, made at the first call.

    Args:
        objective: the objective that trains.
        config: verl's ActorConfig, with the settings `policy_loss.upref.parity`.

    Returns:
        The same monitor for the same objective and settings.

    Raises:
        InputError: a setting of parity is wrong.
    """
    wanted = dict(_section(config).get("parity", None) or {})
    key = (objective.name, *sorted(wanted.items()))
    if key not in _monitors:
        _monitors[key] = Monitor.of(objective, wanted)
    return _monitors[key]


def _check_twin(objective: Objective, config: Any, hp: dict[str, Any]) -> None:
    """Check one step of a two-layer twin of this run, where step_check is set; log the
    report.

    It runs once in a process, before the first step, and on the first rank alone.

    Raises:
        RuntimeError: the twin's gradient is not the objective's.
        InputError: no twin of this run can be made.
    """
    if not _section(config).get("step_check"):
        return
    if not _first_time("twin", objective.name):
        return
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        report = stop_unless_twin_agrees(
            settings_of_twin(objective.name, hp, config, config.model_config)
        )
        log.info("step_check: %s", report)


def _refuse_ignored_keys(
    objective: Objective, config: Any, hp: dict[str, Any], given: dict[str, Any]
) -> None:
    """Raise InputError for a setting of verl's own losses that was changed and that
    this objective does not read.
    """
    default = {f.name: f.default for f in dataclasses.fields(ActorConfig)}
    for key, ours in VERL_KEYS.items():
        value = config.get(key, None)
        for name in ours:
            if name not in hp or name in given:
                continue
            if value not in (None, default[key], hp[name]):
                raise InputError(
                    f"upref/{objective.name} does not read actor.{key}={value} and uses {name}={hp[name]}: set one "
                    "by policy_loss._target_=upref_frameworks.verl.training.PolicyLoss "
                    f"and +policy_loss.upref.{name}=VALUE."
                )


def _log_hyperparameters(
    objective: Objective, hp: dict[str, Any], given: dict[str, Any]
) -> None:
    """Log, once for each set of values in this process, which hyperparameters are used
    and where they come from.
    """
    if _first_time("hp", objective.name, tuple(hp.items())):
        values = [
            f"{k}={v} ({'policy_loss.upref' if k in given else 'default'})"
            for k, v in hp.items()
        ]
        if objective.batch_coupled:
            coupled = f"; on each micro-batch by itself: {objective.batch_coupled}"
        else:
            coupled = ""
        log.info(
            "upref/%s: %s; `upref show %s` tells where defaults come from%s",
            objective.name,
            ", ".join(values) or "no hyperparameters",
            objective.name,
            coupled,
        )


def _warn_of_aggregation(objective: Objective, loss_agg_mode: str) -> None:
    """Warn once where verl aggregates its KL and entropy terms in another way than the
    objective.
    """
    own_aggregation = verl_name(objective.level, objective.agg)
    if loss_agg_mode != own_aggregation and _first_time(
        "agg", objective.name, loss_agg_mode
    ):
        log.warning(
            "upref/%s aggregates by %s whatever actor.loss_agg_mode says (%s), but verl's KL and entropy terms follow "
            "loss_agg_mode: set it to %s.",
            objective.name,
            own_aggregation,
            loss_agg_mode,
            own_aggregation,
        )


def _first_time(*what: Any) -> bool:
    """Return whether this is the first call with these arguments in this process."""
    new = what not in _logged
    _logged.add(what)
    return new


def global_totals(info: dict[str, Any], mask: Tensor) -> tuple[Totals, int]:
    """Return the counts by which a loss is divided, and the number of ranks.

    As in verl's agg_loss, a response without tokens counts in global_batch_size. What
    is not given is counted here; then only responses with a token count.

    Args:
        info: verl's `config.global_batch_info`: dp_size, batch_num_tokens and
            global_batch_size, all of the mini-batch over all ranks.
        mask: [B, T], True on tokens that train.

    Returns:
        The totals, each at least 1, without prompts; and dp_size, by which verl divides
        gradients.

    Raises:
        InputError: several ranks leave the counts to each of them.
    """
    info = info or {}
    dp_size = info.get("dp_size") or 1
    tokens = info.get("batch_num_tokens")
    sequences = info.get("global_batch_size")
    if dp_size > 1 and (tokens is None or sequences is None):
        raise InputError(
            f"dp_size={dp_size} needs batch_num_tokens and global_batch_size, the counts of all ranks."
        )
    if tokens is None:
        tokens = mask.sum().clamp(min=1)
    if sequences is None:
        sequences = mask.any(1).sum().clamp(min=1)
    # a count of 0: all responses were rejected
    if isinstance(tokens, int):
        tokens = max(tokens, 1)
    if isinstance(sequences, int):
        sequences = max(sequences, 1)
    return Totals(tokens, sequences, 1, tokens), dp_size


for _name in names():
    register(get(_name))
if os.environ.get("UPREF_HIDDEN") == "1":
    in_verl()
by_environment()
