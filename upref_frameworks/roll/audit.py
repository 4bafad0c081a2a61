# SPDX-License-Identifier: Apache-2.0
"""ROLL's policy losses as the audit compares them with the papers, and why they differ."""

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.kl import k3
from upref.ops import clip, exp, sg, when, where
from upref.registry import get
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, aggregated, fault, with_hp
from upref_frameworks.audits import token_parts
from upref_frameworks.audits.components import kls
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import CLAMP_K3, SAMPLE, clamp_kl, whiten_by_sample
from upref_frameworks.audits.sources import source

PIN = Pin(
    repository="https://github.com/alibaba/ROLL",
    commit="8eb27cc2dc34c4d1310b169d9b86d339004d811a",
    date="2026-08-19",
    files={
        "roll/pipeline/base_worker.py": "3c0def0577d5f49fe4c8666e94e8e0fa",
        "roll/pipeline/distill/various_divergence.py": "b0097c678ca6132e506f4f8b1a40e473",
        "roll/pipeline/rlvr/actor_pg_worker.py": "96c08e7ab2593967c1c5e836dfd8b1e4",
        "roll/pipeline/rlvr/actor_worker.py": "24ebc7737d76ba4e583204c5cd0125c3",
        "roll/utils/functionals.py": "969d9fbc5afc896557c8834d1c35d60c",
    },
    stubs=(
        "ray",
        "tensordict",
        "codetiming",
        "tqdm",
        "imageio",
        "omegaconf",
        "roll.distributed",
        "roll.models",
        "roll.platforms",
        "roll.pipeline.rlvr.utils",
        "roll.utils.checkpoint_manager",
        "roll.utils.context_managers",
        "roll.utils.logging",
        "roll.utils.offload_states",
    ),
    decorators=(
        "roll.distributed.scheduler.decorator.register",
        "roll.utils.logging.get_logger",
    ),
)
PG = "roll.pipeline.rlvr.actor_pg_worker"
# the worker unless the user names ActorPGWorker; that one's losses go by its pg_variant
DEFAULT_WORKER = "actor_worker"
READ = (
    "pg_clip",
    "use_pg_clip_range",
    "pg_clip_low",
    "pg_clip_high",
    "dual_clip_loss",
    "loss_agg_mode",
    "use_kl_loss",
    "kl_loss_coef",
    "rl_loss_coef",
)
GUIDE = ("postive_loss_coef", "use_topr_neg_loss_coef")  # of TOPR, by its user guide


def _functions() -> ModuleType:
    """Return ROLL's module of functions, imported where an audit runs."""
    return importlib.import_module("roll.utils.functionals")


def _modes() -> list[str]:
    """Return DEFAULT_WORKER, then the values that the source of the other worker
    compares pg_variant with.
    """
    return [
        DEFAULT_WORKER,
        *dict.fromkeys(re.findall(r"pg_variant == '(\w+)'", source(PG))),
    ]


def _pipeline_defaults() -> dict[str, Any]:
    """Return the defaults of RLVRConfig that are values, not factories, and a default
    TrainInferCorrectionConfig.
    """
    base = importlib.import_module("roll.configs.base_config")
    rlvr = importlib.import_module("roll.pipeline.rlvr.rlvr_config")
    simple_defaults = {
        f.name: f.default for f in fields(rlvr.RLVRConfig) if f.default is not MISSING
    }
    return simple_defaults | {
        "train_infer_correction": base.TrainInferCorrectionConfig()
    }


def _defaults(mode: str) -> dict[str, Any]:
    """Return the defaults of the pipeline in the fields of READ. The default worker
    also reads a few others; a variant also has what its loss reads from actor_train, by
    name and default, which stand in the source.
    """
    all_defaults = _pipeline_defaults()
    pipeline = {k: v for k, v in all_defaults.items() if k in READ}
    if mode == DEFAULT_WORKER:
        others = ("importance_sampling", *GUIDE)
        return pipeline | {k: v for k, v in all_defaults.items() if k in others}
    read_keys = re.findall(
        rf"_get_or_cache_config\('({mode}_\w+)', (\S+)\)", source(PG)
    )
    own: dict[str, Any] = {}
    for key, text in read_keys:
        own[key] = text == "True" if text in ("True", "False") else float(text)
    return pipeline | own


