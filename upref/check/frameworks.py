# SPDX-License-Identifier: Apache-2.0
"""verl's and TRL's own losses as `Loss`, by name or by function or trainer class.

A name is `verl:LOSS_MODE` or `trl:LOSS_TYPE` (also trl:rloo, trl:gmpo), set up as the objective's hyperparameters say.
Fields of the framework's config may follow, and overrule that: `trl:grpo,importance_sampling_level=sequence`. With
`defaults` in front of them nothing is set but they: `trl:cispo,defaults`, `verl:vanilla,defaults,clip_ratio_c=10`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from upref.aggregate import Totals, verl_name
from upref.check.adapters import MAIN, Loss
from upref.errors import InputError
from upref.registry import Objective

NO_DUAL_CLIP = 1e10  # verl cannot switch it off; its ratio never exceeds e^20
HALVES = (2, 4, 8)  # TRL's micro-batches are equal


def named(name: str, objective: Objective, hp: dict[str, Any]) -> Loss:
    """The Loss of a framework's own name, see above; InputError where it cannot be read."""
    framework, _, rest = name.partition(":")
    mode, *words = rest.split(",")
    plain = words[:1] == ["defaults"]
    fields = dict(_field(name, w) for w in words[plain:])
    return (verl if framework == "verl" else trl)(name, mode, objective, hp, fields, plain)


def _field(name: str, word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not (key and equals and value):
        raise InputError(f"{name}: {word!r} is not FIELD=VALUE; write e.g. trl:dapo,epsilon_high=0.28.")
    constants = {"None": None, "True": True, "False": False}
    if value in constants:
        return key, constants[value]
    for number in (int, float):
        try:
            return key, number(value)
        except ValueError:
            pass
    return key, value


def written(mode: str, fields: dict[str, Any]) -> str:
    """The name, without its framework, of a loss at these settings and otherwise the framework's defaults."""
    return ",".join(
        [mode, "defaults", *(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items())]
    )


def _clip(h: dict[str, Any]) -> tuple[Any, Any]:
    both = h.get("eps", h.get("delta"))
    return h.get("eps_low", both), h.get("eps_high", both)


def _said(settings: dict[str, Any]) -> str:
    return (
        ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items()) or "its defaults"
    )


# ---- verl ------------------------------------------------------------------------------------------------------------
def verl_settings(objective: Objective, hp: dict[str, Any]) -> dict[str, Any]:
    """The fields of verl's ActorConfig that say what the objective's hyperparameters say."""
    h = objective.resolve(hp)
    low, high = _clip(h)
    actor = {"clip_ratio": high, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": h.get("c")}
    actor = {k: v for k, v in actor.items() if v is not None}
    if h.get("c", 0) is None:
        actor["clip_ratio_c"] = NO_DUAL_CLIP
    return actor | {k: h[k] for k in ("tau_pos", "tau_neg") if k in h}


def verl(name: str, mode: str | Callable, objective: Objective, hp, fields=None, plain: bool = False) -> Loss:
    from upref.check.verl import verl_loss

    agg = "token-mean" if plain else verl_name(objective.level, objective.agg)  # verl's default
    settings = lambda hp: {"loss_agg_mode": agg} | ({} if plain else verl_settings(objective, hp)) | (fields or {})

    def call(self: Loss, full, moved):
        b = _Bare(**{k: full[k] for k in ("logp", "logp_old", "mask", "totals", "adv")})
        use = settings(hp | moved)
        return verl_loss(mode, b, use.pop("loss_agg_mode"), padding=None, ranks=full["ranks"], **use)  # type: ignore[arg-type]

    contract = [
        f"verl's contract: {_said(settings(hp))}; global_batch_info carries the counts of the mini-batch, so that the "
        "losses of its micro-batches add up; masked slots hold finite numbers"
    ]
    reads = frozenset({*MAIN, "totals"})
    return Loss(name, call, objective, reads, frozenset(), False, {}, framework="verl", contract=contract)


# ---- TRL -------------------------------------------------------------------------------------------------------------
def trl_settings(mode: str | type, objective: Objective, hp: dict[str, Any]) -> dict[str, Any]:
    """The fields of TRL's config that say what the objective's hyperparameters say."""
    from upref.check.trl import config_of, trainer_of

    h = objective.resolve(hp)
    low, high = _clip(h)
    if mode == "cispo" and high is not None:
        high = 1 + high  # TRL's is the cap itself
    says = {"epsilon": low, "epsilon_high": high, "delta": h.get("c"), "beta": h.get("beta")}
    says |= {f"sapo_temperature_{side}": h.get(f"tau_{side}") for side in ("pos", "neg")}
    if h.get("beta"):
        says["use_bias_correction_kl"] = False  # on by default, and in no paper before DeepSeek-V3.2's
    if objective.level == "sequence":
        says["importance_sampling_level"] = "sequence"
    if mode == "dr_grpo":
        says["max_completion_length"] = 1  # the constant by which TRL divides the sum over tokens
    known = config_of(trainer_of(mode)[0])
    return {k: v for k, v in says.items() if v is not None and hasattr(known, k)}


def trl(name: str, mode: str | type, objective: Objective, hp, fields=None, plain: bool = False) -> Loss:
    from upref.check.trl import token_advantages, trainer_of, trl_loss

    settings = lambda hp: ({} if plain else trl_settings(mode, objective, hp)) | (fields or {})

    def call(self: Loss, full, moved):
        b = _Bare(**{k: full[k] for k in ("logp", "logp_old", "mask", "totals", "adv", "logp_ref", "entropy")})
        return trl_loss(mode, b, padding=None, **settings(hp | moved))  # type: ignore[arg-type]

    contract = [
        f"TRL's contract: {_said(settings(hp))}; an optimizer step is one generation batch, cut into equal "
        "micro-batches; num_items_in_batch counts its tokens, current_gradient_accumulation_steps its micro-batches, "
        "so that the losses that training_step hands to backward add up; masked slots hold finite numbers"
    ]
    reads = frozenset({*MAIN, "totals", "logp_ref", "entropy"})
    return Loss(
        name, call, objective, reads, frozenset(), False, {}, framework="trl", contract=contract, parts=HALVES,
        adv_shape="BT" if token_advantages(trainer_of(mode)[0]) else "B",
    )  # fmt: skip


@dataclass
class _Bare:
    """What the frameworks' losses read of Rollouts, unvalidated: masked slots may be poisoned, tensors on a tape."""

    logp: Tensor
    logp_old: Tensor
    adv: Tensor
    mask: Tensor
    totals: Totals
    logp_ref: Tensor | None = None
    entropy: Tensor | None = None