def _worker(
    mode: str, config: dict[str, Any], log_prob: Tensor, entropy: Tensor
) -> Any:
    """Return a worker that was not set up: it has settings, and a strategy that returns
    these log-probabilities.
    """
    if mode != DEFAULT_WORKER:
        cls = _variant_worker_class()
    else:
        cls = importlib.import_module("roll.pipeline.rlvr.actor_worker").ActorWorker
    worker = object.__new__(cls)
    strategy = SimpleNamespace(
        op_compute_log_probs=lambda **_: log_prob,
        op_compute_entropy=lambda **_: entropy,
    )
    settings = SimpleNamespace(
        **_pipeline_defaults() | config,
        actor_train=SimpleNamespace(pg_variant=mode, **config),
    )
    already_logged = dict.fromkeys(
        ("_pg_variant_logged", "_topr_sample_logged", "_cispo_config_logged"), True
    )
    vars(worker).update(
        strategy=strategy,
        pipeline_config=settings,
        _pg_config_cache={},
        **already_logged,
    )
    return worker


def _variant_worker_class() -> Any:
    """Return ROLL's class ActorPGWorker."""
    return importlib.import_module(PG).ActorPGWorker


def _loss(
    mode: str,
    config: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_log_prob: Tensor,
    entropy: Tensor,
    totals: Totals,
) -> Tensor:
    """Return the value of the worker's loss_func on tensors. ROLL's strategies mask
    log-probabilities and its pipeline masks advantages, so they are masked here.
    """
    lp, old, ref, A = (
        x * mask for x in (log_prob, old_log_prob, ref_log_prob, advantages)
    )
    batch = {
        "response_mask": torch.nn.functional.pad(mask, (1, 0)),
        "input_ids": None,
        "old_log_probs": old,
        "ref_log_probs": ref,
        "advantages": A,
        "scores": A.sum(1),
    }
    meta = {
        "batch_num_tokens": {"response_mask": totals.tokens},
        "global_valid_samples": {"response_mask": totals.sequences},
    }
    data = SimpleNamespace(batch=batch, meta_info=meta, non_tensor_batch={})
    return _worker(mode, config, lp, entropy * mask).loss_func(data, lp)[0]


def _weight_in_unified_bounds(r: Any, A: Any) -> Any:
    """Return the weight of a token under cispo_use_unified_mask: A times the ratio
    clipped to [0.9, 1.1] where PPO trains the token, else 0.
    """
    return when(where(A > 0, r <= 1.1, r >= 0.9), A * clip(r, 0.9, 1.1))


TOKENS = {"loss_agg_mode": "token-mean"}
SUMS = {"loss_agg_mode": "seq-mean-token-sum"}
MEANS = aggregated("seq-mean-token-mean")
HIGHER = {"use_pg_clip_range": True, "pg_clip_high": 0.28}
GSPO = {"importance_sampling": "seq"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.04}
OPEN = {"cispo_epsilon_low": 1.0, "cispo_epsilon_high": 4.0}
DUAL = fault(
    "c = 1.4 (r = 1.4 itself, where torch.max halves, is left out)",
    "hyperparameter",
    hp={"c": 1.4},
    skip=lambda batch: (batch.logp - batch.logp_old - math.log(1.4)).abs() < 1e-12,
)
NARROW = fault(
    "bounds in YAML are not read: weights in [0.9, 1.1], from both sides",
    "objective",
    objective="cispo_verl",
    hp={"eps_low": 0.1, "eps_high": 0.1},
)
TOKEN_TOPR = fault(
    "the ratio of each token, not of the response",
    "ratio",
    objective=replace(get("topr"), level="token", agg="seq-mean-token-sum"),
)
NOTHING = fault(
    "no gradient: rl_loss_coef is 0, and nothing reads the two coefficients of the user guide",
    "term",
    scale=lambda batch: 0.0,
)
UNIFIED = fault(
    "one pair of bounds for the mask and the weight: in [0.9, 1.1] on the side that PPO leaves free, too",
    "objective",
    objective=replace(
        get("grpo"),
        name="A clip(r) where PPO trains",
        fn=lambda lp, lp_old, A: (
            sg(_weight_in_unified_bounds(exp(lp - lp_old), A)) * lp
        ),
        closed_form=_weight_in_unified_bounds,
        defaults={},
        kl="",
    ),
)
COMPARISONS = (
    Comparison("default", DEFAULT_WORKER, {}, "grpo", {}),
    Comparison("default", DEFAULT_WORKER, KL, "grpo", {"beta": 0.04}, (CLAMP_K3,)),
    Comparison(
        "default",
        DEFAULT_WORKER,
        GSPO,
        "gspo",
        {},
        (with_hp(eps_low=0.2, eps_high=0.2),),
    ),
    Comparison(
        "default",
        DEFAULT_WORKER,
        TOKENS | {"dual_clip_loss": True},
        "ppo_clip",
        {"c": 3.0},
        (DUAL,),
    ),
    Comparison(
        "default",
        DEFAULT_WORKER,
        SUMS | {"rl_loss_coef": 0.0} | dict.fromkeys(GUIDE, 1.0),
        "topr",
        {},
        (NOTHING,),
    ),
    Comparison("default", "ppo", {}, "grpo", {}),
    Comparison(
        "default",
        "ppo",
        TOKENS | {"dual_clip_loss": True},
        "ppo_clip",
        {"c": 3.0},
        (DUAL,),
    ),
    Comparison("default", "vanilla", {}, "reinforce", {}, (MEANS,)),
    Comparison("default", "topr", {}, "topr", {}, (TOKEN_TOPR, MEANS)),
    Comparison("default", "tis", {}, "cispo", {"eps_high": 0.0}, (MEANS,)),
    Comparison("default", "cispo", {}, "cispo", {}, (NARROW, MEANS)),
    Comparison(
        "default",
        "cispo",
        {"cispo_use_unified_mask": True},
        "grpo",
        {"eps": 0.1},
        (UNIFIED,),
    ),
    Comparison("paper", DEFAULT_WORKER, TOKENS, "ppo_clip", {}),
    Comparison("paper", DEFAULT_WORKER, TOKENS | HIGHER, "dapo", {}, (GROUPS,)),
    Comparison(
        "paper",
        DEFAULT_WORKER,
        TOKENS | HIGHER | {"dual_clip_loss": True, "pg_clip": 4.5},
        "dapo",
        {"c": 10.0},
        (GROUPS,),
    ),
    Comparison("paper", DEFAULT_WORKER, SUMS, "dr_grpo", {}),
    Comparison(
        "paper",
        DEFAULT_WORKER,
        GSPO | {"use_pg_clip_range": True, "pg_clip_low": 3e-4, "pg_clip_high": 4e-4},
        "gspo",
        {},
    ),
    Comparison("paper", "ppo", TOKENS | HIGHER, "dapo", {}, (GROUPS,)),
    Comparison("paper", "ppo", SUMS, "dr_grpo", {}),
    Comparison("paper", "vanilla", SUMS, "reinforce", {}),
    Comparison("paper", "topr", SUMS, "topr", {}, (TOKEN_TOPR,)),
    Comparison("paper", "tis", TOKENS, "cispo", {"eps_high": 0.0}, (GROUPS,)),
    Comparison("paper", "cispo", TOKENS | OPEN, "cispo", {}, (GROUPS,)),
)


def _normalized_rewards(
    mean: str | None, std: str | None, group_size: int = 4
) -> Callable[..., Tensor]:
    """Return ROLL's advantages as a function of rewards and groups: rewards less a
    mean, over a deviation. Each of the two is of the level "group" or "batch"; None
    leaves it out.
    """
    return lambda R, group: _functions().reward_norm(R, group_size, {}, mean, std)


def _aggregation(name: str) -> Callable[..., Tensor]:
    """Return ROLL's aggregation of this name, in the reference's signature."""
    return lambda x, mask: _functions().agg_loss(x, mask.long(), name)


def _divided_by(A: Tensor, std: Tensor) -> Tensor:
    """Return A divided by a standard deviation to which ROLL adds 1e-6."""
    return A / (std + 1e-6)


def _over_rewards(R: Tensor, group: Tensor) -> Tensor:
    """Return rewards less their group's mean, divided by the standard deviation of all
    rewards.
    """
    centered = R - torch.stack([R[group == i].mean() for i in group])
    return _divided_by(centered, R.std())


def _over_sample(R: Tensor, group: Tensor) -> Tensor:
    """Return rewards less the batch's mean, divided by the sample's standard deviation
    (N - 1).
    """
    return _divided_by(R - R.mean(), R.std())


def _whitened(R: Tensor, group: Tensor) -> Tensor:
    """Return the rewards [N] as ROLL whitens them over the batch."""
    return _functions().masked_whiten(R[:, None], torch.ones(len(R), 1))[:, 0]


def _zeros(R: Tensor, group: Tensor) -> Tensor:
    """Return an advantage of 0 for each response."""
    return torch.zeros_like(R)


def _gae(name: str, lam: float) -> Callable[..., Tensor]:
    """Return ROLL's GAE (gae) or its returns (gae_returns), as a function of rewards,
    values and mask.
    """

    def answer(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return what compute_advantage writes into the batch."""
        batch = {"token_level_rewards": rewards, "values": values}
        data = SimpleNamespace(batch=batch, meta_info={})
        _functions().compute_advantage(data, 1.0, lam, "gae", response_mask=mask)
        return batch["advantages" if name == "gae" else "returns"]

    return token_parts.on_trained(answer)


def _gae_of_every_slot(name: str, lam: float) -> Callable[..., Tensor]:
    """Return a reference of GAE in which each slot is a step, with its value."""

    def answer(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return the advantages or returns of trained slots."""
        every = torch.ones_like(mask)
        of_name = token_parts.ADVANTAGES[name]
        A = of_name(rewards, values, every, gamma=1.0, lam=lam)
        return torch.where(mask, A, 0)

    return answer


def _gae_parts(lam: float) -> tuple[Component, ...]:
    """Return ROLL's GAE and its returns, with this lambd."""
    return tuple(
        Component(
            "token_advantages",
            f"{name}, gamma=1, lambd={lam:g}",
            _gae(name, lam),
            name,
            {"gamma": 1.0, "lam": lam},
            (Fault(EVERY_SLOT, _gae_of_every_slot(name, lam)),),
            tol=1e-5,
        )
        for name in ("gae", "gae_returns")
    )


def _value_loss(clip: float | None) -> Callable[..., Tensor]:
    """Return the loss of ROLL's CriticWorker, as a function of values, old values,
    returns and mask.
    """

    def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        """Return the loss of a worker that was not set up."""
        worker_class = importlib.import_module("roll.pipeline.base_worker").CriticWorker
        worker = object.__new__(worker_class)
        worker.pipeline_config = SimpleNamespace(value_clip=clip)
        worker.forward_func_values = lambda **_: (values, None)
        batch = {"values": old, "returns": returns}
        batch["response_mask"] = torch.cat([mask[:, :1], mask], 1).to(values)
        value, _ = worker.loss_func(SimpleNamespace(batch=batch), values)
        return value

    return loss


def _divergence(objective: str, temperature: float) -> Callable[..., Tensor]:
    """Return ROLL's divergence of this kd_objective, as a function of logits and mask,
    with the mean over the tokens as its worker has it.
    """

    def loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over the tokens."""
        module = importlib.import_module("roll.pipeline.distill.various_divergence")
        config = SimpleNamespace(kd_temperature=temperature, kd_objective=objective)
        lp = (teacher / temperature).log_softmax(-1)
        impossible = torch.zeros_like(lp, dtype=torch.bool)
        per_token = module.VariousDivergence(config)(student, lp.exp(), lp, impossible)
        mean: Tensor = per_token[mask].mean()
        return mean

    return loss


EVERY_SLOT = "slots outside of the response are steps too, with their values"


def _parts() -> tuple[Component, ...]:
    """Return the parts of ROLL that are compared by themselves, such as its advantages."""
    equal = ("uneven", "one")  # its groups are of one size
    return (
        Component(
            "advantages",
            "grpo",
            _normalized_rewards("group", "group"),
            "group_norm",
            leaves_out=equal,
        ),
        Component(
            "advantages",
            "grpo, one response a prompt",
            _normalized_rewards("group", "group", 1),
            _zeros,
            words="0",
            reasons=(
                Fault(
                    "one response has no standard deviation: NaN",
                    lambda R, g: R * torch.nan,
                ),
            ),
        ),
        Component(
            "advantages",
            "mean group, std none",
            _normalized_rewards("group", None),
            "group_mean",
            leaves_out=equal,
        ),
        Component(
            "advantages",
            "mean group, std batch",
            _normalized_rewards("group", "batch"),
            "group_mean_whiten",
            leaves_out=equal,
            reasons=(
                Fault(
                    "over the standard deviation of the rewards, not of what is left of them",
                    _over_rewards,
                ),
            ),
        ),
        Component(
            "advantages",
            "mean batch, std batch",
            _normalized_rewards("batch", "batch"),
            "whiten",
            reasons=(
                Fault(
                    "the standard deviation is the sample's (N - 1) and has 1e-6 added",
                    _over_sample,
                ),
            ),
        ),
        Component(
            "advantages",
            "whiten_advantages",
            _whitened,
            "whiten",
            reasons=(Fault(SAMPLE, whiten_by_sample),),
        ),
        *kls(
            lambda lp, ref, name: _functions().compute_approx_kl(lp, ref, None, name),
            {"kl": "k1", "mse": "k2", "k3": "k3"},
            {"k3": (clamp_kl(k3),)},
        ),
        Component(
            "logprobs",
            "log_probs_from_logits",
            lambda z, tokens, t: _functions().log_probs_from_logits(z / t, tokens),
            "token_log_probs",
            tol=1e-4,
        ),
        Component(
            "aggregation",
            "token-mean",
            _aggregation("token-mean"),
            "token-mean",
            reasons=(
                Fault(
                    "the mask is not applied: every slot counts",
                    lambda x, mask: x.sum() / mask.sum(),
                ),
            ),
        ),
        *(
            Component("aggregation", k, _aggregation(k), k)
            for k in ("seq-mean-token-mean", "seq-mean-token-sum")
        ),
        Component(
            "aggregation",
            "seq-mean-token-sum-norm",
            _aggregation("seq-mean-token-sum-norm"),
            "seq-mean-token-sum-norm",
            {"length": 6},
            reasons=(
                Fault(
                    "a sum over responses, not their mean",
                    lambda x, mask: (x * mask).sum() / 6,
                ),
            ),
        ),
        *_gae_parts(1.0),
        *_gae_parts(0.95),
        Component(
            "value",
            "CriticWorker, value_clip=0.2",
            _value_loss(0.2),
            "clipped, seq-mean-token-mean",
            {"clip": 0.2},
            tol=1e-6,
        ),
        Component(
            "value",
            "CriticWorker, value_clip=None",
            _value_loss(None),
            "mse, seq-mean-token-mean",
            tol=1e-6,
        ),
        *(
            Component(
                "distillation",
                f"{objective}, kd_temperature={temperature:g}",
                _divergence(objective, temperature),
                promise,
                {"temperature": temperature},
                tol=1e-5,
            )
            for objective, promise in (
                ("forward_kl", "forward_kl"),
                ("reverse_kl", "reverse_kl"),
                ("js_divergence", "jsd"),
            )
            for temperature in (1.0, 2.0)
        ),
    )


REMARKS = (
    "loss_func of the RLVR workers themselves, called on a worker that was not set up (no ray, no model); "
    f"{DEFAULT_WORKER} is the one that a pipeline has unless it names ActorPGWorker, whose losses are the other rows.",
    "Its strategies multiply by the number of micro-batches and divide by the accumulation steps, so that "
    "micro-batches add up; log-probabilities and advantages arrive masked. TOPR's sign is the score's, here A's.",
    "Divergences get the teacher's probabilities at kd_temperature. Not covered: adaptive_kl, the skewed ones, a teacher's "
    "top k, tensor parallelism of the vocabulary.",
    "Not covered: the agentic workers, train-infer weights and filters, difficulty and length weights, several ranks.",
)
ROLL = Framework(
    "roll",
    pin=PIN,
    modes=_modes,
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    out_of_scope={
        "kimi15": "no objective of the registry: REINFORCE with a squared log-ratio penalty"
    },
    remarks=REMARKS,
)
